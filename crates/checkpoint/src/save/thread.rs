//! Threads: registers, masks and other state in the kernel.
//!
//! Procfs and ptrace(2) show most of it; the rest is read by calls in the thread itself.

use dormouse_kernel::Errno;
use dormouse_kernel::{call, proc};
use dormouse_record::{Bytes, Dispatch, Error, Filter, Result, Rseq, Thread};

use super::credentials::credentials;
use super::seen::Seen;
use super::subject::Subject;
use super::wait::{Blocks, continuation};
use super::{landlock, limit, login, policy, schedule, signal};
use crate::inject::script::{Answers, Arg, Made, Room, Script};
use crate::inject::selector::own_dispatch;
use crate::look::task::{personality, stat_field};

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
    landlock::check_thread(seen, tid, fields)?;
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
        restart: continuation(seen, tid, blocks).map_err(step("read the registers"))?,
        time_limit: limit::of(seen, tid, &registers, subject.quiet),
        schedule: schedule::of(tid).map_err(step("read the scheduling"))?,
        personality: personality(seen.pid, tid),
        login_uid: login::uid(seen, tid),
        dispatch: dispatch(seen, tid)?,
        ..Thread::default()
    })
}

/// The dispatch of its system calls. A thread whose selector cannot be read is refused.
fn dispatch(seen: &Seen, tid: u32) -> Result<Option<Dispatch>> {
    let own = own_dispatch(tid).map_err(Error::of("read the dispatch of system calls", tid))?;
    let Some(call::Dispatch { mode, selector, start, length_bytes }) = own else { return Ok(None) };
    if selector != 0 && call::read_memory(tid, &mut [0], &[(selector, 1)]) != Ok(1) {
        let why = "the selector of its dispatch of system calls (PR_SET_SYSCALL_USER_DISPATCH) is not mapped: its next \
                   call would end it";
        return Err(Error::Refused(vec![seen.refuse(format!("thread {tid}"), why)]));
    }
    let from_inside = mode == call::Dispatch::FROM_INSIDE;
    Ok(Some(Dispatch { from_inside, start, length_bytes, selector }))
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
    let memory_policy = policy::of_thread(script);
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
        thread.memory_policy = memory_policy(answers);
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
