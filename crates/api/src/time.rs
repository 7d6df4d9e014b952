//! Points in time.

use time::OffsetDateTime;

/// Formats milliseconds since the epoch as RFC 3339 in UTC with milliseconds. A time beyond year
/// 9999 is formatted as the number.
pub fn rfc3339(unix_ms: i64) -> String {
    let t = OffsetDateTime::from_unix_timestamp_nanos(i128::from(unix_ms) * 1_000_000);
    t.map_or_else(
        |_| unix_ms.to_string(),
        |t| {
            let (year, month, day) = (t.year(), u8::from(t.month()), t.day());
            let (hour, minute, second, ms) = (t.hour(), t.minute(), t.second(), t.millisecond());
            format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted() {
        assert_eq!(rfc3339(1_200), "1970-01-01T00:00:01.200Z");
        assert_eq!(rfc3339(i64::MAX), i64::MAX.to_string());
    }
}
