//! Namespaces that were found, except mount and network namespaces, and the namespaces of one process.

use std::collections::HashMap;

use crate::clock::Offsets;
use crate::save::refusal::Reason;
use crate::save::seen::{NAMESPACES, Seen};

/// Namespaces of a process that differ from those of the first, by their links in procfs.
#[derive(Debug, Default)]
pub(crate) struct Links {
    pub(crate) mounts: Option<String>,
    pub(crate) uts: Option<String>,
    pub(crate) ipc: Option<String>,
    pub(crate) net: Option<String>,
    pub(crate) time: Option<String>,
    /// The time namespace for its children, if it differs from its own.
    pub(crate) time_for_children: Option<String>,
    pub(crate) cgroup: Option<String>,
    pub(crate) user: Option<String>,
}

/// The properties that all processes of a container share with the first.
#[derive(Debug)]
pub(crate) struct Home {
    /// The number of pid namespaces around it.
    pub(crate) depth: usize,
    pub(crate) namespaces: [Option<String>; NAMESPACES.len()],
    pub(crate) cgroups: Option<String>,
}

/// All IPC namespaces but the container's own.
#[derive(Debug, Default)]
pub(crate) struct IpcNamespaces {
    /// By their links in procfs; or why one cannot be saved.
    pub(crate) by_link: HashMap<String, Result<usize, Reason>>,
    /// By the devices of their message queue file systems.
    pub(crate) by_device: HashMap<u64, usize>,
}

impl IpcNamespaces {
    /// The object of a namespace, by its link; `None` if it was created just now, while nothing is
    /// stopped.
    pub(crate) fn object(&self, link: &str) -> Option<Result<usize, Reason>> {
        let why = |why: &Reason| format!("it is in an IPC namespace of its own {why}");
        Some(self.by_link.get(link)?.as_ref().copied().map_err(why))
    }

    /// The object of the namespace of a process; `None` for the container's own.
    pub(crate) fn of_process(&self, seen: &Seen) -> Option<usize> {
        if self.by_link.is_empty() {
            return None;
        }
        self.by_link.get(seen.link("ipc")?)?.as_ref().ok().copied()
    }

    /// The object of the namespace whose message queues are on a device.
    pub(crate) fn of_queues(&self, device: u64) -> Option<usize> {
        self.by_device.get(&device).copied()
    }
}

/// All time namespaces but the container's own.
#[derive(Debug, Default)]
pub(crate) struct TimeNamespaces {
    /// The offsets of the container's own.
    pub(crate) own: Offsets,
    /// By their links in procfs; or why one cannot be saved.
    pub(crate) by_link: HashMap<String, Result<usize, Reason>>,
}

/// All cgroup namespaces but the container's own, by their links in procfs; or why one cannot be
/// saved.
#[derive(Debug, Default)]
pub(crate) struct CgroupNamespaces {
    pub(crate) by_link: HashMap<String, Result<usize, Reason>>,
}

/// All user namespaces but the container's own.
#[derive(Debug, Default)]
pub(crate) struct UserNamespaces {
    /// The inode of the container's own.
    pub(crate) own: Option<u64>,
    /// Objects by inodes; or why one cannot be saved.
    pub(crate) known: HashMap<u64, Result<usize, Reason>>,
    /// A process that is in each, by inodes.
    pub(crate) members: HashMap<u64, u32>,
}
