//! Files with leases, mapped files, and files with contents to be read.
//!
//! A file is identified by its device and inode.

use std::os::fd::OwnedFd;

/// An open file with a lease that another open file would break (fcntl(2), F_SETLEASE).
#[derive(Debug)]
pub(crate) struct Leased {
    /// Its object.
    pub(crate) index: usize,
    /// O_RDONLY, O_WRONLY or O_RDWR.
    pub(crate) mode: i32,
    pub(crate) mount: Option<u64>,
}

/// A file that was opened again for mappings.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) identity: (u64, u64),
    pub(crate) mount: Option<u64>,
    /// The mapping is shared and may become writable.
    pub(crate) writes: bool,
}

impl Mapped {
    /// Whether an open file permits the same mapping, no less and no more.
    pub(crate) fn is_by(&self, leased: &Leased, is_shared: bool) -> bool {
        let has_right_mode = match (is_shared, self.writes) {
            (false, _) => matches!(leased.mode, libc::O_RDONLY | libc::O_RDWR),
            (true, false) => leased.mode == libc::O_RDONLY,
            (true, true) => leased.mode == libc::O_RDWR,
        };
        has_right_mode && self.mount.is_some() && self.mount == leased.mount
    }
}

/// A file with contents to be read.
#[derive(Debug)]
pub(crate) struct Unread {
    /// The process through which it was found.
    pub(crate) pid: u32,
    /// Its name in a refusal.
    pub(crate) what: String,
    pub(crate) identity: (u64, u64),
    /// A descriptor with O_PATH is enough.
    pub(crate) open: OwnedFd,
}
