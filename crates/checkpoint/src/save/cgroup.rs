//! Control groups that processes have created below the container's own: read where they are
//! mounted inside, through the root of the first process.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use dormouse_record::{Cgroup, Cgroups, SETTINGS, Thing};
use rustix::fs::OFlags;

use super::deleted;
use super::refusal;
use super::seen::Seen;
use super::survey::Survey;
use crate::look::cgroup::{FREEZE, Own, open, read, walk_all};
use crate::look::ids::Maps;

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
        Err(why) => survey.found.refusals.push(refusal::of_object(why)),
    }
}

fn group(dir: &File, path: &str, maps: &Maps) -> Result<Cgroup, String> {
    let failed = |e: std::io::Error| format!("the control group '{path}' cannot be read: {e}");
    let value_of = |name: &str| read(dir.as_fd(), name).map_err(|e| failed(e.into()));
    if value_of("cgroup.type")?.is_some_and(|kind| kind.starts_with("threaded")) {
        return Err(format!("the control group '{path}' has threads in it, not saved yet"));
    }
    let is_own = path.is_empty();
    let mut settings = Vec::new();
    for (name, usual) in SETTINGS.iter().filter(|_| !is_own) {
        if let Some(value) = value_of(name)?.filter(|value| value != usual) {
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
    let hands_down = value_of("cgroup.subtree_control")?.unwrap_or_default();
    Ok(Cgroup {
        path: path.to_owned(),
        mode: stat.mode() & 0o777,
        owner: owner(stat.uid(), stat.gid()),
        manager: owner(procs.st_uid, procs.st_gid),
        frozen: !is_own && value_of(FREEZE)?.is_some_and(|text| text != "0"),
        hands_down: hands_down.split_ascii_whitespace().map(str::to_owned).collect(),
        settings,
        attributes: deleted::attributes(dir, &format!("the control group '{path}'"))?,
    })
}
