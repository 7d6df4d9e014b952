//! The memory that is left: of the host, and below the limit of all containers together; and the memory that one
//! container would give.
//!
//! **Free** is what can be used without swap. For the host that is `MemAvailable` of proc_meminfo(5). Below a limit it
//! is the limit without what is charged, but for page cache of files, which the kernel reclaims first.
//!
//! **Stalled** is the time in which all tasks that were not idle waited for memory: `full` of pressure stall
//! information (Documentation/accounting/psi.rst). It is there for v1 as well, because the kernel counts it by
//! cgroups of v2. KERNEL(4.20), and not with `psi=0`. The totals are read, not a trigger: without CAP_SYS_RESOURCE a
//! trigger has windows of two seconds or more.

use std::path::{Path, PathBuf};

use super::dir::field;
use super::error::CgroupError;
use super::limit::V1_UNLIMITED_BYTES;
use super::mounts::Mounts;
use super::usage::{MemoryInUse, read};
use super::{check_name, parts};
use crate::proc;

/// `/proc/meminfo` has some 1,500 bytes.
const LARGEST_MEMINFO_BYTES: usize = 64 << 10;

/// The memory of the host, or of all containers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supply {
    /// All of it, in bytes.
    pub all_bytes: u64,
    /// What can be used without swap, in bytes.
    pub free_bytes: u64,
    /// The time since the boot, or since the cgroup was made, in which all tasks that had work waited for memory, in
    /// microseconds. `None` if the kernel does not count it.
    pub stalled_us: Option<u64>,
}

/// The memory of one container, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// All that is charged to it.
    pub bytes: u64,
    /// Of that, page cache of files that was not used for a while.
    pub inactive_file_bytes: u64,
    /// Of that, all page cache of files, without tmpfs.
    pub file_bytes: u64,
}

/// Source of these readings, for the containers below one parent.
#[derive(Debug, Clone)]
pub struct Supplies {
    parent: PathBuf,
    is_v2: bool,
    /// `memory.pressure` of the parent.
    pressure: Option<PathBuf>,
}

impl Supplies {
    /// Finds the mounts of cgroups; `parent` need not exist. `None` without a memory controller.
    pub fn below(parent: &str) -> Result<Option<Self>, CgroupError> {
        let Some(MemoryInUse { parent: dir, is_v2 }) = MemoryInUse::below(parent)? else {
            return Ok(None);
        };
        let pressure = Mounts::find(None)?.v2.map(|v2| v2.join(parent).join("memory.pressure"));
        Ok(Some(Self { parent: dir, is_v2, pressure }))
    }

    /// Whether the kernel keeps guarantees (`memory.min`), and memory of a guarantee that is not used is free for
    /// others.
    pub fn keeps_memory(&self) -> bool {
        self.is_v2
    }

    /// Reads the memory of the host.
    pub fn of_host(&self) -> Result<Supply, CgroupError> {
        let text = proc::read_text("/proc/meminfo", LARGEST_MEMINFO_BYTES);
        let (all_bytes, free_bytes) = host(&text.map_err(CgroupError::Read)?);
        Ok(Supply {
            all_bytes,
            free_bytes,
            stalled_us: stalled_us("/proc/pressure/memory".as_ref()),
        })
    }

    /// Reads the memory of all containers together; `None` without a limit for them, or without a container.
    pub fn of_containers(&self) -> Result<Option<Supply>, CgroupError> {
        let (limit, used) = match self.is_v2 {
            true => ("memory.max", "memory.current"),
            false => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        };
        let Some(all_bytes) = number(&self.parent.join(limit))? else { return Ok(None) };
        if all_bytes >= V1_UNLIMITED_BYTES {
            return Ok(None);
        }
        let Some(used_bytes) = number(&self.parent.join(used))? else { return Ok(None) };
        let Some(file_bytes) = self.file_bytes(&self.parent)?.map(|[_, all]| all) else {
            return Ok(None);
        };
        let taken = used_bytes.saturating_sub(file_bytes);
        let free_bytes = all_bytes.saturating_sub(taken);
        let stalled_us = self.pressure.as_deref().and_then(stalled_us);
        Ok(Some(Supply { all_bytes, free_bytes, stalled_us }))
    }

    /// Reads the memory of a container; `None` without its cgroup.
    pub fn of(&self, name: &str) -> Result<Option<Held>, CgroupError> {
        check_name(name)?;
        let dir = self.parent.join(name);
        let used = if self.is_v2 { "memory.current" } else { "memory.usage_in_bytes" };
        let Some(bytes) = number(&dir.join(used))? else { return Ok(None) };
        let files = self.file_bytes(&dir)?;
        Ok(files.map(|[inactive_file_bytes, file_bytes]| Held {
            bytes,
            inactive_file_bytes,
            file_bytes,
        }))
    }

    /// The inactive page cache of files in a cgroup, and all of it.
    fn file_bytes(&self, dir: &Path) -> Result<Option<[u64; 2]>, CgroupError> {
        let Some(stat) = read(&dir.join("memory.stat"))? else { return Ok(None) };
        let prefix = if self.is_v2 { "" } else { "total_" };
        // Not "file" or "cache", which include tmpfs.
        let [inactive, active] =
            ["inactive_file", "active_file"].map(|list| field(&stat, &format!("{prefix}{list}")));
        Ok(Some([inactive, inactive.saturating_add(active)]))
    }
}

/// Reads a file with one number; "max" is the largest.
fn number(path: &Path) -> Result<Option<u64>, CgroupError> {
    Ok(read(path)?.map(|text| text.trim().parse().unwrap_or(u64::MAX)))
}

/// Reads the time of full stalls. A kernel that does not count it has no such file, or refuses its read.
fn stalled_us(path: &Path) -> Option<u64> {
    let text = proc::read_text(path, LARGEST_MEMINFO_BYTES).ok()?;
    parts::total_us(&text, "full ")
}

/// The memory of the host, and what is available of it.
fn host(text: &str) -> (u64, u64) {
    let of = |name: &str| {
        let rest = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = rest.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.unwrap_or(0).saturating_mul(1024)
    };
    (of("MemTotal:"), of("MemAvailable:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_host_is_what_can_be_used_without_swap() {
        let text =
            "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\nSwapFree: 9 kB\n";
        assert_eq!(host(text), (2 << 20, 1 << 20));
        assert_eq!(host(""), (0, 0));
        let here = Supplies::below("dormouse-supply-test").unwrap().expect("a memory controller");
        let Supply { all_bytes, free_bytes, .. } = here.of_host().unwrap();
        assert!(0 < free_bytes && free_bytes < all_bytes, "{free_bytes} of {all_bytes}");
        assert_eq!(here.of_containers().unwrap(), None, "there is no such cgroup");
        assert_eq!(here.of("x").unwrap(), None);
    }
}
