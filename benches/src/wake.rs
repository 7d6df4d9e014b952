//! The time until the first byte, of an awake server and of an asleep one, in turn: as usual, kept warm
//! (`sleep --warm`), without the standby process for the next wake, and with a daemon that does admission control.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin wake -- --rounds 100
//! ```
//!
//! The time covers connect(2), one request, and the first byte of the answer. Awake that is the
//! floor. Asleep it includes a process of the keeper, a start with all namespaces, and the restore
//! of memory. Servers that are not installed here are skipped with a message.
//!
//! Also measured, for each: the duration of the first `sleep` and of the following ones, and the
//! bytes written.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, NGINX, Times, change, figure, installed, ok, promise};
use dormouse_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

/// Options.
#[derive(Parser)]
struct Options {
    /// Rounds of sleep and request for each server.
    #[arg(long, default_value_t = 100)]
    rounds: usize,
    /// Only the server of this name, or else those with this text in the name
    #[arg(long, default_value = "")]
    only: String,
    /// Only awake, asleep and warm, which is quick
    #[arg(long)]
    brief: bool,
    /// Directory with the programs of another build, such as an earlier one, in turn with these
    #[arg(long)]
    before: Option<PathBuf>,
    /// An option of `run` for these programs alone, such as --run-option=--devpts=no where those of --before give
    /// no devpts
    #[arg(long, allow_hyphen_values = true)]
    run_option: Vec<String>,
}

/// LIMIT: the time for an answer before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// The minimum time asleep: by then the standby process is ready.
const GETS_READY: Duration = Duration::from_millis(50);

/// The time after which a killed standby process is replaced, with the next sleep.
const REPLACED: Duration = Duration::from_millis(1100);

/// The settings of these programs.
const WARM: &str = "[sleep]\nwarm = 8\n";

/// A server, and its request.
struct Server {
    name: &'static str,
    /// The program to be installed for it; empty for the static one.
    needs: &'static str,
    words: &'static [&'static str],
    port: u16,
    request: &'static str,
}

const HTTP: &str = "GET / HTTP/1.0\r\n\r\n";

/// The first is the one with the promises.
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

    fn start(&self, build: &Build<'_>, name: &str) -> Result<SocketAddr> {
        let bench = &build.bench;
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--name", name]).args(build.options);
        // A program of this host runs on the host's files, below the container's own layer.
        match self.needs {
            "" => run.arg("bench"),
            _ => run.args(["--rootfs", "/"]),
        };
        ok(run.args(self.words))?;
        bench.address(name, self.port)
    }

    /// Returns the time until the first byte.
    fn query(&self, address: SocketAddr) -> Result<Duration> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(self.request.as_bytes())?;
        ensure!(stream.read(&mut [0])? == 1, "no answer");
        let took = start.elapsed();
        // The server is idle when it has closed the connection.
        stream.read_to_end(&mut Vec::new())?;
        Ok(took)
    }
}

/// The state of a server at a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Awake,
    Asleep,
    /// Asleep, with parts of the wake made before.
    Warm,
    /// A daemon admits the wake, for which there is memory.
    Gate,
    /// No standby process: one is made for this client.
    Alone,
}

impl Arm {
    const ALL: [Self; 5] = [Self::Awake, Self::Asleep, Self::Warm, Self::Gate, Self::Alone];

    fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Asleep => "asleep",
            Self::Warm => "asleep and warm",
            Self::Alone => "asleep, nobody stands by",
            Self::Gate => "asleep, with leave of the daemon",
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut builds = vec![Build { bench: Bench::new()?, name: "", options: &options.run_option }];
    if let Some(bin) = &options.before {
        let bench = builds[0].bench.before(bin)?;
        builds.push(Build { bench, name: "before: ", options: &[] });
    }
    builds[0].bench.configure(WARM)?;
    let all_arms = if options.brief { &Arm::ALL[..3] } else { &Arm::ALL[..] };
    let is_name = SERVERS.iter().any(|server| server.name == options.only);
    for (n, server) in SERVERS.iter().enumerate() {
        let is_wanted = match is_name {
            true => server.name == options.only,
            false => server.name.contains(&options.only),
        };
        if !is_wanted {
            continue;
        }
        if !server.is_here() {
            eprintln!("  SKIPPED: {}: {} is not installed", server.name, server.needs);
            continue;
        }
        // An earlier program may know none, and a container on the host's files is never warm.
        let may_be_warm = builds.len() == 1 && server.needs.is_empty();
        let arms = all_arms.iter().copied().filter(|arm| may_be_warm || *arm != Arm::Warm);
        let arms: Vec<Arm> = arms.collect();
        let arms = &arms[..];
        let all = measure(&builds, server, arms, options.rounds)
            .with_context(|| format!("{} does not answer", server.name))?;
        for (build, all) in builds.iter().zip(&all) {
            for (arm, times) in arms.iter().zip(all) {
                let more = serde_json::json!({
                    "rounds": options.rounds, "p50_ms": times.median_ms(), "p99_ms": times.at(0.99),
                    "min_ms": times.at(0.0), "max_ms": times.at(1.0),
                });
                let name = format!("{}{}, {}: first byte", build.name, server.name, arm.name());
                eprintln!(
                    "  {name}: p50 {:.2} ms, p99 {:.2} ms",
                    times.median_ms(),
                    times.at(0.99)
                );
                figure("wake", &name, times.median_ms(), "ms", more);
            }
        }
        if let [now, before] = &all[..] {
            for ((arm, now), before) in arms.iter().zip(now).zip(before) {
                change(arm.name(), now.median_ms(), before.median_ms());
            }
        }
        let all = &all[0];
        for build in &builds {
            measure_sleep(build, server)
                .with_context(|| format!("{} cannot be put to sleep", server.name))?;
        }
        if n == 0 {
            let asleep = &all[Arm::Asleep as usize];
            promise("p50 of the first byte of one that sleeps, in ms", asleep.median_ms(), 5.0);
            promise("p99 of the first byte of one that sleeps, in ms", asleep.at(0.99), 25.0);
            if let Some(at) = arms.iter().position(|arm| *arm == Arm::Warm) {
                promise("p50 of the first byte of a warm one, in ms", all[at].median_ms(), 2.0);
            }
        }
    }
    Ok(())
}

/// These programs, or those of `--before`.
struct Build<'o> {
    bench: Bench,
    /// What its figures begin with.
    name: &'static str,
    /// Further options of `run`.
    options: &'o [String],
}

/// Measures all arms of all builds in turn; the result is by build, then by arm.
fn measure(
    builds: &[Build<'_>],
    server: &Server,
    arms: &[Arm],
    rounds: usize,
) -> Result<Vec<Vec<Times>>> {
    const NAME: &str = "server";
    let start = |build| {
        let address = server.start(build, NAME)?;
        ensure!(wait_until(PATIENCE, || server.query(address).is_ok()), "no answer at all");
        Ok(address)
    };
    let addresses: Vec<SocketAddr> = builds.iter().map(start).collect::<Result<_>>()?;
    let mut all: Vec<Vec<Vec<Duration>>> = vec![vec![Vec::new(); arms.len()]; builds.len()];
    for number in 0..rounds {
        for (n, arm) in arms.iter().enumerate() {
            // The builds change places from round to round.
            for build in 0..builds.len() {
                let build = (build + number) % builds.len();
                let took = round(&builds[build].bench, server, NAME, addresses[build], *arm)?;
                all[build][n].push(took);
            }
        }
    }
    for build in builds {
        ok(build.bench.dormouse().args(["rm", "--force", NAME]))?;
    }
    Ok(all.into_iter().map(|arms| arms.into_iter().map(Times::new).collect()).collect())
}

/// The number of further sleeps.
const AGAIN: usize = 5;

/// Measures the suspend of a server, the first time, with a trial restore, and after one request.
fn measure_sleep(build: &Build<'_>, server: &Server) -> Result<()> {
    const NAME: &str = "sleeper";
    let bench = &build.bench;
    let address = server.start(build, NAME)?;
    ensure!(wait_until(PATIENCE, || server.query(address).is_ok()), "no answer at all");
    let shown = ok(bench.dormouse().args(["inspect", "--json", NAME]))?;
    let shown: serde_json::Value = serde_json::from_str(&shown)?;
    let id = shown.get(0).unwrap_or(&shown)["id"]
        .as_str()
        .context("the container has no id")?
        .to_owned();
    let place = bench.path("root/lib/containers").join(id).join("asleep");
    let (mut times, mut megabytes) = (Vec::new(), Vec::new());
    for _ in 0..=AGAIN {
        let (began, at) = (Instant::now(), std::time::SystemTime::now());
        ok(bench.dormouse().args(["sleep", NAME]))?;
        times.push(began.elapsed());
        let mut bytes = 0;
        for file in std::fs::read_dir(&place)? {
            let meta = file?.metadata()?;
            // Shared files of the former checkpoint are older.
            if meta.modified()? + Duration::from_millis(20) >= at {
                bytes += meta.blocks() * 512;
            }
        }
        megabytes.push(bytes as f64 / f64::from(1 << 20));
        server.query(address)?;
    }
    ok(bench.dormouse().args(["rm", "--force", NAME]))?;
    megabytes[1..].sort_by(f64::total_cmp);
    let (first, again) = (times.remove(0).as_secs_f64() * 1e3, Times::new(times).median_ms());
    let more = megabytes[1 + AGAIN / 2];
    for (what, ms, megabytes) in [("", first, megabytes[0]), (" again", again, more)] {
        let name = format!("{}{}: put to sleep{what}", build.name, server.name);
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
        return server.query(address);
    }
    let daemon = (arm == Arm::Gate).then(|| bench.daemon(&[])).transpose()?;
    let options: &[&str] = if arm == Arm::Warm { &["--warm"] } else { &[] };
    ok(bench.dormouse().arg("sleep").args(options).arg(name))?;
    let warm = || Ok::<_, anyhow::Error>(std::fs::read_dir(bench.path("root/run/warm"))?.count());
    ensure!(arm != Arm::Warm || warm()? == 1, "it is not warm");
    let standby = || standby(bench);
    ensure!(wait_until(PATIENCE, || standby().is_some()), "no standby process");
    std::thread::sleep(GETS_READY);
    if arm == Arm::Alone
        && let Some(pid) = standby()
    {
        kill_process(pid, Signal::KILL)?;
        ensure!(wait_until(PATIENCE, || standby().is_none()), "the standby process does not exit");
    }
    let took = server.query(address);
    drop(daemon);
    if arm == Arm::Alone {
        std::thread::sleep(REPLACED);
    }
    took
}

/// The keeper's process that wakes containers.
fn standby(bench: &Bench) -> Option<Pid> {
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
