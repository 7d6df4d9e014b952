//! Memory policies (set_mempolicy(2), mbind(2)): the nodes of the machine that memory is taken from.

use serde::{Deserialize, Serialize};

/// A policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPolicy {
    /// `MPOL_*` with its flags.
    pub mode: u32,
    /// The nodes, a bit each.
    pub nodes: Vec<u64>,
}

impl MemoryPolicy {
    /// MPOL_F_STATIC_NODES, MPOL_F_RELATIVE_NODES, MPOL_F_NUMA_BALANCING.
    pub const FLAGS: u32 = 1 << 15 | 1 << 14 | 1 << 13;
    /// MPOL_WEIGHTED_INTERLEAVE, the last one.
    pub const MODE_MAX: u32 = 6;
    /// LIMIT: nodes of a machine, in words of 64 bits.
    pub const WORDS_MAX: usize = 16;
}

/// The policy of a range of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangePolicy {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// The policy.
    pub policy: MemoryPolicy,
}
