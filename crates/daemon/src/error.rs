//! Errors of the daemon, by the failed step.

use std::path::PathBuf;

use dormouse_container::Error as EngineError;
use dormouse_kernel::cgroup::CgroupError;

/// Reason why the daemon does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another daemon runs for the same directories.
    #[error("a daemon is already running for these directories")]
    Running,
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The control groups were not found.
    #[error("cannot find the CPU time of containers")]
    Cgroup(#[from] CgroupError),
    /// `config.toml` is invalid, or a swap file cannot be used.
    #[error("{}: {what}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// The cause.
        what: String,
    },
    /// A step failed.
    #[error("cannot {step}")]
    Step {
        /// The step.
        step: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// The result of the daemon's steps.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn step<E: Into<std::io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Step { step, source: source.into() }
}
