//! A restore gives back what was saved: save(restore(save(x))) is save(x), and procfs shows the same
//! of every task before and after.
//!
//! Three checkpoints are compared field by field: the first leaves the container running, the second
//! ends its processes, the third is made of the restored ones. In between, a reader of procfs without
//! any code of crate `checkpoint` ([`dormouse_testkit::seen`]) compares all tasks. Differences
//! that are no fault are rows of two tables, [`OF_RECORDS`] and [`OF_PROCFS`], each with its reason. The first
//! table is that of crate `checkpoint`, which compares the records of a twin by it.
//! The page `docs/checkpoint.md` has the same rows.
//!
//! A workload that is started with the variable STILL stays in its first round. Some workloads have other
//! processes or threads that go on: of these, registers and contents of memory are not compared.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use dormouse_checkpoint::proof::{LOOKS_APART_NS, OF_RECORDS, facts};
use dormouse_parcel::Reader;
use dormouse_testkit::fact::{Difference, Expected, Facts, Rule, unexplained};
use dormouse_testkit::{Host, seen, soon, wait_until};

use super::{host, newest, start, wait_for_line};

const fn row(place: &'static str, rule: Rule, reason: &'static str) -> Expected {
    Expected { place, rule, reason }
}

/// Differences between what procfs shows before and after a restore that are no fault.
pub(super) const OF_PROCFS: &[Expected] = &[
    row("process/*/fd/*/info/it_value_ns", Rule::Falls(LOOKS_APART_NS), "time passes"),
    row("process/*/fd/*/info/ticks", Rule::Rises, "time passes"),
    row("process/*/fd/0/info/mount", Rule::Any, "the host's /dev/null becomes the container's"),
    row("process/*/fd/0/mode", Rule::Any, "the host's /dev/null becomes the container's"),
    row("process/*/fd/1/info/pos", Rule::Any, "output is appended to a log of the new start"),
    row("process/*/fd/2/info/pos", Rule::Any, "output is appended to a log of the new start"),
    row("process/*/fd/*/info/settime flags", Rule::Any, "absolute times are set as relative ones"),
    row(
        "process/*/fd/*/info/epoll/*/events",
        // EPOLLERR and EPOLLHUP; EPOLLEXCLUSIVE, EPOLLWAKEUP, EPOLLONESHOT and EPOLLET.
        Rule::Gains { bits: 0x18, beside: 0xf << 28 },
        "a spent item of EPOLLONESHOT whose file is not ready is armed for errors",
    ),
    row("process/*/fd/*/link", Rule::To("/dev/shm/linked"), "a removed name becomes the other one"),
    row(
        "process/*/area/*/what",
        Rule::To("rw-s /dev/shm/linked"),
        "a removed name becomes the other one",
    ),
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

/// The records of a checkpoint, and its pages, as facts.
pub(super) fn facts_of(dir: &Path) -> Facts {
    let reader = Reader::open(dir).expect("a whole checkpoint");
    facts(reader.records(), reader.pages()).expect("a whole checkpoint")
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
        // The trial restore of the engine finds what this comparison is to find.
        let failed = |why: String| match why.contains("a trial restore") {
            true => Failure::Lost(why),
            false => Failure::Refused(why),
        };
        looks.records.push(saves(&["checkpoint", name]).map_err(failed)?);
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
    (
        "procfile",
        row("process/*/fd/*/link", Rule::To("(deleted)"), "a later look at its name in /proc/net"),
    ),
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
    ("dispatch", &[], true),
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
    ("finished", &[], false),
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
    ("ownfiles", &[], true),
    ("owned", &["--cap-add", "SYS_ADMIN"], true),
    ("ownplace", &["--cap-add", "SYS_ADMIN"], true),
    ("pidfd", &[], true),
    ("procfile", &[], true),
    ("gone", &[], true),
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
    ("adopted", &[], true),
    ("autogroup", &[], false),
    ("halt", &[], false),
    ("hint", &[], false),
    ("memexe", &[], false),
    ("pipes", &[], false),
    ("seats", &[], false),
    ("policy", &[], true),
];

/// Workloads that are not compared, each with the reason.
const NOT_COMPARED: &[(&str, &str)] = &[
    ("ahead", "its threads write to all of a large memory all the time"),
    ("apart", "refused by name in each of its forms"),
    ("congestion", "needs a module of the kernel that few hosts have"),
    ("full", "a restored socket may have room, and the threads that wait for it end"),
    ("defer", "its requests are connections in a queue after a restore (docs/state.md)"),
    ("hog", "its memory grows, which tests of --oom need"),
    ("hugetlb", "needs huge pages of the host"),
    ("increment", "a memory workload with a time of its own for every step"),
    ("lazy", "a large memory, which is compared by the workload"),
    ("login", "needs a host without a login of its own, and the kernel numbers the sessions"),
    ("lost", "refused by name in each of its forms"),
    ("restart", "its waits, and the threads with them, end within seconds"),
    ("share", "a template of clones"),
    ("tcp", "sends and receives all the time"),
    ("ending", "sends and receives all the time"),
    ("ticking", "its timers expire all the time"),
    ("pair", "the kernel gives its links addresses of their own meanwhile"),
    ("sources", "of two mounts of one file system, either is made from the other"),
    ("stack", "the kernel gives its links addresses of their own meanwhile"),
    ("steady", "its processes compute and signal each other all the time"),
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
