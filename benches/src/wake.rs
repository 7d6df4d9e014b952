//! How long a caller waits for the first byte: from a server that is awake, and from one that is
//! asleep, in turn.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin wake -- --rounds 100
//! ```
//!
//! What is timed is connect(2), one request, and the first byte of the answer: awake that is the
//! floor, asleep it is also a process of the keeper's, a start with all namespaces, and memory that
//! comes back. Servers that are not installed here are left out, loudly.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dormouse_benches::{Bench, Times, figure, installed, ok, promise};
use dormouse_testkit::wait_until;

/// Options.
#[derive(Parser)]
struct Options {
    /// How often each server is put to sleep and asked.
    #[arg(long, default_value_t = 100)]
    rounds: usize,
}

/// LIMIT: how long an answer may take before the benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server, and what it is asked.
struct Server {
    name: &'static str,
    /// What is to be installed for it; empty for the static one.
    needs: &'static str,
    words: &'static [&'static str],
    port: u16,
    request: &'static str,
}

const HTTP: &str = "GET / HTTP/1.0\r\n\r\n";

/// The first is what is promised.
const SERVERS: [Server; 3] = [
    Server { name: "static", needs: "", words: &["serve", "80", "64"], port: 80, request: "Q\n" },
    Server {
        name: "nginx",
        needs: "nginx",
        words: &["nginx", "-g", "daemon off; worker_processes 1; user root;"],
        port: 80,
        request: HTTP,
    },
    Server {
        name: "python http.server",
        needs: "/usr/bin/python3",
        words: &["/usr/bin/python3", "-m", "http.server", "--directory", "/etc", "80"],
        port: 80,
        request: HTTP,
    },
];

impl Server {
    fn is_here(&self) -> bool {
        match self.needs {
            "" => true,
            path if path.starts_with('/') => Path::new(path).exists(),
            program => installed(program),
        }
    }

    fn start(&self, bench: &Bench, name: &str) -> Result<SocketAddr> {
        let mut run = bench.dormouse();
        run.args(["run", "-d", "--name", name]);
        // What is installed on this host runs on its own files, below a layer that is the container's.
        match self.needs {
            "" => run.arg("bench"),
            _ => run.args(["--rootfs", "/"]),
        };
        ok(run.args(self.words))?;
        bench.address(name, self.port)
    }

    /// The time until the first byte.
    fn ask(&self, address: SocketAddr) -> Result<Duration> {
        let start = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(self.request.as_bytes())?;
        ensure!(stream.read(&mut [0])? == 1, "no answer");
        let took = start.elapsed();
        // It is idle when it has hung up.
        stream.read_to_end(&mut Vec::new())?;
        Ok(took)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    for (n, server) in SERVERS.iter().enumerate() {
        if !server.is_here() {
            eprintln!("  SKIPPED: {}: {} is not installed", server.name, server.needs);
            continue;
        }
        let (awake, asleep) = measure(&bench, server, options.rounds)
            .with_context(|| format!("{} does not answer", server.name))?;
        for (state, times) in [("awake", &awake), ("asleep", &asleep)] {
            let more = serde_json::json!({
                "rounds": options.rounds, "p50_ms": times.median_ms(), "p99_ms": times.at(0.99),
                "min_ms": times.at(0.0), "max_ms": times.at(1.0),
            });
            let name = format!("{}, {state}: first byte", server.name);
            eprintln!("  {name}: p50 {:.2} ms, p99 {:.2} ms", times.median_ms(), times.at(0.99));
            figure("wake", &name, times.median_ms(), "ms", more);
        }
        if n == 0 {
            promise("p50 of the first byte of one that sleeps, in ms", asleep.median_ms(), 5.0);
            promise("p99 of the first byte of one that sleeps, in ms", asleep.at(0.99), 25.0);
        }
    }
    Ok(())
}

fn measure(bench: &Bench, server: &Server, rounds: usize) -> Result<(Times, Times)> {
    const NAME: &str = "server";
    let address = server.start(bench, NAME)?;
    ensure!(wait_until(PATIENCE, || server.ask(address).is_ok()), "not even once");
    let (mut awake, mut asleep) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        awake.push(server.ask(address)?);
        ok(bench.dormouse().args(["sleep", NAME]))?;
        asleep.push(server.ask(address)?);
    }
    ok(bench.dormouse().args(["rm", "--force", NAME]))?;
    Ok((Times::new(awake), Times::new(asleep)))
}
