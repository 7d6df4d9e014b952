//! `cargo xtask programs`: docs/programs.md, real programs in rounds of use, sleep and checkpoint.
//!
//! The programs are the rows of `tests/rounds.rs`, each a test. A test leaves its result in [`RESULTS`], also
//! when it fails. The page is made from all results there, so that programs may run in several calls.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::Deserialize;

/// The module of the tests.
const TESTS: &str = "system::rounds::";
/// The name of a program's test in the module of the program.
const TEST: &str = "big_rounds";
const RESULTS: &str = "target/programs";
const PAGE: &str = "docs/programs.md";
/// LIMIT: seconds of a round on a busy machine, and of the start of a program with the making of the image.
const ROUND_SECONDS: u64 = 60;
const START_SECONDS: u64 = 900;
/// Bytes of a refusal or of a failure that the page shows.
const SHOWN: usize = 300;

/// Options of the task.
#[derive(clap::Args)]
pub struct ProgramsArgs {
    /// Rounds of each program
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Runs nothing, and makes the page from earlier results
    #[arg(long)]
    page: bool,
    /// Only these programs; all without a name
    names: Vec<String>,
}

/// The result of one program, as its test wrote it.
#[derive(Debug, Deserialize)]
struct Outcome {
    /// The place of its row in the table.
    row: usize,
    name: String,
    version: String,
    does: String,
    rounds_wanted: usize,
    rounds: usize,
    sleeps: usize,
    wakes: usize,
    checkpoints: usize,
    answer_p50_ms: Option<f64>,
    refused: Vec<String>,
    failed: Option<String>,
}

/// Runs the programs, and writes the page; fails if one of them fails.
pub fn run(top: &Path, args: &ProgramsArgs) -> Result<ExitCode> {
    let results = top.join(RESULTS);
    if !args.page {
        test(top, &results, args)?;
    }
    let outcomes = outcomes(&results)?;
    fs::write(top.join(PAGE), page(&outcomes)?).context(PAGE)?;
    let failed: Vec<&Outcome> = outcomes.iter().filter(|o| o.failed.is_some()).collect();
    for outcome in &failed {
        eprintln!("{} fails: {}", outcome.name, outcome.failed.as_deref().unwrap_or_default());
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the tests one after another: the times of answers are those of an idle machine.
fn test(top: &Path, results: &Path, args: &ProgramsArgs) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.current_dir(top).args(["test", "--workers", "1"]);
    if args.names.is_empty() {
        if results.exists() {
            fs::remove_dir_all(results).with_context(|| results.display().to_string())?;
        }
        command.arg(TESTS);
    } else {
        command.arg("--exact");
        command.args(args.names.iter().map(|name| format!("{TESTS}{name}::{TEST}")));
    }
    command.env("DORMOUSE_ROUNDS", args.rounds.to_string());
    command.env("DORMOUSE_ROUNDS_RESULTS", results);
    let deadline = ROUND_SECONDS * args.rounds + START_SECONDS;
    command.env("DORMOUSE_TEST_DEADLINE_S", deadline.to_string());
    command.status().context("cargo xtask test")?; // a failed test is a row of the page
    Ok(())
}

/// All results, in the order of the table.
fn outcomes(results: &Path) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for entry in fs::read_dir(results).with_context(|| results.display().to_string())? {
        let path: PathBuf = entry?.path();
        let text = fs::read(&path).with_context(|| path.display().to_string())?;
        let outcome: Outcome =
            serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        outcomes.push(outcome);
    }
    outcomes.sort_by_key(|outcome| outcome.row);
    Ok(outcomes)
}

fn page(outcomes: &[Outcome]) -> Result<String> {
    let whole = |outcome: &&Outcome| outcome.rounds == outcome.rounds_wanted;
    let sum = |count: fn(&Outcome) -> usize| outcomes.iter().map(count).sum::<usize>();
    let mut page = format!(
        "# Real programs\n\nMade by `cargo xtask programs` from the results of `tests/rounds.rs`. Each program is \
         Debian's, with Debian's\nconfiguration (`tests/rounds/servers.sh`). A round is:\n\n\
         1. use over an open connection, and over a second one of the round before;\n\
         2. sleep; use over the open connection, which wakes the program;\n\
         3. sleep; a new connection, which wakes the program, and use over it;\n\
         4. checkpoint, which ends the processes; restore; use over both connections.\n\n\
         Each use checks the state of all uses before. The client of a terminal is attached again after a sleep \
         and after a\nrestore. The last column is the time from the request of a client to the answer of a \
         program that was asleep,\nthe median of all wakes.\n\n\
         {} of {} programs went through all rounds: {} sleeps, {} wakes, {} checkpoints and restores.\n\n\
         | program | version | use, and the state that is found again | rounds | sleeps, wakes | checkpoints | \
         refused | answer, ms |\n|---|---|---|---|---|---|---|---|\n",
        outcomes.iter().filter(whole).count(),
        outcomes.len(),
        sum(|o| o.sleeps),
        sum(|o| o.wakes),
        sum(|o| o.checkpoints),
    );
    for outcome in outcomes {
        let Outcome { name, version, does, rounds, rounds_wanted, .. } = outcome;
        let rounds = match &outcome.failed {
            Some(why) => {
                // The rest are logs, with paths of this machine.
                let first = why.lines().next().unwrap_or_default();
                format!("**fails** after {rounds} of {rounds_wanted}: {}", cell(first))
            }
            None if rounds == rounds_wanted => rounds.to_string(),
            None => format!("{rounds} of {rounds_wanted}"),
        };
        let refused: Vec<String> = outcome.refused.iter().map(|text| cell(text)).collect();
        let answer = outcome.answer_p50_ms.map_or_else(String::new, |ms| format!("{ms:.1}"));
        writeln!(
            page,
            "| {name} | {version} | {does} | {rounds} | {}, {} | {} | {} | {answer} |",
            outcome.sleeps,
            outcome.wakes,
            outcome.checkpoints,
            refused.join("; "),
        )?;
    }
    Ok(page)
}

/// A text as a part of one cell of a table.
fn cell(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{} ...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_refusals_are_shown() {
        let outcome = |row: usize, name: &str| Outcome {
            row,
            name: name.to_owned(),
            version: "1-2".to_owned(),
            does: "rows".to_owned(),
            rounds_wanted: 20,
            rounds: 20,
            sleeps: 40,
            wakes: 40,
            checkpoints: 20,
            answer_p50_ms: Some(4.26),
            refused: Vec::new(),
            failed: None,
        };
        let whole = outcome(0, "whole");
        let refused = "process 1 (a): a queue of asynchronous I/O\n".to_owned();
        let none = Outcome {
            rounds: 0,
            answer_p50_ms: None,
            refused: vec![refused],
            ..outcome(1, "none")
        };
        let why = Some("use A: wrong | more\nlines".to_owned());
        let broken = Outcome { rounds: 3, failed: why, ..outcome(2, "broken") };
        let page = page(&[whole, none, broken]).unwrap();
        assert!(page.contains("1 of 3 programs went through all rounds: 120 sleeps"), "{page}");
        assert!(page.contains("| whole | 1-2 | rows | 20 | 40, 40 | 20 |  | 4.3 |\n"), "{page}");
        let row = "| 0 of 20 | 40, 40 | 20 | process 1 (a): a queue of asynchronous I/O |  |\n";
        assert!(page.contains(row), "{page}");
        assert!(page.contains("**fails** after 3 of 20: use A: wrong \\| more |"), "{page}");
    }
}
