//! Containers that use all of their memory and fall asleep (`--oom sleep`).

use std::io::Read;
use std::net::TcpStream;
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_testkit::{Host, Output, image, soon, wait_until};

use crate::contracts::Daemon;

/// A host with the program that fills memory.
#[track_caller]
fn host() -> Host {
    let host = Host::new();
    host.import(&image::workloads(), "workloads");
    host
}

/// Runs container `x` with a program that fills so many megabytes: forty at once, and eight in each second then. The
/// last megabytes below a limit of 64 last half a second.
#[track_caller]
fn fill(host: &Host, options: &[&str], mb: u32) {
    let all = format!("MEGABYTES={mb}");
    let rate = ["--env", &all, "--env", "AT_ONCE=40", "--env", "PER_SECOND=8"];
    let command = ["workloads", "/bin/hog"];
    host.dm(&[&["run", "-d", "--name", "x"], options, &rate, &command].concat()).ok();
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
    assert_eq!(shortages(host), count, "{}", events(host));
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
    refused(&create(&both), &["leave out --memory-high"]);
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
    fill(&host, &["--memory", "64m", "--oom", "sleep"], 80);
    wait_for_shortage(&host, 1);
    let listed = host.dm(&["ps", "--all"]).ok().to_owned();
    assert!(listed.contains("Asleep") && listed.contains("out of memory"), "{listed}");
    // Its clients wait: it would be short of memory again.
    let waiting = client(&host);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.state_of("x"), "asleep");
    assert!(!waiting.is_finished());
    // A limit that is not larger wakes it neither, and neither does another setting.
    host.dm(&["update", "--cpu-weight", "50", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
    host.dm(&["update", "--memory", "256m", "x"]).ok();
    assert_eq!(host.state_of("x"), "running");
    let answer = waiting.join().expect("an answer");
    assert!(answer.trim().parse::<u32>().is_ok_and(|mb| mb > 20), "{answer}");
    wait_for_log(&host, "ok");
    assert_eq!(shortages(&host), 1);
    assert_eq!(host.inspect("x")["oom_killed"], false);
}

/// Without the daemon the kernel ends the process, as without the option.
#[test]
fn vm_container_without_memory_and_daemon_loses_a_process() {
    let host = host();
    fill(&host, &["--memory", "48m", "--oom", "sleep"], 60);
    host.wait_for_state("x", "stopped");
    assert_eq!(host.inspect("x")["oom_killed"], true);
}

#[test]
fn third_shortage_within_a_minute_is_left_to_the_kernel() {
    let host = host();
    let _daemon = Daemon::start(&host);
    fill(&host, &["--memory", "64m", "--oom", "sleep"], 80);
    for count in 1..=2 {
        wait_for_shortage(&host, count);
        host.dm(&["wake", "x"]).ok();
    }
    host.wait_for_state("x", "stopped");
    assert_eq!(shortages(&host), 2);
    assert!(events(&host).contains("third time within a minute"), "{}", events(&host));
    assert_eq!(host.inspect("x")["oom_killed"], true);
}

/// The keeper that has the sockets is killed while the container sleeps.
#[test]
fn no_client_wakes_a_container_without_memory_after_a_killed_keeper() {
    let host = host();
    let daemon = Daemon::start(&host);
    fill(&host, &["--memory", "64m", "--oom", "sleep"], 80);
    wait_for_shortage(&host, 1);
    drop(daemon);
    let keeper = host.keeper().expect("a keeper");
    host.sh(&format!("kill -9 {keeper}")).ok();
    wait_until(soon(), || !host.has_process(keeper));
    host.dm(&["ps"]).ok();
    let waiting = client(&host);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.state_of("x"), "asleep");
    host.dm(&["update", "--memory", "256m", "x"]).ok();
    waiting.join().expect("an answer");
    wait_for_log(&host, "ok");
}

/// The pause is half a minute: the container wakes by itself, and is short of memory once more.
#[test]
fn big_container_without_memory_wakes_after_its_pause() {
    let host = host();
    let _daemon = Daemon::start(&host);
    fill(&host, &["--memory", "64m", "--oom", "sleep"], 80);
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
    fill(&host, &["--memory", "64m", "--oom", "sleep"], 64 + 18 * ROUNDS);
    for round in 1..=ROUNDS {
        wait_for_shortage(&host, round as usize);
        let more = format!("{}m", 64 + 17 * round);
        host.dm(&["update", "--memory", &more, "x"]).ok();
        assert_eq!(host.state_of("x"), "running");
    }
    host.dm(&["update", "--memory", "4g", "x"]).ok();
    wait_for_log(&host, "ok");
    assert_eq!(host.inspect("x")["oom_killed"], false);
}
