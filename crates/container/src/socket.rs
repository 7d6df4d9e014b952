//! The limit of a container's sockets (`--sockets`).
//!
//! BPF programs count the sockets of containers with a limit (`dormouse_bpf::socket_count`). A container is known there
//! by its slot of host ids, and by its cgroup while it has one. Its count begins at each start, and lasts over a sleep:
//! the keeper holds some of its sockets meanwhile, and the wake makes the others again.
//!
//! ORDER: a restore makes as many sockets as the container had, and some for itself. The limit is therefore in force
//! from just before the first restored process runs, and not while the container is asleep, when a client is to reach
//! its listeners so that it wakes.
//!
//! Uses `ground`.

use dormouse_bpf::socket_count::{Count, Counts};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::{Config, IdSlot, Limits};
use dormouse_network::Error as NetworkError;

use crate::error::{Error, Result};
use crate::ground::{self, Ground};

/// Returns a number that no other life of a container has.
fn new_serial() -> Result<u64> {
    let id = ground::new_id()?;
    // An id is 32 hex digits.
    u64::from_str_radix(&id.as_str()[..16], 16).map_err(|e| Error::Invalid(format!("id {id}: {e}")))
}

/// Returns the number by which the programs know a container.
fn slot(config: &Config) -> u32 {
    config.ids.base / IdSlot::IDS
}

/// Returns the counts for a container that has or had a limit, if its programs are attached.
fn find(ground: &Ground, config: &Config) -> Result<Option<Counts>> {
    match config.spec.limits.sockets_max {
        None => Ok(None),
        Some(_) => Ok(ground.network()?.socket_counts()?),
    }
}

/// Refuses a limit that this host cannot keep, before anything is made.
pub(crate) fn check(ground: &Ground, limits: &Limits) -> Result<()> {
    match limits.most_sockets() {
        None => Ok(()),
        Some(_) => attach(ground).map(drop),
    }
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

/// Counts the sockets of a container with a new cgroup, if it has a limit.
pub(crate) fn enter(ground: &Ground, config: &Config, cgroup: &Cgroup, begin: Begin) -> Result<()> {
    let Some(most) = config.spec.limits.most_sockets() else { return Ok(()) };
    let counts = attach(ground)?;
    let slot = slot(config);
    let most = Some(most).filter(|_| begin == Begin::Start);
    let is_counted = begin == Begin::Wake && counts.set(slot, most)?;
    if !is_counted {
        counts.begin(slot, new_serial()?, most)?;
    }
    let id = cgroup.v2_id().ok_or(NetworkError::NoCgroup2)?;
    Ok(counts.enter(id, slot)?)
}

/// Puts the limit of a restored container in force.
pub(crate) fn enforce(ground: &Ground, config: &Config) -> Result<()> {
    match config.spec.limits.most_sockets() {
        Some(most) => find(ground, config)?
            .map_or(Ok(()), |counts| counts.set(slot(config), Some(most)).map(drop))
            .map_err(Error::from),
        None => Ok(()),
    }
}

/// Sets a changed limit of a running container. One without a limit before is counted from now on.
pub(crate) fn set(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    match config.spec.limits.most_sockets() {
        None => suspend(ground, config),
        Some(most) => match attach(ground)?.set(slot(config), Some(most))? {
            true => Ok(()),
            false => enter(ground, config, cgroup, Begin::Start),
        },
    }
}

/// Permits any number of sockets, and goes on counting.
pub(crate) fn suspend(ground: &Ground, config: &Config) -> Result<()> {
    match find(ground, config)? {
        Some(counts) => Ok(counts.set(slot(config), None).map(drop)?),
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

/// Returns the sockets of a container with a limit.
pub(crate) fn count(ground: &Ground, config: &Config) -> Result<Option<Count>> {
    match find(ground, config)? {
        Some(counts) => Ok(counts.of(slot(config))?),
        None => Ok(None),
    }
}
