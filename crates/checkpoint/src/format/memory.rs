//! Memory: address spaces, their areas, and which pages of them are in `pages`.

use serde::{Deserialize, Serialize};

use super::Bytes;

/// An address space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Its areas, by address.
    pub areas: Vec<Area>,
    /// Where the kernel says that things lie.
    pub layout: Layout,
    /// The auxiliary vector.
    pub auxv: Bytes,
    /// The program, an object.
    pub program: Option<usize>,
    /// Where the kernel's shared object and its data are mapped, and how long both are together.
    pub vdso: Option<(u64, u64)>,
    /// That it is to have no transparent huge pages (PR_SET_THP_DISABLE(2const)). Not there in what older
    /// versions wrote.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_huge_pages: bool,
}

/// `struct prctl_mm_map`, less what needs a descriptor or a pointer (PR_SET_MM(2const)).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the kernel's")]
pub struct Layout {
    pub start_code: u64,
    pub end_code: u64,
    pub start_data: u64,
    pub end_data: u64,
    pub start_brk: u64,
    pub brk: u64,
    pub start_stack: u64,
    pub arg_start: u64,
    pub arg_end: u64,
    pub env_start: u64,
    pub env_end: u64,
}

/// A range of addresses that is of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// PROT_READ 1, PROT_WRITE 2, PROT_EXEC 4.
    pub access: u32,
    /// What it shows.
    pub backing: Backing,
    /// Two-letter flags that are restored, as `/proc/PID/smaps` calls them.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Pages whose contents are in `pages`.
    #[serde(default)]
    pub runs: Vec<Run>,
}

impl Area {
    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Whether it has a flag.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|f| f == flag)
    }
}

/// What an area shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Backing {
    /// Its own memory.
    Anonymous,
    /// Its own memory, of huge pages (mmap(2), MAP_HUGETLB).
    Huge {
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// A file, each process having its own changes.
    Private {
        /// The file, an object.
        object: usize,
        /// Where in it.
        offset: u64,
    },
    /// A file, or memory that is an object, changes being everybody's.
    Shared {
        /// The file or memory, an object.
        object: usize,
        /// Where in it.
        offset: u64,
    },
}

/// Consecutive pages with contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// First address.
    pub address: u64,
    /// How many pages.
    pub pages: u64,
    /// Number of the first in `pages`.
    pub first: u64,
}

/// Memory that processes share, of no file that has a name (mmap(2), MAP_SHARED|MAP_ANONYMOUS).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    /// Its length.
    pub bytes: u64,
    /// Its contents; addresses are offsets.
    pub runs: Vec<Run>,
}
