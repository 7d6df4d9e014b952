//! Finding all processes of a container, and stopping them.
//!
//! The tree is walked from the first process along `/proc/PID/task/TID/children`, which also tells
//! of processes that have ended and wait to be reaped. What the cgroup holds beyond that was put
//! there from outside ([`super::object::Survey::outsiders`]).

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self, Stop, TraceOptions};
use dormouse_kernel::proc::{self, Fields};
use dormouse_kernel::{Errno, namespace, pidfd};
use rustix::fd::OwnedFd;

use super::Subject;
use super::cgroup::Thawed;
use super::host::Host;
use super::in_call::InCall;
use super::system_v::Tables;
use super::thread::{self, Blocks, Maps, Stat};
use crate::error::{Error, Refusal, Result as Outcome};
use crate::format::{INIT, Limit, PROGRAMS};
use crate::inject::remote::EVENT_STOP;
use crate::vdso;

/// How long a task may take to stand still. One that waits for a disk cannot before that is done.
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// How often a thread in the middle of the kernel's shared object is let go on, to come out of it.
const LET_OUT_TIMES: u32 = 64;

/// A process that was found.
#[derive(Debug)]
pub struct Seen {
    /// The host's id.
    pub(crate) pid: u32,
    /// The container's id.
    pub(crate) inner: u32,
    /// The container's id of its parent, 0 for the first.
    pub(crate) parent: u32,
    /// The first process, by the host's id: paths inside are found from its root.
    pub(crate) first: u32,
    /// `/proc/PID/status`.
    pub(crate) fields: Fields,
    /// It has ended and waits to be reaped.
    pub(crate) is_zombie: bool,
    /// Its threads by the host's ids, the first being itself.
    pub(crate) tids: Vec<u32>,
    /// The signal of job control that it is stopped by.
    pub(crate) stopped: Option<i32>,
    /// One of its threads ran, or went on, when it was stopped.
    pub(crate) has_run: bool,
    /// Where in the kernel its threads waited before they were stopped, whose call says it no more.
    pub(crate) waited_in: HashMap<u32, String>,
    /// When the sleep ends, by CLOCK_MONOTONIC, that its threads were in.
    pub(crate) sleeps_until_ns: HashMap<u32, u64>,
    /// Itself; none where it has ended.
    pub(crate) pidfd: Option<OwnedFd>,
    asked: Asked,
}

/// What of a process is told once somebody asks. While it stands still all of it stays as it is.
#[derive(Debug, Default)]
struct Asked {
    /// Where it has the kernel's shared object.
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

/// The link of a namespace of a container's first process, which is not of the tree where it is the house's
/// init.
pub(crate) fn link_of_first(pid: u32, tree: &[Seen], name: &str) -> Option<String> {
    match tree.iter().find(|seen| seen.pid == pid) {
        Some(seen) => seen.link(name).map(str::to_owned),
        None => namespace::link(pid, pid, name),
    }
}

impl Seen {
    /// Whether it has ended by now, or does so: what lets go of all it has is told of as if it had
    /// other things, such as no control group.
    pub(crate) fn has_ended(&self) -> bool {
        let ends = |tid: &u32| proc::status(*tid).map_or(true, |status| status.is_exiting);
        !self.pidfd.as_ref().is_some_and(pidfd::is_alive) || self.tids.iter().all(ends)
    }

    /// Whether a stopped thread of it is in the middle of a function of the kernel's shared object.
    fn is_inside_object(&self, tid: u32) -> bool {
        let Ok(registers) = call::registers(tid) else { return false };
        // Nothing there waits.
        let objects = || self.asked.objects.get_or_init(|| vdso::all_of_process(self.pid));
        !thread::waits_by(&registers) && objects().iter().any(|o| o.contains(&registers.rip))
    }

    /// The ids of the container's own user namespace, whichever it is in itself.
    pub(crate) fn maps(&self) -> &Maps {
        self.asked.maps.get_or_init(|| Maps::read(self.first))
    }

    /// The link of one of its [`NAMESPACES`]; none where it has ended.
    pub(crate) fn link(&self, name: &str) -> Option<&str> {
        let place = NAMESPACES.iter().position(|one| *one == name)?;
        let asked = &self.asked.namespaces[place];
        asked.get_or_init(|| namespace::link(self.pid, self.pid, name)).as_deref()
    }

    /// Its stat; none where it has ended.
    pub(crate) fn stat(&self) -> Option<&Stat> {
        self.asked.stat.get_or_init(|| thread::stat(self.pid, self.pid)).as_ref()
    }

    /// Its limits.
    pub(crate) fn limits(&self) -> Outcome<&[Limit]> {
        if let Some(known) = self.asked.limits.get() {
            return Ok(known);
        }
        let read = super::process::limits(self.pid)?;
        Ok(self.asked.limits.get_or_init(|| read))
    }

    /// What `ps` shows.
    pub(crate) fn name(&self) -> String {
        self.fields.field("Name").unwrap_or_default().to_owned()
    }

    /// A field of status that has one value per pid namespace: the innermost.
    pub(crate) fn innermost(&self, field: &str) -> Option<u32> {
        self.fields.field(field)?.split_ascii_whitespace().next_back()?.parse().ok()
    }

    /// That something of it cannot be saved.
    pub(crate) fn refuse(&self, what: impl Into<String>, why: impl Into<String>) -> Refusal {
        Refusal { pid: self.inner, process: self.name(), what: what.into(), why: why.into() }
    }
}

/// All processes, parents before children.
pub(crate) fn look(subject: &Subject) -> Outcome<Vec<Seen>> {
    let mut all = Vec::new();
    let mut next = vec![(subject.init, 0)];
    if subject.has_init {
        // The oldest is its program. Others that have ended it is about to reap.
        let is_zombie = |child| proc::status(child).is_ok_and(|status| status.is_zombie());
        next = children(subject.init, subject.init).rev().map(|child| (child, INIT)).collect();
        let program = next.pop().filter(|(child, _)| !is_zombie(*child));
        next.retain(|(child, _)| !is_zombie(*child));
        let gone = || Error::of("look at the program of", subject.init)(Errno::SRCH);
        next.push(program.ok_or_else(gone)?);
    }
    while let Some((pid, parent)) = next.pop() {
        // It may end while it is looked at.
        let Some(seen) = look_at(pid, parent, subject.init)? else { continue };
        for tid in &seen.tids {
            next.extend(children(pid, *tid).map(|child| (child, seen.inner)));
        }
        all.push(seen);
    }
    let first = all.first().filter(|first| !first.is_zombie);
    let may_be = if subject.has_init { PROGRAMS } else { 1..=1 };
    if first.is_none_or(|first| !may_be.contains(&first.inner)) {
        return Err(Error::of("look at the first process", subject.init)(Errno::SRCH));
    }
    Ok(all)
}

/// The children of a thread, the oldest first.
fn children(pid: u32, tid: u32) -> impl DoubleEndedIterator<Item = u32> {
    // It may have ended meanwhile.
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

/// A container all of whose tasks stand still. They go on when it is dropped.
///
/// It belongs to the thread that made it: a tracer is a thread.
#[derive(Debug)]
pub struct Stopped {
    /// ORDER: dropped first: connections go on before those who use them.
    pub(super) connections: super::tcp::Held,
    processes: Vec<Seen>,
    /// ORDER: frozen again before anybody goes on.
    pub(super) thawed: Thawed,
    held: Held,
    pub(super) before: Before,
    took: Duration,
}

/// What was looked at, or made ready, while everything ran.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) blocks: Blocks,
    pub(super) host: Host,
    /// Of its own ipc namespace.
    pub(super) tables: Option<Tables>,
}

impl Stopped {
    pub(crate) fn processes(&self) -> &[Seen] {
        &self.processes
    }

    /// What tells of waits, for whoever reads now.
    pub(crate) fn take_blocks(&mut self) -> Blocks {
        std::mem::take(&mut self.before.blocks)
    }

    pub(crate) fn took(&self) -> Duration {
        self.took
    }

    /// Whether some have run while others stood still already, or have a signal to take.
    pub(crate) fn have_worked(&self) -> bool {
        self.held.have_worked
    }

    /// Kills all tasks, none of which runs again: `kill` sends SIGKILL to every process. Returns
    /// when the last has ended.
    pub fn kill<E>(mut self, kill: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        kill()?;
        self.connections.stay();
        // A tracer hears of the end of its tracees before their parents do. The first process of a
        // pid namespace waits for all others, so no order can be chosen.
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
    /// The signal of job control it is stopped by.
    stopped: Option<i32>,
    /// It ran, or went on, when it was stopped.
    has_run: bool,
    /// Where in the kernel it waited, if its call says it no more.
    waited_in: Option<String>,
    /// When the sleep ends, by CLOCK_MONOTONIC, that it was taken out of.
    sleeps_until_ns: Option<u64>,
}

/// Tasks that were seized. They go on when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Held {
    tasks: HashMap<u32, Task>,
    /// Some have run while others stood still already, or have a signal to take.
    pub(crate) have_worked: bool,
    /// When the first of them was.
    began: Option<Instant>,
    of_one_thread: PhantomData<*const ()>,
}

impl Held {
    /// When the first of them was.
    pub(super) fn began(&self) -> Instant {
        self.began.unwrap_or_else(Instant::now)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for tid in self.tasks.keys() {
            // One that is gone needs nothing; a stop by job control goes on by itself.
            let _ = call::detach(*tid, 0);
        }
    }
}

/// Stops everything.
pub(super) fn stop(subject: &Subject, before: Before) -> Outcome<Stopped> {
    let deadline = Instant::now() + STOP_WITHIN;
    let (processes, held) = stop_all(|| look(subject), &before.blocks, deadline)?;
    let took = held.began().elapsed();
    let connections = super::tcp::Held::default();
    let thawed = Thawed::default();
    Ok(Stopped { connections, processes, thawed, held, before, took })
}

/// Stops everything, as [`stop`], for whoever lets it go again at once.
pub(super) fn stop_for_a_moment(subject: &Subject, blocks: &Blocks) -> Outcome<(Vec<Seen>, Held)> {
    stop_all(|| look(subject), blocks, Instant::now() + STOP_WITHIN)
}

/// The processes of these ids, whosever children they are; each stands for itself, with its own root.
pub(crate) fn look_at_all(pids: Vec<u32>) -> Outcome<Vec<Seen>> {
    let mut all = Vec::new();
    for pid in pids {
        all.extend(look_at(pid, 0, pid)?.filter(|seen| !seen.is_zombie));
    }
    Ok(all)
}

/// Stops all processes of these ids, and what `pids` finds later, but for threads that somebody else
/// traces: they are that one's.
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

/// The calling thread: a tracer is one.
fn own_tid() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// How often threads have waited so far, by the host's ids (`voluntary_ctxt_switches` of proc_pid_status(5)),
/// and who has a signal to take.
///
/// Tasks stop one after the other. Who has stopped waits, by its registers, for one that still runs, does what
/// it is waited for, and waits itself, or ends, before it is stopped too. Then all wait, and yet there is
/// work. Being stopped is one wait more: whoever has two has run in between.
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
                // One that ends has no pulse, which is told from one that waits.
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

    /// Whether somebody has worked since it was `before`, until now that all are stopped.
    fn has_worked(&self, before: &Self) -> bool {
        let is_new = |tid: &u32| !before.waited.contains_key(tid);
        let has_ended_or_run =
            |(tid, waited): (&u32, &u64)| self.waited.get(tid).is_none_or(|now| *now > *waited + 1);
        self.has_signal
            || self.waited.keys().any(is_new)
            || before.waited.iter().any(has_ended_or_run)
    }
}

/// Stops what `look` finds, until it finds nothing new: what stands still makes nothing.
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

/// Where in the kernel a thread waits in a call that was restarted, and has another number since.
fn waits_in(tid: u32, call: Option<InCall>) -> Option<String> {
    let is_restarted = call.is_some_and(|call| call.number == libc::SYS_restart_syscall);
    is_restarted.then(|| proc::whole_text(format!("/proc/{tid}/wchan")).unwrap_or_default())
}

/// How often it is looked at once whether a task has stopped.
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
        // The kernel says so too of one that has ended, whether or not it was reaped since.
        Err(Errno::PERM) if proc::status(tid).map_or(true, |status| status.is_zombie()) => {
            return Ok(());
        }
        Err(Errno::PERM) => {
            let why = "somebody traces it (a debugger?): end that first";
            return Err(Error::Refused(vec![seen.refuse("", why)]));
        }
        Err(e) => return Err(Error::of("seize a task", tid)(e)),
    }
    // ORDER: before it is taken out of its call.
    // Who waits for a disk does so in the middle of its work.
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
                    // It has run.
                    sleeps_in = None;
                    let waited_in = waits_in(tid, InCall::of(tid));
                    held.tasks.insert(tid, Task { waited_in, ..Task::default() });
                    match call::interrupt(tid) {
                        Ok(()) | Err(Errno::SRCH) => continue, // the next stop tells that it ended
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
            // It is delivered, and the stop comes after it.
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
            // It stops within some microseconds, and a sleep takes a hundred.
            None if looks < LOOKS_AT_ONCE => {
                looks += 1;
                std::thread::yield_now();
            }
            None => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}
