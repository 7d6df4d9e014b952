//! Errors of failed system calls.
//!
//! A [`CallError`] remembers the call and its arguments, so that a user's report is enough to see
//! what was tried. [`ErrorKind`] is what callers decide on; it is small on purpose.

use std::fmt;

use crate::Errno;

/// Kinds of errors, for decisions of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The kernel has no such feature.
    Unsupported {
        /// The first version of Linux that has it, such as `"5.12"`; empty when not known.
        since: &'static str,
    },
    /// A quota, a table or a limit is full.
    Limit,
    /// The object changed during the operation; a retry may succeed.
    Race,
    /// Data does not match its checksum or its format.
    Corrupt,
    /// In use by another process.
    Busy,
    /// There is no such thing.
    NotFound,
    /// The object exists already.
    Exists,
    /// The request makes no sense.
    Invalid,
    /// Anything else, as the kernel's error number.
    Os(i32),
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported { since: "" } => f.write_str("not supported by this kernel"),
            Self::Unsupported { since } => write!(f, "needs Linux {since} or later"),
            Self::Limit => f.write_str("a limit is reached"),
            Self::Race => f.write_str("it changed meanwhile"),
            Self::Corrupt => f.write_str("damaged"),
            Self::Busy => f.write_str("in use"),
            Self::NotFound => f.write_str("not found"),
            Self::Exists => f.write_str("exists already"),
            Self::Invalid => f.write_str("not valid"),
            Self::Os(errno) => f.write_str(&describe(*errno)),
        }
    }
}

/// A system call that failed: which one, with what, and why.
///
/// Shown as `openat2(5, "etc/passwd", RESOLVE_IN_ROOT): No such file or directory (ENOENT)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    call: &'static str,
    arguments: String,
    errno: i32,
    note: String,
}

/// A result whose error includes the call.
pub type Result<T, E = CallError> = std::result::Result<T, E>;

impl CallError {
    /// An error of `call`; `arguments` are shown unchanged.
    pub fn new(call: &'static str, arguments: String, errno: i32) -> Self {
        Self { call, arguments, errno, note: String::new() }
    }

    /// Adds what the kernel wrote beside the number, such as a mount's own message.
    #[must_use]
    pub fn with_note(mut self, note: String) -> Self {
        self.note = note;
        self
    }

    /// The kernel's error number.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// The name of the call that failed.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Returns the arguments of the call, as shown.
    pub fn arguments(&self) -> &str {
        &self.arguments
    }

    /// Returns the kernel's own text, or nothing.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self.errno {
            // The user's or the cgroup's number of processes.
            libc::EAGAIN if self.call == "clone3" || self.call == "clone" => ErrorKind::Limit,
            libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOPROTOOPT | libc::ENOTTY => {
                ErrorKind::Unsupported { since: since(self.call) }
            }
            libc::ENOENT | libc::ESRCH | libc::ENODEV | libc::ENXIO | libc::ENOTDIR => {
                ErrorKind::NotFound
            }
            libc::EEXIST | libc::ENOTEMPTY => ErrorKind::Exists,
            libc::EBUSY | libc::ETXTBSY | libc::EADDRINUSE => ErrorKind::Busy,
            libc::EINVAL | libc::E2BIG | libc::ENAMETOOLONG | libc::EDOM | libc::ERANGE => {
                ErrorKind::Invalid
            }
            libc::ENOSPC
            | libc::EDQUOT
            | libc::EMFILE
            | libc::ENFILE
            | libc::ENOMEM
            | libc::EUSERS
            | libc::EMLINK
            | libc::ETOOMANYREFS => ErrorKind::Limit,
            libc::EAGAIN | libc::ESTALE => ErrorKind::Race,
            libc::EUCLEAN | libc::EBADMSG => ErrorKind::Corrupt,
            other => ErrorKind::Os(other),
        }
    }

    /// Returns a hint for the user, if there is one.
    pub fn advice(&self) -> Option<String> {
        match (self.errno, self.kind()) {
            (_, ErrorKind::Unsupported { since }) if !since.is_empty() => {
                Some(format!("{} needs Linux {since} or later", self.call))
            }
            (libc::EPERM | libc::EACCES, _) => {
                Some("run as root, with all capabilities and outside of another container".into())
            }
            (libc::ENOSPC | libc::EDQUOT, _) if self.call != "clone3" => {
                Some("free some space, or raise the quota".into())
            }
            (libc::ENOSPC, _) => {
                Some("raise the limits under /proc/sys/user, or remove containers".into())
            }
            (libc::EAGAIN, ErrorKind::Limit) => {
                Some("raise the limit of processes (ulimit -u, pids.max), or end some".into())
            }
            (libc::EMFILE, _) => Some("raise the limit of open files (ulimit -n)".into()),
            (libc::ENFILE, _) => Some("raise fs.file-max".into()),
            _ => None,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({}): {}", self.call, self.arguments, describe(self.errno))?;
        if self.note.is_empty() { Ok(()) } else { write!(f, ", {}", self.note) }
    }
}

impl std::error::Error for CallError {}

impl From<&CallError> for std::io::Error {
    fn from(error: &CallError) -> Self {
        Self::from_raw_os_error(error.errno)
    }
}

/// Adds call and arguments to the bare number that the thin layer returns.
pub(crate) trait Explain<T> {
    /// `arguments` is only evaluated when the call failed.
    fn explain(self, call: &'static str, arguments: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Explain<T> for std::result::Result<T, Errno> {
    fn explain(self, call: &'static str, arguments: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|errno| CallError::new(call, arguments(), errno.raw_os_error()))
    }
}

impl<T> Explain<T> for std::io::Result<T> {
    fn explain(self, call: &'static str, arguments: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| CallError::new(call, arguments(), e.raw_os_error().unwrap_or(libc::EIO)))
    }
}

/// `No such file or directory (ENOENT)`.
pub fn describe(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    let text = text.split(" (os error").next().unwrap_or("unknown error");
    match name(errno) {
        Some(name) => format!("{text} ({name})"),
        None => format!("{text} ({errno})"),
    }
}

macro_rules! names {
    ($($name:ident)*) => {
        /// The symbol of an error number, such as `ENOENT`.
        pub fn name(errno: i32) -> Option<&'static str> {
            match errno {
                $(libc::$name => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

names! {
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT
    ENOTBLK EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG
    ENOSPC ESPIPE EROFS EMLINK EPIPE EDOM ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY
    ELOOP ENOMSG EIDRM ENODATA ETIME ENONET ENOLINK EPROTO EBADMSG EOVERFLOW EILSEQ EUSERS
    ENOTSOCK EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT ESOCKTNOSUPPORT
    EOPNOTSUPP EPFNOSUPPORT EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN ENETUNREACH ENETRESET
    ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ESHUTDOWN ETOOMANYREFS ETIMEDOUT ECONNREFUSED
    EHOSTDOWN EHOSTUNREACH EALREADY EINPROGRESS ESTALE EUCLEAN EDQUOT ENOMEDIUM EMEDIUMTYPE
    ECANCELED ENOKEY EKEYEXPIRED EKEYREVOKED EKEYREJECTED EOWNERDEAD ENOTRECOVERABLE
}

/// The first kernel with a call, for messages about those that not every supported kernel has.
fn since(call: &str) -> &'static str {
    match call {
        "open_tree" | "move_mount" | "fsopen" | "fsconfig" | "fsmount" => "5.2",
        "pidfd_open" | "clone3" => "5.3",
        "openat2" | "pidfd_getfd" => "5.6",
        "mount_setattr" => "5.12",
        "ioctl(PIDFD_GET_USER_NAMESPACE)" | "ioctl(PIDFD_GET_NAMESPACE)" => "6.11",
        "ioctl(PIDFD_GET_INFO)" => "6.13",
        "open_tree_attr" | "ioctl(PIDFD_GET_INFO, EXIT)" => "6.15",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_call_arguments_and_cause() {
        let error = CallError::new("openat2", "5, \"etc/passwd\", RESOLVE_IN_ROOT".into(), 2);
        assert_eq!(
            error.to_string(),
            "openat2(5, \"etc/passwd\", RESOLVE_IN_ROOT): No such file or directory (ENOENT)"
        );
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn missing_call_names_the_kernel_that_has_it() {
        let error = CallError::new("mount_setattr", String::new(), libc::ENOSYS);
        assert_eq!(error.kind(), ErrorKind::Unsupported { since: "5.12" });
        assert_eq!(error.advice().as_deref(), Some("mount_setattr needs Linux 5.12 or later"));
    }

    #[test]
    fn full_table_of_processes_is_a_limit() {
        let error = CallError::new("clone3", String::new(), libc::EAGAIN);
        assert_eq!(error.kind(), ErrorKind::Limit);
        assert!(error.advice().is_some_and(|advice| advice.contains("pids.max")));
        let error = CallError::new("openat2", String::new(), libc::EAGAIN);
        assert_eq!((error.kind(), error.advice()), (ErrorKind::Race, None));
    }

    #[test]
    fn unknown_number_is_shown_as_number() {
        assert!(describe(4095).ends_with("(4095)"), "{}", describe(4095));
    }
}
