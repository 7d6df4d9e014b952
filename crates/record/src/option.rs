//! Options of sockets.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// One option of a socket (setsockopt(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOption {
    /// `SOL_SOCKET` or a protocol.
    pub level: i32,
    /// The number of the option.
    pub name: i32,
    /// Its value, in the form of setsockopt(2).
    pub value: Bytes,
}

/// Option of raw(7), with the same number for ICMP and ICMPv6.
const ICMP_FILTER: i32 = 1;
/// Options of packet(7).
const PACKET_ORIGDEV: i32 = 9;
const PACKET_VNET_HDR: i32 = 15;
const PACKET_IGNORE_OUTGOING: i32 = 23;
/// LIMIT: instructions of a packet filter.
const INSTRUCTIONS_MAX: usize = 4096;

/// Options that are saved, and the only ones that are restored: level, number, bytes of the value.
pub const OPTIONS: [(i32, i32, usize); 72] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, 4),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, 4),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE, 4),
    (libc::SOL_SOCKET, libc::SO_BROADCAST, 4),
    (libc::SOL_SOCKET, libc::SO_SNDBUF, 4),
    (libc::SOL_SOCKET, libc::SO_RCVBUF, 4),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 4),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, 4),
    (libc::SOL_SOCKET, libc::SO_NO_CHECK, 4),
    (libc::SOL_SOCKET, libc::SO_PRIORITY, 4),
    (libc::SOL_SOCKET, libc::SO_LINGER, 8),
    (libc::SOL_SOCKET, libc::SO_PASSCRED, 4),
    (libc::SOL_SOCKET, libc::SO_PASSSEC, 4),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 4),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO, 16),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO, 16),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, 4),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 4),
    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 4),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF, 4),
    (libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 4),
    (libc::IPPROTO_IP, libc::IP_TOS, 4),
    (libc::IPPROTO_IP, libc::IP_TTL, 4),
    (libc::IPPROTO_IP, libc::IP_PKTINFO, 4),
    (libc::IPPROTO_IP, libc::IP_RECVERR, 4),
    (libc::IPPROTO_IP, libc::IP_RECVTTL, 4),
    (libc::IPPROTO_IP, libc::IP_RECVTOS, 4),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, 4),
    (libc::IPPROTO_IP, libc::IP_FREEBIND, 4),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, 4),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, 4),
    (libc::IPPROTO_IP, libc::IP_HDRINCL, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_CHECKSUM, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_HDRINCL, 4),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 4),
    (libc::IPPROTO_TCP, libc::TCP_CORK, 4),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 4),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 4),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 4),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT, 4),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2, 4),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 4),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 4),
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 4),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION, 16),
    (libc::SOL_RAW, ICMP_FILTER, 4),
    (libc::SOL_ICMPV6, ICMP_FILTER, 32),
    (libc::SOL_PACKET, libc::PACKET_AUXDATA, 4),
    (libc::SOL_PACKET, PACKET_ORIGDEV, 4),
    (libc::SOL_PACKET, libc::PACKET_VERSION, 4),
    (libc::SOL_PACKET, libc::PACKET_RESERVE, 4),
    (libc::SOL_PACKET, libc::PACKET_LOSS, 4),
    (libc::SOL_PACKET, PACKET_VNET_HDR, 4),
    (libc::SOL_PACKET, libc::PACKET_TIMESTAMP, 4),
    (libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 4),
    (libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 4),
    (libc::SOL_NETLINK, libc::NETLINK_PKTINFO, 4),
    (libc::SOL_NETLINK, libc::NETLINK_BROADCAST_ERROR, 4),
    (libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, 4),
    (libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, 4),
    (libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 4),
    (libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 4),
];

impl SocketOption {
    /// A packet filter, with 8 bytes for each instruction.
    pub fn filter(code: Vec<u8>) -> Self {
        Self { level: libc::SOL_SOCKET, name: libc::SO_ATTACH_FILTER, value: Bytes(code) }
    }

    /// Whether it is a packet filter.
    pub fn is_filter(&self) -> bool {
        self.is(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER)
    }

    /// Whether the option concerns a packet filter, and is set after everything in the receive
    /// queue has been restored.
    pub fn is_about_filter(&self) -> bool {
        self.is_filter() || self.is(libc::SOL_SOCKET, libc::SO_LOCK_FILTER)
    }

    /// Whether it is one of [`OPTIONS`], with a value of that length, or a filter.
    pub fn is_known(&self) -> bool {
        let length = self.value.0.len();
        let is_code = length.is_multiple_of(8) && (1..=INSTRUCTIONS_MAX).contains(&(length / 8));
        let is_option = OPTIONS.contains(&(self.level, self.name, length));
        is_option || self.is_filter() && is_code
    }

    /// Whether it is this option.
    pub fn is(&self, level: i32, name: i32) -> bool {
        (self.level, self.name) == (level, name)
    }
}
