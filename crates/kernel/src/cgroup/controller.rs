//! Resource controllers and their names.

bitflags::bitflags! {
    /// Resource controllers, by v2's names.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Controllers: u16 {
        /// CPU time and weight.
        const CPU = 1;
        /// v1 only: CPU time used.
        const CPUACCT = 2;
        /// Memory and swap.
        const MEMORY = 4;
        /// Number of tasks.
        const PIDS = 8;
        /// v1 only: stopping and going on.
        const FREEZER = 16;
        /// Disk time and bytes; `blkio` in v1.
        const IO = 32;
        /// v1 only: which devices may be used.
        const DEVICES = 64;
        /// On which CPUs to run.
        const CPUSET = 128;
    }
}

impl Controllers {
    /// Each with its names in v1 and in v2.
    pub(super) const NAMES: [(Self, &'static str, Option<&'static str>); 8] = [
        (Self::CPU, "cpu", Some("cpu")),
        (Self::CPUACCT, "cpuacct", None),
        (Self::MEMORY, "memory", Some("memory")),
        (Self::PIDS, "pids", Some("pids")),
        (Self::FREEZER, "freezer", None),
        (Self::IO, "blkio", Some("io")),
        (Self::DEVICES, "devices", None),
        (Self::CPUSET, "cpuset", Some("cpuset")),
    ];

    /// Controllers that every container has on v2 (`cpuset` only on request).
    pub(super) const ALWAYS_V2: Self =
        Self::CPU.union(Self::MEMORY).union(Self::PIDS).union(Self::IO);

    /// Parses the options of a v1 mount, `rw,cpu,cpuacct`.
    pub(super) fn from_v1_options(options: &str) -> Self {
        let named = |word: &str| Self::NAMES.iter().find(|n| n.1 == word).map(|n| n.0);
        options.split(',').filter_map(named).collect()
    }

    /// Parses a v2 list such as `cgroup.controllers`.
    pub(super) fn from_v2_list(list: &str) -> Self {
        let named = |word: &str| Self::NAMES.iter().find(|n| n.2 == Some(word)).map(|n| n.0);
        list.split_whitespace().filter_map(named).collect()
    }

    /// The name that users see.
    pub fn name(self) -> &'static str {
        let known = Self::NAMES.iter().find(|n| n.0 == self);
        known.map_or("?", |n| n.2.unwrap_or(n.1))
    }
}
