//! Asleep containers whose next wake has less to make: what the wake finds, and what gives it up.
//!
//! A container is warm while its id is in `run/warm`. A wake has used what it found if its first process is the newborn
//! that waited there.

use std::fs;

use dormouse_testkit::{Host, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::daemon::Daemon;
use crate::sleep::call_one;

/// A server that numbers its connections: the numbers continue only if its memory is restored.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

/// A host that keeps so many containers warm.
fn host(most: usize) -> Host {
    let host = Host::with_busybox();
    set(&host, most);
    host
}

fn set(host: &Host, most: usize) {
    let text = format!("[keeper]\nlinger = \"0s\"\n[sleep]\nwarm = {most}\n");
    fs::write(host.root().join("etc/config.toml"), text).expect("written");
}

#[track_caller]
fn serve(host: &Host, name: &str, options: &[&str]) {
    host.dm(&[&["run", "-d", "--name", name], options, COUNT].concat()).ok();
    call_one(host, name);
}

fn id(host: &Host, name: &str) -> String {
    host.inspect(name)["id"].as_str().expect("an id").to_owned()
}

/// The pid of the newborn of a warm container.
fn newborn(host: &Host, name: &str) -> Option<u32> {
    let record = fs::read(host.root().join("run/warm").join(id(host, name))).ok()?;
    let record: Value = serde_json::from_slice(&record).ok()?;
    record["passed"]["pid"].as_u64().map(|pid| pid as u32)
}

fn is_alive(pid: u32) -> bool {
    let comm = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !comm.is_empty() && !comm.contains(") Z ")
}

/// Puts a container to sleep and keeps it warm. One that was active is awake again, and put to sleep once more.
#[track_caller]
fn keep_warm(host: &Host, name: &str) -> u32 {
    let mut kept = None;
    wait_until(soon(), || {
        host.dm(&["sleep", "--warm", name]).ok();
        kept = newborn(host, name);
        kept.is_some()
    });
    assert_eq!(host.inspect(name)["warm"], true, "{name}");
    kept.expect("it is warm")
}

/// Checks that a container is an ordinary asleep one, of which the kernel has nothing but sockets.
#[track_caller]
fn assert_cold(host: &Host, name: &str, newborn: u32, why: &str) {
    let gone = || !is_alive(newborn) && !host.root().join("run/c").join(id(host, name)).exists();
    assert!(wait_until(soon(), gone), "{why}");
    let shown = host.inspect(name);
    assert_eq!((&shown["state"], shown.get("warm")), (&Value::from("asleep"), None), "{why}");
    assert!(!host.root().join("run/warm").join(id(host, name)).exists(), "{why}");
    let mut groups = host.cgroups().into_iter().map(|dir| dir.join(id(host, name)));
    assert!(!groups.any(|group| group.exists()), "{why}");
}

/// What a process finds in the container. Numbers of mounts and devices differ from wake to wake.
const LOOK: &str = r#"
    id; hostname; cat /etc/hosts /etc/resolv.conf /proc/self/uid_map /proc/self/timens_offsets /proc/self/cgroup
    grep -E '^(Cap|Seccomp|NoNewPrivs|Groups|Uid|Gid|NStgid)' /proc/1/status; ulimit -a
    cut -d' ' -f5- /proc/self/mountinfo | sed -E 's/(upperdir|workdir|lowerdir|gid)=?[^ ,]*//g' | sort
    ls -ln /dev /dev/shm /etc /data /tmp | sed -E 's/ [A-Z][a-z]+ +[0-9]+ +[0-9:]+ / /'
    cat /proc/sys/user/max_pid_namespaces /proc/1/comm /proc/1/oom_score_adj /data/file /tmp/file /file /dev/shm/file
    touch /written && rm /written
    true
"#;

#[test]
fn vm_container_finds_the_same_after_a_warm_wake_as_after_another() {
    let host = host(4);
    for options in [
        &["-v", "data:/data", "--tmpfs", "/tmp", "--memory", "64m", "--pids", "50"][..],
        &["--read-only", "--tmpfs", "/tmp", "--hostname", "named", "--devpts", "no"],
        &["--init", "--oom-score-adj", "500", "--cap-drop", "all", "-u", "7:9"],
        &["-t", "--sysctl", "kernel.msgmax=9000", "--add-host", "a:192.0.2.9", "--sockets", "9"],
    ] {
        serve(&host, "x", options);
        let write =
            "for f in /data/file /tmp/file /file /dev/shm/file; do echo $f > $f; done; true";
        host.dm(&["exec", "x", "sh", "-c", write]).ok();
        let look = || host.dm(&["exec", "x", "sh", "-c", LOOK]).ok();
        host.put_to_sleep("x");
        call_one(&host, "x");
        let cold = look();
        let kept = keep_warm(&host, "x");
        call_one(&host, "x");
        assert_eq!(host.inspect("x")["pid"], kept, "{options:?}");
        assert_eq!(look(), cold, "{options:?}");
        host.dm(&["rm", "--force", "x"]).ok();
    }
}

#[test]
fn vm_warm_sleeper_answers_from_its_newborn_with_all_its_state() {
    let host = host(4);
    serve(&host, "x", &[]);
    let number = |text: String| text.split(' ').next_back().and_then(|n| n.parse::<u64>().ok());
    let mut last = number(call_one(&host, "x")).expect("a number");
    for round in 0..3 {
        let kept = keep_warm(&host, "x");
        let shown = host.inspect("x");
        assert_eq!(shown["pid"], Value::Null, "it has no process of its own");
        let bytes = shown["warm_memory_bytes"].as_u64().expect("a number");
        assert!((1..8 << 20).contains(&bytes), "{bytes}");
        assert!(host.dm(&["ps"]).ok().contains("(warm)"));
        let next = number(call_one(&host, "x")).expect("a number");
        assert_eq!(next, last + 1, "round {round}");
        last = next;
        let shown = host.inspect("x");
        assert_eq!((&shown["pid"], shown.get("warm")), (&Value::from(kept), None), "adopted");
        assert_eq!(newborn(&host, "x"), None);
    }
    // By commands, too.
    for command in [&["wake", "x"][..], &["exec", "x", "true"], &["start", "x"]] {
        let kept = keep_warm(&host, "x");
        host.dm(command).ok();
        assert_eq!(host.inspect("x")["pid"], kept, "{command:?}");
    }
}

#[test]
fn warm_sleeper_without_address_wakes_from_its_newborn() {
    let host = host(4);
    for net in ["none", "host"] {
        host.dm(&["run", "-d", "--name", "x", "--net", net, "busybox", "sleep", "100000"]).ok();
        let kept = keep_warm(&host, "x");
        host.dm(&["wake", "x"]).ok();
        assert_eq!(host.inspect("x")["pid"], kept, "--net {net}");
        assert_eq!(host.dm(&["exec", "x", "echo", "on"]).ok(), "on");
        host.dm(&["rm", "--force", "x"]).ok();
    }
}

#[test]
fn clone_made_asleep_wakes_from_its_newborn() {
    let host = host(4);
    serve(&host, "t", &[]);
    host.dm(&["clone", "--asleep", "--name", "x", "t"]).ok();
    let kept = keep_warm(&host, "x");
    call_one(&host, "x");
    assert_eq!(host.inspect("x")["pid"], kept);
    // Its original has other addresses, and is not touched.
    call_one(&host, "t");
}

/// Each of these reads or changes what a warm sleeper holds.
#[test]
fn vm_commands_that_need_its_files_or_configuration_give_a_warm_sleeper_up() {
    let host = host(4);
    serve(&host, "x", &[]);
    let file = host.dir().join("copied").display().to_string();
    fs::write(&file, "copied\n").expect("written");
    let tar = host.dir().join("tar").display().to_string();
    for command in [
        &["diff", "x"][..],
        &["export", "-o", &tar, "x"],
        &["commit", "x", "made"],
        &["cp", &file, "x:/copied"],
        &["update", "--pids", "60", "x"],
        &["update", "--restart", "no", "x"],
        &["rename", "x", "y"],
    ] {
        let kept = keep_warm(&host, "x");
        host.dm(command).ok();
        if command[0] == "rename" {
            assert_cold(&host, "y", kept, "rename");
            host.dm(&["rename", "y", "x"]).ok();
        }
        assert_cold(&host, "x", kept, &command.join(" "));
        call_one(&host, "x");
    }
    assert_eq!(host.dm(&["exec", "x", "cat", "/copied"]).ok(), "copied");
    // Those that only read its record do not.
    let kept = keep_warm(&host, "x");
    for command in [&["ps", "--all"][..], &["logs", "x"], &["inspect", "x"], &["system", "df"]] {
        host.dm(command).ok();
        assert_eq!(newborn(&host, "x"), Some(kept), "{command:?}");
    }
    host.dm(&["stop", "--time", "0", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
    assert!(wait_until(soon(), || !is_alive(kept)));
    host.dm(&["start", "x"]).ok();
    call_one(&host, "x");
    let kept = keep_warm(&host, "x");
    host.dm(&["rm", "--force", "x"]).ok();
    assert!(wait_until(soon(), || !is_alive(kept)));
    assert_eq!(fs::read_dir(host.root().join("run/warm")).expect("a directory").count(), 0);
}

#[test]
fn warm_sleepers_are_at_most_as_many_as_the_settings_permit() {
    let host = host(2);
    let names = ["a", "b", "c", "d"];
    names.iter().for_each(|name| serve(&host, name, &[]));
    let kept: Vec<u32> = names[..3].iter().map(|name| keep_warm(&host, name)).collect();
    assert_cold(&host, "a", kept[0], "the one that has slept longest");
    assert_eq!(newborn(&host, "b"), Some(kept[1]));
    // The last one to be called is not the first to go.
    call_one(&host, "b");
    keep_warm(&host, "b");
    keep_warm(&host, "d");
    assert_cold(&host, "c", kept[2], "the one that has slept longest now");
    for name in names {
        call_one(&host, name);
    }
}

#[test]
fn containers_are_kept_warm_only_where_settings_and_options_permit() {
    let host = Host::with_busybox();
    serve(&host, "x", &[]);
    let refused = host.dm(&["sleep", "--warm", "x"]).fails();
    assert!(refused.contains("config.toml") && refused.contains("[sleep]"), "{refused}");
    assert_eq!(host.state_of("x"), "running", "refused before it is put to sleep");
    set(&host, 3);
    fs::create_dir(host.dir().join("shared")).expect("a directory");
    let volume = format!("{}:/mnt", host.dir().join("shared").display());
    host.dm(&["run", "-d", "--name", "y", "-v", &volume, "busybox", "sleep", "100000"]).ok();
    assert!(host.dm(&["sleep", "--warm", "y"]).fails().contains("directory of the host"));
    assert_eq!(host.state_of("y"), "running");
    host.dm(&["rm", "--force", "y"]).ok();
    // Each cgroup counts beside a reservation.
    host.dm(&["run", "-d", "--name", "z", "--cpu-reserve", "0.1", "busybox", "sleep", "100000"])
        .ok();
    assert!(host.dm(&["sleep", "--warm", "x"]).fails().contains("reserved"));
    host.dm(&["rm", "--force", "z"]).ok();
    // Another program, or other settings.
    let kept = keep_warm(&host, "x");
    set(&host, 4);
    assert_eq!(host.inspect("x").get("warm"), None, "outdated");
    call_one(&host, "x");
    assert_ne!(host.inspect("x")["pid"], kept);
    assert!(wait_until(soon(), || !is_alive(kept)));
}

#[track_caller]
fn kill(pid: u32) {
    let pid = Pid::from_raw(pid as i32).expect("a pid");
    kill_process(pid, Signal::KILL).expect("the process exists");
}

#[test]
fn vm_killed_newborn_or_keeper_leaves_an_ordinary_sleeper() {
    let host = host(4);
    serve(&host, "x", &[]);
    // The settler of the keeper releases the rest.
    let kept = keep_warm(&host, "x");
    kill(kept);
    assert_cold(&host, "x", kept, "killed newborn");
    call_one(&host, "x");
    // A client comes before the settler.
    let kept = keep_warm(&host, "x");
    kill(kept);
    call_one(&host, "x");
    assert_ne!(host.inspect("x")["pid"], kept);
    for is_first in [true, false] {
        let kept = keep_warm(&host, "x");
        let keeper = host.keeper().expect("a keeper");
        kill(keeper);
        assert!(wait_until(soon(), || !is_alive(keeper)));
        if is_first {
            host.dm(&["ps"]).ok();
            assert_cold(&host, "x", kept, "killed keeper");
        }
        call_one(&host, "x");
        assert_ne!(host.inspect("x")["pid"], kept);
        assert!(wait_until(soon(), || !is_alive(kept)), "it exits with its keeper");
    }
}

#[test]
fn daemon_keeps_called_containers_warm_and_gives_them_up() {
    let host = host(2);
    let mut daemon = Daemon::start(&host);
    serve(&host, "x", &["--sleep-after", "5s"]);
    let is_warm = || newborn(&host, "x").is_some();
    for _ in 0..2 {
        assert!(wait_until(soon(), is_warm), "after it fell asleep by itself");
        let kept = newborn(&host, "x");
        call_one(&host, "x");
        assert_eq!(host.inspect("x")["pid"].as_u64(), kept.map(u64::from));
    }
    assert!(wait_until(soon(), is_warm));
    // Without a daemon it stays so, and the next daemon knows it.
    daemon.signal(Signal::KILL);
    let kept = newborn(&host, "x").expect("it is warm");
    let _daemon = Daemon::start(&host);
    host.dm(&["run", "-d", "--name", "z", "--cpu-reserve", "0.1", "busybox", "sleep", "100000"])
        .ok();
    assert_cold(&host, "x", kept, "a reservation");
    host.dm(&["rm", "--force", "z"]).ok();
    call_one(&host, "x");
    assert!(wait_until(soon(), is_warm));
    let kept = newborn(&host, "x").expect("it is warm");
    set(&host, 0);
    assert_cold(&host, "x", kept, "other settings");
    call_one(&host, "x");
}

#[test]
fn reset_of_the_instance_leaves_a_warm_sleeper_asleep() {
    let host = host(4);
    serve(&host, "x", &[]);
    let kept = keep_warm(&host, "x");
    host.dm(&["internal", "reset"]);
    assert!(wait_until(soon(), || !is_alive(kept)));
    assert_eq!(host.state_of("x"), "asleep");
    call_one(&host, "x");
}
