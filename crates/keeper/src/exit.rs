//! The status of an ended process: as exit code and signal, and as a file.

use std::io::Write;
use std::os::fd::OwnedFd;

use dormouse_launch::EXIT_FILE;
use dormouse_launch::protocol::{Ended, Id};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// podman's exit code and the signal, 0 for none, of a status from wait4(2).
pub fn code_of(status: i32) -> (i32, i32) {
    match libc::WIFSIGNALED(status) {
        true => (128 + libc::WTERMSIG(status), libc::WTERMSIG(status)),
        false => (libc::WEXITSTATUS(status), 0),
    }
}

/// Writes `c/ID/exit` under another name and renames it.
pub(crate) fn write_exit_file(run: &OwnedFd, id: Id, pid: u32, ended: Ended) -> Result<(), Errno> {
    let id = id.as_str();
    let Ended { code, signal, finished_unix_ms } = ended;
    let signal = if signal == 0 { "null".to_owned() } else { signal.to_string() };
    let text = format!(
        "{{\"version\":1,\"pid\":{pid},\"code\":{code},\"signal\":{signal},\"oom\":false,\
         \"finished_unix_ms\":{finished_unix_ms}}}\n"
    );
    let (temporary, path) = (format!("c/{id}/.{EXIT_FILE}"), format!("c/{id}/{EXIT_FILE}"));
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o600);
    let file = rustix::fs::openat(run, &temporary, flags, mode)?;
    let mut file = std::fs::File::from(file);
    let written = file.write_all(text.as_bytes());
    written.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    rustix::fs::renameat(run, &temporary, run, &path)
}
