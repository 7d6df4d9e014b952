//! Helper processes: short-lived children that make an object in place of another process, for
//! example with its pid and credentials, or inside a namespace.
//!
//! A helper has a copy of everything and shares the descriptors. The process that creates it waits
//! for its exit. This module uses [`super::plan`].

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Makes a helper follow a part, with a pid that no process has.
pub(super) fn run(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, part: Sequence) {
    let pid = plan.fresh_pid();
    run_with_pid(plan, sequence, what, pid, part);
}

/// Makes a helper with that pid follow a part.
pub(super) fn run_with_pid(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    pid: u32,
    part: Sequence,
) {
    begin(plan, sequence, what, (pid, None), part, libc::CLONE_FILES as u64);
    wait(sequence, what, pid);
}

/// Makes a helper follow a part in a control group; `None` is the caller's own.
pub(super) fn run_in_cgroup(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cgroup: Option<Cell>,
    part: Sequence,
) {
    let pid = plan.fresh_pid();
    begin(plan, sequence, what, (pid, cgroup), part, libc::CLONE_FILES as u64);
    wait(sequence, what, pid);
}

/// Creates a helper with that pid and these clone flags, which follows a part.
pub(super) fn begin(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    (pid, cgroup): (u32, Option<Cell>),
    mut part: Sequence,
    flags: u64,
) {
    part.call(what, Call::new(libc::SYS_exit_group, [Arg::Number(0)]));
    let child = plan.helpers_from + plan.helpers.len();
    plan.helpers.push(part);
    let call = clone_with_pid(plan, sequence, flags, (pid, cgroup));
    sequence.fork(what, child, call);
}

/// Waits for the exit of a child.
pub(super) fn wait(sequence: &mut Sequence, what: &str, pid: u32) {
    sequence.call(what, wait_for(pid));
}

/// The same after the process has its actions of signals, which may let no zombie be (SA_NOCLDWAIT, sigaction(2)).
pub(super) fn wait_for_end(sequence: &mut Sequence, what: &str, pid: u32) {
    sequence.call(what, wait_for(pid).lenient());
}

/// wait4(2) for a child, without its status.
fn wait_for(pid: u32) -> Call {
    Call::new(libc::SYS_wait4, [pid.into(), Arg::Number(0), Arg::Number(0), Arg::Number(0)])
}

/// clone3(2) of a child with that pid, in that control group.
pub(super) fn clone_with_pid(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    mut flags: u64,
    (pid, cgroup): (u32, Option<Cell>),
) -> Call {
    const INTO_CGROUP: u64 = 1 << 33;
    const CGROUP_AT: u64 = 80;
    if cgroup.is_some() {
        flags |= INTO_CGROUP;
    }
    let ids = plan.builder.data(&pid.to_ne_bytes());
    // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls,
    // set_tid, set_tid_size, cgroup.
    let args = [flags, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0, ids, 1, 0];
    let at = match cgroup {
        Some(_) => plan.builder.writable_numbers(&args),
        None => plan.builder.numbers(&args),
    };
    if let Some(cgroup) = cgroup {
        // The descriptor number is only known at run time: a call writes it there.
        let args = [cgroup.into(), Arg::from(libc::F_DUPFD_CLOEXEC), plan.above.into()];
        let what = format!("the control group of process {pid}");
        sequence.call_to(what, at + CGROUP_AT, Call::new(libc::SYS_fcntl, args));
    }
    Call::new(libc::SYS_clone3, [at.into(), Arg::Number(88)])
}

/// Sets a cell and wakes all tasks that wait for it.
pub(super) fn set(sequence: &mut Sequence, what: &str, cell: Cell) {
    // Any number but 0 will do.
    sequence.call_into(what, cell, Call::new(libc::SYS_getpid, []));
    let all = Arg::from(i32::MAX);
    let args = [Arg::At(cell), Arg::from(libc::FUTEX_WAKE), all];
    sequence.call(what, Call::new(libc::SYS_futex, args));
}

/// Waits until a cell is set.
pub(super) fn wait_until_set(sequence: &mut Sequence, what: &str, cell: Cell) {
    let no_limit = Arg::Number(0);
    let args = [Arg::At(cell), Arg::from(libc::FUTEX_WAIT), Arg::Number(0), no_limit];
    // The call fails if the cell is set already.
    sequence.call(what, Call::new(libc::SYS_futex, args).lenient());
}
