//! Processes: state that their threads share, and the assembly of their records.

use super::object::{Survey, Surveyed};
use super::tree::{NAMESPACES, Seen};
use super::{Subject, file, schedule, signal, thread, time, timer, unix, user};
use crate::error::{Error, Result};
use crate::format::check::{BARRIERS, PERSONALITIES};
use crate::format::{Layout, Memory, Process, Signal, Thread};
use crate::inject::gadget::find;
use crate::inject::remote::Remote;
use crate::inject::script::{Answers, Script};
use crate::look::cgroup::Own;
use crate::look::task;
use crate::vdso;
use dormouse_kernel::landlock::Domains;
use dormouse_kernel::{Errno, namespace, proc};
use std::fs;
use std::sync::OnceLock;
use std::time::Duration;

/// Refuses state of a process that cannot be saved; returns the namespaces that differ from the
/// first's.
pub(crate) fn check(seen: &Seen, survey: &mut Survey<'_>) -> Apart {
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
    let mut apart = Apart::default();
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
    let may_have_domains = may_have_domain(seen, &seen.fields) || apart.user.is_some();
    if may_have_domains && seen.tids.iter().any(|tid| has_domain(*tid)) {
        survey.found.refusals.push(seen.refuse("", DOMAIN));
    }
    apart
}

/// No interface reports the rules of a Landlock domain, so it cannot be made again.
const DOMAIN: &str = "it has restricted itself by Landlock, which is not saved yet";

/// Whether a thread may be in a Landlock domain: landlock_restrict_self(2) needs no_new_privs or
/// CAP_SYS_ADMIN.
fn may_have_domain(seen: &Seen, fields: &proc::Fields) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let may_administer = fields.mask("CapBnd").is_none_or(|mask| mask & SYS_ADMIN != 0);
    !seen.is_zombie && (fields.number("NoNewPrivs") == Some(1) || may_administer)
}

/// Whether a thread is in a Landlock domain. LIMIT: none is found where BPF may not be loaded.
fn has_domain(tid: u32) -> bool {
    static DOMAINS: OnceLock<Option<Domains>> = OnceLock::new();
    let domains = DOMAINS.get_or_init(|| Domains::load().ok().flatten());
    domains.as_ref().is_some_and(|domains| domains.has_one(tid).unwrap_or(false))
}

/// Refuses a stopped thread in a Landlock domain, if the fields of its process did not require the check.
pub(super) fn check_domain(seen: &Seen, tid: u32, fields: &proc::Fields) -> Result<()> {
    let is_known = tid == seen.pid || !may_have_domain(seen, fields);
    match is_known || !has_domain(tid) {
        true => Ok(()),
        false => Err(Error::Refused(vec![seen.refuse("", DOMAIN)])),
    }
}

/// Namespaces of a process that differ from those of the first, by their links in procfs.
#[derive(Debug, Default)]
pub(crate) struct Apart {
    pub(crate) mounts: Option<String>,
    pub(crate) uts: Option<String>,
    pub(crate) ipc: Option<String>,
    pub(crate) net: Option<String>,
    pub(crate) time: Option<String>,
    /// The time namespace for its children, if it differs from its own.
    pub(crate) time_for_children: Option<String>,
    pub(crate) cgroup: Option<String>,
    pub(crate) user: Option<String>,
}

/// The properties that all processes of a container share with the first.
#[derive(Debug)]
pub(crate) struct Home {
    /// The number of pid namespaces around it.
    depth: usize,
    namespaces: [Option<String>; NAMESPACES.len()],
    cgroups: Option<String>,
}

/// The links of all namespaces of a thread.
fn namespaces(pid: u32, tid: u32) -> [Option<String>; NAMESPACES.len()] {
    NAMESPACES.map(|name| namespace::link(pid, tid, name))
}

/// The same of a process, cached.
fn own_namespaces(seen: &Seen) -> [Option<String>; NAMESPACES.len()] {
    NAMESPACES.map(|name| seen.link(name).map(str::to_owned))
}

/// The control group of a process below the container's own, if groups inside are saved, and the
/// groups that must be the same for all processes.
fn cgroups(pid: u32, own: Option<&Own>) -> Option<(Option<String>, String)> {
    let text = proc::whole_text(format!("/proc/{pid}/cgroup")).ok()?;
    match own {
        Some(own) => own.split(&text).map(|(path, others)| (Some(path), others)),
        None => Some((None, text)),
    }
}

/// The control group of a process below the container's own.
pub(crate) fn cgroup(pid: u32, survey: &Survey<'_>) -> Option<String> {
    cgroups(pid, Some(survey.own_cgroup.as_ref()?))?.0
}

/// Compares a process with the first one: returns the differences that cannot be saved, and those
/// that can.
fn elsewhere(seen: &Seen, survey: &Survey<'_>) -> (Vec<String>, Apart) {
    let groups = |pid| cgroups(pid, survey.own_cgroup.as_ref()).map(|(_, others)| others);
    let first = survey.home.get_or_init(|| {
        let fields = proc::fields(seen.first).ok()?; // it may have exited
        Some(Home {
            depth: fields.pids().len(),
            namespaces: namespaces(seen.first, seen.first),
            cgroups: groups(seen.first),
        })
    });
    let Some(first) = first else { return Default::default() };
    let own = Home {
        depth: seen.fields.pids().len(),
        namespaces: own_namespaces(seen),
        cgroups: groups(seen.pid),
    };
    let of_its_own =
        |name: &str| format!("it is in a {name} namespace of its own, which is not saved yet");
    let mut all = Vec::new();
    // One number per pid namespace.
    all.extend((own.depth != first.depth).then(|| of_its_own("pid")));
    let mut apart = Apart::default();
    let pairs = own.namespaces.iter().zip(&first.namespaces).zip(NAMESPACES);
    for ((own, _), name) in pairs.filter(|((own, first), _)| own != first) {
        match name {
            "mnt" => apart.mounts.clone_from(own),
            "uts" => apart.uts.clone_from(own),
            "ipc" => apart.ipc.clone_from(own),
            "net" => apart.net.clone_from(own),
            "time" => apart.time.clone_from(own),
            "cgroup" => apart.cgroup.clone_from(own),
            // Compared with the process's own time namespace below.
            "time_for_children" => {}
            "user" => apart.user.clone_from(own),
            _ => all.push(of_its_own(name)),
        }
    }
    if own.cgroups != first.cgroups {
        all.push("it is in a control group of its own, which is not saved".into());
    }
    (all, apart)
}

/// Whether a thread is in other namespaces than its process. Only CAP_SYS_ADMIN allows that.
fn has_threads_apart(seen: &Seen) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let bound = seen.fields.field("CapBnd").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    if seen.tids.len() == 1 || bound.is_some_and(|mask| mask & SYS_ADMIN == 0) {
        return false;
    }
    let own = own_namespaces(seen);
    let mut others = seen.tids.iter().skip(1).map(|tid| namespaces(seen.pid, *tid));
    // A thread that exits has none.
    others.any(|other| other != own && other.iter().chain(&own).all(Option::is_some))
}

/// Whether a thread is blocked in vfork(2) at this moment.
fn is_now_in_vfork(pid: u32, tid: u32) -> bool {
    let wchan = || proc::whole_text(format!("/proc/{pid}/task/{tid}/wchan"));
    let is_uninterruptible = task::stat_field(pid, tid, 3).is_some_and(|state| state == "D");
    is_uninterruptible && wchan().is_ok_and(|w| w.contains("clone") || w.contains("fork"))
}

/// Whether any thread of a process is blocked in vfork(2).
pub(super) fn is_in_vfork(seen: &Seen) -> bool {
    seen.tids.iter().any(|tid| is_now_in_vfork(seen.pid, *tid))
}

/// How long to wait for a vfork(2) child to execute: most do at once.
const VFORK_PATIENCE: (u32, Duration) = (20, Duration::from_millis(5));

/// Whether a thread waits for such a child. No signal but SIGKILL interrupts that wait.
fn waits_in_vfork(pid: u32, tid: u32) -> bool {
    let waits = || is_now_in_vfork(pid, tid);
    let (times, pause) = VFORK_PATIENCE;
    (0..times).all(|n| {
        if n > 0 {
            std::thread::sleep(pause);
        }
        waits()
    })
}

/// Makes the record of a process from procfs.
pub(crate) fn record(
    seen: &Seen,
    surveyed: &Surveyed,
    blocks: &thread::Blocks,
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
        return Ok(record);
    }
    let umask = seen.fields.field("Umask").and_then(|u| u32::from_str_radix(u, 8).ok());
    record.umask = umask.unwrap_or(0o022);
    record.stopped = seen.stopped;
    record.descriptors = surveyed.descriptors.clone();
    record.locks = surveyed.locks.clone();
    record.leases = surveyed.leases.clone();
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
    for tid in &seen.tids {
        let place = surveyed.places.get(tid).cloned();
        record.threads.push(Thread { place, ..thread::record(subject, seen, *tid, blocks)? });
    }
    record.pending = signal::pending(seen.pid, true)?;
    Ok(record)
}

/// Completes the record by calls in the process itself, and reads the layout of its memory.
pub(crate) fn inside(
    seen: &Seen,
    record: &mut Process,
    survey: &mut Survey<'_>,
    mut memory: Memory,
) -> Result<Memory> {
    let pid = seen.pid;
    let gadget = gadget(pid, &memory).ok_or(Errno::NOEXEC);
    let gadget = gadget.map_err(Error::of("find a system call instruction in the memory", pid))?;
    let mut step = || -> std::result::Result<u64, Errno> {
        let mut script = Script::default();
        let peers = unix::ask_peers(survey, &record.descriptors, &mut script);
        let stops = ask_stops(survey, record.pid, &mut script);
        let answer = ask(seen, record, &mut script);
        let answers = run(seen, pid, gadget, &script, record.threads.first_mut())?;
        peers(survey, &answers)?;
        stops(survey, &answers);
        answer(record, &answers)
    };
    let brk = step().map_err(Error::of("make calls in the memory", pid))?;
    rung_meanwhile(seen, record, gadget)?;
    for (tid, thread) in seen.tids.iter().zip(&mut record.threads).skip(1) {
        threads_inside(seen, *tid, thread, gadget).map_err(Error::of("make calls in", *tid))?;
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

/// Injects calls into a thread, and stores its registers and mask in its record.
fn run(
    seen: &Seen,
    tid: u32,
    gadget: u64,
    script: &Script,
    record: Option<&mut Thread>,
) -> std::result::Result<Answers, Errno> {
    let mut remote = Remote::begin(tid, gadget)?;
    if let Some(record) = record {
        record.mask = remote.mask();
        record.registers = thread::begin_again(remote.registers());
    }
    let answers = script.run(seen.pid, &mut remote);
    give_back(seen, tid, remote)?;
    answers
}

/// Restores a task's registers, so that it continues as if it had not been stopped.
pub(super) fn give_back(seen: &Seen, tid: u32, remote: Remote) -> std::result::Result<(), Errno> {
    let (registers, mask) = (thread::going_on(seen, tid, remote.registers()), remote.mask());
    remote.finish(&registers, mask)
}

/// How long until the first timer of a stopped process expires that sends a signal (setitimer(2),
/// of real time; timer_create(2)); `None` if no call can be injected.
pub(crate) fn next_timer_ns(seen: &Seen) -> std::result::Result<Option<u64>, Errno> {
    let pid = seen.pid;
    let object = vdso::of_process(pid);
    let Some(gadget) = object.and_then(|o| find(pid, o.start, o.end - o.start)) else {
        return Ok(None);
    };
    let mut script = Script::default();
    let intervals = signal::interval_timers(&mut script);
    let posix = timer::posix(seen).unwrap_or_default();
    let rest = posix.iter().map(|timer| posix_time(&mut script, timer.id)).collect::<Vec<_>>();
    let answers = run(seen, pid, gadget, &script, None)?;
    const REAL: u32 = 0;
    let real = intervals(&answers)?.into_iter().find(|t| t.which == REAL && t.value_us != 0);
    let mut next = real.map(|timer| timer.value_us.saturating_mul(1000));
    for rest in rest {
        let (_, value_ns) = rest(&answers)?;
        next = next.into_iter().chain((value_ns != 0).then_some(value_ns)).min();
    }
    Ok(next)
}

/// Reads the signals that have arrived since the first read, and then the remaining time of timers.
/// Timers expire while the process is stopped, and each must count once: as a signal or as
/// remaining time.
fn rung_meanwhile(seen: &Seen, record: &mut Process, gadget: u64) -> Result<()> {
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
            return Ok(());
        }
        let mut ask = || -> std::result::Result<(), Errno> {
            let mut script = Script::default();
            let intervals = signal::interval_timers(&mut script);
            let timers = record.timers.iter();
            let rest = timers.map(|timer| posix_time(&mut script, timer.id)).collect::<Vec<_>>();
            let answers = run(seen, seen.pid, gadget, &script, None)?;
            record.interval_timers = intervals(&answers)?;
            for (posix, rest) in record.timers.iter_mut().zip(rest) {
                (posix.interval_ns, posix.value_ns) = rest(&answers)?;
            }
            Ok(())
        };
        ask().map_err(Error::of("read the timers of", seen.pid))?;
    }
}

/// Queries interval and remaining time of a POSIX timer.
fn posix_time(
    script: &mut Script,
    id: i32,
) -> impl FnOnce(&Answers) -> std::result::Result<(u64, u64), Errno> + use<> {
    let to = script.room(32);
    let asked = script.call(libc::SYS_timer_gettime, [id.into(), to.into()]);
    move |answers| {
        answers.returned(asked)?;
        let [interval_s, interval_ns, value_s, value_ns] = answers.numbers(to);
        let ns = |s: u64, ns: u64| s.saturating_mul(1_000_000_000).saturating_add(ns);
        Ok((ns(interval_s, interval_ns), ns(value_s, value_ns)))
    }
}

/// Queries for which of its stopped children a parent has not waited. WNOWAIT leaves them as they are.
fn ask_stops(
    survey: &Survey<'_>,
    parent: u32,
    script: &mut Script,
) -> impl FnOnce(&mut Survey<'_>, &Answers) + use<> {
    const OF_A_PROCESS: u64 = 1;
    const INFO_BYTES: u64 = 128;
    let options = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT;
    let children = survey.stopped.iter().filter(|(of, _)| *of == parent);
    let mut asked = Vec::new();
    for child in children.map(|(_, child)| *child) {
        let to = script.room(INFO_BYTES);
        let who = [OF_A_PROCESS.into(), u64::from(child).into()];
        let args = [who[0], who[1], to.into(), options.into(), 0.into()];
        asked.push((child, script.call(libc::SYS_waitid, args), to));
    }
    move |survey, answers| {
        for (child, made, to) in asked {
            // The number of the signal is 0 if no child is stopped.
            let [first] = answers.numbers(to);
            if answers.returned(made).is_ok() && first as u32 != 0 {
                survey.untold.push(child);
            }
        }
    }
}

/// Queries the state of the first thread and of the process; the answer contains the end of the
/// heap.
fn ask(
    seen: &Seen,
    record: &mut Process,
    script: &mut Script,
) -> impl FnOnce(&mut Process, &Answers) -> std::result::Result<u64, Errno> + use<> {
    let inside = thread::inside(script);
    let actions = signal::actions(seen, script);
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
        answers.returned(brk)
    }
}

fn threads_inside(
    seen: &Seen,
    tid: u32,
    record: &mut Thread,
    gadget: u64,
) -> std::result::Result<(), Errno> {
    let mut script = Script::default();
    let inside = thread::inside(&mut script);
    let answers = run(seen, tid, gadget, &script, Some(record))?;
    inside(record, &answers)
}

/// The address of a `syscall` instruction: in the vDSO, or anywhere in code.
fn gadget(pid: u32, memory: &Memory) -> Option<u64> {
    let code = memory.areas.iter().filter(|a| a.access & 4 != 0).map(|a| (a.start, a.bytes()));
    memory.vdso.into_iter().chain(code).find_map(|(start, bytes)| find(pid, start, bytes))
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
