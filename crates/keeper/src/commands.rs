//! Commands that clients have executed by runners (`dormouse_entry`).

use std::ffi::CString;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SocketFlags, sockopt};

/// The socket at which commands arrive, and the program that executes them.
#[derive(Debug)]
pub struct Commands {
    /// The listening socket.
    pub listener: OwnedFd,
    /// Program and arguments of a runner.
    pub program: Vec<CString>,
    /// Runners at once.
    pub most: usize,
}

impl Commands {
    /// Accepts a client. `None` for one that is not the host's root.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        let client = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC)?;
        let peer = sockopt::socket_peercred(&client);
        Ok(peer.is_ok_and(|peer| peer.uid.is_root()).then_some(client))
    }
}
