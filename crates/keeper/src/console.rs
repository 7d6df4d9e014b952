//! Terminals, standard inputs and logs that the keeper holds while no client is attached.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_launch::protocol::Id;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// The master of a terminal and the log that receives its output while no client is attached.
#[derive(Debug)]
pub struct Console {
    /// The container.
    pub id: Id,
    /// The master.
    pub master: OwnedFd,
    /// The log.
    pub log: OwnedFd,
    /// The connection that has it now.
    pub attached: Option<u64>,
    /// The other side was closed at the last check; the terminal is not polled now.
    pub hung_up: bool,
}

/// Result of moving a console's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pumped {
    /// Output was written, or none was available.
    Some,
    /// The other side is closed.
    HungUp,
}

impl Console {
    /// Moves the available output, once, from the terminal to the log. To be called when the master
    /// is readable.
    pub fn pump(&self) -> Pumped {
        let mut bytes = [0; 16 << 10];
        match rustix::io::read(&self.master, &mut bytes) {
            Ok(0) | Err(Errno::IO) => Pumped::HungUp,
            Ok(n) => {
                let mut rest = &bytes[..n];
                while !rest.is_empty() {
                    match rustix::io::write(&self.log, rest) {
                        Ok(n) => rest = &rest[n..],
                        Err(Errno::INTR) => {}
                        // A full disk loses output; it must not stop the program or the keeper.
                        Err(_) => break,
                    }
                }
                Pumped::Some
            }
            Err(Errno::AGAIN | Errno::INTR) => Pumped::Some,
            Err(_) => Pumped::HungUp,
        }
    }

    /// Moves what is left after the program has ended. LIMIT: 1 MiB, so that a process that
    /// outlives its session cannot hold the keeper.
    pub fn drain(&self) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        for _ in 0..256 {
            let mut fds = [PollFd::new(&self.master, PollFlags::IN)];
            let ready = rustix::event::poll(&mut fds, Some(&zero));
            let readable = fds[0].revents().contains(PollFlags::IN);
            if !matches!(ready, Ok(1..)) || !readable || self.pump() == Pumped::HungUp {
                break;
            }
        }
    }
}

/// Logs that are kept under a bound.
#[derive(Debug)]
pub struct Logs {
    /// Paths on the host.
    pub paths: Box<[Box<str>]>,
    /// Bytes on disk for each.
    pub bound_bytes: u64,
}

/// Smallest unit in which a log is cut.
const BLOCK: u64 = 4096;

impl Logs {
    /// Removes the excess from the head of each log by punching a hole. The writer appends and is
    /// not affected; a reader begins at SEEK_DATA. A quarter more than needed is removed, so that
    /// most checks have nothing to do.
    ///
    /// LIMIT: a writer faster than the bound between two checks (2 s, proportionally longer with
    /// more than a thousand containers) exceeds it until the next check.
    pub fn trim(&self, root: &OwnedFd) {
        for path in &self.paths {
            let _ = trim(root, path, self.bound_bytes);
        }
    }
}

fn trim(root: &OwnedFd, path: &str, bound: u64) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    trim_file(&rustix::fs::openat2(root, path, flags, Mode::empty(), how)?, bound)
}

/// Removes the excess from the head of an open log.
pub(crate) fn trim_file(file: &OwnedFd, bound: u64) -> Result<(), Errno> {
    let stat = rustix::fs::fstat(file)?;
    let (on_disk, size) = (stat.st_blocks as u64 * 512, stat.st_size as u64);
    let bound = bound.max(4 * BLOCK);
    if on_disk <= bound {
        return Ok(());
    }
    let keep = bound - bound / 4;
    let end = size.saturating_sub(keep) / BLOCK * BLOCK;
    if end == 0 {
        return Ok(());
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file.as_fd(), mode, 0, end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn log_stays_under_its_bound_and_keeps_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let root = rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let logs = Logs { paths: [path.to_str().unwrap().into()].into(), bound_bytes: 64 << 10 };
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.create(true).append(true).open(&path).unwrap();
        for i in 0..20_000 {
            writeln!(file, "line {i:08}").unwrap();
            if i % 1000 == 0 {
                logs.trim(&root);
            }
        }
        file.sync_all().unwrap();
        logs.trim(&root);
        let stat = rustix::fs::fstat(&file).unwrap();
        assert!(stat.st_blocks * 512 <= 68 << 10, "{} bytes are left", stat.st_blocks * 512);
        assert_eq!(stat.st_size, 20_000 * 14);
        let start = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap();
        assert!(start > 200_000 && start < stat.st_size as u64 - 40_000, "{start}");
        let text = std::fs::read(&path).unwrap();
        assert!(text.ends_with(b"line 00019999\n"));
    }
}
