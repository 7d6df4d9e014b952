//! Errors of registries, and which of them are worth a retry.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use dormouse_kernel::ErrorKind;

use crate::error::ImageError;

/// A step of a pull or push that failed. Crate edges show only [`ImageError`].
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("cannot reach the registry {registry}{advice}")]
    Connect { registry: String, advice: String, source: reqwest::Error },
    #[error("the connection to {registry} broke while reading {what}")]
    Cut { registry: String, what: String, source: reqwest::Error },
    #[error("{registry} sent nothing for {seconds} s while we waited for {what}")]
    Silent { registry: String, what: String, seconds: u64 },
    #[error("{registry} sent {got} of the {expected} bytes of {what}")]
    Short { registry: String, what: String, got: u64, expected: u64 },
    #[error("{registry} answered {status} for {what}{detail}")]
    Status {
        registry: String,
        what: String,
        status: u16,
        detail: String,
        retry_after: Option<Duration>,
    },
    #[error("{registry} does not let us {action}{detail}: {advice}")]
    Denied { registry: String, action: String, detail: String, advice: String },
    #[error("{registry} has no {what}{detail}")]
    NotFound { registry: String, what: String, detail: String },
    #[error("{what} of {registry} is more than the limit of {limit} bytes")]
    TooLarge { registry: String, what: String, limit: u64 },
    #[error("{what} has the digest {found}, expected {expected}: {registry} sent something else")]
    Digest { registry: String, what: String, expected: String, found: String },
    #[error("{what} from {registry} is not valid: {problem}")]
    Malformed { registry: String, what: String, problem: String },
    #[error("{what}")]
    Unsupported { what: String },
    #[error(
        "{reference} is not there for {wanted}, only for {offered}: choose one with --platform"
    )]
    Platform { reference: String, wanted: String, offered: String },
    #[error("'{}': {problem}", path.display())]
    File { path: PathBuf, problem: String },
    #[error("cannot {step} '{}'", path.display())]
    Io { step: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot {step}")]
    Local { step: &'static str, source: io::Error },
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The other side of a queue has stopped: the cause is reported there.
    #[error("the other half of the transfer stopped")]
    Stopped,
    #[error(
        "{before}; {kept_bytes} of {total_bytes} bytes are kept, pull again to go on from there"
    )]
    Kept { before: String, kept_bytes: u64, total_bytes: u64, source: Box<Failure> },
}

impl Failure {
    /// A malformed reply.
    pub fn malformed(registry: &str, what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Malformed {
            registry: registry.to_owned(),
            what: what.into(),
            problem: problem.into(),
        }
    }

    /// Returns whether the same request may succeed a moment later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Cut { .. } | Self::Silent { .. } | Self::Short { .. } => {
                true
            }
            Self::Status { status, .. } => {
                matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
            }
            _ => false,
        }
    }

    /// Returns the waiting time that the registry requested.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { source, .. } | Self::Cut { source, .. } => {
                ErrorKind::Os(os_error(source).unwrap_or(match source.is_timeout() {
                    true => 110, // ETIMEDOUT
                    false => 71, // EPROTO
                }))
            }
            Self::Silent { .. } => ErrorKind::Os(110),
            Self::Status { status: 429 | 503, .. } => ErrorKind::Busy,
            Self::Status { .. } | Self::Short { .. } | Self::Stopped => ErrorKind::Os(71),
            Self::Denied { .. } => ErrorKind::Os(13), // EACCES
            Self::NotFound { .. } | Self::Platform { .. } => ErrorKind::NotFound,
            Self::TooLarge { .. } => ErrorKind::Limit,
            Self::Digest { .. } | Self::Malformed { .. } => ErrorKind::Corrupt,
            Self::Unsupported { .. } => ErrorKind::Unsupported { since: "" },
            Self::File { .. } => ErrorKind::Invalid,
            Self::Io { source, .. } | Self::Local { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Limit,
                _ => source.raw_os_error().map_or(ErrorKind::Corrupt, ErrorKind::Os),
            },
            Self::Image(image) => image.kind(),
            Self::Kept { source, .. } => source.kind(),
        }
    }
}

impl From<Failure> for ImageError {
    fn from(mut failure: Failure) -> Self {
        let kind = failure.kind();
        if let Failure::Image(image) = failure {
            return image;
        }
        let message = failure.to_string();
        // The text is kept as the message, so what is left of the failure is its cause.
        loop {
            let cause: Box<dyn Error + Send + Sync> = match failure {
                Failure::Connect { source, .. } | Failure::Cut { source, .. } => Box::new(source),
                Failure::Io { source, .. } | Failure::Local { source, .. } => Box::new(source),
                Failure::Kept { source, .. } => {
                    failure = *source;
                    continue;
                }
                _ => return Self::new(kind, message),
            };
            return Self::with_source(kind, message, cause);
        }
    }
}

/// The kernel's error number behind a failed request.
fn os_error(error: &reqwest::Error) -> Option<i32> {
    causes(error).find_map(|e| e.downcast_ref::<io::Error>()?.raw_os_error())
}

/// Returns the TLS error, if there was one.
pub(super) fn tls_error(error: &reqwest::Error) -> Option<&rustls::Error> {
    causes(error).find_map(|e| {
        e.downcast_ref::<rustls::Error>()
            .or_else(|| e.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref::<rustls::Error>())
    })
}

fn causes<'e>(error: &'e reqwest::Error) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(error.source(), |&e| match e.downcast_ref::<io::Error>() {
        // An io::Error that wraps another error gives that one's cause as its own.
        Some(io) if io.get_ref().is_some() => io.get_ref().map(|inner| inner as &dyn Error),
        _ => e.source(),
    })
}

/// Untrusted text, made fit for a terminal: one line, no control characters, at most 300 long.
pub(super) fn plain(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    clean.take(300).collect::<String>().trim().to_owned()
}
