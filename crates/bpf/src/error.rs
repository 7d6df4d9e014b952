//! Failures between loading a program and attaching it.

use dormouse_kernel::{CallError, ErrorKind};

/// Where the kernel lists its security modules (securityfs).
const LIST: &str = "/sys/kernel/security/lsm";

/// A step with a BPF program that failed.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The object could not be prepared.
    #[error("open the BPF object '{object}'")]
    Open {
        /// The object.
        object: &'static str,
        /// libbpf's reason.
        #[source]
        source: libbpf_rs::Error,
    },
    /// The kernel refused the programs.
    #[error("load the BPF programs '{object}' ({log})")]
    Load {
        /// The object.
        object: &'static str,
        /// The last lines of output of libbpf or the verifier.
        log: String,
        /// The kernel's answer.
        #[source]
        source: libbpf_rs::Error,
    },
    /// A program is loaded and cannot be attached.
    #[error("attach the BPF program '{program}'")]
    Attach {
        /// The program.
        program: &'static str,
        /// The kernel's answer.
        #[source]
        source: CallError,
    },
    /// The kernel would load the programs, and never call them.
    #[error(
        "BPF is not among the active security modules: boot with `lsm=...,bpf`, behind those of {LIST}"
    )]
    Inactive,
    /// The object lacks a program or map that the loader uses.
    #[error("the BPF object '{object}' has no '{name}'")]
    Missing {
        /// The object.
        object: &'static str,
        /// The missing program or map.
        name: String,
    },
    /// A call about a map or an attached program.
    #[error("access BPF maps or programs")]
    Call(#[from] CallError),
}

impl BpfError {
    /// The kind of the error, for decisions of callers.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Open { source, .. } | Self::Load { source, .. } => match source.kind() {
                libbpf_rs::ErrorKind::NotFound | libbpf_rs::ErrorKind::InvalidInput => {
                    ErrorKind::Unsupported { since: "6.7" }
                }
                libbpf_rs::ErrorKind::PermissionDenied => ErrorKind::Os(libc::EPERM),
                libbpf_rs::ErrorKind::OutOfMemory => ErrorKind::Limit,
                _ => ErrorKind::Os(libc::EINVAL),
            },
            Self::Attach { source, .. } | Self::Call(source) => source.kind(),
            Self::Inactive => ErrorKind::Os(libc::EPERM),
            Self::Missing { .. } => ErrorKind::Corrupt,
        }
    }
}
