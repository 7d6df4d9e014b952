//! Kernel objects of which a host has one number for all: tasks, sockets, asynchronous I/O, System V. A container takes
//! no more of them than its limits permit, and its neighbours go on.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use dormouse_testkit::{Host, soon, wait_until};
use serde_json::Value;

/// A container that does nothing.
#[track_caller]
fn idle(host: &Host, name: &str, options: &[&str]) {
    let run = ["run", "-d", "--name", name];
    host.dm(&[&run[..], options, &["busybox", "sleep", "1000"]].concat()).ok();
}

/// A reading of a running container.
#[track_caller]
fn stats(host: &Host, name: &str) -> Value {
    let text = host.dm(&["stats", "--no-stream", "--json", name]).ok();
    let rows: Value = serde_json::from_str(&text).expect("JSON");
    rows[0].clone()
}

/// The limit of tasks in the kernel, and as podman's `inspect` has it.
#[track_caller]
fn tasks(host: &Host, name: &str) -> (Option<u64>, String) {
    let shown = host.dm(&["inspect", "-f", "{{.HostConfig.PidsLimit}}", name]).ok();
    (stats(host, name)["pids_max"].as_u64(), shown)
}

fn set_config(host: &Host, text: &str) {
    let path = host.root().join("etc/config.toml");
    fs::write(path, format!("[keeper]\nlinger = \"0s\"\n{text}")).expect("written");
}

#[test]
fn vm_container_has_2048_tasks_unless_an_option_or_a_setting_says_otherwise() {
    let host = Host::with_busybox();
    let none = (None, "0".to_owned());
    for (name, options, expected) in [
        ("plain", &[][..], (Some(2048), "2048".to_owned())),
        ("privileged", &["--privileged"], (Some(2048), "2048".to_owned())),
        ("few", &["--pids", "100"], (Some(100), "100".to_owned())),
        ("zero", &["--pids", "0"], none.clone()),
        ("podman", &["--pids-limit", "-1"], none.clone()),
    ] {
        idle(&host, name, options);
        assert_eq!(tasks(&host, name), expected, "{name}");
    }
    host.dm(&["update", "--pids", "0", "plain"]).ok();
    assert_eq!(tasks(&host, "plain"), none);
    host.dm(&["update", "--pids", "77", "zero"]).ok();
    assert_eq!(tasks(&host, "zero"), (Some(77), "77".to_owned()));
    // A setting is for new containers.
    set_config(&host, "[run]\npids = 300\n");
    host.dm(&["restart", "-t", "0", "podman"]).ok();
    assert_eq!(tasks(&host, "podman"), none);
    idle(&host, "new", &[]);
    assert_eq!(tasks(&host, "new"), (Some(300), "300".to_owned()));
    set_config(&host, "[run]\npids = 0\n");
    idle(&host, "unlimited", &[]);
    assert_eq!(tasks(&host, "unlimited"), none);
    set_config(&host, "[run]\npids = -7\n");
    let refused = host.dm(&["run", "--rm", "busybox", "true"]);
    assert!(refused.status != 0 && refused.stderr.contains("pids"), "{refused}");
}

#[test]
fn vm_limit_of_tasks_is_kept_over_sleep_and_clone() {
    let host = Host::with_busybox();
    idle(&host, "default", &[]);
    idle(&host, "none", &["--pids", "0"]);
    for name in ["default", "none"] {
        let before = tasks(&host, name);
        host.put_to_sleep(name);
        host.dm(&["wake", name]).ok();
        assert_eq!(tasks(&host, name), before, "{name} after its wake");
        let copy = format!("{name}-2");
        host.dm(&["clone", "--name", &copy, name]).ok();
        assert_eq!(tasks(&host, &copy), before, "{copy}");
    }
}

#[test]
fn vm_default_of_tasks_stops_a_fork_bomb() {
    let host = Host::with_busybox();
    set_config(&host, "[run]\npids = 40\n");
    idle(&host, "neighbour", &[]);
    let bomb = "n=0; while [ $n -lt 100 ]; do sleep 1000 & n=$((n+1)); done";
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", bomb]).ok();
    let refused = || host.dm(&["logs", "a"]).stderr.contains("fork");
    assert!(wait_until(soon(), refused), "{}", host.dm(&["logs", "a"]));
    host.dm(&["exec", "neighbour", "true"]).ok();
}

/// The sockets of a container as they are counted.
#[track_caller]
fn sockets(host: &Host, name: &str) -> Option<u64> {
    stats(host, name)["sockets"].as_u64()
}

#[track_caller]
fn await_sockets(host: &Host, name: &str, expected: u64) {
    let mut last = None;
    let reached = wait_until(soon(), || {
        last = sockets(host, name);
        last == Some(expected)
    });
    assert!(reached, "'{name}' has {last:?} sockets, not {expected}");
}

/// A server that keeps its connections until the client closes them.
#[track_caller]
fn server(host: &Host, name: &str, options: &[&str]) -> SocketAddr {
    let run = ["run", "-d", "--name", name];
    let hold = ["busybox", "probe", "hold", "0.0.0.0", "80"];
    host.dm(&[&run[..], options, &hold].concat()).ok();
    host.wait_inside(name, "grep -q :0050 /proc/net/tcp");
    let address = host.address_of(name).parse().expect("an address");
    SocketAddr::new(address, 80)
}

/// Connections from the host.
#[track_caller]
fn connect(host: &Host, to: SocketAddr, count: usize) -> Vec<TcpStream> {
    let dial = move || (0..count).map(|_| TcpStream::connect(to)).collect::<Result<Vec<_>, _>>();
    host.in_network(dial).join().expect("no panic").expect("connections")
}

/// Opens up to 100 sockets inside, and returns the report.
#[track_caller]
fn take(host: &Host, name: &str) -> String {
    host.dm(&["exec", name, "probe", "sockets", "100", "0"]).ok()
}

#[test]
fn vm_sockets_are_counted_with_accepted_ones_and_refused_at_the_limit() {
    let host = Host::with_busybox();
    let to = server(&host, "a", &["--sockets", "20"]);
    idle(&host, "neighbour", &[]);
    await_sockets(&host, "a", 1);
    assert_eq!(stats(&host, "a")["sockets_max"].as_u64(), Some(20));
    let clients = connect(&host, to, 5);
    await_sockets(&host, "a", 6);
    assert_eq!(take(&host, "a"), "14 Too many open files");
    assert_eq!(take(&host, "neighbour"), "100 Success", "it has no limit");
    assert_eq!(sockets(&host, "neighbour"), None);
    await_sockets(&host, "a", 6);
    drop(clients);
    await_sockets(&host, "a", 1);
    // Both ends of a connection inside are the container's.
    let dial = "sleep 1000 | nc 127.0.0.1 80";
    host.dm(&["exec", "-d", "a", "sh", "-c", dial]).ok();
    await_sockets(&host, "a", 3);
    let shown =
        host.dm(&["inspect", "-f", "{{.Dormouse.SocketsLimit}} {{.Dormouse.Sockets}}", "a"]);
    assert_eq!(shown.ok(), "20 3");
    host.dm(&["update", "--sockets", "30", "a"]).ok();
    assert_eq!(take(&host, "a"), "27 Too many open files");
    host.dm(&["update", "--sockets", "0", "a"]).ok();
    assert_eq!(take(&host, "a"), "100 Success");
    host.dm(&["update", "--sockets", "10", "a"]).ok();
    assert_eq!(take(&host, "a"), "7 Too many open files");
    host.dm(&["restart", "-t", "0", "a"]).ok();
    host.wait_inside("a", "grep -q :0050 /proc/net/tcp");
    await_sockets(&host, "a", 1);
}

#[test]
fn vm_client_of_a_container_at_its_limit_waits_until_a_socket_is_closed() {
    let host = Host::with_busybox();
    let to = server(&host, "a", &["--sockets", "10"]);
    let clients = connect(&host, to, 4);
    host.dm(&["exec", "-d", "a", "probe", "sockets", "100", "1000"]).ok();
    await_sockets(&host, "a", 10);
    let refused = host.in_network(move || {
        let one = TcpStream::connect_timeout(&to, Duration::from_millis(1500));
        one.err().map(|e| e.kind())
    });
    assert_eq!(refused.join().expect("no panic"), Some(std::io::ErrorKind::TimedOut));
    assert_eq!(sockets(&host, "a"), Some(10), "no more than the limit");
    let late = host.in_network(move || TcpStream::connect(to).is_ok());
    // Connections that are there go on, and their end makes room.
    drop(clients);
    assert!(late.join().expect("no panic"), "the client repeats its packet");
}

#[test]
fn vm_count_of_sockets_is_right_after_a_wake_a_restore_and_in_a_clone() {
    let host = Host::with_busybox();
    let to = server(&host, "a", &["--sockets", "6"]);
    let clients = connect(&host, to, 5);
    await_sockets(&host, "a", 6);
    for _ in 0..2 {
        host.put_to_sleep("a");
        host.dm(&["wake", "a"]).ok();
        // At its limit, it wakes, with all of them.
        await_sockets(&host, "a", 6);
        assert_eq!(take(&host, "a"), "0 Too many open files");
    }
    drop(clients);
    await_sockets(&host, "a", 1);
    host.put_to_sleep("a");
    let clients = connect(&host, to, 3); // wakes it
    host.wait_for_state("a", "running");
    await_sockets(&host, "a", 4);
    assert_eq!(take(&host, "a"), "2 Too many open files");
    drop(clients);
    await_sockets(&host, "a", 1);
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["clone", "--name", "b", "a"]).ok();
    host.dm(&["stop", "-t", "0", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    for name in ["a", "b"] {
        await_sockets(&host, name, 1);
        assert_eq!(take(&host, name), "5 Too many open files", "{name}");
    }
}

#[test]
fn vm_limit_of_sockets_holds_in_every_network_and_counts_no_refused_socket() {
    let host = Host::with_busybox();
    // ORDER: the first one is counted before the programs of addresses are there.
    for net in ["none", "host", "private", "address"] {
        idle(&host, net, &["--net", net, "--sockets", "10"]);
        assert_eq!(take(&host, net), "10 Too many open files", "{net}");
    }
    // The filter of `exec --privileged` permits protocols that address mode refuses. ORDER: a program that counts them
    // before they are refused counts them for ever.
    for net in ["address", "none"] {
        let opened = host.dm(&["exec", "--privileged", net, "probe", "refused", "30"]).ok();
        if net == "address" {
            assert_eq!(opened, "0", "address mode has neither MPTCP nor UDP-Lite");
        }
        assert_eq!(take(&host, net), "10 Too many open files", "{net} after refused sockets");
    }
    let nested =
        ["exec", "--privileged", "address", "unshare", "-n", "probe", "sockets", "100", "0"];
    assert_eq!(host.dm(&nested).ok(), "10 Too many open files", "in a stack inside");
}

#[test]
fn sockets_of_a_killed_server_and_of_a_closed_listener_are_counted_back() {
    let host = Host::with_busybox();
    idle(&host, "a", &["--sockets", "50"]);
    let address = host.address_of("a").parse().expect("an address");
    let to = SocketAddr::new(address, 80);
    for _ in 0..3 {
        // Connections that are never accepted: the server is stopped first.
        let run = "probe hold 0.0.0.0 80 & p=$!; until grep -q :0050 /proc/net/tcp; do sleep 0.1; done; \
                   kill -STOP $p; echo $p >/pid";
        host.dm(&["exec", "-d", "a", "sh", "-c", run]).ok();
        host.wait_inside("a", "test -s /pid");
        let clients = connect(&host, to, 7);
        await_sockets(&host, "a", 8);
        let some = clients.into_iter().skip(3).collect::<Vec<_>>();
        host.dm(&["exec", "a", "sh", "-c", "kill -9 $(cat /pid); rm /pid"]).ok();
        await_sockets(&host, "a", 0);
        drop(some);
    }
}

#[test]
fn vm_asynchronous_io_is_refused_on_demand() {
    let host = Host::with_busybox();
    let aio = |options: &[&str]| {
        let run = [&["run", "--rm"][..], options, &["busybox", "probe", "aio", "8"]].concat();
        host.dm(&run)
    };
    assert_eq!(aio(&[]).ok(), "Success");
    assert_eq!(aio(&["--no-aio"]).ok(), "Function not implemented");
    for weak in
        [&["--no-aio", "--privileged"][..], &["--no-aio", "--security-opt", "seccomp=unconfined"]]
    {
        let refused = aio(weak);
        assert!(refused.status == 125 && refused.stderr.contains("--no-aio"), "{refused}");
    }
    idle(&host, "a", &["--no-aio"]);
    host.put_to_sleep("a");
    host.dm(&["wake", "a"]).ok();
    let inside = host.dm(&["exec", "a", "probe", "aio", "8"]);
    assert_eq!(inside.ok(), "Function not implemented", "after a wake, and by exec");
}

/// Mounts files over parameters of the host, and a directory over that of their values at a boot, in the test's own
/// mount namespace.
fn cover(host: &Host, values: &[(&str, &str)]) -> String {
    let dir = host.dir().join("parameters");
    fs::create_dir(&dir).expect("made");
    let mut script = String::from("mkdir -p /etc/sysctl.d; mount -t tmpfs none /etc/sysctl.d\n");
    for (name, value) in values {
        fs::write(dir.join(name), format!("{value}\n")).expect("written");
        let path = name.replace('.', "/");
        script += &format!("mount --bind {} /proc/sys/{path}\n", dir.join(name).display());
    }
    script
}

/// `dormouse check` without the command that enters the host's namespaces.
fn check(host: &Host) -> String {
    let command = host.dormouse(&["check"]);
    let words: Vec<_> =
        command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let program = words.iter().position(|word| word.ends_with("/dormouse")).expect("a program");
    words[program..].join(" ")
}

#[test]
fn check_reports_low_parameters_and_fix_raises_them_once() {
    let host = Host::new();
    let low = [
        ("kernel.pid_max", "32768"),
        ("kernel.threads-max", "9999999"),
        ("fs.aio-max-nr", "65536"),
        ("fs.inotify.max_user_instances", "100"),
    ];
    let cover = cover(&host, &low);
    let check = check(&host);
    let dir = host.dir().join("parameters");
    let read = |name: &str| fs::read_to_string(dir.join(name)).expect("read").trim().to_owned();
    let sh = |script: &str| host.sh(&format!("unshare -m sh -ec '{cover}{script}'"));
    let shown = sh(&check).stdout;
    let line = shown.lines().find(|line| line.starts_with("low") && line.contains("pid_max"));
    let line = line.unwrap_or_else(|| panic!("{shown}"));
    assert!(line.contains("32768") && line.contains("sysctl kernel.pid_max=65536"), "{line}");
    assert!(shown.contains("fs.aio-max-nr") && shown.contains("in use"), "{shown}");
    assert!(shown.contains("check --fix"), "{shown}");
    assert_eq!(read("kernel.pid_max"), "32768", "nothing is written without --fix");
    let fixed = sh(&format!(
        "{check} --fix; echo ---; cat /etc/sysctl.d/90-dormouse.conf; echo ---; {check} --fix; \
         ls -A /etc/sysctl.d"
    ));
    let text = fixed.ok();
    let parts: Vec<&str> = text.split("---\n").collect();
    assert!(parts[0].contains("sysctl kernel.pid_max=32768"), "how to undo it: {text}");
    assert!(
        parts[1].contains("kernel.pid_max = 65536") && parts[1].contains("fs.aio-max-nr = "),
        "{text}"
    );
    assert!(!parts[1].contains("threads-max"), "a large value is left alone: {text}");
    assert!(parts[2].starts_with("nothing to change"), "{text}");
    assert!(parts[2].trim_end().ends_with("90-dormouse.conf"), "{text}");
    let after = low.map(|(name, _)| read(name));
    assert_eq!(after, ["65536", "9999999", "1048576", "128"], "low values alone");
    // Refused: it cannot be written.
    let full = sh(&format!(
        "mount -o remount,ro /etc/sysctl.d; echo 1 >{}/fs.aio-max-nr; {check} --fix",
        dir.display()
    ));
    assert!(full.status != 0 && full.stderr.contains("90-dormouse.conf"), "{full}");
    assert_eq!(read("fs.aio-max-nr"), "1", "the file comes first");
}

/// A parameter of this host is raised and put back, if it is lower than needed.
#[test]
fn fix_raises_a_parameter_of_this_host_and_its_undo_puts_it_back() {
    let host = Host::new();
    let path = "/proc/sys/fs/aio-max-nr";
    let old = fs::read_to_string(path).expect("read").trim().to_owned();
    if old.parse::<u64>().is_ok_and(|old| old >= 1 << 20) {
        eprintln!("skipped: fs.aio-max-nr of this host is {old} already");
        return;
    }
    let cover = cover(&host, &[("kernel.pid_max", "4194304"), ("kernel.threads-max", "9999999")]);
    let fixed = host.sh(&format!("unshare -m sh -ec '{cover}{} --fix'", check(&host)));
    let during = fs::read_to_string(path).expect("read").trim().to_owned();
    fs::write(path, &old).expect("put back");
    assert!(fixed.ok().contains(&format!("sysctl fs.aio-max-nr={old}")));
    assert_eq!(during, "1048576");
    assert_eq!(fs::read_to_string(path).expect("read").trim(), old);
}

#[test]
fn vm_objects_of_system_v_are_charged_to_the_container_that_makes_them() {
    let host = Host::with_busybox();
    idle(&host, "neighbour", &[]);
    for kind in ["shm", "sem", "msg"] {
        let run = [
            "run",
            "--rm",
            "--memory",
            "32m",
            "--memory-swap",
            "32m",
            "busybox",
            "probe",
            "ipc-fill",
            kind,
        ];
        let ended = host.dm(&[&run[..], &["134217728"]].concat());
        assert_eq!(ended.status, 137, "{kind}: more than its limit of memory: {ended}");
        let little = host.dm(&["exec", "neighbour", "probe", "ipc-fill", kind, "1048576"]);
        assert_ne!(little.ok(), "0", "{kind}: the neighbour goes on");
    }
}
