//! Sockets below the transport protocols: raw sockets, and sockets for ICMP echo requests.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{Bytes, SocketOption};

/// A raw socket (raw(7)), or one for echo requests of ICMP (icmp(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawSocket {
    /// Of the IPv6 family.
    pub v6: bool,
    /// `SOCK_RAW`, or `SOCK_DGRAM` for echo requests.
    pub socket_type: i32,
    /// The protocol.
    pub protocol: i32,
    /// `O_*`.
    pub flags: u32,
    /// Its local address; for echo requests the port is their identifier.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// The address that it is connected to.
    #[serde(default)]
    pub peer: Option<SocketAddr>,
    /// Options that differ from a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// A packet socket (packet(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketSocket {
    /// `SOCK_RAW` or `SOCK_DGRAM`.
    pub socket_type: i32,
    /// The protocol that it receives; 0 for none.
    pub protocol: u16,
    /// The device that it is bound to; `None` for all.
    #[serde(default)]
    pub device: Option<String>,
    /// `O_*`.
    pub flags: u32,
    /// Modes and addresses that it has enabled on devices.
    #[serde(default)]
    pub memberships: Vec<PacketMembership>,
    /// The fanout group with which it shares incoming packets, in the form of PACKET_FANOUT.
    #[serde(default)]
    pub fanout: Option<u32>,
    /// Options that differ from a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// A mode or address that a packet socket enables on a device (PACKET_ADD_MEMBERSHIP).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketMembership {
    /// The device.
    pub device: String,
    /// `PACKET_MR_*`.
    pub kind: u16,
    /// The address to receive.
    pub address: Bytes,
}
