//! Commands that clients have executed by runners (`dormouse_entry`).

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_entry::Answer;
use dormouse_launch::wire;
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags, sockopt};
use rustix::process::{Pid, PidfdFlags};

/// Where commands arrive, and who executes them.
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

/// Reports that a runner, a child of this process, has the command of a client.
pub(crate) fn taken(client: &OwnedFd, runner: u32) {
    let pidfd = i32::try_from(runner).ok().and_then(Pid::from_raw);
    let pidfd = pidfd.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    if let Some(Ok(pidfd)) = pidfd {
        // A client that was killed needs no answer.
        let _ = wire::send(client, &Answer::TAKEN, &[pidfd.as_fd()], SendFlags::DONTWAIT);
    }
}
