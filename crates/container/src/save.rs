//! Saving of a container's processes: the engine's part on top of the crate `checkpoint`.
//!
//! Checkpoints contain processes only. Files stay in the container's own layer, so a restored process
//! finds them as they are by then. A save stops all processes, publishes the checkpoint, and only
//! then kills the processes. A kill in between leaves the container running, or stopped with a
//! complete checkpoint.
//!
//! Uses `ground`, `state`, `log`, `io`, `saved`, `silence`, `usage`, `process`, `later`, `root`, `end`, `net`,
//! `spec`, `twin` and `proof`.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_checkpoint::save::{Figures, Names, Stopped, Subject};
use dormouse_checkpoint::{Refusal, save};
use dormouse_kernel::capability::Capability;
use dormouse_kernel::sysctl;
use dormouse_model::{Config, ContainerId, Mount, MountKind, NetMode, State};
use dormouse_parcel::{Base, Reader};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::log::Output;
use crate::proof::Trial;
use crate::silence::{self, Saved};
use crate::state::{self, InitRecord};
use crate::twin::Original;
use crate::usage::TASKS_MAX;
use crate::{disk, end, io, later, net, process, proof, root, saved, spec};

/// How a checkpoint is made.
#[derive(Debug, Clone, Default)]
pub struct CheckpointOptions {
    /// The processes continue after the checkpoint.
    pub leave_running: bool,
    /// Whether a checkpoint that stops the processes is proven before.
    pub trial: Trial,
    /// Directory to be made, which must not exist; by default the container's next number.
    pub to: Option<PathBuf>,
}

/// A new checkpoint.
#[derive(Debug, Clone)]
pub struct NewCheckpoint {
    /// Its directory.
    pub path: PathBuf,
    /// Its number among the container's checkpoints, unless it was written elsewhere.
    pub number: Option<u32>,
    /// Durations and sizes.
    pub figures: Figures,
}

/// Returns everything that prevents a checkpoint of a running container, by name. No process is
/// stopped.
pub(crate) fn explain(ground: &Ground, id: &ContainerId) -> Result<Vec<Refusal>> {
    let config = ground.config(id)?;
    spec::saved_network(config.name.as_str(), &config.spec)?;
    later::wait_until_filled(ground, &config)?;
    let subject = subject(ground, &config)?;
    Ok(save::explain(&subject)?)
}

/// Returns everything that prevents a sleep, which is less: reachable sockets are held by the
/// keeper.
pub(crate) fn explain_sleep(ground: &Ground, id: &ContainerId) -> Result<Vec<Refusal>> {
    let config = ground.config(id)?;
    spec::saved_network(config.name.as_str(), &config.spec)?;
    later::wait_until_filled(ground, &config)?;
    Ok(save::explain(&to_sleep(ground, &config)?)?)
}

/// Saves the processes of a running container.
pub(crate) fn checkpoint(
    ground: &Ground,
    id: &ContainerId,
    options: &CheckpointOptions,
) -> Result<NewCheckpoint> {
    save(ground, id, options, None)
}

/// Saves the processes, and calls a closure while they are stopped. If the closure fails the
/// processes continue, and the checkpoint is removed.
pub(crate) fn checkpoint_while<T, E: std::convert::From<Error>>(
    ground: &Ground,
    id: &ContainerId,
    options: &CheckpointOptions,
    meanwhile: impl FnOnce(&Path) -> std::result::Result<T, E>,
) -> std::result::Result<(NewCheckpoint, T), E> {
    let mut done = None;
    let mut step = Some(meanwhile);
    let mut once = |path: &Path| {
        // Once: if the save fails afterwards, the result is dropped.
        done = step.take().map(|step| step(path));
        matches!(done, Some(Ok(_)))
    };
    let made = save(ground, id, options, Some(&mut once))?;
    match done {
        Some(done) => Ok((made, done?)),
        None => Err(Error::Invalid("nothing was saved".into()).into()),
    }
}

fn save(
    ground: &Ground,
    id: &ContainerId,
    options: &CheckpointOptions,
    meanwhile: Option<&mut dyn FnMut(&Path) -> bool>,
) -> Result<NewCheckpoint> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let (mut init, process) = can_be_saved(ground, &config)?;
    if config.spec.auto_remove && !options.leave_running {
        return Err(Error::Invalid(
            "a container of --rm is removed when it stops, with its checkpoints: use \
             --leave-running and --to"
                .into(),
        ));
    }
    let (path, number) = match &options.to {
        Some(path) => (path.clone(), None),
        None => {
            let number = saved::numbers(ground, id)?.last().map_or(1, |n| n + 1);
            let all = saved::dir(ground, id);
            disk::make_dir(&all, 0o700)?;
            (all.join(number.to_string()), Some(number))
        }
    };
    let subject = subject(ground, &config)?;
    // Processes that continue are resumed when all is read, unless the closure needs them
    // stopped.
    let goes_on = options.leave_running && meanwhile.is_none();
    // A checkpoint elsewhere belongs to the operator, and shares no file with the container's.
    let base = number.and_then(|_| earlier(ground, id));
    let (mut stopped, mut figures) = save::save(&subject, &path, base.as_ref(), goes_on)?;
    if let Err(e) = saved::write_first(&path, &init) {
        saved::withdraw(&path)?;
        return Err(e);
    }
    if let (false, Trial::Made, Some(user)) = (options.leave_running, options.trial, &init.user) {
        let waits = stopped.as_mut().map(Stopped::take_waits).unwrap_or_default();
        let process = io::clone_fd(process.as_fd())?;
        let (config, user, subject) = (config.clone(), user.clone(), subject.clone());
        let original = Original { config, process, user, subject, waits };
        match proof::prove(ground, original, &path) {
            Ok(proved) => figures.proof = proved.took,
            Err(e) => {
                saved::withdraw(&path)?;
                return Err(e);
            }
        }
    }
    let is_done = meanwhile.is_none_or(|meanwhile| meanwhile(&path));
    if !is_done {
        saved::withdraw(&path)?;
    } else if !options.leave_running {
        if figures.connections > 0 {
            // ORDER: before the connections end: the next start of this container finds the
            // rules.
            silence::record(ground, &config, Reader::open(&path)?.records(), Saved::JustNow)?;
            if matches!(config.spec.net, NetMode::Private { .. }) {
                // The rules of the save end with the container's stack.
                net::keep_quiet(ground, &config, &net::open(ground, &config)?)?;
            }
        }
        // ORDER: published above; only now may the processes be killed.
        init.stopping = true;
        state::write_init(ground, id, &init)?;
        let cgroup = ground.cgroups()?.find(id.as_str())?;
        if let Some(stopped) = stopped {
            stopped.kill(|| cgroup.map_or(Ok(()), |cgroup| cgroup.kill()))?;
        }
        let observed = state::observe(ground, &config)?;
        end::kill_locked(ground, &config, &observed)?;
    }
    let place = path.display().to_string();
    ground.record("checkpoint", id.as_str(), config.name.as_str(), &[("path", place)]);
    Ok(NewCheckpoint { path, number, figures })
}

/// Returns the first process of a running container that is in a state to be saved.
pub(crate) fn can_be_saved(ground: &Ground, config: &Config) -> Result<(InitRecord, OwnedFd)> {
    spec::saved_network(config.name.as_str(), &config.spec)?;
    let found = state::alive(ground, config)?;
    if found.0.paused {
        return Err(Error::state(config, State::Paused, "unpause it first"));
    }
    if found.0.drowsy_unix_ms.is_some() {
        return Err(Error::state(config, State::Drowsy, "wake it first"));
    }
    state::wait_for_exec(ground, config)?;
    later::wait_until_filled(ground, config)?;
    if config.spec.limits.tasks_max().is_none() {
        // A restore would refuse it.
        let tasks = state::cgroup(ground, config)?.tasks()?.unwrap_or(0);
        if tasks > TASKS_MAX {
            return Err(Error::Invalid(format!(
                "container '{}' has {tasks} processes and threads, and a restore makes {TASKS_MAX} at most \
                 where the container has no limit: set one with `dormouse update --pids N`",
                config.name
            )));
        }
    }
    Ok(found)
}

/// Returns the last checkpoint as a base: unchanged memory need not be saved again. A damaged
/// checkpoint is no base.
pub(crate) fn earlier(ground: &Ground, id: &ContainerId) -> Option<Base> {
    let last = saved::numbers(ground, id).ok().and_then(|all| all.last().copied());
    let last = last.map(|number| saved::dir(ground, id).join(number.to_string()));
    let made = |path: PathBuf| Some((fs::metadata(&path).ok()?.modified().ok()?, path));
    let mut all: Vec<_> = last.into_iter().chain([ground.woken_dir(id)]).filter_map(made).collect();
    all.sort();
    let of = |(_, path): &(_, PathBuf)| Base::of(&Reader::open(path).ok()?).ok()?;
    all.iter().rev().find_map(of)
}

/// Describes a running container for the crate `checkpoint`.
pub(crate) fn subject(ground: &Ground, config: &Config) -> Result<Subject> {
    let (init, _) = state::alive(ground, config)?;
    let pids = state::pids(ground, &config.id)?;
    let granted = process::granted(&config.spec.security)?;
    let sysctls = config.spec.sysctls.iter();
    let sysctls: Vec<(String, String)> =
        sysctls.filter_map(|(name, value)| Some((sysctl::path(name)?, value.clone()))).collect();
    // Set after the names of the configuration.
    let by_sysctl =
        |path| sysctls.iter().find(|(name, _)| name == path).map(|(_, value)| value.clone());
    let hostname = by_sysctl("kernel/hostname").or_else(|| Some(config.spec.hostname.clone()));
    let domainname = by_sysctl("kernel/domainname").or_else(|| config.spec.domainname.clone());
    Ok(Subject {
        id: config.id.to_string(),
        name: config.name.to_string(),
        init: init.pid,
        has_init: config.spec.init,
        names: Some(Names {
            hostname,
            domainname,
            can_be_set: granted.contains(Capability::SysAdmin),
        }),
        sysctls,
        pids,
        outside: Output::of(ground, config).streams()?,
        memory: root::memory(config),
        nodes: Vec::new(),
        mounts: Some(root::places(config)),
        volumes: volumes(config),
        own_ipc: true,
        own_network: config.spec.net == NetMode::None && granted.contains(Capability::NetAdmin),
        cgroups: config.spec.systemd,
        connections: true,
        filters: u32::from(process::is_filtered(&config.spec.security)),
        hold: false,
        quiet: Duration::ZERO,
        rescue: &["internal", "rescue"],
    })
}

/// Describes a container that falls asleep: its reachable sockets are held. A private network
/// stack ends with its processes and has no clients outside.
pub(crate) fn to_sleep(ground: &Ground, config: &Config) -> Result<Subject> {
    Ok(Subject { hold: config.spec.net != NetMode::None, ..subject(ground, config)? })
}

/// Returns the targets of bind mounts and volumes.
fn volumes(config: &Config) -> Vec<String> {
    let is_volume = |mount: &&Mount| match mount.kind {
        MountKind::Bind { .. } | MountKind::Volume { .. } => true,
        MountKind::Tmpfs { .. } | MountKind::Devpts => false,
    };
    config.spec.mounts.iter().filter(is_volume).map(|mount| mount.target.to_string()).collect()
}
