//! Cgroup namespaces (cgroup_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One namespace. In hierarchies of version 1 its root is the group of all processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupNamespace {
    /// The group at its root, by its path below the container's own ([`crate::Cgroups`]), which has
    /// the empty path.
    #[serde(default)]
    pub root: String,
}
