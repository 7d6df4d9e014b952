//! All records of a checkpoint, and questions about them as a whole.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{About, Cgroups, Connection, Memory, Object, Pages, Process, Table, TcpSocket, Thing};

/// All records of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Records {
    /// The origin of the checkpoint.
    pub about: About,
    /// Parents before children, the first process first.
    pub processes: Vec<Process>,
    /// Address spaces.
    pub memories: Vec<Memory>,
    /// The objects of descriptors, areas and other objects.
    pub objects: Vec<Object>,
    /// Checksums of pages.
    pub pages: Pages,
}

/// The process id of the engine's init, which is not saved.
pub const INIT: u32 = 1;

/// Process ids that the program of such an init may have: the next one, or, KERNEL(6.17), before
/// that, the next after the process that mounted procfs for the container.
pub const PROGRAMS: std::ops::RangeInclusive<u32> = 2..=3;

impl Records {
    /// The container's first process is the engine's init, which the restore makes anew; the first
    /// record is that of the program.
    pub fn has_init(&self) -> bool {
        self.of_init().is_some()
    }

    /// The process id of the program of such an init.
    pub fn of_init(&self) -> Option<u32> {
        self.processes.first().filter(|first| first.parent == INIT).map(|first| first.pid)
    }

    /// The control groups inside, if the container may have any.
    pub fn cgroups(&self) -> Option<&Cgroups> {
        self.objects.iter().find_map(|object| match &object.thing {
            Thing::Cgroups(cgroups) => Some(cgroups),
            _ => None,
        })
    }

    /// All tables of descriptors, those of processes before those of their threads.
    pub fn tables(&self) -> impl Iterator<Item = Table<'_>> {
        self.processes.iter().flat_map(Process::tables)
    }

    /// All TCP connections, including pending ones.
    pub fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.objects.iter().flat_map(|object| {
            let (own, waiting) = match &object.thing {
                Thing::TcpSocket(socket) => (socket.connection.as_ref(), &[][..]),
                Thing::Listener(listener) => (None, &listener.waiting[..]),
                _ => (None, &[][..]),
            };
            own.into_iter().chain(waiting.iter().map(|one| &one.connection))
        })
    }

    /// Both addresses, the local one first, of all TCP connections in the container's own stack.
    pub fn ends(&self) -> impl Iterator<Item = [SocketAddr; 2]> {
        let of_its_own = self.objects.iter().filter(|object| object.net.is_none());
        of_its_own.flat_map(|object| {
            let (own, waiting) = match &object.thing {
                Thing::TcpSocket(TcpSocket { address, connection, .. }) => {
                    let ends = |(own, connection): (_, &Connection)| [own, connection.peer];
                    ((*address).zip(connection.as_ref()).map(ends), &[][..])
                }
                Thing::Listener(listener) => (None, &listener.waiting[..]),
                _ => (None, &[][..]),
            };
            own.into_iter().chain(waiting.iter().map(|one| [one.address, one.connection.peer]))
        })
    }
}
