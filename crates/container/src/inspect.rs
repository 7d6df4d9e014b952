//! Facts about one container, for lists and `inspect`.
//!
//! Uses `ground`, `state`, `exit`, `unwoken` and `warmth`.

use dormouse_kernel::cgroup::Stats;
use dormouse_model::{Config, ContainerId, State};

use crate::error::Result;
use crate::ground::Ground;
use crate::state::{self, Exit};
use crate::unwoken::FailedWake;
use crate::{exit, unwoken, warmth};

/// Everything about a container that lists and `inspect` show.
#[derive(Debug, Clone)]
pub struct Details {
    /// Its configuration.
    pub config: Config,
    /// Its state at the moment of looking.
    pub state: State,
    /// The host's pid of its first process, while it lives.
    pub pid: Option<u32>,
    /// When it was last started, in milliseconds since the epoch.
    pub started_unix_ms: Option<i64>,
    /// When it fell asleep, or became drowsy, while it is.
    pub asleep_unix_ms: Option<i64>,
    /// How it ended last; `None` if it never did.
    pub exit: Option<Exit>,
    /// Why it could not be woken, while it is asleep.
    pub failed_wake: Option<FailedWake>,
    /// It is asleep because it has used its memory.
    pub is_short_of_memory: bool,
    /// Its memory above its guarantee, in bytes, if it is asleep because the host was short.
    pub evicted_above_bytes: Option<u64>,
    /// It is asleep and warm: its next wake has less to make.
    pub is_warm: bool,
    /// Starts after a failure, without a success in between.
    pub restarts: u32,
}

/// Everything about one container.
pub(crate) fn inspect(ground: &Ground, id: &ContainerId) -> Result<Details> {
    let config = ground.config(id)?;
    let observed = state::observe(ground, &config)?;
    let init = observed.init.as_ref();
    let pid = init.filter(|_| observed.is_alive()).map(|i| i.pid);
    let (slept, asleep_unix_ms) = match observed.state {
        State::Asleep => (state::slept(ground, id)?, observed.asleep_unix_ms),
        State::Drowsy => (None, init.and_then(|init| init.drowsy_unix_ms)),
        _ => (None, None),
    };
    let started = init.or(slept.as_ref()).map(|i| i.started_unix_ms);
    let started_unix_ms = started.or(observed.exit.as_ref().map(|e| e.started_unix_ms));
    let failures = init.or(slept.as_ref()).map(|i| i.failures);
    let restarts = failures.or(observed.exit.as_ref().map(|e| e.failures)).unwrap_or(0);
    let exit = match init {
        Some(init) if !observed.is_alive() => Some(exit::of(ground, &config.id, init)?),
        _ => observed.exit,
    };
    let failed_wake = match observed.state {
        State::Asleep => unwoken::of(ground, id),
        _ => None,
    };
    let may_be_warm = observed.state == State::Asleep && init.is_none();
    let is_warm = may_be_warm && warmth::of(ground, id).is_some_and(|warm| warm.is_fit);
    let shortages = slept.map(|slept| slept.shortages);
    let evicted_above_bytes = shortages.as_ref().and_then(|all| all.evicted_above_bytes());
    let is_short_of_memory = shortages.is_some_and(|all| all.is_of_its_own());
    Ok(Details {
        config,
        state: observed.state,
        pid,
        started_unix_ms,
        asleep_unix_ms,
        exit,
        failed_wake,
        is_short_of_memory,
        evicted_above_bytes,
        is_warm,
        restarts,
    })
}

/// Processor, memory and disk use so far.
pub(crate) fn stats(ground: &Ground, id: &ContainerId) -> Result<Stats> {
    let config = ground.config(id)?;
    state::alive(ground, &config)?;
    Ok(state::cgroup(ground, &config)?.stats()?)
}
