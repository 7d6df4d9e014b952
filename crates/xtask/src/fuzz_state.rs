//! `cargo xtask fuzz-state`: random programs that build kernel state are saved, restored and compared.
//!
//! The generator and the comparison are a whole-system test (`tests/state.rs`), which is told by
//! variables of its environment what to run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

/// The test with the generator.
const TEST: &str = "system::checkpoint::state::big_restored_random_state_is_as_saved";
/// LIMIT: seconds beyond the time for programs: the build of the image, and a program made small.
const MORE_SECONDS: u64 = 3600;

/// Options of the task.
#[derive(clap::Args)]
pub struct FuzzStateArgs {
    /// Ends after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Ends after so many programs
    #[arg(long)]
    programs: Option<u64>,
    /// The seed of all programs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of the first program
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Runs the program in this file alone
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs the test with the options as variables.
pub fn run(top: &Path, args: &FuzzStateArgs) -> Result<ExitCode> {
    let mut command = Command::new(std::env::current_exe()?);
    command.current_dir(top).args(["test", "--exact", TEST]);
    let seconds = args.seconds.unwrap_or(10 * args.programs.unwrap_or(20));
    command.env("DORMOUSE_TEST_DEADLINE_S", (seconds + MORE_SECONDS).to_string());
    let numbers = [
        ("SECONDS", args.seconds),
        ("PROGRAMS", args.programs),
        ("SEED", Some(args.seed)),
        ("FIRST", Some(args.first)),
    ];
    for (name, value) in numbers {
        if let Some(value) = value {
            command.env(format!("DORMOUSE_STATE_{name}"), value.to_string());
        }
    }
    if let Some(path) = &args.program {
        let path = path.canonicalize().with_context(|| path.display().to_string())?;
        command.env("DORMOUSE_STATE_PROGRAM", path);
    }
    let report = top.join("target/fuzz-state.txt");
    let _ = fs::remove_file(&report); // of an earlier run
    command.env("DORMOUSE_STATE_REPORT", &report);
    let status = command.status().context("cargo xtask test")?;
    if status.success() && args.program.is_none() {
        print!("{}", fs::read_to_string(&report).context(report.display().to_string())?);
    }
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
