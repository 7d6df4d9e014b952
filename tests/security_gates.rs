//! Gates that need trampolines: a path, a message, a pipe, a semaphore, a segment or a call of fork(2) decides for
//! which account a task works, or that its call fails. Kernels that permit no such programs say so, and load the other
//! gates alone.

use std::process::Stdio;

use dormouse_bpf::call::{Map, Program};
use dormouse_testkit::{Host, slowness, soon, wait_until};
use serde_json::Value;

use crate::gates::{accounts, clients, figure, load, stolen_ns};

/// The gates that are only there where a kernel permits programs of security modules and of its functions, by sets.
const SETS: [&[&str]; 3] = [&["create", "open", "message", "shm"], &["pipe"], &["semaphore"]];

/// A row of `gate ls` for each gate.
#[track_caller]
fn gates(host: &Host) -> Vec<Value> {
    let text = host.dm(&["gate", "ls", "--format", "json"]).ok();
    serde_json::from_str(&text).expect("JSON")
}

/// The reason for which the kernel does not take a set of gates; `None` if it does. `all` has all gates.
#[track_caller]
fn lack(all: &[Value], set: &[&str]) -> Option<String> {
    let of = |name: &str| all.iter().find(|row| row["Name"] == name).expect("a gate");
    let lacks: Vec<&str> =
        set.iter().map(|name| of(name)["Lack"].as_str().expect("a text")).collect();
    assert!(lacks.iter().all(|lack| *lack == lacks[0]), "one set of gates: {all:?}");
    Some(lacks[0].to_owned()).filter(|lack| !lack.is_empty())
}

/// A host with accounts smith and jones and container web, where the kernel permits these gates.
#[track_caller]
fn host_with_gates() -> Option<Host> {
    host_with(SETS[0])
}

/// The same, where the kernel permits this set as well.
#[track_caller]
fn host_with(set: &[&str]) -> Option<Host> {
    let host = Host::with_busybox();
    let all = gates(&host);
    if let Some(why) = lack(&all, SETS[0]).or_else(|| lack(&all, set)) {
        eprintln!("NOT RUN: {why}");
        return None;
    }
    for account in ["smith", "jones"] {
        host.dm(&["account", "create", account]).ok();
    }
    host.dm(&["volume", "create", "v"]).ok();
    for name in ["web", "evil"] {
        host.dm(&["run", "-d", "--name", name, "-v", "v:/v", "busybox", "sleep", "100000"]).ok();
        let files = "mkdir -p /srv/smith /srv/smiths /srv/jones; touch /srv/smith/x /srv/smiths/x /srv/jones/x";
        inside(&host, name, files);
    }
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
const JONES: &str = "gate = \"open\"\nhome = \"@web\"\npath = \"/srv/jones\"\naccount = \"jones\"";
const MESSAGE: &str = "gate = \"message\"\nhome = \"@web\"\naccount = \"peer\"";

/// A host with this gate. Tasks in web work for the other side.
#[track_caller]
fn host_with_peers(gate: &str, set: &[&str]) -> Option<Host> {
    let host = host_with(set)?;
    let peer = format!("gate = \"{gate}\"\nhome = \"@web\"\naccount = \"peer\"");
    apply(&host, &(rule(SMITH) + &rule(JONES) + &rule(&peer)));
    stolen_ns();
    host.dm(&["gate", "load", "open", gate]).ok();
    Some(host)
}

/// Processes of web hand work on: `probe hand`.
#[track_caller]
fn hand(host: &Host, kind: &str, steps: &str) {
    let script = format!("exec probe hand {kind} {steps}");
    assert_eq!(inside(host, "web", &script), "done", "{script}");
}

/// The same, and smith has no more work from it than that of the processes that open its file: a task that is not to
/// work for smith works for twice as long.
#[track_caller]
fn assert_not_charged(host: &Host, kind: &str, steps: &str) {
    let before = taken(host, "smith");
    hand(host, kind, steps);
    let after = taken(host, "smith");
    assert!(after <= before + 200_000_000 + stolen_ns(), "{steps}: {before}, then {after} ns");
}

#[test]
fn kernel_without_the_programs_says_so_and_loads_the_other_gates() {
    let host = Host::with_busybox();
    let all = gates(&host);
    let lacks: Vec<(&str, String)> = SETS
        .iter()
        .filter_map(|set| Some((*set, lack(&all, set)?)))
        .flat_map(|(set, why)| set.iter().map(move |gate| (*gate, why.clone())))
        .collect();
    if lacks.is_empty() {
        eprintln!("NOT RUN: this kernel takes all gates");
        return;
    }
    let table = host.dm(&["gate", "ls"]).ok();
    assert!(table.lines().next().is_some_and(|line| line.contains("LACK")), "{table}");
    host.dm(&["gate", "load", "receive"]).ok();
    for (gate, why) in &lacks {
        assert!(table.contains(why), "{table}");
        let line = host.dm(&["gate", "load", "send", gate]).err(125);
        assert!(line.contains(&format!("does not take the gate '{gate}'")), "{line}");
        assert_eq!(host.dm(&["gate", "ls", "--quiet"]).ok(), "receive", "earlier gates stay");
    }
    let names = all.iter().map(|row| row["Name"].as_str().expect("a name"));
    let taken: Vec<&str> =
        names.filter(|name| lacks.iter().all(|(gate, _)| gate != name)).collect();
    assert_eq!(host.dm(&["gate", "load"]).ok(), taken.join("\n"));
    if !lacks.iter().any(|(gate, _)| *gate == "create") {
        return;
    }
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
    host.dm(&["rm", "--force", "evil"]).ok();
    let evil =
        ["run", "-d", "--name", "evil", "--cap-add", "SYS_ADMIN", "busybox", "sleep", "100000"];
    host.dm(&evil).ok();
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

const S: &str = "/srv/smith/x";
const J: &str = "/srv/jones/x";

#[test]
fn vm_reader_of_a_pipe_works_for_the_account_of_the_writer_of_these_bytes() {
    let Some(host) = host_with_peers("pipe", SETS[1]) else { return };
    for (index, kind) in ["pipe", "/fifo"].into_iter().enumerate() {
        let turn = index as u64;
        hand(&host, kind, &format!("give:{S}:4 take:100000:4"));
        hand(&host, kind, &format!("later:100000:4 give:{S}:4"));
        assert_worked(&host, "smith", 400 * turn + 200);
        // Each byte has its writer, in the order in which they are read.
        hand(
            &host,
            kind,
            &format!("give:{S}:4 give:{J}:9 give:{S}:5000 take:100000:4 take:100000:9 take:1:5000"),
        );
        assert_worked(&host, "smith", 400 * turn + 300);
        assert_worked(&host, "jones", 100 * turn + 100);
        // More than the pipe holds.
        hand(&host, kind, &format!("blocked:{S}:200000 take:100000:200000"));
        assert_worked(&host, "smith", 400 * turn + 400);
    }
    assert!(count(&host, "pipe", "Changed") >= 8);
    assert_eq!(count(&host, "pipe", "Full"), 0);
    assert_not_charged(&host, "pipe", "give:-:4 take:400000:4");
    assert_not_charged(&host, "pipe", &format!("give:{S}:4 take:1:4 give:{J}:4 take:400000:4"));
}

#[test]
fn vm_reader_of_bytes_of_several_writers_works_for_none_of_them() {
    let Some(host) = host_with_peers("pipe", SETS[1]) else { return };
    // One read has the bytes of both.
    assert_not_charged(&host, "pipe", &format!("give:{S}:4 give:{J}:4 take:400000:8"));
    // Both write at the same time, to a full pipe.
    assert_not_charged(&host, "pipe", &format!("blocked:-:70000 blocked:{S}:10 take:400000:70010"));
    // More writers than notes of a pipe: the last ones are known.
    let many = format!("give:{S}:1 give:{J}:1 ").repeat(20);
    let sum = || taken(&host, "smith") + taken(&host, "jones");
    let before = sum();
    hand(&host, "pipe", &format!("{many} take:4000000:1"));
    let after = sum();
    assert!(after <= before + 2_000_000_000 + stolen_ns(), "{before}, then {after} ns");
    let before = taken(&host, "jones");
    hand(&host, "pipe", &format!("{many} take:1:39 take:4000000:1"));
    let after = taken(&host, "jones");
    assert!(after + stolen_ns() >= before + 4_000_000_000, "{before}, then {after} ns");
}

/// Bytes that come and go otherwise do not move the accounts of others.
#[test]
fn vm_tricks_with_pipes_charge_no_other_account() {
    let Some(host) = host_with_peers("pipe", SETS[1]) else { return };
    for kind in ["pipe", "/fifo"] {
        for steps in [
            // Pages that no write has brought, before and behind those of smith.
            format!("splice:-:100 give:{S}:100 take:400000:100"),
            format!("give:{S}:100 splice:-:100 take:1:100 take:400000:100"),
            format!("give:{S}:100 take:1:100 splice:-:100 give:{S}:4 take:400000:100"),
            // The end of a packet is dropped when it is read.
            format!("packet:-:4000 take:1:10 give:{S}:100 give:-:100 take:1:100 take:400000:100"),
            format!("packet:{S}:4000 take:1:10 give:-:100 give:-:100 take:1:100 take:400000:100"),
            // The buffers get other numbers.
            format!(
                "give:-:9 take:1:9 give:-:9 take:1:9 give:{S}:9 size:-:1048576 give:-:9 take:1:9 take:400000:9"
            ),
            format!("give:{S}:9 take:1:9 give:{S}:9 take:1:9 size:-:4096 give:-:9 take:400000:9"),
        ] {
            assert_not_charged(&host, kind, &steps);
        }
    }
}

/// A FIFO in a volume of two containers: the other one pays for its own bytes, whatever its files are called.
#[test]
fn vm_container_that_shares_a_fifo_is_charged_and_charges_no_other() {
    let Some(host) = host_with_peers("pipe", SETS[1]) else { return };
    let serve = |fifo: &str, gives: &str| {
        let mut command = host.dormouse(&["exec", "web", "probe", "hand", fifo, "take:100000:4"]);
        let mut reader = command.stdout(Stdio::null()).spawn().expect("started");
        let opened = format!("ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c {fifo}");
        let is_opened = || host.dm(&["exec", "web", "sh", "-c", &opened]).stdout.trim() == "6";
        assert!(wait_until(soon(), is_opened), "no process has the FIFO open");
        inside(&host, "evil", &format!("exec probe hand {fifo} {gives}"));
        assert!(reader.wait().expect("waited").success());
        assert_eq!(taken(&host, "smith"), 0);
        assert_worked(&host, "@evil", 100);
    };
    serve("/v/one", &format!("give:{S}:4"));
    serve("/v/two", "splice:-:4");
}

#[test]
fn vm_task_that_takes_from_a_semaphore_works_for_the_account_of_the_task_that_gave() {
    let Some(host) = host_with_peers("semaphore", SETS[2]) else { return };
    hand(&host, "semaphore", &format!("give:{S}:1 take:100000:1"));
    assert_worked(&host, "smith", 100);
    hand(&host, "semaphore", &format!("later:100000:1 give:{S}:1"));
    assert_worked(&host, "smith", 200);
    hand(
        &host,
        "semaphore",
        &format!("value:-:0 give:{S}:2 take:1:1 take:1:1 give:{J}:1 take:100000:1"),
    );
    assert_worked(&host, "jones", 100);
    hand(&host, "semaphore", &format!("value:-:3 take:1:3 give:{S}:1 take:100000:1"));
    assert_worked(&host, "smith", 300);
    assert!(count(&host, "semaphore", "Passages") >= 7);
    for steps in [
        "give:-:1 take:400000:1".to_owned(),
        // Units of two accounts, in both orders.
        format!("give:{S}:1 give:-:1 take:400000:1 take:1:1"),
        format!("give:-:1 give:{S}:1 take:400000:1 take:1:1"),
        format!("give:{S}:2 take:1:1 give:-:1 take:400000:1"),
        // Units that no call of semop(2) has given.
        format!("give:{S}:1 value:-:2 take:400000:1"),
        format!("value:-:1 give:{S}:1 take:400000:1"),
        format!("give:{S}:1 take:1:1 value:-:1 take:400000:1"),
        // More operations than are looked at, and several for one semaphore.
        format!("many:{S}:100 take:400000:1"),
        format!("many:{S}:2 take:400000:1"),
    ] {
        assert_not_charged(&host, "semaphore", &steps);
    }
    assert_eq!(count(&host, "semaphore", "Full"), 0);
}

#[test]
fn vm_task_that_attaches_a_segment_works_for_the_account_of_its_maker() {
    let Some(host) = host_with_peers("shm", SETS[0]) else { return };
    hand(&host, "segment", &format!("give:{S}:4096 take:100000:1"));
    assert_worked(&host, "smith", 100);
    hand(&host, "segment", &format!("give:{J}:4096 take:100000:1"));
    assert_worked(&host, "jones", 100);
    assert_not_charged(&host, "segment", "give:-:4096 take:400000:1");
    assert_eq!(count(&host, "shm", "Full"), 0);
}

/// A map that a gate fills.
#[track_caller]
fn notes(host: &Host, gate: &str, map: &str) -> Map {
    let all = gates(host);
    let row = all.iter().find(|row| row["Name"] == gate).expect("a gate");
    let program = Program::by_id(row["ProgramId"].as_u64().expect("an id") as u32).expect("loaded");
    let mut maps = program.maps.iter().map(|id| Map::by_id(*id).expect("a map"));
    maps.find(|one| one.name == map).expect("the map of the gate")
}

#[test]
fn vm_notes_of_gates_end_with_pipes_sets_and_segments() {
    for (gate, set, map, kind, stays) in [
        ("pipe", SETS[1], "dm_gate_pipes", "pipe", "blocked:-:200000"),
        ("semaphore", SETS[2], "dm_gate_sets", "semaphore", "later:1:200"),
        ("shm", SETS[0], "dm_gate_shms", "segment", "later:600000000:1"),
    ] {
        let Some(host) = host_with_peers(gate, set) else { continue };
        let notes = notes(&host, gate, map);
        let left = || notes.entries().expect("read").len();
        for _ in 0..3 {
            hand(&host, kind, "give:-:4");
        }
        assert!(wait_until(soon(), || left() == 0), "{gate}: {} notes are left", left());
        let words = ["exec", "web", "probe", "hand", kind, "give:-:4", stays];
        let mut process = host.dormouse(&words).stdout(Stdio::null()).spawn().expect("started");
        assert!(wait_until(soon(), || left() == 1), "{gate}: {} notes", left());
        host.dm(&["kill", "web"]).ok();
        process.wait().expect("waited");
        assert!(wait_until(soon(), || left() == 0), "{gate}: {} notes are left", left());
    }
}
