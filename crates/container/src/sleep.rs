//! Sleep and wake: a container without processes that still accepts connections.
//!
//! An *asleep* container is a checkpoint, `LIB/containers/ID/asleep`. The keeper holds its sockets
//! that are reachable from outside: TCP sockets that listen or have a connection, UDP sockets
//! ([`dormouse_launch::Keeper::hold`]). The container has no process, no cgroup, no mount;
//! it keeps its addresses, names and published ports. The kernel completes an incoming connection
//! and queues it at the held socket. The keeper then runs `dormouse internal wake ID`, which
//! restores the processes with the same socket in its old place. The container accepts that
//! connection first, and nothing was refused or sent twice. An open connection stays open: the
//! kernel continues it, and incoming data, space in the send buffer, or its end wakes the
//! container. [`crate::idle`] describes when a container falls asleep by itself, and which timers
//! wake it.
//!
//! **Activity.** Only a container whose threads all wait can stay asleep. A container that was
//! stopped while active is woken as soon as it sleeps. In the middle of sending a file, for
//! example, its peer sends nothing that would wake it.
//!
//! **Killed at any step.** The checkpoint is published while all processes are stopped. Then the
//! record of the first process is marked (`sleeping`), then the processes are killed. Waking is the
//! reverse: the record has the mark until all processes run. If the marked first process was
//! killed, or never released, the container is therefore asleep ([`Engine::settle_found`]). Without
//! the mark the container is not asleep, and its checkpoint is outdated. A request that arrives
//! meanwhile wakes the container right after.
//!
//! **Again.** A large checkpoint is kept while the container is awake (`LIB/containers/ID/woken`),
//! until the container sleeps again or ends. Memory that has not changed by then is not written a
//! second time ([`dormouse_checkpoint::format::Base`]).
//!
//! LIMIT: only a container that can be checkpointed sleeps. If the keeper is killed and the vault
//! too, open connections are lost; the next command makes the other sockets again
//! ([`crate::custody`]). The same holds after a reboot; the container's clocks continue.

use std::cell::Cell;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dormouse_checkpoint::format::{Cause, Reader, Records, Writer};
use dormouse_checkpoint::save::{self, Figures, HeldFile, Subject, Wakes};
use dormouse_kernel::ErrorKind;
use dormouse_kernel::pidfd;
use dormouse_launch::protocol::watch;
use dormouse_launch::{Keeper, NEVER_BEGAN};
use dormouse_model::{Config, ContainerId, State, WakeOn, WakeOnTimer};

use crate::admission::Admitted;
use crate::checkpoint::{Check, Comeback};
use crate::disk::{self, Durable};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::idle::{Idle, Why};
use crate::life::{Exit, InitRecord, Look};
use crate::pending::{Intent, remove_tree};
use crate::start::Running;
use crate::unborn::Origin;

/// Name of the checkpoint's directory while the container is asleep.
pub(crate) const ASLEEP: &str = "asleep";
/// Name of the same directory while the container is awake again: unchanged memory need not be
/// written at the next sleep.
const WOKEN: &str = "woken";
/// A smaller checkpoint is not kept, and is written anew.
const WOKEN_BYTES_MIN: u64 = 8 << 20;
/// The record of the first process, beside the checkpoint of an asleep container.
const SLEPT: &str = "init.json";

/// The signal that ends the processes of a container that falls asleep.
pub(crate) const SIGKILL: i32 = 9;
/// LIMIT: number of sockets requested from the keeper before the first one is received.
const AHEAD_MAX: usize = 32;
/// Object number of an eventfd that is held beside sockets, or instead: the keeper must know of a
/// container without sockets, too.
pub(crate) const NO_SOCKET: u32 = u32::MAX;

fn reason(why: Why) -> [(&'static str, String); 1] {
    [("reason", why.as_str().to_owned())]
}

/// Returns whether an event of this cause wakes the container.
fn hears(wake_on: WakeOn, cause: Cause) -> bool {
    match cause {
        Cause::Call => wake_on.call,
        Cause::Data => wake_on.data,
        Cause::File => wake_on.file,
        // If timers may wait, the keeper's alarm stands for all of them.
        Cause::Timer => wake_on.timer == WakeOnTimer::InTime,
        Cause::Other => true,
    }
}

/// Pairs the listening sockets of a checkpoint with the numbers of their objects.
pub(crate) fn held_files(records: &Records, all: Vec<(u32, OwnedFd)>) -> Vec<HeldFile> {
    let wakes = Wakes { readable: true, writable: false };
    let cause = |object: u32| match records.objects.get(object as usize) {
        Some(object) => object.cause(),
        None => Cause::Other, // the engine's own eventfd
    };
    let file = |(object, file)| HeldFile { object, file, wakes, cause: cause(object) };
    all.into_iter().map(file).collect()
}

impl Engine {
    /// Puts a running container to sleep; `None` if it is asleep already.
    ///
    /// Errors: [`Refused`](dormouse_checkpoint::Error::Refused) names the objects that cannot be
    /// saved, and nothing was stopped; [`ErrorKind::Busy`] while a process waits for the
    /// container's end.
    pub fn sleep(&self, id: &ContainerId) -> Result<Option<Figures>> {
        self.sleep_as(id, None, Why::Operator)
    }

    /// Puts a container to sleep; if `idle` is given, only if it is still idle.
    pub(crate) fn sleep_as(
        &self,
        id: &ContainerId,
        idle: Option<&Idle>,
        why: Why,
    ) -> Result<Option<Figures>> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let look = self.look_locked(&config)?;
        if look.state == State::Asleep {
            return Ok(None);
        }
        if config.auto_remove {
            return Err(Error::Invalid(
                "a container of --rm does not sleep: its files are not kept beyond its processes"
                    .into(),
            ));
        }
        idle.map_or(Ok(()), |idle| self.still_idle(&config, idle))?;
        // A drowsy container that cannot be saved stays drowsy.
        if let (State::Drowsy, Some(init)) = (look.state, look.init) {
            self.rouse_to_sleep(&config, init)?;
        }
        let (mut init, process) = self.can_be_saved(&config)?;
        let quiet = idle.map_or(Duration::ZERO, |idle| idle.quiet);
        let subject = Subject { quiet, ..self.to_sleep(&config)? };
        self.forget_sleep(&config)?; // leftovers of an interrupted sleep
        let writer = Writer::begin_upon(&self.asleep_dir(id), self.earlier(id))?;
        let mut stopped = save::stop(&subject)?;
        let written = stopped.write(&subject, writer)?;
        let slept = disk::with_checksum(&init)?;
        disk::write_json(&self.asleep_dir(id).join(SLEPT), &slept, Durable::No)?;
        let held = self.hold(&config, written.held, written.is_busy);
        if let Err(e) = held.and_then(|()| self.set_alarm(&config, written.next_ring, idle)) {
            self.forget_sleep(&config)?;
            return Err(e);
        }
        let _doing = self.intend(id, &Intent::Sleep)?;
        // ORDER: published and held; then marked; only now may the processes be killed.
        init.sleeping = true;
        self.write_init(id, &init)?;
        let cgroup = self.cgroups()?.find(id.as_str())?;
        stopped.kill(|| cgroup.map_or(Ok(()), |cgroup| cgroup.kill()))?;
        pidfd::wait(process.as_fd(), None).map_err(Error::call("cannot wait for the container"))?;
        // ORDER: the keeper has recorded the exit before `doze` removes the directory of that
        // record.
        self.exit_of(id, &init)?;
        self.doze(&config)?;
        self.record("sleep", id.as_str(), config.name.as_str(), &reason(why));
        Ok(Some(written.figures))
    }

    /// Prepares the parts of a wake that are the same for all containers, in a process that waits
    /// for a job. No part has to succeed now.
    pub fn get_ready(&self) {
        let _ = (self.cgroups(), self.images(), self.network());
        let _ = (crate::start::hidden(), dormouse_kernel::capability::all());
        dormouse_kernel::process::map_own_program();
    }

    /// Wakes a container; does nothing if it runs.
    pub fn wake(&self, id: &ContainerId, why: Why) -> Result<()> {
        let Admitted { lock: _lock, config, look, leave: _leave } = self.lock_to_wake(id)?;
        if let (State::Drowsy, Some(init)) = (look.state, &look.init) {
            return self.rouse(&config, init.clone(), why);
        }
        if look.is_alive() {
            self.stay_awake(&config, look.init)?;
            // A keeper that has its old descriptors from the vault would request a wake again and
            // again.
            return self.no_longer_called(id);
        }
        self.wake_found(&config, look, why).map(Running::detach)
    }

    pub(crate) fn wake_locked(&self, config: &Config, why: Why) -> Result<Running> {
        self.wake_found(config, self.look(config)?, why)
    }

    /// Wakes a container whose state the caller has read.
    fn wake_found(&self, config: &Config, look: Look, why: Why) -> Result<Running> {
        // A container with an unsettled exit may turn out to be stopped, or asleep.
        let (state, ended) = (look.state, look.needs_settling());
        self.settle_found(config, look, false)?;
        let state = if ended { self.look(config)?.state } else { state };
        if state != State::Asleep {
            return Err(self.not(config, state, "only a sleeping container is woken"));
        }
        let mut held = Vec::new();
        let woken = self.wake_with(config, &mut held, why);
        if woken.is_err() {
            self.hold_again(config, held);
        }
        woken
    }

    /// Wakes a container with its held sockets. On failure `held` contains the sockets taken from
    /// the keeper.
    fn wake_with(
        &self,
        config: &Config,
        held: &mut Vec<(u32, OwnedFd)>,
        why: Why,
    ) -> Result<Running> {
        // The keeper is scheduled while the checkpoint is read.
        let calling = Keeper::call(&self.places().run)?;
        let reader = Arc::new(Reader::open(&self.asleep_dir(&config.id))?);
        let is_large = reader.records().pages.bytes >= WOKEN_BYTES_MIN;
        let later = self.later_in_any_case(&config.id, &reader);
        let check = Some(Check::begin(&reader, later.as_ref()));
        let mut keeper = self.keeper_called(calling)?;
        let id = config.id.as_str();
        let called = (0..).zip(&reader.records().objects);
        let called = called.filter(|(_, object)| object.is_called_from_outside());
        let called: Vec<u32> = called.map(|(number, _)| number).collect();
        let ahead = called.len().min(AHEAD_MAX);
        called[..ahead].iter().try_for_each(|number| keeper.ask_for(id, *number))?;
        // The keeper looks the sockets up meanwhile.
        let since = self.slept(&config.id)?;
        let origin = Origin::of(&self.asleep_dir(&config.id))?;
        let (wakes, beside) = (true, origin.is_some());
        let addresses = origin.map(|origin| origin.addresses).unwrap_or_default();
        let _doing = self.intend(&config.id, &Intent::Sleep)?;
        for (place, number) in called.into_iter().enumerate() {
            let taken = if place < ahead { keeper.taken() } else { keeper.take(id, number) };
            match taken {
                Ok(socket) => held.push((number, socket)),
                // The socket was never held by this keeper: it is made again.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(e.into()),
            }
        }
        let (keeper, sockets) = (Cell::new(Some(keeper)), std::mem::take(held));
        let comeback = Comeback {
            reader,
            check,
            held: sockets,
            wakes,
            since,
            addresses,
            beside,
            keeper,
            later,
            common: None,
            keeps_quiet: false,
        };
        let mut running = match self.start_restored(config, &comeback) {
            // ORDER: now: no other process may have the container's files open when it closes them.
            Ok(running) => {
                drop(comeback);
                running
            }
            Err(e) => {
                *held = comeback.held;
                return Err(e);
            }
        };
        self.unmark(config, disk::read_json(&self.run_dir(&config.id).join("init.json"))?)?;
        self.no_longer_asleep(config, Some(&mut running.keeper), is_large)?;
        self.record("wake", config.id.as_str(), config.name.as_str(), &reason(why));
        Ok(running)
    }

    /// Gives the held sockets of a failed wake to the keeper, if that has been replaced since:
    /// later callers wait in the queues of these sockets. The keeper requests another wake at once.
    fn hold_again(&self, config: &Config, held: Vec<(u32, OwnedFd)>) {
        let give = || -> Result<()> {
            let Some((first, _)) = held.first() else { return Ok(()) };
            let mut keeper = self.keeper()?;
            match keeper.take(config.id.as_str(), *first) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                other => return Ok(other.map(drop)?), // the keeper has them
            }
            let reader = Reader::open(&self.asleep_dir(&config.id))?;
            let held = held_files(reader.records(), held);
            self.hold_with(&mut keeper, config, held, true, 0)
        };
        if let Err(e) = give() {
            self.lost(&config.id, config.name.as_str(), &e);
        }
    }

    /// Marks a container as awake and removes its checkpoint, also after an interrupted sleep.
    ///
    /// ORDER: all processes run; then the mark is removed; then the checkpoint.
    pub(crate) fn stay_awake(&self, config: &Config, init: Option<InitRecord>) -> Result<()> {
        self.unmark(config, init)?;
        self.forget_sleep(config)
    }

    fn unmark(&self, config: &Config, init: Option<InitRecord>) -> Result<()> {
        match init.filter(|init| init.sleeping) {
            Some(init) => self.write_init(&config.id, &InitRecord { sleeping: false, ..init }),
            None => Ok(()),
        }
    }

    /// Passes the held files to the keeper. A container that was active is woken as soon as it
    /// sleeps: a peer that waits for its output may send nothing more.
    fn hold(&self, config: &Config, held: Vec<HeldFile>, is_busy: bool) -> Result<()> {
        let mut keeper = self.keeper()?;
        self.note_custody(&mut keeper)?;
        keeper.let_go(config.id.as_str())?; // leftovers of an interrupted command
        self.hold_with(&mut keeper, config, held, is_busy, 0)
    }

    /// ORDER: before the processes end: the vault has copies by then, so a killed keeper loses no
    /// connection.
    pub(crate) fn hold_with(
        &self,
        keeper: &mut Keeper,
        config: &Config,
        held: Vec<HeldFile>,
        is_busy: bool,
        more: u8,
    ) -> Result<()> {
        let id = config.id.as_str();
        if held.is_empty() || is_busy {
            let count = u32::from(is_busy);
            let event = rustix::event::eventfd(count, rustix::event::EventfdFlags::CLOEXEC);
            let event = event.map_err(|e| Error::file("cannot make", "an eventfd")(e.into()))?;
            keeper.hold(id, NO_SOCKET, event.as_fd(), watch::READ | more)?;
        }
        for HeldFile { object, file, wakes, cause } in held {
            let (mut bits, is_heard) = (more, hears(config.wake_on, cause));
            if wakes.readable && is_heard {
                bits |= watch::READ;
            }
            if wakes.writable && is_heard {
                bits |= watch::WRITE;
            }
            keeper.hold(id, object, file.as_fd(), bits)?;
        }
        Ok(keeper.park(id)?)
    }

    /// Releases the kernel objects that an asleep container does not need. Its addresses, names and
    /// published ports stay.
    ///
    /// ORDER: `RUN/c/ID` last, as in every teardown.
    pub(crate) fn doze(&self, config: &Config) -> Result<()> {
        let id = &config.id;
        if let Some(cgroup) = self.cgroups()?.find(id.as_str())? {
            cgroup.kill().and_then(|()| cgroup.remove())?;
        }
        if matches!(config.net, dormouse_model::NetMode::Address { .. }) {
            self.network()?.doze(id)?;
        }
        self.remove_shared(id)?;
        // The parts of the old checkpoint that are still needed are linked into the new one.
        remove_tree(&self.woken_dir(id))?;
        remove_tree(&self.run_dir(id))
    }

    /// Returns whether a container is asleep, given the exit of its first process: the process was
    /// killed while marked, or exited by itself because its engine died before releasing it.
    pub(crate) fn fell_asleep(&self, config: &Config, init: &InitRecord, exit: &Exit) -> bool {
        let killed = exit.signal == Some(SIGKILL) || exit.code.is_none();
        let never_began = exit.code == Some(NEVER_BEGAN);
        let meant = init.sleeping && !init.stopping;
        meant && (killed || never_began) && self.asleep_dir(&config.id).exists()
    }

    /// Ends an asleep container, which is stopped then.
    pub(crate) fn end_sleep(&self, config: &Config) -> Result<()> {
        let now = crate::event::now_unix_ms();
        let since = self.slept(&config.id)?;
        let exit = Exit {
            code: Some(128 + SIGKILL),
            signal: Some(SIGKILL),
            oom_killed: false,
            started_unix_ms: since.map_or(now, |init| init.started_unix_ms),
            finished_unix_ms: now,
            failures: 0,
            short_runs: 0,
            stopped: true,
        };
        self.write_exit(&config.id, &exit)?;
        self.forget_sleep(config)?;
        self.tear_down(&config.id, Some(config))
    }

    /// Removes the checkpoint of an asleep container and drops its held sockets, if there are any.
    pub(crate) fn forget_sleep(&self, config: &Config) -> Result<()> {
        self.no_longer_asleep(config, None, false)
    }

    /// Ends the sleep, over an existing connection to the keeper if there is one. The checkpoint
    /// may be kept.
    fn no_longer_asleep(
        &self,
        config: &Config,
        keeper: Option<&mut Keeper>,
        is_kept: bool,
    ) -> Result<()> {
        let dir = self.asleep_dir(&config.id);
        if !dir.exists() {
            return Ok(());
        }
        match keeper {
            Some(keeper) => keeper.let_go(config.id.as_str())?,
            None => self.no_longer_called(&config.id)?,
        }
        if is_kept {
            let woken = self.woken_dir(&config.id);
            remove_tree(&woken)?; // left by a killed sleep
            return fs::rename(&dir, &woken).map_err(Error::file("cannot put aside", &dir));
        }
        // Renamed first, so that a partly removed checkpoint is never used.
        let gone = dir.with_file_name(".asleep-gone");
        remove_tree(&gone)?; // left by a killed removal
        fs::rename(&dir, &gone).map_err(Error::file("cannot remove", &dir))?;
        remove_tree(&gone)
    }

    /// Returns the saved record of an asleep container's first process; `None` if none was written, a power
    /// cut lost it, or it is damaged. The checkpoint does not need the record: an event names the damage, and
    /// the start time of the container is then that of its wake.
    pub(crate) fn slept(&self, id: &ContainerId) -> Result<Option<InitRecord>> {
        let path = self.asleep_dir(id).join(SLEPT);
        match disk::read_with_checksum::<InitRecord>(&path) {
            Err(e @ Error::Corrupt { .. }) => {
                let name = self.config(id).map(|config| config.name.as_str().to_owned());
                let name = name.unwrap_or_default();
                self.record("sleep", id.as_str(), &name, &[("damaged", e.to_string())]);
                Ok(None)
            }
            other => other,
        }
    }

    /// Returns when a container fell asleep: the time when its checkpoint was published.
    pub(crate) fn asleep_since(&self, id: &ContainerId) -> Option<i64> {
        let published = fs::metadata(self.asleep_dir(id)).and_then(|meta| meta.modified()).ok()?;
        Some(published.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis() as i64)
    }

    /// Directory of the checkpoint from which a container was woken.
    pub(crate) fn woken_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join(WOKEN)
    }

    /// Directory of an asleep container's checkpoint: the container is asleep if this exists and no
    /// process.
    pub(crate) fn asleep_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join(ASLEEP)
    }
}
