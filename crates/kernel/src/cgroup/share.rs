//! CPU weights that change while containers run, and the weight of all containers together.
//!
//! A weight is in *shares* here, on the scale of v1: 1024 is the default of both versions. v2 has a
//! hundred steps where v1 has 1024, so a share is rounded there.
//!
//! | | v1 | v2 |
//! |---|---|---|
//! | file | `cpu.shares` | `cpu.weight` = shares x 100 / 1024 |
//! | range in shares | 2 to 262,144 | 10 to 102,400 |
//!
//! A weight is a share of the time that the cgroups of one level get. It promises no CPUs: the parent
//! competes with its siblings, and on v1 with every task in the root cgroup.

use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::dir::{Dir, field};
use super::error::CgroupError;
use super::limit::{self, Host as _, Version};
use super::mounts::Mounts;
use super::{Controllers, Hierarchy, check_name};
use crate::error::{CallError, Explain, Result as CallResult};
use crate::proc;

/// The default weight.
const SHARES: u32 = 1024;
/// The largest weight of v2.
const SHARES_MAX: u32 = 102_400;
/// The largest weight of v1.
const V1_SHARES_MAX: u64 = 262_144;
/// Bytes read of `cpu.stat`, which has some 300.
const STAT_BYTES: usize = 2048;
/// The list of controllers has some 80.
const CONTROLLERS_BYTES: usize = 4096;

/// CPU time and weight of one container, through descriptors that stay open.
#[derive(Debug)]
pub struct CpuShare {
    /// v2's `cpu.stat`, or v1's `cpuacct.usage`.
    usage: OwnedFd,
    is_v2_usage: bool,
    weight: OwnedFd,
    version: Version,
}

impl CpuShare {
    /// CPU time since the cgroup was made, in nanoseconds; `None` if the cgroup was removed.
    pub fn used_ns(&self) -> Result<Option<u64>, CgroupError> {
        let mut bytes = [0; STAT_BYTES];
        let read = match rustix::io::pread(&self.usage, &mut bytes, 0) {
            Err(rustix::io::Errno::NODEV) => return Ok(None),
            read => read.explain("pread", || "CPU time".into()).map_err(CgroupError::Read)?,
        };
        let text = String::from_utf8_lossy(&bytes[..read]);
        Ok(Some(match self.is_v2_usage {
            true => field(&text, "usage_usec").saturating_mul(1000),
            false => text.trim().parse().unwrap_or(0),
        }))
    }

    /// Sets the weight. Returns false if the cgroup was removed.
    pub fn set(&self, shares: u32) -> Result<bool, CgroupError> {
        let text = written(self.version, shares);
        match rustix::io::pwrite(&self.weight, text.as_bytes(), 0) {
            Err(rustix::io::Errno::NODEV) => Ok(false),
            wrote => {
                let wrote = wrote.explain("pwrite", || format!("CPU weight, {text}"));
                wrote.map(|_| true).map_err(set_failed)
            }
        }
    }
}

fn set_failed(source: CallError) -> CgroupError {
    CgroupError::Set { limit: "CPU weight", source }
}

fn file(version: Version) -> &'static str {
    match version {
        Version::V1 => "cpu.shares",
        Version::V2 => "cpu.weight",
    }
}

/// The text for a weight in shares.
fn written(version: Version, shares: u32) -> String {
    let shares = u64::from(shares);
    match version {
        Version::V1 => shares.clamp(2, V1_SHARES_MAX),
        Version::V2 => ((shares * 100 + 512) / 1024).clamp(1, 10_000),
    }
    .to_string()
}

/// The weight of a cgroup, in shares.
pub(super) fn read(version: Version, dir: &Dir) -> CallResult<u32> {
    let number = dir.read_number(file(version))?.unwrap_or(0);
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    Ok(match version {
        Version::V1 => number,
        Version::V2 => limit::shares(number) as u32,
    })
}

/// The weight at which a parent gets `reserved_milli` of `all_milli`, beside siblings with a weight of `others`
/// together.
fn parent_shares(others: u64, reserved_milli: u32, all_milli: u32) -> u32 {
    let rest = u64::from(all_milli.saturating_sub(reserved_milli));
    let shares = others.saturating_mul(u64::from(reserved_milli)) / rest.max(1);
    shares.clamp(SHARES.into(), V1_SHARES_MAX) as u32
}

impl Hierarchy {
    /// The largest weight of a container, in shares.
    pub fn shares_max(&self) -> u32 {
        match self.version(Controllers::CPU) {
            Some(Version::V1) => V1_SHARES_MAX as u32,
            _ => SHARES_MAX,
        }
    }

    /// Opens a container's CPU time and weight; `None` without its cgroup.
    pub fn cpu_share(&self, name: &str) -> Result<Option<CpuShare>, CgroupError> {
        check_name(name)?;
        let (version, parent) = self.cpu_parent()?;
        let open = |parent: &Dir, file: &str, flags| -> CallResult<Option<OwnedFd>> {
            let Some(dir) = parent.child(name)? else { return Ok(None) };
            match dir.open_file(file, flags) {
                Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
                fd => fd.map(Some),
            }
        };
        let (is_v2_usage, usage) = match &self.0.v2 {
            Some(v2) => (true, open(&v2.parent, "cpu.stat", OFlags::RDONLY)),
            None => match self.v1_parent(Controllers::CPUACCT)? {
                Some(parent) => (false, open(parent, "cpuacct.usage", OFlags::RDONLY)),
                None => return Err(self.no_cpu("CPU reservation")),
            },
        };
        let weight = open(parent, file(version), OFlags::WRONLY).map_err(CgroupError::Open)?;
        let usage = usage.map_err(CgroupError::Open)?;
        let (Some(usage), Some(weight)) = (usage, weight) else { return Ok(None) };
        Ok(Some(CpuShare { usage, is_v2_usage, weight, version }))
    }

    /// The weight of a container; `None` without its cgroup.
    pub fn shares_of(&self, name: &str) -> Result<Option<u32>, CgroupError> {
        check_name(name)?;
        let (version, parent) = self.cpu_parent()?;
        let shares = parent.child(name).and_then(|dir| match dir {
            None => Ok(None),
            Some(dir) => read(version, &dir).map(Some),
        });
        unless_removed(shares).map_err(CgroupError::Read)
    }

    /// Sets the weight of a container. Returns false without its cgroup.
    pub fn set_shares(&self, name: &str, shares: u32) -> Result<bool, CgroupError> {
        check_name(name)?;
        let (version, parent) = self.cpu_parent()?;
        let wrote = parent.child(name).and_then(|dir| match dir {
            None => Ok(None),
            Some(dir) => dir.write(file(version), &written(version, shares)).map(Some),
        });
        Ok(unless_removed(wrote).map_err(set_failed)?.is_some())
    }

    /// Sets the weight of all containers together, so that they get what is reserved, `reserved_milli` of the CPUs'
    /// `all_milli`, while every cgroup of the host beside them is busy. `None` sets the default.
    ///
    /// The weight is not larger than that. Threads of the kernel work for containers, such as those of loop devices
    /// and journals, and compete with all containers together. Beside W times its weight, a thread that becomes ready
    /// waits for some W milliseconds: the scheduler (EEVDF) lets it run after the turn of the heavier group, whose
    /// length grows with its weight.
    ///
    /// Other instances of Dormouse do not count as the host.
    pub fn set_parent_shares(&self, part: Option<(u32, u32)>) -> Result<(), CgroupError> {
        let (version, parent) = self.cpu_parent()?;
        let shares = match part {
            None => SHARES,
            Some((reserved, all)) => parent_shares(self.shares_beside(version)?, reserved, all),
        };
        if read(version, parent).map_err(CgroupError::Read)? == shares {
            return Ok(());
        }
        parent.write(file(version), &written(version, shares)).map_err(set_failed)
    }

    /// The weights of all cgroups beside the parent, in shares.
    ///
    /// LIMIT: on v1 tasks of the host compete as single tasks, 1024 shares each, and their number changes all the
    /// time. The host is taken for one busy task on each CPU.
    fn shares_beside(&self, version: Version) -> Result<u64, CgroupError> {
        let mount = match (version, &self.0.v2) {
            (Version::V2, Some(v2)) => Some(&v2.mount),
            _ => self
                .0
                .v1
                .iter()
                .find(|v1| v1.controllers.contains(Controllers::CPU))
                .map(|v1| &v1.mount),
        };
        let Some(mount) = mount else { return Ok(SHARES.into()) };
        let root = Dir::open(mount).map_err(CgroupError::Open)?;
        let mut sum = match version {
            Version::V1 => u64::from(online_cpus()?) * u64::from(SHARES),
            Version::V2 => 0,
        };
        for name in root.names().map_err(CgroupError::Read)? {
            if name == self.0.parent || name.starts_with(super::DEFAULT_PARENT) {
                continue;
            }
            let one = root.child(&name).and_then(|dir| match dir {
                None => Ok(None),
                Some(dir) => read(version, &dir).map(Some),
            });
            sum += u64::from(unless_removed(one).map_err(CgroupError::Read)?.unwrap_or(0));
        }
        Ok(sum.max(SHARES.into()))
    }

    /// The parent in the hierarchy of the cpu controller.
    pub(super) fn cpu_parent(&self) -> Result<(Version, &Dir), CgroupError> {
        match (self.version(Controllers::CPU), &self.0.v2) {
            (Some(Version::V2), Some(v2)) => Ok((Version::V2, &v2.parent)),
            (Some(Version::V1), _) => match self.v1_parent(Controllers::CPU)? {
                Some(parent) => Ok((Version::V1, parent)),
                None => Err(self.no_cpu("CPU weight")),
            },
            _ => Err(self.no_cpu("CPU weight")),
        }
    }

    fn no_cpu(&self, limit: &'static str) -> CgroupError {
        let why = self.why_missing(Controllers::CPU);
        CgroupError::Missing { limit, why, since: "2.6.24" }
    }
}

/// The shares of a `cpu.weight`.
pub fn shares_of_weight(weight: u32) -> u32 {
    limit::shares(weight) as u32
}

/// Whether the cpu controller is one of cgroup v2.
pub fn cpu_is_v2() -> Result<bool, CgroupError> {
    let Some(v2) = Mounts::find(None)?.v2 else { return Ok(false) };
    let controllers = proc::read_text(v2.join("cgroup.controllers"), CONTROLLERS_BYTES);
    let controllers = controllers.map_err(CgroupError::Read)?;
    Ok(controllers.split_whitespace().any(|name| name == "cpu"))
}

/// The number of CPUs that are online.
pub fn online_cpus() -> Result<u32, CgroupError> {
    Ok(count_cpus(proc::online_cpus().map_err(CgroupError::Read)?.trim()).unwrap_or(1).max(1))
}

/// Number of CPUs in a list such as `0-3,8`; `None` if it is no list.
pub fn count_cpus(list: &str) -> Option<u32> {
    Some(proc::cpu_runs(list)?.iter().map(|(first, last)| last - first + 1).sum())
}

/// `None` for a cgroup that was removed meanwhile.
fn unless_removed<T>(result: CallResult<Option<T>>) -> CallResult<Option<T>> {
    match result {
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_converted_within_the_bounds_of_each_version() {
        let v1 = [0, 2, 1024, 5000, u32::MAX].map(|s| written(Version::V1, s));
        assert_eq!(v1, ["2", "2", "1024", "5000", "262144"]);
        let v2 = [0, 1024, 5120, 102_400, u32::MAX].map(|s| written(Version::V2, s));
        assert_eq!(v2, ["1", "100", "500", "10000", "10000"]);
    }

    #[test]
    fn parent_gets_what_is_reserved_beside_a_busy_host() {
        // Half of two CPUs: the weight of the host.
        assert_eq!(parent_shares(2 * 1024, 1000, 2000), 2 * 1024);
        // All but 5 %: 19 times that.
        assert_eq!(parent_shares(2 * 1024, 1900, 2000), 19 * 2 * 1024);
        assert_eq!(parent_shares(300 * 1024, 1900, 2000), 262_144, "v1 has no larger weight");
        assert_eq!(parent_shares(1024, 500, 2000), 1024, "never below the default");
        assert_eq!(parent_shares(1024, 2000, 2000), 262_144);
        assert_eq!(parent_shares(u64::MAX, 1999, 2000), 262_144);
    }

    #[test]
    fn cpus_of_a_list_are_counted() {
        assert_eq!(count_cpus("0-3,8"), Some(5));
        assert_eq!(count_cpus("0"), Some(1));
        assert_eq!(count_cpus("x"), None);
    }
}
