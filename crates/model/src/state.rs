//! The states of a container.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The state of a container.
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
    /// Has a configuration and a writable layer; no process was started yet.
    Created,
    /// The first process is alive.
    Running,
    /// The processes are alive and frozen.
    Paused,
    /// Frozen like a paused container, but thawed by the next connection; its memory is in swap as
    /// far as there is room.
    Drowsy,
    /// Without processes: they are saved in files, and are restored at the next connection.
    Asleep,
    /// The first process has exited, or the host has been rebooted.
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

    /// Returns whether the container lives: it has processes, or will have them again after an
    /// event.
    pub fn is_alive(self) -> bool {
        matches!(self, Self::Running | Self::Paused | Self::Drowsy | Self::Asleep)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
