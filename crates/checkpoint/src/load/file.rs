//! Files with a name, devices, and descriptors from the engine.
//!
//! Paths are resolved by the process itself, below the container's root, as its own open would be. But
//! for one thing: a path of a record leads through no link of procfs to what a process has, such as
//! `/proc/self/fd/5` (openat2(2), RESOLVE_NO_MAGICLINKS). The newborn has files of the host open.

use std::collections::HashSet;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat, StatxFlags};

use super::{Plan, Restore, lock};
use crate::error::{Error, Result};
use crate::format::{Device, External, File, Records, Thing};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Flags that fcntl(F_SETFL) may set.
pub(super) const SETTABLE: i32 =
    libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;

/// What open(2) does not take of the flags of an open file.
const REFUSED: i32 =
    libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_TMPFILE & !libc::O_DIRECTORY;
/// What openat2(2) knows of flags, and what it knows of those of a place (O_PATH).
const KNOWN: i32 = libc::O_ACCMODE
    | libc::O_NOCTTY
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_ASYNC
    | libc::O_DIRECT
    | 0o100_000 // O_LARGEFILE, which is 0 in libc
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME;
const KNOWN_OF_PLACE: i32 = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;

/// Opens a path of a record.
pub(super) fn open(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    path: &str,
    flags: u32,
) -> Result<Cell> {
    let is_place = flags & libc::O_PATH as u32 != 0;
    let flags = match is_place {
        true => flags & KNOWN_OF_PLACE as u32,
        false => flags & (KNOWN & !REFUSED) as u32 | libc::O_NOCTTY as u32,
    };
    Ok(open_with(plan, sequence, what, path, (flags | libc::O_CLOEXEC as u32, 0)))
}

/// openat2(2) of a path of a record, with flags and a mode.
pub(super) fn open_with(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    path: &str,
    (flags, mode): (u32, u32),
) -> Cell {
    let cell = plan.cell();
    let text = plan.builder.text(path.as_bytes());
    // struct open_how: flags, mode, resolve.
    let how = [flags.into(), mode.into(), ResolveFlags::NO_MAGICLINKS.bits()];
    let length = std::mem::size_of_val(&how) as u64;
    let how = plan.builder.numbers(&how);
    let args = [Arg::from(libc::AT_FDCWD), text.into(), how.into(), length.into()];
    sequence.call_into(what, cell, Call::new(libc::SYS_openat2, args));
    cell
}

/// Opens a path of ours, which may lead through such a link.
pub(super) fn open_own(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    path: &str,
    flags: u32,
) -> Result<Cell> {
    let cell = plan.cell();
    let text = plan.builder.text(path.as_bytes());
    let flags = flags & !(REFUSED as u32) | libc::O_CLOEXEC as u32 | libc::O_NOCTTY as u32;
    let args = [Arg::from(libc::AT_FDCWD), text.into(), flags.into(), Arg::Number(0)];
    sequence.call_into(what, cell, Call::new(libc::SYS_openat, args));
    Ok(cell)
}

/// Has a process fail where a path of a record leads through such a link, before a call that can only be
/// given the path.
pub(super) fn look_at(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, path: &str) {
    let flags = (libc::O_PATH | libc::O_CLOEXEC) as u32;
    let cell = open_with(plan, sequence, what, path, (flags, 0));
    sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
}

/// The same of the directory that the last part of a path is in.
pub(super) fn look_at_parent(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, path: &str) {
    let parent = match path.trim_end_matches('/').rsplit_once('/') {
        Some(("", _)) => "/",
        Some((parent, _)) => parent,
        None => ".",
    };
    look_at(plan, sequence, what, parent);
}

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    file: &File,
) -> Result<Cell> {
    let what = format!("{what} '{}'", file.path);
    let kinds = [libc::S_IFREG, libc::S_IFDIR];
    let is_place = file.flags & libc::O_PATH as u32 != 0;
    if !is_place && !kinds.contains(&file.file_type) {
        return Err(Error::damaged("section 'object'", format!("{what} is not a file")));
    }
    // O_NONBLOCK: a fifo that has replaced the file must not block the restore.
    let wait = libc::O_NONBLOCK as u32;
    let is_link = file.file_type == libc::S_IFLNK;
    let extra = match (is_place, is_link) {
        (true, true) => libc::O_NOFOLLOW as u32,
        (true, false) => 0,
        (false, _) => wait,
    };
    let cell = open(plan, sequence, &what, &file.path, file.flags | extra)?;
    if !is_place && file.flags & wait == 0 {
        set_flags(sequence, &what, cell, file.flags);
    }
    settle(plan, sequence, &what, cell, file);
    Ok(cell)
}

/// Sets offset and locks of an open file.
pub(super) fn settle(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    file: &File,
) {
    if file.offset != 0 {
        let args = [cell.into(), Arg::Number(file.offset), Arg::from(libc::SEEK_SET)];
        sequence.call(what, Call::new(libc::SYS_lseek, args).returns(file.offset));
    }
    lock::of_file(plan, sequence, what, cell.into(), &file.locks);
}

/// Sets the settable flags of an open file.
pub(super) fn set_flags(sequence: &mut Sequence, what: &str, cell: Cell, flags: u32) {
    let flags = flags & SETTABLE as u32;
    let args = [cell.into(), Arg::from(libc::F_SETFL), flags.into()];
    sequence.call(what, Call::new(libc::SYS_fcntl, args));
}

pub(super) fn device(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    device: &Device,
) -> Result<Cell> {
    open(plan, sequence, what, &format!("/dev/{}", device.name), device.flags)
}

pub(super) fn external(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    external: &External,
) -> Result<Cell> {
    let given = plan.outside.get(&external.name).copied();
    let given = given.ok_or_else(|| {
        Error::damaged("section 'object'", format!("there is no stream '{}'", external.name))
    })?;
    let cell = plan.cell();
    let args = [given.into(), Arg::from(libc::F_DUPFD_CLOEXEC), Arg::Number(0)];
    sequence.call_into(what, cell, Call::new(libc::SYS_fcntl, args));
    Ok(cell)
}

/// Checks that files which memory was mapped from are unchanged: a library that was upgraded
/// meanwhile would be other code in the middle of a function.
pub(super) fn check_unchanged(records: &Records, pid: u32) -> Result<()> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = format!("/proc/{pid}/root");
    let root = rustix::fs::open(root, flags | OFlags::DIRECTORY, Mode::empty());
    let root = root.map_err(Error::of("open the root", pid))?;
    for object in &records.objects {
        let Thing::File(file) = &object.thing else { continue };
        if !file.unchanged || file.namespace.is_some() {
            continue;
        }
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = rustix::fs::openat2(&root, &file.path, flags, Mode::empty(), how)
            .and_then(rustix::fs::fstat);
        is_unchanged(file, found)?;
    }
    Ok(())
}

/// The same for files of other mount namespaces, which the first process has open.
pub(super) fn check_unchanged_apart(restore: &Restore, pid: u32) -> Result<()> {
    for (object, cell) in restore.records.objects.iter().zip(&restore.cells) {
        let (Thing::File(file), Some(cell)) = (&object.thing, cell) else { continue };
        if file.unchanged && file.namespace.is_some() {
            let number = restore.program.value(*cell).map_err(Error::call("read a number"))?;
            is_unchanged(file, rustix::fs::stat(format!("/proc/{pid}/fd/{number}")))?;
        }
    }
    Ok(())
}

/// Whether the files of the first process are in what is mounted there: none is of the host, nor a piece
/// of the restore.
pub(super) fn check_mounts(restore: &Restore, pid: u32) -> Result<()> {
    let mounts = dormouse_kernel::proc::whole_text(format!("/proc/{pid}/mountinfo"));
    let mounts = mounts.map_err(Error::file("cannot read", format!("/proc/{pid}/mountinfo")))?;
    let id = |line: &str| line.split_ascii_whitespace().next()?.parse().ok();
    let mounts: HashSet<u64> = mounts.lines().filter_map(id).collect();
    for (n, (object, cell)) in restore.records.objects.iter().zip(&restore.cells).enumerate() {
        let (Thing::File(file), Some(cell)) = (&object.thing, cell) else { continue };
        if file.deleted.is_some() || file.namespace.is_some() {
            continue;
        }
        let number = restore.program.value(*cell).map_err(Error::call("read a number"))?;
        let place = format!("/proc/{pid}/fd/{number}");
        let (here, wanted) = (rustix::fs::CWD, StatxFlags::MNT_ID);
        let found = rustix::fs::statx(here, &place, AtFlags::empty(), wanted)
            .map_err(Error::of("look at a file", pid))?;
        if !mounts.contains(&found.stx_mnt_id) {
            return Err(Error::Elsewhere(format!(
                "object {n} (file) '{}' is in no file system that is mounted in the container",
                file.path
            )));
        }
    }
    Ok(())
}

fn is_unchanged(file: &File, found: rustix::io::Result<Stat>) -> Result<()> {
    let path = &file.path;
    let stat = found.map_err(|e| Error::Elsewhere(format!("its file '{path}': {e}")))?;
    let now = (stat.st_size as u64, crate::look::file::modified_ns(&stat));
    if now != (file.bytes, file.modified_ns) {
        let text = format!("its mapped file '{path}' has changed");
        return Err(Error::Elsewhere(text));
    }
    Ok(())
}
