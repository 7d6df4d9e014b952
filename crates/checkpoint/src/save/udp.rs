//! UDP sockets: addresses, and datagrams, which are left in the receive queue by MSG_PEEK.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_kernel::call;
use dormouse_record::{
    Bytes, Datagram, Error, JoinedGroup, Result as Outcome, SocketOption, Thing, UdpSocket,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, getpeername, getsockname, ipproto};

use super::open::Open;
use super::refusal::Reason;
use super::survey::{Found, Survey};
use super::{address, diag, option};
use crate::inject::peek::message;
use crate::{packet, stack};

/// For datagrams that cannot be sent again.
const UNKNOWN: &str = "a UDP socket with a datagram of unknown origin";

pub(super) fn save(
    survey: &mut Survey<'_>,
    open: &Open<'_>,
    domain: AddressFamily,
) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a UDP socket: {e}");
    let socket = open.copy.as_fd();
    let address = getsockname(&open.copy).and_then(SocketAddr::try_from).map_err(failed)?;
    let peer = match getpeername(&open.copy) {
        Ok(peer) => {
            let peer = peer.ok_or(Errno::INVAL).and_then(SocketAddr::try_from);
            Some(peer.map_err(failed)?)
        }
        Err(Errno::NOTCONN) => None,
        Err(e) => return Err(failed(e)),
    };
    let (kind, has_peer) = (SocketType::DGRAM, peer.is_some());
    let options = option::read(
        &mut survey.fresh,
        &option::Socket {
            copy: socket,
            net: open.net,
            domain,
            kind,
            protocol: Some(ipproto::UDP),
            has_connection: has_peer,
        },
    )?;
    if is_corked(socket, &options).map_err(failed)? {
        let why = "a UDP socket with a part of a datagram (UDP_CORK), not saved yet";
        return Err(survey.passing(why.into()));
    }
    let in_error = is_in_error(&open.copy).map_err(failed)?;
    let received = match in_error {
        // Reading the queue would consume the error.
        true => Some(Vec::new()),
        false => queue(&open.copy).map_err(failed)?,
    };
    if in_error && !survey.holds(open) {
        let option = |level, name| call::int_option(socket, level, name) == Ok(1);
        if option(libc::IPPROTO_IP, libc::IP_RECVERR)
            || option(libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
        {
            return Err("a UDP socket with errors in a queue (IP_RECVERR), not saved yet".into());
        }
        // An error is read by taking it, and its repetition would signal once more, by default a process's end.
        if open.flags() & libc::O_ASYNC as u32 != 0 {
            return Err(
                "a UDP socket with a pending error that signals (O_ASYNC), not saved".into()
            );
        }
        let copy = open.copy.try_clone().map_err(|e| format!("a UDP socket: {e}"))?;
        survey.found.in_error.push((open.index, copy));
    }
    let chosen = match (peer, domain) {
        (Some(peer), AddressFamily::INET6) => is_chosen(&open.copy, address, peer),
        _ => Ok(false),
    };
    Ok(Thing::UdpSocket(UdpSocket {
        v6: domain == AddressFamily::INET6,
        flags: open.flags(),
        address: Some(address).filter(address::is_bound),
        free: address::is_bound(&address)
            && address::is_of_no_device(&open.copy, address, &options),
        chosen: chosen.map_err(failed)?,
        peer,
        received: received.ok_or(UNKNOWN)?,
        error: None,
        groups: groups(&open.copy).map_err(failed)?.ok_or(SOURCES)?,
        shut: shut(open, domain).unwrap_or(0) | shut_for_reading(&open.copy).map_err(failed)?,
        options,
    }))
}

/// Whether the kernel has chosen the local address of an IPv6 socket for its peer, and would again:
/// bind(2) to an IPv6 address sets IPV6_V6ONLY, which no call can take back, and connect(2) does not.
///
/// LIMIT: of an IPv4 socket the kernel does not report which of the two has set its address.
fn is_chosen(socket: &OwnedFd, own: SocketAddr, peer: SocketAddr) -> Result<bool, Errno> {
    let SocketAddr::V6(v6) = own else { return Ok(false) };
    let is_plain = !v6.ip().is_unspecified() && v6.ip().to_ipv4_mapped().is_none();
    let only = call::int_option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)?;
    if !is_plain || only != 0 {
        return Ok(false);
    }
    let choice = stack::inside_of(&stack::of_socket(socket)?, || {
        let (family, kind) = (AddressFamily::INET6, SocketType::DGRAM);
        let new = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&new, &peer)?;
        SocketAddr::try_from(getsockname(&new)?)
    });
    Ok(choice.is_ok_and(|choice| choice.ip() == own.ip()))
}

/// Whether a part of a datagram waits for the rest: with UDP_CORK, no packet of the socket is in a device for
/// long.
fn is_corked(socket: BorrowedFd<'_>, options: &[SocketOption]) -> Result<bool, Errno> {
    const UDP_CORK: i32 = 1;
    let is_set = options.iter().any(|option| option.is(libc::SOL_UDP, UDP_CORK));
    Ok(is_set && call::unsent_bytes(socket)? != 0)
}

/// For a group that a socket has joined for some senders only.
const SOURCES: &str = "a UDP socket with a multicast group of chosen senders, not saved yet";

/// The multicast groups that a socket has joined, each found by a query for every group of its stack. `None` if one
/// is joined for chosen senders only.
fn groups(socket: &OwnedFd) -> Result<Option<Vec<JoinedGroup>>, Errno> {
    const FILTER: i32 = 48; // MCAST_MSFILTER
    const EXCLUDE: u32 = 0;
    let mut joined = Vec::new();
    for (index, device, address) in stack::multicast_groups(&stack::of_socket(socket)?)? {
        // struct group_filter: device, address at 8, mode at 136, number of senders at 140.
        let mut filter = packet::group_request(index, address);
        filter.resize(144, 0);
        let level = if address.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 };
        if call::socket_option(socket.as_fd(), level, FILTER, &mut filter).is_err() {
            continue; // it has not joined this one, or is of the other family
        }
        let number = |at: usize| filter[at..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b));
        if (number(136), number(140)) != (EXCLUDE, 0) {
            return Ok(None);
        }
        joined.push(JoinedGroup { device, address });
    }
    Ok(Some(joined))
}

/// Directions in which a socket is shut down, by sock_diag(7). LIMIT: a kernel without udp_diag reports none.
fn shut(open: &Open<'_>, domain: AddressFamily) -> Result<u8, Errno> {
    const SHUTDOWN: u16 = 8; // INET_DIAG_SHUTDOWN
    // struct inet_diag_req_v2: family, protocol, two bytes, states, and 48 bytes for any address.
    let mut request = vec![domain.as_raw() as u8, libc::IPPROTO_UDP as u8, 0, 0];
    request.extend(u32::MAX.to_ne_bytes());
    request.resize(56, 0);
    // struct inet_diag_msg, whose last field is the inode.
    const HEAD_BYTES: usize = 72;
    let (mut found, inode) = (0, open.stat.st_ino);
    stack::inside_of(&stack::of_socket(&open.copy)?, || {
        diag::dump(&request, |answer| {
            if u64::from(diag::u32_at(answer, HEAD_BYTES - 4)?) == inode {
                let attributes = diag::attributes(answer.get(HEAD_BYTES..)?)?;
                let shut = attributes.into_iter().find(|(kind, _)| *kind == SHUTDOWN);
                found = shut.and_then(|(_, value)| value.first().copied()).unwrap_or(0) & 3;
            }
            Some(())
        })
    })?;
    Ok(found)
}

/// The directions that poll(2) reports. LIMIT: sock_diag(7) lists no socket that is neither bound nor connected, so the
/// end of its writing alone is not found.
fn shut_for_reading(socket: &OwnedFd) -> Result<u8, Errno> {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
    let found = polled[0].revents();
    let [reading, writing] = [(PollFlags::RDHUP, 1), (PollFlags::HUP, 2)]
        .map(|(event, bit)| if found.contains(event) { bit } else { 0 });
    Ok(reading | writing)
}

/// Whether the socket has a pending error (SO_ERROR).
fn is_in_error(socket: &OwnedFd) -> Result<bool, Errno> {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
    Ok(polled[0].revents().contains(PollFlags::ERR))
}

/// Reads sockets with a pending error. Everything is stopped: reading consumes the error, so the
/// cause of it is repeated afterwards.
pub(super) fn contents(found: &mut Found) -> Outcome<()> {
    for (index, socket) in &found.in_error {
        let Thing::UdpSocket(record) = &mut found.objects[*index].thing else { continue };
        let read = (|| -> Result<_, Errno> {
            let error = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_ERROR)?;
            let received = queue(socket);
            packet::fail(&stack::of_socket(socket)?, socket, error)?;
            Ok((error, received?))
        })();
        let (error, received) = read.map_err(Error::call("read the error of a UDP socket"))?;
        record.error = Some(error);
        record.received = received.ok_or_else(|| Error::Elsewhere(UNKNOWN.into()))?;
    }
    Ok(())
}

/// The address of a sender, as recvmsg(2) writes it behind the family.
fn address_of(bytes: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_be_bytes(*bytes.first_chunk()?);
    let rest = &bytes[2..];
    match bytes.len() {
        14 => Some((Ipv4Addr::from(*rest.first_chunk::<4>()?), port).into()),
        26 => {
            let flow = u32::from_be_bytes(*rest.first_chunk()?);
            let ip = Ipv6Addr::from(*rest.get(4..)?.first_chunk::<16>()?);
            let scope = u32::from_ne_bytes(*rest.get(20..)?.first_chunk()?);
            Some(SocketAddrV6::new(ip, port, flow, scope).into())
        }
        _ => None,
    }
}

/// Reads the receive queue. An empty datagram is shown once to MSG_PEEK, and never again.
fn queue(socket: &OwnedFd) -> Result<Option<Vec<Datagram>>, Errno> {
    let before = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    let peek_at =
        |offset| call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset);
    peek_at(0)?;
    let mut all = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    let result = loop {
        match message(socket.as_fd(), &mut buffer) {
            Err(Errno::AGAIN) => break Ok(Some(all)),
            Err(e) => break Err(e),
            Ok(got) => match address_of(&got.from) {
                Some(from) if got.bytes < buffer.len() => {
                    // Datagrams that were received as one are received one by one afterwards.
                    let each = got.segment_bytes.filter(|bytes| *bytes > 0).unwrap_or(got.bytes);
                    let mut add =
                        |data: &[u8]| all.push(Datagram { from, data: Bytes(data.to_vec()) });
                    match got.bytes {
                        0 => add(&[]),
                        bytes => buffer[..bytes].chunks(each).for_each(add),
                    }
                }
                _ => break Ok(None),
            },
        }
    };
    peek_at(before)?;
    result
}
