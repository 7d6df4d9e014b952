//! Whether addresses that a record gives to the kernel lie in the memory of its process.
//!
//! The kernel writes to them while other processes are still being restored, or reads from them. At that
//! time there is other memory as well: the restore's own program, and memory that waits to be shared. So each
//! lies whole in what the record says its process has. Addresses that only the process itself uses, by
//! its own instructions, are its own affair: an alternate stack, a handler of a signal.

use super::{Found, USER_END, ensure};
use crate::{Area, Layout, Process, Restart, Thread};

/// Bytes and alignment of `struct rseq`: what the kernel takes at least and at most.
const RSEQ_BYTES: std::ops::RangeInclusive<u32> = 32..=4096;
const RSEQ_ALIGNED: u64 = 32;
/// Bytes of `struct robust_list_head`.
const ROBUST_BYTES: u64 = 24;
/// Bytes of `struct timespec`, and of `struct timeval`.
const TIME_BYTES: u64 = 16;
/// Bytes of `struct pollfd`.
const POLLFD_BYTES: u64 = 8;
/// The command of a futex(2) operation; the rest are flags.
const FUTEX_COMMAND: u64 = 0x7f;

/// Whether a range of addresses is in areas, which are sorted; they may follow one another.
fn is_in(areas: &[Area], address: u64, bytes: u64) -> bool {
    let Some(end) = address.checked_add(bytes) else { return false };
    let first = areas.partition_point(|area| area.end <= address);
    let mut at = address;
    for area in &areas[first..] {
        if at >= end || area.start > at {
            break;
        }
        at = area.end;
    }
    address != 0 && at >= end
}

/// Refuses a wait that no thread is in: a call that would do something else.
pub(super) fn is_wait(restart: &Restart) -> Found {
    let command = restart.args[1] & FUTEX_COMMAND;
    let is_wait = match restart.call {
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep => restart.remaining_ns.is_some(),
        libc::SYS_futex => {
            let waits = [libc::FUTEX_WAIT as u64, libc::FUTEX_WAIT_BITSET as u64];
            restart.remaining_ns.is_some() && waits.contains(&command)
        }
        libc::SYS_poll => true,
        _ => false,
    };
    ensure(is_wait, || format!("it waits in system call {}, which is not saved", restart.call))
}

/// The addresses of a process by what its memory is; of which thread one is that is elsewhere, and what.
pub fn of_process(process: &Process, areas: &[Area]) -> std::result::Result<(), (u32, String)> {
    process
        .threads
        .iter()
        .try_for_each(|thread| of_thread(thread, areas).map_err(|what| (thread.tid, what)))
}

fn of_thread(thread: &Thread, areas: &[Area]) -> Found {
    let is_own = |name: &str, address: u64, bytes: u64, aligned: u64| {
        let sound = is_in(areas, address, bytes) && address.is_multiple_of(aligned);
        ensure(sound, || format!("{name} at {address:x} is not in its memory"))
    };
    if let Some(rseq) = &thread.rseq {
        ensure(RSEQ_BYTES.contains(&rseq.length_bytes), || "the length of its rseq".into())?;
        is_own("its rseq", rseq.address, rseq.length_bytes.into(), RSEQ_ALIGNED)?;
    }
    if thread.tid_address != 0 {
        is_own("its tid address", thread.tid_address, 4, 4)?;
    }
    let (head, bytes) = thread.robust_list;
    if head != 0 {
        ensure(bytes == ROBUST_BYTES, || "the length of its robust list".into())?;
        is_own("its robust list", head, bytes, 8)?;
    }
    if let Some(restart) = &thread.restart {
        let [first, second, _, fourth, ..] = restart.args;
        let (name, address, bytes) = match restart.call {
            libc::SYS_nanosleep => ("the rest of its sleep", second, TIME_BYTES),
            libc::SYS_clock_nanosleep => ("the rest of its sleep", fourth, TIME_BYTES),
            libc::SYS_futex => ("the futex it waits for", first, 4),
            // The kernel takes 32 bits of the count.
            _ => ("what it polls", first, (second & 0xffff_ffff) * POLLFD_BYTES),
        };
        // A sleep need not say where its rest goes.
        let is_nowhere = address == 0 && name == "the rest of its sleep";
        if !is_nowhere && bytes != 0 {
            is_own(name, address, bytes, 1)?;
        }
    }
    if let Some(at) = thread.time_limit.as_ref().and_then(|limit| limit.at) {
        is_own("the rest of its wait", at, TIME_BYTES, 1)?;
    }
    Ok(())
}

/// What the kernel shows of the layout is in user memory.
pub(super) fn of_layout(layout: &Layout) -> Found {
    let Layout { start_code, end_code, start_data, end_data, start_brk, brk, .. } = *layout;
    let Layout { start_stack, arg_start, arg_end, env_start, env_end, .. } = *layout;
    let all = [
        ("start_code", start_code),
        ("end_code", end_code),
        ("start_data", start_data),
        ("end_data", end_data),
        ("start_brk", start_brk),
        ("brk", brk),
        ("start_stack", start_stack),
        ("arg_start", arg_start),
        ("arg_end", arg_end),
        ("env_start", env_start),
        ("env_end", env_end),
    ];
    match all.iter().find(|(_, address)| *address > USER_END) {
        Some((name, address)) => Err(format!("{name} at {address:x} is not in user memory")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;
    use crate::{Backing, Records, Rseq, TimeLimit};

    /// The memory of one process is 100000 to 102000, in two areas.
    fn two_areas() -> Records {
        let mut all = small();
        let start = all.memories[0].areas[0].end;
        all.memories[0].areas.push(Area {
            start,
            end: start + 4096,
            access: 3,
            backing: Backing::Anonymous,
            flags: Vec::new(),
            runs: Vec::new(),
        });
        all
    }

    fn said(change: impl Fn(&mut Thread)) -> String {
        let mut all = two_areas();
        change(&mut all.processes[0].threads[0]);
        records(&all).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn addresses_outside_the_memory_are_refused_by_their_name() {
        let restart = |call, args: [u64; 6]| Restart { call, args, remaining_ns: Some(1) };
        let rseq = |address, length_bytes| Some(Rseq { address, length_bytes, signature: 1 });
        for (address, is_in) in [
            (0x10_0000, true),
            (0x10_1fe0, true),
            // Over the border of two areas.
            (0x10_0fe0, true),
            (0x10_2000, false),
            (0xf_ffe0, false),
            (0x10_0010, false),
            (0, false),
            (u64::MAX - 31, false),
            (USER_END, false),
        ] {
            let said = said(|thread| thread.rseq = rseq(address, 32));
            assert_eq!(said.is_empty(), is_in, "{address:x}: {said}");
            assert!(is_in || said.contains("process 1: thread 1: its rseq at"), "{said}");
        }
        assert!(said(|thread| thread.rseq = rseq(0x10_1fe0, 64)).contains("its rseq at"));
        assert!(said(|thread| thread.rseq = rseq(0x10_0000, 8)).contains("length of its rseq"));
        assert!(said(|thread| thread.tid_address = 0x10_1fff).contains("its tid address"));
        assert!(said(|thread| thread.tid_address = 0x10_1ffc).is_empty());
        assert!(said(|thread| thread.robust_list = (0x10_1ff0, 24)).contains("its robust list"));
        assert!(said(|thread| thread.robust_list = (0x10_1000, 32)).contains("the length"));
        let limit = |at| TimeLimit { call: 23, left_ns: 1, at: Some(at), microseconds: true };
        assert!(said(|t| t.time_limit = Some(limit(0x10_1ff8))).contains("the rest of its wait"));
        let wait = |call, args| said(|t| t.restart = Some(restart(call, args)));
        let sleep = libc::SYS_nanosleep;
        assert!(wait(sleep, [0; 6]).is_empty());
        assert!(wait(sleep, [0, 0x10_1ff8, 0, 0, 0, 0]).contains("the rest of its sleep"));
        let clock = libc::SYS_clock_nanosleep;
        assert!(wait(clock, [0, 0, 0, 0x10_2000, 0, 0]).contains("the rest of its sleep"));
        let poll = |at, count| wait(libc::SYS_poll, [at, count, 0, 0, 0, 0]);
        assert!(poll(0, 0).is_empty() && poll(0x10_0000, 1024).is_empty());
        assert!(poll(0x10_0000, 1025).contains("what it polls"));
        assert!(poll(0x10_0000, u64::MAX).contains("what it polls"));
        let futex = |at, operation| wait(libc::SYS_futex, [at, operation, 0, 0, 0x20_0000, 0]);
        assert!(futex(0x10_0000, 128).is_empty() && futex(0x10_0000, 9 | 256).is_empty());
        assert!(futex(0x10_2000, 128).contains("the futex it waits for"));
        // FUTEX_WAKE_OP writes to its second address.
        assert!(futex(0x10_0000, 5).contains("which is not saved"));
        assert!(wait(libc::SYS_read, [0; 6]).contains("system call 0, which is not saved"));
    }

    #[test]
    fn a_process_that_nothing_could_have_stopped_is_refused() {
        let stopped = |signal| {
            let mut all = small();
            all.processes[0].stopped = Some(signal);
            records(&all).is_ok()
        };
        assert!(stopped(libc::SIGSTOP) && stopped(libc::SIGTTIN));
        assert!(!stopped(libc::SIGCONT) && !stopped(0) && !stopped(libc::SIGKILL) && !stopped(900));
    }
}
