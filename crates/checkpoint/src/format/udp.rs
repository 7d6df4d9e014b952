//! UDP sockets.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Bytes, SocketOption};

/// A UDP socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpSocket {
    /// It is of the IPv6 family.
    pub v6: bool,
    /// `O_*`.
    pub flags: u32,
    /// What it is bound to.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// Whom it is connected to.
    #[serde(default)]
    pub peer: Option<SocketAddr>,
    /// What it has received and not read.
    #[serde(default)]
    pub received: Vec<Datagram>,
    /// What went wrong, of which nobody was told yet (SO_ERROR).
    #[serde(default)]
    pub error: Option<i32>,
    /// Options that are not as in a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// One datagram in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagram {
    /// Who sent it.
    pub from: SocketAddr,
    /// What it says.
    pub data: Bytes,
}
