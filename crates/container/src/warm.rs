//! Warm sleepers: asleep containers whose next wake has less to make.
//!
//! A warm sleeper is an asleep container ([`crate::sleep`]) with the same checkpoint and the same held sockets. Beside
//! them it has what a wake makes before it restores anything: cgroups, identity in its domain, directories on a shared
//! tmpfs, and a newborn in its namespaces, with root and all mounts attached. The newborn waits for the last part of
//! its plan, before any credential, limit or filter, and has executed no foreign code. No memory of the container is
//! in it.
//!
//! ```text
//! RUN/warm/ID    what the newborn was made with; its presence is the state
//! RUN/c/ID/      as of a container that starts, without a record of a first process
//! RUN/warm.lock  held while one is made: their number is bounded
//! ```
//!
//! **Holder.** The keeper has the socket to the newborn, as it has the standard input of a running container. A wake
//! takes the socket with the held sockets of the container. The rest is the ordinary wake: each of its steps is made or
//! found made ([`start::start_woken`]). A spare ([`crate::spare`]) is the same for a container that does not exist yet.
//!
//! **Given up** is a warm sleeper by the teardown of every asleep container ([`end::release_objects`]): at the bound
//! the one that has slept longest; before a command that reads or changes what it holds; by the daemon while memory is
//! short, and ten minutes after it fell asleep. The container is an ordinary asleep one then. Nothing is lost, because
//! nothing of the container is in what was given up.
//!
//! **Killed anywhere.** The newborn exits when its socket is closed: with its maker before the keeper has the socket,
//! with the keeper, with the waker. The settler that the keeper starts at the exit of any first process releases the
//! rest, or the next command does, for which the maker leaves an intent. After a killed keeper its recovery does so.
//!
//! **Outdated.** A newborn has copied parts of the configuration and of its surroundings. Where `config.json`, the
//! program, the settings or the host's NIS domain name have changed since, it is not used.
//!
//! LIMIT: no container with a directory of the host, a drive, a network stack of its own or systemd is kept warm: what
//! it pins on the host is more than its own. None is while CPUs or memory are reserved: each cgroup counts there.
//! LIMIT: cgroups, newborn and mounts are charged to the container as those of a running one.
//!
//! Uses `ground`, `settings`, `state`, `contract`, `process`, `pending`, `policy`, `drive`, `layer`, `spare`,
//! `warmth`, `listen`, `end`, `restore`, `net`, `socket` and `start`.

use std::fs;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dormouse_image::Assembled;
use dormouse_kernel::cgroup::Cgroup;
use dormouse_launch::{Keeper, LaunchError, Passed};
use dormouse_model::{Config, ContainerId, MountKind, NetMode, RootSource, State};
use dormouse_parcel::Reader;

use crate::disk::{self, Lock, Waiting};
use crate::drive::{self, Purpose, Writable};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::layer::{self, Root};
use crate::listen::Origin;
use crate::net::Net;
use crate::pending::{self, Intent};
use crate::policy::Idle;
use crate::restore::RestorePlan;
use crate::spare::{self, Stamp, seen_config};
use crate::start::{self, Bearer, Born, Kept};
use crate::warmth::{self, Record};
use crate::{contract, end, process, settings, socket, state};

/// LIMIT: how long a container is kept warm without a wake, and the longest idle time before its sleep. One that is
/// called less often gains nothing worth its memory.
pub const KEPT: Duration = Duration::from_secs(600);

/// Returns the memory that is charged to the cgroup of a warm sleeper, in bytes; `None` for another container.
pub(crate) fn bytes(ground: &Ground, id: &ContainerId) -> Result<Option<u64>> {
    if warmth::of(ground, id).is_none() {
        return Ok(None);
    }
    let cgroup = ground.cgroups()?.find(id.as_str())?;
    Ok(cgroup.map(|cgroup| cgroup.stats()).transpose()?.map(|stats| stats.memory_bytes))
}

/// Returns why a container is never kept warm; `None` if it may be.
fn obstacle(config: &Config) -> Option<&'static str> {
    let spec = &config.spec;
    let is_bound = |kind: &MountKind| matches!(kind, MountKind::Bind { .. });
    if matches!(spec.root, RootSource::Directory(_)) {
        return Some("its root is a directory of the host (--rootfs)");
    }
    if spec.mounts.iter().any(|mount| is_bound(&mount.kind)) {
        return Some("it has a directory of the host (-v)");
    }
    if matches!(spec.net, NetMode::Private { .. }) {
        return Some("it has a network stack of its own (--net private)");
    }
    if spec.limits.disk_bytes.is_some() {
        return Some("it has a disk of its own (--disk)");
    }
    spec.systemd.then_some("its first process is systemd (--systemd)")
}

/// Refuses a container that cannot be kept warm, before it is put to sleep for that.
pub(crate) fn check(ground: &Ground, id: &ContainerId) -> Result<()> {
    bound(ground)?;
    may_be_kept(ground, &ground.config(id)?)
}

/// Returns how many containers are kept warm at most, which is not 0.
fn bound(ground: &Ground) -> Result<usize> {
    match settings::warm(&ground.settings())? {
        0 => Err(Error::Invalid(format!(
            "no container is kept warm on this host: set 'warm' under [sleep] in '{}' to their number",
            ground.settings().display()
        ))),
        bound => Ok(bound),
    }
}

fn may_be_kept(ground: &Ground, config: &Config) -> Result<()> {
    let refused =
        |why: &str| Err(Error::Invalid(format!("'{}' is not kept warm: {why}", config.name)));
    if let Some(why) = obstacle(config) {
        return refused(why);
    }
    if !may_keep_any(ground) {
        return refused("the host is short of memory, or CPUs or memory of it are reserved");
    }
    Ok(())
}

/// Returns whether the host has memory for warm sleepers, and no reservation beside which their cgroups would count.
pub(crate) fn may_keep_any(ground: &Ground) -> bool {
    !contract::has_ledger(ground) && !spare::is_short_of_memory()
}

/// Keeps a container warm that the daemon has just put to sleep, if it is called often enough for that and the settings
/// permit it. Otherwise it is asleep as any other: no error is worth a report.
pub(crate) fn keep_if_called_often(ground: &Ground, id: &ContainerId, idle: &Idle) {
    let may = || settings::warm(&ground.settings()).is_ok_and(|bound| bound > 0);
    if idle.quiet <= KEPT && may() {
        let _ = keep(ground, id);
    }
}

/// LIMIT: how long the lock of a container is waited for. The settler of its ended processes has it for a moment.
const FREE_WITHIN: Duration = Duration::from_millis(500);

/// Keeps an asleep container warm; does nothing for one that is.
///
/// ORDER: `RUN/warm.lock` is the outermost lock, which only this function takes. Others are given up before the lock of
/// the container is taken: a client that wakes it does not wait for that.
pub(crate) fn keep(ground: &Ground, id: &ContainerId) -> Result<()> {
    let bound = bound(ground)?;
    disk::make_dir(&ground.places.warm(), 0o700)?;
    let _alone = Lock::take_new(&ground.places.run.join("warm.lock"))?;
    make_room(ground, id, bound);
    let busy =
        || Error::Invalid(format!("container {} is not kept warm: it is in use", id.short()));
    let waiting = Waiting::begin(&ground.dir(id))?;
    let _lock = waiting.take(FREE_WITHIN)?.ok_or_else(busy)?;
    let config = ground.config(id)?;
    let observed = state::observe_locked(ground, &config)?;
    if observed.state != State::Asleep {
        return Err(Error::state(
            &config,
            observed.state,
            "only a sleeping container is kept warm",
        ));
    }
    if warmth::of(ground, id).is_some_and(|warm| warm.is_fit) {
        return Ok(());
    }
    may_be_kept(ground, &config)?;
    if warmth::all(ground).iter().filter(|warm| warm.id != *id).count() >= bound {
        return Err(busy());
    }
    end::settle_found(ground, &config, observed, false)?;
    if ground.run_dir(id).exists() {
        end::release_objects(ground, &config)?; // it was warm, and is outdated
    }
    let _in_use = ground.in_use()?;
    let _doing = pending::intend(ground, id, &Intent::Warm)?;
    make(ground, &config).inspect_err(|_| {
        let _ = end::release_objects(ground, &config); // the first error is returned
    })
}

/// Gives up those that have slept longest, until one more is within the bound. One that is in use is left alone.
fn make_room(ground: &Ground, id: &ContainerId, bound: usize) {
    let mut others = warmth::all(ground);
    others.retain(|warm| warm.id != *id);
    let mut surplus = (others.len() + 1).saturating_sub(bound);
    for warm in others {
        if surplus == 0 {
            return;
        }
        let lock = Lock::try_take(&ground.dir(&warm.id));
        let given_up = || -> Result<()> { end::cool_locked(ground, &ground.config(&warm.id)?) };
        if matches!(lock, Ok(Some(_))) && given_up().is_ok() {
            surplus -= 1;
        }
    }
}

/// Makes the objects of a warm sleeper.
fn make(ground: &Ground, config: &Config) -> Result<()> {
    let id = &config.id;
    let asleep = ground.asleep_dir(id);
    let since = state::slept(ground, id)?;
    let user = Origin::of(&asleep)?.and_then(|origin| origin.user);
    if since.as_ref().and_then(|since| since.user.clone()).or(user).is_none() {
        return Err(Error::Invalid(format!(
            "'{}' is not kept warm: it was started by an older program",
            config.name
        )));
    }
    let device = since.and_then(|since| since.device);
    let reader = Arc::new(Reader::open(&asleep)?);
    let from = RestorePlan { wakes: true, device, ..RestorePlan::verified(reader) };
    let run_dir = ground.run_dir(id);
    let made = fs::DirBuilder::new().mode(0o700).create(&run_dir);
    made.map_err(Error::file("cannot make directory", &run_dir))?;
    let maker = Maker { ground, config, device };
    let (Born { mut keeper, mut newborn, mut plan, device, .. }, ()) =
        start::bear(ground, config, Some(&from), maker)?;
    // What is left of the plan up to the program, but for streams and rights.
    plan.seal_root();
    process::plan_namespace_limits(&mut plan, config)?;
    newborn.send_part(plan)?;
    if !newborn.takes_parts() {
        return Err(Error::Launch(LaunchError::Newborn { what: "takes no plan in parts" }));
    }
    let passed = keeper.passed(&newborn);
    let (stamp, config) = (Stamp::now(ground), seen_config(ground, id));
    // ORDER: on record, then given to the keeper: until then the newborn ends with this process.
    write(&ground.warm_record(id), &Record { passed, device, stamp, config })?;
    Ok(keeper.keep_newborn(id.as_str(), newborn)?)
}

/// Writes a record in place: a temporary file would be left by a killed process. A reader of a part finds none.
fn write(path: &Path, record: &Record) -> Result<()> {
    let text = disk::to_json(record, path)?;
    let mut options = fs::File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(&text)).map_err(Error::file("cannot write", path))
}

/// The process that keeps a sleeper warm, for the birth of the newborn.
struct Maker<'m> {
    ground: &'m Ground,
    config: &'m Config,
    device: Option<u64>,
}

impl Bearer for Maker<'_> {
    type Seen = ();

    fn keeper(&mut self) -> Result<Keeper> {
        // The keeper of an asleep container lives. A new one would not have its sockets.
        Ok(Keeper::connect(&self.ground.places.run)?.ok_or(LaunchError::KeeperGone)?)
    }

    fn introduce(&mut self, cgroup: &Cgroup, net: &Net) -> Result<()> {
        start::introduce(self.ground, self.config, cgroup, net, socket::Begin::Wake)
    }

    fn meanwhile(&mut self) -> Result<()> {
        Ok(())
    }

    fn assemble(&mut self, userns: BorrowedFd<'_>) -> Result<Assembled> {
        layer::assemble(self.ground, self.config, userns, Purpose::Start, self.device)
    }

    fn look(&mut self, _root: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }
}

/// A newborn that was requested from the keeper.
pub(crate) struct Asked {
    passed: Passed,
    device: u64,
}

/// Requests the newborn of a container, without waiting for the reply, which [`take`] reads. `None` if it is not warm,
/// or what it has is outdated.
pub(crate) fn ask(ground: &Ground, config: &Config, keeper: &mut Keeper) -> Result<Option<Asked>> {
    let Some(record) = Record::read(ground, &config.id) else { return Ok(None) };
    if !record.is_current(ground, &config.id) {
        return Ok(None);
    }
    let Record { passed, device, .. } = record;
    let asked = keeper.ask_for_newborn(config.id.as_str(), passed)?;
    Ok(asked.map(|passed| Asked { passed, device }))
}

/// Receives a requested newborn. `None` if it has exited: its container wakes as one that is not warm.
///
/// ORDER: the keeper has the newborn no more, then the record is removed. A kill in between leaves a record without a
/// newborn, with which a container wakes as one that is not warm.
pub(crate) fn take(
    ground: &Ground,
    config: &Config,
    keeper: &mut Keeper,
    asked: Asked,
) -> Result<Option<Kept>> {
    let Asked { passed, device } = asked;
    let Some(newborn) = keeper.taken_newborn(passed)? else { return Ok(None) };
    disk::remove(&ground.warm_record(&config.id))?;
    Ok(Some(Kept { newborn, device }))
}

/// Gives up what a container has, if it is warm or was created with parts made ahead, before its files are read or
/// changed from outside.
pub(crate) fn give_up(ground: &Ground, id: &ContainerId) -> Result<()> {
    if !end::has_newborn_ahead(ground, id) {
        return Ok(()); // nearly all
    }
    let _lock = ground.lock(id)?;
    end::cool_locked(ground, &ground.config(id)?)
}

/// Returns the root directory of a container ([`layer::root_locked`]), which is not warm then.
pub(crate) fn root(ground: &Ground, id: &ContainerId) -> Result<Root> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    end::cool_locked(ground, &config)?;
    layer::root_locked(ground, &config)
}

/// Opens the writable layer of a container, which is not warm then.
pub(crate) fn writable(ground: &Ground, config: &Config) -> Result<Writable> {
    give_up(ground, &config.id)?;
    drive::open(ground, config, Purpose::Look)
}

#[cfg(test)]
mod tests {
    use dormouse_model::{IdMap, IdSlot, Mount, Propagation};

    use super::*;

    fn config(change: impl FnOnce(&mut Config)) -> Config {
        let kind = serde_json::json!({
            "image": "5", "domain": "default", "auto_remove": false, "limits": {}, "views": "auto",
        });
        let kind: spare::Kind = serde_json::from_value(kind).unwrap();
        let ids = IdMap::narrow(IdSlot(70_000));
        let mut config = kind.config(&ContainerId::from_bytes([7; 16]), ids, Vec::new()).unwrap();
        change(&mut config);
        config
    }

    #[test]
    fn containers_that_pin_more_than_their_own_are_not_kept_warm() {
        assert_eq!(obstacle(&config(|_| {})), None);
        let mount = |kind| Mount { target: "/mnt".into(), read_only: false, no_exec: false, kind };
        let volume = MountKind::Volume { name: "data".parse().unwrap(), no_copy: false };
        assert_eq!(obstacle(&config(|it| it.spec.mounts.push(mount(volume)))), None);
        let bind = MountKind::Bind {
            source: "/srv".into(),
            recursive: false,
            idmap: false,
            propagation: Propagation::Private,
        };
        let domain = || "default".parse().unwrap();
        for (word, config) in [
            ("-v", config(|it| it.spec.mounts.push(mount(bind)))),
            ("--rootfs", config(|it| it.spec.root = RootSource::Directory("/srv".into()))),
            ("--net", config(|it| it.spec.net = NetMode::Private { domain: domain() })),
            ("--disk", config(|it| it.spec.limits.disk_bytes = Some(1 << 30))),
            ("--systemd", config(|it| it.spec.systemd = true)),
        ] {
            assert!(obstacle(&config).is_some_and(|why| why.contains(word)), "{word}");
        }
    }
}
