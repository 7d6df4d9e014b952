//! Files with a name, devices without state, and what the engine gives.

use serde::{Deserialize, Serialize};

use super::Lock;

/// A file or a directory, opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Its path inside, or in the mount namespace.
    pub path: String,
    /// `O_*`, without those that only open(2) looks at.
    pub flags: u32,
    /// Where it is read or written next.
    pub offset: u64,
    /// File type bits of `st_mode`.
    pub file_type: u32,
    /// Its length at that time.
    pub bytes: u64,
    /// Its time of modification, in nanoseconds since the epoch.
    pub modified_ns: i64,
    /// It is mapped without being written by anybody: what it says must be what it said.
    #[serde(default)]
    pub unchanged: bool,
    /// It has no name any more, or is memory: the object that it is about.
    #[serde(default)]
    pub deleted: Option<usize>,
    /// The mount namespace that it was opened in, an object; none is the container's own.
    #[serde(default)]
    pub namespace: Option<usize>,
    /// Locks of this open file.
    #[serde(default)]
    pub locks: Vec<Lock>,
}

/// A character device whose driver keeps nothing of an open: null, zero, full, random, urandom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name below `/dev`.
    pub name: String,
    /// `O_*`.
    pub flags: u32,
}

/// What is not of the container: one of its standard streams, by the name the engine gave it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct External {
    /// The name.
    pub name: String,
    /// `O_*`.
    pub flags: u32,
}
