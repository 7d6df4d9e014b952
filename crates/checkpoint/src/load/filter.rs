//! System call filters that processes have loaded themselves, on top of the configuration's.
//!
//! Filters are suspended until the conductor detaches. If all threads have the same filters, these
//! are loaded before other threads are created, which then share them, as SECCOMP_FILTER_FLAG_TSYNC
//! requires.

use dormouse_record::{Filter, Process, Thread};

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

/// Bytes of an instruction.
const INSTRUCTION_BYTES: usize = 8;

/// Whether all threads of a process have the same filters.
fn is_common(process: &Process) -> bool {
    process.threads.windows(2).all(|pair| pair[0].filters == pair[1].filters)
}

/// Loads the filters that other threads will share.
pub(super) fn of_process(plan: &mut Plan<'_>, sequence: &mut Sequence, process: &Process) {
    if let Some(first) = process.threads.first().filter(|_| is_common(process)) {
        load(plan, sequence, first.tid, &first.filters);
    }
}

/// Loads the filters of a single thread. ORDER: before it may lose the permission to load them.
pub(super) fn of_thread(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) {
    let process =
        plan.records.processes.iter().find(|p| p.threads.iter().any(|t| t.tid == thread.tid));
    if process.is_some_and(|process| !is_common(process)) {
        load(plan, sequence, thread.tid, &thread.filters);
    }
}

fn load(plan: &mut Plan<'_>, sequence: &mut Sequence, tid: u32, filters: &[Filter]) {
    for (n, filter) in filters.iter().enumerate() {
        let code = plan.builder.data(&filter.code.0);
        // struct sock_fprog: the number of instructions, and their address.
        let count = (filter.code.0.len() / INSTRUCTION_BYTES) as u64;
        let program = plan.builder.numbers(&[count, code]);
        const SET_MODE_FILTER: u64 = 1;
        let args = [Arg::Number(SET_MODE_FILTER), filter.flags.into(), program.into()];
        let what = format!("filter {n} of thread {tid}");
        sequence.call(what, Call::new(libc::SYS_seccomp, args));
    }
}
