//! TCP sockets that are not listeners.
//!
//! The state of a connection can only be read in repair mode (TCP_REPAIR), and in that mode the
//! connection does not work. So an inspection ([`save`]) only reads the state number. Connections
//! are read once everything is stopped ([`Connections`]): first all packets for them are dropped
//! ([`crate::quiet`]), then each is read in repair mode. Two ends in one container are consistent that way.
//!
//! LIMIT: a listener with a full backlog drops the last packet of a handshake (listen(2)). The
//! connection then is established for the client, and does not exist for the server until that
//! packet is repeated. If both are in one container, the connection is reset at the restore.
//!
//! LIMIT: a connection that arrives after the accept queue was read and before the listener closes
//! is reset (5 of 4,440 in 60 checkpoints); later ones are refused.
//!
//! In repair mode a socket is closed without a packet to its peer. Before the processes are killed, all are put into
//! that mode, and the drop rules stay; when the processes resume, the rules are taken back.
//!
//! Connections of a container that is [held](super::Subject::hold) are not read at all: the socket
//! stays as it is, owned by the process that holds it.

use std::collections::{BTreeMap, HashMap};
use std::mem::take;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call;
use dormouse_record::{
    Bytes, Connection, Error, Refusal, Result as Outcome, TcpSocket, TcpState, Thing, Waiting,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketType, getpeername, getsockname, ipproto};

use super::held::Wakes;
use super::known::socket::{FoundConnection, FoundListener};
use super::open::Open;
use super::refusal::Reason;
use super::rescue::{self, Rescue};
use super::subject::Subject;
use super::survey::{Found, Survey};
use super::{address, option};
use crate::accept::{self, Deferred};
use crate::look::descriptor::ready;
use crate::quiet;
use crate::repair::{
    BUFFER_LOCK, NO_QUEUE, OFF_SILENTLY, QUEUE_SEQUENCE, RECEIVE_QUEUE, REPAIR, REPAIR_QUEUE,
    REPAIR_WINDOW, SEND_QUEUE, TIMESTAMP, unread,
};
use crate::stack::{self, Ends};

/// Records pending connections of a listener, if they can be saved: those in its queue, `queued` of them,
/// and those that wait for their first data.
pub(super) fn queue(survey: &mut Survey<'_>, open: &Open<'_>, queued: u32) -> Result<(), Reason> {
    let failed = |e: Errno| format!("a TCP socket: {e}");
    let netns = stack::of_socket(&open.copy).map_err(failed)?;
    let deferred = match accept::defers(&open.copy).map_err(failed)? {
        true => stack::requests(&netns, open.stat.st_ino).map_err(failed)?,
        false => 0,
    };
    let waiting = queued as usize + deferred;
    if waiting == 0 {
        return Ok(());
    }
    let many = format!("a TCP socket with {waiting} connections that it has not accepted");
    if !survey.subject.connections {
        let why = format!("{many}, which are saved with --tcp-established only");
        return Err(survey.passing(why));
    }
    // With TCP_FASTOPEN a connection may be accepted before its handshake is complete.
    if call::int_option(open.copy.as_fd(), libc::IPPROTO_TCP, libc::TCP_FASTOPEN) != Ok(0) {
        let why = format!("{many}, perhaps with their first packet (TCP_FASTOPEN), not saved yet");
        return Err(survey.passing(why));
    }
    const SAVE_REQUESTS: i32 = 27; // TCP_SAVE_SYN
    if call::int_option(open.copy.as_fd(), libc::IPPROTO_TCP, SAVE_REQUESTS) != Ok(0) {
        let why = format!(
            "{many}, with the headers of their first packets (TCP_SAVE_SYN), not saved yet"
        );
        return Err(survey.passing(why));
    }
    let supported = stack::inside_of(&netns, || Ok(accept::supported())).map_err(failed)?;
    if let Err(why) = supported {
        let why = format!("{many}, which could not be given back (Linux 6.9 can): {why}");
        return Err(survey.passing(why));
    }
    if let (1.., Err(why)) = (deferred, accept::deferred_supported()) {
        let why = format!("{many}, and some have sent no data (TCP_DEFER_ACCEPT): {why}");
        return Err(survey.passing(why));
    }
    let listener = open.copy.try_clone().map_err(|e| format!("a TCP socket: {e}"))?;
    survey.found.queues.push(FoundListener { object: open.index, listener });
    Ok(())
}

pub(super) fn save(
    survey: &mut Survey<'_>,
    open: &Open<'_>,
    domain: AddressFamily,
    state: u8,
    in_flight: u32,
) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a TCP socket: {e}");
    let socket = open.copy.as_fd();
    if survey.holds(open) && is_or_was_connected(&open.copy, state).map_err(failed)? {
        return Ok(Thing::TcpSocket(TcpSocket {
            v6: domain == AddressFamily::INET6,
            flags: open.flags(),
            address: None,
            connection: None,
            held: true,
            over: false,
            options: Vec::new(),
            free: false,
        }));
    }
    const UPPER_LAYER: i32 = 31;
    let mut upper = [0; 16];
    let upper = call::socket_option(socket, libc::IPPROTO_TCP, UPPER_LAYER, &mut upper);
    if upper.is_ok_and(|length| length > 0) {
        return Err("a TCP connection that the kernel encrypts (TLS), not saved yet".into());
    }
    let state = match state {
        CLOSED if is_or_was_connected(&open.copy, state).map_err(failed)? => {
            return over(survey, open, domain);
        }
        CLOSED => None,
        other => Some(known(other).ok_or_else(|| {
            let why = "a TCP connection that was accepted before it is made (TCP_FASTOPEN), or \
                       that both sides are making at once, not saved yet";
            survey.passing(why.into())
        })?),
    };
    if state.is_some() && has_urgent_data(&open.copy).map_err(failed)? {
        return Err(URGENT.into());
    }
    let both_have_ended = matches!(state, Some(TcpState::LastAck | TcpState::Closing));
    if both_have_ended && !ends_come_again() {
        let why =
            "a TCP connection that both sides have ended just now, not saved yet before Linux 6.18";
        return Err(survey.passing(why.into()));
    }
    // Only a request with data (TCP_FASTOPEN) has more than one segment in flight.
    if state == Some(TcpState::SynSent) && in_flight > 1 {
        let why = "a TCP connection that is being made, with data in its first packet \
                   (TCP_FASTOPEN), not saved yet";
        return Err(survey.passing(why.into()));
    }
    if state.is_some() && !survey.subject.connections {
        return Err("a TCP connection, which is saved with --tcp-established only".into());
    }
    let (kind, has_connection) = (SocketType::STREAM, state.is_some());
    let protocol = Some(ipproto::TCP);
    let it = option::Socket { copy: socket, net: open.net, domain, kind, protocol, has_connection };
    let options = option::read(&mut survey.fresh, &it)?;
    let address = getsockname(&open.copy).and_then(SocketAddr::try_from).map_err(failed)?;
    let is_free = state.is_none() && address::is_bound(&address);
    let is_free = is_free && address::is_of_no_device(&open.copy, address, &options);
    let connection = match state {
        None => None,
        Some(state) => {
            let peer = match state {
                TcpState::SynSent => requested_peer(survey, open, address)?,
                _ => getpeername(&open.copy)
                    .and_then(|peer| peer.ok_or(Errno::NOTCONN))
                    .and_then(SocketAddr::try_from)
                    .map_err(failed)?,
            };
            let copy = open.copy.try_clone().map_err(|e| format!("a TCP socket: {e}"))?;
            let (object, inode) = (open.index, open.stat.st_ino);
            let is_being_made = state == TcpState::SynSent;
            survey.found.connections.push(FoundConnection { object, copy, inode, is_being_made });
            Some(unread(state, peer))
        }
    };
    Ok(Thing::TcpSocket(TcpSocket {
        v6: domain == AddressFamily::INET6,
        flags: open.flags(),
        address: Some(address).filter(address::is_bound),
        free: is_free,
        connection,
        held: false,
        over: false,
        options,
    }))
}

/// The peer of a connection in SYN_SENT, for which getpeername(2) fails.
fn requested_peer(
    survey: &mut Survey<'_>,
    open: &Open<'_>,
    own: SocketAddr,
) -> Result<SocketAddr, Reason> {
    let inode = open.stat.st_ino;
    let netns = stack::of_socket(&open.copy).map_err(|e| format!("a TCP socket: {e}"))?;
    let all = stack::tcp_addresses(&netns, &[inode]);
    let all = all.map_err(|e| format!("a TCP socket: {e}"))?;
    let Some([_, peer]) = all.get(&inode).copied() else {
        let why = "a TCP connection that is no longer being made";
        return Err(survey.passing(why.into()));
    };
    Ok(match (own, peer) {
        (SocketAddr::V6(own), peer) => {
            let ip = match peer.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            // A link-local address needs its scope, which is that of the local address.
            SocketAddrV6::new(ip, peer.port(), 0, own.scope_id()).into()
        }
        (SocketAddr::V4(_), peer) => peer,
    })
}

/// Whether a connection can be restored after both sides have sent FIN. KERNEL(6.18): tested there;
/// under 6.12 such a connection is reset while it is restored.
fn ends_come_again() -> bool {
    let system = rustix::system::uname();
    let release = system.release().to_str().unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(18))
}

/// For a byte that the peer has sent out of band, and that is not read yet.
const URGENT: &str =
    "a TCP connection with urgent data (MSG_OOB) that is not read yet, not saved yet";

/// Whether a byte out of band waits to be read.
fn has_urgent_data(socket: &OwnedFd) -> Result<bool, Errno> {
    let mut polled = [PollFd::new(socket, PollFlags::PRI)];
    rustix::event::poll(&mut polled, Some(&Timespec::default()))?;
    Ok(polled[0].revents().contains(PollFlags::PRI))
}

/// Number of the state of a socket without a connection (include/net/tcp_states.h).
const CLOSED: u8 = 7;

/// A state by its number (include/net/tcp_states.h).
fn known(state: u8) -> Option<TcpState> {
    match state {
        1 => Some(TcpState::Established),
        2 => Some(TcpState::SynSent),
        4 => Some(TcpState::FinWait1),
        5 => Some(TcpState::FinWait2),
        8 => Some(TcpState::CloseWait),
        9 => Some(TcpState::LastAck),
        11 => Some(TcpState::Closing),
        _ => None,
    }
}

/// A socket whose connection has ended.
fn over(survey: &mut Survey<'_>, open: &Open<'_>, domain: AddressFamily) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a TCP socket: {e}");
    let is_wrong = ready(&open.copy).map_err(failed)?.contains(PollFlags::ERR);
    if is_wrong || rustix::io::ioctl_fionread(&open.copy).map_err(failed)? != 0 {
        let why = "a TCP connection that is over, with data or an error that is not \
                   read yet, not saved yet";
        return Err(survey.passing(why.into()));
    }
    let it = option::Socket {
        copy: open.copy.as_fd(),
        net: open.net,
        domain,
        kind: SocketType::STREAM,
        protocol: Some(ipproto::TCP),
        has_connection: true,
    };
    Ok(Thing::TcpSocket(TcpSocket {
        v6: domain == AddressFamily::INET6,
        flags: open.flags(),
        address: None,
        connection: None,
        held: false,
        over: true,
        options: option::read(&mut survey.fresh, &it)?,
        free: false,
    }))
}

/// Whether a socket has a connection, or had one whose end its process may not have read yet.
fn is_or_was_connected(socket: &OwnedFd, state: u8) -> Result<bool, Errno> {
    // poll(2) of a socket that was never connected reports POLLHUP, but not POLLRDHUP.
    Ok(state != CLOSED || ready(socket)?.contains(PollFlags::RDHUP))
}

/// Events of a socket that wake its container.
///
/// A sender blocked on a full send buffer, or in the middle of a partial send, waits for POLLOUT.
/// If space has appeared since the stop, [`due`](super::due) reports it. A connection that has
/// ended produces no further event: its end is already readable. The same holds for reads where the
/// peer alone has ended it, which a program may leave so for ever.
pub(super) fn wakes(socket: &OwnedFd) -> Result<Wakes, Errno> {
    let ready = ready(socket)?;
    if ready.contains(PollFlags::HUP | PollFlags::RDHUP) {
        return Ok(Wakes::default());
    }
    let (_, unsent) = call::send_queue(socket.as_fd())?;
    let writable = unsent > 0 || !ready.contains(PollFlags::OUT);
    Ok(Wakes { readable: !ready.contains(PollFlags::RDHUP), writable })
}

/// Connections with their packets dropped. The drop resumes them.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    netns: Option<OwnedFd>,
    id: String,
    sockets: Vec<InRepair>,
    /// Pending connections, by listener.
    taken: Vec<Taken>,
    /// Their processes have exited, and the sockets are to be closed without a packet.
    stay: bool,
    /// Connections in network namespaces inside.
    inner: Vec<Connections>,
    rescue: Rescue,
}

/// A connection that is in repair mode for a while. That mode has no other effect on a socket that outlasts it:
/// TCP_REPAIR sets SO_REUSEADDR while it is on, and clears it when it is taken back.
#[derive(Debug)]
struct InRepair {
    socket: OwnedFd,
    /// SO_REUSEADDR before.
    reuse: i32,
}

impl InRepair {
    /// A socket before that mode.
    fn of(socket: OwnedFd) -> Result<Self, Errno> {
        let reuse = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
        Ok(Self { socket, reuse })
    }

    fn begin(&self) -> Result<(), Errno> {
        call::set_int_option(self.socket.as_fd(), libc::IPPROTO_TCP, REPAIR, 1)
    }

    fn end(&self) {
        let fd = self.socket.as_fd();
        // Ignored: a socket that entered the mode can leave it, and had the option.
        let _ = call::set_int_option(fd, libc::IPPROTO_TCP, REPAIR, OFF_SILENTLY);
        let _ = call::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, self.reuse);
    }
}

/// Connections and listeners in one network namespace.
type Group = (Vec<FoundConnection>, Vec<FoundListener>);

/// Connections that were taken out of a queue.
#[derive(Debug)]
struct Taken {
    listener: OwnedFd,
    sockets: Vec<OwnedFd>,
}

impl Taken {
    /// Reads them, in their order. Connections that their peers have reset are left out.
    fn read(&self, addresses: &HashMap<u64, Ends>) -> Result<Vec<Waiting>, Errno> {
        let mut all = Vec::new();
        for socket in &self.sockets {
            let inode = rustix::fs::fstat(socket)?.st_ino;
            let Some([address, peer]) = addresses.get(&inode).copied() else { continue };
            let mut connection = unread(TcpState::Established, peer);
            match read(socket, &mut connection) {
                Err(Errno::CONNRESET) => {}
                other => other.map(|()| all.push(Waiting { address, connection }))?,
            }
        }
        Ok(all)
    }

    /// Puts them back into the queue.
    fn put_back(self, netns: &OwnedFd) -> Outcome<()> {
        let inodes: Vec<u64> = self.sockets.iter().filter_map(inode).collect();
        let addresses = stack::tcp_addresses(netns, &inodes);
        let addresses = addresses.map_err(Error::call("look at its TCP connections"))?;
        for socket in &self.sockets {
            let repair = call::set_int_option(socket.as_fd(), libc::IPPROTO_TCP, REPAIR, 1);
            repair.map_err(Error::call("hold a TCP connection"))?;
        }
        let all = self.read(&addresses).map_err(Error::call("read a TCP connection"))?;
        // ORDER: closed without a packet, before they exist again.
        drop(self.sockets);
        let put = stack::inside_of(netns, || Ok(accept::put(&self.listener, &all)));
        put.map_err(Error::call("enter the container's network namespace"))?
    }
}

fn inode(socket: &OwnedFd) -> Option<u64> {
    rustix::fs::fstat(socket).ok().map(|stat| stat.st_ino)
}

impl Connections {
    /// Reads all found connections into their records.
    pub(super) fn read(&mut self, subject: &Subject, found: &mut Found) -> Outcome<()> {
        let mut groups: BTreeMap<Option<usize>, Group> = BTreeMap::new();
        let net_of = |object: usize| found.objects[object].net;
        for one in take(&mut found.connections) {
            groups.entry(net_of(one.object)).or_default().0.push(one);
        }
        for one in take(&mut found.queues) {
            groups.entry(net_of(one.object)).or_default().1.push(one);
        }
        if !groups.is_empty() {
            self.rescue = Rescue::start(subject.rescue, subject.init);
        }
        let mut rescue = take(&mut self.rescue);
        let read = self.read_groups(&mut rescue, subject, found, groups);
        self.rescue = rescue;
        read
    }

    fn read_groups(
        &mut self,
        rescue: &mut Rescue,
        subject: &Subject,
        found: &mut Found,
        groups: BTreeMap<Option<usize>, Group>,
    ) -> Outcome<()> {
        for (net, (met, queues)) in groups {
            if net.is_none() {
                self.read_of(rescue, stack::of(subject.init)?, (subject, found), (met, queues))?;
                continue;
            }
            let any = met.iter().map(|one| &one.copy).chain(queues.iter().map(|one| &one.listener));
            let netns = any.map(stack::of_socket).next().unwrap_or(Err(Errno::BADF));
            let netns = netns.map_err(Error::call("find the network namespace of a connection"))?;
            self.inner.push(Self::default());
            if let Some(inner) = self.inner.last_mut() {
                inner.read_of(rescue, netns, (subject, found), (met, queues))?;
            }
        }
        Ok(())
    }

    /// The same for the connections of one network namespace.
    fn read_of(
        &mut self,
        rescue: &mut Rescue,
        netns: OwnedFd,
        (subject, found): (&Subject, &mut Found),
        (met, queues): Group,
    ) -> Outcome<()> {
        self.id.clone_from(&subject.id);
        let netns = &*self.netns.insert(netns);
        // ORDER: before the first rule, and each socket before it is changed.
        rescue.stack(netns, &subject.id);
        let look = Error::call("look at its TCP connections");
        let inodes: Vec<u64> = met.iter().map(|m| m.inode).collect();
        let mut addresses = stack::tcp_addresses(netns, &inodes).map_err(look)?;
        let mut ends: Vec<Ends> = addresses.values().copied().collect();
        let requested =
            met.iter().filter(|m| m.is_being_made).filter_map(|m| addresses.get(&m.inode));
        ends.extend(requested.map(|[own, peer]| [*peer, *own]));
        let mut objects = Vec::new();
        let mut deferred = Vec::new();
        if !queues.is_empty() {
            let listeners: Vec<&OwnedFd> = queues.iter().map(|queue| &queue.listener).collect();
            let requested = read_deferred(netns, &listeners)?.ends;
            ends.extend(&requested);
            // ORDER: an emptied queue has space. A connection request from inside, and its
            // repetition, must not use it.
            quiet::begin(netns, &subject.id, &ends)?;
            // ORDER: before a queue is read. A request that has got its data until then is in the queue.
            deferred = match requested.is_empty() {
                true => Vec::new(),
                false => read_deferred(netns, &listeners)?.connections,
            };
            deferred.retain(|(_, it)| requested.contains(&[it.address, it.connection.peer]));
            for FoundListener { object, listener } in queues {
                let sockets = accept::take(&listener);
                let sockets =
                    sockets.map_err(Error::call("take a TCP connection out of its queue"))?;
                rescue.taken(&listener, &sockets);
                objects.push(object);
                self.taken.push(Taken { listener, sockets });
            }
            let taken = self.taken.iter().flat_map(|taken| &taken.sockets);
            let inodes: Vec<u64> = taken.filter_map(inode).collect();
            let look = Error::call("look at its TCP connections");
            addresses = stack::tcp_addresses(netns, &inodes).map_err(look)?;
            ends.extend(addresses.values());
        }
        quiet::begin(netns, &subject.id, &ends)?;
        for one in &met {
            let copy = rustix::io::fcntl_dupfd_cloexec(&one.copy, 0);
            let copy = copy.map_err(Error::call("keep a TCP connection"))?;
            let held = InRepair::of(copy).map_err(Error::call("look at a TCP connection"))?;
            self.sockets.push(held);
        }
        let sockets: Vec<_> = self.sockets.iter().map(|it| (it.socket.as_fd(), it.reuse)).collect();
        rescue.connections(&sockets);
        let inodes: Vec<u64> = met.iter().map(|m| m.inode).collect();
        let look = Error::call("look at its TCP connections");
        let unread = stack::tcp_received(netns, &inodes).map_err(look)?;
        for (one, socket) in met.iter().zip(&self.sockets) {
            let Thing::TcpSocket(it) = &mut found.objects[one.object].thing else { continue };
            let Some(connection) = &mut it.connection else { continue };
            // A read(2) of a task fails in repair mode (EPERM), and tasks continue if this process is killed: a
            // connection is in that mode as short as possible.
            socket.begin().map_err(Error::call("hold a TCP connection"))?;
            let done = read(&one.copy, connection);
            socket.end();
            done.map_err(Error::call("read a TCP connection"))?;
            // The FIN of the peer counts as a byte. Bytes behind an urgent mark cannot be read before it.
            let read = connection.received.0.len() as u32;
            let read = read + u32::from(connection.state.peer_has_ended());
            if unread.get(&one.inode).is_some_and(|unread| *unread > read) {
                return Err(refused(URGENT));
            }
        }
        for (place, (taken, object)) in self.taken.iter().zip(objects).enumerate() {
            for socket in &taken.sockets {
                let repair = call::set_int_option(socket.as_fd(), libc::IPPROTO_TCP, REPAIR, 1);
                repair.map_err(Error::call("hold a TCP connection"))?;
            }
            let all = taken.read(&addresses).map_err(Error::call("read a TCP connection"))?;
            if let Thing::Listener(listener) = &mut found.objects[object].thing {
                listener.waiting = all;
                // One whose first data was on its way is in the queue now.
                let is_taken = |it: &Waiting| {
                    addresses.values().any(|ends| *ends == [it.address, it.connection.peer])
                };
                let own = deferred.iter().filter(|(at, it)| *at == place && !is_taken(it));
                listener.waiting.extend(own.map(|(_, waiting)| waiting.clone()));
            }
        }
        Ok(())
    }

    /// The number of connections.
    pub(super) fn count(&self) -> usize {
        let taken = self.taken.iter().map(|taken| taken.sockets.len()).sum::<usize>();
        self.sockets.len() + taken + self.inner.iter().map(Self::count).sum::<usize>()
    }

    fn have_taken(&self) -> bool {
        let have_any = |taken: &Taken| !taken.sockets.is_empty();
        self.taken.iter().any(have_any) || self.inner.iter().any(Self::have_taken)
    }

    fn forget_taken(&mut self) {
        self.taken.clear();
        self.inner.iter_mut().for_each(Self::forget_taken);
    }

    /// Nothing is left to be taken back.
    fn forget(&mut self) {
        self.stay = true;
        self.inner.iter_mut().for_each(Self::forget);
    }

    /// Called before the processes are killed: their connections are closed without a packet.
    pub(super) fn hold(&self) {
        for socket in &self.sockets {
            // A connection that has ended meanwhile closes without that mode, and its packets are dropped.
            let _ = socket.begin();
        }
        self.inner.iter().for_each(Self::hold);
    }

    /// Called when the processes have exited: the sockets are closed without a packet, and the drop
    /// rules stay.
    pub(super) fn stay(&mut self) {
        // ORDER: before the caller waits for all its children.
        self.rescue.end();
        self.stay = true;
        self.inner.iter_mut().for_each(Self::stay);
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        if self.stay {
            return;
        }
        if self.rescue.is_there() && self.have_taken() {
            // ORDER: a connection that is put back into a queue has no other owner.
            self.forget_taken();
            if self.rescue.put_back() {
                return self.forget();
            }
        }
        if let Some(netns) = &self.netns {
            for taken in self.taken.drain(..) {
                // Taken out by the same means.
                let _ = taken.put_back(netns);
            }
        }
        self.sockets.iter().for_each(InRepair::end);
        if let Some(netns) = &self.netns {
            // LIMIT: if nft fails now and has not before, packets of these connections stay
            // dropped.
            let _ = quiet::end(netns, &self.id);
        }
    }
}

/// In the second process of a save ([`Subject::rescue`]): waits until the first has ended, and puts the connections
/// back that it has changed, if it was killed.
pub fn rescue_connections(socket: OwnedFd) -> Outcome<()> {
    let waited = rescue::wait(&socket).map_err(Error::call("wait for the checkpoint"));
    let (changed, stay) = waited?;
    for rescue::Changed { netns, id, connections, taken } in changed {
        let in_repair = |(socket, reuse)| InRepair { socket, reuse };
        let taken = taken.into_iter().map(|(listener, sockets)| Taken { listener, sockets });
        drop(Connections {
            netns: Some(netns),
            id,
            sockets: connections.into_iter().map(in_repair).collect(),
            taken: taken.collect(),
            stay,
            inner: Vec::new(),
            rescue: Rescue::default(),
        });
    }
    Ok(())
}

/// Connections that wait for their first data at these listeners.
fn read_deferred(netns: &OwnedFd, listeners: &[&OwnedFd]) -> Outcome<Deferred> {
    let read = stack::inside_of(netns, || Ok(accept::deferred(listeners)));
    read.map_err(Error::call("enter the container's network namespace"))?
}

/// Reads a connection in repair mode.
fn read(socket: &OwnedFd, connection: &mut Connection) -> Result<(), Errno> {
    let fd = socket.as_fd();
    let option = |name| call::int_option(fd, libc::IPPROTO_TCP, name);
    let set = |name, value| call::set_int_option(fd, libc::IPPROTO_TCP, name, value);
    let mut info = [0; 32];
    call::socket_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    // The state may have changed since the inspection; the present state counts.
    connection.state = known(info[0]).ok_or(Errno::CONNRESET)?;
    connection.reads_no_more =
        !connection.state.peer_has_ended() && ready(socket)?.contains(PollFlags::RDHUP);
    // struct tcp_info: tcpi_options, and two scales of 4 bits.
    let agreed = |bit: u8| info[5] & bit != 0;
    connection.scales = agreed(4).then_some((info[6] & 15, info[6] >> 4));
    connection.selective = agreed(2);
    connection.timestamp = if agreed(1) { Some(option(TIMESTAMP)? as u32) } else { None };
    connection.segment_bytes = option(libc::TCP_MAXSEG)? as u32;

    set(REPAIR_QUEUE, RECEIVE_QUEUE)?;
    let sequence = option(QUEUE_SEQUENCE)? as u32;
    // The FIN of the peer takes a sequence number.
    let peer_ended = u32::from(connection.state.peer_has_ended());
    connection.received_sequence = sequence.wrapping_sub(peer_ended);
    connection.received = peek(socket, rustix::io::ioctl_fionread(socket)? as usize)?;

    set(REPAIR_QUEUE, SEND_QUEUE)?;
    let sequence = option(QUEUE_SEQUENCE)? as u32;
    // So does the FIN of this side, and it stays in the send queue like a byte until it is
    // acknowledged.
    let ended = connection.state.has_ended();
    let end_waits = u32::from(connection.state.end_waits());
    let (waiting, unsent) = call::send_queue(fd)?;
    let (waiting, unsent) = (waiting.saturating_sub(end_waits), unsent.saturating_sub(end_waits));
    let mut sent = peek(socket, waiting as usize)?;
    connection.sent_sequence = sequence.wrapping_sub(u32::from(ended)).wrapping_sub(waiting);
    connection.unsent = Bytes(sent.0.split_off(waiting.saturating_sub(unsent) as usize));
    connection.sent = sent;
    set(REPAIR_QUEUE, NO_QUEUE)?;

    let mut window = [0; 20];
    call::socket_option(fd, libc::IPPROTO_TCP, REPAIR_WINDOW, &mut window)?;
    for (word, bytes) in connection.window.iter_mut().zip(window.chunks_exact(4)) {
        *word = u32::from_ne_bytes(bytes.try_into().unwrap_or([0; 4])); // four by the iterator
    }
    let general = |name| call::int_option(fd, libc::SOL_SOCKET, name);
    connection.buffers_bytes = (general(libc::SO_SNDBUF)? as u32, general(libc::SO_RCVBUF)? as u32);
    connection.buffers_locked = general(BUFFER_LOCK)? as u8;
    connection.window_bytes_max = option(libc::TCP_WINDOW_CLAMP)? as u32;
    Ok(())
}

/// A refusal once everything is stopped.
fn refused(why: &str) -> Error {
    let (pid, process, what) = (0, String::new(), String::new());
    Error::Refused(vec![Refusal { pid, process, what, why: why.to_owned() }])
}

/// Reads a whole queue without consuming it.
fn peek(socket: &OwnedFd, bytes: usize) -> Result<Bytes, Errno> {
    if bytes == 0 {
        return Ok(Bytes::default());
    }
    let mut buffer = vec![0; bytes];
    // Where a program peeks next (SO_PEEK_OFF, KERNEL(6.9) of TCP) a look neither begins there nor moves it.
    let fd = socket.as_fd();
    let offset = call::int_option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap_or(-1);
    let set = |offset| match offset {
        0.. => call::set_int_option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset),
        _ => Ok(()),
    };
    if offset >= 0 {
        set(0)?;
    }
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let peeked = rustix::net::recv(socket, &mut buffer[..], flags);
    set(offset)?;
    let (read, _) = peeked?;
    if read == bytes { Ok(Bytes(buffer)) } else { Err(Errno::IO) }
}
