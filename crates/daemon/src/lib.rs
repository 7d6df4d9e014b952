//! The daemon: suspends idle containers and admits wakes as memory allows.
//!
//! It is one more user of the engine, and no container depends on it. If it is killed, containers
//! are not suspended until it runs again; sleeping ones are still woken by the keeper. It is not a
//! source of truth: for each container it keeps the last readings, in a few hundred bytes.
//!
//! ```text
//! events (LIB/events) ----> the containers that run and have --sleep-after
//! cpu.stat of one, when due ([`watch`]) ----> idle ----> a worker ([`errand`]) suspends it
//! RUN/gate.sock <---- client about to wake one ([`gate`]) ----> admitted when it fits ([`room`]):
//!                                                            workers suspend others
//! ```
//!
//! **Cost.** A container without `--sleep-after` costs nothing. One with it that is active is read
//! twice in its idle time, one file of some 300 bytes; an idle one twice in all; a sleeping one
//! costs nothing. Active containers pay nothing, because the kernel counts their CPU time anyway.
//! For why no program at every task switch is used see docs/decisions/0010.
//!
//! **Missed events.** Events are lines of a file that is followed with inotify(7). A full disk
//! loses some. Therefore all awake containers are checked every ten minutes, as at the start.
//!
//! **Shutdown.** On SIGTERM or SIGINT the daemon starts no new job, waits for the running ones, and
//! exits. After SIGKILL those jobs finish by themselves: each is a separate command that holds the
//! container's lock.
#![forbid(unsafe_code)]

mod errand;
mod error;
mod gate;
mod notify;
mod room;
mod settings;
mod swap;
mod watch;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::{File, TryLockError};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use dormouse_container::{Asked, Engine, Error as EngineError, Fell, Follow, Idle, Places, Why};
use dormouse_kernel::cgroup::{CpuTime, MemoryInUse};
use dormouse_model::ContainerId;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use errand::{Errand, Workers};
use error::step;
pub use error::{Error, Result};
use gate::Gate;
use notify::say;
use room::Choice;
pub use settings::{Batch, Memory, Reclaim, Settings};
pub use swap::SwapFile;
use watch::Watch;

/// Delay of the next sweep if the keeper was killed during one.
const SWEEP_AGAIN: Duration = Duration::from_millis(100);
/// Interval at which all awake containers are checked.
const ROUND_EVERY: Duration = Duration::from_secs(600);
/// Number of them per turn of the loop, which bounds the delay for a client that wakes one.
const ROUND_AT_ONCE: usize = 32;
/// Time for which another process may keep the lock of a daemon that was killed.
const LOCK_WITHIN: Duration = Duration::from_secs(2);
const LOCK_AGAIN: Duration = Duration::from_millis(10);
/// Interval at which events are read without inotify.
const LOOK: Duration = Duration::from_secs(1);

/// Runs until SIGTERM or SIGINT. A setting that is `None` in `given` is taken from `config.toml`.
pub fn run(places: Places, given: Settings) -> Result<()> {
    let settings = given.or(Settings::read(&places.etc.join("config.toml"))?);
    let engine = Engine::open(places)?;
    engine.check_settings()?;
    let _alone = alone(&engine)?;
    swap::begin(&settings.swap)?;
    // ORDER: before the first container is checked, so that no signal interrupts a job.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    signals.thread_block().map_err(step("block signals"))?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&signals, flags).map_err(step("receive signals"))?;
    let mut daemon = Daemon::new(engine, &settings)?;
    daemon.start_round()?;
    while daemon.continue_round() {}
    notify::tell("READY=1");
    say("ready");
    daemon.serve(&signals)?;
    notify::tell("STOPPING=1");
    daemon.finish();
    Ok(())
}

/// Takes the lock that makes this process the only daemon for these directories. A daemon that was
/// killed between fork and execve may have left the lock with that child until its execve.
fn alone(engine: &Engine) -> Result<File> {
    let path = engine.places().run.join("daemon.lock");
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = file.map_err(step("open the daemon's lock"))?;
    let until = Instant::now() + LOCK_WITHIN;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                std::thread::sleep(LOCK_AGAIN);
            }
            Err(TryLockError::WouldBlock) => return Err(Error::Running),
            Err(TryLockError::Error(e)) => return Err(step("take the daemon's lock")(e)),
        }
    }
}

/// The events that a wait returned.
struct Ready {
    /// `LIB/events` has changed.
    has_events: bool,
    /// A signal to exit has arrived.
    is_stopping: bool,
    /// The keeper has exited.
    is_orphaned: bool,
    /// A client of admission control is readable or has disconnected.
    is_at_gate: bool,
    /// Indices of the completed jobs.
    ended: Vec<usize>,
}

struct Daemon {
    engine: Engine,
    cpu: CpuTime,
    /// inotify descriptor of the events; None if the kernel refused one.
    changes: Option<OwnedFd>,
    events: Follow,
    watches: HashMap<ContainerId, Watch>,
    /// Due times, the soonest first. An entry whose time differs from its watch's is outdated.
    queue: BinaryHeap<Reverse<(Instant, ContainerId)>>,
    errands: Vec<Errand>,
    errands_max: usize,
    workers: Workers,
    next_round: Instant,
    /// The containers that are still to be checked in this round.
    round: Vec<ContainerId>,
    /// The keeper's pidfd; readable when the keeper has exited.
    keeper: Option<OwnedFd>,
    /// Time of the next sweep, if the keeper exited before its pidfd was held.
    next_sweep: Option<Instant>,
    /// Admission control; None if no wake is to wait for memory.
    gate: Option<Gate>,
}

/// Starts admission control if it is configured and the memory controller is there.
fn gate(engine: &Engine, settings: &Settings) -> Result<Option<Gate>> {
    let Memory::Bytes(bytes) = settings.memory() else { return Ok(None) };
    let Some(in_use) = MemoryInUse::below(&engine.places().cgroup)? else {
        say("wakes do not wait for memory: this host has no memory controller");
        return Ok(None);
    };
    Ok(Some(Gate::open(engine, in_use, bytes, (settings.batch(), settings.reclaim()))?))
}

impl Daemon {
    fn new(engine: Engine, settings: &Settings) -> Result<Self> {
        // ORDER: events are followed first, then all containers are checked, so none is missed.
        let changes = changes(&engine).inspect_err(|e| say(&format!("polls for events: {e}"))).ok();
        let events = engine.follow()?;
        Ok(Self {
            cpu: CpuTime::below(&engine.places().cgroup)?,
            changes,
            events,
            watches: HashMap::new(),
            queue: BinaryHeap::new(),
            errands: Vec::new(),
            // Half of the jobs wait for the disk or for processes to exit.
            errands_max: std::thread::available_parallelism()
                .map_or(4, |n| (n.get() * 2).clamp(4, 8)),
            workers: Workers::new(engine.internal("sleep")?),
            next_round: Instant::now(),
            round: Vec::new(),
            keeper: None,
            next_sweep: None,
            gate: gate(&engine, settings)?,
            engine,
        })
    }

    /// Begins to check the settings of all awake containers.
    fn start_round(&mut self) -> Result<()> {
        self.next_round = Instant::now() + ROUND_EVERY;
        self.sweep();
        self.round = self.engine.started()?;
        Ok(())
    }

    /// Checks the next of them. Returns false when all are done.
    fn continue_round(&mut self) -> bool {
        let rest = self.round.len().saturating_sub(ROUND_AT_ONCE);
        for id in self.round.split_off(rest) {
            if !self.watches.contains_key(&id) {
                self.consider(id);
            }
        }
        !self.round.is_empty()
    }

    /// Re-creates what was lost: without a keeper no process polls for connections to sleeping
    /// containers, and a command that was killed may have left a container frozen.
    fn sweep(&mut self) {
        self.keeper = None;
        self.next_sweep = None;
        if let Err(e) = self.engine.recover() {
            say(&format!("cannot finish what was interrupted: {e}"));
        }
        self.find_keeper();
    }

    /// Finds the keeper and holds its pidfd. A keeper that was killed before that, such as during a
    /// sweep, is replaced in the next sweep.
    fn find_keeper(&mut self) {
        if self.keeper.is_some() {
            return;
        }
        self.keeper = self.engine.custodian_handle().ok().flatten();
        if self.keeper.is_none() && self.engine.is_orphaned().is_ok_and(|orphaned| orphaned) {
            self.next_sweep.get_or_insert(Instant::now() + SWEEP_AGAIN);
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
        if let Some(gate) = &mut self.gate {
            gate.room().may_sleep(&id, policy.is_some_and(|policy| policy.asleep.is_some()));
        }
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

    fn serve(&mut self, signals: &SignalFd) -> Result<()> {
        loop {
            self.read_due();
            self.serve_gate();
            if self.next_round <= Instant::now()
                && let Err(e) = self.start_round()
            {
                say(&format!("cannot list the containers that are awake: {e}"));
            }
            self.continue_round();
            self.workers.rest(Instant::now());
            let Ready { has_events, is_stopping, is_orphaned, is_at_gate, ended } =
                self.wait(signals)?;
            if is_stopping {
                return Ok(());
            }
            if is_orphaned || self.next_sweep.is_some_and(|when| when <= Instant::now()) {
                self.sweep();
            }
            // Before the other events: a client waits for its admission.
            if is_at_gate {
                self.serve_gate();
            }
            // ORDER: from the last index to the first, so that the indices of the others stay
            // valid.
            for place in ended.into_iter().rev() {
                let errand = self.errands.swap_remove(place);
                self.ended(errand);
            }
            if (has_events || self.changes.is_none())
                && let Err(e) = self.read_events()
            {
                // Missed events are made up for by a full round.
                say(&format!("cannot read events: {e}"));
                self.next_round = Instant::now() + LOOK;
            }
        }
    }

    /// Waits for the next event: a line of `LIB/events`, a signal, a completed job, a due time.
    fn wait(&self, signals: &SignalFd) -> Result<Ready> {
        let now = Instant::now();
        let free = self.errands.len() < self.errands_max;
        let due = self.queue.peek().filter(|_| free).map(|Reverse((due, _))| *due);
        let events = self.changes.is_none().then(|| now + LOOK);
        let gate = self.gate.as_ref().map(Gate::next);
        let times = due.into_iter().chain(events).chain(gate).chain(self.workers.next());
        let times = times.chain(self.next_sweep);
        let next = times.fold(self.next_round, Instant::min);
        let next = if self.round.is_empty() { next } else { now };
        let left = next.saturating_duration_since(now);
        // Rounded up, so that the wait does not return before the due time.
        let left = left + Duration::from_micros(100);
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let (changes, keeper) = (self.changes.as_ref(), self.keeper.as_ref());
        let first = [Some(signals.as_fd()), changes.map(AsFd::as_fd), keeper.map(AsFd::as_fd)];
        let first: Vec<BorrowedFd<'_>> = first.into_iter().flatten().collect();
        let errands = first.len();
        let at_gate = self.gate.iter().flat_map(Gate::fds);
        let watched =
            first.into_iter().chain(self.errands.iter().map(Errand::as_fd)).chain(at_gate);
        let mut fds: Vec<PollFd<'_>> =
            watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(step("wait")(e)),
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        Ok(Ready {
            is_stopping: is_ready[0],
            has_events: changes.is_some() && is_ready[1],
            is_orphaned: keeper.is_some() && is_ready[errands - 1],
            is_at_gate: is_ready[errands + self.errands.len()..].contains(&true),
            ended: (0..self.errands.len()).filter(|n| is_ready[errands + n]).collect(),
        })
    }

    fn read_due(&mut self) {
        let now = Instant::now();
        while self.errands.len() < self.errands_max
            && self.queue.peek().is_some_and(|Reverse((due, _))| *due <= now)
            && let Some(Reverse((due, id))) = self.queue.pop()
        {
            let is_current = |w: &Watch| w.due == due && !w.is_falling;
            if self.watches.get(&id).is_some_and(is_current) {
                self.look(id, now);
            }
        }
    }

    fn look(&mut self, id: ContainerId, now: Instant) {
        match self.cpu.of(id.as_str()) {
            // The container sleeps, has ended, or is just being started.
            Ok(None) => self.consider(id),
            Ok(Some(used_ns)) => {
                let Some(watch) = self.watches.get_mut(&id) else { return };
                let idle = watch.look(now, used_ns);
                self.queue.push(Reverse((watch.due, id.clone())));
                if let Some((tier, idle)) = idle {
                    self.request(id, Some(&idle), Asked::Fall(tier), Why::Idle);
                }
            }
            Err(e) => {
                say(&format!("{}: {e}", id.short()));
                self.watches.remove(&id);
            }
        }
    }

    /// Admits the wakes that fit, and starts jobs that free memory for those that do not.
    fn serve_gate(&mut self) {
        let Some(gate) = &mut self.gate else { return };
        for Choice { id, asked, idle } in gate.serve(&self.engine, &self.cpu) {
            self.request(id, idle.as_ref(), asked, Why::Memory);
        }
    }

    /// Starts a job: a worker suspends the container or pushes its pages out.
    fn request(&mut self, id: ContainerId, idle: Option<&Idle>, asked: Asked, why: Why) {
        match self.workers.start(&id, idle, asked, why) {
            Ok(errand) => {
                self.errands.push(errand);
                if let Some(gate) = &mut self.gate {
                    gate.room().leaves(&id);
                }
                if let Some(watch) = self.watches.get_mut(&id) {
                    watch.is_falling = true;
                }
            }
            Err(e) => {
                let reason = format!("cannot start a worker process: {e}");
                self.fell(&id, Fell::Awake { why: reason }, asked, why);
            }
        }
    }

    fn ended(&mut self, errand: Errand) {
        let (id, asked, reason) = (errand.id.clone(), errand.asked, errand.why);
        let fell = self.workers.finish(Instant::now(), errand);
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.is_falling = false;
        }
        if matches!(fell, Fell::Awake { .. }) {
            self.sweep(); // the worker may have been killed in the middle of its job
        }
        self.fell(&id, fell, asked, reason);
    }

    fn fell(&mut self, id: &ContainerId, fell: Fell, asked: Asked, reason: Why) {
        let now = Instant::now();
        if let Some(gate) = &mut self.gate {
            match fell {
                Fell::Asleep { .. } | Fell::Gone => gate.room().left(now, id.clone()),
                Fell::Swapped { bytes } => gate.room().pushed_out(now, id, bytes),
                Fell::Ran | Fell::Drowsy { .. } => gate.room().stays(now, id, false),
                Fell::Awake { .. } => gate.room().stays(now, id, true),
            }
        }
        // The reading before the job is outdated; the container was frozen meanwhile.
        let used_ns = self.cpu.of(id.as_str()).ok().flatten();
        let policy = self.engine.policy(id).ok().flatten();
        let Some(watch) = self.watches.get_mut(id) else { return };
        if let Some(policy) = policy {
            watch.is_drowsy(policy.is_drowsy);
        }
        match fell {
            Fell::Asleep { took_us } => watch.slept(now, Duration::from_micros(took_us)),
            Fell::Drowsy { took_us } => {
                watch.drowsed(now, Duration::from_micros(took_us), used_ns.unwrap_or(0));
            }
            Fell::Gone => return self.consider(id.clone()),
            Fell::Ran => watch.ran(now),
            Fell::Swapped { .. } => {} // still as idle as before
            Fell::Awake { why } => {
                // Admission control tries before the idle time is over; the idle timer may still
                // try later.
                if reason == Why::Idle
                    && let Asked::Fall(tier) = asked
                    && watch.refused(now, &why, tier)
                    && let Ok(config) = self.engine.config(id)
                {
                    let reason = [("reason", why)];
                    self.engine.record("awake", id.as_str(), config.name.as_str(), &reason);
                }
            }
        }
        self.queue.push(Reverse((watch.due, id.clone())));
    }

    /// Reads the new events.
    fn read_events(&mut self) -> Result<()> {
        if let Some(changes) = &self.changes {
            let mut bytes = [0; 4096];
            while matches!(rustix::io::read(changes, &mut bytes), Ok(n) if n > 0) {}
        }
        self.find_keeper(); // the keeper is there as soon as a container runs
        while let Some(event) = self.events.next_event()? {
            let is_of_interest = matches!(
                event.kind.as_str(),
                "start" | "restore" | "wake" | "unpause" | "update" | "restart"
            );
            if is_of_interest && let Ok(id) = event.id.parse() {
                self.consider(id);
            }
        }
        Ok(())
    }

    fn finish(mut self) {
        for errand in self.errands {
            self.workers.finish(Instant::now(), errand);
        }
    }
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
