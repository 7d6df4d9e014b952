//! A checkpoint is proven before the processes end: it is restored as a twin, read back and compared.
//!
//! A command is led ([`Led`]) to the moment after its checkpoint was published. What the test changes
//! then on a volume is found by the twin, and by nothing else before the next wake.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Stdio;

use dormouse_testkit::{Host, Led, dormouse, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use super::{host, start, wait_for_line};
use crate::hang::Hanging;

/// The record of the proven shapes of a container.
fn record(host: &Host, name: &str) -> PathBuf {
    let id = host.inspect(name)["id"].as_str().expect("an id").to_owned();
    host.root().join("lib/containers").join(id).join("proven.json")
}

/// The inode of that record, which each proof writes anew.
fn written(host: &Host, name: &str) -> Option<u64> {
    fs::metadata(record(host, name)).ok().map(|meta| meta.ino())
}

/// Runs `x` in the directory `/data/d` of a volume, with a named pipe that holds a line and the file
/// `/data/file` open. Returns the volume.
fn serving(host: &Host) -> PathBuf {
    let data = host.dir().join("data");
    fs::create_dir_all(data.join("d")).expect("a scratch directory");
    fs::set_permissions(&data, Permissions::from_mode(0o777)).expect("an own directory");
    fs::write(data.join("file"), "text").expect("a scratch file");
    let script = "cd /data/d && mkfifo /pipe && exec 3</data/file 4<>/pipe && echo line >&4 \
                  && echo ready && exec sleep 1000";
    let volume = format!("{}:/data", data.display());
    host.dm(&["run", "-d", "--name", "x", "-v", &volume, "busybox", "sh", "-c", script]).ok();
    wait_for_line(host, "x", "ready");
    data
}

/// Leads a command to the moment after the checkpoint in `published` was published, calls `then`, and
/// returns its exit status.
fn led(host: &Host, words: &[&str], published: &str, then: impl FnOnce()) -> i32 {
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let records = host.root().join("lib/containers").join(id).join(published).join("records");
    let mut led = Led::start(&host.dormouse(words), &dormouse());
    while !records.exists() {
        assert!(led.next_step().is_some(), "{words:?} has published nothing");
    }
    then();
    while led.next_step().is_some() {}
    led.status().expect("it has ended")
}

/// Checks that `x` continues with its pipe, that a trial restore failed because of `cause`, and that it can sleep
/// once more.
#[track_caller]
fn continues(host: &Host, cause: &str) {
    assert_eq!(host.state_of("x"), "running");
    let events = host.dm(&["events", "--no-stream"]).ok();
    let is_it = |line: &str| line.contains("trial_failed") && line.contains(cause);
    assert!(events.lines().any(is_it), "no '{cause}' in {events}");
    let inside = |script: &str| host.dm(&["exec", "x", "sh", "-c", script]);
    assert_eq!(inside("head -n 1 /pipe").ok(), "line", "the pipe is as before");
    host.put_to_sleep("x");
    host.dm(&["wake", "x"]).ok();
    assert_eq!(inside("cat /proc/1/comm").ok(), "sleep");
}

#[test]
fn vm_sleep_finds_by_a_twin_that_a_directory_would_be_another() {
    let host = Host::with_busybox();
    let data = serving(&host);
    let status = led(&host, &["sleep", "x"], "asleep", || {
        fs::rename(data.join("d"), data.join("e")).expect("moved");
        symlink("e", data.join("d")).expect("a link");
    });
    assert_ne!(status, 0);
    continues(&host, "/data/d");
}

#[test]
fn vm_checkpoint_finds_by_a_twin_that_a_file_is_gone() {
    let host = Host::with_busybox();
    let data = serving(&host);
    let away = || fs::rename(data.join("file"), data.join("away")).expect("moved");
    let status = led(&host, &["checkpoint", "x"], "checkpoints/1", away);
    assert_ne!(status, 0);
    assert_eq!(host.dm(&["checkpoint", "ls", "x"]).ok().lines().count(), 1, "none is left");
    continues(&host, "/data/file");
    // Without the trial the container is asleep, and cannot wake.
    let back = || fs::rename(data.join("away"), data.join("file")).expect("moved");
    let status = led(&host, &["sleep", "--unproven", "x"], "asleep", back);
    assert_eq!((status, host.state_of("x").as_str()), (0, "asleep"));
    assert_ne!(host.dm(&["wake", "x"]).status, 0);
}

/// A twin has nothing that the container needs, so its end is only the end of the trial.
#[test]
fn vm_container_continues_when_its_twin_is_killed() {
    let host = Host::with_busybox();
    serving(&host);
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    let twin = format!("{id}.twin/cgroup.procs");
    let tasks = || -> Vec<i32> {
        let texts = host.cgroups().into_iter().map(|dir| fs::read_to_string(dir.join(&twin)));
        texts
            .flatten()
            .flat_map(|text| text.lines().flat_map(str::parse).collect::<Vec<_>>())
            .collect()
    };
    // A twin lives for some milliseconds. On a busy machine a look may come too late.
    let has_failed = wait_until(soon(), || {
        let mut sleep = host.dormouse(&["sleep", "x"]);
        sleep.stdout(Stdio::null()).stderr(Stdio::null());
        let mut sleep = sleep.spawn().expect("it starts");
        while sleep.try_wait().expect("a child").is_none() {
            for pid in tasks().into_iter().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL); // may have ended
            }
        }
        if !sleep.wait().expect("a child").success() {
            return true;
        }
        host.dm(&["wake", "x"]).ok();
        fs::remove_file(record(&host, "x")).expect("the proven shape");
        false
    });
    assert!(has_failed, "no twin was killed");
    continues(&host, "trial restore");
}

#[test]
fn vm_twin_is_made_again_only_for_a_new_kind_of_object() {
    let host = Host::with_busybox();
    let script = "mkfifo /go; exec 4<>/go; echo ready; read go <&4; exec 8>>/more; echo more; exec sleep 1000";
    host.dm(&["run", "-d", "--name", "x", "busybox", "sh", "-c", script]).ok();
    wait_for_line(&host, "x", "ready");
    let sleep = || {
        host.dm(&["sleep", "x"]).ok();
        host.dm(&["wake", "x"]).ok();
        written(&host, "x")
    };
    assert_eq!(written(&host, "x"), None);
    let first = sleep();
    assert!(first.is_some());
    // The shell may be between two calls at first.
    let mut settled = first;
    while settled != sleep() {
        settled = written(&host, "x");
    }
    assert_eq!([sleep(), sleep()], [settled, settled]);
    host.dm(&["exec", "x", "sh", "-c", "echo >/go"]).ok();
    wait_for_line(&host, "x", "more");
    let after = sleep();
    assert_ne!(after, settled, "a file for appending is a new kind");
    host.dm(&["sleep", "--unproven", "x"]).ok();
    assert_eq!(written(&host, "x"), after);
}

#[test]
fn vm_container_without_a_twin_sleeps_unproven_and_the_object_is_named() {
    let host = host();
    start(&host, "fanotify", &["--cap-add", "SYS_ADMIN", "--env", "STILL=1"]);
    wait_for_line(&host, "fanotify", "ready 0");
    assert!(host.inspect("fanotify")["unproven"].is_null());
    host.dm(&["sleep", "fanotify"]).ok();
    let why = host.inspect("fanotify")["unproven"].as_str().map(str::to_owned);
    assert_eq!(why.as_deref(), Some("fanotify inside"));
}

/// A twin in a call that does not end is left behind, and the container continues.
#[test]
fn vm_container_continues_when_its_twin_hangs_in_a_file_system() {
    let host = Host::with_busybox();
    let config = "[keeper]\nlinger = \"0s\"\n[wake]\nwithin = \"1s\"\n";
    fs::write(host.root().join("etc/config.toml"), config).expect("written");
    let hanging = Hanging::mount(&host);
    let script = "exec 3</hanging/file; echo ready; while ! test -e /go; do sleep 0.1; done; cat <&3; exec sleep 1000";
    let volume = format!("{}:/hanging", hanging.place.display());
    let out = host.dm(&["run", "-d", "--name", "x", "-v", &volume, "busybox", "sh", "-c", script]);
    // KERNEL(6.12): fuse with mapped ids.
    if out.stderr.contains("cannot map the ids") {
        host.sh(&format!("umount {}", hanging.place.display())).ok();
        return eprintln!("SKIPPED: {out}");
    }
    out.ok();
    wait_for_line(&host, "x", "ready");
    hanging.set_hanging(true);
    let out = host.dm_within(soon(), &["sleep", "x"]);
    assert!(out.status != 0 && out.stderr.contains("has not ended within 1s"), "{out}");
    assert!(hanging.hung() > 0, "{out}");
    assert_eq!(host.state_of("x"), "running");
    // No process of the container is stopped, and commands do not wait for the twin.
    host.dm_within(soon(), &["exec", "x", "touch", "/go"]).ok();
    wait_for_line(&host, "x", "text");
    let out = host.dm_within(soon(), &["sleep", "x"]);
    assert!(out.status != 0 && out.stderr.contains("earlier trial"), "{out}");
    // Then it can sleep.
    hanging.set_hanging(false);
    let sleeps = || host.dm(&["sleep", "x"]).status == 0;
    assert!(wait_until(soon(), sleeps), "{}", host.dm(&["sleep", "x"]));
    host.dm(&["wake", "x"]).ok();
    host.dm(&["rm", "--force", "x"]).ok();
    host.sh(&format!("umount {}", hanging.place.display())).ok();
}

/// Where there is no room for a second copy, the container sleeps unproven, and the cause is on record.
#[test]
fn vm_container_sleeps_unproven_where_there_are_no_tasks_for_a_twin() {
    let host = Host::with_busybox();
    let run = |name: &str| {
        let script = "sleep 1000 & sleep 1000 & echo ready; wait";
        host.dm(&["run", "-d", "--name", name, "busybox", "sh", "-c", script]).ok();
        wait_for_line(&host, name, "ready");
    };
    // The processes that a keeper has beside asleep containers are there.
    run("other");
    host.put_to_sleep("other");
    run("x");
    let groups = host.cgroups().into_iter().find(|dir| dir.join("pids.max").exists());
    let Some(group) = groups else { return eprintln!("SKIPPED: no control group limits tasks") };
    let read = || fs::read_to_string(group.join("pids.current")).expect("a file of the kernel");
    let mut current = read();
    // Tasks that have ended count until the kernel has released them.
    let is_at_rest = || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let before = std::mem::replace(&mut current, read());
        before == current
    };
    assert!(wait_until(soon(), is_at_rest), "tasks come and go");
    let most = current.trim().parse::<u32>().expect("a number") + 1;
    fs::write(group.join("pids.max"), most.to_string()).expect("root may");
    let out = host.dm(&["sleep", "x"]);
    fs::write(group.join("pids.max"), "max").expect("root may");
    out.ok();
    assert_eq!(host.state_of("x"), "asleep");
    let why = host.inspect("x")["unproven"].as_str().map(str::to_owned).unwrap_or_default();
    assert!(why.contains("no room for a trial restore") && why.contains("clone"), "{why}");
    let events = host.dm(&["events", "--no-stream"]).ok();
    assert!(events.lines().any(|line| line.contains("trial_skipped")), "{events}");
    // The next sleep is proven.
    host.dm(&["wake", "x"]).ok();
    host.put_to_sleep("x");
    assert!(host.inspect("x")["unproven"].is_null());
}

/// Workloads of every kind that a twin covers: a kind that is not restored as it was fails here by its name.
#[test]
fn vm_twins_of_workloads_are_alike() {
    const WORKLOADS: &[(&str, &[&str])] = &[
        ("advice", &[]),
        ("altstack", &[]),
        ("clock", &[]),
        ("credential", &[]),
        ("directory", &[]),
        ("event", &[]),
        ("fifo", &[]),
        ("file", &[]),
        ("filter", &[]),
        ("full", &[]),
        ("guard", &[]),
        ("halt", &[]),
        ("hint", &[]),
        ("inotify", &[]),
        ("lock", &[]),
        ("mqueue", &[]),
        ("notice", &[]),
        ("pipe", &[]),
        ("pipes", &[]),
        ("seats", &[]),
        ("policy", &[]),
        ("schedule", &[]),
        ("signal", &[]),
        ("socketpair", &[]),
        ("stopped", &[]),
        ("system_v", &[]),
        ("terminal", &["-t"]),
        ("thread", &[]),
        ("tree", &[]),
        ("udp", &[]),
        ("unix", &[]),
        ("user", &[]),
        ("uts", &["--cap-add", "SYS_ADMIN"]),
        ("zombie", &[]),
    ];
    let host = host();
    let mut faults = Vec::new();
    for (name, more) in WORKLOADS {
        let more = [&["--net", "none", "--env", "STILL=1"], *more].concat();
        start(&host, name, &more);
        wait_for_line(&host, name, "ready 0");
        let out = host.dm(&["checkpoint", name]);
        let unproven = host.inspect(name)["unproven"].clone();
        if out.status != 0 || !unproven.is_null() {
            faults.push(format!("{name}: {unproven} {}", out.stderr));
        }
        host.dm(&["rm", "--force", name]).ok();
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
