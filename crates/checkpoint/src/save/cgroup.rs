//! Control groups that processes have created below the container's own: read where they are
//! mounted inside, through the root of the first process.
//!
//! A process in a group that is frozen from inside can be stopped, but cannot run an injected call.
//! Such groups are [thawed](Thawed) as long as all processes are stopped.

use super::object::Survey;
use super::tree::Seen;
use super::{Subject, deleted};
use crate::error::{Error, Refusal, Result as Outcome};
use crate::format::{Cgroup, Cgroups, SETTINGS, Thing};
use crate::look::cgroup::{FREEZE, Own, open, read, set_freeze, walk_all};
use crate::look::ids::Maps;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

/// Finds all groups, and refuses those that cannot be saved.
pub(super) fn find(survey: &mut Survey<'_>, first: &Seen) {
    if !survey.subject.cgroups {
        return;
    }
    survey.own_cgroup = Own::of(first.pid);
    if survey.own_cgroup.is_none() {
        return;
    }
    let mut groups = Vec::new();
    let walked = walk_all(first.pid, &mut |dir, path| {
        groups.push(group(dir, path, first.maps())?);
        Ok(())
    });
    match walked {
        Ok(()) => drop(survey.add(Thing::Cgroups(Cgroups { groups }))),
        Err(why) => survey.found.refusals.push(Refusal {
            pid: 0,
            process: String::new(),
            what: String::new(),
            why,
        }),
    }
}

fn group(dir: &File, path: &str, maps: &Maps) -> Result<Cgroup, String> {
    let failed = |e: std::io::Error| format!("the control group '{path}' cannot be read: {e}");
    let said = |name: &str| read(dir.as_fd(), name).map_err(|e| failed(e.into()));
    if said("cgroup.type")?.is_some_and(|kind| kind.starts_with("threaded")) {
        return Err(format!("the control group '{path}' has threads in it, not saved yet"));
    }
    let is_own = path.is_empty();
    let mut settings = Vec::new();
    for (name, usual) in SETTINGS.iter().filter(|_| !is_own) {
        if let Some(value) = said(name)?.filter(|value| value != usual) {
            settings.push(((*name).to_owned(), value));
        }
    }
    let owner = |uid, gid| match maps.owner(uid, gid) {
        // An id outside the container is the engine's, for processes that were started later.
        (u32::MAX, _) | (_, u32::MAX) => (0, 0),
        owner => owner,
    };
    let stat = dir.metadata().map_err(failed)?;
    let procs = open(dir.as_fd(), "cgroup.procs", OFlags::PATH).and_then(rustix::fs::fstat);
    let procs = procs.map_err(|e| failed(e.into()))?;
    let hands_down = said("cgroup.subtree_control")?.unwrap_or_default();
    Ok(Cgroup {
        path: path.to_owned(),
        mode: stat.mode() & 0o777,
        owner: owner(stat.uid(), stat.gid()),
        manager: owner(procs.st_uid, procs.st_gid),
        frozen: !is_own && said(FREEZE)?.is_some_and(|text| text != "0"),
        hands_down: hands_down.split_ascii_whitespace().map(str::to_owned).collect(),
        settings,
        attributes: deleted::attributes(dir, &format!("the control group '{path}'"))?,
    })
}

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
            let said = read(dir.as_fd(), FREEZE).map_err(failed)?;
            if !path.is_empty() && said.is_some_and(|text| text != "0") {
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
