//! Counters of a container, for accounts.

use super::Cgroup;
use super::Controllers;
use super::dir::{Dir, field};
use super::error::CgroupError;
use super::stats::{io_v1, io_v2};
use crate::error::Result as CallResult;

/// What a cgroup and everything below it has used since it was created. Counters that the host lacks are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of the cgroup, which no other one of this boot has. KERNEL(5.5)
    pub cgroup: u64,
    /// CPU time.
    pub cpu_ns: u64,
    /// Of it, in user mode.
    pub cpu_user_ns: u64,
    /// Page faults.
    pub page_faults: u64,
    /// Of them, those that waited for a disk.
    pub major_faults: u64,
    /// The most memory that was charged at once. KERNEL(5.19) on v2, 0 before.
    pub memory_peak_bytes: u64,
    /// Processes and threads that it has now; the only figure that also falls.
    pub tasks: u64,
    /// The most of them that there were at once. KERNEL(6.1) on both versions; before, those of now.
    pub tasks_peak: u64,
    /// Read from block devices.
    pub read_bytes: u64,
    /// Written to block devices. On v1 without what went through the page cache.
    pub written_bytes: u64,
}

impl Cgroup {
    /// Reads the counters; `None` if the cgroup that counts CPU time was removed, which is the first of several
    /// to be made.
    ///
    /// Processes that run while it reads are counted up to some point in it.
    pub fn counters(&self) -> Result<Option<Counters>, CgroupError> {
        let counts = match self.hierarchy.0.v2 {
            Some(_) => self.v2.as_ref(),
            None => self.in_v1(Controllers::CPUACCT),
        };
        let Some(dir) = counts else { return Ok(None) };
        match self.read_counters(dir) {
            // Removed meanwhile.
            Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
            other => other.map(Some).map_err(CgroupError::Read),
        }
    }

    fn read_counters(&self, dir: &Dir) -> CallResult<Counters> {
        let mut counters = Counters { cgroup: dir.inode()?, ..Counters::default() };
        if self.v2.is_some() {
            // v2 counts the time of every cgroup, with the cpu controller or without it.
            let text = dir.read("cpu.stat")?;
            counters.cpu_ns = field(&text, "usage_usec") * 1000;
            counters.cpu_user_ns = field(&text, "user_usec") * 1000;
        } else {
            counters.cpu_ns = dir.read_number("cpuacct.usage")?.unwrap_or(0);
            counters.cpu_user_ns = dir.read_number("cpuacct.usage_user")?.unwrap_or(0);
        }
        if let Some(v2) = self.in_v2(Controllers::MEMORY) {
            let text = v2.read("memory.stat")?;
            counters.page_faults = field(&text, "pgfault");
            counters.major_faults = field(&text, "pgmajfault");
            counters.memory_peak_bytes = match v2.read_number("memory.peak") {
                Err(e) if e.errno() == libc::ENOENT => 0,
                peak => peak?.unwrap_or(0),
            };
        } else if let Some(v1) = self.in_v1(Controllers::MEMORY) {
            let text = v1.read("memory.stat")?;
            counters.page_faults = field(&text, "total_pgfault");
            counters.major_faults = field(&text, "total_pgmajfault");
            counters.memory_peak_bytes = v1.read_number("memory.max_usage_in_bytes")?.unwrap_or(0);
        }
        if let Some(dir) = self.in_v2(Controllers::PIDS).or_else(|| self.in_v1(Controllers::PIDS)) {
            counters.tasks = dir.read_number("pids.current")?.unwrap_or(0);
            let peak = match dir.read_number("pids.peak") {
                Err(e) if e.errno() == libc::ENOENT && dir.has("pids.current") => None,
                peak => peak?,
            };
            counters.tasks_peak = peak.unwrap_or(0).max(counters.tasks);
        }
        if let Some(v2) = self.in_v2(Controllers::IO) {
            (counters.read_bytes, counters.written_bytes) = io_v2(&v2.read("io.stat")?);
        } else if let Some(v1) = self.in_v1(Controllers::IO) {
            // KERNEL(4.20): the recursive one counts without a scheduler's help.
            let text = match v1.read("blkio.throttle.io_service_bytes_recursive") {
                Err(e) if e.errno() == libc::ENOENT => String::new(),
                text => text?,
            };
            (counters.read_bytes, counters.written_bytes) = io_v1(&text);
        }
        Ok(counters)
    }
}
