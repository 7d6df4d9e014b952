//! A process: what its threads share.

use serde::{Deserialize, Serialize};

use super::{Action, Descriptor, HeldLock, IntervalTimer, Lease, PosixTimer, Signal, Thread};

/// A process. Ids are those of the container's own pid namespace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its parent's; 0 for the first.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// What `ps` shows.
    pub name: String,
    /// The status it ended with (wait(2)), where it waits to be reaped; all below is then empty.
    #[serde(default)]
    pub ended: Option<i32>,
    /// It is stopped by this signal (job control).
    #[serde(default)]
    pub stopped: Option<i32>,
    /// Its address space, an index.
    #[serde(default)]
    pub memory: Option<usize>,
    /// Its threads, the first having the process's id.
    #[serde(default)]
    pub threads: Vec<Thread>,
    /// Its open descriptors, by number.
    #[serde(default)]
    pub descriptors: Vec<Descriptor>,
    /// Its locks of files.
    #[serde(default)]
    pub locks: Vec<HeldLock>,
    /// Leases that it takes again for all who have the same open file.
    #[serde(default)]
    pub leases: Vec<Lease>,
    /// Its working directory, an object.
    #[serde(default)]
    pub directory: Option<usize>,
    /// Its root, by its path from the container's, where it is another (chroot(2)).
    #[serde(default)]
    pub root: Option<String>,
    /// Its control group, by its path below the container's own ([`super::Cgroups`]).
    #[serde(default)]
    pub cgroup: Option<String>,
    /// The mount namespace it is in, an object; none is the container's own.
    #[serde(default)]
    pub mounts: Option<usize>,
    /// The UTS namespace it is in, an object; none is the container's own.
    #[serde(default)]
    pub uts: Option<usize>,
    /// The IPC namespace it is in, an object; none is the container's own.
    #[serde(default)]
    pub ipc: Option<usize>,
    /// The network namespace it is in, an object; none is the container's own.
    #[serde(default)]
    pub net: Option<usize>,
    /// The time namespace it is in, an object; none is the container's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<usize>,
    /// The one that it has made for its children, an object; none is the one it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_for_children: Option<usize>,
    /// The cgroup namespace it is in, an object; none is the container's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup_namespace: Option<usize>,
    /// The user namespace it is in, an object; none is the container's own. Ids of its threads are the
    /// container's, capabilities are those in there.
    #[serde(default)]
    pub user: Option<usize>,
    /// umask(2).
    #[serde(default)]
    pub umask: u32,
    /// Resource limits by number.
    #[serde(default)]
    pub limits: Vec<Limit>,
    /// What signals do, those that are not as in a new program.
    #[serde(default)]
    pub actions: Vec<Action>,
    /// Signals for the process as a whole that wait.
    #[serde(default)]
    pub pending: Vec<Signal>,
    /// setitimer(2): real, virtual, profiling; those that run.
    #[serde(default)]
    pub interval_timers: Vec<IntervalTimer>,
    /// timer_create(2).
    #[serde(default)]
    pub timers: Vec<PosixTimer>,
    /// PR_GET_DUMPABLE.
    #[serde(default)]
    pub dumpable: u64,
    /// PR_GET_CHILD_SUBREAPER.
    #[serde(default)]
    pub subreaper: bool,
    /// `/proc/PID/oom_score_adj`.
    #[serde(default)]
    pub oom_score_adj: i32,
}

/// One resource limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// The kernel's number.
    pub resource: u32,
    /// `u64::MAX` is unlimited.
    pub soft: u64,
    /// The same.
    pub hard: u64,
}

/// Who a thread is. Ids are the container's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Real, effective, saved, file system.
    pub uids: [u32; 4],
    /// The same.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// PR_GET_SECUREBITS.
    pub securebits: u64,
    /// PR_GET_NO_NEW_PRIVS.
    pub no_new_privileges: bool,
    /// System call filters it has.
    pub filters: u32,
}
