//! Unmodified servers that two customers share: each customer is charged for its requests, as the cgroup of the server
//! counts them where one customer is alone.
//!
//! A request costs some hundred microseconds or more, so that it costs the same whatever other connections are ready.
//! With cheap requests a server with an event loop is cheaper the more of them it finds (docs/accounts.md).

use std::thread;

use dormouse_testkit::{Host, image, soon, wait_until};

use crate::gates::{accounts, counted_ns, figure, load, stolen_ns};

/// A server, and the requests of its customers.
struct Server {
    /// The shell command that starts it.
    start: &'static str,
    /// A shell command of a customer that succeeds when it answers.
    ready: &'static str,
    /// A shell command of a customer for about `$T` units of work over four connections. It prints a line with the
    /// words of `count`.
    ask: &'static str,
    /// The words before the number of requests, or after it.
    count: Count,
}

enum Count {
    Before(&'static str),
    After(&'static str),
}

impl Count {
    #[track_caller]
    fn read(&self, text: &str) -> u64 {
        let number = |word: Option<&str>| word?.split('/').next()?.parse().ok();
        let found = match self {
            Self::Before(words) => {
                text.split_once(words).and_then(|(_, rest)| number(rest.split_whitespace().next()))
            }
            Self::After(words) => text
                .split_once(words)
                .and_then(|(rest, _)| number(rest.split_whitespace().next_back())),
        };
        found.unwrap_or_else(|| panic!("no count: {text}"))
    }
}

/// What a turn has cost, in nanoseconds.
#[derive(Debug)]
struct Turn {
    /// By the cgroup of the server.
    counted: u64,
    /// By the account of the server: used, and used for itself.
    used: u64,
    own: u64,
    /// By the accounts of the customers, with the numbers of their requests.
    taken: [u64; 2],
    requests: [u64; 2],
}

/// Has these customers ask at the same time, each for so many units.
#[track_caller]
fn turn(host: &Host, server: &Server, units: [u64; 2]) -> Turn {
    let id = host.inspect("svc")["id"].as_str().expect("an id").to_owned();
    let read = || {
        let all = accounts(host);
        let own = figure(&all, "@svc", "CpuNs");
        let used = own + figure(&all, "@svc", "CpuGivenNs");
        let taken = ["@a", "@b"].map(|name| figure(&all, name, "CpuTakenNs"));
        (counted_ns(host, &id), used, own, taken)
    };
    let before = read();
    let ask = |client: &str, units: u64| {
        let units = format!("T={units}");
        let address = format!("SVC={}", host.address_of("svc"));
        let words = ["exec", "-e", &units, "-e", &address, client, "sh", "-c", server.ask];
        let text = if units == "T=0" { return 0 } else { host.dm(&words).ok() };
        server.count.read(&text)
    };
    let requests = thread::scope(|scope| {
        let all = [("a", units[0]), ("b", units[1])];
        let all = all.map(|(client, units)| scope.spawn(move || ask(client, units)));
        all.map(|one| one.join().expect("a thread"))
    });
    let after = read();
    let turn = Turn {
        counted: after.0 - before.0,
        used: after.1 - before.1,
        own: after.2.saturating_sub(before.2),
        taken: [0, 1].map(|n| after.3[n] - before.3[n]),
        requests,
    };
    println!("{turn:?}");
    turn
}

/// Starts a server with two customers, and compares their charges with each other and with those of one customer alone.
#[track_caller]
fn assert_charged(server: &Server) {
    let host = Host::with_busybox();
    host.import(&image::services(), "services");
    load(&host);
    host.dm(&["run", "-d", "--name", "svc", "--shared", "services", "sh", "-c", server.start]).ok();
    for name in ["a", "b"] {
        host.dm(&["run", "-d", "--name", name, "services", "sleep", "100000"]).ok();
    }
    let address = format!("SVC={}", host.address_of("svc"));
    let ready = || host.dm(&["exec", "-e", &address, "a", "sh", "-c", server.ready]);
    assert!(
        wait_until(soon(), || ready().status == 0),
        "{} {}",
        ready(),
        host.dm(&["logs", "svc"])
    );
    turn(&host, server, [1, 1]);
    let alone = turn(&host, server, [2, 0]);
    let both = turn(&host, server, [2, 6]);
    // The server and the kernel agree, and it pays next to nothing itself.
    for turn in [&alone, &both] {
        assert!(
            turn.used.abs_diff(turn.counted) * 100 <= turn.counted + 100 * stolen_ns(),
            "{turn:?}"
        );
        assert!(turn.own * 20 <= turn.used + 20 * stolen_ns(), "{turn:?}");
    }
    let [a, b] = [0, 1].map(|n| both.taken[n] as f64 / both.requests[n] as f64);
    let truth = alone.counted as f64 / alone.requests[0] as f64;
    println!("a request of a costs {a:.0} ns, one of b {b:.0} ns, and {truth:.0} ns alone");
    assert!((0.85..1.18).contains(&(a / b)), "{a} and {b} ns: {both:?}");
    // A busy machine makes both more costly.
    assert!((0.67..1.5).contains(&(a / truth)), "{a}, alone {truth} ns: {both:?}");
}

/// One thread, which waits for all connections at once.
#[test]
fn big_redis_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: "exec redis-server --save '' --protected-mode no --bind 0.0.0.0",
        ready: "redis-cli -h svc ping | grep -q PONG",
        ask: "n=$((T * 400)); redis-benchmark -h svc -c 4 -n $n EVAL \
              'local i = 0 while i < 50000 do i = i + 1 end return i' 0 > /dev/null && echo requests: $n",
        count: Count::Before("requests:"),
    });
}

/// A process for each connection.
#[test]
fn big_postgresql_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: "chown postgres /tmp; exec su postgres -s /bin/bash -c 'PATH=$PATH:/usr/lib/postgresql/15/bin; \
                cd /tmp && initdb -D /tmp/db --auth=trust >/dev/null && \
                echo host all all all trust >> /tmp/db/pg_hba.conf && \
                exec postgres -D /tmp/db -h 0.0.0.0 -k /tmp'",
        ready: "psql -h svc -U postgres -Atc 'select 1' | grep -q 1",
        ask: "echo 'select sum(i * i) from generate_series(1, 5000) i' > /tmp/q; \
              /usr/lib/postgresql/15/bin/pgbench -n -h svc -U postgres -f /tmp/q -c 4 -j 1 -t $((T * 100)) postgres",
        count: Count::Before("number of transactions actually processed:"),
    });
}

/// A thread for each connection, which is used again for the next one.
#[test]
fn big_mariadb_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: "chmod 1777 /tmp; mkdir -p /run/mysqld && chown mysql /run/mysqld && \
                exec mariadbd --user=mysql --skip-grant-tables --bind-address=0.0.0.0 --skip-networking=0",
        ready: "mariadb -h svc -P 3306 -e 'select 1' | grep -q 1",
        ask: "n=$((T * 100)); for i in 1 2 3 4; do yes \"select benchmark(1000, md5('a'));\" | head -n $n | \
              mariadb -h svc -P 3306 > /dev/null & done; wait; echo requests: $((n * 4))",
        count: Count::Before("requests:"),
    });
}

/// One process with an event loop.
#[test]
fn big_nginx_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: "seq 15000 > /tmp/page; echo 'daemon off; worker_processes 1; user root; error_log /dev/null; \
                pid /tmp/pid; events {} http { access_log off; default_type text/plain; gzip on; \
                gzip_types text/plain; keepalive_requests 1000000000; server { listen 80; root /tmp; } }' > \
                /tmp/conf; exec nginx -c /tmp/conf",
        ready: "wrk -c 1 -t 1 -d 1 http://svc/page | grep -q requests",
        ask: "wrk -c 4 -t 1 -d $T -H 'Accept-Encoding: gzip' http://svc/page",
        count: Count::After("requests in"),
    });
}

/// The configuration of nginx with php-fpm behind it, over `$WAY`. A page is some hundred microseconds of work of php.
macro_rules! php {
    ($way:literal, $kept:literal, $listen:literal) => {
        concat!(
            "mkdir -p /tmp/www; echo '<?php $s = 0; for ($i = 0; $i < 40000; $i++) $s += $i * $i; echo $s;' \
             > /tmp/www/page.php; chmod -R a+rX /tmp/www; \
             printf '[global]\\ndaemonize = no\\nerror_log = /dev/null\\n[www]\\nuser = www-data\\nlisten = ",
            $listen,
            "\\nlisten.mode = 0666\\nlisten.backlog = 511\\npm = static\\npm.max_children = 2\\n' > /tmp/fpm; \
             php-fpm8.2 --nodaemonize --fpm-config /tmp/fpm & \
             echo 'daemon off; worker_processes 1; user root; error_log /dev/null; pid /tmp/pid; events {} http { \
             access_log off; keepalive_requests 1000000000; upstream php { server ",
            $way,
            "; ",
            $kept,
            " } server { listen 80; root /tmp/www; location / { include /etc/nginx/fastcgi_params; \
             fastcgi_param SCRIPT_FILENAME /tmp/www/page.php; fastcgi_keep_conn on; fastcgi_pass php; } } }' > \
             /tmp/conf; exec nginx -c /tmp/conf"
        )
    };
}

const PHP_READY: &str = "wrk -c 1 -t 1 -d 1 http://svc/ | grep -v Non-2xx | grep -q requests";
const PHP_ASK: &str = "wrk -c 4 -t 1 -d $T http://svc/";

/// Nginx asks for all customers, and php-fpm sees nginx alone: the label of the task that asks is passed on.
#[test]
fn big_php_behind_nginx_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: php!("unix:/tmp/php", "", "/tmp/php"),
        ready: PHP_READY,
        ask: PHP_ASK,
        count: Count::After("requests in"),
    });
}

/// One connection to php-fpm carries requests of both customers, one after the other.
#[test]
fn big_php_over_kept_connections_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: php!("unix:/tmp/php", "keepalive 1;", "/tmp/php"),
        ready: PHP_READY,
        ask: PHP_ASK,
        count: Count::After("requests in"),
    });
}

#[test]
fn big_php_over_tcp_charges_its_customers_by_their_requests() {
    assert_charged(&Server {
        start: php!("127.0.0.1:9000", "", "127.0.0.1:9000"),
        ready: PHP_READY,
        ask: PHP_ASK,
        count: Count::After("requests in"),
    });
}
