//! `pause`, `unpause`, and a freeze for the length of a closure.
//!
//! Uses `ground`, `state`, `hold`, `freeze`, `pending` and `inspect`.

use dormouse_model::{ContainerId, State};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::{freeze, hold, inspect, state};

/// Freezes all processes (cgroups(7), freezer). A drowsy container becomes paused.
pub(crate) fn pause(ground: &Ground, id: &ContainerId) -> Result<()> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let (mut init, _) = state::alive(ground, &config)?;
    if init.paused {
        return Err(Error::state(&config, State::Paused, "it can only be paused once"));
    }
    let _doing = pending::intend(ground, id, &Intent::Freezer)?;
    state::cgroup(ground, &config)?.freeze()?;
    let was_drowsy = init.drowsy_unix_ms.take().is_some();
    init.paused = true;
    state::write_init(ground, id, &init)?;
    if was_drowsy {
        hold::release(ground, id)?;
    }
    ground.record("pause", id.as_str(), config.name.as_str(), &[]);
    Ok(())
}

/// Thaws all processes.
pub(crate) fn unpause(ground: &Ground, id: &ContainerId) -> Result<()> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let (mut init, _) = state::alive(ground, &config)?;
    if !init.paused {
        return Err(Error::state(&config, State::Running, "it is not paused"));
    }
    let _doing = pending::intend(ground, id, &Intent::Freezer)?;
    freeze::thaw(ground, &config, &mut init)?;
    ground.record("unpause", config.id.as_str(), config.name.as_str(), &[]);
    Ok(())
}

/// Runs a closure while a running container is frozen; a paused container stays paused.
pub(crate) fn while_frozen<T>(
    ground: &Ground,
    id: &ContainerId,
    f: impl FnOnce() -> T,
) -> Result<T> {
    if !matches!(inspect::inspect(ground, id)?.state, State::Running | State::Drowsy) {
        return Ok(f());
    }
    let _intent = pending::intend(ground, id, &Intent::Pause)?;
    pause(ground, id)?;
    let done = f();
    unpause(ground, id)?;
    Ok(done)
}
