//! `RUN/contract.json`: what is granted to running containers, and the limits of memory that follow from it.
//!
//! Every change is made under `RUN/contract.lock`, which is held for a short time: no limit of memory that needs
//! reclaim is written meanwhile.
//!
//! Uses `ground` and `disk`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use dormouse_governor::memory::ceiling;
use dormouse_kernel::cgroup::ParentMemory;
use dormouse_model::{ContainerId, Cpu, Limits, Memory};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::error::Result;
use crate::ground::Ground;

pub(super) fn path(ground: &Ground) -> PathBuf {
    ground.places.run.join("contract.json")
}

pub(super) fn lock(ground: &Ground) -> Result<Lock> {
    Lock::take_new(&ground.places.run.join("contract.lock"))
}

/// Reads the ledger without the entries of containers that are gone.
pub(super) fn read(ground: &Ground) -> Result<Ledger> {
    Ok(drop_stale(ground, read_all(ground)?))
}

fn read_all(ground: &Ground) -> Result<Ledger> {
    // A damaged ledger is lost with the boot; the entries come back as their containers start.
    Ok(disk::read_json(&path(ground))?.unwrap_or_default())
}

/// Removes the entries of containers that are gone.
fn drop_stale(ground: &Ground, mut ledger: Ledger) -> Ledger {
    ledger.granted.retain(|id, _| ground.run_dir(id).exists());
    ledger
}

pub(super) fn write(ground: &Ground, ledger: &Ledger) -> Result<()> {
    // Limits that are in force outlive the last guarantee until they are removed.
    match ledger.granted.is_empty() && ledger.memory.is_none() {
        true => disk::remove(&path(ground)),
        false => disk::write_json(&path(ground), ledger, Durable::No),
    }
}

/// Changes the ledger under its lock.
pub(super) fn change<T>(
    ground: &Ground,
    change: impl FnOnce(&mut Ledger) -> Result<T>,
) -> Result<T> {
    let _alone = lock(ground)?;
    // With stale entries, so that their loss is a change.
    let before = read_all(ground)?;
    let mut ledger = drop_stale(ground, before.clone());
    let changed = change(&mut ledger);
    if ledger != before {
        write(ground, &ledger)?;
    }
    changed
}

/// `RUN/contract.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Ledger {
    /// The running containers with a reservation, or with a rate for idle hosts.
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
    /// Guaranteed bandwidth, in bits per second.
    #[serde(default)]
    pub(super) net_rate_bps: u64,
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

    /// Returns whether limits are to be written.
    pub(super) fn is_due(&self, extent: Extent) -> bool {
        self.memory.as_ref().is_some_and(|now| match extent {
            Extent::Raises => !now.is_raised,
            Extent::All => !now.is_written,
        })
    }

    /// Records that the limits are to be written again, as another turn: a writer of this one may have passed already.
    pub(super) fn write_again(&mut self) {
        let room = self.memory.as_ref().map(InForce::room);
        self.memory = room.map(|room| InForce::of(self, room));
    }

    /// Returns whether limits are still those of a turn.
    pub(super) fn is_turn(&self, turn: u64) -> bool {
        self.memory.as_ref().is_some_and(|now| now.turn == turn)
    }

    /// The limit of a container on cgroup v1.
    pub(super) fn limit_bytes(&self, id: &ContainerId, own_bytes: u64, restored_bytes: u64) -> u64 {
        let Some(now) = self.memory.as_ref().filter(|now| now.min_bytes > 0) else {
            return own_bytes;
        };
        let min = self.granted.get(id).map_or(0, |grant| grant.memory_min_bytes);
        let ceiling = ceiling(now.room().left_bytes(), now.min_bytes, min, Some(own_bytes));
        let limit = ceiling.max(restored_bytes).min(own_bytes);
        limit - limit % PAGE_BYTES // as the kernel rounds it
    }

    /// Records the limits for what is granted, if they have changed, were refused, or are to be written again
    /// (`again`).
    pub(super) fn decide(&mut self, room: impl Into<Room>, again: bool) {
        if self.memory.is_none() && !self.is_outdated() {
            return;
        }
        let now = InForce::of(self, room);
        let is_new = match &self.memory {
            None => true,
            Some(was) => again || was.is_refused || !was.is_same(&now),
        };
        if is_new {
            self.memory = Some(now);
        }
    }

    /// Records what was written of the limits of one turn, if they are still those of the ledger. Limits for nothing
    /// are dropped once they are removed. `is_refused`: memory that is in use stays in use, and no other start waits
    /// for it again.
    pub(super) fn settle(&mut self, turn: u64, written: Extent, is_refused: bool) {
        let Some(now) = self.memory.as_mut().filter(|now| now.turn == turn) else { return };
        now.is_raised = true;
        if written == Extent::All {
            (now.is_written, now.is_refused) = (true, is_refused);
        }
        if now.is_none() {
            self.memory = None; // nothing is lower than without a guarantee
        }
    }
}

/// A page of the kernel, of which limits are multiples.
const PAGE_BYTES: u64 = 4096;

/// Which limits are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// Those that are higher than the present ones, which needs no reclaim.
    Raises,
    /// All.
    All,
}

impl Grant {
    /// The reservation in a container's limits, or its rate for idle hosts, if there is one.
    pub(super) fn of(limits: &Limits) -> Option<Self> {
        let (cpu, memory_min_bytes) = (Cpu::of(limits), Memory::of(limits).min_bytes);
        let memory_low_bytes = limits.memory_low_bytes.unwrap_or(0);
        let net_rate_bps = limits.net_rate_bps.unwrap_or(0);
        let memory = memory_min_bytes.max(memory_low_bytes);
        let has_cpu = cpu.reserve_milli > 0 || cpu.idle_rate_milli.is_some();
        (has_cpu || memory > 0 || net_rate_bps > 0).then(|| Self {
            cpu,
            cpuset: limits.cpuset_cpus.clone(),
            memory_min_bytes,
            memory_low_bytes,
            net_rate_bps,
        })
    }
}

/// Parts of the room, of which that of images is counted in whole ones: less is not worth new limits.
const COUNTED: u64 = 64;

/// The memory of all containers and images together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// All of it.
    pub(super) all_bytes: u64,
    /// The part that is protected for images; on v1 the most memory of images. 0 while they have no cgroup.
    pub(super) images_bytes: u64,
    /// The part that images use.
    pub(super) images_used_bytes: u64,
}

impl Room {
    /// The room with this use of images.
    pub(super) fn new(all_bytes: u64, images_bytes: u64, used_bytes: u64) -> Self {
        let used = used_bytes.min(images_bytes);
        let step = (all_bytes / COUNTED).max(1);
        Self { all_bytes, images_bytes, images_used_bytes: used - used % step }
    }

    /// The room for containers.
    fn left_bytes(self) -> u64 {
        self.all_bytes.saturating_sub(self.images_used_bytes)
    }
}

impl From<u64> for Room {
    fn from(all_bytes: u64) -> Self {
        Self { all_bytes, ..Self::default() }
    }
}

/// The limits that are in force, or are to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct InForce {
    /// The time of the decision since the boot, in nanoseconds. No two decisions have the same.
    pub(super) turn: u64,
    /// Memory of all containers together.
    pub(super) room_bytes: u64,
    /// The guarantees together.
    pub(super) min_bytes: u64,
    /// The memory that is reclaimed last, together.
    low_bytes: u64,
    /// The memory of images that is protected, and that they used.
    #[serde(default)]
    images_bytes: u64,
    #[serde(default)]
    images_used_bytes: u64,
    /// Whether those that are raised were written.
    #[serde(default)]
    is_raised: bool,
    /// Whether all were tried.
    is_written: bool,
    /// Whether some could not be written.
    #[serde(default)]
    pub(super) is_refused: bool,
}

impl InForce {
    /// The limits for what a ledger grants, which are not written yet.
    pub(super) fn of(ledger: &Ledger, room: impl Into<Room>) -> Self {
        let room = room.into();
        let now = clock_gettime(ClockId::Boottime);
        let (min_bytes, low_bytes) = ledger.memory_granted();
        let now_ns = (now.tv_sec as u64).saturating_mul(1_000_000_000) + now.tv_nsec as u64;
        let last = ledger.memory.as_ref().map_or(0, |last| last.turn);
        Self {
            turn: now_ns.max(last.saturating_add(1)),
            room_bytes: room.all_bytes,
            min_bytes,
            low_bytes,
            images_bytes: room.images_bytes,
            images_used_bytes: room.images_used_bytes,
            is_raised: false,
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
        (self.room(), self.min_bytes, self.low_bytes)
            == (other.room(), other.min_bytes, other.low_bytes)
    }

    /// The memory of all containers and images together.
    fn room(&self) -> Room {
        Room {
            all_bytes: self.room_bytes,
            images_bytes: self.images_bytes,
            images_used_bytes: self.images_used_bytes,
        }
    }

    /// The memory of the parent of all containers.
    pub(super) fn parent(&self) -> ParentMemory {
        ParentMemory {
            max_bytes: (self.min_bytes > 0).then_some(self.room_bytes),
            min_bytes: self.min_bytes,
            low_bytes: self.low_bytes,
            images_bytes: self.images_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Places;

    const MB: u64 = 1 << 20;

    fn id(number: u8) -> ContainerId {
        ContainerId::from_bytes([number; 16])
    }

    /// A ledger with this guarantee of one container.
    fn with_min(min_bytes: u64) -> Ledger {
        let limits = Limits { memory_min_bytes: Some(min_bytes), ..Limits::default() };
        let granted = Grant::of(&limits).map(|grant| (id(2), grant));
        let mut ledger = Ledger { granted: granted.into_iter().collect(), ..Ledger::default() };
        ledger.decide(400 * MB, false);
        ledger
    }

    fn turn(ledger: &Ledger) -> u64 {
        ledger.memory.as_ref().expect("limits").turn
    }

    #[test]
    fn change_writes_stale_entries_away() {
        let dir = tempfile::tempdir().unwrap();
        let ground = Ground::new(Places::below(dir.path()));
        std::fs::create_dir_all(ground.run_dir(&id(1))).unwrap();
        let mut ledger = with_min(150 * MB);
        let grant = ledger.granted[&id(2)].clone();
        ledger.granted.insert(id(1), grant);
        write(&ground, &ledger).unwrap();
        change(&ground, |_| Ok(())).unwrap();
        let on_disk = read_all(&ground).unwrap();
        assert_eq!(on_disk.granted.into_keys().collect::<Vec<_>>(), [id(1)], "c2 is gone");
    }

    #[test]
    fn limits_are_due_until_they_are_written() {
        let is_due = |of: &Ledger| [Extent::Raises, Extent::All].map(|extent| of.is_due(extent));
        let mut ledger = with_min(150 * MB);
        assert_eq!(is_due(&ledger), [true, true]);
        ledger.settle(turn(&ledger), Extent::Raises, false);
        assert_eq!(is_due(&ledger), [false, true]);
        ledger.settle(turn(&ledger), Extent::All, true);
        assert_eq!(is_due(&ledger), [false, false], "refused ones too");
        let refused = turn(&ledger);
        ledger.decide(400 * MB, false);
        assert!(!ledger.is_turn(refused), "the next guarantee is another try");
        ledger.settle(refused, Extent::All, false);
        assert_eq!(is_due(&ledger), [true, true], "limits of an older turn were written");
        ledger.settle(turn(&ledger), Extent::All, false);
        let settled = ledger.clone();
        ledger.decide(400 * MB, false);
        assert_eq!(ledger, settled, "nothing has changed");
        ledger.granted.clear();
        ledger.decide(400 * MB, false);
        assert_eq!(is_due(&ledger), [true, true], "limits are to be removed");
        ledger.settle(turn(&ledger), Extent::Raises, false);
        assert_eq!(ledger, Ledger::default());
    }

    #[test]
    fn memory_of_images_is_no_room_of_containers() {
        let mut ledger = with_min(150 * MB);
        let limit = |of: &Ledger| of.limit_bytes(&id(1), u64::MAX, 0) / MB;
        assert_eq!(limit(&ledger), 250);
        let before = turn(&ledger);
        ledger.decide(Room::new(400 * MB, 100 * MB, 6 * MB), false);
        assert!(!ledger.is_turn(before), "the cgroup of images has a limit now");
        assert_eq!(limit(&ledger), 250, "less than a part is not counted");
        let before = turn(&ledger);
        ledger.decide(Room::new(400 * MB, 100 * MB, 5 * MB), false);
        assert!(ledger.is_turn(before), "and changes nothing");
        ledger.decide(Room::new(400 * MB, 100 * MB, 50 * MB), false);
        assert_eq!(limit(&ledger), 200);
        ledger.decide(Room::new(400 * MB, 100 * MB, 300 * MB), false);
        assert_eq!(limit(&ledger), 150, "no more than is protected");
        assert_eq!(ledger.memory.as_ref().unwrap().parent().images_bytes, 100 * MB);
        assert_eq!(ledger.limit_bytes(&id(2), u64::MAX, 0) / MB, 300, "the holder's own");
    }

    #[test]
    fn each_decision_is_another_turn() {
        let mut ledger = with_min(150 * MB);
        let mut turns = Vec::new();
        for _ in 0..100 {
            turns.push(turn(&ledger));
            ledger.decide(400 * MB, true);
        }
        assert!(turns.is_sorted_by(|a, b| a < b), "{turns:?}");
    }

    #[test]
    fn limit_is_the_own_one_without_a_guarantee() {
        let none = Ledger::default();
        assert_eq!(none.limit_bytes(&id(1), u64::MAX, 0), u64::MAX);
        let ledger = with_min(150 * MB);
        assert_eq!(ledger.limit_bytes(&id(1), u64::MAX, 0), 250 * MB);
        let restored = 300 * MB + 1;
        let limit = ledger.limit_bytes(&id(1), u64::MAX, restored);
        assert_eq!(limit, 300 * MB, "it was larger when it fell asleep");
        let limit = ledger.limit_bytes(&id(1), 200 * MB, restored);
        assert_eq!(limit, 200 * MB, "never above its own");
        assert_eq!(ledger.limit_bytes(&id(2), u64::MAX, 0), 400 * MB);
        let mut ended = ledger;
        ended.granted.clear();
        ended.decide(400 * MB, false);
        assert_eq!(ended.limit_bytes(&id(1), 200 * MB, 0), 200 * MB);
    }
}
