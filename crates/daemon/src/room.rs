//! Who is awake, how much memory that takes, and who is to give it when others need it ([`choice`]).
//!
//! Numbers in, choices out: no file is read and no process started here.
//!
//! **Popularity** is how often a container is used, in uses a second, older ones counting less: with
//! each look the past is weighed by `e^(-t/20 s)`, and a look that finds that it has run since the last
//! one counts one use. So the expected time until its next use is one over that.
//!
//! LIMIT: where all that may sleep does, or cannot now, and there is no room all the same, one more is
//! let in: the next waits until that one sleeps.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use dormouse_kernel::cgroup::InUse;
use dormouse_model::ContainerId;

mod choice;

pub(crate) use choice::{Choice, Need};

/// After how long a use counts 1/e of one now.
const FADES: Duration = Duration::from_secs(20);
/// Below this nobody has to remember it: once in some hours.
const POPULARITY_MIN: f64 = 1e-4;
/// How long one that is at work stays awake at least.
const TURN: Duration = Duration::from_secs(1);
/// How long somebody waits until that counts for more than who was woken just now.
pub(crate) const PATIENCE: Duration = Duration::from_millis(250);
/// How long one that could not sleep is left alone, the first time.
const LEFT_ALONE: Duration = Duration::from_millis(100);
/// How long nobody tries again to push out what did not go.
const KEEPS_PAGES: Duration = Duration::from_secs(60);
/// LIMIT: how often that doubles.
const DOUBLINGS_MAX: u32 = 9;
/// How often in a row one cannot sleep until nobody waits for it.
const REFUSALS: u32 = 5;
/// What a container needs beside the pages in its checkpoint, in bytes.
const KERNEL_BYTES: u64 = 512 << 10;

/// What is known of a container that is awake.
#[derive(Debug)]
struct Awake {
    bytes: u64,
    /// Of that, what could be in swap.
    for_swap_bytes: u64,
    /// What was pushed out of it and may be there still.
    swapped_bytes: u64,
    /// The kernel does not push its pages out, for whatever reason: not again before that.
    keeps_pages_until: Instant,
    /// What was reserved for it when it was let in.
    reserved_bytes: u64,
    used_ns: u64,
    since: Instant,
    looked: Instant,
    /// The first look that found what the last one did.
    still_since: Instant,
    popularity: f64,
    may_sleep: bool,
    step: Step,
    /// What it gives that is leaving.
    leaving_bytes: u64,
    refusals: u32,
    left_alone_until: Instant,
}

/// Where it is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Waking,
    Here,
    Leaving,
}

/// What is remembered of one that sleeps.
#[derive(Debug)]
struct Past {
    bytes: u64,
    popularity: f64,
    left: Instant,
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Room {
    bytes: u64,
    /// What has room in swap.
    swap_bytes: u64,
    awake: HashMap<ContainerId, Awake>,
    past: HashMap<ContainerId, Past>,
}

/// What is left of a popularity after a time.
fn faded(popularity: f64, time: Duration) -> f64 {
    popularity * (-time.as_secs_f64() / FADES.as_secs_f64()).exp()
}

/// What one use adds.
fn use_once() -> f64 {
    1.0 / FADES.as_secs_f64()
}

impl Awake {
    fn is_idle(&self) -> bool {
        self.still_since < self.looked
    }
}

impl Room {
    /// Room of so many bytes.
    pub(crate) fn of(bytes: u64) -> Self {
        Self { bytes, swap_bytes: 0, awake: HashMap::new(), past: HashMap::new() }
    }

    /// So much has room in swap that pages may be pushed out to.
    pub(crate) fn has_swap(&mut self, bytes: u64) {
        self.swap_bytes = bytes;
    }

    /// What those that are awake take, and those that have leave to be.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.awake.values().map(|awake| awake.bytes).sum()
    }

    pub(crate) fn room_bytes(&self) -> u64 {
        self.bytes
    }

    /// What is kept free, so that who wakes does not have to wait.
    fn reserve_bytes(&self) -> u64 {
        self.bytes / 16
    }

    /// So much makes it nearly full.
    pub(crate) fn is_tight_with(&self, bytes: u64) -> bool {
        bytes > self.bytes / 4 * 3
    }

    /// It is awake, or has leave to be: what it takes is counted.
    pub(crate) fn knows(&self, id: &ContainerId) -> bool {
        self.awake.contains_key(id)
    }

    /// It is being put to sleep.
    pub(crate) fn is_leaving(&self, id: &ContainerId) -> bool {
        self.awake.get(id).is_some_and(|awake| awake.step == Step::Leaving)
    }

    /// What one needs that wakes; `checkpoint_bytes` is asked of one that nobody remembers.
    pub(crate) fn needs(&self, id: &ContainerId, checkpoint_bytes: impl FnOnce() -> u64) -> u64 {
        match (self.awake.get(id), self.past.get(id)) {
            (Some(_), _) => 0,
            (None, Some(past)) => past.bytes,
            (None, None) => checkpoint_bytes() + KERNEL_BYTES,
        }
    }

    /// Whether there is room for so much more, or never will be.
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

    /// It has leave to wake, or was found awake.
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

    /// It has leave to wake. One that is known as awake has fallen asleep since the last look.
    pub(crate) fn admit(&mut self, now: Instant, id: ContainerId, may_sleep: bool, bytes: u64) {
        match self.awake.get_mut(&id) {
            None => self.enter(now, id, Step::Waking, may_sleep, bytes),
            Some(awake) => {
                (awake.step, awake.since, awake.reserved_bytes) = (Step::Waking, now, awake.bytes);
            }
        }
    }

    /// Who had leave has woken, or not: the next look tells.
    pub(crate) fn arrived(&mut self, now: Instant, id: &ContainerId) {
        if let Some(awake) = self.awake.get_mut(id).filter(|awake| awake.step == Step::Waking) {
            (awake.step, awake.since) = (Step::Here, now);
        }
    }

    /// Takes note of a look at one that is awake; `may_sleep` is asked of one that is new.
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
        // What was read again is in memory; what else is there is new.
        let more = for_swap_bytes.saturating_sub(awake.for_swap_bytes);
        awake.swapped_bytes = awake.swapped_bytes.saturating_sub(more);
        awake.for_swap_bytes = for_swap_bytes;
        awake.popularity = faded(awake.popularity, now - awake.looked);
        awake.looked = now;
        if awake.used_ns != used_ns {
            (awake.used_ns, awake.still_since) = (used_ns, now);
            awake.popularity += use_once();
        }
        // What it had comes back as it is touched.
        let has_begun = awake.step == Step::Here && now - awake.since >= TURN;
        awake.bytes = if has_begun { bytes } else { bytes.max(awake.reserved_bytes) };
    }

    /// All but these have ended, or fallen asleep.
    pub(crate) fn only(&mut self, now: Instant, is_there: impl Fn(&ContainerId) -> bool) {
        let gone = self.awake.iter().filter(|(id, it)| it.step != Step::Waking && !is_there(id));
        let gone: Vec<ContainerId> = gone.map(|(id, _)| id.clone()).collect();
        gone.into_iter().for_each(|id| self.left(now, id));
        self.past.retain(|_, past| faded(past.popularity, now - past.left) >= POPULARITY_MIN);
    }

    /// It sleeps, or has ended.
    pub(crate) fn left(&mut self, now: Instant, id: ContainerId) {
        if let Some(awake) = self.awake.remove(&id) {
            let popularity = faded(awake.popularity, now - awake.looked);
            // All of it comes back with it.
            let bytes = awake.bytes + awake.swapped_bytes;
            self.past.insert(id, Past { bytes, popularity, left: now });
        }
    }

    /// Its pages were pushed out, so many bytes of them.
    pub(crate) fn pushed_out(&mut self, now: Instant, id: &ContainerId, bytes: u64) {
        let Some(awake) = self.awake.get_mut(id) else { return };
        awake.step = Step::Here;
        // It may use no swap, or has what swap does not take.
        if bytes < awake.for_swap_bytes / 4 {
            awake.keeps_pages_until = now + KEEPS_PAGES;
        }
        awake.for_swap_bytes = awake.for_swap_bytes.saturating_sub(bytes);
        awake.bytes = awake.bytes.saturating_sub(bytes);
        awake.reserved_bytes = awake.reserved_bytes.min(awake.bytes);
        awake.swapped_bytes += bytes;
        self.swap_bytes = self.swap_bytes.saturating_sub(bytes);
    }

    /// It is being put to sleep, for whatever reason.
    pub(crate) fn leaves(&mut self, id: &ContainerId) {
        if let Some(awake) = self.awake.get_mut(id).filter(|awake| awake.step != Step::Leaving) {
            (awake.step, awake.leaving_bytes) = (Step::Leaving, awake.bytes);
        }
    }

    /// It is not, after all: it has run, or cannot sleep.
    pub(crate) fn stays(&mut self, now: Instant, id: &ContainerId, is_refused: bool) {
        let Some(awake) = self.awake.get_mut(id) else { return };
        (awake.step, awake.still_since) = (Step::Here, awake.looked);
        if is_refused {
            let alone = LEFT_ALONE * (1 << awake.refusals.min(DOUBLINGS_MAX));
            awake.left_alone_until = now + alone;
            awake.refusals += 1;
        }
    }

    /// Its configuration has changed.
    pub(crate) fn may_sleep(&mut self, id: &ContainerId, may_sleep: bool) {
        if let Some(awake) = self.awake.get_mut(id) {
            awake.may_sleep = may_sleep;
        }
    }
}

#[cfg(test)]
mod tests {
    use dormouse_container::Asked;

    use super::choice::{SETTLES, SLEEP};
    use super::*;

    const MB: u64 = 1 << 20;

    fn id(n: u8) -> ContainerId {
        ContainerId::from_bytes([n; 16])
    }

    fn s(n: f64) -> Duration {
        Duration::from_secs_f64(n)
    }

    /// All of it is pages.
    fn of(bytes: u64) -> InUse {
        InUse { bytes, for_swap_bytes: bytes }
    }

    /// Containers of 10 MB that are looked at ten times a second for ten seconds; number n has run at
    /// every look whose number n divides, the last one long ago.
    fn used_by_rank(room: u64, count: u8) -> (Room, Instant) {
        let (mut room, mut now) = (Room::of(room), Instant::now());
        for look in 1..=100u64 {
            now += s(0.1);
            for n in 1..=count {
                let used = look.min(98) / u64::from(n) + 1;
                room.look(now, &id(n), used, of(10 * MB), || true);
            }
        }
        (room, now)
    }

    fn ids(chosen: &[Choice]) -> Vec<ContainerId> {
        chosen.iter().map(|choice| choice.id.clone()).collect()
    }

    #[test]
    fn the_least_popular_sleep_first_and_as_many_as_it_takes() {
        let (mut room, now) = used_by_rank(40 * MB, 4);
        assert!(room.has_room(now, 0) && !room.has_room(now, MB));
        assert_eq!(ids(&room.choose(now, Need::Now, 5 * MB, 8)), [id(4)]);
        assert!(room.is_leaving(&id(4)));
        assert_eq!(ids(&room.choose(now, Need::Now, 5 * MB, 8)), [], "that is enough");
        assert_eq!(ids(&room.choose(now, Need::Now, 30 * MB, 8)), [id(3), id(2)]);
        room.left(now, id(4));
        assert_eq!(room.needs(&id(4), || 0), 10 * MB, "what it had is remembered");
        assert!(room.has_room(now, 10 * MB));
        assert_eq!(room.needs(&id(9), || MB), MB + KERNEL_BYTES);
    }

    #[test]
    fn of_two_that_are_as_popular_the_one_sleeps_that_gives_more_for_its_wake() {
        let (mut room, mut now) = (Room::of(100 * MB), Instant::now());
        for look in 0..20 {
            now += s(0.1);
            room.look(now, &id(1), look.min(10), of(MB), || true);
            room.look(now, &id(2), look.min(10), of(50 * MB), || true);
        }
        assert_eq!(ids(&room.choose(now, Need::Now, 60 * MB, 1)), [id(2)]);
    }

    #[test]
    fn room_is_made_ahead_of_the_idle_alone() {
        let (mut room, now) = used_by_rank(40 * MB, 4);
        assert_eq!(ids(&room.choose(now, Need::Ahead, 0, 8)), [id(4)], "a sixteenth is kept free");
        let mut room = Room::of(10 * MB);
        room.look(now, &id(1), 1, of(10 * MB), || true);
        room.look(now + s(5.0), &id(1), 2, of(10 * MB), || true);
        assert_eq!(ids(&room.choose(now + s(5.0), Need::Now, 5 * MB, 8)), [], "it is at work");
        let chosen = room.choose(now + s(5.0), Need::Urgent, 5 * MB, 8);
        assert_eq!(ids(&chosen), [id(1)]);
        assert!(chosen[0].idle.is_none(), "and sleeps all the same");
    }

    #[test]
    fn one_that_was_woken_just_now_has_its_time() {
        let (mut room, now) = (Room::of(10 * MB), Instant::now());
        room.admit(now, id(1), true, 10 * MB);
        assert!(!room.has_room(now, MB));
        assert_eq!(ids(&room.choose(now + s(9.0), Need::Urgent, MB, 8)), [], "it is on its way");
        room.arrived(now, &id(1));
        room.look(now + SETTLES / 4, &id(1), 1, of(MB), || true);
        assert!(!room.has_room(now, MB), "what it had comes back as it is touched");
        room.look(now + SETTLES / 2, &id(1), 1, of(MB), || true);
        assert_eq!(ids(&room.choose(now + SETTLES / 2, Need::Now, 10 * MB, 8)), []);
        assert_eq!(ids(&room.choose(now + SETTLES, Need::Now, 10 * MB, 8)), [id(1)]);
        room.stays(now + s(0.3), &id(1), false);
        room.look(now + s(0.4), &id(1), 2, of(MB), || true);
        assert_eq!(ids(&room.choose(now + s(0.4), Need::Urgent, 10 * MB, 8)), [], "it works");
        assert_eq!(ids(&room.choose(now + s(1.1), Need::Urgent, 10 * MB, 8)), [id(1)], "it had it");
    }

    #[test]
    fn where_nobody_may_sleep_one_more_is_let_in() {
        let (mut room, now) = (Room::of(10 * MB), Instant::now());
        room.look(now, &id(1), 1, of(20 * MB), || false);
        assert!(room.has_room(now, MB), "there will never be room");
        room.admit(now, id(2), true, MB);
        assert!(!room.has_room(now, MB), "the next waits for that one");
        room.arrived(now, &id(2));
        assert_eq!(ids(&room.choose(now + s(2.0), Need::Urgent, MB, 8)), [id(2)]);
        for _ in 0..REFUSALS {
            assert!(!room.has_room(now + s(2.0), MB), "it may yet");
            room.stays(now + s(2.0), &id(2), true);
        }
        assert!(room.has_room(now + s(2.0), MB), "it cannot sleep now");
        assert!(!room.has_room(now + s(4.0), MB), "it is tried again");
    }

    #[test]
    fn what_is_gone_takes_no_room_and_popularity_fades() {
        let (mut room, now) = used_by_rank(40 * MB, 2);
        room.only(now, |one| *one == id(1));
        assert_eq!(room.taken_bytes(), 10 * MB);
        assert!(room.past.contains_key(&id(2)));
        room.only(now + s(3600.0), |one| *one == id(1));
        assert!(room.past.is_empty());
        // One that is awake and that nobody uses is as good as unknown after a while.
        room.look(now + s(600.0), &id(1), 99, of(10 * MB), || true);
        assert!(room.awake[&id(1)].popularity < POPULARITY_MIN + use_once());
    }

    #[test]
    fn pages_of_the_idle_go_to_swap_before_anybody_sleeps() {
        let (mut room, now) = used_by_rank(40 * MB, 4);
        room.has_swap(15 * MB);
        let asked = |chosen: &[Choice]| -> Vec<(ContainerId, Asked)> {
            chosen.iter().map(|choice| (choice.id.clone(), choice.asked)).collect()
        };
        assert_eq!(asked(&room.choose(now, Need::Now, MB, 8)), [(id(4), Asked::PagesOut)]);
        assert_eq!(asked(&room.choose(now, Need::Now, 9 * MB, 8)), [], "that is enough");
        room.pushed_out(now, &id(4), 9 * MB);
        assert!(room.has_room(now, 9 * MB) && !room.has_room(now, 10 * MB));
        assert!(!room.is_leaving(&id(4)), "it goes on");
        // There is no more room in swap, so the next sleeps; what is left of the first is little.
        let chosen = room.choose(now, Need::Now, 12 * MB, 8);
        assert_eq!(asked(&chosen), [(id(3), SLEEP)]);
        // What it had comes back with it when it has slept, and what was read again is not counted twice.
        room.look(now + s(0.1), &id(4), 99, of(4 * MB), || true);
        room.left(now + s(0.2), id(4));
        assert_eq!(room.needs(&id(4), || 0), 10 * MB);
    }

    #[test]
    fn what_does_not_go_to_swap_sleeps() {
        let choice = |in_use: InUse| {
            let (mut room, mut now) = used_by_rank(10 * MB, 1);
            room.has_swap(100 * MB);
            now += s(1.0);
            room.look(now, &id(1), 99, in_use, || true);
            let chosen = room.choose(now, Need::Now, MB, 1);
            (room, now, chosen[0].asked)
        };
        let locked = InUse { bytes: 10 * MB, for_swap_bytes: MB };
        assert_eq!(choice(locked).2, SLEEP, "most of it is locked");
        let (mut room, now, asked) = choice(of(10 * MB));
        assert_eq!(asked, Asked::PagesOut);
        room.pushed_out(now, &id(1), MB);
        let again = room.choose(now, Need::Now, 2 * MB, 1);
        assert_eq!(again[0].asked, SLEEP, "hardly anything of it went");
    }
}
