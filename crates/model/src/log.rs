//! The log of a container: where its output goes, and the format of a file with time stamps.
//!
//! The format is that of the Kubernetes container runtime interface, which podman calls `k8s-file`.
//! One line is one *entry*:
//!
//! ```text
//! 2026-11-26T20:53:06.123456789Z stdout F a whole line
//! 2026-11-26T20:53:06.123500000Z stderr P the begin of a line
//! ```
//!
//! `F` ends a line of the container, `P` does not: the next entry of that stream continues it. The
//! bytes of the container are unchanged, so an entry may contain any byte but a newline.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Invalid;

/// Where the output of a container without an attached client goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogDriver {
    /// Two files, which the container itself appends to: no time stamps, no process.
    #[default]
    #[serde(rename = "file")]
    File,
    /// One file of entries, written by a reader of the keeper from two pipes.
    #[serde(rename = "k8s-file")]
    K8sFile,
    /// Nowhere.
    #[serde(rename = "none")]
    None,
}

impl LogDriver {
    /// The word of the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::K8sFile => "k8s-file",
            Self::None => "none",
        }
    }
}

impl fmt::Display for LogDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for LogDriver {
    type Err = Invalid;

    /// `json-file` is another name for `k8s-file`, as in podman.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text {
            "file" => Ok(Self::File),
            "k8s-file" | "json-file" => Ok(Self::K8sFile),
            "none" => Ok(Self::None),
            _ => Err(Invalid::new("log driver", text, "k8s-file, file or none")),
        }
    }
}

/// A stream of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl LogStream {
    /// Both, in the order of their descriptors.
    pub const ALL: [Self; 2] = [Self::Stdout, Self::Stderr];

    fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// One entry of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntry<'t> {
    /// Nanoseconds since the epoch.
    pub unix_ns: u64,
    /// Its stream.
    pub stream: LogStream,
    /// The line of the container ends here.
    pub ends_line: bool,
    /// The bytes of the container, without the newline.
    pub text: &'t [u8],
}

/// Bytes of a time stamp.
const STAMP: usize = 30;

impl<'t> LogEntry<'t> {
    /// Reads an entry, without the newline at its end. `None` for any other text.
    pub fn read(line: &'t [u8]) -> Option<Self> {
        let (stamp, rest) = line.split_at_checked(STAMP)?;
        let unix_ns = read_stamp(stamp)?;
        let (stream, rest) = match rest.strip_prefix(b" stdout ") {
            Some(rest) => (LogStream::Stdout, rest),
            None => (LogStream::Stderr, rest.strip_prefix(b" stderr ")?),
        };
        let (ends_line, rest) = match rest.strip_prefix(b"F ") {
            Some(rest) => (true, rest),
            None => (false, rest.strip_prefix(b"P ")?),
        };
        Some(Self { unix_ns, stream, ends_line, text: rest })
    }

    /// Returns the time stamp at the begin of an entry.
    pub fn stamp(line: &[u8]) -> Option<&str> {
        std::str::from_utf8(line.get(..STAMP)?).ok()
    }
}

/// A time stamp as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogStamp([u8; STAMP]);

impl LogStamp {
    /// Formats a time. LIMIT: until the year 2554, where nanoseconds end.
    pub fn new(unix_ns: u64) -> Self {
        let (seconds, ns) = (unix_ns / 1_000_000_000, unix_ns % 1_000_000_000);
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let (year, month, day) = date_of(days);
        let mut text = *b"0000-00-00T00:00:00.000000000Z";
        for (at, digits, value) in [
            (0, 4, year),
            (5, 2, month),
            (8, 2, day),
            (11, 2, second / 3_600),
            (14, 2, second / 60 % 60),
            (17, 2, second % 60),
            (20, 9, ns),
        ] {
            let mut value = value;
            for place in text[at..at + digits].iter_mut().rev() {
                *place = b'0' + (value % 10) as u8;
                value /= 10;
            }
        }
        Self(text)
    }
}

/// Appends bytes of a container as entries: one for each line, and one for a rest without newline.
pub fn write_entries(out: &mut Vec<u8>, stamp: LogStamp, stream: LogStream, bytes: &[u8]) {
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let (text, mark) = match line.strip_suffix(b"\n") {
            Some(text) => (text, b" F "),
            None => (line, b" P "),
        };
        out.extend_from_slice(&stamp.0);
        out.push(b' ');
        out.extend_from_slice(stream.as_str().as_bytes());
        out.extend_from_slice(mark);
        out.extend_from_slice(text);
        out.push(b'\n');
    }
}

fn read_stamp(text: &[u8]) -> Option<u64> {
    let number = |at: usize, digits: usize| {
        text.get(at..at + digits)?.iter().try_fold(0_u64, |sum, digit| {
            digit.is_ascii_digit().then(|| sum * 10 + u64::from(digit - b'0'))
        })
    };
    let marks = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':'), (19, b'.'), (29, b'Z')];
    if marks.iter().any(|(at, mark)| text.get(*at) != Some(mark)) {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 2)?, number(8, 2)?);
    if !(1970..=2553).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let (hour, minute, second) = (number(11, 2)?, number(14, 2)?, number(17, 2)?);
    if hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let seconds = days_until(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second;
    Some(seconds * 1_000_000_000 + number(20, 9)?)
}

/// Days of 400 years.
const ERA: u64 = 146_097;
/// Days from 0000-03-01 to 1970-01-01.
const EPOCH: u64 = 719_468;

/// Date of a day since the epoch, in the Gregorian calendar. Years begin in March here, so that a
/// leap day is the last of its year.
fn date_of(days: u64) -> (u64, u64, u64) {
    let days = days + EPOCH;
    let (era, day) = (days / ERA, days % ERA);
    let year = (day - day / 1_460 + day / 36_524 - day / (ERA - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (year, month + 3),
        _ => (year + 1, month - 9),
    };
    (era * 400 + year, month, of_month)
}

/// The reverse of [`date_of`], from the epoch on.
fn days_until(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year) = (year / 400, year % 400);
    let day = (153 * month + 2) / 5 + day - 1;
    era * ERA + year * 365 + year / 4 - year / 100 + day - EPOCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_round_trip_with_lines_and_rests() {
        let stamp = LogStamp::new(1_795_726_386_123_456_789);
        let mut log = Vec::new();
        write_entries(&mut log, stamp, LogStream::Stdout, b"one\n\n\xff\0two");
        write_entries(&mut log, stamp, LogStream::Stderr, b" F \n");
        let entry = |stream, ends_line, text| {
            Some(LogEntry { unix_ns: 1_795_726_386_123_456_789, stream, ends_line, text })
        };
        let lines: Vec<_> = log.split(|byte| *byte == b'\n').map(LogEntry::read).collect();
        let expected = [
            entry(LogStream::Stdout, true, &b"one"[..]),
            entry(LogStream::Stdout, true, b""),
            entry(LogStream::Stdout, false, b"\xff\0two"),
            entry(LogStream::Stderr, true, b" F "),
            None,
        ];
        assert_eq!(lines, expected);
        assert_eq!(LogEntry::stamp(&log), Some("2026-11-26T20:53:06.123456789Z"));
    }

    #[test]
    fn stamps_are_dates_of_the_gregorian_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000000Z"),
            (951_868_799, "2000-02-29T23:59:59.000000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000000Z"),
            (1_704_067_199, "2023-12-31T23:59:59.000000000Z"),
        ] {
            let stamp = LogStamp::new(seconds * 1_000_000_000);
            assert_eq!(std::str::from_utf8(&stamp.0), Ok(text));
        }
        for day in (0..200_000).step_by(7) {
            let ns = day * 86_400_000_000_000 + 1;
            assert_eq!(read_stamp(&LogStamp::new(ns).0), Some(ns), "day {day}");
        }
    }

    #[test]
    fn other_texts_are_no_entries() {
        for text in [
            "",
            "2026-11-26T20:53:06.123456789Z",
            "2026-11-26T20:53:06.123456789Z stdin F x",
            "2026-11-26T20:53:06.123456789Z stdout X x",
            "2026-13-26T20:53:06.123456789Z stdout F x",
            "2026-11-26T24:53:06.123456789Z stdout F x",
            "2026-11-26T20:53:06.12345678+Z stdout F x",
            "9999-11-26T20:53:06.123456789Z stdout F x",
            "1969-11-26T20:53:06.123456789Z stdout F x",
        ] {
            assert_eq!(LogEntry::read(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn drivers_have_podmans_names() {
        for driver in [LogDriver::File, LogDriver::K8sFile, LogDriver::None] {
            assert_eq!(driver.to_string().parse(), Ok(driver));
        }
        assert_eq!("json-file".parse(), Ok(LogDriver::K8sFile));
        assert!("journald".parse::<LogDriver>().is_err());
    }
}
