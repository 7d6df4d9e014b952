//! Admission: whoever wakes a container waits until there is memory for it, where somebody minds that.
//!
//! `dormouse daemon` listens at `RUN/gate.sock` (SOCK_SEQPACKET, 0600) and has an amount of memory for
//! all that is awake. Whoever is about to wake a container says its id there and waits for leave to do
//! so; meanwhile others are put to sleep. Callers of the container wait in the kernel's queues as ever.
//!
//! ```text
//! who wakes -> gate   ID
//! gate -> who wakes   wait      it is heard, and there is no room yet; said again every second
//!                     go        there is room
//! ```
//!
//! **The connection is the leave.** Closed by the one side, the container runs, or its wake has failed
//! or was killed; closed by the other, the daemon is gone. So nothing is left of either that anybody has
//! to clear away.
//!
//! **Without the daemon** a container is woken as if there were room: when none listens, when it ends
//! while somebody waits, and when it has been silent for too long. No container depends on it.
//!
//! ORDER: the lock of the container is not held meanwhile, so one that waits can be stopped and removed.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use dormouse_model::{Config, ContainerId, State};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recv, send, socket_with, sockopt,
};

use crate::disk::Lock;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::life::Look;

/// Name of the socket in the runtime directory.
const SOCKET: &str = "gate.sock";
/// How often one that waits is told that it is heard.
pub const TOLD_EVERY: Duration = Duration::from_secs(1);
/// How long the gate may be silent before nobody is taken to be there.
const SILENT_MAX: Duration = Duration::from_secs(5);
/// LIMIT: words of either side.
const WORD_BYTES_MAX: usize = 64;

/// What the gate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// There is no room yet.
    Wait,
    /// There is.
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

/// Leave to be awake, until this is dropped.
#[derive(Debug)]
pub(crate) struct Leave(#[expect(dead_code, reason = "held, not read")] OwnedFd);

/// A container whose lock is held and that may be woken.
pub(crate) struct Admitted {
    /// ORDER: let go of first: whoever minds the gate looks at the container then.
    pub(crate) lock: Lock,
    pub(crate) config: Config,
    pub(crate) look: Look,
    pub(crate) leave: Option<Leave>,
}

impl Engine {
    /// Takes the lock of a container and looks at it; where it sleeps, once there is room for it.
    pub(crate) fn lock_to_wake(&self, id: &ContainerId) -> Result<Admitted> {
        let look = |leave| -> Result<Admitted> {
            let lock = self.lock(id)?;
            let config = self.config(id)?;
            let look = self.look_locked(&config)?;
            Ok(Admitted { lock, config, look, leave })
        };
        // The answer comes while the rest is looked at.
        let may_sleep = self.asleep_dir(id).exists();
        let asked = may_sleep.then(|| ask(&self.places().run, id)).flatten();
        let found = look(None)?;
        let Some(gate) = asked.filter(|_| found.look.state == State::Asleep) else {
            return Ok(found);
        };
        if heard(&gate, RecvFlags::DONTWAIT) == Ok(Some(Answer::Go)) {
            return Ok(Admitted { leave: Some(Leave(gate)), ..found });
        }
        drop(found);
        look(wait(gate))
    }
}

/// Calls the gate, if there is one, for a container.
fn ask(run: &Path, id: &ContainerId) -> Option<OwnedFd> {
    let (address, _dir) = address(run).ok()?;
    let gate = socket(SocketFlags::empty()).ok()?;
    connect(&gate, &address).ok()?;
    sockopt::set_socket_timeout(&gate, sockopt::Timeout::Recv, Some(SILENT_MAX)).ok()?;
    send(&gate, id.as_str().as_bytes(), SendFlags::NOSIGNAL).ok()?;
    Some(gate)
}

/// Waits for leave; `None` when nobody is there any more.
fn wait(gate: OwnedFd) -> Option<Leave> {
    loop {
        match heard(&gate, RecvFlags::empty()) {
            Ok(Some(Answer::Go)) => return Some(Leave(gate)),
            Ok(Some(Answer::Wait)) | Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// What the gate says; `None` where it is gone, or says what nobody understands.
fn heard(gate: &OwnedFd, flags: RecvFlags) -> rustix::io::Result<Option<Answer>> {
    let mut word = [0; WORD_BYTES_MAX];
    let (n, _) = recv(gate, &mut word, flags)?;
    Ok([Answer::Wait, Answer::Go].into_iter().find(|answer| word[..n] == *answer.word()))
}

fn socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The gate's address, as long as the directory is open: a name of 108 bytes at most fits into one.
fn address(run: &Path) -> rustix::io::Result<(SocketAddrUnix, OwnedFd)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(run, flags, Mode::empty())?;
    let short = format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd());
    Ok((SocketAddrUnix::new(short)?, dir))
}

/// The gate, for who minds it: one per runtime directory, under a lock of the caller's.
#[derive(Debug)]
pub struct Gate {
    listener: OwnedFd,
    dir: OwnedFd,
}

impl std::os::fd::AsFd for Gate {
    /// Readable when somebody has come.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Gate {
    /// Opens it.
    pub fn open(engine: &Engine) -> Result<Self> {
        let run = &engine.places().run;
        let open = || -> rustix::io::Result<Self> {
            let (address, dir) = address(run)?;
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

    /// Somebody who has come.
    pub fn accept(&self) -> Option<Asker> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let sock = rustix::net::accept_with(&self.listener, flags).ok()?;
        let peer = sockopt::socket_peercred(&sock).ok()?;
        peer.uid.is_root().then_some(Asker(sock))
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // One that is killed leaves it, and nobody answers there.
        let _ = rustix::fs::unlinkat(&self.dir, SOCKET, rustix::fs::AtFlags::empty());
    }
}

/// Somebody at the gate.
#[derive(Debug)]
pub struct Asker(OwnedFd);

/// What is heard of somebody at the gate.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing new.
    Nothing,
    /// It is about to wake this container.
    Wakes(ContainerId),
    /// It is gone.
    Gone,
}

impl std::os::fd::AsFd for Asker {
    /// Readable when it says something or is gone.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Asker {
    /// Hears it; never waits.
    pub fn hear(&self) -> Heard {
        let mut bytes = [0; WORD_BYTES_MAX];
        match recv(&self.0, &mut bytes, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
            Ok((n, _)) if n > 0 => {
                let id = std::str::from_utf8(&bytes[..n]).ok().and_then(|id| id.parse().ok());
                id.map_or(Heard::Gone, Heard::Wakes)
            }
            _ => Heard::Gone,
        }
    }

    /// Tells it; one that is gone is heard of as that.
    pub fn tell(&self, answer: Answer) {
        let _ = send(&self.0, answer.word(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
