//! Helper processes of the keeper, and their work.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_launch::protocol::Id;
use dormouse_launch::wire;
use rustix::net::SendFlags;

/// A wake that lasts longer does not count among the errands at once: it may wait for memory, or be blocked by a file
/// system that does not answer.
const LONG_WAKE: Duration = Duration::from_secs(10);
/// The same for settling, of a large container or on a busy disk.
const LONG_SETTLE: Duration = Duration::from_secs(1);
/// Idle time before the keeper, or a waker or settler that is not needed, exits.
pub(crate) const IDLE: Duration = Duration::from_secs(1);
/// The same for a runner: people and their programs call commands every few seconds.
const RUNNER_IDLE: Duration = Duration::from_secs(60);

/// A job of a helper process for a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errand {
    Settle(Id),
    Wake { id: Id, why: Reason, is_second: bool },
}

impl Errand {
    pub(crate) fn wake(id: Id, why: Reason) -> Self {
        Self::Wake { id, why, is_second: false }
    }

    /// The kind of the process that does it.
    pub(crate) fn by(self) -> HandKind {
        match self {
            Self::Settle(_) => HandKind::Settler,
            Self::Wake { .. } => HandKind::Waker,
        }
    }
}

/// A job in progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub(crate) errand: Errand,
    pub(crate) since: Instant,
    /// The container is settled and waits for its restart: no work is done.
    pub(crate) waits: bool,
}

/// Reason a container is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Called,
    Timer,
}

impl Reason {
    /// The word behind the id.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Called => "called",
            Self::Timer => "timer",
        }
    }
}

/// A process that wakes or settles containers, or executes commands, one after the other, on request.
#[derive(Debug)]
pub(crate) struct Hand {
    pub(crate) pid: u32,
    pub(crate) kind: HandKind,
    /// The other end of its standard input. The process exits when this is closed.
    pub(crate) requests: OwnedFd,
    /// When its last errand ended.
    pub(crate) rests_since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandKind {
    Waker,
    Settler,
    Nursery,
    Runner,
}

impl Hand {
    /// Sends its errand; returns false if the process has exited.
    pub(crate) fn request(&self, errand: Errand) -> bool {
        let line = match errand {
            Errand::Settle(id) => format!("{}\n", id.as_str()),
            Errand::Wake { id, why, .. } => format!("{} {}\n", id.as_str(), why.word()),
        };
        rustix::net::send(&self.requests, line.as_bytes(), SendFlags::NOSIGNAL).is_ok()
    }

    /// Gives the connection of a client to a runner; returns false if the process has exited.
    pub(crate) fn give(&self, client: &OwnedFd) -> bool {
        wire::send(&self.requests, b"\n", &[client.as_fd()], SendFlags::DONTWAIT).is_ok()
    }

    /// When it has rested for so long that it is not needed.
    pub(crate) fn rests_until(&self) -> Instant {
        let idle = if self.kind == HandKind::Runner { RUNNER_IDLE } else { IDLE };
        self.rests_since + idle
    }
}

/// The time from which an errand of a kind counts as one that lasts long.
pub(crate) fn long(kind: HandKind) -> Duration {
    match kind {
        HandKind::Waker => LONG_WAKE,
        HandKind::Settler | HandKind::Nursery | HandKind::Runner => LONG_SETTLE,
    }
}
