//! `create`: from a bundle to a process that waits to be started. The crate's root lists the steps.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use dormouse_checkpoint::load;
use dormouse_keeper::birth::{self, Wanted};
use dormouse_keeper::newborn::Heritage;
use dormouse_keeper::tiny::Outside;
use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::cgroup::{CgroupError, Forest, Tree};
use dormouse_kernel::mount::{FsContext, MountAttr, Propagation};
use dormouse_kernel::{pidfd, proc, sysctl, weakened};
use dormouse_launch::flat::Code;
use dormouse_launch::{LaunchError, Newborn, Plan};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::bundle::{Bundle, check_process};
use crate::comeback::{self, Comeback, Confined};
use crate::descriptor::clone_fd;
use crate::error::{Error, Result};
use crate::filter::{self, Compiled};
use crate::hook::Inside;
use crate::identity::{self, Ids, map_text};
use crate::mount::{Given, propagation};
use crate::namespace::Namespaces;
use crate::process::{self, Affinity, Io, Last};
use crate::spec::Process;
use crate::store::{self, Left, Record, Status};
use crate::{Runtime, cgroup, checkpoint, console, device, hook, mount as mounts};

/// The socket at which a created container waits.
pub(crate) const START: &str = "start";
/// The page that hands over a seccomp listener's descriptor number.
pub(crate) const LISTENER: &str = "listener";
/// How long the last process of a killed container may take to exit.
pub(crate) const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Options of `create` and `run`.
#[derive(Debug, Default)]
pub struct Create {
    /// The directory of `config.json`.
    pub bundle: PathBuf,
    /// Socket that receives the master of a terminal.
    pub console_socket: Option<PathBuf>,
    /// File that receives the pid.
    pub pid_file: Option<PathBuf>,
    /// Where a pidfd of the process is sent.
    pub pidfd_socket: Option<PathBuf>,
    /// The root filesystem only covers the host's: for a host that runs from its initramfs.
    pub no_pivot: bool,
    /// The container keeps the caller's session keyring.
    pub no_new_keyring: bool,
    /// Descriptors for the program at 3 and following ([`inherited`](dormouse_keeper::inherited),
    /// before this process has opened anything).
    pub preserve: Vec<OwnedFd>,
    /// How many of them are listening sockets for the program (sd_listen_fds(3)).
    pub listen_fds: u32,
    /// The master of a terminal is returned, not sent to a socket.
    pub keep_console: bool,
}

/// A container that waits to be started.
#[derive(Debug)]
pub struct Created {
    /// Its first process.
    pub pid: u32,
    /// A pidfd of it.
    pub pidfd: OwnedFd,
    /// The master of its terminal, if requested.
    pub console: Option<OwnedFd>,
}

impl Runtime {
    /// Makes a container from a bundle. On failure the container is removed.
    pub fn create(&self, id: &str, create: &Create) -> Result<Created> {
        self.make(id, create, None)
    }

    /// Makes a container; from a checkpoint if one is given, and then it runs.
    pub(crate) fn make(
        &self,
        id: &str,
        create: &Create,
        comeback: Option<&Comeback>,
    ) -> Result<Created> {
        store::check_id(id)?;
        let bundle = Bundle::open(&create.bundle)?;
        let linux = bundle.linux();
        // The process may be missing until the start, which then fails.
        let nothing = Process { cwd: "/".into(), ..Process::default() };
        let process = bundle.spec.process.as_ref().unwrap_or(&nothing);
        console::check(process.terminal, create.console_socket.as_deref(), create.keep_console)?;
        let namespaces = Namespaces::check(&linux.namespaces)?;
        let filter = linux.seccomp.as_ref().map(filter::compile).transpose()?;
        process::warn_of_unknown(process.capabilities.as_ref());
        let cgroup = cgroup::path(linux.cgroups_path.as_deref(), id, self.systemd_cgroup)?;
        if let Some(comeback) = comeback {
            comeback.check(&bundle, process)?;
        }

        let forest = self.forest()?;
        if let Some(above) = forest.occupied_above(&cgroup)? {
            let why =
                format!("{cgroup}: processes are in {above}, and cgroup v2 runs none below it");
            return Err(Error::field("linux.cgroupsPath", why));
        }
        let cgroup_made = forest.missing(&cgroup)?;
        let mark = self.store.mark(id)?;
        let free = |dir| {
            let tree = forest.open(&cgroup, cgroup_made).map_err(Error::from);
            match tree.and_then(|tree| self.refuse_shared(&tree, &cgroup)) {
                Ok(()) => Ok(dir),
                Err(e) => {
                    let _ = self.store.remove(id); // if it stays, its mark finds it
                    Err(e)
                }
            }
        };
        let dir = match self.store.make(id).and_then(free) {
            Ok(dir) => dir,
            Err(e) => {
                let _ = mark.remove(); // the first error is returned
                return Err(e);
            }
        };
        let record = Record {
            version: 1,
            id: id.to_owned(),
            oci_version: bundle.spec.oci_version.clone(),
            bundle: bundle.dir.clone(),
            rootfs: bundle.rootfs.clone(),
            created: crate::log::now(),
            cgroup,
            cgroup_made,
            namespaces: namespaces.words(),
            owns_pids: namespaces.makes("pid"),
            annotations: bundle.spec.annotations.clone(),
            poststart: bundle.spec.hooks.poststart.clone(),
            poststop: bundle.spec.hooks.poststop.clone(),
            streams: if process.terminal { Vec::new() } else { checkpoint::streams() },
            ..Record::default()
        };
        let mut making = Making {
            runtime: self,
            create,
            bundle: &bundle,
            process,
            namespaces,
            filter,
            forest,
            record,
            dir,
            comeback,
            newborn: None,
        };
        let made = making.all();
        match made {
            Ok(created) => {
                mark.remove()?;
                Ok(created)
            }
            Err(e) => {
                let Making { record, newborn, .. } = making;
                if let Some(newborn) = newborn {
                    let _ = pidfd::send_signal(&newborn.pidfd, 9);
                }
                // On failure the next command finds the rest by its mark.
                let gone = self.take_down(&record);
                if gone.is_ok() {
                    // After a failed hook the caller's own cleanup is due, too.
                    let _ = hook::run("poststop", &record.poststop, &record, Status::Stopped);
                    let _ = mark.remove();
                }
                Err(e)
            }
        }
    }

    /// Refuses an existing cgroup that is in use: the end of a container ends all processes in its
    /// cgroup.
    fn refuse_shared(&self, tree: &Tree, path: &str) -> Result<()> {
        if !tree.exists() {
            return Ok(());
        }
        let field = |why: String| Error::field("linux.cgroupsPath", format!("{path}: {why}"));
        let count = tree.pids()?.len();
        if count != 0 {
            let why = format!("container's cgroup is not empty: {count} process(es) found");
            return Err(field(why));
        }
        if tree.is_frozen()? {
            let why = "container's cgroup unexpectedly frozen: a process in it would never run";
            return Err(field(why.into()));
        }
        let parts = |path: &str| -> Vec<String> {
            path.split('/').filter(|p| !p.is_empty() && *p != ".").map(str::to_owned).collect()
        };
        let own = parts(path);
        for id in self.store.ids()? {
            let Ok(other) = self.store.read(&id) else { continue }; // deleted meanwhile
            if parts(&other.cgroup) == own {
                return Err(field(format!("it is the cgroup of container {id:?}")));
            }
        }
        Ok(())
    }

    /// Removes everything of a container, running or not.
    pub(crate) fn take_down(&self, record: &Record) -> Result<()> {
        let process = record.process();
        if let Some(process) = &process {
            let _ = pidfd::send_signal(process, 9);
        }
        if !record.cgroup.is_empty() {
            let tree = self.forest()?.open(&record.cgroup, record.cgroup_made)?;
            self.end_rest(record, process.as_ref(), &tree)?;
            match tree.remove(ENDS_WITHIN) {
                // All of this container's processes have exited: a path below its own was given to
                // others.
                Err(CgroupError::InUse { pids, .. }) if record.owns_pids && record.pid != 0 => {
                    let why = format!("{}: others are below it: {pids:?}", record.cgroup);
                    crate::log::warn(&format!("the cgroup stays where it is: {why}"));
                }
                other => other?,
            }
        }
        if let Some(process) = process {
            // The process was never in its cgroup.
            let _ = pidfd::wait(&process, Some(ENDS_WITHIN));
        }
        self.store.remove(&record.id)
    }

    /// Ends the other processes of a container whose first one, if it is still there, was killed.
    pub(crate) fn end_rest(
        &self,
        record: &Record,
        process: Option<&OwnedFd>,
        tree: &Tree,
    ) -> Result<()> {
        if !tree.exists() {
            return Ok(());
        }
        if !record.owns_pids || record.pid == 0 {
            tree.kill()?;
        } else if process.is_some() {
            // The others end with the first, which a frozen v1 cgroup may prevent.
            let _ = tree.thaw();
        }
        if let Some(process) = process {
            let _ = pidfd::wait(process, Some(ENDS_WITHIN));
        }
        Ok(())
    }

    /// Removes the leftovers of interrupted commands.
    pub(crate) fn sweep(&self) -> Result<()> {
        for (left, mark) in self.store.abandoned()? {
            let gone = match left {
                Left::Creation(id) => match self.store.read(&id) {
                    Ok(record) => self.take_down(&record),
                    // Nothing was made before the record existed.
                    Err(_) => self.store.remove(&id),
                },
                Left::Frozen(id) => match self.store.read(&id) {
                    Ok(record) => self.tree(&record).and_then(|tree| Ok(tree.thaw()?)),
                    Err(_) => Ok(()), // deleted meanwhile
                },
            };
            // On failure the next command tries again.
            if gone.is_ok() {
                let _ = mark.remove();
            }
        }
        Ok(())
    }
}

/// A container that is being made.
struct Making<'m> {
    runtime: &'m Runtime,
    create: &'m Create,
    bundle: &'m Bundle,
    process: &'m Process,
    namespaces: Namespaces,
    filter: Option<Compiled>,
    forest: &'m Forest,
    record: Record,
    dir: PathBuf,
    comeback: Option<&'m Comeback>,
    newborn: Option<Newborn>,
}

impl Making<'_> {
    fn all(&mut self) -> Result<Created> {
        let store = &self.runtime.store;
        // ORDER: the record is written before the objects that it names are made.
        store.write(&self.record)?;
        let config = self.dir.join("config.json");
        let text = serde_json::to_vec(&self.bundle.spec)
            .map_err(|e| Error::Config { path: config.clone(), why: e.to_string() })?;
        std::fs::write(&config, text).map_err(Error::file("write", &config))?;
        let cgroup = self.make_cgroup()?;
        let (mut newborn, waits_for_hooks) = {
            let newborn = self.born(&cgroup)?;
            (newborn, self.has_hooks_before())
        };
        self.record.pid = newborn.pid;
        self.record.start_time = newborn.start_time;
        // ORDER: the newborn is a copy of a process with one thread, so threads start after the
        // clone.
        let verified = self.comeback.map(Comeback::verify);
        let planned = self.plan(&newborn, &cgroup);
        let program = planned.and_then(|(plan, restore)| {
            newborn.send(plan)?;
            Ok(restore)
        });
        // ORDER: stored first, so that a failure finds it and kills it.
        let newborn = self.newborn.insert(newborn);
        let restore = program?;
        if waits_for_hooks {
            newborn.ready().map_err(|e| told(self.process, e))?;
            let (hooks, record) = (&self.bundle.spec.hooks, &self.record);
            hook::run("prestart", &hooks.prestart, record, Status::Creating)?;
            hook::run("createRuntime", &hooks.create_runtime, record, Status::Creating)?;
            newborn.release()?;
        }
        let master = newborn.ready().map_err(|e| told(self.process, e))?;
        // Typed input that was not read is typed again.
        let typist = match (&restore, &master) {
            (Some(_), Some(master)) => Some(clone_fd(master.as_fd())?),
            _ => None,
        };
        let console = match (master, &self.create.console_socket) {
            (Some(master), Some(socket)) => {
                console::send(socket, master)?;
                None
            }
            (Some(master), None) => {
                // What a checkpoint has of a terminal is not changed.
                if restore.is_none() {
                    console::leave_line_ends(&master)?;
                }
                Some(master)
            }
            (None, _) => None,
        };
        self.record.steps = newborn.memory();
        let (pid, pidfd) = (newborn.pid, clone_fd(newborn.pidfd.as_fd())?);
        if restore.as_ref().is_some_and(load::Restore::moves_clocks) {
            let word = "time".to_owned();
            self.record.namespaces.retain(|known| *known != word);
            self.record.namespaces.push(word);
        }
        // ORDER: on record before it runs.
        store.write(&self.record)?;
        let publish = || -> Result<()> {
            if let Some(path) = &self.create.pid_file {
                store::publish_pid(path, pid)?;
            }
            match &self.create.pidfd_socket {
                Some(path) => console::send_pidfd(path, "standard", pidfd.as_fd()),
                None => Ok(()),
            }
        };
        match (&restore, verified, self.newborn.take()) {
            (Some(restore), Some(verified), Some(newborn)) => {
                let typist = typist.as_ref().map(AsFd::as_fd);
                comeback::conduct(newborn, restore, typist, verified)?;
                publish()?;
            }
            (_, _, newborn) => {
                publish()?;
                newborn.map_or(Ok(()), |newborn| newborn.release())?;
            }
        }
        Ok(Created { pid, pidfd, console })
    }

    fn make_cgroup(&self) -> Result<Tree> {
        let linux = self.bundle.linux();
        let resources = linux.resources.clone().unwrap_or_default();
        let tree = self.forest.make(&self.record.cgroup, &cgroup::needed(&resources))?;
        cgroup::set(&tree, self.forest, &resources)?;
        cgroup::set_devices(&tree, &resources.devices)?;
        Ok(tree)
    }

    /// Returns whether hooks of the host need the container between its mounts and its program.
    fn has_hooks_before(&self) -> bool {
        let hooks = &self.bundle.spec.hooks;
        !hooks.prestart.is_empty() || !hooks.create_runtime.is_empty()
    }

    /// Clones the newborn into its cgroup and its namespaces.
    fn born(&self, cgroup: &Tree) -> Result<Newborn> {
        let linux = self.bundle.linux();
        let joined = self.namespaces.open()?;
        let join = |flag| joined.iter().find(|(f, _)| *f == flag).map(|(_, fd)| fd.as_fd());
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|e| Error::file("make", "a socket pair")(e.into()))?;
        let has_user = self.namespaces.makes("user");
        let map = |map| if has_user { map_text(map) } else { String::new() };
        let (uid_map, gid_map) = (map(&linux.uid_mappings), map(&linux.gid_mappings));
        // The newborn makes these itself, after it is in its cgroup and its offsets are set.
        let later = CloneFlags::NEWCGROUP | CloneFlags::NEWTIME;
        let placement = cgroup.placement()?;
        // A process in another user namespace has no rights over cgroups, so one that is born there
        // is moved afterwards, before it does anything.
        let (v2, is_moved) = match join(CloneFlags::NEWUSER) {
            Some(_) => (None, placement.v2.is_some()),
            None => (placement.v2, false),
        };
        let born = birth::give(
            &Outside::here()?,
            Heritage::now(),
            &Wanted {
                flags: self.namespaces.new_flags() - later,
                sock: theirs.as_fd(),
                netns: join(CloneFlags::NEWNET),
                pid_namespace: join(CloneFlags::NEWPID),
                user_namespace: join(CloneFlags::NEWUSER),
                cgroup: v2.as_ref().map(AsFd::as_fd),
                uid_map: &uid_map,
                gid_map: &gid_map,
                proc: false,
            },
        )?;
        if is_moved {
            cgroup
                .write_v2("cgroup.procs", &born.pid.to_string())
                .map_err(Error::call("move the new process into its cgroup"))?;
        }
        Ok(Newborn::new(born.pid, born.start_time, born.pidfd, ours))
    }

    /// Plans everything the newborn does up to execve, or to the restore program.
    fn plan(&self, newborn: &Newborn, cgroup: &Tree) -> Result<(Plan, Option<load::Restore>)> {
        let (linux, spec) = (self.bundle.linux(), &self.bundle.spec);
        let mut plan = Plan::new();
        let ids = match self.namespaces.has("user") {
            true => Ids::of(newborn.pid)?,
            false => Ids::default(),
        };
        for tasks in cgroup.placement()?.v1_tasks {
            let fd = plan.fd(tasks);
            plan.join_cgroup(fd);
        }
        Affinity::default().plan(&mut plan);
        if let Some(policy) = &linux.memory_policy {
            let (mode, nodes) = process::memory_policy(policy)?;
            plan.memory_policy(mode, &nodes);
        }
        if let Some(adj) = self.process.oom_score_adj {
            plan.oom_score_adj(adj);
        }
        let (spread, recursive) = self.root_spread()?;
        let root = mounts::root(&self.bundle.rootfs, (spread, recursive))?;
        let root_view = clone_fd(root.as_fd())?;
        self.plan_namespaces(&mut plan, newborn)?;
        let place = match spec.hooks.create_container.is_empty() && !self.has_hooks_before() {
            true => "/".to_owned(),
            // The path that hooks expect.
            false => self.bundle.rootfs.to_string_lossy().into_owned(),
        };
        let fd = plan.fd(root);
        let read_only = spec.root.as_ref().is_some_and(|root| root.readonly);
        let is_apart = !self.namespaces.has("mount");
        match is_apart {
            // In a shared mount namespace nothing is mounted.
            true => plan.root_apart(fd, read_only),
            false => plan.root_below(fd, &place, read_only),
        }
        plan.become_root();
        if self.namespaces.makes("cgroup") && !weakened("cgroup-namespace") {
            plan.unshare(CloneFlags::NEWCGROUP.bits() as u32);
        }
        if self.namespaces.makes("network") {
            plan.loopback();
        }
        if !self.create.no_new_keyring && !weakened("keyring") {
            plan.session_keyring();
        }
        let userns = match self.namespaces.has("user") {
            true => Some(
                pidfd::user_namespace(newborn.pidfd.as_fd())
                    .map_err(Error::call("open the container's user namespace"))?,
            ),
            false => None,
        };
        let given = Given {
            bundle: &self.bundle.dir,
            root: root_view.as_fd(),
            rootfs: &self.bundle.rootfs,
            ids: &ids,
            userns: userns.as_ref().map(AsFd::as_fd),
            cgroup,
            forest: self.forest,
            spread: (spread, recursive),
            in_order: self.namespaces.makes("mount") && !self.namespaces.has("user"),
        };
        let dev = mounts::plan(&mut plan, &spec.mounts, &given)?;
        device::plan(&mut plan, &linux.devices, &dev, &ids, userns.is_some())?;
        if self.has_hooks_before() {
            plan.wait_for_engine();
        }
        let pid_inside = pid_inside(newborn.pid)?;
        let hooks = Inside {
            stage: "createContainer",
            hooks: &spec.hooks.create_container,
            // Their programs are the host's: an image has no say in how they run (CVE-2025-23266).
            env: &[],
            state: (&self.record, Status::Creating, pid_inside),
        };
        hook::plan(&mut plan, &hooks, None)?;
        match is_apart {
            true => plan.enter_root(),
            false => plan.pivot(!self.create.no_pivot && !weakened("pivot")),
        }
        self.plan_root(&mut plan)?;
        let program = match spec.process {
            Some(_) if self.comeback.is_none() => Some(process::program(self.process, || {
                identity::home(root_view.as_fd(), self.process.user.uid)
            })?),
            _ => None,
        };
        let io = match self.process.terminal {
            true => Io::Terminal,
            false => Io::Fds(process::own_streams(&ids, self.process.user.uid)?),
        };
        process::plan_before(&mut plan, self.process, io)?;
        if let Some(comeback) = self.comeback {
            let (bundle, process, filter) = (self.bundle, self.process, self.filter.as_ref());
            let confined = Confined { bundle, process, filter, ids: &ids };
            let restore = comeback.plan(&mut plan, &confined)?;
            return Ok((plan, Some(restore)));
        }
        plan.chdir(&self.process.cwd, true);
        if let Some(program) = &program {
            plan.lookup(program);
        }
        let listener = plan.fd(self.listen()?);
        plan.wait_for_start(listener);
        let Some(mut program) = program else { return Ok((plan, None)) };
        if self.create.listen_fds > 0 {
            let pid = format!("LISTEN_PID={pid_inside}");
            let count = format!("LISTEN_FDS={}", self.create.listen_fds);
            program.envp.extend([pid.into_bytes(), count.into_bytes()]);
        }
        let page = match self.filter.as_ref().is_some_and(|filter| filter.notifies) {
            true => Some(plan.fd(self.listener_page()?)),
            false => None,
        };
        let last = Last {
            process: self.process,
            program: &program,
            filter: self.filter.as_ref(),
            listener: page,
            preserve: copies(&self.create.preserve)?,
            personality: linux.personality.as_ref(),
            hooks: Some(Inside {
                stage: "startContainer",
                hooks: &spec.hooks.start_container,
                env: &program.envp,
                state: (&self.record, Status::Created, pid_inside),
            }),
        };
        last.plan(&mut plan)?;
        Ok((plan, None))
    }

    /// Returns the propagation of the root filesystem, the default for mounts without one.
    fn root_spread(&self) -> Result<(Propagation, bool)> {
        match self.bundle.linux().rootfs_propagation.as_deref() {
            None | Some("") => Ok((Propagation::Slave, true)),
            Some(word) => propagation(word).ok_or_else(|| {
                let why = format!("there is no propagation {word:?}");
                Error::field("linux.rootfsPropagation", why)
            }),
        }
    }

    /// Plans the joined namespaces, and the time namespace, which gets its offsets first.
    fn plan_namespaces(&self, plan: &mut Plan, newborn: &Newborn) -> Result<()> {
        let done = CloneFlags::NEWUSER | CloneFlags::NEWPID | CloneFlags::NEWNET;
        for (flag, fd) in self.namespaces.open()? {
            if !done.contains(flag) {
                let fd = plan.fd(fd);
                plan.setns(fd, flag.bits() as u32);
            }
        }
        if !self.namespaces.makes("time") {
            return Ok(());
        }
        let mut text = String::new();
        for (clock, offset) in &self.bundle.linux().time_offsets {
            let field = |why: &str| Error::field(format!("linux.timeOffsets[{clock}]"), why);
            if !["monotonic", "boottime"].contains(&clock.as_str()) {
                return Err(field("there is no such clock: monotonic, boottime"));
            }
            if offset.nanosecs >= 1_000_000_000 {
                return Err(field("its nanosecs are a second or more"));
            }
            text.push_str(&format!("{clock} {} {}\n", offset.secs, offset.nanosecs));
        }
        let open = || {
            let path = format!("/proc/{}/timens_offsets", newborn.pid);
            let file = std::fs::File::options().write(true).open(&path);
            file.map_err(Error::file("open", path))
        };
        let file = (!text.is_empty()).then(open).transpose()?;
        plan.own_time(file.map(|file| (file.into(), &*text)), "linux.timeOffsets");
        Ok(())
    }

    /// Plans the last changes of the complete root filesystem.
    fn plan_root(&self, plan: &mut Plan) -> Result<()> {
        let (linux, spec) = (self.bundle.linux(), &self.bundle.spec);
        if let Some(word) = linux.rootfs_propagation.as_deref().filter(|word| !word.is_empty())
            && let Some((spread, recursive)) = propagation(word).map(mounts::spread)
        {
            plan.spread(spread, recursive);
        }
        if let Some(name) = spec.hostname.as_deref().filter(|name| !name.is_empty()) {
            plan.hostname(name);
        }
        if let Some(name) = spec.domainname.as_deref().filter(|name| !name.is_empty()) {
            plan.domainname(name);
        }
        self.plan_sysctls(plan)?;
        let read_only: Vec<&str> = linux.readonly_paths.iter().map(String::as_str).collect();
        if !weakened("readonly-paths") {
            plan.read_only(&read_only);
        }
        if !linux.masked_paths.is_empty() && !weakened("masked-paths") {
            let empty = || {
                let fs = FsContext::open("tmpfs")?;
                for (key, value) in
                    [("source", "tmpfs"), ("size", "0"), ("nr_inodes", "2"), ("mode", "0755")]
                {
                    fs.set_string(key, value)?;
                }
                fs.create(
                    MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC,
                )
            };
            let empty = empty().map_err(Error::call("make an empty directory"))?;
            let (null, empty) = (plan.fd(device::null()?), plan.fd(empty));
            // A path that is listed twice is masked once.
            let mut masked: Vec<&str> = linux.masked_paths.iter().map(String::as_str).collect();
            let mut seen = std::collections::BTreeSet::new();
            masked.retain(|path| seen.insert(path.trim_end_matches('/')));
            plan.mask(null, empty, &masked);
        }
        Ok(())
    }

    /// Plans sysctls of the container's own namespaces; a container may not set the host's.
    fn plan_sysctls(&self, plan: &mut Plan) -> Result<()> {
        for (name, value) in &self.bundle.linux().sysctl {
            let field = |why: String| Error::field(format!("linux.sysctl[{name}]"), why);
            let owner = sysctl::owner(name).map(|namespace| match namespace.file() {
                "net" => "network",
                other => other,
            });
            let owner = owner.ok_or_else(|| field("it is not one of a namespace".into()))?;
            let is_shared = !self.namespaces.has(owner) || self.is_own(owner);
            if is_shared && !weakened("sysctl-owner") {
                return Err(field(format!("the container has no {owner} namespace of its own")));
            }
            if sysctl::path(name).as_deref() == Some("kernel/hostname") {
                return Err(field("use hostname".into()));
            }
            plan.sysctl(name, value).map_err(|e| field(e.to_string()))?;
        }
        Ok(())
    }

    /// Returns whether a namespace that is joined by path is this process's own.
    fn is_own(&self, word: &str) -> bool {
        use std::os::unix::fs::MetadataExt;
        let listed = self.bundle.linux().namespaces.iter().find(|n| n.kind == word);
        let Some(path) = listed.and_then(|n| n.path.as_ref()).filter(|p| !p.is_empty()) else {
            return false;
        };
        let file = if word == "network" { "net" } else { word };
        let inode = |path: &str| std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
        match (inode(path), inode(&format!("/proc/self/ns/{file}"))) {
            (Ok(theirs), Ok(ours)) => theirs == ours,
            _ => true,
        }
    }

    /// Makes the socket at which the newborn waits.
    fn listen(&self) -> Result<OwnedFd> {
        console::listen(&self.dir, START)
    }

    fn listener_page(&self) -> Result<OwnedFd> {
        let path = self.dir.join(LISTENER);
        std::fs::write(&path, [0_u8; 4096]).map_err(Error::file("write", &path))?;
        let file = std::fs::File::options().read(true).write(true).open(&path);
        Ok(file.map_err(Error::file("open", path))?.into())
    }
}

/// Returns the pid of a process in its own pid namespace.
fn pid_inside(pid: u32) -> Result<u32> {
    let fields = proc::fields(pid).map_err(Error::call("read the status of the new process"))?;
    let inner = fields.field("NSpid").and_then(|pids| pids.split_whitespace().last());
    Ok(inner.and_then(|pid| pid.parse().ok()).unwrap_or(pid))
}

/// Duplicates descriptors that the caller passes on.
pub(crate) fn copies(fds: &[OwnedFd]) -> Result<Vec<OwnedFd>> {
    fds.iter().map(|fd| clone_fd(fd.as_fd())).collect()
}

/// Converts an error of the newborn. A program that cannot be executed is reported in the wording
/// that callers of OCI runtimes search for.
pub(crate) fn told(process: &Process, e: LaunchError) -> Error {
    let LaunchError::Failed(failure) = &e else { return Error::Launch(e) };
    if let Some(why) = failure.ending() {
        return Error::Hook { hook: failure.detail.clone(), why };
    }
    if failure.is_mount() && failure.errno == rustix::io::Errno::LOOP.raw_os_error() {
        let why = "it must be mounted on ordinary directory, and the path has a symbolic link";
        return Error::Usage(format!("cannot mount {}: {why}", failure.detail));
    }
    if failure.op == Code::Scheduler.text()
        && failure.errno == rustix::io::Errno::PERM.raw_os_error()
    {
        let why = "process scheduler can't be used together with AllowedCPUs \
                   (linux.resources.cpu.cpus), and requires CAP_SYS_NICE";
        return Error::field("process.scheduler", format!("{e}: {why}"));
    }
    if !failure.is_exec() {
        return Error::Launch(e);
    }
    let program = process.args.first().cloned().unwrap_or_default();
    let errno = rustix::io::Errno::from_raw_os_error(failure.errno);
    let why = match errno {
        rustix::io::Errno::NOENT if !program.contains('/') => {
            format!("exec: {program:?}: executable file not found in $PATH")
        }
        rustix::io::Errno::NOENT if failure.is_lookup() => {
            format!("exec: {program:?}: stat {program}: no such file or directory")
        }
        rustix::io::Errno::ACCESS => format!("exec: {program:?}: permission denied"),
        other => {
            let text = std::io::Error::from(other).to_string();
            let text = text.split(" (os error").next().unwrap_or_default().to_lowercase();
            format!("exec {program}: {text}")
        }
    };
    Error::Program { program, why }
}

/// Checks a process for `exec` as one of a bundle.
pub(crate) fn check_exec(process: &Process) -> Result<()> {
    check_process(process)
}
