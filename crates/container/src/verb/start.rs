//! `start` and `attach`.
//!
//! Uses `ground`, `state`, `io`, `policy`, `admission`, `spare`, `end`, `start` and `wake`.

use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{ContainerId, State};

use crate::admission::{self, Admitted};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::policy::Reason;
use crate::spec::Stdio;
use crate::start::{self, Running};
use crate::state::{self, InitRecord};
use crate::{end, io, spare, wake};

/// Starts a container that is not running.
pub(crate) fn start(ground: &Ground, id: &ContainerId, io: Stdio) -> Result<Running> {
    let Admitted { lock: _lock, config, observed, grant: _grant } =
        admission::lock_to_wake(ground, id)?;
    if observed.state == State::Drowsy {
        return Err(Error::state(&config, observed.state, "wake it: it is started already"));
    }
    if observed.is_alive() {
        return Err(Error::state(&config, observed.state, "it is started already"));
    }
    if observed.state == State::Asleep {
        return wake::wake_locked(ground, &config, Reason::Operator);
    }
    // ORDER: first: to the settling, its parts are those of an interrupted start.
    let spare = match observed.state {
        State::Created => spare::take_kept(ground, id),
        _ => None,
    };
    if spare.is_none() {
        end::settle_found(ground, &config, observed, false)?;
    }
    start::start_created(ground, &config, io, spare)
}

/// Returns whether an exited first process of a container continues as another one: the container is asleep, or was
/// woken since.
pub(crate) fn fell_asleep(ground: &Ground, running: &Running) -> Result<bool> {
    let config = match ground.config(&running.id) {
        Err(Error::NoContainer(_)) => return Ok(false), // removed
        other => other?,
    };
    let observed = state::observe(ground, &config)?;
    let was_woken = |init: &InitRecord| init.pid != running.pid && init.wakes > 0;
    let is_awake = observed.is_alive() && observed.init.as_ref().is_some_and(was_woken);
    Ok(observed.state == State::Asleep || is_awake)
}

/// Attaches to the terminal or the standard input of a running container; a sleeping one is
/// woken. Without a terminal, its output is in its logs.
pub(crate) fn attach(ground: &Ground, id: &ContainerId) -> Result<Running> {
    let config = ground.config(id)?;
    if state::observe(ground, &config)?.state == State::Asleep {
        wake::wake(ground, id, Reason::Operator)?;
    }
    let (init, pidfd) = state::alive(ground, &config)?;
    let mut keeper = Keeper::connect(&ground.places.run)?.ok_or(LaunchError::KeeperGone)?;
    let kept = io::take_over(&mut keeper, &config)?;
    Ok(Running {
        id: id.clone(),
        pid: init.pid,
        pidfd,
        console: kept.console,
        console_log: kept.console_log,
        stdin: kept.stdin,
        keeper,
        keeper_is_gone: false,
    })
}
