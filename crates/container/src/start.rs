//! How a container starts.
//!
//! Three parties: the engine, which decides; the keeper, which clones; the newborn, which follows a
//! plan and becomes the container's program (see `dormouse_launch`). In order:
//!
//! 1. the kernel objects that are named after the container are made: cgroups, its identity in the
//!    network, its directories on the shared tmpfs;
//! 2. the keeper clones the newborn into those cgroups and into new namespaces, and maps the
//!    container's ids in its user namespace;
//! 3. with that namespace the image's layers are idmapped and stacked; the plan carries the mounts
//!    by descriptor;
//! 4. the newborn executes the plan up to the last step before execve and reports that;
//! 5. the record of the process is written, then the newborn is released.
//!
//! The newborn exits by itself if the engine's process dies before step 5. A killed start therefore
//! leaves no process, only objects named after the container, which the next verb removes.
//!
//! A container has three superblocks of its own (overlay, proc, and its ipc namespace's mqueue): a
//! memory cgroup costs 16 bytes for every superblock of the machine. `/dev`, `/dev/shm` and tmpfs
//! mounts are directories of a shared tmpfs, `/sys` is a clone of its domain's. A devpts is mounted
//! for a terminal, for an init, or on request.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dormouse_image::{Assembled, Lower, Store, Volume, assemble};
use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::capability::{self, Set};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_kernel::mount::{self, MountAttr};
use dormouse_kernel::{ErrorKind, namespace, pidfd, rlimit, seccomp, weakened};
use dormouse_launch::{
    CapabilityMasks, Exec as Program, ExitStatus, Ids, Keeper, Kind, LaunchError, Plan, Spawn,
    TargetKind, Terminal,
};
use dormouse_model::{
    Config, ContainerId, IdMap, Mount, MountKind, NetMode, Process, Propagation, RootSource,
    SeccompChoice, Security, State,
};
use dormouse_network::Domain;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};

use dormouse_checkpoint::Error as CheckpointError;
use dormouse_checkpoint::load::{Sources, Traced};
use dormouse_checkpoint::save::Places;

use crate::admission::Admitted;
use crate::checkpoint::Comeback;
use crate::engine::{Created, Engine};
use crate::error::{Error, Result};
use crate::event::now_unix_ms;
use crate::idle::Why;
use crate::life::{InitRecord, Past, told_by_kernel};
use crate::spec::{Stdio, Stream};
use crate::user::{Account, Accounts};

/// A container's process that this process started or attached to.
#[derive(Debug)]
pub struct Running {
    /// Its container.
    pub id: ContainerId,
    /// Its pid on the host.
    pub pid: u32,
    /// Readable when the process has exited.
    pub pidfd: OwnedFd,
    /// The master side of its terminal, if it has one. The keeper reads the terminal while no
    /// client is attached, so the death of a client does not hang up the program.
    pub console: Option<OwnedFd>,
    /// Its log, opened for appending: data read from `console` is to be written there, too.
    pub console_log: Option<OwnedFd>,
    /// The write end of its standard input, if the keeper holds that.
    pub stdin: Option<OwnedFd>,
    pub(crate) keeper: Keeper,
    /// The keeper was killed before it could report the exit.
    keeper_is_gone: bool,
}

impl Running {
    /// Sends a signal to the process.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let sent = pidfd::send_signal(self.pidfd.as_fd(), signal);
        sent.map_err(Error::call("cannot send the signal"))
    }

    /// Waits for its exit. A first process is not settled by this: see [`Engine::finish`]. If the
    /// keeper was killed meanwhile, the status is read from the kernel.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        match self.keeper.wait(self.pid) {
            Err(LaunchError::KeeperGone) => {
                self.keeper_is_gone = true;
                let told = told_by_kernel(self.pidfd.as_fd())?;
                Ok(told.ok_or(LaunchError::KeeperGone)?)
            }
            other => Ok(other?),
        }
    }

    pub(crate) fn of_exec(
        id: ContainerId,
        pid: u32,
        pidfd: OwnedFd,
        console: Option<OwnedFd>,
        keeper: Keeper,
    ) -> Self {
        Self {
            id,
            pid,
            pidfd,
            console,
            console_log: None,
            stdin: None,
            keeper,
            keeper_is_gone: false,
        }
    }

    /// Leaves the process to the keeper, which settles the container at its exit.
    pub fn detach(self) {
        drop(self.keeper);
    }
}

impl Engine {
    /// Starts a new container. If the start fails, the container is removed.
    pub fn start_new(&self, created: Created, io: Stdio) -> Result<Running> {
        self.start_locked(&created.config, io, Past::default())
            .inspect_err(|_| self.discard(created))
    }

    /// Removes a new container that is not to be started after all.
    pub fn discard(&self, created: Created) {
        let config = &created.config;
        let _ = self.remove_locked(&config.id, Some(config), true); // an earlier error is returned
    }

    /// Waits for the first process of a container, settles the container and returns the exit
    /// status.
    pub fn finish(&self, mut running: Running) -> Result<ExitStatus> {
        let status = running.wait()?;
        if running.keeper_is_gone {
            // No other process has the status. If the directory is gone, the container was removed.
            let _ = status.write(&self.run_dir(&running.id), running.pid);
        }
        self.settle(&running.id)?;
        // A keeper that died meanwhile needs no report.
        let _ = running.keeper.settled(running.pid);
        Ok(status)
    }

    /// Starts a container that is not running.
    pub fn start(&self, id: &ContainerId, io: Stdio) -> Result<Running> {
        let Admitted { lock: _lock, config, look, leave: _leave } = self.lock_to_wake(id)?;
        if look.state == State::Drowsy {
            return Err(self.not(&config, look.state, "wake it: it is started already"));
        }
        if look.is_alive() {
            return Err(self.not(&config, look.state, "it is started already"));
        }
        if look.state == State::Asleep {
            return self.wake_locked(&config, Why::Operator);
        }
        self.settle_found(&config, look, false)?;
        self.start_locked(&config, io, Past::default())
    }

    /// Starts a container from a checkpoint. The caller holds its lock, and it has no process.
    pub(crate) fn start_restored(&self, config: &Config, from: &Comeback) -> Result<Running> {
        self.begin_locked(config, Stdio::detached(), Past::default(), Some(from))
    }

    /// Starts a container without a process. The caller holds its lock.
    pub(crate) fn start_locked(&self, config: &Config, io: Stdio, past: Past) -> Result<Running> {
        self.begin_locked(config, io, past, None)
    }

    fn begin_locked(
        &self,
        config: &Config,
        io: Stdio,
        past: Past,
        from: Option<&Comeback>,
    ) -> Result<Running> {
        // Shared objects are not removed meanwhile.
        let _in_use = self.in_use()?;
        let undo = || match from {
            Some(from) if from.wakes => self.doze(config),
            _ => self.tear_down(&config.id, Some(config)),
        };
        // ORDER: made first and removed last: an existing one means an interrupted start or end.
        let run_dir = self.run_dir(&config.id);
        let mut make = fs::DirBuilder::new();
        if let Err(e) = make.mode(0o700).create(&run_dir) {
            if e.kind() != std::io::ErrorKind::AlreadyExists {
                return Err(Error::file("cannot make directory", run_dir)(e));
            }
            undo()?;
            make.create(&run_dir).map_err(Error::file("cannot make directory", &run_dir))?;
        }
        let started = self.start_clean(config, io, past, from);
        let verb = if from.is_some() { "restore" } else { "start" };
        match &started {
            Ok(_) => self.record(verb, config.id.as_str(), config.name.as_str(), &[]),
            Err(_) => {
                let _ = undo(); // the first error is returned
            }
        }
        started
    }

    fn start_clean(
        &self,
        config: &Config,
        io: Stdio,
        past: Past,
        from: Option<&Comeback>,
    ) -> Result<Running> {
        // Uses two processors, if there are two: the keeper is scheduled while the first cgroup is
        // made, and clones while the others are made.
        let at_hand = from.and_then(|from| from.keeper.take());
        let calling = match at_hand {
            Some(_) => None,
            None => Keeper::call(&self.places().run)?,
        };
        let net = self.find_network(config)?;
        match from {
            None => self.end_silence_in(config, &net)?,
            Some(from) if from.keeps_quiet => self.keep_quiet_in(config, &net)?,
            Some(_) => {}
        }
        let map = config.ids.to_proc_text();
        let (flags, maps) = (namespaces(), (map.clone(), map));
        let (cgroup, (mut keeper, expected)) =
            self.cgroups()?.create_with(config.id.as_str(), &config.limits, |cgroup| {
                let mut keeper = at_hand.map_or_else(|| self.keeper_called(calling), Ok)?;
                let expected = keeper.expect(Spawn {
                    netns: net.netns().map(clone_fd).transpose()?,
                    cgroup,
                    id_map: flags.contains(CloneFlags::NEWUSER).then_some(maps),
                    proc: true,
                    settle: true,
                    template: from.and_then(Comeback::template),
                    ..Spawn::new(config.id.as_str(), Kind::Init, flags.bits())
                })?;
                Ok::<_, Error>((keeper, expected))
            })?;
        if config.systemd {
            cgroup.delegate(config.ids.base, config.ids.base)?;
        }
        let placement = cgroup.placement()?;
        if let Net::Domain(domain) = &net {
            self.enter_domain(config, &cgroup, domain)?;
        }
        let shared = self.shared_dirs(config)?;
        let mounts = self.host_mounts(config, &net, &shared)?;
        let mut newborn = keeper.born(expected)?;
        let userns = if weakened("user-namespace") {
            user_namespace(config.ids)? // file ids are not mapped
        } else {
            pidfd::user_namespace(newborn.pidfd.as_fd())
                .map_err(Error::call("cannot open the container's user namespace"))?
        };
        // The source mounts are closed at the end.
        let Assembled { root, clones: _clones } = self.assemble(config, userns.as_fd())?;
        let account = Accounts::read(root.as_fd()).find(&config.process.user)?;
        let streams = self.streams(config, &account, io)?;
        let mut plan = Plan::new();
        for tasks in placement.v1_tasks {
            let fd = plan.fd(tasks);
            plan.join_cgroup(fd);
        }
        if let Some(adj) = config.security.oom_score_adj {
            plan.oom_score_adj(adj);
        }
        let proc = newborn.take_proc();
        self.plan_root(&mut plan, config, Given { root, proc, mounts, userns, shared })?;
        let restore = match from {
            None => {
                plan_process(&mut plan, config, &account, streams.io)?;
                None
            }
            Some(from) => Some(self.plan_restore(&mut plan, config, &account, from)?),
        };
        newborn.send(plan).map_err(|e| exec_error(&config.process, e))?;
        from.map_or(Ok(()), Comeback::check_small)?; // the newborn is busy for a while
        let console = newborn.ready().map_err(|e| exec_error(&config.process, e))?;
        let since = from.and_then(|from| from.since.as_ref());
        let init = InitRecord {
            pid: newborn.pid,
            start_time: newborn.start_time,
            started_unix_ms: since.map_or_else(now_unix_ms, |since| since.started_unix_ms),
            paused: false,
            drowsy_unix_ms: None,
            console: console.is_some(),
            stopping: false,
            sleeping: from.is_some_and(|from| from.wakes),
            failures: since.map_or(past.failures, |since| since.failures),
            short_runs: since.map_or(past.short_runs, |since| since.short_runs),
        };
        let kept = self.hand_over(&mut keeper, config, console, streams.kept)?;
        self.publish_ports(config)?;
        // ORDER: recorded, then released: a running process is always on record.
        self.write_init(&config.id, &init)?;
        let (pid, pidfd) = (newborn.pid, clone_fd(newborn.pidfd.as_fd())?);
        match &restore {
            None => newborn.go().map_err(|e| exec_error(&config.process, e))?,
            Some(restore) => {
                // ORDER: traced, then released: until it is complete, its death follows ours.
                let mut traced = Traced::seize(pid)?;
                if config.init {
                    newborn.release()?;
                    traced = traced.leave_init()?;
                    newborn.watch()?;
                } else {
                    newborn.go()?;
                }
                let console = kept.console.as_ref().map(AsFd::as_fd);
                let checked = || from.map_or(Ok(()), Comeback::checked);
                let mut fill = |sources: Sources| match from
                    .and_then(|from| from.later.as_ref().zip(Some(&from.reader)))
                {
                    None => Err("no fill process was requested".to_owned()),
                    Some((later, reader)) => self
                        .fill(&mut keeper, &config.id, (later, reader), pidfd.as_fd(), &sources)
                        .map_err(|e| e.to_string()),
                };
                let conducted = traced.conduct(restore, console, checked, &mut fill);
                conducted.map_err(|e| match self.fill_failure(&config.id) {
                    None => e,
                    Some(what) => CheckpointError::Damaged { part: "pages".into(), what },
                })?;
                // Clients wait for the restored process, not for the rest of this function.
                std::thread::yield_now();
            }
        }
        Ok(Running {
            id: config.id.clone(),
            pid,
            pidfd,
            console: kept.console,
            console_log: kept.console_log,
            stdin: kept.stdin,
            keeper,
            keeper_is_gone: false,
        })
    }

    /// Attaches to the terminal or the standard input of a running container; a sleeping one is
    /// woken. Without a terminal, its output is in its logs.
    pub fn attach(&self, id: &ContainerId) -> Result<Running> {
        let config = self.config(id)?;
        if self.look(&config)?.state == State::Asleep {
            self.wake(id, Why::Operator)?;
        }
        let (init, pidfd) = self.alive(&config)?;
        let mut keeper = Keeper::connect(&self.places().run)?.ok_or(LaunchError::KeeperGone)?;
        let kept = self.take_over(&mut keeper, &config)?;
        Ok(Running {
            id: id.clone(),
            pid: init.pid,
            pidfd,
            console: kept.console,
            console_log: kept.console_log,
            stdin: kept.stdin,
            keeper,
            keeper_is_gone: false,
        })
    }

    /// Assembles the layers of a container as one detached mount.
    pub(crate) fn assemble(&self, config: &Config, userns: BorrowedFd<'_>) -> Result<Assembled> {
        let lower = self.lower(&config.root)?;
        let (upper, work) = Store::open_upper(&self.dir(&config.id))?;
        let volume = Volume { upper: &upper, work: &work, volatile: config.auto_remove };
        Ok(assemble(&lower, Some(userns), Some(volume))?)
    }

    /// Opens the read-only layers of a root filesystem.
    pub(crate) fn lower(&self, root: &RootSource) -> Result<Lower> {
        match root {
            RootSource::Image { id, .. } => Ok(self.images()?.rootfs(id)?),
            RootSource::Directory(path) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let dir = rustix::fs::open(path, flags, Mode::empty())
                    .map_err(|e| Error::file("cannot open", path)(e.into()))?;
                Ok(Lower::directory(dir))
            }
        }
    }

    /// Makes the mounts from host directories and the container's shared directories, which do not
    /// depend on its user namespace.
    fn host_mounts(&self, config: &Config, net: &Net, shared: &Path) -> Result<HostMounts> {
        let no_exec = MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
        let mut sys_attr = no_exec;
        sys_attr.set(MountAttr::RDONLY, !weakened("read-only-sys"));
        let systemd = || -> Result<[OwnedFd; 2]> {
            let run = clone_dir(&shared.join("run"), MountAttr::NOSUID | MountAttr::NODEV)?;
            Ok([run, clone_dir(&shared.join("lock"), no_exec)?])
        };
        let is_masked = !config.security.privileged && !weakened("masked-paths");
        Ok(HostMounts {
            dev: clone_dir(&shared.join("dev"), MountAttr::NOSUID | MountAttr::NOEXEC)?,
            shm: clone_dir(&shared.join("shm"), no_exec)?,
            sys: clone_of(net.sys(), Path::new(""), sys_attr)?,
            systemd: config.systemd.then(systemd).transpose()?,
            names: self.name_mounts(config, net, shared)?,
            masks: is_masked.then(|| masks(shared)).transpose()?,
        })
    }

    /// Plans all mounts before the program starts.
    fn plan_root(&self, plan: &mut Plan, config: &Config, given: Given) -> Result<()> {
        let shared = given.shared;
        plan.become_root();
        let mut own = CloneFlags::empty();
        own.set(CloneFlags::NEWCGROUP, !weakened("cgroup-namespace"));
        own.set(CloneFlags::NEWNET, config.net == NetMode::None);
        plan.unshare(own.bits() as u32);
        if !weakened("keyring") {
            plan.session_keyring();
        }
        let root = plan.fd(given.root);
        plan.root(root, config.read_only);
        if let Some(proc) = given.proc {
            let proc = plan.fd(proc);
            plan.proc(proc, "/proc");
        }
        let HostMounts { dev, shm, sys, systemd, names, masks } = given.mounts;
        let dev = plan.fd(dev);
        plan.attach(dev, "/dev", TargetKind::PlainDir, true);
        let shm = plan.fd(shm);
        plan.attach(shm, "/dev/shm", TargetKind::PlainDir, false);
        // The container's user namespace may not mount the host's own mqueue.
        if !weakened("ipc-namespace") {
            plan.mqueue("/dev/mqueue");
        }
        if needs_devpts(config) {
            plan.devpts("/dev/pts", Some(TTY_GROUP));
        }
        let sys = plan.fd(sys);
        plan.attach(sys, "/sys", TargetKind::PlainDir, true);
        if let Some([run, lock]) = systemd {
            let run = plan.fd(run);
            plan.attach(run, "/run", TargetKind::Dir, true);
            // Debian's systemd exits at once if this is no mount and it may not mount one itself.
            let lock = plan.fd(lock);
            plan.attach(lock, "/run/lock", TargetKind::Dir, true);
            plan.cgroup2("/sys/fs/cgroup");
        }
        for (tree, target) in names {
            let fd = plan.fd(tree);
            plan.attach(fd, target, TargetKind::File, true);
        }
        for (n, mount) in config.mounts.iter().enumerate() {
            self.plan_mount(
                plan,
                config,
                mount,
                &shared.join(format!("mount-{n}")),
                given.userns.as_fd(),
            )?;
        }
        if let Some([null, empty]) = masks {
            let (null, empty) = (plan.fd(null), plan.fd(empty));
            plan.mask(null, empty, hidden());
        }
        // Without its own UTS namespace the newborn would set the host's name.
        if !weakened("uts-namespace") {
            plan.hostname(&config.hostname);
            if let Some(domain) = &config.domainname {
                plan.domainname(domain);
            }
        }
        if config.net == NetMode::None {
            plan_own_stack(plan)?;
        }
        // Without its own namespace, a container would change the limits of the host.
        if !weakened("user-namespace") {
            for (name, value) in namespace_limits() {
                plan.sysctl(name, value)?;
            }
        }
        for (name, value) in &config.sysctls {
            plan.sysctl(name, value)?;
        }
        Ok(())
    }

    /// Plans one mount requested by the operator.
    fn plan_mount(
        &self,
        plan: &mut Plan,
        config: &Config,
        mount: &Mount,
        shared: &Path,
        userns: BorrowedFd<'_>,
    ) -> Result<()> {
        let mut attr = MountAttr::empty();
        attr.set(MountAttr::RDONLY, mount.read_only);
        attr.set(MountAttr::NOEXEC, mount.no_exec);
        // Mounts from outside give no privileges.
        attr |= MountAttr::NOSUID | MountAttr::NODEV;
        let (tree, kind) = match &mount.kind {
            MountKind::Bind { source, recursive, idmap, propagation } => {
                let tree = mount::clone_tree_in_group(CWD, source, *recursive)
                    .map_err(|e| Error::Rootfs(source.clone(), e))?;
                if *idmap {
                    mount::idmap(tree.as_fd(), userns, *recursive)
                        .map_err(Error::call("cannot map the ids of a bind mount"))?;
                }
                if *propagation != Propagation::Shared {
                    let slave = *propagation == Propagation::Slave;
                    mount::set_propagation(tree.as_fd(), slave)
                        .map_err(Error::call("cannot set the propagation of a bind mount"))?;
                }
                mount::set_attr(tree.as_fd(), *recursive, attr, MountAttr::empty())
                    .map_err(Error::call("cannot set the attributes of a bind mount"))?;
                let is_dir = fs::metadata(source).is_ok_and(|m| m.is_dir());
                (tree, if is_dir { TargetKind::Dir } else { TargetKind::File })
            }
            MountKind::Volume { name } => {
                let path = self.volume(name.as_str(), config.ids)?;
                (clone_dir(&path, attr)?, TargetKind::Dir)
            }
            MountKind::Tmpfs { size_bytes, mode } => {
                let tree = match size_bytes {
                    // Only a separate superblock can enforce a size.
                    Some(size) => tmpfs(*size, *mode, config.ids, attr)?,
                    None => {
                        make_owned_dir(shared, *mode, config.ids)?;
                        clone_dir(shared, attr)?
                    }
                };
                (tree, TargetKind::Dir)
            }
            MountKind::Devpts => {
                plan.devpts(&mount.target, Some(TTY_GROUP));
                return Ok(());
            }
        };
        let fd = plan.fd(tree);
        plan.attach(fd, &mount.target, kind, true);
        Ok(())
    }

    /// Returns the directory of a named volume; a new one is owned by the container's root.
    fn volume(&self, name: &str, ids: IdMap) -> Result<PathBuf> {
        let path = self.places().volumes().join(name);
        match fs::create_dir(&path) {
            Ok(()) => {
                chown(&path, Some(ids.base), Some(ids.base))
                    .map_err(Error::file("cannot own", &path))?;
                set_mode(&path, 0o755)?;
            }
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::file("cannot make volume", path)(e)),
        }
        Ok(path)
    }

    /// Makes the mounts for `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`, with their
    /// targets.
    fn name_mounts(
        &self,
        config: &Config,
        net: &Net,
        shared: &Path,
    ) -> Result<Vec<(OwnedFd, &'static str)>> {
        let mut all = Vec::with_capacity(3);
        let taken = |path: &str| config.mounts.iter().any(|m| m.target == path);
        let mut bind = |from: &Path, to: &'static str| -> Result<()> {
            if taken(to) {
                return Ok(());
            }
            let attr = MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
            let tree = mount::clone_with(CWD, from, attr)
                .map_err(|e| Error::Rootfs(from.to_path_buf(), e))?;
            all.push((tree, to));
            Ok(())
        };
        let own = |name: &str, text: String| -> Result<PathBuf> {
            let path = shared.join(name);
            fs::write(&path, text).map_err(Error::file("cannot write", &path))?;
            chown(&path, Some(config.ids.base), Some(config.ids.base))
                .map_err(Error::file("cannot own", &path))?;
            set_mode(&path, 0o644)?;
            Ok(path)
        };
        let own_names = || format!("127.0.0.1\tlocalhost {}\n::1\tlocalhost\n", config.hostname);
        bind(&own("hostname", format!("{}\n", config.hostname))?, "/etc/hostname")?;
        match net {
            Net::Domain(domain) => {
                let hosts = self.network()?.hosts_file(domain);
                if config.extra_hosts.is_empty() {
                    bind(&hosts, "/etc/hosts")?;
                } else {
                    // With lines of its own a container does not see later changes of names.
                    let mut text =
                        fs::read_to_string(&hosts).map_err(Error::file("cannot read", &hosts))?;
                    text.extend(config.extra_hosts.iter().map(|(n, ip)| format!("{ip}\t{n}\n")));
                    bind(&own("hosts", text)?, "/etc/hosts")?;
                }
                let resolv = self.network()?.resolv_conf(domain);
                if config.dns.is_empty() {
                    bind(&resolv, "/etc/resolv.conf")?;
                }
            }
            Net::Host { .. } => {
                // A host installed by hand or by a bootstrap tool may have none.
                if Path::new("/etc/hosts").exists() {
                    bind(Path::new("/etc/hosts"), "/etc/hosts")?;
                } else {
                    bind(&own("hosts", own_names())?, "/etc/hosts")?;
                }
                if config.dns.is_empty() && Path::new("/etc/resolv.conf").exists() {
                    let text = fs::read_to_string("/etc/resolv.conf")
                        .map_err(Error::file("cannot read", "/etc/resolv.conf"))?;
                    bind(&own("resolv.conf", text)?, "/etc/resolv.conf")?;
                }
            }
            Net::None { .. } => bind(&own("hosts", own_names())?, "/etc/hosts")?,
        }
        if !config.dns.is_empty() {
            let text = config.dns.iter().map(|ip| format!("nameserver {ip}\n")).collect();
            bind(&own("resolv.conf", text)?, "/etc/resolv.conf")?;
        }
        Ok(all)
    }

    /// Makes the container's directories on a shared tmpfs anew.
    fn shared_dirs(&self, config: &Config) -> Result<PathBuf> {
        let dir = self.shared_dir(&config.id, config.ids)?;
        fs::create_dir(&dir).map_err(Error::file("cannot make directory", &dir))?;
        make_dev(&dir.join("dev"), config.ids)?;
        make_owned_dir(&dir.join("shm"), 0o1777, config.ids)?;
        if config.systemd {
            make_owned_dir(&dir.join("run"), 0o755, config.ids)?;
            make_owned_dir(&dir.join("lock"), 0o1777, config.ids)?;
        }
        Ok(dir)
    }

    /// Opens the standard streams of a container.
    fn streams(&self, config: &Config, account: &Account, io: Stdio) -> Result<Streams> {
        if config.process.terminal {
            let size = io.terminal_size.unwrap_or_default();
            return Ok(Streams { io: Io::Terminal(size), kept: None });
        }
        let mut kept = None;
        let dir = self.dir(&config.id);
        let mut open = |stream: Stream, name: &str| -> Result<OwnedFd> {
            match stream {
                Stream::Log => own(open_log(&dir.join(name))?, config.ids, account.uid),
                Stream::Kept => {
                    let (read, write) =
                        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                            .map_err(|e| Error::file("cannot make", "a pipe")(e.into()))?;
                    kept = Some(write);
                    own(read, config.ids, account.uid)
                }
                other => open_stream(other, config.ids, account.uid),
            }
        };
        let fds = [
            open(io.stdin, "stdin")?,
            open(io.stdout, "stdout.log")?,
            open(io.stderr, "stderr.log")?,
        ];
        Ok(Streams { io: Io::Fds(fds), kept })
    }

    /// Gives the terminal or the kept end of standard input to the keeper, attaches to it at once,
    /// and has the keeper bound the logs.
    fn hand_over(
        &self,
        keeper: &mut Keeper,
        config: &Config,
        console: Option<OwnedFd>,
        kept: Option<OwnedFd>,
    ) -> Result<Kept> {
        let id = config.id.as_str();
        let logs = self.logs_of(config);
        if config.log_max_bytes > 0 && !config.auto_remove {
            let paths: Vec<&Path> =
                std::iter::once(&logs.stdout).chain(&logs.stderr).map(PathBuf::as_path).collect();
            keeper.keep_logs(id, config.log_max_bytes, &paths)?;
        }
        match (console, kept) {
            (Some(master), _) => keeper.keep_console(id, master, open_log(&logs.stdout)?)?,
            (None, Some(write)) => keeper.keep_stdin(id, write)?,
            (None, None) => return Ok(Kept::default()),
        }
        self.take_over(keeper, config)
    }

    /// Attaches to the streams that the keeper holds of a container, as long as the connection
    /// lives.
    fn take_over(&self, keeper: &mut Keeper, config: &Config) -> Result<Kept> {
        let id = config.id.as_str();
        if config.process.terminal {
            let console = keeper.attach_console(id)?;
            let (console, log) = (Some(console.master), Some(console.log));
            return Ok(Kept { console, console_log: log, stdin: None });
        }
        let stdin = if config.process.stdin {
            match keeper.attach_stdin(id) {
                Err(e) if e.kind() == ErrorKind::NotFound => None, // its starter gave another stdin
                other => Some(other?),
            }
        } else {
            None
        };
        Ok(Kept { stdin, ..Kept::default() })
    }

    /// Returns the network stack a container starts in; made if missing.
    pub(crate) fn find_network(&self, config: &Config) -> Result<Net> {
        Ok(match &config.net {
            NetMode::Host => {
                let open = |path: &str, flags| {
                    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
                        .map_err(|e| Error::file("cannot open", path)(e.into()))
                };
                let netns = open("/proc/self/ns/net", OFlags::RDONLY)?;
                Net::Host { netns, sys: open("/sys", OFlags::PATH | OFlags::DIRECTORY)? }
            }
            NetMode::None => Net::None { sys: self.network()?.empty_sys()? },
            NetMode::Address { domain } => Net::Domain(self.domain(domain)?),
        })
    }

    /// Registers the container in its domain, by its addresses and its names.
    pub(crate) fn enter_domain(
        &self,
        config: &Config,
        cgroup: &Cgroup,
        domain: &Domain,
    ) -> Result<()> {
        let network = self.network()?;
        let v2 = cgroup.v2_id().ok_or_else(|| {
            Error::Invalid(
                "address networking needs a cgroup v2 hierarchy to be mounted: use --net none or \
                 --net host"
                    .into(),
            )
        })?;
        network.enter(domain, &config.id, v2, &config.addresses)?;
        self.name_in_domain(config, domain)
    }

    pub(crate) fn name_in_domain(&self, config: &Config, domain: &Domain) -> Result<()> {
        let names = [config.name.as_str(), config.hostname.as_str(), config.id.short()];
        Ok(self.network()?.hosts_add(domain, &config.id, &names, &config.addresses)?)
    }

    pub(crate) fn publish_ports(&self, config: &Config) -> Result<()> {
        if config.publish.is_empty() {
            return Ok(());
        }
        Ok(self.network()?.publish(&config.id, &config.publish, &config.addresses)?)
    }

    /// Releases the registrations of [`Engine::enter_domain`] and [`Engine::publish_ports`].
    pub(crate) fn leave_network(&self, id: &ContainerId, config: Option<&Config>) -> Result<()> {
        let network = self.network()?;
        if config.is_none_or(|c| !c.publish.is_empty()) {
            network.unpublish(id)?;
        }
        Ok(network.leave(id)?)
    }

    pub(crate) fn rename_in_network(&self, config: &Config) -> Result<()> {
        let NetMode::Address { domain } = &config.net else { return Ok(()) };
        if !self.look(config)?.is_alive() {
            return Ok(());
        }
        self.name_in_domain(config, &self.domain(domain)?)
    }

    pub(crate) fn update_addresses(
        &self,
        config: &mut Config,
        update: &crate::spec::Update,
        alive: bool,
    ) -> Result<()> {
        let NetMode::Address { domain } = config.net.clone() else {
            return Err(Error::Invalid("only a container in address mode has addresses".into()));
        };
        let network = self.network()?;
        config.addresses = network.update(&config.id, &update.ip_add, &update.ip_rm)?;
        if alive && let Some(cgroup) = self.cgroups()?.find(config.id.as_str())? {
            self.enter_domain(config, &cgroup, &self.domain(&domain)?)?;
        }
        Ok(())
    }
}

/// The network stack a container starts in.
pub(crate) enum Net {
    Host {
        netns: OwnedFd,
        sys: OwnedFd,
    },
    /// The newborn makes its own stack.
    None {
        sys: OwnedFd,
    },
    Domain(Domain),
}

impl Net {
    /// Its namespace, if it exists already.
    fn netns(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Host { netns, .. } => Some(netns.as_fd()),
            Self::None { .. } => None,
            Self::Domain(domain) => Some(domain.netns.as_fd()),
        }
    }

    /// The sysfs of this stack.
    fn sys(&self) -> BorrowedFd<'_> {
        match self {
            Self::Host { sys, .. } | Self::None { sys } => sys.as_fd(),
            Self::Domain(domain) => domain.sys.as_fd(),
        }
    }
}

/// The parts of a container's root.
struct Given {
    root: OwnedFd,
    proc: Option<OwnedFd>,
    mounts: HostMounts,
    userns: OwnedFd,
    /// Its directories of the shared tmpfs.
    shared: PathBuf,
}

/// Detached mounts that need nothing from the newborn: made while the keeper clones it.
struct HostMounts {
    dev: OwnedFd,
    shm: OwnedFd,
    sys: OwnedFd,
    /// `/run` and `/run/lock`, for systemd.
    systemd: Option<[OwnedFd; 2]>,
    /// Files of names, with their targets.
    names: Vec<(OwnedFd, &'static str)>,
    /// A file and a directory to be mounted over hidden paths.
    masks: Option<[OwnedFd; 2]>,
}

/// Streams that the keeper holds of a container and its starter uses.
#[derive(Default)]
struct Kept {
    console: Option<OwnedFd>,
    console_log: Option<OwnedFd>,
    stdin: Option<OwnedFd>,
}

/// The group that owns terminals on Debian and most others.
pub(crate) const TTY_GROUP: u32 = 5;

/// Standard streams of a process: a terminal of these rows and columns, or three descriptors.
pub(crate) enum Io {
    Terminal((u16, u16)),
    Fds([OwnedFd; 3]),
}

struct Streams {
    io: Io,
    kept: Option<OwnedFd>,
}

/// Opens a stream that needs neither the container's log nor the keeper.
pub(crate) fn open_stream(stream: Stream, ids: IdMap, uid: u32) -> Result<OwnedFd> {
    match stream {
        Stream::Null => open_null(),
        Stream::Fd(fd) => {
            let stat = rustix::fs::fstat(&fd)
                .map_err(|e| Error::file("cannot look at", "a standard stream")(e.into()))?;
            let is_pipe = FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
            if is_pipe { own(fd, ids, uid) } else { Ok(fd) }
        }
        Stream::Log | Stream::Kept => Err(Error::Invalid(
            "only the first process of a container has a log: give this one descriptors".into(),
        )),
    }
}

/// Gives a stream to the process's user: programs open `/dev/stdout` again.
fn own(fd: OwnedFd, ids: IdMap, uid: u32) -> Result<OwnedFd> {
    let uid = rustix::fs::Uid::from_raw(ids.to_host(uid).unwrap_or(ids.base));
    rustix::fs::fchown(&fd, Some(uid), None)
        .map_err(|e| Error::file("cannot own", "a standard stream")(e.into()))?;
    Ok(fd)
}

/// Adds the streams or the terminal of a process to its plan.
pub(crate) fn plan_io(plan: &mut Plan, io: Io, uid: u32, console: bool) {
    match io {
        Io::Terminal(size) => {
            plan.terminal(&Terminal { uid, console, size, ..Terminal::default() });
        }
        Io::Fds([stdin, stdout, stderr]) => {
            let fds = [plan.fd(stdin), plan.fd(stdout), plan.fd(stderr)];
            plan.stdio(fds);
        }
    }
}

/// The namespaces of every container. The cgroup namespace is not among them: made by clone3 it
/// would be rooted at the keeper's own cgroup, so the newborn makes it inside its own cgroup.
const NAMESPACES: CloneFlags = CloneFlags::NEWUSER
    .union(CloneFlags::NEWNS)
    .union(CloneFlags::NEWPID)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWTIME);

/// The namespaces, without those that the isolation tests leave out.
fn namespaces() -> CloneFlags {
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

/// Makes a user namespace with a container's ids and no process in it.
pub(crate) fn user_namespace(ids: IdMap) -> Result<OwnedFd> {
    let map = ids.to_proc_text();
    namespace::new_user(&map, &map).map_err(Error::call("cannot make a user namespace"))
}

/// Plans a loopback device, and settings that permit in the private stack what root of a machine
/// may do: root inside has only the granted capabilities.
fn plan_own_stack(plan: &mut Plan) -> Result<()> {
    plan.loopback();
    plan.sysctl("net.ipv4.ip_unprivileged_port_start", "0")?;
    // Group ids are those of the writing process: up to the container's nobody, its last id on the
    // host.
    let all = format!("0 {}", IdMap::NOBODY);
    plan.sysctl("net.ipv4.ping_group_range", &all)?;
    plan.sysctl("net.unix.max_dgram_qlen", "512")?; // as systemd sets it on a host
    Ok(())
}

/// Returns the places where the engine mounts anything.
pub(crate) fn places(config: &Config) -> Places {
    let brings_others = |mount: &&Mount| match mount.kind {
        MountKind::Bind { recursive, propagation, .. } => {
            recursive || propagation != Propagation::Private
        }
        MountKind::Volume { .. } | MountKind::Tmpfs { .. } | MountKind::Devpts => false,
    };
    let trees = config.mounts.iter().filter(brings_others);
    Places {
        configured: configured(config),
        trees: trees.map(|mount| mount.target.to_string()).collect(),
        terminals: "/dev/pts".into(),
    }
}

/// Returns the places that are mounted before the program starts.
fn configured(config: &Config) -> Vec<String> {
    let mut all = vec!["/", "/proc", "/dev", "/dev/shm", "/dev/mqueue", "/sys"];
    all.extend(["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]);
    if needs_devpts(config) {
        all.push("/dev/pts");
    }
    if config.process.terminal && (config.systemd || config.init) {
        all.push("/dev/console");
    }
    if config.systemd {
        all.extend(["/run", "/run/lock", "/sys/fs/cgroup"]);
    }
    all.extend(hidden());
    all.extend(config.mounts.iter().map(|mount| &*mount.target));
    all.into_iter().map(str::to_owned).collect()
}

/// Returns whether a container has its own pseudo-terminals from the start. Other containers get
/// them at the first `exec --tty`.
fn needs_devpts(config: &Config) -> bool {
    let declared = config.labels.get("dormouse.devpts").is_some_and(|v| v == "true");
    config.process.terminal || config.init || config.systemd || declared
}

/// Plans the program: its identity, its confinement and its streams.
fn plan_process(plan: &mut Plan, config: &Config, account: &Account, io: Io) -> Result<()> {
    let (process, security) = (&config.process, &config.security);
    plan.setsid();
    plan_io(plan, io, account.uid, config.systemd || config.init);
    plan_rlimits(plan, security)?;
    plan.umask(process.umask.unwrap_or(0o022));
    plan.sync();
    plan_identity(plan, config, security, process, account)?;
    if config.init {
        plan.init();
    }
    plan_exec(plan, config, process, account)
}

/// Returns the ids and capabilities of a program.
pub(crate) fn identity(account: &Account, granted: Set) -> (Ids, CapabilityMasks) {
    let ids = Ids { uid: account.uid, gid: account.gid, groups: account.groups.clone() };
    // As execve(2) would leave it: root has the granted capabilities, other users none
    // (capabilities(7)).
    let own = if account.uid == 0 { granted } else { Set::empty() };
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
    account: &Account,
) -> Result<()> {
    let cwd = if process.cwd.is_empty() { "/" } else { &process.cwd };
    let granted = granted(security)?;
    plan.chdir(cwd, true);
    let (ids, masks) = identity(account, granted);
    plan.credentials(&ids);
    plan.capabilities(&masks);
    plan_confinement(plan, config, security, granted);
    Ok(())
}

/// Returns the capabilities that a container's configuration grants.
pub(crate) fn granted(security: &Security) -> Result<Set> {
    let all = capability::all();
    let asked = capability::parse(security.capabilities.iter().map(String::as_str))?;
    let unbounded = security.privileged || weakened("capabilities");
    Ok(if unbounded { all } else { asked.intersection(all) })
}

/// Returns whether a container's processes have the default filter.
pub(crate) fn is_filtered(security: &Security) -> bool {
    let asked = security.seccomp == SeccompChoice::Default && !security.privileged;
    asked && !weakened("seccomp")
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
    let stack = match config.net {
        NetMode::None => seccomp::Network::Own,
        NetMode::Address { .. } => seccomp::Network::Shared,
        NetMode::Host => seccomp::Network::Host,
    };
    if is_filtered(security) {
        plan.seccomp(&seccomp::default_filter_for(granted, stack).to_bytes());
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

/// Plans the program, its arguments and its environment.
pub(crate) fn plan_exec(
    plan: &mut Plan,
    config: &Config,
    process: &Process,
    account: &Account,
) -> Result<()> {
    let program = process.args.first().filter(|p| !p.is_empty());
    let program = program.ok_or_else(|| Error::Invalid("there is no command to run".into()))?;
    let mut env = process.env.clone();
    let has = |env: &[String], name: &str| {
        env.iter().any(|e| e.strip_prefix(name).is_some_and(|v| v.starts_with('=')))
    };
    if !has(&env, "HOME") {
        env.push(format!("HOME={}", account.home));
    }
    if !has(&env, "HOSTNAME") {
        env.push(format!("HOSTNAME={}", config.hostname));
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

/// Paths of `/proc` and `/sys` that user namespaces do not hide and that reveal facts about the
/// host, as far as this kernel has them. Files for the host's root only need no mask: no process
/// inside has its uid.
pub(crate) fn hidden() -> &'static [&'static str] {
    const HIDDEN: [&str; 12] = [
        "/proc/kcore",
        "/proc/keys",
        "/proc/latency_stats",
        "/proc/timer_list",
        "/proc/timer_stats",
        "/proc/sched_debug",
        "/proc/interrupts",
        "/proc/kallsyms",
        "/proc/acpi",
        "/proc/scsi",
        "/proc/asound",
        "/sys/firmware",
    ];
    static THERE: OnceLock<Vec<&str>> = OnceLock::new();
    THERE.get_or_init(|| HIDDEN.into_iter().filter(|path| Path::new(path).exists()).collect())
}

/// Limits of a container's user namespace on kernel objects that only memory bounds otherwise, for
/// each user inside. `--sysctl` changes them. The host's limits bound all users inside together,
/// because the keeper creates each user namespace as a different user (keeper/owner.rs).
fn namespace_limits() -> &'static [(&'static str, &'static str)] {
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
    let exists = |name: &str| Path::new("/proc/sys").join(name.replace('.', "/")).exists();
    PRESENT.get_or_init(|| LIMITS.into_iter().filter(|(name, _)| exists(name)).collect())
}

/// Makes a file and a directory to be mounted over hidden paths.
fn masks(shared: &Path) -> Result<[OwnedFd; 2]> {
    let attr = MountAttr::NOSUID | MountAttr::NOEXEC | MountAttr::RDONLY;
    let null = clone_dir(&shared.join("dev/null"), attr)?;
    let empty = shared.join("empty");
    fs::create_dir(&empty).map_err(Error::file("cannot make directory", &empty))?;
    Ok([null, clone_dir(&empty, attr)?])
}

/// Makes a detached mount of a host directory.
fn clone_dir(path: &Path, attr: MountAttr) -> Result<OwnedFd> {
    clone_of(CWD, path, attr)
}

fn clone_of(dir: BorrowedFd<'_>, path: &Path, attr: MountAttr) -> Result<OwnedFd> {
    mount::clone_with(dir, path, attr)
        .map_err(Error::call("cannot clone a mount for the container"))
}

/// Makes a separate tmpfs with an enforced size.
fn tmpfs(size_bytes: u64, mode: u32, ids: IdMap, attr: MountAttr) -> Result<OwnedFd> {
    let make = || {
        let fs = mount::FsContext::open("tmpfs")?;
        fs.set_string("size", &size_bytes.to_string())?;
        fs.set_string("mode", &format!("{mode:o}"))?;
        fs.set_string("uid", &ids.base.to_string())?;
        fs.set_string("gid", &ids.base.to_string())?;
        fs.create(attr)
    };
    make().map_err(Error::call("cannot make a tmpfs"))
}

/// Makes the device nodes every program expects, and the links into procfs. The host's root makes
/// the nodes: no process in a user namespace can.
fn make_dev(path: &Path, ids: IdMap) -> Result<()> {
    const NODES: [(&str, u32, u32); 6] = [
        ("null", 1, 3),
        ("zero", 1, 5),
        ("full", 1, 7),
        ("random", 1, 8),
        ("urandom", 1, 9),
        ("tty", 5, 0),
    ];
    const LINKS: [(&str, &str); 6] = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
        ("core", "/proc/kcore"),
    ];
    make_owned_dir(path, 0o755, ids)?;
    let dev = open_dir(path)?;
    let (uid, gid) = (rustix::fs::Uid::from_raw(ids.base), rustix::fs::Gid::from_raw(ids.base));
    for (name, major, minor) in NODES {
        let (mode, number) = (Mode::from_raw_mode(0o666), rustix::fs::makedev(major, minor));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::mknodat(&dev, name, FileType::CharacterDevice, mode, number)
            .and_then(|()| rustix::fs::chmodat(&dev, name, mode, AtFlags::empty())) // past our umask
            .and_then(|()| rustix::fs::chownat(&dev, name, Some(uid), Some(gid), flags))
            .map_err(|e| Error::file("cannot make device", path.join(name))(e.into()))?;
    }
    for (name, target) in LINKS {
        rustix::fs::symlinkat(target, &dev, name)
            .map_err(|e| Error::file("cannot make link", path.join(name))(e.into()))?;
    }
    for name in ["pts", "shm", "mqueue"] {
        make_owned_dir(&path.join(name), 0o755, ids)?;
    }
    Ok(())
}

fn open_dir(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|e| Error::file("cannot open", path)(e.into()))
}

/// Makes an empty directory that belongs to the container's root.
fn make_owned_dir(path: &Path, mode: u32, ids: IdMap) -> Result<()> {
    fs::create_dir(path).map_err(Error::file("cannot make directory", path))?;
    chown(path, Some(ids.base), Some(ids.base)).map_err(Error::file("cannot own", path))?;
    set_mode(path, mode)
}

/// Sets the permissions of a new file, which the umask may have reduced.
fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(Error::file("cannot set permissions of", path))
}

pub(crate) fn open_null() -> Result<OwnedFd> {
    rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
        .map_err(|e| Error::file("cannot open", "/dev/null")(e.into()))
}

/// Opens a log file for appending only: a program that reopens it through `/proc/self/fd` can
/// damage its own log and no other.
pub(crate) fn open_log(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
        .map_err(|e| Error::file("cannot open log", path)(e.into()))
}

pub(crate) fn clone_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(Error::file("cannot duplicate", "a descriptor"))
}
