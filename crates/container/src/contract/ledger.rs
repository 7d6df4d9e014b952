//! `RUN/contract.json`: what is granted to running containers, and the limits of memory that follow from it.
//!
//! Plain data: readers, writers and locks are in the parent module.

use std::collections::BTreeMap;

use dormouse_kernel::cgroup::ParentMemory;
use dormouse_model::{ContainerId, Cpu, Limits, Memory};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// `RUN/contract.json`.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Ledger {
    /// The running containers with a reservation.
    pub(super) granted: BTreeMap<ContainerId, Grant>,
    /// Number of entries in `RUN/c` when the weights were computed; 0 if it is not known.
    #[serde(default)]
    pub(super) started: u64,
    /// Weight of the other containers then, in shares.
    #[serde(default)]
    pub(super) others_shares: u64,
    /// The limits of memory that are in force, or are to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) memory: Option<InForce>,
    /// Memory with which restored containers began beside a guarantee.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) restored: BTreeMap<ContainerId, u64>,
}

/// The reservation of one container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Grant {
    pub(super) cpu: Cpu,
    /// The CPUs to which it is bound.
    #[serde(default)]
    pub(super) cpuset: Option<String>,
    /// Guaranteed memory.
    #[serde(default)]
    pub(super) memory_min_bytes: u64,
    /// Memory that is reclaimed last.
    #[serde(default)]
    pub(super) memory_low_bytes: u64,
}

impl Ledger {
    /// The containers with reserved CPUs.
    pub(super) fn cpus(&self) -> impl Iterator<Item = (&ContainerId, &Grant)> {
        self.granted.iter().filter(|(_, grant)| grant.cpu.reserve_milli > 0)
    }

    /// The guarantees of memory.
    pub(super) fn minima(&self) -> BTreeMap<ContainerId, u64> {
        let some = self.granted.iter().filter(|(_, grant)| grant.memory_min_bytes > 0);
        some.map(|(id, grant)| (id.clone(), grant.memory_min_bytes)).collect()
    }

    /// The guarantees, and the memory that is reclaimed last, of all containers.
    fn memory_granted(&self) -> (u64, u64) {
        let add = |(min, low): (u64, u64), grant: &Grant| {
            (min.saturating_add(grant.memory_min_bytes), low.saturating_add(grant.memory_low_bytes))
        };
        self.granted.values().fold((0, 0), add)
    }

    /// Returns whether the limits are not those for what is granted: an entry came, or was dropped.
    pub(super) fn is_outdated(&self) -> bool {
        let now = self.memory.as_ref().map_or((0, 0), |now| (now.min_bytes, now.low_bytes));
        now != self.memory_granted()
    }

    /// Returns which limits are to be written, `own` being the container whose cgroup was just made.
    pub(super) fn due(&self, own: Option<&ContainerId>) -> Due {
        match (&self.memory, own) {
            (None, _) => Due::None,
            (Some(now), _) if !now.is_written => Due::All,
            (Some(_), Some(own)) => Due::One(own.clone()),
            (Some(_), None) => Due::None,
        }
    }

    /// Returns whether two ledgers stand for the same limits.
    pub(super) fn is_same_turn(&self, other: &Self) -> bool {
        let turn = |ledger: &Self| ledger.memory.as_ref().map(|now| now.turn);
        turn(self) == turn(other)
    }

    /// Records that all limits were written, or could not be written: memory that is in use stays in use, and no
    /// other start waits for it again. Limits for nothing are dropped once they are removed. Returns whether the
    /// ledger has changed.
    pub(super) fn settle(&mut self, is_written: bool) -> bool {
        match &mut self.memory {
            Some(now) if now.is_none() => {
                if is_written {
                    self.memory = None;
                }
                is_written
            }
            Some(now) => {
                (now.is_written, now.is_refused) = (true, !is_written);
                true
            }
            None => false,
        }
    }
}

impl Grant {
    /// The reservation in a container's limits, if there is one.
    pub(super) fn of(limits: &Limits) -> Option<Self> {
        let (cpu, memory_min_bytes) = (Cpu::of(limits), Memory::of(limits).min_bytes);
        let memory_low_bytes = limits.memory_low_bytes.unwrap_or(0);
        (cpu.reserve_milli > 0 || memory_min_bytes > 0 || memory_low_bytes > 0).then(|| Self {
            cpu,
            cpuset: limits.cpuset_cpus.clone(),
            memory_min_bytes,
            memory_low_bytes,
        })
    }
}

/// The limits that are in force, or are to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct InForce {
    /// The time of the decision since the boot, in nanoseconds. No two decisions have the same.
    turn: u64,
    /// Memory of all containers together.
    pub(super) room_bytes: u64,
    /// The guarantees together.
    pub(super) min_bytes: u64,
    /// The memory that is reclaimed last, together.
    low_bytes: u64,
    /// Whether all were tried.
    is_written: bool,
    /// Whether some could not be written.
    #[serde(default)]
    pub(super) is_refused: bool,
}

impl InForce {
    /// The limits for what a ledger grants, which are not written yet.
    pub(super) fn of(ledger: &Ledger, room_bytes: u64) -> Self {
        let now = clock_gettime(ClockId::Boottime);
        let (min_bytes, low_bytes) = ledger.memory_granted();
        Self {
            turn: (now.tv_sec as u64).saturating_mul(1_000_000_000) + now.tv_nsec as u64,
            room_bytes,
            min_bytes,
            low_bytes,
            is_written: false,
            is_refused: false,
        }
    }

    /// Whether nothing is guaranteed or reclaimed last.
    pub(super) fn is_none(&self) -> bool {
        self.min_bytes == 0 && self.low_bytes == 0
    }

    /// Whether all that differs is whether they are written.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.room_bytes, self.min_bytes, self.low_bytes)
            == (other.room_bytes, other.min_bytes, other.low_bytes)
    }

    /// The memory of the parent of all containers.
    pub(super) fn parent(&self) -> ParentMemory {
        ParentMemory {
            max_bytes: (self.min_bytes > 0).then_some(self.room_bytes),
            min_bytes: self.min_bytes,
            low_bytes: self.low_bytes,
        }
    }
}

/// Which limits are to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Due {
    /// Those of all containers and of their parent.
    All,
    /// That of one container.
    One(ContainerId),
    /// None.
    None,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn id(number: u8) -> ContainerId {
        ContainerId::from_bytes([number; 16])
    }

    fn in_force(turn: u64) -> InForce {
        InForce {
            is_refused: false,
            turn,
            room_bytes: 400 * MB,
            min_bytes: 150 * MB,
            low_bytes: 0,
            is_written: false,
        }
    }

    #[test]
    fn limits_are_due_until_they_are_written() {
        let mut ledger = Ledger { memory: Some(in_force(1)), ..Ledger::default() };
        assert_eq!(ledger.due(None), Due::All);
        ledger.settle(true);
        assert_eq!(ledger.due(None), Due::None);
        assert_eq!(ledger.due(Some(&id(1))), Due::One(id(1)));
        ledger.memory = Some(InForce { min_bytes: 0, ..in_force(2) });
        assert!(!ledger.settle(false), "they are removed later");
        assert_eq!(ledger.due(Some(&id(1))), Due::All, "limits are to be removed");
        ledger.settle(true);
        assert_eq!((&ledger.memory, ledger.due(Some(&id(1)))), (&None, Due::None));
    }

    #[test]
    fn changed_guarantees_are_another_turn() {
        let of = |memory| Ledger { memory, ..Ledger::default() };
        let one = of(Some(in_force(1)));
        assert!(one.is_same_turn(&of(Some(InForce { is_written: true, ..in_force(1) }))));
        assert!(!one.is_same_turn(&of(Some(in_force(2)))));
        assert!(!one.is_same_turn(&of(None)));
    }
}
