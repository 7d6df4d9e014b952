//! Pipes without a name (pipe(7)).

use serde::{Deserialize, Serialize};

use super::Bytes;

/// A pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipe {
    /// F_GETPIPE_SZ.
    pub capacity_bytes: u32,
    /// What is in it.
    pub content: Bytes,
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
