//! Contracts for CPU: which reservations are admitted, and what is in the kernel for them. Measured shares are
//! the subject of `bench contracts`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use dormouse_testkit::{Host, soon, wait_until};

/// A server, which can be put to sleep.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

fn cpus() -> u32 {
    std::thread::available_parallelism().expect("a number of CPUs").get() as u32
}

#[track_caller]
pub(crate) fn start(host: &Host, name: &str, options: &[&str]) {
    host.dm(&[&["run", "-d", "--name", name], options, COUNT].concat()).ok();
}

/// A host whose CPUs can all be reserved.
#[track_caller]
fn without_host_reserve() -> Host {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text + "[contract]\nhost-cpu-reserve = \"0\"\n").expect("written");
    host
}

/// Reads a file of the cgroup of a container, or of the one above (""), by its name in v1 or in v2. Returns the
/// first number, and whether it is v1's.
#[track_caller]
fn number(host: &Host, below: &str, v1: &str, v2: &str) -> (u64, bool) {
    for dir in host.cgroups().iter().map(|dir| dir.join(below)) {
        for (file, is_v1) in [(v1, true), (v2, false)] {
            if let Ok(text) = fs::read_to_string(dir.join(file)) {
                let first = text.split_whitespace().next().expect("a number");
                return (first.parse().expect("a number"), is_v1);
            }
        }
    }
    panic!("no {v1} and no {v2} of {below}: {:?}", host.cgroups());
}

#[track_caller]
pub(crate) fn id(host: &Host, name: &str) -> String {
    host.inspect(name)["id"].as_str().expect("an id").to_owned()
}

/// The CPU weight of a container, in shares of 1024, and the rounding of the kernel.
#[track_caller]
pub(crate) fn weight(host: &Host, name: &str) -> (f64, f64) {
    match number(host, &id(host, name), "cpu.shares", "cpu.weight") {
        (shares, true) => (shares as f64, 1.0),
        (weight, false) => (weight as f64 * 10.24, 6.0),
    }
}

/// The weight that keeps a reservation beside so many containers, itself included, all of the default weight.
fn due(reserve: f64, reserved: f64, containers: f64) -> f64 {
    1024.0 + reserve * 1024.0 * containers / (f64::from(cpus()) - reserved)
}

#[track_caller]
fn has_weight(host: &Host, name: &str, due: f64) {
    let (got, rounding) = weight(host, name);
    assert!((got - due).abs() <= rounding, "{name}: {got} is not {due}");
}

/// Quota, period and burst of a container, in microseconds.
#[track_caller]
pub(crate) fn quota(host: &Host, name: &str) -> [u64; 3] {
    let id = id(host, name);
    let (quota, is_v1) = number(host, &id, "cpu.cfs_quota_us", "cpu.max");
    let burst = number(host, &id, "cpu.cfs_burst_us", "cpu.max.burst").0;
    let period = match is_v1 {
        true => number(host, &id, "cpu.cfs_period_us", "cpu.cfs_period_us").0,
        false => {
            let of = |dir: &PathBuf| fs::read_to_string(dir.join(&id).join("cpu.max")).ok();
            let text = host.cgroups().iter().find_map(of).expect("a quota");
            text.split_whitespace().nth(1).expect("a period").parse().expect("a number")
        }
    };
    [quota, period, burst]
}

/// The weight of all containers together.
#[track_caller]
fn parent(host: &Host) -> u64 {
    match number(host, "", "cpu.shares", "cpu.weight") {
        (shares, true) => shares,
        (weight, false) => weight * 1024 / 100,
    }
}

const DAEMON: &[&str] = &["daemon", "--memory", "off"];

pub(crate) struct Daemon {
    child: Child,
}

impl Daemon {
    #[track_caller]
    pub(crate) fn start(host: &Host) -> Self {
        Self::start_as(host.dormouse(DAEMON))
    }

    #[track_caller]
    fn start_as(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the command starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut said = Vec::new();
        loop {
            let line =
                lines.next().unwrap_or_else(|| panic!("it ends: {said:?}")).expect("in UTF-8");
            if line.contains("daemon: ready") {
                break;
            }
            said.push(line);
        }
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("{line}")));
        Self { child }
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn vm_reservation_is_a_weight_from_the_start_and_after_a_wake() {
    let host = Host::with_busybox();
    start(&host, "plain", &[]);
    assert_eq!(parent(&host), 1024, "no reservation, no change");
    start(&host, "x", &["--cpu-reserve", "0.5"]);
    has_weight(&host, "plain", 1024.0);
    has_weight(&host, "x", due(0.5, 0.5, 2.0));
    // Threads of the kernel that work for containers compete with all containers together. Their weight is no larger
    // than the reservations need.
    assert!(parent(&host) < 10 * 1024, "{}", parent(&host));
    let most = f64::from(cpus()) - 0.2;
    host.dm(&["update", "--cpu-reserve", &most.to_string(), "x"]).ok();
    assert!(parent(&host) >= u64::from(5 * cpus() - 1) * 1000, "{}", parent(&host));
    host.dm(&["update", "--cpu-reserve", "0.5", "x"]).ok();
    // A container without a reservation changes the weight of those with one.
    start(&host, "other", &[]);
    has_weight(&host, "x", due(0.5, 0.5, 3.0));
    host.dm(&["rm", "-f", "other"]).ok();
    has_weight(&host, "x", due(0.5, 0.5, 2.0));

    host.put_to_sleep("x");
    assert_eq!(parent(&host), 1024, "its reservation is lent");
    host.dm(&["wake", "x"]).ok();
    has_weight(&host, "x", due(0.5, 0.5, 2.0));
    host.dm(&["rm", "-f", "x"]).ok();
    assert_eq!(parent(&host), 1024, "no reservation is left");
}

#[test]
fn vm_limit_equal_to_reservation_has_largest_weight_and_its_quota() {
    let host = Host::with_busybox();
    start(&host, "plain", &[]);
    start(&host, "x", &["--cpu-reserve", "0.5", "--cpus", "0.5"]);
    let cpus = f64::from(cpus());
    has_weight(&host, "x", 2.0 * cpus * 2048.0 / (cpus - 0.5));
    assert_eq!(quota(&host, "x"), [50_000, 100_000, 50_000]);
}

#[test]
fn vm_reservation_that_does_not_fit_is_refused_with_the_numbers() {
    let host = without_host_reserve();
    let all = cpus();
    let most = format!("{}.5", all - 1);
    start(&host, "x", &["--cpu-reserve", &most]);
    let second = |name: &str| {
        let options = ["run", "-d", "--name", name, "--cpu-reserve", "0.75"];
        host.dm(&[&options, COUNT].concat())
    };
    let line = second("y").fails();
    let free = format!("0.5 of {all} CPUs are free");
    for part in ["'y'", "0.75 CPUs", &free, "reserved by 1 running", "lower --cpu-reserve"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(!host.dm(&["ps", "-a"]).ok().contains(" y "), "nothing is left of it");
    has_weight(&host, "x", due(f64::from(all) - 0.5, f64::from(all) - 0.5, 1.0));

    // An asleep container lends its reservation, and gets it back as soon as it is free.
    host.put_to_sleep("x");
    second("y").ok();
    let line = host.dm(&["wake", "x"]).fails();
    let free = format!("{}.25 of {all} CPUs are free", all - 1);
    assert!(line.contains(&free), "{line}");
    assert_eq!(host.state_of("x"), "asleep");
    host.dm(&["rm", "-f", "y"]).ok();
    host.dm(&["wake", "x"]).ok();
    has_weight(&host, "x", due(f64::from(all) - 0.5, f64::from(all) - 0.5, 1.0));
}

#[test]
fn part_of_the_host_is_not_given_away() {
    let host = Host::with_busybox();
    let all = cpus().to_string();
    let run = |options: &[&str]| host.dm(&[&["run", "-d", "--name", "x"], options, COUNT].concat());
    let line = run(&["--cpu-reserve", &all]).fails();
    let host_part = format!("the {} CPUs that this host can promise", f64::from(cpus()) * 0.95);
    assert!(line.contains(&host_part) && line.contains("host-cpu-reserve"), "{line}");
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text.clone() + "[contract]\nhost-cpu-reserve = \"much\"\n")
        .expect("written");
    let line = run(&["--cpu-reserve", "0.1"]).fails();
    assert!(line.contains("host-cpu-reserve 'much'"), "{line}");
    fs::write(&config, text).expect("written");
    run(&["--cpu-reserve", "0.1"]).ok();
}

#[test]
fn contradictory_contracts_are_refused_before_anything_is_made() {
    let host = Host::with_busybox();
    let cases: &[(&[&str], &str)] = &[
        (&["--cpu-reserve", "0.6", "--cpus", "0.5"], "0.6 is more than the limit of 0.5"),
        (&["--cpu-reserve", "1.5", "--cpuset-cpus", "0"], "1.5 is more than the 1 CPUs"),
        (&["--cpus", "0.5", "--cpu-burst", "60ms"], "60ms is more than the quota of 50ms"),
        (&["--cpu-burst", "10ms"], "give --cpus"),
        (&["--cpus", "0.05", "--cpu-period", "10ms"], "at least 20ms"),
        (&["--cpu-period", "2s"], "1ms to 1s"),
        (&["--cpu-reserve", "-1"], "'-1'"),
        (
            &["--cpu-idle-rate", "1.5"],
            "idle rate of 1.5 needs a limit that it may exceed: give --cpus",
        ),
        (
            &["--cpus", "0.5", "--cpu-idle-rate", "0.5"],
            "rate of 0.5 is not more than the limit of 0.5",
        ),
        (
            &["--cpus", "0.5", "--cpu-idle-rate", "2", "--cpuset-cpus", "0"],
            "2 is more than the 1 CPUs",
        ),
        (&["--cpu-reserve", "0.5", "--cpu-weight", "idle"], "0.5 contradicts --cpu-weight idle"),
        (&["--cpu-weight", "0"], "1 to 10000, or idle"),
    ];
    for (options, text) in cases {
        let line = host.dm(&[&["create", "--name", "x"], *options, COUNT].concat());
        assert!(line.status != 0 && line.stderr.contains(text), "{text}: {line}");
    }
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "");
}

#[test]
fn two_starts_at_once_do_not_both_take_the_last_cpu() {
    let host = without_host_reserve();
    let all = cpus().to_string();
    for name in ["a", "b"] {
        host.dm(&[&["create", "--name", name, "--cpu-reserve", &all], COUNT].concat()).ok();
    }
    for round in 0..8 {
        let begun: Vec<Child> = ["a", "b"]
            .iter()
            .map(|name| {
                let mut command = host.dormouse(&["start", name]);
                command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts")
            })
            .collect();
        let wait = |mut child: Child| child.wait().expect("our child").success();
        let ended: Vec<bool> = begun.into_iter().map(wait).collect();
        let running = ["a", "b"].map(|name| host.state_of(name) == "running");
        assert_eq!(running[..], ended[..], "round {round}");
        assert_eq!(running.iter().filter(|is| **is).count(), 1, "round {round}: {running:?}");
        let (winner, loser) = if running[0] { ("a", "b") } else { ("b", "a") };
        host.dm(&["start", loser]).fails();
        host.dm(&["stop", "-t", "0", winner]).ok();
        host.dm(&["start", loser]).ok();
        host.dm(&["stop", "-t", "0", loser]).ok();
    }
}

#[test]
fn vm_contract_changes_while_the_container_runs() {
    let host = without_host_reserve();
    start(&host, "plain", &[]);
    start(&host, "x", &["--cpu-weight", "200"]);
    has_weight(&host, "x", 2048.0);
    let update = |options: &[&str]| host.dm(&[&["update"], options, &["x"]].concat());
    update(&["--cpu-reserve", "0.5"]).ok();
    has_weight(&host, "x", 2048.0 + 0.5 * 3072.0 / (f64::from(cpus()) - 0.5));
    update(&["--cpus", "1", "--cpu-period", "20ms", "--cpu-burst", "50%"]).ok();
    assert_eq!(quota(&host, "x"), [20_000, 20_000, 10_000]);
    update(&["--cpus", "0.5"]).ok();
    assert_eq!(quota(&host, "x"), [10_000, 20_000, 5000], "the burst follows the quota");
    update(&["--cpu-burst", "0"]).ok();
    assert_eq!(quota(&host, "x"), [10_000, 20_000, 0]);

    let before = host.inspect("x")["config"]["limits"].clone();
    let too_much = (cpus() + 1).to_string();
    for bad in [&["--cpu-reserve", "0.6"], &["--cpus", "0.4"], &["--cpu-burst", "11ms"]] {
        update(bad).fails();
    }
    update(&["--cpus", &too_much, "--cpu-reserve", &too_much]).fails();
    start(&host, "y", &["--cpu-reserve", "0.5"]);
    let rest = format!("{}.75", cpus() - 1);
    let line = update(&["--cpus", &too_much, "--cpu-reserve", &rest]).fails();
    assert!(line.contains("reserved by 1 running"), "{line}");
    assert_eq!(host.inspect("x")["config"]["limits"], before, "a refused change changes nothing");
    assert_eq!(quota(&host, "x"), [10_000, 20_000, 0]);

    let table = host.dm(&["inspect", "--format", "table", "x"]).ok();
    assert!(table.contains("0.5 reserved, weight 200, at most 0.5"), "{table}");
    assert!(table.contains("CPU time used"), "{table}");
    let stats = host.dm(&["stats", "--no-stream", "x"]).ok();
    let cells: Vec<&str> = stats.lines().nth(1).expect("a row").split_whitespace().collect();
    assert_eq!(cells[3..5], ["50", "50"], "{stats}");

    host.dm(&["rm", "-f", "y"]).ok();
    update(&["--cpu-reserve", "0"]).ok();
    has_weight(&host, "x", 2048.0);
    assert_eq!(parent(&host), 1024);
    host.dm(&["restart", "x"]).ok();
    assert_eq!(quota(&host, "x"), [10_000, 20_000, 0], "a restart keeps the contract");
}

#[test]
fn vm_daemon_governs_only_beside_reservations_and_leaves_static_weights() {
    let host = Host::with_busybox();
    let mark = host.root().join("run/governed");
    start(&host, "plain", &[]);
    let mut daemon = Daemon::start(&host);
    start(&host, "x", &["--cpu-reserve", "0.5"]);
    // An idle container has a full bucket, so its weight is the largest.
    let fixed = due(0.5, 0.5, 2.0);
    let is_governed = || weight(&host, "x").0 > fixed * 1.25;
    assert!(wait_until(soon(), is_governed), "{:?}", weight(&host, "x"));
    assert!(mark.exists());
    has_weight(&host, "plain", 1024.0);

    daemon.kill();
    let x = id(&host, "x"); // a command has run since
    assert!(!mark.exists(), "the command after a killed daemon finds its mark");
    has_weight(&host, "x", fixed);
    host.dm(&["restart", "-t", "0", "x"]).ok();
    has_weight(&host, "x", fixed);
    assert_eq!(x, id(&host, "x"));

    let _daemon = Daemon::start(&host);
    assert!(wait_until(soon(), is_governed), "the next daemon goes on: {:?}", weight(&host, "x"));
    host.dm(&["update", "--cpu-reserve", "0", "x"]).ok();
    assert!(wait_until(soon(), || !mark.exists()), "no reservation is left");
    has_weight(&host, "x", 1024.0);
}

#[test]
fn stopped_daemon_writes_static_weights() {
    let host = Host::with_busybox();
    start(&host, "x", &["--cpu-reserve", "0.5"]);
    let mut daemon = Daemon::start(&host);
    let fixed = due(0.5, 0.5, 1.0);
    assert!(wait_until(soon(), || weight(&host, "x").0 > fixed * 1.25), "{:?}", weight(&host, "x"));
    let mark = host.root().join("run/governed");
    assert!(mark.exists());
    let pid = rustix::process::Pid::from_child(&daemon.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("our child");
    assert!(daemon.child.wait().expect("our child").success());
    assert!(!mark.exists(), "no command has run since");
    has_weight(&host, "x", fixed);
}

/// The idle time of the host as a daemon reads it: a file in the place of `/proc/uptime`.
struct IdleTime {
    path: PathBuf,
    passes: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
}

impl IdleTime {
    #[track_caller]
    fn begin(host: &Host) -> Self {
        let path = host.root().join("uptime");
        let (passes, ends) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        // Of one length, so that no reader finds a part of it.
        let text = |seconds: u64| format!("{seconds:016}.00 {seconds:016}.00\n");
        fs::write(&path, text(1000)).expect("written");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("the file");
        let (is_passing, is_ended) = (Arc::clone(&passes), Arc::clone(&ends));
        thread::spawn(move || {
            let mut seconds = 1000;
            while !is_ended.load(Ordering::Relaxed) {
                if is_passing.load(Ordering::Relaxed) {
                    // More than any host has: every look at it finds an idle host, however busy the real one is.
                    seconds += 1000;
                    let wrote = std::os::unix::fs::FileExt::write_all_at(
                        &file,
                        text(seconds).as_bytes(),
                        0,
                    );
                    wrote.expect("written");
                }
                thread::sleep(Duration::from_millis(10));
            }
        });
        Self { path, passes, ends }
    }

    /// Has idle time pass, or not.
    fn passes(&self, passes: bool) {
        self.passes.store(passes, Ordering::Relaxed);
    }

    /// A daemon that reads this idle time.
    #[track_caller]
    fn daemon(&self, host: &Host) -> Daemon {
        let script = format!("mount --bind {} /proc/uptime && exec \"$@\"", self.path.display());
        Daemon::start_as(host.dormouse_under(&["unshare", "-m", "sh", "-c", &script, "sh"], DAEMON))
    }
}

impl Drop for IdleTime {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

const BUSY: &[&str] = &["busybox", "sh", "-c", "while :; do :; done"];

#[track_caller]
fn has_quota(host: &Host, name: &str, due: [u64; 3]) {
    assert!(
        wait_until(soon(), || quota(host, name) == due),
        "{:?} is not {due:?}",
        quota(host, name)
    );
}

/// Waits for a quota between those of the limit and of the rate, without a burst. A busy host gives a container less
/// than its rate, and the daemon then a lower limit.
#[track_caller]
fn is_raised(host: &Host, name: &str, between: std::ops::RangeInclusive<u64>) {
    let is_raised = || {
        let [us, period, burst] = quota(host, name);
        us > *between.start() && us <= *between.end() && [period, burst] == [100_000, 0]
    };
    assert!(wait_until(soon(), is_raised), "{:?} is not in {between:?}", quota(host, name));
}

#[test]
fn vm_idle_rate_is_the_limit_while_cpus_are_idle() {
    let host = Host::with_busybox();
    let mark = host.root().join("run/governed");
    let plain = [10_000, 100_000, 10_000];
    let options = ["run", "-d", "--name", "x", "--cpus", "0.1", "--cpu-idle-rate", "0.5"];
    host.dm(&[&options, BUSY].concat()).ok();
    // A container that uses less than its limit needs no higher one.
    start(&host, "rests", &["--cpus", "0.1", "--cpu-idle-rate", "0.5"]);
    assert_eq!(quota(&host, "x"), plain, "without the daemon it is that of --cpus");

    let idle = IdleTime::begin(&host);
    let mut daemon = idle.daemon(&host);
    is_raised(&host, "x", 10_000..=50_000);
    assert_eq!(quota(&host, "rests"), plain);
    assert!(fs::read_to_string(&mark).expect("a mark").contains(&id(&host, "x")));
    idle.passes(false);
    has_quota(&host, "x", plain);
    idle.passes(true);
    is_raised(&host, "x", 10_000..=50_000);

    let x = host.cgroups().iter().map(|dir| dir.join(id(&host, "x"))).collect::<Vec<_>>();
    daemon.kill();
    let in_kernel = |dir: &PathBuf| {
        let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
        read("cpu.cfs_quota_us").or_else(|| read("cpu.max"))
    };
    let text = x.iter().find_map(in_kernel).expect("a quota");
    let quota_us = text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
    assert!(quota_us.is_some_and(|us| us > 10_000), "no command has run since: {text}");
    host.dm(&["ps"]).ok();
    assert_eq!(quota(&host, "x"), plain, "the command after a killed daemon");
    assert!(!mark.exists());

    let mut daemon = idle.daemon(&host);
    is_raised(&host, "x", 10_000..=50_000);
    host.dm(&["update", "--cpu-idle-rate", "0", "x"]).ok();
    has_quota(&host, "x", plain);
    host.dm(&["update", "--cpus", "0.2", "--cpu-idle-rate", "0.4", "x"]).ok();
    is_raised(&host, "x", 20_000..=40_000);
    let pid = rustix::process::Pid::from_child(&daemon.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("our child");
    assert!(daemon.child.wait().expect("our child").success());
    assert_eq!(quota(&host, "x"), [20_000, 100_000, 20_000], "a daemon that ends leaves the limit");
    assert!(!mark.exists(), "no command has run since");
}

#[test]
fn vm_idle_rate_stays_with_the_container() {
    let host = Host::with_busybox();
    start(&host, "x", &["--cpus", "0.5", "--cpu-idle-rate", "1.5"]);
    let rate = |name: &str| host.inspect(name)["config"]["limits"]["cpu_idle_rate_milli"].clone();
    assert_eq!(rate("x"), 1500);
    let table = host.dm(&["inspect", "--format", "table", "x"]).ok();
    assert!(table.contains("at most 0.5") && table.contains("1.5 while CPUs are idle"), "{table}");
    let stats = host.dm(&["stats", "--no-stream", "--json", "x"]).ok();
    assert!(stats.contains("\"cpu_idle_rate_milli\":1500"), "{stats}");
    host.dm(&["clone", "--name", "y", "x"]).ok();
    host.put_to_sleep("x");
    host.dm(&["wake", "x"]).ok();
    for name in ["x", "y"] {
        assert_eq!((rate(name), quota(&host, name)), (1500.into(), [50_000, 100_000, 50_000]));
    }
    let line = host.dm(&["update", "--cpus", "2", "x"]).fails();
    assert!(line.contains("rate of 1.5 is not more than the limit of 2"), "{line}");
    assert_eq!(quota(&host, "x"), [50_000, 100_000, 50_000], "a refused change changes nothing");
    host.dm(&["update", "--cpus", "2", "--cpu-idle-rate", "0", "x"]).ok();
    assert_eq!(rate("x"), 0);
}

#[test]
fn vm_container_without_a_share_is_idle_in_the_kernel() {
    let host = Host::with_busybox();
    let is_idle = |name: &str| number(&host, &id(&host, name), "cpu.idle", "cpu.idle").0 == 1;
    start(&host, "plain", &[]);
    start(&host, "x", &["--cpu-weight", "idle"]);
    assert!(is_idle("x") && !is_idle("plain"));
    let table = host.dm(&["inspect", "--format", "table", "x"]).ok();
    assert!(table.contains("only while CPUs are idle"), "{table}");
    host.put_to_sleep("x");
    host.dm(&["wake", "x"]).ok();
    assert!(is_idle("x"));
    // A reservation beside it takes its weight for the least.
    start(&host, "r", &["--cpu-reserve", "0.5"]);
    let update = |options: &[&str]| host.dm(&[&["update"], options, &["x"]].concat());
    let line = update(&["--cpu-reserve", "0.5"]).fails();
    assert!(line.contains("0.5 contradicts --cpu-weight idle"), "{line}");
    assert!(is_idle("x"), "a refused change changes nothing");
    update(&["--cpu-weight", "200"]).ok();
    assert!(!is_idle("x"));
    has_weight(&host, "x", 2048.0);
    update(&["--cpu-weight", "idle"]).ok();
    assert!(is_idle("x"));
    update(&["--cpu-weight", "100", "--cpu-reserve", "0.5"]).ok();
    assert!(!is_idle("x"));
    host.dm(&["rm", "-f", "r"]).ok();
    has_weight(&host, "x", due(0.5, 0.5, 2.0));
}

#[test]
fn entry_of_a_killed_start_gives_way() {
    let host = without_host_reserve();
    let all = cpus().to_string();
    start(&host, "x", &["--cpu-reserve", &all]);
    // The entry of a container that died with its keeper, before any command has settled it.
    let pid = host.inspect("x")["pid"].as_u64().expect("a pid") as i32;
    let keeper = host.keeper().expect("a keeper") as i32;
    let kill = |pid: i32| {
        let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it lives");
    };
    kill(keeper);
    kill(pid);
    let path = format!("/proc/{pid}");
    assert!(wait_until(soon(), || !Path::new(&path).exists()), "it has ended");
    start(&host, "y", &["--cpu-reserve", &all]);
}
