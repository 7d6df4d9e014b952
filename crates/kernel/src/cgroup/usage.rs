//! The CPU time of containers, for who asks often: nothing is held open and nothing is made.

use std::path::PathBuf;

use super::error::CgroupError;
use super::mounts::Mounts;
use super::stats::field;
use super::{Controllers, check_name};
use crate::proc;

/// `cpu.stat` of v2 has some 300 bytes.
const LARGEST_FILE_BYTES: usize = 64 << 10;

/// Where the CPU time of the containers below one parent is counted.
///
/// The kernel counts in nanoseconds at every switch of tasks and v2 tells microseconds: a task that is
/// woken, finds nothing to do and waits again has used one at least. So a container of which two looks
/// find the same number has not run in between, and it costs the busy nothing to know it.
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
        let mounts = Mounts::find()?;
        if let Some(v2) = mounts.v2 {
            return Ok(Self { parent: v2.join(parent), is_v2: true });
        }
        let v1 = mounts.v1.into_iter().find(|(c, _)| c.contains(Controllers::CPUACCT));
        let (_, v1) = v1.ok_or(CgroupError::NotMounted)?;
        Ok(Self { parent: v1.join(parent), is_v2: false })
    }

    /// What a container has used since its cgroup was made, in nanoseconds; `None` where it has no
    /// cgroup.
    pub fn of(&self, name: &str) -> Result<Option<u64>, CgroupError> {
        check_name(name)?;
        let file = if self.is_v2 { "cpu.stat" } else { "cpuacct.usage" };
        let path = self.parent.join(name).join(file);
        let text = match proc::read_text(&path, LARGEST_FILE_BYTES) {
            // It may also be removed between the open and the read.
            Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => return Ok(None),
            text => text.map_err(CgroupError::Read)?,
        };
        Ok(Some(match self.is_v2 {
            true => field(&text, "usage_usec").saturating_mul(1_000),
            false => text.trim().parse().unwrap_or(0),
        }))
    }
}
