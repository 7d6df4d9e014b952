//! Tables of sockets, by sock_diag(7), of the network namespace of the calling thread.

use rustix::io::Errno;
use rustix::net::netlink;

pub(super) use crate::netlink::{attributes, u16_at, u32_at};

/// Requests all sockets of a family. `request` is the family's own (`struct unix_diag_req` and its
/// like). `each` is called with every answer, without the netlink header, and returns `None` for a
/// malformed one.
pub(super) fn dump(request: &[u8], each: impl FnMut(&[u8]) -> Option<()>) -> Result<(), Errno> {
    const BY_FAMILY: u16 = 20;
    crate::netlink::dump(Some(netlink::SOCK_DIAG), BY_FAMILY, request, each)
}
