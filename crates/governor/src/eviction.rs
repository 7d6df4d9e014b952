//! Eviction: which container gives memory when the memory of the host runs short.
//!
//! There are two *supplies*: the memory of the host, and the memory of all containers together while that has a limit.
//! A [`Gauge`] for each of them decides when it is short, before the kernel reclaims other memory than page cache:
//!
//! - less is free than is to stay free, and twice what was taken since the last reading; or
//! - all tasks that had work waited for memory for more than a twentieth of two seconds, and little is free. A
//!   container that waits below a limit of its own counts for the host as well, so the stalls alone are no shortage.
//!
//! **The victim** ([`victim`]) is the container with most memory *above its guarantee*, inactive page cache not
//! counted. A container that uses less than its guarantee is never chosen, however large it is. Of containers with
//! nearly as much the least used one is chosen. One container at a time gives memory, and the next one after a pause,
//! when the effect can be seen ([`Turns`]).
//!
//! LIMIT: containers that take more than the free part between two readings use it up before one of them is chosen.

/// The part of a supply that stays free by default, within [`KEEPS_BYTES`].
const KEEPS: u64 = 32;
/// Bounds of that, where the supply is large enough. The least is what a container takes in two readings that takes
/// 1 GB in a second, and some memory for its sleep.
const KEEPS_BYTES: std::ops::RangeInclusive<u64> = 256 << 20..=2 << 30;
/// The largest part of a supply that stays free.
const KEEPS_MOST: u64 = 8;
/// The largest part that is asked for what was taken since the last reading, and the largest amount: no container takes
/// 5 GB in a second.
const GROWTH_MOST: u64 = 4;
const GROWTH_MOST_BYTES: u64 = 1 << 30;
/// A supply is near its shortage with less than so many times what is to stay free, and this amount.
const NEAR: u64 = 4;
const NEAR_BYTES: u64 = 1 << 30;
/// The time over which stalls are counted, and the part of it, in thousandths, that is a shortage.
const STALLS_MS: u64 = 2_000;
const STALLED_PERMILLE: u64 = 50;
/// Containers are alike if they differ by less than this part of the largest.
const ALIKE: u64 = 8;
/// A container with less above its guarantee is left alone.
const WORTH_BYTES: u64 = 1 << 20;
/// The pause between two containers that give memory.
pub const PAUSE_MS: u64 = 1_000;

/// The time between two readings for which growth is computed.
pub const TICK_MS: u64 = 100;

/// A reading of a supply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supply {
    /// All of it, in bytes.
    pub all_bytes: u64,
    /// What can be used without swap, in bytes.
    pub free_bytes: u64,
    /// The time for which all tasks with work have waited for memory since some beginning, in microseconds; `None` if
    /// it is not counted.
    pub stalled_us: Option<u64>,
}

/// A supply that is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// All memory, in bytes.
    pub all_bytes: u64,
    /// What is free, in bytes.
    pub free_bytes: u64,
    /// What is to be free, in bytes.
    pub wanted_bytes: u64,
    /// The part of the time for which tasks waited for memory, in thousandths, where that is the reason.
    pub stalled_permille: Option<u64>,
}

/// How much of a supply is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Enough.
    Ample,
    /// It may be short soon.
    Near,
    /// Too little.
    Short(Shortage),
}

/// Returns how much of a supply stays free by default.
pub fn keep_bytes(all_bytes: u64) -> u64 {
    (all_bytes / KEEPS).clamp(*KEEPS_BYTES.start(), *KEEPS_BYTES.end()).min(all_bytes / KEEPS_MOST)
}

/// Decides when a supply is short.
#[derive(Debug, Default)]
pub struct Gauge {
    /// What is to stay free, if it is not the default.
    keep_bytes: Option<u64>,
    /// Time and free memory of the last reading.
    last: Option<(u64, u64)>,
    /// Beginning of the time over which stalls are counted, and the count then.
    stalls_since: Option<(u64, u64)>,
    /// What is to be free, by the last reading.
    wanted_bytes: u64,
    /// The part of it that does not depend on growth, and the largest part that does.
    parts_bytes: (u64, u64),
}

impl Gauge {
    /// A gauge of a supply of which so much is to stay free.
    pub fn new(keep_bytes: Option<u64>) -> Self {
        Self { keep_bytes, ..Self::default() }
    }

    /// Takes a reading. The clock of `now_ms` begins anywhere, and does not go back.
    pub fn read(&mut self, now_ms: u64, supply: Supply) -> Level {
        let Supply { all_bytes, free_bytes, stalled_us } = supply;
        let kept = self.keep_bytes.unwrap_or_else(|| keep_bytes(all_bytes));
        let taken = match self.last {
            Some((then_ms, before)) if then_ms < now_ms => {
                let taken = u128::from(before.saturating_sub(free_bytes)) * u128::from(TICK_MS);
                u64::try_from(taken / u128::from(now_ms - then_ms)).unwrap_or(u64::MAX)
            }
            _ => 0,
        };
        self.last = Some((now_ms, free_bytes));
        let growth_most = (all_bytes / GROWTH_MOST).min(GROWTH_MOST_BYTES);
        self.parts_bytes = (kept, growth_most);
        self.wanted_bytes = kept.saturating_add(taken.saturating_mul(2).min(growth_most));
        let stalled = stalled_us.and_then(|us| self.stalled_permille(now_ms, us));
        let near_bytes = self.wanted_bytes.saturating_mul(NEAR).saturating_add(NEAR_BYTES);
        let is_near = free_bytes < near_bytes;
        let shortage = |stalled_permille| {
            let wanted_bytes = self.wanted_bytes;
            Level::Short(Shortage { all_bytes, free_bytes, wanted_bytes, stalled_permille })
        };
        match stalled.filter(|part| *part > STALLED_PERMILLE) {
            _ if free_bytes < self.wanted_bytes => shortage(None),
            Some(part) if free_bytes < self.wanted_bytes.saturating_mul(NEAR) => {
                shortage(Some(part))
            }
            _ if is_near => Level::Near,
            _ => Level::Ample,
        }
    }

    /// Counts stalls. Returns their part of the time at its end.
    fn stalled_permille(&mut self, now_ms: u64, stalled_us: u64) -> Option<u64> {
        let (since_ms, before_us) = *self.stalls_since.get_or_insert((now_ms, stalled_us));
        let passed_ms = now_ms.saturating_sub(since_ms);
        if passed_ms < STALLS_MS {
            return None;
        }
        self.stalls_since = Some((now_ms, stalled_us));
        // A microsecond is a thousandth of a millisecond.
        Some(stalled_us.saturating_sub(before_us) / passed_ms)
    }

    /// Begins to count stalls anew: a container has given memory, or readings were interrupted.
    pub fn begin_again(&mut self) {
        (self.stalls_since, self.last) = (None, None);
    }

    /// Returns whether a container that needs so much fits, and as much as is to be free is left twice. Its memory
    /// arrives at once, and that growth is to be no shortage either.
    pub fn has_room_for(&self, bytes: u64) -> bool {
        let (kept, growth_most) = self.parts_bytes;
        let arrives = kept.saturating_add(bytes.saturating_mul(2).min(growth_most));
        let needed = self.wanted_bytes.saturating_mul(2).max(arrives).saturating_add(bytes);
        self.last.is_some_and(|(_, free_bytes)| needed <= free_bytes)
    }
}

/// The memory of a container that may give some.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading<I> {
    /// The container.
    pub id: I,
    /// Memory in use, without inactive page cache, in bytes.
    pub used_bytes: u64,
    /// Its guarantee, in bytes.
    pub min_bytes: u64,
    /// How often it is used: uses per second, with older ones fading.
    pub popularity: f64,
}

impl<I> Reading<I> {
    /// Its memory above its guarantee, in bytes.
    pub fn above_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.min_bytes)
    }
}

/// Returns the container that gives memory first; `None` if none has some above its guarantee.
pub fn victim<I>(readings: &[Reading<I>]) -> Option<&Reading<I>> {
    let most =
        readings.iter().map(Reading::above_bytes).max().filter(|most| *most >= WORTH_BYTES)?;
    let least = (most - most / ALIKE).max(WORTH_BYTES);
    let alike = readings.iter().filter(|it| it.above_bytes() >= least);
    alike.min_by(|a, b| {
        let by_size = b.above_bytes().cmp(&a.above_bytes());
        a.popularity.total_cmp(&b.popularity).then(by_size)
    })
}

/// Has one container at a time give memory, with pauses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Turns {
    is_busy: bool,
    not_before_ms: u64,
}

impl Turns {
    /// Whether a container may be chosen now.
    pub fn is_due(self, now_ms: u64) -> bool {
        !self.is_busy && self.not_before_ms <= now_ms
    }

    /// A container begins to give memory.
    pub fn begin(&mut self) {
        self.is_busy = true;
    }

    /// It has done so, or could not. The next one is chosen at once then.
    pub fn end(&mut self, now_ms: u64, has_changed: bool) {
        self.is_busy = false;
        if has_changed {
            self.pause(now_ms);
        }
    }

    /// A container has got memory back: no other one gives or gets some for a moment.
    pub fn pause(&mut self, now_ms: u64) {
        self.not_before_ms = now_ms.saturating_add(PAUSE_MS);
    }
}

/// Returns the container that is to give memory now, if any.
pub fn decide<'a, I>(
    now_ms: u64,
    levels: &[Level],
    turns: Turns,
    readings: &'a [Reading<I>],
) -> Option<&'a Reading<I>> {
    let is_short = levels.iter().any(|level| matches!(level, Level::Short(_)));
    if is_short && turns.is_due(now_ms) { victim(readings) } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;

    fn supply(all: u64, free: u64) -> Supply {
        Supply { all_bytes: all, free_bytes: free, stalled_us: None }
    }

    fn reading(id: usize, used: u64, min: u64, popularity: f64) -> Reading<usize> {
        Reading { id, used_bytes: used * MB, min_bytes: min * MB, popularity }
    }

    fn chosen(readings: &[Reading<usize>]) -> Option<usize> {
        victim(readings).map(|it| it.id)
    }

    fn short(level: Level) -> Option<Shortage> {
        match level {
            Level::Short(shortage) => Some(shortage),
            Level::Ample | Level::Near => None,
        }
    }

    #[test]
    fn part_that_stays_free_has_bounds() {
        assert_eq!(keep_bytes(200 * MB), 25 * MB, "an eighth of a small supply");
        assert_eq!(keep_bytes(4 * GB), 256 * MB);
        assert_eq!(keep_bytes(24 * GB), 768 * MB);
        assert_eq!(keep_bytes(1024 * GB), 2 * GB);
        assert_eq!(keep_bytes(0), 0);
    }

    #[test]
    fn supply_is_short_when_less_is_free_than_is_to_stay() {
        let mut gauge = Gauge::new(Some(100 * MB));
        assert_eq!(gauge.read(0, supply(10 * GB, 8 * GB)), Level::Ample);
        assert_eq!(gauge.read(60_000, supply(10 * GB, GB)), Level::Near);
        assert_eq!(short(gauge.read(60_100, supply(10 * GB, GB))), None);
        let found = short(gauge.read(120_000, supply(10 * GB, 99 * MB))).expect("a shortage");
        assert_eq!((found.free_bytes, found.stalled_permille), (99 * MB, None));
        assert_eq!(gauge.read(240_000, supply(10 * GB, 101 * MB)), Level::Near);
    }

    #[test]
    fn growth_since_the_last_reading_counts_twice() {
        let mut gauge = Gauge::new(Some(100 * MB));
        assert_eq!(short(gauge.read(0, supply(10 * GB, 400 * MB))), None, "nothing is known yet");
        let found = short(gauge.read(100, supply(10 * GB, 290 * MB))).expect("a shortage");
        assert_eq!(found.wanted_bytes, 320 * MB);
        assert_eq!(short(gauge.read(200, supply(10 * GB, 290 * MB))), None, "it grows no longer");
        // The same growth in ten times the time.
        let mut slow = Gauge::new(Some(100 * MB));
        slow.read(0, supply(10 * GB, 400 * MB));
        assert_eq!(short(slow.read(1000, supply(10 * GB, 290 * MB))), None);
        let mut fast = Gauge::new(Some(100 * MB));
        fast.read(0, supply(GB, GB));
        let found = short(fast.read(1, supply(GB, 200 * MB))).expect("a shortage");
        assert_eq!(found.wanted_bytes, 356 * MB, "at most a quarter");
        let mut large = Gauge::new(Some(100 * MB));
        large.read(0, supply(100 * GB, 90 * GB));
        assert_eq!(short(large.read(100, supply(100 * GB, 2 * GB))), None, "and at most 1 GB");
    }

    #[test]
    fn stalls_are_a_shortage_while_little_is_free() {
        let stalled = |free, us| Supply { stalled_us: Some(us), ..supply(10 * GB, free) };
        let run = |free, per_second: u64| {
            let mut gauge = Gauge::new(Some(100 * MB));
            let levels = (0..=40).map(|n| gauge.read(n * 100, stalled(free, n * per_second / 10)));
            levels.filter_map(short).collect::<Vec<_>>()
        };
        let found = run(300 * MB, 60_000);
        assert_eq!(found.len(), 2, "once in two seconds: {found:?}");
        assert_eq!(found[0].stalled_permille, Some(60));
        assert!(run(300 * MB, 40_000).is_empty(), "a twenty-fifth of the time");
        assert!(run(5 * GB, 900_000).is_empty(), "a limit of its own is the reason");
    }

    #[test]
    fn container_below_its_guarantee_is_never_chosen() {
        let all = [reading(0, 900, 1000, 0.0), reading(1, 40, 0, 9.0)];
        assert_eq!(chosen(&all), Some(1), "the largest is below its guarantee");
        assert_eq!(chosen(&all[..1]), None);
        assert_eq!(chosen(&[reading(0, 1000, 1000, 0.0)]), None);
    }

    #[test]
    fn greatest_excess_is_chosen_and_popularity_decides_between_equals() {
        let all = [reading(0, 300, 100, 0.0), reading(1, 500, 250, 5.0), reading(2, 240, 0, 0.1)];
        assert_eq!(chosen(&all), Some(2), "240 is as good as 250, and used less");
        assert_eq!(chosen(&all[..2]), Some(1), "200 is not");
        let equal = [reading(0, 300, 100, 0.3), reading(1, 210, 0, 0.3)];
        assert_eq!(chosen(&equal), Some(1), "of equally popular ones the larger");
        assert_eq!(
            victim(&[Reading { used_bytes: 500_000, ..reading(0, 0, 0, 0.0) }]),
            None,
            "not worth it"
        );
    }

    #[test]
    fn containers_give_memory_one_after_another() {
        let all = [reading(0, 300, 0, 0.0)];
        let mut gauge = Gauge::new(Some(100 * MB));
        let level = [gauge.read(0, supply(GB, 0))];
        let mut turns = Turns::default();
        assert!(decide(0, &level, turns, &all).is_some());
        turns.begin();
        assert!(decide(60_000, &level, turns, &all).is_none(), "one at a time");
        turns.end(60_000, true);
        assert!(decide(60_000 + PAUSE_MS - 1, &level, turns, &all).is_none(), "a pause");
        assert!(decide(60_000 + PAUSE_MS, &level, turns, &all).is_some());
        turns.begin();
        turns.end(70_000, false);
        assert!(decide(70_000, &level, turns, &all).is_some(), "it gave nothing");
        turns.pause(80_000);
        assert!(!turns.is_due(80_000 + PAUSE_MS - 1) && turns.is_due(80_000 + PAUSE_MS));
        assert!(decide(70_000, &[Level::Near, Level::Ample], turns, &all).is_none());
    }

    #[test]
    fn container_comes_back_when_twice_as_much_is_free() {
        let mut gauge = Gauge::new(Some(100 * MB));
        assert!(!gauge.has_room_for(0), "nothing was read");
        gauge.read(0, supply(GB, 220 * MB));
        assert!(gauge.has_room_for(20 * MB) && !gauge.has_room_for(21 * MB));
        gauge.read(60_000, supply(GB, 400 * MB));
        assert!(gauge.has_room_for(100 * MB) && !gauge.has_room_for(101 * MB));
        // It has arrived at once.
        assert_eq!(short(gauge.read(60_100, supply(GB, 300 * MB))), None);
    }

    /// A container of the simulation.
    #[derive(Debug, Clone, Copy)]
    struct Simulated {
        used_kb: u64,
        wished_kb: u64,
        min_kb: u64,
        /// Growth from one reading to the next.
        grows_kb: u64,
        is_asleep: bool,
    }

    /// Has containers grow on a host of 16 GB, ten readings a second. A sleep takes half a second. Returns how many
    /// there were.
    fn simulate(all: &mut [Simulated], ticks: u64) -> usize {
        const ALL_KB: u64 = 16 << 20;
        let (mut gauge, mut turns) = (Gauge::default(), Turns::default());
        let (mut falls, mut sleeps): (Option<(usize, u64)>, usize) = (None, 0);
        for now_ms in (0..ticks).map(|tick| tick * TICK_MS) {
            for (id, it) in all.iter_mut().enumerate().filter(|(_, it)| !it.is_asleep) {
                let stands = falls.is_some_and(|(falling, _)| falling == id);
                let grows = if stands { 0 } else { it.grows_kb };
                it.used_kb = (it.used_kb + grows).min(it.wished_kb);
            }
            let awake = || all.iter().enumerate().filter(|(_, it)| !it.is_asleep);
            let taken_kb: u64 = awake().map(|(_, it)| it.used_kb).sum();
            assert!(taken_kb < ALL_KB, "the host is full after {now_ms} ms: {all:?}");
            let level = gauge.read(now_ms, supply(ALL_KB << 10, (ALL_KB - taken_kb) << 10));
            if let Some((id, _)) = falls.take_if(|(_, until_ms)| *until_ms <= now_ms) {
                all[id].is_asleep = true;
                turns.end(now_ms, true);
                gauge.begin_again();
                sleeps += 1;
                continue;
            }
            let reading = |(id, it): (usize, &Simulated)| Reading {
                id,
                used_bytes: it.used_kb << 10,
                min_bytes: it.min_kb << 10,
                popularity: it.grows_kb as f64,
            };
            let readings: Vec<_> = awake().map(reading).collect();
            if let Some(it) = decide(now_ms, &[level], turns, &readings) {
                assert!(it.used_bytes > it.min_bytes, "{it:?}");
                falls = Some((it.id, now_ms + 5 * TICK_MS));
                turns.begin();
            } else if turns.is_due(now_ms)
                && let Some(it) =
                    all.iter_mut().find(|it| it.is_asleep && gauge.has_room_for(it.used_kb << 10))
            {
                it.is_asleep = false;
                turns.end(now_ms, true);
            }
        }
        sleeps
    }

    fn readings() -> impl Strategy<Value = Vec<Reading<usize>>> {
        let one = (0..1_u64 << 45, 0..1_u64 << 45, 0.0..10.0_f64);
        prop::collection::vec(one, 0..12).prop_map(|all| {
            let reading = |(id, (used_bytes, min_bytes, popularity))| Reading {
                id,
                used_bytes,
                min_bytes,
                popularity,
            };
            all.into_iter().enumerate().map(reading).collect()
        })
    }

    proptest! {
        #[test]
        fn victim_has_most_above_its_guarantee_or_nearly_as_much_and_is_used_less(all in readings()) {
            let most = all.iter().map(Reading::above_bytes).max().unwrap_or(0);
            match victim(&all) {
                None => prop_assert!(most < WORTH_BYTES),
                Some(it) => {
                    prop_assert!(it.used_bytes > it.min_bytes, "never one below its guarantee");
                    prop_assert!(it.above_bytes() >= most - most / ALIKE);
                    for other in all.iter().filter(|other| other.above_bytes() >= it.above_bytes()) {
                        prop_assert!(other.id == it.id || other.popularity >= it.popularity
                            || other.above_bytes() == it.above_bytes());
                    }
                    let alike = all.iter().filter(|other| other.above_bytes() >= most - most / ALIKE);
                    for other in alike.filter(|other| other.above_bytes() >= WORTH_BYTES) {
                        prop_assert!(other.popularity >= it.popularity);
                    }
                }
            }
        }

        #[test]
        fn overbooked_host_is_never_full(
            all in prop::collection::vec((1_000..3_000_u64, 0..900_u64, 0..400_u64), 12..16),
        ) {
            let simulated = |(wished, min, grows_kb)| Simulated {
                used_kb: 0,
                wished_kb: wished << 10,
                min_kb: min << 10,
                grows_kb,
                is_asleep: false,
            };
            let mut all: Vec<Simulated> = all.into_iter().map(simulated).collect();
            let wished: u64 = all.iter().map(|it| it.wished_kb.min(it.grows_kb * 20_000)).sum();
            let sleeps = simulate(&mut all, 20_000);
            prop_assert!(sleeps > 0 || wished < 16 << 20, "{wished} kB were wished");
            for it in all.iter().filter(|it| it.is_asleep) {
                prop_assert!(it.used_kb > it.min_kb, "{it:?}");
            }
        }

        #[test]
        fn no_container_is_chosen_with_enough_room_or_out_of_turn(
            all in readings(),
            reads in prop::collection::vec((1..5_000_u64, 0..1_u64 << 36, 0..2_000_000_u64), 1..60),
            keep in 0..1_u64 << 34,
        ) {
            let (mut gauge, mut turns) = (Gauge::new(Some(keep)), Turns::default());
            let (mut now, mut stalled, mut began): (u64, u64, Option<u64>) = (0, 0, None);
            let mut ended: Option<u64> = None;
            for (passed, free, stalls) in reads {
                now += passed;
                stalled += stalls;
                let read = Supply { all_bytes: 1 << 36, free_bytes: free, stalled_us: Some(stalled) };
                let level = gauge.read(now, read);
                if began.is_some_and(|since| since + 700 < now) {
                    began = None;
                    turns.end(now, true);
                    ended = Some(now);
                }
                let growth = (1_u64 << 36) / GROWTH_MOST;
                if free >= (keep + growth) * NEAR {
                    prop_assert!(!matches!(level, Level::Short(_)), "enough is free: {level:?}");
                }
                if let Some(it) = decide(now, &[Level::Ample, level], turns, &all) {
                    prop_assert!(matches!(level, Level::Short(_)) && began.is_none());
                    prop_assert!(ended.is_none_or(|ended| ended + PAUSE_MS <= now));
                    prop_assert!(it.used_bytes > it.min_bytes);
                    began = Some(now);
                    turns.begin();
                }
            }
        }
    }
}
