//! Pending connections: the accept queue of a TCP listener.
//!
//! A pending connection can only be read by accepting it, and cannot be put back. So a save takes
//! all of them out while everything is stopped ([`take`]), reads them like any other and closes them
//! without a packet. A restore, or a save after which the processes continue, makes the kernel create
//! them again ([`put`]). A BPF program completes the handshake ([`dormouse_bpf::handshake`]) with the
//! recorded sequence numbers; then the data of the peer follows, and its FIN. The server side has sent
//! nothing yet, or the connection would have been accepted. In between, the packets of the peer are
//! dropped ([`crate::quiet`]).
//!
//! LIMIT: a connection begins with the options of its listener, and so with those that the listener was given after
//! the connection had arrived, except for sizes of buffers.
//!
//! LIMIT: a new connection that arrives at the listener during such a handshake begins with the buffers of that
//! connection.
//!
//! LIMIT: a connection that its peer has reset is left out: it will not be accepted. If this
//! program is killed between taking them out and putting them back, the connections are lost.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dormouse_bpf::handshake::{self, Agreed, Handshakes};
use dormouse_kernel::Errno;
use dormouse_record::{Connection, Error, TcpState, Waiting};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use crate::buffer::{self, Buffers, Sizes};
use crate::packet::{self, Payload};
use crate::quiet;
use crate::stack::{self, Ends};

/// Flag of a segment: the sender sends no more.
pub const FIN: u8 = 1;
const PUSH: u8 = 8;
/// Flag of a segment: it acknowledges bytes.
pub const ACKNOWLEDGES: u8 = 16;

/// How long a packet of the loopback device may take to its socket.
const ARRIVES_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of data that are sent again at once.
const SEGMENT_BYTES: usize = 8 << 10;

/// Whether connections can be put back in the stack of the calling thread; the error is the cause.
pub fn supported() -> Result<(), String> {
    static LOADS: OnceLock<Result<(), String>> = OnceLock::new();
    LOADS.get_or_init(|| handshake::supported().map_err(|e| e.to_string())).clone()?;
    // The kernel accepts the program's handshake only where SYN cookies are enabled.
    const COOKIES: &str = "/proc/sys/net/ipv4/tcp_syncookies";
    match std::fs::read_to_string(COOKIES) {
        Ok(text) if text.trim() == "0" => Err("net.ipv4.tcp_syncookies is 0".into()),
        Ok(_) => Ok(()),
        Err(e) => Err(format!("{COOKIES}: {e}")),
    }
}

/// Takes all pending connections of a listener out of its queue.
pub fn take(listener: &OwnedFd) -> Result<Vec<OwnedFd>, Errno> {
    let mut all = Vec::new();
    loop {
        // The listener may be in blocking mode.
        let mut polled = [PollFd::new(listener, PollFlags::IN)];
        rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
        if !polled[0].revents().contains(PollFlags::IN) {
            return Ok(all);
        }
        all.push(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?);
    }
}

/// Puts connections into the queue of a listener, in their order, in the stack of the calling
/// thread. `listener` is a descriptor of it.
pub fn put(listener: &OwnedFd, all: &[Waiting]) -> Result<(), Error> {
    let handshakes =
        Handshakes::attach().map_err(|e| Error::Elsewhere(format!("a pending connection: {e}")))?;
    let at = address_of(listener).map_err(Error::call("find a listener"))?;
    let buffers = Buffers::of(listener);
    let mut buffers = buffers.map_err(Error::call("read the buffers of a listener"))?;
    let own = buffers.before();
    let patience = Patience::default();
    let put = all.iter().try_for_each(|one| -> Result<(), Error> {
        let set = buffers.set(buffers_for(&one.connection, own));
        set.map_err(Error::call("set the buffers of a listener"))?;
        let exists = || buffers.set(own);
        put_one(&handshakes, at, one, &patience, exists).map_err(|source| Error::Restore {
            what: format!("the connection of {} at {}", one.connection.peer, one.address),
            call: "its handshake".into(),
            source,
        })
    });
    let given_back = buffers.give_back();
    put.and(given_back.map_err(Error::call("give back the buffers of a listener")))
}

fn put_one(
    handshakes: &Handshakes,
    listens_at: SocketAddr,
    one: &Waiting,
    patience: &Patience,
    exists: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
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
    // ORDER: data that arrives before the connection exists is answered with a reset.
    arrive(&ends, 0)?;
    exists()?;
    for (n, part) in it.received.0.chunks(SEGMENT_BYTES).enumerate() {
        let offset = (n * SEGMENT_BYTES) as u32;
        send(PUSH, offset, part)?;
        arrive(&ends, offset + part.len() as u32)?;
    }
    if it.state == TcpState::CloseWait {
        send(FIN, length, &[])?;
        // The FIN takes a sequence number.
        arrive(&ends, length + 1)?;
        // ORDER: while packets are dropped. The kernel acknowledges a repeated FIN at once, and the first perhaps
        // later, when a stack without the peer would answer with a reset.
        patience.send(|| stack::segments_here(&ends), || send(FIN, length, &[]))?;
    }
    Ok(())
}

/// The address of a listener, as the kernel has it.
fn address_of(listener: &OwnedFd) -> Result<SocketAddr, Errno> {
    let inode = rustix::fs::fstat(listener)?.st_ino;
    stack::address_here("tcp", inode).map(|[own, _]| own).ok_or(Errno::NOENT)
}

/// Waits until a connection exists and has as many bytes in its queue.
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

/// The time for which packets to all sockets of a restore are waited for. The container's own packet filter may drop
/// them all.
#[derive(Debug)]
pub struct Patience(Instant);

impl Default for Patience {
    fn default() -> Self {
        Self(Instant::now() + ARRIVES_WITHIN)
    }
}

impl Patience {
    /// Sends a packet to a socket, and waits until the kernel has processed it. `received` returns a number that
    /// changes with every packet that the socket has received.
    ///
    /// LIMIT: without this number, and after 5 s in all, there is no wait.
    pub fn send(
        &self,
        received: impl Fn() -> Option<u32>,
        send: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let before = received();
        send()?;
        while before.is_some() && received() == before && Instant::now() < self.0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

/// A segment of the peer of a connection.
pub fn segment<'d>(
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

/// The buffers that a listener needs so that a connection begins with its own: an accepted connection begins with
/// those of its listener, and that may have got other sizes since the connection arrived.
fn buffers_for(it: &Connection, listener: Sizes) -> Sizes {
    let locked = i32::from(it.buffers_locked);
    // The kernel adjusts a size that neither program nor listener has set.
    let size = |bit: i32, own_bytes: u32, listener_bytes: i32| {
        if (locked | listener.locked) & bit == 0 { listener_bytes } else { own_bytes as i32 }
    };
    // The same bytes in other segments may take more space than before, and the kernel uses half of a buffer for its
    // own data beside the bytes.
    let received_bytes = (it.received.0.len() as i32).saturating_mul(4);
    Sizes {
        send_bytes: size(buffer::SEND, it.buffers_bytes.0, listener.send_bytes),
        receive_bytes: size(buffer::RECEIVE, it.buffers_bytes.1, listener.receive_bytes)
            .max(received_bytes),
        locked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repair::unread;

    #[test]
    fn connection_keeps_buffers_that_differ_from_those_of_its_listener() {
        let mut it = unread(TcpState::Established, "127.0.0.1:9".parse().unwrap());
        it.buffers_bytes = (2_626_560, 131_072);
        let unset = Sizes { send_bytes: 16_384, receive_bytes: 131_072, locked: 0 };
        assert_eq!(buffers_for(&it, unset), unset, "the kernel adjusts them");
        let set = Sizes { send_bytes: 4608, receive_bytes: 2304, locked: 3 };
        let own = Sizes { send_bytes: 2_626_560, receive_bytes: 131_072, locked: 0 };
        assert_eq!(buffers_for(&it, set), own);
        it.buffers_bytes = (4608, 2304);
        it.buffers_locked = 3;
        assert_eq!(buffers_for(&it, unset), set);
        it.received.0 = vec![0; 1000];
        assert_eq!(buffers_for(&it, unset), Sizes { receive_bytes: 4000, ..set });
    }
}
