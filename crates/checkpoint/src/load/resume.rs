//! The last steps of a restore: the rights of all threads are checked, their registers are set, and
//! all tasks are resumed.
//!
//! All processes are complete and wait at the end of the last stage. The conductor is above this
//! module, which uses [`super::process`] and [`super::cgroup`] for their engine's half.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{Stop, TraceOptions};
use dormouse_kernel::{Errno, call, proc, weakened};
use dormouse_record::{Action, Dispatch, Error, Process, Records, Restart, Result, Thread};

use super::restore::Restore;
use super::{cgroup, process};
use crate::inject::landing::{self, Ground};
use crate::inject::remote::{EVENT_STOP, Remote, Scratch};
use crate::{remaining, vdso};

/// Tasks by their ids inside.
pub(super) fn by_inner<State>(tasks: &HashMap<u32, State>) -> Result<HashMap<u32, u32>> {
    let mut by_inner = HashMap::new();
    for tid in tasks.keys() {
        let fields = fields(*tid)?;
        by_inner.insert(fields.pids().last().copied().unwrap_or(0), *tid);
    }
    Ok(by_inner)
}

fn fields(tid: u32) -> Result<proc::Fields> {
    proc::fields(tid).map_err(|_| Error::of("look at a task", tid)(Errno::SRCH))
}

/// Sets the registers and resumes all tasks. ORDER: all are ready before the first is resumed,
/// except processes in a job control stop. Those stop again at once, children before their parents,
/// which get the notification while they do not run.
pub(super) fn all(pid: u32, by_inner: &HashMap<u32, u32>, restore: &Restore) -> Result<()> {
    let last = prepare(by_inner, restore)?;
    cgroup::freeze(pid, &restore.records)?;
    let_go(&last)
}

/// Sets the registers. Returns the tasks that are ready to be resumed, by the host's ids: all but those of
/// processes in a job control stop, which have stopped again.
pub(super) fn prepare(by_inner: &HashMap<u32, u32>, restore: &Restore) -> Result<Vec<u32>> {
    check_confined(by_inner, restore)?;
    let processes = &restore.records.processes;
    let alive = || processes.iter().rev().filter(|p| p.ended.is_none());
    for process in alive().filter(|p| p.stopped.is_some()) {
        let tids = become_process(by_inner, restore, process)?;
        stop_again(tids, process)?;
    }
    let mut last = Vec::new();
    for process in alive().filter(|p| p.stopped.is_none()) {
        last.extend(become_process(by_inner, restore, process)?);
    }
    Ok(last)
}

/// Refuses a thread that has more rights than its record and the configuration give, as the kernel
/// reports them. Nothing can change the rights any more, and no instruction of the container has
/// run.
fn check_confined(by_inner: &HashMap<u32, u32>, restore: &Restore) -> Result<()> {
    let alive = restore.records.processes.iter().filter(|process| process.ended.is_none());
    for (process, thread) in alive.flat_map(|p| p.threads.iter().map(move |thread| (p, thread))) {
        let Some(tid) = by_inner.get(&thread.tid) else { continue };
        let found = fields(*tid)?;
        let most = match process.user {
            // In a user namespace of its own it may have every capability.
            Some(_) => u64::MAX,
            None => restore.capabilities,
        };
        let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
        for (set, wanted) in sets.iter().zip(thread.credentials.capabilities) {
            let has = found.mask(set).unwrap_or(u64::MAX);
            if has & !(wanted & most) != 0 {
                return Err(Error::Elsewhere(format!(
                    "thread {} ({}) has come to have the capabilities {has:x} ({set}), more than \
                     its configuration gives",
                    thread.tid, thread.name
                )));
            }
        }
        let is_bound = thread.credentials.no_new_privileges
            || restore.no_new_privileges && !weakened("no-new-privs");
        if is_bound && found.number("NoNewPrivs") != Some(1) {
            return Err(Error::Elsewhere(format!(
                "thread {} ({}) has come to be able to gain privileges",
                thread.tid, thread.name
            )));
        }
    }
    Ok(())
}

fn let_go(tids: &[u32]) -> Result<()> {
    for tid in tids {
        match call::detach(*tid, 0) {
            // Resumed threads run already, and may have ended their whole process.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(e) => return Err(Error::of("let go of a task", *tid)(e)),
        }
    }
    Ok(())
}

/// Everything of a process but its resumption; returns its threads by the host's ids.
fn become_process(
    by_inner: &HashMap<u32, u32>,
    restore: &Restore,
    process: &Process,
) -> Result<Vec<u32>> {
    let records = &restore.records;
    let Some(memory) = process.memory.map(|m| &records.memories[m]) else { return Ok(Vec::new()) };
    if let Some(pid) = by_inner.get(&process.pid) {
        process::oom_score(*pid, process.oom_score_adj)?;
        process::autogroup(*pid, process.autogroup_nice)?;
        process::core_dump_filter(*pid, process.core_dump_filter)?;
        if let Some((address, bytes)) = &memory.landing {
            let put = landing::put(*pid, *address, &bytes.0);
            put.map_err(Error::file("cannot put code behind the vDSO into", pid.to_string()))?;
        }
        // The kernel takes the requested address as a hint; jumps lead there.
        let wanted = memory.vdso.map(|(start, bytes)| start + bytes);
        if restore.is_foreign && vdso::of_process(*pid).map(|object| object.end) != wanted {
            let why = "the kernel has mapped the vDSO at another address";
            return Err(Error::Elsewhere(why.into()));
        }
    }
    let mut tids = Vec::new();
    // ORDER: the first thread comes last. It unmaps the program, with which the others make their
    // calls.
    for thread in process.threads.iter().rev() {
        let tid = by_inner.get(&thread.tid).copied();
        let tid = tid.ok_or_else(|| Error::Ended(format!("thread {} has exited", thread.tid)))?;
        let step = become_thread(tid, restore, process, thread);
        step.map_err(Error::of("give registers to a task", tid))?;
        tids.push(tid);
    }
    tids.reverse();
    Ok(tids)
}

/// How long a parent waits for the SIGCHLD of its first stopped child, and of each other one.
const FIRST_SIGNAL_NS: u64 = 100_000_000;
const NEXT_SIGNAL_NS: u64 = 2_000_000;
/// How long a process may take to stop again.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// Signals that are blocked until a process has stopped again: all but those that stop it. It has taken none of its
/// pending signals.
fn blocked_until_stopped(process: &Process) -> u64 {
    let stop = process.stopped.unwrap_or(libc::SIGSTOP).clamp(1, 64);
    !(1 << (stop - 1))
}

/// Gives a stopped thread its own mask. It stays stopped.
fn unblock(tid: u32, mask: u64) -> std::result::Result<(), Errno> {
    call::seize(tid, TraceOptions::empty())?;
    match call::wait_stop(Some(tid))?.1 {
        Stop::Event(EVENT_STOP, _) => {}
        _ => return Err(Errno::SRCH),
    }
    call::set_signal_mask(tid, mask)?;
    call::detach(tid, 0)
}

/// Resumes a process that stops before it does anything: by its recorded stop signal if that still
/// has its default action, otherwise by SIGSTOP.
fn stop_again(tids: Vec<u32>, process: &Process) -> Result<()> {
    let Some(pid) = tids.first().copied() else { return Ok(()) };
    let signal = process.stopped.unwrap_or(libc::SIGSTOP);
    let is_default = process.actions.iter().all(|a| a.signal != signal || a.handler == 0);
    let is_blocked = |mask: u64| mask & 1 << (signal - 1) != 0;
    let stops = is_default && !process.threads.iter().any(|t| is_blocked(t.mask));
    let failed = Error::of("stop again", pid);
    let sent = (|| -> std::result::Result<(), Errno> {
        let send = |signal| {
            let raw = |e: dormouse_kernel::CallError| Errno::from_raw_os_error(e.errno());
            let pidfd = dormouse_kernel::pidfd::open(pid).map_err(raw)?;
            dormouse_kernel::pidfd::send_signal(&pidfd, signal).map_err(raw)
        };
        // A parent can wait for the stop once every thread has stopped.
        let await_stop = |tids: &[u32]| {
            let state = |f: proc::Fields| f.field("State").is_some_and(|s| s.starts_with('T'));
            let began = Instant::now();
            while !tids.iter().all(|tid| proc::fields(*tid).is_ok_and(state)) {
                // The kernel ignores stop signals of a terminal in an orphaned process group.
                if began.elapsed() > STOP_WITHIN / 10 {
                    send(libc::SIGSTOP)?;
                }
                if began.elapsed() > STOP_WITHIN {
                    return Err(Errno::TIMEDOUT);
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            Ok(())
        };
        send(if stops { signal } else { libc::SIGSTOP })?;
        // ORDER: one thread takes the signal before others run. KERNEL: between a stop signal of a terminal and the
        // stop of the group get_signal() releases the lock of signals. Another thread that looks in between has none,
        // and begins its interrupted call again.
        let (first, others) = tids.split_at(1);
        for part in [first, others] {
            let_go(part).map_err(|_| Errno::SRCH)?;
            await_stop(part)?;
        }
        // ORDER: from here on a pending signal, also SIGSTOP, stays pending.
        for (tid, thread) in tids.iter().zip(&process.threads) {
            unblock(*tid, thread.mask)?;
        }
        if process.pending.iter().any(|one| one.number() == libc::SIGSTOP) {
            send(libc::SIGSTOP)?;
        }
        Ok(())
    })();
    sent.map_err(failed)
}

/// Waits for the stops of children that their parent had waited for, and consumes the SIGCHLD of
/// all stops: the signal had been delivered, unless it is pending.
fn forget_stops(
    tid: u32,
    remote: &mut Remote<'_>,
    records: &Records,
    parent: &Process,
) -> std::result::Result<(), Errno> {
    let is_pending = parent.pending.iter().any(|s| s.number() == libc::SIGCHLD);
    let stopped = records.processes.iter().filter(|p| p.parent == parent.pid);
    let stopped: Vec<&Process> = stopped.filter(|p| p.stopped.is_some()).collect();
    // Older versions recorded only the pending signal.
    let was_reported = |p: &&&Process| p.stop_was_told.unwrap_or(!is_pending);
    let children: Vec<u32> = stopped.iter().filter(was_reported).map(|p| p.pid).collect();
    if stopped.is_empty() || is_pending && children.is_empty() {
        return Ok(());
    }
    let scratch = Scratch::map(tid, remote)?;
    for child in children {
        const OF_A_PROCESS: u64 = 1;
        let options = (libc::WSTOPPED | libc::WNOHANG) as u64;
        remote.call(libc::SYS_waitid, [OF_A_PROCESS, child.into(), 0, options, 0])?;
    }
    let sends_none =
        |a: &Action| a.signal == libc::SIGCHLD && a.flags & libc::SA_NOCLDSTOP as u64 != 0;
    if is_pending || parent.actions.iter().any(sends_none) {
        return scratch.unmap(remote);
    }
    // A child sends SIGCHLD just after its state has changed. The signals of several children merge
    // into one while it is pending, so only the first must arrive.
    let mask = 1u64 << (libc::SIGCHLD - 1);
    for first in (0..stopped.len()).map(|index| index == 0) {
        let timeout_ns: u64 = if first { FIRST_SIGNAL_NS } else { NEXT_SIGNAL_NS };
        scratch.write([mask, 0, timeout_ns].map(u64::to_ne_bytes).as_flattened())?;
        let args = [scratch.address, 0, scratch.address + 8, 8];
        match remote.call(libc::SYS_rt_sigtimedwait, args) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(e) => return Err(e),
        }
    }
    scratch.unmap(remote)
}

fn become_thread(
    tid: u32,
    restore: &Restore,
    process: &Process,
    thread: &Thread,
) -> std::result::Result<(), Errno> {
    // Not one of the container's memory, which another process of the container could change.
    let ground = Ground::bare(restore.program.gadget().ok_or(Errno::NOEXEC)?);
    let mut remote = Remote::begin(tid, &ground)?;
    let mut registers = thread.registers;
    let is_first = thread.tid == process.pid;
    if is_first {
        forget_stops(tid, &mut remote, &restore.records, process)?;
    }
    if let Some(restart) = &thread.restart {
        let scratch = Scratch::map(tid, &mut remote)?;
        let returned = wait_again(&mut remote, scratch, restart)?;
        scratch.unmap(&mut remote)?;
        const ERESTART_RESTARTBLOCK: i64 = -516;
        if returned != ERESTART_RESTARTBLOCK {
            // The call has completed already.
            registers.rax = returned as u64;
            registers.orig_rax = u64::MAX;
        }
    }
    if let Some(limit) = &thread.time_limit {
        if let Some(address) = limit.at {
            let part_ns = if limit.microseconds { 1_000 } else { 1 };
            let left = [limit.left_ns / 1_000_000_000, limit.left_ns % 1_000_000_000 / part_ns];
            call::write_memory(tid, address, left.map(u64::to_ne_bytes).as_flattened())?;
        }
        registers = remaining::begin_again(tid, registers, limit);
    }
    call::set_extended_state(tid, &extended(tid, thread)?)?;
    if is_first {
        // The other threads of the process wait, and have their own registers. This one executes
        // nothing until it has its own.
        let base = restore.program.sealed_base();
        remote.call(libc::SYS_munmap, [base, restore.work_bytes])?;
    }
    let mask = match process.stopped {
        Some(_) => blocked_until_stopped(process),
        None => thread.mask,
    };
    remote.finish(&registers, mask)?;
    // ORDER: no call is injected any more.
    match &thread.dispatch {
        Some(dispatch) => call::set_dispatch(tid, &dispatch_of(dispatch)),
        None => Ok(()),
    }
}

fn dispatch_of(record: &Dispatch) -> call::Dispatch {
    let Dispatch { from_inside, start, length_bytes, selector } = *record;
    let (inside, outside) = (call::Dispatch::FROM_INSIDE, call::Dispatch::FROM_OUTSIDE);
    let mode = if from_inside { inside } else { outside };
    call::Dispatch { mode, selector, start, length_bytes }
}

/// The extended registers in the length of this kernel: components beyond the saved ones are as in
/// a new program.
fn extended(tid: u32, thread: &Thread) -> std::result::Result<Vec<u8>, Errno> {
    let mut state = vec![0; 16 << 10];
    let here = call::extended_state(tid, &mut state)?;
    state = thread.extended.0.clone();
    state.resize(here, 0);
    Ok(state)
}

/// Makes the kernel create the restart block of a wait in the new task: the call is made again with
/// its remaining time, and interrupted at once.
fn wait_again(
    remote: &mut Remote<'_>,
    scratch: Scratch,
    restart: &Restart,
) -> std::result::Result<i64, Errno> {
    let mut args = restart.args;
    let Some(left) = restart.remaining_ns else {
        return match restart.call {
            libc::SYS_poll => remote.interrupted(restart.call, args),
            _ => Err(Errno::NOSYS),
        };
    };
    let mut time = (left / 1_000_000_000).to_ne_bytes().to_vec();
    time.extend((left % 1_000_000_000).to_ne_bytes());
    scratch.write(&time)?;
    match restart.call {
        libc::SYS_nanosleep => args[0] = scratch.address,
        libc::SYS_clock_nanosleep => args[2] = scratch.address,
        libc::SYS_futex => args[3] = scratch.address,
        libc::SYS_poll => args[2] = left.div_ceil(1_000_000),
        // No other call is recorded: a record with another call is refused.
        _ => return Err(Errno::NOSYS),
    }
    remote.interrupted(restart.call, args)
}
