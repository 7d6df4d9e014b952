//! Files that are kept in memory: what is in a container's tmpfs, `/dev/shm` first of all.

use serde::{Deserialize, Serialize};

use super::Run;

/// Everything below one directory that is in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tmpfs {
    /// The directory, inside: `/dev/shm`.
    pub target: String,
    /// The mount namespace that it is in, an object; none is the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
    /// What is in it, directories before what is in them.
    pub entries: Vec<TmpfsEntry>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TmpfsEntry {
    /// Its path below the directory.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Its owner, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
    /// When it was modified, in nanoseconds since the epoch.
    pub modified_ns: i64,
    /// What it is.
    pub what: TmpfsKind,
}

/// Kinds of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum TmpfsKind {
    /// A directory.
    Directory,
    /// A pipe with a name.
    Fifo,
    /// A unix socket; whoever has it bound binds it again.
    Socket,
    /// A device that is none (0, 0), which stands for what is not there.
    Whiteout,
    /// A symbolic link.
    Link {
        /// Where it leads.
        to: String,
    },
    /// A regular file.
    File {
        /// Its length.
        bytes: u64,
        /// Its contents, with offsets for addresses.
        runs: Vec<Run>,
    },
    /// Another name of a regular file.
    Name {
        /// The path of that, which stands before.
        of: String,
    },
}
