//! Errors of cgroup operations.

use std::time::Duration;

use dormouse_model::{Contradiction, Invalid};

use crate::error::{CallError, ErrorKind};

/// A step on cgroups that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// A limit or a name that no kernel would take. Nothing was made or changed.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// Limits that contradict each other. Nothing was made or changed.
    #[error(transparent)]
    Contradiction(#[from] Contradiction),
    /// A limit was requested whose controller, or whose file, this host does not have.
    #[error("{limit} cannot be limited: {why}")]
    Missing {
        /// The limit, in the words of `dormouse_model::Limits`.
        limit: &'static str,
        /// The missing part and how to get it.
        why: String,
        /// The first kernel that has it.
        since: &'static str,
    },
    /// No cgroup file system is mounted.
    #[error(
        "no cgroup file system is mounted below /sys/fs/cgroup (mount -t cgroup2 cgroup2 \
         /sys/fs/cgroup)"
    )]
    NotMounted,
    /// The table of mounts could not be read.
    #[error("reading the table of mounts")]
    Mounts(#[source] CallError),
    /// The directory that all containers are in could not be prepared.
    #[error("preparing the parent cgroup")]
    Parent(#[source] CallError),
    /// A controller could not be handed down the tree.
    #[error("enabling the controllers {controllers:?} below {below:?}")]
    Enable {
        /// The text written to `cgroup.subtree_control`.
        controllers: String,
        /// The cgroup it was written in.
        below: String,
        /// The cause.
        #[source]
        source: CallError,
    },
    /// A cgroup could not be made.
    #[error("making the cgroup")]
    Make(#[source] CallError),
    /// A cgroup could not be opened.
    #[error("opening the cgroup")]
    Open(#[source] CallError),
    /// A limit was refused by the kernel.
    #[error("setting {limit}")]
    Set {
        /// The limit, in the words of `dormouse_model::Limits`.
        limit: &'static str,
        /// The cause.
        #[source]
        source: CallError,
    },
    /// A value could not be read.
    #[error("reading the cgroup")]
    Read(#[source] CallError),
    /// The device policy could not be set.
    #[error("setting which devices may be used")]
    Devices(#[source] CallError),
    /// Processes could not be frozen or thawed.
    #[error("changing whether the cgroup is frozen")]
    Freeze(#[source] CallError),
    /// Some process would not freeze. All of them were thawed again.
    #[error("processes {pids:?} did not freeze within {waited:?}")]
    StillRunning {
        /// The processes in the cgroup.
        pids: Vec<u32>,
        /// The time waited.
        waited: Duration,
    },
    /// Its memory could not be taken back.
    #[error("taking memory back")]
    Reclaim(#[source] CallError),
    /// Processes could not be killed.
    #[error("killing the processes of the cgroup")]
    Kill(#[source] CallError),
    /// A cgroup could not be removed.
    #[error("removing the cgroup")]
    Remove(#[source] CallError),
    /// A cgroup still has processes after all the waiting.
    #[error("the cgroup still has the processes {pids:?} after {waited:?}")]
    InUse {
        /// The remaining processes.
        pids: Vec<u32>,
        /// The time waited.
        waited: Duration,
    },
    /// A cgroup could not be handed to the container's own root.
    #[error("handing the cgroup to the container")]
    Delegate(#[source] CallError),
}

impl CgroupError {
    /// The kind of the error, for decisions of callers.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid(_) | Self::Contradiction(_) => ErrorKind::Invalid,
            Self::Missing { since, .. } => ErrorKind::Unsupported { since },
            Self::NotMounted => ErrorKind::Unsupported { since: "2.6.24" },
            Self::StillRunning { .. } | Self::InUse { .. } => ErrorKind::Busy,
            Self::Mounts(e)
            | Self::Parent(e)
            | Self::Make(e)
            | Self::Open(e)
            | Self::Read(e)
            | Self::Devices(e)
            | Self::Freeze(e)
            | Self::Reclaim(e)
            | Self::Kill(e)
            | Self::Remove(e)
            | Self::Delegate(e)
            | Self::Enable { source: e, .. }
            | Self::Set { source: e, .. } => e.kind(),
        }
    }
}
