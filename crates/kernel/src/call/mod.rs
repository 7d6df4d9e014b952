//! One function per system call that `rustix` lacks or leaves unsafe.
//!
//! No function here takes a lock, and only two that return filters ([`packet_filter`], [`filter`])
//! allocate. All others may be used between clone and exec, where a copied lock could be held by a
//! thread that does not exist any more. Strings are [`CStr`]s for the same reason. Errors are bare
//! [`Errno`]s; the modules above add the call and the hint.

mod fanotify;
mod file;
mod memory;
mod mount;
mod pidfd;
mod schedule;
mod socket;
mod task;
mod terminal;
mod trace;
mod userfault;

pub use fanotify::*;
pub use file::*;
pub use memory::*;
pub use mount::*;
pub use pidfd::*;
pub use schedule::*;
pub use socket::*;
pub use task::*;
pub use terminal::*;
pub use trace::*;
pub use userfault::*;

use crate::Errno;

/// Turns what a raw system call returned into a result.
///
/// `libc::syscall` reports through the thread's `errno`, which is thread-local storage and
/// therefore safe to read between clone and exec.
pub(crate) fn check(returned: libc::c_long) -> Result<usize, Errno> {
    if returned >= 0 {
        return Ok(returned as usize);
    }
    // SAFETY: the location is valid for the life of the thread.
    Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }))
}
