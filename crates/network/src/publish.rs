//! The nftables table: ports of the host that lead to containers, and the masquerading of outgoing
//! packets.
//!
//! One separate table in the host's stack, so that the rules of other firewalls are not changed.
//! Published ports are elements of four maps (`at` an address or `any`, IPv4 and IPv6): publishing
//! adds one element, however many there are. `create` makes the kernel refuse a port that is taken.
//!
//! Function of the chains: connections to a local address and published port are redirected to the
//! container, from outside, from containers, and from the host itself (127.0.0.1 included: the
//! uplink routes loopback sources, whose packets get the uplink's address). Packets that leave the
//! pool, also back into it by way of a published port, are masqueraded. Only the host, replies, and
//! published ports lead into a domain; nothing with a loopback destination leaves one.
//!
//! LIMIT: `[::1]` cannot be published (the kernel routes ::1 nowhere else). A firewall whose own
//! forward chain drops must let the uplinks through. A service of the host that starts to listen on
//! a published port later is not reached on it.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use dormouse_kernel::{nft, weakened};
use dormouse_model::{ContainerId, Protocol, Publish};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::settings::Pool;
use crate::store::{self, Plan};

/// The table in the host's stack.
pub(crate) struct Table {
    pub name: String,
    /// Directory of the published ports: one file per container.
    dir: PathBuf,
}

/// One published port, as in the table: `RUN/published/ID`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    protocol: Protocol,
    host_ip: Option<IpAddr>,
    host_port: u16,
    to: IpAddr,
    port: u16,
}

impl Entry {
    fn map(&self) -> String {
        let kind = if self.host_ip.is_some() { "at" } else { "any" };
        format!("{kind}{}", if self.to.is_ipv4() { 4 } else { 6 })
    }

    fn key(&self) -> String {
        let port = format!("{} . {}", self.protocol.as_str(), self.host_port);
        match self.host_ip {
            Some(ip) => format!("{ip} . {port}"),
            None => port,
        }
    }

    /// Returns whether one packet could match both.
    fn conflicts(&self, other: &Self) -> bool {
        self.protocol == other.protocol
            && self.host_port == other.host_port
            && self.to.is_ipv4() == other.to.is_ipv4()
            && (self.host_ip.is_none() || other.host_ip.is_none() || self.host_ip == other.host_ip)
    }

    fn describe(&self) -> String {
        let port = format!("{}/{}", self.host_port, self.protocol.as_str());
        match self.host_ip {
            Some(IpAddr::V6(ip)) => format!("[{ip}]:{port}"),
            Some(ip) => format!("{ip}:{port}"),
            None => port,
        }
    }
}

/// LIMIT: one address of a container may fill this part of the host's table of connections: 1/16.
const CONNTRACK_PART: u32 = 16;
/// The least number of connections of an address.
const CONNTRACK_MIN: u32 = 1024;
/// The size of the table by the kernel's default, where the size cannot be read.
const CONNTRACK_MAX: u32 = 65_536;

impl Table {
    pub fn new(name: String, run: &Path) -> Self {
        Self { name, dir: run.join("published") }
    }

    fn nft(&self, step: &'static str, rules: &str) -> Result<()> {
        nft::apply(rules).map_err(|e| Error::Nft { step, message: e.to_string() })
    }

    /// Returns whether the table exists.
    pub fn exists(&self) -> bool {
        let look = format!("list map inet {} any6\n", self.name);
        self.nft("look at its table", &look).is_ok()
    }

    /// Adds an uplink to the table.
    pub fn add_uplink(&self, uplink: &str) -> Result<()> {
        let table = &self.name;
        let add = format!("add element inet {table} uplinks {{ \"{uplink}\" }}\n");
        self.nft("add an uplink", &add)
    }

    /// Creates the table, in place of an existing one, with every recorded port.
    pub fn make(&self, plan: &Plan, uplinks: &[String]) -> Result<()> {
        let name = &self.name;
        let pool: Pool = plan.pool;
        let pool6 = format!("{}/48", plan.v6(0));
        let closed = if weakened("closed-domains") { "" } else { "oifname @uplinks drop" };
        let mut rules = format!(
            r#"
table inet {name}
delete table inet {name}
table inet {name} {{
  set uplinks {{ type ifname; }}
  map at4 {{ type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service; }}
  map any4 {{ type inet_proto . inet_service : ipv4_addr . inet_service; }}
  map at6 {{ type ipv6_addr . inet_proto . inet_service : ipv6_addr . inet_service; }}
  map any6 {{ type inet_proto . inet_service : ipv6_addr . inet_service; }}
  chain lead {{
    dnat ip to ip daddr . meta l4proto . th dport map @at4
    dnat ip to meta l4proto . th dport map @any4
    ip6 daddr ::1 return
    dnat ip6 to ip6 daddr . meta l4proto . th dport map @at6
    dnat ip6 to meta l4proto . th dport map @any6
  }}
  chain early {{
    type filter hook prerouting priority raw; policy accept;
    iifname @uplinks ip daddr 127.0.0.0/8 drop
    iifname @uplinks ip saddr 127.0.0.0/8 drop
  }}
  chain prerouting {{
    type nat hook prerouting priority dstnat; policy accept;
    fib daddr type local meta l4proto {{ tcp, udp }} jump lead
  }}
  chain output {{
    type nat hook output priority -100; policy accept;
    fib daddr type local meta l4proto {{ tcp, udp }} jump lead
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {pool} masquerade
    ip6 saddr {pool6} masquerade
    oifname @uplinks ip saddr 127.0.0.0/8 masquerade
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    oifname @uplinks ct state established,related accept
    oifname @uplinks ct status dnat accept
    {closed}
  }}
}}
"#
        );
        for uplink in uplinks {
            rules += &format!("add element inet {name} uplinks {{ \"{uplink}\" }}\n");
        }
        for (_, entry) in self.entries()? {
            rules += &self.element("add", &entry);
        }
        self.nft("make its table", &rules)?;
        // KERNEL(4.18): ct count. Without it one container can fill the host's table of connections.
        if !weakened("connection-bound") {
            let _ = self.nft("bound tracked connections", &self.bound());
        }
        Ok(())
    }

    /// Rules that bound the connections of one address in the host's table. The first packet of a further
    /// connection is dropped before its entry is made. The entry of a datagram to a closed port of the host
    /// lasts for half a minute.
    fn bound(&self) -> String {
        let max = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max");
        let max = max.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(CONNTRACK_MAX);
        let (name, part) = (&self.name, (max / CONNTRACK_PART).max(CONNTRACK_MIN));
        format!(
            r#"
table inet {name} {{
  set tracked4 {{ type ipv4_addr; size 65535; flags dynamic; }}
  set tracked6 {{ type ipv6_addr; size 65535; flags dynamic; }}
  chain tracked {{
    type filter hook prerouting priority mangle; policy accept;
    iifname @uplinks ct state new add @tracked4 {{ ip saddr ct count over {part} }} drop
    iifname @uplinks ct state new add @tracked6 {{ ip6 saddr ct count over {part} }} drop
  }}
}}
"#
        )
    }

    fn element(&self, verb: &str, entry: &Entry) -> String {
        let (table, map, key) = (&self.name, entry.map(), entry.key());
        match verb {
            "delete" => format!("delete element inet {table} {map} {{ {key} }}\n"),
            _ => format!(
                "{verb} element inet {table} {map} {{ {key} : {} . {} }}\n",
                entry.to, entry.port
            ),
        }
    }

    /// Takes an uplink out.
    pub fn remove_uplink(&self, uplink: &str) -> Result<()> {
        let table = &self.name;
        let rules = format!("delete element inet {table} uplinks {{ \"{uplink}\" }}\n");
        self.nft("remove an uplink", &rules)
    }

    /// Removes the table.
    pub fn remove(&self) -> Result<()> {
        let table = &self.name;
        self.nft("remove its table", &format!("table inet {table}\ndelete table inet {table}\n"))
    }

    /// Removes the records of all ports, as after a reboot.
    pub fn forget(&self) -> Result<()> {
        match fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::file("remove", &self.dir)(e))
            }
            _ => Ok(()),
        }
    }

    fn entries(&self) -> Result<Vec<(String, Entry)>> {
        let dir = match fs::read_dir(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(Error::file("read", &self.dir))?,
        };
        let mut entries = Vec::new();
        for file in dir {
            let file = file.map_err(Error::file("read", &self.dir))?;
            let owner = file.file_name().to_string_lossy().into_owned();
            if owner.ends_with(".new") {
                continue;
            }
            entries.extend(self.read(&owner)?.into_iter().map(|e| (owner.clone(), e)));
        }
        Ok(entries)
    }

    fn read(&self, owner: &str) -> Result<Vec<Entry>> {
        let path = self.dir.join(owner);
        match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(Error::file("read", path)(e)),
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|e| Error::Corrupt { path, message: e.to_string() }),
        }
    }

    /// Publishes all ports of a container, or none.
    pub fn publish(&self, id: &ContainerId, ports: &[Publish], own: &[IpAddr]) -> Result<()> {
        let mut wanted: Vec<Entry> = Vec::new();
        for port in ports {
            for to in [own.iter().find(|a| a.is_ipv4()), own.iter().find(|a| a.is_ipv6())] {
                let Some(to) = to else { continue };
                if port.host_ip.is_some_and(|ip| ip.is_ipv4() != to.is_ipv4()) {
                    continue;
                }
                let any = port.host_ip.is_none_or(|ip| ip.is_unspecified());
                wanted.push(Entry {
                    protocol: port.protocol,
                    host_ip: port.host_ip.filter(|_| !any),
                    host_port: port.host_port,
                    to: *to,
                    port: port.container_port,
                });
            }
        }
        let taken = self.entries()?;
        for (i, entry) in wanted.iter().enumerate() {
            let other = taken.iter().find(|(owner, e)| owner != id.as_str() && e.conflicts(entry));
            if let Some((owner, _)) = other {
                let owner = format!("container {}", owner.get(..12).unwrap_or(owner));
                return Err(Error::PortTaken { port: entry.describe(), owner });
            }
            if wanted[..i].iter().any(|e| e.conflicts(entry)) {
                let owner = "this container already".into();
                return Err(Error::PortTaken { port: entry.describe(), owner });
            }
            check_listener(entry)?;
        }
        self.unpublish(id)?;
        fs::create_dir_all(&self.dir).map_err(Error::file("create", &self.dir))?;
        // ORDER: recorded first: an element of the table without a record would never be removed.
        let path = self.dir.join(id.as_str());
        let text = serde_json::to_vec(&wanted)
            .map_err(|e| Error::Corrupt { path: path.clone(), message: e.to_string() })?;
        store::replace(&path, &text)?;
        let rules: String = wanted.iter().map(|e| self.element("create", e)).collect();
        // nft applies all of it or nothing.
        self.nft("publish the ports", &rules).inspect_err(|_| {
            let _ = fs::remove_file(&path); // the first error is the one to return
        })
    }

    /// Returns whether the container has ports here.
    pub fn has_ports(&self, id: &ContainerId) -> bool {
        self.dir.join(id.as_str()).exists()
    }

    /// Takes back all ports of a container.
    pub fn unpublish(&self, id: &ContainerId) -> Result<()> {
        let entries = self.read(id.as_str())?;
        for entry in &entries {
            // One by one: after a crash or a flush of the table some are missing.
            match self.nft("take a port back", &self.element("delete", entry)) {
                Err(Error::Nft { message, .. }) if message.contains("No such file") => {}
                other => other?,
            }
        }
        let path = self.dir.join(id.as_str());
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", path)(e)),
            _ => Ok(()),
        }
    }
}

/// Tests whether a process of the host has the port, by binding it without listening.
fn check_listener(entry: &Entry) -> Result<()> {
    let any: IpAddr = if entry.to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let address = SocketAddr::new(entry.host_ip.unwrap_or(any), entry.host_port);
    let family = if entry.to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let (kind, protocol) = match entry.protocol {
        Protocol::Tcp => (SocketType::STREAM, ipproto::TCP),
        Protocol::Udp => (SocketType::DGRAM, ipproto::UDP),
    };
    let socket = match rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, Some(protocol))
    {
        Ok(socket) => socket,
        Err(rustix::io::Errno::AFNOSUPPORT) => return Ok(()), // no IPv6, no listener
        Err(e) => return Err(Error::errno("make a socket", "socket")(e)),
    };
    let step = "look for a listener";
    if entry.protocol == Protocol::Tcp {
        // Connections in TIME_WAIT do not count as listeners.
        sockopt::set_socket_reuseaddr(&socket, true).map_err(Error::errno(step, "setsockopt"))?;
    }
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&socket, true).map_err(Error::errno(step, "setsockopt"))?;
    }
    match rustix::net::bind(&socket, &address) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::ADDRINUSE) => {
            let owner = "a process of the host".into();
            Err(Error::PortTaken { port: entry.describe(), owner })
        }
        Err(rustix::io::Errno::ADDRNOTAVAIL) if entry.host_ip.is_none() => Ok(()),
        Err(e) => Err(Error::errno(step, "bind")(e)),
    }
}
