//! Nothing of the host or of another container is visible, signalable, traceable, connectable,
//! mountable or writable from inside.
//!
//! Each test runs an attack (`inside/attack.c`) three ways. On the shipped program it must be
//! *stopped*. Then it must *succeed*, so that the test cannot pass because the attack is wrong:
//! where the protection can be switched off, on the build of the same source in which that one
//! protection can be (feature `weaken`); where it cannot, because nothing would start without it,
//! on the host itself.

use std::path::PathBuf;

use dormouse_testkit::{Host, Output, dormouse, image, run, weak_dormouse};

const BROKEN: i32 = 0;
const STOPPED: i32 = 1;

/// Runs one attack in a new container.
fn attack(host: &Host, options: &[&str], words: &[&str]) -> Output {
    host.dm(&[&["run", "--rm"], options, &["attack", "attack"], words].concat())
}

/// The same on the host itself, by root.
fn attack_on_host(host: &Host, words: &[&str]) -> Output {
    let mut command = host.command(image::attack());
    command.args(words);
    run(command, b"", std::time::Duration::from_secs(20))
}

#[track_caller]
fn assert_stopped(out: &Output) {
    assert_eq!(out.status, STOPPED, "the attack was not stopped\n{out}");
}

#[track_caller]
fn assert_broken(out: &Output, without: &str) {
    assert_eq!(out.status, BROKEN, "the attack proves nothing: stopped without {without}\n{out}");
}

/// A scenario is told once and played on two hosts: the shipped program, and the one that lacks
/// `protections`.
#[track_caller]
fn only_stopped_by(protections: &str, scenario: impl Fn(&Host) -> Output) {
    let program: PathBuf = dormouse();
    assert_stopped(&scenario(&Host::with_attacks(program)));
    let mut host = Host::with_attacks(weak_dormouse());
    host.set_env("DORMOUSE_WEAKEN", protections);
    assert_broken(&scenario(&host), protections);
}

/// Starts a container that stays.
#[track_caller]
fn victim(host: &Host, words: &[&str]) {
    host.dm(&[&["run", "-d", "--name", "victim", "attack"], words].concat()).ok();
}

#[test]
fn vm_seccomp_stops_calls_that_pass_it_by() {
    only_stopped_by("seccomp", |host| attack(host, &["--net", "none"], &["io-uring"]));
}

#[test]
fn vm_capabilities_are_few() {
    only_stopped_by("capabilities", |host| attack(host, &["--net", "none"], &["set-hostname"]));
    let host = Host::with_attacks(dormouse());
    for set in ["CapInh", "CapAmb"] {
        assert_stopped(&attack(&host, &["--net", "none"], &["status-mask", set]));
    }
    victim(&host, &["sleep", "1000"]);
    for set in ["CapInh", "CapAmb"] {
        assert_stopped(&host.dm(&["exec", "victim", "attack", "status-mask", set]));
    }
}

#[test]
fn vm_no_new_privileges_stops_set_user_id() {
    let options = ["run", "--rm", "-u", "user", "--net", "none", "--security-opt"];
    let words = ["no-new-privileges", "attack", "gain", "gain-root"];
    only_stopped_by("no-new-privs", |host| host.dm(&[&options[..], &words].concat()));
}

#[test]
fn vm_memory_of_another_is_not_found() {
    only_stopped_by("ipc-namespace", |host| {
        victim(host, &["attack", "shm-make", "4242"]);
        std::thread::sleep(std::time::Duration::from_millis(300));
        let out = attack(host, &[], &["shm-find", "4242"]);
        attack_on_host(host, &["ipc-remove", "4242", "/none"]);
        out
    });
}

#[test]
fn vm_message_queues_of_another_are_not_found() {
    only_stopped_by("ipc-namespace", |host| {
        victim(host, &["attack", "mq-make", "/queue"]);
        std::thread::sleep(std::time::Duration::from_millis(300));
        let out = attack(host, &[], &["mq-find", "/queue"]);
        attack_on_host(host, &["ipc-remove", "0", "/queue"]);
        out
    });
}

#[test]
fn vm_shared_memory_files_are_private() {
    let host = Host::with_attacks(dormouse());
    victim(&host, &["sh", "-c", "echo secret >/dev/shm/file; sleep 1000"]);
    host.wait_inside("victim", "test -s /dev/shm/file");
    assert_stopped(&attack(&host, &[], &["read-file", "/dev/shm/file"]));
    assert_broken(&host.dm(&["exec", "victim", "attack", "read-file", "/dev/shm/file"]), "a wall");
}

#[test]
fn vm_cgroups_are_seen_from_inside() {
    only_stopped_by("cgroup-namespace", |host| attack(host, &[], &["cgroup-path"]));
}

#[test]
fn vm_clocks_are_in_a_namespace_and_cannot_be_set() {
    only_stopped_by("time-namespace", |host| {
        let own = host.sh("stat -L -c %i /proc/self/ns/time").ok();
        attack(host, &[], &["same-namespace", "time", &own])
    });
    let host = Host::with_attacks(dormouse());
    assert_stopped(&attack(&host, &[], &["set-clock"]));
    assert_broken(&attack_on_host(&host, &["set-clock"]), "a container");
}

#[test]
fn vm_keys_of_the_caller_stay_outside() {
    // Two locks are on this door: seccomp refuses keyctl, and the keyring is another.
    let scenario = |host: &Host| {
        let program = image::attack();
        let mut command = host.command(&program);
        command.args(["with-key", "house"]);
        let inner =
            host.dormouse(&["run", "--rm", "--net", "none", "attack", "attack", "find-key"]);
        // `inner` begins with an nsenter of its own, which changes nothing.
        command.arg(inner.get_program()).args(inner.get_args()).arg("house");
        for (name, value) in inner.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        run(command, b"", std::time::Duration::from_secs(30))
    };
    only_stopped_by("keyring,seccomp", scenario);
    let mut host = Host::with_attacks(weak_dormouse());
    host.set_env("DORMOUSE_WEAKEN", "seccomp");
    assert_stopped(&scenario(&host));
}

#[test]
fn vm_files_of_proc_that_tell_of_the_host_are_masked() {
    only_stopped_by("masked-paths", |host| attack(host, &[], &["read-file", "/proc/interrupts"]));
}

#[test]
fn vm_sys_is_read_only() {
    only_stopped_by("read-only-sys", |host| attack(host, &[], &["read-only", "/sys"]));
}

#[test]
fn vm_files_of_the_host_cannot_be_written() {
    let host = Host::with_attacks(dormouse());
    for options in [&[][..], &["--net", "none"], &["--privileged"], &["--cap-add", "ALL"]] {
        assert_stopped(&attack(&host, options, &["host-files"]));
    }
    assert_broken(&attack_on_host(&host, &["host-files"]), "a container");
}

#[test]
fn vm_processes_of_others_are_neither_seen_nor_signalled_nor_traced() {
    let host = Host::with_attacks(dormouse());
    victim(&host, &["sleep", "54321"]);
    let pid = host.inspect("victim")["pid"].to_string();
    assert_stopped(&attack(&host, &[], &["find-process", "sleep 54321"]));
    assert_stopped(&attack(&host, &[], &["signal-any", "70000", "0"]));
    assert_stopped(&attack(&host, &["--cap-add", "ALL"], &["trace", &pid]));
    assert_broken(&attack_on_host(&host, &["find-process", "sleep 54321"]), "a container");
    assert_broken(&attack_on_host(&host, &["signal-any", "70000", "1"]), "a container");
    assert_broken(&attack_on_host(&host, &["trace", &pid]), "a container");
    assert_eq!(host.state_of("victim"), "running");
}

#[test]
fn vm_the_root_cannot_be_left() {
    let host = Host::with_attacks(dormouse());
    let mark = host.dir().join("mark");
    std::fs::write(&mark, "of the host").expect("written");
    let mark = mark.to_str().expect("UTF-8");
    for options in [&[][..], &["--cap-add", "ALL"], &["--privileged"]] {
        assert_stopped(&attack(&host, options, &["leave-root", mark]));
    }
    assert_broken(&attack_on_host(&host, &["leave-root", mark]), "a container");
    let _ = std::fs::remove_dir("/tmp/jail"); // made by the attack on the host
}

#[test]
fn vm_nothing_of_the_host_can_be_mounted() {
    let host = Host::with_attacks(dormouse());
    assert_stopped(&attack(&host, &[], &["mount-host"]));
    // In a mount namespace of its own, so that the host does not keep what succeeds.
    let program = image::attack();
    let script = format!("unshare -m {} mount-host", program.display());
    assert_broken(&host.sh(&script), "a container");
    let _ = std::fs::remove_dir("/tmp/mnt"); // made by the attack on the host
}

#[test]
fn vm_terminals_of_others_are_not_there() {
    let host = Host::with_attacks(dormouse());
    host.dm(&["run", "-dt", "--name", "victim", "attack", "sleep", "1000"]).ok();
    assert_stopped(&attack(&host, &[], &["open-node", "/dev/pts/0"]));
    assert_stopped(&attack(&host, &[], &["type", "/dev/console"]));
    assert_stopped(&attack(&host, &[], &["type", "/dev/tty1"]));
    assert_broken(&host.dm(&["exec", "victim", "attack", "open-node", "/dev/pts/0"]), "a wall");
}

#[test]
fn vm_descriptors_of_the_host_are_not_inherited() {
    let host = Host::with_attacks(dormouse());
    assert_stopped(&attack(&host, &["--net", "none"], &["leaked-fd"]));
    assert_stopped(&attack(&host, &[], &["leaked-fd"]));
    victim(&host, &["sleep", "1000"]);
    assert_stopped(&host.dm(&["exec", "victim", "attack", "leaked-fd"]));
    let script = format!("exec 7</; exec {} leaked-fd", image::attack().display());
    assert_broken(&host.sh(&script), "a container");
}

#[test]
fn vm_abstract_names_are_private() {
    only_stopped_by("dm_unix_connect,dm_unix_sendmsg", |host| {
        victim(host, &["attack", "abstract-listen", "name"]);
        let script = "until grep -q @name /proc/net/unix; do sleep 0.1; done";
        host.wait_inside("victim", script);
        attack(host, &[], &["abstract-connect", "name"])
    });
}

#[test]
fn vm_addresses_of_others_cannot_be_taken() {
    only_stopped_by("dm_bind4", |host| {
        victim(host, &["sleep", "1000"]);
        attack(host, &[], &["tcp-bind", &host.address_of("victim"), "7000"])
    });
}

#[test]
fn vm_loopback_is_private_to_the_container() {
    let host = Host::with_attacks(dormouse());
    victim(&host, &["probe", "who", "127.0.0.1", "7000"]);
    host.wait_inside("victim", "attack tcp-connect 127.0.0.1 7000");
    assert_stopped(&attack(&host, &[], &["tcp-connect", "127.0.0.1", "7000"]));
    assert_stopped(&attack_on_host(&host, &["tcp-connect", "127.0.0.1", "7000"]));
    // What the host's own loopback offers is not offered to containers.
    let mut service = host
        .command(image::probe())
        .args(["who", "127.0.0.1", "7001"])
        .spawn()
        .expect("nsenter starts");
    let up = || attack_on_host(&host, &["tcp-connect", "127.0.0.1", "7001"]).status == BROKEN;
    assert!(dormouse_testkit::wait_until(std::time::Duration::from_secs(5), up));
    let out = attack(&host, &[], &["tcp-connect", "127.0.0.1", "7001"]);
    service.kill().and_then(|()| service.wait()).expect("it can be ended");
    assert_stopped(&out);
}

#[test]
fn vm_sockets_that_see_the_wire_are_refused() {
    let host = Host::with_attacks(dormouse());
    // packet, raw ICMP, raw of any protocol, SOCK_DIAG, vsock, AF_ALG.
    for kind in [
        ["17", "3", "3"],
        ["2", "3", "1"],
        ["2", "3", "255"],
        ["16", "3", "4"],
        ["40", "1", "0"],
        ["38", "5", "0"],
    ] {
        assert_stopped(&attack(&host, &[], &[&["socket"][..], &kind].concat()));
    }
    assert_broken(&attack_on_host(&host, &["socket", "17", "3", "3"]), "a container");
    assert_broken(&attack_on_host(&host, &["socket", "2", "3", "255"]), "a container");
}

#[test]
fn vm_a_listener_without_address_gets_no_caller_of_others() {
    only_stopped_by("dm_ingress,dm_egress", |host| {
        // The thief listens at a port the kernel chose; the victim calls its own address there.
        victim(host, &["sleep", "1000"]);
        host.dm(&["run", "-d", "--name", "thief", "attack", "attack", "listen-unbound"]).ok();
        let mut port = String::new();
        dormouse_testkit::wait_until(std::time::Duration::from_secs(5), || {
            port = host.dm(&["logs", "thief"]).stdout.lines().next().unwrap_or("").to_owned();
            !port.is_empty()
        });
        let own = host.address_of("victim");
        let _ = host.dm(&["exec", "victim", "attack", "tcp-connect", &own, &port]);
        let mut out = host.dm(&["wait", "thief"]);
        out.status = out.stdout.trim().parse().expect("wait prints a status");
        out
    });
}

#[test]
fn vm_nested_user_namespaces_still_work() {
    // A protection that forbids it would be the easy way out: many programs need it.
    let host = Host::with_attacks(dormouse());
    let out = host.dm(&["run", "--rm", "-u", "user", "attack", "unshare", "-Ur", "id", "-u"]);
    assert_eq!(out.ok(), "0");
}
