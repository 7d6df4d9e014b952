//! The events that wake a container.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The events that wake a sleeping or drowsy container. Its operator wakes it in any case (`exec`,
/// `attach`, `start`, a key at its terminal).
///
/// The kernel keeps other events until the container is awake: a connection waits in the queue of
/// the socket, bytes wait in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WakeOn {
    /// New clients: a connection to a listening socket, a datagram.
    pub call: bool,
    /// An open connection: bytes, room for more to send, its end.
    pub data: bool,
    /// Watched files (inotify(7), fanotify(7)).
    pub file: bool,
    /// A timer of the container, or the timeout of a wait.
    pub timer: WakeOnTimer,
    /// A connection to a listening TCP socket counts as a new client when its first byte arrives.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub data_first: bool,
}

/// The timers that wake a container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WakeOnTimer {
    /// None.
    No,
    /// Each, in its time.
    #[default]
    InTime,
    /// Not before it has slept for so many milliseconds: timers that expire until then are
    /// delivered together.
    AfterMs(u64),
}

impl WakeOn {
    /// No event; only the operator wakes the container.
    pub const NOTHING: Self =
        Self { call: false, data: false, file: false, timer: WakeOnTimer::No, data_first: false };

    /// Returns whether this is the default setting.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for WakeOn {
    fn default() -> Self {
        Self { call: true, data: true, file: true, timer: WakeOnTimer::InTime, data_first: false }
    }
}

impl WakeOnTimer {
    /// Returns the length of a sleep, given the time until its first timer; `None` if no timer ends
    /// it.
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
        let call = if self.data_first { "data-first" } else { "call" };
        let words = [(self.call, call), (self.data, "data"), (self.file, "file")];
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
    fn setting_is_displayed_as_it_is_parsed() {
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
    fn timers_wake_in_time_or_together() {
        let s = Duration::from_secs;
        assert_eq!(WakeOnTimer::InTime.ends_after(s(5)), Some(s(5)));
        assert_eq!(WakeOnTimer::AfterMs(60_000).ends_after(s(5)), Some(s(60)));
        assert_eq!(WakeOnTimer::AfterMs(60_000).ends_after(s(90)), Some(s(90)));
        assert_eq!(WakeOnTimer::No.ends_after(s(5)), None);
    }
}
