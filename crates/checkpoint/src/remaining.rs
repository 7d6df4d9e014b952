//! Calls that restart with their remaining time.
//!
//! Such a call has its timeout in a register, or a register points to it. The memory there is the
//! program's own, which may use it again. So the remaining time is written below the stack, beyond
//! the part that a function may use there (System V ABI, the red zone), where the kernel would put
//! a signal frame, and the register points there. Nothing else uses that memory while the thread
//! waits.
//!
//! LIMIT: in a register that the call preserves the program then finds the remaining time, if its
//! own code makes the call (syscall(2) and the C libraries do not read it again).

use dormouse_kernel::call::{self, Registers};
use dormouse_record::TimeLimit;

const RED_ZONE_BYTES: u64 = 128;

/// The register that contains or points to the timeout of a call.
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

/// The name of the register of a call that a restart may change, as records name it.
pub(crate) fn register(limit: &TimeLimit) -> Option<&'static str> {
    if !limit.begins_anew() {
        return None;
    }
    Some(match limit.call {
        libc::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | libc::SYS_semtimedop => "r10",
        libc::SYS_rt_sigtimedwait => "rdx",
        libc::SYS_io_getevents => "r8",
        _ => return None,
    })
}

/// Registers of a stopped thread with which its call restarts so that it ends in time. If memory
/// cannot be written, the call has its whole time again.
pub(crate) fn begin_again(tid: u32, registers: Registers, limit: &TimeLimit) -> Registers {
    let mut again = registers;
    if !limit.begins_anew() || registers.orig_rax as i64 != limit.call {
        return registers;
    }
    let left_ns = limit.left_ns;
    match place(limit.call) {
        None => {}
        // Rounded up: never too early.
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
