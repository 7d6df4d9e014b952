//! User namespaces (user_namespaces(7)) that processes have made for themselves.
//!
//! All ids are those of the container's own user namespace, except fields that are named `inside`.

use serde::{Deserialize, Serialize};

/// One user namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The object of its parent, which is before it; `None` for the container's own.
    #[serde(default)]
    pub parent: Option<usize>,
    /// The effective user of its creator, which has every capability in it.
    pub owner: u32,
    /// Its user id map; empty if none was written.
    pub uids: Vec<Ids>,
    /// Its group id map; the same.
    pub gids: Vec<Ids>,
    /// setgroups(2) is denied in it.
    #[serde(default)]
    pub denies_groups: bool,
}

/// A range of mapped ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// The first, inside.
    pub inside: u32,
    /// The first, in the container's own user namespace.
    pub outside: u32,
    /// The number of ids.
    pub count: u32,
}

impl Ids {
    /// LIMIT: UID_GID_MAP_MAX_EXTENTS of the kernel.
    pub const MAX: usize = 340;

    /// The same range in terms of another namespace; `None` if it is not contiguous there.
    pub fn within(self, others: &[Self]) -> Option<Self> {
        let is_part = |other: &&Self| {
            let end = |ids: &Self| u64::from(ids.outside) + u64::from(ids.count);
            other.outside <= self.outside && end(&self) <= end(other)
        };
        let other = others.iter().find(is_part)?;
        let outside = other.inside.checked_add(self.outside - other.outside)?;
        Some(Self { outside, ..self })
    }

    /// Whether an id of the container is in one of the ranges.
    pub fn has(all: &[Self], id: u32) -> bool {
        all.iter().any(|ids| id >= ids.outside && id - ids.outside < ids.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_in_the_parent_namespace() {
        let around = [
            Ids { inside: 0, outside: 1000, count: 10 },
            Ids { inside: 50, outside: 5000, count: 2 },
        ];
        let own = |outside, count| Ids { inside: 7, outside, count };
        assert_eq!(own(1003, 7).within(&around), Some(own(3, 7)));
        assert_eq!(own(5001, 1).within(&around), Some(own(51, 1)));
        assert_eq!(own(1003, 8).within(&around), None);
        assert_eq!(own(999, 1).within(&around), None);
        assert!(Ids::has(&around, 1009) && !Ids::has(&around, 1010) && !Ids::has(&[], 0));
    }
}
