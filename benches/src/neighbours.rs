//! Noisy neighbours: what a server with a contract has beside a container that misbehaves.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin neighbours -- --rounds 3 --seconds 5
//! ```
//!
//! **Victims** are a database (pgbench's TPC-B, each transaction stored), a web server and a key-value store, each in a
//! container with its client. Its contract is half of the machine's CPUs, reserved and at most, memory with a
//! guarantee, and a disk. **Neighbours** (floor/neighbour.c) run one at a time beside each victim. Their contract is
//! one that an operator would give: memory, tasks, a disk with its number of files, rates of the disk, a ceiling of the
//! network, and the default weight of CPU.
//!
//! **The same share.** The victim never has more than its half, whether a neighbour leaves CPU time or not: the limit
//! of its CPU time equals its reservation. Alone, it has this half as well. The ratio is
//!
//! ```text
//! throughput beside the neighbour / throughput alone, medians of rounds in turn
//! ```
//!
//! and 1 means that the neighbour takes nothing. One of the neighbours does nothing but use all CPU time that it gets
//! (`hog`): what the victim has beside that one is lost to caches, cores and the scheduler, which all share, and the
//! other neighbours are to be read beside it. A call that the victim is refused meanwhile (`refused`) is one that any
//! program may make, such as fork(2).
//!
//! Podman's containers take turns with ours, with the closest options: the same limit of CPU time and the largest
//! weight, the same memory, tasks and rates of the disk. It has no guarantee of memory, and no size of disks on this
//! file system: its neighbours stop at the same size by themselves.
//!
//! **Floods.** A container's flood of its own server is judged. One of the victim's port is work that the victim's own
//! program accepts, within its own CPU time, and is reported only.
//!
//! Everything ends by itself some seconds after its measurement. LIMIT: a neighbour uses at most 2 GB of disk, and what
//! its contract has of memory.
#![forbid(unsafe_code)]

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use dormouse_benches::podman::Podman;
use dormouse_benches::{Bars, Bench, bars, figure, installed, median, ok, promise_least};
use dormouse_testkit::{image, wait_until};

/// Options.
#[derive(Parser)]
struct Options {
    /// Rounds of each neighbour beside each victim
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Which victims; all by default
    #[arg(long, value_enum, value_delimiter = ',')]
    victim: Vec<Name>,
    /// Which neighbours; all by default
    #[arg(long, value_delimiter = ',')]
    neighbour: Vec<String>,
    /// Without podman
    #[arg(long)]
    alone: bool,
    /// Options for the neighbour's container, instead of rates of the disk
    #[arg(long, value_delimiter = ' ', allow_hyphen_values = true)]
    neighbour_options: Option<Vec<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    Postgresql,
    Nginx,
    Redis,
}

/// The part of its throughput alone that a victim keeps.
const KEPT: f64 = 0.9;
/// LIMIT: the time until a server answers.
const PATIENCE: Duration = Duration::from_secs(60);
/// From the start of a neighbour to the measurement.
const SETTLES: Duration = Duration::from_secs(1);
/// How much longer than the measurement a neighbour lasts.
const LONGER: u64 = 30;
/// No neighbour.
const ALONE: &str = "alone";
/// The directory with the neighbour's program, in each container.
const PROGRAMS: &str = "/bench";

/// A server, and the load of its client in the same container.
struct Victim {
    name: Name,
    /// The shell command that starts it.
    server: &'static str,
    /// One that succeeds when the server answers.
    ready: &'static str,
    /// One that loads it for $SECONDS, and prints the requests a second and the 99th percentile in milliseconds.
    load: &'static str,
    port: u16,
}

const VICTIMS: [Victim; 3] = [
    Victim {
        name: Name::Postgresql,
        server: "mkdir -p /data && chown postgres /data; exec su postgres -s /bin/bash -c '\
                 PATH=$PATH:/usr/lib/postgresql/15/bin; cd /data && initdb -D db --auth=trust >/dev/null && \
                 echo host all all all trust >> db/pg_hba.conf && exec postgres -D db -h 0.0.0.0 -k /data'",
        ready: "psql -h /data -U postgres -Atc 'select 1' | grep -q 1 && { [ -e /data/filled ] || \
                /usr/lib/postgresql/15/bin/pgbench -q -i -s 10 -h /data -U postgres postgres; } && touch /data/filled",
        load: "cd /data && rm -f log.* && /usr/lib/postgresql/15/bin/pgbench -n -h /data -U postgres -c 4 -j 1 \
               -T $SECONDS -l --log-prefix=log postgres >out 2>&1 || { cat out >&2; exit 1; }; \
               sort -n -k3,3 log.* | awk '{ t[NR] = $3 } END { print t[int(NR * 0.99) + 1] / 1000 }' >p99; \
               awk '/^tps/ { print $3 }' out; cat p99",
        port: 5432,
    },
    Victim {
        name: Name::Nginx,
        server: "echo 'daemon off; worker_processes 1; user root; error_log /dev/null; pid /tmp/pid; events {} http { \
                 access_log off; keepalive_requests 1000000000; server { listen 80; location / { return 200 bench; } \
                 } }' > /tmp/conf; exec nginx -c /tmp/conf",
        ready: "wrk -c 1 -t 1 -d 1 http://127.0.0.1/ | grep -q requests",
        load: "wrk -c 8 -t 1 -d $SECONDS --latency http://127.0.0.1/ | awk '/Requests.sec/ { rate = $2 } \
               $1 == \"99%\" { p99 = $2 ~ /us/ ? $2 / 1000 : $2 ~ /ms/ ? $2 + 0 : $2 * 1000 } \
               END { print rate, p99 }'",
        port: 80,
    },
    Victim {
        name: Name::Redis,
        server: "exec redis-server --save '' --protected-mode no --bind 0.0.0.0",
        ready: "redis-cli ping | grep -q PONG",
        load: "redis-benchmark -c 8 -n $((SECONDS * 30000)) -t set --csv | awk -F'\"' '/SET/ { print $4, $14 }'",
        port: 6379,
    },
];

/// A kind of neighbour.
struct Neighbour {
    /// Its word in floor/neighbour.c.
    word: &'static str,
    aim: Aim,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Aim {
    /// What it does stays in its own container.
    Own,
    /// The victim's port.
    Victim,
    /// The same, by packets of its own making.
    Raw,
}

const fn own(word: &'static str) -> Neighbour {
    Neighbour { word, aim: Aim::Own }
}

const NEIGHBOURS: [Neighbour; 18] = [
    own(ALONE),
    own("hog"),
    own("forks"),
    own("memory"),
    own("write"),
    own("direct"),
    own("read"),
    own("sync"),
    own("cache"),
    own("drop"),
    own("disk"),
    own("files"),
    own("names"),
    own("inotify"),
    own("aio"),
    own("connections"),
    Neighbour { word: "connections", aim: Aim::Victim },
    Neighbour { word: "syn", aim: Aim::Raw },
];

impl Neighbour {
    fn name(&self) -> String {
        match self.aim {
            Aim::Victim => format!("{} to it", self.word),
            Aim::Own | Aim::Raw => self.word.into(),
        }
    }

    /// Whether the victim is to keep its throughput.
    fn is_judged(&self) -> bool {
        self.aim != Aim::Victim && self.word != ALONE
    }
}

/// What a victim has.
#[derive(Debug, Clone, Default)]
struct Got {
    rate: f64,
    p99_ms: f64,
    refused: String,
    /// The neighbour has ended before its time, as by the limit of its memory.
    has_ended: bool,
}

/// What runs the containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Dormouse,
    Podman,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Self::Dormouse => "dormouse",
            Self::Podman => "podman",
        }
    }
}

struct Hosts {
    bench: Bench,
    podman: Option<Podman>,
    /// `DIR:PROGRAMS:ro`, a volume.
    programs: String,
    /// The disk of the repository, for podman's rates.
    disk: String,
    seconds: u64,
    /// The half of the CPUs that a victim has.
    cpus: String,
    neighbour_options: Vec<String>,
}

impl Hosts {
    fn new(options: &Options) -> Result<Self> {
        // Before the network namespace of the benchmark, which has no packages.
        let services = image::services();
        let bench = Bench::new()?;
        ok(bench.dormouse().args(["import", "--name", "services"]).arg(&services))?;
        let wanted = !options.alone;
        let podman = (wanted && installed("podman")).then(|| Podman::new(&bench)).transpose()?;
        match &podman {
            Some(podman) => podman.import(&bench, &services, "services")?,
            None if wanted => eprintln!("  SKIPPED: podman is not installed"),
            None => {}
        }
        let programs = bench.path("programs-of-neighbours");
        fs::create_dir(&programs)?;
        fs::copy(bench.path("neighbour"), programs.join("neighbour"))?;
        let place = bench.dir.path();
        let disk = ok(Command::new("findmnt").args(["-n", "-o", "SOURCE", "-T"]).arg(place))?;
        let half = std::thread::available_parallelism()?.get() as f64 / 2.0;
        let rate = ["--io-write-bps", RATE, "--io-read-bps", RATE].map(str::to_owned).to_vec();
        Ok(Self {
            podman,
            programs: format!("{}:{PROGRAMS}:ro", programs.display()),
            disk,
            seconds: options.seconds,
            cpus: half.to_string(),
            neighbour_options: options.neighbour_options.clone().unwrap_or(rate),
            bench,
        })
    }

    /// The command of an engine.
    fn command(&self, engine: Engine) -> Result<Command> {
        match engine {
            Engine::Dormouse => Ok(self.bench.dormouse()),
            Engine::Podman => {
                Ok(self.podman.as_ref().context("podman is not installed")?.command())
            }
        }
    }

    /// The start of a `run` with a volume of programs.
    fn run(&self, engine: Engine, name: &str) -> Result<Command> {
        let mut run = match engine {
            Engine::Dormouse => {
                let mut run = self.bench.dormouse();
                run.arg("run");
                run
            }
            Engine::Podman => self.podman.as_ref().context("podman is not installed")?.run(),
        };
        run.args(["-d", "--name", name, "-v", &self.programs]);
        Ok(run)
    }

    /// Starts a victim, and waits until it answers.
    fn start(&self, engine: Engine, victim: &Victim) -> Result<()> {
        let mut run = self.run(engine, VICTIM)?;
        run.args(["--cpus", &self.cpus, "--memory", "1g"]);
        match engine {
            Engine::Dormouse => run.args([
                "--cpu-reserve",
                &self.cpus,
                "--memory-min",
                "512m",
                "--disk",
                "2g",
                "--pids",
                "500",
            ]),
            Engine::Podman => run.args(["--cpu-shares", "262144", "--memory-swap", "1g"]),
        };
        ok(run.args(["services", "sh", "-c", victim.server]))?;
        let answers = || self.inside(engine, victim.ready).is_ok();
        if !wait_until(PATIENCE, answers) {
            let logs = ok(self.command(engine)?.args(["logs", VICTIM]))?;
            bail!("{:?} of {} does not answer: {logs}", victim.name, engine.name());
        }
        Ok(())
    }

    /// Runs a shell command in the victim's container.
    fn inside(&self, engine: Engine, script: &str) -> Result<String> {
        let mut exec = self.command(engine)?;
        exec.args(["exec", "-e", &format!("SECONDS={}", self.seconds), VICTIM, "sh", "-c", script]);
        ok(&mut exec)
    }

    fn remove(&self, engine: Engine, name: &str) -> Result<()> {
        let mut rm = self.command(engine)?;
        rm.args(["rm", "--force"]);
        if engine == Engine::Podman {
            rm.args(["--time", "0"]);
        }
        ok(rm.arg(name)).map(drop)
    }

    /// Starts a neighbour.
    fn annoy(&self, engine: Engine, victim: &Victim, neighbour: &Neighbour) -> Result<()> {
        let mut run = self.run(engine, NEIGHBOUR)?;
        run.args(["--memory", "512m", "--memory-swap", "512m"]);
        match engine {
            Engine::Dormouse => {
                run.args(["--pids", "200", "--disk", "2g", "--inodes", "50000"]);
                run.args(["--net-ceil", "100mbit"]).args(&self.neighbour_options);
                if neighbour.aim == Aim::Raw {
                    run.args(["--net", "private", "--cap-add", "NET_RAW"]);
                }
            }
            Engine::Podman => {
                run.args(["--pids-limit", "200", "--cpu-shares", "1024"]);
                let rate = format!("{}:{RATE}b", self.disk);
                run.args(["--device-write-bps", &rate, "--device-read-bps", &rate]);
            }
        }
        run.args(["services", &format!("{PROGRAMS}/neighbour"), neighbour.word]);
        run.arg((self.seconds + LONGER).to_string());
        if neighbour.aim != Aim::Own {
            let address = self.bench.address(VICTIM, victim.port)?;
            run.args([address.ip().to_string(), address.port().to_string()]);
        }
        ok(&mut run)?;
        sleep(SETTLES);
        Ok(())
    }

    fn runs(&self, engine: Engine, name: &str) -> Result<bool> {
        match engine {
            Engine::Dormouse => Ok(self.bench.record(name)?["state"] == "running"),
            Engine::Podman => {
                let mut inspect = self.command(engine)?;
                inspect.args(["inspect", "--format", "{{.State.Running}}", name]);
                Ok(ok(&mut inspect)? == "true")
            }
        }
    }

    /// What the victim has beside one neighbour.
    fn measure(&self, engine: Engine, victim: &Victim, neighbour: &Neighbour) -> Result<Got> {
        let is_alone = neighbour.word == ALONE;
        if !is_alone {
            self.annoy(engine, victim, neighbour)?;
        }
        let text = self.inside(engine, victim.load);
        let refused = self.inside(engine, &format!("cd /tmp && {PROGRAMS}/neighbour probe 10"));
        let has_ended = !is_alone && !self.runs(engine, NEIGHBOUR)?;
        if !is_alone {
            self.remove(engine, NEIGHBOUR)?;
        }
        let text = match text {
            Ok(text) => text,
            // A client that fails has no throughput.
            Err(e) if !is_alone => {
                eprintln!("  {:?} beside '{}': {e}", victim.name, neighbour.name());
                return Ok(Got { refused: "the client failed".into(), ..Got::default() });
            }
            Err(e) => return Err(e),
        };
        let mut numbers = text.split_whitespace().map(str::parse::<f64>);
        let mut next = || numbers.next()?.ok();
        let (rate, p99_ms) = next().zip(next()).with_context(|| format!("no figure: {text}"))?;
        let refused = refused.unwrap_or_else(|e| format!("exec: {e:#}"));
        let refused = if refused == "none" { String::new() } else { refused };
        Ok(Got { rate, p99_ms, refused, has_ended })
    }
}

/// Names of containers.
const VICTIM: &str = "victim";
const NEIGHBOUR: &str = "neighbour";
/// The rate of the disk for a neighbour's reads, and for its writes.
const RATE: &str = "50m";

fn main() -> Result<()> {
    let options = Options::parse();
    let hosts = Hosts::new(&options)?;
    let _daemon = hosts.bench.daemon(&[])?;
    for victim in &VICTIMS {
        if options.victim.is_empty() || options.victim.contains(&victim.name) {
            beside(&hosts, victim, &options).with_context(|| format!("{:?}", victim.name))?;
        }
    }
    Ok(())
}

/// Measures a victim beside all neighbours, in both engines in turn, and reports.
fn beside(hosts: &Hosts, victim: &Victim, options: &Options) -> Result<()> {
    let engines: Vec<Engine> = match hosts.podman {
        Some(_) => vec![Engine::Dormouse, Engine::Podman],
        None => vec![Engine::Dormouse],
    };
    let is_chosen = |one: &&Neighbour| {
        let names = &options.neighbour;
        names.is_empty() || one.word == ALONE || names.contains(&one.name())
    };
    let neighbours: Vec<&Neighbour> = NEIGHBOURS.iter().filter(is_chosen).collect();
    for engine in &engines {
        hosts.start(*engine, victim)?;
    }
    let mut all = vec![vec![Vec::new(); neighbours.len()]; engines.len()];
    for round in 0..options.rounds {
        for step in 0..neighbours.len() {
            // Each round begins with another one.
            let n = (step + round * 3) % neighbours.len();
            for place in 0..engines.len() {
                let place = (place + round) % engines.len();
                let engine = engines[place];
                // Podman's containers have no network: nothing comes from another one.
                if engine == Engine::Podman && neighbours[n].aim != Aim::Own {
                    continue;
                }
                let got = hosts.measure(engine, victim, neighbours[n]).with_context(|| {
                    format!("{} beside '{}'", engine.name(), neighbours[n].name())
                })?;
                all[place][n].push(got);
            }
        }
    }
    for engine in &engines {
        hosts.remove(*engine, VICTIM)?;
    }
    report(victim, &engines, &neighbours, &all)
}

/// Prints the figures of a victim, and draws them.
fn report(
    victim: &Victim,
    engines: &[Engine],
    neighbours: &[&Neighbour],
    all: &[Vec<Vec<Got>>],
) -> Result<()> {
    let name = format!("{:?}", victim.name).to_lowercase();
    let middle = |got: &[Got], of: fn(&Got) -> f64| median(got.iter().map(of).collect());
    let mut drawn = Vec::new();
    for (engine, all) in engines.iter().zip(all) {
        let alone = neighbours.iter().position(|one| one.word == ALONE).context("none alone")?;
        let due = middle(&all[alone], |got| got.rate);
        eprintln!("\n{name}, {}: {due:.0} requests/s alone", engine.name());
        eprintln!(
            "  {:<20} {:>10} {:>7} {:>14} {:>10}",
            "neighbour", "requests/s", "ratio", "least to most", "p99 ms"
        );
        let mut ratios = Vec::new();
        for (neighbour, got) in neighbours.iter().zip(all).filter(|(_, got)| !got.is_empty()) {
            let (rate, p99) = (middle(got, |got| got.rate), middle(got, |got| got.p99_ms));
            let of_due = |rate: f64| rate / due;
            let rates = || got.iter().map(|got| of_due(got.rate));
            let (least, most) =
                (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
            let refused: Vec<&str> =
                got.iter().map(|got| got.refused.trim()).filter(|it| !it.is_empty()).collect();
            let mut said =
                refused.first().map_or(String::new(), |calls| format!("  refused: {calls}"));
            let ended = got.iter().filter(|got| got.has_ended).count();
            if ended > 0 {
                said += &format!("  the neighbour has ended in {ended} of {} rounds", got.len());
            }
            eprintln!(
                "  {:<20} {rate:>10.0} {:>7.2} {least:>6.2} to {most:>4.2} {p99:>10.2}{said}",
                neighbour.name(),
                of_due(rate),
            );
            let more = serde_json::json!({
                "rounds": got.len(), "per_s": rate, "alone_per_s": due, "least": least, "most": most,
                "p99_ms": p99, "alone_p99_ms": middle(&all[alone], |got| got.p99_ms), "refused": refused,
                "ended": ended,
            });
            let title = format!("{name} beside '{}', {}", neighbour.name(), engine.name());
            figure("neighbours", &title, of_due(rate), "ratio", more);
            ratios.push((neighbour, of_due(rate)));
        }
        for (neighbour, ratio) in &ratios {
            if *engine == Engine::Dormouse && neighbour.is_judged() {
                let text = format!("{name} beside '{}', of its throughput alone", neighbour.name());
                promise_least(&text, *ratio, KEPT);
            }
        }
        let heights = ratios.into_iter().filter(|(neighbour, _)| neighbour.word != ALONE);
        drawn.push(Bars {
            name: engine.name(),
            heights: heights.map(|(neighbour, ratio)| (neighbour.name(), ratio)).collect(),
        });
    }
    let title = format!("{name}: requests beside each neighbour, of those alone");
    bars(&format!("neighbours-{name}"), &title, "ratio", KEPT, &drawn)
}
