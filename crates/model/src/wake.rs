//! What wakes a container.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What wakes a container that sleeps or is drowsy. Its operator does so in any case (`exec`, `attach`,
/// `start`, a key at its terminal).
///
/// What does not wake it is kept by the kernel until it is awake: who connects waits in the queue of the
/// socket, bytes wait in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WakeOn {
    /// Somebody new: a connection to a socket that listens, a datagram.
    pub call: bool,
    /// A connection that is open: bytes, room for more to send, its end.
    pub data: bool,
    /// Files that it watches (inotify(7), fanotify(7)).
    pub file: bool,
    /// A timer of its own, or a wait of which the time is over.
    pub timer: WakeOnTimer,
}

/// Which timers wake a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WakeOnTimer {
    /// None.
    No,
    /// Each, in its time.
    #[default]
    InTime,
    /// Not before it has slept for so many milliseconds: whatever rings until then rings together.
    AfterMs(u64),
}

impl WakeOn {
    /// Nothing but its operator.
    pub const NOTHING: Self =
        Self { call: false, data: false, file: false, timer: WakeOnTimer::No };

    /// Whether this is what a container has of which nobody has said anything.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for WakeOn {
    fn default() -> Self {
        Self { call: true, data: true, file: true, timer: WakeOnTimer::InTime }
    }
}

impl WakeOnTimer {
    /// After how long a sleep is over whose first timer rings then; `None` where no timer ends it.
    pub fn ends_after(self, ring: Duration) -> Option<Duration> {
        match self {
            Self::No => None,
            Self::InTime => Some(ring),
            Self::AfterMs(ms) => Some(ring.max(Duration::from_millis(ms))),
        }
    }
}

/// As it is given: `call,data,file,timer=60s`, or `none`.
impl fmt::Display for WakeOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timer = match self.timer {
            WakeOnTimer::No => None,
            WakeOnTimer::InTime => Some("timer".to_owned()),
            WakeOnTimer::AfterMs(ms) if ms % 1000 == 0 => Some(format!("timer={}s", ms / 1000)),
            WakeOnTimer::AfterMs(ms) => Some(format!("timer={ms}ms")),
        };
        let words = [(self.call, "call"), (self.data, "data"), (self.file, "file")];
        let words = words.iter().filter(|(is_there, _)| *is_there).map(|(_, word)| *word);
        let all: Vec<&str> = words.chain(timer.as_deref()).collect();
        match all.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&all.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_shown_as_it_is_given() {
        assert_eq!(WakeOn::default().to_string(), "call,data,file,timer");
        assert_eq!(WakeOn::NOTHING.to_string(), "none");
        let timer = WakeOnTimer::AfterMs(90_000);
        assert_eq!(WakeOn { timer, ..WakeOn::NOTHING }.to_string(), "timer=90s");
        let timer = WakeOnTimer::AfterMs(1_500);
        assert_eq!(
            WakeOn { call: true, timer, ..WakeOn::NOTHING }.to_string(),
            "call,timer=1500ms"
        );
    }

    #[test]
    fn timers_ring_in_time_or_together() {
        let s = Duration::from_secs;
        assert_eq!(WakeOnTimer::InTime.ends_after(s(5)), Some(s(5)));
        assert_eq!(WakeOnTimer::AfterMs(60_000).ends_after(s(5)), Some(s(60)));
        assert_eq!(WakeOnTimer::AfterMs(60_000).ends_after(s(90)), Some(s(90)));
        assert_eq!(WakeOnTimer::No.ends_after(s(5)), None);
    }
}
