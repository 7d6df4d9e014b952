//! End of a container: settling, killing, teardown, and the end of its sleep.
//!
//! Every step accepts half-built and half-removed containers and is repeated until nothing remains.
//!
//! Uses `ground`, `state`, `account`, `gates`, `deal`, `gating`, `exit`, `barrier`, `hold`, `contract`, `sysinfo`,
//! `net`, `pending`, `rate`, `drive`, `shared`, `socket`, `view`, `later`, `warmth` and `unwoken`.
//!
//! **The answer first.** A container that removes itself may be withdrawn before its end is settled: its exit
//! status is known, and no process of it is left. The keeper then has it settled and removed ([`complete`]), or the
//! next command does so. Only ends without effect on other containers qualify ([`may_settle_later`]).

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_kernel::cgroup::Cgroup;
use dormouse_kernel::pidfd;
use dormouse_launch::{Keeper, NEVER_BEGAN};
use dormouse_model::{Config, ContainerId, State};

use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::exit::{self, SIGKILL};
use crate::ground::{CONFIG, Ground};
use crate::state::{self, Exit, InitRecord, Observed};
use crate::{
    account, barrier, contract, deal, disk, drive, event, gates, gating, hold, later, net, pending,
    rate, shared, socket, sysinfo, unwoken, view, warmth,
};

/// Releases every kernel object of a container. Accepts half-built and half-removed containers,
/// and may be called twice.
pub(crate) fn tear_down(ground: &Ground, id: &ContainerId, config: Option<&Config>) -> Result<()> {
    tear_down_with(ground, id, config, ground.cgroups()?.find(id.as_str())?, None)
}

/// Releases the kernel objects of a container, given its cgroup.
///
/// ORDER: `RUN/c/ID` last. A start makes it first and treats an existing one as the sign of an
/// interrupted start.
fn tear_down_with(
    ground: &Ground,
    id: &ContainerId,
    config: Option<&Config>,
    cgroup: Option<Cgroup>,
    init: Option<&InitRecord>,
) -> Result<()> {
    let mut first = None;
    let mut keep = |r: Result<()>| {
        if let Err(e) = r {
            first.get_or_insert(e);
        }
    };
    keep(disk::remove(&ground.warm_record(id)));
    keep(cgroup.map_or(Ok(()), |cgroup| end_life(ground, id, config, &cgroup, init)));
    keep(rate::end(ground, id, config));
    if config.is_none_or(|c| c.spec.net.domain().is_some()) {
        keep(net::leave(ground, id, config));
    }
    // ORDER: after its processes and held sockets: those that are left are counted for no other container.
    keep(config.map_or(Ok(()), |config| socket::end(ground, config)));
    keep(shared::remove(ground, id));
    keep(view::remove(ground, id));
    keep(disk::remove_tree(&ground.woken_dir(id)));
    drive::settle(ground, config);
    match first {
        None => remove_run_dir(ground, id),
        Some(e) => Err(e),
    }
}

/// Kills every process of a life, charges its use, and removes its cgroup. `init` is the record of its first
/// process, where that has exited: the kernel has ended all others before.
///
/// ORDER: a cgroup counts only what its processes have done before it is read, and is removed after its use was
/// charged.
fn end_life(
    ground: &Ground,
    id: &ContainerId,
    config: Option<&Config>,
    cgroup: &Cgroup,
    init: Option<&InitRecord>,
) -> Result<()> {
    cgroup.kill()?;
    if init.is_none() {
        if let Some(config) = config {
            rate::lift(ground, config, cgroup);
        }
        cgroup.wait_empty(KILLED_WITHIN)?; // the removal reports processes that are left
    }
    account::charge_end(ground, id, config, cgroup, init);
    // What stays is removed with the program.
    let _ = sysinfo::leave(ground, config, cgroup);
    let _ = barrier::leave(ground, cgroup);
    if contract::governs_memory(ground).unwrap_or(false) {
        // Page cache of files that stay, such as those of a volume, would be charged to all containers together until
        // the kernel reclaims it, from those with a guarantee as well.
        let _ = cgroup.reclaim(|| true);
    }
    cgroup.remove()?;
    config.map_or(Ok(()), |config| socket::leave(ground, config, cgroup))?;
    if let Some(config) = config {
        deal::again(ground, config);
    }
    gates::leave(ground, cgroup)
}

/// Settles a container in an observed state.
pub(crate) fn settle_found(
    ground: &Ground,
    config: &Config,
    observed: Observed,
    finally: bool,
) -> Result<Option<Exit>> {
    settle_with(ground, config, observed, finally, exit::of)
}

/// Settles a container that is about to be removed: its exit status is not awaited.
pub(crate) fn settle_to_remove(ground: &Ground, config: &Config, observed: Observed) -> Result<()> {
    settle_with(ground, config, observed, false, exit::at_removal).map(drop)
}

fn settle_with(
    ground: &Ground,
    config: &Config,
    observed: Observed,
    finally: bool,
    find: exit::Find,
) -> Result<Option<Exit>> {
    if !observed.needs_settling() {
        let gone = gone_dir(ground, &config.id);
        if observed.state != State::Asleep && gone.exists() {
            forget_sleep(ground, config)?; // its end was interrupted, and its sockets are still held
        }
        if observed.init.is_none() && ground.run_dir(&config.id).exists() {
            // A start or an end was interrupted.
            match observed.state {
                // The process that is settled is an earlier one.
                State::Asleep if warmth::is_held(ground, &config.id) => {}
                State::Asleep => release_objects(ground, config)?,
                _ => tear_down(ground, &config.id, Some(config))?,
            }
        }
        return Ok(observed.exit.filter(|_| observed.state != State::Asleep));
    }
    let Some(init) = observed.init else { return Ok(observed.exit) };
    let mut exit = find(ground, &config.id, &init)?;
    if fell_asleep(ground, config, &init, &exit) {
        release_objects(ground, config)?;
        return Ok(None);
    }
    forget_sleep(ground, config)?; // an old checkpoint: the container ran on
    if init.drowsy_unix_ms.is_some() {
        hold::release(ground, &config.id)?;
    }
    let cgroup = ground.cgroups()?.find(config.id.as_str())?;
    if let Some(cgroup) = &cgroup {
        exit.oom_killed |= cgroup.oom_kills().is_ok_and(|kills| kills > 0);
    }
    exit.stopped = init.stopping;
    exit.failures = if exit.code == Some(0) { 0 } else { init.failures + 1 };
    exit.short_runs = if exit.is_short() { init.short_runs + 1 } else { 0 };
    if !config.spec.auto_remove {
        state::write_exit(ground, &config.id, &exit)?;
    }
    record_death(ground, config, exit.code, later::failure(ground, &config.id));
    tear_down_with(ground, &config.id, Some(config), cgroup, Some(&init))?;
    if config.spec.auto_remove && finally {
        remove_files(ground, &config.id, Some(config), true)?;
    }
    Ok(Some(exit))
}

fn record_death(ground: &Ground, config: &Config, code: Option<i32>, reason: Option<String>) {
    let code = code.map_or_else(|| "unknown".to_owned(), |c| c.to_string());
    let mut more = vec![("exit_code", code)];
    more.extend(reason.map(|why| ("reason", why)));
    ground.record("die", config.id.as_str(), config.name.as_str(), &more);
}

/// Returns whether a container that removes itself, and whose first process has exited, may be withdrawn before it
/// is settled. Until then no start of another container may depend on what it has: host ports, reservations, charges
/// to an account, work for other accounts, sockets in custody. Its addresses are waited for where they are short
/// ([`crate::create`]). LIMIT: files in its tmpfs and /dev/shm hold memory until then.
pub(crate) fn may_settle_later(ground: &Ground, config: &Config, pid: u32) -> Result<bool> {
    let (id, spec) = (&config.id, &config.spec);
    if !spec.auto_remove || !spec.publish.is_empty() || spec.account.is_some() {
        return Ok(false);
    }
    let is_plain = |init: InitRecord| {
        let slept = init.sleeping || init.wakes > 0 || init.drowsy_unix_ms.is_some();
        init.pid == pid && !slept && init.restored_bytes == 0
    };
    Ok(state::read_init(ground, id)?.is_some_and(is_plain)
        && !ground.asleep_dir(id).exists()
        && !gone_dir(ground, id).exists()
        && !contract::has_ledger(ground)
        && !gates::has_worked(ground, id)?)
}

/// Settles a container under its lock.
///
/// ORDER: the exit is on disk before the record of the process is removed. A kill in between
/// leaves a container that is settled again, with the same result.
///
/// `finally` also removes a container with `auto_remove`.
pub(crate) fn settle_locked(
    ground: &Ground,
    config: &Config,
    finally: bool,
) -> Result<Option<Exit>> {
    settle_found(ground, config, state::observe(ground, config)?, finally)
}

/// Kills every process, waits until the first one has exited and settles.
pub(crate) fn kill_locked(ground: &Ground, config: &Config, observed: &Observed) -> Result<()> {
    kill_with(ground, config, observed, exit::of)
}

/// The same for a container that is about to be removed: its exit status is not awaited.
pub(crate) fn kill_to_remove(ground: &Ground, config: &Config, observed: &Observed) -> Result<()> {
    kill_with(ground, config, observed, exit::at_forced_removal)
}

fn kill_with(
    ground: &Ground,
    config: &Config,
    observed: &Observed,
    find: exit::Find,
) -> Result<()> {
    let Some(init) = &observed.init else { return Ok(()) };
    let mut init = init.clone();
    init.stopping = true;
    state::write_init(ground, &config.id, &init)?;
    let fd = state::handle(&init);
    if let Some(cgroup) = ground.cgroups()?.find(config.id.as_str())? {
        cgroup.kill()?;
        rate::lift(ground, config, &cgroup);
    }
    if let Some(fd) = fd {
        let _ = pidfd::send_signal(fd.as_fd(), 9); // may have exited already
        wait_killed(config, init.pid, fd.as_fd())?;
    }
    settle_with(ground, config, state::observe(ground, config)?, false, find).map(drop)
}

/// LIMIT: how long a killed process may take to end. The kernel writes its core dump and closes its files
/// meanwhile; a process that waits for a disk (state D) ends only afterwards.
const KILLED_WITHIN: Duration = Duration::from_secs(30);

/// Waits for the end of a first process that was killed.
pub(crate) fn wait_killed(config: &Config, pid: u32, process: BorrowedFd<'_>) -> Result<()> {
    let ended = pidfd::wait(process, Some(KILLED_WITHIN));
    match ended.map_err(Error::call("cannot wait for the container"))? {
        true => Ok(()),
        false => Err(Error::Undying { name: config.name.to_string(), pid, waited: KILLED_WITHIN }),
    }
}

/// Returns whether a container is asleep, given the exit of its first process: the process was
/// killed while marked, or exited by itself because its engine died before releasing it.
fn fell_asleep(ground: &Ground, config: &Config, init: &InitRecord, exit: &Exit) -> bool {
    let killed = exit.signal == Some(SIGKILL) || exit.code.is_none();
    let never_began = exit.code == Some(NEVER_BEGAN);
    let meant = init.sleeping && !init.stopping;
    meant && (killed || never_began) && ground.asleep_dir(&config.id).exists()
}

/// Releases the kernel objects that an asleep container does not need. Its addresses, names and
/// published ports stay.
///
/// ORDER: `RUN/c/ID` last, as in every teardown.
pub(crate) fn release_objects(ground: &Ground, config: &Config) -> Result<()> {
    let id = &config.id;
    // ORDER: first: a container with the record is warm.
    disk::remove(&ground.warm_record(id))?;
    if let Some(cgroup) = ground.cgroups()?.find(id.as_str())? {
        end_life(ground, id, Some(config), &cgroup, None)?;
    }
    rate::end(ground, id, Some(config))?;
    if config.spec.net.domain().is_some() {
        ground.network()?.doze(id)?;
    }
    // A client is to reach the listeners of an asleep container, and to wake it.
    socket::suspend(ground, config)?;
    shared::remove(ground, id)?;
    // overlayfs makes this directory at each mount, and first removes an old one. On a disk that discards freed
    // blocks the removal waits for the device, which is here not in the way of a wake. One with files stays.
    let _ = fs::remove_dir(ground.dir(id).join("work/work"));
    view::remove(ground, id)?;
    // The parts of the old checkpoint that are still needed are linked into the new one.
    disk::remove_tree(&ground.woken_dir(id))?;
    drive::settle(ground, Some(config));
    remove_run_dir(ground, id)
}

/// Returns whether a container may have a newborn that waits for the rest of its plan: it is warm, or was created with
/// parts made ahead. Other containers with objects in the kernel have a record of their first process.
pub(crate) fn has_newborn_ahead(ground: &Ground, id: &ContainerId) -> bool {
    let run_dir = ground.run_dir(id);
    ground.warm_record(id).exists() || run_dir.exists() && !run_dir.join(state::INIT).exists()
}

/// Gives up what a warm sleeper has ([`crate::warm`]), or a created container ([`crate::spare`]): it is an ordinary one
/// then. Does nothing for others. The caller holds its lock.
pub(crate) fn cool_locked(ground: &Ground, config: &Config) -> Result<()> {
    if !has_newborn_ahead(ground, &config.id) {
        return Ok(()); // nearly all
    }
    let observed = state::observe(ground, config)?;
    match (observed.state, &observed.init) {
        (State::Asleep, None) if ground.warm_record(&config.id).exists() => {
            release_objects(ground, config)
        }
        (State::Created, None) => tear_down(ground, &config.id, Some(config)),
        // It is on its way to another state.
        _ => Ok(()),
    }
}

/// Releases the reservation of the container, and removes `RUN/c/ID`.
///
/// ORDER: an entry of the ledger without a record of the process is a start under way, which keeps its
/// reservation. The entry goes first, while the record shows that the process has exited.
fn remove_run_dir(ground: &Ground, id: &ContainerId) -> Result<()> {
    contract::leave(ground, id);
    disk::remove_tree(&ground.run_dir(id))
}

/// Ends an asleep container, which is stopped then.
pub(crate) fn end_sleep(ground: &Ground, config: &Config) -> Result<()> {
    let now = event::now_unix_ms();
    let since = state::slept(ground, &config.id)?;
    let exit = Exit {
        code: Some(128 + SIGKILL),
        signal: Some(SIGKILL),
        oom_killed: false,
        started_unix_ms: since.map_or(now, |init| init.started_unix_ms),
        finished_unix_ms: now,
        failures: 0,
        short_runs: 0,
        stopped: true,
    };
    state::write_exit(ground, &config.id, &exit)?;
    forget_sleep(ground, config)?;
    tear_down(ground, &config.id, Some(config))
}

/// Kills the processes of an interrupted wake, none of which has run: the container is asleep.
pub(crate) fn end_unready(ground: &Ground, config: &Config, observed: &Observed) -> Result<()> {
    if let Some(cgroup) = ground.cgroups()?.find(config.id.as_str())? {
        cgroup.kill()?;
        rate::lift(ground, config, &cgroup);
    }
    let Some(init) = &observed.init else { return Ok(()) };
    if let Some(process) = state::handle(init) {
        let _ = pidfd::send_signal(process.as_fd(), SIGKILL); // may have exited already
        wait_killed(config, init.pid, process.as_fd())?;
    }
    settle_locked(ground, config, false).map(drop)
}

/// Marks a container as awake and removes its checkpoint, also after an interrupted sleep.
///
/// ORDER: all processes run; then the mark is removed; then the checkpoint.
pub(crate) fn stay_awake(ground: &Ground, config: &Config, init: Option<InitRecord>) -> Result<()> {
    unmark(ground, config, init)?;
    forget_sleep(ground, config)
}

/// Removes the mark of a container that falls asleep or wakes from its record.
pub(crate) fn unmark(ground: &Ground, config: &Config, init: Option<InitRecord>) -> Result<()> {
    match init.filter(|init| init.sleeping) {
        Some(init) => {
            state::write_init(ground, &config.id, &InitRecord { sleeping: false, ..init })
        }
        None => Ok(()),
    }
}

/// Removes the checkpoint of an asleep container and drops its held sockets, if there are any.
pub(crate) fn forget_sleep(ground: &Ground, config: &Config) -> Result<()> {
    end_asleep(ground, config, None, false)
}

/// The checkpoint of a sleep that is being ended.
fn gone_dir(ground: &Ground, id: &ContainerId) -> std::path::PathBuf {
    ground.asleep_dir(id).with_file_name(".asleep-gone")
}

/// Ends the sleep, over an existing connection to the keeper if there is one. The checkpoint
/// may be kept.
///
/// ORDER: the checkpoint is renamed first. A full disk prevents that, and the container is asleep as
/// before, with its held sockets. The renamed directory is removed, or set aside, last: after a kill in
/// between it shows that the sockets are still to be released. A checkpoint under that name is never used.
pub(crate) fn end_asleep(
    ground: &Ground,
    config: &Config,
    keeper: Option<&mut Keeper>,
    is_kept: bool,
) -> Result<()> {
    let dir = ground.asleep_dir(&config.id);
    let gone = gone_dir(ground, &config.id);
    let is_asleep = dir.exists();
    if is_asleep {
        disk::remove_tree(&gone)?; // left by a killed removal
        fs::rename(&dir, &gone).map_err(Error::file("cannot remove", &dir))?;
    } else if !gone.exists() {
        return Ok(());
    }
    match keeper {
        Some(keeper) => keeper.let_go(config.id.as_str())?,
        None => hold::release(ground, &config.id)?,
    }
    unwoken::forget(ground, config);
    if is_kept && is_asleep {
        let woken = ground.woken_dir(&config.id);
        disk::remove_tree(&woken)?; // left by a killed sleep
        return fs::rename(&gone, &woken).map_err(Error::file("cannot put aside", &gone));
    }
    disk::remove_tree(&gone)
}

/// Removes the files of a container after its kernel objects.
pub(crate) fn remove_files(
    ground: &Ground,
    id: &ContainerId,
    config: Option<&Config>,
    volumes: bool,
) -> Result<()> {
    let dead = pending::withdraw(ground, id)?;
    pending::release(ground, id, &dead, config, volumes)?;
    if let Some(config) = config {
        ground.record("remove", id.as_str(), config.name.as_str(), &[]);
    }
    Ok(())
}

/// A withdrawn container: no command finds it, and its name is free. What remains is released by
/// [`Removal::complete`]. After a kill before that, the next command does so, as for every interrupted removal
/// ([`crate::pending`]).
#[derive(Debug)]
pub(crate) struct Removal {
    config: Config,
    dir: PathBuf,
    /// The lock of the container, on the same directory.
    _lock: Lock,
}

impl Removal {
    /// Withdraws a container whose first process was settled; the caller holds its lock. Its addresses are free, too.
    pub(crate) fn begin(ground: &Ground, config: Config, lock: Lock) -> Result<Self> {
        let dir = pending::withdraw(ground, &config.id)?;
        // The next command may want the same name and addresses.
        ground.names.release(&config.name, &config.id)?;
        gating::withdraw(ground, &config)?;
        if !config.addresses.is_empty() {
            ground.network()?.release(&config.id)?;
        }
        ground.record("remove", config.id.as_str(), config.name.as_str(), &[]);
        Ok(Self { config, dir, _lock: lock })
    }

    /// Withdraws a container that is not settled yet ([`may_settle_later`]); the caller holds its lock.
    pub(crate) fn begin_unsettled(
        ground: &Ground,
        config: Config,
        lock: Lock,
        code: i32,
    ) -> Result<Self> {
        record_death(ground, &config, Some(code), None);
        let dir = pending::withdraw(ground, &config.id)?;
        ground.names.release(&config.name, &config.id)?;
        ground.record("remove", config.id.as_str(), config.name.as_str(), &[]);
        Ok(Self { config, dir, _lock: lock })
    }

    /// Releases what remains.
    pub(crate) fn complete(&self, ground: &Ground) -> Result<()> {
        complete(ground, &self.config.id, &self.dir, Some(&self.config))
    }
}

/// Settles and removes a withdrawn container, in its directory `dir`, as far as that is not done. The caller holds
/// its lock. `config` is `None` if it is damaged.
///
/// ORDER: `RUN/c/ID` is the last of its kernel objects, in every teardown: without it there are none.
pub(crate) fn complete(
    ground: &Ground,
    id: &ContainerId,
    dir: &Path,
    config: Option<&Config>,
) -> Result<()> {
    if ground.run_dir(id).exists() {
        tear_down(ground, id, config)?;
    }
    pending::release(ground, id, dir, config, false)
}

/// The same for a container that may be withdrawn. Another process may be at it, and is waited for.
pub(crate) fn complete_withdrawn(ground: &Ground, id: &ContainerId) -> Result<()> {
    let dir = pending::withdrawn_dir(ground, id);
    let _lock = match Lock::take(&dir) {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(());
        }
        other => other?,
    };
    // The last holder of the lock may have removed it.
    if !dir.exists() {
        return Ok(());
    }
    let config: Option<Config> = disk::read_json(&dir.join(CONFIG)).unwrap_or(None);
    complete(ground, id, &dir, config.as_ref())
}
