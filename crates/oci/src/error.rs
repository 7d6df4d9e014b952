//! What can go wrong, in words for the one who wrote the configuration or the command.

use std::path::PathBuf;

use dormouse_kernel::CallError;
use dormouse_kernel::cgroup::CgroupError;
use dormouse_launch::LaunchError;

/// The result of most things here.
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
        /// The field, and what is wrong with it.
        why: String,
    },
    /// A field that says something impossible.
    #[error("{field}: {why}")]
    Field {
        /// Its path, such as `linux.namespaces[2].path`.
        field: String,
        /// What is wrong with it.
        why: String,
    },
    /// A command that makes no sense.
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
        /// What it would have to be.
        why: &'static str,
    },
    /// The program could not be executed.
    #[error("exec failed: {program:?}: {why}")]
    Program {
        /// What was to be executed.
        program: String,
        /// Why it was not: in the words that callers of OCI runtimes look for.
        why: String,
    },
    /// A hook failed.
    #[error("{stage} hook {path:?}: {why}")]
    Hook {
        /// Its list in the configuration.
        stage: &'static str,
        /// Its program.
        path: String,
        /// What happened.
        why: String,
    },
    /// A file of ours, or of the bundle.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// A step of the kernel's.
    #[error("cannot {what}: {source}")]
    Call {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: CallError,
    },
    /// A step with cgroups.
    #[error("{}", chain(.0))]
    Cgroup(#[from] CgroupError),
    /// A step of the new process.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A step with a checkpoint.
    #[error("{}", checkpoint(.0))]
    Checkpoint(#[from] dormouse_checkpoint::Error),
    /// A step of its birth.
    #[error("cannot {0}")]
    Birth(#[from] dormouse_keeper::Failed),
}

fn chain(error: &CgroupError) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or(error.to_string(), |cause| format!("{error}: {cause}"))
}

/// With everything that was refused, and with its cause.
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
    /// A field that says something impossible.
    pub fn field(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Field { field: field.into(), why: why.into() }
    }

    /// A file and what was done with it.
    pub fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    /// A call and what it was for.
    pub fn call(what: impl Into<String>) -> impl FnOnce(CallError) -> Self {
        let what = what.into();
        move |source| Self::Call { what, source }
    }
}
