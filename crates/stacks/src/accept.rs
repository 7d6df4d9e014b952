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
//! A client of a listener with TCP_DEFER_ACCEPT that has sent no data is in no queue: the kernel has its request
//! alone. A BPF program reads that in place ([`deferred`], [`dormouse_bpf::request`]), and nothing changes. No call
//! makes a request with given sequence numbers. So the restored connection is in the queue, and accept(2) returns it
//! before its first data, as it does when the time of TCP_DEFER_ACCEPT is over (tcp(7)). A client whose last segment
//! of the handshake has not arrived is left out, and its segments are dropped meanwhile: it repeats its request.
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
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dormouse_bpf::handshake::{self, Agreed, Handshakes};
use dormouse_bpf::request::{self, Request, StampUnit};
use dormouse_kernel::{Errno, call};
use dormouse_record::{Connection, Error, TcpState, Waiting};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use crate::buffer::{self, Buffers, Sizes};
use crate::packet::{self, Payload};
use crate::quiet;
use crate::repair::unread;
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

/// Whether connections that wait for their first data can be read; the error is the cause.
pub fn deferred_supported() -> Result<(), String> {
    static LOADS: OnceLock<Result<(), String>> = OnceLock::new();
    LOADS.get_or_init(|| request::supported().map_err(|e| e.to_string())).clone()
}

/// Whether a listener keeps connections out of its queue until they have sent data (TCP_DEFER_ACCEPT).
pub fn defers(listener: &OwnedFd) -> Result<bool, Errno> {
    call::int_option(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT).map(|s| s != 0)
}

/// The connections of listeners that wait for their first data, by listener, in the stack of the calling thread.
#[derive(Debug, Default)]
pub struct Deferred {
    /// Both ends of every request, also of those whose handshake is not complete.
    pub ends: Vec<Ends>,
    /// The connections, with the place of their listener in the list.
    pub connections: Vec<(usize, Waiting)>,
}

/// Reads the connections that wait for their first data at these listeners. Nothing changes.
pub fn deferred(listeners: &[&OwnedFd]) -> Result<Deferred, Error> {
    let mut found = Deferred::default();
    let mut places = Vec::new();
    for (place, listener) in listeners.iter().enumerate() {
        if defers(listener).map_err(Error::call("read an option of a listener"))? {
            let cookie = cookie(listener).map_err(Error::call("read the cookie of a listener"))?;
            places.push((cookie, place));
        }
    }
    if places.is_empty() {
        return Ok(found);
    }
    let mut all = request::read()
        .map_err(|e| Error::Elsewhere(format!("a connection that has sent no data: {e}")))?;
    all.sort_by_key(|one| one.peer);
    for one in all {
        let Some((_, place)) = places.iter().find(|(cookie, _)| *cookie == one.listener) else {
            continue;
        };
        found.ends.push([one.address, one.peer]);
        if one.is_acknowledged {
            let sizes = Buffers::of(listeners[*place]).map(|buffers| buffers.before());
            let sizes = sizes.map_err(Error::call("read the buffers of a listener"))?;
            found.connections.push((*place, waiting(&one, sizes)?));
        }
    }
    Ok(found)
}

/// The connection that the first data would make, with the buffers of its listener.
fn waiting(it: &Request, listener: Sizes) -> Result<Waiting, Error> {
    let mut connection = unread(TcpState::Established, it.peer);
    // The SYN of each side takes a sequence number.
    connection.sent_sequence = it.sequences.0.wrapping_add(1);
    connection.received_sequence = it.sequences.1.wrapping_add(1);
    connection.segment_bytes = it.segment_bytes.into();
    (connection.scales, connection.selective) = (it.scales, it.selective);
    connection.timestamp = match it.stamps {
        None => None,
        Some((offset, StampUnit::Milliseconds)) => Some(monotonic_ms().wrapping_add(offset)),
        Some((_, StampUnit::Microseconds)) => {
            let why = "has time stamps in microseconds, which are not saved yet";
            return Err(Error::Elsewhere(format!("a connection of {} {why}", it.peer)));
        }
    };
    // The kernel has not kept the window of the peer. Each segment of the peer has it, and the peer
    // acknowledges the first that it receives.
    let scale = it.scales.map_or(0, |(sent, _)| sent.min(14));
    connection.window[1] = (2 * u32::from(it.segment_bytes)).max(1 << scale);
    connection.buffers_bytes = (listener.send_bytes as u32, listener.receive_bytes as u32);
    connection.buffers_locked = listener.locked as u8;
    Ok(Waiting { address: it.address, connection })
}

/// The clock of time stamps without an offset, as in the kernel's `tcp_clock_ms`.
fn monotonic_ms() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u32).wrapping_mul(1000).wrapping_add(now.tv_nsec as u32 / 1_000_000)
}

/// The number by which a socket is known as long as the host runs (SO_COOKIE, socket(7)).
fn cookie(socket: &OwnedFd) -> Result<u64, Errno> {
    let mut cookie = [0; 8];
    call::socket_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    Ok(u64::from_ne_bytes(cookie))
}

/// Puts connections into the queue of a listener, in their order, in the stack of the calling
/// thread. `listener` is a descriptor of it.
pub fn put(listener: &OwnedFd, all: &[Waiting]) -> Result<(), Error> {
    if all.is_empty() {
        return Ok(());
    }
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
    if stack::is_requested_here(&ends) {
        // The request was saved, and is still there without its listener. A segment that the program does not take
        // removes it.
        send(PUSH, 0, &[])?;
        let began = Instant::now();
        while stack::is_requested_here(&ends) {
            if began.elapsed() > ARRIVES_WITHIN {
                return Err(Errno::TIMEDOUT);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
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

    #[test]
    fn deferred_connection_continues_the_sequence_numbers_of_its_request() {
        let sizes = Sizes { send_bytes: 16_384, receive_bytes: 131_072, locked: 2 };
        let mut request = Request {
            listener: 1,
            address: "[::1]:80".parse().unwrap(),
            peer: "[::1]:9".parse().unwrap(),
            sequences: (u32::MAX, 7),
            segment_bytes: 1440,
            scales: Some((14, 3)),
            selective: true,
            stamps: Some((5, StampUnit::Milliseconds)),
            is_acknowledged: true,
        };
        let it = waiting(&request, sizes).unwrap().connection;
        assert_eq!((it.sent_sequence, it.received_sequence), (0, 8));
        assert!(it.window[1] >> 14 > 0, "a window of a byte at least");
        assert_eq!((it.buffers_bytes, it.buffers_locked), ((16_384, 131_072), 2));
        assert!(it.timestamp.is_some() && it.received.0.is_empty());
        request.stamps = Some((5, StampUnit::Microseconds));
        assert!(waiting(&request, sizes).is_err(), "another clock");
    }

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
