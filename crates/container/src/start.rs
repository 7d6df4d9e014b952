//! Start of a container's first process.
//!
//! Three parties: the engine, which decides; the keeper, which clones; the newborn, which follows a
//! plan and becomes the container's program (see `dormouse_launch`). In order:
//!
//! 1. the kernel objects that are named after the container are made: cgroups, its identity in the
//!    network, its directories on the shared tmpfs;
//! 2. the keeper clones the newborn into those cgroups and into new namespaces, and maps the
//!    container's ids in its user namespace;
//! 3. with that namespace the image's layers are idmapped and stacked; the plan carries the mounts
//!    by descriptor. The plan is sent in three parts, and the newborn executes one while the engine makes the
//!    next: placement and namespaces, mounts, the program;
//! 4. the newborn executes the plan up to the last step before execve and reports that;
//! 5. the record of the process is written, then the newborn is released.
//!
//! The newborn exits by itself if the engine's process dies before step 5. A killed start therefore
//! leaves no process, only objects named after the container, which the next verb removes.
//!
//! Steps 1 to 3 without the program are [`bear`]. The nursery has done them ahead for a spare ([`crate::spare`]), and
//! the process that has put a container to sleep for a warm sleeper ([`crate::warm`]).
//!
//! Uses `ground`, `state`, `account`, `gates`, `deal`, `gating`, `spare`, `exit`, `barrier`, `hold`, `io`, `usage`,
//! `contract`, `view`, `sysinfo`, `process`, `net`, `later`, `layer`, `root`, `create`, `rate`, `drive`, `socket`,
//! `end`, `restore`, `stacked` and `remove`.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;

use dormouse_checkpoint::Error as CheckpointError;
use dormouse_checkpoint::load::{Checked, Restore, Sources, Traced};
use dormouse_image::Assembled;
use dormouse_kernel::call::{CloneFlags, Namespace};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_kernel::mount::Filled;
use dormouse_kernel::{pidfd, weakened};
use dormouse_launch::{Calling, ExitStatus, Keeper, Kind, LaunchError, Newborn, Plan, Spawn};
use dormouse_model::{Config, ContainerId};

use crate::create::Created;
use crate::drive::{self, Purpose};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::net::{self, Net};
use crate::restore::{self, RestorePlan};
use crate::root::{self, RootParts, dir};
use crate::spare::Spare;
use crate::spec::Stdio;
use crate::state::{self, InitRecord, Past};
use crate::user::{PasswdUser, Users};
use crate::{
    account, barrier, contract, deal, end, event, exit, gates, gating, hold, io, later, layer,
    process, rate, remove, socket, stacked, sysinfo, usage, view,
};

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
    pub(crate) keeper_is_gone: bool,
}

impl Running {
    /// Sends a signal to the process.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let sent = pidfd::send_signal(self.pidfd.as_fd(), signal);
        sent.map_err(Error::call("cannot send the signal"))
    }

    /// Waits for its exit. A first process is not settled by this: see `settle::finish`. If the
    /// keeper was killed meanwhile, the status is read from the kernel.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        match self.keeper.wait(self.pid) {
            Err(LaunchError::KeeperGone) => {
                self.keeper_is_gone = true;
                let status = exit::from_kernel(self.pidfd.as_fd())?;
                Ok(status.ok_or(LaunchError::KeeperGone)?)
            }
            other => Ok(other?),
        }
    }

    /// A process of `exec`, whose output goes to its starter.
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

/// Starts a new container. If the start fails, the container is removed.
pub(crate) fn start_new(ground: &Ground, mut created: Created, io: Stdio) -> Result<Running> {
    let spare = created.spare.take().map(Box::new).map(Ahead::Spare);
    begin(ground, &created.config, io, Past::default(), None, spare)
        .inspect_err(|_| remove::discard(ground, created))
}

/// Starts a container without a process. The caller holds its lock.
pub(crate) fn start_locked(
    ground: &Ground,
    config: &Config,
    io: Stdio,
    past: Past,
) -> Result<Running> {
    begin(ground, config, io, past, None, None)
}

/// Starts a created container. `spare` are its parts that were made ahead. The caller holds its lock.
pub(crate) fn start_created(
    ground: &Ground,
    config: &Config,
    io: Stdio,
    spare: Option<Spare>,
) -> Result<Running> {
    let ahead = spare.map(Box::new).map(Ahead::Spare);
    begin(ground, config, io, Past::default(), None, ahead)
}

/// Starts a container from a checkpoint. `spare` are the parts of a new one that were made ahead. The caller holds its
/// lock, and it has no process.
pub(crate) fn start_restored(
    ground: &Ground,
    config: &Config,
    from: &RestorePlan,
    spare: Option<Spare>,
) -> Result<Running> {
    start_from(ground, config, from, spare.map(Box::new).map(Ahead::Spare))
}

/// The same for a container that was asleep. `kept` is its newborn, if it has one.
pub(crate) fn start_woken(
    ground: &Ground,
    config: &Config,
    from: &RestorePlan,
    kept: Option<Kept>,
) -> Result<Running> {
    start_from(ground, config, from, kept.map(Ahead::Kept))
}

fn start_from(
    ground: &Ground,
    config: &Config,
    from: &RestorePlan,
    ahead: Option<Ahead>,
) -> Result<Running> {
    usage::check_tasks(config, from.reader.records())?;
    begin(ground, config, Stdio::detached(), Past::default(), Some(from), ahead)
}

/// A newborn that has its root and all mounts before the start.
enum Ahead {
    Spare(Box<Spare>),
    Kept(Kept),
}

/// The newborn of a warm sleeper, and the number of its root (st_dev).
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) newborn: Newborn,
    pub(crate) device: u64,
}

fn begin(
    ground: &Ground,
    config: &Config,
    io: Stdio,
    past: Past,
    from: Option<&RestorePlan>,
    ahead: Option<Ahead>,
) -> Result<Running> {
    // Shared objects are not removed meanwhile.
    let _in_use = ground.in_use()?;
    let undo = || match from {
        Some(from) if from.wakes => end::release_objects(ground, config),
        _ => end::tear_down(ground, &config.id, Some(config)),
    };
    // ORDER: made first and removed last: an existing one means an interrupted start or end. What was made ahead has
    // one.
    if ahead.is_none() {
        let run_dir = ground.run_dir(&config.id);
        let mut make = fs::DirBuilder::new();
        if let Err(e) = make.mode(0o700).create(&run_dir) {
            if e.kind() != std::io::ErrorKind::AlreadyExists {
                return Err(Error::file("cannot make directory", run_dir)(e));
            }
            undo()?;
            make.create(&run_dir).map_err(Error::file("cannot make directory", &run_dir))?;
        }
    }
    let started = start_clean(ground, config, io, past, from, ahead);
    let watch = from.and_then(|from| from.watch.take());
    let started = started.map_err(|e| watch.and_then(|watch| watch.error()).unwrap_or(e));
    let verb = if from.is_some() { "restore" } else { "start" };
    match &started {
        Ok(_) => ground.record(verb, config.id.as_str(), config.name.as_str(), &[]),
        Err(_) => {
            let _ = undo(); // the first error is returned
        }
    }
    started
}

fn start_clean(
    ground: &Ground,
    config: &Config,
    io: Stdio,
    past: Past,
    from: Option<&RestorePlan>,
    ahead: Option<Ahead>,
) -> Result<Running> {
    // Uses two processors, if there are two: the keeper is scheduled while the first cgroup is
    // made, and clones while the others are made.
    let at_hand = from.and_then(|from| from.keeper.take());
    let calling = match at_hand.is_some() || ahead.is_some() {
        true => None,
        false => Keeper::call(&ground.places.run)?,
    };
    contract::admit(ground, config, &config.spec.limits)?;
    if from.is_none() {
        drive::admit_start(ground, config)?;
    }
    let recorded = from.and_then(|from| from.user.clone());
    let (born, (user, checked)) = match ahead {
        Some(Ahead::Kept(kept)) => {
            let from = from.ok_or(LaunchError::Newborn { what: "of a sleeper is not woken" })?;
            let user = recorded.ok_or(LaunchError::Newborn { what: "has no recorded user" })?;
            let keeper = at_hand.map_or_else(|| hold::keeper(ground), Ok)?;
            from.begin_watch(ground, kept.newborn.pidfd.as_fd())?;
            contract::balance(ground, config)?;
            forget_ended_at(ground, config, from)?;
            let checked = restore::check(config, &user, from)?;
            let Kept { newborn, device } = kept;
            let born = Born { keeper, newborn, plan: Plan::new(), device, sources: None };
            (born, (user, Some(checked)))
        }
        Some(Ahead::Spare(spare)) => {
            // ORDER: under the lock of objects in use. Its image may have been removed before the container was known.
            layer::lower(ground, &config.spec.root)?;
            if let Some(from) = from {
                from.begin_watch(ground, spare.newborn.pidfd.as_fd())?;
            }
            introduce_spare(ground, config, from)?;
            let user = recorded.map_or_else(|| spare.find_user(&config.spec.process.user), Ok)?;
            let checked = from.map(|from| restore::check(config, &user, from)).transpose()?;
            (Born::ahead(*spare), (user, checked))
        }
        None => {
            let starter =
                Starter { ground, config, from, at_hand, calling, recorded, checked: None };
            bear(ground, config, from, starter)?
        }
    };
    let Born { mut keeper, mut newborn, mut plan, device, sources: _sources } = born;
    process::set_oom_score_adj(&newborn, &config.spec.security)?;
    let streams = io::streams(ground, &mut keeper, config, &user, io)?;
    let restore = match from.zip(checked) {
        None => {
            process::plan_process(&mut plan, config, &user, streams.io)?;
            None
        }
        Some((from, checked)) => {
            let given = (&user, &streams.io);
            Some((from, restore::plan(ground, &mut plan, config, given, (from, checked))?))
        }
    };
    newborn.send(plan).map_err(|e| process::exec_error(&config.spec.process, e))?;
    // The newborn is busy for a while.
    io::bound_new_logs(&mut keeper, config, &streams.unbounded)?;
    from.map_or(Ok(()), RestorePlan::check_small)?;
    let console = newborn.ready().map_err(|e| process::exec_error(&config.spec.process, e))?;
    let init = InitRecord {
        device: Some(device),
        ..record_of(&newborn, console.is_some(), past, from, user)
    };
    let kept = io::hand_over(ground, &mut keeper, config, console, streams.kept)?;
    net::publish_ports(ground, config)?;
    // ORDER: recorded, then released: a running process is always on record.
    state::write_init(ground, &config.id, &init)?;
    let (pid, pidfd) = (newborn.pid, io::clone_fd(newborn.pidfd.as_fd())?);
    match &restore {
        None => newborn.go().map_err(|e| process::exec_error(&config.spec.process, e))?,
        Some((from, restore)) => {
            let console = kept.console.as_ref().map(AsFd::as_fd);
            let fds = (pidfd.as_fd(), console);
            conduct(ground, config, newborn, &mut keeper, (from, restore), (&init, fds))?;
            // Without it the views show an older clock, which ends no container that runs already.
            let _ = view::note_clock(ground, config, pid);
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

/// A newborn with its root and all mounts, before the part of its plan with its program.
pub(crate) struct Born {
    pub(crate) keeper: Keeper,
    pub(crate) newborn: Newborn,
    /// The last part.
    pub(crate) plan: Plan,
    /// The number of its root (st_dev).
    pub(crate) device: u64,
    /// Mounts that are closed when no client waits.
    sources: Option<(Vec<OwnedFd>, Option<Filled>)>,
}

impl Born {
    /// The newborn of a spare.
    fn ahead(spare: Spare) -> Self {
        let Spare { keeper, newborn, device, .. } = spare;
        Self { keeper, newborn, plan: Plan::new(), device, sources: None }
    }
}

/// The process for which a newborn is made: a start, the nursery, or the process that keeps a sleeper warm.
pub(crate) trait Bearer {
    /// What is seen in the new root.
    type Seen;

    /// Returns the connection on which it is born.
    fn keeper(&mut self) -> Result<Keeper>;

    /// Registers the new cgroups.
    fn introduce(&mut self, cgroup: &Cgroup, net: &Net) -> Result<()>;

    /// Works while the keeper clones.
    fn meanwhile(&mut self) -> Result<()>;

    /// Begins the limit of time for the newborn, if it has one.
    fn watch(&mut self, _newborn: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }

    /// Stacks the layers of the root.
    fn assemble(&mut self, userns: BorrowedFd<'_>) -> Result<Assembled>;

    /// Looks at the root.
    ///
    /// ORDER: before the newborn attaches the container's mounts below it, and makes mount points.
    fn look(&mut self, root: BorrowedFd<'_>) -> Result<Self::Seen>;
}

/// A start from nothing.
struct Starter<'s> {
    ground: &'s Ground,
    config: &'s Config,
    from: Option<&'s RestorePlan>,
    at_hand: Option<Keeper>,
    calling: Option<Calling>,
    /// The user of a checkpoint. Otherwise the user is one of the image.
    recorded: Option<PasswdUser>,
    checked: Option<Checked>,
}

impl Starter<'_> {
    /// How sockets of the container begin.
    fn begins(from: Option<&RestorePlan>) -> socket::Begin {
        match from {
            None => socket::Begin::Start,
            Some(from) if from.wakes => socket::Begin::Wake,
            Some(_) => socket::Begin::Restore,
        }
    }

    fn check(&self, user: &PasswdUser) -> Result<Option<Checked>> {
        self.from.map(|from| restore::check(self.config, user, from)).transpose()
    }
}

impl Bearer for Starter<'_> {
    type Seen = (PasswdUser, Option<Checked>);

    fn keeper(&mut self) -> Result<Keeper> {
        let calling = self.calling.take();
        self.at_hand.take().map_or_else(|| hold::complete_call(self.ground, calling), Ok)
    }

    fn introduce(&mut self, cgroup: &Cgroup, net: &Net) -> Result<()> {
        let Self { ground, config, from, .. } = *self;
        contract::balance(ground, config)?;
        introduce(ground, config, cgroup, net, Self::begins(from))?;
        forget_ended(ground, config, from, net)
    }

    fn watch(&mut self, newborn: BorrowedFd<'_>) -> Result<()> {
        self.from.map_or(Ok(()), |from| from.begin_watch(self.ground, newborn))
    }

    fn meanwhile(&mut self) -> Result<()> {
        if let Some(user) = &self.recorded {
            self.checked = self.check(user)?;
        }
        Ok(())
    }

    fn assemble(&mut self, userns: BorrowedFd<'_>) -> Result<Assembled> {
        let device = self.from.and_then(|it| it.device);
        layer::assemble(self.ground, self.config, userns, Purpose::Start, device)
    }

    fn look(&mut self, root: BorrowedFd<'_>) -> Result<Self::Seen> {
        match self.recorded.take() {
            Some(user) => Ok((user, self.checked.take())),
            None => {
                let user = Users::read(root).find(&self.config.spec.process.user)?;
                let checked = self.check(&user)?;
                Ok((user, checked))
            }
        }
    }
}

/// Registers the new cgroups of a container.
pub(crate) fn introduce(
    ground: &Ground,
    config: &Config,
    cgroup: &Cgroup,
    net: &Net,
    begin: socket::Begin,
) -> Result<()> {
    rate::set_new(ground, config, cgroup)?;
    socket::enter(ground, config, cgroup, begin)?;
    deal::enter(ground, config, cgroup, begin != socket::Begin::Start)?;
    if config.spec.systemd {
        cgroup.delegate(config.ids.base, config.ids.base)?;
    }
    if let Net::Domain(domain) = net {
        net::enter(ground, config, cgroup, domain)?;
    }
    // Without it the container sees the host there, which fails no start.
    let _ = sysinfo::enter(ground, config, cgroup);
    barrier::enter(ground, config, cgroup)?;
    gating::enter(ground, config, cgroup, net.netns_cookie())
}

/// Removes ended connections of the container, which would keep its sockets from their addresses.
fn forget_ended(
    ground: &Ground,
    config: &Config,
    from: Option<&RestorePlan>,
    net: &Net,
) -> Result<()> {
    match net {
        Net::Domain(_) | Net::Private { .. } => {
            let ports = from.map(RestorePlan::ports);
            net::forget_ended(ground, config, net, ports.as_deref())
        }
        Net::Host { .. } | Net::None { .. } => Ok(()),
    }
}

/// Removes them for a container that was registered when it fell asleep. Most have no sockets to be made.
fn forget_ended_at(ground: &Ground, config: &Config, from: &RestorePlan) -> Result<()> {
    match from.ports().is_empty() {
        true => Ok(()),
        false => forget_ended(ground, config, Some(from), &net::open(ground, config)?),
    }
}

/// Makes known what a spare could not be known by: its names, its views in sysinfo(2), and its party at the gates and
/// for limits of accounts.
fn introduce_spare(ground: &Ground, config: &Config, from: Option<&RestorePlan>) -> Result<()> {
    contract::balance(ground, config)?;
    let net = net::open(ground, config)?;
    if let Net::Domain(domain) = &net {
        net::name(ground, config, domain)?;
        ground.network()?.resolv_conf(domain); // up to date with the host's, as at each start
    }
    let (has_gates, has_barrier) = (gates::find(ground)?.is_some(), barrier::is_loaded(ground)?);
    let is_viewed = view::has(config) && sysinfo::is_loaded(ground);
    let is_party = has_gates || has_barrier || account::is_made(config);
    let cgroup = match is_viewed || is_party {
        true => ground.cgroups()?.find(config.id.as_str())?,
        false => None,
    };
    if let Some(cgroup) = cgroup.as_ref().filter(|_| is_viewed) {
        // Without it the container sees the host there, which fails no start.
        let _ = sysinfo::enter(ground, config, cgroup);
    }
    if let Some(cgroup) = cgroup.filter(|_| is_party) {
        let begin = Starter::begins(from);
        socket::enter(ground, config, &cgroup, begin)?;
        deal::enter(ground, config, &cgroup, begin != socket::Begin::Start)?;
        barrier::enter(ground, config, &cgroup)?;
        gating::enter(ground, config, &cgroup, net.netns_cookie())?;
    }
    from.map_or(Ok(()), |from| forget_ended(ground, config, Some(from), &net))
}

/// Makes the kernel objects of a container and its newborn, which has its root and all mounts then.
pub(crate) fn bear<B: Bearer>(
    ground: &Ground,
    config: &Config,
    from: Option<&RestorePlan>,
    mut bearer: B,
) -> Result<(Born, B::Seen)> {
    let mut net = net::open(ground, config)?;
    if let (Net::Private { kept, .. }, Some(from)) = (&mut net, from.filter(|from| from.wakes)) {
        *kept = stacked::kept(ground, &config.id, &from.held)?;
    }
    match from {
        None => net::end_quiet_in(ground, config, &net)?,
        Some(from) if from.keeps_quiet => net::keep_quiet(ground, config, &net)?,
        Some(_) => {}
    }
    // ORDER: before the cgroup is made: a limit of another verb is not below this.
    if let Some(from) = from.filter(|from| !from.wakes) {
        contract::expect_restored(ground, &config.id, from.memory_bytes())?;
    }
    let map = config.ids.to_proc_text();
    let (mut flags, maps) = (process::namespaces(), (map.clone(), map));
    // A restore sets the clocks of the checkpoint.
    let has_clock = from.is_none() && view::has_clock(config);
    flags.set(CloneFlags::NEWTIME, flags.contains(CloneFlags::NEWTIME) && !has_clock);
    // Made at the clone, because it is connected while the newborn follows its plan.
    flags.set(CloneFlags::NEWNET, matches!(net, Net::Private { kept: None, .. }));
    let (cgroup, (mut keeper, expected)) =
        ground.cgroups()?.create_with(config.id.as_str(), &config.spec.limits, |cgroup| {
            let mut keeper = bearer.keeper()?;
            let expected = keeper.expect(Spawn {
                netns: net.netns().map(io::clone_fd).transpose()?,
                cgroup,
                id_map: flags.contains(CloneFlags::NEWUSER).then_some(maps),
                proc: true,
                settle: true,
                template: from.and_then(RestorePlan::template),
                ..Spawn::new(config.id.as_str(), Kind::Init, flags.bits())
            })?;
            Ok::<_, Error>((keeper, expected))
        })?;
    bearer.introduce(&cgroup, &net)?;
    let placement = cgroup.placement()?;
    let shared = dir::make(ground, config)?;
    let mut mounts = root::host_mounts(ground, config, &net, &shared)?;
    bearer.meanwhile()?;
    let mut newborn = keeper.born(expected)?;
    bearer.watch(newborn.pidfd.as_fd())?;
    let userns = if weakened("user-namespace") {
        layer::user_namespace(config.ids)? // file ids are not mapped
    } else {
        pidfd::user_namespace(newborn.pidfd.as_fd())
            .map_err(Error::call("cannot open the container's user namespace"))?
    };
    if let Net::Private { domain, kept } = &net {
        let netns = pidfd::namespace(newborn.pidfd.as_fd(), Namespace::Net)
            .map_err(Error::call("cannot open the container's network namespace"))?;
        mounts.show(net::connect(ground, config, domain, netns.as_fd(), kept.is_some())?);
    }
    let mut plan = Plan::new();
    for tasks in placement.v1_tasks {
        let fd = plan.fd(tasks);
        plan.join_cgroup(fd);
    }
    root::plan_namespaces(&mut plan, config);
    if has_clock {
        view::plan_clock(ground, &mut plan, config, (newborn.pid, newborn.start_time))?;
    }
    let mut plan = newborn.send_part(plan)?;
    let Assembled { root, clones, filled } = bearer.assemble(userns.as_fd())?;
    let device = rustix::fs::fstat(&root)
        .map_err(|e| Error::file("cannot look at", "the root")(e.into()))?
        .st_dev;
    let seen = bearer.look(root.as_fd())?;
    let proc = newborn.take_proc();
    let terminals = from.map_or(io::TERMINALS, RestorePlan::terminals);
    let own_stack = net.is_new();
    let parts = RootParts { root, proc, mounts, userns, shared, terminals, own_stack };
    root::plan_root(ground, &mut plan, config, parts)?;
    let plan = newborn.send_part(plan)?;
    Ok((Born { keeper, newborn, plan, device, sources: Some((clones, filled)) }, seen))
}

/// The record of a newborn, which keeps the counts of earlier runs, or of its checkpoint.
fn record_of(
    newborn: &Newborn,
    has_console: bool,
    past: Past,
    from: Option<&RestorePlan>,
    user: PasswdUser,
) -> InitRecord {
    let since = from.and_then(|from| from.since.as_ref());
    InitRecord {
        pid: newborn.pid,
        start_time: newborn.start_time,
        started_unix_ms: since.map_or_else(event::now_unix_ms, |since| since.started_unix_ms),
        paused: false,
        drowsy_unix_ms: None,
        console: has_console,
        stopping: false,
        sleeping: from.is_some_and(|from| from.wakes),
        unready: from.is_some_and(|from| from.wakes),
        failures: since.map_or(past.failures, |since| since.failures),
        short_runs: since.map_or(past.short_runs, |since| since.short_runs),
        user: Some(user),
        restored_bytes: from.map_or(0, RestorePlan::memory_bytes),
        wakes: from.map_or(0, |from| u32::from(from.wakes)),
        device: None,
        shortages: since.map(|since| since.shortages.awake()).unwrap_or_default(),
    }
}

/// Releases a newborn that follows a restore program, and conducts the restore to its end.
fn conduct(
    ground: &Ground,
    config: &Config,
    newborn: Newborn,
    keeper: &mut Keeper,
    (from, restore): (&RestorePlan, &Restore),
    (init, (process, console)): (&InitRecord, (BorrowedFd<'_>, Option<BorrowedFd<'_>>)),
) -> Result<()> {
    // ORDER: traced, then released: until it is complete, its death follows ours.
    let mut traced = match Traced::seize(newborn.pid) {
        Ok(traced) => traced,
        // A newborn that has failed since Ready names the cause.
        Err(e) => return Err(newborn.go().map_or_else(Error::from, |()| e.into())),
    };
    if config.spec.init {
        if let Err(e) = newborn.release() {
            return Err(newborn.watch().map_or_else(Error::from, |()| e.into()));
        }
        traced = traced.leave_init()?;
        newborn.watch()?;
    } else {
        newborn.go()?;
    }
    let mut fill = |sources: Sources| match &from.later {
        None => Err("no fill process was requested".to_owned()),
        Some(later) => {
            later::fill(ground, keeper, &config.id, (later, &from.reader), process, &sources)
                .map_err(|e| e.to_string())
        }
    };
    // ORDER: on record before the first task runs: until then an interrupted wake leaves a sleeper.
    let record = || {
        let elsewhere = |e: Error| CheckpointError::Elsewhere(e.to_string());
        socket::enforce(ground, config).map_err(elsewhere)?;
        deal::enforce(ground, config).map_err(elsewhere)?;
        match init.unready {
            true => {
                let init = InitRecord { unready: false, ..init.clone() };
                state::write_init(ground, &config.id, &init).map_err(elsewhere)
            }
            false => Ok(()),
        }
    };
    let checked = || from.checked().and_then(|()| from.end_watch()).and_then(|()| record());
    let conducted = traced.conduct(restore, console, checked, &mut fill);
    conducted.map_err(|e| match later::failure(ground, &config.id) {
        None => e,
        Some(what) => CheckpointError::Damaged { part: "pages".into(), what },
    })?;
    // Clients wait for the restored process, not for the rest of the start.
    std::thread::yield_now();
    Ok(())
}
