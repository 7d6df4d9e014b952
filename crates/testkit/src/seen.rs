//! The state of all tasks of a container as procfs shows it, for tests that compare a container
//! before a checkpoint and after the restore.
//!
//! This reader shares no code with crate `checkpoint`: an error there must not hide itself. The
//! reader opens nothing of the container and calls nothing but open(2), read(2), readlink(2) and
//! stat(2) below `/proc`, and kcmp(2). All ids are those inside. Numbers that the kernel gives anew, such as
//! inodes and devices, are replaced by the place of their first appearance: sharing stays visible.
//!
//! Times and counters of work (`VmRSS`, context switches, `utime`) are left out.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use dormouse_kernel::call::{self, Shared};
use dormouse_kernel::process::Ended;

use crate::fact::Facts;

/// Fields of `status` with a value that a restore keeps.
const STATUS: &[&str] = &[
    "Name",
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "VmSize",
    "VmLck",
    "VmPin",
    "VmData",
    "VmStk",
    "VmExe",
    "VmLib",
    "CoreDumping",
    "THP_enabled",
    "untag_mask",
    "Threads",
    "SigQ",
    "SigPnd",
    "ShdPnd",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Speculation_Store_Bypass",
    "SpeculationIndirectBranch",
    "Cpus_allowed_list",
    "Mems_allowed_list",
    "x86_Thread_features",
    "x86_Thread_features_locked",
];
/// Fields of `stat`, by their numbers in proc_pid_stat(5) and names.
const STAT: &[(usize, &str)] = &[
    (9, "flags"),
    (18, "priority"),
    (19, "nice"),
    (23, "vsize"),
    (26, "startcode"),
    (27, "endcode"),
    (28, "startstack"),
    (38, "exit_signal"),
    (40, "rt_priority"),
    (41, "policy"),
    (45, "start_data"),
    (46, "end_data"),
    (47, "start_brk"),
    (48, "arg_start"),
    (49, "arg_end"),
    (50, "env_start"),
    (51, "env_end"),
    (52, "exit_code"),
];
/// Bits of `flags` that a program sets: PF_EXITING, PF_MCE_PROCESS, PF_NPROC_EXCEEDED, PF_MCE_EARLY,
/// PF_NO_SETAFFINITY, PF_SUSPEND_TASK, PF_LOCAL_THROTTLE. Not PF_SIGNALED: a zombie has it also where another
/// thread has exited for all, and `exit_code` has the signal.
const FLAGS: u64 = 0x0c11_1084;
/// PF_MCE_PROCESS and PF_MCE_EARLY: what happens to the task when memory fails. A zombie has those of its maker.
const OF_MEMORY_ERRORS: u64 = 0x0800_0080;
/// Files of a thread that are facts as they are.
const OF_THREAD: &[&str] = &["comm", "personality", "oom_score_adj", "loginuid", "sessionid"];
/// Files of a process that are facts as they are.
const OF_PROCESS: &[&str] = &[
    "limits",
    "cmdline",
    "environ",
    "auxv",
    "coredump_filter",
    "uid_map",
    "gid_map",
    "setgroups",
    "timerslack_ns",
    "oom_adj",
    "autogroup",
    "ksm_stat",
];
/// Those that a restored zombie has of its maker: it uses none of them any more.
const OF_THE_MAKER: &[&str] =
    &["limits", "timerslack_ns", "oom_adj", "autogroup", "personality", "oom_score_adj"];
const NAMESPACES: &[&str] = &[
    "cgroup",
    "ipc",
    "mnt",
    "net",
    "pid",
    "pid_for_children",
    "time",
    "time_for_children",
    "user",
    "uts",
];
/// Files below `net`.
const NETWORK: &[&str] = &[
    "tcp", "tcp6", "udp", "udp6", "raw", "raw6", "icmp", "icmp6", "unix", "netlink", "packet",
    "igmp", "route",
];
/// Flags of areas that describe pages, not the area: soft-dirty.
const PAGE_FLAGS: &[&str] = &["sd"];

/// The place at which each object appeared first.
#[derive(Default)]
struct Order(HashMap<String, String>);

impl Order {
    fn of(&mut self, what: impl Into<String>, place: &str) -> String {
        self.0.entry(what.into()).or_insert_with(|| place.to_owned()).clone()
    }

    /// Whether it has not appeared before.
    fn is_new(&mut self, what: String) -> bool {
        self.0.insert(what, String::new()).is_none()
    }
}

/// A task: its process and its own number, by the host's ids and by those inside.
#[derive(Debug, Clone, Copy)]
struct Task {
    pid: u32,
    tid: u32,
    inside: (u32, u32),
}

/// Resources that tasks may share, with their names.
const SHARED: [(Shared, &str); 4] = [
    (Shared::Memory, "memory"),
    (Shared::Descriptors, "descriptors"),
    (Shared::FileSystem, "directory"),
    (Shared::Handlers, "handlers"),
];

struct Reader {
    facts: Facts,
    /// The first task with each resource, in the order of kcmp(2), by the host's id and the id inside.
    sharing: [Vec<(u32, u32)>; SHARED.len()],
    /// Files by device and inode.
    files: Order,
    namespaces: Order,
    /// Ids inside, by the host's.
    inside: HashMap<u32, u32>,
}

/// Reads the tasks of the container with this first process.
pub fn container(first: u32) -> Facts {
    let tasks = tasks(first);
    let inside = tasks.iter().map(|task| (task.tid, task.inside.1)).collect();
    let facts = Facts::default();
    let (files, namespaces) = (Order::default(), Order::default());
    let sharing = Default::default();
    let mut reader = Reader { facts, sharing, files, namespaces, inside };
    for task in &tasks {
        if task.pid == task.tid {
            reader.process(*task);
        }
        reader.thread(*task);
    }
    for (what, name) in [(Shared::Undo, "undo"), (Shared::Io, "io")] {
        reader.shares_with_others(&tasks, what, name);
    }
    reader.facts
}

/// The number of tasks of the container with this first process.
pub fn task_count(first: u32) -> usize {
    tasks(first).len()
}

/// The processes of the container with this first process: ids of the host and ids inside.
pub fn processes(first: u32) -> Vec<(u32, u32)> {
    let all = tasks(first).into_iter().filter(|task| task.pid == task.tid);
    all.map(|task| (task.pid, task.inside.0)).collect()
}

fn text(path: impl AsRef<Path>) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn link(path: impl AsRef<Path>) -> Option<String> {
    Some(fs::read_link(path).ok()?.to_string_lossy().into_owned())
}

fn numbers(dir: &str) -> Vec<u32> {
    let all = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut all: Vec<u32> =
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    all.sort_unstable();
    all
}

fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(str::trim)
}

fn last(list: &str) -> Option<u32> {
    list.split_ascii_whitespace().next_back()?.parse().ok()
}

/// All tasks of a pid namespace, by their ids inside.
fn tasks(first: u32) -> Vec<Task> {
    let Some(namespace) = link(format!("/proc/{first}/ns/pid")) else { return Vec::new() };
    let is_of_it =
        |pid: &u32| link(format!("/proc/{pid}/ns/pid")).is_some_and(|of_it| of_it == namespace);
    let mut all = Vec::new();
    // A zombie has no namespaces, but a parent that has.
    let mut found = Vec::new();
    for pid in numbers("/proc") {
        let Some(status) = text(format!("/proc/{pid}/status")) else { continue };
        let levels = field(&status, "NSpid").map_or(0, |ids| ids.split_ascii_whitespace().count());
        let parent = field(&status, "PPid").and_then(|id| id.parse().ok()).unwrap_or(0);
        if levels > 1 && (is_of_it(&pid) || is_of_it(&parent)) {
            found.push(pid);
        }
    }
    for pid in found {
        for tid in numbers(&format!("/proc/{pid}/task")) {
            let Some(status) = text(format!("/proc/{pid}/task/{tid}/status")) else { continue };
            let ids = ["NStgid", "NSpid"].map(|name| field(&status, name).and_then(last));
            if let [Some(process), Some(thread)] = ids {
                all.push(Task { pid, tid, inside: (process, thread) });
            }
        }
    }
    all.sort_by_key(|task| task.inside);
    all
}

impl Reader {
    fn add(&mut self, place: String, value: impl std::fmt::Display) {
        self.facts.add(place, value);
    }

    /// A process of the host, by its id inside.
    fn id(&self, pid: &str) -> String {
        let inside = pid.parse().ok().and_then(|pid: u32| self.inside.get(&pid));
        inside.map_or_else(|| "outside".into(), u32::to_string)
    }

    /// A file, by its first appearance.
    fn file(&mut self, device: u64, inode: u64, place: &str) -> String {
        self.files.of(format!("{device}:{inode}"), place)
    }

    fn process(&mut self, task: Task) {
        let Task { pid, inside: (number, _), .. } = task;
        let place = |name: &str| format!("process/{number}/{name}");
        let dir = format!("/proc/{pid}");
        let stat = text(format!("{dir}/stat")).unwrap_or_default();
        let is_zombie = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'));
        for name in OF_PROCESS {
            if is_zombie && OF_THE_MAKER.contains(name) {
                continue;
            }
            if let Some(text) = text(format!("{dir}/{name}")) {
                let text = match *name {
                    // The kernel numbers these groups.
                    "autogroup" => text.split_once(' ').map_or("", |(_, nice)| nice).to_owned(),
                    "ksm_stat" => text.lines().filter(|line| line.contains(':')).collect(),
                    "auxv" => text.bytes().map(|b| format!("{b:02x}")).collect(),
                    _ => text,
                };
                self.add(place(name), text.trim_end().replace('\0', "\\0"));
            }
        }
        if let Some(timers) = text(format!("{dir}/timers")) {
            self.timers(&timers, &place("timer"));
        }
        for name in NAMESPACES {
            if let Some(namespace) = link(format!("{dir}/ns/{name}")) {
                let place = place(&format!("ns/{name}"));
                let known = self.namespaces.of(namespace, &place);
                self.add(place, known);
            }
        }
        if let Some(path) = link(format!("{dir}/exe")) {
            self.add(place("exe"), path);
        }
        if let Some(cgroups) = text(format!("{dir}/cgroup")) {
            for line in cgroups.lines() {
                let mut parts = line.splitn(3, ':').skip(1);
                let kind = parts.next().unwrap_or_default();
                self.add(place(&format!("cgroup/{kind}")), parts.next().unwrap_or_default());
            }
        }
        self.descriptors(&dir, &place("fd"));
        if let Some(smaps) = text(format!("{dir}/smaps")) {
            self.areas(&smaps, &place("area"));
        }
        self.mounts(&dir, &place("mount"));
        self.network(&dir, number);
    }

    fn thread(&mut self, task: Task) {
        let Task { pid, tid, inside: (process, number) } = task;
        let place = |name: &str| format!("process/{process}/task/{number}/{name}");
        let dir = format!("/proc/{pid}/task/{tid}");
        let Some(status) = text(format!("{dir}/status")) else { return };
        let state = field(&status, "State").and_then(|state| state.chars().next());
        let is_zombie = state == Some('Z');
        for line in status.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            // A restored zombie has the ids and masks of its maker.
            if STATUS.contains(&name) && !is_zombie {
                self.add(place(&format!("status/{name}")), value.trim());
            }
        }
        // A task that runs or sleeps does so by chance.
        let state = state.filter(|state| matches!(state, 'T' | 't' | 'Z' | 'X'));
        self.add(place("status/State"), state.unwrap_or('S'));
        let parent = field(&status, "PPid").unwrap_or_default();
        let parent = self.id(parent);
        self.add(place("status/PPid"), parent);
        for name in ["NSpgid", "NSsid"] {
            let id = field(&status, name).and_then(last).unwrap_or_default();
            self.add(place(&format!("status/{name}")), id);
        }
        for name in OF_THREAD {
            if is_zombie && OF_THE_MAKER.contains(name) {
                continue;
            }
            if let Some(text) = text(format!("{dir}/{name}")) {
                self.add(place(name), text.trim_end());
            }
        }
        if let Some(stat) = text(format!("{dir}/stat")) {
            self.stat(&stat, &place("stat"), is_zombie);
        }
        if !is_zombie {
            self.shares(task);
        }
        for name in ["cwd", "root"] {
            let path = format!("{dir}/{name}");
            let (Some(target), Ok(file)) = (link(&path), fs::metadata(&path)) else { continue };
            let place = place(name);
            let known = self.file(file.dev(), file.ino(), &place);
            // A restored directory without a name had another one for a moment.
            let target = if target.ends_with(" (deleted)") { "(deleted)" } else { &target };
            self.add(place, format!("{target} {known}"));
        }
        // The number of the call and its arguments, the stack and the instruction.
        if let Some(call) = text(format!("{dir}/syscall")) {
            self.add(place("syscall"), without_remaining_time(call.trim_end()));
        }
    }

    /// The first task with each resource of a task. The descriptors of a process are read once; those of a thread
    /// are, too, if they are its own.
    fn shares(&mut self, task: Task) {
        let Task { pid, tid, inside: (process, number) } = task;
        let of_task = format!("process/{process}/task/{number}");
        for ((what, name), known) in SHARED.into_iter().zip(&mut self.sharing) {
            let order =
                |other: &(u32, u32)| call::compare(what, other.0, tid).unwrap_or(Ordering::Less);
            let at = known.binary_search_by(order).unwrap_or_else(|at| {
                known.insert(at, (tid, number));
                at
            });
            self.facts.add(format!("{of_task}/shares/{name}"), known[at].1);
        }
        if pid != tid && call::is_shared(Shared::Descriptors, pid, tid) == Ok(false) {
            // As those of a process.
            let place = format!("process/{process}.{number}/fd");
            self.descriptors(&format!("/proc/{pid}/task/{tid}"), &place);
        }
    }

    /// The tasks that share a resource with others, which a task may be without; each group by its first task.
    fn shares_with_others(&mut self, tasks: &[Task], what: Shared, name: &str) {
        let Ok(ended) = Ended::make() else { return };
        let has = |task: &&Task| call::is_shared(what, ended.pid(), task.tid) == Ok(false);
        let with: Vec<&Task> = tasks.iter().filter(has).collect();
        let mut groups: Vec<Vec<&Task>> = Vec::new();
        for task in with {
            let order = |group: &Vec<&Task>| {
                call::compare(what, group[0].tid, task.tid).unwrap_or(Ordering::Less)
            };
            match groups.binary_search_by(order) {
                Ok(at) => groups[at].push(task),
                Err(at) => groups.insert(at, vec![task]),
            }
        }
        for group in groups.iter().filter(|group| group.len() > 1) {
            for Task { inside: (process, number), .. } in group {
                let place = format!("process/{process}/task/{number}/shares/{name}");
                self.facts.add(place, group[0].inside.1);
            }
        }
    }

    fn stat(&mut self, stat: &str, place: &str, is_zombie: bool) {
        // A zombie is not scheduled any more, and has the settings of its maker.
        const OF_SCHEDULING: [&str; 4] = ["priority", "nice", "rt_priority", "policy"];
        // The name is in parentheses and may contain any byte.
        let Some((_, rest)) = stat.rsplit_once(')') else { return };
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        for (number, name) in STAT {
            let Some(value) = fields.get(number - 3) else { continue };
            if is_zombie && OF_SCHEDULING.contains(name) {
                continue;
            }
            let value = match *name {
                "flags" => {
                    let known = if is_zombie { FLAGS & !OF_MEMORY_ERRORS } else { FLAGS };
                    (value.parse::<u64>().unwrap_or(0) & known).to_string()
                }
                _ => (*value).to_owned(),
            };
            self.add(format!("{place}/{name}"), value);
        }
        let terminal = fields.get(7 - 3).is_some_and(|number| *number != "0");
        self.add(format!("{place}/has_terminal"), terminal);
    }

    fn timers(&mut self, timers: &str, place: &str) {
        let mut id = "";
        for line in timers.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            if name == "ID" {
                id = value;
                continue;
            }
            let value = match (name, value.split_once('.')) {
                ("notify", Some((how, pid))) => format!("{how}.{}", self.id(pid)),
                // The kernel shows the address in the process.
                _ => value.to_owned(),
            };
            self.add(format!("{place}/{id}/{name}"), value);
        }
    }

    fn descriptors(&mut self, dir: &str, place: &str) {
        let mounts = mount_points(dir);
        for number in numbers(&format!("{dir}/fd")) {
            let path = format!("{dir}/fd/{number}");
            let (Some(target), Ok(file)) = (link(&path), fs::metadata(&path)) else { continue };
            let place = |name: &str| format!("{place}/{number}/{name}");
            let order = match file.file_type().is_char_device() {
                // The first /dev/null is the host's, and becomes the container's.
                true => format!("device {:x}", file.rdev()),
                false => self.file(file.dev(), file.ino(), &place("file")),
            };
            // An inode's number in a name is that of the file.
            let name = match target.ends_with(" (deleted)") {
                // A restored file without a name had another one for a moment.
                true => "(deleted)".to_owned(),
                false => target.replace(&file.ino().to_string(), "N"),
            };
            let is_anonymous = target.starts_with("anon_inode:");
            self.add(place("link"), name);
            if !is_anonymous {
                self.add(place("file"), order);
            }
            let (mode, owner) = (file.mode(), (file.uid(), file.gid()));
            self.add(place("mode"), format!("{mode:o} {owner:?}"));
            if file.file_type().is_file() {
                self.add(place("size"), file.len());
                self.add(place("links"), file.nlink());
            }
            // The open mode of the descriptor.
            if let Ok(own) = fs::symlink_metadata(&path) {
                self.add(place("access"), format!("{:o}", own.mode() & 0o777));
            }
            let info = text(format!("{dir}/fdinfo/{number}")).unwrap_or_default();
            self.info(&info, &mounts, &place("info"));
        }
    }

    /// One file of `fdinfo`.
    fn info(&mut self, info: &str, mounts: &HashMap<String, String>, place: &str) {
        let mut left_ns = 0;
        for line in info.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let (name, value) = (name.trim(), value.trim());
            match name {
                "ino" | "eventfd-id" => {}
                "flags" => {
                    self.add(format!("{place}/flags"), value);
                }
                "mnt_id" => {
                    let at = mounts.get(value).map_or("kernel", String::as_str).to_owned();
                    self.add(format!("{place}/mount"), at);
                }
                // A descriptor, its events and data; then the position and the inode.
                "tfd" => {
                    let number = words.get(1).copied().unwrap_or_default();
                    let after = |name| words.iter().skip_while(move |word| **word != name).nth(1);
                    let events = after("events:").map(|text| u32::from_str_radix(text, 16));
                    let item = format!("{place}/epoll/{number}");
                    let events = events.and_then(Result::ok).unwrap_or_else(|| panic!("{line}"));
                    self.add(format!("{item}/events"), events);
                    self.add(
                        format!("{item}/data"),
                        after("data:").unwrap_or_else(|| panic!("{line}")),
                    );
                }
                // A mark, with the inode and a handle of it.
                _ if line.starts_with("inotify") || line.starts_with("fanotify ino") => {
                    let is_kept = |word: &&&str| {
                        !["ino:", "sdev:", "f_handle:"].iter().any(|name| word.starts_with(name))
                    };
                    let mark: Vec<&str> = words.iter().filter(is_kept).copied().collect();
                    self.facts.add_one_of(format!("{place}/mark"), mark.join(" "));
                }
                "Pid" => {}
                "NSpid" => {
                    let id = last(value).map_or_else(|| value.to_owned(), |id| id.to_string());
                    self.add(format!("{place}/pid"), id);
                }
                // A number, kind, mode, type, process, file and range.
                "lock" => {
                    let words = &words[words.len().min(2)..];
                    let [kind, mode, access, pid, _, from, to] = words[..] else {
                        self.facts.add_one_of(format!("{place}/lock"), line);
                        continue;
                    };
                    // A lock of an open file belongs to no process: the id is that of its maker.
                    let pid = if kind == "FLOCK" { "-".to_owned() } else { self.id(pid) };
                    let lock = format!("{kind} {mode} {access} {pid} {from} {to}");
                    self.facts.add_one_of(format!("{place}/lock"), lock);
                }
                "it_value" => left_ns = time_ns(value),
                "it_interval" => {
                    let interval_ns = time_ns(value);
                    self.add(format!("{place}/{name}_ns"), interval_ns);
                    // Zero is an expiry that was not taken yet: the next one is known after a query.
                    let is_periodic = interval_ns > 0 && left_ns <= interval_ns;
                    match is_periodic {
                        true => self.add(format!("{place}/it_value_ns"), "periodic"),
                        false => self.add(format!("{place}/it_value_ns"), left_ns),
                    }
                }
                _ => self.add(format!("{place}/{name}"), value),
            }
        }
    }

    /// Areas, with neighbours that differ in nothing as one: the kernel merges them by chance.
    fn areas(&mut self, smaps: &str, place: &str) {
        let mut all: Vec<Area> = Vec::new();
        for line in smaps.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let range = words.first().and_then(|word| word.split_once('-'));
            let range = range.and_then(|(start, end)| {
                let hex = |text| u64::from_str_radix(text, 16).ok();
                Some((hex(start)?, hex(end)?))
            });
            if let (Some((start, end)), [_, access, offset, device, inode, ..]) =
                (range, &words[..])
            {
                let offset = u64::from_str_radix(offset, 16).unwrap_or(0);
                let path = line.find('/').or_else(|| line.find('['));
                let path = path.map_or("", |at| &line[at..]);
                let is_named = path.starts_with('[') || !path.ends_with(" (deleted)");
                let path = if is_named { path } else { "(deleted)" };
                let file = match *inode {
                    "0" => String::new(),
                    inode => {
                        let place = format!("{place}/{start:x}");
                        self.files.of(format!("area {device}:{inode}"), &place)
                    }
                };
                let what = format!("{access} {path} {file}");
                let offset = (*inode != "0").then_some(offset);
                all.push(Area { start, end, offset, what, flags: String::new() });
            } else if let Some(area) = all.last_mut() {
                let Some((name, value)) = line.split_once(':') else { continue };
                let value = value.trim();
                match name {
                    "VmFlags" => {
                        let flags = value.split(' ').filter(|flag| !PAGE_FLAGS.contains(flag));
                        area.flags = flags.collect::<Vec<_>>().join(" ");
                    }
                    "KernelPageSize" | "ProtectionKey" => {
                        area.what.push_str(&format!(" {name} {value}"));
                    }
                    _ => {}
                }
            }
        }
        let mut merged: Vec<Area> = Vec::new();
        for area in all {
            match merged.last_mut() {
                Some(before) if before.goes_on_in(&area) => before.end = area.end,
                _ => merged.push(area),
            }
        }
        for area in merged {
            let Area { start, end, offset, what, flags } = area;
            let place = format!("{place}/{start:x}-{end:x}");
            let offset = offset.map_or_else(String::new, |offset| format!(" offset {offset:x}"));
            self.add(format!("{place}/what"), format!("{what}{offset}"));
            self.add(format!("{place}/flags"), flags);
        }
    }

    /// Mounts, in their order, without the kernel's numbers.
    fn mounts(&mut self, dir: &str, place: &str) {
        let namespace = link(format!("{dir}/ns/mnt")).unwrap_or_default();
        if !self.namespaces.is_new(format!("mounts {namespace}")) {
            return;
        }
        let points = mount_points(dir);
        let mut groups = Order::default();
        let all = text(format!("{dir}/mountinfo")).unwrap_or_default();
        let mut count = BTreeMap::<String, usize>::new();
        for line in all.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [_, parent, _, root, point, options, rest @ ..] = &words[..] else { continue };
            let parent = points.get(*parent).map_or("outside", String::as_str);
            let tags = rest.iter().take_while(|word| **word != "-");
            let tags: Vec<String> = tags
                .map(|tag| match tag.split_once(':') {
                    Some((kind, number)) => format!("{kind}:{}", groups.of(number, point)),
                    None => (*tag).to_owned(),
                })
                .collect();
            let kind = rest.iter().skip_while(|word| **word != "-").skip(1);
            let mut kind: Vec<&str> = kind.copied().collect();
            // The name of a source means nothing to most file systems. Restored overlays have no
            // option `uuid`, and their directories are those of the container's configuration.
            if kind.len() == 3 {
                kind.remove(1);
                kind.truncate(if kind[0] == "overlay" { 1 } else { 2 });
            }
            let n = count.entry((*point).to_owned()).or_default();
            let key = format!("{place}/{}#{n}", point.replace('/', ":"));
            *n += 1;
            let tags = tags.join(" ");
            self.add(key, format!("in {parent}: {root} {options} {tags} {}", kind.join(" ")));
        }
    }

    /// Sockets and addresses of a network namespace, once.
    fn network(&mut self, dir: &str, number: u32) {
        let namespace = link(format!("{dir}/ns/net")).unwrap_or_default();
        let own = link("/proc/self/ns/net").unwrap_or_default();
        if namespace == own || !self.namespaces.is_new(format!("network {namespace}")) {
            return;
        }
        for name in NETWORK {
            let all = text(format!("{dir}/net/{name}")).unwrap_or_default();
            for line in all.lines() {
                let words: Vec<&str> = line.split_ascii_whitespace().collect();
                if let Some((key, value)) = socket(name, &words) {
                    self.facts.add_one_of(format!("process/{number}/net/{name}/{key}"), value);
                }
            }
        }
    }
}

/// A line of `syscall` without the remaining time of epoll_wait(2) and epoll_pwait(2), the fourth argument.
fn without_remaining_time(call: &str) -> String {
    const CALLS: [&str; 2] = ["232", "281"];
    const WITHOUT_END: [&str; 2] = ["0xffffffff", "0xffffffffffffffff"];
    let mut words: Vec<&str> = call.split(' ').collect();
    if let [number, _, _, _, time, ..] = &mut words[..]
        && CALLS.contains(number)
        && !WITHOUT_END.contains(time)
    {
        *time = "left";
    }
    words.join(" ")
}

struct Area {
    start: u64,
    end: u64,
    offset: Option<u64>,
    what: String,
    flags: String,
}

impl Area {
    fn goes_on_in(&self, next: &Self) -> bool {
        let goes_on = match (self.offset, next.offset) {
            (Some(offset), Some(next)) => offset + (self.end - self.start) == next,
            (None, None) => true,
            _ => false,
        };
        self.end == next.start && goes_on && self.what == next.what && self.flags == next.flags
    }
}

/// Mount points by the ids of mounts.
fn mount_points(dir: &str) -> HashMap<String, String> {
    let all = text(format!("{dir}/mountinfo")).unwrap_or_default();
    let point = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        Some(((*words.first()?).to_owned(), (*words.get(4)?).to_owned()))
    };
    all.lines().filter_map(point).collect()
}

/// The key and the facts of a line below `net`, without addresses in the kernel, counters and inodes.
fn socket(name: &str, words: &[&str]) -> Option<(String, String)> {
    let pick = |places: &[usize]| -> Option<String> {
        let all: Option<Vec<&str>> =
            places.iter().map(|place| words.get(*place).copied()).collect();
        Some(all?.join(" "))
    };
    match name {
        "tcp" | "tcp6" | "udp" | "udp6" | "raw" | "raw6" | "icmp" | "icmp6" => {
            // The first line is a heading.
            if !words.first()?.ends_with(':') {
                return None;
            }
            // A closed connection that waits is not saved.
            const TIME_WAIT: &str = "06";
            if name.starts_with("tcp") && words.get(3) == Some(&TIME_WAIT) {
                return None;
            }
            // A connection that its process has closed belongs to its stack, and ends with a private one
            // (docs/state.md): FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING without an inode.
            const CLOSED: [&str; 4] = ["04", "05", "09", "0B"];
            let is_closed = words.get(3).is_some_and(|state| CLOSED.contains(state));
            if name.starts_with("tcp") && is_closed && words.get(9) == Some(&"0") {
                return None;
            }
            Some((pick(&[1, 2])?.replace(' ', "-"), pick(&[3, 4, 7])?))
        }
        "unix" => {
            words.first()?.ends_with(':').then_some(())?;
            let path = words.get(7..).map(|path| path.join(" ")).unwrap_or_default();
            let key = match path.is_empty() {
                true => "unnamed".to_owned(),
                false => path.replace('/', ":"),
            };
            // connect(2) to a datagram socket marks that socket as connected, too, without an effect on it, and the
            // mark stays when the other is closed.
            const DATAGRAM: &str = "0002";
            let is_marked = words.get(4) == Some(&DATAGRAM);
            Some((key, pick(if is_marked { &[2, 3, 4] } else { &[2, 3, 4, 5] })?))
        }
        "netlink" => (*words.first()? != "sk").then_some((pick(&[1])?, pick(&[3])?)),
        "packet" => (*words.first()? != "sk").then_some(("all".into(), pick(&[2, 3, 5, 6])?)),
        _ => Some(("all".into(), words.join(" "))),
    }
}
/// Reads `(SECONDS, NANOSECONDS)`.
fn time_ns(text: &str) -> i64 {
    let text: String = text.chars().filter(|c| !"() ".contains(*c)).collect();
    let (seconds, rest) = text.split_once(',').unwrap_or(("0", "0"));
    let parse = |text: &str| text.parse::<i64>().unwrap_or(-1);
    parse(seconds) * 1_000_000_000 + parse(rest)
}
