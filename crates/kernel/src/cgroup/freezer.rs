//! Stopping all processes of a cgroup: v2's own freezer, or v1's controller where v2 is not there.

use std::time::{Duration, Instant};

use super::dir::Dir;
use super::error::CgroupError;
use super::wait::wait_event;
use crate::error::{CallError, Result as CallResult};

/// Longest wait for processes to freeze. One that waits for a disk or for its vforked child to
/// exec cannot be frozen before that is done.
const FREEZE_WITHIN: Duration = Duration::from_secs(10);

/// The freezer of a cgroup.
#[derive(Debug)]
pub(super) enum Freezer<'a> {
    V2(&'a Dir),
    V1(&'a Dir),
    None,
}

impl<'a> Freezer<'a> {
    /// Returns the freezer of a cgroup, by its directories.
    pub(super) fn of(v2: Option<&'a Dir>, v1: Option<&'a Dir>) -> Self {
        match (v2, v1) {
            (Some(v2), _) => Self::V2(v2),
            (None, Some(v1)) => Self::V1(v1),
            (None, None) => Self::None,
        }
    }

    /// Returns when the last process is frozen. The error contains `pids` if some did not freeze;
    /// then all are thawed again.
    pub(super) fn freeze(
        &self,
        pids: impl FnOnce() -> Result<Vec<u32>, CgroupError>,
    ) -> Result<(), CgroupError> {
        let deadline = Instant::now() + FREEZE_WITHIN;
        let frozen = match self {
            Self::V2(dir) => dir
                .write("cgroup.freeze", "1")
                .and_then(|()| wait_event(dir, "frozen", 1, deadline)),
            Self::V1(dir) => freeze_v1(dir, deadline),
            Self::None => {
                Err(CallError::new("openat", "\"freezer.state\"".into(), libc::EOPNOTSUPP))
            }
        };
        match frozen {
            Ok(true) => Ok(()),
            Ok(false) => {
                let pids = pids().unwrap_or_default();
                self.thaw()?;
                Err(CgroupError::StillRunning { pids, waited: FREEZE_WITHIN })
            }
            Err(e) => {
                let _ = self.thaw(); // the first error is the one that counts
                Err(CgroupError::Freeze(e))
            }
        }
    }

    /// No error where nothing is frozen.
    pub(super) fn thaw(&self) -> Result<(), CgroupError> {
        match self {
            Self::V2(dir) => dir.write("cgroup.freeze", "0"),
            Self::V1(dir) => dir.write("freezer.state", "THAWED"),
            Self::None => Ok(()),
        }
        .map_err(CgroupError::Freeze)
    }

    /// Returns whether it was frozen and not thawed since.
    pub(super) fn is_frozen(&self) -> Result<bool, CgroupError> {
        match self {
            Self::V2(dir) => dir.read("cgroup.freeze").map(|text| text.trim() == "1"),
            Self::V1(dir) => dir.read("freezer.state").map(|text| text.trim() != "THAWED"),
            Self::None => Ok(false),
        }
        .map_err(CgroupError::Read)
    }
}

/// v1 has to be polled until the state is FROZEN: FREEZING stays when a process forked or was
/// stopped in between, until the state is read or written again (freezer-subsystem.rst).
fn freeze_v1(dir: &Dir, deadline: Instant) -> CallResult<bool> {
    let mut pause = Duration::from_micros(20);
    loop {
        dir.write("freezer.state", "FROZEN")?;
        if dir.read("freezer.state")?.trim() == "FROZEN" {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}
