//! Interrupted calls, by the registers of their threads.
//!
//! To stop a thread, the kernel interrupts its blocking call. Most such calls restart by
//! themselves: `rax` is -ERESTARTSYS or its like, and the kernel acts on it before the thread
//! returns to user space. Two kinds do not:
//!
//! - some calls (epoll_wait(2), sigtimedwait(2), ...) then fail with EINTR, which programs see:
//!   signal(7), "even in the absence of signal handlers". Such a call is made to restart with the
//!   remaining time ([`crate::remaining`]), which is determined before the stop;
//! - calls whose timeout is kept inside the kernel (nanosleep(2), poll(2), futex(2)) continue by
//!   restart_syscall(2), which only the same task can do. Their remaining time is saved.
//!
//! Here are only registers: [`super::limit`] and [`super::wait`] determine times.

use dormouse_kernel::call::{self, Registers};
use dormouse_record::{Restart, Thread};

pub(super) const ERESTARTSYS: i64 = 512;

pub(super) const ERESTARTNOHAND: i64 = 514;

const ERESTART_RESTARTBLOCK: i64 = 516;

/// The command bits of an operation of futex(2).
pub(super) const FUTEX_COMMAND: i32 = 127;

/// Calls that fail with EINTR when their thread was stopped, for no other reason.
pub(super) const SPURIOUS: [i64; 9] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_io_getevents,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
];

/// Registers with which a call that would fail with a spurious EINTR restarts.
pub(super) fn begin_again(registers: Registers) -> Registers {
    let was_interrupted = registers.rax as i64 == -i64::from(libc::EINTR);
    if was_interrupted && SPURIOUS.contains(&(registers.orig_rax as i64)) {
        return Registers { rax: -ERESTARTNOHAND as u64, ..registers };
    }
    registers
}

/// Whether a stopped thread is about to call restart_syscall(2): the kernel has decided that it continues its wait.
/// The kernel function of the wait identifies it, once the thread is back in the call.
///
/// LIMIT: a thread that a job control signal has stopped here is saved as it is, and its wait fails with EINTR.
pub(super) fn is_to_come(tid: u32, registers: &Registers) -> bool {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let mut code = [0; 2];
    registers.rax == libc::SYS_restart_syscall as u64
        && call::read_memory(tid, &mut code, &[(registers.rip, 2)]) == Ok(2)
        && code == SYSCALL
}

/// Whether a stopped thread was blocked in the kernel, and will be again. Registers are as
/// [`begin_again`] returns them.
pub(super) fn waits(thread: &Thread) -> bool {
    waits_by(&thread.registers)
}

/// Whether a stopped thread with these registers was blocked.
pub(super) fn waits_by(registers: &Registers) -> bool {
    let returned = registers.rax as i64;
    let is_restarted = (-ERESTART_RESTARTBLOCK..=-ERESTARTSYS).contains(&returned);
    // A socket call with a timeout (SO_RCVTIMEO) fails with EINTR.
    let has_failed = returned == -i64::from(libc::EINTR);
    registers.orig_rax as i64 >= 0 && (is_restarted || has_failed)
}

/// How an interrupted call continues, if only its thread could restart it. `timespec` reads a timespec of
/// the thread; `left` reads the remaining time of a call, by a clock, from the kernel.
///
/// LIMIT: where the kernel does not show it ([`Waits`](dormouse_kernel::wait::Waits)) the whole time begins
/// again, except for a nanosleep with a buffer for the remaining time.
///
/// A call that was restarted once has the number of restart_syscall(2), and its original arguments:
/// `waited_in` identifies it. LIMIT: where the kernel does not show that, the call fails with
/// EINTR.
pub(super) fn restart(
    registers: &Registers,
    waited_in: &str,
    timespec: impl Fn(u64) -> Option<u64>,
    left: impl Fn(i64, u64) -> Option<u64>,
) -> Option<Restart> {
    if registers.rax as i64 != -ERESTART_RESTARTBLOCK {
        return None;
    }
    let mut call = registers.orig_rax as i64;
    if call == libc::SYS_restart_syscall {
        let first_is_a_clock = registers.rdi < 4096;
        call = match waited_in {
            name if name.contains("poll") => libc::SYS_poll,
            name if name.contains("futex") => libc::SYS_futex,
            "" | "0" => return None,
            // KERNEL(6.18): a continued sleep has no wait function of its own in wchan.
            _ if first_is_a_clock => libc::SYS_clock_nanosleep,
            _ => libc::SYS_nanosleep,
        };
    }
    let Registers { rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
    let args = [rdi, rsi, rdx, r10, r8, r9];
    let is_relative = |operation: u64| operation as i32 & FUTEX_COMMAND == libc::FUTEX_WAIT;
    let remaining_ns = match call {
        libc::SYS_nanosleep => left(call, 0).or_else(|| timespec(rsi)).or_else(|| timespec(rdi)),
        libc::SYS_clock_nanosleep => {
            left(call, rdi).or_else(|| timespec(r10)).or_else(|| timespec(rdx))
        }
        // Other operations take an absolute time.
        libc::SYS_futex if is_relative(rsi) => left(call, 0).or_else(|| timespec(r10)),
        libc::SYS_futex => timespec(r10),
        // A negative timeout is none.
        libc::SYS_poll => {
            let whole = u64::try_from(rdx as i32).ok().map(|ms| ms * 1_000_000);
            whole.and_then(|whole| left(call, 0).or(Some(whole)))
        }
        _ => return None,
    };
    Some(Restart { call, args, remaining_ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_that_continues_is_seen_before_its_call() {
        let code = [0x90u8, 0x0f, 0x05, 0xc3];
        let at = |offset: u64, number: i64| {
            let rip = (&raw const code) as u64 + offset;
            let registers = Registers { rip, rax: number as u64, ..Registers::default() };
            is_to_come(std::process::id(), &registers)
        };
        assert!(at(1, libc::SYS_restart_syscall));
        assert!(!at(0, libc::SYS_restart_syscall), "another instruction");
        assert!(!at(1, libc::SYS_nanosleep), "another call");
        assert!(!at(3, libc::SYS_restart_syscall), "behind the call");
    }

    #[test]
    fn interrupted_calls_restart_or_continue() {
        let of = |call: i64, returned: i64| Registers {
            orig_rax: call as u64,
            rax: returned as u64,
            ..Registers::default()
        };
        let again = begin_again(of(libc::SYS_epoll_wait, -4));
        assert_eq!(again.rax as i64, -ERESTARTNOHAND);
        let read = of(libc::SYS_read, -4);
        assert_eq!(begin_again(read), read, "EINTR of a read is genuine");
        let poll = Registers { rdx: 1500, ..of(libc::SYS_poll, -516) };
        assert_eq!(
            restart(&poll, "", |_| None, |_, _| None).unwrap().remaining_ns,
            Some(1_500_000_000)
        );
        let rest = restart(&poll, "", |_| None, |_, _| Some(7)).unwrap();
        assert_eq!(rest.remaining_ns, Some(7), "the remaining time, not the whole");
        let poll = Registers { rdx: u64::from(u32::MAX), ..poll };
        assert_eq!(restart(&poll, "", |_| None, |_, _| None).unwrap().remaining_ns, None);
        assert!(restart(&of(libc::SYS_poll, -512), "", |_| None, |_, _| None).is_none());
        let again = of(libc::SYS_restart_syscall, -516);
        assert_eq!(
            restart(&again, "do_poll.constprop.0", |_| None, |_, _| None).unwrap().call,
            libc::SYS_poll
        );
        assert!(restart(&again, "0", |_| None, |_, _| None).is_none());
    }
}
