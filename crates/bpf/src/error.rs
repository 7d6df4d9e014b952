//! What can fail between a program's bytes and its hook.

use dormouse_kernel::{CallError, ErrorKind};

/// A step with a BPF program that failed.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The object could not be prepared.
    #[error("open the BPF object '{object}'")]
    Open {
        /// Which one.
        object: &'static str,
        /// libbpf's reason.
        #[source]
        source: libbpf_rs::Error,
    },
    /// The kernel refused the programs.
    #[error("load the BPF programs '{object}' ({log})")]
    Load {
        /// Which ones.
        object: &'static str,
        /// The last lines libbpf or the verifier said.
        log: String,
        /// The kernel's answer.
        #[source]
        source: libbpf_rs::Error,
    },
    /// A program is loaded and cannot be attached.
    #[error("attach the BPF program '{program}'")]
    Attach {
        /// Which one.
        program: &'static str,
        /// The kernel's answer.
        #[source]
        source: CallError,
    },
    /// The object lacks a program or map that the loader knows.
    #[error("the BPF object '{object}' has no '{name}'")]
    Missing {
        /// Which object.
        object: &'static str,
        /// What is missing.
        name: String,
    },
    /// A call about a map or an attached program.
    #[error("ask the kernel about BPF")]
    Call(#[from] CallError),
}

impl BpfError {
    /// What a caller may decide on.
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
            Self::Missing { .. } => ErrorKind::Corrupt,
        }
    }
}
