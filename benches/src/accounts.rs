//! Accounts: whether shared services charge their clients in the proportion of their work, what a passage costs, and
//! what gates cost a web server.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin accounts -- --part services
//! ```
//!
//! **services**: unmodified servers work for two customers, whose connections each send their next request when they
//! have the answer. With as many connections and the same requests, a request of either should be charged alike: the
//! figure is the charge for a request of the first beside that of the second, and is 1 where charges are right.
//!
//! With 2 and 6 connections the figure is not the same: what a request costs depends on how many connections a server
//! with one thread finds ready at once, because it waits once for all of them. The arms in which one customer works
//! alone show that cost, and so what the figure should be.
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
//!
//! **insulation**: two sites share a single-threaded backend, under rising load of one of them, without gates, with
//! gates, with an order of connections, and with a backend for each (accounts/insulation.rs).
#![forbid(unsafe_code)]

#[path = "accounts/bill.rs"]
mod bill;
#[path = "accounts/insulation.rs"]
mod insulation;

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
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
/// Connections of the two customers.
const EQUAL: [u64; 2] = [4, 4];
const UNEQUAL: [u64; 2] = [2, 6];
const CUSTOMERS: [&str; 2] = ["a", "b"];
/// How long a load lasts that is given by its time.
const SECONDS: &str = "4";

/// A server, and the load of its clients.
struct Service {
    name: &'static str,
    /// Its structure.
    what: &'static str,
    /// The shell command that starts it.
    server: &'static str,
    /// A shell command of a client that succeeds when the server answers.
    ready: &'static str,
    /// A shell command that loads it over $N connections, and reports the number of requests.
    load: &'static str,
    /// The words before that number, or after it; requests for each connection where there are none.
    count: Count,
}

enum Count {
    Before(&'static str),
    After(&'static str),
    PerConnection(u64),
}

const SERVICES: [Service; 5] = [
    Service {
        name: "redis",
        what: "one thread, epoll",
        server: "exec redis-server --save '' --protected-mode no --bind 0.0.0.0",
        ready: "redis-cli -h svc ping | grep -q PONG",
        load: "redis-benchmark -h svc -c $N -n $((N * 30000)) -t set --csv",
        count: Count::PerConnection(30_000),
    },
    Service {
        name: "postgresql",
        what: "a process for each connection",
        server: "chown postgres /tmp; exec su postgres -s /bin/bash -c 'PATH=$PATH:/usr/lib/postgresql/15/bin; \
                 cd /tmp && initdb -D /tmp/db --auth=trust >/dev/null && \
                 echo host all all all trust >> /tmp/db/pg_hba.conf && \
                 exec postgres -D /tmp/db -h 0.0.0.0 -k /tmp -N 400'",
        ready: "psql -h svc -U postgres -Atc 'select 1' | grep -q 1",
        load: "echo 'select sum(i * i) from generate_series(1, 2000) i' > /tmp/q; \
               /usr/lib/postgresql/15/bin/pgbench -n -h svc -U postgres -f /tmp/q -c $N -j 1 -T $SECONDS postgres",
        count: Count::Before("number of transactions actually processed:"),
    },
    Service {
        name: "mariadb",
        what: "a thread for each connection",
        server: "chmod 1777 /tmp; mkdir -p /run/mysqld && chown mysql /run/mysqld && \
                 exec mariadbd --user=mysql --skip-grant-tables --bind-address=0.0.0.0 --skip-networking=0",
        ready: "mariadb -h svc -P 3306 -e 'select 1' | grep -q 1",
        load: "for i in $(seq $N); do yes \"select benchmark(200, md5('a'));\" | head -n 2000 | \
               mariadb -h svc -P 3306 > /dev/null & done; wait",
        count: Count::PerConnection(2000),
    },
    Service {
        name: "nginx",
        what: "one process, epoll",
        server: "echo 'daemon off; worker_processes 1; user root; error_log /dev/null; pid /tmp/pid; events {} http { \
                 access_log off; keepalive_requests 1000000000; server { listen 80; location / { return 200 bench; } \
                 } }' > /tmp/conf; exec nginx -c /tmp/conf",
        ready: "wrk -c 1 -t 1 -d 1 http://svc/ | grep -q requests",
        load: "wrk -c $N -t 1 -d $SECONDS http://svc/",
        count: Count::After("requests in"),
    },
    Service {
        name: "dnsmasq",
        what: "one thread, datagrams",
        server: "exec dnsmasq -k -u root --no-resolv --no-hosts --address=/x.test/192.0.2.1 --pid-file=/tmp/pid",
        ready: "echo x.test A > /tmp/q; dnsperf -s $SVC -d /tmp/q -n 1 | grep -q 'completed: *1'",
        load: "echo x.test A > /tmp/q; dnsperf -s $SVC -d /tmp/q -c $N -q $N -l $SECONDS",
        count: Count::Before("Queries completed:"),
    },
];

fn main() -> Result<()> {
    let options = Options::parse();
    let wants = |part| options.part.is_empty() || options.part.contains(&part);
    // Before the network namespace of the benchmark, which has no packages.
    let needs_services = [Part::Services, Part::Http, Part::Bill].into_iter().any(wants);
    let services = needs_services.then(image::services);
    let bench = Bench::new()?;
    if let Some(services) = services {
        ok(bench.dormouse().args(["import", "--name", "services"]).arg(services))?;
    }
    if wants(Part::Services) {
        let names = &options.service;
        let is_chosen =
            |one: &&Service| names.is_empty() || names.iter().any(|name| name == one.name);
        for service in SERVICES.iter().filter(is_chosen) {
            serve(&bench, service, options.rounds)?;
        }
    }
    if wants(Part::Gates) {
        gates(&bench, options.rounds)?;
    }
    if wants(Part::Http) {
        http(&bench, options.rounds)?;
    }
    if wants(Part::Bill) {
        let database = SERVICES.iter().find(|one| one.name == "postgresql").context("no server")?;
        let time = Duration::from_secs(options.seconds);
        let day = bill::Day { sites: options.sites, time, rate: options.rate };
        bill::bill(&bench, database.server, day)?;
    }
    if wants(Part::Price) || wants(Part::Insulation) {
        insulation::import(&bench)?;
    }
    if wants(Part::Price) {
        insulation::price(&bench, options.rounds)?;
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

/// The loads of some customers at once: what was charged, and the number of requests of each.
fn load(
    bench: &Bench,
    service: &Service,
    connections: [u64; 2],
    who: &[usize],
) -> Result<(Charged, [u64; 2])> {
    let address = bench.address("svc", 1)?.ip().to_string();
    let begin = |customer: &usize| -> Result<(usize, Child)> {
        let variables = [
            ("N", connections[*customer].to_string()),
            ("SECONDS", SECONDS.into()),
            ("SVC", address.clone()),
        ];
        let mut command = inside(bench, CUSTOMERS[*customer], &variables, service.load);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        Ok((*customer, child))
    };
    let before = Charged::read(bench)?;
    let children = who.iter().map(begin).collect::<Result<Vec<_>>>()?;
    let mut counts = [0; 2];
    for (customer, child) in children {
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{}: {}: {text} {error}", service.name, output.status);
        let number =
            |text: &str| text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
        let count = match service.count {
            Count::PerConnection(count) => Some(count * connections[customer]),
            Count::Before(words) => text.split_once(words).and_then(|(_, rest)| number(rest)),
            Count::After(words) => text.split_once(words).and_then(|(rest, _)| {
                rest.split_whitespace().next_back().and_then(|n| n.parse::<u64>().ok())
            }),
        };
        counts[customer] = count.with_context(|| format!("{}: no count: {text}", service.name))?;
    }
    Ok((Charged::read(bench)?.since(before), counts))
}

fn serve(bench: &Bench, service: &Service, rounds: usize) -> Result<()> {
    start(bench, "svc", &["--shared"], service.server)?;
    for name in CUSTOMERS {
        start(bench, name, &[], "exec sleep 1000000")?;
    }
    ok(bench.dormouse().args(["gate", "load", "receive"]))?;
    let address = bench.address("svc", 1)?.ip().to_string();
    let ready = || ok(&mut inside(bench, "a", &[("SVC", address.clone())], service.ready)).is_ok();
    if !wait_until(PATIENCE, ready) {
        bail!("{} does not answer: {}", service.name, ok(bench.dormouse().args(["logs", "svc"]))?);
    }
    // A first load fills caches.
    load(bench, service, EQUAL, &[0, 1])?;
    let mut together = [vec![], vec![]];
    let (mut own, mut alone) = (vec![], [vec![], vec![]]);
    for _ in 0..rounds {
        for (connections, ratios) in [EQUAL, UNEQUAL].into_iter().zip(&mut together) {
            let (charged, counts) = load(bench, service, connections, &[0, 1])?;
            let [a, b] = charged.taken.map(|ns| ns as f64);
            let [count_a, count_b] = counts.map(|count| count as f64);
            ratios.push(a / count_a / (b / count_b));
            // The cgroup has whole microseconds, so this can be a little below 0.
            own.push((charged.used as f64 - charged.given as f64) / charged.used as f64 * 100.0);
        }
        for (customer, times) in alone.iter_mut().enumerate() {
            let (charged, counts) = load(bench, service, UNEQUAL, &[customer])?;
            times.push(charged.used as f64 / counts[customer] as f64 / 1e3);
        }
    }
    let range = |all: &[f64]| {
        all.iter().fold([f64::MAX, f64::MIN], |[low, high], r| [low.min(*r), high.max(*r)])
    };
    let ranges = together.each_ref().map(|all| range(all));
    let ([equal, unequal], [first, second]) = (together.map(median), alone.map(median));
    let name = format!("{}, {}: charge for a request, first to second", service.name, service.what);
    let [[low, high], [other_low, other_high]] = ranges;
    eprintln!(
        "  {name}: 4 and 4 connections {equal:.3} ({low:.3} to {high:.3}); 2 and 6 {unequal:.3} ({other_low:.3} to \
         {other_high:.3}), alone {first:.2} and {second:.2} us, {:.3}; {:.2} % for itself",
        first / second,
        median(own.clone()),
    );
    let more = serde_json::json!({
        "rounds": rounds, "min": low, "max": high, "with_2_and_6": unequal, "alone_2_us": first,
        "alone_6_us": second, "own_percent": median(own),
    });
    figure("accounts", &name, equal, "ratio", more);
    ok(bench.dormouse().args(["gate", "unload"]))?;
    ok(bench.dormouse().args(["rm", "--force", "svc", "a", "b"]))?;
    Ok(())
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
    let nginx = SERVICES.iter().find(|one| one.name == "nginx").context("no nginx")?;
    start(bench, "svc", &["--shared"], nginx.server)?;
    start(bench, "a", &[], "exec sleep 1000000")?;
    let ready = || ok(&mut inside(bench, "a", &[], nginx.ready)).is_ok();
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
