//! The host user that creates a container's user namespace.
//!
//! The kernel counts the namespaces, inotify instances and watches, and fanotify groups of a user
//! namespace against its creator (namespaces(7), `/proc/sys/user`). With root as the creator of all,
//! one container that reaches root's limit blocks inotify and new containers on the whole host. A
//! different user therefore creates each of them: the host's limit then holds for each container.
//!
//! The owner of a user namespace has all capabilities in it (user_namespaces(7)). No process runs as
//! an owner. The ids of owners are those of the last slot, which is never assigned (model/id.rs).

use dormouse_kernel::call::{self as kernel, CapabilityMasks};

/// Number of ids in a slot.
const SLOT_IDS: u32 = 32_768;
/// The first id of the last slot.
const FIRST: u32 = u32::MAX - SLOT_IDS + 1;

/// LIMIT: two containers have the same owner if their slots are a multiple of this apart.
const OWNERS: u32 = 32_000;

/// The owner of a user namespace with this map, or `None` if the map does not begin with a slot.
fn of(uid_map: &str) -> Option<u32> {
    let base: u32 = uid_map.split_ascii_whitespace().nth(1)?.parse().ok()?;
    (base != 0 && base.is_multiple_of(SLOT_IDS)).then_some(FIRST + base / SLOT_IDS % OWNERS)
}

/// The calling thread's change of its effective user to the owner of a user namespace, until dropped.
/// The thread keeps the capabilities of root.
#[derive(Debug)]
pub(crate) struct AsOwner(bool);

impl AsOwner {
    /// Makes the thread the owner. Inside a user namespace without that id the thread stays root: on a
    /// host that is itself a container, the container starts without the bound.
    pub(crate) fn of(uid_map: &str) -> Self {
        let Some(owner) = of(uid_map) else { return Self(false) };
        if kernel::set_effective_uid(owner).is_err() {
            return Self(false);
        }
        // setresuid(2) has cleared the effective capabilities, which are still permitted.
        let raised = kernel::capget()
            .and_then(|now| kernel::capset(CapabilityMasks { effective: now.permitted, ..now }));
        let this = Self(true);
        match raised {
            Ok(()) => this,
            Err(_) => {
                drop(this);
                Self(false)
            }
        }
    }
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        // A keeper with another user cannot serve requests. The keeper exits, and its children live on.
        // The call fails only without memory for credentials, because the saved id is root's.
        if self.0 && kernel::set_effective_uid(0).is_err() {
            kernel::exit(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_is_a_distinct_id_of_the_last_slot() {
        let owner = |slot: u32| of(&format!("0 {} 32767\n65534 1 1\n", slot * SLOT_IDS));
        assert_eq!(owner(57_344), Some(FIRST + 25_344));
        assert_ne!(owner(57_344), owner(57_345));
        assert_eq!(owner(131_070).map(|id| (FIRST..u32::MAX - 1).contains(&id)), Some(true));
        assert_eq!(of("0 1000 1\n"), None);
        assert_eq!(of("0 0 4294967295\n"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn thread_returns_to_root_with_its_capabilities() {
        let before = kernel::capget().unwrap();
        let map = format!("0 {} 32767\n", 60_000 * SLOT_IDS);
        {
            let _owner = AsOwner::of(&map);
            assert_eq!(rustix::process::geteuid().as_raw(), of(&map).unwrap());
            assert_eq!(kernel::capget().unwrap(), before);
        }
        assert!(rustix::process::geteuid().is_root());
        assert_eq!(kernel::capget().unwrap(), before);
    }
}
