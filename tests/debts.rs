//! Debts: clients of a shared service pay for its work from their own share of CPU time and from their own limit.

use std::fs;
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use dormouse_testkit::{Host, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::contracts::{Daemon, id, quota, weight};

/// All compete for one processor, whatever else the host does on it.
const ONE_CPU: &[&str] = &["--cpuset-cpus", "0"];

/// A service that works for its clients, which gates charge.
#[track_caller]
fn serve(host: &Host, options: &[&str]) {
    let run = [&["run", "-d", "--name", "db", "--shared"], ONE_CPU, options].concat();
    host.dm(&[&run[..], &["busybox", "probe", "burn", "0.0.0.0", "80"]].concat()).ok();
    host.dm(&["gate", "load"]).ok();
}

/// A container that uses all the CPU time that it gets.
#[track_caller]
fn busy(host: &Host, name: &str, options: &[&str]) {
    let run = [&["run", "-d", "--name", name], ONE_CPU, options].concat();
    host.dm(&[&run[..], &["busybox", "sh", "-c", "while :; do :; done"]].concat()).ok();
}

/// Requests without end, one after the other. On a busy host one may take longer than its client waits.
struct Asking<'a> {
    host: &'a Host,
    client: &'a str,
    child: Child,
}

impl<'a> Asking<'a> {
    #[track_caller]
    fn begin(host: &'a Host, client: &'a str) -> Self {
        let is_there = || host.dm(&["exec", client, "probe", "work", "db", "80", "0", "1"]).status;
        assert!(wait_until(soon(), || is_there() == 0), "the service does not listen");
        let ask = "touch /asks; while [ -e /asks ]; do probe work db 80 1000000 20000; done";
        let mut command = host.dormouse(&["exec", client, "sh", "-c", ask]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started");
        Self { host, client, child }
    }

    #[track_caller]
    fn end(mut self) {
        self.host
            .dm(&["exec", self.client, "sh", "-c", "rm /asks; kill $(pidof probe); true"])
            .ok();
        self.child.wait().expect("a child");
    }
}

/// A figure of an account, in nanoseconds.
#[track_caller]
fn figure_ns(host: &Host, account: &str, name: &str) -> u64 {
    let text = host.dm(&["account", "ls", "--format", "json"]).ok();
    let all: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let found = all.iter().find(|one| one["Name"] == account).expect("an account");
    found[name].as_u64().expect("a number")
}

/// CPU time of a container at home and at services, as its account has it.
#[track_caller]
fn used_ns(host: &Host, name: &str) -> u64 {
    figure_ns(host, &format!("@{name}"), "CpuNs")
}

/// How many times as much as `other` a container gets, at home and at services, while `other` gets 0.7 s.
#[track_caller]
fn advantage(host: &Host, name: &str, other: &str) -> f64 {
    let before = [name, other].map(|name| used_ns(host, name));
    let mut got = [0; 2];
    let is_enough = || {
        got = [name, other].map(|name| used_ns(host, name));
        got[1] - before[1] > 700_000_000
    };
    assert!(wait_until(soon(), is_enough), "{other} does not run");
    (got[0] - before[0]) as f64 / (got[1] - before[1]) as f64
}

#[track_caller]
fn awaits(host: &Host, what: &str, holds: impl Fn() -> bool) {
    let weights = || ["a", "b", "db"].map(|name| weight(host, name).0);
    // A debt is paid while its containers compete, which others on the processor delay.
    assert!(wait_until(3 * soon(), holds), "{what}: {:?}", weights());
}

fn mark(host: &Host) -> std::path::PathBuf {
    host.root().join("run/governed")
}

#[test]
fn big_client_pays_for_a_service_with_its_own_share() {
    let host = Host::with_busybox();
    serve(&host, &[]);
    ["a", "b"].iter().for_each(|name| busy(&host, name, &[]));
    let asking = Asking::begin(&host, "a");
    let free = advantage(&host, "a", "b");
    assert!(free > 1.4, "without a daemon it has its share twice: {free}");
    assert_eq!(weight(&host, "a").0, 1024.0);
    let _daemon = Daemon::start(&host);
    awaits(&host, "it pays", || weight(&host, "a").0 < 300.0);
    let paid = advantage(&host, "a", "b");
    println!("{free} times the time of the other without debts, {paid} with");
    assert!(paid < 1.3, "{paid}, and {free} without debts");
    assert_eq!(weight(&host, "b").0, 1024.0, "it has no part in this");
    assert!(weight(&host, "db").0 >= 1024.0);
    asking.end();
    awaits(&host, "it is given back", || weight(&host, "a").0 == 1024.0);
    awaits(&host, "the service has its own", || weight(&host, "db").0 == 1024.0);
}

#[test]
fn big_service_has_the_weight_of_the_clients_that_it_works_for() {
    let host = Host::with_busybox();
    serve(&host, &["--cpu-weight", "10"]);
    let own = weight(&host, "db").0;
    host.dm(&["run", "-d", "--name", "a", "--cpu-weight", "400", "busybox", "sleep", "1000"]).ok();
    busy(&host, "b", &[]);
    let _daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it is raised", || weight(&host, "db").0 > 2048.0);
    assert!(weight(&host, "db").0 <= own + 4096.0 + 1.0, "{}", weight(&host, "db").0);
    asking.end();
    awaits(&host, "it is given back", || weight(&host, "db").0 == own);
}

#[test]
fn big_limit_of_a_client_includes_its_time_at_services() {
    let host = Host::with_busybox();
    serve(&host, &[]);
    // So little that it is used on a busy host, too.
    busy(&host, "a", &["--cpus", "0.05"]);
    busy(&host, "b", &[]);
    let whole = quota(&host, "a");
    assert_eq!(whole, [5000, 100_000, 5000]);
    let _daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "its quota is lowered", || quota(&host, "a")[0] < 3000);
    assert_eq!(quota(&host, "a")[1..], [100_000, 0]);
    asking.end();
    awaits(&host, "it is given back", || quota(&host, "a") == whole);
}

#[test]
fn big_killed_daemon_leaves_debts_to_the_next_command() {
    let host = Host::with_busybox();
    serve(&host, &["--cpu-weight", "10"]);
    let own = weight(&host, "db").0;
    busy(&host, "a", &["--cpu-weight", "200"]);
    busy(&host, "b", &[]);
    busy(&host, "c", &["--cpus", "0.05"]);
    let whole = quota(&host, "c");
    let mut daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    let too = Asking::begin(&host, "c");
    let ids = ["a", "c", "db"].map(|name| id(&host, name));
    let owes = || weight(&host, "a").0 < 1500.0 && quota(&host, "c")[0] < 4500;
    awaits(&host, "both owe", owes);
    awaits(&host, "the service is raised", || weight(&host, "db").0 > own);
    let text = fs::read_to_string(mark(&host)).expect("a mark");
    assert!(ids.iter().all(|id| text.contains(id)), "{text}");
    daemon.kill();
    host.dm(&["ls"]).ok();
    assert!(!mark(&host).exists(), "the command after a killed daemon finds its mark");
    assert_eq!([weight(&host, "a").0, weight(&host, "db").0], [2048.0, own]);
    assert_eq!(quota(&host, "c"), whole);

    let _daemon = Daemon::start(&host);
    awaits(&host, "the next daemon goes on", owes);
    asking.end();
    too.end();
    awaits(&host, "all is given back", || {
        weight(&host, "a").0 == 2048.0 && weight(&host, "db").0 == own && quota(&host, "c") == whole
    });
}

#[test]
fn big_changed_contract_and_next_life_have_their_own_settings() {
    let host = Host::with_busybox();
    serve(&host, &[]);
    ["a", "b"].iter().for_each(|name| busy(&host, name, &[]));
    let mut daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it owes", || weight(&host, "a").0 < 700.0);
    host.dm(&["update", "--cpu-weight", "300", "a"]).ok();
    asking.end();
    awaits(&host, "the new contract holds", || weight(&host, "a").0 == 3072.0);
    let mut asking = Asking::begin(&host, "a");
    awaits(&host, "it owes again", || weight(&host, "a").0 < 2500.0);
    host.dm(&["restart", "-t", "0", "a"]).ok();
    asking.child.wait().expect("a child");
    awaits(&host, "another life has no debts", || weight(&host, "a").0 == 3072.0);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it owes again", || weight(&host, "a").0 < 2500.0);
    kill_process(Pid::from_child(daemon.child()), Signal::TERM).expect("our child");
    assert!(daemon.child().wait().expect("our child").success());
    assert!(!mark(&host).exists(), "no command has run since");
    assert_eq!(weight(&host, "a").0, 3072.0);
    asking.end();
}

#[test]
fn big_unloaded_gates_end_debts() {
    let host = Host::with_busybox();
    serve(&host, &[]);
    ["a", "b"].iter().for_each(|name| busy(&host, name, &[]));
    let _daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it owes", || weight(&host, "a").0 < 700.0);
    host.dm(&["gate", "unload"]).ok();
    awaits(&host, "it is given back", || weight(&host, "a").0 == 1024.0);
    assert!(wait_until(soon(), || !mark(&host).exists()), "nothing is governed");
    host.dm(&["gate", "load"]).ok();
    asking.end();
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it owes again", || weight(&host, "a").0 < 700.0);
    asking.end();
}

#[test]
fn big_reservation_pays_with_its_weight_as_well() {
    let host = Host::with_busybox();
    serve(&host, &[]);
    busy(&host, "a", &["--cpu-reserve", "0.2"]);
    busy(&host, "b", &[]);
    let fixed = weight(&host, "a").0;
    assert!(fixed > 1024.0);
    let mut daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it owes", || weight(&host, "a").0 < 900.0);
    daemon.kill();
    host.dm(&["ls"]).ok();
    assert_eq!(weight(&host, "a").0, fixed);
    asking.end();
}

#[test]
fn big_ended_reservation_leaves_the_weight_of_the_contract() {
    let host = Host::with_busybox();
    serve(&host, &[]);
    busy(&host, "a", &["--cpu-reserve", "0.2"]);
    busy(&host, "b", &[]);
    let _daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    awaits(&host, "it owes", || weight(&host, "a").0 < 900.0);
    asking.end();
    host.dm(&["update", "--cpu-reserve", "0", "a"]).ok();
    // The daemon decides at least once a second, and what is left of the debt lowers the weight.
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(100));
        assert!(weight(&host, "a").0 <= 1024.0, "{}", weight(&host, "a").0);
    }
    awaits(&host, "the debt is paid", || weight(&host, "a").0 == 1024.0);
}

#[test]
fn big_containers_of_one_account_pay_together_and_those_of_root_not_at_all() {
    let host = Host::with_busybox();
    host.dm(&["account", "create", "smith"]).ok();
    serve(&host, &[]);
    ["a", "c"].iter().for_each(|name| busy(&host, name, &["--account", "smith"]));
    busy(&host, "b", &["--rm"]);
    let _daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    let both_owe = || weight(&host, "a").0 < 900.0 && weight(&host, "c").0 < 900.0;
    awaits(&host, "both owe", both_owe);
    assert_eq!(weight(&host, "b").0, 1024.0);
    asking.end();
    let asking = Asking::begin(&host, "b");
    let begun = figure_ns(&host, "root", "CpuTakenNs");
    let is_charged = || figure_ns(&host, "root", "CpuTakenNs") > begun + 300_000_000;
    awaits(&host, "root is charged", is_charged);
    assert_eq!(weight(&host, "b").0, 1024.0, "it has root's account in common with others");
    awaits(&host, "no debt is left", || weight(&host, "a").0 == 1024.0);
    asking.end();
}

#[test]
fn big_debts_can_be_switched_off() {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    fs::write(&config, text + "[contract]\nservice-debt = false\n").expect("written");
    serve(&host, &[]);
    ["a", "b"].iter().for_each(|name| busy(&host, name, &[]));
    let _daemon = Daemon::start(&host);
    let asking = Asking::begin(&host, "a");
    let free = advantage(&host, "a", "b");
    assert!(free > 1.4, "{free}");
    assert_eq!(weight(&host, "a").0, 1024.0);
    assert!(!mark(&host).exists());
    asking.end();
}
