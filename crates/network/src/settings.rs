//! Settings of the operator: `[network]` in `config.toml`.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::Path;
use std::str::FromStr;

use dormouse_model::parse_net_rate;
use serde::Deserialize;

use crate::error::{Error, Result};

/// A range of IPv4 addresses, `ADDRESS/BITS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Its first address.
    pub first: Ipv4Addr,
    /// Bits of the network part, 14 to 22.
    pub bits: u8,
}

impl Pool {
    /// Returns the number of addresses.
    pub fn count(self) -> u32 {
        1 << (32 - u32::from(self.bits))
    }

    /// Returns whether the two have an address in common.
    pub fn overlaps(self, first: Ipv4Addr, bits: u8) -> bool {
        let shift = 32 - u32::from(self.bits.min(bits));
        let cut = |a: Ipv4Addr| u64::from(u32::from(a)) >> shift;
        cut(self.first) == cut(first)
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

impl FromStr for Pool {
    type Err = &'static str;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        // LIMIT: 2^18 addresses: the private loopback addresses of one are 64 of 127.0.0.0/8.
        const EXPECTED: &str = "pool must be ADDRESS/BITS, 14 to 22 bits, the rest zero";
        let (first, bits) = s.split_once('/').ok_or(EXPECTED)?;
        let first: Ipv4Addr = first.parse().map_err(|_| EXPECTED)?;
        let bits: u8 = bits.parse().map_err(|_| EXPECTED)?;
        if !(14..=22).contains(&bits) {
            return Err(EXPECTED);
        }
        let pool = Self { first, bits };
        if u32::from(first) & (pool.count() - 1) != 0 || first.is_loopback() {
            return Err(EXPECTED);
        }
        Ok(pool)
    }
}

/// The network's part of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Pool of IPv4 addresses.
    pub pool: Pool,
    /// Bandwidth of the host's uplink that containers may use, in bits per second.
    pub uplink_bps: Option<u64>,
    /// BPF programs that are not attached: for tests that show the effect of each.
    pub without: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            pool: Pool { first: Ipv4Addr::new(10, 136, 0, 0), bits: 14 },
            uplink_bps: None,
            without: Vec::new(),
        }
    }
}

#[derive(Deserialize, Default)]
struct File {
    #[serde(default)]
    network: Section,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Section {
    pool: Option<String>,
    uplink_rate: Option<String>,
}

impl Settings {
    /// Reads `config.toml`; without the file, or without `[network]`, the defaults.
    pub fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(Error::file("read", path)(e)),
        };
        let bad = |message: String| Error::Settings { path: path.into(), message };
        let file: File = toml::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let mut settings = Self::default();
        if let Some(pool) = file.network.pool {
            settings.pool = pool.parse().map_err(|e: &str| bad(e.into()))?;
        }
        if let Some(rate) = file.network.uplink_rate {
            let rate = parse_net_rate(&rate).map_err(|e| bad(format!("uplink-rate: {e}")))?;
            settings.uplink_bps = (rate > 0).then_some(rate);
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_aligned_and_within_the_size_of_the_private_loopback() {
        let pool: Pool = "10.136.0.0/14".parse().unwrap();
        assert_eq!(pool.count(), 1 << 18);
        for bad in ["10.136.0.0", "10.136.0.1/14", "10.0.0.0/8", "10.0.0.0/24", "127.0.0.0/14", "x"]
        {
            assert!(bad.parse::<Pool>().is_err(), "{bad}");
        }
    }

    #[test]
    fn pools_overlap_with_larger_and_smaller_networks() {
        let pool: Pool = "10.136.0.0/14".parse().unwrap();
        for (first, bits, overlaps) in [
            ("10.0.0.0", 8, true),
            ("10.139.255.0", 24, true),
            ("10.140.0.0", 24, false),
            ("10.128.0.0", 9, true),
            ("192.168.0.0", 16, false),
        ] {
            assert_eq!(pool.overlaps(first.parse().unwrap(), bits), overlaps, "{first}/{bits}");
        }
    }
}
