//! The states of a container.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a container is in its life.
///
/// ```text
/// created -> running <-> paused
///            running <-> drowsy -> paused, asleep, stopped
///            running -> asleep -> running
///            running -> stopped -> running
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It has a configuration and a writable layer; no process was started yet.
    Created,
    /// Its first process lives.
    Running,
    /// Its processes live and are frozen.
    Paused,
    /// The same, but whoever calls lets them go on; their memory is elsewhere as far as there is room.
    Drowsy,
    /// It has no processes: they are files, and come back when somebody calls.
    Asleep,
    /// Its first process has ended, or the host has been rebooted.
    Stopped,
}

impl State {
    /// The word that lists and `inspect` show.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Drowsy => "drowsy",
            Self::Asleep => "asleep",
            Self::Stopped => "stopped",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
