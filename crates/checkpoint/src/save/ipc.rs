//! IPC namespaces: the contents of each are found as in the container's own, through the tables of
//! one of its processes.

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{Errno, proc, process};
use dormouse_record::{Ipc, Result as Outcome, Thing};

use super::refusal::Reason;
use super::seen::Seen;
use super::survey::Survey;
use super::{mqueue, system_v};
use crate::look::ipc::{Tables, inside};

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
    let known = limits(&tables).and_then(|changed| {
        let device = rustix::fs::fstat(tables.queues())?.st_dev;
        Ok((changed, device))
    });
    let (changed, device) = match known {
        Ok(known) => known,
        Err(e) => return Ok(Some(Err(failed(e)))),
    };
    if let Some(name) = changed {
        return Ok(Some(Err(format!("with a changed {name}, which is not saved yet"))));
    }
    let object = survey.add(Thing::Ipc(Ipc {}));
    survey.ipc.by_device.insert(device, object);
    mqueue::find(survey, seen, &tables, Some(object))?;
    system_v::find(survey, seen, &tables, Some(object))?;
    Ok(Some(Ok(object)))
}

/// Limits of an ipc namespace, below `/proc/sys` (sysvipc(7), mq_overview(7)).
const LIMITS: [&str; 13] = [
    "kernel/shmmax",
    "kernel/shmall",
    "kernel/shmmni",
    "kernel/shm_rmid_forced",
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "fs/mqueue/queues_max",
    "fs/mqueue/msg_max",
    "fs/mqueue/msgsize_max",
    "fs/mqueue/msg_default",
    "fs/mqueue/msgsize_default",
];

/// A limit that differs from its value in a new namespace.
fn limits(tables: &Tables) -> Result<Option<&'static str>, Errno> {
    let values = || {
        let value = |name| proc::whole_text(format!("/proc/sys/{name}"));
        let read = LIMITS.iter().map(value).collect::<std::io::Result<Vec<String>>>();
        read.map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
    };
    let own = inside(tables.namespace(), values)?;
    // A separate thread creates a new namespace, which is removed when the thread ends.
    let new = std::thread::scope(|scope| {
        let new = scope.spawn(|| {
            let made = process::unshare(CloneFlags::NEWIPC);
            made.map_err(|e| Errno::from_raw_os_error(e.errno()))?;
            values()
        });
        new.join().unwrap_or(Err(Errno::IO))
    })?;
    Ok(LIMITS
        .into_iter()
        .zip(own.iter().zip(&new))
        .find(|(_, (a, b))| a != b)
        .map(|(name, _)| name))
}
