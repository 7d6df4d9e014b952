//! A failed operation of a newborn, and the exit code that stands for it.

use std::fmt;

use crate::flat::{self, Code};

/// The exit code of a process that never executed its program: an earlier step failed, or the
/// engine exited before it sent Go.
pub const NEVER_BEGAN: i32 = 125;

/// An operation of the newborn that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The operation.
    pub op: &'static str,
    /// The object: a path, a name; may be empty.
    pub detail: String,
    /// The error. `ENOENT` and `EACCES` of "execute" become exit codes 127 and 126.
    pub errno: i32,
    /// The last words of a program that failed, without control characters; may be empty.
    pub words: String,
}

impl Failure {
    /// Returns whether this was the execve, or the search for its program.
    pub fn is_exec(&self) -> bool {
        self.op == Code::Exec.text() || self.op == Code::Lookup.text()
    }

    /// The exit code that a shell or podman would return: 127 for a missing program, 126 for one
    /// that cannot be executed, 125 for all earlier steps.
    pub fn exit_code(&self) -> i32 {
        match (self.is_exec(), rustix::io::Errno::from_raw_os_error(self.errno)) {
            (true, rustix::io::Errno::NOENT) => 127,
            (true, _) => 126,
            (false, _) => NEVER_BEGAN,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(ended) = self.errno.checked_sub(flat::PROGRAM_ENDED).filter(|n| *n >= 0) {
            write!(f, "cannot {} {}: ", self.op, self.detail)?;
            return match ended {
                flat::TIMED_OUT => write!(f, "it did not end in time and was killed"),
                256.. => write!(f, "it was killed by signal {}", ended - 256),
                _ => write!(f, "it ended with exit status {ended}"),
            }
            .and_then(|()| match self.words.as_str() {
                "" => Ok(()),
                words => write!(f, ": {words}"),
            });
        }
        let why = std::io::Error::from_raw_os_error(self.errno);
        match self.detail.is_empty() {
            true => write!(f, "cannot {}: {why}", self.op),
            false => write!(f, "cannot {} {}: {why}", self.op, self.detail),
        }
    }
}

impl std::error::Error for Failure {}
