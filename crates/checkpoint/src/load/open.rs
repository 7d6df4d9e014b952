//! Opening of paths by a process of the restore, below the container's root.
//!
//! Paths are resolved by the process itself, as its own open would be, with one exception: a path
//! of a record leads through no link of procfs to a file of a process, such as `/proc/self/fd/5`
//! (openat2(2), RESOLVE_NO_MAGICLINKS). The newborn has files of the host open. A call that takes
//! a path as it is comes after a check of the path.
//!
//! This module uses [`super::plan`].

use dormouse_record::Result;
use rustix::fs::ResolveFlags;

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Flags that fcntl(F_SETFL) may set.
pub(super) const SETTABLE: i32 =
    libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;

/// Flags of an open file that open(2) does not take. O_ASYNC: open(2) keeps the flag without its effect, and
/// fcntl(2) gives a file no effect of a flag that it has.
const REFUSED: i32 = libc::O_CREAT
    | libc::O_EXCL
    | libc::O_TRUNC
    | libc::O_ASYNC
    | libc::O_TMPFILE & !libc::O_DIRECTORY;
/// Flags that openat2(2) accepts; flags that it accepts for a place (O_PATH).
const KNOWN: i32 = libc::O_ACCMODE
    | libc::O_NOCTTY
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_DIRECT
    | O_LARGEFILE
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME;
const KNOWN_OF_PLACE: i32 = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;

/// The flag that open(2) adds and other calls that open a file do not. It is 0 in libc.
pub(super) const O_LARGEFILE: i32 = 0o100_000;

/// Opens a path of a record. The flags of the file do not keep O_CLOEXEC, as those of other calls do.
pub(super) fn path(
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
    Ok(path_with(plan, sequence, what, path, (flags | libc::O_CLOEXEC as u32, 0)))
}

/// openat2(2) of a path of a record, with flags and a mode.
pub(super) fn path_with(
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

/// Opens a path of the restore itself, which may lead through such a link.
pub(super) fn own_path(
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

/// Makes a process fail if a path of a record leads through such a link. Precedes each call that
/// takes a path as it is.
pub(super) fn check_path(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, path: &str) {
    let flags = (libc::O_PATH | libc::O_CLOEXEC) as u32;
    let cell = path_with(plan, sequence, what, path, (flags, 0));
    sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
}

/// Does the same for the directory that contains the last part of a path.
pub(super) fn check_parent(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, path: &str) {
    let parent = match path.trim_end_matches('/').rsplit_once('/') {
        Some(("", _)) => "/",
        Some((parent, _)) => parent,
        None => ".",
    };
    check_path(plan, sequence, what, parent);
}

/// Sets the settable flags of an open file.
pub(super) fn set_flags(sequence: &mut Sequence, what: &str, cell: Cell, flags: u32) {
    let flags = flags & SETTABLE as u32;
    let args = [cell.into(), Arg::from(libc::F_SETFL), flags.into()];
    sequence.call(what, Call::new(libc::SYS_fcntl, args));
}

/// Flags that calls such as eventfd2(2) and timerfd_create(2) take.
pub(super) const AT_CREATION: u32 = (libc::O_NONBLOCK | libc::O_CLOEXEC) as u32;

/// Sets the settable flags that such a call does not take, if there are any.
pub(super) fn set_later(sequence: &mut Sequence, what: &str, cell: Cell, flags: u32) {
    if flags & SETTABLE as u32 & !AT_CREATION != 0 {
        set_flags(sequence, what, cell, flags);
    }
}

/// Opens the file of a descriptor again, as another file description. The path needs a number that
/// is known now, so the descriptor is duplicated to one that no process uses.
pub(super) fn again(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    from: Cell,
    flags: u32,
) -> Result<Cell> {
    let number = plan.above - 1;
    let args = [from.into(), number.into(), Arg::from(libc::O_CLOEXEC)];
    sequence.call(what, Call::new(libc::SYS_dup3, args));
    // The path is a magic link, which always leads to the same file. An unnamed file has O_DIRECTORY from
    // O_TMPFILE.
    let is_unnamed = flags & (REFUSED & libc::O_TMPFILE) as u32 != 0;
    let lacks = if is_unnamed { libc::O_NOFOLLOW | libc::O_DIRECTORY } else { libc::O_NOFOLLOW };
    let flags = flags & !lacks as u32;
    own_path(plan, sequence, what, &format!("/proc/self/fd/{number}"), flags)
}
