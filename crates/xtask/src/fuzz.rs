//! The fuzzers: every reader of outside data against libFuzzer, `cargo xtask fuzz`.
//!
//! A target is a file in `fuzz/targets`. Our crates are compiled for it with the coverage counters of
//! LLVM, which every rustc has (`fuzz/rustc`), so no other toolchain is needed; memory errors are not
//! looked for by a sanitizer, since the readers hold no `unsafe`. What a run may take is bounded: memory,
//! the time of one input, its length. With `--compares` a second program runs for a part of the time, in
//! which every comparison is traced and how close its sides come to each other is followed
//! (`fuzz/rustc-compares`): it finds what counters do not, ten times slower.
//!
//! ```text
//!   fuzz/corpus/TARGET.tar       inputs that together reach all that was ever reached, minimized
//!   fuzz/ledger.json             executions and seconds of all recorded runs, per target
//!   target/fuzz/corpus/TARGET/   the corpus at work
//!   target/fuzz/found/           inputs that broke a promise
//! ```
//!
//! `--record` adds a run to the ledger and what it found out to the corpus. A finding fails the
//! run; its input becomes a test beside the reader, and stays in the corpus.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cargo::cargo;

/// Bytes of an input at most: every reader's limits are below.
const INPUT_BYTES_MAX: u32 = 16 << 10;
/// Bytes of a short one: enough for every structure there is.
const SHORT_BYTES_MAX: u32 = 1 << 10;
/// The part of a run's time in which inputs may be long, which takes five times as long for each: one of
/// so many.
const PART_WITH_LONG_INPUTS: u64 = 4;
/// LIMIT: memory of a fuzzer; a reader that takes more from so small an input is broken.
const MEMORY_MIB_MAX: u32 = 512;
/// LIMIT: seconds for one input.
const INPUT_SECONDS_MAX: u32 = 5;
/// The part of a run's time in which comparisons are followed: one of so many.
const PART_THAT_FOLLOWS_COMPARISONS: u64 = 5;
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// Options of `cargo xtask fuzz`.
#[derive(Args)]
pub struct FuzzArgs {
    /// Seconds for each target.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Less of a target of which the ledger has so many executions by then, none if it has them.
    #[arg(long, value_name = "EXECUTIONS")]
    until: Option<u64>,
    /// How many targets run side by side.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// A fifth of the time goes to programs that trace comparisons; they are compiled for it.
    #[arg(long)]
    compares: bool,
    /// Adds the runs to the ledger and what they found out to the corpus.
    #[arg(long)]
    record: bool,
    /// The targets; all, if none is named.
    targets: Vec<String>,
}

/// What was run of one target, over all recorded runs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Count {
    executions: u64,
    seconds: u64,
}

impl std::ops::Add for Count {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        let executions = self.executions + more.executions;
        Self { executions, seconds: self.seconds + more.seconds }
    }
}

/// What the programs of a target were compiled to tell.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// How often each edge was gone along.
    Counters,
    /// And what was compared with what.
    Compares,
}

impl Kind {
    /// The compiler in `fuzz`.
    fn compiler(self) -> &'static str {
        match self {
            Self::Counters => "rustc",
            Self::Compares => "rustc-compares",
        }
    }

    /// Where its programs are, in `target/fuzz`.
    fn dir(self) -> &'static str {
        match self {
            Self::Counters => "counters",
            Self::Compares => "compares",
        }
    }
}

/// How one run ended.
struct Run {
    count: Count,
    clean: bool,
}

/// Builds and runs fuzzers.
pub fn run(top: &Path, args: &FuzzArgs) -> Result<ExitCode> {
    let house = House { top: top.to_owned() };
    let all = house.targets()?;
    if let Some(unknown) = args.targets.iter().find(|name| !all.contains(name)) {
        bail!("no such target: {unknown}; there are {}", all.join(" "));
    }
    let wanted: Vec<&String> =
        all.iter().filter(|name| args.targets.is_empty() || args.targets.contains(name)).collect();
    if args.compares {
        house.build(&all, Kind::Compares)?;
    }
    house.build(&all, Kind::Counters)?;
    let queue = Mutex::new(wanted.iter());
    let ledger = Mutex::new(house.ledger()?);
    let runs: Mutex<BTreeMap<&str, Run>> = Mutex::default();
    thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().expect("no holder panics").next();
                let Some(name) = next else { return Ok(()) };
                let so_far =
                    *ledger.lock().expect("no holder panics").entry((*name).clone()).or_default();
                let most = args.until.map(|until| until.saturating_sub(so_far.executions));
                if most == Some(0) {
                    continue;
                }
                let run = house.fuzz(name, args, most)?;
                let mut ledger = ledger.lock().expect("no holder panics");
                ledger.insert((*name).clone(), so_far + run.count);
                if args.record {
                    house.record(&ledger)?;
                    drop(ledger);
                    house.keep_corpus(name)?;
                }
                runs.lock().expect("no holder panics").insert(name, run);
            }
        };
        let workers: Vec<_> = (0..args.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|w| w.join().expect("a worker returns its errors"))
    })?;
    let runs = runs.into_inner().expect("no holder panics");
    let ledger = ledger.into_inner().expect("no holder panics");
    println!("{:<14} {:>14} {:>8} {:>16}", "target", "executions", "seconds", "in all so far");
    for (name, Run { count, clean }) in &runs {
        let word = if *clean { "" } else { "  FOUND SOMETHING: target/fuzz/found" };
        let (now, seconds, so_far) = (count.executions, count.seconds, ledger[*name].executions);
        println!("{name:<14} {now:>14} {seconds:>8} {so_far:>16}{word}");
    }
    Ok(if runs.values().all(|run| run.clean) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct House {
    top: PathBuf,
}

impl House {
    fn work(&self) -> PathBuf {
        self.top.join("target/fuzz")
    }

    /// Inputs that broke a promise.
    fn found(&self) -> PathBuf {
        self.work().join("found")
    }

    fn program(&self, name: &str, kind: Kind) -> PathBuf {
        self.work().join(kind.dir()).join(name)
    }

    fn corpus_file(&self, name: &str) -> PathBuf {
        self.top.join("fuzz/corpus").join(name).with_extension("tar")
    }

    fn targets(&self) -> Result<Vec<String>> {
        let dir = self.top.join("fuzz/targets");
        let mut names = Vec::new();
        for entry in fs::read_dir(&dir).with_context(|| format!("listing {}", dir.display()))? {
            let path = entry?.path();
            if let Some(stem) = path.file_stem().filter(|_| path.extension().is_some()) {
                names.push(stem.to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Compiles all targets. Cargo has one place for the programs of both kinds, and makes those anew
    /// whose compiler has another name than the time before: each kind is kept in a place of its own.
    fn build(&self, targets: &[String], kind: Kind) -> Result<()> {
        let status = cargo()
            .args(["build", "--release", "--locked"])
            .args(["--package", "dormouse-fuzz", "--features", "fuzzing"])
            .env("RUSTC_WORKSPACE_WRAPPER", self.top.join("fuzz").join(kind.compiler()))
            .current_dir(&self.top)
            .status()
            .context("starting cargo")?;
        ensure!(status.success(), "the fuzzers do not compile");
        let built = self.top.join("target").join(TRIPLE).join("release");
        fs::create_dir_all(self.work().join(kind.dir()))?;
        for name in targets {
            let program = self.program(name, kind);
            let _ = fs::remove_file(&program); // of another build, or none
            fs::copy(built.join(format!("fuzz-{name}")), &program)
                .with_context(|| format!("keeping {}", program.display()))?;
        }
        Ok(())
    }

    /// Runs one target, beginning with the kept corpus, so long and so often at most.
    fn fuzz(&self, name: &str, args: &FuzzArgs, most: Option<u64>) -> Result<Run> {
        let corpus = self.work().join("corpus").join(name);
        fs::create_dir_all(&corpus)?;
        if let Ok(file) = fs::File::open(self.corpus_file(name)) {
            tar::Archive::new(file).unpack(&corpus).context("unpacking the corpus")?;
        }
        fs::create_dir_all(self.found())?;
        let part = |divisor: u64| args.seconds.div_ceil(divisor);
        let following = if args.compares { part(PART_THAT_FOLLOWS_COMPARISONS) } else { 0 };
        let long = part(PART_WITH_LONG_INPUTS);
        let short = args.seconds.saturating_sub(following + long);
        let mut legs = vec![
            (Kind::Compares, following, INPUT_BYTES_MAX),
            (Kind::Counters, long, INPUT_BYTES_MAX),
            (Kind::Counters, short, SHORT_BYTES_MAX),
        ];
        legs.retain(|(_, seconds, _)| *seconds > 0);
        let mut run = Run { count: Count::default(), clean: true };
        for (kind, seconds, bytes_max) in legs {
            let most = most.map(|most| most.saturating_sub(run.count.executions));
            if run.clean && most != Some(0) {
                let leg = self.leg(name, kind, seconds, bytes_max, most)?;
                run = Run { count: run.count + leg.count, clean: leg.clean };
            }
        }
        Ok(run)
    }

    /// One process of a run.
    fn leg(
        &self,
        name: &str,
        kind: Kind,
        seconds: u64,
        bytes_max: u32,
        most: Option<u64>,
    ) -> Result<Run> {
        let follows_values = matches!(kind, Kind::Compares);
        let mut child = Command::new(self.program(name, kind))
            .arg(self.work().join("corpus").join(name))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-max_len={bytes_max}"))
            .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
            .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
            .arg(format!("-artifact_prefix={}/{name}-", self.found().display()))
            .arg(format!("-use_value_profile={}", u8::from(follows_values)))
            .arg("-print_final_stats=1")
            .args(most.map(|most| format!("-runs={most}")))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting the fuzzer {name}"))?;
        let began = Instant::now();
        let stderr = child.stderr.take().context("the fuzzer has no stderr")?;
        let mut executions = 0;
        let mut last = Vec::new();
        for line in BufReader::new(stderr).lines() {
            let line = line?;
            if let Some(number) = line.strip_prefix("stat::number_of_executed_units:") {
                executions = number.trim().parse()?;
            }
            // `#1048576 pulse ...` and the like say how far it is.
            if line.starts_with('#') && line.contains("pulse") {
                println!("{name}: {line}");
            } else if !line.starts_with('#') {
                last.push(line);
            }
        }
        let clean = child.wait()?.success();
        if !clean {
            println!("{name}:\n{}", last.join("\n"));
        }
        Ok(Run { count: Count { executions, seconds: began.elapsed().as_secs() }, clean })
    }

    fn ledger(&self) -> Result<BTreeMap<String, Count>> {
        match fs::read(self.top.join("fuzz/ledger.json")) {
            Ok(text) => serde_json::from_slice(&text).context("fuzz/ledger.json"),
            Err(_) => Ok(BTreeMap::new()),
        }
    }

    fn record(&self, ledger: &BTreeMap<String, Count>) -> Result<()> {
        let text = serde_json::to_string_pretty(ledger)? + "\n";
        fs::write(self.top.join("fuzz/ledger.json"), text).context("writing the ledger")
    }

    /// Keeps the smallest inputs that reach what all of the corpus reaches.
    fn keep_corpus(&self, name: &str) -> Result<()> {
        let all = self.work().join("corpus").join(name);
        let least = tempfile::tempdir_in(self.work())?;
        let status = Command::new(self.program(name, Kind::Counters))
            .args(["-merge=1", "-rss_limit_mb=2048"])
            .arg(least.path())
            .arg(&all)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        ensure!(status.success(), "the corpus of {name} does not merge");
        let mut inputs: Vec<PathBuf> =
            fs::read_dir(least.path())?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
        inputs.sort();
        fs::create_dir_all(self.top.join("fuzz/corpus"))?;
        let mut tar = tar::Builder::new(fs::File::create(self.corpus_file(name))?);
        for input in &inputs {
            let bytes = fs::read(input)?;
            let mut header = tar::Header::new_ustar();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, input.file_name().unwrap_or_default(), &bytes[..])?;
        }
        tar.finish()?;
        println!("{name}: {} inputs are kept", inputs.len());
        Ok(())
    }
}
