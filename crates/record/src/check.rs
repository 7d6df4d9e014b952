//! Checks of records: every number that refers to something has a valid target, and no value
//! exceeds the range that the kernel could have reported.
//!
//! A checksum only detects accidental changes. The restore relies on these checks: it indexes, adds
//! and multiplies with checked numbers.

mod address;
mod aio;
mod cgroup;
mod cgroup_namespace;
mod file;
pub mod filter;
pub mod link;
mod memory;
mod mount;
mod mqueue;
mod net;
mod path;
mod process;
pub mod route;
mod rules;
pub mod setting;
mod socket;
mod system_v;
mod thing;
mod time;
mod tmpfs;
mod user;

pub use address::of_process as addresses;
pub use path::of_thing as paths;
pub use rules::records;

use crate::{Records, Thing};

/// The end of user memory on x86_64 with four-level tables.
pub const USER_END: u64 = 0x7fff_ffff_f000;
/// LIMIT: processes and threads of a checkpoint.
pub const TASKS_MAX: usize = 1 << 16;
/// LIMIT: a process id, and the number of a descriptor.
const NUMBER_MAX: u32 = 1 << 22;
/// LIMIT: bytes of a text.
const TEXT_MAX: usize = 4096;
/// LIMIT: bytes in one socket or pipe.
const CONTENT_MAX: usize = 64 << 20;
/// LIMIT: bytes of a file.
const FILE_BYTES_MAX: u64 = 1 << 62;
/// LIMIT: bytes in flight in a terminal, in one direction.
pub const ON_THE_WAY_MAX: usize = 256 << 10;

/// The allowed values of personality(2): Linux, with 64 or 32 bits, and flags that only change the
/// process's own view.
pub const PERSONALITIES: u32 = 0x0ff6_0000 | 8;

/// Commands of membarrier(2) that register: GLOBAL_EXPEDITED, and PRIVATE_EXPEDITED alone, with SYNC_CORE and
/// with RSEQ.
pub const BARRIERS: u32 = 1 << 2 | 1 << 4 | 1 << 6 | 1 << 8;

type Found = std::result::Result<(), String>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Found {
    if holds { Ok(()) } else { Err(what()) }
}

fn object(n: usize, all: &Records) -> std::result::Result<&Thing, String> {
    all.objects.get(n).map(|o| &o.thing).ok_or_else(|| format!("object {n} is not there"))
}

/// Checks that an IPC namespace exists; `None` is the container's own.
fn in_ipc(namespace: Option<usize>, all: &Records) -> Found {
    let Some(n) = namespace else { return Ok(()) };
    ensure(matches!(object(n, all)?, Thing::Ipc(_)), || "in no IPC namespace".into())
}
