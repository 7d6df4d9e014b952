//! The time of day.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the time of day, in milliseconds since the epoch; 0 if the clock is set before it.
pub fn now_unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}
