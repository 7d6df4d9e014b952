//! Idle containers fall asleep by themselves, and wake when one of their timers expires.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, dormouse, image, run, slowness, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Factor for periods that must be longer than the computation meanwhile, relative to a developer's
/// machine. Waiting takes the same time everywhere.
fn pace() -> u32 {
    slowness().min(4)
}

/// Idle time after which a container of these tests falls asleep.
fn after() -> String {
    format!("{}s", pace())
}

/// A daemon that ends with its test.
pub(crate) struct Daemon(Child);

impl Daemon {
    #[track_caller]
    pub(crate) fn start(host: &Host) -> Self {
        Self::of(host.dormouse(&["daemon"]))
    }

    #[track_caller]
    fn of(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the command starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let line = lines.next().expect("a line of output").expect("in UTF-8");
        assert!(line.contains("daemon: ready"), "{line}");
        Self(child)
    }

    pub(crate) fn signal(&mut self, signal: Signal) -> std::process::ExitStatus {
        kill_process(Pid::from_child(&self.0), signal).expect("the process runs");
        self.0.wait().expect("our child")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(Some(_)) = self.0.try_wait() {
            return; // ended by its test
        }
        // On SIGTERM the daemon leaves nothing unfinished.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let ended = || matches!(self.0.try_wait(), Ok(Some(_)));
        if !wait_until(soon(), ended) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Reasons of the container's events of one kind.
#[track_caller]
fn reasons(host: &Host, kind: &str, name: &str) -> Vec<String> {
    let text = host.dm(&["events", "--no-stream", "--json"]).ok();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of_it = events.filter(|e| e["kind"] == kind && e["name"] == name);
    of_it.map(|e| e["attributes"]["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

/// The same, once there are `count` events: an event is written after its effect is visible.
#[track_caller]
fn first_reasons(host: &Host, kind: &str, name: &str, count: usize) -> Vec<String> {
    assert!(wait_until(soon(), || reasons(host, kind, name).len() >= count));
    reasons(host, kind, name)
}

#[track_caller]
fn wait_asleep(host: &Host, name: &str) {
    let asleep = || host.state_of(name) == "asleep";
    assert!(wait_until(soon(), asleep), "'{name}' does not fall asleep");
}

/// Connects to the server of a container once the server listens.
#[track_caller]
fn call(host: &Host, name: &str) -> String {
    let address = host.address_of(name);
    let mut output = None;
    wait_until(soon(), || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        let out = run(probe, b"", Duration::from_secs(20));
        let answered = out.status == 0;
        output = Some(out);
        answered
    });
    output.expect("at least one attempt").ok().trim().to_owned()
}

const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

#[test]
fn vm_idle_server_falls_asleep_again_after_answer() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    host.dm(&[&["run", "-d", "--name", "x", "--sleep-after", &after()], COUNT].concat()).ok();
    assert_eq!(call(&host, "x"), "call 1");
    for round in 0..2 {
        wait_asleep(&host, "x");
        assert!(host.dm(&["ps"]).ok().contains("Asleep"));
        assert_eq!(call(&host, "x"), format!("call {}", round + 2));
    }
    let wakes = first_reasons(&host, "wake", "x", 2);
    assert!(wakes.iter().all(|why| why == "called"), "{wakes:?}");
    let sleeps = first_reasons(&host, "sleep", "x", 2);
    assert!(sleeps.iter().all(|why| why == "idle"), "{sleeps:?}");
    // Forbidden by an operator, sleep does not happen any more.
    host.dm(&["update", "--never-sleep", "x"]).ok();
    assert_eq!(host.inspect("x")["config"]["sleep"], "never");
}

#[test]
fn busy_and_ticking_containers_stay_awake() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    // Long enough for a busy machine.
    let time = Duration::from_secs(3) * pace();
    let run = |name: &str, after: Duration, command: &[&str]| {
        let after = format!("{}ms", after.as_millis());
        let sleepy = ["run", "-d", "--sleep-after", &after, "--name", name];
        host.dm(&[&sleepy[..], command].concat()).ok();
    };
    // Shows that the daemon is active.
    run("idle", time / 3, COUNT);
    run("ticks", time, &["busybox", "sh", "-c", "while :; do sleep 0.1; done"]);
    run("called", time, COUNT);
    let mut rounds = 0;
    let begin = Instant::now();
    let enough = time * 2;
    while begin.elapsed() < enough || host.state_of("idle") != "asleep" {
        assert!(begin.elapsed() < soon(), "the idle container does not fall asleep");
        call(&host, "called");
        rounds += 1;
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(reasons(&host, "sleep", "ticks"), [""; 0], "after {rounds} calls");
    assert_eq!(reasons(&host, "sleep", "called"), [""; 0], "after {rounds} calls");
    assert_eq!(first_reasons(&host, "sleep", "idle", 1), ["idle"]);
    // `explain` reports the cause; now and then the container is between two sleeps.
    let why = || host.dm(&["explain", "ticks"]).stdout;
    assert!(wait_until(soon(), || why().contains("(sleep) waits for no longer than 0.1 s")));
}

#[test]
fn container_with_delayable_timers_sleeps_between_them() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    let sleepy = ["run", "-d", "--sleep-after", &after(), "--name"];
    let ticks = ["busybox", "probe", "tick", "700"];
    host.dm(&[&sleepy[..], &["in-time"], &ticks].concat()).ok();
    let patient = format!("timer={}s", 5 * pace());
    host.dm(&[&sleepy[..], &["patient", "--wake-on", &patient], &ticks].concat()).ok();
    for round in 1..=2 {
        wait_asleep(&host, "patient");
        let wakes = first_reasons(&host, "wake", "patient", round);
        assert!(wakes.iter().all(|why| why == "timer"), "{wakes:?}");
    }
    assert_eq!(reasons(&host, "sleep", "in-time"), [""; 0]);
}

/// A prober connects more often than the container may be idle.
#[test]
fn container_falls_asleep_and_stays_so_while_a_prober_connects() {
    let host = Host::with_busybox();
    let etc = host.root().join("etc/config.toml");
    let text = "[keeper]\nlinger = \"0s\"\n[wake]\nprobers = [\"0.0.0.0/0\"]\n";
    fs::write(etc, text).expect("written");
    let _daemon = Daemon::start(&host);
    // A thousandth of the time between two probes is enough for an answer on a busy machine, too.
    let (idle, between) = (4 * pace(), Duration::from_secs(3) * pace());
    let run = ["run", "-d", "--name", "x", "--sleep-after", &format!("{idle}s"), "busybox"];
    host.dm(&[&run[..], &["probe", "count", "0.0.0.0", "80"]].concat()).ok();
    host.wait_inside("x", "netstat -ltn | grep -q :80");
    let address = host.address_of("x");
    let (probes, ends) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, is_over) = (Arc::clone(&probes), Arc::clone(&ends));
    let prober = host.in_network(move || {
        while !is_over.load(Ordering::Relaxed) {
            TcpStream::connect((address.as_str(), 80)).expect("a probe is answered");
            count.fetch_add(1, Ordering::Relaxed);
            thread::sleep(between);
        }
    });
    wait_asleep(&host, "x");
    let before = probes.load(Ordering::Relaxed);
    let has_probed = || probes.load(Ordering::Relaxed) > before + 1;
    assert!(wait_until(soon(), has_probed), "probes of the sleeping container");
    ends.store(true, Ordering::Relaxed);
    prober.join().expect("the thread ends");
    assert_eq!(host.state_of("x"), "asleep", "after {probes:?} probes");
    assert_eq!(reasons(&host, "wake", "x"), [""; 0]);
}

#[test]
fn vm_asleep_container_wakes_for_its_timer() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    let seconds = 6 * u64::from(pace());
    let script = format!("date +%s; sleep {seconds}; date +%s; exec sleep 100000");
    let of_x = ["run", "-d", "--name", "x", "--sleep-after", &after()];
    host.dm(&[&of_x[..], &["busybox", "sh", "-c", &script]].concat()).ok();
    wait_asleep(&host, "x");
    let times = || -> Vec<u64> {
        let text = host.dm(&["logs", "x"]).ok();
        text.lines().map(|line| line.parse().expect("a number")).collect()
    };
    assert!(wait_until(soon(), || times().len() == 2), "{:?}", times());
    let [begin, end] = times()[..] else { unreachable!("there are two") };
    let took = end - begin;
    assert!((seconds..=seconds + 5 * u64::from(slowness())).contains(&took), "{took} s");
    assert_eq!(first_reasons(&host, "wake", "x", 1), ["timer"]);
    wait_asleep(&host, "x");
}

/// No daemon is needed for that: the keeper has the timer.
#[test]
fn vm_timeouts_expire_on_time_while_asleep() {
    let host = Host::with_busybox();
    let ms = 3500 * slowness().min(10);
    // Calls with their remaining time in the kernel or in memory, and calls that restart with their
    // whole time.
    let exact = [
        "nanosleep",
        "moment",
        "futex",
        "poll",
        "ppoll",
        "select",
        "timerfd",
        "setitimer",
        "timer_create",
    ];
    let again = ["epoll_wait", "sigtimedwait", "semtimedop"];
    let text = ms.to_string();
    for (name, calls) in [("exact", &exact[..]), ("again", &again[..])] {
        let wait = ["run", "-d", "--name", name, "busybox", "probe", "waits", &text];
        host.dm(&[&wait[..], calls].concat()).ok();
    }
    for (name, calls) in [("exact", &exact[..]), ("again", &again[..])] {
        let begun = || host.dm(&["logs", name]).ok().matches("begin ").count() == calls.len();
        assert!(wait_until(soon(), begun));
    }
    host.dm(&["sleep", "exact", "again"]).ok();
    for (name, calls) in [("exact", &exact[..]), ("again", &again[..])] {
        let logs = || host.dm(&["logs", name]).ok();
        assert!(wait_until(soon(), || logs().lines().any(|l| l == "all")), "{name}: {}", logs());
        assert_eq!(first_reasons(&host, "wake", name, 1), ["timer"]);
        for call in calls {
            let text = logs();
            let line = text.lines().find(|line| line.split(' ').next() == Some(call));
            let words: Vec<&str> = line.expect("a line of output").split(' ').collect();
            let took: u32 = words[2].parse().expect("a number");
            let most = if name == "exact" { ms + 1500 * slowness() } else { ms * 2 };
            assert!(words[1] == "over" && (ms - 1..=most).contains(&took), "{words:?}");
        }
    }
}

#[test]
fn containers_outlive_killed_daemon_and_next_one_takes_over() {
    let host = Host::with_busybox();
    let mut daemon = Daemon::start(&host);
    assert!(host.dm(&["daemon"]).err(125).contains("already"));
    host.dm(&[&["run", "-d", "--name", "x"], COUNT].concat()).ok();
    call(&host, "x");
    daemon.signal(Signal::KILL);
    assert_eq!(call(&host, "x"), "call 2", "an answer without a daemon");
    // A policy that was set without a daemon is found by the next one, and survives a restart.
    host.dm(&["update", "--sleep-after", &after(), "x"]).ok();
    host.dm(&["restart", "x"]).ok();
    let mut daemon = Daemon::start(&host);
    wait_asleep(&host, "x");
    assert_eq!(host.inspect("x")["config"]["sleep"]["after_ms"], 1000 * pace());
    assert_eq!(call(&host, "x"), "call 1");
    assert!(daemon.signal(Signal::TERM).success(), "a clean end on SIGTERM");
    assert_eq!(call(&host, "x"), "call 2");
}

/// Also a keeper that is killed while it receives its predecessor's descriptors. No command is
/// needed for that.
#[test]
fn daemon_replaces_repeatedly_killed_keeper() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    host.dm(&[&["run", "-d", "--name", "x"], COUNT].concat()).ok();
    let address = host.address_of("x");
    call(&host, "x");
    let keeper = |not: u32| {
        let all = host.processes().into_iter().filter(|(_, line)| line.contains("keeper"));
        all.map(|(pid, _)| pid).find(|pid| *pid != not)
    };
    for round in 0..12 {
        host.dm(&["sleep", "x"]).ok();
        let mut last = 0;
        for _ in 0..=round % 4 {
            assert!(wait_until(soon(), || keeper(last).is_some()), "no keeper has custody");
            last = keeper(last).unwrap_or(last);
            let pid = Pid::from_raw(last as i32).expect("a pid");
            let _ = kill_process(pid, Signal::KILL); // a keeper may have ended just now
            thread::sleep(Duration::from_millis(round % 5));
        }
        let answers = || {
            let mut probe = host.command(image::probe());
            probe.args(["ask", &address, "80"]);
            run(probe, b"", soon()).status == 0
        };
        assert!(wait_until(soon(), answers), "clients get no answer in round {round}");
    }
}

/// An upgrade replaces the file of a running program.
#[test]
fn daemon_continues_with_replaced_program() {
    let host = Host::with_busybox();
    let own = host.dir().join("own");
    fs::create_dir(&own).expect("created");
    for name in ["dormouse", "dormouse-keeper"] {
        fs::copy(dormouse().with_file_name(name), own.join(name)).expect("copy the file");
    }
    let program = own.join("dormouse");
    let mut command = host.command(&program);
    command.arg("--root").arg(host.root()).arg("daemon");
    let _daemon = Daemon::of(command);
    host.dm(&[&["run", "-d", "--name", "x"], COUNT].concat()).ok();
    let address = host.address_of("x");
    assert_eq!(call(&host, "x"), "call 1");
    host.dm(&["sleep", "x"]).ok();
    let next = own.join("next");
    fs::copy(&program, &next)
        .and_then(|_| fs::rename(&next, &program))
        .expect("replace the program");
    let keeper = host.processes().into_iter().find(|(_, line)| line.contains("keeper"));
    let (keeper, _) = keeper.expect("a keeper");
    kill_process(Pid::from_raw(keeper as i32).expect("a pid"), Signal::KILL)
        .expect("the process runs");
    // No command runs: the daemon starts the process that accepts the client.
    let mut answer = String::new();
    let answers = || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        let out = run(probe, b"", soon());
        answer = out.stdout;
        out.status == 0
    };
    assert!(wait_until(soon(), answers), "the container is not woken");
    assert_eq!(answer.trim(), "call 2");
}

/// Sends a request to a running server, without a command of ours.
#[track_caller]
fn query(host: &Host, address: &str, port: &str) -> String {
    let mut probe = host.command(image::probe());
    probe.args(["ask", address, port]);
    run(probe, b"", soon()).ok().trim().to_owned()
}

/// Removes everything that a reboot removes: all processes, all mounts, everything in RUN.
#[track_caller]
fn reboot(host: &Host) {
    for (pid, _) in host.processes() {
        host.sh(&format!("kill -9 {pid}"));
    }
    assert!(wait_until(soon(), || host.processes().is_empty()));
    let run = host.root().join("run");
    for mount in host.mounts().iter().rev().filter(|mount| mount.contains(&*run.to_string_lossy()))
    {
        host.sh(&format!("umount -l '{mount}'"));
    }
    host.sh(&format!("rm -rf --one-file-system '{}'", run.display())).ok();
    let id = host.dir().join("boot_id");
    std::fs::write(&id, "0b00b1e5-0000-4000-8000-000000000000\n").expect("write the file");
    host.sh(&format!("mount --bind {} /proc/sys/kernel/random/boot_id", id.display())).ok();
}

#[test]
fn vm_asleep_containers_survive_reboot_and_wake_on_traffic() {
    let host = Host::with_busybox();
    let run_one = |name: &str, options: &[&str], port: &str| {
        let first = [&["run", "-d", "--name", name], options].concat();
        host.dm(&[&first[..], &["busybox", "probe", "count", "0.0.0.0", port]].concat()).ok();
    };
    run_one("x", &["-p", "8080:80"], "80");
    run_one("y", &[], "80");
    run_one("z", &["--domain", "other"], "80");
    run_one("h", &["--net", "host"], "8081");
    run_one("quiet", &["--net", "none"], "80");
    run_one("awake", &[], "80");
    let address = |name: &str| host.address_of(name);
    let all = [
        (address("x"), "80"),
        (address("y"), "80"),
        (address("z"), "80"),
        ("127.0.0.1".to_owned(), "8081"),
    ];
    for name in ["x", "y", "awake"] {
        assert_eq!(call(&host, name), "call 1");
    }
    for (name, port) in [("z", 80), ("quiet", 80), ("h", 8081)] {
        host.wait_inside(name, &format!("netstat -ltn | grep -q ':{port} '"));
    }
    host.dm(&["sleep", "x", "y", "z", "h", "quiet"]).ok();
    reboot(&host);
    let _daemon = Daemon::start(&host);
    for name in ["x", "y", "z", "h", "quiet"] {
        assert_eq!(host.state_of(name), "asleep", "{name}");
    }
    assert!(["created", "stopped"].contains(&host.state_of("awake").as_str()));
    let lost = host.dm(&["events", "--no-stream"]).ok();
    assert!(!lost.contains("lost"), "{lost}");
    assert_eq!(query(&host, &all[1].0, all[1].1), "call 2");
    let answer = host.neighbour_sh(&format!("busybox nc -w 9 {} 8080 </dev/null", Host::ADDRESS));
    assert_eq!(answer.ok().trim(), "call 2");
    assert!(query(&host, &all[3].0, all[3].1).starts_with("call "));
    host.dm(&["wake", "z", "quiet"]).ok();
    for name in ["x", "y", "z", "h", "quiet"] {
        assert_eq!(host.state_of(name), "running", "{name}");
    }
    host.sh("umount /proc/sys/kernel/random/boot_id").ok();
}

#[test]
fn failed_idle_sleep_is_reported_once_and_leaves_container_running() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    host.dm(&[&["run", "-d", "--name", "x", "--sleep-after", "100ms"], COUNT].concat()).ok();
    let stays = (5 * pace()).to_string();
    let mut entered =
        host.dormouse(&["exec", "x", "sleep", &stays]).spawn().expect("the command starts");
    let is_reported = || reasons(&host, "awake", "x").iter().any(|why| why.contains("(sleep)"));
    assert!(wait_until(soon(), is_reported));
    // The daemon tries again after 0.2 s, 0.4 s, ...
    thread::sleep(Duration::from_secs(1));
    let causes = reasons(&host, "awake", "x");
    // The exec'd process may be about to become sleep(1), which is a new cause.
    let of_sleep = causes.iter().filter(|why| why.contains("(sleep)")).count();
    assert!(of_sleep == 1 && causes.len() <= 2, "{causes:?}");
    assert_eq!(host.state_of("x"), "running");
    assert!(entered.wait().expect("a started child").success(), "a normal end");
    wait_asleep(&host, "x");
    assert_eq!(call(&host, "x"), "call 1");
}

#[test]
fn invalid_sleep_policy_is_refused_and_older_record_has_none() {
    let host = Host::with_busybox();
    let refused = |options: &[&str]| {
        let create = [&["create", "--name", "y"], options, &["busybox", "true"]].concat();
        host.dm(&create).err(125)
    };
    assert!(refused(&["--rm", "--sleep-after", "1s"]).contains("--rm"));
    assert!(refused(&["--sleep-after", "5ms"]).contains("100ms"));
    assert!(refused(&["--sleep-after", "soon"]).contains("duration"));
    assert!(refused(&["--sleep-after", "1s", "--never-sleep"]).contains("--never-sleep"));
    let id = host.dm(&["create", "--sleep-after", "90", "--name", "x", "busybox", "true"]).ok();
    assert!(
        host.dm(&["inspect", "--format", "table", "x"]).ok().contains("after 90 s without work")
    );
    let path = host.root().join("lib/containers").join(id).join("config.json");
    let text = std::fs::read_to_string(&path).expect("a record");
    let mut record: Value = serde_json::from_str(&text).expect("JSON");
    record.as_object_mut().expect("an object").remove("sleep").expect("a field of the record");
    std::fs::write(&path, record.to_string()).expect("write the file");
    assert_eq!(host.inspect("x")["config"]["sleep"], "never");
}
