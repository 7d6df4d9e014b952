//! Buffer sizes of a socket that are set for a while.
//!
//! Packets that a socket has received are sent to it again. A program may have made its buffers smaller since,
//! and the same bytes in other packets may take more space.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};

use crate::repair::BUFFER_LOCK;

/// Bit of [`Sizes::locked`]: the send buffer.
pub const SEND: i32 = 1;
/// Bit of [`Sizes::locked`]: the receive buffer.
pub const RECEIVE: i32 = 2;

/// The sizes of the buffers of a socket, as the kernel counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The send buffer (SO_SNDBUF).
    pub send_bytes: i32,
    /// The receive buffer (SO_RCVBUF).
    pub receive_bytes: i32,
    /// The buffers with a size that the program has set (SO_BUF_LOCK); the kernel adjusts the others.
    pub locked: i32,
}

/// The buffers of a socket while their sizes are changed.
#[derive(Debug)]
pub struct Buffers<'s> {
    socket: &'s OwnedFd,
    before: Sizes,
    /// `None` after a failed change.
    now: Option<Sizes>,
}

impl<'s> Buffers<'s> {
    /// Those of a socket, unchanged.
    pub fn of(socket: &'s OwnedFd) -> Result<Self, Errno> {
        let option = |name| call::int_option(socket.as_fd(), libc::SOL_SOCKET, name);
        let before = Sizes {
            send_bytes: option(libc::SO_SNDBUF)?,
            receive_bytes: option(libc::SO_RCVBUF)?,
            locked: option(BUFFER_LOCK)?,
        };
        Ok(Self { socket, before, now: Some(before) })
    }

    /// The sizes before any change.
    pub fn before(&self) -> Sizes {
        self.before
    }

    /// Sets other sizes, also above the limits of the host (SO_RCVBUFFORCE).
    pub fn set(&mut self, wanted: Sizes) -> Result<(), Errno> {
        if self.now == Some(wanted) {
            return Ok(());
        }
        // ORDER: before the calls. After a failed one, `give_back` sets all sizes again.
        let was = self.now.take();
        let differs = |of: fn(&Sizes) -> i32| was.as_ref().is_none_or(|was| of(was) != of(&wanted));
        let set =
            |name, value| call::set_int_option(self.socket.as_fd(), libc::SOL_SOCKET, name, value);
        // socket(7): the kernel doubles the value that is set, and marks it as set by the program.
        if differs(|sizes| sizes.send_bytes) {
            set(libc::SO_SNDBUFFORCE, wanted.send_bytes / 2)?;
        }
        if differs(|sizes| sizes.receive_bytes) {
            set(libc::SO_RCVBUFFORCE, wanted.receive_bytes / 2)?;
        }
        set(BUFFER_LOCK, wanted.locked)?;
        self.now = Some(wanted);
        Ok(())
    }

    /// Sets the sizes that the socket had.
    pub fn give_back(mut self) -> Result<(), Errno> {
        self.set(self.before)
    }
}
