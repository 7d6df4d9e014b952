//! Wake-up times of sleeping containers: when a timer of the container would have expired, it is
//! woken without a connection.
//!
//! An expired alarm expires again a second later, until the descriptors of its container are
//! released. During a wake, and until a failed one may be tried again, it has no effect.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use dormouse_launch::protocol::Id;

/// Time until an expired alarm expires again.
const AGAIN: Duration = Duration::from_secs(1);

/// The alarms of all sleeping containers, one each at most.
#[derive(Debug, Default)]
pub(crate) struct Alarms {
    /// Expiry time, and a number that makes it unique.
    of: HashMap<Id, (Instant, u64)>,
    /// The containers by expiry, soonest first.
    due: BTreeMap<(Instant, u64), Id>,
    number: u64,
}

impl Alarms {
    /// Sets the alarm of a container, in the place of one before.
    pub(crate) fn set(&mut self, id: Id, at: Instant) {
        self.number += 1;
        let alarm = (at, self.number);
        if let Some(before) = self.of.insert(id, alarm) {
            self.due.remove(&before);
        }
        self.due.insert(alarm, id);
    }

    /// Removes the alarm of a container.
    pub(crate) fn let_go(&mut self, id: Id) {
        if let Some(alarm) = self.of.remove(&id) {
            self.due.remove(&alarm);
        }
    }

    /// Returns the expiry time of the first alarm.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }

    /// Returns a container with an expired alarm, and sets the alarm again for later.
    pub(crate) fn rung(&mut self, now: Instant) -> Option<Id> {
        let id = *self.due.first_key_value().filter(|((at, _), _)| *at <= now)?.1;
        self.set(id, now + AGAIN);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soonest_alarm_expires_first_and_repeats_until_it_is_removed() {
        let id = |text: &str| Id::new(text.as_bytes()).unwrap();
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        let mut alarms = Alarms::default();
        for (name, s) in [("b", 20), ("a", 10), ("c", 10), ("b", 30)] {
            alarms.set(id(name), at(s));
        }
        assert_eq!(alarms.next(), Some(at(10)));
        assert_eq!(alarms.rung(at(9)), None);
        assert_eq!(alarms.rung(at(10)), Some(id("a")));
        assert_eq!(alarms.rung(at(10)), Some(id("c")));
        assert_eq!(alarms.rung(at(10)), None);
        alarms.let_go(id("a"));
        assert_eq!(alarms.rung(at(11)), Some(id("c")), "it has not been woken");
        alarms.let_go(id("c"));
        assert_eq!(alarms.next(), Some(at(30)), "the one before was at 20");
        alarms.let_go(id("b"));
        alarms.let_go(id("b"));
        assert_eq!(alarms.next(), None);
    }
}
