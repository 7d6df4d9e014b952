//! Clones of one checkpoint share its memory until they write to it. No clone sees the writes of
//! another, each continues independently, and nothing of their template stays.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use dormouse_testkit::{Host, slowness, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use super::lazy::{KEEPER, named};
use super::{host, wait_for_line};

const NAME: &str = "share";
/// Memory in MB, more than the keeper may have where it is limited.
const MUCH: u64 = 64;
/// The template process from which clones are forked.
const TEMPLATE: &str = "dormouse-share";

/// Memory of the workload in MB: less under emulation, but more than is restored at once.
fn megabytes() -> u64 {
    if slowness() == 1 { 64 } else { 16 }
}

fn begin(host: &Host, more: &[&str]) {
    begin_with(host, NAME, megabytes(), more);
}

fn begin_with(host: &Host, name: &str, megabytes: u64, more: &[&str]) {
    let megabytes = format!("MB={megabytes}");
    let run = ["run", "-d", "--name", name, "--env", &megabytes];
    host.dm(&[&run[..], more, &["workloads", "/bin/share"]].concat()).ok();
    wait_for_line(host, name, "ready 0");
}

/// Gives a workload its number, and releases it for the next round.
fn go(host: &Host, name: &str, round: usize, number: usize) {
    let script = format!("echo {number} > /number && touch /go-{round}");
    let out = host.dm(&["exec", name, "sh", "-c", &script]);
    assert!(out.status == 0 || round == 2 && out.status == 137, "{name}: {out}");
}

fn pid_of(host: &Host, name: &str) -> u64 {
    host.inspect(name)["pid"].as_u64().expect("the process runs")
}

/// Memory of a process in kB: all, its proportional share, and its private memory.
#[derive(Debug, Clone, Copy)]
struct Memory {
    all: u64,
    part: u64,
    own: u64,
}

impl Memory {
    fn of(pid: u64) -> Self {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let kb = |name: &str| {
            let line =
                text.lines().find(|line| line.starts_with(name)).expect("a value of the kernel");
            line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("kB")
        };
        let own = kb("Private_Clean:") + kb("Private_Dirty:");
        Self { all: kb("Rss:"), part: kb("Pss:"), own }
    }
}

/// Template processes. A new clone has their name as well, but a private pid namespace.
fn templates(host: &Host) -> Vec<Pid> {
    let namespace = |pid: Pid| fs::read_link(format!("/proc/{}/ns/pid", pid.as_raw_pid())).ok();
    let own = named(host, KEEPER).first().and_then(|keeper| namespace(*keeper));
    named(host, TEMPLATE).into_iter().filter(|pid| namespace(*pid) == own).collect()
}

/// Waits until no template process is left.
#[track_caller]
fn no_template_stays(host: &Host) {
    let is_over = || named(host, TEMPLATE).is_empty();
    assert!(wait_until(soon(), is_over), "a template stays");
}

#[test]
fn vm_clones_share_memory_until_they_write_to_it() {
    let host = host();
    let all =
        [(&["--net", "none", "--init"][..], true), (&[], false), (&["--env", "SMALL=1"], false)];
    let some = if slowness() > 1 { &all[..1] } else { &all };
    for &(more, has_init) in some {
        begin(&host, more);
        let made = host.dm(&["clone", "-n", "4", "--name", "c", NAME]).ok();
        assert_eq!(made.lines().collect::<Vec<_>>(), ["c-1", "c-2", "c-3", "c-4"]);
        no_template_stays(&host);
        let clones = ["c-1", "c-2", "c-3", "c-4"];
        let program = |name: &str| {
            let first = pid_of(&host, name);
            if !has_init {
                return first;
            }
            // The init keeps nothing of the memory that the program shares.
            assert!(Memory::of(first).all < 8 << 10, "{:?}", Memory::of(first));
            let children = fs::read_to_string(format!("/proc/{first}/task/{first}/children"));
            children.expect("an init with a child").trim().parse().expect("one")
        };
        let memory = |name: &str| Memory::of(program(name));
        for name in clones {
            let memory = memory(name);
            assert!(memory.all > megabytes() << 10, "{name}: {memory:?}");
            assert!(memory.part < (megabytes() << 10) / 4 + 2048, "{name}: {memory:?}");
            assert!(memory.own <= 1024, "{name}: {memory:?}");
        }
        assert!(memory(NAME).own > megabytes() << 10, "the original has private memory");
        for (number, name) in clones.iter().enumerate() {
            go(&host, name, 0, number + 1);
            wait_for_line(&host, name, "read");
            wait_for_line(&host, name, "ready 1");
            let memory = memory(name);
            assert!(memory.own <= 1024, "after reads only: {name}: {memory:?}");
        }
        // The clones write one after the other, and the others do not see the writes.
        for (number, name) in clones.iter().enumerate() {
            go(&host, name, 1, number + 1);
            wait_for_line(&host, name, "written");
            wait_for_line(&host, name, "ready 2");
            let memory = memory(name);
            let quarter = (megabytes() << 10) / 4;
            // Huge pages may be copied as a whole.
            assert!((quarter / 2..quarter * 3 / 2).contains(&memory.own), "{name}: {memory:?}");
        }
        // Written pages survive sleep, checkpoint, drowsy and another clone.
        host.dm(&["sleep", "c-1"]).ok();
        host.dm(&["checkpoint", "c-2"]).ok();
        host.dm(&["sleep", "--drowsy", "c-3"]).ok();
        host.dm(&["clone", "-n", "2", "--name", "d", "c-4"]).ok();
        host.dm(&["wake", "c-1", "c-3"]).ok();
        host.dm(&["restore", "c-2"]).ok();
        for (number, name) in clones.iter().enumerate() {
            go(&host, name, 2, number + 1);
            wait_for_line(&host, name, "ok");
        }
        for name in ["d-1", "d-2"] {
            go(&host, name, 2, 4);
            wait_for_line(&host, name, "ok");
        }
        // The original has its own contents.
        for (round, line) in ["ready 1", "ready 2", "ok"].into_iter().enumerate() {
            go(&host, NAME, round, 0);
            wait_for_line(&host, NAME, line);
        }
        host.dm(&["rm", "--force", "--all"]).ok();
    }
}

/// The checkpoint is of a stopped container, with its memory in several files.
#[test]
fn clones_of_stopped_container_share_memory_of_several_files() {
    let host = host();
    begin(&host, &[]);
    host.dm(&["checkpoint", "--leave-running", NAME]).ok();
    go(&host, NAME, 0, 9);
    wait_for_line(&host, NAME, "ready 1");
    go(&host, NAME, 1, 9);
    wait_for_line(&host, NAME, "ready 2");
    host.dm(&["checkpoint", NAME]).ok();
    let id = host.inspect(NAME)["id"].as_str().expect("an id").to_owned();
    let second = host.root().join("lib/containers").join(id).join("checkpoints/2");
    assert!(second.join("pages.1").exists(), "some pages are shared with the first");
    host.dm(&["clone", "-n", "2", "--name", "c", NAME]).ok();
    for name in ["c-1", "c-2"] {
        let memory = Memory::of(pid_of(&host, name));
        assert!(memory.own <= 1024 && memory.all > megabytes() << 10, "{name}: {memory:?}");
    }
    // The last clone has the memory for itself.
    for name in ["c-1", "c-2"] {
        go(&host, name, 2, 9);
        wait_for_line(&host, name, "ok");
    }
    no_template_stays(&host);
}

#[test]
fn unshared_and_single_clones_have_private_memory() {
    let host = host();
    begin(&host, &[]);
    host.dm(&["clone", "-n", "2", "--unshared", "--name", "c", NAME]).ok();
    host.dm(&["clone", "--name", "one", NAME]).ok();
    for name in ["c-1", "c-2", "one"] {
        let memory = Memory::of(pid_of(&host, name));
        assert!(memory.own > megabytes() << 10, "{name}: {memory:?}");
    }
}

/// The template lacks memory for sharing: the clones are made without sharing, and a message
/// reports it.
#[test]
fn clones_have_private_memory_when_template_lacks_memory() {
    use rustix::process::{Resource, Rlimit, prlimit};
    let host = host();
    // Their limit is not the keeper's.
    begin_with(&host, NAME, MUCH, &["--ulimit", "as=1099511627776"]);
    let keeper = named(&host, KEEPER)[0];
    let little = Rlimit { current: Some((MUCH / 2) << 20), maximum: None };
    prlimit(Some(keeper), Resource::As, little).expect("set a limit");
    let out = host.dm(&["clone", "-n", "2", "--name", "c", NAME]);
    let message = "dormouse: clones share no memory: ";
    assert!(out.status == 0 && out.stderr.matches(message).count() == 1, "{out}");
    for name in ["c-1", "c-2"] {
        let memory = Memory::of(pid_of(&host, name));
        assert!(memory.own > MUCH << 10, "{name}: {memory:?}");
        for (round, line) in ["ready 1", "ready 2", "ok"].into_iter().enumerate() {
            go(&host, name, round, 7);
            wait_for_line(&host, name, line);
        }
    }
    no_template_stays(&host);
}

/// Clones share memory only with clones of the same checkpoint, also where contents are equal.
#[test]
fn clones_of_different_containers_share_no_memory() {
    let host = host();
    begin_with(&host, "one", 16, &[]);
    begin_with(&host, "other", 16, &[]);
    // At the same time, with the same contents.
    std::thread::scope(|scope| {
        for name in ["one", "other"] {
            let host = &host;
            scope.spawn(move || {
                let stem = format!("c-{name}");
                host.dm(&["clone", "-n", "3", "--name", &stem, name]).ok();
            });
        }
    });
    no_template_stays(&host);
    for name in ["c-one-1", "c-one-2", "c-one-3", "c-other-1", "c-other-2", "c-other-3"] {
        let memory = Memory::of(pid_of(&host, name));
        // A third of what three share, not a sixth.
        assert!(memory.part >= memory.all / 3 - 512, "{name}: {memory:?}");
        assert!(memory.own <= 1024, "{name}: {memory:?}");
    }
}

/// The command, the keeper or the template is killed in the middle. No process stays, finished
/// clones continue, and the next command makes others.
#[test]
fn kill_during_clone_leaves_no_template() {
    for victim in ["the command", KEEPER, TEMPLATE] {
        let host = host();
        begin_with(&host, NAME, 16, &[]);
        let mut command = host.dormouse(&["clone", "-n", "200", "--name", "c", NAME]);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the process runs");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut made: Vec<String> = lines.by_ref().take(3).map(|l| l.expect("a name")).collect();
        assert_eq!(templates(&host).len(), 1, "one template for all clones");
        let pids = match victim {
            "the command" => vec![Pid::from_child(&child)],
            KEEPER => named(&host, KEEPER),
            _ => templates(&host),
        };
        assert_eq!(pids.len(), 1, "{victim}");
        // Here nsenter(1) has already executed the command.
        kill_process(pids[0], Signal::KILL).expect("the process runs");
        made.extend(lines.map_while(Result::ok));
        let out = child.wait_with_output().expect("our child");
        assert!(!out.status.success(), "{victim}");
        assert!(made.len() < 200, "{victim}");
        no_template_stays(&host);
        for name in [&made[0], &made[made.len() - 1]] {
            assert_eq!(host.state_of(name), "running", "{victim}");
        }
        // An unfinished clone is removed.
        let all = host.dm(&["ps", "--all", "--quiet"]).ok().lines().count();
        assert!(all <= made.len() + 2, "{victim}: {all}");
        host.dm(&["clone", "-n", "2", "--name", "d", NAME]).ok();
        for name in [made[0].as_str(), "d-1", "d-2", NAME] {
            go(&host, name, 0, 5);
            wait_for_line(&host, name, "ready 1");
            go(&host, name, 1, 5);
            wait_for_line(&host, name, "ready 2");
            go(&host, name, 2, 5);
            wait_for_line(&host, name, "ok");
        }
        no_template_stays(&host);
        host.dm(&["rm", "--force", "--all"]).ok();
    }
}
