//! Sockets: made in the container's own cgroup and network, so that its identity is theirs.

use std::net::SocketAddr;

use super::{Plan, file, object};
use crate::error::Result;
use crate::format::{Listener, Thing, UnixPair};
use crate::inject::program::{Arg, Call, Cell, Sequence};

fn option(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    (level, name, value): (i32, i32, i32),
) {
    let at = plan.builder.data(&value.to_ne_bytes());
    let args = [cell.into(), Arg::from(level), Arg::from(name), at.into(), Arg::Number(4)];
    sequence.call(what, Call::new(libc::SYS_setsockopt, args));
}

/// `struct sockaddr_in` or `sockaddr_in6`.
fn sockaddr(address: &SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(28);
    match address {
        SocketAddr::V4(v4) => {
            bytes.extend((libc::AF_INET as u16).to_ne_bytes());
            bytes.extend(v4.port().to_be_bytes());
            bytes.extend(v4.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            bytes.extend((libc::AF_INET6 as u16).to_ne_bytes());
            bytes.extend(v6.port().to_be_bytes());
            bytes.extend(v6.flowinfo().to_be_bytes());
            bytes.extend(v6.ip().octets());
            bytes.extend(v6.scope_id().to_ne_bytes());
        }
    }
    bytes
}

pub(super) fn listener(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    listener: &Listener,
) -> Result<Cell> {
    let what = format!("{what} at {}", listener.address);
    let cell = plan.cell()?;
    let family = if listener.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let args =
        [Arg::from(family), Arg::from(libc::SOCK_STREAM | libc::SOCK_CLOEXEC), Arg::Number(0)];
    sequence.call_into(what.clone(), cell, Call::new(libc::SYS_socket, args));
    // Connections of its last life may still be fading away under its address.
    let reuse = (libc::SOL_SOCKET, libc::SO_REUSEADDR);
    option(plan, sequence, &what, cell, (reuse.0, reuse.1, 1));
    for one in &listener.options {
        option(plan, sequence, &what, cell, *one);
    }
    let address = sockaddr(&listener.address);
    let length = address.len() as u64;
    let at = plan.builder.data(&address);
    let args = [cell.into(), at.into(), length.into()];
    sequence.call(what.clone(), Call::new(libc::SYS_bind, args));
    let args = [cell.into(), Arg::from(listener.backlog)];
    sequence.call(what.clone(), Call::new(libc::SYS_listen, args));
    if !listener.options.iter().any(|(level, name, _)| (*level, *name) == reuse) {
        option(plan, sequence, &what, cell, (reuse.0, reuse.1, 0));
    }
    file::set_flags(sequence, &what, cell, listener.flags);
    Ok(cell)
}

pub(super) fn pair(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    pair: &UnixPair,
) -> Result<()> {
    let cells = [plan.cell()?, plan.cell()?];
    let at = plan.builder.pointer(cells[0]);
    let kind = pair.socket_type | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let args = [Arg::from(libc::AF_UNIX), Arg::from(kind), Arg::Number(0), at];
    sequence.call(what, Call::new(libc::SYS_socketpair, args));
    for side in 0..2 {
        for message in &pair.received[side] {
            // What one has received, the other has sent.
            let bytes = message.0.len() as u64;
            let at = plan.builder.data(&message.0);
            let args = [cells[1 - side].into(), at.into(), bytes.into()];
            sequence.call(what, Call::new(libc::SYS_write, args).returns(bytes));
        }
    }
    for (cell, options) in cells.into_iter().zip(&pair.options) {
        for (name, value) in options {
            option(plan, sequence, what, cell, (libc::SOL_SOCKET, *name, *value));
        }
    }
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::UnixEnd(end) = &object.thing else { continue };
        if end.pair == index {
            let cell = object::lift(plan, sequence, what, cells[end.side])?;
            file::set_flags(sequence, what, cell, end.flags);
            plan.cells[n] = Some(cell);
        }
    }
    Ok(())
}
