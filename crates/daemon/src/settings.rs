//! What the operator can choose: `[daemon]` in `config.toml`.
//!
//! ```toml
//! [daemon]
//! memory = "6g"   # for all that is awake; "off": nobody waits for memory
//! ```

use std::path::Path;
use std::str::FromStr;

use dormouse_kernel::proc;
use dormouse_model::parse_bytes;
use serde::Deserialize;

use crate::{Error, Result};

/// How much memory there is for containers that are awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// As much as they take: nobody waits.
    Off,
    /// So many bytes.
    Bytes(u64),
}

impl FromStr for Memory {
    type Err = dormouse_model::Invalid;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            size => parse_bytes(size).map(Self::Bytes),
        }
    }
}

#[derive(Deserialize, Default)]
struct File {
    #[serde(default)]
    daemon: Section,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Section {
    memory: Option<String>,
}

impl Memory {
    /// Reads `config.toml`; three quarters of the host's memory where nothing is said.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.map_err(crate::step("read config.toml"))?,
        };
        let bad = |what: String| Error::Settings { path: path.into(), what };
        let file: File = toml::from_str(&text).map_err(|e| bad(e.to_string()))?;
        match file.daemon.memory {
            Some(memory) => memory.parse().map_err(|e: dormouse_model::Invalid| bad(e.to_string())),
            None => Ok(of_host()),
        }
    }
}

/// Three quarters of the host's memory (proc_meminfo(5)).
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
    fn memory_is_an_amount_or_off() {
        assert_eq!("off".parse::<Memory>().unwrap(), Memory::Off);
        assert_eq!("38m".parse::<Memory>().unwrap(), Memory::Bytes(38 << 20));
        assert!("most".parse::<Memory>().is_err());
        let Memory::Bytes(bytes) = of_host() else { panic!("a host tells how much it has") };
        assert!(bytes > 64 << 20);
    }
}
