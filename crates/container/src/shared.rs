//! The directories of containers on shared tmpfs file systems: `/dev`, `/dev/shm`, `/run`, and tmpfs
//! mounts without a size.
//!
//! A tmpfs per container would be a superblock more than the four of a container
//! (docs/decisions/0002). One container could fill a single tmpfs of the host, with bytes or with empty
//! files. No other container could then start or write to its `/dev/shm`. A container can evade the
//! quotas of tmpfs, because these are for users, and a container has 32,767.
//!
//! A host therefore has up to [`FILE_SYSTEMS`] of them, each with a bound of its own. The container's
//! slot of host ids selects one. The first [`FILE_SYSTEMS`] containers have one each, and later ones
//! share. A container starts on the next file system if its own is nearly full. Starts fail only when
//! all of them are.
//!
//! ```text
//! RUN/tmpfs/N/ID/       the directories of a container
//! RUN/tmpfs/N/.dormouse shows that N is mounted
//! RUN/c/ID/tmpfs        a link with the text N, made first and removed last
//! RUN/shared/ID/        the directories of a container started by an earlier version
//! ```
//!
//! LIMIT: the files are charged to the memory cgroup of the writing container. Several containers without
//! a memory limit can together take all memory, as with any other memory.
//!
//! Uses `ground`.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use dormouse_kernel::mount;
use dormouse_kernel::mount::MountAttr;
use dormouse_model::{ContainerId, IdMap, IdSlot};
use rustix::fs::{CWD, Mode, OFlags};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;

/// LIMIT: number of shared file systems. A memory cgroup costs 16 bytes for each: 10 MB of 10,000.
const FILE_SYSTEMS: u32 = 64;

/// LIMIT: bytes of each, of the host's memory.
const SIZE: &str = "25%";

/// LIMIT: one file for so many pages of the host's memory. A file without contents takes 1 kB.
const PAGES_OF_A_FILE: u64 = 16;

/// The least number of files, for a small host.
const FILES_MIN: u64 = 16_384;

/// A container starts on a file system with more than this part free: 1/8.
const FREE_PART: u64 = 8;

/// A file whose presence shows that the file system is mounted by this instance.
const MARK: &str = ".dormouse";

/// The link in a container's runtime directory.
const LINK: &str = "tmpfs";

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The path of a starting container's directory, which the caller creates. The container's runtime
/// directory exists.
pub(crate) fn dir(ground: &Ground, id: &ContainerId, ids: IdMap) -> Result<PathBuf> {
    let all = ground.places.tmpfs();
    let has_room = |n: u32| {
        let path = all.join(n.to_string());
        ensure_mounted(&path)?;
        let stat = rustix::fs::statfs(&path)
            .map_err(|e| Error::file("cannot look at", &path)(e.into()))?;
        Ok(stat.f_bavail > stat.f_blocks / FREE_PART && stat.f_ffree > stat.f_files / FREE_PART)
    };
    let n = choose(ids.base / IdSlot::IDS, has_room)?.ok_or_else(|| {
        Error::Invalid(format!(
            "the tmpfs file systems below '{}' are full: stop the container that fills its \
             /dev/shm, or remove files there, and give it a memory limit",
            all.display()
        ))
    })?;
    let link = ground.run_dir(id).join(LINK);
    disk::remove(&link)?;
    // ORDER: the link first, so that the directory of a killed start is found again.
    symlink(n.to_string(), &link).map_err(Error::file("cannot make link", &link))?;
    let dir = all.join(n.to_string()).join(id.as_str());
    disk::remove_tree(&dir)?;
    Ok(dir)
}

/// Removes the directories of a container whose runtime directory still exists.
pub(crate) fn remove(ground: &Ground, id: &ContainerId) -> Result<()> {
    let is_number = |text: &str| text.parse().is_ok_and(|n: u32| n < FILE_SYSTEMS);
    let link = fs::read_link(ground.run_dir(id).join(LINK)).ok();
    if let Some(n) = link.as_deref().and_then(Path::to_str).filter(|text| is_number(text)) {
        disk::remove_tree(&ground.places.tmpfs().join(n).join(id.as_str()))?;
    }
    disk::remove_tree(&ground.places.shared().join(id.as_str()))
}

/// Unmounts all shared file systems. The caller ensures that no container runs or starts.
pub(crate) fn unmount_all(ground: &Ground) -> Result<()> {
    let before = ground.places.shared();
    let all = (0..FILE_SYSTEMS).map(|n| ground.places.tmpfs().join(n.to_string()));
    for path in all.chain([before]).filter(|path| is_mounted(path)) {
        mount::detach(&path).map_err(Error::call("cannot unmount a shared tmpfs"))?;
    }
    Ok(())
}

/// The first file system with room, in turn from the slot's own.
fn choose(slot: u32, mut has_room: impl FnMut(u32) -> Result<bool>) -> Result<Option<u32>> {
    for n in (0..FILE_SYSTEMS).map(|i| (slot + i) % FILE_SYSTEMS) {
        if has_room(n)? {
            return Ok(Some(n));
        }
    }
    Ok(None)
}

/// Whether a shared file system is mounted here. RUN itself may be on a tmpfs.
fn is_mounted(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|s| s.f_type == TMPFS_MAGIC) && path.join(MARK).exists()
}

/// Mounts a shared file system, once per boot.
fn ensure_mounted(path: &Path) -> Result<()> {
    if is_mounted(path) {
        return Ok(());
    }
    disk::make_dir(path, 0o700)?;
    let _lock = Lock::take_new(&path.with_extension("lock"))?;
    if is_mounted(path) {
        return Ok(());
    }
    let make = || {
        let fs = mount::FsContext::open("tmpfs")?;
        fs.set_string("mode", "0700")?;
        fs.set_string("size", SIZE)?;
        fs.set_string("nr_inodes", &files().to_string())?;
        fs.create(MountAttr::NOSUID | MountAttr::NOEXEC)
    };
    let step = "cannot mount a shared tmpfs";
    let tree = make().map_err(Error::call(step))?;
    // ORDER: marked, then attached: what is there without its mark would be mounted over.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    rustix::fs::openat(&tree, MARK, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|e| Error::file("cannot write", path.join(MARK))(e.into()))?;
    mount::attach(tree.as_fd(), CWD, path).map_err(Error::call(step))
}

/// The maximum number of files of a file system.
fn files() -> u64 {
    let info = rustix::system::sysinfo();
    let bytes = info.totalram.saturating_mul(u64::from(info.mem_unit));
    (bytes / 4096 / PAGES_OF_A_FILE).max(FILES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_differs_between_neighbouring_slots_and_skips_full_file_systems() {
        let all = |_| Ok(true);
        assert_eq!(choose(57_344, all).unwrap(), Some(57_344 % FILE_SYSTEMS));
        assert_ne!(choose(57_345, all).unwrap(), choose(57_344, all).unwrap());
        assert_eq!(choose(63, |n| Ok(n >= 2 && n != 63)).unwrap(), Some(2));
        let mut looked_at = 0;
        let none = choose(7, |_| {
            looked_at += 1;
            Ok(false)
        });
        assert_eq!((none.unwrap(), looked_at), (None, FILE_SYSTEMS));
    }
}
