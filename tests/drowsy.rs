//! A drowsy container is frozen with all it has, and whoever calls wakes it: also what cannot be
//! checkpointed.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use dormouse_testkit::{Host, Terminal, image, run, slowness, wait_until};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A server that numbers its callers.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

fn soon() -> Duration {
    Duration::from_secs(20) * slowness()
}

#[track_caller]
fn counting(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    host.dm(&[&["run", "-d", "--name", "x"], options, COUNT].concat()).ok();
    host
}

/// Asks a server once; what it said, or nothing.
fn ask(host: &Host, address: &str, patience: Duration) -> Option<String> {
    let mut probe = host.command("timeout");
    probe
        .arg(format!("{}", patience.as_secs_f64()))
        .arg(image::probe())
        .args(["ask", address, "80"]);
    let out = run(probe, b"", soon());
    (out.status == 0).then(|| out.stdout.trim().to_owned())
}

/// The same, as soon as somebody listens.
#[track_caller]
fn call(host: &Host) -> String {
    let address = host.address_of("x");
    let mut said = None;
    wait_until(soon(), || {
        said = ask(host, &address, soon());
        said.is_some()
    });
    said.expect("it answers")
}

/// One that was at work just then goes on at once.
#[track_caller]
fn drowse(host: &Host) {
    let is_drowsy = || {
        host.dm(&["sleep", "--drowsy", "x"]).ok();
        host.state_of("x") == "drowsy"
    };
    assert!(wait_until(soon(), is_drowsy));
}

/// Why it became drowsy, or was woken.
#[track_caller]
fn reasons(host: &Host, kind: &str) -> Vec<String> {
    let text = host.dm(&["events", "--no-stream", "--json"]).ok();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of_it = events.filter(|e| e["kind"] == kind && e["name"] == "x");
    of_it.map(|e| e["attributes"]["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

#[track_caller]
fn wait_for_reason(host: &Host, kind: &str, reason: &str) {
    let told = || reasons(host, kind).last().is_some_and(|last| last == reason);
    assert!(wait_until(soon(), told), "{kind}: {:?}", reasons(host, kind));
}

#[test]
fn vm_whoever_calls_a_drowsy_one_is_answered_by_the_same_processes() {
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
        let said = host.neighbour_sh(&format!("busybox nc {} 8080 </dev/null", Host::ADDRESS));
        assert_eq!(said.ok().trim(), format!("call {}", 3 + round * 2));
    }
    assert_eq!(host.inspect("x")["pid"], pid);
    wait_for_reason(&host, "wake", "called");
    // What is asked of one that is drowsy already changes nothing; sleep is deeper.
    drowse(&host);
    drowse(&host);
    host.dm(&["sleep", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
    host.dm(&["sleep", "--drowsy", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
    assert_eq!(call(&host), "call 8");
}

#[test]
fn vm_an_open_connection_wakes_a_drowsy_one_and_a_lost_one_does_not() {
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
    let mut stream = connected.join().expect("it does not panic").expect("somebody listens");
    stream.set_read_timeout(Some(soon())).expect("a limit can be set");
    let mut told = 0usize;
    let mut hear = |stream: &mut TcpStream| {
        writeln!(stream, "<5").expect("it is connected");
        let mut said = [0; 5];
        stream.read_exact(&mut said).expect("it goes on");
        let expected: Vec<u8> = (told..told + 5).map(|n| (n * 7 + n / 251) as u8).collect();
        assert_eq!(said[..], expected);
        told += 5;
    };
    hear(&mut stream);
    for _ in 0..5 {
        drowse(&host);
        hear(&mut stream);
    }
    // Its end is something to know, too.
    drowse(&host);
    drop(stream);
    host.wait_for_state("x", "running");
    drowse(&host);
}

#[test]
fn vm_a_datagram_and_a_word_at_its_terminal_wake_it() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe", "udp-echo", "0.0.0.0", "53"];
    host.dm(&serve).ok();
    let address = host.address_of("x");
    let ask = || {
        let mut probe = host.command(image::probe());
        probe.args(["udp-ask", &address, "53", "squeak"]);
        run(probe, b"", soon())
    };
    assert!(wait_until(soon(), || ask().status == 0));
    drowse(&host);
    assert_eq!(ask().ok().trim(), "squeak");
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
fn vm_what_is_paused_is_not_woken_and_what_is_drowsy_can_be_paused() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let address = host.address_of("x");
    let moment = Duration::from_millis(300);
    host.dm(&["pause", "x"]).ok();
    let refused = host.dm(&["sleep", "--drowsy", "x"]);
    assert!(refused.status != 0 && refused.stderr.contains("unpause it first"), "{refused}");
    assert_eq!(ask(&host, &address, moment), None);
    assert_eq!(host.state_of("x"), "paused");
    host.dm(&["unpause", "x"]).ok();
    // He who hung up counts, too.
    assert_eq!(call(&host), "call 3");
    drowse(&host);
    let refused = host.dm(&["unpause", "x"]);
    assert!(refused.status != 0 && refused.stderr.contains("not paused"), "{refused}");
    host.dm(&["pause", "x"]).ok();
    assert_eq!(host.state_of("x"), "paused");
    assert_eq!(ask(&host, &address, moment), None);
    assert_eq!(host.state_of("x"), "paused");
    host.dm(&["unpause", "x"]).ok();
    assert_eq!(call(&host), "call 5");
}

#[test]
fn vm_commands_wake_a_drowsy_one_or_end_it() {
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
    assert_eq!(call(&host), "call 1", "it was started anew");
    drowse(&host);
    host.dm(&["kill", "x"]).ok();
    host.wait_for_state("x", "stopped");
    host.dm(&["start", "x"]).ok();
    call(&host);
    drowse(&host);
    host.dm(&["rm", "--force", "x"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

/// No daemon is needed for that: the keeper has the alarm, or the descriptor of the timer.
#[test]
fn vm_every_wait_is_over_in_its_time_though_it_is_drowsy() {
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
        let words: Vec<&str> = line.expect("it says something").split(' ').collect();
        let took: u32 = words[2].parse().expect("a number");
        // Some begin again as a whole when they were stopped.
        let most = ms * 2 + 1500 * slowness();
        assert!(words[1] == "over" && (ms - 1..=most).contains(&took), "{words:?}");
    }
}

/// A daemon, which ends with its test.
struct Daemon(Child);

impl Daemon {
    #[track_caller]
    fn start(host: &Host) -> Self {
        let mut command = host.dormouse(&["daemon"]);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it can be started");
        let mut lines = BufReader::new(child.stderr.take().expect("it is piped")).lines();
        let line = lines.next().expect("it says something").expect("in UTF-8");
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
fn vm_what_cannot_sleep_becomes_drowsy_where_the_policy_allows_it() {
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
    let told = reasons(&host, "awake");
    assert!(told.iter().any(|why| why.contains("(sleep)")), "{told:?}");
    // Without the visitor it becomes drowsy, and falls asleep from there.
    host.dm(&["update", "--sleep-after", "3s", "--drowsy-after", "1s", "x"]).ok();
    host.dm(&["exec", "x", "killall", "sleep"]).ok();
    let drowsy = reasons(&host, "drowsy").len();
    host.wait_for_state("x", "asleep");
    assert!(reasons(&host, "drowsy").len() > drowsy);
    assert_eq!(call(&host), "call 4");
    // It stays awake when nobody wants it drowsy.
    host.dm(&["update", "--never-sleep", "x"]).ok();
    assert_eq!(host.inspect("x")["config"]["drowsy"], "never");
}

#[test]
fn vm_nothing_is_frozen_on_its_way_in() {
    let host = counting(&["--drowsy-after", "100ms"]);
    assert_eq!(call(&host), "call 1");
    let _daemon = Daemon::start(&host);
    // Whenever it is on its way to be drowsy.
    for round in 0..100 {
        std::thread::sleep(Duration::from_micros(60_000 + 2_000 * (round % 50)));
        assert_eq!(host.dm(&["exec", "x", "echo", "here"]).ok(), "here", "round {round}");
    }
    assert_ne!(reasons(&host, "drowsy"), [""; 0]);
    // Somebody who takes for ever is waited for only so long, and named; then it goes as always.
    host.dm(&["update", "--never-sleep", "x"]).ok();
    host.dm(&["wake", "x"]).ok();
    let id = host.inspect("x")["id"].as_str().expect("it has one").to_owned();
    let lock =
        File::create(host.root().join("run/c").join(id).join("exec.lock")).expect("it is there");
    flock(&lock, FlockOperation::LockShared).expect("nobody has it alone");
    for words in [&["sleep", "--drowsy", "x"][..], &["sleep", "x"], &["checkpoint", "x"]] {
        let out = host.dm(words);
        assert!(out.status != 0 && out.stderr.contains("does not run yet"), "{words:?}: {out}");
        assert_eq!(host.state_of("x"), "running");
    }
    drop(lock);
    drowse(&host);
    assert_eq!(call(&host), "call 2");
}

/// Whether the kernel has it frozen, which no command of ours is asked.
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
    let (keeper, _) = keeper.expect("somebody runs");
    kill_process(Pid::from_raw(keeper as i32).expect("a pid"), Signal::KILL).expect("it lives");
    let is_gone = || host.processes().iter().all(|(pid, _)| *pid != keeper);
    assert!(wait_until(soon(), is_gone));
}

#[test]
fn vm_without_its_keeper_nothing_stays_frozen() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let address = host.address_of("x");
    drowse(&host);
    assert!(is_frozen(&host));
    kill_keeper(&host);
    // The next command, whichever it is, lets it go on. Who is killed is there until its end.
    let goes_on = || {
        host.dm(&["ps"]).ok();
        !is_frozen(&host)
    };
    assert!(wait_until(soon(), goes_on));
    assert_eq!(ask(&host, &address, soon()).as_deref(), Some("call 2"));
    wait_for_reason(&host, "wake", "keeper");
    // A daemon does not wait for one.
    drowse(&host);
    let _daemon = Daemon::start(&host);
    assert!(is_frozen(&host));
    kill_keeper(&host);
    assert!(wait_until(soon(), || !is_frozen(&host)));
    assert_eq!(ask(&host, &address, soon()).as_deref(), Some("call 3"));
    drowse(&host);
    assert_eq!(call(&host), "call 4");
}

#[test]
fn vm_where_its_memory_went_is_told() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let out = host.dm(&["sleep", "--drowsy", "x"]);
    let swaps = std::fs::read_to_string("/proc/swaps").expect("procfs is mounted");
    let has_swap = swaps.lines().count() > 1;
    assert_eq!(out.stderr.contains("no swap"), !has_swap, "{out}");
    assert_eq!(out.ok(), "x");
    assert_eq!(call(&host), "call 2", "what was pushed out comes back");
}
