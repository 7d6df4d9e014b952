//! Files and directories whose names are gone while they are open.

use serde::{Deserialize, Serialize};

use super::{Bytes, Run};

/// What has no name any more, once however often it is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// A directory of the same file system, by its path inside: it is made there.
    pub place: String,
    /// `st_mode`, less what gives privileges.
    pub mode: u32,
    /// Its owner, by the container's ids.
    pub uid: u32,
    /// Its group, the same.
    pub gid: u32,
    /// Its length.
    pub bytes: u64,
    /// Its time of modification, in nanoseconds since the epoch.
    pub modified_ns: i64,
    /// Its contents; addresses are offsets. The last page may be longer than the file.
    #[serde(default)]
    pub runs: Vec<Run>,
    /// Extended attributes of users.
    #[serde(default)]
    pub attributes: Vec<(String, Bytes)>,
}
