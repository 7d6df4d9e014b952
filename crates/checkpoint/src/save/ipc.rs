//! IPC namespaces: the contents of each are found as in the container's own, through the tables of
//! one of its processes.

use std::os::fd::OwnedFd;

use dormouse_kernel::call::{CloneFlags, Namespace};
use dormouse_kernel::{Errno, pidfd, proc, process};
use dormouse_record::{Error, IPC_LIMITS, Ipc, Result as Outcome, Thing};

use super::refusal::Reason;
use super::seen::Seen;
use super::subject::Subject;
use super::survey::Survey;
use super::{mqueue, system_v};
use crate::look::ipc::inside;

/// Finds all namespaces, with their contents.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) -> Outcome<()> {
    let Some(first) = tree.first() else { return Ok(()) };
    let container = first.link("ipc");
    for seen in tree.iter().filter(|seen| !seen.is_zombie) {
        // The process may have exited meanwhile: nothing is stopped yet.
        let Some(link) = seen.link("ipc").filter(|link| Some(*link) != container) else {
            continue;
        };
        if survey.ipc.by_link.contains_key(link) {
            continue;
        }
        let found = one(survey, seen)?;
        survey.ipc.by_link.extend(found.map(|found| (link.to_owned(), found)));
    }
    Ok(())
}

/// Adds the namespace of a process and returns its number, unless the process has exited.
fn one(survey: &mut Survey<'_>, seen: &Seen) -> Outcome<Option<Result<usize, Reason>>> {
    let Some(tables) = system_v::tables(seen)? else { return Ok(None) };
    let failed = |e: Errno| format!("that cannot be inspected: {e}");
    let known = limits(tables.namespace()).and_then(|changed| {
        let device = rustix::fs::fstat(tables.queues())?.st_dev;
        Ok((changed, device))
    });
    let (changed, device) = match known {
        Ok(known) => known,
        Err(e) => return Ok(Some(Err(failed(e)))),
    };
    if let Some((name, _)) = changed.first() {
        return Ok(Some(Err(format!("with a changed {name}, which is not saved yet"))));
    }
    let object = survey.add(Thing::Ipc(Ipc {}));
    survey.ipc.by_device.insert(device, object);
    mqueue::find(survey, seen, &tables, Some(object))?;
    system_v::find(survey, seen, &tables, Some(object))?;
    Ok(Some(Ok(object)))
}

/// The limits that differ from their values in a new namespace: names, and the texts of their files.
pub(super) fn limits(namespace: &OwnedFd) -> Result<Vec<(&'static str, String)>, Errno> {
    let values = || {
        let value = |name| proc::whole_text(format!("/proc/sys/{name}"));
        let read = IPC_LIMITS.iter().map(value).collect::<std::io::Result<Vec<String>>>();
        read.map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
    };
    let own = inside(namespace, values)?;
    // A separate thread creates a new namespace, which is removed when the thread ends.
    let new = std::thread::scope(|scope| {
        let new = scope.spawn(|| {
            let made = process::unshare(CloneFlags::NEWIPC);
            made.map_err(|e| Errno::from_raw_os_error(e.errno()))?;
            values()
        });
        new.join().unwrap_or(Err(Errno::IO))
    })?;
    let all = IPC_LIMITS.into_iter().zip(own.into_iter().zip(new));
    Ok(all.filter(|(_, (own, new))| own != new).map(|(name, (own, _))| (name, own)).collect())
}

/// The changed limits of the container's own namespace.
pub(super) fn own_limits(subject: &Subject) -> Outcome<Vec<(String, String)>> {
    if !subject.own_ipc {
        return Ok(Vec::new());
    }
    let namespace = pidfd::open(subject.init)
        .and_then(|pidfd| pidfd::namespace(&pidfd, Namespace::Ipc))
        .map_err(|e| Error::Elsewhere(e.to_string()))?;
    let found = limits(&namespace).map_err(Error::of("read the ipc limits", subject.init))?;
    Ok(found.into_iter().map(|(name, text)| (name.to_owned(), text)).collect())
}
