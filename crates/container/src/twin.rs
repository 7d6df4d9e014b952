//! The twin of a stopped container: its processes, restored from its checkpoint in namespaces and control
//! groups of their own, read back and ended ([`dormouse_checkpoint::proof`]).
//!
//! A twin is born as the first process of any restore is ([`crate::start`]), with these differences:
//!
//! - its mounts are a private copy of the container's, with a procfs of its own pid namespace on top. No
//!   layer is stacked twice, and each path leads to the file that the container has open;
//! - every other namespace is new and empty, its network has no device but a loopback that is down;
//! - its control groups are beside those of the container, named after it, with the same limits of memory
//!   and tasks. A container at its limit has room for no second one;
//! - the kernel's OOM killer ends it first.
//!
//! Its use is charged to the account of the container.
//!
//! **Killed at any step.** A newborn ends without its engine, and a traced task without its tracer. An
//! [`Intent`] names the container, and the next command removes the control groups.
//!
//! **Hung.** A task in a call to a file system that does not answer does not end when it is killed. The twin is
//! made by a thread that is left behind then, with the twin, so that the container continues. The [`Intent`] stays.
//!
//! **No room.** The container may be able to wake although no twin can be made beside it: memory or tasks are
//! short ([`Unmade::NoRoom`]).
//!
//! Uses `ground`, `state`, `account`, `view`, `hold`, `pending`, `process`, `io`, `settings`, `root` and `restore`.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use dormouse_checkpoint::load::{self, Restore, Traced};
use dormouse_checkpoint::proof::{self, Proof};
use dormouse_checkpoint::save::{Blocks, Subject};
use dormouse_kernel::call::{CloneFlags, Namespace};
use dormouse_kernel::cgroup::{Cgroup, Stats};
use dormouse_kernel::{CallError, Errno, mount, pidfd, scale, weakened};
use dormouse_launch::{Keeper, Kind, LaunchError, Newborn, Plan, Spawn, TargetKind};
use dormouse_model::{Config, ContainerId, Limits};
use dormouse_record::Records;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::io::{self, Io};
use crate::pending::{self, Intent};
use crate::restore::Watch;
use crate::user::PasswdUser;
use crate::{account, hold, process, restore, settings, view};

/// The highest value of `/proc/PID/oom_score_adj`.
const FIRST_TO_BE_KILLED: i32 = 1000;

/// LIMIT: how long a trial restore may take, while clients wait.
const LIVES_WITHIN: Duration = Duration::from_secs(30);

/// LIMIT: how long the killed tasks of a twin may take to end while the container waits.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// A stopped container with a checkpoint.
pub(crate) struct Original {
    pub(crate) config: Config,
    /// Its first process.
    pub(crate) process: OwnedFd,
    /// The user of its first process.
    pub(crate) user: PasswdUser,
    /// Its description for the save.
    pub(crate) subject: Subject,
    /// The program that has read its waits.
    pub(crate) waits: Blocks,
}

/// Why there are no records of a twin.
#[derive(Debug)]
pub(crate) enum Unmade {
    /// A step failed.
    Failed(Error),
    /// Memory or tasks are short for a second copy, with the failed step.
    NoRoom(String),
}

impl From<Error> for Unmade {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

/// Restores a twin, reads its records, and ends it. The caller holds the container's lock.
pub(crate) fn read_back(
    ground: &Ground,
    original: Original,
    proof: &Arc<Proof>,
) -> std::result::Result<Records, Unmade> {
    let id = original.config.id.clone();
    if !remove(ground, &id)? {
        let cause = "the twin of an earlier trial restore has not ended".into();
        return Err(Unmade::Failed(Error::Invalid(cause)));
    }
    let doing = pending::intend(ground, &id, &Intent::Twin)?;
    let limit = settings::restore_limit(&ground.settings(), 0).min(LIVES_WITHIN);
    let (done, is_done) = mpsc::channel();
    let (own, proof) = (Ground::new(ground.places.clone()), Arc::clone(proof));
    // The calling thread traces the container, and a tracer is a thread.
    let twin = std::thread::Builder::new().name("twin".into());
    let twin = twin.spawn(move || {
        let _ = done.send(live(&own, original, &proof, limit)); // unless it was left behind
    });
    let twin = twin.map_err(|e| Unmade::NoRoom(format!("a thread: {e}")))?;
    let read = match is_done.recv_timeout(limit + ENDS_WITHIN) {
        Ok(read) => read,
        Err(RecvTimeoutError::Timeout) => Err(Error::TooSlow(limit)),
        Err(RecvTimeoutError::Disconnected) => match twin.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => Err(Error::Invalid("the trial restore has ended".into())),
        },
    };
    let read = read.map_err(|e| {
        let cgroup = ground.cgroups().ok().and_then(|all| all.find(&name(&id)).ok().flatten());
        match is_short(&e, cgroup.and_then(|cgroup| cgroup.stats().ok()).unwrap_or_default()) {
            true => Unmade::NoRoom(e.with_causes()),
            false => Unmade::Failed(e),
        }
    });
    // ORDER: the first error is returned.
    let removed = remove(ground, &id);
    if !matches!(removed, Ok(true)) {
        doing.leave(); // to the next command
    }
    let records = read?;
    removed?;
    Ok(records)
}

/// Whether a step failed because the host, or the control group of the twin, has no memory or no task left. ENOMEM
/// alone does not mean that: it is also the answer for an address space that is too small, in a wake as well.
fn is_short(e: &Error, used: Stats) -> bool {
    const LITTLE_BYTES: u64 = 64 << 20;
    let is_full = || {
        let room = used.memory_max_bytes.map(|max| max.saturating_sub(used.memory_peak_bytes));
        let is_strict = || {
            let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
            mode.is_ok_and(|mode| mode.trim() == "2")
        };
        room.is_some_and(|room| room < 1 << 20)
            || scale::available_bytes().is_some_and(|bytes| bytes < LITTLE_BYTES)
            || is_strict()
    };
    if used.oom_kills > 0 {
        return true;
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(e);
    let mut errno = None;
    while let Some(one) = cause {
        let of_call = || one.downcast_ref::<CallError>().map(CallError::errno);
        let of_file = || one.downcast_ref::<std::io::Error>()?.raw_os_error();
        let bare = || one.downcast_ref::<Errno>().map(|e| e.raw_os_error());
        errno = bare().or_else(of_call).or_else(of_file).or(errno);
        cause = one.source();
    }
    match errno.map(Errno::from_raw_os_error) {
        Some(Errno::NOMEM) => is_full(),
        Some(Errno::NFILE) => true,
        Some(Errno::AGAIN) => e.with_causes().contains("clone"),
        _ => false,
    }
}

/// The name of the control groups of a twin.
fn name(id: &ContainerId) -> String {
    format!("{id}.twin")
}

/// Removes the control groups of a twin, whose tasks have ended or are about to. Returns false if some do not end.
pub(crate) fn remove(ground: &Ground, id: &ContainerId) -> Result<bool> {
    let Some(cgroup) = ground.cgroups()?.find(&name(id))? else { return Ok(true) };
    cgroup.kill()?;
    if !cgroup.wait_empty(ENDS_WITHIN)? {
        return Ok(false);
    }
    account::charge_trial(ground, id, &cgroup);
    cgroup.remove()?;
    Ok(true)
}

/// The life of a twin, from its birth to its end.
fn live(ground: &Ground, original: Original, proof: &Proof, limit: Duration) -> Result<Records> {
    let config = &original.config;
    let checked = load::check(proof, restore::allowed(config, &original.user)?)?;
    let made = load::lay_out(proof, checked, load::Memory::Own)?;
    let mounts = pidfd::namespace(original.process.as_fd(), Namespace::Mount)
        .and_then(|namespace| mount::clone_namespace(namespace.as_fd()))
        .map_err(Error::call("cannot copy the container's mounts"))?;
    let mut keeper = hold::keeper(ground)?;
    let (newborn, cgroup) = birth(ground, config, &mut keeper)?;
    let first = io::clone_fd(newborn.pidfd.as_fd())?;
    let watch = Watch::begin(io::clone_fd(newborn.pidfd.as_fd())?, limit);
    let pid = newborn.pid;
    let read = follow(ground, &original, newborn, &cgroup, mounts, &made).and_then(|traced| {
        let subject = Subject {
            init: pid,
            pids: Vec::new(),
            outside: Vec::new(),
            memory: Vec::new(),
            nodes: Vec::new(),
            mounts: None,
            volumes: Vec::new(),
            own_network: false,
            cgroups: false,
            hold: false,
            quiet: Duration::ZERO,
            rescue: &[],
            ..original.subject.clone()
        };
        Ok(proof::read_back(traced, &made, &subject, first, original.waits)?)
    });
    watch.end();
    read.map_err(|e| watch.error().unwrap_or(e))
}

/// Has the newborn cloned into control groups of its own.
fn birth(ground: &Ground, config: &Config, keeper: &mut Keeper) -> Result<(Newborn, Cgroup)> {
    let map = config.ids.to_proc_text();
    let (flags, maps) = (process::namespaces(), (map.clone(), map));
    let limits = Limits {
        memory_max_bytes: config.spec.limits.memory_max_bytes,
        swap_max_bytes: config.spec.limits.swap_max_bytes,
        pids_max: config.spec.limits.pids_max,
        ..Limits::default()
    };
    let id = config.id.as_str();
    let (cgroup, expected) =
        ground.cgroups()?.create_with(&name(&config.id), &limits, |cgroup| {
            let expected = keeper.expect(Spawn {
                cgroup,
                id_map: flags.contains(CloneFlags::NEWUSER).then_some(maps),
                proc: true,
                ..Spawn::new(id, Kind::Exec, flags.bits())
            })?;
            Ok::<_, Error>(expected)
        })?;
    let newborn = keeper.born(expected)?;
    process::write_oom_score_adj(&newborn, FIRST_TO_BE_KILLED)?;
    Ok((newborn, cgroup))
}

/// Gives the newborn its plan, and seizes it where it begins to follow the restore.
fn follow(
    ground: &Ground,
    original: &Original,
    mut newborn: Newborn,
    cgroup: &Cgroup,
    mounts: OwnedFd,
    restore: &Restore,
) -> Result<Traced> {
    let config = &original.config;
    let plan = plan(ground, original, &mut newborn, cgroup, mounts, restore)?;
    let failed = |e: LaunchError| process::exec_error(&config.spec.process, e);
    newborn.send(plan).map_err(failed)?;
    newborn.ready().map_err(failed)?;
    // ORDER: traced, then released: its death follows ours.
    let traced = match Traced::seize(newborn.pid) {
        Ok(traced) => traced,
        Err(e) => return Err(newborn.go().map_or_else(Error::from, |()| e.into())),
    };
    if !config.spec.init {
        newborn.go()?;
        return Ok(traced);
    }
    if let Err(e) = newborn.release() {
        return Err(newborn.watch().map_or_else(Error::from, |()| e.into()));
    }
    let traced = traced.leave_init()?;
    newborn.watch()?;
    Ok(traced)
}

fn plan(
    ground: &Ground,
    original: &Original,
    newborn: &mut Newborn,
    cgroup: &Cgroup,
    mounts: OwnedFd,
    restore: &Restore,
) -> Result<Plan> {
    let config = &original.config;
    let security = &config.spec.security;
    let granted = process::granted(security)?;
    let mut plan = Plan::new();
    for tasks in cgroup.placement()?.v1_tasks {
        let fd = plan.fd(tasks);
        plan.join_cgroup(fd);
    }
    plan.become_root();
    let mut own = CloneFlags::NEWNET;
    own.set(CloneFlags::NEWCGROUP, !weakened("cgroup-namespace"));
    plan.unshare(own.bits() as u32);
    if !weakened("keyring") {
        plan.session_keyring();
    }
    let root = plan.fd(mounts);
    plan.root(root, false);
    if let Some(proc) = newborn.take_proc() {
        let proc = plan.fd(proc);
        plan.proc(proc, "/proc");
        for (tree, target) in view::again(ground, config)? {
            let tree = plan.fd(tree);
            plan.attach(tree, target, TargetKind::File, false);
        }
    }
    plan.hostname(&config.spec.hostname);
    if let Some(domain) = &config.spec.domainname {
        plan.domainname(domain);
    }
    // Its network stack is another one, and not used.
    let sysctls = config.spec.sysctls.iter().filter(|(name, _)| !name.starts_with("net"));
    for (name, value) in sysctls {
        plan.sysctl(name, value)?;
    }
    plan.setsid();
    let [stdin, stdout, stderr] = [io::open_null()?, io::open_null()?, io::open_null()?];
    io::plan_io(&mut plan, Io::Fds([stdin, stdout, stderr]), original.user.uid, false);
    process::plan_rlimits(&mut plan, security)?;
    plan.sync_early();
    process::plan_namespace_limits(&mut plan, config)?;
    process::plan_confinement(&mut plan, config, security, granted);
    if let Some(program) = restore.records().of_init() {
        let (ids, masks) = process::identity(&original.user, granted);
        plan.init_as(program, &ids, &masks);
    }
    plan.follow(restore.follow(|wanted| {
        // Everything of the engine is held back.
        Err(Error::Invalid(format!("a twin has no {wanted:?}")))
    })?);
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_means_a_shortage_only_with_a_reason_for_it() {
        let failed = |call: &str, source| {
            let (what, call) = ("process 2".to_owned(), call.to_owned());
            Error::from(dormouse_checkpoint::Error::Restore { what, call, source })
        };
        let full = Stats {
            memory_max_bytes: Some(8 << 20),
            memory_peak_bytes: 8 << 20,
            ..Stats::default()
        };
        let killed = Stats { oom_kills: 1, ..Stats::default() };
        let ended = || Error::from(dormouse_checkpoint::Error::Ended("by signal 9".into()));
        for (error, used, expected) in [
            (failed("clone3", Errno::AGAIN), Stats::default(), true),
            (failed("preadv", Errno::AGAIN), Stats::default(), false),
            (failed("mmap", Errno::NOMEM), full.clone(), true),
            (failed("openat", Errno::NOENT), full, false),
            (failed("openat", Errno::NFILE), Stats::default(), true),
            (failed("openat", Errno::MFILE), Stats::default(), false),
            (ended(), killed, true),
            (ended(), Stats::default(), false),
        ] {
            assert_eq!(is_short(&error, used), expected, "{}", error.with_causes());
        }
    }
}
