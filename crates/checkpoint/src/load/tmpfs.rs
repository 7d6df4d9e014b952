//! The contents of a tmpfs: written by the engine through the root of the newborn, which has
//! nothing open yet. Only tmpfs directories of the configuration are filled. These contain at most
//! the files of a start (the links of an OCI container's `/dev`, files that `tmpcopyup` copies).
//! Saved entries replace those, and files that were not saved are removed. Devices and mount points
//! stay.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::{self, CapabilityMasks};
use dormouse_kernel::{Errno, system_v};
use dormouse_parcel::PageFiles;
use dormouse_record::{Error, Result, Thing, Tmpfs, TmpfsEntry, TmpfsKind};
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid,
};

use super::restore::Restore;
use super::system_v::fill;
use crate::look::file::tmpfs_at;
use crate::look::ids::Maps;

/// LIMIT: nested directories.
const DEPTH_MAX: usize = 64;

/// Fills every tmpfs of the configuration.
pub(super) fn restore(pid: u32, restore: &Restore) -> Result<()> {
    for object in &restore.records.objects {
        let Thing::Tmpfs(tmpfs) = &object.thing else { continue };
        if tmpfs.namespace.is_some() {
            continue;
        }
        if !restore.memory.contains(&tmpfs.target) {
            let text = format!("its '{}' is not in memory here", tmpfs.target);
            return Err(Error::Elsewhere(text));
        }
        let place = tmpfs_at(pid, &tmpfs.target).map_err(failed(tmpfs, ""))?;
        let kept: HashSet<&str> = tmpfs.entries.iter().map(|e| &*e.path).collect();
        clear(&place, "", &kept, 0).map_err(failed(tmpfs, ""))?;
        fill_in(&place, tmpfs, &Maps::read(pid), &restore.pages)?;
    }
    Ok(())
}

/// Fills each tmpfs that the first process has created for other mount namespaces.
pub(super) fn restore_apart(pid: u32, restore: &Restore) -> Result<()> {
    for (index, object) in restore.records.objects.iter().enumerate() {
        let Thing::Tmpfs(tmpfs) = &object.thing else { continue };
        let Some(cell) = restore.memories.get(&index) else { continue };
        let number = restore.program.value(*cell).map_err(Error::call("read a number"))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let place = rustix::fs::open(format!("/proc/{pid}/fd/{number}"), flags, Mode::empty());
        let place = place.map_err(failed(tmpfs, ""))?;
        fill_in(&place, tmpfs, &Maps::read(pid), &restore.pages)?;
    }
    Ok(())
}

fn failed(tmpfs: &Tmpfs, path: &str) -> impl FnOnce(Errno) -> Error + use<> {
    let path = format!("{}/{path}", tmpfs.target);
    move |e| Error::file("cannot restore", path)(e.into())
}

fn fill_in(place: &OwnedFd, tmpfs: &Tmpfs, maps: &Maps, pages: &PageFiles) -> Result<()> {
    as_root_of(maps, || {
        for entry in &tmpfs.entries {
            make(place, entry, maps, pages).map_err(failed(tmpfs, &entry.path))?;
        }
        // Creating an entry has changed the times of its directory.
        for entry in tmpfs.entries.iter().rev().filter(|e| e.what == TmpfsKind::Directory) {
            date(place, entry).map_err(failed(tmpfs, &entry.path))?;
        }
        Ok(())
    })
    .map_err(failed(tmpfs, ""))?
}

/// Calls `act` as root of a container, with all capabilities of this process: a tmpfs that was
/// mounted in a user namespace refuses files of other owners.
fn as_root_of<T>(maps: &Maps, act: impl FnOnce() -> T) -> std::result::Result<T, Errno> {
    match maps.outside(0, 0) {
        None | Some((0, 0)) => Ok(act()),
        Some((uid, gid)) => system_v::as_user(uid, gid, || {
            let now = call::capget()?;
            call::capset(CapabilityMasks { effective: now.permitted, ..now })?;
            Ok(act())
        })?,
    }
}

/// The parent directory of a path, and the name there. No symbolic link is followed.
fn parent<'p>(place: &OwnedFd, path: &'p str) -> std::result::Result<(OwnedFd, &'p str), Errno> {
    let (dir, name) = path.rsplit_once('/').unwrap_or((".", path));
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok((rustix::fs::openat2(place, dir, flags, Mode::empty(), how)?, name))
}

fn make(
    place: &OwnedFd,
    entry: &TmpfsEntry,
    maps: &Maps,
    pages: &PageFiles,
) -> std::result::Result<(), Errno> {
    let (dir, name) = parent(place, &entry.path)?;
    let mode = Mode::from_raw_mode(entry.mode & 0o7777);
    let private = Mode::from_raw_mode(0o600);
    match &entry.what {
        TmpfsKind::Directory => match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o700)) {
            // The directory is on the path to another mount.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        },
        TmpfsKind::Fifo => node(&dir, name, FileType::Fifo)?,
        TmpfsKind::Socket => node(&dir, name, FileType::Socket)?,
        TmpfsKind::Whiteout => node(&dir, name, FileType::CharacterDevice)?,
        TmpfsKind::Link { to } => afresh(&dir, name, || rustix::fs::symlinkat(to, &dir, name))?,
        TmpfsKind::File { bytes, runs } => {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            let flags = flags | OFlags::CLOEXEC;
            let file = afresh(&dir, name, || rustix::fs::openat(&dir, name, flags, private))?;
            rustix::fs::ftruncate(file.as_fd(), *bytes)?;
            fill(&File::from(file), runs, pages)?;
        }
        TmpfsKind::Name { of } => {
            let (other, of) = parent(place, of)?;
            let no = AtFlags::empty();
            return afresh(&dir, name, || rustix::fs::linkat(&other, of, &dir, name, no));
        }
    }
    let (uid, gid) = maps.outside(entry.uid, entry.gid).ok_or(Errno::INVAL)?;
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    rustix::fs::chownat(&dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    if !matches!(entry.what, TmpfsKind::Link { .. }) {
        rustix::fs::chmodat(&dir, name, mode, AtFlags::empty())?;
    }
    date(place, entry)
}

/// Removes files of a start that were not saved.
fn clear(
    dir: &OwnedFd,
    path: &str,
    kept: &HashSet<&str>,
    depth: usize,
) -> std::result::Result<(), Errno> {
    if depth > DEPTH_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |at: &OwnedFd, name: &CStr| rustix::fs::openat2(at, name, flags, Mode::empty(), how);
    let listing = open(dir, c".")?;
    let own = rustix::fs::fstat(&listing)?.st_dev;
    for found in Dir::read_from(&listing)? {
        let found = found?;
        let name = found.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = rustix::fs::statat(&listing, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let text = name.to_str().map_err(|_| Errno::ILSEQ)?;
        let path = if path.is_empty() { text.to_owned() } else { format!("{path}/{text}") };
        let (is_kept, is_mounted) = (kept.contains(&*path), stat.st_dev != own);
        let gone = match FileType::from_raw_mode(stat.st_mode) {
            _ if is_mounted => continue,
            FileType::CharacterDevice | FileType::BlockDevice => continue,
            FileType::Directory => {
                match open(&listing, name) {
                    // Another part of the same tmpfs is mounted there.
                    Err(Errno::XDEV) => continue,
                    inner => clear(&inner?, &path, kept, depth + 1)?,
                }
                if is_kept {
                    continue;
                }
                rustix::fs::unlinkat(&listing, name, AtFlags::REMOVEDIR)
            }
            _ if is_kept => continue,
            _ => rustix::fs::unlinkat(&listing, name, AtFlags::empty()),
        };
        match gone {
            // Something is mounted there, or below.
            Ok(()) | Err(Errno::BUSY | Errno::NOTEMPTY) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn node(dir: &OwnedFd, name: &str, kind: FileType) -> std::result::Result<(), Errno> {
    let private = Mode::from_raw_mode(0o600);
    afresh(dir, name, || rustix::fs::mknodat(dir, name, kind, private, 0))
}

/// Creates an entry in place of one from a start.
fn afresh<T>(
    dir: &OwnedFd,
    name: &str,
    make: impl Fn() -> std::result::Result<T, Errno>,
) -> std::result::Result<T, Errno> {
    match make() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
            make()
        }
        made => made,
    }
}

fn date(place: &OwnedFd, entry: &TmpfsEntry) -> std::result::Result<(), Errno> {
    let (dir, name) = parent(place, &entry.path)?;
    let time = Timespec {
        tv_sec: entry.modified_ns.div_euclid(1_000_000_000),
        tv_nsec: entry.modified_ns.rem_euclid(1_000_000_000),
    };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(&dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}
