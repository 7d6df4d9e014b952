//! Runs a list of tests, several at a time, from one queue.
//!
//! Each test has a process of its own: a test that is killed is known by its name, and a worker takes the
//! next test as soon as the last one has ended, whichever program it belongs to. The order is longest
//! first by recorded durations ([`crate::duration`]), so that no long test starts last; a test without a
//! record counts as long. Two tests of one [`Test::group`] never run at the same time.
//!
//! A test has a deadline ([`deadline`]). When it passes, the queue prints in which system call every process
//! of the test waits, and kills the test. A run with failures ends with one screen: the tests, their
//! assertions, and the command that repeats each alone.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dormouse_testkit::waiting;
use serde::{Deserialize, Serialize};

use crate::duration::Durations;

/// Interval between lines about tests that still run.
const STILL: Duration = Duration::from_secs(120);
/// Number of the longest tests that the end of a run lists.
const LONGEST: usize = 8;
/// LIMIT: time of a test without a recorded duration.
const DEADLINE_UNKNOWN: Duration = Duration::from_secs(400);
/// LIMIT: the shortest deadline. A busy machine may delay the shortest test.
const DEADLINE_MIN: Duration = Duration::from_secs(150);
/// LIMIT: a test may take this many times its recorded duration.
const DEADLINE_FACTOR: u32 = 12;
/// Lines of one failure that the last screen shows.
const FAILURE_LINES: usize = 6;
/// Failures that the last screen shows in full.
const FAILURES_SHOWN: usize = 8;

/// One test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Test {
    /// The crate of a unit test, or `system`.
    pub of: String,
    /// The program.
    pub program: PathBuf,
    /// The test's name in the program.
    pub name: String,
    /// The directory in which the program runs; cargo's rule is that of the package.
    #[serde(default)]
    pub dir: Option<PathBuf>,
    /// Whether every container is checkpointed and restored before each command (`DORMOUSE_INTERLUDE`).
    #[serde(default)]
    pub interlude: bool,
}

impl Test {
    /// The name by which the test is recorded and repeated.
    pub fn full_name(&self) -> String {
        let mark = if self.interlude { INTERLUDE } else { "" };
        format!("{}::{}{mark}", self.of, self.name)
    }

    /// The resource of the whole kernel that the test needs for itself.
    ///
    /// Swap areas, the machine's memory and the pid space cannot be given to a test as a namespace.
    fn group(&self) -> Option<&'static str> {
        let is_swap = ["swap::", "drowsy::", "gatekeeper::"]
            .iter()
            .any(|module| self.of == "system" && self.name.starts_with(module));
        is_swap.then_some("swap")
    }
}

/// The end of the full name of a test that runs with a checkpoint before each command.
pub const INTERLUDE: &str = "+interlude";

/// How tests are run.
#[derive(Debug, Args, Clone, Default)]
pub struct Manner {
    /// Number of tests that run side by side [default: one more than processors, since many wait]
    #[arg(long)]
    pub workers: Option<usize>,
    /// File to which the full name of each passed test is written at once, one per line.
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// File of recorded durations.
    #[arg(long)]
    pub durations: Option<PathBuf>,
    /// Writes the durations of this run to the file of recorded durations.
    #[arg(long)]
    pub record: bool,
    /// Runs the whole list this many times.
    #[arg(long, default_value_t = 1)]
    pub rounds: u32,
}

impl Manner {
    fn workers(&self) -> usize {
        let default =
            || thread::available_parallelism().map_or(3, |processors| processors.get() + 1);
        self.workers.unwrap_or_else(default).max(1)
    }
}

/// Options of `cargo xtask queue`.
#[derive(Debug, Args)]
pub struct QueueArgs {
    /// The tests, as JSON: an array of `of`, `program` and `name`.
    #[arg(long)]
    list: PathBuf,
    #[command(flatten)]
    manner: Manner,
}

/// The result of one test.
#[derive(Debug)]
enum Verdict {
    Passed,
    /// The test is marked `#[ignore]`.
    Ignored,
    /// With the output of the test.
    Failed(String),
}

/// Progress of one test, by its index.
enum Event {
    Begun(usize),
    Still(usize, Duration),
    Ended(usize, Verdict, Duration),
}

/// Runs the tests of a list.
pub fn run_list(args: &QueueArgs) -> Result<ExitCode> {
    let shown = || args.list.display().to_string();
    let list = fs::read(&args.list).with_context(shown)?;
    let tests: Vec<Test> = serde_json::from_slice(&list).with_context(shown)?;
    run(&tests, &args.manner, &mut io::stdout())
}

/// Runs the tests in as many rounds as `manner` has; an error if one failed, or if none ran.
pub fn run(tests: &[Test], manner: &Manner, out: &mut dyn Write) -> Result<ExitCode> {
    ensure!(!tests.is_empty(), "no test matches");
    let path = manner.durations.as_deref();
    let mut durations = path.map(Durations::read).transpose()?.unwrap_or_default();
    let mut tests = tests.to_vec();
    // Longest first; a test without a record before all others.
    tests.sort_by_cached_key(|test| {
        let known = durations.get(&test.full_name()).unwrap_or(Duration::MAX);
        (std::cmp::Reverse(known), test.full_name())
    });
    let deadlines: Vec<Duration> =
        tests.iter().map(|test| deadline(durations.get(&test.full_name()))).collect();
    let mut red: Vec<(Test, String)> = Vec::new();
    for round in 1..=manner.rounds.max(1) {
        if manner.rounds > 1 {
            writeln!(out, "round {round} of {}", manner.rounds)?;
        }
        let done = round_of(&tests, &deadlines, manner, out)?;
        for (test, took) in &done.took {
            durations.set(test, *took);
        }
        red.extend(done.red);
    }
    if manner.record {
        let path = path.context("--record needs --durations FILE")?;
        durations.write(path)?;
    }
    if red.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    out.write_all(last_screen(&red).as_bytes())?;
    bail!("{} failed", red.iter().map(|(t, _)| t.full_name()).collect::<Vec<_>>().join(", "))
}

/// The time after which a test with this recorded duration is killed, on the machine of the record;
/// `DORMOUSE_TEST_SLOWNESS` multiplies it, and no deadline is shorter than `DORMOUSE_TEST_DEADLINE_S`.
fn deadline(recorded: Option<Duration>) -> Duration {
    let plain =
        recorded.map_or(DEADLINE_UNKNOWN, |took| (took * DEADLINE_FACTOR).max(DEADLINE_MIN));
    let least = std::env::var("DORMOUSE_TEST_DEADLINE_S").ok().and_then(|s| s.parse().ok());
    (plain * dormouse_testkit::slowness()).max(Duration::from_secs(least.unwrap_or(0)))
}

/// One round.
struct Done {
    red: Vec<(Test, String)>,
    took: Vec<(String, Duration)>,
}

fn round_of(
    tests: &[Test],
    deadlines: &[Duration],
    manner: &Manner,
    out: &mut dyn Write,
) -> Result<Done> {
    let begun = Instant::now();
    let mut report = manner.report.as_deref().map(fs::File::create).transpose()?;
    let mut took: Vec<Option<Duration>> = vec![None; tests.len()];
    let (mut passed, mut ignored, mut red) = (0, 0, Vec::new());
    each(tests, deadlines, manner.workers(), |event| {
        let (index, verdict, time) = match event {
            Event::Begun(_) => return Ok(()),
            Event::Still(index, time) => {
                let name = tests[index].full_name();
                return Ok(writeln!(out, "still running after {} s: {name}", time.as_secs())?);
            }
            Event::Ended(index, verdict, time) => (index, verdict, time),
        };
        let test = &tests[index];
        took[index] = Some(time);
        out.write_all(line(test, &verdict, time).as_bytes())?;
        match verdict {
            Verdict::Failed(output) => red.push((test.clone(), output)),
            Verdict::Ignored => ignored += 1,
            Verdict::Passed => {
                passed += 1;
                if let Some(report) = &mut report {
                    writeln!(report, "{}", test.full_name()).context("writing the report")?;
                }
            }
        }
        Ok(())
    })?;
    let mut order: Vec<_> =
        tests.iter().zip(took).filter_map(|(t, took)| Some((t.full_name(), took?))).collect();
    order.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
    for (test, took) in order.iter().take(LONGEST) {
        writeln!(out, "{:7.1} s {test}", took.as_secs_f64())?;
    }
    let sum: Duration = order.iter().map(|(_, took)| *took).sum();
    writeln!(
        out,
        "tests: {passed} passed, {} failed, {ignored} ignored, in {:.0} s ({:.0} s of tests, {} workers)",
        red.len(),
        begun.elapsed().as_secs_f64(),
        sum.as_secs_f64(),
        manner.workers(),
    )?;
    ensure!(passed > 0 || !red.is_empty(), "no test has run");
    Ok(Done { red, took: order })
}

/// The tests that no worker has begun, and the groups that are taken.
struct Left {
    indices: Vec<usize>,
    taken: BTreeSet<&'static str>,
}

impl Left {
    /// Removes and returns the first test whose group is free.
    fn next(&mut self, tests: &[Test]) -> Option<usize> {
        let is_free =
            |index: &usize| tests[*index].group().is_none_or(|group| !self.taken.contains(group));
        let at = self.indices.iter().position(is_free)?;
        let index = self.indices.remove(at);
        self.taken.extend(tests[index].group());
        Some(index)
    }
}

/// Runs each test once, `workers` side by side, and reports every event; an error of the receiver ends the run.
fn each(
    tests: &[Test],
    deadlines: &[Duration],
    workers: usize,
    mut report: impl FnMut(Event) -> Result<()>,
) -> Result<()> {
    let left = Mutex::new(Left { indices: (0..tests.len()).collect(), taken: BTreeSet::new() });
    let changed = Condvar::new();
    // Blocks while the tests that are left belong to groups that are taken.
    let next = || {
        let mut left = left.lock().ok()?;
        loop {
            if left.indices.is_empty() {
                return None;
            }
            match left.next(tests) {
                Some(index) => return Some(index),
                None => left = changed.wait(left).ok()?,
            }
        }
    };
    let done = |index: usize| {
        if let (Ok(mut left), Some(group)) = (left.lock(), tests[index].group()) {
            left.taken.remove(group);
        }
        changed.notify_all();
    };
    let (send, events) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..workers {
            let (send, next, done) = (send.clone(), &next, &done);
            scope.spawn(move || {
                while let Some(index) = next() {
                    let begun = Instant::now();
                    let _ = send.send(Event::Begun(index)); // ignored: the receiver has failed
                    let verdict = once(&tests[index], deadlines[index]);
                    done(index);
                    let _ = send.send(Event::Ended(index, verdict, begun.elapsed()));
                }
            });
        }
        drop(send);
        let result = follow(&events, &mut report);
        // No worker begins another test.
        if let Ok(mut left) = left.lock() {
            left.indices.clear();
        }
        changed.notify_all();
        result
    })
}

/// Passes events on, and [`Event::Still`] for each running test when none came for [`STILL`].
fn follow(
    events: &mpsc::Receiver<Event>,
    report: &mut impl FnMut(Event) -> Result<()>,
) -> Result<()> {
    let mut running: Vec<(usize, Instant)> = Vec::new();
    loop {
        match events.recv_timeout(STILL) {
            Ok(event) => {
                match &event {
                    Event::Begun(index) => running.push((*index, Instant::now())),
                    Event::Ended(index, ..) => running.retain(|(it, _)| it != index),
                    Event::Still(..) => {}
                }
                report(event)?;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                for (index, begun) in &running {
                    report(Event::Still(*index, begun.elapsed()))?;
                }
            }
        }
    }
}

/// Runs one test.
fn once(test: &Test, deadline: Duration) -> Verdict {
    let (status, output) = match status_and_output(test, deadline) {
        Ok(both) => both,
        Err(error) => return Verdict::Failed(format!("{}: {error}\n", test.program.display())),
    };
    // A program without that test ends well, too, and is no passed test.
    match status.success() {
        true if output.contains("test result: ok. 1 passed") => Verdict::Passed,
        true if output.contains("; 1 ignored;") => Verdict::Ignored,
        _ => Verdict::Failed(format!("{output}{}: {status}\n", test.full_name())),
    }
}

/// The exit status of the test's program and its output until then.
///
/// The output goes to a file: a process that the test left behind may keep a pipe open.
fn status_and_output(test: &Test, deadline: Duration) -> io::Result<(ExitStatus, String)> {
    let mut file = tempfile::tempfile()?;
    let mut command = Command::new(&test.program);
    command.args(["--exact", &test.name, "--test-threads", "1"]);
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?);
    command.current_dir(test.dir.as_deref().unwrap_or(Path::new(".")));
    if test.interlude {
        command.env("DORMOUSE_INTERLUDE", "1");
    }
    let mut child = command.spawn()?;
    let ended = wait(&mut child, deadline)?;
    let waited_for = if ended.is_none() { waiting::describe(child.id()) } else { String::new() };
    let status = match ended {
        Some(status) => status,
        None => {
            child.kill()?;
            child.wait()?
        }
    };
    let mut output = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut output)?;
    let mut output = String::from_utf8_lossy(&output).into_owned();
    if ended.is_none() {
        let _ = write!(
            output,
            "\npanicked at the deadline of {} s; its processes waited:\n{waited_for}",
            deadline.as_secs()
        );
    }
    Ok((status, output))
}

/// The status of a child that exits before the deadline.
fn wait(child: &mut Child, deadline: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= deadline {
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// The report of one test, in one piece: in the guest other programs write to the same place.
fn line(test: &Test, verdict: &Verdict, took: Duration) -> String {
    let (word, output) = match verdict {
        Verdict::Passed => ("ok", ""),
        Verdict::Ignored => ("ignored", ""),
        Verdict::Failed(output) => ("FAILED", output.as_str()),
    };
    format!("test {} ... {word} ({:.1} s)\n{output}", test.full_name(), took.as_secs_f64())
}

/// The failures, each with its assertion and the command that repeats it, on one screen.
fn last_screen(red: &[(Test, String)]) -> String {
    let mut screen = format!("\n== {} failed\n", red.len());
    for (test, output) in red.iter().take(FAILURES_SHOWN) {
        let lines: Vec<&str> = output.lines().collect();
        let from = lines.iter().position(|line| line.contains("panicked at"));
        let from = from.unwrap_or(lines.len().saturating_sub(FAILURE_LINES));
        let _ = writeln!(screen, "-- {}", test.full_name());
        for line in lines[from..].iter().take(FAILURE_LINES) {
            let _ = writeln!(screen, "   {}", line.chars().take(160).collect::<String>());
        }
        let _ = writeln!(screen, "   repeat: cargo xtask test --exact {}", test.full_name());
    }
    for (test, _) in red.iter().skip(FAILURES_SHOWN) {
        let _ = writeln!(screen, "-- cargo xtask test --exact {}", test.full_name());
    }
    screen
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const OK: &str = "test result: ok. 1 passed; 0 failed; 0 ignored;";

    /// A program that answers as a test program does.
    fn program(dir: &Path, script: &str) -> PathBuf {
        let path = dir.join("program");
        let script = script.replace("DIR", &dir.display().to_string());
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn test(program: &Path, name: &str) -> Test {
        Test {
            of: "here".into(),
            program: program.to_owned(),
            name: name.into(),
            dir: None,
            interlude: false,
        }
    }

    fn run_one(script: &str) -> (bool, String) {
        let dir = tempfile::tempdir().unwrap();
        let test = test(&program(dir.path(), script), "one");
        let report = dir.path().join("report");
        let manner = Manner { report: Some(report.clone()), rounds: 1, ..Manner::default() };
        let is_green = run(&[test], &manner, &mut io::sink()).is_ok();
        (is_green, fs::read_to_string(report).unwrap())
    }

    #[test]
    fn test_passes_when_its_result_and_its_status_are_good() {
        assert_eq!(run_one(&format!("echo '{OK}'")), (true, "here::one\n".into()));
        for red in [
            &format!("echo '{OK}'; exit 1"),
            &format!("echo '{OK}'; kill -KILL $$"),
            "echo 'test result: ok. 0 passed; 0 failed; 0 ignored;'",
            "echo 'test result: ok. 0 passed; 0 failed; 1 ignored;'",
            "exit 0",
        ] {
            assert_eq!(run_one(red), (false, String::new()), "{red}");
        }
    }

    #[test]
    fn leftover_process_does_not_delay_the_result() {
        let begun = Instant::now();
        assert!(run_one(&format!("sleep 60 & echo '{OK}'")).0);
        assert!(begun.elapsed() < Duration::from_secs(50));
    }

    #[test]
    fn failed_test_is_not_repeated() {
        let second = format!("[ -e DIR/been ] && echo '{OK}'; echo >DIR/been");
        assert_eq!(run_one(&second), (false, String::new()));
    }

    #[test]
    fn deadline_kills_the_test_and_names_what_it_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let test = test(&program(dir.path(), "sleep 1000"), "one");
        let Verdict::Failed(output) = once(&test, Duration::from_millis(300)) else {
            panic!("a test that sleeps does not pass")
        };
        assert!(output.contains("panicked at the deadline"), "{output}");
        assert!(output.contains("sleep"), "{output}");
    }

    #[test]
    fn every_test_runs_once_and_longest_first() {
        let dir = tempfile::tempdir().unwrap();
        let program = program(dir.path(), &format!("echo \"$2\" >>DIR/names; echo '{OK}'"));
        let tests: Vec<Test> = (0..40).map(|i| test(&program, &format!("t{i}"))).collect();
        let mut durations = Durations::default();
        for (i, test) in tests.iter().enumerate().skip(1) {
            durations.set(&test.full_name(), Duration::from_millis(100 * i as u64));
        }
        let path = dir.path().join("durations.json");
        durations.write(&path).unwrap();
        let mut out = Vec::new();
        let manner =
            Manner { workers: Some(1), durations: Some(path), rounds: 1, ..Manner::default() };
        run(&tests, &manner, &mut out).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("test here::t7 ... ok (0."));
        let names = fs::read_to_string(dir.path().join("names")).unwrap();
        let names: Vec<&str> = names.lines().collect();
        // t0 has no record: it comes first.
        let wanted: Vec<String> =
            std::iter::once(0).chain((1..40).rev()).map(|i| format!("t{i}")).collect();
        assert_eq!(names, wanted);
    }

    #[test]
    fn tests_of_one_group_are_kept_apart() {
        let dir = tempfile::tempdir().unwrap();
        let script = format!("mkdir DIR/lock || exit 1; sleep 0.05; rmdir DIR/lock; echo '{OK}'");
        let program = program(dir.path(), &script);
        let swap = |i| Test { of: "system".into(), ..test(&program, &format!("swap::t{i}")) };
        let tests: Vec<Test> = (0..6).map(swap).collect();
        let manner = Manner { workers: Some(4), rounds: 1, ..Manner::default() };
        run(&tests, &manner, &mut io::sink()).unwrap();
    }

    #[test]
    fn failing_run_ends_with_assertions_and_commands() {
        let red: Vec<(Test, String)> = (0..10)
            .map(|i| {
                let output =
                    format!("noise\nthread panicked at src/x.rs:{i}:\nleft: 1\nright: 2\n");
                (test(Path::new("p"), &format!("t{i}")), output)
            })
            .collect();
        let screen = last_screen(&red);
        assert!(screen.contains("panicked at src/x.rs:3"), "{screen}");
        assert!(screen.contains("cargo xtask test --exact here::t9"), "{screen}");
        assert!(screen.lines().count() < 60, "{screen}");
    }
}
