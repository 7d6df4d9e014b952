//! Accounts: whether shared services charge their clients in the proportion of their work, what a passage costs, and
//! what gates cost a web server.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin accounts -- --part services
//! ```
//!
//! **services**: unmodified servers work for two customers, one of which is abusive (accounts/services.rs).
//!
//! **gates**: requests and answers of one byte between two containers, without gates, and with rules that do not
//! match, that match and change nothing, and that change the label at each request.
//!
//! **http**: requests that nginx serves for each second of its CPU time, over kept connections and over new ones,
//! without gates and with them. The arms take turns.
//!
//! **bill**: a day of a small hoster, compressed: 200 sites with one front and one database, and the bill of each site
//! beside the cost of its requests (accounts/bill.rs).
//!
//! **price**: connect, request, answer and close, without gates, with gates, and with an order of connections.
//! `--before DIR` has the programs of an earlier build in the same run.
//!
//! **insulation**: two sites share a single-threaded backend, under rising load of one of them, without gates, with
//! gates, with an order of connections, and with a backend for each (accounts/insulation.rs).
#![forbid(unsafe_code)]

#[path = "accounts/bill.rs"]
mod bill;
#[path = "accounts/insulation.rs"]
mod insulation;
#[path = "accounts/services.rs"]
mod services;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use dormouse_benches::{Bench, figure, median, ok};
use dormouse_testkit::{image, wait_until};

/// Options.
#[derive(Parser)]
struct Options {
    /// Which parts; all by default.
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<Part>,
    /// Turns of each arm.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only these services.
    #[arg(long, value_delimiter = ',')]
    service: Vec<String>,
    /// Sites of the hoster, for bills.
    #[arg(long, default_value_t = 200)]
    sites: usize,
    /// Duration of the hoster's day, in seconds.
    #[arg(long, default_value_t = 180)]
    seconds: u64,
    /// Mean requests a second of that day, to all sites.
    #[arg(long, default_value_t = 150.0)]
    rate: f64,
    /// Programs of an earlier build (dormouse and dormouse-keeper), for the price beside.
    #[arg(long, value_name = "DIR")]
    before: Option<PathBuf>,
    /// Duration of each load of two sites, in seconds.
    #[arg(long, default_value_t = 5)]
    point_seconds: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Services,
    Gates,
    Http,
    Bill,
    Price,
    Insulation,
}

/// LIMIT: the time until a server answers.
const PATIENCE: Duration = Duration::from_secs(60);
const CUSTOMERS: [&str; 2] = ["a", "b"];

fn main() -> Result<()> {
    let options = Options::parse();
    let wants = |part| options.part.is_empty() || options.part.contains(&part);
    // Before the network namespace of the benchmark, which has no packages.
    let needs_services = [Part::Services, Part::Http, Part::Bill].into_iter().any(wants);
    let services = needs_services.then(image::services);
    let mut bench = Bench::new()?;
    let before = options.before.as_deref().map(|bin| bench.before(bin)).transpose()?;
    if let Some(services) = services {
        ok(bench.dormouse().args(["import", "--name", "services"]).arg(services))?;
    }
    if wants(Part::Services) {
        services::services(&bench, &options.service, options.rounds)?;
    }
    if wants(Part::Gates) {
        gates(&bench, options.rounds)?;
    }
    if wants(Part::Http) {
        http(&bench, options.rounds)?;
    }
    if wants(Part::Bill) {
        let time = Duration::from_secs(options.seconds);
        let day = bill::Day { sites: options.sites, time, rate: options.rate };
        bill::bill(&bench, services::POSTGRESQL, day)?;
    }
    if wants(Part::Price) || wants(Part::Insulation) {
        insulation::import(&bench)?;
    }
    if wants(Part::Price) {
        if let Some(before) = &before {
            insulation::import(before)?;
        }
        insulation::price(&bench, before.as_ref(), options.rounds)?;
    }
    if wants(Part::Insulation) {
        insulation::insulation(&bench, options.rounds, options.point_seconds)?;
    }
    Ok(())
}

/// A container that runs a shell command.
fn start(bench: &Bench, name: &str, options: &[&str], command: &str) -> Result<()> {
    let mut run = bench.dormouse();
    run.args(["run", "-d", "--name", name]).args(options);
    ok(run.args(["services", "sh", "-c", command])).map(drop)
}

fn inside(bench: &Bench, name: &str, variables: &[(&str, String)], command: &str) -> Command {
    let mut exec = bench.dormouse();
    exec.arg("exec");
    for (variable, value) in variables {
        exec.args(["-e", &format!("{variable}={value}")]);
    }
    exec.args([name, "sh", "-c", command]);
    exec
}

/// What the accounts of the service and of the customers have, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
struct Charged {
    /// CPU time of the service.
    used: u64,
    given: u64,
    taken: [u64; 2],
}

impl Charged {
    fn read(bench: &Bench) -> Result<Self> {
        let text = ok(bench.dormouse().args(["account", "ls", "--format", "json"]))?;
        let all: Vec<serde_json::Value> = serde_json::from_str(&text)?;
        let of = |account: &str, figure: &str| {
            let found = all.iter().find(|one| one["Name"] == account);
            found.and_then(|one| one[figure].as_u64()).unwrap_or(0)
        };
        let given = of("@svc", "CpuGivenNs");
        // What is shown is without what was given.
        let used = of("@svc", "CpuNs") + given;
        Ok(Self { used, given, taken: CUSTOMERS.map(|name| of(&format!("@{name}"), "CpuTakenNs")) })
    }

    fn since(self, before: Self) -> Self {
        let [a, b] = self.taken;
        Self {
            used: self.used - before.used,
            given: self.given - before.given,
            taken: [a - before.taken[0], b - before.taken[1]],
        }
    }
}

/// The rules of an arm, and whether its two clients take turns.
struct Arm {
    name: &'static str,
    gates: &'static [&'static str],
    rules: fn() -> String,
    is_shared: bool,
    clients: usize,
}

fn no_rules() -> String {
    String::new()
}

/// As many rules as there may be, for another container.
fn others() -> String {
    let rule = |port: u32| {
        format!("[[rule]]\ngate = \"receive\"\nhome = \"@a\"\nport = {port}\naccount = \"home\"\n")
    };
    (1..=256).map(rule).collect()
}

fn send_home() -> String {
    "[[rule]]\ngate = \"send\"\nhome = \"@svc\"\naccount = \"home\"\n".into()
}

const ALL: &[&str] = &["load"];
const RECEIVE: &[&str] = &["load", "receive"];

/// Requests and answers of one byte, over connections that stay open.
fn gates(bench: &Bench, rounds: usize) -> Result<()> {
    let arm =
        |name, gates, rules, is_shared, clients| Arm { name, gates, rules, is_shared, clients };
    let arms = [
        arm("no gates, one client", &[], no_rules, true, 1),
        arm("no gates, two clients", &[], no_rules, true, 2),
        arm("receive, no rule (classify)", RECEIVE, no_rules, false, 1),
        arm("receive, 256 rules of others (mismatch)", RECEIVE, others, false, 1),
        arm("receive, same label (match)", RECEIVE, no_rules, true, 1),
        arm("receive, another label each time (reclassify)", RECEIVE, no_rules, true, 2),
        arm("all gates, label begins and ends with each request", ALL, send_home, true, 1),
    ];
    let mut times: Vec<Vec<f64>> = arms.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for step in 0..arms.len() {
            // Each round begins with another arm.
            let n = (step + round) % arms.len();
            times[n].push(requests(bench, &arms[n])?);
        }
    }
    let times: Vec<f64> = times.into_iter().map(median).collect();
    for (arm, us) in arms.iter().zip(&times) {
        let bare = if arm.clients == 2 { times[1] } else { times[0] };
        eprintln!("  {}: {us:.2} us of CPU time for a request, {:.3}", arm.name, us / bare);
        let more = serde_json::json!({ "rounds": rounds, "beside_no_gates": us / bare });
        figure("accounts", &format!("gates: {}", arm.name), *us, "us", more);
    }
    Ok(())
}

/// CPU time of the service for a request.
fn requests(bench: &Bench, arm: &Arm) -> Result<f64> {
    const REQUESTS: u32 = 20_000;
    let options: &[&str] = if arm.is_shared { &["--shared"] } else { &[] };
    let run = |name: &str, options: &[&str], words: &[&str]| {
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--name", name]).args(options).arg("bench");
        ok(run.args(words)).map(drop)
    };
    run("svc", options, &["passage", "serve", "80"])?;
    for name in CUSTOMERS {
        run(name, &[], &["sleep", "1000000"])?;
    }
    if !arm.gates.is_empty() {
        let path = bench.path("rules");
        fs::write(&path, (arm.rules)())?;
        ok(bench.dormouse().args(["rules", "apply"]).arg(&path))?;
        ok(bench.dormouse().arg("gate").args(arm.gates))?;
    }
    let address = bench.address("svc", 80)?.ip().to_string();
    let ask = |customer: &str, times: u32| {
        let times = times.to_string();
        let mut exec = bench.dormouse();
        exec.args(["exec", customer, "passage", "ask", &address, "80", &times]);
        exec.stdout(Stdio::null()).stderr(Stdio::null());
        exec
    };
    ensure!(wait_until(PATIENCE, || ok(&mut ask("a", 100)).is_ok()), "the server does not answer");
    let before = Charged::read(bench)?;
    let children = CUSTOMERS.iter().take(arm.clients).map(|name| ask(name, REQUESTS).spawn());
    for child in children.collect::<Vec<_>>() {
        ensure!(child?.wait()?.success(), "a client fails");
    }
    let used = Charged::read(bench)?.since(before).used;
    if !arm.gates.is_empty() {
        ok(bench.dormouse().args(["gate", "unload"]))?;
        fs::write(bench.path("rules"), "")?;
        ok(bench.dormouse().args(["rules", "apply"]).arg(bench.path("rules")))?;
    }
    ok(bench.dormouse().args(["rm", "--force", "svc", "a", "b"]))?;
    Ok(used as f64 / f64::from(REQUESTS) / arm.clients as f64 / 1e3)
}

/// Requests of nginx for each second of its CPU time.
fn http(bench: &Bench, rounds: usize) -> Result<()> {
    let ready = "wrk -c 1 -t 1 -d 1 http://svc/ | grep -q requests";
    start(bench, "svc", &["--shared"], services::NGINX)?;
    start(bench, "a", &[], "exec sleep 1000000")?;
    let ready = || ok(&mut inside(bench, "a", &[], ready)).is_ok();
    ensure!(wait_until(PATIENCE, ready), "nginx does not answer");
    let kept = "wrk -c 8 -t 1 -d 2 http://svc/";
    let closed = "wrk -c 8 -t 1 -d 2 -H 'Connection: close' http://svc/";
    for (name, command) in [("kept connections", kept), ("new connections", closed)] {
        let mut figures = [vec![], vec![]];
        for round in 0..rounds * 2 {
            let is_loaded = (round + round / 2) % 2 == 1;
            if is_loaded {
                ok(bench.dormouse().args(["gate", "load"]))?;
            }
            let before = (Charged::read(bench)?, Instant::now());
            let text = ok(&mut inside(bench, "a", &[], command))?;
            let used = Charged::read(bench)?.since(before.0).used;
            if is_loaded {
                ok(bench.dormouse().args(["gate", "unload"]))?;
            }
            let count = text.split_once(" requests in").and_then(|(rest, _)| {
                rest.split_whitespace().next_back().and_then(|n| n.parse::<f64>().ok())
            });
            let count = count.with_context(|| format!("no count: {text}"))?;
            figures[usize::from(is_loaded)].push(count / (used as f64 / 1e9));
        }
        let [without, with] = figures.map(median);
        let name = format!("http, {name}: requests for a second of nginx, with gates");
        eprintln!("  {name}: {with:.0}, without {without:.0}: {:.3}", with / without);
        let more =
            serde_json::json!({ "rounds": rounds, "without": without, "ratio": with / without });
        figure("accounts", &name, with, "1/s", more);
    }
    ok(bench.dormouse().args(["rm", "--force", "svc", "a"]))?;
    Ok(())
}
