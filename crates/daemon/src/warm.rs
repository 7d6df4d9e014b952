//! Warm sleepers: the room that gives them up.
//!
//! The worker that has put a container to sleep keeps it warm ([`dormouse_container::Engine::keep_if_called_often`]).
//! This room looks at all of them once a second while there are some, and gives up those that have slept for
//! [`KEPT`], those beyond the bound of the settings, and those whose configuration or surroundings have changed. All
//! are given up while memory is short or reserved, and when another room has a container give memory. A worker of its
//! own does it, one container after the other: the end of a mount may wait for the disk.
//!
//! **Killed.** Warm sleepers stay until their wake, or until a daemon runs again.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use dormouse_container::{Engine, Reason, Request, WARM_KEPT as KEPT, Warm};
use dormouse_model::ContainerId;

use crate::error::Result;
use crate::room::{Job, Notice, Room};
use crate::work::Work;

/// Interval of looks while there are warm sleepers.
const LOOKS: Duration = Duration::from_secs(1);

/// The room of warm sleepers.
pub(crate) struct WarmRoom {
    engine: Rc<Engine>,
    /// Its own worker, whose jobs concern no other room.
    work: Work,
    /// Time of the next look; `None` while there are no warm sleepers.
    next: Option<Instant>,
    /// To be given up, the last one first.
    surplus: Vec<ContainerId>,
    is_working: bool,
    /// Another room has a container give memory.
    is_short: bool,
}

impl WarmRoom {
    /// Begins with those of an earlier daemon.
    pub(crate) fn begin(engine: Rc<Engine>) -> Result<Self> {
        let work = Work::new(engine.internal("sleep")?);
        let next = Some(Instant::now());
        Ok(Self { engine, work, next, surplus: Vec::new(), is_working: false, is_short: false })
    }

    fn look(&mut self, now: Instant) {
        let all = self.engine.warm();
        self.next = (!all.is_empty()).then_some(now + LOOKS);
        let is_short = std::mem::take(&mut self.is_short);
        let most = if is_short || all.is_empty() { 0 } else { self.engine.warm_most() };
        self.surplus = surplus(all, most, SystemTime::now());
    }

    /// Has the next one given up.
    fn work(&mut self, now: Instant) {
        if self.is_working {
            return;
        }
        if let Some(id) = self.surplus.pop() {
            let job = Job { id, asked: Request::Cool, idle: None, why: Reason::Memory };
            self.work.notice(now, &Notice::Wanted(job));
            self.is_working = true;
        }
    }
}

/// Returns those that are to be given up, the one that has slept longest last. `all` are sorted by that.
fn surplus(all: Vec<Warm>, most: usize, now: SystemTime) -> Vec<ContainerId> {
    let beyond = all.len().saturating_sub(most);
    let is_over = |warm: &Warm| {
        // A clock that was set back leaves a time of the future.
        !warm.is_fit || now.duration_since(warm.since).map_or(true, |slept| slept >= KEPT)
    };
    let goes = all.into_iter().enumerate().filter(|(at, warm)| *at < beyond || is_over(warm));
    let mut ids: Vec<ContainerId> = goes.map(|(_, warm)| warm.id).collect();
    ids.reverse();
    ids
}

impl Room for WarmRoom {
    fn name(&self) -> &'static str {
        "warm sleepers"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.work.fds()
    }

    fn due(&self) -> Option<Instant> {
        self.next.into_iter().chain(self.work.due()).min()
    }

    fn turn(&mut self, now: Instant, ready: &[bool]) -> Result<Vec<Notice>> {
        let ended = self.work.turn(now, ready)?;
        self.is_working &= ended.is_empty();
        if self.next.is_some_and(|next| next <= now) {
            self.look(now);
        }
        self.work(now);
        Ok(Vec::new())
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        match notice {
            // A container may have fallen asleep, and is kept warm behind that.
            Notice::Events => self.next = self.next.or(Some(now + LOOKS)),
            Notice::Wanted(Job {
                why: Reason::Memory | Reason::Shortage | Reason::Evicted,
                ..
            }) => {
                self.is_short = true;
                self.next = Some(now);
            }
            Notice::Wanted(_) | Notice::Ended(_) | Notice::MaySleep(..) => {}
        }
    }

    fn end(self: Box<Self>) {
        Box::new(self.work).end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_beyond_bound_and_time_and_outdated_ones_are_given_up() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let id = |n: u8| ContainerId::from_bytes([n; 16]);
        let warm = |n: u8, ago_s: u64, is_fit| Warm {
            id: id(n),
            since: now - Duration::from_secs(ago_s),
            is_fit,
        };
        let all =
            || vec![warm(1, 601, true), warm(2, 500, true), warm(3, 9, false), warm(4, 1, true)];
        let given_up = |most| surplus(all(), most, now);
        assert_eq!(given_up(4), [id(3), id(1)], "the longest asleep is the first to go");
        assert_eq!(given_up(2), [id(3), id(2), id(1)]);
        assert_eq!(given_up(0), [id(4), id(3), id(2), id(1)]);
        let future = Warm { since: now + Duration::from_secs(5), ..warm(5, 0, true) };
        assert_eq!(surplus(vec![future], 8, now), [id(5)]);
    }
}
