//! Contracts: the room that reads CPU times and changes CPU weights, and has the thread for guarantees of memory
//! ([`crate::shrink`]).
//!
//! [`dormouse_governor::cpu`] decides, this room reads and writes. Each tenth of a second it reads the CPU time of
//! the containers with a reservation through descriptors that stay open, and writes the weights that have changed
//! by more than a twentieth. The CPU time of the other containers is read each second, and five times a second
//! while a reservation gets too little.
//!
//! With `cpu-scheduler = "sched_ext"`, where the kernel has it, a scheduler of BPF programs keeps reservations: the
//! room loads it, and writes what is reserved when containers come, change and go. It governs no weights then. If the
//! kernel ends the scheduler, the room says why, and governs weights from the next tick on.
//!
//! While a container with a rate for idle hosts runs, the same tick reads its CPU time and the idle time of the host,
//! and changes its quota ([`crate::idle_rate`]).
//!
//! While gates are loaded, clients of shared services pay for their work ([`crate::debts`]), by the same weights.
//!
//! **Nothing to do.** Without gates and without a running container that has a reservation of CPU or a rate for idle
//! hosts the room has no due time but the round every ten minutes, as the other rooms: an idle host does not tick.
//! Guarantees of memory do not change that: on cgroup v2 the kernel keeps them, and on v1 the thread.
//!
//! **Killed.** The weights in the kernel stay, and the first command afterwards, or the next daemon, writes the
//! static ones (`RUN/governed` marks that they were changed). The next daemon begins with full buckets.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_container::{Engine, Scheduler};
use dormouse_governor::cpu::{
    self, Host, OTHERS_HUNGRY_MS, OTHERS_MS, Other, Readings, Reserved, State, TICK_MS,
};
use dormouse_kernel::cgroup::{self, CpuShare, CpuTime, Hierarchy};
use dormouse_model::{ContainerId, Cpu};

use crate::debts::Debts;
use crate::error::{Result, step};
use crate::idle_rate::IdleRates;
use crate::notify::say;
use crate::room::{Notice, Room};
use crate::shrink::Shrinker;

/// Time between decisions.
const TICK: Duration = Duration::from_millis(TICK_MS);
/// LIMIT: the time for which the end of the daemon waits for a limit of memory that is being written.
const MEMORY_ENDS_WITHIN: Duration = Duration::from_secs(2);
/// Time between looks whether the scheduler of containers still runs.
const LOOK: Duration = Duration::from_secs(1);
/// Interval of rounds, which make up for missed events.
const ROUND_EVERY: Duration = Duration::from_secs(600);

/// A running container with a reservation.
#[derive(Debug)]
struct Held {
    cpu: Cpu,
    share: CpuShare,
}

/// What keeps reservations.
#[derive(Debug, Default)]
enum Keeping {
    /// Weights, which this room governs.
    #[default]
    Weights,
    /// The same, although the settings ask for a scheduler: the kernel does not run it. It is tried again at this time.
    WeightsAgain(Option<Instant>),
    /// A scheduler of containers, at which the room looked at this time.
    Scheduler(Box<Scheduler>, Instant),
}

/// The room of contracts.
#[derive(Debug)]
pub(crate) struct Governor {
    engine: Rc<Engine>,
    time: Rc<CpuTime>,
    /// Opened with the first reservation.
    cgroups: Option<Hierarchy>,
    /// `RUN/governed` may be there.
    is_marked: bool,
    host: Host,
    held: BTreeMap<ContainerId, Held>,
    keeping: Keeping,
    /// Reservations that the scheduler has no room for.
    left_out: usize,
    /// Governs memory, on cgroup v1, from the first guarantee on.
    shrinker: Option<Shrinker>,
    state: State<ContainerId>,
    debts: Debts,
    rates: IdleRates,
    /// Containers may have come, changed or gone since the last round.
    is_outdated: bool,
    /// Time of the last round.
    round: Instant,
    /// Time of the last decision.
    decided: Instant,
    /// Time of the last reading of containers without a reservation; None before the first.
    others_read: Option<Instant>,
}

impl Governor {
    /// Begins with the containers that run.
    pub(crate) fn begin(engine: Rc<Engine>, time: Rc<CpuTime>) -> Self {
        let now = Instant::now();
        Self {
            engine,
            time,
            cgroups: None,
            is_marked: false,
            host: Host { cpus_milli: 1000, shares_max: 1 },
            held: BTreeMap::new(),
            keeping: Keeping::default(),
            left_out: 0,
            shrinker: None,
            state: State::default(),
            debts: Debts::new(now),
            rates: IdleRates::default(),
            is_outdated: true,
            round: now,
            decided: now,
            others_read: None,
        }
    }

    /// Finds the containers with a contract, and opens those that are new.
    fn find(&mut self, now: Instant) -> Result<()> {
        self.round = now;
        self.is_outdated = false;
        self.look_at_memory()?;
        self.choose(now)?;
        let reserved = self.engine.cpu_reservations()?;
        let has_debts = self.engine.charges_debts()? && !self.engine.started()?.is_empty();
        let rated = self.engine.cpu_idle_rates()?;
        if reserved.is_empty() && rated.is_empty() && !has_debts {
            self.schedule(&[])?;
            return self.rest();
        }
        if self.cgroups.is_none() {
            let opened = Hierarchy::open(&self.engine.places().cgroup)?;
            // ORDER: marked first: weights that a killed daemon has changed are always found.
            self.is_marked = true;
            self.engine.govern_cpu(true)?;
            self.decided = now;
            self.cgroups = Some(opened);
        }
        let Some(cgroups) = &self.cgroups else { return Ok(()) };
        self.host = Host {
            cpus_milli: cgroup::online_cpus()?.saturating_mul(1000),
            shares_max: cgroups.shares_max(),
        };
        let mut before = std::mem::take(&mut self.held);
        self.schedule(&reserved)?;
        let Some(cgroups) = &self.cgroups else { return Ok(()) };
        for (id, cpu) in reserved {
            // The cgroup of a container that slept is a new one.
            let kept =
                before.remove(&id).filter(|held| matches!(held.share.used_ns(), Ok(Some(_))));
            let share = match kept {
                Some(held) => Some(held.share),
                None => cgroups.cpu_share(id.as_str())?,
            };
            // A container that is just being started has no cgroup yet; its event comes later.
            if let Some(share) = share {
                self.held.insert(id, Held { cpu, share });
            }
        }
        // A start or an end has written static weights.
        self.state.forget_weights();
        let is_left = self.rates.find(cgroups, rated)?;
        if is_left || has_debts && !self.rates.raised().is_empty() {
            self.engine.give_back_debts()?;
            self.rates.given_back();
        }
        match has_debts && cgroups.has_cpu() {
            true => self.debts.find(&self.engine, cgroups, now),
            false => self.debts.stop(&self.engine),
        }
    }

    /// Begins or ends the scheduler, as the settings say now.
    fn choose(&mut self, now: Instant) -> Result<()> {
        if matches!(self.keeping, Keeping::WeightsAgain(Some(at)) if at <= now) {
            self.keeping = Keeping::Weights;
        }
        match (self.engine.wants_scheduler()?, &self.keeping) {
            (false, Keeping::Weights) => {}
            (true, Keeping::WeightsAgain(_) | Keeping::Scheduler(..)) => {}
            (false, _) => self.keeping = Keeping::Weights,
            (true, Keeping::Weights) => match self.engine.begin_scheduler() {
                Ok(scheduler) => {
                    if self.is_marked {
                        // Static weights are those to return to, and not governed ones.
                        self.engine.govern_cpu(false)?;
                        self.engine.govern_cpu(true)?;
                    }
                    say(
                        "all tasks of the host are scheduled by contracts of containers (sched_ext)",
                    );
                    self.keeping = Keeping::Scheduler(Box::new(scheduler), now);
                }
                Err(e) => self.go_back(&e.with_causes(), None),
            },
        }
        Ok(())
    }

    /// Has weights keep reservations, until the settings change, the daemon starts again, or that time has come.
    fn go_back(&mut self, why: &str, again: Option<Instant>) {
        say(&format!("cpu-scheduler: weights keep CPU reservations, and not sched_ext: {why}"));
        self.keeping = Keeping::WeightsAgain(again);
        self.state = State::default();
        self.others_read = None;
    }

    /// Writes the reservations for the scheduler.
    fn schedule(&mut self, reserved: &[(ContainerId, Cpu)]) -> Result<()> {
        let Keeping::Scheduler(scheduler, _) = &mut self.keeping else { return Ok(()) };
        let mut by_cgroup = BTreeMap::new();
        for (id, cpu) in reserved {
            // A container that is just being started has no cgroup yet; its event comes later.
            if let Some(cgroups) = &self.cgroups
                && let Some(cgroup) = cgroups.v2_id(id.as_str())?
            {
                by_cgroup.insert(cgroup, *cpu);
            }
        }
        let left_out = self.engine.schedule(scheduler, &by_cgroup)?;
        if left_out != std::mem::replace(&mut self.left_out, left_out) && left_out > 0 {
            say(&format!(
                "{left_out} of {} CPU reservations, the smallest, are kept by weights alone",
                reserved.len()
            ));
        }
        Ok(())
    }

    /// Looks whether the kernel has ended the scheduler.
    fn look_at_scheduler(&mut self, now: Instant) -> Result<()> {
        let Keeping::Scheduler(scheduler, looked) = &mut self.keeping else { return Ok(()) };
        *looked = now;
        if let Some(why) = scheduler.end()? {
            // As it does when a CPU comes or goes.
            let why = format!("the kernel has ended it: {why}");
            self.go_back(&why, Some(now + ROUND_EVERY));
        }
        Ok(())
    }

    /// Notifies the thread for memory, and begins it with the first guarantee. It stays for the next ones.
    fn look_at_memory(&mut self) -> Result<()> {
        self.shrinker.take_if(|shrinker| shrinker.has_ended());
        match &self.shrinker {
            Some(shrinker) => shrinker.look_again(),
            None if self.engine.governs_memory()? => {
                let begun = Shrinker::begin(self.engine.places());
                self.shrinker = Some(begun.map_err(step("begin the thread for memory"))?);
            }
            None => {}
        }
        Ok(())
    }

    /// Leaves weights and quotas alone, because no running container has a reservation, a rate for idle hosts or a
    /// debt.
    fn rest(&mut self) -> Result<()> {
        self.held.clear();
        self.rates.clear();
        self.debts.clear();
        self.state = State::default();
        self.others_read = None;
        self.cgroups = None;
        if self.is_marked {
            // After an error, the next round repeats it.
            self.engine.govern_cpu(false)?;
            self.is_marked = false;
        }
        Ok(())
    }

    /// Has debts counted and settled, if they are due, or if weights of reservations were decided.
    fn charge_debts(&mut self, now: Instant, is_due: bool) -> Result<()> {
        let Some(cgroups) = &self.cgroups else { return Ok(()) };
        if is_due && !self.debts.count(&self.engine, &self.time, &self.host, now)? {
            // An event of the unload is on its way.
            self.is_outdated = true;
            return Ok(());
        }
        self.debts.settle(&self.engine, cgroups, &self.host)
    }

    /// Reads, decides and writes.
    fn govern(&mut self, now: Instant) -> Result<()> {
        let passed = now.duration_since(self.decided);
        self.decided = now;
        // Reservations are kept, whatever hinders rates.
        let reserved = match self.governs_weights() {
            true => self.govern_reserved(now, passed),
            false => Ok(()),
        };
        // Both change quotas.
        let rates = match self.debts.is_on() || self.rates.is_empty() {
            true => Ok(()),
            false => self.govern_rates(passed),
        };
        reserved.and(rates)
    }

    fn govern_rates(&mut self, passed: Duration) -> Result<()> {
        let Self { engine, debts, rates, host, state, .. } = self;
        let mut mark = |raised: &_| debts.mark_raised(engine, raised);
        let passed_ns = passed.as_nanos() as u64;
        let has_ended = rates.govern(host.cpus_milli, passed_ns, state.is_hungry(), &mut mark)?;
        self.is_outdated |= has_ended;
        Ok(())
    }

    fn govern_reserved(&mut self, now: Instant, passed: Duration) -> Result<()> {
        let mut reserved = Vec::with_capacity(self.held.len());
        for (id, held) in &self.held {
            match held.share.used_ns()? {
                Some(used_ns) => {
                    let used_ns = self.debts.own_ns(id, used_ns);
                    reserved.push(Reserved { id: id.clone(), cpu: held.cpu, used_ns });
                }
                None => self.is_outdated = true, // it has stopped, or sleeps
            }
        }
        let others = self.others_are_due(now).then(|| self.read_others(now)).transpose()?;
        let readings = Readings { passed_ns: passed.as_nanos() as u64, reserved, others };
        let was = std::mem::take(&mut self.state);
        let (state, settings) = cpu::decide(&self.host, &readings, was);
        self.state = state;
        if self.debts.is_on() {
            for setting in &settings {
                self.debts.set_base(&setting.id, setting.shares);
            }
            return if settings.is_empty() { Ok(()) } else { self.charge_debts(now, false) };
        }
        for setting in settings {
            if let Some(held) = self.held.get(&setting.id) {
                held.share.set(setting.shares).inspect_err(|_| self.state.forget_weights())?;
            }
        }
        Ok(())
    }

    fn others_are_due(&self, now: Instant) -> bool {
        let every = if self.state.is_hungry() { OTHERS_HUNGRY_MS } else { OTHERS_MS };
        self.others_read.is_none_or(|read| read + Duration::from_millis(every) <= now)
    }

    /// Reads the containers without a reservation.
    fn read_others(&mut self, now: Instant) -> Result<Vec<Other<ContainerId>>> {
        self.others_read = Some(now);
        let Some(cgroups) = &self.cgroups else { return Ok(Vec::new()) };
        let mut others = Vec::new();
        for id in self.engine.started()? {
            if self.held.contains_key(&id) {
                continue;
            }
            // A container that has ended since it was listed does not compete.
            let used_ns = self.time.of(id.as_str()).ok().flatten();
            // A debt changes the weight in the kernel, and not what is due.
            let in_kernel = || cgroups.shares_of(id.as_str()).ok().flatten();
            let shares = self.debts.shares(&id).or_else(in_kernel);
            if let (Some(used_ns), Some(shares)) = (used_ns, shares) {
                others.push(Other { id, shares, used_ns });
            }
        }
        Ok(others)
    }
}

impl Governor {
    /// Returns whether the weights of reservations are to be governed.
    fn governs_weights(&self) -> bool {
        !self.held.is_empty() && !matches!(self.keeping, Keeping::Scheduler(..))
    }

    /// The time of the next look at the scheduler.
    fn next_look(&self) -> Option<Instant> {
        match &self.keeping {
            Keeping::Scheduler(_, looked) => Some(*looked + LOOK),
            _ => None,
        }
    }

    /// Returns whether there is a container to be governed.
    fn ticks(&self) -> bool {
        self.governs_weights() || !self.rates.is_empty() && !self.debts.is_on()
    }

    /// The time of the next round.
    fn next_round(&self) -> Instant {
        match self.is_outdated {
            true => (self.round + TICK).max(self.debts.not_before().unwrap_or(self.round)),
            false => {
                let again = match &self.keeping {
                    Keeping::WeightsAgain(again) => *again,
                    _ => None,
                };
                again.into_iter().chain([self.round + ROUND_EVERY]).min().unwrap_or(self.round)
            }
        }
    }
}

impl Room for Governor {
    fn name(&self) -> &'static str {
        "contracts"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        let next_tick = self.ticks().then(|| self.decided + TICK);
        let dues = next_tick.into_iter().chain(self.next_look()).chain(self.debts.due());
        dues.chain([self.next_round()]).min()
    }

    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        let found = match self.next_round() <= now {
            true => self.find(now).inspect_err(|_| self.is_outdated = true),
            false => Ok(()),
        };
        if self.next_look().is_some_and(|look| look <= now) {
            self.look_at_scheduler(now)?;
        }
        // ORDER: time at services is counted before reservations are decided.
        let charged = match self.debts.due().is_some_and(|due| due <= now) {
            true => self.charge_debts(now, true),
            false => Ok(()),
        };
        // Reservations are kept, whatever hinders debts.
        if self.ticks() && self.decided + TICK <= now {
            self.govern(now)?;
        }
        found.and(charged)?;
        Ok(Vec::new())
    }

    fn notice(&mut self, _now: Instant, notice: &Notice) {
        if matches!(notice, Notice::Events | Notice::Ended(_)) {
            self.is_outdated = true;
        }
    }

    fn end(mut self: Box<Self>) {
        if let Some(shrinker) = &mut self.shrinker {
            shrinker.stop();
            // A thread that is still writing a limit leaves its mark: the next command writes the static ones.
            shrinker.wait(MEMORY_ENDS_WITHIN);
        }
        if let Err(e) = self.rest() {
            say(&format!("cannot write the static weights: {e}"));
        }
    }
}
