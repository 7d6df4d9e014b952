//! The time until the first byte of an asleep server while other containers use the processors, and
//! whether more processor time for the woken container, or for the waking processes, helps.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin boost -- --rounds 200 --busy 0,2,4
//! ```
//!
//! A woken container runs like any task that has not run for a while: the kernel schedules it
//! before those that have (EEVDF, since Linux 6.6). The arms give more: the container a hundredfold
//! weight, which is the maximum, and the keeper and its waking process a nice value of -10. The
//! arms take turns.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Line, Times, figure, first_byte, ok, plot};
use dormouse_testkit::wait_until;
use rustix::process::{Pid, setpriority_process};

/// Options.
#[derive(Parser)]
struct Options {
    /// Requests of each arm at each point.
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Numbers of busy containers, ascending.
    #[arg(long, value_delimiter = ',', default_value = "0,2,4")]
    busy: Vec<usize>,
    /// Memory of the servers, in kB.
    #[arg(long, default_value_t = 64)]
    kib: u64,
}

/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// The minimum time asleep: by then the process for the next wake is ready.
const GETS_READY: Duration = Duration::from_millis(50);
/// The nice value of the waking processes, in the arm with one.
const NICE: i32 = -10;

/// The boost of a woken container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Plain,
    Weight,
    Nice,
}

impl Arm {
    const ALL: [Self; 3] = [Self::Plain, Self::Weight, Self::Nice];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "as it is",
            Self::Weight => "weight 10000 of 100",
            Self::Nice => "those who wake at nice -10",
        }
    }

    fn server(self) -> &'static str {
        match self {
            Self::Plain | Self::Nice => "plain",
            Self::Weight => "heavy",
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.busy.is_sorted(), "the numbers of busy containers must grow");
    let bench = Bench::new()?;
    let kib = options.kib.to_string();
    for (name, weight) in [("plain", "100"), ("heavy", "10000")] {
        let run =
            ["run", "-d", "--name", name, "--cpu-weight", weight, "bench", "serve", "80", &kib];
        ok(bench.dormouse().args(run))?;
        let address = bench.address(name, 80)?;
        ensure!(wait_until(PATIENCE, || first_byte(address).is_ok()), "the server does not answer");
    }
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let mut working = 0;
    for busy in &options.busy {
        for n in working..*busy {
            let name = format!("busy{n}");
            let work = ["bench", "sh", "-c", "while :; do :; done"];
            ok(bench.dormouse().args(["run", "-d", "--name", &name]).args(work))?;
        }
        working = *busy;
        let mut all = Arm::ALL.map(|_| Vec::new());
        for _ in 0..options.rounds {
            for (arm, times) in Arm::ALL.into_iter().zip(&mut all) {
                times.push(measure(&bench, arm)?);
            }
        }
        for (arm, times) in Arm::ALL.into_iter().zip(all) {
            let times = Times::new(times);
            let (p50, p99) = (times.median_ms(), times.at(0.99));
            let name = format!("{}, {busy} work: first byte", arm.name());
            eprintln!("  {name}: p50 {p50:.2} ms, p99 {p99:.2} ms");
            let more = serde_json::json!({
                "rounds": options.rounds, "p50_ms": p50, "p99_ms": p99, "min_ms": times.at(0.0),
                "max_ms": times.at(1.0),
            });
            figure("boost", &name, p50, "ms", more);
            for (part, at) in [("p50", p50), ("p99", p99)] {
                let (line, place) = (format!("{}, {part}", arm.name()), (*busy as f64, at));
                match lines.iter_mut().find(|(name, _)| *name == line) {
                    Some((_, points)) => points.push(place),
                    None => lines.push((line, vec![place])),
                }
            }
        }
    }
    let lines: Vec<Line<'_>> =
        lines.iter().map(|(name, points)| Line { name, points: points.clone() }).collect();
    let axes = ["containers that work meanwhile", "ms"];
    plot("boost", "First byte of one that sleeps", axes, &lines)
}

fn measure(bench: &Bench, arm: Arm) -> Result<Duration> {
    let address = bench.address(arm.server(), 80)?;
    ok(bench.dormouse().args(["sleep", arm.server()]))?;
    std::thread::sleep(GETS_READY);
    let ours = if arm == Arm::Nice { ours(bench) } else { Vec::new() };
    let renice = |nice| {
        for pid in &ours {
            let _ = setpriority_process(Some(*pid), nice); // may have ended since
        }
    };
    renice(NICE);
    let took = first_byte(address);
    renice(0);
    took
}

/// The keeper, and its process that wakes containers.
fn ours(bench: &Bench) -> Vec<Pid> {
    let root = bench.path("root");
    let wakes = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let ends = words.ends_with(&[b"internal", b"wake", b""]);
        ends && words.contains(&root.as_os_str().as_encoded_bytes())
    };
    let parent = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
    };
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let wakers: Vec<i32> = pids.filter(wakes).collect();
    let keeper = wakers.first().and_then(parent);
    wakers.into_iter().chain(keeper).filter_map(Pid::from_raw).collect()
}
