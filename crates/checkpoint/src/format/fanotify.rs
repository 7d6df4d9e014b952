//! Watches of files and directories (fanotify(7)).

use serde::{Deserialize, Serialize};

/// fanotify_init(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fanotify {
    /// `FAN_*`, less FAN_CLOEXEC, which is the descriptor's.
    pub flags: u32,
    /// `O_*` of files that come with events.
    pub event_flags: u32,
    /// What it watches.
    pub marks: Vec<Mark>,
}

/// fanotify_mark(2), of a file or directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// What is watched, by a path inside.
    pub path: String,
    /// `FAN_MARK_*` that stay with a mark.
    pub flags: u32,
    /// Events that are told.
    pub mask: u64,
    /// Events that are not.
    pub ignored: u64,
}

impl Mark {
    /// The flags that stay.
    pub(crate) const FLAGS: u32 =
        libc::FAN_MARK_IGNORED_SURV_MODIFY | libc::FAN_MARK_EVICTABLE | libc::FAN_MARK_IGNORE;
}
