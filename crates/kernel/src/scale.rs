//! Limits of the host that so many awake containers would reach, found before they do.
//!
//! A row is one limit: the host's value, the need of so many containers, and the setting to change.
//! The needs are those of containers of a few processes: three tasks each, a namespace of every
//! kind, one inotify instance, three superblocks. A limit that only some programs meet (a terminal
//! each, asynchronous I/O) is reported but does not count. Asleep containers need next to nothing
//! of all this: their descriptors are parked and their namespaces removed.
//!
//! [`bounds`] is the other question: which limits of the host do a few containers reach that take all
//! that their own limits permit? [`crate::raise`] raises both.
//!
//! KERNEL(6.18): numbers without a file are constants of the kernel. Memory is measured (`bench
//! density`) and, for the arrays of shrinkers, known from mm/shrinker.c: every memory cgroup has 16
//! bytes for every superblock of the machine.

use std::path::Path;

use crate::proc;

/// Tasks of a container.
const TASKS: u64 = 3;
/// Files of a container that are open.
const FILES: u64 = 64;
/// Superblocks of a container: its overlay, procfs, mqueue.
const SUPERBLOCKS: u64 = 3;
/// Kernel and own memory of a container of one small process.
const MEMORY_BYTES: u64 = 160 << 10;
/// Bytes of each memory cgroup for each superblock.
const SHRINKER_BYTES: u64 = 16;
/// The host's own need of any resource.
const HOST: u64 = 4096;

/// The verdict on one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// There is.
    Enough,
    /// So many containers cannot run.
    Short,
    /// The containers can run, unless their programs use the resource.
    Perhaps,
}

/// One limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// The limited resource.
    pub name: &'static str,
    /// The host's value; `None` if there is no such limit.
    pub have: Option<u64>,
    /// The need of so many containers.
    pub need: u64,
    /// The verdict.
    pub verdict: Verdict,
    /// For what.
    pub what_for: &'static str,
    /// The setting that raises the limit.
    pub set: String,
    /// The value of that setting, if it is a parameter of the kernel (sysctl(8)) named as the limit.
    pub raise: Option<u64>,
    /// How much is in use now, if the kernel counts that.
    pub used: Option<u64>,
}

impl Limit {
    /// A limit whose values come from the caller.
    pub fn new(
        name: &'static str,
        have: Option<u64>,
        need: u64,
        what_for: &'static str,
        set: String,
    ) -> Self {
        let verdict = match have {
            Some(have) if have < need => Verdict::Short,
            _ => Verdict::Enough,
        };
        Self { name, have, need, verdict, what_for, set, raise: None, used: None }
    }

    /// A limit that is a parameter of the kernel.
    fn parameter(name: &'static str, have: Option<u64>, need: u64, what_for: &'static str) -> Self {
        let most = if name == "kernel.pid_max" { PID_MAX } else { u64::MAX };
        let raise = need.checked_next_power_of_two().unwrap_or(u64::MAX).min(most);
        let set = format!("sysctl {name}={raise}");
        Self { raise: Some(raise), ..Self::new(name, have, need, what_for, set) }
    }

    /// The same for a resource that only some programs use.
    fn perhaps(self) -> Self {
        match self.verdict {
            Verdict::Short => Self { verdict: Verdict::Perhaps, ..self },
            _ => self,
        }
    }
}

/// A file below `/proc/sys`, what one container needs of it, and for what.
struct Parameter {
    name: &'static str,
    each: u64,
    more: u64,
    is_sure: bool,
    what_for: &'static str,
}

const fn sure(name: &'static str, each: u64, more: u64, what_for: &'static str) -> Parameter {
    Parameter { name, each, more, is_sure: true, what_for }
}

const fn perhaps(name: &'static str, each: u64, more: u64, what_for: &'static str) -> Parameter {
    Parameter { is_sure: false, ..sure(name, each, more, what_for) }
}

const PARAMETERS: &[Parameter] = &[
    sure("kernel.pid_max", TASKS, HOST, "processes and threads"),
    sure("kernel.threads-max", TASKS, HOST, "processes and threads"),
    sure("fs.file-max", FILES, HOST, "open files"),
    sure("user.max_user_namespaces", 1, 64, "a user namespace each"),
    sure("user.max_pid_namespaces", 1, 64, "a pid namespace each"),
    sure("user.max_mnt_namespaces", 1, 64, "a mount namespace each"),
    sure("user.max_ipc_namespaces", 1, 64, "an ipc namespace each"),
    sure("user.max_uts_namespaces", 1, 64, "a uts namespace each"),
    sure("user.max_cgroup_namespaces", 1, 64, "a cgroup namespace each"),
    perhaps("user.max_net_namespaces", 1, 64, "a network namespace each with --net none"),
    perhaps("fs.inotify.max_user_instances", 1, 128, "an inotify instance each (tail -f, systemd)"),
    perhaps("fs.inotify.max_user_watches", 8, 8192, "watched files and directories"),
    sure("fs.epoll.max_user_watches", 2, HOST, "sockets of sleepers, which the keeper watches"),
    perhaps("fs.aio-max-nr", 1024, 0, "asynchronous I/O (databases)"),
    perhaps("kernel.pty.max", 1, 1024, "a terminal each"),
    // Each has ids, and so a quota, of its own.
    sure("kernel.keys.maxkeys", 0, 16, "keys of one container"),
    sure("kernel.keys.root_maxkeys", 0, 1024, "keys of ours"),
    // Per mount namespace: of one container, or of the engine.
    sure("fs.mount-max", 0, HOST, "mounts of one container"),
    perhaps("vm.max_map_count", 0, 65_530, "mappings of one process"),
    perhaps("net.core.somaxconn", 0, 128, "callers that wait for one that sleeps"),
    perhaps("net.netfilter.nf_conntrack_max", 4, HOST, "connections to published ports"),
    // The kernel finds containers by a route, not by neighbours; those are the domains.
    sure("net.ipv4.neigh.default.gc_thresh3", 0, 128, "neighbours: domains, not containers"),
];

/// All limits that so many awake containers have to do with.
pub fn limits(containers: u64) -> Vec<Limit> {
    let read = |name: &str| number(&Path::new("/proc/sys").join(name.replace('.', "/")));
    let mut all = of_parameters(containers, read);
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let terminals = "terminals and standard inputs that the keeper holds";
    let set =
        |need| format!("ulimit -Hn {need}, or LimitNOFILE={need} where the first one is started");
    let need = containers + 1024;
    all.push(Limit::new("RLIMIT_NOFILE", descriptors, need, terminals, set(need)).perhaps());
    let superblocks = containers.saturating_mul(SUPERBLOCKS) + HOST;
    let fewer = || "nothing raises it: let more of them sleep".to_owned();
    let what_for = "device numbers of file systems, three each";
    all.push(Limit::new("superblocks", Some(1 << 20), superblocks, what_for, fewer()));
    let need = containers + 64;
    all.push(Limit::new("memory cgroups", Some(65_535), need, "one each", fewer()));
    let need = memory_bytes(containers);
    let available = available_bytes();
    let what_for = "bytes for small processes, and what the kernel has of each of them";
    let set = format!("{} MiB more memory, or let more of them sleep", need >> 20);
    all.push(Limit::new("available memory", available, need, what_for, set));
    all
}

fn of_parameters(containers: u64, read: impl Fn(&str) -> Option<u64>) -> Vec<Limit> {
    let limit = |p: &Parameter| {
        let need = containers.saturating_mul(p.each).saturating_add(p.more);
        let limit = Limit::parameter(p.name, read(p.name), need, p.what_for);
        if p.is_sure { limit } else { limit.perhaps() }
    };
    PARAMETERS.iter().map(limit).collect()
}

/// Containers that take all that their own limits permit, and for which a host is to suffice.
pub const FULL: u64 = 16;

/// LIMIT: the most that the kernel takes for `kernel.pid_max` on 64 bits (PID_MAX_LIMIT).
const PID_MAX: u64 = 4_194_304;

/// The parameters beside those of tasks, what a few containers need of each, and for what.
const BOUNDS: &[(&str, u64, &str)] = &[
    ("fs.aio-max-nr", 1 << 20, "asynchronous I/O of the whole host: one container can take 65536"),
    ("kernel.pty.max", FULL * 64 + 1024, "64 terminals in each of 16 containers"),
    // The host's limit of the user that owns a container's user namespace (docs/bounds.md).
    ("fs.inotify.max_user_instances", 128, "inotify instances of one container"),
    ("fs.inotify.max_user_watches", 65_536, "inotify watches of one container"),
    ("user.max_user_namespaces", 256 + 64, "user namespaces of one container"),
    ("user.max_pid_namespaces", 256 + 64, "pid namespaces of one container"),
    ("user.max_net_namespaces", 256 + 64, "network namespaces of one container"),
    ("user.max_ipc_namespaces", 256 + 64, "ipc namespaces of one container"),
    ("user.max_uts_namespaces", 256 + 64, "uts namespaces of one container"),
    ("user.max_time_namespaces", 256 + 64, "time namespaces of one container"),
    ("user.max_cgroup_namespaces", 256 + 64, "cgroup namespaces of one container"),
    ("user.max_mnt_namespaces", 1024 + 64, "mount namespaces of one container"),
];

/// The limits of the host that [`FULL`] containers reach, or one of them, if they take all that their own limits
/// permit.
/// `tasks` is the most tasks of a container.
pub fn bounds(tasks: u64) -> Vec<Limit> {
    bounds_with(tasks, |name| number(&Path::new("/proc/sys").join(name.replace('.', "/"))))
}

fn bounds_with(tasks: u64, read: impl Fn(&str) -> Option<u64>) -> Vec<Limit> {
    let need = tasks.saturating_mul(FULL).saturating_add(HOST);
    let what_for = "tasks of 16 containers without --pids";
    let of_tasks = ["kernel.pid_max", "kernel.threads-max"];
    let tasks = of_tasks.map(|name| Limit::parameter(name, read(name), need, what_for));
    let others = BOUNDS.iter().map(|(name, need, what_for)| {
        let used = if *name == "fs.aio-max-nr" { read("fs.aio-nr") } else { None };
        Limit { used, ..Limit::parameter(name, read(name), *need, what_for) }
    });
    tasks.into_iter().chain(others).collect()
}

fn memory_bytes(containers: u64) -> u64 {
    let shrinkers = containers.saturating_mul(SUPERBLOCKS).saturating_mul(SHRINKER_BYTES);
    containers.saturating_mul(MEMORY_BYTES.saturating_add(shrinkers))
}

/// The one number of a file. A negative one is no limit.
fn number(path: &Path) -> Option<u64> {
    proc::read_text(path, 4096).ok()?.trim().parse().ok()
}

/// `MemAvailable` of proc_meminfo(5): memory that can be used without swapping.
pub fn available_bytes() -> Option<u64> {
    let text = proc::read_text("/proc/meminfo", 64 << 10).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_below_the_need_is_reported_short() {
        let all = of_parameters(10_000, |name| match name {
            "kernel.pid_max" => Some(32_768),
            "kernel.pty.max" => Some(4096),
            "kernel.keys.maxkeys" => Some(200),
            _ => None,
        });
        let of = |name: &str| all.iter().find(|limit| limit.name == name).unwrap();
        let pids = of("kernel.pid_max");
        assert_eq!((pids.verdict, pids.need), (Verdict::Short, 34_096));
        assert_eq!(pids.set, "sysctl kernel.pid_max=65536");
        assert_eq!(of("kernel.pty.max").verdict, Verdict::Perhaps, "not all have a terminal");
        assert_eq!(of("kernel.keys.maxkeys").verdict, Verdict::Enough);
        let none = of("kernel.threads-max");
        assert_eq!((none.have, none.verdict), (None, Verdict::Enough), "no such file, no limit");
    }

    #[test]
    fn tasks_of_sixteen_containers_are_compared_with_the_pids_of_the_host() {
        let host = |name: &str| match name {
            "kernel.pid_max" => Some(32_768),
            "kernel.threads-max" => Some(100_000),
            "fs.aio-max-nr" => Some(65_536),
            "fs.aio-nr" => Some(7),
            _ => None,
        };
        let all = bounds_with(2048, host);
        let of = |all: &[Limit], name| all.iter().find(|it| it.name == name).cloned().unwrap();
        let pids = of(&all, "kernel.pid_max");
        assert_eq!((pids.verdict, pids.need, pids.raise), (Verdict::Short, 36_864, Some(65_536)));
        assert_eq!(pids.set, "sysctl kernel.pid_max=65536");
        assert_eq!(of(&all, "kernel.threads-max").verdict, Verdict::Enough);
        let aio = of(&all, "fs.aio-max-nr");
        assert_eq!((aio.verdict, aio.used, aio.raise), (Verdict::Short, Some(7), Some(1 << 20)));
        assert_eq!(of(&all, "kernel.pty.max").verdict, Verdict::Enough, "no such file, no limit");
        assert_eq!(of(&bounds_with(1024, host), "kernel.pid_max").verdict, Verdict::Enough);
        let most = of(&bounds_with(4_194_304, host), "kernel.pid_max");
        assert_eq!((most.verdict, most.raise), (Verdict::Short, Some(4_194_304)));
    }

    #[test]
    fn memory_grows_with_the_square_of_containers() {
        assert_eq!(memory_bytes(1), MEMORY_BYTES + 48);
        assert!(memory_bytes(10_000) > 6_000_000_000);
        assert_eq!(memory_bytes(u64::MAX), u64::MAX);
    }

    #[test]
    fn every_limit_of_this_host_is_read() {
        let all = limits(1);
        for name in ["kernel.pid_max", "user.max_user_namespaces", "available memory"] {
            let limit = all.iter().find(|limit| limit.name == name).unwrap();
            assert!(limit.have.is_some_and(|have| have > 0), "{limit:?}");
            assert!(!limit.set.is_empty());
        }
    }
}
