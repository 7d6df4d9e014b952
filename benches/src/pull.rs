//! From a registry to files: `dormouse pull` and the peers for the same task, the cost of a second
//! name of an image, and the cost of a second image that shares most files.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin pull -- --rounds 5
//! ```
//!
//! Both sides start each round with nothing on disk but the registry's own files, which stay in
//! memory: decompression, checks and writes are measured. Ours ends on the disk (syncfs), the
//! peers' in the page cache.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Times, figure, installed, ok, promise};
use dormouse_testkit::{Registry, debian, image};

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of ours and the peers.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Packages of the first image: some 600 MB, mostly small files, as on servers.
const ONE: &[&str] = &[
    "nginx",
    "postgresql",
    "postfix",
    "openssh-server",
    "cron",
    "rsyslog",
    "sudo",
    "vim",
    "curl",
    "man-db",
    "locales",
    "systemd",
    "git",
];
/// Further packages of the second image.
const MORE: &[&str] = &["php-fpm", "php-pgsql", "php-gd", "mariadb-client"];

fn main() -> Result<()> {
    let options = Options::parse();
    let two: Vec<&str> = ONE.iter().chain(MORE).copied().collect();
    let tars = [("bench-one-2.tar", ONE), ("bench-two-2.tar", &two)]
        .map(|(name, packages)| image::cached(name, |path| debian::bootstrap(packages, path, &[])));
    let bench = Bench::new()?;
    let registry = Registry::serve(bench.dir.path(), |program| Command::new(program));
    let name = |tag: &str| registry.name(&format!("bench:{tag}"));
    let maker = bench.path("maker");
    for (tar, tags) in tars.iter().zip([&["one", "again"][..], &["two"]]) {
        ok(bench.dormouse_in(&maker).args(["import", "--name", &name(tags[0])]).arg(tar))?;
        for tag in &tags[1..] {
            ok(bench.dormouse_in(&maker).args(["tag", &name(tags[0]), &name(tag)]))?;
        }
        for tag in tags {
            ok(bench.dormouse_in(&maker).args(["push", "--quiet", &name(tag)]))?;
        }
    }
    fs::remove_dir_all(&maker)?;

    let took = pulls(&bench, &registry, options.rounds)?;
    took.report();
    second_image(&bench, &registry, &tars)
}

/// Times of each step, in every round.
#[derive(Default)]
struct Took {
    ours: Vec<Duration>,
    again: Vec<Duration>,
    copy: Vec<Duration>,
    unpack: Vec<Duration>,
}

fn pulls(bench: &Bench, registry: &Registry, rounds: usize) -> Result<Took> {
    let mut took = Took::default();
    let name = |tag: &str| registry.name(&format!("bench:{tag}"));
    let peers = installed("skopeo") && installed("umoci");
    if !peers {
        eprintln!("skopeo or umoci is not installed: not measured");
    }
    for n in 0..rounds {
        eprint!("\r  round {} of {rounds}", n + 1);
        let root = bench.path(&format!("pull-{n}"));
        let mut pull = bench.dormouse_in(&root);
        took.ours.push(timed(pull.args(["pull", "--quiet", &name("one")]))?);
        let mut again = bench.dormouse_in(&root);
        took.again.push(timed(again.args(["pull", "--quiet", &name("again")]))?);
        clear(&root)?;
        if !peers {
            continue;
        }
        let layout = bench.path("layout");
        let mut copy = Command::new("skopeo");
        copy.args(["copy", "--quiet", "--insecure-policy", "--src-tls-verify=false"]);
        copy.arg(format!("docker://{}", name("one"))).arg(format!("oci:{}:one", layout.display()));
        took.copy.push(timed(&mut copy)?);
        let bundle = bench.path("bundle");
        let mut unpack = Command::new("umoci");
        unpack.args(["unpack", "--image"]).arg(format!("{}:one", layout.display())).arg(&bundle);
        took.unpack.push(timed(&mut unpack)?);
        clear(&layout)?;
        clear(&bundle)?;
    }
    eprintln!();
    Ok(took)
}

fn timed(command: &mut Command) -> Result<Duration> {
    let start = Instant::now();
    ok(command)?;
    Ok(start.elapsed())
}

/// Removes the files of a round, and syncs the disk before the next one.
fn clear(dir: &Path) -> Result<()> {
    fs::remove_dir_all(dir)?;
    let file = File::open(dir.parent().context("no directory")?)?;
    Ok(rustix::fs::syncfs(&file)?)
}

impl Took {
    fn report(self) {
        let both = self.copy.iter().zip(&self.unpack).map(|(a, b)| *a + *b).collect();
        let all = [
            ("dormouse pull", Times::new(self.ours)),
            ("the same by another tag", Times::new(self.again)),
            ("skopeo + umoci", Times::new(both)),
            ("skopeo copy", Times::new(self.copy)),
            ("umoci unpack", Times::new(self.unpack)),
        ];
        eprintln!("\nfrom a registry on this machine to files (s)");
        eprintln!("  {:<24} {:>8} {:>8} {:>8}", "", "median", "min", "max");
        for (name, times) in &all {
            let [median, min, max] = [0.5, 0.0, 1.0].map(|part| times.at(part) / 1e3);
            if median.is_nan() {
                continue;
            }
            eprintln!("  {name:<24} {median:>8.3} {min:>8.3} {max:>8.3}");
            figure("pull", name, median, "s", serde_json::json!({"min_s": min, "max_s": max}));
        }
        let [ours, again, theirs, ..] = all.map(|(_, times)| times.median_ms());
        if !theirs.is_nan() {
            figure("pull", "ours/theirs", ours / theirs, "ratio", serde_json::json!({}));
            promise("of skopeo and umoci", ours / theirs, 0.4);
        }
        promise("seconds for another tag", again / 1e3, 0.5);
    }
}

/// A second image that shares most files with the first: its cost on disk, and in memory once
/// containers of both have read all their files.
fn second_image(bench: &Bench, registry: &Registry, tars: &[PathBuf; 2]) -> Result<()> {
    let store = bench.path("root/lib/images");
    let [before, first, both] = {
        let used = || disk_bytes(&store);
        let before = used()?;
        ok(bench.dormouse().args(["pull", "--quiet", &registry.name("bench:one")]))?;
        let first = used()?;
        ok(bench.dormouse().args(["pull", "--quiet", &registry.name("bench:two")]))?;
        [before, first, used()?]
    };
    let contents = [contents(&tars[0])?, contents(&tars[1])?];
    let all: u64 = contents[1].values().sum();
    let new = contents[1].iter().filter(|(hash, _)| !contents[0].contains_key(*hash));
    let new: u64 = new.map(|(_, bytes)| bytes).sum();

    let objects = store.join("objects");
    drop_cache(&objects)?;
    let empty = cached_bytes(&objects)?;
    let mut cached = Vec::new();
    for tag in ["one", "two"] {
        let mut run = bench.dormouse();
        run.args(["run", "--rm", "--net", "none", &registry.name(&format!("bench:{tag}"))]);
        ok(run.args(["sh", "-c", "find / -xdev -type f -exec cat {} + | wc -c"]))?;
        cached.push(cached_bytes(&objects)?);
    }
    let [one_cached, both_cached] = [cached[0] - empty.min(cached[0]), cached[1] - cached[0]];

    let mb = |bytes: u64| bytes as f64 / 1e6;
    eprintln!("\na second image that shares most files (MB)");
    eprintln!("  {:<44} {:>8.1}", "contents of its files, each once", mb(all));
    eprintln!("  {:<44} {:>8.1}", "of them not in the first", mb(new));
    eprintln!("  {:<44} {:>8.1}", "the first image on disk", mb(first - before));
    eprintln!("  {:<44} {:>8.1}", "the second one, besides", mb(both - first));
    eprintln!("  {:<44} {:>8.1}", "page cache after all of the first was read", mb(one_cached));
    eprintln!("  {:<44} {:>8.1}", "more after all of the second was read", mb(both_cached));
    let more = serde_json::json!({
        "second_mb": mb(all), "difference_mb": mb(new), "first_on_disk_mb": mb(first - before),
        "second_on_disk_mb": mb(both - first), "first_in_cache_mb": mb(one_cached),
        "second_in_cache_mb": mb(both_cached),
    });
    let (disk, memory) = ((both - first) as f64 / new as f64, both_cached as f64 / new as f64);
    figure("pull", "second image on disk/difference", disk, "ratio", more);
    figure("pull", "second image in cache/difference", memory, "ratio", serde_json::json!({}));
    promise("of its difference, on disk", disk, 1.25);
    promise("of its difference, in memory", memory, 1.25);
    Ok(())
}

/// Bytes allocated below a directory.
fn disk_bytes(dir: &Path) -> Result<u64> {
    let text = ok(Command::new("du").args(["--block-size=1", "--summarize"]).arg(dir))?;
    text.split_whitespace().next().and_then(|n| n.parse().ok()).context("no number from du")
}

/// The distinct contents of a tar's files, with their lengths.
fn contents(tar: &Path) -> Result<HashMap<blake3::Hash, u64>> {
    let mut found = HashMap::new();
    let mut archive = tar::Archive::new(File::open(tar)?);
    let mut buffer = vec![0; 1 << 20];
    for entry in archive.entries()? {
        let mut entry = entry?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let mut hasher = blake3::Hasher::new();
        loop {
            match entry.read(&mut buffer)? {
                0 => break,
                n => hasher.update(&buffer[..n]),
            };
        }
        found.insert(hasher.finalize(), entry.size());
    }
    Ok(found)
}

/// Every file below a directory.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => found.extend(files(&entry.path())?),
            false => found.push(entry.path()),
        }
    }
    Ok(found)
}

/// Removes files from the page cache.
fn drop_cache(dir: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(dir)?)?; // dirty pages would stay
    for path in files(dir)? {
        rustix::fs::fadvise(File::open(path)?, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Bytes of files below a directory that are in the page cache.
fn cached_bytes(dir: &Path) -> Result<u64> {
    let mut sum = 0;
    for some in files(dir)?.chunks(1000) {
        let mut fincore = Command::new("fincore");
        let text = ok(fincore.args(["--bytes", "--noheadings", "--output", "RES"]).args(some))?;
        for line in text.lines() {
            sum += line.trim().parse::<u64>().context("no number from fincore")?;
        }
    }
    ensure!(sum % 4096 == 0, "the page cache consists of pages");
    Ok(sum)
}
