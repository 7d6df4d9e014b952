//! IPC namespaces (ipc_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One namespace. Objects in it refer to it: those of System V ([`super::SystemVHead`]) and POSIX
/// message queues ([`super::MessageQueue`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipc {}
