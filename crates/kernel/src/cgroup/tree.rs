//! A cgroup at any path, in every hierarchy that it needs: an OCI client selects it by
//! `linux.cgroupsPath`, and its limits by the names of its files.
//!
//! [`super::Hierarchy`] is for the engine's own containers, all of them below one parent; a
//! [`Tree`] has a path chosen by the client. The rest is the same: directories are held by
//! descriptor, processes place themselves ([`Placement`]), and v2 freezes and kills if it is
//! mounted.
//!
//! **Directories.** One in the v2 hierarchy; one in each v1 hierarchy that limits or counts
//! something for every container; and one in each hierarchy that the client selects. Missing parent
//! directories are created, too, and removed with it if they are empty.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::device::attach_verdicts;
use super::dir::Dir;
use super::error::CgroupError;
use super::freezer::Freezer;
use super::life::{kill_pid, remove_below, walk};
use super::mounts::find_all;
use super::wait::retry_busy;
use super::{DeviceRule, LATER, Layout, Placement, fill_cpuset, tasks};
use crate::error::{CallError, Result as CallResult};
use crate::weaken::weakened;

/// v1 controllers that every container is put into. `cpuset` is not among them: an unfilled CPU set
/// takes no process, and a filled one without a restriction is of no use.
const ALWAYS_V1: [&str; 6] = ["cpu", "cpuacct", "memory", "pids", "blkio", "devices"];
/// Controllers to enable on v2, as far as they exist.
const ALWAYS_V2: [&str; 7] = ["cpuset", "cpu", "io", "memory", "pids", "hugetlb", "rdma"];
/// LIMIT: components of a path.
const DEEPEST_PATH: usize = 64;

/// The cgroup hierarchies of a host.
#[derive(Debug)]
pub struct Forest {
    /// Each with the words that name it: `cpu,cpuacct`, `name=systemd`.
    v1: Vec<(String, PathBuf)>,
    v2: Option<PathBuf>,
}

impl Forest {
    /// Reads the mounts of this host.
    pub fn find() -> Result<Self, CgroupError> {
        Self::find_kept(None)
    }

    /// The same, with a file as that of [`super::Hierarchy::open_kept`].
    pub fn find_kept(kept: Option<&Path>) -> Result<Self, CgroupError> {
        let (v1, v2) = find_all(kept)?;
        if v1.is_empty() && v2.is_none() {
            return Err(CgroupError::NotMounted);
        }
        Ok(Self { v1, v2 })
    }

    /// Returns the layout of cgroups on this host.
    pub fn layout(&self) -> Layout {
        match (self.v1.is_empty(), self.v2.is_some()) {
            (true, _) => Layout::Unified,
            (false, true) => Layout::Hybrid,
            (false, false) => Layout::Legacy,
        }
    }

    /// Returns whether this host has a controller that has one name in both versions. Nothing is made.
    pub fn has(&self, controller: &str) -> bool {
        let in_v2 = |mount: &PathBuf| {
            let text = Dir::open(mount).and_then(|dir| dir.read("cgroup.controllers"));
            text.is_ok_and(|text| text.split_whitespace().any(|word| word == controller))
        };
        self.is_v1(controller) || self.v2.as_ref().is_some_and(in_v2)
    }

    /// Returns whether a controller, by its v1 name, is in a v1 hierarchy.
    pub fn is_v1(&self, controller: &str) -> bool {
        self.v1.iter().any(|(words, _)| has_word(words, controller))
    }

    /// Returns how many parent directories of the cgroup `path` are missing; [`Forest::make`] would
    /// create them.
    pub fn missing(&self, path: &str) -> Result<usize, CgroupError> {
        let parts = components(path)?;
        let above = &parts[..parts.len() - 1];
        let mut most = 0;
        for mount in self.v1.iter().map(|(_, mount)| mount).chain(&self.v2) {
            let there = (0..=above.len())
                .rev()
                .find(|n| matches!(open_path(mount, &above[..*n]), Ok(Some(_))));
            most = most.max(above.len() - there.unwrap_or(0));
        }
        Ok(most)
    }

    /// The nearest cgroup above `path` in which processes are, and below which v2 therefore runs
    /// none: one that hands controllers down has no processes of its own (cgroups(7)).
    pub fn occupied_above(&self, path: &str) -> Result<Option<String>, CgroupError> {
        let parts = components(path)?;
        let (Layout::Unified, Some(mount)) = (self.layout(), &self.v2) else { return Ok(None) };
        for n in (1..parts.len()).rev() {
            let Some(dir) = open_path(mount, &parts[..n]).map_err(CgroupError::Open)? else {
                continue;
            };
            let has = dir.read("cgroup.controllers").map_err(CgroupError::Read)?;
            // EOPNOTSUPP: it is part of a threaded one, where there are no processes to run either.
            let is_empty = dir.read("cgroup.procs").is_ok_and(|pids| pids.is_empty());
            if !is_empty && ALWAYS_V2.iter().any(|name| has.split_whitespace().any(|w| w == *name))
            {
                return Ok(Some(format!("/{}", parts[..n].join("/"))));
            }
        }
        Ok(None)
    }

    /// Makes the cgroup `path` where it is missing; `also` names controllers of v1 that have to be
    /// among its own. A cgroup that is there already is joined as it is.
    ///
    /// Errors with kind `Invalid` for a path that leads out of the hierarchies.
    pub fn make(&self, path: &str, also: &[&str]) -> Result<Tree, CgroupError> {
        let parts = components(path)?;
        let wanted = |words: &str| {
            let has = |names: &[&str]| names.iter().any(|name| has_word(words, name));
            has(&ALWAYS_V1) || has(also) || self.v2.is_none() && has_word(words, "freezer")
        };
        let mut tree = self.tree(&parts, 0);
        if let Some(mount) = &self.v2 {
            let handed: Vec<&str> = match self.layout() {
                Layout::Unified => ALWAYS_V2.to_vec(),
                // Beside v1, v2 has the remaining controllers; those are enabled only on request.
                _ => also.iter().copied().filter(|name| !self.is_v1(name)).collect(),
            };
            let (dir, made) = make_path(mount, &parts, |above, _| hand_down(above, &handed))
                .map_err(CgroupError::Make)?;
            tree.v2 = Some((mount.clone(), dir));
            tree.made = made;
        }
        for (words, mount) in self.v1.iter().filter(|(words, _)| wanted(words)) {
            let is_cpuset = has_word(words, "cpuset");
            let made = make_path(mount, &parts, |above, below| match is_cpuset {
                true => fill_cpuset(above, below),
                false => Ok(()),
            });
            match made {
                Ok((dir, made)) => {
                    tree.made = tree.made.max(made);
                    tree.v1.push((words.clone(), mount.clone(), dir));
                }
                Err(e) => {
                    // The first error is the one that counts.
                    let _ = tree.remove(Duration::ZERO);
                    return Err(CgroupError::Make(e));
                }
            }
        }
        Ok(tree)
    }

    /// Makes the cgroup of a tree in the v1 hierarchies of more controllers, and moves every process of
    /// it there, from wherever it is in them. Nothing for those that it has.
    pub fn extend(&self, tree: &mut Tree, controllers: &[&str]) -> Result<(), CgroupError> {
        let path = tree.path.clone();
        let parts = components(&path)?;
        for (words, mount) in &self.v1 {
            let is_asked = controllers.iter().any(|name| has_word(words, name));
            if !is_asked || tree.v1.iter().any(|(known, ..)| known == words) {
                continue;
            }
            let is_cpuset = has_word(words, "cpuset");
            let made = make_path(mount, &parts, |above, below| match is_cpuset {
                true => fill_cpuset(above, below),
                false => Ok(()),
            });
            let (dir, made) = made.map_err(CgroupError::Make)?;
            tree.made = tree.made.max(made);
            tree.gather(&dir)?;
            tree.v1.push((words.clone(), mount.clone(), dir));
        }
        Ok(())
    }

    fn tree(&self, parts: &[&str], made: usize) -> Tree {
        let mounts = self.v2.iter().chain(self.v1.iter().map(|(_, mount)| mount));
        let (path, mounts) = (parts.join("/"), mounts.cloned().collect());
        Tree { path, v1: Vec::new(), v2: None, made, mounts }
    }

    /// The cgroup `path` as far as it is there; `made` is how many of the directories above it are
    /// to be taken away with it ([`Tree::made`]).
    pub fn open(&self, path: &str, made: usize) -> Result<Tree, CgroupError> {
        let parts = components(path)?;
        let mut tree = self.tree(&parts, made);
        for (words, mount) in &self.v1 {
            if let Some(dir) = open_path(mount, &parts).map_err(CgroupError::Open)? {
                tree.v1.push((words.clone(), mount.clone(), dir));
            }
        }
        if let Some(mount) = &self.v2
            && let Some(dir) = open_path(mount, &parts).map_err(CgroupError::Open)?
        {
            tree.v2 = Some((mount.clone(), dir));
        }
        Ok(tree)
    }
}

fn has_word(words: &str, word: &str) -> bool {
    words.split(',').any(|w| w == word)
}

/// The parts of a path below the top of a hierarchy.
fn components(path: &str) -> Result<Vec<&str>, CgroupError> {
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    let bad = |part: &&str| *part == ".." || part.contains(['\n', '\0']) || part.len() > 255;
    if parts.is_empty() || parts.len() > DEEPEST_PATH || parts.iter().any(bad) {
        let wanted = "a path of 1 to 64 names, none of them '..'";
        return Err(dormouse_model::Invalid::new("cgroup path", path, wanted).into());
    }
    Ok(parts)
}

/// Makes a path; `each` is called with every directory and the next one below, from the top. Gives
/// the last one, and how many of those above it are new.
fn make_path(
    mount: &Path,
    parts: &[&str],
    each: impl Fn(&Dir, &Dir) -> CallResult<()>,
) -> CallResult<(Dir, usize)> {
    let mut tries = 0;
    'again: loop {
        let mut dir = Dir::open(mount)?;
        let mut made = 0;
        for (at, part) in parts.iter().enumerate() {
            let below = match dir.child(part)? {
                Some(below) => below,
                None => {
                    made += usize::from(at + 1 < parts.len());
                    match dir.child_or_make(part) {
                        // Another process has just removed the empty parent.
                        Err(e) if e.errno() == libc::ENOENT && tries < 16 => {
                            tries += 1;
                            continue 'again;
                        }
                        below => below?,
                    }
                }
            };
            each(&dir, &below)?;
            dir = below;
        }
        return Ok((dir, made));
    }
}

fn open_path(mount: &Path, parts: &[&str]) -> CallResult<Option<Dir>> {
    let mut dir = Dir::open(mount)?;
    for part in parts {
        match dir.child(part)? {
            Some(below) => dir = below,
            None => return Ok(None),
        }
    }
    Ok(Some(dir))
}

/// Enables controllers for the children of a v2 cgroup, one by one: a refused controller must not
/// prevent the others, and matters only for a request that limits it.
fn hand_down(dir: &Dir, names: &[&str]) -> CallResult<()> {
    if names.is_empty() {
        return Ok(());
    }
    let has = dir.read("cgroup.controllers")?;
    let given = dir.read("cgroup.subtree_control")?;
    let missing = |name: &&str| {
        has.split_whitespace().any(|w| w == *name) && !given.split_whitespace().any(|w| w == *name)
    };
    for name in names.iter().copied().filter(missing) {
        let _ = dir.write("cgroup.subtree_control", &format!("+{name}"));
    }
    Ok(())
}

/// One cgroup at a path.
#[derive(Debug)]
pub struct Tree {
    path: String,
    v1: Vec<(String, PathBuf, Dir)>,
    v2: Option<(PathBuf, Dir)>,
    made: usize,
    /// Mount points of all hierarchies, v2 first: an interrupted creation may have left parent
    /// directories and no cgroup.
    mounts: Vec<PathBuf>,
}

impl Tree {
    /// Its path below the top of every hierarchy.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns how many parent directories were created for it.
    pub fn made(&self) -> usize {
        self.made
    }

    /// Returns whether any of its directories exists.
    pub fn exists(&self) -> bool {
        self.v2.is_some() || !self.v1.is_empty()
    }

    fn v2_dir(&self) -> Option<&Dir> {
        self.v2.as_ref().map(|(_, dir)| dir)
    }

    fn v1_dir(&self, controller: &str) -> Option<&Dir> {
        let found = self.v1.iter().find(|(words, ..)| has_word(words, controller));
        found.map(|(.., dir)| dir)
    }

    /// Returns whether it has a directory in the v1 hierarchy of a controller.
    pub fn has_v1(&self, controller: &str) -> bool {
        self.v1_dir(controller).is_some()
    }

    /// Returns whether its v2 directory has a file.
    pub fn has_v2(&self, file: &str) -> bool {
        self.v2_dir().is_some_and(|dir| dir.has(file))
    }

    /// Returns whether its directory of a v1 controller has a file.
    pub fn has_v1_file(&self, controller: &str, file: &str) -> bool {
        self.v1_dir(controller).is_some_and(|dir| dir.has(file))
    }

    /// Writes a file of a v1 controller.
    pub fn write_v1(&self, controller: &str, file: &str, value: &str) -> CallResult<()> {
        self.known(self.v1_dir(controller), file)?.write(file, value)
    }

    /// Writes a file of the v2 directory.
    pub fn write_v2(&self, file: &str, value: &str) -> CallResult<()> {
        self.known(self.v2_dir(), file)?.write(file, value)
    }

    /// Reads a file of a v1 controller.
    pub fn read_v1(&self, controller: &str, file: &str) -> CallResult<String> {
        self.known(self.v1_dir(controller), file)?.read(file)
    }

    /// Reads a file of the v2 directory.
    pub fn read_v2(&self, file: &str) -> CallResult<String> {
        self.known(self.v2_dir(), file)?.read(file)
    }

    /// An invalid file name is treated as a missing file.
    fn known<'d>(&self, dir: Option<&'d Dir>, file: &str) -> CallResult<&'d Dir> {
        let plain = !file.is_empty() && !file.contains('/') && !file.starts_with('.');
        let missing =
            || CallError::new("openat", format!("{:?}, {file:?}", self.path), libc::ENOENT);
        dir.filter(|_| plain).ok_or_else(missing)
    }

    /// Its directories with the words that name their hierarchies; empty for v2.
    pub fn directories(&self) -> Result<Vec<(String, OwnedFd)>, CgroupError> {
        let v1 = self.v1.iter().map(|(words, _, dir)| (words.clone(), dir));
        let v2 = self.v2.iter().map(|(_, dir)| (String::new(), dir));
        v1.chain(v2).map(|(w, dir)| Ok((w, dir.copy().map_err(CgroupError::Open)?))).collect()
    }

    /// Descriptors for a new process. On v2 a cgroup that hands controllers down takes no process:
    /// where the container has made its own such, the new one goes below it.
    pub fn placement(&self) -> Result<Placement, CgroupError> {
        let mut placement = Placement::default();
        if let Some(v2) = self.v2_dir() {
            let hands_down = v2.read("cgroup.subtree_control").map_err(CgroupError::Read)?;
            let dir = match hands_down.trim().is_empty() {
                true => v2.copy(),
                false => v2.child_or_make(LATER).and_then(|later| later.copy()),
            };
            placement.v2 = Some(dir.map_err(CgroupError::Open)?);
        }
        for (.., dir) in &self.v1 {
            placement.v1_tasks.push(tasks(dir)?);
        }
        Ok(placement)
    }

    /// Descriptors for a new process in cgroups below it. `below` returns the path for the words of a
    /// hierarchy, which are empty for v2; `None` stands for the cgroup itself. A missing cgroup is
    /// [`CgroupError::Open`] with ENOENT.
    pub fn placement_below<'p>(
        &self,
        below: impl Fn(&str) -> Option<&'p str>,
    ) -> Result<Placement, CgroupError> {
        let descend = |dir: &Dir, path: &str| -> Result<Dir, CgroupError> {
            let mut dir = Dir::open(dir.path()).map_err(CgroupError::Open)?;
            for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
                let missing = || {
                    CallError::new("openat", format!("{:?}, {part:?}", dir.path()), libc::ENOENT)
                };
                let child = match part {
                    ".." => None,
                    part => dir.child(part).map_err(CgroupError::Open)?,
                };
                dir = child.ok_or_else(|| CgroupError::Open(missing()))?;
            }
            Ok(dir)
        };
        let mut placement = Placement::default();
        match (self.v2_dir(), below("")) {
            (Some(v2), Some(path)) => {
                placement.v2 = Some(descend(v2, path)?.copy().map_err(CgroupError::Open)?);
            }
            (Some(_), None) => placement.v2 = self.placement()?.v2,
            (None, _) => {}
        }
        for (words, _, dir) in &self.v1 {
            placement.v1_tasks.push(match below(words) {
                Some(path) => tasks(&descend(dir, path)?)?,
                None => tasks(dir)?,
            });
        }
        Ok(placement)
    }

    /// Returns whether it has a directory in the hierarchy of a v1 controller or of v2 (an empty
    /// word).
    pub fn has_hierarchy(&self, word: &str) -> bool {
        match word {
            "" => self.v2.is_some(),
            word => self.has_v1(word),
        }
    }

    /// Sets which devices may be used: the last rule that matches decides (the flag means that it
    /// allows); without a match the access is denied.
    ///
    /// `everything` is the verdict of a first rule about all devices, if there was one.
    pub fn set_devices(
        &self,
        rules: &[(DeviceRule, bool)],
        everything: bool,
    ) -> Result<(), CgroupError> {
        if weakened("devices") {
            return Ok(());
        }
        let set = || {
            if let Some(list) = self.v1_dir("devices") {
                list.write(if everything { "devices.allow" } else { "devices.deny" }, "a")?;
                return rules.iter().try_for_each(|(rule, allow)| {
                    let file = if *allow { "devices.allow" } else { "devices.deny" };
                    list.write(file, &rule.to_v1())
                });
            }
            self.v2_dir().map_or(Ok(()), |v2| attach_verdicts(v2, rules, everything))
        };
        set().map_err(CgroupError::Devices)
    }

    /// Freezes all processes and returns when the last one is frozen; see
    /// [`super::Cgroup::freeze`].
    pub fn freeze(&self) -> Result<(), CgroupError> {
        self.freezer().freeze(|| self.pids())
    }

    /// Thaws all processes.
    pub fn thaw(&self) -> Result<(), CgroupError> {
        self.freezer().thaw()
    }

    /// Returns whether it was frozen and not thawed since.
    pub fn is_frozen(&self) -> Result<bool, CgroupError> {
        self.freezer().is_frozen()
    }

    fn freezer(&self) -> Freezer<'_> {
        Freezer::of(self.v2_dir(), self.v1_dir("freezer"))
    }

    /// The processes in it and below, as pids of the reader's pid namespace, in no order.
    pub fn pids(&self) -> Result<Vec<u32>, CgroupError> {
        let mut pids = Vec::new();
        // v1 cgroups may be joined a moment later than v2's: v2 sees every process first.
        let first = self.v2_dir().or(self.v1.first().map(|(.., dir)| dir));
        if let Some(dir) = first {
            walk(dir, 0, &mut |dir| {
                match dir.read("cgroup.procs") {
                    Ok(text) => pids.extend(text.lines().filter_map(|l| l.parse::<u32>().ok())),
                    Err(e)
                        if matches!(e.errno(), libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => {}
                    Err(e) => return Err(e),
                }
                Ok(())
            })
            .map_err(CgroupError::Read)?;
        }
        Ok(pids)
    }

    /// Moves every process into a directory of another hierarchy. A process is born where its parent is,
    /// so the search is repeated until it finds none outside.
    fn gather(&self, dir: &Dir) -> Result<(), CgroupError> {
        // LIMIT: rounds; each finds only processes that were forked since the one before.
        for _ in 0..64 {
            let text = dir.read("cgroup.procs").map_err(CgroupError::Read)?;
            let inside: BTreeSet<u32> = text.lines().filter_map(|l| l.parse().ok()).collect();
            let outside = self.pids()?.into_iter().filter(|pid| !inside.contains(pid));
            let mut moved = false;
            for pid in outside {
                match dir.write("cgroup.procs", &pid.to_string()) {
                    Err(e) if e.errno() == libc::ESRCH => {}
                    Err(e) => return Err(CgroupError::Make(e)),
                    Ok(()) => moved = true,
                }
            }
            if !moved {
                return Ok(());
            }
        }
        Err(CgroupError::InUse { pids: self.pids()?, waited: Duration::ZERO })
    }

    /// Sends SIGKILL to every process in it and below; frozen ones, too.
    pub fn kill(&self) -> Result<(), CgroupError> {
        if let Some(v2) = self.v2_dir() {
            // KERNEL(5.14): cgroup.kill.
            match v2.write("cgroup.kill", "1") {
                Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => {}
                other => return other.map_err(CgroupError::Kill),
            }
        }
        // ORDER: as in `Cgroup::kill`.
        let _ = self.freeze();
        let killed = self.pids().and_then(|pids| pids.into_iter().try_for_each(kill_pid));
        killed.and(self.thaw())
    }

    /// Removes it from every hierarchy with everything below it, and the parent directories that
    /// were created for it, unless other cgroups are in there. No error if it was removed already;
    /// [`CgroupError::InUse`] if processes are left after `timeout`.
    pub fn remove(&self, timeout: Duration) -> Result<(), CgroupError> {
        let deadline = Instant::now() + timeout;
        let parts: Vec<&str> = self.path.split('/').collect();
        let mut first_error = None;
        // ORDER: v2 first, which contains every process.
        for mount in &self.mounts {
            if let Err(e) = self.remove_from(mount, &parts, deadline, timeout) {
                first_error.get_or_insert(e);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn remove_from(
        &self,
        mount: &Path,
        parts: &[&str],
        deadline: Instant,
        waited: Duration,
    ) -> Result<(), CgroupError> {
        let Some((name, above)) = parts.split_last() else { return Ok(()) };
        let mut pause = Duration::from_micros(50);
        while let Some(parent) = open_path(mount, above).map_err(CgroupError::Remove)? {
            match parent.remove(name) {
                Ok(_) => break,
                Err(e) if e.errno() == libc::EBUSY => {}
                Err(e) => return Err(CgroupError::Remove(e)),
            }
            if let Some(dir) = parent.child(name).map_err(CgroupError::Remove)? {
                remove_below(&dir, 0).map_err(CgroupError::Remove)?;
            }
            if Instant::now() >= deadline {
                return Err(CgroupError::InUse { pids: self.pids()?, waited });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(10));
        }
        for at in (0..above.len()).rev().take(self.made) {
            let gone = open_path(mount, &above[..at]).and_then(|dir| match dir {
                Some(dir) => retry_busy(Duration::ZERO, || dir.remove(above[at])),
                None => Ok(false),
            });
            // In use by other cgroups meanwhile.
            if gone.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Opens a file of its v2 directory, or of a v1 controller, to be watched.
    pub fn open_file(&self, controller: Option<&str>, file: &str) -> CallResult<OwnedFd> {
        let dir = controller.map_or(self.v2_dir(), |name| self.v1_dir(name));
        self.known(dir, file)?.open_file(file, OFlags::RDONLY)
    }
}
