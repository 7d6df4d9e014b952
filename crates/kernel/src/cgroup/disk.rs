//! Rates and weights of disks: which files they are written to, on which disk they hold, and which of them the kernel
//! does not enforce.
//!
//! | | v2 | v1 |
//! |---|---|---|
//! | rates | `io.max`, a line for each disk | `blkio.throttle.*_device`, a file for each kind |
//! | writes of the page cache | counted for a cgroup where the file system does | for the root ([`super::writeback`]) |
//! | rates of cgroups below | bounded by those above | independent of those above |
//!
//! **A disk, not a part of it.** The kernel takes rates for whole disks only, so a partition is replaced by its disk.
//! A file system of its own number (btrfs, overlay, tmpfs, network) is on no disk that could be named here.
//!
//! **Not enforced** is a fact of a host at one time and not an error: the scheduler of a disk changes while containers
//! run, and a checkpoint comes to another host. [`Hierarchy::not_enforced`] has the one wording for all who say it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use dormouse_model::{DiskRate, DiskRateKind, Invalid, Limits};
use rustix::fs::FileType;

use super::dir::Dir;
use super::error::CgroupError;
use super::life::walk;
use super::limit::{Host as _, Version};
use super::{Cgroup, Controllers, Hierarchy};
use crate::error::Explain;
use crate::proc;

pub(super) const RATE: &str = "disk rate";
/// Bytes read of a file of sysfs.
const SYSFS_BYTES: usize = 4096;
/// File systems that count writes of the page cache for a cgroup (SB_I_CGROUPWB; statfs(2) has their numbers).
/// KERNEL(4.2): ext2, ext4 and btrfs; xfs since 5.4, f2fs since 4.16.
const COUNTS_WRITES: [u32; 4] = [0xef53, 0x9123_683e, 0x5846_5342, 0xf2f5_2010];

/// The number of a whole disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Disk {
    major: u32,
    minor: u32,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl Disk {
    /// The disk of a block device.
    pub(super) fn of(device: u64) -> Result<Self, CgroupError> {
        let mut disk = Self { major: rustix::fs::major(device), minor: rustix::fs::minor(device) };
        if disk.sysfs("partition").exists() {
            let text = proc::read_text(disk.sysfs("../dev"), SYSFS_BYTES);
            let text = text.map_err(CgroupError::Read)?;
            disk = Self::parse(text.trim()).unwrap_or(disk);
        }
        Ok(disk)
    }

    /// The disk with the file system of a file.
    pub(super) fn below(storage: &Path) -> Result<Self, CgroupError> {
        let stat = rustix::fs::stat(storage).explain("stat", || format!("{storage:?}"));
        let device = stat.map_err(CgroupError::Read)?.st_dev;
        // A number that stands for no device has major 0 (Documentation/admin-guide/devices.txt).
        if rustix::fs::major(device) == 0 {
            let why = format!(
                "the file system of {} is on no disk by itself: name the disk, as in --io-read-bps /dev/sda:10m",
                storage.display()
            );
            return Err(CgroupError::Missing { limit: RATE, why, since: "2.6.37" });
        }
        Self::of(device)
    }

    /// The disk that a device node belongs to.
    fn named(path: &Path) -> Result<Self, CgroupError> {
        let stat = rustix::fs::stat(path).explain("stat", || format!("{path:?}"));
        let stat = stat.map_err(|source| CgroupError::Set { limit: RATE, source })?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
            let path = path.display().to_string();
            return Err(Invalid::new("disk", path, "a block device such as /dev/sda").into());
        }
        Self::of(stat.st_rdev)
    }

    fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    fn sysfs(self, file: &str) -> PathBuf {
        Path::new("/sys/dev/block").join(self.to_string()).join(file)
    }

    /// The name of its device node.
    pub(super) fn name(self) -> String {
        let text = proc::read_text(self.sysfs("uevent"), SYSFS_BYTES).unwrap_or_default();
        match text.lines().find_map(|line| line.strip_prefix("DEVNAME=")) {
            Some(name) => format!("/dev/{name}"),
            None => self.to_string(),
        }
    }

    /// The disks that schedule its requests. Device mapper and md pass bios on to the disks below them, with the cgroup
    /// of each; the kernel shows no scheduler in brackets for them.
    fn scheduling(self) -> Vec<Self> {
        let (mut found, mut next) = (Vec::new(), vec![self]);
        while let Some(disk) = next.pop() {
            let below = if disk.scheduler().is_none() { disk.below_it() } else { Vec::new() };
            match below.is_empty() {
                true => found.push(disk),
                false => next.extend(below),
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The disks of a disk that has no medium of its own.
    fn below_it(self) -> Vec<Self> {
        let entries = std::fs::read_dir(self.sysfs("slaves")).into_iter().flatten().flatten();
        let disk = |entry: std::fs::DirEntry| {
            let text = proc::read_text(entry.path().join("dev"), SYSFS_BYTES).ok()?;
            let part = Self::parse(text.trim())?;
            Self::of(rustix::fs::makedev(part.major, part.minor)).ok()
        };
        entries.filter_map(disk).collect()
    }

    /// The scheduler in use, which is in brackets.
    fn scheduler(self) -> Option<String> {
        let text = proc::read_text(self.sysfs("queue/scheduler"), SYSFS_BYTES).ok()?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }
}

/// The most of each kind on each disk.
pub(super) type Rules = BTreeMap<(Disk, DiskRateKind), u64>;

/// Finds the disks of rates. Of several rates for one disk the smallest holds.
pub(super) fn rules(rates: &[DiskRate], storage: &Path) -> Result<Rules, CgroupError> {
    let mut rules = Rules::new();
    for rate in rates.iter().filter(|rate| rate.most > 0) {
        let disk = rate.device.as_deref().map_or_else(|| Disk::below(storage), Disk::named)?;
        let most = rules.entry((disk, rate.kind)).or_insert(rate.most);
        *most = rate.most.min(*most);
    }
    Ok(rules)
}

/// The file of v1 and the key of `io.max`.
pub(super) fn names(kind: DiskRateKind) -> (&'static str, &'static str) {
    match kind {
        DiskRateKind::ReadBps => ("blkio.throttle.read_bps_device", "rbps"),
        DiskRateKind::WriteBps => ("blkio.throttle.write_bps_device", "wbps"),
        DiskRateKind::ReadIops => ("blkio.throttle.read_iops_device", "riops"),
        DiskRateKind::WriteIops => ("blkio.throttle.write_iops_device", "wiops"),
    }
}

/// A file that a cgroup has where the kernel has rates of disks.
fn file(version: Version) -> &'static str {
    match version {
        Version::V1 => names(DiskRateKind::ReadBps).0,
        Version::V2 => "io.max",
    }
}

/// Reads the rules in force.
fn in_force(dir: &Dir, version: Version) -> Result<Rules, CgroupError> {
    let mut rules = Rules::new();
    match version {
        Version::V1 => {
            for kind in DiskRateKind::ALL {
                rules.append(&mut in_file(dir, kind)?);
            }
        }
        Version::V2 => parse_v2(&dir.read("io.max").map_err(CgroupError::Read)?, &mut rules),
    }
    Ok(rules)
}

/// Reads the rules of one kind in force on v1.
pub(super) fn in_file(dir: &Dir, kind: DiskRateKind) -> Result<Rules, CgroupError> {
    let mut rules = Rules::new();
    parse_v1(&dir.read(names(kind).0).map_err(CgroupError::Read)?, kind, &mut rules);
    Ok(rules)
}

/// `254:0 1048576` for each disk.
fn parse_v1(text: &str, kind: DiskRateKind, rules: &mut Rules) {
    for line in text.lines() {
        if let Some((disk, most)) = line.split_once(' ')
            && let (Some(disk), Ok(most)) = (Disk::parse(disk), most.trim().parse())
        {
            rules.insert((disk, kind), most);
        }
    }
}

/// `254:0 rbps=1048576 wbps=max riops=max wiops=max` for each disk.
fn parse_v2(text: &str, rules: &mut Rules) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(disk) = words.next().and_then(Disk::parse) else { continue };
        for (key, value) in words.filter_map(|word| word.split_once('=')) {
            let kind = DiskRateKind::ALL.into_iter().find(|kind| names(*kind).1 == key);
            if let (Some(kind), Ok(most)) = (kind, value.parse()) {
                rules.insert((disk, kind), most);
            }
        }
    }
}

/// Writes one rule; `None` removes it.
pub(super) fn write(
    dir: &Dir,
    version: Version,
    (disk, kind): (Disk, DiskRateKind),
    most: Option<u64>,
) -> Result<(), CgroupError> {
    let (file, key) = names(kind);
    let written = match (version, most) {
        (Version::V1, most) => dir.write(file, &format!("{disk} {}", most.unwrap_or(0))),
        (Version::V2, Some(most)) => dir.write("io.max", &format!("{disk} {key}={most}")),
        (Version::V2, None) => dir.write("io.max", &format!("{disk} {key}=max")),
    };
    match written {
        // The disk was removed, and the rule with it.
        Err(e) if most.is_none() && e.errno() == libc::ENODEV => Ok(()),
        written => written.map_err(|source| CgroupError::Set { limit: RATE, source }),
    }
}

impl Hierarchy {
    /// Refuses rates of disks that no kernel, or not this host, takes. Nothing is made or changed.
    ///
    /// `storage` is a directory on the file system that a container writes to.
    pub fn check_disk_rates(&self, rates: &[DiskRate], storage: &Path) -> Result<(), CgroupError> {
        DiskRate::check_all(rates)?;
        if rates.is_empty() {
            return Ok(());
        }
        let missing = |why| CgroupError::Missing { limit: RATE, why, since: "2.6.37" };
        let Some(version) = self.version(Controllers::IO) else {
            return Err(missing(self.why_missing(Controllers::IO)));
        };
        let file = file(version);
        if !self.has(Controllers::IO, file) {
            let why = format!("the kernel has no {file} (it needs CONFIG_BLK_DEV_THROTTLING)");
            return Err(missing(why));
        }
        rules(rates, storage).map(drop)
    }

    /// Says which of these limits of disks this host takes and does not enforce, in the words for the user.
    pub fn not_enforced(&self, limits: &Limits, storage: &Path) -> Vec<String> {
        let mut all = Vec::new();
        if limits.io_weight.is_some()
            && let Ok(disk) = Disk::below(storage)
            && let Some((disk, why)) = disk
                .scheduling()
                .into_iter()
                .find_map(|disk| Some((disk, self.ignores_weight(disk)?)))
        {
            all.push(format!("the disk weight is not enforced on {}: {why}", disk.name()));
        }
        let is_write = |rate: &&DiskRate| rate.kind.is_write() && rate.most > 0;
        if limits.disk_rates.iter().any(|rate| is_write(&rate))
            && let Some(why) = self.ignores_page_cache(limits, storage)
        {
            let what = "rates of disk writes are not enforced for writes through the page cache";
            all.push(format!("{what}: {why}"));
        }
        all
    }

    /// Returns why a disk does not honour weights.
    fn ignores_weight(&self, disk: Disk) -> Option<String> {
        let scheduler = disk.scheduler().unwrap_or_else(|| "none".into());
        let bfq = "bfq honours them: echo bfq > /sys/block/DISK/queue/scheduler";
        let other = || format!("its scheduler '{scheduler}' ignores weights ({bfq})");
        let cost = || {
            let root = Dir::open(&self.0.v2.as_ref()?.mount).ok()?;
            let text = root.read("io.cost.qos").ok()?;
            let of = |line: &&str| line.split_once(' ').is_some_and(|it| it.0 == disk.to_string());
            text.lines().find(of).map(|line| line.contains(" enable=1"))
        };
        let by_cost = self.version(Controllers::IO) == Some(Version::V2) && cost() == Some(true);
        (scheduler != "bfq" && !by_cost).then(other)
    }

    /// Returns why writes through the page cache are not counted for the container.
    fn ignores_page_cache(&self, limits: &Limits, storage: &Path) -> Option<String> {
        let version = |controller| self.version(controller);
        match (version(Controllers::IO), version(Controllers::MEMORY)) {
            (None, _) => None, // refused
            (Some(Version::V2), Some(Version::V2)) => {
                let kind = rustix::fs::statfs(storage).map_or(0, |found| found.f_type as u32);
                let why = "the file system of its storage counts them for the host";
                (!COUNTS_WRITES.contains(&kind)).then(|| why.to_owned())
            }
            _ => self.ignores_page_cache_v1(limits, storage),
        }
    }
}

impl Cgroup {
    /// Sets the rates of disks to these, and removes all others. `storage` is a directory on the file system that the
    /// container writes to. Requests that wait are released by a higher rate.
    pub fn set_disk_rates(&self, rates: &[DiskRate], storage: &Path) -> Result<(), CgroupError> {
        self.hierarchy.check_disk_rates(rates, storage)?;
        let wanted = rules(rates, storage)?;
        let Some((dir, version)) = self.with_disk_rates() else { return Ok(()) }; // rates were refused above
        let present = in_force(dir, version)?;
        for rule in present.keys().filter(|rule| !wanted.contains_key(rule)) {
            write(dir, version, *rule, None)?;
        }
        for (rule, most) in wanted.iter().filter(|(rule, most)| present.get(rule) != Some(most)) {
            write(dir, version, *rule, Some(*most))?;
        }
        Ok(())
    }

    /// Removes all rates of disks, also from cgroups below, so that no process waits for its turn: a process that waits
    /// for the disk cannot be killed. Root of a container may have made cgroups with rates of their own.
    pub fn lift_disk_rates(&self) -> Result<(), CgroupError> {
        let Some((dir, version)) = self.with_disk_rates() else { return Ok(()) };
        let lift = |dir: &Dir| -> Result<(), CgroupError> {
            let present = in_force(dir, version)?;
            present.keys().try_for_each(|rule| write(dir, version, *rule, None))
        };
        let mut first = None;
        let walked = walk(dir, 0, &mut |dir| {
            if dir.has(file(version))
                && let Err(e) = lift(dir)
            {
                first.get_or_insert(e);
            }
            Ok(())
        });
        walked.map_err(CgroupError::Read)?;
        first.map_or(Ok(()), Err)
    }

    /// Its directory with files for rates of disks, if the kernel has them.
    fn with_disk_rates(&self) -> Option<(&Dir, Version)> {
        let v2 = self.in_v2(Controllers::IO).map(|dir| (dir, Version::V2));
        let v1 = || self.in_v1(Controllers::IO).map(|dir| (dir, Version::V1));
        v2.or_else(v1).filter(|(dir, version)| dir.has(file(*version)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: DiskRateKind = DiskRateKind::ReadBps;
    const VDA: Disk = Disk { major: 254, minor: 0 };

    #[test]
    fn rules_in_force_are_read_in_both_versions() {
        let mut rules = Rules::new();
        parse_v1("254:0 1048576\n8:16 18446744073709551615\nbad\n:1 2\n", READ, &mut rules);
        let sdb = Disk { major: 8, minor: 16 };
        assert_eq!(rules, BTreeMap::from([((VDA, READ), 1 << 20), ((sdb, READ), u64::MAX)]));
        let mut rules = Rules::new();
        parse_v2("254:0 rbps=1048576 wbps=max riops=7 wiops=max x=1\n\n254: rbps=1\n", &mut rules);
        let iops = (VDA, DiskRateKind::ReadIops);
        assert_eq!(rules, BTreeMap::from([((VDA, READ), 1 << 20), (iops, 7)]));
    }

    #[test]
    fn disk_is_a_block_device_and_never_a_part_of_one() {
        let error = Disk::named(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(error.contains("disk '/dev/null' is not valid: a block device"), "{error}");
        assert!(Disk::named(Path::new("/no/such/device")).is_err());
        let error = Disk::below(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.contains("/proc is on no disk by itself: name the disk"), "{error}");
        let parts = std::fs::read_dir("/sys/class/block").unwrap().flatten();
        for part in parts.filter(|entry| entry.path().join("partition").exists()) {
            let number = std::fs::read_to_string(part.path().join("dev")).unwrap();
            let number = Disk::parse(number.trim()).unwrap();
            let disk = Disk::of(rustix::fs::makedev(number.major, number.minor)).unwrap();
            assert!(disk != number && !disk.sysfs("partition").exists(), "{number} {disk}");
        }
    }

    #[test]
    fn disks_that_schedule_have_none_below() {
        for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
            let number = std::fs::read_to_string(entry.path().join("dev")).unwrap();
            let disk = Disk::parse(number.trim()).unwrap();
            let found = disk.scheduling();
            assert!(!found.is_empty(), "{disk}");
            let is_last = |it: &Disk| it.scheduler().is_some() || it.below_it().is_empty();
            assert!(found.iter().all(is_last), "{disk} {found:?}");
        }
    }
}
