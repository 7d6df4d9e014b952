//! When all children are asked whether they have ended.
//!
//! SIGCHLD names one child, and while it is pending those of others are lost (signal(7)): after each
//! the kernel must be asked for any child. It goes through all of them then (wait4(2)), a tenth of a
//! microsecond for each, which is a millisecond where ten thousand containers run. So the one that is
//! named is reaped at once, and for the others no more than a [`SHARE`]th of the time is spent.

use std::time::Instant;

/// One part in so many of the time goes into asking, at most.
const SHARE: u32 = 20;

/// Whether a child may have ended of which no signal tells, and when that is found out.
#[derive(Debug, Default)]
pub struct Sweep {
    is_asked: bool,
    /// Not before then.
    not_before: Option<Instant>,
}

impl Sweep {
    /// A signal has come.
    pub fn ask(&mut self) {
        self.is_asked = true;
    }

    /// When all children are to be asked: it may be long past.
    pub fn next(&self) -> Option<Instant> {
        self.is_asked.then(|| self.not_before.unwrap_or_else(Instant::now))
    }

    /// All were asked, from `begun` to `ended`, and none has ended any more.
    pub fn done(&mut self, begun: Instant, ended: Instant) {
        *self = Self { is_asked: false, not_before: Some(ended + (ended - begun) * SHARE) };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn all_are_asked_at_once_and_again_when_that_has_not_cost_too_much() {
        let mut sweep = Sweep::default();
        assert_eq!(sweep.next(), None);
        sweep.ask();
        assert!(sweep.next().is_some_and(|next| next <= Instant::now()));

        let begun = Instant::now();
        let ended = begun + Duration::from_millis(1);
        sweep.done(begun, ended);
        assert_eq!(sweep.next(), None);
        sweep.ask();
        assert_eq!(sweep.next(), Some(ended + Duration::from_millis(20)));
        sweep.ask();
        assert_eq!(sweep.next(), Some(ended + Duration::from_millis(20)));
    }
}
