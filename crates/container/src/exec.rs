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
//!
//! Uses `ground`, `state`, `hold`, `io`, `process`, `policy`, `admission`, `layer`, `start`,
//! `drowsy` and `wake`.

use std::os::fd::AsFd;

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::resolve;
use dormouse_launch::{Kind, Plan, Spawn};
use dormouse_model::{ContainerId, State};
use rustix::fs::{Mode, OFlags};

use crate::admission::{self, Admitted};
use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::io::{self, Io, TERMINALS, TTY_GROUP};
use crate::policy::Reason;
use crate::spec::Exec;
use crate::start::Running;
use crate::user::Users;
use crate::{drowsy, hold, layer, process, state, wake};

/// Every namespace of the first process but the pid namespace, which the keeper has entered.
const NAMESPACES: CloneFlags = CloneFlags::NEWUSER
    .union(CloneFlags::NEWNS)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWNET)
    .union(CloneFlags::NEWCGROUP)
    .union(CloneFlags::NEWTIME);

/// Runs another process in a running container. With a terminal the caller gets the master
/// side, and the keeper has no copy.
pub(crate) fn exec(ground: &Ground, id: &ContainerId, exec: Exec) -> Result<Running> {
    let Admitted { lock, config, observed, grant } = admission::lock_to_wake(ground, id)?;
    let known = match (observed.state, observed.init) {
        (State::Asleep, _) => {
            wake::wake_locked(ground, &config, Reason::Operator)?.detach();
            None
        }
        (State::Drowsy, Some(init)) => {
            drowsy::resume(ground, &config, init, Reason::Operator)?;
            None
        }
        // No other command changes the record while the lock is held.
        (State::Running, Some(init)) => state::handle(&init).map(|process| (init, process)),
        _ => None,
    };
    let (init, init_fd) = known.map_or_else(|| state::alive(ground, &config), Ok)?;
    if init.paused {
        return Err(Error::state(&config, State::Paused, "unpause it first"));
    }
    let entering = Lock::take_shared(&state::exec_lock(ground, id))?;
    drop((lock, grant));
    let mut process = exec.process;
    if process.env.is_empty() {
        process.env.clone_from(&config.spec.process.env);
    }
    if process.cwd.is_empty() {
        process.cwd.clone_from(&config.spec.process.cwd);
    }
    if process.user.0.is_empty() {
        process.user = config.spec.process.user.clone();
    }
    process.umask = process.umask.or(config.spec.process.umask);
    let root = layer::root_of(&config, &init, init_fd.as_fd())?;
    let user = Users::read(root.as_fd()).find(&process.user)?;
    let ptmx = resolve::in_root(root.as_fd(), "dev/pts/ptmx", OFlags::PATH, Mode::empty());
    let has_devpts = ptmx.is_ok();
    drop((root, ptmx));

    let found = ground.cgroups()?.find(config.id.as_str())?;
    let cgroup = found.ok_or_else(|| Error::state(&config, State::Stopped, "start it first"))?;
    let placement = cgroup.placement()?;
    let mut keeper = hold::keeper(ground)?;
    let mut newborn = keeper.spawn(Spawn {
        pid_namespace_of: Some(io::clone_fd(init_fd.as_fd())?),
        cgroup: placement.v2,
        ..Spawn::new(config.id.as_str(), Kind::Exec, 0)
    })?;
    process::set_oom_score_adj(&newborn, &config.spec.security)?;
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
        plan.devpts("/dev/pts", Some(TTY_GROUP), TERMINALS);
    }
    let io = if process.terminal {
        Io::Terminal(exec.io.terminal_size.unwrap_or_default())
    } else {
        let open = |stream| io::open_stream(stream, config.ids, user.uid);
        Io::Fds([open(exec.io.stdin)?, open(exec.io.stdout)?, open(exec.io.stderr)?])
    };
    io::plan_io(&mut plan, io, user.uid, false);
    process::plan_rlimits(&mut plan, &config.spec.security)?;
    plan.umask(process.umask.unwrap_or(0o022));
    plan.sync();
    let mut security = config.spec.security.clone();
    security.privileged |= exec.privileged;
    process::plan_identity(&mut plan, &config, &security, &process, &user)?;
    process::plan_exec(&mut plan, &config, &process, &user)?;
    newborn.send(plan).map_err(|e| process::exec_error(&process, e))?;
    let console = newborn.ready().map_err(|e| process::exec_error(&process, e))?;
    let (pid, pidfd) = (newborn.pid, io::clone_fd(newborn.pidfd.as_fd())?);
    newborn.go().map_err(|e| process::exec_error(&process, e))?;
    drop(entering);
    let command = process.args.join(" ");
    ground.record("exec", id.as_str(), config.name.as_str(), &[("command", command)]);
    Ok(Running::of_exec(id.clone(), pid, pidfd, console, keeper))
}
