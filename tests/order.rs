//! Order: of the connections that wait at a shared service, the next one is that of the account with the least service,
//! whatever the structure of the service. Without a daemon, and for other containers, they come in the kernel's order.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use dormouse_testkit::{Host, image, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::contracts::Daemon;

/// Requests of the first client, and of the second, which come when all of these wait.
pub(crate) const FIRST: usize = 40;
pub(crate) const SECOND: usize = 10;

/// A service that accepts nothing before [`go`], and works 3 ms for each connection.
#[track_caller]
fn serve(host: &Host, style: &str, address: &str, options: &[&str]) {
    serve_for(host, style, address, options, "3000");
}

#[track_caller]
fn serve_for(host: &Host, style: &str, address: &str, options: &[&str], us: &str) {
    let run = [&["run", "-d", "--name", "db"], options].concat();
    host.dm(&[&run[..], &["busybox", "probe", "queue", style, address, "80", us]].concat()).ok();
    host.wait_inside("db", "grep -q ':0050 .* 0A ' /proc/net/tcp /proc/net/tcp6");
}

#[track_caller]
pub(crate) fn go(host: &Host) {
    host.dm(&["exec", "db", "touch", "/go"]).ok();
}

/// Containers that wait for `exec`.
#[track_caller]
fn clients(host: &Host, names: &[&str]) {
    for name in names {
        host.dm(&["run", "-d", "--name", name, "busybox", "sleep", "100000"]).ok();
    }
}

/// Connections that are on their way.
pub(crate) struct Burst {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Burst {
    #[track_caller]
    fn begin(host: &Host, client: &str, service: &str, count: usize) -> Self {
        Self::begin_with(host, client, "burst", service, count)
    }

    #[track_caller]
    fn begin_with(host: &Host, client: &str, verb: &str, service: &str, count: usize) -> Self {
        Self::begin_as(host, client, &[verb, service, "80", &count.to_string()])
    }

    /// `probe` is what a client of the service runs.
    #[track_caller]
    pub(crate) fn begin_as(host: &Host, client: &str, probe: &[&str]) -> Self {
        let mut command = host.dormouse(&[&["exec", client, "probe"][..], probe].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the command starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        assert_eq!(lines.next().expect("a line").expect("in UTF-8"), "asked");
        Self { child, lines }
    }

    /// Waits for the answers, and returns how many came.
    #[track_caller]
    pub(crate) fn answered(mut self) -> usize {
        let line = self.lines.next().expect("a line").expect("in UTF-8");
        assert!(self.child.wait().expect("a child").success());
        line.parse().expect("a number")
    }
}

fn addresses(host: &Host, name: &str) -> Vec<String> {
    let record = host.inspect(name);
    let all = record["addresses"].as_array().expect("an array");
    all.iter().map(|ip| ip.as_str().expect("an address").to_owned()).collect()
}

/// Whether first packets to this address are held. Held connections are ordered.
fn is_ordered(host: &Host, address: &str) -> bool {
    let net = host.root().join("run/domains/default/net");
    let list = format!("nsenter --net={} nft list ruleset", net.display());
    let rules = host.sh(&list).stdout;
    rules.split("table").any(|table| table.contains("dormouse_order") && table.contains(address))
}

#[track_caller]
pub(crate) fn await_order(host: &Host, service: &str) {
    let address = host.address_of(service);
    assert!(wait_until(soon(), || is_ordered(host, &address)), "{service} is not ordered");
}

/// The clients in the order in which the service had them.
pub(crate) fn served(host: &Host) -> Vec<String> {
    let logs = host.dm(&["logs", "db"]);
    logs.stdout.lines().chain(logs.stderr.lines()).map(str::to_owned).collect()
}

/// Has both clients served, and returns the places of the second: 0 is the first of all.
#[track_caller]
fn places(host: &Host, service: &str) -> Vec<usize> {
    let first = Burst::begin(host, "b", service, FIRST);
    let second = Burst::begin(host, "a", service, SECOND);
    go(host);
    assert_eq!([first.answered(), second.answered()], [FIRST, SECOND], "all are answered");
    let all = || served(host).len() == FIRST + SECOND;
    assert!(wait_until(soon(), all), "{:?}", served(host));
    let own = addresses(host, "a");
    let served = served(host);
    let is_of_a = |line: &str| own.iter().any(|own| own == line.trim_start_matches("::ffff:"));
    let places: Vec<usize> = (0..served.len()).filter(|at| is_of_a(&served[*at])).collect();
    println!("the second client has {places:?}");
    assert_eq!(places.len(), SECOND, "{own:?} in {served:?}");
    places
}

/// Connections in turn have the places up to 20, and 10 in the mean. Readings shift some, several workers begin at
/// once, and a socket of a group may have more of them than another. In the kernel's order the mean is 44.5.
pub(crate) const MEAN_ORDERED: usize = 24;

pub(crate) fn mean(places: &[usize]) -> usize {
    places.iter().sum::<usize>() / places.len()
}

/// The order in a service of this style, with gates and a daemon.
#[track_caller]
fn assert_ordered(style: &str, address: &str, service: &str) {
    let host = Host::with_busybox();
    host.dm(&["gate", "load"]).ok();
    serve(&host, style, address, &["--shared"]);
    clients(&host, &["a", "b"]);
    let _daemon = Daemon::start(&host);
    await_order(&host, "db");
    let service = match service {
        "6" => {
            let all = addresses(&host, "db");
            all.into_iter().find(|ip| ip.contains(':')).expect("one of each")
        }
        name => name.to_owned(),
    };
    let places = places(&host, &service);
    assert!(mean(&places) <= MEAN_ORDERED, "{style}: {places:?}");
}

#[test]
fn vm_blocking_service_has_its_clients_in_turn() {
    assert_ordered("block", "0.0.0.0", "db");
}

#[test]
fn service_that_polls_has_its_clients_in_turn() {
    assert_ordered("poll", "0.0.0.0", "db");
}

#[test]
fn service_that_selects_has_its_clients_in_turn() {
    assert_ordered("select", "0.0.0.0", "db");
}

#[test]
fn service_with_an_event_loop_has_its_clients_in_turn() {
    assert_ordered("level", "0.0.0.0", "db");
}

#[test]
fn vm_edge_triggered_service_has_its_clients_in_turn() {
    assert_ordered("edge", "0.0.0.0", "db");
}

#[test]
fn service_with_several_processes_has_its_clients_in_turn() {
    assert_ordered("prefork", "0.0.0.0", "db");
}

#[test]
fn service_with_several_threads_has_its_clients_in_turn() {
    assert_ordered("threads", "0.0.0.0", "db");
}

#[test]
fn vm_each_socket_of_a_group_has_its_clients_in_turn() {
    assert_ordered("group", "0.0.0.0", "db");
}

#[test]
fn vm_service_over_ipv6_has_its_clients_in_turn() {
    assert_ordered("block", "::", "6");
}

/// The kernel's order is that of arrival.
#[test]
fn other_services_have_their_clients_as_they_come() {
    let host = Host::with_busybox();
    host.dm(&["gate", "load"]).ok();
    serve(&host, "block", "0.0.0.0", &[]);
    host.dm(&["run", "-d", "--name", "s", "--shared", "busybox", "sleep", "100000"]).ok();
    clients(&host, &["a", "b"]);
    let _daemon = Daemon::start(&host);
    await_order(&host, "s");
    assert!(!is_ordered(&host, &host.address_of("db")));
    assert_eq!(places(&host, "db"), (FIRST..FIRST + SECOND).collect::<Vec<_>>());
}

/// A service with an order, and two clients.
#[track_caller]
fn ordered(style: &str, options: &[&str]) -> (Host, Daemon) {
    ordered_for(style, options, "3000")
}

/// The same, where each connection has so many microseconds of work.
#[track_caller]
fn ordered_for(style: &str, options: &[&str], us: &str) -> (Host, Daemon) {
    let host = Host::with_busybox();
    host.dm(&["gate", "load"]).ok();
    serve_for(&host, style, "0.0.0.0", &[&["--shared"], options].concat(), us);
    clients(&host, &["a", "b"]);
    let daemon = Daemon::start(&host);
    await_order(&host, "db");
    (host, daemon)
}

/// Waits until so many clients were served.
#[track_caller]
fn await_served(host: &Host, count: usize) {
    assert!(wait_until(soon(), || served(host).len() >= count), "{:?}", served(host));
}

#[test]
fn vm_killed_daemon_loses_no_connection() {
    let (host, mut daemon) = ordered("block", &[]);
    let first = Burst::begin(&host, "b", "db", FIRST);
    let second = Burst::begin(&host, "a", "db", SECOND);
    go(&host);
    await_served(&host, 5);
    daemon.kill();
    assert_eq!([first.answered(), second.answered()], [FIRST, SECOND]);
    // The next one goes on where it finds the rules.
    let _daemon = Daemon::start(&host);
    await_order(&host, "db");
    assert_eq!(Burst::begin(&host, "a", "db", SECOND).answered(), SECOND);
}

#[test]
fn stopped_daemon_admits_all_and_leaves_no_rule() {
    let (host, mut daemon) = ordered("block", &[]);
    let first = Burst::begin(&host, "b", "db", FIRST);
    kill_process(Pid::from_child(daemon.child()), Signal::TERM).expect("our child");
    assert!(daemon.child().wait().expect("our child").success());
    assert!(!is_ordered(&host, &host.address_of("db")));
    let second = Burst::begin(&host, "a", "db", SECOND);
    go(&host);
    assert_eq!([first.answered(), second.answered()], [FIRST, SECOND]);
    await_served(&host, FIRST + SECOND);
    let own = host.address_of("a");
    let served = served(&host);
    assert!(served[FIRST..].iter().all(|line| *line == own), "as they came: {served:?}");
}

/// The kernel resets the one connection that the worker has.
#[test]
fn killed_worker_loses_its_own_connection_alone() {
    let (host, _daemon) = ordered("prefork", &[]);
    let first = Burst::begin(&host, "b", "db", FIRST);
    let second = Burst::begin(&host, "a", "db", SECOND);
    go(&host);
    await_served(&host, 5);
    // The first process of a container ignores a signal from inside.
    host.dm(&[
        "exec",
        "db",
        "sh",
        "-c",
        "kill -9 $(pidof probe | tr ' ' '\n' | grep -vx 1 | head -n 1)",
    ])
    .ok();
    let answered = first.answered() + second.answered();
    assert!(answered >= FIRST + SECOND - 1, "{answered}");
}

#[test]
fn held_connections_of_a_service_that_ends_are_refused() {
    let (host, _daemon) = ordered("block", &[]);
    let burst = Burst::begin(&host, "b", "db", FIRST);
    host.dm(&["kill", "db"]).ok();
    assert_eq!(burst.answered(), 0);
}

#[test]
fn client_beyond_its_bound_does_not_keep_others_away() {
    let (host, _daemon) = ordered("block", &[]);
    let first = Burst::begin(&host, "b", "db", 700);
    let second = Burst::begin(&host, "a", "db", SECOND);
    go(&host);
    assert_eq!(second.answered(), SECOND);
    let before = served(&host).len();
    assert!(before < 200, "{before} were served before");
    assert_eq!(first.answered(), 700, "the rest is repeated");
}

#[test]
fn switched_off_order_leaves_connections_as_they_come() {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text + "[contract]\nservice-order = false\n").expect("written");
    host.dm(&["gate", "load"]).ok();
    serve(&host, "block", "0.0.0.0", &["--shared"]);
    clients(&host, &["a", "b"]);
    let _daemon = Daemon::start(&host);
    assert_eq!(places(&host, "db"), (FIRST..FIRST + SECOND).collect::<Vec<_>>());
    assert!(!is_ordered(&host, &host.address_of("db")));
}

#[test]
fn order_begins_and_ends_with_the_gates() {
    let (host, _daemon) = ordered("block", &[]);
    let address = host.address_of("db");
    let burst = Burst::begin(&host, "b", "db", FIRST);
    host.dm(&["gate", "unload"]).ok();
    assert!(wait_until(soon(), || !is_ordered(&host, &address)));
    go(&host);
    assert_eq!(burst.answered(), FIRST);
    host.dm(&["gate", "load"]).ok();
    await_order(&host, "db");
    assert_eq!(Burst::begin(&host, "a", "db", SECOND).answered(), SECOND);
}

/// Held packets are no connections yet, so a sleep and a wake need nothing of the order.
#[test]
fn vm_shared_service_that_sleeps_is_woken_and_ordered_again() {
    let (host, _daemon) = ordered("block", &[]);
    go(&host);
    assert_eq!(Burst::begin(&host, "b", "db", SECOND).answered(), SECOND);
    host.put_to_sleep("db");
    let address = host.address_of("db");
    assert!(wait_until(soon(), || !is_ordered(&host, &address)), "no process is ordered");
    let bursts = ["a", "b"].map(|client| Burst::begin(&host, client, "db", SECOND));
    assert_eq!(bursts.map(Burst::answered), [SECOND; 2]);
    await_order(&host, "db");
    assert_eq!(Burst::begin(&host, "a", "db", SECOND).answered(), SECOND);
}

/// Packets that this daemon has held so far: the last column but one of the kernel's list of queues.
#[track_caller]
fn held(host: &Host) -> u64 {
    let net = host.root().join("run/domains/default/net");
    let list =
        format!("nsenter --net={} cat /proc/self/net/netfilter/nfnetlink_queue", net.display());
    let queues = host.sh(&list).stdout;
    let numbers =
        |line: &str| line.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
    let all: Vec<Vec<u64>> = queues.lines().filter_map(|line| numbers(line).ok()).collect();
    let own = all.iter().find(|queue| queue.first() == Some(&25709));
    *own.and_then(|queue| queue.get(7)).unwrap_or_else(|| panic!("no queue in {queues}"))
}

/// How many first packets are held of so many connections, one after the other.
#[track_caller]
fn held_of(host: &Host, client: &str, service: &str, count: u64) -> u64 {
    let before = held(host);
    host.dm(&["exec", client, "probe", "visit", service, "80", &count.to_string()]).ok();
    held(host) - before
}

/// Waits until most connections of a client need not wait; `false` where the kernel cannot do that.
#[track_caller]
fn await_passes(host: &Host, client: &str) -> bool {
    if host.feature("xt_bpf")["have"] == false {
        eprintln!("SKIPPED: this kernel has no xt_bpf, so each connection is held");
        return false;
    }
    let mut last = 0;
    let is_so = wait_until(soon(), || {
        last = held_of(host, client, "db", 200);
        last <= 60
    });
    assert!(is_so, "{last} of 200 are held");
    true
}

#[test]
fn connections_that_need_not_wait_are_not_held_until_others_wait() {
    let (host, mut daemon) = ordered_for("block", &[], "20");
    go(&host);
    if !await_passes(&host, "b") {
        return;
    }
    // Those of a killed daemon go on as well, and the next one begins anew.
    daemon.kill();
    assert_eq!(Burst::begin(&host, "b", "db", FIRST).answered(), FIRST);
    let _daemon = Daemon::start(&host);
    await_order(&host, "db");
    assert_eq!(Burst::begin(&host, "a", "db", SECOND).answered(), SECOND);
    assert!(await_passes(&host, "b"));
    // A limit holds all of them: it counts connections before they are made.
    host.dm(&["account", "create", "other"]).ok();
    host.dm(&["account", "set", "--connections", "1", "other"]).ok();
    assert!(wait_until(soon(), || held_of(&host, "b", "db", 50) >= 50));
    host.dm(&["account", "set", "--connections", "unlimited", "other"]).ok();
    assert!(await_passes(&host, "b"));
    // Those of a service that sleeps wake it.
    host.put_to_sleep("db");
    let address = host.address_of("db");
    assert!(wait_until(soon(), || !is_ordered(&host, &address)), "no process is ordered");
    assert_eq!(Burst::begin(&host, "a", "db", SECOND).answered(), SECOND);
    await_order(&host, "db");
    assert!(await_passes(&host, "b"));
}

/// No more than [`ALLOWED_MAX`] of a flood are ahead of the others, and those that come after it are in turn.
#[test]
fn flood_within_an_allowance_waits_afterwards() {
    /// LIMIT: connections that are admitted ahead of a service.
    const ALLOWED_MAX: usize = 16;
    let (host, _daemon) = ordered_for("block", &[], "20");
    go(&host);
    if !await_passes(&host, "b") {
        return;
    }
    let pid = host.inspect("db")["pid"].as_i64().expect("a number");
    let pid = Pid::from_raw(pid as i32).expect("a process");
    kill_process(pid, Signal::STOP).expect("it runs");
    let before = held(&host);
    let first = Burst::begin(&host, "b", "db", FIRST);
    let second = Burst::begin(&host, "a", "db", SECOND);
    let count = held(&host) - before;
    kill_process(pid, Signal::CONT).expect("it is stopped");
    assert_eq!([first.answered(), second.answered()], [FIRST, SECOND], "all are answered");
    assert!(count as usize >= FIRST + SECOND - ALLOWED_MAX, "{count} were held");
    // The lines of visits end with the sign of their request.
    let bursts =
        || served(&host).into_iter().filter(|line| !line.contains(' ')).collect::<Vec<_>>();
    assert!(wait_until(soon(), || bursts().len() == FIRST + SECOND), "{:?}", bursts());
    let own = host.address_of("a");
    let places = places_of(bursts().iter().map(String::as_str), |line| line == own);
    assert!(mean(&places) <= ALLOWED_MAX + SECOND + 4, "{places:?}");
}

/// What a service was allowed ends with it, wherever the next one has its address.
#[test]
fn allowance_of_a_removed_service_is_for_no_other_one() {
    let (host, _daemon) = ordered_for("block", &[], "20");
    go(&host);
    if !await_passes(&host, "b") {
        return;
    }
    let address = host.address_of("db");
    host.dm(&["rm", "--force", "db"]).ok();
    serve(&host, "block", "0.0.0.0", &["--shared", "--ip", &address]);
    await_order(&host, "db");
    let places = places(&host, "db");
    assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
}

/// Connections of an account to shared services now, with those of the accounts below it.
#[track_caller]
pub(crate) fn connections(host: &Host, account: &str) -> u64 {
    let text = host.dm(&["account", "inspect", account]).ok();
    let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    all[0]["Connections"].as_u64().unwrap_or_else(|| panic!("{all}"))
}

#[track_caller]
pub(crate) fn await_connections(host: &Host, account: &str, count: u64) {
    let is_so = || connections(host, account) == count;
    assert!(wait_until(soon(), is_so), "{} connections, not {count}", connections(host, account));
}

/// A service that keeps its connections, an account with this limit, one below it, and a container of each; `b` is of
/// another one.
#[track_caller]
fn limited(limit: &[&str]) -> (Host, Daemon) {
    let host = Host::with_busybox();
    host.dm(&["gate", "load"]).ok();
    host.dm(&["account", "create", "top"]).ok();
    host.dm(&["account", "create", "--parent", "top", "below"]).ok();
    host.dm(&[&["account", "set"], limit, &["top"]].concat()).ok();
    let server = ["busybox", "probe", "burn", "0.0.0.0", "80"];
    host.dm(&[&["run", "-d", "--name", "db", "--shared"][..], &server].concat()).ok();
    let sleep = ["busybox", "sleep", "100000"];
    for (name, account) in [("a", "top"), ("c", "below")] {
        host.dm(&[&["run", "-d", "--name", name, "--account", account][..], &sleep].concat()).ok();
    }
    clients(&host, &["b"]);
    let daemon = Daemon::start(&host);
    await_order(&host, "db");
    host.wait_inside("db", "grep -q ':0050 .* 0A ' /proc/net/tcp");
    (host, daemon)
}

/// Has a client open connections and keep them.
#[track_caller]
fn keep(host: &Host, client: &str, count: usize) -> Burst {
    Burst::begin_with(host, client, "linger", "db", count)
}

/// Ends the clients, which lose their connections.
#[track_caller]
pub(crate) fn drop_all(host: &Host, client: &str) {
    host.dm(&["exec", client, "sh", "-c", "kill -9 $(pidof probe)"]).ok();
}

fn ask(host: &Host, client: &str) -> dormouse_testkit::Output {
    host.dm(&["exec", client, "probe", "work", "db", "80", "3", "100"])
}

#[test]
fn vm_account_waits_for_its_own_connections_beyond_its_limit() {
    let (host, mut daemon) = limited(&["--connections", "4"]);
    let (first, second) = (keep(&host, "a", 3), keep(&host, "c", 5));
    await_connections(&host, "top", 4);
    // Others do not wait.
    ask(&host, "b").ok();
    assert_eq!(connections(&host, "top"), 4);
    // A later daemon finds what there is.
    daemon.kill();
    let _daemon = Daemon::start(&host);
    await_order(&host, "db");
    let third = keep(&host, "c", 5);
    ask(&host, "b").ok();
    let open = connections(&host, "top");
    assert!(open >= 4, "{open}: the packets of the second are repeated before or after the start");
    host.dm(&["account", "set", "--connections", "100", "top"]).ok();
    await_connections(&host, "top", 13);
    for client in ["a", "c"] {
        drop_all(&host, client);
    }
    await_connections(&host, "top", 0);
    drop((first, second, third));
}

/// Clients that open connections and drop them while others wait, stop, or use their ports again: what counts is what
/// the kernel has.
#[test]
fn count_of_connections_comes_back_to_zero() {
    let (host, _daemon) = limited(&["--connections", "2"]);
    for client in ["a", "c", "a"] {
        let burst = keep(&host, client, 20);
        await_connections(&host, "top", 2);
        if client == "c" {
            host.dm(&["exec", client, "sh", "-c", "kill -STOP $(pidof probe)"]).ok();
            host.dm(&["exec", "a", "sh", "-c", "probe work db 80 1 1 & sleep 0.2; kill -9 $!"]);
        }
        drop_all(&host, client);
        drop(burst);
        await_connections(&host, "top", 0);
    }
    // One after the other, from few ports.
    host.dm(&["account", "set", "--connections", "1", "top"]).ok();
    let run = ["run", "-d", "--name", "one", "--shared", "busybox", "probe", "burn-one"];
    host.dm(&[&run[..], &["0.0.0.0", "81"]].concat()).ok();
    await_order(&host, "one");
    host.wait_inside("one", "grep -q ':0051 .* 0A ' /proc/net/tcp");
    host.dm(&["exec", "a", "probe", "visit", "one", "81", "300"]).ok();
    await_connections(&host, "top", 0);
    assert_eq!(connections(&host, "root"), 0);
}

#[test]
fn connection_beyond_a_limit_is_refused_dropped_or_passed_as_the_account_says() {
    let (host, _daemon) = limited(&["--connections", "2", "--on-limit", "refuse"]);
    let burst = keep(&host, "a", 5);
    await_connections(&host, "top", 2);
    let refused = ask(&host, "c");
    assert!(refused.stderr.contains("refused"), "{refused}");
    ask(&host, "b").ok();
    drop_all(&host, "a");
    drop(burst);
    await_connections(&host, "top", 0);
    ask(&host, "c").ok();
    host.dm(&["account", "set", "--on-limit", "drop", "top"]).ok();
    let burst = keep(&host, "a", 2);
    await_connections(&host, "top", 2);
    let mut lost = None;
    let is_lost = || {
        let mut asks = host.dormouse(&["exec", "c", "probe", "work", "db", "80", "3", "100"]);
        let mut asks = asks.stdout(Stdio::null()).spawn().expect("the command starts");
        let mut has_ended = || {
            let status = asks.try_wait().expect("our child");
            status.inspect(|status| assert!(!status.success(), "beyond the limit")).is_some()
        };
        let waits = !wait_until(std::time::Duration::from_millis(300), &mut has_ended);
        lost = waits.then_some(asks);
        waits
    };
    // The daemon reads the change at its next look. Until then connections are refused.
    assert!(wait_until(soon(), is_lost), "its packets are dropped");
    let mut lost = lost.expect("a client");
    drop_all(&host, "a");
    drop(burst);
    assert!(lost.wait().expect("our child").success(), "its packets are repeated");
    host.dm(&["account", "set", "--on-limit", "pass", "top"]).ok();
    let burst = keep(&host, "a", 5);
    await_connections(&host, "top", 5);
    drop_all(&host, "a");
    drop(burst);
}

#[test]
fn limits_are_checked_shown_and_lifted() {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "x"]).ok();
    let set = |options: &[&str]| host.dm(&[&["account", "set"], options].concat());
    for (options, why) in [
        (&["--connections", "3", "root"][..], "has no limit of connections: set one for"),
        (&["--on-limit", "refuse", "x"], "has no limit of connections: give one with"),
        (&["--connections", "unlimited", "--on-limit", "drop", "x"], "give one with"),
        (&["--connections", "-1", "x"], "unexpected argument"),
        (&["--connections", "many", "x"], "a number from 0 to"),
    ] {
        let refused = set(options);
        assert!(refused.status != 0 && refused.stderr.contains(why), "{refused}");
    }
    let shown = || {
        let text = host.dm(&["account", "inspect", "x"]).ok();
        let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        (all[0]["ConnectionsMax"].clone(), all[0]["OnLimit"].clone(), all[0]["Connections"].clone())
    };
    assert_eq!(shown(), (().into(), ().into(), 0.into()));
    set(&["--connections", "3", "x"]).ok();
    assert_eq!(shown(), (3.into(), "wait".into(), 0.into()));
    set(&["--on-limit", "refuse", "x"]).ok();
    set(&["--connections", "5", "x"]).ok();
    assert_eq!(shown(), (5.into(), "refuse".into(), 0.into()));
    set(&["--connections", "unlimited", "x"]).ok();
    assert_eq!(shown(), (().into(), ().into(), 0.into()));
}

/// A real server, which is shared, and two clients of these images. Nothing of it runs before the order is in force.
#[track_caller]
fn real(server: &str, ready: &str, client_image: &str) -> (Host, Daemon) {
    let host = Host::with_busybox();
    host.import(&image::services(), "services");
    host.dm(&["gate", "load"]).ok();
    host.dm(&["run", "-d", "--name", "db", "--shared", "services", "sh", "-c", server]).ok();
    for name in ["a", "b"] {
        host.dm(&["run", "-d", "--name", name, client_image, "sleep", "100000"]).ok();
    }
    let daemon = Daemon::start(&host);
    await_order(&host, "db");
    host.wait_inside("db", ready);
    (host, daemon)
}

/// Has so many processes of a client run a command, and returns when they do.
#[track_caller]
fn many(host: &Host, client: &str, count: usize, program: &str, command: &str) -> Child {
    let all = format!("for i in $(seq {count}); do {command} > /dev/null & done; wait");
    let mut exec = host.dormouse(&["exec", client, "sh", "-c", &all]);
    let child = exec.stdout(Stdio::null()).spawn().expect("the command starts");
    host.wait_inside(client, &format!("[ $(pidof {program} | wc -w) -ge {count} ]"));
    child
}

/// The places of lines that belong to the second client.
#[track_caller]
pub(crate) fn places_of<'a>(
    lines: impl Iterator<Item = &'a str>,
    is_of_a: impl Fn(&str) -> bool,
) -> Vec<usize> {
    let places: Vec<usize> =
        lines.enumerate().filter(|(_, line)| is_of_a(line)).map(|(at, _)| at).collect();
    println!("the second client has {places:?}");
    assert_eq!(places.len(), SECOND);
    places
}

/// One thread, which accepts all connections that are there before it reads from one.
#[test]
fn big_redis_has_its_clients_in_turn() {
    let server = "redis-server --save '' --protected-mode no --bind 0.0.0.0; true";
    let (host, _daemon) = real(server, "redis-cli ping | grep -q PONG", "services");
    let signal = |signal: &str| {
        let kill = format!("kill -{signal} $(pidof redis-server)");
        host.dm(&["exec", "db", "sh", "-c", &kill]).ok();
    };
    let script = |client: &str| {
        let lua = "local i = 0 while i < 200000 do i = i + 1 end redis.call('rpush', 'o', ARGV[1])";
        format!("redis-cli -h db EVAL \"{lua}\" 0 {client}")
    };
    signal("STOP");
    let first = many(&host, "b", FIRST, "redis-cli", &script("b"));
    let second = many(&host, "a", SECOND, "redis-cli", &script("a"));
    signal("CONT");
    for mut child in [first, second] {
        assert!(child.wait().expect("a child").success());
    }
    let order = host.dm(&["exec", "db", "redis-cli", "lrange", "o", "0", "-1"]).ok();
    let places = places_of(order.lines(), |line| line.contains('a'));
    assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
}

/// Two processes with an event loop each.
#[test]
fn big_nginx_has_its_clients_in_turn() {
    let server = "echo 'daemon off; worker_processes 2; user root; error_log /dev/null; pid /tmp/pid; events {} http { \
                  log_format o $remote_addr; access_log /dev/stdout o; server { listen 80; \
                  location / { return 200 x; } } }' > /tmp/conf; exec nginx -c /tmp/conf";
    let (host, _daemon) = real(server, "[ $(pidof nginx | wc -w) = 3 ]", "busybox");
    let workers = |signal: &str| {
        let kill = format!("kill -{signal} $(pidof nginx | tr ' ' '\\n' | grep -vx 1)");
        host.dm(&["exec", "db", "sh", "-c", &kill]).ok();
    };
    workers("STOP");
    let first = many(&host, "b", FIRST, "wget", "wget -qO- http://db/");
    let second = many(&host, "a", SECOND, "wget", "wget -qO- http://db/");
    workers("CONT");
    for mut child in [first, second] {
        assert!(child.wait().expect("a child").success());
    }
    await_served(&host, FIRST + SECOND);
    let own = host.address_of("a");
    let lines = served(&host);
    let places = places_of(lines.iter().map(String::as_str), |line| line == own);
    assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
}

/// One process accepts, and makes another for each connection.
#[test]
fn big_postgresql_has_its_clients_in_turn() {
    // Where su(1) is the first process, a signal does not stop it, and it lets a stopped child continue.
    let server = "chown postgres /tmp; su postgres -s /bin/bash -c 'PATH=$PATH:/usr/lib/postgresql/15/bin; \
                  cd /tmp && initdb -D /tmp/db --auth=trust >/dev/null && \
                  echo host all all all trust >> /tmp/db/pg_hba.conf && \
                  exec postgres -D /tmp/db -h 0.0.0.0 -p 80 -k /tmp -N 400 -c log_connections=on \
                  -c authentication_timeout=2'; true";
    let (host, _daemon) = real(server, "grep -q ready /tmp/db/postmaster.pid", "busybox");
    let signal = |signal: &str| {
        let kill = format!("kill -{signal} $(head -n 1 /tmp/db/postmaster.pid)");
        host.dm(&["exec", "db", "sh", "-c", &kill]).ok();
    };
    signal("STOP");
    // It waits for the rest of a request that is none, and ends the connection.
    let first = Burst::begin(&host, "b", "db", FIRST);
    let second = Burst::begin(&host, "a", "db", SECOND);
    signal("CONT");
    assert_eq!([first.answered(), second.answered()], [0, 0]);
    let received = || {
        let lines = served(&host).into_iter().filter(|line| line.contains("connection received: "));
        lines.collect::<Vec<_>>()
    };
    assert!(wait_until(soon(), || received().len() == FIRST + SECOND), "{:?}", received());
    let own = format!("host={} ", host.address_of("a"));
    let places = places_of(received().iter().map(String::as_str), |line| line.contains(&own));
    assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
}

/// A thread for each connection. One thread accepts them.
#[test]
fn big_mariadb_has_its_clients_in_turn() {
    let server = "chmod 1777 /tmp; mkdir -p /run/mysqld && chown mysql /run/mysqld; mariadbd --user=mysql \
                  --skip-grant-tables --bind-address=0.0.0.0 --skip-networking=0 --port=80 --skip-name-resolve \
                  --max-connections=400 --general-log --general-log-file=/tmp/log; true";
    let (host, _daemon) = real(server, "mariadb -e 'select 1' | grep -q 1", "services");
    let signal = |signal: &str| {
        let kill = format!("kill -{signal} $(pidof mariadbd)");
        host.dm(&["exec", "db", "sh", "-c", &kill]).ok();
    };
    signal("STOP");
    let first = many(&host, "b", FIRST, "mariadb", "mariadb -h db -P 80 -e 'select 1'");
    let second = many(&host, "a", SECOND, "mariadb", "mariadb -h db -P 80 -e 'select 1'");
    signal("CONT");
    for mut child in [first, second] {
        assert!(child.wait().expect("a child").success());
    }
    let log = host.dm(&["exec", "db", "grep", "Connect", "/tmp/log"]).ok();
    let own = format!("@{} ", host.address_of("a"));
    let lines = log.lines().filter(|line| !line.contains("@localhost"));
    let places = places_of(lines, |line| line.contains(&own));
    assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
}

/// One process of nginx, and one of php-fpm behind it, which works some milliseconds for each page.
#[test]
fn big_php_behind_nginx_has_its_clients_in_turn() {
    let server = "mkdir -p /tmp/www; chmod 755 /tmp/www; \
                  echo '<?php $s = 0; for ($i = 0; $i < 300000; $i++) $s += $i * $i; echo $s;' > /tmp/www/page.php; \
                  printf '[global]\\ndaemonize = no\\nerror_log = /dev/null\\n[www]\\nuser = www-data\\n\
                  listen = /tmp/php\\nlisten.mode = 0666\\npm = static\\npm.max_children = 1\\n' > /tmp/fpm; \
                  php-fpm8.2 --nodaemonize --fpm-config /tmp/fpm & \
                  echo 'daemon off; worker_processes 1; user root; error_log /dev/null; pid /tmp/pid; events {} http { \
                  log_format o $remote_addr; access_log /dev/stdout o; server { listen 80; location / { \
                  include /etc/nginx/fastcgi_params; fastcgi_param SCRIPT_FILENAME /tmp/www/page.php; \
                  fastcgi_pass unix:/tmp/php; } } }' > /tmp/conf; exec nginx -c /tmp/conf";
    let (host, _daemon) =
        real(server, "[ -S /tmp/php ] && [ $(pidof nginx | wc -w) = 2 ]", "busybox");
    let worker = |signal: &str| {
        let kill = format!("kill -{signal} $(pidof nginx | tr ' ' '\\n' | grep -vx 1)");
        host.dm(&["exec", "db", "sh", "-c", &kill]).ok();
    };
    worker("STOP");
    let first = many(&host, "b", FIRST, "wget", "wget -qO- http://db/");
    let second = many(&host, "a", SECOND, "wget", "wget -qO- http://db/");
    worker("CONT");
    for mut child in [first, second] {
        assert!(child.wait().expect("a child").success());
    }
    await_served(&host, FIRST + SECOND);
    let own = host.address_of("a");
    let lines = served(&host);
    let places = places_of(lines.iter().map(String::as_str), |line| line == own);
    assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
}
