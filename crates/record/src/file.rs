//! Files with a name, devices without state, and descriptors that the engine passes.

use serde::{Deserialize, Serialize};

use crate::Lock;

/// An open file or directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its path inside, or in the mount namespace.
    pub path: String,
    /// `O_*`, without those that only open(2) uses.
    pub flags: u32,
    /// The file offset.
    pub offset: u64,
    /// File type bits of `st_mode`.
    pub file_type: u32,
    /// Its length at the time of the checkpoint.
    pub bytes: u64,
    /// Its time of modification, in nanoseconds since the epoch.
    pub modified_ns: i64,
    /// Mapped, and not open for writing by any process: its contents must be unchanged at the
    /// restore.
    #[serde(default)]
    pub unchanged: bool,
    /// The object with the contents, if the file has no name, or is in memory.
    #[serde(default)]
    pub deleted: Option<usize>,
    /// The object of the mount namespace in which it was opened; `None` for the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
    /// Locks of this file description.
    #[serde(default)]
    pub locks: Vec<Lock>,
    /// F_GET_RW_HINT of the file; 0 if it has none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub write_hint: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl File {
    /// The greatest hint: RWH_WRITE_LIFE_EXTREME.
    pub const WRITE_HINT_MAX: u64 = 5;
}

/// A character device with a driver that keeps no state of an open file: null, zero, full, random,
/// urandom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name below `/dev`.
    pub name: String,
    /// `O_*`.
    pub flags: u32,
}

/// A file description from outside the container: one of its standard streams, by the engine's name
/// for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct External {
    /// The name.
    pub name: String,
    /// `O_*`.
    pub flags: u32,
}
