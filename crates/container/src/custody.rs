//! Tracks which keeper holds the descriptors of sleeping containers, and re-creates them when that
//! keeper is gone.
//!
//! `LIB/custody` names the keeper that holds them: boot, pid, start time. Every command reads that
//! small file first. If that keeper was killed, the next keeper receives the descriptors from the
//! vault, and its timers are set again. If the vault was killed too, or after a reboot, the sockets
//! are lost. The engine then re-creates them from the checkpoints, with the same addresses and
//! options, and passes them to a running keeper. After that an incoming connection wakes the
//! container as before. Open connections are lost in this case: the kernel has reset them at the
//! peers, and the container reads the error when it wakes.
//!
//! **In its name.** A socket belongs to the container that owns the control group of the creating
//! process. A helper process (`dormouse internal listen`) runs in the keeper's group. The network
//! maps that group to one container after the other. The helper enters their networks, creates
//! their sockets and passes them to the keeper. One helper serves all containers: after a reboot
//! all sleeping containers are set up at once. Clones that are created asleep ([`crate::unborn`])
//! get their sockets from the same helper.
//!
//! ORDER: `LIB/custody` is written when all descriptors are held. A command that is killed before
//! leaves the dead keeper's name in it, and the next command repeats the whole recovery.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use dormouse_checkpoint::format::Reader;
use dormouse_checkpoint::load;
use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{pidfd, proc, process};
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{Config, ContainerId, Name, NetMode, State};
use dormouse_network::Domain;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::engine::{CONFIG, Engine, own_program};
use crate::error::{Error, Result};
use crate::idle::{Why, alarm_ms};
use crate::sleep::{ASLEEP, held_files};
use crate::unborn::Origin;

/// LIMIT: how many containers are locked at a time.
const BATCH: usize = 128;

/// How long a killed keeper may take until the kernel has closed all its descriptors.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// The helper's answer when the keeper holds the sockets of a container.
const HEARD: &str = "listens";

/// A sleeping container without a keeper that watches its sockets.
struct Sleeper {
    config: Config,
    _lock: Lock,
}

/// `LIB/custody`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Custodian {
    boot: String,
    pid: u32,
    start_time: u64,
}

impl Custodian {
    fn of(keeper: &mut Keeper) -> Result<Self> {
        let pid = keeper.status()?.pid;
        let boot = proc::boot_id().map_err(Error::call("cannot read boot id"))?;
        let start_time = proc::start_time(pid);
        let start_time = start_time.map_err(Error::call("cannot read the keeper's start time"))?;
        Ok(Self { boot, pid, start_time })
    }

    fn lives(&self) -> bool {
        proc::boot_id().is_ok_and(|boot| boot == self.boot)
            && pidfd::open_exactly(self.pid, self.start_time).is_ok_and(|keeper| {
                // A killed keeper polls no more, but remains until the kernel has closed its
                // descriptors.
                let ends = proc::status(self.pid).is_ok_and(|it| it.is_exiting);
                !pidfd::wait(keeper, Some(if ends { ENDS_WITHIN } else { Duration::ZERO }))
                    .is_ok_and(|ended| ended)
            })
    }
}

/// Makes sockets in the name of containers without processes. A helper process does the work and
/// reports the result for each container.
#[derive(Debug)]
pub(crate) struct Listener {
    child: Child,
    /// Dropped first: the helper ends at the end of its input.
    asked: Option<ChildStdin>,
    told: BufReader<ChildStdout>,
}

impl Listener {
    /// ORDER: the keeper runs before this is called.
    pub(crate) fn start(engine: &Engine) -> Result<Self> {
        let own = own_program()?;
        let mut command = Command::new(&own);
        command.args(engine.places().arguments()).args(["internal", "listen"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(Error::file("cannot run", &own))?;
        let (asked, told) = (child.stdin.take(), child.stdout.take());
        let told = BufReader::new(told.expect("it has a pipe there"));
        Ok(Self { child, asked, told })
    }

    /// Makes the sockets of the asleep container in this directory, whose addresses the domain has
    /// ([`Engine::announce`]), and has the keeper hold them.
    pub(crate) fn listen(&mut self, engine: &Engine, dir: &Path) -> Result<()> {
        let early = || Error::Invalid("the helper 'dormouse internal listen' ended early".into());
        let below = dir.strip_prefix(&engine.places().lib).map_err(|_| early())?;
        let mut asked = self.asked.as_ref().ok_or_else(early)?;
        let line = format!("{}\n", below.display());
        asked.write_all(line.as_bytes()).map_err(|_| early())?;
        let mut said = String::new();
        self.told.read_line(&mut said).map_err(|_| early())?;
        match said.trim_end() {
            HEARD => Ok(()),
            "" => Err(early()),
            why => Err(Error::Invalid(why.to_owned())),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        drop(self.asked.take());
        let _ = self.child.wait(); // each result was reported before
    }
}

/// The helper that makes sockets again, and the keeper that holds them.
struct Hearing {
    keeper: Keeper,
    listener: Listener,
    _in_use: Lock,
}

impl Hearing {
    fn begin(engine: &Engine) -> Result<Self> {
        let _in_use = engine.in_use()?;
        let keeper = engine.keeper()?;
        Ok(Self { keeper, listener: Listener::start(engine)?, _in_use })
    }
}

/// Position of the helper process: in the keeper's cgroup, and in one network after the other.
///
/// A socket belongs to the container that owns its creator's cgroup at that moment, and keeps that
/// cgroup from being freed as long as the socket exists. The keeper's cgroup exists anyway, so the
/// network lends it to the container whose sockets are made ([`dormouse_network::Network::lend`]).
struct Stand<'e> {
    engine: &'e Engine,
    home: OwnedFd,
    cgroup: Option<(OwnedFd, u64)>,
    /// Domain that this process has entered; `None` in its original network.
    domain: Option<Domain>,
    /// The checkpoint that was read last: clones share one.
    last: Option<((u64, u64), Reader)>,
}

impl<'e> Stand<'e> {
    fn take(engine: &'e Engine) -> Result<Self> {
        let cgroup = engine.cgroups()?.keeper_v2()?;
        if let Some((dir, _)) = &cgroup {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            rustix::fs::openat(dir, "cgroup.procs", flags, Mode::empty())
                .map_err(std::io::Error::from)
                .and_then(|procs| fs::File::from(procs).write_all(b"0"))
                .map_err(Error::file("cannot enter", "cgroup.procs"))?;
        }
        let home = fs::File::open("/proc/self/ns/net");
        let home = home.map_err(Error::file("cannot open", "/proc/self/ns/net"))?.into();
        Ok(Self { engine, home, cgroup, domain: None, last: None })
    }

    fn listen(&mut self, dir: &Path, keeper: &mut Keeper) -> Result<()> {
        let config: Option<Config> = disk::read_json(&dir.join(CONFIG))?;
        let config = config.ok_or_else(|| Error::NoContainer(dir.display().to_string()))?;
        let asleep = dir.join(ASLEEP);
        let origin = Origin::of(&asleep)?;
        let addresses = origin.map(|origin| origin.addresses).unwrap_or_default();
        self.read(&asleep)?;
        let _alone = match &config.net {
            NetMode::None => None,
            NetMode::Host => {
                self.enter(None)?;
                None
            }
            NetMode::Address { domain } => {
                self.enter(Some(domain))?;
                Some(self.stand_for(&config)?)
            }
        };
        let (_, reader) = self.last.as_ref().expect("it was read just now");
        let held = match config.net {
            NetMode::None => Vec::new(),
            _ => load::outside_sockets(reader.records(), &addresses)?,
        };
        let held = held_files(reader.records(), held);
        self.engine.hold_with(keeper, &config, held, false, 0)?;
        match alarm_ms(reader.records(), config.wake_on) {
            Some(after_ms) => Ok(keeper.set_alarm(config.id.as_str(), after_ms)?),
            None => Ok(()),
        }
    }

    /// Opens a checkpoint, unless it is the same as the last.
    fn read(&mut self, asleep: &Path) -> Result<()> {
        let records = asleep.join("records");
        let meta = fs::metadata(&records).map_err(Error::file("cannot look at", &records))?;
        let identity = (meta.dev(), meta.ino());
        if self.last.as_ref().is_none_or(|(last, _)| *last != identity) {
            self.last = Some((identity, Reader::open(asleep)?));
        }
        Ok(())
    }

    /// Enters a domain, or returns to the original network.
    fn enter(&mut self, domain: Option<&Name>) -> Result<()> {
        if self.domain.as_ref().map(|there| &there.name) == domain {
            return Ok(());
        }
        let go = |netns: BorrowedFd<'_>| {
            process::setns(netns, CloneFlags::NEWNET)
                .map_err(Error::call("cannot enter the container's network"))
        };
        // ORDER: the original network first: the engine's calls to the network are made from there.
        go(self.home.as_fd())?;
        self.domain = None;
        if let Some(name) = domain {
            let there = self.engine.domain(name)?;
            go(there.netns.as_fd())?;
            self.domain = Some(there);
        }
        Ok(())
    }

    /// Makes this process create sockets in the name of a container. The lock keeps other helpers
    /// from doing the same meanwhile.
    fn stand_for(&self, config: &Config) -> Result<Lock> {
        let alone = Lock::take_new(&self.engine.places().run.join("listen.lock"))?;
        if let (Some((_, cgroup)), Some(domain)) = (&self.cgroup, &self.domain) {
            self.engine.network()?.lend(domain, *cgroup, &config.addresses)?;
        }
        Ok(alone)
    }
}

impl Engine {
    /// Records a keeper, which may have custody from now on.
    ///
    /// The name of a dead keeper is left in place: its descriptors are still to be recovered.
    pub(crate) fn note_custody(&self, keeper: &mut Keeper) -> Result<()> {
        match disk::read_json::<Custodian>(&self.custodian())? {
            Some(_) => Ok(()),
            None => {
                let own = Custodian::of(keeper)?;
                let _alone = self.lock_note()?;
                match disk::read_json::<Custodian>(&self.custodian())? {
                    Some(_) => Ok(()),
                    None => disk::write_json(&self.custodian(), &own, Durable::No),
                }
            }
        }
    }

    /// Takes the lock for changes of `LIB/custody`: two writers would create the same temporary
    /// file.
    ///
    /// ORDER: `note.lock` is innermost. Holders of a container lock take it;
    /// [`Engine::take_custody_back`] waits for container locks, so it must not hold `note.lock`
    /// meanwhile.
    fn lock_note(&self) -> Result<Lock> {
        Lock::take_new(&self.places().run.join("note.lock"))
    }

    /// Removes the temporary file of a command that was killed while it recorded a keeper.
    fn finish_noting(&self) -> Result<()> {
        let new = self.custodian().with_extension("new");
        if !new.exists() {
            return Ok(());
        }
        let _alone = self.lock_note()?;
        disk::remove(&new)
    }

    /// Returns a pidfd of the keeper that has custody, readable when the keeper has exited. `None`
    /// if it has exited already, or nothing was ever held.
    pub fn custodian_handle(&self) -> Result<Option<OwnedFd>> {
        let custodian = disk::read_json::<Custodian>(&self.custodian())?;
        let here = custodian.filter(Custodian::lives);
        Ok(here.and_then(|it| pidfd::open_exactly(it.pid, it.start_time).ok()))
    }

    /// Returns whether the keeper that had custody has exited and its descriptors were not
    /// recovered since.
    pub fn is_orphaned(&self) -> Result<bool> {
        let custodian = disk::read_json::<Custodian>(&self.custodian())?;
        Ok(custodian.is_some_and(|custodian| !custodian.lives()))
    }

    /// Finishes the work of killed commands and recovers custody.
    pub fn recover(&self) -> Result<()> {
        self.finish_interrupted()?;
        self.take_custody_back().map(drop)
    }

    /// Re-creates the sockets of sleeping containers if the keeper that held them is gone, and
    /// thaws drowsy containers. Returns how many containers are still asleep.
    ///
    /// A container whose recovery fails stays asleep; a command can wake it. If the next keeper is
    /// killed meanwhile the whole recovery fails and is to be repeated: the vault still has the
    /// descriptors.
    pub fn take_custody_back(&self) -> Result<usize> {
        self.finish_noting()?;
        if !self.is_orphaned()? {
            return Ok(0);
        }
        let _alone = Lock::take_new(&self.places().run.join("custody.lock"))?;
        if !self.is_orphaned()? {
            return Ok(0);
        }
        let mut hearing = None;
        let mut count = 0;
        let mut ids = self.ids()?;
        ids.retain(|id| self.is_drowsy(id) || self.asleep_dir(id).exists() || self.has_fill(id));
        let mut busy = Vec::new();
        for some in ids.chunks(BATCH) {
            let mut sleepers = Vec::new();
            for id in some {
                match Lock::try_take(&self.dir(id)) {
                    Ok(Some(lock)) => sleepers.extend(self.found_orphaned(id, lock)),
                    // Its holder keeps the lock for a short time only; the other containers do not
                    // wait for that.
                    _ => busy.push(id),
                }
            }
            count += self.listen_again(&sleepers, &mut hearing)?;
        }
        for id in busy {
            let lock = match self.lock(id) {
                Err(Error::NoContainer(_)) => continue,
                other => other?,
            };
            let sleeper = self.found_orphaned(id, lock);
            count += self.listen_again(sleeper.as_slice(), &mut hearing)?;
        }
        match &mut hearing {
            // ORDER: drop the rest only at this keeper. Another keeper got no request and would
            // drop all.
            Some(hearing) => hearing.keeper.let_go_unasked()?,
            None => self.let_go_of_rest()?,
        }
        let next = match &mut hearing {
            Some(hearing) => Some(Custodian::of(&mut hearing.keeper)?),
            // A container that fell asleep meanwhile found the dead keeper's note and wrote none.
            None => Keeper::connect(&self.places().run)?
                .and_then(|mut keeper| Custodian::of(&mut keeper).ok()),
        };
        let _note = self.lock_note()?;
        match next {
            Some(next) => disk::write_json(&self.custodian(), &next, Durable::No)?,
            None => disk::remove(&self.custodian())?,
        }
        Ok(count)
    }

    /// Has the keeper drop the descriptors from the vault that no sleeping container left there. A
    /// container that was interrupted while it fell asleep or woke may run, or was stopped since,
    /// and would find its port in use.
    pub(crate) fn let_go_of_rest(&self) -> Result<()> {
        match self.places().run.join(dormouse_launch::keeper::VAULT).exists() {
            true => Ok(self.keeper()?.let_go_unasked()?),
            false => Ok(()),
        }
    }

    /// Prepares one container that may have lost its keeper. A drowsy container is thawed. A
    /// sleeping container is returned. A running container is killed if its memory is no longer
    /// filled. An error is recorded as an event and does not affect other containers.
    fn found_orphaned(&self, id: &ContainerId, lock: Lock) -> Option<Sleeper> {
        let find = || -> Result<Option<Config>> {
            let config = self.config(id)?;
            let look = self.look_locked(&config)?;
            let is_alive = look.is_alive();
            if let (State::Drowsy, Some(init)) = (look.state, look.init) {
                self.rouse(&config, init, Why::Keeper)?;
                return Ok(None);
            }
            if is_alive {
                match self.not_unfilled(&config) {
                    Ok(()) | Err(Error::Unfilled(_)) => {}
                    Err(e) => return Err(e),
                }
            }
            self.settle_locked(&config, false)?;
            let sleeps = self.look(&config)?.state == State::Asleep;
            Ok(sleeps.then_some(config))
        };
        match find() {
            Ok(config) => config.map(|config| Sleeper { config, _lock: lock }),
            Err(e) => {
                self.lost(id, "", &e);
                None
            }
        }
    }

    pub(crate) fn lost(&self, id: &ContainerId, name: &str, why: &dyn std::fmt::Display) {
        self.record("sleep", id.as_str(), name, &[("custody", format!("lost: {why}"))]);
    }

    /// Re-creates the sockets of some sleeping containers and passes them to a keeper. Returns for
    /// how many that succeeded.
    fn listen_again(&self, sleepers: &[Sleeper], hearing: &mut Option<Hearing>) -> Result<usize> {
        if sleepers.is_empty() {
            return Ok(0);
        }
        // Not earlier: if no container sleeps, neither keeper nor helper is needed.
        let hearing = match hearing {
            Some(hearing) => hearing,
            none => none.insert(Hearing::begin(self)?),
        };
        let mut count = 0;
        for Sleeper { config, .. } in sleepers {
            match self.listen_again_for(config, hearing) {
                Ok(()) => count += 1,
                Err(e) => {
                    hearing.keeper.status()?; // a dead keeper is not this container's failure
                    self.lost(&config.id, config.name.as_str(), &e);
                }
            }
        }
        Ok(count)
    }

    fn listen_again_for(&self, config: &Config, hearing: &mut Hearing) -> Result<()> {
        self.doze(config)?; // leftovers of an interrupted wake
        match hearing.keeper.holds(config.id.as_str())? {
            // Received from the vault, or from a failed wake ([`Engine::hold_again`]).
            true => {
                let reader = Reader::open(&self.asleep_dir(&config.id))?;
                if let Some(after_ms) = alarm_ms(reader.records(), config.wake_on) {
                    hearing.keeper.set_alarm(config.id.as_str(), after_ms)?;
                }
            }
            false => {
                self.announce(config)?;
                hearing.listener.listen(self, &self.dir(&config.id))?;
            }
        }
        self.publish_ports(config)
    }

    /// Makes the listening sockets of asleep containers and passes them to the keeper. Runs in the
    /// helper process ([`Listener`]): reads directories below LIB, and `told` receives one line for
    /// each.
    pub fn listen_for(
        &self,
        asked: impl Iterator<Item = String>,
        mut told: impl FnMut(&str),
    ) -> Result<()> {
        // ORDER: first: a keeper started later would be started in the cgroup lent to a container.
        let mut keeper = Keeper::connect(&self.places().run)?.ok_or(LaunchError::KeeperGone)?;
        let mut stand = Stand::take(self)?;
        for dir in asked {
            match stand.listen(&self.places().lib.join(dir), &mut keeper) {
                Ok(()) => told(HEARD),
                Err(e) => told(&crate::idle::told(&e).replace('\n', " ")),
            }
        }
        self.end_lending()
    }

    /// Ends the mapping of the keeper's cgroup to a container.
    pub(crate) fn end_lending(&self) -> Result<()> {
        match self.cgroups()?.keeper_v2()? {
            Some((_, id)) => Ok(self.network()?.end_lending(id)?),
            None => Ok(()),
        }
    }

    fn custodian(&self) -> PathBuf {
        self.places().lib.join("custody")
    }
}
