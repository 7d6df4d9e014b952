//! Requests of rtnetlink(7) about the stack of the calling thread, with errors as numbers.

use dormouse_kernel::CallError;
use dormouse_kernel::netlink::{Message, Protocol, Socket};
use rustix::io::Errno;

/// Requests all entries of a kind.
pub(super) fn ask(
    kind: u16,
    head: &[u8],
    each: impl FnMut(&[u8]) -> Option<()>,
) -> Result<(), Errno> {
    on_socket(|socket| socket.dump(kind, &Message::new(head), each))
}

/// Requests a change from the kernel.
pub(super) fn request(kind: u16, flags: u16, message: &Message) -> Result<(), Errno> {
    on_socket(|socket| socket.request(kind, flags, message))
}

/// Requests one entry; returns the part of the answer behind the header.
pub(super) fn answer(kind: u16, message: &Message) -> Result<Vec<u8>, Errno> {
    on_socket(|socket| socket.answer(kind, message))
}

fn on_socket<T>(act: impl FnOnce(&mut Socket) -> Result<T, CallError>) -> Result<T, Errno> {
    let done = Socket::open(Protocol::Route).and_then(|mut socket| act(&mut socket));
    done.map_err(|e| Errno::from_raw_os_error(e.errno()))
}
