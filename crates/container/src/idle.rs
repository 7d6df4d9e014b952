//! Suspension of idle containers, as the daemon requests it; and restart, end and wake of those that give memory while
//! the host is short of it.
//!
//! Uses `ground`, `state`, `policy`, `save`, `proof`, `drowsy`, `shortage`, `end`, `warm`, `wake`, `sleep` and `verb`.

use std::time::{Duration, Instant};

use dormouse_checkpoint::Error as CheckpointError;
use dormouse_checkpoint::save::{Wait, waits};
use dormouse_model::{Config, ContainerId, Eviction, State, WakeOnTimer};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::policy::{Idle, Reason, Request, Tier};
use crate::proof::Trial;
use crate::spec::{Stdio, Stream};
use crate::state::{self, Observed};
use crate::verb::{start, stop};
use crate::{drowsy, end, exit, policy, save, shortage, sleep, wake, warm};

/// LIMIT: how long a container that is to give memory by a restart has for its stop signal.
const STOPS_WITHIN: Duration = Duration::from_secs(10);

/// Outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The container is asleep.
    Asleep {
        /// From begin to end.
        took_us: u64,
    },
    /// The container is drowsy.
    Drowsy {
        /// From begin to end.
        took_us: u64,
    },
    /// The container continues, and its memory was pushed out.
    Swapped {
        /// Number of bytes.
        bytes: u64,
    },
    /// A task had run again, or the container has given memory by itself.
    Ran,
    /// Its processes run: it was started again, or woken.
    Began,
    /// The container is not running, or does not exist.
    Gone,
    /// The container cannot sleep now, and was not changed.
    Awake {
        /// The reasons.
        why: String,
    },
}

/// Returns the waits that keep a running container from ever being idle long enough: those with
/// shorter timeouts. Empty for a container that does not fall asleep by itself.
pub(crate) fn stirs(ground: &Ground, id: &ContainerId) -> Result<Vec<Wait>> {
    let config = ground.config(id)?;
    let after = config.spec.sleep.after().into_iter().chain(config.spec.drowsy.after()).min();
    let Some(after) = after.filter(|_| config.spec.wake_on.timer == WakeOnTimer::InTime) else {
        return Ok(Vec::new());
    };
    let mut waits = waits(&save::subject(ground, &config)?)?;
    waits.retain(|wait| wait.at_most < after);
    Ok(waits)
}

/// Returns the waits of a running container whose timeouts end a sleep before `at_least` has passed.
pub(crate) fn short_waits(
    ground: &Ground,
    id: &ContainerId,
    at_least: Duration,
) -> Result<Vec<Wait>> {
    let config = ground.config(id)?;
    let ends = |wait: &Wait| config.spec.wake_on.timer.ends_after(wait.at_most);
    let mut waits = waits(&save::subject(ground, &config)?)?;
    waits.retain(|wait| ends(wait).is_some_and(|after| after < at_least));
    Ok(waits)
}

/// Refuses a container that gives no memory in this way: it is paused or being stopped, has another policy by now, or
/// uses no more than its guarantee.
///
/// ORDER: under its lock.
fn check_eviction(ground: &Ground, config: &Config, action: Eviction) -> Result<Observed> {
    let observed = state::observe_locked(ground, config)?;
    if !observed.is_alive() {
        return Err(Error::state(config, observed.state, "it has no process"));
    }
    if observed.init.as_ref().is_some_and(|init| init.stopping) {
        return Err(Error::state(config, State::Running, "it is being stopped"));
    }
    if observed.state == State::Paused {
        return Err(Error::state(config, State::Paused, "unpause it first"));
    }
    if config.spec.eviction() != Some(action) {
        return Err(Error::NotIdle(config.name.to_string()));
    }
    shortage::above_guarantee(ground, config)?;
    Ok(observed)
}

/// Stops a container and starts it again, because the host is short of memory.
fn restart(ground: &Ground, id: &ContainerId) -> Result<()> {
    let config = {
        let _lock = ground.lock(id)?;
        let config = ground.config(id)?;
        check_eviction(ground, &config, Eviction::Restart)?;
        config
    };
    let within = Duration::from_secs(config.spec.stop_timeout_s.into()).min(STOPS_WITHIN);
    stop::stop(ground, id, Some(within))?;
    let stdin = if config.spec.process.stdin { Stream::Kept } else { Stream::Null };
    start::start(ground, id, Stdio { stdin, ..Stdio::detached() })?.detach();
    let reason = policy::reason(Reason::Evicted);
    ground.record("restart", id.as_str(), config.name.as_str(), &reason);
    Ok(())
}

/// Kills a container, because the host is short of memory. It stays stopped.
fn kill(ground: &Ground, id: &ContainerId) -> Result<()> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let observed = check_eviction(ground, &config, Eviction::Kill)?;
    end::kill_locked(ground, &config, &observed)?;
    end::settle_locked(ground, &config, true)?;
    let [reason] = policy::reason(Reason::Evicted);
    let signal = ("signal", exit::SIGKILL.to_string());
    ground.record("kill", id.as_str(), config.name.as_str(), &[signal, reason]);
    Ok(())
}

/// Carries out a request of the daemon; if `idle` is given, only if the container is still idle.
pub(crate) fn fall_asleep(
    ground: &Ground,
    id: &ContainerId,
    idle: Option<&Idle>,
    request: Request,
    reason: Reason,
) -> Outcome {
    let began = Instant::now();
    let took_us = || began.elapsed().as_micros() as u64;
    let fell = match request {
        Request::Suspend(Tier::Asleep) => sleep::sleep(ground, id, idle, reason, Trial::Made)
            .map(|done| done.map(|_| Outcome::Asleep { took_us: took_us() })),
        Request::Suspend(Tier::Drowsy) => drowsy::drowse(ground, id, idle, reason)
            .map(|done| done.map(|_| Outcome::Drowsy { took_us: took_us() })),
        Request::PagesOut => {
            drowsy::swap_out(ground, id, idle).map(|bytes| Some(Outcome::Swapped { bytes }))
        }
        Request::Restart => restart(ground, id).map(|()| Some(Outcome::Began)),
        Request::Kill => kill(ground, id).map(|()| None),
        Request::Wake => wake::wake(ground, id, reason).map(|()| Some(Outcome::Began)),
        Request::Cool => warm::give_up(ground, id).map(|()| None),
    };
    match fell {
        Ok(Some(fell)) => fell,
        // A living container that is left alone, such as a paused one, is tried again after a pause.
        Err(Error::State { state, hint, .. })
            if matches!(reason, Reason::Shortage | Reason::Evicted) && state.is_alive() =>
        {
            Outcome::Awake { why: format!("it is {state}: {hint}") }
        }
        Ok(None) | Err(Error::NoContainer(_) | Error::State { .. }) => Outcome::Gone,
        Err(Error::NotIdle(_)) => Outcome::Ran,
        // All refusals are reported, in one line.
        Err(Error::Checkpoint(CheckpointError::Refused(refusals))) => {
            let all: Vec<String> = refusals.iter().map(ToString::to_string).collect();
            Outcome::Awake { why: all.join("; ") }
        }
        Err(e) => Outcome::Awake { why: e.with_causes() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_is_one_line_of_json() {
        let text = |fell: &Outcome| serde_json::to_string(fell).unwrap();
        assert_eq!(text(&Outcome::Asleep { took_us: 5 }), "{\"asleep\":{\"took_us\":5}}");
        assert_eq!(text(&Outcome::Ran), "\"ran\"");
        let awake = Outcome::Awake { why: "a\nb".into() };
        assert_eq!(serde_json::from_str::<Outcome>(&text(&awake)).unwrap(), awake);
        assert!(!text(&awake).contains('\n'));
    }
}
