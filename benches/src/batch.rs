//! Memory for some of many servers, and more and more who ask them at once: requests that are answered when
//! those that sleep are let in one by one, and when they are let in several at once.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin batch -- --servers 40 --fit 10 --rounds 5
//! ```
//!
//! Where the servers do not fit, whoever asks for one that sleeps waits until another has gone to sleep for
//! it and it is awake. Most of that time one waits for the disk, or for the end of processes; in a batch
//! others use it, and who has asked for the same server meanwhile is answered by the same wake. The arms
//! take turns in each round. Denali (OSDI 2002) batches what has come for those that do not run, section 4.2.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use dormouse_benches::farm::{Callers, Farm, Touched};
use dormouse_benches::{Bench, Line, figure, median, plot};

/// Options.
#[derive(Parser)]
struct Options {
    /// How many servers.
    #[arg(long, default_value_t = 40)]
    servers: usize,
    /// How many of them have room.
    #[arg(long, default_value_t = 10)]
    fit: usize,
    /// Memory of each of them.
    #[arg(long, default_value_t = 2048)]
    kib: u64,
    /// How many ask at once, ascending.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64")]
    clients: Vec<usize>,
    /// How many are let in together, each an arm.
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    batches: Vec<usize>,
    /// Number n is asked with a probability of 1/n^alpha.
    #[arg(long, default_value_t = 1.0)]
    alpha: f64,
    /// How long each turn is measured.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// How many turns each arm has.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// What the turns of an arm came to.
#[derive(Default)]
struct Arm {
    requests_per_s: Vec<f64>,
    by_wake: Vec<f64>,
    p50_ms: Vec<f64>,
    p99_ms: Vec<f64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.clients.is_sorted(), "the numbers of those who ask must grow");
    let bench = Bench::new()?;
    let mut farm = Farm::new(&bench, options.kib);
    farm.grow(options.servers)?;
    let mut points = vec![Vec::new(); options.batches.len()];
    for clients in &options.clients {
        let arms = measure(&options, &farm, *clients)?;
        for ((batch, arm), points) in options.batches.iter().zip(arms).zip(&mut points) {
            let place = tell(&options, *clients, *batch, arm);
            points.push((*clients as f64, place));
        }
    }
    let name = |batch: &usize| match batch {
        1 => "one by one".to_owned(),
        batch => format!("{batch} at once"),
    };
    let names: Vec<String> = options.batches.iter().map(name).collect();
    let lines = names.iter().zip(points).map(|(name, points)| Line { name, points });
    let Options { servers, fit, alpha, .. } = options;
    let title = format!("{servers} servers, memory for {fit}, alpha {alpha}");
    plot("batch", &title, ["who ask at once", "requests a second"], &lines.collect::<Vec<_>>())
}

fn measure(options: &Options, farm: &Farm<'_>, clients: usize) -> Result<Vec<Arm>> {
    let mut arms: Vec<Arm> = options.batches.iter().map(|_| Arm::default()).collect();
    for _ in 0..options.rounds {
        for (batch, arm) in options.batches.iter().zip(&mut arms) {
            let _daemon = farm.with_room_for(options.fit, &["--batch", &batch.to_string()])?;
            let time = Duration::from_secs(options.seconds);
            let asked =
                farm.ask(Callers { clients, alpha: options.alpha, time, touched: Touched::All })?;
            arm.requests_per_s.push(asked.requests_per_s);
            arm.by_wake.push(asked.times.len() as f64 / asked.wakes.max(1) as f64);
            arm.p50_ms.push(asked.times.median_ms());
            arm.p99_ms.push(asked.times.at(0.99));
        }
    }
    Ok(arms)
}

/// Tells of an arm; its requests a second.
fn tell(options: &Options, clients: usize, batch: usize, arm: Arm) -> f64 {
    let [requests_per_s, by_wake, p50_ms, p99_ms] =
        [arm.requests_per_s, arm.by_wake, arm.p50_ms, arm.p99_ms].map(median);
    let name = format!("{clients} ask, {batch} at once: requests");
    eprintln!(
        "  {name}: {requests_per_s:.0}/s, {by_wake:.1} by each wake; p50 {p50_ms:.1} ms, p99 {p99_ms:.0}"
    );
    let more = serde_json::json!({
        "servers": options.servers, "fit": options.fit, "kib": options.kib, "alpha": options.alpha,
        "seconds": options.seconds, "rounds": options.rounds, "by_wake": by_wake, "p50_ms": p50_ms,
        "p99_ms": p99_ms,
    });
    figure("batch", &name, requests_per_s, "1/s", more);
    requests_per_s
}
