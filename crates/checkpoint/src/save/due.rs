//! Calls that a stopped thread is blocked in, and that would return now.
//!
//! Events that arrive after the stop do not wake the stopped threads. Most events show at the file
//! that they came to, and wake the container. Space in a send buffer does not: most files have
//! space at any time, and no thread waits for it. Neither does the end of a connection, since ended
//! connections may stay unread for ever. Each blocked thread is therefore tested with the condition
//! of its own system call: would the call return now?
//!
//! ORDER: after the events that wake the container have been determined. Later events are noticed
//! by polling; events since the stop, and before, by this test.
//!
//! LIMIT: splice(2), which may wait for bytes as well as for space; io_uring; 32-bit code; a
//! signalfd(2), which reports the signals of the calling process.

use std::os::fd::OwnedFd;

use dormouse_kernel::call::{self, Registers};
use dormouse_kernel::pidfd;
use dormouse_record::EpollItem;
use rustix::event::PollFlags;

use super::seen::Seen;
use crate::look::aio::Header;
use crate::look::descriptor::{epoll_item, ready};

/// LIMIT: only the first entries of a poll(2) or select(2) are tested.
const FILES_MAX: u64 = 1024;
/// EP_MAX_NESTS: an epoll watches others that deep.
const NESTED_MAX: u32 = 4;

/// The reason why a blocked call would return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    /// Only a timerfd has expired.
    Timer,
    Event,
}

/// Returns whether the call that a stopped thread is blocked in would return on resume, by its descriptors.
pub(super) fn due(seen: &Seen, tid: u32, registers: &Registers) -> Option<Due> {
    let Registers { rdi, rsi, rdx, .. } = *registers;
    if !registers.are_of_64_bit() {
        return None;
    }
    let own_table = seen.own_table(tid);
    let table = Table { tid, task: own_table.as_ref().or(seen.pidfd.as_ref()) };
    let is_ready = |number, wanted| table.ready(number, wanted, NESTED_MAX);
    let is_any = |files: Vec<(u64, PollFlags)>| {
        files.into_iter().filter_map(|(number, wanted)| is_ready(number, wanted)).max()
    };
    match called(seen, tid, registers.orig_rax as i64) {
        libc::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg
        | libc::SYS_accept
        | libc::SYS_accept4 => is_ready(rdi, PollFlags::IN),
        libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg
        | libc::SYS_sendfile => is_ready(rdi, PollFlags::OUT),
        libc::SYS_io_getevents => {
            let header = Header::read(seen.pid, rdi)?;
            (u64::from(header.uncollected()) >= rsi.max(1)).then_some(Due::Event)
        }
        libc::SYS_poll | libc::SYS_ppoll => is_any(polled(seen, rdi, rsi)),
        libc::SYS_select | libc::SYS_pselect6 => is_any(selected(seen, rdi, rsi, PollFlags::IN))
            .max(is_any(selected(seen, rdi, rdx, PollFlags::OUT))),
        _ => None,
    }
}

/// The number of the call; for restart_syscall(2), the number of the original call.
fn called(seen: &Seen, tid: u32, number: i64) -> i64 {
    let waited_in = seen.waited_in.get(&tid).map_or("", String::as_str);
    match number {
        libc::SYS_restart_syscall if waited_in.contains("poll") => libc::SYS_poll,
        other => other,
    }
}

/// The descriptors of a task.
struct Table<'a> {
    tid: u32,
    /// Its pidfd.
    task: Option<&'a OwnedFd>,
}

impl Table<'_> {
    /// Returns whether a descriptor has one of the wanted events, an error or a hangup.
    fn ready(&self, number: u64, wanted: PollFlags, nested_max: u32) -> Option<Due> {
        let copy = pidfd::copy_descriptor(self.task?, i32::try_from(number).ok()?).ok()?;
        let found = ready(&copy).ok()?;
        if !found.intersects(wanted | PollFlags::ERR | PollFlags::HUP) {
            return None;
        }
        let link = std::fs::read_link(format!("/proc/{}/fd/{number}", self.tid));
        let link = link.unwrap_or_default();
        match link.to_str() {
            Some("anon_inode:[timerfd]") => Some(Due::Timer),
            Some("anon_inode:[eventpoll]") => Some(self.watched(number, nested_max)),
            _ => Some(Due::Event),
        }
    }

    /// The reason why an epoll is ready. One that is not found, such as an item whose number is another file
    /// now, is an event.
    fn watched(&self, epoll: u64, nested_max: u32) -> Due {
        let Some(nested_max) = nested_max.checked_sub(1) else { return Due::Event };
        let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/{epoll}", self.tid));
        let info = info.unwrap_or_default();
        let items = info.lines().filter(|line| line.starts_with("tfd:")).filter_map(epoll_item);
        let of = |item: EpollItem| {
            let wanted = PollFlags::from_bits_truncate(item.events as u16);
            // A disarmed item reports nothing.
            (!wanted.is_empty()).then(|| self.ready(item.number.into(), wanted, nested_max))?
        };
        items.filter_map(of).max().unwrap_or(Due::Event)
    }
}

/// The descriptors of a poll(2), each with the wanted events.
fn polled(seen: &Seen, address: u64, count: u64) -> Vec<(u64, PollFlags)> {
    // struct pollfd: int fd; short events, revents.
    const BYTES: usize = 8;
    let bytes = read(seen, address, count.min(FILES_MAX) as usize * BYTES);
    let entry = |[a, b, c, d, low, high, ..]: &[u8; BYTES]| {
        let wanted = PollFlags::from_bits_retain(u16::from_le_bytes([*low, *high]));
        // poll(2) ignores a negative number.
        Some((u64::try_from(i32::from_le_bytes([*a, *b, *c, *d])).ok()?, wanted))
    };
    bytes.as_chunks().0.iter().filter_map(entry).collect()
}

/// The descriptors of a set of select(2).
fn selected(seen: &Seen, count: u64, address: u64, wanted: PollFlags) -> Vec<(u64, PollFlags)> {
    let count = if address == 0 { 0 } else { u64::from(count as u32).min(FILES_MAX) };
    let bytes = read(seen, address, count.div_ceil(8) as usize);
    let is_in = |number: &u64| {
        bytes.get(*number as usize / 8).is_some_and(|byte| byte >> (number % 8) & 1 == 1)
    };
    (0..count).filter(is_in).map(|number| (number, wanted)).collect()
}

/// Reads memory of a process; empty if it is not readable.
fn read(seen: &Seen, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let read = call::read_memory(seen.pid, &mut bytes, &[(address, length as u64)]);
    bytes.truncate(read.unwrap_or(0));
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use rustix::event::epoll;

    use super::super::{drowsy, tree};
    use super::*;

    /// A connection whose peer takes no more data.
    fn full() -> (UnixStream, UnixStream) {
        let (mut sender, peer) = UnixStream::pair().unwrap();
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[0; 4096]).is_ok() {}
        (sender, peer)
    }

    fn drain(peer: &mut UnixStream) {
        peer.set_nonblocking(true).unwrap();
        while peer.read(&mut [0; 1 << 16]).is_ok_and(|bytes| bytes > 0) {}
    }

    #[test]
    fn a_blocked_call_is_due_when_its_descriptor_is_ready() {
        let (sender, mut peer) = full();
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let data = epoll::EventData::new_u64(0);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&set, &sender, data, flags).unwrap();
        let number = sender.as_raw_fd();
        let poll = |wanted: PollFlags| {
            let [a, b, c, d] = number.to_le_bytes();
            let [low, high] = wanted.bits().to_le_bytes();
            [a, b, c, d, low, high, 0, 0]
        };
        let (for_room, for_bytes) = (poll(PollFlags::OUT), poll(PollFlags::IN));
        let address = |entry: &[u8]| entry.as_ptr() as u64;
        let mut select = vec![0u8; number as usize / 8 + 1];
        select[number as usize / 8] |= 1 << (number % 8);
        let (selected, last) = (address(&select), number as u64 + 1);

        let me = std::process::id();
        let seen = &tree::look_at_all(vec![me]).unwrap()[0];
        let is_due = |call: i64, rdi, rsi, rdx| {
            let call = call as u64;
            let registers =
                Registers { orig_rax: call, rdi, rsi, rdx, cs: 0x33, ..Registers::default() };
            super::due(seen, me, &registers).is_some()
        };
        let of_set = || is_due(libc::SYS_epoll_pwait, set.as_raw_fd() as u64, 0, 0);
        let of_room = || {
            [
                is_due(libc::SYS_sendto, number as u64, 0, 0),
                is_due(libc::SYS_poll, address(&for_room), 1, 0),
                is_due(libc::SYS_select, last, 0, selected),
            ]
        };
        let of_bytes = || {
            [
                is_due(libc::SYS_read, number as u64, 0, 0),
                is_due(libc::SYS_poll, address(&for_bytes), 1, 0),
                is_due(libc::SYS_select, last, selected, 0),
            ]
        };
        assert_eq!((of_set(), of_room(), of_bytes()), (false, [false; 3], [false; 3]));
        drain(&mut peer);
        assert_eq!((of_set(), of_room(), of_bytes()), (true, [true; 3], [false; 3]));
        assert!(!is_due(libc::SYS_select, last - 1, 0, selected), "not in the set");
        assert!(!is_due(libc::SYS_sendto, 1 << 20, 0, 0), "no such descriptor");
        assert!(!is_due(libc::SYS_poll, 8, 1, 0), "no such memory");

        // Not dropped: a child that another test starts at this moment may have a copy.
        peer.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!((of_set(), of_bytes()), (true, [true; 3]), "an end of file is readable");
    }

    #[test]
    fn an_expired_timer_is_told_from_other_events() {
        let me = std::process::id();
        let (inner, outer) = (epoll_set(), epoll_set());
        let clock = rustix::time::TimerfdClockId::Monotonic;
        let timer =
            rustix::time::timerfd_create(clock, rustix::time::TimerfdFlags::CLOEXEC).unwrap();
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        let watch = |set: &OwnedFd, file: std::os::fd::BorrowedFd<'_>| {
            let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
            epoll::add(set, file, data, flags).unwrap();
        };
        watch(&inner, timer.as_fd());
        watch(&inner, receiver.as_fd());
        watch(&outer, inner.as_fd());
        let seen = &tree::look_at_all(vec![me]).unwrap()[0];
        let due = |call: i64, file: i32| {
            let (orig_rax, rdi) = (call as u64, file as u64);
            let registers = Registers { orig_rax, rdi, cs: 0x33, ..Registers::default() };
            super::due(seen, me, &registers)
        };
        let all = || {
            [
                due(libc::SYS_read, timer.as_raw_fd()),
                due(libc::SYS_epoll_wait, inner.as_raw_fd()),
                due(libc::SYS_epoll_wait, outer.as_raw_fd()),
            ]
        };
        assert_eq!(all(), [None; 3]);
        let soon = rustix::time::Timespec { tv_sec: 0, tv_nsec: 1 };
        let once = rustix::time::Itimerspec {
            it_value: soon,
            it_interval: rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 },
        };
        let flags = rustix::time::TimerfdTimerFlags::empty();
        rustix::time::timerfd_settime(&timer, flags, &once).unwrap();
        let begun = Instant::now();
        while all()[0].is_none() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it does not expire");
        }
        assert_eq!(all(), [Some(Due::Timer); 3]);
        sender.write_all(b"x").unwrap();
        assert_eq!(all(), [Some(Due::Timer), Some(Due::Event), Some(Due::Event)]);
    }

    fn epoll_set() -> OwnedFd {
        epoll::create(epoll::CreateFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn a_wait_for_asynchronous_io_is_due_when_its_events_are_there() {
        let me = std::process::id();
        let seen = &tree::look_at_all(vec![me]).unwrap()[0];
        // A header with four events.
        let ring = [0, 127, 125, 2, crate::look::aio::MAGIC, 1, 0, 32];
        let is_due = |ring: &[u32; 8], wanted| {
            let (orig_rax, rdi) = (libc::SYS_io_getevents as u64, ring.as_ptr() as u64);
            let registers =
                Registers { orig_rax, rdi, rsi: wanted, cs: 0x33, ..Registers::default() };
            super::due(seen, me, &registers).is_some()
        };
        assert_eq!([0, 4, 5].map(|wanted| is_due(&ring, wanted)), [true, true, false]);
        assert!(!is_due(&[0; 8], 1), "no ring");
        let empty = [0, 127, 2, 2, crate::look::aio::MAGIC, 1, 0, 32];
        assert!(!is_due(&empty, 0), "a wait for none was not blocked");
    }

    #[test]
    fn a_blocked_writer_is_busy_when_room_becomes_available() {
        for comes in [false, true] {
            let (sender, mut peer) = full();
            sender.set_nonblocking(false).unwrap();
            let mut yes = std::process::Command::new("yes");
            let mut yes = yes.stdout(OwnedFd::from(sender)).spawn().unwrap();
            let pid = yes.id();
            let waits = || {
                let call = crate::look::in_call::InCall::of(pid);
                call.is_some_and(|call| call.number == libc::SYS_write)
            };
            let begun = Instant::now();
            while !waits() {
                assert!(begun.elapsed() < Duration::from_secs(20), "it does not write");
                std::thread::yield_now();
            }
            let mut still = drowsy::stand_still(|| vec![pid]).unwrap();
            if comes {
                drain(&mut peer);
            }
            let is_busy = still.read().unwrap().is_busy;
            drop(still);
            yes.kill().unwrap();
            yes.wait().unwrap();
            assert_eq!(is_busy, comes);
        }
    }
}
