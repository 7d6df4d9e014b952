//! Servers of a kind, memory for some of them, and clients that send one request after the other.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use dormouse_testkit::wait_until;

use crate::{Bench, Daemon, Times, ok};

/// LIMIT: the time for an answer before a benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time until popular servers are known, and others were suspended: at least, per server, and per
/// MB.
const WARMS_UP: Duration = Duration::from_secs(1);
const EACH_WARMS_UP: Duration = Duration::from_millis(5);
const EACH_MB_WARMS_UP: Duration = Duration::from_millis(10);
/// Kernel memory of a server, in KiB.
const KERNEL_KIB: u64 = 400;

/// Servers with private memory, in the order of their popularity.
pub struct Farm<'b> {
    bench: &'b Bench,
    kib: u64,
    /// The addresses of the servers.
    pub all: Vec<SocketAddr>,
}

/// Clients: server n receives a request with a probability of 1/n^alpha.
#[derive(Debug, Clone, Copy)]
pub struct Callers {
    /// Number of concurrent clients.
    pub clients: usize,
    /// The exponent of the popularity.
    pub alpha: f64,
    /// Duration.
    pub time: Duration,
    /// The memory that a server reads for an answer.
    pub touched: Touched,
}

/// The memory that a server reads for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Touched {
    /// All of it.
    All,
    /// The first 64 kB.
    Few,
}

impl Touched {
    /// The word of the request (floor/serve.c).
    fn word(self) -> &'static str {
        match self {
            Self::All => "Q",
            Self::Few => "F",
        }
    }
}

/// Results of the clients.
pub struct Asked {
    /// Answers a second.
    pub requests_per_s: f64,
    /// Times of the answers.
    pub times: Times,
    /// Number of wakes meanwhile.
    pub wakes: usize,
    /// Memory of all servers in the end, with the kernel's part and the page cache, in bytes.
    pub memory_bytes: u64,
}

impl<'b> Farm<'b> {
    /// An empty farm, of servers with so much memory each.
    pub fn new(bench: &'b Bench, kib: u64) -> Self {
        Self { bench, kib, all: Vec::new() }
    }

    /// The name of server `number`.
    pub fn name(number: usize) -> String {
        format!("s{number}")
    }

    /// Starts more servers, up to `count`.
    pub fn grow(&mut self, count: usize) -> Result<()> {
        self.grow_with(count, |_| None)
    }

    /// The same; some have a timer that expires periodically.
    pub fn grow_with(
        &mut self,
        count: usize,
        period: impl Fn(usize) -> Option<Duration>,
    ) -> Result<()> {
        let kib = self.kib.to_string();
        for n in self.all.len()..count {
            let name = Self::name(n);
            let period = period(n).map(|period| period.as_millis().to_string());
            let mut run = self.bench.dormouse();
            run.args(["run", "-d", "--sleep-after", "3600s", "--name", &name]);
            ok(run.args(["bench", "serve", "80", &kib]).args(period))?;
            self.all.push(self.bench.address(&name, 80)?);
        }
        let answers = || self.all.iter().all(|address| query(*address, Touched::All).is_ok());
        ensure!(wait_until(PATIENCE, answers), "not all servers answer");
        Ok(())
    }

    /// Sends each a request that touches all its memory.
    pub fn fill(&self) -> Result<()> {
        self.all.iter().try_for_each(|address| query(*address, Touched::All).map(drop))
    }

    /// Starts a daemon with memory for `fit` servers.
    pub fn with_room_for(&self, fit: usize, options: &[&str]) -> Result<Daemon> {
        // A sixteenth is kept free.
        let kib = self.room_bytes(fit) * 16 / 15 / 1024 + 1;
        self.bench.daemon(&[&["--memory", &format!("{kib}k")], options].concat())
    }

    /// The memory of `fit` servers.
    pub fn room_bytes(&self, fit: usize) -> u64 {
        fit.max(1) as u64 * (self.kib + KERNEL_KIB) * 1024
    }

    /// Runs the clients for a while, after a warm-up.
    pub fn query(&self, callers: Callers) -> Result<Asked> {
        let each = EACH_WARMS_UP + EACH_MB_WARMS_UP * (self.kib >> 10) as u32;
        callers.query(&self.all, WARMS_UP.max(each * self.all.len() as u32))?;
        let before = self.wakes()?;
        let times = callers.query(&self.all, callers.time)?;
        let wakes = self.wakes()?.saturating_sub(before);
        let requests_per_s = times.len() as f64 / callers.time.as_secs_f64();
        let memory_bytes = self.memory_bytes()?;
        Ok(Asked { requests_per_s, times: Times::new(times), wakes, memory_bytes })
    }

    fn memory_bytes(&self) -> Result<u64> {
        let all = ok(self.bench.dormouse().args(["stats", "--no-stream", "--json"]))?;
        let all: serde_json::Value = serde_json::from_str(&all)?;
        let of = |one: &serde_json::Value| one["memory_bytes"].as_u64();
        let bytes = all.as_array().and_then(|all| all.iter().map(of).sum());
        bytes.context("no memory in stats")
    }

    /// The number of wakes so far.
    fn wakes(&self) -> Result<usize> {
        let text = std::fs::read_to_string(self.bench.path("root/lib/events"))?;
        Ok(text.lines().filter(|line| line.contains("\"wake\"")).count())
    }
}

impl Callers {
    fn query(self, all: &[SocketAddr], time: Duration) -> Result<Vec<Duration>> {
        let is_over = AtomicBool::new(false);
        let seed = AtomicUsize::new(0);
        let client = || -> Result<Vec<Duration>> {
            let number = seed.fetch_add(1, Ordering::Relaxed) as u64;
            let mut ranks =
                Ranks::new(0x9e37_79b9_7f4a_7c15 ^ (number << 20), all.len(), self.alpha);
            let mut times = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                times.push(query(all[ranks.draw()], self.touched)?);
            }
            Ok(times)
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..self.clients).map(|_| scope.spawn(client)).collect();
            std::thread::sleep(time);
            is_over.store(true, Ordering::Relaxed);
            let mut all = Vec::new();
            for client in clients {
                let times = client.join().map_err(|_| anyhow!("a client panicked"))?;
                all.extend(times.context("a request failed")?);
            }
            Ok(all)
        })
    }
}

/// Requests a check of a server's memory: a connection, a word, the answer.
pub fn query(address: SocketAddr, touched: Touched) -> Result<Duration> {
    let begin = Instant::now();
    let answer = request(address, touched.word())?;
    ensure!(answer.contains("whole"), "unexpected answer '{answer}'");
    Ok(begin.elapsed())
}

/// Sends a word to a server (floor/serve.c), and returns the answer.
pub fn request(address: SocketAddr, word: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{word}\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    // The server closes first and would keep the connection in TIME_WAIT for a minute. After some
    // ten thousand connections the next one would have the same ports, and wait for seconds.
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    Ok(answer)
}

/// Pseudo-random numbers (xorshift64), and ranks by their probability.
pub struct Ranks {
    state: u64,
    sums: Vec<f64>,
}

impl Ranks {
    /// Ranks from 0 to `count - 1`, of which rank n has a probability of 1/(n + 1)^alpha. The same seed gives the same
    /// ranks.
    pub fn new(seed: u64, count: usize, alpha: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|n| {
            sum += (n as f64).powf(-alpha);
            sum
        });
        Self { state: seed | 1, sums: sums.collect() }
    }

    /// A number of at least 0 and below 1.
    pub fn part(&mut self) -> f64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A rank.
    pub fn draw(&mut self) -> usize {
        let at = self.part() * self.sums.last().copied().unwrap_or(0.0);
        self.sums.partition_point(|sum| *sum <= at).min(self.sums.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_zipfs_law() {
        for alpha in [0.0, 1.0, 1.5] {
            let mut ranks = Ranks::new(7, 10, alpha);
            let mut counts = [0.0; 10];
            (0..100_000).for_each(|_| counts[ranks.draw()] += 1.0);
            let sum: f64 = (1..=10).map(|n| f64::from(n).powf(-alpha)).sum();
            for (n, count) in (1..=10).zip(counts) {
                let expected = 100_000.0 * f64::from(n).powf(-alpha) / sum;
                assert!((count / expected - 1.0_f64).abs() < 0.1, "alpha {alpha}, {n}: {count}");
            }
        }
    }
}
