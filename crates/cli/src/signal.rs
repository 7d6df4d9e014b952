//! Signals as readable events.
//!
//! While a container is attached, signals to be forwarded are blocked and read from a signalfd(2).
//! So none can end this program at an arbitrary point with the terminal still raw; each is
//! forwarded or handled in the one loop that moves the bytes.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

pub(crate) const SIGHUP: i32 = Signal::SIGHUP as i32;
pub(crate) const SIGCONT: i32 = Signal::SIGCONT as i32;
pub(crate) const SIGWINCH: i32 = Signal::SIGWINCH as i32;
pub(crate) const SIGINT: i32 = Signal::SIGINT as i32;
pub(crate) const SIGTERM: i32 = Signal::SIGTERM as i32;

/// The signals of this process while a container is attached. Blocked until this is dropped.
#[derive(Debug)]
pub(crate) struct Signals {
    fd: SignalFd,
    before: SigSet,
}

impl Signals {
    /// Blocks the signals to be forwarded, including those of the terminal.
    pub(crate) fn take() -> Result<Self> {
        let set: SigSet = [
            Signal::SIGHUP,
            Signal::SIGINT,
            Signal::SIGQUIT,
            Signal::SIGTERM,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
            Signal::SIGCONT,
            Signal::SIGWINCH,
        ]
        .into_iter()
        .collect();
        let before = SigSet::thread_get_mask().context("cannot read the signal mask")?;
        set.thread_block().context("cannot block signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let fd = SignalFd::with_flags(&set, flags).context("cannot receive signals")?;
        Ok(Self { fd, before })
    }

    /// Returns the next signal, if there is one.
    pub(crate) fn next(&self) -> Option<i32> {
        self.fd.read_signal().ok().flatten().map(|info| info.ssi_signo as i32)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        while self.next().is_some() {} // late signals were meant for the container, which is gone
        let _ = self.before.thread_set_mask(); // as it was a moment ago: cannot fail
    }
}
