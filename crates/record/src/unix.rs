//! Unix sockets (unix(7)).

use serde::{Deserialize, Serialize};

use crate::{Bytes, SocketOption};

/// A unix socket that a process has open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixSocket {
    /// `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    pub socket_type: i32,
    /// `O_*`.
    pub flags: u32,
    /// Its name.
    #[serde(default)]
    pub name: Option<UnixName>,
    /// The backlog, if it is listening.
    #[serde(default)]
    pub backlog: Option<i32>,
    /// Its peer.
    #[serde(default)]
    pub peer: UnixPeer,
    /// Pending connections with a closed connecting side.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<UnixLeft>,
    /// Its receive queue, message by message.
    #[serde(default)]
    pub received: Vec<UnixMessage>,
    /// The credentials that SO_PEERCRED reports for its peer; for a listener, those that connecting
    /// processes will see.
    #[serde(default)]
    pub peer_credentials: Option<PeerCredentials>,
    /// Shutdown: 1 for reading, 2 for writing.
    #[serde(default)]
    pub shut: u8,
    /// Its peer has closed without reading everything, which the next call reports (ECONNRESET).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
    /// Options that differ from a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
    /// The socket was held open, since processes outside may connect or send to it. A restore
    /// without the held socket makes it from this record: a connection then has no peer any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// The peer of a unix socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum UnixPeer {
    /// No peer.
    #[default]
    None,
    /// Another socket; streams and sequenced packets are peers of each other.
    Socket {
        /// The object.
        object: usize,
    },
    /// The peer is a pending connection.
    Waiting {
        /// The object of the listener.
        listener: usize,
        /// Its position in the queue, from 0.
        place: u32,
        /// The credentials of the connecting process, for the process that accepts.
        #[serde(default)]
        by: Option<PeerCredentials>,
        /// Messages that were already sent into it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sent: Vec<UnixMessage>,
    },
    /// The peer was closed.
    Gone,
}

/// A pending connection with a closed connecting side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixLeft {
    /// Its position in the queue, from 0.
    pub place: u32,
    /// The credentials of the process that had connected.
    #[serde(default)]
    pub by: Option<PeerCredentials>,
    /// Messages that were sent into it.
    #[serde(default)]
    pub sent: Vec<UnixMessage>,
}

/// The name of a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixName {
    /// The argument of bind(2): a path, or a NUL and any bytes, which is an abstract name.
    pub bytes: Bytes,
    /// The working directory at bind(2), for a relative path.
    #[serde(default)]
    pub directory: Option<String>,
    /// The file of a path, if it still refers to this socket.
    #[serde(default)]
    pub file: Option<UnixFile>,
    /// Not bound itself, but accepted by a bound listener.
    #[serde(default)]
    pub inherited: bool,
}

impl UnixSocket {
    /// All messages in flight from it or to it.
    pub fn on_its_way(&self) -> impl Iterator<Item = &UnixMessage> {
        let sent = match &self.peer {
            UnixPeer::Waiting { sent, .. } => &sent[..],
            _ => &[],
        };
        let left = self.left.iter().flat_map(|left| &left.sent);
        self.received.iter().chain(sent).chain(left)
    }
}

impl UnixName {
    /// The path, unless it is an abstract name.
    pub fn path(&self) -> Option<&str> {
        let is_path = self.bytes.0.first().is_some_and(|b| *b != 0);
        std::str::from_utf8(&self.bytes.0).ok().filter(|_| is_path)
    }
}

impl std::fmt::Display for UnixName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.path() {
            Some(path) => write!(f, "'{path}'"),
            None => {
                let name = self.bytes.0.get(1..).unwrap_or_default();
                write!(f, "'@{}'", name.escape_ascii())
            }
        }
    }
}

/// Owner and mode of a socket's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixFile {
    /// Permission bits.
    pub mode: u32,
    /// Its owner, by the ids inside.
    pub uid: u32,
    /// Its group, by the ids inside.
    pub gid: u32,
}

/// One message in the receive queue of a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixMessage {
    /// Its contents.
    pub data: Bytes,
    /// The name of the sending socket, as in [`UnixName::bytes`]; empty if it had none.
    #[serde(default)]
    pub from: Bytes,
    /// In-flight file descriptions (SCM_RIGHTS), objects.
    #[serde(default)]
    pub descriptors: Vec<usize>,
    /// The sender's credentials (SCM_CREDENTIALS), if they are passed.
    #[serde(default)]
    pub credentials: Option<PeerCredentials>,
}

/// The credentials of a process, as its peer sees them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCredentials {
    /// The process, by the ids inside. `None` for a process that has exited and is not known any
    /// more.
    pub pid: Option<u32>,
    /// Its user, by the ids inside.
    pub uid: u32,
    /// Its group, by the ids inside.
    pub gid: u32,
    /// Its supplementary groups.
    #[serde(default)]
    pub groups: Vec<u32>,
}
