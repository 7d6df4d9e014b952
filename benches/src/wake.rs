//! How long a caller waits for the first byte: from a server that is awake, and from one that is
//! asleep, in turn: as it is, without the process that stands by to wake whoever is called, and with a
//! daemon that is asked for leave.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin wake -- --rounds 100
//! ```
//!
//! What is timed is connect(2), one request, and the first byte of the answer: awake that is the
//! floor, asleep it is also a process of the keeper's, a start with all namespaces, and memory that
//! comes back. Servers that are not installed here are left out, loudly.
//!
//! Beside it, of each: how long `sleep` takes the first time and the following ones, and how much is written
//! then.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, NGINX, Times, figure, installed, ok, promise};
use dormouse_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

/// Options.
#[derive(Parser)]
struct Options {
    /// How often each server is put to sleep and asked.
    #[arg(long, default_value_t = 100)]
    rounds: usize,
    /// Only servers whose names contain this
    #[arg(long, default_value = "")]
    only: String,
    /// Only awake and asleep, which is quick
    #[arg(long)]
    brief: bool,
}

/// LIMIT: how long an answer may take before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a server sleeps at least: by then whoever stands by is ready.
const GETS_READY: Duration = Duration::from_millis(50);

/// After how long one that stood by and was killed is made up for, with the next sleep.
const MADE_UP_FOR: Duration = Duration::from_millis(1100);

/// A server, and what it is asked.
struct Server {
    name: &'static str,
    /// What is to be installed for it; empty for the static one.
    needs: &'static str,
    words: &'static [&'static str],
    port: u16,
    request: &'static str,
}

const HTTP: &str = "GET / HTTP/1.0\r\n\r\n";

/// The first is what is promised.
const SERVERS: [Server; 6] = [
    Server { name: "static", needs: "", words: &["serve", "80", "64"], port: 80, request: "Q\n" },
    Server {
        name: "static, 4 MB of which 1 is touched",
        needs: "",
        words: &["serve", "80", "4300"],
        port: 80,
        request: "T\n",
    },
    Server {
        name: "static, 16 MB of which 1 is touched",
        needs: "",
        words: &["serve", "80", "16384"],
        port: 80,
        request: "T\n",
    },
    Server {
        name: "static, 200 MB of which 1 is touched",
        needs: "",
        words: &["serve", "80", "204800"],
        port: 80,
        request: "T\n",
    },
    Server { name: "nginx", needs: "nginx", words: &NGINX, port: 80, request: HTTP },
    Server {
        name: "python http.server",
        needs: "/usr/bin/python3",
        words: &["/usr/bin/python3", "-m", "http.server", "--directory", "/etc", "80"],
        port: 80,
        request: HTTP,
    },
];

impl Server {
    fn is_here(&self) -> bool {
        match self.needs {
            "" => true,
            path if path.starts_with('/') => Path::new(path).exists(),
            program => installed(program),
        }
    }

    fn start(&self, bench: &Bench, name: &str) -> Result<SocketAddr> {
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--name", name]);
        // What is installed on this host runs on its own files, below a layer that is the container's.
        match self.needs {
            "" => run.arg("bench"),
            _ => run.args(["--rootfs", "/"]),
        };
        ok(run.args(self.words))?;
        bench.address(name, self.port)
    }

    /// The time until the first byte.
    fn ask(&self, address: SocketAddr) -> Result<Duration> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(self.request.as_bytes())?;
        ensure!(stream.read(&mut [0])? == 1, "no answer");
        let took = start.elapsed();
        // It is idle when it has hung up.
        stream.read_to_end(&mut Vec::new())?;
        Ok(took)
    }
}

/// How a server is found by who asks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Awake,
    Asleep,
    /// A daemon says whether there is memory for it, which there is.
    Gate,
    /// Nobody stands by: a process is made for this caller.
    Alone,
}

impl Arm {
    const ALL: [Self; 4] = [Self::Awake, Self::Asleep, Self::Gate, Self::Alone];

    fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Asleep => "asleep",
            Self::Alone => "asleep, nobody stands by",
            Self::Gate => "asleep, with leave of the daemon",
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let arms = if options.brief { &Arm::ALL[..2] } else { &Arm::ALL };
    for (n, server) in SERVERS.iter().enumerate() {
        if !server.name.contains(&options.only) {
            continue;
        }
        if !server.is_here() {
            eprintln!("  SKIPPED: {}: {} is not installed", server.name, server.needs);
            continue;
        }
        let all = measure(&bench, server, arms, options.rounds)
            .with_context(|| format!("{} does not answer", server.name))?;
        for (arm, times) in arms.iter().zip(&all) {
            let more = serde_json::json!({
                "rounds": options.rounds, "p50_ms": times.median_ms(), "p99_ms": times.at(0.99),
                "min_ms": times.at(0.0), "max_ms": times.at(1.0),
            });
            let name = format!("{}, {}: first byte", server.name, arm.name());
            eprintln!("  {name}: p50 {:.2} ms, p99 {:.2} ms", times.median_ms(), times.at(0.99));
            figure("wake", &name, times.median_ms(), "ms", more);
        }
        measure_sleep(&bench, server)
            .with_context(|| format!("{} cannot be put to sleep", server.name))?;
        if n == 0 {
            let asleep = &all[Arm::Asleep as usize];
            promise("p50 of the first byte of one that sleeps, in ms", asleep.median_ms(), 5.0);
            promise("p99 of the first byte of one that sleeps, in ms", asleep.at(0.99), 25.0);
        }
    }
    Ok(())
}

fn measure(bench: &Bench, server: &Server, arms: &[Arm], rounds: usize) -> Result<Vec<Times>> {
    const NAME: &str = "server";
    let address = server.start(bench, NAME)?;
    ensure!(wait_until(PATIENCE, || server.ask(address).is_ok()), "not even once");
    let mut all: Vec<Vec<Duration>> = vec![Vec::new(); arms.len()];
    for _ in 0..rounds {
        for (arm, times) in arms.iter().zip(&mut all) {
            times.push(round(bench, server, NAME, address, *arm)?);
        }
    }
    ok(bench.dormouse().args(["rm", "--force", NAME]))?;
    Ok(all.into_iter().map(Times::new).collect())
}

/// How often it is put to sleep again.
const AGAIN: usize = 5;

/// What it takes to put a server to sleep, the first time and when it was asked once since.
fn measure_sleep(bench: &Bench, server: &Server) -> Result<()> {
    const NAME: &str = "sleeper";
    let address = server.start(bench, NAME)?;
    ensure!(wait_until(PATIENCE, || server.ask(address).is_ok()), "not even once");
    let shown = ok(bench.dormouse().args(["inspect", "--json", NAME]))?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    let id = shown.get(0).unwrap_or(&shown)["id"].as_str().context("it has no id")?.to_owned();
    let place = bench.path("root/lib/containers").join(id).join("asleep");
    let (mut times, mut megabytes) = (Vec::new(), Vec::new());
    for _ in 0..=AGAIN {
        let (began, at) = (Instant::now(), std::time::SystemTime::now());
        ok(bench.dormouse().args(["sleep", NAME]))?;
        times.push(began.elapsed());
        let mut bytes = 0;
        for file in std::fs::read_dir(&place)? {
            let meta = file?.metadata()?;
            // What it has from the time before is older.
            if meta.modified()? + Duration::from_millis(20) >= at {
                bytes += meta.blocks() * 512;
            }
        }
        megabytes.push(bytes as f64 / f64::from(1 << 20));
        server.ask(address)?;
    }
    ok(bench.dormouse().args(["rm", "--force", NAME]))?;
    megabytes[1..].sort_by(f64::total_cmp);
    let (first, again) = (times.remove(0).as_secs_f64() * 1e3, Times::new(times).median_ms());
    let more = megabytes[1 + AGAIN / 2];
    for (what, ms, megabytes) in [("", first, megabytes[0]), (" again", again, more)] {
        let name = format!("{}: put to sleep{what}", server.name);
        eprintln!("  {name}: {ms:.1} ms, {megabytes:.1} MB written");
        figure("wake", &name, ms, "ms", serde_json::json!({ "written_mb": megabytes }));
    }
    Ok(())
}

fn round(
    bench: &Bench,
    server: &Server,
    name: &str,
    address: SocketAddr,
    arm: Arm,
) -> Result<Duration> {
    if arm == Arm::Awake {
        return server.ask(address);
    }
    let daemon = (arm == Arm::Gate).then(|| bench.daemon(&[])).transpose()?;
    ok(bench.dormouse().args(["sleep", name]))?;
    let stands_by = || stands_by(bench);
    ensure!(wait_until(PATIENCE, || stands_by().is_some()), "nobody stands by");
    std::thread::sleep(GETS_READY);
    if arm == Arm::Alone
        && let Some(pid) = stands_by()
    {
        kill_process(pid, Signal::KILL)?;
        ensure!(wait_until(PATIENCE, || stands_by().is_none()), "it does not end");
    }
    let took = server.ask(address);
    drop(daemon);
    if arm == Arm::Alone {
        std::thread::sleep(MADE_UP_FOR);
    }
    took
}

/// The keeper's process that wakes whom it is told to.
fn stands_by(bench: &Bench) -> Option<Pid> {
    let root = bench.path("root");
    let is_it = |line: &[u8]| {
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let ends = words.ends_with(&[b"internal", b"wake", b""]);
        ends && words.contains(&root.as_os_str().as_encoded_bytes())
    };
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found =
        pids.filter(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|it| is_it(&it)));
    found.next().and_then(Pid::from_raw)
}
