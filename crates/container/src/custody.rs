//! Who has custody of what sleeping containers left behind, and what becomes of it when nobody has.
//!
//! `LIB/custody` names the keeper that holds it: boot, pid, start time. Every command looks at that one
//! small file first. Where that keeper is gone, killed or with the last boot, the sockets went with it:
//! they are made once more from the checkpoints, with the same addresses and options, and given to a
//! keeper that lives. From then on a caller wakes the container
//! as before. Open connections are lost: their peers have heard so already, and the container hears
//! it when it wakes.
//!
//! **In its name.** A socket belongs to a container by the control group of whoever makes it, so a
//! process of its own (`dormouse internal listen`) enters group and network of one container after the
//! other, which are there for that moment, makes its sockets and gives them away. One process for many:
//! after a reboot all that slept sleep again at once.
//!
//! ORDER: `LIB/custody` is written when all are held. Whoever is killed before leaves it naming the
//! keeper that is gone, and the next command does all again.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use dormouse_checkpoint::format::Reader;
use dormouse_checkpoint::load;
use dormouse_checkpoint::save::{HeldFile, Wakes};
use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{pidfd, proc, process};
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{Config, ContainerId, NetMode, State};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::engine::{Engine, own_program};
use crate::error::{Error, Result};
use crate::idle::{Why, alarm_ms};
use crate::start::Net;

/// LIMIT: for how many containers one process listens, whose locks are held meanwhile.
const BATCH: usize = 128;

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
            && pidfd::open_exactly(self.pid, self.start_time).is_ok_and(pidfd::is_alive)
    }
}

impl Engine {
    /// Takes note of a keeper, which may have custody from now on.
    ///
    /// The name of one that is gone is left as it is: what that held is still to be taken back.
    pub(crate) fn note_custody(&self, keeper: &mut Keeper) -> Result<()> {
        match disk::read_json::<Custodian>(&self.custodian())? {
            Some(_) => Ok(()),
            None => disk::write_json(&self.custodian(), &Custodian::of(keeper)?, Durable::No),
        }
    }

    /// The keeper that has custody, to be waited for: readable when it has ended. `None` where it has
    /// already, or nothing was ever held.
    pub fn custodian_handle(&self) -> Result<Option<OwnedFd>> {
        let custodian = disk::read_json::<Custodian>(&self.custodian())?;
        let here = custodian.filter(Custodian::lives);
        Ok(here.and_then(|it| pidfd::open_exactly(it.pid, it.start_time).ok()))
    }

    /// Finishes what commands that were killed have left undone, and takes custody back.
    pub fn recover(&self) -> Result<()> {
        self.finish_interrupted()?;
        self.take_custody_back().map(drop)
    }

    /// Makes the sockets of sleeping containers again where whoever held them is gone, and lets drowsy
    /// ones go on. Gives how many sleep on.
    ///
    /// One for which it fails sleeps on, and a command wakes it.
    pub fn take_custody_back(&self) -> Result<usize> {
        let gone = || -> Result<bool> {
            let custodian = disk::read_json::<Custodian>(&self.custodian())?;
            Ok(custodian.is_some_and(|custodian| !custodian.lives()))
        };
        if !gone()? {
            return Ok(0);
        }
        let _alone = Lock::take_new(&self.places().run.join("custody.lock"))?;
        if !gone()? {
            return Ok(0);
        }
        let mut keeper = None;
        let mut count = 0;
        let mut ids = self.ids()?;
        ids.retain(|id| self.is_drowsy(id) || self.asleep_dir(id).exists());
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
            count += self.listen_again(&sleepers, &mut keeper)?;
        }
        for id in busy {
            let lock = match self.lock(id) {
                Err(Error::NoContainer(_)) => continue,
                other => other?,
            };
            let sleeper = self.found_orphaned(id, lock);
            count += self.listen_again(sleeper.as_slice(), &mut keeper)?;
        }
        match &mut keeper {
            Some(keeper) => {
                disk::write_json(&self.custodian(), &Custodian::of(keeper)?, Durable::No)?;
            }
            None => match fs::remove_file(self.custodian()) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::file("cannot remove", self.custodian())(e));
                }
                _ => {}
            },
        }
        Ok(count)
    }

    /// A container that may have lost who heard its callers: one that is drowsy goes on, one that sleeps
    /// is given back. What fails for one is told of, and stops no other.
    fn found_orphaned(&self, id: &ContainerId, lock: Lock) -> Option<Sleeper> {
        let find = || -> Result<Option<Config>> {
            let config = self.config(id)?;
            let look = self.look_locked(&config)?;
            if let (State::Drowsy, Some(init)) = (look.state, look.init) {
                self.rouse(&config, init, Why::Keeper)?;
                return Ok(None);
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

    fn lost(&self, id: &ContainerId, name: &str, why: &dyn std::fmt::Display) {
        self.record("sleep", id.as_str(), name, &[("custody", format!("lost: {why}"))]);
    }

    /// Makes the sockets of some sleepers again, and gives them to a keeper. Gives how many sleepers are
    /// heard again.
    ///
    /// ORDER: as in a start, `RUN/c/ID` is made first and removed last: where it is, this was
    /// interrupted, and whoever wakes the container clears away.
    fn listen_again(&self, sleepers: &[Sleeper], keeper: &mut Option<Keeper>) -> Result<usize> {
        if sleepers.is_empty() {
            return Ok(0);
        }
        // Here and not earlier: where nobody sleeps nobody has to be started.
        let keeper = match keeper {
            Some(keeper) => keeper,
            none => none.insert(self.keeper()?),
        };
        let _in_use = self.in_use()?;
        let mut results: HashMap<ContainerId, Result<()>> = HashMap::new();
        let mut ready = Vec::new();
        for Sleeper { config, .. } in sleepers {
            match self.make_room(config, keeper) {
                Ok(()) => ready.push(config),
                Err(e) => drop(results.insert(config.id.clone(), Err(e))),
            }
        }
        results.extend(self.listen_elsewhere(&ready)?);
        let mut count = 0;
        for Sleeper { config, .. } in sleepers {
            let silent = || Err(Error::Invalid("what was to listen has ended early".into()));
            let listens = results.remove(&config.id).unwrap_or_else(silent);
            let listens = listens.and_then(|()| self.publish_ports(config));
            match listens.and(self.doze(config)) {
                Ok(()) => count += 1,
                Err(e) => {
                    let _ = self.doze(config);
                    self.lost(&config.id, config.name.as_str(), &e);
                }
            }
        }
        Ok(count)
    }

    /// Group and network of a container, for who makes its sockets.
    fn make_room(&self, config: &Config, keeper: &mut Keeper) -> Result<()> {
        self.doze(config)?;
        keeper.let_go(config.id.as_str())?;
        let run_dir = self.run_dir(&config.id);
        let made = fs::DirBuilder::new().mode(0o700).create(&run_dir);
        made.map_err(Error::file("cannot make directory", run_dir))?;
        if let Net::Domain(domain) = &self.find_network(config)? {
            let cgroup = self.cgroups()?.create(config.id.as_str(), &config.limits)?;
            self.enter_domain(config, &cgroup, domain)?;
        }
        Ok(())
    }

    /// Has one process listen for all of them, and tell of each.
    fn listen_elsewhere(&self, ready: &[&Config]) -> Result<HashMap<ContainerId, Result<()>>> {
        if ready.is_empty() {
            return Ok(HashMap::new());
        }
        let own = own_program()?;
        let mut command = Command::new(&own);
        command.args(self.places().arguments()).args(["internal", "listen"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(Error::file("cannot run", &own))?;
        // Those of other networks are entered last: nobody leaves them again.
        let by_network =
            |host| ready.iter().filter(move |config| (config.net == NetMode::Host) == host);
        let ids = by_network(true).chain(by_network(false));
        let ids: String = ids.map(|config| format!("{}\n", config.id)).collect();
        if let Some(mut stdin) = child.stdin.take() {
            let _ = stdin.write_all(ids.as_bytes()); // it tells of those that it has read
        }
        let output = child.wait_with_output().map_err(Error::file("cannot run", &own))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let result = |line: &str| {
            let (id, said) = line.split_once(' ')?;
            let said = if said == HEARD { Ok(()) } else { Err(Error::Invalid(said.to_owned())) };
            Some((id.parse().ok()?, said))
        };
        Ok(text.lines().filter_map(result).collect())
    }

    /// Makes the sockets at which asleep containers are called, and gives them to the keeper; `told`
    /// gets a line of each. For a process of its own, which becomes part of one after the other.
    pub fn listen_for(
        &self,
        ids: impl Iterator<Item = ContainerId>,
        mut told: impl FnMut(String),
    ) -> Result<()> {
        // ORDER: first: a keeper that had to be started would be part of a container too.
        let mut keeper = Keeper::connect(&self.places().run)?.ok_or(LaunchError::KeeperGone)?;
        for id in ids {
            told(match self.listen_for_one(&id, &mut keeper) {
                Ok(()) => format!("{id} {HEARD}"),
                Err(e) => format!("{id} {}", crate::idle::told(&e).replace('\n', " ")),
            });
        }
        Ok(())
    }

    fn listen_for_one(&self, id: &ContainerId, keeper: &mut Keeper) -> Result<()> {
        let config = self.config(id)?;
        let reader = Reader::open(&self.asleep_dir(id))?;
        let held = match &config.net {
            NetMode::None => Vec::new(),
            NetMode::Host => load::outside_sockets(reader.records())?,
            NetMode::Address { domain } => {
                let domain = self.network()?.domain(domain)?;
                self.enter_cgroup(id)?;
                process::setns(domain.netns.as_fd(), CloneFlags::NEWNET)
                    .map_err(Error::call("cannot enter the container's network"))?;
                load::outside_sockets(reader.records())?
            }
        };
        let wakes = Wakes { readable: true, writable: false };
        let held = held.into_iter().map(|(object, file)| HeldFile { object, file, wakes });
        self.hold_with(keeper, id, held.collect(), false, 0)?;
        match alarm_ms(reader.records()) {
            Some(after_ms) => Ok(keeper.set_alarm(id.as_str(), after_ms)?),
            None => Ok(()),
        }
    }

    /// Moves this process into the v2 group of a container.
    fn enter_cgroup(&self, id: &ContainerId) -> Result<()> {
        let cgroup = self.cgroups()?.find(id.as_str())?;
        let dir: Option<OwnedFd> = match cgroup {
            Some(cgroup) => cgroup.placement()?.v2,
            None => None,
        };
        let dir = dir.ok_or_else(|| Error::NoContainer(id.short().to_owned()))?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&dir, "cgroup.procs", flags, Mode::empty())
            .map_err(std::io::Error::from)
            .and_then(|procs| fs::File::from(procs).write_all(b"0"))
            .map_err(Error::file("cannot enter", "cgroup.procs"))
    }

    fn custodian(&self) -> PathBuf {
        self.places().lib.join("custody")
    }
}
