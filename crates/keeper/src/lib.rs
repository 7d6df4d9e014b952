//! The parent of all containers of a host.
//!
//! One keeper runs per runtime directory, started on demand ([`dormouse_launch::Keeper`]). It
//! clones processes from its own tiny memory (a clone copies the page tables of its parent: 0.04 ms
//! here, 6.5 ms from a large program), inside a mount namespace that holds one empty read-only
//! tmpfs, so that nothing of the host is ever below a container's root. It reaps them, writes how
//! they ended, holds terminals while nobody looks at them, keeps logs under their bound, and ends
//! by itself.
//!
//! It decides nothing: what a container is, the engine knows. It is one thread, one epoll, and the
//! tables in [`server`]; there are no locks. What it holds for a running container is an entry in a
//! table: children need no pidfd, and only a terminal is polled.
//!
//! Clones of one checkpoint may be born with memory that they share, from a process of its own (`template`).
//! What sleeping containers left here outlives it, in a process of its own ([`vault`]).
//! If it is killed, its children go on without it (no parent death signal); how they end is then
//! unknown to later commands, unless the kernel tells (PIDFD_GET_INFO, KERNEL(6.15)). A new keeper
//! can be started beside such orphans.
//!
//! Kernel facts relied on:
//! - clone3 with CLONE_INTO_CGROUP places without the RCU wait of writing to `cgroup.procs`.
//! - a procfs can't be mounted by a user namespace whose mount namespace shows none, therefore the
//!   keeper makes it ([`birth`]): KERNEL(6.17) by the `pidns` parameter, before by a helper.
//! - move_mount over `/` and chroot look at no other task, where pivot_root visits all of them; the
//!   root is then the namespace's own, so that nested user namespaces work (`current_chrooted`).

mod alarm;
pub mod birth;
mod call;
pub mod console;
mod custody;
mod fill;
mod init;
mod lot;
pub mod newborn;
mod program;
pub mod server;
mod sweep;
mod template;
pub mod tiny;
mod tree;
pub mod vault;

pub use call::close_from;

/// Copies of descriptors that this process was started with, from number `first` on. Those are
/// nobody's in this process: it neither closes nor uses them.
///
/// The error is the first number that is not open, and why.
pub fn inherited(
    first: u32,
    count: u32,
) -> Result<Vec<std::os::fd::OwnedFd>, (u32, rustix::io::Errno)> {
    let copy = |number: u32| {
        // SAFETY: a number that is not open is an error of the kernel's (EBADF), and the borrow
        // ends with this call.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number.cast_signed()) };
        rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|e| (number, e))
    };
    (first..first.saturating_add(count)).map(copy).collect()
}

/// A step of the keeper that failed, for whoever starts it or asks it.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct Failed {
    /// What it tried: the end of "cannot ...".
    pub step: &'static str,
    /// Why.
    pub source: rustix::io::Errno,
}

/// Names the step of a call that may fail.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, Failed>;
}

impl<T> Step<T> for Result<T, rustix::io::Errno> {
    fn step(self, step: &'static str) -> Result<T, Failed> {
        self.map_err(|source| Failed { step, source })
    }
}
