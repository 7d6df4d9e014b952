//! Limits of the sockets of containers (`--sockets`) and of accounts (`account set --sockets`).
//!
//! BPF programs count the sockets of containers with a limit, or with an account that has one
//! (`dormouse_bpf::socket_count`). A container is known there by its slot of host ids, and by its cgroup while it has
//! one. Its count begins at each start, and lasts over a sleep: the keeper holds some of its sockets meanwhile, and the
//! wake makes the others again. An account counts the sockets of all its containers, and of the accounts below it.
//!
//! ORDER: a restore makes as many sockets as the container had, and some for itself. The limit is therefore in force
//! from just before the first restored process runs, and not while the container is asleep, when a client is to reach
//! its listeners so that it wakes.
//!
//! ORDER: a start makes the cgroup, and then reads the limits of accounts. A change of a limit is on the disk, and then
//! looks for cgroups ([`follow`]). So one of the two has the container counted.
//!
//! Uses `ground` and `account`.

use std::collections::BTreeMap;

use dormouse_bpf::socket_count::{Count, Counts, Terms};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::{Config, Limits};
use dormouse_network::Error as NetworkError;

use crate::account::{self, Above, slot};
use crate::error::{Error, Result};
use crate::ground::{self, Ground};

/// Returns a number that no other life of a container has.
fn new_serial() -> Result<u64> {
    let id = ground::new_id()?;
    // An id is 32 hex digits.
    u64::from_str_radix(&id.as_str()[..16], 16).map_err(|e| Error::Invalid(format!("id {id}: {e}")))
}

/// Returns the counts for a container that is or was counted, if the programs are attached.
fn find(ground: &Ground, config: &Config) -> Result<Option<Counts>> {
    match account::may_count_sockets(config) {
        true => Ok(ground.network()?.socket_counts()?),
        false => Ok(None),
    }
}

/// Returns what holds for a container that runs.
fn terms(config: &Config) -> Terms {
    Terms { most: config.spec.limits.most_sockets(), is_exempt: false }
}

/// Refuses a limit that this host cannot keep, before anything is made.
pub(crate) fn check(ground: &Ground, limits: &Limits) -> Result<()> {
    match limits.most_sockets() {
        None => Ok(()),
        Some(_) => attach(ground).map(drop),
    }
}

/// The same for a limit of an account.
pub(crate) fn check_account(ground: &Ground) -> Result<()> {
    attach(ground).map(drop)
}

/// Attaches the programs, if they are not attached.
fn attach(ground: &Ground) -> Result<Counts> {
    let refused = |why: String| {
        Error::Invalid(format!(
            "--sockets needs programs that this kernel does not take (Linux 5.18, cgroup v2, BTF): {why}; leave it out"
        ))
    };
    ground.network()?.count_sockets().map_err(|e| match e {
        NetworkError::Bpf(e) => refused(Error::from(e).with_causes()),
        NetworkError::NoCgroup2 => refused(NetworkError::NoCgroup2.to_string()),
        e => e.into(),
    })
}

/// The life that begins with a new cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// A start without sockets.
    Start,
    /// A restore from a checkpoint. Its sockets are made before the limit holds.
    Restore,
    /// The same for an asleep container, of which some sockets are there.
    Wake,
}

/// Counts the sockets of a container with a new cgroup, if it or an account of it has a limit.
pub(crate) fn enter(ground: &Ground, config: &Config, cgroup: &Cgroup, begin: Begin) -> Result<()> {
    let mut payers = account::socket_limits_above(ground, config)?;
    if config.spec.limits.most_sockets().is_none() && payers.is_empty() {
        return Ok(());
    }
    let counts = attach(ground)?;
    let slot = slot(config);
    let terms = match begin {
        Begin::Start => terms(config),
        Begin::Restore | Begin::Wake => Terms::ANY,
    };
    let is_counted = begin == Begin::Wake && counts.set(slot, terms)?;
    match is_counted {
        true => counts.begin_peak(slot)?,
        false => counts.begin(slot, new_serial()?, terms)?,
    }
    loop {
        for above in &payers {
            counts.bound_new(above.number, Some(above.most))?;
        }
        counts.pay(slot, &numbers(&payers))?;
        // A change that was made meanwhile may have been written before.
        let now = account::socket_limits_above(ground, config)?;
        if numbers(&now) == numbers(&payers) {
            break;
        }
        payers = now;
    }
    let id = cgroup.v2_id().ok_or(NetworkError::NoCgroup2)?;
    Ok(counts.enter(id, slot)?)
}

fn numbers(payers: &[Above]) -> Vec<u32> {
    payers.iter().map(|above| above.number).collect()
}

/// Has the kernel follow the limits of accounts, and their places, which have changed on the disk.
///
/// ORDER: the limits before the containers that they are for.
pub(crate) fn follow(ground: &Ground) -> Result<()> {
    let limits = account::socket_limits(ground)?;
    let counts = match ground.network()?.socket_counts()? {
        None if limits.is_empty() => return Ok(()),
        Some(counts) if limits.is_empty() => counts,
        // Those of an earlier build are replaced.
        _ => attach(ground)?,
    };
    let known = counts.accounts()?;
    if limits.is_empty() && known.is_empty() {
        return Ok(());
    }
    let known = known.into_keys().map(|account| (account, None));
    let wanted = limits.into_iter().map(|(account, most)| (account, Some(most)));
    let all: BTreeMap<u32, Option<u32>> = known.chain(wanted).collect();
    all.into_iter().try_for_each(|(account, most)| counts.bound(account, most))?;
    for config in ground.started_configs()? {
        let config = config?;
        if account::is_made(&config) {
            follow_one(ground, &counts, &config)?;
        }
    }
    Ok(())
}

fn follow_one(ground: &Ground, counts: &Counts, config: &Config) -> Result<()> {
    let (slot, payers) = (slot(config), account::socket_limits_above(ground, config)?);
    let cgroup = ground.cgroups()?.find(config.id.as_str())?;
    let cgroup = cgroup.and_then(|cgroup| cgroup.v2_id());
    if !payers.is_empty()
        && let Some(id) = cgroup
    {
        counts.begin_new(slot, new_serial()?, terms(config))?;
        counts.enter(id, slot)?;
    }
    // Also of an asleep one, of which the keeper holds sockets.
    counts.pay(slot, &numbers(&payers))?;
    Ok(())
}

/// Puts the limits of a restored container in force.
pub(crate) fn enforce(ground: &Ground, config: &Config) -> Result<()> {
    match find(ground, config)? {
        Some(counts) => Ok(counts.set(slot(config), terms(config)).map(drop)?),
        None => Ok(()),
    }
}

/// Sets a changed limit of a running container. One without a limit before is counted from now on.
pub(crate) fn set(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    let counts = match config.spec.limits.most_sockets() {
        Some(_) => Some(attach(ground)?),
        None => find(ground, config)?,
    };
    let Some(counts) = counts else { return Ok(()) };
    match counts.set(slot(config), terms(config))? {
        true => Ok(()),
        false => enter(ground, config, cgroup, Begin::Start),
    }
}

/// Permits any number of sockets, and goes on counting.
pub(crate) fn suspend(ground: &Ground, config: &Config) -> Result<()> {
    match find(ground, config)? {
        Some(counts) => Ok(counts.set(slot(config), Terms::ANY).map(drop)?),
        None => Ok(()),
    }
}

/// Forgets the cgroup of a container, which was removed.
pub(crate) fn leave(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    match (find(ground, config)?, cgroup.v2_id()) {
        (Some(counts), Some(id)) => Ok(counts.leave(id).map(drop)?),
        _ => Ok(()),
    }
}

/// Ends the count of a container without processes.
pub(crate) fn end(ground: &Ground, config: &Config) -> Result<()> {
    match find(ground, config)? {
        Some(counts) => Ok(counts.end(slot(config))?),
        None => Ok(()),
    }
}

/// Returns the sockets of the accounts that have a limit, each with those of the accounts below it.
pub(crate) fn of_accounts(ground: &Ground) -> Result<BTreeMap<u32, Count>> {
    match ground.network()?.socket_counts()? {
        Some(counts) => {
            Ok(counts.accounts()?.into_iter().filter(|(_, count)| count.most.is_some()).collect())
        }
        None => Ok(BTreeMap::new()),
    }
}

/// Returns the sockets of a container with a limit.
pub(crate) fn count(ground: &Ground, config: &Config) -> Result<Option<Count>> {
    match find(ground, config)? {
        Some(counts) => Ok(counts.of(slot(config))?),
        None => Ok(None),
    }
}
