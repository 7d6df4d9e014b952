//! A drowsy container is frozen with all its processes, and a client wakes it; also containers that
//! cannot be checkpointed.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use dormouse_testkit::{Host, Terminal, image, run, slowness, soon, wait_until};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A server that numbers its connections.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

#[track_caller]
fn counting(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    host.dm(&[&["run", "-d", "--name", "x"], options, COUNT].concat()).ok();
    host
}

/// Sends one request to a server. Returns the answer, if one came in time.
fn query(host: &Host, address: &str, patience: Duration) -> Option<String> {
    let mut probe = host.command("timeout");
    probe
        .arg(format!("{}", patience.as_secs_f64()))
        .arg(image::probe())
        .args(["ask", address, "80"]);
    let out = run(probe, b"", soon());
    (out.status == 0).then(|| out.stdout.trim().to_owned())
}

/// Connects as soon as the server listens.
#[track_caller]
fn call(host: &Host) -> String {
    let address = host.address_of("x");
    let mut answer = None;
    wait_until(soon(), || {
        answer = query(host, &address, soon());
        answer.is_some()
    });
    answer.expect("an answer")
}

/// Freezes the container. A container that is active just then resumes at once, so this tries
/// again.
#[track_caller]
fn drowse(host: &Host) {
    let is_drowsy = || {
        host.dm(&["sleep", "--drowsy", "x"]).ok();
        host.state_of("x") == "drowsy"
    };
    assert!(wait_until(soon(), is_drowsy));
}

/// Reasons of its drowsy and wake events.
#[track_caller]
fn reasons(host: &Host, kind: &str) -> Vec<String> {
    let text = host.dm(&["events", "--no-stream", "--json"]).ok();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of_it = events.filter(|e| e["kind"] == kind && e["name"] == "x");
    of_it.map(|e| e["attributes"]["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

#[track_caller]
fn wait_for_reason(host: &Host, kind: &str, reason: &str) {
    let is_reported = || reasons(host, kind).last().is_some_and(|last| last == reason);
    assert!(wait_until(soon(), is_reported), "{kind}: {:?}", reasons(host, kind));
}

#[test]
fn vm_drowsy_container_answers_with_the_same_processes() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    let pid = host.inspect("x")["pid"].clone();
    for round in 0..3 {
        drowse(&host);
        assert!(host.dm(&["ps"]).ok().contains("Drowsy"));
        assert_eq!(host.inspect("x")["pid"], pid);
        assert_eq!(call(&host), format!("call {}", 2 + round * 2));
        assert_eq!(host.state_of("x"), "running");
        drowse(&host);
        let answer = host.neighbour_sh(&format!("busybox nc {} 8080 </dev/null", Host::ADDRESS));
        assert_eq!(answer.ok().trim(), format!("call {}", 3 + round * 2));
    }
    assert_eq!(host.inspect("x")["pid"], pid);
    wait_for_reason(&host, "wake", "called");
    // `sleep --drowsy` does not change a drowsy or asleep container. `sleep` suspends a drowsy one
    // to disk.
    drowse(&host);
    drowse(&host);
    host.dm(&["sleep", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
    host.dm(&["sleep", "--drowsy", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
    assert_eq!(call(&host), "call 8");
}

#[test]
fn vm_open_connection_wakes_drowsy_container() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe", "stream", "0.0.0.0", "80"];
    host.dm(&serve).ok();
    let address = format!("{}:80", host.address_of("x"));
    let connected = host.in_network(move || {
        let mut found = None;
        wait_until(soon(), || {
            found = TcpStream::connect(&address).ok();
            found.is_some()
        });
        found
    });
    let mut stream = connected.join().expect("no panic").expect("a listener");
    stream.set_read_timeout(Some(soon())).expect("a timeout");
    let mut received = 0usize;
    let mut exchange = |stream: &mut TcpStream| {
        writeln!(stream, "<5").expect("the connection is open");
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).expect("the connection continues");
        let expected: Vec<u8> = (received..received + 5).map(|n| (n * 7 + n / 251) as u8).collect();
        assert_eq!(bytes[..], expected);
        received += 5;
    };
    exchange(&mut stream);
    for _ in 0..5 {
        drowse(&host);
        exchange(&mut stream);
    }
    // The close of the connection wakes the container, too.
    drowse(&host);
    drop(stream);
    host.wait_for_state("x", "running");
    drowse(&host);
}

#[test]
fn vm_datagram_and_terminal_input_wake_drowsy_container() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe", "udp-echo", "0.0.0.0", "53"];
    host.dm(&serve).ok();
    let address = host.address_of("x");
    let query_probe = || {
        let mut probe = host.command(image::probe());
        probe.args(["udp-ask", &address, "53", "squeak"]);
        run(probe, b"", soon())
    };
    assert!(wait_until(soon(), || query_probe().status == 0));
    drowse(&host);
    assert_eq!(query_probe().ok().trim(), "squeak");
    host.dm(&["rm", "--force", "x"]).ok();
    host.dm(&["run", "-dt", "--name", "x", "--net", "none", "busybox", "sh"]).ok();
    let mut terminal = Terminal::spawn(&host.dormouse(&["attach", "x"]));
    terminal.send("\n");
    terminal.expect("#");
    drowse(&host);
    terminal.send("echo he''re\n");
    terminal.expect("here");
    assert_eq!(host.state_of("x"), "running");
    terminal.send("\u{10}\u{11}");
    assert_eq!(terminal.wait(), 0);
}

#[test]
fn vm_connection_wakes_drowsy_but_not_paused_container() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let address = host.address_of("x");
    let moment = Duration::from_millis(300);
    host.dm(&["pause", "x"]).ok();
    let refused = host.dm(&["sleep", "--drowsy", "x"]);
    assert!(refused.status != 0 && refused.stderr.contains("unpause it first"), "{refused}");
    assert_eq!(query(&host, &address, moment), None);
    assert_eq!(host.state_of("x"), "paused");
    host.dm(&["unpause", "x"]).ok();
    // The client that closed its connection was counted, too.
    assert_eq!(call(&host), "call 3");
    drowse(&host);
    let refused = host.dm(&["unpause", "x"]);
    assert!(refused.status != 0 && refused.stderr.contains("not paused"), "{refused}");
    host.dm(&["pause", "x"]).ok();
    assert_eq!(host.state_of("x"), "paused");
    assert_eq!(query(&host, &address, moment), None);
    assert_eq!(host.state_of("x"), "paused");
    host.dm(&["unpause", "x"]).ok();
    assert_eq!(call(&host), "call 5");
}

#[test]
fn vm_commands_wake_or_end_drowsy_container() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    drowse(&host);
    assert_eq!(host.dm(&["exec", "x", "echo", "hello"]).ok(), "hello");
    assert_eq!(host.state_of("x"), "running");
    drowse(&host);
    host.dm(&["wake", "x"]).ok();
    assert_eq!(call(&host), "call 2");
    drowse(&host);
    let refused = host.dm(&["checkpoint", "x"]);
    assert!(refused.status != 0 && refused.stderr.contains("wake it first"), "{refused}");
    assert_eq!(host.state_of("x"), "drowsy");
    host.dm(&["stop", "--time", "5", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 1", "a new start");
    drowse(&host);
    host.dm(&["kill", "x"]).ok();
    host.wait_for_state("x", "stopped");
    host.dm(&["start", "x"]).ok();
    call(&host);
    drowse(&host);
    host.dm(&["rm", "--force", "x"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

/// No daemon is needed for that: the keeper has a timer, or the descriptor of the container's
/// timer.
#[test]
fn vm_timeouts_expire_on_time_while_drowsy() {
    let host = Host::with_busybox();
    let ms = 3500 * slowness().min(10);
    let calls = [
        "nanosleep",
        "moment",
        "futex",
        "poll",
        "ppoll",
        "select",
        "timerfd",
        "setitimer",
        "timer_create",
        "epoll_wait",
        "sigtimedwait",
    ];
    let text = ms.to_string();
    let wait = ["run", "-d", "--name", "x", "busybox", "probe", "waits", &text];
    host.dm(&[&wait[..], &calls].concat()).ok();
    let begun = || host.dm(&["logs", "x"]).ok().matches("begin ").count() == calls.len();
    assert!(wait_until(soon(), begun));
    host.dm(&["sleep", "--drowsy", "x"]).ok();
    let logs = || host.dm(&["logs", "x"]).ok();
    assert!(wait_until(soon(), || logs().lines().any(|line| line == "all")), "{}", logs());
    assert!(reasons(&host, "wake").len() == 1, "{:?}", reasons(&host, "wake"));
    for call in calls {
        let text = logs();
        let line = text.lines().find(|line| line.split(' ').next() == Some(call));
        let words: Vec<&str> = line.expect("a line of output").split(' ').collect();
        let took: u32 = words[2].parse().expect("a number");
        // Some calls restart with their whole time after a stop.
        let most = ms * 2 + 1500 * slowness();
        assert!(words[1] == "over" && (ms - 1..=most).contains(&took), "{words:?}");
    }
}

/// A daemon that ends with its test.
struct Daemon(Child);

impl Daemon {
    #[track_caller]
    fn start(host: &Host) -> Self {
        let mut command = host.dormouse(&["daemon"]);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the command starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let line = lines.next().expect("a line of output").expect("in UTF-8");
        assert!(line.contains("daemon: ready"), "{line}");
        Self(child)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        if !wait_until(soon(), || matches!(self.0.try_wait(), Ok(Some(_)))) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

#[test]
fn vm_unsuspendable_container_becomes_drowsy_by_policy() {
    let host = counting(&["--sleep-after", "1s", "--drowsy-after", "1500ms"]);
    assert_eq!(call(&host), "call 1");
    host.dm(&["exec", "--detach", "x", "sleep", "100000"]).ok();
    let _daemon = Daemon::start(&host);
    for round in 0..2 {
        host.wait_for_state("x", "drowsy");
        assert_eq!(call(&host), format!("call {}", 2 + round));
    }
    wait_for_reason(&host, "drowsy", "idle");
    assert_eq!(reasons(&host, "sleep"), [""; 0]);
    let causes = reasons(&host, "awake");
    assert!(causes.iter().any(|cause| cause.contains("(sleep)")), "{causes:?}");
    // Without the exec'd process the container becomes drowsy, and is later suspended to disk.
    host.dm(&["update", "--sleep-after", "1h", "--drowsy-after", "1s", "x"]).ok();
    host.dm(&["exec", "x", "killall", "sleep"]).ok();
    host.wait_for_state("x", "drowsy");
    host.dm(&["update", "--sleep-after", "2s", "x"]).ok();
    host.wait_for_state("x", "asleep");
    assert_eq!(call(&host), "call 4");
    // The container stays awake without a policy.
    host.dm(&["update", "--never-sleep", "x"]).ok();
    assert_eq!(host.inspect("x")["config"]["drowsy"], "never");
}

#[test]
fn vm_exec_is_not_frozen_while_entering() {
    let host = counting(&["--drowsy-after", "100ms"]);
    assert_eq!(call(&host), "call 1");
    let _daemon = Daemon::start(&host);
    // At any moment of the freeze.
    for round in 0..100 {
        std::thread::sleep(Duration::from_micros(60_000 + 2_000 * (round % 50)));
        assert_eq!(host.dm(&["exec", "x", "echo", "here"]).ok(), "here", "round {round}");
    }
    assert_ne!(reasons(&host, "drowsy"), [""; 0]);
    // A process that never finishes its entry is waited for only briefly, and reported. Then
    // freezing works again.
    host.dm(&["update", "--never-sleep", "x"]).ok();
    host.dm(&["wake", "x"]).ok();
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let lock = File::create(host.root().join("run/c").join(id).join("exec.lock"))
        .expect("the file exists");
    flock(&lock, FlockOperation::LockShared).expect("no exclusive lock");
    for words in [&["sleep", "--drowsy", "x"][..], &["sleep", "x"], &["checkpoint", "x"]] {
        let out = host.dm(words);
        assert!(out.status != 0 && out.stderr.contains("does not run yet"), "{words:?}: {out}");
        assert_eq!(host.state_of("x"), "running");
    }
    drop(lock);
    drowse(&host);
    assert_eq!(call(&host), "call 2");
}

/// Returns whether the kernel has frozen the container, read without any command.
fn is_frozen(host: &Host) -> bool {
    let frozen = |group: &PathBuf| {
        let read = |name: &str| std::fs::read_to_string(group.join(name)).unwrap_or_default();
        read("cgroup.freeze").trim() == "1" || read("freezer.state").trim() == "FROZEN"
    };
    let below = |group: PathBuf| {
        let entries = std::fs::read_dir(group).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    host.cgroups().into_iter().flat_map(below).any(|group| frozen(&group))
}

fn kill_keeper(host: &Host) {
    let keeper = host.processes().into_iter().find(|(_, line)| line.contains("keeper"));
    let (keeper, _) = keeper.expect("a keeper");
    kill_process(Pid::from_raw(keeper as i32).expect("a pid"), Signal::KILL)
        .expect("the process exists");
    let is_gone = || host.processes().iter().all(|(pid, _)| *pid != keeper);
    assert!(wait_until(soon(), is_gone));
}

#[test]
fn vm_drowsy_container_resumes_after_keeper_is_killed() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let address = host.address_of("x");
    drowse(&host);
    assert!(is_frozen(&host));
    kill_keeper(&host);
    // Any next command thaws the container. A killed process stays visible until it has exited.
    let is_thawed = || {
        host.dm(&["ps"]).ok();
        !is_frozen(&host)
    };
    assert!(wait_until(soon(), is_thawed));
    assert_eq!(query(&host, &address, soon()).as_deref(), Some("call 2"));
    wait_for_reason(&host, "wake", "keeper");
    // A daemon thaws the container without a command.
    drowse(&host);
    let _daemon = Daemon::start(&host);
    assert!(is_frozen(&host));
    kill_keeper(&host);
    assert!(wait_until(soon(), || !is_frozen(&host)));
    assert_eq!(query(&host, &address, soon()).as_deref(), Some("call 3"));
    drowse(&host);
    assert_eq!(call(&host), "call 4");
}

#[test]
fn vm_drowsy_reports_missing_swap() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let out = host.dm(&["sleep", "--drowsy", "x"]);
    let swaps = std::fs::read_to_string("/proc/swaps").expect("procfs is mounted");
    let has_swap = swaps.lines().count() > 1;
    assert_eq!(out.stderr.contains("no swap"), !has_swap, "{out}");
    assert_eq!(out.ok(), "x");
    assert_eq!(call(&host), "call 2", "swapped-out pages come back");
}
