//! The receive queue of a unix or UDP socket, and where the last write of a stream begins in a peek.
//!
//! recvmsg(2) with MSG_PEEK returns the data of several writes, and the descriptors of one of them,
//! as if they were one. But a write that cannot be copied in full is left out as a whole. So a peek
//! with memory for all but the last byte, followed by an unmapped address, ends with the write
//! before the last.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use dormouse_kernel::Errno;

/// One peek at the receive queue of a socket.
#[derive(Debug)]
pub(crate) struct Peeked {
    pub(crate) bytes: usize,
    /// The sender's address, without its family: `sun_path` of a unix socket.
    pub(crate) from: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Pid, user and group of the sender, as this process sees them, if they are included. The pid
    /// is 0 if the kernel has none.
    pub(crate) sender: Option<[u32; 3]>,
    /// The bytes of each datagram, if several were received as one (UDP_GRO).
    pub(crate) segment_bytes: Option<usize>,
    /// Nothing else is included, and nothing was cut off.
    pub(crate) is_whole: bool,
}

/// Peeks at the next message, which stays in the queue. Its descriptors are copied.
pub(crate) fn message(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Peeked, Errno> {
    // As many descriptors as one message can have, and some space for other items.
    let mut control = [0u64; 256];
    let mut name = [0u8; 128];
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a msghdr of zeros is one without name and control.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_name = name.as_mut_ptr().cast();
    head.msg_namelen = name.len() as libc::socklen_t;
    head.msg_iov = &raw mut piece;
    head.msg_iovlen = 1;
    head.msg_control = control.as_mut_ptr().cast();
    head.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the kernel writes to buffer, name and control, no more than their lengths say.
    let bytes = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut head, flags) };
    if bytes < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error();
        return Err(Errno::from_raw_os_error(errno.unwrap_or(libc::EIO)));
    }
    let from = name.get(size_of::<libc::sa_family_t>()..head.msg_namelen as usize);
    let mut peeked = Peeked {
        bytes: bytes as usize,
        from: from.unwrap_or_default().to_vec(),
        descriptors: Vec::new(),
        sender: None,
        segment_bytes: None,
        is_whole: head.msg_flags & (libc::MSG_CTRUNC | libc::MSG_TRUNC) == 0,
    };
    let control: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut rest = &control[..control.len().min(head.msg_controllen)];
    // struct cmsghdr: its length with this head, level, type; then data, filled up to 8 bytes.
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let length = usize::from_ne_bytes(*length);
        let Some(said) = after.get(..length.wrapping_sub(8)) else { break };
        let word = |at: usize| {
            let bytes = said.get(at..).and_then(|rest| rest.first_chunk());
            bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
        };
        match (word(0) as i32, word(4) as i32) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for n in 0..said.len().saturating_sub(8) / 4 {
                    // SAFETY: the kernel has made this descriptor for this call.
                    let made = unsafe { OwnedFd::from_raw_fd(word(8 + n * 4) as i32) };
                    peeked.descriptors.push(made);
                }
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                peeked.sender = Some([word(8), word(12), word(16)]);
            }
            (libc::SOL_UDP, libc::UDP_GRO) => peeked.segment_bytes = Some(word(8) as usize),
            (libc::SOL_SOCKET, SCM_PIDFD) => {
                // SAFETY: as above; a negative number is an error.
                drop(
                    (word(8) as i32 >= 0).then(|| unsafe { OwnedFd::from_raw_fd(word(8) as i32) }),
                );
                peeked.is_whole = false;
            }
            _ => peeked.is_whole = false,
        }
        rest = rest.get(length.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(peeked)
}

/// KERNEL(6.5): a pidfd of the sender.
const SCM_PIDFD: i32 = 4;

/// How many of the bytes that a peek returns were written before the last write among them.
/// `buffer` has their length; its contents are undefined afterwards.
pub(crate) fn before_last_write(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    let Some(length) = buffer.len().checked_sub(1) else { return Ok(0) };
    // The lowest page is never mapped.
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
    // SAFETY: the kernel writes to the buffer, no more than the length of the first piece, and to
    // no other memory: the second piece is unmapped, and an access to it faults. Descriptors, for
    // which there is no space, are not installed.
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
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use rustix::net::sockopt::set_socket_passcred;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    use super::*;

    #[test]
    fn the_last_write_is_separated_from_earlier_ones() {
        let (mut to, from) = UnixStream::pair().unwrap();
        to.write_all(b"before").unwrap();
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 6]), Ok(0));
        to.write_all(b"and").unwrap();
        to.write_all(b"last").unwrap();
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 13]), Ok(9));
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 9]), Ok(6));
        assert_eq!(before_last_write(from.as_fd(), &mut [0; 1]), Ok(0));
    }

    #[test]
    fn a_message_is_peeked_with_all_control_data() {
        let (one, other) = UnixDatagram::pair().unwrap();
        set_socket_passcred(&other, true).unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let both = [one.as_fd(), other.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&both)));
        let data = [std::io::IoSlice::new(b"data")];
        rustix::net::sendmsg(&one, &data, &mut control, SendFlags::empty()).unwrap();
        let mut buffer = [0; 16];
        for _ in 0..2 {
            let peeked = message(other.as_fd(), &mut buffer).unwrap();
            assert_eq!((&buffer[..peeked.bytes], peeked.descriptors.len()), (&b"data"[..], 2));
            let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
            let own = [std::process::id(), uid.as_raw(), gid.as_raw()];
            assert_eq!((peeked.sender, peeked.is_whole), (Some(own), true));
            assert!(peeked.from.is_empty());
        }
        let cut = message(other.as_fd(), &mut buffer[..3]).unwrap();
        assert!(!cut.is_whole);
    }
}
