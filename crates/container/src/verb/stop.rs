//! `stop` and `kill`.
//!
//! Uses `ground`, `state`, `exit`, `freeze`, `pending`, `holder`, `policy`, `unwoken`, `admission`, `end`, `start`
//! and `wake`.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use dormouse_kernel::pidfd;
use dormouse_model::{Config, ContainerId, State};

use crate::admission::Admitted;
use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::exit::SIGKILL;
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::policy::Reason;
use crate::start::Running;
use crate::{admission, end, freeze, holder, state, unwoken, wake};

/// The least time that a program has for its stop signal after a wake, or the whole timeout if that is
/// shorter.
const AFTER_WAKE_MIN: Duration = Duration::from_secs(1);

/// Stack of the thread of a wake, as that of a program.
const WAKE_STACK_BYTES: usize = 8 << 20;

/// Sends the stop signal to the first process, and kills all processes if it has not exited
/// after the timeout (the container's own if none is given). An asleep container is woken for the
/// signal, unless the timeout is 0. The timeout includes the wake. A stopped container stays stopped,
/// and a pending restart is cancelled.
///
/// Errors: a container that cannot be woken is asleep as before. A wake that is blocked, here or in another
/// process, is such an error after the longest time of a wake ([`holder::wake_limit`]); with a timeout of 0 a wake
/// in progress is ended.
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
            true => admission::lock_to_end(ground, id)?,
            false => match admission::lock_to_wake_by(ground, id, began.checked_add(timeout)) {
                Err(e @ Error::NotAdmitted(_)) => return Err(cannot_wake(&e)),
                other => other?,
            },
        };
        // ORDER: the lock is dropped first: the daemon looks at the container when the grant is closed.
        let Admitted { grant: _grant, config, lock, .. } = admitted;
        let mut observed = state::observe_locked(ground, &config)?;
        let was_asleep = observed.state == State::Asleep;
        let _lock = if was_asleep {
            if timeout.is_zero() {
                end::end_sleep(ground, &config)?;
                ground.record("stop", id.as_str(), config.name.as_str(), &[]);
                return Ok(());
            }
            // The program handles the signal as if it had been awake: its memory may hold data that it
            // writes at its end.
            let lock = wake_within(ground, &config, lock).map_err(|e| cannot_wake(&e))?;
            observed = state::observe_locked(ground, &config)?;
            lock
        } else {
            lock
        };
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
    let lock = match holder::lock_to_end(ground, id) {
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

/// Wakes an asleep container, and returns its lock. A wake that is blocked ends with this process.
///
/// Errors: [`Error::TooSlow`] after the longest time of a wake. The lock is held until the thread ends.
fn wake_within(ground: &Ground, config: &Config, lock: Lock) -> Result<Lock> {
    let limit = holder::wake_limit(ground, &config.id);
    let (sender, woken) = mpsc::channel();
    let (own, of) = (Ground::new(ground.places.clone()), config.clone());
    let work = move || {
        let woken = wake::wake_locked(&own, &of, Reason::Operator).map(Running::detach);
        drop(sender.send(woken.map(|()| lock)));
    };
    let thread = thread::Builder::new().stack_size(WAKE_STACK_BYTES).spawn(work);
    thread.map_err(Error::file("cannot make", "a thread for the wake"))?;
    woken.recv_timeout(limit).unwrap_or_else(|_| {
        let e = Error::TooSlow(limit);
        unwoken::note(ground, config, &e, Reason::Operator);
        Err(e)
    })
}

/// Sends a signal to the first process. SIGKILL also ends a wake in progress.
pub(crate) fn kill(ground: &Ground, id: &ContainerId, signal: i32) -> Result<()> {
    let lock = match signal {
        SIGKILL => holder::lock_to_end(ground, id)?,
        _ => holder::lock_within(ground, id, Duration::ZERO)?,
    };
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
