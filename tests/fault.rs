//! A command that is killed at any of its steps leaves the state before it or the state after it.
//!
//! A step is a system call that changes something ([`Led`]). One undisturbed run counts the steps.
//! Then each step has a run of its own, in which SIGKILL comes before that call is made. The state
//! on disk and in the kernel changes only by these calls, so the steps are all places where the
//! command can be interrupted. After each kill:
//!
//! - the next command must work,
//! - the container must be in a possible state,
//! - the same command, given again, must succeed,
//! - nothing may be left that was not there before: mounts, cgroups, processes, files.
//!
//! Other processes continue when a command is killed: its newborn exits, the keeper reaps the
//! newborn and starts its cleanup, the next command runs. Their order is chance, so from step to
//! step another of them is delayed for a moment ([`Slow`]). With `DORMOUSE_FAULT=all` every step is
//! tested in every order, with `DORMOUSE_FAULT=third` every third step in one. The keeper is killed
//! at each of its own steps while it serves a command. All processes are killed at random times while
//! random commands run: `DORMOUSE_FAULT_KILLS` kills, from `DORMOUSE_FAULT_SEED`.

mod created;
mod spares;

use crate::bundle;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bundle::{Bundle, Oci};
use dormouse_testkit::{
    Host, Led, dormouse, fault_stride, image, leftover, run, slowness, soon, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

/// The delay of a process.
const HELD: Duration = Duration::from_millis(10);

/// The process that is delayed when a command is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slow {
    Nothing,
    /// The process that the keeper has cloned and that waits for its start.
    Newborn,
    Keeper,
    /// The next command.
    Next,
}

impl Slow {
    const ALL: [Self; 4] = [Self::Nothing, Self::Newborn, Self::Keeper, Self::Next];

    /// The orders in which a step is tested.
    fn of_step(number: usize) -> Vec<Self> {
        match std::env::var("DORMOUSE_FAULT").as_deref() {
            Ok("all") => Self::ALL.to_vec(),
            _ => vec![Self::ALL[number % Self::ALL.len()]],
        }
    }

    /// Stops the process to delay, kills the command, and continues the process a moment later.
    fn kill(self, led: &mut Led, keeper: u32) {
        let held: Vec<u32> = match self {
            Self::Newborn => newborns(keeper),
            Self::Keeper => vec![keeper],
            Self::Nothing | Self::Next => Vec::new(),
        };
        held.iter().for_each(|pid| signal(*pid, Signal::STOP));
        led.kill();
        match self {
            Self::Nothing => {}
            Self::Next => thread::sleep(HELD),
            Self::Newborn | Self::Keeper => drop(thread::spawn(move || {
                thread::sleep(HELD);
                held.iter().for_each(|pid| signal(*pid, Signal::CONT));
            })),
        }
    }
}

/// Sends a signal to a process, which may have ended.
fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Pid, name and parent of all processes.
fn processes() -> Vec<(u32, String, u32)> {
    let one = |entry: std::fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let text = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
        Some((pid, name.to_owned(), rest.split_whitespace().nth(1)?.parse().ok()?))
    };
    std::fs::read_dir("/proc").expect("procfs").flatten().filter_map(one).collect()
}

const KEEPER: &str = "dormouse-keeper";
const VAULT: &str = "dormouse-vault";

/// Children of the keeper before their execve.
fn newborns(keeper: u32) -> Vec<u32> {
    let all = processes().into_iter();
    all.filter(|(_, name, parent)| *parent == keeper && name == KEEPER).map(|p| p.0).collect()
}

/// Runs a command up to its step `number` (from 0). Returns `None` if the command has fewer steps.
fn lead_to(host: &Host, arguments: &[&str], number: usize) -> Option<(Led, &'static str)> {
    let mut led = Led::start(&host.dormouse(arguments), &dormouse());
    for _ in 0..number {
        led.next_step()?;
    }
    let call = led.next_step()?;
    Some((led, call))
}

/// Counts of everything that a leftover would increase.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    mounts: Vec<String>,
    cgroups: usize,
    processes: Vec<String>,
    id_slots: u64,
    addresses: u64,
    /// Devices with classes of traffic.
    shaped: usize,
    /// Devices in the stack of the domain.
    devices: usize,
    files: Vec<String>,
    /// Files on loop devices.
    disks: Vec<String>,
    /// Loop devices with rates in the root of the blkio hierarchy.
    rates: Vec<String>,
}

impl Counts {
    pub(crate) fn of(host: &Host) -> Self {
        let mut files = Vec::new();
        list(&host.root(), &mut files);
        // Files that come and go with the keeper, which outlives its last child for a moment, and
        // locks, which are created at first use and stay. After some hundred lives their charges become balances, of
        // which those of removed containers move to root when accounts are shown.
        let not_counted = [
            "/keeper.sock",
            "/vault.sock",
            "/spares.sock",
            "/lib/custody",
            "/lib/spares",
            "/run/warm",
            ".lock",
        ];
        files.retain(|path| not_counted.iter().all(|end| !path.ends_with(end)));
        files.retain(|path| {
            !path.contains("/lib/accounts/balances/") && !path.ends_with("/lib/accounts/lock")
        });
        // A tmpfs shared by containers stays mounted until the last container ends. The directories of
        // a container below it do not.
        let is_shared = |path: &String| {
            let parent = Path::new(path).parent();
            parent.is_some_and(|parent| parent == host.root().join("run/tmpfs"))
        };
        files.retain(|path| !is_shared(path));
        let mut cgroups = Vec::new();
        host.cgroups().iter().for_each(|dir| list_dirs(dir, &mut cgroups));
        let mut processes = processes_of(host, &cgroups);
        // Settlers, wakers and the nursery rest for a second before they exit.
        let rests = |line: &String| {
            [" settle", " wake", " nursery"].iter().any(|verb| line.ends_with(verb))
        };
        processes.retain(|line| !rests(line));
        for one in [KEEPER, VAULT] {
            if let Some(at) = processes.iter().position(|line| *line == format!("[{one}]")) {
                processes.remove(at);
            }
        }
        processes.sort();
        let mut mounts = host.mounts();
        // The namespace is a copy, with mounts of tests that ran then; they go away with their directories.
        let scratch = [host.dir().parent().expect("a directory"), Path::new("/var/tmp")];
        let is_elsewhere = |mount: &str| {
            let mount = Path::new(mount);
            !mount.starts_with(host.dir()) && scratch.iter().any(|dir| mount.starts_with(dir))
        };
        mounts.retain(|mount| !is_shared(mount) && !is_elsewhere(mount));
        mounts.sort();
        let info = host.dm(&["info", "--json"]).ok();
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let number = |name: &str| info[name].as_u64().expect("a number");
        Self {
            mounts,
            cgroups: cgroups.len(),
            processes,
            id_slots: number("id_slots"),
            addresses: number("addresses"),
            shaped: host.sh("ip link show").ok().matches(" qdisc htb ").count(),
            devices: devices_of(host),
            files,
            disks: crate::disk::attached(host),
            rates: crate::disk_rates::of_root(host),
        }
    }
}

fn devices_of(host: &Host) -> usize {
    let net = host.root().join("run/domains/default/net");
    match net.exists() {
        true => {
            host.sh(&format!("nsenter --net={} ip -o link", net.display())).stdout.lines().count()
        }
        false => 0,
    }
}

/// Command lines of the processes on a host and in its containers. After the keeper was killed,
/// container processes are no longer descendants of a known process.
fn processes_of(host: &Host, cgroups: &[String]) -> Vec<String> {
    let mut all: BTreeMap<u32, String> = host.processes().into_iter().collect();
    for cgroup in cgroups {
        let pids = std::fs::read_to_string(format!("{cgroup}/cgroup.procs")).unwrap_or_default();
        for pid in pids.lines().filter_map(|line| line.parse().ok()) {
            let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
            let line = String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned();
            all.entry(pid).or_insert(line);
        }
    }
    all.into_values().collect()
}

/// All paths below a directory, without following links.
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

/// A command and its surroundings.
pub(crate) struct Verb {
    /// Commands that create the objects of the command.
    pub(crate) before: &'static [&'static [&'static str]],
    /// The command under test.
    pub(crate) command: &'static [&'static str],
    /// Possible states of `x` afterwards; `none` means that `x` need not exist.
    pub(crate) states: &'static [&'static str],
    /// Commands that must work afterwards, in each of these states.
    pub(crate) after: &'static [&'static [&'static str]],
}

pub(crate) type Words = &'static [&'static str];

const RUN: Words = &["run", "-d", "--name", "x", "busybox", "sleep", "1000"];
/// It removes itself, which is settled behind the answer.
const RUN_ONCE: Words = &["run", "--rm", "--name", "x", "busybox", "true"];
const LIMITED: Words =
    &["run", "-d", "--name", "x", "--memory", "64m", "--cpus", "1", "busybox", "sleep", "1000"];
const SHAPED: Words =
    &["run", "-d", "--name", "x", "--net-ceil", "8mbit", "busybox", "sleep", "1000"];
const COUNTED: Words = &["run", "-d", "--name", "x", "--sockets", "8", "busybox", "sleep", "1000"];
const PRIVATE: Words =
    &["run", "-d", "--name", "x", "--net", "private", "busybox", "httpd", "-f", "-h", "/www"];
const CREATE: Words = &["create", "--name", "x", "busybox", "sleep", "1000"];
const START: Words = &["start", "x"];
pub(crate) const REMOVE: Words = &["rm", "--force", "--ignore", "x"];
pub(crate) const EXEC: Words = &["exec", "x", "true"];
const SERVE: Words =
    &["run", "-d", "--name", "x", "busybox", "httpd", "-f", "-p", "80", "-h", "/www"];
/// With so much memory that part of it is restored after the processes.
const SERVE_LARGE: Words =
    &["run", "-d", "--name", "x", "busybox", "probe", "count", "0.0.0.0", "80", "16000"];
/// Waits until the server listens: an active container is woken at once.
pub(crate) const ASK: Words =
    &["exec", "x", "sh", "-c", "until probe ask 127.0.0.1 80; do :; done"];
pub(crate) const SLEEP: Words = &["sleep", "x"];
/// Answers each connection, as [`ASK`] waits for.
const COUNT: Words = &["run", "-d", "--name", "x", "busybox", "probe", "count", "0.0.0.0", "80"];
const COUNT_OTHER: Words =
    &["run", "-d", "--name", "y", "busybox", "probe", "count", "0.0.0.0", "80"];
const ASK_OTHER: Words = &["exec", "y", "sh", "-c", "until probe ask 127.0.0.1 80; do :; done"];
const REMOVE_OTHER: Words = &["rm", "--force", "--ignore", "y"];
const SLEEP_WARM: Words = &["sleep", "--warm", "x"];
const DROWSE: Words = &["sleep", "--drowsy", "x"];
pub(crate) const WAKE: Words = &["wake", "x"];
const PAUSE: Words = &["pause", "x"];
const UNPAUSE: Words = &["unpause", "x"];
const RESTART: Words = &["restart", "--time", "0", "x"];
const COMMIT: Words = &["commit", "x", "new"];
const TAG: Words = &["tag", "busybox", "new"];
const RMI: Words = &["rmi", "new"];
const PRUNE: Words = &["prune", "--all"];

impl Verb {
    /// Kills the command at each of its steps.
    fn survives(&self) {
        self.survives_in(&Scene::new());
    }

    fn survives_in(&self, scene: &Scene) {
        let killed = self.survives_with(scene, fault_stride(), &|_| {}, &|_| {});
        assert!(killed > 0, "{}: it makes no step", self.command[0]);
    }

    /// The same at each `stride`th step, with further checks: `at_kill`, and `at_end` of each round. Returns the number
    /// of kills.
    pub(crate) fn survives_with(
        &self,
        scene: &Scene,
        stride: usize,
        at_kill: &dyn Fn(&str),
        at_end: &dyn Fn(&str),
    ) -> usize {
        let (host, what) = (&scene.host, self.command[0]);
        // The first time makes new objects.
        scene.all(self.before);
        host.dm(self.command);
        self.assert_usable(scene, &format!("{what} without a kill"));
        let keeper = host.keeper().expect("a keeper");
        let (mut number, mut killed, mut ended) = (0, 0, 0);
        // How often a wait looks again depends on the load: some runs end before the last step of
        // others.
        while ended < Slow::ALL.len() {
            for slow in Slow::of_step(number) {
                scene.all(self.before);
                let mut what = format!("{what} killed at step {number}");
                match lead_to(host, self.command, number) {
                    Some((mut led, call)) => {
                        what = format!("{what}, {call}, slow: {slow:?}");
                        slow.kill(&mut led, keeper);
                        (killed, ended) = (killed + 1, 0);
                    }
                    None => ended += 1,
                }
                at_kill(&what);
                self.assert_usable(scene, &what);
                at_end(&what);
            }
            number += stride;
        }
        killed
    }

    /// Kills the keeper at each step that it makes while the command runs.
    fn survives_its_keeper(&self) {
        self.survives_its_keeper_in(&Scene::new());
    }

    fn survives_its_keeper_in(&self, scene: &Scene) {
        let mut number = 0;
        let host = &scene.host;
        loop {
            scene.all(self.before);
            // A keeper that other commands have killed is replaced by the next command that needs
            // one.
            host.dm(&["exec", "other", "true"]).ok();
            let pid = host.keeper().expect("a keeper");
            let command = host.dormouse(self.command);
            let mut led = Led::seize(pid);
            let waiter = thread::spawn(move || {
                let out = run(command, b"", Duration::from_secs(60));
                signal(pid, Signal::WINCH);
                out
            });
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            let what =
                format!("the keeper killed in {} at step {number}, {call:?}", self.command[0]);
            if call.is_some() {
                led.kill();
            }
            led.detach();
            let out = waiter.join().expect("the command ends");
            assert!(out.status != 101 && out.status < 128, "{what}: {out}");
            self.assert_usable(scene, &what);
            if call.is_none() {
                break;
            }
            number += fault_stride();
        }
        assert!(number > 0, "{}: the keeper makes no step", self.command[0]);
    }

    fn assert_usable(&self, scene: &Scene, what: &str) {
        let state = state_of_x(&scene.host);
        assert!(self.states.contains(&state.as_str()), "{what}: x is {state}");
        let resume: &[Words] = if state == "paused" { &[UNPAUSE] } else { &[] };
        for command in resume.iter().chain(self.after) {
            let out = scene.host.dm(command);
            assert_eq!(out.status, 0, "{what}, then {command:?}: {out}");
        }
        scene.is_clean(what);
    }
}

/// A host with a running container, so that shared objects stay.
pub(crate) struct Scene {
    pub(crate) host: Host,
    pub(crate) before: Counts,
}

impl Scene {
    /// Without spares, so that each start has the same steps.
    pub(crate) fn new() -> Self {
        Self::with("[spares]\nkeep = 0\n")
    }

    /// With warm sleepers.
    fn with_warm() -> Self {
        Self::with("[spares]\nkeep = 0\n[sleep]\nwarm = 1\n")
    }

    fn with_spares() -> Self {
        Self::with("[spares]\nkeep = 8\n")
    }

    fn with(settings: &str) -> Self {
        let host = Host::with_busybox();
        std::fs::create_dir_all(host.root().join("etc")).expect("a directory");
        std::fs::write(host.root().join("etc/config.toml"), settings).expect("written");
        host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
        // With views, whose file system stays.
        host.dm(&["run", "--rm", "--memory", "64m", "busybox", "true"]).ok();
        // ORDER: a spare has a newborn, which would be among the processes that were there before.
        host.await_settlers();
        let before = Counts::of(&host);
        Self { host, before }
    }

    pub(crate) fn all(&self, commands: &[&[&str]]) {
        commands.iter().for_each(|command| drop(self.host.dm(command).ok()));
    }

    /// Waits until everything is as before.
    fn is_clean(&self, what: &str) {
        let mut now = Counts::of(&self.host);
        let same = wait_until(soon(), || {
            now = Counts::of(&self.host);
            now == self.before
        });
        assert!(same, "{what}: {}", difference(&self.before, &now));
    }
}

/// Returns the state of container `x` from the list of all containers.
pub(crate) fn state_of_x(host: &Host) -> String {
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
        "mounts {:?}, cgroups {} to {}, processes {} and {:?}, id slots {} to {}, addresses {} to {}, \
         shaped devices {} to {}, devices {} to {}, files {:#?}, disks {:?}, rates {:?}",
        more(&before.mounts, &now.mounts),
        before.cgroups,
        now.cgroups,
        before.processes.len(),
        more(&before.processes, &now.processes),
        before.id_slots,
        now.id_slots,
        before.addresses,
        now.addresses,
        before.shaped,
        now.shaped,
        before.devices,
        now.devices,
        more(&before.files, &now.files),
        more(&before.disks, &now.disks),
        more(&before.rates, &now.rates)
    )
}

/// Random numbers, the same for the same seed (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn pick<'p, T: ?Sized>(&mut self, from: &[&'p T]) -> &'p T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Returns a command for one of three containers.
    fn command(&mut self) -> Vec<&'static str> {
        let names: [&str; 3] = ["x", "y", "z"];
        let (name, other) = (self.pick(&names), self.pick(&names));
        let words: &[&str] = match self.below(24) {
            0..=4 => &["run", "-d", "--name", name, "busybox", "httpd", "-f", "-h", "/www"],
            5 => &["run", "--rm", "--name", name, "busybox", "sleep", "0.01"],
            6 => &["run", "-d", "--restart", "always", "--name", name, "busybox", "sleep", "0.02"],
            7 => &["create", "--name", name, "busybox", "sleep", "1000"],
            8 | 9 => &["start", name],
            10 => &["stop", "--time", "0", name],
            11 => &["restart", "--time", "0", name],
            12 => &["kill", name],
            13 => &["pause", name],
            14 => &["unpause", name],
            15 => &["rm", "--force", "--ignore", name],
            16 => &["exec", name, "true"],
            17 => &["update", "--memory", "64m", name],
            18 => &["rename", name, other],
            19 => &["sleep", name],
            20 => &["sleep", "--warm", name],
            21 => &["wake", name],
            22 => &["commit", name, "new"],
            _ => &["prune"],
        };
        // Names are replaced by those of the array above, which have the right lifetime.
        words.iter().map(|word| *names.iter().find(|n| **n == *word).unwrap_or(word)).collect()
    }
}

/// Kills the keeper, a helper process or the command, and waits for the command.
fn strike(host: &Host, command: &mut Child, random: &mut Random) {
    let victim = match random.below(10) {
        0 => host.keeper(),
        1 => {
            let is_helper = |(_, line): &(u32, String)| line.contains(" internal ");
            host.processes().into_iter().find(is_helper).map(|p| p.0)
        }
        _ => None,
    };
    match victim {
        Some(pid) => signal(pid, Signal::KILL),
        None => drop(command.kill()), // may have ended already
    }
    let ended = wait_until(Duration::from_secs(60) * slowness(), || {
        command.try_wait().expect("our child").is_some()
    });
    assert!(ended, "the command does not end");
}

#[test]
fn host_survives_random_kills_of_all_processes() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
    };
    let (kills, seed) = (number("DORMOUSE_FAULT_KILLS", 500), number("DORMOUSE_FAULT_SEED", 1));
    println!("seed {seed}, {kills} kills");
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let scene = Scene::with("[spares]\nkeep = 8\n[sleep]\nwarm = 2\n");
    let host = &scene.host;
    let mut history: Vec<String> = Vec::new();
    for kill in 1..=kills {
        let words = random.command();
        let mut command = host.dormouse(&words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("busybox starts");
        // Most commands take 3 to 40 ms.
        let at_most = 10 + random.below(6);
        let after_us = random.below(1 << at_most);
        thread::sleep(Duration::from_micros(after_us));
        strike(host, &mut child, &mut random);
        history.push(format!("{} ({after_us} us)", words.join(" ")));
        if kill % 50 != 0 && kill != kills {
            continue;
        }
        let what = format!("seed {seed}, kill {kill}, after {history:#?}\n");
        let out = host.dm(&["ps", "--all", "--json"]);
        assert_eq!(out.status, 0, "{what}{out}");
        for name in ["x", "y", "z"] {
            let out = host.dm(&["rm", "--force", "--ignore", name]);
            assert_eq!(out.status, 0, "{what}{out}");
        }
        let out = host.dm(&["prune", "--all"]);
        assert_eq!(out.status, 0, "{what}{out}");
        assert_eq!(host.dm(&["exec", "other", "true"]).status, 0, "{what}");
        scene.is_clean(&what);
        history.clear();
    }
}

#[test]
fn commands_survive_keeper_killed_at_any_step() {
    let states = &["none", "running"];
    Verb { before: &[], command: RUN, states, after: &[REMOVE, RUN, EXEC, REMOVE] }
        .survives_its_keeper();
    let states = &["none", "running", "stopped"];
    Verb { before: &[], command: RUN_ONCE, states, after: &[REMOVE, RUN_ONCE, RUN, REMOVE] }
        .survives_its_keeper();
    let (before, states) = (&[RUN], &["running"]);
    Verb { before, command: EXEC, states, after: &[EXEC, REMOVE] }.survives_its_keeper();
    let (states, after) = (&["running", "stopped"], &[RESTART, EXEC, REMOVE]);
    let command = &["stop", "--time", "0", "x"];
    Verb { before, command, states, after }.survives_its_keeper();
    let states = &["none", "running", "stopped"];
    Verb { before, command: &["rm", "--force", "x"], states, after: &[REMOVE, RUN, REMOVE] }
        .survives_its_keeper();
    let (before, states) = (&[SERVE], &["running", "asleep"]);
    Verb { before, command: SLEEP, states, after: &[EXEC, WAKE, REMOVE] }.survives_its_keeper();
    let before = &[SERVE, SLEEP];
    Verb { before, command: WAKE, states, after: &[WAKE, EXEC, REMOVE] }.survives_its_keeper();
}

#[test]
fn create_survives_kill_at_any_step() {
    let states = &["none", "created"];
    Verb { before: &[], command: CREATE, states, after: &[REMOVE, CREATE, REMOVE] }.survives();
}

#[test]
fn run_survives_kill_at_any_step() {
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: RUN, states, after: &[REMOVE, RUN, REMOVE] }.survives();
}

#[test]
fn run_that_removes_itself_survives_kill_at_any_step() {
    let states = &["none", "created", "running", "stopped"];
    let after = &[REMOVE, RUN_ONCE, RUN, REMOVE];
    Verb { before: &[], command: RUN_ONCE, states, after }.survives();
}

/// Runs a container that removes itself, and kills the keeper when the container is withdrawn and not settled.
fn leave_withdrawn(host: &Host) {
    let start = || Led::start(&host.dormouse(RUN_ONCE), &dormouse());
    let mut led = start();
    let renames = std::iter::from_fn(|| led.next_step()).filter(|call| *call == "rename").count();
    host.await_removals();
    // The last one withdraws the container.
    let mut led = start();
    for _ in 0..renames {
        while led.next_step().expect("as many steps") != "rename" {}
    }
    led.next_step().expect("further steps");
    let keeper = host.keeper().expect("a keeper");
    signal(keeper, Signal::KILL);
    assert!(wait_until(soon(), || host.keeper() != Some(keeper)), "the keeper ends");
    while led.next_step().is_some() {}
    let dead = std::fs::read_dir(host.root().join("lib/pending")).expect("a directory");
    assert_eq!(dead.count(), 1, "withdrawn");
}

/// The next command settles a withdrawn container whose keeper was killed. It may be killed itself.
#[test]
fn settling_of_withdrawn_container_survives_kill_at_any_step() {
    let scene = Scene::new();
    let disk = rustix::fs::statvfs(scene.host.dir()).expect("a file system");
    let is_full = disk.f_bavail < disk.f_blocks / 3 && disk.f_bavail * disk.f_frsize < 40 << 30;
    if is_full || disk.f_favail < disk.f_files / 3 {
        eprintln!("SKIPPED: the disk is so full that containers are settled before the answer");
        return;
    }
    let verb = Verb { before: &[], command: &["ps"], states: &["none"], after: &[RUN, REMOVE] };
    let mut number = 0;
    loop {
        leave_withdrawn(&scene.host);
        let Some((mut led, call)) = lead_to(&scene.host, verb.command, number) else { break };
        let what = format!("ps killed at step {number}, {call}");
        led.kill();
        // Its name is free meanwhile.
        assert_eq!(state_of_x(&scene.host), "none", "{what}");
        verb.assert_usable(&scene, &what);
        scene.host.dm(&["exec", "other", "true"]).ok();
        number += fault_stride();
    }
    verb.assert_usable(&scene, "ps without a kill");
    assert!(number > 20, "{number} steps settle a container");
}

/// Returns the ids of all spares, with those that are being made.
fn spares(host: &Host) -> Vec<String> {
    let all = std::fs::read_dir(host.root().join("lib/spares")).into_iter().flatten().flatten();
    all.map(|entry| entry.file_name().into_string().expect("an id")).collect()
}

/// Starts containers at once: one after the other, they may be more than a second apart.
fn come_and_go(host: &Host, run: &[&str]) {
    let starts = [(); 3].map(|()| {
        let mut start = host.dormouse(run);
        start.stdin(Stdio::null()).spawn().expect("it starts")
    });
    for mut start in starts {
        assert!(start.wait().expect("it ends").success());
    }
}

/// The nursery, once containers come and go.
fn nursery(host: &Host) -> u32 {
    let mut found = None;
    let is_found = wait_until(soon(), || {
        come_and_go(host, &["run", "--rm", "busybox", "true"]);
        let is_it = |(_, line): &(u32, String)| line.ends_with(" internal nursery");
        found = host.processes().into_iter().find(is_it).map(|(pid, _)| pid);
        found.is_some()
    });
    assert!(is_found, "no nursery: {:?}", host.processes());
    found.expect("a pid")
}

/// Starts containers until spares are ready, and returns them.
fn stock(host: &Host) -> Vec<String> {
    spares::stock_with(host, &["run", "--rm", "busybox", "true"])
}

/// Whether one of these spares is a container, or one in creation.
fn is_adopted(host: &Host, spares: &[String]) -> bool {
    let lib = host.root().join("lib");
    let is_there = |dir: &str, id: &String| lib.join(format!("{dir}{id}")).exists();
    spares.iter().any(|id| is_there("pending/new-", id) || is_there("containers/", id))
}

const ONCE: Verb = Verb {
    before: &[],
    command: RUN_ONCE,
    states: &["none", "created", "running", "stopped"],
    after: &[REMOVE, RUN_ONCE, RUN, REMOVE],
};

/// The command is killed before and after it has adopted a spare.
#[test]
fn run_with_spare_survives_kill_at_any_step() {
    let scene = Scene::with_spares();
    let keeper = scene.host.keeper().expect("a keeper");
    let mut adopted = 0;
    for number in (0..).step_by(fault_stride()) {
        let there = stock(&scene.host);
        let Some((mut led, call)) = lead_to(&scene.host, RUN_ONCE, number) else { break };
        adopted += usize::from(is_adopted(&scene.host, &there));
        let slow = Slow::of_step(number)[0];
        slow.kill(&mut led, keeper);
        ONCE.assert_usable(&scene, &format!("run killed at step {number}, {call}, slow: {slow:?}"));
    }
    assert!(adopted * fault_stride() > 5, "{adopted} runs had adopted a spare");
}

/// The nursery is killed at each step of making and releasing spares, while commands take them.
#[test]
fn big_commands_survive_nursery_killed_at_any_step() {
    let scene = Scene::with_spares();
    let host = &scene.host;
    // All steps of several spares are many.
    let stride = if std::env::var("DORMOUSE_FAULT").as_deref() == Ok("all") { 1 } else { 5 };
    let mut killed = 0;
    for number in (0..).step_by(stride) {
        // It ends a second after the last request.
        let mut led = std::iter::repeat_with(|| Led::seize_if_alive(nursery(host)))
            .flatten()
            .next()
            .expect("an endless iterator");
        let commands = [(); 3].map(|()| host.dormouse(&["run", "--rm", "busybox", "true"]));
        let waiter =
            thread::spawn(|| commands.map(|command| run(command, b"", Duration::from_secs(60))));
        let call = (0..=number).try_fold("", |_, _| led.next_step());
        let what = format!("the nursery killed at step {number}, {call:?}");
        if call.is_some() {
            led.kill();
        }
        led.detach();
        for out in waiter.join().expect("the commands end") {
            assert_eq!(out.status, 0, "{what}: {out}");
        }
        ONCE.assert_usable(&scene, &what);
        if call.is_none() {
            break;
        }
        killed += 1;
    }
    assert!(killed * stride > 100, "{killed} kills");
}

/// The keeper is killed at each of its steps while spares are made and taken.
#[test]
fn big_spares_survive_keeper_killed_at_any_step() {
    let scene = Scene::with_spares();
    let host = &scene.host;
    for number in 0..40 {
        host.dm(&["exec", "other", "true"]).ok();
        stock(host);
        let mut keeper = None;
        // One that was killed is replaced in a moment.
        assert!(wait_until(soon(), || {
            keeper = host.keeper();
            keeper.is_some()
        }));
        let pid = keeper.expect("a keeper");
        let mut led = Led::seize(pid);
        let command = host.dormouse(RUN_ONCE);
        let waiter = thread::spawn(move || {
            let out = run(command, b"", Duration::from_secs(60));
            signal(pid, Signal::WINCH);
            out
        });
        let call = (0..=number).try_fold("", |_, _| led.next_step());
        let what = format!("the keeper killed beside spares at step {number}, {call:?}");
        if call.is_some() {
            led.kill();
        }
        led.detach();
        let out = waiter.join().expect("the command ends");
        assert!(out.status != 101 && out.status < 128, "{what}: {out}");
        ONCE.assert_usable(&scene, &what);
        if call.is_none() {
            break;
        }
    }
}

#[test]
fn run_with_views_survives_kill_at_any_step() {
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: LIMITED, states, after: &[REMOVE, LIMITED, REMOVE] }.survives();
}

/// Each container is the first of its domain with a contract for the network, and the last.
#[test]
fn run_with_bandwidth_survives_kill_at_any_step() {
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: SHAPED, states, after: &[REMOVE, SHAPED, REMOVE] }.survives();
}

/// The first container of an instance that counts sockets, and the last.
#[test]
fn run_sleep_and_wake_with_limit_of_sockets_survive_kill_at_any_step() {
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: COUNTED, states, after: &[REMOVE, COUNTED, REMOVE] }.survives();
    let states = &["running", "asleep"];
    Verb {
        before: &[COUNTED],
        command: &["sleep", "x"],
        states,
        after: &[&["wake", "x"], EXEC, REMOVE],
    }
    .survives();
}

#[test]
fn big_update_and_rm_of_limit_of_sockets_survive_kill_at_any_step() {
    let states = &["running"];
    let command = &["update", "--sockets", "9", "x"];
    Verb { before: &[RUN], command, states, after: &[EXEC, REMOVE, COUNTED, REMOVE] }.survives();
    let states = &["none", "running", "stopped"];
    let command = &["rm", "--force", "x"];
    Verb { before: &[COUNTED], command, states, after: &[REMOVE, COUNTED, REMOVE] }.survives();
}

/// The domain has other containers, so a device that is left would stay.
#[test]
fn private_run_stop_and_rm_survive_kill_at_any_step() {
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: PRIVATE, states, after: &[REMOVE, PRIVATE, REMOVE] }.survives();
    let states = &["running", "stopped"];
    let (before, after) = (&[PRIVATE], &[RESTART, EXEC, REMOVE]);
    Verb { before, command: &["stop", "--time", "0", "x"], states, after }.survives();
    let states = &["none", "running", "stopped"];
    Verb { before, command: &["rm", "--force", "x"], states, after: &[REMOVE] }.survives();
}

#[test]
fn private_sleep_and_wake_survive_kill_at_any_step() {
    const ASK: Words =
        &["exec", "x", "sh", "-c", "until wget -q -O /dev/null http://127.0.0.1/; do :; done"];
    let (before, states) = (&[PRIVATE, ASK], &["running", "asleep"]);
    let after = &[WAKE, ASK, SLEEP, WAKE, ASK, REMOVE];
    Verb { before, command: SLEEP, states, after }.survives();
    Verb { before: &[PRIVATE, ASK, SLEEP], command: WAKE, states, after }.survives();
}

#[test]
fn big_update_and_rm_of_bandwidth_survive_kill_at_any_step() {
    let states = &["running"];
    let command = &["update", "--net-ceil", "0", "x"];
    Verb { before: &[SHAPED], command, states, after: &[EXEC, REMOVE] }.survives();
    let command = &["update", "--net-ceil", "9mbit", "x"];
    Verb { before: &[RUN], command, states, after: &[EXEC, REMOVE, SHAPED, REMOVE] }.survives();
    let states = &["none", "running", "stopped"];
    let command = &["rm", "--force", "x"];
    Verb { before: &[SHAPED], command, states, after: &[REMOVE, SHAPED, REMOVE] }.survives();
}

/// With a disk of its own.
#[test]
fn big_create_start_and_update_with_disk_survive_kill_at_any_step() {
    const CREATE: Words = &["create", "--name", "x", "--disk", "16m", "busybox", "sleep", "1000"];
    const GROWN: Words = &["update", "--disk", "32m", "x"];
    let states = &["none", "created"];
    let after = &[REMOVE, CREATE, RESTART, EXEC, REMOVE];
    Verb { before: &[], command: CREATE, states, after }.survives();
    let states = &["created"];
    let after = &[GROWN, RESTART, EXEC, REMOVE];
    Verb { before: &[CREATE], command: GROWN, states, after }.survives();
    let states = &["created", "running", "stopped"];
    let after = &[RESTART, EXEC, REMOVE];
    Verb { before: &[CREATE], command: &["start", "x"], states, after }.survives();
}

/// With rates that outlast the loop device of the disk.
#[test]
fn big_start_update_and_end_with_rates_of_a_disk_survive_kill_at_any_step() {
    const RATED: Words = &[
        "run",
        "-d",
        "--name",
        "x",
        "--disk",
        "16m",
        "--io-write-bps",
        "1m",
        "busybox",
        "sleep",
        "1000",
    ];
    let states = &["none", "created", "running", "stopped"];
    Verb { before: &[], command: RATED, states, after: &[REMOVE, RATED, REMOVE] }.survives();
    let command = &["update", "--io-write-bps", "2m", "x"];
    Verb { before: &[RATED], command, states: &["running"], after: &[EXEC, REMOVE] }.survives();
    let command = &["stop", "--time", "0", "x"];
    let states = &["running", "stopped"];
    Verb { before: &[RATED], command, states, after: &[RESTART, REMOVE] }.survives();
    let states = &["none", "running", "stopped"];
    let command = &["rm", "--force", "x"];
    Verb { before: &[RATED], command, states, after: &[REMOVE] }.survives();
}

#[test]
fn start_survives_kill_at_any_step() {
    let states = &["created", "running", "stopped"];
    let after = &[RESTART, EXEC, REMOVE];
    Verb { before: &[CREATE], command: &["start", "x"], states, after }.survives();
}

#[test]
fn stop_survives_kill_at_any_step() {
    let states = &["running", "stopped"];
    let after = &[RESTART, EXEC, REMOVE];
    Verb { before: &[RUN], command: &["stop", "--time", "0", "x"], states, after }.survives();
}

#[test]
fn restart_survives_kill_at_any_step() {
    let states = &["running", "stopped"];
    Verb { before: &[RUN], command: RESTART, states, after: &[RESTART, EXEC, REMOVE] }.survives();
}

#[test]
fn rm_survives_kill_at_any_step() {
    let states = &["none", "running", "stopped"];
    Verb { before: &[RUN], command: &["rm", "--force", "x"], states, after: &[REMOVE] }.survives();
}

#[test]
fn exec_update_and_kill_survive_kill_at_any_step() {
    let (before, states) = (&[RUN], &["running"]);
    Verb { before, command: EXEC, states, after: &[EXEC, REMOVE] }.survives();
    let command = &["update", "--memory", "64m", "x"];
    Verb { before, command, states, after: &[EXEC, REMOVE] }.survives();
    let states = &["running", "stopped"];
    Verb { before, command: &["kill", "x"], states, after: &[REMOVE] }.survives();
}

#[test]
fn pause_and_unpause_survive_kill_at_any_step() {
    let states = &["running", "paused"];
    let after = &[EXEC, REMOVE]; // resumed first if paused
    Verb { before: &[RUN], command: PAUSE, states, after }.survives();
    Verb { before: &[RUN, PAUSE], command: UNPAUSE, states, after }.survives();
}

#[test]
fn sleep_and_wake_survive_kill_at_any_step() {
    let states = &["running", "asleep"];
    Verb { before: &[SERVE], command: SLEEP, states, after: &[EXEC, WAKE, REMOVE] }.survives();
    let before = &[SERVE, SLEEP];
    Verb { before, command: WAKE, states, after: &[WAKE, EXEC, REMOVE] }.survives();
    let states = &["asleep", "stopped"];
    let command = &["stop", "--time", "0", "x"];
    Verb { before, command, states, after: &[RESTART, EXEC, REMOVE] }.survives();
}

/// The command puts the container to sleep, and keeps it warm behind that.
#[test]
fn sleep_that_keeps_warm_survives_kill_at_any_step() {
    let (before, states) = (&[COUNT, ASK], &["running", "asleep"]);
    let after: &[Words] = &[EXEC, WAKE, REMOVE];
    let verb = Verb { before, command: SLEEP_WARM, states, after };
    verb.survives_in(&Scene::with_warm());
    verb.survives_its_keeper_in(&Scene::with_warm());
    // What the killed command has made is released without a wake, or complete.
    let after: &[Words] = &[&["stop", "--time", "0", "x"], REMOVE];
    Verb { before, command: SLEEP_WARM, states, after }.survives_in(&Scene::with_warm());
}

#[test]
fn wake_of_warm_sleeper_survives_kill_at_any_step() {
    let (before, states) = (&[COUNT, ASK, SLEEP_WARM], &["running", "asleep"]);
    let verb = Verb { before, command: WAKE, states, after: &[WAKE, EXEC, REMOVE] };
    verb.survives_in(&Scene::with_warm());
    verb.survives_its_keeper_in(&Scene::with_warm());
}

/// By a command that needs its files, one that changes its configuration, and one that ends it.
#[test]
fn end_of_warmth_survives_kill_at_any_step() {
    let (before, states) = (&[COUNT, ASK, SLEEP_WARM], &["asleep"]);
    let after: &[Words] = &[WAKE, EXEC, REMOVE];
    let scene = Scene::with_warm();
    Verb { before, command: &["diff", "x"], states, after }.survives_in(&scene);
    let command = &["update", "--pids", "60", "x"];
    Verb { before, command, states, after }.survives_in(&scene);
    let (command, states) = (&["stop", "--time", "0", "x"], &["asleep", "stopped"]);
    Verb { before, command, states, after: &[RESTART, EXEC, REMOVE] }.survives_in(&scene);
    // At the bound, which is one.
    let before = &[COUNT, ASK, SLEEP_WARM, COUNT_OTHER, ASK_OTHER];
    let command = &["sleep", "--warm", "y"];
    let after = &[WAKE, EXEC, REMOVE, REMOVE_OTHER];
    Verb { before, command, states: &["asleep"], after }.survives_in(&scene);
}

/// The maker of a warm sleeper is killed: what it has made is complete, or goes without a wake.
#[test]
fn killed_maker_of_a_warm_sleeper_leaves_all_or_nothing() {
    let scene = Scene::with_warm();
    let host = &scene.host;
    scene.all(&[COUNT, ASK]);
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let (record, dir) =
        (host.root().join("run/warm").join(&id), host.root().join("run/c").join(&id));
    let (mut number, mut kept, mut released) = (0, 0, 0);
    while let Some((mut led, call)) = lead_to(host, SLEEP_WARM, number) {
        led.kill();
        let what = format!("killed at step {number}, {call}");
        // Any command finishes what was interrupted.
        let is_settled = || match (state_of_x(host).as_str(), dir.exists()) {
            ("running", is_there) => is_there,
            ("asleep", is_there) => is_there == (host.inspect("x")["warm"] == true),
            _ => false,
        };
        assert!(wait_until(soon(), is_settled), "{what}: {}", state_of_x(host));
        if state_of_x(host) == "asleep" {
            kept += usize::from(record.exists());
            released += usize::from(!record.exists());
        }
        scene.all(&[WAKE, ASK]);
        number += fault_stride();
    }
    // The last steps alone leave a complete one, and not in every run.
    assert!(released > 0, "{kept} and {released} of {number} steps");
    scene.all(&[REMOVE]);
    scene.is_clean("at the end");
}

/// A twin lives in a thread of its own, whose steps [`Led`] does not see. The command is killed at moments that are
/// spread over the life of the twin.
#[test]
fn sleep_survives_kill_while_its_twin_lives() {
    let scene = Scene::new();
    let host = &scene.host;
    // LIMIT: more kills where a busy machine has missed the twin.
    let (mut lived, mut kills) = (0, 0);
    while kills < 24 || lived < 4 && kills < 240 {
        let number = kills % 24;
        kills += 1;
        host.dm(SERVE).ok();
        let twin = format!("{}.twin", host.inspect("x")["id"].as_str().expect("an id"));
        let has_twin = || host.cgroups().iter().any(|dir| dir.join(&twin).exists());
        let mut command = host.dormouse(SLEEP);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the command starts");
        let has_ended = |child: &mut Child| child.try_wait().expect("a child").is_some();
        while !has_twin() && !has_ended(&mut child) {
            thread::yield_now();
        }
        thread::sleep(Duration::from_micros(1500) * number * slowness());
        lived += u32::from(has_twin() && !has_ended(&mut child));
        child.kill().expect("a child");
        child.wait().expect("a child");
        let what = format!("sleep killed {number} * 1.5 ms after the birth of its twin");
        let state = state_of_x(host);
        let is_kept = ["running", "asleep"].contains(&state.as_str());
        assert!(
            is_kept,
            "{what}: x is {state}: {:#}, {}",
            host.inspect("x"),
            host.dm(&["events", "--since", "1m", "--no-stream"])
        );
        for command in [EXEC, WAKE, SLEEP, WAKE, EXEC, REMOVE] {
            let out = host.dm(command);
            assert_eq!(out.status, 0, "{what}, then {command:?}: {out}");
        }
        scene.is_clean(&what);
    }
    assert!(lived >= 4, "{lived} of {kills} were killed beside a living twin");
}

/// The state of `x`, after a command that was killed, is one in which its processes go on.
fn wakes(host: &Host, what: &str) {
    let state = state_of_x(host);
    let log = || host.dm(&["logs", "x"]);
    assert!(["running", "asleep"].contains(&state.as_str()), "{what}: x is {state}: {}", log());
    if state == "asleep" {
        let out = host.dm(WAKE);
        assert_eq!(out.status, 0, "{what}: {out}");
    }
}

/// Threads are stopped in the middle of injected calls when the command is killed. They watch themselves.
#[test]
fn big_processes_do_not_notice_killed_checkpoints_and_sleeps() {
    const ROUNDS: usize = 3;
    const KILLS: usize = 12;
    let host = &Host::new();
    host.import(&image::workloads(), "workloads");
    let rounds = format!("ROUNDS={ROUNDS}");
    let mut random = Random(0x5eed);
    let verbs = [&["checkpoint", "--leave-running", "x"][..], SLEEP];
    for verb in verbs {
        host.dm(&["run", "-d", "--name", "x", "--env", &rounds, "workloads", "/bin/steady"]).ok();
        let mut longest = Duration::ZERO;
        for round in 0..ROUNDS {
            let log = |line: &str| {
                let mut log = String::new();
                let has_come = wait_until(soon(), || {
                    log = host.dm(&["logs", "x"]).stdout;
                    log.lines().any(|one| one == line || one.starts_with("failed"))
                });
                assert!(has_come && log.lines().any(|one| one == line), "{verb:?}, {round}: {log}");
            };
            log(&format!("ready {round}"));
            let began = Instant::now();
            host.dm(verb).ok();
            longest = longest.max(began.elapsed());
            for kill in 0..KILLS {
                wakes(host, &format!("{verb:?}, round {round}, kill {kill}"));
                let after = longest.mul_f64(random.below(1000) as f64 / 1000.0);
                let mut command = host.dormouse(verb);
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                let mut child = command.spawn().expect("the command starts");
                thread::sleep(after);
                child.kill().expect("a child");
                child.wait().expect("a child");
            }
            wakes(host, &format!("{verb:?}, round {round}"));
            let out = host.dm(&["exec", "x", "touch", &format!("/go-{round}")]);
            assert!(out.status == 0 || round + 1 == ROUNDS, "{verb:?}, round {round}: {out}");
        }
        assert_eq!(host.dm(&["wait", "x"]).ok(), "0", "{verb:?}: {}", host.dm(&["logs", "x"]));
        host.dm(REMOVE).ok();
    }
}

/// Memory is restored on first access, and all of it must be loaded before the next sleep.
#[test]
fn lazy_wake_survives_kill_at_any_step() {
    let (states, after) = (&["running", "asleep"], &[WAKE, EXEC, SLEEP, WAKE, REMOVE]);
    let verb = Verb { before: &[SERVE_LARGE, ASK, SLEEP], command: WAKE, states, after };
    verb.survives();
    verb.survives_its_keeper();
}

/// Unchanged memory is taken from the former checkpoint of the sleep.
#[test]
fn repeated_sleep_survives_kill_at_any_step() {
    let (states, after) = (&["running", "asleep"], &[WAKE, EXEC, SLEEP, WAKE, REMOVE]);
    Verb { before: &[SERVE_LARGE, ASK, SLEEP, WAKE, EXEC], command: SLEEP, states, after }
        .survives();
}

/// A waking command holds the sockets of the container. If the keeper is killed meanwhile, its
/// successor receives the sockets, with the connections since.
#[test]
fn connection_survives_keeper_killed_during_wake() {
    let host = Host::with_busybox();
    let (mut connected, mut number) = (0, 0);
    loop {
        host.dm(SERVE).ok();
        let address: std::net::SocketAddr =
            format!("{}:80", host.address_of("x")).parse().expect("an address");
        host.dm(SLEEP).ok();
        let keeper = host.keeper().expect("a keeper");
        let Some((mut led, call)) = lead_to(&host, WAKE, number) else { break };
        signal(keeper, Signal::KILL);
        let soon = Duration::from_secs(10) * slowness();
        assert!(wait_until(soon, || host.keeper() != Some(keeper)));
        let caller = host.in_network(move || TcpStream::connect_timeout(&address, soon));
        let caller = caller.join().expect("no panic");
        while led.next_step().is_some() {}
        host.dm(&["ps"]).ok();
        // No process listens before the waking command has the socket, and none has to know after
        // the sockets are back.
        if let Ok(mut caller) = caller {
            connected += 1;
            let what = format!("connected at step {number}, {call}");
            caller.set_read_timeout(Some(soon)).expect("a timeout");
            caller.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap_or_else(|e| panic!("{what}: {e}"));
            let mut first = [0];
            caller.read_exact(&mut first).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        host.dm(EXEC).ok();
        host.dm(REMOVE).ok();
        number += fault_stride();
    }
    assert!(connected > 0, "no connection in {number} steps");
}

#[test]
fn clone_asleep_survives_kill_at_any_step() {
    const TEMPLATE: Words =
        &["run", "-d", "--name", "t", "busybox", "httpd", "-f", "-p", "80", "-h", "/www"];
    let after = &[REMOVE, &["rm", "--force", "t"], PRUNE];
    let command = &["clone", "--asleep", "--name", "x", "t"];
    Verb { before: &[TEMPLATE], command, states: &["none", "asleep"], after }.survives();
}

/// Two clones that share memory. `x` itself never exists.
#[test]
fn shared_clones_survive_kill_at_any_step() {
    const TEMPLATE: Words =
        &["run", "-d", "--name", "t", "busybox", "httpd", "-f", "-p", "80", "-h", "/www"];
    let after: &[Words] = &[&["rm", "--force", "--ignore", "x-1", "x-2", "t"], PRUNE];
    let command = &["clone", "-n", "2", "--name", "x", "t"];
    let verb = Verb { before: &[TEMPLATE], command, states: &["none"], after };
    verb.survives();
    verb.survives_its_keeper();
}

#[test]
fn drowsy_and_wake_survive_kill_at_any_step() {
    let states = &["running", "drowsy"];
    Verb { before: &[SERVE], command: DROWSE, states, after: &[EXEC, WAKE, REMOVE] }.survives();
    let before = &[SERVE, DROWSE];
    let verb = Verb { before, command: WAKE, states, after: &[WAKE, EXEC, REMOVE] };
    verb.survives();
    verb.survives_its_keeper();
    let states = &["running", "drowsy", "asleep"];
    Verb { before, command: SLEEP, states, after: &[WAKE, EXEC, REMOVE] }.survives();
}

#[test]
fn rename_survives_kill_at_any_step() {
    let after = &[REMOVE, &["rm", "--force", "--ignore", "y"], CREATE, REMOVE];
    let states = &["created", "none"];
    Verb { before: &[CREATE], command: &["rename", "x", "y"], states, after }.survives();
}

#[test]
fn image_commands_survive_kill_at_any_step() {
    let states = &["none", "running"];
    // A container that was frozen at the kill is thawed by the next command.
    Verb { before: &[RUN], command: COMMIT, states, after: &[COMMIT, RMI, REMOVE, PRUNE] }
        .survives();
    Verb { before: &[], command: TAG, states, after: &[TAG, RMI, PRUNE] }.survives();
    Verb { before: &[TAG], command: RMI, states, after: &[TAG, RMI, PRUNE] }.survives();
    let before = &[CREATE, COMMIT, REMOVE, RMI];
    Verb { before, command: PRUNE, states, after: &[PRUNE] }.survives();
}

/// A bundle whose container is killed in the middle of commands of the OCI runtime.
struct Bundled {
    oci: Oci,
    bundle: Bundle,
    files: Vec<String>,
    mounts: Vec<String>,
}

/// Placeholder for the directory of the bundle.
const BUNDLE: &str = "BUNDLE";
const OCI_CREATE: Words = &["create", "-b", BUNDLE, "--pid-file", "BUNDLE/pid", "x"];
const OCI_RUN: Words = &["run", "-d", "-b", BUNDLE, "x"];
const OCI_DELETE: Words = &["delete", "--force", "x"];
const OCI_IMAGE: &str = "BUNDLE/../image";
const OCI_CHECKPOINT: Words = &["checkpoint", "--image-path", OCI_IMAGE, "x"];
const OCI_RESTORE: Words = &["restore", "-d", "-b", BUNDLE, "--image-path", OCI_IMAGE, "x"];

impl Bundled {
    fn new(oci: Oci) -> Self {
        let bundle = Bundle::new(&oci, &["sleep", "1000"]);
        let mut this = Self { oci, bundle, files: Vec::new(), mounts: Vec::new() };
        // Directories for mounts are created once and stay.
        this.all(&[OCI_CREATE, OCI_DELETE]);
        list(Path::new(this.bundle.dir()), &mut this.files);
        this.mounts = this.oci.host().mounts();
        this
    }

    fn words(&self, words: &[&str]) -> Vec<String> {
        words.iter().map(|word| word.replace(BUNDLE, self.bundle.dir())).collect()
    }

    fn run(&self, words: &[&str]) -> dormouse_testkit::Output {
        let words = self.words(words);
        self.oci.run(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn all(&self, commands: &[Words]) {
        commands.iter().for_each(|command| drop(self.run(command).ok()));
    }

    fn lead(&self, words: &[&str]) -> Led {
        let words = self.words(words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Led::start(&self.oci.command(&words), self.oci.program())
    }

    /// Returns the state of `x` as the next command reports it.
    fn state(&self) -> String {
        let out = self.run(&["state", "x"]);
        match out.status {
            0 => {
                let state: serde_json::Value = serde_json::from_str(&out.stdout).expect("JSON");
                state["status"].as_str().expect("a word").to_owned()
            }
            _ => "none".to_owned(),
        }
    }

    /// Returns the remains of a container that no longer exists.
    fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        wait_until(Duration::from_secs(5) * slowness(), || {
            left = self.oci.left();
            let mut files = Vec::new();
            list(Path::new(self.bundle.dir()), &mut files);
            files.retain(|file| !self.files.contains(file));
            let mut mounts = self.oci.host().mounts();
            mounts.retain(|mount| !self.mounts.contains(mount));
            left.extend(files.into_iter().chain(mounts));
            left.is_empty()
        });
        left
    }

    /// Kills a command at each of its steps.
    fn survives(&self, before: &[Words], command: Words, states: &[&str]) {
        self.survives_and(before, command, states, |_| {});
    }

    /// The same with a check that receives the state of the container.
    fn survives_and(&self, before: &[Words], command: Words, states: &[&str], then: impl Fn(&str)) {
        let mut number = 0;
        loop {
            self.all(before);
            let mut led = self.lead(command);
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            led.kill();
            let what = format!("{} killed at step {number}, {call:?}", command[0]);
            if number % 2 == 1 {
                thread::sleep(HELD / 2); // the newborn exits before the next command or after
            }
            let state = self.state();
            assert!(states.contains(&state.as_str()), "{what}: x is {state}");
            if state == "none" {
                assert_eq!(self.left(), [""; 0], "{what}, before a delete");
            }
            let out = self.run(OCI_DELETE);
            assert_eq!(out.status, 0, "{what}: {out}");
            assert_eq!(self.left(), [""; 0], "{what}");
            println!("{what}: x was {state}");
            then(&state);
            if call.is_none() {
                break;
            }
            number += fault_stride();
        }
        assert!(number > 0, "{}: no step is made", command[0]);
    }
}

#[test]
fn oci_create_and_run_survive_kill_at_any_step() {
    let bundled = Bundled::new(Oci::new());
    bundled.survives(&[], OCI_CREATE, &["none", "created"]);
    bundled.survives(&[], OCI_RUN, &["none", "created", "running", "stopped"]);
}

#[test]
fn oci_start_and_delete_survive_kill_at_any_step() {
    let bundled = Bundled::new(Oci::new());
    bundled.survives(&[OCI_CREATE], &["start", "x"], &["created", "running", "stopped"]);
    bundled.survives(&[OCI_RUN], OCI_DELETE, &["running", "stopped", "none"]);
}

#[test]
fn oci_commands_on_running_container_survive_kill_at_any_step() {
    let bundled = Bundled::new(Oci::new());
    bundled.survives(&[OCI_RUN], &["exec", "x", "true"], &["running"]);
    bundled.survives(&[OCI_RUN], &["kill", "x", "KILL"], &["running", "stopped"]);
    bundled.survives(&[OCI_RUN], &["kill", "--all", "x", "WINCH"], &["running"]);
    bundled.survives(&[OCI_RUN], &["pause", "x"], &["running", "paused"]);
    bundled.survives(&[OCI_RUN, &["pause", "x"]], &["resume", "x"], &["running", "paused"]);
    bundled.survives(&[OCI_RUN], &["update", "--memory", "64000000", "x"], &["running"]);
}

#[test]
fn oci_checkpoint_and_restore_survive_kill_at_any_step() {
    let bundled = Bundled::new(Oci::new());
    let assert_restorable = || {
        bundled.run(OCI_RESTORE).ok();
        assert_eq!(bundled.state(), "running");
        bundled.run(OCI_DELETE).ok();
    };
    // Removed with a whole image on disk; or unchanged.
    let states = &["running", "stopped", "none"];
    bundled.survives_and(&[OCI_RUN], OCI_CHECKPOINT, states, |state| {
        if state != "running" {
            assert_restorable();
        }
    });
    let before = &[OCI_RUN, OCI_CHECKPOINT];
    bundled.survives_and(before, OCI_RESTORE, &["running", "none"], |_| assert_restorable());
}

/// The table of `docs/oci.md`: `create` and then `start` are killed at moments spread over their
/// duration. Counts what a `list` and a `delete --force` leave.
#[test]
#[ignore = "a comparison: name the other runtimes in DORMOUSE_FAULT_PEERS, separated by spaces"]
fn oci_runtimes_compared_under_kills() {
    let peers = std::env::var("DORMOUSE_FAULT_PEERS").expect("DORMOUSE_FAULT_PEERS");
    let own = dormouse_testkit::program("dormouse-oci");
    let programs = std::iter::once(own.as_path()).chain(peers.split(' ').map(Path::new));
    const KILLS: u32 = 200;
    for program in programs {
        let bundled = Bundled::new(Oci::with_program(program));
        let script = format!(
            "{0} --root {1} create -b {2} x && {0} --root {1} start x",
            program.display(),
            bundled.oci.root().display(),
            bundled.bundle.dir()
        );
        let take = |limit: Option<Duration>| {
            let mut command = bundled.oci.host().command("sh");
            command.args(["-c", &script]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            // A private process group, so that the runtime and the shell are killed at once.
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            let began = std::time::Instant::now();
            let mut child = command.spawn().expect("the command starts");
            let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a pid");
            if let Some(limit) = limit {
                thread::sleep(limit);
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            child.wait().expect("the command ends");
            // The runtime may still be in its last system call.
            let is_gone = || rustix::process::test_kill_process_group(group).is_err();
            assert!(wait_until(soon(), is_gone));
            began.elapsed()
        };
        let whole = take(None);
        bundled.run(OCI_DELETE).ok();
        let (mut unlisted, mut half, mut undeleted, mut left) = (0, 0, 0, 0);
        for kill in 0..KILLS {
            take(Some(whole * kill / KILLS));
            thread::sleep(HELD);
            unlisted += usize::from(bundled.run(&["list"]).status != 0);
            half += usize::from(bundled.state() == "none" && !bundled.oci.left().is_empty());
            undeleted += usize::from(bundled.run(OCI_DELETE).status != 0);
            // On a busy machine, an exiting cgroup or process may take a moment.
            let nothing = || bundled.oci.left().is_empty();
            if !wait_until(HELD * 20 * slowness(), nothing) {
                eprintln!("{}: {:?}", program.display(), bundled.oci.left());
                left += 1;
                let name = bundled.bundle.read()["linux"]["cgroupsPath"].to_string();
                let name = name.trim_matches(['"', '/']);
                let parent = name.split('/').next().expect("a part");
                leftover::remove_cgroups(parent);
                let _ = std::fs::remove_dir_all(bundled.oci.root()); // of no interest any more
            }
        }
        println!(
            "{}: of {KILLS} kills in {whole:?}: after {unlisted} there was no list, {half} left \
             something of no container, {undeleted} could not be deleted, {left} left something \
             behind for good",
            program.display()
        );
    }
}
