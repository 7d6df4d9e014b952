//! User namespaces: each is created by a helper process, gets its id maps from another, and is
//! entered by its members, last of all.
//!
//! **Creation.** A helper process takes the uid of the namespace's owner and enters the parent
//! namespace. There it creates the new one (unshare(2)), and exists until another helper has
//! written the id maps. That one is still in the parent namespace, has every capability there, and
//! writes to the files of the first in procfs (user_namespaces(7)). Each waits for the other with
//! futex(2) at a cell.
//!
//! **Entry.** A process that enters a user namespace has every capability in it, and none any more
//! over the container's own. Steps that need those come before. So does the change of its ids,
//! which the entry keeps and which need not be mapped there. The process has one thread until then,
//! as setns(2) requires. Its other threads are created inside, where clone3(2) cannot set their
//! ids: that needs a capability over the pid namespace. So a child of the first process, the
//! *numberer*, sets the next id before each creation (`/proc/sys/kernel/ns_last_pid`), and no other
//! task is created meanwhile.
//!
//! **Limits.** [`check`] allows no more than processes of that configuration could have created.

use std::os::fd::OwnedFd;

use super::credentials::Allowed;
use super::{Plan, credentials, file, lazy, object, process, thread};
use crate::error::{Error, Result};
use crate::format::{Credentials, Ids, PeerCredentials, Process, Records, Thing, Thread, User};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// The stage at which all threads exist.
pub(super) const STAGE: &str = "inside";

const SETFCAP: u64 = 1 << 31;
const SETGID: u64 = 1 << 6;
const SETUID: u64 = 1 << 7;

fn what_of(n: usize) -> String {
    format!("object {n} (user namespace)")
}

/// Makes all namespaces. ORDER: before objects that belong to one.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::User(user) = &object.thing else { continue };
        let made = make(plan, sequence, &what_of(n), user)?;
        plan.cells[n] = Some(object::lift(plan, sequence, &what_of(n), made)?);
    }
    Ok(())
}

/// Makes a namespace.
fn make(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, user: &User) -> Result<Cell> {
    let around = user.parent.and_then(|parent| match &plan.records.objects[parent].thing {
        Thing::User(around) => Some(around),
        _ => None,
    });
    // The owning group has no effect, but it must be mapped in the parent namespace.
    let gid = around.and_then(|around| around.gids.first()).map_or(0, |ids| ids.outside);
    let owner = PeerCredentials { pid: None, uid: user.owner, gid, groups: Vec::new() };
    let (is_made, has_ids) = (plan.cell(), plan.cell());
    let pids = [plan.fresh_pid(), plan.fresh_pid()];

    let mut part = Sequence::default();
    credentials::play(plan, &mut part, what, &owner);
    if plan.allowed.capabilities & SETFCAP == 0 {
        // A creator without CAP_SETFCAP cannot map the container's root itself.
        credentials::have(plan, &mut part, what, !SETFCAP);
    }
    enter_one(plan, &mut part, what, user.parent)?;
    part.call(what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWUSER)]));
    let made = file::open_own(plan, &mut part, what, "/proc/self/ns/user", libc::O_RDONLY as u32)?;
    // Its files in procfs belong to its user only while it is dumpable.
    let dumpable = [Arg::from(libc::PR_SET_DUMPABLE), Arg::Number(1)];
    part.call(what, Call::new(libc::SYS_prctl, dumpable));
    tell(&mut part, what, is_made);
    hear(&mut part, what, has_ids);
    plan.begin_stand_in(sequence, what, (pids[0], None), part, libc::CLONE_FILES as u64);

    let mut part = Sequence::default();
    credentials::play(plan, &mut part, what, &owner);
    enter_one(plan, &mut part, what, user.parent)?;
    hear(&mut part, what, is_made);
    let mut write = |name: &str, text: String| -> Result<()> {
        let path = format!("/proc/{}/{name}", pids[0]);
        let file = file::open(plan, &mut part, what, &path, libc::O_WRONLY as u32)?;
        let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
        let args = [file.into(), at.into(), bytes.into()];
        part.call(format!("{what}, {name}"), Call::new(libc::SYS_write, args).returns(bytes));
        part.call(what, Call::new(libc::SYS_close, [file.into()]));
        Ok(())
    };
    // ORDER: before the group map.
    if user.denies_groups && !around.is_some_and(|around| around.denies_groups) {
        write("setgroups", "deny".into())?;
    }
    for (name, ids, around) in [
        ("uid_map", &user.uids, around.map(|around| &around.uids)),
        ("gid_map", &user.gids, around.map(|around| &around.gids)),
    ] {
        if !ids.is_empty() {
            write(name, map(ids, around.map(Vec::as_slice)))?;
        }
    }
    tell(&mut part, what, has_ids);
    plan.begin_stand_in(sequence, what, (pids[1], None), part, libc::CLONE_FILES as u64);
    for pid in pids {
        plan.end_stand_in(sequence, what, pid);
    }
    Ok(made)
}

/// The lines of a map, by ids of the parent namespace; `None` is the container's own.
fn map(ids: &[Ids], around: Option<&[Ids]>) -> String {
    let line = |ids: &Ids| {
        // All ids are in the parent's map, as was checked.
        let ids = around.map_or(Some(*ids), |around| ids.within(around)).unwrap_or(*ids);
        format!("{} {} {}\n", ids.inside, ids.outside, ids.count)
    };
    ids.iter().map(line).collect()
}

/// Wakes all waiters at a cell.
fn tell(sequence: &mut Sequence, what: &str, cell: Cell) {
    // Any number but 0 will do.
    sequence.call_into(what, cell, Call::new(libc::SYS_getpid, []));
    let everybody = Arg::from(i32::MAX);
    let args = [Arg::At(cell), Arg::from(libc::FUTEX_WAKE), everybody];
    sequence.call(what, Call::new(libc::SYS_futex, args));
}

/// Waits until a cell is set.
fn hear(sequence: &mut Sequence, what: &str, cell: Cell) {
    let no_limit = Arg::Number(0);
    let args = [Arg::At(cell), Arg::from(libc::FUTEX_WAIT), Arg::Number(0), no_limit];
    // The call fails if the cell is set already.
    sequence.call(what, Call::new(libc::SYS_futex, args).lenient());
}

/// Makes the calling process enter a namespace; `None` is the container's own, where it is. Objects
/// that it creates then belong to the namespace.
pub(super) fn enter_one(
    plan: &Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    user: Option<usize>,
) -> Result<()> {
    let Some(user) = user else { return Ok(()) };
    let args = [plan.object(user)?.into(), Arg::from(libc::CLONE_NEWUSER)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}

/// A thread that a process creates after it has entered a user namespace.
#[derive(Debug, Clone, Copy)]
pub(super) struct Late {
    tid: u32,
    /// Set when the next pid is that of the thread.
    is_next: Cell,
    /// Set when the thread has its pid.
    is_given: Cell,
}

/// Whether a process creates threads without being able to set their pids.
pub(super) fn has_late_threads(records: &Records) -> bool {
    late_threads(records).next().is_some()
}

fn late_threads(records: &Records) -> impl Iterator<Item = &Thread> {
    let inside = records.processes.iter().filter(|process| process.user.is_some());
    inside.flat_map(|process| process.threads.iter().skip(1))
}

/// Opens `/proc/sys/kernel/ns_last_pid` (proc_sys_kernel(5)), which acts on the pid namespace of
/// the writing process.
pub fn last_pid() -> Result<OwnedFd> {
    let path = "/proc/sys/kernel/ns_last_pid";
    let file = std::fs::OpenOptions::new().write(true).open(path);
    file.map(OwnedFd::from).map_err(Error::file("cannot open", path))
}

/// Makes the first process create the numberer, if there is work for it. ORDER: before the first
/// process has its memory, which the numberer does not need.
pub(super) fn begin_numbers(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let Some(last_pid) = plan.last_pid else { return Ok(()) };
    let tids: Vec<u32> = late_threads(plan.records).map(|thread| thread.tid).collect();
    let what = "the numbers of threads";
    let mut part = Sequence::default();
    if plan.lazy.device.is_some() {
        part.stage(lazy::STAGE);
    }
    part.stage("whole");
    for tid in tids {
        let late = Late { tid, is_next: plan.cell(), is_given: plan.cell() };
        let text = (tid - 1).to_string();
        let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
        // The kernel ignores a write that is not at offset 0.
        let args = [last_pid.into(), at.into(), bytes.into(), Arg::Number(0)];
        part.call(what, Call::new(libc::SYS_pwrite64, args).returns(bytes));
        tell(&mut part, what, late.is_next);
        hear(&mut part, what, late.is_given);
        plan.late.push(late);
    }
    let pid = plan.fresh_pid();
    plan.begin_stand_in(sequence, what, (pid, None), part, 0);
    plan.numberer = Some(pid);
    Ok(())
}

/// Makes the first process wait for the exit of the numberer, and every task wait for all threads.
pub(super) fn end_numbers(plan: &mut Plan<'_>, sequence: &mut Sequence, is_first: bool) {
    let Some(pid) = plan.numberer else { return };
    if is_first {
        plan.end_stand_in(sequence, "the numbers of threads", pid);
    }
    sequence.stage(STAGE);
}

/// Makes a process enter its namespace, and create its threads there; returns their sequences,
/// numbered from `next_thread` on. ORDER: all steps that need capabilities over the container are
/// done.
pub(super) fn enter(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    record: &Process,
    next_thread: usize,
) -> Result<Vec<Sequence>> {
    if record.user.is_none() {
        return Ok(Vec::new());
    }
    process::with_rights(plan, sequence, record)?;
    let what = format!("the user namespace of process {}", record.pid);
    credentials::keep_while_changing(sequence, &what);
    credentials::set_ids(plan, sequence, &what, &record.threads[0].credentials);
    let number = Arg::from(plan.kept());
    let args = [number, Arg::from(libc::CLONE_NEWUSER)];
    sequence.call(&*what, Call::new(libc::SYS_setns, args));
    sequence.call(&*what, Call::new(libc::SYS_close, [number]));
    let mut others = Vec::new();
    for (n, other) in record.threads.iter().enumerate().skip(1) {
        let late = plan.late.iter().find(|late| late.tid == other.tid).copied();
        let late =
            late.ok_or_else(|| Error::damaged("section 'process'", "a thread without a record"))?;
        let what = format!("thread {}", other.tid);
        hear(sequence, &what, late.is_next);
        thread::make_next(plan, sequence, other, next_thread + n - 1);
        tell(sequence, &what, late.is_given);
        let mut own = Sequence::default();
        thread::restore(plan, &mut own, other)?;
        own.stage(STAGE);
        thread::last(plan, &mut own, other)?;
        own.stage("done");
        others.push(own);
    }
    Ok(others)
}

/// Makes a process keep the user namespace open that it will enter, while it closes all other
/// descriptors.
pub(super) fn keep(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<bool> {
    let Some(user) = record.user else { return Ok(false) };
    let what = format!("the user namespace of process {}", record.pid);
    let args = [plan.object(user)?.into(), plan.kept().into(), Arg::from(libc::O_CLOEXEC)];
    sequence.call(what, Call::new(libc::SYS_dup3, args));
    Ok(true)
}

/// Refuses namespaces that processes of that configuration could not have created.
///
/// Without CAP_SETUID/CAP_SETGID a process may map only its own uid and gid (setgroups denied);
/// with them, any id of the container, id 0 only with CAP_SETFCAP. Below such a namespace any ids
/// that are mapped in it may be mapped.
pub(super) fn check(records: &Records, allowed: &Allowed) -> Result<()> {
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::User(user) = &object.thing else { continue };
        let said = |what: &str| {
            Error::Elsewhere(format!(
                "object {n} is a user namespace {what}, which the container's configuration does \
                 not allow"
            ))
        };
        if !allowed.user_namespaces {
            return Err(said("(SYS_ADMIN)"));
        }
        if user.parent.is_some() {
            continue;
        }
        let owner =
            Credentials { uids: [user.owner; 4], gids: [allowed.gid; 4], ..Credentials::default() };
        credentials::check_thread(&owner, allowed)
            .map_err(|why| said(&format!("with an owner that {why}")))?;
        let may = |capability| credentials::may(allowed, capability);
        let is_one = |ids: &[Ids], own: u32| {
            ids.is_empty() || matches!(ids, [ids] if ids.outside == own && ids.count == 1)
        };
        if !may(SETUID) && !is_one(&user.uids, user.owner) {
            return Err(said(&format!("with users {:?}", user.uids)));
        }
        let is_own =
            is_one(&user.gids, allowed.gid) && (user.gids.is_empty() || user.denies_groups);
        if !may(SETGID) && !is_own {
            return Err(said(&format!("with groups {:?}", user.gids)));
        }
        if !may(SETFCAP) && Ids::has(&user.uids, 0) {
            return Err(said("with root among its users"));
        }
        let all = user.uids.iter().chain(&user.gids);
        let mut last = all.flat_map(|ids| [ids.outside, ids.outside + (ids.count - 1)]);
        if !last.all(|id| allowed.has_id(id)) {
            return Err(said("with ids that the container does not have"));
        }
    }
    Ok(())
}

/// Refuses a thread whose credentials are impossible in its namespace. Ids must be allowed by the
/// configuration, or be mapped. Capabilities apply only inside, and may be any.
pub(super) fn check_thread(
    found: &Credentials,
    records: &Records,
    user: usize,
    allowed: &Allowed,
) -> std::result::Result<(), String> {
    // The outermost namespace around it maps the most ids.
    let mut outermost = None;
    let mut at = Some(user);
    while let Some(Thing::User(user)) = at.map(|n| &records.objects[n].thing) {
        outermost = Some(user);
        at = user.parent; // the parent comes first, as was checked
    }
    let Some(outermost) = outermost else { return Err("is in no user namespace".into()) };
    // A process inside may have taken any mapped id.
    let rest = |ids: [u32; 4], mapped: &[Ids], own: u32| {
        ids.map(|id| if Ids::has(mapped, id) && allowed.has_id(id) { own } else { id })
    };
    let groups = found.groups.iter().copied();
    let taken = |id: &u32| {
        !outermost.denies_groups && Ids::has(&outermost.gids, *id) && allowed.has_id(*id)
    };
    let outside = Credentials {
        uids: rest(found.uids, &outermost.uids, allowed.uid),
        gids: rest(found.gids, &outermost.gids, allowed.gid),
        groups: groups.filter(|id| !taken(id)).collect(),
        ..Credentials::default()
    };
    credentials::check_thread(&outside, allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(capabilities: u64, uid: u32) -> Allowed {
        Allowed {
            capabilities,
            uid,
            gid: uid,
            ids: 1000,
            user_namespaces: true,
            no_new_privileges: true,
            ..Allowed::default()
        }
    }

    fn records(user: User) -> Records {
        let inner = User { parent: Some(0), owner: user.owner, ..user.clone() };
        let objects = vec![Thing::User(user).into(), Thing::User(inner).into()];
        Records { objects, ..Records::default() }
    }

    fn one(inside: u32, outside: u32, count: u32) -> Vec<Ids> {
        vec![Ids { inside, outside, count }]
    }

    #[test]
    fn user_namespaces_beyond_the_configuration_are_refused() {
        let said = |user: &User, allowed: &Allowed| {
            check(&records(user.clone()), allowed).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let own = User {
            parent: None,
            owner: 5,
            uids: one(0, 5, 1),
            gids: one(0, 5, 1),
            denies_groups: true,
        };
        let nobody = allowed(0, 5);
        assert_eq!(said(&own, &nobody), "");
        let none = Allowed { user_namespaces: false, ..nobody.clone() };
        assert!(said(&own, &none).contains("(SYS_ADMIN)"));
        assert!(said(&User { owner: 6, ..own.clone() }, &nobody).contains("with an owner"));
        assert!(said(&User { uids: one(0, 6, 1), ..own.clone() }, &nobody).contains("with users"));
        assert!(said(&User { uids: one(0, 5, 2), ..own.clone() }, &nobody).contains("with users"));
        assert!(said(&User { gids: one(0, 6, 1), ..own.clone() }, &nobody).contains("with groups"));
        let groups = User { denies_groups: false, ..own.clone() };
        assert!(said(&groups, &nobody).contains("with groups"));
        let root = allowed(SETUID | SETGID, 0);
        let many = User { uids: one(1, 1, 999), ..groups };
        assert_eq!(said(&many, &root), "");
        assert!(said(&User { uids: one(0, 0, 1), ..many.clone() }, &root).contains("root"));
        assert!(
            said(&User { uids: one(1, 1, 1000), ..many.clone() }, &root).contains("does not have")
        );
        let all = allowed(SETUID | SETGID | SETFCAP, 0);
        assert_eq!(said(&User { uids: one(0, 0, 1), ..many }, &all), "");
    }

    #[test]
    fn ids_of_a_thread_are_mapped_or_from_before() {
        let user = User {
            parent: None,
            owner: 0,
            uids: one(0, 100, 10),
            gids: one(0, 200, 10),
            denies_groups: false,
        };
        let records = records(user);
        let root = allowed(0, 0);
        let said = |uid, gid, groups: &[u32]| {
            let groups = groups.to_vec();
            let found =
                Credentials { uids: [uid; 4], gids: [gid; 4], groups, ..Credentials::default() };
            check_thread(&found, &records, 1, &root).err().unwrap_or_default()
        };
        assert_eq!(said(0, 0, &[]), "");
        assert_eq!(said(109, 200, &[201, 209]), "");
        assert!(said(110, 0, &[]).contains("uids"));
        assert!(said(0, 199, &[]).contains("gids"));
        assert!(said(0, 0, &[210]).contains("groups"));
    }

    #[test]
    fn maps_are_written_with_ids_of_the_parent_namespace() {
        let around = [Ids { inside: 0, outside: 1000, count: 10 }];
        let ids = [Ids { inside: 3, outside: 1004, count: 2 }];
        assert_eq!(map(&ids, None), "3 1004 2\n");
        assert_eq!(map(&ids, Some(&around)), "3 4 2\n");
    }
}
