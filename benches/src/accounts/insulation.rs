//! Insulation: what a client of a shared service has, while another one has ever more requests served.
//!
//! Two sites share one single-threaded backend, as in the paper's experiment with FastCGI (Reumann et al., section 5).
//! Site A has 30 workers, site B from 10 to 90. A worker thinks for 170 ms in the mean, works for 1 ms, and in three of
//! ten cases has the backend work for up to 10 ms. All work on one processor, which others on the machine have after
//! them. The arms take turns:
//!
//! - *none*: without gates;
//! - *gates*: gates charge, and nothing else;
//! - *order*: clients pay for the backend (debts), and it has their connections in turn;
//! - *replicated*: each site has a backend of its own, inside.
//!
//! *Price*, a part of its own: connect, request, answer and close, where no other connection waits. Client, server and
//! daemon are on one processor.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use dormouse_benches::{Bench, Daemon, Line, cpu_time, figure, median, ok, plot, promise};
use dormouse_testkit::{image, wait_until};

use crate::PATIENCE;

/// Workers of site A.
const WORKERS: u32 = 30;
/// Workers of site B.
const LOADS: [u32; 4] = [10, 30, 60, 90];
/// Connections of which the price is the median.
const CONNECTIONS: u32 = 5_000;
pub(super) const ONE_CPU: [&str; 2] = ["--cpuset-cpus", "0"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    None,
    Gates,
    Order,
    Replicated,
}

const ARMS: [Arm; 4] = [Arm::None, Arm::Gates, Arm::Order, Arm::Replicated];

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gates => "gates",
            Self::Order => "order",
            Self::Replicated => "replicated",
        }
    }
}

/// Operations a second of a site, and their mean duration.
#[derive(Debug, Clone, Copy, Default)]
struct Got {
    rate: f64,
    ms: f64,
}

fn run(bench: &Bench, name: &str, options: &[&str], command: &[&str]) -> Result<()> {
    let mut run = bench.dormouse();
    run.args(["run", "-d", "--name", name]).args(ONE_CPU).args(options).arg("probes");
    ok(run.args(command)).map(drop)
}

/// Has the containers of the benchmark get the processor before all others on the machine. `name` is one of them.
pub(super) fn take_processor(bench: &Bench, name: &str) -> Result<()> {
    let text = ok(bench.dormouse().args(["inspect", "--json", name]))?;
    let record: serde_json::Value = serde_json::from_str(&text)?;
    let pid = record.get(0).unwrap_or(&record)["pid"].as_u64().context("no pid")?;
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let is_cpu = |part: &str| part.split(',').any(|controller| controller == "cpu");
    let of = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let above = Path::new(path.trim_start_matches('/')).parent()?.to_owned();
        match controllers {
            "" => Some((Path::new("/sys/fs/cgroup").join(above), "cpu.weight", "10000")),
            some if is_cpu(some) => {
                Some((Path::new("/sys/fs/cgroup/cpu").join(above), "cpu.shares", "262144"))
            }
            _ => None,
        }
    };
    let file = |(dir, file, most): (PathBuf, &str, &'static str)| (dir.join(file), most);
    let found = groups.lines().filter_map(of).map(file).find(|(path, _)| path.exists());
    let (path, most) = found.context("no cgroup with a weight")?;
    fs::write(&path, most).with_context(|| format!("cannot write {}", path.display()))
}

/// Gates, and a daemon, as an arm has them.
pub(super) struct Set {
    daemon: Option<Daemon>,
}

impl Set {
    pub(super) fn begin(bench: &Bench, is_loaded: bool, has_order: bool) -> Result<Self> {
        let path = bench.path("root/etc/config.toml");
        fs::create_dir_all(bench.path("root/etc"))?;
        let plain = fs::read_to_string(&path).unwrap_or_default();
        let plain = plain.split("[contract]").next().unwrap_or_default().to_owned();
        let own = format!("[contract]\nservice-debt = {has_order}\nservice-order = {has_order}\n");
        fs::write(&path, plain + &own)?;
        if is_loaded {
            ok(bench.dormouse().args(["gate", "load"]))?;
        }
        let daemon = has_order.then(|| bench.daemon(&["--memory", "off"])).transpose()?;
        Ok(Self { daemon })
    }

    pub(super) fn end(self, bench: &Bench) -> Result<()> {
        drop(self.daemon);
        ok(bench.dormouse().args(["gate", "unload"])).map(drop)
    }
}

/// Waits until a service answers, and, with an order, until its connections are held.
fn await_service(bench: &Bench, client: &str, service: &str, has_order: bool) -> Result<()> {
    let ask =
        || ok(bench.dormouse().args(["exec", client, "probe", "work", service, "80", "1", "0"]));
    ensure!(wait_until(PATIENCE, || ask().is_ok()), "{service} does not answer");
    await_order(bench, has_order)
}

/// Waits until connections are held, or are not.
pub(super) fn await_order(bench: &Bench, has_order: bool) -> Result<()> {
    let net = bench.path("root/run/domains/default/net");
    let list = || {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", net.display())).args(["nft", "list", "ruleset"]);
        ok(&mut command).is_ok_and(|rules| rules.contains("dormouse_order"))
    };
    ensure!(wait_until(PATIENCE, || list() == has_order), "no order of connections");
    Ok(())
}

fn site(bench: &Bench, name: &str, backend: &str, workers: u32, seconds: u64) -> Result<Child> {
    let mut exec = bench.dormouse();
    exec.args(["exec", name, "probe", "site", backend, "80"]);
    exec.args([workers.to_string(), seconds.to_string()]);
    Ok(exec.stdout(Stdio::piped()).spawn()?)
}

fn got(child: Child, seconds: u64) -> Result<Got> {
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "a site fails: {output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut numbers = text.split_whitespace().map(str::parse::<f64>);
    let mut next = || numbers.next().context("no figure")?.context("no number");
    Ok(Got { rate: next()? / seconds as f64, ms: next()? / 1e3 })
}

/// Both sites of one arm, with these weights. `others` is 0 where A is alone.
fn turn(bench: &Bench, arm: Arm, weights: [u32; 2], others: u32, seconds: u64) -> Result<[Got; 2]> {
    let set = Set::begin(bench, matches!(arm, Arm::Gates | Arm::Order), arm == Arm::Order)?;
    let backend = ["probe", "burn-one", "0.0.0.0", "80"];
    for (name, weight) in ["a", "b"].iter().zip(weights) {
        let command: &[&str] =
            if arm == Arm::Replicated { &backend } else { &["sleep", "1000000"] };
        run(bench, name, &["--cpu-weight", &weight.to_string()], command)?;
    }
    if arm != Arm::Replicated {
        run(bench, "svc", &["--shared"], &backend)?;
    }
    take_processor(bench, "a")?;
    let backends = if arm == Arm::Replicated { ["a", "b"] } else { ["svc", "svc"] };
    for (name, backend) in ["a", "b"].iter().zip(backends) {
        await_service(bench, name, backend, arm == Arm::Order)?;
    }
    let mut sites = vec![site(bench, "a", backends[0], WORKERS, seconds)?];
    if others > 0 {
        sites.push(site(bench, "b", backends[1], others, seconds)?);
    }
    let mut both = [Got::default(); 2];
    for (got_by, child) in both.iter_mut().zip(sites) {
        *got_by = got(child, seconds)?;
    }
    ok(bench.dormouse().args(["rm", "--force", "a", "b"]))?;
    if arm != Arm::Replicated {
        ok(bench.dormouse().args(["rm", "--force", "svc"]))?;
    }
    set.end(bench)?;
    Ok(both)
}

/// All turns of all arms for one load: the medians of both sites.
fn point(
    bench: &Bench,
    weights: [u32; 2],
    others: u32,
    (rounds, seconds): (usize, u64),
) -> Result<Vec<[Got; 2]>> {
    let mut all: Vec<Vec<[Got; 2]>> = ARMS.map(|_| Vec::new()).to_vec();
    for round in 0..rounds {
        for step in 0..ARMS.len() {
            let n = (step + round) % ARMS.len();
            all[n].push(turn(bench, ARMS[n], weights, others, seconds)?);
        }
    }
    let middle = |turns: &Vec<[Got; 2]>, of: usize, what: fn(&Got) -> f64| {
        median(turns.iter().map(|both| what(&both[of])).collect())
    };
    let both = |turns: &Vec<[Got; 2]>| {
        [0, 1].map(|of| Got {
            rate: middle(turns, of, |got| got.rate),
            ms: middle(turns, of, |got| got.ms),
        })
    };
    Ok(all.iter().map(both).collect())
}

pub(super) fn insulation(bench: &Bench, rounds: usize, seconds: u64) -> Result<()> {
    for (shares, weights, loads) in
        [("50:50", [100, 100], &LOADS[..]), ("80:20", [400, 100], &LOADS[3..])]
    {
        let alone = turn(bench, Arm::None, weights, 0, seconds)?[0];
        eprintln!("  {shares}, A alone: {:.0}/s ({:.1} ms)", alone.rate, alone.ms);
        let mut lines: Vec<Vec<(f64, f64)>> = ARMS.map(|_| Vec::new()).to_vec();
        for others in loads {
            let got = point(bench, weights, *others, (rounds, seconds))?;
            for (n, (arm, [a, b])) in ARMS.iter().zip(&got).enumerate() {
                let name = format!("insulation {shares}, 30 and {others} workers, {}", arm.name());
                eprintln!(
                    "  {name}: A {:.0}/s ({:.1} ms), B {:.0}/s ({:.1} ms)",
                    a.rate, a.ms, b.rate, b.ms
                );
                let more = serde_json::json!({
                    "rounds": rounds, "a_ms": a.ms, "b_rate": b.rate, "b_ms": b.ms, "alone_ms": alone.ms,
                });
                figure("accounts", &name, a.rate, "1/s", more);
                lines[n].push((f64::from(*others), a.rate));
            }
            let [order, replicated] = [got[2][0], got[3][0]];
            if *others == LOADS[3] {
                let name = format!("insulation {shares}: replicated to ordered throughput of A");
                promise(&name, replicated.rate / order.rate, 1.0 / 0.95);
                let name = format!("insulation {shares}: time of A beside the unloaded one");
                promise(&name, order.ms / alone.ms, 1.5);
            }
        }
        if loads.len() > 1 {
            let lines: Vec<Line<'_>> = ARMS
                .iter()
                .zip(lines)
                .map(|(arm, points)| Line { name: arm.name(), points })
                .collect();
            let axes = ["workers of site B", "operations of site A a second"];
            plot("insulation", "Two sites with one single-threaded backend", axes, &lines)?;
        }
    }
    Ok(())
}

/// Makes the image of both parts.
pub(super) fn import(bench: &Bench) -> Result<()> {
    ok(bench.dormouse().args(["import", "--name", "probes"]).arg(image::busybox())).map(drop)
}

/// What the order adds to a connection where none waits. Of `earlier`, only the arm with an order is measured.
pub(super) fn price(bench: &Bench, earlier: Option<&Bench>, rounds: usize) -> Result<()> {
    let arms = [
        ("without gates", Some(bench), Arm::None),
        ("with gates", Some(bench), Arm::Gates),
        ("with order", Some(bench), Arm::Order),
        ("with order, before", earlier, Arm::Order),
    ];
    let arms: Vec<(&str, &Bench, Arm)> =
        arms.into_iter().filter_map(|(name, bench, arm)| Some((name, bench?, arm))).collect();
    let mut all: Vec<[Vec<f64>; 2]> = arms.iter().map(|_| Default::default()).collect();
    for round in 0..rounds * 2 {
        for step in 0..arms.len() {
            let n = (step + round) % arms.len();
            let (_, bench, arm) = arms[n];
            for (figures, figure) in all[n].iter_mut().zip(visits(bench, arm)?) {
                figures.push(figure);
            }
        }
    }
    let least = |figures: &[f64]| figures.iter().copied().fold(f64::INFINITY, f64::min);
    let mut middles = Vec::new();
    for ((name, ..), figures) in arms.iter().zip(all) {
        let least = least(&figures[0]);
        let [us, daemon] = figures.map(median);
        eprintln!(
            "  a connection {name}: {us:.1} us, least {least:.1}; the daemon uses {daemon:.1} us for it"
        );
        let more = serde_json::json!({ "rounds": rounds * 2, "least": least, "daemon": daemon });
        figure("accounts", &format!("connect, request, answer, close: {name}"), us, "us", more);
        middles.push(us);
    }
    let [_, gates, order] = [0, 1, 2].map(|n| middles[n]);
    promise("insulation: what the order adds to a connection, us", order - gates, 15.0);
    Ok(())
}

/// A turn of an arm: the median duration of a connection, and CPU time of the daemon for each, in microseconds.
fn visits(bench: &Bench, arm: Arm) -> Result<[f64; 2]> {
    let set = Set::begin(bench, arm != Arm::None, arm == Arm::Order)?;
    run(bench, "svc", &["--shared"], &["probe", "burn-one", "0.0.0.0", "80"])?;
    run(bench, "a", &[], &["sleep", "1000000"])?;
    take_processor(bench, "a")?;
    await_service(bench, "a", "svc", arm == Arm::Order)?;
    if let Some(daemon) = &set.daemon {
        let pid = daemon.pid().to_string();
        ok(Command::new("taskset").args(["-a", "-c", "-p", "0", &pid]))?;
    }
    let of_daemon = || set.daemon.as_ref().map(|daemon| cpu_time(daemon.pid())).transpose();
    let before = of_daemon()?;
    let mut visit = bench.dormouse();
    visit.args(["exec", "a", "probe", "visit", "svc", "80", &CONNECTIONS.to_string()]);
    let us = ok(&mut visit)?.trim().parse::<f64>().context("no figure")? / 1e3;
    let daemon_us = match (before, of_daemon()?) {
        (Some(before), Some(after)) => (after - before) * 1e6 / f64::from(CONNECTIONS),
        _ => 0.0,
    };
    ok(bench.dormouse().args(["rm", "--force", "a", "svc"]))?;
    set.end(bench)?;
    Ok([us, daemon_us])
}
