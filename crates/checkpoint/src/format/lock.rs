//! Locks of files (fcntl(2), flock(2)).

use serde::{Deserialize, Serialize};

/// One lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lock {
    /// Whose it is, and by which call.
    pub kind: LockKind,
    /// Nobody else may have one.
    pub writes: bool,
    /// First byte.
    pub start: u64,
    /// Last byte; `None` where it reaches as far as the file may grow.
    pub end: Option<u64>,
}

/// Kinds of locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LockKind {
    /// A process's (F_SETLK).
    Process,
    /// An open file's (F_OFD_SETLK).
    OpenFile,
    /// An open file's as a whole (flock(2)).
    Whole,
}

/// A lease of an open file (fcntl(2), F_SETLEASE), as a process that has it open takes it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The descriptor.
    pub number: u32,
    /// Nobody else may have it open.
    pub writes: bool,
    /// Who is told when somebody wants to open it: F_OWNER_TID, F_OWNER_PID or F_OWNER_PGRP.
    pub owner_kind: i32,
    /// By the container's ids; 0 for nobody.
    pub owner: u32,
    /// The signal; 0 for SIGIO.
    pub signal: i32,
}

/// A lock of a process, and a descriptor of it that leads to the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLock {
    /// The descriptor.
    pub number: u32,
    /// The lock.
    pub lock: Lock,
}
