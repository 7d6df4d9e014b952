//! Socket options: those that differ from their values on a new socket of the same kind.
//!
//! A new socket is made in the network namespace of the one that is read, whose settings give it some of
//! its values, and once for all sockets of its kind ([`Fresh`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

use dormouse_bpf::reuseport::Groups;
use dormouse_kernel::call;
use dormouse_kernel::netlink::listener::Listeners;
use dormouse_record::{Bytes, OPTIONS, SocketOption};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, SocketAddrAny, SocketFlags, SocketType};

use super::refusal::Reason;
use crate::repair::BUFFER_LOCK;
use crate::stack;

/// Options with the number of a device, which another stack does not have.
const DEVICES: [(i32, i32, &str); 3] = [
    (libc::IPPROTO_IP, libc::IP_UNICAST_IF, "IP_UNICAST_IF"),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF, "IPV6_UNICAST_IF"),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, "IPV6_MULTICAST_IF"),
];
/// Options with headers for the packets of a socket, of no length if there are none.
const HEADERS: [(i32, i32, &str); 5] = [
    (libc::IPPROTO_IP, libc::IP_OPTIONS, "IP_OPTIONS"),
    (libc::IPPROTO_IPV6, libc::IPV6_HOPOPTS, "IPV6_HOPOPTS"),
    (libc::IPPROTO_IPV6, libc::IPV6_DSTOPTS, "IPV6_DSTOPTS"),
    (libc::IPPROTO_IPV6, libc::IPV6_RTHDR, "IPV6_RTHDR"),
    (libc::IPPROTO_IPV6, libc::IPV6_RTHDRDSTOPTS, "IPV6_RTHDRDSTOPTS"),
];
/// Keys by which both sides sign segments (RFC 5925), KERNEL(6.7).
const TCP_AO_INFO: i32 = 40;

/// The options of new sockets, by kind and by the object of their network namespace, for the length of
/// one survey.
#[derive(Debug, Default)]
pub(super) struct Fresh {
    values: HashMap<Kind, Vec<Option<Vec<u8>>>>,
    /// TCP sockets with keys, by the object of their network namespace: of listeners and of others.
    signed: HashMap<(Option<usize>, bool), Signed>,
}

/// What is known of the sockets with keys in a network namespace.
#[derive(Debug)]
enum Signed {
    /// So many were asked about alone.
    Alone(u32),
    /// The inodes of all.
    All(Vec<u64>),
}

/// So many questions about one socket take less time than the list of all others than listeners: 240 us (2 CPUs, Linux
/// 6.18), for a table that all stacks share.
const ASKED_ALONE: u32 = 4;

/// Family, type and protocol of a socket, and the object of its network namespace.
type Kind = (u16, u32, u32, Option<usize>);

impl Fresh {
    /// Those of the container's own network namespace: the numbers of objects are of one survey alone.
    pub(super) fn into_own(mut self) -> Self {
        self.values.retain(|(.., net), _| net.is_none());
        // A key may be set at any time.
        self.signed.clear();
        self
    }

    /// The values of all options of a new socket, in the order of [`OPTIONS`].
    fn of(&mut self, socket: &Socket<'_>) -> Result<&[Option<Vec<u8>>], Errno> {
        let Socket { copy, net, domain, kind, protocol, .. } = *socket;
        let number = protocol.map_or(0, |protocol| protocol.as_raw().get());
        let key = (domain.as_raw(), kind.as_raw(), number, net);
        let new = match self.values.entry(key) {
            Entry::Occupied(known) => return Ok(known.into_mut()),
            Entry::Vacant(new) => new,
        };
        let look = || {
            let new = rustix::net::socket_with(domain, kind, SocketFlags::CLOEXEC, protocol)?;
            Ok(OPTIONS.map(|(level, name, length)| {
                has_level(domain, kind, level)
                    .then(|| one(new.as_fd(), level, name, length))
                    .flatten()
            }))
        };
        let values = match domain {
            // None of its options depends on the network.
            AddressFamily::UNIX => look()?,
            _ => stack::inside_of(&call::network_of(copy)?, look)?,
        };
        Ok(new.insert(values.into()))
    }
}

impl Fresh {
    /// Whether a TCP socket has keys for its segments.
    ///
    /// LIMIT: those of a socket that is not bound, and all without the module `tcp_diag`, are not found.
    fn is_signed(&mut self, socket: BorrowedFd<'_>, net: Option<usize>) -> Result<bool, Errno> {
        let listens = rustix::net::sockopt::socket_acceptconn(socket)?;
        let inode = rustix::fs::fstat(socket)?.st_ino;
        let signed = self.signed.entry((net, listens)).or_insert(Signed::Alone(0));
        let netns = || call::network_of(socket);
        if let Signed::Alone(asked) = signed
            && *asked < ASKED_ALONE
            && let Some(ends) = ends(socket, listens)
        {
            *asked += 1;
            let ask = || Ok(Listeners::open().and_then(|mut it| it.is_signed(ends, inode)).ok());
            if let Some(is_signed) = stack::inside_of(&netns()?, ask)?.flatten() {
                return Ok(is_signed);
            }
        }
        if let Signed::Alone(_) = signed {
            let found = stack::inside_of(&netns()?, || Ok(stack::signed_here(listens)))?;
            *signed = Signed::All(found.unwrap_or_default());
        }
        Ok(matches!(signed, Signed::All(all) if all.contains(&inode)))
    }
}

/// The address of the peer of a TCP socket, none for a listener, and its own. `None` for one that has neither.
fn ends(socket: BorrowedFd<'_>, listens: bool) -> Option<[SocketAddr; 2]> {
    let address = |address: SocketAddrAny| SocketAddr::try_from(address).ok();
    let own = rustix::net::getsockname(socket).ok().and_then(address)?;
    let peer = match listens {
        true => Some(SocketAddr::new(own.ip(), 0)),
        false => rustix::net::getpeername(socket).ok().flatten().and_then(address),
    };
    Some([peer?, own])
}

/// A socket whose options are read.
#[derive(Clone, Copy)]
pub(super) struct Socket<'s> {
    pub(super) copy: BorrowedFd<'s>,
    /// The object of its network namespace.
    pub(super) net: Option<usize>,
    pub(super) domain: AddressFamily,
    pub(super) kind: SocketType,
    pub(super) protocol: Option<Protocol>,
    /// It has a connection, or one that has ended.
    pub(super) has_connection: bool,
}

/// Refuses options that cannot be saved.
fn refuse(
    socket: BorrowedFd<'_>,
    domain: AddressFamily,
    kind: SocketType,
    has_connection: bool,
) -> Result<(), Reason> {
    let get = |level, name, value: &mut [u8]| {
        let length = has_level(domain, kind, level)
            .then(|| call::socket_option(socket, level, name, value).ok());
        length.flatten()
    };
    for (level, name, text) in DEVICES {
        // An accepted connection has the device of its first packet there.
        let is_its_own = kind == SocketType::STREAM && name == libc::IPV6_MULTICAST_IF;
        let mut number = [0; 4];
        if get(level, name, &mut number).is_some() && !is_its_own && number != [0; 4] {
            return Err(format!("a socket with a device for its packets ({text}), not saved yet"));
        }
    }
    for (level, name, text) in HEADERS {
        // The options of a connection are an answer to those of its peer.
        let is_answer = has_connection && kind == SocketType::STREAM && name == libc::IP_OPTIONS;
        if !is_answer && get(level, name, &mut [0; 256]).is_some_and(|length| length > 0) {
            return Err(format!("a socket with headers for its packets ({text}), not saved yet"));
        }
    }
    match get(libc::IPPROTO_TCP, TCP_AO_INFO, &mut [0; 56]) {
        Some(_) => Err("a socket with keys for its segments (TCP_AO), not saved yet".into()),
        None => refuse_saved_request(socket, kind, has_connection),
    }
}

/// Refuses a connection with the headers of its first packet, which no call sets. A read removes them (tcp(7),
/// TCP_SAVED_SYN), except one into too short a buffer.
fn refuse_saved_request(
    socket: BorrowedFd<'_>,
    kind: SocketType,
    has_connection: bool,
) -> Result<(), Reason> {
    const SAVED_REQUEST: i32 = 28; // TCP_SAVED_SYN
    if !has_connection || kind != SocketType::STREAM {
        return Ok(());
    }
    match call::socket_option(socket, libc::IPPROTO_TCP, SAVED_REQUEST, &mut []) {
        Err(Errno::INVAL) => Err("a TCP connection with the headers of its first packet \
             (TCP_SAVED_SYN), which are not read yet, not saved yet"
            .into()),
        _ => Ok(()),
    }
}

/// Refuses settings of a TCP or UDP socket that no call reports. A socket that is held keeps them.
pub(super) fn refuse_unreported(
    fresh: &mut Fresh,
    socket: BorrowedFd<'_>,
    net: Option<usize>,
    is_tcp: bool,
) -> Result<(), Reason> {
    // A TCP connection has no group, although its listener has passed the option on.
    let is_connection = is_tcp && rustix::net::getpeername(socket).is_ok();
    if !is_connection && has_program(socket) {
        return Err("a socket with a program that distributes what arrives \
             (SO_ATTACH_REUSEPORT_CBPF), not saved yet"
            .into());
    }
    let is_signed = is_tcp && fresh.is_signed(socket, net).map_err(|e| format!("a socket: {e}"))?;
    match is_signed {
        true => Err("a socket with keys for its segments (TCP_MD5SIG), not saved yet".into()),
        false => Ok(()),
    }
}

/// Whether the group of a socket (SO_REUSEPORT) has a program. LIMIT: none is found where BPF may not be loaded.
fn has_program(socket: BorrowedFd<'_>) -> bool {
    static GROUPS: OnceLock<Groups> = OnceLock::new();
    if call::int_option(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT) != Ok(1) {
        return false;
    }
    // What fails once may succeed later.
    let loaded = || Groups::load().ok().map(|groups| GROUPS.get_or_init(|| groups));
    let groups = GROUPS.get().or_else(loaded);
    groups.is_some_and(|groups| groups.has_program(socket).unwrap_or(false))
}

/// Reads the options that a new socket must be given, and refuses those that cannot be. A socket with a
/// connection, or with one that has ended, has some of them as its state.
pub(super) fn read(fresh: &mut Fresh, it: &Socket<'_>) -> Result<Vec<SocketOption>, Reason> {
    let Socket { copy: socket, domain, kind, has_connection, .. } = *it;
    refuse(socket, domain, kind, has_connection)?;
    let failed = |e: Errno| format!("a socket with unreadable options: {e}");
    let new = fresh.of(it).map_err(failed)?;
    let filter = match call::packet_filter(socket) {
        Err(Errno::ACCESS) => {
            return Err("a socket with a packet filter of eBPF, which is not saved yet".into());
        }
        other => other.map_err(failed)?,
    };
    let mut device = [0; 16];
    let bound = call::socket_option(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, &mut device);
    if domain != AddressFamily::UNIX && bound.map_err(failed)? != 0 {
        return Err("a socket bound to a device, which is not saved yet".into());
    }
    let locked = call::int_option(socket, libc::SOL_SOCKET, BUFFER_LOCK).unwrap_or(0);
    let mut options = Vec::new();
    if !filter.is_empty() {
        options.push(SocketOption::filter(filter));
    }
    for ((level, name, length), was) in OPTIONS.into_iter().zip(new) {
        // An option that this kind of socket does not have is not an error.
        let Some(was) = was else { continue };
        let buffer = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => Some(1),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => Some(2),
            _ => None,
        };
        if buffer.is_some_and(|bit| locked & bit == 0) {
            continue;
        }
        // Accepted connections have values here, and setsockopt(2) refuses to set them (ip(7)).
        let is_multicast = [
            (libc::IPPROTO_IP, libc::IP_MULTICAST_TTL),
            (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS),
            (libc::IPPROTO_IP, libc::IP_MULTICAST_IF),
        ]
        .contains(&(level, name));
        if is_multicast && kind == SocketType::STREAM {
            continue;
        }
        if has_connection && SocketOption::is_of_unconnected(level, name) {
            continue;
        }
        let Some(is) = one(socket, level, name, length) else { continue };
        if is == *was && buffer.is_none() {
            continue;
        }
        let mut value = is;
        if buffer.is_some() {
            // socket(7): the kernel doubles the value that is set.
            let bytes = value.first_chunk::<4>().map_or(0, |b| i32::from_ne_bytes(*b));
            value = (bytes / 2).to_ne_bytes().to_vec();
        }
        options.push(SocketOption { level, name, value: Bytes(value) });
    }
    Ok(options)
}

/// Whether sockets of a kind may have options of a level: each failed query costs as much as
/// another.
fn has_level(domain: AddressFamily, kind: SocketType, level: i32) -> bool {
    let is_internet = [AddressFamily::INET, AddressFamily::INET6].contains(&domain);
    match level {
        libc::SOL_SOCKET => true,
        // IPv6 sockets also use IPv4.
        libc::IPPROTO_IP => is_internet,
        libc::IPPROTO_TCP => is_internet && kind == SocketType::STREAM,
        libc::SOL_UDP => is_internet && kind == SocketType::DGRAM,
        libc::SOL_RAW => domain == AddressFamily::INET,
        libc::IPPROTO_IPV6 | libc::SOL_ICMPV6 => domain == AddressFamily::INET6,
        libc::SOL_PACKET => domain == AddressFamily::PACKET,
        libc::SOL_NETLINK => domain == AddressFamily::NETLINK,
        _ => false,
    }
}

fn one(socket: BorrowedFd<'_>, level: i32, name: i32, length: usize) -> Option<Vec<u8>> {
    let mut value = vec![0; length];
    call::socket_option(socket, level, name, &mut value).ok()?;
    Some(value)
}
