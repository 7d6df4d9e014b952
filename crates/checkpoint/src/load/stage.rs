//! The names of the stages, in their order: every task waits at the end of a stage for all others.
//!
//! The modules of kinds end a stage in the sequences, and the conductor acts between two stages.
//! This module uses no other.

/// Before the first call of the program. The root is in place, and nothing is created yet.
pub(super) const BEGIN: &str = "begin";
/// All network namespaces exist, and are empty. Only if there are some inside.
pub(super) const STACKS: &str = "stacks";
/// Each tmpfs of a mount namespace inside exists, and is empty. Only if there are some.
pub(super) const MEMORY: &str = "memory";
/// All objects and all processes exist.
pub(super) const BORN: &str = "born";
/// All process groups exist.
pub(super) const LED: &str = "led";
/// All processes are in their process groups.
pub(super) const JOINED: &str = "joined";
/// The time namespaces of a generation of processes exist. Only if processes have made some for
/// their children.
pub(super) const CLOCKS: &str = "clocks";
/// All processes have mapped their memory. Only if some of it is filled later.
pub(super) const MAPPED: &str = "mapped";
/// No task needs the descriptors of the work any more, except to place its own. Only if processes share descriptors
/// or a working directory, or threads do not.
pub(super) const SHARED: &str = "shared";
/// Each process has its memory, working directory, handlers and descriptors.
pub(super) const WHOLE: &str = "whole";
/// All threads exist. Only if there are threads in user namespaces inside.
pub(super) const INSIDE: &str = "inside";
/// Everything is restored but the registers.
pub(super) const DONE: &str = "done";
