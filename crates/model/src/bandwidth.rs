//! The contract of a container for its network: the part that is guaranteed, the share of the rest, and the most.

use std::fmt;

use crate::{Invalid, Limits};

/// The default weight, and the smallest: the kernel takes turns by whole packets of 64 kB.
pub const NET_WEIGHT: u32 = 100;
/// LIMIT: the largest weight.
const NET_WEIGHT_MOST: u32 = 10_000;
/// LIMIT: the smallest and the largest rate, in bits per second. A packet of 64 kB takes 8 s at the smallest.
const RANGE: std::ops::RangeInclusive<u64> = 64_000..=1_000_000_000_000;

/// Parses a rate such as `100mbit`, in bits per second; `0` is none.
pub fn parse_net_rate(text: &str) -> Result<u64, Invalid> {
    let expected = "a number with a unit, 64kbit to 1000gbit, or 0 for none";
    let bad = || Invalid::new("network rate", text, expected);
    let lower = text.trim().to_ascii_lowercase();
    if lower == "0" {
        return Ok(0);
    }
    let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (number, unit) = lower.split_at(digits);
    let scale: u64 = match unit {
        "bit" => 1,
        "kbit" => 1_000,
        "mbit" => 1_000_000,
        "gbit" => 1_000_000_000,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().map_err(|_| bad())?;
    number.checked_mul(scale).filter(|rate| RANGE.contains(rate)).ok_or_else(bad)
}

/// Parses a weight of `--net-weight`.
pub fn parse_net_weight(text: &str) -> Result<u32, Invalid> {
    let weight = text.trim().parse().ok().filter(|w| (NET_WEIGHT..=NET_WEIGHT_MOST).contains(w));
    weight.ok_or_else(|| Invalid::new("network weight", text, "a number from 100 to 10000"))
}

/// The contract for the uplink of a trust domain, in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bandwidth {
    /// Guaranteed bits per second; 0 is no guarantee.
    pub rate_bps: u64,
    /// The most bits per second.
    pub ceil_bps: Option<u64>,
    /// Share of the bandwidth that no guarantee takes.
    pub weight: u32,
}

impl Bandwidth {
    /// The contract in a container's limits; `None` without one.
    pub fn of(limits: &Limits) -> Option<Self> {
        let it = Self {
            rate_bps: limits.net_rate_bps.unwrap_or(0),
            ceil_bps: limits.net_ceil_bps.filter(|rate| *rate > 0),
            weight: limits.net_weight.unwrap_or(NET_WEIGHT),
        };
        (it != Self { rate_bps: 0, ceil_bps: None, weight: NET_WEIGHT }).then_some(it)
    }

    /// Refuses numbers that contradict each other, or that were not parsed here.
    pub fn check(&self) -> Result<(), Invalid> {
        let bad = |expected| Err(Invalid::new("network contract", self.to_string(), expected));
        let rates = [Some(self.rate_bps).filter(|rate| *rate > 0), self.ceil_bps];
        if !rates.into_iter().flatten().all(|rate| RANGE.contains(&rate))
            || !(NET_WEIGHT..=NET_WEIGHT_MOST).contains(&self.weight)
        {
            return bad("rates from 64kbit to 1000gbit, and a weight from 100 to 10000");
        }
        match self.ceil_bps {
            Some(ceil) if ceil < self.rate_bps => bad("lower --net-rate or raise --net-ceil"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Bandwidth {
    /// `10mbit guaranteed, weight 100, at most 100mbit`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rate_bps > 0 {
            write!(f, "{} guaranteed, ", Bits(self.rate_bps))?;
        }
        write!(f, "weight {}", self.weight)?;
        self.ceil_bps.map_or(Ok(()), |ceil| write!(f, ", at most {}", Bits(ceil)))
    }
}

/// Bits per second, shown as options accept them: `100mbit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bits(pub u64);

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000)];
        match units.iter().find(|(_, scale)| self.0 > 0 && self.0.is_multiple_of(*scale)) {
            Some((unit, scale)) => write!(f, "{}{unit}", self.0 / scale),
            None => write!(f, "{}bit", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_units_of_bits() {
        assert_eq!(parse_net_rate("100mbit"), Ok(100_000_000));
        assert_eq!(parse_net_rate(" 64KBit "), Ok(64_000));
        assert_eq!(parse_net_rate("0"), Ok(0));
        for bad in ["", "1", "10m", "63kbit", "1001gbit", "-1mbit", "+1mbit", "mbit", "1.5gbit"] {
            assert!(parse_net_rate(bad).is_err(), "{bad}");
        }
        assert_eq!(
            [Bits(1_500_000), Bits(2_000_000_000)].map(|b| b.to_string()),
            ["1500kbit", "2gbit"]
        );
        assert!(parse_net_weight("99").is_err() && parse_net_weight("10001").is_err());
        assert_eq!(parse_net_weight("300"), Ok(300));
    }

    #[test]
    fn contradictory_contract_is_refused_with_its_numbers() {
        let limits = Limits {
            net_rate_bps: Some(2_000_000),
            net_ceil_bps: Some(1_000_000),
            ..Limits::default()
        };
        let text = Bandwidth::of(&limits).unwrap().check().unwrap_err().to_string();
        assert!(text.contains("2mbit guaranteed, weight 100, at most 1mbit"), "{text}");
        let none = Limits { net_rate_bps: Some(0), net_ceil_bps: Some(0), ..Limits::default() };
        assert_eq!(Bandwidth::of(&none), None);
        let odd = Limits { net_weight: Some(1), ..Limits::default() };
        assert!(Bandwidth::of(&odd).unwrap().check().is_err());
    }
}
