//! Time limits of calls that restart after their thread was stopped: the remaining time.
//!
//! [`super::wait`] handles calls whose limit is kept inside the kernel. Of the others, some have
//! the remaining time written to memory by the kernel when they are interrupted, and some use an
//! absolute time. The rest would wait for the whole time again: their end is determined before they
//! are interrupted ([`super::wait::Asleep`]). LIMIT: where the kernel does not show it, the time
//! waited is taken to be at least the time for which the whole container has been idle.

use std::time::Duration;

use dormouse_kernel::call::Registers;
use dormouse_record::TimeLimit;
use rustix::time::ClockId;

use super::restart::{ERESTARTNOHAND, ERESTARTSYS, FUTEX_COMMAND, begin_again};
use super::seen::Seen;
use crate::clock::{self, Offsets};
use crate::look::in_call::InCall;
use crate::look::task::time_at;

/// The time of a clock of a process; `None` if the number names no clock of time.
fn now_ns(pid: u32, clock: u64) -> Option<u64> {
    let its = || clock::now(clock::offsets_of_process(pid).ok()?).ok();
    let now = match clock as i32 {
        libc::CLOCK_REALTIME => {
            let now = rustix::time::clock_gettime(ClockId::Realtime);
            now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
        }
        libc::CLOCK_MONOTONIC => its()?.monotonic_ns,
        libc::CLOCK_BOOTTIME => its()?.boottime_ns,
        _ => return None,
    };
    u64::try_from(now).ok()
}

/// CLOCK_MONOTONIC outside any time namespace.
fn monotonic_ns() -> Option<u64> {
    let now = clock::now(Offsets::default()).ok()?;
    u64::try_from(now.monotonic_ns).ok()
}

/// The remaining time limit of the call that a stopped thread is in, by its registers, if the call
/// restarts. As far as is known, no task of the container has run in the last `quiet`.
pub(super) fn of(
    seen: &Seen,
    tid: u32,
    registers: &Registers,
    quiet: Duration,
) -> Option<TimeLimit> {
    let time = |address, part_ns| time_at(seen.pid, address, part_ns);
    let mut limit = limit_of(&begin_again(*registers), time, |clock| now_ns(seen.pid, clock))?;
    if limit.begins_anew() {
        let end_ns = seen.sleeps_until_ns.get(&tid).copied();
        let left_ns = match end_ns.zip(monotonic_ns()) {
            Some((end_ns, now_ns)) => end_ns.saturating_sub(now_ns),
            None => limit.left_ns.saturating_sub(quiet.as_nanos() as u64),
        };
        limit.left_ns = limit.left_ns.min(left_ns);
    }
    Some(limit)
}

/// The same by registers. `time` reads a time of the thread in the unit given, `now_ns` a clock.
///
/// LIMIT: calls whose limit is not among their arguments (`SO_RCVTIMEO`), and calls that are rarely
/// blocked for long (mq_timedreceive(2), io_uring).
fn limit_of(
    registers: &Registers,
    time: impl Fn(u64, u64) -> Option<u64>,
    now_ns: impl Fn(u64) -> Option<u64>,
) -> Option<TimeLimit> {
    if !(-ERESTARTNOHAND..=-ERESTARTSYS).contains(&(registers.rax as i64)) {
        return None;
    }
    let Registers { rdi, rsi, rdx, r10, r8, .. } = *registers;
    let call = registers.orig_rax as i64;
    let given = |address: u64, part_ns| (address != 0).then(|| time(address, part_ns)).flatten();
    // ORDER of the kernel: a call that writes back the remaining time has done so by now.
    let (left_ns, at, part_ns) = match call {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => {
            let ms = u64::try_from(r10 as i32).ok()?;
            (Some(ms * 1_000_000), None, 1)
        }
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => (given(r10, 1), None, 1),
        libc::SYS_rt_sigtimedwait => (given(rdx, 1), None, 1),
        libc::SYS_io_getevents => (given(r8, 1), None, 1),
        libc::SYS_ppoll => (given(rdx, 1), Some(rdx), 1),
        libc::SYS_pselect6 => (given(r8, 1), Some(r8), 1),
        libc::SYS_select => (given(r8, 1_000), Some(r8), 1_000),
        libc::SYS_clock_nanosleep if rsi as i32 & libc::TIMER_ABSTIME != 0 => {
            (given(rdx, 1)?.checked_sub(now_ns(rdi)?).or(Some(0)), None, 1)
        }
        _ => return None,
    };
    Some(TimeLimit { call, left_ns: left_ns?, at, microseconds: part_ns == 1_000 })
}

/// Calls with a timeout, by the names of their man pages.
const CALLS: [(i64, &str); 13] = [
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_poll, "poll"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_select, "select"),
    (libc::SYS_pselect6, "pselect"),
    (libc::SYS_epoll_wait, "epoll_wait"),
    (libc::SYS_epoll_pwait, "epoll_pwait"),
    (libc::SYS_epoll_pwait2, "epoll_pwait2"),
    (libc::SYS_futex, "futex"),
    (libc::SYS_rt_sigtimedwait, "sigtimedwait"),
    (libc::SYS_semtimedop, "semtimedop"),
    (libc::SYS_io_getevents, "io_getevents"),
];

/// A thread that is blocked with a timeout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The process, by its id inside.
    pub pid: u32,
    /// The name that `ps` shows for the process.
    pub process: String,
    /// The name of the call.
    pub call: &'static str,
    /// The timeout of the call.
    pub at_most: Duration,
}

/// The threads of a process that are blocked with a timeout, by proc_pid_syscall(5); nothing is
/// stopped.
pub(super) fn waits(seen: &Seen) -> Vec<Wait> {
    let wait = |tid: &u32| {
        let call = InCall::of(*tid)?;
        let time = |address, part_ns| time_at(seen.pid, address, part_ns);
        let ns = given(&call, time, |clock| now_ns(seen.pid, clock))?;
        let (_, call) = CALLS.iter().find(|(number, _)| *number == call.number)?;
        let (pid, process) = (seen.inner, seen.name());
        Some(Wait { pid, process, call, at_most: Duration::from_nanos(ns) })
    };
    seen.tids.iter().filter_map(wait).collect()
}

/// The timeout of a call, in nanoseconds.
pub(super) fn given(
    call: &InCall,
    time: impl Fn(u64, u64) -> Option<u64>,
    now_ns: impl Fn(u64) -> Option<u64>,
) -> Option<u64> {
    let [rdi, rsi, rdx, r10, r8, r9] = call.arguments;
    let relative = rsi as i32 & FUTEX_COMMAND == libc::FUTEX_WAIT;
    let ns = match call.number {
        libc::SYS_nanosleep => time(rdi, 1)?,
        libc::SYS_clock_nanosleep if rsi as i32 & libc::TIMER_ABSTIME == 0 => time(rdx, 1)?,
        libc::SYS_poll => u64::try_from(rdx as i32).ok()?.checked_mul(1_000_000)?,
        libc::SYS_futex if r10 != 0 && relative => time(r10, 1)?,
        _ => {
            let (orig_rax, rax) = (call.number as u64, -ERESTARTNOHAND as u64);
            let registers =
                Registers { rdi, rsi, rdx, r10, r8, r9, orig_rax, rax, ..Registers::default() };
            limit_of(&registers, time, now_ns)?.left_ns
        }
    };
    Some(ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_limit_of_a_call_is_read_from_its_line() {
        let of =
            |line: &str| given(&InCall::read(line).unwrap(), |address, _| Some(address), |_| None);
        let rest = "0x0 0x0 0x7ffe 0x7f00";
        let sleep = format!("230 0x0 0x0 0x77 0x0 {rest}");
        assert_eq!(of(&sleep), Some(0x77));
        let poll = format!("7 0x1000 0x1 0x5dc 0x0 {rest}");
        assert_eq!(of(&poll), Some(1_500_000_000));
        let for_ever = format!("7 0x1000 0x1 0xffffffff 0x0 {rest}");
        let accept = format!("43 0x3 0x0 0x0 0x0 {rest}");
        for none in [&for_ever, &accept] {
            assert_eq!(of(none), None, "{none}");
        }
    }

    #[test]
    fn the_time_limit_of_a_call_is_read_from_its_arguments() {
        let of = |call: i64, r10: u64, r8: u64| {
            let rax = -ERESTARTNOHAND as u64;
            let registers =
                Registers { orig_rax: call as u64, rax, r10, r8, ..Registers::default() };
            let limit = limit_of(&registers, |at, part| Some(at * part), |_| Some(5));
            limit.map(|limit| (limit.left_ns, limit.at, limit.microseconds))
        };
        assert_eq!(of(libc::SYS_epoll_wait, 1500, 0), Some((1_500_000_000, None, false)));
        assert_eq!(of(libc::SYS_epoll_wait, u64::from(u32::MAX), 0), None, "-1 is no limit");
        assert_eq!(of(libc::SYS_epoll_pwait2, 0, 0), None, "no time is no limit");
        assert_eq!(of(libc::SYS_epoll_pwait2, 7, 0), Some((7, None, false)));
        assert_eq!(of(libc::SYS_select, 0, 7), Some((7000, Some(7), true)));
        assert_eq!(of(libc::SYS_pselect6, 0, 7), Some((7, Some(7), false)));
        assert_eq!(of(libc::SYS_accept, 7, 7), None);
        let moment = Registers {
            orig_rax: libc::SYS_clock_nanosleep as u64,
            rax: -ERESTARTNOHAND as u64,
            rsi: libc::TIMER_ABSTIME as u64,
            rdx: 9,
            ..Registers::default()
        };
        let left = |now| limit_of(&moment, |at, _| Some(at), |_| Some(now)).unwrap().left_ns;
        assert_eq!((left(5), left(20)), (4, 0));
        let runs = Registers { rax: 1, ..moment };
        assert_eq!(limit_of(&runs, |at, _| Some(at), |_| Some(5)), None);
    }
}
