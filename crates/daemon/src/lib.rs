//! The daemon: suspends idle containers, admits wakes as memory allows, and keeps CPU reservations.
//!
//! It is one more user of the engine, and no container depends on it. If it is killed, containers
//! are not suspended until it runs again; sleeping ones are still woken by the keeper. It is not a
//! source of truth: for each container it keeps the last readings, in a few hundred bytes.
//!
//! ```text
//! events (LIB/events) ----> the containers that run and have --sleep-after ([`idle`])
//! cpu.stat of one, when due ([`watch`]) ----> idle ----> a worker ([`work`]) suspends it
//! RUN/gate.sock <---- client about to wake one ([`gate`]) ----> admitted when it fits
//!                                                   ([`budget`]): workers suspend others
//! the keeper exits ----> what it held is re-created ([`recovery`])
//! cpu.stat of those with --cpu-reserve, ten times a second ----> their CPU weights ([`govern`])
//! idle time of the host, beside those with --cpu-idle-rate, ten times a second ----> their quotas ([`idle_rate`])
//! work for others, while gates are loaded, ten times a second ----> weights and quotas of clients ([`debts`])
//! cgroup v1: memory of all beside --memory-min, ten times a second ----> limits ([`shrink`])
//! memory of those with --oom sleep, ten times a second ----> a worker puts them to sleep ([`shortage`])
//! space of disks without a guarantee, once a second ----> what they may accept ([`space`])
//! free memory of the host and of all containers ----> a worker has one above its guarantee give memory ([`evict`])
//! warm sleepers, once a second while there are some ----> a worker gives up those beyond bound and time ([`warm`])
//! the open of a view inside a container ----> its contents ([`view`])
//! connections to shared services, while gates are loaded ----> one account after the other ([`order`])
//! counters of all that run, every quarter of an hour ----> their accounts ([`account`])
//! ```
//!
//! Each of these tasks is a *room* on one loop ([`room`]). `budget` and `watch` are the pure part
//! of two of them. Modules depend on each other downwards: rooms, then their pure parts, then
//! `room`.
//!
//! **Cost.** A container without `--sleep-after` costs nothing. One with it that is active is read twice in its idle
//! time, one file of some 300 bytes; an idle one twice in all; a sleeping one costs nothing. Active containers pay
//! nothing, because the kernel counts their CPU time anyway. While a container with a CPU reservation runs, each of
//! these is read ten times a second, and each other container once. While a container with a guarantee of memory runs
//! on cgroup v1, the memory of each container is read ten times a second. While a container that may give memory
//! runs, the memory of the host is read once a second, and ten times a second while little of it is free. For why no
//! program at every task switch is used see docs/decisions/0010.
//!
//! **Shutdown.** On SIGTERM or SIGINT the daemon starts no new job, waits for the running ones, and
//! exits. After SIGKILL those jobs finish by themselves: each is a separate command that holds the
//! container's lock.
#![forbid(unsafe_code)]

mod account;
mod admit;
mod budget;
mod debts;
mod error;
mod evict;
mod gate;
mod govern;
mod idle;
mod idle_rate;
mod notify;
mod order;
mod popularity;
mod recovery;
mod room;
mod settings;
mod shortage;
mod shrink;
mod space;
mod swap;
mod view;
mod warm;
mod watch;
mod work;

use std::fs::{File, TryLockError};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_container::{Engine, Places};
use dormouse_kernel::cgroup::{CpuTime, MemoryInUse};
use dormouse_kernel::rlimit;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use account::Accounts;
use error::step;
pub use error::{Error, Result};
use evict::Evictions;
use gate::Gate;
use govern::Governor;
use idle::IdleRoom;
use notify::say;
use order::Order;
use recovery::Recovery;
use room::Room;
pub use settings::{Batch, Memory, Reclaim, Settings};
use shortage::Shortages;
use space::Space;
pub use swap::SwapFile;
use view::Views;
use warm::WarmRoom;
use work::Work;

/// Time for which another process may keep the lock of a daemon that was killed.
const LOCK_WITHIN: Duration = Duration::from_secs(2);
const LOCK_AGAIN: Duration = Duration::from_millis(10);

/// Runs until SIGTERM or SIGINT. A setting that is `None` in `given` is taken from `config.toml`.
pub fn run(places: Places, given: Settings) -> Result<()> {
    let settings = given.or(Settings::read(&places.etc.join("config.toml"))?);
    let engine = Engine::open(places)?;
    engine.check_settings()?;
    let _alone = alone(&engine)?;
    // Contracts need two descriptors or three for each container. The present limit suffices for some hundred.
    if let Err(e) = rlimit::raise_descriptors() {
        say(&format!("the limit of descriptors stays: {e}"));
    }
    swap::begin(&settings.swap)?;
    // ORDER: before the first container is checked, so that no signal interrupts a job.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    signals.thread_block().map_err(step("block signals"))?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&signals, flags).map_err(step("receive signals"))?;
    let rooms = rooms(Rc::new(engine), &settings)?;
    notify::tell("READY=1");
    say("ready");
    room::serve(rooms, signals.as_fd())
}

/// Makes the rooms. ORDER: recovery is the first, because it receives notices before the others.
fn rooms(engine: Rc<Engine>, settings: &Settings) -> Result<Vec<Box<dyn Room>>> {
    let cpu = Rc::new(CpuTime::below(&engine.places().cgroup)?);
    let gate = gate(&engine, &cpu, settings)?;
    let mut rooms: Vec<Box<dyn Room>> = vec![Box::new(Recovery::begin(Rc::clone(&engine)))];
    rooms.push(Box::new(Work::new(engine.internal("sleep")?)));
    if let Some(gate) = gate {
        rooms.push(Box::new(gate));
    }
    rooms.push(Box::new(Governor::begin(Rc::clone(&engine), Rc::clone(&cpu))));
    rooms.push(Box::new(Order::begin(Rc::clone(&engine))));
    rooms.push(Box::new(Accounts::begin(&engine)?));
    if let Some(shortages) = Shortages::begin(Rc::clone(&engine))? {
        rooms.push(Box::new(shortages));
    }
    rooms.push(Box::new(Space::begin(engine.places())?));
    if let Some(evictions) = evictions(&engine, &cpu, settings)? {
        rooms.push(Box::new(evictions));
    }
    rooms.push(Box::new(Views::begin(&engine)));
    rooms.push(Box::new(WarmRoom::begin(Rc::clone(&engine))?));
    rooms.push(Box::new(IdleRoom::begin(engine, cpu)?));
    Ok(rooms)
}

/// Starts admission control if it is configured and the memory controller is there.
fn gate(engine: &Rc<Engine>, cpu: &Rc<CpuTime>, settings: &Settings) -> Result<Option<Gate>> {
    let Memory::Bytes(bytes) = settings.memory() else { return Ok(None) };
    let Some(in_use) = MemoryInUse::below(&engine.places().cgroup)? else {
        say("wakes do not wait for memory: this host has no memory controller");
        return Ok(None);
    };
    let (engine, cpu) = (Rc::clone(engine), Rc::clone(cpu));
    let how = (settings.batch(), settings.reclaim());
    Gate::open(engine, cpu, in_use, bytes, how).map(Some)
}

/// Starts evictions, unless they are switched off or there is no memory controller.
fn evictions(
    engine: &Rc<Engine>,
    cpu: &Rc<CpuTime>,
    settings: &Settings,
) -> Result<Option<Evictions>> {
    let keep_bytes = match settings.evict_below {
        Some(Memory::Off) => return Ok(None),
        Some(Memory::Bytes(bytes)) => Some(bytes),
        None => None,
    };
    Evictions::begin(Rc::clone(engine), Rc::clone(cpu), keep_bytes)
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
