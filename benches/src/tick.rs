//! Servers with work ten times a second: the lateness of their ticks, from one server to many at
//! once.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin tick -- --counts 1,16,64,256 --seconds 10
//! ```
//!
//! Each server is a container, cloned from a running one. Each tick needs some processor time, like
//! the next frame of a game. Clones inherit the phase of the ticks, which separate servers would
//! not share, so they receive new phases, evenly distributed. A tick is late by the time from its
//! due moment to the end of its work, less that work. Other servers use the same processors
//! meanwhile, so with more servers more ticks wait for others. The promise is that nothing else
//! delays a tick until all processors are busy. Denali (OSDI 2002), figure 12.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Line, Times, figure, ok, plot, promise};
use dormouse_testkit::wait_until;

/// Options.
#[derive(Parser)]
struct Options {
    /// Numbers of servers, ascending.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256")]
    counts: Vec<usize>,
    /// Processor time of each tick, in microseconds.
    #[arg(long, default_value_t = 400)]
    work_us: u32,
    /// Duration of each point.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Time between two ticks, in milliseconds.
const PERIOD_MS: u32 = 100;
/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 80;

/// Sends a word to a server, and returns the answer.
fn request(address: SocketAddr, word: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(word.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.counts.is_sorted() && options.counts.first() > Some(&0), "counts must grow");
    let bench = Bench::new()?;
    let words = [PORT.to_string(), PERIOD_MS.to_string(), options.work_us.to_string()];
    ok(bench.dormouse().args(["run", "-d", "--name", "t0", "bench", "tick"]).args(words))?;
    let mut all = vec![bench.address("t0", PORT)?];
    ensure!(wait_until(PATIENCE, || request(all[0], "R0").is_ok()), "the server does not answer");
    let lines = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];
    let mut lines = lines.map(|(name, at)| (at, Line { name, points: Vec::new() }));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut flat = Vec::new();
    for count in options.counts.clone() {
        let (first, more) = (all.len(), count - all.len());
        let stem = format!("t{first}");
        if more > 0 {
            let count = more.to_string();
            ok(bench.dormouse().args(["clone", "-n", &count, "--name", &stem, "t0"]))?;
        }
        for n in 1..=more {
            let name = if more == 1 { stem.clone() } else { format!("{stem}-{n}") };
            all.push(bench.address(&name, PORT)?);
        }
        let late = measure(&all, options.seconds)?;
        let busy = count as f64 * f64::from(options.work_us) / f64::from(PERIOD_MS * 1000);
        let part = busy / cpus as f64;
        eprintln!(
            "  {count} servers, {part:.2} of the processors: {} ticks, late by p50 {:.2} ms, p99 {:.2} \
             ms, p99.9 {:.2} ms",
            late.len(),
            late.median_ms(),
            late.at(0.99),
            late.at(0.999)
        );
        let more = serde_json::json!({
            "servers": count, "work_us": options.work_us, "of_the_processors": part,
            "ticks": late.len(), "p50_ms": late.median_ms(), "p99_ms": late.at(0.99),
            "p999_ms": late.at(0.999), "max_ms": late.at(1.0),
        });
        figure("tick", &format!("{count} servers: p99 of the tick"), late.at(0.99), "ms", more);
        for (at, line) in &mut lines {
            line.points.push((count as f64, late.at(*at)));
        }
        if part < 1.0 {
            flat.push(f64::from(PERIOD_MS) + late.at(0.99));
        }
    }
    if let (Some(one), Some(most)) = (flat.first(), flat.iter().copied().reduce(f64::max)) {
        // A player notices the time from one tick to the next.
        promise("p99 of the tick, the worst of all against one server alone", most / one, 1.1);
    }
    let title = format!("A tick every {PERIOD_MS} ms of {} us", options.work_us);
    let axes = ["servers", "ms late"];
    plot("tick", &title, axes, &lines.map(|(_, line)| line))
}

/// Returns the lateness of all ticks of all servers for a while.
fn measure(all: &[SocketAddr], seconds: u64) -> Result<Times> {
    for (n, address) in all.iter().enumerate() {
        let phase_us = n * PERIOD_MS as usize * 1000 / all.len();
        request(*address, &format!("R{phase_us}"))?;
    }
    std::thread::sleep(Duration::from_secs(seconds));
    let mut late = Vec::new();
    for address in all {
        let answer = request(*address, "L")?;
        let numbers = answer.split_whitespace().map(|word| word.parse().map(Duration::from_micros));
        late.extend(numbers.collect::<Result<Vec<_>, _>>().context("not a number")?);
    }
    ensure!(late.len() >= all.len(), "no tick");
    Ok(Times::new(late))
}
