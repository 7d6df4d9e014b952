//! The form of a plan in transit: one flat piece of memory that the newborn maps and executes.
//!
//! ```text
//! 0     header, 48 bytes        magic, version, length, operations: where, how many; descriptors
//! 48    operations, 32 bytes each
//! ...   strings, each ended by a NUL, and tables of 64-bit offsets, aligned to 8, ended by a 0
//! ```
//!
//! All numbers are in the machine's own order: writer and reader are one program on one machine.
//! Offsets count from the start. A table (`argv`, `envp`) becomes an array of pointers by adding
//! the address of the mapping to each entry ([`Flat::relocate`]), so that the newborn passes its
//! mapping to the kernel, with no allocation between clone and execve. Every access is checked
//! against the bounds: a damaged plan is an error, never a wild read.

use std::ffi::CStr;

/// First eight bytes of a plan.
pub const MAGIC: [u8; 8] = *b"DORMPLAN";
/// The version that this code writes and the only one it reads.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 48;
/// Bytes of one operation.
pub const RECORD_BYTES: usize = 32;
/// LIMIT: the largest plan. The kernel takes 6 MiB of arguments and environment at most.
pub const PLAN_MAX_BYTES: usize = 8 << 20;
/// LIMIT: descriptors that one plan can carry.
pub const FDS_MAX: usize = 2048;
/// The descriptor field of an operation that uses none.
pub const NO_FD: u32 = u32::MAX;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// The operations. The texts name them in errors.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Code { $($(#[$doc])* $name = $value,)* }

        impl Code {
            /// The operation with this number.
            pub fn from_number(number: u16) -> Option<Self> {
                match number { $($value => Some(Self::$name),)* _ => None }
            }

            /// The operation, for an error message: `cannot TEXT`.
            pub fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

codes! {
    /// Writes "0" to the `tasks` file `fd`.
    JoinCgroup = 1, "join the cgroup";
    /// setns(`fd`, `a`).
    Setns = 2, "enter the namespaces";
    /// Becomes uid and gid 0 of its user namespace, without supplementary groups.
    BecomeRoot = 3, "become root of the user namespace";
    /// unshare(`a`).
    Unshare = 4, "make a namespace";
    /// Joins a new anonymous session keyring.
    SessionKeyring = 5, "make a session keyring";
    /// Mount `fd` becomes the root.
    Root = 6, "put the root filesystem in place";
    /// The root mount becomes read-only.
    RootReadOnly = 7, "make the root filesystem read-only";
    /// Mount `fd` is attached at `text`; the lower half of `a` is the kind of the target, flag
    /// CREATE makes it, and the upper half is how its propagation is set; flag COPY attaches a copy.
    Attach = 8, "mount";
    /// A new filesystem of type `b` (an index into `FILESYSTEMS`) at `text`. Of a devpts, `a` is the group,
    /// and `fd` the number of terminals.
    NewFilesystem = 9, "mount";
    /// The path at `b` is bound at `text`.
    Bind = 10, "bind";
    /// `text` is hidden by the file mount `fd` or the directory mount `a`.
    Mask = 11, "mask";
    /// `text` becomes read-only with everything below.
    ReadOnly = 12, "make read-only";
    /// Writes the text at `b` to the sysctl file `text` (relative to `/proc/sys`).
    Sysctl = 13, "set the sysctl";
    /// sethostname(`text`).
    Hostname = 14, "set the host name";
    /// setdomainname(`text`).
    Domainname = 15, "set the domain name";
    /// setrlimit: resource `fd`, soft `a`, hard `b`.
    Rlimit = 16, "set the resource limit";
    /// umask(`a`).
    Umask = 17, "set the umask";
    /// Writes `a` to oom_score_adj.
    OomScoreAdj = 18, "set oom_score_adj";
    /// Descriptors `fd`, `a`, `b` become 0, 1, 2.
    Stdio = 19, "set up standard input and output";
    /// A terminal of the devpts at `text` becomes 0, 1, 2 and the controlling one.
    Terminal = 20, "open a terminal";
    /// A new session.
    Setsid = 21, "make a session";
    /// Sends Ready, executes the sysctls that follow, and waits for Go. With flag EARLY other operations that
    /// follow come before the wait, too.
    Sync = 22, "wait for the engine";
    /// chdir(`text`), inside the root.
    Chdir = 23, "change to the working directory";
    /// uid `fd`, gid `a`, `b` groups as 32-bit numbers at `text`.
    Credentials = 24, "take on the user's ids";
    /// Five 64-bit masks at `text`: bounding, effective, permitted, inheritable, ambient.
    Capabilities = 25, "set the capabilities";
    /// prctl(PR_SET_NO_NEW_PRIVS).
    NoNewPrivs = 26, "set no_new_privs";
    /// Loads `a` instructions of the filter at `text`.
    Seccomp = 27, "load the system call filter";
    /// A tiny init stays as this process; the program is its child. Data, if any: its user and
    /// group, effective, permitted and inheritable capabilities, 8 bytes each.
    Init = 28, "start the init process";
    /// execve: candidates at `text`, argv table at `a`, envp table at `b`.
    Exec = 29, "execute";
    /// mkdir -p `text` with mode `a`.
    MakeDir = 30, "make the directory";
    /// The link `text` pointing to the path at `b`.
    Symlink = 31, "make the link";
    /// The loopback device of its network namespace is set up.
    Loopback = 32, "set the loopback device up";
    /// The program in memory `fd` is mapped at `a`, `b` bytes long, and followed. At `text`,
    /// numbers of 64 bits: its first operation, where descriptor numbers go, how many, their
    /// indices.
    Follow = 33, "follow the restore";
    /// Mount `fd` is attached at `text`, a path of the host that the mount namespace is a copy of;
    /// what follows is relative to it.
    RootBelow = 47, "put the root filesystem in place";
    /// pivot_root(2) to the mount of `RootBelow`; everything else leaves the mount namespace.
    Pivot = 48, "make the root filesystem the root";
    /// The root mount's propagation: `a` is a `Spread`, with everything below for flag RECURSIVE.
    Spread = 34, "set the propagation of the root filesystem";
    /// A new filesystem at `text`, a target of kind `fd`, with mount attributes in the lower half
    /// of `a` and its propagation in the upper; at `b` its type and its options, texts one after
    /// the other, ended by an empty one.
    Filesystem = 35, "mount";
    /// The device node `text`: device number `a`, mode and kind in the lower half of `b`, owner in
    /// its upper half, group `fd`.
    Device = 36, "make the device";
    /// The program `text` with argv table `a` and envp table `b` and descriptor `fd` as its
    /// standard input, in a separate process; killed after the number of seconds in the flags, 0
    /// for never.
    Hook = 37, "run the hook";
    /// Sends Ready and, after Go, waits for a connection to the listening socket `fd` and another
    /// Go from there.
    Await = 38, "wait to be started";
    /// Writes `text` to `fd`.
    Write = 39, "write";
    /// Enters the time namespace that unshare(2) has made for its children.
    EnterTime = 40, "enter the time namespace";
    /// personality(`a`).
    Personality = 41, "set the personality";
    /// sched_setattr: the `struct sched_attr` at `text`.
    Scheduler = 42, "set the scheduler";
    /// ioprio_set: `a`.
    IoPriority = 43, "set the I/O priority";
    /// Descriptors `fd` and the `a` - 1 after it become 3 and following, and stay open.
    Preserve = 44, "pass on the descriptors";
    /// The LSM label `text` for execve.
    Label = 45, "set the security label";
    /// One of the candidates at `text` can be executed.
    Lookup = 46, "find";
    /// The programs of the hooks that follow write to descriptor `fd`. Where `a` is not 0, the filter at
    /// `text` of `a` instructions is loaded for them, with the flags of seccomp(2) in `flags`.
    HookWith = 49, "prepare the hooks";
    /// sched_setaffinity: the mask at `text`. Flag LENIENT: where none of its CPUs may be used, the old
    /// mask stays.
    Affinity = 50, "set the CPU affinity";
    /// set_mempolicy: mode and flags `a`, the mask of nodes at `text`.
    MemoryPolicy = 51, "set the memory policy";
    /// A copy of the mount at `text`, inside the root, takes the place of descriptor `fd`; with
    /// everything below for flag RECURSIVE. The lower half of `a` is set and the upper half cleared of
    /// its attributes. Where the lower half of `b` is not NO_FD, ids are mapped as in the user namespace
    /// of that descriptor, with everything below if the upper half is not 0.
    Take = 52, "copy the mount";
    /// Receives the next part of the plan, whose operations follow, and whose descriptors are added. The last
    /// operation of a part.
    Rest = 53, "receive the rest of the plan";
}

impl Code {
    /// Returns which of the arguments `a` and `b` are offsets.
    fn offsets(self) -> (bool, bool) {
        match self {
            Self::Exec | Self::Hook => (true, true),
            Self::Bind | Self::Sysctl | Self::Symlink | Self::Filesystem => (false, true),
            _ => (false, false),
        }
    }
}

/// The target of the operation is made when it is missing.
pub const CREATE: u16 = 1;
/// The operation may be refused by the kernel without harm.
pub const LENIENT: u16 = 2;
/// The mount is made read-only.
pub const READ_ONLY: u16 = 4;
/// The terminal is bound at `/dev/console` too.
pub const CONSOLE: u16 = 8;
/// With everything below.
pub const RECURSIVE: u16 = 16;
/// By chroot(2) where pivot_root(2) cannot be.
pub const NO_PIVOT: u16 = 32;
/// The root is attached nowhere, and entered by chroot(2).
pub const APART: u16 = 64;
/// A copy made now is attached: in the kernel's table, which is in the order of creation of mounts,
/// it comes after the existing ones.
pub const COPY: u16 = 128;
/// Credentials and confinement do not wait for the engine.
pub const EARLY: u16 = 256;

/// Words of 64 bits in a mask of all CPUs: as many as the kernel is built for at most, 8192.
pub const AFFINITY_WORDS: usize = 128;

/// LIMIT: how often the propagation of one mount is set.
pub const SPREADS_MAX: usize = 8;
/// Bits of one setting in the upper half of an operation's `a`, the first one lowest:
/// [`SPREAD_SET`], [`SPREAD_RECURSIVE`], and a `Spread` by its number.
pub const SPREAD_BITS: u32 = 4;
/// There is such a setting.
pub const SPREAD_SET: u64 = 8;
/// Also applies to all mounts below.
pub const SPREAD_RECURSIVE: u64 = 4;

/// From this number on, an errno reported by a newborn is 4096 plus the exit status of a program
/// that it ran: errnos are smaller (MAX_ERRNO).
pub const PROGRAM_ENDED: i32 = 4096;
/// The reported status of a program that was killed because its time was over.
pub const TIMED_OUT: i32 = 512;

/// Filesystems that a newborn makes of its own namespaces.
pub const FILESYSTEMS: [&CStr; 3] = [c"mqueue", c"devpts", c"cgroup2"];

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// A [`Code`].
    pub code: u16,
    /// `CREATE`, `LENIENT`, ...
    pub flags: u16,
    /// Index of a descriptor, or a small number.
    pub fd: u32,
    /// First argument.
    pub a: u64,
    /// Second argument.
    pub b: u64,
    /// Offset of the text.
    pub text: u32,
    /// Its length without the NUL.
    pub text_len: u32,
}

impl Record {
    /// The 32 bytes.
    pub fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut out = [0; RECORD_BYTES];
        out[0..2].copy_from_slice(&self.code.to_ne_bytes());
        out[2..4].copy_from_slice(&self.flags.to_ne_bytes());
        out[4..8].copy_from_slice(&self.fd.to_ne_bytes());
        out[8..16].copy_from_slice(&self.a.to_ne_bytes());
        out[16..24].copy_from_slice(&self.b.to_ne_bytes());
        out[24..28].copy_from_slice(&self.text.to_ne_bytes());
        out[28..32].copy_from_slice(&self.text_len.to_ne_bytes());
        out
    }
}

/// The plan is not one, or reaches beyond its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damaged;

/// A plan in memory, read with every bound checked and without allocation.
pub struct Flat<'m> {
    bytes: &'m mut [u8],
    operations: usize,
    count: usize,
    descriptors: usize,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Damaged> {
    let end = at.checked_add(N).ok_or(Damaged)?;
    bytes.get(at..end).and_then(|b| b.try_into().ok()).ok_or(Damaged)
}

impl<'m> Flat<'m> {
    /// Checks the header of the plan in `bytes`.
    pub fn new(bytes: &'m mut [u8]) -> Result<Self, Damaged> {
        let magic: [u8; 8] = number(bytes, 0)?;
        let version = u32::from_ne_bytes(number(bytes, 8)?);
        let length = u32::from_ne_bytes(number(bytes, 12)?) as usize;
        let operations = u32::from_ne_bytes(number(bytes, 16)?) as usize;
        let count = u32::from_ne_bytes(number(bytes, 20)?) as usize;
        let descriptors = u32::from_ne_bytes(number(bytes, 24)?) as usize;
        let end = count.checked_mul(RECORD_BYTES).and_then(|n| n.checked_add(operations));
        let fits = length <= bytes.len() && end.is_some_and(|end| end <= length);
        if magic != MAGIC || version != VERSION || !fits || descriptors > FDS_MAX {
            return Err(Damaged);
        }
        Ok(Self { bytes, operations, count, descriptors })
    }

    /// Number of operations.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of descriptors of the plan.
    pub fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// Whether another part follows.
    pub fn has_rest(&self) -> bool {
        let last = self.count.checked_sub(1).map(|last| self.record(last));
        last.is_some_and(|last| last.is_ok_and(|last| last.code == Code::Rest as u16))
    }

    /// Operation `index`.
    pub fn record(&self, index: usize) -> Result<Record, Damaged> {
        if index >= self.count {
            return Err(Damaged);
        }
        let at = self.operations + index * RECORD_BYTES;
        let b = &*self.bytes;
        Ok(Record {
            code: u16::from_ne_bytes(number(b, at)?),
            flags: u16::from_ne_bytes(number(b, at + 2)?),
            fd: u32::from_ne_bytes(number(b, at + 4)?),
            a: u64::from_ne_bytes(number(b, at + 8)?),
            b: u64::from_ne_bytes(number(b, at + 16)?),
            text: u32::from_ne_bytes(number(b, at + 24)?),
            text_len: u32::from_ne_bytes(number(b, at + 28)?),
        })
    }

    /// The text of an operation.
    pub fn text(&self, record: &Record) -> Result<&CStr, Damaged> {
        let end = (record.text as usize).checked_add(record.text_len as usize).ok_or(Damaged)?;
        let bytes = self.bytes.get(record.text as usize..=end).ok_or(Damaged)?;
        CStr::from_bytes_with_nul(bytes).map_err(|_| Damaged)
    }

    /// Returns the binary data of an operation without text.
    pub fn data(&self, record: &Record) -> Result<&[u8], Damaged> {
        let end = (record.text as usize).checked_add(record.text_len as usize).ok_or(Damaged)?;
        self.bytes.get(record.text as usize..end).ok_or(Damaged)
    }

    /// The text at an offset.
    pub fn text_at(&self, offset: u64) -> Result<&CStr, Damaged> {
        let rest = self.bytes.get(offset as usize..).ok_or(Damaged)?;
        CStr::from_bytes_until_nul(rest).map_err(|_| Damaged)
    }

    /// Turns the table at `offset` into pointers by adding the address of the plan to each entry;
    /// returns the place of the table. The entries must be texts of the plan.
    pub fn relocate(&mut self, offset: u64) -> Result<usize, Damaged> {
        let base = self.bytes.as_ptr() as u64;
        let start = offset as usize;
        if !start.is_multiple_of(8) || start < HEADER_BYTES {
            return Err(Damaged);
        }
        let mut at = start;
        loop {
            let entry = u64::from_ne_bytes(number(self.bytes, at)?);
            if entry == 0 {
                return Ok(start);
            }
            self.text_at(entry)?;
            let pointer = base.checked_add(entry).ok_or(Damaged)?;
            self.bytes[at..at + 8].copy_from_slice(&pointer.to_ne_bytes());
            at += 8;
        }
    }

    /// Address of the mapped plan.
    pub fn base(&self) -> *const u8 {
        self.bytes.as_ptr()
    }
}

/// Writes a plan.
pub(crate) struct Writer {
    pub(crate) records: Vec<Record>,
    strings: Vec<u8>,
}

/// Strings begin at offset 0 until the number of operations is known: offsets are relative before.
impl Writer {
    pub(crate) fn new() -> Self {
        Self { records: Vec::new(), strings: Vec::new() }
    }

    /// Stores bytes and a NUL; returns their offset in the string area.
    pub(crate) fn text(&mut self, bytes: &[u8]) -> (u32, u32) {
        let at = self.strings.len() as u32;
        self.strings.extend_from_slice(bytes);
        self.strings.push(0);
        (at, bytes.len() as u32)
    }

    /// Stores bytes at a multiple of 8.
    pub(crate) fn aligned(&mut self, bytes: &[u8]) -> (u32, u32) {
        self.strings.resize(self.strings.len().next_multiple_of(8), 0);
        self.text(bytes)
    }

    /// Stores texts and a table of their offsets; returns the table's.
    pub(crate) fn table(&mut self, texts: &[Vec<u8>]) -> Table {
        let offsets: Vec<u32> = texts.iter().map(|t| self.text(t).0).collect();
        let size = (offsets.len() + 1) * 8;
        let (at, _) = self.aligned(&vec![0; size]);
        Table { at, offsets }
    }

    pub(crate) fn len(&self) -> usize {
        HEADER_BYTES + self.records.len() * RECORD_BYTES + self.strings.len()
    }

    /// The plan.
    pub(crate) fn finish(mut self, tables: &[Table], descriptors: usize) -> Vec<u8> {
        let area = HEADER_BYTES + self.records.len() * RECORD_BYTES;
        for table in tables {
            for (i, offset) in table.offsets.iter().enumerate() {
                let at = table.at as usize + i * 8;
                let value = (area as u64 + u64::from(*offset)).to_ne_bytes();
                self.strings[at..at + 8].copy_from_slice(&value);
            }
        }
        let length = area + self.strings.len();
        let mut out = Vec::with_capacity(length);
        out.extend_from_slice(&MAGIC);
        for field in [VERSION, length as u32, HEADER_BYTES as u32, self.records.len() as u32] {
            out.extend_from_slice(&field.to_ne_bytes());
        }
        out.extend_from_slice(&(descriptors as u32).to_ne_bytes());
        out.resize(HEADER_BYTES, 0);
        for mut record in self.records {
            record.text += area as u32;
            let code = Code::from_number(record.code);
            let (a, b) = code.map_or((false, false), Code::offsets);
            record.a += if a { area as u64 } else { 0 };
            record.b += if b { area as u64 } else { 0 };
            out.extend_from_slice(&record.to_bytes());
        }
        out.extend_from_slice(&self.strings);
        out
    }
}

/// A table of texts in a plan that is being written.
pub(crate) struct Table {
    pub(crate) at: u32,
    offsets: Vec<u32>,
}
