//! Control groups: one interface over v2, v1, and both at once (cgroups(7)).
//!
//! **Paths.** Every container has one cgroup, by the same name in every hierarchy that it uses,
//! below one parent of ours at the top: `/sys/fs/cgroup/dormouse/NAME` on v2,
//! `/sys/fs/cgroup/memory/dormouse/NAME` and so on with v1. systemd is not involved: it leaves a
//! cgroup at the top alone if it did not create it, and our `cgroup.subtree_control` keeps the
//! controllers of the parent enabled.
//!
//! ```text
//! PARENT/            no process, hands the controllers down (v2), carries the device policy
//!   keeper/          our own process: v2 allows none in a cgroup that hands controllers down
//!   images/          page cache of the files of images, in the hierarchy of the memory controller alone
//!   NAME/            a container; what is below belongs to the container
//!   devices-1/       v1 `devices` only: one shared list for all containers
//! ```
//!
//! **Three layouts, one table.** Each controller has at most one home: a v1 hierarchy, the v2
//! hierarchy, or none. [`Hierarchy::open`] finds the homes; all other code looks up a controller's
//! home. Functions that v2 has without a controller (freezing, killing, counting CPU time,
//! reporting that the last process has exited) use v2 wherever it is mounted. In the hybrid layout
//! a container therefore has no directory in `freezer` and `cpuacct`. That saves two directories,
//! and processes frozen by v2 can be traced and killed, while a v1 freezer may need many retries.
//!
//! **Placement.** A process is never moved by writing its pid: that waits for an RCU grace period
//! (12 ms on a quiet machine). A process is cloned into its v2 cgroup (clone3(2),
//! CLONE_INTO_CGROUP) and writes `0` into the `tasks` files of its v1 cgroups while it has one
//! thread, which needs no wait. [`Placement`] has the descriptors. KERNEL(5.17): access to `tasks`
//! is checked against the credentials of its opener, so the newborn may write as an unprivileged
//! user.
//!
//! **Interruption.** A cgroup is a set of directories; none of it lasts over a reboot. If a process
//! is killed in [`Hierarchy::create`] or [`Cgroup::remove`], some directories remain;
//! [`Hierarchy::find`] then finds them, and `remove` removes them.
//!
//! **Cost.** A memory cgroup costs 16 bytes per superblock of the machine; each directory about
//! 30 us to make and 25 to remove. Nothing is cached but descriptors of the parents.
//!
//! **Not here**: decisions. The weights that keep a CPU reservation, and the limits that keep a guarantee of memory
//! on v1, are computed by crate `governor`.

mod controller;
mod counters;
mod device;
mod dir;
mod disk;
mod error;
mod fit;
mod freezer;
mod guarantee;
mod images;
mod life;
mod limit;
mod mounts;
mod parts;
mod quota;
mod reclaim;
mod share;
mod stats;
mod supply;
mod tree;
mod usage;
mod wait;
mod writeback;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dormouse_model::{Invalid, Limits, Name};
use rustix::fs::OFlags;

pub use self::controller::Controllers;
pub use self::counters::Counters;
pub use self::device::{DeviceAccess, DeviceKind, DeviceRule};
pub use self::error::CgroupError;
pub use self::guarantee::{LimitSet, MemoryShare, ParentMemory, exists};
pub use self::images::ChargingImages;
pub use self::parts::{Device, MemoryParts};
pub use self::quota::CpuQuota;
pub use self::share::{CpuShare, count_cpus, cpu_is_v2, online_cpus, shares_of_weight};
pub use self::stats::Stats;
pub use self::supply::{Held, Supplies, Supply};
pub use self::tree::{Forest, Tree};
pub use self::usage::{Charged, CpuTime, InUse, MemoryCharged, MemoryInUse};
pub use self::writeback::{RootRates, WriteRates};

use self::dir::Dir;
use self::limit::{Host, MemoryV1, Setting, Version};
use self::mounts::Mounts;
use self::wait::retry_busy;
use crate::error::Result as CallResult;
use crate::proc;

/// The default parent of all containers.
pub const DEFAULT_PARENT: &str = "dormouse";
/// The cgroup of our own process.
const KEEPER: &str = "keeper";
/// The cgroup of page cache of images.
const IMAGES: &str = "images";
/// The shared device list of v1; the number changes with the list, so that a newer program does
/// not use an older list. No container's name may begin so.
const SHARED_DEVICES: &str = "devices-1";
/// The cgroup in which later processes of a container start when its own root hands controllers
/// down (systemd does) and so takes no process.
const LATER: &str = "dormouse-exec";

/// The mounts of cgroups on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// v2 alone.
    Unified,
    /// v1 with controllers, and v2 beside it.
    Hybrid,
    /// v1 alone.
    Legacy,
}

impl Layout {
    /// `unified`, `hybrid` or `legacy`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unified => "unified",
            Self::Hybrid => "hybrid",
            Self::Legacy => "legacy",
        }
    }
}

/// Enforcement of the device list on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevicePolicy {
    /// By the v1 controller.
    Controller,
    /// By a BPF program at the v2 parent.
    Program,
    /// Not at all, and why.
    None(String),
}

/// The cgroups of one instance of Dormouse: a parent in every hierarchy.
///
/// Cheap to open (a start opens one) and cheap to copy.
#[derive(Debug, Clone)]
pub struct Hierarchy(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    parent: String,
    layout: Layout,
    v1: Vec<V1>,
    v2: Option<V2>,
    /// v1's shared list; opened once.
    device_list: OnceLock<Dir>,
    device_policy: OnceLock<DevicePolicy>,
}

/// One v1 hierarchy.
#[derive(Debug)]
struct V1 {
    controllers: Controllers,
    mount: PathBuf,
    /// Our parent in it; made when first needed.
    parent: OnceLock<Dir>,
}

/// The v2 hierarchy.
#[derive(Debug)]
struct V2 {
    mount: PathBuf,
    parent: Dir,
    /// The controllers that the parent enables for its children.
    enabled: Controllers,
}

impl V1 {
    /// Our parent, which is made where it is missing.
    fn parent(&self, name: &str) -> CallResult<&Dir> {
        if let Some(dir) = self.parent.get() {
            return Ok(dir);
        }
        let path = self.mount.join(name);
        let dir = match Dir::open(&path) {
            Err(e) if e.errno() == libc::ENOENT => {
                let made = Dir::open(&self.mount)?.child_or_make(name)?;
                if self.controllers.contains(Controllers::IO) {
                    have_disks_counted(&made);
                }
                made
            }
            other => other?,
        };
        if self.controllers.contains(Controllers::CPUSET) {
            fill_cpuset(&Dir::open(&self.mount)?, &dir)?;
        }
        Ok(self.parent.get_or_init(|| dir))
    }
}

/// A v1 CPU set starts empty, and then neither takes processes nor lets its children have a CPU.
fn fill_cpuset(above: &Dir, dir: &Dir) -> CallResult<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if dir.read(file)?.trim().is_empty() {
            dir.write(file, above.read(file)?.trim())?;
        }
    }
    Ok(())
}

/// Has all disks count what cgroups read and write, by a rate of a v1 cgroup that is none.
///
/// KERNEL(6.10): a disk counts for the files `blkio.throttle.*` only once a rate was written for it
/// (`blk_throtl_init()`).
fn have_disks_counted(dir: &Dir) {
    const DEVICE_BYTES: usize = 64;
    // The disk with its file counts what a loop device reads and writes. The others are memory.
    const OTHERS: [&str; 3] = ["loop", "ram", "zram"];
    for entry in std::fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let name = entry.file_name();
        if OTHERS.iter().any(|other| name.as_encoded_bytes().starts_with(other.as_bytes())) {
            continue;
        }
        if let Ok(device) = proc::read_text(entry.path().join("dev"), DEVICE_BYTES) {
            // A disk that does not count is no reason to refuse a start.
            let _ = dir.write("blkio.throttle.write_bps_device", &format!("{} 0", device.trim()));
        }
    }
}

/// Moves this process to `above` if it is in the cgroup `own` of `parent`.
fn leave(above: &Dir, parent: &Dir, own: &str) -> CallResult<()> {
    let Some(dir) = parent.child(own)? else { return Ok(()) };
    let ours = std::process::id().to_string();
    if dir.read("cgroup.procs")?.lines().any(|pid| pid == ours) {
        above.write("cgroup.procs", "0")?;
    }
    Ok(())
}

/// Returns whether processes are in the cgroup `own` of `parent`.
fn has_processes(parent: &Dir, own: &str) -> CallResult<bool> {
    let Some(dir) = parent.child(own)? else { return Ok(false) };
    Ok(!dir.read("cgroup.procs")?.trim().is_empty())
}

impl Hierarchy {
    /// Opens the parent cgroup `parent` (one path component) in every hierarchy where containers
    /// will have a directory, makes it where it is missing, and hands the controllers down to it.
    ///
    /// Errors: [`CgroupError::NotMounted`], [`CgroupError::Invalid`] for the name, and what the
    /// kernel refuses. A controller that cannot be handed down is no error here but where a limit
    /// needs it.
    pub fn open(parent: &str) -> Result<Self, CgroupError> {
        Self::open_kept(parent, None)
    }

    /// The same. On a host with v1 the places of the hierarchies are kept in a file, which belongs to root alone, while
    /// the mounts stay the same. A damaged file is replaced.
    pub fn open_kept(parent: &str, kept: Option<&Path>) -> Result<Self, CgroupError> {
        let parent: Name = parent.parse()?;
        Self::open_in(parent.as_str(), Mounts::find(kept)?)
    }

    fn open_in(parent: &str, mounts: Mounts) -> Result<Self, CgroupError> {
        let layout = match (mounts.v1.is_empty(), mounts.v2.is_some()) {
            (true, _) => Layout::Unified,
            (false, true) => Layout::Hybrid,
            (false, false) => Layout::Legacy,
        };
        let v1 = mounts.v1.into_iter().map(|(controllers, mount)| V1 {
            controllers,
            mount,
            parent: OnceLock::new(),
        });
        let v2 = mounts.v2.map(|mount| V2::open(mount, parent)).transpose()?;
        let hierarchy = Self(Arc::new(Inner {
            parent: parent.to_owned(),
            layout,
            v1: v1.collect(),
            v2,
            device_list: OnceLock::new(),
            device_policy: OnceLock::new(),
        }));
        for v1 in hierarchy.own_v1(&Limits::default()) {
            v1.parent(parent).map_err(CgroupError::Parent)?;
        }
        Ok(hierarchy)
    }

    /// Returns the layout of cgroups on this host.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// The parent's name.
    pub fn parent(&self) -> &str {
        &self.0.parent
    }

    /// The parent in the v2 hierarchy, opened O_PATH: what cgroup BPF programs are attached to.
    pub fn v2_parent(&self) -> Result<Option<OwnedFd>, CgroupError> {
        self.0.v2.as_ref().map(|v2| v2.parent.copy()).transpose().map_err(CgroupError::Open)
    }

    /// The controllers that containers can be limited by.
    pub fn controllers(&self) -> Controllers {
        let v1: Controllers = self.0.v1.iter().map(|v1| v1.controllers).collect();
        let v2 = self.0.v2.as_ref();
        v1 | v2.map_or(Controllers::empty(), |v2| v2.enabled | v2.root_controllers())
    }

    /// Returns the version of a controller, `v1` or `v2`; or why it is missing.
    pub fn home(&self, controller: Controllers) -> Result<&'static str, String> {
        match self.version(controller) {
            Some(Version::V1) => Ok("v1"),
            Some(Version::V2) => Ok("v2"),
            None => Err(self.why_missing(controller)),
        }
    }

    /// Makes the cgroups of a container and sets its limits.
    ///
    /// Every request that can be refused without a system call is refused before anything is
    /// created; created directories are removed again when a later step fails. Errors with kind
    /// `Exists` if any of its directories exists: [`find`](Self::find) and remove it first.
    pub fn create(&self, name: &str, limits: &Limits) -> Result<Cgroup, CgroupError> {
        let (cgroup, ()) = self.create_with(name, limits, |_| Ok::<_, CgroupError>(()))?;
        Ok(cgroup)
    }

    /// The same with a callback. `meanwhile` is called as soon as the first process can be cloned
    /// into the v2 cgroup, which is passed to it if there is one. The rest is created after that,
    /// and is in force before [`Cgroup::placement`] can be called.
    pub fn create_with<T, E: From<CgroupError>>(
        &self,
        name: &str,
        limits: &Limits,
        meanwhile: impl FnOnce(Option<OwnedFd>) -> Result<T, E>,
    ) -> Result<(Cgroup, T), E> {
        let (mut cgroup, settings) = match self.begin(name, limits) {
            // Another process removed the empty parent between our opening and using it.
            Err(CgroupError::Make(e)) if e.errno() == libc::ENOENT => {
                Self::open(&self.0.parent)?.begin(name, limits)
            }
            other => other,
        }?;
        let made = cgroup.v2_dir().map_err(E::from).and_then(|v2| {
            let done = meanwhile(v2)?;
            cgroup.make_rest(limits).and_then(|()| cgroup.apply(&settings))?;
            Ok(done)
        });
        match made {
            Ok(done) => Ok((cgroup, done)),
            Err(error) => {
                cgroup.unmake();
                Err(error)
            }
        }
    }

    /// Makes the v2 cgroup of a container; without v2, all of it.
    fn begin(&self, name: &str, limits: &Limits) -> Result<(Cgroup, Vec<Setting>), CgroupError> {
        check_name(name)?;
        let settings = limit::plan(limits, self, MemoryV1::UNLIMITED)?;
        if settings.iter().any(|s| s.controller == Controllers::CPUSET)
            && let Some(v2) = &self.0.v2
            && self.version(Controllers::CPUSET) == Some(Version::V2)
        {
            v2.enable(Controllers::CPUSET)?;
        }
        let mut cgroup = Cgroup {
            hierarchy: self.clone(),
            name: name.to_owned(),
            v1: Vec::with_capacity(self.0.v1.len()),
            v2: None,
        };
        match &self.0.v2 {
            Some(v2) => cgroup.v2 = Some(v2.parent.make(name).map_err(CgroupError::Make)?),
            None => cgroup.make_rest(limits).inspect_err(|_| cgroup.unmake())?,
        }
        Ok((cgroup, settings))
    }

    /// The cgroups of a container, as far as they are there; `None` where none is.
    pub fn find(&self, name: &str) -> Result<Option<Cgroup>, CgroupError> {
        check_name(name)?;
        let mut cgroup =
            Cgroup { hierarchy: self.clone(), name: name.to_owned(), v1: Vec::new(), v2: None };
        if let Some(v2) = &self.0.v2 {
            cgroup.v2 = v2.parent.child(name).map_err(CgroupError::Open)?;
        }
        for v1 in &self.0.v1 {
            let dir = match v1.parent.get() {
                Some(parent) => parent.child(name).map_err(CgroupError::Open)?,
                // Most containers have no group in `cpuset`, `cpuacct`, `devices` and `freezer`.
                None => match Dir::open(&v1.mount.join(&self.0.parent).join(name)) {
                    Err(e) if e.errno() == libc::ENOENT => None,
                    dir => {
                        let dir = dir.map_err(CgroupError::Open)?;
                        // ORDER: open in every hierarchy with a group of it, for its removal.
                        v1.parent(&self.0.parent).map_err(CgroupError::Parent)?;
                        Some(dir)
                    }
                },
            };
            cgroup.v1.extend(dir.map(|dir| (v1.controllers, dir)));
        }
        Ok((cgroup.v2.is_some() || !cgroup.v1.is_empty()).then_some(cgroup))
    }

    /// Names of all containers that have a cgroup in any hierarchy, sorted.
    pub fn names(&self) -> Result<Vec<String>, CgroupError> {
        let mut names = Vec::new();
        if let Some(v2) = &self.0.v2 {
            names.extend(v2.parent.names().map_err(CgroupError::Read)?);
        }
        for v1 in &self.0.v1 {
            if let Some(parent) = self.existing(v1)? {
                names.extend(parent.names().map_err(CgroupError::Read)?);
            }
        }
        names.retain(|name| check_name(name).is_ok());
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Directories for the keeper: one cgroup beside those of the containers in every hierarchy,
    /// created if missing. The keeper is neither limited nor frozen nor killed with the command
    /// that started it, and its children inherit nothing of that command's cgroups.
    ///
    /// The process enters by writing `0` into `cgroup.procs` of each. That waits for an RCU grace
    /// period, once in its life.
    pub fn keeper_dirs(&self) -> Result<Vec<PathBuf>, CgroupError> {
        let mut dirs = Vec::new();
        if let Some(v2) = &self.0.v2 {
            let dir = v2.parent.child_or_make(KEEPER).map_err(CgroupError::Make)?;
            dirs.push(dir.path().to_owned());
        }
        for v1 in &self.0.v1 {
            let parent = v1.parent(&self.0.parent).map_err(CgroupError::Parent)?;
            let dir = parent.child_or_make(KEEPER).map_err(CgroupError::Make)?;
            if v1.controllers.contains(Controllers::CPUSET) {
                fill_cpuset(parent, &dir).map_err(CgroupError::Parent)?;
            }
            dirs.push(dir.path().to_owned());
        }
        Ok(dirs)
    }

    /// The same cgroup in the v2 hierarchy alone: its directory, O_PATH, and the id that BPF
    /// programs see.
    pub fn keeper_v2(&self) -> Result<Option<(OwnedFd, u64)>, CgroupError> {
        let Some(v2) = &self.0.v2 else { return Ok(None) };
        let dir = v2.parent.child_or_make(KEEPER).map_err(CgroupError::Make)?;
        let id = dir.inode().map_err(CgroupError::Open)?;
        Ok(Some((dir.copy().map_err(CgroupError::Open)?, id)))
    }

    /// Removes the parent from every hierarchy. A caller that is itself in the keeper's cgroup, as
    /// the program that a keeper becomes at its end is, leaves it first, for the hierarchy's root.
    ///
    /// Errors with kind `Busy` while a container or the keeper is in it. While an image is imported, the cgroup of
    /// images stays, and the parent above it: the next call removes both.
    pub fn remove_parent(&self) -> Result<(), CgroupError> {
        let names = self.names()?;
        if !names.is_empty() {
            let call = crate::CallError::new("rmdir", self.0.parent.clone(), libc::EBUSY);
            return Err(CgroupError::Remove(call));
        }
        let mounts = self.0.v1.iter().map(|v1| &v1.mount).chain(self.0.v2.iter().map(|v| &v.mount));
        for mount in mounts {
            let above = Dir::open(mount).map_err(CgroupError::Remove)?;
            if let Some(parent) = above.child(&self.0.parent).map_err(CgroupError::Remove)? {
                let mut is_used = false;
                for own in parent.names().map_err(CgroupError::Remove)? {
                    leave(&above, &parent, &own).map_err(CgroupError::Remove)?;
                    if own == IMAGES && has_processes(&parent, &own).map_err(CgroupError::Remove)? {
                        is_used = true;
                        continue;
                    }
                    // The keeper's last process closes its sockets before it leaves its cgroup.
                    retry_busy(Duration::from_millis(500), || parent.remove(&own))
                        .map_err(CgroupError::Remove)?;
                }
                if !is_used {
                    above.remove(&self.0.parent).map_err(CgroupError::Remove)?;
                }
            }
        }
        Ok(())
    }

    /// The v1 hierarchies in which a container has a directory.
    fn own_v1(&self, limits: &Limits) -> impl Iterator<Item = &V1> {
        let mut own = Controllers::ALWAYS_V2;
        if self.0.v2.is_none() {
            own |= Controllers::CPUACCT | Controllers::FREEZER;
        }
        if limits.cpuset_cpus.is_some() {
            own |= Controllers::CPUSET;
        }
        self.0.v1.iter().filter(move |v1| v1.controllers.intersects(own))
    }

    /// Our parent in a v1 hierarchy, if it is there; never made.
    fn existing<'a>(&self, v1: &'a V1) -> Result<Option<&'a Dir>, CgroupError> {
        if v1.parent.get().is_none() && !v1.mount.join(&self.0.parent).is_dir() {
            return Ok(None);
        }
        v1.parent(&self.0.parent).map(Some).map_err(CgroupError::Parent)
    }

    /// Our parent in the v1 hierarchy of a controller, which is made where it is missing.
    fn v1_parent(&self, controller: Controllers) -> Result<Option<&Dir>, CgroupError> {
        let v1 = self.0.v1.iter().find(|v1| v1.controllers.contains(controller));
        let parent = v1.map(|v1| v1.parent(&self.0.parent));
        parent.transpose().map_err(CgroupError::Parent)
    }
}

impl Host for Hierarchy {
    fn version(&self, controller: Controllers) -> Option<Version> {
        if self.0.v1.iter().any(|v1| v1.controllers.contains(controller)) {
            return Some(Version::V1);
        }
        let v2 = self.0.v2.as_ref()?;
        // An always enabled controller is enabled already, or was refused.
        let has = v2.enabled.contains(controller)
            || controller == Controllers::CPUSET && v2.root_controllers().contains(controller);
        has.then_some(Version::V2)
    }

    fn has(&self, controller: Controllers, file: &str) -> bool {
        let v2 = || self.0.v2.as_ref().map(|v2| &v2.parent);
        match self.version(controller) {
            Some(Version::V1) => {
                matches!(self.v1_parent(controller), Ok(Some(dir)) if dir.has(file))
            }
            Some(Version::V2) => v2().is_some_and(|dir| dir.has(file)),
            None => false,
        }
    }

    fn why_missing(&self, controller: Controllers) -> String {
        let Some(names) = Controllers::NAMES.iter().find(|n| n.0 == controller) else {
            return "no such controller".into();
        };
        let (name, v1_name) = (controller.name(), names.1);
        if let Some(v2) = &self.0.v2
            && v2.root_controllers().contains(controller)
        {
            return format!(
                "the {name} controller cannot be handed down: it is not in {}/cgroup.subtree_control",
                v2.mount.display()
            );
        }
        // `#subsys_name hierarchy num_cgroups enabled`
        let table = proc::read_text("/proc/cgroups", 1 << 16).unwrap_or_default();
        let row = table.lines().find(|l| l.split_whitespace().next() == Some(v1_name));
        match row.and_then(|row| row.split_whitespace().nth(3)) {
            Some("0") => format!(
                "the {name} controller is switched off (cgroup_disable= on the kernel's command \
                 line)"
            ),
            Some(_) => format!("the {name} controller is mounted nowhere below /sys/fs/cgroup"),
            None => format!("this kernel has no {name} controller"),
        }
    }

    fn cpus(&self) -> Result<String, CgroupError> {
        proc::online_cpus().map_err(CgroupError::Read)
    }

    fn mems(&self) -> Result<String, CgroupError> {
        let Some(parent) = self.v1_parent(Controllers::CPUSET)? else { return Ok(String::new()) };
        Ok(parent.read("cpuset.mems").map_err(CgroupError::Read)?.trim().to_owned())
    }
}

impl V2 {
    fn open(mount: PathBuf, name: &str) -> Result<Self, CgroupError> {
        let path = mount.join(name);
        let parent = match Dir::open(&path) {
            Err(e) if e.errno() == libc::ENOENT => {
                let above = Dir::open(&mount).map_err(CgroupError::Parent)?;
                above.child_or_make(name).map_err(CgroupError::Parent)?
            }
            other => other.map_err(CgroupError::Parent)?,
        };
        let mut v2 = Self { mount, parent, enabled: Controllers::empty() };
        v2.enabled = v2.handed_down().map_err(CgroupError::Parent)?;
        if !v2.enabled.contains(Controllers::ALWAYS_V2) {
            // Each by itself: one that is refused (cpu, while a real-time process is in some
            // other cgroup) must not take the others with it.
            let missing = Controllers::ALWAYS_V2 - v2.enabled;
            for wanted in (missing & v2.root_controllers()).iter() {
                if v2.enable(wanted).is_ok() {
                    v2.enabled |= wanted;
                }
            }
        }
        Ok(v2)
    }

    /// Returns the controllers that the host's root could enable for the parent.
    fn root_controllers(&self) -> Controllers {
        let list = Dir::open(&self.mount).and_then(|root| root.read("cgroup.controllers"));
        list.map_or(Controllers::empty(), |list| Controllers::from_v2_list(&list))
    }

    /// Returns the controllers that the parent enables now.
    fn handed_down(&self) -> CallResult<Controllers> {
        Ok(Controllers::from_v2_list(&self.parent.read("cgroup.subtree_control")?))
    }

    /// Hands controllers down from the root to the parent and from the parent to the containers.
    ///
    /// ORDER: from the top; a cgroup can only hand down what it was given.
    fn enable(&self, controllers: Controllers) -> Result<(), CgroupError> {
        let missing = controllers - self.handed_down().map_err(CgroupError::Parent)?;
        if missing.is_empty() {
            return Ok(());
        }
        let words: Vec<_> = missing.iter().map(|c| format!("+{}", c.name())).collect();
        let words = words.join(" ");
        let fail = |below: &Path, source| CgroupError::Enable {
            controllers: words.clone(),
            below: below.display().to_string(),
            source,
        };
        let root = Dir::open(&self.mount).map_err(CgroupError::Parent)?;
        for dir in [&root, &self.parent] {
            dir.write("cgroup.subtree_control", &words).map_err(|e| fail(dir.path(), e))?;
        }
        Ok(())
    }
}

/// Descriptors by which a new process gets into its cgroups.
#[derive(Debug, Default)]
pub struct Placement {
    /// For clone3(2) with CLONE_INTO_CGROUP (KERNEL(5.7)).
    pub v2: Option<OwnedFd>,
    /// The new process writes `0` into each, before it has a second thread.
    pub v1_tasks: Vec<OwnedFd>,
}

/// The cgroups of one container.
///
/// Holding one proves nothing about their being there still: another process may have removed
/// them, and then every call fails with kind `NotFound`.
#[derive(Debug)]
pub struct Cgroup {
    hierarchy: Hierarchy,
    name: String,
    /// Its directory in each v1 hierarchy that has one.
    v1: Vec<(Controllers, Dir)>,
    v2: Option<Dir>,
}

impl Cgroup {
    /// Its name below the parent.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Descriptors for a new process of this container.
    ///
    /// On v2 a cgroup that hands controllers down takes no process; where the container has made
    /// its own such (systemd inside does), the new process goes into a cgroup `dormouse-exec`
    /// below it.
    pub fn placement(&self) -> Result<Placement, CgroupError> {
        let mut placement = Placement::default();
        if let Some(v2) = &self.v2 {
            let hands_down = v2.read("cgroup.subtree_control").map_err(CgroupError::Read)?;
            let dir = match hands_down.trim().is_empty() {
                true => v2.copy(),
                false => v2.child_or_make(LATER).and_then(|later| later.copy()),
            };
            placement.v2 = Some(dir.map_err(CgroupError::Open)?);
        }
        for (_, dir) in &self.v1 {
            placement.v1_tasks.push(tasks(dir)?);
        }
        // ORDER: on v2 the list is in force before any process is there.
        if self.hierarchy.device_policy() == DevicePolicy::Controller
            && self.in_v1(Controllers::DEVICES).is_none()
            && let Some(list) = self.hierarchy.device_list()?
        {
            placement.v1_tasks.push(tasks(list)?);
        }
        Ok(placement)
    }

    /// Sets every limit that is `Some`; what is `None` stays as it is. Period and burst of CPU time are
    /// set with `cpu_max_milli` only, all three together.
    ///
    /// Memory is never taken by killing: if it cannot be reclaimed down to a new, lower limit, the
    /// limit stays and the error's kind is `Busy`. A CPU set can be changed on v1 only for a
    /// container that was created with one.
    pub fn set(&self, limits: &Limits) -> Result<(), CgroupError> {
        let now = self.memory_now()?;
        let mut settings = limit::plan(limits, &self.hierarchy, now)?;
        if limits.cpu_max_milli.is_some() {
            // ORDER: first, because a present burst may be above the new quota.
            settings.splice(0..0, limit::no_burst(&self.hierarchy));
        }
        let is_weighed = limits.cpu_weight.is_some_and(|weight| weight > 0);
        if is_weighed || limits.cpu_reserve_milli.is_some_and(|reserve| reserve > 0) {
            // ORDER: first, because an idle cgroup takes no weight.
            settings.splice(0..0, limit::not_idle(&self.hierarchy));
        }
        let cpuset = settings.iter().any(|s| s.controller == Controllers::CPUSET);
        match self.hierarchy.version(Controllers::CPUSET) {
            Some(Version::V1) if cpuset && self.in_v1(Controllers::CPUSET).is_none() => {
                return Err(CgroupError::Missing {
                    limit: "CPU set",
                    why: "on cgroup v1 a container that was started without one cannot get one \
                          while it runs"
                        .into(),
                    since: "4.5",
                });
            }
            Some(Version::V2) if cpuset => {
                if let Some(v2) = &self.hierarchy.0.v2 {
                    v2.enable(Controllers::CPUSET)?;
                }
            }
            _ => {}
        }
        if let (Some(bytes), Some(v2)) = (limits.memory_max_bytes, self.in_v2(Controllers::MEMORY))
        {
            fit::reclaim_to(v2, bytes)?;
        }
        self.apply(&settings)
    }

    fn memory_now(&self) -> Result<MemoryV1, CgroupError> {
        let Some(v1) = self.in_v1(Controllers::MEMORY) else { return Ok(MemoryV1::UNLIMITED) };
        let read = |file| v1.read_number(file).map_err(CgroupError::Read);
        let mut now = MemoryV1::UNLIMITED;
        now.limit = read("memory.limit_in_bytes")?.unwrap_or(now.limit);
        if v1.has("memory.memsw.limit_in_bytes") {
            now.memsw = read("memory.memsw.limit_in_bytes")?.unwrap_or(now.memsw);
        }
        Ok(now)
    }

    /// Makes what is not there yet: its directories of v1.
    fn make_rest(&mut self, limits: &Limits) -> Result<(), CgroupError> {
        if !self.v1.is_empty() {
            return Ok(());
        }
        let hierarchy = self.hierarchy.clone();
        for v1 in hierarchy.own_v1(limits) {
            let parent = v1.parent(&hierarchy.0.parent).map_err(CgroupError::Parent)?;
            let dir = parent.make(&self.name).map_err(CgroupError::Make)?;
            self.v1.push((v1.controllers, dir));
        }
        Ok(())
    }

    fn apply(&self, settings: &[Setting]) -> Result<(), CgroupError> {
        for s in settings {
            let dir = self.in_v1(s.controller).or(self.v2.as_ref());
            let Some(dir) = dir else { continue };
            dir.write(s.file, &s.value)
                .map_err(|source| CgroupError::Set { limit: s.limit, source })?;
        }
        Ok(())
    }

    /// The id that BPF programs see (bpf_get_current_cgroup_id()); `None` without v2.
    pub fn v2_id(&self) -> Option<u64> {
        // fstat(2) of a descriptor that is held does not fail.
        self.v2.as_ref()?.inode().ok()
    }

    /// Its directory in the v2 hierarchy, opened O_PATH.
    pub fn v2_dir(&self) -> Result<Option<OwnedFd>, CgroupError> {
        self.v2.as_ref().map(Dir::copy).transpose().map_err(CgroupError::Open)
    }

    /// Its directory where a controller is v1's.
    fn in_v1(&self, controller: Controllers) -> Option<&Dir> {
        self.v1.iter().find(|(c, _)| c.contains(controller)).map(|(_, dir)| dir)
    }

    /// Its directory where a controller is v2's.
    fn in_v2(&self, controller: Controllers) -> Option<&Dir> {
        (self.hierarchy.version(controller) == Some(Version::V2)).then_some(self.v2.as_ref())?
    }
}

fn tasks(dir: &Dir) -> Result<OwnedFd, CgroupError> {
    dir.open_file("tasks", OFlags::WRONLY).map_err(CgroupError::Open)
}

/// A container's name is one path component and not a reserved name.
fn check_name(name: &str) -> Result<(), Invalid> {
    let _: Name = name.parse()?;
    let is_own = name == KEEPER || name == IMAGES || name.starts_with("devices-");
    if is_own || name.contains('.') && is_file(name) {
        return Err(Invalid::new("cgroup name", name, "a name that is not one of our own"));
    }
    Ok(())
}

/// Names such as `cgroup.procs` and `memory.max` are the kernel's.
fn is_file(name: &str) -> bool {
    let prefix = name.split('.').next().unwrap_or_default();
    let kernel = ["cgroup", "hugetlb", "misc", "rdma", "dmem", "net_cls", "net_prio", "irq"];
    kernel.contains(&prefix)
        || Controllers::NAMES.iter().any(|n| n.1 == prefix || n.2 == Some(prefix))
}

#[cfg(test)]
mod tests;
