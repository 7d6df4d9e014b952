//! A container is suspended to disk without processes, and answers its clients as if it had not
//! been.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, image, slowness, soon, wait_until};

/// A server that numbers its connections: the numbers continue only if its memory is restored.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

#[track_caller]
fn counting(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    host.dm(&[&["run", "-d", "--name", "x"], options, COUNT].concat()).ok();
    host
}

/// Connects to the container from the host, at the container's address.
#[track_caller]
fn call(host: &Host) -> String {
    call_one(host, "x")
}

#[track_caller]
pub(crate) fn call_one(host: &Host, name: &str) -> String {
    let address = host.address_of(name);
    let mut output = None;
    // Only the first attempt may precede the listener.
    wait_until(soon(), || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        let out = dormouse_testkit::run(probe, b"", Duration::from_secs(20) * slowness());
        let answered = out.status == 0;
        output = Some(out);
        answered
    });
    output.expect("at least one attempt").ok().trim().to_owned()
}

/// Kills the keeper, which listens for the clients of asleep containers.
#[track_caller]
fn kill_keeper(host: &Host) {
    let keeper = host.processes().into_iter().find(|(_, line)| line.contains("keeper"));
    let (keeper, _) = keeper.expect("a keeper");
    let pid = rustix::process::Pid::from_raw(keeper as i32).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("the process exists");
    // The process exits after it has closed its descriptors.
    let is_gone = || host.processes().iter().all(|(pid, _)| *pid != keeper);
    assert!(wait_until(soon(), is_gone));
}

/// Kills the keeper, and the vault with its copies of the descriptors.
#[track_caller]
fn kill_both(host: &Host) {
    let ours = |line: &str| line.contains("dormouse-keeper") || line.contains("dormouse-vault");
    let both = || host.processes().into_iter().filter(|(_, line)| ours(line));
    let pids: Vec<u32> = both().map(|(pid, _)| pid).collect();
    assert_eq!(pids.len(), 2, "a keeper and a vault");
    for signal in [rustix::process::Signal::STOP, rustix::process::Signal::KILL] {
        for pid in &pids {
            let pid = rustix::process::Pid::from_raw(*pid as i32).expect("a pid");
            rustix::process::kill_process(pid, signal).expect("the process exists");
        }
    }
    let is_gone = || both().count() == 0;
    assert!(wait_until(soon(), is_gone));
}

/// Processes of the container as the host sees them.
fn inside(host: &Host) -> Vec<(u32, String)> {
    host.processes().into_iter().filter(|(_, command)| command.contains("probe")).collect()
}

#[test]
fn vm_connection_wakes_asleep_container_and_is_answered() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    assert_eq!(inside(&host).len(), 1);
    for round in 0..3 {
        host.put_to_sleep("x");
        assert_eq!(inside(&host), []);
        assert_eq!(call(&host), format!("call {}", 2 + round * 2));
        assert_eq!(host.state_of("x"), "running");
        // From another machine, at the published port.
        host.put_to_sleep("x");
        let answer = host.neighbour_sh(&format!("busybox nc {} 8080 </dev/null", Host::ADDRESS));
        assert_eq!(answer.ok().trim(), format!("call {}", 3 + round * 2));
    }
    assert!(host.dm(&["ps"]).ok().contains("Up"));
}

/// A program that never reads the end of a connection sleeps all the same: the end is no news.
#[test]
fn vm_connection_ended_by_its_client_keeps_no_container_awake() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "-p", "8080:80", "busybox", "nc", "-ll", "-p", "80"];
    host.dm(&[&serve[..], &["-e", "sh", "-c", "echo here; exec sleep 100000"]].concat()).ok();
    let call = || {
        host.neighbour_sh(&format!("echo hello | timeout 1 busybox nc {} 8080", Host::ADDRESS))
            .stdout
    };
    assert!(wait_until(soon(), || call().trim() == "here"));
    for _ in 0..3 {
        host.put_to_sleep("x");
        // A wake by an event that was there before would follow at once.
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(host.state_of("x"), "asleep");
        assert!(wait_until(soon(), || call().trim() == "here"));
    }
}

#[test]
fn vm_clones_created_asleep_run_independently() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    host.dm(&["exec", "x", "sh", "-c", "echo of x >/file"]).ok();
    let clones = ["c-1", "c-2", "c-3"];
    let made = host.dm(&["clone", "--asleep", "-n", "3", "--name", "c", "x"]).ok();
    assert_eq!(made.lines().collect::<Vec<_>>(), clones);
    assert_eq!(call(&host), "call 2", "the original continues");
    assert_eq!(inside(&host).len(), 1, "clones have no process");
    clones.iter().for_each(|name| assert_eq!(host.state_of(name), "asleep"));
    // The clones no longer need the original.
    host.dm(&["rm", "--force", "x"]).ok();
    kill_keeper(&host);
    for (n, name) in clones.iter().enumerate() {
        assert_eq!(call_one(&host, name), "call 2", "{name}");
        assert_eq!(host.state_of(name), "running");
        assert_eq!(host.dm(&["exec", name, "cat", "/file"]).ok(), "of x");
        assert_eq!(inside(&host).len(), n + 1);
    }
    host.dm(&["sleep", "c-1", "c-2", "c-3"]).ok();
    assert_eq!(inside(&host), []);
    host.dm(&["wake", "c-3"]).ok();
    for name in clones {
        assert_eq!(call_one(&host, name), "call 3", "{name}");
    }
    host.dm(&["clone", "--asleep", "--name", "d", "c-2"]).ok();
    assert_eq!(call_one(&host, "d"), "call 4");
    // A clone that was never woken is removed like any other.
    host.dm(&["clone", "--asleep", "--name", "e", "c-2"]).ok();
    host.dm(&["rm", "--force", "e"]).ok();
    let taken = host.dm(&["clone", "--asleep", "--name", "d", "c-2"]);
    assert!(taken.status != 0 && taken.stderr.contains("'d'"), "{taken}");
}

#[test]
fn vm_datagram_wakes_asleep_container_and_is_answered() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe", "udp-echo", "0.0.0.0", "53"];
    host.dm(&serve).ok();
    let address = host.address_of("x");
    let query_probe = || {
        let mut probe = host.command(image::probe());
        probe.args(["udp-ask", &address, "53", "squeak"]);
        dormouse_testkit::run(probe, b"", Duration::from_secs(10) * slowness())
    };
    assert!(wait_until(soon(), || query_probe().status == 0));
    for _ in 0..3 {
        host.put_to_sleep("x");
        assert_eq!(query_probe().ok().trim(), "squeak");
        assert_eq!(host.state_of("x"), "running");
    }
}

#[test]
fn vm_connection_during_suspend_is_answered() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let address = host.address_of("x");
    for round in 0..5 * (10 / slowness().min(10)).max(1) {
        let callers: Vec<_> = (0..3)
            .map(|n| {
                let address = address.clone();
                host.in_network(move || {
                    thread::sleep(Duration::from_millis(u64::from(round % 5 + n * 3)));
                    let mut probe = std::process::Command::new(image::probe());
                    probe.args(["ask", &address, "80"]);
                    dormouse_testkit::run(probe, b"", Duration::from_secs(30) * slowness())
                })
            })
            .collect();
        host.dm(&["sleep", "x"]).ok();
        for caller in callers {
            let answer = caller.join().expect("no panic").ok();
            assert!(answer.starts_with("call "), "{answer}");
        }
    }
    let after = 5 * (10 / slowness().min(10)).max(1) * 3 + 2;
    assert_eq!(call(&host), format!("call {after}"), "every client was counted once");
}

#[test]
fn commands_wake_asleep_container_or_report_what_to_do() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    host.put_to_sleep("x");
    assert_eq!(host.dm(&["exec", "x", "echo", "hello"]).ok(), "hello");
    assert_eq!(host.state_of("x"), "running");
    host.put_to_sleep("x");
    host.dm(&["wake", "x"]).ok();
    assert_eq!(call(&host), "call 2");
    host.put_to_sleep("x");
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 3");
    host.put_to_sleep("x");
    for command in [&["pause", "x"][..], &["checkpoint", "x"], &["rm", "x"]] {
        let out = host.dm(command);
        assert!(out.status != 0 && out.stderr.contains("asleep"), "{command:?}: {out}");
    }
    host.put_to_sleep("x"); // already asleep
    assert_eq!(call(&host), "call 4");
}

#[test]
fn asleep_container_is_stopped_and_removed() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    host.put_to_sleep("x");
    host.dm(&["stop", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
    let gone = host.neighbour_sh(&format!("busybox nc -w 2 {} 8080 </dev/null", Host::ADDRESS));
    assert!(gone.status != 0 || gone.stdout.is_empty(), "{gone}");
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 1", "a new start");
    host.put_to_sleep("x");
    host.dm(&["rm", "--force", "x"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

/// The init ignores SIGTERM.
#[test]
fn vm_stop_completes_despite_concurrent_sleep() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut stop =
        host.dormouse(&["stop", "--time", "60", "x"]).spawn().expect("the command starts");
    let record = host.root().join("run/c/*/init.json");
    let is_recorded = format!("grep -q '\"stopping\":true' {}", record.display());
    let is_stopping = || host.sh(&is_recorded).status == 0;
    assert!(wait_until(soon(), is_stopping));
    host.dm(&["sleep", "x"]).ok();
    assert!(stop.wait().expect("the command ends").success());
    assert_eq!(host.state_of("x"), "stopped");
}

/// The processes wait for each other, and one of them runs at any time. A process that is stopped
/// first waits for the action of another that runs until its own stop.
#[test]
fn vm_active_container_resumes_without_connection() {
    let host = Host::with_busybox();
    let ring = ["busybox", "probe", "ring", "12"];
    let children = ["busybox", "sh", "-c", "while :; do sh -c 'true | true'; done"];
    for words in [&ring[..], &children] {
        host.dm(&[&["run", "-d", "--name", "x"], words].concat()).ok();
        for _ in 0..(10 / slowness()).max(4) {
            host.dm(&["sleep", "x"]).ok();
            host.wait_for_state("x", "running");
            host.dm(&["sleep", "--drowsy", "x"]).ok();
            host.wait_for_state("x", "running");
        }
        host.dm(&["rm", "--force", "x"]).ok();
    }
}

/// A system call that is interrupted while it works restarts, like one that waits. Its peer sends
/// nothing further.
#[test]
fn vm_sending_container_resumes_without_connection() {
    let host = Host::with_busybox();
    let words = ["busybox", "probe", "send", "/bin/busybox", "0.0.0.0", "80"];
    host.dm(&[&["run", "-d", "--name", "x"], &words[..]].concat()).ok();
    let address = host.address_of("x");
    host.wait_inside("x", "netstat -ltn | grep -q :80");
    let reader = host.in_network(move || {
        let mut peer = TcpStream::connect((address, 80)).expect("the server listens");
        std::io::copy(&mut peer, &mut std::io::sink()).expect("the connection is not reset")
    });
    for _ in 0..(60 / slowness()).max(10) {
        host.dm(&["sleep", "x"]).ok();
        host.wait_for_state("x", "running");
        host.dm(&["sleep", "--drowsy", "x"]).ok();
        host.wait_for_state("x", "running");
    }
    host.dm(&["stop", "--time", "0", "x"]).ok();
    assert!(reader.join().expect("the connection ends without an error") > 0);
}

#[test]
fn refused_sleep_reports_cause_and_container_continues() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut entered =
        host.dormouse(&["exec", "x", "sleep", "1000"]).spawn().expect("the command starts");
    host.wait_inside("x", "pidof sleep");
    let out = host.dm(&["sleep", "x"]);
    assert!(out.status != 0 && out.stderr.contains("(sleep)"), "{out}");
    entered.kill().expect("the process runs");
    entered.wait().expect("a started child");
    assert_eq!(host.state_of("x"), "running");
    assert_eq!(call(&host), "call 2");
    let out = host.dm(&["run", "-d", "--rm", "--name", "y", "busybox", "sleep", "1000"]);
    out.ok();
    let out = host.dm(&["sleep", "y"]);
    assert!(out.status != 0 && out.stderr.contains("--rm"), "{out}");
}

#[test]
fn vm_pending_wait_command_keeps_container_awake() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut waiter = host.dormouse(&["wait", "x"]).spawn().expect("the command starts");
    let refused = || {
        let out = host.dm(&["sleep", "x"]);
        if out.status == 0 {
            host.dm(&["wake", "x"]).ok(); // the wait has not registered yet
        }
        out.status != 0
    };
    assert!(wait_until(soon(), refused));
    assert_eq!(call(&host), "call 2");
    host.dm(&["kill", "x"]).ok();
    assert!(waiter.wait().expect("our child").success());
}

/// Starts a server that exchanges bytes with each client for any time (`probe stream`).
#[track_caller]
fn streaming(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    let serve = ["busybox", "probe", "stream", "0.0.0.0", "80"];
    host.dm(&[&["run", "-d", "--name", "x"], options, &serve].concat()).ok();
    host
}

/// A client of such a server, with the counts of received and sent bytes.
struct Caller {
    stream: TcpStream,
    received: usize,
    sent: usize,
}

fn at(n: usize) -> u8 {
    (n * 7 + n / 251) as u8
}

impl Caller {
    /// Connects from the host's network, as soon as the server listens.
    #[track_caller]
    fn new(host: &Host) -> Self {
        Self::of(host, &host.address_of("x"))
    }

    /// Connects to a known address, without a command.
    #[track_caller]
    fn of(host: &Host, address: &str) -> Self {
        let address = format!("{address}:80");
        let connected = host.in_network(move || {
            let mut found = None;
            wait_until(soon(), || {
                found = TcpStream::connect(&address).ok();
                found.is_some()
            });
            found
        });
        let stream = connected.join().expect("no panic").expect("a listener");
        let limit = Some(Duration::from_secs(30) * slowness());
        stream.set_read_timeout(limit).expect("a timeout");
        stream.set_write_timeout(limit).expect("a timeout");
        Self { stream, received: 0, sent: 0 }
    }

    /// Requests the next bytes, and receives them in pieces.
    fn receive(&mut self, bytes: usize, mut piece: impl FnMut(usize)) {
        writeln!(self.stream, "<{bytes}").expect("the connection is open");
        let mut buffer = [0; 8192];
        let end = self.received + bytes;
        while self.received < end {
            let n = (end - self.received).min(buffer.len());
            let n = self.stream.read(&mut buffer[..n]).expect("the connection continues");
            assert!(n > 0, "end of stream after {} bytes", self.received);
            for (i, byte) in buffer[..n].iter().enumerate() {
                assert_eq!(*byte, at(self.received + i), "byte {}", self.received + i);
            }
            self.received += n;
            piece(self.received);
        }
    }

    /// Sends the next bytes, and waits for the acknowledgement.
    fn send_acknowledged(&mut self, bytes: usize) {
        self.send(bytes);
        self.receive_acknowledgement();
    }

    fn send(&mut self, bytes: usize) {
        let all: Vec<u8> = (self.sent..self.sent + bytes).map(at).collect();
        self.sent += bytes;
        writeln!(self.stream, ">{bytes}").and_then(|()| self.stream.write_all(&all)).expect("sent");
    }

    fn receive_acknowledgement(&mut self) {
        let mut text = [0; 5];
        self.stream.read_exact(&mut text).expect("an answer");
        assert_eq!(&text, b"good\n");
    }
}

#[test]
fn vm_open_connection_wakes_container_and_continues() {
    let host = streaming(&[]);
    let mut caller = Caller::new(&host);
    let mut other = Caller::new(&host);
    other.send_acknowledged(10);
    for round in 0..20 / slowness().min(5) as usize {
        caller.receive(100 + round, |_| {});
        host.put_to_sleep("x");
        assert_eq!(inside(&host), []);
        if round % 2 == 0 {
            caller.send_acknowledged(1000);
        }
    }
    other.send_acknowledged(10);
    // The close of a connection wakes the container, too.
    host.put_to_sleep("x");
    drop(caller);
    host.wait_for_state("x", "running");
    host.put_to_sleep("x");
    other.receive(10, |_| {});
}

/// Waits long enough to see a wake that must not come.
fn a_while() {
    thread::sleep(Duration::from_secs(1) * slowness());
}

#[test]
fn vm_disabled_wake_events_wait_for_another_wake() {
    let host = streaming(&["--wake-on", "call"]);
    let mut caller = Caller::new(&host);
    caller.send_acknowledged(10);
    let mut open = Vec::new();
    for (tier, state) in [(&["sleep", "x"][..], "asleep"), (&["sleep", "--drowsy", "x"], "drowsy")]
    {
        host.dm(&["update", "--wake-on", "call", "x"]).ok();
        host.dm(tier).ok();
        caller.send(10);
        a_while();
        assert_eq!(host.state_of("x"), state, "data does not wake the container");
        let mut other = Caller::new(&host);
        other.receive(10, |_| {});
        caller.receive_acknowledgement();
        // The opposite setting, effective from the next suspend.
        host.dm(&["update", "--wake-on", "data", "x"]).ok();
        host.dm(tier).ok();
        let mut late = Caller::new(&host);
        late.send(10);
        a_while();
        assert_eq!(host.state_of("x"), state, "a new connection does not wake the container");
        caller.send_acknowledged(10);
        late.receive_acknowledgement();
        host.dm(&["update", "--wake-on", "none", "x"]).ok();
        host.dm(tier).ok();
        caller.send(10);
        let mut third = Caller::new(&host);
        a_while();
        assert_eq!(host.state_of("x"), state, "only the operator wakes the container");
        host.dm(&["wake", "x"]).ok();
        caller.receive_acknowledgement();
        // A connection that is not accepted by the next suspend would be a call.
        third.receive(10, |_| {});
        // The ends of these connections would be data.
        open.extend([other, late, third]);
    }
    assert_eq!(host.inspect("x")["config"]["wake_on"]["timer"], "no");
    let out = host.dm(&["update", "--wake-on", "calls", "x"]);
    assert!(out.stderr.contains("call, data-first, data, file, timer"), "{}", out.stderr);
}

/// Whether a process of the container is blocked in nanosleep(2), by proc_pid_wchan(5).
fn waits_for_time(host: &Host, container: &str) -> bool {
    let Some(init) = host.inspect(container)["pid"].as_u64() else { return false };
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let children = read(format!("/proc/{init}/task/{init}/children"));
    let all = std::iter::once(init.to_string());
    all.chain(children.split_ascii_whitespace().map(str::to_owned))
        .any(|pid| read(format!("/proc/{pid}/wchan")).contains("nanosleep"))
}

#[test]
fn vm_wake_on_timer_delays_or_ignores_timers() {
    let host = Host::with_busybox();
    // Starts a container with a timer that expires during the suspend; a slow machine gets more
    // time for that. Returns the earliest moment of the suspend, and the length of the timer.
    let begin = |wake_on: &dyn Fn(u32) -> String, sleep: &[&str]| {
        for seconds in [2, 4, 8, 16, 32] {
            let (begun, takes) = (Instant::now(), Duration::from_secs(seconds.into()));
            let script = format!("sleep {seconds}; echo rang; exec sleep 100000");
            let run = ["run", "-d", "--name", "x", "--wake-on", &wake_on(seconds)];
            host.dm(&[&run[..], &["busybox", "sh", "-c", &script]].concat()).ok();
            // A container suspended on its way to nanosleep(2) is active, and resumes at once.
            let is_waiting = || waits_for_time(&host, "x");
            assert!(wait_until(soon(), is_waiting), "no nanosleep");
            let since = Instant::now();
            host.dm(sleep).ok();
            if begun.elapsed() < takes {
                return (since, takes);
            }
            host.dm(&["rm", "-f", "x"]).ok();
        }
        panic!("the container is never asleep before its timer expires");
    };
    for sleep in [&["sleep", "x"][..], &["sleep", "--drowsy", "x"]] {
        let (since, takes) = begin(&|seconds| format!("timer={}s", seconds * 4), sleep);
        let rang = || host.dm(&["logs", "x"]).ok().contains("rang");
        let within = takes * 4 + Duration::from_secs(20) * slowness();
        assert!(wait_until(within, rang), "the timer wakes the container");
        assert!(since.elapsed() >= takes * 4, "after {:?} of {takes:?}", since.elapsed());
        host.dm(&["rm", "-f", "x"]).ok();
        let (_, takes) = begin(&|_| "call".to_owned(), sleep);
        thread::sleep(takes * 2);
        assert!(!rang(), "the timer does not wake the container");
        host.dm(&["wake", "x"]).ok();
        assert!(wait_until(soon(), rang), "the timer has expired meanwhile");
        host.dm(&["rm", "-f", "x"]).ok();
    }
}

#[test]
fn vm_transfer_survives_sleep_in_the_middle() {
    let host = streaming(&[]);
    const BYTES: usize = 4 << 20;
    for rounds in [1, 2, 4] {
        let mut caller = Caller::new(&host);
        let receiver = thread::spawn(move || {
            caller.receive(BYTES, |received| {
                // Slower than the server, so that the server often blocks on a full send buffer.
                if received % (1 << 14) < 8192 {
                    thread::sleep(Duration::from_micros(300));
                }
            });
            caller.send_acknowledged(BYTES);
        });
        for _ in 0..rounds {
            host.dm(&["sleep", "x"]).ok();
        }
        receiver.join().expect("each byte arrives once, in order");
    }
}

#[test]
fn vm_connections_survive_killed_keeper() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe"];
    host.dm(&[&serve[..], &["stream", "0.0.0.0", "80"]].concat()).ok();
    let address = host.address_of("x");
    let mut caller = Caller::new(&host);
    caller.receive(10, |_| {});
    for round in 0..3 {
        host.put_to_sleep("x");
        kill_keeper(&host);
        // The kernel accepts a new connection, which waits. An open connection notices nothing.
        let mut next = Caller::of(&host, &address);
        caller.stream.set_nonblocking(true).expect("a socket");
        let result = caller.stream.read(&mut [0]).map_err(|e| e.kind());
        assert_eq!(result, Err(std::io::ErrorKind::WouldBlock), "{round}");
        caller.stream.set_nonblocking(false).expect("a socket");
        // Any next command gives the descriptors of both to a new keeper.
        host.dm(&["ps"]).ok();
        next.send_acknowledged(5);
        next.receive(5, |_| {});
        caller.send_acknowledged(10);
        caller.receive(10, |_| {});
    }
}

#[test]
fn vm_sockets_left_by_killed_keeper_do_not_block_restart() {
    let host = counting(&[]);
    for _ in 0..2 {
        assert_eq!(call(&host), "call 1");
        host.dm(&["sleep", "--drowsy", "x"]).ok();
        kill_keeper(&host);
        assert_eq!(host.state_of("x"), "running", "a drowsy container resumes without a keeper");
        // The same address and port, for which the vault holds a socket.
        host.dm(&["restart", "--time", "0", "x"]).ok();
    }
    assert_eq!(call(&host), "call 1");
}

#[test]
fn vm_killed_keeper_and_vault_cost_open_connections_only() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "-p", "8080:80", "busybox", "probe"];
    host.dm(&[&serve[..], &["stream", "0.0.0.0", "80"]].concat()).ok();
    let mut lost = Caller::new(&host);
    lost.receive(10, |_| {});
    let started = host.inspect("x")["started"].clone();
    host.put_to_sleep("x");
    // Both at once: each re-creates the other when it exits.
    kill_both(&host);
    let ended = lost.stream.read(&mut [0]);
    assert!(matches!(ended, Ok(0) | Err(_)), "the connection ends: {ended:?}");
    // Any next command re-creates the other sockets.
    assert_eq!(host.state_of("x"), "asleep");
    let server_query = format!("printf '<3\n' | busybox nc -w 5 {} 8080", Host::ADDRESS);
    let answer = host.neighbour_sh(&server_query);
    assert_eq!(answer.stdout.as_bytes(), [at(0), at(1), at(2)], "{answer}");
    assert_eq!(host.state_of("x"), "running");
    Caller::new(&host).send_acknowledged(10);
    assert_eq!(host.inspect("x")["started"], started, "a single start");
    // The process that served the lost client has exited, and only the server is left.
    let processes = || host.dm(&["top", "x"]).ok();
    let alone = || processes().matches("probe").count() == 1;
    assert!(wait_until(soon(), alone), "{}", processes());
}

#[test]
fn vm_log_follower_waits_while_container_sleeps() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    host.put_to_sleep("x");
    let mut follower =
        host.dormouse(&["logs", "--follow", "x"]).spawn().expect("the command starts");
    thread::sleep(Duration::from_millis(300));
    assert!(follower.try_wait().expect("a started child").is_none(), "the follower waits");
    assert_eq!(call(&host), "call 2");
    host.put_to_sleep("x");
    host.dm(&["stop", "x"]).ok();
    assert!(follower.wait().expect("a started child").success());
}

/// Checks that `ps` and `inspect` show the same values of a container.
#[track_caller]
fn is_listed_as_it_is(host: &Host, names: &[&str]) {
    let list: serde_json::Value =
        serde_json::from_str(&host.dm(&["ps", "--all", "--json"]).ok()).expect("ps prints JSON");
    let list = list.as_array().expect("a list");
    for name in names {
        let listed = list.iter().find(|one| one["name"] == *name).expect("an entry of the list");
        let inspected = host.inspect(name);
        for (key, value) in listed.as_object().expect("an object") {
            assert_eq!(*value, inspected[key], "{key} of {name}");
        }
    }
}

#[test]
fn cached_list_of_asleep_containers_matches_their_state() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    host.dm(&["clone", "--asleep", "-n", "120", "--name", "c", "x"]).ok();
    host.dm(&["create", "--name", "new", "busybox", "true"]).ok();
    assert_eq!(host.dm(&["run", "--name", "old", "busybox", "sh", "-c", "exit 3"]).status, 3);
    thread::sleep(Duration::from_millis(1100)); // recent changes are not cached
    let kept = host.root().join("lib/list");
    assert!(!kept.exists());
    // The operator of another instance looks, and nothing is written here.
    let files = || {
        let places = ["lib", "run/list.lock"].map(|name| host.root().join(name));
        let places = places.map(|place| place.display().to_string()).join(" ");
        host.sh(&format!("find {places} -printf '%p %i %T@ %s\\n' | sort")).stdout
    };
    let before = files();
    let seen = Host::new().dm(&["ps", "--all", "--all-domains", "--json"]).ok();
    assert!(seen.contains("\"c-120\""), "{seen}");
    assert_eq!(files(), before);
    assert!(!kept.exists());
    let names = ["x", "c-1", "c-2", "c-3", "c-4", "c-120", "new", "old"];
    is_listed_as_it_is(&host, &names);
    let text = std::fs::read_to_string(&kept).expect("a cached list");
    assert!(text.lines().count() > 120, "{} lines", text.lines().count());
    is_listed_as_it_is(&host, &names);
    // Each change by itself.
    assert_eq!(call_one(&host, "c-1"), "call 2");
    host.dm(&["rename", "c-2", "renamed"]).ok();
    host.dm(&["rm", "--force", "c-3"]).ok();
    host.dm(&["stop", "c-4"]).ok();
    host.dm(&["start", "new"]).ok();
    host.dm(&["wait", "new"]).ok();
    host.dm(&["sleep", "x"]).ok();
    is_listed_as_it_is(&host, &["x", "c-1", "renamed", "c-4", "c-120", "new", "old"]);
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok().lines().count(), 122);
    host.dm(&["sleep", "c-1"]).ok();
    is_listed_as_it_is(&host, &["c-1"]);
    // Entries of the file that do not fit are ignored.
    let wrong = text.replace("\"asleep\"", "\"awake\"").replace("{\"id\"", "\0{\"id\"");
    for damaged in [&text[..text.len() / 2], &wrong, "", "containers 0\nx"] {
        std::fs::write(&kept, damaged).expect("write the file");
        is_listed_as_it_is(&host, &["x", "c-1", "renamed", "c-4", "c-120", "new", "old"]);
    }
    host.dm(&["rm", "--force", "--all"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

/// A small disk, with a file on it that leaves the requested free space.
struct Disk {
    ballast: std::path::PathBuf,
    host: Host,
}

impl Disk {
    fn new(mb: u32) -> Self {
        let host = Host::new();
        let (disk, lib) = (host.dir().join("disk"), host.root().join("lib"));
        std::fs::create_dir_all(&lib).expect("made");
        let (disk, at) = (disk.display(), lib.display());
        host.sh(&format!(
            "truncate -s {mb}M {disk} && mke2fs -q -t ext4 -m 0 {disk} && mount -o loop {disk} {at}"
        ))
        .ok();
        host.import(&image::busybox(), "busybox");
        Self { ballast: lib.join("ballast"), host }
    }

    fn free_kb(&self) -> u64 {
        let script = format!(
            "sync; df -k --output=avail {} | tail -n 1",
            self.host.root().join("lib").display()
        );
        self.host.sh(&script).ok().trim().parse().expect("a number")
    }

    fn leave_kb(&self, kb: u64) {
        self.clear();
        let all = self.free_kb();
        assert!(all >= kb, "{all} kB are free, not {kb}");
        // The metadata of the ballast file itself is only known afterwards.
        let (file, mut size) = (self.ballast.display(), all - kb);
        while self.host.sh(&format!("fallocate -l {size}k {file}")).status != 0 {
            size -= 4;
        }
    }

    fn clear(&self) {
        self.host.sh(&format!("rm -f {}", self.ballast.display())).ok();
    }
}

#[test]
fn vm_full_disk_fails_sleep_checkpoint_and_clone_cleanly() {
    let disk = Disk::new(64);
    let host = &disk.host;
    let memory_kb = 4096;
    let words = ["run", "-d", "--name", "x", "busybox", "probe", "count", "0.0.0.0", "80"];
    host.dm(&[&words[..], &[&memory_kb.to_string()]].concat()).ok();
    let mut calls = 0;
    let mut next = || {
        calls += 1;
        format!("call {calls}")
    };
    assert_eq!(call(host), next());
    let room_kb = disk.free_kb();
    let (mut done, mut failed) = (0, 0);
    for kb in [0, 4, 8, 16, 32, 64, 128, 512, 2048, memory_kb, memory_kb + 64, memory_kb * 2] {
        for verb in [
            &["sleep", "x"][..],
            &["checkpoint", "--leave-running", "x"],
            &["clone", "--name", "y", "x"],
        ] {
            disk.leave_kb(kb);
            let out = host.dm(verb);
            let is_done = out.status == 0;
            (done, failed) = (done + usize::from(is_done), failed + usize::from(!is_done));
            let is_reported =
                out.stderr.contains("No space left") || out.stderr.contains("no room");
            assert!(is_done || is_reported, "{verb:?} with {kb} kB: {out}");
            let expected = if is_done && verb[0] == "sleep" { "asleep" } else { "running" };
            assert_eq!(host.state_of("x"), expected, "{verb:?} with {kb} kB");
            // A container that is asleep on a full disk wakes there.
            assert_eq!(call(host), next(), "{verb:?} with {kb} kB");
            disk.clear();
            match verb[0] {
                "checkpoint" if is_done => drop(host.dm(&["checkpoint", "rm", "x", "1"]).ok()),
                "clone" if is_done => drop(host.dm(&["rm", "--force", "y"]).ok()),
                _ => {}
            }
            assert_eq!(
                host.dm(&["ps", "--all", "--quiet"]).ok().lines().count(),
                1,
                "{verb:?} with {kb} kB"
            );
            let left_kb = room_kb.saturating_sub(disk.free_kb());
            assert!(left_kb < 128, "{left_kb} kB are left by {verb:?} with {kb} kB");
        }
    }
    assert!(done >= 3 && failed > 10, "{done} done, {failed} failed");
    host.dm(&["rm", "--force", "x"]).ok();
    host.dm(&["internal", "reset"]).ok();
    host.sh(&format!("umount {}", host.root().join("lib").display())).ok();
}
