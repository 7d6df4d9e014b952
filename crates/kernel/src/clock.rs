//! The time of day, and the clocks of time namespaces.

use std::fmt::Display;
use std::io::ErrorKind;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::proc;

const SECOND_NS: i64 = 1_000_000_000;

/// Returns the time of day, in milliseconds since the epoch; 0 if the clock is set before it.
pub fn now_unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}

/// The offsets of a time namespace from the clocks of the host (time_namespaces(7)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Of CLOCK_MONOTONIC.
    pub monotonic_ns: i64,
    /// Of CLOCK_BOOTTIME.
    pub boottime_ns: i64,
}

impl Offsets {
    /// The offsets of the time namespace of a process's children, by `/proc/PID/timens_offsets`;
    /// `self` is allowed as the process.
    pub fn of(pid: impl Display) -> std::io::Result<Self> {
        match proc::whole_text(format!("/proc/{pid}/timens_offsets")) {
            Ok(text) => Ok(Self::parse(&text)),
            // KERNEL(5.6): a kernel without time namespaces has no offsets.
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e),
        }
    }

    /// Parses lines of `CLOCK SECONDS NANOSECONDS`.
    pub fn parse(text: &str) -> Self {
        let of = |clock: &str| -> Option<i64> {
            let line = text.lines().find_map(|line| line.strip_prefix(clock))?;
            let mut words = line.split_ascii_whitespace();
            let (seconds, rest): (i64, i64) =
                (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            seconds.checked_mul(SECOND_NS)?.checked_add(rest)
        };
        Self {
            monotonic_ns: of("monotonic").unwrap_or(0),
            boottime_ns: of("boottime").unwrap_or(0),
        }
    }

    /// The text that sets these offsets in `timens_offsets`.
    pub fn text(self) -> String {
        let line = |name: &str, ns: i64| {
            format!("{name} {} {}\n", ns.div_euclid(SECOND_NS), ns.rem_euclid(SECOND_NS))
        };
        line("monotonic", self.monotonic_ns) + &line("boottime", self.boottime_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_and_written() {
        let text = "monotonic           0         0\nboottime     -864000 999999999\n";
        let read = Offsets::parse(text);
        assert_eq!((read.monotonic_ns, read.boottime_ns), (0, -863_999_000_000_001));
        assert_eq!(read.text(), "monotonic 0 0\nboottime -864000 999999999\n");
        assert_eq!(Offsets::parse(""), Offsets::default());
        assert_eq!(
            Offsets::parse("monotonic x\nboottime 9223372036854775807 0"),
            Offsets::default()
        );
    }
}
