//! Freezing, killing, waiting for the end, removing, handing over.
//!
//! Operations address a cgroup, not a pid, if the kernel can (v2: `cgroup.freeze`, KERNEL(5.2);
//! `cgroup.kill`, KERNEL(5.14)). Otherwise a pid is signalled only while its process is frozen: a
//! frozen process cannot exit, so the pid cannot be another process's by then.

use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::dir::Dir;
use super::error::CgroupError;
use super::freezer::Freezer;
use super::wait::wait_event;
use super::{Cgroup, Controllers};
use crate::error::{Explain, Result as CallResult};

/// Longest wait of [`Cgroup::remove`] for the last process to exit.
pub(super) const REMOVE_WITHIN: Duration = Duration::from_secs(5);
/// LIMIT: cgroups that a container may make below its own once it owns it. Each costs the host
/// kernel memory that the container's limit does not fully cover.
const MOST_DESCENDANTS: &str = "4096";
/// LIMIT: how deep. Every charge walks up.
const MOST_DEPTH: &str = "32";
/// Nesting that removal follows; deeper trees are not made by containers of ours.
const DEEPEST: usize = 128;

impl Cgroup {
    /// Freezes all processes and returns when the last one is frozen.
    ///
    /// Errors with [`CgroupError::StillRunning`] (kind `Busy`) after 10 s, all thawed again.
    pub fn freeze(&self) -> Result<(), CgroupError> {
        self.freezer().freeze(|| self.pids())
    }

    /// Thaws all processes. No error if they are not frozen.
    pub fn thaw(&self) -> Result<(), CgroupError> {
        self.freezer().thaw()
    }

    /// Returns whether it was frozen and not thawed since; processes may still be freezing.
    pub fn is_frozen(&self) -> Result<bool, CgroupError> {
        self.freezer().is_frozen()
    }

    fn freezer(&self) -> Freezer<'_> {
        Freezer::of(self.v2.as_ref(), self.in_v1(Controllers::FREEZER))
    }

    /// Sends SIGKILL to every process in it and below, also to those that are being forked, and to
    /// frozen ones. Does not wait for their end: see [`wait_empty`](Self::wait_empty).
    pub fn kill(&self) -> Result<(), CgroupError> {
        if let Some(v2) = &self.v2 {
            // KERNEL(5.14): cgroup.kill. A frozen v2 cgroup lets its processes die.
            match v2.write("cgroup.kill", "1") {
                Err(e) if e.errno() == libc::ENOENT => {}
                other => return other.map_err(CgroupError::Kill),
            }
        }
        // ORDER: freeze, so that no process forks and no pid is released and reused between reading
        // and signalling it; then signal; then thaw, because a v1-frozen process does not die.
        let frozen = self.freeze();
        let killed = self.pids().and_then(|pids| pids.into_iter().try_for_each(kill_pid));
        let thawed = self.thaw();
        if frozen.is_err() && killed.is_ok() && thawed.is_ok() {
            // Some would not freeze and may have forked meanwhile: again, until none is left.
            return self.kill_running();
        }
        killed.and(thawed)
    }

    /// Returns whether the kernel kills all of a cgroup in one call. KERNEL(5.14), on v2.
    pub fn kills_at_once(&self) -> bool {
        self.v2.as_ref().is_some_and(|v2| v2.has("cgroup.kill"))
    }

    fn kill_running(&self) -> Result<(), CgroupError> {
        let deadline = Instant::now() + REMOVE_WITHIN;
        loop {
            let pids = self.pids()?;
            if pids.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(CgroupError::InUse { pids, waited: REMOVE_WITHIN });
            }
            pids.into_iter().try_for_each(kill_pid)?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the processes in it and below, as pids of the reader's pid namespace, unordered. A
    /// process with threads in different cgroups counts once.
    pub fn pids(&self) -> Result<Vec<u32>, CgroupError> {
        let mut pids = Vec::new();
        // v1 cgroups may be joined a moment later than v2's: v2 sees every process first.
        if let Some(dir) = self.v2.as_ref().or(self.v1.first().map(|(_, dir)| dir)) {
            walk(dir, 0, &mut |dir| {
                match dir.read("cgroup.procs") {
                    Ok(text) => pids.extend(text.lines().filter_map(|l| l.parse::<u32>().ok())),
                    // Removed meanwhile; or a threaded cgroup, whose processes are listed further
                    // up.
                    Err(e)
                        if matches!(e.errno(), libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => {}
                    Err(e) => return Err(e),
                }
                Ok(())
            })
            .map_err(CgroupError::Read)?;
        }
        // 0 is a process of a pid namespace that the reader does not see.
        pids.retain(|pid| *pid != 0);
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Waits until no process is in it or below; `false` when `timeout` has passed before.
    pub fn wait_empty(&self, timeout: Duration) -> Result<bool, CgroupError> {
        let deadline = Instant::now() + timeout;
        if let Some(v2) = &self.v2 {
            return wait_event(v2, "populated", 0, deadline).map_err(CgroupError::Read);
        }
        // Without a release agent v1 sends no event: poll at growing intervals.
        let mut pause = Duration::from_micros(100);
        while !self.pids()?.is_empty() {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(true)
    }

    /// Removes it from every hierarchy, with the cgroups that the container has created below. No
    /// error if it was removed already.
    ///
    /// Waits up to 5 s for processes that are just ending. Errors with [`CgroupError::InUse`]
    /// (kind `Busy`) if some are left.
    ///
    /// Page cache that it was charged for keeps its memory cgroup alive in the kernel, unseen,
    /// until that is reclaimed: the files of an image that it was the first to read. On v1
    /// `memory.force_empty` would do it at once, but takes 4 to 6 ms (the rest takes 0.04) and
    /// drops these files, which the next container reads again. So it is not used here, but by the engine while memory
    /// is guaranteed on v1.
    pub fn remove(&self) -> Result<(), CgroupError> {
        self.remove_within(REMOVE_WITHIN)
    }

    /// [`remove`](Self::remove) that waits so long at most.
    pub fn remove_within(&self, timeout: Duration) -> Result<(), CgroupError> {
        let deadline = Instant::now() + timeout;
        // ORDER: v2 first. It contains every process and reports when the last has exited, so that
        // nothing at all is removed of a cgroup in use.
        if let Some(v2) = &self.hierarchy.0.v2 {
            self.remove_from(&v2.parent, deadline, timeout)?;
        }
        let mut first_error = None;
        for parent in self.hierarchy.0.v1.iter().filter_map(|v1| v1.parent.get()) {
            if let Err(e) = self.remove_from(parent, deadline, timeout) {
                first_error.get_or_insert(e);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn remove_from(
        &self,
        parent: &Dir,
        deadline: Instant,
        waited: Duration,
    ) -> Result<(), CgroupError> {
        let mut pause = Duration::from_micros(50);
        loop {
            match parent.remove(&self.name) {
                Ok(_) => return Ok(()),
                Err(e) if e.errno() == libc::EBUSY => {}
                Err(e) => return Err(CgroupError::Remove(e)),
            }
            // Either cgroups below, or processes that are ending.
            let Some(dir) = parent.child(&self.name).map_err(CgroupError::Remove)? else {
                continue;
            };
            remove_below(&dir, 0).map_err(CgroupError::Remove)?;
            if Instant::now() >= deadline {
                return Err(CgroupError::InUse { pids: self.pids()?, waited });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    /// Takes back a half-made cgroup: the directories that it has, and no others by its name.
    pub(super) fn unmake(&self) {
        let remove = |parent: &Dir| {
            // The first error is the one that counts; whatever remains is found by `find`.
            let _ = parent.remove(&self.name);
        };
        for (controllers, _) in &self.v1 {
            let all = self.hierarchy.0.v1.iter();
            let own = all.filter(|v1| v1.controllers == *controllers);
            own.filter_map(|v1| v1.parent.get()).for_each(remove);
        }
        if let (Some(_), Some(v2)) = (&self.v2, &self.hierarchy.0.v2) {
            remove(&v2.parent);
        }
    }

    /// Delegates its v2 cgroup to a user (the container's root, as the host sees it). That user may
    /// then create cgroups below and move its processes among them, as systemd inside does
    /// (cgroups(7), "Delegation"). The limits stay the host's.
    ///
    /// Errors with kind `Unsupported` without v2: v1 controllers cannot be handed to a user safely.
    pub fn delegate(&self, uid: u32, gid: u32) -> Result<(), CgroupError> {
        let Some(v2) = &self.v2 else {
            return Err(CgroupError::Missing {
                limit: "a cgroup tree of the container's own",
                why: "it needs the cgroup v2 file system".into(),
                since: "4.5",
            });
        };
        let hand_over = || {
            v2.write("cgroup.max.descendants", MOST_DESCENDANTS)?;
            v2.write("cgroup.max.depth", MOST_DEPTH)?;
            for file in ["cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "."] {
                v2.chown(file, uid, gid)?;
            }
            Ok(())
        };
        hand_over().map_err(CgroupError::Delegate)
    }
}

pub(super) fn kill_pid(pid: u32) -> Result<(), CgroupError> {
    let Some(process) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) else {
        return Ok(());
    };
    match rustix::process::kill_process(process, rustix::process::Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(e) => Err(e).explain("kill", || format!("{pid}, SIGKILL")).map_err(CgroupError::Kill),
    }
}

/// Calls `visit` for a cgroup and everything below it.
pub(super) fn walk(
    dir: &Dir,
    depth: usize,
    visit: &mut impl FnMut(&Dir) -> CallResult<()>,
) -> CallResult<()> {
    visit(dir)?;
    if depth == DEEPEST {
        return Ok(());
    }
    for name in names_unless_gone(dir)? {
        if let Some(child) = dir.child(&name)? {
            walk(&child, depth + 1, visit)?;
        }
    }
    Ok(())
}

/// Removes what is below a cgroup, from the bottom; what is busy stays.
pub(super) fn remove_below(dir: &Dir, depth: usize) -> CallResult<()> {
    for name in names_unless_gone(dir)? {
        if depth < DEEPEST
            && let Some(child) = dir.child(&name)?
        {
            remove_below(&child, depth + 1)?;
        }
        match dir.remove(&name) {
            Err(e) if e.errno() != libc::EBUSY => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn names_unless_gone(dir: &Dir) -> CallResult<Vec<String>> {
    match dir.names() {
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(Vec::new()),
        other => other,
    }
}
