//! An open file of a process, and open files that are the same.
//!
//! An open file description is one object, however many descriptors of however many processes refer
//! to it. kcmp(2) decides among descriptors that look alike.

use std::cmp::Ordering;

use dormouse_kernel::call;
use rustix::fd::OwnedFd;
use rustix::fs::Stat;
use rustix::io::Errno;

use super::seen::Seen;

/// An open descriptor, inspected from outside.
pub(crate) struct Open<'p> {
    pub(crate) process: &'p Seen,
    /// The task that has the descriptor: the process, or a thread with a table to itself; by the host's id and the
    /// id inside.
    pub(crate) task: (u32, u32),
    pub(crate) number: u32,
    /// The target of `/proc/PID/fd/NUMBER`.
    pub(crate) link: String,
    /// `/proc/PID/fdinfo/NUMBER`.
    pub(crate) info: String,
    pub(crate) stat: Stat,
    /// A copy in this program: the same file description.
    pub(crate) copy: OwnedFd,
    /// The number that its object will have.
    pub(crate) index: usize,
    /// The network namespace of a socket, an object; `None` for the container's own.
    pub(crate) net: Option<usize>,
    /// `O_*` of the file description (F_GETFL).
    status: u32,
}

/// An open file before its object is known: the fields of [`Open`] that its opener has found.
pub(super) struct Look<'p> {
    pub(super) process: &'p Seen,
    pub(super) task: (u32, u32),
    pub(super) number: u32,
    pub(super) link: String,
    pub(super) info: String,
    pub(super) copy: OwnedFd,
}

impl<'p> Open<'p> {
    /// Inspects a copied descriptor. `index` and `net` as in the fields.
    pub(super) fn of(look: Look<'p>, index: usize, net: Option<usize>) -> Result<Self, Errno> {
        let Look { process, task, number, link, info, copy } = look;
        let stat = rustix::fs::fstat(&copy)?;
        let status = rustix::fs::fcntl_getfl(&copy)?.bits();
        Ok(Self { process, task, number, link, info, stat, copy, index, net, status })
    }

    /// A field of fdinfo.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ str| -> Option<usize> {
            line.strip_prefix(name)?.strip_prefix(':').map(|rest| line.len() - rest.len())
        };
        self.info.lines().find_map(|line| value(line).map(|at| line[at..].trim()))
    }

    /// A field of fdinfo that is an octal number; 0 if it is not there.
    pub(super) fn octal(&self, name: &str) -> u32 {
        self.field(name).and_then(|f| u32::from_str_radix(f, 8).ok()).unwrap_or(0)
    }

    /// `O_*` of the file description. O_CLOEXEC there is not the flag of the descriptor (FD_CLOEXEC): it
    /// shows that the file was opened with it, and never changes.
    pub(crate) fn flags(&self) -> u32 {
        self.status
    }

    pub(crate) fn offset(&self) -> u64 {
        self.field("pos").and_then(|f| f.parse().ok()).unwrap_or(0)
    }

    /// The properties by which it looks like another.
    pub(super) fn key(&self) -> Key {
        (self.stat.st_dev, self.stat.st_ino, self.flags(), self.offset())
    }
}

/// Properties that descriptors of the same file description share: device, inode, flags, offset.
pub(super) type Key = (u64, u64, u32, u64);

/// Open files that look alike: process, number, object. In the order of kcmp(2), so that one of many is
/// found with few looks.
#[derive(Default)]
pub(super) struct Alike(pub(super) Vec<(u32, u32, usize)>);

impl Alike {
    /// The object of an open file, or the place for it.
    pub(super) fn find(&self, pid: u32, number: u32) -> std::result::Result<usize, usize> {
        // A descriptor that was closed meanwhile is equal to none, wherever it is put.
        let order = |other: &(u32, u32, usize)| {
            call::compare_files((other.0, other.1), (pid, number)).unwrap_or(Ordering::Less)
        };
        self.0.binary_search_by(order).map(|at| self.0[at].2)
    }

    /// Adds an open file with its object.
    pub(super) fn add(&mut self, pid: u32, number: u32, index: usize) {
        if let Err(place) = self.find(pid, number) {
            self.0.insert(place, (pid, number, index));
        }
    }
}
