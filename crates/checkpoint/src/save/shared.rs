//! Resources that tasks share: memory, descriptors, directory and umask, as kcmp(2) compares them.
//!
//! Threads of a process share all of them, and processes none, as after pthread_create(3) and fork(2). clone(2)
//! and unshare(2) permit other combinations. Processes with one table of descriptors, or with one working directory,
//! root and umask, are saved: the first of them has the resource, and the records of the others refer to it. So are
//! threads with descriptors, or a directory and umask, apart from their process, alone or with other threads of it.
//! The undo values of semaphores (CLONE_SYSVSEM) and the I/O context (CLONE_IO) are saved in the same way; a task may
//! have neither. Every other combination is refused by name, since a restore would not make it again.

use std::cmp::Ordering;
use std::collections::HashMap;

use dormouse_kernel::call::{self, Shared};
use dormouse_kernel::proc;
use dormouse_record::{OwnPlace, Process};

use super::file;
use super::known::shared::{Apart, Owner, Sharing};
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::{Survey, Surveyed};
use super::vfork::is_in_vfork;

/// The resources that processes are compared by.
const KINDS: [Shared; 5] =
    [Shared::Memory, Shared::Descriptors, Shared::FileSystem, Shared::Undo, Shared::Io];

/// Finds the processes that share one of these resources, and refuses those that share memory.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) {
    let alive: Vec<&Seen> = tree.iter().filter(|seen| !seen.is_zombie).collect();
    survey.sharing = Sharing::default();
    for what in KINDS {
        // Sorted, so that each is compared with few others.
        let mut sorted: Vec<&Seen> = Vec::new();
        for seen in &alive {
            match sorted.binary_search_by(|other| order(what, other.pid, seen.pid)) {
                Err(at) => sorted.insert(at, seen),
                Ok(at) if !survey.sharing.is_without(what, seen.pid) => {
                    shares(survey, what, seen, sorted[at]);
                }
                Ok(_) => {}
            }
        }
        let pids = sorted.into_iter().map(|seen| seen.pid).collect();
        match what {
            Shared::Descriptors => survey.sharing.tables = pids,
            Shared::FileSystem => survey.sharing.places = pids,
            Shared::Undo => survey.sharing.undos = pids,
            Shared::Io => survey.sharing.ios = pids,
            Shared::Memory | Shared::Handlers => {}
        }
    }
}

/// How the resources of two tasks stand in the kernel's order. A task that has ended is equal to none.
fn order(what: Shared, one: u32, other: u32) -> Ordering {
    call::compare(what, one, other).unwrap_or(Ordering::Less)
}

/// Notes that a process shares a resource with an earlier one, or refuses it.
fn shares(survey: &mut Survey<'_>, what: Shared, seen: &Seen, other: &Seen) {
    // A child of vfork(2) until it executes; its parent is refused if that takes long.
    let waits = is_in_vfork(seen) || is_in_vfork(other);
    if waits || call::is_shared(what, other.pid, seen.pid) != Ok(true) {
        return;
    }
    match what {
        Shared::Descriptors | Shared::FileSystem | Shared::Undo | Shared::Io => {
            survey.sharing.share(what, seen.pid, other.pid);
        }
        Shared::Memory | Shared::Handlers => {
            let why = format!(
                "it shares memory (CLONE_VM) with process {} ({}), which is not saved",
                other.inner,
                other.name()
            );
            survey.found.refusals.push(seen.refuse("", why));
        }
    }
}

/// Keeps what a process has for those that share it. ORDER: before these are surveyed, which come later in the tree.
pub(super) fn keep(survey: &mut Survey<'_>, seen: &Seen, surveyed: &Surveyed) {
    if survey.sharing.firsts.contains(&seen.pid) {
        let owner = Owner {
            inner: seen.inner,
            descriptors: surveyed.descriptors.clone(),
            directory: surveyed.directory,
            is_inside: surveyed.user.is_some(),
        };
        survey.sharing.owners.insert(seen.pid, owner);
    }
}

/// Takes the descriptors of the first process with the same table; returns whether there is one.
pub(super) fn take_table(survey: &mut Survey<'_>, seen: &Seen, surveyed: &mut Surveyed) -> bool {
    let of = survey.sharing.table_of.get(&seen.pid);
    let Some(owner) = of.and_then(|of| survey.sharing.owners.get(of)) else { return false };
    surveyed.descriptors.clone_from(&owner.descriptors);
    surveyed.table_of = Some(owner.inner);
    surveyed.locks = survey.sharing.locks.remove(&seen.pid).unwrap_or_default();
    if owner.is_inside || surveyed.user.is_some() {
        let why = format!(
            "it shares a table of descriptors (CLONE_FILES) with process {}, one of them in a user \
             namespace, which is not saved yet",
            owner.inner
        );
        survey.found.refusals.push(seen.refuse("", why));
    }
    true
}

/// Takes the directory of the first process with the same one; returns whether there is one.
pub(super) fn take_place(survey: &mut Survey<'_>, seen: &Seen, surveyed: &mut Surveyed) -> bool {
    let of = survey.sharing.place_of.get(&seen.pid);
    let Some(owner) = of.and_then(|of| survey.sharing.owners.get(of)) else { return false };
    surveyed.directory = owner.directory;
    surveyed.place_of = Some(owner.inner);
    // Neither namespace can be entered by a process that shares its directory.
    let is_apart = surveyed.mounts.is_some() || surveyed.user.is_some();
    if is_apart || surveyed.root.is_some() {
        let why = format!(
            "it shares a working directory (CLONE_FS) with process {} {}, which is not saved yet",
            owner.inner,
            if is_apart { "in a namespace of its own" } else { "below another root" }
        );
        survey.found.refusals.push(seen.refuse("", why));
    }
    true
}

/// Takes the undo values of semaphores and the I/O context of the first processes with the same ones.
pub(super) fn take_others(survey: &mut Survey<'_>, seen: &Seen, surveyed: &mut Surveyed) {
    [surveyed.undo_of, surveyed.io_of] = survey.sharing.others_of(seen.pid);
    if let (Some(of), Some(_)) = (surveyed.undo_of, surveyed.ipc) {
        let why = format!(
            "it shares undo values of semaphores (CLONE_SYSVSEM) with process {of} in an IPC \
             namespace of its own, which is not saved yet"
        );
        survey.found.refusals.push(seen.refuse("", why));
    }
}

/// All processes with what they share, for a check of whether they can be created so again.
pub(super) fn outline(survey: &Survey<'_>, tree: &[Seen]) -> Vec<Process> {
    let sharing = &survey.sharing;
    if sharing.firsts.is_empty() {
        return Vec::new();
    }
    let inner = |pid: &u32| sharing.owners.get(pid).map(|owner| owner.inner);
    let outline = |seen: &Seen| Process {
        pid: seen.inner,
        parent: seen.parent,
        group: seen.innermost("NSpgid").unwrap_or(0),
        session: seen.innermost("NSsid").unwrap_or(0),
        name: seen.name(),
        ended: seen.is_zombie.then_some(0),
        table_of: sharing.table_of.get(&seen.pid).and_then(inner),
        place_of: sharing.place_of.get(&seen.pid).and_then(inner),
        undo_of: sharing.others_of(seen.pid)[0],
        io_of: sharing.others_of(seen.pid)[1],
        ..Process::default()
    };
    tree.iter().map(outline).collect()
}

/// What threads have apart from their process, by the host's ids.
pub(super) fn apart(
    survey: &mut Survey<'_>,
    seen: &Seen,
    surveyed: &Surveyed,
) -> HashMap<u32, Apart> {
    let mut all: HashMap<u32, Apart> = HashMap::new();
    for tid in seen.tids.iter().skip(1).copied() {
        let differs = |what| call::is_shared(what, seen.pid, tid) == Ok(false) && !ends(tid);
        let table = differs(Shared::Descriptors);
        let place = differs(Shared::FileSystem);
        let own_undo = differs(Shared::Undo);
        let has_same_io = call::is_shared(Shared::Io, seen.pid, tid) == Ok(true);
        let has_io = !survey.sharing.is_without(Shared::Io, tid);
        let shares_io = has_same_io && has_io;
        if !(table || place || own_undo || has_io) {
            continue;
        }
        let mut apart = Apart { inner: inner(tid), own_undo, shares_io, ..Apart::default() };
        let refuse = |survey: &mut Survey<'_>, why: String| {
            let why = format!("its thread {} {why}", inner(tid));
            survey.found.refusals.push(seen.refuse("", why));
        };
        if own_undo
            && let Some(other) = first_of(&mut survey.sharing.undos, Shared::Undo, tid)
            && !survey.sharing.is_without(Shared::Undo, tid)
        {
            refuse(survey, with_process("undo values of semaphores (CLONE_SYSVSEM)", other));
        }
        if has_io
            && !shares_io
            && let Some(other) = first_of(&mut survey.sharing.ios, Shared::Io, tid)
        {
            refuse(survey, with_process("an I/O context (CLONE_IO)", other));
        }
        if !(table || place || own_undo || shares_io) {
            continue;
        }
        if surveyed.user.is_some() {
            let what = match (table, place) {
                (true, _) => "has descriptors of its own",
                (_, true) => "has a directory of its own",
                _ if own_undo => "has undo values of semaphores of its own",
                _ => "shares an I/O context",
            };
            refuse(survey, format!("{what} in a user namespace, which is not saved yet"));
            continue;
        }
        if table {
            match first_of(&mut survey.sharing.tables, Shared::Descriptors, tid) {
                None => apart.has_table = true,
                Some(other) if seen.tids.contains(&other) => apart.table_of = Some(inner(other)),
                Some(other) => refuse(survey, with_process("descriptors (CLONE_FILES)", other)),
            }
        }
        if place {
            match first_of(&mut survey.sharing.places, Shared::FileSystem, tid) {
                Some(other) if seen.tids.contains(&other) => apart.place_of = Some(inner(other)),
                Some(other) => refuse(survey, with_process("a directory (CLONE_FS)", other)),
                None if surveyed.root.is_some() => {
                    let what = "a directory of its own (CLONE_FS) below another root";
                    refuse(survey, format!("has {what}, not saved yet"));
                }
                None => match self::place(survey, seen, tid) {
                    Ok(place) => apart.place = Some(place),
                    Err(_) if ends(tid) => continue,
                    Err(why) => {
                        let what = format!("working directory of thread {}", inner(tid));
                        survey.found.refusals.push(seen.refuse(what, why));
                    }
                },
            }
        }
        all.insert(tid, apart);
    }
    all
}

/// The first task with the same resource as a thread. If the thread is the first, it joins the list, which is in the
/// kernel's order.
fn first_of(sorted: &mut Vec<u32>, what: Shared, tid: u32) -> Option<u32> {
    match sorted.binary_search_by(|other| order(what, *other, tid)) {
        Ok(at) => Some(sorted[at]),
        Err(at) => {
            sorted.insert(at, tid);
            None
        }
    }
}

/// Why a resource that a thread shares with another process is refused.
fn with_process(what: &str, other: u32) -> String {
    let process = proc::fields(other).ok();
    let process = process.as_ref().and_then(|fields| fields.field("NStgid"));
    let process = process.and_then(|ids| ids.split_ascii_whitespace().next_back()).unwrap_or("?");
    format!("shares {what} with a task of process {process}, and not with its own, not saved yet")
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
pub(super) fn ends(tid: u32) -> bool {
    proc::status(tid).map_or(true, |status| status.is_exiting)
}

/// The container's id of a thread.
fn inner(tid: u32) -> u32 {
    proc::fields(tid).ok().and_then(|fields| fields.pids().last().copied()).unwrap_or(0)
}
