//! TCP sockets that are not listening: connected, or not yet.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{Bytes, SocketOption};

/// A TCP socket that is not listening.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpSocket {
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
    /// Its connection, if it has one.
    #[serde(default)]
    pub connection: Option<Connection>,
    /// The connection is held open by a process outside instead of being saved. If it is not
    /// held any more, the owner sees it as closed by the peer.
    #[serde(default)]
    pub held: bool,
    /// It had a connection, which is closed: the receive queue is empty, and the peer has closed.
    #[serde(default)]
    pub over: bool,
    /// Options that differ from a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TcpState {
    /// SYN sent, no answer yet: no options are negotiated.
    SynSent,
    /// Open in both directions.
    Established,
    /// FIN sent by this side, not acknowledged.
    FinWait1,
    /// FIN sent by this side, acknowledged.
    FinWait2,
    /// FIN received.
    CloseWait,
    /// FIN received, then FIN sent by this side, not acknowledged.
    LastAck,
    /// FIN sent by this side, not acknowledged; then FIN received.
    Closing,
}

impl TcpState {
    /// Whether a FIN was received from the peer.
    pub fn peer_has_ended(self) -> bool {
        matches!(self, Self::CloseWait | Self::LastAck | Self::Closing)
    }

    /// Whether this side has sent a FIN.
    pub fn has_ended(self) -> bool {
        self == Self::FinWait2 || self.end_waits()
    }

    /// Whether this side has sent a FIN that is not acknowledged.
    pub fn end_waits(self) -> bool {
        matches!(self, Self::FinWait1 | Self::LastAck | Self::Closing)
    }
}

/// A TCP connection, in the values of TCP_REPAIR (tcp(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Its state.
    pub state: TcpState,
    /// The peer's address; the local one is the socket's `address`.
    pub peer: SocketAddr,
    /// Bytes that were sent and not acknowledged.
    pub sent: Bytes,
    /// Bytes that were written and not sent.
    pub unsent: Bytes,
    /// Sequence number of the first byte of `sent`.
    pub sent_sequence: u32,
    /// Bytes that were received and not read.
    pub received: Bytes,
    /// Sequence number after the last byte of `received`.
    pub received_sequence: u32,
    /// The peer's maximum segment size, in bytes.
    pub segment_bytes: u32,
    /// Window scales for sending and receiving, if these were negotiated.
    #[serde(default)]
    pub scales: Option<(u8, u8)>,
    /// Selective acknowledgements were negotiated.
    #[serde(default)]
    pub selective: bool,
    /// The clock of its time stamps, if these were negotiated.
    #[serde(default)]
    pub timestamp: Option<u32>,
    /// `struct tcp_repair_window`: snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup.
    pub window: [u32; 5],
    /// Bytes of its send and receive buffers, as the kernel counts them.
    pub buffers_bytes: (u32, u32),
    /// SO_BUF_LOCK: the buffers with a size that the program has set.
    #[serde(default)]
    pub buffers_locked: u8,
    /// TCP_WINDOW_CLAMP: the largest window that is offered, in bytes; 0 in records of earlier versions.
    #[serde(default)]
    pub window_bytes_max: u32,
    /// This side has ended reading (shutdown(2), SHUT_RD), and the peer has sent no FIN.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_no_more: bool,
}
