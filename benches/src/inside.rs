//! What being inside costs: system calls and lmbench's operations outside, in a container with the
//! default filter, and in one without a filter, in turn.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin inside -- --rounds 7
//! ```
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Parser;
use dormouse_benches::{Bench, figure, ok, promise};

/// Options.
#[derive(Parser)]
struct Options {
    /// How often inside and outside take turns.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

/// The Zap paper's seven.
const CALLS: [&str; 7] = ["getpid", "getsid", "getpgid", "fork", "execve", "shmget", "shmat"];

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let mut inside: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let (mut outside, mut unfiltered) = (inside.clone(), inside.clone());
    for _ in 0..options.rounds {
        // Both from the same file system and with the same /bin/sh.
        let mut there = Command::new("chroot");
        read(&mut outside, there.arg(bench.path("rootfs")).args(["/bin/calls", "5"]))?;
        let mut here = bench.dormouse();
        read(&mut inside, here.args(["run", "--rm", "bench", "/bin/calls", "5"]))?;
        let mut bare = bench.dormouse();
        bare.args(["run", "--rm", "--security-opt", "seccomp=unconfined"]);
        read(&mut unfiltered, bare.args(["bench", "/bin/calls", "5"]))?;
    }
    eprintln!("\n  {:<10} {:>12} {:>9} {:>11}", "", "outside ns", "inside", "no filter");
    let mut ratios = Vec::new();
    for (name, times) in &mut outside {
        let there = middle(times);
        let here = middle(inside.get_mut(name).context("inside and outside differ")?);
        let bare = middle(unfiltered.get_mut(name).context("inside and outside differ")?);
        let (ratio, bare_ratio) = (here / there, bare / there);
        eprintln!("  {name:<10} {there:>12.0} {ratio:>9.3} {bare_ratio:>11.3}");
        let more = serde_json::json!({
            "outside_ns": there, "inside_ns": here, "unfiltered_ns": bare,
        });
        figure("inside", name, ratio, "ratio", more);
        if CALLS.contains(&name.as_str()) {
            ratios.push(ratio);
        }
    }
    promise("worst of the seven calls", ratios.iter().copied().fold(0.0, f64::max), 1.10);
    promise("median of the seven calls", middle(&mut ratios), 1.02);
    Ok(())
}

fn read(into: &mut BTreeMap<String, Vec<f64>>, command: &mut Command) -> Result<()> {
    for line in ok(command)?.lines() {
        let (name, ns) = line.split_once(' ').context("an odd line")?;
        into.entry(name.to_owned()).or_default().push(ns.parse()?);
    }
    Ok(())
}

fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
