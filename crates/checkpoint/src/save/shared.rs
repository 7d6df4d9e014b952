//! Resources that tasks share: memory, descriptors, directory and umask, as kcmp(2) compares them.
//!
//! Threads of a process share all of them, and processes none, as after pthread_create(3) and fork(2). clone(2)
//! and unshare(2) permit other combinations. A thread with a directory and umask of its own is saved. Every
//! other combination is refused by name, since a restore would not make it again.
//!
//! LIMIT: two processes that share an I/O context (CLONE_IO) have one each afterwards, of the same priority.

use std::collections::HashMap;

use dormouse_kernel::call::{self, Shared};
use dormouse_kernel::proc;
use dormouse_record::OwnPlace;

use super::file;
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::{Survey, Surveyed};
use super::vfork::is_in_vfork;

/// Resources that processes do not share, each with its name.
const OF_PROCESSES: [(Shared, &str); 3] = [
    (Shared::Memory, "memory (CLONE_VM)"),
    (Shared::Descriptors, "a table of descriptors (CLONE_FILES)"),
    (Shared::FileSystem, "a working directory and umask (CLONE_FS)"),
];

/// Refuses processes that share one of these resources.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) {
    let alive: Vec<&Seen> = tree.iter().filter(|seen| !seen.is_zombie).collect();
    for (what, name) in OF_PROCESSES {
        // Sorted, so that each is compared with few others.
        let mut sorted: Vec<&Seen> = Vec::new();
        for seen in &alive {
            // One that has ended is equal to none.
            let order = |other: &&Seen| {
                call::compare(what, other.pid, seen.pid).unwrap_or(std::cmp::Ordering::Less)
            };
            match sorted.binary_search_by(order) {
                Err(at) => sorted.insert(at, seen),
                Ok(at) => {
                    let other = sorted[at];
                    // A child of vfork(2) until it executes; its parent is refused if that takes long.
                    let waits = is_in_vfork(seen) || is_in_vfork(other);
                    let is_shared = call::is_shared(what, other.pid, seen.pid) == Ok(true);
                    if !waits && is_shared {
                        let why = format!(
                            "it shares {name} with process {} ({}), which is not saved",
                            other.inner,
                            other.name()
                        );
                        survey.found.refusals.push(seen.refuse("", why));
                    }
                }
            }
        }
    }
}

/// The directories and umasks that threads have to themselves, by the host's ids.
pub(super) fn places(
    survey: &mut Survey<'_>,
    seen: &Seen,
    surveyed: &Surveyed,
) -> HashMap<u32, OwnPlace> {
    let mut all: HashMap<u32, OwnPlace> = HashMap::new();
    for tid in seen.tids.iter().skip(1).copied() {
        let differs = |what, from: u32| call::is_shared(what, from, tid) == Ok(false) && !ends(tid);
        let mut refuse = |why: &str| {
            let why = format!("its thread {} {why}", inner(tid));
            survey.found.refusals.push(seen.refuse("", why));
        };
        if differs(Shared::Descriptors, seen.pid) {
            refuse("has descriptors of its own (CLONE_FILES), which are not saved yet");
        }
        if !differs(Shared::FileSystem, seen.pid) {
            continue;
        }
        if all.keys().any(|other| !differs(Shared::FileSystem, *other)) {
            refuse("shares a directory with another thread (CLONE_FS), which is not saved yet");
            continue;
        }
        if surveyed.user.is_some() || surveyed.root.is_some() {
            refuse("has a directory of its own (CLONE_FS) below another root, not saved yet");
            continue;
        }
        match place(survey, seen, tid) {
            Ok(place) => drop(all.insert(tid, place)),
            Err(_) if ends(tid) => {}
            Err(why) => {
                let what = format!("working directory of thread {}", inner(tid));
                survey.found.refusals.push(seen.refuse(what, why));
            }
        }
    }
    all
}

/// The directory and umask of one thread.
fn place(survey: &mut Survey<'_>, seen: &Seen, tid: u32) -> Result<OwnPlace, Reason> {
    let root = std::fs::read_link(format!("/proc/{}/task/{tid}/root", seen.pid));
    let root = root.map_err(|e| format!("it cannot be read: {e}"))?;
    if root.as_os_str() != "/" {
        return Err("it has a root of its own as well, which is not saved yet".into());
    }
    let umask = proc::fields(tid).ok();
    let umask = umask.as_ref().and_then(|fields| fields.field("Umask"));
    let umask = umask.and_then(|umask| u32::from_str_radix(umask, 8).ok());
    let umask = umask.ok_or("its umask cannot be read")?;
    Ok(OwnPlace { directory: file::directory_of(survey, seen, tid)?, umask })
}

/// Whether a task is exiting: its resources then differ from those of the other tasks.
fn ends(tid: u32) -> bool {
    proc::status(tid).map_or(true, |status| status.is_exiting)
}

/// The container's id of a thread.
fn inner(tid: u32) -> u32 {
    proc::fields(tid).ok().and_then(|fields| fields.pids().last().copied()).unwrap_or(0)
}
