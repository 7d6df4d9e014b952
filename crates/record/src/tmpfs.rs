//! Files in memory: the contents of a container's tmpfs, foremost `/dev/shm`.

use serde::{Deserialize, Serialize};

use crate::Run;

/// The contents of one tmpfs mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tmpfs {
    /// The directory, inside: `/dev/shm`.
    pub target: String,
    /// The object of its mount namespace; `None` for the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
    /// Its entries, directories before their contents.
    pub entries: Vec<TmpfsEntry>,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TmpfsEntry {
    /// Its path below the directory.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Its owner, by the ids inside.
    pub uid: u32,
    /// Its group, by the ids inside.
    pub gid: u32,
    /// Its time of modification, in nanoseconds since the epoch.
    pub modified_ns: i64,
    /// Its kind.
    pub what: TmpfsKind,
}

/// Kinds of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum TmpfsKind {
    /// A directory.
    Directory,
    /// A named pipe.
    Fifo,
    /// A unix socket; its owner binds it again.
    Socket,
    /// A character device 0, 0, which overlayfs uses for a deleted name (whiteout).
    Whiteout,
    /// A symbolic link.
    Link {
        /// Its target.
        to: String,
    },
    /// A regular file.
    File {
        /// Its length.
        bytes: u64,
        /// Its contents; addresses are offsets.
        runs: Vec<Run>,
    },
    /// A hard link to a regular file.
    Name {
        /// The path of that file, which is before it.
        of: String,
    },
}
