//! Refusals of connections that are being made: a reset (RST) in the name of the other side, which has not seen the
//! first packet. connect(2) then fails with ECONNREFUSED, as where no socket listens.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto};

use crate::error::{Explain, Result};

/// Reset and acknowledgement.
const FLAGS: u8 = 0x14;
const TCP_BYTES: usize = 20;
const HOPS: u8 = 64;

/// What sends resets, in the stack of the thread that opened it.
#[derive(Debug)]
pub struct Resets {
    /// For packets with their headers: of IPv4, and of IPv6 where the kernel has it.
    sockets: (OwnedFd, Option<OwnedFd>),
}

impl Resets {
    /// Opens it. EPERM without CAP_NET_RAW over the stack.
    pub fn open() -> Result<Self> {
        let open = |family| {
            let kind = SocketType::RAW;
            rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, Some(ipproto::RAW))
        };
        let v4 = open(AddressFamily::INET).explain("socket", || "AF_INET, SOCK_RAW".into())?;
        Ok(Self { sockets: (v4, open(AddressFamily::INET6).ok()) })
    }

    /// Answers the first packet from the first to the second, with this sequence number.
    pub fn refuse(&self, [from, to]: [SocketAddr; 2], sequence: u32) -> Result<()> {
        let Some(packet) = packet(to, from, sequence.wrapping_add(1)) else { return Ok(()) };
        let socket = match from.is_ipv4() {
            true => &self.sockets.0,
            false => match &self.sockets.1 {
                Some(socket) => socket,
                None => return Ok(()),
            },
        };
        let there = SocketAddr::new(from.ip(), 0);
        rustix::net::sendto(socket, &packet, SendFlags::empty(), &there)
            .map(drop)
            .explain("sendto", || format!("a reset to {}", from.ip()))
    }
}

/// A reset with the header of its family; `None` for addresses of two.
fn packet(from: SocketAddr, to: SocketAddr, acknowledged: u32) -> Option<Vec<u8>> {
    let mut tcp = [0; TCP_BYTES];
    tcp[..2].copy_from_slice(&from.port().to_be_bytes());
    tcp[2..4].copy_from_slice(&to.port().to_be_bytes());
    tcp[8..12].copy_from_slice(&acknowledged.to_be_bytes());
    (tcp[12], tcp[13]) = ((TCP_BYTES as u8 / 4) << 4, FLAGS);
    let mut ip = Vec::with_capacity(60);
    let ends = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            // The kernel writes the sum of this header.
            ip.extend([0x45, 0, 0, 20 + TCP_BYTES as u8, 0, 0, 0x40, 0, HOPS, 6, 0, 0]);
            [from.octets(), to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            ip.extend([0x60, 0, 0, 0, 0, TCP_BYTES as u8, 6, HOPS]);
            [from.octets(), to.octets()].concat()
        }
        _ => return None,
    };
    ip.extend(&ends);
    let sum = sum(&[&ends[..], &[0, 6, 0, TCP_BYTES as u8], &tcp].concat());
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    ip.extend(tcp);
    Some(ip)
}

/// The sum of the internet protocols (RFC 1071), of an even number of bytes.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_over_a_packet_with_its_own_sum_is_none() {
        for (from, to) in [("10.0.0.1:80", "10.0.0.2:12345"), ("[fd00::1]:80", "[fd00::2]:9")] {
            let [from, to]: [SocketAddr; 2] = [from, to].map(|end| end.parse().unwrap());
            let packet = packet(from, to, 0x0102_0304).unwrap();
            let (ip, tcp) = packet.split_at(packet.len() - TCP_BYTES);
            let addresses = if from.is_ipv4() { &ip[12..] } else { &ip[8..] };
            let all = [addresses, &[0, 6, 0, 20], tcp].concat();
            assert_eq!(sum(&all), 0);
            assert_eq!(tcp[8..14], [1, 2, 3, 4, 0x50, 0x14]);
        }
        let mixed = packet("10.0.0.1:80".parse().unwrap(), "[fd00::2]:9".parse().unwrap(), 0);
        assert_eq!(mixed, None);
    }
}
