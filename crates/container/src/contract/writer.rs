//! The order in which limits of memory are written, by verbs and by the daemon at once.
//!
//! A limit that is written late, from an old decision, can kill: a container that has just woken needs more than its
//! ceiling. Four rules exclude that.
//!
//! 1. **One writer at a time**, which holds `RUN/limits.lock` ([`Site::writer`]). Another process that would wait for
//!    it only to raise limits leaves them to that writer, which reads the ledger again after it has released the lock.
//! 2. **A turn is compared before each write.** Each decision about the guarantees has another number
//!    ([`Ledger::is_turn`]). A writer whose turn has passed begins again with that of the ledger.
//! 3. **Descriptors, not names.** A writer reads the ledger, then opens the groups, then reads their records. The size
//!    of a restored container is on record before its cgroup is made. So a limit from before the wake goes to the
//!    removed cgroup of the sleeper. The first limit of a new cgroup is written by its start ([`begin`]).
//! 4. **Raises come before lower limits**, and a raise that fails is repeated by the next writer. Only a lower limit
//!    waits, for reclaim: those are left to verbs of containers with a guarantee, and to the daemon.
//!
//! The functions are generic, so that the tests can run them in all orders ([`Site`]). Uses `ledger`.

use dormouse_kernel::cgroup::{LimitSet, ParentMemory};
use dormouse_model::ContainerId;

use super::ledger::{Extent, Ledger};
use crate::error::Result;

/// The files of an instance and the kernel, as a writer of limits needs them.
pub(super) trait Site {
    /// The memory cgroup of one container on v1, by descriptors.
    type Group;
    /// The lock of the writer.
    type Writer;

    /// Reads or changes the ledger under its lock.
    fn ledger<T>(&self, change: impl FnOnce(&mut Ledger) -> Result<T>) -> Result<T>;
    /// Waits for the lock of the writer, or only tries to take it if limits are to be raised.
    fn writer(&self, extent: Extent) -> Result<Option<Self::Writer>>;
    /// The containers that run or start; none on v2, where the kernel keeps the guarantees.
    fn started(&self) -> Result<Vec<ContainerId>>;
    /// Opens the group of a container, and reads its records after that; `None` without a group.
    fn member(&self, id: &ContainerId) -> Result<Option<Member<Self::Group>>>;
    /// Sets the memory of all containers together.
    fn set_parent(&self, memory: ParentMemory, extent: Extent) -> Result<()>;
    /// Reads a limit; `None` if the group was removed.
    fn limit_bytes(&self, group: &Self::Group) -> Result<Option<u64>>;
    /// Sets a limit.
    fn set(&self, group: &Self::Group, bytes: u64) -> Result<LimitSet>;
}

/// A running container of v1.
pub(super) struct Member<G> {
    pub(super) id: ContainerId,
    pub(super) group: G,
    /// Its own limit; [`u64::MAX`] without one.
    pub(super) own_bytes: u64,
    /// The memory with which it was restored; 0 if it was not.
    pub(super) restored_bytes: u64,
}

impl<G> Member<G> {
    /// Its limit beside the guarantees of a ledger.
    pub(super) fn due_bytes(&self, ledger: &Ledger) -> u64 {
        ledger.limit_bytes(&self.id, self.own_bytes, self.restored_bytes)
    }
}

/// LIMIT: how often limits are written that other processes have changed meanwhile. After that they are left to the
/// next writer.
const TURNS: u32 = 10;

/// Writes the first limit of a container whose cgroup was just made and is empty.
///
/// ORDER: under the lock of the ledger, so that a writer with another turn comes before or after. Without a ledger the
/// cgroup was made before the first guarantee, whose writer finds it. A limit that stays is left to the next writer.
pub(super) fn begin<S: Site>(site: &S, ledger: &mut Ledger, id: &ContainerId) -> Result<()> {
    if ledger.memory.is_none() {
        return Ok(());
    }
    let Some(member) = site.member(id)? else { return Ok(()) };
    let due = member.due_bytes(ledger);
    if site.limit_bytes(&member.group)? != Some(due)
        && site.set(&member.group, due)? == LimitSet::Stays
    {
        ledger.write_again();
    }
    Ok(())
}

/// Writes the limits of the ledger that are due. With [`Extent::All`] they are written once in any case: the result is
/// that of the guarantee which the caller has entered.
pub(super) fn settle<S: Site>(site: &S, extent: Extent) -> Result<()> {
    let (mut written, mut result) = (None, Ok(()));
    for _ in 0..TURNS {
        let must = extent == Extent::All && written.is_none();
        let is_due = site.ledger(|now| {
            let is_mine = written.is_some_and(|turn| now.is_turn(turn));
            Ok(!is_mine && (now.is_due(extent) || must && now.memory.is_some()))
        })?;
        if !is_due {
            return result;
        }
        // ORDER: what is due is read again after this lock was released. A change that was left to this writer is
        // found then.
        let Some(_writer) = site.writer(extent)? else { return result };
        let ledger = site.ledger(|now| Ok(now.clone()))?;
        let Some(turn) = ledger.memory.as_ref().map(|now| now.turn) else { return result };
        written = Some(turn);
        let (is_raised, lowered) = match raise(site, &ledger, turn) {
            Ok(Raised { is_all, lower }) => match extent {
                Extent::Raises => (is_all, Ok(())),
                Extent::All => (is_all, shrink(site, &ledger, turn, lower)),
            },
            Err(e) => (false, Err(e)),
        };
        if is_raised {
            site.ledger(|now| {
                now.settle(turn, extent, lowered.is_err());
                Ok(())
            })?;
        }
        result = lowered;
    }
    result
}

/// What is left after limits were raised.
struct Raised {
    /// Whether all that are higher are in force.
    is_all: bool,
    /// The containers with lower ones. Their groups are opened again: descriptors of all would be too many.
    lower: Vec<ContainerId>,
}

/// Raises limits, and finds the lower ones.
fn raise<S: Site>(site: &S, ledger: &Ledger, turn: u64) -> Result<Raised> {
    let parent = ledger.memory.as_ref().map(|now| now.parent()).unwrap_or_default();
    site.set_parent(parent, Extent::Raises)?;
    let mut raised = Raised { is_all: true, lower: Vec::new() };
    for id in site.started()? {
        let Some(member) = site.member(&id)? else { continue };
        let due = member.due_bytes(ledger);
        match site.limit_bytes(&member.group)? {
            Some(now) if due < now => raised.lower.push(id),
            Some(now) if due > now => {
                let is_set = site.ledger(|now| Ok(now.is_turn(turn)))?
                    && site.set(&member.group, due)? != LimitSet::Stays;
                raised.is_all &= is_set;
            }
            _ => {}
        }
    }
    Ok(raised)
}

/// Lowers limits: that of all containers together first. No container gets a ceiling if that one is refused. A
/// container that uses more already, and cannot be reclaimed, keeps its limit.
fn shrink<S: Site>(site: &S, ledger: &Ledger, turn: u64, lower: Vec<ContainerId>) -> Result<()> {
    let parent = ledger.memory.as_ref().map(|now| now.parent()).unwrap_or_default();
    if !site.ledger(|now| Ok(now.is_turn(turn)))? {
        return Ok(());
    }
    site.set_parent(parent, Extent::All)?;
    for id in lower {
        // ORDER: the group is opened again, then its records are read, then the turn is compared.
        let Some(member) = site.member(&id)? else { continue };
        let due = member.due_bytes(ledger);
        let is_lower = site.limit_bytes(&member.group)?.is_some_and(|now| due < now);
        if !site.ledger(|now| Ok(now.is_turn(turn)))? {
            return Ok(());
        }
        if is_lower {
            site.set(&member.group, due)?;
        }
    }
    Ok(())
}

/// What a daemon knows of one turn.
pub(super) struct Snapshot<G> {
    pub(super) ledger: Ledger,
    pub(super) members: Vec<Member<G>>,
}

/// Returns the running containers while memory is guaranteed.
pub(super) fn snapshot<S: Site>(site: &S) -> Result<Option<Snapshot<S::Group>>> {
    let ledger = site.ledger(|now| Ok(now.clone()))?;
    if ledger.memory.as_ref().is_none_or(|now| now.min_bytes == 0) {
        return Ok(None);
    }
    let mut members = Vec::new();
    for id in site.started()? {
        members.extend(site.member(&id)?);
    }
    Ok(Some(Snapshot { ledger, members }))
}

/// Writes one limit for the daemon, which has decided it for the guarantees of a turn. `None`: they have changed since.
pub(super) fn write_one<S: Site>(
    site: &S,
    turn: u64,
    group: &S::Group,
    bytes: u64,
) -> Result<Option<LimitSet>> {
    let set = {
        let _writer = site.writer(Extent::All)?;
        match site.ledger(|now| Ok(now.is_turn(turn)))? {
            true => Some(site.set(group, bytes)?),
            false => None,
        }
    };
    // ORDER: another process may have left its limits to this writer.
    if site.ledger(|now| Ok(now.is_due(Extent::Raises)))? {
        settle(site, Extent::Raises)?;
    }
    Ok(set)
}

#[cfg(test)]
mod tests;
