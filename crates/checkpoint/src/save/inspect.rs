//! The inspection of a container while its processes run: what is there, and what cannot be saved.

use dormouse_kernel::proc;
use dormouse_record::{Error, Refusal, Result};

use super::ahead::Ahead;
use super::seen::Seen;
use super::subject::Subject;
use super::survey::{Found, Survey};
use super::{
    cgroup, cgroup_namespace, ipc, keyring, mount, mqueue, net, object, refusal, shared, system_v,
    terminal, time, tmpfs, tree, user, uts,
};
use crate::look::ipc::Tables;

/// How often the container is inspected before a refusal counts. Nothing is stopped yet: a process
/// that is created or exits between two inspections may seem to be outside the container.
const LOOKS: usize = 12;

/// The result of an inspection while everything ran.
pub(super) struct Look {
    pub(super) tree: Vec<Seen>,
    pub(super) found: Found,
    /// The tables of the container's own IPC namespace.
    pub(super) tables: Option<Tables>,
    pub(super) settings: Settings,
}

/// Settings of the container's own namespaces that processes have changed. Each is read while all run.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// The host name and the NIS domain name.
    pub(super) names: [Option<String>; 2],
    /// Limits of IPC objects: the name below `/proc/sys`, and the text of the file.
    pub(super) limits: Vec<(String, String)>,
}

/// Inspects a container until nothing is refused, or [`LOOKS`] times.
pub(super) fn look(subject: &Subject, ahead: Option<&Ahead>) -> Result<Look> {
    let mut looks = 1;
    let mut tables = None;
    loop {
        let tree = tree::look(subject)?;
        if let (Some(first), true, true) = (tree.first(), subject.own_ipc, tables.is_none()) {
            tables = system_v::tables(first)?;
        }
        let mut found = survey(subject, ahead, &tree, tables.as_ref())?;
        if found.refusals.is_empty() || looks == LOOKS {
            let mut settings = Settings::default();
            match uts::own(subject)? {
                Ok(names) => settings.names = names,
                Err(why) => found.refusals.push(refusal::of_object(why)),
            }
            let key = tree.first().and_then(|first| keyring::find(first.maps()));
            found.refusals.extend(key.map(refusal::of_object));
            settings.limits = ipc::own_limits(subject, tables.as_ref())?;
            return Ok(Look { tree, found, tables, settings });
        }
        looks += 1;
    }
}

/// Inspects a container once.
fn survey(
    subject: &Subject,
    ahead: Option<&Ahead>,
    tree: &[Seen],
    tables: Option<&Tables>,
) -> Result<Found> {
    let mut survey = Survey::new(subject, ahead);
    without_process(&mut survey, tree, tables)?;
    for process in tree {
        let before = (survey.found.refusals.len(), survey.found.passing);
        let looked = object::survey_process(&mut survey, process);
        if looked.is_ok() && survey.found.refusals.len() == before.0 {
            continue;
        }
        // Nothing is stopped yet: a process that has exited meanwhile is no reason to refuse.
        if process.has_ended() {
            survey.found.refusals.truncate(before.0);
            survey.found.passing = before.1;
        } else {
            looked?;
        }
    }
    terminal::sessions(&mut survey, tree);
    Ok(object::finish(survey, tree))
}

/// Inspects objects that belong to no process.
pub(super) fn without_process(
    survey: &mut Survey<'_>,
    tree: &[Seen],
    tables: Option<&Tables>,
) -> Result<()> {
    outsiders(survey, tree);
    shared::find(survey, tree);
    user::find(survey, tree);
    // ORDER: mounts may show the message queues of these namespaces.
    ipc::find(survey, tree)?;
    net::find(survey, tree);
    time::find(survey, tree)?;
    mount::find(survey, tree);
    let Some(first) = tree.first() else { return Ok(()) };
    if let Some(tables) = tables {
        mqueue::find(survey, first, tables, None)?;
        system_v::find(survey, first, tables, None)?;
    }
    tmpfs::find(survey, first);
    cgroup::find(survey, first);
    cgroup_namespace::find(survey, tree);
    Ok(())
}

/// Refuses processes of the cgroup that are not in the tree.
fn outsiders(survey: &mut Survey<'_>, tree: &[Seen]) {
    for pid in &survey.subject.pids {
        let is_init = survey.subject.has_init && *pid == survey.subject.init;
        if is_init || tree.iter().any(|seen| seen.pid == *pid) {
            continue;
        }
        // The process may have exited since.
        let Ok(fields) = proc::fields(*pid) else { continue };
        if fields.field("State").is_some_and(|s| s.starts_with(['Z', 'X'])) {
            continue;
        }
        survey.found.refusals.push(Refusal {
            pid: fields.pids().last().copied().unwrap_or(0),
            process: fields.field("Name").unwrap_or_default().to_owned(),
            what: String::new(),
            why: "its parent is outside the container (it was started by exec): end it first"
                .into(),
        });
    }
}

/// Returns what was found, or an error if something of it cannot be saved.
pub(super) fn unless_refused(found: Found) -> Result<Found> {
    match found.refusals.len() {
        0 => Ok(found),
        all if all == found.passing => Err(Error::Passing(found.refusals)),
        _ => Err(Error::Refused(found.refusals)),
    }
}
