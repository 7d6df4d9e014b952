//! The conductor: the tracer that leads a newborn and all its children from stage to stage, and
//! resumes them.
//!
//! Every process of the restore is traced from its creation, and killed if the conductor exits for
//! any reason before it detaches. A stage is complete when every live process has reached its end.

use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self, Registers, Stop, TraceOptions};
use dormouse_kernel::{Errno, proc, weakened};

use super::lazy::{self, Sources};
use super::tcp::{self, Connections};
use super::{Restore, cgroup, file, mount, net, process, system_v, tmpfs, unix};
use crate::error::{Error, Result};
use crate::format::{Action, Process, Records, Restart, Thread};
use crate::inject::program::Cell;
use crate::inject::remote::{EVENT_STOP, Remote, Scratch};
use crate::{remaining, vdso};

/// A newborn that is traced. If this is dropped before [`Traced::conduct`] is done, the newborn is
/// killed.
#[derive(Debug)]
pub struct Traced {
    pid: u32,
    of_one_thread: PhantomData<*const ()>,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Running,
    /// At the end of a stage.
    Waiting,
}

impl Traced {
    /// Seizes a newborn that waits at its sync point. Until the conductor detaches, seccomp filters
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
            let go_on = |signal| call::resume(tid, signal).map_err(Error::of("resume a task", tid));
            match stop {
                Stop::Ended(_) if tid == self.pid => return Ok(self),
                Stop::Ended(_) => return Err(Error::Ended("as the program of an init".into())),
                // ORDER: the child is resumed once the stop of its parent has identified it: from
                // then on its stops are those of a restore.
                Stop::Event(EVENT_STOP, _) if tid != self.pid => is_born = true,
                Stop::Event(EVENT_STOP, _) | Stop::Call => go_on(0)?,
                Stop::Signal(signal) => go_on(signal)?,
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
    /// contents are intact ([`crate::format::Reader::verify`]); it is called after all are read and
    /// while nothing runs. `fill` starts the filling of memory, if the restore leaves that to
    /// another process ([`super::Lazy`]); its error is a text.
    pub fn conduct(
        self,
        restore: &Restore,
        console: Option<BorrowedFd<'_>>,
        checked: impl FnOnce() -> Result<()>,
        fill: &mut dyn FnMut(Sources) -> std::result::Result<(), String>,
    ) -> Result<()> {
        let mut tasks = HashMap::from([(self.pid, At::Running)]);
        let led = lead(self.pid, &mut tasks, restore, console, fill);
        let led = led.and_then(|connections| checked().map(|()| connections));
        // ORDER: complete, but not resumed: after a failure until here the drop rules stay, and no
        // peer has received anything.
        let went = led.and_then(|connections| connections.go(self.pid, restore));
        match went.and_then(|()| finish(self.pid, &tasks, restore)) {
            Ok(()) => Ok(()),
            Err(e) => {
                // The exit of the first process kills all others of its pid namespace.
                let killed = dormouse_kernel::pidfd::open(self.pid)
                    .and_then(|pidfd| dormouse_kernel::pidfd::send_signal(&pidfd, libc::SIGKILL));
                let _ = killed; // it may have exited already; the first error is the one to report
                reap(&mut tasks);
                Err(e)
            }
        }
    }
}

/// Waits for the exit of all tasks: a tracer must, before a parent can.
fn reap(tasks: &mut HashMap<u32, At>) {
    while !tasks.is_empty() {
        match call::wait_stop(None) {
            Ok((tid, Stop::Ended(_))) => drop(tasks.remove(&tid)),
            Ok((tid, _)) => drop(call::resume(tid, 0)),
            Err(_) => return,
        }
    }
}

/// Leads all tasks from stage to stage, to `done`.
fn lead(
    pid: u32,
    tasks: &mut HashMap<u32, At>,
    restore: &Restore,
    console: Option<BorrowedFd<'_>>,
    fill: &mut dyn FnMut(Sources) -> std::result::Result<(), String>,
) -> Result<Connections> {
    let mut connections = Connections::default();
    let mut removed = system_v::Removed::default();
    loop {
        let stage = one_stage(tasks, restore)?;
        if stage == "done" {
            removed.remove()?;
            return Ok(connections);
        }
        if stage == net::STAGE {
            net::restore(pid, restore)?;
        }
        if stage == mount::STAGE {
            tmpfs::restore_apart(pid, restore)?;
        }
        if stage == "born" {
            file::check_unchanged_apart(restore, pid)?;
            file::check_mounts(restore, pid)?;
            removed = system_v::restore(pid, restore)?;
            connections = tcp::restore(pid, restore)?;
        }
        if stage == "begin" {
            // ORDER: files in a tmpfs may be mapped, and are checked afterwards.
            tmpfs::restore(pid, restore)?;
            set_clocks(pid, restore)?;
            begin(tasks, restore)?;
        }
        if stage == "born" {
            type_again(restore, console)?;
        }
        if stage == lazy::STAGE {
            // ORDER: before any process creates a thread, or does anything else with its memory.
            let filled = fill(lazy::take(restore, &by_inner(tasks)?)?);
            filled.map_err(|why| {
                Error::Elsewhere(format!("its memory cannot be filled while it runs: {why}"))
            })?;
        }
        for (tid, at) in tasks.iter_mut() {
            call::resume(*tid, 0).map_err(Error::of("resume a task", *tid))?;
            *at = At::Running;
        }
    }
}

/// Waits until every task has reached the end of a stage; returns its name.
fn one_stage(tasks: &mut HashMap<u32, At>, restore: &Restore) -> Result<String> {
    let (mut name, mut signals) = (String::new(), 0);
    // A task that exits at once may be reported before the clone event of its parent.
    let (mut announced, mut ended) = (HashSet::new(), HashSet::new());
    loop {
        if !name.is_empty() && tasks.values().all(|at| *at == At::Waiting) {
            return Ok(name);
        }
        let (tid, stop) = call::wait_stop(None).map_err(Error::call("wait for the restore"))?;
        let go_on = |signal| call::resume(tid, signal).map_err(Error::of("resume a task", tid));
        match stop {
            Stop::Signal(libc::SIGTRAP) => {
                name = stage_of(tid, restore)?;
                tasks.insert(tid, At::Waiting);
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
                go_on(signal)?;
            }
            Stop::Event(EVENT_STOP, _) => {
                tasks.insert(tid, At::Running); // born
                go_on(0)?;
            }
            Stop::Event(..) => {
                let child =
                    call::event_message(tid).map_err(Error::of("look at a child of", tid))?;
                let child = child as u32;
                announced.insert(child);
                if !ended.contains(&child) {
                    tasks.entry(child).or_insert(At::Running);
                }
                go_on(0)?;
            }
            Stop::Call => go_on(0)?,
            Stop::Ended(status) => {
                tasks.remove(&tid);
                if !announced.contains(&tid) {
                    ended.insert(tid);
                }
                // Helpers and zombies exit as planned; other tasks must not exit.
                if tasks.is_empty() || libc::WIFSIGNALED(status) && !is_zombie(restore, status) {
                    return Err(Error::Ended(format!("wait status {status:x}")));
                }
            }
        }
    }
}

/// Signals of a task that cannot continue: the kernel could not write to a recorded address, or recorded
/// memory is absent. They do not end the first process of a pid namespace while it is traced, and it
/// would receive them again and again.
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
fn type_again(restore: &Restore, console: Option<BorrowedFd<'_>>) -> Result<()> {
    let (Some(terminal), Some(master)) = (super::console(&restore.records), console) else {
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
/// deregistration the kernel would write to memory that is unmapped. From here on the newborn executes
/// the sealed interpreter, and has only its standard streams and the descriptors of the restore open.
fn begin(tasks: &HashMap<u32, At>, restore: &Restore) -> Result<()> {
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

/// Sets the registers and resumes all tasks. ORDER: all are ready before the first is resumed,
/// except processes in a job control stop. Those stop again at once, children before their parents,
/// which get the notification while they do not run.
fn finish(pid: u32, tasks: &HashMap<u32, At>, restore: &Restore) -> Result<()> {
    let by_inner = by_inner(tasks)?;
    check_confined(&by_inner, restore)?;
    let processes = &restore.records.processes;
    let alive = || processes.iter().rev().filter(|p| p.ended.is_none());
    for process in alive().filter(|p| p.stopped.is_some()) {
        let tids = become_process(&by_inner, restore, process)?;
        stop_again(tids, process)?;
    }
    let mut last = Vec::new();
    for process in alive().filter(|p| p.stopped.is_none()) {
        last.extend(become_process(&by_inner, restore, process)?);
    }
    cgroup::freeze(pid, &restore.records)?;
    let_go(&last)
}

/// Tasks by their ids inside.
fn by_inner(tasks: &HashMap<u32, At>) -> Result<HashMap<u32, u32>> {
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

/// Whether every thread has no more than its record and the configuration give it, by what the kernel
/// says of it. Nothing can change that any more, and no instruction of the container's has run.
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
        // The kernel takes the requested address as a hint; jumps lead there.
        let wanted = memory.vdso.map(|(start, bytes)| start + bytes);
        if restore.is_foreign && vdso::of_process(*pid).map(|object| object.end) != wanted {
            let why = "the kernel has mapped the vDSO at another address";
            return Err(Error::Elsewhere(why.into()));
        }
    }
    let mut tids = Vec::new();
    // ORDER: the first thread comes last, as it takes the program away, of which others make their calls.
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
        let is_stopped = || {
            let state = |f: proc::Fields| f.field("State").is_some_and(|s| s.starts_with('T'));
            tids.iter().all(|tid| proc::fields(*tid).is_ok_and(state))
        };
        send(if stops { signal } else { libc::SIGSTOP })?;
        let_go(&tids).map_err(|_| Errno::SRCH)?;
        let began = Instant::now();
        while !is_stopped() {
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
    })();
    sent.map_err(failed)
}

/// Waits for the stops of children that their parent had waited for, and takes the SIGCHLD of all stops:
/// the signal had been delivered, unless it is pending.
fn forget_stops(
    tid: u32,
    remote: &mut Remote,
    records: &Records,
    parent: &Process,
) -> std::result::Result<(), Errno> {
    let hears_soon = parent.pending.iter().any(|s| s.number() == libc::SIGCHLD);
    let stopped = records.processes.iter().filter(|p| p.parent == parent.pid);
    let stopped: Vec<&Process> = stopped.filter(|p| p.stopped.is_some()).collect();
    // Older versions wrote down no more than that a signal waits.
    let was_told = |p: &&&Process| p.stop_was_told.unwrap_or(!hears_soon);
    let children: Vec<u32> = stopped.iter().filter(was_told).map(|p| p.pid).collect();
    if stopped.is_empty() || hears_soon && children.is_empty() {
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
    if hears_soon || parent.actions.iter().any(sends_none) {
        return scratch.unmap(remote);
    }
    // A child sends SIGCHLD just after its state has changed. The signals of several children merge into
    // one while it is pending, so only the first must arrive.
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
    let gadget = restore.program.gadget();
    let mut remote = Remote::begin(tid, gadget.ok_or(Errno::NOEXEC)?)?;
    let mut registers = thread.registers;
    let is_first = thread.tid == process.pid;
    if is_first {
        forget_stops(tid, &mut remote, &restore.records, process)?;
    }
    if let Some(restart) = &thread.restart {
        let scratch = Scratch::map(tid, &mut remote)?;
        let returned = go_on_waiting(&mut remote, scratch, restart)?;
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
        // Other threads of it stand still, and go on elsewhere. This one returns to nothing until it has
        // its own registers.
        let base = restore.program.sealed_base();
        remote.call(libc::SYS_munmap, [base, restore.work_bytes])?;
    }
    remote.finish(&registers, thread.mask)
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
fn go_on_waiting(
    remote: &mut Remote,
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
