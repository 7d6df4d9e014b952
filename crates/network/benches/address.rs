//! The cost of address networking: the same client and server on a plain stack's loopback, and as
//! two containers of a domain. Rounds are interleaved and each gives a ratio; the median of the
//! ratios is the result, because absolute times on a shared machine mean little.
//!
//! `cargo bench -p dormouse-network --bench address [-- ROUNDS]`, as root. One JSON line per
//! figure.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_kernel::call::{CloneFlags, unshare};
use dormouse_model::{ContainerId, Name};
use dormouse_network::{Network, Settings};
use rustix::thread::LinkNameSpaceType;

const KINDS: [&str; 5] = ["tcp_rr", "udp_rr", "connect", "bandwidth", "bind"];
const ROUND: Duration = Duration::from_millis(400);

fn main() {
    if let Ok(role) = std::env::var("BENCH_ROLE") {
        return play(&role);
    }
    let rounds = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(11);
    unshare(CloneFlags::NEWNET).unwrap();
    let done = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(done.success());
    let dir = tempfile::tempdir().unwrap();
    let parent = format!("dormouse-test-bench-{}", std::process::id());
    let (lib, run) = (dir.path().join("lib"), dir.path().join("run"));
    let network = Network::open(&lib, &run, &parent, Settings::default()).unwrap();
    let name: Name = "d".parse().unwrap();
    let made = Instant::now();
    let domain = network.domain(&name, String::new).unwrap();
    print("domain_create_ms", made.elapsed().as_secs_f64() * 1e3, rounds);
    let unified = Path::new("/sys/fs/cgroup/unified");
    let root = if unified.exists() { unified } else { Path::new("/sys/fs/cgroup") };
    let parent = root.join(&parent);

    start_path(&network, &name, &parent);

    let mut cgroups = Vec::new();
    let mut addresses = Vec::new();
    for n in 1..=2u8 {
        let id = ContainerId::from_bytes([n; 16]);
        let own = network.allocate(&name, &id, &[]).unwrap();
        let cgroup = parent.join(id.as_str());
        fs::create_dir(&cgroup).unwrap();
        let number = fs::metadata(&cgroup).unwrap().ino();
        network.enter(&domain, &id, number, &own).unwrap();
        cgroups.push(cgroup);
        addresses.push(own[0]);
    }
    let net = run.join("domains/d/net");
    for kind in KINDS {
        let (mut plain, mut address) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
            plain.push(one(kind, loopback, None, None));
            address.push(one(kind, addresses[0], Some((&cgroups[0], &cgroups[1])), Some(&net)));
        }
        let mut ratios: Vec<f64> = address.iter().zip(&plain).map(|(a, p)| a / p).collect();
        println!(
            "{{\"bench\":\"network.address\",\"figure\":\"{kind}\",\"plain_per_s\":{:.0},\
             \"address_per_s\":{:.0},\"ratio\":{:.3},\"best_ratio\":{:.3},\"rounds\":{rounds}}}",
            median(&mut plain),
            median(&mut address),
            median(&mut ratios),
            plain_best(&address) / plain_best(&plain),
        );
    }
    for cgroup in cgroups {
        while fs::remove_dir(&cgroup).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    drop(domain);
    network.dismantle().unwrap();
    fs::remove_dir(&parent).unwrap();
}

/// The part of a start in this crate, without processes: medians in microseconds.
fn start_path(network: &Network, name: &Name, parent: &Path) {
    let steps = ["domain", "allocate", "enter", "hosts_add", "leave", "release"];
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); steps.len()];
    for n in 0..300u32 {
        let mut bytes = [9; 16];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        let id = ContainerId::from_bytes(bytes);
        let cgroup = parent.join(id.as_str());
        fs::create_dir(&cgroup).unwrap();
        let number = fs::metadata(&cgroup).unwrap().ino();
        let mut clock = Instant::now();
        let mut lap = |i: usize, times: &mut Vec<Vec<f64>>| {
            times[i].push(clock.elapsed().as_secs_f64() * 1e6);
            clock = Instant::now();
        };
        let domain = network.domain(name, String::new).unwrap();
        lap(0, &mut times);
        let own = network.allocate(name, &id, &[]).unwrap();
        lap(1, &mut times);
        network.enter(&domain, &id, number, &own).unwrap();
        lap(2, &mut times);
        network.hosts_add(&domain, &id, &["name", "hostname"], &own).unwrap();
        lap(3, &mut times);
        network.leave(&id).unwrap();
        lap(4, &mut times);
        network.release(&id).unwrap();
        lap(5, &mut times);
        fs::remove_dir(&cgroup).unwrap();
    }
    for (step, times) in steps.iter().zip(&mut times) {
        print(&format!("{step}_us"), median(times), times.len());
    }
}

fn print(figure: &str, value: f64, rounds: usize) {
    println!(
        "{{\"bench\":\"network.address\",\"figure\":\"{figure}\",\"median\":{value:.1},\"rounds\":{rounds}}}"
    );
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn plain_best(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// One round of one kind: how many per second (bytes for the bandwidth).
fn one(kind: &str, to: IpAddr, cgroups: Option<(&PathBuf, &PathBuf)>, netns: Option<&Path>) -> f64 {
    let start = |role: &str, cgroup: Option<&PathBuf>, to: &str| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("BENCH_ROLE", role).env("BENCH_KIND", kind).env("BENCH_TO", to);
        command.stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            command.env("BENCH_CGROUP", cgroup);
        }
        if let Some(netns) = netns {
            command.env("BENCH_NETNS", netns);
        }
        command.spawn().unwrap()
    };
    let line = |child: &mut Child| -> String {
        let mut text = String::new();
        let mut byte = [0];
        let out = child.stdout.as_mut().unwrap();
        while out.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            text.push(byte[0] as char);
        }
        text
    };
    let mut server = start("server", cgroups.map(|c| c.0), "0.0.0.0:0");
    let port = line(&mut server);
    let mut client = start("client", cgroups.map(|c| c.1), &format!("{to}:{port}"));
    let result = line(&mut client).parse().unwrap();
    client.wait().unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    result
}

fn play(role: &str) {
    if let Some(cgroup) = std::env::var_os("BENCH_CGROUP") {
        fs::write(Path::new(&cgroup).join("cgroup.procs"), "0").unwrap();
    }
    if let Some(netns) = std::env::var_os("BENCH_NETNS") {
        let netns = fs::File::open(netns).unwrap();
        rustix::thread::move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
            .unwrap();
    }
    let kind = std::env::var("BENCH_KIND").unwrap();
    let to: SocketAddr = std::env::var("BENCH_TO").unwrap().parse().unwrap();
    if role == "server" { serve(&kind, to) } else { println!("{:.1}", ask(&kind, to)) }
}

fn serve(kind: &str, at: SocketAddr) {
    let mut buffer = vec![0; 1 << 17];
    if kind == "udp_rr" {
        let socket = UdpSocket::bind(at).unwrap();
        println!("{}", socket.local_addr().unwrap().port());
        loop {
            let (bytes, from) = socket.recv_from(&mut buffer).unwrap();
            socket.send_to(&buffer[..bytes], from).unwrap();
        }
    }
    let listener = TcpListener::bind(at).unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        loop {
            match stream.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(_) if kind == "bandwidth" => {}
                Ok(bytes) => stream.write_all(&buffer[..bytes]).unwrap(),
            }
        }
    }
}

fn ask(kind: &str, to: SocketAddr) -> f64 {
    let mut buffer = vec![0; if kind == "bandwidth" { 1 << 17 } else { 1 }];
    let connect = || {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    };
    let mut stream = (kind == "tcp_rr" || kind == "bandwidth").then(&connect);
    let udp = (kind == "udp_rr").then(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect(to).unwrap();
        socket
    });
    let mut step = || -> usize {
        match kind {
            "tcp_rr" => {
                let stream = stream.as_mut().unwrap();
                stream.write_all(&buffer).unwrap();
                stream.read_exact(&mut buffer).unwrap();
                1
            }
            "bandwidth" => {
                stream.as_mut().unwrap().write_all(&buffer).unwrap();
                buffer.len()
            }
            "udp_rr" => {
                let socket = udp.as_ref().unwrap();
                socket.send(&buffer).unwrap();
                socket.recv(&mut buffer).unwrap()
            }
            "connect" => {
                let mut stream = connect();
                stream.write_all(&buffer).unwrap();
                stream.read_exact(&mut buffer).unwrap();
                1
            }
            _ => {
                drop(UdpSocket::bind("0.0.0.0:0").unwrap());
                1
            }
        }
    };
    for _ in 0..200 {
        step(); // warm
    }
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < ROUND {
        for _ in 0..16 {
            done += step();
        }
    }
    done as f64 / start.elapsed().as_secs_f64()
}
