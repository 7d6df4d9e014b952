//! Threads: created by their process, with state of their own in the kernel.
//!
//! This module brings the kinds of state of a thread into their order.

use dormouse_record::{Result, Thread};

use super::plan::Plan;
use super::{credentials, filter, lock, memory, schedule, signal};
use crate::inject::program::{Arg, Call, Sequence};

/// Creates another thread, which has these resources together with its creator (clone(2)), and runs sequence number
/// `own`.
pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    thread: &Thread,
    shares: u64,
    own: usize,
) {
    let ids = plan.builder.data(&thread.tid.to_ne_bytes());
    let call = clone(plan, [ids, 1], shares);
    sequence.fork(format!("thread {}", thread.tid), own, call);
}

/// Creates another thread, which gets the next pid in order, and runs sequence number `own`.
pub(super) fn make_next(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread, own: usize) {
    let shares = (libc::CLONE_FILES | libc::CLONE_FS) as u64;
    let call = clone(plan, [0, 0], shares).returns(thread.tid.into());
    sequence.fork(format!("thread {}", thread.tid), own, call);
}

/// clone3(2) of a thread with these ids in its pid namespaces: their address, and their count. Of the descriptors, or
/// the directory and umask, that it does not share with its creator, the thread gets a copy at that moment.
fn clone(plan: &mut Plan<'_>, [ids, count]: [u64; 2], shares: u64) -> Call {
    let flags = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
    let args = [flags as u64 | shares, 0, 0, 0, 0, 0, 0, 0, ids, count, 0];
    let at = plan.builder.numbers(&args);
    Call::new(libc::SYS_clone3, [at.into(), Arg::Number(88)])
}

/// Sets a name, as `ps` shows it.
pub(super) fn name(plan: &mut Plan<'_>, sequence: &mut Sequence, name: &str) {
    let text = plan.builder.text(name.as_bytes());
    let args = [Arg::from(libc::PR_SET_NAME), text.into()];
    sequence.call(format!("the name '{name}'"), Call::new(libc::SYS_prctl, args));
}

/// Sets the state of a thread in the kernel.
pub(super) fn restore(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) -> Result<()> {
    let tid = thread.tid;
    name(plan, sequence, &thread.name);
    // struct stack_t. Without one in the record the stack of the restoring program is disabled: its
    // memory is unmapped, and a fork inherits it.
    let stack = match &thread.alternate_stack {
        Some(stack) => [stack.address, u64::from(stack.flags), stack.length_bytes],
        None => [0, libc::SS_DISABLE as u64, 0],
    };
    let at = plan.builder.numbers(&stack);
    let call = Call::new(libc::SYS_sigaltstack, [at.into(), Arg::Number(0)]);
    sequence.call(format!("the alternate stack of thread {tid}"), call);
    let call = Call::new(libc::SYS_set_tid_address, [thread.tid_address.into()]);
    sequence.call(format!("the tid address of thread {tid}"), call);
    let (head, length) = thread.robust_list;
    if head != 0 {
        let call = Call::new(libc::SYS_set_robust_list, [head.into(), length.into()]);
        sequence.call(format!("the robust list of thread {tid}"), call);
    }
    schedule::restore(plan, sequence, thread);
    Ok(())
}

/// State set by prctl(2) and arch_prctl(2), each a number. The newborn has inherited none of it.
fn controls(sequence: &mut Sequence, thread: &Thread) {
    const ARCH_SET_CPUID: i32 = 0x1012;
    let tid = thread.tid;
    let mut set = |what: &str, call: Call| sequence.call(format!("{what} of thread {tid}"), call);
    if thread.refuses_time_stamps {
        let args = [libc::PR_SET_TSC, libc::PR_TSC_SIGSEGV].map(Arg::from);
        set("the refusal of time stamps", Call::new(libc::SYS_prctl, args));
    }
    if thread.refuses_cpuid {
        let args = [ARCH_SET_CPUID, 0].map(Arg::from);
        set("the refusal of cpuid", Call::new(libc::SYS_arch_prctl, args));
    }
    if let Some(policy) = thread.memory_error_policy {
        let args = [libc::PR_MCE_KILL, libc::PR_MCE_KILL_SET, policy as i32, 0, 0].map(Arg::from);
        set("the policy of memory errors", Call::new(libc::SYS_prctl, args));
    }
    for (which, state) in (0..).zip(thread.speculation) {
        // Only the strongest setting.
        let state = state & Thread::SPECULATION_SET;
        let Some(highest) = state.checked_ilog2() else { continue };
        let args = [libc::PR_SET_SPECULATION_CTRL, which, 1 << highest, 0, 0].map(Arg::from);
        // A CPU that is not affected refuses the call, and needs no setting.
        set("the speculation", Call::new(libc::SYS_prctl, args).lenient());
    }
}

/// Sets the login user. LIMIT: a task of a container that the operator has started in a session with
/// a login has that one, which only CAP_AUDIT_CONTROL of the host changes.
fn login(plan: &mut Plan<'_>, sequence: &mut Sequence, tid: u32, uid: u32) {
    let what = format!("the login of thread {tid}");
    let text = uid.to_string();
    // No descriptor, where it cannot be opened.
    let cell = plan.builder.cell_of(u32::MAX);
    let place = plan.builder.text(b"/proc/thread-self/loginuid");
    let flags = Arg::from(libc::O_WRONLY | libc::O_CLOEXEC | libc::O_NOFOLLOW);
    let open = [Arg::from(libc::AT_FDCWD), place.into(), flags, Arg::Number(0)];
    sequence.call_into(&*what, cell, Call::new(libc::SYS_openat, open).lenient());
    let at = plan.builder.data(text.as_bytes());
    let write = [cell.into(), at.into(), Arg::Number(text.len() as u64)];
    sequence.call(&*what, Call::new(libc::SYS_write, write).lenient());
    sequence.call(&*what, Call::new(libc::SYS_close, [cell.into()]).lenient());
}

/// Steps that need everything else in place: signals, and the credentials of the thread.
pub(super) fn last(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) -> Result<()> {
    let tid = thread.tid;
    let leader = plan.records.processes.iter().find(|p| p.threads.iter().any(|t| t.tid == tid));
    let (pid, dumpable) = leader.map_or((tid, 0), |p| (p.pid, p.dumpable));
    signal::pending(plan, sequence, pid, Some(tid), &thread.pending);
    if thread.personality != 0 {
        let call = Call::new(libc::SYS_personality, [thread.personality.into()]);
        sequence.call(format!("the personality of thread {tid}"), call);
    }
    controls(sequence, thread);
    memory::policy_of_thread(plan, sequence, thread);
    filter::of_thread(plan, sequence, thread);
    match leader.is_some_and(|process| process.user.is_some()) {
        true => credentials::take_on_inside(plan, sequence, thread),
        false => credentials::take_on(plan, sequence, thread),
    }
    if thread.parent_death_signal != 0 {
        let args = [Arg::from(libc::PR_SET_PDEATHSIG), Arg::from(thread.parent_death_signal)];
        let what = format!("the parent death signal of thread {tid}");
        sequence.call(what, Call::new(libc::SYS_prctl, args));
    }
    // ORDER: after the change of ids, which clears it for the whole process: so each thread sets it after its own.
    // Values other than 0 and 1 cannot be set.
    let set_dumpable = |sequence: &mut Sequence, is_it: bool| {
        let args = [Arg::from(libc::PR_SET_DUMPABLE), Arg::Number(u64::from(is_it))];
        sequence.call("dumpable", Call::new(libc::SYS_prctl, args));
    };
    if let Some(uid) = thread.login_uid {
        // ORDER: procfs lets a task open its own file by its ids, once it may be inspected.
        set_dumpable(sequence, true);
        login(plan, sequence, tid, uid);
    }
    set_dumpable(sequence, dumpable == 1);
    if let Some(process) = leader.filter(|_| pid == tid) {
        lock::leases(plan, sequence, process);
        lock::notices(plan, sequence, process);
    }
    // ORDER: behind all else. The kernel writes to this address whenever it likes from here on.
    if let Some(rseq) = &thread.rseq {
        let args = [
            Arg::Number(rseq.address),
            rseq.length_bytes.into(),
            Arg::Number(0),
            rseq.signature.into(),
        ];
        sequence.call(format!("the rseq of thread {tid}"), Call::new(libc::SYS_rseq, args));
    }
    Ok(())
}
