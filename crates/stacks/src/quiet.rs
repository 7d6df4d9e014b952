//! Drop rules for connections: while their sockets are read, and while these do not exist.
//!
//! A packet for a connection that is being read would change it during the read. A packet for a
//! connection without processes would be answered with a reset. So the packets of every saved
//! connection are dropped, as if they had been lost: by an nftables table in the container's own
//! stack, from before the first socket is read until all are restored. Senders retransmit.
//!
//! A packet that is between the table and the socket when the table is created arrives all the
//! same. If the socket was read already, the kernel acknowledges data that is never read; if the
//! socket is closed, the kernel answers with a reset. So answers of these connections are dropped,
//! too.
//!
//! The table is removed with the stack: after that, [`silence`] returns the rules for a new one.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use dormouse_kernel::nft;
use dormouse_record::{Error, Records, Result};

use crate::stack::{self, Ends};

/// Packets with this mark pass: the engine's own.
pub const MARK: i32 = 0x646d;

const PREFIX: &str = "dormouse_quiet_";

/// The table of a container.
fn table(id: &str) -> String {
    let id: String = id.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("{PREFIX}{id}")
}

/// Whether a table of that name is one of these.
pub fn is_ours(table: &str) -> bool {
    table.starts_with(PREFIX)
}

/// The rules that [`keep_quiet`] takes, as nft(8) reads them, for the connections of a checkpoint
/// whose own address the container may have; `None` if there are none.
pub fn silence(records: &Records, id: &str, is_own: impl Fn(IpAddr) -> bool) -> Option<String> {
    let all = records.ends().map(|ends| ends.map(canonical));
    let connections: Vec<Ends> = all.filter(|[own, _]| is_own(own.ip())).collect();
    (!connections.is_empty()).then(|| rules(&table(id), &connections))
}

/// An address as its packets have it.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Drops the packets that match these rules, in the stack of a network namespace.
pub fn keep_quiet(netns: &OwnedFd, rules: &str) -> Result<()> {
    nft(netns, rules)
}

/// Drops the packets of these connections, and the answers.
pub fn begin(netns: &OwnedFd, id: &str, connections: &[Ends]) -> Result<()> {
    nft(netns, &rules(&table(id), connections))
}

/// Removes the drop rules, if there are any.
pub fn end(netns: &OwnedFd, id: &str) -> Result<()> {
    let table = table(id);
    nft(netns, &format!("table inet {table}\ndelete table inet {table}\n"))
}

fn rules(table: &str, connections: &[Ends]) -> String {
    let mut sets = String::new();
    let mut drops = String::new();
    let mut answers = String::new();
    for (is_v4, ip, kind) in [(true, "ip", "ipv4_addr"), (false, "ip6", "ipv6_addr")] {
        let family = connections.iter().filter(|[own, _]| own.is_ipv4() == is_v4);
        let element = |[own, peer]: &Ends| {
            format!("{} . {} . {} . {}", peer.ip(), peer.port(), own.ip(), own.port())
        };
        let elements: Vec<String> = family.map(element).collect();
        if elements.is_empty() {
            continue;
        }
        let elements = elements.join(", ");
        // Writing to a string does not fail.
        let _ = writeln!(
            sets,
            "set {ip}s {{ type {kind} . inet_service . {kind} . inet_service; elements = {{ \
             {elements} }}; }}"
        );
        let _ = writeln!(
            drops,
            "meta mark != {MARK} {ip} saddr . tcp sport . {ip} daddr . tcp dport @{ip}s drop"
        );
        let _ = writeln!(
            answers,
            "meta mark != {MARK} {ip} daddr . tcp dport . {ip} saddr . tcp sport @{ip}s drop"
        );
    }
    format!(
        "table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n{sets}\
         chain in {{ type filter hook prerouting priority raw;\n{drops}}}\n\
         chain out {{ type filter hook output priority raw;\n{answers}}}\n}}\n"
    )
}

fn nft(netns: &OwnedFd, rules: &str) -> Result<()> {
    let applied = stack::inside_of(netns, || Ok(nft::apply(rules)));
    let applied = applied.map_err(Error::call("enter the container's network namespace"))?;
    applied.map_err(|e| {
        Error::Elsewhere(format!("nft cannot drop the packets of its connections: {e}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dormouse_record::sample::small;
    use dormouse_record::{Object, TcpSocket, TcpState, Thing};

    #[test]
    fn rules_name_both_ends_of_each_connection() {
        assert_eq!(table("a-1;b"), "dormouse_quiet_a1b");
        let ends = ["10.0.0.2:80".parse().unwrap(), "10.0.0.9:5".parse().unwrap()];
        let rules = rules("t", &[ends]);
        assert!(rules.contains("{ 10.0.0.9 . 5 . 10.0.0.2 . 80 }"), "{rules}");
        assert!(!rules.contains("ip6"), "{rules}");
    }

    #[test]
    fn drop_rules_only_name_addresses_of_the_container() {
        let connection = |own: &str, peer: &str| {
            let connection = crate::repair::unread(TcpState::Established, peer.parse().unwrap());
            Object::from(Thing::TcpSocket(TcpSocket {
                v6: own.starts_with('['),
                flags: 0,
                address: Some(own.parse().unwrap()),
                free: false,
                connection: Some(connection),
                held: false,
                over: false,
                options: Vec::new(),
            }))
        };
        let mut records = small();
        assert_eq!(silence(&records, "a", |_| true), None);
        records.objects.push(connection("10.0.0.3:22", "10.0.0.9:5"));
        let own: IpAddr = "10.0.0.2".parse().unwrap();
        assert_eq!(silence(&records, "a", |ip| ip == own), None);
        records.objects.push(connection("[::ffff:10.0.0.2]:80", "[::ffff:10.0.0.9]:6"));
        let mut inside = connection("10.0.0.2:81", "10.0.0.9:7");
        inside.net = Some(0);
        records.objects.push(inside);
        let rules = silence(&records, "a", |ip| ip == own).expect("it has one");
        assert!(rules.contains("elements = { 10.0.0.9 . 6 . 10.0.0.2 . 80 }"), "{rules}");
    }
}
