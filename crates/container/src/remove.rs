//! Removal of a container and everything that it owns.
//!
//! Uses `ground`, `state`, `net`, `holder`, `unwoken`, `end` and `create`.

use std::time::Duration;

use dormouse_model::{Config, ContainerId, State};

use crate::create::Created;
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::{end, holder, net, state, unwoken};

/// Removes a stopped container and everything that it owns. `volumes` also removes the volumes
/// that were made for it alone. With `force` a running container is killed first, and a wake in progress ends.
pub(crate) fn remove(ground: &Ground, id: &ContainerId, force: bool, volumes: bool) -> Result<()> {
    let _lock = match force {
        true => holder::lock_to_end(ground, id)?,
        false => holder::lock_within(ground, id, Duration::ZERO)?,
    };
    let config = match ground.config(id) {
        Ok(config) => Some(config),
        Err(Error::Corrupt { .. }) if force => None,
        Err(e) => return Err(e),
    };
    if let Some(config) = &config {
        let observed = state::observe_locked(ground, config)?;
        if observed.is_alive() {
            if !force {
                return Err(Error::State {
                    name: config.name.to_string(),
                    state: observed.state,
                    hint: "stop it first, or remove it with --force",
                });
            }
            end::kill_to_remove(ground, config, &observed)?;
        } else if observed.state == State::Asleep {
            if !force {
                return Err(Error::state(
                    config,
                    observed.state,
                    "stop it first, or remove it with --force",
                ));
            }
            end::forget_sleep(ground, config)?;
        } else {
            end::settle_to_remove(ground, config, observed)?;
        }
    }
    if let Some(config) = &config {
        net::end_quiet(ground, config)?;
    }
    remove_locked(ground, id, config.as_ref(), volumes)
}

/// ORDER: kernel objects, then the container's visible directory, then its resources. A kill in
/// between leaves a container that can be removed again, or the rest to the next command.
pub(crate) fn remove_locked(
    ground: &Ground,
    id: &ContainerId,
    config: Option<&Config>,
    volumes: bool,
) -> Result<()> {
    end::tear_down(ground, id, config)?;
    if config.is_none() {
        unwoken::remove(ground, id); // otherwise the end of its sleep has done so
    }
    end::remove_files(ground, id, config, volumes)
}

/// Removes a new container that is not to be started after all.
pub(crate) fn discard(ground: &Ground, created: Created) {
    let config = &created.config;
    let _ = remove_locked(ground, &config.id, Some(config), true); // an earlier error is returned
}
