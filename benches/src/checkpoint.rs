//! Checkpoint and restore of a server: the time stopped, the time until durable on disk, and the
//! time until the next answer. By size of memory and number of processes, and with real programs
//! installed here. CRIU is the peer.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin checkpoint -- --rounds 10
//! ```
//!
//! Times of commands are from their start to their exit; both programs are commands. *Frozen* is
//! each program's own report: from the first stopped task until all resume, plus the stop before,
//! in which memory was prepared for copying ahead (ours: `pause_us` of `--json`; CRIU:
//! `freezing_time` and `frozen_time` of `criu show`'s stats, read by their tags). CRIU saves and
//! restores plain processes, without private namespaces, root, network or cgroups, so it has less
//! to do: namespaces made by `unshare` are refused because of other mounts here. CRIU leaves the
//! write-back of its files to the kernel; *durable* includes it, by fsync(2) of each. The trial restore before
//! a first checkpoint is a figure of its own, as are restores of one checkpoint in a row: in place, as new containers,
//! and as new containers with parts made ahead.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use dormouse_benches::{
    Bench, Disk, Line, NGINX, Times, change, figure, ok, plot, promise, shuffle,
};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpgid};
use serde_json::{Value, json};

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of the small server; a third as many of the large ones.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// A CRIU program of version 4, unless it is the `criu` in PATH (that of Debian 12 does not run
    /// on Linux 6.11 and later).
    #[arg(long)]
    criu: Option<PathBuf>,
    /// Sizes of memory, in megabytes.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 128, 1024, 4096])]
    megabytes: Vec<u32>,
    /// Numbers of processes.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100, 500])]
    processes: Vec<u32>,
    /// Real programs; missing ones are skipped with a message.
    #[arg(long, value_delimiter = ',', default_values_t = PROGRAMS.map(|it| it.name.to_owned()))]
    programs: Vec<String>,
    /// Directory with the programs of another build, such as an earlier one, in turn with these
    #[arg(long)]
    before: Option<PathBuf>,
    /// On an ext4 with a journal, instead of the disk of the repository
    #[arg(long)]
    journal: bool,
    /// Only the restores in a row
    #[arg(long)]
    rows: bool,
    /// An option of `run` for these programs alone, such as --run-option=--devpts=no where those of --before give
    /// no devpts
    #[arg(long, allow_hyphen_values = true)]
    run_option: Vec<String>,
}

/// The name of the contender of `--before`.
const BEFORE: &str = "before";

/// Times of one server.
#[derive(Default)]
struct Measured {
    /// From the first stopped task until all may resume.
    frozen: Vec<Duration>,
    /// The command that saves.
    save: Vec<Duration>,
    /// The same until the files are on the disk, which only ours ensures.
    durable: Vec<Duration>,
    /// The restoring command, and a byte there and back.
    restore: Vec<Duration>,
    /// The same a second time, with a record of the pages touched the first time.
    again: Vec<Duration>,
}

/// The server to save and restore.
#[derive(Clone, Copy)]
enum Server {
    /// Our own server, which has only measured features.
    Own {
        megabytes: u32,
        processes: u32,
        /// The answer touches a megabyte of memory.
        touches: bool,
    },
    Program(&'static Program),
}

/// A program installed here, with a port of its own.
struct Program {
    name: &'static str,
    needs: &'static str,
    words: &'static [&'static str],
    port: u16,
    question: &'static [u8],
}

const HTTP: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

const PROGRAMS: [Program; 4] = [
    Program {
        name: "python",
        needs: "/usr/bin/python3",
        words: &["/usr/bin/python3", "-m", "http.server", "--directory", "/etc", "80"],
        port: 80,
        question: HTTP,
    },
    Program { name: "nginx", needs: "/usr/sbin/nginx", words: &NGINX, port: 80, question: HTTP },
    Program {
        name: "redis",
        needs: "/usr/bin/redis-server",
        words: &[
            "/usr/bin/redis-server",
            "--bind",
            "0.0.0.0",
            "--protected-mode",
            "no",
            "--save",
            "",
        ],
        port: 6379,
        question: b"PING\r\n",
    },
    Program {
        name: "postgres",
        needs: "/usr/lib/postgresql/15/bin/postgres",
        // postgres refuses to run as root. The data of the last turn is created anew.
        words: &[
            "/usr/bin/setpriv",
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "/bin/sh",
            "-c",
            "cd /tmp && rm -rf bench-db && PATH=$PATH:/usr/lib/postgresql/15/bin && \
             initdb --no-sync -D bench-db >/dev/null && exec postgres -D bench-db -k '' -c 'listen_addresses=*'",
        ],
        port: 5432,
        // SSLRequest (PostgreSQL, 55.7), to which the answer is one byte.
        question: &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f],
    },
];

impl Server {
    /// The command line of the server.
    fn words(&self, own: &Path) -> Vec<String> {
        match self {
            Self::Own { megabytes, processes, .. } => {
                vec![own.display().to_string(), megabytes.to_string(), processes.to_string()]
            }
            Self::Program(program) => program.words.iter().map(|word| (*word).to_owned()).collect(),
        }
    }

    fn port(&self) -> u16 {
        match self {
            Self::Own { .. } => 7000,
            Self::Program(program) => program.port,
        }
    }

    /// Whether it is restored a second time, with the record of the first.
    fn has_second_restore(&self) -> bool {
        matches!(self, Self::Own { touches: true, .. } | Self::Program(_))
    }

    /// Sends a request, and waits for the first byte.
    fn query(&self, address: SocketAddr) -> Result<()> {
        let question = match self {
            Self::Own { touches: true, .. } => b"t",
            Self::Own { .. } => b"x",
            Self::Program(program) => program.question,
        };
        let mut caller = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        caller.set_read_timeout(Some(Duration::from_secs(5)))?;
        caller.write_all(question)?;
        let mut answer = [0];
        caller.read_exact(&mut answer)?;
        let is_right = matches!(self, Self::Program(_)) || answer == question;
        ensure!(is_right, "unexpected answer");
        Ok(())
    }
}

/// A program that saves and restores.
trait Contender {
    fn name(&self) -> &'static str;
    /// Starts the server; returns its address.
    fn start(&mut self, server: Server) -> Result<SocketAddr>;
    /// Saves and ends it; returns the time stopped.
    fn save(&mut self) -> Result<Duration>;
    /// Writes the saved files to the disk, unless that is done already.
    fn make_durable(&mut self) -> Result<()>;
    fn restore(&mut self) -> Result<()>;
    /// Ends its processes, and keeps what was saved.
    fn halt(&mut self) -> Result<()>;
    fn end(&mut self) -> Result<()>;
}

fn main() -> Result<()> {
    let options = Options::parse();
    let disk = if options.journal { Disk::Journaled } else { Disk::OfRepository };
    let mut bench = Bench::on(disk)?;
    let server = bench.path("rootfs/bin/server");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("checkpoint/server.c");
    ok(Command::new("cc").args(["-O2", "-static", "-o"]).arg(&server).arg(source))?;
    let before = options.before.as_deref().map(|bin| bench.before(bin)).transpose()?;
    for one in [Some(&bench), before.as_ref()].into_iter().flatten() {
        let rootfs = bench.path("rootfs");
        ok(one.dormouse().args(["import", "--name", "server"]).arg(rootfs))?;
        // A restored container is seldom the only one.
        let run = ["run", "-d", "--name", "neighbour", "server", "/bin/server", "0", "1"];
        ok(one.dormouse().args(run))?;
    }
    // CRIU caches its kernel checks on a tmpfs, or repeats them at every run.
    ok(Command::new("mount").args(["-t", "tmpfs", "bench", "/run"]))?;
    // Children of the peer's server are reparented to us when the server exits.
    set_child_subreaper(Some(getpid())).context("becoming a subreaper")?;
    let mut all: Vec<Box<dyn Contender>> =
        vec![Box::new(Dormouse { bench: &bench, name: "dormouse", options: &options.run_option })];
    let program = options.criu.clone().unwrap_or_else(|| "criu".into());
    match Command::new(&program).arg("--version").output() {
        Ok(output) => {
            eprint!("{}", String::from_utf8_lossy(&output.stdout));
            let dir = bench.path("criu");
            let address = SocketAddr::from(([127, 0, 0, 1], 0));
            all.push(Box::new(Criu { program, own: server, dir, pid: 0, address }));
        }
        Err(e) => eprintln!("{}: {e}: not measured", program.display()),
    }
    if let Some(bench) = &before {
        all.push(Box::new(Dormouse { bench, name: BEFORE, options: &[] }));
    }
    rows(&bench, &mut all, options.rounds)?;
    if options.rows {
        return Ok(());
    }
    let plain = |megabytes, processes| Server::Own { megabytes, processes, touches: false };
    let small = compare(&mut all, options.rounds, SMALL)?;
    let large = Server::Own { megabytes: 200, processes: 1, touches: true };
    let large = compare(&mut all, options.rounds, large)?;
    if let (Some(small), Some(large)) = (small.first(), large.first()) {
        let more = large.restore_ms - small.restore_ms;
        promise("200 MB of which 1 is touched, ms more than nothing", more, 5.0);
    }
    trials(&bench, options.rounds)?;
    let few = (options.rounds / 3).max(2);
    for program in PROGRAMS.iter().filter(|it| options.programs.iter().any(|name| name == it.name))
    {
        if Path::new(program.needs).exists() {
            compare(&mut all, few, Server::Program(program))?;
        } else {
            eprintln!("\n  SKIPPED: {}: {} does not exist", program.name, program.needs);
        }
    }
    let mut curves = Vec::new();
    for megabytes in &options.megabytes {
        let times = compare(&mut all, few, plain(*megabytes, 1))?;
        curves.push((f64::from(*megabytes), times));
    }
    draw(&all, "checkpoint", "MB of memory", &curves)?;
    if let (Some((least, few)), Some((most, many))) = (curves.first(), curves.last())
        && let (Some(few), Some(many)) = (few.first(), many.first())
    {
        let per_gb = (many.frozen_ms - few.frozen_ms) / (most - least) * 1024.0;
        promise("frozen, ms more for each GB of memory", per_gb, 100.0);
    }
    let mut curves = vec![(1.0, small)];
    for processes in options.processes.iter().filter(|n| **n > 1) {
        curves.push((f64::from(*processes), compare(&mut all, few, plain(0, *processes))?));
    }
    draw(&all, "checkpoint-processes", "processes", &curves)
}

/// Restores in a row. Parts of new containers are made ahead only while containers come and go.
const ROW: usize = 8;

/// The small server.
const SMALL: Server = Server::Own { megabytes: 0, processes: 1, touches: false };

/// Measures restores of one checkpoint of the small server, each until its first byte, eight in a row. Each restored
/// process is ended before the next restore in place, and by CRIU; new containers stay until the end of the row.
fn rows(bench: &Bench, all: &mut [Box<dyn Contender + '_>], rounds: usize) -> Result<()> {
    let spares = bench.beside("10.132.0.0/14", "[spares]\nkeep = 8\n")?;
    ok(spares.dormouse().args(["import", "--name", "server"]).arg(bench.path("rootfs")))?;
    ok(spares.dormouse().args([
        "run",
        "-d",
        "--name",
        "neighbour",
        "server",
        "/bin/server",
        "0",
        "1",
    ]))?;
    let mut times: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    let mut arms = ["in place", "criu", "new", "new, spares"];
    for round in 0..rounds {
        shuffle(&mut arms, &mut (round as u64 + 1));
        for name in arms {
            let taken = match name {
                "new" => row_of_new(bench)?,
                "new, spares" => row_of_new(&spares)?,
                "criu" => match all.iter_mut().find(|one| one.name() == "criu") {
                    Some(criu) => row(bench, &mut **criu)?,
                    None => continue,
                },
                _ => row(bench, &mut *all[0])?,
            };
            times.entry(name).or_default().extend(taken);
            // A nursery gives up its spares a second after the last request.
            std::thread::sleep(Duration::from_millis(1300));
        }
    }
    eprintln!("\nrestores of the small server, eight in a row (ms)");
    let times: BTreeMap<&str, Times> =
        times.into_iter().map(|(name, times)| (name, Times::new(times))).collect();
    for (name, times) in &times {
        let (median, min, p95) = (times.median_ms(), times.at(0.0), times.at(0.95));
        eprintln!("  {name:<12} {median:>9.2} {min:>9.2} {p95:>9.2}");
        let more = json!({ "min_ms": min, "p95_ms": p95, "rounds": rounds, "row": ROW });
        figure("checkpoint", &format!("row {name}"), median, "ms", more);
    }
    if let Some(criu) = times.get("criu").map(Times::median_ms) {
        for (name, limit) in [("in place", 0.5), ("new", 0.5), ("new, spares", 1.0 / 3.0)] {
            let text = format!("restore of the small server in a row, {name}, of CRIU's");
            promise(&text, times[name].median_ms() / criu, limit);
        }
    }
    Ok(())
}

/// Restores one checkpoint in its place.
fn row(bench: &Bench, contender: &mut dyn Contender) -> Result<Vec<Duration>> {
    let address = contender.start(SMALL)?;
    await_answer(SMALL, address)?;
    contender.save()?;
    let mut times = Vec::new();
    for _ in 0..ROW {
        let began = Instant::now();
        contender.restore()?;
        let restored = began.elapsed();
        // The same pause for all.
        bench.address("neighbour", SMALL.port())?;
        let began = Instant::now();
        SMALL.query(address)?;
        times.push(restored + began.elapsed());
        contender.halt()?;
    }
    contender.restore()?; // to be ended
    contender.end()?;
    Ok(times)
}

/// Restores one checkpoint as new containers.
fn row_of_new(bench: &Bench) -> Result<Vec<Duration>> {
    let mut ours = Dormouse { bench, name: "dormouse", options: &[] };
    let address = ours.start(SMALL)?;
    await_answer(SMALL, address)?;
    ours.save()?;
    let names: Vec<String> = (0..ROW).map(|n| format!("new-{n}")).collect();
    let mut times = Vec::new();
    for new in &names {
        let began = Instant::now();
        ok(bench.dormouse().args(["restore", "--name", new, "a"]))?;
        let restored = began.elapsed();
        let address = bench.address(new, SMALL.port())?;
        let began = Instant::now();
        SMALL.query(address)?;
        times.push(restored + began.elapsed());
    }
    ok(bench.dormouse().args(["rm", "--force", "a"]).args(&names))?;
    Ok(times)
}

/// Waits until a server answers.
fn await_answer(server: Server, address: SocketAddr) -> Result<()> {
    let began = Instant::now();
    while server.query(address).is_err() {
        ensure!(began.elapsed() < Duration::from_secs(30), "the server never answers");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Measures the trial restore of the small server, for which it stays stopped before its first checkpoint.
fn trials(bench: &Bench, rounds: usize) -> Result<()> {
    let mut ours = Dormouse { bench, name: "dormouse", options: &[] };
    let mut times = Vec::new();
    for _ in 0..rounds {
        ours.start(SMALL)?;
        let report = ok(bench.dormouse().args(["checkpoint", "--json", "a"]))?;
        let report: Value = serde_json::from_str(&report)?;
        let us = report["proof_us"].as_u64().context("no proof_us")?;
        times.push(Duration::from_micros(us));
        ours.end()?;
    }
    let times = Times::new(times);
    let (median, min, p95) = (times.median_ms(), times.at(0.0), times.at(0.95));
    eprintln!("\ntrial restore of the small server: {median:.2} ms (min {min:.2}, p95 {p95:.2})");
    let more = json!({ "min_ms": min, "p95_ms": p95, "rounds": rounds });
    figure("checkpoint", "trial restore", median, "ms", more);
    Ok(())
}

/// The measured times of every server.
const WHAT: [&str; 4] = ["frozen", "save", "durable", "restore"];

/// Medians of one contender.
#[derive(Clone, Copy)]
struct Medians {
    frozen_ms: f64,
    restore_ms: f64,
}

/// Measures one server with all contenders in turn.
fn compare(
    all: &mut [Box<dyn Contender + '_>],
    rounds: usize,
    server: Server,
) -> Result<Vec<Medians>> {
    let mut measured: Vec<Measured> = all.iter().map(|_| Measured::default()).collect();
    let mut failed = vec![false; all.len()];
    for _ in 0..rounds {
        for (n, (one, measured)) in all.iter_mut().zip(&mut measured).enumerate() {
            if failed[n] {
                continue;
            }
            let name = one.name();
            let done = turn(&mut **one, server, measured);
            match (done, server) {
                // A peer's failure is reported. Without CAP_SYS_RESOURCE CRIU cannot read the
                // limits of processes of other users.
                (Err(e), Server::Program(program)) if n > 0 => {
                    eprintln!("\n  {name} does not save {}: {e}", program.name);
                    one.end()?;
                    failed[n] = true;
                }
                (done, _) => done.with_context(|| format!("{name} failed"))?,
            }
        }
    }
    let (title, what) = match server {
        Server::Own { megabytes, processes, touches } => {
            let touched = if touches { ", of which 1 is touched" } else { "" };
            let title = format!("server with {megabytes} MB{touched}, {processes} processes");
            let what =
                json!({ "megabytes": megabytes, "processes": processes, "touches": touches });
            (title, what)
        }
        Server::Program(program) => (program.name.to_owned(), json!({ "program": program.name })),
    };
    eprintln!("\n{title} (ms)");
    eprintln!("  {:<10} {:<8} {:>9} {:>9} {:>9}", "", "", "median", "min", "p95");
    let (mut names, mut medians) = (Vec::new(), Vec::new());
    for ((one, measured), _) in all.iter().zip(measured).zip(failed).filter(|(_, failed)| !failed) {
        let mut of_one = Vec::new();
        for (name, times) in WHAT
            .into_iter()
            .zip([measured.frozen, measured.save, measured.durable, measured.restore])
            .chain(server.has_second_restore().then_some(("again", measured.again)))
        {
            let times = Times::new(times);
            let (median, min, p95) = (times.median_ms(), times.at(0.0), times.at(0.95));
            eprintln!("  {:<10} {name:<8} {median:>9.2} {min:>9.2} {p95:>9.2}", one.name());
            let more = json!({ "of": what, "min_ms": min, "p95_ms": p95, "rounds": rounds });
            figure("checkpoint", &format!("{} {name}", one.name()), median, "ms", more);
            of_one.push(median);
        }
        names.push(one.name());
        medians.push(of_one);
    }
    let of = |name: &str| names.iter().position(|one| *one == name).map(|n| &medians[n][..]);
    if let (Some(ours), Some(before)) = (of("dormouse"), of(BEFORE)) {
        for ((what, ours), before) in WHAT.into_iter().chain(["again"]).zip(ours).zip(before) {
            change(what, *ours, *before);
        }
    }
    if let (Some(ours), Some(criu)) = (of("dormouse"), of("criu")) {
        // Of frozen and restore. Where nothing better is promised, ours must be no worse.
        let (frozen, restore) = match server {
            Server::Own { megabytes: 0, processes: 1, .. } => (0.1, 1.0 / 6.0),
            Server::Own { .. } => (1.0, 1.0),
            Server::Program(_) => (1.0, 0.5),
        };
        promise("frozen, of CRIU's save", ours[0] / criu[1], frozen);
        promise("durable, of CRIU's", ours[2] / criu[2], 1.0);
        promise("restore, of CRIU's", ours[3] / criu[3], restore);
        if let ([.., ours], [.., criu], true) = (ours, criu, server.has_second_restore()) {
            promise("restore with a record of what was touched, of CRIU's", ours / criu, 0.25);
        }
    }
    let medians = medians.iter();
    Ok(medians.map(|of_one| Medians { frozen_ms: of_one[0], restore_ms: of_one[3] }).collect())
}

/// Equal conditions: files removed by the last turn are gone from the disk, and the memory of a
/// turn was touched, because a hypervisor may have taken free memory meanwhile.
fn prepare(megabytes: u32) {
    rustix::fs::sync();
    let mut all = vec![0_u8; (megabytes as usize * 3 + 64) << 20];
    for page in all.chunks_mut(4096) {
        page[0] = 1;
    }
    std::hint::black_box(all);
}

/// The time for a server's work after an answer, until it is idle.
const SETTLES: Duration = Duration::from_millis(100);

fn turn(one: &mut dyn Contender, server: Server, measured: &mut Measured) -> Result<()> {
    prepare(match server {
        Server::Own { megabytes, .. } => megabytes,
        Server::Program(_) => 0,
    });
    let address = one.start(server)?;
    await_answer(server, address)?;
    std::thread::sleep(SETTLES);
    let began = Instant::now();
    let frozen = one.save()?;
    measured.save.push(began.elapsed());
    one.make_durable()?;
    measured.durable.push(began.elapsed());
    measured.frozen.push(frozen);
    let restored = |one: &mut dyn Contender| {
        let began = Instant::now();
        one.restore()?;
        server.query(address).context("the server does not answer")?;
        anyhow::Ok(began.elapsed())
    };
    measured.restore.push(restored(one)?);
    if server.has_second_restore() {
        std::thread::sleep(SETTLES);
        one.save()?;
        measured.again.push(restored(one)?);
    }
    one.end()
}

/// Our program, in address mode, with everything that a container has.
struct Dormouse<'b> {
    bench: &'b Bench,
    name: &'static str,
    /// Further options of `run`.
    options: &'b [String],
}

impl Contender for Dormouse<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn start(&mut self, server: Server) -> Result<SocketAddr> {
        let mut run = self.bench.dormouse();
        run.args(["run", "-d", "--name", "a"]).args(self.options);
        match server {
            Server::Own { .. } => run.arg("server"),
            // A program of this host runs on the host's files, below the container's own layer.
            Server::Program(_) => run.args(["--rootfs", "/"]),
        };
        ok(run.args(server.words(Path::new("/bin/server"))))?;
        let shown = ok(self.bench.dormouse().args(["inspect", "--json", "a"]))?;
        let shown: Value = serde_json::from_str(&shown)?;
        let record = shown.get(0).unwrap_or(&shown);
        let ip = record["addresses"][0].as_str().context("the container has no address")?;
        Ok(SocketAddr::new(ip.parse::<IpAddr>()?, server.port()))
    }

    fn save(&mut self) -> Result<Duration> {
        let mut save = self.bench.dormouse();
        save.args(["checkpoint", "--json", "a"]);
        // CRIU makes no trial restore, and earlier programs have none. [`trials`] measures it.
        save.args((self.name != BEFORE).then_some("--unproven"));
        let report = ok(&mut save)?;
        let report: Value = serde_json::from_str(&report)?;
        // Without the fsync, which CRIU does not do.
        let us = report["pause_us"].as_u64().context("no pause_us")?;
        Ok(Duration::from_micros(us))
    }

    fn make_durable(&mut self) -> Result<()> {
        Ok(())
    }

    fn restore(&mut self) -> Result<()> {
        ok(self.bench.dormouse().args(["restore", "--lazy", "a"])).map(drop)
    }

    fn halt(&mut self) -> Result<()> {
        ok(self.bench.dormouse().args(["stop", "--time", "0", "a"])).map(drop)
    }

    fn end(&mut self) -> Result<()> {
        ok(self.bench.dormouse().args(["rm", "--force", "a"])).map(drop)
    }
}

/// The peer.
struct Criu {
    program: PathBuf,
    /// The path of our own server.
    own: PathBuf,
    dir: PathBuf,
    /// The first process of the server, by our pid namespace.
    pid: u32,
    address: SocketAddr,
}

impl Criu {
    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(verb).arg("-D").arg(&self.dir);
        command.args(["--manage-cgroups=ignore", "-v0"]);
        command
    }

    /// Waits for the exit of all its processes, which are our children or were reparented to us: a
    /// restore needs their pids.
    fn reap(&self) -> Result<()> {
        let group = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("no pid")?;
        loop {
            match waitpgid(group, WaitOptions::empty()) {
                Ok(_) => {}
                Err(Errno::CHILD) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Contender for Criu {
    fn name(&self) -> &'static str {
        "criu"
    }

    fn start(&mut self, server: Server) -> Result<SocketAddr> {
        if self.dir.exists() {
            fs::remove_dir_all(&self.dir)?;
        }
        fs::create_dir_all(&self.dir)?;
        // A session of its own, without a controlling terminal. Inherited descriptors of the caller
        // are files that CRIU does not find.
        let script = "for f in /proc/$$/fd/*; do n=${f##*/}; [ $n -gt 2 ] && eval \"exec $n>&-\"; done; \
                      exec \"$@\"";
        let mut command = Command::new("setsid");
        command.args(["bash", "-c", script, "bash"]).args(server.words(&self.own));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.pid = command.spawn()?.id();
        self.address = SocketAddr::from(([127, 0, 0, 1], server.port()));
        Ok(self.address)
    }

    fn save(&mut self) -> Result<Duration> {
        ok(self.command("dump").arg("-t").arg(self.pid.to_string()))?;
        self.reap()?;
        frozen(&fs::read(self.dir.join("stats-dump")).context("stats-dump")?)
    }

    fn make_durable(&mut self) -> Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            fs::File::open(entry?.path())?.sync_all()?;
        }
        Ok(fs::File::open(&self.dir)?.sync_all()?)
    }

    fn restore(&mut self) -> Result<()> {
        let pid_file = self.dir.join("restored");
        let _ = fs::remove_file(&pid_file); // of the last turn
        ok(self.command("restore").arg("-d").arg("--pidfile").arg(&pid_file))?;
        self.pid = fs::read_to_string(&pid_file)?.trim().parse()?;
        Ok(())
    }

    fn halt(&mut self) -> Result<()> {
        // The whole process group: the server started a session, and so a process group.
        ok(Command::new("kill").args(["-9", "--", &format!("-{}", self.pid)]))?;
        let began = Instant::now();
        while TcpStream::connect(self.address).is_ok() {
            ensure!(began.elapsed() < Duration::from_secs(5), "the server does not exit");
        }
        self.reap()
    }

    fn end(&mut self) -> Result<()> {
        self.halt()?;
        // Its page cache would be missing to the others.
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

/// `freezing_time` and `frozen_time` of CRIU's statistics: a magic number, a length, and a
/// protocol-buffers message with another in it, of which fields 1 and 2 are in microseconds.
fn frozen(stats: &[u8]) -> Result<Duration> {
    const HEAD_BYTES: usize = 12;
    let outer = stats.get(HEAD_BYTES..).context("truncated statistics")?;
    let fields = fields(outer)?;
    let Some((_, Field::Bytes(inner))) = fields.iter().find(|(number, _)| *number == 1) else {
        bail!("no statistics of a dump");
    };
    let fields = self::fields(inner)?;
    let number = |wanted: u64| {
        let found = fields.iter().find(|(number, _)| *number == wanted);
        match found {
            Some((_, Field::Number(value))) => Ok(*value),
            _ => bail!("field {wanted} is missing"),
        }
    };
    Ok(Duration::from_micros(number(1)? + number(2)?))
}

enum Field<'b> {
    Number(u64),
    Bytes(&'b [u8]),
}

/// The numbers and byte strings of a protocol-buffers message.
fn fields(mut rest: &[u8]) -> Result<Vec<(u64, Field<'_>)>> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let tag = varint(&mut rest)?;
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut rest)?),
            2 => {
                let length = varint(&mut rest)? as usize;
                let (bytes, after) =
                    rest.split_at_checked(length).context("truncated statistics")?;
                rest = after;
                Field::Bytes(bytes)
            }
            other => bail!("a field of type {other}"),
        };
        all.push((tag >> 3, field));
    }
    Ok(all)
}

fn varint(rest: &mut &[u8]) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first().context("truncated statistics")?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    bail!("a number is too long")
}

/// Plots the time stopped, and the time until the first byte.
fn draw(
    all: &[Box<dyn Contender + '_>],
    name: &str,
    axis: &str,
    curves: &[(f64, Vec<Medians>)],
) -> Result<()> {
    let lines = |of: fn(&Medians) -> f64| {
        let points = |n: usize| curves.iter().map(|(at, medians)| (*at, of(&medians[n]))).collect();
        let names = all.iter().map(|one| one.name()).enumerate();
        names.map(|(n, name)| Line { name, points: points(n) }).collect::<Vec<_>>()
    };
    plot(name, "restore to first byte", [axis, "ms"], &lines(|m| m.restore_ms))?;
    let name = format!("{name}-pause");
    plot(&name, "everything stands still", [axis, "ms"], &lines(|m| m.frozen_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_criu_are_parsed() {
        let inner = [0x08, 0xac, 0x02, 0x10, 0x05, 0x18, 0x00];
        let mut stats = vec![0; 12];
        stats.extend([0x0a, inner.len() as u8]);
        stats.extend(inner);
        assert_eq!(frozen(&stats).unwrap(), Duration::from_micros(305));
        assert!(frozen(&stats[..14]).is_err());
        assert!(frozen(&[0; 12]).is_err());
    }
}
