//! Memory that is filled on page faults (userfaultfd(2), ioctl_userfaultfd(2)).
//!
//! A userfaultfd belongs to the address space that created it. Any process holding the descriptor
//! can resolve faults and receives the events of its ranges.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

use super::check;

/// The ioctl of `/dev/userfaultfd` that makes a descriptor, with [`NEW_FLAGS`]. KERNEL(6.1).
pub const USERFAULTFD_NEW: u64 = 0xAA00;
/// Closed on exec, and a read never waits.
pub const NEW_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
/// Bytes of one message.
pub const MESSAGE_BYTES: usize = 32;

const API: libc::Ioctl = 0xC018_AA3F_u32 as libc::Ioctl;
const REGISTER: libc::Ioctl = 0xC020_AA00_u32 as libc::Ioctl;
const WAKE: libc::Ioctl = 0x8010_AA02_u32 as libc::Ioctl;
const COPY: libc::Ioctl = 0xC028_AA03_u32 as libc::Ioctl;
const ZERO: libc::Ioctl = 0xC020_AA04_u32 as libc::Ioctl;

/// The contents of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UserfaultEvent {
    /// A thread is blocked on the page at this address.
    Fault(u64),
    /// The address space was copied by fork(2): the copy's own descriptor, by its number in the
    /// table of the reader.
    Fork(i32),
    /// A range has moved (mremap(2)).
    Moved {
        /// The old address.
        from: u64,
        /// The new address.
        to: u64,
        /// Its length in bytes.
        bytes: u64,
    },
    /// The pages of a range are given up, and are zeros when they are touched (madvise(2)).
    Removed(std::ops::Range<u64>),
    /// A range is mapped no more.
    Unmapped(std::ops::Range<u64>),
}

impl UserfaultEvent {
    /// Decodes a message of 64-bit numbers; `None` for any other kind.
    pub fn decode(message: [u64; MESSAGE_BYTES / 8]) -> Option<Self> {
        let [kind, a, b, c] = message;
        match kind & 0xff {
            // Flags come before the address.
            0x12 => Some(Self::Fault(b & !4095)),
            0x13 => Some(Self::Fork(a as u32 as i32)),
            0x14 => Some(Self::Moved { from: a, to: b, bytes: c }),
            0x15 => Some(Self::Removed(a..b)),
            0x16 => Some(Self::Unmapped(a..b)),
            _ => None,
        }
    }
}

/// Enables faults and all events of anonymous memory. EPERM without permission to trace other
/// processes, EINVAL if the kernel lacks one of the events. KERNEL(4.14).
pub fn userfault_begin(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    const VERSION: u64 = 0xAA;
    const FORK: u64 = 1 << 1;
    const REMAP: u64 = 1 << 2;
    const REMOVE: u64 = 1 << 3;
    const UNMAP: u64 = 1 << 6;
    let mut api = [VERSION, FORK | REMAP | REMOVE | UNMAP, 0];
    // SAFETY: the structure has three numbers, and is ours.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), API, api.as_mut_ptr()) }.into()).map(drop)
}

/// From here on, access to a missing page of the range blocks.
pub fn userfault_register(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<(), Errno> {
    const MISSING: u64 = 1;
    let mut register = [start, bytes, MISSING, 0];
    // SAFETY: the structure has four numbers, and is ours; the range is of another's memory.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), REGISTER, register.as_mut_ptr()) }.into()).map(drop)
}

/// Flags of userfaultfd(2) for [`userfault_note_writes`], which needs no privilege: faults in
/// kernel mode are not reported, and the descriptor is not read at all. KERNEL(5.11).
pub const NOTE_FLAGS: u64 = NEW_FLAGS | 1;

/// A descriptor of the caller's own address space, with [`NOTE_FLAGS`].
pub fn userfault_noting() -> Result<OwnedFd, Errno> {
    // SAFETY: only integers are passed.
    let fd = check(unsafe { libc::syscall(libc::SYS_userfaultfd, NOTE_FLAGS) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Enables recording of writes to protected pages ([`super::Scan`]) on a new descriptor; no thread
/// ever blocks on it. EINVAL if the kernel lacks this. KERNEL(6.7).
pub fn userfault_note_writes(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    const VERSION: u64 = 0xAA;
    const WRITE_PROTECTION: u64 = 1;
    const WITHOUT_WAITING: u64 = 1 << 15;
    let mut api = [VERSION, WRITE_PROTECTION | WITHOUT_WAITING, 0];
    // SAFETY: the structure has three numbers, and is ours.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), API, api.as_mut_ptr()) }.into()).map(drop)
}

/// Records writes to a range of whole areas from then on, once its pages are protected.
pub fn userfault_register_writes(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<(), Errno> {
    const WRITES: u64 = 2;
    let mut register = [start, bytes, WRITES, 0];
    // SAFETY: the structure has four numbers, and is ours; the range is of another's memory.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), REGISTER, register.as_mut_ptr()) }.into()).map(drop)
}

/// Fills missing pages from `to` on, and wakes the threads blocked on them. On an error returns how
/// many bytes were filled and the cause at the next page: EEXIST if it is present, ENOENT if the
/// range is not registered (any more), EAGAIN while an event waits to be read, ESRCH if the whole
/// address space is gone.
pub fn userfault_copy(fd: BorrowedFd<'_>, to: u64, pages: &[u8]) -> Result<(), (u64, Errno)> {
    let mut copy = [to, pages.as_ptr() as u64, pages.len() as u64, 0, 0];
    // SAFETY: the structure has five numbers, and is ours; it reads a slice of that length.
    let done = check(unsafe { libc::ioctl(fd.as_raw_fd(), COPY, copy.as_mut_ptr()) }.into());
    done.map(drop).map_err(|e| (copied(copy[4]), e))
}

/// The same with pages of zeros.
pub fn userfault_zero(fd: BorrowedFd<'_>, to: u64, bytes: u64) -> Result<(), (u64, Errno)> {
    let mut zero = [to, bytes, 0, 0];
    // SAFETY: the structure has four numbers, and is ours.
    let done = check(unsafe { libc::ioctl(fd.as_raw_fd(), ZERO, zero.as_mut_ptr()) }.into());
    done.map(drop).map_err(|e| (copied(zero[3]), e))
}

/// The last field of a structure: bytes that were done, or an error.
fn copied(field: u64) -> u64 {
    u64::try_from(field.cast_signed()).unwrap_or(0)
}

/// Wakes threads that are blocked on a page of the range; they fault again if it is missing.
pub fn userfault_wake(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<(), Errno> {
    let mut range = [start, bytes];
    // SAFETY: the structure has two numbers, and is ours.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), WAKE, range.as_mut_ptr()) }.into()).map(drop)
}

/// A descriptor of the caller's own address space. KERNEL(6.1).
pub fn userfault_new(device: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let request = USERFAULTFD_NEW as libc::Ioctl;
    // SAFETY: only integers are passed.
    let fd = check(unsafe { libc::ioctl(device.as_raw_fd(), request, NEW_FLAGS) }.into())?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
