//! Descriptors of processes (pidfd_open(2)), and open files of procfs that are of a process (proc(5)).

use serde::{Deserialize, Serialize};

/// A descriptor of a process or thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PidFd {
    /// The process or thread, by the container's ids.
    pub pid: u32,
    /// `PIDFD_NONBLOCK`, `PIDFD_THREAD`.
    pub flags: u32,
}

/// An open file or directory of procfs below `/proc/PID`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessFile {
    /// The process, by the container's ids.
    pub pid: u32,
    /// The path below `/proc/PID`; empty for the directory itself.
    pub path: String,
    /// `O_*`, without those that only open(2) uses.
    pub flags: u32,
    /// The file offset.
    pub offset: u64,
    /// File type bits of `st_mode`.
    pub file_type: u32,
}

impl ProcessFile {
    /// Its path.
    pub fn whole_path(&self) -> String {
        let Self { pid, path, .. } = self;
        if path.is_empty() { format!("/proc/{pid}") } else { format!("/proc/{pid}/{path}") }
    }
}
