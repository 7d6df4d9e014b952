//! Errors, in terms of the configuration or the command line.

use std::path::PathBuf;

use dormouse_kernel::CallError;
use dormouse_kernel::cgroup::CgroupError;
use dormouse_launch::LaunchError;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration that cannot be read; `why` names the field.
    #[error("{}: {why}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The field, and its error.
        why: String,
    },
    /// A field with an impossible value.
    #[error("{field}: {why}")]
    Field {
        /// Its path, such as `linux.namespaces[2].path`.
        field: String,
        /// The error in its value.
        why: String,
    },
    /// An invalid command line.
    #[error("{0}")]
    Usage(String),
    /// No container has this id.
    #[error("container {0:?} does not exist")]
    NotFound(String),
    /// A container has this id already.
    #[error("container with given ID already exists: {0:?}")]
    Exists(String),
    /// The container is in another state.
    #[error("container {id:?} is {state}: {why}")]
    State {
        /// Its id.
        id: String,
        /// Its state.
        state: &'static str,
        /// The required state.
        why: &'static str,
    },
    /// The program could not be executed.
    #[error("exec failed: {program:?}: {why}")]
    Program {
        /// The program.
        program: String,
        /// The cause, in the wording that callers of OCI runtimes search for.
        why: String,
    },
    /// A hook failed.
    #[error("error running {hook}: {why}")]
    Hook {
        /// Its list, its place in the list and its program ([`crate::hook`]).
        hook: String,
        /// The failure.
        why: String,
    },
    /// A file of the runtime, or of the bundle.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// The failed step.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A failed system call.
    #[error("cannot {what}: {source}")]
    Call {
        /// The failed step.
        what: String,
        /// The cause.
        #[source]
        source: CallError,
    },
    /// A failed step with cgroups.
    #[error("{}", chain(.0))]
    Cgroup(#[from] CgroupError),
    /// A failed step of the new process.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A failed step with a checkpoint.
    #[error("{}", checkpoint(.0))]
    Checkpoint(#[from] dormouse_checkpoint::Error),
    /// A failed step of the clone.
    #[error("cannot {0}")]
    Birth(#[from] dormouse_keeper::Failed),
}

fn chain(error: &CgroupError) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or(error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Formats a checkpoint error with all refusals, and with its cause.
fn checkpoint(error: &dormouse_checkpoint::Error) -> String {
    use dormouse_checkpoint::Error::{Passing, Refused};
    if let Refused(all) | Passing(all) = error {
        let all: Vec<String> = all.iter().map(ToString::to_string).collect();
        return format!("it cannot be checkpointed: {}", all.join("; "));
    }
    let cause = std::error::Error::source(error);
    cause.map_or(error.to_string(), |cause| format!("{error}: {cause}"))
}

impl Error {
    /// Makes an error for a field with an impossible value.
    pub fn field(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Field { field: field.into(), why: why.into() }
    }

    /// Makes an error for a step with a file.
    pub fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    /// Makes an error for a system call.
    pub fn call(what: impl Into<String>) -> impl FnOnce(CallError) -> Self {
        let what = what.into();
        move |source| Self::Call { what, source }
    }
}
