//! What a container that is about to be frozen waits for: nothing is saved, everything stays alive.
//!
//! So it works for what no checkpoint holds, too: a process in a debugger, an io_uring, a child of
//! `exec`. All threads are stopped for a moment, by which is known whether one was at work: its call
//! would have come to its end, and the registers say that it waits instead, and it has not run since the
//! first of them was stopped. Then there are copies of
//! the descriptors through which something may come from outside, what of it each is watched for, and
//! the time at which the first timer rings or the first wait is over.
//!
//! **What was there before.** A descriptor that its container could read from, and left alone though
//! nobody in it was at work, is of no interest to it. It is looked for before anything is stopped: what
//! is ready then and waits for nobody stays so: a connection whose peer has hung up, a timer that
//! nobody reads. Only what comes later calls.
//!
//! LIMIT: what is only in a table of an io_uring, or has been sent and not received (SCM_RIGHTS), is
//! not found; a signal from outside the container waits until it is woken.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use dormouse_kernel::{Errno, call, pidfd};
use rustix::event::{PollFlags, epoll};
use rustix::fs::{FileType, OFlags};
use rustix::net::{SocketType, sockopt};

use super::tcp::ready;
use super::thread::Blocks;
use super::tree::{self, Seen};
use super::{HeldFile, Wakes, due, object, process, thread};
use crate::error::{Error, Result};
use crate::format::Cause;

/// A container whose threads stand still. They go on when it is dropped, or are frozen by then.
#[derive(Debug)]
pub struct Still {
    processes: Vec<Seen>,
    /// What was ready before, and nobody wanted to know.
    stale: HashSet<Key>,
    blocks: Blocks,
    held: tree::Held,
}

/// What may wake it.
#[derive(Debug)]
pub struct Calls {
    /// Descriptors to be watched, numbered.
    pub held: Vec<HeldFile>,
    /// One of them is ready: somebody has called already.
    pub is_called: bool,
    /// Some thread was at work.
    pub is_busy: bool,
    /// How long until the first timer rings or the first wait is over. What a timerfd tells is among
    /// the descriptors.
    pub next_ring: Option<Duration>,
    /// The same of those.
    pub next_timerfd: Option<Duration>,
}

/// What names an open file well enough: its kind; device and inode, or process and number; how it was
/// opened.
type Key = (Kind, u64, u64, u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Socket,
    Pipe,
    Device,
    /// timerfd_create(2).
    Timer,
    /// inotify(7), fanotify(7).
    Watch,
    /// What else has no name.
    Other,
}

impl Kind {
    /// What is readable when something has happened, and until somebody has read that.
    fn is_event(self) -> bool {
        matches!(self, Self::Timer | Self::Watch | Self::Other)
    }
}

/// An open file through which something may come.
struct Source {
    key: Key,
    copy: OwnedFd,
    flags: OFlags,
    ready: PollFlags,
}

/// Anonymous files that tell of something from outside. An eventfd does not, but stays readable all the
/// time where somebody only wants to be told by epoll.
const ANONYMOUS: [(&str, Kind); 6] = [
    ("anon_inode:[timerfd]", Kind::Timer),
    ("anon_inode:inotify", Kind::Watch),
    ("anon_inode:[fanotify]", Kind::Watch),
    ("anon_inode:[io_uring]", Kind::Other),
    ("anon_inode:[userfaultfd]", Kind::Other),
    ("anon_inode:[kvm-vcpu]", Kind::Other),
];

/// Character devices that tell of something: terminals; tun, fuse and others of the misc driver.
fn tells(device: u64) -> bool {
    matches!(rustix::fs::major(device), 4 | 5 | 10 | 136..=143)
}

fn kind_of(link: &str, path: &str) -> Option<Kind> {
    if link.starts_with("socket:[") {
        return Some(Kind::Socket);
    }
    if link.starts_with("pipe:[") {
        return Some(Kind::Pipe);
    }
    if link.starts_with("anon_inode:") {
        return ANONYMOUS.iter().find(|(name, _)| *name == link).map(|(_, kind)| *kind);
    }
    let stat = rustix::fs::stat(path).ok()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Fifo => Some(Kind::Pipe),
        FileType::CharacterDevice if tells(stat.st_rdev) => Some(Kind::Device),
        _ => None,
    }
}

/// The sources of a process. What it closes meanwhile is none.
fn sources(seen: &Seen) -> Result<Vec<Source>> {
    let Some(handle) = &seen.pidfd else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    for number in object::numbers(seen)? {
        let path = format!("/proc/{}/fd/{number}", seen.pid);
        let Ok(link) = fs::read_link(&path) else { continue };
        let Some(kind) = kind_of(&link.to_string_lossy(), &path) else { continue };
        let copy = match pidfd::copy_descriptor(handle, number as i32) {
            Ok(copy) => copy,
            Err(e) if matches!(e.errno(), libc::EBADF | libc::ESRCH) => continue,
            Err(e) => {
                let step = "copy a descriptor";
                return Err(Error::of(step, seen.pid)(Errno::from_raw_os_error(e.errno())));
            }
        };
        if (kind == Kind::Device || kind.is_event()) && !is_told_of(&copy) {
            continue;
        }
        let failed = Error::of("look at a descriptor", seen.pid);
        let flags = rustix::fs::fcntl_getfl(&copy).and_then(|flags| {
            let stat = rustix::fs::fstat(&copy)?;
            let access = (flags & OFlags::RWMODE).bits();
            let key = match kind {
                // All masters of terminals have the same number.
                Kind::Timer | Kind::Watch | Kind::Other | Kind::Device => {
                    (kind, u64::from(seen.pid), u64::from(number), access)
                }
                Kind::Socket | Kind::Pipe => (kind, stat.st_dev, stat.st_ino, access),
            };
            Ok((flags, key))
        });
        let (flags, key) = flags.map_err(failed)?;
        let ready = ready(&copy).map_err(Error::of("poll a descriptor", seen.pid))?;
        all.push(Source { key, copy, flags, ready });
    }
    Ok(all)
}

/// Whether epoll(7) tells of it; of most devices there is nothing to tell.
fn is_told_of(file: &OwnedFd) -> bool {
    let added = epoll::create(epoll::CreateFlags::CLOEXEC).and_then(|set| {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, file, data, epoll::EventFlags::IN)
    });
    added != Err(Errno::PERM)
}

/// Whether nothing more comes through it that would be told anew: its other side is gone, or it rang.
fn is_over(key: Key, ready: PollFlags) -> bool {
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP;
    ready.intersects(gone) || key.0.is_event() && ready.contains(PollFlags::IN)
}

/// Stops all threads of the processes that `pids` names, which is asked until it names no new one.
///
/// Errors: [`Error::Refused`] names a process that waits for a disk; all goes on.
pub fn stand_still(mut pids: impl FnMut() -> Vec<u32>) -> Result<Still> {
    let before = tree::look_at_all(pids())?;
    let mut stale = HashSet::new();
    for seen in &before {
        let over = sources(seen)?.into_iter().filter(|source| is_over(source.key, source.ready));
        stale.extend(over.map(|source| source.key));
    }
    // ORDER: what takes long and can be done beforehand is.
    let blocks = Blocks::for_waiting(&before);
    let (processes, held) = tree::stop_group(pids, &blocks)?;
    Ok(Still { processes, stale, blocks, held })
}

impl Still {
    /// Finds out what may wake it.
    pub fn read(&mut self) -> Result<Calls> {
        let mut is_busy = self.held.have_worked;
        let mut next_ns = None;
        let mut waiting = Vec::new();
        let mut sooner = |ns: Option<u64>| next_ns = next_ns.into_iter().chain(ns).min();
        for seen in &self.processes {
            is_busy |= seen.stopped.is_none() && seen.has_run;
            for tid in &seen.tids {
                // One that ends meanwhile waits for nothing.
                let failed = Error::of("read the registers", *tid);
                let Some(registers) = gone(thread::go_on(seen, *tid)).map_err(failed)? else {
                    continue;
                };
                is_busy |= seen.stopped.is_none() && !thread::waits_by(&registers);
                if seen.stopped.is_none() {
                    waiting.push((seen, *tid, registers));
                }
                let failed = Error::of("read the time of a call", *tid);
                sooner(gone(thread::waits_ns(seen, *tid, &self.blocks)).map_err(failed)?.flatten());
            }
            let is_own = seen.tids.contains(&seen.pid) && is_64_bit(seen.pid);
            if is_own {
                let failed = Error::of("ask for the timers", seen.pid);
                sooner(gone(process::next_timer_ns(seen)).map_err(failed)?.flatten());
            }
        }
        let mut found = HashMap::new();
        for seen in &self.processes {
            for source in sources(seen)? {
                found.entry(source.key).or_insert(source);
            }
        }
        let mut calls = Calls {
            held: Vec::new(),
            is_called: false,
            is_busy,
            next_ring: next_ns.map(Duration::from_nanos),
            next_timerfd: None,
        };
        for source in found.into_values() {
            let is_stale = !is_busy && self.stale.contains(&source.key);
            if is_stale && is_over(source.key, source.ready) {
                continue;
            }
            let access = source.flags & OFlags::RWMODE;
            let wakes = Wakes {
                readable: access != OFlags::WRONLY,
                // Somebody may be waiting for room.
                writable: access != OFlags::RDONLY
                    && !source.key.0.is_event()
                    && (!source.ready.contains(PollFlags::OUT) || is_sending(&source)),
            };
            let over = PollFlags::HUP | PollFlags::ERR;
            calls.is_called |= wakes.readable && source.ready.contains(PollFlags::IN)
                || source.ready.intersects(over);
            if source.key.0 == Kind::Timer {
                calls.next_timerfd = calls.next_timerfd.into_iter().chain(rings(&source)).min();
            }
            if wakes != Wakes::default() {
                let object = calls.held.len() as u32;
                let cause = cause(&source);
                calls.held.push(HeldFile { object, file: source.copy, wakes, cause });
            }
        }
        let is_due = |(seen, tid, registers): &(&Seen, u32, _)| due::is_due(seen, *tid, registers);
        calls.is_busy |= waiting.iter().any(is_due);
        Ok(calls)
    }
}

/// How long until a timerfd tells something, if it ever does.
fn rings(source: &Source) -> Option<Duration> {
    let left = rustix::time::timerfd_gettime(&source.copy).ok()?.it_value;
    let left = Duration::new(left.tv_sec.try_into().ok()?, left.tv_nsec.try_into().ok()?);
    match source.ready.contains(PollFlags::IN) {
        true => Some(Duration::ZERO), // nobody has read yet that it rang
        false => (left > Duration::ZERO).then_some(left),
    }
}

/// What it is that a source tells.
fn cause(source: &Source) -> Cause {
    match source.key.0 {
        Kind::Socket => {
            let is_stream =
                sockopt::socket_type(&source.copy).is_ok_and(|it| it != SocketType::DGRAM);
            let listens = sockopt::socket_acceptconn(&source.copy).is_ok_and(|listens| listens);
            if is_stream && !listens { Cause::Data } else { Cause::Call }
        }
        Kind::Pipe => Cause::Data,
        Kind::Timer => Cause::Timer,
        Kind::Watch => Cause::File,
        Kind::Device | Kind::Other => Cause::Other,
    }
}

/// Whether a socket has more than its peer takes: whoever sends may be waiting though there is room.
fn is_sending(source: &Source) -> bool {
    let queue = || call::send_queue(source.copy.as_fd()); // what is no TCP socket has none
    source.key.0 == Kind::Socket && queue().is_ok_and(|(_, unsent)| unsent > 0)
}

/// What has ended has no answer.
fn gone<T>(answer: std::result::Result<T, Errno>) -> std::result::Result<Option<T>, Errno> {
    match answer {
        Err(Errno::SRCH) => Ok(None),
        other => other.map(Some),
    }
}

/// Calls are made in 64-bit code only.
fn is_64_bit(tid: u32) -> bool {
    call::registers(tid).is_ok_and(|registers| registers.are_of_64_bit())
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn what_may_bring_something_from_outside_is_known_by_its_name() {
        let kind = |link: &str| kind_of(link, "/proc/self/none");
        assert_eq!(kind("socket:[77]"), Some(Kind::Socket));
        assert_eq!(kind("pipe:[77]"), Some(Kind::Pipe));
        assert_eq!(kind("anon_inode:[timerfd]"), Some(Kind::Timer));
        assert_eq!(kind("anon_inode:inotify"), Some(Kind::Watch));
        for none in ["anon_inode:[eventfd]", "anon_inode:[eventpoll]", "/etc/passwd"] {
            assert_eq!(kind(none), None, "{none}");
        }
        assert_eq!(kind_of("/dev/null", "/dev/null"), None);
        assert_eq!(kind_of("/dev/tty", "/dev/tty"), Some(Kind::Device));
    }

    #[test]
    fn a_peer_that_is_gone_says_nothing_more_and_one_that_speaks_does() {
        let socket = (Kind::Socket, 1, 2, 2);
        assert!(is_over(socket, PollFlags::IN | PollFlags::RDHUP));
        assert!(is_over(socket, PollFlags::HUP));
        assert!(!is_over(socket, PollFlags::IN | PollFlags::OUT));
        assert!(is_over((Kind::Timer, 1, 2, 0), PollFlags::IN), "a timer that nobody reads");
    }

    #[test]
    fn what_is_ready_is_told_without_waiting() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(!ready(&event).unwrap().contains(PollFlags::IN));
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        assert!(ready(&event).unwrap().contains(PollFlags::IN));
    }
}
