//! Nothing of the host or of another container is visible, signalable, traceable, connectable,
//! mountable or writable from inside.
//!
//! Each test runs an attack (`inside/attack.c`) several ways. On the shipped program the attack
//! must be *stopped*. Then it must *succeed* on the build of the same source in which that one
//! protection can be left out (feature `weaken`): a test cannot pass because its attack is wrong.
//! Where two protections stop an attack, each alone must stop it, and both must be left out. Under
//! emulation a separate host for each run takes ten seconds, so only the shipped program is
//! attacked there. Runs on the machine itself prove the attacks.
//!
//! Some attacks succeed elsewhere instead, because the protection is not a separate step: a leaked
//! descriptor (one call closes all), the files of `/dev` and `/dev/shm` (those of another container
//! are not there), the loopback of others and the sockets of another domain (they are in another
//! network namespace, or have another address by translation).

use std::path::PathBuf;
use std::time::Duration;

use dormouse_testkit::{
    Host, Output, dormouse, image, run, slowness, soon, wait_until, weak_dormouse,
};

const BROKEN: i32 = 0;
const STOPPED: i32 = 1;

/// Runs one attack in a new container.
fn attack(host: &Host, options: &[&str], words: &[&str]) -> Output {
    host.dm(&[&["run", "--rm"], options, &["attack", "attack"], words].concat())
}

/// Runs an attack on the host itself, as root.
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

/// Runs a scenario on two hosts: with the shipped program, and with the program that lacks
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

/// The same where each of two protections suffices.
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

/// Waits until the container has printed a line, and returns it.
fn first_line(host: &Host, container: &str) -> String {
    let mut line = String::new();
    wait_until(Duration::from_secs(5) * slowness(), || {
        line = host.dm(&["logs", container]).stdout.lines().next().unwrap_or("").to_owned();
        !line.is_empty()
    });
    line
}

/// Returns the exit status of a container whose program is the attack.
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
fn vm_seccomp_refuses_io_uring() {
    only_stopped_by("seccomp", |host| attack(host, &["--net", "none"], &["io-uring"]));
}

#[test]
fn vm_seccomp_refuses_long_turns() {
    only_stopped_by("seccomp", |host| attack(host, &["--net", "none"], &["long-turns"]));
}

#[test]
fn vm_seccomp_holds_while_a_checkpoint_is_taken() {
    only_stopped_by("seccomp", |host| {
        victim(host, &["attack", "filter-gap"]);
        first_line(host, "victim");
        for _ in 0..20 {
            // It fails where the attack has succeeded and ended.
            host.dm(&["checkpoint", "--leave-running", "victim"]);
        }
        host.dm(&["kill", "--signal", "TERM", "victim"]);
        outcome(host, "victim")
    });
}

#[test]
fn vm_capabilities_are_reduced() {
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
fn vm_system_v_memory_is_private() {
    only_stopped_by("ipc-namespace", |host| {
        victim(host, &["attack", "shm-make", "4242"]);
        std::thread::sleep(Duration::from_millis(300));
        let out = attack(host, &[], &["shm-find", "4242"]);
        attack_on_host(host, &["ipc-remove", "4242", "/none"]);
        out
    });
}

#[test]
fn vm_message_queues_are_private() {
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
fn vm_every_namespace_is_private() {
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
fn vm_cgroup_paths_are_relative_to_container() {
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
fn vm_keyring_of_caller_is_not_inherited() {
    // Two protections: seccomp refuses keyctl, and the session keyring is another.
    let scenario = |host: &Host| {
        let program = image::attack();
        let mut command = host.command(&program);
        command.args(["with-key", "house"]);
        let inner =
            host.dormouse(&["run", "--rm", "--net", "none", "attack", "attack", "find-key"]);
        // The nsenter at the start of `inner` changes nothing.
        command.arg(inner.get_program()).args(inner.get_args()).arg("house");
        for (name, value) in inner.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        run(command, b"", Duration::from_secs(30))
    };
    stopped_by_either("keyring", "seccomp", scenario);
}

#[test]
fn vm_proc_files_about_host_are_masked() {
    only_stopped_by("masked-paths", |host| attack(host, &[], &["read-file", "/proc/interrupts"]));
}

#[test]
fn vm_sys_is_read_only() {
    only_stopped_by("read-only-sys", |host| attack(host, &[], &["read-only", "/sys"]));
}

#[test]
fn vm_host_files_cannot_be_written() {
    let host = Host::with_attacks(dormouse());
    for options in [&[][..], &["--net", "none"], &["--privileged"], &["--cap-add", "ALL"]] {
        assert_stopped(&attack(&host, options, &["host-files"]));
    }
    only_stopped_by("user-namespace", |host| attack(host, &[], &["host-files"]));
}

#[test]
fn vm_root_inside_cannot_read_host_files() {
    // A bind mount without mapped ids shows the ids of the host.
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
fn vm_device_nodes_cannot_be_created() {
    only_stopped_by("user-namespace", |host| {
        attack(host, &["--cap-add", "MKNOD"], &["make-device"])
    });
}

#[test]
fn vm_host_device_events_are_not_received() {
    let scenario = |host: &Host, net: &str| {
        let words = ["run", "-d", "--name", "listener", "--net", net, "attack", "attack"];
        host.dm(&[&words[..], &["device-events", "/mem/null"]].concat()).ok();
        first_line(host, "listener");
        // The host's root triggers another event of /dev/null.
        std::fs::write("/sys/class/mem/null/uevent", "change").expect("root writes to sysfs");
        outcome(host, "listener")
    };
    only_stopped_by("network-owner", |host| scenario(host, "address"));
    only_stopped_by("user-namespace", |host| scenario(host, "none"));
    only_stopped_by("seccomp", |host| scenario(host, "host"));
}

#[test]
fn vm_other_processes_cannot_be_seen_signalled_or_traced() {
    only_stopped_by("pid-namespace", |host| {
        victim(host, &["sleep", "54321"]);
        attack(host, &[], &["find-process", "sleep 54321"])
    });
    // A process in another pid namespace has no number for the target, and one with other ids lacks
    // permission.
    let scenario = |host: &Host, options: &[&str], words: &dyn Fn(u64) -> Vec<String>| {
        victim(host, &["sleep", "54321"]);
        let words = words(host.inspect("victim")["pid"].as_u64().expect("the process runs"));
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
    // All other numbers name no process either. (Without a pid namespace, some would belong to
    // containers of another instance with the same ids.)
    let host = Host::with_attacks(dormouse());
    assert_stopped(&scenario(&host, &[], &|pid| signal(2, pid + 1)));
    stopped_by_either("pid-namespace", "user-namespace", |host| {
        let trace = |pid: u64| vec!["trace".into(), pid.to_string()];
        scenario(host, &["--cap-add", "ALL"], &trace)
    });
}

#[test]
fn vm_container_root_cannot_be_left() {
    let host = Host::with_attacks(dormouse());
    let mark = host.dir().join("mark");
    std::fs::write(&mark, "of the host").expect("written");
    let mark = mark.to_str().expect("UTF-8");
    for options in [&[][..], &["--cap-add", "ALL"], &["--privileged"]] {
        assert_stopped(&attack(&host, options, &["leave-root", mark]));
    }
    // Two containers in one mount namespace, that of the keeper: the root of the later one is
    // mounted on that of the earlier one, which finds it on the way up. Without capabilities over
    // that namespace no root could be mounted in it. So the user namespace is left out, too, and
    // alone.
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
fn vm_host_filesystems_cannot_be_mounted() {
    // Not even with every capability over a user namespace of its own. Mounts that succeed without
    // the protections stay in the container's mount namespace.
    stopped_by_either("user-namespace", "capabilities", |host| attack(host, &[], &["mount-host"]));
}

#[test]
fn vm_terminal_input_cannot_be_injected() {
    // KERNEL(6.2): where dev.tty.legacy_tiocsti is 0, TIOCSTI needs CAP_SYS_ADMIN of the host, so
    // the user namespace is left out, too. The attack uses its own terminal: an operator may read
    // the injected input there.
    let legacy = std::fs::read_to_string("/proc/sys/dev/tty/legacy_tiocsti").unwrap_or_default();
    let without = if legacy.trim() == "0" { "seccomp,user-namespace" } else { "seccomp" };
    only_stopped_by(without, |host| {
        let words = ["run", "-dt", "--name", "typist", "--cap-add", "SYS_ADMIN", "attack"];
        host.dm(&[&words[..], &["attack", "type", "/dev/tty"]].concat()).ok();
        outcome(host, "typist")
    });
}

#[test]
fn vm_other_terminals_are_not_visible() {
    let host = Host::with_attacks(dormouse());
    host.dm(&["run", "-dt", "--name", "victim", "attack", "sleep", "1000"]).ok();
    assert_stopped(&attack(&host, &[], &["open-node", "/dev/pts/0"]));
    assert_stopped(&attack(&host, &[], &["type", "/dev/console"]));
    assert_stopped(&attack(&host, &[], &["type", "/dev/tty1"]));
    assert_broken(&host.dm(&["exec", "victim", "attack", "open-node", "/dev/pts/0"]), "a wall");
}

#[test]
fn vm_host_descriptors_are_not_inherited() {
    let host = Host::with_attacks(dormouse());
    assert_stopped(&attack(&host, &["--net", "none"], &["leaked-fd"]));
    assert_stopped(&attack(&host, &[], &["leaked-fd"]));
    victim(&host, &["sleep", "1000"]);
    assert_stopped(&host.dm(&["exec", "victim", "attack", "leaked-fd"]));
    let script = format!("exec 7</; exec {} leaked-fd", image::attack().display());
    assert_broken(&host.sh(&script), "a container");
}

#[test]
fn vm_abstract_unix_addresses_are_private() {
    only_stopped_by("dm_unix_sendmsg", |host| {
        victim(host, &["attack", "abstract-receive", "name"]);
        let script = "until grep -q @name /proc/net/unix; do sleep 0.1; done";
        host.wait_inside("victim", script);
        attack(host, &[], &["abstract-send", "name"])
    });
    // Addresses that the kernel chose are in the list that the stack shows to all.
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
fn vm_other_addresses_cannot_be_bound() {
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
    // Services on the host's loopback are not available in containers.
    let mut service = host
        .command(image::probe())
        .args(["who", "127.0.0.1", "7001"])
        .spawn()
        .expect("busybox starts");
    let up = || attack_on_host(&host, &["tcp-connect", "127.0.0.1", "7001"]).status == BROKEN;
    assert!(wait_until(soon(), up));
    let out = attack(&host, &[], &["tcp-connect", "127.0.0.1", "7001"]);
    service.kill().and_then(|()| service.wait()).expect("it can be ended");
    assert_stopped(&out);
}

#[test]
fn vm_packet_and_raw_sockets_are_refused() {
    let packet = ["17", "3", "3"];
    stopped_by_either("seccomp", "user-namespace", |host| {
        attack(host, &["--cap-add", "NET_RAW"], &[&["socket"][..], &packet].concat())
    });
    // Raw sockets are also refused by the BPF program that checks every new socket. That program
    // creates domains, so it can be left out only together with them.
    for raw in [["2", "3", "1"], ["2", "3", "255"]] {
        let scenario = |host: &Host, net: &str| {
            let options = ["--cap-add", "NET_RAW", "--net", net];
            attack(host, &options, &[&["socket"][..], &raw].concat())
        };
        if let Some(host) = host_without("seccomp,user-namespace") {
            assert_stopped(&scenario(&host, "address"));
        }
        // For ICMP the filter sees only the number of the protocol, which ping uses, too.
        match raw[2] {
            "1" => only_stopped_by("user-namespace", |host| scenario(host, "host")),
            _ => stopped_by_either("seccomp", "user-namespace", |host| scenario(host, "host")),
        }
    }
}

#[test]
fn vm_uncommon_socket_families_are_refused() {
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
    // Sockets of the same domain are listed, as `check` reports.
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
fn vm_unbound_listener_gets_no_connections_of_others() {
    only_stopped_by("dm_ingress,dm_egress", |host| {
        // The thief listens at a port of the kernel's choice. The victim connects to its own
        // address there.
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
    // A protection that forbids user namespaces would be too easy: many programs need them.
    let host = Host::with_attacks(dormouse());
    let out = host.dm(&["run", "--rm", "-u", "user", "attack", "unshare", "-Ur", "id", "-u"]);
    assert_eq!(out.ok(), "0");
}
