//! Unix sockets: names, queues and peers.
//!
//! Every open file is registered when it is found ([`save`]); the rest is known once all are
//! registered ([`finish`]). sock_diag(7), queried in the network namespace of the container,
//! returns the peer of each socket, the file behind a path, and the pending connections of a
//! listener. Messages are left in the receive queue by MSG_PEEK, which copies in-flight
//! descriptors. Those may be sockets with further in-flight descriptors, so this is repeated until
//! no new one is found.
//!
//! A pending connection is a socket that no process has open: no call reads the data in its receive
//! queue. A BPF program does ([`dormouse_bpf::embryo`]), if it can be loaded. For in-flight
//! descriptors it returns the addresses of the file descriptions, and the processes that have those
//! open. LIMIT: if the program may not be loaded, or a file is open nowhere else, the save waits a
//! moment for the connection to be accepted.
//!
//! **Reachable from outside.** Processes outside can use a socket whose file is on a volume, and
//! one that is connected to them. Such a socket of a container that falls asleep is
//! [held](super::Subject::hold): unchanged, with its queue and pending connections. A socket that
//! is also used by sockets inside is not held: those are re-created, and need a re-created peer.
//! LIMIT: neither is a socket on the container's own files, because it would keep these mounted.

use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use dormouse_bpf::embryo::{self, Embryo, Embryos};
use dormouse_kernel::call::{self, Namespace};
use dormouse_kernel::pidfd;
use rustix::event::PollFlags;
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::credentials::as_peer;
use super::diag::u32_at;
use super::held::{HeldFile, Wakes};
use super::known::socket::{Socket, UnixSockets};
use super::open::Open;
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::Survey;
use super::{diag, option};
use crate::error::Refusal;
use crate::format::{
    Bytes, Cause, Descriptor, Object, PeerCredentials, Thing, UnixFile, UnixLeft, UnixMessage,
    UnixName, UnixPeer, UnixSocket,
};
use crate::inject::peek::{Peeked, before_last_write, message};
use crate::inject::script::{Answers, Script};
use crate::look::descriptor::ready;
use crate::look::file;
use crate::look::ids::Maps;

/// A socket as sock_diag(7) reports it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Entry {
    listens: bool,
    /// `sun_path`.
    name: Vec<u8>,
    /// The inode of the file that it was bound to, the lower half.
    file: Option<u32>,
    /// The inode of its peer; 0 is a peer that no process has open.
    peer: Option<u32>,
    /// The inodes of the clients of pending connections.
    waiting: Vec<u32>,
    /// For a listener: the number of pending connections, and the backlog. Otherwise bytes received
    /// and sent.
    queues: (u32, u32),
    shut: u8,
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let failed = |e: Errno| format!("a unix socket: {e}");
    let kind = sockopt::socket_type(&open.copy).map_err(failed)?;
    let options = option::read(open.copy.as_fd(), AddressFamily::UNIX, kind, None)?;
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

/// Checks that no pending connection of a listener comes from outside.
fn check_pending(waiting: &[u32], known: &UnixSockets) -> Result<(), Refused> {
    if waiting.iter().all(|inode| *inode == 0 || known.contains_key(&u64::from(*inode))) {
        return Ok(());
    }
    let why = "a unix socket with a pending connection from outside the container";
    Err(Refused::Passing(why.into()))
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
    let queue = queue(&socket.copy, record.socket_type, translator).map_err(failed)?.ok_or(
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

/// The reason why a socket cannot be saved.
enum Refused {
    For(Reason),
    /// The refusal is likely to pass in a moment.
    Passing(Reason),
}

impl From<Reason> for Refused {
    fn from(why: Reason) -> Self {
        Self::For(why)
    }
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

/// Translates credentials to those that the container would see.
struct Translator<'s> {
    tree: &'s [Seen],
    maps: &'s Maps,
}

impl Translator<'_> {
    /// From pid, user and group outside. `None` if the kernel has none; without a pid if the
    /// process is outside.
    fn of(&self, [pid, uid, gid]: [u32; 3]) -> Option<PeerCredentials> {
        let (uid, gid) = self.maps.owner(uid, gid);
        let is_known = pid != 0 && uid != u32::MAX && gid != u32::MAX;
        let pid = self.tree.iter().find(|seen| seen.pid == pid).map(|seen| seen.inner);
        is_known.then_some(PeerCredentials { pid, uid, gid, groups: Vec::new() })
    }

    /// The answers of SO_PEERCRED and SO_PEERGROUPS.
    fn of_peer(&self, socket: &OwnedFd) -> Result<Option<PeerCredentials>, Reason> {
        /// LIMIT: bytes of groups, of which there are 65,536 at most.
        const GROUPS_BYTES_MAX: usize = 4 << 16;
        const SO_PEERGROUPS: i32 = 59;
        let failed = |e: Errno| format!("a unix socket without readable peer credentials: {e}");
        let mut bytes = [0; 12];
        call::socket_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, &mut bytes)
            .map_err(failed)?;
        let word =
            |n: usize| bytes[n * 4..][..4].iter().rev().fold(0, |w, b| w << 8 | u32::from(*b));
        let Some(mut credentials) = self.of([word(0), word(1), word(2)]) else { return Ok(None) };
        let mut groups = vec![0; 256];
        let groups = loop {
            let buffer = &mut groups[..];
            match call::socket_option(socket.as_fd(), libc::SOL_SOCKET, SO_PEERGROUPS, buffer) {
                Err(Errno::RANGE) if groups.len() < GROUPS_BYTES_MAX => {
                    groups.resize(GROUPS_BYTES_MAX, 0);
                }
                Err(Errno::NODATA) => break &groups[..0],
                got => break &groups[..got.map_err(failed)?],
            }
        };
        let groups = groups.chunks_exact(4).filter_map(|g| g.try_into().ok());
        let groups = groups.map(|g| self.maps.owner(0, u32::from_ne_bytes(g)).1);
        credentials.groups = groups.filter(|gid| *gid != u32::MAX).collect();
        Ok(Some(credentials))
    }
}

/// Reads the data that a socket has sent on a connection which is pending at a place of a
/// listener's queue.
fn written(
    survey: &Survey<'_>,
    socket: &Socket,
    listener: &Socket,
    place: u32,
    tree: &[Seen],
) -> Result<Vec<UnixMessage>, Refused> {
    let own = rustix::fs::fstat(&socket.copy).map_err(|e| not_now(&format!(": {e}")))?.st_ino;
    let (found, sent) = look_into(survey, listener, place, tree)?;
    match found.client == own {
        true => Ok(sent),
        false => Err(accepted_now()),
    }
}

/// The pending connections of a listener whose clients have closed them. No pending connection
/// comes from outside.
fn left(
    survey: &Survey<'_>,
    listener: &Socket,
    waiting: &[u32],
    known: &UnixSockets,
    tree: &[Seen],
) -> Result<Vec<UnixLeft>, Refused> {
    check_pending(waiting, known)?;
    let mut all = Vec::new();
    for (place, _) in waiting.iter().enumerate().filter(|(_, inode)| **inode == 0) {
        let place = place as u32;
        let (found, sent) = look_into(survey, listener, place, tree)?;
        if found.client != 0 {
            return Err(accepted_now());
        }
        if found.named {
            return Err(not_now(" of a named client that has closed it, which is not saved"));
        }
        let seen = tree.iter().find(|seen| seen.pid == listener.pid);
        let by = seen.and_then(|seen| Translator { tree, maps: seen.maps() }.of(found.by));
        let by = match (by, found.groups) {
            (Some(credentials), Some(groups)) => {
                let maps = seen.map(Seen::maps);
                let inside = |gid| maps.map_or(u32::MAX, |maps| maps.owner(0, gid).1);
                let groups = groups.into_iter().map(inside).filter(|gid| *gid != u32::MAX);
                Some(PeerCredentials { groups: groups.collect(), ..credentials })
            }
            _ => {
                return Err(not_now(
                    " of an unknown client that has closed it, which is not saved",
                ));
            }
        };
        all.push(UnixLeft { place, by, sent });
    }
    Ok(all)
}

/// The refusal passes when the connection is accepted.
fn not_now(what: &str) -> Refused {
    Refused::Passing(format!("a unix socket with a pending connection{what}"))
}

fn accepted_now() -> Refused {
    not_now(", accepted just now")
}

/// The pending connection at a place of a listener's queue, and the data sent on it.
fn look_into(
    survey: &Survey<'_>,
    listener: &Socket,
    place: u32,
    tree: &[Seen],
) -> Result<(Embryo, Vec<UnixMessage>), Refused> {
    /// Loaded on first use. The program reads one connection at a time.
    static EMBRYOS: OnceLock<Result<Mutex<Embryos>, Reason>> = OnceLock::new();
    let loaded = EMBRYOS.get_or_init(|| Embryos::load().map(Mutex::new).map_err(|e| e.to_string()));
    let mut embryos = match loaded {
        Ok(embryos) => embryos.lock().unwrap_or_else(PoisonError::into_inner),
        Err(why) => {
            let what = format!(" with data, which only BPF can read ({why})");
            return Err(not_now(&what));
        }
    };
    let failed = |e: dormouse_kernel::CallError| not_now(&format!(": {e}"));
    let seen = tree.iter().find(|seen| seen.pid == listener.pid).ok_or_else(accepted_now)?;
    let found = embryos.read(listener.copy.as_fd(), place).map_err(failed)?;
    let mut found = found.ok_or_else(accepted_now)?;
    if found.urgent {
        return Err(not_now(" with a byte out of band (MSG_OOB), which is not saved"));
    }
    let messages = found.messages.take();
    let messages = messages.ok_or_else(|| not_now(" with more data than is saved"))?;
    let mut files: Vec<u64> = messages.iter().flat_map(|m| &m.files).copied().collect();
    files.sort_unstable();
    files.dedup();
    if files.len() > embryo::FILES_MAX {
        return Err(not_now(" with more in-flight descriptors than are saved"));
    }
    let mut objects = HashMap::new();
    if !files.is_empty() {
        // Files that are in flight elsewhere are open in this program.
        let holders = tree.iter().filter(|seen| !seen.is_zombie).map(|seen| seen.pid);
        for pid in holders.chain([std::process::id()]) {
            let holds = embryos.holders(pid, &files).map_err(failed)?;
            let known = holds.into_iter().map(|(file, at)| (file, survey.open_at(pid, at)));
            objects.extend(known.filter_map(|(file, object)| Some((file, object?))));
        }
    }
    let Thing::UnixSocket(record) = &survey.found.objects[listener.object].thing else {
        return Err(accepted_now());
    };
    let is_stream = record.socket_type == libc::SOCK_STREAM;
    let translator = Translator { tree, maps: seen.maps() };
    let mut all: Vec<UnixMessage> = Vec::new();
    for message in messages {
        if message.data.is_empty() {
            return Err(not_now(" with an empty packet, which is not saved"));
        }
        let object = |file| objects.get(file).copied();
        let descriptors: Option<Vec<usize>> = message.files.iter().map(object).collect();
        let Some(descriptors) = descriptors else {
            let what = " with an in-flight descriptor that no process has open, which is not saved";
            return Err(not_now(what));
        };
        let can_be_sent = |n: &usize| survey.found.objects[*n].thing.may_be_on_its_way();
        if !descriptors.iter().all(can_be_sent) {
            return Err(not_now(" with an in-flight descriptor of a kind that is not saved"));
        }
        let credentials = message.sender.and_then(|sender| translator.of(sender));
        let goes_on = |last: &&mut UnixMessage| {
            let alone = descriptors.is_empty() && last.descriptors.is_empty();
            is_stream && alone && last.credentials == credentials
        };
        match all.last_mut().filter(goes_on) {
            Some(last) => last.data.0.extend(message.data),
            None => {
                let (data, from) = (Bytes(message.data), Bytes::default());
                all.push(UnixMessage { data, from, descriptors, credentials });
            }
        }
    }
    Ok((found, all))
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

/// The name of a socket, and the device of its file.
fn name(socket: &Socket, entry: &Entry) -> Result<(Option<UnixName>, Option<u64>), Reason> {
    let bytes = match entry.name.first() {
        None => return Ok((None, None)),
        Some(0) => entry.name.clone(),
        // The kernel counts the NUL at the end of a path.
        Some(_) => entry.name.split(|b| *b == 0).next().unwrap_or_default().to_vec(),
    };
    let mut name = UnixName { bytes: Bytes(bytes), directory: None, file: None, inherited: false };
    if name.bytes.0[0] == 0 {
        return Ok((Some(name), None));
    }
    let path = name.path().ok_or("a unix socket with a path that is not UTF-8")?.to_owned();
    let whole = if path.starts_with('/') {
        path.clone()
    } else {
        if !socket.directory.starts_with('/') || socket.directory.ends_with(" (deleted)") {
            return Err(format!("a unix socket named '{path}' in a removed directory"));
        }
        name.directory = Some(socket.directory.clone());
        format!("{}/{path}", socket.directory)
    };
    // A file that has replaced it belongs to another socket.
    let own = |stat: &Stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::Socket
            && entry.file == Some(stat.st_ino as u32)
    };
    let look = |pid| file::lookup(pid, &whole).and_then(rustix::fs::fstat).ok().filter(own);
    let found = look(socket.first);
    if found.is_none() && look(socket.pid).is_some() {
        let why = format!("a unix socket bound to '{whole}' below another root, not saved yet");
        return Err(why);
    }
    let (mut found, mut whole) = (found, whole);
    if let (None, Some(directory)) = (found, name.directory.clone()) {
        // Its process has changed its directory since: further down, as most do.
        for above in Path::new(&directory).ancestors().skip(1).filter_map(Path::to_str) {
            let other = format!("{}/{path}", above.trim_end_matches('/'));
            let look = file::lookup(socket.first, &other).and_then(rustix::fs::fstat);
            if let Some(stat) = look.ok().filter(own) {
                (found, whole) = (Some(stat), other);
                name.directory = Some(above.to_owned());
                break;
            }
        }
        if found.is_none() && is_called_by_name(socket, entry) {
            let why =
                format!("a unix socket bound to the relative path {name}, which is not found");
            return Err(format!("{why} from the directory of its process, not saved yet"));
        }
    }
    let above = Path::new(&whole).parent().and_then(Path::to_str).unwrap_or("/");
    let is_directory = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let there = file::lookup(socket.first, above).and_then(rustix::fs::fstat);
    if found.is_none() && !there.is_ok_and(is_directory) {
        return Err(format!(
            "a unix socket bound to '{whole}', whose directory is gone, not saved"
        ));
    }
    let device = found.map(|stat| stat.st_dev);
    name.file = found.map(|stat| {
        let (uid, gid) = Maps::read(socket.first).owner(stat.st_uid, stat.st_gid);
        UnixFile { mode: stat.st_mode & 0o777, uid, gid }
    });
    Ok((Some(name), device))
}

/// Whether peers use its address: a listener or a datagram socket.
fn is_called_by_name(socket: &Socket, entry: &Entry) -> bool {
    let kind = sockopt::socket_type(&socket.copy);
    entry.listens || kind.is_ok_and(|kind| kind == SocketType::DGRAM)
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

/// A message and its in-flight descriptors.
type Received = (UnixMessage, Vec<OwnedFd>);

/// Reads the receive queue without consuming it. `None` if a message carries anything but data and
/// descriptors.
fn queue(
    socket: &OwnedFd,
    socket_type: i32,
    translator: &Translator<'_>,
) -> Result<Option<Vec<Received>>, Errno> {
    let before = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    let peek_at =
        |offset| call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset);
    peek_at(0)?;
    let mut all: Vec<Received> = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    let mut offset = 0;
    let result = loop {
        match message(socket.as_fd(), &mut buffer) {
            // A stream that was never connected, or a socket without a peer.
            Err(Errno::AGAIN | Errno::INVAL | Errno::NOTCONN) => break Ok(Some(all)),
            Err(e) => break Err(e),
            Ok(Peeked { is_whole: false, .. }) => break Ok(None),
            Ok(got) if got.bytes == 0 && socket_type != libc::SOCK_DGRAM => break Ok(Some(all)),
            // The descriptors may belong to data behind this.
            Ok(got) if got.bytes == buffer.len() && !got.descriptors.is_empty() => break Ok(None),
            // A read of an empty message does not advance, and would repeat for ever.
            Ok(got) if got.bytes == 0 => break Ok(None),
            Ok(got) => {
                let data = &buffer[..got.bytes];
                let is_stream = socket_type == libc::SOCK_STREAM;
                // The read ends with the write that carried the descriptors, and includes the
                // writes before it.
                let found = match is_stream && !got.descriptors.is_empty() {
                    true => peek_at(offset)
                        .and_then(|()| before_last_write(socket.as_fd(), &mut vec![0; got.bytes])),
                    false => Ok(0),
                };
                let alone = match found {
                    Ok(alone) => alone,
                    Err(e) => break Err(e),
                };
                let is_datagram = socket_type == libc::SOCK_DGRAM;
                let from = if is_datagram { name_of(&got.from) } else { &[] };
                let message = |data: &[u8]| UnixMessage {
                    data: Bytes(data.to_vec()),
                    from: Bytes(from.to_vec()),
                    descriptors: Vec::new(),
                    credentials: got.sender.and_then(|sender| translator.of(sender)),
                };
                if alone > 0 {
                    all.push((message(&data[..alone]), Vec::new()));
                }
                all.push((message(&data[alone..]), got.descriptors));
                offset += got.bytes as i32;
                if is_stream && let Err(e) = peek_at(offset) {
                    break Err(e);
                }
            }
        }
    };
    peek_at(before)?;
    result
}

/// The bytes of the sender's name of a message.
fn name_of(from: &[u8]) -> &[u8] {
    match from.first() {
        Some(0) => from,
        _ => from.split(|b| *b == 0).next().unwrap_or_default(),
    }
}

/// Queries sock_diag(7) for all unix sockets of a process's network namespace.
fn query(pid: u32) -> Result<HashMap<u64, Entry>, Reason> {
    let failed = |e: &dyn std::fmt::Display| format!("a unix socket: {e}");
    let handle = pidfd::open(pid).map_err(|e| failed(&e))?;
    let netns = pidfd::namespace(&handle, Namespace::Net).map_err(|e| failed(&e))?;
    query_in(&netns)
}

/// The same for a network namespace.
fn query_in(netns: &OwnedFd) -> Result<HashMap<u64, Entry>, Reason> {
    // A separate thread enters the namespace and ends there.
    std::thread::scope(|scope| {
        let queried = scope.spawn(|| {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(netns.as_fd(), kind)?;
            dump()
        });
        let queried = queried.join().unwrap_or(Err(Errno::IO));
        queried.map_err(|e| format!("a unix socket: sock_diag: {e}"))
    })
}

fn dump() -> Result<HashMap<u64, Entry>, Errno> {
    /// UDIAG_SHOW_NAME, _VFS, _PEER, _ICONS, _RQLEN.
    const SHOW: u32 = 0x1f;
    // struct unix_diag_req: family, states, inode, what to show, a cookie.
    let mut request = vec![libc::AF_UNIX as u8, 0, 0, 0];
    for word in [u32::MAX, 0, SHOW, u32::MAX, u32::MAX] {
        request.extend(word.to_ne_bytes());
    }
    let mut all = HashMap::new();
    diag::dump(&request, |answer| {
        let (inode, entry) = entry(answer)?;
        all.insert(u64::from(inode), entry);
        Some(())
    })?;
    Ok(all)
}

/// Parses one answer: `struct unix_diag_msg`, attributes.
fn entry(answer: &[u8]) -> Option<(u32, Entry)> {
    const LISTEN: u8 = 10;
    const HEAD_BYTES: usize = 16;
    let mut entry = Entry { listens: *answer.get(2)? == LISTEN, ..Entry::default() };
    let inode = u32_at(answer, 4)?;
    for (kind, value) in diag::attributes(answer.get(HEAD_BYTES..)?)? {
        match kind {
            0 => entry.name = value.to_vec(),
            1 => entry.file = u32_at(value, 0),
            2 => entry.peer = u32_at(value, 0),
            3 => entry.waiting = value.chunks_exact(4).filter_map(|b| u32_at(b, 0)).collect(),
            4 => entry.queues = (u32_at(value, 0)?, u32_at(value, 4)?),
            6 => entry.shut = *value.first()?,
            _ => {}
        }
    }
    Some((inode, entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_sock_diag_is_read_or_refused() {
        let mut message = vec![0; 16];
        message[2] = 10;
        message[4] = 7;
        let attributes: [(u16, &[u8]); 4] = [
            (0, b"/run/a"),
            (2, &[9, 0, 0, 0]),
            (3, &[1, 0, 0, 0, 2, 0, 0, 0]),
            (4, &[2, 0, 0, 0, 17, 0, 0, 0]),
        ];
        for (kind, value) in attributes {
            message.extend((value.len() as u16 + 4).to_ne_bytes());
            message.extend(kind.to_ne_bytes());
            message.extend(value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let expected = Entry {
            listens: true,
            name: b"/run/a".to_vec(),
            peer: Some(9),
            waiting: vec![1, 2],
            queues: (2, 17),
            ..Entry::default()
        };
        assert_eq!(entry(&message), Some((7, expected)));
        // A size beyond the end.
        message[16] = 200;
        assert_eq!(entry(&message), None);
    }
}
