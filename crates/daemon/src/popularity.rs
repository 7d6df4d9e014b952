//! Popularity of a container: the rate at which it is used, in uses per second.
//!
//! At each reading the old value is multiplied by `e^(-t/20 s)`, and one use is added if the container has run since
//! the last reading. The expected time until the next use is therefore one over the popularity.
//!
//! Pure computation: this module reads no file.

use std::time::{Duration, Instant};

/// Time after which a use counts 1/e.
const FADES: Duration = Duration::from_secs(20);

/// Returns the popularity after a time without use.
pub(crate) fn faded(popularity: f64, time: Duration) -> f64 {
    popularity * (-time.as_secs_f64() / FADES.as_secs_f64()).exp()
}

/// Popularity that one use adds.
pub(crate) fn use_once() -> f64 {
    1.0 / FADES.as_secs_f64()
}

/// The use of a container, by readings of its CPU time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    popularity: f64,
    used_ns: u64,
    looked: Instant,
    /// Time of the first reading with the same CPU time as the last one.
    still_since: Instant,
}

impl Use {
    /// A container that was just found.
    pub(crate) fn new(now: Instant, used_ns: u64) -> Self {
        Self { popularity: use_once(), used_ns, looked: now, still_since: now }
    }

    /// Takes a reading.
    pub(crate) fn look(&mut self, now: Instant, used_ns: u64) {
        self.popularity = faded(self.popularity, now.saturating_duration_since(self.looked));
        self.looked = now;
        if self.used_ns != used_ns {
            (self.used_ns, self.still_since) = (used_ns, now);
            self.popularity += use_once();
        }
    }

    /// The popularity at the last reading.
    pub(crate) fn popularity(self) -> f64 {
        self.popularity
    }

    /// For how long it had not run at the last reading.
    pub(crate) fn quiet(self) -> Duration {
        self.looked.saturating_duration_since(self.still_since)
    }

    /// Its CPU time at the last reading.
    pub(crate) fn used_ns(self) -> u64 {
        self.used_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_count_and_fade() {
        let start = Instant::now();
        let (mut busy, mut idle) = (Use::new(start, 1), Use::new(start, 1));
        for n in 1..=10 {
            let now = start + Duration::from_secs(n);
            busy.look(now, n + 1);
            idle.look(now, 1);
        }
        assert!(busy.popularity() > 10.0 * idle.popularity(), "{busy:?} {idle:?}");
        assert_eq!((busy.quiet().as_secs(), idle.quiet().as_secs()), (0, 10));
        assert_eq!((busy.used_ns(), idle.used_ns()), (11, 1));
        idle.look(start + Duration::from_secs(60), 1);
        assert!(idle.popularity() < use_once() / 10.0, "{idle:?}");
    }
}
