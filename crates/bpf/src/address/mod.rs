//! Address networking: the programs of `address.bpf.c`, and operations on their maps.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use libbpf_rs::libbpf_sys as sys;

use crate::call::{self, Map, Program};
use crate::error::BpfError;
use crate::group::{Attached, Description};
use crate::identity::{self, Identities};
use crate::record::{Record, record};

pub use crate::group::Trace;

/// The programs attached to the parent cgroup, and their hooks.
pub static GROUP: Description = Description {
    name: "address",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/address.o")),
    programs: &[
        ("dm_sock_create", sys::BPF_CGROUP_INET_SOCK_CREATE),
        ("dm_bind4", sys::BPF_CGROUP_INET4_BIND),
        ("dm_bind6", sys::BPF_CGROUP_INET6_BIND),
        ("dm_connect4", sys::BPF_CGROUP_INET4_CONNECT),
        ("dm_connect6", sys::BPF_CGROUP_INET6_CONNECT),
        ("dm_sendmsg4", sys::BPF_CGROUP_UDP4_SENDMSG),
        ("dm_sendmsg6", sys::BPF_CGROUP_UDP6_SENDMSG),
        ("dm_recvmsg4", sys::BPF_CGROUP_UDP4_RECVMSG),
        ("dm_recvmsg6", sys::BPF_CGROUP_UDP6_RECVMSG),
        ("dm_peername4", sys::BPF_CGROUP_INET4_GETPEERNAME),
        ("dm_peername6", sys::BPF_CGROUP_INET6_GETPEERNAME),
        ("dm_sockname4", sys::BPF_CGROUP_INET4_GETSOCKNAME),
        ("dm_sockname6", sys::BPF_CGROUP_INET6_GETSOCKNAME),
        ("dm_ingress", sys::BPF_CGROUP_INET_INGRESS),
        ("dm_egress", sys::BPF_CGROUP_INET_EGRESS),
    ],
    anchor: "dm_sock_create",
    maps: &[identity::MAP, EXTRA, DOMAINS, SOCKETS, "dm_about"],
    about: "dm_about",
};

const EXTRA: &str = "dm_extra";
const DOMAINS: &str = "dm_domains";
const SOCKETS: &str = "dm_sockets";

/// LIMIT: added addresses: the rest of the largest pool.
pub const EXTRA_MAX: u32 = 1 << 18;
/// LIMIT: domains.
pub const DOMAINS_MAX: u32 = 4096;

/// The program attached to a domain's devices. Earlier builds have `dm_steer` there, which does not know pairs.
pub const ARRIVE: &str = "dm_arrive";

/// The number of the domain's end of the pair of the container with this first address: `DM_PAIR` of record.h.
pub fn pair(index: u32) -> u32 {
    PAIR + index
}

/// Whether a device is such an end.
pub fn is_pair(device: u32) -> bool {
    device >= PAIR
}

const PAIR: u32 = 0x100_0000;

/// Constants set before the programs are loaded: `struct dm_config` of record.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Constants {
    /// Level of a container's cgroup below the root of the v2 hierarchy (a child of it has 1).
    pub level: u32,
    /// First address of the pool.
    pub pool: Ipv4Addr,
    /// Number of addresses of the pool, at most 2^18: the private loopback has no room for more.
    pub pool_count: u32,
    /// Addresses per chunk, a power of two.
    pub chunk: u32,
    /// The host's random IPv6 /48.
    pub prefix6: [u8; 6],
    /// Whether the kernel was built with SYN cookies ([`has_cookies`]).
    pub has_cookies: bool,
}

/// Returns whether the kernel was built with SYN cookies (`CONFIG_SYN_COOKIES`), whatever a stack has them for.
pub fn has_cookies() -> bool {
    Path::new("/proc/sys/net/ipv4/tcp_syncookies").exists()
}

record! {
    /// The constants as the programs have them; IPv6 words are in network byte order.
    struct Config = "dm_config" {
        level: u32,
        pool4: u32,
        pool_count: u32,
        chunk: u32,
        public6: [u32; 3],
        loop6: [u32; 3],
        has_cookies: u32,
    }
}

impl Constants {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let [a, b, c, d, e, f] = self.prefix6;
        // The first 96 bits of the addresses of one /64 below the prefix.
        let words = |high, low| {
            [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, high, low]), 0]
        };
        let config = Config {
            level: self.level,
            pool4: u32::from(self.pool),
            pool_count: self.pool_count,
            chunk: self.chunk,
            public6: words(0, 0),
            loop6: words(0xff, 0xff),
            has_cookies: self.has_cookies.into(),
        };
        config.to_bytes()
    }
}

/// Tests whether this kernel loads the programs, including the one for devices.
pub fn supported(constants: Constants) -> Result<(), BpfError> {
    GROUP.supported(&constants.to_bytes())
}

/// The programs at their cgroup.
#[derive(Debug)]
pub struct Programs {
    attached: Attached,
    constants: Constants,
}

/// Attaches the programs to the parent cgroup, or completes and updates what is there. `without`
/// names programs to leave out. Callers hold a lock.
pub fn attach(
    cgroup: BorrowedFd<'_>,
    constants: Constants,
    without: &[&str],
) -> Result<Programs, BpfError> {
    let attached = GROUP.attach(cgroup, &constants.to_bytes(), without)?;
    Ok(Programs { attached, constants })
}

/// The programs at this cgroup, if they are there (of whatever build).
pub fn find(cgroup: BorrowedFd<'_>, constants: Constants) -> Result<Option<Programs>, BpfError> {
    Ok(GROUP.find(cgroup)?.map(|attached| Programs { attached, constants }))
}

/// Takes the programs away.
pub fn detach(cgroup: BorrowedFd<'_>) -> Result<(), BpfError> {
    GROUP.detach(cgroup)
}

impl Programs {
    fn map(&self, name: &'static str) -> Result<&Map, BpfError> {
        self.attached
            .map(name)
            .ok_or_else(|| BpfError::Missing { object: GROUP.name, name: name.into() })
    }

    /// Returns whether every program is attached and of this build.
    pub fn is_current(&self) -> Result<bool, BpfError> {
        GROUP.is_current(&self.attached, &self.constants.to_bytes())
    }

    /// Returns the ids by which the map of members is found.
    pub fn trace(&self) -> Result<Trace, BpfError> {
        let missing = || BpfError::Missing { object: GROUP.name, name: identity::MAP.into() };
        self.attached.trace(identity::MAP).ok_or_else(missing)
    }

    /// Returns the identities of the containers.
    pub fn identities(&self) -> Result<Identities, BpfError> {
        Identities::by_id(self.map(identity::MAP)?.id)
    }

    /// Adds an address for the container with the first address `owner`. E2BIG if the map is full.
    pub fn add(&self, index: u32, owner: u32) -> Result<(), BpfError> {
        Ok(self.map(EXTRA)?.set(&index.to_ne_bytes(), &owner.to_ne_bytes())?)
    }

    /// Removes an added address; `false` if no container had it.
    pub fn remove(&self, index: u32) -> Result<bool, BpfError> {
        Ok(self.map(EXTRA)?.remove(&index.to_ne_bytes())?)
    }

    /// From now on only members create sockets in this stack, among processes below the cgroup. E2BIG
    /// if the map is full.
    pub fn open_domain(&self, netns: u64) -> Result<(), BpfError> {
        Ok(self.map(DOMAINS)?.set(&netns.to_ne_bytes(), &1u32.to_ne_bytes())?)
    }

    /// Removes a stack.
    pub fn close_domain(&self, netns: u64) -> Result<bool, BpfError> {
        Ok(self.map(DOMAINS)?.remove(&netns.to_ne_bytes())?)
    }

    /// Attaches [`ARRIVE`] to devices of the calling thread's network namespace.
    pub fn steer(&self, devices: &[u32]) -> Result<(), BpfError> {
        self.with_arrive(|program| {
            devices.iter().try_for_each(|device| attach_arrive(*device, program))
        })
    }

    /// Calls a function with [`ARRIVE`], which is loaded if it was not loaded just now.
    pub fn with_arrive<T, E: From<BpfError>>(
        &self,
        function: impl FnOnce(BorrowedFd<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        match self.attached.other(ARRIVE) {
            Some(program) => function(program.as_fd()),
            None => {
                let loaded = GROUP.load_one(&self.constants.to_bytes(), ARRIVE, &self.attached)?;
                function(loaded.as_fd())
            }
        }
    }
}

/// Attaches [`ARRIVE`] to a device of the calling thread's network namespace.
pub fn attach_arrive(device: u32, program: BorrowedFd<'_>) -> Result<(), BpfError> {
    call::attach_to_device(device, program)
        .map_err(|source| BpfError::Attach { program: ARRIVE, source })
}

/// Returns [`ARRIVE`] of a device of the calling thread's network namespace; `None` if it has that of an earlier build.
pub fn arrive_of(device: u32) -> Result<Option<Program>, BpfError> {
    for id in call::attached_to_device(device, sys::BPF_TCX_INGRESS)? {
        match Program::by_id(id) {
            Ok(program) if program.name == ARRIVE => return Ok(Some(program)),
            Err(e) if e.errno() != libc::ENOENT => return Err(e.into()),
            _ => {} // of others, or detached meanwhile
        }
    }
    Ok(None)
}

/// Returns the identities found before, if their programs are still attached to the cgroup.
pub fn follow(cgroup: BorrowedFd<'_>, trace: Trace) -> Result<Option<Identities>, BpfError> {
    Ok(GROUP.follow(cgroup, trace)?.map(Identities::new))
}

#[cfg(test)]
mod tests {
    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    record! {
        struct Socket = "dm_socket" {
            index: u32,
            any: u32,
            named4: u32,
        }
    }

    record! {
        struct About = "dm_about" {
            version: u64,
        }
    }

    fn constants() -> Constants {
        Constants {
            level: 2,
            pool: Ipv4Addr::new(10, 136, 0, 0),
            pool_count: 1 << 18,
            chunk: 1024,
            prefix6: [0xfd, 1, 2, 3, 4, 5],
            has_cookies: true,
        }
    }

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<Socket>(GROUP.object);
        assert_same::<About>(GROUP.object);
    }

    #[test]
    fn constants_have_the_layout_of_the_record() {
        let bytes = constants().to_bytes();
        assert_eq!(bytes.len(), 44);
        assert_eq!(bytes[4..8], 0x0a88_0000u32.to_ne_bytes());
        assert_eq!(bytes[16..28], [0xfd, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[28..40], [0xfd, 1, 2, 3, 4, 5, 0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!(bytes[40..44], 1u32.to_ne_bytes());
    }

    #[test]
    fn root_kernel_takes_the_programs() {
        supported(constants()).unwrap();
        // One without SYN cookies has no helpers for them.
        supported(Constants { has_cookies: false, ..constants() }).unwrap();
    }

    #[test]
    fn root_full_maps_refuse_one_more_entry_and_take_it_after_a_removal() {
        let maps = GROUP.load_alone_with(&constants().to_bytes()).unwrap().0;
        let map = |name: &str| maps.iter().find(|map| map.name == name).unwrap();
        assert_full(map(identity::MAP), identity::CONTAINERS_MAX);
        assert_full(map(EXTRA), EXTRA_MAX);
        assert_full(map(DOMAINS), DOMAINS_MAX);
    }
}
