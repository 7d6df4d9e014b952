//! Tables of the kernel, by netlink(7), of the network namespace of the calling thread.

use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Requests all entries of a table. `request` is the part of the message of this `kind` behind the
/// netlink header. `each` is called with every answer, without that header, and returns `None` for
/// a malformed one.
pub(crate) fn dump(
    protocol: Option<Protocol>,
    kind: u16,
    request: &[u8],
    mut each: impl FnMut(&[u8]) -> Option<()>,
) -> Result<(), Errno> {
    const REQUEST_DUMP: u16 = 0x301;
    const DONE: u16 = 3;
    const ERROR: u16 = 2;
    /// `struct nlmsghdr`.
    const HEAD_BYTES: usize = 16;
    let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, protocol)?;
    let length = HEAD_BYTES + request.len();
    let mut message = (length as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(REQUEST_DUMP.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(request);
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        let (n, _) = rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..n];
        while let (Some(length), Some(kind)) = (u32_at(rest, 0), u16_at(rest, 4)) {
            let length = length as usize;
            if kind == DONE {
                return Ok(());
            }
            if kind == ERROR || length < HEAD_BYTES || length > rest.len() {
                return Err(Errno::BADMSG);
            }
            each(&rest[HEAD_BYTES..length]).ok_or(Errno::BADMSG)?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// The attributes of an answer: kind and value of each. `None` if one is longer than the rest.
pub(crate) fn attributes(mut rest: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut all = Vec::new();
    while let (Some(size), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let size = usize::from(size).max(4);
        all.push((kind, rest.get(4..size)?));
        rest = rest.get(size.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(all)
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|b| u16::from_ne_bytes([b[0], b[1]]))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}
