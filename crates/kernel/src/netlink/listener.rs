//! The socket that will have a connection, or has it, and what it has not accepted or read yet (sock_diag(7)).
//!
//! The question is asked for each connection, so it has a socket of its own and no acknowledgement.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::{RecvFlags, SendFlags};

use super::{Message, Protocol, Socket, attributes, u16_at, u32_at};
use crate::error::{Explain, Result};

/// `SOCK_DIAG_BY_FAMILY`
const BY_FAMILY: u16 = 20;
/// An error in place of an answer.
const ERROR: u16 = 2;
/// States of sockets (include/net/tcp_states.h).
const LISTEN: u8 = 10;
/// Those in which a socket waits for late packets. A first packet for its ports begins another connection.
const WAITS: [u8; 2] = [5, 6]; // TCP_FIN_WAIT2, TCP_TIME_WAIT
/// Those in which the side that has accepted a connection may still work for it.
const SERVED: [u8; 3] = [1, 3, 8]; // TCP_ESTABLISHED, TCP_SYN_RECV, TCP_CLOSE_WAIT
/// Those of the side that opens a connection, and of the other one, before the other answers.
const BEGINS: [u8; 2] = [2, 3]; // TCP_SYN_SENT, TCP_SYN_RECV
/// Those of a connection that has both sides, or of which one has not ended its side.
const HAVE: [u8; 6] = [1, 3, 4, 8, 9, 11];
/// `INET_DIAG_INFO` as a bit of the request, and as the kind of the attribute: 1 << (2 - 1) is 2.
const INFO: u8 = 2;
/// `tcpi_bytes_received` in `struct tcp_info`, since Linux 4.1.
const RECEIVED_AT: usize = 128;
/// `tcpi_bytes_sent`, since Linux 4.19.
const SENT_AT: usize = 200;
/// `INET_DIAG_MD5SIG`, which the kernel adds for CAP_NET_ADMIN over the stack. KERNEL(4.14).
const KEYS: u16 = 18;
/// `INET_DIAG_REQ_SK_BPF_STORAGES` of a request, with `SK_DIAG_BPF_STORAGE_REQ_MAP_FD` in it. KERNEL(5.7).
const WANTS_STORAGE: u16 = 2;
const STORAGE_MAP: u16 = 1;
/// `INET_DIAG_SK_BPF_STORAGES` of an answer, `SK_DIAG_BPF_STORAGE` in it, and `SK_DIAG_BPF_STORAGE_MAP_VALUE` in that.
const STORAGE: [u16; 3] = [20, 1, 3];
/// The bits of the kind of an attribute that are not flags.
const KIND_MASK: u16 = 0x3fff;
/// The length of `struct inet_diag_msg`, and where the inode is in it.
const HEAD_BYTES: usize = 72;
const INODE_AT: usize = 68;
/// Bytes of an answer, and more. That of a socket with many keys is cut off, and counts as none.
const ANSWER_BYTES: usize = 1024;

/// A listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listener {
    /// Its cookie, which no other socket of this boot has.
    pub cookie: u64,
    /// Connections that are established and not accepted.
    pub pending: u32,
}

/// A connection, as the side that has accepted it has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Bytes that were received and not read. The end of the stream is one.
    pub unread_bytes: u32,
    /// Bytes that were received, the end of the stream included.
    pub received_bytes: u64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// The state, as the kernel numbers it.
    state: u8,
}

impl Connection {
    /// Whether something was received, and nothing of it was read.
    pub fn is_unread(&self) -> bool {
        self.unread_bytes > 0 && u64::from(self.unread_bytes) >= self.received_bytes
    }

    /// Whether the other side has not answered yet.
    pub fn is_being_made(&self) -> bool {
        BEGINS.contains(&self.state)
    }

    /// Whether nothing was sent, and this side has not ended the connection.
    pub fn is_unanswered(&self) -> bool {
        self.sent_bytes == 0 && SERVED.contains(&self.state)
    }
}

/// What the kernel has for a pair of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A connection between them would come to this.
    Listener(Listener),
    /// They are connected.
    Connection(Connection),
}

/// A place to ask, in the stack of the thread that opened it.
#[derive(Debug)]
pub struct Listeners {
    socket: Socket,
}

impl Listeners {
    /// Opens the place.
    pub fn open() -> Result<Self> {
        Socket::open(Protocol::SocketDiagnosis).map(|socket| Self { socket })
    }

    /// Returns the listening socket that the kernel would choose for a first packet between these; of a group with
    /// SO_REUSEPORT the very one. `None` if the packet would find none, or a connection.
    ///
    /// An ended connection with these ports does not hide the listener. LIMIT: of a group any member is returned then.
    pub fn find(&mut self, ends: [SocketAddr; 2]) -> Result<Option<Listener>> {
        let found = match self.ask(ends, 0, found)? {
            Some(Found::Connection(one)) if WAITS.contains(&one.state) => {
                let [from, to] = ends;
                self.ask([SocketAddr::new(from.ip(), 0), to], 0, found)?
            }
            found => found,
        };
        Ok(match found {
            Some(Found::Listener(listener)) => Some(listener),
            Some(Found::Connection(_)) | None => None,
        })
    }

    /// Returns what there is for a connection from the first to the second.
    pub fn connection(&mut self, ends: [SocketAddr; 2]) -> Result<Option<Found>> {
        self.ask(ends, INFO, found)
    }

    /// Calls `each` with both ends, the own one first, of each socket of this stack that listens or has a connection,
    /// and whether it listens. Ended ones, which only wait for late packets, are left out. With the map of a storage of
    /// sockets (`BPF_MAP_TYPE_SK_STORAGE`) also with the value of the socket there; one that is being made has none.
    pub fn connections(
        &mut self,
        storage: Option<BorrowedFd<'_>>,
        mut each: impl FnMut([SocketAddr; 2], bool, Option<&[u8]>),
    ) -> Result<()> {
        for any in [SocketAddr::from(([0; 4], 0)), SocketAddr::from(([0u16; 8], 0))] {
            let mut request = request(any, any, 0);
            let states = HAVE.iter().fold(1 << LISTEN, |states: u32, state| states | 1 << state);
            request[4..8].copy_from_slice(&states.to_ne_bytes());
            let mut request = Message::new(&request);
            if let Some(map) = storage {
                let map = Message::new(&[]).with(STORAGE_MAP, &map.as_raw_fd().to_ne_bytes());
                request = request.nested(WANTS_STORAGE, &map);
            }
            self.socket.dump(BY_FAMILY, &request, |message| {
                let is_listening = *message.get(1)? == LISTEN;
                let value = storage.and_then(|_| stored(message));
                each([end(message, 4, 8)?, end(message, 6, 24)?], is_listening, value);
                Some(())
            })?;
        }
        Ok(())
    }

    /// Returns whether the socket with this inode has keys for its segments (TCP_MD5SIG, RFC 2385); a listener has no
    /// address in place of the first. `None` if the kernel finds another socket, as where several share an address, or
    /// programs choose among them.
    pub fn is_signed(&mut self, ends: [SocketAddr; 2], inode: u64) -> Result<Option<bool>> {
        self.ask(ends, INFO, |answer| {
            let message = answer.get(16..)?;
            let all = attributes(message.get(HEAD_BYTES..)?)?;
            let is_it = u64::from(u32_at(message, INODE_AT)?) == inode;
            is_it.then(|| all.iter().any(|(kind, _)| *kind == KEYS))
        })
    }

    /// `read` parses an answer that is no error.
    fn ask<T>(
        &mut self,
        [from, to]: [SocketAddr; 2],
        extensions: u8,
        read: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let what = || "AF_NETLINK, NETLINK_SOCK_DIAG".to_owned();
        self.socket.sequence = self.socket.sequence.wrapping_add(1);
        let sequence = self.socket.sequence;
        let request = Message::new(&request(from, to, extensions));
        let request = request.request(BY_FAMILY, super::REQUEST, sequence).unwrap_or_default();
        let socket = &self.socket.socket;
        rustix::io::retry_on_intr(|| rustix::net::send(socket, &request, SendFlags::empty()))
            .explain("send", what)?;
        let mut buffer = [0; ANSWER_BYTES];
        loop {
            let receive = || rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty());
            let (_, length) = rustix::io::retry_on_intr(receive).explain("recv", what)?;
            let answer = buffer.get(..length).unwrap_or_default();
            if u32_at(answer, 8) == Some(sequence) {
                let is_error = u16_at(answer, 4) == Some(ERROR);
                return Ok(if is_error { None } else { read(answer) });
            }
        }
    }
}

/// A `struct inet_diag_req_v2` for TCP: family, protocol, extensions, padding; states; struct inet_diag_sockid (own
/// port, port of the peer, both addresses, device, no cookie).
fn request(from: SocketAddr, to: SocketAddr, extensions: u8) -> [u8; 56] {
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut request = [0; 56];
    (request[0], request[1]) = (family as u8, libc::IPPROTO_TCP as u8);
    request[2] = extensions;
    request[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    for (end, port, address) in [(to, 8, 12), (from, 10, 28)] {
        request[port..port + 2].copy_from_slice(&end.port().to_be_bytes());
        match end.ip() {
            IpAddr::V4(ip) => request[address..address + 4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => request[address..address + 16].copy_from_slice(&ip.octets()),
        }
    }
    request[48..].copy_from_slice(&[0xff; 8]); // INET_DIAG_NOCOOKIE
    request
}

/// One end of a socket, of which `struct inet_diag_msg` has the port and the address at these places. A mapped IPv4
/// address is one of IPv4.
fn end(message: &[u8], port: usize, address: usize) -> Option<SocketAddr> {
    let bytes = message.get(address..)?.first_chunk::<16>()?;
    let ip = match i32::from(*message.first()?) {
        libc::AF_INET => IpAddr::from(*bytes.first_chunk::<4>()?),
        _ => IpAddr::from(*bytes).to_canonical(),
    };
    let port = u16::from_be_bytes(*message.get(port..)?.first_chunk()?);
    Some(SocketAddr::new(ip, port))
}

/// The value of a socket in a storage, of a `struct inet_diag_msg` with attributes.
fn stored(message: &[u8]) -> Option<&[u8]> {
    STORAGE.into_iter().try_fold(message.get(HEAD_BYTES..)?, |within, wanted| {
        let all = attributes(within)?;
        all.into_iter().find(|(kind, _)| kind & KIND_MASK == wanted).map(|(_, value)| value)
    })
}

/// Parses an answer: a netlink header and `struct inet_diag_msg`: family, state, timer, retransmits; struct
/// inet_diag_sockid; expiry, pending connections or unread bytes. `struct tcp_info` follows as an attribute.
fn found(answer: &[u8]) -> Option<Found> {
    let message = answer.get(16..)?;
    let count = u32_at(message, 56)?;
    let state = *message.get(1)?;
    if state == LISTEN {
        let cookie = [u32_at(message, 44)?, u32_at(message, 48)?].map(u64::from);
        return Some(Found::Listener(Listener {
            cookie: cookie[0] | cookie[1] << 32,
            pending: count,
        }));
    }
    let all = attributes(message.get(HEAD_BYTES..)?)?;
    let info = all.iter().find(|(kind, _)| *kind == u16::from(INFO)).map(|(_, info)| *info);
    // A connection that is being made or has ended has none.
    let number = |at| {
        let bytes = info.and_then(|info| info.get(at..)?.first_chunk());
        bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    let (received_bytes, sent_bytes) = (number(RECEIVED_AT), number(SENT_AT));
    Some(Found::Connection(Connection { unread_bytes: count, received_bytes, sent_bytes, state }))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn listener_is_found_with_its_pending_connections() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).unwrap();
            let to = listener.local_addr().unwrap();
            let from = SocketAddr::new(to.ip(), 1);
            let mut listeners = Listeners::open().unwrap();
            let empty = listeners.find([from, to]).unwrap().unwrap();
            assert_eq!(empty.pending, 0);
            let clients = [(); 3].map(|()| TcpStream::connect(to).unwrap());
            let full = listeners.find([from, to]).unwrap().unwrap();
            assert_eq!((full.pending, full.cookie), (3, empty.cookie));
            let (mut accepted, _) = listener.accept().unwrap();
            assert_eq!(listeners.find([from, to]).unwrap().unwrap().pending, 2);
            // A connection, and nothing.
            let own = clients[0].local_addr().unwrap();
            assert_eq!(listeners.find([own, to]).unwrap(), None);
            let is = |listeners: &mut Listeners, unread_bytes, received_bytes, is_unread| {
                let found = listeners.connection([own, to]).unwrap();
                let Some(Found::Connection(one)) = found else { panic!("{found:?}") };
                assert_eq!((one.unread_bytes, one.received_bytes), (unread_bytes, received_bytes));
                assert_eq!(one.is_unread(), is_unread);
            };
            is(&mut listeners, 0, 0, false);
            (&clients[0]).write_all(b"abc").unwrap();
            is(&mut listeners, 3, 3, true);
            accepted.read_exact(&mut [0; 3]).unwrap();
            is(&mut listeners, 0, 3, false);
            // A client that sends more has been served.
            (&clients[0]).write_all(b"defg").unwrap();
            is(&mut listeners, 4, 7, false);
            let mut is_unanswered = || match listeners.connection([own, to]).unwrap() {
                Some(Found::Connection(one)) => one.is_unanswered(),
                found => panic!("{found:?}"),
            };
            assert!(is_unanswered());
            accepted.write_all(b"x").unwrap();
            assert!(!is_unanswered());
            drop((clients, listener, accepted));
            assert_eq!(listeners.find([from, to]).unwrap(), None);
        }
    }

    #[test]
    fn ended_connection_does_not_hide_the_listener() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).unwrap();
            let to = listener.local_addr().unwrap();
            let client = TcpStream::connect(to).unwrap();
            let from = client.local_addr().unwrap();
            let (mut accepted, _) = listener.accept().unwrap();
            let mut listeners = Listeners::open().unwrap();
            assert_eq!(listeners.find([from, to]).unwrap(), None);
            // The side that ends first waits for late packets.
            accepted.shutdown(std::net::Shutdown::Write).unwrap();
            drop(client);
            assert_eq!(accepted.read(&mut [0]).unwrap(), 0);
            drop(accepted);
            let found = listeners.connection([from, to]).unwrap();
            let Some(Found::Connection(one)) = found else { panic!("{found:?}") };
            assert!(WAITS.contains(&one.state), "{one:?}");
            assert_eq!(listeners.find([from, to]).unwrap().map(|found| found.pending), Some(0));
        }
    }
}
