//! Truthful views: files of procfs and sysfs inside a container that show its own resources.
//!
//! A view is a file of one tmpfs of this instance, mounted over the kernel's file when the container starts. The mount
//! is read-only, and the file belongs to the root of the host, so no process inside can change it. The start and
//! `update` write all views. The daemon writes the ones that change when they are opened (`daemon/view.rs`). Without
//! a daemon they keep their values, and nothing waits for it.
//!
//! ```text
//! RUN/views/BASE/meminfo ...   views of the container whose first host id is BASE, which is also their group
//! RUN/views/BASE/view.json     the container, its limits and its clock, for the daemon
//! RUN/c/ID/views               a link with the text BASE, made first and removed last
//! ```
//!
//! | view | of a limit of | changes |
//! |---|---|---|
//! | `/proc/meminfo`, `/proc/swaps` | memory | yes |
//! | `/proc/cpuinfo`, `/sys/devices/system/cpu/online` | CPUs | no |
//! | `/proc/stat` | CPUs | yes |
//! | `/sys/devices/system/cpu/possible` | the set of CPUs | no |
//! | `/proc/loadavg`, `/proc/diskstats` | either | yes |
//!
//! `possible` follows a set of CPUs alone. A quota leaves every CPU to the container, and programs size arrays by
//! `possible` that they index by the number of the current CPU.
//!
//! `/proc/uptime` needs no view: a container with views has a boot clock that begins with it (time_namespaces(7)), and
//! the kernel shows that also in sysinfo(2), in `btime` and in the start times of processes.
//!
//! sysinfo(2) is no file: see `sysinfo.rs`.
//!
//! Uses `ground` and `state`.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::cgroup::{Cgroup, Hierarchy, MemoryParts};
use dormouse_kernel::clock::Offsets;
use dormouse_kernel::mount::MountAttr;
use dormouse_kernel::{clock, mount, pidfd, proc, weakened};
use dormouse_launch::Plan;
use dormouse_model::{Config, ContainerId, Limits, Spec, Views};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;

mod text;

use text::{CpuReading, HostMemory, Load};

/// The link in a container's runtime directory.
const LINK: &str = "views";

/// The description for the daemon.
const DESCRIPTION: &str = "view.json";

/// A file whose presence shows that the file system is mounted by this instance.
const MARK: &str = ".dormouse";

/// LIMIT: bytes of all views, of the host's memory.
const SIZE: &str = "25%";

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// LIMIT: bytes of the host's `/proc/cpuinfo`, `/proc/diskstats` and `/proc/meminfo`.
const HOST_FILE_BYTES: usize = 16 << 20;

/// One view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// `/proc/meminfo`
    Meminfo,
    /// `/proc/swaps`
    Swaps,
    /// `/proc/cpuinfo`
    Cpuinfo,
    /// `/proc/stat`
    Stat,
    /// `/proc/loadavg`
    Loadavg,
    /// `/proc/diskstats`
    Diskstats,
    /// `/sys/devices/system/cpu/online`
    Online,
    /// `/sys/devices/system/cpu/possible`
    Possible,
}

impl View {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Meminfo,
        Self::Swaps,
        Self::Cpuinfo,
        Self::Stat,
        Self::Loadavg,
        Self::Diskstats,
        Self::Online,
        Self::Possible,
    ];

    /// The path inside.
    pub fn target(self) -> &'static str {
        match self {
            Self::Meminfo => "/proc/meminfo",
            Self::Swaps => "/proc/swaps",
            Self::Cpuinfo => "/proc/cpuinfo",
            Self::Stat => "/proc/stat",
            Self::Loadavg => "/proc/loadavg",
            Self::Diskstats => "/proc/diskstats",
            Self::Online => "/sys/devices/system/cpu/online",
            Self::Possible => "/sys/devices/system/cpu/possible",
        }
    }

    /// The name of its file.
    fn name(self) -> &'static str {
        self.target().rsplit('/').next().unwrap_or_default()
    }

    /// Whether it changes while the limits stay.
    pub fn changes(self) -> bool {
        !matches!(self, Self::Cpuinfo | Self::Online | Self::Possible)
    }
}

/// Returns the views of a container.
pub(crate) fn of(config: &Config) -> Vec<View> {
    of_spec(&config.spec)
}

fn of_spec(spec: &Spec) -> Vec<View> {
    let limits = &spec.limits;
    let (memory, cpu) = match spec.views {
        Views::No => (false, false),
        Views::Yes => (true, true),
        Views::Auto if spec.security.privileged => (false, false),
        Views::Auto => (
            limits.memory_max_bytes.or(limits.swap_max_bytes).is_some(),
            limits.cpu_max_milli.is_some() || limits.cpuset_cpus.is_some(),
        ),
    };
    if !memory && !cpu {
        return Vec::new();
    }
    let is_wanted = |view: &View| match view {
        View::Meminfo | View::Swaps => memory,
        View::Cpuinfo | View::Stat | View::Online => cpu,
        View::Possible => cpu && limits.cpuset_cpus.is_some(),
        View::Loadavg | View::Diskstats => true,
    };
    // The operator may have mounted something there, for which a view is no view.
    let is_free = |view: &View| {
        let rest = |target: &str| view.target().strip_prefix(target.trim_end_matches('/'));
        let covers =
            |target: &str| rest(target).is_some_and(|r| r.is_empty() || r.starts_with('/'));
        !spec.mounts.iter().any(|mount| covers(&mount.target))
    };
    present().iter().copied().filter(|view| is_wanted(view) && is_free(view)).collect()
}

/// The views of files that this kernel has.
fn present() -> &'static [View] {
    static PRESENT: OnceLock<Vec<View>> = OnceLock::new();
    PRESENT.get_or_init(|| {
        View::ALL.into_iter().filter(|view| Path::new(view.target()).exists()).collect()
    })
}

/// Whether a container has views.
pub(crate) fn has(config: &Config) -> bool {
    has_of(&config.spec)
}

/// Whether a container of this specification has views.
pub(crate) fn has_of(spec: &Spec) -> bool {
    !of_spec(spec).is_empty()
}

/// A container as the writer of its views knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Described {
    id: ContainerId,
    limits: Limits,
    /// The boot clock when its control groups began to count.
    began_ns: i64,
    /// What its boot clock adds to the host's.
    #[serde(default)]
    offset_ns: i64,
}

/// Makes the views of a container anew. Returns the mounts and where they belong. The container's runtime directory
/// exists.
pub(crate) fn make(ground: &Ground, config: &Config) -> Result<Vec<(OwnedFd, &'static str)>> {
    let views = of(config);
    if views.is_empty() {
        return Ok(Vec::new());
    }
    let dir = begin(ground, config)?;
    let limits = config.spec.limits.clone();
    let described = Described {
        id: config.id.clone(),
        limits,
        began_ns: boot_ns(),
        offset_ns: own_offset_ns(),
    };
    let mut source = Source::new(&described, None);
    let mut mounts = Vec::with_capacity(views.len());
    for view in views {
        let path = dir.join(view.name());
        make_file(&path, &source.text(view)?)?;
        mounts.push((clone(&path)?, view.target()));
    }
    Ok(mounts)
}

/// Makes the directory of a container's views. The group of its files names the container to the daemon.
fn begin(ground: &Ground, config: &Config) -> Result<PathBuf> {
    let all = ground.places.views();
    ensure_mounted(&all)?;
    let base = config.ids.base.to_string();
    let link = ground.run_dir(&config.id).join(LINK);
    disk::remove(&link)?;
    // ORDER: the link first, so that the directory of a killed start is found again.
    symlink(&base, &link).map_err(Error::file("cannot make link", &link))?;
    let dir = all.join(base);
    disk::remove_tree(&dir)?;
    disk::make_dir(&dir, 0o700)?;
    let own = || -> std::io::Result<()> {
        chown(&dir, None, Some(config.ids.base))?;
        // ORDER: after its group, which new files inherit (inode(7), set-group-ID bit).
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o2700))
    };
    own().map_err(Error::file("cannot give a group to", &dir))?;
    Ok(dir)
}

/// Makes the file of a view. Its owner is no id inside, so nothing inside can write.
fn make_file(path: &Path, text: &str) -> Result<()> {
    let make = || -> std::io::Result<()> {
        let mut options = File::options();
        // The daemon takes no file for a view that others may not read.
        let mut file = options.write(true).create_new(true).mode(0o400).open(path)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(fs::Permissions::from_mode(0o444))
    };
    make().map_err(Error::file("cannot write", path))
}

/// A read-only mount of a view.
fn clone(path: &Path) -> Result<OwnedFd> {
    let attr = MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
    mount::clone_with(CWD, path, attr).map_err(Error::call("cannot clone the mount of a view"))
}

/// Mounts of the views below `/proc`, for a second procfs of a running container.
pub(crate) fn again(ground: &Ground, config: &Config) -> Result<Vec<(OwnedFd, &'static str)>> {
    let Some(dir) = dir(ground, &config.id) else { return Ok(Vec::new()) };
    let below = |view: &View| view.target().starts_with("/proc/");
    let all = of(config).into_iter().filter(below).map(|view| (dir.join(view.name()), view));
    let there = all.filter(|(path, _)| path.exists());
    there.map(|(path, view)| Ok((clone(&path)?, view.target()))).collect()
}

/// The directory of a container's views, if it has any.
fn dir(ground: &Ground, id: &ContainerId) -> Option<PathBuf> {
    let link = fs::read_link(ground.run_dir(id).join(LINK)).ok()?;
    let base = link.to_str().filter(|text| text.parse::<u32>().is_ok())?;
    Some(ground.places.views().join(base))
}

/// Plans a boot clock that begins with the newborn, where the container has views. Such a newborn was cloned without
/// a time namespace.
pub(crate) fn plan_clock(
    ground: &Ground,
    plan: &mut Plan,
    config: &Config,
    (pid, start_time): (u32, u64),
) -> Result<()> {
    // ORDER: not later than the birth of the newborn, whose own start time would be before the clock begins.
    let ticks_ns = i64::try_from(start_time).unwrap_or(0).saturating_mul(10_000_000);
    let offset_ns = own_offset_ns().saturating_sub(ticks_ns);
    let path = format!("/proc/{pid}/timens_offsets");
    let file = File::options().write(true).open(&path).map_err(Error::file("cannot open", path))?;
    let text = Offsets { boottime_ns: offset_ns, ..own_offsets() }.text();
    plan.own_time(Some((file.into(), &*text)), "the boot clock");
    describe_clock(ground, config, offset_ns)
}

/// Whether a container begins with a boot clock of its own.
pub(crate) fn has_clock(config: &Config) -> bool {
    has(config) && !weakened("time-namespace")
}

/// Records the boot clock of a restored container.
pub(crate) fn note_clock(ground: &Ground, config: &Config, pid: u32) -> Result<()> {
    if !has(config) {
        return Ok(());
    }
    describe_clock(ground, config, Offsets::of(pid).unwrap_or_default().boottime_ns)
}

fn describe_clock(ground: &Ground, config: &Config, offset_ns: i64) -> Result<()> {
    let Some(dir) = dir(ground, &config.id) else { return Ok(()) };
    let limits = config.spec.limits.clone();
    let described = Described { id: config.id.clone(), limits, began_ns: boot_ns(), offset_ns };
    describe(&dir, &described)?;
    let mut source = Source::new(&described, None);
    rewrite(&dir, View::Stat, &mut source)
}

fn describe(dir: &Path, described: &Described) -> Result<()> {
    disk::write_json(&dir.join(DESCRIPTION), described, Durable::No)
}

/// Writes a view that exists; nothing where it does not.
fn rewrite(dir: &Path, view: View, source: &mut Source<'_>) -> Result<()> {
    let path = dir.join(view.name());
    let file = match File::options().write(true).open(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        file => file.map_err(Error::file("cannot open", &path))?,
    };
    let text = source.text(view)?;
    put(&file, &text).map_err(Error::file("cannot write", &path))
}

/// Writes the whole of a view. Its length changes with the limits alone.
fn put(file: &File, text: &str) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.write_all_at(text.as_bytes(), 0)?;
    if file.metadata()?.len() != text.len() as u64 {
        file.set_len(text.len() as u64)?;
    }
    Ok(())
}

/// Writes the views of a running container after a change of its limits, and mounts those that it did not have.
pub(crate) fn update(
    ground: &Ground,
    config: &Config,
    (pid, process): (u32, BorrowedFd<'_>),
) -> Result<()> {
    let views = of(config);
    if views.is_empty() {
        return Ok(());
    }
    // An update that was killed may have made a view that is not mounted.
    let path = format!("/proc/{pid}/mountinfo");
    let table = proc::whole_text(&path).map_err(Error::file("cannot read", path))?;
    let is_mounted =
        |view: View| table.lines().any(|line| line.split(' ').nth(4) == Some(view.target()));
    let dir = match dir(ground, &config.id) {
        Some(dir) => dir,
        None => begin(ground, config)?,
    };
    let path = dir.join(DESCRIPTION);
    let before: Option<Described> = disk::read_json(&path)?;
    let described = Described {
        id: config.id.clone(),
        limits: config.spec.limits.clone(),
        began_ns: before.as_ref().map_or_else(boot_ns, |before| before.began_ns),
        offset_ns: before.map_or_else(own_offset_ns, |before| before.offset_ns),
    };
    // ORDER: described, then written: the daemon writes by the description.
    describe(&dir, &described)?;
    let cgroup = ground.cgroups()?.find(config.id.as_str())?;
    let mut source = Source::new(&described, cgroup.as_ref());
    let mut new = Vec::new();
    for view in views {
        let path = dir.join(view.name());
        match path.exists() {
            true => rewrite(&dir, view, &mut source)?,
            false => make_file(&path, &source.text(view)?)?,
        }
        if !is_mounted(view) {
            new.push((clone(&path)?, view.target()));
        }
    }
    if new.is_empty() {
        return Ok(());
    }
    let cover = || {
        let namespace = pidfd::namespace(process, Namespace::Mount)?;
        mount::cover_in(namespace.as_fd(), &new)
    };
    cover().map_err(Error::call("cannot mount a view in the running container"))
}

/// Removes the views of a container whose runtime directory still exists.
pub(crate) fn remove(ground: &Ground, id: &ContainerId) -> Result<()> {
    dir(ground, id).map_or(Ok(()), |dir| disk::remove_tree(&dir))
}

/// Unmounts the file system of all views. The caller ensures that no container runs or starts.
pub(crate) fn unmount(ground: &Ground) -> Result<()> {
    let path = ground.places.views();
    match is_mounted(&path) {
        true => mount::detach(&path).map_err(Error::call("cannot unmount the tmpfs of views")),
        false => Ok(()),
    }
}

/// Whether the file system is mounted here. RUN itself may be on a tmpfs.
fn is_mounted(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|s| s.f_type == TMPFS_MAGIC) && path.join(MARK).exists()
}

/// Mounts the file system of views, once per boot.
fn ensure_mounted(path: &Path) -> Result<()> {
    if is_mounted(path) {
        return Ok(());
    }
    disk::make_dir(path, 0o700)?;
    let _lock = Lock::take_new(&path.with_extension("lock"))?;
    if is_mounted(path) {
        return Ok(());
    }
    let make = || {
        let fs = mount::FsContext::open("tmpfs")?;
        fs.set_string("mode", "0700")?;
        fs.set_string("size", SIZE)?;
        // Only the engine makes files there: eight of a container.
        fs.set_string("nr_inodes", "0")?;
        fs.create(MountAttr::NOSUID | MountAttr::NOEXEC | MountAttr::NODEV)
    };
    let step = "cannot mount the tmpfs of views";
    let tree = make().map_err(Error::call(step))?;
    // ORDER: marked, then attached: what is there without its mark would be mounted over.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    rustix::fs::openat(&tree, MARK, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|e| Error::file("cannot write", path.join(MARK))(e.into()))?;
    mount::attach(tree.as_fd(), CWD, path).map_err(Error::call(step))
}

/// The boot clock of this process.
pub(crate) fn boot_ns() -> i64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

/// The offsets of the clocks of this process.
fn own_offsets() -> Offsets {
    static OWN: OnceLock<Offsets> = OnceLock::new();
    *OWN.get_or_init(|| Offsets::of("self").unwrap_or_default())
}

/// What the boot clock of this process adds to the machine's.
fn own_offset_ns() -> i64 {
    own_offsets().boottime_ns
}

/// Makes the text of views.
struct Source<'s> {
    described: &'s Described,
    cgroup: Option<&'s Cgroup>,
    load: Load,
    memory: Option<(HostMemory, MemoryParts)>,
    /// Its CPUs.
    cpus: Option<Vec<u32>>,
}

fn host_file(path: &str) -> Result<String> {
    proc::read_text(path, HOST_FILE_BYTES).map_err(Error::call("cannot read"))
}

impl<'s> Source<'s> {
    /// Without a cgroup, of a container that has used nothing.
    fn new(described: &'s Described, cgroup: Option<&'s Cgroup>) -> Self {
        let load = Load::begin(described.began_ns.unsigned_abs());
        Self { described, cgroup, load, memory: None, cpus: None }
    }

    fn text(&mut self, view: View) -> Result<String> {
        let limits = &self.described.limits;
        Ok(match view {
            View::Meminfo => {
                let (host, used) = self.memory()?;
                text::meminfo(limits, &host, &used)
            }
            View::Swaps => {
                let (host, used) = self.memory()?;
                text::swaps(limits, &host, &used)
            }
            View::Cpuinfo => text::cpuinfo(self.cpus()?, &host_file("/proc/cpuinfo")?),
            View::Online | View::Possible => text::cpu_list(self.cpus()?),
            View::Stat => {
                let read = self.cpu()?;
                text::stat(self.cpus()?, &read)
            }
            View::Loadavg => {
                let read = self.cpu()?;
                let waited = self.cgroup.map_or(Ok(0), Cgroup::cpu_wait_ns)?;
                let busy = read.user_ns + read.system_ns + waited;
                self.load.read(busy, boot_ns().unsigned_abs());
                self.load.text(read.tasks)
            }
            View::Diskstats => {
                let devices = self.cgroup.map_or(Ok(Vec::new()), Cgroup::devices)?;
                match devices.is_empty() {
                    true => String::new(),
                    false => text::diskstats(&devices, &host_file("/proc/diskstats")?),
                }
            }
        })
    }

    fn memory(&mut self) -> Result<(HostMemory, MemoryParts)> {
        if let Some(read) = self.memory {
            return Ok(read);
        }
        let used = self.cgroup.map_or(Ok(MemoryParts::default()), Cgroup::memory_parts)?;
        let read = (HostMemory::parse(&host_file("/proc/meminfo")?), used);
        self.memory = Some(read);
        Ok(read)
    }

    fn cpus(&mut self) -> Result<&[u32]> {
        if self.cpus.is_none() {
            let online = proc::online_cpus().map_err(Error::call("cannot read"))?;
            self.cpus = Some(text::cpus(&self.described.limits, &online));
        }
        Ok(self.cpus.as_deref().unwrap_or_default())
    }

    fn cpu(&self) -> Result<CpuReading> {
        let described = self.described;
        let now_ns = boot_ns();
        let inside_ns = now_ns.saturating_add(described.offset_ns).saturating_sub(own_offset_ns());
        let began_unix_ns = i128::from(clock::now_unix_ms()) * 1_000_000 - i128::from(inside_ns);
        let (user_ns, system_ns) = match self.cgroup {
            None => (0, 0),
            Some(cgroup) => {
                let counters = cgroup.counters()?.unwrap_or_default();
                (counters.cpu_user_ns, counters.cpu_ns.saturating_sub(counters.cpu_user_ns))
            }
        };
        let tasks = self.cgroup.map_or(Ok(None), Cgroup::tasks)?;
        Ok(CpuReading {
            user_ns,
            system_ns,
            uptime_ns: now_ns.saturating_sub(described.began_ns).max(0).unsigned_abs(),
            started_unix_s: u64::try_from(began_unix_ns / 1_000_000_000).unwrap_or(0),
            tasks: tasks.unwrap_or(1),
        })
    }
}

/// The views of one container, for the daemon.
#[derive(Debug)]
pub struct Viewed {
    described: Described,
    /// The file of the description, by which a newer one is known.
    identity: (u64, i64, i64),
    cgroup: Cgroup,
    load: Load,
    files: Vec<(u64, View, File)>,
    dir: PathBuf,
}

impl Viewed {
    /// Opens the views of the container with these host ids, below the directory of all; `None` if it has none, or has
    /// ended.
    pub fn open(cgroups: &Hierarchy, all: &Path, base: u32) -> Result<Option<Self>> {
        let dir = all.join(base.to_string());
        let Some(identity) = identity(&dir) else { return Ok(None) };
        let Some(described) = disk::read_json::<Described>(&dir.join(DESCRIPTION))? else {
            return Ok(None);
        };
        let Some(cgroup) = cgroups.find(described.id.as_str())? else { return Ok(None) };
        let load = Load::begin(described.began_ns.unsigned_abs());
        Ok(Some(Self { described, identity, cgroup, load, files: Vec::new(), dir }))
    }

    /// Whether the container and its limits are still those that were read.
    pub fn is_current(&self) -> bool {
        identity(&self.dir) == Some(self.identity)
    }

    /// Writes the view with this number of its inode, if it is one of those that change.
    pub fn write(&mut self, inode: u64) -> Result<()> {
        if !self.files.iter().any(|(number, ..)| *number == inode) && !self.find(inode)? {
            return Ok(());
        }
        let Some((_, view, file)) = self.files.iter().find(|(number, ..)| *number == inode) else {
            return Ok(());
        };
        let mut source = Source::new(&self.described, Some(&self.cgroup));
        source.load = self.load;
        let text = source.text(*view)?;
        self.load = source.load;
        put(file, &text).map_err(Error::file("cannot write", self.dir.join(view.name())))
    }

    /// The id of its cgroup in the v2 hierarchy.
    pub(crate) fn cgroup_v2_id(&self) -> Option<u64> {
        self.cgroup.v2_id()
    }

    /// Measures the load averages, and the memory of tmpfs and shared memory in bytes.
    pub(crate) fn measure(&mut self) -> Result<([f64; 3], u64)> {
        let mut source = Source::new(&self.described, Some(&self.cgroup));
        source.load = self.load;
        source.text(View::Loadavg)?;
        self.load = source.load;
        Ok((self.load.averages(), self.cgroup.memory_parts()?.shmem))
    }

    /// Finds a view that changes by the number of its inode, and opens it.
    fn find(&mut self, inode: u64) -> Result<bool> {
        for view in View::ALL.into_iter().filter(|view| view.changes()) {
            let path = self.dir.join(view.name());
            if !fs::symlink_metadata(&path).is_ok_and(|status| status.ino() == inode) {
                continue;
            }
            let file = File::options().write(true).open(&path);
            self.files.push((inode, view, file.map_err(Error::file("cannot open", &path))?));
            return Ok(true);
        }
        Ok(false)
    }
}

/// Inode and time of the description in a directory.
fn identity(dir: &Path) -> Option<(u64, i64, i64)> {
    let status = fs::metadata(dir.join(DESCRIPTION)).ok()?;
    Some((status.ino(), status.mtime(), status.mtime_nsec()))
}

/// All memory and all swap of a container, in bytes, if it has a view of them.
pub(crate) fn memory_of(config: &Config) -> Result<Option<(u64, u64)>> {
    if !of(config).contains(&View::Meminfo) {
        return Ok(None);
    }
    let (limits, host) = (&config.spec.limits, HostMemory::parse(&host_file("/proc/meminfo")?));
    Ok(Some((text::memory_bytes(limits, &host), text::swap_bytes(limits, &host))))
}

/// What a container with these views does not show, by the words of `inspect`. `has_sysinfo`: the program for
/// sysinfo(2) is loaded.
pub(crate) fn gaps(config: &Config, has_sysinfo: bool) -> Vec<&'static str> {
    let views = of(config);
    let limits = &config.spec.limits;
    let is_quota_alone = limits.cpu_max_milli.is_some() && limits.cpuset_cpus.is_none();
    let mut gaps = Vec::new();
    if views.contains(&View::Online) && is_quota_alone {
        gaps.push("nproc, and Go before 1.25, follow --nproc or --cpuset-cpus alone");
    }
    if views.contains(&View::Meminfo) && !has_sysinfo {
        gaps.push(
            "sysinfo(2), which busybox's free and uptime read, has memory and load of the host",
        );
    }
    gaps
}

/// Chooses CPUs for `--nproc`: neighbouring slots of host ids have neighbouring sets.
pub(crate) fn choose_cpus(count: u32, slot: u32, online: &str) -> Result<String> {
    let all = text::cpus(&Limits::default(), online);
    let have = all.len() as u64;
    if u64::from(count) > have || count == 0 {
        return Err(Error::Invalid(format!("--nproc {count}: the host has {have} CPUs")));
    }
    let first = u64::from(slot) * u64::from(count) % have;
    let at = |n: u64| all.get(((first + n) % have) as usize).copied();
    let mut own: Vec<u32> = (0..u64::from(count)).filter_map(at).collect();
    own.sort_unstable();
    Ok(text::cpu_list(&own).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_cpus_are_spread_over_the_host() {
        let of = |count, slot| choose_cpus(count, slot, "0-3").unwrap();
        assert_eq!([of(1, 0), of(1, 1), of(1, 5)], ["0", "1", "1"]);
        assert_eq!([of(2, 0), of(2, 1), of(2, 2)], ["0-1", "2-3", "0-1"]);
        assert_eq!([of(3, 1), of(4, 9)], ["0-1,3", "0-3"]);
        let refused = choose_cpus(5, 0, "0-3").unwrap_err().to_string();
        assert!(refused.contains("the host has 4 CPUs"), "{refused}");
    }

    #[test]
    fn views_have_names_of_their_own() {
        let mut names: Vec<&str> = View::ALL.iter().map(|view| view.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), View::ALL.len());
        assert!(!names.contains(&DESCRIPTION));
    }
}
