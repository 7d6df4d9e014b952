//! Servers that have something to do ten times a second: how late they are, one alone to many at once.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin tick -- --counts 1,16,64,256 --seconds 10
//! ```
//!
//! Each is a container of its own, cloned from one that runs, and works for some time of a processor at
//! every tick, as a game computes its next frame. Clones of one have its ticks at the same moments, all of
//! them, which no servers of their own have: so they are told to begin one after the other, evenly. A tick is
//! late by what passes from when it is due to the end of its work, less that work. In between others wait
//! for the same processors, so with more servers more ticks have somebody before them; what is promised is
//! that it is no more than that until there is no processor left. Denali (OSDI 2002), figure 12.
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
    /// How many there are, ascending.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256")]
    counts: Vec<usize>,
    /// How much of a processor each tick takes, in microseconds.
    #[arg(long, default_value_t = 400)]
    work_us: u32,
    /// How long each point is measured.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Time between two ticks, in milliseconds.
const PERIOD_MS: u32 = 100;
/// LIMIT: how long an answer may take before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 80;

/// Says a word to one; what it answers.
fn say(address: SocketAddr, word: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(word.as_bytes())?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    Ok(said)
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.counts.is_sorted() && options.counts.first() > Some(&0), "counts must grow");
    let bench = Bench::new()?;
    let words = [PORT.to_string(), PERIOD_MS.to_string(), options.work_us.to_string()];
    ok(bench.dormouse().args(["run", "-d", "--name", "t0", "bench", "tick"]).args(words))?;
    let mut all = vec![bench.address("t0", PORT)?];
    ensure!(wait_until(PATIENCE, || say(all[0], "R0").is_ok()), "it does not answer");
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
        // What a player sees is the time from one tick to the next.
        promise("p99 of the tick, the worst of all against one server alone", most / one, 1.1);
    }
    let title = format!("A tick every {PERIOD_MS} ms of {} us", options.work_us);
    let axes = ["servers", "ms late"];
    plot("tick", &title, axes, &lines.map(|(_, line)| line))
}

/// How late all of them are, for a while.
fn measure(all: &[SocketAddr], seconds: u64) -> Result<Times> {
    for (n, address) in all.iter().enumerate() {
        let phase_us = n * PERIOD_MS as usize * 1000 / all.len();
        say(*address, &format!("R{phase_us}"))?;
    }
    std::thread::sleep(Duration::from_secs(seconds));
    let mut late = Vec::new();
    for address in all {
        let said = say(*address, "L")?;
        let numbers = said.split_whitespace().map(|word| word.parse().map(Duration::from_micros));
        late.extend(numbers.collect::<Result<Vec<_>, _>>().context("that is no number")?);
    }
    ensure!(late.len() >= all.len(), "there was no tick");
    Ok(Times::new(late))
}
