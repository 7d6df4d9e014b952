//! Signals: actions, alternate stacks, pending signals.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// The action of a signal (sigaction(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// Its number.
    pub signal: i32,
    /// Address of the handler; 0 is the default, 1 ignores.
    pub handler: u64,
    /// `SA_*`.
    pub flags: u64,
    /// Address of the trampoline.
    pub restorer: u64,
    /// Signals that are blocked while the handler runs.
    pub mask: u64,
}

/// A pending signal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    /// The kernel's `siginfo_t`, 128 bytes.
    pub info: Bytes,
}

impl Signal {
    /// Its number.
    pub fn number(&self) -> i32 {
        let first = self.info.0.first_chunk::<4>();
        first.map_or(0, |bytes| i32::from_ne_bytes(*bytes))
    }
}

/// sigaltstack(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlternateStack {
    /// Lowest address.
    pub address: u64,
    /// `SS_AUTODISARM`.
    pub flags: u32,
    /// Its length.
    pub length_bytes: u64,
}

/// A running timer of setitimer(2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntervalTimer {
    /// 0 real, 1 virtual, 2 profiling.
    pub which: u32,
    /// Time until it expires, in microseconds. 0 with an interval: its signal is pending, and the timer
    /// continues when the signal is delivered.
    pub value_us: u64,
    /// The interval of later expiries; 0 for none.
    pub interval_us: u64,
}

impl IntervalTimer {
    /// ITIMER_REAL.
    pub const REAL: u32 = 0;
}
