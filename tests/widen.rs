//! A restore never widens: a checkpoint whose records were changed by an attacker, and whose checksums are
//! right again, is refused, or gives processes that have what the configuration gives and no more.
//!
//! The first tests change one thing each. Two of them restore the records also with a program that lacks the
//! check, where the processes have more than the configuration gives. The last one changes things at
//! random: values of real checkpoints become others, those of the same name from other checkpoints, or ones
//! that an attacker would choose, such as addresses of the restore's own program and paths through links of
//! procfs. After each restore every
//! process is compared with what it was before: capabilities, no_new_privs, mode of the filter, maps of
//! ids, namespaces, mounts, open files and mapped files. `DORMOUSE_WIDEN_SECONDS` says how long it goes on, or
//! `DORMOUSE_WIDEN_COUNT` for how many changes, from `DORMOUSE_WIDEN_SEED` and number
//! `DORMOUSE_WIDEN_FIRST`, which the failure names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_parcel::Reader;
use dormouse_record::{Process, Records, Thing};
use dormouse_testkit::{Host, image, run, slowness, soon, wait_until};
use serde_json::Value;

use super::{host, newest, rewrite, start, wait_for_line};

const GIB: u64 = 1 << 30;

/// Makes a checkpoint of a workload, which has stopped.
fn saved(host: &Host, name: &str) -> PathBuf {
    start(host, name, &["--net", "none"]);
    wait_for_line(host, name, "ready 0");
    host.dm(&["checkpoint", name]).ok();
    newest(host, name)
}

/// Where the restore's program will be: in the middle of the largest hole of all memories, a GiB from
/// its begin.
fn program_at(records: &Records) -> u64 {
    let areas = records.memories.iter().flat_map(|memory| {
        let object = memory.vdso.map(|(start, bytes)| (start, start + bytes));
        memory.areas.iter().map(|area| (area.start, area.end)).chain(object)
    });
    let mut used: Vec<(u64, u64)> = areas.collect();
    used.push((0x5000_0000_0000, u64::MAX));
    used.sort_unstable();
    let (mut at, mut best) = (0x10_0000_0000, (0, 0));
    for (start, end) in used {
        let gap = start.min(0x5000_0000_0000).saturating_sub(at);
        if gap > best.1 {
            best = (at, gap);
        }
        at = at.max(end);
    }
    best.0 + GIB
}

/// Restores changed records, which is refused with a text, and puts the right ones back.
#[track_caller]
fn is_refused(host: &Host, name: &str, text: &str, change: impl FnOnce(&mut Records)) {
    let dir = newest(host, name);
    let good = fs::read(dir.join("records")).expect("it is there");
    rewrite(&dir, change);
    let out = host.dm(&["restore", name]);
    assert!(out.status != 0 && out.stderr.contains(text), "no '{text}': {out}");
    assert_eq!(host.state_of(name), "stopped");
    fs::write(dir.join("records"), good).expect("it can be written");
}

#[test]
fn restore_refuses_addresses_outside_the_memory_of_their_process() {
    let host = host();
    let dir = saved(&host, "pipe");
    let at = program_at(Reader::open(&dir).expect("it is whole").records());
    // Its interpreter, operations, cells, shared memory that waits; and beyond all memory.
    for address in [at, at + 0x4000, at + 3 * (GIB / 4) + 8192, at + GIB, 0x7fff_ffff_f000] {
        is_refused(&host, "pipe", "thread 1: its rseq at", |records| {
            let rseq = records.processes[0].threads[0].rseq.as_mut().expect("the C library's");
            rseq.address = address;
        });
        is_refused(&host, "pipe", "its tid address at", |records| {
            records.processes[0].threads[0].tid_address = address;
        });
        is_refused(&host, "pipe", "its robust list at", |records| {
            records.processes[0].threads[0].robust_list.0 = address;
        });
    }
    is_refused(&host, "pipe", "what has stopped it", |records| {
        records.processes[0].stopped = Some(18);
    });
    host.dm(&["restore", "pipe"]).ok();
}

#[test]
fn restore_refuses_waits_that_write_elsewhere() {
    let host = host();
    let dir = saved(&host, "restart");
    let reader = Reader::open(&dir).expect("it is whole");
    let at = program_at(reader.records());
    let mut calls = BTreeSet::new();
    for (n, process) in reader.records().processes.iter().enumerate() {
        for (t, thread) in process.threads.iter().enumerate() {
            let Some(restart) = &thread.restart else { continue };
            let (text, arg) = match restart.call {
                35 => ("the rest of its sleep at", 1),  // nanosleep
                230 => ("the rest of its sleep at", 3), // clock_nanosleep
                202 => ("the futex it waits for at", 0),
                _ => ("what it polls at", 0),
            };
            calls.insert(restart.call);
            is_refused(&host, "restart", text, |records| {
                let restart = records.processes[n].threads[t].restart.as_mut();
                let restart = restart.expect("it is there");
                restart.args[arg] = at + 0x2000;
                if arg == 0 && restart.args[1] == 0 {
                    restart.args[1] = 1; // a poll of nothing has no place
                }
            });
        }
    }
    assert!(calls.len() >= 2, "waits of several kinds: {calls:?}");
    host.dm(&["restore", "restart"]).ok();
}

#[test]
fn restore_refuses_paths_through_links_of_procfs() {
    let host = host();
    start(&host, "event", &["--net", "none"]);
    wait_for_line(&host, "event", "ready 0");
    // What the records do not say a link of the container may.
    let links = "ln -s /proc/self/fd /fds; ln -s /proc/self/exe /program; ln -s /proc/1/cwd /here";
    host.dm(&["exec", "event", "sh", "-c", links]).ok();
    host.dm(&["checkpoint", "event"]).ok();
    let directory = |records: &mut Records, path: &str| {
        let n = records.processes[0].directory.expect("it has one");
        match &mut records.objects[n].thing {
            Thing::File(file) => path.clone_into(&mut file.path),
            other => panic!("{}", other.name()),
        }
    };
    for path in ["/proc/self/fd/3", "/proc/self/exe", "/proc/1/root/etc", "/proc/1/task/1/cwd"] {
        is_refused(&host, "event", "leads through a link of procfs", |records| {
            directory(records, path);
        });
    }
    for path in ["/fds/3", "/fds/20", "/program", "/here"] {
        is_refused(&host, "event", "openat2", |records| directory(records, path));
    }
    // A place alone, without a right to read it.
    for number in 0..40 {
        is_refused(&host, "event", "openat2", |records| {
            let n = records.processes[0].directory.expect("it has one");
            let mut object = records.objects[n].clone();
            if let Thing::File(file) = &mut object.thing {
                file.path = format!("/fds/{number}");
                file.flags = 0o10_000_000; // O_PATH
            }
            records.objects.push(object);
        });
    }
    host.dm(&["restore", "event"]).ok();
}

const CAP_SYS_ADMIN: u64 = 1 << 21;

/// Starts a workload and makes a checkpoint. Returns the rights of its first process before.
fn rights_of_saved(host: &Host, name: &str, options: &[&str]) -> Given {
    start(host, name, &[&["--net", "none"][..], options].concat());
    wait_for_line(host, name, "ready 0");
    let pid = host.inspect(name)["pid"].as_u64().expect("the process runs") as u32;
    let given = Given::of(pid).expect("the process runs");
    host.dm(&["checkpoint", name]).ok();
    given
}

/// Restores changed records on a host without a protection, and returns the rights of the first process.
fn rights_of_restored(host: &Host, name: &str, change: impl FnOnce(&mut Records)) -> Given {
    rewrite(&newest(host, name), change);
    host.dm(&["restore", name]).ok();
    let pid = host.inspect(name)["pid"].as_u64().expect("the process runs") as u32;
    Given::of(pid).expect("the process runs")
}

/// A host with the workloads and a program without a protection, where the control arms are built.
fn without(protection: &str) -> Option<Host> {
    let host = Host::without(protection)?;
    host.import(&image::workloads(), "workloads");
    Some(host)
}

#[test]
fn restore_refuses_capabilities_beyond_the_configuration() {
    let widen = |records: &mut Records| {
        let sets = &mut records.processes[0].threads[0].credentials.capabilities;
        sets[1..4].iter_mut().for_each(|set| *set |= CAP_SYS_ADMIN);
    };
    let host = host();
    let given = rights_of_saved(&host, "pipe", &[]);
    assert_eq!(given.capabilities[3] & CAP_SYS_ADMIN, 0);
    is_refused(&host, "pipe", "has permitted capabilities", widen);
    if let Some(weak) = without("restored-capabilities") {
        rights_of_saved(&weak, "pipe", &[]);
        let restored = rights_of_restored(&weak, "pipe", widen);
        assert_ne!(restored.capabilities[2] & CAP_SYS_ADMIN, 0, "{restored:?}");
    }
}

#[test]
fn restore_refuses_users_that_the_process_cannot_have_become() {
    let options = ["--user", "1000:1000", "--security-opt", "no-new-privileges"];
    let widen = |records: &mut Records| {
        records.processes[0].threads[0].credentials.uids = [0; 4];
    };
    let host = host();
    let given = rights_of_saved(&host, "socketpair", &options);
    is_refused(&host, "socketpair", "has uids [0, 0, 0, 0]", widen);
    let root = |given: &Given| {
        let base = given.maps[0].split_ascii_whitespace().nth(1).map(str::to_owned);
        given.users.split_ascii_whitespace().next().map(str::to_owned) == base
    };
    assert!(!root(&given), "{given:?}");
    if let Some(weak) = without("restored-users") {
        rights_of_saved(&weak, "socketpair", &options);
        let restored = rights_of_restored(&weak, "socketpair", widen);
        assert!(root(&restored), "{restored:?}");
    }
}

/// The first process of a container does not end by such a fault while it is traced.
#[test]
fn restore_refuses_an_rseq_that_cannot_be_written() {
    let host = host();
    saved(&host, "pipe");
    is_refused(&host, "pipe", "the rseq of thread 1", |records| {
        let areas = &records.memories[0].areas;
        let constant = areas.iter().find(|area| area.access & 2 == 0).expect("its code");
        let address = constant.start;
        let rseq = records.processes[0].threads[0].rseq.as_mut().expect("the C library's");
        rseq.address = address;
    });
    host.dm(&["restore", "pipe"]).ok();
}

/// Files of procfs that are no such links are files like others.
/// Processes share what both have by their records, and what the restore can make them share.
#[test]
fn restore_refuses_sharing_that_the_records_do_not_have() {
    let host = host();
    saved(&host, "joint");
    fn sharer(records: &mut Records) -> &mut Process {
        let mut all = records.processes.iter_mut();
        all.find(|process| process.table_of == Some(1)).expect("one shares")
    }
    is_refused(&host, "joint", "other descriptors than process 1", |records| {
        let first = &mut sharer(records).descriptors[0];
        first.close_on_exec = !first.close_on_exec;
    });
    is_refused(&host, "joint", "what it shares with process 99 is not there", |records| {
        sharer(records).table_of = Some(99);
    });
    is_refused(&host, "joint", "another directory than process 1", |records| {
        let mut all = records.processes.iter_mut();
        all.find(|process| process.place_of == Some(1)).expect("one shares").umask = 0o7;
    });
    is_refused(&host, "joint", "share descriptors (CLONE_FILES)", |records| {
        // The child of one that shares with its sibling, which shares with the first process now.
        let descriptors = records.processes[0].descriptors.clone();
        let between = |process: &&mut Process| {
            process.parent != 1 && process.parent != 0 && process.table_of.is_none()
        };
        let process = records.processes.iter_mut().find(between).expect("one is between");
        process.table_of = Some(1);
        process.descriptors = descriptors;
        process.locks.clear();
    });
    host.dm(&["restore", "joint"]).ok();
}

#[test]
fn restored_files_of_procfs_are_read_on() {
    let host = Host::with_busybox();
    let script = "exec 3</proc/1/status 4</proc/self/comm 5</proc/sys/kernel/ostype 6</proc/self/fd; \
                  cd /proc/1; echo ready; until test -e /go; do sleep 0.1; done; \
                  read a <&3; read b <&4; read c <&5; echo \"$a $b $c\"";
    let run = ["run", "-d", "--name", "a", "--net", "none", "busybox", "sh", "-c", script];
    host.dm(&run).ok();
    wait_for_line(&host, "a", "ready");
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    let out = host.dm(&["exec", "a", "touch", "/go"]);
    assert!(out.status == 0 || out.status == 137, "{out}");
    let is_there = || host.dm(&["logs", "a"]).stdout.lines().any(|l| l == "Name:\tsh sh Linux");
    assert!(wait_until(soon(), is_there), "{}", host.dm(&["logs", "a"]));
}

/// What the kernel says of all processes of a container, and of what they can reach.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Given {
    /// Bits of the capability sets: inheritable, permitted, effective, bounding, ambient.
    capabilities: [u64; 5],
    no_new_privileges: bool,
    /// Real, effective, saved and file system user, by the host's ids.
    users: String,
    seccomp: String,
    maps: [String; 2],
    /// What is mounted: where, of what kind, with what options.
    mounts: BTreeSet<String>,
    /// Files of the host that its streams are.
    streams: BTreeSet<(u64, u64)>,
    /// Namespaces that are the container's, by kind.
    namespaces: BTreeMap<&'static str, String>,
}

const NAMESPACES: [&str; 6] = ["user", "mnt", "pid", "net", "ipc", "uts"];

fn read(pid: u32, name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/{name}")).ok()
}

/// `None` where the process is gone.
fn field(status: &str, name: &str) -> Option<String> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(|value| value.trim().to_owned())
}

impl Given {
    fn of(pid: u32) -> Option<Self> {
        let status = read(pid, "status")?;
        let set = |name| u64::from_str_radix(&field(&status, name)?, 16).ok();
        let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(set);
        let mut capabilities = [0; 5];
        for (to, from) in capabilities.iter_mut().zip(sets) {
            *to = from?;
        }
        let mounts = read(pid, "mountinfo")?;
        let stream = |n: u32| fs::metadata(format!("/proc/{pid}/fd/{n}")).ok();
        let link = |name| fs::read_link(format!("/proc/{pid}/ns/{name}")).ok();
        let text = |name| Some(link(name)?.to_string_lossy().into_owned());
        let mut namespaces = BTreeMap::new();
        for name in NAMESPACES {
            namespaces.insert(name, text(name)?);
        }
        Some(Self {
            capabilities,
            no_new_privileges: field(&status, "NoNewPrivs")? == "1",
            users: field(&status, "Uid")?,
            seccomp: field(&status, "Seccomp")?,
            maps: [read(pid, "uid_map")?, read(pid, "gid_map")?],
            mounts: mounts.lines().map(mount).collect(),
            streams: (0..3).filter_map(stream).map(|file| (file.dev(), file.ino())).collect(),
            namespaces,
        })
    }
}

/// A line of mountinfo without numbers, which every mount has anew: where, options, kind.
fn mount(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let kind = words.iter().position(|word| *word == "-").map_or("", |at| words[at + 1]);
    format!("{} {} {kind}", words[4], words[5])
}

/// Processes of a pid namespace, and threads.
fn tasks_of(namespace: &str) -> Vec<(u32, u32)> {
    let number = |name: &std::ffi::OsStr| name.to_str()?.parse::<u32>().ok();
    let all = fs::read_dir("/proc").expect("procfs").flatten();
    let mut tasks = Vec::new();
    for pid in all.filter_map(|entry| number(&entry.file_name())) {
        let link = fs::read_link(format!("/proc/{pid}/ns/pid"));
        if link.is_ok_and(|link| link.to_string_lossy() == namespace) {
            let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            tasks.extend(threads.filter_map(|entry| Some((pid, number(&entry.file_name())?))));
        }
    }
    tasks
}

/// What a restored process has beyond what was given.
fn beyond(pid: u32, tid: u32, given: &Given, host: &Host) -> Option<String> {
    let found = Given::of(tid)?;
    for (set, has) in found.capabilities.iter().enumerate() {
        // A program of root's has all of the bounding set; but where no_new_privs keeps a user from that, it
        // has what it began with.
        let most = given.capabilities[if given.no_new_privileges && set != 3 { 1 } else { 3 }];
        if has & !most != 0 {
            return Some(format!("capabilities {has:x} in set {set}, more than {most:x}"));
        }
    }
    if found.seccomp != given.seccomp {
        return Some(format!("seccomp {}", found.seccomp));
    }
    if given.no_new_privileges && !found.no_new_privileges {
        return Some("privileges to gain".into());
    }
    if given.no_new_privileges && given.capabilities[1] == 0 && found.users != given.users {
        return Some(format!("users {}", found.users));
    }
    if found.maps != given.maps {
        return Some(format!("ids {:?}", found.maps));
    }
    let more: Vec<&String> = found.mounts.difference(&given.mounts).collect();
    if !more.is_empty() {
        return Some(format!("mounts {more:?}"));
    }
    for name in NAMESPACES {
        let own = fs::read_link(format!("/proc/self/ns/{name}")).ok()?;
        let holder = fs::read_link(format!("/proc/{}/ns/{name}", host.pid())).ok()?;
        if [own, holder].iter().any(|of_host| of_host.to_string_lossy() == found.namespaces[name]) {
            return Some(format!("the host's namespace {name}"));
        }
    }
    let mounts = read(pid, "mountinfo")?;
    let ids: BTreeSet<&str> = mounts.lines().filter_map(|line| line.split(' ').next()).collect();
    let root = host.root().display().to_string();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let link = link.to_string_lossy().into_owned();
        let Ok(file) = fs::metadata(entry.path()) else { continue };
        if given.streams.contains(&(file.dev(), file.ino())) {
            continue;
        }
        let number = entry.file_name().to_string_lossy().into_owned();
        let info = read(pid, &format!("fdinfo/{number}")).unwrap_or_default();
        let Some(id) = field(&info, "mnt_id") else { continue };
        if link.contains("dormouse") || link.contains(&root) {
            return Some(format!("descriptor {number}, '{link}'"));
        }
        let is_path = link.starts_with('/') && !link.starts_with("/memfd:");
        if is_path && !link.ends_with(" (deleted)") && !ids.contains(id.as_str()) {
            return Some(format!("descriptor {number}, '{link}', of no mount of its own"));
        }
        if link.starts_with("mnt:") || link.starts_with("pid:") || link.starts_with("user:") {
            return Some(format!("descriptor {number}, '{link}'"));
        }
    }
    for name in ["exe", "cwd", "root"] {
        let Ok(link) = fs::read_link(format!("/proc/{pid}/{name}")) else { continue };
        let link = link.to_string_lossy().into_owned();
        if link.contains("dormouse") || link.contains(&root) {
            return Some(format!("{name} '{link}'"));
        }
    }
    let maps = read(pid, "maps")?;
    let line = maps.lines().find(|line| line.contains("dormouse") || line.contains(&root));
    line.map(|line| format!("memory '{line}'"))
}

/// The sections of a checkpoint and their checksums, as `format/write.rs` writes them.
fn encode(records: &Records) -> Vec<u8> {
    let json = |value: serde_json::Result<Vec<u8>>| value.expect("records are JSON");
    let sections = [
        ("about", json(serde_json::to_vec(&records.about))),
        ("process", json(serde_json::to_vec(&records.processes))),
        ("memory", json(serde_json::to_vec(&records.memories))),
        ("object", json(serde_json::to_vec(&records.objects))),
        ("page", json(serde_json::to_vec(&records.pages))),
    ];
    let mut out = b"DORMCKPT".to_vec();
    out.extend(dormouse_parcel::VERSION.to_le_bytes());
    out.extend((sections.len() as u32).to_le_bytes());
    let mut at = out.len() as u64 + sections.len() as u64 * 64;
    for (name, bytes) in &sections {
        let mut padded = [0; 16];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        out.extend(padded);
        out.extend(at.to_le_bytes());
        out.extend((bytes.len() as u64).to_le_bytes());
        out.extend(blake3::hash(bytes).as_bytes());
        at += bytes.len() as u64;
    }
    sections.iter().for_each(|(_, bytes)| out.extend(bytes));
    let whole = blake3::hash(&out);
    out.extend(whole.as_bytes());
    out
}

/// Random numbers: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }

    fn one<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// Values by the name of their field, of all checkpoints that there are.
type Donors = BTreeMap<String, Vec<Value>>;

fn collect(value: &Value, name: &str, donors: &mut Donors) {
    const OF_EACH_MAX: usize = 4000;
    let of_name = donors.entry(name.to_owned()).or_default();
    if of_name.len() < OF_EACH_MAX {
        of_name.push(value.clone());
    }
    match value {
        Value::Array(all) => all.iter().for_each(|value| collect(value, name, donors)),
        Value::Object(all) => all.iter().for_each(|(name, value)| collect(value, name, donors)),
        _ => {}
    }
}

/// Names of fields that hold contents, or that change nothing but whether the rest is looked at.
const DULL: [&str; 12] = [
    "extended",
    "chunks",
    "vdso_image",
    "auxv",
    "runs",
    "registers",
    "cpu",
    "cpu_state",
    "content",
    "data",
    "container",
    "image",
];
/// Names of fields by which an attacker would come further, chosen more often.
const BRIGHT: [&str; 22] = [
    "rseq",
    "address",
    "tid_address",
    "robust_list",
    "restart",
    "args",
    "path",
    "flags",
    "backing",
    "object",
    "descriptors",
    "capabilities",
    "root",
    "directory",
    "place",
    "credentials",
    "stopped",
    "namespace",
    "user",
    "mounts",
    "securebits",
    "no_new_privileges",
];

/// Places of values in a tree, by their path, with the name of their field.
fn places(value: &Value, at: &str, name: &str, out: &mut Vec<(String, String)>) {
    if DULL.contains(&name) {
        return;
    }
    out.push((at.to_owned(), name.to_owned()));
    match value {
        Value::Array(all) => {
            for (n, value) in all.iter().enumerate() {
                places(value, &format!("{at}/{n}"), name, out);
            }
        }
        Value::Object(all) => {
            for (name, value) in all {
                places(value, &format!("{at}/{name}"), name, out);
            }
        }
        _ => {}
    }
}

/// Changes one value; says which.
fn change(tree: &mut Value, random: &mut Random, donors: &Donors, program: u64) -> String {
    let mut all = Vec::new();
    for section in ["processes", "memories", "objects"] {
        places(&tree[section], &format!("/{section}"), section, &mut all);
    }
    let bright: Vec<&(String, String)> =
        all.iter().filter(|(_, name)| BRIGHT.contains(&name.as_str())).collect();
    let (at, name) = match random.below(2) {
        0 if !bright.is_empty() => (*random.one(&bright)).clone(),
        _ => random.one(&all).clone(),
    };
    let value = tree.pointer_mut(&at).expect("it was found there");
    let given = donors.get(&name).filter(|_| random.below(3) == 0);
    if let Some(given) = given {
        *value = random.one(given).clone();
        return format!("{at} = {value:.80}");
    }
    match value {
        Value::Null => {
            let given = donors.get(&name);
            *value = given.map_or(Value::from(0), |given| random.one(given).clone());
        }
        Value::Bool(is_so) => *is_so = !*is_so,
        Value::Number(number) => {
            let now = number.as_u64().unwrap_or_default();
            let chosen = [
                0,
                1,
                2,
                now.wrapping_add(1),
                now.wrapping_sub(1),
                now ^ 1 << random.below(64),
                now ^ 1 << random.below(12),
                u64::from(u32::MAX),
                u64::MAX,
                i64::MAX as u64,
                0x7fff_ffff_f000,
                program,
                program + 0x1000 + random.below(0x8000) as u64 * 32,
                program + 3 * (GIB / 4) + random.below(0x4000) as u64 * 4,
                program + GIB,
                random.below(64) as u64,
            ];
            *number = (*random.one(&chosen)).into();
        }
        Value::String(text) => {
            let number = random.below(48);
            let chosen = [
                format!("/proc/self/fd/{number}"),
                format!("/fds/{number}"),
                format!("/fds/{number}/x"),
                "/program".into(),
                "/here".into(),
                "/proc/self/exe".into(),
                "/proc/1/root".into(),
                "/proc/1/root/../..".into(),
                "/proc/self/ns/net".into(),
                "/proc/sys/kernel/core_pattern".into(),
                "/sys/fs/cgroup".into(),
                "/dev/mem".into(),
                "/dev/console".into(),
                "../../../../etc/shadow".into(),
                "/".into(),
                String::new(),
                format!("{text}/.."),
                "a\0b".into(),
            ];
            random.one(&chosen).clone_into(text);
        }
        Value::Array(all) => match random.below(4) {
            0 if !all.is_empty() => drop(all.remove(random.below(all.len()))),
            1 if !all.is_empty() => all.push(random.one(all).clone()),
            2 if all.len() > 1 => {
                let (one, other) = (random.below(all.len()), random.below(all.len()));
                all.swap(one, other);
            }
            _ => {
                let of_kind = |value: &&Value| !value.is_array();
                let given: Vec<&Value> =
                    donors.get(&name).into_iter().flatten().filter(of_kind).collect();
                if !given.is_empty() {
                    all.push((*random.one(&given)).clone());
                }
            }
        },
        Value::Object(_) => {
            let given = donors.get(&name);
            *value = given.map_or(Value::Null, |given| random.one(given).clone());
        }
    }
    format!("{at} = {value:.80}")
}

/// A workload, its checkpoint, and what it may have.
struct Subject {
    name: &'static str,
    dir: PathBuf,
    tree: Value,
    program: u64,
    given: Given,
}

/// A checkpoint of a workload, whose container has links that lead out of a path.
fn subject(host: &Host, name: &'static str, more: &[&str]) -> Subject {
    start(host, name, &[&["--net", "none"][..], more].concat());
    wait_for_line(host, name, "ready 0");
    let links = "ln -s /proc/self/fd /fds; ln -s /proc/self/exe /program; ln -s /proc/1/cwd /here";
    host.dm(&["exec", "--user", "0", name, "sh", "-c", links]).ok();
    let pid = host.inspect(name)["pid"].as_u64().expect("it runs") as u32;
    let given = Given::of(pid).expect("it runs");
    host.dm(&["checkpoint", name]).ok();
    let dir = newest(host, name);
    let reader = Reader::open(&dir).expect("it is whole");
    let tree = serde_json::to_value(reader.records()).expect("records are JSON");
    Subject { name, dir, tree, program: program_at(reader.records()), given }
}

/// Restores what is in a directory, looks at what has come of it, and ends it.
fn play(host: &Host, subject: &Subject, records: &[u8]) -> Result<bool, String> {
    let place = subject.dir.join("records");
    fs::write(&place, records).expect("it can be written");
    let limit = (20 * slowness()).to_string();
    let killer = ["timeout", "-s", "KILL", &limit];
    let command = host.dormouse_under(&killer, &["restore", subject.name]);
    let out = run(command, b"", Duration::from_secs(60));
    if out.status == 137 {
        return Err("the restore does not end".into());
    }
    if out.stderr.contains("panicked") || out.status > 128 {
        return Err(format!("the program has failed: {out}"));
    }
    let mut has_run = false;
    if out.status == 0 {
        let pid = host.inspect(subject.name)["pid"].as_u64().unwrap_or_default() as u32;
        let namespace = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap_or_default();
        let namespace = namespace.to_string_lossy().into_owned();
        for (pid, tid) in tasks_of(&namespace).into_iter().filter(|_| pid != 0) {
            has_run = true;
            if let Some(what) = beyond(pid, tid, &subject.given, host) {
                let name = read(tid, "comm").unwrap_or_default();
                return Err(format!("{} has {what}", name.trim()));
            }
        }
        host.dm(&["kill", subject.name]); // it may have ended by itself
    }
    host.wait_for_state(subject.name, "stopped");
    Ok(has_run)
}

fn number(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

#[test]
fn restore_of_changed_records_never_widens() {
    let host = host();
    let names = [
        "thread", "restart", "tree", "rights", "event", "file", "pipe", "inotify", "unix", "memfd",
        "aio", "joint", "ownfiles",
    ];
    let mut subjects: Vec<Subject> = names.map(|name| subject(&host, name, &[])).into();
    let user = ["--user", "1000:1000", "--security-opt", "no-new-privileges"];
    subjects.push(subject(&host, "socketpair", &user));
    let mut donors = Donors::new();
    for subject in &subjects {
        for section in ["processes", "memories", "objects"] {
            collect(&subject.tree[section], section, &mut donors);
        }
    }
    let seed = number("DORMOUSE_WIDEN_SEED").unwrap_or(1);
    let seconds = number("DORMOUSE_WIDEN_SECONDS").map(Duration::from_secs);
    let count = match (number("DORMOUSE_WIDEN_COUNT"), seconds) {
        (Some(count), _) => count,
        (None, Some(_)) => u64::MAX,
        (None, None) => 150,
    };
    let began = Instant::now();
    let (mut played, mut ran, mut refused) = (0, 0, 0);
    let first = number("DORMOUSE_WIDEN_FIRST").unwrap_or(0);
    for n in first..first.saturating_add(count) {
        if seconds.is_some_and(|most| began.elapsed() > most) {
            break;
        }
        // Each by itself: the seed and its number say all of it.
        let mut random = Random((seed << 32 | (n + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let subject = random.one(&subjects);
        let mut tree = subject.tree.clone();
        let mut changes = Vec::new();
        for _ in 0..=random.below(3) {
            changes.push(change(&mut tree, &mut random, &donors, subject.program));
        }
        // One that is of another type is no record at all.
        let Ok(records) = serde_json::from_value::<Records>(tree) else { continue };
        played += 1;
        match play(&host, subject, &encode(&records)) {
            Ok(true) => ran += 1,
            Ok(false) => refused += 1,
            Err(what) => panic!("seed {seed}, number {n}, {}: {what}\n{changes:#?}", subject.name),
        }
    }
    println!("{played} of changed records: {ran} ran, {refused} were refused or ended at once");
    assert!(ran > 0 && refused > 0, "{ran} ran, {refused} did not");
    for subject in &subjects {
        let records = serde_json::from_value(subject.tree.clone()).expect("they were records");
        let played = play(&host, subject, &encode(&records));
        assert_eq!(played, Ok(true), "{} as it was", subject.name);
    }
}
