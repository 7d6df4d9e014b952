//! Netlink sockets (netlink(7)).

use serde::{Deserialize, Serialize};

use crate::SocketOption;

/// A socket of the kernel's netlink interface. After a restore the answers are about the new
/// network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netlink {
    /// `SOCK_RAW` or `SOCK_DGRAM`, which the kernel treats alike.
    pub socket_type: i32,
    /// `NETLINK_ROUTE` and similar.
    pub protocol: i32,
    /// `O_*`.
    pub flags: u32,
    /// The port id that it is bound to; 0 if it is not bound.
    pub port: u32,
    /// The multicast groups that it has joined, by number, from 1.
    pub groups: Vec<u32>,
    /// Its default destination, as port and groups; 0 and 0 is the kernel.
    pub peer: (u32, u32),
    /// Options that differ from a new socket.
    pub options: Vec<SocketOption>,
}
