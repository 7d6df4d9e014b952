//! IPC namespaces (ipc_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One of them. What is in it names it: objects of System V ([`super::SystemVHead`]) and POSIX message
/// queues ([`super::MessageQueue`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipc {}
