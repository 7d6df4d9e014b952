//! Sockets.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::Bytes;

/// Two unix sockets connected to each other without a name (socketpair(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixPair {
    /// `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    pub socket_type: i32,
    /// What each has received and not read, a message each.
    pub received: [Vec<Bytes>; 2],
    /// How each was shut down: 1 reads no more, 2 writes no more.
    pub shut: [u8; 2],
    /// Options of each: `SOL_SOCKET` number and value.
    pub options: [Vec<(i32, i32)>; 2],
}

/// One of the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixEnd {
    /// The pair, an object.
    pub pair: usize,
    /// 0 or 1.
    pub side: usize,
    /// `O_*`.
    pub flags: u32,
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
    /// Level, number and value of options that are not the default.
    pub options: Vec<(i32, i32, i32)>,
    /// `O_*`.
    pub flags: u32,
}
