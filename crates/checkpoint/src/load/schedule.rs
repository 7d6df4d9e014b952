//! How threads are scheduled: each sets it by itself, so that the kernel checks its permissions.

use dormouse_record::Thread;

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

/// `IOPRIO_WHO_PROCESS`, with 0 the calling thread.
const OF_A_THREAD: u64 = 1;

/// Gives a task an I/O context, which it does not have before it does I/O or has an I/O priority. ORDER: before it
/// creates one that shares the context, and before it has its priority.
pub(super) fn begin_io(sequence: &mut Sequence, id: u32) {
    let args = [Arg::Number(OF_A_THREAD), Arg::Number(0), Arg::Number(0)];
    sequence
        .call(format!("the I/O context of process {id}"), Call::new(libc::SYS_ioprio_set, args));
}

pub(super) fn restore(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) {
    let (tid, schedule) = (thread.tid, &thread.schedule);
    // A priority that this host does not allow stays lower: a container started here has this one.
    let nice = [Arg::Number(0), Arg::Number(0), Arg::from(thread.nice)];
    let nice = Call::new(libc::SYS_setpriority, nice).lenient();
    sequence.call(format!("the priority of thread {tid}"), nice);
    let what = format!("the scheduling of thread {tid}");
    let policy = schedule.policy | u32::from(schedule.reset_on_fork) << 30;
    if schedule.slice_ns != 0 {
        // struct sched_attr; the slice is kept by what follows. KERNEL(6.12): before, there is no
        // slice.
        let words = [56, schedule.policy, u32::from(schedule.reset_on_fork), 0];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        bytes.extend(thread.nice.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend(schedule.slice_ns.to_ne_bytes());
        bytes.resize(56, 0);
        let at = plan.builder.data(&bytes);
        let args = [Arg::Number(0), at.into(), Arg::Number(0)];
        sequence.call(what.clone(), Call::new(libc::SYS_sched_setattr, args).lenient());
    }
    if policy != 0 {
        let at = plan.builder.data(&schedule.priority.to_ne_bytes());
        let args = [Arg::Number(0), policy.into(), at.into()];
        sequence.call(what.clone(), Call::new(libc::SYS_sched_setscheduler, args));
    }
    if let Some(last) = schedule.cpus.iter().max() {
        let mut mask = vec![0u64; *last as usize / 64 + 1];
        schedule.cpus.iter().for_each(|cpu| mask[*cpu as usize / 64] |= 1 << (cpu % 64));
        let at = plan.builder.numbers(&mask);
        let args = [Arg::Number(0), (mask.len() as u64 * 8).into(), at.into()];
        let what = format!("the CPUs of thread {tid}");
        sequence.call(what, Call::new(libc::SYS_sched_setaffinity, args));
    }
    if schedule.io_priority != 0 {
        let args = [Arg::Number(OF_A_THREAD), Arg::Number(0), schedule.io_priority.into()];
        let what = format!("the I/O priority of thread {tid}");
        sequence.call(what, Call::new(libc::SYS_ioprio_set, args));
    }
    if schedule.timer_slack_ns != 0 {
        let args = [Arg::from(libc::PR_SET_TIMERSLACK), schedule.timer_slack_ns.into()];
        let what = format!("the timer slack of thread {tid}");
        sequence.call(what, Call::new(libc::SYS_prctl, args));
    }
}
