//! Descriptors of processes (pidfd_open(2)).

use serde::{Deserialize, Serialize};

/// A descriptor of a process or thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PidFd {
    /// The process or thread, by the container's ids.
    pub pid: u32,
    /// `PIDFD_NONBLOCK`, `PIDFD_THREAD`.
    pub flags: u32,
}
