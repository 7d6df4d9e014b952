//! `tmpcopyup`: copies the image's files at a place into the tmpfs that is mounted there.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};

/// LIMIT: depth of a copy, and number of files.
const COPY_DEPTH: usize = 32;
const COPY_FILES: usize = 20_000;
/// LIMIT: bytes of a copy.
const COPY_BYTES: u64 = 256 << 20;

/// Opens the top of a mount as a writable directory: a mount's own descriptor is O_PATH only.
pub(super) fn tree_dir(tree: BorrowedFd<'_>) -> std::result::Result<OwnedFd, rustix::io::Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(tree, ".", flags, Mode::empty())
}

/// The remaining budget of a copy.
pub(super) struct Left {
    files: usize,
    bytes: u64,
}

impl Default for Left {
    fn default() -> Self {
        Self { files: COPY_FILES, bytes: COPY_BYTES }
    }
}

/// Copies the contents of a directory: files, directories and links with owners and permissions.
/// Links are copied, never followed.
pub(super) fn copy_dir(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    depth: usize,
    left: &mut Left,
) -> std::result::Result<(), rustix::io::Errno> {
    use rustix::io::Errno;
    if depth > COPY_DEPTH {
        return Err(Errno::LOOP);
    }
    for entry in rustix::fs::Dir::read_from(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        left.files = left.files.checked_sub(1).ok_or(Errno::DQUOT)?;
        let stat = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
        let own = |to: BorrowedFd<'_>| {
            rustix::fs::chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        };
        let nofollow = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | nofollow;
                rustix::fs::mkdirat(to, name, Mode::from_raw_mode(0o700))?;
                let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
                let copy = rustix::fs::openat(to, name, flags, Mode::empty())?;
                copy_dir(source.as_fd(), copy.as_fd(), depth + 1, left)?;
                own(to)?;
                rustix::fs::fchmod(&copy, mode)?;
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | nofollow;
                let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
                let now = rustix::fs::fstat(&source)?;
                if FileType::from_raw_mode(now.st_mode) != FileType::RegularFile {
                    return Err(Errno::INVAL);
                }
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | nofollow;
                let copy = rustix::fs::openat(to, name, flags, Mode::from_raw_mode(0o600))?;
                let room = left.bytes;
                let copied = copy_bytes(source, copy.as_fd(), room)?;
                left.bytes -= copied;
                rustix::fs::fchown(&copy, Some(uid), Some(gid))?;
                rustix::fs::fchmod(&copy, mode)?;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(target.as_c_str(), to, name)?;
                own(to)?;
            }
            // Sockets, pipes and devices are not copied.
            _ => {}
        }
    }
    Ok(())
}

fn copy_bytes(
    from: OwnedFd,
    to: BorrowedFd<'_>,
    room: u64,
) -> std::result::Result<u64, rustix::io::Errno> {
    let mut from = std::io::Read::take(File::from(from), room + 1);
    let mut to = File::from(to.try_clone_to_owned().map_err(|_| rustix::io::Errno::MFILE)?);
    let copied = std::io::copy(&mut from, &mut to).map_err(|_| rustix::io::Errno::IO)?;
    if copied > room { Err(rustix::io::Errno::FBIG) } else { Ok(copied) }
}
