//! When all children are checked for an exit.
//!
//! SIGCHLD names one child, and while it is pending those of others are lost (signal(7)). After
//! each signal all children must therefore be checked with wait4(2), which visits all of them: a
//! tenth of a microsecond each, a millisecond for ten thousand containers. So the named child is
//! reaped at once, and at most a [`SHARE`]th of the time is spent on the others.

use std::time::{Duration, Instant};

/// At most one part in so many of the time is spent on the checks.
const SHARE: u32 = 20;

/// Longest delay: a check also takes long if this process was preempted.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// The time of the next check for children that exited without a signal.
#[derive(Debug)]
pub struct Sweep {
    is_requested: bool,
    not_before: Instant,
}

impl Sweep {
    /// Returns a state without a pending check; checks are allowed from `now` on.
    pub fn new(now: Instant) -> Self {
        Self { is_requested: false, not_before: now }
    }

    /// A signal has come.
    pub fn request(&mut self) {
        self.is_requested = true;
    }

    /// Time of the next check; it may be past.
    pub fn next(&self) -> Option<Instant> {
        self.is_requested.then_some(self.not_before)
    }

    /// Records a check of all children from `begun` to `ended` that found no more exits.
    pub fn done(&mut self, begun: Instant, ended: Instant) {
        *self = Self::new(ended + WAIT_MAX.min((ended - begun) * SHARE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_checked_at_once_and_then_in_proportion_to_the_cost() {
        let begun = Instant::now();
        let mut sweep = Sweep::new(begun);
        assert_eq!(sweep.next(), None);
        sweep.request();
        assert_eq!(sweep.next(), Some(begun));

        let ended = begun + Duration::from_millis(1);
        sweep.done(begun, ended);
        assert_eq!(sweep.next(), None);
        sweep.request();
        assert_eq!(sweep.next(), Some(ended + Duration::from_millis(20)));
        sweep.request();
        assert_eq!(sweep.next(), Some(ended + Duration::from_millis(20)));

        let ended = begun + Duration::from_secs(60);
        sweep.done(begun, ended);
        sweep.request();
        assert_eq!(sweep.next(), Some(ended + WAIT_MAX));
    }
}
