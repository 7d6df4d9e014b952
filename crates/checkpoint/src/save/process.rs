//! Processes: state that their threads share, and the assembly of their records.

use std::fs;

use dormouse_kernel::{Errno, proc};
use dormouse_record::check::{BARRIERS, PERSONALITIES};
use dormouse_record::{Bytes, Error, Layout, Memory, PAGE_BYTES, Process, Result, Signal, Thread};

use super::calls::run;
use super::halt::Halt;
use super::known::namespace::Links;
use super::known::shared::Apart;
use super::namespace::{elsewhere, has_threads_apart};
use super::seen::Seen;
use super::subject::Subject;
use super::survey::{Survey, Surveyed};
use super::timer::posix_time;
use super::vfork::waits_in_vfork;
use super::wait::Blocks;
use super::{file, landlock, login, policy, schedule, signal, thread, time, timer, unix, user};
use crate::inject::gadget::find;
use crate::inject::landing::Ground;
use crate::inject::script::{Answers, Arg, Script};
use crate::look::task;

/// Refuses state of a process that cannot be saved; returns the namespaces that differ from the
/// first's.
pub(crate) fn check(seen: &Seen, survey: &mut Survey<'_>) -> Links {
    let mut refuse = |why: &str| survey.found.refusals.push(seen.refuse("", why));
    if seen.innermost("NSsid") == Some(0) || seen.innermost("NSpgid") == Some(0) {
        refuse("its session or process group is outside the container");
    }
    if seen.fields.number("Seccomp") == Some(1) {
        refuse("it is in strict seccomp mode, which is not saved yet");
    }
    if seen.tids.iter().any(|tid| waits_in_vfork(seen.pid, *tid)) {
        refuse("it waits for a child that was made by vfork and has not executed yet");
    }
    // The first process is in the container's own namespaces.
    let mut apart = Links::default();
    if seen.pid != seen.first {
        let refused;
        (refused, apart) = elsewhere(seen, survey);
        survey.found.refusals.extend(refused.into_iter().map(|why| seen.refuse("", why)));
    } else if let Err(why) = user::check_first(seen) {
        survey.found.refusals.push(seen.refuse("", why));
    }
    apart.time_for_children = time::for_children(seen);
    if has_threads_apart(seen) {
        let why = "it has a thread in namespaces of its own, which is not saved yet";
        survey.found.refusals.push(seen.refuse("", why));
    }
    // A process that has exited meanwhile has no limits any more, and needs none.
    if let Err(why) = schedule::check(seen, seen.limits().unwrap_or_default()) {
        survey.found.refusals.push(seen.refuse("", why));
    }
    let foreign = |tid: &u32| task::personality(seen.pid, *tid) & !PERSONALITIES != 0;
    if seen.tids.iter().any(foreign) {
        let why = "it has the personality of another system, which is not saved";
        survey.found.refusals.push(seen.refuse("", why));
    }
    if let Err(why) = timer::posix(seen) {
        survey.found.refusals.push(seen.refuse("", why));
    }
    if let Err(why) = login::check(seen, apart.user.is_some()) {
        survey.found.refusals.push(seen.refuse("", why));
    }
    if landlock::has_domains(seen, apart.user.is_some()) {
        survey.found.refusals.push(seen.refuse("", landlock::DOMAIN));
    }
    apart
}

/// Makes the record of a process from procfs.
pub(crate) fn record(
    seen: &Seen,
    surveyed: &Surveyed,
    blocks: &Blocks,
    subject: &Subject,
) -> Result<Process> {
    let id = |field| seen.innermost(field).unwrap_or(0);
    let mut record = Process {
        pid: seen.inner,
        parent: seen.parent,
        group: id("NSpgid"),
        session: id("NSsid"),
        name: seen.name(),
        ..Process::default()
    };
    if seen.is_zombie {
        let code = seen.stat().and_then(|stat| stat.field(52)?.parse().ok());
        record.ended = Some(code.unwrap_or(0));
        record.ended_ids = zombie_ids(seen);
        return Ok(record);
    }
    let umask = seen.fields.field("Umask").and_then(|u| u32::from_str_radix(u, 8).ok());
    record.umask = umask.unwrap_or(0o022);
    record.stopped = seen.stopped;
    record.descriptors = surveyed.descriptors.clone();
    (record.table_of, record.place_of) = (surveyed.table_of, surveyed.place_of);
    (record.undo_of, record.io_of) = (surveyed.undo_of, surveyed.io_of);
    record.locks = surveyed.locks.clone();
    record.notices = surveyed.notices.clone();
    record.directory = surveyed.directory;
    record.root.clone_from(&surveyed.root);
    record.mounts = surveyed.mounts;
    record.uts = surveyed.uts;
    record.ipc = surveyed.ipc;
    record.net = surveyed.net;
    [record.time, record.time_for_children] = surveyed.time;
    record.cgroup_namespace = surveyed.cgroup_namespace;
    record.user = surveyed.user;
    record.cgroup.clone_from(&surveyed.cgroup);
    record.limits = seen.limits()?.to_vec();
    let adj = proc::whole_text(format!("/proc/{}/oom_score_adj", seen.pid));
    record.oom_score_adj = adj.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
    record.autogroup_nice = autogroup_nice(seen.pid);
    // LIMIT: a kernel without core dumps has no such file.
    let filter = proc::whole_text(format!("/proc/{}/coredump_filter", seen.pid)).ok();
    record.core_dump_filter = filter.and_then(|t| u32::from_str_radix(t.trim(), 16).ok());
    for tid in &seen.tids {
        let Apart { place, place_of, table, table_of, own_undo, shares_io, .. } =
            surveyed.apart.get(tid).cloned().unwrap_or_default();
        let thread = thread::record(subject, seen, *tid, blocks)?;
        let own = Thread { place, place_of, table, table_of, own_undo, shares_io, ..thread };
        record.threads.push(own);
    }
    record.pending = signal::pending(seen.pid, true)?;
    Ok(record)
}

/// The nice value of the session of a process as a whole: `/autogroup-7 nice 5`. 0 without autogroups.
fn autogroup_nice(pid: u32) -> i32 {
    let text = proc::whole_text(format!("/proc/{pid}/autogroup")).unwrap_or_default();
    let value = text.trim().rsplit_once(" nice ").and_then(|(_, value)| value.parse().ok());
    value.unwrap_or(0)
}

/// User and group of a zombie, as the container sees them; `None` for its root, and for ids that it does not have.
fn zombie_ids(seen: &Seen) -> Option<(u32, u32)> {
    let real = |field| {
        let all: Option<u32> =
            seen.fields.field(field)?.split_ascii_whitespace().next()?.parse().ok();
        all
    };
    let (uid, gid) = seen.maps().owner(real("Uid")?, real("Gid")?);
    let is_known = uid != u32::MAX && gid != u32::MAX;
    (is_known && (uid, gid) != (0, 0)).then_some((uid, gid))
}

/// Completes the record by calls in the process itself, and reads the layout of its memory.
pub(crate) fn inside(
    seen: &Seen,
    record: &mut Process,
    survey: &mut Survey<'_>,
    memory: Memory,
) -> Result<Memory> {
    let ground = ground(seen.pid, &memory).ok_or(Errno::NOEXEC);
    let ground =
        ground.map_err(Error::of("find a system call instruction in the memory", seen.pid))?;
    let halt = Halt::take(seen, &ground).map_err(Error::of("take a SIGSTOP from", seen.pid))?;
    let memory = by_calls(seen, record, survey, memory, &ground);
    halt.note(record);
    memory
}

fn by_calls(
    seen: &Seen,
    record: &mut Process,
    survey: &mut Survey<'_>,
    mut memory: Memory,
    ground: &Ground,
) -> Result<Memory> {
    let pid = seen.pid;
    let areas = &memory.areas;
    let mut step = || {
        let mut script = Script::default();
        let policies = policy::find(&mut script, areas);
        let peers = unix::query_peers(survey, &record.descriptors, &mut script);
        let stops = query_stops(survey, record.pid, &mut script);
        let complete = query(seen, record, &mut script);
        let answers = run(seen, pid, ground, &script, record.threads.first_mut())?;
        peers(survey, &answers)?;
        stops(survey, &answers);
        let found = complete(record, &answers)?;
        let run = |script: &Script| run(seen, pid, ground, script, None);
        Ok::<_, Errno>((found, policy::of_ranges(policies(&answers), run)?))
    };
    let (found, policies) = step().map_err(Error::of("make calls in the memory", pid))?;
    memory.policies = policies;
    memory.landing = ground.left().map(|(address, bytes)| (address, Bytes(bytes)));
    login::check_threads(seen, record)?;
    let brk;
    (brk, memory.locks_later, memory.huge_pages_by_advice) = found;
    rung_meanwhile(seen, record, ground)?;
    for (tid, thread) in seen.tids.iter().zip(&mut record.threads).skip(1) {
        threads_inside(survey, seen, *tid, thread, ground)
            .map_err(Error::of("make calls in", *tid))?;
    }
    memory.layout = layout(seen, brk)?;
    let link = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let link = link.to_string_lossy().into_owned();
    match file::mapped(survey, seen, &link, &format!("/proc/{pid}/exe"), false) {
        Ok(index) => memory.program = Some(index),
        Err(why) => survey.found.refusals.push(seen.refuse("program", why)),
    }
    Ok(memory)
}

/// Reads the signals that have arrived since the first read, and then the remaining time of timers.
/// Timers expire while the process is stopped, and each must count once: as a signal or as
/// remaining time.
fn rung_meanwhile(seen: &Seen, record: &mut Process, ground: &Ground) -> Result<()> {
    // Each timer has at most one pending signal, so this loop ends.
    loop {
        let mut have_come = false;
        let mut look = |tid, shared, known: &mut Vec<Signal>| -> Result<()> {
            let now = signal::pending(tid, shared)?;
            have_come |= now != *known;
            *known = now;
            Ok(())
        };
        look(seen.pid, true, &mut record.pending)?;
        for (tid, thread) in seen.tids.iter().zip(&mut record.threads) {
            look(*tid, false, &mut thread.pending)?;
        }
        if !have_come {
            signal::check_pending(seen, &record.pending)?;
            let mut threads = record.threads.iter();
            return threads.try_for_each(|one| signal::check_pending(seen, &one.pending));
        }
        let mut query = || -> std::result::Result<(), Errno> {
            let mut script = Script::default();
            let intervals = signal::interval_timers(&mut script);
            let timers = record.timers.iter();
            let rest = timers.map(|timer| posix_time(&mut script, timer.id)).collect::<Vec<_>>();
            let answers = run(seen, seen.pid, ground, &script, None)?;
            record.interval_timers = intervals(&answers)?;
            for (posix, rest) in record.timers.iter_mut().zip(rest) {
                (posix.interval_ns, posix.value_ns) = rest(&answers)?;
            }
            Ok(())
        };
        query().map_err(Error::of("read the timers of", seen.pid))?;
    }
}

/// Queries for which of its stopped children a parent has not waited. WNOWAIT leaves them as they are.
fn query_stops(
    survey: &Survey<'_>,
    parent: u32,
    script: &mut Script,
) -> impl FnOnce(&mut Survey<'_>, &Answers) + use<> {
    const OF_A_PROCESS: u64 = 1;
    const INFO_BYTES: u64 = 128;
    let options = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT;
    let children = survey.stopped.iter().filter(|(of, _)| *of == parent);
    let mut queried = Vec::new();
    for child in children.map(|(_, child)| *child) {
        let to = script.room(INFO_BYTES);
        let id = u64::from(child).into();
        let args = [OF_A_PROCESS.into(), id, to.into(), options.into(), 0.into()];
        queried.push((child, script.call(libc::SYS_waitid, args), to));
    }
    move |survey, answers| {
        for (child, made, to) in queried {
            // The number of the signal is 0 if no child is stopped.
            let [first] = answers.numbers(to);
            if answers.returned(made).is_ok() && first as u32 != 0 {
                survey.unreported.push(child);
            }
        }
    }
}

/// Queries the state of the first thread and of the process. The end of the heap, the locks of memory that is
/// mapped later, and whether huge pages are for advised areas only, are returned by the function that reads the
/// answers.
fn query(
    seen: &Seen,
    record: &mut Process,
    script: &mut Script,
) -> impl FnOnce(&mut Process, &Answers) -> std::result::Result<(u64, u32, bool), Errno> + use<> {
    let inside = thread::inside(script);
    let actions = signal::actions(script);
    let intervals = signal::interval_timers(script);
    record.timers = timer::posix(seen).unwrap_or_default(); // refused before where it cannot be
    for posix in &mut record.timers {
        let inner = |tid: u32| proc::fields(tid).ok()?.pids().last().copied();
        posix.tid = inner(posix.tid).unwrap_or(seen.inner);
    }
    let rest = record.timers.iter().map(|timer| posix_time(script, timer.id)).collect::<Vec<_>>();
    let dumpable = thread::prctl(script, libc::PR_GET_DUMPABLE);
    let (subreaper_to, subreaper) = thread::prctl_to(script, libc::PR_GET_CHILD_SUBREAPER);
    const GET_MDWE: i32 = 66;
    const GET_MEMORY_MERGE: i32 = 68;
    let write_or_execute = thread::prctl(script, GET_MDWE);
    let merges = thread::prctl(script, GET_MEMORY_MERGE);
    const GET_REGISTRATIONS: u64 = 1 << 9;
    let barriers = [GET_REGISTRATIONS.into(), 0.into(), 0.into()];
    let barriers = script.call(libc::SYS_membarrier, barriers);
    let huge_pages = thread::prctl(script, libc::PR_GET_THP_DISABLE);
    // The memory for these calls is locked if later memory is, and present unless that is on a fault only.
    let page = [Arg::Untouched, PAGE_BYTES.into()];
    let lock = script.call(libc::SYS_msync, [page[0], page[1], libc::MS_INVALIDATE.into()]);
    let present_to = script.room(8);
    let present = script.call(libc::SYS_mincore, [page[0], page[1], present_to.into()]);
    let brk = script.call(libc::SYS_brk, [0.into()]);
    move |record, answers| {
        if let Some(first) = record.threads.first_mut() {
            inside(first, answers)?;
        }
        record.actions = actions(answers)?;
        record.interval_timers = intervals(answers)?;
        for (posix, rest) in record.timers.iter_mut().zip(rest) {
            (posix.interval_ns, posix.value_ns) = rest(answers)?;
        }
        record.dumpable = answers.returned(dumpable)?;
        answers.returned(subreaper)?;
        let [is_subreaper] = answers.numbers(subreaper_to);
        record.subreaper = is_subreaper != 0;
        // KERNEL(6.3, 6.4): an error before. LIMIT: registrations of membarrier(2) are not known then.
        record.write_or_execute = answers.returned(write_or_execute).unwrap_or(0) as u32;
        record.barriers = answers.returned(barriers).unwrap_or(0) as u32 & BARRIERS;
        record.merges_memory = answers.returned(merges).unwrap_or(0) != 0;
        const BY_ADVICE: u64 = 3;
        let by_advice = answers.returned(huge_pages) == Ok(BY_ADVICE);
        answers.returned(present)?;
        let [is_present] = answers.numbers(present_to);
        // msync(2): EBUSY for locked memory.
        let locks = match (answers.returned(lock), is_present & 1) {
            (Err(Errno::BUSY), 1) => libc::MCL_FUTURE,
            (Err(Errno::BUSY), _) => libc::MCL_FUTURE | libc::MCL_ONFAULT,
            _ => 0,
        };
        Ok((answers.returned(brk)?, locks.cast_unsigned(), by_advice))
    }
}

fn threads_inside(
    survey: &mut Survey<'_>,
    seen: &Seen,
    tid: u32,
    record: &mut Thread,
    ground: &Ground,
) -> std::result::Result<(), Errno> {
    let mut script = Script::default();
    let own = record.table.as_ref().map_or(&[][..], |table| &table.descriptors);
    let peers = unix::query_peers(survey, own, &mut script);
    let inside = thread::inside(&mut script);
    let answers = run(seen, tid, ground, &script, Some(record))?;
    peers(survey, &answers)?;
    inside(record, &answers)
}

/// The places for injected calls: in the vDSO, or anywhere in code.
fn ground(pid: u32, memory: &Memory) -> Option<Ground> {
    let object = memory.vdso.map(|(start, bytes)| (start, start + bytes));
    let mut code = memory.areas.iter().filter(|area| area.access & 4 != 0);
    Ground::of(pid, object, || code.find_map(|area| find(pid, area.start, area.bytes())))
}

fn layout(seen: &Seen, brk: u64) -> Result<Layout> {
    let field = |n| {
        let text = seen.stat().and_then(|stat| stat.field(n));
        text.and_then(|t| t.parse::<u64>().ok()).ok_or(Errno::BADMSG)
    };
    let all = || -> std::result::Result<Layout, Errno> {
        Ok(Layout {
            start_code: field(26)?,
            end_code: field(27)?,
            start_stack: field(28)?,
            start_data: field(45)?,
            end_data: field(46)?,
            start_brk: field(47)?,
            brk,
            arg_start: field(48)?,
            arg_end: field(49)?,
            env_start: field(50)?,
            env_end: field(51)?,
        })
    };
    all().map_err(Error::of("read the layout of the memory", seen.pid))
}
