//! Plan of a restore, and the verification of the checkpoint meanwhile.
//!
//! A restore is a start ([`crate::start`]) whose newborn follows a restore program instead of calling
//! execve. Its whole confinement comes from `config.json`.
//!
//! Uses `ground`, `state`, `exit`, `log`, `io`, `silence`, `process`, `later`, `root` and `template`.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_checkpoint::Error as CheckpointError;
use dormouse_checkpoint::load;
use dormouse_checkpoint::load::{Allowed, Checked, Lazy, Restore, Wanted};
use dormouse_kernel::pidfd;
use dormouse_kernel::weakened;
use dormouse_launch::{Keeper, Plan};
use dormouse_model::{Config, NetMode};
use dormouse_parcel::Reader;
use dormouse_record::{Object, Records, SocketOption, Thing};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};

use crate::error::{Error, Result};
use crate::exit::SIGKILL;
use crate::ground::Ground;
use crate::io::{self, Io};
use crate::later::Later;
use crate::state::InitRecord;
use crate::template::Common;
use crate::user::PasswdUser;
use crate::{log, process, root, settings, silence, usage};

/// Contents up to this size are verified without a thread, which costs some 0.3 ms.
const SMALL_BYTES: u64 = 512 << 10;

/// Everything needed to restore a checkpoint.
pub(crate) struct RestorePlan {
    pub(crate) reader: Arc<Reader>,
    /// Verification of its contents, in progress or done.
    pub(crate) check: Option<Check>,
    /// Sockets that were held, by the numbers of their objects.
    pub(crate) held: Vec<(u32, OwnedFd)>,
    /// The container was asleep, and is again if the restore fails.
    pub(crate) wakes: bool,
    /// The old record of its first process, if start time and failure count are to be kept.
    pub(crate) since: Option<InitRecord>,
    /// The user of its first process, if that is on record. It is not looked up then: the container may have
    /// changed or removed it.
    pub(crate) user: Option<PasswdUser>,
    /// The number that its root file system had.
    pub(crate) device: Option<u64>,
    /// Addresses to be replaced, old and new.
    pub(crate) addresses: Vec<(IpAddr, IpAddr)>,
    /// The checkpoint is of another container, which continues by itself.
    pub(crate) beside: bool,
    /// An existing connection to the keeper.
    pub(crate) keeper: Cell<Option<Keeper>>,
    /// The part of its memory that is filled while it runs.
    pub(crate) later: Option<Later>,
    /// The part of its memory that the newborn inherits from a template.
    pub(crate) common: Option<Arc<Common>>,
    /// Drop rules must be applied to its network stack before the restore.
    pub(crate) keeps_quiet: bool,
    /// The limit of its time, while a newborn follows it.
    pub(crate) watch: Cell<Option<Watch>>,
    /// The newborn was made before, and has set the limits of its namespaces.
    pub(crate) has_newborn: bool,
}

/// Kills the newborn of a restore that takes too long. A file system of a volume
/// may not answer, and the processes of a hostile checkpoint may wait for each other.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Closed at the end of the restore.
    _over: mpsc::Sender<Watched>,
    stage: Arc<AtomicU8>,
    limit: Duration,
}

/// Stages of a [`Watch`]: the first one ends once, by the limit or by the restore.
const RUNS: u8 = 0;
const HAS_FIRED: u8 = 1;
const IS_OVER: u8 = 2;

/// Ends the first stage. Returns whether this caller did.
fn leave_first(stage: &AtomicU8, next: u8) -> bool {
    stage.compare_exchange(RUNS, next, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// The work of a watching thread.
#[derive(Debug)]
struct Watched {
    newborn: OwnedFd,
    limit: Duration,
    stage: Arc<AtomicU8>,
}

/// The channel of a thread that waits for its work.
static WATCHER: Mutex<Option<mpsc::Sender<Watched>>> = Mutex::new(None);

/// Starts the thread of the next [`Watch`], in a process that waits for a job. A thread that was not used remains.
pub(crate) fn prepare_watch() {
    WATCHER.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(watcher);
}

/// Starts a thread that watches one restore, and ends when the channel is closed.
fn watcher() -> mpsc::Sender<Watched> {
    let (work, receives) = mpsc::channel::<Watched>();
    let body = move || {
        let Ok(Watched { newborn, limit, stage }) = receives.recv() else { return };
        let is_over = receives.recv_timeout(limit).err() != Some(mpsc::RecvTimeoutError::Timeout);
        if !is_over && leave_first(&stage, HAS_FIRED) {
            let _ = pidfd::send_signal(newborn.as_fd(), SIGKILL); // may have ended just now
        }
    };
    reserve_descriptors();
    // Without memory for the thread the restore has no limit.
    let _ = std::thread::Builder::new().stack_size(WATCH_STACK_BYTES).spawn(body);
    work
}

/// LIMIT: descriptors for which the table of a process is made large enough ahead. A restore of many held sockets
/// has more.
const DESCRIPTORS: i32 = 256;

/// Enlarges this process's table of descriptors. The kernel enlarges a table of several threads after a grace
/// period of RCU alone (`expand_fdtable`): a wake took 10 ms longer when its 65th descriptor was opened.
fn reserve_descriptors() {
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    // Where the limit of open files is lower, no table is that large.
    let _ = root.and_then(|root| rustix::io::fcntl_dupfd_cloexec(root, DESCRIPTORS - 1));
}

impl Watch {
    pub(crate) fn begin(newborn: OwnedFd, limit: Duration) -> Self {
        let ahead = WATCHER.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut over = ahead.unwrap_or_else(watcher);
        let stage = Arc::new(AtomicU8::new(RUNS));
        let work = Watched { newborn, limit, stage: Arc::clone(&stage) };
        if let Err(mpsc::SendError(work)) = over.send(work) {
            // There was no memory for the thread, and there may be now.
            over = watcher();
            let _ = over.send(work);
        }
        Self { _over: over, stage, limit }
    }

    /// Ends the limit. Returns whether the newborn was killed before.
    ///
    /// ORDER: before the first task runs: a process that runs again is never killed for a slow restore.
    pub(crate) fn end(&self) -> bool {
        !leave_first(&self.stage, IS_OVER) && self.stage.load(Ordering::SeqCst) == HAS_FIRED
    }

    /// Returns the error for a restore that was ended.
    pub(crate) fn error(&self) -> Option<Error> {
        let has_fired = self.stage.load(Ordering::SeqCst) == HAS_FIRED;
        has_fired.then_some(Error::TooSlow(self.limit))
    }
}

/// Stack of the thread of a [`Watch`].
const WATCH_STACK_BYTES: usize = 64 << 10;

/// Verification of a checkpoint's contents against their checksums, concurrent with the rest of the
/// restore: no process may run before its memory is verified.
#[derive(Debug)]
pub(crate) enum Check {
    /// Runs in a thread.
    Begun(RefCell<Option<JoinHandle<dormouse_checkpoint::Result<()>>>>),
    /// Too small for a thread: done while the newborn is busy.
    Small(Cell<bool>),
}

impl Check {
    /// Begins the verification of the contents that are read before any process runs.
    pub(crate) fn begin(reader: &Arc<Reader>, later: Option<&Later>) -> Self {
        let lazy = later.map(|later| later.lazy.clone());
        let bytes = match &lazy {
            Some(lazy) => lazy.at_once_bytes(),
            None => reader.records().pages.bytes,
        };
        if bytes <= SMALL_BYTES {
            return Self::Small(Cell::new(false));
        }
        let reader = Arc::clone(reader);
        let check = move || verify(&reader, lazy.as_ref());
        Self::Begun(RefCell::new(Some(std::thread::spawn(check))))
    }
}

fn verify(reader: &Reader, lazy: Option<&Lazy>) -> dormouse_checkpoint::Result<()> {
    match lazy {
        Some(lazy) => lazy.verify(reader),
        None => reader.verify(),
    }
}

impl RestorePlan {
    /// Plans the restore of a verified checkpoint, for a container that was not asleep.
    pub(crate) fn verified(reader: Arc<Reader>) -> Self {
        Self {
            reader,
            check: None,
            held: Vec::new(),
            wakes: false,
            since: None,
            user: None,
            device: None,
            addresses: Vec::new(),
            beside: false,
            keeper: Cell::default(),
            later: None,
            common: None,
            keeps_quiet: false,
            watch: Cell::default(),
            has_newborn: false,
        }
    }

    /// Returns the ports of the TCP sockets that a restore binds in the stack that the container shares, beside no
    /// ended connection: without SO_REUSEADDR, which connections have from their listener. Held sockets and
    /// connections are not bound.
    pub(crate) fn ports(&self) -> Vec<u16> {
        let objects = self.reader.records().objects.iter().zip(0..);
        let own = objects.filter(|(object, number)| {
            object.net.is_none() && !self.held.iter().any(|(held, _)| held == number)
        });
        let is_alone =
            |object: &&Object| !object.thing.socket_options().iter().any(SocketOption::is_reuse);
        let own = own.map(|(object, _)| object).filter(is_alone);
        own.filter_map(|object| match &object.thing {
            Thing::Listener(listener) => Some(listener.address.port()),
            Thing::TcpSocket(tcp) if tcp.connection.is_none() => {
                tcp.address.map(|address| address.port()).filter(|port| *port != 0)
            }
            _ => None,
        })
        .collect()
    }

    /// Returns how many terminals the container may have: those of the checkpoint keep their numbers, also
    /// where a container of an older program had more.
    pub(crate) fn terminals(&self) -> u32 {
        let objects = self.reader.records().objects.iter();
        let numbers = objects.filter_map(|object| match &object.thing {
            Thing::Terminal(terminal) => Some(terminal.number.saturating_add(1)),
            _ => None,
        });
        numbers.fold(io::TERMINALS, u32::max)
    }

    /// Returns whether a spare has all that the newborn of this restore is born with: no memory of a template, and not
    /// more terminals than usual.
    pub(crate) fn may_take_spare(&self) -> bool {
        self.common.is_none() && self.terminals() == io::TERMINALS
    }

    /// Begins the limit of time for a newborn.
    pub(crate) fn begin_watch(&self, ground: &Ground, newborn: BorrowedFd<'_>) -> Result<()> {
        let bytes = self.reader.records().pages.bytes;
        let limit = settings::restore_limit(&ground.settings(), bytes);
        self.watch.set(Some(Watch::begin(io::clone_fd(newborn)?, limit)));
        Ok(())
    }

    /// Ends the limit of time, if it has not expired.
    pub(crate) fn end_watch(&self) -> dormouse_checkpoint::Result<()> {
        let watch = self.watch.take();
        let has_fired = watch.as_ref().is_some_and(Watch::end);
        self.watch.set(watch);
        match has_fired {
            true => Err(CheckpointError::Elsewhere("the restore took too long".into())),
            false => Ok(()),
        }
    }

    /// Returns the memory with which the container begins, with a part for the kernel.
    pub(crate) fn memory_bytes(&self) -> u64 {
        usage::restored_bytes(self.reader.records())
    }

    /// Returns the keeper's key of the template.
    pub(crate) fn template(&self) -> Option<String> {
        self.common.as_ref().map(|common| common.key.clone())
    }

    /// Verifies small contents.
    pub(crate) fn check_small(&self) -> dormouse_checkpoint::Result<()> {
        match &self.check {
            Some(Check::Small(done)) if !done.replace(true) => {
                verify(&self.reader, self.later.as_ref().map(|later| &later.lazy))
            }
            _ => Ok(()),
        }
    }

    /// Waits until the contents are verified.
    pub(crate) fn checked(&self) -> dormouse_checkpoint::Result<()> {
        let Some(Check::Begun(running)) = &self.check else { return self.check_small() };
        match running.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(checked)) => checked,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

/// Checks that a checkpoint can be restored here, and under the configuration of its container.
pub(crate) fn check(config: &Config, user: &PasswdUser, from: &RestorePlan) -> Result<Checked> {
    let allowed = Allowed {
        held: from.held.iter().map(|(number, _)| *number).collect(),
        addresses: from.addresses.clone(),
        beside: from.beside,
        // Clocks continue during sleep, and stand still between checkpoint and restore.
        passed_ns: match from.wakes {
            true => from.reader.records().about.passed_ns(),
            false => 0,
        },
        ..allowed(config, user)?
    };
    Ok(load::check(&from.reader, allowed)?)
}

/// Returns what the configuration of a container permits.
pub(crate) fn allowed(config: &Config, user: &PasswdUser) -> Result<Allowed> {
    let security = &config.spec.security;
    let granted = process::granted(security)?;
    Ok(Allowed {
        has_init: config.spec.init,
        capabilities: if weakened("restored-capabilities") { u64::MAX } else { granted.bits() },
        ambient: 0,
        inheritable: 0,
        uid: user.uid,
        gid: user.gid,
        groups: user.groups.clone(),
        ids: if config.ids.wide { 65_536 } else { 32_767 },
        memory: root::memory(config),
        own_network: config.spec.net == NetMode::None,
        own_names: true,
        own_ipc: true,
        cgroups: config.spec.systemd,
        // The filter, of any kind, permits them.
        user_namespaces: true,
        chroots: !process::is_filtered(security),
        no_new_privileges: security.no_new_privileges,
        console: config.spec.process.terminal,
        ..Allowed::default()
    })
}

/// Adds the last part of a restore's plan, which replaces the program.
pub(crate) fn plan(
    ground: &Ground,
    plan: &mut Plan,
    config: &Config,
    (user, io): (&PasswdUser, &Io),
    (from, checked): (&RestorePlan, Checked),
) -> Result<Restore> {
    let security = &config.spec.security;
    let granted = process::granted(security)?;
    let memory = match (&from.common, &from.later) {
        (Some(common), _) => load::Memory::Shared(&common.choice),
        (None, Some(later)) => load::Memory::Later(&later.lazy),
        (None, None) => load::Memory::Own,
    };
    let mut restore = load::lay_out(&from.reader, checked, memory)?;
    if silence::is_quiet(ground, &config.id) {
        restore.end_quiet(config.id.as_str());
    }
    let follow = restore.follow(|wanted| match wanted {
        Wanted::Outside(name) => log::with_flags(outside(io, name)?, from.reader.records(), name),
        Wanted::Userfaults => {
            let later = from.later.as_ref().expect("wanted only with a device");
            io::clone_fd(later.device.as_fd())
        }
        Wanted::Held(number) => {
            let held = from.held.iter().find(|(one, _)| one == number);
            let (_, socket) = held.expect("only held sockets are wanted");
            set_recorded_mode(from.reader.records(), *number, socket)?;
            io::clone_fd(socket.as_fd())
        }
    })?;
    plan.setsid();
    if config.spec.process.terminal {
        let size = restore.console_size().unwrap_or_default();
        let with_device = config.spec.systemd || config.spec.init;
        io::plan_io(plan, Io::Terminal(size), user.uid, with_device);
    }
    process::plan_rlimits(plan, security)?;
    plan.sync_early();
    if !from.has_newborn {
        process::plan_namespace_limits(plan, config)?;
    }
    process::plan_confinement(plan, config, security, granted);
    if let Some(program) = from.reader.records().of_init() {
        let (ids, masks) = process::identity(user, granted);
        plan.init_as(program, &ids, &masks);
    }
    plan.follow(follow);
    Ok(restore)
}

/// Gives a held listening socket the mode of its record, blocking or not. A process that reset clients of the
/// container ([`dormouse_stacks::stack::reset_clients`]) may have been killed before it did.
fn set_recorded_mode(records: &Records, number: u32, socket: &OwnedFd) -> Result<()> {
    let recorded = match records.objects.get(number as usize).map(|object| &object.thing) {
        Some(Thing::Listener(listener)) => listener.flags,
        Some(Thing::UnixSocket(socket)) if socket.backlog.is_some() => socket.flags,
        _ => return Ok(()),
    };
    let is_nonblocking = OFlags::from_bits_retain(recorded).contains(OFlags::NONBLOCK);
    let set = || {
        let mut flags = fcntl_getfl(socket)?;
        if flags.contains(OFlags::NONBLOCK) != is_nonblocking {
            flags.set(OFlags::NONBLOCK, is_nonblocking);
            fcntl_setfl(socket, flags)?;
        }
        Ok::<_, rustix::io::Errno>(())
    };
    set().map_err(|e| Error::file("cannot set the mode of", "a held socket")(e.into()))
}

/// Returns a standard stream by the name under which it was saved.
fn outside(io: &Io, name: &str) -> Result<OwnedFd> {
    let stream = log::NAMES.iter().position(|known| *known == name);
    match (stream, io) {
        (Some(stream), Io::Fds(fds)) => io::clone_fd(fds[1 + stream].as_fd()),
        _ => Err(Error::Invalid(format!("the checkpoint needs an unknown stream '{name}'"))),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn child() -> (Child, OwnedFd) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = pidfd::open(child.id()).unwrap();
        (child, process)
    }

    #[test]
    fn table_of_descriptors_is_enlarged_ahead() {
        reserve_descriptors();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        assert!(size.trim().parse::<i32>().unwrap() >= DESCRIPTORS, "{size}");
    }

    #[test]
    fn watch_kills_newborn_after_its_limit_and_only_then() {
        let (mut late, process) = child();
        let watch = Watch::begin(io::clone_fd(process.as_fd()).unwrap(), Duration::from_millis(20));
        assert!(pidfd::wait(&process, Some(Duration::from_secs(60))).unwrap(), "it is killed");
        let text = watch.error().expect("the watch has fired").to_string();
        assert!(text.contains("20ms"), "{text}");
        late.wait().unwrap();
        let (mut done, process) = child();
        let watch = Watch::begin(io::clone_fd(process.as_fd()).unwrap(), Duration::from_secs(1000));
        assert!(watch.error().is_none());
        assert!(!watch.end());
        assert!(!leave_first(&watch.stage, HAS_FIRED), "the limit has no effect any more");
        drop(watch);
        assert!(pidfd::is_alive(&process), "the end of the watch kills no process");
        done.kill().unwrap();
        done.wait().unwrap();
    }
}
