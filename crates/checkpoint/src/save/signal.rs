//! Signals: actions and alternate stacks, asked of the process itself; queues, by ptrace(2).

use dormouse_kernel::Errno;
use dormouse_kernel::call;

use super::tree::Seen;
use crate::error::{Error, Result};
use crate::format::{Action, AlternateStack, Bytes, IntervalTimer, Signal};
use crate::inject::remote::{Remote, Scratch};

/// Actions that are not the default: those of which `/proc/PID/status` says so are asked for.
pub(crate) fn actions(
    seen: &Seen,
    remote: &mut Remote,
    scratch: Scratch,
) -> std::result::Result<Vec<Action>, Errno> {
    let mask = |field: &str| seen.fields.mask(field).unwrap_or(u64::MAX);
    let set = mask("SigCgt") | mask("SigIgn");
    let mut all = Vec::new();
    for signal in (1..=64).filter(|s| set & (1u64 << (s - 1)) != 0) {
        if signal == libc::SIGKILL || signal == libc::SIGSTOP {
            continue;
        }
        remote.call(libc::SYS_rt_sigaction, [signal as u64, 0, scratch.address, 8])?;
        let mut bytes = [0; 32];
        scratch.read(&mut bytes)?;
        let [handler, flags, restorer, mask] = numbers(&bytes);
        all.push(Action { signal, handler, flags, restorer, mask });
    }
    Ok(all)
}

/// The first numbers of 64 bits.
pub(crate) fn numbers<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut all = [0; N];
    for (number, eight) in all.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = u64::from_ne_bytes(eight.try_into().unwrap_or([0; 8])); // eight by the iterator
    }
    all
}

/// The alternate stack of a thread.
pub(crate) fn alternate_stack(
    remote: &mut Remote,
    scratch: Scratch,
) -> std::result::Result<Option<AlternateStack>, Errno> {
    remote.call(libc::SYS_sigaltstack, [0, scratch.address])?;
    let mut bytes = [0; 24];
    scratch.read(&mut bytes)?;
    let [address, flags, length_bytes] = numbers(&bytes);
    // Whether the thread runs on it follows from its stack pointer.
    let flags = flags as u32 & !(libc::SS_ONSTACK as u32);
    let disabled = flags & libc::SS_DISABLE as u32 != 0;
    Ok((!disabled).then_some(AlternateStack { address, flags, length_bytes }))
}

/// The timers of setitimer(2) that run.
pub(crate) fn interval_timers(
    remote: &mut Remote,
    scratch: Scratch,
) -> std::result::Result<Vec<IntervalTimer>, Errno> {
    let mut all = Vec::new();
    for which in 0..3u32 {
        remote.call(libc::SYS_getitimer, [u64::from(which), scratch.address])?;
        let mut bytes = [0; 32];
        scratch.read(&mut bytes)?;
        let [interval_s, interval_us, value_s, value_us] = numbers(&bytes);
        let us = |s: u64, us: u64| s.saturating_mul(1_000_000).saturating_add(us);
        let timer = IntervalTimer {
            which,
            value_us: us(value_s, value_us),
            interval_us: us(interval_s, interval_us),
        };
        all.extend((timer.value_us != 0).then_some(timer));
    }
    Ok(all)
}

/// Signals that wait: for the process (`shared`) or for one thread.
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
