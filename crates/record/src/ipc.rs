//! IPC namespaces (ipc_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One namespace. Objects in it refer to it: those of System V ([`crate::SystemVHead`]) and POSIX
/// message queues ([`crate::MessageQueue`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipc {}
