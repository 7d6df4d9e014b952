//! Signals: actions, queues, interval timers.

use dormouse_record::{Process, Signal};

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

pub(super) fn actions(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) {
    for action in &record.actions {
        let numbers = [action.handler, action.flags, action.restorer, action.mask];
        let at = plan.builder.numbers(&numbers);
        let args = [Arg::from(action.signal), at.into(), Arg::Number(0), Arg::Number(8)];
        let what = format!("the action of signal {} of process {}", action.signal, record.pid);
        sequence.call(what, Call::new(libc::SYS_rt_sigaction, args));
    }
}

/// Consumes the SIGCHLD of helpers and of zombies that were created here.
pub(super) fn forget_children(plan: &mut Plan<'_>, sequence: &mut Sequence) {
    let child = plan.builder.numbers(&[1 << (libc::SIGCHLD - 1)]);
    let at_once = plan.builder.numbers(&[0, 0]);
    let args = [child.into(), Arg::Number(0), at_once.into(), Arg::Number(8)];
    let call = Call::new(libc::SYS_rt_sigtimedwait, args).lenient();
    sequence.call("signals of helpers", call);
}

/// Queues signals again, for a process or for one of its threads. A task may send itself any
/// siginfo, even one that only the kernel makes otherwise.
pub(super) fn pending(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    pid: u32,
    tid: Option<u32>,
    signals: &[Signal],
) {
    // The engine sends a SIGSTOP again once the process has stopped ([`super::resume`]).
    for signal in signals.iter().filter(|signal| signal.number() != libc::SIGSTOP) {
        let (number, info) = (signal.number(), plan.builder.data(&signal.info.0));
        let what = format!("pending signal {number} of process {pid}");
        let call = match tid {
            None => {
                let args = [Arg::from(pid), Arg::from(number), info.into()];
                Call::new(libc::SYS_rt_sigqueueinfo, args)
            }
            Some(tid) => {
                let args = [Arg::from(pid), Arg::from(tid), Arg::from(number), info.into()];
                Call::new(libc::SYS_rt_tgsigqueueinfo, args)
            }
        };
        sequence.call(what, call);
    }
}

pub(super) fn interval_timers(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) {
    for timer in &record.interval_timers {
        let split = |us: u64| [us / 1_000_000, us % 1_000_000];
        let [interval_s, interval_us] = split(timer.interval_us);
        // A timer whose signal is pending expires at once: the kernel drops a second signal, and
        // arms the timer when the first is taken. With a time of 0 it would be disarmed.
        let [value_s, value_us] = split(timer.value_us.max(1));
        let at = plan.builder.numbers(&[interval_s, interval_us, value_s, value_us]);
        let args = [timer.which.into(), at.into(), Arg::Number(0)];
        let what = format!("interval timer {} of process {}", timer.which, record.pid);
        sequence.call(what, Call::new(libc::SYS_setitimer, args));
    }
}
