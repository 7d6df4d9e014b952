//! A thousand containers at once: the start of the last against the first, and leftovers after the
//! removal of all.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin thousand -- --count 1000
//! ```
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Line, Times, figure, ok, plot, promise};
use dormouse_testkit::{leftover, wait_until};

/// Options.
#[derive(Parser)]
struct Options {
    /// Number of containers.
    #[arg(long, default_value_t = 1000)]
    count: usize,
}

/// LIMIT: below this much available memory no further container is started.
const AVAILABLE_KB_MIN: u64 = 5 << 20;

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    std::fs::create_dir_all(bench.path("root/etc"))?;
    std::fs::write(bench.path("root/etc/config.toml"), "[keeper]\nlinger = \"0s\"\n")?;
    let before = host(&bench);
    let mut times = Vec::new();
    for n in 0..options.count {
        if n % 50 == 0 {
            eprint!("\r  {n} of {} started", options.count);
            ensure!(meminfo_kb("MemAvailable:") > AVAILABLE_KB_MIN, "memory runs out at {n}");
        }
        let mut run = bench.dormouse();
        let start = Instant::now();
        ok(run.args(["run", "-d", "--name", &format!("n{n}"), "bench", "sleep", "86400"]))?;
        times.push(start.elapsed());
    }
    let running = ok(bench.dormouse().args(["ps", "-q"]))?.lines().count();
    ensure!(running == options.count, "{running} of {} run", options.count);
    eprintln!("\r  {running} containers run, {} kB for our processes", keeper_kb());
    let part = (options.count / 20).max(1);
    let first = Times::new(times[..part].to_vec()).median_ms();
    let last = Times::new(times[options.count - part..].to_vec()).median_ms();
    eprintln!("  start of the first {part}: {first:.2} ms, of the last: {last:.2} ms (medians)");
    bars(&times);
    draw(&times)?;
    figure(
        "thousand",
        "last/first",
        last / first,
        "ratio",
        serde_json::json!({
            "count": options.count, "first_ms": first, "last_ms": last, "keeper_kb": keeper_kb(),
        }),
    );
    promise("start of the last against the first", last / first, 2.0);
    let start = Instant::now();
    ok(bench.dormouse().args(["rm", "--force", "--all"]))?;
    eprintln!("  all removed in {:.1} s", start.elapsed().as_secs_f64());
    // The keeper exits a second after its last child (`linger`), and cleans up.
    let mut left = Vec::new();
    wait_until(Duration::from_secs(10), || {
        left = host(&bench).difference(&before).cloned().collect();
        left.is_empty()
    });
    ensure!(left.is_empty(), "left behind: {left:?}");
    eprintln!("  nothing is left behind");
    figure("thousand", "left behind", 0.0, "things", serde_json::json!({}));
    Ok(())
}

/// Our mounts, cgroups and processes, independent of other programs on this machine.
fn host(bench: &Bench) -> BTreeSet<String> {
    let own = std::process::id();
    let mut all: BTreeSet<String> = leftover::mounts(own).into_iter().collect();
    let groups = leftover::cgroups(&leftover::cgroup_name(&bench.path("root")));
    all.extend(groups.iter().map(|path| format!("cgroup {}", path.display())));
    let processes = leftover::processes(own, bench.dir.path());
    all.extend(processes.iter().map(|(pid, line)| format!("process {pid} {line}")));
    all
}

fn meminfo_kb(field: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with(field)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Resident memory of our keepers.
fn keeper_kb() -> u64 {
    let mut sum = 0;
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
        if status.lines().next().is_some_and(|l| l.contains("dormouse-keeper")) {
            let rss = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
            sum += rss.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

/// Plots each start over the number of running containers, and the median around it.
fn draw(times: &[Duration]) -> Result<()> {
    let ms: Vec<f64> = times.iter().map(|t| t.as_secs_f64() * 1e3).collect();
    let usual = |n: usize| {
        let around = &times[n.saturating_sub(25)..times.len().min(n + 25)];
        Times::new(around.to_vec()).median_ms()
    };
    let each = Line { name: "each start", points: (1u32..).map(f64::from).zip(ms).collect() };
    let usual = (0..times.len()).map(|n| (n as f64 + 1.0, usual(n))).collect();
    let lines = [each, Line { name: "median of 50 around it", points: usual }];
    let axes = ["containers that run", "ms until run -d returns"];
    plot("thousand", "Start of one more container", axes, &lines)
}

/// Prints the times over the number of running containers as bars.
fn bars(times: &[Duration]) {
    let parts: Vec<f64> = times
        .chunks(times.len().div_ceil(20).max(1))
        .map(|part| Times::new(part.to_vec()).median_ms())
        .collect();
    let top = parts.iter().copied().fold(0.0, f64::max);
    for (i, ms) in parts.iter().enumerate() {
        let bar = "#".repeat((ms / top * 50.0).round() as usize);
        eprintln!("  {:>6} {ms:>7.2} ms {bar}", (i + 1) * times.len() / parts.len());
    }
}
