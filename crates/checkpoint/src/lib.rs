//! Running containers as files, and back.
//!
//! **The idea.** [`save`] stops the processes of a container and reads their state from outside:
//! procfs, copies of descriptors, pagemaps, and a few calls that are injected through an existing
//! `syscall` instruction. The state is written as records (crate `record`) and pages (crate
//! `parcel`). [`load`] turns checked records into one flat list of system calls per process. Some sixty instructions of
//! machine code ([`inject`]) execute the list in a process that the keeper cloned exactly as for a
//! start. No code of this crate is in a container's memory while one of the container's own
//! instructions runs.
//!
//! **Objects.** Something that several descriptors, mappings or processes share is one
//! [`Object`](dormouse_record::Object), and has one number. A kind of object is a variant of
//! [`Thing`](dormouse_record::Thing), and one module of the same name in each of crate `record`,
//! `save` and `load`:
//!
//! ```text
//!            record/pipe.rs         save/pipe.rs              load/pipe.rs
//!            the record             detects and reads it      the calls that make it again
//! ```
//!
//! Network stacks (devices, routes, filters) and what moves with connections are the work of crate
//! `stacks`, which `save` and `load` use.
//!
//! **Proof.** A checkpoint is proven by a twin that is restored beside the stopped processes and read back
//! ([`proof`]).
//!
//! # To add a kind
//!
//! 1. `KIND.rs` of crate `record`: its record; numbers and texts only, each field with its unit; a
//!    variant in `object.rs` there; a line in `check/rules.rs` there for every number that refers to
//!    something.
//! 2. `save/KIND.rs`: a row in `KINDS` of `save/object.rs`: a test for the kind (no side effect),
//!    and the function that makes the record. A case that cannot be saved is reported by
//!    `Err("a ..., which is not saved yet")`: [`explain`](save::explain) prints it with process
//!    and descriptor, and nothing is stopped.
//! 3. `load/KIND.rs`: an arm in `load/object.rs`. The first process makes an object, before it
//!    forks, into a cell that holds its number; all processes inherit it. Steps that need the final
//!    number or the final process (an epoll's items) are done in the stage `done`.
//! 4. `proof/hold.rs`: whether a twin may restore it: its restore must have no effect beyond the twin.
//! 5. `tests/workloads/KIND.c`: sets up, prints "ready", waits, checks, prints "ok"; a row in
//!    `tests/checkpoint.rs`. `docs/state.md` is made from that.
//!
//! # What it does not do
//!
//! This crate knows no containers and no images. The engine (crate `container`) passes it a process
//! that follows the program. Root, mounts, cgroups and limits of that process are those of any
//! start. Addresses and bridges of the host are the work of crate `network`. Credentials and limits of
//! a checkpoint only narrow the grants of the configuration.
#![deny(unsafe_code)]

mod clock;
mod diff;
#[allow(unsafe_code, reason = "machine code")]
mod inject;
pub mod load;
mod look;
pub mod proof;
mod remaining;
pub mod save;
mod terminal_modes;
mod vdso;

use dormouse_stacks::{accept, buffer, net, packet, quiet, repair, stack};

pub use diff::{Difference, diff};
pub use dormouse_record::{Error, Refusal, Result};
pub use dormouse_stacks::quiet::{end as end_quiet, keep_quiet, silence};
