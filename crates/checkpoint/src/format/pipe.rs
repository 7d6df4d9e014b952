//! Pipes, without a name and with one (pipe(7), fifo(7)).

use serde::{Deserialize, Serialize};

use super::Bytes;

/// A pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipe {
    /// F_GETPIPE_SZ.
    pub capacity_bytes: u32,
    /// What is in it.
    pub content: Bytes,
    /// How long the packets in it are, one after the other; empty where it is a stream.
    #[serde(default)]
    pub packets: Vec<u32>,
    /// Its path inside, where it has a name.
    #[serde(default)]
    pub path: Option<String>,
    /// The name is gone. The directory of `path` is there, and nothing in it by that name.
    #[serde(default)]
    pub deleted: Option<DeletedFifo>,
}

/// What a fifo without a name is like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedFifo {
    /// Permission bits.
    pub mode: u32,
    /// Its owner, by the ids inside.
    pub uid: u32,
    /// Its group, the same way.
    pub gid: u32,
}

/// An open end of a pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipeEnd {
    /// The pipe, an object.
    pub pipe: usize,
    /// It is the end that writes.
    pub writes: bool,
    /// `O_*`.
    pub flags: u32,
}
