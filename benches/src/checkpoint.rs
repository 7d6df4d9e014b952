//! A server that is saved and comes back: how long it stands still, how long until it is on disk, and
//! how long until it answers again; by size of its memory and by number of processes. CRIU beside it.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin checkpoint -- --rounds 10
//! ```
//!
//! Times of commands are from their start to their end, and both programs are commands. *Frozen* is
//! what each says of itself: from the first task that is stopped until all go on, and for how long they
//! were stopped before so that memory could be copied ahead (ours: `pause_us` of `--json`; CRIU:
//! `freezing_time` and `frozen_time` of `criu show`'s stats, read by their tags). CRIU saves and restores
//! plain processes, without namespaces, a root, network or cgroups of their own, so it has less to do:
//! namespaces made by `unshare` it refuses for what else is mounted here.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Line, Times, figure, ok, plot, promise};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpgid};
use serde_json::{Value, json};

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of each, of the small server; a third of that of the large ones.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// A CRIU program of version 4, where it is not the `criu` in PATH (Debian 12 has one that does not
    /// run on Linux 6.11 and later).
    #[arg(long)]
    criu: Option<PathBuf>,
    /// Sizes of memory, in megabytes.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 128, 1024, 4096])]
    megabytes: Vec<u32>,
    /// Numbers of processes.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100, 500])]
    processes: Vec<u32>,
}

/// Times of one server.
#[derive(Default)]
struct Measured {
    /// From the first task stopped until it may go on.
    frozen: Vec<Duration>,
    /// The command that saves.
    save: Vec<Duration>,
    /// The command that restores, and a byte there and back.
    restore: Vec<Duration>,
    /// The same when it is done a second time, where what was touched the first time is known.
    again: Vec<Duration>,
}

/// What is asked of the server.
#[derive(Clone, Copy)]
struct Load {
    megabytes: u32,
    processes: u32,
    /// The answer takes a megabyte of its memory.
    touches: bool,
}

/// Whoever saves and restores.
trait Contender {
    fn name(&self) -> &'static str;
    /// Starts the server; where it answers.
    fn start(&mut self, megabytes: u32, processes: u32) -> Result<SocketAddr>;
    /// Saves and ends it; how long it stood still.
    fn save(&mut self) -> Result<Duration>;
    fn restore(&mut self) -> Result<()>;
    fn end(&mut self) -> Result<()>;
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let server = bench.path("rootfs/bin/server");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("checkpoint/server.c");
    ok(Command::new("cc").args(["-O2", "-static", "-o"]).arg(&server).arg(source))?;
    ok(bench.dormouse().args(["import", "--name", "server"]).arg(bench.path("rootfs")))?;
    // The peer wants a tmpfs for what it knows of the kernel, or finds it out at every run.
    ok(Command::new("mount").args(["-t", "tmpfs", "bench", "/run"]))?;
    // Children of the peer's server are left to us when it ends.
    set_child_subreaper(Some(getpid())).context("becoming a subreaper")?;
    let mut all: Vec<Box<dyn Contender>> = vec![Box::new(Dormouse { bench: &bench })];
    let program = options.criu.clone().unwrap_or_else(|| "criu".into());
    match Command::new(&program).arg("--version").output() {
        Ok(said) => {
            eprint!("{}", String::from_utf8_lossy(&said.stdout));
            let dir = bench.path("criu");
            all.push(Box::new(Criu { program, server, dir, pid: 0 }));
        }
        Err(e) => eprintln!("{}: {e}: its arm is left out", program.display()),
    }
    let plain = |megabytes, processes| Load { megabytes, processes, touches: false };
    let small = compare(&mut all, options.rounds, plain(0, 1))?;
    let large = Load { megabytes: 200, processes: 1, touches: true };
    let large = compare(&mut all, options.rounds, large)?;
    if let (Some(small), Some(large)) = (small.first(), large.first()) {
        let more = large.restore_ms - small.restore_ms;
        promise("200 MB of which 1 is touched, ms more than nothing", more, 5.0);
    }
    let few = (options.rounds / 3).max(2);
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

/// Medians of one contender.
#[derive(Clone, Copy)]
struct Medians {
    frozen_ms: f64,
    restore_ms: f64,
}

/// One server, by all in turns.
fn compare(all: &mut [Box<dyn Contender + '_>], rounds: usize, load: Load) -> Result<Vec<Medians>> {
    let Load { megabytes, processes, touches } = load;
    let mut measured: Vec<Measured> = all.iter().map(|_| Measured::default()).collect();
    for _ in 0..rounds {
        for (one, measured) in all.iter_mut().zip(&mut measured) {
            let name = one.name();
            turn(&mut **one, load, measured).with_context(|| format!("{name} failed"))?;
        }
    }
    let touched = if touches { ", of which 1 is touched" } else { "" };
    eprintln!("\nserver with {megabytes} MB{touched}, {processes} processes (ms)");
    eprintln!("  {:<10} {:<8} {:>9} {:>9} {:>9}", "", "", "median", "min", "p95");
    let mut medians = Vec::new();
    for (one, measured) in all.iter().zip(measured) {
        let mut of_one = Vec::new();
        for (what, times) in
            [("frozen", measured.frozen), ("save", measured.save), ("restore", measured.restore)]
                .into_iter()
                .chain(touches.then_some(("again", measured.again)))
        {
            let times = Times::new(times);
            let (median, min, p95) = (times.median_ms(), times.at(0.0), times.at(0.95));
            eprintln!("  {:<10} {what:<8} {median:>9.2} {min:>9.2} {p95:>9.2}", one.name());
            let more = json!({
                "megabytes": megabytes, "processes": processes, "touches": touches,
                "min_ms": min, "p95_ms": p95, "rounds": rounds,
            });
            figure("checkpoint", &format!("{} {what}", one.name()), median, "ms", more);
            of_one.push(median);
        }
        medians.push(of_one);
    }
    if let [ours, criu] = &medians[..] {
        // Promised of the small server alone.
        let is_small = (megabytes, processes) == (0, 1);
        let limits = if is_small { [1.0, 1.0, 1.0 / 6.0] } else { [1.0; 3] };
        promise("frozen, of CRIU's save", ours[0] / criu[1], if is_small { 0.1 } else { 1.0 });
        for ((what, limit), (ours, criu)) in
            ["frozen", "save", "restore"].iter().zip(limits).zip(ours.iter().zip(criu))
        {
            promise(&format!("{what}, of CRIU's"), ours / criu, limit);
        }
        if touches {
            promise(
                "restore with a record of what was touched, of CRIU's",
                ours[3] / criu[3],
                0.25,
            );
        }
    }
    let medians = medians.iter();
    Ok(medians.map(|of_one| Medians { frozen_ms: of_one[0], restore_ms: of_one[2] }).collect())
}

fn turn(one: &mut dyn Contender, load: Load, measured: &mut Measured) -> Result<()> {
    let Load { megabytes, processes, touches } = load;
    let address = one.start(megabytes, processes)?;
    let began = Instant::now();
    while ask(address, b'x').is_err() {
        ensure!(began.elapsed() < Duration::from_secs(30), "it never answers");
        std::thread::sleep(Duration::from_millis(1));
    }
    let began = Instant::now();
    let frozen = one.save()?;
    measured.save.push(began.elapsed());
    measured.frozen.push(frozen);
    let question = if touches { b't' } else { b'x' };
    let restored = |one: &mut dyn Contender| {
        let began = Instant::now();
        one.restore()?;
        ask(address, question).context("it does not answer")?;
        anyhow::Ok(began.elapsed())
    };
    measured.restore.push(restored(one)?);
    if touches {
        one.save()?;
        measured.again.push(restored(one)?);
    }
    one.end()
}

/// A byte there and back.
fn ask(address: SocketAddr, byte: u8) -> Result<()> {
    let mut caller = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    caller.set_read_timeout(Some(Duration::from_secs(5)))?;
    caller.write_all(&[byte])?;
    let mut answer = [0];
    caller.read_exact(&mut answer)?;
    ensure!(answer == [byte], "it answers something else");
    Ok(())
}

/// Ours, in address mode, with everything that a container has.
struct Dormouse<'b> {
    bench: &'b Bench,
}

impl Contender for Dormouse<'_> {
    fn name(&self) -> &'static str {
        "dormouse"
    }

    fn start(&mut self, megabytes: u32, processes: u32) -> Result<SocketAddr> {
        let (megabytes, processes) = (megabytes.to_string(), processes.to_string());
        let words = ["run", "-d", "--name", "a", "server", "/bin/server", &megabytes, &processes];
        ok(self.bench.dormouse().args(words))?;
        let shown = ok(self.bench.dormouse().args(["inspect", "--json", "a"]))?;
        let shown: Value = serde_json::from_str(&shown)?;
        let record = shown.get(0).unwrap_or(&shown);
        let ip = record["addresses"][0].as_str().context("it has no address")?;
        Ok(SocketAddr::new(ip.parse::<IpAddr>()?, 7000))
    }

    fn save(&mut self) -> Result<Duration> {
        let said = ok(self.bench.dormouse().args(["checkpoint", "--json", "a"]))?;
        let said: Value = serde_json::from_str(&said)?;
        // Without what makes it durable, which CRIU does not do.
        let us = said["pause_us"].as_u64().context("no pause_us")?;
        Ok(Duration::from_micros(us))
    }

    fn restore(&mut self) -> Result<()> {
        ok(self.bench.dormouse().args(["restore", "--lazy", "a"])).map(drop)
    }

    fn end(&mut self) -> Result<()> {
        ok(self.bench.dormouse().args(["rm", "--force", "a"])).map(drop)
    }
}

/// The peer.
struct Criu {
    program: PathBuf,
    server: PathBuf,
    dir: PathBuf,
    /// The server's first process, by our ids.
    pid: u32,
}

impl Criu {
    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(verb).arg("-D").arg(&self.dir);
        command.args(["--manage-cgroups=ignore", "-v0"]);
        command
    }

    /// Waits until all of its processes have ended, which are ours or were left to us: whoever is
    /// restored needs their numbers.
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

    fn start(&mut self, megabytes: u32, processes: u32) -> Result<SocketAddr> {
        if self.dir.exists() {
            fs::remove_dir_all(&self.dir)?;
        }
        fs::create_dir_all(&self.dir)?;
        // A session of its own, so that no terminal belongs to it.
        // Descriptors of whoever has started this are files that CRIU does not find.
        let script = format!(
            "for f in /proc/$$/fd/*; do n=${{f##*/}}; [ $n -gt 2 ] && eval \"exec $n>&-\"; done; \
             exec {} {megabytes} {processes}",
            self.server.display()
        );
        let mut command = Command::new("setsid");
        command.args(["bash", "-c", &script]).stdin(Stdio::null());
        self.pid = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?.id();
        Ok(SocketAddr::from(([127, 0, 0, 1], 7000)))
    }

    fn save(&mut self) -> Result<Duration> {
        ok(self.command("dump").arg("-t").arg(self.pid.to_string()))?;
        self.reap()?;
        frozen(&fs::read(self.dir.join("stats-dump")).context("stats-dump")?)
    }

    fn restore(&mut self) -> Result<()> {
        let pid_file = self.dir.join("restored");
        let _ = fs::remove_file(&pid_file); // of the last turn
        ok(self.command("restore").arg("-d").arg("--pidfile").arg(&pid_file))?;
        self.pid = fs::read_to_string(&pid_file)?.trim().parse()?;
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        // All of them: it began a session, and so a process group.
        ok(Command::new("kill").args(["-9", "--", &format!("-{}", self.pid)]))?;
        let began = Instant::now();
        while ask(SocketAddr::from(([127, 0, 0, 1], 7000)), b'x').is_ok() {
            ensure!(began.elapsed() < Duration::from_secs(5), "it does not end");
        }
        self.reap()?;
        // What it holds of the page cache would be missing to the others.
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

/// `freezing_time` and `frozen_time` of CRIU's statistics: a magic number, a length, and a message of
/// protocol buffers with another in it, of which the fields 1 and 2 are wanted, microseconds each.
fn frozen(stats: &[u8]) -> Result<Duration> {
    const HEAD_BYTES: usize = 12;
    let outer = stats.get(HEAD_BYTES..).context("it is cut")?;
    let fields = fields(outer)?;
    let Some((_, Field::Bytes(inner))) = fields.iter().find(|(number, _)| *number == 1) else {
        bail!("there are no figures of a dump");
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

/// The fields of a message of protocol buffers that are numbers or bytes.
fn fields(mut rest: &[u8]) -> Result<Vec<(u64, Field<'_>)>> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let tag = varint(&mut rest)?;
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut rest)?),
            2 => {
                let length = varint(&mut rest)? as usize;
                let (bytes, after) = rest.split_at_checked(length).context("it is cut")?;
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
        let (byte, after) = rest.split_first().context("it is cut")?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    bail!("a number is too long")
}

/// Draws how long each stood still, and until the first byte.
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
    fn the_peers_figures_are_read() {
        let inner = [0x08, 0xac, 0x02, 0x10, 0x05, 0x18, 0x00];
        let mut stats = vec![0; 12];
        stats.extend([0x0a, inner.len() as u8]);
        stats.extend(inner);
        assert_eq!(frozen(&stats).unwrap(), Duration::from_micros(305));
        assert!(frozen(&stats[..14]).is_err());
        assert!(frozen(&[0; 12]).is_err());
    }
}
