//! Control groups (cgroups(7), version 2) that processes have made below the container's own.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// Their mount point, inside.
pub const CGROUPS_AT: &str = "/sys/fs/cgroup";

/// Files of a group that are saved, and their contents in a new group. PSI triggers belong to the
/// open file.
pub const SETTINGS: [(&str, &str); 22] = [
    ("cgroup.max.depth", "max"),
    ("cgroup.max.descendants", "max"),
    ("cgroup.pressure", "1"),
    ("cpu.idle", "0"),
    ("cpu.max", "max 100000"),
    ("cpu.max.burst", "0"),
    ("cpu.uclamp.max", "max"),
    ("cpu.uclamp.min", "0.00"),
    ("cpu.weight", "100"),
    ("cpuset.cpus", ""),
    ("cpuset.cpus.partition", "member"),
    ("cpuset.mems", ""),
    ("io.weight", "default 100"),
    ("memory.high", "max"),
    ("memory.low", "0"),
    ("memory.max", "max"),
    ("memory.min", "0"),
    ("memory.oom.group", "0"),
    ("memory.swap.high", "max"),
    ("memory.swap.max", "max"),
    ("memory.zswap.max", "max"),
    ("pids.max", "max"),
];

/// All control groups of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroups {
    /// The first is the container's own, of which only the delegated controllers are restored.
    /// Parents are before their children.
    pub groups: Vec<Cgroup>,
}

impl Cgroups {
    /// Whether the processes of this group are frozen, by the group itself or one above it.
    pub fn stands_still(&self, path: &str) -> bool {
        let is_above = |above: &str| {
            path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.groups.iter().any(|group| group.frozen && is_above(&group.path))
    }
}

/// One control group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// Its path below the container's own, which has the empty path.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// User and group of its directory, by the ids inside.
    pub owner: (u32, u32),
    /// User and group of `cgroup.procs` and similar files: they may move processes into the group.
    pub manager: (u32, u32),
    /// Frozen by a process of the container (`cgroup.freeze`).
    #[serde(default)]
    pub frozen: bool,
    /// The controllers that it delegates (`cgroup.subtree_control`).
    #[serde(default)]
    pub hands_down: Vec<String>,
    /// Files with contents that differ from a new group; each line is a setting.
    #[serde(default)]
    pub settings: Vec<(String, String)>,
    /// Extended attributes of users.
    #[serde(default)]
    pub attributes: Vec<(String, Bytes)>,
}
