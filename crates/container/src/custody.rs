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
//! process of its own (`dormouse internal listen ID`) enters group and network of the container, which
//! are there for that moment, makes its sockets, gives them away and ends.
//!
//! ORDER: `LIB/custody` is written when all are held. Whoever is killed before leaves it naming the
//! keeper that is gone, and the next command does all again.

use std::fs;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::Command;

use dormouse_checkpoint::format::Reader;
use dormouse_checkpoint::load;
use dormouse_checkpoint::save::{HeldFile, Wakes};
use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{pidfd, proc, process};
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{Config, ContainerId, State};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::engine::{Engine, own_program};
use crate::error::{Error, Result};
use crate::idle::alarm_ms;
use crate::start::Net;

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

    /// Makes the sockets of sleeping containers again where whoever held them is gone. Gives how many
    /// containers that were.
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
        for id in self.ids()? {
            if !self.asleep_dir(&id).exists() {
                continue;
            }
            let _lock = match self.lock(&id) {
                Err(Error::NoContainer(_)) => continue,
                other => other?,
            };
            let config = self.config(&id)?;
            self.settle_locked(&config, false)?;
            if self.look(&config)?.state != State::Asleep {
                continue;
            }
            // Here and not earlier: where nobody sleeps nobody has to be started.
            let keeper = match &mut keeper {
                Some(keeper) => keeper,
                none => none.insert(self.keeper()?),
            };
            let name = config.name.as_str();
            match self.listen_again(&config, keeper) {
                Ok(()) => count += 1,
                Err(e) => {
                    let why = [("custody", format!("lost: {e}"))];
                    self.record("sleep", id.as_str(), name, &why);
                }
            }
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

    /// ORDER: as in a start, `RUN/c/ID` is made first and removed last: where it is, this was
    /// interrupted, and whoever wakes the container clears away.
    fn listen_again(&self, config: &Config, keeper: &mut Keeper) -> Result<()> {
        let _in_use = self.in_use()?;
        self.doze(config)?;
        keeper.let_go(config.id.as_str())?;
        let run_dir = self.run_dir(&config.id);
        let made = fs::DirBuilder::new().mode(0o700).create(&run_dir);
        made.map_err(Error::file("cannot make directory", run_dir))?;
        let listens = self.listen_elsewhere(config);
        let undone = self.doze(config);
        listens.and(undone)
    }

    fn listen_elsewhere(&self, config: &Config) -> Result<()> {
        if let Net::Domain(domain) = &self.find_network(config)? {
            let cgroup = self.cgroups()?.create(config.id.as_str(), &config.limits)?;
            self.enter_domain(config, &cgroup, domain)?;
        }
        let own = own_program()?;
        let mut command = Command::new(&own);
        command.args(self.places().arguments()).args(["internal", "listen", config.id.as_str()]);
        let output = command.output().map_err(Error::file("cannot run", own))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::Invalid(said));
        }
        self.publish_ports(config)
    }

    /// Makes the sockets at which an asleep container is called, and gives them to the keeper. For a
    /// process of its own, which becomes part of the container for that.
    pub fn listen_for(&self, id: &ContainerId) -> Result<()> {
        let config = self.config(id)?;
        let reader = Reader::open(&self.asleep_dir(id))?;
        // ORDER: first: a keeper that had to be started would be part of the container too.
        let mut keeper = Keeper::connect(&self.places().run)?.ok_or(LaunchError::KeeperGone)?;
        let held = match self.find_network(&config)? {
            Net::None { .. } => Vec::new(),
            Net::Host { .. } => load::outside_sockets(reader.records())?,
            Net::Domain(domain) => {
                self.enter_cgroup(id)?;
                process::setns(domain.netns.as_fd(), CloneFlags::NEWNET)
                    .map_err(Error::call("cannot enter the container's network"))?;
                load::outside_sockets(reader.records())?
            }
        };
        let wakes = Wakes { readable: true, writable: false };
        let held = held.into_iter().map(|(object, file)| HeldFile { object, file, wakes });
        self.hold_with(&mut keeper, id, held.collect(), false)?;
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
