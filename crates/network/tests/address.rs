//! Address networking, attacked: each hole that a program closes is shown to be closed with it and
//! open without it. Everything happens in a network namespace that plays the host, with a scratch
//! parent cgroup; packets never leave it.

mod agent;

use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use agent::Agent;
use dormouse_kernel::call::{CloneFlags, Namespace, bind_packet, unshare};
use dormouse_model::{ContainerId, Name};
use dormouse_network::{Domain, Network, Settings};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use tempfile::TempDir;

/// Not a test by itself: the other end of [`Agent`].
#[test]
fn agent_process() {
    agent::run();
}

/// A scratch host: a network namespace, directories, a parent cgroup, the network on them.
struct Host {
    network: Network,
    parent: PathBuf,
    dir: TempDir,
    next: u64,
}

/// A container with a process in it.
struct Container {
    id: ContainerId,
    cgroup: PathBuf,
    addresses: Vec<IpAddr>,
    agent: Agent,
}

impl Container {
    fn v4(&self) -> IpAddr {
        self.addresses[0]
    }

    fn v6(&self) -> String {
        format!("[{}]", self.addresses[1])
    }
}

fn unified() -> PathBuf {
    let v2 = Path::new("/sys/fs/cgroup/unified");
    if v2.exists() { v2.into() } else { "/sys/fs/cgroup".into() }
}

fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Host {
    /// Makes the calling thread the host; threads and processes it starts are on it, too.
    fn new(without: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        unshare(CloneFlags::NEWNET).unwrap();
        sh("ip link set lo up");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dormouse-test-{}-{number}", std::process::id());
        let dir = TempDir::new().unwrap();
        let settings = Settings {
            without: without.iter().map(|w| (*w).to_owned()).collect(),
            ..Settings::default()
        };
        let (lib, run) = (dir.path().join("lib"), dir.path().join("run"));
        let network = Network::open(&lib, &run, &name, settings).unwrap();
        Self { network, parent: unified().join(name), dir, next: 0 }
    }

    fn domain(&self, name: &str) -> Domain {
        self.network.domain(&name.parse::<Name>().unwrap(), String::new).unwrap()
    }

    fn container(&mut self, domain: &Domain) -> Container {
        self.container_at(domain, &[])
    }

    fn container_at(&mut self, domain: &Domain, requested: &[IpAddr]) -> Container {
        self.next += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next.to_be_bytes());
        bytes[8] = 1;
        let id = ContainerId::from_bytes(bytes);
        let addresses = self.network.allocate(&domain.name, &id, requested).unwrap();
        let cgroup = self.parent.join(id.as_str());
        fs::create_dir(&cgroup).unwrap();
        use std::os::unix::fs::MetadataExt;
        let cgroup_id = fs::metadata(&cgroup).unwrap().ino();
        self.network.enter(domain, &id, cgroup_id, &addresses).unwrap();
        let agent = self.agent(Some(&cgroup), &domain.name);
        Container { id, cgroup, addresses, agent }
    }

    fn agent(&self, cgroup: Option<&Path>, domain: &Name) -> Agent {
        let netns = self.dir.path().join("run/domains").join(domain.as_str()).join("net");
        Agent::start(cgroup, Some(&netns))
    }

    /// Ends the container's process and removes the container.
    fn end(&self, container: Container) {
        let Container { id, cgroup, agent, .. } = container;
        drop(agent);
        self.network.unpublish(&id).unwrap();
        self.network.leave(&id).unwrap();
        self.network.release(&id).unwrap();
        remove_cgroup(&cgroup);
    }
}

/// A process that was reaped may still be counted for a moment.
fn remove_cgroup(path: &Path) {
    for _ in 0..200 {
        if fs::remove_dir(path).is_ok() || !path.exists() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("{} cannot be removed", path.display());
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Ok(entries) = fs::read_dir(&self.parent) {
            for entry in entries.flatten().filter(|e| e.path().is_dir()) {
                for pid in fs::read_to_string(entry.path().join("cgroup.procs")).unwrap().lines() {
                    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
                remove_cgroup(&entry.path());
            }
        }
        // The containers' cgroups were removed, but not their entries: domains are removed by
        // force.
        let run = self.dir.path().join("run");
        if let Ok(domains) = fs::read_dir(run.join("domains")) {
            for domain in domains.flatten() {
                for mount in ["net", "sys"] {
                    let _ = dormouse_kernel::mount::detach(domain.path().join(mount));
                }
            }
        }
        for mount in ["none/sys", "none/net"] {
            let _ = dormouse_kernel::mount::detach(run.join(mount));
        }
        if self.parent.exists() {
            remove_cgroup(&self.parent);
        }
    }
}

/// A listener in a container: a socket bound to the address.
fn listener(agent: &mut Agent, family: u8, address: &str) -> usize {
    let socket = agent.make(&format!("socket {family} stream"));
    assert_eq!(agent.ask(&format!("bind {socket} {address}")), "ok", "{address}");
    assert_eq!(agent.ask(&format!("listen {socket}")), "ok");
    socket
}

/// Returns the result of a connect.
fn connect(agent: &mut Agent, family: u8, address: &str) -> String {
    let socket = agent.make(&format!("socket {family} stream"));
    agent.ask(&format!("connect {socket} {address}"))
}

#[test]
fn root_members_bind_any_and_meet_at_their_own_addresses() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let (mut a, mut b) = (host.container(&domain), host.container(&domain));
    let at_a = listener(&mut a.agent, 4, "0.0.0.0:80");
    listener(&mut b.agent, 4, "0.0.0.0:80");
    assert_eq!(a.agent.ask(&format!("sockname {at_a}")), "0.0.0.0:80");
    let socket = b.agent.make("socket 4 stream");
    assert_eq!(b.agent.ask(&format!("connect {socket} {}:80", a.v4())), "ok");
    let accepted = a.agent.ask(&format!("accept {at_a}"));
    assert!(accepted.contains(&format!(" {}:", b.v4())), "{accepted}");
    assert_eq!(b.agent.ask(&format!("peername {socket}")), format!("{}:80", a.v4()));
    assert!(b.agent.ask(&format!("sockname {socket}")).starts_with(&format!("{}:", b.v4())));
    host.end(a);
    host.end(b);
    drop(domain);
    assert_eq!(host.network.remove_unused().unwrap(), ["d".parse::<Name>().unwrap()]);
    assert_eq!(sh("ip -o link | grep -c dm || true").trim(), "0");
    assert_eq!(sh("nft list tables").trim(), "");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(host.dir.path().to_str().unwrap()));
}

#[test]
fn root_addresses_of_others_do_not_exist() {
    for (without, family, expected) in [
        (None, 4, "EADDRNOTAVAIL"),
        (None, 6, "EADDRNOTAVAIL"),
        (Some("dm_bind4"), 4, "ok"),
        (Some("dm_bind6"), 6, "ok"),
    ] {
        let mut host = Host::new(&Vec::from_iter(without));
        let domain = host.domain("d");
        let (mut a, b) = (host.container(&domain), host.container(&domain));
        let theirs = if family == 4 { b.v4().to_string() } else { b.v6() };
        let socket = a.agent.make(&format!("socket {family} stream"));
        assert_eq!(a.agent.ask(&format!("bind {socket} {theirs}:80")), expected, "{without:?}");
    }
}

#[test]
fn root_same_port_on_any_address_needs_the_bind_program() {
    for (without, family, address, expected) in [
        (None, 4, "0.0.0.0:80", "ok"),
        (None, 6, "[::]:80", "ok"),
        (None, 4, "127.0.0.1:80", "ok"),
        (None, 6, "[::1]:80", "ok"),
        (Some("dm_bind4"), 4, "0.0.0.0:80", "EADDRINUSE"),
        (Some("dm_bind6"), 6, "[::]:80", "EADDRINUSE"),
        (Some("dm_bind4"), 4, "127.0.0.1:80", "EADDRINUSE"),
        (Some("dm_bind6"), 6, "[::1]:80", "EADDRINUSE"),
    ] {
        let mut host = Host::new(&Vec::from_iter(without));
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        listener(&mut a.agent, family, address);
        let socket = b.agent.make(&format!("socket {family} stream"));
        let mut answer = b.agent.ask(&format!("bind {socket} {address}"));
        if answer == "ok" {
            answer = b.agent.ask(&format!("listen {socket}"));
        }
        assert_eq!(answer, expected, "{without:?} {address}");
    }
}

#[test]
fn root_loopback_is_private_to_the_container() {
    for family in [4, 6] {
        let loopback = if family == 4 { "127.0.0.1" } else { "[::1]" };
        let mut host = Host::new(&[]);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let at = listener(&mut a.agent, family, &format!("{loopback}:7000"));
        assert_eq!(a.agent.ask(&format!("sockname {at}")), format!("{loopback}:7000"));
        // Its own clients reach it and are shown the loopback address.
        let socket = a.agent.make(&format!("socket {family} stream"));
        assert_eq!(a.agent.ask(&format!("connect {socket} {loopback}:7000")), "ok");
        assert_eq!(a.agent.ask(&format!("peername {socket}")), format!("{loopback}:7000"));
        assert!(a.agent.ask(&format!("sockname {socket}")).starts_with(&format!("{loopback}:")));
        let accepted = a.agent.ask(&format!("accept {at}"));
        assert!(accepted.contains(&format!(" {loopback}:")), "{accepted}");
        let number = accepted.split(' ').next().unwrap();
        assert_eq!(a.agent.ask(&format!("sockname {number}")), format!("{loopback}:7000"));
        // No other client does: not by its own loopback, not by the address, not from the host.
        let theirs = if family == 4 { a.v4().to_string() } else { a.v6() };
        for address in [loopback, &theirs] {
            assert_eq!(connect(&mut b.agent, family, &format!("{address}:7000")), "ECONNREFUSED");
        }
        let mut outside = Agent::start(None, None);
        assert_eq!(connect(&mut outside, family, &format!("{theirs}:7000")), "ECONNREFUSED");
        // Nor by its real address.
        let real = private_loopback(&a, family);
        assert_ne!(connect(&mut b.agent, family, &format!("{real}:7000")), "ok");
    }
}

/// The address behind a container's 127.0.0.1 or ::1.
fn private_loopback(container: &Container, family: u8) -> String {
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (container.addresses[0], container.addresses[1]) else {
        panic!("{:?}", container.addresses)
    };
    let number = u32::from(v4) - u32::from(std::net::Ipv4Addr::new(10, 136, 0, 0));
    if family == 4 {
        std::net::Ipv4Addr::from(0x7f00_0000 | number << 6 | 1).to_string()
    } else {
        let mut octets = v6.octets();
        octets[6..8].copy_from_slice(&[0xff, 0xff]);
        format!("[{}]", std::net::Ipv6Addr::from(octets))
    }
}

#[test]
fn root_private_loopback_needs_connect_and_packet_programs() {
    for (family, without, expected) in [
        // The connect program redirects it to its own loopback, the packet programs refuse the
        // rest.
        (4, vec!["dm_connect4"], false),
        (4, vec!["dm_connect4", "dm_egress"], false),
        (4, vec!["dm_egress", "dm_ingress"], false),
        (4, vec!["dm_connect4", "dm_egress", "dm_ingress"], true),
        (6, vec!["dm_connect6"], false),
        (6, vec!["dm_egress", "dm_ingress"], false),
        (6, vec!["dm_connect6", "dm_egress", "dm_ingress"], true),
    ] {
        let mut host = Host::new(&without);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let loopback = if family == 4 { "127.0.0.1" } else { "[::1]" };
        listener(&mut a.agent, family, &format!("{loopback}:7000"));
        let real = private_loopback(&a, family);
        let answer = connect(&mut b.agent, family, &format!("{real}:7000"));
        assert_eq!(answer == "ok", expected, "{family} {without:?}: {answer}");
    }
}

#[test]
fn root_listening_without_bind_takes_no_connections_of_others() {
    let open = ["dm_ingress", "dm_egress"];
    for (without, family, expected) in
        [(&[][..], 4, false), (&open[..], 4, true), (&[], 6, false), (&open, 6, true)]
    {
        let mut host = Host::new(without);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let socket = a.agent.make(&format!("socket {family} stream"));
        assert_eq!(a.agent.ask(&format!("listen {socket}")), "ok");
        let name = a.agent.ask(&format!("sockname {socket}"));
        let port = name.rsplit(':').next().unwrap();
        let (own, theirs) =
            if family == 4 { (a.v4().to_string(), b.v4().to_string()) } else { (a.v6(), b.v6()) };
        assert_eq!(connect(&mut a.agent, family, &format!("{own}:{port}")), "ok");
        let answer = connect(&mut b.agent, family, &format!("{theirs}:{port}"));
        assert_eq!(answer == "ok", expected, "{without:?}: {answer}");
    }
}

#[test]
fn root_unbound_udp_receives_only_its_own_datagrams() {
    for (without, family, expected) in [
        (None, 4, false),
        (Some("dm_ingress"), 4, true),
        (None, 6, false),
        (Some("dm_ingress"), 6, true),
    ] {
        let mut host = Host::new(&Vec::from_iter(without));
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let own = |c: &Container| if family == 4 { c.v4().to_string() } else { c.v6() };
        let socket = a.agent.make(&format!("socket {family} dgram"));
        assert_eq!(a.agent.ask(&format!("send {socket} {}:9 x", own(&a))), "ok");
        let name = a.agent.ask(&format!("sockname {socket}"));
        let port = name.rsplit(':').next().unwrap();
        let from = b.agent.make(&format!("socket {family} dgram"));
        assert_eq!(b.agent.ask(&format!("send {from} {}:{port} stolen", own(&b))), "ok");
        let heard = a.agent.ask(&format!("receive {socket}"));
        assert_eq!(heard.ends_with("stolen"), expected, "{without:?}: {heard}");
        // A datagram sent to it arrives, from the sender's address.
        assert_eq!(b.agent.ask(&format!("send {from} {}:{port} hello", own(&a))), "ok");
        let heard = a.agent.ask(&format!("receive {socket}"));
        assert!(heard.starts_with(&format!("{}:", own(&b))) && heard.ends_with("hello"), "{heard}");
    }
}

#[test]
fn root_forged_source_addresses_are_dropped() {
    for (without, expected) in [
        (vec!["dm_bind4", "dm_sendmsg4"], false),
        (vec!["dm_bind4", "dm_sendmsg4", "dm_egress"], true),
    ] {
        let mut host = Host::new(&without);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let c = host.container(&domain);
        let at = b.agent.make("socket 4 dgram");
        assert_eq!(b.agent.ask(&format!("bind {at} {}:5000", b.v4())), "ok");
        let socket = a.agent.make("socket 4 dgram");
        assert_eq!(a.agent.ask(&format!("bind {socket} {}:6000", c.v4())), "ok");
        let sent = a.agent.ask(&format!("send {socket} {}:5000 forged", b.v4()));
        assert_eq!(sent, if expected { "ok" } else { "EPERM" }, "{without:?}");
        let heard = b.agent.ask(&format!("receive {at}"));
        assert_eq!(heard == format!("{}:6000 forged", c.v4()), expected, "{without:?}: {heard}");
    }
}

#[test]
fn root_source_addresses_of_packet_info_are_checked() {
    // The send program replaces the source by the own address, also for a connected socket that
    // sends with control data and no address; without the program the packet is dropped on egress.
    for (family, connected, without, heard_forged) in [
        (4, false, vec![], false),
        (4, true, vec![], false),
        (4, false, vec!["dm_sendmsg4"], false),
        (4, false, vec!["dm_sendmsg4", "dm_egress"], true),
        (4, true, vec!["dm_egress"], false),
        (4, true, vec!["dm_sendmsg4"], false),
        (4, true, vec!["dm_sendmsg4", "dm_egress"], true),
        (6, false, vec![], false),
        (6, true, vec![], false),
        (6, true, vec!["dm_sendmsg6"], false),
        (6, true, vec!["dm_sendmsg6", "dm_egress"], true),
    ] {
        let mut host = Host::new(&without);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let c = host.container(&domain);
        let own = |c: &Container| if family == 4 { c.v4().to_string() } else { c.v6() };
        let forged = c.addresses[usize::from(family == 6)];
        let at = b.agent.make(&format!("socket {family} dgram"));
        let to = format!("{}:5000", own(&b));
        assert_eq!(b.agent.ask(&format!("bind {at} {to}")), "ok");
        let socket = a.agent.make(&format!("socket {family} dgram"));
        if connected {
            assert_eq!(a.agent.ask(&format!("connect {socket} {to}")), "ok");
        }
        let to = if connected { "-".into() } else { to };
        let sent = a.agent.ask(&format!("forge {socket} {to} {forged}"));
        let heard = b.agent.ask(&format!("receive {at}"));
        let case = format!("{family} {connected} {without:?}: {sent}, {heard}");
        assert_eq!(heard.starts_with(&format!("{}:", own(&c))), heard_forged, "{case}");
        // With all programs the datagram arrives, from a permitted address.
        let corrected = heard.starts_with(&format!("{}:", own(&a)));
        assert!(heard_forged || corrected || heard == "timeout", "{case}");
        assert!(!without.is_empty() || corrected, "{case}");
    }
}

#[test]
fn root_sockets_of_other_kinds_and_outside_processes_are_refused() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let mut a = host.container(&domain);
    assert_eq!(a.agent.ask("socket 4 raw"), "EPERM");
    assert_eq!(a.agent.ask("socket 4 mptcp"), "EPROTONOSUPPORT");
    // The same process outside of a container has both: only the program refuses.
    let mut outside = host.agent(None, &domain.name);
    outside.make("socket 4 raw");
    // Below the parent, in the domain's stack, but no member: no socket, because it would have no
    // owner.
    let stranger = host.parent.join("stranger");
    fs::create_dir(&stranger).unwrap();
    let mut stranger = host.agent(Some(&stranger), &domain.name);
    assert_eq!(stranger.ask("socket 4 stream"), "EPERM");
    // A cgroup of the container's own making changes nothing.
    let inner = a.cgroup.join("inner");
    fs::create_dir(&inner).unwrap();
    let mut nested = host.agent(Some(&inner), &domain.name);
    assert_eq!(nested.ask("socket 4 raw"), "EPERM");
    listener(&mut nested, 4, "0.0.0.0:81");
    let own = format!("{}:81", a.v4());
    assert_eq!(connect(&mut a.agent, 4, &own), "ok");
    drop(nested);
    remove_cgroup(&inner);
}

#[test]
fn root_any_means_every_address_of_the_container() {
    for without in [None, Some("dm_arrive")] {
        let steered = if without.is_none() { "ok" } else { "ECONNREFUSED" };
        let mut host = Host::new(&Vec::from_iter(without));
        let domain = host.domain("d");
        let extra: IpAddr = "10.136.0.77".parse().unwrap();
        let mut a = host.container_at(&domain, &["10.136.0.70".parse().unwrap(), extra]);
        let mut b = host.container(&domain);
        let extra6 = format!("[{}]", a.addresses[3]);
        // IPv4 any: the loopback and the added address, too.
        listener(&mut a.agent, 4, "0.0.0.0:80");
        assert_eq!(connect(&mut a.agent, 4, "127.0.0.1:80"), steered);
        assert_eq!(connect(&mut b.agent, 4, &format!("{}:80", a.v4())), "ok");
        assert_eq!(connect(&mut b.agent, 4, &format!("{extra}:80")), steered);
        assert_eq!(connect(&mut b.agent, 6, &format!("{}:80", a.v6())), "ECONNREFUSED");
        // `::` without IPV6_V6ONLY: both families.
        let both = listener(&mut a.agent, 6, "[::]:81");
        assert_eq!(a.agent.ask(&format!("sockname {both}")), "[::]:81");
        for (family, address, expected) in [
            (4, a.v4().to_string(), "ok"),
            (4, extra.to_string(), steered),
            (6, a.v6(), steered),
            (6, extra6.clone(), steered),
        ] {
            let answer = connect(&mut b.agent, family, &format!("{address}:81"));
            assert_eq!(answer, expected, "{address} {without:?}");
        }
        assert_eq!(connect(&mut a.agent, 4, "127.0.0.1:81"), steered);
        assert_eq!(connect(&mut a.agent, 6, "[::1]:81"), steered);
        let mut outside = Agent::start(None, None);
        assert_eq!(connect(&mut outside, 6, &format!("{}:81", a.v6())), steered);
        // IPv6 only.
        let only = a.agent.make("socket 6 stream");
        assert_eq!(a.agent.ask(&format!("v6only {only}")), "ok");
        assert_eq!(a.agent.ask(&format!("bind {only} [::]:82")), "ok");
        assert_eq!(a.agent.ask(&format!("listen {only}")), "ok");
        assert_eq!(connect(&mut b.agent, 6, &format!("{}:82", a.v6())), "ok");
        assert_eq!(connect(&mut b.agent, 6, &format!("{extra6}:82")), steered);
        assert_eq!(connect(&mut a.agent, 6, "[::1]:82"), steered);
        assert_eq!(connect(&mut b.agent, 4, &format!("{}:82", a.v4())), "ECONNREFUSED");
        // A socket bound precisely comes first.
        let any = listener(&mut a.agent, 4, "0.0.0.0:83");
        let precise = listener(&mut a.agent, 4, "127.0.0.1:83");
        assert_eq!(connect(&mut a.agent, 4, "127.0.0.1:83"), "ok");
        assert_ne!(a.agent.ask(&format!("accept {precise}")), "timeout");
        assert_eq!(a.agent.ask(&format!("accept {any}")), "timeout");
    }
}

/// Runs a function in the stack of a domain.
fn there<T: Send>(domain: &Domain, act: impl FnOnce() -> T + Send) -> T {
    dormouse_kernel::namespace::visit(domain.netns.as_fd(), Namespace::Net, act).unwrap()
}

/// Has the stack of a domain answer with SYN cookies, whatever is pending.
fn answer_with_cookies(domain: &Domain) {
    // The file is that of the stack of the writing thread.
    there(domain, || fs::write("/proc/sys/net/ipv4/tcp_syncookies", "2")).unwrap();
}

/// How many connections of the stack of a domain were made by cookies.
fn made_by_cookies(domain: &Domain) -> u64 {
    let text = there(domain, || fs::read_to_string("/proc/thread-self/net/netstat")).unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split(' ').position(|name| name == "SyncookiesRecv").unwrap();
    values.split(' ').nth(at).unwrap().parse().unwrap()
}

/// A flood of SYNs at a service makes its stack answer with cookies.
#[test]
fn root_handshake_by_a_cookie_ends_at_every_address_of_the_container() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    answer_with_cookies(&domain);
    let extra: IpAddr = "10.136.0.77".parse().unwrap();
    let mut a = host.container_at(&domain, &["10.136.0.70".parse().unwrap(), extra]);
    let mut b = host.container(&domain);
    let mut outside = Agent::start(None, None);
    let (own, own6, extra6) = (a.v4(), a.v6(), format!("[{}]", a.addresses[3]));
    let any4 = listener(&mut a.agent, 4, "0.0.0.0:80");
    let both = listener(&mut a.agent, 6, "[::]:81");
    let any6 = a.agent.make("socket 6 stream");
    for step in ["v6only N", "bind N [::]:82", "listen N"] {
        assert_eq!(a.agent.ask(&step.replace('N', &any6.to_string())), "ok");
    }
    let named = listener(&mut a.agent, 6, "[::1]:82");
    let mut made = 0;
    for (at, from, family, address) in [
        (any4, 'b', 4, format!("{own}:80")),
        (any4, 'a', 4, "127.0.0.1:80".into()),
        (any4, 'a', 4, "127.0.0.7:80".into()),
        (any4, 'b', 4, format!("{extra}:80")),
        (any4, 'o', 4, format!("{extra}:80")),
        (both, 'b', 4, format!("{own}:81")),
        (both, 'a', 4, "127.0.0.1:81".into()),
        (both, 'a', 6, "[::1]:81".into()),
        (both, 'b', 4, format!("{extra}:81")),
        (both, 'b', 6, format!("{own6}:81")),
        (both, 'b', 6, format!("{extra6}:81")),
        (both, 'o', 6, format!("{own6}:81")),
        (any6, 'b', 6, format!("{own6}:82")),
        (any6, 'b', 6, format!("{extra6}:82")),
        (any6, 'o', 6, format!("{extra6}:82")),
        // A socket bound precisely comes first.
        (named, 'a', 6, "[::1]:82".into()),
    ] {
        let client = match from {
            'a' => None,
            'b' => Some(&mut b.agent),
            _ => Some(&mut outside),
        };
        let client = client.unwrap_or(&mut a.agent);
        let socket = client.make(&format!("socket {family} stream"));
        assert_eq!(client.ask(&format!("connect {socket} {address}")), "ok", "{address}");
        assert_eq!(client.ask(&format!("send {socket} - question")), "ok", "{address}");
        let accepted = a.agent.ask(&format!("accept {at}"));
        made += 1;
        assert_eq!(made_by_cookies(&domain), made, "{address}: {accepted}");
        let number = accepted.split(' ').next().unwrap();
        assert_eq!(a.agent.ask(&format!("receive {number}")), "unnamed question", "{address}");
    }
}

/// Sent once more, the segment makes no other connection: not beside the first one, and not while the end of that waits
/// for late segments.
#[test]
fn root_segment_that_ends_a_handshake_by_a_cookie_does_so_once() {
    const ETH_ALL: u16 = 3;
    const LOOPBACK: u32 = 1;
    const TCP: usize = 14 + 40;
    const ACK: u8 = 0x10;
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    answer_with_cookies(&domain);
    let mut a = host.container(&domain);
    let at = listener(&mut a.agent, 6, "[::]:81");
    let wire = there(&domain, || {
        let wire = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None);
        let wire = wire.unwrap();
        bind_packet(wire.as_fd(), ETH_ALL, LOOPBACK).unwrap();
        wire
    });
    let socket = a.agent.make("socket 6 stream");
    assert_eq!(a.agent.ask(&format!("connect {socket} [::1]:81")), "ok");
    let accepted = a.agent.ask(&format!("accept {at}"));
    let number = accepted.split(' ').next().unwrap();
    assert_eq!(made_by_cookies(&domain), 1);
    // SYN, SYN with ACK, and ACK.
    let mut last = vec![0; 2048];
    let mut length = 0;
    while length < TCP + 20 || last[TCP + 13] != ACK {
        length = recv(&wire, &mut last[..], RecvFlags::empty()).unwrap().1;
    }
    let again = |agent: &mut Agent| {
        assert_eq!(send(&wire, &last[..length], SendFlags::empty()), Ok(length));
        agent.ask(&format!("accept {at}"))
    };
    assert_eq!(again(&mut a.agent), "timeout");
    for end in [number, &socket.to_string()] {
        assert_eq!(a.agent.ask(&format!("close {end}")), "ok");
    }
    assert_eq!(again(&mut a.agent), "timeout");
    assert_eq!(made_by_cookies(&domain), 1);
}

#[test]
fn root_udp_replies_come_from_the_address_of_the_request() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let (mut a, mut b) = (host.container(&domain), host.container(&domain));
    for (family, bind, ask, shown) in [
        (4, "0.0.0.0:53", "127.0.0.1:53".to_owned(), "127.0.0.1:53".to_owned()),
        (4, "0.0.0.0:54", format!("{}:54", a.v4()), format!("{}:54", a.v4())),
        (6, "[::]:55", "[::1]:55".to_owned(), "[::1]:55".to_owned()),
        (6, "[::]:56", format!("{}:56", a.v6()), format!("{}:56", a.v6())),
        (6, "[::1]:57", "[::1]:57".to_owned(), "[::1]:57".to_owned()),
    ] {
        let server = a.agent.make(&format!("socket {family} dgram"));
        assert_eq!(a.agent.ask(&format!("bind {server} {bind}")), "ok");
        let inside = ask.starts_with("127") || ask.starts_with("[::1]");
        let sender = if inside { None } else { Some(&mut b) };
        let (question, client) = match sender {
            Some(b) => {
                let client = b.agent.make(&format!("socket {family} dgram"));
                assert_eq!(b.agent.ask(&format!("send {client} {ask} question")), "ok");
                (a.agent.ask(&format!("receive {server}")), client)
            }
            None => {
                let client = a.agent.make(&format!("socket {family} dgram"));
                assert_eq!(a.agent.ask(&format!("send {client} {ask} question")), "ok");
                (a.agent.ask(&format!("receive {server}")), client)
            }
        };
        let (from, text) = question.split_once(' ').unwrap_or_else(|| panic!("{bind}: {question}"));
        assert_eq!(text, "question");
        assert_eq!(a.agent.ask(&format!("send {server} {from} answer")), "ok", "{bind} {from}");
        let agent = if inside { &mut a.agent } else { &mut b.agent };
        assert_eq!(agent.ask(&format!("receive {client}")), format!("{shown} answer"), "{bind}");
    }
}

#[test]
fn root_abstract_names_of_others_appear_unbound() {
    for (without, expected) in
        [(vec![], "ECONNREFUSED"), (vec!["dm_unix_connect", "dm_unix_sendmsg"], "ok")]
    {
        let mut host = Host::new(&without);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        for (kind, name) in
            [("stream", "@one"), ("seqpacket", "@two"), ("stream", "@a much longer name")]
        {
            let name = name.replace(' ', "_");
            let at = a.agent.make(&format!("socket u {kind}"));
            assert_eq!(a.agent.ask(&format!("bind {at} {name}")), "ok");
            assert_eq!(a.agent.ask(&format!("listen {at}")), "ok");
            let own = a.agent.make(&format!("socket u {kind}"));
            assert_eq!(a.agent.ask(&format!("connect {own} {name}")), "ok", "{name}");
            let socket = b.agent.make(&format!("socket u {kind}"));
            assert_eq!(b.agent.ask(&format!("connect {socket} {name}")), expected, "{name}");
        }
        let at = a.agent.make("socket u dgram");
        assert_eq!(a.agent.ask(&format!("bind {at} @three")), "ok");
        let socket = b.agent.make("socket u dgram");
        assert_eq!(b.agent.ask(&format!("send {socket} @three x")), expected);
        let own = a.agent.make("socket u dgram");
        assert_eq!(a.agent.ask(&format!("send {own} @three x")), "ok");
        // Names in the file system are not affected.
        let path = host.dir.path().join("sock");
        let at = a.agent.make("socket u stream");
        assert_eq!(a.agent.ask(&format!("bind {at} {}", path.display())), "ok");
        assert_eq!(a.agent.ask(&format!("listen {at}")), "ok");
        let socket = b.agent.make("socket u stream");
        assert_eq!(b.agent.ask(&format!("connect {socket} {}", path.display())), "ok");
    }
}

#[test]
fn root_own_abstract_names_are_reached_behind_thousands_of_others() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let (mut a, mut b) = (host.container(&domain), host.container(&domain));
    let at = a.agent.make("socket u stream");
    assert_eq!(a.agent.ask(&format!("bind {at} @name")), "ok");
    assert_eq!(a.agent.ask(&format!("listen {at}")), "ok");
    assert_eq!(b.agent.ask("crowd 6000 @name"), "6000");
    let connect = |agent: &mut Agent| {
        let socket = agent.make("socket u stream");
        agent.ask(&format!("connect {socket} @name"))
    };
    assert_eq!(connect(&mut a.agent), "ok");
    assert_eq!(connect(&mut b.agent), "ECONNREFUSED");
}

/// Ports from which the kernel chooses, and those that the programs choose from when all of these
/// are bound.
const PORTS: std::ops::RangeInclusive<u16> = 32_768..=60_999;
const RESERVE: std::ops::RangeInclusive<u16> = 61_000..=65_535;

#[test]
fn root_connections_have_ports_while_another_container_holds_them_all() {
    for family in [4, 6] {
        let mut host = Host::new(&[]);
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        let mut server = host.container(&domain);
        let address = |container: &Container, port: u16| match family {
            4 => format!("{}:{port}", container.v4()),
            _ => format!("{}:{port}", container.v6()),
        };
        let at = address(&server, 80);
        let listening = listener(&mut server.agent, family, &at);
        let mut connect_from = |agent: &mut Agent, bound: Option<&str>| -> u16 {
            let socket = agent.make(&format!("socket {family} stream"));
            if let Some(bound) = bound {
                assert_eq!(agent.ask(&format!("bind-address {socket} {bound}")), "ok");
            }
            assert_eq!(agent.ask(&format!("connect {socket} {at}")), "ok", "{bound:?}");
            let accepted = server.agent.ask(&format!("accept {listening}"));
            let name = agent.ask(&format!("sockname {socket}"));
            assert_eq!(accepted.split(' ').nth(1), Some(name.as_str()));
            name.rsplit(':').next().unwrap().parse().unwrap()
        };
        assert!(PORTS.contains(&connect_from(&mut b.agent, None)));
        // By bind(2) at its own address, and by listen(2) alone.
        let ip = a.addresses[usize::from(family == 6)];
        // In parts, because of the limit of open files. The last ports are held by listen(2) alone.
        for (parts, rest) in [
            ([(32_768, 46_883), (46_884, 60_999)], "0"),
            ([(32_768, 46_883), (46_884, 60_899)], "100"),
        ] {
            let hold = |(from, to): (u16, u16)| {
                let mut thief = host.agent(Some(&a.cgroup), &domain.name);
                let held = thief.ask(&format!("hold {family} {ip} {from} {to}"));
                assert_eq!(held, (to - from + 1).to_string());
                thief
            };
            let mut thieves = parts.map(hold);
            assert_eq!(thieves[0].ask(&format!("hold-any {family} {rest}")), rest);
            let own = address(&b, 0);
            for bound in [None, Some(own.as_str())].into_iter().cycle().take(40) {
                let port = connect_from(&mut b.agent, bound);
                assert!(RESERVE.contains(&port), "{port}");
            }
            assert!(RESERVE.contains(&connect_from(&mut a.agent, None)), "the container itself");
            drop(thieves);
            assert!(PORTS.contains(&connect_from(&mut b.agent, None)), "the ports are free again");
        }
    }
}

/// A network beyond the host: a namespace behind a veth pair, with 203.0.113.1 (the host's end) and
/// 203.0.113.2 (its own), 2001:db8::1 and ::2.
fn world(host: &Host) -> PathBuf {
    let path = host.dir.path().join("world");
    fs::write(&path, "").unwrap();
    let script = format!(
        "ip link add out0 type veth peer name in0
         unshare -n sh -ec 'mount --bind /proc/$$/ns/net {path}'
         ip link set in0 netns {path}
         ip addr add 203.0.113.1/24 dev out0; ip -6 addr add 2001:db8::1/64 dev out0 nodad
         ip link set out0 up
         nsenter --net={path} sh -ec 'ip link set lo up; ip addr add 203.0.113.2/24 dev in0
           ip -6 addr add 2001:db8::2/64 dev in0 nodad; ip link set in0 up
           ip route add default via 203.0.113.1; ip -6 route add default via 2001:db8::1'",
        path = path.display()
    );
    sh(&script);
    path
}

#[test]
fn root_containers_reach_out_and_only_published_ports_lead_in() {
    let mut host = Host::new(&[]);
    let beyond = world(&host);
    let (d, e) = (host.domain("d"), host.domain("e"));
    let (mut a, mut b, mut other) = (host.container(&d), host.container(&d), host.container(&e));
    let mut world = Agent::start(None, Some(&beyond));
    let mut here = Agent::start(None, None);
    // Outwards, masqueraded.
    for (family, to, from) in
        [(4, "203.0.113.2:9000", "203.0.113.1:"), (6, "[2001:db8::2]:9000", "[2001:db8::1]:")]
    {
        let at = listener(&mut world, family, to);
        assert_eq!(connect(&mut a.agent, family, to), "ok", "{to}");
        let accepted = world.ask(&format!("accept {at}"));
        assert!(accepted.contains(from), "{accepted}");
    }
    listener(&mut a.agent, 6, "[::]:80");
    listener(&mut b.agent, 4, "0.0.0.0:81");
    listener(&mut a.agent, 4, "127.0.0.1:82");
    // The host reaches the container; the world and other domains do not.
    assert_eq!(connect(&mut here, 4, &format!("{}:80", a.v4())), "ok");
    assert_eq!(connect(&mut here, 6, &format!("{}:80", a.v6())), "ok");
    assert_eq!(connect(&mut world, 4, &format!("{}:80", a.v4())), "timeout");
    assert_eq!(connect(&mut world, 6, &format!("{}:80", a.v6())), "timeout");
    assert_eq!(connect(&mut other.agent, 4, &format!("{}:80", a.v4())), "timeout");
    assert_eq!(connect(&mut other.agent, 6, &format!("{}:80", a.v6())), "timeout");
    // Published: from everywhere.
    let ports = ["8080:80", "8082:82", "203.0.113.1:8081:81"].map(|p| p.parse().unwrap());
    host.network.publish(&a.id, &ports[..2], &a.addresses).unwrap();
    host.network.publish(&b.id, &ports[2..], &b.addresses).unwrap();
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8080"), "ok");
    assert_eq!(connect(&mut world, 6, "[2001:db8::1]:8080"), "ok");
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8081"), "ok");
    assert_eq!(connect(&mut here, 4, "127.0.0.1:8080"), "ok");
    assert_eq!(connect(&mut here, 4, "203.0.113.1:8080"), "ok");
    assert_eq!(connect(&mut here, 4, "127.0.0.1:8081"), "ECONNREFUSED"); // not that address
    for container in [&mut a, &mut b, &mut other] {
        assert_eq!(connect(&mut container.agent, 4, "203.0.113.1:8080"), "ok");
    }
    // A service on the container's loopback is not reached even when its port is published.
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8082"), "ECONNREFUSED");
    // Conflicts: another container, a process of the host.
    let taken = host.network.publish(&b.id, &ports[..1], &b.addresses).unwrap_err();
    assert!(taken.to_string().contains(&format!("container {}", a.id.short())), "{taken}");
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8081"), "ok");
    listener(&mut here, 4, "0.0.0.0:8090");
    let taken = host.network.publish(&b.id, &["8090:81".parse().unwrap()], &b.addresses);
    assert!(taken.unwrap_err().to_string().contains("a process of the host"));
    // All rules are flushed: the next publishing creates them again.
    sh("nft flush ruleset");
    host.network.publish(&a.id, &ports[..2], &a.addresses).unwrap();
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8080"), "ok");
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8081"), "ok");
    // Unpublished: no connection gets in, and another container may take the port.
    host.network.unpublish(&a.id).unwrap();
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8080"), "ECONNREFUSED");
    host.network.publish(&b.id, &["8080:81".parse().unwrap()], &b.addresses).unwrap();
    assert_eq!(connect(&mut world, 4, "203.0.113.1:8080"), "ok");
    host.network.dismantle().unwrap();
    assert_eq!(sh("nft list tables").trim(), "");
    dormouse_kernel::mount::detach(&beyond).unwrap();
}

#[test]
fn root_pings_reach_and_nothing_else_uses_the_domains_address() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let (mut a, b) = (host.container(&domain), host.container(&domain));
    let ping = a.agent.make("socket 4 ping");
    for to in [b.v4().to_string(), "127.0.0.1".into(), "10.136.0.1".into()] {
        // An echo request; the kernel fills in identifier and checksum.
        let answer = a.agent.ask(&format!("echo {ping} {to}:0"));
        assert!(answer.starts_with(&format!("{to}:")), "{to}: {answer}");
    }
    let socket = a.agent.make("socket 4 dgram");
    assert_eq!(a.agent.ask(&format!("bind {socket} 10.136.0.2:99")), "EADDRNOTAVAIL");
}

#[test]
fn root_addresses_come_and_go_while_a_container_runs() {
    use std::os::unix::fs::MetadataExt;
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let (mut a, mut b) = (host.container(&domain), host.container(&domain));
    listener(&mut a.agent, 4, "0.0.0.0:80");
    // In a chunk that the domain has no routes for yet.
    let added: IpAddr = "10.136.8.9".parse().unwrap();
    let before = connect(&mut b.agent, 4, &format!("{added}:80"));
    assert_ne!(before, "ok");
    let all = host.network.update(&a.id, &[added], &[]).unwrap();
    assert_eq!(all.len(), 4);
    let cgroup = fs::metadata(&a.cgroup).unwrap().ino();
    host.network.enter(&domain, &a.id, cgroup, &all).unwrap();
    assert_eq!(connect(&mut b.agent, 4, &format!("{added}:80")), "ok");
    listener(&mut a.agent, 4, &format!("{added}:81"));
    let mut here = Agent::start(None, None);
    assert_eq!(connect(&mut here, 4, &format!("{added}:81")), "ok");
    let all = host.network.update(&a.id, &[], &[added]).unwrap();
    host.network.enter(&domain, &a.id, cgroup, &all).unwrap();
    assert_ne!(connect(&mut b.agent, 4, &format!("{added}:80")), "ok");
    let socket = a.agent.make("socket 4 stream");
    assert_eq!(a.agent.ask(&format!("bind {socket} {added}:82")), "EADDRNOTAVAIL");
    let first = a.v4();
    assert!(host.network.update(&a.id, &[], &[first]).is_err());
    host.network.update(&b.id, &[added], &[]).unwrap();
}

#[test]
fn root_interrupted_creation_and_removal_are_finished_by_the_next() {
    let mut host = Host::new(&[]);
    let dir = host.dir.path().join("run/domains/d");
    drop(host.domain("d"));
    for rest in ["ready", "net", "sys", "hold"] {
        // As if the creation had ended before, or the removal in the middle.
        let _ = fs::remove_file(dir.join("ready"));
        match rest {
            "ready" => {}
            "hold" => fs::remove_file(dir.join("hold")).unwrap(),
            mount => dormouse_kernel::mount::detach(dir.join(mount)).unwrap(),
        }
        let domain = host.domain("d");
        let (mut a, mut b) = (host.container(&domain), host.container(&domain));
        listener(&mut a.agent, 4, "0.0.0.0:80");
        assert_eq!(connect(&mut b.agent, 4, &format!("{}:80", a.v4())), "ok", "{rest}");
        let mut here = Agent::start(None, None);
        assert_eq!(connect(&mut here, 4, &format!("{}:80", a.v4())), "ok", "{rest}");
        host.end(a);
        host.end(b);
    }
    // In use, or held by a process that is about to use it: the domain stays.
    let domain = host.domain("d");
    assert!(host.network.remove_unused().unwrap().is_empty());
    let a = host.container(&domain);
    drop(domain);
    assert!(host.network.remove_unused().unwrap().is_empty());
    host.end(a);
    assert_eq!(host.network.remove_unused().unwrap().len(), 1);
    assert!(!dir.exists());
}

#[test]
fn root_newer_programs_take_over_from_older_ones() {
    let mut host = Host::new(&["dm_bind4"]); // as an older build, which lacked one
    let domain = host.domain("d");
    let (mut a, mut b) = (host.container(&domain), host.container(&domain));
    let theirs = b.v4();
    let early = a.agent.make("socket 4 stream");
    assert_eq!(a.agent.ask(&format!("bind {early} {theirs}:90")), "ok");
    let (lib, run) = (host.dir.path().join("lib"), host.dir.path().join("run"));
    let parent = host.parent.file_name().unwrap().to_str().unwrap();
    let newer = Network::open(&lib, &run, parent, Settings::default()).unwrap();
    newer.update_programs().unwrap();
    // The same processes and maps, all programs.
    let late = a.agent.make("socket 4 stream");
    assert_eq!(a.agent.ask(&format!("bind {late} {theirs}:91")), "EADDRNOTAVAIL");
    listener(&mut b.agent, 4, "0.0.0.0:80");
    assert_eq!(connect(&mut a.agent, 4, &format!("{theirs}:80")), "ok");
}

#[test]
fn root_names_are_known_in_the_domain() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let a = host.container(&domain);
    host.network.hosts_add(&domain, &a.id, &["web", "web.local"], &a.addresses).unwrap();
    let text = || fs::read_to_string(host.network.hosts_file(&domain)).unwrap();
    assert!(text().contains(&format!("{} web web.local {}", a.v4(), a.id.short())));
    assert!(text().contains("10.136.0.1 host.containers.internal"));
    host.network.hosts_add(&domain, &a.id, &["renamed"], &a.addresses).unwrap();
    assert!(text().contains(" renamed ") && !text().contains(" web "));
    host.network.leave(&a.id).unwrap();
    assert!(!text().contains("renamed"));
    assert!(host.network.resolv_conf(&domain).exists());
}

#[test]
fn root_empty_sys_shows_a_loopback_and_nothing_else() {
    let host = Host::new(&[]);
    use std::os::fd::AsRawFd;
    let sys = host.network.empty_sys().unwrap();
    let class = format!("/proc/self/fd/{}/class/net", sys.as_raw_fd());
    // The kernel removes the links of a namespace in the background, once it has no user.
    for _ in 0..50 {
        let links = std::fs::read_dir(&class).unwrap();
        let links: Vec<_> = links.map(|link| link.unwrap().file_name()).collect();
        assert_eq!(links, ["lo"]);
        std::thread::sleep(Duration::from_millis(20));
    }
    host.network.remove_none().unwrap();
    assert!(!host.dir.path().join("run/none").exists());
}

#[test]
fn root_pool_that_the_host_reaches_elsewhere_is_refused() {
    let host = Host::new(&[]);
    sh(
        "ip link add out0 type veth peer name in0; ip addr add 10.137.1.1/24 dev out0; ip link set out0 up",
    );
    let refused = host.network.domain(&"d".parse::<Name>().unwrap(), String::new).unwrap_err();
    assert!(matches!(refused, dormouse_network::Error::PoolOverlaps { .. }), "{refused}");
    assert_eq!(sh("ip -o link | grep -c ': dm' || true").trim(), "0");
}
