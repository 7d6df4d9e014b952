//! Memory: address spaces, their areas, and which pages of them are in `pages`.

use serde::{Deserialize, Serialize};

use crate::{Bytes, RangePolicy};

/// An address space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Its areas, by address.
    pub areas: Vec<Area>,
    /// The kernel's record of where the parts of a program are.
    pub layout: Layout,
    /// The auxiliary vector.
    pub auxv: Bytes,
    /// The object of the executed file.
    pub program: Option<usize>,
    /// The address of the mapping of the vdso and its data, and the length of both together.
    pub vdso: Option<(u64, u64)>,
    /// Transparent huge pages are disabled (PR_SET_THP_DISABLE(2const)). Records of older versions
    /// do not have this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_huge_pages: bool,
    /// Only advised areas have transparent huge pages (PR_THP_DISABLE_EXCEPT_ADVISED, KERNEL(6.18)).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub huge_pages_by_advice: bool,
    /// How memory is locked that the process maps later (mlockall(2)): MCL_FUTURE, MCL_ONFAULT.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub locks_later: u32,
    /// Guards within areas (MADV_GUARD_INSTALL): first address and the one after the last, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guards: Vec<(u64, u64)>,
    /// Ranges with a policy of their own (mbind(2)), in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<RangePolicy>,
    /// Code behind the vdso that commands have left which were killed: its address, and its bytes. Signal handlers may
    /// return into it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landing: Option<(u64, Bytes)>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// `struct prctl_mm_map`, without fields for a descriptor or a pointer (PR_SET_MM(2const)).
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

/// A range of addresses with one mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// PROT_READ 1, PROT_WRITE 2, PROT_EXEC 4.
    pub access: u32,
    /// The mapped memory.
    pub backing: Backing,
    /// Two-letter flags that are restored, in the notation of `/proc/PID/smaps`.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Pages whose contents are in `pages`.
    #[serde(default)]
    pub runs: Vec<Run>,
}

impl Area {
    /// The flag of private memory that can or could be written (`VM_ACCOUNT`). Recorded of memory that no longer can.
    pub const ACCOUNTED: &str = "ac";
    /// The flag of memory that can be made writable (`VM_MAYWRITE`). Recorded of memory of System V that is not
    /// writable: how it was attached.
    pub const MAY_WRITE: &str = "mw";

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Whether it has a flag.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|f| f == flag)
    }
}

/// The memory that an area maps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Backing {
    /// Private memory.
    Anonymous,
    /// Private memory of huge pages (mmap(2), MAP_HUGETLB).
    Huge {
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// A private mapping of a file: each process has its own changes.
    Private {
        /// The file, an object.
        object: usize,
        /// The offset in the file.
        offset: u64,
    },
    /// A shared mapping of a file or of shared memory.
    Shared {
        /// The file or memory, an object.
        object: usize,
        /// The offset in the object.
        offset: u64,
    },
}

/// Consecutive pages with contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// First address.
    pub address: u64,
    /// The number of pages.
    pub pages: u64,
    /// Number of the first in `pages`.
    pub first: u64,
}

/// Shared memory without a named file (mmap(2), MAP_SHARED|MAP_ANONYMOUS).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    /// Its length.
    pub bytes: u64,
    /// Its contents; addresses are offsets.
    pub runs: Vec<Run>,
    /// It was mapped from `/dev/zero` on a mount without execution (MS_NOEXEC): no mapping of it can be
    /// made executable. Records of older versions do not have this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_exec: bool,
}
