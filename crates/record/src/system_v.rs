//! Objects of System V (sysvipc(7)): they belong to no process, but to the IPC namespace.

use serde::{Deserialize, Serialize};

use crate::{Bytes, Run};

/// Attributes of all three kinds. User and group ids are the container's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVHead {
    /// Its id.
    pub id: i32,
    /// Its key; 0 for none.
    pub key: i32,
    /// Permission bits.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// The user that created it.
    pub creator_uid: u32,
    /// The group of the creator.
    pub creator_gid: u32,
    /// The object of its IPC namespace; `None` for the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
}

/// Shared memory (shmget(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVMemory {
    /// Id, key and permissions.
    pub head: SystemVHead,
    /// Its length.
    pub bytes: u64,
    /// Removed at its last detach (IPC_RMID).
    #[serde(default)]
    pub removed: bool,
    /// Its contents; addresses are offsets.
    pub runs: Vec<Run>,
}

/// A set of semaphores (semget(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVSemaphores {
    /// Id, key and permissions.
    pub head: SystemVHead,
    /// Their values.
    pub values: Vec<u16>,
}

/// A message queue (msgget(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVQueue {
    /// Id, key and permissions.
    pub head: SystemVHead,
    /// Its messages.
    pub messages: Vec<SystemVMessage>,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVMessage {
    /// Its type.
    pub kind: i64,
    /// Its text.
    pub text: Bytes,
}
