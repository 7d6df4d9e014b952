//! UDP sockets: bound and connected by the program. The engine fills their queues, once all sockets
//! exist.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};
use dormouse_record::{Datagram, Result, Thing, UdpSocket};

use super::plan::Plan;
use super::{net, open, socket};
use crate::accept::Patience;
use crate::buffer::{Buffers, Sizes};
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::packet::{self, Packet, Payload};
use crate::stack;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    udp: &UdpSocket,
) -> Result<Cell> {
    let what = match udp.address {
        Some(address) => format!("{what} at {address}"),
        None => what.to_owned(),
    };
    let cell = plan.cell();
    let family = if udp.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = Arg::from(libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
    let args = [Arg::from(family), kind, Arg::Number(0)];
    net::socket(plan, sequence, &what, cell, args)?;
    for option in &udp.options {
        socket::option(plan, sequence, &what, cell, option);
    }
    let bound = udp.address.map(|address| match udp.chosen && !shares_port(plan, udp, address) {
        // connect(2) chooses it again.
        true => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port()),
        false => address,
    });
    if let Some(address) = &bound {
        socket::bind(plan, sequence, &what, cell, (address, udp.free, &udp.options));
    }
    if let Some(peer) = &udp.peer {
        let [at, length] = socket::address(plan, peer);
        sequence.call(what.clone(), Call::new(libc::SYS_connect, [cell.into(), at, length]));
    }
    if (1..=3).contains(&udp.shut) {
        // SHUT_RD, SHUT_WR, SHUT_RDWR. Received datagrams stay readable.
        let args = [cell.into(), Arg::from(i32::from(udp.shut) - 1)];
        let call = Call::new(libc::SYS_shutdown, args);
        // Without a peer the call shuts the socket down and fails (ENOTCONN).
        let call = if udp.peer.is_some() { call } else { call.lenient() };
        sequence.call(what.clone(), call);
    }
    open::set_flags(sequence, &what, cell, udp.flags);
    Ok(cell)
}

/// Whether another socket has the port, which a bind to all addresses would then refuse.
fn shares_port(plan: &Plan<'_>, udp: &UdpSocket, address: SocketAddr) -> bool {
    let is_another = |other: &UdpSocket| {
        !std::ptr::eq(other, udp) && other.address.is_some_and(|it| it.port() == address.port())
    };
    let mut sockets = plan.records.objects.iter().filter(|object| object.net == plan.net);
    sockets.any(|object| matches!(&object.thing, Thing::UdpSocket(other) if is_another(other)))
}

/// Joins the groups of a socket, fills its queue, and restores its pending error. `copy` is a descriptor of it in
/// this program. `patience` is that of all sockets of the restore.
pub(super) fn fill(
    copy: &OwnedFd,
    udp: &UdpSocket,
    patience: &Patience,
) -> std::result::Result<(), Errno> {
    udp.groups.iter().try_for_each(|one| packet::join(copy, &one.device, one.address))?;
    let netns = stack::of_socket(copy)?;
    if udp.received.is_empty() && udp.error.is_none() {
        return Ok(());
    }
    let is = stack::udp_address(&netns, copy)?;
    let packets = udp.received.iter().map(|datagram| {
        let from = datagram.from;
        let loopback = match from.ip().to_canonical() {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        let ip = if is.ip().is_unspecified() { loopback } else { is.ip() };
        let to = SocketAddr::new(ip, is.port());
        let reads_as_it_is = udp.address.is_none_or(|a| a.ip().to_canonical() == is.ip());
        let from = if reads_as_it_is { from } else { packet::sender(from, to) };
        (from, to, Payload::Udp(&datagram.data.0))
    });
    let room = (room_bytes(&udp.received), patience);
    receive(copy, &netns, &packets.collect::<Vec<_>>(), room)?;
    udp.error.map_or(Ok(()), |error| packet::fail(&netns, copy, error))
}

/// Sends a socket its datagrams, in a receive buffer of at least `room_bytes`: the program may have made the buffer
/// smaller than its contents.
fn receive(
    copy: &OwnedFd,
    netns: &OwnedFd,
    packets: &[Packet<'_>],
    (room_bytes, patience): (i32, &Patience),
) -> std::result::Result<(), Errno> {
    let mut buffers = Buffers::of(copy)?;
    let own = buffers.before();
    if own.receive_bytes >= room_bytes {
        return packet::send(netns, packets);
    }
    let room = buffers.set(Sizes { receive_bytes: room_bytes, ..own });
    let sent = room.and_then(|()| {
        // ORDER: each has arrived before the buffer gets its size again.
        stack::inside_of(netns, || {
            packets.iter().try_for_each(|one| {
                patience.send(|| arrivals(copy), || packet::send_here(std::slice::from_ref(one)))
            })
        })
    });
    sent.and(buffers.give_back())
}

/// The size of a receive buffer that is enough for datagrams, as the kernel counts them.
fn room_bytes(received: &[Datagram]) -> i32 {
    /// Headers and the kernel's own data of a packet, or more; its memory may be twice as large as its contents.
    const PACKET_BYTES: usize = 2048;
    /// LIMIT: as of a buffer of a connection.
    const ROOM_MAX: usize = 64 << 20;
    let all: usize = received.iter().map(|one| 2 * one.data.0.len() + PACKET_BYTES).sum();
    all.min(ROOM_MAX) as i32
}

/// A number that changes with every datagram that a socket receives or drops (SO_MEMINFO). KERNEL(4.12).
fn arrivals(socket: &OwnedFd) -> Option<u32> {
    const MEMINFO: i32 = 55;
    // Places in its nine words: bytes in the receive queue, dropped datagrams.
    const RECEIVED: usize = 0;
    const DROPPED: usize = 8;
    let mut info = [0; 36];
    let length = call::socket_option(socket.as_fd(), libc::SOL_SOCKET, MEMINFO, &mut info);
    let words = info.as_chunks::<4>().0;
    let word = |place: usize| u32::from_ne_bytes(words[place]);
    (length == Ok(info.len())).then(|| word(RECEIVED).wrapping_add(word(DROPPED)))
}
