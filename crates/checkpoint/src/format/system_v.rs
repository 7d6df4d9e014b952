//! Objects of System V (sysvipc(7)): they belong to no process, but to the ipc namespace.

use serde::{Deserialize, Serialize};

use super::{Bytes, Run};

/// What all three kinds have. User and group ids are the container's.
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
    /// Who made it.
    pub creator_uid: u32,
    /// And in which group.
    pub creator_gid: u32,
    /// The IPC namespace it is in, an object; none is the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
}

/// Shared memory (shmget(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVMemory {
    /// Who it is.
    pub head: SystemVHead,
    /// Its length.
    pub bytes: u64,
    /// It goes with the last who detaches it (IPC_RMID).
    #[serde(default)]
    pub removed: bool,
    /// Contents, with offsets for addresses.
    pub runs: Vec<Run>,
}

/// A set of semaphores (semget(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVSemaphores {
    /// Who it is.
    pub head: SystemVHead,
    /// Their values.
    pub values: Vec<u16>,
}

/// A queue of messages (msgget(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemVQueue {
    /// Who it is.
    pub head: SystemVHead,
    /// What is in it.
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
