//! Nothing of the host or of another container is visible, signalable, traceable, connectable,
//! mountable or writable from inside.
//!
//! Each test runs an attack (`inside/attack.c`) several ways. On the shipped program it must be
//! *stopped*. Then it must *succeed*, so that the test cannot pass because the attack is wrong: on
//! the build of the same source in which that one protection can be left out (feature `weaken`).
//! Where there are two locks on a door, each alone must stop it, and both must be left out. Under
//! emulation, where a host of its own for each arm takes ten seconds, only the shipped program is
//! attacked: that the attacks are right is seen on the machine itself.
//!
//! Some succeed elsewhere instead, because what stops them is no step that could be left out: a
//! leaked descriptor (one call closes all), the files of `/dev` and `/dev/shm` (another's are not
//! there to be taken away), the loopback of others and the sockets of another domain (they are of
//! another network namespace, or have another address by arithmetic).

use std::path::PathBuf;
use std::time::Duration;

use dormouse_testkit::{Host, Output, dormouse, image, run, slowness, wait_until, weak_dormouse};

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
    run(command, b"", Duration::from_secs(20))
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
    if is_emulated() {
        return;
    }
    if let Some(host) = host_without(protections) {
        assert_broken(&scenario(&host), protections);
    }
}

/// The same where each of two protections would do.
#[track_caller]
fn stopped_by_either(one: &str, other: &str, scenario: impl Fn(&Host) -> Output) {
    if !is_emulated() {
        for host in [one, other].into_iter().filter_map(host_without) {
            assert_stopped(&scenario(&host));
        }
    }
    only_stopped_by(&format!("{one},{other}"), scenario);
}

fn is_emulated() -> bool {
    slowness() > 1
}

/// A host whose program lacks these protections, where the control arms are built.
fn host_without(protections: &str) -> Option<Host> {
    let mut host = Host::with_attacks(weak_dormouse()?);
    host.set_env("DORMOUSE_WEAKEN", protections);
    Some(host)
}

/// Waits until the container has said a line, and returns it.
fn first_line(host: &Host, container: &str) -> String {
    let mut line = String::new();
    wait_until(Duration::from_secs(5) * slowness(), || {
        line = host.dm(&["logs", container]).stdout.lines().next().unwrap_or("").to_owned();
        !line.is_empty()
    });
    line
}

/// How the attack that is the program of a container ended.
#[track_caller]
fn outcome(host: &Host, container: &str) -> Output {
    let mut out = host.dm(&["wait", container]);
    out.status = out.stdout.trim().parse().expect("wait prints a status");
    out.stdout = host.dm(&["logs", container]).stdout;
    out
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
        std::thread::sleep(Duration::from_millis(300));
        let out = attack(host, &[], &["shm-find", "4242"]);
        attack_on_host(host, &["ipc-remove", "4242", "/none"]);
        out
    });
}

#[test]
fn vm_message_queues_of_another_are_not_found() {
    only_stopped_by("ipc-namespace", |host| {
        victim(host, &["attack", "mq-make", "/queue"]);
        std::thread::sleep(Duration::from_millis(300));
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
fn vm_every_namespace_is_its_own() {
    let shipped = Host::with_attacks(dormouse());
    let mut weak = weak_dormouse().map(Host::with_attacks);
    for kind in ["cgroup", "ipc", "pid", "time", "user", "uts"] {
        let own = shipped.sh(&format!("stat -L -c %i /proc/self/ns/{kind}")).ok();
        let words = ["same-namespace", kind, &own];
        assert_stopped(&attack(&shipped, &[], &words));
        let protection = format!("{kind}-namespace");
        if let Some(weak) = &mut weak {
            weak.set_env("DORMOUSE_WEAKEN", &protection);
            assert_broken(&attack(weak, &[], &words), &protection);
        }
    }
}

#[test]
fn vm_cgroups_are_seen_from_inside() {
    only_stopped_by("cgroup-namespace", |host| attack(host, &[], &["cgroup-path"]));
}

#[test]
fn vm_clocks_cannot_be_set() {
    only_stopped_by("user-namespace", |host| {
        attack(host, &["--cap-add", "SYS_TIME"], &["set-clock"])
    });
    assert_stopped(&attack(&Host::with_attacks(dormouse()), &[], &["set-clock"]));
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
        run(command, b"", Duration::from_secs(30))
    };
    stopped_by_either("keyring", "seccomp", scenario);
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
    only_stopped_by("user-namespace", |host| attack(host, &[], &["host-files"]));
}

#[test]
fn vm_root_inside_is_nobody_to_files_of_the_host() {
    // A bind mount whose ids are not mapped shows them as they are.
    only_stopped_by("user-namespace", |host| {
        let dir = host.dir().join("bound");
        std::fs::create_dir(&dir).expect("made");
        let script = format!("umask 077 && echo secret >{}/file", dir.display());
        host.sh(&script).ok();
        let bind = format!("{}:/bound:noidmap", dir.display());
        attack(host, &["-v", &bind], &["read-file", "/bound/file"])
    });
}

#[test]
fn vm_devices_cannot_be_made() {
    only_stopped_by("user-namespace", |host| {
        attack(host, &["--cap-add", "MKNOD"], &["make-device"])
    });
}

#[test]
fn vm_events_of_the_hosts_devices_are_not_heard() {
    let scenario = |host: &Host, net: &str| {
        let words = ["run", "-d", "--name", "ear", "--net", net, "attack", "attack"];
        host.dm(&[&words[..], &["device-events", "/mem/null"]].concat()).ok();
        first_line(host, "ear");
        // The host's root has the kernel tell of /dev/null once more.
        std::fs::write("/sys/class/mem/null/uevent", "change").expect("root may");
        outcome(host, "ear")
    };
    only_stopped_by("network-owner", |host| scenario(host, "address"));
    only_stopped_by("user-namespace", |host| scenario(host, "none"));
    only_stopped_by("seccomp", |host| scenario(host, "host"));
}

#[test]
fn vm_processes_of_others_are_neither_seen_nor_signalled_nor_traced() {
    only_stopped_by("pid-namespace", |host| {
        victim(host, &["sleep", "54321"]);
        attack(host, &[], &["find-process", "sleep 54321"])
    });
    // Who has no name for it cannot signal it, and neither can who is somebody else.
    let scenario = |host: &Host, options: &[&str], words: &dyn Fn(u64) -> Vec<String>| {
        victim(host, &["sleep", "54321"]);
        let words = words(host.inspect("victim")["pid"].as_u64().expect("it runs"));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let out = attack(host, options, &words);
        assert_eq!(host.state_of("victim"), "running");
        out
    };
    let signal = |first: u64, limit: u64| {
        vec!["signal-any".to_owned(), first.to_string(), limit.to_string()]
    };
    stopped_by_either("pid-namespace", "user-namespace", |host| {
        scenario(host, &[], &|pid| signal(pid, pid + 1))
    });
    // Of all other numbers, too, none is anybody. (Without its namespace some would be those of containers that
    // are none of this instance's, whose ids it may have.)
    let host = Host::with_attacks(dormouse());
    assert_stopped(&scenario(&host, &[], &|pid| signal(2, pid + 1)));
    stopped_by_either("pid-namespace", "user-namespace", |host| {
        let trace = |pid: u64| vec!["trace".into(), pid.to_string()];
        scenario(host, &["--cap-add", "ALL"], &trace)
    });
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
    // Two containers in one mount namespace, that of the keeper: there the root of the later one
    // lies on that of the earlier one, who finds it on the way up. Without capabilities over that
    // namespace no root could be put into it, so the user namespace is left out, too, and alone.
    let scenario = |host: &Host| {
        let gate = host.dir().join("gate");
        std::fs::create_dir(&gate).expect("made");
        let bind = format!("{}:/gate:noidmap", gate.display());
        let script = "until test -e /gate/open; do sleep 0.1; done; attack leave-root /root/mark";
        let words = ["run", "-d", "--name", "thief", "-v", &bind, "attack", "sh", "-c", script];
        host.dm(&words).ok();
        victim(host, &["sh", "-c", "touch /root/mark; echo ready; exec sleep 1000"]);
        assert_eq!(first_line(host, "victim"), "ready");
        std::fs::write(gate.join("open"), "").expect("written");
        outcome(host, "thief")
    };
    if let Some(host) = host_without("user-namespace") {
        assert_stopped(&scenario(&host));
    }
    only_stopped_by("mount-namespace,user-namespace", scenario);
}

#[test]
fn vm_nothing_of_the_host_can_be_mounted() {
    // Not even by who has every capability, over its own user namespace. What succeeds without
    // stays in the container's mount namespace.
    stopped_by_either("user-namespace", "capabilities", |host| attack(host, &[], &["mount-host"]));
}

#[test]
fn vm_nobody_types_into_a_terminal() {
    // KERNEL(6.2): where the host has forbidden it to all but its own administrator, that is the
    // one to be. One's own terminal will do: what is typed there, an operator may have to read.
    let legacy = std::fs::read_to_string("/proc/sys/dev/tty/legacy_tiocsti").unwrap_or_default();
    let without = if legacy.trim() == "0" { "seccomp,user-namespace" } else { "seccomp" };
    only_stopped_by(without, |host| {
        let words = ["run", "-dt", "--name", "typist", "--cap-add", "SYS_ADMIN", "attack"];
        host.dm(&[&words[..], &["attack", "type", "/dev/tty"]].concat()).ok();
        outcome(host, "typist")
    });
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
    only_stopped_by("dm_unix_sendmsg", |host| {
        victim(host, &["attack", "abstract-receive", "name"]);
        let script = "until grep -q @name /proc/net/unix; do sleep 0.1; done";
        host.wait_inside("victim", script);
        attack(host, &[], &["abstract-send", "name"])
    });
    // A name that the kernel chose is found in the list that the stack shows to all.
    only_stopped_by("dm_unix_connect", |host| {
        victim(host, &["attack", "abstract-autobind"]);
        host.wait_inside("victim", "until grep -q @ /proc/net/unix; do sleep 0.1; done");
        attack(host, &[], &["abstract-connect-any"])
    });
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
        .expect("busybox starts");
    let up = || attack_on_host(&host, &["tcp-connect", "127.0.0.1", "7001"]).status == BROKEN;
    assert!(wait_until(Duration::from_secs(5) * slowness(), up));
    let out = attack(&host, &[], &["tcp-connect", "127.0.0.1", "7001"]);
    service.kill().and_then(|()| service.wait()).expect("it can be ended");
    assert_stopped(&out);
}

#[test]
fn vm_sockets_that_see_the_wire_are_refused() {
    let packet = ["17", "3", "3"];
    stopped_by_either("seccomp", "user-namespace", |host| {
        attack(host, &["--cap-add", "NET_RAW"], &[&["socket"][..], &packet].concat())
    });
    // Raw ones are refused by the program that sees every new socket, too. It is what makes a domain,
    // so that it can only be left out together with that.
    for raw in [["2", "3", "1"], ["2", "3", "255"]] {
        let scenario = |host: &Host, net: &str| {
            let options = ["--cap-add", "NET_RAW", "--net", net];
            attack(host, &options, &[&["socket"][..], &raw].concat())
        };
        if let Some(host) = host_without("seccomp,user-namespace") {
            assert_stopped(&scenario(&host, "address"));
        }
        // Of ICMP the filter sees the number of the protocol, which ping uses, too.
        match raw[2] {
            "1" => only_stopped_by("user-namespace", |host| scenario(host, "host")),
            _ => stopped_by_either("seccomp", "user-namespace", |host| scenario(host, "host")),
        }
    }
}

#[test]
fn vm_sockets_of_other_kinds_are_refused() {
    // SOCK_DIAG, vsock, AF_ALG, XDP, the last three where the kernel has them.
    let here = Host::new();
    for kind in [["16", "3", "4"], ["40", "1", "0"], ["38", "5", "0"], ["44", "3", "0"]] {
        let words = [&["socket"][..], &kind].concat();
        let scenario = |host: &Host| attack(host, &["--cap-add", "NET_RAW"], &words);
        if attack_on_host(&here, &words).status == BROKEN && kind[0] != "44" {
            only_stopped_by("seccomp", scenario);
        } else {
            assert_stopped(&scenario(&Host::with_attacks(dormouse())));
            eprintln!("NO CONTROL: this kernel has no sockets {kind:?}");
        }
    }
}

#[test]
fn vm_sockets_of_another_domain_are_not_listed() {
    // In one domain they are, which `check` says.
    let scenario = |domain: &str| {
        let host = Host::with_attacks(dormouse());
        let words = ["--domain", "red", "attack", "probe", "who", "0.0.0.0", "7123"];
        host.dm(&[&["run", "-d", "--name", "victim"][..], &words].concat()).ok();
        host.wait_inside("victim", "attack find-listener 7123");
        attack(&host, &["--domain", domain], &["find-listener", "7123"])
    };
    assert_stopped(&scenario("blue"));
    assert_broken(&scenario("red"), "a domain of its own");
}

#[test]
fn vm_a_listener_without_address_gets_no_caller_of_others() {
    only_stopped_by("dm_ingress,dm_egress", |host| {
        // The thief listens at a port the kernel chose; the victim calls its own address there.
        victim(host, &["sleep", "1000"]);
        host.dm(&["run", "-d", "--name", "thief", "attack", "attack", "listen-unbound"]).ok();
        let port = first_line(host, "thief");
        let own = host.address_of("victim");
        let _ = host.dm(&["exec", "victim", "attack", "tcp-connect", &own, &port]);
        outcome(host, "thief")
    });
}

#[test]
fn vm_nested_user_namespaces_still_work() {
    // A protection that forbids it would be the easy way out: many programs need it.
    let host = Host::with_attacks(dormouse());
    let out = host.dm(&["run", "--rm", "-u", "user", "attack", "unshare", "-Ur", "id", "-u"]);
    assert_eq!(out.ok(), "0");
}
