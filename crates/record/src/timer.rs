//! Timers that are objects: POSIX timers and timer descriptors.

use serde::{Deserialize, Serialize};

/// A timer of timer_create(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PosixTimer {
    /// Its id.
    pub id: i32,
    /// Its clock.
    pub clock: i32,
    /// `SIGEV_SIGNAL`, `SIGEV_NONE`, or `SIGEV_THREAD_ID` (4).
    pub notify: i32,
    /// The signal.
    pub signal: i32,
    /// `sigev_value`.
    pub value: u64,
    /// The thread that is notified, with `SIGEV_THREAD_ID`.
    pub tid: u32,
    /// Time until it expires; 0 if it is disarmed.
    pub value_ns: u64,
    /// The interval of later expiries; 0 for none.
    pub interval_ns: u64,
}

/// timerfd_create(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimerFd {
    /// `O_NONBLOCK`.
    pub flags: u32,
    /// Its clock.
    pub clock: i32,
    /// Expiries that were not read.
    pub ticks: u64,
    /// Time until it expires; 0 if it is disarmed.
    pub value_ns: u64,
    /// The interval of later expiries; 0 for none.
    pub interval_ns: u64,
    /// The expiry by CLOCK_REALTIME, for a timer that is cancelled when that clock is set
    /// (TFD_TIMER_CANCEL_ON_SET).
    #[serde(default)]
    pub cancelled_at_set_ns: Option<u64>,
}

impl TimerFd {
    /// `TFD_TIMER_CANCEL_ON_SET`, which goes with `TFD_TIMER_ABSTIME`.
    pub const CANCEL_ON_SET: u32 = 2;
}
