//! When all children are asked whether they have ended.
//!
//! SIGCHLD names one child, and while it is pending those of others are lost (signal(7)): after each
//! the kernel must be asked for any child. It goes through all of them then (wait4(2)), a tenth of a
//! microsecond for each, which is a millisecond where ten thousand containers run. So the one that is
//! named is reaped at once, and for the others no more than a [`SHARE`]th of the time is spent.

use std::time::{Duration, Instant};

/// One part in so many of the time goes into asking, at most.
const SHARE: u32 = 20;

/// No longer than this is waited: asking takes long where we were kept from the processor, too.
const WAIT_MAX: Duration = Duration::from_millis(200);

/// Whether a child may have ended of which no signal tells, and when that is found out.
#[derive(Debug)]
pub struct Sweep {
    is_asked: bool,
    not_before: Instant,
}

impl Sweep {
    /// Nothing is to be found out, and from `now` on it may be.
    pub fn new(now: Instant) -> Self {
        Self { is_asked: false, not_before: now }
    }

    /// A signal has come.
    pub fn ask(&mut self) {
        self.is_asked = true;
    }

    /// When all children are to be asked: it may be past.
    pub fn next(&self) -> Option<Instant> {
        self.is_asked.then_some(self.not_before)
    }

    /// All were asked, from `begun` to `ended`, and none has ended any more.
    pub fn done(&mut self, begun: Instant, ended: Instant) {
        *self = Self::new(ended + WAIT_MAX.min((ended - begun) * SHARE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_asked_at_once_and_again_when_that_has_not_cost_too_much() {
        let begun = Instant::now();
        let mut sweep = Sweep::new(begun);
        assert_eq!(sweep.next(), None);
        sweep.ask();
        assert_eq!(sweep.next(), Some(begun));

        let ended = begun + Duration::from_millis(1);
        sweep.done(begun, ended);
        assert_eq!(sweep.next(), None);
        sweep.ask();
        assert_eq!(sweep.next(), Some(ended + Duration::from_millis(20)));
        sweep.ask();
        assert_eq!(sweep.next(), Some(ended + Duration::from_millis(20)));

        let ended = begun + Duration::from_secs(60);
        sweep.done(begun, ended);
        sweep.ask();
        assert_eq!(sweep.next(), Some(ended + WAIT_MAX));
    }
}
