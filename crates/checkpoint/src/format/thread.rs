//! A thread.

use dormouse_kernel::call::Registers;
use serde::{Deserialize, Serialize};

use super::{AlternateStack, Bytes, Credentials, Schedule, Signal};

/// A thread.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Thread {
    /// Its id, in the container's own pid namespace.
    pub tid: u32,
    /// What `ps -L` shows.
    pub name: String,
    /// General registers; a call that was interrupted to stop the thread is about to begin again.
    pub registers: Registers,
    /// All other registers, as NT_X86_XSTATE has them.
    pub extended: Bytes,
    /// Blocked signals.
    pub mask: u64,
    /// Signals for it alone that wait.
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
    /// A wait with a time limit, which goes on with what is left of it.
    #[serde(default)]
    pub restart: Option<Restart>,
    /// A wait with a time limit that begins again.
    #[serde(default)]
    pub time_limit: Option<TimeLimit>,
    /// Its own system call filters, the oldest first.
    #[serde(default)]
    pub filters: Vec<Filter>,
    /// Who it is.
    pub credentials: Credentials,
    /// PR_GET_PDEATHSIG.
    #[serde(default)]
    pub parent_death_signal: i32,
    /// nice(2).
    #[serde(default)]
    pub nice: i32,
    /// When it runs.
    #[serde(default)]
    pub schedule: Schedule,
    /// personality(2).
    #[serde(default)]
    pub personality: u32,
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
    /// What stands before abort handlers.
    pub signature: u32,
}

/// A call that waits for some time at most, and had waited for a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// The call's number.
    pub call: i64,
    /// Its arguments.
    pub args: [u64; 6],
    /// What is left of the time; `None` where there is no limit (poll(2) keeps even that).
    pub remaining_ns: Option<u64>,
}

/// What is left of the time of a call that begins again: as a whole, or with what memory says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeLimit {
    /// The call's number.
    pub call: i64,
    /// What is left, at most.
    pub left_ns: u64,
    /// Where in memory the kernel has written what is left (select(2)).
    #[serde(default)]
    pub at: Option<u64>,
    /// There in seconds and microseconds; nanoseconds otherwise.
    #[serde(default)]
    pub microseconds: bool,
}

impl TimeLimit {
    /// It waits for some time, of which only this record says what is left.
    pub(crate) fn begins_anew(&self) -> bool {
        self.at.is_none() && self.call != libc::SYS_clock_nanosleep
    }
}
