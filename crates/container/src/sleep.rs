//! Sleep and wake: a container without processes that answers whoever calls.
//!
//! An *asleep* container is a checkpoint, `LIB/containers/ID/asleep`, and the sockets that are called
//! from outside (TCP sockets that listen, UDP sockets), held by the keeper
//! ([`dormouse_launch::Keeper::hold`]). It has no process, no cgroup, no mount; it keeps its
//! addresses, names and published ports. Whoever connects is answered by the kernel and waits in the
//! queue of the held socket; that has the keeper run `dormouse internal wake ID`, which restores the
//! processes with the very socket in its old place, so the caller is the first whom the container
//! accepts, and nothing was refused or sent twice.
//!
//! **Whoever is killed when.** The checkpoint is published while all processes stand still; then they
//! are marked (`sleeping` in the record of the first one); then they are killed. Waking goes the other
//! way: the record says `sleeping` until all processes run. So a container whose marked first process
//! was killed, or never let go, is asleep, whoever finds it ([`Engine::settle_found`]); one that is not marked is not,
//! and its checkpoint is of the past. A request that arrives meanwhile wakes it right after.
//!
//! LIMIT: only what can be checkpointed sleeps, and nothing with an open TCP connection; a keeper that
//! is killed lets go of the sockets, and then only a command wakes the container; an asleep container
//! does not outlive the boot of its host.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use dormouse_checkpoint::format::Reader;
use dormouse_checkpoint::save::{self, Figures, Subject};
use dormouse_kernel::ErrorKind;
use dormouse_kernel::pidfd;
use dormouse_launch::{Keeper, NEVER_BEGAN};
use dormouse_model::{Config, ContainerId, State};

use crate::checkpoint::Comeback;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::life::{Exit, InitRecord};
use crate::pending::remove_tree;
use crate::start::Running;

/// The signal that ends what falls asleep.
const SIGKILL: i32 = 9;
/// What stands for the sockets of a container that has none that listens: the keeper has to know of
/// it all the same.
const NO_SOCKET: u32 = u32::MAX;

impl Engine {
    /// Puts a running container to sleep; `None` where it sleeps already.
    ///
    /// Errors: [`Refused`](dormouse_checkpoint::Error::Refused) names what cannot be saved, and
    /// nothing was stopped; [`ErrorKind::Busy`] while somebody waits for the container's end.
    pub fn sleep(&self, id: &ContainerId) -> Result<Option<Figures>> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        if self.look(&config)?.state == State::Asleep {
            return Ok(None);
        }
        let (mut init, process) = self.can_be_saved(&config)?;
        if config.auto_remove {
            return Err(Error::Invalid(
                "a container of --rm does not sleep: its files are not kept beyond its processes"
                    .into(),
            ));
        }
        let subject = Subject { hold: true, ..self.subject(&config)? };
        let mut stopped = save::stop(&subject)?;
        self.forget_sleep(&config)?; // what a sleep left that was interrupted
        let written = stopped.write(&subject, &self.asleep_dir(id))?;
        if let Err(e) = self.hold(&config, written.held) {
            self.forget_sleep(&config)?;
            return Err(e);
        }
        // ORDER: published and held; then marked; now, and not before, the processes may go.
        init.sleeping = true;
        self.write_init(id, &init)?;
        let cgroup = self.cgroups()?.find(id.as_str())?;
        stopped.kill(|| cgroup.map_or(Ok(()), |cgroup| cgroup.kill()))?;
        pidfd::wait(process.as_fd(), None).map_err(Error::call("cannot wait for the container"))?;
        // ORDER: the keeper has written down the end, or it would do so in what is removed now.
        self.exit_of(id, &init)?;
        self.doze(&config)?;
        self.record("sleep", id.as_str(), config.name.as_str(), &[]);
        Ok(Some(written.figures))
    }

    /// Wakes a container; one that runs is awake already.
    pub fn wake(&self, id: &ContainerId) -> Result<()> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let look = self.look(&config)?;
        if look.is_alive() {
            return self.stay_awake(&config, look.init);
        }
        self.wake_locked(&config).map(Running::detach)
    }

    pub(crate) fn wake_locked(&self, config: &Config) -> Result<Running> {
        // One whose end nobody has taken note of yet may turn out to be stopped, or asleep.
        self.settle_locked(config, false)?;
        let state = self.look(config)?.state;
        if state != State::Asleep {
            return Err(self.not(config, state, "only a sleeping container is woken"));
        }
        let reader = Reader::open(&self.asleep_dir(&config.id))?;
        reader.verify()?;
        let mut keeper = self.keeper()?;
        let mut held = Vec::new();
        for (number, object) in (0..).zip(&reader.records().objects) {
            if !object.thing.is_called_from_outside() {
                continue;
            }
            match keeper.take(config.id.as_str(), number) {
                Ok(socket) => held.push((number, socket)),
                // A keeper of a later life: the socket is made again.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(e.into()),
            }
        }
        let comeback = Comeback { reader, held, wakes: true, addresses: Vec::new() };
        let running = self.start_restored(config, &comeback)?;
        self.stay_awake(config, self.look(config)?.init)?;
        self.record("wake", config.id.as_str(), config.name.as_str(), &[]);
        Ok(running)
    }

    /// ORDER: all run; then they are no longer marked; then what they came from goes. Also for what
    /// runs on after a sleep that was interrupted.
    fn stay_awake(&self, config: &Config, init: Option<InitRecord>) -> Result<()> {
        if let Some(init) = init.filter(|init| init.sleeping) {
            self.write_init(&config.id, &InitRecord { sleeping: false, ..init })?;
        }
        self.forget_sleep(config)
    }

    fn hold(&self, config: &Config, held: Vec<(u32, OwnedFd)>) -> Result<()> {
        let mut keeper = self.keeper()?;
        let id = config.id.as_str();
        if held.is_empty() {
            let silent = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
            let silent = silent.map_err(|e| Error::file("cannot make", "an eventfd")(e.into()))?;
            keeper.hold(id, NO_SOCKET, silent.as_fd())?;
        }
        for (key, socket) in held {
            keeper.hold(id, key, socket.as_fd())?;
        }
        Ok(())
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
        remove_tree(&self.run_dir(id))
    }

    /// Whether a container whose first process has ended so is asleep: it was killed while it was
    /// marked, or ended by itself because its engine did before it was let go.
    pub(crate) fn fell_asleep(&self, config: &Config, init: &InitRecord, exit: &Exit) -> bool {
        let killed = exit.signal == Some(SIGKILL) || exit.code.is_none();
        let never_began = exit.code == Some(NEVER_BEGAN);
        init.sleeping && (killed || never_began) && self.asleep_dir(&config.id).exists()
    }

    /// Ends an asleep container: it is stopped then.
    pub(crate) fn end_sleep(&self, config: &Config, last: Option<Exit>) -> Result<()> {
        let now = crate::event::now_unix_ms();
        let exit = Exit {
            code: Some(128 + SIGKILL),
            signal: Some(SIGKILL),
            oom_killed: false,
            // LIMIT: when it was started is forgotten in its sleep.
            started_unix_ms: last.map_or(now, |exit| exit.started_unix_ms),
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
        let dir = self.asleep_dir(&config.id);
        if !dir.exists() {
            return Ok(());
        }
        if let Some(mut keeper) = Keeper::connect(&self.places().run)? {
            keeper.let_go(config.id.as_str())?;
        }
        // Renamed first: half a checkpoint is none.
        let gone = dir.with_file_name(".asleep-gone");
        remove_tree(&gone)?; // of a removal that was killed
        fs::rename(&dir, &gone).map_err(Error::file("cannot remove", &dir))?;
        remove_tree(&gone)
    }

    /// The checkpoint of an asleep container: it is asleep where this is and no process.
    pub(crate) fn asleep_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join("asleep")
    }
}
