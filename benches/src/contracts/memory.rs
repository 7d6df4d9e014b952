//! Memory: page cache that a container keeps beside large reads of others, and containers that fall asleep when they
//! have used their memory.

use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dormouse_benches::{Bench, Times, cgroup_of, figure, median, ok, promise_least};
use dormouse_testkit::{image, wait_until};

use crate::Hosts;

/// The memory of all containers together.
const ROOM: u64 = 1 << 30;
/// The file of the container with a guarantee.
const FILE_MB: u64 = 256;
/// What each of the others reads.
const STREAM_MB: u64 = 5120;
/// The part of its pages that a container keeps.
const KEPT: f64 = 0.97;
/// LIMIT: the time until a state is reached.
const PATIENCE: Duration = Duration::from_secs(120);

struct Arm {
    name: &'static str,
    /// Whether the container has a guarantee. Another one has a small one, so that all together have a limit.
    is_guaranteed: bool,
    has_daemon: bool,
    streams: usize,
}

pub fn memory(hosts: &Hosts) -> Result<()> {
    guarantees(hosts)?;
    shortages(hosts)
}

fn guarantees(hosts: &Hosts) -> Result<()> {
    let kept = memory_bytes()?.checked_sub(ROOM).context("not enough memory")?;
    hosts.bench.configure(&format!("[contract]\nhost-memory-reserve = \"{kept}\"\n"))?;
    let arm =
        |name, is_guaranteed, has_daemon, streams| Arm { name, is_guaranteed, has_daemon, streams };
    let arms = [
        arm("a guarantee, one reads, no daemon", true, false, 1),
        arm("a guarantee, two read, with the daemon", true, true, 2),
        arm("no guarantee, one reads, no daemon", false, false, 1),
    ];
    let mut all: Vec<Vec<f64>> = arms.iter().map(|_| Vec::new()).collect();
    for round in 0..hosts.options.rounds {
        for place in (0..arms.len()).map(|place| (place + round) % arms.len()) {
            all[place]
                .push(kept_beside(&hosts.bench, &arms[place]).with_context(|| arms[place].name)?);
        }
    }
    eprintln!("\npages of {FILE_MB} MB that are kept beside reads of {STREAM_MB} MB");
    for (arm, parts) in arms.iter().zip(all) {
        let least = parts.iter().copied().fold(f64::INFINITY, f64::min);
        let more = serde_json::json!({ "rounds": parts.len(), "least": least });
        let part = median(parts);
        eprintln!("  {}: {part:.3}, at least {least:.3}", arm.name);
        figure("contracts", &format!("memory, {}: part kept", arm.name), part, "ratio", more);
        if arm.is_guaranteed {
            promise_least("part of its pages that a container keeps", least, KEPT);
        }
    }
    Ok(())
}

fn memory_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let all = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).context("no memory")?;
    Ok(all.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

/// The page cache that is charged to a container, in MB.
fn cached_mb(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(cgroup_of(pid, "memory")?.join("memory.stat"))?;
    let of = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<f64>().ok())
    };
    let bytes = of("total_cache").or_else(|| of("file")).context("no page cache in memory.stat")?;
    Ok(bytes / f64::from(1 << 20))
}

/// The file that one of the others reads, of which no page is in memory. Its blocks are on the disk: holes are read at
/// the speed of memory, up to 20 GB/s here.
fn stream(bench: &Bench, number: usize) -> Result<PathBuf> {
    let file = bench.path(&format!("stream-{number}"));
    let of = format!("of={}", file.display());
    if !file.exists() {
        let count = format!("count={STREAM_MB}");
        let mut make = Command::new("dd");
        make.args(["if=/dev/zero", &of, "bs=1M", &count, "conv=fdatasync", "status=none"]);
        ok(&mut make)?;
    }
    // dd(1): drops the cache of the whole file.
    let mut forget = Command::new("dd");
    ok(forget.args([&of, "oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"]))?;
    Ok(file)
}

/// The least part of its file's pages that a container has while others read.
fn kept_beside(bench: &Bench, arm: &Arm) -> Result<f64> {
    let daemon = arm.has_daemon.then(|| bench.daemon(&["--memory", "off"])).transpose()?;
    let run = |name: &str, options: &[&str], script: &str| {
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--net", "none", "--name", name]).args(options);
        ok(run.args(["bench", "sh", "-c", script]))
    };
    let guarantee = if arm.is_guaranteed { format!("{}m", FILE_MB + 44) } else { "0".into() };
    let result = (|| {
        run("x", &["--memory-min", &guarantee], "exec sleep 1000000")?;
        run("small", &["--memory-min", "8m"], "exec sleep 1000000")?;
        let make = format!("busybox truncate -s {} /f && cat /f >/dev/null", FILE_MB << 20);
        ok(bench.dormouse().args(["exec", "x", "sh", "-c", &make]))?;
        // The kernel counts in batches.
        sleep(Duration::from_millis(500));
        let pid = bench.pid("x")?;
        let all = cached_mb(pid)?;
        ensure!(all >= FILE_MB as f64 * 0.9, "{all} of {FILE_MB} MB are in memory");
        let names: Vec<String> = (0..arm.streams).map(|n| format!("s{n}")).collect();
        let files: Vec<PathBuf> =
            (0..arm.streams).map(|n| stream(bench, n)).collect::<Result<_>>()?;
        for (name, file) in names.iter().zip(&files) {
            let volume = format!("{}:/f:ro", file.display());
            run(name, &["--volume", &volume], "exec cat /f >/dev/null")?;
        }
        let mut least = all;
        let ended = wait_until(PATIENCE, || {
            least = cached_mb(pid).map_or(least, |mb| mb.min(least));
            names.iter().all(|name| bench.record(name).is_ok_and(|it| it["state"] == "stopped"))
        });
        ensure!(ended, "the others read without end");
        Ok(least.min(cached_mb(pid)?) / all)
    })();
    ok(bench.dormouse().args(["rm", "--force", "--all"]))?;
    drop(daemon);
    result
}

/// A container uses its memory, falls asleep, and continues with more.
fn shortages(hosts: &Hosts) -> Result<()> {
    const FIRST_MB: u32 = 64;
    const MORE_MB: u32 = 8;
    let (bench, rounds) = (&hosts.bench, hosts.options.shortages);
    bench.configure("")?;
    ok(bench.dormouse().args(["import", "--name", "workloads"]).arg(image::workloads()))?;
    let daemon = bench.daemon(&["--memory", "off"])?;
    let mut run = bench.dormouse();
    run.args(["run", "-d", "--name", "x", "--memory", "64m", "--memory-swap", "64m"]);
    run.args(["--oom", "sleep", "-e", "AT_ONCE=40", "-e", "PER_SECOND=5"]);
    run.args(["-e", &format!("MEGABYTES={}", FIRST_MB + MORE_MB * rounds)]);
    ok(run.args(["workloads", "/bin/hog"]))?;
    let address = bench.address("x", 80)?;
    let is = |state: &str| bench.record("x").is_ok_and(|it| it["state"] == state);
    let mut times = Vec::new();
    for round in 1..=rounds {
        ensure!(wait_until(PATIENCE, || is("asleep")), "round {round}: {}", bench.record("x")?);
        let more = format!("{}m", FIRST_MB + MORE_MB * round);
        let start = Instant::now();
        ok(bench.dormouse().args(["update", "--memory", &more, "x"]))?;
        let mut answer = String::new();
        TcpStream::connect(address)?.read_to_string(&mut answer)?;
        ensure!(answer.trim().parse::<u32>().is_ok(), "round {round}: no answer: '{answer}'");
        times.push(start.elapsed());
    }
    ok(bench.dormouse().args(["update", "--memory", "2g", "x"]))?;
    let is_whole = || {
        let logs = ok(bench.dormouse().args(["logs", "x"]));
        logs.is_ok_and(|text| text.lines().any(|line| line == "ok"))
    };
    ensure!(wait_until(PATIENCE, is_whole), "bytes are lost: {}", bench.record("x")?);
    ensure!(bench.record("x")?["oom_killed"] == false, "the kernel has ended a process");
    ok(bench.dormouse().args(["rm", "--force", "x"]))?;
    drop(daemon);
    let times = Times::new(times);
    eprintln!(
        "\nasleep without memory, and awake with more: {rounds} rounds, nothing lost; to the answer p50 {:.1} ms, \
         most {:.1} ms",
        times.median_ms(),
        times.at(1.0)
    );
    let more = serde_json::json!({ "rounds": rounds, "max_ms": times.at(1.0) });
    let name = "asleep without memory: from the larger limit to the answer";
    figure("contracts", name, times.median_ms(), "ms", more);
    Ok(())
}
