//! Starts beside busy loops, many at once, and without a pause.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dormouse_benches::{Arm, figure, median, promise, without_v2};

/// The number of busy loops.
pub(crate) const LOOPS: usize = 8;

/// Runs of a burst.
const BURST: usize = 100;
/// Runs of each processor without a pause.
const SUSTAINED: usize = 150;

/// Busy loops of the host. Their drop ends them.
pub(crate) struct Loops(Vec<Child>);

impl Loops {
    /// Starts so many; `hog` is their program.
    pub(crate) fn start(hog: &Path, count: usize) -> Result<Self> {
        let mut loops = Self(Vec::new());
        for _ in 0..count {
            loops.0.push(Command::new(hog).arg("1").spawn().context("cannot start a loop")?);
        }
        Ok(loops)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts of an arm, `count` at once. Returns the time until the last one has ended.
fn at_once(arm: &Arm, first: usize, count: usize) -> Result<Duration> {
    let start = Instant::now();
    let run = |n| {
        let mut command = (arm.command)(n);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()
    };
    let children: Vec<Child> = (first..first + count).map(run).collect::<Result<_, _>>()?;
    for child in children {
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(start.elapsed())
}

/// A hundred runs of each arm at once, in turn.
pub(crate) fn burst(arms: &[Arm], rounds: usize, load: &str) -> Result<()> {
    eprintln!("\n{BURST} runs at once, until the last has ended, {load} (ms)");
    let mut times = vec![Vec::new(); arms.len()];
    for n in 0..rounds {
        for (arm, times) in arms.iter().zip(&mut times) {
            let burst = || at_once(arm, n * BURST, BURST).with_context(|| arm.name.clone());
            let took = if arm.hide_v2 { without_v2(burst)? } else { burst()? };
            times.push(took.as_secs_f64() * 1e3);
        }
    }
    for (arm, times) in arms.iter().zip(&times) {
        eprintln!("  {:<12} {:>8.0}", arm.name, median(times.clone()));
        figure(
            "start",
            &arm.name,
            median(times.clone()),
            "ms",
            serde_json::json!({"at_once": BURST, "load": load}),
        );
    }
    Ok(())
}

/// Runs without a pause, one after the other on each processor. The CPU time of the host is that of the runs only where
/// no loops are busy.
pub(crate) fn sustained(arms: &[Arm], load: &str, is_busy: bool) -> Result<()> {
    let workers = available_parallelism().map_or(1, usize::from);
    eprintln!("\none run after the other, {workers} at a time, {load}");
    eprintln!("  {:<12} {:>8} {:>16}", "", "runs/s", "CPU ms per run");
    for arm in arms {
        let (busy, start) = (busy_ms()?, Instant::now());
        let worker = |worker: usize| {
            let all = || -> Result<()> {
                for n in 0..SUSTAINED {
                    at_once(arm, worker * SUSTAINED + n, 1)?;
                }
                Ok(())
            };
            if arm.hide_v2 { without_v2(all) } else { all() }
        };
        std::thread::scope(|scope| -> Result<()> {
            let all: Vec<_> = (0..workers).map(|n| scope.spawn(move || worker(n))).collect();
            for thread in all {
                match thread.join() {
                    Ok(ended) => ended.with_context(|| arm.name.clone())?,
                    Err(_) => bail!("a thread panicked"),
                }
            }
            Ok(())
        })?;
        let runs = (workers * SUSTAINED) as f64;
        let rate = runs / start.elapsed().as_secs_f64();
        let cpu = if is_busy { None } else { Some((busy_ms()? - busy) / runs) };
        let text = cpu.map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.2}"));
        eprintln!("  {:<12} {rate:>8.1} {text:>16}", arm.name);
        let more = serde_json::json!({"cpu_ms_per_run": cpu, "at_a_time": workers, "load": load});
        figure("start", &arm.name, rate, "runs per second", more);
        if let Some(cpu) = cpu.filter(|_| arm.name == "dormouse") {
            promise("CPU time of the host per run, in ms", cpu, 4.5);
        }
    }
    Ok(())
}

/// CPU time that the host has used (user, nice, system, irq and softirq of proc_stat(5)).
fn busy_ms() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let words: Vec<f64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .map_while(|word| word.parse().ok())
        .collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = words[..] else {
        bail!("unexpected format of /proc/stat");
    };
    // A tick of proc_stat(5) is a hundredth of a second.
    Ok((user + nice + system + irq + softirq) * 10.0)
}
