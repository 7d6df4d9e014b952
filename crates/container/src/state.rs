//! State of a container: its records, and the state derived from them.
//!
//! `RUN/c/ID/init.json` names the first process, and `LIB/containers/ID/exit.json` has its last exit.
//! A state is never stored where it could become false: [`observe`] derives it from both records, the
//! directory `asleep/` and the kernel. The lock `RUN/c/ID/exec.lock` shows that an exec is in transit
//! ([`crate::exec`]).
//!
//! Uses `user`, `ground` and `shortage`.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_kernel::cgroup::Cgroup;
use dormouse_kernel::{pidfd, proc};
use dormouse_model::{Config, ContainerId, State};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::shortage::Shortages;
use crate::user::PasswdUser;

/// LIMIT: how long a process without its starter may take to exit.
const DOOMED_WAIT: Duration = Duration::from_secs(5);

/// The record of the first process, beside the checkpoint of an asleep container.
pub(crate) const SLEPT: &str = "init.json";

/// LIMIT: how long a verb waits for an exec to reach its program.
const STARTED_WITHIN: Duration = Duration::from_secs(2);

/// A run of less time is short.
const SHORT_RUN_MS: i64 = 10_000;

/// `RUN/c/ID/init.json`: the first process of a container that was started in this boot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct InitRecord {
    /// Its pid in the host's pid namespace.
    pub(crate) pid: u32,
    /// Its start time in clock ticks since boot (proc(5), field 22): pid and start time name a
    /// process once and for all within a boot.
    pub(crate) start_time: u64,
    pub(crate) started_unix_ms: i64,
    #[serde(default)]
    pub(crate) paused: bool,
    /// When it became drowsy, that is, frozen until an event arrives (`crate::drowsy`).
    #[serde(default)]
    pub(crate) drowsy_unix_ms: Option<i64>,
    /// Its terminal is held by the keeper.
    #[serde(default)]
    pub(crate) console: bool,
    /// An operator stops it, so its restart policy is not applied.
    #[serde(default)]
    pub(crate) stopping: bool,
    /// Starts after a failure, without a success in between.
    #[serde(default)]
    pub(crate) failures: u32,
    /// Short runs in a row before this one.
    #[serde(default)]
    pub(crate) short_runs: u32,
    /// Set while it falls asleep or wakes: if it is killed now, it is asleep (`crate::sleep`).
    #[serde(default)]
    pub(crate) sleeping: bool,
    /// Set by a wake until all memory and descriptors are there: none of its processes has run. If the
    /// wake is interrupted now, they are killed, and it is asleep.
    #[serde(default)]
    pub(crate) unready: bool,
    /// The user of its first process at the start. A wake does not look the user up again, in a file that
    /// the container may have changed. Older programs recorded none.
    #[serde(default)]
    pub(crate) user: Option<PasswdUser>,
    /// The memory with which it was restored; 0 if it was not.
    #[serde(default)]
    pub(crate) restored_bytes: u64,
    /// How often it woke in this life, from sleep and from drowsiness.
    #[serde(default)]
    pub(crate) wakes: u32,
    /// The number of its root file system (st_dev). Programs keep it with numbers of files, and compare both: a restore
    /// uses it again where the kernel has it free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<u64>,
    /// Its sleeps for want of memory in this life (`crate::shortage`).
    #[serde(default, skip_serializing_if = "Shortages::is_none")]
    pub(crate) shortages: Shortages,
}

/// `LIB/containers/ID/exit.json`: how the first process ended last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The program's exit status; 128 and the signal's number if it was killed; `None` if the
    /// status is not known (the keeper was killed, the host went down).
    pub code: Option<i32>,
    /// The signal that ended it.
    #[serde(default)]
    pub signal: Option<i32>,
    /// The kernel's OOM killer ended a process of the container.
    #[serde(default)]
    pub oom_killed: bool,
    /// When it was started, in milliseconds since the epoch.
    pub started_unix_ms: i64,
    /// When it ended.
    pub finished_unix_ms: i64,
    /// Starts after a failure, without a success in between.
    #[serde(default)]
    pub failures: u32,
    /// Short runs in a row, with this one.
    #[serde(default)]
    pub short_runs: u32,
    /// An operator stopped it.
    #[serde(default)]
    pub stopped: bool,
}

impl Exit {
    /// Returns whether the run was a short one.
    pub(crate) fn is_short(&self) -> bool {
        self.finished_unix_ms - self.started_unix_ms < SHORT_RUN_MS
    }

    /// Returns the counts for the next run.
    pub(crate) fn past(&self) -> Past {
        Past { failures: self.failures, short_runs: self.short_runs }
    }
}

/// Counts of a container's earlier runs, for the next one.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Past {
    pub(crate) failures: u32,
    pub(crate) short_runs: u32,
}

/// Observed state of a container.
#[derive(Debug, Clone)]
pub(crate) struct Observed {
    pub(crate) state: State,
    /// The record of its first process, also if that has exited and is not settled yet.
    pub(crate) init: Option<InitRecord>,
    pub(crate) exit: Option<Exit>,
    /// When its checkpoint was published, if it has one to wake from.
    pub(crate) asleep_unix_ms: Option<i64>,
}

impl Observed {
    /// Returns whether it has a process.
    pub(crate) fn is_alive(&self) -> bool {
        matches!(self.state, State::Running | State::Paused | State::Drowsy)
    }

    /// Returns whether its first process has exited and is still on record.
    pub(crate) fn needs_settling(&self) -> bool {
        self.init.is_some() && !self.is_alive()
    }
}

/// Returns the state of a container without changing anything.
pub(crate) fn observe(ground: &Ground, config: &Config) -> Result<Observed> {
    // ORDER: settling writes the exit record, then removes the record of the process. Reading
    // in the other order could miss both and report an unknown exit.
    let read_init = || read_init(ground, &config.id);
    let mut init: Option<InitRecord> = read_init()?;
    let may_sleep = init.as_ref().is_none_or(|init| init.sleeping);
    let asleep_unix_ms = may_sleep.then(|| asleep_since(ground, &config.id)).flatten();
    let asleep = asleep_unix_ms.is_some();
    if init.is_none() && !asleep {
        init = read_init()?; // the container may have woken in between
    }
    // The exit before the current sleep is not needed.
    let read_exit = || disk::read_json(&ground.dir(&config.id).join("exit.json"));
    let exit = if asleep && init.is_none() { None } else { read_exit()? };
    let state = match (&init, &exit) {
        (Some(init), _) if is_alive(init) => match init.drowsy_unix_ms {
            _ if init.paused => State::Paused,
            Some(_) => State::Drowsy,
            None => State::Running,
        },
        _ if asleep => State::Asleep,
        (None, None) => State::Created,
        _ => State::Stopped,
    };
    Ok(Observed { state, init, exit, asleep_unix_ms })
}

/// Returns the state for a holder of the container's lock. If the first process is about to
/// exit, because its start, sleep or wake was interrupted, it has exited when this returns.
pub(crate) fn observe_locked(ground: &Ground, config: &Config) -> Result<Observed> {
    let look = || observe(ground, config);
    when_exited(look()?, is_doomed, look)
}

/// Waits for a first process that is about to exit, and then looks again.
fn when_exited(
    observed: Observed,
    is_doomed: impl FnOnce(&InitRecord) -> bool,
    look: impl Fn() -> Result<Observed>,
) -> Result<Observed> {
    let doomed = observed.init.as_ref().filter(|init| observed.is_alive() && is_doomed(init));
    let Some(init) = doomed else { return Ok(observed) };
    // Without a handle it has exited since the look that found it alive.
    if let Some(fd) = handle(init) {
        let wait = pidfd::wait(fd, Some(DOOMED_WAIT));
        wait.map_err(Error::call("cannot wait for the container"))?;
    }
    look()
}

/// Returns the record and a pidfd of its first process, which is alive.
pub(crate) fn alive(ground: &Ground, config: &Config) -> Result<(InitRecord, OwnedFd)> {
    let observed = observe(ground, config)?;
    let state = observed.state;
    let stopped = || match state {
        State::Asleep => Error::state(config, state, "wake it first"),
        _ => Error::state(config, state, "start it first"),
    };
    let is_alive = observed.is_alive();
    let init = observed.init.filter(|_| is_alive);
    let init = init.ok_or_else(stopped)?;
    // The pid could have been used again between the look and this: the handle decides.
    let fd = handle(&init).ok_or_else(|| Error::state(config, State::Stopped, "start it first"))?;
    Ok((init, fd))
}

/// Its control groups, while it runs.
pub(crate) fn cgroup(ground: &Ground, config: &Config) -> Result<Cgroup> {
    let found = ground.cgroups()?.find(config.id.as_str())?;
    found.ok_or_else(|| Error::state(config, State::Stopped, "start it first"))
}

/// The host's pids of all its processes.
pub(crate) fn pids(ground: &Ground, id: &ContainerId) -> Result<Vec<u32>> {
    let config = ground.config(id)?;
    alive(ground, &config)?;
    Ok(cgroup(ground, &config)?.pids()?)
}

/// The record of the first process, in the runtime directory of a container.
pub(crate) const INIT: &str = "init.json";

/// Reads the record of the first process; `None` if there is none.
pub(crate) fn read_init(ground: &Ground, id: &ContainerId) -> Result<Option<InitRecord>> {
    disk::read_json(&ground.run_dir(id).join(INIT))
}

/// Writes the record of the first process.
pub(crate) fn write_init(ground: &Ground, id: &ContainerId, init: &InitRecord) -> Result<()> {
    disk::write_json(&ground.run_dir(id).join(INIT), init, Durable::No)
}

/// Writes the record of the last exit.
pub(crate) fn write_exit(ground: &Ground, id: &ContainerId, exit: &Exit) -> Result<()> {
    disk::write_json(&ground.dir(id).join("exit.json"), exit, Durable::No)
}

/// Returns the saved record of an asleep container's first process; `None` if none was written, a power
/// cut lost it, or it is damaged. The checkpoint does not need the record: an event names the damage, and
/// the start time of the container is then that of its wake.
pub(crate) fn slept(ground: &Ground, id: &ContainerId) -> Result<Option<InitRecord>> {
    let path = ground.asleep_dir(id).join(SLEPT);
    match disk::read_with_checksum::<InitRecord>(&path) {
        Err(e @ Error::Corrupt { .. }) => {
            let name = ground.config(id).map(|config| config.name.as_str().to_owned());
            let name = name.unwrap_or_default();
            ground.record("sleep", id.as_str(), &name, &[("damaged", e.to_string())]);
            Ok(None)
        }
        other => other,
    }
}

/// Returns when a container fell asleep: the time when its checkpoint was published.
fn asleep_since(ground: &Ground, id: &ContainerId) -> Option<i64> {
    let published = fs::metadata(ground.asleep_dir(id)).and_then(|meta| meta.modified()).ok()?;
    Some(published.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis() as i64)
}

/// Returns whether a container is drowsy by its record.
pub(crate) fn is_drowsy(ground: &Ground, id: &ContainerId) -> bool {
    let init = read_init(ground, id);
    init.is_ok_and(|init| init.is_some_and(|init| init.drowsy_unix_ms.is_some()))
}

/// The lock of an exec in transit.
pub(crate) fn exec_lock(ground: &Ground, id: &ContainerId) -> PathBuf {
    ground.run_dir(id).join("exec.lock")
}

/// Returns whether an exec is in transit into a container. The caller holds the container's
/// lock, so no other exec begins.
pub(crate) fn is_entered(ground: &Ground, id: &ContainerId) -> Result<bool> {
    let path = exec_lock(ground, id);
    Ok(path.exists() && Lock::try_take(&path)?.is_none())
}

/// Waits until no exec is in transit into a container. The caller holds the container's lock.
///
/// Errors: [`Error::Entered`] where that takes too long.
pub(crate) fn wait_for_exec(ground: &Ground, config: &Config) -> Result<()> {
    let until = Instant::now() + STARTED_WITHIN;
    while is_entered(ground, &config.id)? {
        if Instant::now() > until {
            return Err(Error::Entered(config.name.to_string()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns whether a recorded process still runs; a zombie does not.
fn is_alive(init: &InitRecord) -> bool {
    handle(init).is_some_and(pidfd::is_alive)
}

/// Returns whether a process is about to exit because its starter has died: a newborn before
/// execve, or a restored process that is killed with its restorer. Valid only under the container's
/// lock; otherwise the starter may still be at work.
fn is_doomed(init: &InitRecord) -> bool {
    if init.unready {
        return true;
    }
    let exe = |pid: u64| fs::read_link(format!("/proc/{pid}/exe"));
    let Ok(fields) = proc::fields(init.pid) else { return true };
    // ORDER: a killed process then releases its memory, and has no executable any more.
    let is_ending = proc::is_ending(init.pid, &fields);
    let Ok(program) = exe(init.pid.into()) else { return true };
    let is_newborn = fields.field("Name") == Some("dormouse-keeper")
        && program.starts_with("/memfd:dormouse-keeper");
    // A killed restorer loses its memory before its locks, and its tracees after them.
    let tracer = fields.number("TracerPid").filter(|tracer| *tracer != 0);
    is_ending || is_newborn || tracer.is_some_and(|tracer| exe(tracer).is_err())
}

/// Returns a pidfd of a recorded process, if it still exists.
pub(crate) fn handle(init: &InitRecord) -> Option<OwnedFd> {
    pidfd::open_exactly(init.pid, init.start_time).ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::process::Command;

    use dormouse_kernel::call::{self, Stop, TraceOptions};

    use super::*;

    /// PTRACE_O_TRACEEXIT (ptrace(2)): a stop after the signal was taken and before memory is released.
    const TRACE_EXIT: u64 = 0x40;
    /// PTRACE_EVENT_EXIT.
    const EXIT: i32 = 6;
    const USR1: i32 = 10;
    const KILL: i32 = 9;

    fn record_of(pid: u32) -> InitRecord {
        let record = serde_json::json!({
            "pid": pid, "start_time": proc::start_time(pid).unwrap(), "started_unix_ms": 0,
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn killed_process_is_doomed_before_it_has_released_its_memory() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let init = record_of(pid);
        call::seize(pid, TraceOptions::from_bits_retain(TRACE_EXIT)).unwrap();
        // A stop for another signal, in whose place it takes SIGKILL: that is pending nowhere then.
        pidfd::send_signal(handle(&init).unwrap().as_fd(), USR1).unwrap();
        assert!(matches!(call::wait_stop(Some(pid)), Ok((_, Stop::Signal(USR1)))));
        assert!(!is_doomed(&init));
        assert!(
            is_doomed(&InitRecord { unready: true, ..init.clone() }),
            "its wake was interrupted"
        );
        call::resume(pid, KILL).unwrap();
        assert!(matches!(call::wait_stop(Some(pid)), Ok((_, Stop::Event(EXIT, _)))));
        assert!(fs::read_link(format!("/proc/{pid}/exe")).is_ok());
        assert!(is_doomed(&init));
        call::resume(pid, 0).unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn process_that_exits_during_a_look_is_looked_at_again() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let init = record_of(pid);
        let observed =
            |state| Observed { state, init: Some(init.clone()), exit: None, asleep_unix_ms: None };
        let exits = |_: &InitRecord| {
            child.kill().unwrap();
            child.wait().unwrap();
            true
        };
        let seen = when_exited(observed(State::Running), exits, || Ok(observed(State::Asleep)));
        assert_eq!(seen.unwrap().state, State::Asleep);
    }
}
