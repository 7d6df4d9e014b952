//! Finding all processes of a container, and stopping them.
//!
//! The tree is walked from the first process along `/proc/PID/task/TID/children`, which also lists
//! zombies. Other processes in the cgroup were put there from outside
//! ([`super::object::Survey::outsiders`]).

use super::Subject;
use super::cgroup::Thawed;
use super::host::Host;
use super::thread::{self, Blocks};
use crate::error::{Error, Refusal, Result as Outcome};
use crate::format::{INIT, Limit, PROGRAMS};
use crate::inject::remote::EVENT_STOP;
use crate::look::ids::Maps;
use crate::look::in_call::InCall;
use crate::look::ipc::Tables;
use crate::look::task::{self, Stat};
use crate::vdso;
use dormouse_kernel::call::{self, Stop, TraceOptions};
use dormouse_kernel::proc::{self, Fields};
use dormouse_kernel::{Errno, namespace, pidfd};
use rustix::fd::OwnedFd;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long a task may take to stop. A task that waits for a disk does not stop before the I/O is
/// done.
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// How often a thread inside the vDSO is resumed for a moment, so that it leaves.
const LET_OUT_TIMES: u32 = 64;

/// A process that was found.
#[derive(Debug)]
pub struct Seen {
    /// The pid on the host.
    pub(crate) pid: u32,
    /// The pid in the container.
    pub(crate) inner: u32,
    /// The pid of its parent in the container, 0 for the first.
    pub(crate) parent: u32,
    /// The pid of the first process on the host: paths inside are resolved from its root.
    pub(crate) first: u32,
    /// `/proc/PID/status`.
    pub(crate) fields: Fields,
    /// The process has exited and was not reaped.
    pub(crate) is_zombie: bool,
    /// Its threads by the host's ids; the first is the thread group leader.
    pub(crate) tids: Vec<u32>,
    /// The job control signal that it is stopped by.
    pub(crate) stopped: Option<i32>,
    /// One of its threads was running, or was resumed, during the stop.
    pub(crate) has_run: bool,
    /// The kernel function in which a thread waited before the stop, for threads in
    /// restart_syscall(2).
    pub(crate) waited_in: HashMap<u32, String>,
    /// The end of the wait that each thread was in, by CLOCK_MONOTONIC.
    pub(crate) sleeps_until_ns: HashMap<u32, u64>,
    /// A pidfd of the process; `None` if it has exited.
    pub(crate) pidfd: Option<OwnedFd>,
    asked: Asked,
}

/// Properties of a process that are read on first use. While it is stopped they do not change.
#[derive(Debug, Default)]
struct Asked {
    /// Where the vDSO is mapped.
    objects: OnceCell<Vec<Range<u64>>>,
    /// The ids of the first process's user namespace.
    maps: OnceCell<Maps>,
    /// The links of its namespaces, in the order of [`NAMESPACES`].
    namespaces: [OnceCell<Option<String>>; NAMESPACES.len()],
    stat: OnceCell<Option<Stat>>,
    limits: OnceCell<Vec<Limit>>,
}

/// Namespaces of a process, as procfs names them.
pub(crate) const NAMESPACES: [&str; 8] =
    ["user", "mnt", "ipc", "uts", "net", "cgroup", "time", "time_for_children"];

/// The link of a namespace of a container's first process, which is not in the tree if it is the
/// house's init.
pub(crate) fn link_of_first(pid: u32, tree: &[Seen], name: &str) -> Option<String> {
    match tree.iter().find(|seen| seen.pid == pid) {
        Some(seen) => seen.link(name).map(str::to_owned),
        None => namespace::link(pid, pid, name),
    }
}

impl Seen {
    /// Whether the process has exited by now, or is exiting: a process that releases its resources
    /// shows other values, such as no control group.
    pub(crate) fn has_ended(&self) -> bool {
        let ends = |tid: &u32| proc::status(*tid).map_or(true, |status| status.is_exiting);
        !self.pidfd.as_ref().is_some_and(pidfd::is_alive) || self.tids.iter().all(ends)
    }

    /// Whether a stopped thread of it is inside a function of the vDSO.
    fn is_inside_object(&self, tid: u32) -> bool {
        let Ok(registers) = call::registers(tid) else { return false };
        // No function there blocks.
        let objects = || self.asked.objects.get_or_init(|| vdso::all_of_process(self.pid));
        !thread::waits_by(&registers) && objects().iter().any(|o| o.contains(&registers.rip))
    }

    /// The id maps of the container's own user namespace, even if the process is in another.
    pub(crate) fn maps(&self) -> &Maps {
        self.asked.maps.get_or_init(|| Maps::read(self.first))
    }

    /// The link of one of its [`NAMESPACES`]; `None` if it has exited.
    pub(crate) fn link(&self, name: &str) -> Option<&str> {
        let place = NAMESPACES.iter().position(|one| *one == name)?;
        let asked = &self.asked.namespaces[place];
        asked.get_or_init(|| namespace::link(self.pid, self.pid, name)).as_deref()
    }

    /// Its stat; `None` if it has exited.
    pub(crate) fn stat(&self) -> Option<&Stat> {
        self.asked.stat.get_or_init(|| task::stat(self.pid, self.pid)).as_ref()
    }

    /// Its limits.
    pub(crate) fn limits(&self) -> Outcome<&[Limit]> {
        if let Some(known) = self.asked.limits.get() {
            return Ok(known);
        }
        let read = task::limits(self.pid)?;
        Ok(self.asked.limits.get_or_init(|| read))
    }

    /// The name that `ps` shows.
    pub(crate) fn name(&self) -> String {
        self.fields.field("Name").unwrap_or_default().to_owned()
    }

    /// The innermost value of a field of status that has one value per pid namespace.
    pub(crate) fn innermost(&self, field: &str) -> Option<u32> {
        self.fields.field(field)?.split_ascii_whitespace().next_back()?.parse().ok()
    }

    /// A refusal of some state of this process.
    pub(crate) fn refuse(&self, what: impl Into<String>, why: impl Into<String>) -> Refusal {
        Refusal { pid: self.inner, process: self.name(), what: what.into(), why: why.into() }
    }
}

/// All processes, parents before children.
pub(crate) fn look(subject: &Subject) -> Outcome<Vec<Seen>> {
    let mut all = Vec::new();
    let mut next = vec![(subject.init, 0)];
    if subject.has_init {
        // The oldest child is the program. Other zombies are about to be reaped by init.
        let is_zombie = |child| proc::status(child).is_ok_and(|status| status.is_zombie());
        next = children(subject.init, subject.init).rev().map(|child| (child, INIT)).collect();
        let program = next.pop().filter(|(child, _)| !is_zombie(*child));
        next.retain(|(child, _)| !is_zombie(*child));
        let gone = || Error::of("find the program of", subject.init)(Errno::SRCH);
        next.push(program.ok_or_else(gone)?);
    }
    while let Some((pid, parent)) = next.pop() {
        // The process may exit while it is inspected.
        let Some(seen) = look_at(pid, parent, subject.init)? else { continue };
        for tid in &seen.tids {
            next.extend(children(pid, *tid).map(|child| (child, seen.inner)));
        }
        all.push(seen);
    }
    let first = all.first().filter(|first| !first.is_zombie);
    let may_be = if subject.has_init { PROGRAMS } else { 1..=1 };
    if first.is_none_or(|first| !may_be.contains(&first.inner)) {
        return Err(Error::of("find the first process", subject.init)(Errno::SRCH));
    }
    Ok(all)
}

/// The children of a thread, the oldest first.
fn children(pid: u32, tid: u32) -> impl DoubleEndedIterator<Item = u32> {
    // The thread may have exited meanwhile.
    let text = proc::whole_text(format!("/proc/{pid}/task/{tid}/children")).unwrap_or_default();
    let all: Vec<u32> = text.split_ascii_whitespace().filter_map(|c| c.parse().ok()).collect();
    all.into_iter()
}

fn look_at(pid: u32, parent: u32, first: u32) -> Outcome<Option<Seen>> {
    let Ok(fields) = proc::fields(pid) else { return Ok(None) };
    let Some(inner) = fields.pids().last().copied() else { return Ok(None) };
    let is_zombie = fields.field("State").is_some_and(|s| s.starts_with(['Z', 'X']));
    let mut tids = vec![pid];
    for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let tid: Option<u32> = entry.file_name().to_str().and_then(|name| name.parse().ok());
        tids.extend(tid.filter(|tid| *tid != pid));
    }
    let pidfd = if is_zombie { None } else { pidfd::open(pid).ok() };
    Ok(Some(Seen {
        pid,
        inner,
        parent,
        first,
        fields,
        is_zombie,
        tids,
        stopped: None,
        has_run: false,
        waited_in: HashMap::new(),
        sleeps_until_ns: HashMap::new(),
        pidfd,
        asked: Asked::default(),
    }))
}

/// A container with all tasks stopped. The drop resumes them.
///
/// The value belongs to the thread that created it: a tracer is a thread.
#[derive(Debug)]
pub struct Stopped {
    /// ORDER: dropped first: connections resume before the processes that use them.
    pub(super) connections: super::tcp::Held,
    processes: Vec<Seen>,
    /// ORDER: frozen again before any process resumes.
    pub(super) thawed: Thawed,
    held: Held,
    pub(super) before: Before,
    took: Duration,
}

/// State that was read or prepared while everything ran.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) blocks: Blocks,
    pub(super) host: Host,
    /// The tables of the container's own IPC namespace.
    pub(super) tables: Option<Tables>,
}

impl Stopped {
    pub(crate) fn processes(&self) -> &[Seen] {
        &self.processes
    }

    /// Takes the program that reads waits, for use now.
    pub(crate) fn take_blocks(&mut self) -> Blocks {
        std::mem::take(&mut self.before.blocks)
    }

    pub(crate) fn took(&self) -> Duration {
        self.took
    }

    /// Whether a task has run while others were stopped already, or has a deliverable signal.
    pub(crate) fn have_worked(&self) -> bool {
        self.held.have_worked
    }

    /// Kills all tasks, none of which runs again: `kill` sends SIGKILL to every process. Returns
    /// when the last has exited.
    pub fn kill<E>(mut self, kill: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        kill()?;
        self.connections.stay();
        // A tracer is notified of the exit of its tracees before their parents are. The first
        // process of a pid namespace exits after all others, so no order can be chosen.
        while let Ok((tid, stop)) = call::wait_stop(None) {
            if matches!(stop, Stop::Ended(_)) {
                self.held.tasks.remove(&tid);
            }
        }
        Ok(())
    }
}

/// A task that was seized.
#[derive(Debug, Default)]
struct Task {
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
pub(crate) struct Held {
    tasks: HashMap<u32, Task>,
    /// A task has run while others were stopped already, or has a deliverable signal.
    pub(crate) have_worked: bool,
    /// When the first of them was stopped.
    began: Option<Instant>,
    of_one_thread: PhantomData<*const ()>,
}

impl Held {
    /// When the first of them was stopped.
    pub(super) fn began(&self) -> Instant {
        self.began.unwrap_or_else(Instant::now)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for tid in self.tasks.keys() {
            // A task that has exited needs nothing; a job control stop continues by itself.
            let _ = call::detach(*tid, 0);
        }
    }
}

/// Stops all tasks.
pub(super) fn stop(subject: &Subject, before: Before) -> Outcome<Stopped> {
    let deadline = Instant::now() + STOP_WITHIN;
    let (processes, held) = stop_all(|| look(subject), &before.blocks, deadline)?;
    let took = held.began().elapsed();
    let connections = super::tcp::Held::default();
    let thawed = Thawed::default();
    Ok(Stopped { connections, processes, thawed, held, before, took })
}

/// Stops all tasks, as [`stop`], for a caller that resumes them at once.
pub(super) fn stop_for_a_moment(subject: &Subject, blocks: &Blocks) -> Outcome<(Vec<Seen>, Held)> {
    stop_all(|| look(subject), blocks, Instant::now() + STOP_WITHIN)
}

/// The processes with these pids, whatever their parents; paths of each are resolved from its own
/// root.
pub(crate) fn look_at_all(pids: Vec<u32>) -> Outcome<Vec<Seen>> {
    let mut all = Vec::new();
    for pid in pids {
        all.extend(look_at(pid, 0, pid)?.filter(|seen| !seen.is_zombie));
    }
    Ok(all)
}

/// Stops all processes with these pids, and those that `pids` returns later, except threads with
/// another tracer.
pub(crate) fn stop_group(
    mut pids: impl FnMut() -> Vec<u32>,
    blocks: &Blocks,
) -> Outcome<(Vec<Seen>, Held)> {
    let look = || {
        let mut all = look_at_all(pids())?;
        let traced = |tid: &u32| {
            let tracer = proc::fields(*tid).ok().and_then(|fields| fields.number("TracerPid"));
            tracer.is_some_and(|tracer| tracer != 0 && tracer != u64::from(own_tid()))
        };
        all.iter_mut().for_each(|seen| seen.tids.retain(|tid| !traced(tid)));
        Ok(all)
    };
    stop_all(look, blocks, Instant::now() + STOP_WITHIN)
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
    mut look: impl FnMut() -> Outcome<Vec<Seen>>,
    blocks: &Blocks,
    deadline: Instant,
) -> Outcome<(Vec<Seen>, Held)> {
    let mut held = Held::default();
    let mut before = None;
    loop {
        let mut processes = look()?;
        let before = before.get_or_insert_with(|| Pulse::of(&processes));
        let mut is_new = false;
        for seen in processes.iter().filter(|p| !p.is_zombie) {
            for tid in &seen.tids {
                if held.tasks.contains_key(tid) {
                    continue;
                }
                is_new = true;
                seize(*tid, &mut held, seen, blocks, deadline)?;
            }
        }
        if !is_new {
            for seen in &mut processes {
                seen.stopped = held.tasks.get(&seen.pid).and_then(|task| task.stopped);
                for tid in &seen.tids {
                    let Some(task) = held.tasks.get(tid) else { continue };
                    seen.has_run |= task.has_run;
                    seen.waited_in.extend(task.waited_in.clone().map(|place| (*tid, place)));
                    seen.sleeps_until_ns.extend(task.sleeps_until_ns.map(|end| (*tid, end)));
                }
            }
            held.have_worked = Pulse::of(&processes).has_worked(before);
            return Ok((processes, held));
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
    held: &mut Held,
    seen: &Seen,
    blocks: &Blocks,
    deadline: Instant,
) -> Outcome<()> {
    held.began.get_or_insert_with(Instant::now);
    let options = TraceOptions::SUSPEND_SECCOMP | TraceOptions::SYSGOOD;
    match call::seize(tid, options) {
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
    held.tasks.insert(tid, Task { waited_in: waits_in(tid, sleeps_in), ..Task::default() });
    let asleep = sleeps_in.and_then(|in_call| blocks.asleep(tid, &in_call));
    call::interrupt(tid).map_err(Error::of("interrupt a task", tid))?;
    let (mut let_out, mut looks) = (0, 0);
    loop {
        match call::poll_stop(tid).map_err(Error::of("wait for a task", tid))? {
            Some(Stop::Event(EVENT_STOP, signal)) => {
                let is_job_control = signal != libc::SIGTRAP;
                if !is_job_control && let_out < LET_OUT_TIMES && seen.is_inside_object(tid) {
                    let_out += 1;
                    call::resume(tid, 0).map_err(Error::of("resume a task", tid))?;
                    std::thread::sleep(Duration::from_micros(20));
                    // The thread has run.
                    sleeps_in = None;
                    let waited_in = waits_in(tid, InCall::of(tid));
                    held.tasks.insert(tid, Task { waited_in, ..Task::default() });
                    match call::interrupt(tid) {
                        Ok(()) | Err(Errno::SRCH) => continue, // the next stop reports its exit
                        Err(e) => return Err(Error::of("interrupt a task", tid)(e)),
                    }
                }
                if let Some(task) = held.tasks.get_mut(&tid) {
                    task.stopped = is_job_control.then_some(signal);
                    let registers = call::registers(tid);
                    let is_same = |it: InCall| registers.is_ok_and(|now| it.is_of(&now));
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
                held.tasks.remove(&tid);
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
