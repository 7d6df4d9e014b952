//! The reader: a process that appends the output of containers to their logs.
//!
//! The output of a container is two pipes. The container has their ends open for reading *and*
//! writing, so it gets no SIGPIPE while there is no reader: it waits when a pipe is full. The
//! reader has the read ends. A copy of each is parked ([`crate::lot`]), therefore in the vault, so
//! unread output outlives reader, keeper and container.
//!
//! ```text
//! keeper -> reader   ADD key streams bound path + descriptors,  FLUSH key ticket
//! reader -> keeper   ENDED key: no writer is left, and all was read;  FLUSHED ticket
//! ```
//!
//! **Order.** The contents of two pipes have no common order. Therefore the container's ends are
//! in packet mode (pipe(2), O_DIRECT), in which a write of at most a page is one packet. The kernel
//! also queues a signal for each write, with the number of the read end (fcntl(2), F_SETSIG). The
//! sequence of signals is the sequence of writes. A signal without a packet counts for nothing; it
//! is the second of a write that had to wait. A packet without a signal waits [`GRACE`] for one,
//! and is then read without. The queue of signals has a limit (RLIMIT_SIGPENDING); behind it the
//! kernel sends SIGIO, and everything is read in any order. An end that the container has opened
//! again is not in packet mode; of such a chunk each signal stands for one line.
//!
//! **Killed.** Output is copied from the pipe (tee(2)), written to the log, and only then removed
//! from the pipe. A reader that is killed in between leaves entries that the next one repeats, and
//! loses nothing. At the end of its keeper a reader exits between two such rounds. The next keeper
//! starts none before it has the lock that all readers of the last one hold.
//!
//! **Hostile input.** The bytes are searched for newlines and are otherwise not interpreted. The
//! reader has no capabilities and a filter with the calls of this file. It serves each container
//! one round, of at most 16 packets a stream, then the next one. A log is kept under its bound by a
//! hole at its head whenever an eighth of the bound was written.
//!
//! LIMIT: output is lost if the log cannot be written, as on a full disk.

use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dormouse_kernel::call::{self as kernel, CapabilityMasks, CloneArgs, Cloned};
use dormouse_kernel::seccomp::{Action, Argument, Condition, Decision, Policy, Rule, Test};
use dormouse_launch::protocol::stream;
use dormouse_launch::wire;
use dormouse_model::{LogStamp, LogStream, write_entries};
use rustix::event::{Timespec, epoll};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use rustix::pipe::SpliceFlags;

use crate::call;
use crate::console::trim_file;

/// Its name.
const NAME: &CStr = c"dormouse-reader";
/// The signal of a write.
const WRITTEN: i32 = 40;
/// Its bit and that of SIGIO in a signal mask.
const SIGNALS_MASK: u64 = 1 << (WRITTEN - 1) | 1 << (libc::SIGIO - 1);
/// LIMIT: queued signals. They count for the user, root, so that a container could use up root's.
const SIGNALS_MAX: u64 = 16_384;
/// Resource number of that limit (getrlimit(2)).
const SIGPENDING: u32 = 11;
/// LIMIT: signals of one container that are kept; with more, the order is given up.
const WRITES: usize = 4096;
/// LIMIT: signals that are read before containers are served.
const SIGNALS_AT_ONCE: usize = 1024;
/// How long a packet waits for its signal: the writer may lose the processor between the two, on a busy
/// machine for long. Only a writer that was killed there leaves none.
const GRACE: Duration = Duration::from_secs(1);
/// LIMIT: bytes of one stream in one round. A page is the usual size of a packet, and there are 16.
const ROUND: usize = 1 << 20;
/// Bytes of a packet that need not be the last one of its write.
const PAGE: usize = 4096;
/// Packets that a pipe has room for, unless the container changes that.
const PACKETS: usize = 16;
/// LIMIT: logs that are open at the same time.
const FILES: usize = 128;
/// Bytes of entries that are written at once.
const WRITE: usize = 256 << 10;
/// Rounds until everything is read that was written before: the largest pipe of a container without
/// privilege has 256 packets.
const FLUSH_ROUNDS: usize = 17;
/// LIMIT: bytes of a message, of which the path is the longest part.
const MESSAGE: usize = 8192;
/// Descriptors of a reader beside two for each container.
const OTHERS: u64 = FILES as u64 + 32;

const KEEPER: u64 = 0;
const SIGNALS: u64 = 1;

const ADD: u8 = 1;
const FLUSH: u8 = 2;
const ENDED: u8 = 3;
const FLUSHED: u8 = 4;

/// Bits of the streams, in the order of their descriptors.
const BITS: [u8; 2] = [stream::OUT, stream::ERR];

/// LIMIT: containers of one reader. A container can make calls on its pipes slow, by a page fault under the
/// pipe's lock or by thousands of open files with O_ASYNC, which delays the containers of its reader alone.
const SOURCES: usize = 64;

/// How many containers a process with this limit on descriptors reads.
pub(crate) fn capacity(nofile: u64) -> usize {
    ((nofile.saturating_sub(OTHERS) / 2) as usize).min(SOURCES)
}

/// A report of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// The log of this output is complete.
    Ended(u64),
    /// The flush with this ticket is done.
    Flushed(u64),
}

/// Starts a reader. Returns the socket to it. `guard` is the lock that it holds.
pub(crate) fn start(root: BorrowedFd<'_>, guard: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (keeper, own) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    // SAFETY: there is one thread, so the child may do all that the parent may.
    match unsafe { kernel::clone3(&CloneArgs::default()) }? {
        Cloned::Parent { .. } => Ok(keeper),
        Cloned::Child => {
            let _ = rustix::process::setsid();
            let _ = kernel::set_name(NAME);
            // ORDER: as in the vault: the owners of the other descriptors are never used again.
            let kept = [own.as_fd(), root, guard];
            if call::close_all_but(kept).is_ok()
                && let Ok(null) = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)
                && let Ok(mut reader) = Reader::new(own, root, null)
                && confine().is_ok()
            {
                let _ = reader.run();
            }
            kernel::exit(0)
        }
    }
}

/// Requests that a reader appends the output behind these read ends to a log.
pub(crate) fn send_add(
    sock: &OwnedFd,
    key: u64,
    (streams, bound_bytes, path): (u8, u64, &str),
    ends: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut message = message(ADD, key);
    message.push(streams);
    message.extend_from_slice(&bound_bytes.to_ne_bytes());
    message.extend_from_slice(path.as_bytes());
    wire::send(sock, &message, ends, SendFlags::DONTWAIT)
}

/// Requests [`Report::Flushed`] with this ticket when the log has all present output.
pub(crate) fn send_flush(sock: &OwnedFd, key: u64, ticket: u64) -> Result<(), Errno> {
    let mut message = message(FLUSH, key);
    message.extend_from_slice(&ticket.to_ne_bytes());
    wire::send(sock, &message, &[], SendFlags::DONTWAIT)
}

/// Receives a report. EAGAIN: there is none now. Any other error: the reader has exited.
pub(crate) fn receive(sock: &OwnedFd) -> Result<Report, Errno> {
    let mut bytes = [0; 9];
    let length = wire::receive(sock, &mut bytes, RecvFlags::DONTWAIT, drop)?;
    match read_head(&bytes[..length]) {
        Some((ENDED, key, [])) => Ok(Report::Ended(key)),
        Some((FLUSHED, ticket, [])) => Ok(Report::Flushed(ticket)),
        _ => Err(Errno::PIPE),
    }
}

fn message(kind: u8, key: u64) -> Vec<u8> {
    let mut message = vec![kind];
    message.extend_from_slice(&key.to_ne_bytes());
    message
}

fn read_head(message: &[u8]) -> Option<(u8, u64, &[u8])> {
    let (kind, rest) = message.split_first()?;
    let (key, rest) = rest.split_first_chunk()?;
    Some((*kind, u64::from_ne_bytes(*key), rest))
}

/// Takes all rights from this process but those of its work.
fn confine() -> Result<(), Errno> {
    kernel::set_no_new_privs()?;
    kernel::capset(CapabilityMasks { effective: 0, permitted: 0, inheritable: 0 })?;
    policy().compile().and_then(|filter| filter.load().ok()).ok_or(Errno::INVAL)
}

/// The calls of this file, and of the allocator.
fn policy() -> Policy {
    let mut policy = Policy::new(Action::Errno(libc::EPERM as u16));
    for number in [
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_epoll_ctl,
        libc::SYS_read,
        libc::SYS_pread64,
        libc::SYS_write,
        libc::SYS_ftruncate,
        libc::SYS_tee,
        libc::SYS_splice,
        libc::SYS_openat2,
        libc::SYS_close,
        libc::SYS_fstat,
        libc::SYS_newfstatat,
        libc::SYS_fallocate,
        libc::SYS_fcntl,
        libc::SYS_recvmsg,
        libc::SYS_sendmsg,
        libc::SYS_clock_gettime,
        libc::SYS_gettid,
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_brk,
        libc::SYS_madvise,
        libc::SYS_futex,
        libc::SYS_getrandom,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ] {
        policy.set(number as u32, Action::Allow);
    }
    let asks_for_length = Condition::new(Argument::Int(1), Test::Equal(libc::FIONREAD));
    policy.set(
        libc::SYS_ioctl as u32,
        Decision {
            rules: vec![Rule { when: vec![asks_for_length], then: Action::Allow }],
            otherwise: Action::Errno(libc::EPERM as u16),
        },
    );
    policy
}

/// The read end of a pipe.
#[derive(Debug)]
struct End {
    pipe: OwnedFd,
    /// No process has it open for writing.
    is_complete: bool,
}

/// The output of one container.
#[derive(Debug)]
struct Source {
    ends: [Option<End>; 2],
    path: String,
    bound_bytes: u64,
    /// The streams of writes, in their order.
    writes: VecDeque<u8>,
    is_ready: bool,
    is_late: bool,
    /// Packets without a signal are read, too.
    takes_all: bool,
    /// Bytes written since the log was trimmed; so many at first that the log is looked at.
    untrimmed_bytes: u64,
}

/// A part of the bytes that were copied from a pipe.
type Chunk = Range<usize>;

/// What is in the pipe of one stream.
#[derive(Debug, Default)]
struct Copied {
    chunks: VecDeque<Chunk>,
    /// There was more than one round takes.
    has_more: bool,
}

struct Reader<'r> {
    keeper: OwnedFd,
    root: BorrowedFd<'r>,
    /// `/dev/null`: what was written to a log is moved there.
    null: OwnedFd,
    epoll: OwnedFd,
    signals: OwnedFd,
    /// A pipe for copies: read end and write end.
    copies: (OwnedFd, OwnedFd),
    sources: HashMap<u64, Source>,
    /// Container and stream of each read end, by its number.
    numbers: HashMap<i32, (u64, u8)>,
    /// Containers to be served, each once.
    ready: VecDeque<u64>,
    /// Containers with packets that wait for their signals, soonest first.
    late: VecDeque<(Instant, u64)>,
    files: Files,
    bytes: Vec<u8>,
    entries: Vec<u8>,
}

impl<'r> Reader<'r> {
    fn new(keeper: OwnedFd, root: BorrowedFd<'r>, null: OwnedFd) -> Result<Self, Errno> {
        let (_, hard) = kernel::prlimit(SIGPENDING, None)?;
        // The default hard limit is small on hosts with little memory.
        let limit = (hard / 2).min(SIGNALS_MAX);
        kernel::prlimit(SIGPENDING, Some((limit, hard)))?;
        // SIGIO would end this process.
        call::block_signals(SIGNALS_MASK)?;
        let signals = call::signal_fd(SIGNALS_MASK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (fd, number) in [(&keeper, KEEPER), (&signals, SIGNALS)] {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?;
        }
        let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
        let copies = rustix::pipe::pipe_with(flags)?;
        Ok(Self {
            keeper,
            root,
            null,
            epoll,
            signals,
            copies,
            sources: HashMap::new(),
            numbers: HashMap::new(),
            ready: VecDeque::new(),
            late: VecDeque::new(),
            files: Files::default(),
            bytes: Vec::new(),
            entries: Vec::new(),
        })
    }

    /// Serves until the keeper closes its end.
    fn run(&mut self) -> Result<(), Errno> {
        let mut events = [MaybeUninit::uninit(); 64];
        loop {
            let timeout = self.timeout();
            let (ready, _) = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let mut is_called = false;
            for event in ready.iter() {
                match event.data.u64() {
                    KEEPER => is_called = true,
                    SIGNALS => {}
                    number => self.completed(number >> 1, (number & 1) as usize),
                }
            }
            self.receive_signals();
            if is_called {
                self.receive_messages()?;
            }
            let now = Instant::now();
            while let Some((_, key)) = self.late.front().copied().filter(|(at, _)| *at <= now) {
                self.late.pop_front();
                self.make_ready(key, |source| {
                    source.is_late = false;
                    source.takes_all = true;
                });
            }
            for _ in 0..self.ready.len() {
                let Some(key) = self.ready.pop_front() else { break };
                self.serve(key)?;
            }
        }
    }

    fn timeout(&self) -> Option<Timespec> {
        if !self.ready.is_empty() {
            return Some(Timespec::default());
        }
        let (at, _) = self.late.front()?;
        let wait = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        Some(Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) })
    }

    /// Notes a change of a container, which is then served.
    fn make_ready(&mut self, key: u64, change: impl FnOnce(&mut Source)) {
        let Some(source) = self.sources.get_mut(&key) else { return };
        change(source);
        if !std::mem::replace(&mut source.is_ready, true) {
            self.ready.push_back(key);
        }
    }

    /// The last process has closed a pipe.
    fn completed(&mut self, key: u64, stream: usize) {
        self.make_ready(key, |source| {
            source.takes_all = true;
            if let Some(end) = &mut source.ends[stream] {
                end.is_complete = true;
            }
        });
    }

    /// Reads the queue of signals.
    fn receive_signals(&mut self) {
        for _ in 0..SIGNALS_AT_ONCE / call::SIGNALS_READ {
            let received = call::ready_descriptors(&self.signals);
            for signal in &received {
                match signal {
                    Some(number) => {
                        let Some((key, stream)) = self.numbers.get(number).copied() else {
                            continue; // a pipe that is closed by now
                        };
                        self.make_ready(key, |source| match source.writes.len() < WRITES {
                            true => source.writes.push_back(stream),
                            false => source.takes_all = true,
                        });
                    }
                    // The queue was full.
                    None => {
                        let keys: Vec<u64> = self.sources.keys().copied().collect();
                        for key in keys {
                            self.make_ready(key, |source| source.takes_all = true);
                        }
                    }
                }
            }
            if received.len() < call::SIGNALS_READ {
                break;
            }
        }
    }

    fn receive_messages(&mut self) -> Result<(), Errno> {
        loop {
            let (mut bytes, mut fds) = ([0; MESSAGE], Vec::new());
            let flags = RecvFlags::DONTWAIT;
            let length = match wire::receive(&self.keeper, &mut bytes, flags, |fd| fds.push(fd)) {
                Ok(0) => return Err(Errno::PIPE),
                Err(Errno::AGAIN) => return Ok(()),
                other => other?,
            };
            match read_head(&bytes[..length]) {
                Some((ADD, key, rest)) => {
                    if self.add(key, rest, fds).is_none() {
                        self.report(ENDED, key)?;
                    }
                }
                Some((FLUSH, key, ticket)) => {
                    let ticket = ticket.try_into().map(u64::from_ne_bytes);
                    self.flush(key)?;
                    self.report(FLUSHED, ticket.map_err(|_| Errno::BADMSG)?)?;
                }
                _ => return Err(Errno::BADMSG),
            }
        }
    }

    fn report(&self, kind: u8, key: u64) -> Result<(), Errno> {
        wire::send(&self.keeper, &message(kind, key), &[], SendFlags::empty())
    }

    fn add(&mut self, key: u64, rest: &[u8], fds: Vec<OwnedFd>) -> Option<()> {
        let (streams, rest) = rest.split_first()?;
        let (bound, path) = rest.split_first_chunk()?;
        let path = std::str::from_utf8(path).ok()?.to_owned();
        let mut fds = fds.into_iter();
        let mut ends = [None, None];
        let wanted = BITS.into_iter().enumerate().filter(|(_, bit)| streams & bit != 0);
        for (stream, _) in wanted {
            let pipe = fds.next()?;
            // Of an earlier reader, which is gone, the pipe has another owner.
            let data = epoll::EventData::new_u64(key << 1 | stream as u64);
            // A hang-up is always reported (epoll_ctl(2)).
            let is_watched = call::signal_writes(pipe.as_fd(), WRITTEN).is_ok()
                && epoll::add(&self.epoll, &pipe, data, epoll::EventFlags::ET).is_ok();
            if !is_watched {
                for End { pipe, .. } in ends.iter().flatten() {
                    let _ = epoll::delete(&self.epoll, pipe); // it is in the set
                    self.numbers.remove(&pipe.as_raw_fd());
                }
                return None;
            }
            self.numbers.insert(pipe.as_raw_fd(), (key, stream as u8));
            ends[stream] = Some(End { pipe, is_complete: false });
        }
        let source = Source {
            ends,
            path,
            bound_bytes: u64::from_ne_bytes(*bound),
            writes: VecDeque::new(),
            is_ready: false,
            is_late: false,
            takes_all: true, // output from before
            untrimmed_bytes: u64::MAX / 2,
        };
        self.sources.insert(key, source);
        self.make_ready(key, |_| {});
        Some(())
    }

    /// Reads all that was written before.
    fn flush(&mut self, key: u64) -> Result<(), Errno> {
        self.receive_signals();
        for _ in 0..FLUSH_ROUNDS {
            let Some(source) = self.sources.get_mut(&key) else { break };
            source.takes_all = true;
            if !self.serve(key)? {
                break;
            }
        }
        Ok(())
    }

    /// Serves one round of a container. Returns whether there is more.
    fn serve(&mut self, key: u64) -> Result<bool, Errno> {
        let Some(mut source) = self.sources.remove(&key) else { return Ok(false) };
        source.is_ready = false;
        let copied = self.copy(&source)?;
        let has_more = copied.iter().any(|copied| copied.has_more);
        let takes_all = std::mem::take(&mut source.takes_all);
        let (taken, is_left) = arrange(&mut source.writes, copied, takes_all, &self.bytes);
        self.write(key, &mut source, &taken);
        for (stream, end) in source.ends.iter_mut().enumerate() {
            let Some(End { pipe, is_complete }) = end else { continue };
            let of_stream = taken.iter().filter(|(of, _)| usize::from(*of) == stream);
            self.discard(pipe, of_stream.map(|(_, chunk)| chunk.len()).sum());
            if *is_complete && !has_more && !is_left {
                // ORDER: the parked copy would keep it in the set.
                let _ = epoll::delete(&self.epoll, &*pipe);
                self.numbers.remove(&pipe.as_raw_fd());
                *end = None;
            }
        }
        if source.ends.iter().all(Option::is_none) {
            self.files.close(key);
            return self.report(ENDED, key).map(|()| false);
        }
        if source.writes.is_empty() {
            source.writes = VecDeque::new(); // a thousand idle containers have a thousand of them
        }
        if is_left && !std::mem::replace(&mut source.is_late, true) {
            self.late.push_back((Instant::now() + GRACE, key));
        }
        self.sources.insert(key, source);
        if has_more {
            self.make_ready(key, |source| source.takes_all |= takes_all);
        }
        Ok(has_more)
    }

    /// Copies the contents of both pipes to `self.bytes`.
    ///
    /// An error leaves a rest in the pipe for copies, so it ends this reader: the next one has a new pipe.
    fn copy(&mut self, source: &Source) -> Result<[Copied; 2], Errno> {
        let mut at = 0;
        let mut all = [Copied::default(), Copied::default()];
        for (stream, copied) in all.iter_mut().enumerate() {
            let Some(End { pipe, .. }) = &source.ends[stream] else { continue };
            if !source.takes_all && !source.writes.contains(&(stream as u8)) {
                continue;
            }
            let (read, write) = &self.copies;
            let teed = rustix::pipe::tee(pipe, write, ROUND, SpliceFlags::NONBLOCK);
            let count = teed.unwrap_or(0);
            if self.bytes.len() <= at + count {
                self.bytes.resize(at + count + 1, 0); // a read always has room
            }
            // ORDER: until the pipe is empty. A rest would be taken for output of the next container.
            // KERNEL(6.15): before, a write that failed with EFAULT left a packet of no bytes.
            loop {
                match rustix::io::read(read, &mut self.bytes[at..]) {
                    Ok(0) | Err(Errno::INTR) => {}
                    Ok(n) => {
                        copied.chunks.push_back(at..at + n);
                        at += n;
                    }
                    Err(Errno::AGAIN) => break,
                    Err(error) => return Err(error),
                }
            }
            match teed {
                Err(_) => continue,
                // Only empty packets, which no read of bytes removes.
                Ok(0) => self.discard(pipe, 1),
                Ok(_) => {}
            }
            let length = rustix::io::ioctl_fionread(pipe).unwrap_or(0);
            copied.has_more = length > count as u64;
        }
        if self.bytes.len() > 4 * WRITE {
            self.bytes.shrink_to(4 * WRITE);
        }
        Ok(all)
    }

    /// Appends chunks to the log, in their order.
    fn write(&mut self, key: u64, source: &mut Source, taken: &[(u8, Chunk)]) {
        if taken.is_empty() {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let stamp = LogStamp::new(now.as_nanos() as u64);
        let Some(log) = self.files.open(self.root, key, &source.path) else { return };
        let mut is_writable = true;
        for (n, (stream, chunk)) in taken.iter().enumerate() {
            let stream = LogStream::ALL[usize::from(*stream)];
            write_entries(&mut self.entries, stamp, stream, &self.bytes[chunk.clone()]);
            if self.entries.len() >= WRITE || n + 1 == taken.len() {
                is_writable &= append(log, &self.entries);
                source.untrimmed_bytes =
                    source.untrimmed_bytes.saturating_add(self.entries.len() as u64);
                self.entries.clear();
                if source.bound_bytes > 0 && source.untrimmed_bytes >= source.bound_bytes / 8 {
                    source.untrimmed_bytes = 0;
                    let _ = trim_file(log, source.bound_bytes); // and after the next eighth
                }
            }
        }
        self.entries.shrink_to(2 * WRITE);
        if !is_writable {
            self.files.close(key);
        }
    }

    /// Removes bytes that are in the log from a pipe.
    fn discard(&self, pipe: &OwnedFd, mut count: usize) {
        while count > 0 {
            let flags = SpliceFlags::NONBLOCK;
            match rustix::pipe::splice(pipe, None, &self.null, None, count, flags) {
                Ok(0) | Err(Errno::AGAIN) => break, // read by the container itself
                Ok(n) => count -= n,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
    }
}

/// Puts the chunks of both streams into the order of their writes. Returns them with their streams,
/// and whether any is left that waits for its signal.
fn arrange(
    writes: &mut VecDeque<u8>,
    copied: [Copied; 2],
    takes_all: bool,
    bytes: &[u8],
) -> (Vec<(u8, Chunk)>, bool) {
    let mut taken = Vec::new();
    let mut queues = copied;
    // Signals beyond the number of chunks: several writes are in one chunk.
    let mut spare = [0_u8, 1].map(|of| {
        let count = writes.iter().filter(|it| **it == of).count();
        let chunks = queues[usize::from(of)].chunks.len();
        // The last signal for a full pipe is that of a write that still waits.
        let waits = chunks >= PACKETS && writes.back() == Some(&of);
        count.saturating_sub(chunks + usize::from(waits))
    });
    let mut kept = VecDeque::new();
    let is_merged = [0, 1].map(|of: usize| {
        queues[of].chunks.iter().any(|chunk| bytes[chunk.start..chunk.end - 1].contains(&b'\n'))
    });
    let all: Vec<u8> = writes.drain(..).collect();
    for (n, of) in all.iter().copied().enumerate() {
        let Copied { chunks, has_more } = &mut queues[usize::from(of)];
        let Some(mut chunk) = chunks.pop_front() else {
            if *has_more {
                kept.push_back(of);
            }
            continue;
        };
        let line = bytes[chunk.clone()].iter().position(|byte| *byte == b'\n').map(|n| n + 1);
        if let Some(length) = line.filter(|length| *length < chunk.len())
            && spare[usize::from(of)] > 0
        {
            spare[usize::from(of)] -= 1;
            let middle = chunk.start + length;
            chunks.push_front(middle..chunk.end);
            taken.push((of, chunk.start..middle));
            continue;
        }
        // A write that had to wait has a signal of its own before, and the next one is its, too.
        let is_second = !is_merged[usize::from(of)] && all.get(n + 1) == Some(&of);
        if spare[usize::from(of)] > 0 && is_second {
            spare[usize::from(of)] -= 1;
            chunks.push_front(chunk);
            continue;
        }
        // A write of more than a page is several packets with one signal.
        while chunk.len() == PAGE
            && let Some(next) = chunks.pop_front()
        {
            taken.push((of, std::mem::replace(&mut chunk, next)));
        }
        taken.push((of, chunk));
    }
    *writes = kept;
    if takes_all {
        for (of, Copied { chunks, .. }) in (0..).zip(&mut queues) {
            taken.extend(chunks.drain(..).map(|chunk| (of, chunk)));
        }
    }
    let is_left = queues.iter().any(|queue| !queue.chunks.is_empty());
    (taken, is_left)
}

/// Open logs, of which only so many are open.
#[derive(Debug, Default)]
struct Files {
    open: HashMap<u64, OwnedFd>,
    /// Oldest first; a closed one may still be named.
    order: VecDeque<u64>,
}

impl Files {
    /// Returns the log of a container; `None` if it was removed.
    fn open(&mut self, root: BorrowedFd<'_>, key: u64, path: &str) -> Option<&OwnedFd> {
        if !self.open.contains_key(&key) {
            while self.open.len() >= FILES {
                let oldest = self.order.pop_front()?;
                self.open.remove(&oldest);
            }
            let flags = OFlags::RDWR | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            let flags = flags | OFlags::CLOEXEC;
            let log = rustix::fs::openat2(root, path, flags, Mode::empty(), how).ok()?;
            let _ = mend(&log); // otherwise a part of an entry is shown as a line
            self.order.push_back(key);
            self.open.insert(key, log);
        }
        self.open.get(&key)
    }

    fn close(&mut self, key: u64) {
        if self.open.remove(&key).is_some() {
            self.order.retain(|it| *it != key);
        }
    }
}

/// Removes a part of an entry at the end, of a reader that was killed while it wrote. The output is
/// still in its pipe.
fn mend(log: &OwnedFd) -> Result<(), Errno> {
    let size = rustix::fs::fstat(log)?.st_size as u64;
    let mut end = [0; 2 * PAGE];
    let at = size.saturating_sub(end.len() as u64);
    let length = rustix::io::pread(log, &mut end, at)?;
    match end[..length].iter().rposition(|byte| *byte == b'\n') {
        Some(newline) if newline + 1 < length => {
            rustix::fs::ftruncate(log, at + newline as u64 + 1)
        }
        _ => Ok(()),
    }
}

/// Appends to a log. Returns false if that fails.
fn append(log: &OwnedFd, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match rustix::io::write(log, bytes) {
            Ok(n) if n > 0 => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chunks of both streams, each as a text.
    fn arranged(
        writes: &[u8],
        out: &[&str],
        err: &[&str],
        takes_all: bool,
    ) -> (Vec<(u8, String)>, bool) {
        let mut bytes = Vec::new();
        let copied = [out, err].map(|texts| {
            let chunks = texts.iter().map(|text| {
                bytes.extend_from_slice(text.as_bytes());
                bytes.len() - text.len()..bytes.len()
            });
            Copied { chunks: chunks.collect(), has_more: false }
        });
        let mut writes = writes.iter().copied().collect();
        let (taken, is_left) = arrange(&mut writes, copied, takes_all, &bytes);
        assert!(writes.is_empty());
        let text = |chunk: Chunk| String::from_utf8(bytes[chunk].to_vec()).unwrap();
        (taken.into_iter().map(|(of, chunk)| (of, text(chunk))).collect(), is_left)
    }

    fn texts(all: &[(u8, &str)]) -> Vec<(u8, String)> {
        all.iter().map(|(of, text)| (*of, (*text).to_owned())).collect()
    }

    #[test]
    fn packets_follow_the_order_of_their_signals() {
        let (taken, is_left) = arranged(&[0, 1, 0, 1], &["a\n", "c\n"], &["b\n", "d\n"], false);
        assert_eq!(taken, texts(&[(0, "a\n"), (1, "b\n"), (0, "c\n"), (1, "d\n")]));
        assert!(!is_left);
        // One signal too many, and one that has not come yet.
        let (taken, is_left) = arranged(&[1, 1, 0], &["a\n", "c\n"], &["b\n"], false);
        assert_eq!((taken, is_left), (texts(&[(1, "b\n"), (0, "a\n")]), true));
        let (taken, is_left) = arranged(&[1, 0], &["a\n", "c\n"], &["b\n"], true);
        assert_eq!((taken, is_left), (texts(&[(1, "b\n"), (0, "a\n"), (0, "c\n")]), false));
    }

    #[test]
    fn write_that_had_to_wait_has_two_signals() {
        let (taken, is_left) = arranged(&[0, 0, 1, 0], &["a\n", "c\n"], &["b\n"], false);
        assert_eq!((taken, is_left), (texts(&[(0, "a\n"), (1, "b\n"), (0, "c\n")]), false));
    }

    #[test]
    fn large_write_has_one_signal_for_all_its_packets() {
        let page = "x".repeat(PAGE);
        let out = [&*page, &*page, "end\n", "more\n"];
        let (taken, is_left) = arranged(&[0, 1, 0], &out, &["b\n"], false);
        let expected = [(0, out[0]), (0, out[1]), (0, out[2]), (1, "b\n"), (0, out[3])];
        assert_eq!((taken, is_left), (texts(&expected), false));
    }

    #[test]
    fn chunk_of_several_writes_is_divided_at_its_lines() {
        let (taken, _) = arranged(&[0, 1, 0], &["a\nc\n"], &["b\n"], false);
        assert_eq!(taken, texts(&[(0, "a\n"), (1, "b\n"), (0, "c\n")]));
        let (taken, _) = arranged(&[0, 1], &["a\nc\n"], &["b\n"], false);
        assert_eq!(taken, texts(&[(0, "a\nc\n"), (1, "b\n")]), "one write of two lines");
    }

    /// A container's end of a pipe, and the read end.
    fn pipe() -> (OwnedFd, OwnedFd) {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let path = format!("/proc/self/fd/{}", write.as_raw_fd());
        let both = rustix::fs::open(path, flags, Mode::empty()).unwrap();
        rustix::fs::fcntl_setfl(&both, OFlags::DIRECT).unwrap();
        (both, read)
    }

    struct Fixture {
        dir: tempfile::TempDir,
        keeper: OwnedFd,
        root: OwnedFd,
    }

    impl Fixture {
        fn new() -> (Self, OwnedFd) {
            let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
            let pair = socketpair(AddressFamily::UNIX, kind, flags, None);
            let (keeper, own) = pair.unwrap();
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            let root = rustix::fs::open("/", flags, Mode::empty()).unwrap();
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("log"), "").unwrap();
            (Self { dir, keeper, root }, own)
        }

        fn reader(&self, own: OwnedFd) -> Reader<'_> {
            let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
            Reader::new(own, self.root.as_fd(), null.into()).unwrap()
        }

        fn add(&self, key: u64, bound: u64, ends: &[&OwnedFd]) {
            let path = self.dir.path().join("log");
            let ends: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
            let streams = if ends.len() == 2 { 3 } else { 1 };
            send_add(&self.keeper, key, (streams, bound, path.to_str().unwrap()), &ends).unwrap();
        }

        fn log(&self) -> String {
            std::fs::read_to_string(self.dir.path().join("log")).unwrap()
        }
    }

    #[test]
    fn flushed_log_has_all_output_and_the_pipes_are_empty() {
        let (fixture, own) = Fixture::new();
        let mut reader = fixture.reader(own);
        let ((out, out_read), (err, err_read)) = (pipe(), pipe());
        rustix::io::write(&out, b"before\n").unwrap();
        fixture.add(7, 0, &[&out_read, &err_read]);
        reader.receive_messages().unwrap();
        for n in 0..5 {
            rustix::io::write(&err, format!("error {n}\n").as_bytes()).unwrap();
            rustix::io::write(&out, format!("output {n}\n").as_bytes()).unwrap();
        }
        rustix::io::write(&out, b"rest").unwrap();
        send_flush(&fixture.keeper, 7, 99).unwrap();
        reader.receive_messages().unwrap();
        assert_eq!(receive(&fixture.keeper), Ok(Report::Flushed(99)));
        let log = fixture.log();
        let texts: Vec<&str> = log.lines().map(|line| line.split_at(31).1).collect();
        assert!(texts.contains(&"stdout F before") && texts.contains(&"stdout P rest"), "{log}");
        assert_eq!(texts.len(), 12);
        assert_eq!(rustix::io::ioctl_fionread(&out_read), Ok(0));
        // The end: no process has a pipe open for writing.
        drop((out, err));
        reader.completed(7, 0);
        reader.completed(7, 1);
        reader.serve(7).unwrap();
        assert_eq!(receive(&fixture.keeper), Ok(Report::Ended(7)));
        assert!(reader.sources.is_empty() && reader.numbers.is_empty());
    }

    #[test]
    fn part_of_an_entry_at_the_end_is_removed() {
        let (fixture, own) = Fixture::new();
        let whole = "2026-11-26T20:53:06.123456789Z stdout F one\n";
        std::fs::write(fixture.dir.path().join("log"), format!("{whole}2026-11-26T20")).unwrap();
        let mut reader = fixture.reader(own);
        let (out, out_read) = pipe();
        fixture.add(1, 0, &[&out_read]);
        reader.receive_messages().unwrap();
        rustix::io::write(&out, b"two\n").unwrap();
        reader.flush(1).unwrap();
        let log = fixture.log();
        let entries = log.lines().map(|line| dormouse_model::LogEntry::read(line.as_bytes()));
        let texts: Vec<_> = entries.map(|entry| entry.unwrap().text).collect();
        assert_eq!(texts, [b"one", b"two"]);
    }

    #[test]
    fn log_stays_under_its_bound_while_it_is_written() {
        let (fixture, own) = Fixture::new();
        let mut reader = fixture.reader(own);
        let (out, out_read) = pipe();
        fixture.add(1, 256 << 10, &[&out_read]);
        reader.receive_messages().unwrap();
        for _ in 0..300 {
            rustix::io::write(&out, &[b'\n'; 512]).unwrap();
            reader.flush(1).unwrap();
            use std::os::unix::fs::MetadataExt;
            let log = std::fs::metadata(fixture.dir.path().join("log")).unwrap();
            assert!(log.blocks() * 512 <= 320 << 10, "{} blocks", log.blocks());
        }
        assert!(fixture.log().len() > 4 << 20);
    }
}
