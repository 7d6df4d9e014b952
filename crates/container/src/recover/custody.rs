//! Re-creation of the descriptors of sleeping containers after their keeper is gone.
//!
//! `LIB/custody` names the keeper that holds them ([`crate::hold`]). If that keeper was killed, the
//! next keeper receives the descriptors from the vault, and its timers are set again. If the vault
//! was killed too, or after a reboot, the sockets are lost. The engine then re-creates them from the
//! checkpoints, with the same addresses and options, and passes them to a running keeper. After that
//! an incoming connection wakes the container as before. Open connections are lost in this case: the
//! kernel has reset them at the peers, and the container reads the error when it wakes.
//!
//! ORDER: `LIB/custody` is written when all descriptors are held. A command that is killed before
//! leaves the dead keeper's name in it, and the next command repeats the whole recovery.
//!
//! The first processes of running containers are adopted by the next keeper, which settles the
//! containers by their restart policies.
//!
//! Uses `ground`, `state`, `hold`, `log`, `io`, `net`, `holder`, `later`, `policy`, `end`, `listen` and
//! `drowsy`.

use dormouse_kernel::proc;
use dormouse_launch::Keeper;
use dormouse_model::{Config, ContainerId, State};
use dormouse_parcel::Reader;

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::hold::{self, Custodian};
use crate::listen::Listener;
use crate::log::Output;
use crate::policy::{self, Reason};
use crate::state::InitRecord;
use crate::{drowsy, end, holder, io, later, net, state};

/// LIMIT: how many containers are locked at a time.
const BATCH: usize = 128;

/// A sleeping container without a keeper that watches its sockets.
struct Orphan {
    config: Config,
    _lock: Lock,
}

/// The helper that makes sockets again, and the keeper that holds them.
struct Recovery {
    keeper: Keeper,
    listener: Listener,
    _in_use: Lock,
}

impl Recovery {
    fn begin(ground: &Ground) -> Result<Self> {
        let _in_use = ground.in_use()?;
        let keeper = hold::keeper(ground)?;
        Ok(Self { keeper, listener: Listener::start(ground)?, _in_use })
    }
}

/// Re-creates the sockets of sleeping containers if the keeper that held them is gone, and
/// thaws drowsy containers. Returns how many containers are still asleep.
pub(crate) fn take_back(ground: &Ground) -> Result<usize> {
    hold::finish_recording(ground)?;
    if !hold::is_orphaned(ground)? {
        return Ok(0);
    }
    let _alone = Lock::take_new(&ground.places.run.join("custody.lock"))?;
    if !hold::is_orphaned(ground)? {
        return Ok(0);
    }
    let mut recovery = None;
    let mut count = 0;
    let mut ids = ground.ids()?;
    ids.retain(|id| {
        state::is_drowsy(ground, id) || ground.asleep_dir(id).exists() || later::has_job(ground, id)
    });
    let mut busy = Vec::new();
    for some in ids.chunks(BATCH) {
        let mut orphans = Vec::new();
        for id in some {
            match Lock::try_take(&ground.dir(id)) {
                Ok(Some(lock)) => orphans.extend(prepare(ground, id, lock)),
                // Its holder keeps the lock for a short time, or its wake is blocked; the other
                // containers do not wait for that.
                _ => busy.push(id),
            }
        }
        count += restore_sockets(ground, &orphans, &mut recovery)?;
    }
    for id in busy {
        let lock = match holder::lock_without_wakes(ground, id) {
            Err(Error::NoContainer(_)) => continue,
            other => other?,
        };
        let orphan = prepare(ground, id, lock);
        count += restore_sockets(ground, orphan.as_slice(), &mut recovery)?;
    }
    match &mut recovery {
        // ORDER: drop the rest only at this keeper. Another keeper got no request and would
        // drop all.
        Some(recovery) => recovery.keeper.let_go_unasked()?,
        None => hold::release_rest(ground)?,
    }
    resume_output(ground)?;
    let mut adopter = adopt_running(ground)?;
    let next = match &mut recovery {
        Some(recovery) => Some(Custodian::of(&mut recovery.keeper)?),
        None if adopter.is_some() => adopter.take(),
        // A container that fell asleep meanwhile found the dead keeper's note and wrote none.
        None => Keeper::connect(&ground.places.run)?
            .and_then(|mut keeper| Custodian::of(&mut keeper).ok()),
    };
    if adopter.is_some() && adopter != next {
        return Ok(count); // one of two keepers was killed meanwhile: the next command repeats all
    }
    let _note = hold::lock_note(ground)?;
    match next {
        Some(next) => disk::write_json(&hold::path(ground), &next, Durable::No)?,
        None => disk::remove(&hold::path(ground))?,
    }
    Ok(count)
}

/// Has the output of running containers read again that a killed keeper and its vault had. An error
/// is recorded as an event and does not affect other containers.
fn resume_output(ground: &Ground) -> Result<()> {
    for id in ground.ids()? {
        let Ok(config) = ground.config(&id) else { continue };
        let output = Output::of(ground, &config);
        let resume = || match state::pids(ground, &id) {
            Ok(pids) => output.resume(&mut hold::keeper(ground)?, &pids),
            Err(_) => Ok(()), // it does not run
        };
        if output.has_pipes()
            && let Err(e) = resume()
        {
            let why = [("reader", format!("lost: {e}"))];
            ground.record("log", id.as_str(), config.name.as_str(), &why);
        }
    }
    Ok(())
}

/// Has the first processes of running containers watched by the next keeper, and containers settled
/// whose first process has exited since the last one was killed. An error is recorded as an event
/// and does not affect other containers. Returns the keeper, if any container runs.
fn adopt_running(ground: &Ground) -> Result<Option<Custodian>> {
    let mut adopter = None;
    for id in ground.started()? {
        let Ok(config) = ground.config(&id) else { continue };
        let Ok(Some(init)) = state::observe(ground, &config).map(|it| it.init) else { continue };
        let keeper = match &mut adopter {
            Some(keeper) => keeper,
            none => none.insert(hold::keeper(ground)?),
        };
        if let Err(e) = adopt(ground, keeper, &config, &init) {
            // ORDER: a dead keeper is not this container's failure, and a part of an adoption is none.
            keeper.status()?;
            let why = [("policy", format!("not applied: {e}"))];
            ground.record("restart", id.as_str(), config.name.as_str(), &why);
        }
    }
    adopter.map(|mut keeper| Custodian::of(&mut keeper)).transpose()
}

fn adopt(ground: &Ground, keeper: &mut Keeper, config: &Config, init: &InitRecord) -> Result<()> {
    let id = config.id.as_str();
    let Some(process) = state::handle(init) else { return Ok(keeper.settle(id)?) };
    if proc::status(init.pid).is_ok_and(|stat| stat.ppid == keeper.pid()) {
        return Ok(()); // started since
    }
    keeper.adopt(id, init.pid, process)?;
    io::bound_logs(ground, keeper, config)
}

/// Prepares one container that may have lost its keeper. A drowsy container is thawed. A
/// sleeping container is returned. A running container is killed if its memory is no longer
/// filled. An error is recorded as an event and does not affect other containers.
fn prepare(ground: &Ground, id: &ContainerId, lock: Lock) -> Option<Orphan> {
    let find = || -> Result<Option<Config>> {
        let config = ground.config(id)?;
        let observed = state::observe_locked(ground, &config)?;
        let is_alive = observed.is_alive();
        if let (State::Drowsy, Some(init)) = (observed.state, observed.init) {
            drowsy::resume(ground, &config, init, Reason::Keeper)?;
            return Ok(None);
        }
        if is_alive {
            match later::check(ground, &config) {
                Ok(()) | Err(Error::Unfilled(_)) => {}
                Err(e) => return Err(e),
            }
        }
        end::settle_locked(ground, &config, false)?;
        let sleeps = state::observe(ground, &config)?.state == State::Asleep;
        Ok(sleeps.then_some(config))
    };
    match find() {
        Ok(config) => config.map(|config| Orphan { config, _lock: lock }),
        Err(e) => {
            hold::record_loss(ground, id, "", &e);
            None
        }
    }
}

/// Re-creates the sockets of some sleeping containers and passes them to a keeper. Returns for
/// how many that succeeded.
fn restore_sockets(
    ground: &Ground,
    orphans: &[Orphan],
    recovery: &mut Option<Recovery>,
) -> Result<usize> {
    if orphans.is_empty() {
        return Ok(0);
    }
    // Not earlier: if no container sleeps, neither keeper nor helper is needed.
    let recovery = match recovery {
        Some(recovery) => recovery,
        none => none.insert(Recovery::begin(ground)?),
    };
    let mut count = 0;
    for Orphan { config, .. } in orphans {
        match restore_sockets_of(ground, config, recovery) {
            Ok(()) => count += 1,
            Err(e) => {
                recovery.keeper.status()?; // a dead keeper is not this container's failure
                hold::record_loss(ground, &config.id, config.name.as_str(), &e);
            }
        }
    }
    Ok(count)
}

fn restore_sockets_of(ground: &Ground, config: &Config, recovery: &mut Recovery) -> Result<()> {
    end::release_objects(ground, config)?; // leftovers of an interrupted wake
    match recovery.keeper.holds(config.id.as_str())? {
        // Received from the vault, or from a failed wake (`hold::hold_again`).
        true => {
            let reader = Reader::open(&ground.asleep_dir(&config.id))?;
            if let Some(after_ms) = policy::alarm_ms(ground, config, reader.records()) {
                recovery.keeper.set_alarm(config.id.as_str(), after_ms)?;
            }
        }
        false => {
            net::announce(ground, config)?;
            recovery.listener.listen(ground, &ground.dir(&config.id))?;
        }
    }
    net::publish_ports(ground, config)
}
