//! Listening TCP sockets.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{Connection, SocketOption};

/// A listening TCP socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// Its local address.
    pub address: SocketAddr,
    /// Of the IPv6 family.
    pub v6: bool,
    /// No device has its address, and the option that permitted the bind (IP_FREEBIND) was taken back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub free: bool,
    /// The backlog of listen(2).
    pub backlog: i32,
    /// Options that differ from a new socket.
    pub options: Vec<SocketOption>,
    /// `O_*`.
    pub flags: u32,
    /// Its pending connections, the oldest first.
    #[serde(default)]
    pub waiting: Vec<Waiting>,
}

/// A pending connection, which no process has accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The local address, in the kernel's form.
    pub address: SocketAddr,
    /// The connection, with the peer's address in the kernel's form. Nothing was sent.
    pub connection: Connection,
}
