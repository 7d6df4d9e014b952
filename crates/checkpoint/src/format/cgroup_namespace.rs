//! Cgroup namespaces (cgroup_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One of them. In hierarchies of version 1 its root is the group that all processes are in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupNamespace {
    /// The group at its root, by its path below the container's own ([`super::Cgroups`]), which is empty of
    /// that.
    #[serde(default)]
    pub root: String,
}
