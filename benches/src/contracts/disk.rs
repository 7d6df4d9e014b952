//! Disks: what a container with a rate reads and writes, directly and through the page cache, and what two with weights
//! do.
//!
//! Direct reads and writes are to stay at the rate. What goes through the page cache is reported: cgroup v1 counts it
//! for the host (docs/contracts.md). So are weights, which need the scheduler `bfq`.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dormouse_benches::{figure, median, ok, promise};

use crate::Hosts;

/// The rate of each container, in bytes a second.
const RATE: f64 = (20 << 20) as f64;
/// The part by which a container may be off.
const OFF: f64 = 0.06;
/// From the start of a container to the measurement: its file is made, and what the kernel admits at once is over.
const SETTLES: Duration = Duration::from_secs(6);
/// What a command writes before it has it stored, in MB.
const STORED_MB: f64 = 100.0;
const WEIGHTS: [u32; 2] = [100, 300];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Plain,
    OwnDisk,
    Podman,
}

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "dormouse",
            Self::OwnDisk => "dormouse, --disk",
            Self::Podman => "podman",
        }
    }
}

/// What is measured of an arm, in MB a second.
#[derive(Debug, Clone, Copy, Default)]
struct Got {
    reads: f64,
    direct: f64,
    /// Through the page cache, until the data is stored.
    stored: f64,
    /// The same while direct writes run: both.
    both: f64,
    /// What the disk writes, for all of the host, while the container writes through the page cache without end.
    flushed: f64,
}

pub fn disk(hosts: &Hosts) -> Result<()> {
    let arms = [Arm::Plain, Arm::OwnDisk, Arm::Podman];
    let arms = arms.into_iter().filter(|arm| *arm != Arm::Podman || hosts.podman.is_some());
    let arms: Vec<Arm> = arms.collect();
    let mut all = vec![Vec::new(); arms.len()];
    for round in 0..hosts.options.rounds {
        for place in (0..arms.len()).map(|place| (place + round) % arms.len()) {
            all[place].push(measure(hosts, arms[place]).with_context(|| arms[place].name())?);
        }
    }
    eprintln!(
        "\nrates of {:.0} MB/s\n  {:<18} {:>8} {:>8} {:>8} {:>8} {:>8}",
        RATE / MB,
        "",
        "read",
        "direct",
        "stored",
        "both",
        "flushed"
    );
    for (arm, rounds) in arms.iter().zip(&all) {
        let of = |of: fn(&Got) -> f64| median(rounds.iter().map(of).collect());
        let (reads, direct) = (of(|got| got.reads), of(|got| got.direct));
        let (stored, both) = (of(|got| got.stored), of(|got| got.both));
        let flushed = of(|got| got.flushed);
        eprintln!(
            "  {:<18} {reads:>8.1} {direct:>8.1} {stored:>8.1} {both:>8.1} {flushed:>8.1}",
            arm.name()
        );
        let off = [reads, direct].map(|got| (got / (RATE / MB) - 1.0).abs());
        let worst = off[0].max(off[1]);
        let more = serde_json::json!({
            "rounds": rounds.len(), "direct_reads_mb_per_s": reads, "direct_writes_mb_per_s": direct,
            "stored_mb_per_s": stored, "stored_and_direct_mb_per_s": both, "flushed_mb_per_s": flushed,
        });
        figure("contracts", &format!("rate of a disk, {}", arm.name()), worst, "ratio", more);
        if *arm != Arm::Podman {
            promise("part of the rate that direct reads and writes are off", worst, OFF);
        }
    }
    weights(hosts)
}

const MB: f64 = (1 << 20) as f64;

/// The container of an arm, which runs a kind of neighbour for a while.
fn start(hosts: &Hosts, arm: Arm, options: &[&str], kind: &str, name: &str) -> Result<u32> {
    let rate = (RATE as u64).to_string();
    let neighbour = ["neighbour", kind, "600"];
    if arm == Arm::Podman {
        let podman = hosts.podman.as_ref().context("podman is not installed")?;
        let rate = format!("{}:{rate}", disk_of(hosts)?);
        let mut run = podman.run();
        run.args(["-d", "--name", name, "--device-write-bps", &rate, "--device-read-bps", &rate]);
        ok(run.arg("bench").arg(format!("/bin/{}", neighbour[0])).args(&neighbour[1..]))?;
        let mut inspect = podman.command();
        let pid = ok(inspect.args(["inspect", "--format", "{{.State.Pid}}", name]))?;
        return Ok(pid.parse()?);
    }
    let mut run = hosts.bench.dormouse();
    run.args(["run", "-d", "--name", name, "--net", "none"]).args(options);
    if arm == Arm::OwnDisk {
        run.args(["--disk", "2g"]);
    }
    ok(run.arg("bench").args(neighbour))?;
    hosts.bench.pid(name)
}

fn command(hosts: &Hosts, arm: Arm) -> Result<Command> {
    match arm {
        Arm::Podman => Ok(hosts.podman.as_ref().context("podman is not installed")?.command()),
        Arm::Plain | Arm::OwnDisk => Ok(hosts.bench.dormouse()),
    }
}

fn remove(hosts: &Hosts, arm: Arm, name: &str) -> Result<()> {
    let mut rm = command(hosts, arm)?;
    rm.args(["rm", "--force"]);
    if arm == Arm::Podman {
        rm.args(["--time", "0"]);
    }
    ok(rm.arg(name)).map(drop)
}

/// MB that a process has read from disks, and written to them (proc_pid_io(5)).
fn moved(pid: u32) -> Result<[f64; 2]> {
    let text = fs::read_to_string(format!("/proc/{pid}/io"))?;
    let of = |name: &str| -> Result<f64> {
        let found = text.lines().find_map(|line| line.strip_prefix(name));
        Ok(found.context("no counter")?.trim().parse::<f64>()? / MB)
    };
    Ok([of("read_bytes:")?, of("write_bytes:")?])
}

/// MB a second that processes read and write, for the duration of a measurement.
fn rates(pids: &[u32], duration: Duration) -> Result<Vec<[f64; 2]>> {
    let read = || pids.iter().map(|pid| moved(*pid)).collect::<Result<Vec<_>>>();
    let (before, start) = (read()?, Instant::now());
    sleep(duration);
    let (after, took) = (read()?, start.elapsed().as_secs_f64());
    let rate = |(after, before): (&[f64; 2], &[f64; 2])| {
        [(after[0] - before[0]) / took, (after[1] - before[1]) / took]
    };
    Ok(after.iter().zip(&before).map(rate).collect())
}

fn measure(hosts: &Hosts, arm: Arm) -> Result<Got> {
    let duration = Duration::from_secs(hosts.options.seconds);
    let rate = (RATE as u64).to_string();
    let limits = ["--io-write-bps", &rate, "--io-read-bps", &rate];
    let mut got = Got::default();
    let pid = start(hosts, arm, &limits, "read", "d")?;
    sleep(SETTLES);
    got.reads = rates(&[pid], duration)?[0][0];
    remove(hosts, arm, "d")?;
    let pid = start(hosts, arm, &limits, "direct", "d")?;
    sleep(SETTLES / 3);
    got.direct = rates(&[pid], duration)?[0][1];
    // Beside the direct writes.
    let (before, start_at) = (moved(pid)?[1], Instant::now());
    let beside = store(hosts, arm)?;
    let direct = (moved(pid)?[1] - before) / start_at.elapsed().as_secs_f64();
    got.both = direct + beside;
    remove(hosts, arm, "d")?;
    start(hosts, arm, &limits, "inotify", "d")?;
    got.stored = store(hosts, arm)?;
    remove(hosts, arm, "d")?;
    start(hosts, arm, &limits, "write", "d")?;
    sleep(SETTLES);
    let before = written_mb(hosts)?;
    sleep(duration);
    got.flushed = (written_mb(hosts)? - before) / duration.as_secs_f64();
    remove(hosts, arm, "d")?;
    Ok(got)
}

/// The device with the benchmark's directory.
fn disk_of(hosts: &Hosts) -> Result<String> {
    let place = hosts.bench.dir.path();
    ok(Command::new("findmnt").args(["-n", "-o", "SOURCE", "-T"]).arg(place))
}

/// MB that this device has written (Documentation/block/stat.rst).
fn written_mb(hosts: &Hosts) -> Result<f64> {
    let device = disk_of(hosts)?;
    let name = device.rsplit('/').next().unwrap_or(&device);
    let text = fs::read_to_string(format!("/sys/class/block/{name}/stat"))?;
    let sectors = text.split_whitespace().nth(6).context("no number of sectors")?;
    Ok(sectors.parse::<f64>()? * 512.0 / MB)
}

/// MB a second of a command that writes through the page cache and has all of it stored.
fn store(hosts: &Hosts, arm: Arm) -> Result<f64> {
    let script = format!(
        "busybox dd if=/dev/zero of=/stored bs=1M count={STORED_MB} conv=fsync 2>/dev/null && rm /stored"
    );
    let start = Instant::now();
    ok(command(hosts, arm)?.args(["exec", "d", "sh", "-c", &script]))?;
    Ok(STORED_MB / start.elapsed().as_secs_f64())
}

/// Two containers with weights that write directly at once.
fn weights(hosts: &Hosts) -> Result<()> {
    let duration = Duration::from_secs(hosts.options.seconds);
    let names = ["w0", "w1"];
    let mut ratios = Vec::new();
    for _ in 0..hosts.options.rounds {
        let mut pids = Vec::new();
        for (name, weight) in names.iter().zip(WEIGHTS) {
            let weight = weight.to_string();
            pids.push(start(hosts, Arm::Plain, &["--io-weight", &weight], "direct", name)?);
        }
        sleep(SETTLES / 6);
        let rates = rates(&pids, duration)?;
        ratios.push(rates[1][1] / rates[0][1]);
        for name in names {
            remove(hosts, Arm::Plain, name)?;
        }
    }
    let ratio = median(ratios);
    eprintln!(
        "\nweights of {WEIGHTS:?}, direct writes at once: the second writes {ratio:.2} times as much"
    );
    let more = serde_json::json!({ "rounds": hosts.options.rounds, "weights": WEIGHTS });
    figure("contracts", "weights of a disk: second against first", ratio, "ratio", more);
    Ok(())
}
