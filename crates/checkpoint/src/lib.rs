//! Running containers as files, and back.
//!
//! **The idea.** [`save`] stops the processes of a container, reads what they are from the outside
//! (procfs, copies of descriptors, pagemaps, a handful of calls made in them through an instruction
//! that they have anyway) and writes it as [`format`]: records and pages. [`load`] turns checked
//! records into one flat list of system calls per process, which some sixty instructions of machine
//! code ([`inject`]) follow in a process that the keeper cloned exactly as for a start. No code of
//! ours is ever in a container's memory when one of its own instructions runs.
//!
//! **Objects.** What several descriptors, mappings or processes share is one [`format::Object`],
//! and has one number. A kind of object is a variant of [`format::Thing`] and one module of the
//! same name in each of `format`, `save` and `load`:
//!
//! ```text
//!            format/pipe.rs         save/pipe.rs              load/pipe.rs
//!            what is written        how it is known, read     which calls make it again
//! ```
//!
//! What is set up in a network stack, devices, routes and filters, is told and made again by `net`, which
//! speaks to the kernel as ip(8) and nft(8) do; `save/net.rs` and `load/net.rs` use it.
//!
//! # To add a kind
//!
//! 1. `format/KIND.rs`: its record; numbers and texts only, each field with its unit; a variant in
//!    `format/object.rs`; a line in `format/check.rs` for every number that points to something.
//! 2. `save/KIND.rs`: a row in `KINDS` of `save/object.rs`: how it is known (no side effect), and
//!    what makes the record. `Err("a ..., which is not saved yet")` is how a case that cannot be
//!    saved is told: [`explain`](save::explain) prints it with process and descriptor, and nothing
//!    is stopped.
//! 3. `load/KIND.rs`: an arm in `load/object.rs`. An object is made by the first process, before it
//!    forks, into a cell that holds its number; all processes inherit it. What needs its final
//!    number or its final process (an epoll's items) is done in the stage `last`.
//! 4. `tests/workloads/KIND.c`: sets up, says ready, waits, checks, says ok; a row in
//!    `tests/checkpoint.rs`. `docs/state.md` is made from that.
//!
//! # What it does not do
//!
//! It knows no container, no image and no network: the engine gives it a process to follow the
//! program (crate `container`), whose root, mounts, cgroups and limits are those of any start. What
//! a checkpoint says about credentials and limits only narrows what the configuration gives.
#![deny(unsafe_code)]

mod accept;
mod clock;
mod diff;
mod error;
pub mod format;
#[allow(unsafe_code, reason = "machine code")]
mod inject;
pub mod load;
mod net;
mod netlink;
mod packet;
mod quiet;
mod remaining;
pub mod save;
mod stack;
mod vdso;

pub use diff::{Difference, diff};
pub use error::{Error, Refusal, Result};
pub use quiet::{end as end_quiet, keep_quiet, silence};
