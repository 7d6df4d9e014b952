//! Services: unmodified servers that two customers share, of which one is abusive.
//!
//! **Charges.** Both customers load a server for a while, over connections that stay open. Three figures are compared
//! with what the accounts say:
//!
//! - with as many connections and the same requests, a request of the first should be charged as one of the second is;
//!   each turn has this load twice, and each customer begins once;
//! - with 2 and 6 connections, it should be charged as it costs where the customer is alone: the CPU time of the
//!   server's cgroup by the number of requests. A server with one thread waits once for all connections that are
//!   ready, so a request over fewer connections costs more;
//! - the cgroup of the server should have used what both customers and the server are charged together.
//!
//! **Insulation.** The first customer has 4 workers, which think for 20 ms in the mean before each operation. The
//! second has 60 that do not think. An operation is a new connection, a request and its answer (floor/customer.c). All
//! work on one processor, which others on the machine have after them. Arms take turns:
//!
//! - *alone*: the first customer, without gates;
//! - *beside*: both, without gates;
//! - *both*: with gates, debts and order.

use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail, ensure};
use dormouse_benches::{Bars, Bench, bars, figure, median, ok, promise};
use dormouse_testkit::wait_until;

use crate::insulation::{ONE_CPU, Set, await_order, take_processor};
use crate::{CUSTOMERS, Charged, PATIENCE, bill, inside, start};

/// Connections of the two customers.
const EQUAL: [u64; 2] = [4, 4];
const UNEQUAL: [u64; 2] = [2, 6];
/// How long a load lasts that is given by its time.
const SECONDS: &str = "1";
/// LIMIT: turns of each arm where all servers are measured, so that these take less than six minutes.
const TURNS: usize = 3;
/// Workers of the customers, and how long those of the first think, in ms.
const WORKERS: [&str; 2] = ["4", "60"];
const THINK: [&str; 2] = ["20", "0"];
/// How long operations are counted, in seconds.
const COUNTED: &str = "1.5";

/// A server, and the loads of its clients.
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
    protocol: &'static str,
    port: &'static str,
    operations: &'static [Operation],
}

/// What customers ask for.
struct Operation {
    /// What follows the name of the server.
    name: &'static str,
    request: &'static str,
    /// Whether the order of connections is promised to insulate it.
    is_promised: bool,
}

const fn operation(request: &'static str) -> Operation {
    Operation { name: "", request, is_promised: true }
}

enum Count {
    Before(&'static str),
    After(&'static str),
    PerConnection(u64),
}

/// The shell command that starts postgresql.
pub(super) const POSTGRESQL: &str = "chown postgres /tmp; \
     exec su postgres -s /bin/bash -c 'PATH=$PATH:/usr/lib/postgresql/15/bin; \
     cd /tmp && initdb -D /tmp/db --auth=trust >/dev/null && \
     echo host all all all trust >> /tmp/db/pg_hba.conf && \
     exec postgres -D /tmp/db -h 0.0.0.0 -k /tmp -N 400'";

/// The shell command that starts nginx. Its page `/long` is compressed.
pub(super) const NGINX: &str = "mkdir -p /tmp/www; seq 15000 > /tmp/www/long; chmod -R a+rX /tmp/www; \
     echo 'daemon off; worker_processes 1; user root; error_log /dev/null; pid /tmp/pid; \
     events { worker_connections 2048; } http { access_log off; keepalive_requests 1000000000; \
     gzip on; gzip_http_version 1.0; gzip_types text/plain; default_type text/plain; root /tmp/www; \
     server { listen 80; location / { return 200 bench; } location /long { } } }' > /tmp/conf; exec nginx -c /tmp/conf";

const SERVICES: [Service; 6] = [
    Service {
        name: "redis",
        what: "one thread, epoll",
        server: "exec redis-server --save '' --protected-mode no --bind 0.0.0.0",
        ready: "redis-cli -h svc ping | grep -q PONG",
        load: "redis-benchmark -h svc -c $N -n $((N * 12000)) -t set --csv",
        count: Count::PerConnection(12_000),
        protocol: "redis",
        port: "6379",
        operations: &[operation(
            "EVAL \"local i = 0 while i < 50000 do i = i + 1 end return i\" 0",
        )],
    },
    Service {
        name: "postgresql",
        what: "a process for each connection",
        server: POSTGRESQL,
        ready: "psql -h svc -U postgres -Atc 'select 1' | grep -q 1",
        load: "echo 'select sum(i * i) from generate_series(1, 2000) i' > /tmp/q; \
               /usr/lib/postgresql/15/bin/pgbench -n -h svc -U postgres -f /tmp/q -c $N -j 1 -T $SECONDS postgres",
        count: Count::Before("number of transactions actually processed:"),
        protocol: "postgresql",
        port: "5432",
        operations: &[operation("select sum(i * i) from generate_series(1, 5000) i")],
    },
    Service {
        name: "mariadb",
        what: "a thread for each connection",
        server: "chmod 1777 /tmp; mkdir -p /run/mysqld && chown mysql /run/mysqld && \
                 exec mariadbd --user=mysql --skip-grant-tables --bind-address=0.0.0.0 --skip-networking=0 \
                 --skip-name-resolve --max-connections=400",
        ready: "mariadb -h svc -P 3306 -e 'select 1' | grep -q 1",
        load: "for i in $(seq $N); do yes \"select benchmark(200, md5('a'));\" | head -n 1500 | \
               mariadb -h svc -P 3306 > /dev/null & done; wait",
        count: Count::PerConnection(1500),
        protocol: "mysql",
        port: "3306",
        operations: &[operation("do benchmark(2000, md5('a'))")],
    },
    Service {
        name: "nginx",
        what: "one process, epoll",
        server: NGINX,
        ready: "wrk -c 1 -t 1 -d 1 http://svc/ | grep -q requests",
        load: "wrk -c $N -t 1 -d $SECONDS http://svc/",
        count: Count::After("requests in"),
        protocol: "http",
        port: "80",
        operations: &[operation("/long")],
    },
    Service {
        name: "nginx and php-fpm",
        what: "a front with one process, a backend with two",
        server: "mkdir -p /tmp/www; chmod 755 /tmp/www; \
                 echo '<?php $s = 0; for ($i = 0; $i < 40000; $i++) $s += $i * $i; \
                 echo $s;' > /tmp/www/page.php; echo '<?php usleep(2000); echo 1;' > /tmp/www/wait.php; \
                 printf '[global]\\ndaemonize = no\\nerror_log = /dev/null\\n[www]\\nuser = www-data\\n\
                 listen = /tmp/php\\nlisten.mode = 0666\\nlisten.backlog = 511\\n\
                 pm = static\\npm.max_children = 2\\n' > /tmp/fpm; \
                 php-fpm8.2 --nodaemonize --fpm-config /tmp/fpm & \
                 echo 'daemon off; worker_processes 1; user root; error_log /dev/null; pid /tmp/pid; \
                 events { worker_connections 2048; } http { access_log off; keepalive_requests 1000000000; \
                 server { listen 80; location / { \
                 include /etc/nginx/fastcgi_params; fastcgi_param SCRIPT_FILENAME /tmp/www$uri; \
                 fastcgi_pass unix:/tmp/php; } } }' > /tmp/conf; exec nginx -c /tmp/conf",
        ready: "wrk -c 1 -t 1 -d 1 http://svc/page.php | grep -v Non-2xx | grep -q requests",
        load: "wrk -c $N -t 1 -d $SECONDS http://svc/page.php",
        count: Count::After("requests in"),
        protocol: "http",
        port: "80",
        operations: &[
            operation("/page.php"),
            // Nginx takes all requests at once, and its backend takes two.
            Operation { name: " that waits", request: "/wait.php", is_promised: false },
        ],
    },
    Service {
        name: "dnsmasq",
        what: "one thread, datagrams",
        server: "exec dnsmasq -k -u root --no-resolv --no-hosts --address=/x.test/192.0.2.1 --pid-file=/tmp/pid",
        ready: "echo x.test A > /tmp/q; dnsperf -s $SVC -d /tmp/q -n 1 | grep -q 'completed: *1'",
        // dnsperf has a few hundred queries a second with so few at a time.
        load: "set -- $(/customer dns $SVC 53 $N $SECONDS 0 x.test) && echo queries: $6",
        count: Count::Before("queries:"),
        protocol: "dns",
        port: "53",
        // Datagrams have no order.
        operations: &[Operation { name: "", request: "x.test", is_promised: false }],
    },
];

/// All parts, for the services with these names, or for all.
pub(super) fn services(bench: &Bench, names: &[String], rounds: usize) -> Result<()> {
    let is_chosen = |one: &&Service| names.is_empty() || names.iter().any(|name| name == one.name);
    let turns = if names.is_empty() { rounds.min(TURNS) } else { rounds };
    let mut heights = [vec![], vec![]];
    for service in SERVICES.iter().filter(is_chosen) {
        open(bench, service)?;
        charges(bench, service, turns)?;
        for operation in service.operations {
            let ratios = insulation(bench, service, operation, turns)?;
            for (all, ratio) in heights.iter_mut().zip(ratios) {
                all.push((format!("{}{}", service.name, operation.name), ratio));
            }
        }
        ok(bench.dormouse().args(["rm", "--force", "svc", "a", "b"]))?;
    }
    let [beside, both] = heights;
    let sets = [
        Bars { name: "without gates", heights: beside },
        Bars { name: "with gates, debts and order", heights: both },
    ];
    let title = "Operations of a customer beside an abusive one";
    bars("services", title, "duration beside that of the customer alone", 1.0, &sets)
}

fn open(bench: &Bench, service: &Service) -> Result<()> {
    start(bench, "svc", &[&ONE_CPU[..], &["--shared"]].concat(), service.server)?;
    let program = format!("{}:/customer:ro", bench.path("customer").display());
    for name in CUSTOMERS {
        start(bench, name, &[&ONE_CPU[..], &["-v", &program]].concat(), "exec sleep 1000000")?;
    }
    take_processor(bench, "a")?;
    let address = bench.address("svc", 1)?.ip().to_string();
    let ready = || ok(&mut inside(bench, "a", &[("SVC", address.clone())], service.ready)).is_ok();
    if !wait_until(PATIENCE, ready) {
        bail!("{} does not answer: {}", service.name, ok(bench.dormouse().args(["logs", "svc"]))?);
    }
    Ok(())
}

/// The loads of some customers at once: what was charged, the CPU time of the server's cgroup in ns, and the number of
/// requests of each.
fn load(
    bench: &Bench,
    service: &Service,
    connections: [u64; 2],
    who: &[usize],
) -> Result<(Charged, f64, [u64; 2])> {
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
    let id = bench.record("svc")?["id"].as_str().context("no id")?.to_owned();
    let cgroup = bill::top(bench)?.join(id);
    let before = (Charged::read(bench)?, bill::used_s(&cgroup)?);
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
    let charged = Charged::read(bench)?.since(before.0);
    Ok((charged, (bill::used_s(&cgroup)? - before.1) * 1e9, counts))
}

fn charges(bench: &Bench, service: &Service, turns: usize) -> Result<()> {
    ok(bench.dormouse().args(["gate", "load", "receive"]))?;
    // A first load fills caches.
    load(bench, service, EQUAL, &[0, 1])?;
    let mut together = [vec![], vec![]];
    let (mut own, mut sums, mut alone) = (vec![], vec![], [vec![], vec![]]);
    for _ in 0..turns {
        // Either customer begins once, in case the place in the server's order costs something.
        for (connections, at, order) in
            [(EQUAL, 0, [0, 1]), (UNEQUAL, 1, [0, 1]), (EQUAL, 0, [1, 0])]
        {
            let (charged, counted, counts) = load(bench, service, connections, &order)?;
            let ratios = &mut together[at];
            let [a, b] = charged.taken.map(|ns| ns as f64);
            let [count_a, count_b] = counts.map(|count| count as f64);
            ratios.push(a / count_a / (b / count_b));
            // The cgroup has whole microseconds, so this can be a little below 0.
            let itself = charged.used as f64 - charged.given as f64;
            own.push(itself / charged.used as f64 * 100.0);
            sums.push((a + b + itself) / counted);
        }
        for (customer, times) in alone.iter_mut().enumerate() {
            let (_, counted, counts) = load(bench, service, UNEQUAL, &[customer])?;
            times.push(counted / counts[customer] as f64 / 1e3);
        }
    }
    ok(bench.dormouse().args(["gate", "unload"]))?;
    let range = |all: &[f64]| {
        all.iter().fold([f64::MAX, f64::MIN], |[low, high], r| [low.min(*r), high.max(*r)])
    };
    let [[low, high], [other_low, other_high]] = together.each_ref().map(|all| range(all));
    let ([equal, unequal], [first, second]) = (together.map(median), alone.map(median));
    let (own, sum) = (median(own), median(sums));
    let name = format!("{}, {}: charge for a request, first to second", service.name, service.what);
    eprintln!(
        "  {name}: 4 and 4 connections {equal:.3} ({low:.3} to {high:.3}); 2 and 6 {unequal:.3} ({other_low:.3} to \
         {other_high:.3}), alone {first:.2} and {second:.2} us, {:.3}; {own:.2} % for itself; all charges beside the \
         cgroup {sum:.4}",
        first / second,
    );
    let more = serde_json::json!({
        "turns": turns, "min": low, "max": high, "with_2_and_6": unequal, "alone_2_us": first,
        "alone_6_us": second, "own_percent": own, "sum_to_cgroup": sum,
    });
    figure("accounts", &name, equal, "ratio", more);
    let text = format!("{}: difference of equal customers, in %", service.name);
    promise(&text, (equal - 1.0).abs() * 100.0, 1.0);
    promise(
        &format!("{}: all charges beside the cgroup, in %", service.name),
        (sum - 1.0).abs() * 100.0,
        1.0,
    );
    Ok(())
}

/// Operations of a customer.
#[derive(Debug, Clone, Copy, Default)]
struct Got {
    /// A second, with an answer.
    rate: f64,
    /// Without an answer in time, of all.
    lost: f64,
    median_ms: f64,
    mean_ms: f64,
    p99_ms: f64,
}

/// What the customers have in one turn; the second has nothing where it has no part.
fn turn(bench: &Bench, service: &Service, request: &str, arm: usize) -> Result<[Got; 2]> {
    let set = Set::begin(bench, arm == 2, arm == 2)?;
    await_order(bench, arm == 2)?;
    let address = bench.address("svc", 1)?.ip().to_string();
    let begin = |n: usize| -> Result<Child> {
        let mut exec = bench.dormouse();
        exec.args(["exec", CUSTOMERS[n], "/customer", service.protocol, &address, service.port]);
        exec.args([WORKERS[n], COUNTED, THINK[n], request]);
        Ok(exec.stdout(Stdio::piped()).spawn()?)
    };
    let customers = if arm == 0 { 0..1 } else { 0..2 };
    let children = customers.map(begin).collect::<Result<Vec<_>>>()?;
    let mut all = [Got::default(); 2];
    for (got, child) in all.iter_mut().zip(children) {
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{}: a customer fails: {output:?}", service.name);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers: Vec<f64> =
            text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [done, lost, median, mean, p99, _] = numbers[..] else { bail!("no figures: {text}") };
        ensure!(done > 0.0, "{}: no operation of {lost} is answered", service.name);
        *got = Got {
            rate: done / COUNTED.parse::<f64>()?,
            lost: lost / (done + lost),
            median_ms: median / 1e3,
            mean_ms: mean / 1e3,
            p99_ms: p99 / 1e3,
        };
    }
    set.end(bench)?;
    Ok(all)
}

/// Returns the duration of an operation of the first customer beside the second, by that alone: without gates,
/// and with all.
fn insulation(
    bench: &Bench,
    service: &Service,
    operation: &Operation,
    turns: usize,
) -> Result<[f64; 2]> {
    const ARMS: [&str; 3] =
        ["alone", "beside, without gates", "beside, with gates, debts and order"];
    let mut all: [Vec<[Got; 2]>; 3] = Default::default();
    for round in 0..turns {
        for step in 0..ARMS.len() {
            let arm = (step + round) % ARMS.len();
            all[arm].push(turn(bench, service, operation.request, arm)?);
        }
    }
    let middle = |turns: &Vec<[Got; 2]>, of: usize, what: fn(&Got) -> f64| {
        median(turns.iter().map(|both| what(&both[of])).collect())
    };
    let mut means = [0.0; 3];
    let whole = format!("{}{}", service.name, operation.name);
    for (n, turns) in all.iter().enumerate() {
        let of = |what| middle(turns, 0, what);
        let (rate, lost) = (of(|got| got.rate), of(|got| got.lost) * 100.0);
        let (mean, half, p99) =
            (of(|got| got.mean_ms), of(|got| got.median_ms), of(|got| got.p99_ms));
        let other = middle(turns, 1, |got| got.rate);
        means[n] = mean;
        let name = format!("{whole}, an operation of the first customer, {}", ARMS[n]);
        eprintln!(
            "  {name}: {mean:.2} ms, p50 {half:.2}, p99 {p99:.1}, {rate:.0}/s, {lost:.1} % lost; the other {other:.0}/s"
        );
        let more = serde_json::json!({
            "turns": turns.len(), "p50_ms": half, "p99_ms": p99, "per_s": rate, "lost_percent": lost,
            "other_per_s": other,
        });
        figure("accounts", &name, mean, "ms", more);
    }
    if operation.is_promised {
        let text = format!("{whole}: an operation with order, as a part of that without gates");
        promise(&text, means[2] / means[1], 0.25);
    }
    Ok([means[1] / means[0], means[2] / means[0]])
}
