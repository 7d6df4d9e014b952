//! Resource limits of a container, in the terms of the kernel's resource controllers (cgroups(7)).

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::size::{digits, span_us};
use crate::{DiskRate, Invalid};

/// Tasks of a new container without `--pids` and without a setting of the operator; podman's default.
pub const TASKS_DEFAULT: u32 = 2048;

/// LIMIT: the kernel's most tasks of a 64-bit host (PID_MAX_LIMIT). So many are no limit.
pub const TASKS_UNLIMITED: u32 = 4_194_304;

/// Limits of one container. `None` leaves the kernel's default, which is "no limit".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// CPU time per wall time, in thousandths of one CPU (`cpu.max`).
    pub cpu_max_milli: Option<u32>,
    /// CPU time per wall time that is guaranteed, in thousandths of one CPU; 0 is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_reserve_milli: Option<u32>,
    /// The most CPU time while the host has idle CPUs, in thousandths of one CPU; 0 is `cpu_max_milli`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_idle_rate_milli: Option<u32>,
    /// Period in which `cpu_max_milli` is counted, in microseconds (`cpu.max`, default 100,000).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_period_us: Option<u32>,
    /// CPU time that may be saved up for use above `cpu_max_milli` (`cpu.max.burst`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_burst: Option<CpuBurst>,
    /// Share of contended CPU time, 1 to 10,000 (`cpu.weight`, default 100); 0 is none (`cpu.idle`): the container runs
    /// while CPUs are idle.
    pub cpu_weight: Option<u32>,
    /// CPUs it may run on, in the kernel's list format (`cpuset.cpus`).
    pub cpuset_cpus: Option<String>,
    /// Memory before reclaim and then the OOM killer, in bytes (`memory.max`).
    pub memory_max_bytes: Option<u64>,
    /// Memory that is guaranteed, in bytes (`memory.min`); 0 is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_min_bytes: Option<u64>,
    /// Memory that is reclaimed last, in bytes (`memory.low`); 0 is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_low_bytes: Option<u64>,
    /// Memory above which the container is slowed down and reclaimed, in bytes (`memory.high`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_high_bytes: Option<u64>,
    /// Swap, in bytes, not counting memory (`memory.swap.max`).
    pub swap_max_bytes: Option<u64>,
    /// Tasks (`pids.max`); from [`TASKS_UNLIMITED`] on none.
    pub pids_max: Option<u32>,
    /// Sockets of IPv4 and IPv6; 0 is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets_max: Option<u32>,
    /// Share of contended disk time, 1 to 10,000 (`io.weight`, default 100).
    pub io_weight: Option<u32>,
    /// The most bytes and requests per second on disks (`io.max`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk_rates: Vec<DiskRate>,
    /// Size of the file system with all that the container writes outside of volumes; `None` is that of the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Files and directories in that file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_inodes: Option<u32>,
    /// The place of that file system is taken at once.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub disk_guaranteed: bool,
    /// Bandwidth that is guaranteed at the uplink, in bits per second; 0 is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_rate_bps: Option<u64>,
    /// The most bandwidth at the uplink, in bits per second; 0 is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_ceil_bps: Option<u64>,
    /// Share of the bandwidth that is not guaranteed, 100 to 10,000 (default 100).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_weight: Option<u32>,
}

/// CPU time that a container saves up while it is idle, and may then use above its quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuBurst {
    /// In microseconds per period.
    Us(u32),
    /// In percent of the quota.
    Percent(u32),
}

impl FromStr for CpuBurst {
    type Err = Invalid;

    /// Parses `20ms`, `50%`, or a bare number of microseconds.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let expected = "a time such as 20ms, a percentage of the quota up to 100%, or microseconds";
        let bad = || Invalid::new("CPU burst", text, expected);
        match text.strip_suffix('%') {
            Some(percent) => {
                let percent = digits(percent).filter(|percent| *percent <= 100);
                percent.map(Self::Percent).ok_or_else(bad)
            }
            None => span_us(text).map(Self::Us).ok_or_else(bad),
        }
    }
}

impl Limits {
    /// Returns the most tasks; `None` if there is no limit.
    pub fn tasks_max(&self) -> Option<u32> {
        self.pids_max.filter(|max| *max < TASKS_UNLIMITED)
    }

    /// Returns the most sockets; `None` if there is no limit.
    pub fn most_sockets(&self) -> Option<u32> {
        self.sockets_max.filter(|most| *most > 0)
    }

    /// Replaces the limits that `new` has.
    pub fn replace(&mut self, new: &Self) {
        let new = new.clone();
        DiskRate::replace(&mut self.disk_rates, &new.disk_rates);
        *self = Self {
            cpu_max_milli: new.cpu_max_milli.or(self.cpu_max_milli),
            cpu_reserve_milli: new.cpu_reserve_milli.or(self.cpu_reserve_milli),
            cpu_idle_rate_milli: new.cpu_idle_rate_milli.or(self.cpu_idle_rate_milli),
            cpu_period_us: new.cpu_period_us.or(self.cpu_period_us),
            cpu_burst: new.cpu_burst.or(self.cpu_burst),
            cpu_weight: new.cpu_weight.or(self.cpu_weight),
            cpuset_cpus: new.cpuset_cpus.or(self.cpuset_cpus.take()),
            memory_max_bytes: new.memory_max_bytes.or(self.memory_max_bytes),
            memory_min_bytes: new.memory_min_bytes.or(self.memory_min_bytes),
            memory_low_bytes: new.memory_low_bytes.or(self.memory_low_bytes),
            memory_high_bytes: new.memory_high_bytes.or(self.memory_high_bytes),
            swap_max_bytes: new.swap_max_bytes.or(self.swap_max_bytes),
            pids_max: new.pids_max.or(self.pids_max),
            sockets_max: new.sockets_max.or(self.sockets_max),
            io_weight: new.io_weight.or(self.io_weight),
            disk_rates: std::mem::take(&mut self.disk_rates),
            disk_bytes: new.disk_bytes.or(self.disk_bytes),
            disk_inodes: new.disk_inodes.or(self.disk_inodes),
            disk_guaranteed: new.disk_guaranteed || self.disk_guaranteed,
            net_rate_bps: new.net_rate_bps.or(self.net_rate_bps),
            net_ceil_bps: new.net_ceil_bps.or(self.net_ceil_bps),
            net_weight: new.net_weight.or(self.net_weight),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_earlier_version_are_read_and_written_as_before() {
        let old = concat!(
            r#"{"cpu_max_milli":1500,"cpu_weight":null,"cpuset_cpus":null,"#,
            r#""memory_max_bytes":null,"swap_max_bytes":null,"pids_max":null,"io_weight":null}"#,
        );
        let limits: Limits = serde_json::from_str(old).unwrap();
        assert_eq!(limits.cpu_max_milli, Some(1500));
        assert_eq!(serde_json::to_string(&limits).unwrap(), old);
        let new = Limits {
            cpu_reserve_milli: Some(500),
            cpu_idle_rate_milli: Some(2000),
            cpu_period_us: Some(10_000),
            cpu_burst: Some(CpuBurst::Percent(50)),
            memory_min_bytes: Some(1 << 20),
            memory_low_bytes: Some(2 << 20),
            memory_high_bytes: Some(3 << 20),
            ..limits
        };
        let text = serde_json::to_string(&new).unwrap();
        assert_eq!(serde_json::from_str::<Limits>(&text).unwrap(), new);
    }

    #[test]
    fn replaced_limits_keep_values_that_are_not_given() {
        let mut limits = Limits {
            cpu_max_milli: Some(1000),
            cpuset_cpus: Some("0".into()),
            pids_max: Some(5),
            ..Limits::default()
        };
        limits.replace(&Limits {
            cpu_reserve_milli: Some(0),
            pids_max: Some(6),
            ..Limits::default()
        });
        assert_eq!((limits.cpu_max_milli, limits.pids_max), (Some(1000), Some(6)));
        assert_eq!((limits.cpu_reserve_milli, limits.cpuset_cpus.as_deref()), (Some(0), Some("0")));
    }

    #[test]
    fn stored_burst_has_its_unit() {
        let json = |burst| serde_json::to_string(&burst).unwrap();
        assert_eq!(json(CpuBurst::Us(5)), r#"{"us":5}"#);
        assert_eq!(json(CpuBurst::Percent(5)), r#"{"percent":5}"#);
    }
}
