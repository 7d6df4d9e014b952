//! Containers that give memory while the host, or all containers together, are short of it (`--evict`).

use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dormouse_testkit::{Host, Output, image, soon, wait_until};
use serde_json::Value;

use crate::contracts::{Daemon, id};
use crate::guarantees::all_bytes;

/// Memory of all containers together, while one has a guarantee. An eighth of it is to stay free.
const ROOM_MB: u64 = 400;

#[track_caller]
fn host(settings: &str) -> Host {
    let host = Host::new();
    host.import(&image::workloads(), "workloads");
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text + settings).expect("written");
    host
}

/// A host that keeps all memory for itself but [`ROOM_MB`], once a container has a guarantee.
#[track_caller]
fn small_host() -> Host {
    let kept = all_bytes().checked_sub(ROOM_MB << 20).expect("a machine with more memory");
    // The memory of this machine does not count.
    host(&format!("[daemon]\nevict-below = \"1m\"\n[contract]\nhost-memory-reserve = \"{kept}\"\n"))
}

/// A host that is short of memory as long as the daemon runs.
#[track_caller]
fn short_host() -> Host {
    host(&format!("[daemon]\nevict-below = \"{}\"\n", all_bytes()))
}

/// Runs a container that fills so many megabytes at once, and the rest evenly, and waits for the first ones.
#[track_caller]
fn fill(host: &Host, name: &str, options: &[&str], (mb, at_once, per_second): (u64, u64, u64)) {
    let [all, at_once, rate] = [
        format!("MEGABYTES={mb}"),
        format!("AT_ONCE={at_once}"),
        format!("PER_SECOND={per_second}"),
    ];
    let numbers = ["--env", &all, "--env", &at_once, "--env", &rate];
    let run = ["run", "-d", "--name", name];
    host.dm(&[&run[..], options, &numbers, &["workloads", "/bin/hog"]].concat()).ok();
    wait_for_log(host, name, "ready 0");
}

/// Runs a container that fills all of its memory at once, and waits until it has it.
#[track_caller]
fn hold(host: &Host, name: &str, options: &[&str], mb: u64) {
    fill(host, name, options, (mb, mb, 1000));
    wait_for_log(host, name, "ok");
}

#[track_caller]
fn wait_for_log(host: &Host, name: &str, wanted: &str) {
    let mut log = String::new();
    let found = wait_until(soon(), || {
        log = host.dm(&["logs", name]).stdout;
        log.lines().any(|line| line == wanted || line.starts_with("failed"))
    });
    assert!(found && log.lines().any(|line| line == wanted), "{name}: no '{wanted}':\n{log}");
}

/// The events with this word, in their order.
#[track_caller]
fn events(host: &Host, kind: &str) -> Vec<Value> {
    let text = host.dm(&["events", "--no-stream", "--json"]).ok().to_owned();
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("an event"));
    all.filter(|event| event["kind"] == kind).collect()
}

/// The containers that have given memory, with the action, in the order of the first times.
#[track_caller]
fn given(host: &Host) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let one = |event: &Value| (text(&event["name"]), text(&event["attributes"]["action"]));
    let mut all: Vec<(String, String)> = Vec::new();
    for event in events(host, "evict") {
        let found = one(&event);
        // A pause may have ended on a slow machine.
        if !all.contains(&found) {
            all.push(found);
        }
    }
    all
}

/// Waits until these containers have given memory, and no other one.
#[track_caller]
fn wait_for_given(host: &Host, expected: &[(&str, &str)]) {
    let is_done = || given(host).len() >= expected.len();
    assert!(wait_until(soon(), is_done), "{:?} of {expected:?}", given(host));
    let found = given(host);
    let found: Vec<_> = found.iter().map(|(name, how)| (name.as_str(), how.as_str())).collect();
    assert_eq!(found, expected);
}

/// The numbers of the events: the container has more than its guarantee, and too little is free.
#[track_caller]
fn assert_numbers(host: &Host, of: &str) {
    for event in events(host, "evict") {
        let number = |name: &str| -> u64 {
            let text =
                event["attributes"][name].as_str().unwrap_or_else(|| panic!("{name}: {event}"));
            text.parse().expect("a number")
        };
        assert_eq!(number("above"), number("used") - number("guarantee"), "{event}");
        let is_stalled = event["attributes"].get("stalled_permille").is_some();
        assert!(number("above") > 0, "{event}");
        assert!(is_stalled || number("free") < number("wanted"), "{event}");
        assert!(number("wanted") < number("all") || of == "host", "{event}");
        assert_eq!(event["attributes"]["of"], of, "{event}");
    }
}

/// Asks a container for the number of megabytes that it has. It checks all of them before it answers.
fn ask(address: &str) -> std::io::Result<u64> {
    let mut peer = TcpStream::connect((address, 80))?;
    let mut answer = String::new();
    peer.read_to_string(&mut answer)?;
    answer.trim().parse().map_err(|_| std::io::Error::other(answer))
}

/// A client that asks a container again and again.
struct Client {
    ends: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Client {
    #[track_caller]
    fn of(host: &Host, name: &str, mb: u64) -> Self {
        let (ends, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (address, end, count) =
            (host.address_of(name), Arc::clone(&ends), Arc::clone(&answers));
        let thread = host.in_network(move || {
            while !end.load(Ordering::Relaxed) {
                assert_eq!(ask(&address).expect("an answer"), mb);
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Self { ends, answers, thread }
    }

    /// Waits for some more answers.
    #[track_caller]
    fn wait_for_answers(&self, count: usize) {
        let before = self.answers.load(Ordering::Relaxed);
        let is_answered = || self.answers.load(Ordering::Relaxed) >= before + count;
        assert!(wait_until(soon(), is_answered), "it is not answered");
    }

    #[track_caller]
    fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("every answer was right");
    }
}

/// Swap of a container, in bytes, where the kernel counts it.
#[track_caller]
fn swapped_bytes(host: &Host, name: &str) -> u64 {
    let id = id(host, name);
    let dirs = host.cgroups();
    let files =
        |name: &str| dirs.iter().map(|dir| dir.join(&id).join(name)).collect::<Vec<PathBuf>>();
    let read = |file: &PathBuf| fs::read_to_string(file).ok();
    if let Some(text) = files("memory.swap.current").iter().find_map(read) {
        return text.trim().parse().expect("a number");
    }
    let text = files("memory.stat").iter().find_map(read).expect("the memory of the container");
    let line = text.lines().find_map(|line| line.strip_prefix("total_swap "));
    line.map_or(0, |bytes| bytes.trim().parse().expect("a number"))
}

#[track_caller]
fn refused(out: &Output, part: &str) {
    assert_eq!(out.status, 125, "{out}");
    assert!(out.stderr.contains(part), "{part}: {out}");
}

/// Whether the memory controller is one of cgroup v2.
fn is_v2() -> bool {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "memory")
}

#[test]
fn eviction_that_could_never_be_is_refused_and_others_are_kept() {
    let host = host("");
    let create = |options: &[&str]| {
        let words = [&["create", "--name", "x"], options, &["workloads", "/bin/hog"]];
        host.dm(&words.concat())
    };
    refused(&create(&["--evict", "panic"]), "auto, sleep, throttle, restart, kill or never");
    refused(
        &create(&["--evict", "sleep", "--rm"]),
        "--rm does not sleep, also not with --evict sleep",
    );
    refused(&create(&["--evict", "restart", "--rm"]), "give --evict kill");
    let both = ["--evict", "throttle", "--oom", "sleep", "--memory", "64m"];
    refused(&create(&both), "leave out --evict throttle");
    if !is_v2() {
        refused(&create(&["--evict", "throttle"]), "memory.high, which cgroup v1 does not have");
    }
    create(&["--sleep-after", "1h"]).ok();
    assert!(host.inspect("x")["config"]["evict"].is_null(), "the default is not written");
    assert!(
        host.dm(&["inspect", "--format", "table", "x"]).ok().contains("evicted by"),
        "a container that may sleep"
    );
    host.dm(&["update", "--evict", "restart", "x"]).ok();
    assert_eq!(host.inspect("x")["config"]["evict"], "restart");
    if !is_v2() {
        refused(&host.dm(&["update", "--evict", "throttle", "x"]), "cgroup v1");
    }
    assert_eq!(host.inspect("x")["config"]["evict"], "restart", "a refused one changes nothing");
    hold(&host, "y", &["--evict", "kill"], 1);
    host.dm(&["clone", "--name", "z", "y"]).ok();
    assert_eq!(host.inspect("z")["config"]["evict"], "kill", "a clone has that of its original");
}

/// Three containers beside one that grows: a large one below its guarantee, and of two others the one that is not used
/// sleeps, and its client wakes it.
#[test]
fn vm_unpopular_container_above_its_guarantee_sleeps_before_a_large_one_below() {
    let host = small_host();
    hold(&host, "large", &["--memory-min", "100m", "--evict", "sleep"], 90);
    hold(&host, "used", &["--evict", "sleep"], 43);
    hold(&host, "unused", &["--evict", "sleep"], 40);
    let client = Client::of(&host, "used", 43);
    client.wait_for_answers(1);
    let _daemon = Daemon::start(&host);
    client.wait_for_answers(20);
    fill(&host, "grows", &["--evict", "never"], (175, 100, 25));
    wait_for_given(&host, &[("unused", "sleep")]);
    host.wait_for_state("unused", "asleep");
    assert_numbers(&host, "containers");
    let listed = host.dm(&["ps", "--all"]).ok().to_owned();
    assert!(listed.contains("(evicted: ") && listed.contains(" above its guarantee)"), "{listed}");
    wait_for_log(&host, "grows", "ok");
    host.dm(&["rm", "--force", "grows"]).ok();
    // It was idle, so that a client wakes it. The other one was answered all the time.
    let address = host.address_of("unused");
    let answer = host.in_network(move || ask(&address)).join().expect("a client");
    assert_eq!(answer.expect("an answer"), 40);
    client.wait_for_answers(1);
    client.end();
    assert_eq!(given(&host).len(), 1);
    for name in ["large", "used", "unused"] {
        assert_eq!(host.state_of(name), "running", "{name}");
        assert_eq!(swapped_bytes(&host, name), 0, "{name}");
        assert_eq!(host.inspect(name)["oom_killed"], false, "{name}");
    }
}

/// Twice as much is wanted as there is, in several rounds. Each time the right one sleeps, and none loses anything.
#[test]
fn big_right_container_sleeps_each_time_on_an_overbooked_host() {
    let host = small_host();
    hold(&host, "large", &["--memory-min", "100m", "--evict", "sleep"], 90);
    hold(&host, "used", &["--evict", "sleep"], 43);
    hold(&host, "unused", &["--evict", "sleep"], 40);
    let client = Client::of(&host, "used", 43);
    client.wait_for_answers(1);
    let _daemon = Daemon::start(&host);
    client.wait_for_answers(20);
    // Of two that are alike the one that is not used.
    fill(&host, "first", &["--evict", "never"], (175, 100, 25));
    wait_for_given(&host, &[("unused", "sleep")]);
    wait_for_log(&host, "first", "ok");
    host.dm(&["rm", "--force", "first"]).ok();
    // The one with most, which is at work.
    fill(&host, "kept", &["--evict", "never"], (90, 10, 50));
    wait_for_log(&host, "kept", "ok");
    fill(&host, "most", &["--evict", "sleep"], (145, 10, 20));
    wait_for_given(&host, &[("unused", "sleep"), ("most", "sleep")]);
    let address = host.address_of("most");
    let waiting = host.in_network(move || ask(&address));
    client.wait_for_answers(10);
    assert_eq!(host.state_of("most"), "asleep", "its clients wait");
    // The one that is used, because it is the last one above its guarantee.
    fill(&host, "third", &["--evict", "never"], (130, 10, 40));
    let all = [("unused", "sleep"), ("most", "sleep"), ("used", "sleep")];
    wait_for_given(&host, &all);
    wait_for_log(&host, "third", "ok");
    // With room for them they are woken, and continue.
    for name in ["third", "kept"] {
        host.dm(&["rm", "--force", name]).ok();
    }
    wait_for_log(&host, "most", "ok");
    waiting.join().expect("a client").expect("an answer");
    host.dm(&["rm", "--force", "most"]).ok();
    client.wait_for_answers(10);
    client.end();
    let address = host.address_of("unused");
    let answer = host.in_network(move || ask(&address)).join().expect("a client");
    assert_eq!(answer.expect("an answer"), 40);
    // On a slow machine a pause may have ended before, and one of the three may have been the right one again.
    let names = given(&host);
    let is_one = |name: &str| all.iter().any(|(one, _)| *one == name);
    assert!(names.iter().all(|(name, how)| is_one(name) && how == "sleep"), "{names:?}");
    assert_numbers(&host, "containers");
    for name in ["large", "used", "unused"] {
        assert_eq!(host.state_of(name), "running", "{name}");
        assert_eq!(swapped_bytes(&host, name), 0, "{name}");
        assert_eq!(host.inspect(name)["oom_killed"], false, "{name}");
    }
}

/// The host stays short, so that one container after another gives memory, those with most first, until none uses more
/// than its guarantee.
#[test]
fn vm_containers_give_memory_by_their_policy_until_none_is_above_its_guarantee() {
    let host = short_host();
    hold(&host, "guaranteed", &["--memory-min", "100m", "--evict", "kill"], 80);
    hold(&host, "third", &["--evict", "kill", "--restart", "always"], 20);
    hold(&host, "first", &["--evict", "restart", "--stop-timeout", "1"], 60);
    hold(&host, "second", &["--evict", "sleep"], 40);
    hold(&host, "kept", &[], 90);
    let pid = host.inspect("first")["pid"].clone();
    let _daemon = Daemon::start(&host);
    let all = [("first", "restart"), ("second", "sleep"), ("third", "kill")];
    wait_for_given(&host, &all);
    assert_numbers(&host, "host");
    assert_eq!(host.state_of("first"), "running");
    assert_ne!(host.inspect("first")["pid"], pid, "it was started again");
    host.wait_for_state("second", "asleep");
    assert_eq!(host.state_of("third"), "stopped", "also with a restart policy");
    for name in ["guaranteed", "kept", "first"] {
        assert_eq!(host.state_of(name), "running", "{name}");
    }
    // With a smaller guarantee it is the next one, and no other was meanwhile.
    host.dm(&["update", "--memory-min", "10m", "guaranteed"]).ok();
    wait_for_given(&host, &[&all[..], &[("guaranteed", "kill")]].concat());
}

#[test]
fn container_that_cannot_sleep_is_reported_and_the_next_one_gives_memory() {
    let host = short_host();
    hold(&host, "awaited", &["--evict", "sleep"], 60);
    hold(&host, "next", &["--evict", "sleep"], 30);
    let mut waiter = host.dormouse(&["wait", "awaited"]).spawn().expect("the command starts");
    let is_awaited = || {
        let is_asleep = host.dm(&["sleep", "awaited"]).status == 0;
        if is_asleep {
            host.dm(&["wake", "awaited"]).ok();
        }
        !is_asleep
    };
    assert!(wait_until(soon(), is_awaited), "nothing waits for its end");
    let _daemon = Daemon::start(&host);
    wait_for_given(&host, &[("next", "sleep")]);
    let refusals = events(&host, "awake");
    assert!(refusals.iter().any(|event| event["name"] == "awaited"), "{refusals:?}");
    waiter.kill().expect("killed");
    waiter.wait().expect("its end");
    wait_for_given(&host, &[("next", "sleep"), ("awaited", "sleep")]);
}

/// On cgroup v2 the kernel slows the container down until it has another policy, or the daemon ends.
#[test]
fn vm_throttled_container_is_slowed_down_until_its_policy_changes() {
    if !is_v2() {
        return; // refused, see the first test
    }
    let host = short_host();
    hold(&host, "x", &["--evict", "throttle"], 60);
    let id = id(&host, "x");
    let high = || {
        let read = |dir: &PathBuf| fs::read_to_string(dir.join(&id).join("memory.high")).ok();
        host.cgroups().iter().find_map(read).expect("a limit").trim().to_owned()
    };
    assert_eq!(high(), "max");
    let _daemon = Daemon::start(&host);
    wait_for_given(&host, &[("x", "throttle")]);
    let bytes: u64 = high().parse().expect("a number");
    assert!((55 << 20..80 << 20).contains(&bytes), "{bytes}");
    host.dm(&["update", "--evict", "never", "x"]).ok();
    assert!(wait_until(soon(), || high() == "max"), "{}", high());
    assert_eq!((host.state_of("x").as_str(), given(&host).len()), ("running", 1));
}

/// The daemon ends: the keeper wakes the container when its pause is over.
#[test]
fn big_evicted_container_at_work_wakes_after_its_pause_without_the_daemon() {
    let host = short_host();
    let mut daemon = Daemon::start(&host);
    fill(&host, "x", &["--evict", "sleep"], (2000, 20, 5));
    wait_for_given(&host, &[("x", "sleep")]);
    daemon.kill();
    host.wait_for_state("x", "asleep");
    let awake = || host.state_of("x") == "running";
    assert!(wait_until(soon() + Duration::from_secs(40), awake), "it sleeps on");
    host.dm(&["stop", "--time", "0", "x"]).ok();
}
