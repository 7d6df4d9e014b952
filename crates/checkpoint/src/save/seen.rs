//! A process that was found, its properties in procfs, and those that are read on first use.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::ops::Range;

use dormouse_kernel::call::{self, Registers};
use dormouse_kernel::proc::{self, Fields};
use dormouse_kernel::{namespace, pidfd};
use dormouse_record::{Limit, Refusal, Result};
use rustix::fd::OwnedFd;

use super::restart;
use crate::inject::landing;
use crate::look::ids::Maps;
use crate::look::task::{self, Stat};
use crate::vdso;

/// A process that was found.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The pid on the host.
    pub(crate) pid: u32,
    /// The pid in the container.
    pub(crate) inner: u32,
    /// The pid of its parent in the container, 0 for the first.
    pub(crate) parent: u32,
    /// The pid of the first process on the host: paths inside are resolved from its root.
    pub(crate) first: u32,
    /// `/proc/PID/status`.
    pub(crate) fields: Fields,
    /// The process has exited and was not reaped.
    pub(crate) is_zombie: bool,
    /// Its threads by the host's ids; the first is the thread group leader.
    pub(crate) tids: Vec<u32>,
    /// The job control signal that it is stopped by.
    pub(crate) stopped: Option<i32>,
    /// One of its threads was running, or was resumed, during the stop.
    pub(crate) has_run: bool,
    /// The kernel function in which a thread waited before the stop, for threads in
    /// restart_syscall(2).
    pub(crate) waited_in: HashMap<u32, String>,
    /// The end of the wait that each thread was in, by CLOCK_MONOTONIC.
    pub(crate) sleeps_until_ns: HashMap<u32, u64>,
    /// A pidfd of the process; `None` if it has exited.
    pub(crate) pidfd: Option<OwnedFd>,
    cached: Cached,
}

/// Properties of a process that are read on first use. While it is stopped they do not change.
#[derive(Debug, Default)]
struct Cached {
    /// Where the vDSO is mapped.
    objects: OnceCell<Vec<Range<u64>>>,
    /// The ids of the first process's user namespace.
    maps: OnceCell<Maps>,
    /// The links of its namespaces, in the order of [`NAMESPACES`].
    namespaces: [OnceCell<Option<String>>; NAMESPACES.len()],
    stat: OnceCell<Option<Stat>>,
    limits: OnceCell<Vec<Limit>>,
}

/// Namespaces of a process, as procfs names them.
pub(crate) const NAMESPACES: [&str; 8] =
    ["user", "mnt", "ipc", "uts", "net", "cgroup", "time", "time_for_children"];

/// The link of a namespace of a container's first process, which is not in the tree if it is the
/// house's init.
pub(crate) fn link_of_first(pid: u32, tree: &[Seen], name: &str) -> Option<String> {
    match tree.iter().find(|seen| seen.pid == pid) {
        Some(seen) => seen.link(name).map(str::to_owned),
        None => namespace::link(pid, pid, name),
    }
}

impl Seen {
    /// Whether the process has exited by now, or is exiting: a process that releases its resources
    /// shows other values, such as no control group.
    pub(crate) fn has_ended(&self) -> bool {
        let ends = |tid: &u32| proc::status(*tid).map_or(true, |status| status.is_exiting);
        !self.pidfd.as_ref().is_some_and(pidfd::is_alive) || self.tids.iter().all(ends)
    }

    /// Whether a stopped thread with these registers is inside a function of the vDSO, or in code behind it.
    pub(super) fn is_inside_object(&self, registers: &Registers) -> bool {
        // No function there blocks, and the code behind them waits for nothing.
        let waits = restart::waits_by(registers) && !landing::may_be_inside(registers);
        let objects = || self.cached.objects.get_or_init(|| vdso::all_of_process(self.pid));
        !waits && objects().iter().any(|o| o.contains(&registers.rip))
    }

    /// The id maps of the container's own user namespace, even if the process is in another.
    pub(crate) fn maps(&self) -> &Maps {
        self.cached.maps.get_or_init(|| Maps::read(self.first))
    }

    /// The link of one of its [`NAMESPACES`]; `None` if it has exited.
    pub(crate) fn link(&self, name: &str) -> Option<&str> {
        let place = NAMESPACES.iter().position(|one| *one == name)?;
        let link = &self.cached.namespaces[place];
        link.get_or_init(|| namespace::link(self.pid, self.pid, name)).as_deref()
    }

    /// Its stat; `None` if it has exited.
    pub(crate) fn stat(&self) -> Option<&Stat> {
        self.cached.stat.get_or_init(|| task::stat(self.pid, self.pid)).as_ref()
    }

    /// Its limits.
    pub(crate) fn limits(&self) -> Result<&[Limit]> {
        if let Some(known) = self.cached.limits.get() {
            return Ok(known);
        }
        let read = task::limits(self.pid)?;
        Ok(self.cached.limits.get_or_init(|| read))
    }

    /// A pidfd of a thread that has descriptors apart from the process (unshare(2) of CLONE_FILES); `None` for
    /// other threads, and, KERNEL(6.9), before that.
    pub(super) fn own_table(&self, tid: u32) -> Option<OwnedFd> {
        let shares = || call::is_shared(call::Shared::Descriptors, self.pid, tid);
        let is_apart = tid != self.pid && shares() == Ok(false);
        if is_apart { pidfd::open_thread(tid).ok() } else { None }
    }

    /// The name that `ps` shows.
    pub(crate) fn name(&self) -> String {
        self.fields.field("Name").unwrap_or_default().to_owned()
    }

    /// The innermost value of a field of status that has one value per pid namespace.
    pub(crate) fn innermost(&self, field: &str) -> Option<u32> {
        self.fields.field(field)?.split_ascii_whitespace().next_back()?.parse().ok()
    }

    /// A refusal of some state of this process.
    pub(crate) fn refuse(&self, what: impl Into<String>, why: impl Into<String>) -> Refusal {
        Refusal { pid: self.inner, process: self.name(), what: what.into(), why: why.into() }
    }
}

/// The process with a pid; `None` if it has exited. Paths inside are resolved from the root of `first`.
pub(super) fn look_at(pid: u32, parent: u32, first: u32) -> Result<Option<Seen>> {
    let Ok(fields) = proc::fields(pid) else { return Ok(None) };
    let Some(inner) = fields.pids().last().copied() else { return Ok(None) };
    let is_zombie = fields.field("State").is_some_and(|s| s.starts_with(['Z', 'X']));
    let mut tids = vec![pid];
    for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let tid: Option<u32> = entry.file_name().to_str().and_then(|name| name.parse().ok());
        tids.extend(tid.filter(|tid| *tid != pid));
    }
    let pidfd = if is_zombie { None } else { pidfd::open(pid).ok() };
    Ok(Some(Seen {
        pid,
        inner,
        parent,
        first,
        fields,
        is_zombie,
        tids,
        stopped: None,
        has_run: false,
        waited_in: HashMap::new(),
        sleeps_until_ns: HashMap::new(),
        pidfd,
        cached: Cached::default(),
    }))
}
