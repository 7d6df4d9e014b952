//! The engine: the public face of the crate, one line for each verb.
//!
//! Every method calls one function of the modules below, which take the engine's [`Ground`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_account::rule::{Compiled, Gate};
use dormouse_account::{AgreedHost, Number};
use dormouse_api::EventKind;
use dormouse_bpf::gates::{Stat as GateStat, Use};
use dormouse_bpf::socket_count::Count;
use dormouse_checkpoint::Refusal;
use dormouse_checkpoint::save::{Figures, Wait};
use dormouse_image::{Image, Progress, Store};
use dormouse_kernel::cgroup::{Forest, Hierarchy, Stats};
use dormouse_launch::ExitStatus;
use dormouse_model::{Config, ContainerId, Cpu, LogDriver, Name, RootSource, State};

use crate::account::{
    AccountDetails, AccountUpdate, Agreement, ConnectionLimits, LifeReading, NewAccount,
    RuleAnswer, RuleQuestion,
};
use crate::create::Created;
use crate::debt::Debtor;
use crate::drive::Writable;
use crate::drowsy::PushOut;
use crate::error::{Error, Result};
use crate::event::Follow;
use crate::gating::GateState;
use crate::ground::{self, Ground};
use crate::idle::Outcome;
use crate::inspect::Details;
use crate::layer::Root;
use crate::list::Listed;
use crate::log::Logs;
use crate::place::Places;
use crate::policy::{Idle, Policy, Reason, Request};
use crate::proof::Trial;
use crate::recover::{boot, custody};
use crate::save::{CheckpointOptions, NewCheckpoint};
use crate::saved::{Checkpoint, From};
use crate::scheduler::{self, Scheduler};
use crate::spec::{Create, Exec, Stdio, Update};
use crate::start::Running;
use crate::state::Exit;
use crate::template::Template;
use crate::unborn::Unborn;
use crate::verb::{pause, settle, stop, update, wait};
use crate::volume::Volume;
use crate::warmth::Warm;
use crate::{
    account, archive, barrier, contract, create, deal, debt, drive, drowsy, exec, gating, hold,
    idle, inspect, later, list, listen, log, nursery, policy, proof, rate, recover, remove, save,
    saved, settings, sleep, socket, spare, start, state, sysinfo, template, tidy, unborn, usage,
    verb, view, volume, wake, warm, warmth,
};

/// The engine on one set of directories.
#[derive(Debug)]
pub struct Engine {
    ground: Ground,
}

impl Engine {
    /// Opens the directories, makes missing ones, and after a reboot clears away the last boot's
    /// leftovers. Costs a few system calls; images, network and control groups are opened when a verb
    /// first needs them.
    pub fn open(places: Places) -> Result<Self> {
        let ground = Ground::new(places);
        ground.charge_images_by(contract::charge_images);
        boot::open(&ground)?;
        Ok(Self { ground })
    }

    /// The directories.
    pub fn places(&self) -> &Places {
        &self.ground.places
    }

    /// The directory of all views, which is a mount while containers have views.
    pub fn views(&self) -> PathBuf {
        self.ground.places.views()
    }

    /// What a container with views does not show.
    pub fn view_gaps(&self, config: &Config) -> Vec<&'static str> {
        view::gaps(config, sysinfo::is_loaded(&self.ground))
    }

    /// Returns the command line of this program's internal verb for these places; a container's id
    /// is appended by the caller.
    pub fn internal(&self, verb: &str) -> Result<Vec<OsString>> {
        self.ground.internal(verb)
    }

    /// Checks that the settings for wakes (`[wake]` in `config.toml`) can be read. A wake itself
    /// uses the defaults if they cannot, rather than keep a caller out.
    pub fn check_settings(&self) -> Result<()> {
        later::check_settings(&self.ground)
    }

    /// Returns how many slots of host ids and how many addresses there are.
    pub fn room(places: &Places) -> Result<(u32, u32)> {
        ground::room(places)
    }

    /// Returns the most tasks of a new container without an option for it, as far as the settings decide that.
    pub fn default_tasks(places: &Places) -> Result<Option<u32>> {
        settings::default_pids(&ground::settings(places))
    }

    /// Returns how many slots of host ids and how many addresses are in use.
    pub fn taken(&self) -> Result<(u32, u32)> {
        Ok((self.ground.slots.count()?, self.ground.network()?.addresses_in_use()?))
    }

    /// The operator's options for every mount of a host directory: `default-volume` under `[run]` in
    /// `config.toml`.
    pub fn default_volume(&self) -> Result<String> {
        settings::default_volume(&self.ground.settings())
    }

    /// The log driver of containers without `--log-driver`: `log-driver` under `[run]` in
    /// `config.toml`.
    pub fn log_driver(&self) -> Result<LogDriver> {
        settings::log_driver(&self.ground.settings())
    }

    /// The most tasks of a new container without an option for it: `pids` under `[run]` in `config.toml`. `None` is
    /// no limit, which a host without the controller has.
    pub fn default_pids(&self) -> Result<Option<u32>> {
        let pids = settings::default_pids(&self.ground.settings())?;
        // ORDER: nothing is made or opened here, before the locks of a start: a keeper that ends removes the parent.
        let has_limit = || {
            let hosts = Forest::find_kept(Some(&self.ground.places.run.join("mounts")));
            hosts.is_ok_and(|hosts| hosts.has("pids"))
        };
        Ok(pids.filter(|_| has_limit()))
    }

    /// Returns the memory that is charged to images, and how much of it is reclaimed last (on cgroup v1: not taken for
    /// containers while memory is guaranteed). Nothing is made.
    pub fn images_memory(&self) -> Result<(u64, u64)> {
        contract::images_memory(&self.ground)
    }

    /// The image store.
    pub fn images(&self) -> Result<&Store> {
        self.ground.images()
    }
}

/// Finding containers.
impl Engine {
    /// Finds a container by its name, its id, or the start of its id.
    pub fn find(&self, text: &str) -> Result<ContainerId> {
        self.ground.find(text)
    }

    /// The ids of all containers, in no order.
    pub fn ids(&self) -> Result<Vec<ContainerId>> {
        self.ground.ids()
    }

    /// Returns the ids of containers with processes, or about to have some, in no order.
    pub fn started(&self) -> Result<Vec<ContainerId>> {
        self.ground.started()
    }

    /// Returns the configuration of a container.
    pub fn config(&self, id: &ContainerId) -> Result<Config> {
        self.ground.config(id)
    }

    /// Runs a closure while the container can neither start nor stop.
    pub fn with_lock<T>(&self, id: &ContainerId, f: impl FnOnce() -> T) -> Result<T> {
        let _lock = self.ground.lock(id)?;
        Ok(f())
    }
}

/// Creating and removing.
impl Engine {
    /// Creates a container: its name, ids, addresses and empty writable layer. No program runs.
    ///
    /// ORDER: everything is made inside a directory that is not visible yet; its lock shows that
    /// this create is in progress, and one rename publishes it. A failure releases what was taken.
    /// For a killed create the next command does that ([`crate::pending`]).
    ///
    /// Parts of it may have been made ahead: a start within a second goes on with them.
    pub fn create(&self, create: Create) -> Result<Created> {
        create::create_to_start_later(&self.ground, create)
    }

    /// Creates a container that this process starts at once ([`Engine::start_new`]). Parts of it may have been made
    /// ahead.
    pub fn create_to_start(&self, create: Create) -> Result<Created> {
        create::create_to_start(&self.ground, create)
    }

    /// Makes parts of containers ahead while containers come and go, for [`Engine::create_to_start`]. `keeper` is
    /// closed when the keeper ends.
    pub fn nurse(&self, keeper: BorrowedFd<'_>) -> Result<()> {
        nursery::run(&self.ground, keeper)
    }

    /// Has what was made ahead released: images, addresses and slots are free then.
    pub fn dismiss_spares(&self) {
        spare::dismiss(&self.ground);
    }

    /// Renames a container.
    pub fn rename(&self, id: &ContainerId, name: &Name) -> Result<()> {
        warm::give_up(&self.ground, id)?;
        gating::change(&self.ground, || create::rename(&self.ground, id, name))
    }

    /// Removes a new container that is not to be started after all.
    pub fn discard(&self, created: Created) {
        remove::discard(&self.ground, created)
    }

    /// Removes a stopped container and everything that it owns. `volumes` also removes the volumes
    /// that were made for it alone. With `force` a running container is killed first.
    pub fn remove(&self, id: &ContainerId, force: bool, volumes: bool) -> Result<()> {
        remove::remove(&self.ground, id, force, volumes)
    }
}

/// Life.
impl Engine {
    /// Starts a new container. If the start fails, the container is removed.
    pub fn start_new(&self, created: Created, io: Stdio) -> Result<Running> {
        start::start_new(&self.ground, created, io)
    }

    /// Starts a container that is not running.
    pub fn start(&self, id: &ContainerId, io: Stdio) -> Result<Running> {
        verb::start::start(&self.ground, id, io)
    }

    /// Attaches to the terminal or the standard input of a running container; a sleeping one is
    /// woken. Without a terminal, its output is in its logs.
    pub fn attach(&self, id: &ContainerId) -> Result<Running> {
        verb::start::attach(&self.ground, id)
    }

    /// Returns whether a first process that has exited continues: its container is asleep, or was woken since.
    pub fn fell_asleep(&self, running: &Running) -> Result<bool> {
        verb::start::fell_asleep(&self.ground, running)
    }

    /// Returns the state of a container.
    pub fn state(&self, id: &ContainerId) -> Result<State> {
        Ok(state::observe(&self.ground, &self.ground.config(id)?)?.state)
    }

    /// Runs another process in a running container. With a terminal the caller gets the master
    /// side, and the keeper has no copy.
    pub fn exec(&self, id: &ContainerId, exec: Exec) -> Result<Running> {
        exec::exec(&self.ground, id, exec)
    }

    /// Waits for the first process of a container, settles the container and returns the exit
    /// status. A container that removes itself is withdrawn, and may be settled behind the answer.
    pub fn finish(&self, running: Running) -> Result<ExitStatus> {
        settle::finish(&self.ground, running)
    }

    /// Waits until the container is not running and returns its exit; returns at once if it is not
    /// running.
    pub fn wait(&self, id: &ContainerId) -> Result<Exit> {
        wait::wait(&self.ground, id)
    }

    /// Settles a container whose first process has exited, then restarts or removes it by its
    /// policy. The keeper calls this when no command waits for the container. `waits` is called before a restart is
    /// waited for.
    pub fn settle(&self, id: &ContainerId, waits: impl FnOnce()) -> Result<Option<Exit>> {
        settle::settle(&self.ground, id, waits)
    }

    /// Freezes all processes (cgroups(7), freezer). A drowsy container becomes paused.
    pub fn pause(&self, id: &ContainerId) -> Result<()> {
        pause::pause(&self.ground, id)
    }

    /// Thaws all processes.
    pub fn unpause(&self, id: &ContainerId) -> Result<()> {
        pause::unpause(&self.ground, id)
    }

    /// Runs a closure while a running container is frozen; a paused container stays paused.
    pub fn while_frozen<T>(&self, id: &ContainerId, f: impl FnOnce() -> T) -> Result<T> {
        pause::while_frozen(&self.ground, id, f)
    }

    /// Sends a signal to the first process.
    pub fn kill(&self, id: &ContainerId, signal: i32) -> Result<()> {
        stop::kill(&self.ground, id, signal)
    }

    /// Sends the stop signal to the first process, and kills all processes if it has not exited
    /// after the timeout (the container's own if none is given). An asleep container is woken for the
    /// signal, unless the timeout is 0. A stopped container stays stopped, and a pending restart is
    /// cancelled.
    pub fn stop(&self, id: &ContainerId, timeout: Option<Duration>) -> Result<()> {
        stop::stop(&self.ground, id, timeout)
    }

    /// Changes limits, policies and addresses; of a running container at once. One that sleeps for want of memory is
    /// woken by a larger limit.
    pub fn update(&self, id: &ContainerId, update: &Update) -> Result<()> {
        let has_room = update::update(&self.ground, id, update)?;
        if has_room {
            // A wake that fails is on record, and the update is made.
            let _ = wake::wake(&self.ground, id, Reason::Operator);
        }
        Ok(())
    }
}

/// Sleep.
impl Engine {
    /// Puts a running container to sleep; `None` if it is asleep already.
    ///
    /// Errors: [`Refused`](dormouse_checkpoint::Error::Refused) names the objects that cannot be
    /// saved, and nothing was stopped; [`Error::Unlike`] and [`Error::NotRestored`] are those of a trial restore,
    /// and the container continues; [`ErrorKind::Busy`](crate::ErrorKind::Busy) while a process
    /// waits for the container's end.
    pub fn sleep(&self, id: &ContainerId, trial: Trial) -> Result<Option<Figures>> {
        sleep::sleep(&self.ground, id, None, Reason::Operator, trial)
    }

    /// Freezes a running container until an event arrives, and pushes its memory out; `None` if the
    /// container is drowsy, or asleep, already.
    ///
    /// Errors: [`ErrorKind::Busy`](crate::ErrorKind::Busy) for a paused container; a container that
    /// cannot be frozen within 10 s is thawed.
    pub fn drowse(&self, id: &ContainerId) -> Result<Option<PushOut>> {
        drowsy::drowse(&self.ground, id, None, Reason::Operator)
    }

    /// Wakes a container; does nothing if it runs.
    pub fn wake(&self, id: &ContainerId, reason: Reason) -> Result<()> {
        wake::wake(&self.ground, id, reason)
    }

    /// Wakes a container for an event. Returns false if it sleeps on: its clients have sent nothing yet and are
    /// to send first ([`dormouse_model::WakeOn`]), or are probers, or have woken containers too often.
    pub fn wake_for_event(&self, id: &ContainerId, reason: Reason) -> Result<bool> {
        wake::wake_for_event(&self.ground, id, reason)
    }

    /// Prepares the parts of a wake that are the same for all containers, in a process that waits
    /// for a job. No part has to succeed now.
    pub fn get_ready(&self) {
        wake::get_ready(&self.ground)
    }

    /// Prepares what each wake uses up again, between two wakes of one process.
    pub fn prepare_next(&self) {
        wake::prepare_next();
    }

    /// Refuses a container that cannot be kept warm ([`Engine::keep_warm`]), before it is put to sleep for that.
    pub fn check_warm(&self, id: &ContainerId) -> Result<()> {
        warm::check(&self.ground, id)
    }

    /// Keeps what the next wake of an asleep container makes: cgroups, mounts, and a newborn without a program. Does
    /// nothing for one that is warm. At the bound, the one that has slept longest is given up.
    ///
    /// Errors: Invalid for a container that cannot be kept warm, on a host without memory for it, and where the
    /// settings permit none; [`Error::State`] for one that is not asleep.
    pub fn keep_warm(&self, id: &ContainerId) -> Result<()> {
        warm::keep(&self.ground, id)
    }

    /// The same for one that the daemon has just put to sleep, if it is called often enough for that and the settings
    /// permit it.
    pub fn keep_if_called_often(&self, id: &ContainerId, idle: &Idle) {
        warm::keep_if_called_often(&self.ground, id, idle);
    }

    /// Returns all warm sleepers, the one that has slept longest first.
    pub fn warm(&self) -> Vec<Warm> {
        warmth::all(&self.ground)
    }

    /// Returns the containers with a record of a warm sleeper.
    pub fn warm_ids(&self) -> Vec<ContainerId> {
        warmth::ids(&self.ground)
    }

    /// Returns how many may be kept warm now: 0 where memory is short, or reserved. None are where the settings cannot
    /// be read.
    pub fn warm_most(&self) -> usize {
        match warm::may_keep_any(&self.ground) {
            true => settings::warm(&self.ground.settings()).unwrap_or(0),
            false => 0,
        }
    }

    /// Returns the memory that is charged to a warm sleeper, in bytes.
    pub fn warm_bytes(&self, id: &ContainerId) -> Result<Option<u64>> {
        warm::bytes(&self.ground, id)
    }

    /// Returns how many calls of a running container the barrier has refused; `None` if it is not behind one.
    pub fn barrier_refused(&self, id: &ContainerId) -> Result<Option<u64>> {
        barrier::refused(&self.ground, id)
    }

    /// Returns the idle times of a container that falls asleep or becomes drowsy by itself; `None`
    /// if it does not, or has no processes that could.
    pub fn policy(&self, id: &ContainerId) -> Result<Option<Policy>> {
        policy::of(&self.ground, id)
    }

    /// Returns the waits that keep a running container from ever being idle long enough: those with
    /// shorter timeouts. Empty for a container that does not fall asleep by itself.
    pub fn stirs(&self, id: &ContainerId) -> Result<Vec<Wait>> {
        idle::stirs(&self.ground, id)
    }

    /// Returns the waits of a running container whose timeouts end a sleep before `at_least` has passed.
    pub fn short_waits(&self, id: &ContainerId, at_least: Duration) -> Result<Vec<Wait>> {
        idle::short_waits(&self.ground, id, at_least)
    }

    /// Carries out a request of the daemon; if `idle` is given, only if the container is still idle.
    pub fn fall_asleep(
        &self,
        id: &ContainerId,
        idle: Option<&Idle>,
        request: Request,
        reason: Reason,
    ) -> Outcome {
        idle::fall_asleep(&self.ground, id, idle, request, reason)
    }

    /// Returns everything that prevents a sleep, which is less: reachable sockets are held by the
    /// keeper.
    pub fn explain_sleep(&self, id: &ContainerId) -> Result<Vec<Refusal>> {
        save::explain_sleep(&self.ground, id)
    }

    /// Returns the size of an asleep container's checkpoint in bytes; 0 if it is awake.
    pub fn asleep_bytes(&self, id: &ContainerId) -> u64 {
        usage::asleep_bytes(&self.ground, id)
    }
}

/// Checkpoints.
impl Engine {
    /// Returns everything that prevents a checkpoint of a running container, by name. No process is
    /// stopped.
    pub fn explain(&self, id: &ContainerId) -> Result<Vec<Refusal>> {
        save::explain(&self.ground, id)
    }

    /// Saves the processes of a running container.
    pub fn checkpoint(
        &self,
        id: &ContainerId,
        options: &CheckpointOptions,
    ) -> Result<NewCheckpoint> {
        save::checkpoint(&self.ground, id, options)
    }

    /// Saves the processes, and calls a closure while they are stopped. If the closure fails the
    /// processes continue, and the checkpoint is removed.
    pub fn checkpoint_while<T, E: std::convert::From<Error>>(
        &self,
        id: &ContainerId,
        options: &CheckpointOptions,
        meanwhile: impl FnOnce(&Path) -> std::result::Result<T, E>,
    ) -> std::result::Result<(NewCheckpoint, T), E> {
        save::checkpoint_while(&self.ground, id, options, meanwhile)
    }

    /// Returns the object because of which the last checkpoint of a container was not proven by a trial restore.
    pub fn unproven(&self, id: &ContainerId) -> Option<String> {
        proof::unproven(&self.ground, id)
    }

    /// Says which limits of a container this host takes and does not enforce, or not yet.
    pub fn not_enforced(&self, config: &Config) -> Result<Vec<String>> {
        let mut all = rate::not_enforced(&self.ground, config)?;
        all.extend(drive::not_kept(&self.ground, config)?);
        Ok(all)
    }

    /// Restores the processes of a stopped container.
    ///
    /// With `lazy`, large memory areas are filled while the processes run.
    pub fn restore(&self, id: &ContainerId, from: &From, lazy: bool) -> Result<Running> {
        verb::restore::restore(&self.ground, id, from, lazy)
    }

    /// Returns the checkpoints of a container, oldest first.
    pub fn checkpoints(&self, id: &ContainerId) -> Result<Vec<Checkpoint>> {
        saved::all(&self.ground, id)
    }

    /// Returns the numbers of the checkpoints of a container, in order. No checkpoint is read.
    pub fn checkpoint_numbers(&self, id: &ContainerId) -> Result<Vec<u32>> {
        saved::numbers(&self.ground, id)
    }

    /// Returns the directory of a checkpoint.
    pub fn checkpoint_path(&self, id: &ContainerId, from: &From) -> Result<PathBuf> {
        saved::path(&self.ground, id, from)
    }

    /// Removes a checkpoint of a container.
    pub fn remove_checkpoint(&self, id: &ContainerId, number: u32) -> Result<()> {
        saved::remove(&self.ground, id, number)
    }

    /// Writes a checkpoint of a stopped container, and its files as they are now, as an archive.
    pub fn export_checkpoint(
        &self,
        id: &ContainerId,
        which: &From,
        compress: bool,
        out: &mut dyn Write,
    ) -> Result<()> {
        archive::export(&self.ground, id, which, compress, out)
    }

    /// Writes a checkpoint of a container and its files as an archive.
    ///
    /// ORDER: no process runs that could change the files: see [`Engine::checkpoint_while`].
    pub fn write_archive(
        &self,
        config: &Config,
        checkpoint: &Path,
        compress: bool,
        out: &mut dyn Write,
    ) -> Result<()> {
        archive::write(&self.ground, config, checkpoint, compress, out)
    }

    /// Makes a container from an archive, with the checkpoint as its first; it has no process yet.
    ///
    /// `ask` receives the old configuration, which is untrusted, and returns the new one without
    /// its root.
    ///
    /// Errors: [`Error::Missing`] names a missing object that the archive needs; damage is reported
    /// with the name of the part. No container is made then.
    pub fn import_checkpoint<E: std::convert::From<Error>>(
        &self,
        input: &mut dyn Read,
        progress: &dyn Progress,
        ask: impl FnOnce(&Config) -> std::result::Result<Create, E>,
    ) -> std::result::Result<Config, E> {
        archive::import(&self.ground, input, progress, ask)
    }
}

/// Clones.
impl Engine {
    /// Makes a container like another, with its own name, ids and addresses (`addresses`, or some
    /// of the pool). Its root has the files of the other, and its processes come from a checkpoint
    /// of the other.
    pub fn clone_of(
        &self,
        other: &Config,
        name: Name,
        addresses: Vec<IpAddr>,
        root: RootSource,
        template: &Template,
    ) -> Result<Running> {
        verb::restore::clone_of(&self.ground, other, name, addresses, root, template)
    }

    /// Prepares clones of a container from a checkpoint of it. With `share` they share as much
    /// memory as possible, charged to the keeper; pages they write to are their own. If sharing
    /// fails each clone has all memory for itself, and [`Template::unshared`] returns the reason.
    ///
    /// Errors: [`Error::Invalid`] if the container has objects that two containers cannot share;
    /// damage.
    pub fn template(&self, other: &Config, checkpoint: &Path, share: bool) -> Result<Template> {
        template::make(&self.ground, other, checkpoint, share)
    }

    /// Prepares clones of a container that are created asleep. Their root has the container's
    /// files, and their processes are those of a checkpoint of it.
    pub fn unborn(
        &self,
        other: &Config,
        root: RootSource,
        checkpoint: &Path,
    ) -> Result<Unborn<'_>> {
        unborn::begin(&self.ground, other, root, checkpoint)
    }
}

/// Facts.
impl Engine {
    /// Returns the listed facts of all containers, oldest first. A container that is being removed
    /// is left out; a damaged record is an error that names the file.
    #[allow(clippy::vec_box, reason = "half a kilobyte each, and callers sort and filter the list")]
    pub fn list(&self) -> Result<Vec<Box<Listed>>> {
        list::list(&self.ground)
    }

    /// Everything about one container.
    pub fn inspect(&self, id: &ContainerId) -> Result<Details> {
        inspect::inspect(&self.ground, id)
    }

    /// Processor, memory and disk use so far.
    pub fn stats(&self, id: &ContainerId) -> Result<Stats> {
        inspect::stats(&self.ground, id)
    }

    /// Returns the sockets of a container with a limit.
    pub fn sockets(&self, config: &Config) -> Result<Option<Count>> {
        socket::count(&self.ground, config)
    }

    /// The host's pids of all its processes.
    pub fn pids(&self, id: &ContainerId) -> Result<Vec<u32>> {
        state::pids(&self.ground, id)
    }

    /// Where the output of a container is.
    pub fn logs(&self, id: &ContainerId) -> Result<Logs> {
        Ok(Logs::of(&self.ground, &self.ground.config(id)?))
    }

    /// Waits until the log of a container has all output that was written before. If the keeper was
    /// killed, another one is started that has the output read.
    pub fn flush_log(&self, id: &ContainerId) -> Result<()> {
        log::flush(&self.ground, id)
    }

    /// Returns the root directory of a container: its processes' root while it runs, or a detached
    /// mount of the same layers when it is stopped. A warm sleeper is an ordinary one then.
    pub fn root(&self, id: &ContainerId) -> Result<Root> {
        warm::root(&self.ground, id)
    }

    /// Opens the writable layer of a container, for `diff` and `commit`. A warm sleeper is an ordinary one then.
    pub fn writable(&self, config: &Config) -> Result<Writable> {
        warm::writable(&self.ground, config)
    }

    /// The directory of the writable layer of a container without a disk of its own.
    pub fn upper(&self, id: &ContainerId) -> PathBuf {
        self.ground.dir(id).join("upper")
    }

    /// The file with the disk of a container that has one.
    pub fn drive_file(&self, config: &Config) -> Option<PathBuf> {
        drive::file(&self.ground, config)
    }

    /// The same, of a disk that takes place below as files are written.
    pub fn sparse_drive_file(&self, config: &Config) -> Option<PathBuf> {
        drive::sparse_file(&self.ground, config)
    }

    /// Whether the file of a disk may be larger than its file system at present.
    pub fn drive_is_growing(&self, file: &Path) -> bool {
        drive::is_growing(file)
    }

    /// The free bytes of the file system below disks, and those of them that the host keeps.
    pub fn drive_room(&self) -> Result<(u64, u64)> {
        drive::room(&self.ground)
    }

    /// Returns the image of a container, if it has one.
    pub fn image_of(&self, config: &Config) -> Result<Option<Image>> {
        usage::image_of(&self.ground, config)
    }

    /// The image's name as lists show it.
    pub fn image_label(config: &Config) -> String {
        usage::image_label(config)
    }

    /// Returns the ids of images that containers are made from: `prune` must keep them.
    pub fn images_in_use(&self) -> Result<Vec<String>> {
        usage::images_in_use(&self.ground)
    }
}

/// Contracts.
impl Engine {
    /// Returns the running containers with a CPU reservation, and their contracts.
    pub fn cpu_reservations(&self) -> Result<Vec<(ContainerId, Cpu)>> {
        contract::granted(&self.ground)
    }

    /// Returns whether the settings ask for a scheduler of containers, `cpu-scheduler = "sched_ext"`.
    pub fn wants_scheduler(&self) -> Result<bool> {
        scheduler::is_wanted(&self.ground)
    }

    /// Has the kernel schedule all tasks of the host by the contracts of containers, until the scheduler is dropped.
    ///
    /// Errors: [`Error::Scheduler`] without sched_ext (Linux 6.19), or with another such scheduler.
    pub fn begin_scheduler(&self) -> Result<Scheduler> {
        Scheduler::load(&self.ground)
    }

    /// Writes the reservations of containers, by the ids of their cgroups, and that of the host. Returns how many there
    /// is no room for: these keep their static weights.
    pub fn schedule(
        &self,
        scheduler: &mut Scheduler,
        reserved: &BTreeMap<u64, Cpu>,
    ) -> Result<usize> {
        scheduler.reserve(&self.ground, reserved)
    }

    /// Returns the running containers with a rate for idle hosts, and their contracts.
    pub fn cpu_idle_rates(&self) -> Result<Vec<(ContainerId, Cpu)>> {
        contract::idle_rates(&self.ground)
    }

    /// Returns whether memory is guaranteed to a running container on cgroup v1, where a daemon changes limits
    /// ([`crate::MemoryLimits`]).
    pub fn governs_memory(&self) -> Result<bool> {
        contract::governs_memory(&self.ground)
    }

    /// Marks that the caller, a daemon, changes the CPU weights of these containers. Without the mark the
    /// static weights hold, which are written when it is removed, or by the first command after the daemon was
    /// killed.
    pub fn govern_cpu(&self, governs: bool) -> Result<()> {
        contract::govern(&self.ground, governs)
    }

    /// Returns whether clients pay for the work of shared services from their own share of CPU time: gates are loaded,
    /// and `service-debt` is not off.
    pub fn charges_debts(&self) -> Result<bool> {
        debt::is_on(&self.ground)
    }

    /// Returns whether connections of shared services are to be ordered: gates are loaded, and `service-order` is not
    /// off.
    pub fn orders_services(&self) -> Result<bool> {
        debt::orders(&self.ground)
    }

    /// Returns the running containers as debts need them, in cgroups that the caller has opened. Those that are
    /// `known` are read again only if they have changed.
    pub fn debtors(
        &self,
        cgroups: &Hierarchy,
        known: BTreeMap<ContainerId, Debtor>,
    ) -> Result<BTreeMap<ContainerId, Debtor>> {
        debt::debtors(&self.ground, cgroups, known)
    }

    /// Returns what containers have worked for other accounts, with the load of the gates that have counted, as a
    /// number that this boot uses once; `None` without gates.
    pub fn worked(&self) -> Result<Option<(u32, Vec<Use>)>> {
        debt::worked(&self.ground)
    }

    /// Marks the containers of which the caller, a daemon that governs weights, changes the weight or the quota beyond
    /// reservations, for debts or for an idle host. The settings of their contracts are written with those of
    /// reservations.
    pub fn mark_debts(&self, changed: &BTreeSet<ContainerId>) -> Result<()> {
        debt::mark(&self.ground, changed)
    }

    /// Writes the settings of the contracts of all containers that are marked, while the caller goes on governing.
    pub fn give_back_debts(&self) -> Result<()> {
        debt::give_back(&self.ground)
    }
}

/// Named volumes.
impl Engine {
    /// Returns all volumes, sorted by name.
    pub fn volumes(&self) -> Result<Vec<Volume>> {
        volume::all(&self.ground)
    }

    /// Returns one volume.
    pub fn volume(&self, name: &Name) -> Result<Volume> {
        volume::find(&self.ground, name)
    }

    /// Makes an empty volume. The first container that uses it copies the image's files into it.
    pub fn create_volume(&self, name: &Name, labels: BTreeMap<String, String>) -> Result<Volume> {
        volume::create(&self.ground, name, labels)
    }

    /// Removes the volumes that no container mounts, and returns their names.
    pub fn remove_unused_volumes(&self) -> Result<Vec<Name>> {
        volume::remove_unused(&self.ground)
    }

    /// Removes a volume, which no container may be using.
    pub fn remove_volume(&self, name: &Name) -> Result<()> {
        volume::remove(&self.ground, name)
    }

    /// Returns the directory of a volume, whether it exists or not.
    pub fn volume_path(&self, name: &Name) -> PathBuf {
        volume::path(&self.ground, name)
    }

    /// The directories of the named volumes that a container mounts.
    pub fn volumes_of(&self, config: &Config) -> Vec<PathBuf> {
        volume::paths_of(&self.ground, config)
    }
}

/// Accounts.
impl Engine {
    /// Makes an account, and returns its number.
    pub fn create_account(&self, new: NewAccount) -> Result<Number> {
        gating::change(&self.ground, || account::create(&self.ground, new))
    }

    /// Changes an account.
    pub fn set_account(&self, name: &Name, update: AccountUpdate) -> Result<()> {
        if let Some(Some(_)) = update.sockets {
            socket::check_account(&self.ground)?;
        }
        gating::change(&self.ground, || account::set(&self.ground, name, update))
    }

    /// Removes an account without containers and accounts below it. With `merge` its balance moves to its parent.
    pub fn remove_account(&self, name: &Name, merge: bool) -> Result<()> {
        gating::change(&self.ground, || account::remove(&self.ground, name, merge))
    }

    /// Charges what running containers have used up to now.
    pub fn charge_running(&self) -> Result<()> {
        // An ended container is charged before its removal is complete. One that cannot be removed has its own error
        // in the next command.
        let _ = recover::settle_withdrawn(&self.ground);
        account::update(&self.ground)
    }

    /// Returns how often the daemon charges what running containers have used: `every` under `[account]` in
    /// `config.toml`.
    pub fn account_period(&self) -> Result<Duration> {
        settings::account_period(&self.ground.settings())
    }

    /// Returns all accounts with their balances: root, then those that operators have made, then those of
    /// containers.
    pub fn accounts(&self) -> Result<Vec<AccountDetails>> {
        account::all(&self.ground)
    }

    /// Returns the counters of all lives that go on, and of ended ones that are in no balance yet.
    pub fn life_readings(&self) -> Result<Vec<LifeReading>> {
        account::readings(&self.ground)
    }

    /// Returns the limits of connections of all accounts.
    pub fn connection_limits(&self) -> Result<ConnectionLimits> {
        account::limits(&self.ground)
    }

    /// Returns what packets of other hosts may say about accounts.
    pub fn agreement(&self) -> Result<Agreement> {
        account::agreement(&self.ground)
    }

    /// Returns how many connections to shared services each account has now, by the numbers of accounts.
    pub fn account_connections(&self) -> Result<BTreeMap<u32, u32>> {
        debt::connections(&self.ground)
    }

    /// Returns the sockets of the accounts that have a limit, by their numbers, each with those of the accounts below.
    pub fn account_sockets(&self) -> Result<BTreeMap<u32, Count>> {
        socket::of_accounts(&self.ground)
    }

    /// Returns the processes and threads of the containers of each account, by its number.
    pub fn account_tasks(&self) -> Result<BTreeMap<u32, u64>> {
        account::tasks(&self.ground)
    }

    /// Deals the tasks that accounts may have to their containers again. Returns whether an account has a limit.
    pub fn deal_tasks(&self) -> Result<bool> {
        deal::tick(&self.ground)
    }

    /// Returns made accounts with the one above each.
    pub fn account_parents(&self) -> Result<BTreeMap<String, String>> {
        account::parents(&self.ground)
    }

    /// Checks rules without installing them. `file` names them in errors.
    pub fn check_rules(&self, file: &str, text: &str) -> Result<Compiled> {
        account::check(&self.ground, file, text)
    }

    /// Installs rules in place of all others, or none of them.
    pub fn apply_rules(&self, file: &str, text: &str) -> Result<Compiled> {
        gating::change(&self.ground, || account::apply(&self.ground, file, text))
    }

    /// Returns the installed rules, with those of shared containers.
    pub fn rules(&self) -> Result<Compiled> {
        account::installed(&self.ground)
    }

    /// Returns the installed rules as they were given.
    pub fn rules_text(&self) -> Result<String> {
        account::rules_text(&self.ground)
    }

    /// Returns which rule decides a passage, and why.
    pub fn explain_rules(&self, question: &RuleQuestion) -> Result<RuleAnswer> {
        account::explain(&self.ground, question)
    }

    /// Loads these gates and no others, with the table of the rules, or all that the kernel takes if none is named.
    /// Containers may run meanwhile. Returns what is loaded.
    pub fn load_gates(&self, which: &[Gate]) -> Result<Vec<Gate>> {
        gating::load(&self.ground, which)
    }

    /// Returns all gates, each with the reason for which this kernel does not take it.
    pub fn gates_with_lacks(&self) -> Result<Vec<GateState>> {
        gating::list_with_lacks(&self.ground)
    }

    /// Unloads all gates, after what they have counted was charged. Returns whether some were loaded.
    pub fn unload_gates(&self) -> Result<bool> {
        gating::unload(&self.ground)
    }

    /// Returns all gates, and the programs that loaded ones share. With `during`, counters are those of this time.
    pub fn gates(&self, during: Option<Duration>) -> Result<(Vec<GateState>, Vec<GateStat>)> {
        gating::list(&self.ground, during)
    }

    /// Returns the hosts with which accounts are shared.
    pub fn agreed_hosts(&self) -> Result<Vec<AgreedHost>> {
        account::hosts(&self.ground)
    }

    /// Shares accounts with these hosts: the numbers of [`Number::GLOBAL`] in connections to them, and from them.
    pub fn add_agreed_hosts(&self, hosts: &[AgreedHost]) -> Result<()> {
        gating::change(&self.ground, || account::add_hosts(&self.ground, hosts))
    }

    /// Shares none with these hosts any more.
    pub fn remove_agreed_hosts(&self, hosts: &[AgreedHost]) -> Result<()> {
        gating::change(&self.ground, || account::remove_hosts(&self.ground, hosts))
    }

    /// Watches for this time which container works for which account, and returns rules as a text in TOML that
    /// [`check_rules`](Self::check_rules) accepts. The gate `receive` has to be loaded.
    pub fn trace_rules(&self, during: Duration) -> Result<String> {
        account::propose(&self.ground, &gating::trace(&self.ground, during)?)
    }

    /// Returns the name of a container's account.
    pub fn account_of(&self, config: &Config) -> String {
        account::label(config)
    }
}

/// Events.
impl Engine {
    /// Records an event; an error in recording is ignored.
    pub fn record(
        &self,
        kind: impl Into<EventKind>,
        id: &str,
        name: &str,
        attributes: &[(&str, String)],
    ) {
        self.ground.record(kind, id, name, attributes);
    }

    /// The file that events are appended to, one JSON line each.
    pub fn events(&self) -> PathBuf {
        self.ground.events()
    }

    /// Returns the events from now on.
    pub fn follow(&self) -> Result<Follow> {
        Follow::from_end(self.ground.events())
    }
}

/// Recovery, and what containers share.
impl Engine {
    /// Finishes the work of killed commands and recovers custody.
    pub fn recover(&self) -> Result<()> {
        recover::recover(&self.ground)
    }

    /// Re-creates the sockets of sleeping containers if the keeper that held them is gone, and
    /// thaws drowsy containers. Returns how many containers are still asleep.
    ///
    /// A container whose recovery fails stays asleep; a command can wake it. If the next keeper is
    /// killed meanwhile the whole recovery fails and is to be repeated: the vault still has the
    /// descriptors.
    pub fn take_custody_back(&self) -> Result<usize> {
        custody::take_back(&self.ground)
    }

    /// Returns whether the keeper that had custody has exited and its descriptors were not
    /// recovered since.
    pub fn is_orphaned(&self) -> Result<bool> {
        hold::is_orphaned(&self.ground)
    }

    /// Returns a pidfd of the keeper that has custody, readable when the keeper has exited. `None`
    /// if it has exited already, or nothing was ever held.
    pub fn custodian_handle(&self) -> Result<Option<OwnedFd>> {
        hold::custodian_handle(&self.ground)
    }

    /// Makes the listening sockets of asleep containers and passes them to the keeper. Runs in the
    /// helper process ([`Listener`]): reads directories below LIB, and `report` receives one line for
    /// each.
    pub fn listen_for(
        &self,
        requests: impl Iterator<Item = String>,
        report: impl FnMut(&str),
    ) -> Result<()> {
        listen::serve(&self.ground, requests, report)
    }

    /// Releases names, addresses and process records without a container. Every command finishes
    /// interrupted creates and removals ([`crate::pending`]); this is a full search, after a boot
    /// and for `prune`. Returns how many things were released.
    pub fn sweep(&self) -> Result<usize> {
        boot::sweep(&self.ground)
    }

    /// Removes this instance's objects from the kernel: keeper, mounts, network, control groups.
    /// Files on disk stay, so the effect is that of a reboot. Refused while a container runs.
    pub fn dismantle(&self) -> Result<()> {
        tidy::dismantle(&self.ground)
    }

    /// Removes the objects that containers share (domains, mounts of images and of the shared
    /// tmpfs, the cgroups above them) if no container runs or starts. The keeper calls this when
    /// its last container has ended; the next start makes them again. Returns whether they were
    /// removed.
    pub fn tidy(&self) -> Result<bool> {
        tidy::tidy(&self.ground)
    }
}
