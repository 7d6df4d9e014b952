//! Another process in a running container.
//!
//! The keeper clones it straight into the container's pid namespace and cgroups; the newborn enters
//! the other namespaces by the handle of the first process, takes the configured identity and
//! becomes the program. It is as confined as the first process: same capabilities, same filter. A
//! process of the container can see it from its first moment, so it is not dumpable until execve
//! and holds no descriptor of the host but those it was given.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::resolve;
use dormouse_launch::{Kind, Plan, Spawn, Terminal};
use dormouse_model::{ContainerId, State};
use rustix::fs::{Mode, OFlags};

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::life::Root;
use crate::spec::{Exec, Stream};
use crate::start::{
    Running, TTY_GROUP, clone_fd, exec_error, open_null, plan_exec, plan_identity, plan_rlimits,
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

impl Engine {
    /// Runs another process in a running container. With a terminal the caller gets the master side;
    /// it is not kept by anyone else.
    pub fn exec(&self, id: &ContainerId, exec: Exec) -> Result<Running> {
        let lock = self.lock(id)?;
        let config = self.config(id)?;
        let (init, init_fd) = self.alive(&config)?;
        if init.paused {
            return Err(self.not(&config, State::Paused, "unpause it first"));
        }
        drop(lock);
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
        if process.terminal {
            if !has_devpts {
                plan.devpts("/dev/pts", Some(TTY_GROUP));
            }
            plan.terminal(&Terminal { uid: account.uid, ..Terminal::default() });
        } else {
            let fds = [exec.io.stdin, exec.io.stdout, exec.io.stderr].map(open);
            let [stdin, stdout, stderr] = fds;
            let fds = [plan.fd(stdin?), plan.fd(stdout?), plan.fd(stderr?)];
            plan.stdio(fds);
        }
        plan_rlimits(&mut plan, &config.security)?;
        plan.umask(process.umask.unwrap_or(0o022));
        plan.sync();
        let mut security = config.security.clone();
        security.privileged |= exec.privileged;
        plan_identity(&mut plan, &security, &process, &account)?;
        plan_exec(&mut plan, &config, &process, &account)?;
        newborn.send(plan).map_err(|e| exec_error(&process, e))?;
        let console = newborn.ready().map_err(|e| exec_error(&process, e))?;
        let (pid, pidfd) = (newborn.pid, clone_fd(newborn.pidfd.as_fd())?);
        newborn.go().map_err(|e| exec_error(&process, e))?;
        let command = process.args.join(" ");
        self.record("exec", id.as_str(), config.name.as_str(), &[("command", command)]);
        Ok(Running::of_exec(id.clone(), pid, pidfd, console, keeper))
    }
}

/// The descriptor behind a stream; only a first process has logs and a kept input.
fn open(stream: Stream) -> Result<OwnedFd> {
    match stream {
        Stream::Fd(fd) => Ok(fd),
        Stream::Null => open_null(),
        Stream::Log | Stream::Kept => Err(Error::Invalid(
            "a process run by exec has no log: give it descriptors or /dev/null".into(),
        )),
    }
}
