//! Watches of files and directories (inotify(7)).

use serde::{Deserialize, Serialize};

/// inotify_init1(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inotify {
    /// `O_*`.
    pub flags: u32,
    /// Its watches.
    pub watches: Vec<Watch>,
    /// All watches are on volumes, which processes outside may change, so the instance was held
    /// open.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// inotify_add_watch(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// The watch descriptor.
    pub number: u32,
    /// The watched file or directory, by a path inside.
    pub path: String,
    /// `IN_*`.
    pub mask: u32,
}
