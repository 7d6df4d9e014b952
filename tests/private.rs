//! `--net private`: a container has a network stack and a device of its own, in a trust domain.
//!
//! Everything that address mode promises about addresses, names, published ports and domains holds here as well, and
//! containers of both modes meet in one domain. The device leads nowhere but to the domain's stack, which takes packets
//! from the container's own addresses only.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};

use dormouse_testkit::{Host, Output, image, soon, wait_until};

const SERVE: &[&str] = &["httpd", "-f", "-p", "80", "-h", "/www"];
const PAGE: &str = "hello from a container";

#[track_caller]
fn serve(host: &Host, name: &str, options: &[&str]) {
    let run = ["run", "-d", "--name", name, "--net", "private"];
    host.dm(&[&run[..], options, &["busybox"], SERVE].concat()).ok();
}

#[track_caller]
fn idle(host: &Host, name: &str, options: &[&str]) {
    let run = ["run", "-d", "--name", name];
    host.dm(&[&run[..], options, &["busybox", "sleep", "1000"]].concat()).ok();
}

fn inside(host: &Host, container: &str, script: &str) -> Output {
    host.dm(&["exec", container, "sh", "-c", script])
}

/// A command that fetches a page, and that a busy machine does not end early.
fn get(url: &str) -> String {
    format!("timeout {} busybox wget -q -O - {url}", soon().as_secs())
}

/// Seconds of an attempt that is repeated until it succeeds, or that is to fail: then another one with the same limit
/// has succeeded.
fn attempt_s() -> u64 {
    soon().as_secs() / 20
}

/// One such attempt.
fn try_get(url: &str) -> String {
    format!("timeout {} busybox wget -q -O - {url}", attempt_s())
}

fn fetch_inside(host: &Host, container: &str, url: &str) -> Output {
    inside(host, container, &get(url))
}

fn address6_of(host: &Host, name: &str) -> String {
    host.inspect(name)["addresses"][1].as_str().expect("an IPv6 address").to_owned()
}

/// The devices of the stack of a domain, as `ip -o link` prints them.
fn devices(host: &Host, domain: &str) -> String {
    let net = host.root().join("run/domains").join(domain).join("net");
    host.sh(&format!("nsenter --net={} busybox ip -o link", net.display())).ok()
}

#[test]
fn vm_private_container_has_a_stack_and_a_device_of_its_own() {
    let host = Host::with_busybox();
    let own = "ip -o link | wc -l; ip -o addr show eth0; ip route; ip -6 route; ls /sys/class/net; \
               readlink /proc/self/ns/net";
    serve(&host, "a", &["--ip", "10.136.7.7"]);
    idle(&host, "b", &["--net", "private"]);
    assert_eq!(host.address_of("a"), "10.136.7.7");
    let shown = inside(&host, "a", own).ok();
    assert!(shown.starts_with("2\n") && shown.contains("inet 10.136.7.7/32"), "{shown}");
    assert!(
        shown.contains("default via 10.136.") && shown.contains("default via fe80::"),
        "{shown}"
    );
    assert!(shown.contains("eth0\nlo\nnet:["), "{shown}");
    let of = |name: &str| inside(&host, name, "readlink /proc/self/ns/net").ok();
    assert_ne!(of("a"), of("b"));
    // Low ports, pings, and the file of addresses work for every user.
    assert_eq!(
        host.dm(&["exec", "-u", "nobody", "b", "probe", "bind", "0.0.0.0", "80"]).ok(),
        "bound"
    );
    let facts = host.inspect("a");
    assert_eq!(
        (&facts["network"], &facts["domain"]),
        (&"private".into(), &"default".into()),
        "{facts}"
    );
    let mode = host.dm(&["inspect", "--format", "{{.HostConfig.NetworkMode}}", "a"]).ok();
    assert_eq!(mode, "private");
    let list = host.dm(&["ps", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    assert!(list.as_array().expect("a list").iter().all(|c| c["network"] == "private"), "{list}");
}

#[test]
fn vm_private_container_keeps_its_addresses_over_restarts() {
    let host = Host::with_busybox();
    idle(&host, "a", &["--net", "private"]);
    let own = "cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu; ip -o addr show eth0 | grep -v fe80";
    let before = inside(&host, "a", own).ok();
    for round in 0..5 {
        match round % 2 {
            0 => host.dm(&["restart", "--time", "0", "a"]).ok(),
            _ => {
                host.dm(&["kill", "a"]).ok();
                host.wait_for_state("a", "stopped");
                host.dm(&["start", "a"]).ok()
            }
        };
        assert_eq!(inside(&host, "a", own).ok(), before);
    }
}

#[test]
fn vm_private_containers_and_others_of_a_domain_reach_each_other_by_name() {
    let host = Host::with_busybox();
    serve(&host, "web", &[]);
    idle(&host, "near", &["--net", "private"]);
    idle(&host, "shared", &[]);
    host.dm(&[&["run", "-d", "--name", "old", "busybox"], SERVE].concat()).ok();
    for (client, server) in [("near", "web"), ("shared", "web"), ("near", "old"), ("web", "old")] {
        host.wait_inside(client, &try_get(&format!("http://{server}/")));
        assert_eq!(fetch_inside(&host, client, &format!("http://{server}/")).ok(), PAGE);
        let six = address6_of(&host, server);
        assert_eq!(
            fetch_inside(&host, client, &format!("http://[{six}]/")).ok(),
            PAGE,
            "{client} {server}"
        );
    }
    // Each sees the other's own address.
    for (server, net) in [("seen", "private"), ("seen-shared", "address")] {
        let serve = [
            "run", "-d", "--name", server, "--net", net, "busybox", "probe", "who", "0.0.0.0",
            "9000",
        ];
        host.dm(&serve).ok();
        for client in ["near", "shared"] {
            host.wait_inside(client, &format!("probe ask {server} 9000"));
            let shown = host.dm(&["exec", client, "probe", "ask", server, "9000"]).ok();
            assert_eq!(shown, host.address_of(client), "{client} {server}");
        }
    }
    // A name is removed with its container.
    host.dm(&["rm", "--force", "web"]).ok();
    assert_ne!(inside(&host, "near", &try_get("http://web/")).status, 0);
}

#[test]
fn vm_private_ports_are_published_and_outgoing_traffic_has_the_address_of_the_host() {
    let host = Host::with_busybox();
    serve(
        &host,
        "web",
        &["-p", "8080:80", "-p", &format!("{}:8081:80", Host::ADDRESS), "-p", "127.0.0.1:8082:80"],
    );
    assert_eq!(host.fetch(&format!("http://{}:8080/", Host::ADDRESS)), PAGE);
    assert_eq!(host.fetch(&format!("http://[{}]:8080/", Host::ADDRESS6)), PAGE);
    assert_eq!(host.fetch(&format!("http://{}:8081/", Host::ADDRESS)), PAGE);
    for port in [8080, 8081, 8082] {
        let to = if port == 8082 { "127.0.0.1" } else { Host::ADDRESS };
        let page = host.sh(&get(&format!("http://{to}:{port}/"))).ok();
        assert_eq!(page, PAGE, "{port}");
    }
    let beside = try_get(&format!("http://{}:8082/", Host::ADDRESS));
    assert_ne!(host.neighbour_sh(&beside).status, 0);
    // UDP.
    host.dm(&[
        "run",
        "-d",
        "--name",
        "echo",
        "--net",
        "private",
        "-p",
        "9000:9000/udp",
        "busybox",
        "probe",
        "udp-echo",
        "0.0.0.0",
        "9000",
    ])
    .ok();
    let ask = format!(
        "{} udp-ask {} 9000 hello",
        image::busybox().join("bin/probe").display(),
        Host::ADDRESS
    );
    assert!(wait_until(soon(), || host
        .neighbour_sh(&format!("timeout {} {ask}", attempt_s()))
        .status
        == 0));
    // A container sees another machine's pages, which sees the address of the host.
    let site = host.dir().join("site");
    std::fs::create_dir(&site).expect("a directory of the test");
    std::fs::write(site.join("index.html"), "outside\n").expect("a page");
    let log = host.dir().join("log");
    let mut outside = host
        .neighbour_command("busybox")
        .args(["httpd", "-f", "-v", "-p", "80", "-h"])
        .arg(&site)
        .stderr(std::fs::File::create(&log).expect("a file"))
        .spawn()
        .expect("busybox starts");
    let url = format!("http://{}/", Host::NEIGHBOUR);
    let page = wait_until(soon(), || fetch_inside(&host, "web", &url).status == 0);
    outside.kill().and_then(|()| outside.wait()).expect("end the process");
    let log = std::fs::read_to_string(log).expect("a file");
    assert!(page && log.contains(Host::ADDRESS), "{log}");
    host.dm(&["stop", "--time", "0", "web"]).ok();
    let gone = try_get(&format!("http://{}:8080/", Host::ADDRESS));
    assert_ne!(host.neighbour_sh(&gone).status, 0);
}

#[test]
fn vm_private_containers_of_other_domains_are_not_reached() {
    let host = Host::with_busybox();
    serve(&host, "web", &["--domain", "red"]);
    idle(&host, "near", &["--net", "private", "--domain", "red"]);
    idle(&host, "far", &["--net", "private", "--domain", "blue"]);
    let url = format!("http://{}/", host.address_of("web"));
    host.wait_inside("near", &try_get(&url));
    assert_ne!(inside(&host, "far", &try_get(&url)).status, 0);
    assert_eq!(fetch_inside(&host, "near", "http://web/").ok(), PAGE);
    assert_ne!(inside(&host, "far", &try_get("http://web/")).status, 0);
    // Services of the host that trust its loopback, and the domain's own address.
    let service = ["httpd", "-f", "-p", "127.0.0.1:7070", "-h", "/"];
    let mut service = host.command("busybox").args(service).spawn().expect("busybox starts");
    let limit = attempt_s();
    let probe = |address: &str| {
        format!("timeout {limit} busybox nc {address} 7070 </dev/null && echo open")
    };
    assert!(wait_until(soon(), || host.sh(&probe("127.0.0.1")).stdout.contains("open")));
    let gateway = inside(&host, "near", "ip route | awk '/default/ { print $3 }'").ok();
    for address in ["127.0.0.1", Host::ADDRESS, &gateway] {
        assert!(!inside(&host, "near", &probe(address)).stdout.contains("open"), "{address}");
    }
    // Also not by a route of its own making.
    let forced = "ip route add 127.0.0.1/32 via GW dev eth0 onlink; ip route del local 127.0.0.0/8 dev lo table local; \
                  ip route del local 127.0.0.1 dev lo table local; ".replace("GW", &gateway);
    idle(&host, "admin", &["--net", "private", "--domain", "red", "--cap-add", "NET_ADMIN"]);
    assert!(!inside(&host, "admin", &(forced + &probe("127.0.0.1"))).stdout.contains("open"));
    service.kill().and_then(|()| service.wait()).expect("end the process");
}

#[test]
fn vm_private_device_is_gone_with_the_container() {
    let host = Host::with_busybox();
    idle(&host, "keep", &[]);
    let before = devices(&host, "default");
    for round in 0..4 {
        let name = format!("a{round}");
        idle(&host, &name, &["--net", "private", "--ip", "10.136.0.9"]);
        assert!(devices(&host, "default").contains("dp9"), "{}", devices(&host, "default"));
        match round % 2 {
            0 => host.dm(&["rm", "--force", &name]).ok(),
            _ => {
                host.dm(&["stop", "--time", "0", &name]).ok();
                host.dm(&["rm", &name]).ok()
            }
        };
        assert_eq!(devices(&host, "default"), before);
    }
    for _ in 0..4 {
        host.dm(&["run", "--rm", "--net", "private", "--ip", "10.136.0.9", "busybox", "true"]).ok();
    }
    let same = || devices(&host, "default") == before;
    assert!(wait_until(soon(), same), "{}", devices(&host, "default"));
}

#[test]
fn vm_private_options_are_refused_where_they_do_not_fit() {
    let host = Host::with_busybox();
    let refused = |options: &[&str]| {
        host.dm(&[&["run", "--rm"], options, &["busybox", "true"]].concat()).err(125)
    };
    let mode = refused(&["--net", "privat"]);
    assert!(mode.contains("privat") && mode.contains("address, private, host or none"), "{mode}");
    idle(&host, "a", &["--net", "private", "--ip", "10.136.7.7"]);
    assert!(refused(&["--net", "private", "--ip", "10.136.7.7"]).contains("10.136.7.7"));
    assert!(refused(&["--net", "private", "--ip", "10.2.3.4"]).contains("10.2.3.4"));
    assert!(refused(&["--net", "none", "-p", "80:80"]).contains("--net private"));
    let changed = host.dm(&["update", "--ip-add", "10.136.9.9", "a"]).fails();
    assert!(changed.contains("stop it first"), "{changed}");
    // The stack of a sleeping container has its addresses, too.
    serve(&host, "s", &[]);
    let own = host.address_of("s");
    host.put_to_sleep("s");
    for change in [["--ip-add", "10.136.9.9"], ["--ip-rm", own.as_str()]] {
        let changed = host.dm(&[&["update"], &change[..], &["s"]].concat()).fails();
        assert!(changed.contains("asleep") && changed.contains("stop it first"), "{changed}");
    }
    assert_eq!((host.state_of("s").as_str(), host.address_of("s")), ("asleep", own.clone()));
    host.dm(&["kill", "s"]).ok();
    host.wait_for_state("s", "stopped");
    host.dm(&["update", "--ip-add", "10.136.9.9", "s"]).ok();
    host.dm(&["start", "s"]).ok();
    let shown = inside(&host, "s", "ip -o addr show eth0").ok();
    assert!(shown.contains("10.136.9.9/32") && shown.contains(&own), "{shown}");
    // Its own settings can be given, and those of a shared stack cannot.
    let forward = [
        "run",
        "--rm",
        "--net",
        "private",
        "--sysctl",
        "net.ipv4.conf.eth0.forwarding=1",
        "busybox",
    ];
    let read = ["cat", "/proc/sys/net/ipv4/conf/eth0/forwarding"];
    assert_eq!(host.dm(&[&forward[..], &read].concat()).ok(), "1");
    let shared = refused(&["--sysctl", "net.ipv4.conf.all.forwarding=1"]);
    assert!(shared.contains("--net private"), "{shared}");
}

#[test]
fn vm_private_container_with_net_admin_rules_its_own_stack() {
    let host = Host::with_busybox();
    idle(&host, "a", &["--net", "private", "--cap-add", "NET_ADMIN", "--cap-add", "NET_RAW"]);
    idle(&host, "plain", &["--net", "private"]);
    let out = inside(
        &host,
        "a",
        "ip link add v0 type veth peer name v1 && ip addr add 10.9.9.9/24 dev v0 && ip -o link | wc -l",
    );
    assert_eq!(out.ok(), "4");
    assert_ne!(inside(&host, "plain", "ip addr add 10.9.9.9/24 dev eth0").status, 0);
    // Its gateway is found again after the device was down, in both families.
    serve(&host, "web", &[]);
    let down = "ip link set eth0 down; ip link set eth0 up; ip route add default via GW dev eth0 onlink; \
                ip -6 addr add SIX/128 dev eth0; ip -6 route add default via fe80::64:6dff:fe00:1 dev eth0";
    let gateway = inside(&host, "web", "ip route | awk '/default/ { print $3 }'").ok();
    let (six, web6) = (address6_of(&host, "a"), address6_of(&host, "web"));
    inside(&host, "a", &down.replace("GW", &gateway).replace("SIX", &six)).ok();
    for url in ["http://web/".to_owned(), format!("http://[{web6}]/")] {
        host.wait_inside("a", &try_get(&url));
    }
}

#[test]
fn vm_private_device_has_no_link_of_many_neighbours() {
    let host = Host::with_busybox();
    idle(&host, "plain", &["--net", "private"]);
    idle(&host, "admin", &["--net", "private", "--cap-add", "NET_ADMIN"]);
    // Connections to link-local addresses, each of which would be a neighbour.
    let send = "for n in 1 2 3 4 5; do nc -w 2 fe80::1:$n%eth0 9 </dev/null 2>/dev/null & done; sleep 1; \
                ip -6 neigh show nud all; wait";
    let strangers = |name: &str| {
        let shown = inside(&host, name, send).ok();
        shown.lines().filter(|line| line.contains("fe80::1:")).count()
    };
    assert!(!inside(&host, "plain", "ip -o addr show eth0").ok().contains("inet6 fe80"));
    assert_eq!(strangers("plain"), 0);
    // A device that has such an address shows that they are seen here.
    inside(&host, "admin", "ip -6 addr add fe80::9/64 dev eth0").ok();
    assert!(wait_until(soon(), || strangers("admin") > 0));
}

/// An Ethernet frame from the hardware address of a container, in hexadecimal digits.
pub(crate) fn frame(from: &[u8; 6], kind: u16, body: &[u8]) -> String {
    let to = [0x02, 0x64, 0x6d, 0, 0, 1];
    let whole = [&to[..], from, &kind.to_be_bytes(), body].concat();
    whole.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The ones' complement sum of some bytes, as in IP headers.
pub(crate) fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let whole = parts.concat();
    let words = whole.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// A datagram to port 7000.
fn udp(from: IpAddr, to: IpAddr, text: &str) -> (u16, Vec<u8>) {
    let length = (8 + text.len()) as u16;
    let head = |sum: [u8; 2]| {
        let ports = [5000u16.to_be_bytes(), 7000u16.to_be_bytes(), length.to_be_bytes(), sum];
        ports.concat()
    };
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let total = (20 + length).to_be_bytes();
            let ip = |sum: [u8; 2]| {
                let mut ip = vec![0x45, 0, total[0], total[1], 0, 1, 0, 0, 64, 17, sum[0], sum[1]];
                ip.extend(from.octets().into_iter().chain(to.octets()));
                ip
            };
            let ip = ip(checksum(&[&ip([0; 2])]));
            (0x0800, [ip, head([0; 2]), text.into()].concat())
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let [high, low] = length.to_be_bytes();
            let (from, to) = (from.octets(), to.octets());
            let pseudo = [&from[..], &to[..], &[0, 0, high, low, 0, 0, 0, 17]].concat();
            let sum = checksum(&[&pseudo, &head([0; 2]), text.as_bytes()]);
            let ip = [&[0x60, 0, 0, 0, high, low, 17, 64], &from[..], &to[..]].concat();
            (0x86dd, [ip, head(sum), text.into()].concat())
        }
        _ => panic!("two families"),
    }
}

/// An ARP request of a sender for an address.
fn arp(hardware: &[u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, 1];
    [&head[..], hardware, &sender.octets(), &[0; 6], &target.octets()].concat()
}

/// An ICMPv6 message with a hop limit of 255, as neighbour discovery has it.
fn icmp6(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> Vec<u8> {
    let [high, low] = (message.len() as u16).to_be_bytes();
    let (from, to) = (from.octets(), to.octets());
    let pseudo = [&from[..], &to[..], &[0, 0, high, low, 0, 0, 0, 58]].concat();
    let mut message = message.to_vec();
    let sum = checksum(&[&pseudo, &message]);
    message[2..4].copy_from_slice(&sum);
    [&[0x60, 0, 0, 0, high, low, 58, 255], &from[..], &to[..], &message].concat()
}

/// An attacker with all rights over its own stack, and its neighbours, one of which logs datagrams.
struct Attack<'h> {
    host: &'h Host,
    hardware: [u8; 6],
    own: [IpAddr; 2],
    /// The addresses of a neighbour that does nothing.
    other: [IpAddr; 2],
    /// The addresses of the one that logs.
    victim: [IpAddr; 2],
    gateway: Ipv4Addr,
}

impl<'h> Attack<'h> {
    fn begin(host: &'h Host, victim: &str) -> Self {
        let powers = ["--net", "private", "--cap-add", "NET_ADMIN", "--cap-add", "NET_RAW"];
        idle(host, "attacker", &powers);
        idle(host, "other", &["--net", "private"]);
        for (name, any) in [("victim", "0.0.0.0"), ("victim6", "::")] {
            let log = ["busybox", "probe", "udp-log", any, "7000"];
            host.dm(&[&["run", "-d", "--name", name, "--net", victim], &log[..]].concat()).ok();
        }
        let both = |name: &str| {
            let address =
                |n: usize| host.inspect(name)["addresses"][n].as_str().expect("one").parse();
            [0, 1].map(|n| address(n).expect("an address"))
        };
        let hardware = inside(host, "attacker", "cat /sys/class/net/eth0/address").ok();
        let hardware: Vec<u8> =
            hardware.split(':').map(|byte| u8::from_str_radix(byte, 16).expect("digits")).collect();
        let gateway = inside(host, "attacker", "ip route | awk '/default/ { print $3 }'").ok();
        Self {
            host,
            hardware: hardware.try_into().expect("six bytes"),
            own: both("attacker"),
            other: both("other"),
            victim: [both("victim")[0], both("victim6")[1]],
            gateway: gateway.parse().expect("an address"),
        }
    }

    #[track_caller]
    fn send(&self, frames: &[String], times: u32) {
        let words = ["exec", "-i", "attacker", "probe", "frames", "eth0", &times.to_string()];
        self.host.dm_with_input((frames.join("\n") + "\n").as_bytes(), &words).ok();
    }

    /// The lines that the victims have logged, when an honest datagram of each family has arrived.
    fn seen(&self) -> String {
        let logs =
            || ["victim", "victim6"].map(|name| self.host.dm(&["logs", name]).ok()).join("\n");
        let honest = || {
            for n in [0, 1] {
                let (kind, body) = udp(self.own[n], self.victim[n], &format!("honest {n}"));
                self.send(&[frame(&self.hardware, kind, &body)], 1);
            }
            let seen = logs();
            seen.contains("honest 0") && seen.contains("honest 1")
        };
        assert!(wait_until(soon(), honest), "{}", logs());
        logs()
    }

    /// Datagrams that are not the attacker's to send.
    fn forged(&self) -> Vec<String> {
        let text = |n: usize, what: &str| format!("forged {what} {n}");
        let mut all = Vec::new();
        for n in [0, 1] {
            let (kind, body) = udp(self.other[n], self.victim[n], &text(n, "neighbour"));
            all.push(frame(&self.hardware, kind, &body));
            let (kind, body) = udp(self.own[n], self.victim[n], &text(n, "hardware"));
            all.push(frame(&[0x02, 0x64, 0x6d, 0, 0, 9], kind, &body));
        }
        let (kind, body) = udp(self.gateway.into(), self.victim[0], &text(0, "gateway"));
        all.push(frame(&self.hardware, kind, &body));
        let (kind, body) = udp(self.own[0], self.victim[0], &text(0, "tagged"));
        all.push(frame(
            &self.hardware,
            0x8100,
            &[&[0, 0], &kind.to_be_bytes()[..], &body].concat(),
        ));
        for from in ["127.0.0.1", "0.0.0.0", "224.0.0.1", "192.0.2.2"] {
            let (kind, body) = udp(from.parse().expect("one"), self.victim[0], &text(0, from));
            all.push(frame(&self.hardware, kind, &body));
        }
        for from in ["::", "::1", "fe80::64:6dff:fe00:1", "2001:db8::2"] {
            let (kind, body) = udp(from.parse().expect("one"), self.victim[1], &text(1, from));
            all.push(frame(&self.hardware, kind, &body));
        }
        all
    }

    /// Runs nsenter's program in the stack of the domain.
    fn in_domain(&self, command: &str) -> String {
        let net = self.host.root().join("run/domains/default/net");
        self.host.sh(&format!("nsenter --net={} {command}", net.display())).ok()
    }
}

#[test]
fn vm_private_container_sends_from_no_other_address() {
    for victim in ["private", "address"] {
        let host = Host::with_busybox();
        let attack = Attack::begin(&host, victim);
        attack.send(&attack.forged(), 3);
        let seen = attack.seen();
        assert!(!seen.contains("forged"), "{seen}");
    }
    if let Some(weak) = Host::without("pair-guard") {
        let attack = Attack::begin(&weak, "private");
        attack.send(&attack.forged(), 3);
        let seen = attack.seen();
        for proof in
            ["forged neighbour 0", "forged neighbour 1", "forged hardware 0", "forged 192.0.2.2 0"]
        {
            assert!(seen.contains(proof), "{proof}: {seen}");
        }
    }
}

#[test]
fn vm_private_container_teaches_its_domain_no_neighbour_and_no_route() {
    // Requests from 300 senders, advertisements of a router, and neighbours that are others.
    let forged = |attack: &Attack<'_>| {
        let hardware = &attack.hardware;
        let mut all = Vec::new();
        let IpAddr::V4(other) = attack.other[0] else { panic!("IPv4 first") };
        let IpAddr::V6(other6) = attack.other[1] else { panic!("IPv6 second") };
        for sender in [other, attack.gateway] {
            all.push(frame(hardware, 0x0806, &arp(hardware, sender, attack.gateway)));
        }
        let stranger = |n: u16| Ipv4Addr::new(10, 250, (n >> 8) as u8, n as u8);
        all.extend(
            (0..300).map(|n| frame(hardware, 0x0806, &arp(hardware, stranger(n), attack.gateway))),
        );
        let router: Ipv6Addr = "fe80::64:6dff:fe00:1".parse().expect("an address");
        let own: Ipv6Addr = "fe80::1234".parse().expect("an address");
        let nodes: Ipv6Addr = "ff02::1".parse().expect("an address");
        // A router for half an hour, with a link-layer address.
        let mut advertisement = vec![134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1];
        advertisement.extend(hardware);
        all.push(frame(hardware, 0x86dd, &icmp6(own, nodes, &advertisement)));
        for n in 0..300u16 {
            // A solicitation for the domain's address on the pair, from one of many.
            let from = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 1, n);
            let solicitation =
                [&[135, 0, 0, 0, 0, 0, 0, 0], &router.octets()[..], &[1, 1], hardware].concat();
            all.push(frame(hardware, 0x86dd, &icmp6(from, router, &solicitation)));
        }
        // From its own address, which the domain would send back to the link.
        let IpAddr::V6(own6) = attack.own[1] else { panic!("IPv6 second") };
        for n in 0..300u16 {
            let to = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 2, n);
            let (kind, body) = udp(own6.into(), to.into(), "stranger");
            all.push(frame(hardware, kind, &body));
            let solicitation =
                [&[135, 0, 0, 0, 0, 0, 0, 0], &to.octets()[..], &[1, 1], hardware].concat();
            all.push(frame(hardware, 0x86dd, &icmp6(own6, to, &solicitation)));
        }
        let claim =
            [&[136, 0, 0, 0, 0x20, 0, 0, 0], &other6.octets()[..], &[2, 1], hardware].concat();
        all.push(frame(hardware, 0x86dd, &icmp6(other6, nodes, &claim)));
        all
    };
    const STRANGERS: [&str; 3] = ["10.250.", "fe80::1:", "fe80::2:"];
    let known = |attack: &Attack<'_>| {
        let all = ["ip neigh show nud all", "ip -6 neigh show nud all"]
            .map(|list| attack.in_domain(list))
            .join("\n");
        STRANGERS.map(|stranger| all.lines().filter(|line| line.contains(stranger)).count())
    };
    let host = Host::with_busybox();
    let attack = Attack::begin(&host, "private");
    let routes = || attack.in_domain("ip route; ip -6 route");
    let (before, permanent) = (routes(), attack.in_domain("ip neigh show nud permanent"));
    attack.send(&forged(&attack), 2);
    attack.seen(); // all frames before have been processed
    assert_eq!(known(&attack), [0; 3], "{}", attack.in_domain("ip neigh show nud all"));
    assert_eq!((routes(), attack.in_domain("ip neigh show nud permanent")), (before, permanent));
    if let Some(weak) = Host::without("pair-guard") {
        let attack = Attack::begin(&weak, "private");
        attack.send(&forged(&attack), 2);
        attack.seen();
        let known = known(&attack);
        assert!(known.iter().all(|count| *count > 50), "{known:?}");
    }
}

#[test]
fn vm_private_container_with_an_address_of_another_is_cut_off_alone() {
    let host = Host::with_busybox();
    let attack = Attack::begin(&host, "private");
    serve(&host, "web", &[]);
    let url = format!("http://{}/", host.address_of("web"));
    host.wait_inside("other", &try_get(&url));
    let (own, other) = (attack.own[0], attack.other[0]);
    let change = format!("ip addr add {other}/32 dev eth0; ip addr del {own}/32 dev eth0");
    inside(&host, "attacker", &change).ok();
    assert_ne!(inside(&host, "attacker", &try_get(&url)).status, 0);
    assert_eq!(fetch_inside(&host, "other", &url).ok(), PAGE);
    let back = format!(
        "ip addr add {own}/32 dev eth0; ip addr del {other}/32 dev eth0; \
         ip route replace default via {} dev eth0 onlink",
        attack.gateway
    );
    inside(&host, "attacker", &back).ok();
    host.wait_inside("attacker", &try_get(&url));
    // A flood of packets, to a neighbour and to strangers, hurts no other connection.
    let flood: Vec<String> = [attack.victim[0], "10.139.255.9".parse().expect("an address")]
        .into_iter()
        .map(|to| {
            let (kind, body) = udp(own, to, "flood");
            frame(&attack.hardware, kind, &body)
        })
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| attack.send(&flood, 50_000));
        for _ in 0..20 {
            assert_eq!(fetch_inside(&host, "other", &url).ok(), PAGE);
        }
    });
}

#[test]
fn vm_private_container_with_rights_over_its_stack_is_not_saved_and_goes_on() {
    let host = Host::with_busybox();
    for (name, capability) in [("admin", "NET_ADMIN"), ("raw", "NET_RAW")] {
        serve(&host, name, &["--cap-add", capability]);
        let url = format!("http://{}/", host.address_of(name));
        let get = get(&url);
        assert!(wait_until(soon(), || host.sh(&try_get(&url)).stdout.contains(PAGE)));
        for verb in ["sleep", "checkpoint", "clone"] {
            let refused = host.dm(&[verb, name]).fails();
            let is_named = refused.contains("--net private") && refused.contains(capability);
            assert!(is_named, "{verb}: {refused}");
            assert_eq!(host.sh(&get).ok(), PAGE);
        }
        let options = ["--net", "private", "--cap-add", capability, "--sleep-after", "1s"];
        let refused =
            host.dm(&[&["run", "-d"], &options[..], &["busybox", "sleep", "9"]].concat()).err(125);
        assert!(refused.contains("--sleep-after") && refused.contains(capability), "{refused}");
    }
}

/// A server that returns each client's bytes, and a client of it on the host.
#[track_caller]
fn echo(host: &Host, name: &str) -> TcpStream {
    let cat = ["busybox", "nc", "-ll", "-p", "7", "-e", "cat"];
    host.dm(&[&["run", "-d", "--name", name, "--net", "private"], &cat[..]].concat()).ok();
    caller(host, name)
}

#[track_caller]
fn caller(host: &Host, name: &str) -> TcpStream {
    let address = host.address_of(name);
    let mut made = None;
    let connected = wait_until(soon(), || {
        let to = (address.clone(), 7);
        made = host.in_network(move || TcpStream::connect(to)).join().expect("no panic").ok();
        made.is_some()
    });
    assert!(connected, "no server at {address}");
    let mut made = made.expect("it is connected");
    made.set_read_timeout(Some(4 * soon())).expect("a socket");
    ask(&mut made, "first");
    made
}

#[track_caller]
fn ask(caller: &mut TcpStream, text: &str) {
    caller.write_all(text.as_bytes()).expect("the connection is open");
    let mut answer = vec![0; text.len()];
    caller.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, text.as_bytes());
}

#[test]
fn vm_private_container_sleeps_until_a_client_connects() {
    let host = Host::with_busybox();
    serve(&host, "web", &["-p", "8080:80"]);
    idle(&host, "near", &["--net", "private"]);
    let published = format!("http://{}:8080/", Host::ADDRESS);
    assert_eq!(host.fetch(&published), PAGE);
    let own = "ip -o addr show eth0 | grep -v fe80; ip route; ls /sys/class/net; cat /sys/class/net/eth0/address";
    let before = inside(&host, "web", own).ok();
    for round in 0..6 {
        host.put_to_sleep("web");
        match round % 3 {
            0 => assert_eq!(host.fetch(&published), PAGE),
            1 => assert_eq!(fetch_inside(&host, "near", "http://web/").ok(), PAGE),
            _ => drop(host.dm(&["wake", "web"]).ok()),
        }
        host.wait_for_state("web", "running");
        assert_eq!(inside(&host, "web", own).ok(), before);
        assert_eq!(fetch_inside(&host, "web", "http://near:1/").status, 1, "it may send");
        assert_eq!(fetch_inside(&host, "web", "http://127.0.0.1/").ok(), PAGE);
    }
    // Stopped while asleep, and started anew.
    host.put_to_sleep("web");
    host.dm(&["kill", "web"]).ok();
    host.wait_for_state("web", "stopped");
    host.dm(&["start", "web"]).ok();
    assert_eq!(host.fetch(&published), PAGE);
    host.put_to_sleep("web");
    // The held sockets have kept its pair.
    let with = devices(&host, "default");
    host.dm(&["rm", "--force", "web"]).ok();
    let without = devices(&host, "default");
    let pairs = |list: &str| list.lines().filter(|line| line.contains(": dp")).count();
    assert_eq!((pairs(&with), pairs(&without)), (2, 1), "{with}\n{without}");
}

#[test]
fn vm_private_connection_stays_open_during_sleep() {
    let host = Host::with_busybox();
    let mut caller = echo(&host, "x");
    for round in 0..6 {
        host.put_to_sleep("x");
        ask(&mut caller, &format!("round {round}"));
    }
    host.put_to_sleep("x");
    drop(caller);
    host.wait_for_state("x", "running");
}

#[test]
fn private_container_asleep_survives_killed_keeper_and_vault() {
    let host = Host::with_busybox();
    let setting = ["--sysctl", "net.ipv4.tcp_keepalive_time=1234"];
    serve(&host, "web", &[&["-p", "8080:80"], &setting[..]].concat());
    let published = format!("http://{}:8080/", Host::ADDRESS);
    for both in [false, true] {
        assert_eq!(host.fetch(&published), PAGE);
        host.put_to_sleep("web");
        let names =
            if both { &["dormouse-keeper", "dormouse-vault"][..] } else { &["dormouse-keeper"] };
        let of = |name: &&str| {
            host.processes()
                .into_iter()
                .filter(|it| it.1.contains(*name))
                .map(|it| it.0)
                .collect::<Vec<_>>()
        };
        let pids: Vec<u32> = names.iter().flat_map(of).collect();
        assert_eq!(pids.len(), names.len(), "{:?}", host.processes());
        let all: Vec<String> = pids.iter().map(ToString::to_string).collect();
        host.sh(&format!("kill -9 {}", all.join(" "))).ok();
        assert!(wait_until(soon(), || !pids.iter().any(|pid| host.has_process(*pid))));
        // Any next command makes what is lost again.
        assert_eq!(host.state_of("web"), "asleep");
        assert_eq!(host.fetch(&published), PAGE);
        host.wait_for_state("web", "running");
        assert!(
            inside(&host, "web", "ip -o addr show eth0").ok().contains(&host.address_of("web"))
        );
        assert_eq!(inside(&host, "web", "cat /proc/sys/net/ipv4/tcp_keepalive_time").ok(), "1234");
    }
}

#[test]
fn vm_private_checkpoint_is_restored_with_its_connections() {
    let host = Host::with_busybox();
    idle(&host, "keep", &[]);
    let mut caller = echo(&host, "x");
    for round in 0..2 {
        host.dm(&["checkpoint", "x"]).ok();
        assert_eq!(host.state_of("x"), "stopped");
        // Nothing answers meanwhile, not even with a reset.
        caller.write_all(b"meanwhile").expect("the connection is open");
        caller.set_read_timeout(Some(soon() / 20)).expect("a socket");
        let silence = loop {
            match caller.read(&mut [0]).expect_err("no answer while checkpointed") {
                e if e.kind() == std::io::ErrorKind::Interrupted => {} // by a signal to the test program
                e => break e,
            }
        };
        assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock, "{silence}");
        host.dm(&["restore", "x"]).ok();
        caller.set_read_timeout(Some(4 * soon())).expect("a socket");
        let mut answer = [0; 9];
        caller.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"meanwhile");
        ask(&mut caller, &format!("round {round}"));
    }
    // A start without the checkpoint resets the connection.
    host.dm(&["checkpoint", "x"]).ok();
    host.dm(&["start", "x"]).ok();
    let reset = wait_until(soon(), || {
        let _ = caller.write_all(b"x"); // the error is read below
        caller.read(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
    });
    assert!(reset, "the connection is gone");
    let rules = "nft list tables";
    let net = host.root().join("run/domains/default/net");
    let left = host.sh(&format!("nsenter --net={} {rules}", net.display())).ok();
    assert!(!left.contains("dormouse_quiet"), "{left}");
}

#[test]
fn vm_private_clones_have_addresses_of_their_own() {
    let host = Host::with_busybox();
    serve(&host, "web", &[]);
    idle(&host, "near", &["--net", "private"]);
    host.wait_inside("near", &try_get("http://web/"));
    host.dm(&["clone", "--name", "twin", "web"]).ok();
    host.dm(&["clone", "--asleep", "--name", "sleeper", "web"]).ok();
    assert_eq!(host.state_of("sleeper"), "asleep");
    for name in ["web", "twin", "sleeper"] {
        host.wait_inside("near", &try_get(&format!("http://{name}/")));
    }
    host.wait_for_state("sleeper", "running");
    let all = ["web", "twin", "sleeper"].map(|name| host.address_of(name));
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2], "{all:?}");
}

#[test]
fn vm_private_container_is_drowsy_until_a_client_connects() {
    let host = Host::with_busybox();
    serve(&host, "web", &["-p", "8080:80"]);
    host.fetch(&format!("http://{}:8080/", Host::ADDRESS));
    host.dm(&["sleep", "--drowsy", "web"]).ok();
    assert_eq!(host.state_of("web"), "drowsy");
    assert_eq!(host.fetch(&format!("http://{}:8080/", Host::ADDRESS)), PAGE);
    host.wait_for_state("web", "running");
}
