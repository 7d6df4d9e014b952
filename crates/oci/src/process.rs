//! Plans the last steps of a process: its identity, its confinement and its program.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::capability::{self, Set};
use dormouse_kernel::{rlimit, weakened};
use dormouse_launch::flat::AFFINITY_WORDS;
use dormouse_launch::{CapabilityMasks, Exec, FdIndex, Ids as ProcessIds, Plan, Terminal};
use rustix::fs::FileType;

use crate::error::{Error, Result};
use crate::filter::Compiled;
use crate::hook::{self, Inside};
use crate::identity::Ids;
use crate::spec::{Capabilities, IoPriority, MemoryPolicy, Personality, Process, Scheduler};

/// Standard streams of a process.
pub(crate) enum Io {
    /// A private terminal.
    Terminal,
    /// Three descriptors.
    Fds([OwnedFd; 3]),
}

/// Duplicates this process's standard streams and gives them to the user of the container: programs
/// open `/dev/stdout` again.
pub(crate) fn own_streams(ids: &Ids, uid: u32) -> Result<[OwnedFd; 3]> {
    let copy = |fd: std::os::fd::BorrowedFd<'_>| -> Result<OwnedFd> {
        let fd = match rustix::io::fcntl_dupfd_cloexec(fd, 3) {
            // A closed stream is replaced by `/dev/null`.
            Err(rustix::io::Errno::BADF) => {
                let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
                rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())
            }
            other => other,
        };
        let fd = fd.map_err(|e| Error::file("use", "a standard stream")(e.into()))?;
        let stat = rustix::fs::fstat(&fd);
        let is_device = stat.as_ref().is_ok_and(|s| {
            // A terminal keeps its owner, and so does `/dev/null`.
            FileType::from_raw_mode(s.st_mode) == FileType::CharacterDevice
        });
        if let (Some(host), Ok(stat), false) = (ids.host_uid(uid), stat, is_device)
            && stat.st_uid != host
        {
            // On a read-only or network filesystem this may fail; the owner stays.
            let _ = rustix::fs::fchown(&fd, Some(rustix::fs::Uid::from_raw(host)), None);
        }
        Ok(fd)
    };
    let [input, output, error] =
        [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    Ok([copy(input.as_fd())?, copy(output.as_fd())?, copy(error.as_fd())?])
}

/// Plans session, streams and limits: the steps before the container waits to be started.
pub(crate) fn plan_before(plan: &mut Plan, process: &Process, io: Io) -> Result<()> {
    plan.setsid();
    match io {
        Io::Terminal => {
            let size = process.console_size.map_or((0, 0), |s| (s.height, s.width));
            let uid = process.user.uid;
            plan.terminal(&Terminal { uid, size, console: true, ..Terminal::default() });
        }
        Io::Fds([input, output, error]) => {
            let fds = [plan.fd(input), plan.fd(output), plan.fd(error)];
            plan.stdio(fds);
        }
    }
    let mut seen = Vec::new();
    for (at, limit) in process.rlimits.iter().enumerate() {
        let field = |name: &str| format!("process.rlimits[{at}].{name}");
        let known = rlimit::resource(&limit.kind).filter(|_| limit.kind.starts_with("RLIMIT_"));
        let resource = known.ok_or_else(|| {
            Error::field(field("type"), format!("there is no limit {:?}", limit.kind))
        })?;
        if seen.contains(&resource) {
            return Err(Error::field(field("type"), "it is listed twice"));
        }
        if limit.soft > limit.hard {
            return Err(Error::field(field("soft"), "it is more than the hard limit"));
        }
        seen.push(resource);
        plan.rlimit(resource, limit.soft, limit.hard, false);
    }
    if let Some(scheduler) = &process.scheduler {
        plan.scheduler(&scheduler_attributes(scheduler)?);
    }
    if let Some(priority) = &process.io_priority {
        plan.io_priority(io_priority(priority)?);
    }
    plan.umask(process.user.umask.unwrap_or(0o022));
    Ok(())
}

/// A list such as `0-3,7` as a mask, a bit each; `None` where it is no such list.
fn mask(list: &str) -> Option<Vec<u64>> {
    let mut words = Vec::new();
    for part in list.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number =
            |text: &str| text.trim().parse::<usize>().ok().filter(|n| *n < AFFINITY_WORDS * 64);
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        for bit in first..=last {
            words.resize(words.len().max(bit / 64 + 1), 0);
            words[bit / 64] |= 1 << (bit % 64);
        }
    }
    Some(words)
}

/// `execCPUAffinity`: the CPUs before the process is in the container's cgroup, and those after.
#[derive(Debug, Default)]
pub(crate) struct Affinity {
    pub(crate) initial: Option<Vec<u64>>,
    last: Option<Vec<u64>>,
}

impl Affinity {
    pub(crate) fn of(process: &Process) -> Result<Self> {
        let Some(given) = &process.exec_cpu_affinity else { return Ok(Self::default()) };
        let read = |name: &str, list: &str| match list {
            "" => Ok(None),
            list => mask(list).map(Some).ok_or_else(|| {
                let why = format!("{list:?} is no list of CPUs such as 0-3,7");
                Error::field(format!("process.execCPUAffinity.{name}"), why)
            }),
        };
        Ok(Self { initial: read("initial", &given.initial)?, last: read("final", &given.last)? })
    }

    /// In the cgroup: the caller's own affinity is not the container's.
    pub(crate) fn plan(&self, plan: &mut Plan) {
        match (&self.last, &self.initial) {
            (Some(last), _) => plan.affinity(Some(last)),
            (None, Some(_)) => {}
            (None, None) => plan.affinity(None),
        }
    }
}

/// `linux.memoryPolicy`: mode and nodes of set_mempolicy(2).
pub(crate) fn memory_policy(given: &MemoryPolicy) -> Result<(u32, Vec<u64>)> {
    const MODES: [(&str, u32); 7] = [
        ("MPOL_DEFAULT", 0),
        ("MPOL_PREFERRED", 1),
        ("MPOL_BIND", 2),
        ("MPOL_INTERLEAVE", 3),
        ("MPOL_LOCAL", 4),
        ("MPOL_PREFERRED_MANY", 5),
        ("MPOL_WEIGHTED_INTERLEAVE", 6),
    ];
    const FLAGS: [(&str, u32); 3] = [
        ("MPOL_F_NUMA_BALANCING", 1 << 13),
        ("MPOL_F_RELATIVE_NODES", 1 << 14),
        ("MPOL_F_STATIC_NODES", 1 << 15),
    ];
    let field = |name: &str, why: String| Error::field(format!("linux.memoryPolicy.{name}"), why);
    let known = MODES.iter().find(|(name, _)| *name == given.mode);
    let (_, mut mode) = *known
        .ok_or_else(|| field("mode", format!("invalid memory policy mode {:?}", given.mode)))?;
    let is_local = matches!(given.mode.as_str(), "MPOL_DEFAULT" | "MPOL_LOCAL");
    for (at, flag) in given.flags.iter().enumerate() {
        let known = FLAGS.iter().find(|(name, _)| name == flag);
        let why = || field(&format!("flags[{at}]"), format!("invalid memory policy flag {flag:?}"));
        mode |= known.ok_or_else(why)?.1;
    }
    let nodes = match given.nodes.as_str() {
        "" => Vec::new(),
        list => mask(list)
            .ok_or_else(|| field("nodes", format!("invalid memory policy nodes {list:?}")))?,
    };
    let count: u32 = nodes.iter().map(|word| word.count_ones()).sum();
    if is_local && count != 0 {
        return Err(field("nodes", format!("the mode requires 0 nodes but got {count}")));
    }
    Ok((mode, nodes))
}

/// Everything after the container was started, up to execve.
pub(crate) struct Last<'l> {
    pub(crate) process: &'l Process,
    pub(crate) program: &'l Exec,
    pub(crate) filter: Option<&'l Compiled>,
    pub(crate) listener: Option<FdIndex>,
    pub(crate) preserve: Vec<OwnedFd>,
    pub(crate) personality: Option<&'l Personality>,
    /// `startContainer` hooks.
    pub(crate) hooks: Option<Inside<'l>>,
}

impl Last<'_> {
    pub(crate) fn plan(self, plan: &mut Plan) -> Result<()> {
        let process = self.process;
        let mut hooks = self.hooks.filter(|inside| !inside.hooks.is_empty());
        if let Some(hooks) = hooks.take_if(|_| weakened("hook-confinement")) {
            hook::plan(plan, &hooks, None)?;
        }
        if let Some(personality) = self.personality {
            plan.personality(persona(personality)?);
        }
        for (what, label) in
            [("apparmor", &process.apparmor_profile), ("selinux", &process.selinux_label)]
        {
            let Some(label) = label.as_deref().filter(|l| !l.is_empty()) else { continue };
            // A host without the module cannot interpret the label.
            if is_active(what) {
                match what {
                    "apparmor" => plan.label(&format!("exec {label}")),
                    _ => plan.label(label),
                }
            }
        }
        let (user, caps) = (&process.user, capabilities(process.capabilities.as_ref()));
        let groups = user.additional_gids.clone();
        plan.credentials(&ProcessIds { uid: user.uid, gid: user.gid, groups });
        plan.capabilities(&caps);
        if process.no_new_privileges && !weakened("no-new-privs") {
            plan.no_new_privs();
        }
        if !self.preserve.is_empty() {
            plan.preserve(self.preserve);
        }
        let mut filter = self.filter.filter(|_| !weakened("seccomp"));
        if let Some(hooks) = &hooks {
            // A listener answers for one filter. It is loaded once, and then the newborn waits under it.
            if let Some(filter) = filter.take_if(|filter| filter.notifies) {
                plan.seccomp_with(&filter.program, filter.flags, self.listener);
            }
            let own = filter.map(|filter| (filter.program.as_slice(), filter.flags));
            // ORDER: the program comes from the container's own root, so it is confined as the
            // container's process is (runtime-spec config.md, startContainer).
            hook::plan(plan, hooks, own)?;
        }
        if let Some(filter) = filter {
            plan.seccomp_with(&filter.program, filter.flags, self.listener);
        }
        plan.exec(self.program);
        Ok(())
    }
}

/// Returns whether a security module of the host interprets labels.
pub(crate) fn is_active(module: &str) -> bool {
    match module {
        "apparmor" => std::fs::read("/sys/module/apparmor/parameters/enabled")
            .is_ok_and(|text| text.first() == Some(&b'Y')),
        _ => std::path::Path::new("/sys/fs/selinux/enforce").exists(),
    }
}

/// Returns the program with its arguments and environment.
pub(crate) fn program(process: &Process, home: impl FnOnce() -> String) -> Result<Exec> {
    let mut env = environment(&process.env);
    env.retain(|entry| entry != "HOME=");
    if !env.iter().any(|e| e.starts_with("HOME=")) {
        env.push(format!("HOME={}", home()));
    }
    let name = process.args.first().cloned().unwrap_or_default();
    let candidates: Vec<String> = if name.contains('/') {
        vec![name.clone()]
    } else {
        let path = env.iter().rev().find_map(|e| e.strip_prefix("PATH=")).unwrap_or_default();
        let dirs = path.split(':').filter(|dir| dir.starts_with('/'));
        dirs.map(|dir| format!("{dir}/{name}")).collect()
    };
    if candidates.is_empty() {
        let why = format!("exec: {name:?}: executable file not found in $PATH");
        return Err(Error::Program { program: name, why });
    }
    let bytes = |texts: &[String]| texts.iter().map(|t| t.clone().into_bytes()).collect();
    Ok(Exec { candidates: bytes(&candidates), argv: bytes(&process.args), envp: bytes(&env) })
}

/// Removes duplicate names from an environment; the last value counts, as with runc. The C library's
/// getenv(3) would return the first.
fn environment(given: &[String]) -> Vec<String> {
    let name = |entry: &str| entry.split('=').next().unwrap_or_default().to_owned();
    let mut seen = std::collections::BTreeSet::new();
    let mut last: Vec<String> =
        given.iter().rev().filter(|entry| seen.insert(name(entry))).cloned().collect();
    last.reverse();
    last
}

/// Warns about capabilities that cannot be given: unknown ones, which are ignored as the specification
/// requires (config.md, process.capabilities), and ambient ones that are not inheritable.
pub(crate) fn warn_of_unknown(given: Option<&Capabilities>) {
    let Some(given) = given else { return };
    let lists = [
        ("bounding", &given.bounding),
        ("effective", &given.effective),
        ("permitted", &given.permitted),
        ("inheritable", &given.inheritable),
        ("ambient", &given.ambient),
    ];
    for (list, names) in lists {
        for (at, name) in names.iter().enumerate().filter(|(_, name)| known(name).is_none()) {
            let field = format!("process.capabilities.{list}[{at}]");
            crate::log::warn(&format!("{field}: there is no capability {name:?}"));
        }
    }
    for (at, name) in given.ambient.iter().enumerate() {
        if known(name).is_some() && !given.inheritable.contains(name) {
            let why = format!("can't raise ambient capability {name}: it is not inheritable");
            crate::log::warn(&format!("process.capabilities.ambient[{at}]: {why}"));
        }
    }
}

fn known(name: &str) -> Option<capability::Capability> {
    capability::parse_one(name).ok().filter(|_| name.starts_with("CAP_"))
}

/// Capabilities by the five lists. A name that is not known is passed over; what this process itself
/// does not have cannot be given.
pub(crate) fn capabilities(given: Option<&Capabilities>) -> CapabilityMasks {
    let Some(given) = given else { return CapabilityMasks::default() };
    let set = |names: &[String]| {
        let all: Set = names.iter().filter_map(|name| known(name)).collect();
        all.intersection(capability::all()).bits()
    };
    let inheritable = set(&given.inheritable);
    CapabilityMasks {
        bounding: set(&given.bounding),
        effective: set(&given.effective),
        permitted: set(&given.permitted),
        inheritable,
        ambient: set(&given.ambient) & inheritable,
    }
}

/// Converts to the argument of personality(2).
fn persona(given: &Personality) -> Result<u64> {
    const ADDR_LINUX32: u64 = 0x0008;
    if let Some(flag) = given.flags.first() {
        let why = format!("no flag is supported, {flag:?} neither");
        return Err(Error::field("linux.personality.flags[0]", why));
    }
    match given.domain.as_str() {
        "LINUX" => Ok(0),
        "LINUX32" => Ok(ADDR_LINUX32),
        other => {
            let why = format!("{other:?} is none of LINUX and LINUX32");
            Err(Error::field("linux.personality.domain", why))
        }
    }
}

/// Builds the kernel's `struct sched_attr`, 48 bytes (sched_setattr(2)).
fn scheduler_attributes(given: &Scheduler) -> Result<Vec<u8>> {
    let policies = [
        ("SCHED_OTHER", 0_u32),
        ("SCHED_FIFO", 1),
        ("SCHED_RR", 2),
        ("SCHED_BATCH", 3),
        ("SCHED_ISO", 4),
        ("SCHED_IDLE", 5),
        ("SCHED_DEADLINE", 6),
    ];
    let flags = [
        ("SCHED_FLAG_RESET_ON_FORK", 0x01_u64),
        ("SCHED_FLAG_RECLAIM", 0x02),
        ("SCHED_FLAG_DL_OVERRUN", 0x04),
        ("SCHED_FLAG_KEEP_POLICY", 0x08),
        ("SCHED_FLAG_KEEP_PARAMS", 0x10),
        ("SCHED_FLAG_UTIL_CLAMP_MIN", 0x20),
        ("SCHED_FLAG_UTIL_CLAMP_MAX", 0x40),
    ];
    let known = policies.iter().find(|(name, _)| *name == given.policy);
    let (_, policy) = known.ok_or_else(|| {
        let why = format!("there is no policy {:?}", given.policy);
        Error::field("process.scheduler.policy", why)
    })?;
    let mut bits = 0;
    for (at, flag) in given.flags.iter().enumerate() {
        let known = flags.iter().find(|(name, _)| name == flag);
        let (_, bit) = known.ok_or_else(|| {
            let field = format!("process.scheduler.flags[{at}]");
            Error::field(field, format!("there is no flag {flag:?}"))
        })?;
        bits |= bit;
    }
    let mut out = Vec::with_capacity(48);
    out.extend_from_slice(&48_u32.to_ne_bytes());
    out.extend_from_slice(&policy.to_ne_bytes());
    out.extend_from_slice(&bits.to_ne_bytes());
    out.extend_from_slice(&given.nice.to_ne_bytes());
    out.extend_from_slice(&given.priority.to_ne_bytes());
    for time_ns in [given.runtime, given.deadline, given.period] {
        out.extend_from_slice(&time_ns.to_ne_bytes());
    }
    Ok(out)
}

/// Builds the argument of ioprio_set(2): the class in the upper bits, the level in the lower ones.
fn io_priority(given: &IoPriority) -> Result<u16> {
    let class: u16 = match given.class.as_str() {
        "IOPRIO_CLASS_RT" => 1,
        "IOPRIO_CLASS_BE" => 2,
        "IOPRIO_CLASS_IDLE" => 3,
        other => {
            let why = format!("there is no class {other:?}");
            return Err(Error::field("process.ioPriority.class", why));
        }
    };
    let level = u16::try_from(given.priority).ok().filter(|level| *level < 8);
    let level = level
        .ok_or_else(|| Error::field("process.ioPriority.priority", "it is not one of 0 to 7"))?;
    Ok(class << 13 | level)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_name_is_refused_with_its_field() {
        let caps = Capabilities {
            bounding: vec!["CAP_CHOWN".into(), "CAP_NONSENSE".into()],
            ..Capabilities::default()
        };
        assert_eq!(capabilities(Some(&caps)).bounding, 1);
        let given = Scheduler { policy: "SCHED_X".into(), ..Scheduler::default() };
        let why = scheduler_attributes(&given).expect_err("it is bad").to_string();
        assert!(why.starts_with("process.scheduler.policy"), "{why}");
    }

    #[test]
    fn list_of_cpus_becomes_mask() {
        assert_eq!(mask("0-1,64"), Some(vec![3, 1]));
        assert_eq!(mask("7"), Some(vec![1 << 7]));
        for bad in ["", "a", "2-1", "8192", "1,,2", "-1"] {
            assert_eq!(mask(bad), None, "{bad}");
        }
    }

    #[test]
    fn missing_capability_lists_grant_nothing_inheritable() {
        let masks = capabilities(None);
        assert_eq!(masks, CapabilityMasks::default());
        let list = vec!["CAP_CHOWN".to_owned()];
        let given =
            Capabilities { ambient: list.clone(), bounding: list, ..Capabilities::default() };
        let masks = capabilities(Some(&given));
        assert_eq!((masks.inheritable, masks.ambient), (0, 0));
    }

    #[test]
    fn program_is_searched_in_absolute_path_entries() {
        let process = Process {
            args: vec!["sh".into()],
            env: vec!["PATH=/a:b:/c".into()],
            ..Process::default()
        };
        let exec = program(&process, || "/root".into()).expect("good");
        assert_eq!(exec.candidates, [b"/a/sh".to_vec(), b"/c/sh".to_vec()]);
        assert!(exec.envp.contains(&b"HOME=/root".to_vec()));
        let texts = |list: &[&str]| list.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        let all = environment(&texts(&["A=1", "B=2", "A=", "C", "B=3"]));
        assert_eq!(all, ["A=", "C", "B=3"]);
    }
}
