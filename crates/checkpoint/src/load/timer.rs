//! Timers: descriptors and POSIX timers.

use super::Plan;
use crate::error::Result;
use crate::format::{Process, TimerFd};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// `struct itimerspec`.
fn spec(interval_ns: u64, value_ns: u64) -> [u64; 4] {
    let second = 1_000_000_000;
    [interval_ns / second, interval_ns % second, value_ns / second, value_ns % second]
}

/// `_IOW('T', 0, __u64)`: how often a timerfd has rung. KERNEL(3.17), with CHECKPOINT_RESTORE.
const SET_TICKS: u64 = 0x4008_5400;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    timer: &TimerFd,
) -> Result<Cell> {
    let cell = plan.cell()?;
    let flags = timer.flags & libc::O_NONBLOCK as u32;
    let create = Call::new(libc::SYS_timerfd_create, [Arg::from(timer.clock), flags.into()]);
    sequence.call_into(what, cell, create);
    let at = plan.builder.numbers(&spec(timer.interval_ns, timer.value_ns));
    let args = [cell.into(), Arg::Number(0), at.into(), Arg::Number(0)];
    if timer.value_ns != 0 {
        sequence.call(what, Call::new(libc::SYS_timerfd_settime, args));
    }
    if timer.ticks != 0 {
        // ORDER: setting the time takes the ticks away.
        let ticks = plan.builder.numbers(&[timer.ticks]);
        let args = [cell.into(), Arg::Number(SET_TICKS), ticks.into()];
        sequence.call(what, Call::new(libc::SYS_ioctl, args));
    }
    Ok(cell)
}

/// PR_TIMER_CREATE_RESTORE_IDS. KERNEL(6.15).
const RESTORE_IDS: u64 = 77;

/// The POSIX timers of a process, with the ids they had.
pub(super) fn posix(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) {
    if record.timers.is_empty() {
        return;
    }
    let restore_ids = |on: u64| Call::new(libc::SYS_prctl, [Arg::Number(RESTORE_IDS), on.into()]);
    sequence.call("the ids of POSIX timers (Linux 6.15)", restore_ids(1));
    for timer in &record.timers {
        let what = format!("POSIX timer {} of process {}", timer.id, record.pid);
        // struct sigevent: value, signo, notify, tid.
        let mut event = timer.value.to_ne_bytes().to_vec();
        event.extend(timer.signal.to_ne_bytes());
        event.extend(timer.notify.to_ne_bytes());
        event.extend(timer.tid.to_ne_bytes());
        event.resize(64, 0);
        let event = plan.builder.data(&event);
        let id = plan.builder.data(&timer.id.to_ne_bytes());
        let args = [Arg::from(timer.clock), event.into(), id.into()];
        sequence.call(what.clone(), Call::new(libc::SYS_timer_create, args));
        if timer.value_ns != 0 {
            let at = plan.builder.numbers(&spec(timer.interval_ns, timer.value_ns));
            let args = [Arg::from(timer.id), Arg::Number(0), at.into(), Arg::Number(0)];
            sequence.call(what, Call::new(libc::SYS_timer_settime, args));
        }
    }
    sequence.call("the ids of POSIX timers", restore_ids(0));
}
