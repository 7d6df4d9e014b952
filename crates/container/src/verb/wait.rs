//! `wait`: the exit of a container.
//!
//! Uses `ground`, `state` and `exit`.

use std::os::fd::AsFd;
use std::time::Duration;

use dormouse_launch::Keeper;
use dormouse_model::{ContainerId, State};

use crate::error::{Error, Result};
use crate::event;
use crate::exit::{self, SIGKILL};
use crate::ground::Ground;
use crate::state::{self, Exit};

/// Polling interval of `wait` while the container is asleep.
const ASLEEP_LOOK: Duration = Duration::from_millis(100);

/// Waits until the container is not running and returns its exit; returns at once if it is not
/// running.
pub(crate) fn wait(ground: &Ground, id: &ContainerId) -> Result<Exit> {
    let unknown = || Exit {
        code: None,
        signal: None,
        oom_killed: false,
        started_unix_ms: 0,
        finished_unix_ms: event::now_unix_ms(),
        failures: 0,
        short_runs: 0,
        stopped: false,
    };
    let config = ground.config(id)?;
    loop {
        let mut observed = state::observe(ground, &config)?;
        while observed.state == State::Asleep {
            std::thread::sleep(ASLEEP_LOOK);
            observed = state::observe(ground, &config)?;
        }
        let Some(init) = observed.init.as_ref() else {
            return Ok(observed.exit.unwrap_or_else(unknown));
        };
        let keeper = Keeper::connect(&ground.places.run)?;
        let mut ended = None;
        if let Some(fd) = state::handle(init) {
            // Subscribed before the exit, the keeper reports the status even of a container
            // that is removed as soon as it ends.
            let status = keeper.and_then(|mut keeper| keeper.wait(init.pid).ok());
            ended = match status {
                None => exit::from_kernel(fd.as_fd())?,
                status => status,
            };
        }
        let exit = ended.map(|status| exit::from_status(init, Some(status)));
        let exit = match exit.map_or_else(|| exit::of(ground, id, init), Ok) {
            Err(Error::NoContainer(_)) => unknown(),
            other => other?,
        };
        // SIGKILL may mean that the container fell asleep before this waiter registered.
        let may_sleep = exit.code.is_none() || exit.signal == Some(SIGKILL);
        if may_sleep && state::observe(ground, &config).is_ok_and(|it| it.state == State::Asleep) {
            continue;
        }
        return Ok(exit);
    }
}
