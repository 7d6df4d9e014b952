//! Threads: registers, masks and other state in the kernel; and the call that each is in.
//!
//! To stop a thread, the kernel interrupts its blocking call. Most such calls restart by
//! themselves: `rax` is -ERESTARTSYS or its like, and the kernel acts on it before the thread
//! returns to user space. Two kinds do not:
//!
//! - some calls (epoll_wait(2), sigtimedwait(2), ...) then fail with EINTR, which programs see:
//!   signal(7), "even in the absence of signal handlers". Such a call is made to restart with the
//!   remaining time ([`crate::remaining`]), which is determined before the stop;
//! - calls whose timeout is kept inside the kernel (nanosleep(2), poll(2), futex(2)) continue by
//!   restart_syscall(2), which only the same task can do. Their remaining time is saved.

use super::tree::Seen;
use super::{Subject, limit, process, schedule, signal};
use crate::error::{Error, Result};
use crate::format::{Bytes, Credentials, Filter, PeerCredentials, Restart, Rseq, Thread};
use crate::inject::script::{Answers, Arg, Made, Room, Script};
use crate::look::ids::Maps;
use crate::look::in_call::InCall;
use crate::look::task::{personality, stat_field, time_at};
use crate::remaining;
use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Registers};
use dormouse_kernel::proc;
use dormouse_kernel::wait::Waits;
use rustix::time::ClockId;
use std::cell::OnceCell;
use std::time::Duration;

pub(super) const ERESTARTSYS: i64 = 512;

pub(super) const ERESTARTNOHAND: i64 = 514;

const ERESTART_RESTARTBLOCK: i64 = 516;

/// The command bits of an operation of futex(2).
pub(super) const FUTEX_COMMAND: i32 = 127;

/// Calls that fail with EINTR when their thread was stopped, for no other reason.
const SPURIOUS: [i64; 9] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_io_getevents,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
];

/// Makes the record of a thread from ptrace and procfs; no call is injected yet.
pub(crate) fn record(subject: &Subject, seen: &Seen, tid: u32, blocks: &Blocks) -> Result<Thread> {
    let other;
    let fields = match tid == seen.pid {
        true => &seen.fields, // read once all were stopped
        false => {
            let gone = |_| Error::of("read a thread", tid)(Errno::SRCH);
            other = proc::fields(tid).map_err(gone)?;
            &other
        }
    };
    process::check_domain(seen, tid, fields)?;
    let step = |step| Error::of(step, tid);
    let mut extended = vec![0; 16 << 10];
    let used =
        call::extended_state(tid, &mut extended).map_err(step("read the extended registers"))?;
    extended.truncate(used);
    let rseq = call::rseq_configuration(tid).map_err(step("read the rseq"))?;
    let rseq = (rseq.address != 0).then_some(Rseq {
        address: rseq.address,
        length_bytes: rseq.length_bytes,
        signature: rseq.signature,
    });
    let registers = call::registers(tid).map_err(step("read the registers"))?;
    let inner = fields.pids().last().copied().unwrap_or(0);
    let stat = match tid == seen.pid {
        true => seen.stat(),
        false => None,
    };
    let nice = match stat {
        Some(stat) => stat.field(19).and_then(|n| n.parse().ok()),
        None => stat_field(seen.pid, tid, 19).and_then(|n| n.parse().ok()),
    };
    let nice = nice.unwrap_or(0);
    Ok(Thread {
        tid: inner,
        name: fields.field("Name").unwrap_or_default().to_owned(),
        extended: Bytes(extended),
        pending: signal::pending(tid, false)?,
        robust_list: call::robust_list(tid).map_err(step("read the robust list"))?,
        rseq,
        filters: filters(tid, fields, subject.filters)
            .map_err(step("read the system call filters"))?,
        credentials: credentials(seen, fields),
        nice,
        restart: goes_on(seen, tid, blocks).map_err(step("read the registers"))?,
        time_limit: limit::of(seen, tid, &registers, subject.quiet),
        schedule: schedule::of(tid).map_err(step("read the scheduling"))?,
        personality: personality(seen.pid, tid),
        ..Thread::default()
    })
}

/// Filters beyond those of the configuration, which every process has and which are the oldest.
fn filters(tid: u32, fields: &proc::Fields, house: u32) -> std::result::Result<Vec<Filter>, Errno> {
    const FILTERED: u64 = 2; // SECCOMP_MODE_FILTER; other modes have no filter
    let mut all = Vec::new();
    if fields.number("Seccomp") != Some(FILTERED) {
        return Ok(all);
    }
    let mut index = u64::from(house);
    while let Some(code) = call::filter(tid, index)? {
        let flags = call::filter_flags(tid, index)? as u32;
        all.push(Filter { flags, code: Bytes(code) });
        index += 1;
    }
    Ok(all)
}

/// Queries state that only calls in the thread itself can read.
pub(crate) fn inside(
    script: &mut Script,
) -> impl FnOnce(&mut Thread, &Answers) -> std::result::Result<(), Errno> + use<> {
    const GET_TID_ADDRESS: i32 = 40;
    let stack = signal::alternate_stack(script);
    let (tid_to, tid_address) = prctl_to(script, GET_TID_ADDRESS);
    let (death_to, death_signal) = prctl_to(script, libc::PR_GET_PDEATHSIG);
    let bits = prctl(script, libc::PR_GET_SECUREBITS);
    let slack = prctl(script, libc::PR_GET_TIMERSLACK);
    let (counter_to, counter) = prctl_to(script, libc::PR_GET_TSC);
    let policy = prctl(script, libc::PR_MCE_KILL_GET);
    let speculation = SPECULATION.map(|which| {
        let args = [libc::PR_GET_SPECULATION_CTRL, which, 0, 0, 0];
        script.call(libc::SYS_prctl, args.map(Arg::from))
    });
    let cpuid = script.call(libc::SYS_arch_prctl, [ARCH_GET_CPUID.into()]);
    move |thread, answers| {
        thread.alternate_stack = stack(answers)?;
        answers.returned(tid_address)?;
        [thread.tid_address] = answers.numbers(tid_to);
        answers.returned(death_signal)?;
        let [signal] = answers.numbers(death_to);
        thread.parent_death_signal = signal as i32;
        thread.credentials.securebits = answers.returned(bits)?;
        thread.schedule.timer_slack_ns = answers.returned(slack)?;
        // What this kernel or this CPU does not have is an error, and nothing to be kept.
        let [access] = answers.numbers(counter_to);
        let is_refused = access as i32 == libc::PR_TSC_SIGSEGV;
        thread.refuses_time_stamps = answers.returned(counter).is_ok() && is_refused;
        thread.refuses_cpuid = answers.returned(cpuid) == Ok(0);
        let policy = answers.returned(policy).unwrap_or(DEFAULT_POLICY);
        thread.memory_error_policy = (policy != DEFAULT_POLICY).then_some(policy as u32);
        for (to, made) in thread.speculation.iter_mut().zip(speculation) {
            let state = answers.returned(made).unwrap_or(0) as u32;
            *to = if state & Thread::SPECULATION_SET != 0 { state } else { 0 };
        }
        Ok(())
    }
}

/// PR_SPEC_STORE_BYPASS, PR_SPEC_INDIRECT_BRANCH, PR_SPEC_L1D_FLUSH.
const SPECULATION: [i32; 3] = [0, 1, 2];

const ARCH_GET_CPUID: i32 = 0x1011;

/// PR_MCE_KILL_DEFAULT.
const DEFAULT_POLICY: u64 = 2;

/// Queries prctl(2) for its return value.
pub(super) fn prctl(script: &mut Script, request: i32) -> Made {
    let args = [request.into(), 0.into(), 0.into(), 0.into(), 0.into()];
    script.call(libc::SYS_prctl, args)
}

/// Queries prctl(2) for the value that it writes.
pub(super) fn prctl_to(script: &mut Script, request: i32) -> (Room, Made) {
    let to = script.room(8);
    let args = [request.into(), to.into(), 0.into(), 0.into(), 0.into()];
    (to, script.call(libc::SYS_prctl, args))
}

/// Registers with which a stopped thread, whose registers these are, resumes: a call that would
/// fail with a spurious EINTR restarts with its remaining time.
pub(super) fn going_on(seen: &Seen, tid: u32, registers: Registers) -> Registers {
    let limit = limit::of(seen, tid, &registers, Duration::ZERO);
    let again = begin_again(registers);
    limit.map_or(again, |limit| remaining::begin_again(tid, again, &limit))
}

/// Makes a stopped thread resume, as by [`going_on`]; returns its registers.
pub(super) fn go_on(seen: &Seen, tid: u32) -> std::result::Result<Registers, Errno> {
    let registers = call::registers(tid)?;
    let again = going_on(seen, tid, registers);
    if again != registers {
        call::set_registers(tid, &again)?;
    }
    Ok(again)
}

/// Registers with which a call that would fail with a spurious EINTR restarts.
pub(crate) fn begin_again(registers: Registers) -> Registers {
    let was_interrupted = registers.rax as i64 == -i64::from(libc::EINTR);
    if was_interrupted && SPURIOUS.contains(&(registers.orig_rax as i64)) {
        return Registers { rax: -ERESTARTNOHAND as u64, ..registers };
    }
    registers
}

/// The BPF program that reads waits, loaded on first use: loading takes some 20 ms.
#[derive(Debug, Default)]
pub(crate) struct Blocks(OnceCell<Option<Waits>>);

impl Blocks {
    /// Loads the program while everything runs, if a thread is in a call with a timeout now. If one
    /// enters such a call later, before the stop, the program is loaded then.
    pub(crate) fn for_waiting(processes: &[Seen]) -> Self {
        let blocks = Self::default();
        let waits = |tid: &u32| InCall::of(*tid).is_some_and(|call| is_timed(*tid, &call));
        if processes.iter().flat_map(|seen| &seen.tids).any(waits) {
            blocks.load();
        }
        blocks
    }

    fn load(&self) -> Option<&Waits> {
        self.0.get_or_init(|| Waits::load().ok()).as_ref()
    }

    /// How a thread that is not stopped yet waits in this call, if the call restarts; `None` if the
    /// program is not loaded.
    pub(super) fn asleep(&self, tid: u32, call: &InCall) -> Option<Asleep> {
        let waits = self.0.get()?.as_ref()?;
        (SPURIOUS.contains(&call.number) && is_timed(tid, call)).then_some(())?;
        let wait = waits.of(tid).ok()?;
        Some(Asleep { until_ns: wait.sleeps_until_ns?, switches: wait.switches })
    }

    /// The remaining time of an interrupted call; `None` if it cannot be read.
    fn left_ns(&self, tid: u32, call: i64, clock: u64) -> Option<u64> {
        let block = self.load()?.of(tid).ok()?.restart;
        // A relative sleep by CLOCK_REALTIME uses CLOCK_MONOTONIC; CPU time clocks are left out.
        let clock = match clock as i32 {
            libc::CLOCK_REALTIME | libc::CLOCK_MONOTONIC => ClockId::Monotonic,
            libc::CLOCK_BOOTTIME => ClockId::Boottime,
            _ => return None,
        };
        let end = match call {
            libc::SYS_poll => block.poll_ns,
            libc::SYS_futex => block.futex_ns,
            _ => block.sleep_ns,
        };
        let now = rustix::time::clock_gettime(clock);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        // Expired already: the call returns at once.
        Some(end.saturating_sub(now))
    }
}

/// A thread that is blocked with a timeout, as it was before the stop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asleep {
    until_ns: u64,
    switches: u64,
}

impl Asleep {
    /// The end of the wait, by CLOCK_MONOTONIC, if it is the wait that the stop has interrupted:
    /// since then the thread has waited only for its tracer.
    pub(super) fn until_ns(self, tid: u32) -> Option<u64> {
        let now = proc::fields(tid).ok()?.number("voluntary_ctxt_switches")?;
        (now == self.switches + 1).then_some(self.until_ns)
    }
}

/// LIMIT: the timeout of a restarting call is only read if it is longer than this. A shorter one is
/// no more than the time that a checkpoint takes.
const SHORT_NS: u64 = 100_000_000;

/// Whether the call that a thread is in has an end that the kernel keeps and the thread does not.
fn is_timed(tid: u32, call: &InCall) -> bool {
    match call.number {
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep | libc::SYS_restart_syscall => true,
        libc::SYS_poll => call.arguments[2] as i32 > 0,
        libc::SYS_futex => call.arguments[3] != 0,
        number if SPURIOUS.contains(&number) => {
            let time = |address, part_ns| time_at(tid, address, part_ns);
            // None of these takes an absolute time.
            limit::given(call, time, |_| None).is_some_and(|given_ns| given_ns > SHORT_NS)
        }
        _ => false,
    }
}

/// Whether a stopped thread was blocked in the kernel, and will be again. Registers are as
/// [`begin_again`] returns them.
pub(crate) fn waits(thread: &Thread) -> bool {
    waits_by(&thread.registers)
}

/// The same by registers.
pub(super) fn waits_by(registers: &Registers) -> bool {
    let returned = registers.rax as i64;
    let is_restarted = (-ERESTART_RESTARTBLOCK..=-ERESTARTSYS).contains(&returned);
    // A socket call with a timeout (SO_RCVTIMEO) fails with EINTR.
    let is_told = returned == -i64::from(libc::EINTR);
    registers.orig_rax as i64 >= 0 && (is_restarted || is_told)
}

/// The timeout of the call that a stopped thread is in.
pub(super) fn waits_ns(
    seen: &Seen,
    tid: u32,
    blocks: &Blocks,
) -> std::result::Result<Option<u64>, Errno> {
    let left = goes_on(seen, tid, blocks)?.and_then(|restart| restart.remaining_ns);
    let limit = limit::of(seen, tid, &call::registers(tid)?, Duration::ZERO);
    Ok(left.or(limit.map(|limit| limit.left_ns)))
}

/// How the call that a stopped thread is in continues, if only the thread itself could restart it.
fn goes_on(seen: &Seen, tid: u32, blocks: &Blocks) -> std::result::Result<Option<Restart>, Errno> {
    let timespec = |address| time_at(seen.pid, address, 1);
    let waited_in = seen.waited_in.get(&tid).map_or("", String::as_str);
    let left = |call, clock| blocks.left_ns(tid, call, clock);
    Ok(restart(&call::registers(tid)?, waited_in, timespec, left))
}

/// The same by registers. `timespec` reads a timespec of the thread; `left` reads the remaining
/// time of a call, by a clock, from the kernel.
///
/// LIMIT: where the kernel does not show it ([`Waits`]) the whole time begins again, except for a
/// nanosleep with a buffer for the remaining time.
///
/// A call that was restarted once has the number of restart_syscall(2), and its original arguments:
/// `waited_in` identifies it. LIMIT: where the kernel does not show that, the call fails with
/// EINTR.
fn restart(
    registers: &Registers,
    waited_in: &str,
    timespec: impl Fn(u64) -> Option<u64>,
    left: impl Fn(i64, u64) -> Option<u64>,
) -> Option<Restart> {
    if registers.rax as i64 != -ERESTART_RESTARTBLOCK {
        return None;
    }
    let mut call = registers.orig_rax as i64;
    if call == libc::SYS_restart_syscall {
        let first_is_a_clock = registers.rdi < 4096;
        call = match waited_in {
            name if name.contains("poll") => libc::SYS_poll,
            name if name.contains("futex") => libc::SYS_futex,
            "" | "0" => return None,
            // KERNEL(6.18): a continued sleep has no wait function of its own in wchan.
            _ if first_is_a_clock => libc::SYS_clock_nanosleep,
            _ => libc::SYS_nanosleep,
        };
    }
    let Registers { rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
    let args = [rdi, rsi, rdx, r10, r8, r9];
    let is_relative = |operation: u64| operation as i32 & FUTEX_COMMAND == libc::FUTEX_WAIT;
    let remaining_ns = match call {
        libc::SYS_nanosleep => left(call, 0).or_else(|| timespec(rsi)).or_else(|| timespec(rdi)),
        libc::SYS_clock_nanosleep => {
            left(call, rdi).or_else(|| timespec(r10)).or_else(|| timespec(rdx))
        }
        // Other operations take an absolute time.
        libc::SYS_futex if is_relative(rsi) => left(call, 0).or_else(|| timespec(r10)),
        libc::SYS_futex => timespec(r10),
        // A negative timeout is none.
        libc::SYS_poll => {
            let whole = u64::try_from(rdx as i32).ok().map(|ms| ms * 1_000_000);
            whole.and_then(|whole| left(call, 0).or(Some(whole)))
        }
        _ => return None,
    };
    Some(Restart { call, args, remaining_ns })
}

fn credentials(seen: &Seen, fields: &proc::Fields) -> Credentials {
    let maps = seen.maps();
    let ids = |field: &str, map: &[(u32, u32, u32)]| {
        let mut all = [0; 4];
        let words = fields.field(field).unwrap_or_default().split_ascii_whitespace();
        for (slot, word) in all.iter_mut().zip(words) {
            *slot = word.parse().map_or(u32::MAX, |id| Maps::inside(map, id));
        }
        all
    };
    let groups = fields.field("Groups").unwrap_or_default().split_ascii_whitespace();
    let groups = groups.filter_map(|g| g.parse().ok()).map(|g| Maps::inside(&maps.gids, g));
    let capability = |name| fields.mask(name).unwrap_or(0);
    Credentials {
        uids: ids("Uid", &maps.uids),
        gids: ids("Gid", &maps.gids),
        groups: groups.collect(),
        capabilities: ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(capability),
        securebits: 0,
        no_new_privileges: fields.number("NoNewPrivs") == Some(1),
        filters: fields.number("Seccomp_filters").unwrap_or(0) as u32,
    }
}

/// The credentials that a process has for the peer of a unix socket.
pub(super) fn as_peer(seen: &Seen) -> PeerCredentials {
    const EFFECTIVE: usize = 1;
    let Credentials { uids, gids, groups, .. } = credentials(seen, &seen.fields);
    let (uid, gid) = (uids[EFFECTIVE], gids[EFFECTIVE]);
    PeerCredentials { pid: Some(seen.inner), uid, gid, groups }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_calls_restart_or_continue() {
        let of = |call: i64, returned: i64| Registers {
            orig_rax: call as u64,
            rax: returned as u64,
            ..Registers::default()
        };
        let again = begin_again(of(libc::SYS_epoll_wait, -4));
        assert_eq!(again.rax as i64, -ERESTARTNOHAND);
        let read = of(libc::SYS_read, -4);
        assert_eq!(begin_again(read), read, "EINTR of a read is genuine");
        let poll = Registers { rdx: 1500, ..of(libc::SYS_poll, -516) };
        assert_eq!(
            restart(&poll, "", |_| None, |_, _| None).unwrap().remaining_ns,
            Some(1_500_000_000)
        );
        let rest = restart(&poll, "", |_| None, |_, _| Some(7)).unwrap();
        assert_eq!(rest.remaining_ns, Some(7), "the remaining time, not the whole");
        let poll = Registers { rdx: u64::from(u32::MAX), ..poll };
        assert_eq!(restart(&poll, "", |_| None, |_, _| None).unwrap().remaining_ns, None);
        assert!(restart(&of(libc::SYS_poll, -512), "", |_| None, |_, _| None).is_none());
        let again = of(libc::SYS_restart_syscall, -516);
        assert_eq!(
            restart(&again, "do_poll.constprop.0", |_| None, |_, _| None).unwrap().call,
            libc::SYS_poll
        );
        assert!(restart(&again, "0", |_| None, |_, _| None).is_none());
    }
}
