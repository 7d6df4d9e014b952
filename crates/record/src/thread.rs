//! A thread.

use dormouse_kernel::call::Registers;
use serde::{Deserialize, Serialize};

use crate::{
    AlternateStack, Bytes, Credentials, Descriptor, HeldLock, MemoryPolicy, Schedule, Signal,
};

/// A thread.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Thread {
    /// Its id, in the container's own pid namespace.
    pub tid: u32,
    /// The name that `ps -L` shows.
    pub name: String,
    /// General registers; a call that the stop of the thread interrupted is about to be restarted.
    pub registers: Registers,
    /// All other registers, in the form of NT_X86_XSTATE.
    pub extended: Bytes,
    /// Blocked signals.
    pub mask: u64,
    /// Pending signals for this thread only.
    #[serde(default)]
    pub pending: Vec<Signal>,
    /// sigaltstack(2).
    #[serde(default)]
    pub alternate_stack: Option<AlternateStack>,
    /// set_robust_list(2): address and length.
    #[serde(default)]
    pub robust_list: (u64, u64),
    /// set_tid_address(2).
    #[serde(default)]
    pub tid_address: u64,
    /// rseq(2).
    #[serde(default)]
    pub rseq: Option<Rseq>,
    /// A wait with a time limit, which continues with the remaining time.
    #[serde(default)]
    pub restart: Option<Restart>,
    /// A wait with a time limit, which starts again.
    #[serde(default)]
    pub time_limit: Option<TimeLimit>,
    /// Its own system call filters, the oldest first.
    #[serde(default)]
    pub filters: Vec<Filter>,
    /// Its user and group ids, capabilities and securebits.
    pub credentials: Credentials,
    /// PR_GET_PDEATHSIG.
    #[serde(default)]
    pub parent_death_signal: i32,
    /// nice(2).
    #[serde(default)]
    pub nice: i32,
    /// Its scheduling attributes.
    #[serde(default)]
    pub schedule: Schedule,
    /// personality(2).
    #[serde(default)]
    pub personality: u32,
    /// PR_GET_TSC: reading the time stamp counter ends in a signal.
    #[serde(default)]
    pub refuses_time_stamps: bool,
    /// arch_prctl(ARCH_GET_CPUID): the instruction ends in a signal.
    #[serde(default)]
    pub refuses_cpuid: bool,
    /// PR_MCE_KILL_GET; none is the host's default.
    #[serde(default)]
    pub memory_error_policy: Option<u32>,
    /// PR_GET_SPECULATION_CTRL of store bypass, indirect branches and the cache flush, where it was set.
    #[serde(default)]
    pub speculation: [u32; 3],
    /// Working directory and umask, where the thread has them to itself (unshare(2) of CLONE_FS).
    #[serde(default)]
    pub place: Option<OwnPlace>,
    /// The first thread of its process with which it shares such a directory and umask, by its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place_of: Option<u32>,
    /// Descriptors, where the thread has a table to itself (unshare(2) of CLONE_FILES).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<OwnTable>,
    /// The first thread of its process with which it shares such a table, by its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table_of: Option<u32>,
    /// The thread does not share the undo values of semaphores with its process (unshare(2) of CLONE_SYSVSEM).
    #[serde(default)]
    pub own_undo: bool,
    /// The thread shares the I/O context of its process (clone(2), CLONE_IO).
    #[serde(default)]
    pub shares_io: bool,
    /// set_mempolicy(2); none is the host's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_policy: Option<MemoryPolicy>,
    /// `/proc/PID/task/TID/loginuid`: the login user, by the container's ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub login_uid: Option<u32>,
    /// PR_SET_SYSCALL_USER_DISPATCH.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch: Option<Dispatch>,
}

impl Thread {
    /// The table that the thread is the first of its process to have.
    pub fn own_table(&self) -> Option<Table<'_>> {
        let table = self.table.as_ref()?;
        Some(Table { task: self.tid, descriptors: &table.descriptors, locks: &table.locks })
    }

    /// PR_SPEC_DISABLE, PR_SPEC_FORCE_DISABLE, PR_SPEC_DISABLE_NOEXEC.
    pub const SPECULATION_SET: u32 = 4 | 8 | 16;
}

/// What a thread has to itself that threads share otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnPlace {
    /// Its working directory, an object.
    pub directory: usize,
    /// umask(2).
    pub umask: u32,
}

/// A table of descriptors that a thread does not share with its process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OwnTable {
    /// The open descriptors, by number.
    pub descriptors: Vec<Descriptor>,
    /// Locks of files.
    #[serde(default)]
    pub locks: Vec<HeldLock>,
}

/// A table of descriptors, of a process or of a thread that has one to itself.
#[derive(Debug, Clone, Copy)]
pub struct Table<'r> {
    /// The id of the process or of the thread.
    pub task: u32,
    /// The open descriptors, by number.
    pub descriptors: &'r [Descriptor],
    /// Locks of files.
    pub locks: &'r [HeldLock],
}

/// A system call filter (seccomp(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// `SECCOMP_FILTER_FLAG_LOG`.
    pub flags: u32,
    /// Its instructions, 8 bytes each.
    pub code: Bytes,
}

/// Restartable sequences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rseq {
    /// Address of the structure.
    pub address: u64,
    /// Its length.
    pub length_bytes: u32,
    /// The value in front of abort handlers.
    pub signature: u32,
}

/// Which system calls are reported to the thread itself instead of made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispatch {
    /// Those from inside the range of addresses; otherwise those from outside.
    pub from_inside: bool,
    /// The first address of the range.
    pub start: u64,
    /// The length of the range.
    pub length_bytes: u64,
    /// The address of the byte that switches this on and off; 0 for none.
    pub selector: u64,
}

/// A blocking call with a time limit, of which a part had passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// The call's number.
    pub call: i64,
    /// Its arguments.
    pub args: [u64; 6],
    /// The remaining time; `None` without a limit (only poll(2) records that).
    pub remaining_ns: Option<u64>,
}

/// The remaining time of a call that starts again: with its whole limit, or with the limit in
/// memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeLimit {
    /// The call's number.
    pub call: i64,
    /// The remaining time, at most.
    pub left_ns: u64,
    /// The address to which the kernel wrote the remaining time (select(2)).
    #[serde(default)]
    pub at: Option<u64>,
    /// Seconds and microseconds at that address; nanoseconds otherwise.
    #[serde(default)]
    pub microseconds: bool,
}

impl TimeLimit {
    /// Whether it is a wait with a limit that is only in this record.
    pub fn begins_anew(&self) -> bool {
        self.at.is_none() && self.call != libc::SYS_clock_nanosleep
    }
}
