//! Bandwidth: what each of several containers sends and receives at the uplink of their domain, beside what it is due.
//!
//! The host counts what it gets from each container, and gives to it. Guarantees and ceilings count whole packets, so
//! the figures are those of packets: 1,514 bytes for 1,448 of TCP, 1,442 for a datagram of 1,400.
//!
//! Podman has no contract of bandwidth, and takes no part.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dormouse_benches::{Bench, figure, median, ok, promise};
use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::{Claim, Hosts, due};

/// The rate of the uplink, in Mbit a second.
const UPLINK: f64 = 100.0;
/// The part of its due by which a container may be off.
const OFF: f64 = 0.06;
/// From the start of the last container to the measurement.
const SETTLES: Duration = Duration::from_secs(2);
/// An address of the host.
const HOST: &str = "192.0.2.1";
/// Size of a packet with its payload, in bytes.
const OF_TCP: f64 = 1514.0 / 1448.0;
const OF_UDP: f64 = 1442.0 / 1400.0;
/// What a flood sends, in Mbit a second.
const FLOOD: &str = "400";
/// LIMIT: bytes that the host has sent and no container has received.
const IN_FLIGHT: usize = 128 << 10;

/// One container of a case.
#[derive(Debug, Clone, Copy)]
struct Member {
    rate: f64,
    ceil: Option<f64>,
    weight: u32,
    load: Load,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Idle,
    /// So many connections.
    Flows(u32),
    /// Datagrams.
    Flood,
}

impl Member {
    const fn of(rate: f64) -> Self {
        Self { rate, ceil: None, weight: 100, load: Load::Flows(1) }
    }

    fn claim(&self) -> Claim {
        let wants = match self.load {
            Load::Idle => 0.0,
            Load::Flows(_) | Load::Flood => self.ceil.unwrap_or(UPLINK),
        };
        Claim { reserve: self.rate, weight: self.weight, wants }
    }

    fn options(&self) -> Vec<String> {
        let mbit = |rate: f64| format!("{rate}mbit");
        let mut options = vec!["--net-weight".into(), self.weight.to_string()];
        options.extend(["--net-rate".into(), mbit(self.rate)]);
        options.extend(self.ceil.iter().flat_map(|ceil| ["--net-ceil".into(), mbit(*ceil)]));
        options
    }
}

fn cases() -> Vec<(&'static str, Vec<Member>)> {
    let [first, second, third] = [50.0, 20.0, 10.0].map(Member::of);
    let bounded = Member { ceil: Some(30.0), ..third };
    let heavy = Member { weight: 300, ..third };
    let idle = Member { load: Load::Idle, ..first };
    let many = Member { load: Load::Flows(8), ..second };
    let flood = Member { load: Load::Flood, ..third };
    vec![
        ("a ceiling of 30, alone", vec![bounded]),
        ("guarantees of 50, 20 and 10", vec![first, second, third]),
        ("the same, the third with three times the weight", vec![first, second, heavy]),
        ("the same, the second over eight connections", vec![first, many, third]),
        ("the same, the first idle, the third at most 30", vec![idle, second, bounded]),
        ("the same, a flood of datagrams from or to the third", vec![first, second, flood]),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Sent,
    Received,
}

/// Bytes of packets from or to each address.
type Counts = Arc<Mutex<BTreeMap<IpAddr, f64>>>;

fn count(counts: &Counts, address: IpAddr, bytes: f64) {
    if let Ok(mut counts) = counts.lock() {
        *counts.entry(address).or_default() += bytes;
    }
}

/// Ports of the host: one that receives, one that sends to each client, one for datagrams.
struct Ports {
    receives: u16,
    sends: u16,
    datagrams: u16,
    counts: Counts,
}

impl Ports {
    fn open() -> Result<Self> {
        let counts = Counts::default();
        let receives = listen(&counts, |stream, counts, peer| {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(read @ 1..) = stream.read(&mut buffer) {
                count(counts, peer, read as f64 * OF_TCP);
            }
        })?;
        let sends = listen(&counts, |stream, counts, peer| {
            if set_socket_send_buffer_size(&*stream, IN_FLIGHT).is_err() {
                return;
            }
            let zeros = vec![0; 1 << 14];
            while let Ok(written @ 1..) = stream.write(&zeros) {
                count(counts, peer, written as f64 * OF_TCP);
            }
        })?;
        let socket = UdpSocket::bind((HOST, 0))?;
        let (datagrams, all) = (socket.local_addr()?.port(), counts.clone());
        spawn(move || {
            let mut buffer = [0; 1500];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
                count(&all, peer.ip(), length as f64 * OF_UDP);
            }
        });
        Ok(Self { receives, sends, datagrams, counts })
    }

    /// Bytes of each address until now.
    fn until_now(&self, addresses: &[IpAddr]) -> Vec<f64> {
        let counts = self.counts.lock().map(|counts| counts.clone()).unwrap_or_default();
        addresses.iter().map(|address| counts.get(address).copied().unwrap_or(0.0)).collect()
    }
}

/// Serves each client in a thread, as long as this process lives.
fn listen(counts: &Counts, serve: fn(&mut std::net::TcpStream, &Counts, IpAddr)) -> Result<u16> {
    let listener = TcpListener::bind((HOST, 0))?;
    let (port, counts) = (listener.local_addr()?.port(), counts.clone());
    spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let counts = counts.clone();
            spawn(move || {
                if let Ok(peer) = stream.peer_addr() {
                    serve(&mut stream, &counts, peer.ip());
                }
            });
        }
    });
    Ok(port)
}

pub fn bandwidth(hosts: &Hosts) -> Result<()> {
    hosts.bench.configure(&format!("[network]\nuplink-rate = \"{UPLINK}mbit\"\n"))?;
    let ip = ["address", "add", &format!("{HOST}/32"), "dev", "lo"];
    ok(Command::new("ip").args(ip))?;
    let ports = Ports::open()?;
    for (name, members) in cases() {
        if !name.contains(&hosts.options.only) {
            continue;
        }
        for direction in [Direction::Sent, Direction::Received] {
            let mut rounds = Vec::new();
            for _ in 0..hosts.options.rounds {
                let round = round(hosts, &ports, &members, direction).with_context(|| name)?;
                rounds.push(round);
            }
            report(name, &members, direction, &rounds);
        }
    }
    Ok(())
}

/// Processes of the host that flood a container; they end with this.
struct Floods(Vec<Child>);

impl Drop for Floods {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// Mbit a second of each container.
fn round(
    hosts: &Hosts,
    ports: &Ports,
    members: &[Member],
    direction: Direction,
) -> Result<Vec<f64>> {
    let bench = &hosts.bench;
    let names: Vec<String> = (0..members.len()).map(|n| format!("b{n}")).collect();
    let result = (|| {
        let mut floods = Floods(Vec::new());
        let mut addresses = Vec::new();
        for (name, member) in names.iter().zip(members) {
            start(bench, ports, name, member, direction)?;
            let address = bench.address(name, ports.datagrams)?.ip();
            if member.load == Load::Flood && direction == Direction::Received {
                let mut flood = Command::new(bench.path("stream"));
                flood.args(["flood", &address.to_string(), "9", FLOOD]);
                floods.0.push(flood.stdout(Stdio::null()).spawn()?);
            }
            addresses.push(address);
        }
        sleep(SETTLES);
        let (before, start) = (ports.until_now(&addresses), Instant::now());
        sleep(Duration::from_secs(hosts.options.seconds));
        let (after, took) = (ports.until_now(&addresses), start.elapsed().as_secs_f64());
        let mbit = |(after, before): (&f64, &f64)| (after - before) * 8.0 / 1e6 / took;
        Ok(after.iter().zip(&before).map(mbit).collect())
    })();
    ok(bench.dormouse().args(["rm", "--force"]).args(&names))?;
    result
}

fn start(
    bench: &Bench,
    ports: &Ports,
    name: &str,
    member: &Member,
    direction: Direction,
) -> Result<()> {
    let mut run = bench.dormouse();
    run.args(["run", "-d", "--name", name]).args(member.options()).arg("bench");
    let stream = |word: &str, port: u16, number: &str| {
        ["stream", word, HOST, &port.to_string(), number].map(str::to_owned).to_vec()
    };
    let words = match (member.load, direction) {
        (Load::Flows(number), Direction::Sent) => {
            stream("send", ports.receives, &number.to_string())
        }
        (Load::Flows(number), Direction::Received) => {
            stream("receive", ports.sends, &number.to_string())
        }
        (Load::Flood, Direction::Sent) => stream("flood", ports.datagrams, FLOOD),
        (Load::Idle, _) | (Load::Flood, Direction::Received) => {
            vec!["sleep".into(), "1000000".into()]
        }
    };
    ok(run.args(words)).map(drop)
}

fn report(name: &str, members: &[Member], direction: Direction, rounds: &[Vec<f64>]) {
    let claims: Vec<Claim> = members.iter().map(Member::claim).collect();
    let wanted = claims.iter().map(|claim| claim.wants).sum::<f64>();
    let due = due(&claims, wanted.min(UPLINK));
    let got: Vec<f64> =
        (0..members.len()).map(|n| median(rounds.iter().map(|round| round[n]).collect())).collect();
    // A flood that the host sends is dropped before the container, and is not counted.
    let is_counted = |n: &usize| {
        let member = members[*n];
        member.load != Load::Idle && (member.load != Load::Flood || direction == Direction::Sent)
    };
    let off = |n: usize| (got[n] / due[n] - 1.0).abs();
    let worst = (0..members.len()).filter(is_counted).map(off).fold(0.0, f64::max);
    let direction = format!("{direction:?}").to_lowercase();
    eprintln!("\n{name}, {direction}: Mbit/s");
    for n in (0..members.len()).filter(is_counted) {
        let all = rounds.iter().map(|round| round[n]);
        let (least, most) = (all.clone().fold(f64::INFINITY, f64::min), all.fold(0.0, f64::max));
        eprintln!("  {n}: due {:.1}, got {:.1} ({least:.1} to {most:.1})", due[n], got[n]);
    }
    let more = serde_json::json!({ "rounds": rounds, "due_mbit": due, "got_mbit": got });
    figure("contracts", &format!("{name}, {direction}: off its due"), worst, "ratio", more);
    promise("part of its due that a container is off", worst, OFF);
}
