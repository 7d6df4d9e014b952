//! Rates of writes through the page cache on cgroup v1, where the container has a drive.
//!
//! The kernel counts these writes for the root of the hierarchy. The loop device of the drive therefore has its rates
//! there ([`dormouse_kernel::cgroup::RootRates`]), in force from before the first process until the end of the last.
//!
//! **Nothing inherits them.** Rates outlast the file of a device, whose number any program may use next. A *record*
//! names the device of each container with such rates, for all instances of the host:
//!
//! ```text
//! REGISTRY = /run/dormouse-writeback   0700, root's; gone with the boot, as the rates are
//! REGISTRY/lock                        held for one change of rates
//! REGISTRY/loopN-ID.json               /dev/loopN has rates of container ID
//! ```
//!
//! Rates are cleared at the end of each life of a container ([`end`]), for each device that a drive gets, before it is
//! mounted ([`clear_new`]), and where the device of a record has another file or none ([`sweep`], at each start with
//! rates and with the last container). Only devices in records, and those with a file of ours, are ever changed.
//!
//! ORDER: the record is made before the rates, and removed after them. A record may exist without rates, and no rates
//! without a record.
//!
//! LIMIT: between the end of the last process and [`end`], some milliseconds later, a program of the host that attaches
//! a file to the same device has the rates. If no command of Dormouse follows a killed one, that lasts.
//!
//! Uses `ground`.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use dormouse_kernel::cgroup::{RootRates, WriteRates};
use dormouse_kernel::loop_device::{self, LoopDevice};
use dormouse_model::{Config, ContainerId};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;

const REGISTRY: &str = "/run/dormouse-writeback";

/// A device with rates of a container.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// The directory LIB of the instance.
    lib: PathBuf,
    /// The file of the drive: the device of its file system, and its inode.
    file: (u64, u64),
}

/// A record by its name.
struct Entry {
    path: PathBuf,
    device: PathBuf,
    id: String,
}

impl Entry {
    fn new(device: &Path, id: &str) -> Self {
        let name = device.file_name().unwrap_or_default().to_string_lossy();
        let path = Path::new(REGISTRY).join(format!("{name}-{id}.json"));
        Self { path, device: device.to_owned(), id: id.to_owned() }
    }

    fn parse(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let (device, id) = name.strip_suffix(".json")?.split_once('-')?;
        let (device, id) = (Path::new("/dev").join(device), id.to_owned());
        Some(Self { path, device, id })
    }

    /// The record; `None` if it is gone or damaged.
    fn read(&self) -> Option<Record> {
        disk::read_json(&self.path).ok().flatten()
    }

    /// Clears the rates, and removes the record. The caller holds the lock.
    fn clear(&self, root: &RootRates) -> Result<()> {
        root.clear_node(&self.device)?;
        disk::remove(&self.path)
    }
}

/// All records. A host without any has no registry.
fn entries() -> Result<Vec<Entry>> {
    let all = match fs::read_dir(REGISTRY) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        all => all.map_err(Error::file("cannot list", REGISTRY))?,
    };
    Ok(all.flatten().filter_map(|entry| Entry::parse(entry.path())).collect())
}

fn lock() -> Result<Lock> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(REGISTRY);
    made.map_err(Error::file("cannot make", REGISTRY))?;
    Lock::take_new(&Path::new(REGISTRY).join("lock"))
}

/// The rates of the root; `None` where the kernel needs none, or they cannot be set, as `inspect` then shows.
fn root(ground: &Ground) -> Result<Option<RootRates>> {
    Ok(ground.cgroups()?.root_rates().and_then(std::result::Result::ok))
}

/// The rates that are on record in a configuration.
fn wanted(ground: &Ground, config: &Config) -> Result<WriteRates> {
    Ok(ground.cgroups()?.write_rates(&config.spec.limits.disk_rates, &ground.places.lib)?)
}

/// Sets the rates of a container for the device of its drive, given the identity of its file, or clears them where it
/// has none.
///
/// ORDER: the open device keeps its file, so that no other program has it meanwhile.
pub(crate) fn set(
    ground: &Ground,
    config: &Config,
    device: &LoopDevice,
    file: (u64, u64),
) -> Result<()> {
    let entry = Entry::new(device.path(), config.id.as_str());
    let rates = wanted(ground, config)?;
    if rates.is_none() && !entry.path.exists() {
        return Ok(());
    }
    let Some(root) = root(ground)? else { return Ok(()) };
    let _lock = lock()?;
    if rates.is_none() {
        return entry.clear(&root);
    }
    sweep_locked(&root)?;
    let record = Record { lib: ground.places.lib.clone(), file };
    // Written in place: under the lock, and an incomplete one of a killed command is cleared as any stale one.
    fs::write(&entry.path, disk::to_json(&record, &entry.path)?)
        .map_err(Error::file("cannot write", &entry.path))?;
    root.set(device, rates)?;
    Ok(())
}

/// Clears the rates that a device with a new file has of an earlier one, of any instance.
pub(crate) fn clear_new(ground: &Ground, device: &LoopDevice) -> Result<()> {
    let Some(root) = root(ground)? else { return Ok(()) };
    if root.read(device)?.is_none() && !entries()?.iter().any(|it| it.device == device.path()) {
        return Ok(());
    }
    let _lock = lock()?;
    root.clear(device)?;
    let mut earlier = entries()?.into_iter().filter(|it| it.device == device.path());
    earlier.try_for_each(|it| disk::remove(&it.path))
}

/// Clears the rates of a container whose processes have been killed or have ended.
pub(crate) fn end(ground: &Ground, id: &ContainerId) -> Result<()> {
    let is_own = |it: &Entry| it.id == id.as_str();
    if !entries()?.iter().any(is_own) {
        return Ok(());
    }
    let Some(root) = root(ground)? else { return Ok(()) };
    let _lock = lock()?;
    for entry in entries()?.into_iter().filter(is_own) {
        // A copy of an instance has containers of the same ids.
        if entry.read().is_none_or(|record| record.lib == ground.places.lib) {
            entry.clear(&root)?;
        }
    }
    Ok(())
}

/// Clears the rates of devices that have another file than that of their record.
pub(crate) fn sweep(ground: &Ground) -> Result<()> {
    if entries()?.is_empty() {
        return Ok(());
    }
    let Some(root) = root(ground)? else { return Ok(()) };
    let _lock = lock()?;
    sweep_locked(&root)
}

fn sweep_locked(root: &RootRates) -> Result<()> {
    for entry in entries()? {
        let file = entry.read().map(|record| record.file);
        if file.is_none_or(|file| loop_device::open_of(&entry.device, file).is_none()) {
            entry.clear(root)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_has_device_and_container_in_its_name() {
        let entry = Entry::new(Path::new("/dev/loop12"), "ab3");
        assert_eq!(entry.path, Path::new("/run/dormouse-writeback/loop12-ab3.json"));
        let again = Entry::parse(entry.path).unwrap();
        assert_eq!((again.device.as_path(), again.id.as_str()), (Path::new("/dev/loop12"), "ab3"));
        for other in ["lock", "loop1-ab", "loop1.json"] {
            assert!(Entry::parse(Path::new(REGISTRY).join(other)).is_none(), "{other}");
        }
    }
}
