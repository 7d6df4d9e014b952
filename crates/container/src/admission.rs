//! Admission control: a wake waits until there is memory for the container, if the daemon runs.
//!
//! `dormouse daemon` listens at `RUN/gate.sock` (SOCK_SEQPACKET, 0600) and has a memory budget for
//! all awake containers. A process that is about to wake a container sends the container's id there
//! and waits for a grant; meanwhile the daemon suspends idle containers. Clients of the container
//! wait in the kernel's queues as usual.
//!
//! ```text waker -> gate   ID gate -> waker   wait      received, no memory yet; repeated every
//! second
//!                go        granted
//! ```
//!
//! **The grant lasts as long as the connection.** If the waker closes it, the container runs, or
//! its wake failed or was killed. If the gate closes it, the daemon has exited. Neither leaves
//! state that must be cleared.
//!
//! **Without the daemon** a container is woken as if there were memory: if nothing listens, if the
//! daemon exits during the wait, or if it has been silent for too long. No container depends on the
//! daemon.
//!
//! ORDER: the container's lock is not held meanwhile, so a waiting container can be stopped and
//! removed.
//!
//! Uses `ground`, `state` and `holder`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use dormouse_model::{Config, ContainerId, State};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recv, send, socket_with, sockopt,
};

use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::holder;
use crate::place::Places;
use crate::state::{self, Observed};

/// Name of the socket in the runtime directory.
const SOCKET: &str = "gate.sock";

/// Interval of the `wait` messages to a waiting waker.
pub const WAIT_INTERVAL: Duration = Duration::from_secs(1);

/// How long the gate may be silent until the daemon counts as gone.
const SILENT_MAX: Duration = Duration::from_secs(5);

/// LIMIT: length of a message in either direction.
const WORD_BYTES_MAX: usize = 64;

/// Answer of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// No memory yet.
    Wait,
    /// Granted.
    Go,
}

impl Answer {
    fn word(self) -> &'static [u8] {
        match self {
            Self::Wait => b"wait",
            Self::Go => b"go",
        }
    }
}

/// Permission to be awake, until dropped.
#[derive(Debug)]
pub(crate) struct Grant(#[expect(dead_code, reason = "held, not read")] OwnedFd);

/// A container, locked and admitted to be woken.
pub(crate) struct Admitted {
    /// ORDER: dropped first: the daemon looks at the container when `grant` is closed.
    pub(crate) lock: Lock,
    pub(crate) config: Config,
    pub(crate) observed: Observed,
    pub(crate) grant: Option<Grant>,
}

/// Locks a container and reads its state.
pub(crate) fn lock(ground: &Ground, id: &ContainerId, grant: Option<Grant>) -> Result<Admitted> {
    admit(ground, id, ground.lock(id)?, grant)
}

/// Locks a container that is to be ended in any case, and reads its state ([`holder::lock_to_end`]).
pub(crate) fn lock_to_end(ground: &Ground, id: &ContainerId) -> Result<Admitted> {
    admit(ground, id, holder::lock_to_end(ground, id)?, None)
}

fn admit(ground: &Ground, id: &ContainerId, lock: Lock, grant: Option<Grant>) -> Result<Admitted> {
    let config = ground.config(id)?;
    let observed = state::observe_locked(ground, &config)?;
    Ok(Admitted { lock, config, observed, grant })
}

/// Locks a container and reads its state; if it is asleep, after a grant.
pub(crate) fn lock_to_wake(ground: &Ground, id: &ContainerId) -> Result<Admitted> {
    lock_to_wake_by(ground, id, None)
}

/// Like [`lock_to_wake`], with a time until which a grant is waited for. The lock is waited for as long as a wake
/// may last, if that is longer.
///
/// Errors: [`Error::NotAdmitted`] or [`Error::Held`] when the time has passed.
pub(crate) fn lock_to_wake_by(
    ground: &Ground,
    id: &ContainerId,
    until: Option<Instant>,
) -> Result<Admitted> {
    // The answer arrives while the state is read.
    let may_sleep = ground.asleep_dir(id).exists();
    let requested = may_sleep.then(|| request(&ground.places.run, id)).flatten();
    let take = || match until {
        None => ground.lock(id),
        Some(until) => {
            holder::lock_within(ground, id, until.saturating_duration_since(Instant::now()))
        }
    };
    let found = admit(ground, id, take()?, None)?;
    let Some(gate) = requested.filter(|_| found.observed.state == State::Asleep) else {
        return Ok(found);
    };
    if receive(&gate, RecvFlags::DONTWAIT) == Ok(Some(Answer::Go)) {
        return Ok(Admitted { grant: Some(Grant(gate)), ..found });
    }
    let name = found.config.name.to_string();
    drop(found);
    let grant = wait(gate, until).map_err(|TooLate| Error::NotAdmitted(name))?;
    admit(ground, id, take()?, grant)
}

/// No grant has arrived in time.
struct TooLate;

/// Connects to the gate, if there is one, and requests a grant for a container.
fn request(run: &Path, id: &ContainerId) -> Option<OwnedFd> {
    let (address, _dir) = address(run, SOCKET).ok()?;
    let gate = socket(SocketFlags::empty()).ok()?;
    connect(&gate, &address).ok()?;
    sockopt::set_socket_timeout(&gate, sockopt::Timeout::Recv, Some(SILENT_MAX)).ok()?;
    send(&gate, id.as_str().as_bytes(), SendFlags::NOSIGNAL).ok()?;
    Some(gate)
}

/// Waits for a grant until a time; `None` if the daemon is gone.
fn wait(gate: OwnedFd, until: Option<Instant>) -> std::result::Result<Option<Grant>, TooLate> {
    loop {
        if let Some(until) = until {
            // A timeout of zero would be none (socket(7)).
            let left = until.saturating_duration_since(Instant::now());
            let left = left.clamp(Duration::from_millis(1), SILENT_MAX);
            let _ = sockopt::set_socket_timeout(&gate, sockopt::Timeout::Recv, Some(left));
        }
        let is_late = || until.is_some_and(|until| Instant::now() >= until);
        match receive(&gate, RecvFlags::empty()) {
            Ok(Some(Answer::Go)) => return Ok(Some(Grant(gate))),
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) if is_late() => return Err(TooLate),
            Ok(Some(Answer::Wait)) | Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return Ok(None),
        }
    }
}

/// Receives an answer; `None` if the gate is closed, or the message is unknown.
fn receive(gate: &OwnedFd, flags: RecvFlags) -> rustix::io::Result<Option<Answer>> {
    let mut word = [0; WORD_BYTES_MAX];
    let (n, _) = recv(gate, &mut word, flags)?;
    Ok([Answer::Wait, Answer::Go].into_iter().find(|answer| word[..n] == *answer.word()))
}

fn socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The address of a socket in the runtime directory, valid while the directory is open. A path of at most 108 bytes
/// fits into a socket address.
pub(crate) fn address(run: &Path, name: &str) -> rustix::io::Result<(SocketAddrUnix, OwnedFd)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(run, flags, Mode::empty())?;
    let short = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    Ok((SocketAddrUnix::new(short)?, dir))
}

/// Listening side of the gate: one per runtime directory, under a lock of the caller's.
#[derive(Debug)]
pub struct Gate {
    listener: OwnedFd,
    dir: OwnedFd,
}

impl std::os::fd::AsFd for Gate {
    /// Readable when a waker has connected.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Gate {
    /// Binds and listens.
    pub fn open(places: &Places) -> Result<Self> {
        let run = &places.run;
        let open = || -> rustix::io::Result<Self> {
            let (address, dir) = address(run, SOCKET)?;
            match rustix::fs::unlinkat(&dir, SOCKET, rustix::fs::AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(e),
            }
            let listener = socket(SocketFlags::NONBLOCK)?;
            let before = rustix::process::umask(Mode::from_raw_mode(0o177));
            let bound = bind(&listener, &address);
            rustix::process::umask(before);
            bound?;
            listen(&listener, 1024)?;
            Ok(Self { listener, dir })
        };
        open().map_err(|e| Error::file("cannot listen at", run.join(SOCKET))(e.into()))
    }

    /// Accepts a waker; `None` if none has connected.
    pub fn accept(&self) -> Option<Waker> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let sock = rustix::net::accept_with(&self.listener, flags).ok()?;
        let peer = sockopt::socket_peercred(&sock).ok()?;
        peer.uid.is_root().then_some(Waker(sock))
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A killed daemon leaves the socket file, and connecting to it is refused.
        let _ = rustix::fs::unlinkat(&self.dir, SOCKET, rustix::fs::AtFlags::empty());
    }
}

/// A waker, connected to the gate.
#[derive(Debug)]
pub struct Waker(OwnedFd);

/// Message or event from a waker.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// Nothing new.
    Nothing,
    /// The waker is about to wake this container.
    Wakes(ContainerId),
    /// The waker has closed the connection.
    Gone,
}

impl std::os::fd::AsFd for Waker {
    /// Readable when the waker has sent a message or closed the connection.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Waker {
    /// Receives without blocking.
    pub fn receive(&self) -> Received {
        let mut bytes = [0; WORD_BYTES_MAX];
        match recv(&self.0, &mut bytes, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
            Ok((n, _)) if n > 0 => {
                let id = std::str::from_utf8(&bytes[..n]).ok().and_then(|id| id.parse().ok());
                id.map_or(Received::Gone, Received::Wakes)
            }
            _ => Received::Gone,
        }
    }

    /// Sends an answer. A closed connection is reported by the next [`Waker::receive`].
    pub fn send(&self, answer: Answer) {
        let _ =
            rustix::net::send(&self.0, answer.word(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
