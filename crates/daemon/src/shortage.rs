//! Containers at the brink of their memory (`--oom sleep`): the room that puts them to sleep.
//!
//! [`dormouse_model::Brink`] has the decision, a worker puts the container to sleep as it is
//! ([`dormouse_container::Reason::Shortage`]). The memory of each such container is read ten times a second, and fifty
//! times while it is near its brink; with many of them seldom enough for a twentieth of one processor. Without such a
//! container the room does not tick. On cgroup v2 the kernel slows a watched container down at its brink.
//!
//! **Refused.** A container that cannot sleep continues, and the event `awake` has the reason. It is slowed down no
//! longer, and tried again after a second, two, four and so on, and not before fifty times as long as a long try
//! took. The kernel ends one of its processes when it has used all of its memory.
//!
//! **Killed.** Containers of v2 stay slowed down at their brink until a daemon runs again, or they have another
//! `--oom`. A sleep in progress is finished by its worker.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_api::EventKind;
use dormouse_container::{Engine, Outcome, Reason, Request, Tier};
use dormouse_kernel::cgroup::{Charged, MemoryCharged};
use dormouse_model::{Brink, ContainerId};

use crate::error::Result;
use crate::notify::say;
use crate::room::{Done, Job, Notice, Room, cpu_time};

/// Time between readings.
const LOOKS: Duration = Duration::from_millis(100);
/// The same while a container is near its brink.
const LOOKS_NEAR: Duration = Duration::from_millis(20);
/// Readings take at most one part in so many of the time.
const LOOKS_SHARE: u32 = 20;
/// LIMIT: containers that are put to sleep at once.
const JOBS_MAX: usize = 4;
/// The first and the longest pause after a refusal.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));
/// A try that takes longer than this, with a trial restore, takes at most one part in so many of the time.
const TRIES: (Duration, u32) = (Duration::from_secs(3), 50);

/// A running container that is to sleep for want of memory.
#[derive(Debug)]
struct Watched {
    brink: Brink,
    /// Time of the next reading.
    due: Instant,
    /// When its job began, while one runs.
    falls_since: Option<Instant>,
    /// The next try, and the pause before it, after a refusal.
    later: Option<(Instant, Duration)>,
    /// The reason of the last refusal that was reported.
    reported: String,
}

impl Watched {
    fn new(now: Instant, brink: Brink) -> Self {
        Self { brink, due: now, falls_since: None, later: None, reported: String::new() }
    }

    /// Takes a reading. Returns whether the container is to sleep now.
    fn look(&mut self, now: Instant, charged: Charged) -> bool {
        let is_near = self.brink.is_near(charged.bytes);
        self.due = now + if is_near { LOOKS_NEAR } else { LOOKS };
        let Charged { bytes, cache_bytes, swap_left_bytes } = charged;
        is_near
            && self.falls_since.is_none()
            && self.later.is_none_or(|(next, _)| next <= now)
            && self.brink.is_reached(bytes, cache_bytes, swap_left_bytes)
    }

    /// Forgets refusals of a container that has room. Returns whether there were some.
    fn recover(&mut self, charged: Charged) -> bool {
        if self.brink.is_near(charged.bytes) {
            return false;
        }
        self.reported = String::new();
        self.later.take().is_some()
    }

    /// Takes a refusal. Returns whether its reason is new.
    fn refused(&mut self, now: Instant, why: &str) -> bool {
        let took = self.falls_since.take().map_or(Duration::ZERO, |since| now - since);
        let pause = self.later.map_or(PAUSES.0, |(_, last)| last * 2);
        let share = if took < TRIES.0 { Duration::ZERO } else { took * TRIES.1 };
        let pause = pause.max(share).min(PAUSES.1);
        self.later = Some((now + pause, pause));
        let is_new = self.reported != why;
        self.reported = why.to_owned();
        is_new
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
    /// No reading before this time.
    not_before: Instant,
    /// Running jobs of this room.
    jobs: usize,
}

impl Shortages {
    /// Begins with no container: those that run are found by the room of idle containers. `None` without a memory
    /// controller.
    pub(crate) fn begin(engine: Rc<Engine>) -> Result<Option<Self>> {
        let charged = MemoryCharged::below(&engine.places().cgroup)?;
        let room = |charged| {
            let (watched, new, not_before) = (BTreeMap::new(), Vec::new(), Instant::now());
            Self { engine, charged, watched, new, not_before, jobs: 0 }
        };
        Ok(charged.map(room))
    }

    /// Reads the settings of containers after an event.
    fn consider(&mut self, now: Instant) {
        for id in std::mem::take(&mut self.new) {
            let config = self.engine.config(&id).ok();
            let Some(brink) = config.and_then(|it| it.spec.oom.brink(&it.spec.limits)) else {
                if self.watched.remove(&id).is_some() {
                    self.run_free(&id);
                }
                continue;
            };
            let watched = self.watched.entry(id.clone());
            let watched = watched.or_insert_with(|| Watched::new(now, brink));
            if watched.brink != brink {
                let falls_since = watched.falls_since;
                *watched = Watched { falls_since, ..Watched::new(now, brink) };
            }
            // It is tried again after an event. Its cgroup may be a new one.
            watched.later = None;
            slow_down(&self.charged, &id, Some(brink.bytes));
        }
    }

    /// Has the kernel no longer slow a container down, but at a limit of its own.
    fn run_free(&self, id: &ContainerId) {
        let config = self.engine.config(id).ok();
        slow_down(&self.charged, id, config.and_then(|it| it.spec.limits.memory_high_bytes));
    }

    /// Reads the containers that are due. Returns a job for each that is to sleep.
    fn look(&mut self, now: Instant) -> Vec<Notice> {
        let began = cpu_time();
        let (mut jobs, charged, running) = (Vec::new(), &self.charged, self.jobs);
        self.watched.retain(|id, watched| {
            if watched.due > now {
                return true;
            }
            let brink = watched.brink;
            let read = match charged.of(id.as_str(), |bytes| brink.is_near(bytes)) {
                Ok(Some(read)) => read,
                // Without its cgroup it sleeps or has ended. Its next start is an event.
                Ok(None) => {
                    watched.due = now + LOOKS;
                    return watched.falls_since.is_some();
                }
                Err(e) => {
                    say(&format!("{}: {e}", id.short()));
                    watched.due = now + LOOKS;
                    return true;
                }
            };
            if watched.recover(read) {
                slow_down(charged, id, Some(brink.bytes));
            }
            if watched.look(now, read) && running + jobs.len() < JOBS_MAX {
                let (asked, why) = (Request::Suspend(Tier::Asleep), Reason::Shortage);
                jobs.push(Notice::Wanted(Job { id: id.clone(), asked, idle: None, why }));
            }
            true
        });
        self.not_before = Instant::now() + cpu_time().saturating_sub(began) * LOOKS_SHARE;
        jobs
    }

    /// Takes the outcome of a job.
    fn ended(&mut self, now: Instant, Done { id, why: reason, fell, .. }: &Done) {
        self.jobs = self.jobs.saturating_sub(usize::from(*reason == Reason::Shortage));
        let Some(watched) = self.watched.get_mut(id) else { return };
        match fell {
            Outcome::Awake { why } if *reason == Reason::Shortage => {
                let is_new = watched.refused(now, why);
                self.run_free(id);
                if let (true, Ok(config)) = (is_new, self.engine.config(id)) {
                    let why = [("reason", why.clone())];
                    self.engine.record(EventKind::Awake, id.as_str(), config.name.as_str(), &why);
                }
            }
            // It has room again, or is in another state for a moment.
            Outcome::Ran | Outcome::Gone if *reason == Reason::Shortage => {
                watched.falls_since = None;
                watched.due = now + LOOKS;
            }
            // The next reading finds no cgroup, or that of a container that was woken meanwhile.
            _ => watched.falls_since = None,
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
        let next = self.watched.values().map(|watched| watched.due).min();
        let new = self.new.first().map(|_| self.not_before);
        next.map(|next| next.max(self.not_before)).into_iter().chain(new).min()
    }

    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        self.consider(now);
        Ok(self.look(now))
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        match notice {
            Notice::MaySleep(id, _) => self.new.push(id.clone()),
            Notice::Wanted(job) => {
                self.jobs += usize::from(job.why == Reason::Shortage);
                if let Some(watched) = self.watched.get_mut(&job.id) {
                    watched.falls_since = Some(now);
                }
            }
            Notice::Ended(done) => self.ended(now, done),
            Notice::Events => {}
        }
    }

    fn end(self: Box<Self>) {
        self.watched.keys().for_each(|id| self.run_free(id));
    }
}

fn slow_down(charged: &MemoryCharged, id: &ContainerId, above_bytes: Option<u64>) {
    if let Err(e) = charged.slow_down(id.as_str(), above_bytes) {
        say(&format!("{}: {e}", id.short()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;
    const FULL: Charged = Charged { bytes: 490 * MB, cache_bytes: 0, swap_left_bytes: 0 };
    const HALF: Charged = Charged { bytes: 256 * MB, cache_bytes: 0, swap_left_bytes: 0 };

    #[test]
    fn refused_container_is_tried_again_ever_later_and_reported_once() {
        let mut now = Instant::now();
        let mut watched = Watched::new(now, Brink::of(512 * MB));
        let mut pauses = Vec::new();
        for round in 0..12 {
            assert!(watched.look(now, FULL));
            watched.falls_since = Some(now);
            assert!(!watched.look(now, FULL), "one job at a time");
            assert_eq!(watched.refused(now, "it has a debugger"), round == 0);
            let (next, pause) = watched.later.expect("a pause");
            assert!(!watched.look(next - Duration::from_millis(1), FULL));
            pauses.push(pause.as_secs());
            now = next;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]);
        assert!(watched.refused(now, "it has two"), "another reason is reported");
        assert!(!watched.recover(FULL) && watched.recover(HALF) && !watched.recover(HALF));
        assert!(watched.look(now, FULL), "it had room meanwhile");
        assert!(watched.refused(now, "it has two"), "and is reported again");
    }

    #[test]
    fn try_that_takes_long_is_not_repeated_soon() {
        let now = Instant::now();
        let mut watched = Watched::new(now, Brink::of(512 * MB));
        watched.falls_since = Some(now);
        watched.refused(now + Duration::from_secs(3), "its restore cannot be tried");
        assert_eq!(watched.later.map(|(_, pause)| pause.as_secs()), Some(150));
    }

    #[test]
    fn container_is_read_more_often_near_its_brink() {
        let now = Instant::now();
        let mut watched = Watched::new(now, Brink::of(512 * MB));
        assert!(!watched.look(now, HALF));
        assert_eq!(watched.due, now + LOOKS);
        let near = Charged { bytes: 400 * MB, ..FULL };
        assert!(!watched.look(now, near));
        assert_eq!(watched.due, now + LOOKS_NEAR);
    }
}
