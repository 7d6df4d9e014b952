//! File locks. Locks of a file description are set when the description is created. Locks of a
//! process are set when the process closes no descriptor of that file any more, which would release
//! them. Leases are set
//! last, when only the recorded descriptors of the file are open, by a process that may hold one
//! (fcntl(2), F_SETLEASE).

use dormouse_record::{Lock, LockKind, Process, Table};

use super::open::SETTABLE;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

/// Commands of fcntl(2).
const F_SETSIG: i32 = 10;
const F_SETOWN_EX: i32 = 15;

fn set(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, file: Arg, lock: &Lock) {
    let command = match lock.kind {
        LockKind::Process => libc::F_SETLK,
        LockKind::OpenFile => libc::F_OFD_SETLK,
        LockKind::Whole => {
            let operation = if lock.writes { libc::LOCK_EX } else { libc::LOCK_SH };
            let args = [file, Arg::from(operation | libc::LOCK_NB)];
            sequence.call(what, Call::new(libc::SYS_flock, args));
            return;
        }
    };
    // struct flock: type, whence, start, length (0: to the end), pid.
    let kind = if lock.writes { libc::F_WRLCK } else { libc::F_RDLCK };
    let length = lock.end.map_or(0, |end| end.saturating_sub(lock.start).saturating_add(1));
    let words = [kind as u64 | (libc::SEEK_SET as u64) << 16, lock.start, length, 0];
    let at = plan.builder.numbers(&words);
    sequence.call(what, Call::new(libc::SYS_fcntl, [file, Arg::from(command), at.into()]));
}

/// Sets the locks of a file description.
pub(super) fn of_file(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    file: Arg,
    locks: &[Lock],
) {
    for lock in locks {
        set(plan, sequence, &format!("a lock of {what}"), file, lock);
    }
}

/// Sets the leases of the open files of a process. ORDER: after it has its credentials.
pub(super) fn leases(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) {
    for lease in &record.leases {
        let what = format!("the lease of descriptor {} of process {}", lease.number, record.pid);
        let mut call = |command: i32, argument: Arg| {
            let args = [lease.number.into(), Arg::from(command), argument];
            sequence.call(what.clone(), Call::new(libc::SYS_fcntl, args));
        };
        if lease.signal != 0 {
            call(F_SETSIG, lease.signal.into());
        }
        let kind = if lease.writes { libc::F_WRLCK } else { libc::F_RDLCK };
        call(libc::F_SETLEASE, kind.into());
        // The kernel signals the process that takes the lease, unless another owner is set.
        let mut owner = lease.owner_kind.to_ne_bytes().to_vec();
        owner.extend(lease.owner.to_ne_bytes());
        let at = plan.builder.data(&owner);
        call(F_SETOWN_EX, at.into());
    }
}

/// Sets the signal-driven I/O of a process's open files. ORDER: as [`leases`], and all tasks exist.
pub(super) fn notices(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) {
    for notice in &record.notices {
        let what = format!("the notices of descriptor {} of process {}", notice.number, record.pid);
        let call = |command: i32, argument: Arg| {
            Call::new(libc::SYS_fcntl, [notice.number.into(), Arg::from(command), argument])
        };
        if notice.signal != 0 {
            sequence.call(what.clone(), call(F_SETSIG, notice.signal.into()));
        }
        let mut owner = notice.owner_kind.to_ne_bytes().to_vec();
        owner.extend(notice.owner.to_ne_bytes());
        let owner = plan.builder.data(&owner);
        if notice.owner != 0 || notice.owner_kind != 0 {
            sequence.call(what.clone(), call(F_SETOWN_EX, owner.into()));
        }
        let is_on = notice.flags & libc::O_ASYNC as u32;
        if is_on != 0 {
            let flags = notice.flags & SETTABLE as u32 | is_on;
            sequence.call(what.clone(), call(libc::F_SETFL, flags.into()));
            if notice.owner == 0 {
                // A terminal makes its foreground group, or this process, the owner.
                sequence.call(what, call(F_SETOWN_EX, owner.into()));
            }
        }
    }
}

/// Sets the locks of a table.
pub(super) fn of_table(plan: &mut Plan<'_>, sequence: &mut Sequence, table: Table<'_>) {
    for held in table.locks {
        let what = format!("a lock of descriptor {} of process {}", held.number, table.task);
        set(plan, sequence, &what, held.number.into(), &held.lock);
    }
}
