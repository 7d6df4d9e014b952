//! The log of events, one line each.
//!
//! `LIB/events` is a file of JSON lines. Each event is one write(2) to a descriptor opened with
//! O_APPEND, so that lines of several processes never mix. When the file exceeds
//! [`EVENTS_BYTES_MAX`] it is renamed to `events.1` and a new one begins.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dormouse_api::Event;
pub(crate) use dormouse_kernel::clock::now_unix_ms;

use crate::disk::FILE_MODE;
use crate::error::{Error, Result};

/// LIMIT: bytes of events kept; the renamed file doubles this.
const EVENTS_BYTES_MAX: u64 = 8 << 20;

/// Reader of future events.
#[derive(Debug)]
pub struct Follow {
    path: PathBuf,
    /// `None` until the first event exists.
    file: Option<BufReader<File>>,
}

impl Follow {
    /// Starts at the end of the existing events.
    pub(crate) fn from_end(path: PathBuf) -> Result<Self> {
        let mut follow = Self { file: open(&path)?, path };
        if let Some(file) = &mut follow.file {
            let end = file.seek(SeekFrom::End(0));
            end.map_err(Error::file("cannot read", &follow.path))?;
        }
        Ok(follow)
    }

    /// Returns the next event; `None` if there is none yet.
    ///
    /// ORDER: first test whether the file has been replaced, then read it to its end: events before
    /// the replacement are in the old file.
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
                // A line cut short by a full disk is no event.
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

/// Returns whether a file is still the one at this path: a full one is renamed.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => true, // between the rename and the first event there is no file
    }
}

/// Appends an event.
pub(crate) fn append(path: &Path, event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(event)
        .map_err(|e| Error::Corrupt { path: path.into(), what: e.to_string() })?;
    line.push(b'\n');
    let write = || -> std::io::Result<u64> {
        let mut options = File::options();
        let mut file = options.append(true).create(true).mode(FILE_MODE).open(path)?;
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
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn follow_continues_after_file_is_renamed() {
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
                "events before the first read are skipped"
            );
        }
    }

    #[test]
    fn events_are_lines_in_bounded_file() {
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
