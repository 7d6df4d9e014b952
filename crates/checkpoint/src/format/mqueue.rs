//! POSIX message queues.

use serde::{Deserialize, Serialize};

use super::Bytes;

/// A queue (mq_overview(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageQueue {
    /// Its name, without the slash; `None` where it was removed while somebody has it open.
    #[serde(default)]
    pub name: Option<String>,
    /// Permission bits.
    pub mode: u32,
    /// Its owner, by the ids inside.
    pub uid: u32,
    /// Its group, the same way.
    pub gid: u32,
    /// How many messages it holds at most.
    pub messages_max: u64,
    /// How many bytes each has at most.
    pub message_bytes: u64,
    /// The IPC namespace it is in, an object; none is the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
    /// What is in it, in the order in which it is received.
    #[serde(default)]
    pub messages: Vec<QueuedMessage>,
}

/// A message in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedMessage {
    /// Its priority.
    pub priority: u32,
    /// What it says.
    pub data: Bytes,
}

/// An open queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenQueue {
    /// The object of the queue.
    pub queue: usize,
    /// `O_*`.
    pub flags: u32,
}
