//! Spares: the parts of a container that can be made before it is requested.
//!
//! Everything that bears a container's id can exist before the request, where the id is drawn ahead. A spare is such
//! an id in `LIB/spares/ID`, with its slot, addresses, writable layer, cgroups, identity in its domain, directories on
//! a shared tmpfs, and a newborn: born into its cgroups and namespaces, with the image and all usual mounts attached.
//! The newborn waits for the last part of its plan, before any credential, limit or filter of a program, and has
//! executed no foreign code.
//!
//! ```text
//! LIB/spares/ID/          locked by the nursery (`nursery`), then by the adopting command
//! LIB/pending/new-ID/     adopted: an ordinary create in progress, with objects in the kernel
//! RUN/spares.sock         where the nursery gives spares away
//! RUN/c/ID/               of a created container: it has its newborn already, without a record of a first process
//! RUN/spares.lock         held by the nursery for its life
//! ```
//!
//! **Adoption.** `run` asks for a spare of the [`Kind`] that it needs, and receives its descriptors in one message: the
//! lock of its directory, the connection to the keeper on which it was born, the newborn's pidfd and socket, the root.
//! The command is then what the nursery was, its starter and the holder of its lock. One rename makes the spare a
//! create in progress. The ordinary create and start follow, and each of their steps is made or found made. An option
//! that changes a part made ahead has no kind, and the container is made from nothing.
//!
//! **Checkpoints.** A new container that goes on from a checkpoint takes a spare as well: a restore differs from a
//! start in the last part of the plan, and in the clocks that views begin
//! ([`crate::restore::RestorePlan::may_take_spare`]).
//!
//! **Created, not started.** `create` adopts a spare as well, and leaves it to the nursery, which keeps it for a second
//! ([`keep`]). `start` takes it from there under the lock of the container ([`take_kept`]). To every other verb the
//! container is one with an interrupted start: objects in the kernel, and no record of a first process. Verbs that
//! settle a container release these objects, and so does the nursery when the second is over.
//!
//! **Killed anywhere.** A spare lives as long as the socket of its newborn is open, and the lock of its directory is
//! held. A killed nursery or command closes both: the newborn exits by itself, and the settler that the keeper starts
//! at the exit of any first process, or the next command, releases the rest by the id ([`sweep`], [`crate::recover`]).
//!
//! **Nothing old.** A spare was never a container. What it has was made for its id, and is removed with it.
//!
//! **Settings.** What a spare has copied from its surroundings is its [`Stamp`]. The command's own stamp must be equal.
//! A container inherits nothing from its caller, so limits and umask of the caller are not in it.
//!
//! **Views** ([`crate::view`]) of a limit are made ahead with it. LIMIT: the boot clock of a container with views
//! begins at the birth of its newborn, so its uptime has the age of the spare at its adoption.
//!
//! Uses `ground`, `exit`, `gates`, `shared`, `view`, `sysinfo`, `pending` and `admission`.

use std::fs;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dormouse_kernel::{pidfd, scale};
use dormouse_launch::{Keeper, LaunchError, Newborn, Passed, wire};
use dormouse_model::{
    Config, ContainerId, Evict, IdMap, Limits, Name, NetMode, OutOfMemory, Process, Restart,
    RootSource, SeccompChoice, Security, Sleep, Spec, User, Views, WakeOn,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};

use crate::admission;
use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::event;
use crate::exit::SIGKILL;
use crate::gates;
use crate::ground::{self, CONFIG, Ground};
use crate::pending::{self, New};
use crate::spec::Create;
use crate::user::{PasswdUser, Users};
use crate::{shared, sysinfo, view};

/// LIMIT: bytes of a message to or from the nursery. A newborn's steps are named in it.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Descriptors of a spare: connection to the keeper, newborn and its socket; root and lock, unless its container is
/// created.
const DESCRIPTORS: usize = 5;

/// LIMIT: how long a start waits for the nursery, which answers in some ten microseconds unless it is stopped.
const ANSWER_WITHIN: Duration = Duration::from_millis(100);

/// LIMIT: how long a command waits until the nursery has released all spares.
const DISMISSED_WITHIN: Duration = Duration::from_secs(30);

/// How often a nursery that releases its spares is looked at.
const DISMISS_AGAIN: Duration = Duration::from_millis(5);

/// LIMIT: how long a killed newborn may take to end.
const KILLED_WITHIN: Duration = Duration::from_secs(30);

/// The choices of an operator that a spare is made with. Each other choice is made at its adoption, or has no spare.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kind {
    image: String,
    domain: Name,
    auto_remove: bool,
    limits: Limits,
    views: Views,
}

impl Kind {
    /// The kind of a requested container; `None` if it differs in a part that is made ahead.
    pub(crate) fn of(create: &Create) -> Option<Self> {
        // A new field of a specification is to be placed here: made ahead, decided later, or refused.
        let Spec {
            // Made ahead.
            root,
            net,
            limits,
            views,
            auto_remove,
            // Decided by the last part of the plan, or by the engine beside it.
            process: _,
            security,
            publish: _,
            restart: _,
            init: _,
            log_max_bytes: _,
            log_driver: _,
            stop_signal: _,
            stop_timeout_s: _,
            labels: _,
            account: _,
            shared: _,
            // None is made ahead.
            hostname,
            domainname,
            extra_hosts,
            dns,
            anonymous_volumes,
            mounts,
            sleep,
            drowsy,
            wake_on,
            oom,
            evict,
            read_only,
            devpts,
            systemd,
            sysctls,
            nproc,
        } = &create.spec;
        let (RootSource::Image { id, .. }, NetMode::Address { domain }) = (root, net) else {
            return None;
        };
        // Those of its cgroups alone, which no other container has to give something for.
        let has_limits_of_group = {
            let none = Limits::default();
            let of_group = limits.clone();
            *limits
                == Limits {
                    cpu_max_milli: of_group.cpu_max_milli,
                    cpu_period_us: of_group.cpu_period_us,
                    cpu_burst: of_group.cpu_burst,
                    cpu_weight: of_group.cpu_weight,
                    memory_max_bytes: of_group.memory_max_bytes,
                    memory_high_bytes: of_group.memory_high_bytes,
                    swap_max_bytes: of_group.swap_max_bytes,
                    pids_max: of_group.pids_max,
                    io_weight: of_group.io_weight,
                    ..none
                }
        };
        let has_usual_mounts = mounts.is_empty()
            && anonymous_volumes.is_empty()
            && extra_hosts.is_empty()
            && dns.is_empty()
            && *devpts
            && !*read_only
            && !*systemd
            && !security.privileged;
        let has_usual_names = hostname.is_empty() && domainname.is_none() && sysctls.is_empty();
        let stays_awake = *sleep == Sleep::default()
            && *drowsy == Sleep::default()
            && *wake_on == WakeOn::default()
            && *oom == OutOfMemory::default()
            && *evict == Evict::default();
        let is_usual = has_limits_of_group
            && has_usual_mounts
            && has_usual_names
            && stays_awake
            && nproc.is_none()
            && !create.wide_ids
            && create.addresses.is_empty()
            // A program with weakened protections: the nursery has the usual ones.
            && std::env::var_os("DORMOUSE_WEAKEN").is_none();
        is_usual.then(|| Self {
            image: id.clone(),
            domain: domain.clone(),
            auto_remove: *auto_remove,
            limits: limits.clone(),
            views: *views,
        })
    }

    /// The trust domain.
    pub(crate) fn domain(&self) -> &Name {
        &self.domain
    }

    /// The configuration of a spare. The name is that of no container, and the program is none.
    pub(crate) fn config(
        &self,
        id: &ContainerId,
        ids: IdMap,
        addresses: Vec<IpAddr>,
    ) -> Result<Config> {
        let invalid = |e: dormouse_model::Invalid| Error::Invalid(e.to_string());
        let spec = Spec {
            root: RootSource::Image {
                reference: "spare".parse().map_err(invalid)?,
                id: self.image.clone(),
            },
            process: Process::default(),
            security: Security {
                capabilities: Vec::new(),
                no_new_privileges: true,
                seccomp: SeccompChoice::Default,
                no_aio: false,
                privileged: false,
                rlimits: Vec::new(),
                oom_score_adj: None,
            },
            hostname: id.short().to_owned(),
            domainname: None,
            extra_hosts: Vec::new(),
            dns: Vec::new(),
            anonymous_volumes: Vec::new(),
            mounts: Vec::new(),
            net: NetMode::Address { domain: self.domain.clone() },
            publish: Vec::new(),
            limits: self.limits.clone(),
            restart: Restart::default(),
            sleep: Sleep::default(),
            drowsy: Sleep::default(),
            wake_on: WakeOn::default(),
            oom: OutOfMemory::default(),
            evict: Evict::default(),
            auto_remove: self.auto_remove,
            read_only: false,
            init: false,
            devpts: true,
            systemd: false,
            log_max_bytes: 0,
            log_driver: dormouse_model::LogDriver::default(),
            stop_signal: 15,
            stop_timeout_s: 10,
            labels: Default::default(),
            sysctls: Default::default(),
            account: None,
            shared: false,
            views: self.views,
            nproc: None,
        };
        Ok(Config {
            version: 1,
            id: id.clone(),
            name: "spare".parse().map_err(invalid)?,
            created_unix_s: event::now_unix_ms() / 1000,
            ids,
            addresses,
            spec,
        })
    }
}

/// A file as it was: device, number, size, time of its last change.
pub(crate) type Seen = Option<(u64, u64, u64, i64, i64)>;

/// Looks at a file.
pub(crate) fn seen(path: &Path) -> Seen {
    let meta = fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()))
}

/// LIMIT: part of the host's memory that is available while anything is made or kept ahead: a sixteenth.
const AVAILABLE_PART: u64 = 16;

/// Returns whether the host has less memory than is to be available beside what is made ahead.
pub(crate) fn is_short_of_memory() -> bool {
    let info = rustix::system::sysinfo();
    let all = info.totalram.saturating_mul(u64::from(info.mem_unit));
    scale::available_bytes().is_some_and(|bytes| bytes < all / AVAILABLE_PART)
}

/// What a spare has copied from its surroundings: the program, the operator's settings, and the host's NIS domain name
/// (uname(2)), which a new UTS namespace copies. The files of names are those of the domain, whose inodes stay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    program: Seen,
    settings: Seen,
    domain_name: String,
}

impl Stamp {
    /// The stamp of this moment.
    pub(crate) fn now(ground: &Ground) -> Self {
        Self {
            program: seen(Path::new("/proc/self/exe")),
            settings: seen(&ground.settings()),
            domain_name: rustix::system::uname().domainname().to_string_lossy().into_owned(),
        }
    }
}

/// What is asked of the nursery.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// A spare, if there is one. The connection is closed when the start has its answer: then another one is made.
    /// `rests`: the container is to be started by another command.
    Take { kind: Box<Kind>, stamp: Stamp, rests: bool },
    /// That the parts of a created container are kept until its start. Their descriptors come with the message.
    Keep { given: Box<Given>, config: Seen },
    /// The parts of a created container with this configuration.
    Begin { id: ContainerId, config: Seen, stamp: Stamp },
    /// That all spares are released, and the nursery exits. It closes the connection at the end.
    Dismiss,
}

/// A spare in a message. An answer that is none of these is no spare.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Given {
    id: ContainerId,
    ids: IdMap,
    addresses: Vec<IpAddr>,
    device: u64,
    user: Option<PasswdUser>,
    passed: Passed,
}

/// A spare, held by its nursery or by the command that starts it.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) id: ContainerId,
    pub(crate) ids: IdMap,
    pub(crate) addresses: Vec<IpAddr>,
    /// The lock of its directory, until it is a create in progress. That of a created container has none.
    pub(crate) lock: Option<Lock>,
    /// The connection on which its newborn was born.
    pub(crate) keeper: Keeper,
    pub(crate) newborn: Newborn,
    /// Its root, without what is mounted there, and its number (st_dev). That of a created container is open in the
    /// newborn alone: its end is then that of the mount, also beside a nursery that is stopped.
    pub(crate) root: Option<OwnedFd>,
    pub(crate) device: u64,
    /// The user of the program, found at the creation of the container.
    pub(crate) user: Option<PasswdUser>,
}

impl Spare {
    /// Returns whether its newborn waits, and the keeper lives.
    pub(crate) fn is_fit(&self) -> bool {
        self.newborn.is_waiting() && self.keeper.is_quiet()
    }

    /// Describes it for another process, with its descriptors.
    fn describe(&self) -> (Given, Vec<BorrowedFd<'_>>) {
        let (passed, [keeper, newborn, socket]) = self.keeper.pass(&self.newborn);
        let Self { id, ids, addresses, device, user, .. } = self;
        let given = Given {
            id: id.clone(),
            ids: *ids,
            addresses: addresses.clone(),
            device: *device,
            user: user.clone(),
            passed,
        };
        let lock = self.lock.as_ref().map(|lock| lock.file().as_fd());
        let root = self.root.as_ref().map(AsFd::as_fd);
        let fds = [keeper, newborn, socket];
        (given, fds.into_iter().chain(root).chain(lock).collect())
    }

    /// Gives it to another process, to which it is then to be [left](Self::leave).
    pub(crate) fn give(&self, to: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
        let (given, fds) = self.describe();
        let text = serde_json::to_vec(&given).map_err(|_| Errno::INVAL)?;
        wire::send(to, &text, &fds, SendFlags::DONTWAIT)
    }

    /// Leaves it to the process to which it was given.
    pub(crate) fn leave(self) {
        self.keeper.leave();
    }

    /// Finds the user of a program in its root.
    pub(crate) fn find_user(&self, user: &User) -> Result<PasswdUser> {
        match (&self.user, &self.root) {
            (Some(found), _) => Ok(found.clone()),
            // The mounts below this root are on other files.
            (None, Some(root)) => Users::read(root.as_fd()).find(user),
            (None, None) => Err(LaunchError::Newborn { what: "has no recorded user" }.into()),
        }
    }

    /// Ends its newborn, and has the rest released by `release`.
    ///
    /// ORDER: the newborn is killed, reaped by the keeper, released, settled. If the release fails, the connection is
    /// closed behind the lock, and the settler of the keeper tries again.
    pub(crate) fn end(self, release: impl FnOnce(&ContainerId, IdMap) -> Result<()>) -> Result<()> {
        let Self { id, ids, lock, mut keeper, newborn, root, .. } = self;
        let pid = newborn.pid;
        // It exits when its socket is closed, but the nursery may have a copy for a moment.
        let _ = pidfd::send_signal(newborn.pidfd.as_fd(), SIGKILL); // it may have exited
        drop((newborn, root));
        let _ = keeper.wait(pid); // a keeper that is gone reaps nothing
        let released = release(&id, ids);
        drop(lock);
        match &released {
            Ok(()) => drop(keeper.settled(pid)), // likewise
            Err(_) => drop(keeper),
        }
        released
    }

    /// The spare of a message; `None` if a descriptor is lacking.
    pub(crate) fn received(ground: &Ground, given: Given, fds: Vec<OwnedFd>) -> Option<Self> {
        let mut fds = fds.into_iter();
        let passed_fds = [fds.next()?, fds.next()?, fds.next()?];
        let (root, lock) = (fds.next(), fds.next().map(Lock::received));
        let Given { id, ids, addresses, device, user, passed } = given;
        let (keeper, newborn) = Keeper::take_over(&ground.places.run, passed, passed_fds);
        Some(Self { id, ids, addresses, lock, keeper, newborn, root, device, user })
    }
}

/// Requests a spare from the nursery. `None` if it gives none.
fn take(ground: &Ground, wanted: &Request) -> Option<Spare> {
    let nursery = connect(ground).ok()?;
    sockopt::set_socket_timeout(&nursery, sockopt::Timeout::Recv, Some(ANSWER_WITHIN)).ok()?;
    request(nursery.as_fd(), wanted)?;
    let mut text = vec![0; MESSAGE_BYTES_MAX];
    let mut fds = Vec::with_capacity(DESCRIPTORS);
    // ORDER: without an answer the connection is closed, so a later one fails, and its spare stays with the nursery.
    let n = wire::receive(&nursery, &mut text, RecvFlags::empty(), |fd| fds.push(fd)).ok()?;
    if n == 0 {
        return None; // the nursery exits
    }
    ground.keep_open(nursery);
    Spare::received(ground, serde_json::from_slice(&text[..n]).ok()?, fds)
}

/// Adopts a spare for a requested container: from now on it is a create in progress. `None` if there is none. `rests`:
/// the container is to be started by another command ([`keep`]).
///
/// ORDER: the rename is under the lock that came with the spare. A kill before it leaves a spare, and a kill after it a
/// create; both are released by their id.
pub(crate) fn adopt(ground: &Ground, create: &Create, rests: bool) -> Option<(Spare, New)> {
    if !ground.places.run.join(SOCKET).exists() {
        return None; // one call, where no spares are made
    }
    let kind = Box::new(Kind::of(create)?);
    let mut spare = take(ground, &Request::Take { kind, stamp: Stamp::now(ground), rests })?;
    let lock = spare.lock.take()?;
    let dir = ground.places.spares().join(spare.id.as_str());
    if !spare.is_fit() || rename_to_new(ground, &spare.id, &dir).is_err() {
        spare.lock = Some(lock);
        let _ = spare.end(|id, ids| release(ground, id, &dir, Some(ids))); // otherwise the next command does
        return None;
    }
    let dir = pending::new_dir(ground, &spare.id);
    Some((spare, New { dir, lock, account: None }))
}

/// Leaves the parts of a created container to the nursery, until its start. Without a nursery they are released: the
/// container is then one that was made from nothing. The caller holds the lock of the container.
///
/// ORDER: published, then left: a kill in between closes the socket of the newborn, as that of an interrupted start.
pub(crate) fn keep(ground: &Ground, config: &Config, mut spare: Spare) {
    // An unknown user is an error of the start.
    spare.user = spare.find_user(&config.spec.process.user).ok();
    spare.root = None;
    let give = || -> Option<()> {
        spare.user.as_ref()?;
        let nursery = connect(ground).ok()?;
        let (given, fds) = spare.describe();
        let config = seen_config(ground, &config.id);
        let wanted = Request::Keep { given: Box::new(given), config };
        let text = serde_json::to_vec(&wanted).ok()?;
        // No answer is waited for: a later start comes after this message in the queue of the nursery.
        wire::send(&nursery, &text, &fds, SendFlags::DONTWAIT).ok()
    };
    match give() {
        Some(()) => spare.leave(),
        None => {
            let _ = spare.end(|id, _| release_objects(ground, id)); // otherwise the settler of the keeper does
        }
    }
}

/// Returns the parts that the nursery keeps of a created container; `None` if there are none, or its configuration has
/// changed since. The caller holds the lock of the container.
pub(crate) fn take_kept(ground: &Ground, id: &ContainerId) -> Option<Spare> {
    // Two calls, for nearly all.
    if !ground.run_dir(id).exists() || !ground.places.run.join(SOCKET).exists() {
        return None;
    }
    let (config, stamp) = (seen_config(ground, id), Stamp::now(ground));
    let spare = take(ground, &Request::Begin { id: id.clone(), config, stamp })?;
    if spare.id == *id && spare.is_fit() {
        return Some(spare);
    }
    let _ = spare.end(|id, _| release_objects(ground, id)); // otherwise the start does
    None
}

/// Looks at the configuration of a container.
pub(crate) fn seen_config(ground: &Ground, id: &ContainerId) -> Seen {
    seen(&ground.dir(id).join(CONFIG))
}

fn rename_to_new(ground: &Ground, id: &ContainerId, dir: &Path) -> std::io::Result<()> {
    fs::rename(dir, pending::new_dir(ground, id))
}

/// The socket of the nursery, in the runtime directory.
pub(crate) const SOCKET: &str = "spares.sock";

/// The lock of the nursery.
pub(crate) fn lock(ground: &Ground) -> PathBuf {
    ground.places.run.join("spares.lock")
}

/// Connects to the nursery. EAGAIN if its queue is full: it does not accept.
fn connect(ground: &Ground) -> std::result::Result<OwnedFd, Errno> {
    // connect(2) waits for room in the queue without a limit otherwise.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let (address, _dir) = admission::address(&ground.places.run, SOCKET)?;
    rustix::net::connect(&sock, &address)?;
    rustix::io::ioctl_fionbio(&sock, false)?;
    match sockopt::socket_peercred(&sock)?.uid.is_root() {
        true => Ok(sock),
        false => Err(Errno::PERM),
    }
}

fn request(to: BorrowedFd<'_>, request: &Request) -> Option<()> {
    let text = serde_json::to_vec(request).ok()?;
    wire::send(to, &text, &[], SendFlags::empty()).ok()
}

/// Has all spares released, and waits for it: before an image, an address or a slot that they have is needed. Nothing
/// is asked where no process makes spares.
///
/// ORDER: the lock of the nursery is free after its last spare. Its socket is gone before that, so the lock is waited
/// for also where no connection is made, or it ends.
pub(crate) fn dismiss(ground: &Ground) {
    if !lock(ground).exists() {
        return; // no nursery since the boot
    }
    let until = Instant::now() + DISMISSED_WITHIN;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if let Ok(nursery) = connect(ground)
            && sockopt::set_socket_timeout(&nursery, sockopt::Timeout::Recv, Some(left)).is_ok()
            && request(nursery.as_fd(), &Request::Dismiss).is_some()
        {
            // Its end is the end of the connection.
            let _ = rustix::net::recv(&nursery, &mut [0; 1][..], RecvFlags::empty());
        }
        match Lock::try_take_new(&lock(ground)) {
            Ok(None) => std::thread::sleep(DISMISS_AGAIN.min(left)),
            Ok(Some(_)) | Err(_) => return,
        }
    }
}

/// Allocates addresses. Spares give theirs back where there are no others, or one of them is wanted.
pub(crate) fn allocate<T>(ground: &Ground, mut allocate: impl FnMut() -> Result<T>) -> Result<T> {
    use dormouse_network::Error::{AddressTaken, PoolFull};
    allocate().or_else(|e| match e {
        Error::Network(AddressTaken { .. } | PoolFull { .. }) => {
            dismiss(ground);
            allocate()
        }
        e => Err(e),
    })
}

/// Releases what a spare has, its directory last. `ids` are known to the process that made it; otherwise they are
/// searched for. The caller holds the lock of the directory.
pub(crate) fn release(
    ground: &Ground,
    id: &ContainerId,
    dir: &Path,
    ids: Option<IdMap>,
) -> Result<()> {
    release_objects(ground, id)?;
    ground.network()?.release(id)?;
    match ids {
        Some(ids) => ground.slots.release(ids, id)?,
        None => {
            ground.slots.release_all(id)?;
            // Of an allocation that was killed between its two records.
            ground.network()?.sweep(&|other| other != id)?;
        }
    }
    disk::remove_tree(dir)
}

/// Returns whether a create has adopted a spare, and so has objects in the kernel. Most have not.
pub(crate) fn is_adopted(ground: &Ground, id: &ContainerId) -> bool {
    ground.run_dir(id).exists()
}

/// Releases the kernel objects of a spare. No program has run in them, so nothing is charged.
///
/// ORDER: `RUN/c/ID` last, as in every teardown.
pub(crate) fn release_objects(ground: &Ground, id: &ContainerId) -> Result<()> {
    if let Some(cgroup) = ground.cgroups()?.find(id.as_str())? {
        cgroup.kill()?;
        cgroup.wait_empty(KILLED_WITHIN)?;
        // What stays is removed with the program.
        let _ = sysinfo::leave(ground, None, &cgroup);
        cgroup.remove()?;
        gates::leave(ground, &cgroup)?;
    }
    ground.network()?.leave(id)?;
    shared::remove(ground, id)?;
    view::remove(ground, id)?;
    disk::remove_tree(&ground.run_dir(id))
}

/// Returns whether an id is that of a spare.
pub(crate) fn exists(ground: &Ground, id: &ContainerId) -> bool {
    ground.places.spares().join(id.as_str()).exists()
}

/// Releases what a killed nursery has left. Nothing is done while one lives: its spares are locked.
pub(crate) fn sweep(ground: &Ground) -> Result<usize> {
    let all = ground.places.spares();
    let left = match ground::ids_in(&all) {
        Ok(left) => left,
        Err(_) if !all.exists() => return Ok(0), // the first nursery makes it
        Err(e) => return Err(e),
    };
    if left.is_empty() {
        return Ok(0);
    }
    let Some(_alone) = Lock::try_take_new(&lock(ground))? else { return Ok(0) };
    let (mut swept, mut failed) = (0, None);
    // One that cannot be released keeps no other from it.
    for id in left {
        match sweep_one(ground, &id) {
            Ok(is_swept) => swept += usize::from(is_swept),
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    failed.map_or(Ok(swept), Err)
}

/// Releases one of them, whose newborn has exited. Returns false if a process holds it, or it is gone.
pub(crate) fn sweep_one(ground: &Ground, id: &ContainerId) -> Result<bool> {
    let dir = ground.places.spares().join(id.as_str());
    let Some(_lock) = Lock::try_take(&dir)? else { return Ok(false) };
    // ORDER: its last holder may have adopted it after it was opened here.
    if !dir.exists() {
        return Ok(false);
    }
    release(ground, id, &dir, None).map(|()| true)
}

#[cfg(test)]
mod tests {
    use dormouse_model::{Mount, MountKind};

    use super::*;

    fn create() -> Create {
        let id = ContainerId::from_bytes([7; 16]);
        let kind = Kind {
            image: "5".repeat(64),
            domain: "default".parse().unwrap(),
            auto_remove: true,
            limits: Limits::default(),
            views: Views::default(),
        };
        let mut spec = kind
            .config(&id, IdMap::narrow(dormouse_model::IdSlot(70_000)), Vec::new())
            .unwrap()
            .spec;
        spec.hostname.clear();
        Create {
            name: "x".parse().unwrap(),
            image: None,
            spec,
            addresses: Vec::new(),
            wide_ids: false,
        }
    }

    fn kind_with(change: impl FnOnce(&mut Create)) -> Option<Kind> {
        let mut create = create();
        change(&mut create);
        Kind::of(&create)
    }

    #[test]
    fn kind_is_that_of_usual_containers_alone() {
        let usual = kind_with(|_| {}).expect("a kind");
        // Decided later: the same kind.
        for change in [
            (|it| it.spec.process.args = vec!["sh".into()]) as fn(&mut Create),
            |it| it.spec.process.terminal = true,
            |it| it.spec.security.capabilities = vec!["CAP_CHOWN".into()],
            |it| it.spec.security.no_new_privileges = false,
            |it| it.spec.security.oom_score_adj = Some(7),
            |it| it.spec.restart = Restart::Always,
            |it| it.spec.init = true,
            |it| it.spec.labels.extend([("a".into(), "b".into())]),
            |it| it.name = "y".parse().unwrap(),
        ] {
            assert_eq!(kind_with(change).as_ref(), Some(&usual));
        }
        // Made ahead: another kind.
        for change in [
            (|it| it.spec.auto_remove = false) as fn(&mut Create),
            |it| it.spec.limits.pids_max = Some(9),
            |it| it.spec.limits.memory_max_bytes = Some(1 << 26),
            |it| it.spec.limits.cpu_max_milli = Some(500),
            |it| it.spec.views = Views::Yes,
            |it| it.spec.net = NetMode::Address { domain: "other".parse().unwrap() },
        ] {
            assert!(kind_with(change).is_some_and(|kind| kind != usual));
        }
        // Made from nothing.
        let tmpfs = |it: &mut Create| {
            it.spec.mounts.push(Mount {
                target: "/mnt".into(),
                read_only: false,
                no_exec: false,
                kind: MountKind::Tmpfs { size_bytes: None, mode: 0o755 },
            });
        };
        assert_eq!(kind_with(tmpfs), None);
        for change in [
            (|it| it.spec.root = RootSource::Directory("/srv".into())) as fn(&mut Create),
            |it| it.spec.net = NetMode::Host,
            |it| it.spec.net = NetMode::None,
            |it| it.spec.security.privileged = true,
            |it| it.spec.hostname = "named".into(),
            |it| it.spec.domainname = Some("domain".into()),
            |it| it.spec.read_only = true,
            |it| it.spec.devpts = false,
            |it| it.spec.systemd = true,
            |it| it.spec.limits.memory_min_bytes = Some(1 << 26),
            |it| it.spec.limits.cpu_reserve_milli = Some(100),
            |it| it.spec.limits.disk_bytes = Some(1 << 30),
            |it| it.spec.limits.cpuset_cpus = Some("0".into()),
            |it| it.spec.limits.sockets_max = Some(5),
            |it| it.spec.limits.net_ceil_bps = Some(1 << 20),
            |it| it.spec.nproc = Some(1),
            |it| it.spec.evict = Evict::Kill,
            |it| it.wide_ids = true,
            |it| it.addresses = vec![[10, 136, 0, 9].into()],
        ] {
            assert_eq!(kind_with(change), None);
        }
    }
}
