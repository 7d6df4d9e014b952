//! Tasks of the house, run as `cargo xtask NAME`.
//!
//! The rules of the house ([`tidy`]), the tests ([`suite`], [`queue`]), the programs without protections for
//! the control arms ([`weak`]), the second kernel ([`guest`]), the fuzzers
//! ([`fuzz`], [`fuzz_state`]), the list of what a
//! checkpoint holds ([`state`]), the table of real programs ([`programs`]). The verbs that a person types stand
//! in the `justfile`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod cargo;
mod circle;
mod duration;
mod floor;
mod fuzz;
mod fuzz_state;
mod guest;
mod language;
mod order;
mod programs;
mod queue;
mod state;
mod suite;
mod tidy;
mod weak;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of the house")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Checks the rules of the house: floors, unsafe, promises, marks, lengths.
    Tidy {
        /// Prints also what is allowed but should become smaller.
        #[arg(long)]
        notes: bool,
    },
    /// Builds the tests, and runs those of a ring from one queue.
    Test(suite::TestArgs),
    /// Builds the programs whose protections can be left out, where the control arms need them.
    Weak(weak::WeakArgs),
    /// Runs the tests of a list, some at a time.
    Queue(queue::QueueArgs),
    /// Runs a command, or the tests tagged for it, under Debian's newer kernel in QEMU.
    Guest(guest::GuestArgs),
    /// Runs the fuzzers over every reader of outside data.
    Fuzz(fuzz::FuzzArgs),
    /// Runs the fuzzer of kernel state: random programs are saved, restored and compared.
    FuzzState(fuzz_state::FuzzStateArgs),
    /// Writes crates/cli/functions.gz: the functions that usual commands execute, for the linker.
    Order,
    /// Writes docs/state.md: what a checkpoint holds, from the results of its tests.
    State(state::StateArgs),
    /// Runs real programs in rounds of use, sleep and checkpoint, and writes docs/programs.md.
    Programs(programs::ProgramsArgs),
}

fn main() -> ExitCode {
    let result = match Args::parse().task {
        Task::Tidy { notes } => tidy::run(&top(), notes),
        Task::Test(args) => suite::run(&top(), &args),
        Task::Weak(args) => weak::run(&top(), &args),
        Task::Queue(args) => queue::run_list(&args),
        Task::Guest(args) => guest::run(&top(), &args),
        Task::Fuzz(args) => fuzz::run(&top(), &args),
        Task::FuzzState(args) => fuzz_state::run(&top(), &args),
        Task::Order => order::run(&top()),
        Task::State(args) => state::run(&top(), &args),
        Task::Programs(args) => programs::run(&top(), &args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the repository: two floors above this crate.
fn top() -> PathBuf {
    let crate_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).map(PathBuf::from).unwrap_or(crate_dir)
}
