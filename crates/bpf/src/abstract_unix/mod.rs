//! Keeps abstract unix sockets of containers of one domain apart; see `abstract_unix.bpf.c`.

use std::os::fd::BorrowedFd;

use libbpf_rs::libbpf_sys as sys;

use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

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

record! {
    /// The constants of the programs.
    struct Config = "dm_unix_config" {
        level: u32,
    }
}

fn constants(level: u32) -> Vec<u8> {
    Config { level }.to_bytes()
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
    use crate::record::tests::assert_same;

    use super::*;

    record! {
        struct About = "dm_unix_about" {
            version: u64,
        }
    }

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<About>(GROUP.object);
    }

    #[test]
    fn root_kernel_takes_the_programs() {
        supported().unwrap();
    }
}
