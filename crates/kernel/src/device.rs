//! Numbers of file systems that have no device (`st_dev`).
//!
//! Programs compare `st_dev` and `st_ino` to find whether two names or descriptors are one file: SQLite for its
//! locks, tail(1), mail servers, editors. A file system that is mounted anew for the same processes therefore needs
//! its earlier number. The kernel gives a new file system the lowest free minor number of major 0, and no call
//! chooses one. [`Reserved`] occupies a number, and each free one below, by empty file systems of the kernel's
//! simplest type (ramfs).
//!
//! Limit: other mounts of the host take and free numbers at any time. The caller compares the number that its mount
//! has.

use std::cmp::Ordering;
use std::os::fd::{AsFd, OwnedFd};

use crate::error::{Explain, Result};
use crate::mount::{FsContext, MountAttr};

/// LIMIT: free numbers below a reserved one. Each takes some 20 us to occupy.
const FREE_BELOW_MAX: usize = 64;

/// A number of a file system that the next new file system may have.
#[derive(Debug)]
pub struct Reserved {
    device: u64,
    below: Vec<OwnedFd>,
    own: Option<OwnedFd>,
}

impl Reserved {
    /// Reserves a number, `st_dev`. `None` if it is in use or is that of a device, or if more than
    /// [`FREE_BELOW_MAX`] numbers below it are free.
    pub fn new(device: u64) -> Result<Option<Self>> {
        if rustix::fs::major(device) != 0 || rustix::fs::minor(device) == 0 {
            return Ok(None);
        }
        let mut reserved = Self { device, below: Vec::new(), own: None };
        Ok(reserved.take()?.then_some(reserved))
    }

    /// Frees the number for the next new file system. Returns false if it is not reserved.
    pub fn release(&mut self) -> bool {
        self.own.take().is_some()
    }

    /// Reserves the number again, if another file system has taken another one instead. Returns false if it is in
    /// use.
    pub fn take(&mut self) -> Result<bool> {
        loop {
            let placeholder = FsContext::open("ramfs")?.create(MountAttr::empty())?;
            let number = rustix::fs::minor(device_of(&placeholder)?);
            match number.cmp(&rustix::fs::minor(self.device)) {
                Ordering::Less if self.below.len() < FREE_BELOW_MAX => self.below.push(placeholder),
                Ordering::Less | Ordering::Greater => return Ok(false),
                Ordering::Equal => {
                    self.own = Some(placeholder);
                    return Ok(true);
                }
            }
        }
    }

    /// Whether a mount has the number.
    pub fn is_of(&self, mount: impl AsFd) -> Result<bool> {
        Ok(device_of(mount)? == self.device)
    }
}

fn device_of(mount: impl AsFd) -> Result<u64> {
    Ok(rustix::fs::fstat(mount).explain("fstat", || "a mount".into())?.st_dev)
}
