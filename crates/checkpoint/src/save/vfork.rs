//! Threads that wait for a child of vfork(2). No signal but SIGKILL interrupts that wait.

use std::time::Duration;

use dormouse_kernel::proc;

use super::seen::Seen;
use crate::look::task;

/// Whether a thread is blocked in vfork(2) at this moment.
fn is_now_in_vfork(pid: u32, tid: u32) -> bool {
    let wchan = || proc::whole_text(format!("/proc/{pid}/task/{tid}/wchan"));
    let is_uninterruptible = task::stat_field(pid, tid, 3).is_some_and(|state| state == "D");
    is_uninterruptible && wchan().is_ok_and(|w| w.contains("clone") || w.contains("fork"))
}

/// Whether any thread of a process is blocked in vfork(2).
pub(super) fn is_in_vfork(seen: &Seen) -> bool {
    seen.tids.iter().any(|tid| is_now_in_vfork(seen.pid, *tid))
}

/// How long to wait for a vfork(2) child to execute: most do at once.
const EXECUTES_WITHIN: (u32, Duration) = (20, Duration::from_millis(5));

/// Whether a thread waits for such a child for a longer time.
pub(super) fn waits_in_vfork(pid: u32, tid: u32) -> bool {
    let waits = || is_now_in_vfork(pid, tid);
    let (times, pause) = EXECUTES_WITHIN;
    (0..times).all(|n| {
        if n > 0 {
            std::thread::sleep(pause);
        }
        waits()
    })
}
