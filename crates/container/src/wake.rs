//! Wake of a sleeping or drowsy container.
//!
//! A wake is a start whose newborn follows a restore program and takes the held sockets into their
//! old places ([`crate::sleep`]).
//!
//! **A failed wake** loses nothing: the container is asleep as before, with the same checkpoint, its
//! sockets are held, and its clients wait ([`crate::unwoken`]).
//!
//! Uses `ground`, `settings`, `state`, `hold`, `usage`, `net`, `pending`, `later`, `policy`, `shortage`, `unwoken`,
//! `admission`, `caller`, `root`, `end`, `listen`, `restore`, `start`, `warm` and `drowsy`.
//!
//! A warm sleeper has its newborn already ([`crate::warm`]).

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use dormouse_kernel::ErrorKind;
use dormouse_launch::Keeper;
use dormouse_model::{Config, ContainerId, State};
use dormouse_parcel::Reader;

use crate::admission::{self, Admitted};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::listen::Origin;
use crate::pending::{self, Intent};
use crate::policy::{self, Reason};
use crate::restore::{Check, RestorePlan};
use crate::start::{self, Running};
use crate::state::{self, Observed};
use crate::{
    caller, drowsy, end, hold, later, net, process, restore, root, settings, shortage, unwoken,
    usage, warm,
};

/// A smaller checkpoint is not kept, and is written anew.
const WOKEN_BYTES_MIN: u64 = 8 << 20;

/// The first pause after a failed wake of a container that was short of memory.
const FAILED_PAUSE_LEAST: Duration = Duration::from_secs(10);

/// LIMIT: number of sockets requested from the keeper before the first one is received.
const AHEAD_MAX: usize = 32;

/// Wakes a container for an event. Returns false if it sleeps on, because none of its clients is to wake it
/// ([`crate::caller`]).
pub(crate) fn wake_for_event(ground: &Ground, id: &ContainerId, reason: Reason) -> Result<bool> {
    // A wake reports the error.
    if reason == Reason::Called && caller::leave_asleep(ground, id).unwrap_or(false) {
        return Ok(false);
    }
    wake(ground, id, reason).map(|()| true)
}

/// Wakes a container; does nothing if it runs.
pub(crate) fn wake(ground: &Ground, id: &ContainerId, reason: Reason) -> Result<()> {
    let Admitted { lock: _lock, config, observed, grant: _grant } =
        admission::lock_to_wake(ground, id)?;
    if let (State::Drowsy, Some(init)) = (observed.state, &observed.init) {
        return drowsy::resume(ground, &config, init.clone(), reason);
    }
    if observed.is_alive() {
        end::stay_awake(ground, &config, observed.init)?;
        // A keeper that has its old descriptors from the vault would request a wake again and
        // again.
        return hold::release(ground, id);
    }
    wake_found(ground, &config, observed, reason).map(Running::detach)
}

/// Wakes an asleep container. The caller holds its lock.
pub(crate) fn wake_locked(ground: &Ground, config: &Config, reason: Reason) -> Result<Running> {
    wake_found(ground, config, state::observe(ground, config)?, reason)
}

/// Wakes a container whose state the caller has read.
fn wake_found(
    ground: &Ground,
    config: &Config,
    observed: Observed,
    reason: Reason,
) -> Result<Running> {
    // A container with an unsettled exit may turn out to be stopped, or asleep.
    let (state, ended) = (observed.state, observed.needs_settling());
    // The wake uses what a warm sleeper has, or releases it.
    if state != State::Asleep || observed.init.is_some() {
        end::settle_found(ground, config, observed, false)?;
    }
    let state = if ended { state::observe(ground, config)?.state } else { state };
    if state != State::Asleep {
        return Err(Error::state(config, state, "only a sleeping container is woken"));
    }
    let mut held = Vec::new();
    let woken = wake_with(ground, config, &mut held, reason);
    if let Err(e) = &woken {
        // ORDER: first held by the keeper and the vault, then on record.
        match policy::sleeps_on(ground, &config.id) {
            None => hold::hold_again(ground, config, &held, true),
            // Its pause continues. The error of the wake is returned.
            Some(pause) => {
                hold::hold_again(ground, &shortage::quiet(config), &held, false);
                let _ = policy::ring_after(ground, &config.id, pause.max(FAILED_PAUSE_LEAST));
            }
        }
        if state::observe(ground, config).is_ok_and(|it| it.state == State::Asleep) {
            let failed = unwoken::note(ground, config, e, reason);
            // The error of the wake is returned.
            let _ = unwoken::reset_clients(ground, config, &failed, &held);
        }
    }
    woken
}

/// Wakes a container with its held sockets. On failure `held` contains the sockets taken from
/// the keeper.
fn wake_with(
    ground: &Ground,
    config: &Config,
    held: &mut Vec<(u32, OwnedFd)>,
    reason: Reason,
) -> Result<Running> {
    // The keeper is scheduled while the checkpoint is read.
    let calling = Keeper::call(&ground.places.run)?;
    let reader = Arc::new(Reader::open(&ground.asleep_dir(&config.id))?);
    usage::check_room(ground, reader.records())?;
    let is_large = reader.records().pages.bytes >= WOKEN_BYTES_MIN;
    let later = later::choose_for_wake(ground, &config.id, &reader);
    let check = Some(Check::begin(&reader, later.as_ref()));
    let mut keeper = hold::complete_call(ground, calling)?;
    let id = config.id.as_str();
    let called = (0..).zip(&reader.records().objects);
    let called = called.filter(|(_, object)| object.is_called_from_outside());
    let called: Vec<u32> = called.map(|(number, _)| number).collect();
    let ahead = called.len().min(AHEAD_MAX);
    called[..ahead].iter().try_for_each(|number| keeper.ask_for(id, *number))?;
    let mut asked = warm::ask(ground, config, &mut keeper)?;
    // The keeper looks the sockets up meanwhile.
    let since = state::slept(ground, &config.id)?;
    let origin = Origin::of(&ground.asleep_dir(&config.id))?;
    let (wakes, beside) = (true, origin.is_some());
    let (addresses, user) =
        origin.map(|origin| (origin.addresses, origin.user)).unwrap_or_default();
    let _doing = pending::intend(ground, &config.id, &Intent::Sleep)?;
    let mut kept = None;
    for (place, number) in called.into_iter().enumerate() {
        // ORDER: the keeper answers in the order of the requests.
        if place == ahead
            && let Some(asked) = asked.take()
        {
            kept = warm::take(ground, config, &mut keeper, asked)?;
        }
        let taken = if place < ahead { keeper.taken() } else { keeper.take(id, number) };
        match taken {
            Ok(socket) => held.push((number, socket)),
            // The socket was never held by this keeper: it is made again.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e.into()),
        }
    }
    if let Some(asked) = asked {
        kept = warm::take(ground, config, &mut keeper, asked)?;
    }
    let (keeper, sockets) = (Cell::new(Some(keeper)), std::mem::take(held));
    let comeback = RestorePlan {
        reader,
        check,
        held: sockets,
        wakes,
        device: since.as_ref().and_then(|since| since.device),
        user: since.as_ref().and_then(|since| since.user.clone()).or(user),
        since,
        addresses,
        beside,
        keeper,
        later,
        common: None,
        keeps_quiet: false,
        watch: Cell::default(),
        has_newborn: kept.is_some(),
    };
    let was_warm = kept.is_some();
    let mut running = match start::start_woken(ground, config, &comeback, kept) {
        // ORDER: now: no other process may have the container's files open when it closes them.
        Ok(running) => {
            drop(comeback);
            running
        }
        Err(e) => {
            *held = comeback.held;
            return Err(e);
        }
    };
    let unmarked =
        state::read_init(ground, &config.id).and_then(|init| end::unmark(ground, config, init));
    let ended = end::end_asleep(ground, config, Some(&mut running.keeper), is_large);
    // Either step commits the wake. A full disk may prevent the first, and a killed keeper the second.
    if let (Err(e), true) = (unmarked, ground.asleep_dir(&config.id).exists()) {
        end::release_objects(ground, config)?;
        return Err(e);
    }
    ended?;
    ground.record("wake", config.id.as_str(), config.name.as_str(), &policy::reason(reason));
    if was_warm {
        // As at each start. A container that runs sees a change of the host's file as late.
        net::refresh(ground, config);
    }
    Ok(running)
}

/// Prepares the parts of a wake that are the same for all containers, in a process that waits
/// for a job. No part has to succeed now.
pub(crate) fn get_ready(ground: &Ground) {
    let _ = (ground.cgroups(), ground.images(), ground.network());
    let _ = settings::callers(&ground.settings());
    let _ = (root::hidden(), process::namespace_limits(), dormouse_kernel::capability::all());
    let _ = (dormouse_kernel::proc::boot_id(), dormouse_kernel::process::touch_memory());
    prepare_next();
    dormouse_kernel::process::map_own_program();
}

/// Prepares the parts that each wake uses up.
pub(crate) fn prepare_next() {
    restore::prepare_watch();
}
