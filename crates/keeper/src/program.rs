//! A program that a newborn runs on the way: a hook of an OCI bundle.
//!
//! The program is a child of the newborn, with its namespaces and credentials. The newborn
//! continues only if the program exits with 0 in time. Like everything here this neither allocates
//! nor locks.

use std::ffi::{CStr, c_char};
use std::os::fd::{AsFd, BorrowedFd};

use dormouse_kernel::call as kernel;
use dormouse_launch::flat::{PROGRAM_ENDED, TIMED_OUT};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use crate::call;
use crate::newborn::Outcome;

/// Runs a program and waits for its exit, `seconds` at most unless that is 0. The error is an errno
/// or an exit status, encoded as in `flat::PROGRAM_ENDED`.
///
/// # Safety
/// Both tables are arrays of pointers to texts ended by NUL, and end with null.
pub(crate) unsafe fn run(
    path: &CStr,
    argv: *const *const c_char,
    envp: *const *const c_char,
    input: BorrowedFd<'_>,
    seconds: u16,
) -> Result<(), i32> {
    // SAFETY: there is one thread, and the child only makes system calls.
    let pid = unsafe { call::fork() }.map_err(Errno::raw_os_error)?;
    if pid == 0 {
        if prepare(input).is_ok() {
            // SAFETY: the caller's promise.
            unsafe { call::execve(path, argv, envp) };
        }
        kernel::exit(127);
    }
    let pid = Pid::from_raw(pid).ok_or(Errno::CHILD.raw_os_error())?;
    let in_time = wait(pid, seconds).map_err(Errno::raw_os_error)?;
    if !in_time {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    let ended =
        rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(pid), WaitOptions::empty()));
    let Some((_, status)) = ended.map_err(Errno::raw_os_error)? else {
        return Err(Errno::CHILD.raw_os_error());
    };
    match (in_time, status.exit_status(), status.terminating_signal()) {
        (true, Some(0), _) => Ok(()),
        (true, Some(code), _) => Err(PROGRAM_ENDED + code),
        (true, None, signal) => Err(PROGRAM_ENDED + 256 + signal.unwrap_or(0)),
        (false, ..) => Err(PROGRAM_ENDED + TIMED_OUT),
    }
}

/// In the child: sets its streams and closes all other descriptors.
fn prepare(input: BorrowedFd<'_>) -> Outcome {
    rustix::fs::seek(input, SeekFrom::Start(0))?;
    // SAFETY: this process is about to execute another program: no value owns these numbers.
    unsafe { call::duplicate_to(input, 0, false)? };
    let null = rustix::fs::open(c"/dev/null", OFlags::WRONLY | OFlags::NOCTTY, Mode::empty());
    if let Ok(null) = null {
        let stat = rustix::fs::fstat(&null)?;
        let is_null = stat.st_rdev == rustix::fs::makedev(1, 3);
        if is_null && FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
            for number in [1, 2] {
                // SAFETY: as above.
                unsafe { call::duplicate_to(null.as_fd(), number, false)? };
            }
        }
    }
    call::close_on_exec_from(3)
}

/// Returns whether a child exits before its time is over.
fn wait(pid: Pid, seconds: u16) -> Outcome<bool> {
    if seconds == 0 {
        return Ok(true);
    }
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let timeout = Timespec { tv_sec: seconds.into(), tv_nsec: 0 };
    rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)))
        .map(|ready| ready == 1)
}
