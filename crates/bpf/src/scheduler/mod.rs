//! A scheduler of containers (sched_ext); see `scheduler.bpf.c`.
//!
//! The kernel schedules every task of the host by these programs while a [`Scheduler`] exists. When that is dropped, or
//! its process ends in any way, the kernel returns to its own scheduler.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_kernel::CallError;
use libbpf_rs::Link;

use crate::call::Map;
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

type Result<T, E = BpfError> = std::result::Result<T, E>;

static GROUP: Description = Description {
    name: "scheduler",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/scheduler.o")),
    programs: &[],
    anchor: "dm_dispatch",
    maps: &[RESERVED, SLOTS, BUCKETS, HEAD, END, TIMERS],
    about: HEAD,
};

const RESERVED: &str = "dm_reserved";
const SLOTS: &str = "dm_slots";
const BUCKETS: &str = "dm_buckets";
const HEAD: &str = "dm_head";
const END: &str = "dm_end";
const TIMERS: &str = "dm_timers";

/// LIMIT: reservations at a time, that of the host included. The dispatcher looks at each of them.
const RESERVED_MAX: u32 = 256;
/// LIMIT: CPUs, the most that a kernel is built for.
const CPUS_MAX: u32 = 8192;
/// The slot of the host.
const HOST: u32 = 0;

record! {
    struct Config = "dm_scheduler_config" {
        level: u32,
        cpus: u32,
        parent: [u8; 64],
    }
}

record! {
    struct ReservedRecord = "dm_scheduler_reserved" {
        cgroup: u64,
        reserve_milli: u32,
        weight: u32,
    }
}

record! {
    struct Head = "dm_scheduler_head" {
        slots: u32,
        pad: u32,
    }
}

record! {
    struct EndRecord = "dm_scheduler_end" {
        kind: u32,
        reason: [u8; 128],
    }
}

/// What is reserved to a container, or to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// Thousandths of a CPU.
    pub reserve_milli: u32,
    /// The share of the rest, as `cpu.weight`: 1 to 10,000.
    pub weight: u32,
}

/// The scheduler, while it runs.
#[derive(Debug)]
pub struct Scheduler {
    reserved: Map,
    slots: Map,
    buckets: Map,
    head: Map,
    end: Map,
    /// The kernel ends the timers in a map of which no process has a descriptor.
    _timers: Map,
    _link: Link,
    host: Reservation,
    held: Held,
}

impl Scheduler {
    /// Loads the programs for containers below this cgroup, a path below the root of v2, and has the kernel use them
    /// for all tasks, on CPUs with numbers below `cpus`.
    ///
    /// Errors: `Unsupported` without sched_ext or an operation of it (Linux 6.19); another one if there is such a
    /// scheduler already.
    pub fn load(parent: &str, cpus: u32, host: Reservation) -> Result<Self> {
        let level = parent.split('/').count() as u32 + 1;
        let name = parent.rsplit('/').next().unwrap_or_default().as_bytes();
        let mut config = Config { level, cpus: cpus.min(CPUS_MAX), parent: [0; 64] };
        // The last byte stays zero. LIMIT: of a longer name the first bytes are compared.
        let most = config.parent.len() - 1;
        config.parent.iter_mut().zip(name.iter().take(most)).for_each(|(to, byte)| *to = *byte);
        let (maps, link) = GROUP.load_operations(&config.to_bytes(), |maps| {
            let [reserved, _, _, head, ..] = maps else { return Ok(()) };
            write(reserved, HOST, 0, host)?;
            Ok(head.set(&0u32.to_ne_bytes(), &Head { slots: HOST + 1, pad: 0 }.to_bytes())?)
        })?;
        let [reserved, slots, buckets, head, end, timers] = <[Map; 6]>::try_from(maps)
            .map_err(|_| BpfError::Missing { object: GROUP.name, name: END.into() })?;
        let (_timers, _link, held) = (timers, link, Held::default());
        Ok(Self { reserved, slots, buckets, head, end, _timers, _link, host, held })
    }

    /// Sets what is reserved, in place of what was: to the host, and to containers by the id of their cgroup.
    ///
    /// LIMIT: 255 containers, those with the largest reservations. Others keep the weight of their cgroup. Returns how
    /// many these are.
    pub fn reserve(
        &mut self,
        host: Reservation,
        containers: &BTreeMap<u64, Reservation>,
    ) -> Result<usize> {
        if host != self.host {
            write(&self.reserved, HOST, 0, host)?;
            self.host = host;
        }
        let chosen = largest(containers);
        let changes = self.held.change(&chosen);
        // ORDER: a container is led to no slot before the slot is its own.
        for (cgroup, slot) in &changes.gone {
            self.slots.remove(&cgroup.to_ne_bytes())?;
            write(&self.reserved, *slot, 0, Reservation { reserve_milli: 0, weight: 1 })?;
            self.held.slots.remove(cgroup);
        }
        for (cgroup, slot, reservation) in changes.new {
            if !self.held.slots.contains_key(&cgroup) {
                // Its bucket is full as it is filled for the first time.
                let empty = vec![0; self.buckets.value_bytes()];
                self.buckets.set(&slot.to_ne_bytes(), &empty)?;
            }
            write(&self.reserved, slot, cgroup, reservation)?;
            if let Some(slots) = self.held.grow(slot) {
                self.head.set(&0u32.to_ne_bytes(), &Head { slots, pad: 0 }.to_bytes())?;
            }
            self.slots.set(&cgroup.to_ne_bytes(), &slot.to_ne_bytes())?;
            self.held.slots.insert(cgroup, (slot, reservation));
        }
        Ok(containers.len() - chosen.len())
    }

    /// Why the kernel has ended the scheduler; `None` while it runs.
    pub fn end(&self) -> Result<Option<String>> {
        let end = self.end.get(&0u32.to_ne_bytes())?.unwrap_or_default();
        let end = EndRecord::from_bytes(&end);
        let reason = end.reason.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok((end.kind != 0).then(|| String::from_utf8_lossy(reason).into_owned()))
    }
}

fn write(reserved: &Map, slot: u32, cgroup: u64, it: Reservation) -> Result<(), CallError> {
    let Reservation { reserve_milli, weight } = it;
    reserved.set(&slot.to_ne_bytes(), &ReservedRecord { cgroup, reserve_milli, weight }.to_bytes())
}

/// The largest reservations for which there are slots.
fn largest(containers: &BTreeMap<u64, Reservation>) -> BTreeMap<u64, Reservation> {
    let mut all: Vec<_> = containers.iter().map(|(cgroup, it)| (*cgroup, *it)).collect();
    // ORDER: stable, so that equal reservations keep their slots.
    all.sort_by_key(|(_, it)| std::cmp::Reverse(it.reserve_milli));
    all.truncate(RESERVED_MAX as usize - 1);
    all.into_iter().collect()
}

/// Containers with a slot, by the id of their cgroup.
#[derive(Debug, Default)]
struct Held {
    slots: BTreeMap<u64, (u32, Reservation)>,
    /// The largest slot that was ever in use.
    most: u32,
}

/// What is to be done for other reservations.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    gone: Vec<(u64, u32)>,
    /// New, or in the same slot with other numbers.
    new: Vec<(u64, u32, Reservation)>,
}

impl Held {
    /// The number of slots that the dispatcher looks at from now on, if it changes with this one. The number never
    /// falls, because tasks may wait in a slot that was given up.
    fn grow(&mut self, slot: u32) -> Option<u32> {
        let grows = slot > self.most;
        self.most = self.most.max(slot);
        grows.then_some(slot + 1)
    }

    /// Tasks may wait in a slot that was given up. They run from there, on behalf of the container that they belong to,
    /// so it can be given to another one at once.
    fn change(&self, wanted: &BTreeMap<u64, Reservation>) -> Changes {
        let mut changes = Changes::default();
        let mut taken = BTreeSet::new();
        for (cgroup, (slot, _)) in &self.slots {
            match wanted.contains_key(cgroup) {
                true => drop(taken.insert(*slot)),
                false => changes.gone.push((*cgroup, *slot)),
            }
        }
        let mut free = (HOST + 1..RESERVED_MAX).filter(|slot| !taken.contains(slot));
        for (cgroup, reservation) in wanted {
            let slot = match self.slots.get(cgroup) {
                Some((_, same)) if same == reservation => continue,
                Some((slot, _)) => Some(*slot),
                None => free.next(),
            };
            changes.new.extend(slot.map(|slot| (*cgroup, slot, *reservation)));
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::ErrorKind;

    use crate::record::tests::assert_same;

    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<ReservedRecord>(GROUP.object);
        assert_same::<Head>(GROUP.object);
        assert_same::<EndRecord>(GROUP.object);
    }

    fn reserved(reserve_milli: u32) -> Reservation {
        Reservation { reserve_milli, weight: 100 }
    }

    #[test]
    fn containers_keep_their_slots_and_free_ones_are_given_again() {
        let mut held = Held::default();
        let wanted = |all: &[(u64, u32)]| {
            all.iter()
                .map(|(cgroup, milli)| (*cgroup, reserved(*milli)))
                .collect::<BTreeMap<_, _>>()
        };
        let first = held.change(&wanted(&[(7, 100), (9, 200)]));
        assert_eq!(first.new, [(7, 1, reserved(100)), (9, 2, reserved(200))]);
        held.slots = first.new.into_iter().map(|(cgroup, slot, it)| (cgroup, (slot, it))).collect();
        assert_eq!([held.grow(1), held.grow(2), held.grow(1)], [Some(2), Some(3), None]);
        assert_eq!(held.change(&wanted(&[(7, 100), (9, 200)])), Changes::default());
        let next = held.change(&wanted(&[(8, 300), (9, 250)]));
        assert_eq!(next.gone, [(7, 1)]);
        assert_eq!(next.new, [(8, 1, reserved(300)), (9, 2, reserved(250))]);
    }

    #[test]
    fn largest_reservations_have_the_slots() {
        let all: BTreeMap<u64, Reservation> = (0..300).map(|n| (n, reserved(n as u32))).collect();
        let chosen = largest(&all);
        assert_eq!(chosen.len(), 255);
        assert_eq!(chosen.keys().next(), Some(&45));
    }

    #[test]
    fn root_kernel_runs_the_scheduler_where_it_has_sched_ext() {
        let state = || std::fs::read_to_string("/sys/kernel/sched_ext/state").unwrap_or_default();
        match Scheduler::load("dormouse", 1, reserved(100)) {
            Ok(mut scheduler) => {
                assert_eq!(state().trim(), "enabled");
                assert_eq!(scheduler.reserved.capacity, RESERVED_MAX);
                let containers = [(u64::MAX, reserved(100))].into_iter().collect();
                assert_eq!(scheduler.reserve(reserved(50), &containers).unwrap(), 0);
                assert_eq!(scheduler.reserve(reserved(50), &BTreeMap::new()).unwrap(), 0);
                assert_eq!(scheduler.end().unwrap(), None);
                drop(scheduler);
                assert_ne!(state().trim(), "enabled");
            }
            // A kernel without sched_ext, or an older one.
            Err(error) => {
                let kind = error.kind();
                assert!(matches!(kind, ErrorKind::Unsupported { .. }), "{kind:?}: {error:?}");
                eprintln!("NOT RUN: {error}");
            }
        }
    }
}
