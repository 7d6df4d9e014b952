//! netlink(7): requests to the kernel about the network stack of the calling thread.
//!
//! A [`Socket`] belongs to the network namespace in which its thread opened it. A request is a
//! [`Message`] and ends with an acknowledgement, an error or the end of a list, so that no call waits
//! for an answer that never arrives.
//!
//! What is checked: an answer comes from the kernel and not from another process, has the sequence
//! number of its request, and has the format. Its size is read before it is received. A list that
//! changed while the kernel wrote it (`NLM_F_DUMP_INTR`) is requested again.
//!
//! [`queue`] receives packets, which are no answers, and [`listener`] asks one question many times.
//!
//! Not here: the meaning of entries. [`route`] and [`traffic`] have the numbers that several crates use.

pub mod listener;
mod message;
pub mod queue;
pub mod route;
pub mod traffic;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use self::message::{Answer, Refusal};
pub use self::message::{Message, attributes, u16_at, u32_at};
use crate::call;
use crate::error::{CallError, Explain, Result};

/// Flags of a request that makes an entry: the entry must not exist yet.
pub const NEW: u16 = 0x200 | 0x400;
/// The entry is made, or an existing one is changed.
pub const REPLACE: u16 = 0x100 | 0x400;

/// Flags of all requests: a request; acknowledge it; list the table.
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const LIST: u16 = 0x300;
/// `NFNL_MSG_BATCH_BEGIN` and `NFNL_MSG_BATCH_END`.
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// LIMIT: how often a list that changes meanwhile is requested.
const ATTEMPTS: usize = 32;
/// LIMIT: the length of a datagram. The kernel makes those of a list as long as the buffer, up to half of this, and a
/// single entry is shorter.
const BUFFER_BYTES: usize = 64 << 10;

/// Families of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// rtnetlink(7).
    Route,
    /// sock_diag(7).
    SocketDiagnosis,
    /// nftables.
    Filter,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Route => "NETLINK_ROUTE",
            Self::SocketDiagnosis => "NETLINK_SOCK_DIAG",
            Self::Filter => "NETLINK_NETFILTER",
        })
    }
}

/// A connection to the kernel.
#[derive(Debug)]
pub struct Socket {
    socket: OwnedFd,
    protocol: Protocol,
    /// The number of the last request.
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open(protocol: Protocol) -> Result<Self> {
        use rustix::net::netlink;
        let number = match protocol {
            Protocol::Route => None, // NETLINK_ROUTE is 0
            Protocol::SocketDiagnosis => Some(netlink::SOCK_DIAG),
            Protocol::Filter => Some(netlink::NETFILTER),
        };
        let name = || format!("AF_NETLINK, {protocol}");
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(family, SocketType::RAW, flags, number)
            .explain("socket", name)?;
        // A connected socket receives nothing from other processes. Root of a container can send to
        // any socket in the container's own stack.
        rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0)).explain("connect", name)?;
        // KERNEL(4.12): a text beside the error number, and errors without a copy of the request. An
        // older kernel sends the number only.
        for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK] {
            let _ = call::set_int_option(socket.as_fd(), libc::SOL_NETLINK, option, 1);
        }
        Ok(Self { socket, protocol, sequence: 0, buffer: Vec::new() })
    }

    /// Requests a change. `flags` are [`NEW`], [`REPLACE`] or 0.
    pub fn request(&mut self, kind: u16, flags: u16, message: &Message) -> Result<()> {
        self.exchange(kind, ACKNOWLEDGE | flags, message).map(drop)
    }

    /// Requests one entry; returns the answer without the netlink header. EBADMSG if there is none.
    pub fn answer(&mut self, kind: u16, message: &Message) -> Result<Vec<u8>> {
        let answer = self.exchange(kind, ACKNOWLEDGE, message)?;
        let entry = answer.entries().next().map(<[u8]>::to_vec);
        entry.ok_or_else(|| self.error(kind, Refusal::malformed()))
    }

    /// Requests all entries of a table. `each` is called with every entry, without the netlink
    /// header, and returns `None` for a malformed one: EBADMSG.
    ///
    /// EAGAIN if the table changed during each of 32 attempts.
    pub fn dump(
        &mut self,
        kind: u16,
        message: &Message,
        mut each: impl FnMut(&[u8]) -> Option<()>,
    ) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let answer = self.exchange(kind, LIST, message)?;
            if answer.is_interrupted {
                continue;
            }
            let read = answer.entries().try_for_each(&mut each);
            return read.ok_or_else(|| self.error(kind, Refusal::malformed()));
        }
        let text = format!("the table changed during each of {ATTEMPTS} attempts");
        Err(self.error(kind, Refusal { errno: libc::EAGAIN, text }))
    }

    /// Requests a change of nftables, which are changed in batches: this one has one message.
    pub fn request_in_batch(&mut self, kind: u16, flags: u16, message: &Message) -> Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let too_long = || self.error(kind, Refusal::too_long());
        // struct nfgenmsg: family, version, NFNL_SUBSYS_NFTABLES in the byte order of the network.
        let edge = Message::new(&[0, 0, 0, 10]);
        let parts = [
            edge.request(BATCH_BEGIN, REQUEST, self.sequence),
            message.request(kind, REQUEST | ACKNOWLEDGE | flags, self.sequence),
            edge.request(BATCH_END, REQUEST, self.sequence),
        ];
        let batch: Option<Vec<Vec<u8>>> = parts.into_iter().collect();
        let batch = batch.ok_or_else(too_long)?.concat();
        self.converse(&batch).map(drop).map_err(|refusal| self.error(kind, refusal))
    }

    /// Sends a request, and receives its answer.
    fn exchange(&mut self, kind: u16, flags: u16, message: &Message) -> Result<Answer> {
        self.exchange_bare(kind, flags, message).map_err(|refusal| self.error(kind, refusal))
    }

    fn exchange_bare(
        &mut self,
        kind: u16,
        flags: u16,
        message: &Message,
    ) -> std::result::Result<Answer, Refusal> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = message.request(kind, REQUEST | flags, self.sequence);
        self.converse(&request.ok_or_else(Refusal::too_long)?)
    }

    fn converse(&mut self, request: &[u8]) -> std::result::Result<Answer, Refusal> {
        retry(|| rustix::net::send(&self.socket, request, SendFlags::empty()))?;
        let mut answer = Answer::new(self.sequence);
        loop {
            if self.buffer.is_empty() {
                // Allocated as zeros: a page that no answer reaches is never touched.
                self.buffer = vec![0; BUFFER_BYTES];
            }
            let buffer = &mut self.buffer[..];
            let (_, length) =
                retry(|| rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::TRUNC))?;
            if length > BUFFER_BYTES {
                return Err(Refusal::too_long());
            }
            if answer.take(&self.buffer[..length])? {
                return Ok(answer);
            }
        }
    }

    fn error(&self, kind: u16, refusal: Refusal) -> CallError {
        let error = CallError::new("netlink", format!("{}, {kind}", self.protocol), refusal.errno);
        error.with_note(refusal.text)
    }
}

/// Calls until no signal interrupts.
fn retry<T>(call: impl FnMut() -> rustix::io::Result<T>) -> std::result::Result<T, Refusal> {
    rustix::io::retry_on_intr(call)
        .map_err(|e| Refusal { errno: e.raw_os_error(), text: String::new() })
}

#[cfg(test)]
mod tests {
    use rustix::net::netlink::SocketAddrNetlink;

    use super::*;
    use crate::process::{self, CloneFlags};

    /// Calls `act` in a new stack.
    fn in_new<T: Send>(act: impl FnOnce(&mut Socket) -> T + Send) -> T {
        std::thread::scope(|scope| {
            let done = scope.spawn(|| {
                process::unshare(CloneFlags::NEWNET).expect("root can make a stack");
                act(&mut Socket::open(Protocol::Route).expect("a stack has rtnetlink"))
            });
            done.join().expect("no panic")
        })
    }

    fn pair(name: &str) -> Message {
        let info = Message::new(&[]).with_text(route::INFO_KIND, "veth");
        let link = route::link(0, 0, 0).with_text(route::LINK_NAME, name);
        link.nested(route::LINK_INFO, &info)
    }

    fn named(name: &str) -> Message {
        route::link(0, 0, 0).with_text(route::LINK_NAME, name)
    }

    #[test]
    fn root_change_is_acknowledged_or_refused_with_the_text_of_the_kernel() {
        in_new(|socket| {
            socket.request(route::NEW_LINK, NEW, &pair("a")).unwrap();
            let refused = socket.request(route::NEW_LINK, NEW, &pair("a")).unwrap_err();
            assert_eq!(refused.errno(), libc::EEXIST);
            // An MTU below the least of an Ethernet device.
            let small = named("a").with(route::LINK_MTU, &1u32.to_ne_bytes());
            let refused = socket.request(route::NEW_LINK, 0, &small).unwrap_err();
            assert_eq!(refused.errno(), libc::EINVAL);
            let text = refused.to_string();
            assert!(text.starts_with("netlink(NETLINK_ROUTE, 16): Invalid argument"), "{text}");
            assert!(text.contains("mtu"), "{text}");
            // The socket is still usable.
            let found = socket.answer(route::GET_LINK, &named("a")).unwrap();
            let found = attributes(&found[route::LINK_HEAD_BYTES..]).unwrap();
            assert!(found.contains(&(route::LINK_NAME, &b"a\0"[..])));
            let missing = socket.answer(route::GET_LINK, &named("b")).unwrap_err();
            assert_eq!(missing.errno(), libc::ENODEV);
        });
    }

    #[test]
    fn root_list_longer_than_a_datagram_is_whole() {
        const COUNT: u16 = 2000;
        in_new(|socket| {
            for n in 0..COUNT {
                let [high, low] = n.to_be_bytes();
                // struct ifaddrmsg: family, prefix, flags, scope, device.
                let message = Message::new(&[libc::AF_INET as u8, 32, 0, 0, 1, 0, 0, 0]);
                let message = message.with(libc::IFA_LOCAL, &[10, 0, high, low]);
                socket.request(route::NEW_ADDRESS, NEW, &message).unwrap();
            }
            let (mut seen, mut bytes) = (std::collections::BTreeSet::new(), 0);
            let request = Message::new(&[0; 8]);
            let listed = socket.dump(libc::RTM_GETADDR, &request, |entry| {
                bytes += entry.len();
                let found = attributes(entry.get(8..)?)?;
                let own = found.iter().find(|(kind, _)| *kind == libc::IFA_LOCAL)?.1;
                seen.insert(own.to_vec());
                Some(())
            });
            listed.unwrap();
            assert_eq!(seen.len(), usize::from(COUNT));
            assert!(bytes > BUFFER_BYTES, "{bytes}");
            // A reader that finds an entry malformed ends the list.
            let refused = socket.dump(libc::RTM_GETADDR, &request, |_| None).unwrap_err();
            assert_eq!(refused.errno(), libc::EBADMSG);
        });
    }

    #[test]
    fn root_other_process_cannot_send_to_the_socket() {
        in_new(|socket| {
            let address = rustix::net::getsockname(&socket.socket).unwrap();
            let port = SocketAddrNetlink::try_from(address).unwrap().pid();
            let other = rustix::net::socket_with(
                AddressFamily::NETLINK,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                None,
            )
            .unwrap();
            let forged = Message::new(&[0; 4]).request(16, 0, 1).unwrap();
            let to = SocketAddrNetlink::new(port, 0);
            let sent = rustix::net::sendto(&other, &forged, SendFlags::empty(), &to);
            assert_eq!(sent, Err(rustix::io::Errno::CONNREFUSED));
        });
    }

    #[test]
    fn message_that_is_too_long_is_not_sent() {
        let mut socket = Socket::open(Protocol::Route).unwrap();
        let long = route::link(1, 0, 0).with(route::LINK_ALIAS, &[b'a'; 70_000]);
        let refused = socket.request(route::NEW_LINK, 0, &long).unwrap_err();
        assert_eq!(refused.errno(), libc::EMSGSIZE);
    }
}
