//! The BPF programs of Dormouse: one folder per group of programs, with its C code, the record that
//! C and Rust share (`record.h`, with the capacity of every map), and the loader. Every group has
//! `supported`; the others depend on its lifetime:
//!
//! - `address`, `abstract_unix` and `socket_count` have `attach` and `detach`, and two of them also `find`. They are
//!   attached to a cgroup (`BPF_PROG_ATTACH` with `BPF_F_ALLOW_MULTI`), and the kernel keeps
//!   programs and maps for as long as the cgroup exists. No process holds a descriptor, no bpffs is
//!   needed, and a later process finds the maps through the cgroup ([`group`]). `attach` also
//!   replaces programs of another build. Starting a container is then a few bpf(2) calls
//!   ([`call`]); libbpf loads the programs once per boot.
//! - `embryo` is loaded for each checkpoint (`load`, `read`, `holders`) and ends with its
//!   descriptors.
//! - `aio` is loaded for a checkpoint of a process with asynchronous I/O (`load`, `of`), and ends likewise.
//! - `request` is loaded for a checkpoint with a listener that defers connections (`read`), and ends
//!   with the call.
//! - `reuseport` is loaded once a checkpoint finds a socket with SO_REUSEPORT (`load`, `has_program`).
//! - `gates` are attached to tracepoints. Links and maps have names in a bpffs of their instance
//!   (`load`, `find`, `detach`, `remove`), which keeps them.
//! - `rate` is attached to the ends of an uplink (`Loaded`, `Classes`), and ends with them.
//! - `pass` is in a rule of nftables, which keeps it (`Passes`).
//! - `sysinfo` is attached to the return of sysinfo(2), and kept by names in a bpffs as `gates` are (`load`, `find`).
//! - `barrier` is attached to hooks of security modules, and kept in the same way (`load`, `find`).
//! - `scheduler` is put in force as the scheduler of all tasks (`load`, `reserve`), and ends with its owner.
//! - `handshake` is attached to a device by a link, which its owner holds until it is dropped.
//!
//! [`identity`] is the record by which every group knows a container, and the map that leads to it.
//!
//! "Supported" means that the programs were loaded: configuration and version numbers are no proof.

pub mod abstract_unix;
pub mod address;
pub mod aio;
pub mod barrier;
pub mod call;
pub mod embryo;
mod error;
pub mod gates;
pub mod group;
pub mod handshake;
pub mod identity;
pub mod pass;
pub mod rate;
mod record;
pub mod request;
pub mod reuseport;
pub mod scheduler;
pub mod socket_count;
pub mod sysinfo;

pub use error::BpfError;
