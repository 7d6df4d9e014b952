//! Files and directories without a name: contents are read through a copy of an open descriptor.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use dormouse_record::{Bytes, Deleted, MemoryFile, PAGE_BYTES, Thing};
use rustix::fs::{FileType, Stat};

use super::known::file::{Leased, Unread};
use super::refusal::{self, Reason};
use super::seen::Seen;
use super::survey::Survey;
use crate::look::file::{self, mount_of};
use crate::look::mountinfo;

/// Mode bits by which a file gives privileges to a process that executes it.
const PRIVILEGES: u32 = libc::S_ISUID | libc::S_ISGID;

/// The suffix of the kernel to the name of a deleted file.
const SUFFIX: &str = " (deleted)";

/// The prefix of the kernel to the name of a memfd.
pub(super) const MEMORY: &str = "/memfd:";

/// The name of the kernel for memory of huge pages without a file.
pub(super) const HUGE_MEMORY: &str = "/anon_hugepage (deleted)";

/// The object with the contents of an open file without a name. `open` refers to the file; a
/// descriptor with O_PATH is enough.
pub(crate) fn object(
    survey: &mut Survey<'_>,
    seen: &Seen,
    link: &str,
    stat: &Stat,
    open: BorrowedFd<'_>,
) -> Result<usize, Reason> {
    let identity = (stat.st_dev, stat.st_ino);
    if let Some(index) = survey.deleted.get(&identity) {
        return Ok(*index);
    }
    const SECRETMEM: rustix::fs::FsWord = 0x5345_434d; // statfs(2)
    if rustix::fs::fstatfs(open).is_ok_and(|of| of.f_type == SECRETMEM) {
        return Err("secret memory (memfd_secret), which no other process may read".into());
    }
    let name = link.strip_suffix(SUFFIX).unwrap_or(link);
    if link == HUGE_MEMORY {
        return memory_file(survey, seen, name.trim_start_matches('/'), stat, open);
    }
    if let Some(name) = name.strip_prefix(MEMORY) {
        return memory_file(survey, seen, name, stat, open);
    }
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind == FileType::RegularFile && stat.st_nlink != 0 {
        return Err(format!("the file '{name}', deleted under that name while it has other links"));
    }
    if stat.st_mode & PRIVILEGES != 0 && kind == FileType::RegularFile {
        return Err(format!("the deleted file '{name}', which gives privileges (set-user-id)"));
    }
    let place = match place(seen, name, open) {
        Ok(place) => place,
        Err(why) => place_of_mount(survey, seen, stat, open).ok_or(why)?,
    };
    let maps = seen.maps();
    let (uid, gid) = maps.owner(stat.st_uid, stat.st_gid);
    let mut deleted = Deleted {
        place,
        mode: stat.st_mode & !PRIVILEGES,
        uid,
        gid,
        bytes: 0,
        modified_ns: file::modified_ns(stat),
        runs: Vec::new(),
        attributes: Vec::new(),
    };
    let unread = match kind {
        FileType::RegularFile => {
            deleted.bytes = stat.st_size as u64;
            Some(unread(seen, format!("the deleted file '{name}'"), identity, open)?)
        }
        FileType::Directory => None,
        _ => return Err(format!("'{name}', which is deleted and not a regular file")),
    };
    let index = survey.add(Thing::Deleted(deleted));
    survey.deleted.insert(identity, index);
    survey.unread.extend(unread.map(|unread| (index, unread)));
    Ok(index)
}

fn unread(
    seen: &Seen,
    what: String,
    identity: (u64, u64),
    open: BorrowedFd<'_>,
) -> Result<Unread, Reason> {
    let open = open.try_clone_to_owned().map_err(|e| format!("{what}: {e}"))?;
    Ok(Unread { pid: seen.pid, what, identity, open })
}

/// Opens a file again: the process may have it open for writing only.
fn readable(unread: &Unread, leased: &HashMap<(u64, u64), Leased>) -> Result<File, Reason> {
    let Unread { what, identity, .. } = unread;
    if leased.contains_key(identity) {
        return Err(format!("{what} with a lease (F_SETLEASE), not saved yet"));
    }
    // LIMIT: a lease that no descriptor of a process shows, since only a mapping or a message in flight keeps the
    // file open, is broken here. The open fails at once: a wait would be as long as the holder likes.
    File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", unread.open.as_raw_fd()))
        .map_err(|e| format!("{what}, which cannot be read: {e}"))
}

/// Opens the files that were found without being opened.
///
/// ORDER: after all processes were surveyed. Opening a file breaks a lease for writing: the kernel signals its
/// holder, even where the open fails.
pub(super) fn finish(survey: &mut Survey<'_>, tree: &[Seen]) {
    for (index, unread) in std::mem::take(&mut survey.unread) {
        let file = readable(&unread, &survey.leased).and_then(|file| {
            match &mut survey.found.objects[index].thing {
                Thing::Deleted(deleted) => deleted.attributes = attributes(&file, &unread.what)?,
                Thing::MemoryFile(memory) => describe(memory, &file, &unread.what)?,
                _ => {}
            }
            Ok(file)
        });
        match file {
            Ok(file) => survey.found.contents.push((index, file)),
            Err(why) => {
                let seen = tree.iter().find(|seen| seen.pid == unread.pid);
                let refusal = seen.map(|seen| seen.refuse("", &why));
                survey.found.refusals.push(refusal.unwrap_or_else(|| refusal::of_object(why)));
            }
        }
    }
}

/// Completes the record of a memfd.
fn describe(memory: &mut MemoryFile, file: &File, what: &str) -> Result<(), Reason> {
    const HUGETLBFS: u64 = 0x958_458f6;
    let failed = |e: rustix::io::Errno| format!("{what}, which cannot be read: {e}");
    let of = rustix::fs::fstatfs(file).map_err(failed)?;
    memory.huge_page_bytes = (of.f_type as u64 == HUGETLBFS).then_some(of.f_bsize as u64);
    memory.seals = rustix::fs::fcntl_get_seals(file).map_err(failed)?.bits();
    Ok(())
}

/// The object of a memfd.
fn memory_file(
    survey: &mut Survey<'_>,
    seen: &Seen,
    name: &str,
    stat: &Stat,
    open: BorrowedFd<'_>,
) -> Result<usize, Reason> {
    let identity = (stat.st_dev, stat.st_ino);
    let unread = unread(seen, format!("the memory '{name}'"), identity, open)?;
    let (uid, gid) = seen.maps().owner(stat.st_uid, stat.st_gid);
    let index = survey.add(Thing::MemoryFile(MemoryFile {
        name: name.to_owned(),
        mode: stat.st_mode & !PRIVILEGES,
        uid,
        gid,
        bytes: stat.st_size as u64,
        huge_page_bytes: None,
        seals: 0,
        runs: Vec::new(),
    }));
    survey.deleted.insert(identity, index);
    survey.unread.push((index, unread));
    Ok(index)
}

/// A directory of the same file system: the parent, or the first ancestor that still exists.
pub(super) fn place(seen: &Seen, name: &str, open: BorrowedFd<'_>) -> Result<String, Reason> {
    let mount = mount_of(open).ok();
    for above in Path::new(name).ancestors().skip(1) {
        let Some(path) = above.to_str() else { continue };
        let Ok(there) = file::lookup(seen.first, path) else { continue };
        let is_directory = rustix::fs::fstat(&there)
            .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory);
        if is_directory && mount_of(there.as_fd()).ok() == mount {
            return Ok(path.to_owned());
        }
    }
    Err(format!("the deleted file '{name}', with no directory left of its file system"))
}

/// A directory that a private mount namespace shows at another place, by its path in the container's own namespace:
/// a service of systemd has its own `/tmp` that way.
fn place_of_mount(
    survey: &Survey<'_>,
    seen: &Seen,
    stat: &Stat,
    open: BorrowedFd<'_>,
) -> Option<String> {
    let shown = survey.mounts.row_of_file(open)?;
    let own = mountinfo::rows(seen.first)?;
    own.iter().rev().find_map(|row| {
        let path = format!("{}/{}", row.place.trim_end_matches('/'), shown.part_of(row)?);
        let there = file::lookup(seen.first, &path).ok()?;
        let found = rustix::fs::fstat(&there).ok()?;
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        // Not a mount above it.
        let is_it = found.st_dev == stat.st_dev && mount_of(there.as_fd()).ok() == Some(row.id);
        (is_directory && is_it).then_some(path)
    })
}

/// Attributes of class `user`. The kernel interprets the others, and they cannot be set from
/// inside.
pub(super) fn attributes(file: &File, name: &str) -> Result<Vec<(String, Bytes)>, Reason> {
    let failed = |e: rustix::io::Errno| format!("{name}: {e}");
    let mut names = vec![0u8; 64 << 10];
    let length = match rustix::fs::flistxattr(file, &mut names[..]) {
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        found => found.map_err(failed)?,
    };
    let mut all = Vec::new();
    for text in names[..length].split(|b| *b == 0).filter(|t| !t.is_empty()) {
        let text = String::from_utf8_lossy(text).into_owned();
        if !text.starts_with("user.") {
            return Err(format!("{name} with attribute '{text}', not saved"));
        }
        let mut value = vec![0u8; 64 << 10];
        let length = rustix::fs::fgetxattr(file, text.as_str(), &mut value[..]).map_err(failed)?;
        value.truncate(length);
        all.push((text, Bytes(value)));
    }
    Ok(all)
}

/// The length of the contents in whole pages.
pub(crate) fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}
