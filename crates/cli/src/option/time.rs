//! Points in time, for `--since` and `--until`, and ages.

pub(crate) use dormouse_kernel::clock::now_unix_ms as now_ms;
use dormouse_model::parse_span_ms;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::Invalid;

/// Reads a point in time as milliseconds since the epoch: RFC 3339 (`2026-11-21T06:00:00Z`),
/// seconds since the epoch (with a fraction), or an age before `now_ms` (`90s`, `10m`, `2h30m`,
/// `3d`).
pub(crate) fn moment(text: &str, now_ms: i64) -> Result<i64, Invalid> {
    let bad = || Invalid::new("time", text, "RFC 3339, seconds since the epoch, or an age as 10m");
    if let Ok(t) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok((t.unix_timestamp_nanos() / 1_000_000) as i64);
    }
    if text.starts_with(|c: char| c.is_ascii_digit())
        && text.bytes().all(|b| b.is_ascii_digit() || b == b'.')
    {
        let seconds: f64 = text.parse().map_err(|_| bad())?;
        // LIMIT: year 9999, so that the milliseconds are exact and fit.
        return if seconds < 253_402_300_800.0 { Ok((seconds * 1e3) as i64) } else { Err(bad()) };
    }
    Ok(now_ms.saturating_sub(parse_span_ms(text).ok_or_else(bad)?))
}

/// Formats a duration in the largest unit that fits: `12 seconds`, `3 hours`.
pub(crate) fn span(ms: i64) -> String {
    let seconds = ms.max(0) / 1_000;
    let (number, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3_600 => (seconds / 60, "minute"),
        3_600..86_400 => (seconds / 3_600, "hour"),
        86_400..1_209_600 => (seconds / 86_400, "day"),
        1_209_600..5_184_000 => (seconds / 604_800, "week"),
        5_184_000..63_072_000 => (seconds / 2_592_000, "month"),
        _ => (seconds / 31_536_000, "year"),
    };
    format!("{number} {unit}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moment_is_parsed_or_refused() {
        let now = 1_000_000_000_000;
        for (text, ms) in [
            ("1970-01-01T00:00:01Z", 1_000),
            ("1970-01-01T01:00:00+01:00", 0),
            ("12.5", 12_500),
            ("10m", now - 600_000),
            ("1h30m", now - 5_400_000),
            ("2d", now - 172_800_000),
        ] {
            assert_eq!(moment(text, now), Ok(ms), "{text}");
        }
        for bad in ["", "m", "10", "10x", "-1", "1h-", "9999999999999999999d", "yesterday", "1.2.3"]
        {
            assert_eq!(moment(bad, now).is_err(), bad != "10", "{bad}");
        }
    }

    #[test]
    fn durations_are_formatted() {
        assert_eq!(span(1_000), "1 second");
        assert_eq!(span(59_999), "59 seconds");
        assert_eq!(span(3_600_000), "1 hour");
        assert_eq!(span(-5), "0 seconds");
    }

    proptest::proptest! {
        #[test]
        fn time_parser_accepts_or_refuses_any_text(text in "[0-9a-z.:TZ+-]{0,30}|.*", now: i64) {
            let _ = moment(&text, now);
            let _ = span(now);
        }
    }
}
