//! The messages between engine and keeper, and between engine and newborn.
//!
//! Both use SOCK_SEQPACKET sockets, one message per packet, in the machine's own byte order:
//!
//! ```text
//! u32 magic "DMK1"   u16 version   u16 kind   fields of the kind, in order
//! ```
//!
//! Numbers are fixed-width, texts are a u16 length and bytes. Descriptors travel beside a message
//! in the order documented at its kind. A message of another version, of unknown kind, too short,
//! too long or with the wrong number of descriptors is answered by [`Reply::Refused`] and otherwise
//! ignored.
//!
//! To the keeper: [`Request`]; from it: [`Reply`]. To the newborn: [`ToNewborn`]; from it:
//! [`FromNewborn`], 16 bytes that are written without allocation.

use crate::fill::{PARTS_MAX, SOURCES_MAX};

/// First field of every message.
pub const MAGIC: u32 = u32::from_ne_bytes(*b"DMK1");
/// The version of the protocol; older and newer ones are refused.
pub const VERSION: u16 = 1;
/// LIMIT: longest message to and from the keeper.
pub const MESSAGE_MAX_BYTES: usize = 8192;
/// LIMIT: longest id map, in bytes.
pub const MAP_MAX_BYTES: usize = 2048;
/// LIMIT: longest path of a log.
pub const PATH_MAX_BYTES: usize = 4095;

/// Descriptors that come with [`Request::Fill`] before those of contents and address spaces.
pub const FILL_DESCRIPTORS: usize = 3;
/// LIMIT: descriptors that come with one message to the keeper.
pub const DESCRIPTORS_MAX: usize = FILL_DESCRIPTORS + PARTS_MAX + SOURCES_MAX;

/// Not a message of this protocol; the text is the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Reads fields one after the other.
struct Fields<'b>(&'b [u8]);

impl<'b> Fields<'b> {
    fn take(&mut self, n: usize) -> Result<&'b [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Malformed("it is too short"))?;
        self.0 = rest;
        Ok(head)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        let b = self.take(2)?;
        Ok(u16::from_ne_bytes([b[0], b[1]]))
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        let b = self.take(4)?;
        Ok(u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        let low = u64::from(self.u32()?);
        Ok(low | u64::from(self.u32()?) << 32)
    }

    fn bytes(&mut self, max: usize) -> Result<&'b [u8], Malformed> {
        let n = usize::from(self.u16()?);
        if n > max {
            return Err(Malformed("a field is too long"));
        }
        self.take(n)
    }

    fn text(&mut self, max: usize) -> Result<String, Malformed> {
        let text = std::str::from_utf8(self.bytes(max)?).map_err(|_| Malformed("not UTF-8"))?;
        Ok(text.to_owned())
    }

    fn id(&mut self) -> Result<Id, Malformed> {
        Id::new(self.bytes(Id::MAX)?)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("it is too long")) }
    }
}

fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&(value as u32).to_ne_bytes());
    out.extend_from_slice(&((value >> 32) as u32).to_ne_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    let n = bytes.len().min(usize::from(u16::MAX));
    out.extend_from_slice(&(n as u16).to_ne_bytes());
    out.extend_from_slice(&bytes[..n]);
}

fn head(kind: u16) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    out.extend_from_slice(&MAGIC.to_ne_bytes());
    out.extend_from_slice(&VERSION.to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out
}

fn open(bytes: &[u8]) -> Result<(u16, Fields<'_>), Malformed> {
    let mut fields = Fields(bytes);
    if fields.u32()? != MAGIC {
        return Err(Malformed("it does not begin as one"));
    }
    if fields.u16()? != VERSION {
        return Err(Malformed("it is of another version"));
    }
    let kind = fields.u16()?;
    Ok((kind, fields))
}

/// The id of a container, kept without allocation: letters and digits, 64 at most, so that it is a
/// single path component.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    length: u8,
    bytes: [u8; 64],
}

impl Id {
    /// LIMIT: longest id.
    pub const MAX: usize = 64;

    /// Checks and copies an id.
    pub fn new(bytes: &[u8]) -> Result<Self, Malformed> {
        let good = |b: &u8| b.is_ascii_alphanumeric() || *b == b'-' || *b == b'_';
        if bytes.is_empty() || bytes.len() > Self::MAX || !bytes.iter().all(good) {
            return Err(Malformed("an id is not one"));
        }
        let mut id = Self { length: bytes.len() as u8, bytes: [0; 64] };
        id.bytes[..bytes.len()].copy_from_slice(bytes);
        Ok(id)
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a process is a container's first or joins one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The first: its end is written to the exit file and settled.
    Init,
    /// A further process: its exit is reported to its requester.
    Exec,
}

/// Bits of [`SpawnRequest::with`]: which descriptors come after the newborn's socket.
pub mod with {
    /// A network namespace.
    pub const NETNS: u8 = 1;
    /// A pidfd of a process; its pid namespace is joined.
    pub const PID_NAMESPACE: u8 = 2;
    /// The directory of a v2 cgroup.
    pub const CGROUP: u8 = 4;
    /// Not a descriptor: the keeper shall make a procfs of the new pid namespace.
    pub const PROC: u8 = 8;
    /// Not a descriptor: cloned from the template whose name follows.
    pub(super) const TEMPLATE: u8 = 16;
}

/// Bits of [`Reply::Hello`]: what a keeper and its newborns know.
pub mod feature {
    /// A plan in several parts.
    pub const PARTS: u32 = 1;
    /// All of this program's.
    pub const ALL: u32 = PARTS;
}

/// Bits of [`Request::Hold`]: the events that the keeper polls a descriptor for. A hang-up and an
/// error count with either; without any bit it is only held.
pub mod watch {
    /// Ready for reading.
    pub const READ: u8 = 1;
    /// Ready for writing.
    pub const WRITE: u8 = 2;
    /// Processes of the container stay while it is held, so their exit can still be waited for.
    pub const STAYS: u8 = 4;
}

/// Bits of [`Request::KeepOutput`]: the streams of which there is a pipe.
pub mod stream {
    /// Standard output.
    pub const OUT: u8 = 1;
    /// Standard error.
    pub const ERR: u8 = 2;
}

/// The fields of [`Request::Spawn`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpawnRequest {
    /// The container.
    pub id: Id,
    /// First process or a later one.
    pub kind: Kind,
    /// The keeper settles its exit if the spawner has exited.
    pub settle: bool,
    /// Bits of [`with`].
    pub with: u8,
    /// `CLONE_NEW*`.
    pub flags: u64,
    /// Text for uid_map, empty for none.
    pub uid_map: String,
    /// Text for gid_map.
    pub gid_map: String,
    /// The template whose memory the process shares.
    pub template: Option<Id>,
}

impl SpawnRequest {
    /// Number of descriptors of the message.
    pub fn descriptors(&self) -> usize {
        1 + (self.with & (with::NETNS | with::PID_NAMESPACE | with::CGROUP)).count_ones() as usize
    }
}

/// Requests of the engine to the keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Liveness check. Answered by `Status`.
    Status,
    /// The same. Answered by `Hello`, and refused by a keeper of an older program.
    Hello,
    /// Clones a newborn. Descriptors: its socket, then those of `with`, in the order of the bits.
    /// Answered by `Spawned`, and later by `Exited`.
    Spawn(SpawnRequest),
    /// Answered by `Exited` when this child exits, or `Refused(ESRCH)` if there is no such child.
    Wait {
        /// The child.
        pid: u32,
    },
    /// Descriptor: a pidfd of the first process of a container, whose keeper was killed. This keeper
    /// has the container settled when that process has exited.
    Adopt {
        /// The container.
        id: Id,
        /// The process.
        pid: u32,
    },
    /// Asserts that a process of the container is adopted, and its exit is still to be written.
    /// `Refused(ESRCH)` if not.
    HasAdopted {
        /// The container.
        id: Id,
    },
    /// Has a container settled whose first process exited while there was no keeper.
    Settle {
        /// The container.
        id: Id,
    },
    /// The sender has cleaned up after the exit of this child.
    Settled {
        /// The child.
        pid: u32,
    },
    /// Descriptors: the master of a terminal, and its log.
    KeepConsole {
        /// The container.
        id: Id,
    },
    /// Descriptor: the write end of its standard input.
    KeepStdin {
        /// The container.
        id: Id,
    },
    /// The logs of the container are kept under a bound.
    KeepLogs {
        /// The container.
        id: Id,
        /// Bytes on disk for each.
        bound_bytes: u64,
        /// Absolute paths on the host, two at most.
        paths: Vec<String>,
    },
    /// Answered by `Attached`: the master and the log of its console; pumping stops until this
    /// connection closes. `Refused(EBUSY)` while another client is attached.
    AttachConsole {
        /// The container.
        id: Id,
    },
    /// Answered by `Attached`: the write end of its standard input.
    AttachStdin {
        /// The container.
        id: Id,
    },
    /// Descriptor: the socket to a newborn of the container, which waits for the rest of its plan and exits with this
    /// keeper.
    KeepNewborn {
        /// The container.
        id: Id,
    },
    /// Answered by `Attached`: the descriptor sent by `KeepNewborn`, which the keeper has no more then. The client is
    /// the newborn's starter, as after `Spawn`. `Refused(ENOENT)` if there is none.
    TakeNewborn {
        /// The container.
        id: Id,
    },
    /// Drops console, standard input and logs of a container.
    Forget {
        /// The container.
        id: Id,
    },
    /// Descriptor: one that a container which falls asleep will have again when it wakes. When it
    /// is ready as in `watch` the keeper has the container woken. `Refused(EBUSY)` while a client
    /// waits for the exit of the container's first process, unless it is attached to the terminal.
    Hold {
        /// The container.
        id: Id,
        /// Its key within the container's descriptors.
        key: u32,
        /// Bits of [`watch`].
        watch: u8,
    },
    /// All descriptors of a container were sent: from the answer on they outlive this keeper.
    Park {
        /// The container.
        id: Id,
    },
    /// Answered by `Attached`: the descriptor sent by `Hold`. `Refused(ENOENT)` if it is not held.
    Take {
        /// The container.
        id: Id,
        /// Its key.
        key: u32,
    },
    /// Asserts that an event that wakes the container is present at a held descriptor. `Refused(AGAIN)` if none
    /// is, `Refused(ENOENT)` if it is not held.
    Ready {
        /// The container.
        id: Id,
        /// Its key.
        key: u32,
    },
    /// Asserts that descriptors of a container are held. `Refused(ENOENT)` if there are none.
    Holds {
        /// The container.
        id: Id,
    },
    /// Releases all descriptors found in the vault that `Holds` was not sent for since.
    LetGoUnasked,
    /// Drops all held descriptors of a container.
    LetGo {
        /// The container.
        id: Id,
    },
    /// Wakes a container with held descriptors at that time, unless a client connects before.
    /// `Refused(ENOENT)` if none is held.
    Alarm {
        /// The container.
        id: Id,
        /// From now.
        after_ms: u64,
    },
    /// Fills memory of the container while it runs. Descriptors: the file of [`crate::fill`], its
    /// first process, the file for the record of touched pages, so many files of the contents, and
    /// so many address spaces.
    Fill {
        /// The container.
        id: Id,
        /// Files of the contents.
        parts: u8,
        /// Address spaces.
        sources: u8,
    },
    /// Starts a template, from which newborns that share its memory are cloned, until this
    /// connection closes. Descriptors: the file of [`crate::template`], and so many files of the
    /// contents. Answered by `Done` when its memory is there.
    Template {
        /// Its name, for [`SpawnRequest::template`], which must be unique.
        key: Id,
        /// Files of the contents.
        parts: u8,
    },
    /// Descriptors: the read ends of the pipes for the output of a container, one for each bit of
    /// `streams`. A reader appends their contents to the log, until no process has a pipe open for
    /// writing.
    KeepOutput {
        /// The container.
        id: Id,
        /// Bits of [`stream`].
        streams: u8,
        /// Bytes of the log on disk; 0: no bound.
        bound_bytes: u64,
        /// Absolute path of the log on the host, which exists.
        path: String,
    },
    /// Answered by `Done` when the log has all output that was written before.
    FlushOutput {
        /// The container.
        id: Id,
    },
    /// Asserts that the keeper has output of a container. `Refused(ENOENT)` if there is none.
    HoldsOutput {
        /// The container.
        id: Id,
    },
    /// Exit now. `Refused(EBUSY)` while there are children or other connections.
    End,
}

impl Request {
    /// The message.
    pub fn encode(&self) -> Vec<u8> {
        let with_id = |kind, id: &Id| {
            let mut out = head(kind);
            put_bytes(&mut out, id.as_str().as_bytes());
            out
        };
        let with_key = |kind, id: &Id, key: u32| {
            let mut out = with_id(kind, id);
            out.extend_from_slice(&key.to_ne_bytes());
            out
        };
        let with_pid = |kind, pid: u32| {
            let mut out = head(kind);
            out.extend_from_slice(&pid.to_ne_bytes());
            out
        };
        match self {
            Self::Status => head(1),
            Self::Hello => head(28),
            Self::Spawn(spawn) => {
                let mut out = with_id(2, &spawn.id);
                let template = spawn.template.map_or(0, |_| with::TEMPLATE);
                let with = spawn.with & !with::TEMPLATE | template;
                out.extend_from_slice(&[spawn.kind as u8, u8::from(spawn.settle), with]);
                put_u64(&mut out, spawn.flags);
                put_bytes(&mut out, spawn.uid_map.as_bytes());
                put_bytes(&mut out, spawn.gid_map.as_bytes());
                if let Some(key) = &spawn.template {
                    put_bytes(&mut out, key.as_str().as_bytes());
                }
                out
            }
            Self::Wait { pid } => with_pid(3, *pid),
            Self::Settled { pid } => with_pid(4, *pid),
            Self::KeepConsole { id } => with_id(5, id),
            Self::KeepStdin { id } => with_id(6, id),
            Self::KeepLogs { id, bound_bytes, paths } => {
                let mut out = with_id(7, id);
                put_u64(&mut out, *bound_bytes);
                out.push(paths.len() as u8);
                paths.iter().for_each(|p| put_bytes(&mut out, p.as_bytes()));
                out
            }
            Self::AttachConsole { id } => with_id(8, id),
            Self::AttachStdin { id } => with_id(9, id),
            Self::Forget { id } => with_id(10, id),
            Self::End => head(11),
            Self::Hold { id, key, watch } => {
                let mut out = with_key(12, id, *key);
                out.push(*watch);
                out
            }
            Self::Park { id } => with_id(20, id),
            Self::Take { id, key } => with_key(13, id, *key),
            Self::LetGo { id } => with_id(14, id),
            Self::Holds { id } => with_id(17, id),
            Self::LetGoUnasked => head(18),
            Self::Alarm { id, after_ms } => {
                let mut out = with_id(15, id);
                put_u64(&mut out, *after_ms);
                out
            }
            Self::Fill { id, parts, sources } => {
                let mut out = with_id(16, id);
                out.extend([*parts, *sources]);
                out
            }
            Self::Template { key, parts } => {
                let mut out = with_id(19, key);
                out.push(*parts);
                out
            }
            Self::KeepOutput { id, streams, bound_bytes, path } => {
                let mut out = with_id(21, id);
                out.push(*streams);
                put_u64(&mut out, *bound_bytes);
                put_bytes(&mut out, path.as_bytes());
                out
            }
            Self::FlushOutput { id } => with_id(22, id),
            Self::HoldsOutput { id } => with_id(23, id),
            Self::Ready { id, key } => with_key(24, id, *key),
            Self::Settle { id } => with_id(25, id),
            Self::HasAdopted { id } => with_id(26, id),
            Self::Adopt { id, pid } => with_key(27, id, *pid),
            Self::KeepNewborn { id } => with_id(29, id),
            Self::TakeNewborn { id } => with_id(30, id),
        }
    }

    /// Reads a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (kind, mut fields) = open(bytes)?;
        let request = match kind {
            1 => Self::Status,
            28 => Self::Hello,
            2 => {
                let id = fields.id()?;
                let kind = match fields.u8()? {
                    0 => Kind::Init,
                    1 => Kind::Exec,
                    _ => return Err(Malformed("neither a first process nor a later one")),
                };
                let settle = fields.u8()? != 0;
                let with = fields.u8()?;
                let flags = fields.u64()?;
                let uid_map = fields.text(MAP_MAX_BYTES)?;
                let gid_map = fields.text(MAP_MAX_BYTES)?;
                let template = match with & with::TEMPLATE {
                    0 => None,
                    _ => Some(fields.id()?),
                };
                let with = with & !with::TEMPLATE;
                Self::Spawn(SpawnRequest {
                    id,
                    kind,
                    settle,
                    with,
                    flags,
                    uid_map,
                    gid_map,
                    template,
                })
            }
            3 => Self::Wait { pid: fields.u32()? },
            4 => Self::Settled { pid: fields.u32()? },
            5 => Self::KeepConsole { id: fields.id()? },
            6 => Self::KeepStdin { id: fields.id()? },
            7 => {
                let id = fields.id()?;
                let bound_bytes = fields.u64()?;
                let count = fields.u8()?;
                if count > 2 {
                    return Err(Malformed("more than two logs"));
                }
                let paths = (0..count).map(|_| fields.text(PATH_MAX_BYTES));
                Self::KeepLogs { id, bound_bytes, paths: paths.collect::<Result<_, _>>()? }
            }
            8 => Self::AttachConsole { id: fields.id()? },
            9 => Self::AttachStdin { id: fields.id()? },
            10 => Self::Forget { id: fields.id()? },
            11 => Self::End,
            12 => Self::Hold { id: fields.id()?, key: fields.u32()?, watch: fields.u8()? },
            13 => Self::Take { id: fields.id()?, key: fields.u32()? },
            14 => Self::LetGo { id: fields.id()? },
            17 => Self::Holds { id: fields.id()? },
            18 => Self::LetGoUnasked,
            15 => Self::Alarm { id: fields.id()?, after_ms: fields.u64()? },
            16 => {
                let (id, parts, sources) = (fields.id()?, fields.u8()?, fields.u8()?);
                if !(1..=PARTS_MAX).contains(&usize::from(parts)) {
                    return Err(Malformed("too many files of contents"));
                }
                if !(1..=SOURCES_MAX).contains(&usize::from(sources)) {
                    return Err(Malformed("too many address spaces"));
                }
                Self::Fill { id, parts, sources }
            }
            19 => {
                let (key, parts) = (fields.id()?, fields.u8()?);
                if !(1..=PARTS_MAX).contains(&usize::from(parts)) {
                    return Err(Malformed("too many files of contents"));
                }
                Self::Template { key, parts }
            }
            20 => Self::Park { id: fields.id()? },
            21 => {
                let (id, streams) = (fields.id()?, fields.u8()?);
                if !matches!(streams, 1..=3) {
                    return Err(Malformed("of streams that are none"));
                }
                let bound_bytes = fields.u64()?;
                Self::KeepOutput { id, streams, bound_bytes, path: fields.text(PATH_MAX_BYTES)? }
            }
            22 => Self::FlushOutput { id: fields.id()? },
            23 => Self::HoldsOutput { id: fields.id()? },
            24 => Self::Ready { id: fields.id()?, key: fields.u32()? },
            25 => Self::Settle { id: fields.id()? },
            26 => Self::HasAdopted { id: fields.id()? },
            27 => Self::Adopt { id: fields.id()?, pid: fields.u32()? },
            29 => Self::KeepNewborn { id: fields.id()? },
            30 => Self::TakeNewborn { id: fields.id()? },
            _ => return Err(Malformed("it is of unknown kind")),
        };
        fields.end()?;
        Ok(request)
    }

    /// Number of descriptors of the message.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Spawn(spawn) => spawn.descriptors(),
            Self::KeepConsole { .. } => 2,
            Self::KeepStdin { .. }
            | Self::KeepNewborn { .. }
            | Self::Hold { .. }
            | Self::Adopt { .. } => 1,
            Self::Fill { parts, sources, .. } => {
                FILL_DESCRIPTORS + usize::from(*parts) + usize::from(*sources)
            }
            Self::Template { parts, .. } => 1 + usize::from(*parts),
            Self::KeepOutput { streams, .. } => streams.count_ones() as usize,
            _ => 0,
        }
    }
}

/// Exit of a process (waitid(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The exit code; 128 and the signal's number where a signal ended it.
    pub code: i32,
    /// The signal, 0 for none.
    pub signal: i32,
    /// Time of the reaping, in milliseconds since the epoch.
    pub finished_unix_ms: i64,
}

/// Counts of the keeper.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Status {
    /// Processes.
    pub children: u32,
    /// Connections, this one included.
    pub connections: u32,
    /// Terminals.
    pub consoles: u32,
    /// Settle processes that run, and queued ones.
    pub settling: u32,
    /// Its own pid.
    pub pid: u32,
}

/// Replies of the keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// State of the keeper.
    Status(Status),
    /// A keeper that is no older than this message.
    Hello {
        /// Its own pid.
        pid: u32,
        /// Bits of [`feature`].
        features: u32,
    },
    /// Descriptors: a pidfd, and the procfs if one was requested.
    Spawned {
        /// The newborn.
        pid: u32,
        /// Field 22 of `/proc/PID/stat`, clock ticks since boot.
        start_time: u64,
    },
    /// A child has ended.
    Exited {
        /// The child.
        pid: u32,
        /// The exit status.
        ended: Ended,
    },
    /// The request was carried out.
    Done,
    /// Descriptors as documented at the request.
    Attached,
    /// The request was not carried out.
    Refused {
        /// The errno of the failed step.
        errno: i32,
        /// The step that failed.
        step: String,
    },
}

impl Reply {
    /// The message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Status(status) => {
                let mut out = head(101);
                let Status { children, connections, consoles, settling, pid } = *status;
                for n in [children, connections, consoles, settling, pid] {
                    out.extend_from_slice(&n.to_ne_bytes());
                }
                out
            }
            Self::Hello { pid, features } => {
                let mut out = head(107);
                out.extend_from_slice(&pid.to_ne_bytes());
                out.extend_from_slice(&features.to_ne_bytes());
                out
            }
            Self::Spawned { pid, start_time } => {
                let mut out = head(102);
                out.extend_from_slice(&pid.to_ne_bytes());
                put_u64(&mut out, *start_time);
                out
            }
            Self::Exited { pid, ended } => {
                let mut out = head(103);
                for n in [*pid, ended.code as u32, ended.signal as u32] {
                    out.extend_from_slice(&n.to_ne_bytes());
                }
                put_u64(&mut out, ended.finished_unix_ms as u64);
                out
            }
            Self::Done => head(104),
            Self::Attached => head(105),
            Self::Refused { errno, step } => {
                let mut out = head(106);
                out.extend_from_slice(&errno.to_ne_bytes());
                put_bytes(&mut out, step.as_bytes());
                out
            }
        }
    }

    /// Reads a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (kind, mut fields) = open(bytes)?;
        let reply = match kind {
            101 => Self::Status(Status {
                children: fields.u32()?,
                connections: fields.u32()?,
                consoles: fields.u32()?,
                settling: fields.u32()?,
                pid: fields.u32()?,
            }),
            107 => Self::Hello { pid: fields.u32()?, features: fields.u32()? },
            102 => Self::Spawned { pid: fields.u32()?, start_time: fields.u64()? },
            103 => Self::Exited {
                pid: fields.u32()?,
                ended: Ended {
                    code: fields.u32()? as i32,
                    signal: fields.u32()? as i32,
                    finished_unix_ms: fields.u64()? as i64,
                },
            },
            104 => Self::Done,
            105 => Self::Attached,
            106 => Self::Refused { errno: fields.u32()? as i32, step: fields.text(512)? },
            _ => return Err(Malformed("it is of unknown kind")),
        };
        fields.end()?;
        Ok(reply)
    }
}

/// To a newborn. Its descriptors: of `Plan`, the memfd and the first of the plan's; of `More`, the
/// next ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToNewborn {
    /// The plan or a part of it, so many bytes in the memfd, with so many descriptors in all.
    Plan {
        /// Length of the plan in bytes.
        bytes: u32,
        /// Number of its descriptors.
        descriptors: u32,
    },
    /// More descriptors.
    More,
    /// Continue after Sync.
    Go,
}

impl ToNewborn {
    /// The 16 bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        let (kind, a, b) = match self {
            Self::Plan { bytes, descriptors } => (1, bytes, descriptors),
            Self::More => (2, 0, 0),
            Self::Go => (3, 0, 0),
        };
        four(kind, a, b)
    }

    /// Reads 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match three(bytes)? {
            (1, bytes, descriptors) => Some(Self::Plan { bytes, descriptors }),
            (2, ..) => Some(Self::More),
            (3, ..) => Some(Self::Go),
            _ => None,
        }
    }
}

/// From a newborn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromNewborn {
    /// The newborn waits at Sync. Descriptor: the master of its terminal, if it opened one.
    Ready,
    /// An operation failed; the newborn exits.
    Failed {
        /// Index of the operation; `u32::MAX` is "receiving the plan".
        index: u32,
        /// Why.
        errno: i32,
    },
}

impl FromNewborn {
    /// The 16 bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        match self {
            Self::Ready => four(11, 0, 0),
            Self::Failed { index, errno } => four(12, index, errno as u32),
        }
    }

    /// Reads 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match three(bytes)? {
            (11, ..) => Some(Self::Ready),
            (12, index, errno) => Some(Self::Failed { index, errno: errno as i32 }),
            _ => None,
        }
    }
}

fn four(kind: u32, a: u32, b: u32) -> [u8; 16] {
    let mut out = [0; 16];
    for (i, n) in [MAGIC, kind, a, b].into_iter().enumerate() {
        out[i * 4..i * 4 + 4].copy_from_slice(&n.to_ne_bytes());
    }
    out
}

fn three(bytes: &[u8]) -> Option<(u32, u32, u32)> {
    let field = |i: usize| Some(u32::from_ne_bytes(bytes.get(i * 4..i * 4 + 4)?.try_into().ok()?));
    (bytes.len() == 16 && field(0)? == MAGIC).then_some(())?;
    Some((field(1)?, field(2)?, field(3)?))
}
