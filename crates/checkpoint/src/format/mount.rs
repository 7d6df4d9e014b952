//! Mount namespaces (mount_namespaces(7)) that processes have made for themselves, and what they have
//! mounted in the container's own.

use serde::{Deserialize, Serialize};

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounts {
    /// The root, then all others, each behind the one that it is in, in an order in which they can be
    /// made.
    pub mounts: Vec<Mount>,
    /// It is the container's own. These are mounted there by processes, on top of what is mounted by the
    /// configuration, and none is a root.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
}

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// The mount that it is in, by its number; none of the root, and in the container's own namespace.
    pub parent: Option<usize>,
    /// Where, by the path below the root of that one; empty where it covers that root. In the
    /// container's own namespace the path from its root.
    pub place: String,
    /// What is mounted.
    pub source: MountSource,
    /// All attributes that it has: `MOUNT_ATTR_*` (mount_setattr(2)).
    pub attributes: u64,
    /// It is shared (MS_SHARED), with nobody yet.
    #[serde(default)]
    pub shared: bool,
}

/// What a mount shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum MountSource {
    /// What the container has at a path, by its configuration.
    Container {
        /// The path.
        path: String,
    },
    /// A part of another mount that is made before.
    Mount {
        /// The namespace that it is in, an object.
        namespace: usize,
        /// Its number there.
        mount: usize,
        /// The path below its root.
        path: String,
    },
    /// A tmpfs of its own.
    Tmpfs {
        /// Its options.
        options: Vec<(String, String)>,
        /// What is in it, an object.
        contents: usize,
    },
    /// All message queues of an IPC namespace.
    MessageQueues {
        /// The namespace, an object.
        namespace: usize,
    },
    /// A procfs of its own.
    Proc {
        /// Its options.
        options: Vec<(String, String)>,
    },
}

impl Mount {
    /// The attributes that there may be: ro, nosuid, nodev, noexec, noatime, strictatime, nodiratime,
    /// nosymfollow.
    pub(crate) const ATTRIBUTES: u64 = 0x20_00bf;
    /// The same, with all that there may be of atime, as one.
    pub(crate) const ALL_ATTRIBUTES: u64 = 0x20_00ff;
}

/// Options of a tmpfs that are kept.
pub(crate) const TMPFS_OPTIONS: [&str; 5] = ["size", "nr_inodes", "mode", "uid", "gid"];
/// Options of a procfs that are kept.
pub(crate) const PROC_OPTIONS: [&str; 2] = ["hidepid", "subset"];
