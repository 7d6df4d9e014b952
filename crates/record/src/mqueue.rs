//! POSIX message queues.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// A queue (mq_overview(7)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageQueue {
    /// Its name, without the slash; `None` for a queue that was removed while a process has it
    /// open.
    #[serde(default)]
    pub name: Option<String>,
    /// Permission bits.
    pub mode: u32,
    /// Its owner, by the ids inside.
    pub uid: u32,
    /// Its group, by the ids inside.
    pub gid: u32,
    /// The maximum number of messages.
    pub messages_max: u64,
    /// The maximum bytes of a message.
    pub message_bytes: u64,
    /// The object of its IPC namespace; `None` for the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
    /// The size of its file (fstat(2)), if a process has changed it (ftruncate(2)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Its messages, in the order in which they are received.
    #[serde(default)]
    pub messages: Vec<QueuedMessage>,
}

/// A message in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedMessage {
    /// Its priority.
    pub priority: u32,
    /// Its contents.
    pub data: Bytes,
}

/// An open queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenQueue {
    /// The object of the queue.
    pub queue: usize,
    /// `O_*`.
    pub flags: u32,
    /// The file offset, which a read(2) of its state moves.
    #[serde(default)]
    pub offset: u64,
}
