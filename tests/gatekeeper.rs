//! Admission control: where memory suffices for some containers only, a wake waits for memory while
//! other containers are suspended to disk. Pages that go to swap instead are tested in `swap.rs`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, slowness, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// The number of containers, how many of them fit, and the private memory of each.
const ALL: usize = 12;
const FIT: usize = 4;
const KIB: usize = 8192;
/// Suffices for four with the kernel's memory for them; five exceed it with their private memory
/// alone.
const MEMORY: &str = "39m";

/// A daemon that is killed with its test.
struct Daemon(Child);

impl Daemon {
    #[track_caller]
    fn start(host: &Host, options: &[&str]) -> Self {
        // The same with and without swap on this host.
        let mut command = host.dormouse(&[&["daemon", "--reclaim", "sleep"], options].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the command starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let line = lines.next().expect("a line of output").expect("in UTF-8");
        assert!(line.contains("daemon: ready"), "{line}");
        // Later lines go to the test's output.
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("{line}")));
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("our child");
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts servers that number their connections, each with private memory, and puts all to sleep.
#[track_caller]
fn sleepers(host: &Host, options: &[&str]) -> Vec<String> {
    (0..ALL).map(|n| sleeper(host, &format!("c{n}"), options)).collect()
}

/// Starts one such server. Returns its address.
#[track_caller]
fn sleeper(host: &Host, name: &str, options: &[&str]) -> String {
    let run = [&["run", "-d", "--name", name, "--sleep-after", "3600s"], options].concat();
    let kib = KIB.to_string();
    let serve = ["busybox", "probe", "count", "0.0.0.0", "80", &kib];
    host.dm(&[&run[..], &serve].concat()).ok();
    host.wait_inside(name, "netstat -ltn | grep -q ':80 '");
    host.dm(&["sleep", name]).ok();
    format!("{}:80", host.address_of(name))
}

/// Containers that have processes, are about to have some, or had some until now.
fn awake(host: &Host) -> Vec<String> {
    let dir = std::fs::read_dir(host.root().join("run/c"));
    let entries = dir.into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Sends a request to a server. Returns the server's connection number, and the time until the
/// answer.
fn query(address: &str) -> (u32, Duration) {
    let begin = Instant::now();
    let mut stream = TcpStream::connect(address).expect("a connection is never refused");
    stream.set_read_timeout(Some(soon())).expect("a timeout");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer in time");
    let number = text.trim().strip_prefix("call ").and_then(|number| number.parse().ok());
    (number.unwrap_or_else(|| panic!("unexpected answer '{text}'")), begin.elapsed())
}

/// Returns the index of a container, index n with weight 1/(n+1): the first as often as the second
/// and third together, and so on.
fn zipf(random: &mut u64) -> usize {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    let sum: f64 = (1..=ALL).map(|n| 1.0 / n as f64).sum();
    let mut at = (*random >> 11) as f64 / (1u64 << 53) as f64 * sum;
    for n in 0..ALL {
        at -= 1.0 / (n + 1) as f64;
        if at < 0.0 {
            return n;
        }
    }
    ALL - 1
}

/// Clients that connect at random until they are stopped.
struct Callers {
    enough: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<(usize, u32, Duration)>>>,
}

impl Callers {
    fn start(host: &Host, addresses: &[String], count: u64) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let call = |n: u64| {
            let (enough, addresses) = (Arc::clone(&enough), addresses.to_vec());
            host.in_network(move || {
                let (mut random, mut answers) =
                    (0x9e37_79b9_7f4a_7c15 ^ ((n + 1) << 20), Vec::new());
                while !enough.load(Ordering::Relaxed) {
                    let index = zipf(&mut random);
                    let (number, took) = query(&addresses[index]);
                    answers.push((index, number, took));
                    thread::sleep(Duration::from_millis(5));
                }
                answers
            })
        };
        let threads = (0..count).map(call).collect();
        Self { enough, threads }
    }

    /// Stops the clients. Each server has numbered its connections without a gap: each was accepted
    /// once.
    #[track_caller]
    fn end(self) -> Vec<(usize, u32, Duration)> {
        self.enough.store(true, Ordering::Relaxed);
        let threads = self.threads.into_iter();
        let all: Vec<_> =
            threads.flat_map(|thread| thread.join().expect("an answer to each client")).collect();
        let mut numbers: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        all.iter().for_each(|(index, number, _)| numbers.entry(*index).or_default().push(*number));
        for (index, mut numbers) in numbers {
            numbers.sort_unstable();
            let expected: Vec<u32> = (1..=numbers.len() as u32).collect();
            assert_eq!(numbers, expected, "c{index}");
        }
        all
    }
}

#[test]
fn awake_containers_fit_memory_and_all_requests_are_answered() {
    let host = Host::with_busybox();
    let addresses = sleepers(&host, &[]);
    let ids: Vec<String> = (0..ALL)
        .map(|n| host.inspect(&format!("c{n}"))["id"].as_str().expect("an id").to_owned())
        .collect();
    let _daemon = Daemon::start(&host, &["--memory", MEMORY]);
    let callers = Callers::start(&host, &addresses, 3);
    let (mut samples, mut most) = (0, 0);
    let mut times = [0; ALL];
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(12) * slowness().min(4) {
        let now = awake(&host);
        most = most.max(now.len());
        samples += 1;
        for (n, id) in ids.iter().enumerate() {
            times[n] += usize::from(now.contains(id));
        }
        thread::sleep(Duration::from_millis(2));
    }
    let answers = callers.end();
    let longest = answers.iter().map(|(_, _, took)| *took).max().expect("a request");
    let share = |n: usize| times[n] as f64 / f64::from(samples);
    let shares: Vec<String> = (0..ALL).map(|n| format!("{:.2}", share(n))).collect();
    println!("{} calls, longest {longest:?}, awake {}", answers.len(), shares.join(" "));
    assert!(most <= FIT, "{most} were awake at once");
    assert!(most > 1, "more than one fits");
    let count_of = |n: usize| answers.iter().filter(|(index, ..)| *index == n).count();
    assert!((0..ALL).all(|n| count_of(n) > 0), "each server had a request, of {}", answers.len());
    let seldom = (ALL / 2..ALL).map(share).sum::<f64>() / (ALL / 2) as f64;
    assert!(share(0) > seldom * 1.5, "the most popular container sleeps too much");
    let slept = host.dm(&["events", "--no-stream", "--json"]).ok();
    assert!(slept.contains("\"reason\":\"memory\""), "containers are suspended for memory");
}

#[test]
fn admission_in_batches_of_one_answers_all_requests() {
    let host = Host::with_busybox();
    let addresses = sleepers(&host, &[]);
    let _daemon = Daemon::start(&host, &["--memory", MEMORY, "--batch", "1"]);
    let callers = Callers::start(&host, &addresses, 6);
    let mut most = 0;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(6) {
        most = most.max(awake(&host).len());
        thread::sleep(Duration::from_millis(2));
    }
    assert!(!callers.end().is_empty(), "some requests");
    assert!(most <= FIT, "{most} were awake at once");
}

#[test]
fn containers_wake_without_daemon_and_next_daemon_frees_memory() {
    let host = Host::with_busybox();
    let etc = host.root().join("etc");
    std::fs::create_dir_all(&etc).expect("created");
    std::fs::write(etc.join("config.toml"), format!("[daemon]\nmemory = \"{MEMORY}\"\n"))
        .expect("write the file");
    let addresses = sleepers(&host, &[]);
    let mut daemon = Daemon::start(&host, &[]);
    let callers = Callers::start(&host, &addresses, 6);
    thread::sleep(Duration::from_secs(3));
    assert!(awake(&host).len() <= FIT);
    // Wakes that wait at that moment are granted all the same.
    daemon.kill();
    assert!(wait_until(soon(), || awake(&host).len() > FIT), "no limit without a daemon");
    let daemon = Daemon::start(&host, &[]);
    assert!(wait_until(soon(), || awake(&host).len() <= FIT), "memory is freed");
    // A daemon that does not respond counts as none: clients wait only until that is noticed.
    daemon.signal(Signal::STOP);
    thread::sleep(Duration::from_secs(1));
    callers.end();
}

#[test]
fn never_sleeping_containers_do_not_starve_waiting_wakes() {
    let host = Host::with_busybox();
    let addresses = sleepers(&host, &[]);
    for n in 0..FIT {
        host.dm(&["update", "--never-sleep", &format!("c{n}")]).ok();
    }
    let _daemon = Daemon::start(&host, &["--memory", MEMORY]);
    let query_all = || {
        let addresses = addresses.clone();
        let client = host.in_network(move || addresses.iter().map(|it| query(it).0).max());
        client.join().expect("an answer to each client")
    };
    assert_eq!(query_all(), Some(1));
    assert!(
        wait_until(soon(), || awake(&host).len() <= FIT + 1),
        "the other containers take turns"
    );
    assert_eq!(query_all(), Some(2));
    for n in 0..FIT {
        assert_eq!(host.state_of(&format!("c{n}")), "running");
    }
    // An operator's wake waits in the same queue, and a waiting container can be stopped.
    host.dm(&["wake", "c9"]).ok();
    host.dm(&["stop", "c9"]).ok();
    assert_eq!(host.state_of("c9"), "stopped");
}

#[test]
fn heavier_cpu_weight_is_admitted_first() {
    let host = Host::with_busybox();
    let light = sleeper(&host, "light", &[]);
    let heavy = sleeper(&host, "heavy", &["--cpu-weight", "10000"]);
    // Memory for one of them.
    let daemon = Daemon::start(&host, &["--memory", "12m"]);
    // Both wait before the daemon looks at its queue.
    daemon.signal(Signal::STOP);
    let callers = [light, heavy].map(|address| {
        let caller = host.in_network(move || {
            query(&address);
            Instant::now()
        });
        thread::sleep(Duration::from_millis(300) * slowness());
        caller
    });
    daemon.signal(Signal::CONT);
    let [light, heavy] = callers.map(|caller| caller.join().expect("an answer to each"));
    assert!(heavy < light, "by {:?}", heavy - light);
}

#[test]
fn invalid_daemon_settings_are_refused() {
    let host = Host::with_busybox();
    let error = host.dm(&["daemon", "--memory", "most"]);
    assert!(error.status != 0 && error.stderr.contains("most"), "{error}");
    let error = host.dm(&["daemon", "--batch", "0"]);
    assert!(error.status != 0 && error.stderr.contains("from 1 to 64"), "{error}");
    let error = host.dm(&["daemon", "--reclaim", "kill"]);
    assert!(error.status != 0 && error.stderr.contains("'swap' or 'sleep'"), "{error}");
    let etc = host.root().join("etc");
    std::fs::create_dir_all(&etc).expect("created");
    std::fs::write(etc.join("config.toml"), "[daemon]\nmemory = \"most\"\n").expect("written");
    let error = host.dm(&["daemon"]);
    assert!(error.status != 0 && error.stderr.contains("config.toml"), "{error}");
    std::fs::write(etc.join("config.toml"), "[wake]\nblock = \"5k\"\n").expect("written");
    let error = host.dm(&["daemon"]);
    assert!(error.status != 0 && error.stderr.contains("block '5k'"), "{error}");
    std::fs::write(etc.join("config.toml"), "[daemon]\nmemory = \"off\"\n").expect("written");
    let _daemon = Daemon::start(&host, &[]);
    assert!(!host.root().join("run/gate.sock").exists(), "no admission control");
}
