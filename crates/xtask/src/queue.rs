//! Runs whole-system tests, whichever program they are of, some at a time: `cargo xtask system`, and
//! in the guest.
//!
//! A test program runs its own tests side by side, and who runs one program after the other waits for
//! the last test of each, which often does nothing but wait itself. Here a test begins when another
//! has ended. Each has a process of its own, so that one that is killed is known by its name.

use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

/// How often it is told which tests have not ended for as long.
const STILL: Duration = Duration::from_secs(120);
/// So many of those that took longest are told at the end.
const LONGEST: usize = 8;

/// One test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Test {
    /// Name of its program.
    pub of: String,
    /// The program.
    pub program: PathBuf,
    /// Its name there.
    pub name: String,
}

impl Test {
    /// By what it is told from tests of other programs.
    pub fn full_name(&self) -> String {
        format!("{}::{}", self.of, self.name)
    }
}

/// How tests are run.
#[derive(Debug, Args)]
pub struct Manner {
    /// How many run side by side; unless it is said one more than there are processors, for many wait.
    #[arg(long, default_value_t = workers())]
    pub workers: usize,
    /// One that fails beside others is run once more by itself, and counts if it fails again.
    #[arg(long)]
    pub again: bool,
    /// Where the full name of each that passed is written, a line each, as it ends.
    #[arg(long)]
    pub report: Option<PathBuf>,
}

fn workers() -> usize {
    thread::available_parallelism().map_or(2, |processors| processors.get() + 1)
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

/// Options of `cargo xtask system`.
#[derive(Debug, Args)]
pub struct SystemArgs {
    /// Only of these programs; all, unless one is named.
    programs: Vec<String>,
    /// Of all programs but these.
    #[arg(long, value_name = "PROGRAM")]
    but: Vec<String>,
    /// Only tests whose name contains this.
    #[arg(long, default_value = "")]
    tests: String,
    #[command(flatten)]
    manner: Manner,
}

/// What became of a test.
#[derive(Debug)]
enum Verdict {
    Passed,
    /// It runs only when it is asked for.
    Ignored,
    /// What it has said.
    Failed(String),
}

/// What workers tell.
enum Told {
    Begun(usize),
    Ended(usize, Verdict),
}

/// What is told of a test, by its place.
enum Event {
    /// For so long it has run, and others that were begun with it.
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

/// Builds the whole-system tests and runs them.
pub fn run_system(top: &Path, args: &SystemArgs) -> Result<ExitCode> {
    let all = programs(top, &[])?;
    for named in args.programs.iter().chain(&args.but) {
        let names = || all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(" ");
        ensure!(all.iter().any(|(name, _)| name == named), "no test program {named}: {}", names());
    }
    let wanted = |name: &String| {
        (args.programs.is_empty() || args.programs.contains(name)) && !args.but.contains(name)
    };
    let programs: Vec<_> = all.into_iter().filter(|(name, _)| wanted(name)).collect();
    run(&tests(&programs, &args.tests)?, &args.manner, &mut io::stdout())
}

/// The whole-system tests' programs and their names, built: those of `which`, words of cargo's, or all.
pub fn programs(top: &Path, which: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let which = if which.is_empty() { &["--tests"] } else { which };
    let built = crate::cargo()
        // With the features of all packages together, as `./test build` has compiled them.
        .args(["test", "--release", "--locked", "--no-run", "--workspace"])
        .args(["--message-format=json-render-diagnostics"])
        .args(which)
        .current_dir(top)
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo")?;
    ensure!(built.status.success(), "the tests do not compile");
    let mut programs = Vec::new();
    for message in cargo_metadata::Message::parse_stream(built.stdout.as_slice()) {
        let cargo_metadata::Message::CompilerArtifact(artifact) = message? else { continue };
        let Some(program) = artifact.executable.filter(|_| artifact.profile.test) else { continue };
        if !artifact.target.src_path.starts_with(top.join("tests")) {
            continue;
        }
        programs.push((artifact.target.name, program.into_std_path_buf()));
    }
    programs.sort();
    Ok(programs)
}

/// The tests of these programs whose names contain `filter`.
pub fn tests(programs: &[(String, PathBuf)], filter: &str) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    for (of, program) in programs {
        let listed = Command::new(program).args(["--list", "--format", "terse", filter]).output();
        let listed = listed.with_context(|| program.display().to_string())?;
        ensure!(listed.status.success(), "{}: {}", program.display(), listed.status);
        let listed = String::from_utf8_lossy(&listed.stdout);
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        tests.extend(names.map(|name| Test {
            of: of.clone(),
            program: program.clone(),
            name: name.to_owned(),
        }));
    }
    Ok(tests)
}

/// Runs them and says so; fails if one of them did, or if there was none.
fn run(tests: &[Test], manner: &Manner, out: &mut dyn Write) -> Result<ExitCode> {
    ensure!(!tests.is_empty(), "there are no such tests");
    let begun = Instant::now();
    let mut report = manner.report.as_deref().map(fs::File::create).transpose()?;
    let mut took: Vec<Option<Duration>> = vec![None; tests.len()];
    let (mut passed, mut ignored, mut red) = (0, 0, Vec::new());
    each(tests, manner.workers, |event| {
        let (index, verdict, time) = match event {
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
            Verdict::Failed(_) => red.push(test),
            Verdict::Ignored => ignored += 1,
            Verdict::Passed => {
                passed += 1;
                if let Some(report) = &mut report {
                    writeln!(report, "{}", test.full_name()).context("reporting")?;
                }
            }
        }
        Ok(())
    })?;
    for test in if manner.again { std::mem::take(&mut red) } else { Vec::new() } {
        writeln!(out, "   Again, by itself: {}", test.full_name())?;
        let begun = Instant::now();
        let verdict = once(test);
        out.write_all(line(test, &verdict, begun.elapsed()).as_bytes())?;
        match verdict {
            Verdict::Failed(_) => red.push(test),
            _ => passed += 1,
        }
    }
    let mut order: Vec<_> =
        tests.iter().zip(took).filter_map(|(t, took)| Some((took?, t))).collect();
    order.sort_by_key(|(took, _)| std::cmp::Reverse(*took));
    for (took, test) in order.iter().take(LONGEST) {
        writeln!(out, "{:7.1} s {}", took.as_secs_f64(), test.full_name())?;
    }
    writeln!(
        out,
        "tests: {passed} passed, {} failed, {ignored} ignored, in {:.0} s",
        red.len(),
        begun.elapsed().as_secs_f64()
    )?;
    match red.as_slice() {
        [] if passed == 0 => bail!("no test has run"),
        [] => Ok(ExitCode::SUCCESS),
        red => bail!("{}", red.iter().map(|t| t.full_name()).collect::<Vec<_>>().join(", ")),
    }
}

/// Runs each once, so many side by side, and tells what happens; one that is told of and fails ends it.
fn each(tests: &[Test], workers: usize, mut tell: impl FnMut(Event) -> Result<()>) -> Result<()> {
    let queue = Mutex::new(0..tests.len());
    let next = || queue.lock().ok()?.next();
    let (say, told) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..workers.max(1) {
            let (say, next) = (say.clone(), &next);
            scope.spawn(move || {
                while let Some(index) = next() {
                    let _ = say.send(Told::Begun(index)); // ignored: who listens has failed
                    let _ = say.send(Told::Ended(index, once(&tests[index])));
                }
            });
        }
        drop(say);
        let mut running: Vec<(usize, Instant)> = Vec::new();
        let result = loop {
            match told.recv_timeout(STILL) {
                Ok(Told::Begun(index)) => running.push((index, Instant::now())),
                Ok(Told::Ended(index, verdict)) => {
                    let at = running.iter().position(|(it, _)| *it == index);
                    let begun = at.map_or_else(Instant::now, |at| running.swap_remove(at).1);
                    if let Err(why) = tell(Event::Ended(index, verdict, begun.elapsed())) {
                        break Err(why);
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break Ok(()),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let still = |(index, begun): &(usize, Instant)| {
                        tell(Event::Still(*index, begun.elapsed()))
                    };
                    if let Err(why) = running.iter().try_for_each(still) {
                        break Err(why);
                    }
                }
            }
        };
        // Nobody begins another.
        if let Ok(mut queue) = queue.lock() {
            *queue = 0..0;
        }
        result
    })
}

/// Runs one by itself.
fn once(test: &Test) -> Verdict {
    let (status, said) = match status_and_words(test) {
        Ok(both) => both,
        Err(why) => return Verdict::Failed(format!("{}: {why}\n", test.program.display())),
    };
    // What is not there is no test that passed.
    match status.success() {
        true if said.contains("test result: ok. 1 passed") => Verdict::Passed,
        true if said.contains("; 1 ignored;") => Verdict::Ignored,
        _ => Verdict::Failed(format!("{said}{}: {status}\n", test.full_name())),
    }
}

/// How its program ended and what it has said till then: what a test has left behind may keep a pipe open.
fn status_and_words(test: &Test) -> io::Result<(ExitStatus, String)> {
    let mut file = tempfile::tempfile()?;
    let mut command = Command::new(&test.program);
    command.args(["--exact", &test.name, "--test-threads", "1"]);
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?);
    let status = command.status()?;
    let mut said = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut said)?;
    Ok((status, String::from_utf8_lossy(&said).into_owned()))
}

/// What is printed of it, in one piece: in the guest others write there, too.
fn line(test: &Test, verdict: &Verdict, took: Duration) -> String {
    let (word, why) = match verdict {
        Verdict::Passed => ("ok", ""),
        Verdict::Ignored => ("ignored", ""),
        Verdict::Failed(why) => ("FAILED", why.as_str()),
    };
    format!("test {} ... {word} ({}, {:.1} s)\n{why}", test.name, test.of, took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that answers as a test program does.
    fn program(dir: &Path, script: &str) -> PathBuf {
        let path = dir.join("program");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn run_one(script: &str, again: bool) -> (bool, String) {
        let dir = tempfile::tempdir().unwrap();
        let test = Test {
            of: "here".into(),
            program: program(dir.path(), &script.replace("DIR", &dir.path().display().to_string())),
            name: "one".into(),
        };
        let report = dir.path().join("report");
        let manner = Manner { workers: 2, again, report: Some(report.clone()) };
        let is_green = run(&[test], &manner, &mut io::sink()).is_ok();
        (is_green, fs::read_to_string(report).unwrap())
    }

    #[test]
    fn a_test_passes_when_it_says_so_and_ends_well() {
        let ok = "test result: ok. 1 passed; 0 failed; 0 ignored;";
        assert_eq!(run_one(&format!("echo '{ok}'"), false), (true, "here::one\n".into()));
        for red in [
            &format!("echo '{ok}'; exit 1"),
            &format!("echo '{ok}'; kill -KILL $$"),
            "echo 'test result: ok. 0 passed; 0 failed; 0 ignored;'",
            "echo 'test result: ok. 0 passed; 0 failed; 1 ignored;'",
            "exit 0",
        ] {
            assert_eq!(run_one(red, false), (false, String::new()), "{red}");
        }
    }

    #[test]
    fn who_stays_behind_keeps_nobody_waiting() {
        let begun = Instant::now();
        let stays = "sleep 20 & echo 'test result: ok. 1 passed'";
        assert!(run_one(stays, false).0);
        assert!(begun.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn what_fails_beside_others_may_pass_by_itself() {
        let second = "[ -e DIR/been ] && echo 'test result: ok. 1 passed'; echo >DIR/been";
        assert!(!run_one(second, false).0);
        assert!(run_one(second, true).0);
        assert!(!run_one("exit 1", true).0);
    }

    #[test]
    fn each_test_is_run_once_though_they_are_many() {
        let dir = tempfile::tempdir().unwrap();
        let says = "echo \"$2\" >>DIR/names; echo 'test result: ok. 1 passed'";
        let program = program(dir.path(), &says.replace("DIR", &dir.path().display().to_string()));
        let tests: Vec<Test> = (0..40)
            .map(|i| Test { of: "here".into(), program: program.clone(), name: format!("t{i}") })
            .collect();
        let mut out = Vec::new();
        run(&tests, &Manner { workers: 4, again: false, report: None }, &mut out).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("test t7 ... ok (here, 0."));
        let said = fs::read_to_string(dir.path().join("names")).unwrap();
        let mut names: Vec<&str> = said.lines().collect();
        names.sort_unstable();
        let mut wanted: Vec<String> = tests.into_iter().map(|t| t.name).collect();
        wanted.sort_unstable();
        assert_eq!(names, wanted);
    }
}
