//! The contents of a tmpfs: read by the engine, through the root of the first process.
//!
//! Devices of the configuration are left out, and so is everything on other mounts. Other devices
//! are refused.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use dormouse_parcel::Sink;
use dormouse_record::{Error, Of, PAGE_BYTES, Result, Thing, Tmpfs, TmpfsEntry, TmpfsKind};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

use super::pages::file_runs;
use super::refusal;
use super::seen::Seen;
use super::survey::{Found, Survey};
use crate::look::file::{modified_ns, tmpfs_at};
use crate::look::ids::Maps;

/// LIMIT: nested directories.
const DEPTH_MAX: usize = 64;

/// Resolution below an open directory only, on the same mount, and through no symbolic link.
const BELOW: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// Finds the entries of each tmpfs, and refuses those that cannot be saved. Contents are read
/// later.
pub(super) fn find(survey: &mut Survey<'_>, first: &Seen) {
    let maps = first.maps();
    for target in survey.subject.memory.clone() {
        // A directory that is not mounted has no entries.
        let Ok(place) = tmpfs_at(first.pid, &target) else { continue };
        match entries(&place, &target, maps, &survey.subject.nodes) {
            Ok(entries) if entries.is_empty() => {}
            Ok(entries) => {
                add(survey, Tmpfs { target, namespace: None, entries }, place);
            }
            Err(why) => survey.found.refusals.push(refusal::of_object(why)),
        }
    }
}

/// The entries of one tmpfs. `nodes` are devices that are made without it.
pub(super) fn entries(
    place: &OwnedFd,
    target: &str,
    maps: &Maps,
    nodes: &[String],
) -> std::result::Result<Vec<TmpfsEntry>, String> {
    let (names, entries) = (HashMap::new(), Vec::new());
    let mut walk = Walk { maps, target, nodes, names, entries };
    walk.below(place, "", 0)?;
    Ok(walk.entries)
}

/// Adds the tmpfs at a place; returns its object.
pub(super) fn add(survey: &mut Survey<'_>, tmpfs: Tmpfs, place: OwnedFd) -> usize {
    let index = survey.add(Thing::Tmpfs(tmpfs));
    survey.found.memories.push((index, place));
    index
}

/// Reads the contents of all files, which no process can change any more.
pub(super) fn contents(found: &mut Found, sink: &mut dyn Sink) -> Result<()> {
    for (index, place) in std::mem::take(&mut found.memories) {
        let Thing::Tmpfs(tmpfs) = &mut found.objects[index].thing else { continue };
        for (n, entry) in tmpfs.entries.iter_mut().enumerate() {
            let TmpfsKind::File { bytes, runs } = &mut entry.what else { continue };
            let of = Of::Entry(index, n);
            let path = format!("{}/{}", tmpfs.target, entry.path);
            let mut read = || {
                // A lease that a mapping keeps is an error, not a wait as long as the holder likes.
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
                // Another file may be mounted there, which was recorded as this one.
                let how = BELOW.difference(ResolveFlags::NO_XDEV);
                let open = rustix::fs::openat2(&place, &entry.path, flags, Mode::empty(), how)?;
                let file = File::from(open);
                file_runs(&file, bytes.next_multiple_of(PAGE_BYTES), of, sink)
            };
            *runs = read().map_err(Error::file("cannot read", &path))??;
        }
    }
    Ok(())
}

struct Walk<'w> {
    maps: &'w Maps,
    target: &'w str,
    nodes: &'w [String],
    /// Regular files that were found, by inode.
    names: HashMap<u64, String>,
    entries: Vec<TmpfsEntry>,
}

impl Walk<'_> {
    fn below(
        &mut self,
        place: &OwnedFd,
        path: &str,
        depth: usize,
    ) -> std::result::Result<(), String> {
        let target = self.target;
        let failed = |e: rustix::io::Errno| format!("'{target}/{path}' cannot be read: {e}");
        if depth > DEPTH_MAX {
            return Err(format!("'{target}/{path}' is too deep to be saved"));
        }
        let open = |at: &OwnedFd, name: &std::ffi::CStr, flags: OFlags| {
            let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            rustix::fs::openat2(at, name, flags, Mode::empty(), BELOW)
        };
        let listing = open(place, c".", OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
        let own = rustix::fs::fstat(&listing).map_err(failed)?.st_dev;
        for found in Dir::read_from(&listing).map_err(failed)? {
            let found = found.map_err(failed)?;
            let name = found.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let text = name.to_str().map_err(|_| format!("a name in '{target}' is not UTF-8"))?;
            let path = if path.is_empty() { text.to_owned() } else { format!("{path}/{text}") };
            let stat = match rustix::fs::statat(&listing, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // Removed meanwhile: nothing is stopped yet.
                Err(rustix::io::Errno::NOENT) => continue,
                Err(e) => return Err(failed(e)),
            };
            if stat.st_dev != own {
                continue; // mounted there: not a part of this tmpfs
            }
            let kind = FileType::from_raw_mode(stat.st_mode);
            let is_made = || self.nodes.iter().any(|node| *node == format!("{target}/{path}"));
            let what = match kind {
                FileType::Socket => TmpfsKind::Socket,
                FileType::CharacterDevice | FileType::BlockDevice if is_made() => continue,
                FileType::CharacterDevice if stat.st_rdev == 0 => TmpfsKind::Whiteout,
                FileType::Directory => TmpfsKind::Directory,
                FileType::Fifo => TmpfsKind::Fifo,
                FileType::Symlink => {
                    let to = rustix::fs::readlinkat(&listing, name, Vec::new()).map_err(failed)?;
                    let to = to.into_string();
                    TmpfsKind::Link { to: to.map_err(|_| format!("a link in '{target}'"))? }
                }
                FileType::RegularFile if stat.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0 => {
                    return Err(format!("'{target}/{path}' is set-user-id (or -group), not saved"));
                }
                FileType::RegularFile => match self.names.get(&stat.st_ino) {
                    Some(of) if stat.st_nlink > 1 => TmpfsKind::Name { of: of.clone() },
                    _ => {
                        self.names.insert(stat.st_ino, path.clone());
                        TmpfsKind::File { bytes: stat.st_size as u64, runs: Vec::new() }
                    }
                },
                _ => return Err(format!("'{target}/{path}' is a device, which is not saved yet")),
            };
            let (uid, gid) = self.maps.owner(stat.st_uid, stat.st_gid);
            let (mode, modified_ns) = (stat.st_mode & 0o7777, modified_ns(&stat));
            self.entries.push(TmpfsEntry { path: path.clone(), mode, uid, gid, modified_ns, what });
            if kind == FileType::Directory {
                match open(&listing, name, OFlags::PATH | OFlags::DIRECTORY) {
                    Ok(inner) => self.below(&inner, &path, depth + 1)?,
                    // A mount point, whose contents are not a part of this tmpfs.
                    Err(rustix::io::Errno::XDEV) => {
                        self.entries.pop();
                    }
                    Err(e) => return Err(failed(e)),
                }
            }
        }
        Ok(())
    }
}
