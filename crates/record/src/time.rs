//! Time namespaces (time_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// LIMIT: the largest value of a clock, in nanoseconds: 73 years. The kernel takes twice that.
pub const CLOCK_MAX_NS: i64 = 1 << 61;

/// Offsets of the clocks of a namespace from the container's own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    /// CLOCK_MONOTONIC, in nanoseconds.
    #[serde(default)]
    pub monotonic_ns: i64,
    /// CLOCK_BOOTTIME, in nanoseconds.
    #[serde(default)]
    pub boottime_ns: i64,
}

impl Time {
    /// Whether it is unchanged, so that a process could have made it without rights over it.
    pub fn is_new(&self) -> bool {
        *self == Self::default()
    }
}
