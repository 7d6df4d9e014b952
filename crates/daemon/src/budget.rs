//! The memory budget: the awake containers, how much memory they take, and which of them give
//! memory when others need it ([`choice`]).
//!
//! Pure computation: this module reads no file and starts no process.
//!
//! **Popularity** is the rate at which a container is used ([`crate::popularity`]).
//!
//! LIMIT: if every container that may sleep already does, or cannot sleep now, one more is admitted
//! although it does not fit; the next one waits until that one sleeps.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use dormouse_kernel::cgroup::InUse;
use dormouse_model::ContainerId;

use crate::popularity::{faded, use_once};

mod choice;

pub(crate) use choice::{Choice, Need};

/// Popularity below which a record is dropped: one use in some hours.
const POPULARITY_MIN: f64 = 1e-4;
/// Time for which an active container stays awake at least.
const TURN: Duration = Duration::from_secs(1);
/// Waiting time after which a waiter takes precedence over recently woken containers.
pub(crate) const PATIENCE: Duration = Duration::from_millis(250);
/// Time before the first retry after a container could not sleep.
const LEFT_ALONE: Duration = Duration::from_millis(100);
/// Time before another attempt to push out pages that did not go.
const KEEPS_PAGES: Duration = Duration::from_secs(60);
/// LIMIT: how often [`LEFT_ALONE`] doubles.
const DOUBLINGS_MAX: u32 = 9;
/// Number of refusals in a row after which no waiter waits for that container.
const REFUSALS: u32 = 5;
/// Kernel memory that a container needs in addition to the pages of its checkpoint, in bytes.
const KERNEL_BYTES: u64 = 512 << 10;

/// Readings and state of a container that is awake.
#[derive(Debug)]
struct Awake {
    bytes: u64,
    /// The part of `bytes` that could be in swap.
    for_swap_bytes: u64,
    /// Bytes that were pushed out and may still be in swap.
    swapped_bytes: u64,
    /// No attempt to push its pages out before this time, because the last one failed.
    keeps_pages_until: Instant,
    /// Memory reserved for it when it was admitted.
    reserved_bytes: u64,
    used_ns: u64,
    since: Instant,
    looked: Instant,
    /// Time of the first reading with the same CPU time as the last one.
    still_since: Instant,
    popularity: f64,
    may_sleep: bool,
    step: Step,
    /// Bytes that it is to give while it is leaving.
    leaving_bytes: u64,
    refusals: u32,
    left_alone_until: Instant,
}

/// Progress of a container through its time awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Waking,
    Here,
    Leaving,
}

/// Record of a container that sleeps.
#[derive(Debug)]
struct Past {
    bytes: u64,
    popularity: f64,
    left: Instant,
}

/// The budget.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: u64,
    /// Free space in swap.
    swap_bytes: u64,
    awake: HashMap<ContainerId, Awake>,
    past: HashMap<ContainerId, Past>,
}

impl Awake {
    fn is_idle(&self) -> bool {
        self.still_since < self.looked
    }
}

impl Budget {
    /// Returns a budget of so many bytes.
    pub(crate) fn of(bytes: u64) -> Self {
        Self { bytes, swap_bytes: 0, awake: HashMap::new(), past: HashMap::new() }
    }

    /// Sets the free space of swap.
    pub(crate) fn has_swap(&mut self, bytes: u64) {
        self.swap_bytes = bytes;
    }

    /// Memory of the containers that are awake or admitted.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.awake.values().map(|awake| awake.bytes).sum()
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.bytes
    }

    /// Part of the budget that is kept free so that wakes do not have to wait.
    fn reserve_bytes(&self) -> u64 {
        self.bytes / 16
    }

    /// Returns whether this amount nearly fills the budget.
    pub(crate) fn is_tight_with(&self, bytes: u64) -> bool {
        bytes > self.bytes / 4 * 3
    }

    /// Returns whether the container is awake or admitted, so that its memory is counted.
    pub(crate) fn knows(&self, id: &ContainerId) -> bool {
        self.awake.contains_key(id)
    }

    /// Returns whether the container is being suspended.
    pub(crate) fn is_leaving(&self, id: &ContainerId) -> bool {
        self.awake.get(id).is_some_and(|awake| awake.step == Step::Leaving)
    }

    /// Returns the memory that a wake needs; `checkpoint_bytes` is called if there is no record of
    /// it.
    pub(crate) fn needs(&self, id: &ContainerId, checkpoint_bytes: impl FnOnce() -> u64) -> u64 {
        match (self.awake.get(id), self.past.get(id)) {
            (Some(_), _) => 0,
            (None, Some(past)) => past.bytes,
            (None, None) => checkpoint_bytes() + KERNEL_BYTES,
        }
    }

    /// Returns whether so much more fits, or no container can ever make budget for it.
    pub(crate) fn has_room(&self, now: Instant, bytes: u64) -> bool {
        let fits = self.taken_bytes().saturating_add(bytes) <= self.bytes;
        let may_yet = |awake: &Awake| match awake.step {
            Step::Waking | Step::Leaving => true,
            Step::Here => {
                let is_tried = awake.left_alone_until <= now || awake.refusals < REFUSALS;
                awake.may_sleep && is_tried
            }
        };
        fits || !self.awake.values().any(may_yet)
    }

    /// Records a container that was admitted or found awake.
    fn enter(&mut self, now: Instant, id: ContainerId, step: Step, may_sleep: bool, bytes: u64) {
        let past = self.past.remove(&id);
        let popularity = past.map_or(0.0, |past| faded(past.popularity, now - past.left));
        let awake = Awake {
            bytes,
            for_swap_bytes: 0,
            swapped_bytes: 0,
            keeps_pages_until: now,
            reserved_bytes: bytes,
            used_ns: 0,
            since: now,
            looked: now,
            still_since: now,
            popularity: popularity + use_once(),
            may_sleep,
            step,
            leaving_bytes: 0,
            refusals: 0,
            left_alone_until: now,
        };
        self.awake.insert(id, awake);
    }

    /// Admits a wake. A container still recorded as awake has been suspended since the last
    /// reading.
    pub(crate) fn admit(&mut self, now: Instant, id: ContainerId, may_sleep: bool, bytes: u64) {
        match self.awake.get_mut(&id) {
            None => self.enter(now, id, Step::Waking, may_sleep, bytes),
            Some(awake) => {
                (awake.step, awake.since, awake.reserved_bytes) = (Step::Waking, now, awake.bytes);
            }
        }
    }

    /// Records that an admitted wake has completed or failed; the next reading decides which.
    pub(crate) fn arrived(&mut self, now: Instant, id: &ContainerId) {
        if let Some(awake) = self.awake.get_mut(id).filter(|awake| awake.step == Step::Waking) {
            (awake.step, awake.since) = (Step::Here, now);
        }
    }

    /// Records a reading of an awake container; `may_sleep` is called if the container is new.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        id: &ContainerId,
        used_ns: u64,
        InUse { bytes, for_swap_bytes }: InUse,
        may_sleep: impl FnOnce() -> bool,
    ) {
        let Some(awake) = self.awake.get_mut(id) else {
            self.enter(now, id.clone(), Step::Here, may_sleep(), bytes);
            if let Some(awake) = self.awake.get_mut(id) {
                (awake.used_ns, awake.for_swap_bytes) = (used_ns, for_swap_bytes);
            }
            return;
        };
        // Pages read back from swap are in memory again; the rest of the growth is new.
        let more = for_swap_bytes.saturating_sub(awake.for_swap_bytes);
        awake.swapped_bytes = awake.swapped_bytes.saturating_sub(more);
        awake.for_swap_bytes = for_swap_bytes;
        awake.popularity = faded(awake.popularity, now - awake.looked);
        awake.looked = now;
        if awake.used_ns != used_ns {
            (awake.used_ns, awake.still_since) = (used_ns, now);
            awake.popularity += use_once();
        }
        // The memory of a woken container returns page by page, as it is touched.
        let has_begun = awake.step == Step::Here && now - awake.since >= TURN;
        awake.bytes = if has_begun { bytes } else { bytes.max(awake.reserved_bytes) };
    }

    /// Removes all containers but these; the others have ended or sleep.
    pub(crate) fn only(&mut self, now: Instant, is_there: impl Fn(&ContainerId) -> bool) {
        let gone = self.awake.iter().filter(|(id, it)| it.step != Step::Waking && !is_there(id));
        let gone: Vec<ContainerId> = gone.map(|(id, _)| id.clone()).collect();
        gone.into_iter().for_each(|id| self.left(now, id));
        self.past.retain(|_, past| faded(past.popularity, now - past.left) >= POPULARITY_MIN);
    }

    /// Records that a container sleeps or has ended.
    pub(crate) fn left(&mut self, now: Instant, id: ContainerId) {
        if let Some(awake) = self.awake.remove(&id) {
            let popularity = faded(awake.popularity, now - awake.looked);
            // Swapped pages return as well when the container is restored.
            let bytes = awake.bytes + awake.swapped_bytes;
            self.past.insert(id, Past { bytes, popularity, left: now });
        }
    }

    /// Records that so many bytes of its pages were pushed out.
    pub(crate) fn pushed_out(&mut self, now: Instant, id: &ContainerId, bytes: u64) {
        let Some(awake) = self.awake.get_mut(id) else { return };
        awake.step = Step::Here;
        // The container may use no swap, or may have pages that swap does not take.
        if bytes < awake.for_swap_bytes / 4 {
            awake.keeps_pages_until = now + KEEPS_PAGES;
        }
        awake.for_swap_bytes = awake.for_swap_bytes.saturating_sub(bytes);
        awake.bytes = awake.bytes.saturating_sub(bytes);
        awake.reserved_bytes = awake.reserved_bytes.min(awake.bytes);
        awake.swapped_bytes += bytes;
        self.swap_bytes = self.swap_bytes.saturating_sub(bytes);
    }

    /// Records that a container is being suspended.
    pub(crate) fn leaves(&mut self, id: &ContainerId) {
        if let Some(awake) = self.awake.get_mut(id).filter(|awake| awake.step != Step::Leaving) {
            (awake.step, awake.leaving_bytes) = (Step::Leaving, awake.bytes);
        }
    }

    /// Records that a container was not suspended: it has run, or cannot sleep.
    pub(crate) fn stays(&mut self, now: Instant, id: &ContainerId, is_refused: bool) {
        let Some(awake) = self.awake.get_mut(id) else { return };
        (awake.step, awake.still_since) = (Step::Here, awake.looked);
        if is_refused {
            let alone = LEFT_ALONE * (1 << awake.refusals.min(DOUBLINGS_MAX));
            awake.left_alone_until = now + alone;
            awake.refusals += 1;
        }
    }

    /// Records a changed configuration.
    pub(crate) fn may_sleep(&mut self, id: &ContainerId, may_sleep: bool) {
        if let Some(awake) = self.awake.get_mut(id) {
            awake.may_sleep = may_sleep;
        }
    }
}

#[cfg(test)]
mod tests {
    use dormouse_container::Request;

    use super::choice::{SETTLES, SLEEP};
    use super::*;

    const MB: u64 = 1 << 20;

    fn id(n: u8) -> ContainerId {
        ContainerId::from_bytes([n; 16])
    }

    fn s(n: f64) -> Duration {
        Duration::from_secs_f64(n)
    }

    /// Memory that consists of pages alone.
    fn of(bytes: u64) -> InUse {
        InUse { bytes, for_swap_bytes: bytes }
    }

    /// Containers of 10 MB, read ten times a second for ten seconds. Number n has run at every
    /// reading whose number it divides, for the last time some readings ago.
    fn used_by_rank(budget: u64, count: u8) -> (Budget, Instant) {
        let (mut budget, mut now) = (Budget::of(budget), Instant::now());
        for look in 1..=100u64 {
            now += s(0.1);
            for n in 1..=count {
                let used = look.min(98) / u64::from(n) + 1;
                budget.look(now, &id(n), used, of(10 * MB), || true);
            }
        }
        (budget, now)
    }

    fn ids(chosen: &[Choice]) -> Vec<ContainerId> {
        chosen.iter().map(|choice| choice.id.clone()).collect()
    }

    #[test]
    fn least_popular_containers_sleep_first_and_no_more_than_needed() {
        let (mut budget, now) = used_by_rank(40 * MB, 4);
        assert!(budget.has_room(now, 0) && !budget.has_room(now, MB));
        assert_eq!(ids(&budget.choose(now, Need::Now, 5 * MB, 8)), [id(4)]);
        assert!(budget.is_leaving(&id(4)));
        assert_eq!(ids(&budget.choose(now, Need::Now, 5 * MB, 8)), [], "that is enough");
        assert_eq!(ids(&budget.choose(now, Need::Now, 30 * MB, 8)), [id(3), id(2)]);
        budget.left(now, id(4));
        assert_eq!(budget.needs(&id(4), || 0), 10 * MB, "what it had is remembered");
        assert!(budget.has_room(now, 10 * MB));
        assert_eq!(budget.needs(&id(9), || MB), MB + KERNEL_BYTES);
    }

    #[test]
    fn of_equally_popular_containers_the_larger_one_sleeps() {
        let (mut budget, mut now) = (Budget::of(100 * MB), Instant::now());
        for look in 0..20 {
            now += s(0.1);
            budget.look(now, &id(1), look.min(10), of(MB), || true);
            budget.look(now, &id(2), look.min(10), of(50 * MB), || true);
        }
        assert_eq!(ids(&budget.choose(now, Need::Now, 60 * MB, 1)), [id(2)]);
    }

    #[test]
    fn memory_is_freed_ahead_from_idle_containers_only() {
        let (mut budget, now) = used_by_rank(40 * MB, 4);
        assert_eq!(
            ids(&budget.choose(now, Need::Ahead, 0, 8)),
            [id(4)],
            "a sixteenth is kept free"
        );
        let mut budget = Budget::of(10 * MB);
        budget.look(now, &id(1), 1, of(10 * MB), || true);
        budget.look(now + s(5.0), &id(1), 2, of(10 * MB), || true);
        assert_eq!(ids(&budget.choose(now + s(5.0), Need::Now, 5 * MB, 8)), [], "it is at work");
        let chosen = budget.choose(now + s(5.0), Need::Urgent, 5 * MB, 8);
        assert_eq!(ids(&chosen), [id(1)]);
        assert!(chosen[0].idle.is_none(), "and sleeps all the same");
    }

    #[test]
    fn recently_woken_container_keeps_its_turn() {
        let (mut budget, now) = (Budget::of(10 * MB), Instant::now());
        budget.admit(now, id(1), true, 10 * MB);
        assert!(!budget.has_room(now, MB));
        assert_eq!(ids(&budget.choose(now + s(9.0), Need::Urgent, MB, 8)), [], "it is on its way");
        budget.arrived(now, &id(1));
        budget.look(now + SETTLES / 4, &id(1), 1, of(MB), || true);
        assert!(!budget.has_room(now, MB), "what it had comes back as it is touched");
        budget.look(now + SETTLES / 2, &id(1), 1, of(MB), || true);
        assert_eq!(ids(&budget.choose(now + SETTLES / 2, Need::Now, 10 * MB, 8)), []);
        assert_eq!(ids(&budget.choose(now + SETTLES, Need::Now, 10 * MB, 8)), [id(1)]);
        budget.stays(now + s(0.3), &id(1), false);
        budget.look(now + s(0.4), &id(1), 2, of(MB), || true);
        assert_eq!(ids(&budget.choose(now + s(0.4), Need::Urgent, 10 * MB, 8)), [], "it works");
        assert_eq!(
            ids(&budget.choose(now + s(1.1), Need::Urgent, 10 * MB, 8)),
            [id(1)],
            "it had it"
        );
    }

    #[test]
    fn wake_is_admitted_over_budget_if_no_container_may_sleep() {
        let (mut budget, now) = (Budget::of(10 * MB), Instant::now());
        budget.look(now, &id(1), 1, of(20 * MB), || false);
        assert!(budget.has_room(now, MB), "no container will make room");
        budget.admit(now, id(2), true, MB);
        assert!(!budget.has_room(now, MB), "the next waits for that one");
        budget.arrived(now, &id(2));
        assert_eq!(ids(&budget.choose(now + s(2.0), Need::Urgent, MB, 8)), [id(2)]);
        for _ in 0..REFUSALS {
            assert!(!budget.has_room(now + s(2.0), MB), "it may yet");
            budget.stays(now + s(2.0), &id(2), true);
        }
        assert!(budget.has_room(now + s(2.0), MB), "it cannot sleep now");
        assert!(!budget.has_room(now + s(4.0), MB), "it is tried again");
    }

    #[test]
    fn removed_container_takes_no_memory_and_popularity_fades() {
        let (mut budget, now) = used_by_rank(40 * MB, 2);
        budget.only(now, |one| *one == id(1));
        assert_eq!(budget.taken_bytes(), 10 * MB);
        assert!(budget.past.contains_key(&id(2)));
        budget.only(now + s(3600.0), |one| *one == id(1));
        assert!(budget.past.is_empty());
        // A container that is awake but unused has almost no popularity after a while.
        budget.look(now + s(600.0), &id(1), 99, of(10 * MB), || true);
        assert!(budget.awake[&id(1)].popularity < POPULARITY_MIN + use_once());
    }

    #[test]
    fn pages_of_idle_containers_go_to_swap_before_any_container_sleeps() {
        let (mut budget, now) = used_by_rank(40 * MB, 4);
        budget.has_swap(15 * MB);
        let asked = |chosen: &[Choice]| -> Vec<(ContainerId, Request)> {
            chosen.iter().map(|choice| (choice.id.clone(), choice.asked)).collect()
        };
        assert_eq!(asked(&budget.choose(now, Need::Now, MB, 8)), [(id(4), Request::PagesOut)]);
        assert_eq!(asked(&budget.choose(now, Need::Now, 9 * MB, 8)), [], "that is enough");
        budget.pushed_out(now, &id(4), 9 * MB);
        assert!(budget.has_room(now, 9 * MB) && !budget.has_room(now, 10 * MB));
        assert!(!budget.is_leaving(&id(4)), "it goes on");
        // Swap is full, so the next one sleeps; little of the first is left in memory.
        let chosen = budget.choose(now, Need::Now, 12 * MB, 8);
        assert_eq!(asked(&chosen), [(id(3), SLEEP)]);
        // A suspended container needs its swapped pages as well when it is restored; pages read
        // back from swap are not counted twice.
        budget.look(now + s(0.1), &id(4), 99, of(4 * MB), || true);
        budget.left(now + s(0.2), id(4));
        assert_eq!(budget.needs(&id(4), || 0), 10 * MB);
    }

    #[test]
    fn container_whose_pages_do_not_go_to_swap_sleeps() {
        let choice = |in_use: InUse| {
            let (mut budget, mut now) = used_by_rank(10 * MB, 1);
            budget.has_swap(100 * MB);
            now += s(1.0);
            budget.look(now, &id(1), 99, in_use, || true);
            let chosen = budget.choose(now, Need::Now, MB, 1);
            (budget, now, chosen[0].asked)
        };
        let locked = InUse { bytes: 10 * MB, for_swap_bytes: MB };
        assert_eq!(choice(locked).2, SLEEP, "most of it is locked");
        let (mut budget, now, asked) = choice(of(10 * MB));
        assert_eq!(asked, Request::PagesOut);
        budget.pushed_out(now, &id(1), MB);
        let again = budget.choose(now, Need::Now, 2 * MB, 1);
        assert_eq!(again[0].asked, SLEEP, "hardly anything of it went");
    }
}
