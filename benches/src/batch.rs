//! Memory for some of many servers, and a growing number of clients at once: requests answered when
//! wakes are admitted one by one, and when several are admitted at once.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin batch -- --servers 40 --fit 10 --rounds 5
//! ```
//!
//! Where the servers do not all fit, a client of an asleep server waits until another server was
//! suspended and its own is awake. Most of that time a single wake waits for the disk or for
//! exiting processes. In a batch other wakes use that time, and further clients of the same server
//! are answered by the same wake. The arms take turns in each round. Denali (OSDI 2002) batches
//! events of VMs that do not run, section 4.2.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use dormouse_benches::farm::{Callers, Farm, Touched};
use dormouse_benches::{Bench, Line, figure, median, plot};

/// Options.
#[derive(Parser)]
struct Options {
    /// Number of servers.
    #[arg(long, default_value_t = 40)]
    servers: usize,
    /// Number of servers that fit into memory.
    #[arg(long, default_value_t = 10)]
    fit: usize,
    /// Memory of each of them.
    #[arg(long, default_value_t = 2048)]
    kib: u64,
    /// Numbers of concurrent clients, ascending.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64")]
    clients: Vec<usize>,
    /// Numbers of wakes admitted together, each an arm.
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    batches: Vec<usize>,
    /// Server n receives a request with a probability of 1/n^alpha.
    #[arg(long, default_value_t = 1.0)]
    alpha: f64,
    /// Duration of each turn.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Turns of each arm.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Results of the turns of an arm.
#[derive(Default)]
struct Arm {
    requests_per_s: Vec<f64>,
    by_wake: Vec<f64>,
    p50_ms: Vec<f64>,
    p99_ms: Vec<f64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.clients.is_sorted(), "the numbers of clients must grow");
    let bench = Bench::new()?;
    let mut farm = Farm::new(&bench, options.kib);
    farm.grow(options.servers)?;
    let mut points = vec![Vec::new(); options.batches.len()];
    for clients in &options.clients {
        let arms = measure(&options, &farm, *clients)?;
        for ((batch, arm), points) in options.batches.iter().zip(arms).zip(&mut points) {
            let place = report(&options, *clients, *batch, arm);
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
    plot("batch", &title, ["concurrent clients", "requests a second"], &lines.collect::<Vec<_>>())
}

fn measure(options: &Options, farm: &Farm<'_>, clients: usize) -> Result<Vec<Arm>> {
    let mut arms: Vec<Arm> = options.batches.iter().map(|_| Arm::default()).collect();
    for _ in 0..options.rounds {
        for (batch, arm) in options.batches.iter().zip(&mut arms) {
            let _daemon = farm.with_room_for(options.fit, &["--batch", &batch.to_string()])?;
            let time = Duration::from_secs(options.seconds);
            let answers =
                farm.query(Callers { clients, alpha: options.alpha, time, touched: Touched::All })?;
            arm.requests_per_s.push(answers.requests_per_s);
            arm.by_wake.push(answers.times.len() as f64 / answers.wakes.max(1) as f64);
            arm.p50_ms.push(answers.times.median_ms());
            arm.p99_ms.push(answers.times.at(0.99));
        }
    }
    Ok(arms)
}

/// Reports the figures of an arm, and returns its requests per second.
fn report(options: &Options, clients: usize, batch: usize, arm: Arm) -> f64 {
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
