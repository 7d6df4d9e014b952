//! The barrier: where the kernel has BPF at the hooks of security modules, a process of a container reaches neither
//! processes nor files outside, whatever its namespaces and descriptors let through. The same attacks succeed with
//! `barrier = false`, and where the kernel calls no such programs.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use dormouse_testkit::{Host, Output, dormouse, image, run, slowness, wait_until};

const BROKEN: i32 = 0;
const STOPPED: i32 = 1;

/// A process that is ended with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[track_caller]
fn begin(host: &Host, program: PathBuf, words: &[&str]) -> Process {
    let mut command = host.command(program);
    Process(command.args(words).stdin(Stdio::null()).spawn().expect("the program starts"))
}

/// A host with attacks, with the barrier or without.
fn host(has_barrier: bool) -> Host {
    let host = Host::with_attacks(dormouse());
    let settings = format!("[keeper]\nlinger = \"0s\"\n[run]\nbarrier = {has_barrier}\n");
    fs::write(host.root().join("etc/config.toml"), settings).expect("written");
    host
}

/// How many calls of a container were refused; `None` if it is not behind the barrier.
#[track_caller]
fn refused(host: &Host, name: &str) -> Option<u64> {
    host.inspect(name)["barrier_refused"].as_u64()
}

/// Starts the container `web`. Returns whether it is behind the barrier, as it has to be if the kernel permits that and
/// the settings want it.
#[track_caller]
fn is_behind_barrier(host: &Host, wanted: bool) -> bool {
    host.dm(&["run", "-d", "--name", "web", "attack", "sleep", "1000000"]).ok();
    let feature = host.feature("BPF: LSM");
    let is_possible = feature["have"] == true;
    assert_eq!(refused(host, "web").is_some(), wanted && is_possible, "{feature}");
    if !is_possible {
        eprintln!("NOT RUN with a barrier: {}", feature["seen"]);
    }
    wanted && is_possible
}

/// The cgroup of a container in the hierarchy of v2.
#[track_caller]
fn cgroup(host: &Host, name: &str) -> PathBuf {
    let id = host.inspect(name)["id"].as_str().expect("an id").to_owned();
    let of = host.cgroups().into_iter().map(|above| above.join(&id));
    of.into_iter().find(|dir| dir.join("cgroup.events").exists()).expect("one of v2")
}

#[track_caller]
fn assert_outcome(out: &Output, is_stopped: bool) {
    let expected = if is_stopped { STOPPED } else { BROKEN };
    assert_eq!(out.status, expected, "{out}");
    // Files of procfs have an error of their own.
    let is_denied =
        ["Operation not permitted", "Permission denied"].map(|it| out.stdout.contains(it));
    assert!(!is_stopped || is_denied.contains(&true), "{out}");
}

/// What a process can do with a descriptor of a directory.
const WAYS: [&str; 15] = [
    "read",
    "write",
    "link",
    "up",
    "root",
    "create",
    "mkdir",
    "rmdir",
    "mkfifo",
    "symlink",
    "hard-link",
    "rename",
    "unlink",
    "truncate",
    "run",
];

/// A directory that every user of the host may change, and the process that gives it to containers.
#[track_caller]
fn give_directory(host: &Host) -> (Process, String) {
    let (above, gate) = (host.dir().join("above"), host.dir().join("gate"));
    let dir = above.join("given");
    for each in [&above, &gate, &dir, &dir.join("empty")] {
        fs::create_dir(each).expect("made");
        fs::set_permissions(each, Permissions::from_mode(0o777)).expect("changed");
    }
    for name in ["mark", "other", "spare"] {
        fs::write(dir.join(name), "of the host").expect("written");
        fs::set_permissions(dir.join(name), Permissions::from_mode(0o666)).expect("changed");
    }
    fs::copy(image::attack(), dir.join("program")).expect("copied");
    let socket = gate.join("socket");
    let words = ["give-directory", &socket.display().to_string(), &dir.display().to_string()];
    let giver = begin(host, image::attack(), &words);
    assert!(wait_until(Duration::from_secs(5) * slowness(), || socket.exists()));
    (giver, format!("{}:/gate:noidmap", gate.display()))
}

#[test]
fn vm_directory_of_the_host_that_came_in_as_a_descriptor_leads_to_no_file() {
    for wanted in [true, false] {
        let host = host(wanted);
        let is_stopped = is_behind_barrier(&host, wanted);
        let (_giver, bind) = give_directory(&host);
        host.dm(&["run", "-d", "--name", "thief", "-v", &bind, "attack", "sleep", "1000000"]).ok();
        for (n, way) in (1..).zip(WAYS) {
            let words = ["exec", "thief", "attack", "through-directory", "/gate/socket", way];
            assert_outcome(&host.dm(&words), is_stopped);
            assert_eq!(refused(&host, "thief"), is_stopped.then_some(n), "{way}");
        }
        assert_eq!(refused(&host, "web"), is_stopped.then_some(0));
        let names = |dir: &str| fs::read_dir(host.dir().join(dir)).expect("there").count();
        assert_eq!(names("above/given") == 5, is_stopped, "what was made there");
    }
}

/// The log is a file of the host, which belongs to the container; and so are files on a volume, and what a process has
/// opened before the container has it.
#[test]
fn vm_files_that_a_container_was_given_stay_open_to_it() {
    let host = host(true);
    let data = host.dir().join("data");
    fs::create_dir(&data).expect("made");
    let bind = format!("{}:/data", data.display());
    let script = "echo first >/dev/stdout; echo second >/proc/self/fd/2; echo x >/data/x; mkdir /data/d; cat /data/x; \
                  cp /bin/busybox /data/true && /data/true true && echo run";
    let words = [
        "run",
        "-d",
        "--name",
        "x",
        "--log-driver",
        "file",
        "-v",
        &bind,
        "attack",
        "sh",
        "-c",
        script,
    ];
    host.dm(&words).ok();
    assert_eq!(host.dm(&["wait", "x"]).ok(), "0");
    let log = host.dm(&["logs", "x"]).ok();
    // The first is a truncation, as of each program that opens its log in this way.
    assert!(log.contains("x\nrun"), "{log}");
    let given = host
        .dm_with_input(b"given\n", &["run", "--rm", "-i", "attack", "sh", "-c", "cat /dev/stdin"]);
    assert_eq!(given.ok(), "given");
}

#[test]
fn vm_process_of_a_container_reaches_no_process_outside_even_with_the_hosts_permissions() {
    for wanted in [true, false] {
        let host = host(wanted);
        let is_stopped = is_behind_barrier(&host, wanted);
        let outside = begin(&host, PathBuf::from("sleep"), &["1000000"]);
        host.dm(&["run", "-d", "--name", "other", "attack", "sleep", "1000000"]).ok();
        let pid = |name: &str| host.inspect(name)["pid"].as_u64().expect("it runs").to_string();
        let from_web = |what: &str, pid: &str| {
            let procs = cgroup(&host, "web").join("cgroup.procs").display().to_string();
            let mut command = host.command(image::attack());
            command.args(["from-cgroup", &procs, what, pid]);
            run(command, b"", Duration::from_secs(20))
        };
        let outside = outside.0.id().to_string();
        let mut count = 0;
        for what in ["signal", "trace", "read"] {
            for pid in [outside.clone(), pid("other")] {
                assert_outcome(&from_web(what, &pid), is_stopped);
                count += 1;
                assert_eq!(refused(&host, "web"), is_stopped.then_some(count), "{what}");
            }
            assert_outcome(&from_web(what, &pid("web")), false);
        }
        assert_eq!(refused(&host, "other"), is_stopped.then_some(0));
        // A container has another cgroup after a sleep, and is counted anew.
        host.put_to_sleep("web");
        host.dm(&["wake", "web"]).ok();
        assert_eq!(refused(&host, "web"), is_stopped.then_some(0));
        assert_outcome(&from_web("signal", &outside), is_stopped);
        assert_eq!(refused(&host, "web"), is_stopped.then_some(1));
        // The programs outlive the keeper.
        let keeper = host.keeper().expect("a keeper");
        let keeper = rustix::process::Pid::from_raw(keeper as i32).expect("a number");
        rustix::process::kill_process(keeper, rustix::process::Signal::KILL).expect("it runs");
        assert_outcome(&from_web("trace", &outside), is_stopped);
    }
}
