//! Sockets: TCP sockets that listen, and pairs of unix sockets.
//!
//! Who the peer of a unix socket is, only sock_diag(7) tells, asked in the network namespace of the
//! container; a message is left in its queue by MSG_PEEK.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::{self, Namespace};
use dormouse_kernel::pidfd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, SendFlags, SocketFlags, SocketType, getsockname,
    netlink, recvmsg, sockopt,
};

use super::object::{Open, Survey, Why};
use super::tree::Seen;
use crate::error::Refusal;
use crate::format::{Bytes, Listener, Thing, UnixEnd, UnixPair};

/// Unix sockets, as far as they are known.
#[derive(Default)]
pub(crate) struct Known {
    /// The peer of each, by inodes; asked for once.
    peers: Option<HashMap<u64, u64>>,
    /// Pairs of which a side was seen: by the smaller inode, the object and the sides.
    pairs: HashMap<u64, Pair>,
}

struct Pair {
    object: usize,
    inodes: [u64; 2],
    copies: [Option<OwnedFd>; 2],
    first: Refusal,
}

/// Options that programs set and that a new socket must be given, as level and number, with their
/// values in a new socket.
const TCP_OPTIONS: [(i32, i32, i32); 8] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, 0),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, 0),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, 0),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 0),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 0),
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 0),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, -1),
];
const UNIX_OPTIONS: [i32; 2] = [libc::SO_PASSCRED, libc::SO_KEEPALIVE];

pub(crate) fn is_socket(open: &Open<'_>) -> bool {
    open.link.starts_with("socket:[")
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Why> {
    let domain = sockopt::socket_domain(&open.copy).map_err(|e| format!("a socket: {e}"))?;
    match domain {
        AddressFamily::UNIX => unix(survey, open),
        AddressFamily::INET | AddressFamily::INET6 => inet(open, domain),
        AddressFamily::NETLINK => Err("a netlink socket, which is not saved yet".into()),
        AddressFamily::PACKET => Err("a packet socket, which is not saved yet".into()),
        other => Err(format!("a socket of family {}, which is not saved yet", other.as_raw())),
    }
}

fn inet(open: &Open<'_>, domain: AddressFamily) -> Result<Thing, Why> {
    let failed = |e: Errno| format!("a socket: {e}");
    let option = |level, name| call::int_option(open.copy.as_fd(), level, name);
    let protocol = option(libc::SOL_SOCKET, libc::SO_PROTOCOL).map_err(failed)?;
    let kind = sockopt::socket_type(&open.copy).map_err(failed)?;
    if (kind, protocol) != (SocketType::STREAM, libc::IPPROTO_TCP) {
        let name = match (kind, protocol) {
            (SocketType::DGRAM, libc::IPPROTO_UDP) => "a UDP socket".to_owned(),
            (SocketType::RAW, _) => "a raw socket".to_owned(),
            _ => format!("a socket of protocol {protocol}"),
        };
        return Err(format!("{name}, which is not saved yet"));
    }
    let mut info = [0; 32];
    call::socket_option(open.copy.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)
        .map_err(failed)?;
    // struct tcp_info: of a socket that listens, tcpi_unacked (at 24) is how many wait to be
    // accepted, tcpi_sacked (at 28) how many may.
    let number = |at: usize| info[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
    const LISTEN: u8 = 10;
    const CLOSE: u8 = 7;
    match info[0] {
        LISTEN if number(24) == 0 => {}
        LISTEN => {
            let waiting = number(24);
            return Err(format!(
                "a TCP socket with {waiting} connections that it has not accepted, which are not \
                 saved yet"
            ));
        }
        CLOSE => return Err("a TCP socket that is not connected, which is not saved yet".into()),
        _ => return Err("a TCP connection, which is not saved yet".into()),
    }
    let address = getsockname(&open.copy).map_err(failed)?;
    let address = std::net::SocketAddr::try_from(address).map_err(failed)?;
    let mut options = Vec::new();
    for (level, name, default) in TCP_OPTIONS {
        if level == libc::IPPROTO_IPV6 && domain != AddressFamily::INET6 {
            continue;
        }
        match option(level, name) {
            Ok(value) if value != default => options.push((level, name, value)),
            Ok(_) | Err(Errno::NOPROTOOPT) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(Thing::Listener(Listener {
        address,
        v6: domain == AddressFamily::INET6,
        backlog: number(28).min(i32::MAX as u32) as i32,
        options,
        flags: open.flags(),
    }))
}

fn unix(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Why> {
    let failed = |e: Errno| format!("a unix socket: {e}");
    if sockopt::socket_acceptconn(&open.copy).map_err(failed)? {
        return Err("a unix socket that listens, which is not saved yet".into());
    }
    // `sun_family` alone: it has no name.
    let name = getsockname(&open.copy).map_err(failed)?;
    if name.addr_len() > 2 {
        return Err("a unix socket with a name, which is not saved yet".into());
    }
    let inode = open.stat.st_ino;
    let peer = peer(survey, open.process, inode)?;
    let low = inode.min(peer);
    let side = usize::from(inode != low);
    if !survey.sockets.pairs.contains_key(&low) {
        let socket_type = sockopt::socket_type(&open.copy).map_err(failed)?;
        let pair = UnixPair {
            socket_type: socket_type.as_raw() as i32,
            received: Default::default(),
            shut: [0; 2],
            options: Default::default(),
        };
        let object = survey.add(Thing::UnixPair(pair));
        let first = open.process.refuse(format!("descriptor {}", open.number), "");
        let inodes = [low, inode.max(peer)];
        let pair = Pair { object, inodes, copies: [None, None], first };
        survey.sockets.pairs.insert(low, pair);
    }
    let copy = open.copy.try_clone().map_err(|e| format!("a unix socket: {e}"))?;
    let pair = survey.sockets.pairs.get_mut(&low).ok_or("a unix socket that is gone")?;
    pair.copies[side] = Some(copy);
    Ok(Thing::UnixEnd(UnixEnd { pair: pair.object, side, flags: open.flags() }))
}

/// The inode of the peer of a unix socket.
fn peer(survey: &mut Survey<'_>, seen: &Seen, inode: u64) -> Result<u64, Why> {
    if survey.sockets.peers.is_none() {
        let peers = ask_for_peers(seen).map_err(|e| format!("a unix socket: {e}"))?;
        survey.sockets.peers = Some(peers);
    }
    let peers = survey.sockets.peers.iter().flatten();
    let found = peers.filter(|(one, _)| **one == inode).map(|(_, other)| *other).next();
    match found {
        Some(0) | None => {
            Err("a unix socket that is not connected, or whose peer is gone, which is not saved \
                 yet"
            .into())
        }
        Some(peer) => Ok(peer),
    }
}

/// Asks sock_diag(7) for all unix sockets of a process's network namespace.
fn ask_for_peers(seen: &Seen) -> Result<HashMap<u64, u64>, String> {
    let handle = seen.pidfd.as_ref().ok_or("its process is gone")?;
    let netns = pidfd::namespace(handle, Namespace::Net).map_err(|e| e.to_string())?;
    // A thread of its own enters the namespace and never comes back.
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(netns.as_fd(), kind)?;
            dump()
        });
        asked.join().map_err(|_| "sock_diag".to_owned())?.map_err(|e| format!("sock_diag: {e}"))
    })
}

fn dump() -> Result<HashMap<u64, u64>, Errno> {
    const BY_FAMILY: u16 = 20;
    const REQUEST_DUMP: u16 = 0x301;
    const SHOW_PEER: u32 = 4;
    const PEER: u16 = 2;
    const DONE: u16 = 3;
    const ERROR: u16 = 2;
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    let mut request = Vec::with_capacity(40);
    request.extend_from_slice(&40u32.to_ne_bytes());
    request.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    request.extend_from_slice(&REQUEST_DUMP.to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[libc::AF_UNIX as u8, 0, 0, 0]);
    for word in [u32::MAX, 0, SHOW_PEER, u32::MAX, u32::MAX] {
        request.extend_from_slice(&word.to_ne_bytes());
    }
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    let mut peers = HashMap::new();
    let mut buffer = vec![0u8; 64 << 10];
    let u16_at = |b: &[u8], at: usize| b.get(at..at + 2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    let u32_at = |b: &[u8], at: usize| {
        b.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    };
    loop {
        let (n, _) = rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..n];
        while let (Some(length), Some(kind)) = (u32_at(rest, 0), u16_at(rest, 4)) {
            let length = length as usize;
            if kind == DONE {
                return Ok(peers);
            }
            if kind == ERROR || length < 32 || length > rest.len() {
                return Err(Errno::BADMSG);
            }
            let message = &rest[..length];
            let inode = u32_at(message, 20).ok_or(Errno::BADMSG)?;
            let mut at = 32;
            let mut peer = 0;
            while let (Some(size), Some(kind)) = (u16_at(message, at), u16_at(message, at + 2)) {
                if kind == PEER {
                    peer = u32_at(message, at + 4).unwrap_or(0);
                }
                at += usize::from(size).max(4).next_multiple_of(4);
            }
            peers.insert(u64::from(inode), u64::from(peer));
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// Queues and options of pairs, and pairs whose other side is outside.
pub(crate) fn finish(survey: &mut Survey<'_>) {
    for pair in std::mem::take(&mut survey.sockets.pairs).into_values() {
        let Thing::UnixPair(record) = &mut survey.found.objects[pair.object].thing else {
            continue;
        };
        match fill(record, &pair) {
            Ok(()) => {}
            Err(why) => survey.found.refusals.push(Refusal { why, ..pair.first }),
        }
    }
}

fn fill(record: &mut UnixPair, pair: &Pair) -> Result<(), Why> {
    for side in 0..2 {
        let Some(copy) = &pair.copies[side] else {
            let inode = pair.inodes[side];
            return Err(format!("a unix socket whose peer {inode} is outside the container"));
        };
        let failed = |e: Errno| format!("a unix socket whose queue cannot be read: {e}");
        record.received[side] = queue(copy, record.socket_type).map_err(failed)?.ok_or(
            "a unix socket in whose queue descriptors are on their way, which is not saved yet",
        )?;
        for name in UNIX_OPTIONS {
            let value = call::int_option(copy.as_fd(), libc::SOL_SOCKET, name).map_err(failed)?;
            if value != 0 {
                record.options[side].push((name, value));
            }
        }
    }
    Ok(())
}

/// What a socket has received, left there. `None` where something comes along that is no data.
fn queue(socket: &OwnedFd, socket_type: i32) -> Result<Option<Vec<Bytes>>, Errno> {
    let before = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    let peek_at =
        |offset| call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset);
    peek_at(0)?;
    let mut all = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    let result = loop {
        let mut control = rustix::net::RecvAncillaryBuffer::default();
        let mut iov = [std::io::IoSliceMut::new(&mut buffer)];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recvmsg(socket, &mut iov, &mut control, flags) {
            Err(Errno::AGAIN) => break Ok(Some(all)),
            Err(e) => break Err(e),
            Ok(got) if got.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) => {
                break Ok(None);
            }
            Ok(got) if got.bytes == 0 && socket_type == libc::SOCK_STREAM => break Ok(Some(all)),
            // A message of nothing is looked at for ever.
            Ok(got) if got.bytes == 0 => break Ok(None),
            Ok(got) => all.push(Bytes(buffer[..got.bytes].to_vec())),
        }
    };
    peek_at(before)?;
    result
}
