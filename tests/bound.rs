//! A program of a shared container that hides its switching names the client for which it works, by a call with a
//! connection that it has: it gives no account that is not its client.

use std::process::{Child, Stdio};

use dormouse_testkit::{Host, image, soon, wait_until};
use rustix::io::Errno;
use serde_json::Value;

use crate::gates::{accounts, assert_taken, await_counted, figure, is_near, load, stolen_ns, sum};

/// A host with the programs, and a shared container `s`.
#[track_caller]
fn host() -> Host {
    let host = Host::new();
    host.import(&image::bound(), "bound");
    host.dm(&["volume", "create", "v"]).ok();
    run(&host, "s", &["--shared"], &["sleep", "100000"]);
    host
}

/// The same with gates, where the kernel takes the program that answers calls.
#[track_caller]
fn host_with_calls() -> Option<Host> {
    let host = host();
    load(&host);
    if call(&host, "s", &["listener", "0", "0"]) == Err(Errno::NOPROTOOPT) {
        eprintln!("NOT RUN: programs of cgroups have no storage of tasks here (Linux 6.16)");
        return None;
    }
    Some(host)
}

#[track_caller]
fn run(host: &Host, name: &str, options: &[&str], program: &[&str]) {
    let run = [&["run", "-d", "--name", name, "-v", "v:/v"][..], options, &["bound"], program];
    host.dm(&run.concat()).ok();
}

/// One call.
#[track_caller]
fn call(host: &Host, container: &str, what: &[&str]) -> Result<(), Errno> {
    let text = host.dm(&[&["exec", container, "bound", "call"][..], what].concat()).ok();
    match text.trim().parse().expect("a number") {
        0 => Ok(()),
        error => Err(Errno::from_raw_os_error(error)),
    }
}

/// Begins one request of so many milliseconds. A service may begin to listen only now.
#[track_caller]
fn ask(host: &Host, client: &str, to: [&str; 2], ms: u32) -> Child {
    let us = (ms * 1000).to_string();
    let command = |times: &str| {
        let ask = ["exec", client, "probe", "work", to[0], to[1], times, &us];
        let mut command = host.dormouse(&ask);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let listens = || command("0").status().expect("started").success();
    assert!(wait_until(soon(), listens), "{} does not listen", to[0]);
    command("1").spawn().expect("started")
}

/// The request of b comes in the middle of that of a: 600 ms and 200 ms, in turns of 1 ms.
#[track_caller]
fn interleave(host: &Host, service: &str, to: [&str; 2]) -> Vec<Value> {
    let mut a = ask(host, "a", to, 600);
    await_counted(host, service, 50);
    let mut b = ask(host, "b", to, 200);
    assert!(a.wait().expect("a child").success() && b.wait().expect("a child").success());
    accounts(host)
}

#[test]
fn program_with_user_level_threads_names_the_client_of_each_turn() {
    let Some(host) = host_with_calls() else { return };
    for name in ["a", "b"] {
        run(&host, name, &[], &["sleep", "100000"]);
    }
    let [mut a, mut b] = [0, 0];
    for (name, to) in [("tcp", ["0.0.0.0", "80"]), ("unix", ["/v/socket", "-"])] {
        run(&host, name, &["--shared"], &["bound", "threads", to[0], to[1], "call"]);
        let all = interleave(&host, name, [if name == "tcp" { name } else { to[0] }, to[1]]);
        (a, b) = (a + 600, b + 200);
        assert_taken(&all, "@a", a);
        assert_taken(&all, "@b", b);
    }
    // Without the call the client that was read from last pays for all.
    run(&host, "silent", &["--shared"], &["bound", "threads", "0.0.0.0", "80", "silent"]);
    let before = accounts(&host);
    let after = interleave(&host, "silent", ["silent", "80"]);
    let more = |account: &str| {
        figure(&after, account, "CpuTakenNs") - figure(&before, account, "CpuTakenNs")
    };
    assert!(!is_near(more("@a"), 600) && !is_near(more("@b"), 200), "{after:?}");
    assert!(is_near(more("@a") + more("@b"), 800), "{after:?}");
}

#[test]
fn program_says_that_it_works_for_itself() {
    let Some(host) = host_with_calls() else { return };
    run(&host, "own", &["--shared"], &["bound", "threads", "0.0.0.0", "80", "self"]);
    run(&host, "a", &[], &["sleep", "100000"]);
    assert!(ask(&host, "a", ["own", "80"], 300).wait().expect("a child").success());
    let all = accounts(&host);
    let taken = figure(&all, "@a", "CpuTakenNs");
    assert!(taken < 10_000_000 + stolen_ns(), "{all:?}");
    assert!(figure(&all, "@own", "CpuNs") + stolen_ns() >= 300_000_000, "{all:?}");
}

/// Each error is that of the manual.
#[test]
fn call_fails_with_the_documented_errors() {
    let host = host();
    run(&host, "x", &[], &["sleep", "100000"]);
    assert_eq!(
        call(&host, "s", &["listener", "1", "0"]),
        Err(Errno::NOPROTOOPT),
        "no gate is loaded"
    );
    assert_eq!(call(&host, "s", &["pair", "1", "0"]), Err(Errno::OPNOTSUPP), "no gate is loaded");
    host.dm(&["gate", "load", "fork", "send"]).ok();
    assert_eq!(
        call(&host, "s", &["listener", "1", "0"]),
        Err(Errno::NOPROTOOPT),
        "receive is not loaded"
    );
    load(&host);
    if call(&host, "s", &["listener", "0", "0"]) == Err(Errno::NOPROTOOPT) {
        eprintln!("NOT RUN: programs of cgroups have no storage of tasks here (Linux 6.16)");
        return;
    }
    for (what, value, answer) in [
        ("listener", "1", Err(Errno::NOTCONN)),
        ("listener", "0", Ok(())),
        ("listener", "2", Err(Errno::INVAL)),
        ("listener", "-1", Err(Errno::INVAL)),
        ("length", "1", Err(Errno::INVAL)),
        ("option", "1", Err(Errno::NOPROTOOPT)),
        ("level", "1", Err(Errno::NOPROTOOPT)),
        ("udp", "1", Err(Errno::NOTCONN)),
        ("udp", "0", Ok(())),
        ("pipe", "1", Err(Errno::NOTSOCK)),
        // A connection with itself, of which neither side is the client.
        ("pair", "1", Err(Errno::NOTCONN)),
        ("pair", "0", Ok(())),
    ] {
        assert_eq!(call(&host, "s", &[what, value, "0"]), answer, "{what} {value}");
    }
    // Neither shared nor named by a rule for `receive`.
    for (what, value) in [("listener", "1"), ("listener", "0"), ("pair", "1"), ("udp", "0")] {
        assert_eq!(call(&host, "x", &[what, value, "0"]), Err(Errno::PERM), "{what} {value}");
    }
    let rule = "[[rule]]\ngate = \"receive\"\nhome = \"@x\"\naccount = \"peer\"\n";
    host.dm_with_input(rule.as_bytes(), &["rules", "apply", "-"]).ok();
    assert_eq!(call(&host, "x", &["pair", "1", "0"]), Ok(()), "the rule decides");
    host.dm(&["gate", "unload"]).ok();
    assert_eq!(call(&host, "s", &["listener", "1", "0"]), Err(Errno::NOPROTOOPT), "unloaded");
}

/// Connections that are not those of its clients: in a network of its own with the address of a victim, with itself,
/// and the connection of a victim with another container, from which it has received nothing.
#[test]
fn call_charges_no_account_that_is_not_a_client() {
    let Some(host) = host_with_calls() else { return };
    run(&host, "victim", &[], &["sleep", "100000"]);
    let victim = host.address_of("victim");
    let caps = ["--shared", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"];
    run(&host, "net", &caps, &["sleep", "100000"]);
    let own_stack = format!(
        "unshare -n sh -ec 'ip link set lo up; ip addr add {victim}/32 dev lo; \
         ip addr add 198.51.100.1/32 dev lo; \
         ip route replace local 198.51.100.1 dev lo src {victim} table local; \
         bound threads 198.51.100.1 80 call & \
         until probe work 198.51.100.1 80 20 5000; do sleep 0.1; done; kill %1'"
    );
    host.dm(&["exec", "net", "sh", "-c", &own_stack]).ok();
    assert_eq!(call(&host, "net", &["pair", "1", "100000"]), Err(Errno::NOTCONN));
    // Another container hands its connections with the victim over.
    for (name, own, to) in
        [("tcp", "0.0.0.0", ["tcp", "80"]), ("unix", "/v/unix", ["/v/unix", "-"])]
    {
        let path = format!("/v/rights-{name}");
        let taker = format!("take-{name}");
        run(&host, &taker, &["--shared"], &["bound", "take", &path, "1", "100000"]);
        host.wait_inside(&taker, &format!("[ -S {path} ]"));
        run(&host, name, &[], &["bound", "hand", own, to[1], &path]);
        // Each connection is handed over, also those that ask for nothing.
        assert!(ask(&host, "victim", to, 100).wait().expect("a child").success());
        let errors = host.dm(&["logs", &taker]).ok();
        let expected = Errno::NOTCONN.raw_os_error().to_string();
        assert!(errors.lines().all(|line| line == expected), "{errors}");
        assert!(errors.lines().count() >= 2, "{errors}");
    }
    let all = accounts(&host);
    assert_eq!(figure(&all, "@victim", "CpuTakenNs"), 0, "{all:?}");
    // Those that have handed them over have sent a message for that.
    let taken = sum(&all, "CpuTakenNs");
    assert!(taken < 10_000_000 + stolen_ns(), "{all:?}");
    assert!(figure(&all, "@net", "CpuNs") + 2 * stolen_ns() >= 200_000_000, "{all:?}");
}

/// The program goes on naming a client that has ended: the request is charged to its end, and to no other container
/// with the number of that client.
#[test]
fn client_that_ends_is_charged_for_its_request_alone() {
    let Some(host) = host_with_calls() else { return };
    run(&host, "db", &["--shared"], &["bound", "threads", "0.0.0.0", "80", "call"]);
    for name in ["b", "a"] {
        run(&host, name, &[], &["sleep", "100000"]);
    }
    let number = figure(&accounts(&host), "@a", "Number");
    let mut a = ask(&host, "a", ["db", "80"], 600);
    await_counted(&host, "db", 50);
    let mut b = ask(&host, "b", ["db", "80"], 600);
    await_counted(&host, "db", 150);
    let root = figure(&accounts(&host), "root", "CpuTakenNs");
    host.dm(&["rm", "--force", "a"]).ok();
    run(&host, "c", &[], &["sleep", "100000"]);
    a.wait().expect("a child");
    assert!(b.wait().expect("a child").success());
    await_counted(&host, "db", 1200);
    let charged = || figure(&accounts(&host), "root", "CpuTakenNs") - root;
    assert!(wait_until(soon(), || is_near(charged(), 600)), "{:?}", accounts(&host));
    let all = accounts(&host);
    assert_eq!(figure(&all, "@c", "Number"), number, "the number is given again");
    assert_eq!(figure(&all, "@c", "CpuTakenNs"), 0, "{all:?}");
    assert_taken(&all, "@b", 600);
}
