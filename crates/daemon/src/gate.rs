//! Admission control: a wake waits here until there is memory for the container.
//!
//! Waiters are served in the order of their arrival times minus a bonus for CPU weight. Later ones
//! wait behind the first, however little memory they need, so no waiter starves. Doubling
//! `--cpu-weight` counts as arriving 0.25 s earlier; the range of weights bounds the bonus to some
//! seconds. For the first waiters, idle containers have their pages pushed out to swap or are
//! suspended ([`crate::budget`] chooses them), by the same worker processes that suspend idle ones.
//!
//! **Polling.** A container with a directory below `RUN/c` is awake. Three small files are read for
//! each: its CPU time and its memory. They are read ten times a second while memory is short, and
//! more often while a client waits, but never for more than a hundredth of the time (a tenth while
//! a client waits). Otherwise it is a thousandth of the time, and one file is read every two
//! seconds for the memory of all containers together.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_container::{
    Answer, Engine, Gate as Door, Outcome, Reason, Received, WAIT_INTERVAL, Waker,
};
use dormouse_kernel::cgroup::{CpuTime, MemoryInUse};
use dormouse_kernel::swap;
use dormouse_model::ContainerId;

use crate::budget::{Budget, Choice, Need, PATIENCE};
use crate::error::Result;
use crate::notify::say;
use crate::room::{Done, Job, Notice, Room};
use crate::settings::{Batch, Reclaim};

/// Polling intervals for the containers that are awake: normally, while memory is short, and while
/// a client waits.
const LOOKS: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_millis(100), Duration::from_millis(5)];
/// At least so many times the duration of a poll passes before the next one.
const LOOK_SHARES: [u32; 3] = [1000, 100, 10];
/// Interval at which the memory of all containers together is read.
const GLANCES: Duration = Duration::from_secs(2);
/// The bonus for twice the CPU weight, as an earlier arrival time.
const TWICE: Duration = Duration::from_millis(250);
/// The default weight (cgroups(7)).
const WEIGHT: f64 = 100.0;
/// Time after which a long wait is logged.
const LONG: Duration = Duration::from_secs(2);

/// A connected client that wakes a container.
#[derive(Debug)]
struct Client {
    waker: Waker,
    /// The container to wake, once the client has sent its id.
    id: Option<ContainerId>,
    is_admitted: bool,
    since: Instant,
    /// Position in the queue: the arrival time minus the bonus for CPU weight.
    place: Instant,
    notified: Instant,
}

/// Returns the position of a client that arrives now for a container with this weight.
fn place(now: Instant, weight: Option<u32>) -> Instant {
    let doublings = weight.map_or(0.0, |weight| (f64::from(weight) / WEIGHT).log2());
    let ahead = TWICE.mul_f64(doublings.abs());
    match doublings < 0.0 {
        true => now + ahead,
        false => now.checked_sub(ahead).unwrap_or(now),
    }
}

/// The room of admission control.
#[derive(Debug)]
pub(crate) struct Gate {
    engine: Rc<Engine>,
    cpu: Rc<CpuTime>,
    door: Door,
    memory: MemoryInUse,
    budget: Budget,
    /// Number of waiters to free memory for at once, and of containers to suspend for them at once.
    batch: usize,
    /// Push idle pages to swap before suspending containers.
    swaps: bool,
    /// Clients in queue order.
    clients: Vec<Client>,
    looked: Instant,
    look_took: Duration,
    glanced: Instant,
    /// A notice has changed the budget since the last turn.
    is_changed: bool,
    /// All containers together take so much that memory is short.
    is_tight: bool,
    /// Time since when the budget is exceeded while no client waits.
    over_since: Option<Instant>,
    /// The last container whose long wait was logged.
    logged_for: Option<ContainerId>,
}

impl Gate {
    /// Starts admission control with a budget of `limit_bytes`.
    pub(crate) fn open(
        engine: Rc<Engine>,
        cpu: Rc<CpuTime>,
        memory: MemoryInUse,
        limit_bytes: u64,
        (batch, reclaim): (Batch, Reclaim),
    ) -> Result<Self> {
        Ok(Self {
            door: Door::open(engine.places())?,
            engine,
            cpu,
            memory,
            budget: Budget::of(limit_bytes),
            batch: batch.count(),
            swaps: reclaim == Reclaim::Swap,
            clients: Vec::new(),
            looked: Instant::now(),
            look_took: Duration::ZERO,
            glanced: Instant::now(),
            is_changed: false,
            is_tight: true,
            over_since: None,
            logged_for: None,
        })
    }

    fn waiting(&self) -> impl Iterator<Item = (&Client, &ContainerId)> {
        let waits = |it: &&Client| !it.is_admitted;
        self.clients.iter().filter(waits).filter_map(|it| Some((it, it.id.as_ref()?)))
    }

    fn next_look(&self) -> Instant {
        let is_tight = self.is_tight || self.budget.is_tight_with(self.budget.taken_bytes());
        let is_wanted = self.waiting().next().is_some() || self.over_since.is_some();
        let haste = match (is_wanted, is_tight) {
            (true, _) => 2,
            (false, true) => 1,
            (false, false) => 0,
        };
        self.looked + LOOKS[haste].max(self.look_took * LOOK_SHARES[haste])
    }

    /// Handles arriving and departing clients.
    fn receive(&mut self, now: Instant) {
        let engine = &self.engine;
        while let Some(waker) = self.door.accept() {
            let (id, is_admitted, since) = (None, false, now);
            let client = Client { waker, id, is_admitted, since, place: now, notified: now };
            self.clients.push(client);
        }
        let budget = &mut self.budget;
        self.clients.retain_mut(|client| match client.waker.receive() {
            Received::Nothing => true,
            Received::Wakes(id) => {
                let config = engine.config(&id).ok();
                client.place = place(client.since, config.and_then(|it| it.spec.limits.cpu_weight));
                client.id = Some(id);
                true
            }
            Received::Gone => {
                if let Some(id) = client.id.as_ref().filter(|_| client.is_admitted) {
                    budget.arrived(now, id);
                }
                false
            }
        });
        self.clients.sort_by_key(|client| client.place);
    }

    /// Reads the memory in use, if a reading is due.
    fn read(&mut self, now: Instant) {
        if self.glanced + GLANCES <= now {
            self.glanced = now;
            let all = self.memory.of_all();
            self.is_tight = all.is_ok_and(|all| self.budget.is_tight_with(all.bytes));
        }
        if self.next_look() <= now {
            self.look(now);
        }
    }

    /// Reads the CPU time and the memory of all containers that are awake.
    fn look(&mut self, now: Instant) {
        let (engine, cpu) = (&*self.engine, &*self.cpu);
        let Ok(mut ids) = engine.started() else { return };
        // They have cgroups, and no memory of their programs.
        let warm = engine.warm_ids();
        ids.retain(|id| !warm.contains(id));
        for id in &ids {
            let used_ns = cpu.of(id.as_str()).ok().flatten();
            let in_use = self.memory.of(id.as_str()).ok().flatten();
            if let (Some(used_ns), Some(in_use)) = (used_ns, in_use) {
                self.budget.look(now, id, used_ns, in_use, || may_sleep(engine, id));
            }
        }
        if self.swaps {
            let areas = swap::areas().unwrap_or_default();
            let free = |area: &swap::Area| area.bytes.saturating_sub(area.used_bytes);
            self.budget.has_swap(areas.iter().map(free).sum());
        }
        let there: HashSet<&ContainerId> = ids.iter().collect();
        self.budget.only(now, |id| there.contains(id));
        (self.looked, self.look_took) = (Instant::now(), now.elapsed());
    }

    /// ORDER: in queue order; a waiter that does not fit blocks those behind it.
    fn admit(&mut self, now: Instant) {
        let engine = &*self.engine;
        for client in self.clients.iter_mut().filter(|client| !client.is_admitted) {
            let Some(id) = &client.id else { continue };
            // A container that is being suspended now finishes that first.
            if self.budget.is_leaving(id) {
                break;
            }
            let bytes = self.budget.needs(id, || engine.asleep_bytes(id));
            if !self.budget.knows(id) && !self.budget.has_room(now, bytes) {
                break;
            }
            client.is_admitted = true;
            client.waker.send(Answer::Go);
            self.budget.admit(now, id.clone(), may_sleep(engine, id), bytes);
        }
        for client in
            self.clients.iter_mut().filter(|client| !client.is_admitted && client.id.is_some())
        {
            if now - client.notified >= WAIT_INTERVAL {
                client.waker.send(Answer::Wait);
                client.notified = now;
            }
        }
    }

    /// Chooses the containers that are to give memory.
    fn choose(&mut self, now: Instant) -> Vec<Choice> {
        let engine = Rc::clone(&self.engine);
        let first = self.waiting().next().map(|(client, id)| (client.since, id.clone()));
        let is_over = self.budget.taken_bytes() > self.budget.limit_bytes();
        self.over_since = is_over.then(|| self.over_since.unwrap_or(now));
        let Some((since, id)) = first else {
            // A container has grown, was started, or was awake before the daemon started.
            let need = match self.over_since {
                None => Need::Ahead,
                Some(since) if now - since < PATIENCE => Need::Now,
                Some(_) => Need::Urgent,
            };
            return self.budget.choose(now, need, 0, self.batch);
        };
        let waits = now - since;
        if waits >= LONG && self.logged_for.as_ref() != Some(&id) {
            let (taken, all) = (self.budget.taken_bytes() >> 20, self.budget.limit_bytes() >> 20);
            say(&format!("{} waits for memory: {taken} of {all} MiB are in use", id.short()));
            self.logged_for = Some(id);
        }
        let needs = |id: &ContainerId| self.budget.needs(id, || engine.asleep_bytes(id));
        let wanted = self.waiting().take(self.batch).map(|(_, id)| needs(id)).sum();
        let need = if waits >= PATIENCE { Need::Urgent } else { Need::Now };
        self.budget.choose(now, need, wanted, self.batch)
    }
}

impl Room for Gate {
    fn name(&self) -> &'static str {
        "admission"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|it| it.waker.as_fd());
        std::iter::once(self.door.as_fd()).chain(clients).collect()
    }

    fn due(&self) -> Option<Instant> {
        if self.is_changed {
            return Some(self.looked);
        }
        let notices = self.waiting().map(|(client, _)| client.notified + WAIT_INTERVAL);
        Some(notices.fold(self.next_look().min(self.glanced + GLANCES), Instant::min))
    }

    /// Admits the wakes that fit, and requests jobs that free memory for those that do not.
    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        self.is_changed = false;
        self.receive(now);
        self.read(now);
        self.admit(now);
        let job = |Choice { id, asked, idle }| Job { id, asked, idle, why: Reason::Memory };
        Ok(self.choose(now).into_iter().map(job).map(Notice::Wanted).collect())
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        match notice {
            Notice::Events => return,
            Notice::MaySleep(id, may_sleep) => self.budget.may_sleep(id, *may_sleep),
            Notice::Wanted(job) => self.budget.leaves(&job.id),
            Notice::Ended(Done { id, fell, .. }) => match fell {
                Outcome::Asleep { .. } | Outcome::Gone => self.budget.left(now, id.clone()),
                Outcome::Swapped { bytes } => self.budget.pushed_out(now, id, *bytes),
                Outcome::Ran | Outcome::Began | Outcome::Drowsy { .. } => {
                    self.budget.stays(now, id, false);
                }
                Outcome::Awake { .. } => self.budget.stays(now, id, true),
            },
        }
        self.is_changed = true;
    }
}

/// Returns whether the container may be suspended: `--sleep-after` is set.
fn may_sleep(engine: &Engine, id: &ContainerId) -> bool {
    engine.config(id).is_ok_and(|config| config.spec.sleep.after().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_the_weight_counts_as_a_quarter_second_earlier() {
        let now = Instant::now() + Duration::from_secs(60);
        let later = |ms| now + Duration::from_millis(ms);
        assert_eq!(place(now, None), now);
        assert_eq!(place(now, Some(100)), now, "the default weight");
        assert!(place(later(200), Some(200)) < place(now, None));
        assert!(place(later(300), Some(200)) > place(now, None), "the bonus is bounded");
        assert!(place(now, Some(50)) > place(later(200), None));
        assert!(place(now, Some(50)) < place(later(300), None));
        let most = Duration::from_secs(2);
        assert!(place(now, Some(10_000)) > now - most && place(now, Some(1)) < now + most);
    }
}
