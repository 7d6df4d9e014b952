//! Requests of a caller.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use dormouse_image::Image;
use dormouse_kernel::call::Namespace;
use dormouse_kernel::capability::{self, Capability};
use dormouse_kernel::sysctl;
use dormouse_model::{
    Bandwidth, Evict, Limits, MountKind, Name, NetMode, OutOfMemory, Process, Restart, RootSource,
    SeccompChoice, Sleep, Spec, WakeOn,
};

use crate::error::{Error, Result};

/// LIMIT: falling asleep and waking take some ten milliseconds each.
const SLEEP_AFTER_MIN: Duration = Duration::from_millis(100);

/// A container to be created. The engine chooses the id, the slot of host ids and the addresses.
#[derive(Debug)]
pub struct Create {
    /// Name given by the operator.
    pub name: Name,
    /// The image of its root, if the caller has looked it up already.
    pub image: Option<Image>,
    /// All choices of the operator and the image. `HOME` and `HOSTNAME` are added to the environment
    /// if it lacks them.
    pub spec: Spec,
    /// Requested addresses; by default the pool assigns them.
    pub addresses: Vec<IpAddr>,
    /// 65,536 ids in one range instead of 32,767 and nobody.
    pub wide_ids: bool,
}

/// A process to be run in a running container.
#[derive(Debug)]
pub struct Exec {
    /// The process; an empty environment entry list means the container's own.
    pub process: Process,
    /// With all capabilities of the container's user namespace and no seccomp filter.
    pub privileged: bool,
    /// Its standard streams; ignored when it gets a terminal.
    pub io: Stdio,
}

/// Where the standard streams of a process lead. A process with a terminal has that instead.
#[derive(Debug)]
pub struct Stdio {
    /// Standard input.
    pub stdin: Stream,
    /// Standard output.
    pub stdout: Stream,
    /// Standard error.
    pub stderr: Stream,
    /// Rows and columns of the terminal, where it gets one.
    pub terminal_size: Option<(u16, u16)>,
}

/// One standard stream.
#[derive(Debug)]
pub enum Stream {
    /// `/dev/null`.
    Null,
    /// The container's log, as its driver keeps it. Output only.
    Log,
    /// A pipe; the keeper holds the other end for `attach`. Input only.
    Kept,
    /// A descriptor of the caller. A pipe is given to the process's user, so that it can be opened
    /// again as `/dev/stdout`.
    Fd(OwnedFd),
}

impl Stdio {
    /// Empty input; output goes to the log.
    pub fn detached() -> Self {
        Self { stdin: Stream::Null, stdout: Stream::Log, stderr: Stream::Log, terminal_size: None }
    }
}

/// Changes to an existing container; `None` and empty fields change nothing.
#[derive(Debug, Clone, Default)]
pub struct Update {
    /// Limits that are `Some` replace the old ones, in the kernel at once if it runs.
    pub limits: Limits,
    /// Restart policy.
    pub restart: Option<Restart>,
    /// When it falls asleep by itself.
    pub sleep: Option<Sleep>,
    /// When it becomes drowsy by itself.
    pub drowsy: Option<Sleep>,
    /// Events that wake it, effective from its next sleep on.
    pub wake_on: Option<WakeOn>,
    /// The action when it has used its memory.
    pub oom: Option<OutOfMemory>,
    /// How it gives memory while the host is short of it.
    pub evict: Option<Evict>,
    /// Addresses to be added.
    pub ip_add: Vec<IpAddr>,
    /// Addresses to be released.
    pub ip_rm: Vec<IpAddr>,
}

/// Refuses a container that could never start, before anything is made.
pub(crate) fn validate(create: &Create) -> Result<()> {
    let spec = &create.spec;
    let bad = |text: String| Err(Error::Invalid(text));
    if spec.process.args.first().is_none_or(String::is_empty) {
        return bad("there is no command to run, and the image names none: give one".into());
    }
    let texts = spec.process.args.iter().chain(&spec.process.env);
    if let Some(text) = texts.clone().find(|t| t.contains('\0')) {
        return bad(format!("'{}' contains a NUL byte", text.escape_default()));
    }
    if !spec.process.cwd.is_empty() && !spec.process.cwd.starts_with('/') {
        return bad(format!("working directory '{}' is not absolute", spec.process.cwd));
    }
    let name = &spec.hostname;
    if name.len() > 64 || name.contains(['\0', '\n', ' ', '\t']) {
        return bad(format!(
            "hostname '{}' is not 1 to 64 plain characters",
            name.escape_default()
        ));
    }
    for mount in &spec.mounts {
        let whole = mount.target.starts_with('/') && !mount.target.contains('\0');
        let plain = mount.target.split('/').all(|part| part != "..");
        if !whole || !plain || mount.target.trim_matches('/').is_empty() {
            return bad(format!("mount target '{}' is not an absolute path", mount.target));
        }
        if let MountKind::Bind { source, .. } = &mount.kind
            && !source.exists()
        {
            return bad(format!("'{}' does not exist: it cannot be mounted", source.display()));
        }
    }
    if spec.security.no_aio
        && (spec.security.privileged || spec.security.seccomp == SeccompChoice::Unconfined)
    {
        return bad(
            "--no-aio is a rule of the filter of system calls: leave out --privileged and seccomp=unconfined".into(),
        );
    }
    if spec.shared && (spec.auto_remove || spec.account.is_some()) {
        return bad(
            "a shared container needs an account of its own, by which rules know it: leave out --account and --rm"
                .into(),
        );
    }
    bandwidth_allowed(spec)?;
    sleep_allowed(spec.sleep, spec.auto_remove)?;
    long_enough(spec.drowsy)?;
    oom_allowed(spec)?;
    evict_allowed(spec)?;
    network_sleeps(spec)?;
    for key in spec.sysctls.keys() {
        sysctl_allowed(key, &spec.net)?;
    }
    if let RootSource::Directory(path) = &spec.root
        && !path.is_dir()
    {
        return bad(format!("--rootfs '{}' is not a directory", path.display()));
    }
    if !spec.publish.is_empty() && spec.net.domain().is_none() {
        return bad(format!(
            "a container with --net {} has no address that a port could lead to: leave out --net or give --net private",
            spec.net.as_str()
        ));
    }
    if !create.addresses.is_empty() && spec.net.domain().is_none() {
        return bad(format!(
            "a container with --net {} has no address of the pool: leave out --net, or give --net private",
            spec.net.as_str()
        ));
    }
    Ok(())
}

/// Refuses a contract for a network that is not the container's.
pub(crate) fn bandwidth_allowed(spec: &Spec) -> Result<()> {
    if Bandwidth::of(&spec.limits).is_some() && spec.net.domain().is_none() {
        let why = "--net-rate, --net-ceil and --net-weight need address mode or --net private: leave out --net";
        return Err(Error::Invalid(why.into()));
    }
    Ok(())
}

/// Refuses to save a container that may change the network stack by which it is connected to its domain, or that has
/// rights over the stack which a wake does not give back.
///
/// LIMIT: the devices of a container with `--net private` are not saved.
pub(crate) fn saved_network(name: &str, spec: &Spec) -> Result<()> {
    match unsaved_capability(spec)? {
        Some(capability) => Err(Error::Invalid(format!(
            "container '{name}' has --net private and {capability}, with which its network stack cannot be saved yet: \
             run it without that capability, or with --net address"
        ))),
        None => Ok(()),
    }
}

/// The capability for which a container with a stack of its own is not saved.
fn unsaved_capability(spec: &Spec) -> Result<Option<&'static str>> {
    let security = &spec.security;
    if !matches!(spec.net, NetMode::Private { .. }) {
        return Ok(None);
    }
    let granted = capability::parse(security.capabilities.iter().map(String::as_str))?;
    let has = |capability| security.privileged || granted.contains(capability);
    Ok(match (has(Capability::NetAdmin), has(Capability::NetRaw)) {
        (true, _) => Some("CAP_NET_ADMIN"),
        (_, true) => Some("CAP_NET_RAW"),
        _ => None,
    })
}

/// Refuses policies by which a container would be saved that cannot be ([`saved_network`]).
pub(crate) fn network_sleeps(spec: &Spec) -> Result<()> {
    let options = [
        (spec.sleep.after().is_some(), "--sleep-after"),
        (spec.oom == OutOfMemory::Sleep, "--oom sleep"),
        (spec.evict == Evict::Sleep, "--evict sleep"),
    ];
    let given = options.into_iter().find(|(is_given, _)| *is_given);
    match given.zip(unsaved_capability(spec)?) {
        Some(((_, option), capability)) => Err(Error::Invalid(format!(
            "{option} needs a container that can sleep, and one with --net private and {capability} cannot yet: leave \
             one of the three out"
        ))),
        None => Ok(()),
    }
}

/// Refuses a sleep policy that could never take effect, or would all the time.
pub(crate) fn sleep_allowed(sleep: Sleep, auto_remove: bool) -> Result<()> {
    if sleep.after().is_some() && auto_remove {
        return Err(Error::Invalid(
            "a container of --rm does not sleep: its files are not kept beyond its processes"
                .into(),
        ));
    }
    long_enough(sleep)
}

/// Refuses a container that could never sleep for want of memory.
pub(crate) fn oom_allowed(spec: &Spec) -> Result<()> {
    if spec.oom != OutOfMemory::Sleep {
        return Ok(());
    }
    let why = if spec.auto_remove {
        "a container of --rm does not sleep, also not with --oom sleep: its files are not kept beyond its processes"
    } else if spec.limits.memory_max_bytes.is_none() {
        "--oom sleep needs a limit of memory: give --memory"
    } else if spec.limits.memory_high_bytes.is_some() {
        "--oom sleep slows the container down itself, somewhat below --memory: make it without --memory-high"
    } else {
        return Ok(());
    };
    Err(Error::Invalid(why.into()))
}

/// Refuses a container that could never give memory as it is to.
pub(crate) fn evict_allowed(spec: &Spec) -> Result<()> {
    let why = match spec.evict {
        Evict::Sleep if spec.auto_remove => {
            "a container of --rm does not sleep, also not with --evict sleep: its files end with its processes"
        }
        Evict::Restart if spec.auto_remove => {
            "a container of --rm is removed when it ends: give --evict kill instead of --evict restart"
        }
        Evict::Throttle if spec.oom == OutOfMemory::Sleep => {
            "--oom sleep slows the container down itself, somewhat below --memory: leave out --evict throttle"
        }
        _ => return Ok(()),
    };
    Err(Error::Invalid(why.into()))
}

/// Refuses an idle time so short that the container would be frozen all the time.
pub(crate) fn long_enough(sleep: Sleep) -> Result<()> {
    if sleep.after().is_some_and(|after| after < SLEEP_AFTER_MIN) {
        let why = "a container sleeps, or becomes drowsy, after 100ms at the earliest";
        return Err(Error::Invalid(why.into()));
    }
    Ok(())
}

/// Permits only sysctls of the container's own namespaces.
fn sysctl_allowed(key: &str, net: &NetMode) -> Result<()> {
    match sysctl::owner(key) {
        Some(Namespace::Net) if !net.is_own() => {}
        Some(_) => return Ok(()),
        None => {}
    }
    Err(Error::Invalid(format!(
        "sysctl '{}' is not one of the container's own namespaces: kernel.shm*, kernel.msg*, \
         kernel.sem, kernel.pid_max, fs.mqueue.*, and net.* with --net private and --net none",
        key.escape_default()
    )))
}
