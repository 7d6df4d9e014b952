//! How a thread is scheduled.

use serde::{Deserialize, Serialize};

/// What sched(7), ioprio_set(2) and prctl(2) say about when a thread runs, less its nice value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Schedule {
    /// `SCHED_*`.
    pub policy: u32,
    /// Its children do not inherit a policy that is above theirs.
    pub reset_on_fork: bool,
    /// Of SCHED_FIFO and SCHED_RR.
    pub priority: u32,
    /// A slice that is not the host's; 0 for none.
    pub slice_ns: u64,
    /// The CPUs it was bound to; empty where it may run on all.
    pub cpus: Vec<u32>,
    /// ioprio_set(2); 0 for none.
    pub io_priority: u32,
    /// How late a timer may ring; 0 where nobody may wait (SCHED_FIFO and SCHED_RR).
    pub timer_slack_ns: u64,
}
