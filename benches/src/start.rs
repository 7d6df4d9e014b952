//! `run IMAGE true` to exit: Dormouse, its peers, and the floor of the kernel's own work; on a disk
//! with Debian's defaults, and on the repository's disk.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin start -- --rounds 50
//! cargo run --release -p dormouse-benches --bin start -- --part exec --part life --busy
//! ```
//!
//! | part | measures |
//! |---|---|
//! | `turns` | all arms in turn, quiet |
//! | `rows` | each arm eight times in a row |
//! | `busy` | in turn, and eight times in a row, beside eight busy loops of the host |
//! | `netns` | in turn, with a network stack of its own |
//! | `podman` | podman, for scale |
//! | `exec` | `true` in a running container |
//! | `life` | create, start and removal by a command each, also of `dormouse-oci` |
//! | `first` | the first run after a minute without one, and after a boot |
//! | `burst` | a hundred runs at once, also of podman |
//! | `sustained` | one run after the other on each processor: runs per second, and CPU time of the host per run |
//!
//! `turns` and `rows` are measured on both disks, the others on the repository's. With `--busy` all chosen parts run
//! beside the eight loops.
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use dormouse_benches::podman::Podman;
use dormouse_benches::{
    Arm, Bench, Disk, FLOOR_CGROUPS, Times, change, figure, installed, interleave, interleave_rows,
    medians, ok, promise,
};

#[path = "start/life.rs"]
mod life;
#[path = "start/load.rs"]
mod load;
#[path = "start/quiet.rs"]
mod quiet;
#[path = "start/running.rs"]
mod running;

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of each arm.
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Turns of podman, which is fifty times slower.
    #[arg(long, default_value_t = 5)]
    podman_rounds: usize,
    /// Bursts of each arm.
    #[arg(long, default_value_t = 3)]
    bursts: usize,
    /// Runs after a minute of quiet. Each takes a minute.
    #[arg(long, default_value_t = 5)]
    first_rounds: usize,
    /// Directory with the programs of another build, such as an earlier one, as another arm
    #[arg(long)]
    before: Option<PathBuf>,
    /// Beside eight busy loops of the host
    #[arg(long)]
    busy: bool,
    /// Only these parts
    #[arg(long, value_enum)]
    part: Vec<Part>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Turns,
    Rows,
    Busy,
    Netns,
    Podman,
    Exec,
    Life,
    First,
    Burst,
    Sustained,
}

/// Turns of an arm back to back.
const ROW: usize = 8;

/// The name of the arm with parts of containers made ahead.
const SPARES: &str = "spares";

/// The name of the arm with runners: processes that are ready execute its commands.
const RUNNERS: &str = "runners";

/// The name of the arm with both.
const BOTH: &str = "both";

/// The arms with other settings: pool, settings.
const SETTINGS: [(&str, &str, &str); 3] = [
    (SPARES, "10.132.0.0/14", "[spares]\nkeep = 8\n"),
    (RUNNERS, "10.144.0.0/14", "[keeper]\nrunners = 4\n"),
    (BOTH, "10.148.0.0/14", "[spares]\nkeep = 8\n[keeper]\nrunners = 4\n"),
];

/// The name of the arm of `--before`.
const BEFORE: &str = "before";

/// The name of the arm without a devpts.
const NO_DEVPTS: &str = "no devpts";

/// The name of the arm whose stack is connected to a domain. The peers connect theirs to nothing.
const PRIVATE: &str = "private";

/// The arms with a contract of CPU, memory and processes, with and without views of it.
const CONTRACTS: [(&str, &[&str]); 2] = [
    ("contract", &["--cpus", "1", "--memory", "256m", "--pids", "1000"]),
    ("c., no views", &["--cpus", "1", "--memory", "256m", "--pids", "1000", "--views", "no"]),
];

/// The name of the arm with a contract, views of it, and parts made ahead.
const SPARES_CONTRACT: &str = "c., spares";

fn main() -> Result<()> {
    let options = Options::parse();
    // First the disk on which nothing was ever removed.
    for disk in [Disk::Journaled, Disk::OfRepository] {
        measure(&options, disk)?;
    }
    Ok(())
}

fn measure(options: &Options, disk: Disk) -> Result<()> {
    let wanted = |part: Part| {
        let is_for_both = matches!(part, Part::Turns | Part::Rows);
        (options.part.is_empty() || options.part.contains(&part))
            && (is_for_both || disk == Disk::OfRepository)
    };
    if !Part::value_variants().iter().any(|part| wanted(*part)) {
        return Ok(());
    }
    let mut bench = Bench::on(disk)?;
    let hog = bench.path("hog");
    let begin_loops = || load::Loops::start(&hog, load::LOOPS);
    let loops = options.busy.then(begin_loops).transpose()?;
    let load = if options.busy { "beside eight busy loops" } else { "without busy loops" };
    let before = options.before.as_deref().map(|bin| bench.before(bin)).transpose()?;
    let others: Vec<(&str, Bench)> = SETTINGS
        .into_iter()
        .map(|(name, pool, settings)| Ok((name, bench.beside(pool, settings)?)))
        .collect::<Result<_>>()?;
    // Its nursery makes nothing for other arms.
    let limited = bench.beside("10.152.0.0/14", "[spares]\nkeep = 8\n")?;
    let arms = |netns| {
        let mut arms = start_arms(&bench, netns)?;
        // The cost of a devpts alone.
        arms.push(ours_with(NO_DEVPTS, &bench, mode(netns), &["--devpts", "no"]));
        let is_for = |name: &str| !netns || name == RUNNERS;
        arms.extend(
            others.iter().filter(|it| is_for(it.0)).map(|(name, it)| ours(name, it, netns)),
        );
        arms.extend(before.as_ref().map(|bench| ours(BEFORE, bench, netns)));
        anyhow::Ok(arms)
    };
    let mut shared = arms(false)?;
    if wanted(Part::Turns) {
        let plain = shared.len();
        shared.extend(CONTRACTS.map(|(name, words)| ours_with(name, &bench, mode(false), words)));
        shared.push(ours_with(SPARES_CONTRACT, &limited, mode(false), CONTRACTS[0].1));
        let times = interleave(&shared, options.rounds)?;
        report(&shared, &times, (disk, load), "shared or no network stack", 0.2);
        shared.truncate(plain);
    }
    if wanted(Part::Rows) {
        let times = interleave_rows(&shared, options.rounds, ROW)?;
        report(&shared, &times, (disk, load), "the same, eight times in a row", 0.35);
    }
    if wanted(Part::Busy) {
        let own = loops.is_none().then(begin_loops).transpose()?;
        let of_turns = interleave(&shared, options.rounds)?;
        let of_rows = interleave_rows(&shared, options.rounds, ROW)?;
        drop(own);
        let load = "beside eight busy loops";
        report(&shared, &of_turns, (disk, load), "shared or no network stack", 0.6);
        report(&shared, &of_rows, (disk, load), "the same, eight times in a row", 0.6);
    }
    if wanted(Part::Netns) {
        let mut own = arms(true)?;
        own.push(ours_with(PRIVATE, &bench, "private", &[]));
        let times = interleave(&own, options.rounds)?;
        report(&own, &times, (disk, load), "a network stack of its own", 0.4);
    }
    let needs_podman = (wanted(Part::Podman) || wanted(Part::Burst)) && options.podman_rounds > 0;
    let podman = (needs_podman && installed("podman")).then(|| Podman::new(&bench)).transpose()?;
    if let Some(podman) = podman.as_ref().filter(|_| wanted(Part::Podman)) {
        let arms = [ours("dormouse", &bench, true), of_podman(podman)];
        let times = interleave(&arms, options.podman_rounds)?;
        report(&arms, &times, (disk, load), "podman, for scale", 0.5);
    }
    if wanted(Part::Exec) {
        running::measure(&bench, &others, options.rounds, load)?;
    }
    if wanted(Part::Life) {
        life::measure(&bench, &others, options.rounds, load)?;
    }
    if wanted(Part::Sustained) {
        load::sustained(&shared, load, loops.is_some())?;
    }
    if wanted(Part::Burst) {
        shared.extend(podman.as_ref().map(of_podman));
        load::burst(&shared, options.bursts, load)?;
    }
    if wanted(Part::First) {
        quiet::measure(&bench, options.first_rounds, load)?;
    }
    Ok(())
}

/// The contenders that start in milliseconds.
fn start_arms(bench: &Bench, netns: bool) -> Result<Vec<Arm>> {
    let mut arms = vec![ours("dormouse", bench, netns)];
    if !netns && fs::metadata("/sys/fs/cgroup/memory").is_ok() {
        arms.push(floor(bench)?);
    }
    if installed("bwrap") {
        let rootfs = bench.path("rootfs");
        arms.push(Arm::new("bwrap", move |_| {
            let mut c = Command::new("bwrap");
            c.args(["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]);
            c.args(["--unshare-cgroup", "--ro-bind"]).arg(&rootfs).arg("/");
            c.args(["--proc", "/proc", "--dev", "/dev"]);
            if netns {
                c.arg("--unshare-net");
            }
            c.arg("/bin/true");
            c
        }));
    }
    for runtime in ["crun", "runc"] {
        if !installed(runtime) {
            eprintln!("{runtime} is not installed: not measured");
            continue;
        }
        let bundle = bench.bundle(&format!("bundle-{runtime}-{netns}"), netns)?;
        let state = bench.path(Bench::STATE).join(runtime);
        let mut arm = Arm::new(runtime, move |n| {
            let mut c = Command::new(runtime);
            c.arg("--root").arg(&state).args(["run", "--bundle"]).arg(&bundle);
            c.arg(format!("bench-{n}"));
            c
        });
        arm.hide_v2 = runtime == "crun";
        arms.push(arm);
    }
    Ok(arms)
}

fn ours(name: &str, bench: &Bench, netns: bool) -> Arm {
    ours_with(name, bench, mode(netns), &[])
}

/// The network mode in which a container has a stack of its own, or not.
fn mode(netns: bool) -> &'static str {
    if netns { "none" } else { "address" }
}

fn ours_with(
    name: &str,
    bench: &Bench,
    net: &'static str,
    options: &'static [&'static str],
) -> Arm {
    let (root, exe) = (bench.path("root"), bench.dormouse().get_program().to_owned());
    Arm::new(name, move |_| {
        let mut c = Command::new(&exe);
        c.arg("--root").arg(&root).args(["run", "--rm", "--net", net]);
        c.args(options).args(["bench", "true"]);
        c
    })
}

fn floor(bench: &Bench) -> Result<Arm> {
    let scratch = bench.path("floor-scratch");
    fs::create_dir_all(scratch.join("upper"))?;
    fs::create_dir_all(scratch.join("shm"))?;
    ok(Command::new("mount").args(["-t", "tmpfs", "floor"]).arg(scratch.join("shm")))?;
    for hierarchy in FLOOR_CGROUPS {
        fs::create_dir_all(format!("/sys/fs/cgroup/{hierarchy}/floor-bench"))?;
    }
    let (floor, rootfs) = (bench.path("floor"), bench.path("rootfs"));
    Ok(Arm::new("floor", move |n| {
        let mut c = Command::new(&floor);
        c.arg(&rootfs).arg(&scratch).arg(format!("n{n}")).arg("/bin/true");
        c
    }))
}

fn of_podman(podman: &Podman) -> Arm {
    let podman = podman.clone();
    Arm::new("podman", move |_| {
        let mut command = podman.run();
        command.args(["--rm", "bench", "/bin/true"]);
        command
    })
}

/// Prints one JSON line per arm, a table with bars, and the promises.
fn report(arms: &[Arm], times: &[Times], (disk, load): (Disk, &str), title: &str, of_crun: f64) {
    eprintln!("\nrun IMAGE true to exit, {title}, on {disk}, {load} (ms)");
    eprintln!("  {:<12} {:>8} {:>8} {:>8}", "", "median", "min", "p95");
    let of = medians(arms, times);
    let longest = times.iter().map(Times::median_ms).fold(0.0, f64::max);
    for (arm, t) in arms.iter().zip(times) {
        let median = t.median_ms();
        let bar = "#".repeat((median / longest * 40.0).round() as usize);
        let (min, p95) = (t.at(0.0), t.at(0.95));
        eprintln!("  {:<12} {median:>8.2} {min:>8.2} {p95:>8.2}  {bar}", arm.name);
        let more = serde_json::json!({
            "network": title, "disk": disk.to_string(), "load": load, "min_ms": min, "p95_ms": p95,
        });
        figure("start", &arm.name, median, "ms", more);
    }
    let Some(ours) = of("dormouse") else { return };
    if let Some(crun) = of("crun") {
        promise("of crun", ours / crun, of_crun);
    }
    if let Some(floor) = of("floor") {
        promise("of the floor", ours / floor, 2.0);
    }
    if let Some(bwrap) = of("bwrap") {
        promise("of bwrap", ours / bwrap, 1.0);
    }
    for (name, of_bwrap) in [(SPARES, 0.6), (RUNNERS, 1.0), (BOTH, 0.6)] {
        let Some(with) = of(name) else { continue };
        if let Some(bwrap) = of("bwrap") {
            promise(&format!("{name}, of bwrap"), with / bwrap, of_bwrap);
        }
        if let Some(crun) = of("crun") {
            promise(&format!("{name}, of crun"), with / crun, of_crun);
        }
    }
    for (name, _) in CONTRACTS {
        if let Some(with) = of(name) {
            promise(&format!("{name}, of a start without one"), with / ours, 1.02);
        }
    }
    if let (Some(with), Some(spares)) = (of(SPARES_CONTRACT), of(SPARES)) {
        promise(&format!("{SPARES_CONTRACT}, of a start without one"), with / spares, 1.02);
    }
    if let Some(before) = of(BEFORE) {
        change("median", ours, before);
    }
}
