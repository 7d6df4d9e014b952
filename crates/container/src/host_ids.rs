//! Blocks of host ids: two instances of one host never take the same slot.
//!
//! A *block* is 64 neighbouring slots. A table of the host names the instance that has each block, and an instance
//! takes slots in its own blocks only. `LIB/ids/blocks` repeats its part of the table, so that most starts read one
//! entry of it and take no lock of the host. A block without taken slots is given back, but for one.
//!
//! ```text
//! REGISTRY = /var/lib/dormouse-ids    0700, root's
//! REGISTRY/lock                 held for one change of the table or of a record
//! REGISTRY/blocks               32 bytes per block: id of its instance (0: free), a checksum
//! REGISTRY/instances/ID.json    path and place of an instance
//! LIB/ids/instance              the id of this instance, 128 random bits
//! LIB/ids/blocks                the blocks of this instance; valid for one place and one boot
//! ```
//!
//! The *place* of an instance is the directory LIB/ids itself: file system, inode and generation (its file handle).
//! A moved directory keeps its place, a copy has another one. Paths in records are printed. No path of another
//! instance is opened but for a spectator, which looks at its place first ([`libs`]).
//!
//! # Locks
//!
//! The caller holds LIB/ids/lock, but not for [`HostIds::sweep`]. REGISTRY/lock is taken below it. While it is held,
//! only small files of REGISTRY are read and written: no file of an instance, and no sync but the one that makes the
//! table. A return of blocks, and with it the removal of a container, does not wait for the lock.
//!
//! # Killed at any step
//!
//! ORDER: a claim makes LIB/ids/instance, then the record, then the entries, then LIB/ids/blocks; only then the
//! slot. The record is on the disk before it has its name, and all of them before a slot is used.
//!
//! | killed after | state |
//! |---|---|
//! | LIB/ids/instance | an id without blocks; the next claim uses it |
//! | the record | a record without blocks, likewise; if the directory is removed, a sweep removes it |
//! | the entries | the next claim finds them by their id, and they are in LIB/ids/blocks then |
//!
//! ORDER: a block that is given back leaves LIB/ids/blocks first, then the table. Between them it is as after a
//! killed claim. A sweep clears the entries of a gone instance before it removes the record. An entry without a
//! record therefore belongs to no instance, unless an operator removed the record, and a sweep frees it.
//!
//! LIB/ids/blocks is not synced, so it is valid in one boot only. It can also come back with a backup, or outlive a
//! registry that was removed. Each slot is therefore taken after a look at the entry of its block ([`HostIds::has`]).

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dormouse_kernel::Errno;
use dormouse_kernel::handle::{handle_of, open_handle};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, FILE_MODE, Lock};
use crate::error::{Error, Result};

/// The registry of a host.
pub(crate) const REGISTRY: &str = "/var/lib/dormouse-ids";

/// Slots of a block: as many as a word of the bitmap of slots has bits.
pub(crate) const BLOCK_SLOTS: u32 = 64;

/// LIMIT: blocks of a host, and with that instances with containers.
pub(crate) const BLOCKS: u32 = dormouse_model::IdSlot::COUNT / BLOCK_SLOTS;

/// Removed instances are searched for when more blocks are claimed.
const MANY: u32 = BLOCKS / 4 * 3;

const ENTRY_BYTES: usize = 32;
const TABLE_BYTES: usize = BLOCKS as usize * ENTRY_BYTES;

/// LIMIT: how often a claim begins again because another process changed its record.
const ATTEMPTS: usize = 16;

/// Instances that a refusal names.
const NAMED: usize = 3;

/// A set of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Blocks([u64; BLOCKS as usize / 64]);

impl Blocks {
    pub(crate) fn contains(&self, block: u32) -> bool {
        self.0[block as usize / 64] & (1 << (block % 64)) != 0
    }

    pub(crate) fn insert(&mut self, block: u32) {
        self.0[block as usize / 64] |= 1 << (block % 64);
    }

    pub(crate) fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        (0..BLOCKS).filter(|block| self.contains(*block))
    }

    /// The blocks of this set that the other does not have.
    pub(crate) fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }
}

impl FromIterator<u32> for Blocks {
    fn from_iter<T: IntoIterator<Item = u32>>(blocks: T) -> Self {
        let mut all = Self::default();
        blocks.into_iter().for_each(|block| all.insert(block));
        all
    }
}

/// What a claim needs beyond the blocks that the instance has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    Nothing,
    /// A free block that suits.
    Block {
        block: u32,
        /// The block is one of those that are given out first.
        is_preferred: bool,
    },
    /// A block, but no free one suits.
    NoneSuits,
}

/// The result of a claim.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, and not kept")]
pub(crate) enum Claim {
    /// The blocks of this instance, also in LIB/ids/blocks.
    Has(Blocks),
    /// Blocks are scarce: the caller releases its lock, calls [`HostIds::sweep`] and tries again.
    Scarce,
}

/// What became of a need under the lock.
enum Outcome {
    Met,
    Scarce,
    NoneLeft,
}

/// The id of an instance: random and not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct InstanceId(u128);

impl InstanceId {
    fn new() -> Result<Self> {
        let mut bytes = [0; 16];
        // No call for up to 256 bytes is interrupted or short (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(
            |e| Error::Call {
                step: "cannot get random bytes for an id",
                source: dormouse_kernel::CallError::new("getrandom", "16".into(), e.raw_os_error()),
            },
        )?;
        Ok(Self(u128::from_le_bytes(bytes).max(1)))
    }

    /// The entry of a block that this instance has.
    fn entry(self, block: u32) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[..16].copy_from_slice(&self.0.to_le_bytes());
        entry[16..24].copy_from_slice(&self.checksum(block).to_le_bytes());
        entry
    }

    /// FNV-1a over block and id: it finds damage, and keeps out no attack.
    fn checksum(self, block: u32) -> u64 {
        let step = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let bytes = block.to_le_bytes().into_iter().chain(self.0.to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, step)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl From<InstanceId> for String {
    fn from(id: InstanceId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for InstanceId {
    type Error = &'static str;

    fn try_from(text: String) -> std::result::Result<Self, &'static str> {
        let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        let id = (text.len() == 32 && text.bytes().all(is_hex))
            .then(|| u128::from_str_radix(&text, 16).ok())
            .flatten();
        id.filter(|id| *id != 0).map(Self).ok_or("no id of 32 hexadecimal digits")
    }
}

/// A type of file system whose handles are used.
struct Kind {
    /// The name in mountinfo.
    name: &'static str,
    /// f_type of statfs(2).
    magic: i64,
    /// Whether a file system is there after a boot, with the same f_fsid.
    is_lasting: bool,
}

const TMPFS: i64 = 0x0102_1994;

/// The file systems of this host itself, in which a removed directory is recognised. A network file system, or one in
/// user space, can answer late or never, so none of these is touched.
const KINDS: [Kind; 5] = [
    Kind { name: "ext4", magic: 0xef53, is_lasting: true },
    Kind { name: "ext3", magic: 0xef53, is_lasting: true },
    Kind { name: "ext2", magic: 0xef53, is_lasting: true },
    Kind { name: "btrfs", magic: 0x9123_683e, is_lasting: true },
    Kind { name: "tmpfs", magic: TMPFS, is_lasting: false },
];

/// Other file systems that a path to a mount point may cross. The f_fsid of xfs and f2fs is the number of the device:
/// another file system may have it later in the same boot.
const CROSSED: [&str; 10] =
    ["devtmpfs", "erofs", "f2fs", "overlay", "proc", "ramfs", "rootfs", "squashfs", "sysfs", "xfs"];

fn kind(magic: i64) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.magic == magic)
}

/// A directory, whatever its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    /// f_type and f_fsid of statfs(2).
    file_system: i64,
    file_system_id: u64,
    inode: u64,
    /// The file handle in hexadecimal digits; none where the file system has no handles.
    handle: Option<String>,
}

impl Place {
    /// Returns the place of a directory, and its present path.
    fn of(dir: &Path) -> Result<(Self, PathBuf)> {
        let failed = |e: Errno| Error::file("cannot look at", dir)(e.into());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = rustix::fs::open(dir, flags, Mode::empty()).map_err(failed)?;
        let handle = match handle_of(open.as_fd()) {
            Ok(handle) => Some(handle.iter().map(|byte| format!("{byte:02x}")).collect()),
            // None at all (EOPNOTSUPP), longer ones than any file system has (EOVERFLOW), not permitted.
            Err(_) => None,
        };
        let link = format!("/proc/self/fd/{}", open.as_raw_fd());
        let place = Self {
            file_system: rustix::fs::fstatfs(&open).map_err(failed)?.f_type,
            file_system_id: rustix::fs::fstatvfs(&open).map_err(failed)?.f_fsid,
            inode: rustix::fs::fstat(&open).map_err(failed)?.st_ino,
            handle,
        };
        Ok((place, fs::read_link(link).unwrap_or_else(|_| dir.to_owned())))
    }

    /// Returns whether the removal of the directory can be recognised while this host runs.
    fn is_traceable(&self) -> bool {
        self.handle.is_some() && self.file_system_id != 0 && kind(self.file_system).is_some()
    }

    /// Returns whether this is the directory that was seen as `old`. Where a handle is missing, the inode may be
    /// another one at each mount (overlayfs), and the path counts.
    fn is(&self, old: &Self, same_path: bool, same_boot: bool) -> bool {
        let may_renumber = !same_boot && !kind(old.file_system).is_some_and(|kind| kind.is_lasting);
        let is_same = match (&self.handle, &old.handle) {
            (Some(handle), Some(old_handle)) => handle == old_handle && self.inode == old.inode,
            _ => same_path,
        };
        is_same
            && self.file_system == old.file_system
            && (self.file_system_id == old.file_system_id || may_renumber)
    }

    fn handle(&self) -> Option<Vec<u8>> {
        let digits = self.handle.as_ref()?.as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        digits.chunks(2).map(byte).collect()
    }
}

/// The record of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// LIB as text, for messages and for spectators.
    path: String,
    /// The boot in which the instance was seen last.
    boot: String,
    place: Place,
}

/// LIB/ids/blocks.
#[derive(Debug, Serialize, Deserialize)]
struct Cached {
    place: Place,
    boot: String,
    blocks: Blocks,
}

/// The blocks of one instance, and the registry of its host.
#[derive(Debug)]
pub(crate) struct HostIds {
    /// LIB/ids
    dir: PathBuf,
    registry: PathBuf,
}

impl HostIds {
    pub(crate) fn new(dir: &Path, registry: &Path) -> Self {
        Self { dir: dir.to_owned(), registry: registry.to_owned() }
    }

    fn cache(&self) -> PathBuf {
        self.dir.join("blocks")
    }

    fn instance(&self) -> PathBuf {
        self.dir.join("instance")
    }

    fn records(&self) -> PathBuf {
        self.registry.join("instances")
    }

    fn record(&self, id: InstanceId) -> PathBuf {
        self.records().join(format!("{id}.json"))
    }

    fn lock(&self) -> Result<Lock> {
        Lock::take_new(&self.registry.join("lock"))
    }

    /// Returns the blocks of this instance by its own file, without a look at the registry; `None` if only the
    /// registry has them. The file may be stale ([`HostIds::has`]).
    pub(crate) fn own(&self) -> Option<Blocks> {
        let cached = disk::read_json::<Cached>(&self.cache()).ok()??;
        // A copy of a root has a copy of this file.
        let is_valid = cached.boot == boot().ok()? && cached.place == Place::of(&self.dir).ok()?.0;
        is_valid.then_some(cached.blocks)
    }

    /// Returns whether the registry has a block as one of this instance, which it also knows. One entry is read,
    /// without the lock: only this instance, or a sweep after its end, changes it.
    pub(crate) fn has(&self, block: u32) -> bool {
        let look = || -> std::io::Result<bool> {
            let Ok(Some(id)) = self.read_id() else { return Ok(false) };
            let mut entry = [0; ENTRY_BYTES];
            let at = u64::from(block) * ENTRY_BYTES as u64;
            File::open(self.table())?.read_exact_at(&mut entry, at)?;
            Ok(entry == id.entry(block) && self.record(id).exists())
        };
        look().unwrap_or(false)
    }

    /// Claims the blocks that have taken slots, where they are free, and one more if `need` returns one. `need` gets
    /// the blocks of this instance and the free ones. With `swept`, scarce blocks are claimed and absent ones refused.
    pub(crate) fn claim(
        &self,
        taken: &Blocks,
        swept: bool,
        need: impl Fn(&Blocks, &Blocks) -> Need,
    ) -> Result<Claim> {
        self.make_registry()?;
        let (place, path) = Place::of(&self.dir)?;
        for _ in 0..ATTEMPTS {
            let record = Record { path: lib_of(&path), boot: boot()?, place: place.clone() };
            let (id, seen) = self.identify(&record)?;
            let new = match &seen {
                Some(seen) if *seen == record => None,
                _ => Some(self.write_new(id, &record)?),
            };
            let changed = self.change(id, &seen, new.as_deref(), taken, swept, &need);
            if let Some(new) = &new {
                disk::remove(new)?; // it has its name, or is of no use
            }
            let Some((file, table, outcome)) = changed? else { continue };
            // Also changes that a killed claim has not synced.
            sync(&self.records())?;
            file.sync_data().map_err(Error::file("cannot write", self.table()))?;
            let blocks = table.of(id);
            self.write_cache(&place, &blocks)?;
            return match outcome {
                Outcome::Met => Ok(Claim::Has(blocks)),
                Outcome::Scarce => Ok(Claim::Scarce),
                Outcome::NoneLeft => Err(self.none_left(&table)),
            };
        }
        Err(self.damaged(&self.records(), "it changes all the time", "try again"))
    }

    /// The part of a claim under the lock. `None` if the record is no longer as it was seen.
    fn change(
        &self,
        id: InstanceId,
        seen: &Option<Record>,
        new: Option<&Path>,
        taken: &Blocks,
        swept: bool,
        need: impl Fn(&Blocks, &Blocks) -> Need,
    ) -> Result<Option<(File, Table, Outcome)>> {
        let _lock = self.lock()?;
        // A sweep removes new records that it finds.
        if self.read_record(id)? != *seen || new.is_some_and(|new| !new.exists()) {
            return Ok(None);
        }
        let (file, mut table) = self.open_table()?;
        if let Some(new) = new {
            step()?;
            let to = self.record(id);
            fs::rename(new, &to).map_err(Error::file("cannot write", to))?;
        }
        let mut claimed: Vec<u32> =
            taken.iter().filter(|block| table.owner(*block).is_none()).collect();
        claimed.iter().for_each(|block| table.set(*block, Some(id)));
        let outcome = match need(&table.of(id), &table.free()) {
            Need::Nothing => Outcome::Met,
            Need::Block { block, is_preferred }
                if swept || is_preferred && table.claimed() < MANY =>
            {
                table.set(block, Some(id));
                claimed.push(block);
                Outcome::Met
            }
            Need::NoneSuits if swept => Outcome::NoneLeft,
            _ => Outcome::Scarce,
        };
        self.write(&file, &table, claimed.into_iter())?;
        Ok(Some((file, table, outcome)))
    }

    /// After a boot: claims the blocks with taken slots, and gives back the others. No error of the registry stops a
    /// command here, nor does its lock: the next claim does the same.
    pub(crate) fn recover(&self, taken: &Blocks) {
        let is_none = *taken == Blocks::default() && !self.instance().exists();
        let is_free = || match Lock::try_take_new(&self.registry.join("lock")) {
            Ok(lock) => lock.is_some(),
            Err(_) => !self.registry.exists(),
        };
        if is_none || !is_free() {
            return;
        }
        if let Ok(Claim::Has(own)) = self.claim(taken, false, |_, _| Need::Nothing) {
            self.give_back(&own, taken);
        }
    }

    /// Gives back the blocks without taken slots, but for one. A failure leaves them to this instance.
    ///
    /// Where a sweep could not find out that this directory is removed, an instance without taken slots gives back
    /// all.
    pub(crate) fn give_back(&self, own: &Blocks, taken: &Blocks) {
        let _ = self.try_give_back(own, taken, false);
    }

    /// Gives back all blocks, with the record, if none has a taken slot. A failure leaves them to this instance.
    pub(crate) fn leave(&self, taken: &Blocks) {
        if let Some(own) = self.own() {
            let _ = self.try_give_back(&own, taken, true);
        }
    }

    fn try_give_back(&self, own: &Blocks, taken: &Blocks, leaves: bool) -> Result<()> {
        let idle = own.without(taken);
        let (place, _) = Place::of(&self.dir)?;
        // Not by `own`: a killed claim may have claimed more.
        let leaves = *taken == Blocks::default() && (leaves || !place.is_traceable());
        let back: Blocks = idle.iter().skip(if leaves { 0 } else { 1 }).collect();
        if back == Blocks::default() {
            return Ok(());
        }
        let Some(id) = self.read_id()? else { return Ok(()) };
        let Some(_lock) = Lock::try_take_new(&self.registry.join("lock"))? else { return Ok(()) };
        step()?;
        if leaves {
            disk::remove(&self.cache())?;
        } else {
            self.write_cache(&place, &own.without(&back))?;
        }
        let (file, mut table) = self.open_table()?;
        let is_back =
            |block: &u32| table.owner(*block) == Some(id) && (leaves || back.contains(*block));
        let back: Vec<u32> = (0..BLOCKS).filter(is_back).collect();
        back.iter().for_each(|block| table.set(*block, None));
        self.write(&file, &table, back.into_iter())?;
        if leaves {
            step()?;
            disk::remove(&self.record(id))?;
        }
        Ok(())
    }

    /// Frees the blocks of instances whose directory is removed. The caller holds no lock.
    ///
    /// A directory is removed if its file system is mounted here and reports that no file has its handle (ESTALE). A
    /// tmpfs of an earlier boot is gone. All other instances keep their blocks: those on a file system that is not
    /// mounted here, or that has no handles, and those on network file systems.
    pub(crate) fn sweep(&self) -> Result<()> {
        let mut recorded = HashMap::new();
        let mut left = Vec::new();
        let entries =
            fs::read_dir(self.records()).map_err(Error::file("cannot list", self.records()))?;
        for entry in entries {
            let path = entry.map_err(Error::file("cannot list", self.records()))?.path();
            let id = path.file_stem().and_then(|stem| stem.to_str()?.to_owned().try_into().ok());
            match (id, path.extension().is_some_and(|end| end == "json")) {
                // A damaged record keeps its blocks. The refusal of its instance, or of the last block, names it.
                (Some(id), true) => {
                    drop(recorded.insert(id, disk::read_json::<Record>(&path).ok().flatten()))
                }
                _ if path.extension().is_some_and(|end| end == "new") => left.push(path),
                _ => {}
            }
        }
        let mounts = Mounts::here()?;
        let boot = boot()?;
        let mut gone: HashMap<InstanceId, Option<Record>> = HashMap::new();
        for (id, record) in &recorded {
            if record.as_ref().is_some_and(|record| mounts.lack(record, &boot)) {
                gone.insert(*id, record.clone());
            }
        }
        let table = {
            let _lock = self.lock()?;
            self.open_table()?.1
        };
        for id in table.0.iter().flatten() {
            if !recorded.contains_key(id) {
                gone.insert(*id, None);
            }
        }
        for (id, record) in gone {
            let _lock = self.lock()?;
            // The claim of an instance that was moved, or was registered meanwhile, has changed it.
            if self.read_record(id).is_ok_and(|now| now == record) {
                let (file, mut table) = self.open_table()?;
                let own = table.of(id);
                own.iter().for_each(|block| table.set(block, None));
                self.write(&file, &table, own.iter())?;
                step()?;
                disk::remove(&self.record(id))?;
            }
        }
        // New records of killed claims. A claim whose new record is removed here begins again.
        let _lock = self.lock()?;
        left.iter().try_for_each(|path| disk::remove(path))
    }

    /// Makes the directories of the registry, and refuses those that other users could change.
    fn make_registry(&self) -> Result<()> {
        if let Some(parent) = self.registry.parent() {
            fs::create_dir_all(parent).map_err(Error::file("cannot make directory", parent))?;
        }
        for dir in [&self.registry, &self.records()] {
            match fs::DirBuilder::new().mode(0o700).create(dir) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(Error::file("cannot make directory", dir)(e));
                }
                _ => {}
            }
            let meta = fs::symlink_metadata(dir).map_err(Error::file("cannot look at", dir))?;
            let own = rustix::process::geteuid().as_raw();
            if !meta.is_dir() || meta.uid() != own || meta.mode() & 0o022 != 0 {
                return Err(Error::Invalid(format!(
                    "'{}' keeps the host ids of instances apart, and has to be a directory of root's that no \
                     other user may write: correct it (chown, chmod), or remove it if it is a link",
                    dir.display()
                )));
            }
        }
        Ok(())
    }

    /// Returns the id of this instance with its record. `now` is what the record will be. A copy of another instance
    /// gets an id of its own.
    fn identify(&self, now: &Record) -> Result<(InstanceId, Option<Record>)> {
        if let Some(id) = self.read_id()? {
            let Some(seen) = self.read_record(id)? else { return Ok((id, None)) };
            let (same_path, same_boot) = (seen.path == now.path, seen.boot == now.boot);
            let is_same = now.place.is(&seen.place, same_path, same_boot);
            if is_same || Mounts::here()?.lack(&seen, &now.boot) {
                return Ok((id, Some(seen)));
            }
        }
        let id = InstanceId::new()?;
        step()?;
        disk::write(&self.instance(), format!("{id}\n").as_bytes(), Durable::Yes)?;
        Ok((id, None))
    }

    fn read_id(&self) -> Result<Option<InstanceId>> {
        let path = self.instance();
        match fs::read_to_string(&path) {
            Ok(text) => text.trim_end().to_owned().try_into().map(Some).map_err(|what| {
                let remedy = format!(
                    "write the name of its file in '{}' without '.json' into it: the one with this path",
                    self.records().display()
                );
                self.damaged(&path, what, &remedy)
            }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::file("cannot read", path)(e)),
        }
    }

    fn read_record(&self, id: InstanceId) -> Result<Option<Record>> {
        let path = self.record(id);
        disk::read_json(&path).map_err(|e| match e {
            Error::Corrupt { what, .. } => self.damaged(
                &path,
                &what,
                &format!("remove it if '{}' is no copy of another instance", self.dir.display()),
            ),
            other => other,
        })
    }

    /// Writes a record to the disk, under a name that only the caller knows.
    fn write_new(&self, id: InstanceId, record: &Record) -> Result<PathBuf> {
        let path = self.records().join(format!("{id}.{}.new", InstanceId::new()?));
        let text = serde_json::to_vec(record).map_err(|e| Error::Invalid(e.to_string()))?;
        let write = || {
            let mut file =
                File::options().write(true).create_new(true).mode(FILE_MODE).open(&path)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        step()?;
        write().map_err(Error::file("cannot write", &path))?;
        Ok(path)
    }

    fn write_cache(&self, place: &Place, blocks: &Blocks) -> Result<()> {
        step()?;
        let cached = Cached { place: place.clone(), boot: boot()?, blocks: blocks.clone() };
        disk::write_json(&self.cache(), &cached, Durable::No)
    }

    fn table(&self) -> PathBuf {
        self.registry.join("blocks")
    }

    /// Opens and reads the table. The caller holds the lock.
    fn open_table(&self) -> Result<(File, Table)> {
        let path = self.table();
        let open = || File::options().read(true).write(true).open(&path);
        let file = match open() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let is_record = |entry: std::io::Result<fs::DirEntry>| {
                    entry.is_ok_and(|entry| {
                        entry.path().extension().is_some_and(|end| end == "json")
                    })
                };
                let records = self.records();
                let mut entries =
                    fs::read_dir(&records).map_err(Error::file("cannot list", &records))?;
                if entries.any(is_record) {
                    return Err(self.table_damaged("it is missing"));
                }
                // The one sync under the lock, at the first claim of a host.
                disk::write(&path, &[0; TABLE_BYTES], Durable::Yes)?;
                open()
            }
            other => other,
        };
        let file = file.map_err(Error::file("cannot open", &path))?;
        let length = file.metadata().map_err(Error::file("cannot look at", &path))?.len();
        if length != TABLE_BYTES as u64 {
            return Err(self.table_damaged(&format!("{length} bytes instead of {TABLE_BYTES}")));
        }
        let mut bytes = vec![0; TABLE_BYTES];
        file.read_exact_at(&mut bytes, 0).map_err(Error::file("cannot read", &path))?;
        let mut table = Table(Vec::with_capacity(BLOCKS as usize));
        for (block, entry) in (0..).zip(bytes.chunks_exact(ENTRY_BYTES)) {
            let mut id = [0; 16];
            id.copy_from_slice(&entry[..16]);
            let id = InstanceId(u128::from_le_bytes(id));
            table.0.push(match entry.iter().all(|byte| *byte == 0) {
                true => None,
                false if id.0 != 0 && id.entry(block) == entry => Some(id),
                false => return Err(self.table_damaged(&format!("the entry of block {block}"))),
            });
        }
        Ok((file, table))
    }

    /// Writes the entries of some blocks.
    fn write(&self, file: &File, table: &Table, blocks: impl Iterator<Item = u32>) -> Result<()> {
        for block in blocks {
            step()?;
            let entry = table.owner(block).map_or([0; ENTRY_BYTES], |id| id.entry(block));
            file.write_all_at(&entry, u64::from(block) * ENTRY_BYTES as u64)
                .map_err(Error::file("cannot write", self.table()))?;
        }
        Ok(())
    }

    /// The refusal of a block, with the instances that have most.
    fn none_left(&self, table: &Table) -> Error {
        let mut counts: HashMap<InstanceId, u32> = HashMap::new();
        table.0.iter().flatten().for_each(|id| *counts.entry(*id).or_default() += 1);
        let mut counts: Vec<(u32, String)> = counts
            .into_iter()
            .map(|(id, blocks)| match disk::read_json::<Record>(&self.record(id)) {
                Ok(Some(record)) => (blocks, format!("{blocks} by '{}'", record.path)),
                _ => (
                    blocks,
                    format!("{blocks} by '{}', which is damaged", self.record(id).display()),
                ),
            })
            .collect();
        counts.sort_by(|a, b| b.cmp(a));
        let named: Vec<String> = counts.into_iter().take(NAMED).map(|(_, text)| text).collect();
        Error::NoIds(format!(
            "{} of {BLOCKS} blocks of {BLOCK_SLOTS} are in use, {}: remove containers there, and for an instance \
             that no longer exists its file in '{}'",
            table.claimed(),
            named.join(", "),
            self.records().display()
        ))
    }

    fn table_damaged(&self, what: &str) -> Error {
        let remedy = format!(
            "restore it from a backup, or remove '{}' and reboot; each instance then claims the ids of its \
             containers at its first command",
            self.registry.display()
        );
        self.damaged(&self.table(), what, &remedy)
    }

    fn damaged(&self, path: &Path, what: &str, remedy: &str) -> Error {
        Error::HostIds { path: path.to_owned(), what: what.to_owned(), remedy: remedy.to_owned() }
    }
}

/// The instance of each block.
struct Table(Vec<Option<InstanceId>>);

impl Table {
    fn owner(&self, block: u32) -> Option<InstanceId> {
        self.0[block as usize]
    }

    fn set(&mut self, block: u32, owner: Option<InstanceId>) {
        self.0[block as usize] = owner;
    }

    fn of(&self, id: InstanceId) -> Blocks {
        (0..BLOCKS).filter(|block| self.owner(*block) == Some(id)).collect()
    }

    fn free(&self) -> Blocks {
        (0..BLOCKS).filter(|block| self.owner(*block).is_none()).collect()
    }

    fn claimed(&self) -> u32 {
        BLOCKS - self.free().len()
    }
}

/// File systems that are mounted here, of the kinds in [`KINDS`].
struct Mounts(Vec<Mounted>);

struct Mounted {
    file_system: i64,
    file_system_id: u64,
    /// The directory at the mount point.
    dir: OwnedFd,
}

impl Mounts {
    /// Opens the mount points. Their paths come from the kernel, and no link on them is followed. Mounts below a
    /// mount of another kind are left out, because that one may not answer.
    fn here() -> Result<Self> {
        let path = "/proc/thread-self/mountinfo";
        let text = fs::read(path).map_err(Error::file("cannot read", path))?;
        let rows: Vec<Row> = text.split(|byte| *byte == b'\n').filter_map(Row::parse).collect();
        let parents: HashMap<&[u8], &Row> = rows.iter().map(|row| (row.id, row)).collect();
        let mut all = Self(Vec::new());
        let mut seen = HashSet::new();
        for row in &rows {
            let Some(kind) = KINDS.iter().find(|kind| kind.name.as_bytes() == row.kind) else {
                continue;
            };
            if row.is_reachable(&parents)
                && !seen.contains(&(row.device, row.root))
                && let Some(mounted) = Mounted::open(&row.point, kind)
            {
                seen.insert((row.device, row.root));
                all.0.push(mounted);
            }
        }
        Ok(all)
    }

    /// Returns whether the directory of an instance is removed.
    fn lack(&self, record: &Record, boot: &str) -> bool {
        let place = &record.place;
        let Some(kind) = kind(place.file_system) else { return false };
        if record.boot != boot && !kind.is_lasting {
            return kind.magic == TMPFS;
        }
        let (true, Some(handle)) = (place.is_traceable(), place.handle()) else { return false };
        let is_there = |m: &&Mounted| {
            m.file_system == place.file_system && m.file_system_id == place.file_system_id
        };
        let mut mounted = self.0.iter().filter(is_there).peekable();
        let is_stale = |m: &Mounted| {
            open_handle(m.dir.as_fd(), &handle, OFlags::PATH).err() == Some(Errno::STALE)
        };
        mounted.peek().is_some() && mounted.all(is_stale)
    }
}

impl Mounted {
    /// `None` if another file system is there meanwhile, or its handles cannot be used.
    fn open(point: &Path, kind: &Kind) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let at = rustix::fs::openat2(CWD, point, flags, Mode::empty(), resolve).ok()?;
        let file_system = rustix::fs::fstatfs(&at).ok()?.f_type;
        if file_system != kind.magic {
            return None;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&at, c".", flags, Mode::empty()).ok()?;
        let handle = handle_of(dir.as_fd()).ok()?;
        open_handle(dir.as_fd(), &handle, OFlags::PATH).ok()?;
        let file_system_id = rustix::fs::fstatvfs(&dir).ok()?.f_fsid;
        Some(Self { file_system, file_system_id, dir })
    }
}

/// A line of /proc/PID/mountinfo (proc_pid_mountinfo(5)).
struct Row<'a> {
    id: &'a [u8],
    parent: &'a [u8],
    device: &'a [u8],
    root: &'a [u8],
    point: PathBuf,
    kind: &'a [u8],
}

impl<'a> Row<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let (id, parent, device, root) =
            (words.next()?, words.next()?, words.next()?, words.next()?);
        let point = PathBuf::from(OsString::from_vec(unescape(words.next()?)));
        words.by_ref().find(|word| *word == b"-")?;
        Some(Self { id, parent, device, root, point, kind: words.next()? })
    }

    /// Returns whether the mount point can be reached through file systems of this host alone.
    fn is_reachable(&self, all: &HashMap<&[u8], &Self>) -> bool {
        let is_local = |row: &Self| {
            KINDS.iter().any(|kind| kind.name.as_bytes() == row.kind)
                || CROSSED.iter().any(|name| name.as_bytes() == row.kind)
        };
        let mut row = self;
        for _ in 0..=all.len() {
            match all.get(row.parent) {
                _ if !is_local(row) => return false,
                // The root of the tree is its own parent, or has one outside of the tree.
                Some(parent) if parent.id != row.id => row = parent,
                _ => return true,
            }
        }
        false
    }
}

/// Space, tab, newline and backslash are octal numbers there.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        let digits = text.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match escaped.filter(|_| *byte == b'\\') {
            Some(escaped) => {
                plain.push(escaped);
                at += 4;
            }
            None => {
                plain.push(*byte);
                at += 1;
            }
        }
    }
    plain
}

/// The directories LIB of all instances in a registry that are in their places. Records that other programs write
/// meanwhile, or damaged ones, are left out.
pub(crate) fn libs(registry: &Path) -> Result<Vec<PathBuf>> {
    let records = registry.join("instances");
    let entries = match fs::read_dir(&records) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::file("cannot list", &records))?,
    };
    let lib = |entry: fs::DirEntry| {
        let path = entry.path();
        path.extension().filter(|end| *end == "json")?;
        let record = disk::read_json::<Record>(&path).ok()??;
        let lib = PathBuf::from(record.path);
        // Another directory may have come to this path.
        (Place::of(&lib.join("ids")).ok()?.0 == record.place).then_some(lib)
    };
    Ok(entries.flatten().filter_map(lib).collect())
}

/// LIB as text, of the path of LIB/ids.
fn lib_of(dir: &Path) -> String {
    let lib = dir.parent().unwrap_or(dir);
    String::from_utf8_lossy(lib.as_os_str().as_bytes()).into_owned()
}

fn boot() -> Result<String> {
    let boot = dormouse_kernel::proc::boot_id().map_err(Error::call("cannot read boot id"))?;
    Ok(boot.to_owned())
}

fn sync(dir: &Path) -> Result<()> {
    let sync = || File::open(dir)?.sync_all();
    sync().map_err(Error::file("cannot write", dir))
}

/// Stands before each change. A unit test ends an operation at any of them, as SIGKILL would.
#[cfg(not(test))]
fn step() -> Result<()> {
    Ok(())
}

#[cfg(test)]
use tests::step;

#[cfg(test)]
pub(crate) mod tests;
