//! The parent of all containers of a host.
//!
//! One keeper runs per runtime directory, started on demand ([`dormouse_launch::Keeper`]). The
//! keeper clones processes from its own tiny memory: a clone copies the page tables of its parent
//! (0.04 ms here, 6.5 ms from a large program). Its mount namespace holds one empty read-only
//! tmpfs, so that nothing of the host is ever below a container's root. The keeper reaps the
//! processes, records their exit status, holds terminals while no client is attached, keeps logs
//! under their bound, and exits by itself when it is idle. Separate processes append the output of
//! containers to their logs (`reader`).
//!
//! The keeper takes no decisions: only the engine knows what a container is. One thread runs one
//! epoll loop over the tables in [`server`], without locks. A running container is an entry in a
//! table: children need no pidfd, and only a terminal is polled.
//!
//! Clones of one checkpoint can share memory from the start, which they get from a separate process
//! (`template`). Held descriptors of sleeping containers outlive the keeper in a separate process
//! ([`vault`]). If the keeper is killed, its children continue without it (no parent death signal).
//! Their exit status is then unknown to later commands, unless the kernel reports it
//! (PIDFD_GET_INFO, KERNEL(6.15)). A new keeper can be started beside such orphans.
//!
//! Kernel facts relied on:
//! - clone3 with CLONE_INTO_CGROUP places a process without the RCU wait of a write to
//!   `cgroup.procs`.
//! - A procfs cannot be mounted in a user namespace whose mount namespace shows none, therefore the
//!   keeper makes it ([`birth`]): KERNEL(6.17) by the `pidns` parameter, before by a helper
//!   process.
//! - move_mount over `/` and chroot visit no other task, while pivot_root visits all of them. The
//!   root is then the namespace's own, so nested user namespaces work (`current_chrooted`).

mod adopted;
mod alarm;
pub mod birth;
mod call;
pub mod commands;
pub mod console;
mod custody;
mod exit;
mod fill;
mod hand;
mod heritage;
mod init;
pub mod listener;
mod lot;
pub mod newborn;
mod output;
mod owner;
mod program;
mod reader;
pub mod server;
mod setting;
mod starts;
mod sweep;
mod template;
pub mod tiny;
mod tree;
pub mod vault;

pub use call::close_from;

/// Copies of descriptors that this process was started with, from number `first` on. No code in
/// this process owns them: it neither closes nor uses them.
///
/// The error is the first number that is not open, and the cause.
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

/// A failed step of the keeper, for its clients.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct Failed {
    /// The step: the end of "cannot ...".
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
