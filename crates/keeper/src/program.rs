//! A program that a newborn runs on the way: a hook of an OCI bundle.
//!
//! The program is a child of the newborn, with its namespaces and credentials. The newborn
//! continues only if the program exits with 0 in time. Only the child loads the filter, so the newborn
//! can wait for it whatever the filter refuses. Like everything here this neither allocates nor locks.

use std::ffi::{CStr, c_char};
use std::os::fd::{AsFd, BorrowedFd};

use dormouse_kernel::call::{self as kernel, Instruction};
use dormouse_launch::flat::{PROGRAM_ENDED, Record, TIMED_OUT};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use crate::call;
use crate::setting::{Outcome, rlimit};

/// The setup of a program.
pub(crate) struct Given<'g> {
    /// Its standard input, from the beginning.
    pub(crate) input: BorrowedFd<'g>,
    /// Its standard output and error; `/dev/null` if none is given.
    pub(crate) output: Option<BorrowedFd<'g>>,
    /// Its working directory; the newborn's own if none is given.
    pub(crate) dir: Option<BorrowedFd<'g>>,
    /// Its limit on descriptors, which the newborn itself does not have yet.
    pub(crate) nofile: Option<Record>,
    /// Its system call filter, with flags of seccomp(2).
    pub(crate) filter: Option<(&'g [Instruction], u32)>,
    /// Its time limit in seconds, 0 for none.
    pub(crate) seconds: u16,
}

/// Runs a program and waits for its exit. The error is an errno or an exit status, encoded as in
/// `flat::PROGRAM_ENDED`.
///
/// # Safety
/// Both tables are arrays of pointers to texts ended by NUL, and end with null.
pub(crate) unsafe fn run(
    path: &CStr,
    argv: *const *const c_char,
    envp: *const *const c_char,
    given: &Given<'_>,
) -> Result<(), i32> {
    if let Some(output) = given.output {
        // The words of an earlier program are not this one's.
        rustix::fs::ftruncate(output, 0).map_err(Errno::raw_os_error)?;
        rustix::fs::seek(output, SeekFrom::Start(0)).map_err(Errno::raw_os_error)?;
    }
    // SAFETY: there is one thread, and the child only makes system calls.
    let pid = unsafe { call::fork() }.map_err(Errno::raw_os_error)?;
    if pid == 0 {
        let errno = match prepare(given) {
            // SAFETY: the caller's promise.
            Ok(()) => unsafe { call::execve(path, argv, envp) },
            Err(errno) => errno,
        };
        let why: &[u8] = match errno {
            Errno::NOENT => b"cannot execute it: no such file or directory",
            Errno::ACCESS => b"cannot execute it: permission denied",
            Errno::PERM => b"cannot execute it: operation not permitted",
            _ => b"cannot execute it",
        };
        let _ = rustix::io::write(rustix::stdio::stderr(), why);
        kernel::exit(127);
    }
    let pid = Pid::from_raw(pid).ok_or(Errno::CHILD.raw_os_error())?;
    let in_time = wait(pid, given.seconds).map_err(Errno::raw_os_error)?;
    if !in_time && rustix::process::kill_process(pid, Signal::KILL).is_err() {
        // A program that has changed its user lives on for now, and ends with the container.
        return Err(PROGRAM_ENDED + TIMED_OUT);
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

/// In the child: sets the program's streams, limit and filter, and closes every descriptor of the
/// engine. Descriptors are closed now: in the middle of execve(2) the memory is the container's already,
/// and its root may inspect the open ones.
fn prepare(given: &Given<'_>) -> Outcome {
    rustix::fs::seek(given.input, SeekFrom::Start(0))?;
    if let Some(dir) = given.dir {
        rustix::process::fchdir(dir)?;
    }
    // SAFETY: this process is about to execute another program: no value owns these numbers.
    unsafe { call::duplicate_to(given.input, 0, false)? };
    let null;
    let output = match given.output {
        Some(output) => Some(output),
        None => {
            null = open_null()?;
            null.as_ref().map(AsFd::as_fd)
        }
    };
    for number in [1, 2] {
        if let Some(output) = output {
            // SAFETY: as above.
            unsafe { call::duplicate_to(output, number, false)? };
        }
    }
    // SAFETY: as above; execve(2) needs none of them.
    unsafe { call::close_from(3)? };
    if let Some(limit) = &given.nofile {
        rlimit(limit)?;
    }
    match given.filter {
        Some((program, flags)) => kernel::load_filter_with(program, flags).map(drop),
        None => Ok(()),
    }
}

/// The root's `/dev/null`, if it is what it should be.
fn open_null() -> Outcome<Option<std::os::fd::OwnedFd>> {
    let null = rustix::fs::open(c"/dev/null", OFlags::WRONLY | OFlags::NOCTTY, Mode::empty());
    let Ok(null) = null else { return Ok(None) };
    let stat = rustix::fs::fstat(&null)?;
    let is_null = stat.st_rdev == rustix::fs::makedev(1, 3)
        && FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    // A descriptor that is not wanted is closed with all others.
    Ok(is_null.then_some(null))
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
