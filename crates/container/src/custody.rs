//! Who has custody of what sleeping containers left behind, and what becomes of it when nobody has.
//!
//! `LIB/custody` names the keeper that holds it: boot, pid, start time. Every command looks at that one
//! small file first. Where that keeper was killed, the next one has from the vault what the first had, and is
//! told when to ring. Where that is gone as well, or with the last boot, the sockets went with it:
//! they are made once more from the checkpoints, with the same addresses and options, and given to a
//! keeper that lives. From then on a caller wakes the container
//! as before. Open connections are lost then: their peers have heard so already, and the container hears
//! it when it wakes.
//!
//! **In its name.** A socket belongs to a container by the control group of whoever makes it. A process
//! of its own (`dormouse internal listen`) is in the keeper's group, which the network takes for that of
//! one container after the other, and in their networks; it makes their sockets and gives them away. One
//! process for many: after a reboot all that slept sleep again at once. Clones that come to be asleep
//! ([`crate::unborn`]) have theirs from the same.
//!
//! ORDER: `LIB/custody` is written when all are held. Whoever is killed before leaves it naming the
//! keeper that is gone, and the next command does all again.

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

/// LIMIT: for how many containers the locks are held at a time.
const BATCH: usize = 128;

/// How long a keeper that was killed may take to let go of all it has.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// What is said of one that is heard again.
const HEARD: &str = "listens";

/// A container that sleeps and that nobody hears.
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
        let start_time = start_time.map_err(Error::call("cannot look at the keeper"))?;
        Ok(Self { boot, pid, start_time })
    }

    fn lives(&self) -> bool {
        proc::boot_id().is_ok_and(|boot| boot == self.boot)
            && pidfd::open_exactly(self.pid, self.start_time).is_ok_and(|keeper| {
                // One that was killed hears nobody any more, and is there until all it had is closed.
                let ends = proc::status(self.pid).is_ok_and(|it| it.is_exiting);
                !pidfd::wait(keeper, Some(if ends { ENDS_WITHIN } else { Duration::ZERO }))
                    .is_ok_and(|ended| ended)
            })
    }
}

/// Has sockets made in the name of containers that have no processes, by a process of ours: it says of
/// each whether it is done.
#[derive(Debug)]
pub(crate) struct Listener {
    child: Child,
    /// Dropped first: then it ends.
    asked: Option<ChildStdin>,
    told: BufReader<ChildStdout>,
}

impl Listener {
    /// ORDER: the keeper is there.
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

    /// Makes the sockets of the asleep container that is made in this directory, whom the domain knows
    /// ([`Engine::announce`]), and has the keeper hold them.
    pub(crate) fn listen(&mut self, engine: &Engine, dir: &Path) -> Result<()> {
        let early = || Error::Invalid("what was to listen has ended early".into());
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
        let _ = self.child.wait(); // it has told all that there was to tell
    }
}

/// Who makes sockets again, and who holds them.
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

/// Where this process stands: in the keeper's cgroup, and in one network after the other.
///
/// A socket is the container's that its maker's cgroup belongs to at that moment, and keeps that cgroup
/// from being freed for as long as it is there. The keeper's is there anyway, so the network lends it to
/// the one whose sockets are made ([`dormouse_network::Network::lend`]).
struct Stand<'e> {
    engine: &'e Engine,
    home: OwnedFd,
    cgroup: Option<(OwnedFd, u64)>,
    /// In which domain this process is, if not at home.
    domain: Option<Domain>,
    /// What was read last: clones have one checkpoint.
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

    /// Opens a checkpoint, if it is another than the last.
    fn read(&mut self, asleep: &Path) -> Result<()> {
        let records = asleep.join("records");
        let meta = fs::metadata(&records).map_err(Error::file("cannot look at", &records))?;
        let identity = (meta.dev(), meta.ino());
        if self.last.as_ref().is_none_or(|(last, _)| *last != identity) {
            self.last = Some((identity, Reader::open(asleep)?));
        }
        Ok(())
    }

    /// Enters a domain, or goes home.
    fn enter(&mut self, domain: Option<&Name>) -> Result<()> {
        if self.domain.as_ref().map(|there| &there.name) == domain {
            return Ok(());
        }
        let go = |netns: BorrowedFd<'_>| {
            process::setns(netns, CloneFlags::NEWNET)
                .map_err(Error::call("cannot enter the container's network"))
        };
        // ORDER: home first: the network is asked from there.
        go(self.home.as_fd())?;
        self.domain = None;
        if let Some(name) = domain {
            let there = self.engine.domain(name)?;
            go(there.netns.as_fd())?;
            self.domain = Some(there);
        }
        Ok(())
    }

    /// Makes sockets in the name of a container from now on, and nobody else does as long as the lock is
    /// held.
    fn stand_for(&self, config: &Config) -> Result<Lock> {
        let alone = Lock::take_new(&self.engine.places().run.join("listen.lock"))?;
        if let (Some((_, cgroup)), Some(domain)) = (&self.cgroup, &self.domain) {
            self.engine.network()?.lend(domain, *cgroup, &config.addresses)?;
        }
        Ok(alone)
    }
}

impl Engine {
    /// Takes note of a keeper, which may have custody from now on.
    ///
    /// The name of one that is gone is left as it is: what that held is still to be taken back.
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

    /// Whoever changes the note is alone: two would make the same new file.
    ///
    /// ORDER: the innermost lock. It is taken by who has a container's, which who takes custody back waits for.
    fn lock_note(&self) -> Result<Lock> {
        Lock::take_new(&self.places().run.join("note.lock"))
    }

    /// Removes what somebody has left who was killed while noting a keeper.
    fn finish_noting(&self) -> Result<()> {
        let new = self.custodian().with_extension("new");
        if !new.exists() {
            return Ok(());
        }
        let _alone = self.lock_note()?;
        disk::remove(&new)
    }

    /// The keeper that has custody, to be waited for: readable when it has ended. `None` where it has
    /// already, or nothing was ever held.
    pub fn custodian_handle(&self) -> Result<Option<OwnedFd>> {
        let custodian = disk::read_json::<Custodian>(&self.custodian())?;
        let here = custodian.filter(Custodian::lives);
        Ok(here.and_then(|it| pidfd::open_exactly(it.pid, it.start_time).ok()))
    }

    /// Whether the keeper that had custody has ended, and nobody has taken it back since.
    pub fn is_orphaned(&self) -> Result<bool> {
        let custodian = disk::read_json::<Custodian>(&self.custodian())?;
        Ok(custodian.is_some_and(|custodian| !custodian.lives()))
    }

    /// Finishes what commands that were killed have left undone, and takes custody back.
    pub fn recover(&self) -> Result<()> {
        self.finish_interrupted()?;
        self.take_custody_back().map(drop)
    }

    /// Makes the sockets of sleeping containers again where whoever held them is gone, and lets drowsy
    /// ones go on. Gives how many sleep on.
    ///
    /// One for which it fails sleeps on, and a command wakes it. Where the next keeper is killed meanwhile this
    /// fails as a whole, and is to be done again: the vault has what that had.
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
                    // Whoever has it now will not have it for long; the others do not wait for that.
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
            // ORDER: of what it was not asked for; another one was asked for nothing, and would let go of all.
            Some(hearing) => hearing.keeper.let_go_unasked()?,
            None => self.let_go_of_rest()?,
        }
        let next = match &mut hearing {
            Some(hearing) => Some(Custodian::of(&mut hearing.keeper)?),
            // Whoever fell asleep meanwhile has found the note of the one that is gone.
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

    /// Has the keeper forget what it has from the vault and no sleeping container has left there: one that was
    /// interrupted while it fell asleep or woke runs, or was stopped since, and would find its port taken.
    pub(crate) fn let_go_of_rest(&self) -> Result<()> {
        match self.places().run.join(dormouse_launch::keeper::VAULT).exists() {
            true => Ok(self.keeper()?.let_go_unasked()?),
            false => Ok(()),
        }
    }

    /// A container that may have lost who heard its callers: one that is drowsy goes on, one that sleeps
    /// is given back, one whose memory nobody fills any more is ended. What fails for one is told of, and
    /// stops no other.
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

    /// Makes the sockets of some sleepers again, and gives them to a keeper. Gives how many sleepers are
    /// heard again.
    fn listen_again(&self, sleepers: &[Sleeper], hearing: &mut Option<Hearing>) -> Result<usize> {
        if sleepers.is_empty() {
            return Ok(0);
        }
        // Here and not earlier: where nobody sleeps nobody has to be started.
        let hearing = match hearing {
            Some(hearing) => hearing,
            none => none.insert(Hearing::begin(self)?),
        };
        let mut count = 0;
        for Sleeper { config, .. } in sleepers {
            match self.listen_again_for(config, hearing) {
                Ok(()) => count += 1,
                Err(e) => {
                    hearing.keeper.status()?; // it is not this one's fault that nobody hears it
                    self.lost(&config.id, config.name.as_str(), &e);
                }
            }
        }
        Ok(count)
    }

    fn listen_again_for(&self, config: &Config, hearing: &mut Hearing) -> Result<()> {
        self.doze(config)?; // what an interrupted wake has left
        match hearing.keeper.holds(config.id.as_str())? {
            // From the vault, or from somebody who could not wake it ([`Engine::hold_again`]).
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

    /// Makes the sockets at which asleep containers are called, and gives them to the keeper. For a
    /// process of its own ([`Listener`]): reads directories below LIB, and `told` gets a line for each.
    pub fn listen_for(
        &self,
        asked: impl Iterator<Item = String>,
        mut told: impl FnMut(&str),
    ) -> Result<()> {
        // ORDER: first: a keeper that had to be started would be started in the name of somebody.
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

    /// Nobody makes sockets for others any more.
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
