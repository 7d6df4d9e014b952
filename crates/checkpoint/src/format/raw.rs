//! Sockets below the transport protocols: raw ones, and those that only ask for echoes.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Bytes, SocketOption};

/// A raw socket (raw(7)), or one for echo requests of ICMP (icmp(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawSocket {
    /// It is of the IPv6 family.
    pub v6: bool,
    /// `SOCK_RAW`, or `SOCK_DGRAM` for echo requests.
    pub socket_type: i32,
    /// The protocol.
    pub protocol: i32,
    /// `O_*`.
    pub flags: u32,
    /// What it is bound to; of echo requests the port is their identifier.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// Whom it is connected to.
    #[serde(default)]
    pub peer: Option<SocketAddr>,
    /// Options that are not as in a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// A packet socket (packet(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketSocket {
    /// `SOCK_RAW` or `SOCK_DGRAM`.
    pub socket_type: i32,
    /// The protocol that it hears; 0 is none.
    pub protocol: u16,
    /// The device at which it does; `None` is all.
    #[serde(default)]
    pub device: Option<String>,
    /// `O_*`.
    pub flags: u32,
    /// What it has devices do for it.
    #[serde(default)]
    pub memberships: Vec<PacketMembership>,
    /// The group with whose members it shares what comes, as PACKET_FANOUT takes it.
    #[serde(default)]
    pub fanout: Option<u32>,
    /// Options that are not as in a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// What a device does for a packet socket (PACKET_ADD_MEMBERSHIP).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketMembership {
    /// The device.
    pub device: String,
    /// `PACKET_MR_*`.
    pub kind: u16,
    /// The address that it listens to.
    pub address: Bytes,
}
