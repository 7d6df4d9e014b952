//! Open files and directories without a name.

use serde::{Deserialize, Serialize};

use crate::{Bytes, Run};

/// A file or directory without a name: one object, even if it is open several times.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// A directory of the same file system, by its path inside, in which the restore creates the
    /// file.
    pub place: String,
    /// `st_mode`, without set-user-ID and set-group-ID bits.
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
