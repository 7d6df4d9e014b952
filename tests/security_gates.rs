//! Gates at the hooks of security modules: a path, a message or a call of fork(2) decides for whom a task works, or
//! that its call fails. Kernels that permit no such programs say so, and load the other gates alone.

use dormouse_testkit::{Host, slowness};
use serde_json::Value;

use crate::gates::{accounts, clients, figure, load, stolen_ns};

/// The gates that are only there where a kernel permits programs of security modules.
const GATES: [&str; 3] = ["create", "open", "message"];

/// A row of `gate ls` for each gate.
#[track_caller]
fn gates(host: &Host) -> Vec<Value> {
    let text = host.dm(&["gate", "ls", "--format", "json"]).ok();
    serde_json::from_str(&text).expect("JSON")
}

/// The reason for which the kernel does not take the gates; `None` if it does.
#[track_caller]
fn lack(host: &Host) -> Option<String> {
    let all = gates(host);
    let of = |name: &str| all.iter().find(|row| row["Name"] == name).expect("a gate");
    let lacks = GATES.map(|name| of(name)["Lack"].as_str().expect("a text").to_owned());
    assert!(lacks.iter().all(|lack| *lack == lacks[0]), "one set of gates: {all:?}");
    Some(lacks[0].clone()).filter(|lack| !lack.is_empty())
}

/// A host with accounts smith and jones and container web, where the kernel permits these gates.
#[track_caller]
fn host_with_gates() -> Option<Host> {
    let host = Host::with_busybox();
    if let Some(why) = lack(&host) {
        eprintln!("NOT RUN: {why}");
        return None;
    }
    for account in ["smith", "jones"] {
        host.dm(&["account", "create", account]).ok();
    }
    clients(&host, &["web"]);
    inside(
        &host,
        "web",
        "mkdir -p /srv/smith /srv/smiths /srv/jones; touch /srv/smith/x /srv/smiths/x /srv/jones/x",
    );
    Some(host)
}

#[track_caller]
fn inside(host: &Host, container: &str, script: &str) -> String {
    host.dm(&["exec", container, "sh", "-c", script]).ok()
}

#[track_caller]
fn apply(host: &Host, rules: &str) {
    let applied = host.dm_with_input(rules.as_bytes(), &["rules", "apply", "-"]);
    assert_eq!(applied.stderr, "", "no rule is inert or covered");
    applied.ok();
}

fn rule(text: &str) -> String {
    format!("[[rule]]\n{text}\n")
}

/// The counter of a gate.
#[track_caller]
fn count(host: &Host, gate: &str, name: &str) -> u64 {
    let text = host.dm(&["gate", "stats", "--format", "json"]).ok();
    let all: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let row = all.iter().find(|row| row["Gate"] == gate).expect("the gate is loaded");
    row[name].as_u64().expect("a number")
}

#[track_caller]
fn taken(host: &Host, account: &str) -> u64 {
    figure(&accounts(host), account, "CpuTakenNs")
}

/// Asserts that an account has so much work, and what processes need to begin and to end, in an emulated machine.
#[track_caller]
fn assert_worked(host: &Host, account: &str, ms: u64) {
    let (taken, stolen) = (taken(host, account), stolen_ns());
    let most = 2 * ms + 20 * u64::from(slowness());
    assert!(taken + stolen >= ms * 1_000_000, "{account}: {taken} ns, not {ms} ms");
    assert!(taken <= most * 1_000_000 + stolen, "{account}: {taken} ns, more than {most} ms");
}

const SMITH: &str = "gate = \"open\"\nhome = \"@web\"\npath = \"/srv/smith\"\naccount = \"smith\"";
const MESSAGE: &str = "gate = \"message\"\nhome = \"@web\"\naccount = \"peer\"";

#[test]
fn kernel_without_the_programs_says_so_and_loads_the_other_gates() {
    let host = Host::with_busybox();
    let Some(why) = lack(&host) else {
        eprintln!("NOT RUN: this kernel takes all gates");
        return;
    };
    let table = host.dm(&["gate", "ls"]).ok();
    assert!(table.lines().next().is_some_and(|line| line.contains("LACK")), "{table}");
    assert!(table.contains(&why), "{table}");
    host.dm(&["gate", "load", "receive"]).ok();
    for gate in GATES {
        let line = host.dm(&["gate", "load", "send", gate]).err(125);
        assert!(line.contains(&format!("does not take the gate '{gate}'")), "{line}");
        assert_eq!(host.dm(&["gate", "ls", "--quiet"]).ok(), "receive", "earlier gates stay");
    }
    assert_eq!(host.dm(&["gate", "load"]).ok(), "receive\nsend\nfork\nexec");
    // Rules for gates that are not loaded are accepted, and have no effect.
    clients(&host, &["web"]);
    apply(&host, &rule("gate = \"create\"\nhome = \"@web\"\nerrno = \"EAGAIN\""));
    inside(&host, "web", "true & wait");
}

#[test]
fn vm_task_that_opens_a_file_below_a_path_works_for_its_account() {
    let Some(host) = host_with_gates() else { return };
    apply(&host, &rule(SMITH));
    host.dm(&["gate", "load", "open"]).ok();
    assert_eq!(host.dm(&["gate", "ls", "--quiet"]).ok(), "open");
    let burn = |container: &str, script: &str| {
        assert_eq!(inside(&host, container, script), "done", "{script}");
        taken(&host, "smith")
    };
    burn("web", "exec probe burn-file /srv/smith/x 100000");
    // By a relative path, a link and a directory, and by a process that inherits the label.
    burn("web", "cd /srv; exec probe burn-file smiths/../smith 100000");
    burn("web", "ln -s /srv/smith/x /link; exec probe burn-file /link 100000");
    let before = burn("web", "read line </srv/smith/x; probe burn-file /etc/passwd 100000");
    assert_worked(&host, "smith", 400);
    assert!(count(&host, "open", "Changed") >= 4);
    // Another directory whose name begins with that of smith.
    for other in ["/srv/smiths/x", "/srv/jones/x"] {
        let after = burn("web", &format!("exec probe burn-file {other} 100000"));
        assert!(after <= before + stolen_ns(), "{other}: {before}, then {after} ns");
    }
}

/// Names of files are chosen by containers: they count in the container that the rule names, and there alone.
#[test]
fn vm_container_charges_no_account_by_names_of_its_files() {
    let Some(host) = host_with_gates() else { return };
    host.dm(&[
        "run",
        "-d",
        "--name",
        "evil",
        "--cap-add",
        "SYS_ADMIN",
        "busybox",
        "sleep",
        "100000",
    ])
    .ok();
    let refused = host.dm_with_input(
        rule(&SMITH.replace("home = \"@web\"\n", "")).as_bytes(),
        &["rules", "check", "-"],
    );
    assert!(refused.err(125).contains("a container chooses the paths of its files"));
    apply(&host, &(rule(SMITH) + &rule(MESSAGE)));
    host.dm(&["gate", "load", "open", "message"]).ok();
    inside(
        &host,
        "evil",
        "mkdir -p /srv/smith; touch /srv/smith/x; mkdir -p /root/srv/smith; touch /root/srv/smith/x",
    );
    for script in [
        "exec probe burn-file /srv/smith/x 50000",
        "unshare -m sh -c 'mount -t tmpfs none /srv; mkdir /srv/smith; exec probe burn-file /srv/smith 50000'",
        "exec probe burn-message /srv/smith/x 50000 queued",
    ] {
        assert_eq!(inside(&host, "evil", script), "done", "{script}");
    }
    assert_eq!(taken(&host, "smith"), 0);
    // Neither does a container that the rule names by a path with more bytes than are compared, nor by one outside of
    // the directory.
    let long = "mkdir -p /srv/jones/$(printf '%0250d' 1)/srv/smith; cd /srv/jones/0*/srv/smith; touch x; \
                exec probe burn-file x 50000";
    assert_eq!(inside(&host, "web", long), "done");
    assert_eq!(taken(&host, "smith"), 0);
}

#[test]
fn vm_refused_calls_fail_with_the_errno_of_the_rule() {
    let Some(host) = host_with_gates() else { return };
    clients(&host, &["other"]);
    let refuse = |errno: &str| {
        rule(SMITH)
            + &rule(&format!(
                "gate = \"create\"\nhome = \"@web\"\nlabel = \"smith\"\nerrno = \"{errno}\""
            ))
            + &rule("gate = \"open\"\npath = \"/srv/jones\"\nerrno = \"EROFS\"")
    };
    apply(&host, &refuse("EDQUOT"));
    load(&host);
    let fork = |container: &str, path: &str| {
        inside(&host, container, &format!("exec probe fork-file {path}"))
    };
    assert_eq!(fork("web", "-"), "forked", "it works for its home");
    assert_eq!(fork("web", "/srv/smith/x"), "122");
    assert_eq!(fork("other", "-"), "forked");
    assert_eq!(inside(&host, "web", "exec probe burn-file /srv/jones/x 1"), "30");
    assert_eq!(count(&host, "create", "Refused"), 1);
    assert!(count(&host, "open", "Refused") >= 1);
    apply(&host, &refuse("ENOMEM"));
    assert_eq!(fork("web", "/srv/smith/x"), "12");
    let explained = host
        .dm(&["rules", "explain", "--gate", "create", "--home", "@web", "--label", "smith"])
        .ok();
    assert_eq!(explained, "line 6 decides: the call fails with ENOMEM");
    host.dm(&["gate", "unload"]).ok();
    assert_eq!(fork("web", "/srv/smith/x"), "forked");
}

#[test]
fn vm_receiver_of_a_message_works_for_the_account_of_its_sender() {
    let Some(host) = host_with_gates() else { return };
    apply(&host, &(rule(SMITH) + &rule(MESSAGE)));
    host.dm(&["gate", "load", "open", "message"]).ok();
    let burn = |path: &str, how: &str| {
        let script = format!("exec probe burn-message {path} 100000 {how}");
        assert_eq!(inside(&host, "web", &script), "done", "{script}");
    };
    burn("/srv/smith/x", "queued");
    assert_worked(&host, "smith", 100);
    burn("/srv/smith/x", "waiting");
    assert_worked(&host, "smith", 200);
    assert!(count(&host, "message", "Passages") >= 2);
    let before = taken(&host, "smith");
    burn("/srv/jones/x", "queued");
    burn("/srv/jones/x", "waiting");
    let after = taken(&host, "smith");
    assert!(after <= before + stolen_ns(), "{before}, then {after} ns");
}
