//! Unix sockets: names, queues and peers.
//!
//! Every open file is registered when it is found ([`save`]); the rest is known once all are
//! registered ([`finish`]). sock_diag(7), queried in the network namespace of the container,
//! returns the peer of each socket, the file behind a path, and the pending connections of a
//! listener. Messages are left in the receive queue by MSG_PEEK, which copies in-flight
//! descriptors. Those may be sockets with further in-flight descriptors, so this is repeated until
//! no new one is found.
//!
//! **Reachable from outside.** Processes outside can use a socket whose file is on a volume, and
//! one that is connected to them. Such a socket of a container that falls asleep is
//! [held](super::Subject::hold): unchanged, with its queue and pending connections. A socket that
//! is also used by sockets inside is not held: those are re-created, and need a re-created peer.
//! LIMIT: neither is a socket on the container's own files, because it would keep these mounted.
//!
//! The line of the modules here: `table`, `queue`, `name`, `pending`, and this file.

mod name;
mod pending;
mod queue;
mod table;

use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_record::{
    Bytes, Cause, Descriptor, Object, Refusal, Thing, UnixMessage, UnixPeer, UnixSocket,
};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use self::name::name;
use self::pending::{Refused, left, written};
use self::queue::{Translator, queue};
use self::table::{Entry, query, query_in};
use super::credentials::as_peer;
use super::held::{HeldFile, Wakes};
use super::known::socket::{Socket, UnixSockets};
use super::open::Open;
use super::option;
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::Survey;
use crate::inject::script::{Answers, Script};
use crate::look::descriptor::ready;
use crate::look::file;

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a unix socket: {e}");
    let kind = sockopt::socket_type(&open.copy).map_err(failed)?;
    let it = option::Socket {
        copy: open.copy.as_fd(),
        net: open.net,
        domain: AddressFamily::UNIX,
        kind,
        protocol: None,
        has_connection: false,
    };
    let options = option::read(&mut survey.fresh, &it)?;
    let directory = fs::read_link(format!("/proc/{}/cwd", open.process.pid)).unwrap_or_default();
    let socket = Socket {
        object: open.index,
        copy: open.copy.try_clone().map_err(|e| format!("a unix socket: {e}"))?,
        pid: open.process.pid,
        first: open.process.first,
        directory: directory.to_string_lossy().into_owned(),
        owner: open.process.refuse(format!("descriptor {}", open.number), ""),
        received: Ok(Vec::new()),
    };
    survey.unix.insert(open.stat.st_ino, socket);
    Ok(Thing::UnixSocket(UnixSocket {
        socket_type: kind.as_raw() as i32,
        flags: open.flags(),
        name: None,
        backlog: None,
        peer: UnixPeer::None,
        left: Vec::new(),
        received: Vec::new(),
        peer_credentials: None,
        shut: 0,
        reset: kind != SocketType::DGRAM
            && ready(&open.copy).is_ok_and(|ready| ready.contains(PollFlags::ERR)),
        options,
        held: false,
    }))
}

/// Queries the peers of a stopped process's sockets (SO_PEERCRED) by calls in the process. If a
/// peer has exited, or a helper process stood in for it, its pid can only be read inside the pid
/// namespace.
pub(super) fn query_peers(
    survey: &Survey<'_>,
    descriptors: &[Descriptor],
    script: &mut Script,
) -> impl FnOnce(&mut Survey<'_>, &Answers) -> std::result::Result<(), Errno> + use<> {
    // struct ucred: process, user, group.
    const UCRED_BYTES: u64 = 12;
    let mut queried = Vec::new();
    for descriptor in descriptors {
        let object = survey.found.objects.get(descriptor.object);
        let is_unix = matches!(object.map(|object| &object.thing), Some(Thing::UnixSocket(_)));
        if !is_unix || survey.peers.contains_key(&descriptor.object) {
            continue;
        }
        let (to, length) = (script.room(16), script.room_with(UCRED_BYTES));
        let (level, name) = (libc::SOL_SOCKET.into(), libc::SO_PEERCRED.into());
        let args = [u64::from(descriptor.number).into(), level, name, to.into(), length.into()];
        queried.push((descriptor.object, script.call(libc::SYS_getsockopt, args), to));
    }
    move |survey, answers| {
        for (object, queried, to) in queried {
            answers.returned(queried)?;
            let [ids] = answers.numbers(to);
            survey.peers.insert(object, ids as u32); // the pid is the first half
        }
        Ok(())
    }
}

/// Adds the object of an in-flight file (SCM_RIGHTS), of whatever kind; the file is a copy.
pub(super) type InFlight = fn(&mut Survey<'_>, &Seen, OwnedFd) -> Result<usize, Reason>;

/// Completes the records with facts that depend on all sockets.
pub(super) fn finish(survey: &mut Survey<'_>, tree: &[Seen], in_flight: InFlight) {
    let known = read_queues(survey, tree, in_flight);
    let Some(first) = known.values().next() else { return };
    let inner = survey.nets.open().iter().map(query_in);
    let queried = inner.chain([query(first.first)]).collect::<Result<Vec<_>, Reason>>();
    let entries: HashMap<u64, Entry> = match queried {
        Ok(queried) => queried.into_iter().flatten().collect(),
        Err(why) => {
            survey.found.refusals.push(Refusal { why, ..first.owner.clone() });
            return;
        }
    };
    let mut refused = Vec::new();
    for (inode, socket) in &known {
        let Thing::UnixSocket(mut record) = survey.found.objects[socket.object].thing.clone()
        else {
            continue;
        };
        // A descriptor that was closed meanwhile has no answer; then nothing is stopped yet.
        let peer = survey.peers.get(&socket.object).copied().filter(|pid| *pid != 0);
        let elsewhere = || accepted_from_elsewhere(socket).filter(|_| survey.subject.hold);
        let filled = match entries.get(inode).cloned().or_else(elsewhere) {
            Some(one) => fill(survey, &mut record, socket, &one, (&entries, &known), tree, peer),
            None => Err(Refused::For("a unix socket of another network namespace".into())),
        };
        survey.found.objects[socket.object].thing = Thing::UnixSocket(record);
        refused.extend(filled.err().map(|why| (socket, why)));
    }
    inherit(survey, &known);
    for (inode, socket) in &known {
        let waiting = entries.get(inode).map_or(&[][..], |entry| &entry.waiting);
        refused.extend(hold(survey, socket, waiting, &known, tree).err().map(|why| (socket, why)));
    }
    for (socket, why) in refused {
        let why = match why {
            Refused::For(why) => why,
            Refused::Passing(why) => survey.passing(why),
        };
        survey.found.refusals.push(Refusal { why, ..socket.owner.clone() });
    }
}

/// An accepted connection belongs to the network namespace of its client, which is not queried. Its
/// properties are read from the socket itself.
fn accepted_from_elsewhere(socket: &Socket) -> Option<Entry> {
    rustix::net::getpeername(&socket.copy).ok()?;
    let own = rustix::net::getsockname(&socket.copy).ok()?;
    let own = rustix::net::SocketAddrUnix::try_from(own).ok()?;
    let path = own.path_bytes()?;
    let found = file::lookup(socket.first, std::str::from_utf8(path).ok()?).ok()?;
    let file = rustix::fs::fstat(&found).ok()?.st_ino as u32;
    // The peer is unknown.
    Some(Entry { name: path.to_vec(), file: Some(file), peer: Some(u32::MAX), ..Entry::default() })
}

/// Holds a socket that processes outside can use.
fn hold(
    survey: &mut Survey<'_>,
    socket: &Socket,
    waiting: &[u32],
    known: &UnixSockets,
    tree: &[Seen],
) -> Result<(), Refused> {
    let objects = &survey.found.objects;
    let of = |thing: &Thing| match thing {
        Thing::UnixSocket(socket) => Some(socket.clone()),
        _ => None,
    };
    let Some(record) = of(&objects[socket.object].thing).filter(|record| record.held) else {
        return Ok(());
    };
    let is_connected = record.peer == UnixPeer::Gone;
    let uses_it = |other: &UnixSocket| match other.peer {
        UnixPeer::Socket { object } => object == socket.object || is_accepted_by(other, &record),
        UnixPeer::Waiting { listener, .. } => listener == socket.object,
        UnixPeer::Gone => !other.held && is_accepted_by(other, &record),
        UnixPeer::None => false,
    };
    let others = known.values().filter(|other| other.object != socket.object);
    if others.filter_map(|other| of(&objects[other.object].thing)).any(|other| uses_it(&other)) {
        if is_connected {
            let why = "a unix socket with a peer outside the container, which sockets inside use, \
                       too";
            return Err(Refused::For(why.into()));
        }
        let left = left(survey, socket, waiting, known, tree)?;
        if let Thing::UnixSocket(record) = &mut survey.found.objects[socket.object].thing {
            (record.held, record.left) = (false, left);
        }
        return Ok(());
    }
    let failed =
        |e: std::io::Error| Refused::For(format!("a unix socket that cannot be held: {e}"));
    let file = socket.copy.try_clone().map_err(failed)?;
    let ready = ready(&file).map_err(|e| failed(e.into()))?;
    // A blocked sender waits for space in the send buffer.
    let writable = is_connected && !ready.contains(PollFlags::OUT);
    let wakes = Wakes { readable: true, writable };
    let cause = if is_connected { Cause::Data } else { Cause::Call };
    survey.found.held.push(HeldFile { object: socket.object as u32, file, wakes, cause });
    Ok(())
}

/// Whether a connection has inherited its name from a listener.
fn is_accepted_by(connection: &UnixSocket, listener: &UnixSocket) -> bool {
    let name = |socket: &UnixSocket| socket.name.as_ref().map(|name| name.bytes.clone());
    let inherits = connection.name.as_ref().is_some_and(|name| name.inherited);
    listener.backlog.is_some() && inherits && name(connection) == name(listener)
}

/// Reads the receive queues of all sockets, and registers in-flight sockets.
fn read_queues(survey: &mut Survey<'_>, tree: &[Seen], in_flight: InFlight) -> UnixSockets {
    let mut known = UnixSockets::new();
    loop {
        let new = std::mem::take(&mut survey.unix);
        if new.is_empty() {
            return known;
        }
        for (inode, mut socket) in new {
            let seen = tree.iter().find(|seen| seen.pid == socket.pid);
            socket.received = match seen {
                Some(seen) => {
                    let translator = Translator { tree, maps: seen.maps() };
                    read_queue(survey, &socket, seen, &translator, in_flight)
                }
                None => Err("a unix socket of a process that has exited".into()),
            };
            known.insert(inode, socket);
        }
    }
}

fn read_queue(
    survey: &mut Survey<'_>,
    socket: &Socket,
    seen: &Seen,
    translator: &Translator<'_>,
    in_flight: InFlight,
) -> Result<Vec<UnixMessage>, Reason> {
    let Thing::UnixSocket(record) = &survey.found.objects[socket.object].thing else {
        return Ok(Vec::new());
    };
    let failed = |e: Errno| format!("a unix socket with an unreadable queue: {e}");
    let kind = (record.socket_type, record.reset);
    let is_packets = kind == (SocketType::SEQPACKET.as_raw() as i32, true);
    if is_packets && rustix::io::ioctl_fionread(&socket.copy).map_err(failed)? != 0 {
        // A read takes the error before the first packet.
        return Err("a unix socket with packets that its peer has reset, not saved yet".into());
    }
    let queue = queue(&socket.copy, kind, translator).map_err(failed)?.ok_or(
        "a unix socket with an item in flight that is neither data nor a descriptor (a pidfd, a \
         label), which is not saved yet",
    )?;
    let mut all = Vec::new();
    for (mut message, descriptors) in queue {
        for descriptor in descriptors {
            let object = in_flight(survey, seen, descriptor);
            message.descriptors.push(
                object
                    .map_err(|why| format!("a unix socket with a descriptor in flight: {why}"))?,
            );
        }
        all.push(message);
    }
    Ok(all)
}

fn fill(
    survey: &Survey<'_>,
    record: &mut UnixSocket,
    socket: &Socket,
    entry: &Entry,
    (all, known): (&HashMap<u64, Entry>, &UnixSockets),
    tree: &[Seen],
    peer: Option<u32>,
) -> Result<(), Refused> {
    record.shut = entry.shut & 3;
    let (name, device) = name(socket, entry)?;
    record.name = name;
    let is_reached = device.is_some_and(|device| survey.is_volume(device));
    if let Some(seen) = tree.iter().find(|seen| seen.pid == socket.pid) {
        record.peer_credentials = Translator { tree, maps: seen.maps() }.of_peer(&socket.copy)?;
        if let Some(credentials) = &mut record.peer_credentials {
            credentials.pid = peer.or(credentials.pid);
        }
    }
    if entry.listens {
        record.backlog = Some(entry.queues.1.min(i32::MAX as u32) as i32);
        record.held = is_reached;
        if !is_reached {
            record.left = left(survey, socket, &entry.waiting, known, tree)?;
        }
        return Ok(());
    }
    record.peer = match entry.peer {
        None => UnixPeer::None,
        Some(0) => match waits(socket, all, known) {
            Some((listener, place)) => {
                // SO_PEERCRED is not readable on the un-accepted side; its credentials are those of
                // the process that owns the client socket.
                let by = tree.iter().find(|seen| seen.pid == socket.pid).map(as_peer);
                let sent = match entry.queues.1 {
                    0 => Vec::new(),
                    _ => written(survey, socket, listener, place, tree)?,
                };
                UnixPeer::Waiting { listener: listener.object, place, by, sent }
            }
            None => UnixPeer::Gone,
        },
        Some(peer) => match known.get(&u64::from(peer)) {
            Some(peer) => UnixPeer::Socket { object: peer.object },
            None if survey.subject.hold && (record.name.is_none() || is_reached) => {
                let queue = socket.received.as_ref().map_err(Clone::clone)?;
                if queue.iter().any(|message| !message.descriptors.is_empty()) {
                    let why = "a unix socket with a descriptor in flight from outside the \
                               container";
                    return Err(Refused::Passing(why.into()));
                }
                record.held = true;
                record.peer = UnixPeer::Gone;
                return Ok(());
            }
            None => {
                let why =
                    format!("a unix socket with a peer ({peer}) that is outside the container");
                return Err(why.into());
            }
        },
    };
    if matches!(record.peer, UnixPeer::Waiting { .. }) {
        return Ok(());
    }
    let is_datagram = record.socket_type == libc::SOCK_DGRAM;
    record.held = is_reached && is_datagram && record.peer == UnixPeer::None;
    record.received.clone_from(socket.received.as_ref().map_err(Clone::clone)?);
    Ok(())
}

/// The listener at which a connection is pending, and the place in its queue.
fn waits<'k>(
    socket: &Socket,
    all: &HashMap<u64, Entry>,
    known: &'k UnixSockets,
) -> Option<(&'k Socket, u32)> {
    let inode = known.iter().find(|(_, one)| one.object == socket.object)?.0;
    known.iter().find_map(|(listener, one)| {
        let mut waiting = all.get(listener)?.waiting.iter();
        let place = waiting.position(|waiting| u64::from(*waiting) == *inode)?;
        Some((one, place as u32))
    })
}

/// Marks connections whose name was inherited from the listener that accepted them. Of two ends,
/// one was made by connect(2) and has a name only if it was bound before. A name that a listener
/// has belongs to that, and if only one end has a name, that end was accepted.
fn inherit(survey: &mut Survey<'_>, known: &UnixSockets) {
    let objects = &mut survey.found.objects;
    // An abstract name belongs to its network namespace.
    let of = |object: &Object| match &object.thing {
        Thing::UnixSocket(socket) => {
            let bytes = socket.name.as_ref()?.bytes.clone();
            let is_abstract = bytes.0.first() == Some(&0);
            Some((object.net.filter(|_| is_abstract), bytes))
        }
        _ => None,
    };
    let listening: Vec<(Option<usize>, Bytes)> = known
        .values()
        .filter(|s| matches!(&objects[s.object].thing, Thing::UnixSocket(u) if u.backlog.is_some()))
        .filter_map(|s| of(&objects[s.object]))
        .collect();
    let mut inherited = Vec::new();
    for socket in known.values() {
        let Thing::UnixSocket(record) = &objects[socket.object].thing else { continue };
        let is_connection = record.socket_type != libc::SOCK_DGRAM && record.backlog.is_none();
        let own = of(&objects[socket.object]).filter(|_| is_connection);
        let Some(name) = own else { continue };
        let others = match record.peer {
            UnixPeer::Socket { object } => of(&objects[object]),
            UnixPeer::Gone => None,
            UnixPeer::None | UnixPeer::Waiting { .. } => continue,
        };
        let is_listened_at = |name: &(Option<usize>, Bytes)| listening.contains(name);
        let is_accepted = match &others {
            None => true,
            Some(other) if is_listened_at(other) => false,
            Some(_) => is_listened_at(&name),
        };
        if is_accepted {
            inherited.push(socket.object);
        }
    }
    for object in inherited {
        if let Thing::UnixSocket(UnixSocket { name: Some(name), .. }) = &mut objects[object].thing {
            name.inherited = true;
            name.file = None;
        }
    }
}
