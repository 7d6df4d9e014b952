//! Calls that begin again, with what is left of their time.
//!
//! Such a call has its limit in a register, or a register leads to it. What it leads to is the
//! program's own, which may use it again: so what is left is written below the stack, beyond what a
//! function may use there (System V ABI, the red zone), where the kernel would put a signal's frame, and
//! the register leads there. Nobody else uses that while the thread waits.
//!
//! LIMIT: in a register that the call leaves alone the program then finds what was left, where it has
//! the call in its own code (syscall(2) and the C libraries look at it no more).

use dormouse_kernel::call::{self, Registers};

use crate::format::TimeLimit;

const RED_ZONE_BYTES: u64 = 128;

/// The register that has or leads to the limit of a call.
enum Place {
    Milliseconds(fn(&mut Registers) -> &mut u64),
    Timespec(fn(&mut Registers) -> &mut u64),
}

fn place(call: i64) -> Option<Place> {
    Some(match call {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => Place::Milliseconds(|r| &mut r.r10),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => Place::Timespec(|r| &mut r.r10),
        libc::SYS_rt_sigtimedwait => Place::Timespec(|r| &mut r.rdx),
        libc::SYS_io_getevents => Place::Timespec(|r| &mut r.r8),
        _ => return None,
    })
}

/// Registers of a stopped thread with which its call begins again so that it ends in time. Where memory
/// cannot be written it has all of its time again.
pub(crate) fn begin_again(tid: u32, registers: Registers, limit: &TimeLimit) -> Registers {
    let mut again = registers;
    if !limit.begins_anew() || registers.orig_rax as i64 != limit.call {
        return registers;
    }
    let left_ns = limit.left_ns;
    match place(limit.call) {
        None => {}
        // Never too early.
        Some(Place::Milliseconds(register)) => {
            *register(&mut again) = left_ns.div_ceil(1_000_000).min(i32::MAX as u64);
        }
        Some(Place::Timespec(register)) => {
            let time = [left_ns / 1_000_000_000, left_ns % 1_000_000_000].map(u64::to_ne_bytes);
            let bytes = time.as_flattened();
            let below = RED_ZONE_BYTES + bytes.len() as u64;
            let address = registers.rsp.saturating_sub(below) & !15;
            if call::write_memory(tid, address, bytes) == Ok(bytes.len()) {
                *register(&mut again) = address;
            }
        }
    }
    again
}
