//! Watches of files and directories (inotify(7)).

use serde::{Deserialize, Serialize};

/// inotify_init1(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inotify {
    /// `O_NONBLOCK`.
    pub flags: u32,
    /// What it watches.
    pub watches: Vec<Watch>,
    /// All of that is on volumes, where others may change it, so it was held.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// inotify_add_watch(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// Its number.
    pub number: u32,
    /// What is watched, by a path inside.
    pub path: String,
    /// `IN_*`.
    pub mask: u32,
}
