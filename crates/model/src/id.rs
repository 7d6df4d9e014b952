//! Names of containers, and the host ids their processes run under.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Invalid;

/// The identity of a container: 16 random bytes, written as 32 lower-case hex digits.
///
/// An id never changes and is never reused; the [`Name`] may change.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerId(String);

impl ContainerId {
    /// Length of the written form.
    pub const LEN: usize = 32;

    /// The id made of these bytes, which must come from a random source.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes.iter().map(|b| format!("{b:02x}")).collect())
    }

    /// The bytes it was made of.
    pub fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(self.0.as_bytes().chunks(2)) {
            let digit =
                |c: u8| if c.is_ascii_digit() { c - b'0' } else { c.wrapping_sub(b'a') + 10 };
            *byte = pair.iter().fold(0u8, |n, c| n << 4 | digit(*c) & 15);
        }
        bytes
    }

    /// The written form.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first twelve digits, as lists show them.
    pub fn short(&self) -> &str {
        &self.0[..12]
    }
}

impl FromStr for ContainerId {
    type Err = Invalid;

    fn from_str(s: &str) -> Result<Self, Invalid> {
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if s.len() == Self::LEN && s.bytes().all(hex) {
            Ok(Self(s.to_owned()))
        } else {
            Err(Invalid::new("container id", s, "32 lower-case hex digits"))
        }
    }
}

impl TryFrom<String> for ContainerId {
    type Error = Invalid;
    fn try_from(s: String) -> Result<Self, Invalid> {
        s.parse()
    }
}

impl From<ContainerId> for String {
    fn from(id: ContainerId) -> String {
        id.0
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The operator's name of a container: `[a-zA-Z0-9][a-zA-Z0-9_.-]*`, at most 128 bytes.
///
/// Holding one proves that it is a single path component that is neither `.` nor `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Invalid;

    fn from_str(s: &str) -> Result<Self, Invalid> {
        let tail = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        let head = s.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
        if head && s.len() <= 128 && s.bytes().all(tail) {
            Ok(Self(s.to_owned()))
        } else {
            Err(Invalid::new(
                "name",
                s,
                "it starts with a letter or digit and goes on with letters, digits, '_', '.' or \
                 '-', 128 bytes at most",
            ))
        }
    }
}

impl TryFrom<String> for Name {
    type Error = Invalid;
    fn try_from(s: String) -> Result<Self, Invalid> {
        s.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One of the 131,072 equal parts of the host's 32-bit id space.
///
/// A container owns one slot of 32,768 ids (or two neighbouring ones, see [`IdMap::wide`]) for as
/// long as it has files of its own: no other container's processes ever run under them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IdSlot(pub u32);

impl IdSlot {
    /// Ids in a slot.
    pub const IDS: u32 = 32_768;
    /// Slots in the id space.
    pub const COUNT: u32 = 1 << 17;

    /// The host id that the container's id 0 is mapped to.
    pub fn first_host_id(self) -> u32 {
        self.0 * Self::IDS
    }
}

/// The mapping of a container's ids to the host's (user_namespaces(7), "User and group ID
/// mappings"). The same map serves users and groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMap {
    /// The host id of the container's id 0.
    pub base: u32,
    /// The container sees 0 to 65,535 in one piece, which takes two slots.
    pub wide: bool,
}

/// A run of ids: `inside..inside + count` is `outside..outside + count` on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdExtent {
    /// First id as the container sees it.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// Number of ids.
    pub count: u32,
}

impl IdMap {
    /// The id of the user `nobody` inside.
    pub const NOBODY: u32 = 65_534;

    /// Ids 0 to 32,766 and 65,534 in one slot.
    pub fn narrow(slot: IdSlot) -> Self {
        Self { base: slot.first_host_id(), wide: false }
    }

    /// Ids 0 to 65,535 in this slot and the next.
    pub fn wide(slot: IdSlot) -> Self {
        Self { base: slot.first_host_id(), wide: true }
    }

    /// The runs to be written to `/proc/PID/uid_map`.
    pub fn extents(&self) -> Vec<IdExtent> {
        if self.wide {
            return vec![IdExtent { inside: 0, outside: self.base, count: 2 * IdSlot::IDS }];
        }
        let last = IdSlot::IDS - 1;
        vec![
            IdExtent { inside: 0, outside: self.base, count: last },
            IdExtent { inside: Self::NOBODY, outside: self.base + last, count: 1 },
        ]
    }

    /// The text for `/proc/PID/uid_map` and `gid_map`.
    pub fn to_proc_text(&self) -> String {
        let line = |e: &IdExtent| format!("{} {} {}\n", e.inside, e.outside, e.count);
        self.extents().iter().map(line).collect()
    }

    /// The host id of an id inside; `None` where the container has no such id.
    pub fn to_host(&self, inside: u32) -> Option<u32> {
        let hit = |e: &IdExtent| inside.checked_sub(e.inside).filter(|d| *d < e.count);
        self.extents().iter().find_map(|e| hit(e).map(|d| e.outside + d))
    }

    /// The id inside of a host id; `None` where it is not one of the container's.
    pub fn to_inside(&self, host: u32) -> Option<u32> {
        let hit = |e: &IdExtent| host.checked_sub(e.outside).filter(|d| *d < e.count);
        self.extents().iter().find_map(|e| hit(e).map(|d| e.inside + d))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_single_path_components() {
        for good in ["a", "web-1", "0", "A.b_c"] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "-a", "a/b", "a b", "ä", "a\n", &"x".repeat(129)] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn narrow_map_keeps_the_nobody_id_and_never_leaves_its_slot() {
        let map = IdMap::narrow(IdSlot(60_000));
        assert_eq!(map.to_host(0), Some(60_000 * 32_768));
        assert_eq!(map.to_host(32_766), Some(60_000 * 32_768 + 32_766));
        assert_eq!(map.to_host(32_767), None);
        assert_eq!(map.to_host(65_534), Some(60_001 * 32_768 - 1));
        for inside in [0, 1, 999, 32_766, 65_534] {
            assert_eq!(map.to_inside(map.to_host(inside).unwrap()), Some(inside));
        }
        assert_eq!(map.to_inside(60_001 * 32_768), None);
    }
}
