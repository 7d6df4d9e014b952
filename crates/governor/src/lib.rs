//! The governor: decides how the contracts of containers are kept.
//!
//! One module for each resource. A module is pure: it takes readings and the state of the
//! last decision, and returns settings and the next state. It has no clock and makes no system call. Readers
//! and writers are the daemon's room and the verbs of the engine.
#![forbid(unsafe_code)]

pub mod cpu;
pub mod debt;
pub mod disk;
pub mod eviction;
pub mod idle_rate;
pub mod memory;
pub mod order;
