//! Objects of the ipc namespace: none of them is saved yet, so there must be none.
//!
//! They belong to no process and would be gone without a word: the namespace is made anew.

use std::fs;
use std::os::fd::AsFd;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::pidfd;
use rustix::thread::LinkNameSpaceType;

use super::object::Survey;
use super::tree::Seen;
use crate::error::{Error, Refusal, Result};

/// The tables of System V objects, with a line of headings each.
const TABLES: [(&str, &str); 3] = [
    ("/proc/sysvipc/shm", "System V shared memory"),
    ("/proc/sysvipc/msg", "System V message queues"),
    ("/proc/sysvipc/sem", "System V semaphores"),
];

/// Refuses what is in the ipc namespace of the first process.
pub(super) fn check(survey: &mut Survey<'_>, first: &Seen) -> Result<()> {
    let mut found = system_v(first)?;
    let queues = format!("/proc/{}/root/dev/mqueue", first.pid);
    if fs::read_dir(queues).is_ok_and(|mut dir| dir.next().is_some()) {
        found.push("POSIX message queues");
    }
    for what in found {
        survey.found.refusals.push(Refusal {
            pid: 0,
            process: String::new(),
            what: String::new(),
            why: format!("it has {what}, which are not saved yet"),
        });
    }
    Ok(())
}

/// Which kinds of System V objects there are. A thread of its own enters the namespace, as these
/// tables are those of who reads them.
fn system_v(first: &Seen) -> Result<Vec<&'static str>> {
    let Some(handle) = &first.pidfd else { return Ok(Vec::new()) };
    let namespace = pidfd::namespace(handle, Namespace::Ipc);
    let namespace = namespace.map_err(|e| Error::Elsewhere(e.to_string()))?;
    let looked = std::thread::scope(|scope| {
        let look = scope.spawn(|| {
            let kind = Some(LinkNameSpaceType::InterProcessCommunication);
            rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)?;
            let is_used = |path: &str| fs::read_to_string(path).map(|t| t.lines().count() > 1);
            let mut found = Vec::new();
            for (path, what) in TABLES {
                if is_used(path).map_err(|_| rustix::io::Errno::IO)? {
                    found.push(what);
                }
            }
            Ok(found)
        });
        look.join().unwrap_or(Err(rustix::io::Errno::IO))
    });
    looked.map_err(Error::of("look at the ipc namespace", first.pid))
}
