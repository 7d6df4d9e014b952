//! Packets that a rule of the packet filter gives to a process, which decides about each (nfnetlink_queue).
//!
//! A queue belongs to the network namespace in which it was opened, and ends with its descriptor. Packets of a queue
//! that is full, and packets that find no room in the socket, go on (`NFQA_CFG_F_FAIL_OPEN`). Without a queue those of
//! a rule with *bypass* do as well. The packets that an ended queue holds are lost.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendFlags, sockopt};

use super::{Message, Protocol, Socket, attributes};
use crate::call;
use crate::error::{Explain, Result};

/// `NFNL_SUBSYS_QUEUE`, with the kinds of messages.
const PACKET: u16 = 3 << 8;
const VERDICT: u16 = 3 << 8 | 1;
const CONFIGURE: u16 = 3 << 8 | 2;

/// Attributes of `CONFIGURE`: a command, what is copied, the most packets, flags and their mask.
const COMMAND: u16 = 1;
const PARAMETERS: u16 = 2;
const LENGTH_MAX: u16 = 3;
const FLAG_MASK: u16 = 4;
const FLAGS: u16 = 5;
const FAIL_OPEN: u32 = 1;
/// Attributes of packets and verdicts.
const PACKET_HEAD: u16 = 1;
const VERDICT_HEAD: u16 = 2;
const MARK: u16 = 3;
const PAYLOAD: u16 = 10;

/// Bytes of a packet that are copied: the headers of IPv4 and TCP with all options. That of IPv6 is shorter.
const COPY_BYTES: u32 = 60 + 60;
/// Bytes of a TCP header without options, and of all options.
const TCP_BYTES: usize = 20;
const OPTIONS_BYTES: usize = 40;
/// Bytes of a message with a packet. The kernel adds devices, marks and times.
const MESSAGE_BYTES: usize = 2048;
/// Messages that wait to be received.
const RECEIVE_BYTES: usize = 8 << 20;

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is lost.
    Drop,
    /// The chain that gave it to the queue sees it once more, with this mark (`NF_REPEAT`).
    Repeat {
        /// The mark of the packet (`meta mark` of nft(8)).
        mark: u32,
    },
}

/// A packet that waits for its verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Its number in the queue.
    pub id: u32,
    /// Source and destination, if it is TCP without extension headers.
    pub ends: Option<[SocketAddr; 2]>,
    /// Its sequence number; 0 if it is none of these.
    pub sequence: u32,
    /// Its options.
    pub options: Options,
}

/// The options of a TCP header, as they were sent; none if the header is cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    bytes: [u8; OPTIONS_BYTES],
    length: usize,
}

impl Options {
    const NONE: Self = Self { bytes: [0; OPTIONS_BYTES], length: 0 };

    /// Of a TCP header.
    fn of(tcp: &[u8]) -> Option<Self> {
        let end = usize::from(tcp.get(12)? >> 4) * 4;
        let options = tcp.get(TCP_BYTES..end)?;
        let mut all = Self { length: options.len(), ..Self::NONE };
        all.bytes.get_mut(..all.length)?.copy_from_slice(options);
        Some(all)
    }
}

impl Deref for Options {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// An open queue.
#[derive(Debug)]
pub struct Queue {
    socket: OwnedFd,
    number: u16,
}

impl Queue {
    /// Opens the queue with this number, for at most so many packets, in the stack of the calling thread. EBUSY if
    /// another process has it (EPERM before Linux 6.18).
    pub fn open(number: u16, length_max: u32) -> Result<Self> {
        let mut socket = Socket::open(Protocol::Filter)?;
        let parameters = [&COPY_BYTES.to_be_bytes()[..], &[2]].concat(); // NFQNL_COPY_PACKET
        let message = Message::new(&head(number))
            .with(COMMAND, &[1, 0, 0, 0]) // NFQNL_CFG_CMD_BIND
            .with(PARAMETERS, &parameters)
            .with(LENGTH_MAX, &length_max.to_be_bytes())
            .with(FLAG_MASK, &FAIL_OPEN.to_be_bytes())
            .with(FLAGS, &FAIL_OPEN.to_be_bytes());
        let what = || "AF_NETLINK, NETLINK_NETFILTER".to_owned();
        sockopt::set_socket_recv_buffer_size_force(&socket.socket, RECEIVE_BYTES)
            .explain("setsockopt", what)?;
        call::set_int_option(socket.socket.as_fd(), libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, 1)
            .explain("setsockopt", what)?;
        socket.request(CONFIGURE, 0, &message)?;
        Ok(Self { socket: socket.socket, number })
    }

    /// Returns the next packet, if one waits.
    pub fn take(&mut self) -> Result<Option<Packet>> {
        let mut buffer = [0; MESSAGE_BYTES];
        loop {
            let received = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT);
            let (_, length) = match received {
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::NOBUFS) => continue,
                other => other.explain("recv", || "AF_NETLINK, NETLINK_NETFILTER".into())?,
            };
            // Other messages are errors about packets that have no verdict any more.
            if let Some(packet) = buffer.get(..length).and_then(packet) {
                return Ok(Some(packet));
            }
        }
    }

    /// Gives a packet its verdict. A packet that goes on is delivered before the call returns, unless it leaves the
    /// host.
    pub fn decide(&self, id: u32, verdict: Verdict) -> Result<()> {
        let (number, mark) = match verdict {
            Verdict::Drop => (0u32, None),
            Verdict::Repeat { mark } => (4, Some(mark)),
        };
        let value = [number.to_be_bytes(), id.to_be_bytes()].concat();
        let message = Message::new(&head(self.number)).with(VERDICT_HEAD, &value);
        let message = match mark {
            Some(mark) => message.with(MARK, &mark.to_be_bytes()),
            None => message,
        };
        let request = message.request(VERDICT, super::REQUEST, 0).unwrap_or_default();
        let send = || rustix::net::send(&self.socket, &request, SendFlags::empty());
        rustix::io::retry_on_intr(send)
            .map(drop)
            .explain("send", || "AF_NETLINK, NETLINK_NETFILTER".into())
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// `NFT_MSG_NEWRULE` of `NFNL_SUBSYS_NFTABLES`, its flags (create, append), and its attributes. A match of xtables has
/// those of a target.
const NEW_RULE: u16 = 10 << 8 | 6;
const APPEND: u16 = 0x400 | 0x800;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const TARGET_NAME: u16 = 1;
const TARGET_REVISION: u16 = 2;
const TARGET_INFO: u16 = 3;
/// Attributes of the expression `immediate`, of its data, and of a verdict in these.
const REGISTER: u16 = 1;
const REGISTER_DATA: u16 = 2;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
/// Bytes of `struct xt_bpf_info_v1`: 64 instructions, what is before them, and a pointer.
const PASS_BYTES: usize = 8 + 64 * 8 + 8;

/// Appends a rule to a chain of a table of AF_INET or AF_INET6, in the stack of the calling thread: all its packets go
/// to a queue, or on if no process has that. By the target NFQUEUE of xtables, which nft(8) cannot write, and which is
/// in kernels without the `queue` of nftables. ENOENT if neither table, chain nor target is there.
pub fn add_rule(family: u8, chain: (&str, &str), number: u16) -> Result<()> {
    let [low, high] = number.to_ne_bytes();
    // struct xt_NFQ_info_v3: number, how many queues, flags (bypass); aligned as xtables does.
    let [one, zero] = 1u16.to_ne_bytes();
    let info = [low, high, one, zero, one, zero, 0, 0];
    append(family, chain, &[expression("target", &extension("NFQUEUE", 3, &info))])
}

/// Appends a rule that accepts the packets for which a program returns anything but 0, or all. By the match `bpf` of
/// xtables (xt_bpf), which nft(8) cannot write. The program is one of BPF_PROG_TYPE_SOCKET_FILTER, and the rule keeps
/// it. ENOENT if neither table, chain nor match is there.
///
/// KERNEL(4.16): the descriptor of a program.
pub fn add_pass(family: u8, chain: (&str, &str), program: Option<BorrowedFd<'_>>) -> Result<()> {
    // struct xt_bpf_info_v1: mode, number of classic instructions, descriptor, instructions, a pointer of the kernel.
    let mut info = [0; PASS_BYTES];
    match program {
        Some(program) => {
            info[..2].copy_from_slice(&2u16.to_ne_bytes()); // XT_BPF_MODE_FD_ELF
            info[4..8].copy_from_slice(&program.as_raw_fd().to_ne_bytes());
        }
        None => {
            info[2..4].copy_from_slice(&1u16.to_ne_bytes());
            info[8..10].copy_from_slice(&6u16.to_ne_bytes()); // BPF_RET, and the constant after it
            info[12..16].copy_from_slice(&1u32.to_ne_bytes());
        }
    }
    let verdict = Message::new(&[]).with(VERDICT_CODE, &1u32.to_be_bytes()); // NF_ACCEPT
    let verdict = Message::new(&[]).nested(DATA_VERDICT, &verdict);
    let accept = Message::new(&[]).with(REGISTER, &0u32.to_be_bytes()); // NFT_REG_VERDICT
    let rule = [
        expression("match", &extension("bpf", 1, &info)),
        expression("immediate", &accept.nested(REGISTER_DATA, &verdict)),
    ];
    append(family, chain, &rule)
}

/// A target or match of xtables.
fn extension(name: &str, revision: u32, info: &[u8]) -> Message {
    Message::new(&[])
        .with_text(TARGET_NAME, name)
        .with(TARGET_REVISION, &revision.to_be_bytes())
        .with(TARGET_INFO, info)
}

fn expression(name: &str, data: &Message) -> Message {
    Message::new(&[]).with_text(EXPRESSION_NAME, name).nested(EXPRESSION_DATA, data)
}

/// Appends a rule to a chain.
fn append(family: u8, (table, chain): (&str, &str), rule: &[Message]) -> Result<()> {
    let add = |all: Message, one| all.nested(ELEMENT, one);
    let message = Message::new(&[family, 0, 0, 0])
        .with_text(RULE_TABLE, table)
        .with_text(RULE_CHAIN, chain)
        .nested(RULE_EXPRESSIONS, &rule.iter().fold(Message::new(&[]), add));
    Socket::open(Protocol::Filter)?.request_in_batch(NEW_RULE, APPEND, &message)
}

/// `struct nfgenmsg`: family, version, number of the queue.
fn head(number: u16) -> [u8; 4] {
    let [high, low] = number.to_be_bytes();
    [0, 0, high, low]
}

/// Parses a message.
fn packet(message: &[u8]) -> Option<Packet> {
    if super::u16_at(message, 4)? != PACKET {
        return None;
    }
    let all = attributes(message.get(20..)?)?;
    let of = |kind| all.iter().find(|(found, _)| *found == kind).map(|(_, value)| *value);
    let id = u32::from_be_bytes(*of(PACKET_HEAD)?.first_chunk()?);
    Some(of(PAYLOAD).and_then(|payload| parsed(id, payload)).unwrap_or(Packet {
        id,
        ends: None,
        sequence: 0,
        options: Options::NONE,
    }))
}

/// Parses a TCP packet.
fn parsed(id: u32, packet: &[u8]) -> Option<Packet> {
    let (from, to, tcp): (IpAddr, IpAddr, &[u8]) = match packet.first()? >> 4 {
        4 => {
            let words = usize::from(packet.first()? & 15);
            let at = |at: usize| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
            let is_tcp = *packet.get(9)? == 6 && words >= 5;
            is_tcp.then_some(())?;
            (at(12)?.into(), at(16)?.into(), packet.get(words * 4..)?)
        }
        6 => {
            let at = |at: usize| Some(Ipv6Addr::from(*packet.get(at..)?.first_chunk::<16>()?));
            (*packet.get(6)? == 6).then_some(())?;
            (at(8)?.into(), at(24)?.into(), packet.get(40..)?)
        }
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes(*tcp.get(at..)?.first_chunk()?));
    let sequence = u32::from_be_bytes(*tcp.get(4..)?.first_chunk()?);
    let ends = Some([SocketAddr::new(from, port(0)?), SocketAddr::new(to, port(2)?)]);
    Some(Packet { id, ends, sequence, options: Options::of(tcp).unwrap_or(Options::NONE) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_those_of_tcp_alone() {
        let mut v4 = vec![0x46, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        v4.extend([1, 1, 1, 1]); // an option
        v4.extend([0x30, 0x39, 0, 80, 0, 0, 1, 2]);
        let pair = ["10.0.0.1:12345", "10.0.0.2:80"].map(|end| end.parse().unwrap());
        let ends = |packet: &[u8]| parsed(7, packet).map(|it| (it.ends.unwrap(), it.sequence));
        let expected = Some((pair, 258));
        assert_eq!(ends(&v4), expected);
        for length in 0..v4.len() {
            assert_eq!(ends(&v4[..length]), None);
        }
        v4[9] = 17;
        assert_eq!(ends(&v4), None);
        let mut v6 = vec![0x60, 0, 0, 0, 0, 20, 6, 64];
        v6.extend(Ipv6Addr::LOCALHOST.octets());
        v6.extend("fd00::5".parse::<Ipv6Addr>().unwrap().octets());
        v6.extend([0, 9, 0x1f, 0x90, 0, 0, 0, 3]);
        let expected = Some((["[::1]:9", "[fd00::5]:8080"].map(|end| end.parse().unwrap()), 3));
        assert_eq!(ends(&v6), expected);
        v6[6] = 0; // an extension header
        assert_eq!(ends(&v6), None);
        assert_eq!(ends(&[]), None);
    }

    #[test]
    fn options_are_those_of_a_whole_header() {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        packet.extend([0x30, 0x39, 0, 80, 0, 0, 1, 2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
        let all: Vec<u8> = (1..=60).collect();
        packet.extend(&all);
        for (words, expected) in [(5, 0), (6, 4), (15, 40), (4, 0), (0, 0)] {
            packet[20 + 12] = words << 4;
            let found = parsed(7, &packet).unwrap();
            assert_eq!(*found.options, all[..expected], "{words}");
        }
        packet[20 + 12] = 15 << 4;
        for length in 28..packet.len() {
            let expected = if length < 80 { 0 } else { 40 };
            assert_eq!(parsed(7, &packet[..length]).unwrap().options.len(), expected, "{length}");
        }
    }

    #[test]
    fn other_messages_are_no_packets() {
        assert_eq!(packet(&[]), None);
        let error = Message::new(&[0; 4]).request(2, 0, 0).unwrap();
        assert_eq!(packet(&error), None);
        let id = 7u32.to_be_bytes();
        let message = Message::new(&head(1)).with(PACKET_HEAD, &[&id[..], &[8, 0, 1]].concat());
        let message = message.with(PAYLOAD, &[0x45, 0]).request(PACKET, 0, 0).unwrap();
        assert_eq!(
            packet(&message),
            Some(Packet { id: 7, ends: None, sequence: 0, options: Options::NONE })
        );
        assert_eq!(packet(&message[..message.len() - 3]), None);
    }
}
