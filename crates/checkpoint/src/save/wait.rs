//! Blocked threads: the time that is left of their calls, and the registers with which they resume.

use std::cell::OnceCell;
use std::time::Duration;

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Registers};
use dormouse_kernel::proc;
use dormouse_kernel::wait::Waits;
use dormouse_record::Restart;
use rustix::time::ClockId;

use super::limit;
use super::restart::{SPURIOUS, begin_again, restart};
use super::seen::Seen;
use crate::look::in_call::InCall;
use crate::look::task::time_at;
use crate::remaining;

/// The BPF program that reads waits, loaded on first use: loading takes some 20 ms.
#[derive(Debug, Default)]
pub struct Blocks(OnceCell<Option<Waits>>);

impl Blocks {
    /// Loads the program while everything runs, if a thread is in a call with a timeout now. If one
    /// enters such a call later, before the stop, the program is loaded then.
    pub(crate) fn for_waiting(processes: &[Seen]) -> Self {
        let blocks = Self::default();
        let waits = |tid: &u32| InCall::of(*tid).is_some_and(|call| is_timed(*tid, &call));
        if processes.iter().flat_map(|seen| &seen.tids).any(waits) {
            blocks.load();
        }
        blocks
    }

    fn load(&self) -> Option<&Waits> {
        self.0.get_or_init(|| Waits::load().ok()).as_ref()
    }

    /// How a thread that is not stopped yet waits in this call, if the call restarts; `None` if the
    /// program is not loaded.
    pub(super) fn asleep(&self, tid: u32, call: &InCall) -> Option<Asleep> {
        let waits = self.0.get()?.as_ref()?;
        (SPURIOUS.contains(&call.number) && is_timed(tid, call)).then_some(())?;
        let wait = waits.of(tid).ok()?;
        Some(Asleep { until_ns: wait.sleeps_until_ns?, switches: wait.switches })
    }

    /// The remaining time of an interrupted call; `None` if it cannot be read.
    fn left_ns(&self, tid: u32, call: i64, clock: u64) -> Option<u64> {
        let block = self.load()?.of(tid).ok()?.restart;
        // A relative sleep by CLOCK_REALTIME uses CLOCK_MONOTONIC; CPU time clocks are left out.
        let clock = match clock as i32 {
            libc::CLOCK_REALTIME | libc::CLOCK_MONOTONIC => ClockId::Monotonic,
            libc::CLOCK_BOOTTIME => ClockId::Boottime,
            _ => return None,
        };
        let end = match call {
            libc::SYS_poll => block.poll_ns,
            libc::SYS_futex => block.futex_ns,
            _ => block.sleep_ns,
        };
        let now = rustix::time::clock_gettime(clock);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        // Expired already: the call returns at once.
        Some(end.saturating_sub(now))
    }
}

/// A thread that is blocked with a timeout, as it was before the stop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asleep {
    until_ns: u64,
    switches: u64,
}

impl Asleep {
    /// The end of the wait, by CLOCK_MONOTONIC, if it is the wait that the stop has interrupted:
    /// since then the thread has waited only for its tracer.
    pub(super) fn until_ns(self, tid: u32) -> Option<u64> {
        let now = proc::fields(tid).ok()?.number("voluntary_ctxt_switches")?;
        (now == self.switches + 1).then_some(self.until_ns)
    }
}

/// LIMIT: the timeout of a restarting call is only read if it is longer than this. A shorter one is
/// no more than the time that a checkpoint takes.
const SHORT_NS: u64 = 100_000_000;

/// Whether the call that a thread is in has an end that the kernel keeps and the thread does not.
fn is_timed(tid: u32, call: &InCall) -> bool {
    match call.number {
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_restart_syscall => true,
        libc::SYS_poll => call.arguments[2] as i32 > 0,
        libc::SYS_futex => call.arguments[3] != 0,
        number if SPURIOUS.contains(&number) => {
            let time = |address, part_ns| time_at(tid, address, part_ns);
            // None of these takes an absolute time.
            limit::given(call, time, |_| None).is_some_and(|given_ns| given_ns > SHORT_NS)
        }
        _ => false,
    }
}

/// How the call that a stopped thread is in continues, if only the thread itself could restart it.
pub(super) fn continuation(
    seen: &Seen,
    tid: u32,
    blocks: &Blocks,
) -> std::result::Result<Option<Restart>, Errno> {
    let timespec = |address| time_at(seen.pid, address, 1);
    let waited_in = seen.waited_in.get(&tid).map_or("", String::as_str);
    let left = |call, clock| blocks.left_ns(tid, call, clock);
    Ok(restart(&call::registers(tid)?, waited_in, timespec, left))
}

/// The timeout of the call that a stopped thread is in.
pub(super) fn waits_ns(
    seen: &Seen,
    tid: u32,
    blocks: &Blocks,
) -> std::result::Result<Option<u64>, Errno> {
    let left = continuation(seen, tid, blocks)?.and_then(|restart| restart.remaining_ns);
    let limit = limit::of(seen, tid, &call::registers(tid)?, Duration::ZERO);
    Ok(left.or(limit.map(|limit| limit.left_ns)))
}

/// Registers with which a stopped thread, whose registers these are, resumes: a call that would
/// fail with a spurious EINTR restarts with its remaining time.
pub(super) fn resume_registers(seen: &Seen, tid: u32, registers: Registers) -> Registers {
    let limit = limit::of(seen, tid, &registers, Duration::ZERO);
    let again = begin_again(registers);
    limit.map_or(again, |limit| remaining::begin_again(tid, again, &limit))
}

/// Makes a stopped thread resume, as by [`resume_registers`]; returns its registers.
pub(super) fn prepare_resume(seen: &Seen, tid: u32) -> std::result::Result<Registers, Errno> {
    let registers = call::registers(tid)?;
    let again = resume_registers(seen, tid, registers);
    if again != registers {
        call::set_registers(tid, &again)?;
    }
    Ok(again)
}
