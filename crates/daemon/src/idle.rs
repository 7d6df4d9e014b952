//! Automatic sleep: the room that finds idle containers and requests their suspension.
//!
//! [`crate::watch`] holds when each container is read. This room follows the events, keeps the
//! queue of due times, and reads CPU times.
//!
//! **Missed events.** Events are lines of a file that is followed with inotify(7). A full disk
//! loses some. Therefore all awake containers are checked every ten minutes, as at the start.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_api::EventKind;
use dormouse_container::{Engine, Error as EngineError, Follow, Outcome, Reason, Request};
use dormouse_kernel::cgroup::CpuTime;
use dormouse_model::ContainerId;
use rustix::fs::inotify;

use crate::error::Result;
use crate::notify::say;
use crate::room::{Done, Job, Notice, Room};
use crate::watch::Watch;

/// Interval at which all awake containers are checked.
const ROUND_EVERY: Duration = Duration::from_secs(600);
/// Number of them per turn, which bounds the delay for a client that wakes one.
const ROUND_AT_ONCE: usize = 32;
/// Interval at which events are read without inotify.
const LOOK: Duration = Duration::from_secs(1);

/// The room of automatic sleep.
pub(crate) struct IdleRoom {
    engine: Rc<Engine>,
    cpu: Rc<CpuTime>,
    /// inotify descriptor of the events; None if the kernel refused one.
    changes: Option<OwnedFd>,
    events: Follow,
    /// Time of the last reading of events.
    read: Instant,
    watches: HashMap<ContainerId, Watch>,
    /// Due times, the soonest first. An entry whose time differs from its watch's is outdated.
    queue: BinaryHeap<Reverse<(Instant, ContainerId)>>,
    /// Number of running jobs of the whole daemon, and the number from which on no idle container
    /// is read.
    jobs: usize,
    jobs_max: usize,
    next_round: Instant,
    /// The containers that are still to be checked in this round.
    round: Vec<ContainerId>,
    /// Notices of this turn. A failed turn leaves them to the next one.
    notices: Vec<Notice>,
}

impl IdleRoom {
    /// Starts to follow the events, and checks all awake containers.
    pub(crate) fn begin(engine: Rc<Engine>, cpu: Rc<CpuTime>) -> Result<Self> {
        // ORDER: events are followed first, then all containers are checked, so none is missed.
        let changes = changes(&engine).inspect_err(|e| say(&format!("polls for events: {e}"))).ok();
        let events = engine.follow()?;
        let now = Instant::now();
        let mut room = Self {
            engine,
            cpu,
            changes,
            events,
            read: now,
            watches: HashMap::new(),
            queue: BinaryHeap::new(),
            jobs: 0,
            // Half of the jobs wait for the disk or for processes to exit.
            jobs_max: std::thread::available_parallelism().map_or(4, |n| (n.get() * 2).clamp(4, 8)),
            next_round: now,
            round: Vec::new(),
            notices: Vec::new(),
        };
        room.start_round(now)?;
        while !room.round.is_empty() {
            room.continue_round();
        }
        Ok(room)
    }

    /// Begins to check the settings of all awake containers.
    fn start_round(&mut self, now: Instant) -> Result<()> {
        self.next_round = now + ROUND_EVERY;
        self.round = self.engine.started()?;
        Ok(())
    }

    /// Checks the next of them.
    fn continue_round(&mut self) {
        let rest = self.round.len().saturating_sub(ROUND_AT_ONCE);
        for id in self.round.split_off(rest) {
            if !self.watches.contains_key(&id) {
                self.consider(id);
            }
        }
    }

    /// Reads a container's settings after an event.
    fn consider(&mut self, id: ContainerId) {
        let policy = match self.engine.policy(&id) {
            Ok(policy) => policy,
            Err(EngineError::NoContainer(_)) => None,
            Err(e) => {
                say(&format!("{}: {e}", id.short()));
                None
            }
        };
        let may_sleep = policy.is_some_and(|policy| policy.asleep.is_some());
        self.notices.push(Notice::MaySleep(id.clone(), may_sleep));
        let Some(policy) = policy else {
            self.watches.remove(&id);
            return;
        };
        // A container that has no cgroup yet has used nothing.
        let used_ns = self.cpu.of(id.as_str()).ok().flatten().unwrap_or(0);
        let now = Instant::now();
        let watch = self.watches.entry(id.clone());
        let watch = watch.or_insert_with(|| Watch::new(now, policy, used_ns));
        watch.begin_again(now, policy, used_ns);
        self.queue.push(Reverse((watch.due, id)));
    }

    /// Reads the containers whose time has come, as long as there are workers for them.
    fn read_due(&mut self, now: Instant) {
        let mut wanted = 0;
        while self.jobs + wanted < self.jobs_max
            && self.queue.peek().is_some_and(|Reverse((due, _))| *due <= now)
            && let Some(Reverse((due, id))) = self.queue.pop()
        {
            let is_current = |w: &Watch| w.due == due && !w.is_falling;
            if self.watches.get(&id).is_some_and(is_current)
                && let Some(job) = self.look(id, now)
            {
                self.notices.push(Notice::Wanted(job));
                wanted += 1;
            }
        }
    }

    /// Reads a container. Returns the job if the container is idle.
    fn look(&mut self, id: ContainerId, now: Instant) -> Option<Job> {
        match self.cpu.of(id.as_str()) {
            Ok(None) => {
                // The container sleeps, has ended, or is just being started.
                self.consider(id);
                None
            }
            Ok(Some(used_ns)) => {
                let watch = self.watches.get_mut(&id)?;
                let (tier, idle) = match watch.look(now, used_ns) {
                    Some(found) => found,
                    None => {
                        self.queue.push(Reverse((watch.due, id)));
                        return None;
                    }
                };
                self.queue.push(Reverse((watch.due, id.clone())));
                watch.is_falling = true;
                Some(Job { id, asked: Request::Suspend(tier), idle: Some(idle), why: Reason::Idle })
            }
            Err(e) => {
                say(&format!("{}: {e}", id.short()));
                self.watches.remove(&id);
                None
            }
        }
    }

    /// Takes the outcome of a job.
    fn ended(&mut self, now: Instant, Done { id, asked, why: reason, fell }: &Done) {
        // The reading before the job is outdated; the container was frozen meanwhile.
        let used_ns = self.cpu.of(id.as_str()).ok().flatten();
        let policy = self.engine.policy(id).ok().flatten();
        let Some(watch) = self.watches.get_mut(id) else { return };
        watch.is_falling = false;
        if let Some(policy) = policy {
            watch.is_drowsy(policy.is_drowsy);
        }
        match fell {
            Outcome::Asleep { took_us } => watch.slept(now, Duration::from_micros(*took_us)),
            Outcome::Drowsy { took_us } => {
                watch.drowsed(now, Duration::from_micros(*took_us), used_ns.unwrap_or(0));
            }
            Outcome::Gone => return self.consider(id.clone()),
            Outcome::Ran | Outcome::Began => watch.ran(now),
            Outcome::Swapped { .. } => {} // still as idle as before
            Outcome::Awake { why } => {
                // Admission control tries before the idle time is over; the idle timer may still
                // try later.
                if *reason == Reason::Idle
                    && let Request::Suspend(tier) = *asked
                    && watch.refused(now, why, tier)
                    && let Ok(config) = self.engine.config(id)
                {
                    let reason = [("reason", why.clone())];
                    self.engine.record(
                        EventKind::Awake,
                        id.as_str(),
                        config.name.as_str(),
                        &reason,
                    );
                }
            }
        }
        self.queue.push(Reverse((watch.due, id.clone())));
    }

    /// Reads the new events.
    fn read_events(&mut self, now: Instant) -> Result<()> {
        self.read = now;
        if let Some(changes) = &self.changes {
            let mut bytes = [0; 4096];
            while matches!(rustix::io::read(changes, &mut bytes), Ok(n) if n > 0) {}
        }
        self.notices.push(Notice::Events);
        while let Some(event) = self.events.next_event()? {
            if begins(&event.kind)
                && let Ok(id) = event.id.parse()
            {
                self.consider(id);
            }
        }
        Ok(())
    }

    /// Time of the next reading of events without inotify.
    fn next_read(&self) -> Option<Instant> {
        self.changes.is_none().then(|| self.read + LOOK)
    }
}

impl Room for IdleRoom {
    fn name(&self) -> &'static str {
        "idle containers"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.changes.iter().map(AsFd::as_fd).collect()
    }

    fn due(&self) -> Option<Instant> {
        if !self.round.is_empty() || !self.notices.is_empty() {
            return Some(self.read); // at once
        }
        let next = self.queue.peek().filter(|_| self.jobs < self.jobs_max);
        let next = next.map(|Reverse((due, _))| *due);
        next.into_iter().chain(self.next_read()).chain([self.next_round]).min()
    }

    fn turn(&mut self, now: Instant, ready: &[bool]) -> Result<Vec<Notice>> {
        if ready.contains(&true) || self.next_read().is_some_and(|when| when <= now) {
            // Missed events are made up for by a full round.
            let round = self.next_round.min(now + LOOK);
            self.read_events(now).inspect_err(|_| self.next_round = round)?;
        }
        if self.next_round <= now {
            self.start_round(now)?;
        }
        self.continue_round();
        self.read_due(now);
        Ok(std::mem::take(&mut self.notices))
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        match notice {
            Notice::Wanted(job) => {
                self.jobs += 1;
                if let Some(watch) = self.watches.get_mut(&job.id) {
                    watch.is_falling = true;
                }
            }
            Notice::Ended(done) => {
                self.jobs = self.jobs.saturating_sub(1);
                self.ended(now, done);
            }
            Notice::Events | Notice::MaySleep(..) => {}
        }
    }
}

/// Returns whether a container may have begun to run, or has other settings, after such an event.
fn begins(kind: &EventKind) -> bool {
    use EventKind::{Restart, Restore, Start, Unpause, Update, Wake};
    matches!(kind, Start | Restore | Wake | Unpause | Update | Restart)
}

/// Returns an inotify descriptor that becomes readable when the file of events changes.
fn changes(engine: &Engine) -> rustix::io::Result<OwnedFd> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let inotify_fd = inotify::init(flags)?;
    let changes =
        inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&inotify_fd, engine.places().lib.as_path(), changes)?;
    Ok(inotify_fd)
}
