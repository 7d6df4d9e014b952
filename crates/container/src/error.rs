//! The engine's errors, by the step that failed.

use std::path::PathBuf;
use std::time::Duration;

use dormouse_account::rule::RuleError;
use dormouse_kernel::{CallError, ErrorKind};
use dormouse_model::{Bits, Config, Cpus, Invalid, Size, State};

/// A failed verb of the engine; the container is in the state before or after the verb.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such container.
    #[error("no container '{0}': see `dormouse ps --all`")]
    NoContainer(String),
    /// An id prefix fits several containers.
    #[error("'{0}' is the start of several ids: give more digits")]
    Ambiguous(String),
    /// The name belongs to another container.
    #[error("the name '{name}' is taken by container {holder}: remove or rename that one")]
    NameTaken {
        /// The name.
        name: String,
        /// The container that has it.
        holder: String,
    },
    /// No such volume.
    #[error("no volume is called '{0}'")]
    NoVolume(String),
    /// The name belongs to another volume.
    #[error("a volume is called '{0}' already: choose another name")]
    VolumeExists(String),
    /// Containers mount the volume.
    #[error("volume '{name}' is in use by {used_by}: remove these containers first")]
    VolumeInUse {
        /// Its name.
        name: String,
        /// Names of the containers.
        used_by: String,
    },
    /// The accounts do not permit this.
    #[error(transparent)]
    Account(#[from] dormouse_account::BookError),
    /// The account is still needed.
    #[error("account '{name}' cannot be removed: {why}")]
    AccountInUse {
        /// Its name.
        name: String,
        /// The use, and what to do.
        why: String,
    },
    /// The containers of an account have as many tasks as they may have.
    #[error(
        "account '{name}' has its {most} processes and threads already: end some, or give it more with \
         `dormouse account set --pids`"
    )]
    AccountFull {
        /// Its name.
        name: String,
        /// The limit.
        most: u32,
    },
    /// The record of an account is damaged.
    #[error("'{}' is damaged ({what}): remove the file, and make the account again", path.display())]
    AccountDamaged {
        /// The record.
        path: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// A file of rules has errors.
    #[error("{}", errors.iter().map(|e| format!("{file}: {e}")).collect::<Vec<_>>().join("; "))]
    Rules {
        /// The file, as the operator named it.
        file: String,
        /// All of its errors, in the order of its lines.
        errors: Vec<RuleError>,
    },
    /// The installed rules are damaged.
    #[error("'{}' is damaged ({what}): replace it with `dormouse rules apply FILE`", path.display())]
    RulesDamaged {
        /// The file.
        path: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// The container's state does not permit this.
    #[error("container '{name}' is {state}: {hint}")]
    State {
        /// Its name.
        name: String,
        /// Its state.
        state: State,
        /// What to do.
        hint: &'static str,
    },
    /// A task of the container has run, so it does not fall asleep by itself.
    #[error("container '{0}' has run again")]
    NotIdle(String),
    /// A container at work sleeps for want of memory only if that was tried.
    #[error(
        "container '{name}' does not sleep for want of memory, because its restore cannot be tried: {object}"
    )]
    Unproven {
        /// Its name.
        name: String,
        /// What prevents the trial.
        object: String,
    },
    /// It has slept for want of memory again and again, so the kernel ends one of its processes.
    #[error(
        "container '{0}' is short of memory for the third time within a minute, and does not sleep again: give it \
         more with `dormouse update --memory`"
    )]
    ShortAgain(String),
    /// A process has been in transit into the container for too long.
    #[error("a process that `exec` starts in container {0} does not run yet: try again later")]
    Entered(String),
    /// A command waits for the exit of the first process, which would seem to have ended.
    #[error(
        "container '{0}' does not sleep while a command waits for its exit, such as `wait`: end that command"
    )]
    Awaited(String),
    /// A killed process has not ended in time.
    #[error(
        "process {pid} of container '{name}' was killed and has not ended within {waited:?}: it waits in the \
         kernel for a disk or a file system; the container is stopped when it ends"
    )]
    Undying {
        /// The container.
        name: String,
        /// The process.
        pid: u32,
        /// The time.
        waited: Duration,
    },
    /// Another process has held the lock of a container for too long.
    #[error("{process} has worked on container '{name}' for more than {waited:?}: {remedy}")]
    Held {
        /// The container.
        name: String,
        /// The process, with its command line.
        process: String,
        /// The time.
        waited: Duration,
        /// What to do.
        remedy: &'static str,
    },
    /// A restore did not end in time.
    #[error(
        "the restore has not ended within {0:?} (`[wake] within` in config.toml): a file system of a volume \
         may not answer, or the checkpoint waits for itself"
    )]
    TooSlow(Duration),
    /// The host has no memory for a wake.
    #[error(
        "the host has no memory for it: it needs {needed_kb}k, and {free_kb}k are free, with a part that stays \
         free (`[wake] reserve` in config.toml)"
    )]
    NoRoom {
        /// Memory of the checkpoint.
        needed_kb: u64,
        /// Available memory and free swap.
        free_kb: u64,
    },
    /// The memory is promised to other containers.
    #[error(
        "container '{name}' is to have {wanted} of memory guaranteed, and {free} of {all} are free: {taken} is \
         guaranteed to {holders} running containers, and {host} is kept for the host (`[contract] \
         host-memory-reserve` in config.toml); lower --memory-min, or stop or suspend a container with a guarantee"
    )]
    NoMemory {
        /// The container.
        name: String,
        /// Its guarantee.
        wanted: Size,
        /// Memory without a guarantee.
        free: Size,
        /// The memory of the host.
        all: Size,
        /// The guarantees of other containers together.
        taken: Size,
        /// The number of these containers.
        holders: usize,
        /// The part of the host.
        host: Size,
    },
    /// The CPUs are promised to other containers.
    #[error(
        "container '{name}' is to have {wanted} CPUs reserved, and {free} of {of} are free: {taken} is reserved \
         by {holders} running containers, and {host} is kept for the host (`[contract] host-cpu-reserve` in \
         config.toml); lower --cpu-reserve, or stop or suspend a container with a reservation"
    )]
    NoCpu {
        /// The container.
        name: String,
        /// Its reservation.
        wanted: Cpus,
        /// CPUs without a reservation.
        free: Cpus,
        /// The CPUs in question.
        of: String,
        /// Reservations of other containers.
        taken: Cpus,
        /// Number of these containers.
        holders: usize,
        /// The host's part.
        host: Cpus,
    },
    /// More bandwidth is guaranteed than the uplink has.
    #[error(
        "container '{name}' is to have {wanted} of the network guaranteed, and {free} of {all} are free: {taken} is \
         guaranteed to {holders} running containers (`[network] uplink-rate` in config.toml); lower --net-rate, or \
         stop or suspend a container with a guarantee"
    )]
    NoBandwidth {
        /// The container.
        name: String,
        /// Its guarantee.
        wanted: Bits,
        /// Bandwidth without a guarantee.
        free: Bits,
        /// That of the uplink.
        all: Bits,
        /// Guarantees of other containers.
        taken: Bits,
        /// Number of these containers.
        holders: usize,
    },
    /// The file system with the store has no place for a disk.
    #[error(
        "container '{name}' does not fit: '{}' has {free} free, of which {kept} are kept for the host{}",
        dir.display(),
        wanted.map(|it| format!(", and {it} of --disk are to be guaranteed")).unwrap_or_default()
    )]
    NoPlace {
        /// The container.
        name: String,
        /// The place that is to be guaranteed.
        wanted: Option<Size>,
        /// Free bytes.
        free: Size,
        /// Bytes that stay free.
        kept: Size,
        /// A directory on the file system.
        dir: PathBuf,
    },
    /// Another process has the disk of the container.
    #[error(
        "another process attaches, checks or grows the disk of container '{0}': try again later"
    )]
    DriveInUse(String),
    /// A disk was not made, mounted or grown.
    #[error("the disk of the container")]
    Drive(#[from] dormouse_kernel::ext4::Ext4Error),
    /// The daemon has granted no memory for a wake in time.
    #[error("the daemon granted no memory in time to wake container '{0}'")]
    NotAdmitted(String),
    /// Its memory is still being filled from its checkpoint.
    #[error("the memory of container {0} is still being read from its checkpoint: try again later")]
    Filling(String),
    /// Part of its memory can never be filled: the container was killed.
    #[error("container {0} was ended: the process that filled its memory was killed")]
    Unfilled(String),
    /// An object that is needed is not on this host.
    #[error("{0}")]
    Missing(String),
    /// Invalid value.
    #[error("{0}")]
    Invalid(String),
    /// The program is not in the container.
    #[error("'{0}' is not in the container: check the command and its PATH")]
    CommandNotFound(String),
    /// The program cannot be executed.
    #[error("'{0}' cannot be executed in the container")]
    CommandNotExecutable(String, #[source] CallError),
    /// The user is not in the container.
    #[error("user '{0}' is not in the container's /etc/passwd or /etc/group")]
    NoUser(String),
    /// A record on disk is damaged.
    #[error("'{}' is damaged ({what}): the container can only be removed by force", path.display())]
    Corrupt {
        /// The record.
        path: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// All ids of the host are given out.
    #[error("no host ids are left for another container: {0}")]
    NoIds(String),
    /// A file that keeps the host ids of instances apart is damaged.
    #[error("'{}' is damaged ({what}): {remedy}", path.display())]
    HostIds {
        /// The file.
        path: PathBuf,
        /// Description of the damage.
        what: String,
        /// What to do.
        remedy: String,
    },
    /// The directory given as a root filesystem cannot be used.
    #[error("'{}' cannot be a root filesystem", .0.display())]
    Rootfs(PathBuf, #[source] CallError),
    /// A step with the kernel failed.
    #[error("{step}")]
    Call {
        /// The failed step.
        step: &'static str,
        /// The call.
        #[source]
        source: CallError,
    },
    /// A step with a file failed.
    #[error("{step} '{}'", path.display())]
    File {
        /// The failed step.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The keeper or the newborn container failed.
    #[error("cannot start the process")]
    Launch(#[from] dormouse_launch::LaunchError),
    /// A control group failed.
    #[error("control group")]
    Cgroup(#[from] dormouse_kernel::cgroup::CgroupError),
    /// The image store failed.
    #[error("image")]
    Image(#[from] dormouse_image::ImageError),
    /// The kernel does not take a gate.
    #[error("this kernel does not take the gate '{gate}': {why}")]
    GateRefused {
        /// The gate.
        gate: &'static str,
        /// The reason.
        why: String,
    },
    /// The gates failed.
    #[error("gates")]
    Gates(#[from] dormouse_bpf::BpfError),
    /// The scheduler of containers failed.
    #[error("scheduler of containers (sched_ext)")]
    Scheduler(#[source] dormouse_bpf::BpfError),
    /// The network failed.
    #[error("network")]
    Network(#[from] dormouse_network::Error),
    /// A checkpoint was not made, not read, or not restored.
    #[error("checkpoint")]
    Checkpoint(#[from] dormouse_checkpoint::Error),
    /// A twin of the container, restored from its checkpoint, is not like the container.
    #[error(
        "a trial restore of container '{name}' differs from what was saved, at {what}; the container continues \
         (`--unproven` skips the trial)"
    )]
    Unlike {
        /// The container.
        name: String,
        /// The place of the first difference, and both values.
        what: String,
    },
    /// A twin of the container could not be restored from its checkpoint.
    #[error(
        "a trial restore of container '{name}' failed, and the container continues (`--unproven` skips the trial)"
    )]
    NotRestored {
        /// The container.
        name: String,
        /// The failed step.
        #[source]
        source: Box<Error>,
    },
    /// There is no such checkpoint.
    #[error("container '{name}' has no checkpoint{}: see `dormouse checkpoint ls`",
        number.map(|n| format!(" {n}")).unwrap_or_default())]
    NoCheckpoint {
        /// The container.
        name: String,
        /// The requested number, if one was given.
        number: Option<u32>,
    },
}

impl From<Invalid> for Error {
    fn from(e: Invalid) -> Self {
        Self::Invalid(e.to_string())
    }
}

impl Error {
    /// A verb that the container's state does not permit, with a hint.
    pub(crate) fn state(config: &Config, state: State, hint: &'static str) -> Self {
        Self::State { name: config.name.to_string(), state, hint }
    }

    /// The message with those of all causes, as the command prints them, in one line.
    pub fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoContainer(_)
            | Self::NoVolume(_)
            | Self::NoUser(_)
            | Self::CommandNotFound(_)
            | Self::Missing(_)
            | Self::NoCheckpoint { .. } => ErrorKind::NotFound,
            Self::Account(dormouse_account::BookError::Missing(_)) => ErrorKind::NotFound,
            Self::Ambiguous(_) | Self::Invalid(_) | Self::Account(_) | Self::Rules { .. } => {
                ErrorKind::Invalid
            }
            Self::NameTaken { .. } | Self::VolumeExists(_) => ErrorKind::Exists,
            Self::State { .. }
            | Self::VolumeInUse { .. }
            | Self::AccountInUse { .. }
            | Self::AccountFull { .. }
            | Self::NotIdle(_)
            | Self::Entered(_)
            | Self::Awaited(_)
            | Self::Unproven { .. }
            | Self::ShortAgain(_)
            | Self::NotAdmitted(_)
            | Self::Undying { .. }
            | Self::Held { .. }
            | Self::TooSlow(_)
            | Self::DriveInUse(_)
            | Self::Filling(_) => ErrorKind::Busy,
            Self::Unfilled(_) => ErrorKind::Corrupt,
            Self::CommandNotExecutable(_, e) | Self::Rootfs(_, e) => e.kind(),
            Self::Corrupt { .. }
            | Self::HostIds { .. }
            | Self::AccountDamaged { .. }
            | Self::RulesDamaged { .. } => ErrorKind::Corrupt,
            Self::NoIds(_)
            | Self::NoRoom { .. }
            | Self::NoCpu { .. }
            | Self::NoMemory { .. }
            | Self::NoBandwidth { .. }
            | Self::NoPlace { .. } => ErrorKind::Limit,
            Self::Drive(e) => e.kind(),
            Self::Call { source, .. } => source.kind(),
            Self::File { source, .. } => ErrorKind::Os(source.raw_os_error().unwrap_or(0)),
            Self::Launch(e) => e.kind(),
            Self::Cgroup(e) => e.kind(),
            Self::Image(e) => e.kind(),
            Self::Gates(e) | Self::Scheduler(e) => e.kind(),
            Self::GateRefused { .. } => ErrorKind::Unsupported { since: "6.10" },
            Self::Network(e) => e.kind(),
            Self::Checkpoint(e) => e.kind(),
            Self::Unlike { .. } => ErrorKind::Corrupt,
            Self::NotRestored { source, .. } => source.kind(),
        }
    }

    pub(crate) fn file(
        step: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { step, path, source }
    }

    pub(crate) fn call(step: &'static str) -> impl FnOnce(CallError) -> Self {
        move |source| Self::Call { step, source }
    }
}

/// The result of the engine's verbs.
pub type Result<T> = std::result::Result<T, Error>;
