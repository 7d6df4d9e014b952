//! Rates and weights of disks of a container: the disk with its storage, and what is not enforced there.
//!
//! Uses `ground`, `writeback` and `drive`.

use std::path::PathBuf;

use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::{Config, ContainerId, Drive, Limits};

use crate::error::Result;
use crate::ground::Ground;
use crate::{drive, writeback};

/// A directory on the file system that the container writes to; that of all containers before it has one.
fn storage(ground: &Ground, id: &ContainerId) -> PathBuf {
    let upper = ground.dir(id).join("upper");
    if upper.exists() { upper } else { ground.places.lib.clone() }
}

/// Refuses rates that this host cannot enforce at all, before anything is made.
pub(crate) fn check(ground: &Ground, limits: &Limits) -> Result<()> {
    if limits.disk_rates.is_empty() {
        return Ok(());
    }
    Ok(ground.cgroups()?.check_disk_rates(&limits.disk_rates, &ground.places.lib)?)
}

/// Sets the rates of a container in a new cgroup. Those of its drive are set where that is opened.
pub(crate) fn set_new(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    match config.spec.limits.disk_rates.is_empty() {
        true => Ok(()),
        false => set_in(ground, config, cgroup),
    }
}

/// Sets the rates that are on record, and removes all others.
pub(crate) fn set(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    set_in(ground, config, cgroup)?;
    drive::set_write_rates(ground, config)
}

fn set_in(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    let storage = storage(ground, &config.id);
    Ok(cgroup.set_disk_rates(&config.spec.limits.disk_rates, &storage)?)
}

/// Removes the rates of a container whose processes were killed: a process ends only when its request is done. Best
/// effort, because the request ends in any case. Root of a container with systemd can set rates in cgroups of its own.
pub(crate) fn lift(ground: &Ground, config: &Config, cgroup: &Cgroup) {
    let _ = end(ground, &config.id, Some(config));
    if !config.spec.limits.disk_rates.is_empty() || config.spec.systemd {
        let _ = cgroup.lift_disk_rates();
    }
}

/// Removes the rates of a container that its cgroup does not have. `config` is `None` if it is damaged.
pub(crate) fn end(ground: &Ground, id: &ContainerId, config: Option<&Config>) -> Result<()> {
    match config.is_none_or(|config| Drive::of(&config.spec.limits).is_some()) {
        true => writeback::end(ground, id),
        false => Ok(()),
    }
}

/// Says which limits of disks are not enforced.
pub(crate) fn not_enforced(ground: &Ground, config: &Config) -> Result<Vec<String>> {
    let limits = &config.spec.limits;
    if limits.io_weight.is_none() && limits.disk_rates.is_empty() {
        return Ok(Vec::new());
    }
    Ok(ground.cgroups()?.not_enforced(limits, &storage(ground, &config.id)))
}
