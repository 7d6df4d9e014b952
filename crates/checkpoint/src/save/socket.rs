//! Sockets of the internet families; unix sockets have a separate module.

use std::os::fd::AsFd;

use dormouse_kernel::call;
use dormouse_record::{Listener, Thing};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, getsockname, sockopt};

use super::open::Open;
use super::refusal::Reason;
use super::survey::Survey;
use super::{address, netlink, option, raw, tcp, udp, unix};

pub(crate) fn is_socket(open: &Open<'_>) -> bool {
    open.link.starts_with("socket:[")
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let domain = sockopt::socket_domain(&open.copy).map_err(|e| format!("a socket: {e}"))?;
    match domain {
        AddressFamily::UNIX => unix::save(survey, open),
        AddressFamily::INET | AddressFamily::INET6 => inet(survey, open, domain),
        AddressFamily::NETLINK => netlink::save(survey, open),
        AddressFamily::PACKET => raw::packet(survey, open),
        other => Err(format!("a socket of family {}, which is not saved yet", other.as_raw())),
    }
}

fn inet(survey: &mut Survey<'_>, open: &Open<'_>, domain: AddressFamily) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a socket: {e}");
    let option = |level, name| call::int_option(open.copy.as_fd(), level, name);
    let protocol = option(libc::SOL_SOCKET, libc::SO_PROTOCOL).map_err(failed)?;
    let kind = sockopt::socket_type(&open.copy).map_err(failed)?;
    if !survey.holds(open) && [libc::IPPROTO_TCP, libc::IPPROTO_UDP].contains(&protocol) {
        let (socket, is_tcp) = (open.copy.as_fd(), protocol == libc::IPPROTO_TCP);
        option::refuse_unreported(&mut survey.fresh, socket, open.net, is_tcp)?;
    }
    match (kind, protocol) {
        (SocketType::STREAM, libc::IPPROTO_TCP) => {}
        (SocketType::DGRAM, libc::IPPROTO_UDP) => return udp::save(survey, open, domain),
        (SocketType::RAW, _) | (SocketType::DGRAM, libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6) => {
            return raw::save(survey, open, domain, (kind, protocol));
        }
        _ => return Err(format!("a socket of protocol {protocol}, which is not saved yet")),
    }
    let mut info = [0; 32];
    call::socket_option(open.copy.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)
        .map_err(failed)?;
    // struct tcp_info: for a listener, tcpi_unacked (at 24) is the number of pending connections
    // and tcpi_sacked (at 28) is the backlog. For a connection, tcpi_unacked is the number of
    // unacknowledged segments.
    let number = |at: usize| info[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
    const LISTEN: u8 = 10;
    match info[0] {
        // A held listener keeps its queue.
        LISTEN if survey.holds(open) => {}
        LISTEN => tcp::queue(survey, open, number(24))?,
        state => return tcp::save(survey, open, domain, state, number(24)),
    }
    let address = getsockname(&open.copy).map_err(failed)?;
    let address = std::net::SocketAddr::try_from(address).map_err(failed)?;
    let socket = option::Socket {
        copy: open.copy.as_fd(),
        net: open.net,
        domain,
        kind,
        protocol: None,
        has_connection: false,
    };
    let options = option::read(&mut survey.fresh, &socket)?;
    Ok(Thing::Listener(Listener {
        address,
        v6: domain == AddressFamily::INET6,
        free: address::is_of_no_device(&open.copy, address, &options),
        backlog: number(28).min(i32::MAX as u32) as i32,
        options,
        flags: open.flags(),
        // Filled in once everything is stopped.
        waiting: Vec::new(),
    }))
}
