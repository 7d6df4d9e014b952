//! Control groups (cgroups(7), version 2) that processes have made below their container's own.

use serde::{Deserialize, Serialize};

use super::{Bytes, Records, Thing};

/// Where they are mounted, inside.
pub(crate) const CGROUPS_AT: &str = "/sys/fs/cgroup";

/// What of a group is saved, and what a new one says. Pressure is watched by whoever has it open.
pub(crate) const SETTINGS: [(&str, &str); 22] = [
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
    /// The first is the container's own, of which only what it hands down is its business; parents
    /// before what is in them.
    pub groups: Vec<Cgroup>,
}

impl Records {
    /// The control groups inside, where it may have any.
    pub(crate) fn cgroups(&self) -> Option<&Cgroups> {
        self.objects.iter().find_map(|object| match &object.thing {
            Thing::Cgroups(cgroups) => Some(cgroups),
            _ => None,
        })
    }
}

impl Cgroups {
    /// Whether who is in this group stands still, for its own sake or that of one that it is in.
    pub(crate) fn stands_still(&self, path: &str) -> bool {
        let is_above = |above: &str| {
            path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.groups.iter().any(|group| group.frozen && is_above(&group.path))
    }
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// Its path below the container's own, which is empty of that.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Whose it is, inside: user and group.
    pub owner: (u32, u32),
    /// Who may put processes into it: the owner of `cgroup.procs` and its like.
    pub manager: (u32, u32),
    /// Who is in it stands still until somebody inside says otherwise (`cgroup.freeze`).
    #[serde(default)]
    pub frozen: bool,
    /// The controllers that it hands down (`cgroup.subtree_control`).
    #[serde(default)]
    pub hands_down: Vec<String>,
    /// Files and what they say that is not as in a new group; a line is a setting.
    #[serde(default)]
    pub settings: Vec<(String, String)>,
    /// Extended attributes of users.
    #[serde(default)]
    pub attributes: Vec<(String, Bytes)>,
}
