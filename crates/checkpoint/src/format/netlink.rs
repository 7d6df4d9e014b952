//! Netlink sockets (netlink(7)).

use serde::{Deserialize, Serialize};

use super::SocketOption;

/// A socket that speaks with the kernel. What it is told is of the network it is restored in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netlink {
    /// `SOCK_RAW` or `SOCK_DGRAM`, between which the kernel sees no difference.
    pub socket_type: i32,
    /// `NETLINK_ROUTE` and its like.
    pub protocol: i32,
    /// `O_*`.
    pub flags: u32,
    /// The id it is bound to; 0 where it is not bound.
    pub port: u32,
    /// Groups it hears of, by number, from 1.
    pub groups: Vec<u32>,
    /// Whom it speaks to when nothing is said, as port and groups; the kernel is 0 and 0.
    pub peer: (u32, u32),
    /// Options that are not as in a new socket.
    pub options: Vec<SocketOption>,
}
