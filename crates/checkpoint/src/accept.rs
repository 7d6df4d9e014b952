//! Connections that nobody has accepted: the queue of a TCP socket that listens.
//!
//! Nothing tells what such a connection is but accepting it, and nothing puts it back. So whoever
//! saves takes all of them out while everything stands still, reads them like any other and closes
//! them without a word ([`crate::save`]); whoever restores, or lets the processes go on after all,
//! has the kernel make them anew ([`put`]): a handshake that it has not seen is vouched for by a
//! program ([`dormouse_bpf::handshake`]) and ends with the sequence numbers it had; then comes what
//! the peer had sent, and its end. Our side has said nothing yet, or somebody would have accepted
//! it. In between, the packets of the peer are dropped ([`crate::quiet`]).
//!
//! LIMIT: a connection that its peer has reset is none any more: nobody will accept it. Whoever is
//! killed between taking them out and putting them back takes them along.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dormouse_bpf::handshake::{self, Agreed, Handshakes};
use dormouse_kernel::{Errno, call};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use crate::format::{Connection, TcpState, Waiting};
use crate::packet::{self, Payload};
use crate::save::tcp::BUFFER_LOCK;
use crate::stack::{self, Ends};
use crate::{error, quiet};

/// Flags of a segment.
pub(crate) const FIN: u8 = 1;
const PUSH: u8 = 8;
pub(crate) const ACKNOWLEDGES: u8 = 16;

/// How long the kernel may take to have a packet of the loopback device where it goes.
const ARRIVES_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of what is sent again at once.
const SEGMENT_BYTES: usize = 8 << 10;

/// Whether connections can be put back in the stack of the calling thread, and why not.
pub(crate) fn supported() -> Result<(), String> {
    static LOADS: OnceLock<Result<(), String>> = OnceLock::new();
    LOADS.get_or_init(|| handshake::supported().map_err(|e| e.to_string())).clone()?;
    // The kernel takes a program's word only where it takes cookies for handshakes at all.
    const COOKIES: &str = "/proc/sys/net/ipv4/tcp_syncookies";
    match std::fs::read_to_string(COOKIES) {
        Ok(text) if text.trim() == "0" => Err("net.ipv4.tcp_syncookies is 0".into()),
        Ok(_) => Ok(()),
        Err(e) => Err(format!("{COOKIES}: {e}")),
    }
}

/// Takes all that wait at a socket out of its queue.
pub(crate) fn take(listener: &OwnedFd) -> Result<Vec<OwnedFd>, Errno> {
    let mut all = Vec::new();
    loop {
        // It may be one that would block.
        let mut polled = [PollFd::new(listener, PollFlags::IN)];
        rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
        if !polled[0].revents().contains(PollFlags::IN) {
            return Ok(all);
        }
        all.push(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?);
    }
}

/// Puts connections into the queue of a socket that listens, in their order, in the stack of the
/// calling thread. `listener` is a descriptor of it.
pub(crate) fn put(listener: &OwnedFd, all: &[Waiting]) -> Result<(), error::Error> {
    let handshakes = Handshakes::attach()
        .map_err(|e| error::Error::Elsewhere(format!("a connection that waits: {e}")))?;
    let room = Room::make(listener, all).map_err(error::Error::call("make room in a socket"))?;
    let at = address_of(listener).map_err(error::Error::call("find a socket that listens"))?;
    for one in all {
        put_one(&handshakes, at, one).map_err(|source| error::Error::Restore {
            what: format!("the connection of {} at {}", one.connection.peer, one.address),
            call: "its handshake".into(),
            source,
        })?;
    }
    room.give_back().map_err(error::Error::call("give back room in a socket"))
}

fn put_one(handshakes: &Handshakes, listens_at: SocketAddr, one: &Waiting) -> Result<(), Errno> {
    let it = &one.connection;
    let ends = [one.address, it.peer];
    let listener = if listens_at.ip().is_unspecified() { one.address } else { listens_at };
    let agreed = Agreed {
        listener,
        is_v6: one.address.is_ipv6(),
        mark: quiet::MARK as u32,
        segment_bytes: it.segment_bytes.min(u32::from(u16::MAX)) as u16,
        scales: it.scales,
        selective: it.selective,
        timestamp: it.timestamp,
    };
    let raw = |e: dormouse_kernel::CallError| Errno::from_raw_os_error(e.errno());
    handshakes.agree(&agreed).map_err(raw)?;
    let length = it.received.0.len() as u32;
    let first = it.received_sequence.wrapping_sub(length);
    let send = |flags, offset: u32, data: &[u8]| {
        let sequence = first.wrapping_add(offset);
        let payload = segment(it, sequence, it.sent_sequence, flags | ACKNOWLEDGES, data);
        packet::send_here(&[(it.peer, one.address, payload)])
    };
    send(0, 0, &[])?;
    // ORDER: what comes before there is a connection is answered with a reset.
    arrive(&ends, 0)?;
    for (n, part) in it.received.0.chunks(SEGMENT_BYTES).enumerate() {
        let offset = (n * SEGMENT_BYTES) as u32;
        send(PUSH, offset, part)?;
        arrive(&ends, offset + part.len() as u32)?;
    }
    if it.state == TcpState::CloseWait {
        send(FIN, length, &[])?;
        // It takes a number.
        arrive(&ends, length + 1)?;
    }
    Ok(())
}

/// Where a socket listens, as the kernel has it.
fn address_of(listener: &OwnedFd) -> Result<SocketAddr, Errno> {
    let inode = rustix::fs::fstat(listener)?.st_ino;
    stack::address_here("tcp", inode).map(|[own, _]| own).ok_or(Errno::NOENT)
}

/// Waits until a connection is there and has so much in its queue.
fn arrive(ends: &Ends, bytes: u32) -> Result<(), Errno> {
    let began = Instant::now();
    while stack::received_here(ends).is_none_or(|received| received < bytes) {
        if began.elapsed() > ARRIVES_WITHIN {
            return Err(Errno::TIMEDOUT);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// A segment of the peer of a connection.
pub(crate) fn segment<'d>(
    it: &Connection,
    sequence: u32,
    acknowledged: u32,
    flags: u8,
    data: &'d [u8],
) -> Payload<'d> {
    let window = it.window[1] >> it.scales.map_or(0, |(sent, _)| sent.min(14));
    let window = window.min(0xffff) as u16;
    Payload::Tcp { sequence, acknowledged, flags, window, data }
}

/// More room in the buffer of what a socket that listens accepts: the same bytes in other pieces take
/// more than they did.
struct Room<'l> {
    listener: &'l OwnedFd,
    before_bytes: i32,
    locked: i32,
}

impl<'l> Room<'l> {
    fn make(listener: &'l OwnedFd, all: &[Waiting]) -> Result<Self, Errno> {
        let option = |name| call::int_option(listener.as_fd(), libc::SOL_SOCKET, name);
        let room =
            Self { listener, before_bytes: option(libc::SO_RCVBUF)?, locked: option(BUFFER_LOCK)? };
        let most = all.iter().map(|one| one.connection.received.0.len() as i32).max().unwrap_or(0);
        // Half of a buffer is for what the kernel keeps beside the bytes.
        if most.saturating_mul(4) > room.before_bytes {
            room.set(most.saturating_mul(4))?;
        }
        Ok(room)
    }

    fn set(&self, bytes: i32) -> Result<(), Errno> {
        let set = |name, value| {
            call::set_int_option(self.listener.as_fd(), libc::SOL_SOCKET, name, value)
        };
        // socket(7): the kernel doubles what it is told, and takes it for the program's wish.
        set(libc::SO_RCVBUFFORCE, bytes / 2)?;
        set(BUFFER_LOCK, self.locked)
    }

    fn give_back(self) -> Result<(), Errno> {
        self.set(self.before_bytes)
    }
}
