//! A second process that takes back what a save has changed in connections, if the saving process is killed.
//!
//! A connection is read in repair mode, and its packets are dropped meanwhile ([`super::tcp`]). Both outlast the
//! process that began them: a connection would not work any more. So a second process gets each socket before it is
//! changed. When the saving process has ended without a last word, the second one puts everything back, unless the
//! container's processes end, too: then the checkpoint is complete, and the connections stay as they are until it is
//! restored.
//!
//! Connections from the queue of a listener are put back by the second process in any case: while that happens they
//! do not exist, and a kill of the saving process would lose them.
//!
//! LIMIT: connections that were taken out of a queue in the last moment before the kill are reset. A kill of both
//! processes leaves everything as it is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use dormouse_kernel::{Errno, pidfd, proc};
use dormouse_launch::wire;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};

/// Sockets in one message.
const SOCKETS: usize = 200;
const MESSAGE_BYTES: usize = 16 << 10;

/// What the second process is sent. Descriptors come beside each message.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// A pidfd of the saving process. The first process of the container, by the host's id.
    Begin { init: u32 },
    /// A network namespace, and whose packets are dropped in it: the id of the container.
    Stack { id: String },
    /// Connections before repair mode, each with SO_REUSEADDR.
    Connections { reuse: Vec<i32> },
    /// A listener, and connections that were taken out of its queue.
    Taken,
    /// Everything is to be put back now. The saving process has closed the connections that it has taken.
    PutBack,
}

/// What was changed in one network namespace.
#[derive(Debug)]
pub(super) struct Changed {
    pub(super) netns: OwnedFd,
    pub(super) id: String,
    pub(super) connections: Vec<(OwnedFd, i32)>,
    pub(super) taken: Vec<(OwnedFd, Vec<OwnedFd>)>,
}

/// The second process, for the first one. Without it (where it cannot be started) a save goes on as well.
#[derive(Debug, Default)]
pub(super) struct Rescue(Option<(OwnedFd, Child)>);

impl Rescue {
    /// Starts this program with these arguments; it calls [`wait`] with its standard input.
    pub(super) fn start(arguments: &[&str], init: u32) -> Self {
        if arguments.is_empty() {
            return Self::default();
        }
        let started = || -> std::io::Result<(OwnedFd, Child)> {
            let flags = SocketFlags::CLOEXEC;
            let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            let mut command = Command::new("/proc/self/exe");
            command.args(arguments).env_clear().current_dir("/").process_group(0);
            command.stdin(other).stdout(Stdio::null()).stderr(Stdio::null());
            let process = command.spawn()?;
            // nft(8), which this process starts next, inherits the socket: it may outlive this process and add drop
            // rules. The second process sees the end of the connection when both have ended.
            rustix::io::fcntl_setfd(&own, FdFlags::empty())?;
            Ok((own, process))
        };
        let new = Self(started().ok());
        if let Ok(saver) = pidfd::open(std::process::id()) {
            new.send(&Message::Begin { init }, &[saver.as_fd()]);
        }
        new
    }

    pub(super) fn is_there(&self) -> bool {
        self.0.is_some()
    }

    pub(super) fn stack(&self, netns: &OwnedFd, id: &str) {
        self.send(&Message::Stack { id: id.to_owned() }, &[netns.as_fd()]);
    }

    pub(super) fn connections(&self, all: &[(BorrowedFd<'_>, i32)]) {
        for some in all.chunks(SOCKETS) {
            let (sockets, reuse): (Vec<_>, Vec<_>) = some.iter().copied().unzip();
            self.send(&Message::Connections { reuse }, &sockets);
        }
    }

    pub(super) fn taken(&self, listener: &OwnedFd, sockets: &[OwnedFd]) {
        for some in sockets.chunks(SOCKETS) {
            let all = std::iter::once(listener).chain(some).map(AsFd::as_fd);
            self.send(&Message::Taken, &all.collect::<Vec<_>>());
        }
    }

    fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) {
        let Some((socket, _)) = &self.0 else { return };
        let Ok(text) = serde_json::to_vec(message) else { return };
        // A second process that has ended rescues nothing, and a save does not depend on it.
        let _ = wire::send(socket, &text, fds, SendFlags::empty());
    }

    /// Makes the second process put everything back. Returns whether it has.
    pub(super) fn put_back(&mut self) -> bool {
        self.send(&Message::PutBack, &[]);
        let Some((socket, mut process)) = self.0.take() else { return false };
        drop(socket);
        process.wait().is_ok_and(|status| status.success())
    }

    /// Ends the second process: it has no socket open any more when this returns.
    pub(super) fn end(&mut self) {
        if let Some((_, mut process)) = self.0.take() {
            // It may have ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Rescue {
    fn drop(&mut self) {
        self.end();
    }
}

/// In the second process: waits until the saving process has ended without an end of this one, or needs it. Returns
/// what that has left changed, and whether the processes of the container end as well.
pub(super) fn wait(socket: &OwnedFd) -> Result<(Vec<Changed>, bool), Errno> {
    let mut saver = None;
    let mut first = 0;
    let mut all: Vec<Changed> = Vec::new();
    let mut bytes = vec![0; MESSAGE_BYTES];
    loop {
        let mut fds = Vec::new();
        let length = wire::receive(socket, &mut bytes, RecvFlags::empty(), |fd| fds.push(fd))?;
        if length == 0 {
            break;
        }
        let message = serde_json::from_slice(&bytes[..length]).map_err(|_| Errno::BADMSG)?;
        let mut fds = fds.into_iter();
        let last = all.last_mut();
        match (message, last) {
            (Message::Begin { init }, _) => (saver, first) = (fds.next(), init),
            (Message::Stack { id }, _) => {
                let netns = fds.next().ok_or(Errno::BADMSG)?;
                all.push(Changed { netns, id, connections: Vec::new(), taken: Vec::new() });
            }
            (Message::Connections { reuse }, Some(last)) => {
                last.connections.extend(fds.zip(reuse));
            }
            (Message::Taken, Some(last)) => {
                let listener = fds.next().ok_or(Errno::BADMSG)?;
                last.taken.push((listener, fds.collect()));
            }
            (Message::PutBack, _) => return Ok((all, false)),
            (Message::Connections { .. } | Message::Taken, None) => return Err(Errno::BADMSG),
        }
    }
    // ORDER: all its sockets are closed then, not this one alone: one of them would keep an address.
    let saver = saver.ok_or(Errno::BADMSG)?;
    pidfd::wait(saver, None).map_err(|e| Errno::from_raw_os_error(e.errno()))?;
    let stay = proc::fields(first).map_or(true, |fields| proc::is_ending(first, &fields));
    Ok((all, stay))
}
