//! The engine's half of sockets: connections, queues and filters, which only the engine may set.
//!
//! Only a process with CAP_NET_ADMIN over a stack may set the state of a connection (TCP_REPAIR),
//! and a container does not have it. So the program makes the sockets, in the container's own
//! cgroup and with its own identity, and the engine takes copies while all processes wait. In
//! order:
//!
//! 1. All connections are restored in repair mode, in which nothing is sent ([`restore`]), and then the end of
//!    each peer that has ended.
//! 2. Pending connections are put into the queues of their listeners ([`crate::accept`]).
//! 3. The drop rules are removed, and the connections leave repair mode: unsent data is sent, and
//!    each peer gets a packet ([`Connections::resume`]). No process of the container runs yet.
//!
//! This module is above the kinds of sockets ([`super::tcp`], [`super::udp`], [`super::raw`],
//! [`super::socket`]).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use dormouse_kernel::{Errno, namespace, pidfd};
use dormouse_record::{Connection, Error, Result, SocketOption, TcpSocket, Thing, Waiting};

use super::restore::{Passed, Restore, Wanted};
use super::{raw, socket, tcp, udp};
use crate::accept::{self, Patience};
use crate::quiet;
use crate::stack::{self, Ends};

/// Connections that are complete and still in repair mode.
#[derive(Debug, Default)]
pub(super) struct Connections {
    sockets: Vec<(OwnedFd, usize)>,
    /// Sockets with a packet filter.
    filtered: Vec<(OwnedFd, usize)>,
    /// Listeners whose pending connections are to be restored.
    listening: Vec<(OwnedFd, usize)>,
}

/// Restores, by the engine's rights, connections and queues of sockets that the first process has
/// made. All processes wait.
pub(super) fn restore(pid: u32, restore: &Restore) -> Result<Connections> {
    let mut connections = Connections::default();
    let patience = Patience::default();
    for (index, object) in restore.records.objects.iter().enumerate() {
        let is_filtered = has_filter(&object.thing);
        let is_needed = is_filtered
            || match &object.thing {
                Thing::TcpSocket(tcp) => tcp.connection.is_some(),
                Thing::UdpSocket(udp) => {
                    !udp.received.is_empty() || udp.error.is_some() || !udp.groups.is_empty()
                }
                Thing::PacketSocket(_) => true,
                Thing::Listener(listener) => !listener.waiting.is_empty(),
                _ => false,
            };
        // A held socket has its queue.
        let held = Passed::Caller(Wanted::Held(index as u32));
        if !is_needed || restore.passed.contains(&held) {
            continue;
        }
        let copy = copy(pid, restore, index)?;
        let name = object.thing.name();
        if is_filtered {
            let again = copy.try_clone().map_err(|e| Error::Elsewhere(e.to_string()))?;
            connections.filtered.push((again, index));
        }
        match &object.thing {
            Thing::UdpSocket(udp) => {
                udp::fill(&copy, udp, &patience).map_err(|source| {
                    let what = format!("object {index} ({name})");
                    Error::Restore { what, call: "its queue and groups".into(), source }
                })?;
            }
            Thing::TcpSocket(TcpSocket { address: Some(own), connection: Some(it), .. }) => {
                tcp::rebuild(&copy, *own, it).map_err(|(step, source)| {
                    let what = format!("object {index} ({name}, {own} to {})", it.peer);
                    Error::Restore { what, call: step.into(), source }
                })?;
                connections.sockets.push((copy, index));
            }
            Thing::PacketSocket(packet) => raw::bind(&copy, packet).map_err(|source| {
                let device = packet.device.as_deref().unwrap_or("every device");
                let what = format!("object {index} ({name} at {device})");
                Error::Restore { what, call: "bind".into(), source }
            })?,
            Thing::Listener(it) if !it.waiting.is_empty() => {
                connections.listening.push((copy, index));
            }
            _ => {}
        }
    }
    complete(pid, restore, &connections.sockets, &patience)?;
    Ok(connections)
}

/// Completes the receiving side of connections, with the end of their peers.
///
/// ORDER: after all connections exist. The kernel acknowledges the FIN of a peer. If the peer is in the same stack and
/// does not exist yet, that segment is answered with RST.
fn complete(
    pid: u32,
    restore: &Restore,
    sockets: &[(OwnedFd, usize)],
    patience: &Patience,
) -> Result<()> {
    let mut stacks: BTreeMap<Option<usize>, Vec<(&OwnedFd, usize, &Connection)>> = BTreeMap::new();
    for (copy, index) in sockets {
        let object = &restore.records.objects[*index];
        let Thing::TcpSocket(tcp) = &object.thing else { continue };
        if let Some(it) = tcp.connection.as_ref().filter(|it| tcp::ends_in_repair(it)) {
            stacks.entry(object.net).or_default().push((copy, *index, it));
        }
    }
    for all in stacks.into_values() {
        let Some((any, ..)) = all.first() else { continue };
        let own = |index: usize| match &restore.records.objects[index].thing {
            Thing::TcpSocket(tcp) => tcp.address,
            _ => None,
        };
        let ended = all.iter().filter(|(.., it)| it.state.peer_has_ended());
        let ends = ended.filter_map(|(_, index, it)| Some([own(*index)?, it.peer])).collect();
        let act = || {
            all.iter().try_for_each(|(copy, index, it)| {
                tcp::complete_receiving(copy, it, patience).map_err(|source| Error::Restore {
                    what: format!("object {index} (a connection to {})", it.peer),
                    call: "the end of its peer".into(),
                    source,
                })
            })
        };
        quietly(pid, any, ends, act)?;
    }
    Ok(())
}

/// Acts while the packets of connections at their ends are dropped, if the stack of the socket is the container's own.
///
/// A peer that has ended its side may be gone with its stack. That stack would answer the acknowledgement of the end
/// with a reset. A stack that is shared with others has no such rules: a forged record could name connections of
/// others, and a killed restore would leave the rules behind.
fn quietly(
    pid: u32,
    socket: &OwnedFd,
    ends: Vec<Ends>,
    act: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let enter = Error::call("enter the container's network namespace");
    let netns = stack::of_socket(socket).map_err(enter)?;
    let id = format!("restore{pid}");
    let drops = !ends.is_empty() && is_own(&netns);
    if drops {
        let ends: Vec<Ends> = ends.into_iter().map(|both| both.map(quiet::canonical)).collect();
        quiet::begin(&netns, &id, &ends)?;
    }
    let done = act();
    if drops {
        quiet::end(&netns, &id)?;
    }
    done
}

/// Puts pending connections into the queue of a listener.
fn put(pid: u32, listener: &OwnedFd, waiting: &[Waiting]) -> Result<()> {
    let enter = || Error::call("enter the container's network namespace");
    let netns = stack::of_socket(listener).map_err(enter())?;
    let has_ended = |one: &Waiting| one.connection.state.peer_has_ended();
    let both = |one: &Waiting| [one.address, one.connection.peer];
    let ends =
        if waiting.iter().any(has_ended) { waiting.iter().map(both).collect() } else { Vec::new() };
    quietly(pid, listener, ends, || {
        let put = stack::inside_of(&netns, || Ok(accept::put(listener, waiting)));
        put.map_err(enter())?
    })
}

/// Whether a stack belongs to a user namespace of the container. A trust domain's and the host's belong to that of
/// this process; of another that is not below it, the kernel does not return the owner.
fn is_own(netns: &OwnedFd) -> bool {
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    let own = std::fs::metadata("/proc/self/ns/user").map(|meta| (meta.dev(), meta.ino()));
    match (namespace::owner(netns.as_fd()), own) {
        (Ok(owner), Ok(own)) => inode(&owner).is_ok_and(|owner| owner != own),
        _ => false,
    }
}

/// Whether a socket has a packet filter that the program has not set.
fn has_filter(thing: &Thing) -> bool {
    let is_given = matches!(thing, Thing::RawSocket(_) | Thing::PacketSocket(_));
    !is_given && thing.socket_options().iter().any(SocketOption::is_about_filter)
}

/// A descriptor in this program of a socket that the first process has made.
fn copy(pid: u32, restore: &Restore, index: usize) -> Result<OwnedFd> {
    let number = restore.number(index).map_err(Error::of("find a socket", pid))?;
    pidfd::open(pid)
        .and_then(|pidfd| pidfd::copy_descriptor(&pidfd, number))
        .map_err(|e| Error::Elsewhere(e.to_string()))
}

impl Connections {
    /// Removes the drop rules and ends repair mode.
    pub(super) fn resume(self, pid: u32, restore: &Restore) -> Result<()> {
        // ORDER: while packets are dropped: neither the peers nor the kernel can send an answer
        // that disagrees.
        for (copy, index) in &self.listening {
            let Thing::Listener(it) = &restore.records.objects[*index].thing else { continue };
            put(pid, copy, &it.waiting)?;
        }
        if let Some(id) = &restore.quiet {
            quiet::end(&stack::of(pid)?, id)?;
        }
        for (copy, index) in &self.sockets {
            let Thing::TcpSocket(tcp) = &restore.records.objects[*index].thing else { continue };
            let Some(connection) = &tcp.connection else { continue };
            match tcp::leave_repair(copy, tcp, connection) {
                // The peer had closed, and resets the connection at once: the program sees that
                // when it uses the socket.
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {}
                Err(e) => return Err(Error::call("let a TCP connection go on")(e)),
            }
        }
        // ORDER: after all received data is in place, whatever the filters drop from now on.
        for (copy, index) in &self.filtered {
            let options = restore.records.objects[*index].thing.socket_options();
            socket::attach_filter(copy, options).map_err(Error::call("attach a packet filter"))?;
        }
        Ok(())
    }
}
