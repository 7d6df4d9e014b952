//! The rights of a thread.

use serde::{Deserialize, Serialize};

/// The credentials of a thread. Ids are the container's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Real, effective, saved, file system.
    pub uids: [u32; 4],
    /// The same.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// PR_GET_SECUREBITS.
    pub securebits: u64,
    /// PR_GET_NO_NEW_PRIVS.
    pub no_new_privileges: bool,
    /// The number of its system call filters.
    pub filters: u32,
}
