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

/// Options of socket(7) that libc does not name.
const SO_RCVMARK: i32 = 75;
const SO_TXREHASH: i32 = 74;
const SO_RESERVE_MEM: i32 = 73;
const SO_PASSPIDFD: i32 = 76;
const SO_RCVPRIORITY: i32 = 82;
const SO_PASSRIGHTS: i32 = 83;
const SO_TXTIME: i32 = 61;
const SO_TIMESTAMP_NEW: i32 = 63;
const SO_TIMESTAMPNS_NEW: i32 = 64;
const SO_TIMESTAMPING: i32 = 37;
const SO_TIMESTAMPING_NEW: i32 = 65;
/// Options of ip(7) that libc does not name.
const IP_RECVERR_RFC4884: i32 = 26;
const IP_LOCAL_PORT_RANGE: i32 = 51;
/// Options of ipv6(7) that libc does not name.
const IPV6_2292PKTINFO: i32 = 2;
const IPV6_2292HOPOPTS: i32 = 3;
const IPV6_2292DSTOPTS: i32 = 4;
const IPV6_2292RTHDR: i32 = 5;
const IPV6_2292HOPLIMIT: i32 = 8;
const IPV6_FLOWINFO: i32 = 11;
const IPV6_MULTICAST_ALL: i32 = 29;
const IPV6_ROUTER_ALERT_ISOLATE: i32 = 30;
const IPV6_RECVERR_RFC4884: i32 = 31;
const IPV6_FLOWINFO_SEND: i32 = 33;
const IPV6_MINHOPCOUNT: i32 = 73;
const IPV6_RECVORIGDSTADDR: i32 = 74;
/// Options of tcp(7) that libc does not name.
const TCP_THIN_LINEAR_TIMEOUTS: i32 = 16;
const TCP_SAVE_SYN: i32 = 27;
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
const TCP_INQ: i32 = 36;
const TCP_TX_DELAY: i32 = 37;
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_RTO_MIN_US: i32 = 45;
const TCP_DELACK_MAX_US: i32 = 46;
/// Options of udp(7).
const UDP_CORK: i32 = 1;
const UDP_ENCAP: i32 = 100;
const UDP_NO_CHECK6_TX: i32 = 101;
const UDP_NO_CHECK6_RX: i32 = 102;
const UDP_SEGMENT: i32 = 103;
const UDP_GRO: i32 = 104;

/// Options that are saved, and the only ones that are restored: level, number, bytes of the value.
///
/// ORDER: a restore sets them in this order. IP_TOS sets SO_PRIORITY; time stamps are of the form that was
/// requested last.
pub const OPTIONS: [(i32, i32, usize); 146] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, 4),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, 4),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE, 4),
    (libc::SOL_SOCKET, libc::SO_BROADCAST, 4),
    (libc::SOL_SOCKET, libc::SO_SNDBUF, 4),
    (libc::SOL_SOCKET, libc::SO_RCVBUF, 4),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 4),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, 4),
    (libc::SOL_SOCKET, libc::SO_NO_CHECK, 4),
    (libc::SOL_SOCKET, libc::SO_LINGER, 8),
    (libc::SOL_SOCKET, libc::SO_PASSCRED, 4),
    (libc::SOL_SOCKET, libc::SO_PASSSEC, 4),
    (libc::SOL_SOCKET, SO_PASSPIDFD, 4),
    (libc::SOL_SOCKET, SO_PASSRIGHTS, 4),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 4),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO, 16),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO, 16),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, 4),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 4),
    (libc::SOL_SOCKET, SO_TIMESTAMP_NEW, 4),
    (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW, 4),
    (libc::SOL_SOCKET, SO_TIMESTAMPING, 8),
    (libc::SOL_SOCKET, SO_TIMESTAMPING_NEW, 8),
    (libc::SOL_SOCKET, SO_TXTIME, 8),
    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 4),
    (libc::SOL_SOCKET, libc::SO_WIFI_STATUS, 4),
    (libc::SOL_SOCKET, libc::SO_NOFCS, 4),
    (libc::SOL_SOCKET, libc::SO_SELECT_ERR_QUEUE, 4),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF, 4),
    (libc::SOL_SOCKET, libc::SO_MARK, 4),
    (libc::SOL_SOCKET, SO_RCVMARK, 4),
    (libc::SOL_SOCKET, SO_RCVPRIORITY, 4),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, 8),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL, 4),
    (libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, 4),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU, 4),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY, 4),
    (libc::SOL_SOCKET, SO_TXREHASH, 4),
    (libc::SOL_SOCKET, SO_RESERVE_MEM, 4),
    (libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 4),
    (libc::IPPROTO_IP, libc::IP_TOS, 4),
    (libc::IPPROTO_IP, libc::IP_TTL, 4),
    (libc::IPPROTO_IP, libc::IP_MINTTL, 4),
    (libc::IPPROTO_IP, libc::IP_PKTINFO, 4),
    (libc::IPPROTO_IP, libc::IP_RECVOPTS, 4),
    (libc::IPPROTO_IP, libc::IP_RETOPTS, 4),
    (libc::IPPROTO_IP, libc::IP_RECVERR, 4),
    (libc::IPPROTO_IP, IP_RECVERR_RFC4884, 4),
    (libc::IPPROTO_IP, libc::IP_RECVTTL, 4),
    (libc::IPPROTO_IP, libc::IP_RECVTOS, 4),
    (libc::IPPROTO_IP, libc::IP_RECVORIGDSTADDR, 4),
    (libc::IPPROTO_IP, libc::IP_RECVFRAGSIZE, 4),
    (libc::IPPROTO_IP, libc::IP_CHECKSUM, 4),
    (libc::IPPROTO_IP, libc::IP_PASSSEC, 4),
    (libc::IPPROTO_IP, libc::IP_NODEFRAG, 4),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, 4),
    (libc::IPPROTO_IP, libc::IP_FREEBIND, 4),
    (libc::IPPROTO_IP, libc::IP_TRANSPARENT, 4),
    (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 4),
    (libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, 4),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, 4),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, 4),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 4),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_IF, 4),
    (libc::IPPROTO_IP, libc::IP_HDRINCL, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 4),
    (libc::IPPROTO_IPV6, IPV6_MINHOPCOUNT, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, 4),
    (libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 4),
    (libc::IPPROTO_IPV6, IPV6_RECVERR_RFC4884, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPOPTS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVRTHDR, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVDSTOPTS, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPATHMTU, 4),
    (libc::IPPROTO_IPV6, IPV6_RECVORIGDSTADDR, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVFRAGSIZE, 4),
    (libc::IPPROTO_IPV6, IPV6_2292PKTINFO, 4),
    (libc::IPPROTO_IPV6, IPV6_2292HOPOPTS, 4),
    (libc::IPPROTO_IPV6, IPV6_2292DSTOPTS, 4),
    (libc::IPPROTO_IPV6, IPV6_2292RTHDR, 4),
    (libc::IPPROTO_IPV6, IPV6_2292HOPLIMIT, 4),
    (libc::IPPROTO_IPV6, IPV6_FLOWINFO, 4),
    (libc::IPPROTO_IPV6, IPV6_FLOWINFO_SEND, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_AUTOFLOWLABEL, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_ADDR_PREFERENCES, 4),
    (libc::IPPROTO_IPV6, IPV6_ROUTER_ALERT_ISOLATE, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_CHECKSUM, 4),
    (libc::IPPROTO_IPV6, libc::IPV6_HDRINCL, 4),
    (libc::SOL_SOCKET, libc::SO_PRIORITY, 4),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG, 4),
    (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, 4),
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
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 4),
    (libc::IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, 4),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4),
    (libc::IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 4),
    (libc::IPPROTO_TCP, TCP_SAVE_SYN, 4),
    (libc::IPPROTO_TCP, TCP_INQ, 4),
    (libc::IPPROTO_TCP, TCP_TX_DELAY, 4),
    (libc::IPPROTO_TCP, TCP_RTO_MAX_MS, 4),
    (libc::IPPROTO_TCP, TCP_RTO_MIN_US, 4),
    (libc::IPPROTO_TCP, TCP_DELACK_MAX_US, 4),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION, 16),
    (libc::SOL_UDP, UDP_CORK, 4),
    (libc::SOL_UDP, UDP_ENCAP, 4),
    (libc::SOL_UDP, UDP_NO_CHECK6_TX, 4),
    (libc::SOL_UDP, UDP_NO_CHECK6_RX, 4),
    (libc::SOL_UDP, UDP_SEGMENT, 4),
    (libc::SOL_UDP, UDP_GRO, 4),
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

    /// Whether only a process with CAP_NET_RAW or CAP_NET_ADMIN over the network stack may set it.
    pub fn needs_network_rights(&self) -> bool {
        let (level, name) = (self.level, self.name);
        let first = self.value.0.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_MARK | SO_RCVMARK) => first != 0,
            (libc::SOL_SOCKET, libc::SO_BUSY_POLL | libc::SO_PREFER_BUSY_POLL) => first != 0,
            (libc::SOL_SOCKET, libc::SO_PRIORITY) => !(0..=6).contains(&first),
            // By another clock than CLOCK_MONOTONIC.
            (libc::SOL_SOCKET, SO_TXTIME) => first != libc::CLOCK_MONOTONIC,
            (libc::IPPROTO_IP, libc::IP_TRANSPARENT) => first != 0,
            (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT) => first != 0,
            _ => false,
        }
    }

    /// Whether the restoring host may refuse it: it needs rights over the host or a memory cgroup, a newer
    /// kernel, or an address that the host no longer has, or it is a rest of a failed connect(2). A socket
    /// without it is restored.
    pub fn may_be_refused(&self) -> bool {
        match self.level {
            libc::SOL_SOCKET => [
                libc::SO_BUSY_POLL,
                libc::SO_PREFER_BUSY_POLL,
                SO_RESERVE_MEM,
                SO_RCVPRIORITY,
                SO_PASSRIGHTS,
            ]
            .contains(&self.name),
            libc::IPPROTO_TCP => {
                [libc::TCP_MAXSEG, TCP_RTO_MAX_MS, TCP_RTO_MIN_US, TCP_DELACK_MAX_US]
                    .contains(&self.name)
            }
            libc::IPPROTO_IP => self.name == libc::IP_MULTICAST_IF,
            _ => false,
        }
    }

    /// Whether it requests time stamps of packets. A TCP connection numbers them from its own state, so the
    /// option is set when the connection exists.
    pub fn is_about_stamps(&self) -> bool {
        let names = [SO_TIMESTAMPING, SO_TIMESTAMPING_NEW];
        self.level == libc::SOL_SOCKET && names.contains(&self.name)
    }

    /// Whether a TCP connection has it as its own state, which it obtains otherwise.
    pub fn is_of_unconnected(level: i32, name: i32) -> bool {
        match level {
            libc::SOL_SOCKET => name == libc::SO_INCOMING_CPU,
            libc::IPPROTO_TCP => {
                [libc::TCP_MAXSEG, libc::TCP_WINDOW_CLAMP, libc::TCP_FASTOPEN_CONNECT]
                    .contains(&name)
            }
            _ => false,
        }
    }

    /// Whether it is this option.
    pub fn is(&self, level: i32, name: i32) -> bool {
        (self.level, self.name) == (level, name)
    }

    /// Whether it is SO_REUSEADDR, by which a socket is bound beside ended connections.
    pub fn is_reuse(&self) -> bool {
        self.is(libc::SOL_SOCKET, libc::SO_REUSEADDR)
    }
}
