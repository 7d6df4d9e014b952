//! Amounts and durations as people write them.

use std::fmt;

use crate::Invalid;

/// Parses a number of bytes: digits with an optional unit `b`, `k`, `m`, `g` or `t` (powers of
/// 1024, either case, an optional `b` or `ib` after the letter), as podman and docker take it.
pub fn parse_bytes(text: &str) -> Result<u64, Invalid> {
    let bad = || Invalid::new("size", text, "digits and an optional unit: b, k, m, g or t");
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (number, unit) = lower.split_at(digits);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let shift = match unit {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(bad()),
    };
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// Parses a number of CPUs such as `0.5` or `2`; the result is in thousandths of a CPU.
pub fn parse_cpus(text: &str) -> Result<u32, Invalid> {
    let bad = || Invalid::new("number of CPUs", text, "a decimal number of at least 0.01");
    let (whole, part) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(part) || (whole.is_empty() && part.is_empty()) {
        return Err(bad());
    }
    let whole: u32 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| bad())? };
    let part: u32 = format!("{part:0<3.3}").parse().map_err(|_| bad())?;
    let milli = whole.checked_mul(1000).and_then(|w| w.checked_add(part)).ok_or_else(bad)?;
    if milli < 10 { Err(bad()) } else { Ok(milli) }
}

/// Reads a duration such as `2h30m` as milliseconds; `None` for any other text.
pub fn parse_span_ms(text: &str) -> Option<i64> {
    let mut rest = text;
    let mut sum = 0_i64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).filter(|n| *n > 0)?;
        let number: i64 = rest[..digits].parse().ok()?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len() - digits);
        let (word, after) = rest[digits..].split_at(unit);
        let ms = match word {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        sum = sum.checked_add(number.checked_mul(ms)?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(sum)
}

/// Parses digits alone; `parse` would accept a sign.
pub(crate) fn digits(text: &str) -> Option<u32> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Parses a time such as `20ms` or `1500us`, or a bare number of microseconds.
pub(crate) fn span_us(text: &str) -> Option<u32> {
    if let Some(us) = digits(text) {
        return Some(us);
    }
    if let Some(us) = text.strip_suffix("us") {
        return digits(us);
    }
    u32::try_from(parse_span_ms(text)?.checked_mul(1000)?).ok()
}

/// An amount of memory in bytes, shown as `--memory` accepts it: `512m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("g", 30), ("m", 20), ("k", 10)];
        let whole = |shift: &u32| self.0 > 0 && self.0.is_multiple_of(1 << shift);
        match units.iter().find(|(_, shift)| whole(shift)) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            // A number of bytes is hard to read, and the rest does not matter.
            None if self.0 >= 1 << 20 => write!(f, "{}m", self.0 >> 20),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("512"), Ok(512));
        assert_eq!(parse_bytes("64k"), Ok(65_536));
        assert_eq!(parse_bytes("1GiB"), Ok(1 << 30));
        for bad in ["", "m", "-1", "1.5g", "1x", "99999999999999999999", "18446744073709551615k"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn spans() {
        assert_eq!(parse_span_ms("1h30m"), Some(5_400_000));
        assert_eq!(parse_span_ms("250ms"), Some(250));
        for bad in ["", "5", "m", "-1s", "1x", "9999999999999999999d"] {
            assert_eq!(parse_span_ms(bad), None, "{bad}");
        }
    }

    #[test]
    fn cpus() {
        assert_eq!(parse_cpus("2"), Ok(2000));
        assert_eq!(parse_cpus("0.25"), Ok(250));
        assert_eq!(parse_cpus(".5"), Ok(500));
        for bad in ["", ".", "0", "0.001", "-1", "1,5", "nan", "inf", "5000000"] {
            assert!(parse_cpus(bad).is_err(), "{bad}");
        }
    }
}
