//! When a container's CPU time is read, and when the container has been idle long enough.
//!
//! A reading is one number, the CPU time used so far. Two equal readings prove that the container
//! has not run in between, however long that was. A container found idle is therefore read only
//! once more, when its idle time is over. Otherwise it is read again after a pause that grows to
//! half of the idle time T, so that an active container is read twice per T.
//!
//! ```text
//! ran      | next reading after a pause: T/8, T/4, T/2, T/2, ...
//! idle     | next reading after T without a run: if still idle, it is suspended
//! refused  | no reading for 2T, 4T, ... 64T, an hour at most; then as if it had run
//! ```
//!
//! **Timers that may wait** (`--wake-on`) may use up to a thousandth of the time: a timer that
//! expires and is only set again is not activity. LIMIT: answering clients that call equally seldom
//! is not activity either; the next request wakes the container.
//!
//! **Two tiers.** T is the time until the next tier: for an awake container the shorter of the two,
//! for a drowsy one the time until sleep, counted from the same moment. A container that cannot
//! sleep becomes drowsy when its time for that has come, and is tried again from there.

use std::time::{Duration, Instant};

use dormouse_container::{Idle, Policy, Tier};

/// LIMIT: longest time without a retry after a refusal.
const LEFT_ALONE_MAX: Duration = Duration::from_secs(3600);
/// A sleep has to last so many times its cost, so at most one twentieth of the time is spent on it.
const WORTH: u32 = 20;
/// Timers that may wait use at most one part in so many of the time.
const TIMERS_SHARE: u32 = 1000;

/// State of one watched container.
#[derive(Debug)]
pub(crate) struct Watch {
    policy: Policy,
    /// The last reading, and the time of the first equal one.
    used_ns: u64,
    still_since: Instant,
    /// CPU time used at that time.
    still_ns: u64,
    pause: Duration,
    /// Time of the next reading.
    pub(crate) due: Instant,
    /// A job for it is running.
    pub(crate) is_falling: bool,
    /// Duration of the last suspend, by tier.
    took: [Duration; 2],
    refusals: u32,
    /// Hash of the last reported reason why it cannot sleep.
    reported: u64,
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
            reported: 0,
        };
        watch.pause = watch.after() / 8;
        watch.due = now + watch.pause;
        watch
    }

    /// Returns the next tier and the idle time until it.
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

    /// Restarts the timing after a start, a wake or a change; the measured durations are kept.
    pub(crate) fn begin_again(&mut self, now: Instant, policy: Policy, used_ns: u64) {
        let (took, reported, is_falling) = (self.took, self.reported, self.is_falling);
        *self = Self { took, reported, is_falling, ..Self::new(now, policy, used_ns) };
    }

    /// Records a reading. Returns a tier if the container is to enter it now; sets `due` in either
    /// case.
    pub(crate) fn look(&mut self, now: Instant, used_ns: u64) -> Option<(Tier, Idle)> {
        let after = self.after();
        let is_still = used_ns == self.used_ns || self.timers_only(now, used_ns);
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
        // A container whose timers expired has run since.
        let quiet = match used_ns == self.still_ns {
            true => now - self.still_since,
            false => Duration::ZERO,
        };
        self.due = now + after;
        let (tier, _) = self.goal()?;
        let worth = after.max(self.took[tier as usize] * WORTH);
        Some((tier, Idle { quiet, used_ns, worth }))
    }

    /// Returns whether all CPU time used since is within the share of timers that may wait.
    fn timers_only(&self, now: Instant, used_ns: u64) -> bool {
        let used = Duration::from_nanos(used_ns.saturating_sub(self.still_ns));
        self.policy.timers_wait && used * TIMERS_SHARE <= now - self.still_since
    }

    /// Records a completed suspend. The next reading finds no cgroup, or a woken container.
    pub(crate) fn slept(&mut self, now: Instant, took: Duration) {
        self.took[Tier::Asleep as usize] = took;
        self.refusals = 0;
        self.due = now + self.after();
    }

    /// Records whether the container is drowsy; a failed suspend may have thawed it.
    pub(crate) fn is_drowsy(&mut self, is_drowsy: bool) {
        self.policy.is_drowsy = is_drowsy;
    }

    /// Records that the container is drowsy: its CPU time does not change from now on.
    pub(crate) fn drowsed(&mut self, now: Instant, took: Duration, used_ns: u64) {
        self.took[Tier::Drowsy as usize] = took;
        (self.policy.is_drowsy, self.used_ns, self.still_ns) = (true, used_ns, used_ns);
        let alone = match self.refusals {
            0 => Duration::ZERO,
            refusals => self.left_alone(refusals),
        };
        self.due = (self.still_since + self.after()).max(now + alone);
    }

    /// Records that the container ran just before it was to be suspended.
    pub(crate) fn ran(&mut self, now: Instant) {
        if self.policy.timers_wait {
            self.due = now + self.pause; // run by a timer, or else the next reading shows activity
            return;
        }
        self.still_since = now;
        self.due = now + self.pause;
    }

    /// Records a refusal. Returns whether the reason is new and is to be reported.
    pub(crate) fn refused(&mut self, now: Instant, why: &str, tier: Tier) -> bool {
        self.refusals = self.refusals.saturating_add(1);
        self.due = now + self.left_alone(self.refusals);
        // A container that cannot sleep becomes drowsy in its time.
        if tier == Tier::Asleep && self.goal().is_some_and(|(goal, _)| goal == Tier::Drowsy) {
            self.due = now.max(self.still_since + self.after());
        }
        let hash = hash(why);
        std::mem::replace(&mut self.reported, hash) != hash
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

    /// A policy with the tier `Asleep` alone.
    fn sleeps(after: Duration) -> Policy {
        Policy { asleep: Some(after), ..Policy::default() }
    }

    /// Reads the container whenever it is due until it is to sleep; `used` returns the CPU time by
    /// then.
    fn follow(
        watch: &mut Watch,
        begin: Instant,
        used: impl Fn(Duration) -> u64,
    ) -> (u32, Duration) {
        for looks in 1..1000 {
            let now = watch.due;
            if let Some((Tier::Asleep, idle)) = watch.look(now, used(now - begin)) {
                // With timers that may wait the container has run since.
                let least = if watch.policy.timers_wait { Duration::ZERO } else { T };
                assert!(idle.quiet >= least && idle.quiet <= now - begin);
                return (looks, now - begin);
            }
            assert!(watch.due > now, "time goes on");
        }
        panic!("it never falls asleep");
    }

    #[test]
    fn idle_container_sleeps_after_its_time_and_two_readings() {
        let begin = Instant::now();
        let mut watch = Watch::new(begin, sleeps(T), 5);
        assert_eq!(follow(&mut watch, begin, |_| 5), (2, T));
    }

    #[test]
    fn container_sleeps_soon_after_its_activity_ends() {
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
    fn active_container_is_read_twice_per_idle_time_and_never_sleeps() {
        let begin = Instant::now();
        let mut watch = Watch::new(begin, sleeps(T), 0);
        let mut looks = 0;
        while watch.due < begin + T * 100 {
            let now = watch.due;
            // One moment of activity per second.
            assert!(watch.look(now, (now - begin).as_secs() + 1).is_none());
            looks += 1;
        }
        assert!((200..=205).contains(&looks), "{looks}");
    }

    #[test]
    fn timers_that_may_wait_do_not_prevent_sleep_but_activity_does() {
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
    fn refused_container_is_retried_ever_later_and_reported_once() {
        let mut now = Instant::now();
        let mut watch = Watch::new(now, sleeps(T), 0);
        let mut alone = Vec::new();
        for round in 0..8 {
            assert_eq!(watch.refused(now, "it has a debugger", Tier::Asleep), round == 0);
            alone.push((watch.due - now).as_secs());
            now = watch.due;
        }
        assert_eq!(alone, [16, 32, 64, 128, 256, 512, 512, 512]);
        assert!(watch.refused(now, "it has two", Tier::Asleep), "a new reason is reported");
        watch.begin_again(now, sleeps(T), 0);
        assert!(!watch.refused(now, "it has two", Tier::Asleep), "and not again after a start");
        assert_eq!(watch.due - now, T * 2);
        let mut slow = Watch::new(now, sleeps(Duration::from_secs(7200)), 0);
        slow.refused(now, "x", Tier::Asleep);
        assert_eq!(slow.due - now, Duration::from_secs(7200), "never sooner than its time");
    }

    #[test]
    fn sleep_must_outlast_its_cost() {
        let now = Instant::now();
        let mut watch = Watch::new(now, sleeps(T), 0);
        assert_eq!(watch.look(now + T, 0).unwrap().1.worth, T);
        watch.slept(now, Duration::from_secs(2));
        watch.begin_again(now, sleeps(T), 0);
        assert_eq!(watch.look(now + T, 0).unwrap().1.worth, Duration::from_secs(40));
    }

    #[test]
    fn run_at_the_last_moment_restarts_the_idle_time() {
        let now = Instant::now();
        let mut watch = Watch::new(now, sleeps(T), 0);
        assert!(watch.look(now + T, 0).is_some());
        watch.ran(now + T);
        assert!(watch.due > now + T);
        assert!(watch.look(watch.due, 0).is_none());
        assert_eq!(watch.due, now + T * 2);
    }

    #[test]
    fn container_becomes_drowsy_and_then_sleeps_on_the_same_clock() {
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
        // A wake restarts the timing.
        watch.begin_again(begin, policy, 9);
        assert_eq!(watch.look(begin + T, 9).unwrap().0, Tier::Drowsy);
    }

    #[test]
    fn container_that_cannot_sleep_becomes_drowsy_and_is_retried_from_there() {
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
        // With the tier `Drowsy` alone there is no next tier.
        let policy = Policy { drowsy: Some(T), ..Policy::default() };
        let mut watch = Watch::new(begin, policy, 5);
        watch.drowsed(begin + T, Duration::ZERO, 6);
        assert!(watch.look(watch.due, 6).is_none() || watch.goal().is_none());
    }
}
