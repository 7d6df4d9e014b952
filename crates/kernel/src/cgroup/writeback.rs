//! Rates of writes through the page cache on cgroup v1, for a loop device with the files of one container.
//!
//! A thread of the kernel, the *flusher*, writes dirty pages to their disk. cgroup v1 counts its writes for the root of
//! the hierarchy, so that a rate of a container does not hold them. A rate for the same disk in the root does, and also
//! holds every other process of the root. A loop device with the file system of one container has no others.
//!
//! **Dirty pages.** The flusher puts many megabytes into one request, which waits until the rate has room for all of
//! it. sync(2), and the unmount at the end of the container, wait as well. The pages that may be dirty are
//! therefore bounded to those of a second (`strict_limit` and `max_bytes`,
//! `Documentation/ABI/testing/sysfs-class-bdi` of the kernel). Without these files the rates hold over longer times.
//!
//! **What outlives.** Rates and bound belong to the disk of the device, and stay when its file is detached. The next
//! file of any program would have them. A caller therefore clears them ([`RootRates::clear`]) after the end of each
//! container, and before it uses a new device.
//!
//! On v2 these writes are counted for the container, and nothing of this module is used.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use dormouse_model::{DiskRate, DiskRateKind, Drive, Limits};
use rustix::fs::OFlags;

use super::dir::Dir;
use super::disk::{Disk, RATE, in_file, rules, write};
use super::error::CgroupError;
use super::limit::{Host as _, Version};
use super::{Controllers, Hierarchy};
use crate::error::{Explain, Result as CallResult};
use crate::loop_device::LoopDevice;

/// A file that only the root of a hierarchy has, also where a cgroup namespace shows another cgroup as the root
/// (`CFTYPE_ONLY_ON_ROOT`).
const ONLY_IN_ROOT: &str = "release_agent";
/// LIMIT: bytes of dirty pages with the smallest rates.
const LEAST_DIRTY_BYTES: u64 = 256 << 10;
/// The least bytes of a request.
const REQUEST_BYTES: u64 = 4096;
/// The kinds of rates that hold writes.
const WRITES: [DiskRateKind; 2] = [DiskRateKind::WriteBps, DiskRateKind::WriteIops];

/// The most that the flusher writes to one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteRates {
    /// Bytes per second.
    pub bytes: Option<u64>,
    /// Requests per second.
    pub requests: Option<u64>,
}

impl WriteRates {
    /// Whether no rate is set.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn of(&self, kind: DiskRateKind) -> Option<u64> {
        match kind {
            DiskRateKind::WriteBps => self.bytes,
            DiskRateKind::WriteIops => self.requests,
            DiskRateKind::ReadBps | DiskRateKind::ReadIops => None,
        }
    }

    /// The bytes that may be dirty: those of a second.
    fn dirty_bytes(&self) -> u64 {
        let requests = self.requests.map(|n| n.saturating_mul(REQUEST_BYTES));
        let all = [self.bytes, requests].into_iter().flatten().min().unwrap_or(u64::MAX);
        all.max(LEAST_DIRTY_BYTES)
    }
}

/// The rates of the root of v1's blkio hierarchy.
#[derive(Debug)]
pub struct RootRates {
    root: Dir,
}

impl Hierarchy {
    /// Opens the rates of the root, `None` where the kernel counts writes through the page cache for the container
    /// (cgroup v2), or has no rates. The error is the reason why the rates of the root cannot be set.
    pub fn root_rates(&self) -> Option<Result<RootRates, String>> {
        let v1 = self.0.v1.iter().find(|v1| v1.controllers.contains(Controllers::IO))?;
        Some(RootRates::open(&v1.mount).map_err(|e| e.to_string()).and_then(|found| {
            let why = || format!("{} is not the root of its hierarchy", v1.mount.display());
            found.ok_or_else(why)
        }))
    }

    /// Returns the write rates of these limits for the disk of a container's own files. `storage` is a directory on it.
    pub fn write_rates(
        &self,
        rates: &[DiskRate],
        storage: &Path,
    ) -> Result<WriteRates, CgroupError> {
        if !rates.iter().any(|rate| rate.kind.is_write() && rate.most > 0) {
            return Ok(WriteRates::default());
        }
        let (rules, disk) = (rules(rates, storage)?, Disk::below(storage)?);
        let of = |kind| rules.get(&(disk, kind)).copied();
        Ok(WriteRates { bytes: of(DiskRateKind::WriteBps), requests: of(DiskRateKind::WriteIops) })
    }

    /// Returns why writes through the page cache are not held by rates on v1, in the words for the user.
    pub(super) fn ignores_page_cache_v1(&self, limits: &Limits, storage: &Path) -> Option<String> {
        const COUNTS: &str = "cgroup v1 counts them for the host";
        if Drive::of(limits).is_none() {
            return Some(format!("{COUNTS} (with --disk they are held; cgroup v2 counts them)"));
        }
        let cannot = |why| format!("{COUNTS}, and its rates cannot be set here: {why}");
        match (self.version(Controllers::IO), self.root_rates()) {
            (Some(Version::V1), Some(Ok(_))) => {}
            (Some(Version::V1), Some(Err(why))) => return Some(cannot(why)),
            _ => return Some(cannot("the memory controller is of v1".into())),
        }
        let own = Disk::below(storage).ok();
        let others = rules(&limits.disk_rates, storage).unwrap_or_default();
        let mut others = others.into_keys().filter(|(_, kind)| kind.is_write());
        let (other, _) = others.find(|(disk, _)| Some(*disk) != own)?;
        Some(format!("{COUNTS} on {}, where the container's own disk is not", other.name()))
    }
}

impl RootRates {
    /// Opens the root; `None` if this directory is not it.
    fn open(mount: &Path) -> CallResult<Option<Self>> {
        let root = Dir::open(mount)?;
        if !root.has(ONLY_IN_ROOT) {
            return Ok(None);
        }
        for kind in WRITES {
            root.open_file(super::disk::names(kind).0, OFlags::WRONLY)?;
        }
        Ok(Some(Self { root }))
    }

    /// Sets the rates of a device, and the bound of its dirty pages, in place of earlier ones. Waiting requests are
    /// released by a higher rate.
    ///
    /// Errors: [`CgroupError::Set`] if the kernel refuses a rate.
    pub fn set(&self, device: &LoopDevice, rates: WriteRates) -> Result<(), CgroupError> {
        if rates.is_none() {
            return self.clear(device);
        }
        let disk = disk_of(device)?;
        for kind in WRITES {
            write(&self.root, Version::V1, (disk, kind), rates.of(kind))?;
        }
        bound_dirty(disk, Some(rates.dirty_bytes()));
        Ok(())
    }

    /// Removes the rates of a device, and the bound of its dirty pages. Waiting requests are released.
    pub fn clear(&self, device: &LoopDevice) -> Result<(), CgroupError> {
        self.clear_disk(disk_of(device)?)
    }

    /// The same for the device node of a device that may have no file any more. Without the device there is nothing to
    /// clear.
    pub fn clear_node(&self, node: &Path) -> Result<(), CgroupError> {
        let found = match rustix::fs::stat(node) {
            Err(crate::Errno::NOENT | crate::Errno::NXIO | crate::Errno::NODEV) => return Ok(()),
            found => found.explain("stat", || format!("{node:?}")).map_err(CgroupError::Read)?,
        };
        self.clear_disk(Disk::of(found.st_rdev)?)
    }

    fn clear_disk(&self, disk: Disk) -> Result<(), CgroupError> {
        for kind in WRITES {
            write(&self.root, Version::V1, (disk, kind), None)?;
        }
        bound_dirty(disk, None);
        Ok(())
    }

    /// Returns the rates of a device that are in force.
    pub fn read(&self, device: &LoopDevice) -> Result<WriteRates, CgroupError> {
        let disk = disk_of(device)?;
        let of = |kind| in_file(&self.root, kind).map(|all| all.get(&(disk, kind)).copied());
        Ok(WriteRates {
            bytes: of(DiskRateKind::WriteBps)?,
            requests: of(DiskRateKind::WriteIops)?,
        })
    }
}

fn disk_of(device: &LoopDevice) -> Result<Disk, CgroupError> {
    let number = device.number();
    Disk::of(number.map_err(|source| CgroupError::Set { limit: RATE, source })?)
}

/// Bounds the dirty pages of a disk; `None` removes the bound. Best effort: the rates hold without it.
///
/// KERNEL(6.2): `strict_limit` and `max_bytes` exist. Before, a process may fill memory with dirty pages, as without a
/// rate.
fn bound_dirty(disk: Disk, bytes: Option<u64>) {
    let dir = Path::new("/sys/class/bdi").join(disk.to_string());
    let put = |file: &str, value: &str| -> std::io::Result<()> {
        File::options().write(true).open(dir.join(file))?.write_all(value.as_bytes())
    };
    let _ = match bytes {
        // ORDER: the bound before it is strict.
        Some(bytes) => put("max_bytes", &bytes.to_string()).and_then(|()| put("strict_limit", "1")),
        // In percent: the default.
        None => put("strict_limit", "0").and_then(|()| put("max_ratio", "100")),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loop_device;

    #[test]
    fn dirty_pages_are_those_of_a_second() {
        let rates = |bytes, requests| WriteRates { bytes, requests };
        assert!(rates(None, None).is_none());
        assert_eq!(rates(Some(64 << 10), None).dirty_bytes(), LEAST_DIRTY_BYTES);
        assert_eq!(rates(Some(50 << 20), None).dirty_bytes(), 50 << 20);
        assert_eq!(rates(Some(50 << 20), Some(100)).dirty_bytes(), 100 * 4096);
        assert_eq!(rates(None, Some(u64::MAX)).dirty_bytes(), u64::MAX);
    }

    #[test]
    fn root_rates_of_a_device_are_set_and_cleared_with_its_bound() {
        let mounts = super::super::mounts::Mounts::find(None).unwrap();
        let v1 = mounts.v1.into_iter().find(|(all, _)| all.contains(Controllers::IO));
        let Some((_, mount)) = v1 else {
            eprintln!("SKIPPED: cgroup v2 has the io controller");
            return;
        };
        let root = RootRates::open(&mount).unwrap().expect("the root of the hierarchy");
        let below = mount.join(format!("dormouse-test-{}", std::process::id()));
        std::fs::create_dir(&below).unwrap();
        let is_root = RootRates::open(&below).unwrap().is_some();
        std::fs::remove_dir(&below).unwrap();
        assert!(!is_root, "a cgroup below the root");

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let image = File::options().read(true).write(true).open(&path).unwrap();
        assert!(loop_device::lock(&image).unwrap());
        let device = loop_device::attach(&image, "test").unwrap();
        let bdi = Path::new("/sys/class/bdi").join(disk_of(&device).unwrap().to_string());
        let strict = || std::fs::read_to_string(bdi.join("strict_limit")).unwrap_or_default();
        let all = WriteRates { bytes: Some(1 << 20), requests: Some(77) };
        root.set(&device, all).unwrap();
        assert_eq!(root.read(&device).unwrap(), all);
        assert_eq!(strict(), if bdi.join("strict_limit").exists() { "1\n" } else { "" });
        let one = WriteRates { bytes: Some(2 << 20), requests: None };
        root.set(&device, one).unwrap();
        assert_eq!(root.read(&device).unwrap(), one);
        root.clear_node(device.path()).unwrap();
        assert!(root.read(&device).unwrap().is_none());
        assert!(!strict().starts_with('1'));
        root.clear(&device).unwrap();
        root.clear_node(Path::new("/no/such/device")).unwrap();
    }
}
