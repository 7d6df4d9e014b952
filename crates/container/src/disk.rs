//! Small files that are read and written as a whole.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, RawDir, flock};
use rustix::io::Errno;
use rustix::path::Arg;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// LIMIT: no record of ours is larger; a larger file is damaged.
const RECORD_BYTES_MAX: u64 = 4 << 20;

/// Mode of records and locks, for root alone. A configuration holds the secrets of an environment. Any
/// user that can open a lock file can hold its lock (flock(2)).
pub(crate) const FILE_MODE: u32 = 0o600;

/// Stack of the thread of a [`Waiting`].
const WAITING_STACK_BYTES: usize = 64 << 10;

/// How sure a write must be before it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durable {
    /// On the disk, with its name, before the call returns: about 1 ms.
    Yes,
    /// Seen by every process at once, and lost with a power cut.
    No,
}

/// Replaces `path` in one step: a reader sees the old text or the new, never a part.
pub(crate) fn write(path: &Path, bytes: &[u8], durable: Durable) -> Result<()> {
    let new = path.with_extension("new");
    let step = || -> std::io::Result<()> {
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(FILE_MODE);
        let mut file = options.open(&new)?;
        file.write_all(bytes)?;
        if durable == Durable::Yes {
            file.sync_all()?;
        }
        fs::rename(&new, path)?;
        if durable == Durable::Yes
            && let Some(parent) = path.parent()
        {
            File::open(parent)?.sync_all()?;
        }
        Ok(())
    };
    step().map_err(|e| {
        let _ = fs::remove_file(&new); // the first error is returned
        Error::file("cannot write", path)(e)
    })
}

/// Removes a file; a missing one is no error.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove", path)(e))
        }
        _ => Ok(()),
    }
}

/// LIMIT: how often the keeper may write into a directory while it is removed.
const REMOVALS_MAX: usize = 100;

/// Removes a file or a tree; a missing one is no error.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    use std::io::ErrorKind;
    let remove = || match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    let mut removed = match remove_small(rustix::fs::CWD, path, SMALL_DEPTH) {
        Ok(()) => Ok(()),
        Err(_) => remove(), // a file, a deep tree, or one that changes
    };
    for _ in 0..REMOVALS_MAX {
        // The keeper writes the exit of a process whose start was abandoned.
        if removed.as_ref().err().map(std::io::Error::kind) != Some(ErrorKind::DirectoryNotEmpty) {
            break;
        }
        removed = remove();
    }
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::file("cannot remove", path)(e)),
        _ => Ok(()),
    }
}

/// Levels of a tree below which [`remove_small`] does not go.
const SMALL_DEPTH: usize = 8;

/// Removes a directory tree of few levels with few calls: one for an empty directory, where `remove_dir_all` has nine.
/// Links are not followed; a missing tree is no error.
fn remove_small(
    parent: BorrowedFd<'_>,
    name: impl Arg + Copy,
    depth: usize,
) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) if depth > 0 => {}
        Err(Errno::NOENT) => return Ok(()),
        other => return other,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(&dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        match entry.file_type() {
            _ if matches!(name.to_bytes(), b"." | b"..") => {}
            FileType::Directory => remove_small(dir.as_fd(), name, depth - 1)?,
            // A directory of unknown type is EISDIR.
            _ => rustix::fs::unlinkat(&dir, name, AtFlags::empty())?,
        }
    }
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// Writes a record as JSON, see [`write`].
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T, durable: Durable) -> Result<()> {
    write(path, &to_json(value, path)?, durable)
}

/// The text of a record.
pub(crate) fn to_json<T: Serialize>(value: &T, path: &Path) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::Corrupt { path: path.into(), what: e.to_string() })
}

/// The field of a record that holds the checksum of all its other fields.
const CHECKSUM: &str = "checksum";

/// A record as fields in one order, whatever the writer's version has in it.
type Fields = BTreeMap<String, serde_json::Value>;

/// The fields of a record, with their checksum.
pub(crate) fn with_checksum<T: Serialize>(record: &T) -> Result<Fields> {
    let invalid = |e: serde_json::Error| Error::Invalid(e.to_string());
    let value = serde_json::to_value(record).map_err(invalid)?;
    let mut fields: Fields = serde_json::from_value(value).map_err(invalid)?;
    let sum = checksum(&fields)?;
    fields.insert(CHECKSUM.to_owned(), sum.into());
    Ok(fields)
}

/// Reads a record that [`with_checksum`] made, or one of an older version without a checksum; `None` where
/// there is no such file. Fields that this version does not know count as well.
pub(crate) fn read_with_checksum<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    read_with_checksum_within(path, RECORD_BYTES_MAX)
}

/// The same for a record that may be larger than others.
pub(crate) fn read_with_checksum_within<T: DeserializeOwned>(
    path: &Path,
    bytes_max: u64,
) -> Result<Option<T>> {
    let Some(mut fields) = read_json_within::<Fields>(path, bytes_max)? else { return Ok(None) };
    let corrupt = |what: String| Error::Corrupt { path: path.into(), what };
    if let Some(written) = fields.remove(CHECKSUM)
        && written.as_u64() != Some(checksum(&fields)?)
    {
        return Err(corrupt("its checksum is another".into()));
    }
    let value = serde_json::to_value(&fields).map_err(|e| corrupt(e.to_string()))?;
    serde_json::from_value(value).map(Some).map_err(|e| corrupt(e.to_string()))
}

/// A checksum of fields as they are written.
fn checksum(fields: &Fields) -> Result<u64> {
    Ok(sum(&serde_json::to_vec(fields).map_err(|e| Error::Invalid(e.to_string()))?))
}

/// FNV-1a: it finds damage, and keeps out no attack.
fn sum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The first line of a text with a checksum, in front of the number.
const TEXT_CHECKSUM: &str = "# checksum ";

/// Writes a text with its checksum in a line of its own above it, see [`write`].
pub(crate) fn write_text(path: &Path, text: &str, durable: Durable) -> Result<()> {
    let sum = sum(text.as_bytes());
    write(path, format!("{TEXT_CHECKSUM}{sum}\n{text}").as_bytes(), durable)
}

/// Reads a text that [`write_text`] wrote; `None` where there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>> {
    let file = match File::open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(Error::file("cannot read", path))?,
    };
    let mut bytes = Vec::new();
    let read = file.take(RECORD_BYTES_MAX).read_to_end(&mut bytes);
    read.map_err(Error::file("cannot read", path))?;
    let corrupt = |what: &str| Error::Corrupt { path: path.into(), what: what.into() };
    let whole = String::from_utf8(bytes).map_err(|_| corrupt("it is not text"))?;
    let found = whole.strip_prefix(TEXT_CHECKSUM).and_then(|rest| rest.split_once('\n'));
    let (written, text) = found.ok_or_else(|| corrupt("it has no checksum"))?;
    if written.parse() != Ok(sum(text.as_bytes())) {
        return Err(corrupt("its checksum is another"));
    }
    Ok(Some(text.to_owned()))
}

/// Reads a record; `None` where there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    read_json_within(path, RECORD_BYTES_MAX)
}

fn read_json_within<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<Option<T>> {
    read_within(path, bytes_max)?.map(|text| parse_json(&text, path)).transpose()
}

/// Reads a record from its text.
pub(crate) fn parse_json<T: DeserializeOwned>(text: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|e| Error::Corrupt { path: path.into(), what: e.to_string() })
}

/// Reads the text of a record; `None` where there is no such file.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    read_within(path, RECORD_BYTES_MAX)
}

fn read_within(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::file("cannot read", path)(e)),
    };
    // Nearly all are small and never written in place: a short read is the end of the file.
    let mut some = [0; 4096];
    let read = file.read(&mut some).map_err(Error::file("cannot read", path))?;
    let mut text = some.get(..read).unwrap_or(&some).to_vec();
    if read == some.len() {
        let more = (&mut file).take(bytes_max).read_to_end(&mut text);
        more.map_err(Error::file("cannot read", path))?;
    }
    if text.len() as u64 > bytes_max {
        return Err(Error::Corrupt { path: path.into(), what: "it is too large".into() });
    }
    Ok(Some(text))
}

/// Makes a directory and its parents; an existing one is no error.
pub(crate) fn make_dir(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(Error::file("cannot make directory", path))
}

/// Closes a top directory of this instance to other users, with its directories and files. The
/// directories of `records` are closed two levels further. An earlier version created all of them
/// open, by the umask of its caller.
///
/// ORDER: the top first, because no path leads through it afterwards. The levels below are closed
/// against processes that already have a directory open.
pub(crate) fn close(dir: &Path, records: &[&str]) -> Result<()> {
    let step = |e: Errno| Error::file("cannot close to other users", dir)(e.into());
    // The top may be a symbolic link, created by root, to a larger file system.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::open(dir, flags, Mode::empty()).map_err(step)?;
    rustix::fs::fchmod(&top, Mode::RWXU).map_err(step)?;
    for name in names(&top).map_err(step)? {
        let deeper = if records.iter().any(|r| r.as_bytes() == name.to_bytes()) { 2 } else { 0 };
        close_entry(&top, &name, Some(deeper)).map_err(step)?;
    }
    Ok(())
}

/// Closes a file, or a directory and its entries down to `deeper` levels. With `None`, only files are
/// closed, because the directories at that level are roots of containers. Links are not followed.
/// A file of another user belongs to a container and keeps its mode.
fn close_entry(dir: &OwnedFd, name: &CStr, deeper: Option<u32>) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let entry = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(entry) => entry,
        // The entry was removed meanwhile, or is a link or a socket.
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
        Err(e) => return Err(e),
    };
    let stat = rustix::fs::fstat(&entry)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    match (FileType::from_raw_mode(stat.st_mode), deeper) {
        (FileType::RegularFile, _) => rustix::fs::fchmod(&entry, Mode::RUSR | Mode::WUSR),
        (FileType::Directory, Some(deeper)) => {
            rustix::fs::fchmod(&entry, Mode::RWXU)?;
            if deeper == 0 {
                return Ok(());
            }
            let deeper = (deeper > 1).then(|| deeper - 1);
            names(&entry)?.iter().try_for_each(|name| close_entry(&entry, name, deeper))
        }
        _ => Ok(()),
    }
}

fn names(dir: &OwnedFd) -> rustix::io::Result<Vec<CString>> {
    let entries = Dir::read_from(dir)?.filter(|entry| {
        entry.as_ref().is_ok_and(|e| !matches!(e.file_name().to_bytes(), b"." | b".."))
    });
    entries.map(|entry| entry.map(|e| e.file_name().to_owned())).collect()
}

/// An exclusive lock (flock(2)) on a file or directory, released when dropped or when its process
/// exits, for any reason.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    /// Another process may have the open file for a moment longer than this one.
    is_received: bool,
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.is_received {
            let _ = flock(&self.file, FlockOperation::Unlock); // closed below in any case
        }
    }
}

impl Lock {
    /// Waits for the lock on an existing file.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("cannot open", path))?;
        Self::take_file(file, path)
    }

    /// Waits for the lock on a file, created if missing.
    pub(crate) fn take_new(path: &Path) -> Result<Self> {
        let file = lock_file(path);
        Self::take_file(file.map_err(Error::file("cannot open", path))?, path)
    }

    /// A lock that another process has taken, and given away with its descriptor: it belongs to the open file.
    pub(crate) fn received(file: OwnedFd) -> Self {
        Self { file: file.into(), is_received: true }
    }

    /// Waits for a share of the lock on a file, created if missing.
    pub(crate) fn take_shared(path: &Path) -> Result<Self> {
        let file = lock_file(path);
        let file = file.map_err(Error::file("cannot open", path))?;
        Self::wait(file, path, FlockOperation::LockShared)
    }

    /// Waits for a share of the lock on an existing file.
    pub(crate) fn share(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("cannot open", path))?;
        Self::wait(file, path, FlockOperation::LockShared)
    }

    /// Writes into the locked file. (If it were opened again and truncated, ext4 would allocate its
    /// blocks at close: 0.1 ms.)
    pub(crate) fn write(&self, bytes: &[u8], path: &Path) -> Result<()> {
        (&self.file).write_all(bytes).map_err(Error::file("cannot write", path))
    }

    /// The locked file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    fn take_file(file: File, path: &Path) -> Result<Self> {
        Self::wait(file, path, FlockOperation::LockExclusive)
    }

    fn wait(file: File, path: &Path, how: FlockOperation) -> Result<Self> {
        loop {
            match flock(&file, how) {
                Ok(()) => return Ok(Self { file, is_received: false }),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::file("cannot lock", path)(e.into())),
            }
        }
    }

    /// Takes the lock if it is free; `None` also if the file does not exist.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::file("cannot open", path)(e)),
        };
        Self::try_take_file(file, path)
    }

    /// Takes the lock on a file, created if missing, if it is free.
    pub(crate) fn try_take_new(path: &Path) -> Result<Option<Self>> {
        let file = lock_file(path);
        Self::try_take_file(file.map_err(Error::file("cannot open", path))?, path)
    }

    fn try_take_file(file: File, path: &Path) -> Result<Option<Self>> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { file, is_received: false })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(Error::file("cannot lock", path)(e.into())),
        }
    }
}

/// A wait for the lock on a file, in the kernel's queue of waiting processes.
///
/// flock(2) has no timeout. A thread therefore waits, and releases a lock that arrives after the end of this.
#[derive(Debug)]
pub(crate) struct Waiting(mpsc::Receiver<Result<Lock>>);

impl Waiting {
    /// Begins to wait for the lock on an existing file.
    pub(crate) fn begin(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("cannot open", path))?;
        let (sender, taken) = mpsc::channel();
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => drop(sender.send(Ok(Lock { file, is_received: false }))),
            Err(Errno::WOULDBLOCK) => {
                let shown = path.to_owned();
                let wait = move || drop(sender.send(Lock::take_file(file, &shown)));
                let thread = std::thread::Builder::new().stack_size(WAITING_STACK_BYTES);
                thread.spawn(wait).map_err(Error::file("cannot wait for the lock on", path))?;
            }
            Err(e) => return Err(Error::file("cannot lock", path)(e.into())),
        }
        Ok(Self(taken))
    }

    /// Waits for the lock; `None` if it does not arrive within a time.
    pub(crate) fn take(&self, limit: Duration) -> Result<Option<Lock>> {
        self.0.recv_timeout(limit).ok().transpose()
    }
}

/// Opens a file to be locked, and creates a missing one.
fn lock_file(path: &Path) -> std::io::Result<File> {
    File::options().create(true).truncate(false).write(true).mode(FILE_MODE).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_replaced_whole_and_damage_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        assert_eq!(read_json::<Vec<u32>>(&path).unwrap(), None);
        write_json(&path, &vec![1, 2], Durable::Yes).unwrap();
        write_json(&path, &vec![3], Durable::No).unwrap();
        assert_eq!(read_json::<Vec<u32>>(&path).unwrap(), Some(vec![3]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::write(&path, b"[3").unwrap();
        let e = read_json::<Vec<u32>>(&path).unwrap_err();
        assert!(matches!(e, Error::Corrupt { .. }), "{e}");
    }

    #[test]
    fn text_has_a_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.toml");
        assert_eq!(read_text(&path).unwrap(), None);
        for text in ["", "a = 1", "\n# checksum 3\n\u{e4}\n"] {
            write_text(&path, text, Durable::Yes).unwrap();
            assert_eq!(read_text(&path).unwrap().as_deref(), Some(text));
        }
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            fs::write(&path, &bytes).unwrap();
            assert!(matches!(read_text(&path), Err(Error::Corrupt { .. })), "{bytes:?}");
            fs::write(&path, &whole[..at]).unwrap();
            assert!(matches!(read_text(&path), Err(Error::Corrupt { .. })), "{at}");
        }
    }

    #[test]
    fn trees_of_any_depth_are_removed_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), b"kept").unwrap();
        let tree = dir.path().join("tree");
        for depth in [0, 1, 3, SMALL_DEPTH - 1, SMALL_DEPTH, SMALL_DEPTH + 1, 3 * SMALL_DEPTH] {
            let mut at = tree.clone();
            fs::create_dir(&at).unwrap();
            for level in 0..depth {
                std::os::unix::fs::symlink(&kept, at.join("link")).unwrap();
                (0..100).for_each(|n| fs::write(at.join(format!("{n}")), b"").unwrap());
                fs::create_dir(at.join("empty")).unwrap();
                at = at.join(format!("a{level}"));
                fs::create_dir(&at).unwrap();
            }
            remove_tree(&tree).unwrap();
            assert!(!tree.exists(), "{depth}");
        }
        remove_tree(&tree).unwrap();
        // A file, and a link to a directory.
        fs::write(&tree, b"").unwrap();
        remove_tree(&tree).unwrap();
        std::os::unix::fs::symlink(&kept, &tree).unwrap();
        remove_tree(&tree).unwrap();
        assert!(fs::symlink_metadata(&tree).is_err());
        assert_eq!(fs::read(kept.join("file")).unwrap(), b"kept");
    }

    #[test]
    fn lock_has_one_holder() {
        let dir = tempfile::tempdir().unwrap();
        let held = Lock::take(dir.path()).unwrap();
        assert!(Lock::try_take(dir.path()).unwrap().is_none());
        drop(held);
        assert!(Lock::try_take(dir.path()).unwrap().is_some());
    }
}
