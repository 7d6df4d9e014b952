//! Objects: the targets of descriptors, areas and working directories. Each is one record, however
//! many refer to it.

use serde::{Deserialize, Serialize};

use crate::{
    AioContext, CgroupNamespace, Cgroups, Deleted, Device, Epoll, Event, External, Fanotify, File,
    Inotify, Ipc, Listener, Lock, MemoryFile, MessageQueue, Mounts, Net, Netlink, OpenQueue,
    PacketSocket, PidFd, Pipe, PipeEnd, ProcessFile, RawSocket, SharedMemory, SignalFd,
    SocketOption, SystemVMemory, SystemVQueue, SystemVSemaphores, TcpSocket, Terminal,
    TerminalSide, Time, TimerFd, Tmpfs, UdpSocket, UnixPeer, UnixSocket, User, Uts,
};

/// An open descriptor of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// Its number.
    pub number: u32,
    /// Its file description, an object that all duplicates of the descriptor refer to.
    pub object: usize,
    /// FD_CLOEXEC.
    pub close_on_exec: bool,
}

/// One object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// The kind and its record.
    #[serde(flatten)]
    pub thing: Thing,
    /// The object of the network namespace of a socket; `None` for the container's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net: Option<usize>,
    /// The object of the owning user namespace of a namespace; `None` for the container's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<usize>,
    /// Locks of its file description (flock(2), F_OFD_SETLK). A [`File`] has them in its own record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub file_locks: Vec<Lock>,
    /// The inode of a socket or an unnamed pipe; `None` if it is as root makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<Inode>,
}

/// Owner and permissions of the inode of a socket or an unnamed pipe. The owner of a socket is also the
/// user by which filters and routing rules match its packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    /// Its user, by the ids inside.
    pub uid: u32,
    /// Its group, by the ids inside.
    pub gid: u32,
    /// Its permission bits.
    pub mode: u32,
}

impl Object {
    /// Whether a process outside the container may connect, send or cause an event while the
    /// container is not running. Sockets of a network namespace inside are not reachable from
    /// outside.
    pub fn is_called_from_outside(&self) -> bool {
        self.net.is_none() && self.thing.is_called_from_outside()
    }

    /// The kind of event that it reports then.
    pub fn cause(&self) -> Cause {
        self.thing.cause()
    }
}

impl From<Thing> for Object {
    fn from(thing: Thing) -> Self {
        Self { thing, net: None, user: None, file_locks: Vec::new(), inode: None }
    }
}

/// The kind of event that an open file reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A new connection, or a datagram.
    Call,
    /// Data from a connected peer, or a peer that listens again.
    Data,
    /// An event of a file.
    File,
    /// An expired timer.
    Timer,
    /// Input of a terminal or of a device.
    Other,
}

/// Kinds of objects. Each has a module of its name here, in `save` and in `load`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Thing {
    /// A file or directory with a name.
    File(File),
    /// A file or directory without a name; open file descriptions are objects of their own.
    Deleted(Deleted),
    /// A memory file; open file descriptions are objects of their own.
    MemoryFile(MemoryFile),
    /// A device without state.
    Device(Device),
    /// A file description of the engine: a log, a standard stream.
    External(External),
    /// A pipe; its ends are objects of their own.
    Pipe(Pipe),
    /// An end of a pipe.
    PipeEnd(PipeEnd),
    /// A unix socket.
    UnixSocket(UnixSocket),
    /// A terminal; its open sides are objects of their own.
    Terminal(Terminal),
    /// An open side of a terminal.
    TerminalSide(TerminalSide),
    /// A listening TCP socket.
    Listener(Listener),
    /// A TCP socket that is not listening.
    TcpSocket(TcpSocket),
    /// A UDP socket.
    UdpSocket(UdpSocket),
    /// A raw socket, or one for ICMP echo requests.
    RawSocket(RawSocket),
    /// A packet socket.
    PacketSocket(PacketSocket),
    /// A netlink socket.
    Netlink(Netlink),
    /// eventfd(2).
    Event(Event),
    /// timerfd_create(2).
    Timer(TimerFd),
    /// signalfd(2).
    Signal(SignalFd),
    /// pidfd_open(2).
    PidFd(PidFd),
    /// An open file of a process in procfs.
    ProcessFile(ProcessFile),
    /// inotify(7).
    Inotify(Inotify),
    /// fanotify(7).
    Fanotify(Fanotify),
    /// epoll(7).
    Epoll(Epoll),
    /// The contents of a tmpfs.
    Tmpfs(Tmpfs),
    /// Control groups inside.
    Cgroups(Cgroups),
    /// Shared memory of System V.
    SystemVMemory(SystemVMemory),
    /// Semaphores of System V.
    SystemVSemaphores(SystemVSemaphores),
    /// A message queue of System V.
    SystemVQueue(SystemVQueue),
    /// A POSIX message queue; open file descriptions are objects of their own.
    MessageQueue(MessageQueue),
    /// An open POSIX message queue.
    OpenQueue(OpenQueue),
    /// Shared memory without a file.
    SharedMemory(SharedMemory),
    /// A context of asynchronous I/O.
    AioContext(AioContext),
    /// A mount namespace of some processes.
    Mounts(Mounts),
    /// A UTS namespace of some processes.
    Uts(Uts),
    /// An IPC namespace of some processes.
    Ipc(Ipc),
    /// A network namespace of some processes.
    Net(Net),
    /// A time namespace of some processes.
    Time(Time),
    /// A cgroup namespace of some processes.
    CgroupNamespace(CgroupNamespace),
    /// A user namespace of some processes.
    User(User),
}

impl Thing {
    /// Whether a process outside the container may connect, send or cause an event while the
    /// container is not running.
    pub fn is_called_from_outside(&self) -> bool {
        match self {
            Self::Listener(_) | Self::UdpSocket(_) => true,
            Self::TcpSocket(socket) => socket.held,
            Self::UnixSocket(socket) => socket.held,
            Self::Inotify(inotify) => inotify.held,
            _ => false,
        }
    }

    /// The kind of event that it reports, for an object that is reachable from outside.
    pub fn cause(&self) -> Cause {
        match self {
            Self::TcpSocket(_) => Cause::Data,
            Self::UnixSocket(socket) if socket.peer == UnixPeer::Gone => Cause::Data,
            Self::Inotify(_) => Cause::File,
            _ => Cause::Call,
        }
    }

    /// Whether its file description is made before any process, so that a descriptor of it can be
    /// in flight in a unix socket.
    pub fn may_be_on_its_way(&self) -> bool {
        match self {
            Self::File(_)
            | Self::Device(_)
            | Self::External(_)
            | Self::PipeEnd(_)
            | Self::UnixSocket(_)
            | Self::TerminalSide(_)
            | Self::Listener(_)
            | Self::TcpSocket(_)
            | Self::UdpSocket(_)
            | Self::RawSocket(_)
            | Self::PacketSocket(_)
            | Self::Netlink(_)
            | Self::OpenQueue(_)
            | Self::Event(_)
            | Self::Timer(_)
            | Self::Signal(_)
            | Self::Inotify(_)
            | Self::Fanotify(_)
            | Self::Epoll(_) => true,
            Self::Deleted(_)
            | Self::MemoryFile(_)
            | Self::Pipe(_)
            | Self::Terminal(_)
            | Self::PidFd(_)
            | Self::ProcessFile(_)
            | Self::Tmpfs(_)
            | Self::Cgroups(_)
            | Self::SystemVMemory(_)
            | Self::SystemVSemaphores(_)
            | Self::SystemVQueue(_)
            | Self::MessageQueue(_)
            | Self::SharedMemory(_)
            | Self::AioContext(_)
            | Self::Mounts(_)
            | Self::Uts(_)
            | Self::Ipc(_)
            | Self::Net(_)
            | Self::Time(_)
            | Self::CgroupNamespace(_)
            | Self::User(_) => false,
        }
    }

    /// Whether it is complete when it is made, so that the processes that have it open need no step
    /// for it.
    pub fn needs_no_owner(&self) -> bool {
        self.may_be_on_its_way()
            && !matches!(
                self,
                Self::TerminalSide(_) | Self::Inotify(_) | Self::Fanotify(_) | Self::Epoll(_)
            )
    }

    /// Whether it is a socket.
    pub fn is_socket(&self) -> bool {
        matches!(
            self,
            Self::Listener(_)
                | Self::TcpSocket(_)
                | Self::UdpSocket(_)
                | Self::RawSocket(_)
                | Self::PacketSocket(_)
                | Self::UnixSocket(_)
                | Self::Netlink(_)
        )
    }

    /// Options of a socket.
    pub fn socket_options(&self) -> &[SocketOption] {
        match self {
            Self::Listener(socket) => &socket.options,
            Self::TcpSocket(socket) => &socket.options,
            Self::UdpSocket(socket) => &socket.options,
            Self::RawSocket(socket) => &socket.options,
            Self::PacketSocket(socket) => &socket.options,
            Self::UnixSocket(socket) => &socket.options,
            Self::Netlink(socket) => &socket.options,
            _ => &[],
        }
    }

    /// Its name in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Deleted(_) => "deleted file",
            Self::MemoryFile(_) => "memory file",
            Self::Device(_) => "device",
            Self::External(_) => "standard stream",
            Self::Pipe(_) => "pipe",
            Self::PipeEnd(_) => "end of a pipe",
            Self::UnixSocket(_) => "unix socket",
            Self::Terminal(_) => "terminal",
            Self::TerminalSide(_) => "side of a terminal",
            Self::Listener(_) => "listening TCP socket",
            Self::TcpSocket(_) => "TCP socket",
            Self::UdpSocket(_) => "UDP socket",
            Self::RawSocket(_) => "raw socket",
            Self::PacketSocket(_) => "packet socket",
            Self::Netlink(_) => "netlink socket",
            Self::Event(_) => "eventfd",
            Self::Timer(_) => "timerfd",
            Self::Signal(_) => "signalfd",
            Self::PidFd(_) => "pidfd",
            Self::ProcessFile(_) => "file of a process",
            Self::Inotify(_) => "inotify",
            Self::Fanotify(_) => "fanotify",
            Self::Epoll(_) => "epoll",
            Self::Tmpfs(_) => "contents of a tmpfs",
            Self::Cgroups(_) => "control groups",
            Self::SystemVMemory(_) => "System V shared memory",
            Self::SystemVSemaphores(_) => "System V semaphores",
            Self::SystemVQueue(_) => "System V message queue",
            Self::MessageQueue(_) => "message queue",
            Self::OpenQueue(_) => "open message queue",
            Self::SharedMemory(_) => "shared memory",
            Self::AioContext(_) => "context of asynchronous I/O",
            Self::Mounts(_) => "mount namespace",
            Self::Uts(_) => "UTS namespace",
            Self::Ipc(_) => "IPC namespace",
            Self::Net(_) => "network namespace",
            Self::Time(_) => "time namespace",
            Self::CgroupNamespace(_) => "cgroup namespace",
            Self::User(_) => "user namespace",
        }
    }
}
