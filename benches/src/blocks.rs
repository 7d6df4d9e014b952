//! A server with much memory that sleeps, by the size of the blocks in which touched memory is
//! restored: the time until the first answer, and the answers in the first half second.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin blocks -- --rounds 10
//! ```
//!
//! Large memory is restored while the server runs: touched memory first, a *block* at a time
//! (`[wake] block` in `config.toml`), and the rest meanwhile. A large block includes unwanted
//! pages, a small one means more waits. Two kinds of requests: one touches 16 pieces of 64 kB, like
//! a walk through a part of an index, the other 256 distant words, like lookups in a hash table.
//! The record of touched pages is removed before each request. Arms take turns in each round.
//! Denali (OSDI 2002) studies the block size of its swap device likewise, figure 10.
#![forbid(unsafe_code)]

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::farm::request;
use dormouse_benches::{Bench, Line, Times, figure, median, ok, plot};
use dormouse_testkit::wait_until;

/// Options.
#[derive(Parser)]
struct Options {
    /// Blocks, in KiB, ascending.
    #[arg(long, value_delimiter = ',', default_value = "4,16,64,256,1024")]
    blocks: Vec<u64>,
    /// Memory of the server, in MiB.
    #[arg(long, default_value_t = 200)]
    mib: u64,
    /// Turns of each arm.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
}

/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// The duration of the requests.
const ASKED: Duration = Duration::from_millis(500);
/// The minimum time asleep: by then the process for the next wake is ready.
const GETS_READY: Duration = Duration::from_millis(50);
const NAME: &str = "server";

/// The kinds of requests, with their words for floor/serve.c.
const REQUESTS: [(&str, &str); 2] = [("16 pieces of 64 kB", "T"), ("256 words", "P")];

/// Results of the turns of an arm.
#[derive(Default)]
struct Turns {
    first: Vec<Duration>,
    answers: Vec<f64>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.blocks.is_sorted(), "blocks must grow");
    let bench = Bench::new()?;
    fs::create_dir_all(bench.path("root/etc"))?;
    let kib = (options.mib * 1024).to_string();
    ok(bench.dormouse().args(["run", "-d", "--name", NAME, "bench", "serve", "80", &kib]))?;
    let address = bench.address(NAME, 80)?;
    ensure!(wait_until(PATIENCE, || query(address, "Q").is_ok()), "the server does not answer");
    let mut all: Vec<[Turns; 2]> = options.blocks.iter().map(|_| Default::default()).collect();
    for _ in 0..options.rounds {
        for (block, turns) in options.blocks.iter().zip(&mut all) {
            for ((_, word), turns) in REQUESTS.iter().zip(turns) {
                measure(&bench, address, *block, word, turns)?;
            }
        }
    }
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for (n, (what, _)) in REQUESTS.iter().enumerate() {
        let mut points = [("p50", Vec::new()), ("p99", Vec::new())];
        for (block, turns) in options.blocks.iter().zip(&mut all) {
            let turns = std::mem::take(&mut turns[n]);
            let first = Times::new(turns.first);
            let answers = median(turns.answers);
            let (p50, p99) = (first.median_ms(), first.at(0.99));
            let name = format!("block of {block} kB, {what}: first answer");
            eprintln!("  {name}: p50 {p50:.2} ms, p99 {p99:.2}; {answers:.0} in half a second");
            let more = serde_json::json!({
                "mib": options.mib, "rounds": options.rounds, "p50_ms": p50, "p99_ms": p99,
                "min_ms": first.at(0.0), "answers": answers,
            });
            figure("blocks", &name, p50, "ms", more);
            for ((_, line), at) in points.iter_mut().zip([p50, p99]) {
                line.push(((*block as f64).log2(), at));
            }
        }
        lines.extend(points.map(|(part, points)| (format!("{what}, {part}"), points)));
    }
    let lines: Vec<Line<'_>> =
        lines.iter().map(|(name, points)| Line { name, points: points.clone() }).collect();
    let title = format!("First answer of one that slept with {} MB", options.mib);
    plot("blocks", &title, ["kB at once, as a power of two", "ms"], &lines)
}

fn query(address: SocketAddr, word: &str) -> Result<Duration> {
    let begin = Instant::now();
    let answer = request(address, word)?;
    ensure!(answer.contains("whole"), "unexpected answer '{answer}'");
    Ok(begin.elapsed())
}

fn measure(
    bench: &Bench,
    address: SocketAddr,
    block: u64,
    word: &str,
    turns: &mut Turns,
) -> Result<()> {
    let settings = format!("[wake]\nblock = \"{block}k\"\n");
    fs::write(bench.path("root/etc/config.toml"), settings)?;
    ok(bench.dormouse().args(["sleep", NAME]))?;
    remove_records(bench)?;
    std::thread::sleep(GETS_READY);
    let begin = Instant::now();
    turns.first.push(query(address, word)?);
    let mut answers = 1;
    while begin.elapsed() < ASKED {
        query(address, word)?;
        answers += 1;
    }
    turns.answers.push(f64::from(answers));
    Ok(())
}

/// Removes the records of touched pages.
fn remove_records(bench: &Bench) -> Result<()> {
    let all = fs::read_dir(bench.path("root/lib/containers")).context("where it is kept")?;
    for container in all {
        match fs::remove_file(container?.path().join("touched")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
    }
    Ok(())
}
