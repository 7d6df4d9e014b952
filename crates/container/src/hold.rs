//! Connections to the keeper, and the descriptors that it holds for sleeping and drowsy containers.
//!
//! `LIB/custody` names the keeper that holds them: boot, pid, start time. Every command reads that
//! small file first. [`crate::recover::custody`] describes the recovery from a killed keeper.
//!
//! Uses `ground`, `settings` and `barrier`.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_checkpoint::save::{HeldFile, Wakes};
use dormouse_kernel::{ErrorKind, pidfd, proc};
use dormouse_launch::protocol::watch;
use dormouse_launch::{Calling, Keeper, KeeperStart};
use dormouse_model::{Config, ContainerId, WakeOn, WakeOnTimer};
use dormouse_parcel::Reader;
use dormouse_record::{Cause, Records};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::{barrier, settings};

/// How long a killed keeper may take until the kernel has closed all its descriptors.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Object number of an eventfd that is held beside sockets, or instead: the keeper must know of a
/// container without sockets, too.
pub(crate) const NO_SOCKET: u32 = u32::MAX;

/// `LIB/custody`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Custodian {
    boot: String,
    pid: u32,
    start_time: u64,
}

impl Custodian {
    /// The identity of a keeper.
    pub(crate) fn of(keeper: &mut Keeper) -> Result<Self> {
        let pid = keeper.status()?.pid;
        let boot = proc::boot_id().map_err(Error::call("cannot read boot id"))?.to_owned();
        let start_time = proc::start_time(pid);
        let start_time = start_time.map_err(Error::call("cannot read the keeper's start time"))?;
        Ok(Self { boot, pid, start_time })
    }

    /// Returns whether it still holds its descriptors.
    pub(crate) fn lives(&self) -> bool {
        proc::boot_id().is_ok_and(|boot| boot == self.boot)
            && pidfd::open_exactly(self.pid, self.start_time).is_ok_and(|keeper| {
                // A killed keeper polls no more, but remains until the kernel has closed its
                // descriptors.
                let ends = proc::status(self.pid).is_ok_and(|it| it.is_exiting);
                !pidfd::wait(keeper, Some(if ends { ENDS_WITHIN } else { Duration::ZERO }))
                    .is_ok_and(|ended| ended)
            })
    }
}

/// Returns a connection to the keeper, which is started if there is none.
pub(crate) fn keeper(ground: &Ground) -> Result<Keeper> {
    complete_call(ground, Keeper::call(&ground.places.run)?)
}

/// Completes a connection to the keeper that was begun by [`Keeper::call`].
pub(crate) fn complete_call(ground: &Ground, calling: Option<Calling>) -> Result<Keeper> {
    if let Some(keeper) = calling.map_or(Ok(None), Calling::answer)? {
        return Ok(keeper);
    }
    let start = KeeperStart {
        run_dir: ground.places.run.clone(),
        program: keeper_program(&ground::own_program()?),
        cgroups: ground.cgroups()?.keeper_dirs()?,
        settle: ground.internal("settle")?,
        wake: ground.internal("wake")?,
        tidy: ground.internal("tidy")?,
        // Read once more by the nursery: a keeper lives on beside changed settings.
        nursery: match settings::spares(&ground.settings()) {
            Ok(0) | Err(_) => Vec::new(),
            Ok(_) => ground.internal("nursery")?,
        },
        runner: ground.internal("runner")?,
        runners: settings::runners(&ground.settings()).unwrap_or_default(),
        // A wake does not fail because of unreadable settings: the keeper then stays a second.
        linger: settings::linger(&ground.settings()).unwrap_or_default(),
    };
    // Beside each other: the kernel takes some milliseconds for either.
    let mut keeper = std::thread::scope(|scope| {
        // Without a barrier namespaces are the lock, which fails no start.
        scope.spawn(|| barrier::load(&ground.places));
        Keeper::connect_or_start(&start)
    })?;
    record_keeper(ground, &mut keeper)?;
    Ok(keeper)
}

/// Returns the path of the keeper's program: beside this one, or where packages install it.
pub(crate) fn keeper_program(own: &Path) -> PathBuf {
    const NAME: &str = "dormouse-keeper";
    let beside = own.with_file_name(NAME);
    if beside.exists() { beside } else { Path::new("/usr/libexec/dormouse").join(NAME) }
}

/// Records a keeper, which may have custody from now on.
///
/// The name of a dead keeper is left in place: its descriptors are still to be recovered.
pub(crate) fn record_keeper(ground: &Ground, keeper: &mut Keeper) -> Result<()> {
    match disk::read_json::<Custodian>(&path(ground))? {
        Some(_) => Ok(()),
        None => {
            let own = Custodian::of(keeper)?;
            let _alone = lock_note(ground)?;
            match disk::read_json::<Custodian>(&path(ground))? {
                Some(_) => Ok(()),
                None => disk::write_json(&path(ground), &own, Durable::No),
            }
        }
    }
}

/// Takes the lock for changes of `LIB/custody`: two writers would create the same temporary
/// file.
///
/// ORDER: `note.lock` is innermost. Holders of a container lock take it;
/// `custody::take_back` waits for container locks, so it must not hold `note.lock`
/// meanwhile.
pub(crate) fn lock_note(ground: &Ground) -> Result<Lock> {
    Lock::take_new(&ground.places.run.join("note.lock"))
}

/// Removes the temporary file of a command that was killed while it recorded a keeper.
pub(crate) fn finish_recording(ground: &Ground) -> Result<()> {
    let new = path(ground).with_extension("new");
    if !new.exists() {
        return Ok(());
    }
    let _alone = lock_note(ground)?;
    disk::remove(&new)
}

/// Returns a pidfd of the keeper that has custody, readable when the keeper has exited. `None`
/// if it has exited already, or nothing was ever held.
pub(crate) fn custodian_handle(ground: &Ground) -> Result<Option<OwnedFd>> {
    let custodian = disk::read_json::<Custodian>(&path(ground))?;
    let here = custodian.filter(Custodian::lives);
    Ok(here.and_then(|it| pidfd::open_exactly(it.pid, it.start_time).ok()))
}

/// Returns whether the keeper that had custody has exited and its descriptors were not
/// recovered since.
pub(crate) fn is_orphaned(ground: &Ground) -> Result<bool> {
    let custodian = disk::read_json::<Custodian>(&path(ground))?;
    Ok(custodian.is_some_and(|custodian| !custodian.lives()))
}

/// The record of the keeper that holds descriptors.
pub(crate) fn path(ground: &Ground) -> PathBuf {
    ground.places.lib.join("custody")
}

/// Passes the held files to the keeper. A container that was active is woken as soon as it
/// sleeps: a peer that waits for its output may send nothing more.
pub(crate) fn hold_files(
    ground: &Ground,
    config: &Config,
    held: Vec<HeldFile>,
    is_busy: bool,
) -> Result<()> {
    let mut keeper = keeper(ground)?;
    record_keeper(ground, &mut keeper)?;
    keeper.let_go(config.id.as_str())?; // leftovers of an interrupted command
    hold_by(&mut keeper, config, held, is_busy, 0)
}

/// ORDER: before the processes end: the vault has copies by then, so a killed keeper loses no
/// connection.
pub(crate) fn hold_by(
    keeper: &mut Keeper,
    config: &Config,
    held: Vec<HeldFile>,
    is_busy: bool,
    more: u8,
) -> Result<()> {
    let id = config.id.as_str();
    if held.is_empty() || is_busy {
        let count = u32::from(is_busy);
        let event = rustix::event::eventfd(count, rustix::event::EventfdFlags::CLOEXEC);
        let event = event.map_err(|e| Error::file("cannot make", "an eventfd")(e.into()))?;
        keeper.hold(id, NO_SOCKET, event.as_fd(), watch::READ | more)?;
    }
    for HeldFile { object, file, wakes, cause } in held {
        let (mut bits, is_watched) = (more, is_woken_by(config.spec.wake_on, cause));
        if wakes.readable && is_watched {
            bits |= watch::READ;
        }
        if wakes.writable && is_watched {
            bits |= watch::WRITE;
        }
        keeper.hold(id, object, file.as_fd(), bits)?;
    }
    Ok(keeper.park(id)?)
}

/// Gives the held sockets of a failed wake to the keeper, if that has been replaced since:
/// later callers wait in the queues of these sockets. If `is_busy`, the keeper requests another wake at once. A keeper
/// that has them parks them again, so that the vault has copies.
pub(crate) fn hold_again(ground: &Ground, config: &Config, held: &[(u32, OwnedFd)], is_busy: bool) {
    let give = || -> Result<()> {
        let Some((first, _)) = held.first() else {
            // The keeper may have taken them out of the vault for this wake.
            return match Keeper::connect(&ground.places.run)? {
                Some(mut keeper) => Ok(keeper.park(config.id.as_str())?),
                None => Ok(()),
            };
        };
        let mut keeper = keeper(ground)?;
        match keeper.take(config.id.as_str(), *first) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            // The keeper has them.
            other => {
                other?;
                return Ok(keeper.park(config.id.as_str())?);
            }
        }
        let reader = Reader::open(&ground.asleep_dir(&config.id))?;
        let copy = |(number, fd): &(u32, OwnedFd)| Ok((*number, fd.try_clone()?));
        let copies = held.iter().map(copy).collect::<std::io::Result<Vec<_>>>();
        let copies = copies.map_err(Error::file("cannot copy", "a held socket"))?;
        let held = held_files(reader.records(), copies);
        hold_by(&mut keeper, config, held, is_busy, 0)
    };
    // A keeper that is killed meanwhile is followed by another one.
    if let Err(e) = give().or_else(|_| give()) {
        record_loss(ground, &config.id, config.name.as_str(), &e);
    }
}

/// Has the keeper drop the descriptors of a container that is no longer drowsy.
pub(crate) fn release(ground: &Ground, id: &ContainerId) -> Result<()> {
    match Keeper::connect(&ground.places.run)? {
        Some(mut keeper) => Ok(keeper.let_go(id.as_str())?),
        None => Ok(()),
    }
}

/// Has the keeper drop the descriptors from the vault that no sleeping container left there. A
/// container that was interrupted while it fell asleep or woke may run, or was stopped since,
/// and would find its port in use.
pub(crate) fn release_rest(ground: &Ground) -> Result<()> {
    match ground.places.run.join(dormouse_launch::keeper::VAULT).exists() {
        true => Ok(keeper(ground)?.let_go_unasked()?),
        false => Ok(()),
    }
}

/// Records that the descriptors of a container are lost until its next wake.
pub(crate) fn record_loss(
    ground: &Ground,
    id: &ContainerId,
    name: &str,
    why: &dyn std::fmt::Display,
) {
    ground.record("sleep", id.as_str(), name, &[("custody", format!("lost: {why}"))]);
}

/// Pairs the listening sockets of a checkpoint with the numbers of their objects.
pub(crate) fn held_files(records: &Records, all: Vec<(u32, OwnedFd)>) -> Vec<HeldFile> {
    let wakes = Wakes { readable: true, writable: false };
    let cause = |object: u32| match records.objects.get(object as usize) {
        Some(object) => object.cause(),
        None => Cause::Other, // the engine's own eventfd
    };
    let file = |(object, file)| HeldFile { object, file, wakes, cause: cause(object) };
    all.into_iter().map(file).collect()
}

/// Returns whether an event of this cause wakes the container.
fn is_woken_by(wake_on: WakeOn, cause: Cause) -> bool {
    match cause {
        Cause::Call => wake_on.call,
        Cause::Data => wake_on.data,
        Cause::File => wake_on.file,
        // If timers may wait, the keeper's alarm stands for all of them.
        Cause::Timer => wake_on.timer == WakeOnTimer::InTime,
        Cause::Other => true,
    }
}
