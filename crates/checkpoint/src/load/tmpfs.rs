//! What was in a tmpfs: written by the engine through the root of the newborn, which has nothing
//! open yet. Only into the directories that the configuration has in memory, which are empty.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::Errno;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid};

use super::{Restore, system_v};
use crate::error::{Error, Result};
use crate::format::{Thing, TmpfsEntry, TmpfsKind};
use crate::save::{Maps, lookup};

/// Fills all of them.
pub(super) fn restore(pid: u32, restore: &Restore) -> Result<()> {
    for object in &restore.records.objects {
        let Thing::Tmpfs(tmpfs) = &object.thing else { continue };
        let failed = |path: &str| {
            let path = format!("{}/{path}", tmpfs.target);
            move |e: Errno| Error::file("cannot restore", path)(e.into())
        };
        if !restore.memory.contains(&tmpfs.target) {
            let text = format!("its '{}' is not in memory here", tmpfs.target);
            return Err(Error::Elsewhere(text));
        }
        let maps = Maps::read(pid);
        let place = lookup(pid, &tmpfs.target).map_err(failed(""))?;
        for entry in &tmpfs.entries {
            make(&place, entry, &maps, &restore.pages).map_err(failed(&entry.path))?;
        }
        // What was made in a directory has changed its time.
        for entry in tmpfs.entries.iter().rev().filter(|e| e.what == TmpfsKind::Directory) {
            date(&place, entry).map_err(failed(&entry.path))?;
        }
    }
    Ok(())
}

/// The directory an entry is in, and its name there. Links on the way are not followed.
fn parent<'e>(
    place: &OwnedFd,
    entry: &'e TmpfsEntry,
) -> std::result::Result<(OwnedFd, &'e str), Errno> {
    let (dir, name) = entry.path.rsplit_once('/').unwrap_or((".", &entry.path));
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok((rustix::fs::openat2(place, dir, flags, Mode::empty(), how)?, name))
}

fn make(
    place: &OwnedFd,
    entry: &TmpfsEntry,
    maps: &Maps,
    pages: &File,
) -> std::result::Result<(), Errno> {
    let (dir, name) = parent(place, entry)?;
    let mode = Mode::from_raw_mode(entry.mode & 0o7777);
    let private = Mode::from_raw_mode(0o600);
    match &entry.what {
        TmpfsKind::Directory => match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o700)) {
            // It leads to where something else is mounted.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        },
        TmpfsKind::Fifo => rustix::fs::mknodat(&dir, name, FileType::Fifo, private, 0)?,
        TmpfsKind::Link { to } => rustix::fs::symlinkat(to, &dir, name)?,
        TmpfsKind::File { bytes, runs } => {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            let file = rustix::fs::openat(&dir, name, flags | OFlags::CLOEXEC, private)?;
            rustix::fs::ftruncate(file.as_fd(), *bytes)?;
            system_v::fill(&File::from(file), runs, pages)?;
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

fn date(place: &OwnedFd, entry: &TmpfsEntry) -> std::result::Result<(), Errno> {
    let (dir, name) = parent(place, entry)?;
    let time = Timespec {
        tv_sec: entry.modified_ns.div_euclid(1_000_000_000),
        tv_nsec: entry.modified_ns.rem_euclid(1_000_000_000),
    };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(&dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}
