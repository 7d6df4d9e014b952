//! Small files that are read and written as a whole.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// LIMIT: no record of ours is larger; a larger file is damaged.
const RECORD_BYTES_MAX: u64 = 4 << 20;

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
        let mut file = File::create(&new)?;
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

/// Writes a record as JSON, see [`write`].
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T, durable: Durable) -> Result<()> {
    let text = serde_json::to_vec(value)
        .map_err(|e| Error::Corrupt { path: path.into(), what: e.to_string() })?;
    write(path, &text, durable)
}

/// A checksum of a record as it is written (FNV-1a): it finds damage, and keeps out no attack.
pub(crate) fn checksum<T: Serialize>(value: &T) -> Result<u64> {
    let text = serde_json::to_vec(value).map_err(|e| Error::Invalid(e.to_string()))?;
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    Ok(text.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Reads a record; `None` where there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::file("cannot read", path)(e)),
    };
    // Nearly all are small and never written in place: a short read is the end of the file.
    let mut some = [0; 4096];
    let read = file.read(&mut some).map_err(Error::file("cannot read", path))?;
    let mut text = Vec::new();
    let text = match some.get(..read) {
        Some(all) if read < some.len() => all,
        _ => {
            text.extend_from_slice(&some);
            let more = (&mut file).take(RECORD_BYTES_MAX).read_to_end(&mut text);
            more.map_err(Error::file("cannot read", path))?;
            &text[..]
        }
    };
    if text.len() as u64 > RECORD_BYTES_MAX {
        return Err(Error::Corrupt { path: path.into(), what: "it is too large".into() });
    }
    serde_json::from_slice(text)
        .map(Some)
        .map_err(|e| Error::Corrupt { path: path.into(), what: e.to_string() })
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

/// An exclusive lock (flock(2)) on a file or directory, released when dropped or when its process
/// exits, for any reason.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Waits for the lock on an existing file.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("cannot open", path))?;
        Self::take_file(file, path)
    }

    /// Waits for the lock on a file, created if missing.
    pub(crate) fn take_new(path: &Path) -> Result<Self> {
        let file = File::options().create(true).truncate(false).write(true).open(path);
        Self::take_file(file.map_err(Error::file("cannot open", path))?, path)
    }

    /// Waits for a share of the lock on a file, created if missing.
    pub(crate) fn take_shared(path: &Path) -> Result<Self> {
        let file = File::options().create(true).truncate(false).write(true).open(path);
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
        (&self.0).write_all(bytes).map_err(Error::file("cannot write", path))
    }

    fn take_file(file: File, path: &Path) -> Result<Self> {
        Self::wait(file, path, FlockOperation::LockExclusive)
    }

    fn wait(file: File, path: &Path, how: FlockOperation) -> Result<Self> {
        loop {
            match flock(&file, how) {
                Ok(()) => return Ok(Self(file)),
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
        let file = File::options().create(true).truncate(false).write(true).open(path);
        Self::try_take_file(file.map_err(Error::file("cannot open", path))?, path)
    }

    fn try_take_file(file: File, path: &Path) -> Result<Option<Self>> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(file))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(Error::file("cannot lock", path)(e.into())),
        }
    }
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
    fn lock_has_one_holder() {
        let dir = tempfile::tempdir().unwrap();
        let held = Lock::take(dir.path()).unwrap();
        assert!(Lock::try_take(dir.path()).unwrap().is_none());
        drop(held);
        assert!(Lock::try_take(dir.path()).unwrap().is_some());
    }
}
