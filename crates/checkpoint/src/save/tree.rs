//! Finding all processes of a container.
//!
//! The tree is walked from the first process along `/proc/PID/task/TID/children`, which also lists
//! zombies. Other processes in the cgroup were put there from outside ([`super::inspect`] refuses them).

use dormouse_kernel::{Errno, proc};
use dormouse_record::{Error, INIT, PROGRAMS, Result};

use super::seen::{Seen, look_at};
use super::subject::Subject;

/// All processes, parents before children.
pub(crate) fn look(subject: &Subject) -> Result<Vec<Seen>> {
    let mut all = Vec::new();
    let mut next = vec![(subject.init, 0)];
    if subject.has_init {
        // The oldest child is the program. Other zombies are about to be reaped by init.
        let is_zombie = |child| proc::status(child).is_ok_and(|status| status.is_zombie());
        next = children(subject.init, subject.init).rev().map(|child| (child, INIT)).collect();
        let program = next.pop().filter(|(child, _)| !is_zombie(*child));
        next.retain(|(child, _)| !is_zombie(*child));
        let gone = || Error::of("find the program of", subject.init)(Errno::SRCH);
        next.push(program.ok_or_else(gone)?);
    }
    while let Some((pid, parent)) = next.pop() {
        // The process may exit while it is inspected.
        let Some(seen) = look_at(pid, parent, subject.init)? else { continue };
        // ORDER: the oldest child first, and so it is restored: wait(2) returns it before the others.
        for tid in seen.tids.iter().rev() {
            next.extend(children(pid, *tid).rev().map(|child| (child, seen.inner)));
        }
        all.push(seen);
    }
    let first = all.first().filter(|first| !first.is_zombie);
    let may_be = if subject.has_init { PROGRAMS } else { 1..=1 };
    if first.is_none_or(|first| !may_be.contains(&first.inner)) {
        return Err(Error::of("find the first process", subject.init)(Errno::SRCH));
    }
    Ok(all)
}

/// The children of a thread, the oldest first.
fn children(pid: u32, tid: u32) -> impl DoubleEndedIterator<Item = u32> {
    // The thread may have exited meanwhile.
    let text = proc::whole_text(format!("/proc/{pid}/task/{tid}/children")).unwrap_or_default();
    let all: Vec<u32> = text.split_ascii_whitespace().filter_map(|c| c.parse().ok()).collect();
    all.into_iter()
}

/// The processes with these pids, whatever their parents; paths of each are resolved from its own
/// root.
pub(crate) fn look_at_all(pids: Vec<u32>) -> Result<Vec<Seen>> {
    let mut all = Vec::new();
    for pid in pids {
        all.extend(look_at(pid, 0, pid)?.filter(|seen| !seen.is_zombie));
    }
    Ok(all)
}
