//! Processes: state that their threads share.
//!
//! This module brings the kinds of state of a process into their order; the calls are in the
//! modules of the kinds. [`super::tree`] is above it.

use dormouse_record::seat::NOFILE;
use dormouse_record::{Error, Process, Result, Table, Thread};

use super::plan::Plan;
use super::{
    cgroup_namespace, credentials, descriptor, event, fanotify, filter, helper, inotify, joint,
    lock, memfd, memory, mount, net, numberer, open, schedule, signal, stage, thread, timer, uts,
};
use crate::inject::program::{Arg, Call, Sequence};

/// The resource number of the limit of nice(2).
const NICE: u32 = 13;
/// The resource number of the limit on real-time priorities.
const RTPRIO: u32 = 14;

/// The first operations: the newborn drops its own state.
pub(super) fn begin(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    // Signals stay pending until the end; a breakpoint must be delivered.
    let but_trap = plan.builder.writable_numbers(&[!(1 << (libc::SIGTRAP - 1))]);
    let args = [Arg::from(libc::SIG_SETMASK), but_trap.into(), Arg::Number(0), Arg::Number(8)];
    plan.boot.call("the signal mask", Call::new(libc::SYS_rt_sigprocmask, args));
    if plan.moves_clocks {
        // ORDER: offsets can be written until a process enters, so the conductor writes them at
        // `begin`.
        let new = Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWTIME)]);
        plan.boot.call("a time namespace", new);
    }
    // At this stage the conductor finds the newborn's own rseq, and changes the next call to end
    // it.
    plan.boot.stage(stage::BEGIN);
    plan.boot.call("the newborn's rseq", Call::new(libc::SYS_getpid, []));
    // ORDER: before any object of a record is made. The newborn has descriptors of the host, such
    // as directories of control groups, its procfs and logs.
    for [first, last] in &plan.gaps {
        let args = [(*first).into(), (*last).into(), Arg::Number(0)];
        let close = Call::new(libc::SYS_close_range, args);
        // Two passed descriptors may have neighbouring numbers.
        sequence.call("descriptors of the newborn's", close.lenient());
    }
    if plan.moves_clocks {
        enter_time(plan, sequence)?;
    }
    uts::set_own(plan, sequence);
    // Limits are as high as the configuration allows, until each process sets its own.
    let limits = &plan.records.processes[0].limits;
    for resource in [NOFILE, NICE, RTPRIO] {
        let Some(hard) = limits.iter().find(|l| l.resource == resource).map(|l| l.hard) else {
            continue;
        };
        let limit = plan.builder.numbers(&[hard, hard]);
        let args = [Arg::Number(0), resource.into(), limit.into(), Arg::Number(0)];
        let what = format!("limit {resource}, as high as it goes");
        sequence.call(what, Call::new(libc::SYS_prlimit64, args).lenient());
    }
    Ok(())
}

/// Enters the time namespace for children; there are none yet.
fn enter_time(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let what = "the clocks";
    let path = "/proc/self/ns/time_for_children";
    let cell = open::own_path(plan, sequence, what, path, libc::O_RDONLY as u32)?;
    let args = [cell.into(), Arg::from(libc::CLONE_NEWTIME)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
    Ok(())
}

/// Everything of a process after its memory; returns the sequences of its other threads, numbered
/// from `next_thread` on.
pub(super) fn restore(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    record: &Process,
    next_thread: usize,
) -> Result<Vec<Sequence>> {
    let pid = record.pid;
    mount::enter(plan, sequence, record)?;
    uts::enter(plan, sequence, record)?;
    cgroup_namespace::enter(plan, sequence, record)?;
    net::enter(plan, sequence, record)?;
    // Of processes that share the directory, the first goes there for all.
    if let (Some(directory), None) = (record.directory, record.place_of) {
        go_to(plan, sequence, pid, directory, record.umask)?;
    }
    signal::actions(plan, sequence, record);
    filter::of_process(plan, sequence, record);
    // A process that enters a user namespace has one thread until then.
    let count = if record.user.is_some() { 1 } else { record.threads.len() };
    let mut others: Vec<Sequence> = (1..count).map(|_| Sequence::default()).collect();
    for (n, creator, shares) in arrange_threads(record, count)? {
        let by = if creator == 0 { &mut *sequence } else { &mut others[creator - 1] };
        let thread = &record.threads[n];
        let mut shares = shares;
        if thread.shares_io {
            if creator != 0 && !record.threads[creator].shares_io {
                return Err(Error::Elsewhere(format!(
                    "thread {} of process {pid} ({}) shares an I/O context (CLONE_IO) with a process \
                     that cannot create it",
                    thread.tid, record.name
                )));
            }
            schedule::begin_io(by, pid);
            shares |= joint::CLONE_IO;
        }
        thread::make(plan, by, thread, shares, next_thread + n - 1);
    }
    for (own, other) in others.iter_mut().zip(record.threads.iter().skip(1)) {
        if other.own_undo {
            let call = Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_SYSVSEM)]);
            own.call(format!("the undo values of thread {}", other.tid), call);
        }
        if let Some(place) = &other.place {
            go_to(plan, own, other.tid, place.directory, place.umask)?;
        }
        thread::restore(plan, own, other)?;
        if plan.is_shared {
            own.stage(stage::SHARED);
        }
        if let Some(table) = other.own_table() {
            descriptor::place(plan, own, table, None)?;
        }
        own.stage(stage::WHOLE);
        numberer::end(plan, own, false);
        if let Some(table) = other.own_table() {
            with_table(plan, own, table)?;
        }
        thread::last(plan, own, other)?;
        own.stage(stage::DONE);
    }
    thread::restore(plan, sequence, &record.threads[0])?;
    memfd::seal_mapped(plan, sequence, record)?;
    if plan.is_shared {
        sequence.stage(stage::SHARED);
    }
    // ORDER: what the other processes with this table needed of it, they have.
    if record.table_of.is_none() {
        descriptor::place(plan, sequence, record.table(), record.user)?;
    }
    Ok(others)
}

/// Which thread creates each other thread. The first `count` threads exist before the process enters a user namespace.
fn arrange_threads(record: &Process, count: usize) -> Result<Vec<joint::ThreadBirth>> {
    let groups = |thread: &Thread| {
        let own = |has: bool| Some(thread.tid).filter(|_| has);
        let table = thread.table_of.or(own(thread.table.is_some()));
        [table, thread.place_of.or(own(thread.place.is_some()))]
    };
    let groups: Vec<[Option<u32>; 2]> = record.threads[..count].iter().map(groups).collect();
    joint::arrange_threads(&groups).map_err(|thread| {
        Error::Elsewhere(format!(
            "thread {} of process {} ({}) shares descriptors with one thread and its working directory with \
             another, which no thread can create",
            record.threads[thread].tid, record.pid, record.name
        ))
    })
}

/// Working directory and umask.
fn go_to(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    pid: u32,
    directory: usize,
    umask: u32,
) -> Result<()> {
    let cell = plan.object(directory)?;
    let what = format!("the working directory of process {pid}");
    sequence.call(what, Call::new(libc::SYS_fchdir, [cell.into()]));
    sequence.call("the umask", Call::new(libc::SYS_umask, [umask.into()]));
    Ok(())
}

/// Steps that need everything else in place, and the rights of the container's root, such as
/// opening a path.
pub(super) fn with_rights(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    record: &Process,
) -> Result<()> {
    with_table(plan, sequence, record.table())?;
    if let Some(root) = &record.root {
        // ORDER: no path is opened any more; the working directory does not change.
        let what = format!("the root '{root}' of process {}", record.pid);
        open::check_path(plan, sequence, &what, root);
        let at = plan.builder.text(root.as_bytes());
        sequence.call(what, Call::new(libc::SYS_chroot, [at.into()]));
    }
    Ok(())
}

/// Steps that need the final numbers of descriptors, and those rights.
fn with_table(plan: &mut Plan<'_>, sequence: &mut Sequence, table: Table<'_>) -> Result<()> {
    event::watch(plan, sequence, table)?;
    lock::of_table(plan, sequence, table);
    memfd::seal(plan, sequence, table.task);
    inotify::watch(plan, sequence, table);
    fanotify::watch(plan, sequence, table);
    Ok(())
}

/// Makes a process enter its user namespace, and create its threads there; returns their sequences,
/// numbered from `next_thread` on. ORDER: all steps that need capabilities over the container are
/// done.
pub(super) fn enter_user(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    record: &Process,
    next_thread: usize,
) -> Result<Vec<Sequence>> {
    if record.user.is_none() {
        return Ok(Vec::new());
    }
    with_rights(plan, sequence, record)?;
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
        helper::wait_until_set(sequence, &what, late.is_next);
        thread::make_next(plan, sequence, other, next_thread + n - 1);
        helper::set(sequence, &what, late.is_given);
        let mut own = Sequence::default();
        thread::restore(plan, &mut own, other)?;
        own.stage(stage::INSIDE);
        thread::last(plan, &mut own, other)?;
        own.stage(stage::DONE);
        others.push(own);
    }
    Ok(others)
}

/// Steps that need everything else in place, and all threads.
pub(super) fn last(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    if record.user.is_none() {
        with_rights(plan, sequence, record)?;
    }
    if record.subreaper && !plan.adopters.contains(&record.pid) {
        // ORDER: all orphans have their parents.
        become_subreaper(sequence, record.pid);
    }
    signal::forget_children(plan, sequence);
    signal::pending(plan, sequence, record.pid, None, &record.pending);
    timer::posix(plan, sequence, record);
    signal::interval_timers(plan, sequence, record);
    for limit in &record.limits {
        let values = plan.builder.numbers(&[limit.soft, limit.hard]);
        let args = [Arg::Number(0), limit.resource.into(), values.into(), Arg::Number(0)];
        // A limit can be lowered and never raised: a limit above those of this host or
        // configuration stays lower.
        let call = Call::new(libc::SYS_prlimit64, args).lenient();
        sequence.call(format!("limit {} of process {}", limit.resource, record.pid), call);
    }
    for command in (0..u32::BITS).map(|n| 1u32 << n).filter(|one| record.barriers & one != 0) {
        let args = [Arg::Number(command.into()), Arg::Number(0), Arg::Number(0)];
        let what = format!("a registration of membarrier of process {}", record.pid);
        sequence.call(what, Call::new(libc::SYS_membarrier, args));
    }
    // ORDER: its memory is complete, and all its children exist, which would inherit the rule.
    memory::seal(plan, sequence, record);
    memory::later(plan, sequence, record);
    if record.merges_memory {
        const SET_MEMORY_MERGE: i32 = 67;
        let args = [SET_MEMORY_MERGE, 1, 0, 0, 0].map(Arg::from);
        let call = Call::new(libc::SYS_prctl, args).lenient(); // where this kernel merges none
        sequence.call(format!("the merging of memory of process {}", record.pid), call);
    }
    if record.write_or_execute != 0 {
        const SET_MDWE: u64 = 65;
        let args = [SET_MDWE, record.write_or_execute.into(), 0, 0, 0].map(Arg::from);
        let what = format!("the rule of executable memory of process {}", record.pid);
        sequence.call(what, Call::new(libc::SYS_prctl, args));
    }
    Ok(())
}

/// Makes a process the parent of later orphans among its descendants (PR_SET_CHILD_SUBREAPER(2const)).
pub(super) fn become_subreaper(sequence: &mut Sequence, pid: u32) {
    let args = [Arg::from(libc::PR_SET_CHILD_SUBREAPER), Arg::Number(1)];
    sequence.call(format!("process {pid} as a subreaper"), Call::new(libc::SYS_prctl, args));
}

/// Sets the nice value of the session of a process as a whole (sched(7), autogroups). As the score of the OOM killer
/// it is only raised.
pub(super) fn autogroup(pid: u32, wanted: i32) -> Result<()> {
    if wanted <= 0 {
        return Ok(());
    }
    let path = format!("/proc/{pid}/autogroup");
    match std::fs::write(&path, wanted.to_string()) {
        // A kernel without autogroups.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        set => set.map_err(Error::file("cannot set", &path)),
    }
}

/// Sets the OOM killer's score adjustment of a process (proc_pid_oom_score_adj(5)).
///
/// The write is made from outside, as it needs no `/proc` of the container. The value is only
/// raised: a lower value than that of a start is a decision of the operator, not of a checkpoint.
pub(super) fn oom_score(pid: u32, wanted: i32) -> Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    let step = || -> std::io::Result<()> {
        let now: i32 = dormouse_kernel::proc::whole_text(&path)?.trim().parse().unwrap_or(0);
        if wanted > now { std::fs::write(&path, wanted.to_string()) } else { Ok(()) }
    };
    step().map_err(Error::file("cannot set", &path))
}

/// Sets which memory a core dump of a process contains (core(5)). ORDER: its memory is its own.
pub(super) fn core_dump_filter(pid: u32, filter: Option<u32>) -> Result<()> {
    let Some(filter) = filter else { return Ok(()) };
    let path = format!("/proc/{pid}/coredump_filter");
    match std::fs::write(&path, format!("{filter:#x}")) {
        // A kernel without core dumps.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        set => set.map_err(Error::file("cannot set", &path)),
    }
}
