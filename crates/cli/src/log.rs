//! Files that containers and the engine append to: the logs of a container, the event log.
//!
//! A log belongs to the process that writes it and is bounded by punching holes into its head
//! (fallocate(2)), never by renaming. An offset therefore stays valid, and a reader looks for data
//! from its offset on (`SEEK_DATA`). A slow reader loses the punched part; after a gap it continues
//! with the next whole line.
//!
//! A plain log has a file for each stream, without time stamps; the order of lines between the two
//! is not recorded. A log of entries is in [`crate::entry`].

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{SeekFrom, inotify, seek};
use rustix::io::Errno;

use crate::fail;
use crate::stream::Watch;

/// Bytes read at a time.
const BLOCK: usize = 64 << 10;

/// A file that grows, read from an offset on.
#[derive(Debug)]
pub(crate) struct Growing {
    file: File,
    offset: u64,
}

impl Growing {
    /// Opens a log, at its first byte that is still there; `None` if there is no such file.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("cannot read '{}'", path.display())),
        };
        let mut log = Self { file, offset: 0 };
        log.skip_gap()?;
        Ok(Some(log))
    }

    /// Goes to the end.
    pub(crate) fn seek_end(&mut self) -> Result<()> {
        self.offset = self.file.metadata().context("cannot look at a log")?.len();
        Ok(())
    }

    /// Goes to the beginning of the last `lines` lines.
    pub(crate) fn seek_last(&mut self, lines: u64) -> Result<()> {
        let first = self.offset;
        let mut at = self.file.metadata().context("cannot look at a log")?.len().max(first);
        let end = at;
        let mut block = vec![0; BLOCK];
        let mut seen = 0;
        // The newline at the end of the last line is not counted.
        while at > first {
            let len = (at - first).min(BLOCK as u64) as usize;
            let start = at - len as u64;
            self.file.read_exact_at(&mut block[..len], start).context("cannot read a log")?;
            for i in (0..len).rev() {
                if block[i] == b'\n' && start + i as u64 + 1 != end {
                    seen += 1;
                    if seen == lines {
                        self.offset = start + i as u64 + 1;
                        return Ok(());
                    }
                }
            }
            at = start;
        }
        if lines == 0 {
            self.offset = end;
        }
        Ok(())
    }

    /// The offset of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Goes to an offset.
    pub(crate) fn seek(&mut self, offset: u64) {
        self.offset = offset;
    }

    /// Returns a descriptor that is readable when the files have changed, or never if they are not followed.
    ///
    /// The close of an inotify instance waits for a grace period of the kernel (fsnotify_destroy_group): milliseconds,
    /// and seconds on a busy host.
    pub(crate) fn watch<'l>(
        logs: impl Iterator<Item = &'l Self>,
        follows: bool,
    ) -> Result<OwnedFd> {
        if !follows {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            return eventfd(0, flags).context("cannot make an eventfd");
        }
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let inotify = inotify::init(flags).context("cannot watch logs")?;
        for log in logs {
            // By descriptor, so that the file watched is the file read.
            use std::os::fd::AsRawFd;
            let path = format!("/proc/self/fd/{}", log.file.as_raw_fd());
            inotify::add_watch(&inotify, path, inotify::WatchFlags::MODIFY)
                .context("cannot watch a log")?;
        }
        Ok(inotify)
    }

    /// Reads the next bytes, none at the end. A log that became shorter is read from its start.
    pub(crate) fn read<'b>(&mut self, block: &'b mut Vec<u8>) -> Result<&'b [u8]> {
        block.resize(BLOCK, 0);
        self.skip_gap()?;
        let n = self.file.read_at(block, self.offset).context("cannot read a log")?;
        self.offset += n as u64;
        Ok(&block[..n])
    }

    /// Moves over a hole to the first whole line behind it.
    fn skip_gap(&mut self) -> Result<()> {
        match seek(&self.file, SeekFrom::Data(self.offset)) {
            Ok(at) if at > self.offset => {
                let mut block = vec![0; BLOCK];
                let n = self.file.read_at(&mut block, at).context("cannot read a log")?;
                // A hole need not begin or end where a line does.
                let line = block[..n].iter().position(|b| *b == b'\n').map_or(0, |i| i + 1);
                self.offset = at + line as u64;
            }
            Ok(_) => {}
            // No data behind the offset; EINVAL: this file system has no holes.
            Err(Errno::NXIO) => {
                let len = self.file.metadata().context("cannot look at a log")?.len();
                if len < self.offset {
                    self.offset = 0;
                }
            }
            Err(Errno::INVAL) => {}
            Err(e) => return Err(e).context("cannot look for data in a log"),
        }
        Ok(())
    }
}

/// Output stream of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sink {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Logs that are shown as they grow.
#[derive(Debug)]
pub(crate) struct Follower {
    changes: OwnedFd,
    logs: Vec<(Growing, Sink)>,
    block: Vec<u8>,
}

impl Follower {
    /// Shows files from the offsets at which they are open.
    pub(crate) fn new(logs: Vec<(Growing, Sink)>, follows: bool) -> Result<Self> {
        let changes = Growing::watch(logs.iter().map(|(log, _)| log), follows)?;
        Ok(Self { changes, logs, block: Vec::new() })
    }
}

impl Watch for Follower {
    fn fd(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }

    fn serve(&mut self) -> Result<()> {
        forget_events(&self.changes);
        for (log, sink) in &mut self.logs {
            loop {
                let bytes = log.read(&mut self.block)?;
                if bytes.is_empty() {
                    break;
                }
                write(*sink, bytes)?;
            }
        }
        Ok(())
    }
}

/// Empties the queue of a descriptor of [`Growing::watch`].
pub(crate) fn forget_events(changes: &OwnedFd) {
    let mut events = [0; 4096];
    while rustix::io::read(changes, &mut events).is_ok_and(|n| n > 0) {}
}

/// Writes to one of the caller's streams; if its reader is gone the program ends without a message.
pub(crate) fn write(sink: Sink, mut bytes: &[u8]) -> Result<()> {
    let fd = match sink {
        Sink::Out => rustix::stdio::stdout(),
        Sink::Err => rustix::stdio::stderr(),
    };
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut polled =
                    [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::OUT)];
                let _ = rustix::event::poll(&mut polled, None); // tried again either way
            }
            Err(Errno::PIPE) => return Err(fail::quiet(141)),
            Err(e) => return Err(e).context("cannot write the log"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn all(log: &mut Growing) -> Vec<u8> {
        let (mut out, mut block) = (Vec::new(), Vec::new());
        loop {
            let bytes = log.read(&mut block).unwrap();
            if bytes.is_empty() {
                return out;
            }
            out.extend_from_slice(bytes);
        }
    }

    #[test]
    fn seek_last_finds_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let long: String = (0..40_000).map(|n| format!("line {n}\n")).collect();
        for (text, lines, rest) in [
            ("", 3, ""),
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc", 2, "b\nc"),
            ("a\nb\n", 5, "a\nb\n"),
            ("a\nb\n", 0, ""),
            ("\n\n\n", 2, "\n\n"),
            (&long, 2, "line 39998\nline 39999\n"),
        ] {
            std::fs::write(&path, text).unwrap();
            let mut log = Growing::open(&path).unwrap().unwrap();
            log.seek_last(lines).unwrap();
            assert_eq!(String::from_utf8(all(&mut log)).unwrap(), rest, "{lines}");
        }
        assert!(Growing::open(&dir.path().join("none")).unwrap().is_none());
    }

    #[test]
    fn reader_skips_hole_to_next_whole_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut file = File::create(&path).unwrap();
        for n in 0..10_000 {
            writeln!(file, "line {n:06}").unwrap();
        }
        file.sync_all().unwrap();
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, punch, 0, 65_536).unwrap();
        let mut log = Growing::open(&path).unwrap().unwrap();
        let text = String::from_utf8(all(&mut log)).unwrap();
        // 65,536 bytes are 5,461 lines of 12 and a piece of the next, which is not shown.
        assert!(text.starts_with("line 005462\n"), "{:?}", &text[..40.min(text.len())]);
        assert!(text.ends_with("line 009999\n"));
        writeln!(file, "more").unwrap();
        assert_eq!(all(&mut log), b"more\n");
        file.set_len(0).unwrap();
        assert_eq!(all(&mut log), b"");
    }
}
