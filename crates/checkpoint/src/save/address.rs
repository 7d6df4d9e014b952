//! Local addresses of sockets of the internet families.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use dormouse_record::SocketOption;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::stack;

/// Whether a socket is bound, if only to an address (IP_BIND_ADDRESS_NO_PORT).
pub(super) fn is_bound(address: &SocketAddr) -> bool {
    address.port() != 0 || !address.ip().is_unspecified()
}

/// Whether a socket is bound to an address that no device of its stack has, and has no option any more that
/// permits the bind (IP_FREEBIND): a restore must set the option for the time of the bind.
pub(super) fn is_of_no_device(
    socket: &OwnedFd,
    address: SocketAddr,
    options: &[SocketOption],
) -> bool {
    const PERMIT: [(i32, i32); 4] = [
        (libc::IPPROTO_IP, libc::IP_FREEBIND),
        (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
        (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND),
        (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT),
    ];
    let ip = address.ip().to_canonical();
    let is_permitted =
        PERMIT.iter().any(|(level, name)| options.iter().any(|o| o.is(*level, *name)));
    if is_permitted || ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() {
        return false;
    }
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let mut any_port = address;
    any_port.set_port(0);
    let bound = stack::of_socket(socket).and_then(|netns| {
        stack::inside_of(&netns, || {
            let new =
                rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            rustix::net::bind(&new, &any_port)
        })
    });
    bound == Err(Errno::ADDRNOTAVAIL)
}
