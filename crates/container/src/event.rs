//! What happened, one line per event.
//!
//! `LIB/events` is a file of JSON lines. Each event is one write(2) to a descriptor opened with
//! O_APPEND, so that lines of several processes never mix; when the file passes
//! [`EVENTS_BYTES_MAX`] it becomes `events.1` and a new one begins.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// LIMIT: bytes of events kept, twice this with the file before.
const EVENTS_BYTES_MAX: u64 = 8 << 20;

/// Something that happened to a container or an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in milliseconds since the epoch.
    pub unix_ms: i64,
    /// What: `create start exec pause unpause kill stop die remove rename update restart`, and for
    /// images `import pull tag untag`.
    pub kind: String,
    /// To which container or image.
    pub id: String,
    /// Its name at that time.
    pub name: String,
    /// More, by kind: `exit_code` of `die`, `signal` of `kill`, ...
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

/// Milliseconds since the epoch.
pub(crate) fn now_unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}

/// Appends an event.
pub(crate) fn append(path: &Path, event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(event)
        .map_err(|e| Error::Corrupt { path: path.into(), what: e.to_string() })?;
    line.push(b'\n');
    let write = || -> std::io::Result<u64> {
        let mut file = File::options().append(true).create(true).open(path)?;
        file.write_all(&line)?;
        Ok(file.metadata()?.len())
    };
    let len = write().map_err(Error::file("cannot write", path))?;
    if len > EVENTS_BYTES_MAX {
        let _ = fs::rename(path, path.with_extension("1")); // another process may just have done so
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_lines_and_the_file_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        let event = Event {
            unix_ms: 1,
            kind: "create".into(),
            id: "x".into(),
            name: "n".into(),
            attributes: BTreeMap::from([("pad".into(), "y".repeat(1 << 20))]),
        };
        for _ in 0..10 {
            append(&path, &event).unwrap();
        }
        let old = fs::read_to_string(path.with_extension("1")).unwrap();
        assert_eq!(old.lines().count(), 8);
        assert_eq!(serde_json::from_str::<Event>(old.lines().next().unwrap()).unwrap(), event);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
    }
}
