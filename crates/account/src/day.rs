//! Days of a bill.

use std::fmt;
use std::str::FromStr;

use dormouse_model::Invalid;
use serde::{Deserialize, Serialize};
use time::{Date, Duration, Month, OffsetDateTime};

/// A day in UTC, written `2026-11-28`. The order is that of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Day(Date);

impl Day {
    /// Returns the day of a time, in milliseconds since the epoch. A time that no calendar has is the epoch's day.
    pub fn of_unix_ms(unix_ms: i64) -> Self {
        let at = OffsetDateTime::from_unix_timestamp(unix_ms.div_euclid(1000));
        Self(at.unwrap_or(OffsetDateTime::UNIX_EPOCH).date())
    }

    /// Returns the day so many days earlier, or the first of the calendar.
    pub fn earlier(self, days: u32) -> Self {
        Self(self.0.checked_sub(Duration::days(days.into())).unwrap_or(Date::MIN))
    }
}

impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.0.to_calendar_date();
        write!(f, "{year:04}-{:02}-{day:02}", u8::from(month))
    }
}

impl FromStr for Day {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let read = || {
            let (year, rest) = text.split_once('-')?;
            let (month, day) = rest.split_once('-')?;
            let number = |part: &str, len| {
                let is_plain = part.len() == len && part.bytes().all(|b| b.is_ascii_digit());
                is_plain.then(|| part.parse::<u16>().ok())?
            };
            let month = Month::try_from(u8::try_from(number(month, 2)?).ok()?).ok()?;
            let day = u8::try_from(number(day, 2)?).ok()?;
            Date::from_calendar_date(number(year, 4)?.into(), month, day).ok()
        };
        read().map(Self).ok_or_else(|| Invalid::new("day", text, "YYYY-MM-DD, such as 2026-11-28"))
    }
}

impl TryFrom<String> for Day {
    type Error = Invalid;
    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Day> for String {
    fn from(day: Day) -> String {
        day.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn day_is_that_of_utc() {
        for (unix_ms, day) in [
            (0, "1970-01-01"),
            (-1, "1969-12-31"),
            (86_399_999, "1970-01-01"),
            (86_400_000, "1970-01-02"),
            (1_795_824_000_000, "2026-11-28"),
            (i64::MAX, "1970-01-01"),
        ] {
            assert_eq!(Day::of_unix_ms(unix_ms).to_string(), day, "{unix_ms}");
        }
        let day: Day = "2028-03-01".parse().unwrap();
        assert_eq!(day.earlier(1).to_string(), "2028-02-29");
        assert!(day.earlier(u32::MAX) < day);
    }

    #[test]
    fn day_is_read_or_refused() {
        let day: Day = "2026-02-28".parse().unwrap();
        assert_eq!(day.to_string(), "2026-02-28");
        for bad in [
            "",
            "2026-02-29",
            "2026-13-01",
            "2026-2-1",
            "26-02-01",
            "2026-02-28 ",
            "+026-01-01",
            "x",
        ] {
            assert!(bad.parse::<Day>().is_err(), "{bad}");
        }
    }
}
