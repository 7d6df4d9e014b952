//! Stopping tasks by ptrace(2), and resuming them.
//!
//! A tracer is a thread: the thread that seizes tasks is the one that resumes them.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self, Stop, TraceOptions};
use dormouse_kernel::proc::{self, Fields};
use dormouse_kernel::{Errno, pidfd};
use dormouse_record::{Error, Result};

use super::restart;
use super::seen::Seen;
use super::subject::Subject;
use super::tree::{look, look_at_all};
use super::wait::Blocks;
use crate::inject::landing;
use crate::inject::remote::EVENT_STOP;
use crate::look::in_call::InCall;

/// How long a task may take to stop. A task that waits for a disk does not stop before the I/O is
/// done.
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// How often a thread inside the vDSO, or in front of restart_syscall(2), is resumed for a moment, so that it leaves.
const LET_OUT_TIMES: u32 = 64;

/// A task that was seized.
#[derive(Debug, Default)]
pub(super) struct Task {
    /// The job control signal that it is stopped by.
    stopped: Option<i32>,
    /// The task was running, or was resumed, during the stop.
    has_run: bool,
    /// The kernel function in which it waited, if it was in restart_syscall(2).
    waited_in: Option<String>,
    /// The end of the interrupted wait, by CLOCK_MONOTONIC.
    sleeps_until_ns: Option<u64>,
}

/// Tasks that were seized. The drop resumes them.
#[derive(Debug, Default)]
pub(super) struct Seized {
    pub(super) tasks: HashMap<u32, Task>,
    /// A task has run while others were stopped already, or has a deliverable signal.
    pub(super) have_worked: bool,
    /// When the first of them was stopped.
    began: Option<Instant>,
    /// The first process of a twin, which is killed and not resumed.
    twin: Option<OwnedFd>,
    of_one_thread: PhantomData<*const ()>,
}

impl Seized {
    /// When the first of them was stopped.
    pub(super) fn began(&self) -> Instant {
        self.began.unwrap_or_else(Instant::now)
    }
}

impl Drop for Seized {
    fn drop(&mut self) {
        if let Some(first) = &self.twin {
            return end_twin(first);
        }
        for tid in self.tasks.keys() {
            // A task that has exited needs nothing; a job control stop continues by itself.
            let _ = call::detach(*tid, 0);
        }
    }
}

/// Ends a twin: no task of it runs again. Returns when the last of the traced tasks has exited, of which the
/// calling thread has no others.
fn end_twin(first: &OwnedFd) {
    // The exit of the first process kills all others of its pid namespace. It may have exited already.
    let _ = pidfd::send_signal(first, libc::SIGKILL);
    // A task that stops once more on its way is resumed to its end.
    while let Ok((tid, stop)) = call::wait_stop(None) {
        if !matches!(stop, Stop::Ended(_)) {
            let _ = call::resume(tid, 0);
        }
    }
}

/// Takes over the tasks of a twin, which the calling thread has stopped, and stops those that it does not trace.
/// Each of `tasks` comes with the call that it continues by restart_syscall(2). `first` is the twin's process 1.
pub(super) fn take_over(
    subject: &Subject,
    tasks: Vec<(u32, Option<i64>)>,
    first: OwnedFd,
    blocks: &Blocks,
) -> Result<(Vec<Seen>, Seized)> {
    let waited_in = |call: i64| match call {
        libc::SYS_poll => "poll",
        libc::SYS_futex => "futex",
        _ => "nanosleep",
    };
    let task = |call: Option<i64>| Task {
        waited_in: call.map(|call| waited_in(call).to_owned()),
        ..Task::default()
    };
    let tasks = tasks.into_iter().map(|(tid, call)| (tid, task(call))).collect();
    let seized = Seized { tasks, twin: Some(first), ..Seized::default() };
    stop_all(seized, || look(subject), blocks, Instant::now() + STOP_WITHIN)
}

/// Stops all tasks of a container.
pub(super) fn stop_tree(subject: &Subject, blocks: &Blocks) -> Result<(Vec<Seen>, Seized)> {
    stop_all(Seized::default(), || look(subject), blocks, Instant::now() + STOP_WITHIN)
}

/// Stops all processes with these pids, and those that `pids` returns later, except threads with
/// another tracer.
pub(super) fn stop_group(
    mut pids: impl FnMut() -> Vec<u32>,
    blocks: &Blocks,
) -> Result<(Vec<Seen>, Seized)> {
    let group = || {
        let mut all = look_at_all(pids())?;
        let traced = |tid: &u32| {
            let tracer = proc::fields(*tid).ok().and_then(|fields| fields.number("TracerPid"));
            tracer.is_some_and(|tracer| tracer != 0 && tracer != u64::from(own_tid()))
        };
        all.iter_mut().for_each(|seen| seen.tids.retain(|tid| !traced(tid)));
        Ok(all)
    };
    stop_all(Seized::default(), group, blocks, Instant::now() + STOP_WITHIN)
}

/// The id of the calling thread: a tracer is a thread.
fn own_tid() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// How often each thread has waited so far, by the host's ids (`voluntary_ctxt_switches` of
/// proc_pid_status(5)), and whether a signal is deliverable.
///
/// Tasks stop one after the other. The registers of a stopped task may show a wait for a task that
/// still runs. That task may complete the work and block, or exit, before it is stopped too. Then
/// all tasks are blocked, and yet there is work. The stop counts as one wait: a task with two has
/// run in between.
#[derive(Debug, Default, PartialEq, Eq)]
struct Pulse {
    waited: HashMap<u32, u64>,
    has_signal: bool,
}

impl Pulse {
    fn of(processes: &[Seen]) -> Self {
        let mut pulse = Self::default();
        for seen in processes.iter().filter(|seen| !seen.is_zombie) {
            pulse.add(seen.pid, &seen.fields, seen.stopped);
            for tid in seen.tids.iter().filter(|tid| **tid != seen.pid) {
                // A thread that exits has no entry, which differs from one that waits.
                if let Ok(fields) = proc::fields(*tid) {
                    pulse.add(*tid, &fields, seen.stopped);
                }
            }
        }
        pulse
    }

    fn add(&mut self, tid: u32, fields: &Fields, stopped: Option<i32>) {
        let mask = |name| fields.mask(name).unwrap_or(0);
        let pending = (mask("SigPnd") | mask("ShdPnd")) & !mask("SigBlk");
        self.has_signal |= pending != 0 && stopped.is_none();
        self.waited.insert(tid, fields.number("voluntary_ctxt_switches").unwrap_or(0));
    }

    /// Whether a task has been active since `before`, until now that all are stopped.
    fn has_worked(&self, before: &Self) -> bool {
        let is_new = |tid: &u32| !before.waited.contains_key(tid);
        let has_ended_or_run =
            |(tid, waited): (&u32, &u64)| self.waited.get(tid).is_none_or(|now| *now > *waited + 1);
        self.has_signal
            || self.waited.keys().any(is_new)
            || before.waited.iter().any(has_ended_or_run)
    }
}

/// Stops the tasks that `look` finds, until it finds no new one: stopped tasks create none.
fn stop_all(
    mut seized: Seized,
    mut look: impl FnMut() -> Result<Vec<Seen>>,
    blocks: &Blocks,
    deadline: Instant,
) -> Result<(Vec<Seen>, Seized)> {
    let mut before = None;
    loop {
        let mut processes = look()?;
        let before = before.get_or_insert_with(|| Pulse::of(&processes));
        let mut is_new = false;
        for seen in processes.iter().filter(|p| !p.is_zombie) {
            for tid in &seen.tids {
                if seized.tasks.contains_key(tid) {
                    continue;
                }
                is_new = true;
                seize(*tid, &mut seized, seen, blocks, deadline)?;
            }
        }
        if !is_new {
            for seen in &mut processes {
                seen.stopped = seized.tasks.get(&seen.pid).and_then(|task| task.stopped);
                for tid in &seen.tids {
                    let Some(task) = seized.tasks.get(tid) else { continue };
                    seen.has_run |= task.has_run;
                    seen.waited_in.extend(task.waited_in.clone().map(|place| (*tid, place)));
                    seen.sleeps_until_ns.extend(task.sleeps_until_ns.map(|end| (*tid, end)));
                }
            }
            seized.have_worked = Pulse::of(&processes).has_worked(before);
            return Ok((processes, seized));
        }
    }
}

/// The kernel function in which a thread waits, if its call is restart_syscall(2).
fn waits_in(tid: u32, call: Option<InCall>) -> Option<String> {
    let is_restarted = call.is_some_and(|call| call.number == libc::SYS_restart_syscall);
    is_restarted.then(|| proc::whole_text(format!("/proc/{tid}/wchan")).unwrap_or_default())
}

/// How often the stop of a task is polled without a pause.
const LOOKS_AT_ONCE: u32 = 50;

fn seize(
    tid: u32,
    seized: &mut Seized,
    seen: &Seen,
    blocks: &Blocks,
    deadline: Instant,
) -> Result<()> {
    seized.began.get_or_insert_with(Instant::now);
    // ORDER: a program that runs has its system call filters. They are suspended while it is stopped.
    match call::seize(tid, TraceOptions::SYSGOOD) {
        Ok(()) => {}
        Err(Errno::SRCH) => return Ok(()), // ended meanwhile
        // The kernel also returns this for a task that has exited, whether or not it was reaped
        // since.
        Err(Errno::PERM) if proc::status(tid).map_or(true, |status| status.is_zombie()) => {
            return Ok(());
        }
        Err(Errno::PERM) => {
            let why = "it has a tracer (a debugger?): detach that first";
            return Err(Error::Refused(vec![seen.refuse("", why)]));
        }
        Err(e) => return Err(Error::of("seize a task", tid)(e)),
    }
    // ORDER: before the call is interrupted. A task in uninterruptible sleep is active.
    let is_asleep = |_: &InCall| proc::status(tid).is_ok_and(|stat| stat.state != 'D');
    let mut sleeps_in = InCall::of(tid).filter(is_asleep);
    seized.tasks.insert(tid, Task { waited_in: waits_in(tid, sleeps_in), ..Task::default() });
    let asleep = sleeps_in.and_then(|in_call| blocks.asleep(tid, &in_call));
    call::interrupt(tid).map_err(Error::of("interrupt a task", tid))?;
    let (mut let_out, mut looks) = (0, 0);
    loop {
        match call::poll_stop(tid).map_err(Error::of("wait for a task", tid))? {
            Some(Stop::Event(EVENT_STOP, signal)) => {
                let is_job_control = signal != libc::SIGTRAP;
                let registers = call::registers(tid).unwrap_or_default();
                // The thread goes on from calls of a tracer that was killed.
                let is_left = landing::may_be_inside(&registers);
                let skipped = landing::skip_wait(tid, &registers);
                let may_leave = let_out < LET_OUT_TIMES
                    || (is_left || skipped.is_some()) && Instant::now() < deadline;
                let is_outside = || {
                    skipped.is_none()
                        && !seen.is_inside_object(&registers)
                        && !restart::is_to_come(tid, &registers)
                };
                if !is_job_control && may_leave && !is_outside() {
                    let_out += 1;
                    if let Some(landing) = skipped {
                        call::set_registers(tid, &landing)
                            .map_err(Error::of("set the registers", tid))?;
                    }
                    call::resume(tid, 0).map_err(Error::of("resume a task", tid))?;
                    std::thread::sleep(Duration::from_micros(20));
                    // The thread has run.
                    sleeps_in = None;
                    let waited_in = waits_in(tid, InCall::of(tid));
                    seized.tasks.insert(tid, Task { waited_in, ..Task::default() });
                    match call::interrupt(tid) {
                        Ok(()) | Err(Errno::SRCH) => continue, // the next stop reports its exit
                        Err(e) => return Err(Error::of("interrupt a task", tid)(e)),
                    }
                }
                let options = TraceOptions::SUSPEND_SECCOMP | TraceOptions::SYSGOOD;
                call::set_trace_options(tid, options)
                    .map_err(Error::of("suspend the system call filters of", tid))?;
                if let Some(task) = seized.tasks.get_mut(&tid) {
                    task.stopped = is_job_control.then_some(signal);
                    let is_same = |it: InCall| it.is_of(&registers);
                    task.has_run = !sleeps_in.is_some_and(is_same);
                    task.sleeps_until_ns = asleep.and_then(|asleep| asleep.until_ns(tid));
                }
                return Ok(());
            }
            // The signal is delivered, and the stop follows.
            Some(Stop::Signal(signal)) => {
                call::resume(tid, signal).map_err(Error::of("resume a task", tid))?;
            }
            Some(Stop::Ended(_)) => {
                seized.tasks.remove(&tid);
                return Ok(());
            }
            Some(_) => call::resume(tid, 0).map_err(Error::of("resume a task", tid))?,
            None if Instant::now() > deadline => {
                let why = "it does not stand still: it waits for a disk, or for a child that was \
                           made by vfork and has not executed yet";
                return Err(Error::Refused(vec![seen.refuse("", why)]));
            }
            // The task stops within some microseconds, and a sleep takes a hundred.
            None if looks < LOOKS_AT_ONCE => {
                looks += 1;
                std::thread::yield_now();
            }
            None => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}
