//! TCP sockets that do not listen: connections, and what may become one.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Bytes, Records, SocketOption, Thing};

/// A TCP socket that does not listen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpSocket {
    /// It is of the IPv6 family.
    pub v6: bool,
    /// `O_*`.
    pub flags: u32,
    /// What it is bound to.
    #[serde(default)]
    pub address: Option<SocketAddr>,
    /// Its connection, if it has one.
    #[serde(default)]
    pub connection: Option<Connection>,
    /// It has a connection that is held open ([`crate::save::HeldFile`]) instead of being saved. To
    /// its owner, the peer of one that nobody holds any more has hung up.
    #[serde(default)]
    pub held: bool,
    /// It had a connection, which is over: there is nothing to read, and the peer has hung up.
    #[serde(default)]
    pub over: bool,
    /// Options that are not as in a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
}

/// How far a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TcpState {
    /// We have asked the peer, and it has not answered. Nothing is agreed upon.
    SynSent,
    /// Open in both directions.
    Established,
    /// We have said that we end, and the peer does not know yet.
    FinWait1,
    /// We have said that we end, and the peer knows.
    FinWait2,
    /// The peer has said that it ends.
    CloseWait,
    /// The peer has said that it ends, then we, and the peer does not know yet.
    LastAck,
    /// We have said that we end, then the peer, which does not know yet.
    Closing,
}

impl TcpState {
    /// Whether the peer has said that it ends.
    pub(crate) fn peer_has_ended(self) -> bool {
        matches!(self, Self::CloseWait | Self::LastAck | Self::Closing)
    }

    /// Whether we have said so.
    pub(crate) fn has_ended(self) -> bool {
        self == Self::FinWait2 || self.end_waits()
    }

    /// Whether we have, and the peer does not know yet.
    pub(crate) fn end_waits(self) -> bool {
        matches!(self, Self::FinWait1 | Self::LastAck | Self::Closing)
    }
}

/// A TCP connection, as its owner and its peer know it (tcp(7), TCP_REPAIR).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// How far it is closed.
    pub state: TcpState,
    /// The other side; this side is the socket's `address`.
    pub peer: SocketAddr,
    /// What was sent and not acknowledged.
    pub sent: Bytes,
    /// What was written and not sent.
    pub unsent: Bytes,
    /// Sequence number of the first byte of `sent`.
    pub sent_sequence: u32,
    /// What was received and not read.
    pub received: Bytes,
    /// Sequence number behind the last byte of `received`.
    pub received_sequence: u32,
    /// Largest segment that the peer takes, in bytes.
    pub segment_bytes: u32,
    /// Window scales, for what is sent and what is received, where they were agreed upon.
    #[serde(default)]
    pub scales: Option<(u8, u8)>,
    /// Selective acknowledgements were agreed upon.
    #[serde(default)]
    pub selective: bool,
    /// What the clock of its time stamps says, where they were agreed upon.
    #[serde(default)]
    pub timestamp: Option<u32>,
    /// `struct tcp_repair_window`: snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup.
    pub window: [u32; 5],
    /// Bytes of its buffers, for what is sent and what is received, as the kernel counts them.
    pub buffers_bytes: (u32, u32),
    /// SO_BUF_LOCK: which of them the program has set.
    #[serde(default)]
    pub buffers_locked: u8,
}

impl Records {
    /// All TCP connections, those that nobody has accepted, too.
    pub fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.objects.iter().flat_map(|object| {
            let (own, waiting) = match &object.thing {
                Thing::TcpSocket(socket) => (socket.connection.as_ref(), &[][..]),
                Thing::Listener(listener) => (None, &listener.waiting[..]),
                _ => (None, &[][..]),
            };
            own.into_iter().chain(waiting.iter().map(|one| &one.connection))
        })
    }

    /// Both addresses, ours first, of all TCP connections in the container's own stack.
    pub(crate) fn ends(&self) -> impl Iterator<Item = [SocketAddr; 2]> {
        let of_its_own = self.objects.iter().filter(|object| object.net.is_none());
        of_its_own.flat_map(|object| {
            let (own, waiting) = match &object.thing {
                Thing::TcpSocket(TcpSocket { address, connection, .. }) => {
                    let ends = |(own, connection): (_, &Connection)| [own, connection.peer];
                    ((*address).zip(connection.as_ref()).map(ends), &[][..])
                }
                Thing::Listener(listener) => (None, &listener.waiting[..]),
                _ => (None, &[][..]),
            };
            own.into_iter().chain(waiting.iter().map(|one| [one.address, one.connection.peer]))
        })
    }
}
