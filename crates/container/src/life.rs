//! A container's life between its start and its end: observing, pausing, signalling, stopping,
//! settling.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_kernel::cgroup::{Cgroup, Stats};
use dormouse_kernel::pidfd;
use dormouse_kernel::proc::{self, Stat};
use dormouse_launch::{ExitStatus, Keeper};
use dormouse_model::{Config, ContainerId, IdMap, MountKind, NetMode, Restart, RootSource, State};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::event::now_unix_ms;
use crate::idle::Why;
use crate::pending::{Intent, remove_tree};
use crate::sleep::SIGKILL;
use crate::spec::{Stdio, Update};

/// LIMIT: number of queries to a keeper for the exit status of a process that it has yet to reap.
const ASKS_MAX: usize = 100;

/// LIMIT: how long a process without its starter may take to exit.
const DOOMED_WAIT: Duration = Duration::from_secs(5);

/// How long the kernel may take to hand a killed keeper's child to another process that reaps it.
const REAP_WAIT: Duration = Duration::from_millis(500);

/// Polling interval of [`Engine::wait`] while the container is asleep.
const ASLEEP_LOOK: Duration = Duration::from_millis(100);

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

/// Observed state of a container.
#[derive(Debug, Clone)]
pub(crate) struct Look {
    pub(crate) state: State,
    /// The record of its first process, also if that has exited and is not settled yet.
    pub(crate) init: Option<InitRecord>,
    pub(crate) exit: Option<Exit>,
    /// When its checkpoint was published, if it has one to wake from.
    pub(crate) asleep_unix_ms: Option<i64>,
}

impl Look {
    pub(crate) fn is_alive(&self) -> bool {
        matches!(self.state, State::Running | State::Paused | State::Drowsy)
    }

    pub(crate) fn needs_settling(&self) -> bool {
        self.init.is_some() && !self.is_alive()
    }
}

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
}

/// Where the output of a container is.
#[derive(Debug, Clone)]
pub struct Logs {
    /// Its standard output, or everything that was written to its terminal.
    pub stdout: PathBuf,
    /// Its standard error; `None` with a terminal.
    pub stderr: Option<PathBuf>,
}

/// The root directory of a container, seen from the host.
#[derive(Debug)]
pub struct Root {
    /// The directory. Paths in it are resolved with RESOLVE_IN_ROOT, or they lead out.
    pub fd: OwnedFd,
    /// Whether the files' owners are host ids (a stopped container) or must be mapped to the
    /// container's ids.
    pub ids: IdMap,
}

impl Engine {
    /// Returns the state of a container without changing anything.
    pub(crate) fn look(&self, config: &Config) -> Result<Look> {
        // ORDER: settling writes the exit record, then removes the record of the process. Reading
        // in the other order could miss both and report an unknown exit.
        let read_init = || disk::read_json(&self.run_dir(&config.id).join("init.json"));
        let mut init: Option<InitRecord> = read_init()?;
        let may_sleep = init.as_ref().is_none_or(|init| init.sleeping);
        let asleep_unix_ms = may_sleep.then(|| self.asleep_since(&config.id)).flatten();
        let asleep = asleep_unix_ms.is_some();
        if init.is_none() && !asleep {
            init = read_init()?; // the container may have woken in between
        }
        // The exit before the current sleep is not needed.
        let read_exit = || disk::read_json(&self.dir(&config.id).join("exit.json"));
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
        Ok(Look { state, init, exit, asleep_unix_ms })
    }

    /// Returns the state for a holder of the container's lock. If the first process is about to
    /// exit, because its start or wake was interrupted, it has exited when this returns.
    pub(crate) fn look_locked(&self, config: &Config) -> Result<Look> {
        let look = self.look(config)?;
        match look.init.as_ref().filter(|init| look.is_alive() && is_doomed(init)).and_then(handle)
        {
            None => Ok(look),
            Some(fd) => {
                let wait = pidfd::wait(fd, Some(DOOMED_WAIT));
                wait.map_err(Error::call("cannot wait for the container"))?;
                self.look(config)
            }
        }
    }

    /// Everything about one container.
    pub fn inspect(&self, id: &ContainerId) -> Result<Details> {
        let config = self.config(id)?;
        let look = self.look(&config)?;
        let init = look.init.as_ref();
        let pid = init.filter(|_| look.is_alive()).map(|i| i.pid);
        let (slept, asleep_unix_ms) = match look.state {
            State::Asleep => (self.slept(id)?, look.asleep_unix_ms),
            State::Drowsy => (None, init.and_then(|init| init.drowsy_unix_ms)),
            _ => (None, None),
        };
        let started = init.or(slept.as_ref()).map(|i| i.started_unix_ms);
        let started_unix_ms = started.or(look.exit.as_ref().map(|e| e.started_unix_ms));
        let exit = match init {
            Some(init) if !look.is_alive() => Some(self.exit_of(&config.id, init)?),
            _ => look.exit,
        };
        Ok(Details { config, state: look.state, pid, started_unix_ms, asleep_unix_ms, exit })
    }

    /// Its control groups, while it runs.
    pub(crate) fn cgroup(&self, config: &Config) -> Result<Cgroup> {
        let found = self.cgroups()?.find(config.id.as_str())?;
        found.ok_or_else(|| self.not(config, State::Stopped, "start it first"))
    }

    pub(crate) fn not(&self, config: &Config, state: State, hint: &'static str) -> Error {
        Error::State { name: config.name.to_string(), state, hint }
    }

    /// Returns the record and a pidfd of its first process, which is alive.
    pub(crate) fn alive(&self, config: &Config) -> Result<(InitRecord, OwnedFd)> {
        let look = self.look(config)?;
        let state = look.state;
        let stopped = || match state {
            State::Asleep => self.not(config, state, "wake it first"),
            _ => self.not(config, state, "start it first"),
        };
        let is_alive = look.is_alive();
        let init = look.init.filter(|_| is_alive);
        let init = init.ok_or_else(stopped)?;
        // The pid could have been used again between the look and this: the handle decides.
        let fd = handle(&init).ok_or_else(|| self.not(config, State::Stopped, "start it first"))?;
        Ok((init, fd))
    }

    /// Freezes all processes (cgroups(7), freezer). A drowsy container becomes paused.
    pub fn pause(&self, id: &ContainerId) -> Result<()> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let (mut init, _) = self.alive(&config)?;
        if init.paused {
            return Err(self.not(&config, State::Paused, "it can only be paused once"));
        }
        let _doing = self.intend(id, &Intent::Freezer)?;
        self.cgroup(&config)?.freeze()?;
        let was_drowsy = init.drowsy_unix_ms.take().is_some();
        init.paused = true;
        self.write_init(id, &init)?;
        if was_drowsy {
            self.no_longer_called(id)?;
        }
        self.record("pause", id.as_str(), config.name.as_str(), &[]);
        Ok(())
    }

    /// Thaws all processes.
    pub fn unpause(&self, id: &ContainerId) -> Result<()> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let (mut init, _) = self.alive(&config)?;
        if !init.paused {
            return Err(self.not(&config, State::Running, "it is not paused"));
        }
        let _doing = self.intend(id, &Intent::Freezer)?;
        self.thaw(&config, &mut init)?;
        self.record("unpause", config.id.as_str(), config.name.as_str(), &[]);
        Ok(())
    }

    /// Thaws a container.
    ///
    /// ORDER: the mark is removed from the record first: an interruption after that leaves a
    /// container that is to be thawed. Then the keeper's copies of its descriptors are closed; then
    /// the processes resume.
    pub(crate) fn thaw(&self, config: &Config, init: &mut InitRecord) -> Result<()> {
        let was_drowsy = init.drowsy_unix_ms.take().is_some();
        init.paused = false;
        self.write_init(&config.id, init)?;
        let let_go = if was_drowsy { self.no_longer_called(&config.id) } else { Ok(()) };
        // The record says running, so no later command would thaw it.
        self.cgroup(config)?.thaw()?;
        let_go
    }

    /// Finishes an interrupted freeze or thaw: frozen only if that is on record, and if `stays`.
    pub(crate) fn finish_freezing(&self, config: &Config, stays: bool) -> Result<()> {
        let (mut init, _) = self.alive(config)?;
        let is_drowsy = init.drowsy_unix_ms.is_some();
        if !is_drowsy && !init.sleeping {
            self.no_longer_called(&config.id)?; // descriptors were held before the record
        }
        match is_drowsy || init.paused && stays {
            true => Ok(self.cgroup(config)?.freeze()?),
            false => self.thaw(config, &mut init),
        }
    }

    /// Finishes an interrupted change of limits: sets the limits of the record.
    pub(crate) fn finish_limiting(&self, config: &Config) -> Result<()> {
        self.alive(config)?;
        Ok(self.cgroup(config)?.set(&config.limits)?)
    }

    pub(crate) fn write_init(&self, id: &ContainerId, init: &InitRecord) -> Result<()> {
        disk::write_json(&self.run_dir(id).join("init.json"), init, Durable::No)
    }

    /// Sends a signal to the first process.
    pub fn kill(&self, id: &ContainerId, signal: i32) -> Result<()> {
        let lock = self.lock(id)?;
        let config = self.config(id)?;
        let look = self.look_locked(&config)?;
        if look.state == State::Asleep && signal == SIGKILL {
            return self.end_sleep(&config);
        }
        let (mut init, fd) = self.alive(&config)?;
        // Signals to a paused container stay pending; a drowsy container is woken by them.
        let is_drowsy = init.drowsy_unix_ms.is_some();
        let thaws = is_drowsy || signal == SIGKILL && init.paused;
        let _doing = thaws.then(|| self.intend(id, &Intent::Freezer)).transpose()?;
        if signal == SIGKILL {
            // A frozen v1 cgroup keeps even SIGKILL waiting; an ended container does not restart.
            init.stopping = true;
            self.write_init(id, &init)?;
        }
        pidfd::send_signal(fd.as_fd(), signal).map_err(Error::call("cannot send the signal"))?;
        if thaws {
            self.thaw(&config, &mut init)?;
        }
        drop(lock);
        self.record("kill", id.as_str(), config.name.as_str(), &[("signal", signal.to_string())]);
        Ok(())
    }

    /// Sends the stop signal to the first process, and kills all processes if it has not exited
    /// after the timeout (the container's own if none is given). An asleep container is woken for the
    /// signal, unless the timeout is 0. A stopped container stays stopped, and a pending restart is
    /// cancelled.
    pub fn stop(&self, id: &ContainerId, timeout: Option<Duration>) -> Result<()> {
        let config = self.config(id)?;
        let timeout =
            timeout.unwrap_or_else(|| Duration::from_secs(u64::from(config.stop_timeout_s)));
        let fd = {
            // A timeout of 0 wakes nothing, and needs no grant.
            let admitted = match timeout.is_zero() {
                true => self.lock_with(id, None)?,
                false => self.lock_to_wake(id)?,
            };
            let config = admitted.config.clone();
            let mut look = self.look_locked(&config)?;
            if look.state == State::Asleep {
                if timeout.is_zero() {
                    self.end_sleep(&config)?;
                    self.record("stop", id.as_str(), config.name.as_str(), &[]);
                    return Ok(());
                }
                // The program handles the signal as if it had been awake: its memory may hold data that it
                // writes at its end.
                let woken = self.wake_locked(&config, Why::Operator).map_err(|e| {
                    Error::Invalid(format!(
                        "cannot wake '{}' for its stop signal: {}; 'stop --time 0' ends it as it is",
                        config.name.as_str(),
                        e.with_causes()
                    ))
                })?;
                woken.detach();
                look = self.look_locked(&config)?;
            }
            if !look.is_alive() {
                // A pending restart is cancelled.
                if let Some(mut exit) = self.settle_locked(&config, true)?
                    && !exit.stopped
                    && !config.auto_remove
                {
                    exit.stopped = true;
                    self.write_exit(id, &exit)?;
                }
                return Ok(());
            }
            let (mut init, fd) = self.alive(&config)?;
            let thaws = init.paused || init.drowsy_unix_ms.is_some();
            let _doing = thaws.then(|| self.intend(id, &Intent::Freezer)).transpose()?;
            init.stopping = true;
            self.write_init(id, &init)?;
            let sent = pidfd::send_signal(fd.as_fd(), config.stop_signal);
            sent.map_err(Error::call("cannot send the stop signal"))?;
            if thaws {
                self.thaw(&config, &mut init)?;
            }
            fd
        };
        // The lock is free while we wait: the container must be able to settle itself meanwhile.
        let ended = pidfd::wait(fd.as_fd(), Some(timeout));
        let ended = ended.map_err(Error::call("cannot wait for the container"))?;
        let lock = match self.lock(id) {
            Err(Error::NoContainer(_)) => return Ok(()), // --rm, removed by another command
            other => other?,
        };
        let config = self.config(id)?;
        let look = self.look_locked(&config)?;
        // A container that was put to sleep meanwhile has no process, and would be restored.
        if look.state == State::Asleep {
            self.end_sleep(&config)?;
        } else if !ended && look.is_alive() {
            self.kill_locked(&config, &look)?;
        }
        self.settle_locked(&config, true)?;
        drop(lock);
        self.record("stop", id.as_str(), config.name.as_str(), &[]);
        Ok(())
    }

    /// Kills every process, waits until the first one has exited and settles.
    pub(crate) fn kill_locked(&self, config: &Config, look: &Look) -> Result<()> {
        let Some(init) = &look.init else { return Ok(()) };
        let mut init = init.clone();
        init.stopping = true;
        self.write_init(&config.id, &init)?;
        let fd = handle(&init);
        if let Some(cgroup) = self.cgroups()?.find(config.id.as_str())? {
            cgroup.kill()?;
        }
        if let Some(fd) = fd {
            let _ = pidfd::send_signal(fd.as_fd(), 9); // may have exited already
            pidfd::wait(fd.as_fd(), None).map_err(Error::call("cannot wait for the container"))?;
        }
        self.settle_locked(config, false).map(|_| ())
    }

    /// Waits until the container is not running and returns its exit; returns at once if it is not
    /// running.
    pub fn wait(&self, id: &ContainerId) -> Result<Exit> {
        let unknown = || Exit {
            code: None,
            signal: None,
            oom_killed: false,
            started_unix_ms: 0,
            finished_unix_ms: now_unix_ms(),
            failures: 0,
            short_runs: 0,
            stopped: false,
        };
        let config = self.config(id)?;
        loop {
            let mut look = self.look(&config)?;
            while look.state == State::Asleep {
                std::thread::sleep(ASLEEP_LOOK);
                look = self.look(&config)?;
            }
            let Some(init) = look.init.as_ref() else {
                return Ok(look.exit.unwrap_or_else(unknown));
            };
            let keeper = Keeper::connect(&self.places().run)?;
            let mut ended = None;
            if let Some(fd) = handle(init) {
                // Subscribed before the exit, the keeper reports the status even of a container
                // that is removed as soon as it ends.
                let told = keeper.and_then(|mut keeper| keeper.wait(init.pid).ok());
                ended = match told {
                    None => told_by_kernel(fd.as_fd())?,
                    told => told,
                };
            }
            let told = ended.map(|status| exit_from(init, Some(status)));
            let exit = match told.map_or_else(|| self.exit_of(id, init), Ok) {
                Err(Error::NoContainer(_)) => unknown(),
                other => other?,
            };
            // SIGKILL may mean that the container fell asleep before this waiter registered.
            let may_sleep = exit.code.is_none() || exit.signal == Some(SIGKILL);
            if may_sleep && self.look(&config).is_ok_and(|it| it.state == State::Asleep) {
                continue;
            }
            return Ok(exit);
        }
    }

    /// Returns the exit of a recorded process, from the keeper's record.
    pub(crate) fn exit_of(&self, id: &ContainerId, init: &InitRecord) -> Result<Exit> {
        for _ in 0..ASKS_MAX {
            if let Some(exit) = self.written_exit(id, init)? {
                return Ok(exit);
            }
            let Some(mut keeper) = Keeper::connect(&self.places().run)? else { break };
            let stat = proc::status(init.pid);
            let is_parent =
                |stat: Stat| stat.start_time == init.start_time && stat.ppid == keeper.pid();
            if !stat.is_ok_and(is_parent) {
                // ORDER: a keeper writes the exit before it answers this request. A keeper that
                // died meanwhile has written it too, or never will.
                let _ = keeper.status();
                break;
            }
            // This keeper is the parent: it will report the exit, or has reaped the process just
            // now.
            if let Ok(status) = keeper.wait(init.pid) {
                return Ok(exit_from(init, Some(status)));
            }
        }
        Ok(self.written_exit(id, init)?.unwrap_or_else(|| exit_from(init, None)))
    }

    fn written_exit(&self, id: &ContainerId, init: &InitRecord) -> Result<Option<Exit>> {
        if let Some(status) = ExitStatus::read(&self.run_dir(id), init.pid)? {
            return Ok(Some(exit_from(init, Some(status))));
        }
        // Another command may have settled it meanwhile.
        let settled = disk::read_json::<Exit>(&self.dir(id).join("exit.json"))?;
        Ok(settled.filter(|exit| exit.started_unix_ms == init.started_unix_ms))
    }

    /// Settles a container whose first process has exited, then restarts or removes it by its
    /// policy. The keeper calls this when no command waits for the container.
    pub fn settle(&self, id: &ContainerId) -> Result<Option<Exit>> {
        let lock = match self.lock(id) {
            Err(Error::NoContainer(_)) => return Ok(None),
            other => other?,
        };
        let config = self.config(id)?;
        let exit = self.settle_locked(&config, true)?;
        let Some(exit) = exit.filter(|e| wants_restart(config.restart, e)) else {
            return Ok(None);
        };
        // The lock is free while we wait, so that an operator can stop a container that keeps
        // failing.
        drop(lock);
        std::thread::sleep(restart_delay(&exit));
        let _lock = match self.lock(id) {
            Err(Error::NoContainer(_)) => return Ok(Some(exit)),
            other => other?,
        };
        let config = self.config(id)?;
        let look = self.look(&config)?;
        let same = look.exit.as_ref().is_some_and(|e| {
            e.finished_unix_ms == exit.finished_unix_ms && wants_restart(config.restart, e)
        });
        if !look.is_alive() && look.init.is_none() && same {
            self.record("restart", config.id.as_str(), config.name.as_str(), &[]);
            self.start_locked(&config, Stdio::detached(), exit.past())?.detach();
        }
        Ok(Some(exit))
    }

    /// Settles a container under its lock.
    ///
    /// ORDER: the exit is on disk before the record of the process is removed. A kill in between
    /// leaves a container that is settled again, with the same result.
    ///
    /// `finally` also removes a container with `auto_remove`.
    pub(crate) fn settle_locked(&self, config: &Config, finally: bool) -> Result<Option<Exit>> {
        self.settle_found(config, self.look(config)?, finally)
    }

    /// Settles a container in an observed state.
    pub(crate) fn settle_found(
        &self,
        config: &Config,
        look: Look,
        finally: bool,
    ) -> Result<Option<Exit>> {
        if !look.needs_settling() {
            if look.init.is_none() && self.run_dir(&config.id).exists() {
                // A start or an end was interrupted.
                match look.state {
                    State::Asleep => self.doze(config)?,
                    _ => self.tear_down(&config.id, Some(config))?,
                }
            }
            return Ok(look.exit.filter(|_| look.state != State::Asleep));
        }
        let Some(init) = look.init else { return Ok(look.exit) };
        let mut exit = self.exit_of(&config.id, &init)?;
        if self.fell_asleep(config, &init, &exit) {
            self.doze(config)?;
            return Ok(None);
        }
        self.forget_sleep(config)?; // an old checkpoint: the container ran on
        if init.drowsy_unix_ms.is_some() {
            self.no_longer_called(&config.id)?;
        }
        let cgroup = self.cgroups()?.find(config.id.as_str())?;
        if let Some(cgroup) = &cgroup {
            exit.oom_killed |= cgroup.oom_kills().is_ok_and(|kills| kills > 0);
        }
        exit.stopped = init.stopping;
        exit.failures = if exit.code == Some(0) { 0 } else { init.failures + 1 };
        exit.short_runs = if exit.is_short() { init.short_runs + 1 } else { 0 };
        if !config.auto_remove {
            self.write_exit(&config.id, &exit)?;
        }
        let code = exit.code.map_or_else(|| "unknown".to_owned(), |c| c.to_string());
        let mut more = vec![("exit_code", code)];
        more.extend(self.fill_failure(&config.id).map(|why| ("reason", why)));
        self.record("die", config.id.as_str(), config.name.as_str(), &more);
        self.tear_down_with(&config.id, Some(config), cgroup)?;
        if config.auto_remove && finally {
            self.remove_files(&config.id, Some(config), true)?;
        }
        Ok(Some(exit))
    }

    pub(crate) fn write_exit(&self, id: &ContainerId, exit: &Exit) -> Result<()> {
        disk::write_json(&self.dir(id).join("exit.json"), exit, Durable::No)
    }

    /// Releases every kernel object of a container. Accepts half-built and half-removed containers,
    /// and may be called twice.
    pub(crate) fn tear_down(&self, id: &ContainerId, config: Option<&Config>) -> Result<()> {
        self.tear_down_with(id, config, self.cgroups()?.find(id.as_str())?)
    }

    /// Releases the kernel objects of a container, given its cgroup.
    ///
    /// ORDER: `RUN/c/ID` last. A start makes it first and treats an existing one as the sign of an
    /// interrupted start.
    fn tear_down_with(
        &self,
        id: &ContainerId,
        config: Option<&Config>,
        cgroup: Option<Cgroup>,
    ) -> Result<()> {
        let mut first = None;
        let mut keep = |r: Result<()>| {
            if let Err(e) = r {
                first.get_or_insert(e);
            }
        };
        keep(cgroup.map_or(Ok(()), |cgroup| Ok(cgroup.kill().and_then(|()| cgroup.remove())?)));
        if config.is_none_or(|c| matches!(c.net, NetMode::Address { .. })) {
            keep(self.leave_network(id, config));
        }
        keep(self.remove_shared(id));
        keep(remove_tree(&self.woken_dir(id)));
        match first {
            None => remove_tree(&self.run_dir(id)),
            Some(e) => Err(e),
        }
    }

    /// Processor, memory and disk use so far.
    pub fn stats(&self, id: &ContainerId) -> Result<Stats> {
        let config = self.config(id)?;
        self.alive(&config)?;
        Ok(self.cgroup(&config)?.stats()?)
    }

    /// The host's pids of all its processes.
    pub fn pids(&self, id: &ContainerId) -> Result<Vec<u32>> {
        let config = self.config(id)?;
        self.alive(&config)?;
        Ok(self.cgroup(&config)?.pids()?)
    }

    /// Changes limits, policies and addresses; of a running container at once.
    pub fn update(&self, id: &ContainerId, update: &Update) -> Result<()> {
        let _lock = self.lock(id)?;
        let mut config = self.config(id)?;
        let before = config.clone();
        let alive = self.look_locked(&config)?.is_alive();
        let l = &mut config.limits;
        let new = update.limits.clone();
        l.cpu_max_milli = new.cpu_max_milli.or(l.cpu_max_milli);
        l.cpu_weight = new.cpu_weight.or(l.cpu_weight);
        l.cpuset_cpus = new.cpuset_cpus.or(l.cpuset_cpus.take());
        l.memory_max_bytes = new.memory_max_bytes.or(l.memory_max_bytes);
        l.swap_max_bytes = new.swap_max_bytes.or(l.swap_max_bytes);
        l.pids_max = new.pids_max.or(l.pids_max);
        l.io_weight = new.io_weight.or(l.io_weight);
        if let Some(restart) = update.restart {
            config.restart = restart;
        }
        if let Some(sleep) = update.sleep {
            crate::spec::sleep_allowed(sleep, config.auto_remove)?;
            config.sleep = sleep;
        }
        if let Some(drowsy) = update.drowsy {
            crate::spec::long_enough(drowsy)?;
            config.drowsy = drowsy;
        }
        if let Some(wake_on) = update.wake_on {
            config.wake_on = wake_on;
        }
        if !update.ip_add.is_empty() || !update.ip_rm.is_empty() {
            self.update_addresses(&mut config, update, alive)?;
        }
        let changed = alive && update.limits != dormouse_model::Limits::default();
        let cgroup = changed.then(|| self.cgroup(&config)).transpose()?;
        // ORDER: on record, then in force: a command that finds the intent applies the record.
        let _doing = changed.then(|| self.intend(id, &Intent::Limits)).transpose()?;
        self.write_config(&self.dir(id), &config)?;
        if let Some(Err(e)) = cgroup.map(|cgroup| cgroup.set(&update.limits)) {
            (config.limits, config.restart) = (before.limits, before.restart);
            (config.sleep, config.drowsy) = (before.sleep, before.drowsy);
            config.wake_on = before.wake_on;
            self.write_config(&self.dir(id), &config)?;
            let _ = self.finish_limiting(&config); // the first error is returned
            return Err(e.into());
        }
        self.record("update", id.as_str(), config.name.as_str(), &[]);
        Ok(())
    }

    /// Where the output of a container is.
    pub fn logs(&self, id: &ContainerId) -> Result<Logs> {
        Ok(self.logs_of(&self.config(id)?))
    }

    pub(crate) fn logs_of(&self, config: &Config) -> Logs {
        let dir = self.dir(&config.id);
        let stderr = (!config.process.terminal).then(|| dir.join("stderr.log"));
        Logs { stdout: dir.join("stdout.log"), stderr }
    }

    /// Returns the root directory of a container: its processes' root while it runs, or a detached
    /// mount of the same layers when it is stopped.
    pub fn root(&self, id: &ContainerId) -> Result<Root> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let look = self.look(&config)?;
        let fd = match look.init.as_ref().filter(|_| look.is_alive()) {
            Some(init) => {
                let (path, handle) = (format!("/proc/{}/root", init.pid), handle(init));
                let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
                let flags = flags | rustix::fs::OFlags::CLOEXEC;
                let fd = rustix::fs::open(&path, flags, rustix::fs::Mode::empty())
                    .map_err(|e| Error::file("cannot open", &path)(e.into()))?;
                // ORDER: the handle was taken first and the process still lives after the open, so
                // the directory is its own and not that of a later process with its pid.
                let alive = handle.is_some_and(pidfd::is_alive);
                if !alive {
                    return Err(self.not(&config, State::Stopped, "it ended just now; try again"));
                }
                fd
            }
            None => self.assemble_stopped(&config)?,
        };
        Ok(Root { fd, ids: config.ids })
    }

    /// The layers of a stopped container as a mount. The caller holds the container's lock.
    pub(crate) fn assemble_stopped(&self, config: &Config) -> Result<OwnedFd> {
        let userns = crate::start::user_namespace(config.ids)?;
        Ok(self.assemble(config, userns.as_fd())?.root)
    }

    /// Removes this instance's objects from the kernel: keeper, mounts, network, control groups.
    /// Files on disk stay, so the effect is that of a reboot. Refused while a container runs.
    pub fn dismantle(&self) -> Result<()> {
        for id in self.ids()? {
            let lock = match self.lock(&id) {
                Err(Error::NoContainer(_)) => continue,
                other => other?,
            };
            let config = self.config(&id)?;
            if self.look(&config)?.is_alive() {
                return Err(self.not(&config, State::Running, "stop it first"));
            }
            self.settle_locked(&config, true)?;
            drop(lock);
        }
        self.let_go_of_rest()?;
        if let Some(keeper) = Keeper::connect(&self.places().run)? {
            keeper.end()?;
        }
        // The keeper may be tidying up already.
        let _alone = disk::Lock::take_new(&self.places().run.join("use.lock"))?;
        self.tidy_alone()?;
        disk::remove(&self.places().run.join("boot"))
    }

    /// Takes a share of the lock that keeps shared objects (see [`Engine::tidy`]) while a container
    /// starts.
    pub(crate) fn in_use(&self) -> Result<disk::Lock> {
        disk::Lock::take_shared(&self.places().run.join("use.lock"))
    }

    /// Removes the objects that containers share (domains, mounts of images and of the shared
    /// tmpfs, the cgroups above them) if no container runs or starts. The keeper calls this when
    /// its last container has ended; the next start makes them again. Returns whether they were
    /// removed.
    pub fn tidy(&self) -> Result<bool> {
        let lock = self.places().run.join("use.lock");
        // ORDER: never wait for this lock. Its holder may be waiting until this process leaves its
        // cgroup.
        let Some(_alone) = disk::Lock::try_take_new(&lock)? else { return Ok(false) };
        self.tidy_alone()
    }

    /// Removes the shared objects. The caller holds the exclusive lock.
    fn tidy_alone(&self) -> Result<bool> {
        let running = self.places().running();
        let mut left = fs::read_dir(&running).map_err(Error::file("cannot list", &running))?;
        if left.next().is_some() {
            return Ok(false);
        }
        self.end_lending()?;
        self.network()?.remove_unused()?;
        self.network()?.remove_none()?;
        self.images()?.unmount_all()?;
        self.unmount_shared()?;
        self.cgroups()?.remove_parent()?;
        Ok(true)
    }

    /// The writable layer of a container, for `diff` and `commit`.
    pub fn upper(&self, id: &ContainerId) -> PathBuf {
        self.dir(id).join("upper")
    }

    /// Runs a closure while the container can neither start nor stop.
    pub fn with_lock<T>(&self, id: &ContainerId, f: impl FnOnce() -> T) -> Result<T> {
        let _lock = self.lock(id)?;
        Ok(f())
    }

    /// The named volumes that a container mounts.
    pub fn volumes_of(&self, config: &Config) -> Vec<PathBuf> {
        let name = |m: &dormouse_model::Mount| match &m.kind {
            MountKind::Volume { name } => Some(self.places().volumes().join(name.as_str())),
            _ => None,
        };
        config.mounts.iter().filter_map(name).collect()
    }

    /// The image's name as lists show it.
    pub fn image_label(config: &Config) -> String {
        match &config.root {
            RootSource::Image { reference, .. } => reference.to_string(),
            RootSource::Directory(path) => path.display().to_string(),
        }
    }
}

/// Returns whether a recorded process still runs; a zombie does not.
fn is_alive(init: &InitRecord) -> bool {
    handle(init).is_some_and(pidfd::is_alive)
}

/// Returns whether a process is about to exit because its starter has died: a newborn before
/// execve, or a restored process that is killed with its restorer. Valid only under the container's
/// lock; otherwise the starter may still be at work.
fn is_doomed(init: &InitRecord) -> bool {
    const SIGKILL: u64 = 1 << 8;
    let exe = |pid: u64| fs::read_link(format!("/proc/{pid}/exe"));
    // An exiting process has released its memory, so it has no executable any more.
    let (Ok(fields), Ok(program)) = (proc::fields(init.pid), exe(init.pid.into())) else {
        return true;
    };
    let pending = ["SigPnd", "ShdPnd"].into_iter().filter_map(|name| fields.mask(name));
    let is_killed = pending.fold(0, |all, mask| all | mask) & SIGKILL != 0;
    let is_newborn = fields.field("Name") == Some("dormouse-keeper")
        && program.starts_with("/memfd:dormouse-keeper");
    // A killed restorer loses its memory before its locks, and its tracees after them.
    let tracer = fields.number("TracerPid").filter(|tracer| *tracer != 0);
    is_killed || is_newborn || tracer.is_some_and(|tracer| exe(tracer).is_err())
}

/// Returns how a process ended, from the kernel, if there is no keeper to report it. Waits for the
/// exit. `None` on kernels that do not keep the status. KERNEL(6.15)
pub(crate) fn told_by_kernel(process: BorrowedFd<'_>) -> Result<Option<ExitStatus>> {
    pidfd::wait(process, None).map_err(Error::call("cannot wait for the container"))?;
    let until = Instant::now() + REAP_WAIT;
    loop {
        let ended = pidfd::exit_status(process);
        if let Some(exit) = ended.map_err(Error::call("cannot read the container's exit status"))? {
            let signal = match exit {
                dormouse_kernel::process::Exit::Signal(signal) => Some(signal),
                dormouse_kernel::process::Exit::Code(_) => None,
            };
            let finished_unix_ms = now_unix_ms();
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

/// Returns a pidfd of a recorded process, if it still exists.
pub(crate) fn handle(init: &InitRecord) -> Option<OwnedFd> {
    pidfd::open_exactly(init.pid, init.start_time).ok()
}

pub(crate) fn exit_from(init: &InitRecord, status: Option<ExitStatus>) -> Exit {
    let finished = status.as_ref().map_or_else(now_unix_ms, |s| s.finished_unix_ms);
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

/// A run of less time is short.
const SHORT_RUN_MS: i64 = 10_000;

/// Counts of a container's earlier runs, for the next one.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Past {
    pub(crate) failures: u32,
    pub(crate) short_runs: u32,
}

impl Exit {
    fn is_short(&self) -> bool {
        self.finished_unix_ms - self.started_unix_ms < SHORT_RUN_MS
    }

    fn past(&self) -> Past {
        Past { failures: self.failures, short_runs: self.short_runs }
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
