//! The status of an ended process as exit code and signal.

/// podman's exit code and the signal, 0 for none, of a status from wait4(2).
pub fn code_of(status: i32) -> (i32, i32) {
    match libc::WIFSIGNALED(status) {
        true => (128 + libc::WTERMSIG(status), libc::WTERMSIG(status)),
        false => (libc::WEXITSTATUS(status), 0),
    }
}
