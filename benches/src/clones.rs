//! Many clones of one server by one command: the memory of each until it writes, its time against a
//! clone that reads all memory for itself, and whether each has the server's state.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin clones -- --count 1000
//! ```
//!
//! First some of each kind are made in turn and removed again, for the time of one. Then all are
//! made by one command, and the memory of the machine is compared by kind with that before: after
//! the clone, after a request for every page of each, and after some filled their memory with a new
//! number, which the others must not see.
#![forbid(unsafe_code)]

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::farm::request;
use dormouse_benches::{Bench, Times, figure, ok, promise, shuffle};
use dormouse_testkit::wait_until;

/// Options.
#[derive(Parser)]
struct Options {
    /// Number of clones.
    #[arg(long, default_value_t = 1000)]
    count: usize,
    /// Memory of the server, in KiB.
    #[arg(long, default_value_t = 16 << 10)]
    heap_kb: u64,
    /// Turns of each kind.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Clones made in one turn.
    #[arg(long, default_value_t = 10)]
    chunk: usize,
    /// Number of clones that write to all their memory in the end.
    #[arg(long, default_value_t = 20)]
    write: usize,
}

/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// LIMIT: below this much available memory nothing is started.
const AVAILABLE_KB_MIN: u64 = 5 << 20;
const NAME: &str = "server";
/// The limits of each. They give it a memory cgroup.
const CONTRACT: [&str; 3] = ["--memory=256m", "--pids=64", "--cpu-weight=100"];
/// The reported kinds of the machine's memory, in kB.
const KINDS: [&str; 7] = [
    "MemAvailable:",
    "AnonPages:",
    "PageTables:",
    "Slab:",
    "SUnreclaim:",
    "KernelStack:",
    "Percpu:",
];

/// Memory of the machine by kind, in kB.
struct Memory([u64; KINDS.len()]);

impl Memory {
    fn now() -> Self {
        // Kernel objects are freed late, and caches are not ours.
        rustix::fs::sync();
        let _ = fs::write("/proc/sys/vm/drop_caches", "3"); // may be forbidden
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self(KINDS.map(|kind| {
            let line = text.lines().find(|line| line.starts_with(kind)).unwrap_or_default();
            line.split_whitespace().nth(1).and_then(|kb| kb.parse().ok()).unwrap_or(0)
        }))
    }

    fn available_kb(&self) -> u64 {
        self.0[0]
    }

    /// The change since `before` per clone: of available memory, and of all kinds.
    fn each(&self, before: &Self, count: usize) -> (f64, serde_json::Value) {
        let each = |n: usize| {
            let more = self.0[n] as f64 - before.0[n] as f64;
            (more / count as f64 * 100.0).round() / 100.0
        };
        let kinds = KINDS.iter().enumerate();
        let all = kinds.map(|(n, kind)| (kind.trim_end_matches(':').to_owned(), each(n).into()));
        (-each(0), serde_json::Value::Object(all.collect()))
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (count, chunk) = (options.count, options.chunk);
    ensure!(chunk > 1, "a single clone shares nothing");
    let bench = Bench::new()?;
    let heap = options.heap_kb.to_string();
    let mut run = bench.dormouse();
    run.args(["run", "-d", "--name", NAME]).args(CONTRACT);
    ok(run.args(["bench", "serve", "80", &heap]))?;
    let is_ready = || bench.address(NAME, 80).is_ok_and(|at| request(at, "Q").is_ok());
    ensure!(wait_until(PATIENCE, is_ready), "the server does not answer");
    let wanted = (chunk as u64 + options.write as u64) * options.heap_kb + count as u64 * 1024;
    let available = Memory::now().available_kb();
    ensure!(available > wanted + AVAILABLE_KB_MIN, "too little memory for this number");

    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..options.rounds {
        for (unshared, times) in [false, true].into_iter().zip(&mut times) {
            let took = make(&bench, "turn", chunk, unshared)?;
            times.push(took / chunk as u32);
            remove(&bench, "turn", chunk)?;
        }
    }
    let [shared, unshared] = times.map(|times| Times::new(times).median_ms());
    eprintln!(
        "  one of {chunk}: {shared:.2} ms, {unshared:.2} that read all memory for themselves"
    );
    let more = serde_json::json!({
        "heap_kb": options.heap_kb, "chunk": chunk, "rounds": options.rounds,
        "shared_ms": shared, "unshared_ms": unshared,
    });
    figure("clones", "time of one, shared/unshared", shared / unshared, "ratio", more);

    let before = Memory::now();
    let took = make(&bench, "c", count, false)?;
    let ms = took.as_secs_f64() * 1e3 / count as f64;
    let (made_kb, kinds) = Memory::now().each(&before, count);
    eprintln!("  {count}: {ms:.2} ms each, {made_kb:.0} kB each: {kinds}");
    figure("clones", "memory of one until it is written", made_kb, "kB", kinds);
    figure("clones", "time of one", ms, "ms", serde_json::json!({ "count": count }));
    promise("memory of one until it is written, in kB", made_kb, 1024.0);

    let mut all: Vec<usize> = (1..=count).collect();
    shuffle(&mut all, &mut 0x9e37_79b9_7f4a_7c15);
    for n in &all {
        ensure!(query(&bench, *n, "Q")? == "0 whole", "clone {n} has wrong memory");
    }
    let (read_kb, kinds) = Memory::now().each(&before, count);
    eprintln!("  each asked for all its memory: {read_kb:.0} kB each: {kinds}");
    figure("clones", "memory of one that was read", read_kb, "kB", kinds);

    let (some, others) = all.split_at(options.write.min(count));
    for n in some {
        ensure!(query(&bench, *n, &format!("S {n}"))? == format!("{n} whole"), "clone {n}");
    }
    for n in others {
        ensure!(query(&bench, *n, "Q")? == "0 whole", "clone {n} sees the writes of others");
    }
    for n in some {
        ensure!(query(&bench, *n, "Q")? == format!("{n} whole"), "clone {n} lost its writes");
    }
    ensure!(
        request(bench.address(NAME, 80)?, "Q")?.trim() == "0 whole",
        "the original has wrong memory"
    );
    if !some.is_empty() {
        let (_, kinds) = Memory::now().each(&before, count);
        let anonymous = kinds["AnonPages"].as_f64().context("a value of AnonPages")? * count as f64;
        let kb = anonymous / some.len() as f64;
        figure("clones", "anonymous memory of one that was written", kb, "kB", kinds);
    }
    ok(bench.dormouse().args(["rm", "--force", "--all"]))?;
    Ok(())
}

/// Makes some clones by one command. Returns the time.
fn make(bench: &Bench, stem: &str, count: usize, unshared: bool) -> Result<Duration> {
    let mut clone = bench.dormouse();
    clone.args(["clone", "-n", &count.to_string(), "--name", stem]);
    clone.args(unshared.then_some("--unshared")).arg(NAME);
    let begin = Instant::now();
    ok(&mut clone)?;
    Ok(begin.elapsed())
}

fn remove(bench: &Bench, stem: &str, count: usize) -> Result<()> {
    let names = (1..=count).map(|n| format!("{stem}-{n}"));
    ok(bench.dormouse().args(["rm", "--force"]).args(names)).map(drop)
}

fn query(bench: &Bench, number: usize, what: &str) -> Result<String> {
    let address = bench.address(&format!("c-{number}"), 80)?;
    let answer = request(address, what).with_context(|| format!("request to clone {number}"))?;
    Ok(answer.trim().to_owned())
}
