//! The BPF programs of Dormouse: one folder per group of programs with its C, the record that C and
//! Rust share, and five verbs: supported, attach, update, find, detach.
//!
//! Programs are attached to a cgroup the plain way (`BPF_PROG_ATTACH` with `BPF_F_ALLOW_MULTI`), so
//! that the kernel keeps them and their maps for as long as the cgroup exists: no process holds a
//! descriptor, no bpffs is needed, and whoever comes later finds the maps through the cgroup
//! ([`group`]). Starting a container is then a few bpf(2) calls ([`call`]); libbpf is only needed to
//! load, once per boot.
//!
//! "Supported" means that it was loaded: configuration and version numbers lie about BPF.

pub mod abstract_unix;
pub mod address;
pub mod call;
pub mod embryo;
mod error;
pub mod group;
pub mod handshake;

pub use error::BpfError;
