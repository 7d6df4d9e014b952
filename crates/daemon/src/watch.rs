//! When a container is looked at, and when it has been idle for its time.
//!
//! A look is one number, the CPU time that the container has used. Two looks that find the same
//! prove that it has not run in between, however long that was; so a container that was found still
//! is looked at once more, when its time is over. One that was not is looked at again after a pause
//! that grows to half of its time: the busy are looked at twice in it, whatever they do.
//!
//! ```text
//! ran      | a look after a pause: T/8, T/4, T/2, T/2, ...
//! still    | a look when it has been still for T: still again, it falls asleep
//! refused  | nothing for 2T, 4T, ... 64T, an hour at most; then as if it had run
//! ```
//!
//! **Whose timers may wait** (`--wake-on`) may have used something, a thousandth of the time at most: what
//! rings, is set again and does nothing else is no work. LIMIT: neither is who answers somebody who asks as
//! seldom; the next question wakes it.
//!
//! **Two tiers.** T is the time until the next of them: the shorter one of a container that is awake,
//! the one until sleep of one that is drowsy, counted from the same moment. One that cannot sleep
//! becomes drowsy when its time for that has come, and is tried again from there.

use std::time::{Duration, Instant};

use dormouse_container::{Idle, Policy, Tier};

/// LIMIT: how long one that cannot sleep is left alone.
const LEFT_ALONE_MAX: Duration = Duration::from_secs(3600);
/// How many times its cost a sleep has to last: one twentieth of the time goes into it at most.
const WORTH: u32 = 20;
/// Timers that may wait use one part in so many of the time at most.
const RINGS_SHARE: u32 = 1000;

/// What is known of one container.
#[derive(Debug)]
pub(crate) struct Watch {
    policy: Policy,
    /// What the last look found, and the first look that found it.
    used_ns: u64,
    still_since: Instant,
    /// What had been used by then.
    still_ns: u64,
    pause: Duration,
    /// When it is looked at next.
    pub(crate) due: Instant,
    /// It is falling asleep.
    pub(crate) is_falling: bool,
    /// How long that took last time, by tier.
    took: [Duration; 2],
    refusals: u32,
    /// What was told last of why it cannot, as a hash.
    told: u64,
}

impl Watch {
    pub(crate) fn new(now: Instant, policy: Policy, used_ns: u64) -> Self {
        let mut watch = Self {
            policy,
            used_ns,
            still_since: now,
            still_ns: used_ns,
            pause: Duration::ZERO,
            due: now,
            is_falling: false,
            took: [Duration::ZERO; 2],
            refusals: 0,
            told: 0,
        };
        watch.pause = watch.after() / 8;
        watch.due = now + watch.pause;
        watch
    }

    /// Where it goes next, and after how much time without work.
    fn goal(&self) -> Option<(Tier, Duration)> {
        let Policy { drowsy, asleep, is_drowsy, .. } = self.policy;
        let asleep = asleep.map(|after| (Tier::Asleep, after));
        let drowsy = drowsy.map(|after| (Tier::Drowsy, after)).filter(|_| !is_drowsy);
        match (drowsy, asleep) {
            (Some(drowsy), Some(asleep)) if self.refusals == 0 && asleep.1 <= drowsy.1 => {
                Some(asleep)
            }
            (Some(drowsy), _) => Some(drowsy),
            (None, asleep) => asleep,
        }
    }

    fn after(&self) -> Duration {
        self.goal().map_or(LEFT_ALONE_MAX, |(_, after)| after)
    }

    /// It was started, woken or changed: all begins anew but for what it has taught.
    pub(crate) fn begin_again(&mut self, now: Instant, policy: Policy, used_ns: u64) {
        let (took, told, is_falling) = (self.took, self.told, self.is_falling);
        *self = Self { took, told, is_falling, ..Self::new(now, policy, used_ns) };
    }

    /// Takes note of a look. What comes back is to fall asleep; `due` is set either way.
    pub(crate) fn look(&mut self, now: Instant, used_ns: u64) -> Option<(Tier, Idle)> {
        let after = self.after();
        let is_still = used_ns == self.used_ns || self.rings_only(now, used_ns);
        self.used_ns = used_ns;
        if !is_still {
            (self.still_since, self.still_ns) = (now, used_ns);
            self.due = now + self.pause;
            self.pause = (self.pause * 2).min(after / 2);
            return None;
        }
        self.pause = after / 8;
        self.due = self.still_since + after;
        if self.due > now {
            return None;
        }
        // One whose timers rang meanwhile has run.
        let quiet = match used_ns == self.still_ns {
            true => now - self.still_since,
            false => Duration::ZERO,
        };
        self.due = now + after;
        let (tier, _) = self.goal()?;
        let worth = after.max(self.took[tier as usize] * WORTH);
        Some((tier, Idle { quiet, used_ns, worth }))
    }

    /// Whether all that it has used since is what timers use that may wait.
    fn rings_only(&self, now: Instant, used_ns: u64) -> bool {
        let used = Duration::from_nanos(used_ns.saturating_sub(self.still_ns));
        self.policy.timers_wait && used * RINGS_SHARE <= now - self.still_since
    }

    /// It has fallen asleep. The next look finds that it has no cgroup; or it was woken by then.
    pub(crate) fn slept(&mut self, now: Instant, took: Duration) {
        self.took[Tier::Asleep as usize] = took;
        self.refusals = 0;
        self.due = now + self.after();
    }

    /// Which it is now: one that was tried may be awake by that.
    pub(crate) fn is_drowsy(&mut self, is_drowsy: bool) {
        self.policy.is_drowsy = is_drowsy;
    }

    /// It is drowsy: what it has used stays as it is from now on.
    pub(crate) fn drowsed(&mut self, now: Instant, took: Duration, used_ns: u64) {
        self.took[Tier::Drowsy as usize] = took;
        (self.policy.is_drowsy, self.used_ns, self.still_ns) = (true, used_ns, used_ns);
        let alone = match self.refusals {
            0 => Duration::ZERO,
            refusals => self.left_alone(refusals),
        };
        self.due = (self.still_since + self.after()).max(now + alone);
    }

    /// It has run just when it was to fall asleep.
    pub(crate) fn ran(&mut self, now: Instant) {
        if self.policy.timers_wait {
            self.due = now + self.pause; // by a timer, or it is found then
            return;
        }
        self.still_since = now;
        self.due = now + self.pause;
    }

    /// It cannot sleep. Whether that is to be told: the same is told once.
    pub(crate) fn refused(&mut self, now: Instant, why: &str, tier: Tier) -> bool {
        self.refusals = self.refusals.saturating_add(1);
        self.due = now + self.left_alone(self.refusals);
        // What cannot sleep becomes drowsy in its time.
        if tier == Tier::Asleep && self.goal().is_some_and(|(goal, _)| goal == Tier::Drowsy) {
            self.due = now.max(self.still_since + self.after());
        }
        let hash = hash(why);
        std::mem::replace(&mut self.told, hash) != hash
    }

    fn left_alone(&self, refusals: u32) -> Duration {
        let after = self.after();
        after.saturating_mul(1 << refusals.min(6)).min(LEFT_ALONE_MAX).max(after)
    }
}

/// FNV-1a, never 0.
fn hash(text: &str) -> u64 {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, fold).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(8);

    /// One that only sleeps.
    fn sleeps(after: Duration) -> Policy {
        Policy { asleep: Some(after), ..Policy::default() }
    }

    /// Looks at it whenever it is due until it falls asleep; `used` tells what it has used by then.
    fn follow(
        watch: &mut Watch,
        begin: Instant,
        used: impl Fn(Duration) -> u64,
    ) -> (u32, Duration) {
        for looks in 1..1000 {
            let now = watch.due;
            if let Some((Tier::Asleep, idle)) = watch.look(now, used(now - begin)) {
                // Whose timers rang meanwhile has not been quiet.
                let least = if watch.policy.timers_wait { Duration::ZERO } else { T };
                assert!(idle.quiet >= least && idle.quiet <= now - begin);
                return (looks, now - begin);
            }
            assert!(watch.due > now, "time goes on");
        }
        panic!("it never falls asleep");
    }

    #[test]
    fn one_that_does_nothing_falls_asleep_after_its_time_and_two_looks() {
        let begin = Instant::now();
        let mut watch = Watch::new(begin, sleeps(T), 5);
        assert_eq!(follow(&mut watch, begin, |_| 5), (2, T));
    }

    #[test]
    fn one_that_stops_working_falls_asleep_soon_after_its_time() {
        let begin = Instant::now();
        for stops in [1, 100, 999, 5_000, 60_000] {
            let stops = Duration::from_millis(stops);
            let mut watch = Watch::new(begin, sleeps(T), 0);
            let (_, slept) = follow(&mut watch, begin, |at| at.min(stops).as_nanos() as u64);
            let idle = slept - stops;
            assert!(idle >= T && idle <= T * 3 / 2, "{stops:?}: {idle:?}");
        }
    }

    #[test]
    fn one_that_works_is_looked_at_twice_in_its_time_and_never_falls_asleep() {
        let begin = Instant::now();
        let mut watch = Watch::new(begin, sleeps(T), 0);
        let mut looks = 0;
        while watch.due < begin + T * 100 {
            let now = watch.due;
            // Once a second, for a moment.
            assert!(watch.look(now, (now - begin).as_secs() + 1).is_none());
            looks += 1;
        }
        assert!((200..=205).contains(&looks), "{looks}");
    }

    #[test]
    fn whose_timers_may_wait_falls_asleep_between_them_and_who_works_does_not() {
        let begin = Instant::now();
        let policy = Policy { timers_wait: true, ..sleeps(T) };
        let ticks = |each_ns: u64| move |at: Duration| at.as_secs() * each_ns;
        let mut watch = Watch::new(begin, policy, 0);
        let (_, slept) = follow(&mut watch, begin, ticks(100_000));
        assert!(slept >= T && slept <= T * 2, "{slept:?}");
        let mut watch = Watch::new(begin, policy, 0);
        while watch.due < begin + T * 100 {
            let now = watch.due;
            assert!(watch.look(now, ticks(5_000_000)(now - begin)).is_none());
        }
    }

    #[test]
    fn one_that_cannot_sleep_is_left_alone_longer_and_longer_and_told_of_once() {
        let mut now = Instant::now();
        let mut watch = Watch::new(now, sleeps(T), 0);
        let mut alone = Vec::new();
        for round in 0..8 {
            assert_eq!(watch.refused(now, "it has a debugger", Tier::Asleep), round == 0);
            alone.push((watch.due - now).as_secs());
            now = watch.due;
        }
        assert_eq!(alone, [16, 32, 64, 128, 256, 512, 512, 512]);
        assert!(watch.refused(now, "it has two", Tier::Asleep), "what is new is told");
        watch.begin_again(now, sleeps(T), 0);
        assert!(!watch.refused(now, "it has two", Tier::Asleep), "and not again after a start");
        assert_eq!(watch.due - now, T * 2);
        let mut slow = Watch::new(now, sleeps(Duration::from_secs(7200)), 0);
        slow.refused(now, "x", Tier::Asleep);
        assert_eq!(slow.due - now, Duration::from_secs(7200), "never sooner than its time");
    }

    #[test]
    fn a_sleep_has_to_be_worth_what_it_costs() {
        let now = Instant::now();
        let mut watch = Watch::new(now, sleeps(T), 0);
        assert_eq!(watch.look(now + T, 0).unwrap().1.worth, T);
        watch.slept(now, Duration::from_secs(2));
        watch.begin_again(now, sleeps(T), 0);
        assert_eq!(watch.look(now + T, 0).unwrap().1.worth, Duration::from_secs(40));
    }

    #[test]
    fn one_that_ran_at_the_last_moment_waits_for_its_time_again() {
        let now = Instant::now();
        let mut watch = Watch::new(now, sleeps(T), 0);
        assert!(watch.look(now + T, 0).is_some());
        watch.ran(now + T);
        assert!(watch.due > now + T);
        assert!(watch.look(watch.due, 0).is_none());
        assert_eq!(watch.due, now + T * 2);
    }

    #[test]
    fn it_becomes_drowsy_and_then_falls_asleep_by_the_same_clock() {
        let begin = Instant::now();
        let policy = Policy { drowsy: Some(T), asleep: Some(T * 3), ..Policy::default() };
        let mut watch = Watch::new(begin, policy, 5);
        assert!(watch.look(watch.due, 5).is_none());
        let (tier, _) = watch.look(watch.due, 5).unwrap();
        assert_eq!((tier, watch.due), (Tier::Drowsy, begin + T * 2));
        watch.drowsed(begin + T, Duration::from_millis(1), 7); // freezing used some
        assert_eq!(watch.due, begin + T * 3);
        let (tier, idle) = watch.look(watch.due, 7).unwrap();
        assert_eq!((tier, idle.quiet), (Tier::Asleep, T * 3));
        // Woken, it begins anew.
        watch.begin_again(begin, policy, 9);
        assert_eq!(watch.look(begin + T, 9).unwrap().0, Tier::Drowsy);
    }

    #[test]
    fn one_that_cannot_sleep_becomes_drowsy_and_is_tried_from_there() {
        let begin = Instant::now();
        let policy = Policy { drowsy: Some(T * 2), asleep: Some(T), ..Policy::default() };
        let mut watch = Watch::new(begin, policy, 5);
        assert_eq!(watch.look(begin + T, 5).unwrap().0, Tier::Asleep, "the shorter time");
        assert!(watch.refused(begin + T, "it has a debugger", Tier::Asleep));
        assert_eq!(watch.due, begin + T * 2);
        assert_eq!(watch.look(begin + T * 2, 5).unwrap().0, Tier::Drowsy);
        watch.drowsed(begin + T * 2, Duration::ZERO, 6);
        assert_eq!(watch.due, begin + T * 4, "left alone, as one that is awake would be");
        assert_eq!(watch.look(watch.due, 6).unwrap().0, Tier::Asleep);
        assert!(!watch.refused(begin + T * 4, "it has a debugger", Tier::Asleep));
        assert_eq!(watch.due, begin + T * 8);
        // One that only becomes drowsy has nowhere to go from there.
        let policy = Policy { drowsy: Some(T), ..Policy::default() };
        let mut watch = Watch::new(begin, policy, 5);
        watch.drowsed(begin + T, Duration::ZERO, 6);
        assert!(watch.look(watch.due, 6).is_none() || watch.goal().is_none());
    }
}
