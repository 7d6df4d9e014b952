//! The memory of other processes, and where it is swapped to.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::check;

/// process_madvise(2) with MADV_PAGEOUT, of one range: its pages go to swap or to their files, and
/// are read back when touched. Returns how many bytes were processed. Pages shared by several
/// processes stay. EINVAL for locked or device memory. KERNEL(5.10).
pub fn page_out(pidfd: BorrowedFd<'_>, address: u64, bytes: u64) -> Result<usize, Errno> {
    const PAGE_OUT: i32 = 21;
    let range = libc::iovec { iov_base: address as *mut _, iov_len: bytes as usize };
    // SAFETY: one range is read; its address is another process's, whose contents stay as they are.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            &raw const range,
            1usize,
            PAGE_OUT,
            0u32,
        )
    })
}

/// swapon(2), with a priority from 0 to 32767.
pub fn swap_on(path: &CStr, priority: u16) -> Result<(), Errno> {
    const PREFER: i32 = 0x8000;
    let flags = PREFER | i32::from(priority & 0x7fff);
    // SAFETY: the path ends with a zero.
    check(unsafe { libc::syscall(libc::SYS_swapon, path.as_ptr(), flags) }).map(drop)
}
