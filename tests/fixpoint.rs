//! A restore gives back what was saved: save(restore(save(x))) is save(x), and procfs shows the same
//! of every task before and after.
//!
//! Three checkpoints are compared field by field: the first leaves the container running, the second
//! ends its processes, the third is made of the restored ones. In between, a reader of procfs without
//! any code of crate `checkpoint` ([`dormouse_testkit::seen`]) compares all tasks. Differences
//! that are no fault are rows of two tables, [`OF_RECORDS`] and [`OF_PROCFS`], each with its reason.
//! The page `docs/checkpoint.md` has the same rows.
//!
//! A workload that is started with the variable STILL stays in its first round. Some workloads have other
//! processes or threads that go on: of these, registers and contents of memory are not compared.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use dormouse_parcel::Reader;
use dormouse_record::{
    Area, Backing, Mounts, PAGE_BYTES, Records, Run, Thing, TmpfsEntry, TmpfsKind, UnixPeer,
};
use dormouse_testkit::fact::{Difference, Expected, Facts, Rule, unexplained};
use dormouse_testkit::{Host, seen, soon, wait_until};
use serde_json::Value;

use super::{host, newest, start, wait_for_line};

/// The part of an rseq that the kernel writes.
const RSEQ_BYTES: usize = 28;
/// LIMIT: the time between two looks at a container, in nanoseconds.
const LOOKS_APART_NS: i128 = 300_000_000_000;
/// A time that may pass between two looks on a busy machine.
const SHORT_NS: u64 = 20_000_000_000;
const LOOKS_APART_US: i128 = LOOKS_APART_NS / 1000;

const fn row(place: &'static str, rule: Rule, reason: &'static str) -> Expected {
    Expected { place, rule, reason }
}

/// Differences between records of a container before and after a restore that are no fault.
pub(super) const OF_RECORDS: &[Expected] = &[
    row("about/created_unix_ms", Rule::Rises, "the time of the checkpoint"),
    row("about/monotonic_ns", Rule::Rises, "clocks go on while processes run"),
    row("about/boottime_ns", Rule::Rises, "clocks go on while processes run"),
    row(
        "about/monotonic_offset_ns",
        Rule::Any,
        "clocks stand still between checkpoint and restore",
    ),
    row("about/boottime_offset_ns", Rule::Any, "clocks stand still between checkpoint and restore"),
    row("process/*/timers/*/left_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    row("process/*/interval_timers/*/left_us", Rule::Falls(LOOKS_APART_US), "time passes"),
    row(
        "process/*/threads/*/registers/orig_rax",
        Rule::To("219"),
        "an interrupted wait is restart_syscall(2)",
    ),
    row("object/*/left_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    row("object/*/state", Rule::Begins, "a timer with little time left has expired"),
    row("object/*/ticks", Rule::Rises, "time passes"),
    row("object/*/connection/timestamp", Rule::Any, "the clock of TCP time stamps"),
    row("object/*/waiting/*/connection/timestamp", Rule::Any, "the clock of TCP time stamps"),
    row("object/*/connection/window/*", Rule::Any, "the kernel adapts windows"),
    row("object/*/connection/buffers_bytes/*", Rule::Any, "the kernel adapts buffers"),
    row("object/*/waiting/*/connection/window/*", Rule::Any, "the kernel adapts windows"),
    row("object/*/waiting/*/connection/buffers_bytes/*", Rule::Any, "the kernel adapts buffers"),
    row("object/*/waiting/*/connection/window_bytes_max", Rule::Any, "the kernel adapts windows"),
    row(
        "process/*/threads/*/registers/r10",
        Rule::Falls(LOOKS_APART_NS / 1_000_000),
        "the remaining time of epoll_wait(2), in milliseconds",
    ),
    row("process/*/interval_timers/*/left_us", Rule::Near(10_000), "CPU timers are rounded up"),
    row("object/*/received/*/credentials/pid", Rule::Ends, "the id of a process that had ended"),
    row("object/*/peer/**", Rule::Ends, "the id of a process that had ended (docs/state.md)"),
    row("object/*/left/**", Rule::Ends, "the id of a process that had ended (docs/state.md)"),
    row("object/*/cancelled_at_set_ns", Rule::Near(1_000_000_000), "read from two clocks"),
    row("process/*/threads/*/restart/remaining_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    row("process/*/threads/*/time_limit/left_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
];

/// The same for what procfs shows.
pub(super) const OF_PROCFS: &[Expected] = &[
    row("process/*/fd/*/info/it_value_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    row("process/*/fd/*/info/ticks", Rule::Rises, "time passes"),
    row("process/*/fd/0/info/mount", Rule::Any, "the host's /dev/null becomes the container's"),
    row("process/*/fd/0/mode", Rule::Any, "the host's /dev/null becomes the container's"),
    row("process/*/fd/1/info/pos", Rule::Any, "output is appended to a log of the new start"),
    row("process/*/fd/2/info/pos", Rule::Any, "output is appended to a log of the new start"),
    row("process/*/fd/*/info/settime flags", Rule::Any, "absolute times are set as relative ones"),
    row("process/*/task/*/syscall", Rule::To("219 "), "an interrupted wait is restart_syscall(2)"),
    row("process/*/task/*/status/SigQ", Rule::Any, "a count over all processes of a user"),
];

/// Only a seal takes from a shared mapping of a writable file the right to become writable.
pub(super) const SEALED: Expected = row(
    "process/*/area/*/flags",
    Rule::Loses { word: "sh", without: "mw" },
    "a mapping of sealed memory that cannot be written is made before the seal (docs/state.md)",
);

/// Places that a running program changes by itself.
const MOVING: &[Expected] = &[
    row("process/*/threads/*/registers/**", Rule::Any, "a thread runs"),
    row("process/*/threads/*/extended", Rule::Any, "a thread runs"),
    row("process/*/threads/*/restart/**", Rule::Any, "a thread runs"),
    row("process/*/threads/*/restart", Rule::Any, "a thread runs"),
    row("process/*/threads/*/time_limit/**", Rule::Any, "a thread runs"),
    row("process/*/threads/*/time_limit", Rule::Any, "a thread runs"),
    row("memory/*/page/*", Rule::Any, "a thread writes"),
    row("object/*/page/*", Rule::Any, "a thread writes"),
    row("process/*/task/*/syscall", Rule::Any, "a thread runs"),
];

/// Fields of records with the number of an object.
const REFERENCES: &[&str] = &[
    "object",
    "directory",
    "program",
    "pipe",
    "terminal",
    "queue",
    "listener",
    "namespace",
    "deleted",
    "net",
    "user",
    "mounts",
    "uts",
    "ipc",
    "time",
    "time_for_children",
    "cgroup_namespace",
    "contents",
];

/// Names of objects that do not depend on the order of the records: each is named by the first place
/// that leads to it.
struct Names<'v> {
    objects: &'v [Value],
    names: Vec<Option<String>>,
}

impl Names<'_> {
    fn of(records: &Records, value: &Value) -> Vec<String> {
        let objects = value["objects"].as_array().expect("a list");
        let mut names = Names { objects, names: vec![None; objects.len()] };
        let mut processes: Vec<(&dormouse_record::Process, &Value)> =
            records.processes.iter().zip(value["processes"].as_array().expect("a list")).collect();
        processes.sort_by_key(|(process, _)| process.pid);
        for (process, fields) in processes {
            let place = process.pid.to_string();
            names.visit(&place, "", fields);
            if let Some(n) = process.memory {
                names.visit(&format!("{place}:memory"), "", &value["memories"][n]);
            }
        }
        // Objects that no process leads to: by their records.
        let mut rest: Vec<(String, usize)> = (0..objects.len())
            .filter(|n| names.names[*n].is_none())
            .map(|n| (objects[n].to_string(), n))
            .collect();
        rest.sort();
        for (order, (_, n)) in rest.into_iter().enumerate() {
            let kind = objects[n]["kind"].as_str().unwrap_or_default();
            names.name(n, format!("{kind}:{order}"));
        }
        names.names.into_iter().map(Option::unwrap_or_default).collect()
    }

    fn name(&mut self, n: usize, place: String) {
        if self.names.get(n).is_some_and(Option::is_none) {
            let object = &self.objects[n];
            // Each process opens its own pidfds again (docs/state.md).
            let place = match object["kind"].as_str() {
                Some("pid-fd") => format!("pid-fd:{}:{}", object["pid"], object["flags"]),
                _ => place,
            };
            self.names[n] = Some(place.clone());
            self.visit(&place, "", object);
        }
    }

    fn visit(&mut self, place: &str, field: &str, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    self.visit(place, name, value);
                    if let (true, Some(n)) = (REFERENCES.contains(&name.as_str()), value.as_u64()) {
                        let number = fields.get("number").or_else(|| fields.get("start"));
                        let number = number.map_or_else(String::new, Value::to_string);
                        self.name(n as usize, format!("{place}:{name}{number}"));
                    }
                }
            }
            Value::Array(list) => {
                for (n, element) in list.iter().enumerate() {
                    if let ("descriptors", Some(object)) = (field, element.as_u64()) {
                        self.name(object as usize, format!("{place}:sent{n}"));
                    }
                    self.visit(place, "", element);
                }
            }
            _ => {}
        }
    }
}

/// Replaces the numbers of objects by their names.
fn rename(value: &mut Value, field: &str, names: &[String]) {
    let name = |value: &Value| names.get(value.as_u64()? as usize).cloned().map(Value::String);
    match value {
        Value::Object(fields) => {
            for (field, value) in fields.iter_mut() {
                if let (true, Some(name)) = (REFERENCES.contains(&field.as_str()), name(value)) {
                    *value = name;
                } else {
                    rename(value, field, names);
                }
            }
        }
        Value::Array(list) => {
            for element in list {
                match name(element) {
                    Some(name) if field == "descriptors" => *element = name,
                    _ => rename(element, "", names),
                }
            }
        }
        _ => {}
    }
}

/// The records of a checkpoint, and its pages, as facts.
pub(super) fn facts_of(dir: &Path) -> Facts {
    let reader = Reader::open(dir).expect("a whole checkpoint");
    let records = reader.records();
    let mut facts = Facts::default();
    let mut value = serde_json::to_value(records).expect("records are JSON");
    let names = Names::of(records, &value);
    rename(&mut value, "", &names);
    walk(&mut facts, "about", &value["about"]);
    for (process, value) in records.processes.iter().zip(list(&mut value, "processes")) {
        if let Some(n) = process.memory {
            value["memory"] = owner(records, n).into();
        }
        walk(&mut facts, &format!("process/{}", process.pid), value);
    }
    for (n, value) in list(&mut value, "memories").iter_mut().enumerate() {
        let memory = &records.memories[n];
        let place = format!("memory/{}", owner(records, n));
        let areas = value["areas"].take();
        walk(&mut facts, &place, value);
        let threads = records.processes.iter().filter(|process| process.memory == Some(n));
        let threads = threads.flat_map(|process| &process.threads);
        let rseqs: Vec<u64> = threads.filter_map(|t| Some(t.rseq.as_ref()?.address)).collect();
        let mut whole: Vec<(&Area, u64, Value)> = Vec::new();
        for (area, value) in memory.areas.iter().zip(areas.as_array().expect("a list")) {
            match whole.last_mut() {
                Some((last, _, of)) if continues(last, area) => {
                    of["end"] = value["end"].clone();
                    *last = area;
                }
                _ => whole.push((area, area.start, value.clone())),
            }
            let runs = (&area.runs[..], &rseqs[..]);
            let is_of_file = matches!(area.backing, Backing::Private { .. });
            pages(&mut facts, &reader, &place, runs, is_of_file);
        }
        for (_, start, value) in whole {
            walk(&mut facts, &format!("{place}/area/{start:x}"), &value);
        }
    }
    let mounts: HashMap<String, Vec<String>> = (0..names.len())
        .filter_map(|n| {
            let Thing::Mounts(mounts) = &records.objects[n].thing else { return None };
            Some((names[n].clone(), mount_names(mounts)))
        })
        .collect();
    let descriptors = records.processes.iter().flat_map(|process| &process.descriptors);
    let open: BTreeSet<usize> = descriptors.map(|descriptor| descriptor.object).collect();
    for (n, value) in list(&mut value, "objects").iter_mut().enumerate() {
        if !open.contains(&n) && value["peer_credentials"].is_object() {
            // Only a process that has a socket open can read the id of a helper, which has exited (docs/state.md).
            value["peer_credentials"]["pid"] = Value::Null;
        }
        without_chance(&records.objects[n].thing, value, (&names[n], &mounts));
        const DIRECTORY: u64 = 0o40_000;
        if value["file_type"] == DIRECTORY || value["deleted"].is_string() {
            // Changed by files in it, as the restore makes them; files in memory are made anew.
            value["modified_ns"] = Value::Null;
            value["bytes"] = Value::Null;
        }
        let place = format!("object/{}", names[n]);
        walk(&mut facts, &place, value);
        if let Some(runs) = runs_of(&records.objects[n].thing) {
            pages(&mut facts, &reader, &place, (runs, &[]), false);
        }
    }
    facts
}

/// Whether an area is the rest of the one before it: the kernel may divide memory in two without a difference
/// (PR_SET_MEMORY_MERGE), and a restore maps it at once.
fn continues(before: &Area, area: &Area) -> bool {
    let follows = |from: u64, to: u64| from + before.bytes() == to;
    let is_same = match (&before.backing, &area.backing) {
        (Backing::Anonymous, Backing::Anonymous) => true,
        (
            Backing::Private { object: one, offset: from },
            Backing::Private { object: other, offset: to },
        )
        | (
            Backing::Shared { object: one, offset: from },
            Backing::Shared { object: other, offset: to },
        ) => one == other && follows(*from, *to),
        _ => false,
    };
    let of = |area: &Area| (area.access, area.flags.clone());
    is_same && before.end == area.start && of(before) == of(area)
}

/// Names of mounts that do not depend on their order in the records: their places, and a number where one covers
/// another.
fn mount_names(mounts: &Mounts) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for mount in &mounts.mounts {
        let parent = mount.parent.map_or("", |parent| &names[parent]);
        let place = mount.place.trim_matches('/').replace('/', ":");
        let name = format!("{parent}:{place}");
        let covered = names.iter().filter(|other| other.split('#').next() == Some(&name)).count();
        names.push(if covered == 0 { name } else { format!("{name}#{covered}") });
    }
    names
}

/// Removes from the record of an object what depends on chance, or on the names of files for the time of a restore.
fn without_chance(
    thing: &Thing,
    value: &mut Value,
    (own, mounts): (&str, &HashMap<String, Vec<String>>),
) {
    match thing {
        Thing::Mounts(_) => {
            let names = &mounts[own];
            let Value::Array(all) = value["mounts"].take() else { return };
            let named = all.into_iter().enumerate().map(|(n, mut mount)| {
                if let Some(parent) = mount["parent"].as_u64() {
                    mount["parent"] = names[parent as usize].as_str().into();
                }
                let source = &mut mount["source"];
                let of = source["namespace"].as_str().and_then(|namespace| mounts.get(namespace));
                if let (Some(of), Some(number)) = (of, source["mount"].as_u64()) {
                    source["mount"] = of[number as usize].as_str().into();
                }
                (names[n].clone(), mount)
            });
            value["mounts"] = Value::Object(named.collect());
        }
        // Which of the links of a file has its contents in the record depends on the order of a directory.
        Thing::Tmpfs(tmpfs) => {
            for (entry, value) in tmpfs.entries.iter().zip(list(value, "entries")) {
                let file = match &entry.what {
                    TmpfsKind::Name { of } => of,
                    _ => &entry.path,
                };
                let is = |other: &&TmpfsEntry| match &other.what {
                    TmpfsKind::Name { of } => of == file,
                    _ => other.path == *file,
                };
                let links: Vec<&TmpfsEntry> = tmpfs.entries.iter().filter(is).collect();
                if links.len() > 1 {
                    let mut links: Vec<&str> = links.iter().map(|one| &*one.path).collect();
                    links.sort_unstable();
                    value["what"] = links.join(" ").into();
                }
                if matches!(entry.what, TmpfsKind::Fifo) {
                    // The restore writes its contents.
                    value["modified_ns"] = Value::Null;
                }
            }
        }
        Thing::Pipe(pipe)
            if pipe.path.as_ref().is_some_and(|path| path.contains("/.dormouse-")) =>
        {
            // The name for a restore has the number of the object.
            value["path"] = "(deleted)".into();
        }
        Thing::Timer(timer) if timer.value_ns == 0 && timer.cancelled_at_set_ns.is_some() => {
            // No time is left, so this is the time of the look.
            value["cancelled_at_set_ns"] = "now".into();
        }
        Thing::File(file) if file.deleted.is_some() => {
            // The restored file had another name for a moment.
            value["path"] = "(deleted)".into();
        }
        Thing::UnixSocket(socket) => {
            // Of a datagram socket whose peer has closed: made as one of a pair (docs/state.md).
            const SOCK_DGRAM: i32 = 2;
            if socket.socket_type == SOCK_DGRAM && socket.peer == UnixPeer::Gone {
                value["peer_credentials"] = Value::Null;
            }
        }
        Thing::TcpSocket(tcp) if tcp.connection.is_some() || tcp.held || tcp.over => {
            // The bind of a restore sets it, and it has no effect on a connection (docs/state.md).
            const IPPROTO_IPV6: i32 = 41;
            const IPV6_V6ONLY: i32 = 26;
            let is_v6_only =
                |option: &Value| option["level"] == IPPROTO_IPV6 && option["name"] == IPV6_V6ONLY;
            list(value, "options").retain(|option| !is_v6_only(option));
        }
        _ => {}
    }
}

fn list<'v>(value: &'v mut Value, name: &str) -> &'v mut Vec<Value> {
    value[name].as_array_mut().expect("records have this list")
}

/// The process with an address space.
fn owner(records: &Records, memory: usize) -> String {
    let found = records.processes.iter().find(|process| process.memory == Some(memory));
    found.map_or_else(|| format!("of none {memory}"), |process| process.pid.to_string())
}

fn runs_of(thing: &dormouse_record::Thing) -> Option<&[Run]> {
    match thing {
        Thing::SharedMemory(memory) => Some(&memory.runs),
        Thing::SystemVMemory(memory) => Some(&memory.runs),
        Thing::AioContext(context) => Some(&context.runs),
        Thing::MemoryFile(file) => Some(&file.runs),
        Thing::Deleted(file) => Some(&file.runs),
        _ => None,
    }
}

/// A fact for each page: its checksum. A page of zeros is like none, but in a private mapping of a
/// file.
///
/// The kernel writes the number of the CPU to the rseq of each thread, at the addresses `without`.
fn pages(
    facts: &mut Facts,
    reader: &Reader,
    place: &str,
    (runs, without): (&[Run], &[u64]),
    zeros_count: bool,
) {
    let mut page = vec![0; PAGE_BYTES as usize];
    for run in runs {
        for n in 0..run.pages {
            let at = (run.first + n) * PAGE_BYTES;
            reader.pages().read_exact_at(&mut page, at).expect("a whole checkpoint");
            let first = run.address + n * PAGE_BYTES;
            for address in without.iter().filter(|at| (first..first + PAGE_BYTES).contains(at)) {
                let at = (address - first) as usize;
                let end = page.len().min(at + RSEQ_BYTES);
                page[at..end].fill(0);
            }
            if zeros_count || page.iter().any(|byte| *byte != 0) {
                let hash = blake3::hash(&page).to_hex();
                facts.add(format!("{place}/page/{first:x}"), &hash[..16]);
            }
        }
    }
}

/// The field that names an element of a list; the number in the list where there is none.
fn key_of(list: &str, n: usize, element: &Value) -> String {
    let names: &[&str] = match list {
        "threads" => &["tid"],
        "descriptors" | "notices" | "watches" => &["number"],
        "limits" => &["resource"],
        "actions" => &["signal"],
        "timers" => &["id"],
        "interval_timers" => &["which"],
        "entries" => &["path"],
        "options" => &["level", "name"],
        "groups" => &["device", "address"],
        // The kernel lists them by the addresses of its objects.
        "items" => &["number", "data"],
        _ => &[],
    };
    let keys: Option<Vec<String>> =
        names.iter().map(|name| element.get(*name).map(Value::to_string)).collect();
    match keys {
        Some(keys) if !keys.is_empty() => keys.join("-"),
        _ => n.to_string(),
    }
}

/// Adds a fact for each leaf of a record.
fn walk(facts: &mut Facts, place: &str, value: &Value) {
    match value {
        Value::Object(fields) => {
            time_left(facts, place, value);
            for (name, field) in fields {
                let is_elsewhere = name == "runs"
                    || name.starts_with("value_") && fields.contains_key(&interval_of(name));
                if is_elsewhere {
                    continue;
                }
                match field {
                    Value::Array(list) => {
                        facts.add(format!("{place}/{name}/count"), list.len());
                        for (n, element) in list.iter().enumerate() {
                            let key = key_of(name, n, element);
                            walk(facts, &format!("{place}/{name}/{key}"), element);
                        }
                    }
                    Value::Null => {}
                    _ => walk(facts, &format!("{place}/{name}"), field),
                }
            }
        }
        Value::Array(list) => {
            for (n, element) in list.iter().enumerate() {
                walk(facts, &format!("{place}/{n}"), element);
            }
        }
        Value::String(text) => facts.add(place, text),
        other => facts.add(place, other),
    }
}

fn interval_of(value: &str) -> String {
    value.replacen("value_", "interval_", 1)
}

/// The state of a timer: disarmed, within an interval, or the time left.
fn time_left(facts: &mut Facts, place: &str, timer: &Value) {
    for unit in ["ns", "us"] {
        let number = |name: &str| timer.get(format!("{name}_{unit}"))?.as_u64();
        let (Some(value), Some(interval)) = (number("value"), number("interval")) else { continue };
        match value {
            0 if interval == 0 => facts.add(format!("{place}/state"), "disarmed"),
            // It may expire between two looks.
            _ if interval == 0 && unit == "ns" && value < SHORT_NS => {}
            // Zero is an expiry that was not taken yet.
            _ if value <= interval => facts.add(format!("{place}/state"), "periodic"),
            _ => {
                facts.add(format!("{place}/state"), "armed");
                facts.add(format!("{place}/left_{unit}"), value);
            }
        }
    }
}

/// The first process of a container, by the host's ids.
pub(super) fn first(host: &Host, name: &str) -> u32 {
    host.inspect(name)["pid"].as_u64().expect("the container runs") as u32
}

/// Whether no task runs that was in a call before.
fn are_in_calls(before: &Facts, now: &Facts) -> bool {
    const RUNS: &str = "running";
    let runs = |(place, value): (&str, &str)| value == RUNS && place.ends_with("/syscall");
    let waited = |place| before.get(place).is_some_and(|call| call != RUNS);
    !now.iter().any(|one| runs(one) && waited(one.0))
}

/// What is compared of a container: two looks before, and one after the restore.
pub(super) struct Looks {
    pub(super) procfs: Vec<Facts>,
    pub(super) records: Vec<Facts>,
}

/// The step that failed, with the text of the command.
#[derive(Debug)]
pub(super) enum Failure {
    /// The container cannot be saved.
    Refused(String),
    /// The checkpoint was accepted and cannot be restored.
    Lost(String),
    /// The restored container cannot be saved.
    Once(String),
}

impl Looks {
    /// Saves, restores and saves a container.
    pub(super) fn of(host: &Host, name: &str) -> Result<Self, Failure> {
        let saves = |words: &[&str]| {
            let out = host.dm(words);
            match out.status {
                0 => Ok(facts_of(&newest(host, name))),
                _ => Err(out.stderr),
            }
        };
        let live = &["checkpoint", "--leave-running", name];
        let seen = || seen::container(first(host, name));
        let mut looks =
            Self { procfs: vec![seen()], records: vec![saves(live).map_err(Failure::Refused)?] };
        looks.look_again(seen);
        looks.records.push(saves(&["checkpoint", name]).map_err(Failure::Refused)?);
        let out = host.dm(&["restore", name]);
        if out.status != 0 {
            return Err(Failure::Lost(out.stderr));
        }
        looks.look_again(seen);
        looks.records.push(saves(live).map_err(Failure::Once)?);
        Ok(looks)
    }

    /// Looks until each task that waited at first is in a call again: one that was let go may still be on its
    /// way there.
    fn look_again(&mut self, seen: impl Fn() -> Facts) {
        let mut found = Facts::default();
        // A task that never gets there is a difference.
        wait_until(soon(), || {
            found = seen();
            are_in_calls(&self.procfs[0], &found)
        });
        self.procfs.push(found);
    }

    /// All differences without an explanation in the tables or `more`. With `moves`, a program may change
    /// its registers and memory.
    pub(super) fn faults(&self, moves: bool, more: &[Expected]) -> Vec<String> {
        let mut faults = Vec::new();
        for (kind, looks, table) in
            [("procfs", &self.procfs, OF_PROCFS), ("records", &self.records, OF_RECORDS)]
        {
            let open = |before: &Facts, after: &Facts| -> Vec<Difference> {
                let all = unexplained(before.differences(after), table);
                let moving = if moves { MOVING } else { &[] };
                unexplained(unexplained(all, more), moving)
            };
            for one in open(&looks[0], &looks[1]) {
                faults.push(format!("{kind}, while it ran: {one}"));
            }
            for one in open(&looks[1], &looks[2]) {
                faults.push(format!("{kind}, by the restore: {one}"));
            }
        }
        faults
    }
}

/// Differences of one workload alone.
const OF_ONE: &[(&str, Expected)] = &[
    ("memfd", SEALED),
    ("gro", row("process/*/net/udp/*", Rule::Any, "datagrams received as one take other memory")),
    (
        "ownplace",
        row("process/*/fd/*/info/mount", Rule::Any, "a deleted file has no mount that is left"),
    ),
];

/// Workloads, with the options of their containers, and whether they have threads that go on.
const WORKLOADS: &[(&str, &[&str], bool)] = &[
    ("advice", &[], false),
    ("aio", &[], true),
    ("altstack", &[], true),
    ("barrier", &[], false),
    ("cgroup", &["--systemd", "always"], true),
    ("cgroupns", &["--cap-add", "SYS_ADMIN"], false),
    ("chroot", &[], true),
    ("clock", &[], false),
    ("cow", &[], false),
    ("credential", &[], false),
    ("directory", &[], false),
    ("embryo", &[], false),
    ("event", &[], false),
    ("fanotify", &["--cap-add", "SYS_ADMIN"], false),
    ("fifo", &[], false),
    ("file", &[], false),
    ("filter", &[], true),
    ("guard", &[], false),
    ("inotify", &[], false),
    ("joint", &[], true),
    ("lease", &[], false),
    ("lock", &[], false),
    ("many", &[], false),
    ("memory", &[], false),
    ("mqueue", &[], false),
    ("net", &["--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"], false),
    ("netlink", &[], false),
    ("notice", &[], false),
    ("peer", &[], true),
    ("pipe", &[], false),
    ("place", &[], true),
    ("raw", &["--cap-add", "NET_RAW"], false),
    ("reaper", &[], true),
    ("reuse", &[], false),
    ("rights", &[], false),
    ("sandbox", &[], true),
    ("schedule", &[], true),
    ("sequence", &[], true),
    ("signal", &[], true),
    ("socketpair", &[], false),
    ("stopped", &[], true),
    ("stops", &[], true),
    ("system_v", &[], false),
    ("thread", &[], true),
    ("together", &[], false),
    ("tree", &[], true),
    ("udp", &[], false),
    ("udpshut", &[], false),
    ("unix", &[], false),
    ("uts", &["--cap-add", "SYS_ADMIN"], false),
    ("vdso", &[], true),
    ("wipe", &[], false),
    ("backlog", &[], true),
    ("chosen", &[], false),
    ("deleted", &[], true),
    ("dump", &[], false),
    ("flags", &[], false),
    ("future", &[], true),
    ("gro", &[], false),
    ("groups", &[], false),
    ("ipc", &["--cap-add", "SYS_ADMIN"], true),
    ("listener", &[], false),
    ("maker", &[], false),
    ("making", &[], true),
    ("memfd", &[], true),
    ("mount", &["--cap-add", "SYS_ADMIN"], true),
    ("mounted", &["--cap-add", "SYS_ADMIN"], true),
    ("names", &["--cap-add", "SYS_ADMIN"], false),
    ("nodevice", &[], false),
    ("orphan", &[], true),
    ("owned", &["--cap-add", "SYS_ADMIN"], true),
    ("ownfiles", &[], true),
    ("ownplace", &["--cap-add", "SYS_ADMIN"], true),
    ("pidfd", &[], true),
    (
        "preset",
        &["--sysctl", "net.ipv6.bindv6only=1", "--sysctl", "net.ipv4.ip_default_ttl=77"],
        false,
    ),
    ("segment", &[], true),
    ("sockopt", &[], false),
    ("terminal", &["-t"], true),
    ("tmpfs", &["--tmpfs", "/scratch"], true),
    ("user", &[], true),
    ("zombie", &[], true),
];

/// Workloads that are not compared, each with the reason.
const NOT_COMPARED: &[(&str, &str)] = &[
    ("ahead", "its threads write to all of a large memory all the time"),
    ("apart", "refused by name in each of its forms"),
    ("hugetlb", "needs huge pages of the host"),
    ("increment", "a memory workload with a time of its own for every step"),
    ("lazy", "a large memory, which is compared by the workload"),
    ("lost", "refused by name in each of its forms"),
    ("restart", "its waits, and the threads with them, end within seconds"),
    ("share", "a template of clones"),
    ("tcp", "sends and receives all the time"),
    ("ending", "sends and receives all the time"),
    ("ticking", "its timers expire all the time"),
    ("pair", "the kernel gives its links addresses of their own meanwhile"),
    ("stack", "the kernel gives its links addresses of their own meanwhile"),
    ("sysv", "refused by name"),
    ("timens", "its waits, and the threads with them, end within seconds"),
    ("vfork", "refused by name"),
];

#[test]
fn every_workload_is_compared_or_has_a_reason() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads");
    let files = fs::read_dir(dir).expect("a folder of the repository").flatten();
    let names = files.filter_map(|entry| {
        let name = entry.file_name();
        Some(name.to_str()?.strip_suffix(".c")?.to_owned())
    });
    let known: BTreeSet<String> = WORKLOADS
        .iter()
        .map(|(name, ..)| (*name).to_owned())
        .chain(NOT_COMPARED.iter().map(|(name, _)| (*name).to_owned()))
        .collect();
    assert_eq!(names.collect::<BTreeSet<_>>(), known);
}

/// Compares every workload whose place in the table is `part` modulo the number of tests.
#[track_caller]
fn compare(part: usize) {
    let host = host();
    let only = std::env::var("DORMOUSE_FIXPOINT").ok();
    let mut faults = Vec::new();
    for (n, (name, more, moves)) in WORKLOADS.iter().enumerate() {
        let is_chosen = only.as_ref().is_none_or(|only| only.split(',').any(|one| one == *name));
        if n % PARTS != part || !is_chosen {
            continue;
        }
        let more = [&["--net", "none", "--env", "STILL=1"], *more].concat();
        start(&host, name, &more);
        wait_for_line(&host, name, "ready 0");
        match Looks::of(&host, name) {
            Ok(looks) => {
                let count: usize = looks.procfs.iter().chain(&looks.records).map(Facts::len).sum();
                let own = OF_ONE.iter().filter(|(of, _)| of == name).map(|(_, row)| *row);
                let found = looks.faults(*moves, &own.collect::<Vec<_>>());
                println!("{name}: {count} facts, {} differences", found.len());
                faults.extend(found.into_iter().map(|fault| format!("{name}: {fault}")));
            }
            Err(failure) => faults.push(format!("{name}: {failure:?}")),
        }
        host.dm(&["rm", "--force", name]).ok();
    }
    assert!(faults.is_empty(), "{} differences:\n{}", faults.len(), faults.join("\n"));
}

const PARTS: usize = 4;

#[test]
fn vm_restored_workloads_are_as_saved_part_1() {
    compare(0);
}

#[test]
fn vm_restored_workloads_are_as_saved_part_2() {
    compare(1);
}

#[test]
fn vm_restored_workloads_are_as_saved_part_3() {
    compare(2);
}

#[test]
fn vm_restored_workloads_are_as_saved_part_4() {
    compare(3);
}

#[test]
fn a_task_on_its_way_into_its_call_is_looked_at_again() {
    let facts = |call: &str| {
        let mut facts = Facts::default();
        facts.add("process/2/task/2/syscall", call);
        facts
    };
    let [waits, other, runs] = ["34 0x0", "219 0x0", "running"].map(facts);
    assert!(!are_in_calls(&waits, &runs));
    assert!(are_in_calls(&waits, &other) && are_in_calls(&runs, &runs));
}
