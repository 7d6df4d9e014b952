//! Sockets of the internet families, and options of all.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Bytes, Connection};

/// One option of a socket (setsockopt(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOption {
    /// `SOL_SOCKET` or a protocol.
    pub level: i32,
    /// Its number.
    pub name: i32,
    /// Its value, as setsockopt(2) takes it.
    pub value: Bytes,
}

/// Options that are saved, and the only ones that are restored: level, number, bytes of the value.
pub(crate) const OPTIONS: [(i32, i32, usize); 56] = [
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
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 4),
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
    (libc::SOL_NETLINK, libc::NETLINK_PKTINFO, 4),
    (libc::SOL_NETLINK, libc::NETLINK_BROADCAST_ERROR, 4),
    (libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, 4),
    (libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, 4),
    (libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 4),
    (libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 4),
];

impl SocketOption {
    /// Whether it is one of [`OPTIONS`], with a value of that length.
    pub(crate) fn is_known(&self) -> bool {
        OPTIONS.contains(&(self.level, self.name, self.value.0.len()))
    }

    /// Whether it is this option.
    pub(crate) fn is(&self, level: i32, name: i32) -> bool {
        (self.level, self.name) == (level, name)
    }
}

/// A TCP socket that listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// What it is bound to.
    pub address: SocketAddr,
    /// It is of the IPv6 family.
    pub v6: bool,
    /// listen(2).
    pub backlog: i32,
    /// Options that are not as in a new socket.
    pub options: Vec<SocketOption>,
    /// `O_*`.
    pub flags: u32,
    /// Connections that it has not accepted, the oldest first.
    #[serde(default)]
    pub waiting: Vec<Waiting>,
}

/// A connection that nobody has accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// This side's address, as the kernel has it.
    pub address: SocketAddr,
    /// The connection, with the peer's address as the kernel has it. Nothing was sent.
    pub connection: Connection,
}
