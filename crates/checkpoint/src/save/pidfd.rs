//! Descriptors of processes: fdinfo identifies the process, by all the ids that it has.

use dormouse_record::{PidFd, Thing};

use super::open::Open;
use super::refusal::Reason;
use super::survey::Survey;

/// Flags that pidfd_open(2) takes: PIDFD_NONBLOCK, and PIDFD_THREAD. KERNEL(6.9). The others are set by fcntl(2).
const FLAGS: u32 = (libc::O_NONBLOCK | libc::O_EXCL | libc::O_APPEND | libc::O_NOATIME) as u32;

pub(crate) fn is_pidfd(open: &Open<'_>) -> bool {
    open.link == "anon_inode:[pidfd]" || open.link.starts_with("pidfd:[")
}

pub(crate) fn save(_: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    // Ids in namespaces that the process is not in are missing, or are 0.
    let ids = open.field("NSpid").unwrap_or_default().split_ascii_whitespace();
    let depth = open.process.fields.pids().len();
    let inner = ids.clone().nth(depth.saturating_sub(1)).and_then(|id| id.parse().ok());
    match inner {
        Some(pid) if pid != 0 && ids.count() == depth => {
            Ok(Thing::PidFd(PidFd { pid, flags: open.flags() & FLAGS }))
        }
        _ if open.field("Pid").is_some_and(|pid| pid.starts_with('-')) => {
            Err("a pidfd of a process that has exited, which is not saved yet".into())
        }
        _ => Err("a pidfd of a process that is not the container's".into()),
    }
}
