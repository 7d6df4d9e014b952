//! Raw sockets, ping sockets and packet sockets: made by the program; packet sockets are bound by
//! the engine, which looks up the present numbers of devices.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};
use dormouse_record::{PacketSocket, RawSocket, Result};
use rustix::net::netdevice::name_to_index;

use super::plan::Plan;
use super::{net, open, socket};
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::stack;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    raw: &RawSocket,
) -> Result<Cell> {
    let cell = plan.cell();
    let family = if raw.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = raw.socket_type | libc::SOCK_CLOEXEC;
    let args = [Arg::from(family), Arg::from(kind), Arg::from(raw.protocol)];
    net::socket(plan, sequence, what, cell, args)?;
    for option in &raw.options {
        socket::option(plan, sequence, what, cell, option);
    }
    // ORDER: before a packet can arrive.
    socket::filter(plan, sequence, what, cell, &raw.options);
    for (call, address) in [(libc::SYS_bind, raw.address), (libc::SYS_connect, raw.peer)] {
        let Some(address) = address else { continue };
        let [at, length] = socket::address(plan, &address);
        sequence.call(what, Call::new(call, [cell.into(), at, length]));
    }
    open::set_flags(sequence, what, cell, raw.flags);
    Ok(cell)
}

pub(super) fn packet(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    packet: &PacketSocket,
) -> Result<Cell> {
    let cell = plan.cell();
    let kind = packet.socket_type | libc::SOCK_CLOEXEC;
    // Without a protocol the socket receives nothing.
    let args = [Arg::from(libc::AF_PACKET), Arg::from(kind), Arg::Number(0)];
    net::socket(plan, sequence, what, cell, args)?;
    for option in &packet.options {
        socket::option(plan, sequence, what, cell, option);
    }
    socket::filter(plan, sequence, what, cell, &packet.options);
    open::set_flags(sequence, what, cell, packet.flags);
    Ok(cell)
}

/// Binds a packet socket and its memberships. `copy` is a descriptor of it in this program.
pub(super) fn bind(copy: &OwnedFd, packet: &PacketSocket) -> std::result::Result<(), Errno> {
    const FANOUT: i32 = 18;
    let netns = stack::of_socket(copy)?;
    stack::inside_of(&netns, || {
        let socket = copy.as_fd();
        if packet.device.is_some() || packet.protocol != 0 {
            let device = packet.device.as_ref().map(|name| name_to_index(copy, name));
            call::bind_packet(socket, packet.protocol, device.transpose()?.unwrap_or(0))?;
        }
        for one in &packet.memberships {
            // struct packet_mreq: device, kind, length, 8 bytes of an address.
            let mut request = name_to_index(copy, &one.device)?.to_ne_bytes().to_vec();
            request.extend(one.kind.to_ne_bytes());
            request.extend((one.address.0.len() as u16).to_ne_bytes());
            request.extend(&one.address.0);
            request.resize(16, 0);
            let add = libc::PACKET_ADD_MEMBERSHIP;
            call::set_socket_option(socket, libc::SOL_PACKET, add, &request)?;
        }
        match packet.fanout {
            Some(fanout) => call::set_int_option(socket, libc::SOL_PACKET, FANOUT, fanout as i32),
            None => Ok(()),
        }
    })
}
