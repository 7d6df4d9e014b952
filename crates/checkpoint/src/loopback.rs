//! Network stacks with nothing but a loopback device: what there is to know about one, and how one is
//! made that is like it.
//!
//! What cannot be told by a [`Net`] is found without a list of all that a stack may have: another one is
//! made by what the record says, and whatever the kernel tells of one and not of the other is
//! different.
//!
//! LIMIT: what the kernel is asked: links, addresses, routes, rules of routing, queueing disciplines, tables
//! of packet filters, and settings. Policies of IPsec and rules of IPVS it is not asked for.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{Errno, proc, process};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink,
};

use crate::format::Net;
use crate::netlink::{attributes, dump, u32_at};

/// Kinds of messages of rtnetlink(7).
const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
/// It is made, and was not there.
const NEW: u16 = 0x200 | 0x400;
/// How long addresses may take; those of a device that is down never come.
const SETTLE_MS: u32 = 200;
/// Number 0.
const ROUTE: Option<Protocol> = None;
/// The loopback device is the first of every stack.
const LOOPBACK: u32 = 1;
/// Directories of settings, below `/proc/sys/net`, in the order in which they are made: what is for all
/// devices before what is for one.
const SETTINGS: [&str; 10] = [
    "core",
    "unix",
    "ipv4",
    "ipv6",
    "ipv4/conf/all",
    "ipv4/conf/default",
    "ipv4/conf/lo",
    "ipv6/conf/all",
    "ipv6/conf/default",
    "ipv6/conf/lo",
];

/// Whether a setting is of a directory that is known.
pub(crate) fn is_setting(path: &str) -> bool {
    let is_name = |name: &str| {
        let known = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        !name.is_empty() && name.bytes().all(known)
    };
    path.rsplit_once('/').is_some_and(|(dir, name)| SETTINGS.contains(&dir) && is_name(name))
}

/// What the kernel tells of a stack: what people call a thing, and all that is said of it.
type Told = Vec<(String, Vec<u8>)>;

/// What a stack is, as a record; or what it has that a record has no place for. The calling thread is in
/// it, and another makes one like it.
pub(crate) fn look() -> Result<Result<Net, String>, Errno> {
    settle()?;
    let (told, settings, addresses, up) = (tell()?, settings(), addresses()?, is_up()?);
    // A thread of its own makes a new stack, which ends with it.
    std::thread::scope(|scope| {
        let like = scope.spawn(|| {
            let made = process::unshare(CloneFlags::NEWNET);
            made.map_err(|e| Errno::from_raw_os_error(e.errno()))?;
            let mut net = Net { up, ..Net::default() };
            let new = self::settings();
            let differs = |(path, value): &(&String, &String)| new.get(*path) != Some(value);
            let order = |path: &str| {
                let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
                SETTINGS.iter().position(|one| *one == dir)
            };
            let changed = settings.iter().filter(differs);
            net.settings = changed.map(|(path, value)| (path.clone(), value.clone())).collect();
            net.settings.sort_by_key(|(path, _)| order(path));
            if let Err(path) = make(&net)? {
                return Ok(Err(format!("whose setting net/{path} cannot be made again")));
            }
            if !net.settings.is_empty() {
                let like = self::settings();
                let other = settings.iter().find(|(path, value)| like.get(*path) != Some(value));
                if let Some((path, _)) = other {
                    return Ok(Err(format!("whose setting net/{path} cannot be made again")));
                }
            }
            let given = self::addresses()?;
            net.addresses = addresses.iter().filter(|one| !given.contains(one)).copied().collect();
            net.addresses.iter().try_for_each(|(ip, bits)| add_address(*ip, *bits))?;
            settle()?;
            let like = tell()?;
            let lacks = |one: &Told, other: &Told| {
                one.iter().find(|thing| !other.contains(thing)).map(|(name, _)| name.clone())
            };
            if let Some(name) = lacks(&told, &like) {
                return Ok(Err(format!("with {name}")));
            }
            if let Some(name) = lacks(&like, &told) {
                return Ok(Err(format!("without {name}")));
            }
            Ok(Ok(net))
        });
        like.join().unwrap_or(Err(Errno::IO))
    })
}

/// Makes the stack of the calling thread, which is new, what a record says; or tells which setting it
/// cannot have.
pub(crate) fn build(net: &Net) -> Result<Result<(), String>, Errno> {
    if let Err(path) = make(net)? {
        return Ok(Err(path));
    }
    net.addresses.iter().try_for_each(|(ip, bits)| add_address(*ip, *bits))?;
    settle()?;
    Ok(Ok(()))
}

/// Waits until addresses can be used: one of IPv6 is tentative for a moment (ip-address(8)) even where nobody
/// is asked whether it is his, and has no route before.
fn settle() -> Result<(), Errno> {
    const TENTATIVE: u8 = 0x40;
    for _ in 0..SETTLE_MS {
        let mut is_tentative = false;
        ask(22, 8, |body| {
            is_tentative |= body.get(2)? & TENTATIVE != 0;
            Some(())
        })?;
        if !is_tentative {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// All but the addresses.
fn make(net: &Net) -> Result<Result<(), String>, Errno> {
    for (path, value) in &net.settings {
        if !is_setting(path) || fs::write(Path::new("/proc/sys/net").join(path), value).is_err() {
            return Ok(Err(path.clone()));
        }
    }
    if net.up {
        const UP: u32 = libc::IFF_UP as u32;
        // struct ifinfomsg: family, type, index, flags, which flags.
        let body = [0, LOOPBACK, UP, UP].map(u32::to_ne_bytes);
        request(NEW_LINK, 0, body.as_flattened())?;
    }
    Ok(Ok(()))
}

/// Settings by their paths, those that can be read.
fn settings() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for dir in SETTINGS {
        let listed = fs::read_dir(Path::new("/proc/sys/net").join(dir));
        for entry in listed.into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{dir}/{name}");
            if !entry.file_type().is_ok_and(|kind| kind.is_file()) || !is_setting(&path) {
                continue;
            }
            // One that has no value yet, or can only be written.
            let Ok(value) = proc::whole_text(entry.path()) else { continue };
            all.insert(path, value.trim_end().to_owned());
        }
    }
    all
}

fn is_up() -> Result<bool, Errno> {
    let mut up = false;
    ask(18, 16, |body| {
        let index = u32_at(body, 4)?;
        up |= index == LOOPBACK && u32_at(body, 8)? & libc::IFF_UP as u32 != 0;
        Some(())
    })?;
    Ok(up)
}

/// The addresses of the loopback device, and the lengths of their prefixes.
fn addresses() -> Result<Vec<(IpAddr, u8)>, Errno> {
    let mut all = Vec::new();
    ask(22, 8, |body| {
        const ADDRESS: u16 = 1;
        let found = attributes(body.get(8..)?)?;
        let (_, value) = found.iter().find(|(kind, _)| *kind == ADDRESS)?;
        let ip = match *value {
            [a, b, c, d] => IpAddr::V4(Ipv4Addr::new(*a, *b, *c, *d)),
            other => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(other).ok()?)),
        };
        if u32_at(body, 4)? == LOOPBACK {
            all.push((ip, *body.get(1)?));
        }
        Some(())
    })?;
    Ok(all)
}

fn add_address(ip: IpAddr, bits: u8) -> Result<(), Errno> {
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    let (family, bytes, scope) = match ip {
        IpAddr::V4(ip) => {
            (libc::AF_INET, ip.octets().to_vec(), if ip.is_loopback() { 254 } else { 0 })
        }
        IpAddr::V6(ip) => (libc::AF_INET6, ip.octets().to_vec(), 0),
    };
    // struct ifaddrmsg: family, prefix, flags, scope, index.
    let mut body = vec![family as u8, bits, 0, scope];
    body.extend(LOOPBACK.to_ne_bytes());
    for kind in [ADDRESS, LOCAL] {
        body.extend((bytes.len() as u16 + 4).to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(&bytes);
    }
    if ip.is_ipv4() {
        // As ip(8) calls it.
        const LABEL: u16 = 3;
        body.extend(7u16.to_ne_bytes());
        body.extend(LABEL.to_ne_bytes());
        body.extend(b"lo\0\0");
    }
    request(NEW_ADDRESS, NEW, &body)
}

/// Everything of which there may be more than a loopback device brings along.
fn tell() -> Result<Told, Errno> {
    let mut all = Told::new();
    // Requests, bytes of the head, attributes that are the same in every stack that is like it (all where
    // none are named, but for times), and the name.
    let tables: [(u16, usize, &[u16], &str); 5] = [
        (18, 16, &[1, 3, 4, 6, 10, 13, 20, 27], "a link"),
        (22, 8, &[1, 2, 3, 4, 8, 9], "an address"),
        (26, 12, &[], "a route"),
        (34, 12, &[], "a rule of routing"),
        (38, 20, &[1, 2], "a queueing discipline"),
    ];
    for (kind, head, kept, name) in tables {
        ask(kind, head, |body| {
            let mut told = body.get(..head)?.to_vec();
            let mut name = name.to_owned();
            let mut found = attributes(body.get(head.next_multiple_of(4)..)?)?;
            // Of a route when it was last used.
            const CACHE: u16 = 12;
            found.retain(|(n, _)| if kept.is_empty() { *n != CACHE } else { kept.contains(n) });
            for (n, value) in found {
                const LINK_NAME: u16 = 3;
                if kind == 18 && n == LINK_NAME {
                    let text = String::from_utf8_lossy(value);
                    name = format!("a link {}", text.trim_end_matches('\0'));
                }
                told.extend(n.to_ne_bytes());
                told.extend(value);
            }
            all.push((name, told));
            Some(())
        })?;
    }
    all.extend(filters());
    Ok(all)
}

/// Tables of packet filters. A kernel that has none has nothing to tell.
fn filters() -> Told {
    const GET_TABLE: u16 = 10 << 8 | 1;
    const NAME: u16 = 1;
    let mut all = Told::new();
    // struct nfgenmsg: family, version, number. What fails is not there.
    let _ = dump(Some(netlink::NETFILTER), GET_TABLE, &[0; 4], |answer| {
        let found = attributes(answer.get(4..)?)?;
        let name = found.iter().find(|(kind, _)| *kind == NAME).map(|(_, name)| *name);
        let name = String::from_utf8_lossy(name.unwrap_or_default());
        let name = name.trim_end_matches('\0');
        all.push((format!("an nftables table {name}"), answer.to_vec()));
        Some(())
    });
    for family in ["ip", "ip6", "arp"] {
        let path = format!("/proc/thread-self/net/{family}_tables_names");
        let names = proc::whole_text(path).unwrap_or_default();
        let tables =
            names.lines().map(|name| (format!("an {family}tables table {name}"), Vec::new()));
        all.extend(tables);
    }
    all
}

/// Asks rtnetlink(7) for all things of a kind.
fn ask(kind: u16, head: usize, each: impl FnMut(&[u8]) -> Option<()>) -> Result<(), Errno> {
    dump(ROUTE, kind, &vec![0; head], each)
}

/// Has rtnetlink(7) do something.
fn request(kind: u16, flags: u16, body: &[u8]) -> Result<(), Errno> {
    /// A request that is answered.
    const REQUEST_ACK: u16 = 1 | 4;
    let socket = socket(ROUTE)?;
    let length = 16 + body.len() as u32;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((REQUEST_ACK | flags).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 256];
    let (length, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    // struct nlmsgerr: a head, then the negative error, 0 for none.
    match u32_at(&answer[..length], 16) {
        Some(0) => Ok(()),
        Some(error) => Err(Errno::from_raw_os_error((error as i32).wrapping_neg())),
        None => Err(Errno::BADMSG),
    }
}

fn socket(protocol: Option<Protocol>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does something in a stack that is new.
    fn in_new<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
        std::thread::scope(|scope| {
            let done = scope.spawn(|| process::unshare(CloneFlags::NEWNET).ok().map(|()| act()));
            done.join().unwrap()
        })
    }

    #[test]
    fn a_stack_is_told_by_its_record_or_refused_by_name() {
        let looked = in_new(|| {
            let new = look().unwrap().unwrap();
            let net = Net {
                up: true,
                addresses: vec![
                    ("10.1.2.3".parse().unwrap(), 24),
                    ("fd00::1".parse().unwrap(), 64),
                ],
                settings: vec![("ipv4/ip_forward".into(), "1".into())],
            };
            build(&net).unwrap().unwrap();
            let like = look().unwrap().unwrap();
            // A route that no address brings along.
            let mut route = vec![libc::AF_INET as u8, 8, 0, 0, 254, 4, 253, 1, 0, 0, 0, 0];
            for (kind, value) in [(1u16, [20, 0, 0, 0]), (4, [1, 0, 0, 0])] {
                route.extend(8u16.to_ne_bytes());
                route.extend(kind.to_ne_bytes());
                route.extend(value);
            }
            request(24, NEW, &route).unwrap();
            (new, net, like, look().unwrap())
        });
        let Some((new, net, like, refused)) = looked else {
            return eprintln!("SKIPPED: no network namespace can be made");
        };
        assert_eq!(new, Net::default());
        assert!(like.up && like.addresses == net.addresses, "{like:?}");
        assert!(like.settings.contains(&net.settings[0]), "{like:?}");
        assert_eq!(refused.unwrap_err(), "with a route");
    }

    #[test]
    fn a_setting_is_below_the_directories_of_a_stack() {
        assert!(is_setting("ipv4/ip_forward") && is_setting("ipv6/conf/lo/disable_ipv6"));
        for bad in [
            "",
            "ipv4",
            "ipv4/../../kernel/core_pattern",
            "/ipv4/a",
            "ipv4/conf/eth0/a",
            "kernel/a",
        ] {
            assert!(!is_setting(bad), "{bad}");
        }
    }
}
