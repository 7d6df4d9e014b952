//! A command that is killed at any of its steps leaves the state before it or the state after it.
//!
//! A step is a system call that changes something: strace(1) numbers them in one undisturbed run
//! and then, in a run for each, sends SIGKILL before that call is made. What is on disk and in the
//! kernel changes only by these calls, so this is every place where the command can be interrupted.
//! After each, the next command must work, the container must be in a state it could have been in,
//! the same command given again must do its work, and nothing may be left that was not there before:
//! mounts, cgroups, processes, files.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use dormouse_testkit::{Host, run, slowness, wait_until};

/// What changes something, or lets somebody else change it.
const CALLS: &str = "mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,\
    symlink,symlinkat,write,pwrite64,ftruncate,fallocate,mount,umount2,fsconfig,fsmount,fsopen,\
    move_mount,open_tree,mount_setattr,clone,clone3,vfork,sendmsg,bpf,setns,unshare,flock,fsync,\
    fdatasync,syncfs,fchmod,fchown,fchownat,setxattr,fsetxattr,pidfd_send_signal,kill,\
    copy_file_range";
const KILLED: i32 = 137;

/// A step: the call, and which one of its kind.
type Step = (String, u32);

/// The steps of a command, in order. It is run once.
fn steps(host: &Host, arguments: &[&str]) -> Vec<Step> {
    let log = host.dir().join("steps");
    let log = log.to_str().expect("paths of tests are UTF-8");
    let traced =
        host.dormouse_under(&["strace", "-o", log, "-e", &format!("trace={CALLS}")], arguments);
    run(traced, b"", Duration::from_secs(60)).ok();
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    let text = std::fs::read_to_string(log).expect("strace wrote its log");
    let names = text.lines().filter_map(|line| line.split_once('(')).map(|(name, _)| name);
    let number = |name: &str| {
        let count = seen.entry(name.to_owned()).or_default();
        *count += 1;
        (name.to_owned(), *count)
    };
    names.filter(|name| CALLS.split(',').any(|call| call == *name)).map(number).collect()
}

/// What grows when something is left behind.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    mounts: Vec<String>,
    cgroups: usize,
    processes: usize,
    id_slots: u64,
    addresses: u64,
    files: Vec<String>,
}

impl Counts {
    fn of(host: &Host) -> Self {
        let mut files = Vec::new();
        list(&host.root(), &mut files);
        let mut cgroups = Vec::new();
        host.cgroups().iter().for_each(|dir| list_dirs(dir, &mut cgroups));
        let mut mounts = host.mounts();
        mounts.sort();
        let info = host.dm(&["info", "--json"]).ok();
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let number = |name: &str| info[name].as_u64().expect("a number");
        Self {
            mounts,
            cgroups: cgroups.len(),
            processes: host.processes().len(),
            id_slots: number("id_slots"),
            addresses: number("addresses"),
            files,
        }
    }
}

/// Everything below a directory, as it lies on the disk.
fn list(dir: &Path, out: &mut Vec<String>) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        if path.is_dir() && !path.is_symlink() {
            list(&path, out);
        }
        out.push(path.display().to_string());
    }
    out.sort();
}

fn list_dirs(dir: &Path, out: &mut Vec<String>) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.is_dir()) {
        list_dirs(&path, out);
        out.push(path.display().to_string());
    }
}

/// One command and what surrounds it.
struct Verb {
    /// Commands that make what it acts on.
    before: &'static [&'static [&'static str]],
    /// It.
    command: &'static [&'static str],
    /// In which states `x` may be found afterwards; `none` if it need not be there.
    states: &'static [&'static str],
    /// Commands that must work afterwards, whatever became of it.
    after: &'static [&'static [&'static str]],
}

type Words = &'static [&'static str];

const RUN: Words = &["run", "-d", "--name", "x", "busybox", "sleep", "1000"];
const CREATE: Words = &["create", "--name", "x", "busybox", "sleep", "1000"];
const REMOVE: Words = &["rm", "--force", "--ignore", "x"];
const EXEC: Words = &["exec", "x", "true"];
const SERVE: Words =
    &["run", "-d", "--name", "x", "busybox", "httpd", "-f", "-p", "80", "-h", "/www"];
const SLEEP: Words = &["sleep", "x"];
const WAKE: Words = &["wake", "x"];
const RESTART: Words = &["restart", "--time", "0", "x"];
const COMMIT: Words = &["commit", "x", "new"];
const TAG: Words = &["tag", "busybox", "new"];
const RMI: Words = &["rmi", "new"];
const PRUNE: Words = &["prune", "--all"];

impl Verb {
    /// Kills it at each of its steps.
    fn survives(&self) {
        let host = Host::with_busybox();
        // What is shared stays as long as somebody runs.
        host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
        host.dm(&["run", "--rm", "busybox", "true"]).ok();
        let before = Counts::of(&host);
        let all = |commands: &[&[&str]]| commands.iter().for_each(|c| drop(host.dm(c).ok()));
        let clean = |what: &str| {
            let mut now = Counts::of(&host);
            let same = wait_until(Duration::from_secs(5) * slowness(), || {
                now = Counts::of(&host);
                now == before
            });
            assert!(same, "{what}: {}", difference(&before, &now));
        };
        all(self.before);
        let steps = steps(&host, self.command);
        all(self.after);
        clean("not killed at all");
        let mut killed = 0;
        for (number, (call, nth)) in steps.iter().enumerate() {
            let what = format!("{} killed at step {number}, {call} no. {nth}", self.command[0]);
            all(self.before);
            let inject = format!("inject={call}:signal=SIGKILL:when={nth}");
            let trace = format!("trace={call}");
            let tool = ["strace", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &inject];
            let out = run(host.dormouse_under(&tool, self.command), b"", Duration::from_secs(60));
            assert!([0, KILLED].contains(&out.status), "{what}: {out}");
            killed += usize::from(out.status == KILLED);
            let state = state_of_x(&host);
            assert!(self.states.contains(&state.as_str()), "{what}: x is {state}");
            for command in self.after {
                let out = host.dm(command);
                assert_eq!(out.status, 0, "{what}, then {command:?}: {out}");
            }
            clean(&what);
        }
        // Some calls are made only when something is new.
        assert!(killed * 10 >= steps.len() * 8, "{killed} of {} were killed", steps.len());
    }
}

/// The state of container `x`, by the list of all.
fn state_of_x(host: &Host) -> String {
    let list = host.dm(&["ps", "--all", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let found = list.as_array().expect("a list").iter().find(|c| c["name"] == "x");
    found.map_or("none", |x| x["state"].as_str().expect("a state")).to_owned()
}

fn difference(before: &Counts, now: &Counts) -> String {
    let more = |old: &[String], new: &[String]| -> Vec<String> {
        let added = new.iter().filter(|n| !old.contains(n)).map(|n| format!("+{n}"));
        let gone = old.iter().filter(|o| !new.contains(o)).map(|o| format!("-{o}"));
        added.chain(gone).collect()
    };
    format!(
        "mounts {:?}, cgroups {} to {}, processes {} to {}, id slots {} to {}, addresses {} to {}, \
         files {:#?}",
        more(&before.mounts, &now.mounts),
        before.cgroups,
        now.cgroups,
        before.processes,
        now.processes,
        before.id_slots,
        now.id_slots,
        before.addresses,
        now.addresses,
        more(&before.files, &now.files)
    )
}

#[test]
fn create_killed_anywhere() {
    let states = &["none", "created"];
    Verb { before: &[], command: CREATE, states, after: &[REMOVE, CREATE, REMOVE] }.survives();
}

#[test]
fn run_killed_anywhere() {
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: RUN, states, after: &[REMOVE, RUN, REMOVE] }.survives();
}

#[test]
fn start_killed_anywhere() {
    let states = &["created", "running", "stopped"];
    let after = &[RESTART, EXEC, REMOVE];
    Verb { before: &[CREATE], command: &["start", "x"], states, after }.survives();
}

#[test]
fn stop_killed_anywhere() {
    let states = &["running", "stopped"];
    let after = &[RESTART, EXEC, REMOVE];
    Verb { before: &[RUN], command: &["stop", "--time", "0", "x"], states, after }.survives();
}

#[test]
fn restart_killed_anywhere() {
    let states = &["running", "stopped"];
    Verb { before: &[RUN], command: RESTART, states, after: &[RESTART, EXEC, REMOVE] }.survives();
}

#[test]
fn rm_killed_anywhere() {
    let states = &["none", "running", "stopped"];
    Verb { before: &[RUN], command: &["rm", "--force", "x"], states, after: &[REMOVE] }.survives();
}

#[test]
fn verbs_for_the_running_killed_anywhere() {
    let (before, states) = (&[RUN], &["running"]);
    Verb { before, command: EXEC, states, after: &[EXEC, REMOVE] }.survives();
    let command = &["update", "--memory", "64m", "x"];
    Verb { before, command, states, after: &[EXEC, REMOVE] }.survives();
    let states = &["running", "stopped"];
    Verb { before, command: &["kill", "x"], states, after: &[REMOVE] }.survives();
    let states = &["running", "paused"];
    Verb { before, command: &["pause", "x"], states, after: &[REMOVE] }.survives();
    let before = &[RUN, &["pause", "x"]];
    Verb { before, command: &["unpause", "x"], states, after: &[REMOVE] }.survives();
}

#[test]
fn sleep_and_wake_killed_anywhere() {
    let states = &["running", "asleep"];
    Verb { before: &[SERVE], command: SLEEP, states, after: &[EXEC, WAKE, REMOVE] }.survives();
    let before = &[SERVE, SLEEP];
    Verb { before, command: WAKE, states, after: &[WAKE, EXEC, REMOVE] }.survives();
    let states = &["asleep", "stopped"];
    let command = &["stop", "x"];
    Verb { before, command, states, after: &[RESTART, EXEC, REMOVE] }.survives();
}

#[test]
fn rename_killed_anywhere() {
    let after = &[REMOVE, &["rm", "--force", "--ignore", "y"], CREATE, REMOVE];
    let states = &["created", "none"];
    Verb { before: &[CREATE], command: &["rename", "x", "y"], states, after }.survives();
}

#[test]
fn verbs_of_images_killed_anywhere() {
    let states = &["none", "running"];
    // Frozen when it was killed, it is thawed by the next command.
    Verb { before: &[RUN], command: COMMIT, states, after: &[COMMIT, RMI, REMOVE, PRUNE] }
        .survives();
    Verb { before: &[], command: TAG, states, after: &[TAG, RMI, PRUNE] }.survives();
    Verb { before: &[TAG], command: RMI, states, after: &[TAG, RMI, PRUNE] }.survives();
    let before = &[CREATE, COMMIT, REMOVE, RMI];
    Verb { before, command: PRUNE, states, after: &[PRUNE] }.survives();
}
