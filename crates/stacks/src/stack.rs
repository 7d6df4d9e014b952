//! The network stack of a container, inspected from inside it.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Namespace};
use dormouse_kernel::netlink::{self, Message, Protocol, u32_at};
use dormouse_kernel::{namespace, pidfd, proc};
use dormouse_record::{Error, Result as Outcome};
use rustix::fs::OFlags;
use rustix::net::{SocketFlags, sockopt};

/// The address of this side, and that of the peer.
pub type Ends = [SocketAddr; 2];

/// The network namespace of a process.
pub fn of(pid: u32) -> Outcome<OwnedFd> {
    pidfd::open(pid)
        .and_then(|pidfd| pidfd::namespace(&pidfd, Namespace::Net))
        .map_err(|e| Error::Elsewhere(e.to_string()))
}

/// The network namespace of a socket.
pub fn of_socket(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    call::network_of(socket.as_fd())
}

/// Calls `act` in a network namespace ([`namespace::visit`]).
pub fn inside_of<T: Send>(
    netns: &OwnedFd,
    act: impl FnOnce() -> Result<T, Errno> + Send,
) -> Result<T, Errno> {
    namespace::visit(netns.as_fd(), Namespace::Net, act)?
}

/// Both addresses of a socket of a protocol, as the kernel has them.
pub fn address(netns: &OwnedFd, protocol: &str, inode: u64) -> Result<Option<Ends>, Errno> {
    inside_of(netns, || Ok(address_here(protocol, inode)))
}

/// The same in the stack of the calling thread.
pub fn address_here(protocol: &str, inode: u64) -> Option<Ends> {
    look(protocol, &[inode]).first().map(|(_, ends)| *ends)
}

/// The address of a UDP socket in the kernel, whatever getsockname(2) returns.
pub fn udp_address(netns: &OwnedFd, socket: &OwnedFd) -> Result<SocketAddr, Errno> {
    let inode = rustix::fs::fstat(socket)?.st_ino;
    address(netns, "udp", inode)?.map(|[own, _]| own).ok_or(Errno::NOENT)
}

/// Both addresses of TCP connections, by inode, as the kernel has them.
pub fn tcp_addresses(netns: &OwnedFd, inodes: &[u64]) -> Result<HashMap<u64, Ends>, Errno> {
    inside_of(netns, || Ok(look("tcp", inodes).into_iter().collect()))
}

/// The unread bytes of TCP connections, by inode. Bytes behind an urgent mark count, and so does the FIN of a
/// peer until the program has read the end.
pub fn tcp_received(netns: &OwnedFd, inodes: &[u64]) -> Result<HashMap<u64, u32>, Errno> {
    inside_of(netns, || {
        let all = lines("tcp").into_iter().filter(|line| inodes.contains(&line.inode));
        Ok(all.map(|line| (line.inode, line.received)).collect())
    })
}

/// The state of a requested connection (include/net/tcp_states.h).
const SYN_RECEIVED: u8 = 3;

/// The number of connections of a TCP listener that are not in its queue yet: their handshake is not complete, or
/// they have sent no data yet (TCP_DEFER_ACCEPT).
pub fn requests(netns: &OwnedFd, listener: u64) -> Result<usize, Errno> {
    inside_of(netns, || {
        let all = lines("tcp");
        let own = all.iter().find(|line| line.inode == listener).map(|line| line.ends[0]);
        let Some(own) = own else { return Ok(0) };
        let is_one = |line: &&Line| {
            let at = line.ends[0];
            let is_at = own.ip().is_unspecified() || own.ip() == at.ip();
            line.state == SYN_RECEIVED && at.port() == own.port() && is_at
        };
        Ok(all.iter().filter(is_one).count())
    })
}

/// Whether a connection in the stack of the calling thread is requested, and does not exist yet.
pub fn is_requested_here(ends: &Ends) -> bool {
    lines("tcp").iter().any(|line| line.ends == *ends && line.state == SYN_RECEIVED)
}

/// The unread bytes of a TCP connection in the stack of the calling thread, if it exists; the FIN
/// of its peer counts as one.
pub fn received_here(ends: &Ends) -> Option<u32> {
    let is = |line: &Line| line.ends == *ends && line.state != SYN_RECEIVED;
    lines("tcp").into_iter().find(is).map(|line| line.received)
}

/// The queue of a listening TCP socket: connections that no process has accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// The number of connections in it, with those that their peers have reset since.
    pub length: u32,
    /// The length from which it has no room for another connection.
    pub limit: u32,
    /// Those that still exist, in no order. The kernel lists them after `length` was read.
    pub clients: Vec<Client>,
}

impl Queue {
    /// It has no room for another connection.
    pub fn is_full(&self) -> bool {
        self.length >= self.limit
    }

    /// At most half of it is free.
    pub fn is_half_full(&self) -> bool {
        self.length >= self.limit.div_ceil(2)
    }

    /// Returns whether all connections are silent: they have sent no byte. A queue without room for another one
    /// is not silent.
    pub fn is_silent(&self) -> bool {
        !self.is_full() && self.clients.iter().all(|client| !client.has_sent)
    }
}

/// The peer of a connection in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client {
    /// Its address. An IPv4 address that is mapped into IPv6 is an IPv4 address here.
    pub address: IpAddr,
    /// At least one byte of it has arrived. The end of its data is none.
    pub has_sent: bool,
}

/// Reads the queue of a listening TCP socket. `own` are the addresses that belong to the listener's owner
/// within the stack; if empty, all do.
pub fn queue(listener: &OwnedFd, own: &[IpAddr]) -> Result<Queue, Errno> {
    let address: SocketAddr = rustix::net::getsockname(listener)?.try_into()?;
    // struct tcp_info: for a listener, tcpi_unacked is the length of its queue, tcpi_sacked the limit.
    let mut info = [0; 32];
    let filled =
        call::socket_option(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    let number =
        |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    if filled < info.len() {
        return Err(Errno::BADMSG);
    }
    let (length, limit) = (number(24), number(28));
    let is_own = |ip: IpAddr| own.is_empty() || own.contains(&ip) || ip.is_loopback();
    let is_it = |line: &Line| {
        let [at, _] = line.ends;
        let fits = address.ip().is_unspecified() || address.ip().to_canonical() == at.ip();
        line.inode == 0 && at.port() == address.port() && fits && is_own(at.ip())
    };
    let client = |line: Line| {
        let has_sent = match line.state {
            ESTABLISHED => line.received > 0,
            // The end of the peer's data counts as a byte.
            CLOSE_WAIT => line.received > 1,
            _ => return None,
        };
        Some(Client { address: line.ends[1].ip(), has_sent })
    };
    inside_of(&of_socket(listener)?, || {
        let all = at_port(&address).unwrap_or_else(|_| lines("tcp"));
        let clients = all.into_iter().filter(is_it).filter_map(client).collect();
        Ok(Queue { length, limit, clients })
    })
}

/// Accepts the first `count` connections of a listening socket, and closes them: each peer receives a reset.
/// Other processes may accept at the same time, and a listener in blocking mode blocks nothing.
///
/// ORDER: the open file is in non-blocking mode meanwhile, and stays so if this process is killed. A restore
/// gives it the recorded mode.
pub fn reset_clients(listener: BorrowedFd<'_>, count: u32) -> Result<(), Errno> {
    let before = rustix::fs::fcntl_getfl(listener)?;
    rustix::fs::fcntl_setfl(listener, before | OFlags::NONBLOCK)?;
    let reset = || {
        for _ in 0..count {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
                // The close then sends a reset; a unix socket has no such option and needs none.
                Ok(client) => {
                    let _ = sockopt::set_socket_linger(&client, Some(Duration::ZERO));
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    let done = reset();
    rustix::fs::fcntl_setfl(listener, before)?;
    done
}

/// States of a connection (`tcp_states.h`).
const ESTABLISHED: u8 = 1;
const FIN_WAIT_1: u8 = 4;
const FIN_WAIT_2: u8 = 5;
const TIME_WAIT: u8 = 6;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;

/// The kind of requests of sock_diag(7) for one family of sockets (`SOCK_DIAG_BY_FAMILY`).
const BY_FAMILY: u16 = 20;

/// Lists the open connections at the port of an address, in the stack of the calling thread. The kernel
/// selects them: the size of its table costs time, and no text.
///
/// KERNEL(3.3): sock_diag(7) for TCP; the module `tcp_diag` may be absent.
fn at_port(address: &SocketAddr) -> Result<Vec<Line>, ()> {
    let mut all = Vec::new();
    dump(address.is_ipv6(), (address.port(), 1 << ESTABLISHED | 1 << CLOSE_WAIT), 0, |entry| {
        all.push(diagnosed(entry)?);
        Some(())
    })?;
    Ok(all)
}

/// The number of segments that a TCP connection in the stack of the calling thread has received. The kernel locks
/// the connection for its answer: it has processed every segment that it counts. `None` if there is no such
/// connection.
///
/// KERNEL(4.2): the count. The module `tcp_diag` may be absent; then the answer is `None`, too.
pub fn segments_here(ends: &Ends) -> Option<u32> {
    // INET_DIAG_INFO, whose value is struct tcp_info with tcpi_segs_in at this place.
    const INFO: u16 = 2;
    const AT: usize = 140;
    // A listener for both families accepts connections over IPv4 as sockets of IPv6.
    [false, true].into_iter().find_map(|v6| {
        let mut count = None;
        let listed = dump(v6, (ends[0].port(), !0), 1 << (INFO - 1), |entry| {
            if diagnosed(entry)?.ends == *ends {
                let info = netlink::attributes(entry.get(HEAD_BYTES..)?)?;
                let info = info.into_iter().find(|(kind, _)| *kind == INFO);
                count = info.and_then(|(_, info)| u32_at(info, AT));
            }
            Some(())
        });
        listed.ok().and(count)
    })
}

/// Inodes of the TCP sockets in the stack of the calling thread that have keys for their segments (TCP_MD5SIG,
/// RFC 2385): listeners or all others. The kernel lists bound sockets alone. `None` without the module `tcp_diag`.
///
/// All others take as long as the kernel's table of connections is large, which all stacks share: a millisecond.
///
/// KERNEL(4.14): the keys, for CAP_NET_ADMIN over the stack.
pub fn signed_here(listeners: bool) -> Option<Vec<u64>> {
    const KEYS: u16 = 18; // INET_DIAG_MD5SIG
    const LISTEN: u32 = 1 << 10;
    let states = if listeners { LISTEN } else { !LISTEN };
    // INET_DIAG_INFO, with which the kernel also lists keys.
    const WITH_INFO: u8 = 1 << 1;
    let mut all = Vec::new();
    for v6 in [false, true] {
        dump(v6, (0, states), WITH_INFO, |entry| {
            let attributes = netlink::attributes(entry.get(HEAD_BYTES..)?)?;
            if attributes.iter().any(|(kind, _)| *kind == KEYS) {
                all.push(u32_at(entry, 68)?.into());
            }
            Some(())
        })
        .ok()?;
    }
    Some(all)
}

/// Removes the ended TCP connections of some addresses from the stack of the calling thread: those in TIME_WAIT,
/// and those without a process that wait for the end of their peer, which the kernel holds like them or whole.
/// `ports` are the local ports of interest; if `None`, all are. A bind of another socket to their address fails
/// while they exist, unless both have SO_REUSEADDR.
///
/// One whose last bytes no acknowledgement has answered is removed if its peer has one of these addresses, too:
/// the peer has ended without a segment where a checkpoint has saved it. Other peers may still receive the bytes.
///
/// Only addresses that belong to a container without processes may be passed: a peer that repeats its last
/// segment is answered with a reset. Returns how many were removed.
///
/// KERNEL(6.0): earlier kernels remove no such connection. They also need CONFIG_INET_DIAG_DESTROY, and the
/// module `tcp_diag`. Without these nothing is removed.
pub fn forget_ended_here(is_own: impl Fn(IpAddr) -> bool, ports: Option<&[u16]>) -> usize {
    /// The timer of a connection that the kernel holds in short form, and the only one of that kind.
    const TIMER: u8 = 3;
    const INODE_AT: usize = HEAD_BYTES - 4;
    const DESTROY: u16 = 21; // SOCK_DESTROY
    const SENDING: [u8; 3] = [FIN_WAIT_1, LAST_ACK, CLOSING];
    let states = [FIN_WAIT_1, FIN_WAIT_2, TIME_WAIT, LAST_ACK, CLOSING];
    let states = states.iter().fold(0_u32, |all, state| all | 1 << state);
    // Listing all sockets takes as long as the kernel's table is large.
    if ports.is_some_and(<[u16]>::is_empty) || !has_ended_here() {
        return 0;
    }
    let one = match ports {
        Some([one]) => *one,
        _ => 0, // any
    };
    let mut removed = 0;
    for v6 in [false, true] {
        let mut found: Vec<Vec<u8>> = Vec::new();
        let listed = dump(v6, (one, states), 0, |entry| {
            let Line { ends: [at, peer], state, .. } = diagnosed(entry)?;
            // The kernel keeps one whole whose FIN was acknowledged in the middle of close(2). It has no inode.
            let is_ended = *entry.get(2)? == TIMER || u32_at(entry, INODE_AT)? == 0;
            let is_sending = SENDING.contains(&state) && !is_own(peer.ip());
            let is_of_interest = ports.is_none_or(|ports| ports.contains(&at.port()));
            let is_it = is_ended && !is_sending && is_own(at.ip()) && is_of_interest;
            if is_it {
                // struct inet_diag_sockid, with the cookie by which the kernel finds the same one.
                let id = entry.get(4..52)?;
                found.push([&request(v6, 0, 0)[..8], id].concat());
            }
            Some(())
        });
        let Ok(mut socket) = netlink::Socket::open(Protocol::SocketDiagnosis) else {
            return removed;
        };
        if listed.is_err() {
            continue;
        }
        // One may have ended by itself since.
        let gone = |one: &Vec<u8>| socket.request(DESTROY, 0, &Message::new(one)).is_ok();
        removed += found.iter().map(gone).filter(|gone| *gone).count();
    }
    removed
}

/// Whether the stack of the calling thread may have ended connections. Those that the kernel keeps whole are
/// counted for all stacks together.
pub fn has_ended_here() -> bool {
    let text = proc::whole_text("/proc/thread-self/net/sockstat").unwrap_or_default();
    ended(&text) != Some(0)
}

/// Parses `TCP: inuse N orphan N tw N ...`: the sum of both.
fn ended(sockstat: &str) -> Option<u32> {
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP: "))?;
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let after = |name| words.iter().skip_while(|word| **word != name).nth(1)?.parse::<u32>().ok();
    after("orphan")?.checked_add(after("tw")?)
}

/// Bytes of `struct inet_diag_msg`, before the attributes.
const HEAD_BYTES: usize = 72;

/// Lists the sockets at a port that are in some states, with some extensions of sock_diag(7): a bit for each.
fn dump(
    v6: bool,
    (port, states): (u16, u32),
    extensions: u8,
    each: impl FnMut(&[u8]) -> Option<()>,
) -> Result<(), ()> {
    let mut request = request(v6, extensions, states);
    request[8..10].copy_from_slice(&port.to_be_bytes());
    let mut socket = netlink::Socket::open(Protocol::SocketDiagnosis).map_err(drop)?;
    socket.dump(BY_FAMILY, &Message::new(&request), each).map_err(drop)
}

/// A `struct inet_diag_req_v2` for TCP: family, protocol, extensions, padding; states; struct inet_diag_sockid.
fn request(v6: bool, extensions: u8, states: u32) -> [u8; 56] {
    let family = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let mut request = [0; 56];
    (request[0], request[1]) = (family as u8, libc::IPPROTO_TCP as u8);
    request[2] = extensions;
    request[4..8].copy_from_slice(&states.to_ne_bytes());
    request
}

/// Parses `struct inet_diag_msg`: family, state, timer, retransmits; struct inet_diag_sockid (both ports, both
/// addresses of 16 bytes, device, cookie); expiry, bytes to read, bytes to send, user, inode.
fn diagnosed(entry: &[u8]) -> Option<Line> {
    let port = |at: usize| Some(u16::from_be_bytes(*entry.get(at..)?.first_chunk()?));
    let ip = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 16] = *entry.get(at..)?.first_chunk()?;
        match i32::from(*entry.first()?) {
            libc::AF_INET => {
                let [a, b, c, d, ..] = bytes;
                Some(Ipv4Addr::new(a, b, c, d).into())
            }
            libc::AF_INET6 => Some(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()),
            _ => None,
        }
    };
    let ends = [SocketAddr::new(ip(8)?, port(4)?), SocketAddr::new(ip(24)?, port(6)?)];
    let (received, inode) = (u32_at(entry, 56)?, u32_at(entry, 68)?);
    Some(Line { ends, state: *entry.get(1)?, received, inode: inode.into() })
}

/// Reads `/proc/net/PROTOCOL` and its counterpart for IPv6 in the namespace of the calling thread.
fn look(protocol: &str, inodes: &[u64]) -> Vec<(u64, Ends)> {
    let all = lines(protocol).into_iter().filter(|line| inodes.contains(&line.inode));
    all.map(|line| (line.inode, line.ends)).collect()
}

/// The multicast groups that any socket of a stack has joined: number and name of the device, and the group.
pub fn multicast_groups(netns: &OwnedFd) -> Result<Vec<(u32, String, IpAddr)>, Errno> {
    inside_of(netns, || {
        let read = |name| {
            let text = proc::whole_text(format!("/proc/thread-self/net/{name}"));
            text.unwrap_or_default() // a host may be without IPv6
        };
        let mut all = groups_of_four(&read("igmp"));
        all.extend(read("igmp6").lines().filter_map(group_of_six));
        Ok(all)
    })
}

/// Parses `NUMBER DEVICE : ...` with lines of `GROUP ...`, a word in the processor's byte order, below.
fn groups_of_four(text: &str) -> Vec<(u32, String, IpAddr)> {
    let (mut all, mut device) = (Vec::new(), None);
    for line in text.lines().skip(1) {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if !line.starts_with('\t') {
            device = first.parse().ok().zip(words.next());
        } else if let (Some((number, name)), Ok(group)) = (device, u32::from_str_radix(first, 16)) {
            all.push((number, name.to_owned(), IpAddr::V4(group.to_ne_bytes().into())));
        }
    }
    all
}

/// Parses `NUMBER DEVICE GROUP ...`.
fn group_of_six(line: &str) -> Option<(u32, String, IpAddr)> {
    let mut words = line.split_ascii_whitespace();
    let (number, name) = (words.next()?.parse().ok()?, words.next()?.to_owned());
    let group = u128::from_str_radix(words.next()?, 16).ok()?;
    Some((number, name, Ipv6Addr::from_bits(group).into()))
}

/// A socket in the table of its protocol.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    ends: Ends,
    /// The number of its state.
    state: u8,
    /// Unread bytes.
    received: u32,
    /// 0 if no process has it open.
    inode: u64,
}

fn lines(protocol: &str) -> Vec<Line> {
    let mut all = Vec::new();
    for name in [protocol.to_owned(), format!("{protocol}6")] {
        // A host may be without IPv6.
        let text = proc::whole_text(format!("/proc/thread-self/net/{name}"));
        let text = text.unwrap_or_default();
        all.extend(text.lines().filter_map(line));
    }
    all
}

/// Parses `SL: LOCAL REMOTE ST TX:RX TR:WHEN RETRANSMITS UID TIMEOUT INODE ...`.
fn line(line: &str) -> Option<Line> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let ends = [parse(words.next()?)?, parse(words.next()?)?];
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    let (_, received) = words.next()?.split_once(':')?;
    let received = u32::from_str_radix(received, 16).ok()?;
    Some(Line { ends, state, received, inode: words.nth(4)?.parse().ok()? })
}

/// Parses `0100007F:1F90`, words of 32 bits in the processor's byte order.
fn parse(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::netlink::listener::Listeners;

    use super::*;

    /// A listener with room for a few connections, and its address.
    fn listening(address: &str) -> (OwnedFd, SocketAddr) {
        let listener = std::net::TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let listener = OwnedFd::from(listener);
        rustix::net::listen(&listener, 4).unwrap();
        (listener, address)
    }

    /// Packets of the loopback device may arrive late on a busy machine.
    fn arrives(is_there: impl Fn() -> bool) -> bool {
        let until = std::time::Instant::now() + Duration::from_secs(30);
        while !is_there() {
            if std::time::Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    #[test]
    fn queue_has_its_clients_and_their_first_bytes() {
        use std::io::Write;
        let (listener, address) = listening("127.0.0.1:0");
        let (other, elsewhere) = listening("127.0.0.1:0");
        let read = || queue(&listener, &[]).unwrap();
        let sent = || read().clients.iter().filter(|client| client.has_sent).count();
        assert_eq!(read(), Queue { length: 0, limit: 4, clients: Vec::new() });
        assert!(read().is_silent() && !read().is_half_full(), "no client");
        let connect = || std::net::TcpStream::connect(address).unwrap();
        let mut first = connect();
        let closed = connect();
        closed.shutdown(std::net::Shutdown::Write).unwrap();
        let not_here = std::net::TcpStream::connect(elsewhere).unwrap();
        let silent = Client { address: Ipv4Addr::LOCALHOST.into(), has_sent: false };
        let both = Queue { length: 2, limit: 4, clients: vec![silent; 2] };
        assert!(arrives(|| read() == both), "{:?}", read());
        assert!(read().is_silent() && read().is_half_full());
        first.write_all(b"x").unwrap();
        assert!(arrives(|| (read().clients.len(), sent()) == (2, 1)), "a byte has arrived");
        assert!(!read().is_silent());
        drop(rustix::net::accept(&listener).unwrap());
        assert!(arrives(|| (read().length, sent()) == (1, 0)), "the other has sent its end only");
        let more = [connect(), connect(), connect()];
        assert!(arrives(|| read().is_full() && sent() == 0), "{:?}", read());
        assert!(!read().is_silent());
        drop((more, closed, other, not_here));
    }

    #[test]
    fn queue_of_an_ipv6_listener_has_clients_of_both_families() {
        let Ok(listener) = std::net::TcpListener::bind("[::]:0") else { return };
        let port = listener.local_addr().unwrap().port();
        let listener = OwnedFd::from(listener);
        let all = ["127.0.0.1", "::1"].map(|ip| ip.parse::<IpAddr>().unwrap());
        let clients = all.map(|ip| std::net::TcpStream::connect((ip, port)));
        let found = || {
            let mut found = queue(&listener, &[]).unwrap().clients;
            found.sort_by_key(|client| client.address);
            found
        };
        let there = all.iter().zip(&clients).filter(|(_, client)| client.is_ok());
        let expected: Vec<_> =
            there.map(|(ip, _)| Client { address: *ip, has_sent: false }).collect();
        assert!(arrives(|| found() == expected), "{:?}", found());
    }

    /// The kernel selects the same connections that its table lists.
    #[test]
    fn connections_at_a_port_are_those_of_the_table() {
        let (listener, address) = listening("127.0.0.1:0");
        let clients = [0; 3].map(|_| std::net::TcpStream::connect(address).unwrap());
        let selected = || at_port(&address).expect("sock_diag(7) of TCP");
        assert!(arrives(|| selected().len() == clients.len()), "{:?}", selected());
        let sorted = |mut lines: Vec<Line>| {
            lines.sort_by_key(|line| line.ends[1].port());
            lines
        };
        // The table is read in parts: a line may be there twice, or missing, while other sockets come and go.
        let listed = || {
            let mut all = lines("tcp");
            all.retain(|line| line.ends[0] == address && line.state == ESTABLISHED);
            sorted(all)
        };
        assert!(arrives(|| listed() == sorted(selected())), "{:?} {:?}", listed(), selected());
        drop((listener, clients));
    }

    #[test]
    fn segments_of_a_connection_are_counted() {
        use std::io::Write;
        for at in ["127.0.0.1:0", "[::]:0"] {
            let Ok(listener) = std::net::TcpListener::bind(at) else { continue };
            let port = listener.local_addr().unwrap().port();
            let mut client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
            let ends = [SocketAddr::from(([127, 0, 0, 1], port)), client.local_addr().unwrap()];
            let counts = |least: u32| arrives(|| segments_here(&ends).is_some_and(|n| n >= least));
            assert!(counts(1), "{at}");
            let before = segments_here(&ends).unwrap();
            client.write_all(b"x").unwrap();
            assert!(counts(before + 1), "{at}");
            client.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(counts(before + 2), "{at}");
            drop(listener);
            assert_eq!(segments_here(&[ends[0], "127.0.0.1:1".parse().unwrap()]), None);
        }
    }

    /// A process that shares the listener may accept the last client first.
    #[test]
    fn reset_of_clients_ends_without_clients_and_keeps_the_mode() {
        let (listener, address) = listening("127.0.0.1:0");
        let mode = || rustix::fs::fcntl_getfl(&listener).unwrap();
        let before = mode();
        assert!(!before.contains(OFlags::NONBLOCK));
        reset_clients(listener.as_fd(), 3).unwrap();
        let mut clients = [0; 3].map(|_| std::net::TcpStream::connect(address).unwrap());
        reset_clients(listener.as_fd(), 2).unwrap();
        let mut ends = |n: usize| {
            // A reset may arrive late on a busy machine; the last client is not reset.
            let limit = Duration::from_millis(if n < 2 { 20_000 } else { 10 });
            clients[n].set_read_timeout(Some(limit)).unwrap();
            std::io::Read::read(&mut clients[n], &mut [0]).map_err(|e| e.kind())
        };
        use std::io::ErrorKind::{ConnectionReset, WouldBlock};
        assert_eq!(
            [0, 1, 2].map(&mut ends).map(Result::unwrap_err),
            [ConnectionReset, ConnectionReset, WouldBlock]
        );
        assert_eq!((queue(&listener, &[]).unwrap().length, mode()), (1, before));
    }

    #[test]
    fn multicast_groups_are_read() {
        let text = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                    1\tlo        :     1      V3\n\
                    \t\t\t\t010000E0     1 0:00000000\t\t0\n";
        assert_eq!(groups_of_four(text), [(1, "lo".to_owned(), [224, 0, 0, 1].into())]);
        let line = "1    lo              ff020000000000000000000000000001     1 0000000C 0";
        let group = "ff02::1".parse().unwrap();
        assert_eq!(group_of_six(line), Some((1, "lo".to_owned(), group)));
    }

    #[test]
    fn ended_connections_are_counted() {
        let text =
            "sockets: used 9\nTCP: inuse 4 orphan 2 tw 3 alloc 5 mem 1\nUDP: inuse 0 mem 0\n";
        assert_eq!(ended(text), Some(5));
        assert_eq!((ended("TCP: inuse 4"), ended("")), (None, None));
    }

    /// Of ended connections those of chosen addresses and ports are removed, and no other connection.
    #[test]
    fn root_ended_connections_of_an_address_are_forgotten() {
        use std::io::Read;
        let at = |ip: &str| format!("{ip}:0");
        let (own, other) = ("127.7.0.1", "127.7.0.2");
        let end_first = |address: SocketAddr, listener: &OwnedFd| {
            let mut client = std::net::TcpStream::connect(address).unwrap();
            drop(rustix::net::accept(listener).unwrap());
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
            client
        };
        let there = |address: SocketAddr| {
            let is_it = |line: &&Line| line.ends[0] == address && [5, 6].contains(&line.state);
            lines("tcp").iter().filter(is_it).count()
        };
        // Those of an earlier run.
        forget_ended_here(|ip| [own, other].contains(&ip.to_string().as_str()), None);
        let mut addresses = Vec::new();
        let mut waiting = Vec::new();
        for ip in [own, own, other] {
            let (listener, address) = listening(&at(ip));
            drop(end_first(address, &listener)); // in TIME_WAIT
            waiting.push(end_first(address, &listener)); // its peer has not closed yet
            assert!(arrives(|| there(address) == 2), "{address}");
            addresses.push(address);
        }
        let (first, second, foreign) = (addresses[0], addresses[1], addresses[2]);
        // A connection that is open.
        let (listener, open_at) = listening(&at(own));
        let mut client = std::net::TcpStream::connect(open_at).unwrap();
        let mut server = std::net::TcpStream::from(rustix::net::accept(&listener).unwrap());
        let is_own = |ip: IpAddr| ip == first.ip();
        let removed = forget_ended_here(is_own, Some(&[first.port(), foreign.port()]));
        if removed == 0 {
            return eprintln!("SKIPPED: the kernel removes no ended connection");
        }
        assert_eq!((removed, there(first), there(second), there(foreign)), (2, 0, 2, 2));
        assert_eq!(forget_ended_here(is_own, Some(&[])), 0);
        assert_eq!(forget_ended_here(is_own, None), 2);
        assert_eq!((there(second), there(foreign)), (0, 2));
        std::io::Write::write_all(&mut client, b"x").unwrap();
        assert_eq!(server.read(&mut [0]).unwrap(), 1);
        // The rest ends sooner than by itself.
        drop(waiting);
        forget_ended_here(|ip| ip == foreign.ip(), None);
    }

    /// The kernel keeps an ended connection whole if it waits for its peer for more than a minute.
    #[test]
    fn root_ended_connection_that_is_kept_whole_is_forgotten() {
        use std::io::Read;
        const SECONDS: i32 = 100;
        let (listener, address) = listening("127.7.0.3:0");
        let end_first = |linger: i32| {
            let mut client = std::net::TcpStream::connect(address).unwrap();
            let server = rustix::net::accept(&listener).unwrap();
            let (level, name) = (libc::IPPROTO_TCP, libc::TCP_LINGER2);
            call::set_int_option(server.as_fd(), level, name, linger).unwrap();
            drop(server);
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
            client
        };
        let there = || {
            let is_it = |line: &&Line| line.ends[0] == address && [5, 6].contains(&line.state);
            lines("tcp").iter().filter(is_it).count()
        };
        let clients = [end_first(0), end_first(SECONDS)];
        assert!(arrives(|| there() == 2));
        let removed = forget_ended_here(|ip| ip == address.ip(), None);
        if removed == 0 {
            return eprintln!("SKIPPED: the kernel removes no ended connection");
        }
        assert_eq!((removed, there()), (2, 0));
        drop(clients);
    }

    /// One that still sends is left alone, but for the connections of a container with itself.
    #[test]
    fn root_ended_connection_that_still_sends_is_forgotten_with_its_peer_alone() {
        use std::io::Write;
        let (listener, address) = listening("127.7.0.4:0");
        let client = std::net::TcpStream::connect(address).unwrap();
        let mut server = std::net::TcpStream::from(rustix::net::accept(&listener).unwrap());
        server.set_nonblocking(true).unwrap();
        while server.write(&[0; 65536]).is_ok() {}
        drop(server);
        let there = || {
            let is_it = |line: &&Line| line.ends[0] == address && line.state == FIN_WAIT_1;
            lines("tcp").iter().filter(is_it).count()
        };
        assert!(arrives(|| there() == 1));
        assert_eq!(forget_ended_here(|ip| ip == address.ip(), None), 0);
        assert_eq!(there(), 1);
        let peer = client.local_addr().unwrap();
        let removed = forget_ended_here(|ip| ip == address.ip() || ip == peer.ip(), None);
        if removed == 0 {
            return eprintln!("SKIPPED: the kernel removes no ended connection");
        }
        assert_eq!(there(), 0);
    }

    #[test]
    fn a_line_of_the_socket_table_is_read() {
        let text = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000011 00:00000000 00000000 \
                    1000 0 12345 1 0000000000000000";
        let ends = ["127.0.0.1:8080".parse().unwrap(), "0.0.0.0:0".parse().unwrap()];
        assert_eq!(line(text), Some(Line { ends, state: 10, received: 17, inode: 12345 }));
        let mapped = "0000000000000000FFFF00000200000A:0050";
        assert_eq!(parse(mapped), Some("10.0.0.2:80".parse().unwrap()));
        assert_eq!(line("  sl  local_address rem_address"), None);
        assert_eq!(parse("01:2"), None);
    }

    /// The kernel lists keys for CAP_NET_ADMIN alone.
    #[test]
    fn root_sockets_with_keys_are_found() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let (listener, address) = listening(at);
            let inode = rustix::fs::fstat(&listener).unwrap().st_ino;
            let Some(before) = signed_here(true) else { return eprintln!("SKIPPED: no tcp_diag") };
            assert!(!before.contains(&inode));
            let client = std::net::TcpStream::connect(address).unwrap();
            let of_client = rustix::fs::fstat(&client).unwrap().st_ino;
            let own = client.local_addr().unwrap();
            let mut one = Listeners::open().unwrap();
            let mut is_signed = |from, to, inode| one.is_signed([from, to], inode).unwrap();
            let none = SocketAddr::new(address.ip(), 0); // a listener has no peer
            assert_eq!(is_signed(address, own, of_client), Some(false), "{at}");
            assert_eq!(is_signed(address, own, inode), None, "another socket");
            assert_eq!(is_signed(none, address, inode), Some(false), "{at}");
            // struct tcp_md5sig: struct sockaddr_storage, and at 130 and 136 the length of the key and the key.
            let mut key = [0u8; 216];
            let (family, ip_at, ip) = match address {
                SocketAddr::V4(four) => (libc::AF_INET, 4, four.ip().octets().to_vec()),
                SocketAddr::V6(six) => (libc::AF_INET6, 8, six.ip().octets().to_vec()),
            };
            key[0] = family as u8;
            key[ip_at..ip_at + ip.len()].copy_from_slice(&ip);
            (key[130], key[136]) = (1, b'k');
            let (level, name) = (libc::IPPROTO_TCP, libc::TCP_MD5SIG);
            call::set_socket_option(listener.as_fd(), level, name, &key).unwrap();
            assert!(signed_here(true).unwrap().contains(&inode), "{at}");
            assert_eq!(is_signed(none, address, inode), Some(true), "{at}");
            assert!(!signed_here(false).unwrap().contains(&inode), "{at}");
        }
    }
}
