//! IPC namespaces: the contents of each are found as in the container's own, through the tables of
//! one of its processes.

use std::os::fd::OwnedFd;

use dormouse_kernel::{Errno, proc};
use dormouse_record::{Error, IPC_LIMITS, Ipc, Result as Outcome, Thing};

use super::refusal::Reason;
use super::seen::Seen;
use super::subject::Subject;
use super::survey::Survey;
use super::{mqueue, system_v};
use crate::look::ipc::{Tables, errno, inside};

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
    let known = limits(tables.namespace()).and_then(|limits| {
        let device = rustix::fs::fstat(tables.queues())?.st_dev;
        Ok((limits, device))
    });
    let (own, device) = match known {
        Ok(known) => known,
        Err(e) => return Ok(Some(Err(failed(e)))),
    };
    let mut all = IPC_LIMITS.into_iter().zip(&own);
    if let Some(((name, _), _)) = all.find(|((_, new), own)| !is_same(own, new)) {
        return Ok(Some(Err(format!("with a changed {name}, which is not saved yet"))));
    }
    let object = survey.add(Thing::Ipc(Ipc {}));
    survey.ipc.by_device.insert(device, object);
    mqueue::find(survey, seen, &tables, Some(object))?;
    system_v::find(survey, seen, &tables, Some(object))?;
    Ok(Some(Ok(object)))
}

/// The values of all limits, in the order of [`IPC_LIMITS`].
fn limits(ipc: &OwnedFd) -> Result<Vec<String>, Errno> {
    inside(ipc, || {
        let value = |(name, _)| proc::whole_text(format!("/proc/sys/{name}"));
        IPC_LIMITS.into_iter().map(value).collect::<std::io::Result<_>>().map_err(errno)
    })
}

fn is_same(value: &str, other: &str) -> bool {
    value.split_ascii_whitespace().eq(other.split_ascii_whitespace())
}

/// The limits of the container's own namespace that differ from those at its start, given its tables; none
/// if the namespace is shared.
pub(super) fn own_limits(
    subject: &Subject,
    tables: Option<&Tables>,
) -> Outcome<Vec<(String, String)>> {
    let Some(tables) = tables else { return Ok(Vec::new()) };
    let own = limits(tables.namespace()).map_err(Error::call("read the ipc limits"))?;
    let all = IPC_LIMITS.into_iter().zip(own);
    let changed = all.filter(|((name, new), own)| {
        let configured = subject.sysctls.iter().find(|(configured, _)| configured == name);
        let at_start = configured.map_or(*new, |(_, value)| value);
        // A restore switches this one off for a while.
        let is_removal = *name == Ipc::REMOVES_LOOSE_MEMORY && own.trim() != "0";
        is_removal || !is_same(own, at_start)
    });
    Ok(changed.map(|((name, _), own)| (name.to_owned(), own)).collect())
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::call::CloneFlags;
    use dormouse_kernel::process;

    use super::*;

    #[test]
    fn root_new_ipc_namespace_has_the_known_limits() {
        let differing = || {
            process::unshare(CloneFlags::NEWIPC).expect("root can make an ipc namespace");
            let text = |name| proc::whole_text(format!("/proc/sys/{name}")).unwrap();
            let all = IPC_LIMITS.map(|(name, new)| (name, text(name), new));
            all.into_iter().filter(|(_, own, new)| !is_same(own, new)).collect::<Vec<_>>()
        };
        assert_eq!(std::thread::spawn(differing).join().unwrap(), []);
    }
}
