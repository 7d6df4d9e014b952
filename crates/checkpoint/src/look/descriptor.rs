//! Descriptors: the numbers that a process has open, and the readiness of an open file.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use dormouse_record::{EpollItem, Error};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// The numbers of the open descriptors of a process, in order.
pub(crate) fn numbers(pid: u32) -> Result<Vec<u32>, Error> {
    let path = format!("/proc/{pid}/fd");
    let dir = match fs::read_dir(&path) {
        Ok(dir) => dir,
        Err(_) if !Path::new(&path).exists() => return Ok(Vec::new()), // ended meanwhile
        Err(e) => return Err(Error::file("cannot list", path)(e)),
    };
    let name =
        |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut all: Vec<u32> = dir.filter_map(name).collect();
    all.sort_unstable();
    Ok(all)
}

/// Polls a file without blocking.
pub(crate) fn ready(file: &OwnedFd) -> Result<PollFlags, Errno> {
    let wanted = PollFlags::IN | PollFlags::OUT | PollFlags::RDHUP;
    let mut polled = [PollFd::new(file, wanted)];
    rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
    Ok(polled[0].revents())
}

/// Reads a line of the fdinfo of an epoll: `tfd: 5 events: 19 data: 5 pos:0 ino:2 sdev:c`.
pub(crate) fn epoll_item(line: &str) -> Option<EpollItem> {
    let spaced = line.replace(':', " ");
    let words: Vec<&str> = spaced.split_ascii_whitespace().collect();
    let after = |name| words.iter().position(|w| *w == name).and_then(|at| words.get(at + 1));
    Some(EpollItem {
        pid: 0,
        number: after("tfd")?.parse().ok()?,
        events: u32::from_str_radix(after("events")?, 16).ok()?,
        data: u64::from_str_radix(after("data")?, 16).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_of_fdinfo_is_read() {
        let line = "tfd:        5 events:       19 data: 7fff00000005  pos:0 ino:2f sdev:c";
        let expected = EpollItem { pid: 0, number: 5, events: 0x19, data: 0x7fff_0000_0005 };
        assert_eq!(epoll_item(line), Some(expected));
        assert_eq!(epoll_item("tfd: x"), None);
    }
}
