//! Watches by fanotify(7): fdinfo contains the flags of the group, and the inode of each mark.
//!
//! Root of a user namespace may mark files and directories, and receive names and handles with the
//! events. KERNEL(5.13): before, no process in a container could.

use std::collections::HashMap;

use dormouse_record::{Fanotify, Mark, Thing};
use rustix::fs::FileType;

use super::inotify;
use super::open::Open;
use super::refusal::Reason;
use super::survey::Survey;
use crate::look::file;

pub(crate) fn is_fanotify(open: &Open<'_>) -> bool {
    open.link == "anon_inode:[fanotify]"
}

/// A mark as fdinfo contains it, by device and inode.
#[derive(Debug, PartialEq, Eq)]
struct FoundMark {
    of: (u64, u64),
    flags: u32,
    mask: u64,
    ignored: u64,
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    if rustix::io::ioctl_fionread(&open.copy).is_ok_and(|waiting| waiting > 0) {
        return Err("a fanotify with unread events, which are not saved".into());
    }
    let too_little = "a fanotify with an incomplete fdinfo";
    let mut lines = open.info.lines().filter(|line| line.starts_with("fanotify "));
    let head = lines.next().ok_or(too_little)?;
    let (flags, event_flags) =
        hex(head, "flags").zip(hex(head, "event-flags")).ok_or(too_little)?;
    let all: Vec<&str> = lines.collect();
    if all.iter().any(|line| hex(line, "ino").is_none()) {
        return Err("a fanotify that marks a mount or a file system, which is not saved".into());
    }
    let found: Option<Vec<FoundMark>> = all.iter().map(|line| mark(line)).collect();
    let found = found.ok_or(too_little)?;
    let mut names = HashMap::new();
    let witness = survey.mounts.witness(open.process);
    if !found.is_empty() {
        let wanted: Vec<(u64, u64)> = found.iter().map(|t| t.of).collect();
        names = inotify::find(witness, &wanted);
    }
    let mark = |found: FoundMark| {
        let (device, inode) = found.of;
        let path = names.get(&found.of).cloned().ok_or_else(|| {
            format!("a fanotify that marks inode {inode} of device {device:x} without a known name")
        })?;
        let stat = file::lookup(witness, &path).and_then(rustix::fs::fstat);
        let is_directory =
            stat.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory);
        // The kernel adds FAN_EVENT_ON_CHILD to marks of files, too, and may refuse the flag for
        // them.
        let kept = if is_directory { u64::MAX } else { !libc::FAN_EVENT_ON_CHILD };
        let (mask, ignored) = (found.mask & kept, found.ignored & kept);
        Ok(Mark { path, flags: found.flags, mask, ignored })
    };
    // The kernel lists the latest mark first.
    let marks = found.into_iter().rev().map(mark).collect::<Result<Vec<Mark>, Reason>>()?;
    let waits = if open.flags() & libc::O_NONBLOCK as u32 == 0 { 0 } else { libc::FAN_NONBLOCK };
    // FAN_CLOEXEC stays: it is also a flag of the file description.
    let flags = flags as u32 & !libc::FAN_NONBLOCK | waits;
    Ok(Thing::Fanotify(Fanotify { flags, event_flags: event_flags as u32, marks }))
}

fn hex(line: &str, name: &str) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    let text = words.find_map(|word| word.strip_prefix(name)?.strip_prefix(':'))?;
    u64::from_str_radix(text, 16).ok()
}

/// Reads `fanotify ino:9e7e sdev:800013 mflags:0 mask:2 ignored_mask:0 ...`.
fn mark(line: &str) -> Option<FoundMark> {
    Some(FoundMark {
        of: (inotify::device(hex(line, "sdev")?), hex(line, "ino")?),
        flags: hex(line, "mflags")? as u32,
        mask: hex(line, "mask")?,
        ignored: hex(line, "ignored_mask")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read() {
        let line = "fanotify ino:988014 sdev:fe00000 mflags:40 mask:8000022 ignored_mask:20 \
                    fhandle-bytes:8 fhandle-type:1 f_handle:14809800d35e6d89";
        let of = (rustix::fs::makedev(254, 0), 0x98_8014);
        let found = FoundMark { of, flags: 0x40, mask: 0x800_0022, ignored: 0x20 };
        assert_eq!(mark(line), Some(found));
        assert_eq!(mark("fanotify mnt_id:21 mflags:0 mask:3b ignored_mask:0"), None);
        assert_eq!(hex("fanotify flags:202 event-flags:8002", "flags"), Some(0x202));
    }
}
