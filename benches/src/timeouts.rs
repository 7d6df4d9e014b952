//! A growing number of servers, memory for some of them, and half of them with a timer: requests
//! answered where the timers are known, and where a timer keeps its server awake.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin timeouts -- --counts 6,12,18,24 --fit 8 --rounds 5
//! ```
//!
//! A server with a timer that waits with a time limit sleeps until the limit, and is woken in time.
//! Its memory is available to others meanwhile. Without knowledge of the limit the server must run,
//! which `update --never-sleep` models. The arms take turns in each round. Denali's
//! idle-with-timeout (OSDI 2002, section 4.2) is the same for a guest that notifies its host.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::farm::{Callers, Farm, Touched, request};
use dormouse_benches::{Bench, Line, figure, median, ok, plot};

/// Options.
#[derive(Parser)]
struct Options {
    /// Numbers of servers, ascending; every second one has a timer.
    #[arg(long, value_delimiter = ',', default_value = "6,12,18,24")]
    counts: Vec<usize>,
    /// Number of servers that fit into memory.
    #[arg(long, default_value_t = 8)]
    fit: usize,
    /// Memory of each of them.
    #[arg(long, default_value_t = 2048)]
    kib: u64,
    /// The period of the timers, in seconds.
    #[arg(long, default_value_t = 10)]
    period: u64,
    /// Number of concurrent clients.
    #[arg(long, default_value_t = 4)]
    clients: usize,
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

/// The knowledge of the timers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Known,
    Unknown,
}

impl Arm {
    const ALL: [Self; 2] = [Self::Known, Self::Unknown];

    fn name(self) -> &'static str {
        match self {
            Self::Known => "timers known",
            Self::Unknown => "a timer keeps its server awake",
        }
    }

    /// Applies the arm to the servers with a timer.
    fn apply(self, bench: &Bench, count: usize) -> Result<()> {
        let policy: &[&str] = match self {
            Self::Known => &["--sleep-after", "3600s"],
            Self::Unknown => &["--never-sleep"],
        };
        let names: Vec<String> = (0..count).filter(|n| has_timer(*n)).map(Farm::name).collect();
        for name in &names {
            ok(bench.dormouse().arg("update").args(policy).arg(name))?;
        }
        if self == Self::Unknown && !names.is_empty() {
            ok(bench.dormouse().arg("wake").args(&names))?;
        }
        Ok(())
    }
}

fn has_timer(number: usize) -> bool {
    number % 2 == 1
}

/// Results of the turns of an arm.
#[derive(Default)]
struct Turns {
    requests_per_s: Vec<f64>,
    wakes_per_s: Vec<f64>,
    p50_ms: Vec<f64>,
    late_ms: Vec<f64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.counts.is_sorted(), "the numbers of servers must grow");
    let bench = Bench::new()?;
    let mut farm = Farm::new(&bench, options.kib);
    let period = Duration::from_secs(options.period);
    let mut lines = Arm::ALL.map(|arm| Line { name: arm.name(), points: Vec::new() });
    for count in &options.counts {
        farm.grow_with(*count, |n| has_timer(n).then_some(period))?;
        let mut all = [Turns::default(), Turns::default()];
        for _ in 0..options.rounds {
            for (arm, turns) in Arm::ALL.into_iter().zip(&mut all) {
                measure(&options, &bench, &farm, arm, turns)?;
            }
        }
        for ((arm, turns), line) in Arm::ALL.into_iter().zip(all).zip(&mut lines) {
            line.points.push((*count as f64, report(&options, *count, arm, turns)));
        }
    }
    let Options { fit, period, .. } = options;
    let title = format!("Memory for {fit}, every second server has a timer of {period} s");
    plot("timeouts", &title, ["servers", "requests a second"], &lines)
}

fn measure(
    options: &Options,
    bench: &Bench,
    farm: &Farm<'_>,
    arm: Arm,
    turns: &mut Turns,
) -> Result<()> {
    arm.apply(bench, farm.all.len())?;
    let _daemon = farm.with_room_for(options.fit, &[])?;
    let time = Duration::from_secs(options.seconds);
    let answers = farm.query(Callers {
        clients: options.clients,
        alpha: options.alpha,
        time,
        touched: Touched::All,
    })?;
    turns.requests_per_s.push(answers.requests_per_s);
    turns.wakes_per_s.push(answers.wakes as f64 / time.as_secs_f64());
    turns.p50_ms.push(answers.times.median_ms());
    for (_, address) in farm.all.iter().enumerate().filter(|(n, _)| has_timer(*n)) {
        let answer = request(*address, "L")?;
        let late_us = answer.split_whitespace().nth(1).and_then(|us| us.parse::<f64>().ok());
        let late_us = late_us.with_context(|| format!("unexpected answer '{answer}'"))?;
        turns.late_ms.push(late_us / 1e3);
    }
    Ok(())
}

/// Reports the figures of an arm, and returns its requests per second.
fn report(options: &Options, count: usize, arm: Arm, turns: Turns) -> f64 {
    let latest_ms = turns.late_ms.iter().copied().fold(0.0, f64::max);
    let [requests_per_s, wakes_per_s, p50_ms, late_ms] =
        [turns.requests_per_s, turns.wakes_per_s, turns.p50_ms, turns.late_ms].map(median);
    let name = format!("{count} servers, {}: requests", arm.name());
    eprintln!(
        "  {name}: {requests_per_s:.0}/s, {wakes_per_s:.0} wakes/s, p50 {p50_ms:.1} ms; of each server's \
         timer the latest ring {late_ms:.1} ms late, of all {latest_ms:.0}"
    );
    let more = serde_json::json!({
        "servers": count, "fit": options.fit, "kib": options.kib, "clients": options.clients,
        "alpha": options.alpha, "period_s": options.period, "seconds": options.seconds,
        "rounds": options.rounds, "wakes_per_s": wakes_per_s, "p50_ms": p50_ms,
        "late_ms": late_ms, "latest_ms": latest_ms,
    });
    figure("timeouts", &name, requests_per_s, "1/s", more);
    requests_per_s
}
