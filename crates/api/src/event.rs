//! Events of containers and images.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An event of a container or an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time, in milliseconds since the epoch.
    pub unix_ms: i64,
    /// Kind.
    pub kind: EventKind,
    /// Id of the container or image.
    pub id: String,
    /// Its name at that time.
    pub name: String,
    /// Further facts, by kind: `exit_code` of `die`, and its `reason` if the checkpoint was found
    /// to be damaged; `signal` of `kill`; `reason` of `sleep`, `drowsy` and `wake` (`operator idle
    /// called timer memory keeper out-of-memory evicted`), of `restart` and `kill` (`evicted`) and of `awake`
    /// (why a container does not fall asleep); of `evict` the `action`, and in bytes `used`, `guarantee`, `above`,
    /// and `free`, `wanted`, `all` of what is short (`of`: `host` or `containers`);
    /// `cause` and `reason` of `wake_failed`, ...
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

/// Defines the kinds and their words.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $word:literal,)*) => {
        /// Kind of an event.
        ///
        /// The file of events may have been written by a newer program. A word without a kind here
        /// is kept as it is.
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
            /// A kind of another version.
            Other(String),
        }

        impl EventKind {
            /// All kinds of this version.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Returns the word of the file and of the commands.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$kind => $word,)*
                    Self::Other(word) => word,
                }
            }
        }

        impl From<&str> for EventKind {
            fn from(word: &str) -> Self {
                match word {
                    $($word => Self::$kind,)*
                    _ => Self::Other(word.to_owned()),
                }
            }
        }
    };
}

kinds! {
    /// A container was created.
    Create = "create",
    /// Its first process was started.
    Start = "start",
    /// A process was added to it.
    Exec = "exec",
    /// It was frozen by an operator.
    Pause = "pause",
    /// It was resumed by an operator.
    Unpause = "unpause",
    /// A signal was sent to it.
    Kill = "kill",
    /// It was stopped by an operator.
    Stop = "stop",
    /// Its first process has exited.
    Die = "die",
    /// It was removed.
    Remove = "remove",
    /// It has another name.
    Rename = "rename",
    /// Its settings were changed.
    Update = "update",
    /// It was started again after an exit.
    Restart = "restart",
    /// It fell asleep.
    Sleep = "sleep",
    /// It became drowsy.
    Drowsy = "drowsy",
    /// It was woken.
    Wake = "wake",
    /// It could not be woken, and sleeps on.
    WakeFailed = "wake_failed",
    /// A trial restore of its checkpoint failed or differed, and it continues.
    TrialFailed = "trial_failed",
    /// There was no room for a trial restore of its checkpoint, which is used unproven.
    TrialSkipped = "trial_skipped",
    /// It is idle and cannot fall asleep.
    Awake = "awake",
    /// There is less place below its disk than the disk has free: it accepts no more than there is.
    DiskShort = "disk_short",
    /// Its disk accepts all that it has free again.
    DiskEnough = "disk_enough",
    /// It gives memory, because the host or all containers together are short of it.
    Evict = "evict",
    /// A checkpoint of it was made.
    Checkpoint = "checkpoint",
    /// It was restored from a checkpoint.
    Restore = "restore",
    /// An image was imported.
    Import = "import",
    /// An image was pulled from a registry.
    Pull = "pull",
    /// An image was pushed to a registry.
    Push = "push",
    /// An image received a name.
    Tag = "tag",
    /// An image lost a name.
    Untag = "untag",
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for EventKind {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for EventKind {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d).map(|word| word.as_str().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_as_it_was_written() {
        for kind in EventKind::ALL {
            assert_eq!(EventKind::from(kind.as_str()), *kind);
            assert!(!matches!(EventKind::from(kind.as_str()), EventKind::Other(_)));
        }
    }

    #[test]
    fn line_of_a_newer_program_is_kept_as_it_is() {
        let line = r#"{"unix_ms":7,"kind":"hover","id":"x","name":"n","attributes":{"a":"b"}}"#;
        let event: Event = serde_json::from_str(line).unwrap();
        assert_eq!(event.kind, EventKind::Other("hover".into()));
        assert_eq!(event.kind.to_string(), "hover");
        assert_eq!(serde_json::to_string(&event).unwrap(), line);
    }

    #[test]
    fn event_has_its_fields_in_the_printed_order() {
        let event = Event {
            unix_ms: 1_700_000_000_000,
            kind: EventKind::Start,
            id: "x".into(),
            name: "n".into(),
            attributes: BTreeMap::new(),
        };
        let json = r#"{"unix_ms":1700000000000,"kind":"start","id":"x","name":"n"}"#;
        assert_eq!(serde_json::to_string(&event).unwrap(), json);
    }
}
