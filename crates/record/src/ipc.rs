//! IPC namespaces (ipc_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

impl Ipc {
    /// The limit by which memory of System V that no process has attached is removed.
    pub const REMOVES_LOOSE_MEMORY: &str = "kernel/shm_rmid_forced";
}

/// Limits of a namespace, below `/proc/sys` (sysvipc(7), mq_overview(7)), and the text of each in a new one. The
/// kernel gives every new namespace the same ones, whatever those of its creator are (`shm_init_ns`, `msg_init_ns`,
/// `sem_init_ns`, `mq_init_ns`). KERNEL(3.19): before, some of them depended on the memory of the host.
pub const IPC_LIMITS: [(&str, &str); 13] = [
    ("kernel/shmmax", "18446744073692774399"),
    ("kernel/shmall", "18446744073692774399"),
    ("kernel/shmmni", "4096"),
    (Ipc::REMOVES_LOOSE_MEMORY, "0"),
    ("kernel/msgmax", "8192"),
    ("kernel/msgmnb", "16384"),
    ("kernel/msgmni", "32000"),
    ("kernel/sem", "32000\t1024000000\t500\t32000"),
    ("fs/mqueue/queues_max", "256"),
    ("fs/mqueue/msg_max", "10"),
    ("fs/mqueue/msgsize_max", "8192"),
    ("fs/mqueue/msg_default", "10"),
    ("fs/mqueue/msgsize_default", "8192"),
];

/// One namespace. Objects in it refer to it: those of System V ([`crate::SystemVHead`]) and POSIX
/// message queues ([`crate::MessageQueue`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipc {}
