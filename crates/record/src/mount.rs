//! Mount namespaces (mount_namespaces(7)) that processes have made for themselves, and their mounts
//! in the container's own.

use serde::{Deserialize, Serialize};

/// The mounts of one namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounts {
    /// The root, then all others, each after its parent, in an order in which they can be made.
    pub mounts: Vec<Mount>,
    /// The container's own namespace: these mounts were made by processes, on top of the mounts of
    /// the configuration, and none of them is a root.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
}

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// The index of its parent; `None` for the root, and in the container's own namespace.
    pub parent: Option<usize>,
    /// The mount point, as a path below the root of the parent; empty if it covers that root. In
    /// the container's own namespace the path from its root.
    pub place: String,
    /// The mounted file system.
    pub source: MountSource,
    /// All its attributes: `MOUNT_ATTR_*` (mount_setattr(2)).
    pub attributes: u64,
    /// Shared (MS_SHARED), with no other mount in its peer group yet.
    #[serde(default)]
    pub shared: bool,
    /// The name that mountinfo shows as the source of a new file system; `None` for that of its type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The source of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum MountSource {
    /// A file or directory of the container's configuration.
    Container {
        /// The path.
        path: String,
    },
    /// A part of another mount, which is made before.
    Mount {
        /// The object of the namespace of that mount.
        namespace: usize,
        /// Its index there.
        mount: usize,
        /// The path below its root.
        path: String,
    },
    /// A tmpfs instance.
    Tmpfs {
        /// Its options.
        options: Vec<(String, String)>,
        /// The object with its contents.
        contents: usize,
    },
    /// All message queues of an IPC namespace (mqueue).
    MessageQueues {
        /// The namespace, an object.
        namespace: usize,
    },
    /// A procfs instance.
    Proc {
        /// Its options.
        options: Vec<(String, String)>,
    },
}

impl Mount {
    /// Bytes of the longest name of a source that fsconfig(2) takes.
    pub const NAME_BYTES_MAX: usize = 255;

    /// The possible attributes: ro, nosuid, nodev, noexec, noatime, strictatime, nodiratime,
    /// nosymfollow.
    pub const ATTRIBUTES: u64 = 0x20_00bf;
    /// The same, with the whole field of the access-time modes (MOUNT_ATTR__ATIME).
    pub const ALL_ATTRIBUTES: u64 = 0x20_00ff;
}

/// Options of a tmpfs that are saved.
pub const TMPFS_OPTIONS: [&str; 5] = ["size", "nr_inodes", "mode", "uid", "gid"];
/// Options of a procfs that are saved.
pub const PROC_OPTIONS: [&str; 2] = ["hidepid", "subset"];
