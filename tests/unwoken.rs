//! A wake that fails loses nothing: the container sleeps on, the cause is shown, clients wait, and the next
//! attempt works when the cause is gone.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, Output, image, soon, wait_until};
use rustix::fs::FlockOperation;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, send,
    socket_with,
};
use serde_json::Value;

use crate::checkpoint::rewrite;

/// A client of `x`, which waits for its answer as long as the test does.
fn client(host: &Host) -> JoinHandle<Output> {
    let mut probe = host.command(image::probe());
    probe.args(["ask", &host.address_of("x"), "80"]);
    thread::spawn(move || dormouse_testkit::run(probe, b"", soon()))
}

/// Has a new client answered. Only the first attempt may precede the listener.
#[track_caller]
fn ask(host: &Host) -> String {
    let mut last = None;
    wait_until(soon(), || {
        let out = client(host).join().expect("the thread ends");
        let is_answered = out.status == 0;
        last = Some(out);
        is_answered
    });
    last.expect("at least one attempt").ok().trim().to_owned()
}

/// Runs a server `x` that numbers its connections, with these options and a file of the volume `/data` open.
/// The file is `data/file` in the scratch directory.
#[track_caller]
fn serving(host: &Host, options: &[&str]) -> PathBuf {
    let data = host.dir().join("data");
    fs::create_dir_all(&data).expect("a scratch directory");
    fs::write(data.join("file"), "text").expect("a scratch file");
    let volume = format!("{}:/data", data.display());
    let script = "exec 3</data/file; exec probe count 0.0.0.0 80 4096";
    let run = ["run", "-d", "--name", "x", "-v", &volume];
    host.dm(&[&run, options, &["busybox", "sh", "-c", script]].concat()).ok();
    assert_eq!(ask(host), "call 1");
    data.join("file")
}

/// Returns the facts about failed wakes that `inspect` shows.
fn failed(host: &Host) -> Value {
    host.inspect("x")["wake_failed"].clone()
}

/// Waits until the container is asleep again: each attempt to wake it, also one for a waiting client, makes
/// processes that run for a moment.
#[track_caller]
fn falls_back_asleep(host: &Host) {
    host.wait_for_state("x", "asleep");
}

/// Waits until a wake has failed. `inspect`, `ps` and an event then show this cause.
#[track_caller]
fn wait_for_failure(host: &Host, cause: &str) {
    let is_shown = || failed(host)["cause"].as_str().is_some_and(|text| text.contains(cause));
    assert!(wait_until(soon(), is_shown), "{} has no '{cause}'", host.inspect("x"));
    let shown = host.dm(&["ps", "--no-trunc"]).ok();
    assert!(shown.contains("(wake failed: ") && shown.contains(cause), "{shown}");
    let json = host.dm(&["ps", "--json"]).ok();
    let all: Value = serde_json::from_str(&json).expect("JSON");
    let listed = all[0]["wake_failed"]["cause"].as_str();
    assert!(listed.is_some_and(|text| text.contains(cause)), "{json}");
    falls_back_asleep(host);
}

#[track_caller]
fn has_event(host: &Host, cause: &str) {
    let events = host.dm(&["events", "--no-stream"]).ok();
    let is_it = |line: &str| line.contains("wake_failed") && line.contains(cause);
    assert!(events.lines().any(is_it), "{events}");
}

#[test]
fn vm_failed_wake_keeps_container_and_clients_until_cause_is_gone() {
    let host = Host::with_busybox();
    let file = serving(&host, &[]);
    host.put_to_sleep("x");
    let away = file.with_extension("away");
    fs::rename(&file, &away).expect("moved");
    let waits = client(&host);
    wait_for_failure(&host, "/data/file");
    has_event(&host, "/data/file");
    // Commands report the cause, and change nothing.
    let before = failed(&host)["attempts"].as_u64().expect("a number");
    for verb in [&["wake", "x"][..], &["exec", "x", "true"], &["start", "x"], &["stop", "x"]] {
        let out = host.dm(verb);
        assert!(out.status != 0 && out.stderr.contains("/data/file"), "{verb:?}: {out}");
        falls_back_asleep(&host);
        assert!(verb[0] != "stop" || out.stderr.contains("stop --time 0"), "{out}");
    }
    assert!(failed(&host)["attempts"].as_u64() >= Some(before + 4), "{}", failed(&host));
    assert!(!waits.is_finished(), "the client still waits");
    fs::rename(&away, &file).expect("moved back");
    host.dm(&["wake", "x"]).ok();
    assert_eq!(waits.join().expect("the thread ends").ok().trim(), "call 2");
    assert_eq!((failed(&host), host.state_of("x").as_str()), (Value::Null, "running"));
    assert!(!host.dm(&["ps"]).ok().contains("wake failed"));
    assert_eq!(ask(&host), "call 3");
    // The end of a sleep ends the report, too.
    host.put_to_sleep("x");
    fs::rename(&file, &away).expect("moved");
    assert_ne!(host.dm(&["wake", "x"]).status, 0);
    wait_for_failure(&host, "/data/file");
    host.dm(&["stop", "--time", "0", "x"]).ok();
    assert_eq!((failed(&host), host.state_of("x").as_str()), (Value::Null, "stopped"));
    fs::rename(&away, &file).expect("moved back");
    host.dm(&["start", "x"]).ok();
    assert_eq!(ask(&host), "call 1", "a new start");
}

/// An open connection and a waiting one outlive a failed wake, the keeper and the failed wake after it.
/// `/etc/passwd` belongs to the container.
#[test]
fn container_that_removed_its_user_from_passwd_wakes() {
    let host = Host::with_busybox();
    let serve = ["probe", "count", "0.0.0.0", "8080", "4096"];
    let create = ["create", "--name", "x", "--user", "app", "busybox"];
    host.dm(&[&create[..], &serve].concat()).ok();
    let passwd = host.dir().join("passwd");
    fs::write(&passwd, "root:x:0:0::/:/bin/sh\napp:x:1000:1000::/:/bin/sh\n")
        .expect("a scratch file");
    host.dm(&["cp", passwd.to_str().expect("UTF-8"), "x:/etc/passwd"]).ok();
    host.dm(&["start", "x"]).ok();
    let ask = || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &host.address_of("x"), "8080"]);
        dormouse_testkit::run(probe, b"", soon())
    };
    wait_until(soon(), || ask().status == 0);
    host.dm(&["exec", "--user", "0", "x", "sh", "-c", ": >/etc/passwd"]).ok();
    for _ in 0..2 {
        host.dm(&["sleep", "x"]).ok();
        let answer = ask().ok();
        assert!(answer.starts_with("call "), "{answer}");
    }
    assert_eq!(
        host.dm(&["exec", "--user", "0", "x", "grep", "^Uid:", "/proc/1/status"])
            .ok()
            .split_whitespace()
            .nth(1),
        Some("1000")
    );
}

#[test]
fn vm_connections_of_failed_wake_survive_killed_keeper() {
    let host = Host::with_busybox();
    let file = serving(&host, &[]);
    host.put_to_sleep("x");
    let away = file.with_extension("away");
    fs::rename(&file, &away).expect("moved");
    assert_ne!(host.dm(&["wake", "x"]).status, 0);
    let waits = client(&host);
    let attempts = || failed(&host)["attempts"].as_u64().unwrap_or(0);
    assert!(wait_until(soon(), || attempts() >= 2), "{}", failed(&host));
    let keeper = host.keeper().expect("a keeper");
    let pid = rustix::process::Pid::from_raw(keeper as i32).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it exists");
    assert!(wait_until(soon(), || host.processes().iter().all(|(pid, _)| *pid != keeper)));
    let before = attempts();
    host.dm(&["ps"]).ok(); // starts the next keeper
    assert!(wait_until(soon(), || attempts() > before), "the next keeper finds the client");
    fs::rename(&away, &file).expect("moved back");
    assert_eq!(waits.join().expect("the thread ends").ok().trim(), "call 2");
    assert_eq!(host.state_of("x"), "running");
}

#[test]
fn wake_fails_by_name_of_missing_cpu_feature_and_works_with_it() {
    let host = Host::with_busybox();
    serving(&host, &[]);
    host.put_to_sleep("x");
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let asleep = host.root().join("lib/containers").join(id).join("asleep");
    let copy = host.dir().join("copy");
    let (from, to) = (asleep.display(), copy.display());
    host.sh(&format!("cp -a {from} {to}")).ok();
    rewrite(&asleep, |records| {
        records.about.boot_id = "9b9d9af2-5a7f-4b07-93a1-a2f3e4d5c6b7".into();
        records.about.cpu.push("of_tomorrow".into());
    });
    let waits = client(&host);
    wait_for_failure(&host, "this CPU lacks of_tomorrow");
    has_event(&host, "of_tomorrow");
    host.sh(&format!("rm -r {from} && mv {to} {from}")).ok();
    // Without a command: the keeper tries again.
    assert_eq!(waits.join().expect("the thread ends").ok().trim(), "call 2");
    assert_eq!((failed(&host), host.state_of("x").as_str()), (Value::Null, "running"));
}

#[test]
fn vm_wake_on_full_disk_fails_and_works_when_space_is_free() {
    let host = Host::new();
    let run = host.root().join("run");
    fs::create_dir_all(&run).expect("made");
    let run = run.display();
    host.sh(&format!("mount -t tmpfs -o size=4m,mode=0700 none {run}")).ok();
    host.import(&image::busybox(), "busybox");
    serving(&host, &[]);
    host.put_to_sleep("x");
    host.sh(&format!("dd if=/dev/zero of={run}/ballast bs=4k 2>/dev/null; true")).ok();
    let waits = client(&host);
    wait_for_failure(&host, "No space left");
    has_event(&host, "No space left");
    let out = host.dm(&["wake", "x"]);
    assert!(out.status != 0 && out.stderr.contains("No space left"), "{out}");
    falls_back_asleep(&host);
    host.sh(&format!("rm {run}/ballast")).ok();
    assert_eq!(waits.join().expect("the thread ends").ok().trim(), "call 2");
    assert_eq!((failed(&host), host.state_of("x").as_str()), (Value::Null, "running"));
    host.dm(&["rm", "--force", "x"]).ok();
    host.dm(&["internal", "reset"]).ok();
    host.sh(&format!("umount {run}")).ok();
}

/// Without a daemon, too, clients wait until the host has memory for a wake.
#[test]
fn wake_waits_while_host_lacks_memory() {
    let host = Host::with_busybox();
    serving(&host, &[]);
    host.put_to_sleep("x");
    let etc = host.root().join("etc");
    fs::create_dir_all(&etc).expect("made");
    fs::write(etc.join("config.toml"), "[wake]\nreserve = \"900t\"\n").expect("written");
    let waits = [client(&host), client(&host)];
    wait_for_failure(&host, "the host has no memory for it");
    has_event(&host, "no memory");
    fs::write(etc.join("config.toml"), "[wake]\nreserve = \"1m\"\n").expect("written");
    let mut answers =
        waits.map(|client| client.join().expect("the thread ends").ok().trim().to_owned());
    answers.sort_unstable();
    assert_eq!(answers, ["call 2", "call 3"]);
    assert_eq!((failed(&host), host.state_of("x").as_str()), (Value::Null, "running"));
}

#[test]
fn vm_clients_of_failing_wake_are_reset_after_configured_time() {
    let host = Host::with_busybox();
    let file = serving(&host, &[]);
    let etc = host.root().join("etc");
    fs::create_dir_all(&etc).expect("made");
    fs::write(etc.join("config.toml"), "[wake]\nclients-wait = \"0s\"\n").expect("written");
    host.put_to_sleep("x");
    let away = file.with_extension("away");
    fs::rename(&file, &away).expect("moved");
    let address = host.address_of("x");
    let error = host.in_network(move || {
        let mut peer = TcpStream::connect((address, 80)).expect("the listener is held");
        peer.set_read_timeout(Some(soon())).expect("a time");
        let _ = peer.write(b"x"); // may be reset already
        peer.read(&mut [0; 8]).map_err(|e| e.kind())
    });
    assert_eq!(error.join().expect("the thread ends"), Err(ErrorKind::ConnectionReset));
    falls_back_asleep(&host);
    fs::rename(&away, &file).expect("moved back");
    host.dm(&["wake", "x"]).ok();
    assert_eq!(ask(&host), "call 2", "the reset client was never accepted");
}

#[test]
fn limit_below_memory_of_asleep_container_is_refused_with_both_figures() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "--memory", "200m", "--memory-swap", "200m"];
    host.dm(&[&serve[..], &["busybox", "probe", "count", "0.0.0.0", "80", "40960"]].concat()).ok();
    assert_eq!(ask(&host), "call 1");
    host.put_to_sleep("x");
    let out = host.dm(&["update", "--memory", "20m", "--memory-swap", "20m", "x"]);
    let text = &out.stderr;
    assert!(out.status != 0 && text.contains("the new limit of 20480k"), "{out}");
    let needed = text.split("needs ").nth(1).and_then(|rest| rest.split('k').next());
    let needed: u64 = needed.and_then(|text| text.parse().ok()).expect("a number of kB");
    assert!((40_960..60_000).contains(&needed), "{out}");
    host.dm(&["update", "--memory", "100m", "--memory-swap", "100m", "x"]).ok();
    assert_eq!(ask(&host), "call 2", "the refused limit is not on record");
}

/// A daemon that never grants memory.
struct Stingy {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stingy {
    fn start(host: &Host) -> Self {
        let path = host.root().join("run/gate.sock");
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let gate = socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket");
        bind(&gate, &SocketAddrUnix::new(&path).expect("a short path")).expect("bound");
        listen(&gate, 8).expect("it listens");
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            let mut clients = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                clients.extend(accept(&gate));
                clients.retain(|client| send(client, b"wait", SendFlags::NOSIGNAL).is_ok());
                thread::sleep(Duration::from_millis(200));
            }
            fs::remove_file(&path).expect("removed");
        });
        Self { ends, thread: Some(thread) }
    }
}

impl Drop for Stingy {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The time of `stop` includes the wait for memory.
#[test]
fn stop_of_asleep_container_reports_missing_memory_within_its_time() {
    let host = Host::with_busybox();
    serving(&host, &[]);
    host.put_to_sleep("x");
    let stingy = Stingy::start(&host);
    let mut stop: Child =
        host.dormouse(&["stop", "--time", "2", "x"]).spawn().expect("the command starts");
    let begin = Instant::now();
    let mut status = None;
    let ended = wait_until(soon(), || {
        status = stop.try_wait().expect("our child");
        status.is_some()
    });
    assert!(ended, "stop still waits after {:?}", begin.elapsed());
    assert!(!status.expect("an exit").success());
    assert_eq!(host.state_of("x"), "asleep");
    // Without the signal it needs no memory.
    drop(stingy);
    assert_eq!(ask(&host), "call 2", "its memory was kept");
    host.put_to_sleep("x");
    let stingy = Stingy::start(&host);
    host.dm(&["stop", "--time", "0", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
    drop(stingy);
}

/// Blocks all starts and wakes, which wait with the lock of their container held, until it is closed. A file
/// system that does not answer has the same effect.
fn blockade(host: &Host) -> fs::File {
    let lock = fs::File::open(host.root().join("run/use.lock")).expect("a container was started");
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).expect("no start is in progress");
    lock
}

/// Waits until wakes of this number are in progress.
#[track_caller]
fn wait_for_wakes(host: &Host, count: usize) {
    let pending = host.root().join("run/pending");
    let begun = || fs::read_dir(&pending).is_ok_and(|entries| entries.count() == count);
    assert!(wait_until(soon(), begun), "no wake has begun");
}

#[test]
fn forced_ends_of_container_end_its_blocked_wake() {
    let host = Host::with_busybox();
    for (verb, state) in [
        (&["stop", "--time", "0", "x"][..], "stopped"),
        (&["kill", "x"], "stopped"),
        (&["rm", "--force", "x"], "no container"),
    ] {
        serving(&host, &[]);
        host.put_to_sleep("x");
        let block = blockade(&host);
        let waits = client(&host);
        wait_for_wakes(&host, 1);
        host.dm_within(soon(), verb).ok();
        match state {
            "stopped" => assert_eq!(host.state_of("x"), state, "{verb:?}"),
            _ => assert!(host.dm(&["inspect", "x"]).stderr.contains(state)),
        }
        assert_ne!(waits.join().expect("the thread ends").status, 0, "{verb:?}");
        drop(block);
        if state == "stopped" {
            host.dm(&["start", "x"]).ok();
            assert_eq!(ask(&host), "call 1", "a new start");
            host.dm(&["rm", "--force", "x"]).ok();
        }
    }
}

/// Also where the wake is that of a command, and was stopped by a signal.
#[test]
fn forced_removal_ends_wake_of_stopped_command() {
    let host = Host::with_busybox();
    serving(&host, &[]);
    host.put_to_sleep("x");
    let block = blockade(&host);
    let mut wake: Child = host.dormouse(&["wake", "x"]).spawn().expect("the command starts");
    wait_for_wakes(&host, 1);
    let command = host.processes().into_iter().find(|(_, words)| words.ends_with("wake x"));
    let pid = command.and_then(|(pid, _)| rustix::process::Pid::from_raw(pid as i32));
    let pid = pid.expect("the command runs");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("our process");
    host.dm_within(soon(), &["rm", "--force", "x"]).ok();
    drop(block);
    assert!(!wake.wait().expect("our child").success());
}

#[test]
fn stop_behind_blocked_wake_reports_its_process_and_loses_nothing() {
    let host = asleep_with("within = \"1s\"", &[]);
    let block = blockade(&host);
    let waits = client(&host);
    wait_for_wakes(&host, 1);
    let out = host.dm_within(soon(), &["stop", "--time", "1", "x"]);
    assert!(out.status != 0 && out.stderr.lines().count() == 1, "{out}");
    for part in ["process ", "internal wake'", "container 'x'", "'stop --time 0' ends the wake"] {
        assert!(out.stderr.contains(part), "{part}: {out}");
    }
    assert_eq!(host.state_of("x"), "asleep");
    drop(block);
    let number = |answer: String| answer.strip_prefix("call ").and_then(|n| n.parse::<u32>().ok());
    let count = number(ask(&host)).expect("a number");
    assert!(count > 1, "its memory was kept");
    let _ = waits.join(); // it may have given up
    // The wake of `stop` itself.
    host.put_to_sleep("x");
    let block = blockade(&host);
    let out = host.dm_within(soon(), &["stop", "--time", "1", "x"]);
    assert!(out.status != 0 && out.stderr.lines().count() == 1, "{out}");
    for part in ["cannot wake 'x' for its stop signal", "has not ended within", "stop --time 0"] {
        assert!(out.stderr.contains(part), "{part}: {out}");
    }
    assert_eq!(host.state_of("x"), "asleep");
    drop(block);
    assert!(number(ask(&host)) > Some(count), "its memory was kept");
    host.dm(&["stop", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
}

/// The lock of another process than Dormouse's is left to the operator.
#[test]
fn forced_removal_reports_foreign_holder_of_the_lock() {
    let host = asleep_with("within = \"1s\"", &[]);
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let lock = fs::File::open(host.root().join("lib/containers").join(id)).expect("a directory");
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).expect("no verb is in progress");
    let out = host.dm_within(soon(), &["rm", "--force", "x"]);
    let own = format!("process {} (", std::process::id());
    assert!(out.status != 0 && out.stderr.contains(&own), "{out}");
    assert!(out.stderr.contains("wait for the end of that process"), "{out}");
    assert_eq!(host.state_of("x"), "asleep");
    drop(lock);
    assert_eq!(ask(&host), "call 2");
}

/// The control groups of `x`.
fn cgroups(host: &Host) -> Vec<PathBuf> {
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let all = host.cgroups().into_iter().map(|above| above.join(&id));
    all.filter(|path| path.exists()).collect()
}

/// A container may freeze itself, where it has a control group of its own.
#[test]
fn vm_exec_and_stop_of_frozen_container_end() {
    let host = Host::with_busybox();
    serving(&host, &[]);
    let freeze = |to: &str| {
        let files = cgroups(&host).into_iter().map(|path| path.join("cgroup.freeze"));
        let done = files.filter(|file| fs::write(file, to).is_ok()).count();
        let v1 = if to == "1" { "FROZEN" } else { "THAWED" };
        let files = cgroups(&host).into_iter().map(|path| path.join("freezer.state"));
        assert!(done + files.filter(|file| fs::write(file, v1).is_ok()).count() > 0);
    };
    freeze("1");
    let out = host.dm_within(soon(), &["exec", "x", "true"]);
    assert!(out.status != 0 && out.stderr.contains("is frozen"), "{out}");
    freeze("0");
    assert_eq!(ask(&host), "call 2");
    host.dm(&["exec", "x", "true"]).ok();
    freeze("1");
    host.dm_within(soon(), &["stop", "--time", "1", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
}

/// The records of zombies take a few bytes each.
#[test]
fn checkpoint_with_more_tasks_than_allowed_is_refused_before_any_is_made() {
    let host = Host::with_busybox();
    serving(&host, &["--pids", "50"]);
    host.put_to_sleep("x");
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let asleep = host.root().join("lib/containers").join(id).join("asleep");
    let copy = host.dir().join("copy");
    let (from, to) = (asleep.display(), copy.display());
    host.sh(&format!("cp -a {from} {to}")).ok();
    let zombies = |count: u32| {
        host.sh(&format!("rm -r {from} && cp -a {to} {from}")).ok();
        rewrite(&asleep, |records| {
            let first = records.processes[0].clone();
            let zombie = |n: u32| {
                let mut one = first.clone();
                (one.pid, one.parent) = (1000 + n, first.pid);
                (one.ended, one.memory, one.directory) = (Some(0), None, None);
                one.threads.clear();
                one.descriptors.clear();
                one
            };
            records.processes.extend((0..count).map(zombie));
        });
        host.dm(&["wake", "x"])
    };
    let out = zombies(60);
    assert!(
        out.stderr.contains("has 61 processes and threads, more than its limit of 50"),
        "{out}"
    );
    assert_eq!(host.state_of("x"), "asleep");
    host.sh(&format!("rm -r {from} && cp -a {to} {from}")).ok();
    host.dm(&["wake", "x"]).ok();
    assert_eq!(ask(&host), "call 2");
}

/// A connection alone wakes no container that is woken by the first byte.
#[test]
fn vm_scan_wakes_no_container_that_waits_for_data_first() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "--wake-on", "data-first,data", "busybox"];
    host.dm(&[&serve[..], &["probe", "stream", "0.0.0.0", "80"]].concat()).ok();
    host.wait_inside("x", "netstat -ltn | grep -q :80");
    assert_eq!(host.inspect("x")["config"]["wake_on"]["data_first"], true);
    host.put_to_sleep("x");
    let address = host.address_of("x");
    let events = || {
        let events = host.dm(&["events", "--no-stream"]).ok();
        events.lines().filter(|line| line.contains(" wake ")).count()
    };
    assert_eq!(events(), 0);
    let at = address.clone();
    let scan = host.in_network(move || {
        let connect = || TcpStream::connect((at.as_str(), 80)).expect("the listener is held");
        drop((connect(), connect()));
        connect()
    });
    let mut open = scan.join().expect("the thread ends");
    // Looks at it have had the time of several wakes.
    thread::sleep(Duration::from_secs(2));
    assert_eq!((host.state_of("x").as_str(), events()), ("asleep", 0));
    // A further silent client of many seconds, and then one that sends.
    let answer = host.in_network(move || {
        let mut peer = TcpStream::connect((address, 80)).expect("the listener is held");
        peer.write_all(b"<1\n").expect("a byte");
        peer.set_read_timeout(Some(soon())).expect("a time");
        peer.read(&mut [0; 1]).expect("an answer")
    });
    assert_eq!(answer.join().expect("the thread ends"), 1);
    assert_eq!(host.state_of("x"), "running");
    // The event follows the answer.
    assert!(wait_until(soon(), || events() == 1), "{} wakes", events());
    // The silent client was accepted, and is answered when it sends.
    open.set_read_timeout(Some(soon())).expect("a time");
    open.write_all(b"<1\n").expect("a byte");
    assert_eq!(open.read(&mut [0; 1]).expect("an answer"), 1);
}

/// Runs a server `x` that is asleep then, with this section `[wake]`.
fn asleep_with(wake: &str, options: &[&str]) -> Host {
    let host = Host::with_busybox();
    serving(&host, options);
    configure(&host, wake);
    host.put_to_sleep("x");
    host
}

fn configure(host: &Host, wake: &str) {
    let text = format!("[keeper]\nlinger = \"0s\"\n[wake]\n{wake}\n");
    fs::write(host.root().join("etc/config.toml"), text).expect("written");
}

/// Connects to `x` from the host, and returns the connection and its own address.
fn connected(host: &Host) -> (TcpStream, std::net::IpAddr) {
    let address = host.address_of("x");
    let connect = host.in_network(move || {
        let peer = TcpStream::connect((address, 80)).expect("the listener is held");
        let own = peer.local_addr().expect("an address").ip();
        (peer, own)
    });
    connect.join().expect("the thread ends")
}

/// Has a container `other` of the same domain answered by `x`.
#[track_caller]
fn ask_from_container(host: &Host) -> String {
    let address = host.address_of("x");
    let ask = ["run", "--rm", "--name", "other", "busybox", "probe", "ask", &address, "80"];
    host.dm_within(soon(), &ask).ok().trim().to_owned()
}

/// Waits until the waker has looked at all clients; a wake would have begun by then.
#[track_caller]
fn stays_asleep(host: &Host) {
    // Looks at silent clients: a wake takes some milliseconds.
    thread::sleep(Duration::from_secs(1));
    assert_eq!(host.state_of("x"), "asleep");
}

#[test]
fn vm_client_beyond_its_rate_waits_and_others_wake_the_container() {
    let host = asleep_with("client-rate = \"1/1h\"", &[]);
    assert_eq!(ask(&host), "call 2", "the first wake of the host's address");
    host.put_to_sleep("x");
    let waits = client(&host);
    stays_asleep(&host);
    assert!(!waits.is_finished(), "the client waits");
    // The wake by another address serves the waiting client as well.
    let answer = ask_from_container(&host);
    let mut answers = [answer, waits.join().expect("the thread ends").ok().trim().to_owned()];
    answers.sort_unstable();
    assert_eq!(answers, ["call 3", "call 4"]);
    // An operator wakes at any time, and so does a client once no rate is set.
    host.put_to_sleep("x");
    let waits = client(&host);
    stays_asleep(&host);
    configure(&host, "client-rate = \"unlimited\"");
    assert_eq!(waits.join().expect("the thread ends").ok().trim(), "call 5");
}

#[test]
fn vm_prober_wakes_no_container_and_fills_no_queue() {
    let host = asleep_with("", &[]);
    let (_, own) = connected(&host);
    assert!(wait_until(soon(), || host.state_of("x") == "running"), "no prober yet");
    configure(&host, &format!("probers = [\"{own}\"]"));
    // The ended connection is accepted and its wake is over.
    assert_eq!(ask(&host), "call 3");
    host.put_to_sleep("x");
    // The server's queue has room for fewer.
    let address = host.address_of("x");
    let probes = host.in_network(move || {
        let probe = |_| TcpStream::connect((address.as_str(), 80));
        (0..200).map(probe).filter(Result::is_ok).count()
    });
    assert_eq!(probes.join().expect("the thread ends"), 200, "each probe is answered");
    stays_asleep(&host);
    assert!(ask_from_container(&host).starts_with("call "), "another client");
    assert_eq!(host.state_of("x"), "running");
}
