//! The time until the first byte of a server that is awake, swapped out, drowsy or asleep, while
//! other containers use the processors.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin tiers -- --servers 20 --rounds 50 --busy 0,1,2,4
//! ```
//!
//! Busy containers run beside the servers, from none to more than there are processors. In each
//! round all servers enter the tier, and then receive one request each, in random order. Denali
//! (OSDI 2002) measures its swapped-out servers likewise in section 6.4. Swapped out is a host
//! without our daemon: the server runs, and all its reclaimable memory is in a swap file, which is
//! made for that.
#![forbid(unsafe_code)]

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Line, Swap, Times, figure, first_byte, ok, plot};
use dormouse_testkit::wait_until;
use rustix::io::Errno;

/// Options.
#[derive(Parser)]
struct Options {
    /// Number of servers.
    #[arg(long, default_value_t = 20)]
    servers: usize,
    /// Requests to each at each point.
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Numbers of busy containers, ascending.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,4")]
    busy: Vec<usize>,
    /// Memory of each server, in kB.
    #[arg(long, default_value_t = 64)]
    kib: u64,
}

/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time until the process for the next wake is ready, and the suspend is complete.
const SETTLES: Duration = Duration::from_millis(50);

/// The state of a server at a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    Awake,
    Swapped,
    Drowsy,
    Asleep,
}

impl Tier {
    const ALL: [Self; 4] = [Self::Awake, Self::Swapped, Self::Drowsy, Self::Asleep];

    fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Swapped => "swapped out",
            Self::Drowsy => "drowsy",
            Self::Asleep => "asleep",
        }
    }

    /// Brings all servers into this state.
    fn put(self, bench: &Bench, names: &[String]) -> Result<()> {
        let more: &[&str] = match self {
            Self::Awake => return Ok(()),
            Self::Swapped => return names.iter().try_for_each(|name| swap_out(bench, name)),
            Self::Drowsy => &["--drowsy"],
            Self::Asleep => &[],
        };
        ok(bench.dormouse().arg("sleep").args(more).args(names))?;
        std::thread::sleep(SETTLES);
        Ok(())
    }
}

/// Reclaims all possible memory of a container.
fn swap_out(bench: &Bench, name: &str) -> Result<()> {
    let shown = ok(bench.dormouse().args(["inspect", "--json", name]))?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    let pid =
        shown.get(0).unwrap_or(&shown)["pid"].as_u64().context("the container has no process")?;
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let of = |controller: &str| {
        let mut rows = table.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        rows.find(|(names, _)| names.split(',').any(|n| n == controller)).map(|row| row.1)
    };
    let top = Path::new("/sys/fs/cgroup");
    let taken = match (of("memory"), of("")) {
        // memory.txt of cgroup-v1.
        (Some(path), _) => {
            fs::write(top.join("memory").join(&path[1..]).join("memory.force_empty"), "0")
        }
        // The write fails with EAGAIN if less could be reclaimed.
        (None, Some(path)) => fs::write(top.join(&path[1..]).join("memory.reclaim"), "1G"),
        (None, None) => return Ok(()),
    };
    match taken {
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::AGAIN | Errno::BUSY) => Ok(()),
            _ => Err(e.into()),
        },
        Ok(()) => Ok(()),
    }
}

/// One line of the plot.
struct Drawn {
    tier: Tier,
    /// The quantile of the times.
    part: f64,
    name: String,
    points: Vec<(f64, f64)>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.busy.is_sorted(), "the numbers of busy containers must grow");
    let bench = Bench::new()?;
    let _swap = Swap::on(&bench, 1 << 30)?;
    let kib = options.kib.to_string();
    let names: Vec<String> = (0..options.servers).map(|n| format!("s{n}")).collect();
    let mut all = Vec::new();
    for name in &names {
        ok(bench.dormouse().args(["run", "-d", "--name", name, "bench", "serve", "80", &kib]))?;
        all.push(bench.address(name, 80)?);
    }
    let answers = || all.iter().all(|address| first_byte(*address).is_ok());
    ensure!(wait_until(PATIENCE, answers), "not all servers answer");
    let of_tier = |tier: Tier| {
        let parts = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];
        parts.map(|(name, part)| {
            let name = format!("{} {name}", tier.name());
            Drawn { tier, part, name, points: Vec::new() }
        })
    };
    let drawn = Tier::ALL.into_iter().filter(|tier| *tier != Tier::Awake);
    let mut lines: Vec<Drawn> = drawn.flat_map(of_tier).collect();
    let mut working = 0;
    for busy in &options.busy {
        for n in working..*busy {
            let name = format!("busy{n}");
            let work = ["bench", "sh", "-c", "while :; do :; done"];
            ok(bench.dormouse().args(["run", "-d", "--name", &name]).args(work))?;
        }
        working = *busy;
        let times = measure(&bench, &names, &all, options.rounds)?;
        for (tier, times) in Tier::ALL.into_iter().zip(&times) {
            report(&options, *busy, tier, times);
        }
        for Drawn { tier, part, points, .. } in &mut lines {
            points.push((*busy as f64, times[*tier as usize].at(*part)));
        }
    }
    let lines = lines.iter();
    let drawn: Vec<Line<'_>> =
        lines.map(|it| Line { name: &it.name, points: it.points.clone() }).collect();
    let title = format!("First byte of one of {} servers", options.servers);
    plot("tiers", &title, ["containers that work meanwhile", "ms"], &drawn)
}

fn report(options: &Options, busy: usize, tier: Tier, times: &Times) {
    let (p50, p99, p999) = (times.median_ms(), times.at(0.99), times.at(0.999));
    let name = format!("{}, {busy} work: first byte", tier.name());
    eprintln!("  {name}: p50 {p50:.2} ms, p99 {p99:.2} ms, p99.9 {p999:.2} ms");
    let more = serde_json::json!({
        "servers": options.servers, "rounds": options.rounds, "asked": times.len(),
        "p50_ms": p50, "p99_ms": p99, "p999_ms": p999, "max_ms": times.at(1.0),
    });
    figure("tiers", &name, p50, "ms", more);
}

/// Sends a request to all servers in each tier, in turn.
fn measure(
    bench: &Bench,
    names: &[String],
    all: &[SocketAddr],
    rounds: usize,
) -> Result<Vec<Times>> {
    let mut times: Vec<Vec<Duration>> = Tier::ALL.map(|_| Vec::new()).into();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut order: Vec<usize> = (0..all.len()).collect();
    for _ in 0..rounds {
        for (tier, times) in Tier::ALL.into_iter().zip(&mut times) {
            dormouse_benches::shuffle(&mut order, &mut random);
            tier.put(bench, names)?;
            for n in &order {
                let first = first_byte(all[*n]);
                times.push(first.with_context(|| format!("{} does not answer", names[*n]))?);
            }
        }
    }
    Ok(times.into_iter().map(Times::new).collect())
}
