//! Locks of files (fcntl(2), flock(2)).

use serde::{Deserialize, Serialize};

/// One lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lock {
    /// Its owner, and the call that made it.
    pub kind: LockKind,
    /// A write lock (exclusive).
    pub writes: bool,
    /// First byte.
    pub start: u64,
    /// Last byte; `None` for a lock to the end of the file, even if the file grows.
    pub end: Option<u64>,
}

/// Kinds of locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LockKind {
    /// Of a process (F_SETLK).
    Process,
    /// Of a file description (F_OFD_SETLK).
    OpenFile,
    /// Of a file description, for the whole file (flock(2)).
    Whole,
}

/// A lease of a file description (fcntl(2), F_SETLEASE), for a process that has it open and takes
/// it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The descriptor.
    pub number: u32,
    /// A write lease: no other open of the file.
    pub writes: bool,
    /// The kind of `owner`, which is signalled when another process opens the file: F_OWNER_TID,
    /// F_OWNER_PID or F_OWNER_PGRP.
    pub owner_kind: i32,
    /// The receiver of the signal, by the container's ids; 0 for none.
    pub owner: u32,
    /// The signal; 0 for SIGIO.
    pub signal: i32,
}

/// The signal-driven I/O of an open file (fcntl(2): F_SETOWN_EX, F_SETSIG, O_ASYNC), set again by a
/// process that has the file open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// The descriptor.
    pub number: u32,
    /// F_OWNER_TID, F_OWNER_PID or F_OWNER_PGRP.
    pub owner_kind: i32,
    /// Its id in the container; 0 for none.
    pub owner: u32,
    /// The signal; 0 for SIGIO.
    pub signal: i32,
    /// `O_*` of the open file, with O_ASYNC where it notifies.
    pub flags: u32,
}

/// A lock of a process, and a descriptor of the process for the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLock {
    /// The descriptor.
    pub number: u32,
    /// The lock.
    pub lock: Lock,
}
