//! Descriptors: the numbers that a process has open, and the readiness of an open file.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use dormouse_record::Error;
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
