//! The scheduler of containers (sched_ext): the contracts of `tests/contracts.rs`, kept by the daemon's scheduler. It
//! needs Linux 6.17 with CONFIG_SCHED_CLASS_EXT, which the newer kernel of the guest has.
//!
//! Tests with the prefix `ext_` are skipped elsewhere, and run with `xtask guest --next --tests ext_`, one after the
//! other: a host has one scheduler, and under it other tests are processes of the host. Measured shares are compared
//! with each other and within 3 points.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, soon, wait_until};

use crate::contracts::{Daemon, id, quota, start, weight};

const BUSY: &str = "while :; do :; done";

/// Why the scheduler cannot be tested here; `None` if it can.
fn is_missing() -> bool {
    let is_there = Path::new("/sys/kernel/sched_ext/state").exists();
    let calls = fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let has_quotas = calls.lines().any(|line| line.ends_with(" scx_group_set_bandwidth"));
    if is_there && has_quotas {
        return false;
    }
    eprintln!("SKIPPED: no sched_ext with quotas (Linux 6.17, CONFIG_SCHED_CLASS_EXT)");
    true
}

/// Keeps other tests with this prefix waiting.
fn alone() -> fs::File {
    let lock = fs::File::create(std::env::temp_dir().join("dormouse-scheduler.lock"));
    let lock = lock.expect("the directory for temporary files");
    lock.lock().expect("a lock");
    lock
}

#[track_caller]
fn host(backend: &str) -> Host {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text + &format!("[contract]\nscheduler = \"{backend}\"\n"))
        .expect("written");
    host
}

/// What the kernel says of its scheduler.
fn shown() -> String {
    let state = fs::read_to_string("/sys/kernel/sched_ext/state").unwrap_or_default();
    let ops = fs::read_to_string("/sys/kernel/sched_ext/root/ops").unwrap_or_default();
    format!("{} {}", state.trim(), ops.trim()).trim().to_owned()
}

#[track_caller]
fn is_shown(due: &str) {
    assert!(wait_until(soon(), || shown() == due), "{} is not {due}", shown());
}

#[track_caller]
fn busy(host: &Host, name: &str, options: &[&str], script: &str) {
    let options = [&["run", "-d", "--name", name], options].concat();
    host.dm(&[&options[..], &["busybox", "sh", "-c", script]].concat()).ok();
}

/// CPU time of a container, in microseconds.
#[track_caller]
fn used_us(host: &Host, id: &str) -> u64 {
    let stat = |dir: &PathBuf| fs::read_to_string(dir.join(id).join("cpu.stat")).ok();
    let text = host.cgroups().iter().find_map(stat).expect("its CPU time");
    let line = text.lines().find_map(|line| line.strip_prefix("usage_usec ")).expect("a number");
    line.parse().expect("a number")
}

/// The CPUs that containers use in some seconds.
#[track_caller]
fn measure(host: &Host, names: &[&str], time: Duration) -> Vec<f64> {
    let ids: Vec<String> = names.iter().map(|name| id(host, name)).collect();
    let read = || -> Vec<u64> { ids.iter().map(|id| used_us(host, id)).collect() };
    let (before, begin) = (read(), Instant::now());
    thread::sleep(time);
    let (after, passed) = (read(), begin.elapsed().as_secs_f64());
    let of = |(after, before): (&u64, &u64)| (after - before) as f64 / 1e6 / passed;
    after.iter().zip(&before).map(of).collect()
}

/// Compares parts of what all have got, in points.
#[track_caller]
fn divided(got: &[f64], due: &[f64], within: f64) {
    let (sum, all): (f64, f64) = (got.iter().sum(), due.iter().sum());
    for (got_one, due_one) in got.iter().zip(due) {
        let (part, right) = (got_one / sum * 100.0, due_one / all * 100.0);
        assert!((part - right).abs() <= within, "{part:.1} is not {right:.1}: {got:?} for {due:?}");
    }
}

const TIME: Duration = Duration::from_secs(8);

/// Contracts under one of the backends, on an otherwise idle host.
#[track_caller]
fn contracts_hold(backend: &str) {
    let _alone = alone();
    let host = host(backend);
    let cpus = thread::available_parallelism().expect("a number").get() as f64;
    let daemon = Daemon::start(&host);
    if backend == "ext" {
        is_shown("enabled dormouse");
    }
    busy(&host, "a", &[], BUSY);
    busy(&host, "b", &["--cpu-weight", "200"], BUSY);
    busy(&host, "c", &[], BUSY);
    busy(&host, "d", &[], BUSY);
    let all = ["a", "b", "c", "d"];
    // The host's part is not theirs.
    divided(&measure(&host, &all, TIME), &[1.0, 2.0, 1.0, 1.0], 3.0);
    // A reservation, and a share of the rest.
    host.dm(&["update", "--cpu-reserve", "0.5", "c"]).ok();
    thread::sleep(Duration::from_secs(1));
    let rest = cpus * 0.95 - 0.5;
    let due = [rest / 5.0, rest * 2.0 / 5.0, 0.5 + rest / 5.0, rest / 5.0];
    divided(&measure(&host, &all, TIME), &due, 3.0);
    let kept = host.inspect("c")["cpu_backend"].clone();
    let word = if backend == "ext" { "sched_ext" } else { "weights of the daemon" };
    assert!(kept.as_str().is_some_and(|kept| kept.contains(word)), "{kept}");
    // A limit.
    host.dm(&["update", "--cpus", "0.2", "b"]).ok();
    thread::sleep(Duration::from_secs(1));
    let got = measure(&host, &all, TIME);
    assert!((0.17..=0.22).contains(&got[1]), "{got:?}");
    // A container without a share gets nothing beside others.
    host.dm(&["update", "--cpu-weight", "idle", "d"]).ok();
    thread::sleep(Duration::from_secs(1));
    let got = measure(&host, &all, TIME);
    assert!(got[3] < 0.05 * cpus, "{got:?}");
    for name in ["a", "b", "c"] {
        host.dm(&["rm", "-f", "-t", "0", name]).ok();
    }
    let got = measure(&host, &["d"], TIME);
    assert!(got[0] > 0.8, "{got:?}");
    // Time that a container slept is repaid.
    let names = ["h0", "h1", "h2", "h3", "h4", "h5"];
    names.iter().for_each(|name| busy(&host, name, &[], BUSY));
    let work =
        "while :; do i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done; busybox usleep 5000; done";
    busy(&host, "w", &["--cpu-weight", "1", "--cpu-reserve", "0.3"], work);
    thread::sleep(Duration::from_secs(2));
    let got = measure(&host, &["w"], TIME);
    assert!((0.24..=0.36).contains(&got[0]), "{got:?}");
    drop(daemon);
}

#[test]
fn ext_contracts_hold_under_the_scheduler() {
    if !is_missing() {
        contracts_hold("ext");
    }
}

#[test]
fn ext_contracts_hold_under_the_weights_of_the_daemon() {
    // Measured where the scheduler is, so that both are compared with the same numbers.
    if !is_missing() {
        contracts_hold("kernel");
    }
}

#[test]
fn ext_scheduler_ends_with_its_daemon_and_static_weights_hold() {
    if is_missing() {
        return;
    }
    let _alone = alone();
    let host = host("ext");
    start(&host, "plain", &[]);
    start(&host, "x", &["--cpu-reserve", "0.5", "--cpus", "1"]);
    let fixed = weight(&host, "x");
    let backend = || host.inspect("x")["cpu_backend"].clone();
    assert_eq!(backend(), "static weights");
    let mut daemon = Daemon::start(&host);
    is_shown("enabled dormouse");
    assert_eq!(backend(), "scheduler of the daemon (sched_ext)");
    let check = host.dm(&["check"]);
    assert!(check.stdout.contains("'dormouse' is loaded"), "{check}");
    daemon.kill();
    is_shown("disabled");
    assert_eq!(backend(), "static weights");
    assert_eq!((weight(&host, "x"), quota(&host, "x")), (fixed, [100_000, 100_000, 100_000]));
    let mut daemon = Daemon::start(&host);
    is_shown("enabled dormouse");
    let pid = rustix::process::Pid::from_child(daemon.child());
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("our child");
    assert!(daemon.child().wait().expect("our child").success());
    is_shown("disabled");
    assert!(!host.root().join("run/scheduler").exists());
}

#[test]
fn ext_daemon_governs_after_the_kernel_has_unloaded_its_scheduler() {
    if is_missing() {
        return;
    }
    let _alone = alone();
    let host = host("ext");
    let mark = host.root().join("run/governed");
    start(&host, "plain", &[]);
    start(&host, "x", &["--cpu-reserve", "0.5"]);
    let fixed = weight(&host, "x").0;
    let mut daemon = Daemon::start(&host);
    is_shown("enabled dormouse");
    // A second one finds the first.
    thread::sleep(Duration::from_secs(1));
    assert!(!mark.exists(), "no weight is governed");
    // What the watchdog does, by hand: SysRq-S ends the scheduler.
    fs::write("/proc/sysrq-trigger", "S").expect("SysRq is enabled");
    is_shown("disabled");
    assert!(wait_until(soon(), || weight(&host, "x").0 > fixed * 1.25), "{:?}", weight(&host, "x"));
    assert!(mark.exists());
    assert!(!host.root().join("run/scheduler").exists());
    assert_eq!(host.inspect("x")["cpu_backend"], "weights of the daemon");
    assert!(daemon.child().try_wait().expect("our child").is_none(), "the daemon goes on");
}

#[test]
fn daemon_without_a_scheduler_in_the_kernel_governs_by_weights() {
    if Path::new("/sys/kernel/sched_ext/state").exists() {
        eprintln!("SKIPPED: this kernel has sched_ext");
        return;
    }
    let host = host("ext");
    start(&host, "plain", &[]);
    start(&host, "x", &["--cpu-reserve", "0.5"]);
    let fixed = weight(&host, "x").0;
    let daemon = Daemon::start(&host);
    let said = daemon.said();
    assert!(said.contains("no scheduler, CPU reservations are kept by weights: "), "{said}");
    assert!(wait_until(soon(), || weight(&host, "x").0 > fixed * 1.25), "{:?}", weight(&host, "x"));
    assert_eq!(host.inspect("x")["cpu_backend"], "weights of the daemon");
    let check = host.dm(&["check"]);
    assert!(check.stdout.contains("sched_ext"), "{check}");
}

#[test]
fn unknown_scheduler_is_refused() {
    let host = host("best");
    let line = host.dm(&["daemon", "--memory", "off"]).fails();
    assert!(
        line.contains("scheduler") && line.contains("kernel") && line.contains("ext"),
        "{line}"
    );
}
