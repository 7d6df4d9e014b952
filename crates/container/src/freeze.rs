//! End of a freeze, and the completion of interrupted changes of freezer and limits.
//!
//! Uses `ground`, `state`, `hold`, `rate`, `bandwidth`, `socket`, `contract`, `deal`, `view` and `sysinfo`.

use std::os::fd::AsFd;

use dormouse_model::Config;

use crate::error::Result;
use crate::ground::Ground;
use crate::state::{self, InitRecord};
use crate::{bandwidth, contract, deal, hold, rate, socket, sysinfo, view};

/// Thaws a container.
///
/// ORDER: the mark is removed from the record first: an interruption after that leaves a
/// container that is to be thawed. Then the keeper's copies of its descriptors are closed; then
/// the processes resume.
pub(crate) fn thaw(ground: &Ground, config: &Config, init: &mut InitRecord) -> Result<()> {
    let was_drowsy = init.drowsy_unix_ms.take().is_some();
    init.paused = false;
    state::write_init(ground, &config.id, init)?;
    let released = if was_drowsy { hold::release(ground, &config.id) } else { Ok(()) };
    // The record says running, so no later command would thaw it.
    state::cgroup(ground, config)?.thaw()?;
    released
}

/// Finishes an interrupted freeze or thaw: frozen only if that is on record, and if `stays`.
pub(crate) fn finish(ground: &Ground, config: &Config, stays: bool) -> Result<()> {
    let (mut init, _) = state::alive(ground, config)?;
    let is_drowsy = init.drowsy_unix_ms.is_some();
    if !is_drowsy && !init.sleeping {
        hold::release(ground, &config.id)?; // descriptors were held before the record
    }
    match is_drowsy || init.paused && stays {
        true => Ok(state::cgroup(ground, config)?.freeze()?),
        false => thaw(ground, config, &mut init),
    }
}

/// Finishes an interrupted change of limits: sets the limits of the record.
pub(crate) fn finish_limits(ground: &Ground, config: &Config) -> Result<()> {
    let (init, process) = state::alive(ground, config)?;
    contract::admit_again(ground, config)?;
    let limits = &config.spec.limits;
    let cgroup = state::cgroup(ground, config)?;
    cgroup.set(limits)?;
    deal::again(ground, config);
    rate::set(ground, config, &cgroup)?;
    bandwidth::set(ground, config)?;
    if limits.sockets_max.is_some() {
        socket::set(ground, config, &cgroup)?;
    }
    contract::balance_all(ground, limits, limits)?;
    view::update(ground, config, (init.pid, process.as_fd()))?;
    sysinfo::update(ground, config)
}
