//! Taking memory back from a container that does not need it now.

use super::error::CgroupError;
use super::{Cgroup, Controllers};

/// Amount per request: the caller can stop between two requests.
const STEP_BYTES: u64 = 32 << 20;

impl Cgroup {
    /// Returns the memory that is charged to it now, in bytes; 0 without the memory controller.
    pub fn memory_bytes(&self) -> Result<u64, CgroupError> {
        let read = || match (self.in_v2(Controllers::MEMORY), self.in_v1(Controllers::MEMORY)) {
            (Some(v2), _) => v2.read_number("memory.current"),
            (_, Some(v1)) => v1.read_number("memory.usage_in_bytes"),
            _ => Ok(None),
        };
        Ok(read().map_err(CgroupError::Read)?.unwrap_or(0))
    }

    /// Requests reclaim of that memory: page cache, and the rest as far as there is swap that it
    /// may use (cgroups: `memory.reclaim`, KERNEL(5.19); v1: `memory.force_empty`). v2 reclaims in
    /// pieces, as long as `goes_on` returns true. Nothing happens without such a file.
    pub fn reclaim(&self, goes_on: impl Fn() -> bool) -> Result<(), CgroupError> {
        if let Some(v2) = self.in_v2(Controllers::MEMORY).filter(|v2| v2.has("memory.reclaim")) {
            let pieces = self.memory_bytes()?.div_ceil(STEP_BYTES);
            for _ in 0..pieces {
                if !goes_on() {
                    break;
                }
                match v2.write("memory.reclaim", &STEP_BYTES.to_string()) {
                    // Less than the amount was found: everything reclaimable is reclaimed.
                    Err(e) if e.errno() == libc::EAGAIN => break,
                    other => other.map_err(CgroupError::Reclaim)?,
                }
            }
        } else if let Some(v1) = self.in_v1(Controllers::MEMORY)
            && v1.has("memory.force_empty")
            && goes_on()
        {
            match v1.write("memory.force_empty", "0") {
                // Some pages cannot be reclaimed, or a signal arrived.
                Err(e) if matches!(e.errno(), libc::EBUSY | libc::EINTR) => {}
                other => other.map_err(CgroupError::Reclaim)?,
            }
        }
        Ok(())
    }
}
