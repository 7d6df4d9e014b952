//! `stop` and `kill`.
//!
//! Uses `ground`, `state`, `exit`, `freeze`, `pending`, `policy`, `admission`, `end` and `wake`.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dormouse_kernel::pidfd;
use dormouse_model::{ContainerId, State};

use crate::error::{Error, Result};
use crate::exit::SIGKILL;
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::policy::Reason;
use crate::{admission, end, freeze, state, wake};

/// The least time that a program has for its stop signal after a wake, or the whole timeout if that is
/// shorter.
const AFTER_WAKE_MIN: Duration = Duration::from_secs(1);

/// Sends the stop signal to the first process, and kills all processes if it has not exited
/// after the timeout (the container's own if none is given). An asleep container is woken for the
/// signal, unless the timeout is 0. The timeout includes the wake. A stopped container stays stopped,
/// and a pending restart is cancelled.
///
/// Errors: a container that cannot be woken is asleep as before.
pub(crate) fn stop(ground: &Ground, id: &ContainerId, timeout: Option<Duration>) -> Result<()> {
    let config = ground.config(id)?;
    let timeout =
        timeout.unwrap_or_else(|| Duration::from_secs(u64::from(config.spec.stop_timeout_s)));
    let began = Instant::now();
    let cannot_wake = |e: &Error| {
        Error::Invalid(format!(
            "cannot wake '{}' for its stop signal, so it sleeps on: {}; 'stop --time 0' ends it \
             without the signal, and its memory is lost",
            config.name.as_str(),
            e.with_causes()
        ))
    };
    let (fd, was_asleep) = {
        // A timeout of 0 wakes nothing, and needs no grant.
        let admitted = match timeout.is_zero() {
            true => admission::lock(ground, id, None)?,
            false => match admission::lock_to_wake_by(ground, id, began.checked_add(timeout)) {
                Err(e @ Error::NotAdmitted(_)) => return Err(cannot_wake(&e)),
                other => other?,
            },
        };
        let config = admitted.config.clone();
        let mut observed = state::observe_locked(ground, &config)?;
        let was_asleep = observed.state == State::Asleep;
        if was_asleep {
            if timeout.is_zero() {
                end::end_sleep(ground, &config)?;
                ground.record("stop", id.as_str(), config.name.as_str(), &[]);
                return Ok(());
            }
            // The program handles the signal as if it had been awake: its memory may hold data that it
            // writes at its end.
            let woken = wake::wake_locked(ground, &config, Reason::Operator);
            woken.map_err(|e| cannot_wake(&e))?.detach();
            observed = state::observe_locked(ground, &config)?;
        }
        if !observed.is_alive() {
            // A pending restart is cancelled.
            if let Some(mut exit) = end::settle_locked(ground, &config, true)?
                && !exit.stopped
                && !config.spec.auto_remove
            {
                exit.stopped = true;
                state::write_exit(ground, id, &exit)?;
            }
            return Ok(());
        }
        let (mut init, fd) = state::alive(ground, &config)?;
        let thaws = init.paused || init.drowsy_unix_ms.is_some();
        let _doing = thaws.then(|| pending::intend(ground, id, &Intent::Freezer)).transpose()?;
        init.stopping = true;
        state::write_init(ground, id, &init)?;
        let sent = pidfd::send_signal(fd.as_fd(), config.spec.stop_signal);
        sent.map_err(Error::call("cannot send the stop signal"))?;
        if thaws {
            freeze::thaw(ground, &config, &mut init)?;
        }
        (fd, was_asleep)
    };
    let left = match was_asleep {
        true => timeout.saturating_sub(began.elapsed()).max(timeout.min(AFTER_WAKE_MIN)),
        false => timeout,
    };
    // The lock is free while we wait: the container must be able to settle itself meanwhile.
    let ended = pidfd::wait(fd.as_fd(), Some(left));
    let ended = ended.map_err(Error::call("cannot wait for the container"))?;
    let lock = match ground.lock(id) {
        Err(Error::NoContainer(_)) => return Ok(()), // --rm, removed by another command
        other => other?,
    };
    let config = ground.config(id)?;
    let observed = state::observe_locked(ground, &config)?;
    // A container that was put to sleep meanwhile has no process, and would be restored.
    if observed.state == State::Asleep {
        end::end_sleep(ground, &config)?;
    } else if !ended && observed.is_alive() {
        end::kill_locked(ground, &config, &observed)?;
    }
    end::settle_locked(ground, &config, true)?;
    drop(lock);
    ground.record("stop", id.as_str(), config.name.as_str(), &[]);
    Ok(())
}

/// Sends a signal to the first process.
pub(crate) fn kill(ground: &Ground, id: &ContainerId, signal: i32) -> Result<()> {
    let lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let observed = state::observe_locked(ground, &config)?;
    if observed.state == State::Asleep && signal == SIGKILL {
        return end::end_sleep(ground, &config);
    }
    let (mut init, fd) = state::alive(ground, &config)?;
    // Signals to a paused container stay pending; a drowsy container is woken by them.
    let is_drowsy = init.drowsy_unix_ms.is_some();
    let thaws = is_drowsy || signal == SIGKILL && init.paused;
    let _doing = thaws.then(|| pending::intend(ground, id, &Intent::Freezer)).transpose()?;
    if signal == SIGKILL {
        // A frozen v1 cgroup keeps even SIGKILL waiting; an ended container does not restart.
        init.stopping = true;
        state::write_init(ground, id, &init)?;
    }
    pidfd::send_signal(fd.as_fd(), signal).map_err(Error::call("cannot send the signal"))?;
    if thaws {
        freeze::thaw(ground, &config, &mut init)?;
    }
    drop(lock);
    ground.record("kill", id.as_str(), config.name.as_str(), &[("signal", signal.to_string())]);
    Ok(())
}
