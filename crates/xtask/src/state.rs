//! `cargo xtask state`: docs/state.md, the contents of a checkpoint, from the results of its tests.
//!
//! The kinds are listed in `tests/workloads/kinds.txt`, each with the tests that hold it. A kind is
//! *saved* when all of them pass in this run, and *missing* when it names none.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

/// Options of the task.
#[derive(clap::Args)]
pub struct StateArgs {
    /// Output of an earlier `cargo xtask test system::checkpoint:: system::programs::`, instead of a new run
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

const KINDS: &str = "tests/workloads/kinds.txt";
const PAGE: &str = "docs/state.md";

/// Writes the page; fails if a named test fails or does not exist.
pub fn run(top: &Path, args: &StateArgs) -> Result<ExitCode> {
    let kinds = fs::read_to_string(top.join(KINDS)).context(KINDS)?;
    let log = match &args.log {
        Some(path) => fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => {
            let mut command = std::process::Command::new(std::env::current_exe()?);
            command.current_dir(top).args(["test", "system::checkpoint::", "system::programs::"]);
            let output = command.output().context("cargo xtask test")?;
            String::from_utf8_lossy(&output.stdout).into_owned()
        }
    };
    let (page, failed) = page(&kinds, &results(&log))?;
    fs::write(top.join(PAGE), page).context(PAGE)?;
    for test in &failed {
        eprintln!("{test} does not pass");
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Which tests passed, by their names within their file, from the output of `cargo xtask test`.
fn results(log: &str) -> HashMap<&str, bool> {
    log.lines().filter_map(result).collect()
}

/// The test of one line of output, and whether it passed.
fn result(line: &str) -> Option<(&str, bool)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let name = name.strip_prefix("system::").and_then(|name| name.split_once("::"))?.1;
    Some((name, result.split(' ').next() == Some("ok")))
}

/// The page, and the named tests that did not pass.
fn page(kinds: &str, results: &HashMap<&str, bool>) -> Result<(String, Vec<String>)> {
    let mut page = String::from(
        "# Contents of a checkpoint\n\nMade by `cargo xtask state` from the results of \
         `tests/checkpoint.rs` and `tests/programs.rs`.\nThe kinds are listed in \
         `tests/workloads/kinds.txt`. *Saved*: a workload with the kind is checkpointed and\n\
         restored three times, and checkpointed three times while it continues. *Missing*:\n\
         refused by name, process and descriptor before any process is stopped, unless the last\n\
         column gives another outcome.\n",
    );
    let mut failed = Vec::new();
    let mut is_head = true;
    for line in kinds.lines() {
        if let Some(title) = line.strip_prefix('#') {
            // The first lines describe the file.
            if !is_head {
                write!(page, "\n##{title}\n\n| kind | state | held by | not saved |\n")?;
                page.push_str("|---|---|---|---|\n");
            }
            continue;
        }
        if line.is_empty() {
            is_head = false;
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [kind, tests, note] = cells[..] else { bail!("{KINDS}: '{line}' has no three cells") };
        let tests: Vec<&str> = tests.split(',').map(str::trim).filter(|t| *t != "-").collect();
        let bad = tests.iter().filter(|t| results.get(*t) != Some(&true));
        let bad: Vec<String> = bad.map(|t| (*t).to_owned()).collect();
        let state = match (tests.is_empty(), bad.is_empty()) {
            (true, _) => "missing",
            (false, true) => "saved",
            (false, false) => "**fails**",
        };
        failed.extend(bad);
        let held: Vec<String> = tests.iter().map(|t| format!("`{t}`")).collect();
        writeln!(page, "| {kind} | {state} | {} | {note} |", held.join(", "))?;
    }
    failed.sort_unstable();
    failed.dedup();
    Ok((page, failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_saved_when_its_tests_pass() {
        let log = "running\ntest system::checkpoint::a ... ok (0.3 s)\n\
             test system::checkpoint::b ... FAILED (2.0 s)\n";
        let kinds = "# about this\n\n# Group\none | a |\ntwo | a, b | x\nthree | - |\nfour | c |\n";
        let (page, failed) = page(kinds, &results(log)).unwrap();
        assert!(page.contains("## Group\n"), "{page}");
        assert!(page.contains("| one | saved | `a` |  |"), "{page}");
        assert!(page.contains("| two | **fails** | `a`, `b` | x |"), "{page}");
        assert!(page.contains("| three | missing |  |  |"), "{page}");
        assert_eq!(failed, ["b", "c"]);
    }
}
