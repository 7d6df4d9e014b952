//! Another process in a running container.
//!
//! The keeper clones the process directly into the container's pid namespace and cgroups. The
//! newborn enters the other namespaces by the pidfd of the first process, takes the configured
//! identity and becomes the program. Its confinement is that of the first process: same
//! capabilities, same filter. A process of the container can see the newborn from its first moment.
//! The newborn is therefore not dumpable until execve and has no descriptor of the host except
//! those it was given.
//!
//! **In transit.** A newborn that is frozen or saved before execve would stay so, because no
//! command would resume it. The exec therefore holds a share of the lock `exec.lock`, beside the
//! record of the first process, from before it releases the container's own lock until the program
//! runs. Meanwhile the container becomes neither drowsy nor asleep, and is not saved.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::resolve;
use dormouse_launch::{Kind, Plan, Spawn};
use dormouse_model::{Config, ContainerId, State};
use rustix::fs::{Mode, OFlags};

use crate::admission::Admitted;
use crate::disk::Lock;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::idle::Why;
use crate::life::Root;
use crate::spec::Exec;
use crate::start::{
    Io, Running, TTY_GROUP, clone_fd, exec_error, open_stream, plan_exec, plan_identity, plan_io,
    plan_rlimits,
};
use crate::user::Accounts;

/// Every namespace of the first process but the pid namespace, which the keeper has entered.
const NAMESPACES: CloneFlags = CloneFlags::NEWUSER
    .union(CloneFlags::NEWNS)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWNET)
    .union(CloneFlags::NEWCGROUP)
    .union(CloneFlags::NEWTIME);

/// LIMIT: how long a verb waits for an exec to reach its program.
const STARTED_WITHIN: Duration = Duration::from_secs(2);

impl Engine {
    fn exec_lock(&self, id: &ContainerId) -> PathBuf {
        self.run_dir(id).join("exec.lock")
    }

    /// Returns whether an exec is in transit into a container. The caller holds the container's
    /// lock, so no other exec begins.
    pub(crate) fn is_entered(&self, id: &ContainerId) -> Result<bool> {
        let path = self.exec_lock(id);
        Ok(path.exists() && Lock::try_take(&path)?.is_none())
    }

    /// Waits until no exec is in transit into a container. The caller holds the container's lock.
    ///
    /// Errors: [`Error::Entered`] where that takes too long.
    pub(crate) fn not_entered(&self, config: &Config) -> Result<()> {
        let until = Instant::now() + STARTED_WITHIN;
        while self.is_entered(&config.id)? {
            if Instant::now() > until {
                return Err(Error::Entered(config.name.to_string()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Runs another process in a running container. With a terminal the caller gets the master
    /// side, and the keeper has no copy.
    pub fn exec(&self, id: &ContainerId, exec: Exec) -> Result<Running> {
        let Admitted { lock, config, look, leave } = self.lock_to_wake(id)?;
        match (look.state, look.init) {
            (State::Asleep, _) => self.wake_locked(&config, Why::Operator)?.detach(),
            (State::Drowsy, Some(init)) => self.rouse(&config, init, Why::Operator)?,
            _ => {}
        }
        let (init, init_fd) = self.alive(&config)?;
        if init.paused {
            return Err(self.not(&config, State::Paused, "unpause it first"));
        }
        let entering = Lock::take_shared(&self.exec_lock(id))?;
        drop((lock, leave));
        let mut process = exec.process;
        if process.env.is_empty() {
            process.env.clone_from(&config.process.env);
        }
        if process.cwd.is_empty() {
            process.cwd.clone_from(&config.process.cwd);
        }
        if process.user.0.is_empty() {
            process.user = config.process.user.clone();
        }
        process.umask = process.umask.or(config.process.umask);
        let Root { fd: root, .. } = self.root(id)?;
        let account = Accounts::read(root.as_fd()).find(&process.user)?;
        let ptmx = resolve::in_root(root.as_fd(), "dev/pts/ptmx", OFlags::PATH, Mode::empty());
        let has_devpts = ptmx.is_ok();
        drop((root, ptmx));

        let found = self.cgroups()?.find(config.id.as_str())?;
        let cgroup = found.ok_or_else(|| self.not(&config, State::Stopped, "start it first"))?;
        let placement = cgroup.placement()?;
        let mut keeper = self.keeper()?;
        let mut newborn = keeper.spawn(Spawn {
            pid_namespace_of: Some(clone_fd(init_fd.as_fd())?),
            cgroup: placement.v2,
            ..Spawn::new(config.id.as_str(), Kind::Exec, 0)
        })?;
        let mut plan = Plan::new();
        for tasks in placement.v1_tasks {
            let fd = plan.fd(tasks);
            plan.join_cgroup(fd);
        }
        let target = plan.fd(init_fd);
        plan.setns(target, NAMESPACES.bits() as u32);
        plan.become_root();
        plan.session_keyring();
        plan.setsid();
        if process.terminal && !has_devpts {
            plan.devpts("/dev/pts", Some(TTY_GROUP));
        }
        let io = if process.terminal {
            Io::Terminal(exec.io.terminal_size.unwrap_or_default())
        } else {
            let open = |stream| open_stream(stream, config.ids, account.uid);
            Io::Fds([open(exec.io.stdin)?, open(exec.io.stdout)?, open(exec.io.stderr)?])
        };
        plan_io(&mut plan, io, account.uid, false);
        plan_rlimits(&mut plan, &config.security)?;
        plan.umask(process.umask.unwrap_or(0o022));
        plan.sync();
        let mut security = config.security.clone();
        security.privileged |= exec.privileged;
        plan_identity(&mut plan, &config, &security, &process, &account)?;
        plan_exec(&mut plan, &config, &process, &account)?;
        newborn.send(plan).map_err(|e| exec_error(&process, e))?;
        let console = newborn.ready().map_err(|e| exec_error(&process, e))?;
        let (pid, pidfd) = (newborn.pid, clone_fd(newborn.pidfd.as_fd())?);
        newborn.go().map_err(|e| exec_error(&process, e))?;
        drop(entering);
        let command = process.args.join(" ");
        self.record("exec", id.as_str(), config.name.as_str(), &[("command", command)]);
        Ok(Running::of_exec(id.clone(), pid, pidfd, console, keeper))
    }
}
