//! Containers that use all of their memory and fall asleep (`--oom sleep`).

use std::io::Read;
use std::net::TcpStream;
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_testkit::{Host, Output, image, slowness, soon, wait_until};

use crate::contracts::Daemon;

/// A host with the program that fills memory.
#[track_caller]
fn host() -> Host {
    let host = Host::new();
    host.import(&image::workloads(), "workloads");
    host
}

/// Runs container `x` with a program that fills so many megabytes: forty at once, and five in each second then. The
/// last megabytes below a limit of 64 last almost a second.
#[track_caller]
fn fill(host: &Host, options: &[&str], mb: u32) {
    let all = format!("MEGABYTES={mb}");
    let rate = ["--env", &all, "--env", "AT_ONCE=40", "--env", "PER_SECOND=5"];
    // The host may have swap, which other tests add.
    let run = ["run", "-d", "--name", "x", "--memory", "64m", "--memory-swap", "64m"];
    host.dm(&[&run[..], options, &rate, &["workloads", "/bin/hog"]].concat()).ok();
    wait_for_log(host, "ready 0");
}

/// The events of the container, with their attributes.
fn events(host: &Host) -> String {
    host.dm(&["events", "--no-stream", "--json"]).ok().to_owned()
}

/// How often it fell asleep for want of memory.
fn shortages(host: &Host) -> usize {
    let is_one = |line: &&str| line.contains("\"sleep\"") && line.contains("out-of-memory");
    events(host).lines().filter(is_one).count()
}

/// Waits until it sleeps for want of memory, for so many times. The event follows the state.
#[track_caller]
fn wait_for_shortage(host: &Host, count: usize) {
    host.wait_for_state("x", "asleep");
    assert!(wait_until(soon(), || shortages(host) >= count), "{}", events(host));
}

/// The kernel has ended a process of the stopped container. The cause is on record when the container is settled.
#[track_caller]
fn wait_for_oom_kill(host: &Host) {
    let is_killed = || host.inspect("x")["oom_killed"] == true;
    assert!(wait_until(soon(), is_killed), "{}", host.inspect("x"));
}

#[track_caller]
fn wait_for_log(host: &Host, wanted: &str) {
    let mut log = String::new();
    let found = wait_until(soon(), || {
        log = host.dm(&["logs", "x"]).stdout;
        log.lines().any(|line| line == wanted || line.starts_with("failed"))
    });
    assert!(found && log.lines().any(|line| line == wanted), "no '{wanted}':\n{log}");
}

/// A client that waits for the answer.
fn client(host: &Host) -> JoinHandle<String> {
    let address = host.address_of("x");
    host.in_network(move || {
        let mut peer = TcpStream::connect((address, 80)).expect("the listener is there");
        let mut answer = String::new();
        peer.read_to_string(&mut answer).expect("an answer");
        answer
    })
}

/// The container sleeps although a client waits. An emulated machine may take longer than its pause.
#[track_caller]
fn sleeps_on(host: &Host, waiting: &JoinHandle<String>) {
    if slowness() == 1 {
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(host.state_of("x"), "asleep");
        assert!(!waiting.is_finished());
    }
}

#[track_caller]
fn refused(out: &Output, parts: &[&str]) {
    assert_eq!(out.status, 125, "{out}");
    for part in parts {
        assert!(out.stderr.contains(part), "{part}: {out}");
    }
}

#[test]
fn sleep_for_want_of_memory_that_could_never_be_is_refused() {
    let host = host();
    let create = |options: &[&str]| {
        let words = [&["create", "--name", "x"], options, &["workloads", "/bin/hog"]];
        host.dm(&words.concat())
    };
    refused(&create(&["--oom", "sleep"]), &["--oom sleep needs a limit of memory", "--memory"]);
    refused(&create(&["--oom", "sleep", "--memory", "64m", "--rm"]), &["--rm", "--oom sleep"]);
    refused(&create(&["--oom", "panic", "--memory", "64m"]), &["'panic'", "kill or sleep"]);
    let both = ["--oom", "sleep", "--memory", "64m", "--memory-high", "32m"];
    refused(&create(&both), &["make it without --memory-high"]);
    create(&["--memory", "64m"]).ok();
    host.dm(&["update", "--oom", "sleep", "x"]).ok();
    assert_eq!(host.inspect("x")["config"]["oom"], "sleep");
    host.dm(&["update", "--oom", "kill", "x"]).ok();
    assert!(host.inspect("x")["config"]["oom"].is_null(), "the default is not written");
}

#[test]
fn vm_container_without_memory_sleeps_and_continues_with_more() {
    let host = host();
    let _daemon = Daemon::start(&host);
    fill(&host, &["--oom", "sleep"], 80);
    wait_for_shortage(&host, 1);
    let listed = host.dm(&["ps", "--all"]).ok().to_owned();
    assert!(listed.contains("Asleep") && listed.contains("out of memory"), "{listed}");
    // Its clients wait: it would be short of memory again.
    let waiting = client(&host);
    sleeps_on(&host, &waiting);
    // Another setting does not wake it.
    host.dm(&["update", "--cpu-weight", "50", "x"]).ok();
    sleeps_on(&host, &waiting);
    host.dm(&["update", "--memory", "256m", "x"]).ok();
    let answer = waiting.join().expect("an answer");
    assert!(answer.trim().parse::<u32>().is_ok_and(|mb| mb > 20), "{answer}");
    wait_for_log(&host, "ok");
    assert_eq!(host.inspect("x")["oom_killed"], false);
}

/// Without the daemon the kernel ends the process, as without the option.
#[test]
fn vm_container_without_memory_and_daemon_loses_a_process() {
    let host = host();
    fill(&host, &["--oom", "sleep"], 80);
    host.wait_for_state("x", "stopped");
    wait_for_oom_kill(&host);
}

#[test]
fn third_shortage_within_a_minute_is_left_to_the_kernel() {
    let host = host();
    let _daemon = Daemon::start(&host);
    fill(&host, &["--oom", "sleep"], 80);
    for count in 1..=2 {
        wait_for_shortage(&host, count);
        host.dm(&["wake", "x"]).ok();
    }
    host.wait_for_state("x", "stopped");
    assert_eq!(shortages(&host), 2);
    assert!(events(&host).contains("third time within a minute"), "{}", events(&host));
    wait_for_oom_kill(&host);
}

/// The keeper that has the sockets is killed while the container sleeps.
#[test]
fn no_client_wakes_a_container_without_memory_after_a_killed_keeper() {
    let host = host();
    let daemon = Daemon::start(&host);
    fill(&host, &["--oom", "sleep"], 80);
    wait_for_shortage(&host, 1);
    drop(daemon);
    let keeper = host.keeper().expect("a keeper");
    host.sh(&format!("kill -9 {keeper}")).ok();
    wait_until(soon(), || !host.has_process(keeper));
    host.dm(&["ps"]).ok();
    let waiting = client(&host);
    sleeps_on(&host, &waiting);
    host.dm(&["update", "--memory", "256m", "x"]).ok();
    waiting.join().expect("an answer");
    wait_for_log(&host, "ok");
}

/// A container that is being stopped is left alone, or it would lose what it writes at its end. The shutdown allocates.
#[test]
fn container_that_is_being_stopped_does_not_sleep_for_want_of_memory() {
    let host = host();
    let _daemon = Daemon::start(&host);
    // Half of the limit, and the rest at the end: files of a tmpfs are memory that cannot be reclaimed.
    let fill = "dd if=/dev/zero of=/scratch/a bs=1M count=30 2>/dev/null";
    let end =
        "dd if=/dev/zero of=/scratch/b bs=1M count=29 2>/dev/null; sleep 3; echo over; exit 7";
    let script = format!("trap '{end}' TERM; {fill}; echo ready 0; while :; do sleep 0.1; done");
    let run =
        ["run", "-d", "--name", "x", "--memory", "64m", "--memory-swap", "64m", "--oom", "sleep"];
    let rest = ["--tmpfs", "/scratch", "workloads", "sh", "-c", &script];
    host.dm(&[&run[..], &rest].concat()).ok();
    wait_for_log(&host, "ready 0");
    host.dm(&["stop", "--time", "60", "x"]).ok();
    wait_for_log(&host, "over");
    assert_eq!((shortages(&host), host.inspect("x")["exit_code"].as_i64()), (0, Some(7)));
    assert!(events(&host).contains("it is being stopped"), "{}", events(&host));
}

/// The pause is half a minute: the container wakes by itself, and is short of memory once more.
#[test]
fn big_container_without_memory_wakes_after_its_pause() {
    let host = host();
    let _daemon = Daemon::start(&host);
    fill(&host, &["--oom", "sleep"], 80);
    wait_for_shortage(&host, 1);
    let waiting = client(&host);
    assert!(wait_until(soon() + Duration::from_secs(40), || shortages(&host) == 2));
    waiting.join().expect("the client was answered meanwhile");
    assert_eq!(host.state_of("x"), "asleep");
}

/// Fifty rounds: asleep for want of memory, and awake with a little more. No byte is lost.
#[test]
fn big_container_without_memory_loses_nothing_in_fifty_rounds() {
    const ROUNDS: u32 = 50;
    let host = host();
    let _daemon = Daemon::start(&host);
    fill(&host, &["--oom", "sleep"], 64 + 18 * ROUNDS);
    for round in 1..=ROUNDS {
        wait_for_shortage(&host, round as usize);
        let more = format!("{}m", 64 + 17 * round);
        host.dm(&["update", "--memory", &more, "x"]).ok();
    }
    host.dm(&["update", "--memory", "4g", "x"]).ok();
    wait_for_log(&host, "ok");
    assert_eq!(host.inspect("x")["oom_killed"], false);
}
