//! The scheduler of containers: contracts of CPU by sched_ext. Measured shares are the subject of `bench contracts`.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, soon, wait_until};

use crate::contracts::{start, weight};

/// A daemon with its output in a file.
struct Daemon {
    child: Child,
    said: PathBuf,
}

impl Daemon {
    #[track_caller]
    fn start(host: &Host) -> Self {
        let said = host.root().join("said");
        let file = fs::File::create(&said).expect("a file");
        let mut command = host.dormouse(&["daemon", "--memory", "off"]);
        let child = command.stdout(Stdio::null()).stderr(file).spawn().expect("it starts");
        let daemon = Self { child, said };
        daemon.says("daemon: ready");
        daemon
    }

    fn has_said(&self, text: &str) -> bool {
        fs::read_to_string(&self.said).is_ok_and(|said| said.contains(text))
    }

    #[track_caller]
    fn says(&self, text: &str) {
        let said = wait_until(soon(), || self.has_said(text));
        assert!(said, "{text}: {:?}", fs::read_to_string(&self.said));
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The name of the scheduler in force; `None` if it is the kernel's.
fn in_force() -> Option<String> {
    let name = fs::read_to_string("/sys/kernel/sched_ext/root/ops").ok()?;
    let state = fs::read_to_string("/sys/kernel/sched_ext/state").ok()?;
    (state.trim() == "enabled").then(|| name.trim().to_owned())
}

#[track_caller]
fn comes_in_force(wanted: Option<&str>) {
    let is_so = wait_until(soon(), || in_force().as_deref() == wanted);
    assert!(is_so, "{:?} is not {wanted:?}", in_force());
}

fn configure(host: &Host, scheduler: &str) {
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    let rest = text.split("[contract]").next().unwrap_or_default();
    let text = format!("{rest}[contract]\ncpu-scheduler = \"{scheduler}\"\n");
    fs::write(&config, text).expect("written");
}

/// CPU time of a container, in microseconds.
#[track_caller]
fn used_us(host: &Host, name: &str) -> u64 {
    let pid = host.inspect(name)["pid"].as_u64().expect("it runs");
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a process");
    let below = cgroup.trim().strip_prefix("0::/").expect("cgroup v2 alone");
    let stat = fs::read_to_string(format!("/sys/fs/cgroup/{below}/cpu.stat")).expect("a cgroup");
    let used = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")).expect("its time");
    used.parse().expect("a number")
}

/// A busy container goes on, again and again.
#[track_caller]
fn uses_time(host: &Host, name: &str) {
    let before = used_us(host, name);
    let goes_on = wait_until(soon(), || used_us(host, name) > before + 500_000);
    assert!(goes_on, "{name}: {before} us, {} us", used_us(host, name));
}

/// Whether the kernel has the newest function of sched_ext that the scheduler calls, since Linux 6.19.
fn can_schedule() -> bool {
    let symbols = fs::read_to_string("/proc/kallsyms").expect("the kernel's symbols");
    symbols.lines().any(|line| line.ends_with(" scx_bpf_dsq_peek"))
}

/// One test, because a host has one scheduler.
#[test]
fn vm_scheduler_lives_as_long_as_its_daemon() {
    let host = Host::with_busybox();
    configure(&host, "sched_ext");
    start(&host, "x", &["--cpu-reserve", "0.5", "--cpus", "1"]);
    let fixed = weight(&host, "x").0;
    let mut daemon = Daemon::start(&host);
    let answers = || host.dm(&["exec", "x", "busybox", "true"]).ok();
    if !can_schedule() {
        daemon.says("weights keep CPU reservations, and not sched_ext");
        // An idle container has a full bucket, so its weight is the largest.
        let is_governed = || weight(&host, "x").0 > fixed * 1.25;
        assert!(wait_until(soon(), is_governed), "{:?}", weight(&host, "x"));
        eprintln!("NOT RUN: the scheduler, because this kernel has no sched_ext of Linux 6.19");
        return;
    }
    comes_in_force(Some("dormouse"));
    start(&host, "y", &["--cpu-weight", "300"]);
    start(&host, "idle", &["--cpu-weight", "idle"]);
    answers();
    // Longer than the burst, so that it waits for its limit, and with a reservation as well.
    for (name, options) in [("limited", "--cpu-weight=50"), ("capped", "--cpu-reserve=0.2")] {
        let busy = ["busybox", "sh", "-c", "while :; do :; done"];
        host.dm(&[&["run", "-d", "--name", name, "--cpus=0.2", options], &busy[..]].concat()).ok();
    }
    for name in ["limited", "capped"] {
        uses_time(&host, name);
        let (before, start) = (used_us(&host, name), Instant::now());
        thread::sleep(Duration::from_secs(3));
        let part = (used_us(&host, name) - before) as f64 / start.elapsed().as_micros() as f64;
        // Without its limit it has a CPU, or half of one.
        assert!(part < 0.4, "{name} uses {part} CPUs");
    }
    host.dm(&["rm", "-f", "limited", "capped"]).ok();
    host.dm(&["update", "--cpu-reserve", "0.25", "--cpus", "0.5", "x"]).ok();
    host.dm(&["restart", "-t", "0", "x"]).ok();
    host.dm(&["sleep", "x"]).ok();
    host.dm(&["wake", "x"]).ok();
    answers();
    assert!(!daemon.has_said("not sched_ext"), "{:?}", fs::read_to_string(&daemon.said));
    let fixed = weight(&host, "x").0;

    daemon.kill();
    comes_in_force(None);
    answers();
    assert_eq!(weight(&host, "x").0, fixed, "the static weight was there all the time");

    let mut daemon = Daemon::start(&host);
    comes_in_force(Some("dormouse"));
    // The settings are read at the next event.
    configure(&host, "kernel");
    host.dm(&["rm", "-f", "y"]).ok();
    comes_in_force(None);
    answers();
    configure(&host, "sched_ext");
    host.dm(&["rm", "-f", "idle"]).ok();
    comes_in_force(Some("dormouse"));
    daemon.kill();
    comes_in_force(None);
}
