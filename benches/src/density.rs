//! The number of containers that run, are drowsy or sleep on one machine, the cost of each, and
//! whether every one still answers.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin density -- --steps 100,300,1000
//! cargo run --release -p dormouse-benches --bin density -- --by asleep --steps 1000,3000,10000
//! cargo run --release -p dormouse-benches --bin density -- --by asleep --memory 1g --steps 1000,3000
//! cargo run --release -p dormouse-benches --bin density -- --tier running --steps 1000
//! cargo run --release -p dormouse-benches --bin density -- --by asleep --steps 3000 --nginx 30
//! ```
//!
//! Each is a small server with an address, a user namespace, the default filter, and limits to its
//! memory, processes and share of the processors. Its creation and the contents of its memory
//! depend on `--by`:
//!
//! - `run`: started separately, given a number that fills its memory, then put to sleep or left
//!   running;
//! - `clone`: the same, cloned from a running one, many by one command;
//! - `asleep`: cloned asleep (`clone --asleep`). The clone has the original's memory until its
//!   first wake, and receives its number then: figures before that are without private memory.
//!
//! At every step the memory of the machine is compared by kind with that before the first
//! container. At the end each receives one request, in random order, and must answer with its own
//! number and with every page intact. `--memory` is the daemon's limit for all awake containers: a
//! wake is admitted while others are suspended. Without it all are awake in the end. With `--again`
//! all sleep once more after that, now with private memory.
//!
//! `--nginx` is the number of nginx containers with one worker, of a Debian image, spread evenly
//! among the others. The number of such a container is a file, written and read by WebDAV. Its heap
//! is that of its template.
//!
//! The containers have no devpts (`run --devpts no`), because each superblock costs memory of the kernel for
//! every container. With `--devpts` they have one. The figures name which.
//!
//! The benchmark ends with a report of the cause when memory, process ids or time run out.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use dormouse_benches::{Bench, Line, Times, figure, ok, plot, promise, shuffle};
use dormouse_testkit::{leftover, wait_until};

/// Options.
#[derive(Parser)]
struct Options {
    /// Numbers of containers at which memory is measured; the last is the total.
    #[arg(long, value_delimiter = ',', default_value = "100,300,1000")]
    steps: Vec<usize>,
    /// The way of creation.
    #[arg(long, value_enum, default_value = "run")]
    by: By,
    /// The final state.
    #[arg(long, value_enum, default_value = "asleep")]
    tier: Tier,
    /// Private memory of each, in kB.
    #[arg(long, default_value_t = 64)]
    heap_kb: u64,
    /// No further container after this many seconds.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Kill the keeper when all sleep: the time until a command has restored all listeners.
    #[arg(long)]
    lose_keeper: bool,
    /// After all requests all sleep again, memory is measured, and all receive another request.
    #[arg(long)]
    again: bool,
    /// The daemon's limit for awake containers during the requests: 1g.
    #[arg(long)]
    memory: Option<String>,
    /// Number of nginx containers among those of the last step.
    #[arg(long, default_value_t = 0)]
    nginx: usize,
    /// The maximal number of requests, to random containers; default: one to each.
    #[arg(long)]
    asks: Option<usize>,
    /// Give each a devpts, a superblock more, as `run` does by default.
    #[arg(long)]
    devpts: bool,
    /// Number of concurrent clients.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    askers: u32,
}

impl Options {
    /// Starts a container.
    fn run(&self, bench: &Bench, name: &str, server: Server) -> Result<()> {
        let (port, heap) = (PORT.to_string(), self.heap_kb.to_string());
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--name", name, "--devpts", self.devpts()]).args(CONTRACT);
        // Containers without a policy are never suspended for others. No container reaches this
        // time here.
        run.args(self.memory.is_some().then_some("--sleep-after=24h"));
        ok(match server {
            Server::Small => run.args(["bench", "serve", &port, &heap]),
            Server::Nginx => run.args([NGINX_IMAGE, "sh", "-c", NGINX]),
        })?;
        Ok(())
    }

    /// The value of `run --devpts`.
    fn devpts(&self) -> &'static str {
        if self.devpts { "yes" } else { "no" }
    }

    /// The number of nginx containers among the first `count`.
    fn nginx_of(&self, count: usize) -> usize {
        self.steps.last().map_or(0, |last| self.nginx * count / last)
    }
}

/// The limits of each. They give it a memory cgroup.
const CONTRACT: [&str; 3] = ["--memory=256m", "--pids=64", "--cpu-weight=100"];

/// The program of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// `floor/serve.c`.
    Small,
    Nginx,
}

impl Server {
    /// The container from which clones are made.
    fn template(self) -> &'static str {
        match self {
            Self::Small => "template",
            Self::Nginx => "template-nginx",
        }
    }
}

/// A master and a worker, with one file that every client may write.
const NGINX: &str =
    "mkdir /srv/bench && cat >/srv/nginx.conf <<'END' && exec nginx -c /srv/nginx.conf
daemon off;
user root;
worker_processes 1;
events { worker_connections 64; }
http {
    access_log off;
    server {
        listen 80;
        root /srv/bench;
        location / { dav_methods PUT; }
    }
}
END";
const NGINX_IMAGE: &str = "bench-nginx";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// `dormouse run`.
    Run,
    /// `dormouse clone` of the first.
    Clone,
    /// `dormouse clone --asleep` of the first.
    Asleep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tier {
    Running,
    Drowsy,
    Asleep,
}

impl Tier {
    fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Drowsy => "drowsy",
            Self::Asleep => "asleep",
        }
    }
}

/// LIMIT: below this much available memory no further container is made.
const AVAILABLE_KB_MIN: u64 = 5 << 20;
/// LIMIT: below this much free disk space none is made, and no requests are sent: each container
/// with its number leaves private memory there.
const DISK_KB_MIN: u64 = 2 << 20;
/// LIMIT: this many process ids stay free.
const PIDS_MIN: u64 = 2000;
/// LIMIT: the time for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 80;
/// Containers made and put to sleep by one command, and measured together.
const CHUNK: usize = 100;
/// The interval of counting the awake containers.
const LOOK: Duration = Duration::from_millis(50);
/// The number of kernel caches in a report.
const CACHES: usize = 16;

/// Memory of the machine by kind, in kB.
#[derive(Debug, Clone)]
struct Memory {
    available: u64,
    slab: u64,
    slab_unreclaimable: u64,
    page_tables: u64,
    kernel_stack: u64,
    percpu: u64,
    /// Resident memory of our own processes.
    ours: u64,
    /// Disk space of the containers' directories.
    disk: u64,
    /// The kernel's caches.
    caches: BTreeMap<String, u64>,
}

impl Memory {
    fn now(bench: &Bench) -> Self {
        // Kernel objects are freed late, and caches are not ours.
        rustix::fs::sync();
        let _ = fs::write("/proc/sys/vm/drop_caches", "3"); // may be forbidden
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
            disk: Disk::default().kb(&bench.path("root/lib/containers")),
            caches: caches_kb(),
        }
    }

    /// The increase since `before` per container.
    fn each(&self, before: &Self, count: usize) -> serde_json::Value {
        let each = |now: u64, then: u64| {
            let kb = (now as f64 - then as f64) / count as f64;
            (kb * 1000.0).round() / 1000.0
        };
        let mut caches: Vec<(&String, f64)> = self
            .caches
            .iter()
            .map(|(name, kb)| (name, each(*kb, before.caches.get(name).copied().unwrap_or(0))))
            .collect();
        caches.sort_by(|a, b| b.1.total_cmp(&a.1));
        caches.truncate(CACHES);
        serde_json::json!({
            "containers": count,
            "caches_kb": caches.into_iter().map(|(n, kb)| (n.clone(), kb.into())).collect::<serde_json::Map<_, _>>(),
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
    let sleeps = options.tier == Tier::Asleep;
    ensure!(sleeps || options.by != By::Asleep, "--by asleep creates asleep containers");
    let for_asleep = options.lose_keeper || options.again || options.memory.is_some();
    ensure!(sleeps || !for_asleep, "these options need --tier asleep");
    ensure!(options.asks != Some(0), "--asks must not be 0");
    ensure!(options.asks.is_none() || !options.again, "--again needs a request to each");
    // May need a download, which the network below does not allow.
    let nginx = (options.nginx > 0).then(dormouse_testkit::image::nginx);
    let bench = Bench::new()?;
    // The domain, the keeper and the shared mounts exist before the measurement.
    let mut servers = vec![Server::Small];
    if let Some(nginx) = nginx {
        ok(bench.dormouse().args(["import", "--name", NGINX_IMAGE]).arg(nginx))?;
        servers.push(Server::Nginx);
    }
    for server in &servers {
        let name = server.template();
        options.run(&bench, name, *server)?;
        let address = bench.address(name, PORT)?;
        Sleeper { name: name.into(), server: *server, number: 0, address }.set_up()?;
    }
    // Objects that exist with the first asleep container (a process for the next wake) are not
    // counted.
    options.run(&bench, FIRST, Server::Small)?;
    if options.tier != Tier::Running {
        put_there(&bench, options.tier, &[FIRST.into()])?;
    }
    let before = Memory::now(&bench);
    let others = servers.len() + 1;
    let (sleepers, made, put) = (Vec::new(), Vec::new(), Vec::new());
    let mut ramp = Ramp { bench, options, others, sleepers, made, put };
    let end = ramp.climb(&before)?;
    let Ramp { bench, options, mut sleepers, made, put, .. } = ramp;
    let count = sleepers.len();
    if let Some(why) = &end {
        eprintln!("  ended at {count}: {why}");
    }
    ensure!(count > 0, "nothing was made");
    for (what, times) in [("making one", &made), ("putting one there", &put)] {
        let part = (times.len() / 10).max(1);
        let Some(from) = times.len().checked_sub(part).filter(|_| !times.is_empty()) else {
            continue;
        };
        let first = Times::new(times[..part].to_vec()).median_ms();
        let last = Times::new(times[from..].to_vec()).median_ms();
        eprintln!("  {what}: first tenth {first:.2} ms, last tenth {last:.2} ms");
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
    // A random order that is the same every time.
    let mut random = 0x9e37_79b9_7f4a_7c15;
    shuffle(&mut sleepers, &mut random);
    sleepers.truncate(options.asks.unwrap_or(usize::MAX));
    // Containers cloned asleep have no number yet.
    let sets_number = options.by == By::Asleep;
    answers(&bench, &options, &sleepers, sets_number, &end)?;
    if options.again {
        put_there(&bench, options.tier, &names_of(&sleepers))?;
        let each = Memory::now(&bench).each(&before, count);
        eprintln!("  {count} asleep again, each: {each}");
        let kb = kernel_and_ours_kb(&each);
        figure("density", "memory of one that sleeps again", kb, "kB", each);
        shuffle(&mut sleepers, &mut random);
        answers(&bench, &options, &sleepers, false, &end)?;
    }
    Ok(())
}

/// The container that exists before the measurement.
const FIRST: &str = "first";

/// A growing number of containers.
struct Ramp {
    bench: Bench,
    options: Options,
    /// The number of containers that are not counted.
    others: usize,
    sleepers: Vec<Sleeper>,
    /// The times of making and of suspending one, averaged over a command.
    made: Vec<Duration>,
    put: Vec<Duration>,
}

impl Ramp {
    /// Returns the cause of an early end.
    fn climb(&mut self, before: &Memory) -> Result<Option<String>> {
        let until = Instant::now() + Duration::from_secs(self.options.seconds);
        let mut kernel_kb = Line { name: "unreclaimable slab", points: Vec::new() };
        let mut disk = Line { name: "disk", points: Vec::new() };
        let (mut last, mut end) = (f64::NAN, None);
        for step in self.options.steps.clone() {
            while end.is_none() && self.sleepers.len() < step {
                self.more(CHUNK.min(step - self.sleepers.len()))?;
                eprint!("\r  {} are {} ", self.sleepers.len(), self.options.tier.as_str());
                end = exhausted(&self.bench, until);
            }
            let count = self.sleepers.len();
            // The first listing reads all new containers, and caches the result for later listings.
            for which in ["first", "next"] {
                let (start, cpu) = (Instant::now(), children_cpu_ms());
                let listed = ok(self.bench.dormouse().args(["ps", "--all", "--json"]))?;
                let took = start.elapsed().as_secs_f64() * 1e3;
                let cpu = children_cpu_ms() - cpu;
                let listed: Vec<serde::de::IgnoredAny> = serde_json::from_str(&listed)?;
                let listed = listed.len();
                let others = self.others;
                ensure!(listed == count + others, "{listed} are listed of {count} and {others}");
                eprintln!(
                    "\r  {count}: the {which} ps --all takes {took:.0} ms, {cpu} of the processors"
                );
                let more =
                    serde_json::json!({ "containers": count, "cpu_ms": cpu, "which": which });
                figure("density", &format!("ps --all --json, {which}"), took, "ms", more);
            }
            let each = Memory::now(&self.bench).each(before, count);
            let (tier, devpts) = (self.options.tier.as_str(), self.options.devpts());
            eprintln!("  {count} {tier}, devpts {devpts}, each: {each}");
            let value = |name: &str| each[name].as_f64().unwrap_or(f64::NAN);
            last = kernel_and_ours_kb(&each);
            kernel_kb.points.push((count as f64, value("slab_unreclaimable_kb")));
            disk.points.push((count as f64, value("disk_kb")));
            figure("density", &format!("memory of one {}", self.what()), last, "kB", each);
            if end.is_some() {
                break;
            }
        }
        if self.options.tier == Tier::Asleep {
            promise("memory of one that sleeps, in kB", last, 8472.0 / 1024.0);
            let axes = ["containers that sleep", "kB each"];
            plot("density", "What one more sleeping container costs", axes, &[kernel_kb, disk])?;
        }
        Ok(end)
    }

    fn what(&self) -> String {
        let by = match self.options.by {
            By::Run => "run",
            By::Clone => "cloned",
            By::Asleep => "cloned asleep",
        };
        format!("{}, {by}", self.options.tier.as_str())
    }

    /// Makes some more containers of both kinds.
    fn more(&mut self, count: usize) -> Result<()> {
        let before = self.sleepers.len();
        let nginx = self.options.nginx_of(before + count) - self.options.nginx_of(before);
        let start = Instant::now();
        for (server, count) in [(Server::Small, count - nginx), (Server::Nginx, nginx)] {
            if count > 0 {
                self.make(server, count)?;
            }
        }
        self.made.push(start.elapsed() / count as u32);
        if self.options.by == By::Asleep {
            return Ok(());
        }
        let made = &self.sleepers[before..];
        made.iter().try_for_each(Sleeper::set_up)?;
        if self.options.tier != Tier::Running {
            let took = put_there(&self.bench, self.options.tier, &names_of(made))?;
            self.put.push(took / count as u32);
        }
        Ok(())
    }

    fn make(&mut self, server: Server, count: usize) -> Result<()> {
        let first = self.sleepers.len() + 1;
        let stem = format!("d{first}");
        let names: Vec<String> = match (self.options.by, count) {
            (By::Run, _) => (first..first + count).map(|n| format!("d{n}")).collect(),
            // A single clone has no number in its name.
            (_, 1) => vec![stem.clone()],
            _ => (1..=count).map(|n| format!("{stem}-{n}")).collect(),
        };
        match self.options.by {
            By::Run => {
                for name in &names {
                    self.options.run(&self.bench, name, server)?;
                }
            }
            by => {
                let mut clone = self.bench.dormouse();
                clone.args(["clone", "-n", &count.to_string(), "--name", &stem]);
                clone.args((by == By::Asleep).then_some("--asleep"));
                ok(clone.arg(server.template()))?;
            }
        }
        let addresses = addresses(&self.bench, &names)?;
        let made = names.into_iter().zip(addresses).zip(first..);
        let made = made.map(|((name, address), number)| Sleeper { name, server, number, address });
        self.sleepers.extend(made);
        Ok(())
    }
}

/// Suspends containers, or makes them drowsy.
fn put_there(bench: &Bench, tier: Tier, names: &[String]) -> Result<Duration> {
    let start = Instant::now();
    for some in names.chunks(CHUNK) {
        let mut sleep = bench.dormouse();
        sleep.arg("sleep").args((tier == Tier::Drowsy).then_some("--drowsy"));
        ok(sleep.args(some))?;
    }
    Ok(start.elapsed())
}

fn names_of(sleepers: &[Sleeper]) -> Vec<String> {
    sleepers.iter().map(|sleeper| sleeper.name.clone()).collect()
}

/// The cost of each in unreclaimable kernel memory, and in our processes.
fn kernel_and_ours_kb(each: &serde_json::Value) -> f64 {
    let value = |name: &str| each[name].as_f64().unwrap_or(f64::NAN);
    value("slab_unreclaimable_kb") + value("our_processes_kb") + value("percpu_kb")
}

/// Processor time of our children (proc(5), cutime and cstime).
fn children_cpu_ms() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let behind = stat.rsplit(')').next().unwrap_or_default();
    let ticks = behind.split_whitespace().skip(13).take(2);
    ticks.filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10
}

/// Returns the addresses of these containers.
fn addresses(bench: &Bench, names: &[String]) -> Result<Vec<SocketAddr>> {
    let text = ok(bench.dormouse().args(["inspect", "--json"]).args(names))?;
    let records = serde_json::Deserializer::from_str(&text).into_iter();
    let records: Vec<serde_json::Value> = records.collect::<Result<_, _>>()?;
    let of = |record: &serde_json::Value| {
        let address: IpAddr = record["address"].as_str()?.parse().ok()?;
        Some((record["name"].as_str()?.to_owned(), SocketAddr::new(address, PORT)))
    };
    let all: HashMap<String, SocketAddr> = records.iter().filter_map(of).collect();
    let found = names.iter().map(|name| all.get(name).copied());
    found.map(|address| address.context("a container has no address")).collect()
}

/// Kills the keeper; the next command restores all listeners.
fn lose_keeper(bench: &Bench) -> Result<Duration> {
    let keeper = || {
        let all = leftover::processes(std::process::id(), bench.dir.path());
        all.into_iter().find(|(_, line)| line.contains("keeper")).map(|(pid, _)| pid)
    };
    let pid = keeper().context("no keeper")?;
    let process = rustix::process::Pid::from_raw(pid as i32).context("a pid")?;
    rustix::process::kill_process(process, rustix::process::Signal::KILL)?;
    ensure!(wait_until(PATIENCE, || keeper() != Some(pid)), "the keeper does not end");
    let start = Instant::now();
    ok(bench.dormouse().args(["ps", "--quiet"]))?;
    Ok(start.elapsed())
}

/// Returns the cause why no further container is made, if there is one.
fn exhausted(bench: &Bench, until: Instant) -> Option<String> {
    let disk =
        rustix::fs::statvfs(bench.dir.path()).map_or(u64::MAX, |it| it.f_bavail * it.f_frsize);
    if disk >> 10 < DISK_KB_MIN {
        return Some(format!("{} MB are left on the disk", disk >> 20));
    }
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

/// A container with its number.
struct Sleeper {
    name: String,
    server: Server,
    number: usize,
    address: SocketAddr,
}

impl Sleeper {
    /// Sends the number as soon as the server listens.
    fn set_up(&self) -> Result<()> {
        let is_set = || self.set_number().is_ok();
        ensure!(wait_until(PATIENCE, is_set), "{} does not listen", self.name);
        Ok(())
    }

    /// Sends the number. Returns the time until the first byte.
    fn set_number(&self) -> Result<Duration> {
        match self.server {
            Server::Small => self.exchange(&format!("S {}\n", self.number), &self.whole()),
            Server::Nginx => {
                let number = self.number.to_string();
                let length = number.len();
                let put =
                    format!("PUT /number HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{number}");
                let took = self.exchange(&put, "")?;
                self.query()?;
                Ok(took)
            }
        }
    }

    /// Sends a request; the answer must contain its number and report whole memory. Returns the
    /// time until the first byte.
    fn query(&self) -> Result<Duration> {
        match self.server {
            Server::Small => self.exchange("Q\n", &self.whole()),
            Server::Nginx => {
                self.exchange("GET /number HTTP/1.0\r\n\r\n", &format!("\r\n\r\n{}", self.number))
            }
        }
    }

    fn whole(&self) -> String {
        format!("{} whole\n", self.number)
    }

    /// Sends a text, and checks the end of the answer.
    fn exchange(&self, what: &str, end: &str) -> Result<Duration> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(what.as_bytes())?;
        let mut answer = vec![0];
        stream.read_exact(&mut answer)?;
        let took = start.elapsed();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        // The whole answer, except for the head of HTTP.
        let is_right = match self.server {
            Server::Small => answer == end,
            Server::Nginx => answer.starts_with("HTTP/1.1 20") && answer.ends_with(end),
        };
        if !is_right {
            bail!("{} answers '{}'", self.name, answer.trim());
        }
        Ok(took)
    }
}

/// Sends each a request, or its number, and reports the times.
fn answers(
    bench: &Bench,
    options: &Options,
    sleepers: &[Sleeper],
    sets_number: bool,
    end: &Option<String>,
) -> Result<()> {
    let daemon = options.memory.as_deref().map(|memory| bench.daemon(&["--memory", memory]));
    let daemon = daemon.transpose()?;
    let (begin, count) = (Instant::now(), sleepers.len());
    let never = begin + Duration::from_secs(86_400);
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let query = |sleeper: &Sleeper| {
        let asked = if sets_number { sleeper.set_number() } else { sleeper.query() };
        asked.with_context(|| format!("{} does not answer as itself", sleeper.name))
    };
    let asker = || -> Result<Vec<(usize, Duration)>> {
        let mut times = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(sleeper) = sleepers.get(at) else { break };
            let asked = query(sleeper).inspect_err(|_| is_over.store(true, Ordering::Relaxed));
            times.push((at, asked?));
            if (at + 1).is_multiple_of(CHUNK) {
                eprint!("\r  {} have answered ", at + 1);
                if let Some(why) = exhausted(bench, never) {
                    is_over.store(true, Ordering::Relaxed);
                    bail!("{} of {count} have answered before the end: {why}", at + 1);
                }
            }
        }
        Ok(times)
    };
    let awake_max = AtomicUsize::new(0);
    let mut times = std::thread::scope(|scope| {
        let askers: Vec<_> = (0..options.askers).map(|_| scope.spawn(asker)).collect();
        let look = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                awake_max.fetch_max(awake(bench), Ordering::Relaxed);
                std::thread::sleep(LOOK);
            }
        });
        let asked = askers.into_iter().map(|it| it.join().unwrap_or_else(|it| resume_unwind(it)));
        let asked = asked.collect::<Result<Vec<_>>>();
        is_over.store(true, Ordering::Relaxed);
        look.join().unwrap_or_else(|it| resume_unwind(it));
        asked.map(|all| all.concat())
    })?;
    let took_s = begin.elapsed().as_secs_f64();
    drop(daemon);
    times.sort_unstable_by_key(|(at, _)| *at);
    let of_nginx = times.iter().filter(|(at, _)| sleepers[*at].server == Server::Nginx);
    let of_nginx = Times::new(of_nginx.map(|(_, time)| *time).collect());
    let times: Vec<Duration> = times.into_iter().map(|(_, time)| time).collect();
    let part = (count / 10).max(1);
    let [first, last] = [&times[..part], &times[count - part..]]
        .map(|times| Times::new(times.to_vec()).median_ms());
    let (awake, awake_max) = (awake(bench), awake_max.into_inner());
    let answers = Times::new(times);
    let (p50, p99, per_s) = (answers.median_ms(), answers.at(0.99), count as f64 / took_s);
    let more = serde_json::json!({
        "containers": count, "tier": options.tier.as_str(), "told_then": sets_number, "p50_ms": p50,
        "p99_ms": p99, "max_ms": answers.at(1.0), "per_s": per_s, "askers": options.askers,
        "memory": options.memory, "awake_max": awake_max, "awake": awake, "first_ms": first,
        "last_ms": last, "ended": end, "nginx": of_nginx.len(), "devpts": options.devpts(),
    });
    figure("density", "asked once each, in random order: first byte", p50, "ms", more);
    let how = if sets_number { ", given their number then" } else { "" };
    eprintln!(
        "\r  all {count} asked answered as themselves{how}: p50 {p50:.2} ms, p99 {p99:.2} ms, {per_s:.0} a \
         second; first tenth {first:.2} ms, last tenth {last:.2} ms; {awake_max} were awake at most, \
         {awake} are"
    );
    if !of_nginx.is_empty() {
        let (count, p50, p99) = (of_nginx.len(), of_nginx.median_ms(), of_nginx.at(0.99));
        let more = serde_json::json!({ "containers": count, "p50_ms": p50, "p99_ms": p99 });
        figure("density", "asked once each, nginx: first byte", p50, "ms", more);
        eprintln!("  nginx among them: {count}, p50 {p50:.2} ms, p99 {p99:.2} ms");
    }
    Ok(())
}

/// The number of containers that have processes, or are about to.
fn awake(bench: &Bench) -> usize {
    fs::read_dir(bench.path("root/run/c")).map_or(0, Iterator::count)
}

/// Resident memory of this benchmark's own long-running processes.
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

/// The kernel's caches by name (slabinfo(5)), in kB.
fn caches_kb() -> BTreeMap<String, u64> {
    let text = fs::read_to_string("/proc/slabinfo").unwrap_or_default();
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at)?.parse::<u64>().ok();
        // Pages of a slab, and slabs.
        Some(((*words.first()?).to_owned(), number(5)? * number(14)? * 4))
    };
    text.lines().skip(2).filter_map(of).collect()
}

/// Disk space of directories; a hard-linked file counts once.
#[derive(Default)]
struct Disk(std::collections::HashSet<u64>);

impl Disk {
    fn kb(&mut self, dir: &Path) -> u64 {
        let own = fs::symlink_metadata(dir).map_or(0, |meta| meta.blocks() / 2);
        let mut all = own;
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            all += match (entry.file_type(), entry.metadata()) {
                (Ok(kind), _) if kind.is_dir() => self.kb(&entry.path()),
                (_, Ok(meta)) if meta.nlink() == 1 || self.0.insert(meta.ino()) => {
                    meta.blocks() / 2
                }
                _ => 0,
            };
        }
        all
    }
}
