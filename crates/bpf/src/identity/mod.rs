//! The identities of containers: the map that leads from a cgroup to a container, common to all
//! gates; see `identity.h`.

use std::os::fd::{AsFd, BorrowedFd};

use crate::call::Map;
use crate::error::BpfError;
use crate::record::{Record, record};

/// Name of the map.
pub(crate) const MAP: &str = "dm_members";

/// LIMIT: containers with an address: one per address of the largest pool.
pub const CONTAINERS_MAX: u32 = 1 << 18;

record! {
    /// The identity of a container.
    pub struct Identity = "dm_identity" {
        /// Index of its first address in the pool.
        pub address: u32,
        /// The tenant that it belongs to; 0 is none.
        pub account: u32,
        /// Cookie of its domain's stack.
        pub netns: u64,
    }
}

/// The identities by cgroup: the only map that a start and an end change.
#[derive(Debug)]
pub struct Identities(Map);

impl Identities {
    /// Takes the map with this id.
    pub(crate) fn by_id(id: u32) -> Result<Self, BpfError> {
        Ok(Self(Map::by_id(id)?))
    }

    pub(crate) fn new(map: Map) -> Self {
        Self(map)
    }

    /// Gives processes below this cgroup an identity. E2BIG if the map is full.
    pub fn enter(&self, cgroup_id: u64, identity: &Identity) -> Result<(), BpfError> {
        Ok(self.0.set(&cgroup_id.to_ne_bytes(), &identity.to_bytes())?)
    }

    /// Ends the identity of processes below this cgroup; `false` if there was none. Sockets keep
    /// theirs.
    pub fn leave(&self, cgroup_id: u64) -> Result<bool, BpfError> {
        Ok(self.0.remove(&cgroup_id.to_ne_bytes())?)
    }

    /// Returns the identity behind a cgroup.
    pub fn of(&self, cgroup_id: u64) -> Result<Option<Identity>, BpfError> {
        let value = self.0.get(&cgroup_id.to_ne_bytes())?;
        Ok(value.map(|value| Identity::from_bytes(&value)))
    }

    /// Returns whether a container is in the stack with this cookie.
    pub fn is_used(&self, netns: u64) -> Result<bool, BpfError> {
        let mut key = None;
        while let Some(next) = self.0.next_key(key.as_deref())? {
            let value = self.0.get(&next)?;
            if value.is_some_and(|value| Identity::from_bytes(&value).netns == netns) {
                return Ok(true);
            }
            key = Some(next);
        }
        Ok(false)
    }
}

impl AsFd for Identities {
    /// The map, for programs that are loaded around it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_has_the_layout_of_the_header_and_of_earlier_programs() {
        crate::record::tests::assert_same::<Identity>(crate::address::GROUP.object);
        let identity = Identity { address: 7, account: 0, netns: 0x0102_0304_0506_0708 };
        let earlier = [&7u32.to_ne_bytes()[..], &[0; 4], &identity.netns.to_ne_bytes()].concat();
        assert_eq!(identity.to_bytes(), earlier);
    }
}
