//! Errors of image operations, and their kinds.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use dormouse_kernel::{CallError, ErrorKind};

/// The result of everything in this crate.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

/// A failed step on images. The text names the step; the cause is its [`Error::source`].
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ImageError(Box<Fault>);

/// The steps that can fail. Crate edges show only [`ImageError`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("cannot {step} '{}'", path.display())]
    Io { step: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot {step}")]
    Kernel { step: &'static str, source: CallError },
    #[error("'{}' is not valid {what}", path.display())]
    Json { what: &'static str, path: PathBuf, source: serde_json::Error },
    #[error("archive entry '{entry}': {problem}")]
    Entry { entry: String, problem: String },
    #[error("{what}: {problem}")]
    Archive { what: String, problem: String },
    #[error("{what} has the digest {found}, expected {expected}")]
    Digest { what: String, expected: String, found: String },
    #[error("{what}")]
    NotFound { what: String },
    #[error("{what}")]
    Invalid { what: String },
    #[error("{what}")]
    Busy { what: String },
    #[error("{what} is damaged: {problem}")]
    Damaged { what: String, problem: String },
    #[error(
        "no room for {need} more bytes in '{}': {free} are free, and {reserve} of them stay in \
         reserve",
        path.display()
    )]
    Full { path: PathBuf, need: u64, free: u64, reserve: u64 },
    #[error("{what} is more than the limit of {limit}")]
    Limit { what: String, limit: u64 },
    #[error("{message}")]
    Other { kind: ErrorKind, message: String, source: Option<Box<dyn Error + Send + Sync>> },
}

impl ImageError {
    /// An error of a kind that has no variant here: a registry's answer, for one.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Fault::Other { kind, message: message.into(), source: None }.into()
    }

    /// The same, with its cause.
    pub fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Fault::Other { kind, message: message.into(), source: Some(source.into()) }.into()
    }

    /// The kind of the error, for decisions of callers.
    pub fn kind(&self) -> ErrorKind {
        match &*self.0 {
            Fault::Io { source, .. } => of_io(source),
            Fault::Kernel { source, .. } => source.kind(),
            Fault::Json { .. } | Fault::Digest { .. } | Fault::Damaged { .. } => ErrorKind::Corrupt,
            Fault::Entry { .. } | Fault::Archive { .. } | Fault::Invalid { .. } => {
                ErrorKind::Invalid
            }
            Fault::NotFound { .. } => ErrorKind::NotFound,
            Fault::Busy { .. } => ErrorKind::Busy,
            Fault::Full { .. } | Fault::Limit { .. } => ErrorKind::Limit,
            Fault::Other { kind, .. } => *kind,
        }
    }
}

impl From<Fault> for ImageError {
    fn from(fault: Fault) -> Self {
        Self(Box::new(fault))
    }
}

fn of_io(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::AlreadyExists => ErrorKind::Exists,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Limit,
        io::ErrorKind::InvalidInput => ErrorKind::Invalid,
        _ => error.raw_os_error().map_or(ErrorKind::Corrupt, ErrorKind::Os),
    }
}

/// Names the step and the path of a failed file operation.
pub(crate) trait At<T> {
    fn at(self, step: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, step: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| {
            Fault::Io { step, path: path.as_ref().to_owned(), source: source.into() }.into()
        })
    }
}

/// Names the step of a failed kernel call.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T>;
}

impl<T> Step<T> for std::result::Result<T, CallError> {
    fn step(self, step: &'static str) -> Result<T> {
        self.map_err(|source| Fault::Kernel { step, source }.into())
    }
}
