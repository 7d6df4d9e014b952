//! A day of a small hoster, compressed to minutes, and the bills for it.
//!
//! Each site is a container with an account below that of its customer. All sites have one nginx in front of them,
//! which compresses large pages, and one postgresql behind them, both as Debian has them. Requests come from outside of
//! all containers, to site n with a probability of 1/n, at a rate that rises from the night to the afternoon. The sites
//! of three kinds take turns: the work of one kind is at the database, that of the next at the front, that of the third
//! at home.
//!
//! The **cost** of a site's requests is the number of its answers, times the cost of a request of its kind. That is the
//! CPU time of the cgroups of sites, front and database while requests of this kind alone arrive, before and after the
//! day. No account is part of it.
//!
//! Four bills are compared with the cost:
//!
//! - that of the accounts (`dormouse account report`): the site's container, and the work of front and database for it;
//! - that of its own cgroup alone, in which no site pays for front and database;
//! - the same with the cgroups of front and database split evenly;
//! - the same with these split by requests, as the log of a front has them.

use std::collections::HashMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use dormouse_benches::farm::Ranks;
use dormouse_benches::{Bench, Line, Times, figure, ok, promise, scatter};
use dormouse_testkit::{leftover, wait_until};

/// The size of the day.
#[derive(Debug, Clone, Copy)]
pub struct Day {
    /// Number of sites, one account each.
    pub sites: usize,
    /// Its duration.
    pub time: Duration,
    /// Mean requests a second, to all sites.
    pub rate: f64,
}

/// LIMIT: the time until a server answers.
const PATIENCE: Duration = Duration::from_secs(60);
/// LIMIT: each site has a connection to the database, which takes 400.
const SITES_MAX: usize = 380;
/// LIMIT: memory of the machine that stays available.
const KEPT_FREE_KB: u64 = 5 << 20;
/// Concurrent clients; the next request of a client that is late follows at once.
const CLIENTS: usize = 8;
/// How long the sites of one kind are loaded alone, each time.
const ALONE: Duration = Duration::from_secs(8);
/// The busiest hour of a day.
const BUSIEST: f64 = 16.0;

/// What a request of a site costs, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Database,
    Front,
    Home,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Database, Self::Front, Self::Home];

    /// That of site `n`.
    fn of(n: usize) -> Self {
        Self::ALL[n % Self::ALL.len()]
    }

    fn name(self) -> &'static str {
        match self {
            Self::Database => "search",
            Self::Front => "long pages",
            Self::Home => "computation",
        }
    }

    /// Rounds of work at home, bytes of a page, query (floor/site.c).
    fn words(self) -> [&'static str; 3] {
        let by_key = "select words from post where id = 4711";
        match self {
            Self::Database => {
                ["1000", "600", "select count(*) from post where words like '%77%11%'"]
            }
            Self::Front => ["1000", "100000", by_key],
            Self::Home => ["1000000", "600", by_key],
        }
    }
}

/// 20,000 rows in some 2 MB, in memory and settled.
const TABLES: &str = "create table post as select id, repeat(md5(id::text), 2) as words \
                      from generate_series(1, 20000) id; \
                      create unique index on post (id); vacuum (full, analyze) post; checkpoint";

/// Those of the guide (docs/accounts.md).
const RULES: &str = r#"
[[rule]]
name = "the database works for its client"
gate = "receive"
home = "@db"
peer = "customers"
port = 5432
account = "peer"

[[rule]]
name = "the front works for the site whose answer it passes on"
gate = "receive"
home = "@front"
peer = "customers"
account = "peer"

[[rule]]
name = "the front works for itself when it reads a request"
gate = "receive"
home = "@front"
account = "home"
"#;

fn site(n: usize) -> String {
    format!("s{n}")
}

/// The customer of site `n`. Customers have one to four sites, in turn.
fn customer(n: usize) -> String {
    let owner = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3][n % 10];
    format!("c{}", n / 10 * 4 + owner)
}

/// CPU time of an account, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    /// With what was taken, without what was given.
    charged: f64,
    given: f64,
    taken: f64,
}

/// CPU time until now, in seconds.
struct Reading {
    accounts: HashMap<String, Account>,
    /// By the name of a container: its cgroup.
    cgroups: HashMap<String, f64>,
    /// The cgroup of all containers.
    all: f64,
    /// That of all customers with the sites below them, as a report has it.
    customers: f64,
}

/// The containers of the hoster.
struct Hoster<'b> {
    bench: &'b Bench,
    day: Day,
    front: SocketAddr,
    /// By the name of a container: its cgroup.
    cgroups: HashMap<String, PathBuf>,
}

/// Measures the bills of a day. `database` is the shell command that starts postgresql.
pub fn bill(bench: &Bench, database: &str, day: Day) -> Result<()> {
    let (least, sites) = (Kind::ALL.len(), day.sites);
    ensure!((least..=SITES_MAX).contains(&sites), "{sites} sites: {least} to {SITES_MAX} can be");
    let hoster = Hoster::open(bench, database, day)?;
    for n in 0..sites {
        hoster.request(n)?;
    }
    let before = hoster.costs()?;
    let begin = hoster.read()?;
    let all: Vec<usize> = (0..sites).collect();
    let (counts, times) = hoster.load(&all, day.time, busy)?;
    let end = hoster.read()?;
    let after = hoster.costs()?;
    let costs = report_costs(&before, &after);
    let bills = Bills::new(&begin, &end, &counts, &costs)?;
    bills.print();
    bills.conserve(day, &times);
    (0..METHODS.len()).for_each(|method| bills.compare(day, method));
    bills.draw()?;
    ok(bench.dormouse().args(["gate", "unload"]))?;
    let names = (0..sites).map(site).chain(["db".to_owned(), "front".to_owned()]);
    ok(bench.dormouse().args(["rm", "--force"]).args(names))?;
    Ok(())
}

/// Reports what a request of each kind costs. Returns the means of both times, in seconds.
fn report_costs(before: &[[f64; 3]], after: &[[f64; 3]]) -> Vec<f64> {
    let mut costs = Vec::new();
    for (kind, (before, after)) in Kind::ALL.into_iter().zip(before.iter().zip(after)) {
        let [home, front, database] = [0, 1, 2].map(|n| (before[n] + after[n]) / 2.0 * 1e6);
        let all = home + front + database;
        let [first, second] = [before, after].map(|cost| cost.iter().sum::<f64>() * 1e6);
        eprintln!(
            "  {}: a request costs {all:.0} us; home {home:.0}, front {front:.0}, database {database:.0}; before the \
             day {first:.0}, after it {second:.0}",
            kind.name()
        );
        let more = serde_json::json!({
            "home_us": home, "front_us": front, "database_us": database, "before_us": first, "after_us": second,
        });
        figure("accounts", &format!("bill: cost of a request, {}", kind.name()), all, "us", more);
        costs.push(all / 1e6);
    }
    costs
}

impl<'b> Hoster<'b> {
    /// Makes accounts, rules and containers. The gates are loaded first: earlier connections have no peer.
    fn open(bench: &'b Bench, database: &str, day: Day) -> Result<Self> {
        let run = |words: &[&str]| ok(bench.dormouse().args(words));
        run(&["account", "create", "customers"])?;
        for n in 0..day.sites {
            let customer = customer(n);
            if n == 0 || customer != self::customer(n - 1) {
                run(&["account", "create", "--parent", "customers", &customer])?;
            }
            run(&["account", "create", "--parent", &customer, &site(n)])?;
        }
        let rules = bench.path("rules");
        fs::write(&rules, RULES)?;
        run(&["rules", "apply", rules.to_str().context("a path that is no text")?])?;
        run(&["gate", "load"])?;
        let mut ids = Vec::new();
        let mut start = |name: &str, words: &[&str]| -> Result<()> {
            let id = run(&[&["run", "-d", "--name", name], words].concat())?;
            ids.push((name.to_owned(), id));
            Ok(())
        };
        start("db", &["services", "sh", "-c", database])?;
        let query = |query: &str| {
            run(&["exec", "db", "psql", "-h", "/tmp", "-U", "postgres", "-Atc", query])
        };
        if !wait_until(PATIENCE, || query("select 1").is_ok()) {
            bail!("the database does not answer: {}", run(&["logs", "db"])?);
        }
        for statement in TABLES.split("; ") {
            query(statement)?;
        }
        let address = bench.address("db", 5432)?.ip().to_string();
        let mut upstreams = String::new();
        for n in 0..day.sites {
            let free_kb = available_kb()?;
            ensure!(
                free_kb > KEPT_FREE_KB,
                "{n} sites run, and only {} MB are free",
                free_kb >> 10
            );
            let name = site(n);
            let words = ["--account", &name, "bench", "site", &name, "80", &address];
            start(&name, &[&words[..], &Kind::of(n).words()].concat())?;
            let address = bench.address(&name, 80)?;
            upstreams.push_str(&format!("upstream {name} {{ server {address}; keepalive 4; }}\n"));
        }
        let front = format!(
            "cat > /tmp/conf <<'END'\n\
             daemon off; worker_processes 1; user root; error_log stderr; pid /tmp/pid;\n\
             events {{ worker_connections 4096; }}\n\
             http {{ access_log off; gzip on; gzip_comp_level 6; gzip_min_length 1000;\n\
             proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffers 32 8k;\n\
             {upstreams}server {{ listen 80; location / {{ proxy_pass http://$host; }} }} }}\n\
             END\nexec nginx -c /tmp/conf"
        );
        start("front", &["services", "sh", "-c", &front])?;
        let front = bench.address("front", 80)?;
        let top = top(bench)?;
        let cgroups = ids.into_iter().map(|(name, id)| (name, top.join(id))).collect();
        let hoster = Self { bench, day, front, cgroups };
        if !wait_until(PATIENCE, || hoster.request(0).is_ok()) {
            bail!("no answer: {:?}, {}", hoster.request(0), run(&["logs", "front"])?);
        }
        Ok(hoster)
    }

    /// A request to a site over a new connection, as that of a browser.
    fn request(&self, n: usize) -> Result<Duration> {
        let begin = Instant::now();
        let mut stream = TcpStream::connect(self.front)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let name = site(n);
        let head = format!(
            "GET / HTTP/1.1\r\nHost: {name}\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let took = begin.elapsed();
        // As for other servers (`farm::request`): no port is to stay in TIME_WAIT.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
        let head = String::from_utf8_lossy(&answer[..answer.len().min(600)]).into_owned();
        let is_right =
            head.starts_with("HTTP/1.1 200") && head.contains(&format!("X-Site: {name}\r\n"));
        ensure!(is_right, "unexpected answer of {name}: {head}");
        Ok(took)
    }

    /// CPU time of a request of each kind, in seconds: at home, at the front, at the database.
    fn costs(&self) -> Result<Vec<[f64; 3]>> {
        let cost = |kind: Kind| -> Result<[f64; 3]> {
            let sites: Vec<usize> = (0..self.day.sites).filter(|n| Kind::of(*n) == kind).collect();
            let used = || -> Result<[f64; 3]> {
                let of = |name: &str| used_s(&self.cgroups[name]);
                let home: Result<f64> = sites.iter().map(|n| of(&site(*n))).sum();
                Ok([home?, of("front")?, of("db")?])
            };
            let before = used()?;
            let (_, times) = self.load(&sites, ALONE, |_| 1.0)?;
            let after = used()?;
            ensure!(!times.is_empty(), "no request in {} s", ALONE.as_secs());
            Ok([0, 1, 2].map(|n| (after[n] - before[n]) / times.len() as f64))
        };
        Kind::ALL.into_iter().map(cost).collect()
    }

    fn read(&self) -> Result<Reading> {
        let report = |words: &[&str]| -> Result<HashMap<String, Account>> {
            let mut command = self.bench.dormouse();
            let text = ok(command.args(["account", "report", "--format", "json"]).args(words))?;
            let rows: Vec<serde_json::Value> = serde_json::from_str(&text)?;
            let account = |row: &serde_json::Value| {
                let seconds = |name: &str| row[name].as_u64().map(|ns| ns as f64 / 1e9);
                let account = Account {
                    charged: seconds("CpuNs")?,
                    given: seconds("CpuGivenNs")?,
                    taken: seconds("CpuTakenNs")?,
                };
                Some((row["Name"].as_str()?.to_owned(), account))
            };
            rows.iter().map(|row| account(row).context("a report without figures")).collect()
        };
        let customers = report(&["--recursive", "customers"])?;
        let customers = customers.get("customers").context("no row for all customers")?.charged;
        let accounts = report(&[])?;
        let cgroups = self.cgroups.iter();
        let cgroups = cgroups.map(|(name, dir)| Ok((name.clone(), used_s(dir)?)));
        let top = top(self.bench)?;
        let all = used_s(&top)? - used_s(&top.join("keeper"))?;
        Ok(Reading { accounts, cgroups: cgroups.collect::<Result<_>>()?, all, customers })
    }

    /// Loads some sites for a while. The rate is the mean one of the day, times `busy` of the part of the time that is
    /// over. Returns the number of answers of each site, and all times of answers.
    fn load(
        &self,
        sites: &[usize],
        time: Duration,
        busy: impl Fn(f64) -> f64 + Sync,
    ) -> Result<(Vec<u64>, Times)> {
        let counts: Vec<AtomicU64> = sites.iter().map(|_| AtomicU64::new(0)).collect();
        let (begin, length) = (Instant::now(), time.as_secs_f64());
        let client = |number: usize| -> Result<Vec<Duration>> {
            let seed = 0x9e37_79b9_7f4a_7c15 ^ ((number as u64) << 20);
            let mut ranks = Ranks::new(seed, sites.len(), 1.0);
            let (mut due, mut times) = (0.0, Vec::new());
            loop {
                let rate = self.day.rate / CLIENTS as f64 * busy(due / length);
                due -= (1.0 - ranks.part()).ln() / rate;
                if due >= length {
                    return Ok(times);
                }
                let at = Duration::from_secs_f64(due);
                std::thread::sleep(at.saturating_sub(begin.elapsed()));
                let n = ranks.draw();
                times.push(self.request(sites[n])?);
                counts[n].fetch_add(1, Ordering::Relaxed);
            }
        };
        let times = std::thread::scope(|scope| {
            let client = &client;
            let clients: Vec<_> =
                (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
            let mut all = Vec::new();
            for client in clients {
                let times = client.join().map_err(|_| anyhow!("a client panicked"))?;
                all.extend(times.context("a request failed")?);
            }
            Ok::<_, anyhow::Error>(all)
        })?;
        Ok((counts.into_iter().map(AtomicU64::into_inner).collect(), Times::new(times)))
    }
}

/// The rate after a part of a day, beside its mean: 1.75 at the busiest hour, and 0.25 twelve hours before.
fn busy(part: f64) -> f64 {
    1.0 + 0.75 * ((part - BUSIEST / 24.0) * std::f64::consts::TAU).cos()
}

/// The cgroup above all containers, in the hierarchy that counts CPU time.
pub(super) fn top(bench: &Bench) -> Result<PathBuf> {
    let all = leftover::cgroups(&leftover::cgroup_name(&bench.path("root")));
    let counts = |dir: &PathBuf| used_s(dir).is_ok();
    all.into_iter().find(counts).context("no cgroup with CPU time")
}

/// CPU time of a cgroup (cpu.stat of cgroup v2), in seconds.
pub(super) fn used_s(cgroup: &std::path::Path) -> Result<f64> {
    let path = cgroup.join("cpu.stat");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let us = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse::<f64>().ok());
    Ok(us.with_context(|| format!("no CPU time in {}", path.display()))? / 1e6)
}

fn available_kb() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kb = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    kb.context("no MemAvailable")
}

/// The ways of a bill.
const METHODS: [&str; 4] = [
    "accounts",
    "its own cgroup alone",
    "cgroups, services split evenly",
    "cgroups, services split by requests",
];

/// Of one site or of several, in seconds.
#[derive(Debug, Clone)]
struct Bill {
    name: String,
    kind: Kind,
    requests: u64,
    /// That of its requests.
    cost: f64,
    /// In the order of [`METHODS`].
    billed: [f64; 4],
    /// The work of front and database for it, in the first of these.
    taken: f64,
}

struct Bills {
    all: Vec<Bill>,
    /// Of front and database: their use, and the part of it that is charged to themselves.
    used: [f64; 2],
    own: [f64; 2],
    /// All accounts, and all cgroups.
    charged: f64,
    counted: f64,
    /// All customers, as the report adds their sites up.
    customers: f64,
}

impl Bills {
    /// `counts` has the answers of each site, and `costs` the seconds of a request of each kind.
    fn new(begin: &Reading, end: &Reading, counts: &[u64], costs: &[f64]) -> Result<Self> {
        let since = |of: &dyn Fn(&Reading) -> Option<f64>| -> Result<f64> {
            let missing = "a figure is missing";
            Ok(of(end).context(missing)? - of(begin).context(missing)?)
        };
        let cgroup = |name: &str| since(&|reading| reading.cgroups.get(name).copied());
        let charged = |name: &str| since(&|reading| Some(reading.accounts.get(name)?.charged));
        let used = [cgroup("front")?, cgroup("db")?];
        let services: f64 = used.iter().sum();
        let requests: u64 = counts.iter().sum();
        let mut all = Vec::new();
        for (n, count) in counts.iter().enumerate() {
            let (name, kind) = (site(n), Kind::of(n));
            let home = cgroup(&name)?;
            let even = services / counts.len() as f64;
            let by_requests = services * *count as f64 / requests as f64;
            let billed = [charged(&name)?, home, home + even, home + by_requests];
            let taken = since(&|reading| Some(reading.accounts.get(&name)?.taken))?;
            let cost = *count as f64 * costs[kind as usize];
            all.push(Bill { name, kind, requests: *count, cost, billed, taken });
        }
        let sum = |reading: &Reading| Some(reading.accounts.values().map(|it| it.charged).sum());
        let [given, taken] = [|it: &Account| it.given, |it: &Account| it.taken]
            .map(|of| end.accounts.values().map(of).sum::<f64>());
        ensure!((given - taken).abs() < 1e-6, "{given} s were given, and {taken} s taken");
        Ok(Self {
            all,
            used,
            own: [charged("@front")?, charged("@db")?],
            charged: since(&sum)?,
            counted: since(&|reading| Some(reading.all))?,
            customers: since(&|reading| Some(reading.customers))?,
        })
    }

    fn sum(&self, of: impl Fn(&Bill) -> f64) -> f64 {
        self.all.iter().map(of).sum()
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Bill> {
        self.all.iter().filter(move |bill| bill.kind == kind)
    }

    /// All sites of a kind as one.
    fn together(&self, kind: Kind) -> Bill {
        let zero = Bill {
            name: "all".to_owned(),
            kind,
            requests: 0,
            cost: 0.0,
            billed: [0.0; 4],
            taken: 0.0,
        };
        self.of_kind(kind).fold(zero, |sum, bill| Bill {
            requests: sum.requests + bill.requests,
            cost: sum.cost + bill.cost,
            billed: [0, 1, 2, 3].map(|n| sum.billed[n] + bill.billed[n]),
            taken: sum.taken + bill.taken,
            ..sum
        })
    }

    /// Prints the bills of the ten most popular sites and of the kinds.
    fn print(&self) {
        eprintln!(
            "  CPU s                requests      cost  accounts   at home  services    cgroup    evenly  by requests"
        );
        let kinds = Kind::ALL.map(|kind| self.together(kind));
        for bill in self.all.iter().take(10).chain(&kinds) {
            let Bill { name, kind, requests, cost, billed, taken } = bill;
            let [accounts, alone, even, by_requests] = billed;
            let (kind, home) = (kind.name(), accounts - taken);
            eprintln!(
                "  {name:<5} {kind:<12} {requests:>10} {cost:>9.2} {accounts:>9.2} {home:>9.2} {taken:>9.2} \
                 {alone:>9.2} {even:>9.2} {by_requests:>12.2}"
            );
        }
        let ([front, database], [used_front, used_database]) = (self.own, self.used);
        eprintln!(
            "  cost of all {:.2}; front {used_front:.2}, of which {front:.2} for itself; database \
             {used_database:.2}, of which {database:.2} for itself",
            self.sum(|bill| bill.cost)
        );
    }

    /// Reports whether the accounts have together what the cgroups have.
    fn conserve(&self, day: Day, times: &Times) {
        let rate = times.len() as f64 / day.time.as_secs_f64();
        let (p50, p99) = (times.median_ms(), times.at(0.99));
        eprintln!(
            "  {} answers, {rate:.0} a second: p50 {p50:.2} ms, p99 {p99:.1} ms",
            times.len()
        );
        let ratio = self.charged / self.counted;
        let sites = self.sum(|bill| bill.billed[0]);
        eprintln!(
            "  all accounts {:.3} s, all cgroups {:.3} s: {ratio:.5}; customers with their sites {:.3} s, sites \
             {sites:.3} s",
            self.charged, self.counted, self.customers
        );
        let more = serde_json::json!({
            "accounts_s": self.charged, "cgroups_s": self.counted, "customers_s": self.customers, "sites_s": sites,
            "front_s": self.used[0], "front_own_s": self.own[0], "database_s": self.used[1],
            "database_own_s": self.own[1], "answers": times.len(), "per_s": rate, "p50_ms": p50, "p99_ms": p99,
        });
        figure("accounts", "bill: all accounts beside all cgroups", ratio, "ratio", more);
        promise("all accounts beside all cgroups, in %", (ratio - 1.0).abs() * 100.0, 1.0);
    }

    /// Reports how far the bills of one way are from the cost of the requests.
    fn compare(&self, day: Day, method: usize) {
        let billed = |bill: &Bill| bill.billed[method];
        let cost = self.sum(|bill| bill.cost);
        let wrong = self.sum(|bill| (billed(bill) - bill.cost).abs()) / cost * 100.0;
        let mut text = format!("{}: differences to the cost {wrong:.1} %", METHODS[method]);
        let mut kinds = serde_json::Map::new();
        for kind in Kind::ALL {
            let all = self.together(kind);
            let ratio = billed(&all) / all.cost;
            let paying = self.of_kind(kind).filter(|bill| bill.requests > 0);
            let mut each: Vec<f64> = paying.map(|bill| billed(bill) / bill.cost).collect();
            each.sort_by(f64::total_cmp);
            let at = |part: f64| {
                let index = (each.len().saturating_sub(1) as f64 * part).round() as usize;
                each.get(index).copied().unwrap_or(f64::NAN)
            };
            let (low, median, high) = (at(0.05), at(0.5), at(0.95));
            text += &format!("; {} {ratio:.3} ({low:.2} to {high:.2})", kind.name());
            let ratios =
                serde_json::json!({ "of_cost": ratio, "p5": low, "p50": median, "p95": high });
            kinds.insert(kind.name().to_owned(), ratios);
        }
        eprintln!("  {text}");
        let mut more = serde_json::json!({
            "sites": day.sites, "seconds": day.time.as_secs(), "cost_s": cost, "billed_s": self.sum(billed),
            "kinds": kinds,
        });
        if method == 0 {
            more["bills"] = self.all.iter().map(Bill::json).collect();
            promise("bills of the accounts beside the cost of the requests, in %", wrong, 10.0);
        }
        let name = format!("bill: {}, differences to the cost of the requests", METHODS[method]);
        figure("accounts", &name, wrong, "%", more);
    }

    fn draw(&self) -> Result<()> {
        let points = |n: usize| self.all.iter().map(|bill| (bill.cost, bill.billed[n])).collect();
        let set = |(n, name)| Line { name, points: points(n) };
        let sets: Vec<Line<'_>> = METHODS.into_iter().enumerate().map(set).collect();
        let title = format!("Bills of {} sites with a common front and database", self.all.len());
        let axes = ["CPU seconds that its requests cost", "CPU seconds that it is billed for"];
        scatter("bill", &title, axes, &sets)
    }
}

impl Bill {
    fn json(&self) -> serde_json::Value {
        let [accounts, alone, even, by_requests] = self.billed;
        serde_json::json!({
            "site": self.name, "kind": self.kind.name(), "requests": self.requests, "cost_s": self.cost,
            "accounts_s": accounts, "services_s": self.taken, "cgroup_s": alone, "evenly_s": even,
            "by_requests_s": by_requests,
        })
    }
}
