//! Watches of files and directories (fanotify(7)).

use serde::{Deserialize, Serialize};

/// fanotify_init(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fanotify {
    /// `FAN_*`, without FAN_CLOEXEC, which belongs to the descriptor.
    pub flags: u32,
    /// `O_*` of files that are opened for events.
    pub event_flags: u32,
    /// Its marks.
    pub marks: Vec<Mark>,
}

/// fanotify_mark(2), of a file or directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The watched file or directory, by a path inside.
    pub path: String,
    /// `FAN_MARK_*` that are stored with a mark.
    pub flags: u32,
    /// Reported events.
    pub mask: u64,
    /// Ignored events.
    pub ignored: u64,
}

impl Mark {
    /// The flags that are stored with a mark.
    pub const FLAGS: u32 =
        libc::FAN_MARK_IGNORED_SURV_MODIFY | libc::FAN_MARK_EVICTABLE | libc::FAN_MARK_IGNORE;
}
