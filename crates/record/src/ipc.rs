//! IPC namespaces (ipc_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

impl Ipc {
    /// The limit by which memory of System V that no process has attached is removed.
    pub const REMOVES_LOOSE_MEMORY: &str = "kernel/shm_rmid_forced";
}

/// Limits of a namespace, below `/proc/sys` (sysvipc(7), mq_overview(7)).
pub const IPC_LIMITS: [&str; 13] = [
    "kernel/shmmax",
    "kernel/shmall",
    "kernel/shmmni",
    Ipc::REMOVES_LOOSE_MEMORY,
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "fs/mqueue/queues_max",
    "fs/mqueue/msg_max",
    "fs/mqueue/msgsize_max",
    "fs/mqueue/msg_default",
    "fs/mqueue/msgsize_default",
];

/// One namespace. Objects in it refer to it: those of System V ([`crate::SystemVHead`]) and POSIX
/// message queues ([`crate::MessageQueue`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipc {}
