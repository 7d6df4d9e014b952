//! Sleep and wake: a container without processes that answers whoever calls.
//!
//! An *asleep* container is a checkpoint, `LIB/containers/ID/asleep`, and the sockets that are called
//! from outside (TCP sockets that listen or have a connection, UDP sockets), held by the keeper
//! ([`dormouse_launch::Keeper::hold`]). It has no process, no cgroup, no mount; it keeps its
//! addresses, names and published ports. Whoever connects is answered by the kernel and waits in the
//! queue of the held socket; that has the keeper run `dormouse internal wake ID`, which restores the
//! processes with the very socket in its old place, so the caller is the first whom the container
//! accepts, and nothing was refused or sent twice. A connection that is open stays open: the kernel
//! goes on with it, and what comes in, room for more to send, or its end wakes the container. When it
//! falls asleep by itself, and which of its timers wake it, is told in [`crate::idle`].
//!
//! **At work.** Only a container that waits can sleep: one that was stopped while it was at work is
//! woken as soon as it sleeps. In the middle of sending a file, say, its peer has nothing more to say
//! that would wake it.
//!
//! **Whoever is killed when.** The checkpoint is published while all processes stand still; then they
//! are marked (`sleeping` in the record of the first one); then they are killed. Waking goes the other
//! way: the record says `sleeping` until all processes run. So a container whose marked first process
//! was killed, or never let go, is asleep, whoever finds it ([`Engine::settle_found`]); one that is not marked is not,
//! and its checkpoint is of the past. A request that arrives meanwhile wakes it right after.
//!
//! **Again.** A large checkpoint is kept while the container is awake (`LIB/containers/ID/woken`), until it
//! sleeps again or ends: what of its memory has not changed by then is not written a second time
//! ([`dormouse_checkpoint::format::Base`]).
//!
//! LIMIT: only what can be checkpointed sleeps. A keeper that is killed lets go of the sockets: open
//! connections are lost, the others are made again by the next command ([`crate::custody`]). After a
//! reboot that is so, too; its clocks go on.

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

/// What the directory of a checkpoint is called whose container is asleep.
pub(crate) const ASLEEP: &str = "asleep";
/// The same when it is awake again: what it has in memory need not be written when it falls asleep the
/// next time, where it has not changed.
const WOKEN: &str = "woken";
/// With less than so much it is not worth keeping, and is written again.
const WOKEN_BYTES_MIN: u64 = 8 << 20;
/// The signal that ends what falls asleep.
pub(crate) const SIGKILL: i32 = 9;
/// LIMIT: so many sockets are asked for before the first is there.
const AHEAD_MAX: usize = 32;
/// An event that is held beside sockets, or in their place: the keeper has to know of a container that
/// has none all the same.
pub(crate) const NO_SOCKET: u32 = u32::MAX;

fn reason(why: Why) -> [(&'static str, String); 1] {
    [("reason", why.as_str().to_owned())]
}

/// Whether somebody who sleeps is to be woken by that.
fn hears(wake_on: WakeOn, cause: Cause) -> bool {
    match cause {
        Cause::Call => wake_on.call,
        Cause::Data => wake_on.data,
        Cause::File => wake_on.file,
        // Where timers may wait it is the alarm that tells of all of them.
        Cause::Timer => wake_on.timer == WakeOnTimer::InTime,
        Cause::Other => true,
    }
}

/// Sockets that listen, of a checkpoint, by the numbers of their objects.
pub(crate) fn held_files(records: &Records, all: Vec<(u32, OwnedFd)>) -> Vec<HeldFile> {
    let wakes = Wakes { readable: true, writable: false };
    let cause = |object: u32| match records.objects.get(object as usize) {
        Some(object) => object.cause(),
        None => Cause::Other, // an event of ours
    };
    let file = |(object, file)| HeldFile { object, file, wakes, cause: cause(object) };
    all.into_iter().map(file).collect()
}

impl Engine {
    /// Puts a running container to sleep; `None` where it sleeps already.
    ///
    /// Errors: [`Refused`](dormouse_checkpoint::Error::Refused) names what cannot be saved, and
    /// nothing was stopped; [`ErrorKind::Busy`] while somebody waits for the container's end.
    pub fn sleep(&self, id: &ContainerId) -> Result<Option<Figures>> {
        self.sleep_as(id, None, Why::Operator)
    }

    /// The same, if it is still idle where that is why.
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
        // One that is drowsy and cannot be saved stays so.
        if let (State::Drowsy, Some(init)) = (look.state, look.init) {
            self.rouse_to_sleep(&config, init)?;
        }
        let (mut init, process) = self.can_be_saved(&config)?;
        let quiet = idle.map_or(Duration::ZERO, |idle| idle.quiet);
        let subject = Subject { quiet, ..self.to_sleep(&config)? };
        self.forget_sleep(&config)?; // what a sleep left that was interrupted
        let writer = Writer::begin_upon(&self.asleep_dir(id), self.earlier(id))?;
        let mut stopped = save::stop(&subject)?;
        let written = stopped.write(&subject, writer)?;
        disk::write_json(&self.asleep_dir(id).join("init.json"), &init, Durable::No)?;
        let held = self.hold(&config, written.held, written.is_busy);
        if let Err(e) = held.and_then(|()| self.set_alarm(&config, written.next_ring, idle)) {
            self.forget_sleep(&config)?;
            return Err(e);
        }
        let _doing = self.intend(id, &Intent::Sleep)?;
        // ORDER: published and held; then marked; now, and not before, the processes may go.
        init.sleeping = true;
        self.write_init(id, &init)?;
        let cgroup = self.cgroups()?.find(id.as_str())?;
        stopped.kill(|| cgroup.map_or(Ok(()), |cgroup| cgroup.kill()))?;
        pidfd::wait(process.as_fd(), None).map_err(Error::call("cannot wait for the container"))?;
        // ORDER: the keeper has written down the end, or it would do so in what is removed now.
        self.exit_of(id, &init)?;
        self.doze(&config)?;
        self.record("sleep", id.as_str(), config.name.as_str(), &reason(why));
        Ok(Some(written.figures))
    }

    /// Does what waking takes and what is the same whoever is woken, for somebody who waits to be told.
    /// Nothing of it has to succeed now.
    pub fn get_ready(&self) {
        let _ = (self.cgroups(), self.images(), self.network());
        let _ = (crate::start::hidden(), dormouse_kernel::capability::all());
        dormouse_kernel::process::map_own_program();
    }

    /// Wakes a container; one that runs is awake already.
    pub fn wake(&self, id: &ContainerId, why: Why) -> Result<()> {
        let Admitted { lock: _lock, config, look, leave: _leave } = self.lock_to_wake(id)?;
        if let (State::Drowsy, Some(init)) = (look.state, &look.init) {
            return self.rouse(&config, init.clone(), why);
        }
        if look.is_alive() {
            self.stay_awake(&config, look.init)?;
            // A keeper that has it from the vault, and from a time when it slept, would call again and again.
            return self.no_longer_called(id);
        }
        self.wake_found(&config, look, why).map(Running::detach)
    }

    pub(crate) fn wake_locked(&self, config: &Config, why: Why) -> Result<Running> {
        self.wake_found(config, self.look(config)?, why)
    }

    /// The same for who has looked already.
    fn wake_found(&self, config: &Config, look: Look, why: Why) -> Result<Running> {
        // One whose end nobody has taken note of yet may turn out to be stopped, or asleep.
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

    /// Wakes a container with what is held of it. Where that fails `held` is what it had from the keeper.
    fn wake_with(
        &self,
        config: &Config,
        held: &mut Vec<(u32, OwnedFd)>,
        why: Why,
    ) -> Result<Running> {
        // It wakes up while the checkpoint is read.
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
        // The keeper looks for them meanwhile.
        let since = self.slept(&config.id)?;
        let origin = Origin::of(&self.asleep_dir(&config.id))?;
        let (wakes, beside) = (true, origin.is_some());
        let addresses = origin.map(|origin| origin.addresses).unwrap_or_default();
        let _doing = self.intend(&config.id, &Intent::Sleep)?;
        for (place, number) in called.into_iter().enumerate() {
            let taken = if place < ahead { keeper.taken() } else { keeper.take(id, number) };
            match taken {
                Ok(socket) => held.push((number, socket)),
                // A keeper of a later life: the socket is made again.
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
            // ORDER: now: what the container closes is closed when nobody else has it open.
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

    /// Gives what was held of one that did not come back to the keeper, where that is another by now: who
    /// has called since waits in these very sockets. It has itself woken once more.
    fn hold_again(&self, config: &Config, held: Vec<(u32, OwnedFd)>) {
        let give = || -> Result<()> {
            let Some((first, _)) = held.first() else { return Ok(()) };
            let mut keeper = self.keeper()?;
            match keeper.take(config.id.as_str(), *first) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                other => return Ok(other.map(drop)?), // it has them
            }
            let reader = Reader::open(&self.asleep_dir(&config.id))?;
            let held = held_files(reader.records(), held);
            self.hold_with(&mut keeper, config, held, true, 0)
        };
        if let Err(e) = give() {
            self.lost(&config.id, config.name.as_str(), &e);
        }
    }

    /// ORDER: all run; then they are no longer marked; then what they came from goes. Also for what
    /// runs on after a sleep that was interrupted.
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

    /// Gives what is held to the keeper. A container that was at work has itself woken as soon as it
    /// sleeps: whoever waits for what it does may have nothing more to say.
    fn hold(&self, config: &Config, held: Vec<HeldFile>, is_busy: bool) -> Result<()> {
        let mut keeper = self.keeper()?;
        self.note_custody(&mut keeper)?;
        keeper.let_go(config.id.as_str())?; // what was interrupted has left
        self.hold_with(&mut keeper, config, held, is_busy, 0)
    }

    /// ORDER: before its processes end: whoever kills the keeper then kills nobody's connection.
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

    /// Gives back what an asleep container does not need. Its addresses, names and published ports
    /// stay.
    ///
    /// ORDER: `RUN/c/ID` last, as ever.
    pub(crate) fn doze(&self, config: &Config) -> Result<()> {
        let id = &config.id;
        if let Some(cgroup) = self.cgroups()?.find(id.as_str())? {
            cgroup.kill().and_then(|()| cgroup.remove())?;
        }
        if matches!(config.net, dormouse_model::NetMode::Address { .. }) {
            self.network()?.doze(id)?;
        }
        remove_tree(&self.places().shared().join(id.as_str()))?;
        // What it holds that is still needed is in the new one, too.
        remove_tree(&self.woken_dir(id))?;
        remove_tree(&self.run_dir(id))
    }

    /// Whether a container whose first process has ended so is asleep: it was killed while it was
    /// marked, or ended by itself because its engine did before it was let go.
    pub(crate) fn fell_asleep(&self, config: &Config, init: &InitRecord, exit: &Exit) -> bool {
        let killed = exit.signal == Some(SIGKILL) || exit.code.is_none();
        let never_began = exit.code == Some(NEVER_BEGAN);
        let meant = init.sleeping && !init.stopping;
        meant && (killed || never_began) && self.asleep_dir(&config.id).exists()
    }

    /// Ends an asleep container: it is stopped then.
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
            stopped: true,
        };
        self.write_exit(&config.id, &exit)?;
        self.forget_sleep(config)?;
        self.tear_down(&config.id, Some(config))
    }

    /// Lets go of what an asleep container is made of, if it is one.
    pub(crate) fn forget_sleep(&self, config: &Config) -> Result<()> {
        self.no_longer_asleep(config, None, false)
    }

    /// The same for who may have a connection to the keeper already. Its checkpoint may be `kept`.
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
            remove_tree(&woken)?; // of a sleep that was killed
            return fs::rename(&dir, &woken).map_err(Error::file("cannot put aside", &dir));
        }
        // Renamed first: half a checkpoint is none.
        let gone = dir.with_file_name(".asleep-gone");
        remove_tree(&gone)?; // of a removal that was killed
        fs::rename(&dir, &gone).map_err(Error::file("cannot remove", &dir))?;
        remove_tree(&gone)
    }

    /// The record of the first process of an asleep container, as it was; `None` where nobody has
    /// written it, or a power cut took it.
    pub(crate) fn slept(&self, id: &ContainerId) -> Result<Option<InitRecord>> {
        disk::read_json(&self.asleep_dir(id).join("init.json"))
    }

    /// When an asleep container fell asleep: its checkpoint was published then.
    pub(crate) fn asleep_since(&self, id: &ContainerId) -> Option<i64> {
        let published = fs::metadata(self.asleep_dir(id)).and_then(|meta| meta.modified()).ok()?;
        Some(published.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis() as i64)
    }

    /// The checkpoint from which a container was woken.
    pub(crate) fn woken_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join(WOKEN)
    }

    /// The checkpoint of an asleep container: it is asleep where this is and no process.
    pub(crate) fn asleep_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join(ASLEEP)
    }
}
