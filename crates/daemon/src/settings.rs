//! Settings of the operator: `[daemon]` in `config.toml`.
//!
//! ```toml
//! [daemon]
//! memory = "6g"   # for all awake containers; "off": wakes do not wait for memory
//! batch = 4       # number of waiting wakes that memory is freed for at once
//! reclaim = "swap" # push pages of idle containers to swap first; "sleep": suspend at once
//! evict-below = "768m"   # memory of the host that stays free: below it containers above their guarantee give
//!                        # memory; "off". Default: a 32nd of all, from 256m to 2g
//! swap = ["/var/swap=8g", "/disk2/swap=8g"]   # swap files, created if missing
//! ```

use std::path::Path;
use std::str::FromStr;

use dormouse_kernel::proc;
use dormouse_model::{Invalid, parse_bytes};
use serde::Deserialize;

use crate::error::{Error, Result, step};
use crate::swap::SwapFile;

/// Memory budget for the containers that are awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// No budget: wakes do not wait.
    Off,
    /// So many bytes.
    Bytes(u64),
}

impl FromStr for Memory {
    type Err = Invalid;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            size => parse_bytes(size).map(Self::Bytes),
        }
    }
}

/// Number of waiting wakes that memory is freed for at once, and of containers suspended at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch(u8);

impl Batch {
    /// LIMIT: the number of suspends in flight.
    const MAX: u8 = 64;

    pub(crate) fn count(self) -> usize {
        self.0.into()
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self(4)
    }
}

impl FromStr for Batch {
    type Err = Invalid;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let count = text.parse().ok().filter(|count| (1..=Self::MAX).contains(count));
        count.map(Self).ok_or_else(|| Invalid::new("batch", text, "a number from 1 to 64"))
    }
}

/// How memory of idle containers is freed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reclaim {
    /// Push pages to the host's swap first, then suspend.
    #[default]
    Swap,
    /// Suspend at once.
    Sleep,
}

impl FromStr for Reclaim {
    type Err = Invalid;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text {
            "swap" => Ok(Self::Swap),
            "sleep" => Ok(Self::Sleep),
            other => Err(Invalid::new("reclaim", other, "'swap' or 'sleep'")),
        }
    }
}

#[derive(Deserialize, Default)]
struct File {
    #[serde(default)]
    daemon: Section,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Section {
    memory: Option<String>,
    batch: Option<i64>,
    reclaim: Option<String>,
    evict_below: Option<String>,
    #[serde(default)]
    swap: Vec<String>,
}

/// The settings; `None` selects the default named at each field.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Default: three quarters of the host's memory.
    pub memory: Option<Memory>,
    /// Default: four.
    pub batch: Option<Batch>,
    /// Default: swap first.
    pub reclaim: Option<Reclaim>,
    /// Free memory of the host below which containers give memory; default: a 32nd, within bounds.
    pub evict_below: Option<Memory>,
    /// Swap files; default: none.
    pub swap: Vec<SwapFile>,
}

impl Settings {
    /// Reads `config.toml`.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.map_err(step("read config.toml"))?,
        };
        let bad = |what: String| Error::Settings { path: path.into(), what };
        let file: File = toml::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let invalid = |e: Invalid| bad(e.to_string());
        let Section { memory, batch, reclaim, evict_below, swap } = file.daemon;
        let batch = batch.map(|count| count.to_string().parse().map_err(invalid));
        Ok(Self {
            memory: memory.map(|memory| memory.parse().map_err(invalid)).transpose()?,
            batch: batch.transpose()?,
            reclaim: reclaim.map(|how| how.parse().map_err(invalid)).transpose()?,
            evict_below: evict_below.map(|size| size.parse().map_err(invalid)).transpose()?,
            swap: swap.iter().map(|file| file.parse().map_err(invalid)).collect::<Result<_>>()?,
        })
    }

    /// Returns these settings, completed from `other`.
    pub(crate) fn or(self, other: Self) -> Self {
        let swap = if self.swap.is_empty() { other.swap } else { self.swap };
        Self {
            memory: self.memory.or(other.memory),
            batch: self.batch.or(other.batch),
            reclaim: self.reclaim.or(other.reclaim),
            evict_below: self.evict_below.or(other.evict_below),
            swap,
        }
    }

    pub(crate) fn memory(&self) -> Memory {
        self.memory.unwrap_or_else(of_host)
    }

    pub(crate) fn batch(&self) -> Batch {
        self.batch.unwrap_or_default()
    }

    pub(crate) fn reclaim(&self) -> Reclaim {
        self.reclaim.unwrap_or_default()
    }
}

/// Returns three quarters of the host's memory (proc_meminfo(5)).
fn of_host() -> Memory {
    let text = proc::read_text("/proc/meminfo", 1 << 20).unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(Memory::Off, |kib| Memory::Bytes(kib * 1024 / 4 * 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_setting_is_an_amount_or_off() {
        assert_eq!("off".parse::<Memory>().unwrap(), Memory::Off);
        assert_eq!("38m".parse::<Memory>().unwrap(), Memory::Bytes(38 << 20));
        assert!("most".parse::<Memory>().is_err());
        let Memory::Bytes(bytes) = of_host() else { panic!("/proc/meminfo has MemTotal") };
        assert!(bytes > 64 << 20);
    }

    #[test]
    fn command_line_settings_override_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "[daemon]\nmemory = \"2g\"\nbatch = 7\n").unwrap();
        let given = Settings { batch: Some("1".parse().unwrap()), ..Settings::default() };
        let both = given.or(Settings::read(file.path()).unwrap());
        assert_eq!((both.memory(), both.batch().count()), (Memory::Bytes(2 << 30), 1));
        assert_eq!(Settings::default().batch().count(), 4);
        for bad in ["0", "65", "-1", "many", ""] {
            assert!(bad.parse::<Batch>().is_err(), "{bad}");
        }
        assert_eq!(Settings::default().reclaim(), Reclaim::Swap);
        std::fs::write(file.path(), "[daemon]\nreclaim = \"sleep\"\n").unwrap();
        assert_eq!(Settings::read(file.path()).unwrap().reclaim(), Reclaim::Sleep);
        std::fs::write(file.path(), "[daemon]\nreclaim = \"kill\"\n").unwrap();
        assert!(Settings::read(file.path()).unwrap_err().to_string().contains("'swap' or"));
        std::fs::write(file.path(), "[daemon]\nevict-below = \"1g\"\n").unwrap();
        assert_eq!(Settings::read(file.path()).unwrap().evict_below, Some(Memory::Bytes(1 << 30)));
        std::fs::write(file.path(), "[daemon]\nevict-below = \"little\"\n").unwrap();
        assert!(Settings::read(file.path()).unwrap_err().to_string().contains("little"));
        std::fs::write(file.path(), "[daemon]\nbatch = 0\n").unwrap();
        assert!(Settings::read(file.path()).unwrap_err().to_string().contains("batch"));
    }
}
