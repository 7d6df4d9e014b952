//! The caller's terminal (termios(3), ioctl_tty(2)).

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use rustix::stdio;
use rustix::termios::{self, OptionalActions, Termios, Winsize};

/// The caller's terminal in raw mode: every key goes to the container, ctrl-c too. Dropping
/// restores the terminal, also on errors and panics; signals cannot interrupt, see
/// [`crate::signal`].
#[derive(Debug)]
pub(crate) struct Raw {
    before: Termios,
}

impl Raw {
    /// Makes standard input raw; `None` if it is no terminal.
    pub(crate) fn enter() -> Result<Option<Self>> {
        let fd = stdio::stdin();
        if !termios::isatty(fd) {
            return Ok(None);
        }
        let before = termios::tcgetattr(fd).context("cannot read the terminal's settings")?;
        let raw = Self { before };
        raw.again()?;
        Ok(Some(raw))
    }

    /// Makes the terminal raw again, after a shell has used it in between (SIGCONT).
    pub(crate) fn again(&self) -> Result<()> {
        let mut raw = self.before.clone();
        raw.make_raw();
        termios::tcsetattr(stdio::stdin(), OptionalActions::Drain, &raw)
            .context("cannot set the terminal to raw mode")
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has hung up cannot be restored and need not be.
        let _ = termios::tcsetattr(stdio::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Returns the size of the caller's terminal, from the first standard stream that is one.
pub(crate) fn size() -> Option<Winsize> {
    let of = |fd: BorrowedFd| termios::tcgetwinsize(fd).ok().filter(|w| w.ws_col > 0);
    of(stdio::stdin()).or_else(|| of(stdio::stdout())).or_else(|| of(stdio::stderr()))
}

/// Gives a container's terminal the size of the caller's (SIGWINCH follows inside).
pub(crate) fn resize(master: impl AsFd) {
    if let Some(size) = size() {
        let _ = termios::tcsetwinsize(master, size); // the terminal may just have hung up
    }
}

/// Returns whether a descriptor is a terminal.
pub(crate) fn is_terminal(fd: impl AsFd) -> bool {
    termios::isatty(fd)
}
