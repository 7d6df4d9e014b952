//! Saving and restoring a container's processes: the engine's part on top of the crate
//! `checkpoint`.
//!
//! Checkpoints of a container are directories `LIB/containers/ID/checkpoints/N`, numbered from 1,
//! or any directory that the operator gives. They contain processes only. Files stay in the
//! container's own layer, so a restored process finds them as they are by then.
//!
//! **Saving** stops all processes, publishes the checkpoint, and only then kills the processes. A
//! kill in between leaves the container running, or stopped with a complete checkpoint.
//! **Restoring** is a start ([`crate::start`]) whose newborn follows a restore program instead of
//! calling execve; its whole confinement comes from `config.json`.

use std::cell::{Cell, RefCell};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_checkpoint::Refusal;
use dormouse_checkpoint::format::{Base, Reader, Records};
use dormouse_checkpoint::load::{self, Allowed, Lazy, Restore, Wanted};
use dormouse_checkpoint::save::{self, Figures, Outside, Subject};
use dormouse_kernel::capability::Capability;
use dormouse_launch::{Follow, Keeper, Plan};
use dormouse_model::{Config, ContainerId, Mount, MountKind, Name, NetMode, RootSource, State};

use crate::archive;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::later::Later;
use crate::life::InitRecord;
use crate::silence::Saved;
use crate::spec::Create;
use crate::start::{self, Running};
use crate::template::{Common, Template};
use crate::user::Account;

/// How a checkpoint is made.
#[derive(Debug, Clone, Default)]
pub struct CheckpointOptions {
    /// The processes continue after the checkpoint.
    pub leave_running: bool,
    /// Directory to be made, which must not exist; by default the container's next number.
    pub to: Option<PathBuf>,
}

/// Selects a checkpoint.
#[derive(Debug, Clone, Default)]
pub enum From {
    /// The container's last.
    #[default]
    Last,
    /// One of the container's, by its number.
    Number(u32),
    /// A directory.
    Directory(PathBuf),
}

/// A new checkpoint.
#[derive(Debug, Clone)]
pub struct Made {
    /// Its directory.
    pub path: PathBuf,
    /// Its number among the container's checkpoints, unless it was written elsewhere.
    pub number: Option<u32>,
    /// Durations and sizes.
    pub figures: Figures,
}

/// A checkpoint of a container.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Its number.
    pub number: u32,
    /// Its directory.
    pub path: PathBuf,
    /// Bytes on disk; files shared with other checkpoints of the container are counted for each.
    pub bytes: u64,
    /// When it was made, in milliseconds since the epoch; `None` if it is damaged.
    pub created_unix_ms: Option<i64>,
    /// Number of processes; 0 if it is damaged.
    pub processes: usize,
    /// Description of the damage, if any.
    pub damage: Option<String>,
}

/// Everything needed to restore a checkpoint.
pub(crate) struct Comeback {
    pub(crate) reader: Arc<Reader>,
    /// Verification of its contents, in progress or done.
    pub(crate) check: Option<Check>,
    /// Sockets that were held, by the numbers of their objects.
    pub(crate) held: Vec<(u32, OwnedFd)>,
    /// The container was asleep, and is again if the restore fails.
    pub(crate) wakes: bool,
    /// The old record of its first process, if start time and failure count are to be kept.
    pub(crate) since: Option<InitRecord>,
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
}

/// Verification of a checkpoint's contents against their checksums, concurrent with the rest of the
/// restore: no process may run before its memory is verified.
#[derive(Debug)]
pub(crate) enum Check {
    /// Runs in a thread.
    Begun(RefCell<Option<JoinHandle<dormouse_checkpoint::Result<()>>>>),
    /// Too small for a thread: done while the newborn is busy.
    Small(Cell<bool>),
}

/// Contents up to this size are verified without a thread, which costs some 0.3 ms.
const SMALL_BYTES: u64 = 512 << 10;

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

impl Comeback {
    /// Plans the restore of a verified checkpoint, for a container that was not asleep.
    fn verified(reader: Arc<Reader>) -> Self {
        Self {
            reader,
            check: None,
            held: Vec::new(),
            wakes: false,
            since: None,
            addresses: Vec::new(),
            beside: false,
            keeper: Cell::default(),
            later: None,
            common: None,
            keeps_quiet: false,
        }
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

impl Engine {
    /// Returns everything that prevents a checkpoint of a running container, by name. No process is
    /// stopped.
    pub fn explain(&self, id: &ContainerId) -> Result<Vec<Refusal>> {
        let config = self.config(id)?;
        self.filled(&config)?;
        let subject = self.subject(&config)?;
        Ok(save::explain(&subject)?)
    }

    /// Returns everything that prevents a sleep, which is less: reachable sockets are held by the
    /// keeper.
    pub fn explain_sleep(&self, id: &ContainerId) -> Result<Vec<Refusal>> {
        let config = self.config(id)?;
        self.filled(&config)?;
        Ok(save::explain(&self.to_sleep(&config)?)?)
    }

    /// Saves the processes of a running container.
    pub fn checkpoint(&self, id: &ContainerId, options: &CheckpointOptions) -> Result<Made> {
        self.save(id, options, None)
    }

    /// Saves the processes, and calls a closure while they are stopped. If the closure fails the
    /// processes continue, and the checkpoint is removed.
    pub fn checkpoint_while<T, E: std::convert::From<Error>>(
        &self,
        id: &ContainerId,
        options: &CheckpointOptions,
        meanwhile: impl FnOnce(&Path) -> std::result::Result<T, E>,
    ) -> std::result::Result<(Made, T), E> {
        let mut done = None;
        let mut step = Some(meanwhile);
        let mut once = |path: &Path| {
            // Once: if the save fails afterwards, the result is dropped.
            done = step.take().map(|step| step(path));
            matches!(done, Some(Ok(_)))
        };
        let made = self.save(id, options, Some(&mut once))?;
        match done {
            Some(done) => Ok((made, done?)),
            None => Err(Error::Invalid("nothing was saved".into()).into()),
        }
    }

    fn save(
        &self,
        id: &ContainerId,
        options: &CheckpointOptions,
        meanwhile: Option<&mut dyn FnMut(&Path) -> bool>,
    ) -> Result<Made> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let (mut init, _) = self.can_be_saved(&config)?;
        if config.auto_remove && !options.leave_running {
            return Err(Error::Invalid(
                "a container of --rm is removed when it stops, with its checkpoints: use \
                 --leave-running and --to"
                    .into(),
            ));
        }
        let (path, number) = match &options.to {
            Some(path) => (path.clone(), None),
            None => {
                let number = self.numbers(id)?.last().map_or(1, |n| n + 1);
                let all = self.checkpoints_dir(id);
                crate::disk::make_dir(&all, 0o700)?;
                (all.join(number.to_string()), Some(number))
            }
        };
        let subject = self.subject(&config)?;
        // Processes that continue are resumed when all is read, unless the closure needs them
        // stopped.
        let goes_on = options.leave_running && meanwhile.is_none();
        // A checkpoint elsewhere belongs to the operator, and shares no file with the container's.
        let base = number.and_then(|_| self.earlier(id));
        let (stopped, figures) = save::save(&subject, &path, base.as_ref(), goes_on)?;
        let is_done = meanwhile.is_none_or(|meanwhile| meanwhile(&path));
        if !is_done {
            archive::withdraw(&path)?;
        } else if !options.leave_running {
            if figures.connections > 0 {
                // ORDER: before the connections end: the next start of this container finds the
                // rules.
                self.note_silence(&config, Reader::open(&path)?.records(), Saved::JustNow)?;
            }
            // ORDER: published above; only now may the processes be killed.
            init.stopping = true;
            self.write_init(id, &init)?;
            let cgroup = self.cgroups()?.find(id.as_str())?;
            if let Some(stopped) = stopped {
                stopped.kill(|| cgroup.map_or(Ok(()), |cgroup| cgroup.kill()))?;
            }
            let look = self.look(&config)?;
            self.kill_locked(&config, &look)?;
        }
        let place = path.display().to_string();
        self.record("checkpoint", id.as_str(), config.name.as_str(), &[("path", place)]);
        Ok(Made { path, number, figures })
    }

    /// Returns the last checkpoint as a base: unchanged memory need not be saved again. A damaged
    /// checkpoint is no base.
    pub(crate) fn earlier(&self, id: &ContainerId) -> Option<Base> {
        let last = self.numbers(id).ok().and_then(|all| all.last().copied());
        let last = last.map(|number| self.checkpoints_dir(id).join(number.to_string()));
        let made = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
        let mut all: Vec<_> =
            last.into_iter().chain([self.woken_dir(id)]).filter_map(made).collect();
        all.sort();
        let of = |(_, path): &(_, PathBuf)| Base::of(&Reader::open(path).ok()?).ok()?;
        all.iter().rev().find_map(of)
    }

    /// Returns the first process of a running container that is in a state to be saved.
    pub(crate) fn can_be_saved(&self, config: &Config) -> Result<(InitRecord, OwnedFd)> {
        let found = self.alive(config)?;
        if found.0.paused {
            return Err(self.not(config, State::Paused, "unpause it first"));
        }
        if found.0.drowsy_unix_ms.is_some() {
            return Err(self.not(config, State::Drowsy, "wake it first"));
        }
        self.not_entered(config)?;
        self.filled(config)?;
        Ok(found)
    }

    /// Restores the processes of a stopped container.
    ///
    /// With `lazy`, large memory areas are filled while the processes run.
    pub fn restore(&self, id: &ContainerId, from: &From, lazy: bool) -> Result<Running> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let look = self.look(&config)?;
        if look.is_alive() {
            return Err(self.not(&config, look.state, "stop it first"));
        }
        if look.state == State::Asleep {
            return Err(self.not(&config, look.state, "wake it, or stop it first"));
        }
        let path = self.find_checkpoint(&config, from)?;
        let reader = Reader::open(&path)?;
        let whose = &reader.records().about.container;
        if whose != id.as_str() {
            return Err(Error::Invalid(format!(
                "the checkpoint is of container {whose}: this container does not have its files"
            )));
        }
        let later = if lazy { self.later(id, &reader)? } else { None };
        self.settle_locked(&config, false)?;
        let mut comeback = Comeback::verified(Arc::new(reader));
        // No process runs before it is done, and damage is rare.
        comeback.check = Some(Check::begin(&comeback.reader, later.as_ref()));
        comeback.later = later;
        // Recorded rules may be missing in the host's stack, for example after a reboot.
        let is_news = self.note_silence(&config, comeback.reader.records(), Saved::Before)?;
        comeback.keeps_quiet = is_news || self.is_quiet(id) && config.net == NetMode::Host;
        let running = self.start_restored(&config, &comeback)?;
        self.forget_silence(id)?; // the rules were removed from the stack
        Ok(running)
    }

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
        let created = self.create(like(other, name, addresses, root))?;
        let addresses = moved(other, &created.config);
        let reader = Arc::clone(&template.reader);
        let common = template.common.clone();
        let comeback = Comeback { addresses, beside: true, common, ..Comeback::verified(reader) };
        self.start_restored(&created.config, &comeback).inspect_err(|_| self.discard(created))
    }

    /// Opens a checkpoint for clones and verifies its contents.
    pub(crate) fn clonable(&self, other: &Config, checkpoint: &Path) -> Result<Reader> {
        if !other.anonymous_volumes.is_empty() {
            return Err(Error::Invalid(format!(
                "'{}' has anonymous volumes, which two containers cannot share: name them",
                other.name
            )));
        }
        let reader = Reader::open(checkpoint)?;
        reader.verify()?;
        match connection_outside(reader.records(), &other.net) {
            Some(found) => Err(Error::Invalid(format!(
                "'{}' has a TCP connection with {found}, which two containers cannot share",
                other.name
            ))),
            None => Ok(reader),
        }
    }

    /// Returns the checkpoints of a container, oldest first.
    pub fn checkpoints(&self, id: &ContainerId) -> Result<Vec<Checkpoint>> {
        let mut all = Vec::new();
        for number in self.numbers(id)? {
            let path = self.checkpoints_dir(id).join(number.to_string());
            let files = fs::read_dir(&path).into_iter().flatten().flatten();
            let bytes = files.filter_map(|f| f.metadata().ok()).map(|m| m.blocks() * 512).sum();
            let mut one = Checkpoint {
                number,
                path,
                bytes,
                created_unix_ms: None,
                processes: 0,
                damage: None,
            };
            match Reader::open(&one.path) {
                Ok(reader) => {
                    one.created_unix_ms = Some(reader.records().about.created_unix_ms);
                    one.processes = reader.records().processes.len();
                }
                Err(e) => one.damage = Some(e.to_string()),
            }
            all.push(one);
        }
        Ok(all)
    }

    /// Returns the directory of a checkpoint.
    pub fn checkpoint_path(&self, id: &ContainerId, from: &From) -> Result<PathBuf> {
        self.find_checkpoint(&self.config(id)?, from)
    }

    /// Removes a checkpoint of a container.
    pub fn remove_checkpoint(&self, id: &ContainerId, number: u32) -> Result<()> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let path = self.find_checkpoint(&config, &From::Number(number))?;
        // Renamed first: a partly removed checkpoint has no number.
        let gone = path.with_file_name(format!(".gone-{number}"));
        let _ = fs::remove_dir_all(&gone); // left by a killed removal
        fs::rename(&path, &gone).map_err(Error::file("cannot remove", &path))?;
        fs::remove_dir_all(&gone).map_err(Error::file("cannot remove", gone))
    }

    fn checkpoints_dir(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join("checkpoints")
    }

    fn numbers(&self, id: &ContainerId) -> Result<Vec<u32>> {
        let dir = self.checkpoints_dir(id);
        let listing = match fs::read_dir(&dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(Error::file("cannot list", &dir))?,
        };
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let mut all: Vec<u32> = listing.flatten().filter_map(number).collect();
        all.sort_unstable();
        Ok(all)
    }

    pub(crate) fn find_checkpoint(&self, config: &Config, from: &From) -> Result<PathBuf> {
        let none = |number| Error::NoCheckpoint { name: config.name.to_string(), number };
        let numbers = self.numbers(&config.id)?;
        let number = match from {
            From::Directory(path) => return Ok(path.clone()),
            From::Last => *numbers.last().ok_or_else(|| none(None))?,
            From::Number(number) if numbers.contains(number) => *number,
            From::Number(number) => return Err(none(Some(*number))),
        };
        Ok(self.checkpoints_dir(&config.id).join(number.to_string()))
    }

    /// Describes a running container for the crate `checkpoint`.
    pub(crate) fn subject(&self, config: &Config) -> Result<Subject> {
        let (init, _) = self.alive(config)?;
        let pids = self.pids(&config.id)?;
        let logs = self.logs(&config.id)?;
        let mut outside = Vec::new();
        for path in std::iter::once(&logs.stdout).chain(&logs.stderr) {
            // A log that was never opened does not exist yet.
            let Ok(meta) = fs::metadata(path) else { continue };
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let identity = (meta.dev(), meta.ino());
            outside.push(Outside { name, identity, number: None });
        }
        Ok(Subject {
            id: config.id.to_string(),
            name: config.name.to_string(),
            init: init.pid,
            has_init: config.init,
            pids,
            outside,
            memory: Self::memory(config),
            nodes: Vec::new(),
            mounts: Some(start::places(config)),
            volumes: Self::volumes(config),
            own_ipc: true,
            own_network: config.net == NetMode::None
                && start::granted(&config.security)?.contains(Capability::NetAdmin),
            cgroups: config.systemd,
            connections: true,
            filters: u32::from(start::is_filtered(&config.security)),
            hold: false,
            quiet: Duration::ZERO,
        })
    }

    /// Describes a container that falls asleep: its reachable sockets are held. A private network
    /// stack ends with its processes and has no clients outside.
    pub(crate) fn to_sleep(&self, config: &Config) -> Result<Subject> {
        Ok(Subject { hold: config.net != NetMode::None, ..self.subject(config)? })
    }

    /// Returns the targets of bind mounts and volumes.
    fn volumes(config: &Config) -> Vec<String> {
        let is_volume = |mount: &&Mount| match mount.kind {
            MountKind::Bind { .. } | MountKind::Volume { .. } => true,
            MountKind::Tmpfs { .. } | MountKind::Devpts => false,
        };
        config.mounts.iter().filter(is_volume).map(|mount| mount.target.to_string()).collect()
    }

    /// Returns the directories of a container that are kept in memory.
    fn memory(config: &Config) -> Vec<String> {
        let mounts = config.mounts.iter();
        let tmpfs = mounts.filter(|mount| matches!(mount.kind, MountKind::Tmpfs { .. }));
        let targets = tmpfs.map(|mount| mount.target.to_string());
        let own: &[&str] = match config.systemd {
            true => &["/dev/shm", "/run", "/run/lock"],
            false => &["/dev/shm"],
        };
        own.iter().map(|target| (*target).to_owned()).chain(targets).collect()
    }

    /// Adds the last part of a restore's plan, which replaces the program.
    pub(crate) fn plan_restore(
        &self,
        plan: &mut Plan,
        config: &Config,
        account: &Account,
        from: &Comeback,
    ) -> Result<Restore> {
        let security = &config.security;
        let granted = start::granted(security)?;
        let allowed = Allowed {
            has_init: config.init,
            capabilities: granted.bits(),
            ambient: 0,
            inheritable: 0,
            uid: account.uid,
            gid: account.gid,
            groups: account.groups.clone(),
            ids: if config.ids.wide { 65_536 } else { 32_767 },
            memory: Self::memory(config),
            own_network: config.net == NetMode::None,
            cgroups: config.systemd,
            // The filter, of any kind, permits them.
            user_namespaces: true,
            chroots: !start::is_filtered(security),
            no_new_privileges: security.no_new_privileges,
            held: from.held.iter().map(|(number, _)| *number).collect(),
            console: config.process.terminal,
            addresses: from.addresses.clone(),
            beside: from.beside,
            // Clocks continue during sleep, and stand still between checkpoint and restore.
            passed_ns: match from.wakes {
                true => from.reader.records().about.passed_ns(),
                false => 0,
            },
        };
        let memory = match (&from.common, &from.later) {
            (Some(common), _) => load::Memory::Shared(&common.choice),
            (None, Some(later)) => load::Memory::Later(&later.lazy),
            (None, None) => load::Memory::Own,
        };
        let mut restore = load::prepare(&from.reader, &allowed, memory)?;
        if self.is_quiet(&config.id) {
            restore.end_quiet(config.id.as_str());
        }
        let log = self.dir(&config.id);
        let descriptors = restore.wants().iter().map(|wanted| match wanted {
            Wanted::Program => start::clone_fd(restore.program().sealed().as_fd()),
            Wanted::Pages(part) => Ok(load::pages_of(&from.reader)?.swap_remove(*part)),
            Wanted::Outside(name) => outside(&log, name),
            Wanted::Userfaults => {
                let later = from.later.as_ref().expect("wanted only with a device");
                start::clone_fd(later.device.as_fd())
            }
            Wanted::LastPid => Ok(load::last_pid()?),
            Wanted::Held(number) => {
                let held = from.held.iter().find(|(one, _)| one == number);
                let (_, socket) = held.expect("only held sockets are wanted");
                start::clone_fd(socket.as_fd())
            }
        });
        let descriptors = descriptors.collect::<Result<Vec<OwnedFd>>>()?;
        plan.setsid();
        if config.process.terminal {
            let size = restore.console_size().unwrap_or_default();
            let with_device = config.systemd || config.init;
            start::plan_io(plan, start::Io::Terminal(size), account.uid, with_device);
        }
        start::plan_rlimits(plan, security)?;
        plan.sync();
        start::plan_confinement(plan, config, security, granted);
        if let Some(program) = from.reader.records().of_init() {
            let (ids, masks) = start::identity(account, granted);
            plan.init_as(program, &ids, &masks);
        }
        let program = restore.program();
        plan.follow(Follow {
            memory: start::clone_fd(program.memory().as_fd())?,
            base: program.base(),
            length_bytes: program.length_bytes(),
            start: program.start(),
            descriptors_at: program.descriptors_at(),
            descriptors,
        });
        Ok(restore)
    }
}

/// Derives the request for a clone from a container's configuration.
pub(crate) fn like(other: &Config, name: Name, addresses: Vec<IpAddr>, root: RootSource) -> Create {
    let own_name = other.hostname != other.id.short();
    let other = other.clone();
    Create {
        name,
        root,
        image: None,
        process: other.process,
        security: other.security,
        hostname: own_name.then_some(other.hostname),
        domainname: other.domainname,
        mounts: other.mounts,
        anonymous_volumes: Vec::new(),
        net: other.net,
        addresses,
        // The host's ports lead to the other container.
        publish: Vec::new(),
        extra_hosts: other.extra_hosts,
        dns: other.dns,
        limits: other.limits,
        restart: other.restart,
        sleep: other.sleep,
        drowsy: other.drowsy,
        wake_on: other.wake_on,
        auto_remove: other.auto_remove,
        read_only: other.read_only,
        init: other.init,
        systemd: other.systemd,
        stop_signal: other.stop_signal,
        stop_timeout_s: other.stop_timeout_s,
        labels: other.labels,
        sysctls: other.sysctls,
        wide_ids: other.ids.wide,
        log_max_bytes: other.log_max_bytes,
    }
}

/// Pairs the other container's addresses with those of the clone.
pub(crate) fn moved(other: &Config, clone: &Config) -> Vec<(IpAddr, IpAddr)> {
    other.addresses.iter().copied().zip(clone.addresses.iter().copied()).collect()
}

/// Returns the peer of a connection that leaves the container's own network stack.
pub(crate) fn connection_outside(records: &Records, net: &NetMode) -> Option<SocketAddr> {
    match net {
        // In a private stack both ends belong to the container.
        NetMode::None => None,
        _ => records.connections().map(|c| c.peer).next(),
    }
}

/// Opens a standard stream by the name under which it was saved.
fn outside(log: &Path, name: &str) -> Result<OwnedFd> {
    match name {
        "stdout.log" | "stderr.log" => start::open_log(&log.join(name)),
        _ => Err(Error::Invalid(format!("the checkpoint needs an unknown stream '{name}'"))),
    }
}
