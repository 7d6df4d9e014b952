//! The barrier: a second lock on containers, by BPF programs at the hooks of security modules (`bpf/barrier`).
//!
//! The command that starts a keeper loads the programs beside it, where the kernel calls them. `RUN/barrier`, a bpffs,
//! keeps them until the last container has ended. Without them namespaces are the only lock, as `dormouse check` says.
//!
//! ORDER: a load attaches the programs and names their map, and then looks for containers. A start makes the cgroup,
//! and then looks for the map. So one of the two puts the container behind the barrier.
//!
//! LIMIT: the kernel attaches 38 programs to one hook, so as many instances can have a barrier.
//!
//! Uses `ground`, `disk`, `settings` and `bpffs`.

use std::fs::File;
use std::path::Path;

use dormouse_bpf::barrier::{self as programs, Barrier};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_kernel::{Errno, ErrorKind, weakened};
use dormouse_model::{Config, ContainerId, IdExtent};

use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::place::Places;
use crate::{bpffs, settings};

/// Loads the programs of an instance, if the settings and the kernel permit it and they are not there, and puts all
/// containers behind them. The caller starts a container, or holds one.
pub(crate) fn load(places: &Places) -> Result<()> {
    if !programs::is_possible() || weakened("barrier") {
        return Ok(());
    }
    let ground = Ground::new(places.clone());
    if !settings::barrier(&ground.settings())? {
        return Ok(());
    }
    let place = places.barrier();
    let _alone = Lock::take_new(&place.with_extension("lock"))?;
    let cgroups = ground.cgroups()?;
    let refusal = place.with_extension("refused");
    if Barrier::find(&place)?.is_some() || cgroups.v2_parent()?.is_none() || refusal.exists() {
        return Ok(());
    }
    unload_at(&place)?;
    bpffs::mount(&place)?;
    let level = places.cgroup.split('/').count() as u32 + 1;
    let barrier = match Barrier::load(&place, level) {
        Ok(barrier) => barrier,
        Err(e) => {
            let _ = unload_at(&place); // the first error is the one to return
            if e.kind() == ErrorKind::Os(Errno::PERM.raw_os_error()) {
                // A kernel without trampolines of BPF. Another one begins with another RUN.
                File::create(&refusal).map_err(Error::file("cannot make", &refusal))?;
            }
            return Err(e.into());
        }
    };
    // A container without a readable configuration is no reason to leave out the others.
    for config in ground.started_configs()?.flatten() {
        if let Some(cgroup) = cgroups.find(config.id.as_str())? {
            enter_at(&barrier, &config, &cgroup)?;
        }
    }
    Ok(())
}

/// Whether the programs are loaded.
pub(crate) fn is_loaded(ground: &Ground) -> Result<bool> {
    Ok(Barrier::find(&ground.places.barrier())?.is_some())
}

/// Puts a container behind the barrier, of which no process has run yet.
pub(crate) fn enter(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    match Barrier::find(&ground.places.barrier())? {
        Some(barrier) => enter_at(&barrier, config, cgroup),
        None => Ok(()),
    }
}

fn enter_at(barrier: &Barrier, config: &Config, cgroup: &Cgroup) -> Result<()> {
    let Some(id) = cgroup.v2_id() else { return Ok(()) };
    Ok(barrier.enter(id, host_ids(&config.ids.extents()))?)
}

/// The host ids of a container: the first one, and how many. They are in one piece.
fn host_ids(extents: &[IdExtent]) -> (u32, u32) {
    let first = extents.iter().map(|run| run.outside).min().unwrap_or(u32::MAX);
    (first, extents.iter().map(|run| run.count).sum())
}

/// How many calls of a running container were refused; `None` if it is not behind the barrier.
pub(crate) fn refused(ground: &Ground, id: &ContainerId) -> Result<Option<u64>> {
    let Some(barrier) = Barrier::find(&ground.places.barrier())? else { return Ok(None) };
    let cgroup = ground.cgroups()?.find(id.as_str())?;
    let id = cgroup.and_then(|cgroup| cgroup.v2_id());
    id.map_or(Ok(None), |id| Ok(barrier.refused(id)?))
}

/// Forgets a container without processes. Its cgroup still exists.
pub(crate) fn leave(ground: &Ground, cgroup: &Cgroup) -> Result<()> {
    let Some(barrier) = Barrier::find(&ground.places.barrier())? else { return Ok(()) };
    cgroup.v2_id().map_or(Ok(()), |id| Ok(barrier.leave(id)?))
}

/// Removes the programs. The caller ensures that no container runs or starts.
pub(crate) fn unload(ground: &Ground) -> Result<()> {
    unload_at(&ground.places.barrier())
}

fn unload_at(place: &Path) -> Result<()> {
    while bpffs::is_mounted(place) {
        bpffs::unmount(place)?;
    }
    bpffs::remove(place)
}

#[cfg(test)]
mod tests {
    use dormouse_model::{IdMap, IdSlot};

    use super::*;

    #[test]
    fn host_ids_of_a_container_are_its_slots() {
        let slot = IdSlot(3);
        let first = slot.first_host_id();
        assert_eq!(host_ids(&IdMap::narrow(slot).extents()), (first, IdSlot::IDS));
        assert_eq!(host_ids(&IdMap::wide(slot).extents()), (first, 2 * IdSlot::IDS));
        assert_eq!(host_ids(&[]), (u32::MAX, 0));
    }
}
