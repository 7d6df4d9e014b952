//! Limits of accounts hold for all containers of an account together, and of the accounts below it.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use dormouse_testkit::{Host, Led, dormouse, soon, wait_until};
use serde_json::Value;

use crate::fault::{ASK, Counts, EXEC, REMOVE, SLEEP, Scene, Verb, WAKE, Words, state_of_x};

/// Accounts smith and, below it, shop.
#[track_caller]
fn host() -> Host {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "smith"]).ok();
    host.dm(&["account", "create", "--parent", "smith", "shop"]).ok();
    host
}

/// A container that does nothing.
#[track_caller]
fn idle(host: &Host, name: &str, account: &str) {
    let run = ["run", "-d", "--name", name, "--account", account, "busybox", "sleep", "100000"];
    host.dm(&run).ok();
}

#[track_caller]
fn set(host: &Host, option: &str, most: &str, account: &str) {
    host.dm(&["account", "set", option, most, account]).ok();
}

/// A figure of an account.
#[track_caller]
fn shown(host: &Host, account: &str, name: &str) -> Option<u64> {
    let text = host.dm(&["account", "inspect", account]).ok();
    let all: Value = serde_json::from_str(&text).expect("JSON");
    all[0][name].as_u64()
}

/// Opens up to 100 sockets inside for a moment, and returns how many there were room for.
#[track_caller]
fn room(host: &Host, container: &str) -> u64 {
    let text = host.dm(&["exec", container, "probe", "sockets", "100", "0"]).ok();
    let (count, error) = text.split_once(' ').expect("a number and an error");
    let count = count.parse().expect("a number");
    assert_eq!(error == "Success", count == 100, "{text}");
    assert!(count == 100 || error == "Too many open files", "{text}");
    count
}

/// Waits until the sockets of an account are so many.
#[track_caller]
fn await_sockets(host: &Host, account: &str, expected: u64) {
    let now = || shown(host, account, "Sockets");
    let reached = wait_until(soon(), || now() == Some(expected));
    assert!(reached, "{account} has {:?} sockets, not {expected}", now());
}

/// Keeps so many sockets inside, as long as the container runs.
#[track_caller]
fn hold(host: &Host, container: &str, count: &str) {
    host.dm(&["exec", "-d", container, "probe", "sockets", count, "100000"]).ok();
}

#[test]
fn vm_sockets_of_an_account_are_limited_together() {
    let host = host();
    idle(&host, "early", "smith");
    hold(&host, "early", "7");
    set(&host, "--sockets", "20", "smith");
    for (name, account) in [("a", "smith"), ("b", "shop"), ("other", "root")] {
        idle(&host, name, account);
    }
    assert_eq!(shown(&host, "smith", "SocketsMax"), Some(20));
    assert_eq!((room(&host, "a"), room(&host, "early")), (20, 20), "earlier sockets do not count");
    hold(&host, "b", "12");
    await_sockets(&host, "smith", 12);
    assert_eq!(["a", "b", "early"].map(|name| room(&host, name)), [8; 3]);
    assert_eq!(room(&host, "other"), 100);
    assert_eq!(shown(&host, "shop", "Sockets"), None, "it has no limit of its own");
    // An account below another one has to keep both limits. It counts from now on.
    set(&host, "--sockets", "3", "shop");
    assert_eq!((room(&host, "b"), room(&host, "a")), (3, 8));
    set(&host, "--sockets", "unlimited", "shop");
    assert_eq!(room(&host, "b"), 8);
    // An account that moves takes its sockets of before along as they were counted.
    host.dm(&["account", "set", "--parent", "root", "shop"]).ok();
    assert_eq!((room(&host, "b"), room(&host, "a")), (100, 8));
    host.dm(&["kill", "b"]).ok();
    await_sockets(&host, "smith", 0);
    assert_eq!(room(&host, "a"), 20);
    set(&host, "--sockets", "0", "smith");
    assert_eq!(room(&host, "a"), 0);
    set(&host, "--sockets", "unlimited", "smith");
    assert_eq!((room(&host, "a"), shown(&host, "smith", "Sockets")), (100, None));
    let refused = host.dm(&["account", "set", "--sockets", "5", "root"]).err(125);
    assert!(refused.contains("below it"), "{refused}");
}

/// A server that keeps its connections until the client closes them.
#[track_caller]
fn server(host: &Host, name: &str) -> SocketAddr {
    let run = ["run", "-d", "--name", name, "--account", "shop", "busybox", "probe"];
    host.dm(&[&run[..], &["hold", "0.0.0.0", "80"]].concat()).ok();
    host.wait_inside(name, "grep -q :0050 /proc/net/tcp");
    SocketAddr::new(host.address_of(name).parse().expect("an address"), 80)
}

/// Connections from the host.
#[track_caller]
fn connect(host: &Host, to: SocketAddr, count: usize) -> Vec<TcpStream> {
    let dial = move || (0..count).map(|_| TcpStream::connect(to)).collect::<Result<Vec<_>, _>>();
    host.in_network(dial).join().expect("no panic").expect("connections")
}

/// Accepted connections count, and a full account has further clients wait. A wake makes all sockets again, also at the
/// limit, and the count is right afterwards.
#[test]
fn vm_accepted_connections_count_for_the_account_over_a_sleep() {
    let host = host();
    set(&host, "--sockets", "10", "smith");
    let to = server(&host, "a");
    idle(&host, "b", "smith");
    hold(&host, "b", "4");
    let clients = connect(&host, to, 5);
    await_sockets(&host, "smith", 10);
    let late = host.in_network(move || {
        let one = TcpStream::connect_timeout(&to, Duration::from_millis(1500));
        one.err().map(|e| e.kind())
    });
    assert_eq!(late.join().expect("no panic"), Some(std::io::ErrorKind::TimedOut));
    host.put_to_sleep("a");
    host.dm(&["wake", "a"]).ok();
    await_sockets(&host, "smith", 10);
    assert_eq!((room(&host, "a"), room(&host, "b")), (0, 0));
    drop(clients);
    await_sockets(&host, "smith", 5);
    assert_eq!((room(&host, "a"), room(&host, "b")), (5, 5));
    host.dm(&["rm", "--force", "a", "b"]).ok();
    await_sockets(&host, "smith", 0);
}

/// Makes processes until that fails, or so many are there. They stay.
#[track_caller]
fn fill(host: &Host, container: &str, count: u32) {
    let script = format!("for n in $(seq {count}); do sleep 100000 >/dev/null 2>&1 & done");
    host.dm(&["exec", container, "sh", "-c", &script]);
}

#[track_caller]
fn pids(host: &Host, account: &str) -> u64 {
    shown(host, account, "Pids").expect("a number")
}

/// The limit of a container in the kernel.
#[track_caller]
fn pids_max(host: &Host, container: &str) -> Option<u64> {
    pids_max_in(&host.dm(&["stats", "--no-stream", "--json", container]).ok())
}

fn pids_max_in(stats: &str) -> Option<u64> {
    let rows: Value = serde_json::from_str(stats).expect("JSON");
    rows[0]["pids_max"].as_u64()
}

#[test]
fn vm_processes_of_an_account_are_limited_together() {
    let host = host();
    idle(&host, "early", "smith");
    set(&host, "--pids", "40", "smith");
    for (name, account) in [("a", "smith"), ("b", "shop"), ("other", "root")] {
        idle(&host, name, account);
    }
    for name in ["a", "b", "early"] {
        fill(&host, name, 100);
    }
    let all = pids(&host, "smith");
    // A shell in each has ended.
    assert!((30..=40).contains(&all), "{all}");
    assert!(pids(&host, "shop") < 20, "the room is dealt in parts");
    fill(&host, "other", 100);
    assert!(pids(&host, "root") > 100);
    // Of an ended container, the others of the account get the room.
    host.dm(&["rm", "--force", "early", "b"]).ok();
    fill(&host, "a", 100);
    let all = pids(&host, "smith");
    assert!((39..=40).contains(&all), "{all}");
    set(&host, "--pids", &all.to_string(), "smith");
    let run = ["run", "-d", "--name", "c", "--account", "shop", "busybox", "sleep", "1"];
    let refused = host.dm(&run).err(125);
    assert!(refused.contains("account 'smith'") && refused.contains("--pids"), "{refused}");
    set(&host, "--pids", "60", "smith");
    idle(&host, "d", "shop");
    fill(&host, "d", 100);
    assert_eq!(shown(&host, "smith", "PidsMax"), Some(60));
    let before = pids(&host, "smith");
    assert!((45..=60).contains(&before), "{before}");
    // A lower limit ends no process, and lets none begin.
    set(&host, "--pids", "5", "smith");
    fill(&host, "a", 3);
    assert_eq!(pids(&host, "smith"), before);
    set(&host, "--pids", "unlimited", "smith");
    assert_eq!(pids_max(&host, "a"), Some(2048));
    fill(&host, "a", 100);
    assert!(pids(&host, "smith") > 100);
}

/// An asleep container has no room. It wakes with all of its processes in a full account, and then makes no more.
#[test]
fn vm_container_wakes_in_an_account_with_all_its_processes() {
    let host = host();
    set(&host, "--pids", "20", "smith");
    idle(&host, "a", "smith");
    fill(&host, "a", 8);
    idle(&host, "b", "shop");
    host.put_to_sleep("a");
    fill(&host, "b", 100);
    let before = pids(&host, "smith");
    assert!((19..=20).contains(&before), "{before}");
    host.dm(&["wake", "a"]).ok();
    assert_eq!(pids(&host, "smith"), before + 9);
    assert_eq!(pids_max(&host, "a"), Some(9));
    fill(&host, "a", 3);
    assert_eq!(pids(&host, "smith"), before + 9, "it has no room");
    host.dm(&["rm", "--force", "b"]).ok();
    fill(&host, "a", 3);
    assert_eq!(pids(&host, "smith"), 12);
    // A change of its contract gives it no room of others.
    host.dm(&["update", "--pids", "500", "a"]).ok();
    assert_eq!(pids_max(&host, "a"), Some(20));
    host.dm(&["update", "--pids", "12", "a"]).ok();
    assert_eq!(pids_max(&host, "a"), Some(12));
}

/// A daemon has a container get the room that another one does not use.
#[test]
fn daemon_deals_the_room_of_an_account_again() {
    let host = host();
    set(&host, "--pids", "40", "smith");
    for name in ["a", "b"] {
        idle(&host, name, "smith");
    }
    fill(&host, "a", 100);
    let half = pids(&host, "smith");
    assert!(half < 25, "{half}");
    let _daemon = crate::contracts::Daemon::start(&host);
    let more = || {
        fill(&host, "a", 100);
        pids(&host, "smith") >= 36
    };
    assert!(wait_until(soon(), more), "{}", pids(&host, "smith"));
    assert!(pids(&host, "smith") <= 40);
}

#[test]
fn big_kernel_follows_limits_of_accounts_after_a_kill_at_any_step() {
    let host = host();
    idle(&host, "a", "smith");
    for (option, name) in [("--sockets", "SocketsMax"), ("--pids", "PidsMax")] {
        let mut number = 0;
        loop {
            set(&host, option, "unlimited", "smith");
            let command = host.dormouse(&["account", "set", option, "9", "smith"]);
            let mut led = Led::start(&command, &dormouse());
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            if call.is_some() {
                led.kill();
            }
            let what = format!("{option} killed at step {number}, {call:?}");
            host.dm(&["ps"]).ok();
            let is_limited = shown(&host, "smith", name) == Some(9);
            let in_kernel = match option {
                "--sockets" => room(&host, "a") == 9,
                _ => pids_max(&host, "a") == Some(9),
            };
            assert_eq!(in_kernel, is_limited, "{what}");
            if call.is_none() {
                break;
            }
            number += 1;
        }
        assert!(number > 5, "{option} has {number} steps");
    }
}

/// The limits of the account `smith`: so many processes, and so many sockets.
const MOST: u64 = 12;
const RUN_IN_ACCOUNT: Words =
    &["run", "-d", "--name", "x", "--account", "smith", "busybox", "sleep", "1000"];
const COUNT_IN_ACCOUNT: Words = &[
    "run",
    "-d",
    "--name",
    "x",
    "--account",
    "smith",
    "busybox",
    "probe",
    "count",
    "0.0.0.0",
    "80",
];

/// A host with an account with limits, which has a container `near`.
struct Limited(Scene);

impl Limited {
    fn new() -> Self {
        let mut scene = Scene::new();
        let most = MOST.to_string();
        scene.all(&[
            &["account", "create", "smith"],
            &["account", "set", "--pids", &most, "--sockets", &most, "smith"],
            &["run", "-d", "--name", "near", "--account", "smith", "busybox", "sleep", "100000"],
        ]);
        scene.host.await_removals();
        scene.before = Counts::of(&scene.host);
        Self(scene)
    }

    /// Kills a command at each `stride`th of its steps. `x` has so many sockets where it runs or sleeps.
    fn survives(&self, verb: &Verb, sockets: u64, stride: usize) {
        let at_kill = |what: &str| self.assert_limited(sockets, what);
        let killed = verb.survives_with(&self.0, stride, &at_kill, &|what| self.assert_free(what));
        assert!(killed * stride > 20, "{killed} kills, one at each {stride}th step");
    }

    /// All containers together may have as much as the account.
    fn assert_limited(&self, sockets: u64, what: &str) {
        let host = &self.0.host;
        let mut state = state_of_x(host);
        let mut x = Some(0);
        if state == "running" {
            let out = host.dm(&["stats", "--no-stream", "--json", "x"]);
            match out.status {
                0 => x = pids_max_in(&out.stdout),
                // A newborn exits by itself when its starter was killed.
                _ => state = state_of_x(host),
            }
            assert!(out.status == 0 || state != "running", "{what}: {out}");
        }
        let all = x.zip(pids_max(host, "near")).map(|(x, near)| x + near);
        assert!(all.is_some_and(|all| all <= MOST), "{what}: {all:?} processes, x is {state}");
        let has_sockets = state == "running" || state == "asleep";
        let sockets = if has_sockets { sockets } else { 0 };
        let left = room(host, "near");
        let is_limited = left + sockets <= MOST || state_of_x(host) != state;
        assert!(is_limited, "{what}: {left} more sockets, x is {state}");
    }

    /// Without `x`, the other container may have all.
    fn assert_free(&self, what: &str) {
        let host = &self.0.host;
        let of_near = || (pids_max(host, "near"), room(host, "near"));
        let is_free = wait_until(soon(), || of_near() == (Some(MOST), MOST));
        assert!(is_free, "{what}: {:?} of {MOST}", of_near());
    }

    fn survives_all(stride: usize) {
        let this = Self::new();
        let states = &["none", "created", "running", "stopped"];
        let after = &[REMOVE, RUN_IN_ACCOUNT, REMOVE];
        this.survives(&Verb { before: &[], command: RUN_IN_ACCOUNT, states, after }, 0, stride);
        let (states, after) = (&["running", "asleep"], &[WAKE, EXEC, REMOVE]);
        let before = &[COUNT_IN_ACCOUNT, ASK];
        this.survives(&Verb { before, command: SLEEP, states, after }, 1, stride);
        let before = &[COUNT_IN_ACCOUNT, ASK, SLEEP];
        this.survives(&Verb { before, command: WAKE, states, after }, 1, stride);
    }
}

/// Some steps of each, with another process delayed at each of them.
#[test]
fn run_sleep_and_wake_in_an_account_with_limits_survive_kill_at_some_steps() {
    Limited::survives_all(15);
}

#[test]
fn big_run_sleep_and_wake_in_an_account_with_limits_survive_kill_at_any_step() {
    Limited::survives_all(1);
}
