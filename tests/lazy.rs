//! Lazily restored memory: a program finds its memory unchanged, whatever becomes of the memory or
//! of the processes that fill it. The workload checks its memory. The tests stop and kill the
//! filling processes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dormouse_launch::fill::{head, number};
use dormouse_testkit::{Host, slowness, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use super::{flip, host, wait_for_line};

/// Enough memory that part of it is missing when a filling process is stopped.
const MEGABYTES: &str = "MB=192";

/// The filling processes, and the keeper.
const FILLER: &str = "dormouse-fill";
const SECOND: &str = "dormouse-wait";
pub(super) const KEEPER: &str = "dormouse-keeper";

pub(super) fn named(host: &Host, name: &str) -> Vec<Pid> {
    if name == KEEPER {
        return host.keeper().and_then(|pid| Pid::from_raw(pid as i32)).into_iter().collect();
    }
    let is_it = |(pid, _): &(u32, String)| comm(*pid) == name;
    let found = host.processes().into_iter().filter(is_it);
    found.filter_map(|(pid, _)| Pid::from_raw(pid as i32)).collect()
}

fn signal(pids: &[Pid], signal: Signal) {
    for pid in pids {
        let _ = kill_process(*pid, signal); // a process that has already ended needs no signal
    }
}

/// How a container is saved and restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Checkpoint,
    Sleep,
}

impl Way {
    fn go(self, host: &Host) {
        let verb = match self {
            Self::Checkpoint => "checkpoint",
            Self::Sleep => "sleep",
        };
        host.dm(&[verb, "lazy"]).ok();
    }

    fn back(self, host: &Host) -> dormouse_testkit::Output {
        match self {
            Self::Checkpoint => host.dm(&["restore", "--lazy", "lazy"]),
            Self::Sleep => host.dm(&["wake", "lazy"]),
        }
    }

    /// Saves again after a restore that has loaded all memory.
    fn again(self, host: &Host) {
        match self {
            Self::Checkpoint => {
                host.dm(&["kill", "lazy"]).ok();
                host.wait_for_state("lazy", "stopped");
            }
            Self::Sleep => self.go(host),
        }
    }

    /// The directory of its checkpoint, relative to the container's directory.
    fn place(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoints/1",
            Self::Sleep => "asleep",
        }
    }
}

/// Starts the workload and checkpoints it.
fn saved(host: &Host, rounds: usize) {
    saved_with(host, Way::Checkpoint, rounds, &[]);
}

fn saved_with(host: &Host, way: Way, rounds: usize, more: &[&str]) {
    let rounds = format!("ROUNDS={rounds}");
    let words = ["--env", MEGABYTES, "--env", &rounds];
    let program = ["workloads", "/bin/lazy"];
    let run = ["run", "-d", "--name", "lazy"];
    host.dm(&[&run[..], &words, more, &program].concat()).ok();
    wait_for_line(host, "lazy", "ready 0");
    way.go(host);
}

fn go(host: &Host, round: usize) {
    let out = host.dm(&["exec", "lazy", "touch", &format!("/go-{round}")]);
    assert!(out.status == 0 || out.status == 137, "{out}");
}

fn is_right(host: &Host) {
    wait_for_line(host, "lazy", "ok");
    host.dm(&["rm", "--force", "lazy"]).ok();
}

/// Restores the container and stops the filling process while memory is missing. Repeats until that
/// succeeds.
fn held(host: &Host) -> (Vec<Pid>, Vec<Pid>) {
    held_on(host, Way::Checkpoint)
}

fn held_on(host: &Host, way: Way) -> (Vec<Pid>, Vec<Pid>) {
    for _ in 0..10 {
        let others: BTreeSet<u32> =
            pids().into_iter().filter(|pid| !comm(*pid).starts_with("dormouse")).collect();
        let is_back = AtomicBool::new(false);
        let is_stopped = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| stop_filler(host, &others, &is_back));
            let out = way.back(host);
            is_back.store(true, Ordering::Release);
            out.ok();
            watcher.join().expect("the watcher")
        });
        if is_stopped && is_filling(host) {
            return (named(host, FILLER), named(host, SECOND));
        }
        signal(&named(host, FILLER), Signal::CONT);
        way.again(host);
    }
    panic!("all memory was loaded each time");
}

/// Stops the filling process as soon as it has a second. Returns false if all memory was loaded
/// before that.
///
/// The watch begins before the restore, and leaves out processes of other programs: filling starts
/// 10 ms after the restore, less time than one look at all processes takes on a machine with
/// thousands of them. A sleeping workload may be woken by its own timer before the command.
fn stop_filler(host: &Host, others: &BTreeSet<u32>, is_back: &AtomicBool) -> bool {
    loop {
        let all = pids();
        let of_name = |name: &str| -> Vec<Pid> {
            let is_it = |pid: &u32| comm(*pid) == name && host.has_process(*pid);
            let found = all.difference(others).copied().filter(is_it);
            found.filter_map(|pid| Pid::from_raw(pid as i32)).collect()
        };
        // ORDER: a second has the filler's name at first.
        let has_second = !of_name(SECOND).is_empty();
        let filler = of_name(FILLER);
        if has_second && !filler.is_empty() {
            signal(&filler, Signal::STOP);
            return true;
        }
        if is_back.load(Ordering::Acquire) && !is_filling(host) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The name of a process; empty if it has ended.
fn comm(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// The ids of all processes of the machine.
fn pids() -> BTreeSet<u32> {
    let all = fs::read_dir("/proc").expect("procfs").flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Returns whether memory of the restored container is missing.
fn is_filling(host: &Host) -> bool {
    let file = File::open(fill_file(host));
    file.is_ok_and(|file| number(&file, head::DONE).is_ok_and(|done| done == 0))
}

fn fill_file(host: &Host) -> PathBuf {
    let id = host.inspect("lazy")["id"].as_str().expect("a container id").to_owned();
    host.root().join("run/c").join(id).join("fill")
}

/// Returns the events, after the one that reports the end: the state is written before that event.
fn events_with_its_end(host: &Host) -> String {
    host.wait_for_state("lazy", "stopped");
    let mut events = String::new();
    let has_ended = wait_until(soon(), || {
        events = host.dm(&["events", "--no-stream"]).stdout;
        events.rfind(" die ") > events.rfind(" restore ").max(events.rfind(" wake "))
    });
    assert!(has_ended, "{events}");
    events
}

/// Waits until no filling process is left.
fn wait_until_filled(host: &Host) {
    let is_over = || named(host, FILLER).is_empty() && named(host, SECOND).is_empty();
    assert!(wait_until(Duration::from_secs(60) * slowness(), is_over));
}

#[test]
fn lazy_restore_loads_touched_memory() {
    comes_when_it_is_touched(Way::Checkpoint, &[]);
}

/// A wake restores memory in the same way.
#[test]
fn lazy_wake_loads_touched_memory() {
    comes_when_it_is_touched(Way::Sleep, &[]);
}

/// Pages touched before the checkpoint are read at once, without zeros for the rest of their huge
/// page.
#[test]
fn lazy_restore_loads_touched_huge_pages() {
    comes_when_it_is_touched(Way::Checkpoint, &["--env", "HUGE=1"]);
    comes_when_it_is_touched(Way::Sleep, &["--env", "HUGE=1"]);
}

#[test]
fn lazy_restore_uses_configured_block_size() {
    for block in ["4k", "1m"] {
        let host = host();
        choose(&host, block);
        saved(&host, 1);
        Way::Checkpoint.back(&host).ok();
        let around = number(&File::open(fill_file(&host)).expect("the fill file"), head::AROUND);
        let kib = block.replace('k', "").replace("1m", "1024");
        assert_eq!(around.expect("the block size"), kib.parse::<u64>().expect("a number") * 1024);
        go(&host, 0);
        is_right(&host);
    }
    let host = host();
    saved(&host, 1);
    choose(&host, "5k");
    let out = Way::Checkpoint.back(&host);
    assert!(out.status != 0 && out.stderr.contains("5k"), "{out}");
    assert_eq!(host.state_of("lazy"), "stopped");
    // A wake by a client does not wait until an operator mends the configuration.
    let host = super::host();
    saved_with(&host, Way::Sleep, 1, &[]);
    choose(&host, "5k");
    Way::Sleep.back(&host).ok();
    go(&host, 0);
    is_right(&host);
}

fn choose(host: &Host, block: &str) {
    let etc = host.root().join("etc");
    fs::create_dir_all(&etc).expect("the directory is created");
    fs::write(etc.join("config.toml"), format!("[wake]\nblock = \"{block}\"\n")).expect("written");
}

fn comes_when_it_is_touched(way: Way, more: &[&str]) {
    let host = host();
    saved_with(&host, way, 3, more);
    for round in 0..3 {
        way.back(&host).ok();
        // In later rounds much of the memory may be known to be wanted at once.
        assert!(round > 0 || fill_file(&host).exists(), "all memory was read at once");
        go(&host, round);
        if round < 2 {
            wait_for_line(&host, "lazy", &format!("ready {}", round + 1));
            way.go(&host);
        }
    }
    is_right(&host);
    wait_until_filled(&host);
}

#[test]
fn checkpoint_waits_until_lazy_memory_is_loaded() {
    let host = host();
    saved(&host, 1);
    let (filler, _) = held(&host);
    let mut waits = host.dormouse(&["checkpoint", "lazy"]).spawn().expect("the command starts");
    std::thread::sleep(Duration::from_millis(300));
    assert!(waits.try_wait().expect("our child").is_none(), "the checkpoint waits");
    signal(&filler, Signal::CONT);
    assert!(waits.wait().expect("our child").success());
    host.dm(&["restore", "--lazy", "lazy"]).ok();
    host.dm(&["sleep", "lazy"]).ok();
    host.dm(&["wake", "lazy"]).ok();
    host.dm(&["sleep", "--drowsy", "lazy"]).ok();
    host.dm(&["wake", "lazy"]).ok();
    assert_eq!(host.dm(&["explain", "lazy"]).status, 0);
    go(&host, 0);
    is_right(&host);
}

#[test]
fn lazy_restore_survives_killed_filler() {
    may_be_killed(Way::Checkpoint);
}

#[test]
fn lazy_wake_survives_killed_filler() {
    may_be_killed(Way::Sleep);
}

fn may_be_killed(way: Way) {
    let host = host();
    for victims in [
        &[FILLER][..],
        &[SECOND],
        &[KEEPER],
        &[FILLER, KEEPER],
        &[SECOND, KEEPER],
        &[FILLER, SECOND],
    ] {
        saved_with(&host, way, 1, &[]);
        let (filler, _) = held_on(&host, way);
        // All at once: the second process takes the filler's place as soon as it can.
        let all: Vec<Vec<Pid>> = victims.iter().map(|victim| named(&host, victim)).collect();
        assert!(all.iter().all(|pids| !pids.is_empty()), "{victims:?}: {all:?}");
        signal(&all.concat(), Signal::KILL);
        signal(&filler, Signal::CONT);
        go(&host, 0);
        is_right(&host);
        wait_until_filled(&host);
    }
}

/// The filler is killed repeatedly, at any moment.
#[test]
fn lazy_restore_survives_filler_killed_at_any_time() {
    let host = host();
    let mut killed = 0;
    // On a busy machine all memory may be loaded before the filler was killed often enough.
    for round in 0.. {
        assert!(round < 10, "killed {killed} times in {round} rounds");
        saved(&host, 1);
        host.dm(&["restore", "--lazy", "lazy"]).ok();
        std::thread::scope(|scope| {
            scope.spawn(|| go(&host, 0));
            for n in 0.. {
                let (filler, second) = (named(&host, FILLER), named(&host, SECOND));
                if filler.is_empty() && second.is_empty() {
                    break;
                }
                // The filler is killed only while a second process stands by. Without both the
                // container ends, as is shown below.
                if filler.len() == 1 && !second.is_empty() {
                    signal(&filler, Signal::KILL);
                    killed += 1;
                }
                std::thread::sleep(Duration::from_micros(3_000 + 1_371 * (n % 7)));
            }
        });
        is_right(&host);
        if killed > 2 {
            break;
        }
    }
}

#[test]
fn container_ends_when_all_fillers_are_killed() {
    let host = host();
    saved(&host, 1);
    for attempt in 0.. {
        assert!(attempt < 10, "all memory was loaded before the fork");
        // The log keeps the lines of earlier rounds.
        let length_before = host.dm(&["logs", "lazy"]).stdout.len();
        let (filler, second) = held(&host);
        let file = File::open(fill_file(&host)).expect("the file exists");
        std::thread::scope(|scope| {
            scope.spawn(|| host.dm(&["exec", "lazy", "touch", "/go-0"]));
            // The workload forks when this file has been read.
            signal(&filler, Signal::CONT);
            let has_forked = || number(&file, head::FORKED).is_ok_and(|forked| forked != 0);
            wait_until(Duration::from_secs(5) * slowness(), has_forked);
            signal(&[&filler[..], &second[..]].concat(), Signal::STOP);
            signal(&[filler, second].concat(), Signal::KILL);
        });
        let events = events_with_its_end(&host);
        let log = host.dm(&["logs", "lazy"]).stdout.split_off(length_before);
        let is_ok = log.lines().any(|line| line == "ok");
        // LIMIT: the child may find zeros before that, and then the workload ends by itself.
        let found_zeros = log.contains("failed");
        if events.contains("the descriptor of the child is lost") || found_zeros {
            assert!(!is_ok, "the workload continued:\n{log}");
            break;
        }
        assert!(is_ok, "{log}\n{events}");
        host.dm(&["exec", "lazy", "rm", "/go-0"]);
    }
}

/// Missing pages read as zeros then, which the program may have seen. Such memory is not saved, and
/// no process is left to wait for the container.
#[test]
fn container_ends_when_fillers_and_keeper_are_killed() {
    let host = host();
    let ways = [(Way::Checkpoint, &["ps"][..]), (Way::Sleep, &["ps"]), (Way::Sleep, &[])];
    for (way, next) in ways {
        saved_with(&host, way, 1, &[]);
        let (filler, second) = held_on(&host, way);
        let keeper = named(&host, KEEPER);
        // ORDER: stopped first, so that no process takes another's place.
        signal(&second, Signal::STOP);
        signal(&keeper, Signal::STOP);
        let all = [filler, second, keeper].concat();
        signal(&all, Signal::KILL);
        // On a busy machine they end later, and an earlier look would find a keeper.
        let is_over = || {
            let left = host.processes();
            all.iter()
                .all(|pid| left.iter().all(|(it, _)| *it != pid.as_raw_nonzero().get() as u32))
        };
        assert!(wait_until(soon(), is_over), "{all:?}");
        if next.is_empty() {
            // A suspend also detects the lost memory.
            let note = host.root().join("lib/custody");
            fs::remove_file(note).expect("the record of a keeper");
            let out = host.dm(&["sleep", "lazy"]);
            assert!(out.status != 0 && out.stderr.contains("was ended"), "{out}");
            host.dm(&["start", "lazy"]).ok();
        } else {
            host.dm(next).ok();
        }
        assert_ne!(host.state_of("lazy"), "asleep", "{way:?}");
        let events = host.dm(&["events", "--no-stream"]).stdout;
        let last = events.lines().rfind(|line| line.contains(" die ")).unwrap_or_default();
        assert!(last.contains("and the keeper, too"), "{way:?}, {next:?}: {events}");
        host.dm(&["rm", "--force", "lazy"]).ok();
    }
}

#[test]
fn damaged_lazy_memory_ends_container() {
    let host = host();
    saved(&host, 1);
    let pages = pages(&host, Way::Checkpoint);
    let length = fs::metadata(&pages).expect("the file exists").len();
    flip(&pages, length / 2);
    // The damage may be found before or after the processes resume.
    let out = host.dm(&["restore", "--lazy", "lazy"]);
    assert!(out.status == 0 || out.stderr.contains("damaged"), "{out}");
    host.wait_for_state("lazy", "stopped");
    if out.status == 0 {
        let events = events_with_its_end(&host);
        assert!(events.contains("is not what it was"), "{events}");
    }
    flip(&pages, length / 2);
    host.dm(&["restore", "--lazy", "lazy"]).ok();
    go(&host, 0);
    is_right(&host);
}

/// If the damage is found before a process runs, the container stays asleep and can be woken once
/// its pages are whole. If it is found later, the container is ended.
#[test]
fn damaged_memory_fails_wake_or_ends_container() {
    let host = Host::with_busybox();
    let serve = ["busybox", "probe", "count", "0.0.0.0", "80", "64000"];
    host.dm(&[&["run", "-d", "--name", "lazy"], &serve[..]].concat()).ok();
    host.wait_inside("lazy", "netstat -ltn | grep -q ':80 '");
    host.dm(&["sleep", "lazy"]).ok();
    let pages = pages(&host, Way::Sleep);
    let length = fs::metadata(&pages).expect("the file exists").len();
    flip(&pages, length / 2);
    let out = host.dm(&["wake", "lazy"]);
    if out.status == 0 {
        let events = events_with_its_end(&host);
        assert!(events.contains("is not what it was"), "{events}");
        return;
    }
    assert!(out.stderr.contains("damaged"), "{out}");
    assert_eq!(host.state_of("lazy"), "asleep");
    flip(&pages, length / 2);
    host.dm(&["wake", "lazy"]).ok();
    let answer = host.dm(&["exec", "lazy", "probe", "ask", "127.0.0.1", "80"]).ok();
    assert_eq!(answer.trim(), "call 1");
}

fn pages(host: &Host, way: Way) -> PathBuf {
    let id = host.inspect("lazy")["id"].as_str().expect("a container id").to_owned();
    host.root().join("lib/containers").join(id).join(way.place()).join("pages")
}

#[test]
fn clones_of_lazy_container_run_independently() {
    let host = host();
    saved(&host, 1);
    host.dm(&["clone", "--name", "other", "lazy"]).ok();
    host.dm(&["exec", "other", "touch", "/go-0"]);
    wait_for_line(&host, "other", "ok");
    host.dm(&["restore", "--lazy", "lazy"]).ok();
    go(&host, 0);
    is_right(&host);
}
