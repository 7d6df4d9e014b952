//! TCP sockets that are not listeners: made by the program, connected by the engine
//! ([`super::connection`]).
//!
//! A connection in SYN_SENT is requested again, from the same port and with the same initial
//! sequence number: a peer that has received the request sees a retransmission. A thread in
//! connect(2) continues to wait.
//!
//! The addresses of a record are bound like any others: the programs of address mode refuse those
//! that are not the container's.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{Errno, call};
use dormouse_record::{Connection, Result, TcpSocket, TcpState};
use rustix::fs::OFlags;
use rustix::net::{SendFlags, Shutdown};

use super::plan::Plan;
use super::{net, open, socket};
use crate::accept::{self, Patience};
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::repair::{
    BUFFER_LOCK, NO_QUEUE, QUEUE_SEQUENCE, RECEIVE_QUEUE, REPAIR, REPAIR_QUEUE, REPAIR_WINDOW,
    SEND_QUEUE, TIMESTAMP,
};
use crate::{packet, stack};

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    tcp: &TcpSocket,
) -> Result<Cell> {
    let cell = plan.cell();
    let family = if tcp.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = Arg::from(libc::SOCK_STREAM | libc::SOCK_CLOEXEC);
    let args = [Arg::from(family), kind, Arg::Number(0)];
    net::socket(plan, sequence, what, cell, args)?;
    // Time stamps of a connection are requested when it exists ([`leave_repair`]).
    let is_connection = tcp.connection.is_some() || tcp.held || tcp.over;
    for option in tcp.options.iter().filter(|o| !(is_connection && o.is_about_stamps())) {
        socket::option(plan, sequence, what, cell, option);
    }
    if let (None, Some(address)) = (&tcp.connection, &tcp.address) {
        socket::bind(plan, sequence, what, cell, (address, tcp.free, &tcp.options));
    }
    if tcp.held || tcp.over {
        // The connection does not exist any more. After shutdown(2) a read shows that the peer has
        // hung up, also on a socket that never had a peer (and the call fails all the same).
        let args = [cell.into(), Arg::from(libc::SHUT_RDWR)];
        sequence.call(what, Call::new(libc::SYS_shutdown, args).lenient());
    }
    open::set_flags(sequence, what, cell, tcp.flags);
    Ok(cell)
}

/// Whether the receiving side is completed before the connection leaves repair mode.
pub(super) fn ends_in_repair(it: &Connection) -> bool {
    !matches!(it.state, TcpState::SynSent | TcpState::Closing)
}

/// The step that failed, and the cause.
pub(super) type Failed = (&'static str, Errno);

/// Restores a connection in repair mode, in which nothing is sent.
pub(super) fn rebuild(
    socket: &OwnedFd,
    own: SocketAddr,
    it: &Connection,
) -> std::result::Result<(), Failed> {
    let fd = socket.as_fd();
    let at = |step: &'static str| move |e: Errno| (step, e);
    let set = |name, value: i32| call::set_int_option(fd, libc::IPPROTO_TCP, name, value);
    let general = |name, value: u32| call::set_int_option(fd, libc::SOL_SOCKET, name, value as i32);
    set(REPAIR, 1).map_err(at("repair mode"))?;
    // The same bytes in other segments may take more buffer space until they are read.
    const MORE: u32 = 1 << 20;
    general(libc::SO_SNDBUFFORCE, it.buffers_bytes.0 + MORE).map_err(at("its buffer"))?;
    general(libc::SO_RCVBUFFORCE, it.buffers_bytes.1 + MORE).map_err(at("its buffer"))?;
    rustix::net::bind(socket, &own).map_err(at("bind"))?;
    if it.state == TcpState::SynSent {
        set(REPAIR_QUEUE, SEND_QUEUE).map_err(at("its queue"))?;
        // The SYN takes a sequence number.
        let first = it.sent_sequence.wrapping_sub(1);
        set(QUEUE_SEQUENCE, first as i32).map_err(at("its sequence number"))?;
        set(REPAIR_QUEUE, NO_QUEUE).map_err(at("its queue"))?;
        // The window of the request depends on the buffer size.
        set_buffer(socket, libc::SO_RCVBUFFORCE, it.buffers_bytes.1).map_err(at("its buffer"))?;
        return bound_window(socket, it).map_err(at("its window"));
    }
    let received = it.received_sequence.wrapping_sub(it.received.0.len() as u32);
    set(REPAIR_QUEUE, RECEIVE_QUEUE).map_err(at("its queue"))?;
    set(QUEUE_SEQUENCE, received as i32).map_err(at("its sequence number"))?;
    set(REPAIR_QUEUE, SEND_QUEUE).map_err(at("its queue"))?;
    set(QUEUE_SEQUENCE, it.sent_sequence as i32).map_err(at("its sequence number"))?;
    rustix::net::connect(socket, &it.peer).map_err(at("connect"))?;
    agree(socket, it).map_err(at("its options"))?;
    // The negotiated size bounds segments once the kernel computes their size again. Until then segments have the
    // least size (RFC 9293).
    let compute_segments = || compute_segments(socket, own).map_err(at("its segments"));
    compute_segments()?;
    set(REPAIR_QUEUE, RECEIVE_QUEUE).map_err(at("its queue"))?;
    write(socket, &it.received.0).map_err(at("what it received"))?;
    set(REPAIR_QUEUE, SEND_QUEUE).map_err(at("its queue"))?;
    write(socket, &it.sent.0).map_err(at("what it sent"))?;
    if it.state == TcpState::FinWait2 {
        // After all sent data, and as sent.
        rustix::net::shutdown(socket, Shutdown::Write).map_err(at("shutdown"))?;
    }
    set(REPAIR_QUEUE, NO_QUEUE).map_err(at("its queue"))?;
    let mut window = it.window;
    if it.state.peer_has_ended() {
        // The part of the window that the peer's FIN took is subtracted with that FIN, below.
        window[3] = window[3].wrapping_add(1);
        window[4] = window[4].wrapping_sub(1);
    }
    let window: Vec<u8> = window.iter().flat_map(|word| word.to_ne_bytes()).collect();
    call::set_socket_option(fd, libc::IPPROTO_TCP, REPAIR_WINDOW, &window)
        .map_err(at("its window"))?;
    // Half of the largest window of the peer bounds them, too.
    compute_segments()
}

/// Makes the kernel compute the size of segments, which it does for the options of packets: here none.
fn compute_segments(socket: &OwnedFd, own: SocketAddr) -> std::result::Result<(), Errno> {
    /// IPV6_2292PKTOPTIONS: options as control messages.
    const MESSAGES: i32 = 6;
    let fd = socket.as_fd();
    if own.is_ipv4() || own.ip().to_canonical().is_ipv4() {
        return call::set_socket_option(fd, libc::IPPROTO_IP, libc::IP_OPTIONS, &[]);
    }
    // Bytes that hold no whole message are no option. The kernel keeps them, until there are none.
    call::set_socket_option(fd, libc::IPPROTO_IPV6, MESSAGES, &[0])?;
    call::set_socket_option(fd, libc::IPPROTO_IPV6, MESSAGES, &[])
}

/// Sets the options that both sides have negotiated in the handshake.
fn agree(socket: &OwnedFd, it: &Connection) -> std::result::Result<(), Errno> {
    const OPTIONS: i32 = 22;
    // Numbers of TCP options (RFC 9293, 7323, 2018).
    const SEGMENT: u32 = 2;
    const WINDOW: u32 = 3;
    const SELECTIVE: u32 = 4;
    const STAMPS: u32 = 8;
    let mut options = vec![SEGMENT, it.segment_bytes];
    if let Some((sent, received)) = it.scales {
        options.extend([WINDOW, u32::from(sent) | u32::from(received) << 16]);
    }
    if it.selective {
        options.extend([SELECTIVE, 0]);
    }
    if it.timestamp.is_some() {
        options.extend([STAMPS, 0]);
    }
    let options: Vec<u8> = options.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let fd = socket.as_fd();
    call::set_socket_option(fd, libc::IPPROTO_TCP, OPTIONS, &options)?;
    if let Some(stamp) = it.timestamp {
        call::set_int_option(fd, libc::IPPROTO_TCP, TIMESTAMP, stamp as i32)?;
    }
    Ok(())
}

/// Writes to the selected queue, or to the peer.
fn write(socket: &OwnedFd, data: &[u8]) -> std::result::Result<(), Errno> {
    let mut rest = data;
    while !rest.is_empty() {
        let part = &rest[..rest.len().min(32 << 10)];
        let written = rustix::net::send(socket, part, SendFlags::DONTWAIT)?;
        rest = &rest[written..];
    }
    Ok(())
}

/// Completes the receiving side: the FIN of the peer, if it has arrived, and then the recorded size
/// of the receive buffer and the bound of the window.
///
/// ORDER: after all connections exist, and before a peer inside resumes, which would otherwise see
/// a larger window.
pub(super) fn complete_receiving(
    socket: &OwnedFd,
    it: &Connection,
    patience: &Patience,
) -> std::result::Result<(), Errno> {
    end_of_peer(socket, it, patience)?;
    set_buffer(socket, libc::SO_RCVBUFFORCE, it.buffers_bytes.1)?;
    // ORDER: after the connection exists, which sets it by the size of the buffer at that moment.
    bound_window(socket, it)
}

/// Sets the largest window (TCP_WINDOW_CLAMP) as it was.
fn bound_window(socket: &OwnedFd, it: &Connection) -> std::result::Result<(), Errno> {
    match it.window_bytes_max {
        0 => Ok(()),
        most => {
            let name = libc::TCP_WINDOW_CLAMP;
            call::set_int_option(socket.as_fd(), libc::IPPROTO_TCP, name, most as i32)
        }
    }
}

fn set_buffer(socket: &OwnedFd, option: i32, bytes: u32) -> std::result::Result<(), Errno> {
    // socket(7): the kernel doubles the value that is set.
    call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, option, bytes as i32 / 2)
}

/// Repeats the FIN of the peer, or its acknowledgement of the FIN of this side.
fn end_of_peer(
    socket: &OwnedFd,
    it: &Connection,
    patience: &Patience,
) -> std::result::Result<(), Errno> {
    use accept::{ACKNOWLEDGES, FIN};
    let (flags, acknowledged) = match it.state {
        TcpState::SynSent | TcpState::Established | TcpState::FinWait1 => return Ok(()),
        TcpState::CloseWait | TcpState::LastAck | TcpState::Closing => {
            (FIN | ACKNOWLEDGES, it.sent_sequence)
        }
        TcpState::FinWait2 => (ACKNOWLEDGES, it.sent_sequence.wrapping_add(1)),
    };
    let inode = rustix::fs::fstat(socket)?.st_ino;
    let netns = stack::of_socket(socket)?;
    let found = stack::tcp_addresses(&netns, &[inode])?;
    let [own, peer] = found.get(&inode).copied().ok_or(Errno::NOTCONN)?;
    let segment = accept::segment(it, it.received_sequence, acknowledged, flags, &[]);
    stack::inside_of(&netns, || {
        let send = || packet::send_here(&[(peer, own, segment)]);
        if !ends_in_repair(it) || !it.state.peer_has_ended() {
            return send();
        }
        // The kernel acknowledges a repeated FIN at once, and the first perhaps later: see `super::connection`.
        (0..2).try_for_each(|_| patience.send(|| segments_received(socket), send))
    })
}

/// The number of segments that a connection has received (tcp(7), TCP_INFO). KERNEL(4.2).
fn segments_received(socket: &OwnedFd) -> Option<u32> {
    // The place of tcpi_segs_in in struct tcp_info.
    const AT: usize = 140;
    let mut info = [0; AT + 4];
    let length = call::socket_option(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info);
    let counted = info.last_chunk().copied().map(u32::from_ne_bytes);
    counted.filter(|_| length == Ok(info.len()))
}

/// Ends repair mode: unsent data is sent, and the peer gets a packet.
pub(super) fn leave_repair(
    socket: &OwnedFd,
    tcp: &TcpSocket,
    it: &Connection,
) -> std::result::Result<(), Errno> {
    let fd = socket.as_fd();
    call::set_int_option(fd, libc::IPPROTO_TCP, REPAIR, 0)?;
    // In repair mode every address is shared, and afterwards none.
    for option in tcp.options.iter().filter(|o| o.is(libc::SOL_SOCKET, libc::SO_REUSEADDR)) {
        call::set_socket_option(fd, option.level, option.name, &option.value.0)?;
    }
    write(socket, &it.unsent.0)?;
    set_buffer(socket, libc::SO_SNDBUFFORCE, it.buffers_bytes.0)?;
    if it.state.end_waits() {
        rustix::net::shutdown(socket, Shutdown::Write)?;
    }
    if it.state == TcpState::Closing {
        complete_receiving(socket, it, &Patience::default())?; // after the FIN of this side
    }
    if it.reads_no_more {
        rustix::net::shutdown(socket, Shutdown::Read)?;
    }
    let locked = i32::from(it.buffers_locked);
    call::set_int_option(fd, libc::SOL_SOCKET, BUFFER_LOCK, locked)?;
    if it.state == TcpState::SynSent {
        request(socket, it.peer)?;
    }
    tcp.options
        .iter()
        .filter(|one| one.is_about_stamps())
        .try_for_each(|one| call::set_socket_option(fd, one.level, one.name, &one.value.0))
}

/// Requests a connection without waiting for the answer.
fn request(socket: &OwnedFd, peer: SocketAddr) -> std::result::Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(socket)?;
    rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK)?;
    let requested = rustix::net::connect(socket, &peer);
    rustix::fs::fcntl_setfl(socket, flags)?;
    match requested {
        Err(Errno::INPROGRESS) => Ok(()),
        other => other,
    }
}
