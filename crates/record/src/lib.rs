//! The records of a checkpoint: everything but the contents of memory.
//!
//! [`Records`] holds processes, address spaces and objects. Something that several descriptors,
//! mappings or processes share is one [`Object`], and has one number. A kind of object is a variant
//! of [`Thing`] and one module, which has the same name in `save` and `load` of crate `checkpoint`.
//! Numbers and texts only: no record holds a descriptor, and no function here changes the system.
//!
//! **Versions.** Only new fields and kinds are added, each field with a default. A kind that is
//! unknown to a reader is an error with its name. Names of fields are the format.
//!
//! **Trust.** None: a checkpoint may come from any source. [`check`] proves every number that refers
//! to something, before anything is made from it.
//!
//! Modules form a line: plain types, the types that hold them ([`Process`], [`Object`], [`Records`]),
//! questions about all records ([`Records::let_pass`], [`Records::times_made`]), and the checks. Crate
//! `parcel` writes and reads records; `checkpoint` makes them of processes, and processes of them.
#![forbid(unsafe_code)]

mod about;
mod aio;
mod bytes;
mod cgroup;
mod cgroup_namespace;
pub mod check;
mod credentials;
mod deleted;
mod error;
mod event;
pub mod fact;
mod fanotify;
mod file;
mod generation;
mod inotify;
mod ipc;
mod lock;
mod memfd;
mod memory;
mod mount;
mod mqueue;
mod net;
mod netlink;
mod object;
mod option;
mod owner;
mod page;
mod passing;
mod pidfd;
mod pipe;
mod policy;
mod process;
mod raw;
mod records;
pub mod sample;
mod schedule;
pub mod seat;
mod signal;
mod socket;
mod system_v;
mod tcp;
mod terminal;
mod thread;
mod time;
mod timer;
mod tmpfs;
mod udp;
mod unix;
mod user;
mod uts;

pub use about::{About, StatePart, VDSO_BYTES_MAX, vdso_hash};
pub use aio::AioContext;
pub use bytes::{Bytes, Checksums};
pub use cgroup::{CGROUPS_AT, Cgroup, Cgroups, SETTINGS};
pub use cgroup_namespace::CgroupNamespace;
pub use credentials::Credentials;
pub use deleted::Deleted;
pub use error::{Error, Refusal, Result};
pub use event::{Epoll, EpollItem, Event, SignalFd};
pub use fanotify::{Fanotify, Mark};
pub use file::{Device, External, File};
pub use generation::Made;
pub use inotify::{Inotify, Watch};
pub use ipc::{IPC_LIMITS, Ipc};
pub use lock::{HeldLock, Lease, Lock, LockKind, Notice};
pub use memfd::MemoryFile;
pub use memory::{Area, Backing, Layout, Memory, Run, SharedMemory};
pub use mount::{Mount, MountSource, Mounts, PROC_OPTIONS, TMPFS_OPTIONS};
pub use mqueue::{MessageQueue, OpenQueue, QueuedMessage};
pub use net::{Elsewhere, Link, LinkKind, Net, Said};
pub use netlink::Netlink;
pub use object::{Cause, Descriptor, Inode, Object, Thing};
pub use option::{OPTIONS, SocketOption};
pub use owner::Of;
pub use page::{CHUNK_BYTES, PAGE_BYTES, PARTS_MAX, Pages};
pub use pidfd::{PidFd, ProcessFile};
pub use pipe::{DeletedFifo, Pipe, PipeEnd};
pub use policy::{MemoryPolicy, RangePolicy};
pub use process::{Limit, Process};
pub use raw::{PacketMembership, PacketSocket, RawSocket};
pub use records::{INIT, PROGRAMS, Records};
pub use schedule::Schedule;
pub use signal::{Action, AlternateStack, IntervalTimer, Signal};
pub use socket::{Listener, Waiting};
pub use system_v::{SystemVHead, SystemVMemory, SystemVMessage, SystemVQueue, SystemVSemaphores};
pub use tcp::{Connection, TcpSocket, TcpState};
pub use terminal::{Terminal, TerminalSide};
pub use thread::{Dispatch, Filter, OwnPlace, OwnTable, Restart, Rseq, Table, Thread, TimeLimit};
pub use time::{CLOCK_MAX_NS, Time};
pub use timer::{PosixTimer, TimerFd};
pub use tmpfs::{Tmpfs, TmpfsEntry, TmpfsKind};
pub use udp::{Datagram, JoinedGroup, UdpSocket};
pub use unix::{PeerCredentials, UnixFile, UnixLeft, UnixMessage, UnixName, UnixPeer, UnixSocket};
pub use user::{Ids, User};
pub use uts::Uts;
