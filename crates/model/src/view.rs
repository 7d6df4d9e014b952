//! Views: files of procfs and sysfs that show the resources of the container instead of the host's.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Invalid;

/// Which containers have views.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Views {
    /// Those with a limit of memory or CPUs, of the limited resource. Not privileged ones: a view over a file of
    /// procfs keeps processes in a user namespace inside from mounting another procfs.
    #[default]
    Auto,
    /// Of memory and CPUs.
    Yes,
    /// None: the files of the kernel.
    No,
}

impl Views {
    /// Whether this is the default.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The word of the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Yes => "yes",
            Self::No => "no",
        }
    }
}

impl fmt::Display for Views {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Views {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let all = [Self::Auto, Self::Yes, Self::No];
        let found = all.into_iter().find(|views| views.as_str() == text);
        found.ok_or_else(|| Invalid::new("choice of views", text, "auto, yes or no"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_stored_alike() {
        for views in [Views::Auto, Views::Yes, Views::No] {
            assert_eq!(views.as_str().parse::<Views>().unwrap(), views);
            let json = serde_json::to_string(&views).unwrap();
            assert_eq!(json, format!("\"{views}\""));
            assert_eq!(serde_json::from_str::<Views>(&json).unwrap(), views);
        }
        assert!("maybe".parse::<Views>().is_err());
    }
}
