//! How many containers run, are drowsy or sleep on one machine, what each of them costs, and whether every
//! one of them still answers.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin density -- --steps 100,300,1000
//! cargo run --release -p dormouse-benches --bin density -- --by asleep --steps 1000,3000,10000
//! cargo run --release -p dormouse-benches --bin density -- --by asleep --memory 1g --steps 1000,3000
//! cargo run --release -p dormouse-benches --bin density -- --tier running --steps 1000
//! cargo run --release -p dormouse-benches --bin density -- --by asleep --steps 3000 --nginx 30
//! ```
//!
//! Each is a small server with an address, a user namespace, the filter of the house, and limits to its memory,
//! processes and share of the processors. How it comes to
//! be and what is in its memory depends on `--by`:
//!
//! - `run`: started on its own, told a number that it fills its memory with, then put to sleep or left;
//! - `clone`: the same, cloned from one that runs, many by one command;
//! - `asleep`: cloned so that it comes to be asleep (`clone --asleep`). It has what the other has until it
//!   is woken, and is told its number then: what is measured before is without memory of its own.
//!
//! At every step the memory of the machine is compared with that before the first, by kind. At the end
//! each is asked once, in random order, and has to answer with its own number and with every page as it
//! was. With `--memory` the daemon has so much for all that is awake: it lets in whoever is asked, and puts
//! others to sleep in their place. Without it all are awake in the end. With `--again` all sleep once more
//! after that, now with memory of their own.
//!
//! With `--nginx` so many of them are nginx with one worker, of an image of Debian's, spread evenly among the
//! others. Its number is a file of its own, put by WebDAV and got again; it has its heap from the one
//! that it is cloned from.
//!
//! It ends by itself, and says why, when memory, process ids or time run out.
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
    /// At how many containers memory is looked at; the last is how many there are to be.
    #[arg(long, value_delimiter = ',', default_value = "100,300,1000")]
    steps: Vec<usize>,
    /// How each comes to be.
    #[arg(long, value_enum, default_value = "run")]
    by: By,
    /// What becomes of it.
    #[arg(long, value_enum, default_value = "asleep")]
    tier: Tier,
    /// Memory of each that is its own, in kB.
    #[arg(long, default_value_t = 64)]
    heap_kb: u64,
    /// No further container after this many seconds.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// The keeper is killed when all sleep: how long until a command has all of them heard again.
    #[arg(long)]
    lose_keeper: bool,
    /// When all were asked all sleep again, memory is looked at, and all are asked again.
    #[arg(long)]
    again: bool,
    /// Memory for all that is awake while they are asked, as the daemon takes it: 1g.
    #[arg(long)]
    memory: Option<String>,
    /// So many of the last step's are nginx.
    #[arg(long, default_value_t = 0)]
    nginx: usize,
    /// At most so many are asked, chosen at random; all, unless it is said.
    #[arg(long)]
    asks: Option<usize>,
    /// How many ask at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    askers: u32,
}

impl Options {
    /// Starts one.
    fn run(&self, bench: &Bench, name: &str, server: Server) -> Result<()> {
        let (port, heap) = (PORT.to_string(), self.heap_kb.to_string());
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--name", name]).args(CONTRACT);
        // Whoever never falls asleep by itself gives nobody its place; none has so much time here.
        run.args(self.memory.is_some().then_some("--sleep-after=24h"));
        ok(match server {
            Server::Small => run.args(["bench", "serve", &port, &heap]),
            Server::Nginx => run.args([NGINX_IMAGE, "sh", "-c", NGINX]),
        })?;
        Ok(())
    }

    /// How many of the first `count` are nginx.
    fn nginx_of(&self, count: usize) -> usize {
        self.steps.last().map_or(0, |last| self.nginx * count / last)
    }
}

/// What each may have. It has a memory cgroup of its own, then.
const CONTRACT: [&str; 3] = ["--memory=256m", "--pids=64", "--cpu-weight=100"];

/// What runs in a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// `floor/serve.c`.
    Small,
    Nginx,
}

impl Server {
    /// What clones are made from.
    fn template(self) -> &'static str {
        match self {
            Self::Small => "template",
            Self::Nginx => "template-nginx",
        }
    }
}

/// A master and a worker, with one file that anybody may write.
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
/// LIMIT: below this much room on the disk none is made, and nobody is asked: each that was told its number
/// leaves memory of its own there.
const DISK_KB_MIN: u64 = 2 << 20;
/// LIMIT: so many process ids stay free.
const PIDS_MIN: u64 = 2000;
/// LIMIT: how long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 80;
/// So many are made and put to sleep by one command, and looked at as one.
const CHUNK: usize = 100;
/// How often it is looked how many are awake.
const LOOK: Duration = Duration::from_millis(50);
/// So many caches of the kernel are named.
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
    /// What the containers' directories take on disk.
    disk: u64,
    /// The kernel's caches.
    caches: BTreeMap<String, u64>,
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
            disk: Disk::default().kb(&bench.path("root/lib/containers")),
            caches: caches_kb(),
        }
    }

    /// What each of `count` containers has added since.
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
    ensure!(sleeps || options.by != By::Asleep, "--by asleep makes what is asleep");
    let for_asleep = options.lose_keeper || options.again || options.memory.is_some();
    ensure!(sleeps || !for_asleep, "that is for what is asleep");
    ensure!(options.asks != Some(0), "somebody is asked");
    ensure!(options.asks.is_none() || !options.again, "all are asked before all sleep again");
    // It may have to be fetched, which the network below cannot.
    let nginx = (options.nginx > 0).then(dormouse_testkit::image::nginx);
    let bench = Bench::new()?;
    // The domain, the keeper and the shared mounts are there before anything is counted.
    let mut servers = vec![Server::Small];
    if let Some(nginx) = nginx {
        ok(bench.dormouse().args(["import", "--name", NGINX_IMAGE]).arg(nginx))?;
        servers.push(Server::Nginx);
    }
    for server in &servers {
        let name = server.template();
        options.run(&bench, name, *server)?;
        let address = bench.address(name, PORT)?;
        Sleeper { name: name.into(), server: *server, number: 0, address }.told()?;
    }
    // What there is when the first one sleeps (a process that is ready to wake it) is counted for none.
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
    // An order that is random, and the same every time.
    let mut random = 0x9e37_79b9_7f4a_7c15;
    shuffle(&mut sleepers, &mut random);
    sleepers.truncate(options.asks.unwrap_or(usize::MAX));
    // What came to be asleep has no number yet.
    let tells = options.by == By::Asleep;
    answers(&bench, &options, &sleepers, tells, &end)?;
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

/// Who is there before anything is counted, as the others will be.
const FIRST: &str = "first";

/// More and more containers.
struct Ramp {
    bench: Bench,
    options: Options,
    /// How many there are that are not counted.
    others: usize,
    sleepers: Vec<Sleeper>,
    /// How long one took to be made, and to be put to sleep, on average of those that one command did.
    made: Vec<Duration>,
    put: Vec<Duration>,
}

impl Ramp {
    /// Gives why it ended early, if so.
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
            // The first looks at all that have come to be since, and what it has seen is there for the others.
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
            eprintln!("  {count} {}, each: {each}", self.options.tier.as_str());
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

    /// Makes some more, of both kinds.
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
        made.iter().try_for_each(Sleeper::told)?;
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
            // One clone is not numbered.
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

/// Has containers sleep, or be drowsy.
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

/// What each costs in memory that the kernel cannot take back, and in ours.
fn kernel_and_ours_kb(each: &serde_json::Value) -> f64 {
    let value = |name: &str| each[name].as_f64().unwrap_or(f64::NAN);
    value("slab_unreclaimable_kb") + value("our_processes_kb") + value("percpu_kb")
}

/// Time that the processors have spent for what has run for us (proc(5), cutime and cstime).
fn children_cpu_ms() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let behind = stat.rsplit(')').next().unwrap_or_default();
    let ticks = behind.split_whitespace().skip(13).take(2);
    ticks.filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10
}

/// Where these containers can be called.
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
    found.map(|address| address.context("one has no address")).collect()
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

/// One container, and the number that it is told.
struct Sleeper {
    name: String,
    server: Server,
    number: usize,
    address: SocketAddr,
}

impl Sleeper {
    /// Tells one its number as soon as it listens.
    fn told(&self) -> Result<()> {
        let told = || self.tell().is_ok();
        ensure!(wait_until(PATIENCE, told), "{} does not listen", self.name);
        Ok(())
    }

    /// Tells it its number. Gives the time until the first byte.
    fn tell(&self) -> Result<Duration> {
        match self.server {
            Server::Small => self.say(&format!("S {}\n", self.number), &self.whole()),
            Server::Nginx => {
                let number = self.number.to_string();
                let length = number.len();
                let put =
                    format!("PUT /number HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{number}");
                let took = self.say(&put, "")?;
                self.ask()?;
                Ok(took)
            }
        }
    }

    /// Asks it; what it says must be its own number, and that all is whole. Gives the time until the
    /// first byte.
    fn ask(&self) -> Result<Duration> {
        match self.server {
            Server::Small => self.say("Q\n", &self.whole()),
            Server::Nginx => {
                self.say("GET /number HTTP/1.0\r\n\r\n", &format!("\r\n\r\n{}", self.number))
            }
        }
    }

    fn whole(&self) -> String {
        format!("{} whole\n", self.number)
    }

    /// Says something, and hears how its answer ends.
    fn say(&self, what: &str, end: &str) -> Result<Duration> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(what.as_bytes())?;
        let mut said = vec![0];
        stream.read_exact(&mut said)?;
        let took = start.elapsed();
        stream.read_to_end(&mut said)?;
        let said = String::from_utf8_lossy(&said);
        // Whole, but for how HTTP begins and goes on.
        let is_right = match self.server {
            Server::Small => said == end,
            Server::Nginx => said.starts_with("HTTP/1.1 20") && said.ends_with(end),
        };
        if !is_right {
            bail!("{} says '{}'", self.name, said.trim());
        }
        Ok(took)
    }
}

/// Asks each once, or tells it its number, and says how long they took.
fn answers(
    bench: &Bench,
    options: &Options,
    sleepers: &[Sleeper],
    tells: bool,
    end: &Option<String>,
) -> Result<()> {
    let daemon = options.memory.as_deref().map(|memory| bench.daemon(&["--memory", memory]));
    let daemon = daemon.transpose()?;
    let (begin, count) = (Instant::now(), sleepers.len());
    let never = begin + Duration::from_secs(86_400);
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let ask = |sleeper: &Sleeper| {
        let asked = if tells { sleeper.tell() } else { sleeper.ask() };
        asked.with_context(|| format!("{} does not answer as itself", sleeper.name))
    };
    let asker = || -> Result<Vec<(usize, Duration)>> {
        let mut times = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(sleeper) = sleepers.get(at) else { break };
            let asked = ask(sleeper).inspect_err(|_| is_over.store(true, Ordering::Relaxed));
            times.push((at, asked?));
            if (at + 1).is_multiple_of(CHUNK) {
                eprint!("\r  {} have answered ", at + 1);
                if let Some(why) = exhausted(bench, never) {
                    is_over.store(true, Ordering::Relaxed);
                    bail!("of {count} {} have answered when it ended: {why}", at + 1);
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
        "containers": count, "tier": options.tier.as_str(), "told_then": tells, "p50_ms": p50,
        "p99_ms": p99, "max_ms": answers.at(1.0), "per_s": per_s, "askers": options.askers,
        "memory": options.memory, "awake_max": awake_max, "awake": awake, "first_ms": first,
        "last_ms": last, "ended": end, "nginx": of_nginx.len(),
    });
    figure("density", "asked once each, in random order: first byte", p50, "ms", more);
    let how = if tells { ", told their number then" } else { "" };
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

/// How many have processes, or are about to.
fn awake(bench: &Bench) -> usize {
    fs::read_dir(bench.path("root/run/c")).map_or(0, Iterator::count)
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

/// What directories take on disk; a file with several names counts once.
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
