//! UDP sockets.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::{Bytes, SocketOption};

/// A UDP socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpSocket {
    /// Of the IPv6 family.
    pub v6: bool,
    /// `O_*`.
    pub flags: u32,
    /// Its local address.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// No device has its address, and the option that permitted the bind (IP_FREEBIND) was taken back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub free: bool,
    /// Its local IP address is the kernel's choice for the peer, made by connect(2) and not by bind(2).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chosen: bool,
    /// The address that it is connected to.
    #[serde(default)]
    pub peer: Option<SocketAddr>,
    /// Its receive queue.
    #[serde(default)]
    pub received: Vec<Datagram>,
    /// A pending error (SO_ERROR).
    #[serde(default)]
    pub error: Option<i32>,
    /// Shut directions: bit 0 for reading, bit 1 for writing.
    #[serde(default)]
    pub shut: u8,
    /// Multicast groups that it has joined.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<JoinedGroup>,
    /// Options that differ from a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// A multicast group that a socket has joined on a device, with all senders (MCAST_JOIN_GROUP).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedGroup {
    /// The device.
    pub device: String,
    /// The address of the group.
    pub address: IpAddr,
}

/// One datagram in a receive queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagram {
    /// The sender's address.
    pub from: SocketAddr,
    /// Its contents.
    pub data: Bytes,
}
