//! Plan of a program: namespaces, ids, capabilities, filter, limits, arguments, environment.
//!
//! The first process and the processes of `exec` have the same confinement.
//!
//! Uses `io`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::capability::Set;
use dormouse_kernel::{capability, pidfd, rlimit, seccomp, sysctl, weakened};
use dormouse_launch::{CapabilityMasks, Exec as Program, Ids, LaunchError, Newborn, Plan};
use dormouse_model::{Config, NetMode, Process, SeccompChoice, Security};
use rustix::fs::{Access, AtFlags, Mode, OFlags};

use crate::error::{Error, Result};
use crate::io::{self, Io};
use crate::user::PasswdUser;

/// The namespaces of every container. The cgroup namespace is not among them: made by clone3 it
/// would be rooted at the keeper's own cgroup, so the newborn makes it inside its own cgroup.
const NAMESPACES: CloneFlags = CloneFlags::NEWUSER
    .union(CloneFlags::NEWNS)
    .union(CloneFlags::NEWPID)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWTIME);

/// The namespaces, without those that the isolation tests leave out.
pub(crate) fn namespaces() -> CloneFlags {
    let mut flags = NAMESPACES;
    for (name, flag) in [
        ("user-namespace", CloneFlags::NEWUSER),
        // Without it the new root is attached to the keeper's own mount namespace, over the host's
        // root: to be left out together with the user namespace.
        ("mount-namespace", CloneFlags::NEWNS),
        // Its procfs then shows the keeper's pid namespace, which is the host's.
        ("pid-namespace", CloneFlags::NEWPID),
        ("ipc-namespace", CloneFlags::NEWIPC),
        ("uts-namespace", CloneFlags::NEWUTS),
        ("time-namespace", CloneFlags::NEWTIME),
    ] {
        flags.set(flag, !weakened(name));
    }
    flags
}

/// Plans the program: its identity, its confinement and its streams.
pub(crate) fn plan_process(
    plan: &mut Plan,
    config: &Config,
    user: &PasswdUser,
    io: Io,
) -> Result<()> {
    let (process, security) = (&config.spec.process, &config.spec.security);
    plan.setsid();
    io::plan_io(plan, io, user.uid, config.spec.systemd || config.spec.init);
    plan_rlimits(plan, security)?;
    plan.umask(process.umask.unwrap_or(0o022));
    plan.sync_early();
    plan_namespace_limits(plan, config)?;
    plan_identity(plan, config, security, process, user)?;
    if config.spec.init {
        plan.init();
    }
    plan_exec(plan, config, process, user)
}

/// Limits of a container's user namespace on kernel objects that only memory bounds otherwise, for
/// each user inside. `--sysctl` changes them. The host's limits bound all users inside together,
/// because the keeper creates each user namespace as a different user (keeper/owner.rs).
pub(crate) fn namespace_limits() -> &'static [(&'static str, &'static str)] {
    const LIMITS: [(&str, &str); 12] = [
        ("user.max_user_namespaces", "256"),
        ("user.max_pid_namespaces", "256"),
        ("user.max_net_namespaces", "256"),
        ("user.max_ipc_namespaces", "256"),
        ("user.max_uts_namespaces", "256"),
        ("user.max_time_namespaces", "256"),
        ("user.max_cgroup_namespaces", "256"),
        ("user.max_mnt_namespaces", "1024"), // systemd creates one for each service
        ("user.max_inotify_instances", "128"),
        ("user.max_inotify_watches", "65536"),
        ("user.max_fanotify_groups", "128"),
        ("user.max_fanotify_marks", "65536"),
    ];
    // KERNEL(5.13) for fanotify. A kernel may be built without inotify.
    static PRESENT: OnceLock<Vec<(&str, &str)>> = OnceLock::new();
    PRESENT.get_or_init(|| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open("/proc/sys/user", flags, Mode::empty());
        let Ok(dir) = dir else { return Vec::new() };
        let exists = |name: &str| {
            let file = name.strip_prefix("user.").unwrap_or(name);
            rustix::fs::accessat(&dir, file, Access::EXISTS, AtFlags::empty()).is_ok()
        };
        LIMITS.into_iter().filter(|(name, _)| exists(name)).collect()
    })
}

/// Plans these limits, except those that `--sysctl` sets.
///
/// ORDER: after the sync: the newborn sets them while the engine is busy with Ready.
pub(crate) fn plan_namespace_limits(plan: &mut Plan, config: &Config) -> Result<()> {
    // Without its own namespace, a container would change the limits of the host.
    if weakened("user-namespace") || weakened("namespace-limits") {
        return Ok(());
    }
    for (name, value) in namespace_limits() {
        // A name has dots or slashes.
        let mut configured = config.spec.sysctls.keys();
        if !configured.any(|key| sysctl::path(key) == sysctl::path(name)) {
            plan.sysctl(name, value)?;
        }
    }
    Ok(())
}

/// Returns the ids and capabilities of a program.
pub(crate) fn identity(user: &PasswdUser, granted: Set) -> (Ids, CapabilityMasks) {
    let ids = Ids { uid: user.uid, gid: user.gid, groups: user.groups.clone() };
    // As execve(2) would leave it: root has the granted capabilities, other users none
    // (capabilities(7)).
    let own = if user.uid == 0 { granted } else { Set::empty() };
    let masks = CapabilityMasks {
        bounding: granted.bits(),
        effective: own.bits(),
        permitted: own.bits(),
        inheritable: 0,
        ambient: 0,
    };
    (ids, masks)
}

/// Plans working directory, credentials, capabilities, filter: the last steps before execve, also
/// for `exec`.
pub(crate) fn plan_identity(
    plan: &mut Plan,
    config: &Config,
    security: &Security,
    process: &Process,
    user: &PasswdUser,
) -> Result<()> {
    let cwd = if process.cwd.is_empty() { "/" } else { &process.cwd };
    let granted = granted(security)?;
    plan.chdir(cwd, true);
    let (ids, masks) = identity(user, granted);
    plan.credentials(&ids);
    plan.capabilities(&masks);
    plan_confinement(plan, config, security, granted);
    Ok(())
}

/// Returns the capabilities that a container's configuration grants.
pub(crate) fn granted(security: &Security) -> Result<Set> {
    let all = capability::all();
    let requested = capability::parse(security.capabilities.iter().map(String::as_str))?;
    let unbounded = security.privileged || weakened("capabilities");
    Ok(if unbounded { all } else { requested.intersection(all) })
}

/// Returns whether a container's processes have the default filter.
pub(crate) fn is_filtered(security: &Security) -> bool {
    let requested = security.seccomp == SeccompChoice::Default && !security.privileged;
    requested && !weakened("seccomp")
}

/// Plans the confinement that no process of a container can remove.
pub(crate) fn plan_confinement(
    plan: &mut Plan,
    config: &Config,
    security: &Security,
    granted: Set,
) {
    if security.no_new_privileges && !weakened("no-new-privs") {
        plan.no_new_privs();
    }
    // A private stack may be inspected; a shared one shows the sockets of others.
    let stack = match config.spec.net {
        NetMode::None | NetMode::Private { .. } => seccomp::Network::Own,
        NetMode::Address { .. } => seccomp::Network::Shared,
        NetMode::Host => seccomp::Network::Host,
    };
    if is_filtered(security) {
        let filter = match security.no_aio {
            true => seccomp::default_filter_without_aio(granted, stack),
            false => seccomp::default_filter_for(granted, stack),
        };
        plan.seccomp(&filter.to_bytes());
    }
}

/// Plans resource limits. If the host does not permit to raise a limit, it stays lower.
pub(crate) fn plan_rlimits(plan: &mut Plan, security: &Security) -> Result<()> {
    for limit in &security.rlimits {
        let resource = rlimit::resource(&limit.name).ok_or_else(|| {
            Error::Invalid(format!("there is no resource limit '{}'", limit.name))
        })?;
        plan.rlimit(resource, limit.soft, limit.hard, true);
    }
    Ok(())
}

/// Sets the OOM killer's score adjustment of a newborn (proc_pid_oom_score_adj(5)). If the host does not
/// permit to lower it, it stays higher.
///
/// The engine writes it: the file belongs to the root of the host, and the newborn is the user that owns its
/// user namespace.
/// ORDER: before the last part of the plan is sent, so before the program runs.
pub(crate) fn set_oom_score_adj(newborn: &Newborn, security: &Security) -> Result<()> {
    security.oom_score_adj.map_or(Ok(()), |value| write_oom_score_adj(newborn, value))
}

/// Sets it to a value.
pub(crate) fn write_oom_score_adj(newborn: &Newborn, value: i32) -> Result<()> {
    let path = PathBuf::from(format!("/proc/{}/oom_score_adj", newborn.pid));
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).open(&path)?;
        // The open file is that of one process. A process that lives now was its owner at the open.
        if !pidfd::is_alive(&newborn.pidfd) {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        match file.write_all(value.to_string().as_bytes()) {
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
            other => other,
        }
    };
    write().map_err(Error::file("cannot set", &path))
}

/// Plans the program, its arguments and its environment.
pub(crate) fn plan_exec(
    plan: &mut Plan,
    config: &Config,
    process: &Process,
    user: &PasswdUser,
) -> Result<()> {
    let program = process.args.first().filter(|p| !p.is_empty());
    let program = program.ok_or_else(|| Error::Invalid("there is no command to run".into()))?;
    let mut env = process.env.clone();
    let has = |env: &[String], name: &str| {
        env.iter().any(|e| e.strip_prefix(name).is_some_and(|v| v.starts_with('=')))
    };
    if !has(&env, "HOME") {
        env.push(format!("HOME={}", user.home));
    }
    if !has(&env, "HOSTNAME") {
        env.push(format!("HOSTNAME={}", config.spec.hostname));
    }
    let path = env.iter().find_map(|e| e.strip_prefix("PATH="));
    let candidates: Vec<String> = if program.contains('/') {
        vec![program.clone()]
    } else {
        let path = path.unwrap_or("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        let dirs = path.split(':').map(|d| if d.is_empty() { "." } else { d });
        dirs.map(|d| format!("{d}/{program}")).collect()
    };
    let bytes = |texts: &[String]| texts.iter().map(|t| t.clone().into_bytes()).collect();
    plan.exec(&Program {
        candidates: bytes(&candidates),
        argv: bytes(&process.args),
        envp: bytes(&env),
    });
    Ok(())
}

/// Distinguishes a program that cannot be executed from a failed step.
pub(crate) fn exec_error(process: &Process, e: LaunchError) -> Error {
    let LaunchError::Failed(failure) = &e else { return Error::Launch(e) };
    let program = process.args.first().cloned().unwrap_or_default();
    match failure.exit_code() {
        127 => Error::CommandNotFound(program),
        126 => Error::CommandNotExecutable(
            program.clone(),
            dormouse_kernel::CallError::new("execve", program, failure.errno),
        ),
        _ => Error::Launch(e),
    }
}
