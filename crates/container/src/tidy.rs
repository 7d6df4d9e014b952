//! Removal of the kernel objects that containers share.
//!
//! Uses `ground`, `state`, `gating`, `hold`, `net`, `pending`, `shared`, `writeback`, `spare`, `view`, `sysinfo`,
//! `barrier` and `end`.

use std::fs;
use std::time::{Duration, Instant};

use dormouse_kernel::Errno;
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::State;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::{
    barrier, disk, end, gating, hold, net, pending, shared, spare, state, sysinfo, view, writeback,
};

/// How long the last output of containers that have ended is waited for.
const OUTPUT_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Removes this instance's objects from the kernel: keeper, mounts, network, control groups.
/// Files on disk stay, so the effect is that of a reboot. An instance without containers also gives back its host ids.
/// Refused while a container runs.
pub(crate) fn dismantle(ground: &Ground) -> Result<()> {
    spare::dismiss(ground);
    spare::sweep(ground)?;
    for id in ground.ids()? {
        let lock = match ground.lock(&id) {
            Err(Error::NoContainer(_)) => continue,
            other => other?,
        };
        let config = ground.config(&id)?;
        if state::observe(ground, &config)?.is_alive() {
            return Err(Error::state(&config, State::Running, "stop it first"));
        }
        end::cool_locked(ground, &config)?;
        end::settle_locked(ground, &config, true)?;
        drop(lock);
    }
    // Those that are no container any more may have objects in the kernel.
    for (id, _) in pending::withdrawn(ground)? {
        end::complete_withdrawn(ground, &id)?;
    }
    hold::release_rest(ground)?;
    // A reader may still be at the last output of containers that have just ended.
    let until = Instant::now() + OUTPUT_ENDS_WITHIN;
    while let Some(keeper) = Keeper::connect(&ground.places.run)? {
        match keeper.end() {
            Err(LaunchError::Refused { source: Errno::BUSY, .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            ended => {
                ended?;
                break;
            }
        }
    }
    // The keeper may be tidying up already.
    let _alone = disk::Lock::take_new(&ground.places.run.join("use.lock"))?;
    tidy_alone(ground)?;
    gating::unload(ground)?;
    // The effect of a boot does not depend on it.
    let _ = ground.slots.leave();
    disk::remove(&ground.places.run.join("boot"))
}

/// Removes the objects that containers share (domains, mounts of images and of the shared
/// tmpfs, the cgroups above them) if no container runs or starts. The keeper calls this when
/// its last container has ended; the next start makes them again. Returns whether they were
/// removed.
pub(crate) fn tidy(ground: &Ground) -> Result<bool> {
    let lock = ground.places.run.join("use.lock");
    // ORDER: never wait for this lock. Its holder may be waiting until this process leaves its
    // cgroup.
    let Some(_alone) = disk::Lock::try_take_new(&lock)? else { return Ok(false) };
    tidy_alone(ground)
}

/// Removes the shared objects. The caller holds the exclusive lock.
fn tidy_alone(ground: &Ground) -> Result<bool> {
    let running = ground.places.running();
    let mut left = fs::read_dir(&running).map_err(Error::file("cannot list", &running))?;
    if left.next().is_some() {
        return Ok(false);
    }
    net::end_lending(ground)?;
    ground.network()?.remove_unused()?;
    ground.network()?.remove_none()?;
    ground.images()?.unmount_all()?;
    shared::unmount_all(ground)?;
    sysinfo::unload(ground)?;
    barrier::unload(ground)?;
    writeback::sweep(ground)?;
    view::unmount(ground)?;
    ground.cgroups()?.remove_parent()?;
    Ok(true)
}
