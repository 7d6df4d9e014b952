//! CPU time and memory of containers, for frequent reading: nothing is held open and nothing is
//! created.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::dir::field;
use super::error::CgroupError;
use super::mounts::Mounts;
use super::{Controllers, check_name};
use crate::error::CallError;
use crate::proc;

/// `cpu.stat` of v2 has some 300 bytes, `memory.stat` 2,000.
const LARGEST_FILE_BYTES: usize = 64 << 10;

/// Source of the CPU time of the containers below one parent.
///
/// The kernel counts in nanoseconds at every task switch, and v2 reports microseconds: a task that
/// is woken, finds nothing to do and waits again has used at least one. Two equal readings of a
/// container therefore prove that it has not run in between, and active containers pay nothing for
/// it.
#[derive(Debug, Clone)]
pub struct CpuTime {
    parent: PathBuf,
    /// v2's `cpu.stat`, or v1's `cpuacct.usage`.
    is_v2: bool,
}

impl CpuTime {
    /// Looks where cgroups are mounted; `parent` need not be there.
    pub fn below(parent: &str) -> Result<Self, CgroupError> {
        check_name(parent)?;
        let mounts = Mounts::find(None)?;
        if let Some(v2) = mounts.v2 {
            return Ok(Self { parent: v2.join(parent), is_v2: true });
        }
        let v1 = mounts.v1.into_iter().find(|(c, _)| c.contains(Controllers::CPUACCT));
        let (_, v1) = v1.ok_or(CgroupError::NotMounted)?;
        Ok(Self { parent: v1.join(parent), is_v2: false })
    }

    /// Returns the CPU time since the cgroup was created, in nanoseconds; `None` without a cgroup.
    pub fn of(&self, name: &str) -> Result<Option<u64>, CgroupError> {
        check_name(name)?;
        let file = if self.is_v2 { "cpu.stat" } else { "cpuacct.usage" };
        let Some(text) = read(&self.parent.join(name).join(file))? else { return Ok(None) };
        Ok(Some(match self.is_v2 {
            true => field(&text, "usage_usec").saturating_mul(1_000),
            false => text.trim().parse().unwrap_or(0),
        }))
    }
}

/// Memory in use, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InUse {
    /// In all: pages of processes and of tmpfs, and what the kernel has for them.
    pub bytes: u64,
    /// Of that, pages that could be in swap instead: not those that are locked (mlock(2)).
    pub for_swap_bytes: u64,
}

impl InUse {
    fn new(pages: u64, locked: u64, kernel: u64) -> Self {
        Self { bytes: pages + kernel, for_swap_bytes: pages.saturating_sub(locked) }
    }
}

/// Source of the memory usage of the containers below one parent.
#[derive(Debug, Clone)]
pub struct MemoryInUse {
    pub(super) parent: PathBuf,
    pub(super) is_v2: bool,
}

impl MemoryInUse {
    /// Finds the mounts of cgroups; `parent` need not exist. `None` without a memory controller.
    pub fn below(parent: &str) -> Result<Option<Self>, CgroupError> {
        check_name(parent)?;
        let mounts = Mounts::find(None)?;
        let v1 = mounts.v1.into_iter().find(|(c, _)| c.contains(Controllers::MEMORY));
        if let Some((_, v1)) = v1 {
            return Ok(Some(Self { parent: v1.join(parent), is_v2: false }));
        }
        let Some(v2) = mounts.v2 else { return Ok(None) };
        let offered = read(&v2.join("cgroup.controllers"))?.unwrap_or_default();
        let is_counted = offered.split_whitespace().any(|word| word == "memory");
        Ok(is_counted.then(|| Self { parent: v2.join(parent), is_v2: true }))
    }

    /// Returns the memory of a container that only a suspend, or swap, frees. Page cache is not
    /// included. `None` without a cgroup.
    pub fn of(&self, name: &str) -> Result<Option<InUse>, CgroupError> {
        check_name(name)?;
        self.in_dir(&self.parent.join(name))
    }

    /// Returns the sum over all of them; zero without a cgroup.
    pub fn of_all(&self) -> Result<InUse, CgroupError> {
        Ok(self.in_dir(&self.parent)?.unwrap_or_default())
    }

    fn in_dir(&self, dir: &Path) -> Result<Option<InUse>, CgroupError> {
        let Some(stat) = read(&dir.join("memory.stat"))? else { return Ok(None) };
        let sum = |names: &[&str]| names.iter().map(|name| field(&stat, name)).sum::<u64>();
        if !self.is_v2 {
            let kernel = read(&dir.join("memory.kmem.usage_in_bytes"))?;
            let kernel = kernel.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            let pages = sum(&["total_rss", "total_shmem"]);
            return Ok(Some(InUse::new(pages, sum(&["total_unevictable"]), kernel)));
        }
        // KERNEL(5.18): `kernel`; before, its larger parts.
        let kernel = match sum(&["kernel"]) {
            0 => sum(&["kernel_stack", "pagetables", "slab"]),
            kernel => kernel,
        };
        Ok(Some(InUse::new(sum(&["anon", "shmem"]), sum(&["unevictable"]), kernel)))
    }
}

/// Memory that is charged to a container, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Charged {
    /// All of it, as its limit counts.
    pub bytes: u64,
    /// Of that, what the kernel reclaims before the limit is reached: page cache of files without tmpfs, and on v2
    /// caches of the kernel, such as names of files. LIMIT: v1 does not count these by cgroup.
    pub cache_bytes: u64,
    /// Swap that it may still use, has pages for, and the host has.
    pub swap_left_bytes: u64,
}

/// Source of the memory that is charged to the containers below one parent.
#[derive(Debug, Clone)]
pub struct MemoryCharged(MemoryInUse);

impl MemoryCharged {
    /// Finds the mounts of cgroups; `parent` need not exist. `None` without a memory controller.
    pub fn below(parent: &str) -> Result<Option<Self>, CgroupError> {
        Ok(MemoryInUse::below(parent)?.map(Self))
    }

    /// Returns the charge of a container, and `None` without its cgroup. The rest is read only where `is_enough` says
    /// of the whole charge that it matters, and is zero otherwise.
    pub fn of(
        &self,
        name: &str,
        is_enough: impl FnOnce(u64) -> bool,
    ) -> Result<Option<Charged>, CgroupError> {
        check_name(name)?;
        let dir = self.0.parent.join(name);
        let number = |file: &str| -> Result<Option<u64>, CgroupError> {
            // "max" is the largest number.
            let text = read(&dir.join(file))?;
            Ok(text.map(|text| text.trim().parse().unwrap_or(u64::MAX)))
        };
        let used = if self.0.is_v2 { "memory.current" } else { "memory.usage_in_bytes" };
        let Some(bytes) = number(used)? else { return Ok(None) };
        if !is_enough(bytes) {
            return Ok(Some(Charged { bytes, ..Charged::default() }));
        }
        let Some(stat) = read(&dir.join("memory.stat"))? else { return Ok(None) };
        let prefix = if self.0.is_v2 { "" } else { "total_" };
        // Not "cache" or "file", which include tmpfs.
        let lists = ["inactive_file", "active_file", "slab_reclaimable"];
        let cache = lists.map(|list| field(&stat, &format!("{prefix}{list}"))).into_iter();
        // The limit of v1 counts memory and swap together. Without these files swap has no limit.
        let (limit, used) = match self.0.is_v2 {
            true => ("memory.swap.max", "memory.swap.current"),
            false => ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
        };
        let limit = number(limit)?.unwrap_or(u64::MAX);
        let own_left = limit.saturating_sub(number(used)?.unwrap_or(0));
        let sum = |lists: [&str; 2]| lists.map(|list| field(&stat, &format!("{prefix}{list}")));
        let pages: u64 = sum([if self.0.is_v2 { "anon" } else { "rss" }, "shmem"]).iter().sum();
        let locked = field(&stat, &format!("{prefix}unevictable"));
        let swap_left_bytes = match own_left.min(pages.saturating_sub(locked)) {
            0 => 0,
            left => left.min(swap_free_bytes()?),
        };
        Ok(Some(Charged {
            bytes,
            cache_bytes: cache.fold(0, u64::saturating_add),
            swap_left_bytes,
        }))
    }

    /// Has the kernel slow a container down above so much memory, and reclaim it (`memory.high`), or no longer. Nothing
    /// happens without its cgroup, and on v1.
    pub fn slow_down(&self, name: &str, above_bytes: Option<u64>) -> Result<(), CgroupError> {
        check_name(name)?;
        if !self.0.is_v2 {
            return Ok(());
        }
        let text = above_bytes.map_or("max".to_owned(), |bytes| bytes.to_string());
        let path = self.0.parent.join(name).join("memory.high");
        // O_NONBLOCK: newer kernels then leave the reclaim to the processes of the cgroup.
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        let wrote = file.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
        match wrote.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)) {
            Ok(()) | Err(libc::ENOENT | libc::ENODEV) => Ok(()),
            Err(number) => Err(CgroupError::Set {
                limit: "memory before it is slowed down",
                source: CallError::new("write", format!("{}, {text}", path.display()), number),
            }),
        }
    }
}

/// Free swap of the host.
fn swap_free_bytes() -> Result<u64, CgroupError> {
    let text = proc::read_text("/proc/meminfo", LARGEST_FILE_BYTES).map_err(CgroupError::Read)?;
    let line = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    let kilobytes =
        line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kilobytes.unwrap_or(0).saturating_mul(1024))
}

/// A file of a cgroup, which may also be removed between the open and the read.
pub(super) fn read(path: &Path) -> Result<Option<String>, CgroupError> {
    match proc::read_text(path, LARGEST_FILE_BYTES) {
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
        text => text.map(Some).map_err(CgroupError::Read),
    }
}
