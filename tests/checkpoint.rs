//! Checkpoint and restore: the processes of a container become files and are restored without
//! noticing.
//!
//! A workload (`tests/workloads/*.c`) sets up a kernel object, prints `ready N`, is checkpointed
//! and restored, is released for the next round, checks the object, and ends with `ok`. Each kind
//! of object has one workload. The table of kinds in `tests/workloads/kinds.txt` names the
//! workload, and `docs/state.md` is made from both.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dormouse_parcel::{DirSink, Reader, Sink};
use dormouse_record::{Records, Thing, Time};
use dormouse_testkit::{Host, Terminal, image, slowness, soon, wait_until, waiting};

#[path = "fixpoint.rs"]
mod fixpoint;
#[path = "increment.rs"]
mod increment;
#[path = "lazy.rs"]
mod lazy;
#[path = "proof.rs"]
mod proof;
#[path = "relay.rs"]
mod relay;
#[path = "seal.rs"]
mod seal;
#[path = "share.rs"]
mod share;
#[path = "state.rs"]
mod state;
#[path = "widen.rs"]
mod widen;

/// A boot id that no boot has.
const OTHER_BOOT: &str = "0b00b1e5-0000-4000-8000-000000000000";

/// Rounds of each workload: one only under emulation.
fn rounds() -> usize {
    if slowness() == 1 { 3 } else { 1 }
}

/// A host with an image that holds all workloads.
fn host() -> Host {
    let host = Host::new();
    host.import(&image::workloads(), "workloads");
    host
}

/// Waits until the container has printed a line.
#[track_caller]
fn wait_for_line(host: &Host, name: &str, line: &str) {
    let mut log = String::new();
    let found = wait_until(soon(), || {
        log = host.dm(&["logs", name]).stdout;
        log.lines().any(|l| l == line || l.starts_with("failed"))
    });
    let is_there = found && log.lines().any(|l| l == line);
    assert!(is_there, "no '{line}' in its log:\n{log}{}", waits(host, name));
}

/// What the processes of a container wait for.
fn waits(host: &Host, name: &str) -> String {
    match host.inspect(name)["pid"].as_u64() {
        Some(pid) => waiting::describe(pid as u32),
        None => format!("it is {}\n", host.state_of(name)),
    }
}

/// Starts a workload.
#[track_caller]
fn start(host: &Host, name: &str, more: &[&str]) {
    let program = format!("/bin/{name}");
    let rounds = format!("ROUNDS={}", rounds());
    let mut words = vec!["run", "-d", "--name", name, "--env", &rounds];
    words.extend(more);
    words.extend(["workloads", program.as_str()]);
    host.dm(&words).ok();
}

/// Releases a workload for its next round.
#[track_caller]
fn go_on(host: &Host, name: &str, round: usize) {
    let out = host.dm(&["exec", name, "touch", &format!("/go-{round}")]);
    // After the last round the workload may end, and its container with it, before the command that
    // released the workload has ended.
    let is_over = round + 1 == rounds() && out.status == 137;
    assert!(out.status == 0 || is_over, "{out}");
}

/// Runs a workload with a checkpoint and a restore in every round.
#[track_caller]
fn round_trip(host: &Host, name: &str, more: &[&str]) {
    start(host, name, more);
    for round in 0..rounds() {
        wait_for_line(host, name, &format!("ready {round}"));
        let out = host.dm(&["checkpoint", name]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        assert_eq!(host.state_of(name), "stopped");
        let out = host.dm(&["restore", name]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        assert_eq!(host.state_of(name), "running");
        go_on(host, name, round);
    }
    wait_for_line(host, name, "ok");
    assert_eq!(host.dm(&["wait", name]).ok(), "0");
    host.dm(&["rm", "--force", name]).ok();
}

/// Runs a workload that is checkpointed and runs on.
#[track_caller]
fn run_on(host: &Host, name: &str, more: &[&str]) {
    start(host, name, more);
    for round in 0..rounds() {
        wait_for_line(host, name, &format!("ready {round}"));
        let out = host.dm(&["checkpoint", "--leave-running", name]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        assert_eq!(host.state_of(name), "running");
        go_on(host, name, round);
    }
    wait_for_line(host, name, "ok");
    host.dm(&["rm", "--force", name]).ok();
}

#[test]
fn vm_listeners() {
    // In address mode, and with a private stack.
    let host = host();
    round_trip(&host, "listener", &[]);
    round_trip(&host, "listener", &["--net", "none"]);
}

#[test]
fn vm_sockets_of_a_shared_stack() {
    // In address mode, where loopback is private to the container by translation.
    let host = host();
    round_trip(&host, "udp", &[]);
    round_trip(&host, "tcp", &[]);
    run_on(&host, "tcp", &[]);
    round_trip(&host, "making", &[]);
    round_trip(&host, "ending", &[]);
    round_trip(&host, "backlog", &[]);
    run_on(&host, "backlog", &[]);
}

#[test]
fn vm_large_memory_written_during_copy() {
    let host = host();
    round_trip(&host, "ahead", &[]);
    // A checkpoint of a container that continues is of one moment, however much is written in the
    // next.
    start(&host, "ahead", &[]);
    for round in 0..rounds() {
        wait_for_line(&host, "ahead", &format!("ready {round}"));
        let report = host.dm(&["checkpoint", "--json", "--leave-running", "ahead"]).ok();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        let us = |name: &str| report[name].as_u64().unwrap_or_default();
        assert!(us("ahead_us") > 0, "nothing was copied ahead: {report}");
        assert!(us("pause_us") >= us("ahead_us") + us("stop_us") + us("read_us"), "{report}");
        host.dm(&["kill", "ahead"]).ok();
        host.dm(&["wait", "ahead"]).ok();
        host.dm(&["restore", "ahead"]).ok();
        go_on(&host, "ahead", round);
    }
    wait_for_line(&host, "ahead", "ok");
    host.dm(&["rm", "--force", "ahead"]).ok();
}

/// A client outside the container checks every byte of the answers and notices nothing else.
#[test]
fn vm_outside_client_sees_no_checkpoint() {
    let host = host();
    start(&host, "tcp", &[]);
    wait_for_line(&host, "tcp", "ready 0");
    let address = host.address_of("tcp");
    let caller = host.in_network(move || TcpStream::connect((address, 7001)));
    let mut caller = caller.join().expect("no panic").expect("the server listens");
    caller.set_read_timeout(Some(Duration::from_secs(20) * slowness())).expect("a socket");
    let mut sent = 0u8;
    let mut exchange = |between: &mut dyn FnMut()| {
        sent = sent.wrapping_add(7);
        caller.write_all(&[sent]).expect("the connection is open");
        between();
        let mut answer = [0];
        caller.read_exact(&mut answer).expect("an answer");
        assert_eq!(answer[0], sent.wrapping_add(1));
    };
    for round in 0..rounds() {
        wait_for_line(&host, "tcp", &format!("ready {round}"));
        (0..100).for_each(|_| exchange(&mut || {}));
        host.dm(&["checkpoint", "--leave-running", "tcp"]).ok();
        (0..100).for_each(|_| exchange(&mut || {}));
        host.dm(&["checkpoint", "tcp"]).ok();
        // Bytes that are sent now are dropped, again and again, until the server is restored.
        exchange(&mut || {
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(host.state_of("tcp"), "stopped");
            host.dm(&["restore", "tcp"]).ok();
        });
        (0..100).for_each(|_| exchange(&mut || {}));
        go_on(&host, "tcp", round);
    }
    wait_for_line(&host, "tcp", "ok");
}

/// Connections are in repair mode, and their packets dropped, when the command is killed. Nightly only: beside
/// busy processes a packet that is sent too early comes again after seconds.
#[test]
fn big_outside_client_sees_no_killed_checkpoint() {
    let host = host();
    let mut caller = answered_caller(&host);
    caller.set_read_timeout(Some(Duration::from_secs(20) * slowness())).expect("a socket");
    let verbs: [&[&str]; 2] = [&["checkpoint", "--leave-running", "tcp"], &["checkpoint", "tcp"]];
    for verb in verbs {
        killed_in_turn(&host, verb, |kill| {
            let (sent, mut answer) = (kill as u8, [0]);
            caller.write_all(&[sent]).expect("the connection is open");
            let answered = caller.read_exact(&mut answer);
            assert!(answered.is_ok(), "{verb:?}, kill {kill}: {answered:?}");
            assert_eq!(answer, [sent.wrapping_add(1)]);
        });
    }
}

/// Kills a checkpoint at one moment after the other, and restores what it has stopped.
fn killed_in_turn(host: &Host, verb: &[&str], mut then: impl FnMut(u32)) {
    const KILLS: u32 = 24;
    let restore = || {
        if host.state_of(verb[verb.len() - 1]) == "stopped" {
            host.dm(&["restore", verb[verb.len() - 1]]).ok();
        }
    };
    let began = std::time::Instant::now();
    host.dm(verb).ok();
    let longest = began.elapsed();
    for kill in 0..KILLS {
        restore();
        let mut command = host.dormouse(verb);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the command starts");
        std::thread::sleep(longest * kill / KILLS);
        child.kill().expect("a child");
        child.wait().expect("a child");
        // A packet that is sent before everything is put back is sent again, after a while.
        std::thread::sleep(Duration::from_millis(30));
        restore();
        then(kill);
    }
}

/// Returns a client outside the container that has had one answer and has a short read timeout.
fn answered_caller(host: &Host) -> TcpStream {
    start(host, "tcp", &[]);
    wait_for_line(host, "tcp", "ready 0");
    let address = host.address_of("tcp");
    let caller = host.in_network(move || TcpStream::connect((address, 7001)));
    let mut caller = caller.join().expect("no panic").expect("the server listens");
    let patience = Duration::from_millis(700) * slowness().min(4);
    caller.set_read_timeout(Some(patience)).expect("a socket");
    caller.write_all(&[1]).expect("the connection is open");
    caller.read_exact(&mut [0]).expect("an answer");
    caller
}

/// Sends a byte to a server that is checkpointed: no answer comes until the server is restored.
#[track_caller]
fn is_answered_after_restore(host: &Host, caller: &mut TcpStream) {
    let mut answer = [0];
    caller.write_all(&[5]).expect("the connection is open");
    let silence = caller.read(&mut answer).expect_err("no answer while checkpointed");
    assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock, "{silence}");
    host.dm(&["restore", "tcp"]).ok();
    caller.set_read_timeout(Some(Duration::from_secs(20) * slowness())).expect("a socket");
    caller.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, [6]);
}

/// Returns a function that runs nft(8) in a stack that stays. In that stack packets to the workload
/// have the mark of the engine's own packets, and so pass its drop rules.
fn stack_with_late_packets(host: &Host) -> impl Fn(&str) {
    host.dm(&["run", "-d", "--name", "x", "workloads", "sleep", "1000"]).ok();
    let pid = host.inspect("x")["pid"].as_u64().expect("the container runs");
    let nft = move |rules: &str| drop(host.sh(&format!("nsenter -t {pid} -n nft '{rules}'")).ok());
    nft("table inet late { chain in { type filter hook prerouting priority -400; \
         tcp dport 7001 meta mark set 0x646d; }; }");
    nft
}

/// A packet that passed before the drop rules were installed arrives after the processes have
/// exited.
#[test]
fn vm_in_flight_packet_gets_no_reset_during_checkpoint() {
    let host = host();
    let mut caller = answered_caller(&host);
    let _nft = stack_with_late_packets(&host);
    host.dm(&["checkpoint", "tcp"]).ok();
    is_answered_after_restore(&host, &mut caller);
}

/// Data that arrives after the connection was read, and that the kernel would acknowledge, is sent
/// again.
#[test]
fn vm_data_that_arrives_during_checkpoint_is_not_lost() {
    let host = host();
    let mut caller = answered_caller(&host);
    let nft = stack_with_late_packets(&host);
    caller.set_nodelay(true).expect("a socket");
    let is_saved = Arc::new(AtomicBool::new(false));
    let sender = {
        let (is_saved, mut caller) = (Arc::clone(&is_saved), caller.try_clone().expect("a copy"));
        std::thread::spawn(move || {
            let mut sent = 0;
            while !is_saved.load(Ordering::Relaxed) && sent < 30_000 {
                caller.write_all(&[sent as u8]).expect("the connection is open");
                sent += 1;
                std::thread::sleep(Duration::from_micros(20) * slowness());
            }
            sent
        })
    };
    std::thread::sleep(Duration::from_millis(50));
    host.dm(&["checkpoint", "tcp"]).ok();
    is_saved.store(true, Ordering::Relaxed);
    nft("delete table inet late");
    host.dm(&["restore", "tcp"]).ok();
    // A sender that is blocked on a full send buffer waits until now.
    let sent: usize = sender.join().expect("no panic");
    caller.set_read_timeout(Some(Duration::from_secs(20) * slowness())).expect("a socket");
    let mut answers = vec![0; sent];
    caller.read_exact(&mut answers).expect("an answer to each byte");
    for (n, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer, (n as u8).wrapping_add(1), "byte {n} of {sent}");
    }
}

/// The stack with the drop rules ends with the last container of its domain, and another container
/// has the stack created anew.
#[test]
fn vm_new_stack_sends_no_reset_to_client_of_checkpointed_server() {
    let host = host();
    let mut caller = answered_caller(&host);
    let domains = host.root().join("run/domains");
    let are_gone =
        || fs::read_dir(&domains).is_ok_and(|all| all.flatten().all(|e| !e.path().is_dir()));
    assert!(!are_gone());
    host.dm(&["checkpoint", "tcp"]).ok();
    assert!(wait_until(soon(), are_gone));
    host.dm(&["run", "-d", "workloads", "sleep", "1000"]).ok();
    is_answered_after_restore(&host, &mut caller);
}

/// A client outside of the server at port 80.
fn patient_caller(host: &Host, address: &str) -> TcpStream {
    try_to_call(host, address).expect("the server listens")
}

fn try_to_call(host: &Host, address: &str) -> std::io::Result<TcpStream> {
    let address = address.to_owned();
    let caller = host.in_network(move || TcpStream::connect((address, 80)));
    let caller = caller.join().expect("no panic")?;
    caller.set_read_timeout(Some(Duration::from_secs(20) * slowness())).expect("a socket");
    Ok(caller)
}

/// Calls a server that has just been started, and may not listen yet.
fn first_caller(host: &Host, address: &str) -> TcpStream {
    let mut caller = None;
    let is_there = wait_until(soon(), || {
        caller = try_to_call(host, address).ok();
        caller.is_some()
    });
    assert!(is_there, "nothing listens at {address}");
    caller.expect("connected")
}

fn answer_to(mut caller: TcpStream) -> String {
    let mut text = String::new();
    caller.read_to_string(&mut text).expect("an answer");
    text.trim().to_owned()
}

/// A client outside the container has connected, and the connection waits in the accept queue. The
/// server is stopped, continued, restored, and suspended to disk.
#[test]
fn vm_unaccepted_connection_is_answered_after_restore() {
    let host = host();
    let serve = "probe count 0.0.0.0 80 & echo $! >/pid; wait";
    host.dm(&["run", "-d", "--name", "x", "workloads", "sh", "-c", serve]).ok();
    host.wait_inside("x", "test -s /pid");
    let address = host.address_of("x");
    let connect = || patient_caller(&host, &address);
    let kill = |signal: &str| {
        host.dm(&["exec", "x", "sh", "-c", &format!("kill -{signal} $(cat /pid)")]).ok()
    };
    assert_eq!(answer_to(first_caller(&host, &address)), "call 1");
    for round in 0..rounds() {
        kill("STOP");
        let callers = [connect(), connect()];
        host.dm(&["checkpoint", "--leave-running", "x"]).ok();
        host.dm(&["checkpoint", "x"]).ok();
        let late = round % 2 == 1;
        if late {
            std::thread::sleep(Duration::from_millis(500));
        }
        host.dm(&["restore", "x"]).ok();
        // An asleep container is woken by the pending connections.
        host.dm(&["sleep", "x"]).ok();
        let wakes = || host.state_of("x") == "running";
        assert!(wait_until(soon(), wakes));
        kill("CONT");
        for (n, caller) in callers.into_iter().enumerate() {
            assert_eq!(answer_to(caller), format!("call {}", 2 + round * 2 + n));
        }
    }
}

/// Connections are out of the queue of their listener when the command is killed. Nightly only: one that is taken out
/// at that very moment is lost.
#[test]
fn big_unaccepted_connections_outlive_killed_checkpoints() {
    let host = host();
    let serve = "probe count 0.0.0.0 80 & echo $! >/pid; wait";
    host.dm(&["run", "-d", "--name", "x", "workloads", "sh", "-c", serve]).ok();
    host.wait_inside("x", "test -s /pid");
    let address = host.address_of("x");
    host.dm(&["exec", "x", "sh", "-c", "kill -STOP $(cat /pid)"]).ok();
    let callers = [(), ()].map(|()| patient_caller(&host, &address));
    killed_in_turn(&host, &["checkpoint", "--leave-running", "x"], |_| {});
    host.dm(&["exec", "x", "sh", "-c", "kill -CONT $(cat /pid)"]).ok();
    for (n, caller) in callers.into_iter().enumerate() {
        assert_eq!(answer_to(caller), format!("call {}", n + 1));
    }
}

/// A client does not wait for ever for a container that is never restored.
#[test]
fn vm_start_or_removal_resets_saved_connections() {
    for anew in [&["start", "tcp"][..], &["rm", "tcp"]] {
        let host = host();
        // The stack that answers instead ends with the last container of the domain.
        host.dm(&["run", "-d", "workloads", "sleep", "1000"]).ok();
        let mut caller = answered_caller(&host);
        let mut answer = [0];
        host.dm(&["checkpoint", "tcp"]).ok();
        caller.write_all(&[1]).expect("the connection is open");
        let silence = caller.read(&mut answer).expect_err("no answer while checkpointed");
        assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock);
        host.dm(anew).ok();
        let mut results = Vec::new();
        let reset = wait_until(soon(), || {
            results.push(caller.read(&mut answer).map_err(|e| e.kind()));
            results.last() == Some(&Err(std::io::ErrorKind::ConnectionReset))
        });
        assert!(reset, "after {anew:?}: {results:?}");
    }
}

/// Drop rules in the host's stack are removed once no checkpoint needs them.
#[test]
fn vm_drop_rules_leave_host_stack_after_start_or_removal() {
    let host = host();
    let tables = || host.sh("nft list tables").ok();
    for anew in [&["start", "tcp"][..], &["rm", "tcp"]] {
        start(&host, "tcp", &["--net", "host"]);
        wait_for_line(&host, "tcp", "ready 0");
        let caller = host.in_network(|| TcpStream::connect("127.0.0.1:7001"));
        let mut caller = caller.join().expect("no panic").expect("the server listens");
        caller.write_all(&[1]).expect("the connection is open");
        caller.read_exact(&mut [0]).expect("an answer");
        host.dm(&["checkpoint", "tcp"]).ok();
        assert!(tables().contains("dormouse_quiet"), "{}", tables());
        host.dm(anew).ok();
        assert!(!tables().contains("dormouse_quiet"), "{anew:?}: {}", tables());
        host.dm(&["rm", "--force", "tcp"]);
    }
}

macro_rules! workloads {
    ($($test:ident: $name:literal $(, $word:literal)*;)*) => {
        $(
            #[test]
            fn $test() {
                let host = host();
                round_trip(&host, $name, &["--net", "none", $($word),*]);
                if slowness() == 1 {
                    run_on(&host, $name, &["--net", "none", $($word),*]);
                }
            }
        )*
    };
}

#[path = "kept.rs"]
mod kept;

workloads! {
    vm_memory: "memory";
    vm_files: "file";
    vm_pipes: "pipe";
    vm_fifos: "fifo";
    vm_advice_about_memory: "advice";
    vm_pidfds: "pidfd";
    vm_files_of_processes: "procfile";
    vm_unix_sockets_without_their_directory: "gone";
    vm_inotify_watches: "inotify";
    vm_fanotify_marks: "fanotify", "--cap-add", "SYS_ADMIN";
    vm_filters_by_the_program: "filter";
    vm_memory_files: "memfd";
    vm_stopped_processes: "stopped";
    vm_subreapers: "reaper";
    vm_memory_shared_between_parent_and_children: "cow";
    vm_clocks: "clock";
    vm_vdso: "vdso";
    vm_events: "event";
    vm_signals: "signal";
    vm_process_trees: "tree";
    vm_threads: "thread";
    vm_waiting_calls: "restart";
    vm_pairs_of_unix_sockets: "socketpair";
    vm_open_files_in_transit: "rights";
    vm_unix_sockets: "unix";
    vm_unaccepted_unix_connections_with_data: "embryo";
    vm_peers_of_unix_sockets: "peer";
    vm_netlink_sockets: "netlink";
    vm_udp_sockets: "udp";
    vm_system_v_objects: "system_v";
    vm_posix_message_queues: "mqueue";
    vm_files_in_memory: "tmpfs", "--tmpfs", "/scratch";
    vm_files_in_memory_of_limited_size: "tmpfs", "--tmpfs", "/scratch:size=1m";
    vm_control_groups_inside: "cgroup", "--systemd", "always";
    vm_private_mounts: "mount", "--cap-add", "SYS_ADMIN";
    vm_private_host_names: "uts", "--cap-add", "SYS_ADMIN";
    vm_private_ipc_namespaces: "ipc", "--cap-add", "SYS_ADMIN";
    vm_private_network_namespaces: "net", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN";
    vm_configured_networks: "stack", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN",
        "--env", "APART=1";
    vm_pairs_between_networks: "pair", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN",
        "--env", "APART=1";
    vm_pairs_into_container_network: "pair", "--cap-add", "SYS_ADMIN",
        "--cap-add", "NET_ADMIN";
    vm_private_clocks: "timens", "--cap-add", "SYS_ADMIN", "--cap-add", "SYS_TIME";
    vm_private_cgroup_namespaces: "cgroupns", "--cap-add", "SYS_ADMIN";
    vm_cgroup_namespaces_of_groups_inside: "cgroupns", "--systemd", "always";
    vm_private_ids: "user";
    vm_private_ids_inspected_by_root: "user", "--cap-add", "SYS_PTRACE", "--env", "LOOKS=1";
    vm_two_hundred_user_namespaces: "user", "--env", "MANY=200";
    vm_roots_in_user_namespaces_without_a_right_to_them: "user", "--env", "ROOT=1",
        "--cap-drop", "SYS_CHROOT", "--security-opt", "seccomp=unconfined";
    vm_namespaces_of_private_user_namespace: "owned", "--cap-add", "SYS_ADMIN";
    vm_mounts_by_the_container: "mounted", "--cap-add", "SYS_ADMIN";
    vm_tcp_connections: "tcp";
    vm_unaccepted_connections: "backlog";
    vm_connections_in_handshake: "making";
    vm_ended_connections: "ending", "--cap-add", "NET_RAW";
    vm_raw_and_packet_sockets: "raw", "--cap-add", "NET_RAW";
    vm_credentials: "credential";
    vm_schedules: "schedule";
    vm_deleted_files: "deleted";
    vm_locks: "lock";
    vm_leases: "lease";
    vm_directories: "directory";
    vm_private_roots: "chroot";
    vm_terminals: "terminal", "-t";
}

/// The init of `--init` is created again, and does its work again.
#[test]
fn vm_init_is_recreated_by_restore() {
    let host = host();
    round_trip(&host, "tree", &["--net", "none", "--init"]);
    run_on(&host, "tree", &["--net", "none", "--init"]);
    round_trip(&host, "terminal", &["--net", "none", "--init", "-t"]);
    let script = "trap 'exit 3' TERM; (sleep 1000 &); (setsid sleep 1000 &); \
                  while :; do sleep 0.1; done";
    for user in ["0", "1000"] {
        let words = ["run", "-d", "--init", "--user", user, "--name", "a", "workloads"];
        host.dm(&[&words[..], &["sh", "-c", script]].concat()).ok();
        let of_init = ["exec", "a", "sh", "-c", "grep -l '^PPid:.1$' /proc/[0-9]*/status | wc -l"];
        let are_three = || host.dm(&of_init).stdout.trim() == "3";
        assert!(wait_until(soon(), are_three));
        host.dm(&["checkpoint", "a"]).ok();
        host.dm(&["restore", "a"]).ok();
        assert!(are_three(), "user {user}: {}", host.dm(&of_init));
        host.dm(&["sleep", "a"]).ok();
        host.dm(&["wake", "a"]).ok();
        assert!(are_three(), "user {user}: {}", host.dm(&of_init));
        assert_eq!(host.dm(&["exec", "a", "cat", "/proc/1/comm"]).ok(), "dormouse-init");
        let rights = "grep -E '^(Uid|CapEff|CapPrm):' /proc/1/status /proc/2/status | \
                      cut -d: -f2- | sort | uniq | wc -l";
        assert_eq!(host.dm(&["exec", "a", "sh", "-c", rights]).ok(), "3", "as its program");
        host.dm(&["stop", "a"]).ok();
        assert_eq!(host.dm(&["wait", "a"]).ok(), "3");
        host.dm(&["rm", "a"]).ok();
    }
}

/// A container's set-up of its private network, and packet filters in that network.
#[test]
fn vm_private_network_keeps_its_configuration() {
    let host = host();
    let rights = ["--net", "none", "--cap-add", "NET_ADMIN"];
    round_trip(&host, "stack", &rights);
    run_on(&host, "stack", &rights);
    let words = ["run", "-d", "--name", "a", "workloads", "sleep", "1000"];
    host.dm(&[&words[..2], &rights, &words[2..]].concat()).ok();
    let nft = |name: &str, input: &str| {
        let pid = host.inspect(name)["pid"].as_u64().expect("the container runs");
        let nft = format!("nsenter --net=/proc/{pid}/ns/net /usr/sbin/nft {input}");
        host.sh(&nft).ok()
    };
    let rules = "table inet t {
        set s { type ipv4_addr; flags interval; elements = { 10.1.0.0/16, 10.2.3.4 } }
        chain in {
            type filter hook input priority 5; policy accept;
            ip saddr @s counter accept comment \"some words\"
            tcp dport 81 counter accept
        }
    }";
    nft("a", &format!("-f - <<'E'\n{rules}\nE"));
    host.dm(&["exec", "a", "sh", "-c", "! nc 127.0.0.1 81 </dev/null"]).ok();
    let before = nft("a", "list ruleset");
    assert!(before.contains("packets 1 bytes") && before.contains("some words"), "{before}");
    let same = |name: &str| {
        assert_eq!(nft(name, "list ruleset"), before, "of {name}");
    };
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    same("a");
    host.dm(&["sleep", "a"]).ok();
    host.dm(&["wake", "a"]).ok();
    same("a");
    host.dm(&["clone", "-n", "2", "--name", "c", "a"]).ok();
    ["c-1", "c-2"].into_iter().for_each(same);
    // Rules that were removed stay removed.
    nft("a", "flush ruleset");
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    assert_eq!(nft("a", "list ruleset"), "");
}

/// Additional huge pages of the machine while a test needs them.
struct HugePages(String);

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn more(pages: u64) -> Option<Self> {
        let read = || fs::read_to_string(Self::COUNT).expect("the kernel has huge pages");
        let before = Self(read());
        let wanted = before.0.trim().parse::<u64>().expect("a number") + pages;
        fs::write(Self::COUNT, wanted.to_string()).expect("root writes to sysctls");
        (read().trim() == wanted.to_string()).then_some(before)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        fs::write(Self::COUNT, &self.0).expect("root writes to sysctls");
    }
}

#[test]
fn vm_memory_of_huge_pages() {
    let Some(_pages) = HugePages::more(16) else {
        return eprintln!("SKIPPED: the kernel has no 16 free huge pages");
    };
    let host = host();
    round_trip(&host, "hugetlb", &["--net", "none"]);
    run_on(&host, "hugetlb", &["--net", "none"]);
}

/// New containers from a running container, and from a checkpoint of a stopped one.
#[test]
fn vm_clones_run_independently() {
    let host = host();
    let all = [
        ("memory", &["--net", "none"][..]),
        ("tree", &["--net", "none"]),
        ("mount", &["--net", "none", "--cap-add", "SYS_ADMIN"]),
        ("listener", &[]),
        ("deleted", &["--net", "none"]),
        ("thread", &["--net", "none"]),
        ("lock", &["--net", "none"]),
        ("memfd", &["--net", "none"]),
        ("inotify", &["--net", "none"]),
        ("mqueue", &["--net", "none"]),
        ("user", &["--net", "none"]),
    ];
    // Four of these take a minute under emulation.
    let some = if slowness() > 1 { &all[..4] } else { &all };
    for &(name, more) in some {
        start(&host, name, more);
        wait_for_line(&host, name, "ready 0");
        let made = host.dm(&["clone", "-n", "2", name]).ok();
        assert_eq!(made, format!("{name}-clone-1\n{name}-clone-2"));
        host.dm(&["checkpoint", name]).ok();
        host.dm(&["clone", "--name", &format!("{name}-late"), name]).ok();
        host.dm(&["restore", name]).ok();
        let of = |name: &str, what: &str| host.inspect(name)[what].to_string();
        let all: Vec<String> =
            ["", "-clone-1", "-clone-2", "-late"].map(|end| format!("{name}{end}")).into();
        for (n, one) in all.iter().enumerate() {
            assert_eq!(host.state_of(one), "running", "{one}");
            for other in &all[..n] {
                assert_ne!(of(one, "id"), of(other, "id"));
                let same = of(one, "addresses") == of(other, "addresses");
                assert_eq!(same, !more.is_empty(), "{one} and {other}");
            }
            for round in 0..rounds() {
                // Lines that were printed before the clone are not in the clone's log.
                if round > 0 {
                    wait_for_line(&host, one, &format!("ready {round}"));
                }
                go_on(&host, one, round);
            }
            wait_for_line(&host, one, "ok");
        }
        assert_eq!(host.dm(&["checkpoint", "ls", name]).ok().lines().count(), 2, "{name}");
    }
}

/// Generators of random numbers keep their state in memory that a fork wipes (MADV_WIPEONFORK).
#[test]
fn vm_clone_has_empty_wipe_on_fork_memory() {
    let host = host();
    start(&host, "wipe", &["--net", "none"]);
    wait_for_line(&host, "wipe", "ready 0");
    host.dm(&["clone", "--name", "awake", "wipe"]).ok();
    host.dm(&["clone", "--asleep", "--name", "late", "wipe"]).ok();
    host.dm(&["sleep", "wipe"]).ok();
    host.dm(&["wake", "wipe", "late"]).ok();
    for (name, state) in [("wipe", 7), ("awake", 0), ("late", 0)] {
        go_on(&host, name, 0);
        wait_for_line(&host, name, &format!("state {state}"));
    }
}

/// Copies the image of one host to another, with the same id.
fn carry_image(from: &Host, to: &Host) {
    let file = from.dir().join("image.tar").display().to_string();
    from.dm(&["save", "-q", "-o", &file, "workloads"]).ok();
    to.dm(&["import", "-q", &file]).ok();
}

/// An archive is carried from one host to another, with the changed files in it.
#[test]
fn archive_makes_container_on_another_host() {
    let (one, other) = (host(), Host::new());
    for (name, more, compress) in [
        ("memory", &["--net", "none", "--tmpfs", "/scratch"][..], "--compress"),
        ("file", &["--net", "none"], ""),
        ("deleted", &["--net", "none"], "--compress"),
        ("listener", &[], ""),
    ] {
        start(&one, name, more);
        wait_for_line(&one, name, "ready 0");
        one.dm(&["exec", name, "sh", "-c", "echo changed >/etc/passwd; rm -r /var"]);
        let archive = one.dir().join(format!("{name}.archive")).display().to_string();
        let words = ["checkpoint", "--archive", "--to", &archive, compress, name];
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        assert_eq!(one.dm(&words).ok(), archive);
        let mode = fs::metadata(&archive).expect("the file exists").permissions().mode() & 0o7777;
        assert_eq!(mode, 0o600, "the archive contains memory");
        assert_eq!(one.state_of(name), "stopped");
        assert!(
            one.dm(&["checkpoint", "ls", name]).ok().lines().count() == 1,
            "the archive is the only checkpoint"
        );
        if name == "memory" {
            let out = other.dm(&["checkpoint", "import", &archive]);
            assert!(out.status != 0 && out.stderr.contains("image 'workloads"), "{out}");
            assert!(out.stderr.contains("is not on this host"), "{out}");
            assert!(!other.dm(&["ps", "-a"]).ok().contains(name));
            carry_image(&one, &other);
        }
        assert_eq!(other.dm(&["checkpoint", "import", &archive]).ok(), name);
        assert_eq!(other.state_of(name), "created");
        other.dm(&["restore", name]).ok();
        assert_eq!(other.dm(&["exec", name, "cat", "/etc/passwd"]).ok(), "changed");
        assert_ne!(other.dm(&["exec", name, "test", "-e", "/var"]).status, 0);
        let is_mounted = other.dm(&["exec", name, "grep", "-q", " /scratch ", "/proc/mounts"]);
        assert_eq!(is_mounted.status == 0, name == "memory");
        for round in 0..rounds() {
            if round > 0 {
                wait_for_line(&other, name, &format!("ready {round}"));
            }
            go_on(&other, name, round);
        }
        wait_for_line(&other, name, "ok");
        other.dm(&["wait", name]).ok();
        // From here on the imported container is like any other.
        other.dm(&["rm", name]).ok();
    }
}

/// An archive goes through a pipe to a new container with an address and a name of its own.
#[test]
fn vm_checkpoint_makes_new_containers_on_same_host() {
    let host = host();
    start(&host, "listener", &[]);
    wait_for_line(&host, "listener", "ready 0");
    let out = host.dm(&["checkpoint", "export", "listener"]);
    assert!(out.status != 0 && out.stderr.contains("is running"), "{out}");
    host.dm(&["checkpoint", "listener"]).ok();
    let root = host.root().display().to_string();
    let program = dormouse_testkit::dormouse().display().to_string();
    host.sh(&format!(
        "{program} --root {root} checkpoint export --compress listener 1 | \
         {program} --root {root} checkpoint import --start --name b --memory 100m -"
    ))
    .ok();
    let free = "10.136.77.7";
    assert_eq!(host.dm(&["restore", "--name", "c", "--ip", free, "listener"]).ok(), "c");
    assert_eq!(host.address_of("c").to_string(), free);
    let out = host.dm(&["restore", "--name", "d", "--ip", free, "listener"]);
    assert!(out.status != 0 && !host.dm(&["ps", "-a"]).ok().contains(" d "), "{out}");
    host.dm(&["restore", "listener"]).ok();
    let all = ["listener", "b", "c"];
    for (n, name) in all.iter().enumerate() {
        assert_eq!(host.state_of(name), "running");
        for other in &all[..n] {
            assert_ne!(host.address_of(name), host.address_of(other));
        }
        for round in 0..rounds() {
            if round > 0 {
                wait_for_line(&host, name, &format!("ready {round}"));
            }
            go_on(&host, name, round);
        }
        wait_for_line(&host, name, "ok");
    }
    let id = host.inspect("b")["id"].as_str().expect("an id").to_owned();
    let config = host.root().join("lib/containers").join(id).join("config.json");
    let config = fs::read_to_string(config).expect("the file exists");
    assert!(config.contains(&format!("\"memory_max_bytes\":{}", 100 << 20)), "{config}");
}

/// An archive gives a container nothing of the host that imports it. A damaged archive creates
/// nothing.
#[test]
fn hostile_archive_is_refused_and_leaves_nothing() {
    let host = host();
    let more = ["--net", "none", "--cap-add", "SYS_ADMIN", "-v", "/etc:/host"];
    start(&host, "memory", &more);
    wait_for_line(&host, "memory", "ready 0");
    let archive = host.dir().join("a").display().to_string();
    host.dm(&["checkpoint", "memory"]).ok();
    host.dm(&["checkpoint", "export", "-o", &archive, "memory"]).ok();
    let out = host.dm(&["checkpoint", "import", "--name", "b", &archive]);
    assert!(out.status != 0, "{out}");
    for missing in ["--cap-add SYS_ADMIN", "--volume /etc:/host"] {
        assert!(out.stderr.contains(missing), "{missing}: {out}");
    }
    let given =
        ["checkpoint", "import", "--name", "b", "--cap-add", "SYS_ADMIN", "--tmpfs", "/host"];
    let path = Path::new(&archive);
    let bytes = fs::read(path).expect("the archive was written");
    let find =
        |what: &[u8]| bytes.windows(what.len()).position(|w| w == what).expect("part of the file");
    for (at, part) in [
        (3, "head"),
        (find(b"\"hostname\""), "part 'container'"),
        (find(b"files\0\0\0") + 600, "files"),
        (find(b"\"start_brk\""), "part 'records'"),
        (bytes.len() - 500, "pages"),
        (bytes.len() - 1, "part 'end'"),
    ] {
        flip(path, at as u64);
        let out = host.dm(&[&given[..], &[&archive]].concat());
        assert!(out.status != 0 && out.stderr.contains(part), "{part}: {out}");
        flip(path, at as u64);
    }
    for length in [0, 15, 16, bytes.len() / 2, bytes.len() - 1] {
        fs::write(path, &bytes[..length]).expect("write the file");
        let out = host.dm(&[&given[..], &[&archive]].concat());
        assert!(out.status != 0 && out.stderr.contains("damaged"), "{length}: {out}");
    }
    fs::write(path, [&bytes[..], b"x"].concat()).expect("write the file");
    let out = host.dm(&[&given[..], &[&archive]].concat());
    assert!(out.status != 0 && out.stderr.contains("something follows"), "{out}");
    let list = host.dm(&["ps", "-a", "--quiet"]).ok();
    assert_eq!(list.lines().count(), 1, "{list}");
    fs::write(path, &bytes).expect("write the file");
    assert_eq!(host.dm(&[&given[..], &[&archive]].concat()).ok(), "b");
    host.dm(&["restore", "b"]).ok();
    go_on(&host, "b", 0);
}

#[test]
fn checkpoints_are_compared() {
    let host = Host::with_busybox();
    let script = "exec 3</etc/passwd; touch /a; until test -e /b; do sleep 0.1; done; \
                  exec 3<&- 4>/c; sleep 1000 & touch /d; wait";
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "busybox", "sh", "-c", script]).ok();
    host.wait_inside("a", "test -e /a");
    host.dm(&["checkpoint", "--leave-running", "a"]).ok();
    host.dm(&["exec", "a", "touch", "/b"]).ok();
    host.wait_inside("a", "test -e /d");
    host.dm(&["checkpoint", "--leave-running", "a"]).ok();
    let report = host.dm(&["checkpoint", "diff", "a", "1", "2"]).ok();
    for line in [
        "process 1 (sh), descriptor 3: was file '/etc/passwd' at 0, is closed",
        "process 1 (sh), descriptor 4: is new: file '/c' at 0",
    ] {
        assert!(report.lines().any(|l| l == line), "{line}: {report}");
    }
    assert!(report.lines().any(|l| l.ends_with("(sleep): is new")), "{report}");
    assert!(report.contains("pages differ"), "{report}");
    assert_eq!(host.dm(&["checkpoint", "diff", "a", "2"]).ok(), "", "2 is the last");
    host.dm(&["kill", "a"]).ok();
}

/// Four processes share most of 8 MB, three share another 8 MB, 4 MB are of one process, and 8 MB
/// are zero.
#[test]
fn vm_shared_pages_are_written_once() {
    let host = host();
    start(&host, "cow", &["--net", "none"]);
    wait_for_line(&host, "cow", "ready 0");
    // Twice, because a checkpoint changes nothing.
    for _ in 0..2 {
        let made = host.dm(&["checkpoint", "--leave-running", "--json", "cow"]).ok();
        let made: serde_json::Value = serde_json::from_str(&made).expect("JSON");
        let bytes = made["bytes"].as_u64().expect("a number");
        assert!((20 << 20..22 << 20).contains(&bytes), "{bytes}");
    }
    host.dm(&["kill", "cow"]).ok();
}

/// A process that exits while it is read is no reason to refuse.
#[test]
fn vm_short_lived_processes_do_not_block_checkpoint() {
    let host = Host::with_busybox();
    let script = "(while :; do true | true; done) & (while :; do sleep 0; done) & \
                  while :; do cat /etc/passwd >/dev/null; done";
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "busybox", "sh", "-c", script]).ok();
    for round in 0..4 {
        let out = host.dm(&["checkpoint", "--leave-running", "a"]);
        assert_eq!(out.status, 0, "round {round}: {out}");
    }
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    host.dm(&["kill", "a"]).ok();
}

/// After a reboot the host's clocks have begun anew, and the container's continue.
#[test]
fn vm_clocks_continue_after_reboot() {
    let host = host();
    start(&host, "clock", &["--net", "none"]);
    let offsets = || {
        let text = host.dm(&["exec", "clock", "cat", "/proc/1/timens_offsets"]).ok();
        let word = |line: &str| line.split_ascii_whitespace().nth(1).map(str::to_owned);
        let all: Vec<i64> =
            text.lines().filter_map(word).map(|w| w.parse().expect("a number")).collect();
        (all[0], all[1])
    };
    wait_for_line(&host, "clock", "ready 0");
    assert_eq!(offsets(), (0, 0));
    host.dm(&["checkpoint", "clock"]).ok();
    std::thread::sleep(Duration::from_millis(1100));
    let id = host.dir().join("boot_id");
    fs::write(&id, format!("{OTHER_BOOT}\n")).expect("write the file");
    let place = "/proc/sys/kernel/random/boot_id";
    host.sh(&format!("mount --bind {} {place}", id.display())).ok();
    host.dm(&["restore", "clock"]).ok();
    // The monotonic clock does not count the time without processes. The boot-time clock does.
    let (monotonic, boottime) = offsets();
    assert!((-30 * i64::from(slowness())..=-2).contains(&monotonic), "{monotonic}");
    assert!((-1..=0).contains(&boottime), "{boottime}");
    go_on(&host, "clock", 0);
    for round in 1..rounds() {
        wait_for_line(&host, "clock", &format!("ready {round}"));
        host.dm(&["checkpoint", "clock"]).ok();
        host.dm(&["restore", "clock"]).ok();
        // Within one boot the offsets stay.
        assert_eq!(offsets(), (monotonic, boottime));
        go_on(&host, "clock", round);
    }
    wait_for_line(&host, "clock", "ok");
    host.sh(&format!("umount {place}")).ok();
}

/// Private clocks keep their distance from the container's clocks in every boot.
#[test]
fn vm_private_clocks_continue_after_reboot() {
    let host = host();
    let more = ["--net", "none", "--cap-add", "SYS_ADMIN", "--cap-add", "SYS_TIME"];
    start(&host, "timens", &more);
    let (id, place) = (host.dir().join("boot_id"), "/proc/sys/kernel/random/boot_id");
    for round in 0..rounds() {
        wait_for_line(&host, "timens", &format!("ready {round}"));
        host.dm(&["checkpoint", "timens"]).ok();
        std::thread::sleep(Duration::from_millis(1100));
        let boot = OTHER_BOOT.replace("4000", &format!("400{round}"));
        fs::write(&id, format!("{boot}\n")).expect("write the file");
        if round == 0 {
            host.sh(&format!("mount --bind {} {place}", id.display())).ok();
        }
        let out = host.dm(&["restore", "timens"]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        go_on(&host, "timens", round);
    }
    wait_for_line(&host, "timens", "ok");
    host.sh(&format!("umount {place}")).ok();
}

/// An asleep container is woken when a timer of one of its processes expires by a private clock.
#[test]
fn vm_timer_of_private_clock_wakes_in_time() {
    let host = host();
    let more = ["--net", "none", "--cap-add", "SYS_ADMIN", "--cap-add", "SYS_TIME"];
    start(&host, "timens", &[&more[..], &["--env", "ALONE=1"]].concat());
    wait_for_line(&host, "timens", "ready 0");
    std::thread::sleep(Duration::from_millis(200));
    host.dm(&["sleep", "timens"]).ok();
    assert_eq!(host.state_of("timens"), "asleep");
    wait_for_line(&host, "timens", "ok");
    assert_eq!(host.dm(&["wait", "timens"]).ok(), "0");
}

/// A checkpoint gives no namespace and no clock offsets that the configuration does not grant.
#[test]
fn clocks_without_grant_in_configuration_are_refused() {
    let host = host();
    let dir = checkpointed(&host);
    for (ahead, lacking) in [(0, "SYS_ADMIN"), (1, "SYS_TIME")] {
        rewrite(&dir, |records| {
            let time = Time { monotonic_ns: ahead, boottime_ns: 0 };
            records.objects.retain(|object| !matches!(object.thing, Thing::Time(_)));
            records.objects.push(Thing::Time(time).into());
        });
        let out = host.dm(&["restore", "memory"]);
        assert!(out.status != 0 && out.stderr.contains(lacking), "{out}");
        assert_eq!(host.state_of("memory"), "stopped");
    }
}

/// Changes the records of a checkpoint, and publishes them with correct checksums.
pub(crate) fn rewrite(dir: &Path, change: impl FnOnce(&mut Records)) {
    let reader = Reader::open(dir).expect("a whole checkpoint");
    let mut records = reader.records().clone();
    let pages = fs::read(dir.join("pages")).expect("the file exists");
    fs::remove_dir_all(dir).expect("remove the directory");
    let mut writer = Box::new(DirSink::begin(dir).expect("a free directory"));
    writer.append(&pages).expect("write the file");
    records.pages = writer.pages().expect("write the file");
    change(&mut records);
    writer.publish(&records).expect("write the file");
}

/// Returns the directory of the newest checkpoint of a container.
pub(crate) fn newest(host: &Host, name: &str) -> PathBuf {
    let id = host.inspect(name)["id"].as_str().expect("an id").to_owned();
    let all = fs::read_dir(host.root().join("lib/containers").join(id).join("checkpoints"));
    let numbers = all.expect("the directory of checkpoints").flatten().map(|entry| entry.path());
    let number = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
    numbers.max_by_key(number).expect("a checkpoint")
}

/// The vdso is replaced by another kernel's in each round: one byte that is in no function differs.
#[test]
fn vm_vdso_of_another_kernel_is_restored() {
    let host = host();
    start(&host, "vdso", &["--net", "none"]);
    for round in 0..rounds() {
        wait_for_line(&host, "vdso", &format!("ready {round}"));
        host.dm(&["checkpoint", "vdso"]).ok();
        rewrite(&newest(&host, "vdso"), |records| {
            let image = &mut records.about.vdso_image.0;
            *image.last_mut().expect("the kernel has a vdso") ^= 1 << round;
            records.about.boot_id = OTHER_BOOT.into();
            records.about.vdso = blake3::hash(image).to_hex().to_string();
        });
        host.dm(&["restore", "vdso"]).ok();
        let objects = host.dm(&["exec", "vdso", "grep", "-c", "\\[vdso\\]", "/proc/1/maps"]).ok();
        assert_eq!(objects, "1", "round {round}: one vdso is mapped");
        go_on(&host, "vdso", round);
    }
    wait_for_line(&host, "vdso", "ok");
}

#[test]
fn cpu_without_saved_feature_is_refused_by_name() {
    let host = host();
    let dir = checkpointed(&host);
    rewrite(&dir, |records| {
        records.about.boot_id = OTHER_BOOT.into();
        records.about.cpu.push("of_tomorrow".into());
    });
    let out = host.dm(&["restore", "memory"]);
    assert!(out.stderr.contains("this CPU lacks of_tomorrow, which"), "{out}");
    rewrite(&dir, |records| {
        records.about.cpu.pop();
        records.about.cpu_state[0].offset += 64;
    });
    let out = host.dm(&["restore", "memory"]);
    assert!(out.stderr.contains("does not keep part 2 of the extended registers"), "{out}");
    assert_eq!(host.state_of("memory"), "stopped");
}

/// State that getrandom(2) keeps in a process's memory is not saved: no two clones get the same
/// numbers.
#[test]
fn vm_random_numbers_differ_between_clones() {
    let host = host();
    start(&host, "vdso", &["--net", "none"]);
    wait_for_line(&host, "vdso", "ready 0");
    host.dm(&["clone", "-n", "2", "vdso"]).ok();
    let mut numbers = Vec::new();
    for name in ["vdso", "vdso-clone-1", "vdso-clone-2"] {
        go_on(&host, name, 0);
        let found = wait_until(soon(), || {
            let log = host.dm(&["logs", name]).stdout;
            let line = log.lines().find(|line| line.starts_with("random 0 ")).map(str::to_owned);
            line.is_some_and(|line| {
                numbers.push(line);
                true
            })
        });
        assert!(found, "{name} has printed no number");
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 3, "{numbers:?}");
}

/// A shell at the console is detached from and attached to again, with a background job and with
/// input that the shell has not read.
#[test]
fn vm_shell_in_terminal_is_attached_again() {
    let host = Host::with_busybox();
    host.dm(&["run", "-dt", "--name", "a", "--net", "none", "busybox", "sh"]).ok();
    let attach = || {
        let mut terminal = Terminal::spawn(&host.dormouse(&["attach", "a"]));
        terminal.send("\n");
        terminal.expect("#");
        terminal
    };
    let mut terminal = attach();
    terminal.resize(33, 111);
    terminal.send("kept=va''lue; sleep 1000 & stty susp ^Y\n");
    terminal.send("stty size\n");
    terminal.expect("33 111");
    terminal.send("\u{10}\u{11}");
    assert_eq!(terminal.wait(), 0);
    for round in 0..rounds() {
        assert_eq!(host.dm(&["checkpoint", "a"]).status, 0, "round {round}");
        let out = host.dm(&["restore", "a"]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        let size = host.dm(&["exec", "a", "sh", "-c", "stty size </dev/pts/0"]).ok();
        assert_eq!(size, "33 111", "round {round}");
        let mut terminal = attach();
        terminal.send("echo round''_$kept; tty; stty -a; jobs\n");
        terminal.expect("round_value");
        terminal.expect("/dev/pts/0");
        terminal.expect("susp = ^Y");
        terminal.expect("sleep 1000");
        // The foreground process receives a typed interrupt.
        terminal.send("sleep 2000\n");
        std::thread::sleep(Duration::from_millis(500));
        terminal.send("\u{3}");
        terminal.send("echo status''_$?\n");
        terminal.expect("status_130");
        terminal.resize(33, 111);
        std::thread::sleep(Duration::from_millis(300));
        terminal.send("stty size\n");
        terminal.expect("33 111");
        terminal.send("\u{10}\u{11}");
        assert_eq!(terminal.wait(), 0);
    }
    let mut terminal = attach();
    terminal.send("kill %1; exit 4\n");
    assert_eq!(terminal.wait(), 4);
}

/// Returns the directory of a checkpoint of the workload `memory`, which has stopped.
fn checkpointed(host: &Host) -> PathBuf {
    start(host, "memory", &["--net", "none"]);
    wait_for_line(host, "memory", "ready 0");
    host.dm(&["checkpoint", "memory"]).ok();
    newest(host, "memory")
}

/// Flips one bit of a file. A second call restores the bit.
fn flip(path: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).expect("the file exists");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte at the offset");
    file.write_all_at(&[byte[0] ^ 4], at).expect("write the file");
}

#[test]
fn damaged_checkpoint_is_refused_by_part_name() {
    let host = host();
    let dir = checkpointed(&host);
    let (records, pages) = (dir.join("records"), dir.join("pages"));
    let text = fs::read(&records).expect("the file exists");
    let at = |what: &str| {
        let found = text.windows(what.len()).position(|w| w == what.as_bytes());
        found.unwrap_or_else(|| panic!("no {what}")) as u64
    };
    let length = fs::metadata(&pages).expect("the file exists").len();
    for (path, at, part) in [
        (&records, 3, "head"),
        (&records, at("\"monotonic_ns\""), "section 'about'"),
        (&records, at("\"umask\""), "section 'process'"),
        (&records, at("\"start_brk\""), "section 'memory'"),
        (&records, at("stdout.log"), "section 'object'"),
        (&records, at("\"chunks\""), "section 'page'"),
        (&records, text.len() as u64 - 1, "the whole"),
        (&pages, 0, "of process 1 (memory)"),
        (&pages, length - 1, "of process 1 (memory)"),
    ] {
        flip(path, at);
        for words in [&["checkpoint", "verify", "memory"][..], &["restore", "memory"]] {
            let out = host.dm(words);
            assert!(out.status != 0 && out.stderr.contains(part), "{part}: {out}");
        }
        assert_eq!(host.state_of("memory"), "stopped");
        flip(path, at);
    }
    for path in [&records, &pages] {
        let whole = fs::read(path).expect("the file exists");
        for length in [0, 7, whole.len() / 2, whole.len() - 1] {
            fs::write(path, &whole[..length]).expect("write the file");
            let out = host.dm(&["restore", "memory"]);
            assert!(out.status != 0 && out.stderr.contains("damaged"), "{length}: {out}");
        }
        fs::write(path, whole).expect("write the file");
    }
    assert_eq!(host.dm(&["checkpoint", "verify", "memory"]).ok(), "whole");
    host.dm(&["restore", "memory"]).ok();
    assert_eq!(host.state_of("memory"), "running");
}

#[test]
fn checkpoints_are_listed_shown_and_removed() {
    let host = host();
    let dir = checkpointed(&host);
    for (path, mode) in
        [(dir.clone(), 0o700), (dir.join("records"), 0o600), (dir.join("pages"), 0o600)]
    {
        let found = fs::metadata(&path).expect("the file exists").permissions().mode() & 0o7777;
        assert_eq!(found, mode, "{}", path.display());
    }
    let list = host.dm(&["checkpoint", "ls"]).ok();
    assert!(
        list.lines().nth(1).is_some_and(|l| l.contains("memory") && l.ends_with("whole")),
        "{list}"
    );
    let shown = host.dm(&["checkpoint", "inspect", "memory"]).ok();
    assert!(shown.contains("stdout.log") && shown.contains("/dev/null"), "{shown}");
    let to = host.dir().join("elsewhere").display().to_string();
    host.dm(&["restore", "memory"]).ok();
    assert_eq!(host.dm(&["checkpoint", "--to", &to, "memory"]).ok(), to);
    assert_ne!(host.dm(&["checkpoint", "verify", "memory", "2"]).status, 0);
    host.dm(&["checkpoint", "rm", "memory", "1"]).ok();
    assert_ne!(host.dm(&["restore", "memory"]).status, 0, "no checkpoint is left");
    host.dm(&["restore", "--from", &to, "memory"]).ok();
    go_on(&host, "memory", 0);
    wait_for_line(&host, "memory", if rounds() == 1 { "ok" } else { "ready 1" });
    let other = host.dm(&["create", "--name", "other", "workloads", "/bin/file"]).ok();
    assert!(!other.is_empty());
    let out = host.dm(&["restore", "--from", &to, "other"]);
    assert!(out.status != 0 && out.stderr.contains("is of container"), "{out}");
}

#[test]
fn vm_unsavable_state_is_named_and_nothing_is_stopped() {
    let host = host();
    let words = ["run", "-d", "--name", "a", "--net", "none", "workloads", "sh", "-c"];
    let script = "exec 5<>/etc/passwd; ln /etc/passwd /other; rm /etc/passwd; touch /up; while :; do sleep 0.1; \
                  echo tick; done";
    host.dm(&[&words[..], &[script]].concat()).ok();
    host.wait_inside("a", "test -e /up");
    let out = host.dm(&["explain", "a"]);
    assert_eq!(out.status, 1, "{out}");
    let line = out.stdout.lines().find(|l| l.starts_with("process 1 (sh), descriptor 5: "));
    assert!(line.is_some_and(|l| l.contains("/etc/passwd") && l.contains("other links")), "{out}");
    let out = host.dm(&["checkpoint", "a"]);
    assert!(out.status != 0 && out.stderr.contains("descriptor 5"), "{out}");
    assert_eq!(host.state_of("a"), "running");
    let ticks = || host.dm(&["logs", "a"]).stdout.lines().count();
    let before = ticks();
    assert!(wait_until(soon(), || ticks() > before + 2), "the container continues");
    host.dm(&["kill", "a"]).ok();
}

#[test]
fn vm_parent_in_vfork_is_named_and_nothing_is_stopped() {
    let host = host();
    start(&host, "vfork", &["--net", "none"]);
    wait_for_line(&host, "vfork", "ready 0");
    let out = host.dm(&["checkpoint", "vfork"]);
    assert!(out.status != 0 && out.stderr.contains("made by vfork"), "{out}");
    assert_eq!(host.state_of("vfork"), "running");
    host.dm(&["exec", "vfork", "touch", "/go-0"]);
    wait_for_line(&host, "vfork", "ok");
}

/// Data written into a connection that is not accepted is saved completely or refused.
#[test]
fn vm_descriptor_held_only_by_unaccepted_connection_is_named_and_nothing_is_stopped() {
    let host = host();
    start(&host, "embryo", &["--net", "none", "--env", "LOST=1"]);
    wait_for_line(&host, "embryo", "ready 0");
    let out = host.dm(&["checkpoint", "embryo"]);
    assert!(out.status != 0 && out.stderr.contains("that no process has open"), "{out}");
    assert_eq!(host.state_of("embryo"), "running");
    host.dm(&["exec", "embryo", "touch", "/go-0"]);
    wait_for_line(&host, "embryo", "ok");
}

#[test]
fn vm_objects_of_the_ipc_namespace_are_named() {
    let host = host();
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "workloads", "/bin/sysv"]).ok();
    wait_for_line(&host, "a", "ready 0");
    let out = host.dm(&["explain", "a"]);
    assert!(out.status == 1 && out.stdout.contains("(mq_notify)"), "{out}");
    assert!(!out.stdout.contains("System V"), "{out}");
    let out = host.dm(&["checkpoint", "a"]);
    assert!(out.status != 0 && out.stderr.contains("(mq_notify)"), "{out}");
    assert_eq!(host.state_of("a"), "running");
}

/// Contents of an inner namespace that cannot be saved, also of mounts that processes made.
#[test]
fn vm_unsavable_state_of_namespaces_is_named() {
    let host = host();
    let words = ["run", "-d", "--net", "none", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"];
    let cases = [
        (
            "link",
            "unshare -n sh -c 'ip link add name v0 type veth; \
             ip link add link v0 name m0 type macvlan; ",
            "with a link m0 of the kind \"macvlan\"",
        ),
        (
            "kind",
            "mkdir /there; mount -t ramfs ramfs /there; sh -c '",
            "a mount at '/there' of ramfs",
        ),
        (
            "user",
            "unshare -Urm --propagation shared sh -c '",
            "a mount namespace that belongs to a user namespace of its own and has shared mounts",
        ),
    ];
    for (name, script, why) in cases {
        let script = format!("{script}touch /up; exec sleep 1000'; sleep 1000");
        host.dm(&[&words[..], &["--name", name, "workloads", "sh", "-c", &script]].concat()).ok();
        host.wait_inside(name, "test -e /up");
        let out = host.dm(&["explain", name]);
        assert!(out.status == 1 && out.stdout.contains(why), "{out}");
        let out = host.dm(&["checkpoint", name]);
        assert!(out.status != 0 && out.stderr.contains(why), "{out}");
        assert_eq!(host.state_of(name), "running");
        host.dm(&["kill", name]).ok();
    }
}

/// A cgroup namespace whose root has no process left.
#[test]
fn vm_cgroup_namespace_without_root_process_is_named() {
    let host = host();
    start(&host, "cgroupns", &["--net", "none", "--systemd", "always", "--env", "GONE=1"]);
    wait_for_line(&host, "cgroupns", "ready 0");
    let why = "cgroup namespace of its own with no process below its root";
    let out = host.dm(&["explain", "cgroupns"]);
    assert!(out.status == 1 && out.stdout.contains(why), "{out}");
    let out = host.dm(&["checkpoint", "cgroupns"]);
    assert!(out.status != 0 && out.stderr.contains(why), "{out}");
    assert_eq!(host.state_of("cgroupns"), "running");
}

/// The engine mounts a devpts for an exec with a terminal. That mount is not the container's.
#[test]
fn engine_devpts_of_exec_does_not_block_checkpoint() {
    let host = host();
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "workloads", "sleep", "1000"]).ok();
    let mut terminal = Terminal::spawn(&host.dormouse(&["exec", "-t", "a", "cat", "/proc/mounts"]));
    terminal.expect("/dev/pts");
    assert_eq!(terminal.wait(), 0);
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    let mut terminal = Terminal::spawn(&host.dormouse(&["exec", "-t", "a", "cat", "/proc/mounts"]));
    terminal.expect("/dev/pts");
    assert_eq!(terminal.wait(), 0);
    host.dm(&["rm", "--force", "a"]).ok();
}

/// Common servers, with a request before and after each restore.
#[test]
fn big_real_servers_come_back_and_answer() {
    let host = Host::new();
    host.import(&image::software(), "software");
    let servers: [(&str, &[&str], &str); 3] = [
        ("python", &["python3", "-m", "http.server", "8000"], "Directory listing"),
        ("nginx", &["nginx", "-g", "daemon off;"], "Welcome to nginx"),
        (
            "redis",
            &["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""],
            "kept",
        ),
    ];
    for (name, words, answer) in servers {
        host.dm(&[&["run", "-d", "--name", name, "software"], words].concat()).ok();
        let answer_of = || {
            let port = if name == "python" { 8000 } else { 80 };
            let url = format!("http://{}:{port}/", host.address_of(name));
            let mut out = String::new();
            wait_until(soon(), || {
                out = match name {
                    "redis" => host.dm(&["exec", name, "redis-cli", "get", "key"]).stdout,
                    _ => host.sh(&format!("timeout 5 busybox wget -q -O - {url}")).stdout,
                };
                out.contains(answer)
            });
            out
        };
        if name == "redis" {
            host.wait_inside(name, "redis-cli set key kept | grep -q OK");
        }
        assert!(answer_of().contains(answer), "{name} before");
        let processes = |text: String| text.lines().count();
        let before = processes(host.dm(&["top", name]).ok());
        for round in 0..rounds() {
            let out = host.dm(&["checkpoint", name]);
            assert_eq!(out.status, 0, "{name}, round {round}: {out}");
            assert_eq!(host.state_of(name), "stopped");
            let out = host.dm(&["restore", name]);
            assert_eq!(out.status, 0, "{name}, round {round}: {out}");
            assert!(answer_of().contains(answer), "{name} after round {round}");
            assert_eq!(processes(host.dm(&["top", name]).ok()), before, "{name}");
        }
        let (port, question, answer): (u16, &str, &str) = match name {
            "nginx" => (80, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "Welcome to nginx"),
            "redis" => (6379, "GET key\r\n", "kept"),
            // The server closes every connection.
            _ => continue,
        };
        let address = format!("{}:{port}", host.address_of(name));
        let stream =
            host.in_network(move || TcpStream::connect(address).expect("the server listens"));
        let mut stream = stream.join().expect("no panic");
        stream.set_read_timeout(Some(Duration::from_secs(10) * slowness())).expect("a limit");
        for round in 0..rounds() + 1 {
            let mut received = String::new();
            let mut block = [0; 4096];
            stream.write_all(question.as_bytes()).expect("the connection is open");
            while !received.contains(answer) {
                let n = stream.read(&mut block).expect("an answer");
                assert!(n > 0, "{name} closed the connection in round {round}");
                received.push_str(&String::from_utf8_lossy(&block[..n]));
            }
            if round < rounds() {
                host.dm(&["sleep", name]).ok();
            }
        }
    }
}
