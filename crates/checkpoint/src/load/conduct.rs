//! The conductor: traces a newborn and all it makes, from stage to stage, and lets go.
//!
//! Every process that a program makes is traced from birth, and killed when the conductor ends in
//! whatever way before it lets go. A stage is over when everybody who lives has come to its end.

use std::collections::HashMap;
use std::marker::PhantomData;

use dormouse_kernel::call::{self, Stop, TraceOptions};
use dormouse_kernel::{Errno, proc};

use super::tcp::{self, Connections};
use super::{Restore, file, process, system_v, tmpfs, unix};
use crate::error::{Error, Result};
use crate::format::{Memory, Process, Restart, Thread};
use crate::inject::remote::{EVENT_STOP, Remote, Scratch};

/// A newborn that is traced. It dies when this is dropped before [`Traced::conduct`] is done.
#[derive(Debug)]
pub struct Traced {
    pid: u32,
    of_one_thread: PhantomData<*const ()>,
}

/// Where a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Running,
    /// At the end of a stage.
    Waiting,
}

impl Traced {
    /// Seizes a newborn that waits at its sync point. From here on no filter is asked about what it
    /// does, until it is let go: the restore makes calls that a container must not.
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

    /// Leads the newborn, which was let go, and all it makes through the restore.
    pub fn conduct(self, restore: &Restore) -> Result<()> {
        let mut tasks = HashMap::from([(self.pid, At::Running)]);
        let led = lead(self.pid, &mut tasks, restore);
        // ORDER: whole, but not let go: a failure until here leaves connections quiet, and no peer
        // has heard of it.
        let went = led.and_then(|connections| connections.go(self.pid, restore));
        match went.and_then(|()| finish(&tasks, restore)) {
            Ok(()) => Ok(()),
            Err(e) => {
                // The first process takes all others of its pid namespace along.
                let killed = dormouse_kernel::pidfd::open(self.pid)
                    .and_then(|pidfd| dormouse_kernel::pidfd::send_signal(&pidfd, libc::SIGKILL));
                let _ = killed; // it may be gone already; the first error is the one to tell
                reap(&mut tasks);
                Err(e)
            }
        }
    }
}

/// Waits for the end of all tasks: a tracer must, before a parent can.
fn reap(tasks: &mut HashMap<u32, At>) {
    while !tasks.is_empty() {
        match call::wait_stop(None) {
            Ok((tid, Stop::Ended(_))) => drop(tasks.remove(&tid)),
            Ok((tid, _)) => drop(call::resume(tid, 0)),
            Err(_) => return,
        }
    }
}

/// From stage to stage, to `done`.
fn lead(pid: u32, tasks: &mut HashMap<u32, At>, restore: &Restore) -> Result<Connections> {
    let mut connections = Connections::default();
    loop {
        let stage = one_stage(tasks, restore)?;
        if stage == "done" {
            system_v::remove(pid, restore)?;
            return Ok(connections);
        }
        if stage == "born" {
            system_v::restore(pid, restore)?;
            connections = tcp::restore(pid, restore)?;
        }
        if stage == "begin" {
            // ORDER: what is in memory may be mapped, and is then looked at.
            tmpfs::restore(pid, restore)?;
            begin(tasks, restore)?;
        }
        for (tid, at) in tasks.iter_mut() {
            call::resume(*tid, 0).map_err(Error::of("resume a task", *tid))?;
            *at = At::Running;
        }
    }
}

/// Until everybody has come to the end of a stage; gives its name.
fn one_stage(tasks: &mut HashMap<u32, At>, restore: &Restore) -> Result<String> {
    let mut name = String::new();
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
            // The end of a zombie, by its own signal.
            Stop::Signal(signal) => go_on(signal)?,
            Stop::Event(EVENT_STOP, _) => {
                tasks.insert(tid, At::Running); // born
                go_on(0)?;
            }
            Stop::Event(..) => {
                let child =
                    call::event_message(tid).map_err(Error::of("look at a child of", tid))?;
                tasks.entry(child as u32).or_insert(At::Running);
                go_on(0)?;
            }
            Stop::Call => go_on(0)?,
            Stop::Ended(status) => {
                tasks.remove(&tid);
                // Helpers and zombies end as they should, others should not.
                if tasks.is_empty() || libc::WIFSIGNALED(status) && !is_zombie(restore, status) {
                    return Err(Error::Ended(format!("wait status {status:x}")));
                }
            }
        }
    }
}

fn is_zombie(restore: &Restore, status: i32) -> bool {
    let signal = status & 0x7f;
    restore.records.processes.iter().any(|p| p.ended.is_some_and(|e| e & 0x7f == signal))
}

/// The name of the stage whose end a task has come to, or what it failed at.
fn stage_of(tid: u32, restore: &Restore) -> Result<String> {
    let registers = call::registers(tid).map_err(Error::of("read the registers", tid))?;
    let about = restore.program.about(registers.rbx);
    let about = about.ok_or_else(|| Error::Ended(format!("at {:x}", registers.rip)))?;
    if about.is_stage {
        return Ok(about.what.clone());
    }
    let returned = registers.rax as i64;
    // It failed, or returned less than it must.
    let errno = if (-4095..0).contains(&returned) { -returned as i32 } else { libc::EIO };
    Err(Error::Restore {
        what: about.what.clone(),
        call: call_name(about.call),
        source: Errno::from_raw_os_error(errno),
    })
}

/// The name of a system call of ours, for the message.
fn call_name(number: i64) -> String {
    let known = [
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_mprotect, "mprotect"),
        (libc::SYS_mremap, "mremap"),
        (libc::SYS_preadv, "preadv"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_clone3, "clone3"),
        (libc::SYS_prctl, "prctl"),
        (libc::SYS_arch_prctl, "arch_prctl"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_dup3, "dup3"),
        (libc::SYS_bind, "bind"),
        (libc::SYS_listen, "listen"),
        (libc::SYS_chdir, "chdir"),
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
    ];
    let found = known.iter().find(|(n, _)| *n == number);
    found.map_or_else(|| format!("system call {number}"), |(_, name)| (*name).to_owned())
}

/// The first stage: its root is there, and nothing is made yet.
///
/// The newborn is a copy of the keeper, whose C library has registered an rseq: without it the
/// kernel would write to memory that is gone.
fn begin(tasks: &HashMap<u32, At>, restore: &Restore) -> Result<()> {
    for tid in tasks.keys() {
        file::check_unchanged(&restore.records, *tid)?;
        unix::check_places(&restore.records, *tid)?;
        let rseq = call::rseq_configuration(*tid).map_err(Error::of("read the rseq", *tid))?;
        if rseq.address == 0 {
            continue;
        }
        let at = call::registers(*tid).map_err(Error::of("read the registers", *tid))?.rbx;
        let next = at + crate::inject::program::OPERATION_BYTES;
        const UNREGISTER: u64 = 1;
        let args =
            [rseq.address, u64::from(rseq.length_bytes), UNREGISTER, u64::from(rseq.signature)];
        restore
            .program
            .patch(next, libc::SYS_rseq, &args)
            .map_err(Error::call("write to the restore program"))?;
    }
    Ok(())
}

/// Registers, and off they go. ORDER: all are ready before the first is let go.
fn finish(tasks: &HashMap<u32, At>, restore: &Restore) -> Result<()> {
    let mut by_inner = HashMap::new();
    for tid in tasks.keys() {
        let fields =
            proc::fields(*tid).map_err(|_| Error::of("look at a task", *tid)(Errno::SRCH))?;
        by_inner.insert(fields.pids().last().copied().unwrap_or(0), *tid);
    }
    let records = &restore.records;
    let mut last = Vec::new();
    for process in records.processes.iter().filter(|p| p.ended.is_none()) {
        if let Some(pid) = by_inner.get(&process.pid) {
            process::oom_score(*pid, process.oom_score_adj)?;
        }
        let memory = process.memory.map(|m| &records.memories[m]);
        let Some(memory) = memory else { continue };
        for thread in &process.threads {
            let tid = by_inner.get(&thread.tid).copied();
            let tid = tid.ok_or_else(|| Error::Ended(format!("thread {} is gone", thread.tid)))?;
            let step = become_thread(tid, restore, process, memory, thread);
            step.map_err(Error::of("give registers to a task", tid))?;
            last.push((tid, process.stopped.filter(|_| thread.tid == process.pid)));
        }
    }
    for (tid, stopped) in last {
        match call::detach(tid, stopped.unwrap_or(0)) {
            // Those that were let go run already, and may have ended all of their process.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(e) => return Err(Error::of("let go of a task", tid)(e)),
        }
    }
    Ok(())
}

fn become_thread(
    tid: u32,
    restore: &Restore,
    process: &Process,
    memory: &Memory,
    thread: &Thread,
) -> std::result::Result<(), Errno> {
    let code = memory.areas.iter().filter(|a| a.access & 4 != 0).map(|a| (a.start, a.bytes()));
    let gadget =
        memory.vdso.into_iter().chain(code).find_map(|(s, b)| crate::save::find(tid, s, b));
    let mut remote = Remote::begin(tid, gadget.ok_or(Errno::NOEXEC)?)?;
    let mut registers = thread.registers;
    if thread.tid == process.pid {
        // Other threads of it stand still, and go on elsewhere.
        let base = restore.program.base();
        remote.call(libc::SYS_munmap, [base, restore.work_bytes])?;
    }
    if let Some(restart) = &thread.restart {
        let scratch = Scratch::map(tid, &mut remote)?;
        let returned = go_on_waiting(&mut remote, scratch, restart)?;
        scratch.unmap(&mut remote)?;
        const ERESTART_RESTARTBLOCK: i64 = -516;
        if returned != ERESTART_RESTARTBLOCK {
            // It is over already.
            registers.rax = returned as u64;
            registers.orig_rax = u64::MAX;
        }
    }
    call::set_extended_state(tid, &thread.extended.0)?;
    remote.finish(&registers, thread.mask)
}

/// Has the kernel remember in the new task how a wait goes on: the call is made again with what is
/// left of its time, and interrupted at once.
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
        // No other call is recorded: a record that names one is not followed.
        _ => return Err(Errno::NOSYS),
    }
    remote.interrupted(restart.call, args)
}
