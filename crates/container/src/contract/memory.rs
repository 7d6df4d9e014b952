//! Guarantees of memory: what the host can promise, and the limits around them.
//!
//! While a container with a guarantee runs, all containers together have a limit: the memory of the host without
//! its own part. On cgroup v1 each container has a limit besides, which leaves the guarantees of the others free
//! ([`dormouse_governor::memory::ceiling`]). A restored container begins with the memory of its checkpoint, so its
//! limit is not below that.
//!
//! ORDER: the limits are written without the lock of the ledger: such a write takes as long as the kernel reclaims.
//! [`Ledger::is_same_turn`] shows afterwards whether another process has changed the guarantees meanwhile.

use std::collections::BTreeMap;

use dormouse_governor::memory::{ceiling, promised_max};
use dormouse_kernel::cgroup::CgroupError;
use dormouse_model::{Config, ContainerId, Contradiction, Memory, Size};

use super::ledger::{Due, InForce, Ledger};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::{settings, usage};

/// Records the limits for what the ledger grants, if they have changed or are to be written again (`again`).
pub(super) fn decide(ground: &Ground, ledger: &mut Ledger, again: bool) {
    if ledger.memory.is_none() && !ledger.is_outdated() {
        return;
    }
    let now = InForce::of(ledger, room_bytes(ground));
    let is_new = match &ledger.memory {
        None => true,
        Some(was) => again || was.is_refused || !was.is_same(&now),
    };
    if is_new {
        ledger.memory = Some(now);
    }
}

/// Returns the limit of a container of v1.
pub(super) fn limit(ledger: &Ledger, config: &Config) -> u64 {
    let own = config.spec.limits.memory_max_bytes.unwrap_or(u64::MAX);
    let Some(now) = ledger.memory.as_ref().filter(|now| now.min_bytes > 0) else { return own };
    let min = ledger.granted.get(&config.id).map_or(0, |grant| grant.memory_min_bytes);
    let restored = ledger.restored.get(&config.id).copied().unwrap_or(0);
    let limit = ceiling(now.room_bytes, now.min_bytes, min, Some(own)).max(restored).min(own);
    limit - limit % PAGE_BYTES // as the kernel rounds it
}

const PAGE_BYTES: u64 = 4096;

/// Returns the limits of all running containers; none on v2, where the kernel keeps the guarantees.
pub(super) fn limits(ground: &Ground, ledger: &Ledger) -> Result<BTreeMap<ContainerId, u64>> {
    if ground.cgroups()?.keeps_memory() {
        return Ok(BTreeMap::new());
    }
    // A container that is being removed needs no limit.
    let limit = |id| ground.config(&id).ok().map(|config| (id, limit(ledger, &config)));
    Ok(ground.started()?.into_iter().filter_map(limit).collect())
}

/// Writes the limits of a ledger. No container gets a ceiling if that of all together is refused.
pub(super) fn write(ground: &Ground, ledger: &Ledger, due: &Due) -> Result<()> {
    let cgroups = ground.cgroups()?;
    let write = |id: &ContainerId| -> Result<()> {
        // A container that is being removed needs no limit, nor does one without a cgroup.
        let Ok(config) = ground.config(id) else { return Ok(()) };
        let Some(share) = cgroups.memory_share(id.as_str())? else { return Ok(()) };
        let limit = limit(ledger, &config);
        if share.limit_bytes()? != Some(limit) {
            // A container that uses more already, and cannot be reclaimed, keeps its limit.
            share.set(limit)?;
        }
        Ok(())
    };
    match due {
        Due::None => Ok(()),
        Due::One(id) => write(id),
        Due::All => {
            let parent = ledger.memory.as_ref().map(InForce::parent).unwrap_or_default();
            cgroups.set_parent_memory(parent)?;
            if cgroups.keeps_memory() {
                return Ok(());
            }
            let all = ground.started()?;
            all.iter().map(write).fold(Ok(()), Result::and)
        }
    }
}

/// The memory that is kept for the host, and all memory.
pub(super) fn host(ground: &Ground) -> Result<(u64, u64)> {
    let all = usage::host_memory_bytes();
    Ok((settings::host_memory_bytes(&ground.settings(), all)?, all))
}

/// The memory of all containers together while some is guaranteed.
pub(super) fn room_bytes(ground: &Ground) -> u64 {
    let all = usage::host_memory_bytes();
    // Unreadable settings do not keep a container from its end.
    all - host(ground).map_or(all / 20, |(host, _)| host)
}

/// Refuses limits that contradict each other, or that this host can never keep.
pub(super) fn check(ground: &Ground, memory: &Memory) -> Result<()> {
    memory.check().map_err(CgroupError::from)?;
    if memory.min_bytes == 0 {
        return Ok(());
    }
    let (host, all) = host(ground)?;
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
