//! Resource usage of a container.

use serde::{Deserialize, Serialize};

use super::dir::field;
use super::error::CgroupError;
use super::limit::V1_UNLIMITED_BYTES;
use super::{Cgroup, Controllers};
use crate::error::Result as CallResult;

/// Usage since the cgroup was created, including everything below it.
///
/// `None` and 0 are different things: `None` is "no such controller" or "no limit".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// CPU time.
    pub cpu_usage_ns: u64,
    /// Of it, in user mode.
    pub cpu_user_ns: u64,
    /// Of it, in the kernel.
    pub cpu_system_ns: u64,
    /// Periods in which CPU time ran out (`cpu.max`); 0 without a limit.
    pub cpu_throttled_periods: u64,
    /// Time for which processes stood still because of it.
    pub cpu_throttled_ns: u64,
    /// Memory charged now: processes, page cache and kernel memory.
    pub memory_bytes: u64,
    /// Of it, page cache that reclaim would take first (`inactive_file`).
    pub memory_inactive_file_bytes: u64,
    /// The most that was charged at once. KERNEL(5.19) on v2, 0 before.
    pub memory_peak_bytes: u64,
    /// The limit; `None` if there is none.
    pub memory_max_bytes: Option<u64>,
    /// Swap in use.
    pub swap_bytes: u64,
    /// Tasks (threads count).
    pub pids: u64,
    /// The limit; `None` if there is none.
    pub pids_max: Option<u64>,
    /// Read from block devices.
    pub io_read_bytes: u64,
    /// Written to block devices. On v1 without what went through the page cache.
    pub io_write_bytes: u64,
    /// Processes killed because memory ran out.
    pub oom_kills: u64,
}

impl Cgroup {
    /// Reads what the container has used (cgroups(7); Documentation/admin-guide/cgroup-v2.rst).
    ///
    /// Counters of controllers that the host lacks are 0.
    pub fn stats(&self) -> Result<Stats, CgroupError> {
        let mut stats = Stats::default();
        self.cpu_stats(&mut stats)
            .and_then(|()| self.memory_stats(&mut stats))
            .and_then(|()| self.pids_stats(&mut stats))
            .and_then(|()| self.io_stats(&mut stats))
            .map_err(CgroupError::Read)?;
        Ok(stats)
    }

    /// Processes of this container that the kernel has killed because memory ran out.
    pub fn oom_kills(&self) -> Result<u64, CgroupError> {
        let read = || match (self.in_v2(Controllers::MEMORY), self.in_v1(Controllers::MEMORY)) {
            // KERNEL(4.13): `oom_kill` in both.
            (Some(v2), _) => Ok(field(&v2.read("memory.events")?, "oom_kill")),
            (_, Some(v1)) => Ok(field(&v1.read("memory.oom_control")?, "oom_kill")),
            _ => Ok(0),
        };
        read().map_err(CgroupError::Read)
    }

    fn cpu_stats(&self, stats: &mut Stats) -> CallResult<()> {
        // v2 counts the time of every cgroup, with the cpu controller or without it.
        if let Some(v2) = &self.v2 {
            let text = v2.read("cpu.stat")?;
            stats.cpu_usage_ns = field(&text, "usage_usec") * 1000;
            stats.cpu_user_ns = field(&text, "user_usec") * 1000;
            stats.cpu_system_ns = field(&text, "system_usec") * 1000;
            stats.cpu_throttled_periods = field(&text, "nr_throttled");
            stats.cpu_throttled_ns = field(&text, "throttled_usec") * 1000;
        } else if let Some(v1) = self.in_v1(Controllers::CPUACCT) {
            let number = |file| Ok(v1.read_number(file)?.unwrap_or(0));
            stats.cpu_usage_ns = number("cpuacct.usage")?;
            stats.cpu_user_ns = number("cpuacct.usage_user")?;
            stats.cpu_system_ns = number("cpuacct.usage_sys")?;
        }
        if let Some(v1) = self.in_v1(Controllers::CPU) {
            let text = v1.read("cpu.stat")?;
            stats.cpu_throttled_periods = field(&text, "nr_throttled");
            stats.cpu_throttled_ns = field(&text, "throttled_time");
        }
        Ok(())
    }

    fn memory_stats(&self, stats: &mut Stats) -> CallResult<()> {
        if let Some(v2) = self.in_v2(Controllers::MEMORY) {
            let number = |file: &str| Ok(v2.read_number(file)?.unwrap_or(0));
            let optional = |file: &str| if v2.has(file) { number(file) } else { Ok(0) };
            stats.memory_bytes = number("memory.current")?;
            stats.memory_peak_bytes = optional("memory.peak")?;
            stats.memory_max_bytes = v2.read_number("memory.max")?;
            stats.swap_bytes = optional("memory.swap.current")?;
            stats.memory_inactive_file_bytes = field(&v2.read("memory.stat")?, "inactive_file");
            stats.oom_kills = field(&v2.read("memory.events")?, "oom_kill");
        } else if let Some(v1) = self.in_v1(Controllers::MEMORY) {
            let number = |file: &str| Ok(v1.read_number(file)?.unwrap_or(0));
            stats.memory_bytes = number("memory.usage_in_bytes")?;
            stats.memory_peak_bytes = number("memory.max_usage_in_bytes")?;
            let max = number("memory.limit_in_bytes")?;
            stats.memory_max_bytes = (max < V1_UNLIMITED_BYTES).then_some(max);
            let text = v1.read("memory.stat")?;
            stats.memory_inactive_file_bytes = field(&text, "total_inactive_file");
            // The line is absent where swap is not counted.
            stats.swap_bytes = field(&text, "total_swap");
            stats.oom_kills = field(&v1.read("memory.oom_control")?, "oom_kill");
        }
        Ok(())
    }

    /// Returns the number of its processes and threads; `None` where the kernel does not count them.
    pub fn tasks(&self) -> Result<Option<u64>, CgroupError> {
        let dir = self.in_v2(Controllers::PIDS).or_else(|| self.in_v1(Controllers::PIDS));
        dir.map_or(Ok(None), |dir| dir.read_number("pids.current")).map_err(CgroupError::Read)
    }

    /// Returns the most of these; `None` if there is no limit.
    pub fn tasks_max(&self) -> Result<Option<u64>, CgroupError> {
        let dir = self.in_v2(Controllers::PIDS).or_else(|| self.in_v1(Controllers::PIDS));
        dir.map_or(Ok(None), |dir| dir.read_number("pids.max")).map_err(CgroupError::Read)
    }

    fn pids_stats(&self, stats: &mut Stats) -> CallResult<()> {
        let dir = self.in_v2(Controllers::PIDS).or_else(|| self.in_v1(Controllers::PIDS));
        if let Some(dir) = dir {
            stats.pids = dir.read_number("pids.current")?.unwrap_or(0);
            stats.pids_max = dir.read_number("pids.max")?;
        }
        Ok(())
    }

    fn io_stats(&self, stats: &mut Stats) -> CallResult<()> {
        if let Some(v2) = self.in_v2(Controllers::IO) {
            let text = v2.read("io.stat")?;
            (stats.io_read_bytes, stats.io_write_bytes) = io_v2(&text);
        } else if let Some(v1) = self.in_v1(Controllers::IO) {
            let file = "blkio.throttle.io_service_bytes_recursive";
            // KERNEL(4.20): the recursive one counts without a scheduler's help.
            if v1.has(file) {
                (stats.io_read_bytes, stats.io_write_bytes) = io_v1(&v1.read(file)?);
            }
        }
        Ok(())
    }
}

/// `8:0 rbytes=1 wbytes=2 rios=...` for each device.
pub(super) fn io_v2(text: &str) -> (u64, u64) {
    let sum = |key: &str| {
        let words = text.lines().filter(|line| is_of_a_disk(line)).flat_map(str::split_whitespace);
        words.filter_map(|w| w.strip_prefix(key)?.parse::<u64>().ok()).sum()
    };
    (sum("rbytes="), sum("wbytes="))
}

/// `8:0 Read 1` and `8:0 Write 2` for each device, and a `Total`.
pub(super) fn io_v1(text: &str) -> (u64, u64) {
    let sum = |key: &str| {
        let of = |line: &str| {
            let mut words = line.split(' ').skip(1);
            (words.next()? == key).then(|| words.next()?.parse::<u64>().ok())?
        };
        text.lines().filter(|line| is_of_a_disk(line)).filter_map(of).sum()
    };
    (sum("Read"), sum("Write"))
}

/// A loop device does not count: what it reads and writes, it reads from and writes to the disk with its file, which
/// counts that for the same cgroup.
fn is_of_a_disk(line: &str) -> bool {
    !line.starts_with("7:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_added_up() {
        let v2 = "254:0 rbytes=5 wbytes=7 rios=1 wios=1 dbytes=9 dios=0\n8:16 rbytes=1 wbytes=2\n";
        assert_eq!(io_v2(v2), (6, 9));
        let v1 = "254:0 Read 5\n254:0 Write 7\n254:0 Total 12\n8:0 Read 1\nTotal 13\n";
        assert_eq!(io_v1(v1), (6, 7));
    }

    #[test]
    fn loop_devices_do_not_count_twice() {
        let v2 = "7:3 rbytes=5 wbytes=7 rios=1 wios=1 dbytes=9 dios=0\n8:16 rbytes=1 wbytes=2\n";
        assert_eq!(io_v2(v2), (1, 2));
        assert_eq!(io_v1("7:0 Read 5\n7:0 Write 7\n77:0 Read 2\n8:0 Write 1\n"), (2, 1));
    }
}
