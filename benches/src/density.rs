//! How many containers sleep on one machine, what each of them costs, and whether every one of them
//! still answers.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin density -- --steps 100,300,1000
//! ```
//!
//! Each container is started (or cloned from the first, with `--by clone`), is told a number that it
//! fills its memory with, and is put to sleep. At every step the memory of the machine is compared with
//! that before the first, by kind. At the end each is asked once, in random order, and has to answer
//! with its own number and with every page as it was.
//!
//! It ends by itself, and says why, when memory, process ids or time run out.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use dormouse_benches::{Bench, Line, Times, figure, ok, plot, promise};
use dormouse_testkit::{leftover, wait_until};

/// Options.
#[derive(Parser)]
struct Options {
    /// At how many containers memory is looked at; the last is how many there are to be.
    #[arg(long, value_delimiter = ',', default_value = "100,300,1000")]
    steps: Vec<usize>,
    /// How each comes to be.
    #[arg(long, value_enum, default_value = "run")]
    by: By,
    /// Memory of each that is its own, in kB.
    #[arg(long, default_value_t = 64)]
    heap_kb: u64,
    /// No further container after this many seconds.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// The keeper is killed when all sleep: how long until a command has all of them heard again.
    #[arg(long)]
    lose_keeper: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// `dormouse run`.
    Run,
    /// `dormouse clone` of the first.
    Clone,
}

/// LIMIT: below this much available memory no further container is made.
const AVAILABLE_KB_MIN: u64 = 5 << 20;
/// LIMIT: so many process ids stay free.
const PIDS_MIN: u64 = 2000;
/// LIMIT: how long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 80;

/// Memory of the machine by kind, in kB.
#[derive(Debug, Clone, Copy)]
struct Memory {
    available: u64,
    slab: u64,
    slab_unreclaimable: u64,
    page_tables: u64,
    kernel_stack: u64,
    percpu: u64,
    /// Resident memory of our own processes.
    ours: u64,
    /// What the containers' directories take on disk.
    disk: u64,
}

impl Memory {
    fn now(bench: &Bench) -> Self {
        // Kernel objects whose time has come are freed late; what is only cached is none of ours.
        rustix::fs::sync();
        let _ = fs::write("/proc/sys/vm/drop_caches", "3"); // a host may forbid it
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_default();
            line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        Self {
            available: field("MemAvailable:"),
            slab: field("Slab:"),
            slab_unreclaimable: field("SUnreclaim:"),
            page_tables: field("PageTables:"),
            kernel_stack: field("KernelStack:"),
            percpu: field("Percpu:"),
            ours: ours_kb(bench),
            disk: disk_kb(&bench.path("root/lib/containers")),
        }
    }

    /// What each of `count` containers has added since.
    fn each(&self, before: &Self, count: usize) -> serde_json::Value {
        let each = |now: u64, then: u64| {
            let kb = (now as f64 - then as f64) / count as f64;
            (kb * 1000.0).round() / 1000.0
        };
        serde_json::json!({
            "containers": count,
            "available_kb": each(before.available, self.available),
            "slab_kb": each(self.slab, before.slab),
            "slab_unreclaimable_kb": each(self.slab_unreclaimable, before.slab_unreclaimable),
            "page_tables_kb": each(self.page_tables, before.page_tables),
            "kernel_stack_kb": each(self.kernel_stack, before.kernel_stack),
            "percpu_kb": each(self.percpu, before.percpu),
            "our_processes_kb": each(self.ours, before.ours),
            "disk_kb": each(self.disk, before.disk),
        })
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(options.steps.is_sorted() && options.steps.first() > Some(&0), "steps must grow");
    let bench = Bench::new()?;
    // The domain, the keeper and the shared mounts are there before anything is counted.
    let template = Sleeper::new(&bench, &options, None, 0)?;
    if options.by == By::Run {
        template.put_to_sleep(&bench)?; // only what runs is cloned
    }
    let before = Memory::now(&bench);
    let until = Instant::now() + Duration::from_secs(options.seconds);
    let mut sleepers = Vec::new();
    let (mut made, mut slept) = (Vec::new(), Vec::new());
    let mut kernel_kb = Line { name: "unreclaimable slab", points: Vec::new() };
    let mut disk = Line { name: "disk", points: Vec::new() };
    let mut last = 0.0;
    let mut end = None;
    for step in &options.steps {
        while end.is_none() && sleepers.len() < *step {
            let n = sleepers.len() + 1;
            let start = Instant::now();
            let sleeper = Sleeper::new(&bench, &options, Some(&template), n)?;
            made.push(start.elapsed());
            let start = Instant::now();
            sleeper.put_to_sleep(&bench)?;
            slept.push(start.elapsed());
            sleepers.push(sleeper);
            if n.is_multiple_of(50) {
                eprint!("\r  {n} asleep ");
                end = exhausted(until);
            }
        }
        if sleepers.is_empty() {
            break;
        }
        let count = sleepers.len();
        let each = Memory::now(&bench).each(&before, count);
        eprintln!("\r  {count} asleep, each: {each}");
        let value = |name: &str| each[name].as_f64().unwrap_or(f64::NAN);
        last = value("slab_unreclaimable_kb") + value("our_processes_kb") + value("percpu_kb");
        kernel_kb.points.push((count as f64, value("slab_unreclaimable_kb")));
        disk.points.push((count as f64, value("disk_kb")));
        figure("density", "memory of one that sleeps", last, "kB", each);
        if end.is_some() {
            break;
        }
    }
    if let Some(why) = &end {
        eprintln!("  ended at {}: {why}", sleepers.len());
    }
    let count = sleepers.len();
    let part = (count / 10).max(1);
    for (what, times) in [("making one", &made), ("putting one to sleep", &slept)] {
        let first = Times::new(times[..part].to_vec()).median_ms();
        let last = Times::new(times[count - part..].to_vec()).median_ms();
        eprintln!("  {what}: first {part} {first:.1} ms, last {part} {last:.1} ms (medians)");
        let more = serde_json::json!({ "containers": count, "first_ms": first, "last_ms": last });
        figure("density", &format!("{what}, last/first"), last / first, "ratio", more);
    }
    if options.lose_keeper {
        let took = lose_keeper(&bench)?;
        let (ms, each) = (took.as_secs_f64() * 1e3, took.as_secs_f64() * 1e3 / count as f64);
        eprintln!("  heard again after {ms:.0} ms, {each:.2} ms each");
        let more = serde_json::json!({ "containers": count, "all_ms": ms });
        figure("density", "heard again after the loss of the keeper", each, "ms each", more);
    }
    let answers = ask_all(&mut sleepers)?;
    let more = serde_json::json!({
        "containers": count, "p50_ms": answers.median_ms(), "p99_ms": answers.at(0.99),
        "max_ms": answers.at(1.0), "ended": end,
    });
    figure(
        "density",
        "asked once each, in random order: first byte",
        answers.median_ms(),
        "ms",
        more,
    );
    eprintln!(
        "  all {count} answered as themselves: p50 {:.2} ms, p99 {:.2} ms",
        answers.median_ms(),
        answers.at(0.99)
    );
    promise("memory of one that sleeps, in kB", last, 8472.0 / 1024.0);
    let axes = ["containers that sleep", "kB each"];
    plot("density", "What one more sleeping container costs", axes, &[kernel_kb, disk])
}

/// Kills who hears callers, and has the next command bring all of them back.
fn lose_keeper(bench: &Bench) -> Result<Duration> {
    let keeper = || {
        let all = leftover::processes(std::process::id(), bench.dir.path());
        all.into_iter().find(|(_, line)| line.contains("keeper")).map(|(pid, _)| pid)
    };
    let pid = keeper().context("nobody has custody")?;
    let process = rustix::process::Pid::from_raw(pid as i32).context("a pid")?;
    rustix::process::kill_process(process, rustix::process::Signal::KILL)?;
    ensure!(wait_until(PATIENCE, || keeper() != Some(pid)), "the keeper does not end");
    let start = Instant::now();
    ok(bench.dormouse().args(["ps", "--quiet"]))?;
    Ok(start.elapsed())
}

/// Why no further container is made, if so.
fn exhausted(until: Instant) -> Option<String> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("MemAvailable:")).unwrap_or_default();
    let available: u64 =
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(u64::MAX);
    let read = |path: &str| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    let most = read("/proc/sys/kernel/pid_max").unwrap_or(u64::MAX);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let tasks = load.split([' ', '/']).nth(4).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    if available < AVAILABLE_KB_MIN {
        return Some(format!("{} MB of memory are available", available >> 10));
    }
    if tasks + PIDS_MIN > most {
        return Some(format!("{tasks} tasks of {most}"));
    }
    (Instant::now() > until).then(|| "time is up".into())
}

/// One container, and the number that it was told.
struct Sleeper {
    name: String,
    number: usize,
    address: SocketAddr,
}

impl Sleeper {
    fn new(
        bench: &Bench,
        options: &Options,
        template: Option<&Self>,
        number: usize,
    ) -> Result<Self> {
        let name = format!("d{number}");
        match (options.by, template) {
            (By::Clone, Some(template)) => {
                ok(bench.dormouse().args(["clone", "--name", &name, &template.name]))?;
            }
            _ => {
                let (port, heap) = (PORT.to_string(), options.heap_kb.to_string());
                let run = ["run", "-d", "--name", &name, "bench", "serve", &port, &heap];
                ok(bench.dormouse().args(run))?;
            }
        }
        let address = bench.address(&name, PORT)?;
        let sleeper = Self { name, number, address };
        let told = || sleeper.say(&format!("S {number}\n")).is_ok();
        ensure!(wait_until(PATIENCE, told), "{} does not listen", sleeper.name);
        Ok(sleeper)
    }

    fn put_to_sleep(&self, bench: &Bench) -> Result<()> {
        ok(bench.dormouse().args(["sleep", &self.name])).map(drop)
    }

    /// Says a line; what is said to it must be its own number and that all is whole. Gives the time
    /// until the first byte.
    fn say(&self, line: &str) -> Result<Duration> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(line.as_bytes())?;
        let mut said = vec![0];
        stream.read_exact(&mut said)?;
        let took = start.elapsed();
        stream.read_to_end(&mut said)?;
        let said = String::from_utf8_lossy(&said);
        if said.trim() != format!("{} whole", self.number) {
            bail!("{} says '{}'", self.name, said.trim());
        }
        Ok(took)
    }
}

/// Asks each once, in an order that is random, and the same every time.
fn ask_all(sleepers: &mut [Sleeper]) -> Result<Times> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for n in (1..sleepers.len()).rev() {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sleepers.swap(n, (state % (n as u64 + 1)) as usize);
    }
    let ask = |sleeper: &Sleeper| {
        sleeper.say("Q\n").with_context(|| format!("{} does not answer as itself", sleeper.name))
    };
    Ok(Times::new(sleepers.iter().map(ask).collect::<Result<_>>()?))
}

/// Resident memory of our processes that outlive a command, of this benchmark's only.
fn ours_kb(bench: &Bench) -> u64 {
    let all = leftover::processes(std::process::id(), bench.dir.path());
    let resident = |pid: u32| -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
        field("Name:").filter(|name| name.starts_with("dormouse"))?;
        field("VmRSS:")?.split_whitespace().next()?.parse().ok()
    };
    all.into_iter().filter_map(|(pid, _)| resident(pid)).sum()
}

/// What lies below a directory, in kB of disk.
fn disk_kb(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let own = fs::symlink_metadata(dir).map_or(0, |meta| meta.blocks() / 2);
    let below = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => disk_kb(&entry.path()),
        _ => entry.metadata().map_or(0, |meta| meta.blocks() / 2),
    });
    own + below.sum::<u64>()
}
