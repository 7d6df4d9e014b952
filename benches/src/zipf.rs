//! Many servers, memory for some of them: how many requests are answered.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin zipf -- --servers 40 --seconds 4
//! ```
//!
//! Some clients ask one server after the other, number n with a probability of 1/n^alpha, each request
//! a connection of its own. The daemon has memory for a part of the servers; the others sleep, and are
//! woken by whoever asks them, when another one sleeps in their place. The reference has memory for all
//! of them, in the same run, before and after. On the way to that many servers it is measured how many
//! requests fewer of them answer, with memory for all and for `--fit` of them. Denali (OSDI 2002), figures 8
//! to 11.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Line, Times, figure, ok, plot, promise};
use dormouse_testkit::wait_until;

/// Options.
#[derive(Parser)]
struct Options {
    /// How many servers.
    #[arg(long, default_value_t = 40)]
    servers: usize,
    /// Memory of each of them.
    #[arg(long, default_value_t = 2048)]
    kib: u64,
    /// How many ask at once.
    #[arg(long, default_value_t = 4)]
    clients: usize,
    /// How long each point is measured.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// How many have room where not all have.
    #[arg(long, default_value_t = 10)]
    fit: usize,
    /// From how many servers on it is measured how many requests they answer, twice as many each time.
    #[arg(long, default_value_t = 5)]
    from: usize,
}

/// LIMIT: how long an answer may take before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Until who is popular is known.
const WARMS_UP: Duration = Duration::from_secs(1);
/// What the kernel has of a server, in KiB.
const KERNEL_KIB: u64 = 400;

const ALPHAS: [f64; 4] = [0.0, 0.5, 1.0, 1.5];
const PARTS: [f64; 4] = [0.1, 0.25, 0.5, 0.75];

/// What one point came to.
struct Point {
    requests_per_s: f64,
    times: Times,
    wakes: usize,
}

/// Numbers that only look like chance (xorshift64), and ranks by how likely they are.
struct Ranks {
    state: u64,
    sums: Vec<f64>,
}

impl Ranks {
    fn new(seed: u64, count: usize, alpha: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|n| {
            sum += (n as f64).powf(-alpha);
            sum
        });
        Self { state: seed | 1, sums: sums.collect() }
    }

    fn next(&mut self) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let part = (self.state >> 11) as f64 / (1u64 << 53) as f64;
        let at = part * self.sums.last().copied().unwrap_or(0.0);
        self.sums.partition_point(|sum| *sum <= at).min(self.sums.len() - 1)
    }
}

fn ask(address: SocketAddr) -> Result<Duration> {
    let begin = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"Q\n")?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    ensure!(said.contains("whole"), "it said '{said}'");
    Ok(begin.elapsed())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let mut all = Vec::new();
    against_their_number(&bench, &options, &mut all)?;
    let mut lines = Vec::new();
    for alpha in ALPHAS {
        let before = point(&bench, &options, &all, alpha, 1.0)?;
        let mut line = Vec::new();
        for part in PARTS {
            let found = point(&bench, &options, &all, alpha, part)?;
            line.push((part, found));
        }
        let after = point(&bench, &options, &all, alpha, 1.0)?;
        let resident = (before.requests_per_s + after.requests_per_s) / 2.0;
        for (part, found) in &line {
            tell(&options, alpha, *part, found, resident);
        }
        if alpha == 1.0 {
            let of_all = resident / line[0].1.requests_per_s;
            promise("alpha 1, memory for a tenth: all in memory against it", of_all, 2.0);
        }
        let ratios = line.iter().map(|(part, found)| (*part, found.requests_per_s / resident));
        lines.push((format!("alpha {alpha}"), ratios.chain([(1.0, 1.0)]).collect()));
    }
    let lines: Vec<Line<'_>> =
        lines.into_iter().map(|(name, points)| Line { name: name.leak(), points }).collect();
    let title = format!("{} servers, memory for some of them", options.servers);
    plot("zipf", &title, ["part of them that has room", "requests, of all in memory"], &lines)
}

/// Starts more servers, up to so many.
fn start(bench: &Bench, options: &Options, all: &mut Vec<SocketAddr>, count: usize) -> Result<()> {
    for n in all.len()..count {
        let name = format!("s{n}");
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--sleep-after", "3600s", "--name", &name, "bench", "serve", "80"]);
        ok(run.arg(options.kib.to_string()))?;
        all.push(bench.address(&name, 80)?);
    }
    let answers = || all.iter().all(|address| ask(*address).is_ok());
    ensure!(wait_until(PATIENCE, answers), "not all of them answer");
    Ok(())
}

/// Starts the servers, and draws how many requests so many of them answer on the way.
fn against_their_number(bench: &Bench, options: &Options, all: &mut Vec<SocketAddr>) -> Result<()> {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let counts = std::iter::successors(Some(options.from.max(1)), |count| Some(count * 2));
    let counts = counts.take_while(|count| *count < options.servers).chain([options.servers]);
    for count in counts {
        start(bench, options, all, count)?;
        let arms =
            ALPHAS.map(|alpha| (format!("alpha {alpha}, room for {}", options.fit), alpha, false));
        // With room for all of them nobody is asked for what nobody has: who is popular hardly matters.
        for (name, alpha, all_fit) in
            [("room for all".to_owned(), 1.0, true)].into_iter().chain(arms)
        {
            let part = if all_fit { 1.0 } else { (options.fit as f64 / count as f64).min(1.0) };
            let found = point(bench, options, all, alpha, part)?;
            let what = format!("{count} servers, {name}");
            eprintln!("  {what}: {:.0} requests/s, {} wakes", found.requests_per_s, found.wakes);
            let more = serde_json::json!({
                "servers": count, "kib": options.kib, "clients": options.clients, "alpha": alpha,
                "wakes": found.wakes, "p50_ms": found.times.median_ms(), "p99_ms": found.times.at(0.99),
            });
            figure("zipf", &format!("{what}: requests"), found.requests_per_s, "1/s", more);
            let place = (count as f64, found.requests_per_s);
            match lines.iter_mut().find(|(line, _)| *line == name) {
                Some((_, points)) => points.push(place),
                None => lines.push((name, vec![place])),
            }
        }
    }
    let drawn = lines.iter().map(|(name, points)| Line { name, points: points.clone() });
    let title = format!("More and more servers, memory for {} of them", options.fit);
    plot("zipf-servers", &title, ["servers", "requests a second"], &drawn.collect::<Vec<_>>())
}

fn tell(options: &Options, alpha: f64, part: f64, found: &Point, resident: f64) {
    let Point { requests_per_s, times, wakes } = found;
    let ratio = requests_per_s / resident;
    eprintln!(
        "  alpha {alpha}, room for {part}: {requests_per_s:.0} requests/s, {ratio:.2} of all in \
         memory; p50 {:.2} ms, p99 {:.1} ms, longest {:.0} ms; {wakes} wakes",
        times.median_ms(),
        times.at(0.99),
        times.at(1.0)
    );
    let more = serde_json::json!({
        "servers": options.servers, "kib": options.kib, "clients": options.clients,
        "seconds": options.seconds, "requests_per_s": requests_per_s, "wakes": wakes,
        "p50_ms": times.median_ms(), "p99_ms": times.at(0.99), "max_ms": times.at(1.0),
    });
    let name = format!("alpha {alpha}, room for {part}: requests, of all in memory");
    figure("zipf", &name, ratio, "", more);
}

/// Asks for a while, with memory for a part of them.
fn point(
    bench: &Bench,
    options: &Options,
    all: &[SocketAddr],
    alpha: f64,
    part: f64,
) -> Result<Point> {
    let fit = (all.len() as f64 * part).round().max(1.0) as u64;
    // A sixteenth is kept free.
    let kib = fit * (options.kib + KERNEL_KIB) * 16 / 15 + 1;
    let _daemon = bench.daemon(&["--memory", &format!("{kib}k")])?;
    run(options, all, alpha, WARMS_UP)?;
    let before = wakes(bench)?;
    let times = run(options, all, alpha, Duration::from_secs(options.seconds))?;
    let wakes = wakes(bench)?.saturating_sub(before);
    let requests_per_s = times.len() as f64 / options.seconds as f64;
    Ok(Point { requests_per_s, times: Times::new(times), wakes })
}

fn run(options: &Options, all: &[SocketAddr], alpha: f64, time: Duration) -> Result<Vec<Duration>> {
    let is_over = AtomicBool::new(false);
    let seed = AtomicUsize::new(0);
    let client = || -> Result<Vec<Duration>> {
        let number = seed.fetch_add(1, Ordering::Relaxed) as u64;
        let mut ranks = Ranks::new(0x9e37_79b9_7f4a_7c15 ^ (number << 20), all.len(), alpha);
        let mut times = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            times.push(ask(all[ranks.next()])?);
        }
        Ok(times)
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..options.clients).map(|_| scope.spawn(client)).collect();
        std::thread::sleep(time);
        is_over.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for client in clients {
            let times = client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
            all.extend(times.context("a request was lost")?);
        }
        Ok(all)
    })
}

/// How many wakes there were.
fn wakes(bench: &Bench) -> Result<usize> {
    let text = std::fs::read_to_string(bench.path("root/lib/events"))?;
    Ok(text.lines().filter(|line| line.contains("\"wake\"")).count())
}
