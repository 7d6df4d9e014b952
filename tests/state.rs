//! A fuzzer of kernel state: random programs of operations that build it are saved, restored and
//! compared.
//!
//! The programs are executed by `tests/inside/state.c`, whose head describes them; the generator
//! here knows only the names and weights of operations. Every list of operations is a program. A
//! container runs one program. Compared are the records of three checkpoints and procfs before and after, as in
//! [`super::fixpoint`], and what every task reports of itself before and after: values that only the
//! task itself can read, such as options of sockets, contents of files and memory, `prctl(2)`.
//!
//! A checkpoint that is refused by name is counted apart. Of a program with a difference the
//! operations are removed, in ever smaller parts, as long as a difference remains at the same kind of
//! place; the rest is printed. `cargo xtask fuzz-state` sets the variables `DORMOUSE_STATE_SEED`,
//! `DORMOUSE_STATE_FIRST`, `DORMOUSE_STATE_PROGRAMS`, `DORMOUSE_STATE_SECONDS`,
//! `DORMOUSE_STATE_PROGRAM`, a file with one program, and `DORMOUSE_STATE_REPORT`, a file for what is
//! printed at the end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dormouse_testkit::fact::{Expected, Facts, Rule, unexplained};
use dormouse_testkit::{Host, image, slowness};
use tempfile::TempDir;

use super::fixpoint::{Failure, Looks, SEALED};
use super::wait_for_line;

/// Programs of the test that runs with all others.
const PROGRAMS: usize = 20;
/// Operations of a program.
const OPERATIONS: std::ops::Range<usize> = 3..25;
/// Attempts to make a program smaller.
const ATTEMPTS_MAX: usize = 120;
/// Bytes in front of the slots of the report, of one report, and slots.
const HEAD_BYTES: u64 = 4096;
const REPORT_BYTES: usize = 32_768;
const SLOTS: u64 = 64;

/// IP_MTU, IPV6_MTU and IPV6_PATHMTU are those of a route that the kernel has cached: it drops the route when an option
/// is set, and looks it up again for connect(2) and for the next packet.
const OF_A_ROUTE: &str = "whether the kernel has cached a route (docs/state.md)";

/// O_NOFOLLOW, beside O_PATH.
const DELETED_PLACE: &str = "a deleted file is opened again by a link (docs/state.md)";

/// Differences of reports that are no fault.
const OF_REPORTS: &[Expected] = &[
    Expected { place: "task/*/fd/*/option/0-14", rule: Rule::Begins, reason: OF_A_ROUTE },
    Expected { place: "task/*/fd/*/option/0-14", rule: Rule::Ends, reason: OF_A_ROUTE },
    Expected { place: "task/*/fd/*/option/41-24", rule: Rule::Begins, reason: OF_A_ROUTE },
    Expected { place: "task/*/fd/*/option/41-24", rule: Rule::Ends, reason: OF_A_ROUTE },
    Expected { place: "task/*/fd/*/option/41-61", rule: Rule::Begins, reason: OF_A_ROUTE },
    Expected { place: "task/*/fd/*/option/41-61", rule: Rule::Ends, reason: OF_A_ROUTE },
    Expected {
        place: "task/*/fd/*/option/6-2",
        rule: Rule::Near(40),
        reason: "half of the peer's window, which an acknowledgement raises from 65,464 to 65,536",
    },
    Expected {
        place: "task/*/fd/*/option/6-2",
        rule: Rule::Rises,
        reason: "half of the window of a peer that is in a queue: its kernel grows it anew (docs/state.md)",
    },
    Expected {
        place: "task/*/fd/*/poll",
        rule: Rule::Turns { from: "10", to: "14" },
        reason: "a closed listener with TCP_NOTSENT_LOWAT counts bytes that it has not sent (docs/state.md)",
    },
    Expected {
        place: "task/*/fd/*/flags",
        rule: Rule::Turns { from: "0 220000", to: "0 200000" },
        reason: DELETED_PLACE,
    },
    Expected {
        place: "task/*/fd/*/flags",
        rule: Rule::Turns { from: "1 220000", to: "1 200000" },
        reason: DELETED_PLACE,
    },
    // Of a unix socket; the hash of no name.
    Expected {
        place: "task/*/fd/*/peer/1",
        rule: Rule::To("0 146400001152f6"),
        reason: "the name of a peer that has closed (docs/state.md)",
    },
];

/// Differences that the program itself makes.
const OF_THE_PROGRAM: &[Expected] = &[
    Expected {
        place: "object/1:memory:object/modified_ns",
        rule: Rule::Rises,
        reason: "the report is written",
    },
    Expected {
        place: "memory/*/page/fffffff0000",
        rule: Rule::Any,
        reason: "the kernel writes the remaining time of ppoll(2)",
    },
    SEALED,
    Expected {
        place: "process/*/fd/*/info/flags",
        rule: Rule::Turns { from: "010400000", to: "010000000" },
        reason: DELETED_PLACE,
    },
    Expected {
        place: "process/*/fd/*/info/flags",
        rule: Rule::Turns { from: "012400000", to: "012000000" },
        reason: DELETED_PLACE,
    },
    Expected {
        place: "process/*/net/tcp/*",
        rule: Rule::To("08 00000000:00000001 "),
        reason: "the end of the peer counts as a byte until it is read, and is read once more (docs/state.md)",
    },
    Expected {
        place: "process/*/net/tcp6/*",
        rule: Rule::To("08 00000000:00000001 "),
        reason: "the end of the peer counts as a byte until it is read, and is read once more (docs/state.md)",
    },
];

/// Random numbers: splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }
}

/// Names of operations, each as often as its weight.
fn operations(program: &Path) -> Vec<String> {
    let out = dormouse_testkit::run(
        {
            let mut command = std::process::Command::new(program);
            command.arg("ops");
            command
        },
        b"",
        Duration::from_secs(10),
    );
    let mut all = Vec::new();
    for line in out.ok().lines() {
        let (name, weight) = line.split_once(' ').expect("a name and a weight");
        let weight: usize = weight.parse().expect("a number");
        all.extend(std::iter::repeat_n(name.to_owned(), weight));
    }
    all
}

/// The program with a number: the same for the same seed.
fn program(operations: &[String], seed: u64, number: usize) -> Vec<String> {
    let mut random = Random(seed.wrapping_mul(0x1_0000_0001).wrapping_add(number as u64));
    let count = OPERATIONS.start + random.below(OPERATIONS.len());
    let mut line = || {
        let name = &operations[random.below(operations.len())];
        let numbers: Vec<String> = (0..4).map(|_| random.below(1024).to_string()).collect();
        format!("{name} {}", numbers.join(" "))
    };
    (0..count).map(|_| line()).collect()
}

/// How a program ended.
enum Outcome {
    Same,
    Refused(String),
    Different(Vec<String>),
}

/// The scratch host, and the volume of its container.
struct Machine {
    host: Host,
    volume: PathBuf,
    /// A volume for the files of the first program, if it is to have one.
    files: Option<TempDir>,
}

impl Machine {
    fn new() -> Self {
        let host = Host::new();
        host.import(&image::state(), "state");
        let volume = host.dir().join("ctl");
        fs::create_dir(&volume).expect("a scratch directory");
        Self { host, volume, files: None }
    }

    /// The same, with the files of the first program on a volume.
    fn with_files_on_volume() -> Self {
        let machine = Self::new();
        // The programs need a file system of a disk, which /tmp may not be.
        let files = tempfile::Builder::new().prefix("dm-").tempdir_in("/var/tmp");
        let files = files.expect("a scratch directory");
        fs::set_permissions(files.path(), fs::Permissions::from_mode(0o777)).expect("a directory");
        Self { files: Some(files), ..machine }
    }

    /// Runs a program in a container of its own.
    fn outcome(&self, program: &[String]) -> Outcome {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.of(program)));
        self.host.dm(&["rm", "--force", "a"]);
        caught.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            Outcome::Different(vec![format!("failed: {}", text.replace('\n', " "))])
        })
    }

    fn of(&self, program: &[String]) -> Outcome {
        fs::write(self.volume.join("program"), program.join("\n")).expect("write the file");
        let report = self.volume.join("report");
        fs::write(&report, vec![0; (HEAD_BYTES + SLOTS * 2 * REPORT_BYTES as u64) as usize])
            .expect("write the file");
        let volume = format!("{}:/ctl", self.volume.display());
        let host = &self.host;
        let files = self.files.as_ref().map(|files| format!("{}:/w0", files.path().display()));
        let mut run = vec!["run", "-d", "--name", "a", "--net", "none", "-v", &volume];
        run.extend(files.iter().flat_map(|files| ["-v", files.as_str()]));
        host.dm(&[&run[..], &["state", "/bin/state", "run"]].concat()).ok();
        wait_for_line(host, "a", "ready");
        let looks = match Looks::of(host, "a") {
            Ok(looks) => looks,
            Err(Failure::Refused(why)) => return Outcome::Refused(why),
            Err(Failure::Lost(why)) => {
                return Outcome::Different(vec![format!("restore fails: {}", why.trim_end())]);
            }
            Err(Failure::Once(why)) => {
                return Outcome::Different(vec![format!("saved once only: {}", why.trim_end())]);
            }
        };
        let mut faults = looks.faults(false, OF_THE_PROGRAM);
        faults.retain(|fault| !is_lease_of_an_ended_process(fault, &looks.procfs[1]));
        let out = host.dm(&["exec", "a", "/bin/state", "wake"]);
        let (done, wanted) = out.stdout.trim().split_once(" of ").unwrap_or_default();
        if done != wanted || out.status != 0 {
            faults.push(format!("tasks do not go on: {out}").replace('\n', " "));
        } else {
            let [before, after] = reports(&report);
            let open = unexplained(before.differences(&after), OF_REPORTS);
            faults.extend(open.iter().map(|one| format!("reports, by the restore: {one}")));
        }
        if faults.is_empty() { Outcome::Same } else { Outcome::Different(faults) }
    }
}

/// Whether a fault is the number of a process that has set a lease and has ended since (docs/state.md). Its open file
/// and the lease stay with another process.
fn is_lease_of_an_ended_process(fault: &str, before: &Facts) -> bool {
    let values =
        fault.split_once("/info/lock: ").and_then(|(_, values)| values.split_once(" became "));
    let Some((from, to)) = values else { return false };
    let words = |text: &str| -> Vec<String> {
        text.trim_matches('\'').split(' ').map(str::to_owned).collect()
    };
    let (from, mut to) = (words(from), words(to));
    let (Some(setter), Some(now)) = (from.get(3), to.get_mut(3)) else { return false };
    now.clone_from(setter);
    let files = format!("process/{setter}/fd/");
    from == to && from[0] == "LEASE" && !before.iter().any(|(place, _)| place.starts_with(&files))
}

/// What all tasks that reported twice reported.
fn reports(path: &Path) -> [Facts; 2] {
    let file = fs::File::open(path).expect("the volume has it");
    let mut both = [Facts::default(), Facts::default()];
    for slot in 0..SLOTS {
        let text = |phase: u64| {
            let mut bytes = vec![0; REPORT_BYTES];
            let at = HEAD_BYTES + (slot * 2 + phase) * REPORT_BYTES as u64;
            file.read_exact_at(&mut bytes, at).expect("the volume has it");
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        let texts = [text(0), text(1)];
        if texts.iter().any(String::is_empty) {
            continue;
        }
        for (facts, text) in both.iter_mut().zip(&texts) {
            for line in text.lines() {
                let (name, value) = line.split_once(' ').unwrap_or((line, ""));
                facts.add(format!("task/{slot}/{name}"), value);
            }
        }
    }
    both
}

/// The kind of a difference: its place without numbers.
fn kind_of(fault: &str) -> String {
    if !fault.contains(", by the") && !fault.contains(", while it") {
        let words = fault.split(' ').map(|word| {
            let is_number = word.chars().any(|c| c.is_ascii_digit());
            if is_number { "*" } else { word }
        });
        let kind = words.collect::<Vec<_>>().join(" ");
        return kind.split_once(": system call").map_or(kind.clone(), |(kind, _)| kind.to_owned());
    }
    let place = fault.split_once(": ").map_or(fault, |(look, rest)| {
        let end = rest.find(": ").unwrap_or(rest.len().min(60));
        &fault[..look.len() + 2 + end]
    });
    let segment = |segment: &str| {
        let is_name = segment.chars().next().is_some_and(|first| !first.is_ascii_digit());
        if is_name { segment.to_owned() } else { "*".to_owned() }
    };
    place.split('/').map(segment).collect::<Vec<_>>().join("/")
}

/// Removes operations as long as a difference of the same kind remains.
fn shrink(machine: &Machine, program: &[String], kind: &str, started: Instant) -> Vec<String> {
    let shows = |program: &[String]| match machine.outcome(program) {
        Outcome::Different(faults) => faults.iter().any(|fault| kind_of(fault) == kind),
        _ => false,
    };
    let mut program = program.to_vec();
    let (mut size, mut attempts) = (program.len().div_ceil(2), 0);
    while size > 0 && attempts < ATTEMPTS_MAX && started.elapsed() < Duration::from_secs(900) {
        let mut at = 0;
        while at < program.len() && attempts < ATTEMPTS_MAX {
            let end = program.len().min(at + size);
            let fewer = [&program[..at], &program[end..]].concat();
            attempts += 1;
            if shows(&fewer) {
                program = fewer;
            } else {
                at = end;
            }
        }
        size /= 2;
    }
    program
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(format!("DORMOUSE_STATE_{name}")).ok()?;
    Some(text.parse().expect("a variable of this test is a number"))
}

/// Runs programs from a seed until their number or the time is over; prints what was found.
fn fuzz(seed: u64, first: usize, programs: usize, seconds: Option<u64>) {
    let machine = Machine::new();
    let operations = operations(&image::state().join("bin/state"));
    let started = Instant::now();
    let mut same = 0;
    let (mut refusals, mut found) = (BTreeMap::new(), BTreeMap::new());
    let mut number = first;
    while number < first + programs
        && seconds.is_none_or(|limit| started.elapsed() < Duration::from_secs(limit))
    {
        let lines = program(&operations, seed, number);
        match machine.outcome(&lines) {
            Outcome::Same => same += 1,
            Outcome::Refused(why) => {
                let line = why.lines().next().unwrap_or_default();
                let why: String = line.chars().filter(|c| !c.is_ascii_digit()).collect();
                *refusals.entry(why).or_insert(0) += 1;
            }
            Outcome::Different(faults) => {
                let kind = kind_of(faults.first().expect("there is one"));
                println!("program {number} of seed {seed}: {} differences", faults.len());
                faults.iter().take(8).for_each(|fault| println!("  {fault}"));
                // Each kind is made small once.
                if found.contains_key(&kind) {
                    *found.get_mut(&kind).expect("it is there") += 1;
                } else {
                    found.insert(kind.clone(), 1);
                    let small = shrink(&machine, &lines, &kind, Instant::now());
                    println!("  made small, for {kind}:");
                    small.iter().for_each(|line| println!("    {line}"));
                    println!(
                        "  repeat: cargo xtask fuzz-state --seed {seed} --first {number} --programs 1"
                    );
                }
            }
        }
        number += 1;
    }
    let (count, took) = (number - first, started.elapsed().as_secs_f64());
    let rate = count as f64 / took;
    let mut lines =
        vec![format!("{count} programs in {took:.0} s ({rate:.2} a second): {same} the same")];
    lines.extend(refusals.iter().map(|(why, times)| format!("refused {times} times: {why}")));
    lines.extend(found.iter().map(|(kind, times)| format!("different {times} times: {kind}")));
    let text = lines.join("\n") + "\n";
    print!("{text}");
    // The output of a test that passes is not shown.
    if let Ok(path) = std::env::var("DORMOUSE_STATE_REPORT") {
        fs::write(path, text).expect("a report");
    }
    assert!(same > 0 || count < 5, "no program of {count} was compared");
    assert!(found.is_empty(), "{} kinds of differences, see above", found.len());
}

/// Programs of a fixed seed, or those of the variables. Nightly only: the moment of the checkpoint is random,
/// and so is what a run finds.
#[test]
fn big_restored_random_state_is_as_saved() {
    if let Ok(path) = std::env::var("DORMOUSE_STATE_PROGRAM") {
        let text = fs::read_to_string(path).expect("a program in a file");
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        match Machine::new().outcome(&lines) {
            Outcome::Same => println!("the same"),
            Outcome::Refused(why) => println!("refused: {why}"),
            Outcome::Different(faults) => panic!("different:\n{}", faults.join("\n")),
        }
        return;
    }
    if slowness() > 1 {
        return println!("SKIPPED: the random programs run on the machine itself");
    }
    let seed = variable("SEED").unwrap_or(1);
    let first = variable("FIRST").unwrap_or(0) as usize;
    let seconds = variable("SECONDS");
    let default = if seconds.is_some() { usize::MAX / 2 } else { PROGRAMS };
    let programs = variable("PROGRAMS").map_or(default, |count| count as usize);
    fuzz(seed, first, programs, seconds);
}

/// Programs by which the fuzzer has found faults, each made small, with what was not restored.
const FOUND: &[(&str, &str)] = &[
    (
        "a connection that was accepted before its listener received credentials",
        "tcp 525 790 730 135;unix 917 310 557 719;option 341 1006 972 12",
    ),
    (
        "a message that was sent before its sender received credentials",
        "pair 467 609 13 161;option 952 525 985 395",
    ),
    (
        "a socket that receives credentials since its closed peer was sent a message",
        "pair 950 154 601 268;option 266 1006 360 521",
    ),
    ("memory of System V that could be written", "shm 49 840 727 480;protect 919 396 902 712"),
    (
        "a trial restore of a message queue whose open file no process leads to",
        "epoll 949 523 63 225;memfd 595 323 690 475;close 358 862 589 724;mq 755 144 146 504;\
         pipe 295 47 110 318;pair 479 687 674 32;open 334 466 528 713;passfd 755 852 181 978",
    ),
    ("a trial restore of semaphores beside a named pipe", "fifo 719 149 48 414;sem 73 623 365 933"),
    (
        "the owner of unix sockets of a process with another id for files",
        "ids 853 393 334 935;pair 956 1017 929 197",
    ),
    (
        "seals of memory that is mapped and not open",
        "memfd 436 766 348 787;open 219 639 751 691;passfd 342 51 445 356;mapfile 314 551 277 521;\
         passfd 391 601 671 859",
    ),
    (
        "credentials of a datagram socket that was parted from its closed peer",
        "pair 1 0 0 8;send 0 0 0 0",
    ),
    (
        "advice about memory that is read in order, or not",
        "map 652 999 430 244;advise 844 242 21 449",
    ),
    (
        "a file with a lease for writing that is mapped",
        "open 0 0 1 1;lease 0 1 0 0;mapfile 0 0 0 2",
    ),
    (
        "a message without credentials at a socket that receives them",
        "unix 541 790 366 287;option 447 673 507 810",
    ),
    ("a connection whose peer has ended and is gone", "tcp 616 697 873 133;close 236 274 827 439"),
    ("a connection that reads no more", "tcp 137 660 427 725;shutdown 614 3 209 22"),
    (
        "flags of an action that was reset",
        "action 454 521 244 507;thread 411 145 166 910;pend 230 1020 576 723",
    ),
    ("children that leave no zombies", "action 4 0 0 3;fork 0 0 0 0;exit 0 0 0 0;end 0 0 0 0"),
    ("the size of segments over IPv6", "tcp 1 0 0 13"),
    ("the size of segments over IPv4", "tcp 0 0 0 13"),
    (
        "memory of a file that could be written",
        "open 482 181 849 662;mapfile 145 288 443 409;protect 312 311 200 783",
    ),
    (
        "a client of packets without a name that receives credentials since its first message",
        "unix 833 411 890 739;option 31 266 989 477",
    ),
    (
        "a socket of packets without a name that receives credentials, as its peer does",
        "pair 2 0 0 0;option 1 7 0 0;send 0 0 0 0;option 0 7 0 0",
    ),
    (
        "a client without a name that receives credentials",
        "unix 561 182 466 649;option 241 229 216 655",
    ),
    // The program's own: its parent reported before the child stopped.
    (
        "the pending signal of a child that has stopped",
        "timer 646 349 708 331;fork 871 559 475 895;stop 915 89 385 632",
    ),
    (
        "the process that has set a lease, of several with the open file",
        "open 274 865 279 855;fork 10 224 484 275;lease 392 718 357 858",
    ),
    (
        "the send buffer of a pending connection whose listener was given another",
        "tcp 756 773 149 889;option 624 899 56 444",
    ),
    (
        "the receive buffer of a pending connection whose listener was given another",
        "tcp 756 773 149 891;option 624 900 56 444",
    ),
    (
        "datagrams in a receive buffer that was made smaller, over IPv6",
        "udp 633 479 455 375;option 855 308 165 568",
    ),
    (
        "datagrams in a receive buffer that was made smaller, over IPv4",
        "udp 632 479 455 375;option 855 308 165 568",
    ),
    (
        "memory of /dev/zero on a mount without execution",
        "device 736 583 24 222;mapfile 752 174 983 942",
    ),
    (
        "memory of /dev/zero from an offset, whose mapping ends behind it",
        "device 736 583 24 222;mapfile 752 174 983 943",
    ),
    ("shared memory whose mapping has grown", "map 1 3 0 3;remap 1 2 3 7"),
    (
        "the owner of a pidfd that two processes have open",
        "pidfd 903 439 68 210;notice 811 244 275 727;fork 38 777 216 685",
    ),
    ("the owner of a pidfd with a duplicate", "pidfd 1 0 0 0;dup 0 0 0 0;notice 0 0 0 1"),
    (
        "a thread of a process that writes to a stream without a reader",
        "tcp 416 749 764 553;thread 850 457 303 1000;end 934 478 967 513;write 0 396 1011 382",
    ),
    // The program's own: it counted a thread that the exit of another had ended.
    (
        "the exit of a process with another thread",
        "fork 284 421 300 204;thread 354 481 196 989;end 927 3 883 57;exit 1012 295 43 178",
    ),
    (
        "a file mapped to be read, which another process has open for writing only, with a lease",
        "open 0 1 1 0;mapfile 0 0 2 0;close 0 0 0 0;fork 0 0 0 0;open 0 2 1 0;lease 0 1 0 0;end 0 0 0 0",
    ),
    (
        "a file mapped to be written, which another process has open for reading only, with a lease",
        "open 0 0 1 1;mapfile 0 0 0 2;close 0 0 0 0;fork 0 0 0 0;open 0 1 1 0;lease 0 1 0 0;end 0 0 0 0",
    ),
    (
        "a file mapped to be read, which another process has open for both, with a lease",
        "open 0 1 1 0;mapfile 0 0 2 2;close 0 0 0 0;fork 0 0 0 0;open 0 0 1 0;lease 0 1 0 0;end 0 0 0 0",
    ),
    (
        "memory that has been populated and may not be accessed any more",
        "map 985 826 479 786;protect 313 919 897 740",
    ),
];

/// The same for files on a volume, where a mapping keeps its open file and a lease stays with it.
const FOUND_ON_VOLUMES: &[(&str, &str)] = &[
    (
        "a file that a process has mapped and its child has open with a lease for writing",
        "open 0 0 1 1;mapfile 0 0 0 2;fork 0 0 0 0;lease 0 1 0 0;end 0 0 0 0;close 0 0 0 0",
    ),
    (
        "the same of a file that is open for reading only",
        "open 0 1 1 1;mapfile 0 0 2 0;fork 0 0 0 0;lease 0 1 0 0;end 0 0 0 0;close 0 0 0 0",
    ),
];

/// Programs with state that the kernel does not let be restored, and what the refusal names.
const REFUSED: &[(&str, &str)] = &[
    ("tmpfile 303 126 150 159;lease 984 927 743 279", "with a lease"),
    ("tmpfile 891 8 780 44;mapfile 521 627 959 369;lease 385 115 650 336", "with a lease"),
    (
        "tmpfile 1 8 0 0;mapfile 0 0 2 0;fork 0 0 0 0;lease 0 1 0 0;end 0 0 0 0;close 0 0 0 0",
        "with a lease",
    ),
    ("memfd 312 815 744 880;lease 351 112 407 825", "with a lease"),
    ("open 909 166 940 953;lease 964 897 422 293;ids 591 98 373 337", "with a lease"),
    ("procfile 341 563 428 60;lease 106 850 101 847", "with a lease"),
    ("mq 0 0 0 0;lease 0 1 0 0", "the message queue '/q0', with a lease"),
    ("procfile 131 496 457 732;fdflags 959 146 743 154", "opened with O_NOATIME"),
    ("pidfd 1 0 0 0;pair 0 0 0 0;passfd 0 0 0 0", "a pidfd, which is not saved in flight"),
    ("device 736 583 24 222;mapfile 752 174 0 914", "shared memory mapped behind its end"),
    (
        "udp 521 332 901 161;fork 786 654 840 144;notice 541 239 144 783;exit 309 446 541 921",
        "a UDP socket with a pending error that signals (O_ASYNC)",
    ),
];

#[test]
fn vm_programs_with_found_faults_are_as_saved() {
    let machine = Machine::new();
    let on_volume = Machine::with_files_on_volume();
    let mut faults = Vec::new();
    let found = FOUND.iter().map(|one| (&machine, one));
    let found = found.chain(FOUND_ON_VOLUMES.iter().map(|one| (&on_volume, one)));
    for (machine, (what, program)) in found {
        let lines: Vec<String> = program.split(';').map(str::to_owned).collect();
        match machine.outcome(&lines) {
            Outcome::Same => {}
            Outcome::Refused(why) => faults.push(format!("{what}: refused: {why}")),
            Outcome::Different(all) => {
                faults.extend(all.iter().map(|one| format!("{what}: {one}")))
            }
        }
    }
    for (program, named) in REFUSED {
        let lines: Vec<String> = program.split(';').map(str::to_owned).collect();
        match machine.outcome(&lines) {
            Outcome::Refused(why) if why.contains(named) => {}
            Outcome::Refused(why) => faults.push(format!("{program}: refused: {why}")),
            Outcome::Same => faults.push(format!("{program}: not refused")),
            Outcome::Different(all) => faults.push(format!("{program}: {}", all.join("; "))),
        }
    }
    assert!(faults.is_empty(), "{} differences:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn random_programs_depend_on_the_seed_alone() {
    let operations: Vec<String> = ["open", "fork", "end"].map(str::to_owned).into();
    assert_eq!(program(&operations, 3, 4), program(&operations, 3, 4));
    assert_ne!(program(&operations, 3, 4), program(&operations, 3, 5));
    assert_ne!(program(&operations, 3, 4), program(&operations, 4, 4));
}

#[test]
fn kind_of_a_difference_has_no_numbers() {
    let fault = "procfs, by the restore: process/12/fd/3/info/pos: '1' became '2'";
    assert_eq!(kind_of(fault), "procfs, by the restore: process/*/fd/*/info/pos");
}
