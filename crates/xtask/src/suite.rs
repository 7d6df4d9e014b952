//! Which tests there are, and which of them a ring runs: `cargo xtask test`.
//!
//! - `quick`: unit tests of the changed crates and of the crates that use them, without `root_`; the short
//!   whole-system tests, some of each file.
//! - `prepush`: all of both but `big_` and the soak; lifecycle again with a checkpoint before each command.
//! - `nightly`: everything; three files again with a checkpoint before each command.
//!
//! All whole-system tests are one program, `tests/main.rs`; its modules are the files of `tests/`. The crates
//! are always compiled with the features of the whole workspace ([`SELECTION`]), so that no ring compiles a
//! library twice.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use crate::cargo::cargo;
use crate::duration::{self, Durations};
use crate::queue::{self, INTERLUDE, Manner, Test};

/// The packages that rings compile, as words of cargo's.
pub const SELECTION: [&str; 4] =
    ["--release", "--locked", "--workspace", "--exclude=dormouse-benches"];
/// How the tests of `tests/main.rs` are called.
const SYSTEM: &str = "system";
/// Modules whose tests run again with a checkpoint before each command.
const INTERLUDE_PREPUSH: &[&str] = &["lifecycle"];
const INTERLUDE_NIGHTLY: &[&str] = &["lifecycle", "network", "terminal"];
/// In names of tests that take long or much memory.
const BIG: &str = "big_";
/// The module that runs beside the fuzzers instead, since it waits most of the time.
const SOAK: &str = "soak::";
/// Recorded durations of whole-system tests in the quick ring: of one test, and of all together.
const QUICK_TEST: Duration = Duration::from_secs(3);
const QUICK_SUM: Duration = Duration::from_secs(150);

/// Which tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Ring {
    /// An answer within five minutes on a warm tree.
    Quick,
    /// What continuous integration runs.
    Prepush,
    /// Everything.
    Nightly,
}

/// Options of `cargo xtask test`.
#[derive(Debug, Args)]
pub struct TestArgs {
    /// Only tests whose full name contains one of these, of every ring: `system::sleep::`, `kernel::`, `root_`
    filters: Vec<String>,
    /// Only tests whose full name is one of the filters.
    #[arg(long)]
    exact: bool,
    /// The ring to run.
    #[arg(long, value_enum, default_value_t = Ring::Prepush)]
    ring: Ring,
    /// Prints the names of the tests instead of running them.
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    manner: Manner,
}

/// Builds the programs and the tests, and runs those of the ring.
pub fn run(top: &Path, args: &TestArgs) -> Result<ExitCode> {
    let durations = top.join(duration::PATH);
    let recorded = Durations::read(&durations)?;
    let users = if args.ring == Ring::Quick { Some(changed(top)?) } else { None };
    if args.ring == Ring::Quick {
        println!("changed crates and their users: {}", words(users.iter().flatten()));
    }
    build_programs(top)?;
    let programs = programs(top, &["--tests"])?;
    let all = all_tests(&programs)?;
    let is_small = |test: &Test| !test.name.contains(BIG) && !test.name.starts_with(SOAK);
    let mut tests = match args.ring {
        _ if !args.filters.is_empty() => filtered(with_interludes(all, INTERLUDE_NIGHTLY), args),
        Ring::Quick => quick(all, &users.unwrap_or_default(), &recorded),
        Ring::Prepush => with_interludes(all, INTERLUDE_PREPUSH),
        Ring::Nightly => with_interludes(all, INTERLUDE_NIGHTLY),
    };
    match args.ring {
        _ if !args.filters.is_empty() => {}
        Ring::Nightly => tests.retain(|test| !test.name.starts_with(SOAK)),
        _ => tests.retain(is_small),
    }
    if args.list {
        tests.iter().for_each(|test| println!("{}", test.full_name()));
        return Ok(ExitCode::SUCCESS);
    }
    let manner = Manner { durations: Some(durations.clone()), ..args.manner.clone() };
    if args.ring == Ring::Quick && args.filters.is_empty() {
        let programs = tests.iter().map(|test| test.of.as_str()).collect::<BTreeSet<_>>();
        println!("quick: {} tests of {}", tests.len(), words(programs.iter()));
    }
    let status = queue::run(&tests, &manner, &mut io::stdout())?;
    if args.manner.record && args.ring == Ring::Nightly && args.filters.is_empty() {
        let names: BTreeSet<String> = tests.iter().map(Test::full_name).collect();
        let mut recorded = Durations::read(&durations)?;
        recorded.retain(|name| names.contains(name));
        recorded.write(&durations)?;
    }
    Ok(status)
}

/// The tests that a filter names; those with a checkpoint before each command only where it names these.
fn filtered(tests: Vec<Test>, args: &TestArgs) -> Vec<Test> {
    let matches = |test: &Test, filter: &String| {
        let name = test.full_name();
        match args.exact {
            true => name == *filter,
            false => {
                name.contains(filter.as_str()) && test.interlude == filter.ends_with(INTERLUDE)
            }
        }
    };
    tests.into_iter().filter(|test| args.filters.iter().any(|f| matches(test, f))).collect()
}

fn words(list: impl Iterator<Item = impl AsRef<str>>) -> String {
    list.map(|word| word.as_ref().to_owned()).collect::<Vec<_>>().join(" ")
}

/// A compiled test program.
#[derive(Debug)]
pub struct Program {
    /// How its tests are called: `system`, or the crate's folder, with the file of an integration test.
    of: String,
    path: PathBuf,
    /// Directory of its package.
    dir: PathBuf,
}

/// Compiles the programs under test, which `cargo test` leaves as they are: it compiles programs for the
/// integration tests of their own package only.
fn build_programs(top: &Path) -> Result<()> {
    let mut build = cargo();
    build.arg("build").args(SELECTION).arg("--bins").current_dir(top);
    let built = build.status().context("starting cargo")?;
    ensure!(built.success(), "the programs do not compile");
    Ok(())
}

/// Compiles test programs: `which` are words of cargo's that select targets.
pub fn programs(top: &Path, which: &[&str]) -> Result<Vec<Program>> {
    let built = cargo()
        .args(["test", "--no-run", "--message-format=json-render-diagnostics"])
        .args(SELECTION)
        .args(which)
        .current_dir(top)
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo")?;
    ensure!(built.status.success(), "the tests do not compile");
    let mut programs = Vec::new();
    for message in cargo_metadata::Message::parse_stream(built.stdout.as_slice()) {
        let cargo_metadata::Message::CompilerArtifact(artifact) = message? else { continue };
        let Some(path) = artifact.executable.filter(|_| artifact.profile.test) else { continue };
        let dir = artifact.manifest_path.parent().context("a manifest without a directory")?;
        let package = package_of(top, dir.as_std_path());
        let of = match artifact.target.is_test() {
            true if package == "tests" => SYSTEM.to_owned(),
            true => format!("{package}/{}", artifact.target.name),
            false => package,
        };
        programs.push(Program { of, path: path.into(), dir: dir.into() });
    }
    programs.sort_by(|a, b| (&a.of, &a.path).cmp(&(&b.of, &b.path)));
    Ok(programs)
}

/// The name of a package by its directory.
fn package_of(top: &Path, dir: &Path) -> String {
    let inside = dir.strip_prefix(top).unwrap_or(dir);
    inside.strip_prefix("crates").unwrap_or(inside).display().to_string()
}

/// The whole-system tests alone.
pub fn system_tests(top: &Path) -> Result<Vec<Test>> {
    build_programs(top)?;
    let programs = programs(top, &["--test=system"])?;
    Ok(all_tests(&programs)?.into_iter().filter(|test| test.of == SYSTEM).collect())
}

/// The tests of these programs.
fn all_tests(programs: &[Program]) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    for Program { of, path, dir } in programs {
        let mut list = Command::new(path);
        list.args(["--list", "--format", "terse"]).current_dir(dir);
        let listed = list.output().with_context(|| path.display().to_string())?;
        ensure!(listed.status.success(), "{}: {}", path.display(), listed.status);
        let listed = String::from_utf8_lossy(&listed.stdout);
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        tests.extend(names.map(|name| Test {
            of: of.clone(),
            program: path.clone(),
            name: name.to_owned(),
            dir: Some(dir.clone()),
            interlude: false,
        }));
    }
    Ok(tests)
}

/// Adds the tests of these modules once more, with a checkpoint before each command.
fn with_interludes(mut tests: Vec<Test>, modules: &[&str]) -> Vec<Test> {
    let is_of = |test: &&Test| {
        let module = test.name.split_once("::").map(|(module, _)| module);
        test.of == SYSTEM && module.is_some_and(|module| modules.contains(&module))
    };
    let again: Vec<Test> =
        tests.iter().filter(is_of).map(|test| Test { interlude: true, ..test.clone() }).collect();
    tests.extend(again);
    tests
}

/// The quick ring: unit tests of `users` without root, and short whole-system tests up to a sum of recorded
/// durations, taken from every file in turn.
fn quick(tests: Vec<Test>, users: &BTreeSet<String>, recorded: &Durations) -> Vec<Test> {
    let (system, units): (Vec<_>, Vec<_>) = tests.into_iter().partition(|t| t.of == SYSTEM);
    let is_wanted = |test: &Test| {
        let package = test.of.split('/').next().unwrap_or_default();
        users.contains(package) && !test.name.contains("root_")
    };
    let mut chosen: Vec<Test> = units.into_iter().filter(is_wanted).collect();
    let mut modules: BTreeMap<String, Vec<(Duration, Test)>> = BTreeMap::new();
    for test in system {
        let took = recorded.get(&test.full_name());
        let Some(took) = took.filter(|took| *took < QUICK_TEST) else { continue };
        if test.name.contains(BIG) || test.name.starts_with(SOAK) {
            continue;
        }
        let module = test.name.split("::").next().unwrap_or_default().to_owned();
        modules.entry(module).or_default().push((took, test));
    }
    modules.values_mut().for_each(|list| list.sort_by_key(|(took, _)| *took));
    let mut sum = Duration::ZERO;
    loop {
        let before = chosen.len();
        for list in modules.values_mut() {
            let Some((took, test)) = list.pop() else { continue };
            if sum + took <= QUICK_SUM {
                sum += took;
                chosen.push(test);
            }
        }
        if chosen.len() == before {
            return chosen;
        }
    }
}

/// The crates with changes that are not committed, or else with changes of the last commit; and the crates
/// that use one of them.
fn changed(top: &Path) -> Result<BTreeSet<String>> {
    let git = |words: &[&str]| -> Result<String> {
        let output = Command::new("git").args(words).current_dir(top).output();
        let output = output.context("starting git")?;
        ensure!(output.status.success(), "git {}: {}", words.join(" "), output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let mut files = git(&["diff", "--name-only", "HEAD"])?;
    files.push_str(&git(&["ls-files", "--others", "--exclude-standard"])?);
    if files.trim().is_empty() {
        files = git(&["diff", "--name-only", "HEAD~1", "HEAD"])?;
    }
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(top.join("Cargo.toml"))
        .no_deps()
        .exec()
        .context("cargo metadata")?;
    let mut uses: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in &metadata.packages {
        let dir = package.manifest_path.parent().context("a manifest without a directory")?;
        let name = package_of(top, dir.as_std_path());
        let ours = package.dependencies.iter().filter_map(|it| it.name.strip_prefix("dormouse-"));
        uses.insert(name, ours.map(str::to_owned).collect());
    }
    Ok(closure(&files, &uses))
}

/// The packages that hold one of the files, and all that use one of these, directly or not.
fn closure(files: &str, uses: &BTreeMap<String, Vec<String>>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in files.lines() {
        let file = file.strip_prefix("crates/").unwrap_or(file);
        let package = file.split('/').next().unwrap_or_default();
        if uses.contains_key(package) {
            found.insert(package.to_owned());
        }
    }
    loop {
        let more: Vec<String> = uses
            .iter()
            .filter(|(name, used)| !found.contains(*name) && used.iter().any(|u| found.contains(u)))
            .map(|(name, _)| name.clone())
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(of: &str, name: &str) -> Test {
        Test {
            of: of.into(),
            program: PathBuf::new(),
            name: name.into(),
            dir: None,
            interlude: false,
        }
    }

    #[test]
    fn change_reaches_the_crates_that_use_it() {
        let uses = |list: &[(&str, &[&str])]| -> BTreeMap<String, Vec<String>> {
            let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
            list.iter().map(|(name, used)| ((*name).to_owned(), owned(used))).collect()
        };
        let uses =
            uses(&[("model", &[]), ("kernel", &["model"]), ("cli", &["kernel"]), ("bpf", &[])]);
        let names = |files: &str| closure(files, &uses).into_iter().collect::<Vec<_>>().join(" ");
        assert_eq!(names("crates/kernel/src/lib.rs\nREADME.md\n"), "cli kernel");
        assert_eq!(names("crates/model/src/lib.rs\n"), "cli kernel model");
        assert_eq!(names("crates/bpf/src/a.c\ncrates/cli/src/x.rs"), "bpf cli");
        assert_eq!(names("docs/x.md"), "");
    }

    #[test]
    fn quick_ring_takes_short_tests_of_every_file_within_its_sum() {
        let mut recorded = Durations::default();
        let mut tests =
            vec![test("kernel", "a::x"), test("kernel/root", "root_y"), test("cli", "z")];
        for i in 0..200 {
            let one = test("system", &format!("sleep::t{i}"));
            recorded.set(&one.full_name(), Duration::from_millis(2900));
            tests.push(one);
        }
        for (name, seconds) in [("oci::short", 1), ("oci::long", 30), ("oci::big_short", 1)] {
            let one = test("system", name);
            recorded.set(&one.full_name(), Duration::from_secs(seconds));
            tests.push(one);
        }
        tests.push(test("system", "oci::unknown"));
        let users = BTreeSet::from(["kernel".to_owned()]);
        let chosen = quick(tests, &users, &recorded);
        let names: Vec<String> = chosen.iter().map(Test::full_name).collect();
        assert!(names.contains(&"kernel::a::x".to_owned()));
        assert!(names.contains(&"system::oci::short".to_owned()));
        for absent in ["kernel/root::root_y", "cli::z", "system::oci::long", "system::oci::unknown"]
        {
            assert!(!names.contains(&absent.to_owned()), "{absent}");
        }
        assert!(!names.iter().any(|name| name.contains("big_")));
        let sleeps = names.iter().filter(|name| name.contains("sleep::")).count();
        assert!((45..55).contains(&sleeps), "{sleeps}");
    }

    #[test]
    fn interlude_adds_the_tests_of_its_modules() {
        let tests =
            vec![test("system", "lifecycle::a"), test("system", "sleep::b"), test("cli", "c")];
        let all = with_interludes(tests, &["lifecycle"]);
        let names: Vec<String> = all.iter().map(Test::full_name).collect();
        assert_eq!(names[3], format!("system::lifecycle::a{INTERLUDE}"));
        assert_eq!(names.len(), 4);
    }
}
