//! Recovery from killed commands, killed keepers and reboots.
//!
//! Uses `ground`, `pending`, `end`, and its own modules.

use crate::error::Result;
use crate::ground::Ground;
use crate::{end, pending};

pub(crate) mod boot;
pub(crate) mod custody;
pub(crate) mod interrupted;

/// Waits until withdrawn containers are settled and removed, and completes the rest of interrupted removals.
pub(crate) fn settle_withdrawn(ground: &Ground) -> Result<()> {
    let mut failed = None;
    // One that cannot be removed keeps no other from it.
    for (id, _) in pending::withdrawn(ground)? {
        failed = failed.or(end::complete_withdrawn(ground, &id).err());
    }
    failed.map_or(Ok(()), Err)
}

/// Finishes the work of killed commands and recovers custody.
pub(crate) fn recover(ground: &Ground) -> Result<()> {
    interrupted::finish(ground)?;
    custody::take_back(ground).map(drop)
}
