//! The starts of containers, and the nursery that they need.
//!
//! The *nursery* is a process `NURSERY...` that makes parts of containers ahead (spares), and gives them to commands
//! that start containers. The keeper starts it behind the answer to a second start within a second, as its child, and
//! knows no more of it. Its newborns are those of any client. It exits by itself, or at the end of its standard input.

use std::time::{Duration, Instant};

/// Two starts within this time need a nursery.
const WITHIN: Duration = Duration::from_secs(1);

/// The last starts of clients.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    /// The last one, and whether there was another one shortly before it.
    last: Option<(Instant, bool)>,
    /// When a nursery was started last.
    nursery: Option<Instant>,
}

impl Starts {
    /// Notes a start.
    pub(crate) fn note(&mut self, now: Instant) {
        let is_second = self.last.is_some_and(|(before, _)| now < before + WITHIN);
        self.last = Some((now, is_second));
    }

    /// Returns whether a nursery is to be started now, where there is none.
    ///
    /// LIMIT: one that exits at once is not started for each container.
    pub(crate) fn want_nursery(&mut self, now: Instant) -> bool {
        let come_and_go = self.last.is_some_and(|(at, is_second)| is_second && now < at + WITHIN);
        let is_wanted = come_and_go && self.nursery.is_none_or(|at| at + WITHIN <= now);
        if is_wanted {
            self.nursery = Some(now);
        }
        is_wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nursery_is_wanted_after_a_second_start_and_once_a_second() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut starts = Starts::default();
        assert!(!starts.want_nursery(at(0)));
        starts.note(at(0));
        assert!(!starts.want_nursery(at(10)), "a single one");
        starts.note(at(1500));
        assert!(!starts.want_nursery(at(1510)), "too late for a second one");
        starts.note(at(1600));
        assert!(starts.want_nursery(at(1610)));
        starts.note(at(1700));
        assert!(!starts.want_nursery(at(1710)), "the last one has exited at once");
        assert!(starts.want_nursery(at(2650)));
        assert!(!starts.want_nursery(at(4000)), "none was started since");
    }
}
