//! Processes held by descriptor, so that a reused pid is never mistaken for the old process
//! (pidfd_open(2)).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use crate::call::{self, Namespace, PidfdInfo};
use crate::error::{CallError, Explain, Result};
use crate::process::{Exit, timespec};
use crate::{Errno, proc};

pub use crate::proc::start_time;

/// pidfd_open(2): the process that has `pid` now. KERNEL(5.3). ESRCH if there is none.
///
/// A caller that remembered the pid from earlier compares [`start_time`] *after* this call.
pub fn open(pid: u32) -> Result<OwnedFd> {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(Errno::INVAL)
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
        .explain("pidfd_open", || pid.to_string())
}

/// pidfd_open(2) of a thread (PIDFD_THREAD). KERNEL(6.9): before, EINVAL.
pub fn open_thread(tid: u32) -> Result<OwnedFd> {
    const PIDFD_THREAD: u32 = libc::O_EXCL as u32;
    i32::try_from(tid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(Errno::INVAL)
        .and_then(|tid| {
            rustix::process::pidfd_open(tid, PidfdFlags::from_bits_retain(PIDFD_THREAD))
        })
        .explain("pidfd_open", || format!("{tid}, PIDFD_THREAD"))
}

/// The process that has `pid` and was started at `start_time` (see [`start_time`]).
///
/// ESRCH also when the pid belongs to another process by now.
pub fn open_exactly(pid: u32, start_time: u64) -> Result<OwnedFd> {
    let pidfd = open(pid)?;
    // ORDER: the pid stays the same process's while the process behind the pidfd is alive or
    // unreaped. A value read after the open and before a successful check of liveness therefore
    // belongs to that process.
    let found = proc::start_time(pid)?;
    if found != start_time {
        let arguments = format!("{pid} started at {start_time}, found {found}");
        return Err(CallError::new("pidfd_open", arguments, libc::ESRCH));
    }
    Ok(pidfd)
}

/// pidfd_send_signal(2); signal 0 only checks the permission. KERNEL(5.1).
///
/// ESRCH when the process has ended.
pub fn send_signal(pidfd: impl AsFd, signal: i32) -> Result<()> {
    call::pidfd_send_signal(pidfd.as_fd(), signal)
        .explain("pidfd_send_signal", || format!("{}, {signal}", pidfd.as_fd().as_raw_fd()))
}

/// Returns whether the process still runs. A zombie does not.
pub fn is_alive(pidfd: impl AsFd) -> bool {
    wait(pidfd, Some(Duration::ZERO)).is_ok_and(|ended| !ended)
}

/// Waits until the process has ended; `false` when `timeout` passed before it did. `None` waits
/// forever. Works for any process, not only children, and does not reap.
pub fn wait(pidfd: impl AsFd, timeout: Option<Duration>) -> Result<bool> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map(|end| timespec(end.saturating_duration_since(Instant::now())));
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => continue,
            Err(error) => {
                return Err(error)
                    .explain("poll", || format!("pidfd {}", pidfd.as_fd().as_raw_fd()));
            }
        }
    }
}

/// waitid(2): reaps a child that has ended. `None` when it has not yet. KERNEL(5.4).
///
/// ECHILD when it is not our child, or was reaped.
pub fn reap(pidfd: impl AsFd) -> Result<Option<Exit>> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let status = loop {
        match rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), options) {
            Err(Errno::INTR) => continue,
            other => break other,
        }
    }
    .explain("waitid", || format!("pidfd {}", pidfd.as_fd().as_raw_fd()))?;
    Ok(status.and_then(|status| {
        let code = status.exit_status().map(Exit::Code);
        code.or_else(|| status.terminating_signal().map(Exit::Signal))
    }))
}

/// Returns the exit status, for any holder of a pidfd that was opened before the process was
/// reaped.
///
/// `None` while it runs or waits to be reaped, and on kernels that do not keep the status:
/// KERNEL(6.15), before which only the parent can read it.
pub fn exit_status(pidfd: impl AsFd) -> Result<Option<Exit>> {
    match call::pidfd_get_info(pidfd.as_fd(), PidfdInfo::EXIT) {
        Ok(info) if info.mask & PidfdInfo::EXIT != 0 => Ok(Exit::from_wait_status(info.exit_code)),
        // ENOTTY, EINVAL: no such request before 6.13; ESRCH: reaped, and 6.13 and 6.14 do not keep
        // the status.
        Ok(_) | Err(Errno::NOTTY | Errno::INVAL | Errno::SRCH) => Ok(None),
        Err(error) => {
            let arguments = || pidfd.as_fd().as_raw_fd().to_string();
            Err(error).explain("ioctl(PIDFD_GET_INFO, EXIT)", arguments)
        }
    }
}

/// The pid of the process in the caller's pid namespace. ESRCH when it has ended or has none there.
pub fn pid(pidfd: impl AsFd) -> Result<u32> {
    let pidfd = pidfd.as_fd();
    let found = match call::pidfd_get_info(pidfd, PidfdInfo::PID) {
        Ok(info) => Some(info.tgid),
        Err(Errno::SRCH) => None,
        Err(_) => pid_by_fdinfo(pidfd)?,
    };
    found
        .filter(|&pid| pid != 0)
        .ok_or_else(|| CallError::new("pidfd", pidfd.as_raw_fd().to_string(), libc::ESRCH))
}

/// KERNEL(6.13): before, the pid is read from fdinfo in /proc; -1 if the process has been reaped.
fn pid_by_fdinfo(pidfd: BorrowedFd<'_>) -> Result<Option<u32>> {
    let text = proc::read_text(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()), 4096)?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    Ok(line.and_then(|pid| pid.trim().parse().ok()))
}

/// The user namespace of the process.
pub fn user_namespace(pidfd: impl AsFd) -> Result<OwnedFd> {
    namespace(pidfd, Namespace::User)
}

/// A namespace of the process, as a descriptor. ESRCH when it has ended.
pub fn namespace(pidfd: impl AsFd, kind: Namespace) -> Result<OwnedFd> {
    match call::pidfd_get_namespace(pidfd.as_fd(), kind) {
        Err(Errno::NOTTY | Errno::INVAL) => namespace_by_path(pidfd.as_fd(), kind),
        other => other.explain("ioctl(PIDFD_GET_NAMESPACE)", || {
            format!("{}, {}", pidfd.as_fd().as_raw_fd(), kind.file())
        }),
    }
}

/// KERNEL(6.11): before, a namespace is opened by path; a check of the pidfd afterwards proves that
/// the pid still belonged to the same process.
fn namespace_by_path(pidfd: BorrowedFd<'_>, kind: Namespace) -> Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let path = format!("/proc/{}/ns/{}", pid(pidfd)?, kind.file());
    let found = rustix::fs::open(path.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .explain("open", || path.clone())?;
    send_signal(pidfd, 0)?;
    Ok(found)
}

/// pidfd_getfd(2): a copy of descriptor `number` of the process. KERNEL(5.6).
///
/// EPERM unless the caller may ptrace it.
pub fn copy_descriptor(pidfd: impl AsFd, number: i32) -> Result<OwnedFd> {
    let flags = rustix::process::PidfdGetfdFlags::empty();
    rustix::process::pidfd_getfd(pidfd.as_fd(), number, flags)
        .explain("pidfd_getfd", || format!("{}, {number}", pidfd.as_fd().as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_same_pid() {
        let own = open(std::process::id()).unwrap();
        assert_eq!(pid(&own).unwrap(), std::process::id());
        assert_eq!(pid_by_fdinfo(own.as_fd()).unwrap(), Some(std::process::id()));
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let ended = open(child.id()).unwrap();
        child.wait().unwrap();
        assert_eq!(pid(&ended).unwrap_err().errno(), libc::ESRCH);
        assert_eq!(pid_by_fdinfo(ended.as_fd()).unwrap(), None);
    }

    #[test]
    fn root_both_ways_find_the_same_namespace() {
        let own = open(std::process::id()).unwrap();
        for kind in [Namespace::User, Namespace::Net, Namespace::Time, Namespace::Uts] {
            let inode = |fd: OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
            let by_path = inode(namespace_by_path(own.as_fd(), kind).unwrap());
            assert_eq!(inode(namespace(&own, kind).unwrap()), by_path, "{kind:?}");
        }
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let ended = open(child.id()).unwrap();
        child.wait().unwrap();
        for found in
            [namespace(&ended, Namespace::User), namespace_by_path(ended.as_fd(), Namespace::User)]
        {
            assert_eq!(found.unwrap_err().errno(), libc::ESRCH);
        }
    }
}
