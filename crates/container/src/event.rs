//! What happened, one line per event.
//!
//! `LIB/events` is a file of JSON lines. Each event is one write(2) to a descriptor opened with
//! O_APPEND, so that lines of several processes never mix; when the file passes
//! [`EVENTS_BYTES_MAX`] it becomes `events.1` and a new one begins.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
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
    /// What: `create start exec pause unpause kill stop die remove rename update restart sleep
    /// drowsy wake awake checkpoint restore`, and for images `import pull tag untag`.
    pub kind: String,
    /// To which container or image.
    pub id: String,
    /// Its name at that time.
    pub name: String,
    /// More, by kind: `exit_code` of `die`, and `reason` where its checkpoint turned out to be damaged;
    /// `signal` of `kill`, `reason` of `sleep`, `drowsy` and
    /// `wake` (`operator idle called timer keeper`) and of `awake`: why one that is idle does not fall asleep, ...
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

/// The events that come, read as they do.
#[derive(Debug)]
pub struct Follow {
    path: PathBuf,
    /// None where there was no event yet.
    file: Option<BufReader<File>>,
}

impl Follow {
    /// From the end of what there is.
    pub(crate) fn from_end(path: PathBuf) -> Result<Self> {
        let mut follow = Self { file: open(&path)?, path };
        if let Some(file) = &mut follow.file {
            let end = file.seek(SeekFrom::End(0));
            end.map_err(Error::file("cannot read", &follow.path))?;
        }
        Ok(follow)
    }

    /// The next event; `None` where none has come yet.
    ///
    /// ORDER: first it is looked whether the file has been replaced, then it is read to its end: what
    /// came before the change is in the old one.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        loop {
            let is_current =
                self.file.as_ref().is_some_and(|file| is_at(file.get_ref(), &self.path));
            let mut line = String::new();
            while let Some(file) = &mut self.file {
                line.clear();
                let read = file.read_line(&mut line);
                if read.map_err(Error::file("cannot read", &self.path))? == 0 {
                    break;
                }
                // A line that a full disk cut short is no event.
                if let Ok(event) = serde_json::from_str(&line) {
                    return Ok(Some(event));
                }
            }
            if is_current {
                return Ok(None);
            }
            let Some(file) = open(&self.path)? else { return Ok(None) };
            self.file = Some(file);
        }
    }
}

fn open(path: &Path) -> Result<Option<BufReader<File>>> {
    match File::open(path) {
        Ok(file) => Ok(Some(BufReader::new(file))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::file("cannot read", path)(e)),
    }
}

/// Whether a file is still the one at this path: a full one is renamed.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => true, // between the rename and the first event there is no file
    }
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
    fn events_are_followed_over_a_change_of_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        let event = |id: &str| Event {
            unix_ms: 1,
            kind: "start".into(),
            id: id.into(),
            name: String::new(),
            attributes: BTreeMap::new(),
        };
        let mut early = Follow::from_end(path.clone()).unwrap();
        assert_eq!(early.next_event().unwrap(), None, "there is no file");
        append(&path, &event("a")).unwrap();
        let mut late = Follow::from_end(path.clone()).unwrap();
        append(&path, &event("b")).unwrap();
        fs::rename(&path, path.with_extension("1")).unwrap();
        assert_eq!(late.next_event().unwrap(), Some(event("b")));
        assert_eq!(late.next_event().unwrap(), None);
        append(&path, &event("c")).unwrap();
        for wanted in [Some(event("c")), None] {
            assert_eq!(late.next_event().unwrap(), wanted);
            assert_eq!(
                early.next_event().unwrap(),
                wanted,
                "what was before the first look is gone"
            );
        }
    }

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
