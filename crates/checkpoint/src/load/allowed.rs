//! The grants of a container's configuration, beyond which no record leads.
//!
//! This module uses no other. [`super::check`] compares records with the grants.

use std::net::IpAddr;

/// The grants of a container's configuration.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// The first process is the house init.
    pub has_init: bool,
    /// The capabilities of the configuration, as a mask (capabilities(7)).
    pub capabilities: u64,
    /// Ambient capabilities: the first process has them as another user than root.
    pub ambient: u64,
    /// Inheritable capabilities of the first process, as any user.
    pub inheritable: u64,
    /// The user of the first process, as seen inside.
    pub uid: u32,
    /// The group of the first process.
    pub gid: u32,
    /// The supplementary groups of the first process.
    pub groups: Vec<u32>,
    /// The number of ids inside, from 0. Id 65,534 exists besides.
    pub ids: u32,
    /// Directories inside that are a tmpfs.
    pub memory: Vec<String>,
    /// The network stack is private.
    pub own_network: bool,
    /// The UTS namespace is private.
    pub own_names: bool,
    /// The IPC namespace is private.
    pub own_ipc: bool,
    /// Processes may create control groups below the group of the container.
    pub cgroups: bool,
    /// Any process may create a user namespace (user_namespaces(7)).
    pub user_namespaces: bool,
    /// No filter prevents chroot(2) by a process with the capability in its own user namespace.
    pub chroots: bool,
    /// No process gains privileges by execve.
    pub no_new_privileges: bool,
    /// Objects with open files that were held and are passed in ([`super::Wanted::Held`]); all
    /// others are created again.
    pub held: Vec<u32>,
    /// The container has a terminal, whose master belongs to the engine.
    pub console: bool,
    /// Addresses of another container, each with the address that replaces it.
    pub addresses: Vec<(IpAddr, IpAddr)>,
    /// The restore runs beside the saved container, as a child beside its parent: memory that is
    /// wiped by a fork (MADV_WIPEONFORK), such as the state of random number generators, is empty.
    pub beside: bool,
    /// Time that has passed for timers and waits since the checkpoint; 0 if time has stopped for the
    /// container.
    pub passed_ns: u64,
}

impl Allowed {
    /// Returns whether the container has the id.
    pub(super) fn has_id(&self, id: u32) -> bool {
        id < self.ids || id == 65_534
    }

    /// Returns whether any process may have held the capability. Root with CAP_SETUID can take any
    /// uid; so can a process without no_new_privs, through a set-user-ID program.
    pub(super) fn may_have(&self, capability: u64) -> bool {
        let by_itself = self.uid == 0 || !self.no_new_privileges;
        by_itself && self.capabilities & capability != 0
    }
}

/// Masks of the capabilities that objects and credentials of a record need.
pub(super) const SETGID: u64 = 1 << 6;
pub(super) const SETUID: u64 = 1 << 7;
pub(super) const SETPCAP: u64 = 1 << 8;
pub(super) const NET_ADMIN: u64 = 1 << 12;
pub(super) const NET_RAW: u64 = 1 << 13;
pub(super) const SYS_CHROOT: u64 = 1 << 18;
pub(super) const SYS_ADMIN: u64 = 1 << 21;
pub(super) const SYS_TIME: u64 = 1 << 25;
pub(super) const SETFCAP: u64 = 1 << 31;
