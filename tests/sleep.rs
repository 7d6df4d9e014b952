//! A container sleeps without processes and answers whoever calls as if it had not.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, image, slowness, wait_until};

/// A server that numbers its callers: what it has in memory goes on, or the numbers would not.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

#[track_caller]
fn counting(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    host.dm(&[&["run", "-d", "--name", "x"], options, COUNT].concat()).ok();
    host
}

/// Calls it from the host at its own address.
#[track_caller]
fn call(host: &Host) -> String {
    call_one(host, "x")
}

#[track_caller]
fn call_one(host: &Host, name: &str) -> String {
    let address = host.address_of(name);
    let mut said = None;
    // Only the first call may come before it listens.
    wait_until(Duration::from_secs(10) * slowness(), || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        let out = dormouse_testkit::run(probe, b"", Duration::from_secs(20) * slowness());
        let answered = out.status == 0;
        said = Some(out);
        answered
    });
    said.expect("it was asked at least once").ok().trim().to_owned()
}

/// Whoever is put to sleep at work is awake again, so it waits first until all inside do.
#[track_caller]
fn put_to_sleep(host: &Host) {
    let waits = |(pid, _): (u32, String)| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('S'))
    };
    let all_wait = || inside(host).into_iter().all(waits);
    assert!(wait_until(Duration::from_secs(10) * slowness(), all_wait), "it is at work");
    host.dm(&["sleep", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
}

/// Kills who hears callers.
#[track_caller]
fn kill_keeper(host: &Host) {
    let keeper = host.processes().into_iter().find(|(_, line)| line.contains("keeper"));
    let (keeper, _) = keeper.expect("somebody sleeps");
    let pid = rustix::process::Pid::from_raw(keeper as i32).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it lives");
    // It is gone when it has let go of everything.
    let is_gone = || host.processes().iter().all(|(pid, _)| *pid != keeper);
    assert!(wait_until(Duration::from_secs(10) * slowness(), is_gone));
}

/// Kills who hears callers, and who has copies.
#[track_caller]
fn kill_both(host: &Host) {
    let ours = |line: &str| line.contains("dormouse-keeper") || line.contains("dormouse-vault");
    let both = || host.processes().into_iter().filter(|(_, line)| ours(line));
    let pids: Vec<u32> = both().map(|(pid, _)| pid).collect();
    assert_eq!(pids.len(), 2, "somebody sleeps");
    for signal in [rustix::process::Signal::STOP, rustix::process::Signal::KILL] {
        for pid in &pids {
            let pid = rustix::process::Pid::from_raw(*pid as i32).expect("a pid");
            rustix::process::kill_process(pid, signal).expect("it lives");
        }
    }
    let is_gone = || both().count() == 0;
    assert!(wait_until(Duration::from_secs(10) * slowness(), is_gone));
}

/// Processes of the container, as the host sees them.
fn inside(host: &Host) -> Vec<(u32, String)> {
    host.processes().into_iter().filter(|(_, command)| command.contains("probe")).collect()
}

#[test]
fn vm_whoever_calls_wakes_it_and_is_answered() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    assert_eq!(inside(&host).len(), 1);
    for round in 0..3 {
        put_to_sleep(&host);
        assert_eq!(inside(&host), []);
        assert_eq!(call(&host), format!("call {}", 2 + round * 2));
        assert_eq!(host.state_of("x"), "running");
        // From another machine, at the published port.
        put_to_sleep(&host);
        let said = host.neighbour_sh(&format!("busybox nc {} 8080 </dev/null", Host::ADDRESS));
        assert_eq!(said.ok().trim(), format!("call {}", 3 + round * 2));
    }
    assert!(host.dm(&["ps"]).ok().contains("Up"));
}

#[test]
fn vm_clones_that_come_to_be_asleep_go_on_by_themselves() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    host.dm(&["exec", "x", "sh", "-c", "echo of x >/file"]).ok();
    let clones = ["c-1", "c-2", "c-3"];
    let made = host.dm(&["clone", "--asleep", "-n", "3", "--name", "c", "x"]).ok();
    assert_eq!(made.lines().collect::<Vec<_>>(), clones);
    assert_eq!(call(&host), "call 2", "the other goes on");
    assert_eq!(inside(&host).len(), 1, "nobody else has a process");
    clones.iter().for_each(|name| assert_eq!(host.state_of(name), "asleep"));
    // What it came from is not needed any more.
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
    // One that was never woken goes like any other.
    host.dm(&["clone", "--asleep", "--name", "e", "c-2"]).ok();
    host.dm(&["rm", "--force", "e"]).ok();
    let taken = host.dm(&["clone", "--asleep", "--name", "d", "c-2"]);
    assert!(taken.status != 0 && taken.stderr.contains("'d'"), "{taken}");
}

#[test]
fn vm_a_datagram_wakes_it_and_is_answered() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe", "udp-echo", "0.0.0.0", "53"];
    host.dm(&serve).ok();
    let address = host.address_of("x");
    let ask = || {
        let mut probe = host.command(image::probe());
        probe.args(["udp-ask", &address, "53", "squeak"]);
        dormouse_testkit::run(probe, b"", Duration::from_secs(10) * slowness())
    };
    assert!(wait_until(Duration::from_secs(10) * slowness(), || ask().status == 0));
    for _ in 0..3 {
        put_to_sleep(&host);
        assert_eq!(ask().ok().trim(), "squeak");
        assert_eq!(host.state_of("x"), "running");
    }
}

#[test]
fn vm_a_call_while_it_falls_asleep_is_answered() {
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
            let said = caller.join().expect("it does not panic").ok();
            assert!(said.starts_with("call "), "{said}");
        }
    }
    let after = 5 * (10 / slowness().min(10)).max(1) * 3 + 2;
    assert_eq!(call(&host), format!("call {after}"), "every caller was counted once");
}

#[test]
fn commands_wake_it_or_say_what_to_do() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    put_to_sleep(&host);
    assert_eq!(host.dm(&["exec", "x", "echo", "hello"]).ok(), "hello");
    assert_eq!(host.state_of("x"), "running");
    put_to_sleep(&host);
    host.dm(&["wake", "x"]).ok();
    assert_eq!(call(&host), "call 2");
    put_to_sleep(&host);
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 3");
    put_to_sleep(&host);
    for command in [&["pause", "x"][..], &["checkpoint", "x"], &["rm", "x"]] {
        let out = host.dm(command);
        assert!(out.status != 0 && out.stderr.contains("asleep"), "{command:?}: {out}");
    }
    put_to_sleep(&host); // it is already
    assert_eq!(call(&host), "call 4");
}

#[test]
fn an_asleep_container_is_stopped_and_removed_as_others_are() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    put_to_sleep(&host);
    host.dm(&["stop", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
    let gone = host.neighbour_sh(&format!("busybox nc -w 2 {} 8080 </dev/null", Host::ADDRESS));
    assert!(gone.status != 0 || gone.stdout.is_empty(), "{gone}");
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 1", "it was started anew");
    put_to_sleep(&host);
    host.dm(&["rm", "--force", "x"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

/// Its first process does not listen to the signal that asks it to end.
#[test]
fn vm_put_to_sleep_while_it_is_being_stopped_it_stops() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut stop = host.dormouse(&["stop", "--time", "60", "x"]).spawn().expect("it starts");
    let record = host.root().join("run/c/*/init.json");
    let look = format!("grep -q '\"stopping\":true' {}", record.display());
    let is_asked = || host.sh(&look).status == 0;
    assert!(wait_until(Duration::from_secs(10) * slowness(), is_asked));
    host.dm(&["sleep", "x"]).ok();
    assert!(stop.wait().expect("it ends").success());
    assert_eq!(host.state_of("x"), "stopped");
}

/// Its processes wait for each other, and one of them works at any time: whoever is stopped first waits for
/// what another does before it is stopped, too.
#[test]
fn vm_one_at_work_is_awake_again_though_nobody_calls() {
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

/// A call that is stopped at work begins again, as one does that waits. Its peer has nothing more to say.
#[test]
fn vm_one_that_sends_is_awake_again_though_nobody_calls() {
    let host = Host::with_busybox();
    let words = ["busybox", "probe", "send", "/bin/busybox", "0.0.0.0", "80"];
    host.dm(&[&["run", "-d", "--name", "x"], &words[..]].concat()).ok();
    let address = host.address_of("x");
    host.wait_inside("x", "netstat -ltn | grep -q :80");
    let reader = host.in_network(move || {
        let mut peer = TcpStream::connect((address, 80)).expect("it listens");
        std::io::copy(&mut peer, &mut std::io::sink()).expect("it is not reset")
    });
    for _ in 0..(60 / slowness()).max(10) {
        host.dm(&["sleep", "x"]).ok();
        host.wait_for_state("x", "running");
        host.dm(&["sleep", "--drowsy", "x"]).ok();
        host.wait_for_state("x", "running");
    }
    host.dm(&["stop", "--time", "0", "x"]).ok();
    assert!(reader.join().expect("its connection ends without an error") > 0);
}

#[test]
fn what_cannot_sleep_says_why_and_goes_on() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut visitor = host.dormouse(&["exec", "x", "sleep", "1000"]).spawn().expect("it starts");
    host.wait_inside("x", "pidof sleep");
    let out = host.dm(&["sleep", "x"]);
    assert!(out.status != 0 && out.stderr.contains("(sleep)"), "{out}");
    visitor.kill().expect("it runs");
    visitor.wait().expect("it was started");
    assert_eq!(host.state_of("x"), "running");
    assert_eq!(call(&host), "call 2");
    let out = host.dm(&["run", "-d", "--rm", "--name", "y", "busybox", "sleep", "1000"]);
    out.ok();
    let out = host.dm(&["sleep", "y"]);
    assert!(out.status != 0 && out.stderr.contains("--rm"), "{out}");
}

#[test]
fn vm_who_waits_for_its_end_keeps_it_awake() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut waiter = host.dormouse(&["wait", "x"]).spawn().expect("it can be started");
    let refused = || {
        let out = host.dm(&["sleep", "x"]);
        if out.status == 0 {
            host.dm(&["wake", "x"]).ok(); // it did not wait yet
        }
        out.status != 0
    };
    assert!(wait_until(Duration::from_secs(10) * slowness(), refused));
    assert_eq!(call(&host), "call 2");
    host.dm(&["kill", "x"]).ok();
    assert!(waiter.wait().expect("it can be waited for").success());
}

/// A server that speaks with each caller as long as he likes (`probe stream`).
#[track_caller]
fn streaming(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    let serve = ["busybox", "probe", "stream", "0.0.0.0", "80"];
    host.dm(&[&["run", "-d", "--name", "x"], options, &serve].concat()).ok();
    host
}

/// A caller of such a server, and how much it was told and has sent.
struct Caller {
    stream: TcpStream,
    told: usize,
    sent: usize,
}

fn at(n: usize) -> u8 {
    (n * 7 + n / 251) as u8
}

impl Caller {
    /// Connects from the host's network, as soon as somebody listens.
    #[track_caller]
    fn new(host: &Host) -> Self {
        Self::of(host, &host.address_of("x"))
    }

    /// The same of who knows where, without a command.
    #[track_caller]
    fn of(host: &Host, address: &str) -> Self {
        let address = format!("{address}:80");
        let connected = host.in_network(move || {
            let mut found = None;
            wait_until(Duration::from_secs(10) * slowness(), || {
                found = TcpStream::connect(&address).ok();
                found.is_some()
            });
            found
        });
        let stream = connected.join().expect("it does not panic").expect("somebody listens");
        let limit = Some(Duration::from_secs(30) * slowness());
        stream.set_read_timeout(limit).expect("a limit can be set");
        stream.set_write_timeout(limit).expect("a limit can be set");
        Self { stream, told: 0, sent: 0 }
    }

    /// Asks for the next bytes, and hears them in pieces.
    fn hear(&mut self, bytes: usize, mut piece: impl FnMut(usize)) {
        writeln!(self.stream, "<{bytes}").expect("it is connected");
        let mut buffer = [0; 8192];
        let end = self.told + bytes;
        while self.told < end {
            let n = (end - self.told).min(buffer.len());
            let n = self.stream.read(&mut buffer[..n]).expect("it goes on");
            assert!(n > 0, "it has ended after {} bytes", self.told);
            for (i, byte) in buffer[..n].iter().enumerate() {
                assert_eq!(*byte, at(self.told + i), "byte {}", self.told + i);
            }
            self.told += n;
            piece(self.told);
        }
    }

    /// Sends the next bytes, and is told that they are.
    fn tell(&mut self, bytes: usize) {
        self.send(bytes);
        self.hear_thanks();
    }

    fn send(&mut self, bytes: usize) {
        let all: Vec<u8> = (self.sent..self.sent + bytes).map(at).collect();
        self.sent += bytes;
        writeln!(self.stream, ">{bytes}").and_then(|()| self.stream.write_all(&all)).expect("sent");
    }

    fn hear_thanks(&mut self) {
        let mut said = [0; 5];
        self.stream.read_exact(&mut said).expect("it answers");
        assert_eq!(&said, b"good\n");
    }
}

#[test]
fn vm_an_open_connection_wakes_it_and_goes_on() {
    let host = streaming(&[]);
    let mut caller = Caller::new(&host);
    let mut other = Caller::new(&host);
    other.tell(10);
    for round in 0..20 / slowness().min(5) as usize {
        caller.hear(100 + round, |_| {});
        put_to_sleep(&host);
        assert_eq!(inside(&host), []);
        if round % 2 == 0 {
            caller.tell(1000);
        }
    }
    other.tell(10);
    // Hanging up is something that the container wants to know, too.
    put_to_sleep(&host);
    drop(caller);
    host.wait_for_state("x", "running");
    put_to_sleep(&host);
    other.hear(10, |_| {});
}

/// Long enough for a wake that must not come.
fn a_while() {
    thread::sleep(Duration::from_secs(1) * slowness());
}

#[test]
fn vm_what_is_not_to_wake_it_waits_until_something_else_does() {
    let host = streaming(&["--wake-on", "call"]);
    let mut caller = Caller::new(&host);
    caller.tell(10);
    for (tier, state) in [(&["sleep", "x"][..], "asleep"), (&["sleep", "--drowsy", "x"], "drowsy")]
    {
        host.dm(&["update", "--wake-on", "call", "x"]).ok();
        host.dm(tier).ok();
        caller.send(10);
        a_while();
        assert_eq!(host.state_of("x"), state, "bytes do not wake it");
        let mut other = Caller::new(&host);
        other.hear(10, |_| {});
        caller.hear_thanks();
        // And the other way round, from the next time on.
        host.dm(&["update", "--wake-on", "data", "x"]).ok();
        host.dm(tier).ok();
        let mut late = Caller::new(&host);
        late.send(10);
        a_while();
        assert_eq!(host.state_of("x"), state, "somebody new does not wake it");
        caller.tell(10);
        late.hear_thanks();
        host.dm(&["update", "--wake-on", "none", "x"]).ok();
        host.dm(tier).ok();
        caller.send(10);
        let _third = Caller::new(&host);
        a_while();
        assert_eq!(host.state_of("x"), state, "nothing but its operator wakes it");
        host.dm(&["wake", "x"]).ok();
        caller.hear_thanks();
    }
    assert_eq!(host.inspect("x")["config"]["wake_on"]["timer"], "no");
    let out = host.dm(&["update", "--wake-on", "calls", "x"]);
    assert!(out.stderr.contains("call, data, file, timer"), "{}", out.stderr);
}

#[test]
fn vm_timers_that_may_wait_do_and_those_that_wake_nobody_do_not() {
    let host = Host::with_busybox();
    // One whose timer rings after a while, by which it sleeps: a slow machine has more time for that. When it
    // was put to sleep, at the earliest, and how long its timer takes.
    let begin = |wake_on: &dyn Fn(u32) -> String, sleep: &[&str]| {
        for seconds in [2, 4, 8, 16, 32] {
            let (begun, takes) = (Instant::now(), Duration::from_secs(seconds.into()));
            let script = format!("sleep {seconds}; echo rang; exec sleep 100000");
            let run = ["run", "-d", "--name", "x", "--wake-on", &wake_on(seconds)];
            host.dm(&[&run[..], &["busybox", "sh", "-c", &script]].concat()).ok();
            let since = Instant::now();
            host.dm(sleep).ok();
            if begun.elapsed() < takes {
                return (since, takes);
            }
            host.dm(&["rm", "-f", "x"]).ok();
        }
        panic!("it does not sleep before its timer rings");
    };
    for sleep in [&["sleep", "x"][..], &["sleep", "--drowsy", "x"]] {
        let (since, takes) = begin(&|seconds| format!("timer={}s", seconds * 4), sleep);
        let rang = || host.dm(&["logs", "x"]).ok().contains("rang");
        let within = takes * 4 + Duration::from_secs(20) * slowness();
        assert!(wait_until(within, rang), "it is woken");
        assert!(since.elapsed() >= takes * 4, "after {:?} of {takes:?}", since.elapsed());
        host.dm(&["rm", "-f", "x"]).ok();
        let (_, takes) = begin(&|_| "call".to_owned(), sleep);
        thread::sleep(takes * 2);
        assert!(!rang(), "nobody wakes it for that");
        host.dm(&["wake", "x"]).ok();
        assert!(wait_until(Duration::from_secs(10) * slowness(), rang), "it has rung meanwhile");
        host.dm(&["rm", "-f", "x"]).ok();
    }
}

#[test]
fn vm_a_transfer_goes_on_though_it_is_put_to_sleep_in_the_middle() {
    let host = streaming(&[]);
    const BYTES: usize = 4 << 20;
    for rounds in [1, 2, 4] {
        let mut caller = Caller::new(&host);
        let hearing = thread::spawn(move || {
            caller.hear(BYTES, |told| {
                // Slower than the server, so that it often finds no room.
                if told % (1 << 14) < 8192 {
                    thread::sleep(Duration::from_micros(300));
                }
            });
            caller.tell(BYTES);
        });
        for _ in 0..rounds {
            host.dm(&["sleep", "x"]).ok();
        }
        hearing.join().expect("each byte came once, in order");
    }
}

#[test]
fn vm_a_killed_keeper_costs_nothing() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe"];
    host.dm(&[&serve[..], &["stream", "0.0.0.0", "80"]].concat()).ok();
    let address = host.address_of("x");
    let mut caller = Caller::new(&host);
    caller.hear(10, |_| {});
    for round in 0..3 {
        put_to_sleep(&host);
        kill_keeper(&host);
        // Who comes now is answered by the kernel, and waits; who was there is not told anything.
        let mut next = Caller::of(&host, &address);
        caller.stream.set_nonblocking(true).expect("a socket");
        let said = caller.stream.read(&mut [0]).map_err(|e| e.kind());
        assert_eq!(said, Err(std::io::ErrorKind::WouldBlock), "{round}");
        caller.stream.set_nonblocking(false).expect("a socket");
        // The next command, whichever it is, has both heard again.
        host.dm(&["ps"]).ok();
        next.tell(5);
        next.hear(5, |_| {});
        caller.tell(10);
        caller.hear(10, |_| {});
    }
}

#[test]
fn vm_what_a_killed_keeper_has_left_is_in_nobodys_way() {
    let host = counting(&[]);
    for _ in 0..2 {
        assert_eq!(call(&host), "call 1");
        host.dm(&["sleep", "--drowsy", "x"]).ok();
        kill_keeper(&host);
        assert_eq!(host.state_of("x"), "running", "nobody would hear its callers");
        // The same address and port, for which the vault had a socket.
        host.dm(&["restart", "--time", "0", "x"]).ok();
    }
    assert_eq!(call(&host), "call 1");
}

#[test]
fn vm_keeper_and_vault_killed_cost_open_connections_only() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "-p", "8080:80", "busybox", "probe"];
    host.dm(&[&serve[..], &["stream", "0.0.0.0", "80"]].concat()).ok();
    let mut lost = Caller::new(&host);
    lost.hear(10, |_| {});
    let started = host.inspect("x")["started"].clone();
    put_to_sleep(&host);
    // The one that was told of the end of the other would make it again.
    kill_both(&host);
    let ended = lost.stream.read(&mut [0]);
    assert!(matches!(ended, Ok(0) | Err(_)), "it is told: {ended:?}");
    // The next command, whichever it is, makes the rest again.
    assert_eq!(host.state_of("x"), "asleep");
    let ask = format!("printf '<3\n' | busybox nc -w 5 {} 8080", Host::ADDRESS);
    let said = host.neighbour_sh(&ask);
    assert_eq!(said.stdout.as_bytes(), [at(0), at(1), at(2)], "{said}");
    assert_eq!(host.state_of("x"), "running");
    Caller::new(&host).tell(10);
    assert_eq!(host.inspect("x")["started"], started, "it was started once");
    // The process that spoke with the lost caller has heard of it, and nobody else is left.
    let processes = || host.dm(&["top", "x"]).ok();
    let alone = || processes().matches("probe").count() == 1;
    assert!(wait_until(Duration::from_secs(5) * slowness(), alone), "{}", processes());
}

#[test]
fn vm_who_follows_its_log_waits_while_it_sleeps() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    put_to_sleep(&host);
    let mut follower = host.dormouse(&["logs", "--follow", "x"]).spawn().expect("it starts");
    thread::sleep(Duration::from_millis(300));
    assert!(follower.try_wait().expect("it was started").is_none(), "it waits");
    assert_eq!(call(&host), "call 2");
    put_to_sleep(&host);
    host.dm(&["stop", "x"]).ok();
    assert!(follower.wait().expect("it was started").success());
}

/// What `ps` shows of a container is what `inspect` shows of it.
#[track_caller]
fn is_listed_as_it_is(host: &Host, names: &[&str]) {
    let list: serde_json::Value =
        serde_json::from_str(&host.dm(&["ps", "--all", "--json"]).ok()).expect("ps prints JSON");
    let list = list.as_array().expect("a list");
    for name in names {
        let listed = list.iter().find(|one| one["name"] == *name).expect("it is listed");
        let inspected = host.inspect(name);
        for (key, value) in listed.as_object().expect("an object") {
            assert_eq!(*value, inspected[key], "{key} of {name}");
        }
    }
}

#[test]
fn of_many_that_sleep_the_list_is_true_whatever_becomes_of_them() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    host.dm(&["clone", "--asleep", "-n", "120", "--name", "c", "x"]).ok();
    host.dm(&["create", "--name", "new", "busybox", "true"]).ok();
    assert_eq!(host.dm(&["run", "--name", "old", "busybox", "sh", "-c", "exit 3"]).status, 3);
    thread::sleep(Duration::from_millis(1100)); // what was changed just now is not kept
    let kept = host.root().join("lib/list");
    assert!(!kept.exists());
    let names = ["x", "c-1", "c-2", "c-3", "c-4", "c-120", "new", "old"];
    is_listed_as_it_is(&host, &names);
    let text = std::fs::read_to_string(&kept).expect("it was worth keeping");
    assert!(text.lines().count() > 120, "{} lines", text.lines().count());
    is_listed_as_it_is(&host, &names);
    // Each change, by itself.
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
    // Of what is in the file nothing is believed that does not fit.
    let wrong = text.replace("\"asleep\"", "\"awake\"").replace("{\"id\"", "\0{\"id\"");
    for damaged in [&text[..text.len() / 2], &wrong, "", "containers 0\nx"] {
        std::fs::write(&kept, damaged).expect("the directory is ours");
        is_listed_as_it_is(&host, &["x", "c-1", "renamed", "c-4", "c-120", "new", "old"]);
    }
    host.dm(&["rm", "--force", "--all"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

/// A small disk, with a file on it that leaves as much room as is wanted.
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
        // What the ballast itself takes for where it lies is seen afterwards.
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
fn vm_on_a_full_disk_it_runs_on_or_sleeps_and_nothing_is_left() {
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
            let is_told = out.stderr.contains("No space left") || out.stderr.contains("no room");
            assert!(is_done || is_told, "{verb:?} with {kb} kB: {out}");
            let expected = if is_done && verb[0] == "sleep" { "asleep" } else { "running" };
            assert_eq!(host.state_of("x"), expected, "{verb:?} with {kb} kB");
            // Whoever sleeps on a full disk wakes there.
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
