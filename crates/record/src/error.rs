//! Errors of save and restore, and refusals of state that cannot be saved. All crates from here up to
//! `checkpoint` return this type.

use std::path::PathBuf;

use dormouse_kernel::{Errno, ErrorKind};

/// A part of a container that a checkpoint cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Refusal {
    /// The process, by its id inside; 0 for the container as a whole.
    pub pid: u32,
    /// The name that `ps` shows.
    pub process: String,
    /// The part of the process: `descriptor 5`, `memory at 7f0012340000`; empty for the process
    /// itself.
    pub what: String,
    /// The object and the cause, and what would help.
    pub why: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.pid, self.what.is_empty()) {
            (0, _) => write!(f, "{}", self.why),
            (pid, true) => write!(f, "process {pid} ({}): {}", self.process, self.why),
            (pid, false) => {
                write!(f, "process {pid} ({}), {}: {}", self.process, self.what, self.why)
            }
        }
    }
}

/// A checkpoint that was not made, not read, or not restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Something cannot be saved. Nothing was stopped, or all processes continue.
    #[error("it cannot be saved: {}", .0.first().map(ToString::to_string).unwrap_or_default())]
    Refused(Vec<Refusal>),
    /// Something cannot be saved just now, and can be in a moment. All processes continue.
    #[error("it cannot be saved just now: {}", .0.first().map(ToString::to_string).unwrap_or_default())]
    Passing(Vec<Refusal>),
    /// A step with a process of the container failed.
    #[error("cannot {step} of process {pid}")]
    Process {
        /// The step that failed.
        step: &'static str,
        /// The process or thread, by the host's id.
        pid: u32,
        /// The cause.
        #[source]
        source: Errno,
    },
    /// A call of a restore program failed.
    #[error("cannot restore {what}: {call}")]
    Restore {
        /// The object that was being restored.
        what: String,
        /// The system call.
        call: String,
        /// The cause.
        #[source]
        source: Errno,
    },
    /// A process of a restore exited prematurely.
    #[error("a process exited while it was restored ({0})")]
    Ended(String),
    /// The checkpoint does not match its checksum or its format.
    #[error("the checkpoint is damaged: {part}: {what}")]
    Damaged {
        /// The damaged part.
        part: String,
        /// The kind of damage.
        what: String,
    },
    /// The archive is encrypted, and the given keys do not open it; or it cannot be encrypted that
    /// way.
    #[error("{0}")]
    Seal(String),
    /// The checkpoint cannot be restored here.
    #[error("it cannot be restored here: {0}")]
    Elsewhere(String),
    /// A step with a file of the checkpoint failed.
    #[error("{step} '{}'", path.display())]
    File {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A call failed.
    #[error("cannot {step}")]
    Call {
        /// The step that failed.
        step: &'static str,
        /// The cause.
        #[source]
        source: Errno,
    },
}

impl Error {
    /// The kind of this failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(_) | Self::Passing(_) | Self::Elsewhere(_) => {
                ErrorKind::Unsupported { since: "" }
            }
            Self::Process { source, .. }
            | Self::Restore { source, .. }
            | Self::Call { source, .. } => ErrorKind::Os(source.raw_os_error()),
            Self::Ended(_) => ErrorKind::Race,
            Self::Seal(_) => ErrorKind::Invalid,
            Self::Damaged { .. } => ErrorKind::Corrupt,
            Self::File { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound => ErrorKind::NotFound,
                std::io::ErrorKind::AlreadyExists => ErrorKind::Exists,
                std::io::ErrorKind::StorageFull => ErrorKind::Limit,
                _ => ErrorKind::Os(source.raw_os_error().unwrap_or(0)),
            },
        }
    }

    /// An error of a step with a process, by the host's id.
    pub fn of(step: &'static str, pid: u32) -> impl FnOnce(Errno) -> Self {
        move |source| Self::Process { step, pid, source }
    }

    /// An error of a step that is one call.
    pub fn call(step: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self::Call { step, source }
    }

    /// An error of a step with a file.
    pub fn file(
        step: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { step, path, source }
    }

    /// Damage of a part of the checkpoint.
    pub fn damaged(part: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Damaged { part: part.into(), what: what.into() }
    }
}

/// The result of saving and loading.
pub type Result<T> = std::result::Result<T, Error>;
