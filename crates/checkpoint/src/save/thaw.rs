//! Control groups that are frozen from inside: thawed as long as all processes in them are stopped.
//!
//! A process in a frozen group can be stopped, but cannot run an injected call.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;

use dormouse_record::{Error, Result as Outcome};
use rustix::io::Errno;

use super::seen::Seen;
use super::subject::Subject;
use crate::look::cgroup::{FREEZE, Own, read, set_freeze, walk_all};

/// Groups that are thawed while all processes in them are stopped. The drop freezes them again.
///
/// ORDER: dropped before any process is released. LIMIT: a process that polls `cgroup.events`
/// inside is notified of it. If this program is killed, the groups stay thawed.
#[derive(Debug, Default)]
pub(super) struct Thawed(Vec<File>);

impl Thawed {
    /// Thaws all groups inside that are themselves frozen. All processes are stopped.
    pub(super) fn thaw(subject: &Subject, first: Option<&Seen>) -> Outcome<Self> {
        let mut thawed = Self::default();
        let first = first.filter(|first| subject.cgroups && Own::of(first.pid).is_some());
        let Some(first) = first else { return Ok(thawed) };
        let walked = walk_all(first.pid, &mut |dir, path| {
            let failed = |e: Errno| format!("the control group '{path}' cannot be thawed: {e}");
            let frozen = read(dir.as_fd(), FREEZE).map_err(failed)?;
            if !path.is_empty() && frozen.is_some_and(|text| text != "0") {
                thawed.0.push(set_freeze(dir.as_fd(), false).map_err(failed)?);
            }
            Ok(())
        });
        walked.map(|()| thawed).map_err(Error::Elsewhere)
    }
}

impl Drop for Thawed {
    fn drop(&mut self) {
        for file in &mut self.0 {
            let _ = file.write_all(b"1"); // written before, or removed since
        }
    }
}
