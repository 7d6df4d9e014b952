//! Options of sockets by number (getsockopt(2), setsockopt(2)), for those who save sockets.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;
use crate::Errno;

/// getsockopt(2) into a buffer; gives how much of it was filled.
pub fn socket_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    buffer: &mut [u8],
) -> Result<usize, Errno> {
    let mut length = buffer.len() as libc::socklen_t;
    // SAFETY: the kernel writes no more than the length says, which is the buffer's.
    check(unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            socket.as_raw_fd(),
            level,
            name,
            buffer.as_mut_ptr(),
            &raw mut length,
        )
    })?;
    Ok(length as usize)
}

/// getsockopt(2) of an option that is an int.
pub fn int_option(socket: BorrowedFd<'_>, level: i32, name: i32) -> Result<i32, Errno> {
    let mut bytes = [0; 4];
    socket_option(socket, level, name, &mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// setsockopt(2) of an option of any length.
pub fn set_socket_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: &[u8],
) -> Result<(), Errno> {
    // SAFETY: pointer and length describe the value, which the kernel only reads.
    check(unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            socket.as_raw_fd(),
            level,
            name,
            value.as_ptr(),
            value.len(),
        )
    })
    .map(drop)
}

/// Bytes that a TCP socket has not had acknowledged, and how many of them it has not sent (tcp(7):
/// SIOCOUTQ, and SIOCOUTQNSD since 2.6.36).
pub fn send_queue(socket: BorrowedFd<'_>) -> Result<(u32, u32), Errno> {
    const WAITING: u64 = 0x5411;
    const UNSENT: u64 = 0x894b;
    let mut found = [0i32; 2];
    for (value, request) in found.iter_mut().zip([WAITING, UNSENT]) {
        // SAFETY: both requests write one int.
        check(unsafe {
            libc::syscall(libc::SYS_ioctl, socket.as_raw_fd(), request, &raw mut *value)
        })?;
    }
    Ok((found[0] as u32, found[1] as u32))
}

/// setsockopt(2) of an option that is an int.
pub fn set_int_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: i32,
) -> Result<(), Errno> {
    set_socket_option(socket, level, name, &value.to_ne_bytes())
}
