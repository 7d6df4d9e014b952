//! Signals: actions and alternate stacks, read by calls in the process itself; queues, by
//! ptrace(2).

use dormouse_kernel::Errno;
use dormouse_kernel::call;
use dormouse_record::{Action, AlternateStack, Bytes, Error, IntervalTimer, Result, Signal};

use super::seen::Seen;
use crate::inject::script::{Answers, Arg, Script};

/// Queries actions that are not as a new program has them. An action without a handler may have flags: of SIGCHLD
/// they decide whether children become zombies (SA_NOCLDWAIT).
pub(crate) fn actions(
    script: &mut Script,
) -> impl FnOnce(&Answers) -> std::result::Result<Vec<Action>, Errno> + use<> {
    let mut queried = Vec::new();
    for signal in (1..=64).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal)) {
        let to = script.room(32);
        let args = [Arg::from(signal), 0.into(), to.into(), 8.into()];
        queried.push((signal, script.call(libc::SYS_rt_sigaction, args), to));
    }
    move |answers| {
        let action = |(signal, made, to)| {
            answers.returned(made)?;
            let all = answers.numbers(to);
            let [handler, flags, restorer, mask] = all;
            Ok((all != [0; 4]).then_some(Action { signal, handler, flags, restorer, mask }))
        };
        queried.into_iter().filter_map(|one| action(one).transpose()).collect()
    }
}

/// Queries the alternate stack of a thread.
pub(crate) fn alternate_stack(
    script: &mut Script,
) -> impl FnOnce(&Answers) -> std::result::Result<Option<AlternateStack>, Errno> + use<> {
    let to = script.room(24);
    let queried = script.call(libc::SYS_sigaltstack, [0.into(), to.into()]);
    move |answers| {
        answers.returned(queried)?;
        let [address, flags, length_bytes] = answers.numbers(to);
        // SS_ONSTACK follows from the stack pointer of the thread.
        let flags = flags as u32 & !(libc::SS_ONSTACK as u32);
        let disabled = flags & libc::SS_DISABLE as u32 != 0;
        Ok((!disabled).then_some(AlternateStack { address, flags, length_bytes }))
    }
}

/// Queries the active timers of setitimer(2).
pub(crate) fn interval_timers(
    script: &mut Script,
) -> impl FnOnce(&Answers) -> std::result::Result<Vec<IntervalTimer>, Errno> + use<> {
    let queried = [0u32, 1, 2].map(|which| {
        let to = script.room(32);
        let args = [Arg::from(u64::from(which)), to.into()];
        (which, script.call(libc::SYS_getitimer, args), to)
    });
    move |answers| {
        let mut all = Vec::new();
        for (which, made, to) in queried {
            answers.returned(made)?;
            let [interval_s, interval_us, value_s, value_us] = answers.numbers(to);
            let us = |s: u64, us: u64| s.saturating_mul(1_000_000).saturating_add(us);
            let timer = IntervalTimer {
                which,
                value_us: us(value_s, value_us),
                interval_us: us(interval_s, interval_us),
            };
            // The real timer stands still, and keeps its interval, while its signal is pending. Another timer
            // with an interval alone is disarmed.
            let is_pending = which == IntervalTimer::REAL && timer.interval_us != 0;
            all.extend((timer.value_us != 0 || is_pending).then_some(timer));
        }
        Ok(all)
    }
}

/// Refuses a queue with a standard signal twice. Only a timer of timer_create(2) queues its signal behind another
/// of the same number; the kernel drops a second one that is sent.
pub(super) fn check_pending(seen: &Seen, queue: &[Signal]) -> Result<()> {
    const REAL_TIME_MIN: i32 = 32;
    let is_twice = |(n, signal): (usize, &Signal)| {
        let number = signal.number();
        number < REAL_TIME_MIN && queue[..n].iter().any(|earlier| earlier.number() == number)
    };
    let Some(twice) = queue.iter().enumerate().find(|one| is_twice(*one)) else { return Ok(()) };
    let why = format!(
        "signal {} of a POSIX timer is pending behind another signal of that number, which is not saved yet",
        twice.1.number()
    );
    Err(Error::Refused(vec![seen.refuse("", why)]))
}

/// Pending signals: of the process (`shared`) or of one thread.
pub(crate) fn pending(tid: u32, shared: bool) -> Result<Vec<Signal>> {
    let mut all = Vec::new();
    loop {
        let next = call::pending_signal(tid, shared, all.len() as u64);
        match next.map_err(Error::of("read the pending signals", tid))? {
            Some(info) => all.push(Signal { info: Bytes(info.to_vec()) }),
            None => return Ok(all),
        }
    }
}
