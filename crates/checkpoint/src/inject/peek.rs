//! Where the last write of a stream begins that a look at its queue shows.
//!
//! recvmsg(2) with MSG_PEEK shows what several writes have left, and descriptors that came with one of
//! them, as if they were one. But a write of which a part cannot be copied is left out as a whole: so a
//! look that is given memory for all but the last byte, and then an address where there is none, ends
//! with the write before the last.

use std::os::fd::{AsRawFd, BorrowedFd};

use dormouse_kernel::Errno;

/// How many of the bytes that a look shows were written before the last write among them. `buffer` is
/// of their number; what is left in it means nothing.
pub(crate) fn before_last_write(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    let Some(length) = buffer.len().checked_sub(1) else { return Ok(0) };
    // The lowest page is nobody's.
    const NOWHERE: usize = 1;
    let mut pieces = [
        libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: length },
        libc::iovec { iov_base: std::ptr::without_provenance_mut(NOWHERE), iov_len: 1024 },
    ];
    // SAFETY: a msghdr of zeros is one without name and control.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_iov = pieces.as_mut_ptr();
    head.msg_iovlen = pieces.len();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes to the buffer, no more than the first piece says, and to no other
    // memory: the second piece leads to none, of which it hears by a fault. Descriptors, for which
    // there is no room, are not installed.
    let copied = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut head, flags) };
    match copied {
        -1 => match std::io::Error::last_os_error().raw_os_error() {
            // Nothing was copied before the fault.
            Some(libc::EFAULT) => Ok(0),
            other => Err(Errno::from_raw_os_error(other.unwrap_or(libc::EIO))),
        },
        copied => Ok(copied as usize),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_last_write_is_told_from_those_before() {
        let (mut to, from) = UnixStream::pair().unwrap();
        to.write_all(b"before").unwrap();
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 6]), Ok(0));
        to.write_all(b"and").unwrap();
        to.write_all(b"last").unwrap();
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 13]), Ok(9));
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 9]), Ok(6));
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 1]), Ok(0));
    }
}
