//! Several calls injected into another task with a single stop.
//!
//! ```text
//! 0      code, without a stack
//! 4096   the time that the code waits (struct timespec), and the address where it continues then
//! 4128   calls of 64 bytes: number, six arguments, result
//! ...    space for memory that calls write, initially zeros, and for memory that they read
//! ...    a page that nothing touches
//! ```
//!
//! No memory is writable and executable at once. When all calls are made, the code waits in the
//! kernel with all signals blocked, until the tracer's interrupt ends the wait: no signal is needed
//! to report the end. If the tracer has ended, the code continues after [`WAITS`] in the landing code
//! ([`super::landing`]), which unmaps all of this, and the next tracer of the task ends the wait
//! ([`super::landing::skip_wait`]). A tracer that comes later than that finds that the task has continued, which is an
//! error. If memory may not become executable (PR_SET_MDWE(2const), a policy of the host) the same calls are made one
//! by one ([`Remote::call`]).

use std::time::Duration;

use super::blob::follower;
use super::remote::Remote;
use dormouse_kernel::{Errno, call};

const PAGE_BYTES: u64 = 4096;

const CALL_BYTES: u64 = 64;

/// The bytes in front of the calls.
const HEAD_BYTES: u64 = 32;

/// How long the code waits for the tracer.
const WAITS: Duration = Duration::from_secs(10);

/// How long it waits if it cannot continue by itself: for ever, as far as a process is concerned.
const WAITS_FOR_EVER: Duration = Duration::from_secs(1 << 32);

fn waits() -> Duration {
    #[cfg(test)]
    if let Some(waits) = super::deaths::waits() {
        return waits;
    }
    WAITS
}

/// The result of a call that was not made yet: no call returns it.
const NOT_YET: u64 = i64::MIN as u64;

/// Calls that are to be made.
#[derive(Debug, Default)]
pub(crate) struct Script {
    calls: Vec<(i64, [Arg; 6])>,
    /// The initial contents of the memory for calls.
    room: Vec<u8>,
}

/// An argument.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    Number(u64),
    /// The address of memory that the call writes.
    To(Room),
    /// The address of a page behind all other memory for calls, which nothing touches.
    Untouched,
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self::Number(value)
    }
}

impl From<i32> for Arg {
    fn from(value: i32) -> Self {
        Self::Number(i64::from(value) as u64)
    }
}

impl From<Room> for Arg {
    fn from(room: Room) -> Self {
        Self::To(room)
    }
}

/// Memory that a call writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room(u64);

/// A call of a script.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made(usize);

/// The results of calls, and the memory that they wrote.
#[derive(Debug)]
pub(crate) struct Answers {
    returned: Vec<u64>,
    room: Vec<u8>,
}

impl Script {
    /// Adds a call.
    pub(crate) fn call<const N: usize>(&mut self, number: i64, args: [Arg; N]) -> Made {
        let mut all = [Arg::Number(0); 6];
        all[..N].copy_from_slice(&args);
        self.calls.push((number, all));
        Made(self.calls.len() - 1)
    }

    /// Reserves memory for a call, initially zeros.
    pub(crate) fn room(&mut self, bytes: u64) -> Room {
        let room = Room(self.room.len() as u64);
        self.room.resize(self.room.len() + bytes.next_multiple_of(16) as usize, 0);
        room
    }

    /// Reserves memory for a number that a call reads, and may change.
    pub(crate) fn room_with(&mut self, number: u64) -> Room {
        let room = self.room(8);
        self.room[room.0 as usize..][..8].copy_from_slice(&number.to_ne_bytes());
        room
    }

    /// Makes all calls. Nothing is left in the task but their effects.
    pub(crate) fn run(&self, pid: u32, remote: &mut Remote<'_>) -> Result<Answers, Errno> {
        let bytes = self.untouched_at(0) + PAGE_BYTES;
        let (data, code) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ | libc::PROT_EXEC);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let args = [0, bytes, data as u64, kind as u64, u64::MAX, 0];
        let base = remote.call_for_now(libc::SYS_mmap, args, (libc::SYS_munmap, bytes))?;
        let answers = self.write(pid, base, remote.landing()).and_then(|()| {
            match remote.call(libc::SYS_mprotect, [base, PAGE_BYTES, code as u64]) {
                Ok(_) => self.at_once(pid, remote, base),
                Err(_) => self.one_by_one(pid, remote, base),
            }
        });
        remote.undo()?;
        answers
    }

    /// The address of the page that nothing touches.
    fn untouched_at(&self, base: u64) -> u64 {
        (self.room_at(base) + self.room.len() as u64).next_multiple_of(PAGE_BYTES)
    }

    fn room_at(&self, base: u64) -> u64 {
        calls_at(base) + self.calls.len() as u64 * CALL_BYTES
    }

    /// The number and arguments of a call, with all mapped at `base`.
    fn numbers(&self, (number, args): &(i64, [Arg; 6]), base: u64) -> (i64, [u64; 6]) {
        let number_of = |arg: Arg| match arg {
            Arg::Number(value) => value,
            Arg::To(Room(offset)) => self.room_at(base) + offset,
            Arg::Untouched => self.untouched_at(base),
        };
        (*number, args.map(number_of))
    }

    /// Writes code and calls. The code continues at `next` if no tracer comes.
    fn write(&self, pid: u32, base: u64, next: Option<u64>) -> Result<(), Errno> {
        let mut all = follower().to_vec();
        all.resize(PAGE_BYTES as usize, 0);
        let waits = if next.is_some() { waits() } else { WAITS_FOR_EVER };
        let head = [waits.as_secs(), waits.subsec_nanos().into(), next.unwrap_or(base), 0];
        all.extend(head.map(u64::to_ne_bytes).as_flattened());
        for one in &self.calls {
            let (number, args) = self.numbers(one, base);
            all.extend(number.to_ne_bytes());
            all.extend(args.map(u64::to_ne_bytes).as_flattened());
            all.extend(NOT_YET.to_ne_bytes());
        }
        if self.room.iter().any(|byte| *byte != 0) {
            all.extend_from_slice(&self.room);
        }
        match call::write_memory(pid, base, &all)? {
            n if n == all.len() => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }

    fn at_once(&self, pid: u32, remote: &mut Remote<'_>, base: u64) -> Result<Answers, Errno> {
        let calls_at = calls_at(base);
        let Some(last) = (self.calls.len() as u64).checked_sub(1) else {
            return Ok(Answers { returned: Vec::new(), room: Vec::new() });
        };
        let done_at = calls_at + last * CALL_BYTES + CALL_BYTES - 8;
        remote.follow(base, calls_at..self.room_at(base), || {
            let mut number = [0; 8];
            read(pid, done_at, &mut number)?;
            Ok(u64::from_ne_bytes(number) != NOT_YET)
        })?;
        let mut calls = vec![0; self.calls.len() * CALL_BYTES as usize];
        read(pid, calls_at, &mut calls)?;
        let number = |call: &[u8]| call.last_chunk().map_or(NOT_YET, |n| u64::from_ne_bytes(*n));
        let returned = calls.chunks_exact(CALL_BYTES as usize).map(number).collect();
        Ok(Answers { returned, room: self.read_room(pid, base)? })
    }

    fn one_by_one(&self, pid: u32, remote: &mut Remote<'_>, base: u64) -> Result<Answers, Errno> {
        let mut returned = Vec::new();
        for one in &self.calls {
            let (number, args) = self.numbers(one, base);
            returned.push(remote.call_raw(number, args)?);
        }
        Ok(Answers { returned, room: self.read_room(pid, base)? })
    }

    fn read_room(&self, pid: u32, base: u64) -> Result<Vec<u8>, Errno> {
        let mut room = vec![0; self.room.len()];
        read(pid, self.room_at(base), &mut room)?;
        Ok(room)
    }
}

impl Answers {
    /// The result of a call.
    pub(crate) fn returned(&self, Made(number): Made) -> Result<u64, Errno> {
        let returned = self.returned.get(number).map_or(0, |value| value.cast_signed());
        match returned {
            -4095..0 => Err(Errno::from_raw_os_error(-returned as i32)),
            returned => Ok(returned.cast_unsigned()),
        }
    }

    /// The numbers of 64 bits that calls have written.
    pub(crate) fn numbers<const N: usize>(&self, Room(offset): Room) -> [u64; N] {
        let mut all = [0; N];
        let bytes = self.room.get(offset as usize..).unwrap_or_default();
        for (number, eight) in all.iter_mut().zip(bytes.as_chunks().0) {
            *number = u64::from_ne_bytes(*eight);
        }
        all
    }
}

fn calls_at(base: u64) -> u64 {
    base + PAGE_BYTES + HEAD_BYTES
}

fn read(pid: u32, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    if bytes.is_empty() {
        return Ok(());
    }
    let places = [(address, bytes.len() as u64)];
    match call::read_memory(pid, bytes, &places)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(Errno::FAULT),
    }
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::call::TraceOptions;

    use super::*;
    use crate::inject::landing::Ground;
    use crate::inject::remote::EVENT_STOP;

    /// A stopped child that sleeps, and where it has a `syscall` instruction.
    fn stopped() -> (std::process::Child, Ground) {
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        // Until it has executed that program: its vDSO is at another address than this process's.
        let is_there = || std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|c| c == b"sleep\n");
        while !is_there() {
            std::thread::yield_now();
        }
        call::seize(pid, TraceOptions::SYSGOOD).unwrap();
        call::interrupt(pid).unwrap();
        while !matches!(call::wait_stop(Some(pid)), Ok((_, call::Stop::Event(EVENT_STOP, _)))) {}
        (child, Ground::in_object(pid).unwrap())
    }

    #[test]
    fn batched_and_single_calls_return_the_same() {
        let (mut child, ground) = stopped();
        let pid = child.id();
        let mut remote = Remote::begin(pid, &ground).unwrap();
        let maps = || std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count();
        let before = maps();
        let mut script = Script::default();
        let own = script.call(libc::SYS_getpid, []);
        let bad = script.call(libc::SYS_close, [Arg::from(-1)]);
        let room = script.room(16);
        let name = [Arg::from(libc::PR_GET_NAME), room.into(), 0.into(), 0.into(), 0.into()];
        script.call(libc::SYS_prctl, name);
        let (to, length) = (script.room(8), script.room_with(8));
        let level = [libc::SOL_SOCKET, libc::SO_PEERCRED].map(Arg::from);
        let args = [Arg::from(-1), level[0], level[1], to.into(), length.into()];
        script.call(libc::SYS_getsockopt, args);
        let more: Vec<Room> = (0..100).map(|_| script.room(16)).collect();
        for (n, room) in more.iter().enumerate() {
            let args = [Arg::from(n as i32 % 3), (*room).into()];
            script.call(libc::SYS_getitimer, args);
        }
        let data = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let args = [0, 64 << 10, data as u64, kind as u64, u64::MAX, 0];
        let base = remote.call(libc::SYS_mmap, args).unwrap();
        script.write(pid, base, None).unwrap();
        let slow = script.one_by_one(pid, &mut remote, base).unwrap();
        remote.call(libc::SYS_munmap, [base, 64 << 10]).unwrap();
        for answers in [slow, script.run(pid, &mut remote).unwrap()] {
            assert_eq!(answers.returned(own), Ok(u64::from(pid)));
            assert_eq!(answers.returned(bad), Err(Errno::BADF));
            assert_eq!(answers.numbers::<1>(room)[0].to_ne_bytes(), *b"sleep\0\0\0");
            assert_eq!(answers.numbers(length), [8], "a failed call does not change it");
            assert!(more.iter().all(|room| answers.numbers(*room) == [0, 0]));
        }
        assert_eq!(maps(), before, "no mapping is left");
        remote.give_back().unwrap();
        child.kill().unwrap();
        while !matches!(call::wait_stop(Some(pid)), Ok((_, call::Stop::Ended(_))) | Err(_)) {}
    }
}
