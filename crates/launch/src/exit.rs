//! The exit status of a process, and the file that keeps it after the parent and all clients have
//! exited.
//!
//! The keeper writes `RUN/c/ID/exit` under another name and renames it, so that the file is either
//! absent or whole. The content is one JSON object; fields are only added:
//!
//! ```json
//! {"version":1,"pid":4711,"code":137,"signal":9,"oom":false,"finished_unix_ms":1763700000000}
//! ```

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::LaunchError;
use crate::protocol::Ended;

/// Name of the exit file in a container's runtime directory.
pub const EXIT_FILE: &str = "exit";

/// The exit status of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitStatus {
    /// podman's exit code: the program's own, or 128 and the number of the signal that ended it.
    pub code: i32,
    /// The signal that ended it.
    #[serde(default)]
    pub signal: Option<i32>,
    /// Killed by its memory limit. The keeper never sets this: the engine reads it from the cgroup.
    #[serde(default)]
    pub oom: bool,
    /// Milliseconds since the epoch.
    #[serde(default)]
    pub finished_unix_ms: i64,
}

impl From<Ended> for ExitStatus {
    fn from(e: Ended) -> Self {
        let signal = (e.signal != 0).then_some(e.signal);
        Self { code: e.code, signal, oom: false, finished_unix_ms: e.finished_unix_ms }
    }
}

impl ExitStatus {
    /// Writes the exit file of a container after the exit of its keeper.
    pub fn write(&self, container_dir: &Path, pid: u32) -> Result<(), LaunchError> {
        // Not the keeper's: it may write the exit of an adopted process at the same time.
        let (path, new) = (container_dir.join(EXIT_FILE), container_dir.join(".exit-by-client"));
        let Self { code, signal, oom, finished_unix_ms } = self;
        let text = serde_json::json!({
            "version": 1, "pid": pid, "code": code, "signal": signal, "oom": oom,
            "finished_unix_ms": finished_unix_ms,
        });
        let mut options = std::fs::OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&new).and_then(|mut f| f.write_all(text.to_string().as_bytes()));
        written
            .and_then(|()| std::fs::rename(&new, &path))
            .map_err(|source| LaunchError::ExitFile { path, source })
    }

    /// Reads the exit file in a container's runtime directory; `None` if there is none of process
    /// `pid`. There may be one of an earlier, abandoned start.
    pub fn read(container_dir: &Path, pid: u32) -> Result<Option<Self>, LaunchError> {
        #[derive(Deserialize)]
        struct Of {
            pid: u32,
            #[serde(flatten)]
            status: ExitStatus,
        }
        let path = container_dir.join(EXIT_FILE);
        match std::fs::read(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(LaunchError::ExitFile { path, source }),
            Ok(bytes) => match serde_json::from_slice::<Of>(&bytes) {
                Ok(found) => Ok((found.pid == pid).then_some(found.status)),
                Err(e) => Err(LaunchError::ExitFile { path, source: e.into() }),
            },
        }
    }
}
