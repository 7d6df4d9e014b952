//! The cost of being inside: system calls and lmbench's operations outside, in a container with the
//! default filter, and with less and less of it, in turn.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin inside -- --rounds 7
//! ```
//!
//! Any filter makes the kernel leave the fast path of a system call. So two arms have a filter of a
//! single instruction that allows everything: no filter can cost less.
//!
//! `--gates` measures, in place of these, what all gates of accounts cost while they are loaded: the same operations
//! inside and outside, and `run --rm IMAGE true`, without gates and with them in turn.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use dormouse_benches::{Bench, figure, median, ok, promise};

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of each arm.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// What loaded gates cost.
    #[arg(long)]
    gates: bool,
}

/// Starts of each arm in a round of `--gates`.
const STARTS: usize = 100;

/// The Zap paper's seven.
const CALLS: [&str; 7] = ["getpid", "getsid", "getpgid", "fork", "execve", "shmget", "shmat"];

/// Nanoseconds of each operation, in every round.
type Readings = BTreeMap<String, Vec<f64>>;

/// The place and filter of a measurement.
struct Arm {
    name: &'static str,
    inside: bool,
    filter: Filter,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Filter {
    Default,
    AllowAll,
    None,
}

/// The first is the reference, the second the promise.
const ARMS: [Arm; 5] = [
    Arm { name: "outside", inside: false, filter: Filter::None },
    Arm { name: "inside", inside: true, filter: Filter::Default },
    Arm { name: "inside, allow-all filter", inside: true, filter: Filter::AllowAll },
    Arm { name: "inside, no filter", inside: true, filter: Filter::None },
    Arm { name: "outside, allow-all filter", inside: false, filter: Filter::AllowAll },
];

impl Arm {
    fn command(&self, bench: &Bench) -> Command {
        let mut command;
        if self.inside {
            command = bench.dormouse();
            command.args(["run", "--rm"]);
            if self.filter != Filter::Default {
                command.args(["--security-opt", "seccomp=unconfined"]);
            }
            command.arg("bench");
        } else {
            // With the same files and the same /bin/sh.
            command = Command::new("chroot");
            command.arg(bench.path("rootfs"));
        }
        command.args(["/bin/calls", "5"]);
        if self.filter == Filter::AllowAll {
            command.arg("filter");
        }
        command
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    if options.gates {
        return gates(&bench, options.rounds);
    }
    let mut readings = ARMS.map(|_| Readings::new());
    for n in 0..options.rounds {
        eprint!("\r  round {} of {}", n + 1, options.rounds);
        for (arm, readings) in ARMS.iter().zip(&mut readings) {
            read(readings, &mut arm.command(&bench)).context(arm.name)?;
        }
    }
    eprint!("\r  {:<10}", "");
    ARMS.iter().for_each(|arm| eprint!(" {:>26}", arm.name));
    eprintln!();
    let [outside, others @ ..] = &mut readings;
    let mut seven = ARMS.map(|_| Vec::new());
    for (name, times) in outside {
        let there = median(times.clone());
        eprint!("  {name:<10} {there:>23.0} ns");
        let mut more = serde_json::Map::from_iter([("outside_ns".to_owned(), there.into())]);
        let mut ratios = Vec::new();
        for (n, (arm, readings)) in ARMS[1..].iter().zip(&mut *others).enumerate() {
            let here = median(readings.get(name).context("inside and outside differ")?.clone());
            eprint!(" {:>26.3}", here / there);
            more.insert(format!("{}, ns", arm.name), here.into());
            ratios.push(here / there);
            if CALLS.contains(&name.as_str()) {
                seven[n + 1].push(here / there);
            }
        }
        eprintln!();
        figure("inside", name, ratios[0], "ratio", more.into());
    }
    let [_, ours, least, ..] = &mut seven;
    let worst = |ratios: &[f64]| ratios.iter().copied().fold(0.0, f64::max);
    promise("worst of the seven calls", worst(ours), 1.10);
    promise("median of the seven calls", median(ours.clone()), 1.02);
    let of_least: Vec<f64> = ours.iter().zip(&*least).map(|(ours, least)| ours / least).collect();
    promise("worst of the seven calls, of what any filter costs", worst(&of_least), 1.02);
    Ok(())
}

/// Each operation and the start of a container, without gates and with all of them.
fn gates(bench: &Bench, rounds: usize) -> Result<()> {
    // Shared objects are made by the first container, and stay.
    ok(bench.dormouse().args(["run", "-d", "--name", "other", "bench", "sleep", "1000000"]))?;
    let [outside, inside, ..] = &ARMS;
    let mut all = [Readings::new(), Readings::new()];
    for round in 0..rounds * 2 {
        eprint!("\r  round {} of {}", round / 2 + 1, rounds);
        // Each of two arms begins in every other round.
        let is_loaded = (round + round / 2) % 2 == 1;
        if is_loaded {
            ok(bench.dormouse().args(["gate", "load"]))?;
        }
        let into = &mut all[usize::from(is_loaded)];
        for (name, arm) in [("outside", outside), ("inside", inside)] {
            let mut readings = Readings::new();
            read(&mut readings, &mut arm.command(bench)).context(name)?;
            for (operation, times) in readings {
                into.entry(format!("{name}, {operation}")).or_default().extend(times);
            }
        }
        for _ in 0..STARTS {
            let begin = Instant::now();
            ok(bench.dormouse().args(["run", "--rm", "bench", "true"]))?;
            let took = begin.elapsed().as_secs_f64() * 1e9;
            into.entry("start".to_owned()).or_default().push(took);
        }
        if is_loaded {
            ok(bench.dormouse().args(["gate", "unload"]))?;
        }
    }
    eprintln!();
    let [without, with] = &mut all;
    let mut ratios = Vec::new();
    for (name, times) in without {
        let bare = median(times.clone());
        let loaded = median(with.get(name).context("an operation of one arm alone")?.clone());
        eprintln!(
            "  {name:<24} {bare:>12.0} ns, with gates {loaded:>12.0} ns: {:.3}",
            loaded / bare
        );
        let more = serde_json::json!({ "without_ns": bare, "with_ns": loaded, "rounds": rounds });
        figure("inside", &format!("gates: {name}"), loaded / bare, "ratio", more);
        if name == "start" {
            promise("a start with gates", loaded / bare, 1.02);
        } else {
            ratios.push(loaded / bare);
        }
    }
    // One by one they differ by more from run to run.
    promise("median of the operations with gates", median(ratios), 1.02);
    Ok(())
}

fn read(into: &mut Readings, command: &mut Command) -> Result<()> {
    for line in ok(command)?.lines() {
        let (name, ns) = line.split_once(' ').context("an odd line")?;
        into.entry(name.to_owned()).or_default().push(ns.parse()?);
    }
    Ok(())
}
