//! Signal owners and hints of open files: fcntl(2), the parts that `rustix` lacks.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;
use crate::Errno;

/// The receiver of signals about a file: `struct f_owner_ex`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct FileOwner {
    /// F_OWNER_TID (0), F_OWNER_PID (1), F_OWNER_PGRP (2).
    pub kind: i32,
    /// The thread, process or group, by the caller's ids; 0 for none.
    pub id: i32,
}

/// F_GETOWN_EX (Linux 2.6.32).
pub fn file_owner(file: BorrowedFd<'_>) -> Result<FileOwner, Errno> {
    const F_GETOWN_EX: i32 = 16;
    let mut owner = FileOwner::default();
    let at = &raw mut owner;
    // SAFETY: the kernel writes one `struct f_owner_ex`, which this is.
    check(unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), F_GETOWN_EX, at) })?;
    Ok(owner)
}

/// F_GETSIG: the signal that is sent; 0 for SIGIO.
pub fn file_signal(file: BorrowedFd<'_>) -> Result<i32, Errno> {
    const F_GETSIG: i32 = 11;
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), F_GETSIG, 0) })
        .map(|signal| signal as i32)
}

/// Has the kernel send a signal to this process at the next event of a file, such as the end of a connection (F_SETOWN,
/// F_SETSIG, O_ASYNC); no more for `None`. Other flags of the file are cleared.
pub fn set_file_signal(file: BorrowedFd<'_>, signal: Option<i32>) -> Result<(), Errno> {
    const F_SETSIG: i32 = 10;
    let fcntl = |command: i32, value: i32| {
        // SAFETY: no memory is passed.
        check(unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, value) })
    };
    if let Some(signal) = signal {
        fcntl(libc::F_SETOWN, std::process::id() as i32)?;
        fcntl(F_SETSIG, signal)?;
    }
    fcntl(libc::F_SETFL, if signal.is_some() { libc::O_ASYNC } else { 0 }).map(drop)
}

/// fcntl(2), F_GET_RW_HINT: how long the data of a file is expected to live (RWH_WRITE_LIFE_*). EBADF for a place
/// (O_PATH). Linux 4.13.
pub fn write_hint(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    const GET_RW_HINT: i32 = 1035;
    let mut hint = 0u64;
    // SAFETY: the kernel writes one number of 64 bits to the pointer.
    check(unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), GET_RW_HINT, &raw mut hint) })?;
    Ok(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn new_file_has_no_signal_owner() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(file_owner(file.as_fd()).unwrap().id, 0);
        assert_eq!(file_signal(file.as_fd()).unwrap(), 0);
    }
}
