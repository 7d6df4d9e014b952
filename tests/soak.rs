//! Everything at once and at random: sleep, wake, requests, exec, pauses, a daemon, and both the
//! daemon and the keeper killed. Every container is accounted for, every answer is right, and
//! nothing grows. The test runs twenty seconds, or DORMOUSE_SOAK_S; DORMOUSE_SOAK_KILLS=1 kills the
//! keeper four times as often:
//!
//! ```sh
//! DORMOUSE_SOAK_S=7200 DORMOUSE_SOAK_SEED=77 DORMOUSE_TEST_DEADLINE_S=8000 cargo xtask test system::soak::
//! ```

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, image, run, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// The first of the numbers of a step that kill the keeper.
const KILL_KEEPER: u64 = 95;

/// Pseudo-random numbers (xorshift64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// A client of a server that sends an endless sequence.
struct Caller {
    stream: TcpStream,
    received: usize,
}

/// A container with its expected state.
struct One {
    name: String,
    address: String,
    /// The number of requests, if the server numbers them. Other servers send a sequence.
    calls: Option<u64>,
    caller: Option<Caller>,
    is_paused: bool,
}

/// Descriptors and memory of one of our processes.
#[derive(Debug, Clone, Copy)]
struct Size {
    descriptors: usize,
    kib: u64,
}

impl Size {
    fn of(pid: u32) -> Self {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
        Self { descriptors, kib: kib.unwrap_or(0) }
    }
}

struct Soak {
    host: Host,
    chance: Chance,
    daemon: Option<Child>,
    all: Vec<One>,
    /// All steps with their times; the last is the current one.
    steps: Vec<(Duration, String)>,
    began: Instant,
    /// Whether the keeper is killed more often.
    kills: bool,
}

impl Drop for Soak {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (when, step) in self.steps.iter().rev().take(30).rev() {
                eprintln!("soak: {:9.3} s: {step}", when.as_secs_f64());
            }
            eprintln!("soak: {:9.3} s: this", self.began.elapsed().as_secs_f64());
            self.show();
        }
        self.end_daemon(Signal::TERM);
    }
}

impl Soak {
    fn new(seed: u64) -> Self {
        let host = Host::with_busybox();
        // Fewer than those that sleep.
        let settings = "[keeper]\nlinger = \"0s\"\n[sleep]\nwarm = 2\n";
        std::fs::write(host.root().join("etc/config.toml"), settings).expect("written");
        let mut all = Vec::new();
        for n in 0..8 {
            let name = format!("c{n}");
            let verb = if n % 4 == 3 { "stream" } else { "count" };
            let policy: &[&str] = match n {
                0 | 3 => &["--sleep-after", "500ms"],
                1 => &["--drowsy-after", "300ms"],
                2 => &["--drowsy-after", "300ms", "--sleep-after", "1s"],
                _ => &[],
            };
            // A large container is restored lazily.
            let memory: &[&str] = match n {
                1 | 4 => &["24000"],
                2 => &["10000"],
                _ => &[],
            };
            let first = [&["run", "-d", "--name", &name], policy].concat();
            let serve = ["busybox", "probe", verb, "0.0.0.0", "80"];
            host.dm(&[&first[..], &serve, memory].concat()).ok();
            let address = host.address_of(&name);
            let calls = (verb == "count").then_some(0);
            all.push(One { name, address, calls, caller: None, is_paused: false });
        }
        let (chance, steps, began) = (Chance(seed), Vec::new(), Instant::now());
        let kills = number("DORMOUSE_SOAK_KILLS").is_some_and(|n| n != 0);
        let mut soak = Self { host, chance, daemon: None, all, steps, began, kills };
        soak.start_daemon();
        soak
    }

    /// Shows the state of everything, to find the cause of a failure.
    fn show(&mut self) {
        let ended = self.daemon.as_mut().map(Child::try_wait);
        eprintln!("soak: the end of the daemon: {ended:?}");
        let events = std::fs::read_to_string(self.host.root().join("lib/events"));
        for text in [events.unwrap_or_default(), self.daemon_output()] {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(40)..].iter().for_each(|line| eprintln!("{line}"));
        }
        for (pid, line) in self.host.processes() {
            let read = |name| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
            let [waits, call] = ["wchan", "syscall"].map(|name| read(name).unwrap_or_default());
            eprintln!("{pid} {line}: {waits}, {}", call.trim());
        }
        eprintln!("{}", self.host.dm(&["ps", "--all"]));
    }

    /// The output of all daemons, in order.
    fn daemon_output(&self) -> String {
        std::fs::read_to_string(self.host.root().join("daemon.log")).unwrap_or_default()
    }

    fn start_daemon(&mut self) {
        let before = self.daemon_output().len();
        let log = self.host.root().join("daemon.log");
        let log = File::options().create(true).append(true).open(log).expect("created");
        let mut command = self.host.dormouse(&["daemon"]);
        self.daemon = Some(command.stderr(log).spawn().expect("the command starts"));
        let is_ready = || self.daemon_output()[before..].contains("daemon: ready");
        assert!(wait_until(soon(), is_ready), "{}", &self.daemon_output()[before..]);
    }

    fn end_daemon(&mut self, signal: Signal) {
        let Some(mut daemon) = self.daemon.take() else { return };
        let _ = kill_process(Pid::from_child(&daemon), signal);
        let _ = daemon.wait();
    }

    /// Returns the keeper. After a loss there is none until one is needed.
    fn keeper(&self) -> Option<u32> {
        let mut all = self.host.processes().into_iter();
        all.find(|(_, line)| line.contains("keeper")).map(|(pid, _)| pid)
    }

    /// Kills the keeper without open connections: losing those is permitted.
    fn kill_keeper(&mut self) {
        self.all.iter_mut().for_each(|one| one.caller = None);
        let Some(keeper) = self.keeper() else { return };
        let pid = Pid::from_raw(keeper as i32).expect("a pid");
        match kill_process(pid, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {} // ended just now
            Err(e) => panic!("the keeper cannot be killed: {e}"),
        }
        let is_gone = || self.host.processes().iter().all(|(pid, _)| *pid != keeper);
        assert!(wait_until(soon(), is_gone));
    }

    /// Sends a request in any state of the container, again while there is no listener.
    fn call(&mut self, n: usize) {
        let one = &mut self.all[n];
        let Some(calls) = &mut one.calls else { return self.receive(n) };
        let mut output = None;
        let answered = wait_until(soon(), || {
            let mut probe = self.host.command(image::probe());
            probe.args(["ask", &one.address, "80"]);
            let out = run(probe, b"", soon());
            let is_answer = out.status == 0 && !out.stdout.is_empty();
            output = Some(out);
            is_answer
        });
        let output = output.expect("at least one attempt");
        assert!(answered, "{} does not answer: {output}", one.name);
        *calls += 1;
        assert_eq!(output.stdout.trim(), format!("call {calls}"), "of {}", one.name);
    }

    fn receive(&mut self, n: usize) {
        let bytes = 1 + self.chance.below(5000) as usize;
        let one = &mut self.all[n];
        if one.caller.is_none() {
            let address = format!("{}:80", one.address);
            let connected = self.host.in_network(move || {
                let mut found = None;
                wait_until(soon(), || {
                    found = TcpStream::connect(&address).ok();
                    found.is_some()
                });
                found
            });
            let stream = connected.join().expect("no panic").expect("a listener");
            stream.set_read_timeout(Some(soon())).expect("a timeout");
            one.caller = Some(Caller { stream, received: 0 });
        }
        let caller = one.caller.as_mut().expect("a client");
        writeln!(caller.stream, "<{bytes}").expect("the connection is open");
        let mut bytes_received = vec![0; bytes];
        caller.stream.read_exact(&mut bytes_received).expect("the connection continues");
        for byte in bytes_received {
            let n = caller.received;
            assert_eq!(byte, (n * 7 + n / 251) as u8, "byte {n} of {}", one.name);
            caller.received += 1;
        }
    }

    fn dm(&self, words: &[&str]) {
        self.host.dm(words).ok();
    }

    fn begin(&mut self, what: impl Into<String>) {
        self.steps.push((self.began.elapsed(), what.into()));
    }

    /// A random step.
    fn step(&mut self) {
        let n = self.chance.below(self.all.len() as u64) as usize;
        let what = match self.kills && self.chance.below(10) == 0 {
            true => KILL_KEEPER,
            false => self.chance.below(100),
        };
        let name = self.all[n].name.clone();
        if self.all[n].is_paused {
            self.begin(format!("unpause {name}"));
            self.dm(&["unpause", &name]);
            self.all[n].is_paused = false;
            return;
        }
        match what {
            0..=34 => {
                self.begin(format!("call {name}"));
                self.call(n);
            }
            35..=54 => {
                self.begin(format!("sleep {name}"));
                match n % 2 {
                    0 => self.dm(&["sleep", &name]),
                    _ => self.dm(&["sleep", "--warm", &name]),
                };
            }
            55..=69 => {
                self.begin(format!("drowse {name}"));
                self.dm(&["sleep", "--drowsy", &name]);
            }
            70..=76 => {
                self.begin(format!("wake {name}"));
                self.dm(&["wake", &name]);
            }
            77..=83 => {
                self.begin(format!("exec {name}"));
                assert_eq!(self.host.dm(&["exec", &name, "echo", "here"]).ok(), "here");
            }
            84..=87 => {
                self.begin(format!("pause {name}"));
                self.dm(&["wake", &name]);
                // The container may fall asleep again before the pause, which is then refused.
                let out = self.host.dm(&["pause", &name]);
                assert!(out.status == 0 || out.stderr.contains("asleep"), "{out}");
                self.all[n].is_paused = out.status == 0;
            }
            88..=91 => {
                self.begin(format!("restart {name}"));
                if let Some(calls) = &mut self.all[n].calls {
                    *calls = 0;
                }
                self.all[n].caller = None;
                self.dm(&["stop", "--time", "0", &name]);
                self.dm(&["start", &name]);
            }
            92..=94 => {
                self.begin("wait");
                std::thread::sleep(Duration::from_millis(200 + self.chance.below(1200)));
            }
            KILL_KEEPER..=97 => {
                self.begin("kill the keeper");
                self.kill_keeper();
            }
            _ => {
                self.begin("kill the daemon");
                self.end_daemon(Signal::KILL);
                self.start_daemon();
            }
        }
    }

    /// Sends a request to every container, and measures keeper and daemon when all are awake.
    fn take_stock(&mut self) -> [Size; 2] {
        for n in 0..self.all.len() {
            if std::mem::take(&mut self.all[n].is_paused) {
                self.dm(&["unpause", &self.all[n].name]);
            }
            self.begin(format!("call {}", self.all[n].name));
            self.call(n);
            let state = self.host.state_of(&self.all[n].name);
            assert!(["running", "drowsy", "asleep"].contains(&state.as_str()), "{state}");
        }
        let listed = self.host.dm(&["ps", "--quiet"]).ok();
        assert_eq!(listed.lines().count(), self.all.len(), "{listed}");
        // The daemon suspends containers again meanwhile, so the minimum counts.
        let names: Vec<&str> = self.all.iter().map(|one| one.name.as_str()).collect();
        let daemon = self.daemon.as_ref().expect("a daemon").id();
        let samples: Vec<[Size; 2]> = (0..5)
            .map(|_| {
                self.dm(&[&["wake"], &names[..]].concat());
                self.dm(&["exec", names[0], "true"]);
                let keeper = self.keeper().expect("a keeper");
                [Size::of(keeper), Size::of(daemon)]
            })
            .collect();
        [0, 1].map(|which| Size {
            descriptors: samples.iter().map(|sample| sample[which].descriptors).min().unwrap_or(0),
            kib: samples.iter().map(|sample| sample[which].kib).min().unwrap_or(0),
        })
    }
}

fn soak(time: Duration, seed: u64) {
    eprintln!("soak: seed {seed}, {} s", time.as_secs());
    let mut soak = Soak::new(seed);
    let begin = Instant::now();
    let mut first = None;
    while begin.elapsed() < time {
        soak.step();
        if first.is_none() && begin.elapsed() > time / 3 {
            first = Some(soak.take_stock());
        }
    }
    let last = soak.take_stock();
    let kinds: std::collections::BTreeMap<&str, usize> =
        soak.steps.iter().fold(Default::default(), |mut all, (_, step)| {
            *all.entry(step.split(' ').next().unwrap_or_default()).or_default() += 1;
            all
        });
    let first = first.unwrap_or(last);
    eprintln!("soak: {} steps: {kinds:?}; first {first:?}, last {last:?}", soak.steps.len());
    for (which, (before, after)) in ["keeper", "daemon"].iter().zip(first.into_iter().zip(last)) {
        let of = format!("{which}, seed {seed}: {before:?}, then {after:?}");
        // A new process has not opened its occasional descriptors. The daemon may have four workers
        // that suspend containers, each with two descriptors.
        assert!(after.descriptors <= before.descriptors.max(20) + 8, "{of}");
        assert!(after.kib <= before.kib.max(2048) + 1024, "{of}");
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn concurrent_random_commands_leave_nothing_behind() {
    let seconds = number("DORMOUSE_SOAK_S");
    // The short run is the same each time, so that a failure is reproducible.
    let chance = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.as_nanos() as u64 | 1)
    };
    let seed = number("DORMOUSE_SOAK_SEED");
    let seed = seed.unwrap_or_else(|| seconds.map_or(0x5eed_0005, |_| chance()));
    soak(Duration::from_secs(seconds.unwrap_or(20)), seed);
}
