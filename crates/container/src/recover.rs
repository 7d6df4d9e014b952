//! Recovery from killed commands, killed keepers and reboots.
//!
//! Uses `ground`, and its own modules.

use crate::error::Result;
use crate::ground::Ground;

pub(crate) mod boot;
pub(crate) mod custody;
pub(crate) mod interrupted;

/// Finishes the work of killed commands and recovers custody.
pub(crate) fn recover(ground: &Ground) -> Result<()> {
    interrupted::finish(ground)?;
    custody::take_back(ground).map(drop)
}
