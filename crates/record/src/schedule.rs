//! The scheduling of a thread.

use serde::{Deserialize, Serialize};

/// Attributes of sched(7), ioprio_set(2) and prctl(2) that control when a thread runs, without its
/// nice value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Schedule {
    /// `SCHED_*`.
    pub policy: u32,
    /// Children do not inherit a policy or priority above the normal ones.
    pub reset_on_fork: bool,
    /// The priority of SCHED_FIFO and SCHED_RR.
    pub priority: u32,
    /// The thread's own time slice; 0 for the host's.
    pub slice_ns: u64,
    /// The CPUs that it is bound to; empty if it may run on all.
    pub cpus: Vec<u32>,
    /// ioprio_set(2); 0 for none.
    pub io_priority: u32,
    /// How late its timers may expire; 0 for SCHED_FIFO and SCHED_RR.
    pub timer_slack_ns: u64,
}
