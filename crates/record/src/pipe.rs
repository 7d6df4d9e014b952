//! Pipes and named pipes (pipe(7), fifo(7)).

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// A pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipe {
    /// F_GETPIPE_SZ.
    pub capacity_bytes: u32,
    /// Its unread bytes.
    pub content: Bytes,
    /// Lengths of its packets, one after the other; empty for a stream.
    #[serde(default)]
    pub packets: Vec<u32>,
    /// Its path inside, for a named pipe.
    #[serde(default)]
    pub path: Option<String>,
    /// The named pipe was removed. The directory of `path` exists, without an entry of that name.
    #[serde(default)]
    pub deleted: Option<DeletedFifo>,
}

/// Attributes of a removed named pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedFifo {
    /// Permission bits.
    pub mode: u32,
    /// Its owner, by the ids inside.
    pub uid: u32,
    /// Its group, by the ids inside.
    pub gid: u32,
}

/// An open end of a pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipeEnd {
    /// The pipe, an object.
    pub pipe: usize,
    /// The write end.
    pub writes: bool,
    /// `O_*`.
    pub flags: u32,
}
