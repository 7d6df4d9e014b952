//! Sockets made in the name of containers without processes, by a helper process.
//!
//! A socket belongs to the container that owns the control group of the creating process. The helper
//! process (`dormouse internal listen`) runs in the keeper's group. The network maps that group to
//! one container after the other. The helper enters their networks, creates their sockets and passes
//! them to the keeper. One helper serves all containers: after a reboot all sleeping containers are
//! set up at once. Clones that are created asleep ([`crate::unborn`]) get their sockets from the same
//! helper.
//!
//! Uses `ground`, `hold`, `net`, `policy`, `shortage` and `stacked`.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use dormouse_checkpoint::load;
use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{process, rlimit};
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{Config, Name, NetMode};
use dormouse_network::Domain;
use dormouse_parcel::Reader;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, ASLEEP, CONFIG, Ground};
use crate::user::PasswdUser;
use crate::{hold, net, policy, shortage, stacked};

/// The helper's answer when the keeper holds the sockets of a container.
const LISTENS: &str = "listens";

/// `asleep/origin.json`: the checkpoint is of another container.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// The other's addresses, each with its replacement.
    pub(crate) addresses: Vec<(IpAddr, IpAddr)>,
    /// The user of the other's first process, if that is on record.
    #[serde(default)]
    pub(crate) user: Option<PasswdUser>,
}

impl Origin {
    /// Its file in the directory of the checkpoint.
    pub(crate) fn path(asleep: &Path) -> PathBuf {
        asleep.join("origin.json")
    }

    /// Reads the origin of an asleep container, if it was saved as another one.
    pub(crate) fn of(asleep: &Path) -> Result<Option<Self>> {
        disk::read_json(&Self::path(asleep))
    }
}

/// Makes sockets in the name of containers without processes. A helper process does the work and
/// reports the result for each container.
#[derive(Debug)]
pub(crate) struct Listener {
    child: Child,
    /// Dropped first: the helper ends at the end of its input.
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Listener {
    /// ORDER: the keeper runs before this is called.
    pub(crate) fn start(ground: &Ground) -> Result<Self> {
        let own = ground::own_program()?;
        let mut command = Command::new(&own);
        command.args(ground.places.arguments()).args(["internal", "listen"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        rlimit::without_raise(&mut command);
        let mut child = command.spawn().map_err(Error::file("cannot run", &own))?;
        let (requests, replies) = (child.stdin.take(), child.stdout.take());
        let replies = BufReader::new(replies.expect("it has a pipe there"));
        Ok(Self { child, requests, replies })
    }

    /// Makes the sockets of the asleep container in this directory, whose addresses the domain has
    /// (`net::announce`), and has the keeper hold them.
    pub(crate) fn listen(&mut self, ground: &Ground, dir: &Path) -> Result<()> {
        let early = || Error::Invalid("the helper 'dormouse internal listen' ended early".into());
        let below = dir.strip_prefix(&ground.places.lib).map_err(|_| early())?;
        let mut requests = self.requests.as_ref().ok_or_else(early)?;
        let line = format!("{}\n", below.display());
        requests.write_all(line.as_bytes()).map_err(|_| early())?;
        let mut reply = String::new();
        self.replies.read_line(&mut reply).map_err(|_| early())?;
        match reply.trim_end() {
            LISTENS => Ok(()),
            "" => Err(early()),
            why => Err(Error::Invalid(why.to_owned())),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.child.wait(); // each result was reported before
    }
}

/// Position of the helper process: in the keeper's cgroup, and in one network after the other.
///
/// A socket belongs to the container that owns its creator's cgroup at that moment, and keeps that
/// cgroup from being freed as long as the socket exists. The keeper's cgroup exists anyway, so the
/// network lends it to the container whose sockets are made ([`dormouse_network::Network::lend`]).
struct Helper<'e> {
    ground: &'e Ground,
    home: OwnedFd,
    cgroup: Option<(OwnedFd, u64)>,
    /// Domain that this process has entered; `None` in its original network.
    domain: Option<Domain>,
    /// This process is in the stack of one container.
    is_in_new: bool,
    /// The checkpoint that was read last: clones share one.
    last: Option<((u64, u64), Reader)>,
}

impl<'e> Helper<'e> {
    fn take(ground: &'e Ground) -> Result<Self> {
        let cgroup = ground.cgroups()?.keeper_v2()?;
        if let Some((dir, _)) = &cgroup {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            rustix::fs::openat(dir, "cgroup.procs", flags, Mode::empty())
                .map_err(std::io::Error::from)
                .and_then(|procs| fs::File::from(procs).write_all(b"0"))
                .map_err(Error::file("cannot enter", "cgroup.procs"))?;
        }
        let home = fs::File::open("/proc/thread-self/ns/net");
        let home = home.map_err(Error::file("cannot open", "/proc/thread-self/ns/net"))?.into();
        Ok(Self { ground, home, cgroup, domain: None, is_in_new: false, last: None })
    }

    fn listen(&mut self, dir: &Path, keeper: &mut Keeper) -> Result<()> {
        let config: Option<Config> = disk::read_json(&dir.join(CONFIG))?;
        let config = config.ok_or_else(|| Error::NoContainer(dir.display().to_string()))?;
        let asleep = dir.join(ASLEEP);
        let origin = Origin::of(&asleep)?;
        let addresses = origin.map(|origin| origin.addresses).unwrap_or_default();
        self.read(&asleep)?;
        let _alone = match &config.spec.net {
            NetMode::None => None,
            NetMode::Private { domain } => {
                self.enter_new(&config, domain, &asleep)?;
                None
            }
            NetMode::Host => {
                self.enter(None)?;
                None
            }
            NetMode::Address { domain } => {
                self.enter(Some(domain))?;
                Some(self.lend_cgroup(&config)?)
            }
        };
        let (_, reader) = self.last.as_ref().expect("it was read just now");
        let held = match config.spec.net {
            NetMode::None => Vec::new(),
            _ => load::outside_sockets(reader.records(), &addresses)?,
        };
        let held = hold::held_files(reader.records(), held);
        let as_held = policy::sleeps_on(self.ground, &config.id).map(|_| shortage::quiet(&config));
        hold::hold_by(keeper, as_held.as_ref().unwrap_or(&config), held, false, 0)?;
        match policy::alarm_ms(self.ground, &config, reader.records()) {
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
        let is_there = self.domain.as_ref().map(|entered| &entered.name) == domain;
        if is_there && !self.is_in_new {
            return Ok(());
        }
        // ORDER: the original network first: the engine's calls to the network are made from there.
        go(self.home.as_fd())?;
        (self.domain, self.is_in_new) = (None, false);
        if let Some(name) = domain {
            let entered = net::make_domain(self.ground, name)?;
            go(entered.netns.as_fd())?;
            self.domain = Some(entered);
        }
        Ok(())
    }

    /// Enters a new stack of a container whose own one has ended, connected to its domain. Its sockets keep it.
    fn enter_new(&mut self, config: &Config, domain: &Name, asleep: &Path) -> Result<()> {
        self.enter(None)?;
        let domain = net::make_domain(self.ground, domain)?;
        let netns = self.ground.network()?.new_stack()?;
        net::connect(self.ground, config, &domain, netns.as_fd(), false)?;
        // ORDER: before the sockets: they take defaults of the stack when they are made.
        net::set_sysctls(config, netns.as_fd())?;
        stacked::record(asleep, &netns)?;
        self.is_in_new = true;
        go(netns.as_fd())
    }

    /// Makes this process create sockets in the name of a container. The lock keeps other helpers
    /// from doing the same meanwhile.
    fn lend_cgroup(&self, config: &Config) -> Result<Lock> {
        let alone = Lock::take_new(&self.ground.places.run.join("listen.lock"))?;
        if let (Some((_, cgroup)), Some(domain)) = (&self.cgroup, &self.domain) {
            self.ground.network()?.lend(domain, *cgroup, &config.addresses)?;
        }
        Ok(alone)
    }
}

fn go(netns: BorrowedFd<'_>) -> Result<()> {
    process::setns(netns, CloneFlags::NEWNET)
        .map_err(Error::call("cannot enter the container's network"))
}

/// Makes the listening sockets of asleep containers and passes them to the keeper. Runs in the
/// helper process ([`Listener`]): reads directories below LIB, and `report` receives one line for
/// each.
pub(crate) fn serve(
    ground: &Ground,
    requests: impl Iterator<Item = String>,
    mut report: impl FnMut(&str),
) -> Result<()> {
    // ORDER: first: a keeper started later would be started in the cgroup lent to a container.
    let mut keeper = Keeper::connect(&ground.places.run)?.ok_or(LaunchError::KeeperGone)?;
    let mut helper = Helper::take(ground)?;
    for dir in requests {
        match helper.listen(&ground.places.lib.join(dir), &mut keeper) {
            Ok(()) => report(LISTENS),
            Err(e) => report(&e.with_causes().replace('\n', " ")),
        }
    }
    net::end_lending(ground)
}
