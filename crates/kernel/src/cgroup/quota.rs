//! Quotas of CPU time that change while containers run.
//!
//! The kernel refuses a burst above the quota, so a lowered quota has no burst, which is removed before. Each write
//! begins a new period (`tg_set_cfs_bandwidth()`), so a quota is written rarely.

use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::Hierarchy;
use super::check_name;
use super::dir::Dir;
use super::error::CgroupError;
use super::limit::Version;
use crate::error::{Explain, Result as CallResult};

/// The quota of one container, through descriptors that stay open.
#[derive(Debug)]
pub struct CpuQuota {
    quota: OwnedFd,
    /// KERNEL(5.14).
    burst: Option<OwnedFd>,
    version: Version,
}

impl CpuQuota {
    /// Reads the quota; `None` if there is none, and if the cgroup was removed.
    pub fn get(&self) -> Result<Option<u64>, CgroupError> {
        let mut bytes = [0; 64];
        let read = match rustix::io::pread(&self.quota, &mut bytes, 0) {
            Err(rustix::io::Errno::NODEV) => return Ok(None),
            read => read.explain("pread", || "CPU quota".into()).map_err(CgroupError::Read)?,
        };
        Ok(parse(&String::from_utf8_lossy(&bytes[..read])))
    }

    /// Sets the quota of a cgroup that has one, and whose period is this one. Returns false if the cgroup was removed.
    pub fn set(&self, quota_us: u64, period_us: u32, burst_us: u64) -> Result<bool, CgroupError> {
        let quota = written(self.version, quota_us, period_us);
        let no_burst = self.burst.as_ref().map(|fd| (fd, "0".to_owned()));
        let burst = self.burst.as_ref().filter(|_| burst_us > 0);
        // ORDER: no burst above the quota at any time.
        let writes = no_burst
            .into_iter()
            .chain([(&self.quota, quota)])
            .chain(burst.map(|fd| (fd, burst_us.to_string())));
        for (fd, text) in writes {
            match rustix::io::pwrite(fd, text.as_bytes(), 0) {
                Err(rustix::io::Errno::NODEV) => return Ok(false),
                wrote => {
                    let wrote = wrote.explain("pwrite", || format!("CPU quota, {text}"));
                    wrote.map_err(|source| CgroupError::Set { limit: "CPU time", source })?;
                }
            }
        }
        Ok(true)
    }
}

/// The first word is the quota: `max` on v2 and `-1` on v1 are none.
fn parse(text: &str) -> Option<u64> {
    text.split_whitespace().next().and_then(|word| word.parse().ok())
}

/// The text for a quota.
fn written(version: Version, quota_us: u64, period_us: u32) -> String {
    match version {
        Version::V1 => quota_us.to_string(),
        Version::V2 => format!("{quota_us} {period_us}"),
    }
}

impl Hierarchy {
    /// Opens a container's quota; `None` without its cgroup, or where the kernel has no quotas.
    pub fn cpu_quota(&self, name: &str) -> Result<Option<CpuQuota>, CgroupError> {
        check_name(name)?;
        let (version, parent) = self.cpu_parent()?;
        let open = |dir: &Dir, file: &str| -> CallResult<Option<OwnedFd>> {
            match dir.open_file(file, OFlags::RDWR) {
                Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
                fd => fd.map(Some),
            }
        };
        let (quota, burst) = match version {
            Version::V1 => ("cpu.cfs_quota_us", "cpu.cfs_burst_us"),
            Version::V2 => ("cpu.max", "cpu.max.burst"),
        };
        let step = || -> CallResult<Option<CpuQuota>> {
            let Some(dir) = parent.child(name)? else { return Ok(None) };
            let Some(quota) = open(&dir, quota)? else { return Ok(None) };
            Ok(Some(CpuQuota { quota, burst: open(&dir, burst)?, version }))
        };
        step().map_err(CgroupError::Open)
    }

    /// Returns whether containers have CPU weights.
    pub fn has_cpu(&self) -> bool {
        self.cpu_parent().is_ok()
    }

    /// The id of a container's cgroup that BPF programs see; `None` without its cgroup, and without v2.
    pub fn v2_id(&self, name: &str) -> Result<Option<u64>, CgroupError> {
        check_name(name)?;
        let Some(v2) = &self.0.v2 else { return Ok(None) };
        let id = v2.parent.child(name).and_then(|dir| dir.map(|dir| dir.inode()).transpose());
        id.map_err(CgroupError::Open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_is_written_as_each_version_has_it() {
        assert_eq!(written(Version::V1, 50_000, 100_000), "50000");
        assert_eq!(written(Version::V2, 50_000, 100_000), "50000 100000");
        assert_eq!(parse("50000 100000\n"), Some(50_000));
        assert_eq!([parse("max 100000\n"), parse("-1\n"), parse("")], [None; 3]);
    }
}
