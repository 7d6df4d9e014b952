//! Nothing is left behind: not by many containers, not by killed commands, not by failed starts.
//!
//! Every test of every file checks this when its host is dropped. The tests here try hard.

use std::process::{Child, Stdio};
use std::time::Duration;

use dormouse_testkit::{Host, slowness, soon, wait_until};

/// Counts that grow with every leak.
fn counts(host: &Host) -> (usize, usize, usize) {
    let cgroups = host.cgroups().iter().map(|dir| count_dirs(dir)).sum();
    (host.mounts().len(), cgroups, host.processes().len())
}

fn count_dirs(dir: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|e| e.path().is_dir()).map(|e| 1 + count_dirs(&e.path())).sum()
}

#[test]
fn vm_only_shared_objects_stay_after_last_container() {
    let host = Host::with_busybox();
    // Once, so that objects created on first use exist.
    host.dm(&["run", "--rm", "-p", "8080:80", "busybox", "true"]).ok();
    assert!(wait_until(soon(), || host.processes().is_empty()));
    let before = counts(&host);
    for n in 0..8 {
        let name = format!("c{n}");
        let port = format!("{}:80", 8080 + n);
        host.dm(&["run", "-d", "--name", &name, "-p", &port, "busybox", "sleep", "1000"]).ok();
    }
    for n in 0..8 {
        host.dm(&["rm", "--force", &format!("c{n}")]).ok();
    }
    let same = || counts(&host) == before;
    assert!(wait_until(soon(), same), "{before:?} became {:?}", counts(&host));
}

/// The keeper stays for the time that the operator has set, so that the next start finds the network
/// stack, the programs and the mounts of the last one.
#[test]
fn vm_keeper_lingers_after_last_container_as_configured() {
    let host = Host::with_busybox();
    let settings = host.root().join("etc/config.toml");
    let set = |linger: &str| {
        let text = format!("[keeper]\nlinger = \"{linger}\"\n");
        std::fs::write(&settings, text).expect("written");
    };
    set("1x");
    let refused = host.dm(&["run", "--rm", "busybox", "true"]).fails();
    assert!(refused.contains("config.toml") && refused.contains("'1x'"), "{refused}");
    assert_eq!(host.keeper(), None);

    std::fs::remove_file(&settings).expect("removed");
    let stack = || host.dm(&["run", "--rm", "busybox", "readlink", "/proc/self/ns/net"]).ok();
    let first = stack();
    let keeper = host.keeper().expect("the keeper stays for ten minutes");
    host.await_settlers();
    let mounts = || {
        let own = host.root().join("run").display().to_string();
        host.mounts().into_iter().filter(|at| at.starts_with(&own)).collect::<Vec<_>>()
    };
    let (shared, (_, cgroups, processes)) = (mounts(), counts(&host));
    assert!(shared.iter().any(|at| at.ends_with("/net")), "{shared:?}");
    std::thread::sleep(Duration::from_secs(2)); // longer than with 'linger = "0s"'
    assert_eq!(mounts(), shared);
    assert_eq!((counts(&host).1, counts(&host).2), (cgroups, processes));
    assert_eq!((stack(), host.keeper()), (first, Some(keeper)));
    host.await_settlers();
    host.dm(&["internal", "reset"]).ok();
    assert_eq!(host.keeper(), None);

    set("3s");
    stack();
    let nothing = || counts(&host).2 == 0;
    assert!(wait_until(soon(), nothing), "{:?}", host.processes());
}

#[test]
fn vm_killed_start_leaves_nothing_or_a_container() {
    // SIGKILL at times spread over the length of a start. A container that exists then can be
    // removed.
    let host = Host::with_busybox();
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    let rounds = if slowness() > 1 { 10 } else { 60 };
    for round in 0..rounds {
        let name = format!("k{round}");
        let mut command = host.dormouse(&["run", "-d", "--name", &name, "busybox", "sleep", "99"]);
        let mut child = command
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("busybox starts");
        std::thread::sleep(Duration::from_micros(300 * round) * slowness());
        child.kill().and_then(|()| child.wait()).expect("end the process");
        let list = host.dm(&["ps", "--all", "--json"]).ok();
        let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
        let found = list.as_array().expect("a list").iter().find(|c| c["name"] == name.as_str());
        if let Some(container) = found {
            let state = container["state"].as_str().expect("a state");
            assert!(["created", "running", "stopped"].contains(&state), "{container}");
            host.dm(&["rm", "--force", &name]).ok();
        }
        // The name is free again, and a start with it works.
        if round % 10 == 9 {
            host.dm(&["run", "--rm", "--name", &name, "busybox", "true"]).ok();
        }
    }
}

/// The next keeper is not the parent of the containers of a killed one.
#[test]
fn restart_policy_and_exit_status_outlive_killed_keeper() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "--restart", "always", "busybox", "sleep", "1000"]).ok();
    let until = "until [ -e /end ]; do sleep 0.1; done; exit 3";
    host.dm(&["run", "-d", "--name", "b", "busybox", "sh", "-c", until]).ok();
    let kill = |pid: u64| host.sh(&format!("kill -9 {pid}")).ok();
    let kill_keeper = || {
        let keeper = host.keeper().expect("a keeper of running containers");
        kill(keeper.into());
        assert!(wait_until(soon(), || host.keeper().is_none()));
    };
    let pid = || host.inspect("a")["pid"].as_u64();
    let is_restarted = |before: u64| {
        let is = || host.state_of("a") == "running" && pid().is_some_and(|pid| pid != before);
        assert!(wait_until(soon(), is), "{}", host.inspect("a"));
    };

    // The process ends under the next keeper.
    kill_keeper();
    host.dm(&["ps"]).ok();
    let before = pid().expect("a running container");
    kill(before);
    is_restarted(before);
    host.dm(&["exec", "b", "touch", "/end"]).ok();
    // KERNEL(6.15): before, the status is known to the parent alone.
    let status = host.dm(&["wait", "b"]).ok();
    assert!(status == "3" || !keeps_exit_status(), "{status}");

    // The process ends while there is no keeper.
    let before = pid().expect("a running container");
    kill_keeper();
    kill(before);
    host.dm(&["ps"]).ok();
    is_restarted(before);
}

/// Whether the kernel keeps the exit status of a process for holders of a pidfd.
fn keeps_exit_status() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("procfs");
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(15))
}

/// The bound is kept by the keeper; the container appends to the file itself.
#[test]
fn log_is_bounded_after_killed_keeper() {
    let host = Host::with_busybox();
    let flood = "until [ -e /go ]; do sleep 0.1; done; yes | head -c 20000000; sleep 1000";
    let bound = ["--log-driver", "file", "--log-max-size", "1m"];
    let run = ["run", "-d", "--name", "a"].into_iter().chain(bound);
    host.dm(&run.chain(["busybox", "sh", "-c", flood]).collect::<Vec<_>>()).ok();
    let keeper = host.keeper().expect("a keeper of a running container");
    host.sh(&format!("kill -9 {keeper}")).ok();
    assert!(wait_until(soon(), || host.keeper().is_none()));
    host.dm(&["exec", "a", "touch", "/go"]).ok();
    let id = host.inspect("a")["id"].as_str().expect("an id").to_owned();
    let log = host.root().join("lib/containers").join(id).join("stdout.log");
    let sizes = || {
        use std::os::unix::fs::MetadataExt;
        let log = std::fs::metadata(&log).expect("a log");
        (log.len(), log.blocks() * 512)
    };
    let is_bounded = || matches!(sizes(), (20_000_000, disk) if disk <= 2 << 20);
    assert!(wait_until(soon(), is_bounded), "{:?}", sizes());
}

#[test]
fn vm_container_is_restartable_after_killed_keeper() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    let keeper = host.processes().into_iter().find(|(_, line)| line.contains("keeper"));
    let (keeper, _) = keeper.expect("a keeper stands behind a running container");
    host.sh(&format!("kill -9 {keeper}")).ok();
    // The container runs on or is found stopped. In both cases it can be ended, removed and started
    // again.
    let state = host.state_of("a");
    assert!(["running", "stopped"].contains(&state.as_str()), "{state}");
    if state == "running" {
        assert_eq!(host.dm(&["exec", "a", "echo", "alive"]).ok(), "alive");
        host.dm(&["stop", "--time", "0", "a"]).ok();
    }
    assert_eq!(host.state_of("a"), "stopped");
    host.dm(&["start", "a"]).ok();
    assert_eq!(host.dm(&["exec", "a", "echo", "again"]).ok(), "again");
}

/// The process that starts a keeper holds a lock; if it is killed, the new keeper inherits the
/// lock.
#[test]
fn single_keeper_runs_although_its_starter_is_killed() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    for round in 0..60u64 {
        if let Some(keeper) = host.keeper() {
            host.sh(&format!("kill -9 {keeper}")); // may have ended by itself
            let is_gone = || host.keepers().is_empty();
            assert!(wait_until(soon(), is_gone));
        }
        // One of them starts the keeper, and the others wait.
        let begin = |_| {
            let mut one = host.dormouse(&["exec", "a", "true"]);
            one.stderr(Stdio::null()).spawn().expect("the command starts")
        };
        let mut all: Vec<Child> = (0..3).map(begin).collect();
        std::thread::sleep(Duration::from_micros(2000 + round * 250));
        let _ = all[0].kill(); // may have ended already
        for one in &mut all {
            one.wait().expect("our child");
        }
        // A keeper without children ends after a second.
        assert!(host.keepers().len() <= 1, "round {round}: {:?}", host.processes());
    }
}

#[test]
fn failed_start_leaves_nothing() {
    let host = Host::with_busybox();
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    assert!(wait_until(soon(), || host.processes().is_empty()));
    let before = counts(&host);
    for _ in 0..5 {
        host.dm(&["run", "-p", "8080:80", "busybox", "no-such-program"]).err(127);
    }
    let same = || counts(&host) == before;
    assert!(wait_until(soon(), same), "{before:?} became {:?}", counts(&host));
    // The published port is free.
    host.dm(&["run", "--rm", "-p", "8080:80", "busybox", "true"]).ok();
}

#[test]
fn big_thousand_containers_start_and_are_removed() {
    let host = Host::with_busybox();
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    assert!(wait_until(soon(), || host.processes().is_empty()));
    let before = counts(&host);
    for n in 0..1000 {
        host.dm(&["run", "-d", "--name", &format!("c{n}"), "busybox", "sleep", "100000"]).ok();
    }
    let running = host.dm(&["ps", "--quiet"]).ok();
    assert_eq!(running.lines().count(), 1000);
    let mut addresses = std::collections::BTreeSet::new();
    let list = host.dm(&["ps", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    for container in list.as_array().expect("a list") {
        addresses.insert(container["address"].to_string());
    }
    assert_eq!(addresses.len(), 1000, "each container has a distinct address");
    let ids: Vec<&str> = running.lines().collect();
    for ids in ids.chunks(100) {
        host.dm(&[&["rm", "--force"], ids].concat()).ok();
    }
    let same = || counts(&host) == before;
    assert!(wait_until(soon(), same), "{before:?} became {:?}", counts(&host));
}

/// A command was killed while it recorded the keeper of the descriptors of sleeping containers.
#[test]
fn half_written_custody_record_is_removed() {
    let host = Host::with_busybox();
    let half = host.root().join("lib/custody.new");
    std::fs::write(&half, b"{\"pid\":").expect("write the file");
    host.dm(&["ps"]).ok();
    assert!(!half.exists());
}
