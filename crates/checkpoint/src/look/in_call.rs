//! The call that a thread is blocked in, before it is stopped.
//!
//! A thread that is stopped in the middle of a call restarts it (-ERESTARTSYS and its like), and
//! the return value in its registers shows that. Such a value is no proof that the thread was
//! blocked: the kernel checks for signals in other places, too. A call that was interrupted there
//! (sendfile(2) to a socket with space, Linux 6.18) was active, and waits for nothing. The call is
//! therefore read just before the stop, and the thread must be in the same call afterwards.
//!
//! LIMIT: a thread may be woken between that read and the stop, some microseconds, complete its
//! work and enter the same call again without blocking yet. The thread counts as blocked all the
//! time.

use dormouse_kernel::call::Registers;
use dormouse_kernel::proc;

/// A call, as proc_pid_syscall(5) shows it for a blocked thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InCall {
    pub(crate) number: i64,
    pub(crate) arguments: [u64; 6],
    stack: u64,
    place: u64,
}

impl InCall {
    /// Reads the call of a thread; `None` if it runs, or is blocked outside any call (at a page
    /// fault).
    pub(crate) fn of(tid: u32) -> Option<Self> {
        Self::read(&proc::whole_text(format!("/proc/{tid}/syscall")).ok()?)
    }

    /// Parses a line `NUMBER ARGUMENT... STACK PLACE`.
    pub(crate) fn read(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let number = words.next()?.parse().ok().filter(|number| *number >= 0)?;
        let mut hex = || u64::from_str_radix(words.next()?.trim_start_matches("0x"), 16).ok();
        let mut arguments = [0; 6];
        for argument in &mut arguments {
            *argument = hex()?;
        }
        Some(Self { number, arguments, stack: hex()?, place: hex()? })
    }

    /// Whether the registers of the since stopped thread show the same call.
    pub(crate) fn is_of(&self, registers: &Registers) -> bool {
        let Registers { rdi, rsi, rdx, r10, r8, r9, orig_rax, rsp, rip, .. } = *registers;
        // Arguments of 32-bit calls are in other registers.
        let arguments = match registers.are_of_64_bit() {
            true => [rdi, rsi, rdx, r10, r8, r9],
            false => self.arguments,
        };
        *self == Self { number: orig_rax as i64, arguments, stack: rsp, place: rip }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_matches_the_registers_of_its_call() {
        let line = "43 0x3 0x7ffe1 0x7ffe2 0x4 0x5 0x6 0x7ff0 0x48194\n";
        let call = InCall::read(line).unwrap();
        assert_eq!((call.number, call.arguments[5]), (43, 6));
        let registers = Registers {
            orig_rax: 43,
            rdi: 3,
            rsi: 0x7_ffe1,
            rdx: 0x7_ffe2,
            r10: 4,
            r8: 5,
            r9: 6,
            rsp: 0x7ff0,
            rip: 0x4_8194,
            cs: 0x33,
            ..Registers::default()
        };
        assert!(call.is_of(&registers));
        for other in [
            Registers { orig_rax: 40, ..registers },
            Registers { rdi: 1, ..registers },
            Registers { rsp: 0x7fe8, ..registers },
            Registers { rip: 0x4_8196, ..registers },
        ] {
            assert!(!call.is_of(&other), "{other:?}");
        }
        let of_32_bits = Registers { cs: 0x23, rdi: 0, rbx: 3, ..registers };
        assert!(call.is_of(&of_32_bits));
    }

    #[test]
    fn line_without_a_call_is_none() {
        for line in
            ["running", "-1 0x7ffe 0x7f00", "", "43 0x3", "x 0x3 0x0 0x0 0x0 0x0 0x0 0x1 0x2"]
        {
            assert_eq!(InCall::read(line), None, "{line}");
        }
    }
}
