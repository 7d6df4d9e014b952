//! IPC namespaces: each is created by a helper process, with its message queues, and entered by its
//! members. Objects of System V are created by the engine ([`super::system_v`]).

use std::fs;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{Errno, pidfd, proc, system_v};
use dormouse_record::{Error, Ipc, Process, Result, Thing};

use super::plan::Plan;
use super::restore::Restore;
use super::{helper, mqueue, open, user};
use crate::inject::program::{Arg, Call, Sequence};
use crate::look::ids::Maps;
use crate::look::ipc::{errno, inside};

/// Makes all namespaces. ORDER: before mounts, which may show their message queues.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        if !matches!(object.thing, Thing::Ipc(_)) {
            continue;
        }
        let what = format!("object {n} (IPC namespace)");
        let mut part = Sequence::default();
        user::enter_one(plan, &mut part, &what, object.user)?;
        part.call(&*what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWIPC)]));
        let made =
            open::own_path(plan, &mut part, &what, "/proc/self/ns/ipc", libc::O_RDONLY as u32)?;
        for (index, object) in records.objects.iter().enumerate() {
            let Thing::MessageQueue(queue) = &object.thing else { continue };
            if queue.namespace == Some(n) {
                let what = format!("object {index} ({})", object.thing.name());
                mqueue::make(plan, &mut part, &what, index, queue)?;
            }
        }
        helper::run(plan, sequence, &what, part);
        plan.cells[n] = Some(plan.lift(sequence, &what, made));
    }
    Ok(())
}

/// When the limits of the container's own namespace are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limits {
    /// Before its objects are made: only those that are larger than at the start. The removal of memory that
    /// no process has attached is off.
    Raised,
    /// Afterwards: all.
    All,
}

/// Sets the limits of the container's own namespace, with the ids of the container's root: the kernel permits the
/// change to that user alone.
pub(super) fn set_limits(pid: u32, restore: &Restore, which: Limits) -> Result<()> {
    let limits = &restore.records.about.ipc_limits;
    if limits.is_empty() {
        return Ok(());
    }
    let namespace = pidfd::open(pid)
        .and_then(|pidfd| pidfd::namespace(&pidfd, Namespace::Ipc))
        .map_err(|e| Error::Elsewhere(e.to_string()))?;
    let root = Maps::read(pid).outside(0, 0);
    let (uid, gid) = root.ok_or_else(|| Error::of("find the root user", pid)(Errno::SRCH))?;
    let set_all = || {
        limits.iter().try_for_each(|(name, text)| {
            let path = format!("/proc/sys/{name}");
            let now = proc::whole_text(&path).map_err(errno)?;
            let value = match (which, name.as_str()) {
                (Limits::Raised, Ipc::REMOVES_LOOSE_MEMORY) => wanted(&now, "0", Limits::All),
                _ => wanted(&now, text, which),
            };
            value.map_or(Ok(()), |value| fs::write(path, value).map_err(errno))
        })
    };
    // ORDER: root again before the visit ends: setns(2) needs its capabilities.
    let set = inside(&namespace, || system_v::as_user(uid, gid, set_all).flatten());
    set.map_err(Error::of("set the ipc limits", pid))
}

/// The value to be set; `None` if it is set already.
fn wanted(now: &str, text: &str, which: Limits) -> Option<String> {
    let numbers = |text: &str| -> Vec<u64> {
        text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    let (now, mut new) = (numbers(now), numbers(text));
    if which == Limits::Raised {
        new.iter_mut().zip(&now).for_each(|(new, now)| *new = (*new).max(*now));
    }
    let words: Vec<String> = new.iter().map(u64::to_string).collect();
    (new != now && new.len() == now.len()).then(|| words.join(" "))
}

/// Makes a process enter its IPC namespace. ORDER: before it attaches memory.
pub(super) fn enter(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let Some(ipc) = record.ipc else { return Ok(()) };
    let what = format!("the IPC namespace of process {}", record.pid);
    let args = [plan.object(ipc)?.into(), Arg::from(libc::CLONE_NEWIPC)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_raised_first_and_set_afterwards() {
        let sem = "100\t32000\t100\t10\n";
        let now = "32000\t1024000000\t500\t32000\n";
        assert_eq!(wanted(now, sem, Limits::Raised), None);
        assert_eq!(wanted(now, sem, Limits::All), Some("100 32000 100 10".into()));
        assert_eq!(wanted("8192\n", "10000\n", Limits::Raised), Some("10000".into()));
        assert_eq!(wanted("8192\n", "8192\n", Limits::All), None);
        assert_eq!(wanted("1 2\n", "3\n", Limits::All), None, "of another form");
    }
}
