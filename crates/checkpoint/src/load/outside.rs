//! Sockets that are reachable from outside, made by a process of the engine in place of the
//! container: in the network namespace and the control group of the container, which make a socket
//! belong to it.
//!
//! These sockets equal those of [`super::socket::listener`] and [`super::udp::make`] in the
//! container, and are held while the container sleeps.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};
use dormouse_record::{Bytes, Error, Listener, Records, Result, SocketOption, Thing, UdpSocket};
use rustix::fs::OFlags;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use super::open::SETTABLE;
use super::socket::{attach_filter, moved};

/// Makes all sockets; each with the number of its object ([`super::Allowed::held`]). `addresses`
/// are those of [`super::Allowed::addresses`].
///
/// Data that an earlier socket of the same name had received, and that was not read, is lost.
pub fn outside_sockets(
    records: &Records,
    addresses: &[(IpAddr, IpAddr)],
) -> Result<Vec<(u32, OwnedFd)>> {
    let mut all = Vec::new();
    for (index, object) in (0..).zip(&records.objects) {
        let made = match &object.thing {
            Thing::Listener(it) => listener(it, addresses),
            Thing::UdpSocket(it) => udp(it, addresses),
            // A connection that is not held has ended.
            _ => continue,
        };
        let made = made.map_err(|source| {
            let what = format!("object {index} ({})", object.thing.name());
            Error::Restore { what, call: "its making".into(), source }
        })?;
        all.push((index, made));
    }
    Ok(all)
}

fn listener(it: &Listener, addresses: &[(IpAddr, IpAddr)]) -> std::result::Result<OwnedFd, Errno> {
    let socket = new(it.v6, SocketType::STREAM)?;
    let reuse = |value: i32| SocketOption {
        level: libc::SOL_SOCKET,
        name: libc::SO_REUSEADDR,
        value: Bytes(value.to_ne_bytes().to_vec()),
    };
    // Connections of the earlier socket may still be in TIME_WAIT under its address.
    set(&socket, &reuse(1))?;
    it.options.iter().try_for_each(|option| set(&socket, option))?;
    attach_filter(&socket, &it.options)?;
    bind(&socket, &moved(it.address, addresses))?;
    listen(&socket, it.backlog)?;
    if !it.options.iter().any(|o| o.is(libc::SOL_SOCKET, libc::SO_REUSEADDR)) {
        set(&socket, &reuse(0))?;
    }
    flags(socket, it.flags)
}

fn udp(it: &UdpSocket, addresses: &[(IpAddr, IpAddr)]) -> std::result::Result<OwnedFd, Errno> {
    let socket = new(it.v6, SocketType::DGRAM)?;
    it.options.iter().try_for_each(|option| set(&socket, option))?;
    attach_filter(&socket, &it.options)?;
    if let Some(address) = &it.address {
        bind(&socket, &moved(*address, addresses))?;
    }
    if let Some(peer) = &it.peer {
        connect(&socket, &moved(*peer, addresses))?;
    }
    match it.shut {
        1 => rustix::net::shutdown(&socket, Shutdown::Read)?,
        2 => rustix::net::shutdown(&socket, Shutdown::Write)?,
        3 => rustix::net::shutdown(&socket, Shutdown::Both)?,
        _ => {}
    }
    flags(socket, it.flags)
}

fn new(v6: bool, kind: SocketType) -> std::result::Result<OwnedFd, Errno> {
    let family = if v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    socket_with(family, kind, SocketFlags::CLOEXEC, None)
}

fn set(socket: &OwnedFd, option: &SocketOption) -> std::result::Result<(), Errno> {
    if option.is_about_filter() {
        return Ok(());
    }
    call::set_socket_option(socket.as_fd(), option.level, option.name, &option.value.0)
}

fn flags(socket: OwnedFd, flags: u32) -> std::result::Result<OwnedFd, Errno> {
    let flags = OFlags::from_bits_retain(flags & SETTABLE as u32);
    rustix::fs::fcntl_setfl(&socket, flags).map(|()| socket)
}
