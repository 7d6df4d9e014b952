//! Errors of this crate, by the failed step.

use std::path::PathBuf;
use std::time::Duration;

use dormouse_kernel::ErrorKind;
use rustix::io::Errno;

use crate::failure::Failure;
use crate::protocol;

/// A step of a launch that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// An operation of the newborn.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The keeper refused.
    #[error("the keeper cannot {step}")]
    Refused {
        /// The step.
        step: String,
        /// Why.
        #[source]
        source: Errno,
    },
    /// A sysctl that is not of a namespace.
    #[error("sysctl {name} is not one of the container's own namespaces")]
    Sysctl {
        /// Its name.
        name: String,
    },
    /// A sysctl's value of several lines or a page.
    #[error("the value of sysctl {name} is not one line")]
    SysctlValue {
        /// Its name.
        name: String,
    },
    /// The plan cannot be laid out.
    #[error("the start cannot be laid out: {why}")]
    Plan {
        /// Why.
        why: &'static str,
    },
    /// No memory file for the plan or the keeper's program.
    #[error("cannot make a memory file")]
    Memory {
        /// Why.
        #[source]
        source: Errno,
    },
    /// The plan could not be sent, mostly because the newborn has exited.
    #[error("cannot reach the new process")]
    SendPlan {
        /// Why.
        #[source]
        source: Errno,
    },
    /// Its answer could not be received.
    #[error("cannot receive from the new process")]
    HearNewborn {
        /// Why.
        #[source]
        source: Errno,
    },
    /// The new process has not reached its next step in time. It was killed.
    #[error(
        "the new process has waited for {waited:?}: its container is frozen, or a file system of it does \
         not answer"
    )]
    Silent {
        /// The time.
        waited: Duration,
    },
    /// The new process violated the protocol.
    #[error("the new process {what}")]
    Newborn {
        /// The violation.
        what: &'static str,
    },
    /// The keeper's lock.
    #[error("cannot lock {path}")]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The keeper's program.
    #[error("cannot read the keeper's program {path}")]
    Program {
        /// The searched path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The keeper did not start.
    #[error("cannot start the keeper: {why}")]
    Start {
        /// Why.
        why: String,
    },
    /// The connection to the keeper.
    #[error("cannot reach the keeper at {path}")]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: Errno,
    },
    /// The keeper has exited during the request.
    #[error("the keeper has exited; the state of its processes is unknown")]
    KeeperGone,
    /// The keeper speaks another protocol, mostly because it is older or newer than this program.
    #[error("the keeper's answer cannot be read: {source}")]
    Protocol {
        /// The violation.
        source: protocol::Malformed,
    },
    /// The exit file.
    #[error("cannot read {path}")]
    ExitFile {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl LaunchError {
    /// The kind of failure, for callers that decide by it.
    pub fn kind(&self) -> ErrorKind {
        let of = |errno: i32| match Errno::from_raw_os_error(errno) {
            Errno::NOENT | Errno::SRCH => ErrorKind::NotFound,
            Errno::EXIST => ErrorKind::Exists,
            Errno::BUSY => ErrorKind::Busy,
            Errno::INVAL => ErrorKind::Invalid,
            Errno::NOSPC | Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN => {
                ErrorKind::Limit
            }
            _ => ErrorKind::Os(errno),
        };
        match self {
            Self::Failed(failure) => of(failure.errno),
            Self::Refused { source, .. }
            | Self::Memory { source }
            | Self::SendPlan { source }
            | Self::HearNewborn { source }
            | Self::Connect { source, .. } => of(source.raw_os_error()),
            Self::Sysctl { .. } | Self::SysctlValue { .. } | Self::Plan { .. } => {
                ErrorKind::Invalid
            }
            Self::Lock { source, .. } | Self::Program { source, .. } => {
                of(source.raw_os_error().unwrap_or(0))
            }
            Self::Silent { .. } => ErrorKind::Busy,
            Self::Start { .. } | Self::KeeperGone | Self::Newborn { .. } => ErrorKind::Race,
            Self::Protocol { .. } | Self::ExitFile { .. } => ErrorKind::Corrupt,
        }
    }
}
