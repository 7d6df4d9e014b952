//! The conductor: the tracer that leads a newborn and all its children from stage to stage. Between
//! two stages the conductor does the engine's half of the kinds; at the end it resumes all tasks
//! ([`super::resume`]).
//!
//! Every process of the restore is traced from its creation, and killed if the conductor exits for
//! any reason before it detaches. A stage is complete when every live process has reached its end.

use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Registers, Stop, TraceOptions};
use dormouse_record::{Error, Result};

use super::connection::{self, Connections};
use super::restore::{self, Restore};
use super::userfault::{self, Sources};
use super::{aio, file, ipc, net, pidfd, pipe, resume, stage, system_v, tmpfs, unix};
use crate::inject::program::Cell;
use crate::inject::remote::EVENT_STOP;

/// A newborn that is traced. If this is dropped before [`Traced::conduct`] is done, the newborn is
/// killed.
#[derive(Debug)]
pub struct Traced {
    pid: u32,
    of_one_thread: PhantomData<*const ()>,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    /// At the end of a stage.
    Waiting,
}

/// The tasks of a restore, by the host's ids.
///
/// A child has three reports: the clone event of its parent, its own first stop, and later its exit. The event may
/// come last, also of a child that has exited.
///
/// ORDER: the reports of a child are forgotten once it has exited and was announced. The kernel may give its id to
/// another child at any time from then on.
#[derive(Debug)]
struct Tasks {
    alive: HashMap<u32, State>,
    /// Those of them that an event has named.
    announced: HashSet<u32>,
    /// Children that have exited, and that no event has named yet.
    ended: HashSet<u32>,
}

impl Tasks {
    /// The newborn, which no event names.
    fn of(newborn: u32) -> Self {
        Self {
            alive: HashMap::from([(newborn, State::Running)]),
            announced: HashSet::from([newborn]),
            ended: HashSet::new(),
        }
    }

    /// The event of its parent has named a child.
    fn announce(&mut self, child: u32) {
        if !self.ended.remove(&child) {
            self.announced.insert(child);
            self.alive.entry(child).or_insert(State::Running);
        }
    }

    /// A child is at its first stop.
    fn born(&mut self, child: u32) {
        self.alive.insert(child, State::Running);
    }

    /// A task has reached the end of a stage.
    fn wait(&mut self, tid: u32) {
        self.alive.insert(tid, State::Waiting);
    }

    /// A task has exited.
    fn end(&mut self, tid: u32) {
        self.alive.remove(&tid);
        if !self.announced.remove(&tid) {
            self.ended.insert(tid);
        }
    }

    fn all_wait(&self) -> bool {
        self.alive.values().all(|state| *state == State::Waiting)
    }
}

impl Traced {
    /// Seizes a newborn that has reported its sync point. Until the conductor detaches, seccomp filters
    /// are suspended: the restore makes calls that a container must not.
    pub fn seize(pid: u32) -> Result<Self> {
        let options = TraceOptions::EXIT_KILL
            | TraceOptions::SUSPEND_SECCOMP
            | TraceOptions::SYSGOOD
            | TraceOptions::FORK
            | TraceOptions::VFORK
            | TraceOptions::CLONE;
        call::seize(pid, options).map_err(Error::of("seize the newborn", pid))?;
        Ok(Self { pid, of_one_thread: PhantomData })
    }

    /// Waits until the newborn, which was resumed, has become an init. From then on its child is
    /// the newborn, and the init, which belongs to the house, is not traced. A newborn that failed
    /// before reports the cause.
    pub fn leave_init(self) -> Result<Self> {
        let (mut child, mut is_born) = (None, false);
        loop {
            let (tid, stop) = call::wait_stop(None).map_err(Error::call("wait for an init"))?;
            let proceed =
                |signal| call::resume(tid, signal).map_err(Error::of("resume a task", tid));
            match stop {
                Stop::Ended(_) if tid == self.pid => return Ok(self),
                Stop::Ended(_) => return Err(Error::Ended("as the program of an init".into())),
                // ORDER: the child is resumed once the stop of its parent has identified it: from
                // then on its stops are those of a restore.
                Stop::Event(EVENT_STOP, _) if tid != self.pid => is_born = true,
                Stop::Event(EVENT_STOP, _) | Stop::Call => proceed(0)?,
                Stop::Signal(signal) => proceed(signal)?,
                Stop::Event(..) => {
                    let made = call::event_message(tid);
                    child = Some(made.map_err(Error::of("look at a child of", tid))? as u32);
                    call::detach(tid, 0).map_err(Error::of("let go of a task", tid))?;
                }
            }
            if let Some(pid) = child.filter(|_| is_born) {
                call::resume(pid, 0).map_err(Error::of("resume a task", pid))?;
                return Ok(Self { pid, ..self });
            }
        }
    }

    /// Leads the newborn, which was resumed, and all its children through the restore.
    ///
    /// `console` is the master of its terminal, if it has one. `checked` returns whether the
    /// contents are intact ([`dormouse_parcel::Reader::verify`]); it is called after all are read and
    /// while nothing runs. `fill` starts the filling of memory, if the restore leaves that to
    /// another process ([`super::Lazy`]); its error is a text.
    pub fn conduct(
        self,
        restore: &Restore,
        console: Option<BorrowedFd<'_>>,
        checked: impl FnOnce() -> Result<()>,
        fill: &mut dyn FnMut(Sources) -> std::result::Result<(), String>,
    ) -> Result<()> {
        let mut tasks = Tasks::of(self.pid);
        let led = lead(self.pid, &mut tasks, restore, console, fill);
        let led = led.and_then(|connections| checked().map(|()| connections));
        // ORDER: complete, but not resumed: after a failure until here the drop rules stay, and no
        // peer has received anything.
        let resumed = led
            .and_then(|connections| connections.resume(self.pid, restore))
            .and_then(|()| resume::by_inner(&tasks.alive))
            .and_then(|by_inner| resume::all(self.pid, &by_inner, restore));
        match resumed {
            Ok(()) => Ok(()),
            Err(e) => {
                self.end(&mut tasks);
                Err(e)
            }
        }
    }

    /// Leads the newborn and all its children through the restore, and resumes none at the end. The restore
    /// has no console, no connections, and no memory that is filled later.
    pub(crate) fn complete(self, restore: &Restore) -> Result<Complete> {
        let mut tasks = Tasks::of(self.pid);
        let mut fill = |_| Err("a twin has no memory that is filled later".to_owned());
        let complete = lead(self.pid, &mut tasks, restore, None, &mut fill)
            .and_then(|_| resume::by_inner(&tasks.alive))
            .and_then(|by_inner| Ok((resume::prepare(&by_inner, restore)?, by_inner)));
        match complete {
            Ok((ready, by_inner)) => {
                let threads = restore.records.processes.iter().flat_map(|process| &process.threads);
                let calls: HashMap<u32, i64> = threads
                    .filter_map(|thread| {
                        Some((*by_inner.get(&thread.tid)?, thread.restart.as_ref()?.call))
                    })
                    .collect();
                let tasks = ready.into_iter().map(|tid| (tid, calls.get(&tid).copied())).collect();
                Ok(Complete { tasks, of_one_thread: PhantomData })
            }
            Err(e) => {
                self.end(&mut tasks);
                Err(e)
            }
        }
    }

    /// Ends a failed restore.
    fn end(&self, tasks: &mut Tasks) {
        // The exit of the first process kills all others of its pid namespace.
        let killed = dormouse_kernel::pidfd::open(self.pid)
            .and_then(|pidfd| dormouse_kernel::pidfd::send_signal(&pidfd, libc::SIGKILL));
        let _ = killed; // it may have exited already; the first error is the one to report
        reap(tasks);
    }
}

/// A complete restore of which no task is resumed: each is traced by the calling thread and has its registers,
/// or is in a job control stop.
#[derive(Debug)]
pub(crate) struct Complete {
    /// The tasks that are traced, by the host's ids, each with the call of its record that continues by
    /// restart_syscall(2).
    pub(crate) tasks: Vec<(u32, Option<i64>)>,
    of_one_thread: PhantomData<*const ()>,
}

/// Waits for the exit of all tasks: a tracer must, before a parent can.
fn reap(tasks: &mut Tasks) {
    while !tasks.alive.is_empty() {
        match call::wait_stop(None) {
            Ok((tid, Stop::Ended(_))) => tasks.end(tid),
            Ok((tid, _)) => drop(call::resume(tid, 0)),
            Err(_) => return,
        }
    }
}

/// Leads all tasks from stage to stage, to `done`.
fn lead(
    pid: u32,
    tasks: &mut Tasks,
    restore: &Restore,
    console: Option<BorrowedFd<'_>>,
    fill: &mut dyn FnMut(Sources) -> std::result::Result<(), String>,
) -> Result<Connections> {
    let mut connections = Connections::default();
    let mut removed = system_v::Removed::default();
    loop {
        let reached = wait_for_stage(tasks, restore)?;
        if reached == stage::DONE {
            removed.remove()?;
            // ORDER: all memory is attached: a limit may remove the segments that are not.
            ipc::set_limits(pid, restore, ipc::Limits::All)?;
            pidfd::check_opened(restore, || resume::by_inner(&tasks.alive))?;
            file::renew_owners(restore, pid);
            return Ok(connections);
        }
        if reached == stage::STACKS {
            net::restore(pid, restore)?;
        }
        if reached == stage::MEMORY {
            tmpfs::restore_apart(pid, restore)?;
        }
        if reached == stage::BORN {
            file::check_unchanged_apart(restore, pid)?;
            file::check_opened(restore, pid)?;
            pipe::enlarge(pid, restore)?;
            removed = system_v::restore(pid, restore)?;
            connections = connection::restore(pid, restore)?;
        }
        if reached == stage::BEGIN {
            // ORDER: files in a tmpfs may be mapped, and are checked afterwards.
            tmpfs::restore(pid, restore)?;
            set_clocks(pid, restore)?;
            ipc::set_limits(pid, restore, ipc::Limits::Raised)?;
            begin(&tasks.alive, restore)?;
        }
        if reached == stage::BORN {
            write_console_input(restore, console)?;
        }
        if reached == stage::MAPPED {
            // ORDER: before any process creates a thread, or does anything else with its memory.
            let filled = fill(userfault::take(restore, &resume::by_inner(&tasks.alive)?)?);
            filled.map_err(|cause| {
                Error::Elsewhere(format!("its memory cannot be filled while it runs: {cause}"))
            })?;
        }
        for (tid, state) in &mut tasks.alive {
            call::resume(*tid, 0).map_err(Error::of("resume a task", *tid))?;
            *state = State::Running;
        }
    }
}

/// Waits until every task has reached the end of a stage; returns its name.
fn wait_for_stage(tasks: &mut Tasks, restore: &Restore) -> Result<String> {
    let (mut name, mut signals) = (String::new(), 0);
    loop {
        if !name.is_empty() && tasks.all_wait() {
            return Ok(name);
        }
        let (tid, stop) = call::wait_stop(None).map_err(Error::call("wait for the restore"))?;
        let proceed = |signal| call::resume(tid, signal).map_err(Error::of("resume a task", tid));
        match stop {
            Stop::Signal(libc::SIGTRAP) => {
                name = stage_of(tid, restore)?;
                tasks.wait(tid);
            }
            Stop::Signal(signal) if FAULTS.contains(&signal) && !ends_itself(tid, restore)? => {
                return Err(fault(tid, signal, restore)?);
            }
            Stop::Signal(_) if signals == SIGNALS_MAX => {
                return Err(Error::Ended("by signals without end".into()));
            }
            // The signal by which a zombie exits.
            Stop::Signal(signal) => {
                signals += 1;
                proceed(signal)?;
            }
            Stop::Event(EVENT_STOP, _) => {
                tasks.born(tid);
                proceed(0)?;
            }
            Stop::Event(..) => {
                let child =
                    call::event_message(tid).map_err(Error::of("look at a child of", tid))?;
                tasks.announce(child as u32);
                proceed(0)?;
            }
            Stop::Call => proceed(0)?,
            Stop::Ended(status) => {
                tasks.end(tid);
                // Helpers and zombies exit as planned; other tasks must not exit.
                if tasks.alive.is_empty()
                    || libc::WIFSIGNALED(status) && !is_zombie(restore, status)
                {
                    return Err(Error::Ended(format!("wait status {status:x}")));
                }
            }
        }
    }
}

/// Signals of a task that cannot continue: the kernel could not write to a recorded address, or
/// recorded memory is absent. These signals do not end the first process of a pid namespace while
/// it is traced, and it would receive them again and again.
const FAULTS: [i32; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGSYS];

/// LIMIT: signals of one stage. Each zombie has one; a timer may send SIGSTOP without end.
const SIGNALS_MAX: u32 = 1 << 18;

/// Whether a task has sent itself the signal of its stop, as a zombie does.
fn ends_itself(tid: u32, restore: &Restore) -> Result<bool> {
    let registers = call::registers(tid).map_err(Error::of("read the registers", tid))?;
    Ok(restore.program.about(registers.rbx).is_some_and(|about| about.call == libc::SYS_kill))
}

/// The error for a task that cannot continue.
fn fault(tid: u32, signal: i32, restore: &Restore) -> Result<Error> {
    let registers = call::registers(tid).map_err(Error::of("read the registers", tid))?;
    let what =
        restore.program.about(registers.rbx).map_or("the program", |about| about.what.as_str());
    Ok(Error::Ended(format!("by signal {signal}, at or before {what}")))
}

fn is_zombie(restore: &Restore, status: i32) -> bool {
    let signal = status & 0x7f;
    restore.records.processes.iter().any(|p| p.ended.is_some_and(|e| e & 0x7f == signal))
}

/// The name of the stage whose end a task has reached, or the call that failed.
fn stage_of(tid: u32, restore: &Restore) -> Result<String> {
    let registers = call::registers(tid).map_err(Error::of("read the registers", tid))?;
    let about = restore.program.about(registers.rbx);
    let about = about.ok_or_else(|| Error::Ended(format!("at {:x}", registers.rip)))?;
    if about.is_stage {
        return Ok(about.what.clone());
    }
    let returned = registers.rax as i64;
    // The call failed, or returned less than it must.
    let errno = if (-4095..0).contains(&returned) { -returned as i32 } else { libc::EIO };
    if (about.call, errno) == (libc::SYS_io_setup, libc::EAGAIN) {
        return Err(aio::exhausted(&about.what));
    }
    Err(Error::Restore {
        what: about.what.clone(),
        call: call_name(about.call),
        source: Errno::from_raw_os_error(errno),
    })
}

/// The name of a system call of the restore, for the message.
fn call_name(number: i64) -> String {
    let known = [
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_mprotect, "mprotect"),
        (libc::SYS_mremap, "mremap"),
        (libc::SYS_preadv, "preadv"),
        (libc::SYS_io_setup, "io_setup"),
        (libc::SYS_io_submit, "io_submit"),
        (libc::SYS_io_getevents, "io_getevents"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_openat2, "openat2"),
        (libc::SYS_clone3, "clone3"),
        (libc::SYS_prctl, "prctl"),
        (libc::SYS_arch_prctl, "arch_prctl"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_dup3, "dup3"),
        (libc::SYS_bind, "bind"),
        (libc::SYS_listen, "listen"),
        (libc::SYS_chdir, "chdir"),
        (libc::SYS_chroot, "chroot"),
        (libc::SYS_shutdown, "shutdown"),
        (libc::SYS_socketpair, "socketpair"),
        (libc::SYS_sendto, "sendto"),
        (libc::SYS_accept4, "accept4"),
        (libc::SYS_connect, "connect"),
        (libc::SYS_unlinkat, "unlinkat"),
        (libc::SYS_fchownat, "fchownat"),
        (libc::SYS_fchmodat, "fchmodat"),
        (libc::SYS_socket, "socket"),
        (libc::SYS_setsockopt, "setsockopt"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
        (libc::SYS_setpgid, "setpgid"),
        (libc::SYS_setsid, "setsid"),
        (libc::SYS_capset, "capset"),
        (libc::SYS_rt_sigaction, "rt_sigaction"),
        (libc::SYS_rt_tgsigqueueinfo, "rt_tgsigqueueinfo"),
        (libc::SYS_rseq, "rseq"),
        (libc::SYS_write, "write"),
        (libc::SYS_unshare, "unshare"),
        (libc::SYS_setns, "setns"),
        (libc::SYS_open_tree, "open_tree"),
        (libc::SYS_move_mount, "move_mount"),
        (libc::SYS_mount_setattr, "mount_setattr"),
        (libc::SYS_fsconfig, "fsconfig"),
        (libc::SYS_fsmount, "fsmount"),
        (libc::SYS_pivot_root, "pivot_root"),
    ];
    let found = known.iter().find(|(n, _)| *n == number);
    found.map_or_else(|| format!("system call {number}"), |(_, name)| (*name).to_owned())
}

/// Writes the unread input of the console again. Its slave does not echo at this stage.
fn write_console_input(restore: &Restore, console: Option<BorrowedFd<'_>>) -> Result<()> {
    let Some((terminal, master)) = restore::console(&restore.records).zip(console) else {
        return Ok(());
    };
    let mut rest = &terminal.typed.0[..];
    while !rest.is_empty() {
        match rustix::io::write(master, rest) {
            Ok(n) => rest = &rest[n..],
            // More input than fits cannot have been there.
            Err(Errno::AGAIN) => break,
            Err(e) => return Err(Error::call("type at the console")(e)),
        }
    }
    Ok(())
}

/// Sets the offsets of the time namespace that the newborn has created and will enter.
fn set_clocks(pid: u32, restore: &Restore) -> Result<()> {
    let Some(offsets) = restore.clocks else { return Ok(()) };
    let path = format!("/proc/{pid}/timens_offsets");
    std::fs::write(&path, offsets.text()).map_err(Error::file("cannot set the clocks by", path))
}

/// The first stage: the root is in place, and nothing is created yet.
///
/// The newborn is a copy of the keeper, whose C library has registered an rseq. Without a
/// deregistration the kernel would write to memory that is unmapped. From here on the newborn
/// executes the sealed interpreter, and has only its standard streams and the descriptors of the
/// restore open.
fn begin(tasks: &HashMap<u32, State>, restore: &Restore) -> Result<()> {
    for tid in tasks.keys() {
        file::check_unchanged(&restore.records, *tid)?;
        unix::check_places(&restore.records, *tid)?;
        find_gaps(restore).map_err(Error::of("find the descriptors", *tid))?;
        let rseq = call::rseq_configuration(*tid).map_err(Error::of("read the rseq", *tid))?;
        let registers = call::registers(*tid).map_err(Error::of("read the registers", *tid))?;
        let next = registers.rbx + crate::inject::program::OPERATION_BYTES;
        if rseq.address != 0 {
            const UNREGISTER: u64 = 1;
            let args =
                [rseq.address, u64::from(rseq.length_bytes), UNREGISTER, u64::from(rseq.signature)];
            restore
                .program
                .patch(next, libc::SYS_rseq, &args)
                .map_err(Error::call("write to the restore program"))?;
        }
        let rip = restore.program.sealed_base();
        call::set_registers(*tid, &Registers { rip, rbx: next, ..registers })
            .map_err(Error::of("enter the restore program", *tid))?;
    }
    Ok(())
}

/// Writes the ranges of descriptor numbers, from 3 on, between the passed descriptors.
fn find_gaps(restore: &Restore) -> std::result::Result<(), Errno> {
    let number = |cell: &Cell| restore.program.value(*cell).map(i32::cast_unsigned);
    let given: std::result::Result<Vec<u32>, Errno> = restore.given.iter().map(number).collect();
    let mut given = given?;
    given.sort_unstable();
    let mut first = 3;
    let mut gaps = restore.gaps.iter();
    let mut gap = |first: u32, last: u32| -> std::result::Result<(), Errno> {
        let Some([from, to]) = gaps.next() else { return Err(Errno::NOBUFS) };
        restore.program.set(*from, first)?;
        restore.program.set(*to, last)
    };
    for number in given {
        // An empty gap is no range: close_range(2) refuses it.
        gap(first, number.saturating_sub(1))?;
        first = first.max(number.saturating_add(1));
    }
    gap(first, u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEWBORN: u32 = 7;
    const CHILD: u32 = 8;

    #[derive(Debug, Clone, Copy)]
    enum Report {
        Event,
        Stop,
        Exit,
    }
    use Report::{Event, Exit, Stop as First};

    const ORDERS: [[Report; 3]; 3] =
        [[Event, First, Exit], [First, Event, Exit], [First, Exit, Event]];

    fn report(tasks: &mut Tasks, report: Report) {
        match report {
            Event => tasks.announce(CHILD),
            First => tasks.born(CHILD),
            Exit => tasks.end(CHILD),
        }
    }

    /// After three children with one id, whatever the order of their reports, the newborn alone is awaited, and the
    /// first report of a fourth is enough for that to be awaited.
    #[test]
    fn child_is_awaited_that_has_the_id_of_another_one() {
        for number in 0..27 {
            let mut tasks = Tasks::of(NEWBORN);
            let orders = [number / 9, number / 3 % 3, number % 3].map(|order| ORDERS[order]);
            for (n, order) in orders.into_iter().enumerate() {
                for one in order {
                    report(&mut tasks, one);
                }
                let left: Vec<&u32> = tasks.alive.keys().collect();
                assert_eq!(left, [&NEWBORN], "after child {n} of {orders:?}");
            }
            tasks.wait(NEWBORN);
            assert!(tasks.all_wait(), "{orders:?}");
            for [first, second] in [[Event, First], [First, Event]] {
                report(&mut tasks, first);
                assert!(!tasks.all_wait(), "{first:?} after {orders:?}");
                report(&mut tasks, second);
                assert!(!tasks.all_wait(), "{second:?} after {orders:?}");
                report(&mut tasks, Exit);
                assert!(tasks.all_wait(), "the exit after {orders:?}");
            }
        }
    }
}
