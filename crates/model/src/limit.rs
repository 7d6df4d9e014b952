//! Resource limits of a container, in the terms of the kernel's resource controllers (cgroups(7)).

use serde::{Deserialize, Serialize};

/// Limits of one container. `None` leaves the kernel's default, which is "no limit".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// CPU time per wall time, in thousandths of one CPU (`cpu.max`).
    pub cpu_max_milli: Option<u32>,
    /// Share of contended CPU time, 1 to 10,000 (`cpu.weight`, default 100).
    pub cpu_weight: Option<u32>,
    /// CPUs it may run on, in the kernel's list format (`cpuset.cpus`).
    pub cpuset_cpus: Option<String>,
    /// Memory before reclaim and then the OOM killer, in bytes (`memory.max`).
    pub memory_max_bytes: Option<u64>,
    /// Swap, in bytes, not counting memory (`memory.swap.max`).
    pub swap_max_bytes: Option<u64>,
    /// Tasks (`pids.max`).
    pub pids_max: Option<u32>,
    /// Share of contended disk time, 1 to 10,000 (`io.weight`, default 100).
    pub io_weight: Option<u32>,
}
