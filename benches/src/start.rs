//! `run IMAGE true` to exit: Dormouse, its peers, and the floor of the kernel's own work; on a disk
//! with Debian's defaults, and on the repository's disk.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin start -- --rounds 50
//! ```
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use clap::Parser;
use dormouse_benches::podman::Podman;
use dormouse_benches::{
    Arm, Bench, Disk, FLOOR_CGROUPS, Times, change, figure, installed, interleave, interleave_rows,
    ok, promise,
};

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of each arm.
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Turns of podman, which is fifty times slower.
    #[arg(long, default_value_t = 5)]
    podman_rounds: usize,
    /// Directory with the programs of another build, such as an earlier one, as another arm
    #[arg(long)]
    before: Option<PathBuf>,
}

/// Turns of an arm back to back.
const ROW: usize = 8;

/// The name of the arm in which no part of a container is made ahead.
const SPARES: &str = "spares";

/// The name of the arm of `--before`.
const BEFORE: &str = "before";

/// The name of the arm without a devpts.
const NO_DEVPTS: &str = "no devpts";

/// The name of the arm whose stack is connected to a domain. The peers connect theirs to nothing.
const PRIVATE: &str = "private";

fn main() -> Result<()> {
    let options = Options::parse();
    // First the disk on which nothing was ever removed.
    for disk in [Disk::Journaled, Disk::OfRepository] {
        let mut bench = Bench::on(disk)?;
        let before = options.before.as_deref().map(|bin| bench.before(bin)).transpose()?;
        let ahead = bench.with_spares()?;
        let arms = |netns| {
            let mut arms = start_arms(&bench, netns)?;
            // The cost of a devpts alone.
            arms.push(ours_with(NO_DEVPTS, &bench, mode(netns), &["--devpts", "no"]));
            arms.extend((!netns).then(|| ours(SPARES, &ahead, netns)));
            arms.extend(before.as_ref().map(|bench| ours(BEFORE, bench, netns)));
            anyhow::Ok(arms)
        };
        let shared = arms(false)?;
        let times = interleave(&shared, options.rounds)?;
        report(&shared, &times, disk, "shared or no network stack", 0.5);
        let times = interleave_rows(&shared, options.rounds, ROW)?;
        report(&shared, &times, disk, "the same, eight times in a row", 0.5);
        let mut own = arms(true)?;
        own.push(ours_with(PRIVATE, &bench, "private", &[]));
        report(&own, &interleave(&own, options.rounds)?, disk, "a network stack of its own", 0.6);
        if disk == Disk::OfRepository && installed("podman") && options.podman_rounds > 0 {
            let podman = podman(&bench)?;
            let times = interleave(&podman, options.podman_rounds)?;
            report(&podman, &times, disk, "podman, for scale", 0.5);
        }
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

fn podman(bench: &Bench) -> Result<Vec<Arm>> {
    let podman = Podman::new(bench)?;
    let arm = Arm::new("podman", move |_| {
        let mut command = podman.run();
        command.args(["--rm", "bench", "/bin/true"]);
        command
    });
    Ok(vec![ours("dormouse", bench, true), arm])
}

/// Prints one JSON line per arm, a table with bars, and the promises.
fn report(arms: &[Arm], times: &[Times], disk: Disk, title: &str, of_crun: f64) {
    eprintln!("\nrun IMAGE true to exit, {title}, on {disk} (ms)");
    eprintln!("  {:<10} {:>8} {:>8} {:>8}", "", "median", "min", "p95");
    let of = |name: &str| arms.iter().position(|a| a.name == name).map(|i| times[i].median_ms());
    let longest = times.iter().map(Times::median_ms).fold(0.0, f64::max);
    for (arm, t) in arms.iter().zip(times) {
        let median = t.median_ms();
        let bar = "#".repeat((median / longest * 40.0).round() as usize);
        let (min, p95) = (t.at(0.0), t.at(0.95));
        eprintln!("  {:<10} {median:>8.2} {min:>8.2} {p95:>8.2}  {bar}", arm.name);
        let more = serde_json::json!({"network": title, "disk": disk.to_string(), "min_ms": min, "p95_ms": p95});
        figure("start", &arm.name, median, "ms", more);
    }
    let Some(ours) = of("dormouse") else { return };
    if let Some(crun) = of("crun") {
        promise("of crun", ours / crun, of_crun);
    }
    if let Some(floor) = of("floor") {
        promise("of the floor", ours / floor, 2.0);
    }
    if let Some(before) = of(BEFORE) {
        change("median", ours, before);
    }
}
