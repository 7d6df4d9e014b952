//! First packets of TCP connections to some addresses of a stack, held until a process admits them.
//!
//! A table gives the SYN packets to a queue ([`dormouse_kernel::netlink::queue`]). The rule has *bypass*: while no
//! process has the queue, the packets go on. The table may therefore stay after a process that was killed.
//!
//! ```text
//! table ip dormouse_order {                       and the same for ip6
//!     set services { ... }
//!     set begun { both ends of each connection that was admitted less than a second ago }
//!     chain in { type filter hook input priority filter; tcp flags syn ... ip daddr @services jump held }
//!     chain held { meta mark 25710 add to begun, accept; jump passes; queue flags bypass to 25709 }
//!     chain passes { those that the program of [`Passes`] allows, accept }
//!     chain out { type filter hook output priority filter; tcp flags rst ... @begun drop }
//! }
//! ```
//!
//! The hook is the last one before the packet is delivered: filters have let it pass, and programs at the device have
//! chosen its socket. Packets of the engine itself ([`quiet::MARK`](crate::quiet::MARK)) are not held.
//!
//! KERNEL: seen with 6.18. A segment that arrives while another processor puts the new socket of its connection in the
//! place of the request finds neither of the two (`inet_ehash_insert()`). The kernel resets the connection at the
//! client, and the service keeps its side: one that reads without a limit of time waits for ever. Clients seldom meet
//! this, as their own call of connect(2) runs the whole handshake. That of an admitted connection runs in the admitting
//! thread, and a client that polls sends its request meanwhile: beside busy loops one of some thousand connections was
//! reset. So the stack does not send what the kernel answers to such a segment, an RST without an ACK, within [`BEGUN`]
//! of the admission. The client repeats the segment after 0.2 s.
//!
//! LIMIT: a client that writes to a side that was closed within that time learns of it when it repeats the segment.
//!
//! KERNEL: `queue` of nftables is a module (`nft_queue`). Where it is missing, the target NFQUEUE of xtables does the
//! same, which nft(8) cannot write. The rule in the chain `held` is then made by a request of ours
//! ([`queue::add_rule`]). So is that in the chain `passes`, as nft(8) writes no match of xtables ([`queue::add_pass`]).
//! Without it all are held.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

use dormouse_bpf::pass::Passes;
use dormouse_kernel::CallError;
use dormouse_kernel::call::Namespace;
use dormouse_kernel::netlink::listener::Listeners;
use dormouse_kernel::netlink::queue::{self, Queue, Verdict};
use dormouse_kernel::reset::Resets;
use dormouse_kernel::{namespace, nft};
use dormouse_record::Error;

use crate::quiet;

type Result<T> = std::result::Result<T, Error>;

/// The number of the queue. No one else has one in these stacks.
const QUEUE: u16 = 0x646d;
/// LIMIT: packets that are held in one stack, some 1 KB of the kernel's memory each. Further ones go on.
pub const HELD_MAX: u32 = 8192;
const TABLE: &str = "dormouse_order";
/// The verdict for a packet that goes on.
pub const ADMIT: Verdict = Verdict::Repeat { mark: ADMITTED };
/// The mark of packets that were admitted.
const ADMITTED: u32 = 0x646e;
/// For how long the ends of an admitted connection are kept, in the words of nft(8).
const BEGUN: &str = "1s";
/// LIMIT: admitted connections of one family that are kept. Further ones go on all the same.
const BEGUN_MAX: u32 = 65_536;
/// The families that have a table: name, the word for addresses, the type of a set, number.
const FAMILIES: [(&str, &str, u8); 2] =
    [("ip", "ipv4_addr", libc::AF_INET as u8), ("ip6", "ipv6_addr", libc::AF_INET6 as u8)];

/// What a process needs to hold packets.
#[derive(Debug)]
pub struct Holding {
    /// The packets.
    pub queue: Queue,
    /// The listeners that will have them.
    pub listeners: Listeners,
    /// What refuses them.
    pub resets: Resets,
    /// How many go on without being held; `None` where the kernel has no such programs, or no rules with them.
    pub passes: Option<Passes>,
}

/// Opens the queue of a stack. No packet comes before [`hold`]. EBUSY or EPERM if another process has it.
pub fn open(netns: BorrowedFd<'_>) -> Result<Holding> {
    inside(netns, || {
        let queue = Queue::open(QUEUE, HELD_MAX).map_err(elsewhere)?;
        let listeners = Listeners::open().map_err(elsewhere)?;
        let resets = Resets::open().map_err(elsewhere)?;
        Ok(Holding { queue, listeners, resets, passes: Passes::load().ok() })
    })
}

/// Holds the first packets to these addresses, and no others any more.
pub fn hold(netns: BorrowedFd<'_>, services: &[IpAddr]) -> Result<()> {
    inside(netns, || {
        if services.is_empty() {
            return apply(&nothing());
        }
        // The rule of nft(8) first: it needs no window without a rule.
        if apply(&rules(services, true)).is_ok() {
            return Ok(());
        }
        apply(&rules(services, false))?;
        let add = |(_, _, family): (_, _, u8)| queue::add_rule(family, (TABLE, "held"), QUEUE);
        FAMILIES.into_iter().try_for_each(add).map_err(elsewhere)
    })
}

/// Has first packets to the addresses of [`hold`] go on as far as they are allowed. A later [`hold`] ends this.
pub fn pass(netns: BorrowedFd<'_>, passes: &Passes) -> Result<()> {
    let program = passes.program();
    let add = |(_, _, family): (_, _, u8)| {
        queue::add_pass(family, (TABLE, "passes"), Some(program)).map_err(elsewhere)
    };
    inside(netns, || FAMILIES.into_iter().try_for_each(add))
}

/// Accounts that programs in the kernel have noted with connections.
#[derive(Debug, Clone, Copy)]
pub struct Notes<'m> {
    /// Their storage of sockets.
    pub map: BorrowedFd<'m>,
    /// Reads the account of the client from the note of the side that was connected to.
    pub account: fn(&[u8]) -> Option<u32>,
}

/// Counts the connections of a stack that have come to one of some services, and not to a client of its own: calls
/// `each` with client and service, and with the account of the client where one is noted.
pub fn count(
    listeners: &mut Listeners,
    notes: Option<Notes<'_>>,
    is_service: impl Fn(IpAddr) -> bool,
    mut each: impl FnMut([SocketAddr; 2], Option<u32>),
) -> std::result::Result<(), CallError> {
    let (mut ports, mut found) = (HashSet::new(), Vec::new());
    let note = |[own, other]: [SocketAddr; 2], is_listening: bool, value: Option<&[u8]>| {
        if !is_service(own.ip()) {
            return;
        }
        let account = notes.zip(value).and_then(|(notes, value)| (notes.account)(value));
        match is_listening {
            true => drop(ports.insert(own.port())),
            false => found.push(([other, own], account)),
        }
    };
    listeners.connections(notes.map(|notes| notes.map), note)?;
    let has_come = |([_, own], _): &&([SocketAddr; 2], _)| ports.contains(&own.port());
    found.iter().filter(has_come).for_each(|(ends, account)| each(*ends, *account));
    Ok(())
}

/// Does the same in a stack that is not held.
pub fn count_in(
    netns: BorrowedFd<'_>,
    notes: Option<Notes<'_>>,
    is_service: impl Fn(IpAddr) -> bool + Send,
    each: impl FnMut([SocketAddr; 2], Option<u32>) + Send,
) -> Result<()> {
    inside(netns, || {
        let mut listeners = Listeners::open().map_err(elsewhere)?;
        count(&mut listeners, notes, is_service, each).map_err(elsewhere)
    })
}

fn inside<T: Send>(netns: BorrowedFd<'_>, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let done = namespace::visit(netns, Namespace::Net, act);
    done.map_err(Error::call("enter the network namespace of a domain"))?
}

fn apply(rules: &str) -> Result<()> {
    nft::apply(rules)
        .map_err(|e| Error::Elsewhere(format!("nft cannot hold first packets of connections: {e}")))
}

fn elsewhere(e: CallError) -> Error {
    Error::Elsewhere(format!("first packets of connections cannot be held: {e}"))
}

/// The text that removes both tables.
fn nothing() -> String {
    let remove = |(family, ..): (&str, &str, u8)| {
        format!("table {family} {TABLE}\ndelete table {family} {TABLE}\n")
    };
    FAMILIES.map(remove).concat()
}

fn rules(services: &[IpAddr], has_queue: bool) -> String {
    let mut text = nothing();
    for (family, kind, _) in FAMILIES {
        let of_family = services.iter().filter(|ip| ip.is_ipv4() == (family == "ip"));
        let elements: Vec<String> = of_family.map(IpAddr::to_string).collect();
        let elements = match elements.is_empty() {
            true => String::new(),
            false => format!("elements = {{ {} }};", elements.join(", ")),
        };
        let rule = match has_queue {
            true => format!("queue flags bypass to {QUEUE}"),
            false => String::new(),
        };
        let ends = format!("{kind} . inet_service . {kind} . inet_service");
        let flags = "meta l4proto tcp tcp flags & (fin|syn|rst|ack)";
        let mark = quiet::MARK;
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "table {family} {TABLE} {{\n\
             set services {{ type {kind}; {elements} }}\n\
             set begun {{ type {ends}; size {BEGUN_MAX}; flags dynamic,timeout; timeout {BEGUN}; }}\n\
             chain passes {{ }}\n\
             chain held {{\n\
             meta mark {ADMITTED} update @begun {{ {family} saddr . tcp sport . {family} daddr . tcp dport }}\n\
             meta mark {ADMITTED} accept\njump passes\n{rule}\n}}\n\
             chain in {{ type filter hook input priority filter;\n\
             {flags} == syn meta mark != {mark} {family} daddr @services jump held\n}}\n\
             chain out {{ type filter hook output priority filter;\n\
             {flags} == rst {family} daddr . tcp dport . {family} saddr . tcp sport @begun counter drop\n}}\n}}\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use dormouse_kernel::netlink::listener::Found;
    use dormouse_kernel::netlink::queue::Packet;
    use dormouse_kernel::netlink::{Protocol, Socket, route};
    use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

    use super::*;

    /// A stack with a loopback device.
    fn stack() -> OwnedFd {
        let netns = namespace::new_network().expect("root can make a stack");
        namespace::visit(netns.as_fd(), Namespace::Net, || {
            let mut socket = Socket::open(Protocol::Route).unwrap();
            socket.request(route::NEW_LINK, 0, &route::link(1, 1, 1)).unwrap();
        })
        .unwrap();
        netns
    }

    fn there<T: Send>(netns: &OwnedFd, act: impl FnOnce() -> T + Send) -> T {
        namespace::visit(netns.as_fd(), Namespace::Net, act).unwrap()
    }

    #[track_caller]
    fn next(holding: &mut Holding) -> Packet {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            match holding.queue.take().unwrap() {
                Some(packet) => return packet,
                None => assert!(Instant::now() < until, "no packet is held"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn root_connection_is_established_when_its_first_packet_is_admitted() {
        let netns = stack();
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = there(&netns, || TcpListener::bind(any).unwrap());
            let to = listener.local_addr().unwrap();
            let mut holding = open(netns.as_fd()).unwrap();
            let busy = open(netns.as_fd()).unwrap_err();
            assert!(busy.to_string().contains("held"), "{busy}");
            hold(netns.as_fd(), &[to.ip()]).unwrap();
            std::thread::scope(|scope| {
                let client = scope.spawn(|| there(&netns, || TcpStream::connect(to).unwrap()));
                let packet = next(&mut holding);
                let ends = packet.ends.expect("TCP");
                assert_eq!(ends[1], to);
                let found = holding.listeners.find(ends).unwrap().expect("it listens");
                assert_eq!(found.pending, 0);
                // The side of the client, which has no answer yet.
                let client_side = holding.listeners.connection([ends[1], ends[0]]).unwrap();
                let Some(Found::Connection(it)) = client_side else { panic!("{client_side:?}") };
                assert!(it.is_being_made());
                holding.queue.decide(packet.id, ADMIT).unwrap();
                let found = there(&netns, || Listeners::open().unwrap().find([to, to]).unwrap());
                assert_eq!(
                    found.expect("it listens").pending,
                    1,
                    "admitted before the call returns"
                );
                client.join().unwrap();
            });
            // Another one is refused, and counts for nothing.
            std::thread::scope(|scope| {
                let client = scope.spawn(|| there(&netns, || TcpStream::connect(to)));
                let packet = next(&mut holding);
                holding.resets.refuse(packet.ends.expect("TCP"), packet.sequence).unwrap();
                holding.queue.decide(packet.id, Verdict::Drop).unwrap();
                let refused = client.join().unwrap().unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
            });
            let mut others = Vec::new();
            let is_service = |ip| ip == to.ip();
            let each = |[client, _]: [SocketAddr; 2], _| others.push(client.ip());
            count(&mut holding.listeners, None, is_service, each).unwrap();
            // The client of the first one is gone, and the listener has not accepted it.
            assert_eq!(others, [to.ip()]);
            // The process ends, and the table stays.
            drop(holding);
            there(&netns, || TcpStream::connect(to).unwrap());
            hold(netns.as_fd(), &[]).unwrap();
            hold(netns.as_fd(), &[]).unwrap();
            let left = there(&netns, || nft::list().unwrap());
            assert!(!left.contains(TABLE), "{left}");
        }
    }

    #[test]
    fn root_connections_pass_as_far_as_they_are_allowed() {
        let netns = stack();
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let [listener, other] =
                [(); 2].map(|()| there(&netns, || TcpListener::bind(any).unwrap()));
            let [to, other_to] = [&listener, &other].map(|one| one.local_addr().unwrap());
            let mut holding = open(netns.as_fd()).unwrap();
            hold(netns.as_fd(), &[to.ip()]).unwrap();
            let passes = holding.passes.take().expect("this kernel has them");
            if let Err(e) = pass(netns.as_fd(), &passes) {
                eprintln!("SKIPPED: {e}");
                return;
            }
            let connect = |to| there(&netns, || TcpStream::connect(to).unwrap());
            passes.allow(to, 3).unwrap();
            let clients = [(); 3].map(|()| connect(to));
            assert_eq!(holding.queue.take().unwrap(), None, "none was held");
            // The next one is, and so is one for another port.
            for to in [to, other_to] {
                std::thread::scope(|scope| {
                    let client = scope.spawn(|| connect(to));
                    let packet = next(&mut holding);
                    assert_eq!(packet.ends.expect("TCP")[1], to);
                    holding.queue.decide(packet.id, ADMIT).unwrap();
                    client.join().unwrap();
                });
            }
            let passed = passes.take_back(to).unwrap().expect("an allowance");
            let expected = clients.each_ref().map(|client| client.local_addr().unwrap());
            assert_eq!((passed.count, &passed.clients[..]), (3, &expected[..]));
            // What is left of one that was taken back allows nothing.
            passes.allow(to, 3).unwrap();
            drop(connect(to));
            assert_eq!(passes.take_back(to).unwrap().expect("an allowance").count, 1);
            std::thread::scope(|scope| {
                let client = scope.spawn(|| connect(to));
                let packet = next(&mut holding);
                holding.queue.decide(packet.id, ADMIT).unwrap();
                client.join().unwrap();
            });
            // A process that ends leaves its allowance, and none waits for it.
            passes.allow(to, 1).unwrap();
            drop((holding, passes));
            for _ in 0..3 {
                drop(connect(to));
            }
            hold(netns.as_fd(), &[]).unwrap();
            let left = there(&netns, || nft::list().unwrap());
            assert!(!left.contains(TABLE), "{left}");
        }
    }

    /// Clients on all processors at once.
    #[test]
    fn root_no_more_pass_at_once_than_are_allowed() {
        const ROUNDS: usize = 40;
        let netns = stack();
        let listener = there(&netns, || TcpListener::bind("127.0.0.1:0").unwrap());
        let to = listener.local_addr().unwrap();
        let mut holding = open(netns.as_fd()).unwrap();
        hold(netns.as_fd(), &[to.ip()]).unwrap();
        let passes = holding.passes.take().expect("this kernel has them");
        if let Err(e) = pass(netns.as_fd(), &passes) {
            eprintln!("SKIPPED: {e}");
            return;
        }
        for _ in 0..ROUNDS {
            passes.allow(to, 5).unwrap();
            let mut held = 0;
            std::thread::scope(|scope| {
                let connect = || there(&netns, || TcpStream::connect(to).unwrap());
                let clients = [(); 8].map(|()| scope.spawn(connect));
                while held < 3 {
                    let packet = next(&mut holding);
                    holding.queue.decide(packet.id, ADMIT).unwrap();
                    held += 1;
                }
                clients.into_iter().for_each(|client| drop(client.join().unwrap()));
            });
            let passed = passes.take_back(to).unwrap().expect("an allowance");
            assert_eq!((passed.count, passed.clients.len()), (5, 5));
            assert_eq!(holding.queue.take().unwrap(), None);
            for _ in 0..8 {
                listener.accept().unwrap();
            }
        }
        hold(netns.as_fd(), &[]).unwrap();
    }

    #[test]
    fn root_client_that_polls_is_answered_each_time() {
        const CONNECTIONS: usize = 3000;
        const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));
        let netns = stack();
        let listener = there(&netns, || TcpListener::bind("127.0.0.1:0").unwrap());
        let to = listener.local_addr().unwrap();
        let mut holding = open(netns.as_fd()).unwrap();
        hold(netns.as_fd(), &[to.ip()]).unwrap();
        let answers = || {
            for _ in 0..CONNECTIONS {
                // The listener is shut down when the client has failed.
                let Ok((mut one, _)) = listener.accept() else { return };
                one.set_read_timeout(PATIENCE).unwrap();
                one.read_exact(&mut [0]).unwrap();
                one.write_all(b"x").unwrap();
            }
        };
        let asks = || {
            for _ in 0..CONNECTIONS {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let fd = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
                let mut one = TcpStream::from(fd.unwrap());
                let begun = net::connect(&one, &to);
                assert!(matches!(begun, Ok(()) | Err(rustix::io::Errno::INPROGRESS)), "{begun:?}");
                // Without a sleep, so that it sends as soon as it is connected.
                while one.peer_addr().is_err() {}
                one.write_all(b"x").unwrap();
                one.set_nonblocking(false).unwrap();
                one.set_read_timeout(PATIENCE).unwrap();
                one.read_exact(&mut [0]).unwrap();
            }
        };
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    while let Some(packet) = holding.queue.take().unwrap() {
                        holding.queue.decide(packet.id, ADMIT).unwrap();
                    }
                }
            });
            scope.spawn(answers);
            let asked = scope.spawn(|| there(&netns, asks)).join();
            has_ended.store(true, Ordering::Relaxed);
            if asked.is_err() {
                net::shutdown(&listener, net::Shutdown::Both).unwrap();
            }
            asked.expect("no connection was reset");
        });
    }
}
