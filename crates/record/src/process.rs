//! A process: the state that its threads share.

use serde::{Deserialize, Serialize};

use crate::{
    Action, Descriptor, HeldLock, IntervalTimer, Lease, Notice, PosixTimer, Signal, Table, Thread,
};

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
    /// The name that `ps` shows.
    pub name: String,
    /// The exit status (wait(2)) of a zombie; all fields below but its ids are then empty.
    #[serde(default)]
    pub ended: Option<i32>,
    /// The user and group of a zombie.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ids: Option<(u32, u32)>,
    /// The signal that stopped it (job control).
    #[serde(default)]
    pub stopped: Option<i32>,
    /// Whether its parent has waited for that stop (waitid(2)); none in what older versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_was_told: Option<bool>,
    /// Its address space, an index.
    #[serde(default)]
    pub memory: Option<usize>,
    /// Its threads; the first has the process's id.
    #[serde(default)]
    pub threads: Vec<Thread>,
    /// Its open descriptors, by number.
    #[serde(default)]
    pub descriptors: Vec<Descriptor>,
    /// The first process with the same table of descriptors (clone(2), CLONE_FILES), by its id; the descriptors of
    /// both are equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table_of: Option<u32>,
    /// Its locks of files.
    #[serde(default)]
    pub locks: Vec<HeldLock>,
    /// Leases that it takes again, on behalf of all processes with the same file description.
    #[serde(default)]
    pub leases: Vec<Lease>,
    /// Notices of its open files, which it sets for all that have the same open file; of a pidfd, for itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<Notice>,
    /// Its working directory, an object.
    #[serde(default)]
    pub directory: Option<usize>,
    /// The first process with the same working directory and umask (clone(2), CLONE_FS), by its id; both are equal
    /// in the two records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place_of: Option<u32>,
    /// The first process with the same undo values of semaphores (clone(2), CLONE_SYSVSEM), by its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undo_of: Option<u32>,
    /// The first process with the same I/O context (clone(2), CLONE_IO), by its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_of: Option<u32>,
    /// Its root, by its path from the container's, if that differs (chroot(2)).
    #[serde(default)]
    pub root: Option<String>,
    /// Its control group, by its path below the container's own ([`crate::Cgroups`]).
    #[serde(default)]
    pub cgroup: Option<String>,
    /// The object of its mount namespace; `None` for the container's own.
    #[serde(default)]
    pub mounts: Option<usize>,
    /// The object of its UTS namespace; `None` for the container's own.
    #[serde(default)]
    pub uts: Option<usize>,
    /// The object of its IPC namespace; `None` for the container's own.
    #[serde(default)]
    pub ipc: Option<usize>,
    /// The object of its network namespace; `None` for the container's own.
    #[serde(default)]
    pub net: Option<usize>,
    /// The object of its time namespace; `None` for the container's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<usize>,
    /// The object of the time namespace of its children, if it has made one; `None` for its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_for_children: Option<usize>,
    /// The object of its cgroup namespace; `None` for the container's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup_namespace: Option<usize>,
    /// The object of its user namespace; `None` for the container's own. Ids of its threads are the
    /// container's, capabilities are those in its user namespace.
    #[serde(default)]
    pub user: Option<usize>,
    /// umask(2).
    #[serde(default)]
    pub umask: u32,
    /// Resource limits by number.
    #[serde(default)]
    pub limits: Vec<Limit>,
    /// Signal actions that differ from a new program.
    #[serde(default)]
    pub actions: Vec<Action>,
    /// Pending signals for the process as a whole.
    #[serde(default)]
    pub pending: Vec<Signal>,
    /// Running timers of setitimer(2): real, virtual, profiling.
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
    /// `/proc/PID/autogroup`: the nice value of its session as a whole.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub autogroup_nice: i32,
    /// `/proc/PID/coredump_filter`: the kinds of memory that a core dump contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_dump_filter: Option<u32>,
    /// PR_GET_MDWE: memory that was writable never becomes executable.
    #[serde(default)]
    pub write_or_execute: u32,
    /// Registrations of membarrier(2), by the commands that made them.
    #[serde(default)]
    pub barriers: u32,
    /// PR_GET_MEMORY_MERGE.
    #[serde(default)]
    pub merges_memory: bool,
}

impl Process {
    /// The table of the process. A process that shares the table of another one has the same descriptors, and the
    /// locks that it has set itself.
    pub fn table(&self) -> Table<'_> {
        Table { task: self.pid, descriptors: &self.descriptors, locks: &self.locks }
    }

    /// All tables of its threads, that of the process first.
    pub fn tables(&self) -> impl Iterator<Item = Table<'_>> {
        std::iter::once(self.table()).chain(self.threads.iter().filter_map(Thread::own_table))
    }
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

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &i32) -> bool {
    *number == 0
}
