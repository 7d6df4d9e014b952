//! The kinds of objects: which module reads which open file, and the steps of the survey of a process.
//!
//! The dispatch stands above all kinds: no module of a kind uses it. [`unix::finish`] gets [`in_flight`]
//! handed in, since a socket may carry descriptors of every kind.

use std::collections::HashSet;
use std::fs;

use dormouse_kernel::proc;
use dormouse_record::seat::{self, Use};
use dormouse_record::{Descriptor, HeldLock, Inode, LockKind, Object, OwnTable, Result, Thing};
use rustix::fd::{AsRawFd, OwnedFd};

use super::held::{HeldFile, Wakes};
use super::open::{Look, Open};
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::{Found, Survey, Surveyed};
use super::{
    cgroup_namespace, deleted, event, fanotify, file, inotify, lock, memory, mqueue, namespace,
    pidfd, pipe, process, shared, socket, tcp, terminal, time, timer, unix, user, uts,
};
use crate::look::descriptor::numbers;

/// One kind of open file: a test for it, and a function that makes its record.
struct Kind {
    is: fn(&Open<'_>) -> bool,
    save: fn(&mut Survey<'_>, &Open<'_>) -> std::result::Result<Thing, Reason>,
}

/// Every kind that can be saved, in order of precedence.
const KINDS: &[Kind] = &[
    Kind { is: pipe::is_pipe, save: pipe::save },
    Kind { is: socket::is_socket, save: socket::save },
    Kind { is: event::is_event, save: event::event },
    Kind { is: event::is_signal, save: event::signal },
    Kind { is: event::is_epoll, save: event::epoll },
    Kind { is: pidfd::is_pidfd, save: pidfd::save },
    Kind { is: inotify::is_inotify, save: inotify::save },
    Kind { is: fanotify::is_fanotify, save: fanotify::save },
    Kind { is: timer::is_timer, save: timer::save },
    Kind { is: terminal::is_terminal, save: terminal::save },
    Kind { is: file::is_device, save: file::device },
    Kind { is: mqueue::is_queue, save: mqueue::save },
    Kind { is: file::is_file, save: file::save },
];

/// The locks of a process. Each shows at every descriptor of its file. Descriptors that could have
/// acquired it are kept: setting a lock twice changes nothing. A lock belongs to all processes with
/// one table, and procfs shows the process that has set it.
fn hold(
    survey: &mut Survey<'_>,
    open: &Open<'_>,
    locks: &mut Vec<HeldLock>,
) -> std::result::Result<(), Reason> {
    let access = open.flags() & libc::O_ACCMODE as u32;
    for (lock, pid) in lock::with_setters(&open.info)? {
        let other = if lock.writes { libc::O_RDONLY } else { libc::O_WRONLY } as u32;
        if lock.kind != LockKind::Process || access == other {
            continue;
        }
        let held = HeldLock { number: open.number, lock };
        let sharing = &mut survey.sharing;
        match pid.filter(|pid| sharing.table_of.get(pid) == Some(&open.process.pid)) {
            Some(pid) => sharing.locks.entry(pid).or_default().push(held),
            None => locks.push(held),
        }
    }
    Ok(())
}

/// The name of an open file of no known kind.
fn unknown(link: &str) -> Reason {
    let name = link.trim_start_matches("anon_inode:").trim_matches(['[', ']']);
    match name {
        "io_uring" => "an io_uring, which is not saved yet".into(),
        "userfaultfd" => "a userfaultfd, which is not saved: its memory has an owner".into(),
        _ if link.starts_with("anon_inode:") => format!("{name}, which is not saved yet"),
        _ => format!("'{link}', which is not saved yet"),
    }
}

/// Inspects everything that one process has.
pub(super) fn survey_process(survey: &mut Survey<'_>, seen: &Seen) -> Result<Surveyed> {
    if seen.is_zombie {
        return Ok(Surveyed::default());
    }
    let apart = process::check(seen, survey);
    let mut surveyed = Surveyed::default();
    match time::of(survey, &apart) {
        Ok(found) => surveyed.time = found,
        Err(why) => survey.found.refusals.push(seen.refuse("", why)),
    }
    match cgroup_namespace::of(survey, &apart) {
        Ok(found) => surveyed.cgroup_namespace = found,
        Err(why) => survey.found.refusals.push(seen.refuse("", why)),
    }
    let mounts = apart.mounts.map(|link| match survey.mounts.object(&link) {
        Some(found) => found,
        None => Err(survey.passing("it has made a mount namespace just now".into())),
    });
    let mounts = mounts.transpose();
    let ipc = apart.ipc.map(|link| match survey.ipc.object(&link) {
        Some(found) => found,
        None => Err(survey.passing("it has made an IPC namespace just now".into())),
    });
    let ipc = ipc.transpose();
    let net = apart.net.map(|link| match survey.nets.object(&link) {
        Some(found) => found,
        None => Err(survey.passing("it has made a network namespace just now".into())),
    });
    let net = net.transpose();
    let uts = apart.uts.map(|link| uts::object(survey, seen, &link)).transpose();
    let user = apart.user.map(|_| user::of_process(survey, seen)).transpose();
    let places = [&mut surveyed.mounts, &mut surveyed.uts, &mut surveyed.ipc, &mut surveyed.net];
    let places = places.into_iter().chain([&mut surveyed.user]);
    for (found, to) in [mounts, uts, ipc, net, user].into_iter().zip(places) {
        match found {
            Ok(index) => *to = index,
            Err(why) => survey.found.refusals.push(seen.refuse("", why)),
        }
    }
    user::own(survey, seen, &surveyed);
    // Of processes with one table, the first is inspected.
    if !shared::take_table(survey, seen, &mut surveyed) {
        let all = Table { task: (seen.pid, seen.inner), pidfd: seen.pidfd.as_ref() };
        for (what, why) in table(survey, seen, all, &mut surveyed)? {
            survey.found.refusals.push(seen.refuse(what, why));
        }
    }
    match file::root(survey, seen) {
        Ok(root) => surveyed.root = root,
        Err(why) => survey.found.refusals.push(seen.refuse("root", why)),
    }
    if !shared::take_place(survey, seen, &mut surveyed) {
        match file::directory(survey, seen) {
            Ok(index) => surveyed.directory = Some(index),
            Err(why) => survey.found.refusals.push(seen.refuse("working directory", why)),
        }
    }
    shared::take_others(survey, seen, &mut surveyed);
    shared::keep(survey, seen, &surveyed);
    surveyed.apart = shared::apart(survey, seen, &surveyed);
    thread_tables(survey, seen, &mut surveyed)?;
    surveyed.cgroup = namespace::cgroup(seen.pid, survey);
    let memory = memory::areas(survey, seen)?;
    surveyed.memory = memory;
    Ok(surveyed)
}

/// A table of descriptors to be inspected.
#[derive(Clone, Copy)]
struct Table<'p> {
    /// The process, or the thread that has the table to itself: by the host's id and the id inside.
    task: (u32, u32),
    /// A pidfd of that task.
    pidfd: Option<&'p OwnedFd>,
}

/// Inspects all descriptors of a table; returns those that are refused, with the reasons.
fn table(
    survey: &mut Survey<'_>,
    seen: &Seen,
    table: Table<'_>,
    surveyed: &mut Surveyed,
) -> Result<Vec<(String, Reason)>> {
    let mut refused = Vec::new();
    for number in numbers(table.task.0)? {
        match descriptor(survey, seen, table, number, surveyed) {
            Ok(Some(descriptor)) => {
                let Descriptor { object, number, .. } = descriptor;
                survey.uses.push(Use { object, task: table.task.1, number });
                surveyed.descriptors.push(descriptor);
            }
            Ok(None) => {}
            Err(why) => refused.push((format!("descriptor {number}"), why)),
        }
    }
    Ok(refused)
}

/// Inspects the tables that threads of a process have to themselves.
fn thread_tables(survey: &mut Survey<'_>, seen: &Seen, surveyed: &mut Surveyed) -> Result<()> {
    let mut tids: Vec<u32> = surveyed.apart.keys().copied().collect();
    tids.sort_unstable();
    for tid in tids {
        let Some(apart) = surveyed.apart.get_mut(&tid).filter(|apart| apart.has_table) else {
            continue;
        };
        // KERNEL(6.9): pidfds of threads.
        let pidfd = match dormouse_kernel::pidfd::open_thread(tid) {
            Ok(pidfd) => pidfd,
            Err(e) if e.errno() == libc::ESRCH => continue,
            Err(e) => {
                let why = format!(
                    "its thread {} has descriptors of its own (CLONE_FILES), which cannot be \
                     inspected: {e}",
                    apart.inner
                );
                survey.found.refusals.push(seen.refuse("", why));
                continue;
            }
        };
        let leases = survey.leases.len();
        let mut own = Surveyed::default();
        let all = Table { task: (tid, apart.inner), pidfd: Some(&pidfd) };
        let of_thread = |what: String| format!("{what} of thread {}", apart.inner);
        let refused = match table(survey, seen, all, &mut own) {
            Ok(refused) => refused,
            Err(_) if shared::ends(tid) => continue,
            Err(e) => return Err(e),
        };
        for (what, why) in refused {
            survey.found.refusals.push(seen.refuse(of_thread(what), why));
        }
        // The process sets both, with its own descriptors.
        if survey.leases.len() != leases || !own.notices.is_empty() {
            let why = "a lease or a notice (O_ASYNC, F_SETOWN) of a file that a thread has open apart \
                       from its process, which is not saved yet";
            survey.found.refusals.push(seen.refuse(of_thread("descriptors".into()), why));
        }
        apart.table = Some(OwnTable { descriptors: own.descriptors, locks: own.locks });
    }
    Ok(())
}

/// The record of a descriptor and its object; `None` if it was closed meanwhile.
fn descriptor(
    survey: &mut Survey<'_>,
    seen: &Seen,
    table: Table<'_>,
    number: u32,
    surveyed: &mut Surveyed,
) -> std::result::Result<Option<Descriptor>, Reason> {
    let Some(open) = open(survey, seen, table, number)? else { return Ok(None) };
    let task = table.task.0;
    hold(survey, &open, &mut surveyed.locks)?;
    let close_on_exec = open.octal("flags") & libc::O_CLOEXEC as u32 != 0;
    let found = |object| Ok(Some(Descriptor { number, object, close_on_exec }));
    let key = open.key();
    let alike = survey.open_files.get(&key);
    if let Some(Ok(index)) = alike.map(|alike| alike.find(task, number)) {
        // Each process opens its own again, with the notices of each.
        let thing = &survey.found.objects[index].thing;
        let is_own = matches!(thing, Thing::PidFd(_) | Thing::ProcessFile(_));
        if is_own && !surveyed.descriptors.iter().any(|d| d.object == index) {
            surveyed.notices.extend(lock::notice(&open)?);
        }
        if let Thing::ProcessFile(of) = survey.found.objects[index].thing.clone() {
            file::check_reader(survey, seen, &of)?;
        }
        return found(index);
    }
    // ORDER: before a refusal, so that no mapping of the file opens it.
    survey.leased.extend(lock::leased(&open));
    survey.leases.extend(lock::found(&open)?);
    if let Some(external) = file::external(survey.subject, &open) {
        let external = object(&open, external)?;
        let index = survey.found.objects.len();
        survey.found.objects.push(external);
        survey.open_files.entry(key).or_default().add(task, number, index);
        return found(index);
    }
    let notice = lock::notice(&open)?;
    let kind = KINDS.iter().find(|kind| (kind.is)(&open));
    let Some(kind) = kind else { return Err(unknown(&open.link)) };
    let index = open.index;
    survey.reserve();
    let thing = (kind.save)(survey, &open)?;
    dormouse_record::check::paths(&thing)?;
    if survey.holds(&open) && thing.is_called_from_outside() {
        let failed = |e: std::io::Error| format!("it cannot be held: {e}");
        let wakes = match &thing {
            Thing::TcpSocket(_) => tcp::wakes(&open.copy).map_err(|e| failed(e.into()))?,
            _ => Wakes { readable: true, writable: false },
        };
        let file = open.copy.try_clone().map_err(failed)?;
        let cause = thing.cause();
        survey.found.held.push(HeldFile { object: index as u32, file, wakes, cause });
    }
    survey.found.objects[index] = object(&open, thing)?;
    surveyed.notices.extend(notice);
    survey.open_files.entry(key).or_default().add(task, number, index);
    found(index)
}

/// The object of an open file, with what files of several kinds have: locks, and an inode.
fn object(open: &Open<'_>, thing: Thing) -> std::result::Result<Object, Reason> {
    let mut file_locks = Vec::new();
    if !matches!(thing, Thing::File(_) | Thing::ProcessFile(_)) {
        file_locks = lock::of(&open.info)?;
        file_locks.retain(|lock| lock.kind != LockKind::Process);
    }
    if !file_locks.is_empty() && matches!(thing, Thing::PidFd(_)) {
        return Err("a pidfd with a lock (flock), which is not saved yet".into());
    }
    let is_unnamed = open.link.starts_with("socket:[") || open.link.starts_with("pipe:[");
    let is_external = matches!(thing, Thing::External(_));
    let inode = if is_unnamed && !is_external { inode(open) } else { None };
    Ok(Object { net: open.net, file_locks, inode, ..thing.into() })
}

/// The inode of a socket or an unnamed pipe, unless it is as root makes one.
fn inode(open: &Open<'_>) -> Option<Inode> {
    const OF_PIPE: u32 = 0o600;
    const OF_SOCKET: u32 = 0o777;
    let stat = &open.stat;
    let (uid, gid) = open.process.maps().owner(stat.st_uid, stat.st_gid);
    let mode = stat.st_mode & 0o777;
    let usual = if open.link.starts_with("pipe:[") { OF_PIPE } else { OF_SOCKET };
    // A file from outside may have an owner that the container does not have.
    let has_ids = uid != u32::MAX && gid != u32::MAX;
    (has_ids && (uid, gid, mode) != (0, 0, usual)).then_some(Inode { uid, gid, mode })
}

/// Copies a descriptor and inspects it; `None` if it was closed meanwhile.
fn open<'p>(
    survey: &Survey<'_>,
    process: &'p Seen,
    table: Table<'_>,
    number: u32,
) -> std::result::Result<Option<Open<'p>>, Reason> {
    let pid = table.task.0;
    let Ok(link) = fs::read_link(format!("/proc/{pid}/fd/{number}")) else { return Ok(None) };
    let info = proc::whole_text(format!("/proc/{pid}/fdinfo/{number}"));
    let Ok(info) = info else { return Ok(None) }; // closed meanwhile
    let Some(handle) = table.pidfd else { return Ok(None) };
    let copy = match dormouse_kernel::pidfd::copy_descriptor(handle, number as i32) {
        Ok(copy) => copy,
        Err(e) if matches!(e.errno(), libc::EBADF | libc::ESRCH) => return Ok(None),
        Err(e) => return Err(format!("it cannot be inspected: {e}")),
    };
    let link = link.to_string_lossy().into_owned();
    let (index, net) = (survey.found.objects.len(), net_of(survey, &link, &copy)?);
    let look = Look { process, task: table.task, number, link, info, copy };
    let open = Open::of(look, index, net);
    open.map(Some).map_err(|e| format!("it cannot be inspected: {e}"))
}

/// The object of an in-flight file (SCM_RIGHTS). `copy` is the same file description.
fn in_flight(
    survey: &mut Survey<'_>,
    process: &Seen,
    copy: OwnedFd,
) -> std::result::Result<usize, Reason> {
    let failed = |e: &dyn std::fmt::Display| format!("it cannot be inspected: {e}");
    let number = copy.as_raw_fd();
    let link = fs::read_link(format!("/proc/self/fd/{number}")).map_err(|e| failed(&e))?;
    let info = proc::whole_text(format!("/proc/self/fdinfo/{number}")).map_err(|e| failed(&e))?;
    let link = link.to_string_lossy().into_owned();
    let (number, index) = (number as u32, survey.found.objects.len());
    let net = net_of(survey, &link, &copy)?;
    let task = (process.pid, process.inner);
    let look = Look { process, task, number, link, info, copy };
    let open = Open::of(look, index, net).map_err(|e| failed(&e))?;
    let (own, key) = (std::process::id(), open.key());
    let alike = survey.open_files.get(&key);
    if let Some(Ok(index)) = alike.map(|alike| alike.find(own, number)) {
        let thing = &survey.found.objects[index].thing;
        return match thing.may_be_on_its_way() {
            true => Ok(index),
            false => Err(format!("a {}, which is not saved in flight yet", thing.name())),
        };
    }
    // ORDER: before a refusal, as of an open file.
    survey.leased.extend(lock::leased(&open));
    let thing = match file::external(survey.subject, &open) {
        Some(external) => external,
        None => {
            let kind = KINDS.iter().find(|kind| (kind.is)(&open));
            let kind = kind.ok_or_else(|| unknown(&open.link))?;
            survey.reserve();
            (kind.save)(survey, &open)?
        }
    };
    // Seals of a memfd are set by a process that has it open.
    let memory = match &thing {
        Thing::File(it) => it.deleted.map(|n| &survey.found.objects[n].thing),
        _ => None,
    };
    // The record has them later. An O_PATH descriptor does not show them.
    let is_unsealed =
        || rustix::fs::fcntl_get_seals(&open.copy).is_ok_and(|seals| seals.is_empty());
    let is_sealed = matches!(memory, Some(Thing::MemoryFile(_))) && !is_unsealed();
    if is_sealed || lock::lease(&open)?.is_some() || !thing.needs_no_owner() {
        return Err(format!("{}, which is in flight and not open in any process", thing.name()));
    }
    let made = object(&open, thing)?;
    match survey.found.objects.get_mut(index) {
        Some(place) => *place = made,
        None => survey.found.objects.push(made),
    }
    survey.open_files.entry(key).or_default().add(own, number, index);
    survey.in_flight.push(open.copy);
    Ok(index)
}

/// The network namespace of an open file, if it is a socket.
fn net_of(
    survey: &Survey<'_>,
    link: &str,
    copy: &OwnedFd,
) -> std::result::Result<Option<usize>, Reason> {
    if link.starts_with("socket:[") { survey.nets.of_socket(copy) } else { Ok(None) }
}

/// Refuses more open files than a restore has descriptor numbers for ([`seat`]).
fn check_numbers(survey: &mut Survey<'_>, tree: &[Seen]) {
    let Some(first) = tree.first() else { return };
    let limits = first.limits().unwrap_or_default();
    let Some(most) = limits.iter().find(|limit| limit.resource == seat::NOFILE) else { return };
    let objects = &survey.found.objects;
    let highest = survey.uses.iter().map(|one| one.number).max().unwrap_or(0);
    let mut needed = seat::numbers_needed(highest, objects);
    let processes: HashSet<u32> = tree.iter().map(|seen| seen.inner).collect();
    let are_apart = survey.uses.iter().any(|one| !processes.contains(&one.task));
    let have_seats = survey.sharing.table_of.is_empty() && !are_apart;
    if needed > most.hard && have_seats {
        let seated = seat::seats(&survey.uses, objects).len();
        needed = seat::numbers_needed_beside(seated, highest, objects);
    }
    if needed > most.hard {
        let why = format!(
            "with numbers of descriptors up to {highest} and files that it has open more than once, or others \
             have: a restore needs {needed} numbers, and its limit is {} (ulimit -n): raise the limit, or open \
             fewer files",
            most.hard
        );
        survey.found.refusals.push(first.refuse("", why));
    }
}

/// Completes the survey with facts that depend on all processes.
pub(super) fn finish(mut survey: Survey<'_>, tree: &[Seen]) -> Found {
    // ORDER: an end of a pipe may be in flight through a unix socket.
    unix::finish(&mut survey, tree, in_flight);
    pipe::finish(&mut survey);
    deleted::finish(&mut survey, tree);
    user::finish(&mut survey);
    check_numbers(&mut survey, tree);
    survey.found.outline = shared::outline(&survey, tree);
    survey.found.terminals = survey.terminals.into_values().collect();
    survey.found.fresh = survey.fresh.into_own();
    survey.found
}
