//! The starts of containers, and the nursery that they need.
//!
//! The *nursery* is a process `NURSERY...` that makes parts of containers ahead (spares), and gives them to commands
//! that start containers. The keeper starts it behind the answer to a second start within a second, as its child, and
//! knows no more of it. Its newborns are those of any client. It exits by itself, or at the end of its standard input.

use std::time::{Duration, Instant};

/// Two starts within this time need a nursery.
const WITHIN: Duration = Duration::from_secs(1);

/// LIMIT: the longest time from one nursery to the next, where none of them has made a spare: the containers that come
/// and go here are of no kind that is made ahead.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The last starts of clients.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    /// The last one, and whether there was another one shortly before it.
    last: Option<(Instant, bool)>,
    /// The last nursery.
    nursery: Option<Begun>,
}

#[derive(Debug)]
struct Begun {
    at: Instant,
    pid: Option<u32>,
    /// It has made a spare, or was killed and might have.
    is_useful: bool,
    /// The time to the next one, if it is of no use.
    pause: Duration,
}

impl Begun {
    fn pause(&self) -> Duration {
        if self.is_useful { WITHIN } else { self.pause }
    }
}

impl Starts {
    /// Notes a start.
    pub(crate) fn note(&mut self, now: Instant) {
        let is_second = self.last.is_some_and(|(before, _)| now < before + WITHIN);
        self.last = Some((now, is_second));
    }

    /// Returns whether a nursery is to be started now, where there is none.
    ///
    /// LIMIT: one that exits at once is not started for each container. The next of those that are of no use comes
    /// after twice the time of the last one.
    pub(crate) fn want_nursery(&mut self, now: Instant) -> bool {
        let come_and_go = self.last.is_some_and(|(at, is_second)| is_second && now < at + WITHIN);
        let may = |begun: &Begun| begun.at + begun.pause() <= now;
        let is_wanted = come_and_go && self.nursery.as_ref().is_none_or(may);
        if is_wanted {
            let pause = match &self.nursery {
                Some(last) if !last.is_useful => (last.pause * 2).min(PAUSE_MAX),
                _ => WITHIN,
            };
            self.nursery = Some(Begun { at: now, pid: None, is_useful: false, pause });
        }
        is_wanted
    }

    /// Notes the process of the nursery.
    pub(crate) fn begun(&mut self, pid: Option<u32>) {
        if let Some(nursery) = &mut self.nursery {
            nursery.pid = pid;
        }
    }

    /// Notes a birth for a process, or that it was killed: if it is the nursery, that was of use.
    pub(crate) fn note_use(&mut self, pid: u32) {
        if let Some(nursery) = self.nursery.as_mut().filter(|it| it.pid == Some(pid)) {
            nursery.is_useful = true;
        }
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

    #[test]
    fn nurseries_of_no_use_are_rare() {
        let begin = Instant::now();
        let mut starts = Starts::default();
        let mut numbers = [0, 0];
        for (phase, number) in numbers.iter_mut().enumerate() {
            // Two starts each second, for 200 seconds.
            for n in 0..400_u64 {
                let now = begin + Duration::from_millis(n * 500 + phase as u64 * 200_000);
                starts.note(now);
                if starts.want_nursery(now) {
                    *number += 1;
                    starts.begun(Some(7));
                    starts.note_use(8);
                    if phase == 1 {
                        starts.note_use(7);
                    }
                }
            }
        }
        let [useless, useful] = numbers;
        assert!((6..=9).contains(&useless), "{useless}");
        assert!(useful > 100, "{useful}");
    }
}
