//! Exit of a first process: from the keeper's record, from the keeper itself, or from the kernel.
//!
//! Uses `ground` and `state`.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use dormouse_kernel::proc::Stat;
use dormouse_kernel::{pidfd, proc};
use dormouse_launch::{ExitStatus, Keeper};
use dormouse_model::ContainerId;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::state::{Exit, InitRecord};
use crate::{disk, event};

/// The signal that ends the processes of a container that falls asleep.
pub(crate) const SIGKILL: i32 = 9;

/// LIMIT: number of queries to a keeper for the exit status of a process that it has yet to reap.
const QUERIES_MAX: usize = 100;

/// Interval of the queries about an adopted process.
const ADOPTED_WAIT: Duration = Duration::from_millis(10);

/// How long a keeper may take to write the exit of an adopted process: it waits half of this time
/// until the host's init has reaped the process.
const ADOPTED_WITHIN: Duration = Duration::from_secs(10);

/// How long the kernel may take to hand a killed keeper's child to another process that reaps it.
const REAP_WAIT: Duration = Duration::from_millis(500);

/// A way to find the exit of a recorded process.
pub(crate) type Find = fn(&Ground, &ContainerId, &InitRecord) -> Result<Exit>;

/// Returns the exit of a recorded process, from the keeper's record.
pub(crate) fn of(ground: &Ground, id: &ContainerId, init: &InitRecord) -> Result<Exit> {
    find(ground, id, init, true)
}

/// Returns the exit of a process whose container is being removed. Only an event shows it, so there is no
/// wait until the host's init has reaped an adopted process: the status is unknown then.
pub(crate) fn at_removal(ground: &Ground, id: &ContainerId, init: &InitRecord) -> Result<Exit> {
    find(ground, id, init, false)
}

/// Like [`at_removal`], for a process that was just killed: an unknown status is that of SIGKILL.
pub(crate) fn at_forced_removal(
    ground: &Ground,
    id: &ContainerId,
    init: &InitRecord,
) -> Result<Exit> {
    let exit = find(ground, id, init, false)?;
    Ok(match exit.code {
        Some(_) => exit,
        None => Exit { code: Some(128 + SIGKILL), signal: Some(SIGKILL), ..exit },
    })
}

/// `waits`: until the host's init has reaped an adopted process, and its status is known.
fn find(ground: &Ground, id: &ContainerId, init: &InitRecord, waits: bool) -> Result<Exit> {
    for _ in 0..QUERIES_MAX {
        if let Some(exit) = written(ground, id, init)? {
            return Ok(exit);
        }
        let Some(mut keeper) = Keeper::connect(&ground.places.run)? else { break };
        let stat = proc::status(init.pid);
        let is_parent =
            |stat: Stat| stat.start_time == init.start_time && stat.ppid == keeper.pid();
        if !stat.is_ok_and(is_parent) {
            // ORDER: a keeper writes the exit before it answers this request. A keeper that
            // died meanwhile has written it too, or never will. A keeper of an older program
            // adopts no process.
            let until = Instant::now() + ADOPTED_WITHIN;
            while waits
                && keeper.has_adopted(id.as_str()).unwrap_or(false)
                && Instant::now() < until
            {
                std::thread::sleep(ADOPTED_WAIT);
            }
            break;
        }
        // This keeper is the parent: it will report the exit, or has reaped the process just
        // now.
        if let Ok(status) = keeper.wait(init.pid) {
            return Ok(from_status(init, Some(status)));
        }
    }
    Ok(written(ground, id, init)?.unwrap_or_else(|| from_status(init, None)))
}

fn written(ground: &Ground, id: &ContainerId, init: &InitRecord) -> Result<Option<Exit>> {
    if let Some(status) = ExitStatus::read(&ground.run_dir(id), init.pid)? {
        return Ok(Some(from_status(init, Some(status))));
    }
    // Another command may have settled it meanwhile.
    let settled = disk::read_json::<Exit>(&ground.dir(id).join("exit.json"))?;
    Ok(settled.filter(|exit| exit.started_unix_ms == init.started_unix_ms))
}

/// The exit of a recorded process with this status; an unknown one has none.
pub(crate) fn from_status(init: &InitRecord, status: Option<ExitStatus>) -> Exit {
    let finished = status.as_ref().map_or_else(event::now_unix_ms, |s| s.finished_unix_ms);
    Exit {
        code: status.as_ref().map(|s| s.code),
        signal: status.as_ref().and_then(|s| s.signal),
        oom_killed: false,
        started_unix_ms: init.started_unix_ms,
        finished_unix_ms: finished,
        failures: init.failures,
        short_runs: init.short_runs,
        stopped: init.stopping,
    }
}

/// Returns how a process ended, from the kernel, if there is no keeper to report it. Waits for the
/// exit. `None` on kernels that do not keep the status. KERNEL(6.15)
pub(crate) fn from_kernel(process: BorrowedFd<'_>) -> Result<Option<ExitStatus>> {
    pidfd::wait(process, None).map_err(Error::call("cannot wait for the container"))?;
    let until = Instant::now() + REAP_WAIT;
    loop {
        let ended = pidfd::exit_status(process);
        if let Some(exit) = ended.map_err(Error::call("cannot read the container's exit status"))? {
            let signal = match exit {
                dormouse_kernel::process::Exit::Signal(signal) => Some(signal),
                dormouse_kernel::process::Exit::Code(_) => None,
            };
            let finished_unix_ms = event::now_unix_ms();
            return Ok(Some(ExitStatus {
                code: exit.code(),
                signal,
                oom: false,
                finished_unix_ms,
            }));
        }
        if Instant::now() > until {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
