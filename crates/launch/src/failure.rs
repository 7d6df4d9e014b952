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

    /// Returns whether this was a mount at a place of the root filesystem.
    pub fn is_mount(&self) -> bool {
        [Code::Attach, Code::Filesystem].iter().any(|code| self.op == code.text())
    }

    /// Returns whether this was the search for the program, before the execve.
    pub fn is_lookup(&self) -> bool {
        self.op == Code::Lookup.text()
    }

    /// How a program that the newborn ran on the way has failed; `None` for other operations.
    pub fn ending(&self) -> Option<String> {
        let ended = self.errno.checked_sub(flat::PROGRAM_ENDED).filter(|n| *n >= 0)?;
        let mut text = match ended {
            flat::TIMED_OUT => "it did not end in time and was killed".to_owned(),
            256.. => match signal_words(ended - 256) {
                "" => format!("it was killed by signal {}", ended - 256),
                words => format!("it was killed by signal {} ({words})", ended - 256),
            },
            _ => format!("it ended with exit status {ended}"),
        };
        if !self.words.is_empty() {
            text.push_str(": ");
            text.push_str(&self.words);
        }
        Some(text)
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

/// Names the signals that end a faulty program (signal(7)); an empty text for others.
fn signal_words(signal: i32) -> &'static str {
    match signal {
        4 => "illegal instruction",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        11 => "segmentation fault",
        15 => "terminated",
        24 => "CPU time limit exceeded",
        25 => "file size limit exceeded",
        31 => "bad system call",
        _ => "",
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(ending) = self.ending() {
            return write!(f, "cannot {} {}: {ending}", self.op, self.detail);
        }
        let why = std::io::Error::from_raw_os_error(self.errno);
        match self.detail.is_empty() {
            true => write!(f, "cannot {}: {why}", self.op),
            false => write!(f, "cannot {} {}: {why}", self.op, self.detail),
        }
    }
}

impl std::error::Error for Failure {}
