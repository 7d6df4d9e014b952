//! Settling of an ended container, and its restart policy.
//!
//! Uses `ground`, `state`, `pending`, `spare`, `end` and `start`.

use std::time::Duration;

use dormouse_launch::ExitStatus;
use dormouse_model::{ContainerId, Restart};

use crate::end::{self, Removal};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::pending;
use crate::spare;
use crate::spec::Stdio;
use crate::start::{self, Running};
use crate::state::{self, Exit};

/// Settles a container whose first process has exited, then restarts or removes it by its
/// policy. The keeper calls this when no command waits for the container, which may be withdrawn already.
///
/// `waits` is called before a restart is waited for.
pub(crate) fn settle(
    ground: &Ground,
    id: &ContainerId,
    waits: impl FnOnce(),
) -> Result<Option<Exit>> {
    let lock = match ground.lock(id) {
        Err(Error::NoContainer(_)) => {
            // It is withdrawn, or was a spare that a killed process has held.
            spare::sweep_one(ground, id)?;
            return end::complete_withdrawn(ground, id).map(|()| None);
        }
        other => other?,
    };
    let config = match ground.config(id) {
        // It was withdrawn while this process waited for the lock.
        Err(Error::NoContainer(_)) => {
            drop(lock);
            return end::complete_withdrawn(ground, id).map(|()| None);
        }
        other => other?,
    };
    let exit = end::settle_locked(ground, &config, true)?;
    let Some(exit) = exit.filter(|e| wants_restart(config.spec.restart, e)) else {
        return Ok(None);
    };
    // The lock is free while we wait, so that an operator can stop a container that keeps
    // failing.
    drop(lock);
    let delay = restart_delay(&exit);
    if !delay.is_zero() {
        waits();
        std::thread::sleep(delay);
    }
    let _lock = match ground.lock(id) {
        Err(Error::NoContainer(_)) => return Ok(Some(exit)),
        other => other?,
    };
    let config = ground.config(id)?;
    let observed = state::observe(ground, &config)?;
    let same = observed.exit.as_ref().is_some_and(|e| {
        e.finished_unix_ms == exit.finished_unix_ms && wants_restart(config.spec.restart, e)
    });
    if !observed.is_alive() && observed.init.is_none() && same {
        ground.record("restart", config.id.as_str(), config.name.as_str(), &[]);
        start::start_locked(ground, &config, Stdio::detached(), exit.past())?.detach();
    }
    Ok(Some(exit))
}

/// Waits for the first process of a container, settles the container and returns the exit
/// status.
///
/// A container that removes itself is withdrawn. The rest of its end is behind the answer, because no other command
/// depends on it: the keeper has it completed when the connection closes. After a killed keeper the next command does
/// so.
///
/// ORDER: the connection is closed before the lock is released, so that the keeper's settler waits for the lock
/// already, and is ahead of the next command.
pub(crate) fn finish(ground: &Ground, mut running: Running) -> Result<ExitStatus> {
    let status = running.wait()?;
    if running.keeper_is_gone {
        // No other process has the status. If the directory is gone, the container was removed.
        let _ = status.write(&ground.run_dir(&running.id), running.pid);
    }
    match end_of(ground, &running, &status)? {
        Some((removal, Rest::Behind)) => {
            drop(running);
            drop(removal);
        }
        ended => {
            // A keeper that died meanwhile needs no report.
            let _ = running.keeper.settled(running.pid);
            ended.map_or(Ok(()), |(removal, _)| removal.complete(ground))?;
        }
    }
    Ok(status)
}

/// When the rest of a removal is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// Before the exit status is returned.
    Before,
    /// Behind the answer, by the keeper.
    Behind,
}

/// The same as [`settle`], but a container that removes itself is withdrawn only.
fn end_of(
    ground: &Ground,
    running: &Running,
    status: &ExitStatus,
) -> Result<Option<(Removal, Rest)>> {
    let id = &running.id;
    let lock = match ground.lock(id) {
        Err(Error::NoContainer(_)) => return Ok(None),
        other => other?,
    };
    let config = match ground.config(id) {
        Err(Error::NoContainer(_)) => return Ok(None), // removed while this waited for the lock
        other => other?,
    };
    if !config.spec.auto_remove {
        drop(lock);
        return settle(ground, id, || {}).map(|_| None);
    }
    let rest = match running.keeper_is_gone || !pending::may_remove_behind(ground) {
        true => Rest::Before,
        false => Rest::Behind,
    };
    if rest == Rest::Behind && end::may_settle_later(ground, &config, running.pid)? {
        let removal = Removal::begin_unsettled(ground, config, lock, status.code)?;
        return Ok(Some((removal, rest)));
    }
    match end::settle_locked(ground, &config, false)? {
        Some(_) => Ok(Some((Removal::begin(ground, config, lock)?, rest))),
        None => Ok(None), // asleep, or never started
    }
}

fn wants_restart(policy: Restart, exit: &Exit) -> bool {
    match policy {
        _ if exit.stopped => false,
        Restart::No => false,
        Restart::Always | Restart::UnlessStopped => true,
        Restart::OnFailure { retries } => {
            exit.code != Some(0) && retries.is_none_or(|r| exit.failures <= r)
        }
    }
}

/// Delay before the restart of a container that ended, as under docker: 100 ms after a short run,
/// doubled with each further one, up to a minute. A container that succeeds waits as well, because its
/// starts would fill the log of events.
fn restart_delay(exit: &Exit) -> Duration {
    match exit.short_runs {
        0 => Duration::ZERO,
        n => Duration::from_millis(100 << (n - 1).min(10)).min(Duration::from_secs(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: Option<i32>, failures: u32, stopped: bool) -> Exit {
        Exit {
            code,
            signal: None,
            oom_killed: false,
            started_unix_ms: 0,
            finished_unix_ms: 0,
            failures,
            short_runs: 0,
            stopped,
        }
    }

    #[test]
    fn restart_policy_matches_podman() {
        let retries = |r| Restart::OnFailure { retries: r };
        assert!(wants_restart(Restart::Always, &exit(Some(0), 0, false)));
        assert!(!wants_restart(Restart::Always, &exit(Some(0), 0, true)), "an operator stopped it");
        assert!(!wants_restart(Restart::No, &exit(Some(1), 1, false)));
        assert!(!wants_restart(retries(None), &exit(Some(0), 0, false)));
        assert!(wants_restart(retries(None), &exit(None, 50, false)));
        assert!(wants_restart(retries(Some(2)), &exit(Some(1), 2, false)));
        assert!(!wants_restart(retries(Some(2)), &exit(Some(1), 3, false)));
    }

    #[test]
    fn restart_waits_longer_after_each_short_run() {
        let delay =
            |short_runs| restart_delay(&Exit { short_runs, ..exit(Some(0), 0, false) }).as_millis();
        let delays: Vec<u128> = [0, 1, 2, 3, 9, 10, 11, u32::MAX].map(delay).into();
        assert_eq!(delays, [0, 100, 200, 400, 25_600, 51_200, 60_000, 60_000]);
    }
}
