//! Files with a name, devices, and descriptors from the engine.
//!
//! [`make`], [`device`] and [`external`] add the calls of the first process. The engine's half
//! checks that mapped files are unchanged, and that each open file is of its recorded type and in a file
//! system of the container. At the end the engine renews the owners of files of procfs.

use std::collections::HashSet;
use std::os::fd::AsFd;

use dormouse_kernel::namespace;
use dormouse_record::{Device, Error, External, File, Records, Result, Thing};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat, Statx, StatxFlags};

use super::plan::Plan;
use super::restore::Restore;
use super::{lock, open};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Opens a file by its path, with its flags, offset and locks.
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
    let cell = open::path(plan, sequence, &what, &file.path, file.flags | extra)?;
    if !is_place && file.flags & wait == 0 {
        open::set_flags(sequence, &what, cell, file.flags);
    }
    settle(plan, sequence, &what, cell, file);
    Ok(cell)
}

/// Sets offset, hint and locks of an open file.
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
    if file.write_hint != 0 {
        const SET_RW_HINT: i32 = 1036;
        let at = plan.builder.numbers(&[file.write_hint]);
        let call = Call::new(libc::SYS_fcntl, [cell.into(), Arg::from(SET_RW_HINT), at.into()]);
        // A file with a name, such as one of a volume, has it still where root inside may not set it.
        let is_new = file.deleted.is_some();
        sequence.call(what, if is_new { call } else { call.lenient() });
    }
    lock::of_file(plan, sequence, what, cell.into(), &file.locks);
}

pub(super) fn device(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    device: &Device,
) -> Result<Cell> {
    open::path(plan, sequence, what, &format!("/dev/{}", device.name), device.flags)
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

/// Refuses an open file of the first process that is of another type than its record, or in no file
/// system mounted there, such as a file of the host or a descriptor of the restore.
pub(super) fn check_opened(restore: &Restore, pid: u32) -> Result<()> {
    let mut mounts = Mounts::of(pid);
    for (n, (object, cell)) in restore.records.objects.iter().zip(&restore.cells).enumerate() {
        let (Thing::File(file), Some(cell)) = (&object.thing, cell) else { continue };
        if file.deleted.is_some() {
            continue;
        }
        let number = restore.program.value(*cell).map_err(Error::call("read a number"))?;
        let place = format!("/proc/{pid}/fd/{number}");
        let found = statx(&place, Mounts::WANTED).map_err(Error::of("look at a file", pid))?;
        let (was, is) = (file.file_type, u32::from(found.stx_mode) & libc::S_IFMT);
        if is != was {
            return Err(Error::Elsewhere(format!(
                "object {n} (file) '{}' was {}, and {} has taken its place since: put it back",
                file.path,
                type_name(was),
                type_name(is)
            )));
        }
        if file.namespace.is_none() && !mounts.contain(&place, &found)? {
            return Err(Error::Elsewhere(format!(
                "object {n} (file) '{}' is in no file system that is mounted in the container",
                file.path
            )));
        }
    }
    Ok(())
}

fn statx(path: &str, wanted: StatxFlags) -> rustix::io::Result<Statx> {
    rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), wanted)
}

/// The mounts of a process.
struct Mounts {
    pid: u32,
    /// Unique ids, as the kernel lists them: some 80 us faster than the table. Empty on older kernels.
    unique: Vec<u64>,
    /// Ids of all of them, from `/proc/PID/mountinfo` (proc_pid_mountinfo(5)), once they are needed.
    table: Option<HashSet<u64>>,
}

impl Mounts {
    const UNIQUE: StatxFlags = namespace::MNT_ID_UNIQUE;
    /// Fields for [`Mounts::contain`].
    const WANTED: StatxFlags = Self::UNIQUE.union(StatxFlags::MNT_ID).union(StatxFlags::TYPE);

    fn of(pid: u32) -> Self {
        let unique = || {
            let root = namespace::unique_mount_id(format!("/proc/{pid}/root")).ok()??;
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let of = rustix::fs::open(format!("/proc/{pid}/ns/mnt"), flags, Mode::empty()).ok()?;
            let mut ids = namespace::mounts_below(of.as_fd(), root).ok()?;
            ids.push(root);
            Some(ids)
        };
        Self { pid, unique: unique().unwrap_or_default(), table: None }
    }

    /// Whether the file at a path is in one of them; `found` are its [`Mounts::WANTED`].
    fn contain(&mut self, path: &str, found: &Statx) -> Result<bool> {
        let is_unique = found.stx_mask & Self::UNIQUE.bits() != 0;
        if is_unique && self.unique.contains(&found.stx_mnt_id) {
            return Ok(true);
        }
        let found = match is_unique {
            true => {
                statx(path, StatxFlags::MNT_ID).map_err(Error::of("look at a file", self.pid))?
            }
            false => *found,
        };
        let table = match self.table.take() {
            Some(table) => table,
            None => {
                let path = format!("/proc/{}/mountinfo", self.pid);
                let text = dormouse_kernel::proc::whole_text(&path);
                let text = text.map_err(Error::file("cannot read", &path))?;
                let id = |line: &str| line.split_ascii_whitespace().next()?.parse().ok();
                text.lines().filter_map(id).collect()
            }
        };
        Ok(self.table.insert(table).contains(&found.stx_mnt_id))
    }
}

/// Looks up the open files of procfs once more: procfs sets the owner of a file of a process at each lookup.
///
/// ORDER: the first process has its ids and is dumpable as recorded, which it was not when it opened the files.
pub(super) fn renew_owners(restore: &Restore, pid: u32) {
    for object in &restore.records.objects {
        let path = match &object.thing {
            Thing::File(file) if file.deleted.is_none() && file.namespace.is_none() => {
                file.path.clone()
            }
            Thing::ProcessFile(file) => file.whole_path(),
            _ => continue,
        };
        if path.starts_with("/proc/") {
            // A path that leads elsewhere now needs no owner.
            let _ = crate::look::file::lookup(pid, &path);
        }
    }
}

/// The name of a file type (inode(7)).
fn type_name(file_type: u32) -> &'static str {
    match file_type {
        libc::S_IFREG => "a regular file",
        libc::S_IFDIR => "a directory",
        libc::S_IFLNK => "a symbolic link",
        libc::S_IFIFO => "a fifo",
        libc::S_IFSOCK => "a socket",
        _ => "a device",
    }
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
