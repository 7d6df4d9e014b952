//! Packets that the sockets of a container received once, and receive again.
//!
//! A datagram in a queue has its sender's address, and only the sender could send it again. The
//! same holds for the FIN of a peer that has closed its connection. The engine sends these packets
//! on the loopback device of the container's own stack, with the recorded sender. No packet leaves
//! that device: the destination address is that of the socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrV4, SocketAddrV6, SocketFlags, SocketType, ipproto,
};

use crate::{quiet, stack};

/// The payload of an IP packet.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'d> {
    /// A datagram.
    Udp(&'d [u8]),
    /// An ICMP message: an empty datagram from the receiver to the sender did not arrive.
    Unreachable {
        /// The code of the message.
        code: u8,
    },
    /// A segment.
    Tcp {
        /// The number of its first byte.
        sequence: u32,
        /// The number of the next byte that the sender expects.
        acknowledged: u32,
        /// Flags, such as [`FIN`](crate::accept::FIN).
        flags: u8,
        /// The window of the sender, scaled.
        window: u16,
        /// Its bytes.
        data: &'d [u8],
    },
}

/// Sender, receiver and payload.
pub type Packet<'d> = (SocketAddr, SocketAddr, Payload<'d>);

/// Sets the pending error of a connected UDP socket, by the ICMP message that causes it.
pub fn fail(netns: &OwnedFd, socket: &OwnedFd, error: i32) -> Result<(), Errno> {
    let inode = rustix::fs::fstat(socket)?.st_ino;
    let [own, peer] = stack::address(netns, "udp", inode)?.ok_or(Errno::NOTCONN)?;
    let code = unreachable(error, own.is_ipv6()).ok_or(Errno::OPNOTSUPP)?;
    send(netns, &[(peer, own, Payload::Unreachable { code })])
}

/// The code of "destination unreachable" that causes an error (RFC 792, RFC 4443).
fn unreachable(error: i32, v6: bool) -> Option<u8> {
    const BY_FOUR: [(i32, u8); 6] = [
        (libc::ECONNREFUSED, 3),
        (libc::ENOPROTOOPT, 2),
        (libc::ENETUNREACH, 6),
        (libc::EHOSTDOWN, 7),
        (libc::ENONET, 8),
        (libc::EHOSTUNREACH, 10),
    ];
    const BY_SIX: [(i32, u8); 2] = [(libc::ECONNREFUSED, 4), (libc::EACCES, 1)];
    let known = if v6 { &BY_SIX[..] } else { &BY_FOUR[..] };
    known.iter().find(|(known, _)| *known == error).map(|(_, code)| *code)
}

/// `struct group_req`: a device, and at 8 the address of a multicast group in 128 bytes.
pub fn group_request(device: u32, group: IpAddr) -> Vec<u8> {
    let mut bytes = device.to_ne_bytes().to_vec();
    bytes.resize(8, 0);
    let family = if group.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    bytes.extend((family as u16).to_ne_bytes());
    match group {
        IpAddr::V4(ip) => {
            bytes.extend([0; 2]);
            bytes.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes.extend([0; 6]);
            bytes.extend(ip.octets());
        }
    }
    bytes.resize(136, 0);
    bytes
}

/// Makes a socket join a multicast group on a device.
pub fn join(socket: &OwnedFd, device: &str, group: IpAddr) -> Result<(), Errno> {
    const JOIN: i32 = 42; // MCAST_JOIN_GROUP
    stack::inside_of(&stack::of_socket(socket)?, || {
        let index = rustix::net::netdevice::name_to_index(socket, device)?;
        let level = if group.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 };
        call::set_socket_option(socket.as_fd(), level, JOIN, &group_request(index, group))
    })
}

/// Sends packets in a network namespace.
pub fn send(netns: &OwnedFd, packets: &[Packet<'_>]) -> Result<(), Errno> {
    stack::inside_of(netns, || send_here(packets))
}

/// Sends packets in the network namespace of the calling thread.
pub fn send_here(packets: &[Packet<'_>]) -> Result<(), Errno> {
    packets.iter().try_for_each(send_one)
}

fn raw(family: AddressFamily) -> Result<OwnedFd, Errno> {
    // IPPROTO_RAW: the sender writes the header, too.
    let (kind, flags) = (SocketType::RAW, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, kind, flags, Some(ipproto::RAW))?;
    call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_MARK, quiet::MARK)?;
    Ok(socket)
}

fn send_one((from, to, payload): &Packet<'_>) -> Result<(), Errno> {
    let packet = packet(*from, *to, payload).ok_or(Errno::INVAL)?;
    match to.ip().to_canonical() {
        IpAddr::V4(ip) => {
            let socket = raw(AddressFamily::INET)?;
            rustix::net::sendto(&socket, &packet, SendFlags::empty(), &SocketAddrV4::new(ip, 0))?;
        }
        IpAddr::V6(ip) => {
            let socket = raw(AddressFamily::INET6)?;
            let to = SocketAddrV6::new(ip, 0, 0, 0);
            rustix::net::sendto(&socket, &packet, SendFlags::empty(), &to)?;
        }
    }
    Ok(())
}

/// The bytes of a packet. `None` if the two addresses are of two families, or the packet is too
/// long.
fn packet(from: SocketAddr, to: SocketAddr, payload: &Payload<'_>) -> Option<Vec<u8>> {
    let protocol = match payload {
        Payload::Udp(_) => libc::IPPROTO_UDP as u8,
        Payload::Tcp { .. } => libc::IPPROTO_TCP as u8,
        Payload::Unreachable { .. } if to.is_ipv6() => libc::IPPROTO_ICMPV6 as u8,
        Payload::Unreachable { .. } => libc::IPPROTO_ICMP as u8,
    };
    // A connection may require that its segments have passed few routers (IP_MINTTL).
    let hops = if matches!(payload, Payload::Tcp { .. }) { 255 } else { 64 };
    let mut above = above(from, to, payload)?;
    let length = u16::try_from(above.len()).ok()?;
    let mut bytes = Vec::with_capacity(above.len() + 40);
    let mut sum = Sum::default();
    match (from.ip().to_canonical(), to.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            bytes.extend([0x45, 0]);
            bytes.extend(length.checked_add(20)?.to_be_bytes());
            // The kernel sets the identification and computes the header's checksum.
            bytes.extend([0, 0, 0, 0, hops, protocol, 0, 0]);
            bytes.extend(from.octets());
            bytes.extend(to.octets());
            sum.add(&from.octets());
            sum.add(&to.octets());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            bytes.extend([0x60, 0, 0, 0]);
            bytes.extend(length.to_be_bytes());
            bytes.extend([protocol, hops]);
            bytes.extend(from.octets());
            bytes.extend(to.octets());
            sum.add(&from.octets());
            sum.add(&to.octets());
        }
        _ => return None,
    }
    sum.add(&[0, protocol]);
    sum.add(&length.to_be_bytes());
    let at = match payload {
        Payload::Udp(_) => 6,
        Payload::Tcp { .. } => 16,
        Payload::Unreachable { .. } => {
            if to.is_ipv4() {
                sum = Sum::default(); // covers the message only
            }
            2
        }
    };
    sum.add(&above);
    above[at..at + 2].copy_from_slice(&sum.checksum().to_be_bytes());
    bytes.extend(above);
    Some(bytes)
}

fn above(from: SocketAddr, to: SocketAddr, payload: &Payload<'_>) -> Option<Vec<u8>> {
    let mut bytes = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    match payload {
        Payload::Udp(data) => {
            bytes.extend(u16::try_from(data.len() + 8).ok()?.to_be_bytes());
            bytes.extend([0, 0]);
            bytes.extend(*data);
        }
        Payload::Unreachable { code } => {
            let kind = if to.is_ipv6() { 1 } else { 3 };
            bytes = vec![kind, *code, 0, 0, 0, 0, 0, 0];
            bytes.extend(packet(to, from, &Payload::Udp(&[]))?);
        }
        Payload::Tcp { sequence, acknowledged, flags, window, data } => {
            bytes.extend(sequence.to_be_bytes());
            bytes.extend(acknowledged.to_be_bytes());
            bytes.extend([5 << 4, *flags]);
            bytes.extend(window.to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(*data);
        }
    }
    Some(bytes)
}

/// The internet checksum (RFC 1071).
#[derive(Default)]
struct Sum(u64);

impl Sum {
    fn add(&mut self, bytes: &[u8]) {
        for pair in bytes.chunks(2) {
            let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
            self.0 += u64::from(word);
        }
    }

    fn checksum(&self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        // Zero would mean that there is none (RFC 768).
        match !(sum as u16) {
            0 => 0xffff,
            other => other,
        }
    }
}

/// The sender address with which a socket at `to` sees a packet as sent from `from`.
///
/// Where containers share a stack (address mode) each has loopback addresses of its own, computed
/// by the address programs, and sees them as 127.0.0.1 and ::1. A packet from there must be sent
/// from there again.
pub fn sender(from: SocketAddr, to: SocketAddr) -> SocketAddr {
    let ip = match (from.ip().to_canonical(), to.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) if from.is_loopback() && to.is_loopback() => {
            let (asked, own) = (from.to_bits() & 0xff_ffff, to.to_bits() & 0xff_ffc0);
            let own = Ipv4Addr::from_bits(0x7f00_0000 | own | asked.min(63));
            IpAddr::V4(own)
        }
        (IpAddr::V6(Ipv6Addr::LOCALHOST), IpAddr::V6(to)) => IpAddr::V6(to),
        (from, _) => from,
    };
    SocketAddr::new(ip, from.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_has_the_right_checksum() {
        let (from, to) = ("10.0.0.1:5".parse().unwrap(), "10.0.0.2:6".parse().unwrap());
        let bytes = packet(from, to, &Payload::Udp(b"abc")).unwrap();
        assert_eq!(bytes.len(), 31);
        // With its own checksum included, the sum is that of nothing.
        let mut sum = Sum::default();
        sum.add(&bytes[12..20]);
        sum.add(&[0, 17, 0, 11]);
        sum.add(&bytes[20..]);
        assert_eq!(sum.checksum(), 0xffff);
        let other = "[::1]:6".parse().unwrap();
        assert!(packet(from, other, &Payload::Udp(b"")).is_none(), "two families");
        assert!(packet(from, to, &Payload::Udp(&[0; 65_530])).is_none(), "too long");
    }

    #[test]
    fn loopback_senders_get_an_address_of_the_container() {
        let own: SocketAddr = "127.0.1.65:9".parse().unwrap();
        assert_eq!(sender("127.0.0.2:7".parse().unwrap(), own), "127.0.1.66:7".parse().unwrap());
        let far: SocketAddr = "192.0.2.1:9".parse().unwrap();
        assert_eq!(sender(far, own), far);
    }
}
