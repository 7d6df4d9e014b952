//! Moving bytes between a container and the caller.
//!
//! One loop over poll(2) serves both kinds of attachment: pipes (each of the three streams apart)
//! and a terminal (one pty master). Every direction is a [`Flow`]: a source, a sink, and the bytes
//! between. Rules:
//!
//! - Nothing is read while bytes wait to be written, so memory stays bounded and a slow reader
//!   slows the writer down, as a pipe does.
//! - Output streams are written only when poll permits it, and at most one page, which a pipe then
//!   accepts at once. So signals are served while a reader stalls, and descriptors shared with
//!   other processes are not switched to non-blocking.
//! - End of input closes the container's input; if the caller reads no more, the container's output
//!   is closed, and the program gets SIGPIPE: both as if the program were run directly.
//! - When the process has exited, the data in its pipes is moved, then the loop ends, even if a
//!   remaining process keeps a pipe open.
//! - A pty reads as EIO after its last program has closed it. Another program may open it again, so
//!   only the exit of the first process ends the loop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use dormouse_model::{LogStamp, LogStream, write_entries};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use crate::option::keys::Matcher;
use crate::signal::{self, Signals};
use crate::terminal::{self, Raw};

/// Bytes that a pipe accepts at once when poll reports it writable.
const PAGE: usize = 4096;

/// A descriptor of this program or of the caller.
#[derive(Debug)]
enum End {
    Own(OwnedFd),
    Stdin,
    Stdout,
    Stderr,
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) => fd.as_fd(),
            Self::Stdin => rustix::stdio::stdin(),
            Self::Stdout => rustix::stdio::stdout(),
            Self::Stderr => rustix::stdio::stderr(),
        }
    }
}

/// One direction.
#[derive(Debug)]
struct Flow {
    from: End,
    to: End,
    /// A log that receives the same bytes, without waiting.
    copy: Option<LogCopy>,
    waiting: Vec<u8>,
    done: usize,
    /// The sink accepts everything at once (a regular file), so a whole buffer is written.
    at_once: bool,
    /// The source has ended or the sink is gone.
    ended: bool,
    /// The source is a pty that returns EIO for now.
    hung: bool,
}

/// Result of one step of a flow.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Something was moved.
    Moved,
    /// Nothing can be moved now.
    Nothing,
}

impl Flow {
    fn new(from: End, to: End, copy: Option<LogCopy>) -> Self {
        let regular = |fd: BorrowedFd| {
            rustix::fs::fstat(fd)
                .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile)
        };
        let at_once = regular(to.as_fd());
        let waiting = Vec::new();
        Self { from, to, copy, waiting, done: 0, at_once, ended: false, hung: false }
    }

    fn is_waiting(&self) -> bool {
        self.done < self.waiting.len()
    }

    /// Reads once; `keys` filters the bytes. Returns true after the detach keys.
    fn read(&mut self, buffer: &mut [u8], keys: Option<&mut Matcher>) -> Result<(Step, bool)> {
        self.hung = false;
        let n = match rustix::io::read(&self.from, &mut *buffer) {
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => return Ok((Step::Nothing, false)),
            Err(Errno::IO) => {
                self.hung = true;
                return Ok((Step::Nothing, false));
            }
            Err(e) => return Err(e).context("cannot read a stream of the container"),
        };
        if n == 0 {
            self.ended = true;
            return Ok((Step::Nothing, false));
        }
        if let Some(copy) = &self.copy {
            copy.append(&buffer[..n]);
        }
        self.waiting.clear();
        self.done = 0;
        let detach = match keys {
            Some(keys) => keys.feed(&buffer[..n], &mut self.waiting),
            None => {
                self.waiting.extend_from_slice(&buffer[..n]);
                false
            }
        };
        Ok((Step::Moved, detach))
    }

    /// Writes waiting bytes once.
    fn write(&mut self) -> Result<Step> {
        let rest = &self.waiting[self.done..];
        let most = if self.at_once { rest.len() } else { rest.len().min(PAGE) };
        match rustix::io::write(&self.to, &rest[..most]) {
            Ok(n) => {
                self.done += n;
                Ok(Step::Moved)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Step::Nothing),
            // The reader is gone: the owner of this flow closes the source.
            Err(Errno::PIPE | Errno::IO) => {
                self.ended = true;
                self.done = self.waiting.len();
                Ok(Step::Nothing)
            }
            Err(e) => Err(e).context("cannot write a stream of the container"),
        }
    }
}

/// A log that receives a copy of the output.
#[derive(Debug)]
pub(crate) struct LogCopy {
    /// Opened for appending.
    pub(crate) log: OwnedFd,
    /// The log has entries, and the output is this stream; otherwise it has plain bytes.
    pub(crate) entries_of: Option<LogStream>,
}

impl LogCopy {
    /// Appends to the log, which accepts everything at once; on a full disk the log is lost, not
    /// the container.
    fn append(&self, bytes: &[u8]) {
        match self.entries_of {
            None => append(&self.log, bytes),
            Some(stream) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let mut entries = Vec::new();
                write_entries(&mut entries, LogStamp::new(now.as_nanos() as u64), stream, bytes);
                append(&self.log, &entries);
            }
        }
    }
}

fn append(to: &OwnedFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// End of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The process has exited.
    Exited,
    /// The caller detached; the process continues.
    Detached,
}

/// The container's side of an attachment.
#[derive(Debug)]
pub(crate) enum Streams {
    /// Ends of pipes; `None` is not attached. Logs receive a copy of the output.
    Pipes {
        /// Receives the caller's input.
        stdin: Option<OwnedFd>,
        /// The process's output, and its log.
        stdout: Option<(OwnedFd, Option<LogCopy>)>,
        /// The process's errors, and their log.
        stderr: Option<(OwnedFd, Option<LogCopy>)>,
    },
    /// A terminal.
    Terminal {
        /// The pty's master.
        master: OwnedFd,
        /// Whether the caller's input goes there.
        stdin: bool,
        /// Keys that detach.
        keys: Matcher,
        /// Receives a copy of the output.
        log: Option<LogCopy>,
        /// Input that is there already.
        typed: Vec<u8>,
    },
}

/// End of a wait beside an asleep container.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// The caller typed.
    Typed(Vec<u8>),
    /// The container is not asleep any more.
    Over,
    /// The caller detached.
    Detached,
}

/// How often an attachment looks whether its container is still asleep.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Waits beside a container without processes until `is_over`, or until the caller types or detaches. `stdin` is
/// taken back at the end of the input.
pub(crate) fn rest(
    stdin: &mut bool,
    keys: &mut Matcher,
    signals: &Signals,
    mut is_over: impl FnMut() -> Result<bool>,
) -> Result<Rest> {
    let raw = if *stdin { Raw::enter()? } else { None };
    let mut buffer = [0; PAGE];
    loop {
        while let Some(number) = signals.next() {
            match number {
                signal::SIGCONT => raw.as_ref().map_or(Ok(()), Raw::again)?,
                signal::SIGHUP | signal::SIGINT | signal::SIGTERM => return Ok(Rest::Detached),
                _ => {} // no process could receive it; the size is set at the wake
            }
        }
        if is_over()? {
            return Ok(Rest::Over);
        }
        let input = rustix::stdio::stdin();
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        if *stdin {
            fds.push(PollFd::new(&input, PollFlags::IN));
        }
        match poll(&mut fds, Some(&LOOK)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e).context("cannot wait for the container"),
        }
        if fds.get(1).is_none_or(|fd| fd.revents().is_empty()) {
            continue;
        }
        let n = match rustix::io::read(input, &mut buffer) {
            Ok(0) | Err(Errno::IO) => {
                *stdin = false;
                continue;
            }
            Err(Errno::AGAIN | Errno::INTR) => continue,
            other => other.context("cannot read the input")?,
        };
        let mut typed = Vec::new();
        if keys.feed(&buffer[..n], &mut typed) {
            return Ok(Rest::Detached);
        }
        if !typed.is_empty() {
            return Ok(Rest::Typed(typed));
        }
    }
}

/// A further source of work during an attachment.
pub(crate) trait Watch {
    /// Readable when there is work.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Does the work; called once more after the process has exited.
    fn serve(&mut self) -> Result<()>;
}

/// Moves bytes until the process behind `pidfd` exits or the caller detaches. Received signals are
/// passed to `pass`; if that returns false, the caller detaches.
pub(crate) fn attach(
    streams: Streams,
    pidfd: BorrowedFd,
    signals: &Signals,
    mut watch: Option<&mut dyn Watch>,
    mut pass: impl FnMut(i32) -> bool,
) -> Result<Ended> {
    let mut raw = None;
    let mut keys = None;
    let mut terminal = None;
    let mut flows = Vec::with_capacity(3);
    match streams {
        Streams::Pipes { stdin, stdout, stderr } => {
            if let Some(to) = stdin {
                nonblocking(&to)?;
                flows.push(Flow::new(End::Stdin, End::Own(to), None));
            }
            for (stream, to) in [(stdout, End::Stdout), (stderr, End::Stderr)] {
                if let Some((from, log)) = stream {
                    nonblocking(&from)?;
                    flows.push(Flow::new(End::Own(from), to, log));
                }
            }
        }
        Streams::Terminal { master, stdin, keys: matcher, log, typed } => {
            nonblocking(&master)?;
            terminal::resize(&master);
            let again = || master.try_clone().context("cannot duplicate the terminal");
            if stdin {
                raw = Raw::enter()?;
                keys = Some(matcher);
                let input = Flow::new(End::Stdin, End::Own(again()?), None);
                flows.push(Flow { waiting: typed, ..input });
            }
            flows.push(Flow::new(End::Own(again()?), End::Stdout, log));
            terminal = Some(master);
        }
    }
    let mut buffer = vec![0; 4 * PAGE];
    loop {
        while let Some(number) = signals.next() {
            match (number, &terminal) {
                (signal::SIGWINCH, Some(master)) => terminal::resize(master),
                (signal::SIGCONT, Some(master)) => {
                    raw.as_ref().map_or(Ok(()), Raw::again)?;
                    terminal::resize(master);
                }
                // The window was closed: the container stays.
                (signal::SIGHUP, Some(_)) => return Ok(Ended::Detached),
                (signal::SIGWINCH | signal::SIGCONT, None) => {}
                (number, _) => {
                    if !pass(number) {
                        return Ok(Ended::Detached);
                    }
                }
            }
        }
        let mut fds = vec![PollFd::new(signals, PollFlags::IN), PollFd::new(&pidfd, PollFlags::IN)];
        if let Some(watch) = watch.as_deref() {
            fds.push(PollFd::from_borrowed_fd(watch.fd(), PollFlags::IN));
        }
        let first_flow = fds.len();
        let mut served = Vec::with_capacity(flows.len());
        for (i, flow) in flows.iter().enumerate() {
            if flow.is_waiting() {
                fds.push(PollFd::new(&flow.to, PollFlags::OUT));
                served.push(i);
            } else if !flow.ended && !flow.hung {
                fds.push(PollFd::new(&flow.from, PollFlags::IN));
                served.push(i);
            }
        }
        // A pty that has hung up is tried again, in case a program has opened it again.
        let hung = flows.iter().any(|f| f.hung);
        let timeout = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        match poll(&mut fds, hung.then_some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e).context("cannot wait for the container"),
        }
        let ready: Vec<usize> = served
            .iter()
            .zip(&fds[first_flow..])
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|(i, _)| *i)
            .collect();
        let exited = !fds[1].revents().is_empty();
        let watched = first_flow == 3 && !fds[2].revents().is_empty();
        drop(fds);
        if let Some(watch) = watch.as_deref_mut().filter(|_| watched || exited) {
            watch.serve()?;
        }
        for flow in flows.iter_mut().filter(|f| f.hung) {
            flow.hung = false; // tried again below or found hung by the next read
        }
        for i in ready {
            let flow = &mut flows[i];
            if flow.is_waiting() {
                flow.write()?;
            } else {
                let input = matches!(flow.from, End::Stdin);
                let (_, detach) = flow.read(&mut buffer, keys.as_mut().filter(|_| input))?;
                if detach {
                    let _ = flow.write(); // input before the keys
                    return Ok(Ended::Detached);
                }
            }
        }
        // An ended flow is closed: its ends are dropped, so the other side reads end of file.
        flows.retain(|f| !f.ended || f.is_waiting());
        if exited {
            drain(&mut flows, &mut buffer)?;
            return Ok(Ended::Exited);
        }
    }
}

/// Moves the remaining data of the container's pipes after its exit.
fn drain(flows: &mut [Flow], buffer: &mut [u8]) -> Result<()> {
    for flow in flows.iter_mut().filter(|f| !matches!(f.from, End::Stdin)) {
        loop {
            while flow.is_waiting() {
                let mut fds = [PollFd::new(&flow.to, PollFlags::OUT)];
                let _ = poll(&mut fds, None); // an interrupted wait is repeated
                flow.write()?;
            }
            if flow.ended || flow.read(buffer, None)?.0 == Step::Nothing {
                break;
            }
        }
    }
    Ok(())
}

fn nonblocking(fd: &OwnedFd) -> Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd).context("cannot read a stream's flags")?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).context("cannot set a stream's flags")
}

/// Waits until one of the descriptors is readable or the timeout expires.
pub(crate) fn wait_readable(fds: &[BorrowedFd], timeout: Option<Duration>) -> Result<()> {
    let mut polled: Vec<PollFd> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = timeout
        .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e).context("cannot wait"),
    }
}
