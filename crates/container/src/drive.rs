//! The drive of a container with `--disk`: a file system of its own, with a fixed size and number of files.
//!
//! `LIB/containers/ID/drive` is a file with an ext4, in which the container's `upper` and `work` are. It is on a loop
//! device while it is in use, and mounted without being attached anywhere: the layers of a container are given to
//! overlayfs by descriptor, and the overlay keeps the file system mounted. Volumes, tmpfs and the log are outside.
//!
//! **Nothing to sweep.** The mount ends with its last user, be it the root of a container or a command, and the loop
//! device ends with the mount. A killed process leaves neither. A container that stops or falls asleep has none, and
//! its drive is unmounted when the last of its processes has ended. Rates of writes outlast the file of a device, and
//! are cleared (`writeback`).
//!
//! **One device.** The device has the lock of the file ([`dormouse_kernel::loop_device`]). A command that needs the
//! files of a running container finds the lock taken, and mounts the same device: the same file system.
//!
//! **Place.** A drive is as large as it says, and takes place below as files are written: removed files are given back
//! at each commit of the journal (`discard`). After a host that went down with mounted drives, those are trimmed at
//! their next mount. A guaranteed drive is allocated when it is made, and gives back nothing. LIMIT: the kernel gives
//! back blocks that it zeroes in a file that was allocated ahead (fallocate(2)), also of a guaranteed drive. The next
//! start allocates them again.
//!
//! **The host.** A guarantee is refused that does not fit beside [`host_part`], and no container with a drive is made
//! or started while less than that is free. Drives without a guarantee share the place above it with the host, and the
//! daemon lets each accept no more than there is. LIMIT: without the daemon running containers may use it up together.
//! A drive without place below it reports lost writes and becomes read-only.
//!
//! **Growth.** Recorded first: where the file is smaller than the limit on record, growth is due. It happens at once
//! where the drive is not in use. In use, it needs CAP_SYS_RESOURCE, and without that is left to the end of the
//! container or to its next start. `drive.growing` exists from before the first change until after the last one, and
//! `drive.saved` holds the blocks that are changed: what was interrupted is undone before the file is used again.
//!
//! Uses `ground` and `writeback`.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dormouse_image::{Lower, Store};
use dormouse_kernel::capability::{self, Capability};
use dormouse_kernel::{ext4, loop_device};
use dormouse_model::{Config, Drive, IdMap, Limits, Size};
use rustix::fs::{FallocateFlags, OFlags};

use crate::disk::{self, FILE_MODE};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::writeback;

/// Name of the file in a container's directory.
const DRIVE: &str = "drive";
/// Name of the mark of a growth that has begun and not ended.
const GROWING: &str = "drive.growing";
/// Name of the file with the blocks that it has overwritten.
const SAVED: &str = "drive.saved";

/// LIMIT: part of the store's file system that drives leave free, in percent, and its bounds in bytes.
const HOST_PERCENT: u64 = 2;
const HOST_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=4 << 30;

/// LIMIT: wait for a drive that another process attaches, detaches or grows.
const IN_USE_WAIT: Duration = Duration::from_secs(60);
/// LIMIT: the same for a growth that can be done later.
const SHORT_WAIT: Duration = Duration::from_secs(2);

/// The writable layer of a container.
#[derive(Debug)]
pub struct Writable {
    /// What the container has changed, in its own ids.
    pub upper: OwnedFd,
    pub(crate) work: OwnedFd,
    /// The mount of its drive. ORDER: kept until the layers are stacked; the mount ends with it otherwise.
    #[expect(dead_code, reason = "held, not read")]
    drive: Option<OwnedFd>,
}

/// For what a drive is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Processes are about to run.
    Start,
    /// A command looks at its files, or copies some.
    Look,
}

/// A step with the loop device of a drive.
fn device<T>(step: dormouse_kernel::error::Result<T>) -> Result<T> {
    step.map_err(Error::call("cannot attach the disk of the container"))
}

/// The drive file of a container, if it has one.
pub(crate) fn file(ground: &Ground, config: &Config) -> Option<PathBuf> {
    Drive::of(&config.spec.limits).map(|_| ground.dir(&config.id).join(DRIVE))
}

/// The same of a drive that takes place below as files are written.
pub(crate) fn sparse_file(ground: &Ground, config: &Config) -> Option<PathBuf> {
    file(ground, config).filter(|_| !config.spec.limits.disk_guaranteed)
}

/// Refuses a contract that contradicts itself.
pub(crate) fn check(limits: &Limits) -> Result<()> {
    Ok(Drive::check(limits)?)
}

/// The free bytes of the file system with the store, and those of them that stay free for the host.
pub(crate) fn room(ground: &Ground) -> Result<(u64, u64)> {
    let dir = ground.places.containers();
    let disk =
        rustix::fs::statvfs(&dir).map_err(|e| Error::file("cannot look at", dir)(e.into()))?;
    let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
    Ok((bytes(disk.f_bavail), host_part(bytes(disk.f_blocks))))
}

/// The bytes that drives leave free on a file system of this size.
fn host_part(all: u64) -> u64 {
    (all / 100 * HOST_PERCENT).clamp(*HOST_BYTES.start(), *HOST_BYTES.end())
}

/// Admits a drive, or `more` bytes of one.
fn admit(ground: &Ground, config: &Config, more: u64) -> Result<()> {
    let Some(drive) = Drive::of(&config.spec.limits) else { return Ok(()) };
    let (free, kept) = room(ground)?;
    let wanted = if drive.guaranteed { more } else { 0 };
    match wanted.saturating_add(kept) <= free {
        true => Ok(()),
        false => Err(Error::NoPlace {
            name: config.name.to_string(),
            wanted: drive.guaranteed.then_some(Size(wanted)),
            free: Size(free),
            kept: Size(kept),
            dir: ground.places.containers(),
        }),
    }
}

/// Refuses to start a container that would fill the file system of the host.
pub(crate) fn admit_start(ground: &Ground, config: &Config) -> Result<()> {
    admit(ground, config, 0)
}

/// Says what of a drive is not kept as it is promised.
pub(crate) fn not_kept(ground: &Ground, config: &Config) -> Result<Vec<String>> {
    let Some(drive) = Drive::of(&config.spec.limits) else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    if growth_is_due(&ground.dir(&config.id), &drive) {
        all.push(format!(
            "--disk {}: the disk is as large as before until the container stops or falls asleep, because this host \
             does not permit a mounted one to grow (CAP_SYS_RESOURCE)",
            Size(drive.bytes)
        ));
    }
    let taken = file(ground, config).and_then(|path| fs::metadata(path).ok());
    let taken = taken.map_or(0, |meta| meta.blocks().saturating_mul(512));
    let (free, kept) = room(ground)?;
    let free = free.saturating_sub(kept);
    if !drive.guaranteed && drive.bytes.saturating_sub(taken) > free {
        all.push(format!(
            "--disk {}: {} are free below it for all disks, since it is not guaranteed (--disk-guaranteed)",
            Size(drive.bytes),
            Size(free)
        ));
    }
    Ok(all)
}

/// Makes the writable layer of a new container in its directory, which no other process uses yet. Returns the mount of
/// its drive: a start before that ends need not mount it again.
pub(crate) fn make(
    ground: &Ground,
    dir: &Path,
    config: &Config,
    lower: &Lower,
) -> Result<Option<OwnedFd>> {
    let ids: &IdMap = &config.ids;
    let Some(drive) = Drive::of(&config.spec.limits) else {
        Store::create_upper(dir, ids, lower)?;
        return Ok(None);
    };
    admit(ground, config, drive.bytes)?;
    let path = dir.join(DRIVE);
    let step = |e: std::io::Error| Error::file("cannot make", &path)(e);
    let mut file = File::options();
    let image =
        file.read(true).write(true).create_new(true).mode(FILE_MODE).open(&path).map_err(step)?;
    if !device(loop_device::lock(&image))? {
        return Err(Error::Invalid(format!("'{}' is in use", path.display())));
    }
    image.set_len(drive.bytes).map_err(step)?;
    ext4::make(&image, drive.inodes)?;
    allocate(&path, &image, &drive)?;
    if drive.guaranteed {
        admit(ground, config, 0)?; // other guarantees may have come meanwhile
    }
    let attached = attach_file(ground, config, &image)?;
    let mount = ext4::mount(attached.path(), options(config, &drive))?;
    Store::create_upper(&inside(&mount), ids, lower)?;
    Ok(Some(mount))
}

/// Attaches the file of a drive to a device. Rates of an earlier file of that device do not hold for this one.
fn attach_file(ground: &Ground, config: &Config, image: &File) -> Result<loop_device::LoopDevice> {
    let attached = device(loop_device::attach(image, config.id.as_str()))?;
    writeback::clear_new(ground, &attached)?;
    Ok(attached)
}

fn options(config: &Config, drive: &Drive) -> ext4::MountOptions {
    ext4::MountOptions { discard: !drive.guaranteed, volatile: config.spec.auto_remove }
}

/// A path into a mount that is attached nowhere.
fn inside(mount: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()))
}

/// Takes the place of a guaranteed drive. What it has already is not written.
fn allocate(path: &Path, image: &File, drive: &Drive) -> Result<()> {
    if !drive.guaranteed {
        return Ok(());
    }
    // The file may be smaller than it is to become.
    let taken = rustix::fs::fallocate(image, FallocateFlags::KEEP_SIZE, 0, drive.bytes);
    taken.map_err(|e| Error::file("cannot take the guaranteed place of", path)(e.into()))
}

/// Opens the writable layer of a container.
pub(crate) fn open(ground: &Ground, config: &Config, purpose: Purpose) -> Result<Writable> {
    let dir = ground.dir(&config.id);
    let Some(drive) = Drive::of(&config.spec.limits) else { return open_in(&dir) };
    let mount = match attach(ground, config, &drive, purpose)? {
        Some(mount) => mount,
        None => return Err(Error::DriveInUse(config.name.to_string())),
    };
    let (upper, work) = Store::open_upper(&inside(&mount))?;
    Ok(Writable { upper, work, drive: Some(mount) })
}

/// Opens a writable layer without a drive, in this directory.
pub(crate) fn open_in(dir: &Path) -> Result<Writable> {
    let (upper, work) = Store::open_upper(dir)?;
    Ok(Writable { upper, work, drive: None })
}

/// Mounts a drive, or mounts it once more; `None` if another process has had its file for too long.
fn attach(
    ground: &Ground,
    config: &Config,
    drive: &Drive,
    purpose: Purpose,
) -> Result<Option<OwnedFd>> {
    let dir = &ground.dir(&config.id);
    let (path, image) = open_file(dir)?;
    let (device, mount) = match hold(&image, IN_USE_WAIT)? {
        Held::Free => {
            undo(dir, &path, &image)?;
            if growth_is_due(dir, drive) {
                // A container of the old size is better than none; `inspect` says so.
                let _ = grow_free(dir, &path, &image, drive);
            }
            let whole = allocate(&path, &image, drive);
            if purpose == Purpose::Start {
                whole?;
            }
            let unclean = ext4::superblock(&image)?.needs_recovery;
            let attached = attach_file(ground, config, &image)?;
            let mount = ext4::mount(attached.path(), options(config, drive))?;
            if unclean && !drive.guaranteed {
                let _ = ext4::trim(mount.as_fd()); // some files below cannot give back
            }
            (attached, mount)
        }
        Held::By(found) => {
            let mount = ext4::mount(found.path(), options(config, drive))?;
            (found, mount)
        }
        Held::Elsewhere => return Ok(None),
    };
    if purpose == Purpose::Start {
        writeback::set(ground, config, &device, identity(&path, &image)?)?;
    }
    Ok(Some(mount))
}

/// The device of the file system of a file, and its inode.
fn identity(path: &Path, image: &File) -> Result<(u64, u64)> {
    let meta = image.metadata().map_err(Error::file("cannot look at", path))?;
    Ok((meta.dev(), meta.ino()))
}

/// Sets the rates of writes that are on record for the device of a container that runs.
pub(crate) fn set_write_rates(ground: &Ground, config: &Config) -> Result<()> {
    if Drive::of(&config.spec.limits).is_none() {
        return Ok(());
    }
    let (path, image) = open_file(&ground.dir(&config.id))?;
    match device(loop_device::find(&image))? {
        Some(found) => writeback::set(ground, config, &found, identity(&path, &image)?),
        None => Ok(()), // its processes have just ended
    }
}

fn open_file(dir: &Path) -> Result<(PathBuf, File)> {
    let path = dir.join(DRIVE);
    let mut options = File::options();
    options.read(true).write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let image = options.open(&path).map_err(Error::file("cannot open", &path))?;
    Ok((path, image))
}

/// The holder of the lock of a drive.
enum Held {
    /// This process.
    Free,
    /// A device, with a mounted file system.
    By(loop_device::LoopDevice),
    /// Another process, for longer than was waited.
    Elsewhere,
}

/// Takes the lock of a drive, or finds the device that has it.
fn hold(image: &File, at_most: Duration) -> Result<Held> {
    let until = Instant::now() + at_most;
    let mut pause = Duration::from_micros(500);
    loop {
        if device(loop_device::lock(image))? {
            return Ok(Held::Free);
        }
        // A device without a file system ends as soon as another process that looks at it has closed it.
        if let Some(found) = device(loop_device::find(image))?
            && ext4::space(&found)?.is_some()
        {
            return Ok(Held::By(found));
        }
        if Instant::now() > until {
            return Ok(Held::Elsewhere);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Whether a growth of the drive with this file has begun and not ended: the file may be larger than its file system.
pub(crate) fn is_growing(file: &Path) -> bool {
    file.with_file_name(GROWING).exists()
}

/// Whether a drive is smaller than it is to be, or its growth was interrupted.
fn growth_is_due(dir: &Path, drive: &Drive) -> bool {
    let smaller = fs::metadata(dir.join(DRIVE)).is_ok_and(|meta| meta.len() < drive.bytes);
    smaller || dir.join(GROWING).exists()
}

/// Undoes an interrupted growth; the caller has the lock.
fn undo(dir: &Path, path: &Path, image: &File) -> Result<()> {
    let mark = dir.join(GROWING);
    if mark.exists() {
        ext4::undo(path, image, &dir.join(SAVED))?;
        disk::remove(&mark)?;
    }
    Ok(())
}

/// Grows a drive that is not in use; the caller has the lock, and no growth is unfinished.
fn grow_free(dir: &Path, path: &Path, image: &File, drive: &Drive) -> Result<()> {
    allocate(path, image, drive)?;
    let mark = dir.join(GROWING);
    disk::write(&mark, b"", disk::Durable::Yes)?;
    let saved = dir.join(SAVED);
    let grown = ext4::grow(path, image, drive.bytes, &saved).map_err(Error::from);
    let ended = match &grown {
        Ok(()) => {
            // resize2fs leaves out a last part that is too small for tables of its own.
            let set = image.set_len(drive.bytes).map_err(Error::file("cannot grow", path));
            set.and_then(|()| disk::remove(&saved)).and_then(|()| disk::remove(&mark))
        }
        Err(_) => undo(dir, path, image),
    };
    grown.and(ended)
}

/// Grows a mounted drive. Returns false where this host does not permit that.
fn grow_mounted(
    dir: &Path,
    path: &Path,
    image: &File,
    found: &loop_device::LoopDevice,
    (config, drive): (&Config, &Drive),
) -> Result<bool> {
    let all = capability::effective().map_err(Error::call("cannot read the capabilities"))?;
    if !all.contains(Capability::SysResource) {
        return Ok(false);
    }
    let mark = dir.join(GROWING);
    disk::write(&mark, b"", disk::Durable::Yes)?;
    image.set_len(drive.bytes).map_err(Error::file("cannot grow", path))?;
    device(found.update_size())?;
    let mount = ext4::mount(found.path(), options(config, drive))?;
    // ORDER: after a failure the mark stays, because a part may have been added. The next mount cuts the rest off.
    ext4::grow_mounted(mount.as_fd(), drive.bytes)?;
    disk::remove(&mark)?;
    Ok(true)
}

/// Refuses a change of limits that a drive cannot follow, before anything is changed.
pub(crate) fn check_change(ground: &Ground, before: &Config, change: &Limits) -> Result<()> {
    Drive::check_change(&before.spec.limits, change)?;
    match (Drive::of(&before.spec.limits), change.disk_bytes) {
        (Some(drive), Some(new)) if new > drive.bytes => admit(ground, before, new - drive.bytes),
        _ => Ok(()),
    }
}

/// Grows a drive to its size on record, now or later.
pub(crate) fn grow(ground: &Ground, config: &Config) -> Result<()> {
    let Some(drive) = Drive::of(&config.spec.limits) else { return Ok(()) };
    let dir = ground.dir(&config.id);
    if !growth_is_due(&dir, &drive) {
        return Ok(());
    }
    let (path, image) = open_file(&dir)?;
    match hold(&image, SHORT_WAIT)? {
        Held::Free => {
            undo(&dir, &path, &image)?;
            grow_free(&dir, &path, &image, &drive)
        }
        Held::By(found) => {
            allocate(&path, &image, &drive)?;
            grow_mounted(&dir, &path, &image, &found, (config, &drive)).map(drop)
        }
        Held::Elsewhere => Ok(()),
    }
}

/// Grows the drive of a container whose processes have ended, if that is due. Best effort: a drive that is not free yet
/// grows at the next start.
pub(crate) fn settle(ground: &Ground, config: Option<&Config>) {
    let due = |config: &&Config| {
        let drive = Drive::of(&config.spec.limits);
        drive.is_some_and(|drive| growth_is_due(&ground.dir(&config.id), &drive))
    };
    let Some(config) = config.filter(due) else { return };
    let until = Instant::now() + SHORT_WAIT;
    while let Ok((_, image)) = open_file(&ground.dir(&config.id)) {
        // A device is about to end with the last process, and is not to be used again meanwhile.
        match loop_device::lock(&image) {
            Ok(true) => {
                drop(image);
                let _ = grow(ground, config);
                return;
            }
            Ok(false) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_keeps_a_part_of_the_disk_within_bounds() {
        assert_eq!(host_part(1 << 30), 64 << 20);
        assert_eq!(host_part(100 << 30), (100 << 30) / 100 * 2);
        assert_eq!(host_part(1 << 50), 4 << 30);
    }
}
