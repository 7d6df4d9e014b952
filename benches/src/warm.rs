//! The time until the first byte of asleep servers, and its cost in memory, by the number of them that are kept warm.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin warm -- --servers 256 --warm 0,16,64,128,256 --requests 400
//! ```
//!
//! The servers are small, and all asleep. A client draws one by Zipf's law (server n with a probability in proportion
//! to 1/n^alpha), sends it a request, and puts it to sleep again with `sleep --warm`. The last ones that were called
//! are warm, as many as `[sleep] warm` permits; the others are ordinary sleepers. The same requests are sent for each
//! number. Memory is what the cgroups of the warm ones are charged (`inspect`).
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::farm::Ranks;
use dormouse_benches::{Bench, Line, Times, figure, first_byte, ok, plot};
use dormouse_testkit::wait_until;

/// Options.
#[derive(Parser)]
struct Options {
    /// Number of servers.
    #[arg(long, default_value_t = 256)]
    servers: usize,
    /// Numbers of servers that are kept warm, ascending.
    #[arg(long, value_delimiter = ',', default_value = "0,16,64,128,256")]
    warm: Vec<usize>,
    /// Requests at each of these numbers.
    #[arg(long, default_value_t = 400)]
    requests: usize,
    /// The exponent of Zipf's law.
    #[arg(long, default_value_t = 1.0)]
    alpha: f64,
}

/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time until the process for the next wake is ready.
const SETTLES: Duration = Duration::from_millis(20);

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.warm.is_sorted(), "the numbers of warm servers must grow");
    let bench = Bench::new()?;
    let names: Vec<String> = (0..options.servers).map(|n| format!("s{n}")).collect();
    let mut all = Vec::new();
    for name in &names {
        ok(bench.dormouse().args(["run", "-d", "--name", name, "bench", "serve", "80", "64"]))?;
        all.push(bench.address(name, 80)?);
    }
    let answers = || all.iter().all(|address| first_byte(*address).is_ok());
    ensure!(wait_until(PATIENCE, answers), "not all servers answer");
    ok(bench.dormouse().arg("sleep").args(&names))?;
    let mut lines = ["mean", "p50", "p90", "p99"].map(|name| Line { name, points: Vec::new() });
    for warm in &options.warm {
        let point = measure(&bench, &options, &names, &all, *warm)?;
        let Point { times, found, charged_mb } = &point;
        let mean = times.mean_ms();
        let part = *found as f64 / options.requests as f64;
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|part| times.at(part));
        eprintln!(
            "  {warm} warm: mean {mean:.2} ms, p50 {p50:.2}, p90 {p90:.2}, p99 {p99:.2}; {part:.2} of the requests \
             found a warm one; {charged_mb:.1} MB charged"
        );
        let more = serde_json::json!({
            "servers": options.servers, "requests": options.requests, "alpha": options.alpha,
            "p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "found_warm": part,
            "charged_mb": charged_mb,
        });
        figure("warm", &format!("{warm} warm: first byte, mean"), mean, "ms", more);
        for (line, ms) in lines.iter_mut().zip([mean, p50, p90, p99]) {
            line.points.push((*warm as f64, ms));
        }
    }
    let title = format!("First byte of one of {} asleep servers, by Zipf's law", options.servers);
    plot("warm", &title, ["kept warm", "ms"], &lines)
}

/// The figures with one number of warm servers.
struct Point {
    times: Times,
    /// Requests to a server that was warm.
    found: usize,
    charged_mb: f64,
}

fn measure(
    bench: &Bench,
    options: &Options,
    names: &[String],
    all: &[SocketAddr],
    warm: usize,
) -> Result<Point> {
    bench.configure(&format!("[sleep]\nwarm = {warm}\n"))?;
    let sleep = |n: usize| {
        let more: &[&str] = if warm > 0 { &["--warm"] } else { &[] };
        ok(bench.dormouse().arg("sleep").args(more).arg(&names[n])).map(drop)
    };
    // The change of the settings has outdated all that were warm. The least popular are called first, and the oldest
    // go beyond the bound.
    for n in (0..names.len().min(warm)).rev() {
        first_byte(all[n])?;
        sleep(n)?;
    }
    let mut ranks = Ranks::new(0x9e37_79b9_7f4a_7c15, names.len(), options.alpha);
    let (mut times, mut found) = (Vec::new(), 0);
    for _ in 0..options.requests {
        let n = ranks.draw();
        found += usize::from(is_warm(bench, &names[n])?);
        std::thread::sleep(SETTLES);
        let first = first_byte(all[n]);
        times.push(first.with_context(|| format!("{} does not answer", names[n]))?);
        sleep(n)?;
    }
    let charged =
        |name: &String| Ok(bench.record(name)?["warm_memory_bytes"].as_u64().unwrap_or(0));
    let charged: Vec<u64> = names.iter().map(charged).collect::<Result<_>>()?;
    let kept = charged.iter().filter(|bytes| **bytes > 0).count();
    ensure!(kept == warm.min(names.len()), "{kept} are warm, and not {warm}");
    let charged_mb = charged.iter().sum::<u64>() as f64 / f64::from(1 << 20);
    Ok(Point { times: Times::new(times), found, charged_mb })
}

fn is_warm(bench: &Bench, name: &str) -> Result<bool> {
    Ok(bench.record(name)?["warm"].as_bool().unwrap_or(false))
}
