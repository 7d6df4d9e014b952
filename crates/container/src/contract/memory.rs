//! Guarantees of memory: what the host can promise, and the limits around them.
//!
//! While a container with a guarantee runs, all containers together have a limit: the memory of the host without
//! its own part. On cgroup v1 each container has a limit besides, which leaves the guarantees of the others free
//! ([`dormouse_governor::memory::ceiling`]). A restored container begins with the memory of its checkpoint, so its
//! limit is not below that, whether memory is guaranteed then or later. `restored_bytes` finds the size.
//!
//! The limits are written by [`super::writer`]. A write can take as long as the kernel reclaims.
//!
//! Uses `ground`, `state`, `settings`, `usage`, `ledger` and `writer`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use dormouse_governor::memory::promised_max;
use dormouse_kernel::cgroup::{CgroupError, LimitSet, MemoryShare, ParentMemory};
use dormouse_model::{Config, ContainerId, Contradiction, Memory, Size};

use super::ledger::{self, Extent, Ledger, Room};
use super::writer::{self, Member, Site};
use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::settings::IMAGES_PART;
use crate::{settings, state, usage};

/// Records the memory with which a container is restored by command, in `RUN/c/ID/restored`. The caller has not
/// made its cgroup yet. A wake needs no such file: its checkpoint is in its place, and has the size.
pub(crate) fn expect_restored(ground: &Ground, id: &ContainerId, bytes: u64) -> Result<()> {
    match ground.cgroups()?.keeps_memory() {
        true => Ok(()),
        false => disk::write(&restored(ground, id), bytes.to_string().as_bytes(), Durable::No),
    }
}

/// The record of the memory with which a container was restored by command.
fn restored(ground: &Ground, id: &ContainerId) -> PathBuf {
    ground.run_dir(id).join("restored")
}

/// Returns the memory with which a container with a cgroup was restored; 0 if it was not.
fn restored_bytes(ground: &Ground, id: &ContainerId) -> u64 {
    if let Some(bytes) =
        fs::read_to_string(restored(ground, id)).ok().and_then(|it| it.parse().ok())
    {
        return bytes;
    }
    // ORDER: the checkpoint before the record: a wake writes the record before the checkpoint leaves its place.
    if let Some(bytes) = usage::wake_bytes(ground, id) {
        return bytes;
    }
    state::read_init(ground, id).ok().flatten().map_or(0, |init| init.restored_bytes)
}

impl Site for Ground {
    type Group = MemoryShare;
    type Writer = Lock;

    fn ledger<T>(&self, change: impl FnOnce(&mut Ledger) -> Result<T>) -> Result<T> {
        ledger::change(self, change)
    }

    fn writer(&self, extent: Extent) -> Result<Option<Lock>> {
        let path = self.places.run.join("limits.lock");
        match extent {
            Extent::All => Lock::take_new(&path).map(Some),
            Extent::Raises => Lock::try_take_new(&path),
        }
    }

    fn started(&self) -> Result<Vec<ContainerId>> {
        match self.cgroups()?.keeps_memory() {
            true => Ok(Vec::new()),
            false => Self::started(self),
        }
    }

    fn member(&self, id: &ContainerId) -> Result<Option<Member<MemoryShare>>> {
        let Some(group) = self.cgroups()?.memory_share(id.as_str())? else { return Ok(None) };
        // A container that is being removed needs no limit.
        let Ok(config) = self.config(id) else { return Ok(None) };
        let own_bytes = config.spec.limits.memory_max_bytes.unwrap_or(u64::MAX);
        let restored_bytes = restored_bytes(self, id);
        Ok(Some(Member { id: id.clone(), group, own_bytes, restored_bytes }))
    }

    fn set_parent(&self, memory: ParentMemory, extent: Extent) -> Result<()> {
        let cgroups = self.cgroups()?;
        let set = match extent {
            Extent::Raises => cgroups.raise_parent_memory(memory),
            Extent::All => cgroups.set_parent_memory(memory),
        };
        Ok(set?)
    }

    fn limit_bytes(&self, group: &MemoryShare) -> Result<Option<u64>> {
        Ok(group.limit_bytes()?)
    }

    fn set(&self, group: &MemoryShare, bytes: u64) -> Result<LimitSet> {
        Ok(group.set(bytes)?)
    }
}

/// The memory that is kept for the host, and all memory.
pub(super) fn host(ground: &Ground) -> Result<(u64, u64)> {
    let all = usage::host_memory_bytes();
    Ok((settings::host_memory_bytes(&ground.settings(), all)?, all))
}

/// The memory of all containers together while some is guaranteed, and that of images among it.
pub(super) fn room(ground: &Ground) -> Room {
    let all = usage::host_memory_bytes();
    // Unreadable settings do not keep a container from its end.
    let all_bytes = all - host(ground).map_or(all / 20, |(host, _)| host);
    let used = ground.cgroups().ok().and_then(|cgroups| cgroups.images_memory().ok().flatten());
    match used {
        None => all_bytes.into(),
        Some(used) => Room::new(all_bytes, images_bytes(ground, all_bytes), used.bytes),
    }
}

/// LIMIT: the least limit of images on v1. An import needs some 50 MB for each layer that it unpacks at once.
const IMAGES_LEAST_BYTES: u64 = 128 << 20;

/// The memory of images that is reclaimed last, of the memory of all containers together; on v1 the most memory of
/// images.
fn images_bytes(ground: &Ground, room_bytes: u64) -> u64 {
    // Unreadable settings do not keep an image from its import.
    let bytes = settings::images_memory_bytes(&ground.settings(), room_bytes)
        .unwrap_or(room_bytes / IMAGES_PART);
    match ground.cgroups().is_ok_and(|cgroups| cgroups.keeps_memory()) {
        true => bytes,
        false => bytes.max(IMAGES_LEAST_BYTES).min(room_bytes),
    }
}

/// Protects the memory of images, whose cgroup may be new.
pub(super) fn protect_images(ground: &Ground) -> Result<()> {
    let room = room(ground);
    ledger::change(ground, |ledger| {
        ledger.decide(room, false);
        if ledger.memory.is_some() {
            return Ok(());
        }
        // ORDER: under the lock of the ledger: limits of the first guarantee are written later.
        let images_bytes = room.images_bytes;
        let only_images = ParentMemory { images_bytes, ..ParentMemory::default() };
        Ok(ground.cgroups()?.raise_parent_memory(only_images)?)
    })?;
    writer::settle(ground, Extent::All)
}

/// Refuses limits that contradict each other, or that this host can never keep.
pub(super) fn check(ground: &Ground, memory: &Memory) -> Result<()> {
    memory.check().map_err(CgroupError::from)?;
    if memory.min_bytes == 0 {
        return Ok(());
    }
    let (host, all) = host(ground)?;
    settings::images_memory_bytes(&ground.settings(), all - host)?;
    let most = promised_max(all - host);
    match memory.min_bytes <= most {
        true => Ok(()),
        false => {
            let (min, host) = (Size(memory.min_bytes), Size(most));
            Err(CgroupError::from(Contradiction::MinAboveHost { min, host }).into())
        }
    }
}

/// Returns the error for guarantees of more memory than there is, `config` being the container that came last.
pub(super) fn refusal(
    minima: &BTreeMap<ContainerId, u64>,
    config: &Config,
    (host, all): (u64, u64),
) -> Option<Error> {
    let wanted = *minima.get(&config.id)?;
    let others = || minima.iter().filter(|(id, _)| **id != config.id).map(|(_, bytes)| *bytes);
    let taken = others().fold(0, u64::saturating_add);
    let most = promised_max(all - host);
    let free = most.saturating_sub(taken);
    (wanted > free).then(|| Error::NoMemory {
        name: config.name.to_string(),
        wanted: Size(wanted),
        free: Size(free),
        all: Size(all),
        taken: Size(taken),
        holders: others().count(),
        host: Size(all - most),
    })
}
