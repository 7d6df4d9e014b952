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

use std::time::{Duration, Instant};

use dormouse_container::Idle;

/// LIMIT: how long one that cannot sleep is left alone.
const LEFT_ALONE_MAX: Duration = Duration::from_secs(3600);
/// How many times its cost a sleep has to last: one twentieth of the time goes into it at most.
const WORTH: u32 = 20;

/// What is known of one container.
#[derive(Debug)]
pub(crate) struct Watch {
    after: Duration,
    /// What the last look found, and the first look that found it.
    used_ns: u64,
    still_since: Instant,
    pause: Duration,
    /// When it is looked at next.
    pub(crate) due: Instant,
    /// It is falling asleep.
    pub(crate) is_falling: bool,
    /// How long that took last time.
    took: Duration,
    refusals: u32,
    /// What was told last of why it cannot, as a hash.
    told: u64,
}

impl Watch {
    pub(crate) fn new(now: Instant, after: Duration, used_ns: u64) -> Self {
        let pause = after / 8;
        Self {
            after,
            used_ns,
            still_since: now,
            pause,
            due: now + pause,
            is_falling: false,
            took: Duration::ZERO,
            refusals: 0,
            told: 0,
        }
    }

    /// It was started, woken or changed: all begins anew but for what it has taught.
    pub(crate) fn begin_again(&mut self, now: Instant, after: Duration, used_ns: u64) {
        let (took, told, is_falling) = (self.took, self.told, self.is_falling);
        *self = Self { took, told, is_falling, ..Self::new(now, after, used_ns) };
    }

    /// Takes note of a look. What comes back is to fall asleep; `due` is set either way.
    pub(crate) fn look(&mut self, now: Instant, used_ns: u64) -> Option<Idle> {
        if used_ns != self.used_ns {
            self.used_ns = used_ns;
            self.still_since = now;
            self.due = now + self.pause;
            self.pause = (self.pause * 2).min(self.after / 2);
            return None;
        }
        self.pause = self.after / 8;
        self.due = self.still_since + self.after;
        if self.due > now {
            return None;
        }
        let quiet = now - self.still_since;
        self.due = now + self.after;
        Some(Idle { quiet, used_ns, worth: self.after.max(self.took * WORTH) })
    }

    /// It has fallen asleep. The next look finds that it has no cgroup; or it was woken by then.
    pub(crate) fn slept(&mut self, now: Instant, took: Duration) {
        (self.took, self.refusals) = (took, 0);
        self.due = now + self.after;
    }

    /// It has run just when it was to fall asleep.
    pub(crate) fn ran(&mut self, now: Instant) {
        self.still_since = now;
        self.due = now + self.pause;
    }

    /// It cannot sleep. Whether that is to be told: the same is told once.
    pub(crate) fn refused(&mut self, now: Instant, why: &str) -> bool {
        self.refusals = self.refusals.saturating_add(1);
        let alone = self.after.saturating_mul(1 << self.refusals.min(6));
        self.due = now + alone.min(LEFT_ALONE_MAX).max(self.after);
        let hash = hash(why);
        std::mem::replace(&mut self.told, hash) != hash
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

    /// Looks at it whenever it is due until it falls asleep; `used` tells what it has used by then.
    fn follow(
        watch: &mut Watch,
        begin: Instant,
        used: impl Fn(Duration) -> u64,
    ) -> (u32, Duration) {
        for looks in 1..1000 {
            let now = watch.due;
            if let Some(idle) = watch.look(now, used(now - begin)) {
                assert!(idle.quiet >= T && idle.quiet <= now - begin);
                return (looks, now - begin);
            }
            assert!(watch.due > now, "time goes on");
        }
        panic!("it never falls asleep");
    }

    #[test]
    fn one_that_does_nothing_falls_asleep_after_its_time_and_two_looks() {
        let begin = Instant::now();
        let mut watch = Watch::new(begin, T, 5);
        assert_eq!(follow(&mut watch, begin, |_| 5), (2, T));
    }

    #[test]
    fn one_that_stops_working_falls_asleep_soon_after_its_time() {
        let begin = Instant::now();
        for stops in [1, 100, 999, 5_000, 60_000] {
            let stops = Duration::from_millis(stops);
            let mut watch = Watch::new(begin, T, 0);
            let (_, slept) = follow(&mut watch, begin, |at| at.min(stops).as_nanos() as u64);
            let idle = slept - stops;
            assert!(idle >= T && idle <= T * 3 / 2, "{stops:?}: {idle:?}");
        }
    }

    #[test]
    fn one_that_works_is_looked_at_twice_in_its_time_and_never_falls_asleep() {
        let begin = Instant::now();
        let mut watch = Watch::new(begin, T, 0);
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
    fn one_that_cannot_sleep_is_left_alone_longer_and_longer_and_told_of_once() {
        let mut now = Instant::now();
        let mut watch = Watch::new(now, T, 0);
        let mut alone = Vec::new();
        for round in 0..8 {
            assert_eq!(watch.refused(now, "it has a debugger"), round == 0);
            alone.push((watch.due - now).as_secs());
            now = watch.due;
        }
        assert_eq!(alone, [16, 32, 64, 128, 256, 512, 512, 512]);
        assert!(watch.refused(now, "it has two"), "what is new is told");
        watch.begin_again(now, T, 0);
        assert!(!watch.refused(now, "it has two"), "and not again after a start");
        assert_eq!(watch.due - now, T * 2);
        let mut slow = Watch::new(now, Duration::from_secs(7200), 0);
        slow.refused(now, "x");
        assert_eq!(slow.due - now, Duration::from_secs(7200), "never sooner than its time");
    }

    #[test]
    fn a_sleep_has_to_be_worth_what_it_costs() {
        let now = Instant::now();
        let mut watch = Watch::new(now, T, 0);
        assert_eq!(watch.look(now + T, 0).unwrap().worth, T);
        watch.slept(now, Duration::from_secs(2));
        watch.begin_again(now, T, 0);
        assert_eq!(watch.look(now + T, 0).unwrap().worth, Duration::from_secs(40));
    }

    #[test]
    fn one_that_ran_at_the_last_moment_waits_for_its_time_again() {
        let now = Instant::now();
        let mut watch = Watch::new(now, T, 0);
        assert!(watch.look(now + T, 0).is_some());
        watch.ran(now + T);
        assert!(watch.due > now + T);
        assert!(watch.look(watch.due, 0).is_none());
        assert_eq!(watch.due, now + T * 2);
    }
}
