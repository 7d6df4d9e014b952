//! UDP sockets: names, and datagrams, which are left in their queue by MSG_PEEK.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, SocketType, getpeername, getsockname, ipproto, recvmsg,
};

use super::object::{Open, Why};
use super::option;
use crate::format::{Bytes, Datagram, Thing, UdpSocket};

pub(super) fn save(open: &Open<'_>, domain: AddressFamily) -> Result<Thing, Why> {
    let failed = |e: Errno| format!("a UDP socket: {e}");
    let socket = open.copy.as_fd();
    let options = option::read(socket, domain, SocketType::DGRAM, Some(ipproto::UDP))?;
    let address = getsockname(&open.copy).and_then(SocketAddr::try_from).map_err(failed)?;
    let peer = match getpeername(&open.copy) {
        Ok(peer) => {
            let peer = peer.ok_or(Errno::INVAL).and_then(SocketAddr::try_from);
            Some(peer.map_err(failed)?)
        }
        Err(Errno::NOTCONN) => None,
        Err(e) => return Err(failed(e)),
    };
    let received = queue(&open.copy).map_err(failed)?;
    Ok(Thing::UdpSocket(UdpSocket {
        v6: domain == AddressFamily::INET6,
        flags: open.flags(),
        address: Some(address).filter(|a| a.port() != 0),
        peer,
        received: received.ok_or("a UDP socket with a datagram of unknown origin")?,
        options,
    }))
}

/// What it has received. A datagram of nothing is shown once to those who only look, and never
/// again.
fn queue(socket: &OwnedFd) -> Result<Option<Vec<Datagram>>, Errno> {
    let before = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    let peek_at =
        |offset| call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset);
    peek_at(0)?;
    let mut all = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    let result = loop {
        let mut control = rustix::net::RecvAncillaryBuffer::default();
        let mut iov = [std::io::IoSliceMut::new(&mut buffer)];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recvmsg(socket, &mut iov, &mut control, flags) {
            Err(Errno::AGAIN) => break Ok(Some(all)),
            Err(e) => break Err(e),
            Ok(got) if got.flags.contains(ReturnFlags::TRUNC) => break Ok(None),
            Ok(got) => match got.address.map(SocketAddr::try_from) {
                Some(Ok(from)) => {
                    all.push(Datagram { from, data: Bytes(buffer[..got.bytes].to_vec()) });
                }
                Some(Err(_)) | None => break Ok(None),
            },
        }
    };
    peek_at(before)?;
    result
}
