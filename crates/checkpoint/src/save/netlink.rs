//! Netlink sockets: their addresses and groups. Unread messages are about the network as it was, so
//! the receive queue must be empty.

use std::os::fd::AsFd;

use dormouse_kernel::call;
use dormouse_record::{Netlink, Thing};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, getpeername, getsockname, recv, sockopt};

use super::open::Open;
use super::option;
use super::refusal::Reason;
use super::survey::Survey;

const SOL_NETLINK: i32 = 270;

const NETLINK_LIST_MEMBERSHIPS: i32 = 9;

/// LIMIT: bytes of a list of groups. The kernel has a few dozen, and generic families their own.
const GROUPS_BYTES_MAX: usize = 512;

pub(super) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a netlink socket: {e}");
    let kind = sockopt::socket_type(&open.copy).map_err(failed)?;
    let protocol = sockopt::socket_protocol(&open.copy).map_err(failed)?;
    let socket = option::Socket {
        copy: open.copy.as_fd(),
        net: open.net,
        domain: AddressFamily::NETLINK,
        kind,
        protocol,
        has_connection: false,
    };
    let options = option::read(&mut survey.fresh, &socket)?;
    let mut byte = [0];
    match recv(&open.copy, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN) => {}
        Err(e) => return Err(failed(e)),
        Ok(_) => return Err("a netlink socket with unread messages".into()),
    }
    let own = getsockname(&open.copy).and_then(SocketAddrNetlink::try_from).map_err(failed)?;
    let peer = getpeername(&open.copy).map_err(failed)?;
    let peer = peer.map(SocketAddrNetlink::try_from).transpose().map_err(failed)?;
    Ok(Thing::Netlink(Netlink {
        socket_type: kind.as_raw() as i32,
        protocol: protocol.map_or(0, |p| p.as_raw().get() as i32),
        flags: open.flags(),
        port: own.pid(),
        groups: groups(open).map_err(failed)?,
        peer: peer.map_or((0, 0), |peer| (peer.pid(), peer.groups())),
        options,
    }))
}

/// The groups that it is a member of, from the kernel's bit set.
fn groups(open: &Open<'_>) -> Result<Vec<u32>, Errno> {
    let mut bits = [0; GROUPS_BYTES_MAX];
    let socket = open.copy.as_fd();
    let length = call::socket_option(socket, SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, &mut bits)?;
    // The length is that of all groups, and exceeds a buffer that is too small.
    let bits = bits.get(..length).ok_or(Errno::OVERFLOW)?;
    let is_set = |n: &u32| bits[*n as usize / 8] & 1 << (n % 8) != 0;
    Ok((0..length as u32 * 8).filter(is_set).map(|n| n + 1).collect())
}
