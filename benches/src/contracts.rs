//! Contracts: what containers get of CPU time, bandwidth, disks and memory, beside what they are due, and what it costs
//! to keep them.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin contracts -- --part cpu --rounds 3 --seconds 5
//! ```
//!
//! **cpu**: shares, reservations and limits of CPU time, with and without the daemon, beside podman and plain cgroups
//! (contracts/cpu.rs).
//!
//! **bandwidth**: guarantees, weights and ceilings at the uplink, in both directions (contracts/bandwidth.rs).
//!
//! **disk**: rates and weights of disks (contracts/disk.rs).
//!
//! **memory**: guarantees beside large reads, and containers that fall asleep for want of memory (contracts/memory.rs).
//!
//! **daemon**: what the daemon uses of a CPU beside a thousand containers (contracts/daemon.rs).
//!
//! **Due** is the reservation, and of the rest a part by weight; what a container does not use goes to the others by
//! weight.
#![forbid(unsafe_code)]

#[path = "contracts/bandwidth.rs"]
mod bandwidth;
#[path = "contracts/cpu.rs"]
mod cpu;
#[path = "contracts/daemon.rs"]
mod daemon;
#[path = "contracts/disk.rs"]
mod disk;
#[path = "contracts/memory.rs"]
mod memory;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use dormouse_benches::podman::Podman;
use dormouse_benches::{Bench, installed};

/// Options.
#[derive(Parser)]
struct Options {
    /// Which parts; all by default
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<Part>,
    /// Rounds of each case in each arm
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of measurement of each round
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Only cases with this text in the name
    #[arg(long, default_value = "")]
    only: String,
    /// Which ways to run the containers of `cpu`; all by default
    #[arg(long, value_enum, value_delimiter = ',')]
    arm: Vec<cpu::Arm>,
    /// Awake containers beside the daemon
    #[arg(long, default_value_t = 1000)]
    containers: usize,
    /// Containers asleep beside the daemon
    #[arg(long, default_value_t = 0)]
    asleep: usize,
    /// How often a container runs out of memory
    #[arg(long, default_value_t = 50)]
    shortages: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Cpu,
    Bandwidth,
    Disk,
    Memory,
    Daemon,
}

/// What all parts use.
struct Hosts {
    bench: Bench,
    podman: Option<Podman>,
    cpus: f64,
    options: Options,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let podman = installed("podman").then(|| Podman::new(&bench)).transpose()?;
    if podman.is_none() {
        eprintln!("  SKIPPED: podman is not installed");
    }
    let cpus = std::thread::available_parallelism()?.get() as f64;
    let hosts = Hosts { bench, podman, cpus, options };
    type Measure = fn(&Hosts) -> Result<()>;
    let parts: [(Part, Measure); 5] = [
        (Part::Cpu, cpu::cpu),
        (Part::Bandwidth, bandwidth::bandwidth),
        (Part::Disk, disk::disk),
        (Part::Memory, memory::memory),
        (Part::Daemon, daemon::daemon),
    ];
    for (part, measure) in parts {
        let wanted = &hosts.options.part;
        if wanted.is_empty() || wanted.contains(&part) {
            measure(&hosts).with_context(|| format!("{part:?}"))?;
            hosts.bench.configure("")?;
        }
    }
    Ok(())
}

/// What a container may have of something that several share.
#[derive(Debug, Clone, Copy)]
struct Claim {
    reserve: f64,
    weight: u32,
    /// The most that it uses.
    wants: f64,
}

/// What each of some containers is due of `total`.
fn due(claims: &[Claim], total: f64) -> Vec<f64> {
    let mut due: Vec<f64> = claims.iter().map(|it| it.reserve.min(it.wants)).collect();
    let mut rest = total - due.iter().sum::<f64>();
    // A container that is satisfied leaves its part to the others.
    for _ in claims {
        let hungry = |n: usize, due: &[f64]| claims[n].wants - due[n] > 1e-9;
        let weights: f64 = (0..claims.len())
            .filter(|n| hungry(*n, &due))
            .map(|n| f64::from(claims[n].weight))
            .sum();
        if rest <= 1e-9 || weights == 0.0 {
            break;
        }
        let mut given = 0.0;
        for n in 0..claims.len() {
            if hungry(n, &due) {
                let part = rest * f64::from(claims[n].weight) / weights;
                let part = part.min(claims[n].wants - due[n]);
                due[n] += part;
                given += part;
            }
        }
        rest -= given;
    }
    due
}
