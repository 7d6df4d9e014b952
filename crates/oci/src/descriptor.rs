//! Copies of descriptors.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::{Error, Result};

pub(crate) fn clone_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(Error::file("duplicate", "a descriptor"))
}
