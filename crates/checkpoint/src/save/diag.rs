//! Tables of sockets, by sock_diag(7), of the network namespace of the calling thread.

use dormouse_kernel::netlink::{Message, Protocol, Socket};
pub(super) use dormouse_kernel::netlink::{attributes, u16_at, u32_at};
use rustix::io::Errno;

/// Requests all sockets of a family. `request` is the family's own (`struct unix_diag_req` and its
/// like). `each` is called with every answer, without the netlink header, and returns `None` for a
/// malformed one.
pub(super) fn dump(request: &[u8], each: impl FnMut(&[u8]) -> Option<()>) -> Result<(), Errno> {
    const BY_FAMILY: u16 = 20;
    let asked = Socket::open(Protocol::SocketDiagnosis)
        .and_then(|mut socket| socket.dump(BY_FAMILY, &Message::new(request), each));
    asked.map_err(|e| Errno::from_raw_os_error(e.errno()))
}
