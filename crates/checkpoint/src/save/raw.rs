//! Raw sockets, ping sockets and packet sockets: their configuration, not the unread packets in
//! their receive queues. Those are lost, as packets may be.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::AsFd;

use dormouse_kernel::call;
use dormouse_record::{Bytes, PacketMembership, PacketSocket, RawSocket, Thing};
use rustix::io::Errno;
use rustix::net::netdevice::index_to_name;
use rustix::net::{
    AddressFamily, Protocol, SocketType, getpeername, getsockname, ipproto, sockopt,
};

use super::open::Open;
use super::refusal::Reason;
use super::survey::Survey;
use super::{diag, option};
use crate::stack;

pub(super) fn save(
    survey: &mut Survey<'_>,
    open: &Open<'_>,
    domain: AddressFamily,
    (kind, protocol): (SocketType, i32),
) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a raw socket: {e}");
    let of = match kind {
        SocketType::RAW => NonZeroU32::new(protocol as u32).map(Protocol::from_raw),
        // A ping socket needs a permission (ping_group_range); its options are those of a UDP
        // socket.
        _ => Some(ipproto::UDP),
    };
    let socket = option::Socket {
        copy: open.copy.as_fd(),
        net: open.net,
        domain,
        kind,
        protocol: of,
        has_connection: false,
    };
    let options = option::read(&mut survey.fresh, &socket)?;
    let address = getsockname(&open.copy).and_then(SocketAddr::try_from).map_err(failed)?;
    let is_bound = match kind {
        SocketType::RAW => !address.ip().is_unspecified(), // the port field is the protocol
        _ => address.port() != 0,
    };
    let peer = match getpeername(&open.copy) {
        Ok(peer) => peer.map(SocketAddr::try_from).transpose().map_err(failed)?,
        // The kernel also returns this for a socket that is connected to port 0.
        Err(Errno::NOTCONN) => connected(open, kind).map_err(failed)?,
        Err(e) => return Err(failed(e)),
    };
    Ok(Thing::RawSocket(RawSocket {
        v6: domain == AddressFamily::INET6,
        socket_type: kind.as_raw() as i32,
        protocol,
        flags: open.flags(),
        address: Some(address).filter(|_| is_bound),
        peer,
        options,
    }))
}

/// The address that it is connected to, by the kernel's table.
fn connected(open: &Open<'_>, kind: SocketType) -> Result<Option<SocketAddr>, Errno> {
    let table = if kind == SocketType::RAW { "raw" } else { "icmp" };
    let netns = stack::of_socket(&open.copy)?;
    let ends = stack::address(&netns, table, open.stat.st_ino)?;
    Ok(ends.map(|[_, peer]| peer).filter(|peer| !peer.ip().is_unspecified()))
}

/// A packet socket, as sock_diag(7) reports it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Entry {
    socket_type: u8,
    protocol: u16,
    /// The number of the device that it is bound to.
    device: u32,
    /// Device number, kind and address of each membership.
    memberships: Vec<(u32, u16, Vec<u8>)>,
    has_ring: bool,
    has_fanout: bool,
}

pub(super) fn packet(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a packet socket: {e}");
    let kind = sockopt::socket_type(&open.copy).map_err(failed)?;
    if ![SocketType::RAW, SocketType::DGRAM].contains(&kind) {
        return Err("a packet socket of type SOCK_PACKET, which is not saved yet".into());
    }
    let netns = stack::of_socket(&open.copy).map_err(failed)?;
    let (inode, copy) = (open.stat.st_ino, &open.copy);
    let looked = stack::inside_of(&netns, || {
        let Some(entry) = query(inode)? else { return Ok(None) };
        let name = |index| index_to_name(copy, index);
        let device = if entry.device == 0 { None } else { Some(name(entry.device)?) };
        let mut memberships = Vec::new();
        for (index, kind, address) in &entry.memberships {
            let (device, address) = (name(*index)?, Bytes(address.clone()));
            memberships.push(PacketMembership { device, kind: *kind, address });
        }
        Ok(Some((entry, device, memberships)))
    });
    let (entry, device, memberships) =
        looked.map_err(failed)?.ok_or("a packet socket of another network namespace")?;
    if entry.has_ring {
        return Err(
            "a packet socket with a ring in shared memory (PACKET_RX_RING, PACKET_TX_RING), \
                    which is not saved yet"
                .into(),
        );
    }
    let fanout = entry.has_fanout.then(|| fanout(open)).transpose().map_err(failed)?;
    const BY_PROGRAM: u32 = 6;
    if fanout.is_some_and(|fanout| fanout >> 16 & 0xff >= BY_PROGRAM) {
        return Err("a packet socket of a group that a program deals out to (PACKET_FANOUT), \
                    which is not saved yet"
            .into());
    }
    let socket = option::Socket {
        copy: open.copy.as_fd(),
        net: open.net,
        domain: AddressFamily::PACKET,
        kind,
        protocol: None,
        has_connection: false,
    };
    Ok(Thing::PacketSocket(PacketSocket {
        socket_type: kind.as_raw() as i32,
        protocol: entry.protocol,
        device,
        flags: open.flags(),
        memberships,
        fanout,
        options: option::read(&mut survey.fresh, &socket)?,
    }))
}

/// The fanout group that it belongs to: id, type and flags.
fn fanout(open: &Open<'_>) -> Result<u32, Errno> {
    const FANOUT: i32 = 18;
    Ok(call::int_option(open.copy.as_fd(), libc::SOL_PACKET, FANOUT)? as u32)
}

/// Queries the packet socket with that inode in the calling thread's network namespace.
fn query(inode: u64) -> Result<Option<Entry>, Errno> {
    /// PACKET_SHOW_INFO, _MCLIST, _RING_CFG, _FANOUT.
    const SHOW: u32 = 0xf;
    // struct packet_diag_req: family, protocol, inode, what to show, a cookie.
    let mut request = vec![libc::AF_PACKET as u8, 0, 0, 0];
    for word in [0, SHOW, u32::MAX, u32::MAX] {
        request.extend(word.to_ne_bytes());
    }
    let mut found = None;
    diag::dump(&request, |answer| {
        if u64::from(diag::u32_at(answer, 4)?) == inode {
            found = Some(entry(answer)?);
        }
        Some(())
    })?;
    Ok(found)
}

/// Reads `struct packet_diag_msg` and its attributes.
fn entry(answer: &[u8]) -> Option<Entry> {
    const HEAD_BYTES: usize = 16;
    let mut entry = Entry {
        socket_type: *answer.get(1)?,
        protocol: diag::u16_at(answer, 2)?,
        ..Entry::default()
    };
    for (kind, value) in diag::attributes(answer.get(HEAD_BYTES..)?)? {
        match kind {
            // struct packet_diag_info begins with the device.
            0 => entry.device = diag::u32_at(value, 0)?,
            // struct packet_diag_mclist: device, count, kind, length, 32 bytes of an address.
            1 => {
                for one in value.chunks_exact(44) {
                    let length = usize::from(diag::u16_at(one, 10)?);
                    let address = one[12..].get(..length)?.to_vec();
                    entry.memberships.push((diag::u32_at(one, 0)?, diag::u16_at(one, 8)?, address));
                }
            }
            2 | 3 => entry.has_ring = true,
            4 => entry.has_fanout = true,
            _ => {}
        }
    }
    Some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_about_a_packet_socket_is_read_or_refused() {
        let mut answer = vec![libc::AF_PACKET as u8, 3, 3, 0];
        answer.extend([0; 12]);
        let mut attribute = |kind: u16, value: &[u8]| {
            answer.extend((value.len() as u16 + 4).to_ne_bytes());
            answer.extend(kind.to_ne_bytes());
            answer.extend(value);
        };
        attribute(0, &[7, 0, 0, 0, 0, 0, 0, 0]);
        let mut membership = [0; 44];
        membership[0] = 7;
        membership[8] = 1;
        membership[10] = 6;
        membership[12] = 9;
        attribute(1, &membership);
        attribute(4, &[0; 4]);
        let expected = Entry {
            socket_type: 3,
            protocol: 3,
            device: 7,
            memberships: vec![(7, 1, vec![9, 0, 0, 0, 0, 0])],
            has_ring: false,
            has_fanout: true,
        };
        assert_eq!(entry(&answer), Some(expected));
        // A length beyond the address.
        answer[16 + 12 + 4 + 10] = 33;
        assert_eq!(entry(&answer), None);
    }
}
