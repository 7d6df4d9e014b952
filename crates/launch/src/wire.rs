//! Messages with descriptors over a SOCK_SEQPACKET socket (unix(7)).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};

/// LIMIT: descriptors in one message (SCM_MAX_FD).
pub const FDS_PER_MESSAGE: usize = 253;

/// Sends one message. EPIPE if the other side is closed; no signal is raised.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    loop {
        let iov = [IoSlice::new(bytes)];
        match sendmsg(&socket, &iov, &mut control, flags | SendFlags::NOSIGNAL) {
            Ok(n) if n == bytes.len() => return Ok(()),
            Ok(_) => return Err(Errno::MSGSIZE),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Receives one message into `bytes` and passes each descriptor to `keep`. Returns the length; 0 at
/// the end of the connection. EMSGSIZE if the message or its descriptors did not fit.
pub fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
    mut keep: impl FnMut(OwnedFd),
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(bytes)];
        match recvmsg(&socket, &mut iov, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => {
                for part in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = part {
                        rights.for_each(&mut keep);
                    }
                }
                if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
                    return Err(Errno::MSGSIZE);
                }
                return Ok(message.bytes);
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Returns whether the other end of a socket is open and has sent nothing that was not read.
pub fn is_quiet(socket: impl AsFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(recv(socket, &mut [0; 1][..], flags), Err(Errno::AGAIN))
}
