//! Sockets that were found, with copies of them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use dormouse_record::{Refusal, UnixMessage};

use crate::save::refusal::Reason;

/// Unix sockets that were found, by inode.
pub(crate) type UnixSockets = HashMap<u64, Socket>;

/// A unix socket that some process has open.
pub(crate) struct Socket {
    pub(crate) object: usize,
    pub(crate) copy: OwnedFd,
    /// A process that has it open, by the host's id.
    pub(crate) pid: u32,
    /// The first process, from whose root paths are found.
    pub(crate) first: u32,
    /// The working directory of that process, from which a relative path is resolved.
    pub(crate) directory: String,
    /// For the message: the process and the descriptor.
    pub(crate) owner: Refusal,
    /// The messages in its receive queue.
    pub(crate) received: Result<Vec<UnixMessage>, Reason>,
}

/// A TCP connection.
pub(crate) struct FoundConnection {
    pub(crate) object: usize,
    pub(crate) copy: OwnedFd,
    pub(crate) inode: u64,
    pub(crate) is_being_made: bool,
}

/// A TCP listener with pending connections.
pub(crate) struct FoundListener {
    pub(crate) object: usize,
    pub(crate) listener: OwnedFd,
}
