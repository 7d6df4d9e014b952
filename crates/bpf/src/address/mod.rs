//! Address networking: the programs of `address.bpf.c`, and operations on their maps.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::libbpf_sys as sys;

use crate::call::{self, Map};
use crate::error::BpfError;
use crate::group::{Attached, Description};

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
    maps: &["dm_members", "dm_extra", "dm_domains", "dm_sockets", "dm_about"],
    about: "dm_about",
};

/// The map of containers by their cgroups.
const MEMBERS: &str = "dm_members";

/// The program attached to a domain's devices.
pub const STEER: &str = "dm_steer";

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
}

impl Constants {
    fn to_bytes(self) -> Vec<u8> {
        let p = self.prefix6;
        let half = |subnet: [u8; 2]| [p[0], p[1], p[2], p[3], p[4], p[5], subnet[0], subnet[1]];
        let mut bytes = Vec::new();
        for word in [self.level, u32::from(self.pool), self.pool_count, self.chunk] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(half([0, 0]));
        bytes.extend([0; 4]);
        bytes.extend(half([0xff, 0xff]));
        bytes.extend([0; 4]);
        bytes
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
        let missing = || BpfError::Missing { object: GROUP.name, name: MEMBERS.into() };
        self.attached.trace(MEMBERS).ok_or_else(missing)
    }

    /// Returns the map of the containers' cgroups.
    pub fn members(&self) -> Result<Members, BpfError> {
        Ok(Members(Map::by_id(self.map(MEMBERS)?.id)?))
    }

    /// Returns whether a container is in the stack with this cookie.
    pub fn is_used(&self, netns: u64) -> Result<bool, BpfError> {
        let members = self.map(MEMBERS)?;
        let mut key = None;
        while let Some(next) = members.next_key(key.as_deref())? {
            if let Some(value) = members.get(&next)?
                && value.get(8..16) == Some(&netns.to_ne_bytes()[..])
            {
                return Ok(true);
            }
            key = Some(next);
        }
        Ok(false)
    }

    /// Adds an address for the container with the first address `owner`. E2BIG if the map is full.
    pub fn add(&self, index: u32, owner: u32) -> Result<(), BpfError> {
        Ok(self.map("dm_extra")?.set(&index.to_ne_bytes(), &owner.to_ne_bytes())?)
    }

    /// Removes an added address; `false` if no container had it.
    pub fn remove(&self, index: u32) -> Result<bool, BpfError> {
        Ok(self.map("dm_extra")?.remove(&index.to_ne_bytes())?)
    }

    /// From now on only members create sockets in this stack, among processes below the cgroup.
    pub fn open_domain(&self, netns: u64) -> Result<(), BpfError> {
        Ok(self.map("dm_domains")?.set(&netns.to_ne_bytes(), &1u32.to_ne_bytes())?)
    }

    /// Removes a stack.
    pub fn close_domain(&self, netns: u64) -> Result<bool, BpfError> {
        Ok(self.map("dm_domains")?.remove(&netns.to_ne_bytes())?)
    }

    /// Attaches [`STEER`] to devices of the calling thread's network namespace.
    pub fn steer(&self, devices: &[u32]) -> Result<(), BpfError> {
        let loaded;
        let program = match self.attached.other(STEER) {
            Some(program) => program,
            None => {
                loaded = GROUP.load_one(&self.constants.to_bytes(), STEER, &self.attached)?;
                &loaded
            }
        };
        for device in devices {
            call::attach_to_device(*device, program.as_fd())
                .map_err(|source| BpfError::Attach { program: STEER, source })?;
        }
        Ok(())
    }
}

/// The map of the containers' cgroups: the only one that a start and an end change.
#[derive(Debug)]
pub struct Members(Map);

impl Members {
    /// Returns the map found before, if its programs are still attached to the cgroup.
    pub fn follow(cgroup: BorrowedFd<'_>, trace: Trace) -> Result<Option<Self>, BpfError> {
        Ok(GROUP.follow(cgroup, trace)?.map(Self))
    }

    /// Makes processes below this cgroup members: the container whose first address is `index`, in
    /// the stack with this cookie. E2BIG if the map is full.
    pub fn enter(&self, cgroup_id: u64, index: u32, netns: u64) -> Result<(), BpfError> {
        let mut member = Vec::with_capacity(16);
        member.extend(index.to_ne_bytes());
        member.extend([0; 4]);
        member.extend(netns.to_ne_bytes());
        Ok(self.0.set(&cgroup_id.to_ne_bytes(), &member)?)
    }

    /// Ends the membership of processes below this cgroup; `false` if there was none. Sockets keep
    /// their identity.
    pub fn leave(&self, cgroup_id: u64) -> Result<bool, BpfError> {
        Ok(self.0.remove(&cgroup_id.to_ne_bytes())?)
    }

    /// The container's first address behind a cgroup.
    pub fn index_of(&self, cgroup_id: u64) -> Result<Option<u32>, BpfError> {
        let value = self.0.get(&cgroup_id.to_ne_bytes())?;
        Ok(value.and_then(|v| v.first_chunk().map(|b| u32::from_ne_bytes(*b))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_have_the_layout_of_the_record() {
        let constants = Constants {
            level: 2,
            pool: Ipv4Addr::new(10, 136, 0, 0),
            pool_count: 1 << 18,
            chunk: 1024,
            prefix6: [0xfd, 1, 2, 3, 4, 5],
        };
        let bytes = constants.to_bytes();
        assert_eq!(bytes.len(), 40);
        assert_eq!(bytes[4..8], 0x0a88_0000u32.to_ne_bytes());
        assert_eq!(bytes[16..28], [0xfd, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[28..40], [0xfd, 1, 2, 3, 4, 5, 0xff, 0xff, 0, 0, 0, 0]);
    }

    #[test]
    fn root_kernel_takes_the_programs() {
        let constants = Constants {
            level: 2,
            pool: Ipv4Addr::new(10, 136, 0, 0),
            pool_count: 1 << 18,
            chunk: 1024,
            prefix6: [0xfd, 1, 2, 3, 4, 5],
        };
        supported(constants).unwrap();
    }
}
