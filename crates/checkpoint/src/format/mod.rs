//! The format of a checkpoint on disk.
//!
//! A directory, mode 0700, of files, mode 0600:
//!
//! ```text
//! records   "DORMCKPT"  u32 version  u32 sections
//!           sections:   16 bytes name  u64 offset  u64 length  32 bytes BLAKE3
//!           their bytes, JSON each, in the order of the table
//!           32 bytes    BLAKE3 of everything before
//! pages     contents of memory, 4,096 bytes a page
//! pages.1   more of them; up to `pages.7`
//! ```
//!
//! **Several files of pages** are numbered as one: each begins at a chunk boundary, and no record
//! refers to pages in the gap between two files. All files except the last are files of an earlier
//! checkpoint of the same container, by hard links ([`Base`]): their pages have not changed since,
//! and were not written again. No file is written to after its publication, so removal, move or
//! damage of one checkpoint does not change another.
//!
//! Numbers are little-endian. The section `page` holds a BLAKE3 of every [`CHUNK_BYTES`] of pages,
//! so the last 32 bytes of `records` identify all of a checkpoint. Sections: `about`
//! ([`About`]), `process` ([`Process`]), `memory` ([`Memory`]), `object` ([`Object`]), `page`
//! ([`Pages`]).
//!
//! **Versions.** Only new fields and kinds are added, each field with a default. A kind that is
//! unknown to a reader is an error with its name. [`VERSION`] changes if an old reader would
//! misread the records.
//!
//! **Trust.** None: a checkpoint may come from any source. The bytes are checked as a whole and per
//! part ([`Reader`]), and then every number that refers to something ([`check`]), before anything
//! is made from them.
//!
//! **One stream** of a checkpoint and what belongs to it, for a transfer: [`archive`]; encrypted,
//! so that only the chosen recipients can read it: [`seal`].
//!
//! **Published** by rename of a directory that is complete and on the disk ([`Writer`]).

mod about;
pub mod archive;
mod base;
mod cgroup;
mod cgroup_namespace;
pub mod check;
mod deleted;
mod event;
mod fanotify;
mod file;
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
mod part;
mod passing;
mod pidfd;
mod pipe;
mod process;
mod raw;
mod read;
mod schedule;
pub mod seal;
mod signal;
mod sink;
mod socket;
mod system_v;
mod tcp;
mod terminal;
pub(crate) mod terminal_modes;
mod thread;
mod time;
mod timer;
mod tmpfs;
mod udp;
mod unix;
mod user;
mod uts;
mod write;

pub use about::{About, StatePart};
pub use base::{Base, Of};
pub(crate) use cgroup::{CGROUPS_AT, SETTINGS};
pub use cgroup::{Cgroup, Cgroups};
pub use cgroup_namespace::CgroupNamespace;
pub use deleted::Deleted;
pub use event::{Epoll, EpollItem, Event, SignalFd};
pub use fanotify::{Fanotify, Mark};
pub use file::{Device, External, File};
pub use inotify::{Inotify, Watch};
pub use ipc::Ipc;
pub use lock::{HeldLock, Lease, Lock, LockKind, Notice};
pub use memfd::MemoryFile;
pub use memory::{Area, Backing, Layout, Memory, Run, SharedMemory};
pub use mount::{Mount, MountSource, Mounts};
pub(crate) use mount::{PROC_OPTIONS, TMPFS_OPTIONS};
pub use mqueue::{MessageQueue, OpenQueue, QueuedMessage};
pub use net::{Elsewhere, Link, LinkKind, Net, Said};
pub use netlink::Netlink;
pub use object::{Cause, Descriptor, Object, Thing};
pub use part::{PARTS_MAX, PageFiles, part_name};
pub use pidfd::PidFd;
pub use pipe::{DeletedFifo, Pipe, PipeEnd};
pub use process::{Credentials, Limit, Process};
pub use raw::{PacketMembership, PacketSocket, RawSocket};
pub use read::{Reader, Section};
pub use schedule::Schedule;
pub use signal::{Action, AlternateStack, IntervalTimer, Signal};
pub(crate) use sink::warm;
pub(crate) use socket::OPTIONS;
pub use socket::{Listener, SocketOption, Waiting};
pub use system_v::{SystemVHead, SystemVMemory, SystemVMessage, SystemVQueue, SystemVSemaphores};
pub use tcp::{Connection, TcpSocket, TcpState};
pub use terminal::{Terminal, TerminalSide};
pub use thread::{Filter, OwnPlace, Restart, Rseq, Thread, TimeLimit};
pub(crate) use time::Made;
pub use time::Time;
pub use timer::{PosixTimer, TimerFd};
pub use tmpfs::{Tmpfs, TmpfsEntry, TmpfsKind};
pub use udp::{Datagram, UdpSocket};
pub use unix::{PeerCredentials, UnixFile, UnixLeft, UnixMessage, UnixName, UnixPeer, UnixSocket};
pub use user::{Ids, User};
pub use uts::Uts;
pub use write::Writer;

use serde::{Deserialize, Serialize};

/// First bytes of `records`.
pub const MAGIC: [u8; 8] = *b"DORMCKPT";
/// The version that this code writes, and the only one that it reads.
pub const VERSION: u32 = 4;
/// Bytes of pages under one checksum, which is checked before any page of the chunk is used.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
/// LIMIT: bytes of one section.
pub const SECTION_BYTES_MAX: u64 = 1 << 30;

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
pub(crate) const INIT: u32 = 1;

/// Process ids that the program of such an init may have: the next one, or, KERNEL(6.17), before
/// that, the next after the process that mounted procfs for the container.
pub(crate) const PROGRAMS: std::ops::RangeInclusive<u32> = 2..=3;

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
}

/// The lengths and checksums of the files of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Where the last page ends, in bytes.
    pub bytes: u64,
    /// Checksums of all chunks; the last chunk of a file may be shorter.
    pub chunks: Checksums,
    /// Bytes of each file; empty if there is only one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<u64>,
}

/// BLAKE3 of one chunk after the other, as one base64 text in records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checksums(pub Vec<[u8; 32]>);

impl Serialize for Checksums {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_base64(self.0.as_flattened()))
    }
}

impl<'de> Deserialize<'de> for Checksums {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = from_base64(deserializer)?;
        match bytes.as_chunks() {
            (all, []) => Ok(Self(all.to_vec())),
            _ => Err(serde::de::Error::custom("the last checksum is cut")),
        }
    }
}

/// Bytes, as base64 in records.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_base64(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        from_base64(deserializer).map(Self)
    }
}

fn to_base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn from_base64<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    use base64::Engine;
    let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
    let bytes = base64::engine::general_purpose::STANDARD.decode(text.as_bytes());
    bytes.map_err(serde::de::Error::custom)
}
