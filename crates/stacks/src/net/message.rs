//! Requests of rtnetlink(7) about the stack of the calling thread.

use dormouse_kernel::CallError;
use dormouse_kernel::error::Result;
use dormouse_kernel::netlink::{Message, Protocol, Socket};

/// Requests all entries of a kind.
pub(super) fn list(kind: u16, head: &[u8], each: impl FnMut(&[u8]) -> Option<()>) -> Result<()> {
    Socket::open(Protocol::Route)?.dump(kind, &Message::new(head), each)
}

/// Requests a change from the kernel.
pub(super) fn request(kind: u16, flags: u16, message: &Message) -> Result<()> {
    Socket::open(Protocol::Route)?.request(kind, flags, message)
}

/// Requests one entry; returns the part of the answer behind the header.
pub(super) fn answer(kind: u16, message: &Message) -> Result<Vec<u8>> {
    Socket::open(Protocol::Route)?.answer(kind, message)
}

/// The error of a request that needs a missing device.
pub(super) fn missing(device: u32) -> CallError {
    CallError::new("netlink", format!("the device {device} of a pair"), libc::ENODEV)
}
