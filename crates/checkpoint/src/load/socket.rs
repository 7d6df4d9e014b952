//! Sockets: made in the container's own cgroup and network, which they belong to.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};
use dormouse_record::{Bytes, Listener, Object, Records, Result, SocketOption, Thing};

use super::plan::Plan;
use super::{net, open};
use crate::inject::program::{Arg, Call, Cell, Sequence};

pub(super) fn option(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    option: &SocketOption,
) {
    if option.is_about_filter() {
        return;
    }
    if let Some(earlier) = earlier_linger(option) {
        set(plan, sequence, what, cell, &earlier);
    }
    set(plan, sequence, what, cell, option);
}

/// The setting before SO_LINGER was switched off: the kernel takes the time only of an option that is on, and keeps
/// it afterwards.
fn earlier_linger(option: &SocketOption) -> Option<SocketOption> {
    let is_linger = option.is(libc::SOL_SOCKET, libc::SO_LINGER);
    match option.value.0.as_chunks::<4>().0 {
        [on, time] if is_linger && *on == [0; 4] && *time != [0; 4] => {
            let value = Bytes([1i32.to_ne_bytes(), *time].concat());
            Some(SocketOption { value, ..*option })
        }
        _ => None,
    }
}

fn set(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    option: &SocketOption,
) {
    let at = plan.builder.data(&option.value.0);
    let length = option.value.0.len() as u64;
    let args = [cell.into(), option.level.into(), option.name.into(), at.into(), length.into()];
    let call = Call::new(libc::SYS_setsockopt, args);
    // The kernel loads the module for root of the host alone.
    let what = match option.is(libc::IPPROTO_TCP, libc::TCP_CONGESTION) {
        true => {
            let name = String::from_utf8_lossy(&option.value.0);
            let name = name.trim_end_matches('\0');
            format!("{what} with the congestion control '{name}' (module tcp_{name})")
        }
        false => what.to_owned(),
    };
    sequence.call(what, if option.may_be_refused() { call.lenient() } else { call });
}

/// An option that is an int.
fn int(level: i32, name: i32, value: i32) -> SocketOption {
    SocketOption { level, name, value: Bytes(value.to_ne_bytes().to_vec()) }
}

/// Binds a socket to the address of its record, with the options for the time of the bind that its program
/// has taken back since.
pub(super) fn bind(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    (to, free, options): (&SocketAddr, bool, &[SocketOption]),
) {
    // An address without a port (IP_BIND_ADDRESS_NO_PORT), which gets one when it is connected.
    let wanted = [(libc::IP_FREEBIND, free), (libc::IP_BIND_ADDRESS_NO_PORT, to.port() == 0)];
    let has = |name| options.iter().any(|one| one.is(libc::IPPROTO_IP, name));
    let for_a_while: Vec<i32> =
        wanted.iter().filter(|(name, is)| *is && !has(*name)).map(|(name, _)| *name).collect();
    for name in &for_a_while {
        option(plan, sequence, what, cell, &int(libc::IPPROTO_IP, *name, 1));
    }
    let [at, length] = address(plan, to);
    sequence.call(what, Call::new(libc::SYS_bind, [cell.into(), at, length]));
    for name in &for_a_while {
        option(plan, sequence, what, cell, &int(libc::IPPROTO_IP, *name, 0));
    }
}

/// Sets the packet filter of a socket, which [`option`] does not.
pub(super) fn filter(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    options: &[SocketOption],
) {
    for one in options.iter().filter(|one| one.is_about_filter()) {
        let mut one = one.clone();
        if one.is_filter() {
            // struct sock_fprog: the number of instructions, and their address.
            let code = plan.builder.data(&one.value.0);
            let instructions = one.value.0.len() as u64 / 8;
            one.value = Bytes([instructions, code].map(u64::to_ne_bytes).concat());
        }
        set(plan, sequence, what, cell, &one);
    }
}

/// The same by a descriptor of this program.
pub(super) fn attach_filter(
    socket: &OwnedFd,
    options: &[SocketOption],
) -> std::result::Result<(), Errno> {
    let mut all = options.iter().filter(|one| one.is_about_filter());
    all.try_for_each(|one| match one.is_filter() {
        true => call::attach_filter(socket.as_fd(), &one.value.0),
        false => call::set_socket_option(socket.as_fd(), one.level, one.name, &one.value.0),
    })
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

/// The same in data, and its length.
pub(super) fn address(plan: &mut Plan<'_>, address: &SocketAddr) -> [Arg; 2] {
    let bytes = sockaddr(address);
    [plan.builder.data(&bytes).into(), Arg::Number(bytes.len() as u64)]
}

pub(super) fn listener(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    listener: &Listener,
) -> Result<Cell> {
    let what = format!("{what} at {}", listener.address);
    let cell = plan.cell();
    let family = if listener.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let args =
        [Arg::from(family), Arg::from(libc::SOCK_STREAM | libc::SOCK_CLOEXEC), Arg::Number(0)];
    net::socket(plan, sequence, &what, cell, args)?;
    // Connections of the earlier socket may still be in TIME_WAIT under its address.
    let reuse = |value| int(libc::SOL_SOCKET, libc::SO_REUSEADDR, value);
    option(plan, sequence, &what, cell, &reuse(1));
    for one in &listener.options {
        option(plan, sequence, &what, cell, one);
    }
    let shares = SocketOption { name: libc::SO_REUSEPORT, ..reuse(1) };
    let is_another = |other: &&Object| {
        let address = |object: &Object| match &object.thing {
            Thing::Listener(it) => Some((it.address, object.net)),
            _ => None,
        };
        address(other) == Some((listener.address, plan.net))
    };
    let has_its_own = |o: &SocketOption| o.is(libc::SOL_SOCKET, libc::SO_REUSEPORT);
    // One that shares its address without the option had it while it was bound.
    let had_it = !listener.options.iter().any(has_its_own)
        && plan.records.objects.iter().filter(is_another).count() > 1;
    if had_it {
        option(plan, sequence, &what, cell, &shares);
    }
    let bound = (&listener.address, listener.free, &*listener.options);
    bind(plan, sequence, &what, cell, bound);
    let args = [cell.into(), Arg::from(listener.backlog)];
    sequence.call(what.clone(), Call::new(libc::SYS_listen, args));
    if !listener.options.iter().any(|o| o.is(libc::SOL_SOCKET, libc::SO_REUSEADDR)) {
        option(plan, sequence, &what, cell, &reuse(0));
    }
    if had_it {
        let none = SocketOption { name: libc::SO_REUSEPORT, ..reuse(0) };
        option(plan, sequence, &what, cell, &none);
    }
    open::set_flags(sequence, &what, cell, listener.flags);
    Ok(cell)
}

/// Replaces the addresses of another container in the addresses of sockets.
pub fn move_to(records: &mut Records, addresses: &[(IpAddr, IpAddr)]) {
    for object in records.objects.iter_mut().filter(|object| object.net.is_none()) {
        let all: Vec<&mut SocketAddr> = match &mut object.thing {
            Thing::Listener(socket) => vec![&mut socket.address],
            Thing::TcpSocket(socket) => socket.address.iter_mut().collect(),
            Thing::UdpSocket(socket) => {
                let senders = socket.received.iter_mut().map(|datagram| &mut datagram.from);
                senders.chain(&mut socket.address).chain(&mut socket.peer).collect()
            }
            _ => continue,
        };
        for address in all {
            *address = moved(*address, addresses);
        }
    }
}

/// The replacement of an address.
pub(super) fn moved(mut address: SocketAddr, addresses: &[(IpAddr, IpAddr)]) -> SocketAddr {
    let own = addresses.iter().find(|(other, _)| *other == address.ip());
    if let Some((_, own)) = own {
        address.set_ip(*own);
    }
    address
}
