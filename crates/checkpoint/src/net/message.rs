//! Messages of rtnetlink(7): the requests, and how they are encoded.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::netlink::{dump, u16_at, u32_at};

/// Number 0.
const ROUTE: Option<Protocol> = None;
/// An attribute that has attributes.
const NESTED: u16 = 0x8000;

/// Creates an entry that must not exist yet.
pub(super) const NEW: u16 = 0x200 | 0x400;

/// The part of a message behind the netlink header.
pub(super) struct Body(Vec<u8>);

impl Body {
    pub(super) fn new(head: &[u8]) -> Self {
        let mut bytes = head.to_vec();
        bytes.resize(head.len().next_multiple_of(4), 0);
        Self(bytes)
    }

    /// The message of a device: `struct ifinfomsg` with these flags, of which `change` are set.
    pub(super) fn of_link(number: u32, flags: u32, change: u32) -> Self {
        Self::new([0, number, flags, change].map(u32::to_ne_bytes).as_flattened())
    }

    pub(super) fn with(mut self, kind: u16, value: &[u8]) -> Self {
        // An attribute is shorter than any message here.
        self.0.extend((value.len() as u16 + 4).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn with_text(self, kind: u16, text: &str) -> Self {
        self.with(kind, &[text.as_bytes(), &[0]].concat())
    }

    pub(super) fn with_inner(self, kind: u16, inner: &Self) -> Self {
        self.with(kind | NESTED, &inner.0)
    }
}

/// Requests all entries of a kind.
pub(super) fn ask(
    kind: u16,
    head: &[u8],
    each: impl FnMut(&[u8]) -> Option<()>,
) -> Result<(), Errno> {
    dump(ROUTE, kind, head, each)
}

/// Requests a change from the kernel.
pub(super) fn request(kind: u16, flags: u16, body: &Body) -> Result<(), Errno> {
    const ACKNOWLEDGED: u16 = 4;
    match send(kind, ACKNOWLEDGED | flags, body)? {
        (ERROR, _) => Ok(()),
        _ => Err(Errno::BADMSG),
    }
}

/// Requests one entry; returns the part of the answer behind the header.
pub(super) fn answer(kind: u16, body: &Body) -> Result<Vec<u8>, Errno> {
    match send(kind, 0, body)? {
        (ERROR, _) => Err(Errno::BADMSG),
        (_, answer) => Ok(answer),
    }
}

/// The kind of an answer that contains an error, or 0 for none.
const ERROR: u16 = 2;

/// Sends a request; returns the kind of the answer and the part behind the header, or the error in
/// it.
fn send(kind: u16, flags: u16, body: &Body) -> Result<(u16, Vec<u8>), Errno> {
    const REQUEST: u16 = 1;
    const HEAD: usize = 16;
    let socket = socket()?;
    let length = HEAD as u32 + body.0.len() as u32;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((REQUEST | flags).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(&body.0);
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 512];
    let (length, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    let answer = &answer[..length.min(answer.len())];
    let (kind, rest) = u16_at(answer, 4).zip(answer.get(HEAD..)).ok_or(Errno::BADMSG)?;
    // struct nlmsgerr: the negative error, 0 for none.
    match (kind, u32_at(rest, 0)) {
        (ERROR, None) => Err(Errno::BADMSG),
        (ERROR, Some(error)) if error != 0 => {
            Err(Errno::from_raw_os_error((error as i32).wrapping_neg()))
        }
        _ => Ok((kind, rest.to_vec())),
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, ROUTE)
}
