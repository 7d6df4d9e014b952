//! Memory in use is made to fit below a new limit of v2, which else kills processes. v1 does so by itself, and refuses
//! the limit where the memory cannot be reclaimed.

use super::dir::Dir;
use super::error::CgroupError;
use crate::error::CallError;

/// LIMIT: requests of reclaim before a new limit is refused. Processes may read files into memory meanwhile.
const RECLAIMS: u32 = 8;
/// Memory that is reclaimed in addition, as a part of the limit, for the same reason.
const RECLAIM_MORE: u64 = 64;

/// Reclaims the memory of a cgroup of v2 above an amount that is to become its `memory.max`.
///
/// Errors: [`CgroupError::Set`] with EBUSY if more is in use and cannot be reclaimed.
pub(super) fn reclaim_to(dir: &Dir, bytes: u64) -> Result<(), CgroupError> {
    let mut used = 0;
    for tries in 0..=RECLAIMS {
        used = dir.read_number("memory.current").map_err(CgroupError::Read)?.unwrap_or(0);
        if used <= bytes {
            return Ok(());
        }
        if tries < RECLAIMS {
            // KERNEL(5.19): memory.reclaim; EAGAIN if less was found. Before, only the usage is read.
            let over = (used - bytes).saturating_add(bytes / RECLAIM_MORE);
            let _ = dir.write("memory.reclaim", &over.to_string());
        }
    }
    let call = CallError::new(
        "write",
        format!("\"memory.max\", {bytes} while {used} bytes are in use"),
        libc::EBUSY,
    );
    Err(CgroupError::Set { limit: "memory", source: call })
}
