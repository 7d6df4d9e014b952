//! The daemon: containers that are idle fall asleep, and those that wake are let in as memory allows.
//!
//! It is one more caller of the engine, and no container depends on it: killed, it leaves containers
//! that do not fall asleep until it runs again; those that sleep are woken by the keeper. It holds no
//! truth: what it knows of a container is when it looked at it last, in a few hundred bytes.
//!
//! ```text
//! events (LIB/events) ----> which containers run and fall asleep by themselves
//! cpu.stat of one, when its time has come ([`watch`]) ----> idle ----> a process of ours ([`errand`])
//!                                                                        puts it to sleep
//! RUN/gate.sock <---- who is about to wake one ([`gate`]) ----> leave, when there is room ([`room`]):
//!                                                               a process of ours puts others to sleep
//! ```
//!
//! **What costs what.** A container that does not fall asleep by itself costs nothing. One that does
//! and works is looked at twice in its time, one file of some 300 bytes; one that is idle twice in all;
//! one that sleeps costs nothing. The busy pay nothing: the kernel counts their time anyway. Why not by a
//! program at every switch of tasks: docs/decisions/0010.
//!
//! **What it may miss.** Events are lines of a file that is followed by inotify(7). A full disk loses
//! some, so every ten minutes all that are awake are gone through, as at the start.
//!
//! **Its end.** On SIGTERM or SIGINT it starts nothing more, waits for the processes it has
//! started, and ends. After SIGKILL those finish by themselves: each is a verb of its own, under the
//! container's lock.
#![forbid(unsafe_code)]

mod errand;
mod gate;
mod notify;
mod room;
mod settings;
mod swap;
mod watch;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_container::{Asked, Engine, Error as EngineError, Fell, Follow, Idle, Places, Why};
use dormouse_kernel::cgroup::{CgroupError, CpuTime, MemoryInUse};
use dormouse_model::ContainerId;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use errand::{Errand, Hands};
use gate::Gate;
use room::Choice;
pub use settings::{Batch, Memory, Reclaim, Settings};
pub use swap::SwapFile;
use watch::Watch;

/// After a sweep in the middle of which the keeper was killed.
const SWEEP_AGAIN: Duration = Duration::from_millis(100);
/// How often all containers that are awake are gone through.
const GO_THROUGH: Duration = Duration::from_secs(600);
/// How many of them at once: whoever wakes one does not wait for more.
const GO_THROUGH_AT_ONCE: usize = 32;
/// How long the lock of a daemon that was killed may be with somebody else.
const LOCK_WITHIN: Duration = Duration::from_secs(2);
const LOCK_AGAIN: Duration = Duration::from_millis(10);
/// How often events are looked for where nobody tells of them.
const LOOK: Duration = Duration::from_secs(1);

/// Why the daemon does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is one already.
    #[error("a daemon is running here already")]
    Running,
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The control groups are not where they should be.
    #[error("cannot find the CPU time of containers")]
    Cgroup(#[from] CgroupError),
    /// `config.toml` is not as it should be.
    #[error("{}: {what}", path.display())]
    Settings {
        /// Which it is.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A step failed.
    #[error("cannot {step}")]
    Step {
        /// What was being done.
        step: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// The result of the daemon's steps.
pub type Result<T> = std::result::Result<T, Error>;

fn step<E: Into<std::io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Step { step, source: source.into() }
}

/// Runs until it is asked to end. What `said` says nothing of is what `config.toml` says.
pub fn run(places: Places, said: Settings) -> Result<()> {
    let settings = said.or(Settings::read(&places.etc.join("config.toml"))?);
    let engine = Engine::open(places)?;
    engine.check_settings()?;
    let _alone = alone(&engine)?;
    swap::begin(&settings.swap)?;
    // ORDER: before anything is looked at, so that no signal ends it in the middle.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    signals.thread_block().map_err(step("block signals"))?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&signals, flags).map_err(step("receive signals"))?;
    let mut daemon = Daemon::new(engine, &settings)?;
    daemon.go_through()?;
    while daemon.go_on() {}
    notify::tell("READY=1");
    say("ready");
    daemon.serve(&signals)?;
    notify::tell("STOPPING=1");
    daemon.finish();
    Ok(())
}

/// Who has this lock is the daemon of these places. One that was killed while it made a process may have
/// left it with that until it executes its program.
fn alone(engine: &Engine) -> Result<File> {
    let path = engine.places().run.join("daemon.lock");
    let file = File::options().create(true).truncate(false).write(true).open(path);
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

/// One line for whoever reads our output; a reader that is gone stops nothing.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "dormouse daemon: {line}");
}

/// What was waited for.
struct Heard {
    /// There are events.
    is_told: bool,
    /// The daemon is to end.
    is_over: bool,
    /// The keeper has ended.
    is_orphaned: bool,
    /// Somebody has come to the gate, or has gone.
    is_at_gate: bool,
    /// Errands that have, by their places.
    ended: Vec<usize>,
}

struct Daemon {
    engine: Engine,
    cpu: CpuTime,
    /// Tells that there are events; none where the kernel has no more for us.
    told: Option<OwnedFd>,
    events: Follow,
    watches: HashMap<ContainerId, Watch>,
    /// When each is due, the soonest first. An entry whose time is not that of its watch is old.
    queue: BinaryHeap<Reverse<(Instant, ContainerId)>>,
    errands: Vec<Errand>,
    errands_max: usize,
    hands: Hands,
    next_round: Instant,
    /// Those that are still to be gone through.
    round: Vec<ContainerId>,
    /// Who hears of those who call what sleeps; readable when it has ended.
    keeper: Option<OwnedFd>,
    /// When to sweep again: it has ended where its end could not be heard.
    next_sweep: Option<Instant>,
    /// Where those wait who wake containers; none where nobody is to wait.
    gate: Option<Gate>,
}

/// The gate, where there is to be one and memory is counted.
fn gate(engine: &Engine, settings: &Settings) -> Result<Option<Gate>> {
    let Memory::Bytes(bytes) = settings.memory() else { return Ok(None) };
    let Some(in_use) = MemoryInUse::below(&engine.places().cgroup)? else {
        say("nobody waits for memory: this host has no memory controller");
        return Ok(None);
    };
    Ok(Some(Gate::open(engine, in_use, bytes, (settings.batch(), settings.reclaim()))?))
}

impl Daemon {
    fn new(engine: Engine, settings: &Settings) -> Result<Self> {
        // ORDER: from here on no event is missed; then all containers are gone through.
        let told = told(&engine).inspect_err(|e| say(&format!("looks for events: {e}"))).ok();
        let events = engine.follow()?;
        Ok(Self {
            cpu: CpuTime::below(&engine.places().cgroup)?,
            told,
            events,
            watches: HashMap::new(),
            queue: BinaryHeap::new(),
            errands: Vec::new(),
            // Half of each is waiting for the disk and for the end of processes.
            errands_max: std::thread::available_parallelism()
                .map_or(4, |n| (n.get() * 2).clamp(4, 8)),
            hands: Hands::new(engine.internal("sleep")?),
            next_round: Instant::now(),
            round: Vec::new(),
            keeper: None,
            next_sweep: None,
            gate: gate(&engine, settings)?,
            engine,
        })
    }

    /// Begins to look which containers fall asleep by themselves, all that are awake.
    fn go_through(&mut self) -> Result<()> {
        self.next_round = Instant::now() + GO_THROUGH;
        self.sweep();
        self.round = self.engine.started()?;
        Ok(())
    }

    /// Goes on with that. False where it has come to its end.
    fn go_on(&mut self) -> bool {
        let rest = self.round.len().saturating_sub(GO_THROUGH_AT_ONCE);
        for id in self.round.split_off(rest) {
            if !self.watches.contains_key(&id) {
                self.consider(id);
            }
        }
        !self.round.is_empty()
    }

    /// Where the keeper was killed nobody listens for those who sleep; where a command was, something
    /// may be frozen.
    fn sweep(&mut self) {
        self.keeper = None;
        self.next_sweep = None;
        if let Err(e) = self.engine.recover() {
            say(&format!("cannot finish what was interrupted: {e}"));
        }
        self.find_keeper();
    }

    /// Finds the keeper, whose end is heard then. One that was killed before that, such as in the middle of
    /// a sweep, is made up for by another.
    fn find_keeper(&mut self) {
        if self.keeper.is_some() {
            return;
        }
        self.keeper = self.engine.custodian_handle().ok().flatten();
        if self.keeper.is_none() && self.engine.is_orphaned().is_ok_and(|orphaned| orphaned) {
            self.next_sweep.get_or_insert(Instant::now() + SWEEP_AGAIN);
        }
    }

    /// Something has happened to a container.
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
        // One that has no cgroup yet has used nothing.
        let used_ns = self.cpu.of(id.as_str()).ok().flatten().unwrap_or(0);
        let now = Instant::now();
        let watch = self.watches.entry(id.clone());
        let watch = watch.or_insert_with(|| Watch::new(now, policy, used_ns));
        watch.begin_again(now, policy, used_ns);
        self.queue.push(Reverse((watch.due, id)));
    }

    fn serve(&mut self, signals: &SignalFd) -> Result<()> {
        loop {
            self.look_at_those_that_are_due();
            self.mind_the_gate();
            if self.next_round <= Instant::now()
                && let Err(e) = self.go_through()
            {
                say(&format!("cannot go through all that are awake: {e}"));
            }
            self.go_on();
            self.hands.rest(Instant::now());
            let Heard { is_told, is_over, is_orphaned, is_at_gate, ended } = self.wait(signals)?;
            if is_over {
                return Ok(());
            }
            if is_orphaned || self.next_sweep.is_some_and(|when| when <= Instant::now()) {
                self.sweep();
            }
            // Before what else has happened: somebody's caller waits for the answer.
            if is_at_gate {
                self.mind_the_gate();
            }
            // ORDER: from the back, so that the places of the others stay.
            for place in ended.into_iter().rev() {
                let errand = self.errands.swap_remove(place);
                self.ended(errand);
            }
            if (is_told || self.told.is_none())
                && let Err(e) = self.hear()
            {
                // What it has missed is found as at the start.
                say(&format!("cannot read events: {e}"));
                self.next_round = Instant::now() + LOOK;
            }
        }
    }

    /// Waits until there is something to do: events, the end of the daemon, errands that have ended.
    fn wait(&self, signals: &SignalFd) -> Result<Heard> {
        let now = Instant::now();
        let free = self.errands.len() < self.errands_max;
        let due = self.queue.peek().filter(|_| free).map(|Reverse((due, _))| *due);
        let events = self.told.is_none().then(|| now + LOOK);
        let gate = self.gate.as_ref().map(Gate::next);
        let times = due.into_iter().chain(events).chain(gate).chain(self.hands.next());
        let times = times.chain(self.next_sweep);
        let next = times.fold(self.next_round, Instant::min);
        let next = if self.round.is_empty() { next } else { now };
        let left = next.saturating_duration_since(now);
        // Not before it is due.
        let left = left + Duration::from_micros(100);
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let (told, keeper) = (self.told.as_ref(), self.keeper.as_ref());
        let first = [Some(signals.as_fd()), told.map(AsFd::as_fd), keeper.map(AsFd::as_fd)];
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
        Ok(Heard {
            is_over: is_ready[0],
            is_told: told.is_some() && is_ready[1],
            is_orphaned: keeper.is_some() && is_ready[errands - 1],
            is_at_gate: is_ready[errands + self.errands.len()..].contains(&true),
            ended: (0..self.errands.len()).filter(|n| is_ready[errands + n]).collect(),
        })
    }

    fn look_at_those_that_are_due(&mut self) {
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
            // It sleeps, has ended, or is just being started.
            Ok(None) => self.consider(id),
            Ok(Some(used_ns)) => {
                let Some(watch) = self.watches.get_mut(&id) else { return };
                let idle = watch.look(now, used_ns);
                self.queue.push(Reverse((watch.due, id.clone())));
                if let Some((tier, idle)) = idle {
                    self.ask(id, Some(&idle), Asked::Fall(tier), Why::Idle);
                }
            }
            Err(e) => {
                say(&format!("{}: {e}", id.short()));
                self.watches.remove(&id);
            }
        }
    }

    /// Lets those in for whom there is room, and has others give memory for those for whom there is none.
    fn mind_the_gate(&mut self) {
        let Some(gate) = &mut self.gate else { return };
        for Choice { id, asked, idle } in gate.serve(&self.engine, &self.cpu) {
            self.ask(id, idle.as_ref(), asked, Why::Memory);
        }
    }

    /// Has a process of ours put a container to sleep, or push its pages out.
    fn ask(&mut self, id: ContainerId, idle: Option<&Idle>, asked: Asked, why: Why) {
        match self.hands.start(&id, idle, asked, why) {
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
                let reason = format!("no process can be made: {e}");
                self.fell(&id, Fell::Awake { why: reason }, asked, why);
            }
        }
    }

    fn ended(&mut self, errand: Errand) {
        let (id, asked, reason) = (errand.id.clone(), errand.asked, errand.why);
        let fell = self.hands.finish(Instant::now(), errand);
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.is_falling = false;
        }
        if matches!(fell, Fell::Awake { .. }) {
            self.sweep(); // it may have been killed in the middle of it
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
        // It was frozen since.
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
            Fell::Swapped { .. } => {} // it is as idle as it was
            Fell::Awake { why } => {
                // The gate asks sooner than the idle time has come, and then the idle may still be tried.
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

    /// Reads the events that have come.
    fn hear(&mut self) -> Result<()> {
        if let Some(told) = &self.told {
            let mut bytes = [0; 4096];
            while matches!(rustix::io::read(told, &mut bytes), Ok(n) if n > 0) {}
        }
        self.find_keeper(); // it is there as soon as somebody runs
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
            self.hands.finish(Instant::now(), errand);
        }
    }
}

/// Becomes readable when the file of events changes.
fn told(engine: &Engine) -> rustix::io::Result<OwnedFd> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let told = inotify::init(flags)?;
    let changes =
        inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&told, engine.places().lib.as_path(), changes)?;
    Ok(told)
}
