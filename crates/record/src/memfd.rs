//! Memory files (memfd_create(2)).

use serde::{Deserialize, Serialize};

use crate::Run;

/// A memory file without a path; its open file descriptions are objects of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFile {
    /// The name from memfd_create(2).
    pub name: String,
    /// `st_mode`.
    pub mode: u32,
    /// Its owner, by the container's ids.
    pub uid: u32,
    /// Its group, the same.
    pub gid: u32,
    /// Its length.
    pub bytes: u64,
    /// Bytes of its pages, if these are huge (MFD_HUGETLB).
    #[serde(default)]
    pub huge_page_bytes: Option<u64>,
    /// `F_SEAL_*`.
    pub seals: u32,
    /// Its contents; addresses are offsets. The last page may be longer than the file.
    #[serde(default)]
    pub runs: Vec<Run>,
}
