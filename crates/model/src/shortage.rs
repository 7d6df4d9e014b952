//! The action for a container that has used its memory.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Invalid, Limits};

/// Bounds of the part of a limit that is kept for the sleep: the engine's calls in the processes, and the wake.
const MARGIN_BYTES: std::ops::RangeInclusive<u64> = 4 << 20..=256 << 20;
/// So large a part of the limit, within these bounds.
const MARGIN_PART: u64 = 16;

/// The action for a container that has used its memory (`--memory`), and of which nothing can be reclaimed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutOfMemory {
    /// The kernel ends one of its processes.
    #[default]
    Kill,
    /// It falls asleep before.
    Sleep,
}

impl OutOfMemory {
    /// Returns whether this is the default setting.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the word of the options.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Sleep => "sleep",
        }
    }

    /// Returns the memory at which a container with these limits is to sleep; `None` if it never does.
    pub fn brink(self, limits: &Limits) -> Option<Brink> {
        match (self, limits.memory_max_bytes) {
            (Self::Sleep, Some(max_bytes)) => Some(Brink::of(max_bytes)),
            _ => None,
        }
    }
}

impl FromStr for OutOfMemory {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let all = [Self::Kill, Self::Sleep];
        let found = all.into_iter().find(|one| one.as_str() == text);
        found.ok_or_else(|| Invalid::new("out-of-memory action", text, "kill or sleep"))
    }
}

/// The memory at which a container falls asleep: below its limit, because the sleep and the wake need some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Brink {
    /// The limit of the container without the margin.
    pub bytes: u64,
    /// The rest.
    pub margin_bytes: u64,
}

impl Brink {
    /// The brink of a limit.
    pub fn of(max_bytes: u64) -> Self {
        let margin = (max_bytes / MARGIN_PART).clamp(*MARGIN_BYTES.start(), *MARGIN_BYTES.end());
        let margin_bytes = margin.min(max_bytes / 4);
        Self { bytes: max_bytes - margin_bytes, margin_bytes }
    }

    /// Returns whether a container is there: `used_bytes` are charged to it, of which the kernel can reclaim
    /// `cache_bytes`, and it may use `swap_left_bytes` of swap.
    ///
    /// The kernel keeps some pages of programs to the end, and charges in batches: parts of the margin are left for
    /// both.
    pub fn is_reached(&self, used_bytes: u64, cache_bytes: u64, swap_left_bytes: u64) -> bool {
        swap_left_bytes < self.margin_bytes
            && used_bytes >= self.bytes.saturating_sub(self.margin_bytes / 4)
            && used_bytes.saturating_sub(cache_bytes)
                >= self.bytes.saturating_sub(self.margin_bytes / 2)
    }

    /// Returns whether a container may be there soon.
    pub fn is_near(&self, used_bytes: u64) -> bool {
        used_bytes >= self.bytes / 4 * 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    #[test]
    fn brink_is_a_sixteenth_below_the_limit_within_bounds() {
        let margin = |max| Brink::of(max).margin_bytes;
        assert_eq!(margin(512 * MB), 32 * MB);
        assert_eq!(margin(32 * MB), 4 * MB, "at least");
        assert_eq!(margin(100 << 30), 256 * MB, "at most");
        assert_eq!(margin(4 * MB), MB, "a quarter of a small one");
        for max in [0, 1, 4096, 7 * MB, u64::MAX] {
            let brink = Brink::of(max);
            assert_eq!(brink.bytes + brink.margin_bytes, max);
        }
    }

    #[test]
    fn page_cache_does_not_bring_a_container_to_its_brink() {
        let brink = Brink::of(512 * MB);
        assert!(brink.is_reached(480 * MB, 0, 0));
        assert!(brink.is_reached(480 * MB, 10 * MB, 0), "pages of programs stay to the end");
        assert!(!brink.is_reached(512 * MB, 100 * MB, 0), "the kernel reclaims these first");
        assert!(!brink.is_reached(512 * MB, 0, 100 * MB), "and swaps as long as there is room");
        assert!(!brink.is_reached(400 * MB, 0, 0));
        assert!(brink.is_near(400 * MB) && !brink.is_near(300 * MB));
    }

    #[test]
    fn only_sleep_with_a_limit_has_a_brink() {
        let limits = Limits { memory_max_bytes: Some(512 * MB), ..Limits::default() };
        assert_eq!(OutOfMemory::Sleep.brink(&limits), Some(Brink::of(512 * MB)));
        assert_eq!(OutOfMemory::Kill.brink(&limits), None);
        assert_eq!(OutOfMemory::Sleep.brink(&Limits::default()), None);
        assert_eq!("sleep".parse(), Ok(OutOfMemory::Sleep));
        assert!("panic".parse::<OutOfMemory>().is_err());
    }
}
