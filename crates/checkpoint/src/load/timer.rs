//! Timers: descriptors and POSIX timers.

use dormouse_record::{PosixTimer, Process, Result, TimerFd};

use super::open;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// `struct itimerspec`.
fn spec(interval_ns: u64, value_ns: u64) -> [u64; 4] {
    let second = 1_000_000_000;
    [interval_ns / second, interval_ns % second, value_ns / second, value_ns % second]
}

/// `_IOW('T', 0, __u64)`: the expirations of a timerfd. KERNEL(3.17), with CHECKPOINT_RESTORE.
const SET_TICKS: u64 = 0x4008_5400;

/// TFD_TIMER_ABSTIME.
const ABSOLUTE: u32 = 1;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    timer: &TimerFd,
) -> Result<Cell> {
    let cell = plan.cell();
    let flags = timer.flags & open::AT_CREATION;
    let create = Call::new(libc::SYS_timerfd_create, [Arg::from(timer.clock), flags.into()]);
    sequence.call_into(what, cell, create);
    open::set_later(sequence, what, cell, timer.flags);
    let (how, value_ns) = match timer.cancelled_at_set_ns {
        Some(moment_ns) => (ABSOLUTE | TimerFd::CANCEL_ON_SET, moment_ns),
        None => (0, timer.value_ns),
    };
    // An expired timer that was not read has no time left. If it is periodic, or is cancelled by a change of the
    // clock, it is set again and expires at once. One that is not armed keeps the interval of its last setting.
    let is_set_again = timer.interval_ns != 0 || timer.cancelled_at_set_ns.is_some();
    let is_armed = timer.value_ns != 0 || timer.ticks != 0 && is_set_again;
    // One that expires at a moment of the clock has expired once: the moment 1 is past, and the expiry is the tick.
    let expires_again = timer.value_ns == 0
        && timer.interval_ns == 0
        && timer.ticks != 0
        && timer.cancelled_at_set_ns.is_some();
    let value_ns = match is_armed {
        true if expires_again => 1,
        true => value_ns.max(1),
        false => 0,
    };
    let at = plan.builder.numbers(&spec(timer.interval_ns, value_ns));
    let args = [cell.into(), how.into(), at.into(), Arg::Number(0)];
    if is_armed || timer.interval_ns != 0 {
        sequence.call(what, Call::new(libc::SYS_timerfd_settime, args));
    }
    if timer.ticks != 0 && !expires_again {
        // ORDER: setting the time clears the ticks.
        let ticks = plan.builder.numbers(&[timer.ticks]);
        let args = [cell.into(), Arg::Number(SET_TICKS), ticks.into()];
        sequence.call(what, Call::new(libc::SYS_ioctl, args));
    }
    Ok(cell)
}

/// PR_TIMER_CREATE_RESTORE_IDS. KERNEL(6.15).
const RESTORE_IDS: u64 = 77;
/// LIMIT: the highest id that is reached by counting.
const COUNTED_ID_MAX: i32 = 4096;

/// Creates the POSIX timers of a process, with their recorded ids.
///
/// A process's timers are numbered from 0, so an id is reached by creating those before it. If
/// these would be too many, the id is passed to the kernel.
pub(super) fn posix(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) {
    let Some(last) = record.timers.iter().map(|t| t.id).max() else { return };
    let counts = (0..=COUNTED_ID_MAX).contains(&last);
    let restore_ids = |on: u64| Call::new(libc::SYS_prctl, [Arg::Number(RESTORE_IDS), on.into()]);
    let create = |plan: &mut Plan<'_>, timer: &PosixTimer| {
        // struct sigevent: value, signo, notify, tid.
        let mut event = timer.value.to_ne_bytes().to_vec();
        event.extend(timer.signal.to_ne_bytes());
        event.extend(timer.notify.to_ne_bytes());
        event.extend(timer.tid.to_ne_bytes());
        event.resize(64, 0);
        let event = plan.builder.data(&event);
        let id = plan.builder.writable(&timer.id.to_ne_bytes());
        Call::new(libc::SYS_timer_create, [Arg::from(timer.clock), event.into(), id.into()])
    };
    let mut all: Vec<&PosixTimer> = record.timers.iter().collect();
    all.sort_unstable_by_key(|t| t.id);
    if !counts {
        sequence.call("the ids of POSIX timers (Linux 6.15)", restore_ids(1));
    }
    let mut next = 0;
    for timer in &all {
        let what = format!("POSIX timer {} of process {}", timer.id, record.pid);
        while counts && next < timer.id {
            let create = create(plan, &PosixTimer { id: next, notify: 1, ..(*timer).clone() });
            sequence.call(what.clone(), create);
            next += 1;
        }
        let create = create(plan, timer);
        sequence.call(what, create);
        next = timer.id.saturating_add(1);
    }
    if !counts {
        sequence.call("the ids of POSIX timers", restore_ids(0));
    }
    for id in (0..next).filter(|id| counts && !all.iter().any(|t| t.id == *id)) {
        sequence.call("a POSIX timer", Call::new(libc::SYS_timer_delete, [Arg::from(id)]));
    }
    for timer in all.iter().filter(|t| t.value_ns != 0) {
        let what = format!("POSIX timer {} of process {}", timer.id, record.pid);
        let at = plan.builder.numbers(&spec(timer.interval_ns, timer.value_ns));
        let args = [Arg::from(timer.id), Arg::Number(0), at.into(), Arg::Number(0)];
        sequence.call(what, Call::new(libc::SYS_timer_settime, args));
    }
}
