//! Memory on cgroup v1, which has no guarantee: limits for the containers that use more than theirs.
//!
//! All containers together have a *room*, the limit of their parent. The guarantees are a part of it. If the
//! parent reached its limit, the kernel would reclaim from every container alike. So the others are kept below
//! limits that leave the room unfilled:
//!
//! - [`ceiling`]: no container grows into the guarantees of the others. This limit is constant between changes of
//!   the guarantees, and holds without a daemon.
//! - [`decide`]: several containers that grow together fill the room nevertheless. Those with most page cache above
//!   their guarantee lose some of it by a limit, and their limits rise again when there is room.
//!
//! **Only page cache is taken.** No limit is set below the memory that cannot be reclaimed. A container under a limit
//! that has no page cache left gets more, which others with page cache give up. Where no container has any, all are
//! limited to their use and a part of the free room: one that needs more is out of memory itself, and the room of the
//! guarantees stays free. No container is limited below its guarantee.
//!
//! The part that is kept free, the *slack*, is twice what the containers without such a limit grew from one decision
//! to the next. Where two or more grow by page cache so fast that the room would be full within [`AHEAD`] decisions,
//! each is limited to its use and a part of what is free, before anything has to be taken from it: the write of a lower
//! limit returns when the kernel has reclaimed what is above, and meanwhile the others go on. LIMIT: containers that
//! fill the room from one decision to the next do so before they are limited. LIMIT: a container under a limit that
//! grows by more than a 32nd of the room from one decision to the next, and not by page cache, can be out of memory
//! although others have page cache.

use std::collections::BTreeMap;

/// The smallest slack, as a part of the room.
const SLACK_LEAST: u64 = 16;
/// The largest slack, as a part of the room.
const SLACK_MOST: u64 = 4;
/// The part of the room that cannot be guaranteed, and that every container may use.
const UNPROMISED: u64 = 16;
/// The part of the room above its guarantee that no decision takes from a container.
const FLOOR: u64 = 64;
/// What a container under a limit, and without page cache, can use at once, as a part of the room.
const HEADROOM: u64 = 16;
/// Growth from one decision to the next that is fast, as a part of the room.
const FAST: u64 = 64;
/// Decisions within which containers that grow fast must not fill the room.
const AHEAD: u64 = 4;
/// A change of a limit below this part of it is not written. It is less than [`FLOOR`] of the room.
const CHANGE: u64 = 100;

/// The usage of one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading<I> {
    /// The container.
    pub id: I,
    /// Memory in use, page cache included.
    pub used_bytes: u64,
    /// Its guarantee.
    pub min_bytes: u64,
    /// Memory with which it was restored: no limit is below, because it may be arriving.
    pub restored_bytes: u64,
    /// Its ceiling.
    pub ceiling_bytes: u64,
    /// Its limit at present.
    pub limit_bytes: u64,
}

impl<I> Reading<I> {
    /// Whether a decision has limited it.
    fn is_limited(&self) -> bool {
        self.limit_bytes < self.ceiling_bytes
    }

    /// The least limit.
    fn least_bytes(&self, floor: u64) -> u64 {
        self.min_bytes.saturating_add(floor).max(self.restored_bytes)
    }
}

/// A limit to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<I> {
    /// The container.
    pub id: I,
    /// Its new limit.
    pub limit_bytes: u64,
}

/// What is kept from one decision to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State<I: Ord> {
    used_bytes: BTreeMap<I, u64>,
    grows_fast: bool,
}

impl<I: Ord> Default for State<I> {
    fn default() -> Self {
        Self { used_bytes: BTreeMap::new(), grows_fast: false }
    }
}

impl<I: Ord> State<I> {
    /// Returns whether a container that is not limited has grown fast: the next decision is to come soon.
    pub fn grows_fast(&self) -> bool {
        self.grows_fast
    }

    /// What a container has grown by since. One that was not there has grown by all that it uses; at the first decision
    /// none has grown.
    fn growth(&self, it: &Reading<I>) -> u64 {
        match self.used_bytes.get(&it.id) {
            Some(before) => it.used_bytes.saturating_sub(*before),
            None if self.used_bytes.is_empty() => 0,
            None => it.used_bytes,
        }
    }

    fn is_fast(&self, it: &Reading<I>, room_bytes: u64) -> bool {
        !it.is_limited() && self.growth(it) >= room_bytes / FAST
    }
}

/// How much of the room can be guaranteed.
pub fn promised_max(room_bytes: u64) -> u64 {
    room_bytes - room_bytes / UNPROMISED
}

/// The limit of a container with the guarantee `min_bytes`, of which all have `all_min_bytes` together.
pub fn ceiling(room_bytes: u64, all_min_bytes: u64, min_bytes: u64, max_bytes: Option<u64>) -> u64 {
    let others = all_min_bytes.saturating_sub(min_bytes);
    // The settings may have changed since the guarantees were admitted.
    let rest = room_bytes.saturating_sub(others).max(room_bytes / UNPROMISED);
    rest.min(max_bytes.unwrap_or(u64::MAX))
}

/// The level to which the largest of some amounts are lowered so that `cut` is taken in all.
fn level(mut amounts: Vec<u64>, cut: u64) -> u64 {
    amounts.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum: u64 = 0;
    for (number, amount) in (1..).zip(&amounts) {
        sum = sum.saturating_add(*amount);
        let next = amounts.get(number as usize).copied().unwrap_or(0);
        // The first `number` are lowered to the next one: is that enough?
        if sum.saturating_sub(next.saturating_mul(number)) >= cut {
            return sum.saturating_sub(cut) / number;
        }
    }
    0
}

/// Decides the limits of all containers. `cache` returns the page cache of a container that can be reclaimed, and is
/// called only while memory is short.
pub fn decide<I: Clone + Ord>(
    room_bytes: u64,
    readings: &[Reading<I>],
    was: &State<I>,
    mut cache: impl FnMut(&I) -> u64,
) -> (State<I>, Vec<Setting<I>>) {
    let sum =
        |of: &dyn Fn(&Reading<I>) -> u64| readings.iter().map(of).fold(0, u64::saturating_add);
    let state = State {
        used_bytes: readings.iter().map(|it| (it.id.clone(), it.used_bytes)).collect(),
        grows_fast: readings.iter().any(|it| was.is_fast(it, room_bytes)),
    };
    // Not that of a new container: what a wake has restored does not grow on.
    let growth = |it: &Reading<I>| match was.used_bytes.get(&it.id) {
        Some(before) => it.used_bytes.saturating_sub(*before),
        None => 0,
    };
    let grown = sum(&|it| if it.is_limited() { 0 } else { growth(it) });
    let slack = grown.saturating_mul(2).clamp(room_bytes / SLACK_LEAST, room_bytes / SLACK_MOST);
    // A guarantee that is not used may be used at once.
    let promised = sum(&|it| it.used_bytes.max(it.min_bytes));
    let taken = promised.saturating_add(slack);
    let floor = room_bytes / FLOOR;
    let room = Room {
        bytes: room_bytes,
        missing: taken.saturating_sub(room_bytes),
        spare: room_bytes.saturating_sub(taken),
        free: room_bytes.saturating_sub(promised).saturating_sub(floor),
        left: room_bytes.saturating_sub(promised),
        growing: readings.iter().filter(|it| growth(it) > 0).count().max(1) as u64,
    };
    let bounds = room.bound(readings, was, &mut cache);
    let grown = room.grow(readings);
    let is_tight = |(it, wanted): (&Reading<I>, &Option<u64>)| {
        wanted.is_some_and(|wanted| wanted.saturating_sub(it.used_bytes) < room.headroom())
    };
    let wanted = match room.missing > 0 || readings.iter().zip(&grown).any(is_tight) {
        true => room.shrink(readings, cache).into_iter().zip(grown).map(|(a, b)| a.or(b)).collect(),
        false => grown,
    };
    let mut settings: Vec<Setting<I>> = readings
        .iter()
        .zip(wanted)
        .zip(bounds)
        .map(|((it, wanted), bound)| (it, wanted.into_iter().chain(bound).min()))
        .filter_map(|(it, wanted)| Some((it, wanted?.min(it.ceiling_bytes.max(it.limit_bytes)))))
        .filter(|(it, wanted)| {
            let change = wanted.abs_diff(it.limit_bytes);
            change > 0 && (*wanted == it.ceiling_bytes || change > it.limit_bytes / CHANGE)
        })
        .map(|(it, limit_bytes)| Setting { id: it.id.clone(), limit_bytes })
        .collect();
    // The smaller limits first: what they free is there before others may grow.
    settings.sort_by_key(|it| it.limit_bytes);
    (state, settings)
}

/// The room at one decision, in bytes.
struct Room {
    /// The memory of all containers together.
    bytes: u64,
    /// What of the slack is in use.
    missing: u64,
    /// What is free beside the slack.
    spare: u64,
    /// What is neither in use nor guaranteed, less a part that is never given away.
    free: u64,
    /// What is neither in use nor guaranteed.
    left: u64,
    /// Number of containers that have grown since the last decision.
    growing: u64,
}

impl Room {
    fn headroom(&self) -> u64 {
        self.bytes / HEADROOM
    }

    /// Limits for those that grow fast by page cache, if there are several and they would soon fill the room. One alone
    /// has its ceiling.
    fn bound<I: Ord>(
        &self,
        readings: &[Reading<I>],
        was: &State<I>,
        mut cache: impl FnMut(&I) -> u64,
    ) -> Vec<Option<u64>> {
        let is_fast = |it: &&Reading<I>| was.is_fast(it, self.bytes);
        let all = readings.iter().filter(is_fast).map(|it| was.growth(it));
        let all = all.fold(0, u64::saturating_add);
        let none = || readings.iter().map(|_| None).collect();
        if all.saturating_mul(AHEAD) < self.left {
            return none();
        }
        let mut by_cache = |it: &&Reading<I>| is_fast(it) && cache(&it.id) >= was.growth(it) / 2;
        let bounded: Vec<bool> = readings.iter().map(|it| by_cache(&it)).collect();
        let number = bounded.iter().filter(|is_it| **is_it).count() as u64;
        if number < 2 {
            return none();
        }
        let part = self.left.saturating_sub(self.bytes / SLACK_LEAST) / number;
        let least = |it: &Reading<I>| it.least_bytes(self.bytes / FLOOR);
        let limit = |it: &Reading<I>| it.used_bytes.saturating_add(part).max(least(it));
        readings.iter().zip(bounded).map(|(it, is_it)| is_it.then(|| limit(it))).collect()
    }

    /// The new limits of those that are limited: half of the spare memory is for all of them. The next decision
    /// corrects it.
    fn grow<I>(&self, readings: &[Reading<I>]) -> Vec<Option<u64>> {
        if self.missing > 0 {
            return readings.iter().map(|_| None).collect();
        }
        let limited = readings.iter().filter(|it| it.is_limited()).count().max(1) as u64;
        let part = self.spare / 2 / limited;
        let limit = |it: &Reading<I>| it.used_bytes.saturating_add(part).max(it.limit_bytes);
        readings.iter().map(|it| it.is_limited().then(|| limit(it))).collect()
    }

    /// The new limits of those that have much page cache, which are lowered, and of those that have none left.
    fn shrink<I>(
        &self,
        readings: &[Reading<I>],
        mut cache: impl FnMut(&I) -> u64,
    ) -> Vec<Option<u64>> {
        let floor = self.bytes / FLOOR;
        let reclaimable: Vec<u64> = readings
            .iter()
            .map(|it| match it.used_bytes.saturating_sub(it.least_bytes(floor)) {
                0 => 0,
                above => above.min(cache(&it.id).saturating_sub(floor)),
            })
            .collect();
        let all = reclaimable.iter().fold(self.spare, |sum: u64, bytes| sum.saturating_add(*bytes));
        if all < self.missing {
            // What is free is for those that grow.
            let part = self.free / self.growing;
            let limit = |(it, cut): (&Reading<I>, &u64)| {
                let kept = it.used_bytes - cut;
                Some(kept.saturating_add(part).max(it.least_bytes(floor)))
            };
            return readings.iter().zip(&reclaimable).map(limit).collect();
        }
        let headroom = self.headroom();
        let is_starved = |it: &Reading<I>, own: u64| {
            let left = it.limit_bytes.saturating_sub(it.used_bytes).saturating_add(own);
            it.is_limited() && own < floor && left < headroom
        };
        let starved = readings.iter().zip(&reclaimable).filter(|(it, own)| is_starved(it, **own));
        let starved = starved.count() as u64;
        let more = headroom.min((all - self.missing) / starved.max(1));
        let cut = self.missing.saturating_add(more * starved).saturating_sub(self.spare);
        let level = level(reclaimable.clone(), cut);
        let limit = |(it, own): (&Reading<I>, &u64)| match *own {
            own if own > level => Some(it.used_bytes - (own - level)),
            own if is_starved(it, own) => {
                Some(it.used_bytes.saturating_add(more).max(it.limit_bytes))
            }
            _ => None,
        };
        readings.iter().zip(&reclaimable).map(limit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;
    const ROOM: u64 = 400 * MB;

    fn reading(id: u8, used: u64, min: u64, all_min: u64) -> Reading<u8> {
        let ceiling_bytes = ceiling(ROOM, all_min * MB, min * MB, None);
        Reading {
            id,
            used_bytes: used * MB,
            min_bytes: min * MB,
            restored_bytes: 0,
            ceiling_bytes,
            limit_bytes: ceiling_bytes,
        }
    }

    /// A container of the simulation: what it wants of page cache and of other memory, and its guarantee, in MB.
    #[derive(Clone, Copy, Default)]
    struct Wish {
        cache: u64,
        other: u64,
        min: u64,
    }

    /// The containers of the simulation. From one decision to the next page cache grows by 20 MB, and other memory by
    /// 10, as a kernel lets them.
    struct Simulated {
        all: Vec<(Reading<u8>, Wish)>,
        cache: BTreeMap<u8, u64>,
        state: State<u8>,
        /// The most that all used together.
        most: u64,
        /// Containers that were out of memory.
        killed: Vec<u8>,
    }

    impl Simulated {
        fn of(wishes: &[Wish]) -> Self {
            let all_min = wishes.iter().map(|wish| wish.min).sum();
            let one = |(id, wish): (u8, &Wish)| (reading(id, 0, wish.min, all_min), *wish);
            let all: Vec<_> = (0..).zip(wishes).map(one).collect();
            let cache = all.iter().map(|(it, _)| (it.id, 0)).collect();
            Self { all, cache, state: State::default(), most: 0, killed: Vec::new() }
        }

        fn run(mut self, ticks: usize) -> Self {
            for _ in 0..ticks {
                for (it, wish) in &mut self.all {
                    let cache = self.cache.get_mut(&it.id).unwrap();
                    let other = it.used_bytes - *cache;
                    let grown = (other + 10 * MB).min(wish.other * MB).max(other);
                    if grown > it.limit_bytes {
                        self.killed.push(it.id);
                    }
                    let other = grown.min(it.limit_bytes);
                    *cache = (*cache + 20 * MB).min(wish.cache * MB).min(it.limit_bytes - other);
                    it.used_bytes = other + *cache;
                }
                let readings: Vec<_> = self.all.iter().map(|(it, _)| *it).collect();
                self.most = self.most.max(readings.iter().map(|it| it.used_bytes).sum());
                let (next, settings) = decide(ROOM, &readings, &self.state, |id| self.cache[id]);
                self.state = next;
                for Setting { id, limit_bytes } in settings {
                    let (it, _) = &mut self.all[usize::from(id)];
                    let cache = self.cache.get_mut(&id).unwrap();
                    let over = it.used_bytes.saturating_sub(limit_bytes);
                    assert!(over <= *cache, "{id}: only page cache is taken");
                    *cache -= over;
                    it.used_bytes -= over;
                    it.limit_bytes = limit_bytes;
                    assert!(limit_bytes >= it.min_bytes, "{id}: not below its guarantee");
                }
            }
            self
        }

        fn used(&self) -> Vec<u64> {
            self.all.iter().map(|(it, _)| it.used_bytes / MB).collect()
        }
    }

    fn cached(cache: u64, min: u64) -> Wish {
        Wish { cache, min, other: 0 }
    }

    /// Decides for containers whose memory is page cache.
    fn decided(all: &[Reading<u8>], was: &State<u8>) -> (State<u8>, Vec<Setting<u8>>) {
        decide(ROOM, all, was, |id| all[usize::from(*id)].used_bytes)
    }

    #[test]
    fn ceiling_leaves_the_guarantees_of_others() {
        assert_eq!(ceiling(400, 250, 150, None), 300);
        assert_eq!(ceiling(400, 250, 0, None), 150);
        assert_eq!(ceiling(400, 250, 0, Some(100)), 100);
        assert_eq!(ceiling(100, 250, 0, None), 6, "never nothing");
        assert_eq!(promised_max(400), 375);
    }

    #[test]
    fn guarantee_is_kept_beside_several_that_grow() {
        let wishes = [cached(150, 150), cached(1000, 0), cached(1000, 0), cached(1000, 0)];
        let end = Simulated::of(&wishes).run(200);
        let used = end.used();
        assert_eq!(used[0], 150, "{used:?}");
        assert!(end.most <= ROOM, "the room was never full: {}", end.most);
        assert!(used.iter().sum::<u64>() > 350, "the room is used: {used:?}");
        let (most, least) = (used[1..].iter().max(), used[1..].iter().min());
        assert!(most.unwrap() < &(least.unwrap() * 2), "{used:?}");
    }

    #[test]
    fn fast_readers_are_limited_before_they_fill_the_room() {
        // As two that read 2 GB/s into a room of 400 MB: 40 MB each from one decision to the next.
        let all_min = 150;
        let mut all = vec![reading(0, 150, 150, all_min), reading(1, 20, 0, all_min)];
        all.push(reading(2, 0, 0, all_min));
        let (was, settings) = decided(&all, &State::default());
        assert!(settings.is_empty(), "{settings:?}");
        (all[1].used_bytes, all[2].used_bytes) = (60 * MB, 40 * MB);
        let (_, settings) = decided(&all, &was);
        let limits: BTreeMap<u8, u64> = settings.iter().map(|it| (it.id, it.limit_bytes)).collect();
        assert_eq!(limits.keys().copied().collect::<Vec<_>>(), [1, 2], "{settings:?}");
        let sum: u64 = limits.values().sum();
        assert!(limits[&1] > 60 * MB && limits[&2] > 40 * MB, "nothing is taken: {settings:?}");
        assert_eq!(sum + 150 * MB, ROOM - ROOM / SLACK_LEAST, "{settings:?}");
        // One alone, or memory that is not page cache, is not limited so early.
        let (_, settings) = decide(ROOM, &all, &was, |_| 0);
        assert!(settings.is_empty(), "{settings:?}");
        all[1].used_bytes = 20 * MB;
        let (_, settings) = decided(&all, &was);
        assert!(settings.is_empty(), "{settings:?}");
    }

    #[test]
    fn other_memory_grows_at_the_expense_of_page_cache() {
        // The second had page cache, which was taken, before it needs other memory.
        let wishes = [cached(100, 100), cached(1000, 0), cached(1000, 0)];
        let mut end = Simulated::of(&wishes).run(100);
        assert!(end.all[1].0.is_limited(), "{:?}", end.used());
        end.all[1].1 = Wish { other: 200, ..Wish::default() };
        let end = end.run(100);
        assert!(end.killed.is_empty(), "{:?}", end.killed);
        let used = end.used();
        assert!(used[0] == 100 && used[1] >= 200 && end.most <= ROOM, "{used:?}");
    }

    #[test]
    fn container_without_room_is_out_of_memory_itself() {
        let grows = Wish { other: 1000, ..Wish::default() };
        let wishes = [Wish { other: 150, min: 150, cache: 0 }, grows, grows];
        let end = Simulated::of(&wishes).run(100);
        let used = end.used();
        assert!(used[0] == 150 && end.most <= ROOM, "{used:?}");
        assert!(!end.killed.contains(&0) && used.iter().sum::<u64>() > 380, "{used:?}");
    }

    #[test]
    fn restored_memory_arrives_although_there_is_no_room() {
        let mut all = vec![reading(0, 0, 150, 150), reading(1, 240, 0, 150)];
        all[1].restored_bytes = 300 * MB;
        (all[1].ceiling_bytes, all[1].limit_bytes) = (300 * MB, 300 * MB);
        let before = State { used_bytes: [(1, 200 * MB)].into(), grows_fast: false };
        let (_, settings) = decided(&all, &before);
        assert!(settings.iter().all(|it| it.id != 1), "{settings:?}");
        all[1].restored_bytes = 0;
        let (_, settings) = decided(&all, &before);
        assert!(settings.iter().any(|it| it.id == 1), "{settings:?}");
    }

    #[test]
    fn unused_guarantee_can_be_used_at_once() {
        let used = Simulated::of(&[cached(0, 150), cached(1000, 0)]).run(100).used();
        assert!((200..=250).contains(&used[1]), "{used:?}");
    }

    #[test]
    fn limit_grows_again_when_memory_becomes_free() {
        let mut all =
            vec![reading(0, 150, 150, 150), reading(1, 130, 0, 150), reading(2, 120, 0, 150)];
        let (state, settings) = decided(&all, &State::default());
        assert_eq!(settings.iter().map(|it| it.id).collect::<Vec<_>>(), [1, 2], "{settings:?}");
        for Setting { id, limit_bytes } in settings {
            let it = &mut all[usize::from(id)];
            (it.limit_bytes, it.used_bytes) = (limit_bytes, limit_bytes);
        }
        assert_eq!(all.iter().map(|it| it.used_bytes).sum::<u64>(), ROOM - ROOM / SLACK_LEAST);
        let before = all[1].limit_bytes;
        all[2].used_bytes = 20 * MB;
        let (_, settings) = decided(&all, &state);
        let grown = settings.iter().find(|it| it.id == 1).expect("a limit").limit_bytes;
        assert!((before + 15 * MB..before + 50 * MB).contains(&grown), "{grown}");
    }

    #[test]
    fn largest_are_lowered_to_one_level() {
        assert_eq!(level(vec![10, 50, 30], 20), 30);
        assert_eq!(level(vec![10, 50, 30], 30), 25);
        assert_eq!(level(vec![10, 50, 30], 0), 50);
        assert_eq!(level(vec![10, 50, 30], 1000), 0);
        assert_eq!(level(Vec::new(), 10), 0);
    }

    #[test]
    fn nothing_is_written_while_there_is_room() {
        let all = vec![reading(0, 100, 150, 150), reading(1, 50, 0, 150)];
        assert!(decided(&all, &State::default()).1.is_empty());
    }
}
