//! The action for a container while the memory of the host is short.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Invalid;

/// How a container gives memory while the host, or all containers together, are short of it, and it uses more than its
/// guarantee (`--evict`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evict {
    /// By sleep if it may sleep by itself, and not at all otherwise.
    #[default]
    Auto,
    /// It falls asleep.
    Sleep,
    /// It is slowed down above its present memory (`memory.high`).
    Throttle,
    /// It is stopped and started again.
    Restart,
    /// Its processes are killed.
    Kill,
    /// Not at all.
    Never,
}

/// What is done with a container that is to give memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// It falls asleep.
    Sleep,
    /// It is slowed down.
    Throttle,
    /// It is stopped and started again.
    Restart,
    /// It is killed.
    Kill,
}

impl Evict {
    /// All words.
    const ALL: [Self; 6] =
        [Self::Auto, Self::Sleep, Self::Throttle, Self::Restart, Self::Kill, Self::Never];

    /// Returns whether this is the default setting.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the word of the options.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Sleep => "sleep",
            Self::Throttle => "throttle",
            Self::Restart => "restart",
            Self::Kill => "kill",
            Self::Never => "never",
        }
    }

    /// Returns what is done with a container that may, or may not, sleep by itself; `None` if it gives no memory.
    pub fn eviction(self, may_sleep: bool) -> Option<Eviction> {
        match self {
            Self::Auto => may_sleep.then_some(Eviction::Sleep),
            Self::Sleep => Some(Eviction::Sleep),
            Self::Throttle => Some(Eviction::Throttle),
            Self::Restart => Some(Eviction::Restart),
            Self::Kill => Some(Eviction::Kill),
            Self::Never => None,
        }
    }
}

impl FromStr for Evict {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found = Self::ALL.into_iter().find(|one| one.as_str() == text);
        let expected = "auto, sleep, throttle, restart, kill or never";
        found.ok_or_else(|| Invalid::new("eviction", text, expected))
    }
}

impl Eviction {
    /// Returns the word of messages and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Throttle => "throttle",
            Self::Restart => "restart",
            Self::Kill => "kill",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_is_one_of_its_words() {
        for one in Evict::ALL {
            assert_eq!(one.as_str().parse(), Ok(one));
            assert_eq!(serde_json::to_value(one).unwrap(), one.as_str());
        }
        assert!("swap".parse::<Evict>().is_err() && "".parse::<Evict>().is_err());
        assert_eq!(
            (Evict::Auto.eviction(true), Evict::Auto.eviction(false)),
            (Some(Eviction::Sleep), None)
        );
        for may_sleep in [true, false] {
            assert_eq!(Evict::Kill.eviction(may_sleep), Some(Eviction::Kill));
            assert_eq!(Evict::Never.eviction(may_sleep), None);
        }
        assert!(Evict::Auto.is_default() && !Evict::Never.is_default());
    }
}
