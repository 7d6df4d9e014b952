//! Accounts across hosts: work for a connection is that of the account that an agreed host has sent along, and of no
//! account because of any other packet.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use dormouse_bpf::call::{self, Map};
use dormouse_testkit::{Host, Led, dormouse, image, run, soon, wait_until};

use crate::contracts::Daemon;
use crate::gates::{accounts, assert_taken, clients, figure, load, stolen_ns, sum};
use crate::order::{
    Burst, FIRST, MEAN_ORDERED, SECOND, await_connections, await_order, connections, drop_all, go,
    mean, places_of, served,
};
use crate::private::{checksum, frame};

/// Numbers that both hosts know.
const SMITH: &str = "1073741824";
const JONES: &str = "1073741825";

/// Two hosts of their own roots, networks and containers, with a wire between them.
struct Hosts {
    a: Host,
    b: Host,
}

impl Hosts {
    const A: [&str; 2] = ["198.51.100.1", "2001:db8:1::1"];
    const B: [&str; 2] = ["198.51.100.2", "2001:db8:1::2"];

    /// Both have gates and the accounts smith and jones. `b` has a service, which listens before its gates are loaded,
    /// and `a` a client of each account. No host has agreed to anything.
    #[track_caller]
    fn join() -> Self {
        Self::serving(&["burn", "::", "80"])
    }

    /// `probe` is what the service runs.
    #[track_caller]
    fn serving(probe: &[&str]) -> Self {
        let this = Self { a: Host::with_busybox(), b: Host::with_busybox() };
        let b = this.b.pid();
        sh(&this.a, &format!("ip link add wire0 type veth peer name wire0 netns {b}"));
        for (host, [v4, v6]) in [(&this.a, Self::A), (&this.b, Self::B)] {
            sh(host, &format!("ip addr add {v4}/24 dev wire0; ip link set wire0 up"));
            sh(host, &format!("ip addr add {v6}/64 dev wire0 nodad"));
            for (name, number) in [("smith", SMITH), ("jones", JONES)] {
                host.dm(&["account", "create", "--number", number, name]).ok();
            }
        }
        let run = ["run", "-d", "--name", "db", "--shared", "-p", "8080:80", "busybox"];
        this.b.dm(&[&run[..], &["probe"], probe].concat()).ok();
        for name in ["smith", "jones"] {
            let run = ["run", "-d", "--name", name, "--account", name, "busybox"];
            this.a.dm(&[&run[..], &["sleep", "100000"]].concat()).ok();
        }
        let ask = || this.a.dm(&ask("smith", Self::B[0], "0", "0")).status == 0;
        assert!(wait_until(soon(), ask), "db does not listen");
        load(&this.a);
        load(&this.b);
        this
    }

    /// Both take the other one on their lists.
    #[track_caller]
    fn agree(&self) {
        self.a.dm(&[&["account", "host", "add"], &Self::B[..]].concat()).ok();
        self.b.dm(&[&["account", "host", "add"], &Self::A[..]].concat()).ok();
    }

    /// Has 20 requests of 2 ms served over one connection.
    #[track_caller]
    fn work(&self, client: &str, address: &str) {
        self.a.dm(&ask(client, address, "20", "2000")).ok();
    }

    /// Asserts that the service has done as many requests of `work` for nobody but itself.
    #[track_caller]
    fn assert_of_the_outside(&self, before: u64, times: u64) {
        let all = accounts(&self.b);
        assert_eq!(sum(&all, "CpuTakenNs"), 0, "{all:?}");
        let own = figure(&all, "@db", "CpuNs") - before;
        assert!(own + stolen_ns() >= times * 40_000_000, "{own}: {all:?}");
    }

    /// CPU time that the service was charged itself.
    #[track_caller]
    fn own_ns(&self) -> u64 {
        figure(&accounts(&self.b), "@db", "CpuNs")
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = self.a.command("ip").args(["link", "del", "wire0"]).status();
    }
}

fn ask<'a>(client: &'a str, address: &'a str, times: &'a str, us: &'a str) -> [&'a str; 8] {
    ["exec", client, "probe", "work", address, "8080", times, us]
}

#[track_caller]
fn sh(host: &Host, script: &str) -> String {
    host.sh(script).ok()
}

/// Rules of the host's own, in a table `seen`, for packets that are forwarded.
#[track_caller]
fn rules(host: &Host, rules: &[&str]) {
    let mut text =
        "table inet seen {\n chain c {\n type filter hook forward priority -300;\n".to_owned();
    for rule in rules {
        text += &format!("  {rule}\n");
    }
    let file = host.dir().join("seen.nft");
    fs::write(&file, text + " }\n}\n").expect("written");
    sh(host, &format!("nft -f {}", file.display()));
}

/// Packets that the nth rule of the table has counted.
#[track_caller]
fn counted(host: &Host, nth: usize) -> u64 {
    let text = sh(host, "nft list table inet seen");
    let mut counts = text.lines().filter_map(|line| line.split("counter packets ").nth(1));
    let count = counts.nth(nth).and_then(|rest| rest.split(' ').next()).expect("a counter");
    count.parse().expect("a number")
}

#[test]
fn account_follows_a_connection_to_an_agreed_host() {
    let hosts = Hosts::join();
    hosts.agree();
    // By both families, and to a service that listened before.
    for address in Hosts::B {
        hosts.work("smith", address);
        hosts.work("jones", address);
        hosts.work("jones", address);
    }
    let all = accounts(&hosts.b);
    assert_taken(&all, "smith", 80);
    assert_taken(&all, "jones", 160);
    // A service of the one host works for its client, and asks the other host for it.
    let relay =
        "nc -ll -p 80 -e sh -c 'read word; probe work 198.51.100.2 8080 20 2000; echo served'";
    let run = ["run", "-d", "--name", "front", "--shared", "busybox", "sh", "-c", relay];
    hosts.a.dm(&run).ok();
    let through = ["exec", "smith", "sh", "-c", "echo go | nc front 80"];
    let is_served = || hosts.a.dm(&through).stdout.contains("served");
    assert!(wait_until(soon(), is_served), "{}", hosts.a.dm(&through));
    let all = accounts(&hosts.b);
    let taken = figure(&all, "smith", "CpuTakenNs");
    assert!(taken + stolen_ns() >= 120_000_000, "{all:?}");
    assert_taken(&all, "jones", 160);
    // The list ends it, for connections from then on.
    hosts.b.dm(&[&["account", "host", "rm"], &Hosts::A[..]].concat()).ok();
    let before = figure(&accounts(&hosts.b), "smith", "CpuTakenNs");
    hosts.work("smith", Hosts::B[0]);
    // The label of before ends with the first request.
    let after = figure(&accounts(&hosts.b), "smith", "CpuTakenNs");
    assert!(after < before + 10_000_000 + stolen_ns(), "{before} and {after}");
    assert_eq!(hosts.b.dm(&["account", "host", "ls"]).ok(), "");
    let programs = hosts.b.dm(&["gate", "stats", "--format", "{{.Program}}"]).ok();
    assert!(!programs.contains("dm_gate_syn"), "a host without others has no program for them");
}

/// Each host alone decides what it sends and what it believes.
#[test]
fn nothing_follows_without_the_agreement_of_both_hosts() {
    let hosts = Hosts::join();
    rules(&hosts.b, &["tcp option 254 exists counter"]);
    let before = hosts.own_ns();
    hosts.b.dm(&[&["account", "host", "add"], &Hosts::A[..]].concat()).ok();
    hosts.work("smith", Hosts::B[0]);
    assert_eq!(counted(&hosts.b, 0), 0, "a host that was not named learns nothing");
    hosts.assert_of_the_outside(before, 1);
    hosts.b.dm(&[&["account", "host", "rm"], &Hosts::A[..]].concat()).ok();
    hosts.b.dm(&["account", "host", "add", "198.51.100.0/31"]).ok();
    hosts.b.dm(&["account", "host", "rm", "198.51.100.0/31"]).ok();
    hosts.b.dm(&["account", "host", "add", "203.0.113.0/24"]).ok();
    hosts.a.dm(&[&["account", "host", "add"], &Hosts::B[..]].concat()).ok();
    for address in Hosts::B {
        hosts.work("smith", address);
    }
    assert!(counted(&hosts.b, 0) >= 2, "the other host has sent it");
    hosts.assert_of_the_outside(before, 3);
    sh(&hosts.b, "nft delete table inet seen");
}

/// Of an agreed host, only numbers count that several hosts share, and that exist here.
#[test]
fn unknown_and_local_accounts_do_not_follow() {
    let hosts = Hosts::join();
    hosts.agree();
    hosts.a.dm(&["account", "create", "--number", "1073741999", "ghost"]).ok();
    hosts.a.dm(&["account", "create", "local"]).ok();
    hosts.b.dm(&["account", "create", "local"]).ok();
    clients(&hosts.a, &["own"]);
    for name in ["ghost", "local"] {
        let run = ["run", "-d", "--name", name, "--account", name, "busybox", "sleep", "100000"];
        hosts.a.dm(&run).ok();
    }
    let before = hosts.own_ns();
    for name in ["ghost", "local", "own"] {
        hosts.work(name, Hosts::B[0]);
    }
    hosts.assert_of_the_outside(before, 3);
    // A host that sends numbers which it must not.
    let all = accounts(&hosts.b);
    for number in
        [figure(&all, "local", "Number"), figure(&all, "@db", "Number"), 0, u32::MAX.into()]
    {
        rules(&hosts.a, &[&format!("tcp option @254,48,32 set {number} counter")]);
        hosts.work("smith", Hosts::B[0]);
        assert!(counted(&hosts.a, 0) > 0, "no option was changed");
        sh(&hosts.a, "nft delete table inet seen");
    }
    hosts.assert_of_the_outside(before, 7);
    // Another one that exists is the other host's word.
    rules(&hosts.a, &[&format!("tcp option @254,48,32 set {JONES}")]);
    hosts.work("smith", Hosts::B[0]);
    sh(&hosts.a, "nft delete table inet seen");
    assert_taken(&accounts(&hosts.b), "jones", 40);
    // An account that is made later is known at once, and a removed one is not.
    hosts.b.dm(&["account", "create", "--number", "1073741999", "ghost"]).ok();
    hosts.work("ghost", Hosts::B[0]);
    assert_taken(&accounts(&hosts.b), "ghost", 40);
    hosts.b.dm(&["account", "rm", "--merge", "ghost"]).ok();
    let before = sum(&accounts(&hosts.b), "CpuTakenNs");
    hosts.work("ghost", Hosts::B[0]);
    let after = sum(&accounts(&hosts.b), "CpuTakenNs");
    assert!(after < before + 10_000_000 + stolen_ns(), "{before} and {after}");
}

/// Where a router removes the option, work is that of the service. With SYN cookies, the option counts.
#[test]
fn option_that_is_removed_on_the_way_charges_no_account() {
    let hosts = Hosts::join();
    hosts.agree();
    rules(&hosts.a, &["reset tcp option 254", "tcp option 254 exists counter"]);
    let before = hosts.own_ns();
    hosts.work("smith", Hosts::B[0]);
    assert_eq!(counted(&hosts.a, 0), 0, "it is removed");
    hosts.assert_of_the_outside(before, 1);
    sh(&hosts.a, "nft delete table inet seen");
    set_cookies(&hosts.b, "2");
    assert_eq!(tcp_count(&hosts.b, "SyncookiesRecv"), 0);
    hosts.work("smith", Hosts::B[0]);
    hosts.work("jones", Hosts::B[0]);
    let received = tcp_count(&hosts.b, "SyncookiesRecv");
    assert_eq!(received, 2, "both connections were made by cookies");
    let all = accounts(&hosts.b);
    assert_taken(&all, "smith", 40);
    assert_taken(&all, "jones", 40);
}

/// SYNs of hosts that never answer fill the queue of the service, so that the kernel keeps nothing of further ones. The
/// connections of clients are then made by cookies, and their account counts all the same.
#[test]
fn flood_of_syns_changes_no_charge_of_an_agreed_host() {
    const SENDERS: u8 = 250;
    const EACH: u16 = 10;
    let hosts = Hosts::join();
    hosts.agree();
    // Answers to the flood end at the other host.
    sh(&hosts.a, "ip route add blackhole 203.0.113.0/24");
    sh(&hosts.b, "ip route add 203.0.113.0/24 via 198.51.100.1");
    let hardware = sh(&hosts.b, "ip -o link show wire0 | grep -o 'ether [0-9a-f:]*'");
    let hardware = hardware.trim_start_matches("ether ").trim().replace(':', "");
    assert_eq!(hardware.len(), 12, "{hardware}");
    let to: IpAddr = Hosts::B[0].parse().expect("an address");
    let mut frames = String::new();
    for sender in 1..=SENDERS {
        let from = IpAddr::from([203, 0, 113, sender]);
        for port in 1024..1024 + EACH {
            let tcp = syn((from, port), to, &[2, 4, 5, 0xb4]);
            let mut frame = part(&[2, 0, 0, 0, 0, 7], from, to, &tcp, 0, false);
            frame.replace_range(..hardware.len(), &hardware);
            frames += &(frame + "\n");
        }
    }
    let flood = || {
        let mut probe = hosts.a.command(image::probe());
        probe.args(["frames", "wire0", "1"]);
        run(probe, frames.as_bytes(), Duration::from_secs(60)).ok();
    };
    let full = |setting: &str, name: &str| {
        set_cookies(&hosts.b, setting);
        let before = tcp_count(&hosts.b, name);
        let is_full = || {
            flood();
            tcp_count(&hosts.b, name) > before
        };
        assert!(wait_until(soon(), is_full), "the queue has room for {SENDERS} times {EACH}");
    };
    // Without cookies the kernel drops SYNs of clients as well, so the flood is one.
    full("0", "TCPReqQFullDrop");
    full("1", "TCPReqQFullDoCookies");
    let mut times = 0;
    let are_by_cookies = || {
        flood();
        let before = tcp_count(&hosts.b, "SyncookiesRecv");
        hosts.work("smith", Hosts::B[0]);
        hosts.work("jones", Hosts::B[0]);
        times += 1;
        tcp_count(&hosts.b, "SyncookiesRecv") >= before + 2
    };
    assert!(wait_until(soon(), are_by_cookies), "{times} times the queue had room");
    let all = accounts(&hosts.b);
    assert_taken(&all, "smith", 40 * times);
    assert_taken(&all, "jones", 40 * times);
    assert_eq!(figure(&all, "@db", "CpuGivenNs"), sum(&all, "CpuTakenNs"), "{all:?}");
    // Work for a host that is not on the list is charged to no client under cookies either.
    hosts.b.dm(&[&["account", "host", "rm"], &Hosts::A[..]].concat()).ok();
    let given = figure(&accounts(&hosts.b), "@db", "CpuGivenNs");
    flood();
    hosts.work("smith", Hosts::B[0]);
    let more = figure(&accounts(&hosts.b), "@db", "CpuGivenNs") - given;
    // The label of the last client lasts until the first request is read.
    assert!(more < 10_000_000 + stolen_ns(), "{more} ns of 40 ms are charged to a client");
    sh(&hosts.a, "ip route del blackhole 203.0.113.0/24");
}

/// What a host's services do with SYNs: 0 keeps them or drops them, 1 uses cookies where there is no room, 2 always.
#[track_caller]
fn set_cookies(host: &Host, setting: &str) {
    let cookies = "/proc/sys/net/ipv4/tcp_syncookies";
    sh(host, &format!("{} sh -c 'echo {setting} > {cookies}'", inside_domain(host)));
}

/// A counter of TCP in the stack of a host's services.
#[track_caller]
fn tcp_count(host: &Host, name: &str) -> u64 {
    let text = sh(host, &format!("{} cat /proc/net/netstat", inside_domain(host)));
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let at = names.split(' ').position(|found| found == name).expect("a name");
    values.split(' ').nth(at).and_then(|n| n.parse().ok()).expect("a number")
}

fn inside_domain(host: &Host) -> String {
    format!("nsenter --net={}", host.root().join("run/domains/default/net").display())
}

/// They wait at one service, and come from two addresses of the other host.
#[test]
fn connections_of_accounts_of_another_host_are_in_turn() {
    for [first, second] in [[0, 0], [0, 1]] {
        let hosts = Hosts::serving(&["queue", "block", "::", "80", "3000"]);
        hosts.agree();
        let _daemon = Daemon::start(&hosts.b);
        await_order(&hosts.b, "db");
        let begin = |client: &str, address: usize, count: usize, sign: &str| {
            let probe = ["burst", Hosts::B[address], "8080", &count.to_string(), sign];
            Burst::begin_as(&hosts.a, client, &probe)
        };
        let bursts = [begin("jones", first, FIRST, "j"), begin("smith", second, SECOND, "s")];
        go(&hosts.b);
        assert_eq!(bursts.map(Burst::answered), [FIRST, SECOND], "all are answered");
        let all = || served(&hosts.b).len() == FIRST + SECOND;
        assert!(wait_until(soon(), all), "{:?}", served(&hosts.b));
        let lines = served(&hosts.b);
        let places = places_of(lines.iter().map(String::as_str), |line| line.ends_with('s'));
        assert!(mean(&places) <= MEAN_ORDERED, "{places:?}");
    }
}

/// Those that are there count in the kernel: a later daemon finds them.
#[test]
fn limit_of_an_account_holds_for_its_connections_from_another_host() {
    let hosts = Hosts::join();
    hosts.agree();
    let set = |options: &[&str]| {
        hosts.b.dm(&[&["account", "set"][..], options, &["smith"]].concat()).ok();
    };
    let asks = |client| hosts.a.dm(&ask(client, Hosts::B[0], "3", "100"));
    set(&["--connections", "4"]);
    let mut daemon = Daemon::start(&hosts.b);
    await_order(&hosts.b, "db");
    let keep = |address| Burst::begin_as(&hosts.a, "smith", &["linger", address, "8080", "3"]);
    let bursts = Hosts::B.map(keep);
    await_connections(&hosts.b, "smith", 4);
    // Others do not wait.
    asks("jones").ok();
    assert_eq!(connections(&hosts.b, "smith"), 4);
    set(&["--connections", "100"]);
    await_connections(&hosts.b, "smith", 6);
    set(&["--connections", "6", "--on-limit", "refuse"]);
    let refused = || asks("smith").stderr.contains("refused");
    assert!(wait_until(soon(), refused), "{}", asks("smith"));
    daemon.kill();
    let daemon = Daemon::start(&hosts.b);
    await_order(&hosts.b, "db");
    assert!(wait_until(soon(), refused), "{}", asks("smith"));
    asks("jones").ok();
    drop_all(&hosts.a, "smith");
    drop(bursts);
    await_connections(&hosts.b, "smith", 0);
    asks("smith").ok();
    // What a host says that is not on the list does not count.
    set(&["--connections", "0"]);
    assert!(wait_until(soon(), refused), "{}", asks("smith"));
    hosts.b.dm(&[&["account", "host", "rm"], &Hosts::A[..]].concat()).ok();
    assert!(wait_until(soon(), || asks("smith").status == 0), "{}", asks("smith"));
    hosts.agree();
    assert!(wait_until(soon(), refused), "{}", asks("smith"));
    // Nor does an account that is gone here.
    hosts.b.dm(&["account", "rm", "--merge", "smith"]).ok();
    assert!(wait_until(soon(), || asks("smith").status == 0), "{}", asks("smith"));
    hosts.b.dm(&["account", "create", "--number", SMITH, "smith"]).ok();
    set(&["--connections", "0", "--on-limit", "refuse"]);
    assert!(wait_until(soon(), refused), "{}", asks("smith"));
    drop(daemon);
}

/// The first packet of a connection to the service of the other host, with these options.
fn syn((from, port): (IpAddr, u16), to: IpAddr, options: &[u8]) -> Vec<u8> {
    let head = |sum: [u8; 2]| {
        let ports = [port.to_be_bytes(), 8080u16.to_be_bytes()].concat();
        let words = (20 + options.len()) as u8 / 4;
        let rest = [words << 4, 2, 0xff, 0xff, sum[0], sum[1], 0, 0];
        [&ports[..], &[0, 0, 0, 9, 0, 0, 0, 0], &rest, options].concat()
    };
    let bytes = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let length = (20 + options.len()) as u16;
    let pseudo = [&bytes(from)[..], &bytes(to), &[0, 6], &length.to_be_bytes()].concat();
    head(checksum(&[&pseudo, &head([0; 2])]))
}

/// A part of a TCP packet, as a frame: from this byte on, with or without more behind it; or all of it.
fn part(hardware: &[u8; 6], from: IpAddr, to: IpAddr, tcp: &[u8], at: usize, more: bool) -> String {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = (20 + tcp.len() as u16).to_be_bytes();
            let [place_high, place_low] = ((at / 8) as u16 | u16::from(more) << 13).to_be_bytes();
            let ip = |sum: [u8; 2]| {
                let mut ip =
                    vec![0x45, 0, high, low, 0, 7, place_high, place_low, 64, 6, sum[0], sum[1]];
                ip.extend(from.octets().into_iter().chain(to.octets()));
                ip
            };
            let ip = ip(checksum(&[&ip([0; 2])]));
            frame(hardware, 0x0800, &[&ip[..], tcp].concat())
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let is_part = at > 0 || more;
            let [high, low] = (tcp.len() as u16 + if is_part { 8 } else { 0 }).to_be_bytes();
            let next = if is_part { 44 } else { 6 };
            let [place_high, place_low] = (at as u16 | u16::from(more)).to_be_bytes();
            let place = [6, 0, place_high, place_low, 0, 0, 0, 7];
            let head = [0x60, 0, 0, 0, high, low, next, 64];
            let place = if is_part { &place[..] } else { &[] };
            let ip = [&head[..], &from.octets(), &to.octets(), place, tcp].concat();
            frame(hardware, 0x86dd, &ip)
        }
        _ => panic!("two families"),
    }
}

/// A container with CAP_NET_RAW in a stack of its own writes the option by itself: whole, behind pads, and in parts
/// that are put together on the way.
#[test]
fn container_sends_no_account_by_itself() {
    let hosts = Hosts::join();
    hosts.agree();
    let run = ["run", "-d", "--name", "raw", "--net", "private", "--cap-add", "NET_RAW", "busybox"];
    hosts.a.dm(&[&run[..], &["sleep", "100000"]].concat()).ok();
    rules(&hosts.a, &["tcp option 254 exists counter", "tcp dport 8080 tcp flags syn counter"]);
    let hardware = hosts.a.dm(&["exec", "raw", "cat", "/sys/class/net/eth0/address"]).ok();
    let hardware: Vec<u8> =
        hardware.split(':').map(|byte| u8::from_str_radix(byte, 16).expect("digits")).collect();
    let hardware: [u8; 6] = hardware.try_into().expect("six bytes");
    let number: u32 = SMITH.parse().expect("a number");
    let option = [&[254, 10], &b"dmac"[..], &number.to_be_bytes()].concat();
    let own = hosts.a.inspect("raw")["addresses"].clone();
    let send = |frames: &[String]| {
        let words = ["exec", "-i", "raw", "probe", "frames", "eth0", "1"];
        hosts.a.dm_with_input((frames.join("\n") + "\n").as_bytes(), &words).ok();
    };
    let mut all_forged = Vec::new();
    for (family, to) in Hosts::B.into_iter().enumerate() {
        let own: IpAddr = own[family].as_str().expect("one").parse().expect("an address");
        let to: IpAddr = to.parse().expect("an address");
        let whole =
            |options: &[u8]| part(&hardware, own, to, &syn((own, 40000), to, options), 0, false);
        let padded = [&[1; 30], &option[..]].concat();
        let among = [&[2, 4, 5, 0xb4, 1, 1][..], &option].concat();
        let cut = [&option[..], &[1, 1]].concat();
        let mut forged = vec![whole(&padded), whole(&among), whole(&cut)];
        let tcp = syn((own, 40000), to, &padded);
        for at in [8, 16, 24, 40, 56] {
            forged.push(part(&hardware, own, to, &tcp[..at], 0, true));
            forged.push(part(&hardware, own, to, &tcp[at..], at, false));
        }
        send(&forged);
        all_forged.push(forged);
        // All frames before have been processed when the honest one was.
        let before = counted(&hosts.a, 1);
        let is_seen = || {
            send(&[whole(&[2, 4, 5, 0xb4])]);
            counted(&hosts.a, 1) > before
        };
        assert!(wait_until(soon(), is_seen), "nothing leaves the container");
    }
    assert_eq!(counted(&hosts.a, 0), 0, "{}", sh(&hosts.a, "nft list table inet seen"));
    // The counter sees the host's own option.
    hosts.work("smith", Hosts::B[0]);
    let own = counted(&hosts.a, 0);
    assert!(own > 0);
    // Without the program at the container's pair, the same packets would leave.
    let net = hosts.a.root().join("run/domains/default/net");
    let inside = format!("nsenter --net={}", net.display());
    let pairs = sh(&hosts.a, &format!("{inside} ip -o link | grep -o 'dp[0-9]*@' | tr -d @"));
    for pair in pairs.lines() {
        sh(&hosts.a, &format!("{inside} tc filter del dev {pair} ingress"));
    }
    let leaves = || {
        all_forged.iter().for_each(|forged| send(forged));
        counted(&hosts.a, 0) > own
    };
    assert!(wait_until(soon(), leaves), "{}", sh(&hosts.a, "nft list table inet seen"));
    sh(&hosts.a, "nft delete table inet seen");
}

#[test]
fn hosts_are_checked_shown_and_removed() {
    let host = Host::new();
    let dm = |words: &[&str]| host.dm(&[&["account", "host"], words].concat());
    for bad in ["192.0.2.7/24", "0.0.0.0/0", "::/0", "host", "192.0.2.0/33"] {
        let out = dm(&["add", bad]);
        assert!(out.status != 0 && out.stderr.contains("192.0.2.0/24"), "{bad}: {out}");
    }
    dm(&["add", "2001:db8::/64", "192.0.2.0/24", "192.0.2.7", "192.0.2.7/32"]).ok();
    let all = "192.0.2.0/24\n192.0.2.7\n2001:db8::/64";
    assert_eq!(dm(&["ls"]).ok().trim(), all);
    let out = dm(&["rm", "192.0.2.7", "192.0.2.8"]);
    assert!(out.status != 0 && out.stderr.contains("192.0.2.8 is not on the list"), "{out}");
    assert_eq!(dm(&["ls"]).ok().trim(), all, "with an error nothing changes");
    dm(&["rm", "192.0.2.0/24", "2001:db8::/64"]).ok();
    assert_eq!(dm(&["ls"]).ok(), "192.0.2.7");
}

/// Whichever step of a change is the last one, the kernel follows the list from the next command on.
#[test]
fn hosts_in_the_kernel_follow_the_list_after_a_kill_at_any_step() {
    let host = Host::new();
    host.dm(&["gate", "load", "receive"]).ok();
    // The bpffs is in the mount namespace of the host.
    let gates = host.root().join("run/gates");
    let gates = PathBuf::from(format!("/proc/{}/root{}", host.pid(), gates.display()));
    let known = || {
        let map = call::pinned(&gates.join("dm_gate_hosts")).expect("a bpffs").expect("a map");
        let map = Map::new(map).expect("a map");
        let mut keys = Vec::new();
        while let Some(key) = map.next_key(keys.last().map(Vec::as_slice)).expect("a map") {
            keys.push(key);
        }
        keys.len()
    };
    let events = host.root().join("lib/events");
    let told = || {
        let text = fs::read_to_string(&events).unwrap_or_default();
        text.matches("accounts_shared").count()
    };
    for change in ["add", "rm"] {
        let mut number = 0;
        loop {
            let before = told();
            let mut led =
                Led::start(&host.dormouse(&["account", "host", change, "192.0.2.7"]), &dormouse());
            let call = (0..=number).try_fold("", |_, _| led.next_step());
            if call.is_some() {
                led.kill();
            }
            host.dm(&["ps"]).ok();
            let what = format!("{change} killed at step {number}, {call:?}");
            let listed = host.dm(&["account", "host", "ls"]).ok().lines().count();
            assert_eq!(known(), listed, "{what}");
            // The daemon learns of it by an event.
            let is_changed = (listed > 0) == (change == "add");
            assert!(!is_changed || told() > before, "{what}");
            for program in ["dm_gate_wire", "dm_gate_syn"] {
                assert_eq!(gates.join(program).exists(), listed > 0, "{program}, {what}");
            }
            let Some(_) = call else { break };
            let back = if change == "add" { "rm" } else { "add" };
            host.dm(&["account", "host", back, "192.0.2.7"]);
            number += 1;
        }
        assert!(number > 3, "{change} has {number} steps");
        assert_eq!(known(), usize::from(change == "add"));
    }
}
