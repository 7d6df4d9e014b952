//! Readings of the resource use of containers.

use std::time::Duration;

use dormouse_kernel::cgroup;
use dormouse_model::{Cpu, DiskRate};
use serde::Serialize;

/// One container in `stats --json`.
#[derive(Debug, Serialize)]
pub struct Stats {
    /// Identity of the container.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Percent of one CPU, since the reading before.
    pub cpu_percent: f64,
    /// CPU time.
    pub cpu_usage_ns: u64,
    /// Part of it in user mode.
    pub cpu_user_ns: u64,
    /// Part of it in the kernel.
    pub cpu_system_ns: u64,
    /// Time for which processes were stopped by the limit.
    pub cpu_throttled_ns: u64,
    /// Memory in use: processes, page cache and kernel memory.
    pub memory_bytes: u64,
    /// Part of it: file cache that is reclaimed first.
    pub memory_inactive_file_bytes: u64,
    /// The largest memory in use.
    pub memory_peak_bytes: u64,
    /// The limit; null if there is none.
    pub memory_max_bytes: Option<u64>,
    /// Swap in use.
    pub swap_bytes: u64,
    /// Number of tasks.
    pub pids: u64,
    /// The limit; null if there is none.
    pub pids_max: Option<u64>,
    /// Number of sockets of IPv4 and IPv6; absent if they are not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u64>,
    /// The limit; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets_max: Option<u32>,
    /// Bytes read from block devices.
    pub io_read_bytes: u64,
    /// Bytes written to block devices.
    pub io_write_bytes: u64,
    /// Number of processes killed because memory ran out.
    pub oom_kills: u64,
    /// CPU time that is guaranteed, in thousandths of one CPU; 0 if none is.
    pub cpu_reserve_milli: u32,
    /// Share of the CPU time that is not reserved; 0 is none: the container runs while CPUs are idle.
    pub cpu_weight: u32,
    /// The most CPU time, in thousandths of one CPU; null if there is no limit.
    pub cpu_max_milli: Option<u32>,
    /// The most CPU time while the host has idle CPUs, in thousandths of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_idle_rate_milli: Option<u32>,
    /// Bytes read from block devices per second, since the reading before.
    pub io_read_bps: u64,
    /// Bytes written to block devices per second, since the reading before.
    pub io_write_bps: u64,
    /// The most that is read and written per second.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disk_rates: Vec<DiskRate>,
}

impl Stats {
    /// Returns the reading `now` of a container with a contract. `before` is an earlier reading and the
    /// time since then; the CPU share is 0 without one.
    pub fn of(
        id: String,
        name: String,
        (cpu, disk_rates): (&Cpu, Vec<DiskRate>),
        now: &cgroup::Stats,
        before: Option<(&cgroup::Stats, Duration)>,
    ) -> Self {
        let share = before.map_or(0.0, |(before, passed)| {
            let passed = passed.as_nanos().max(1) as f64;
            now.cpu_usage_ns.saturating_sub(before.cpu_usage_ns) as f64 / passed * 100.0
        });
        let per_second = |now: u64, of: fn(&cgroup::Stats) -> u64| {
            before.map_or(0, |(before, passed)| {
                let bytes = now.saturating_sub(of(before)) as f64;
                (bytes / passed.as_secs_f64().max(1e-9)).round() as u64
            })
        };
        Self {
            id,
            name,
            cpu_percent: (share * 100.0).round() / 100.0,
            cpu_usage_ns: now.cpu_usage_ns,
            cpu_user_ns: now.cpu_user_ns,
            cpu_system_ns: now.cpu_system_ns,
            cpu_throttled_ns: now.cpu_throttled_ns,
            memory_bytes: now.memory_bytes,
            memory_inactive_file_bytes: now.memory_inactive_file_bytes,
            memory_peak_bytes: now.memory_peak_bytes,
            memory_max_bytes: now.memory_max_bytes,
            swap_bytes: now.swap_bytes,
            pids: now.pids,
            pids_max: now.pids_max,
            sockets: None,
            sockets_max: None,
            io_read_bytes: now.io_read_bytes,
            io_write_bytes: now.io_write_bytes,
            oom_kills: now.oom_kills,
            cpu_reserve_milli: cpu.reserve_milli,
            cpu_weight: cpu.weight,
            cpu_max_milli: cpu.max_milli,
            cpu_idle_rate_milli: cpu.idle_rate_milli,
            io_read_bps: per_second(now.io_read_bytes, |it| it.io_read_bytes),
            io_write_bps: per_second(now.io_write_bytes, |it| it.io_write_bytes),
            disk_rates,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_has_its_fields_in_the_printed_order_and_its_share_rounded() {
        let before = cgroup::Stats { cpu_usage_ns: 1_000, ..Default::default() };
        let now = cgroup::Stats {
            cpu_usage_ns: 1_000 + 123_456,
            cpu_user_ns: 2,
            cpu_system_ns: 3,
            cpu_throttled_periods: 4,
            cpu_throttled_ns: 5,
            memory_bytes: 6,
            memory_inactive_file_bytes: 7,
            memory_peak_bytes: 8,
            memory_max_bytes: Some(9),
            swap_bytes: 10,
            pids: 11,
            pids_max: None,
            io_read_bytes: 12,
            io_write_bytes: 13,
            oom_kills: 14,
        };
        let passed = Duration::from_millis(1);
        let cpu =
            Cpu::of(&dormouse_model::Limits { cpu_reserve_milli: Some(500), ..Default::default() });
        let rate = DiskRate::parse(dormouse_model::DiskRateKind::ReadIops, "7").unwrap();
        let contract = (&cpu, vec![rate]);
        let stats = Stats::of("ab".into(), "web".into(), contract, &now, Some((&before, passed)));
        let json = concat!(
            r#"{"id":"ab","name":"web","cpu_percent":12.35,"cpu_usage_ns":124456,"#,
            r#""cpu_user_ns":2,"cpu_system_ns":3,"cpu_throttled_ns":5,"memory_bytes":6,"#,
            r#""memory_inactive_file_bytes":7,"memory_peak_bytes":8,"#,
            r#""memory_max_bytes":9,"swap_bytes":10,"pids":11,"pids_max":null,"#,
            r#""io_read_bytes":12,"io_write_bytes":13,"oom_kills":14,"#,
            r#""cpu_reserve_milli":500,"cpu_weight":100,"cpu_max_milli":null,"#,
            r#""io_read_bps":12000,"io_write_bps":13000,"#,
            r#""disk_rates":[{"kind":"read-iops","device":null,"most":7}]}"#,
        );
        assert_eq!(serde_json::to_string(&stats).unwrap(), json);
        let first = Stats::of("ab".into(), "web".into(), (&cpu, Vec::new()), &now, None);
        assert_eq!(first.cpu_percent, 0.0);
    }
}
