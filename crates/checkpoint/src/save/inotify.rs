//! Watches: fdinfo contains inode and device of each. A name of the inode is searched below the
//! places where that file system is mounted.
//!
//! LIMIT: [`ENTRIES_MAX`] directory entries are read.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirEntryExt;

use dormouse_kernel::proc;
use dormouse_record::{Inotify, Thing, Watch};

use super::open::Open;
use super::refusal::Reason;
use super::survey::Survey;
use crate::look::{file, mountinfo};

/// LIMIT: directory entries that are read to find the names of one inotify.
const ENTRIES_MAX: usize = 500_000;

/// Flags that a program may have set: all events, IN_EXCL_UNLINK, IN_ONESHOT.
pub(crate) const MASK: u32 = 0xfff | 0x0400_0000 | 0x8000_0000;

pub(crate) fn is_inotify(open: &Open<'_>) -> bool {
    open.link.strip_prefix("anon_inode:").is_some_and(|n| n.trim_matches(['[', ']']) == "inotify")
}

/// A watch as fdinfo contains it: number, mask, device and inode.
#[derive(Debug, PartialEq, Eq)]
struct FoundWatch {
    number: u32,
    mask: u32,
    of: (u64, u64),
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    if rustix::io::ioctl_fionread(&open.copy).is_ok_and(|waiting| waiting > 0) {
        let why = "an inotify with unread events, which are not saved";
        return Err(survey.passing(why.into()));
    }
    let lines = open.info.lines().filter_map(|line| line.strip_prefix("inotify "));
    let found: Option<Vec<FoundWatch>> = lines.map(watch).collect();
    let mut found = found.ok_or("an inotify with an incomplete fdinfo")?;
    // The kernel assigns the number after the last assigned one.
    found.sort_unstable_by_key(|t| t.number);
    let mut names = HashMap::new();
    if !found.is_empty() {
        let wanted: Vec<(u64, u64)> = found.iter().map(|t| t.of).collect();
        names = find(survey.mounts.witness(open.process), &wanted);
    }
    let watch = |found: FoundWatch| {
        let path = names.get(&found.of).cloned();
        let FoundWatch { number, mask, of: (device, inode) } = found;
        path.map(|path| Watch { number, path, mask: mask & MASK }).ok_or_else(|| {
            format!(
                "an inotify that watches inode {inode} of device {device:x} without a \
                     known name"
            )
        })
    };
    let held = !found.is_empty() && found.iter().all(|found| survey.is_volume(found.of.0));
    let watches = found.into_iter().map(watch).collect::<Result<Vec<Watch>, Reason>>()?;
    Ok(Thing::Inotify(Inotify { flags: open.flags(), watches, held }))
}

/// Reads `wd:3 ino:9e7e sdev:800013 mask:800afce ignored_mask:0 ...`.
fn watch(line: &str) -> Option<FoundWatch> {
    let field = |name: &str| {
        line.split_ascii_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix(':'))
    };
    let hex = |name| u64::from_str_radix(field(name)?, 16).ok();
    Some(FoundWatch {
        number: hex("wd")? as u32,
        mask: hex("mask")? as u32,
        of: (device(hex("sdev")?), hex("ino")?),
    })
}

/// Decodes a device number in the kernel's internal form: 12 bits of major above 20 of minor.
pub(super) fn device(number: u64) -> u64 {
    rustix::fs::makedev((number >> 20) as u32, (number & 0xf_ffff) as u32)
}

/// Names of inodes, as the first process sees them.
pub(super) fn find(pid: u32, wanted: &[(u64, u64)]) -> HashMap<(u64, u64), String> {
    let mut names: HashMap<(u64, u64), String> = HashMap::new();
    let table = proc::whole_text(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    let mut left = ENTRIES_MAX;
    for (device, place) in table.lines().filter_map(mountinfo::device_and_place) {
        let missing = |names: &HashMap<_, _>| {
            wanted.iter().any(|of| of.0 == device && !names.contains_key(of))
        };
        let mut next = VecDeque::from([place]);
        while let Some(path) = next.pop_front().filter(|_| missing(&names)) {
            let Ok(dir) = file::lookup(pid, &path) else { continue };
            let Ok(stat) = rustix::fs::fstat(&dir) else { continue };
            // Another file system is mounted here, or the path is not a directory.
            if stat.st_dev != device {
                continue;
            }
            if wanted.contains(&(device, stat.st_ino)) {
                names.entry((device, stat.st_ino)).or_insert_with(|| path.clone());
            }
            let listing = fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()));
            for entry in listing.into_iter().flatten().flatten() {
                left = left.saturating_sub(1);
                let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
                let inner = format!("{}/{name}", path.trim_end_matches('/'));
                let of = (device, entry.ino());
                let is_directory = entry.file_type().is_ok_and(|t| t.is_dir());
                if is_directory {
                    next.push_back(inner);
                } else if wanted.contains(&of) && is(pid, &inner, of) {
                    names.entry(of).or_insert(inner);
                }
            }
            if left == 0 {
                return names;
            }
        }
    }
    names
}

fn is(pid: u32, path: &str, of: (u64, u64)) -> bool {
    let found = file::lookup(pid, path).and_then(rustix::fs::fstat);
    found.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_read() {
        let line = "wd:1f ino:9e7e sdev:800013 mask:800afce ignored_mask:0 fhandle-bytes:8";
        let of = (rustix::fs::makedev(8, 19), 0x9e7e);
        assert_eq!(watch(line), Some(FoundWatch { number: 31, mask: 0x800_afce, of }));
        assert_eq!(watch("wd:3 ino:9e7e"), None);
    }
}
