//! Guaranteed memory: what surrounds a guarantee on each version of cgroups.
//!
//! | | v2 | v1 |
//! |---|---|---|
//! | guarantee | `memory.min` of the container and, for all of them together, of its parent | none |
//! | memory reclaimed last | `memory.low` of both | `memory.soft_limit_in_bytes` of the container |
//! | memory of all containers | `memory.max` of the parent | `memory.limit_in_bytes` of the parent |
//! | memory of images | `memory.low` of their cgroup and its parent | a limit of their cgroup |
//!
//! On v1 a guarantee is kept from the other side: while the others are below limits that leave the guaranteed
//! memory free, the parent's limit is never reached, and nothing of the container is reclaimed.
//!
//! **No limit is set by killing.** v1 refuses a limit below the memory in use that cannot be reclaimed. v2 kills
//! processes there, so the memory is reclaimed first, and the limit is refused in the same way. LIMIT: on v2, processes
//! that allocate more than the free part between the last reading and the write of `memory.max` can be killed. The
//! kernel has no call that compares and sets.
//!
//! **The keeper** is below the parent too. Its oom_score_adj is -999, so the OOM killer of the parent chooses it after
//! every process of a container but those with -999 or less (mm/oom_kill.c, `oom_badness()`).

use std::os::fd::OwnedFd;

use dormouse_model::Limits;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::dir::{Dir, field};
use super::error::CgroupError;
use super::fit::reclaim_to;
use super::limit::{Host as _, MemoryV1, V1_UNLIMITED_BYTES, Version, plan};
use super::mounts::Mounts;
use super::{Controllers, Hierarchy, check_name};
use crate::error::{CallError, Explain, Result as CallResult};

/// The memory of all containers of a [`Hierarchy`] together. The default is no limit and no protection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParentMemory {
    /// The most memory; `None` is no limit.
    pub max_bytes: Option<u64>,
    /// The guarantees of all containers.
    pub min_bytes: u64,
    /// Memory of all containers that is reclaimed last.
    pub low_bytes: u64,
    /// Memory of images that is reclaimed last; on v1 the most memory of images, while there is a limit for all.
    pub images_bytes: u64,
}

/// LIMIT: signals during one write of a limit, after which the limit stays.
const INTERRUPTS: u32 = 16;

/// The result of a write of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitSet {
    /// The limit is in force.
    Set,
    /// The old limit is in force: the memory cannot be reclaimed, the limit of memory and swap is below, or signals
    /// arrived.
    Stays,
    /// The cgroup was removed.
    Removed,
}

/// Usage and limit of memory of one container of v1, through descriptors that stay open.
#[derive(Debug)]
pub struct MemoryShare {
    usage: OwnedFd,
    limit: OwnedFd,
}

impl MemoryShare {
    /// Memory charged now, page cache included; `None` if the cgroup was removed.
    pub fn used_bytes(&self) -> Result<Option<u64>, CgroupError> {
        number(&self.usage)
    }

    /// The limit; `None` if the cgroup was removed. [`u64::MAX`] is none.
    pub fn limit_bytes(&self) -> Result<Option<u64>, CgroupError> {
        let limit = number(&self.limit)?;
        Ok(limit.map(|bytes| if bytes >= V1_UNLIMITED_BYTES { u64::MAX } else { bytes }))
    }

    /// Sets the limit. The kernel reclaims meanwhile, as long as that takes.
    pub fn set(&self, bytes: u64) -> Result<LimitSet, CgroupError> {
        let text = written(Some(bytes));
        let mut tries = 0;
        loop {
            tries += 1;
            match rustix::io::pwrite(&self.limit, text.as_bytes(), 0) {
                // A signal ends the reclaim; the program has handled it now.
                Err(Errno::INTR) if tries < INTERRUPTS => {}
                Err(Errno::NODEV) => return Ok(LimitSet::Removed),
                // INVAL: above the limit of memory and swap, which another process has lowered meanwhile.
                Err(Errno::BUSY | Errno::INTR | Errno::INVAL) => return Ok(LimitSet::Stays),
                wrote => {
                    let wrote = wrote.explain("pwrite", || format!("memory limit, {bytes}"));
                    return wrote.map(|_| LimitSet::Set).map_err(set_failed);
                }
            }
        }
    }
}

/// Reads a file with one number.
fn number(file: &OwnedFd) -> Result<Option<u64>, CgroupError> {
    let mut bytes = [0; 32];
    let read = match rustix::io::pread(file, &mut bytes, 0) {
        Err(Errno::NODEV) => return Ok(None),
        read => read.explain("pread", || "memory".into()).map_err(CgroupError::Read)?,
    };
    Ok(Some(String::from_utf8_lossy(&bytes[..read]).trim().parse().unwrap_or(0)))
}

fn set_failed(source: CallError) -> CgroupError {
    CgroupError::Set { limit: "memory", source }
}

/// The text for a limit of v1.
fn written(bytes: Option<u64>) -> String {
    bytes.filter(|bytes| *bytes < V1_UNLIMITED_BYTES).map_or("-1".into(), |bytes| bytes.to_string())
}

/// `None` for a cgroup that was removed meanwhile.
fn unless_removed<T>(result: CallResult<Option<T>>) -> CallResult<Option<T>> {
    match result {
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
        other => other,
    }
}

/// Returns whether there is a cgroup of all containers in some hierarchy. Nothing is made.
pub fn exists(parent: &str) -> Result<bool, CgroupError> {
    check_name(parent)?;
    let Mounts { v1, v2 } = Mounts::find(None)?;
    let mut mounts = v1.into_iter().map(|(_, mount)| mount).chain(v2);
    Ok(mounts.any(|mount| mount.join(parent).exists()))
}

impl Hierarchy {
    /// Refuses an amount of memory above which a container is slowed down where the kernel has none: on v1.
    pub fn check_memory_high(&self, limits: &Limits) -> Result<(), CgroupError> {
        let only = Limits { memory_high_bytes: limits.memory_high_bytes, ..Limits::default() };
        plan(&only, self, MemoryV1::UNLIMITED).map(drop)
    }

    /// Returns whether the kernel itself keeps guarantees of memory: on cgroup v2.
    pub fn keeps_memory(&self) -> bool {
        self.version(Controllers::MEMORY) == Some(Version::V2)
    }

    /// Opens usage and limit of a container; `None` without its cgroup, and on v2.
    pub fn memory_share(&self, name: &str) -> Result<Option<MemoryShare>, CgroupError> {
        check_name(name)?;
        self.share_of(name)
    }

    /// The same for any cgroup below the parent.
    pub(super) fn share_of(&self, name: &str) -> Result<Option<MemoryShare>, CgroupError> {
        let Some(parent) = self.v1_parent(Controllers::MEMORY)? else { return Ok(None) };
        let open = |file, flags| {
            unless_removed(parent.child(name).and_then(|dir| match dir {
                None => Ok(None),
                Some(dir) => dir.open_file(file, flags).map(Some),
            }))
            .map_err(CgroupError::Open)
        };
        let usage = open("memory.usage_in_bytes", OFlags::RDONLY)?;
        let limit = open("memory.limit_in_bytes", OFlags::RDWR)?;
        Ok(usage.zip(limit).map(|(usage, limit)| MemoryShare { usage, limit }))
    }

    /// Reads the page cache of files that is charged to a container of v1. 0 without its cgroup, and on v2.
    pub fn file_cache_bytes(&self, name: &str) -> Result<u64, CgroupError> {
        check_name(name)?;
        let Some(parent) = self.v1_parent(Controllers::MEMORY)? else { return Ok(0) };
        let stat = parent.child(name).and_then(|dir| match dir {
            None => Ok(None),
            Some(dir) => dir.read("memory.stat").map(Some),
        });
        let Some(stat) = unless_removed(stat).map_err(CgroupError::Read)? else { return Ok(0) };
        // Not "total_cache", which includes tmpfs.
        let lists = ["total_inactive_file", "total_active_file"].map(|list| field(&stat, list));
        Ok(lists[0].saturating_add(lists[1]))
    }

    /// Sets the memory of all containers together, and the parts of it that are protected from reclaim for some of
    /// them. Nothing happens without a memory controller.
    ///
    /// Errors: [`CgroupError::Set`] with EBUSY if more is in use and cannot be reclaimed.
    pub fn set_parent_memory(&self, memory: ParentMemory) -> Result<(), CgroupError> {
        self.write_parent_memory(memory, true)
    }

    /// The same, but a limit below the present one is left out. So nothing is reclaimed, and the call does not wait.
    pub fn raise_parent_memory(&self, memory: ParentMemory) -> Result<(), CgroupError> {
        self.write_parent_memory(memory, false)
    }

    fn write_parent_memory(&self, memory: ParentMemory, lowers: bool) -> Result<(), CgroupError> {
        let max = memory.max_bytes.unwrap_or(u64::MAX);
        let is_left_out = |dir: &Dir, file| -> Result<bool, CgroupError> {
            let now = dir.read_number(file).map_err(CgroupError::Read)?;
            Ok(!lowers && max < V1_UNLIMITED_BYTES && now.is_none_or(|now| max < now))
        };
        match (self.version(Controllers::MEMORY), &self.0.v2) {
            (Some(Version::V1), _) => {
                if let Some(parent) = self.v1_parent(Controllers::MEMORY)?
                    && !is_left_out(parent, "memory.limit_in_bytes")?
                {
                    parent
                        .write("memory.limit_in_bytes", &written(memory.max_bytes))
                        .map_err(set_failed)?;
                }
                self.limit_images(memory.images_bytes, memory.max_bytes.is_some(), lowers)
            }
            (Some(Version::V2), Some(v2)) => {
                let write = |file, text: &str| v2.parent.write(file, text).map_err(set_failed);
                let is_left_out = is_left_out(&v2.parent, "memory.max")?;
                if !is_left_out {
                    let max = memory.max_bytes.map_or("max".into(), |max| max.to_string());
                    // ORDER: directly after the reclaim, so that little memory is allocated between them.
                    memory.max_bytes.map_or(Ok(()), |max| reclaim_to(&v2.parent, max))?;
                    write("memory.max", &max)?;
                }
                write("memory.min", &memory.min_bytes.to_string())?;
                let images_bytes = self.protect_images(memory.images_bytes)?;
                let low_bytes = memory.low_bytes.saturating_add(images_bytes);
                write("memory.low", &low_bytes.to_string())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_of_v1_is_minus_one() {
        let texts = [None, Some(u64::MAX), Some(V1_UNLIMITED_BYTES), Some(4096)].map(written);
        assert_eq!(texts, ["-1", "-1", "-1", "4096"]);
    }
}
