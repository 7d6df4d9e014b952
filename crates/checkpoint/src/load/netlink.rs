//! Netlink sockets: bound to their recorded port, unless it is taken, and members of their recorded
//! groups.

use dormouse_record::{Netlink, Result};

use super::plan::Plan;
use super::{net, open, socket};
use crate::inject::program::{Arg, Call, Cell, Sequence};

const SOL_NETLINK: i32 = 270;
const NETLINK_ADD_MEMBERSHIP: i32 = 1;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    it: &Netlink,
) -> Result<Cell> {
    let cell = plan.cell();
    let kind = it.socket_type | libc::SOCK_CLOEXEC;
    let args = [Arg::from(libc::AF_NETLINK), Arg::from(kind), Arg::from(it.protocol)];
    net::socket(plan, sequence, what, cell, args)?;
    for option in &it.options {
        socket::option(plan, sequence, what, cell, option);
    }
    let mut name = |call: i64, port: u32, groups: u32| {
        // struct sockaddr_nl: family, padding, port, groups.
        let mut bytes = (libc::AF_NETLINK as u16).to_ne_bytes().to_vec();
        bytes.extend([0; 2]);
        bytes.extend(port.to_ne_bytes());
        bytes.extend(groups.to_ne_bytes());
        let at = plan.builder.data(&bytes);
        let args = [cell.into(), at.into(), Arg::Number(bytes.len() as u64)];
        Call::new(call, args)
    };
    if it.port != 0 {
        // In a shared stack another container may have the port by now: the kernel assigns another,
        // as it would have at first. A second bind of a bound socket fails, which is ignored.
        sequence.call(what, name(libc::SYS_bind, it.port, 0).lenient());
        sequence.call(what, name(libc::SYS_bind, 0, 0).lenient());
    }
    if it.peer != (0, 0) {
        sequence.call(what, name(libc::SYS_connect, it.peer.0, it.peer.1));
    }
    for group in &it.groups {
        let at = plan.builder.data(&group.to_ne_bytes());
        let args = [
            cell.into(),
            Arg::from(SOL_NETLINK),
            Arg::from(NETLINK_ADD_MEMBERSHIP),
            at.into(),
            Arg::Number(4),
        ];
        sequence.call(what, Call::new(libc::SYS_setsockopt, args));
    }
    open::set_flags(sequence, what, cell, it.flags);
    Ok(cell)
}
