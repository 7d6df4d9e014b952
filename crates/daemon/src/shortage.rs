//! Containers at the brink of their memory (`--oom sleep`): the room that puts them to sleep.
//!
//! [`dormouse_model::Brink`] has the decision, a worker puts the container to sleep as it is
//! ([`dormouse_container::Reason::Shortage`]). The memory of each such container is read ten times a second, and fifty
//! times while one of them is near its brink. Without such a container the room does not tick.
//!
//! **Refused.** A container that cannot sleep continues, and the event `awake` has the reason. It is tried again after
//! a second, two, four and so on. The kernel ends one of its processes when it has used all of its memory.
//!
//! **Killed.** No setting of this room is left behind. A sleep in progress is finished by its worker.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_api::EventKind;
use dormouse_container::{Engine, Outcome, Reason, Request, Tier};
use dormouse_kernel::cgroup::MemoryCharged;
use dormouse_model::{Brink, ContainerId};

use crate::error::Result;
use crate::room::{Done, Job, Notice, Room};

/// Time between readings.
const LOOKS: Duration = Duration::from_millis(100);
/// The same while a container is near its brink.
const LOOKS_NEAR: Duration = Duration::from_millis(20);
/// The first and the longest pause after a refusal.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A running container that is to sleep for want of memory.
#[derive(Debug)]
struct Watched {
    brink: Brink,
    is_near: bool,
    /// A job for it is running.
    is_falling: bool,
    /// The next try, and the pause before it, after a refusal.
    later: Option<(Instant, Duration)>,
}

impl Watched {
    fn new(brink: Brink) -> Self {
        Self { brink, is_near: false, is_falling: false, later: None }
    }

    fn may_fall(&self, now: Instant) -> bool {
        !self.is_falling && self.later.is_none_or(|(next, _)| next <= now)
    }

    fn refused(&mut self, now: Instant) {
        let pause = self.later.map_or(PAUSES.0, |(_, last)| (last * 2).min(PAUSES.1));
        (self.is_falling, self.later) = (false, Some((now + pause, pause)));
    }
}

/// The room of containers that are short of memory.
#[derive(Debug)]
pub(crate) struct Shortages {
    engine: Rc<Engine>,
    charged: MemoryCharged,
    watched: BTreeMap<ContainerId, Watched>,
    /// Containers that have begun to run, or have other settings.
    new: Vec<ContainerId>,
    looked: Instant,
}

impl Shortages {
    /// Begins with no container: those that run are found by the room of idle containers. `None` without a memory
    /// controller.
    pub(crate) fn begin(engine: Rc<Engine>) -> Result<Option<Self>> {
        let charged = MemoryCharged::below(&engine.places().cgroup)?;
        let room = |charged| {
            let (watched, new, looked) = (BTreeMap::new(), Vec::new(), Instant::now());
            Self { engine, charged, watched, new, looked }
        };
        Ok(charged.map(room))
    }

    /// Reads the settings of containers after an event.
    fn consider(&mut self) {
        for id in std::mem::take(&mut self.new) {
            let brink =
                self.engine.config(&id).ok().and_then(|it| it.spec.oom.brink(&it.spec.limits));
            match brink {
                None => drop(self.watched.remove(&id)),
                Some(brink) => match self.watched.get_mut(&id) {
                    Some(watched) if watched.brink == brink => {}
                    Some(watched) => (watched.brink, watched.later) = (brink, None),
                    None => drop(self.watched.insert(id, Watched::new(brink))),
                },
            }
        }
    }

    /// Reads the memory of all of them. Returns the jobs for those that are to sleep.
    fn look(&mut self, now: Instant) -> Vec<Notice> {
        self.looked = now;
        let (mut jobs, charged) = (Vec::new(), &self.charged);
        self.watched.retain(|id, watched| {
            let brink = watched.brink;
            // Without its cgroup it sleeps or has ended. Its next start is an event.
            let Ok(Some(now_charged)) = charged.of(id.as_str(), |bytes| brink.is_near(bytes))
            else {
                return watched.is_falling;
            };
            watched.is_near = brink.is_near(now_charged.bytes);
            let is_reached =
                watched.is_near && brink.is_reached(now_charged.bytes, now_charged.cache_bytes);
            if is_reached && watched.may_fall(now) {
                let (asked, why) = (Request::Suspend(Tier::Asleep), Reason::Shortage);
                jobs.push(Notice::Wanted(Job { id: id.clone(), asked, idle: None, why }));
            }
            true
        });
        jobs
    }

    /// Takes the outcome of a job.
    fn ended(&mut self, now: Instant, Done { id, why: reason, fell, .. }: &Done) {
        let Some(watched) = self.watched.get_mut(id) else { return };
        watched.is_falling = false;
        if *reason != Reason::Shortage {
            return;
        }
        match fell {
            Outcome::Asleep { .. } | Outcome::Gone => drop(self.watched.remove(id)),
            Outcome::Awake { why } => {
                let is_first = watched.later.is_none();
                watched.refused(now);
                if let (true, Ok(config)) = (is_first, self.engine.config(id)) {
                    let why = [("reason", why.clone())];
                    self.engine.record(EventKind::Awake, id.as_str(), config.name.as_str(), &why);
                }
            }
            Outcome::Ran | Outcome::Drowsy { .. } | Outcome::Swapped { .. } => watched.refused(now),
        }
    }
}

impl Room for Shortages {
    fn name(&self) -> &'static str {
        "containers short of memory"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        if !self.new.is_empty() {
            return Some(self.looked); // at once
        }
        let is_near = self.watched.values().any(|watched| watched.is_near);
        let every = if is_near { LOOKS_NEAR } else { LOOKS };
        (!self.watched.is_empty()).then(|| self.looked + every)
    }

    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        self.consider();
        Ok(self.look(now))
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        match notice {
            Notice::MaySleep(id, _) => self.new.push(id.clone()),
            Notice::Wanted(job) => {
                if let Some(watched) = self.watched.get_mut(&job.id) {
                    watched.is_falling = true;
                }
            }
            Notice::Ended(done) => self.ended(now, done),
            Notice::Events => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_container_is_tried_again_ever_later() {
        let mut watched = Watched::new(Brink::of(512 << 20));
        let mut now = Instant::now();
        assert!(watched.may_fall(now));
        let mut pauses = Vec::new();
        for _ in 0..8 {
            watched.is_falling = true;
            assert!(!watched.may_fall(now));
            watched.refused(now);
            let (next, pause) = watched.later.expect("a pause");
            assert!(!watched.may_fall(now) && watched.may_fall(next));
            pauses.push(pause.as_secs());
            now = next;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
