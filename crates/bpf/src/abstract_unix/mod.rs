//! Keeps abstract unix sockets of containers of one domain apart; see `abstract_unix.bpf.c`.

use std::os::fd::BorrowedFd;

use libbpf_rs::libbpf_sys as sys;

use crate::error::BpfError;
use crate::group::Description;

/// The programs and their hooks.
pub static GROUP: Description = Description {
    name: "abstract_unix",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/abstract_unix.o")),
    programs: &[
        ("dm_unix_connect", sys::BPF_CGROUP_UNIX_CONNECT),
        ("dm_unix_sendmsg", sys::BPF_CGROUP_UNIX_SENDMSG),
    ],
    anchor: "dm_unix_connect",
    maps: &["dm_unix_about"],
    about: "dm_unix_about",
};

/// `struct dm_unix_config` of record.h: the level of a container's cgroup.
fn constants(level: u32) -> [u8; 4] {
    level.to_ne_bytes()
}

/// Tests whether this kernel loads the programs (Linux 6.7).
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&constants(2))
}

/// Attaches the programs, or updates them. Containers' cgroups are `level` below the v2 root.
pub fn attach(cgroup: BorrowedFd<'_>, level: u32, without: &[&str]) -> Result<(), BpfError> {
    GROUP.attach(cgroup, &constants(level), without).map(drop)
}

/// Takes the programs away.
pub fn detach(cgroup: BorrowedFd<'_>) -> Result<(), BpfError> {
    GROUP.detach(cgroup)
}

#[cfg(test)]
mod tests {
    #[test]
    fn root_kernel_takes_the_programs() {
        super::supported().unwrap();
    }
}
