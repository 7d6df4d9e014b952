//! Events that wake a container that is about to be frozen: nothing is saved, and all processes
//! live on.
//!
//! A frozen container may therefore have state that no checkpoint holds: a process in a debugger,
//! an io_uring, a child of `exec`. All threads are stopped for a moment to detect whether one was
//! active. An inactive thread has not run since the first thread was stopped, and its registers
//! show an interrupted, blocking call. The result is copies of the descriptors through which an
//! event may come from outside, the events to watch for on each, and the time of the first timer or
//! timeout.
//!
//! **Stale readiness.** A descriptor that is readable while the container is idle is of no interest
//! to the container: a connection whose peer has hung up, a timerfd that is never read. Such
//! descriptors are found before any thread is stopped, since their readiness does not change. Only
//! later events wake the container.
//!
//! LIMIT: a file that is only registered with an io_uring, or is in flight (SCM_RIGHTS), is not
//! found. Asynchronous I/O (io_setup(2)) that a disk finishes after the stop wakes nothing: its event waits, too.
//! A signal from outside the container waits until the container is woken.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use dormouse_kernel::{Errno, call, pidfd};
use dormouse_record::{Cause, Error, Result};
use rustix::event::{PollFlags, epoll};
use rustix::fs::{FileType, OFlags};
use rustix::net::{SocketType, sockopt};

use super::due;
use super::held::{HeldFile, Wakes};
use super::restart::waits_by;
use super::seen::Seen;
use super::stop::{Seized, stop_group};
use super::timer::next_timer_ns;
use super::tree::look_at_all;
use super::wait::{Blocks, prepare_resume, waits_ns};
use crate::look::descriptor::{numbers, ready};

/// A container with all threads stopped. The drop resumes them, unless they are frozen by then.
#[derive(Debug)]
pub struct Still {
    processes: Vec<Seen>,
    /// Files that were ready before and that no thread waited for.
    stale: HashSet<Key>,
    blocks: Blocks,
    seized: Seized,
}

/// Events that may wake the container.
#[derive(Debug)]
pub struct Calls {
    /// Descriptors to be watched, numbered.
    pub held: Vec<HeldFile>,
    /// One of the descriptors is ready: an event has arrived already.
    pub is_called: bool,
    /// At least one thread was active.
    pub is_busy: bool,
    /// How long until the first timer expires or the first call times out. Timerfds are among the
    /// descriptors.
    pub next_ring: Option<Duration>,
    /// How long until the first timerfd expires.
    pub next_timerfd: Option<Duration>,
}

/// Identifies an open file well enough: its kind; device and inode, or process and number; its
/// access mode.
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
    /// Any other file without a name.
    Other,
}

impl Kind {
    /// Readable once something has happened, and until the event has been read.
    fn is_event(self) -> bool {
        matches!(self, Self::Timer | Self::Watch | Self::Other)
    }
}

/// An open file through which an event may come from outside.
struct Source {
    key: Key,
    copy: OwnedFd,
    flags: OFlags,
    ready: PollFlags,
}

/// Anonymous files that report events from outside. An eventfd does not. An eventfd may also stay
/// readable for ever when a program uses it for notification by epoll only.
const ANONYMOUS: [(&str, Kind); 6] = [
    ("anon_inode:[timerfd]", Kind::Timer),
    ("anon_inode:inotify", Kind::Watch),
    ("anon_inode:[fanotify]", Kind::Watch),
    ("anon_inode:[io_uring]", Kind::Other),
    ("anon_inode:[userfaultfd]", Kind::Other),
    ("anon_inode:[kvm-vcpu]", Kind::Other),
];

/// Character devices that report events: terminals; tun, fuse and others of the misc driver.
fn reports_events(device: u64) -> bool {
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
        FileType::CharacterDevice if reports_events(stat.st_rdev) => Some(Kind::Device),
        _ => None,
    }
}

/// The sources of a process, and of its threads with descriptors of their own.
fn sources(seen: &Seen) -> Result<Vec<Source>> {
    let Some(handle) = &seen.pidfd else { return Ok(Vec::new()) };
    let mut all = sources_of(seen.pid, handle)?;
    for tid in &seen.tids {
        if let Some(handle) = seen.own_table(*tid) {
            all.extend(sources_of(*tid, &handle)?);
        }
    }
    Ok(all)
}

/// The sources of a table of descriptors, by the task that has it and a pidfd of that. A descriptor that is closed
/// meanwhile is left out.
fn sources_of(task: u32, handle: &OwnedFd) -> Result<Vec<Source>> {
    let mut all = Vec::new();
    for number in numbers(task)? {
        let path = format!("/proc/{task}/fd/{number}");
        let Ok(link) = fs::read_link(&path) else { continue };
        let Some(kind) = kind_of(&link.to_string_lossy(), &path) else { continue };
        let copy = match pidfd::copy_descriptor(handle, number as i32) {
            Ok(copy) => copy,
            Err(e) if matches!(e.errno(), libc::EBADF | libc::ESRCH) => continue,
            Err(e) => {
                let step = "copy a descriptor";
                return Err(Error::of(step, task)(Errno::from_raw_os_error(e.errno())));
            }
        };
        if (kind == Kind::Device || kind.is_event()) && !is_pollable(&copy) {
            continue;
        }
        let failed = Error::of("inspect a descriptor", task);
        let flags = rustix::fs::fcntl_getfl(&copy).and_then(|flags| {
            let stat = rustix::fs::fstat(&copy)?;
            let access = (flags & OFlags::RWMODE).bits();
            let key = match kind {
                // All terminal masters have the same inode, `/dev/ptmx`.
                Kind::Timer | Kind::Watch | Kind::Other | Kind::Device => {
                    (kind, u64::from(task), u64::from(number), access)
                }
                Kind::Socket | Kind::Pipe => (kind, stat.st_dev, stat.st_ino, access),
            };
            Ok((flags, key))
        });
        let (flags, key) = flags.map_err(failed)?;
        let ready = ready(&copy).map_err(Error::of("poll a descriptor", task))?;
        all.push(Source { key, copy, flags, ready });
    }
    Ok(all)
}

/// Whether epoll(7) accepts the file; most devices do not support it.
fn is_pollable(file: &OwnedFd) -> bool {
    let added = epoll::create(epoll::CreateFlags::CLOEXEC).and_then(|set| {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, file, data, epoll::EventFlags::IN)
    });
    added != Err(Errno::PERM)
}

/// Whether the file reports no new event: its peer has hung up, or its event is pending already.
fn is_over(key: Key, ready: PollFlags) -> bool {
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::RDHUP;
    ready.intersects(gone) || key.0.is_event() && ready.contains(PollFlags::IN)
}

/// Stops all threads of the processes that `pids` returns. `pids` is called until it returns no new
/// one.
///
/// Errors: [`Error::Refused`] names a process that is blocked on disk I/O; all processes resume.
pub fn stand_still(mut pids: impl FnMut() -> Vec<u32>) -> Result<Still> {
    let before = look_at_all(pids())?;
    let mut stale = HashSet::new();
    for seen in &before {
        let over = sources(seen)?.into_iter().filter(|source| is_over(source.key, source.ready));
        stale.extend(over.map(|source| source.key));
    }
    // ORDER: slow steps that can be done before the stop are done here.
    let blocks = Blocks::for_waiting(&before);
    let (processes, seized) = stop_group(pids, &blocks)?;
    Ok(Still { processes, stale, blocks, seized })
}

impl Still {
    /// Determines the events that may wake the container.
    pub fn read(&mut self) -> Result<Calls> {
        let mut is_busy = self.seized.have_worked;
        let mut next_ns = None;
        let mut waiting = Vec::new();
        let mut sooner = |ns: Option<u64>| next_ns = next_ns.into_iter().chain(ns).min();
        for seen in &self.processes {
            is_busy |= seen.stopped.is_none() && seen.has_run;
            for tid in &seen.tids {
                // A thread that exits meanwhile waits for nothing.
                let failed = Error::of("read the registers", *tid);
                let Some(registers) = gone(prepare_resume(seen, *tid)).map_err(failed)? else {
                    continue;
                };
                is_busy |= seen.stopped.is_none() && !waits_by(&registers);
                if seen.stopped.is_none() {
                    waiting.push((seen, *tid, registers));
                }
                let failed = Error::of("read the time of a call", *tid);
                sooner(gone(waits_ns(seen, *tid, &self.blocks)).map_err(failed)?.flatten());
            }
            let is_own = seen.tids.contains(&seen.pid) && is_64_bit(seen.pid);
            if is_own {
                let failed = Error::of("read the timers", seen.pid);
                sooner(gone(next_timer_ns(seen)).map_err(failed)?.flatten());
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
                // A thread may be waiting for space to write.
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
        let is_due =
            |(seen, tid, registers): &(&Seen, u32, _)| due::due(seen, *tid, registers).is_some();
        calls.is_busy |= waiting.iter().any(is_due);
        Ok(calls)
    }
}

/// How long until a timerfd becomes readable, if ever.
fn rings(source: &Source) -> Option<Duration> {
    let left = rustix::time::timerfd_gettime(&source.copy).ok()?.it_value;
    let left = Duration::new(left.tv_sec.try_into().ok()?, left.tv_nsec.try_into().ok()?);
    match source.ready.contains(PollFlags::IN) {
        true => Some(Duration::ZERO), // it has expired and was not read yet
        false => (left > Duration::ZERO).then_some(left),
    }
}

/// The cause to record when a source becomes ready.
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

/// Whether a socket has unsent data: a sender may be blocked although there is space in the send
/// buffer.
fn is_sending(source: &Source) -> bool {
    let queue = || call::send_queue(source.copy.as_fd()); // fails for a socket that is not TCP
    source.key.0 == Kind::Socket && queue().is_ok_and(|(_, unsent)| unsent > 0)
}

/// Maps the error of a thread that has exited to `None`.
fn gone<T>(answer: std::result::Result<T, Errno>) -> std::result::Result<Option<T>, Errno> {
    match answer {
        Err(Errno::SRCH) => Ok(None),
        other => other.map(Some),
    }
}

/// Whether the thread runs 64-bit code: only there are calls injected.
fn is_64_bit(tid: u32) -> bool {
    call::registers(tid).is_ok_and(|registers| registers.are_of_64_bit())
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn sources_of_outside_events_are_classified_by_link() {
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
    fn a_closed_peer_is_over_and_a_sending_peer_is_not() {
        let socket = (Kind::Socket, 1, 2, 2);
        assert!(is_over(socket, PollFlags::IN | PollFlags::RDHUP));
        assert!(is_over(socket, PollFlags::HUP));
        assert!(!is_over(socket, PollFlags::IN | PollFlags::OUT));
        assert!(is_over((Kind::Timer, 1, 2, 0), PollFlags::IN), "a timer that is never read");
    }

    #[test]
    fn readiness_is_polled_without_blocking() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(!ready(&event).unwrap().contains(PollFlags::IN));
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        assert!(ready(&event).unwrap().contains(PollFlags::IN));
    }
}
