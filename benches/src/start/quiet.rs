//! The first run after a time without one.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use dormouse_benches::{Bench, Times, figure, ok, promise};

/// The time without a run. By default the keeper lingers for ten minutes.
const QUIET: Duration = Duration::from_secs(60);

pub(crate) fn measure(bench: &Bench, rounds: usize, load: &str) -> Result<()> {
    eprintln!("\nthe first run, {load} (ms)");
    let run = || -> Result<Duration> {
        let mut run = bench.dormouse();
        run.args(["run", "--rm", "bench", "true"]);
        timed(run)
    };
    run()?;
    let mut after_quiet = Vec::new();
    for _ in 0..rounds {
        sleep(QUIET);
        after_quiet.push(run()?);
    }
    let mut after_boot = Vec::new();
    for _ in 0..rounds {
        // Ends the keeper, and removes the stack of the domain with its programs and all mounts.
        ok(bench.dormouse().args(["internal", "reset"]))?;
        after_boot.push(run()?);
    }
    for (name, times) in [("after a minute", after_quiet), ("after a boot", after_boot)] {
        if times.is_empty() {
            continue;
        }
        let times = Times::new(times);
        eprintln!("  {name:<16} {:>8.2} (at most {:.2})", times.median_ms(), times.at(1.0));
        let more = serde_json::json!({"first": name, "load": load, "max_ms": times.at(1.0)});
        figure("start", "dormouse", times.median_ms(), "ms", more);
        if name == "after a minute" {
            promise("the first after a minute, in ms", times.median_ms(), 20.0);
        }
    }
    Ok(())
}

fn timed(mut command: Command) -> Result<Duration> {
    let start = Instant::now();
    ok(&mut command)?;
    Ok(start.elapsed())
}
