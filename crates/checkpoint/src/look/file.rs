//! Files and directories as a process finds them by name, and properties of open ones.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat, StatxAttributes, StatxFlags};
use rustix::io::Errno;

/// The type of procfs (statfs(2), PROC_SUPER_MAGIC).
pub(crate) const PROCFS: rustix::fs::FsWord = 0x9fa0;

/// Opens a path as the process would, with O_PATH.
pub(crate) fn lookup(pid: u32, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root =
        rustix::fs::open(format!("/proc/{pid}/root"), flags | OFlags::DIRECTORY, Mode::empty())?;
    // The last component is the opened file itself: a symbolic link there would be another file.
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(&root, path, flags | OFlags::NOFOLLOW, Mode::empty(), how)
}

/// The time of the last modification, in nanoseconds since the epoch.
pub(crate) fn modified_ns(stat: &Stat) -> i64 {
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64)
}

/// The id of the mount of an open file.
pub(crate) fn mount_of(open: BorrowedFd<'_>) -> Result<u64, Errno> {
    rustix::fs::statx(open, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).map(|s| s.stx_mnt_id)
}

/// Opens a tmpfs directory by its path inside, through symbolic links: the root of a tmpfs, or a part of
/// one that is mounted separately. KERNEL(5.8): statx(2) reports mount roots.
pub(crate) fn tmpfs_at(pid: u32, target: &str) -> Result<OwnedFd, Errno> {
    const MAGIC: i64 = 0x0102_1994; // TMPFS_MAGIC, statfs(2)
    let place = lookup(pid, &format!("{target}/."))?;
    let status = rustix::fs::statx(&place, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    let is_root = status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    if !is_root || rustix::fs::fstatfs(&place)?.f_type != MAGIC {
        return Err(Errno::NOTDIR);
    }
    Ok(place)
}
