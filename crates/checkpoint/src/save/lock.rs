//! File locks: fdinfo contains those of the file description and those of the process that has it
//! open.

use std::os::fd::AsFd;

use dormouse_kernel::call;
use dormouse_record::{Lease, Lock, LockKind, Notice, Process, Refusal};

use super::known::file::Leased;
use super::open::Open;
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::FoundLease;
use crate::look::file::mount_of;

/// Reads the lines `lock:` of an fdinfo.
pub(crate) fn of(info: &str) -> Result<Vec<Lock>, Reason> {
    let lines = info.lines().filter_map(|line| line.strip_prefix("lock:"));
    lines.filter(|line| !is_lease(line)).map(one).collect()
}

/// The same, each with the process that has set it, if that is alive.
pub(crate) fn with_setters(info: &str) -> Result<Vec<(Lock, Option<u32>)>, Reason> {
    let lines = info.lines().filter_map(|line| line.strip_prefix("lock:"));
    lines.filter(|line| !is_lease(line)).map(|line| Ok((one(line)?, set_by(line)))).collect()
}

fn is_lease(line: &str) -> bool {
    line.split_ascii_whitespace().nth(1) == Some("LEASE")
}

fn lease_line(info: &str) -> Option<&str> {
    info.lines().filter_map(|line| line.strip_prefix("lock:")).find(|line| is_lease(line))
}

/// The lease of an open file, and the process that is signalled when it is broken.
pub(crate) fn lease(open: &Open<'_>) -> Result<Option<Lease>, Reason> {
    let Some(line) = lease_line(&open.info) else { return Ok(None) };
    let writes = access(line)?;
    let failed = |e| format!("a lease: {e}");
    let owner = call::file_owner(open.copy.as_fd()).map_err(failed)?;
    let inside = |id: i32| dormouse_kernel::proc::fields(id as u32).ok()?.pids().last().copied();
    let id = match owner.id {
        0 => 0,
        id => inside(id).ok_or("a lease with an owner that cannot be found")?,
    };
    Ok(Some(Lease {
        number: open.number,
        writes,
        owner_kind: owner.kind,
        owner: id,
        signal: call::file_signal(open.copy.as_fd()).map_err(failed)?,
    }))
}

/// An open file with a lease that another open file would break, with its device and inode.
pub(crate) fn leased(open: &Open<'_>) -> Option<((u64, u64), Leased)> {
    let line = lease_line(&open.info)?;
    if matches!(access(line), Ok(false)) {
        return None;
    }
    let mode = open.flags() as i32 & libc::O_ACCMODE;
    let mount = mount_of(open.copy.as_fd()).ok();
    Some(((open.stat.st_dev, open.stat.st_ino), Leased { index: open.index, mode, mount }))
}

/// The lease of an open file, with what [`give_out`] needs.
pub(crate) fn found(open: &Open<'_>) -> Result<Option<FoundLease>, Reason> {
    let Some(lease) = lease(open)? else { return Ok(None) };
    let set_by = lease_line(&open.info).and_then(set_by);
    Ok(Some(FoundLease { object: open.index, set_by, uid: open.stat.st_uid, lease }))
}

/// Gives each lease to the process that takes it again. procfs names the process that has set a lease, so
/// that one does, if it still has the file open and is the user of the file, as fcntl(2), F_SETLEASE wants.
/// Otherwise the first that is does; if none is, the lease is refused. CAP_LEASE counts in the first user namespace
/// alone.
pub(crate) fn give_out(
    leases: Vec<FoundLease>,
    tree: &[Seen],
    processes: &mut [Process],
) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for FoundLease { object, set_by, uid, lease } in leases {
        let number = |process: &Process| {
            let found = process.descriptors.iter().find(|one| one.object == object);
            found.map(|one| one.number)
        };
        let all = tree.iter().zip(&*processes).enumerate();
        let open: Vec<(usize, u32, &Seen)> =
            all.filter_map(|(n, (seen, process))| Some((n, number(process)?, seen))).collect();
        let may = |(_, _, seen): &&(usize, u32, &Seen)| may_hold(seen, uid);
        let is_setter = |(_, _, seen): &&(usize, u32, &Seen)| Some(seen.pid) == set_by;
        let setter = open.iter().find(is_setter);
        let taker = setter.filter(may).or_else(|| open.iter().find(may));
        match taker.or(setter).or(open.first()) {
            Some(&(n, number, _)) if taker.is_some() => {
                processes[n].leases.push(Lease { number, ..lease });
            }
            Some((_, number, seen)) => {
                let why = "its file with a lease (F_SETLEASE), whose user no process is any more, not saved yet";
                refusals.push(seen.refuse(format!("descriptor {number}"), why));
            }
            None => {}
        }
    }
    refusals
}

/// Whether a process may set a lease of a user's file without a capability.
fn may_hold(seen: &Seen, uid: u32) -> bool {
    let of_files =
        || seen.fields.field("Uid")?.split_ascii_whitespace().nth(3)?.parse::<u32>().ok();
    of_files() == Some(uid)
}

/// The task that an open file notifies, except by a lease.
pub(crate) fn notice(open: &Open<'_>) -> Result<Option<Notice>, Reason> {
    let flags = open.flags();
    if flags & libc::O_PATH as u32 != 0 || lease(open)?.is_some() {
        return Ok(None);
    }
    let failed = |e| format!("its owner (F_GETOWN_EX): {e}");
    let owner = call::file_owner(open.copy.as_fd()).map_err(failed)?;
    let signal = call::file_signal(open.copy.as_fd()).map_err(failed)?;
    let is_on = flags & libc::O_ASYNC as u32 != 0;
    let inside = |id: i32| dormouse_kernel::proc::fields(id as u32).ok()?.pids().last().copied();
    // A task that has exited is not notified.
    let id = if owner.id == 0 { 0 } else { inside(owner.id).unwrap_or(0) };
    // The kernel does not report F_NOTIFY. It reports the process that is notified.
    if id != 0 && open.stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        let why = "a directory with a process to notify (F_NOTIFY, F_SETOWN), which is not saved";
        return Err(format!("'{}', {why}", open.link));
    }
    let is_set = is_on || id != 0 || signal != 0;
    let (number, owner_kind) = (open.number, owner.kind);
    Ok(is_set.then_some(Notice { number, owner_kind, owner: id, signal, flags }))
}

/// Parses `1: LEASE  ACTIVE    READ 359 00:13:11691 0 EOF`; returns whether it is a write lease.
fn access(line: &str) -> Result<bool, Reason> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    match words.get(2..4) {
        Some(["ACTIVE", "READ"]) => Ok(false),
        Some(["ACTIVE", "WRITE"]) => Ok(true),
        _ => Err("a lease that is being broken, which is not saved".into()),
    }
}

/// The process that has set a lease or a lock: 359 of `1: LEASE  ACTIVE    READ 359 00:13:11691 0 EOF`.
fn set_by(line: &str) -> Option<u32> {
    line.split_ascii_whitespace().nth(4)?.parse().ok()
}

/// Reads `1: POSIX  ADVISORY  WRITE 359 00:13:11691 0 EOF`.
fn one(line: &str) -> Result<Lock, Reason> {
    let unknown = || format!("a lock that is not known ({})", line.trim());
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, kind, how, access, _, _, start, end] = words[..] else { return Err(unknown()) };
    let kind = match kind {
        "POSIX" => LockKind::Process,
        "OFDLCK" => LockKind::OpenFile,
        "FLOCK" => LockKind::Whole,
        "DELEG" => return Err("a delegation of a file server in the kernel".into()),
        _ => return Err(unknown()),
    };
    if how != "ADVISORY" {
        return Err(unknown());
    }
    let writes = match access {
        "READ" => false,
        "WRITE" => true,
        _ => return Err(unknown()),
    };
    let end = match end {
        "EOF" => None,
        end => Some(end.parse().map_err(|_| unknown())?),
    };
    Ok(Lock { kind, writes, start: start.parse().map_err(|_| unknown())?, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_fdinfo_are_read() {
        let info = "pos:\t0\nflags:\t02\nlock:\t1: POSIX  ADVISORY  WRITE 359 00:13:11691 3 9\n\
                    lock:\t2: FLOCK  ADVISORY  READ 0 00:13:11691 0 EOF\n";
        let expected = [
            Lock { kind: LockKind::Process, writes: true, start: 3, end: Some(9) },
            Lock { kind: LockKind::Whole, writes: false, start: 0, end: None },
        ];
        assert_eq!(of(info).unwrap(), expected);
        let lease = "1: LEASE  ACTIVE    WRITE 359 00:13:11691 0 EOF";
        assert_eq!(of(&format!("lock:\t{lease}\n")).unwrap(), []);
        assert_eq!(access(lease), Ok(true));
        assert_eq!(set_by(lease), Some(359));
        assert!(access("1: LEASE  BREAKING  READ 359 00:13:11691 0 EOF").is_err());
        assert!(of("lock:\t1: DELEG  ACTIVE    READ 1 00:13:11691 0 EOF\n").is_err());
        assert!(of("lock:\t1: -> POSIX\n").is_err());
    }
}
