//! The numberer: a helper process that sets the ids of threads in user namespaces inside.
//!
//! A process that has entered such a namespace has no capability over its pid namespace, and
//! clone3(2) cannot set the ids of its threads. So a child of the first process, the *numberer*,
//! sets the next id before each creation (`/proc/sys/kernel/ns_last_pid`), and no other task is
//! created meanwhile. The numberer starts before any process has its memory, and exits after the
//! last thread was created.

use dormouse_record::{Records, Result, Thread};

use super::plan::{LateThread, Plan};
use super::{helper, stage};
use crate::inject::program::{Arg, Call, Sequence};

/// Whether a process creates threads without being able to set their pids.
pub(super) fn has_late_threads(records: &Records) -> bool {
    late_threads(records).next().is_some()
}

fn late_threads(records: &Records) -> impl Iterator<Item = &Thread> {
    let inside = records.processes.iter().filter(|process| process.user.is_some());
    inside.flat_map(|process| process.threads.iter().skip(1))
}

/// Makes the first process create the numberer, if there is work for it. ORDER: before the first
/// process has its memory, which the numberer does not need.
pub(super) fn begin(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let Some(last_pid) = plan.last_pid else { return Ok(()) };
    let tids: Vec<u32> = late_threads(plan.records).map(|thread| thread.tid).collect();
    let what = "the numbers of threads";
    let mut part = Sequence::default();
    if plan.userfaults.device.is_some() {
        part.stage(stage::MAPPED);
    }
    if plan.is_shared {
        part.stage(stage::SHARED);
    }
    part.stage(stage::WHOLE);
    for tid in tids {
        let late = LateThread { tid, is_next: plan.cell(), is_given: plan.cell() };
        let text = (tid - 1).to_string();
        let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
        // The kernel ignores a write that is not at offset 0.
        let args = [last_pid.into(), at.into(), bytes.into(), Arg::Number(0)];
        part.call(what, Call::new(libc::SYS_pwrite64, args).returns(bytes));
        helper::set(&mut part, what, late.is_next);
        helper::wait_until_set(&mut part, what, late.is_given);
        plan.late.push(late);
    }
    let pid = plan.fresh_pid();
    helper::begin(plan, sequence, what, (pid, None), part, 0);
    plan.numberer = Some(pid);
    Ok(())
}

/// Makes the first process wait for the exit of the numberer, and every task wait for all threads.
pub(super) fn end(plan: &mut Plan<'_>, sequence: &mut Sequence, is_first: bool) {
    let Some(pid) = plan.numberer else { return };
    if is_first {
        // Where the process ignores the ends of its children, wait4(2) returns ECHILD after the end.
        helper::wait_for_end(sequence, "the numbers of threads", pid);
    }
    sequence.stage(stage::INSIDE);
}
