//! Unix sockets (unix(7)).

use serde::{Deserialize, Serialize};

use super::{Bytes, SocketOption};

/// A unix socket that some process has open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixSocket {
    /// `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    pub socket_type: i32,
    /// `O_*`.
    pub flags: u32,
    /// What it is bound to.
    #[serde(default)]
    pub name: Option<UnixName>,
    /// How many connections may wait to be accepted, where it listens.
    #[serde(default)]
    pub backlog: Option<i32>,
    /// Whom it speaks to.
    #[serde(default)]
    pub peer: UnixPeer,
    /// Connections that wait to be accepted and whose other side was closed again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<UnixLeft>,
    /// What it has received and not read, a message each.
    #[serde(default)]
    pub received: Vec<UnixMessage>,
    /// What SO_PEERCRED says of its other side; of a socket that listens, what it will say to those
    /// who connect.
    #[serde(default)]
    pub peer_credentials: Option<PeerCredentials>,
    /// How it was shut down: 1 reads no more, 2 writes no more.
    #[serde(default)]
    pub shut: u8,
    /// Options that are not as in a new socket.
    #[serde(default)]
    pub options: Vec<SocketOption>,
    /// Others outside may call it, so it was held. Who has to do without it makes it as it is told here: a
    /// connection has no other side any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// The other side of a unix socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum UnixPeer {
    /// There is none.
    #[default]
    None,
    /// Another socket; of streams and packets, each is the other's.
    Socket {
        /// The object.
        object: usize,
    },
    /// A connection that was not accepted yet.
    Waiting {
        /// The socket that listens, an object.
        listener: usize,
        /// Its place in the queue, from 0.
        place: u32,
        /// Who has connected, as whoever accepts it will be told.
        #[serde(default)]
        by: Option<PeerCredentials>,
        /// What was written into it already, a message each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sent: Vec<UnixMessage>,
    },
    /// It was closed.
    Gone,
}

/// A connection that waits to be accepted, and whose other side was closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixLeft {
    /// Its place in the queue, from 0.
    pub place: u32,
    /// Who had connected.
    #[serde(default)]
    pub by: Option<PeerCredentials>,
    /// What was written into it, a message each.
    #[serde(default)]
    pub sent: Vec<UnixMessage>,
}

/// The name of a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixName {
    /// What bind(2) was given: a path, or a NUL and any bytes, which is an abstract name.
    pub bytes: Bytes,
    /// The directory that a path is relative to, if it is.
    #[serde(default)]
    pub directory: Option<String>,
    /// The file of a path, where it still leads to this socket.
    #[serde(default)]
    pub file: Option<UnixFile>,
    /// It was not bound itself, but accepted by a socket that was.
    #[serde(default)]
    pub inherited: bool,
}

impl UnixSocket {
    /// All that is on its way from it or to it.
    pub(crate) fn on_its_way(&self) -> impl Iterator<Item = &UnixMessage> {
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

/// Whom the file of a socket belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixFile {
    /// Permission bits.
    pub mode: u32,
    /// Its owner, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
}

/// One message in the queue of a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixMessage {
    /// What it says.
    pub data: Bytes,
    /// The name of its sender, as in [`UnixName::bytes`]; empty where it had none.
    #[serde(default)]
    pub from: Bytes,
    /// Open files that come along (SCM_RIGHTS), objects.
    #[serde(default)]
    pub descriptors: Vec<usize>,
    /// Who has sent it (SCM_CREDENTIALS), where that comes along.
    #[serde(default)]
    pub credentials: Option<PeerCredentials>,
}

/// Who somebody is to the other side of a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCredentials {
    /// The process, inside. `None` is one that has ended: nobody can tell any more which it was.
    pub pid: Option<u32>,
    /// Its user, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
    /// Its supplementary groups.
    #[serde(default)]
    pub groups: Vec<u32>,
}
