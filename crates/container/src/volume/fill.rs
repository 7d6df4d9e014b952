//! The copy of an image's directory into a new volume.
//!
//! The image is hostile. The directory is opened with RESOLVE_IN_ROOT and without magic links. Everything
//! below is opened relative to its parent, by one component and without following links, and is examined by
//! the descriptor. The destination is a directory that only this process writes.
//!
//! Copied are directories, files with their holes and hard links, symbolic links as texts, fifos, owners,
//! modes, times, and extended attributes of users. Sockets have no meaning without their process, and device
//! nodes do not work on a volume: both are left out. An owner outside the container's ids becomes its
//! `nobody`, and loses set-user-id bits.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dormouse_kernel::resolve;
use dormouse_model::IdMap;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// LIMIT: directories inside one another; each holds two descriptors open.
const DEPTH_MAX: usize = 256;
/// LIMIT: bytes of the names, and of one value, of extended attributes (xattr(7)).
const XATTR_BYTES: usize = 64 << 10;

/// Copies the directory `target` of a root into `to`, an empty directory. Without such a directory `to`
/// stays as it is.
pub(super) fn fill(root: BorrowedFd<'_>, target: &str, to: &Path, ids: IdMap) -> Result<()> {
    let inside = target.trim_start_matches('/');
    let from =
        match resolve::in_root(root, inside, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()) {
            Ok(from) => from,
            // Not there, something else, or a link that leads nowhere: the start makes the mount point.
            Err(_) => return Ok(()),
        };
    let failed = |e: Errno| Error::file("cannot copy into the volume", target)(e.into());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let into = rustix::fs::open(to, flags, Mode::empty()).map_err(failed)?;
    let mut copy = Copy { ids, links: HashMap::new(), top: to.to_owned(), device: None };
    let stat = rustix::fs::fstat(&from).map_err(failed)?;
    copy.device = Some(stat.st_dev);
    copy.directory(&from, &stat, &into, Path::new(""), 0)
}

/// A copy in progress.
struct Copy {
    ids: IdMap,
    /// Files with several names, by device and inode, with their first path.
    links: HashMap<(u64, u64), PathBuf>,
    /// The directory that is filled.
    top: PathBuf,
    /// The file system; others are not entered.
    device: Option<u64>,
}

impl Copy {
    /// Copies everything in a directory, and then its own attributes.
    fn directory(
        &mut self,
        from: &OwnedFd,
        stat: &Stat,
        to: &OwnedFd,
        path: &Path,
        depth: usize,
    ) -> Result<()> {
        let failed = |e: Errno| self.failed(path)(e);
        if depth > DEPTH_MAX {
            let text = format!("more than {DEPTH_MAX} directories inside one another");
            return Err(Error::Invalid(format!("cannot copy '{}': {text}", path.display())));
        }
        // An own descriptor for the listing, which has a position.
        for entry in Dir::read_from(from).map_err(failed)? {
            let entry = entry.map_err(|e| self.failed(path)(e))?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let below = path.join(OsStr::from_bytes(name.to_bytes()));
            self.entry(from, to, name, &below, depth).map_err(|e| match e {
                Failed::Here(e) => self.failed(&below)(e),
                Failed::Below(e) => e,
            })?;
        }
        self.attributes(from.as_fd(), to.as_fd(), stat).map_err(|e| self.failed(path)(e))
    }

    fn entry(
        &mut self,
        from: &OwnedFd,
        to: &OwnedFd,
        name: &CStr,
        path: &Path,
        depth: usize,
    ) -> std::result::Result<(), Failed> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = rustix::fs::openat(from, name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&found)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let key = (stat.st_dev, stat.st_ino);
        if kind != FileType::Directory && stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&key) {
                let first = self.top.join(first);
                rustix::fs::linkat(CWD, &first, to, name, AtFlags::empty())?;
                return Ok(());
            }
            self.links.insert(key, path.to_owned());
        }
        match kind {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::mkdirat(to, name, Mode::RWXU)?;
                let into = rustix::fs::openat(to, name, flags, Mode::empty())?;
                if Some(stat.st_dev) != self.device {
                    return Ok(()); // a mount
                }
                let from = rustix::fs::openat(from, name, flags, Mode::empty())?;
                let stat = rustix::fs::fstat(&from)?;
                self.directory(&from, &stat, &into, path, depth + 1).map_err(Failed::Below)
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let from = rustix::fs::openat(from, name, flags, Mode::empty())?;
                let stat = rustix::fs::fstat(&from)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(Errno::AGAIN.into()); // replaced meanwhile
                }
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let into = rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?;
                let (mut from, mut into) = (File::from(from), File::from(into));
                contents(&mut from, &mut into, stat.st_size as u64)?;
                Ok(self.attributes(from.as_fd(), into.as_fd(), &stat)?)
            }
            FileType::Symlink => {
                let text = rustix::fs::readlinkat(&found, c"", Vec::new())?;
                rustix::fs::symlinkat(&text, to, name)?;
                let (uid, gid, _) = self.owner(&stat);
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                Ok(rustix::fs::chownat(to, name, Some(uid), Some(gid), flags)?)
            }
            FileType::Fifo => {
                rustix::fs::mknodat(to, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
                let (uid, gid, mode) = self.owner(&stat);
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(to, name, Some(uid), Some(gid), flags)?;
                Ok(rustix::fs::chmodat(to, name, mode, AtFlags::empty())?)
            }
            _ => Ok(()),
        }
    }

    /// The owner and the mode of a copy.
    fn owner(&self, stat: &Stat) -> (Uid, Gid, Mode) {
        let nobody = self.ids.to_host(IdMap::NOBODY).unwrap_or(self.ids.base);
        let is_own = |id: u32| self.ids.to_inside(id).is_some();
        let own = |id: u32| if is_own(id) { id } else { nobody };
        let mut mode = stat.st_mode & 0o7777;
        if !is_own(stat.st_uid) || !is_own(stat.st_gid) {
            mode &= 0o1777;
        }
        (
            Uid::from_raw(own(stat.st_uid)),
            Gid::from_raw(own(stat.st_gid)),
            Mode::from_raw_mode(mode),
        )
    }

    fn attributes(
        &self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        stat: &Stat,
    ) -> std::result::Result<(), Errno> {
        xattrs(from, to)?;
        let (uid, gid, mode) = self.owner(stat);
        rustix::fs::fchown(to, Some(uid), Some(gid))?;
        // ORDER: after the owner, whose change removes set-user-id bits.
        rustix::fs::fchmod(to, mode)?;
        let time =
            |seconds, nanoseconds: u64| Timespec { tv_sec: seconds, tv_nsec: nanoseconds as i64 };
        rustix::fs::futimens(
            to,
            &Timestamps {
                last_access: time(stat.st_atime, stat.st_atime_nsec),
                last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
            },
        )
    }

    fn failed(&self, path: &Path) -> impl FnOnce(Errno) -> Error + use<> {
        let path = Path::new("/").join(path);
        move |e| Error::file("cannot copy into the volume", path)(e.into())
    }
}

/// An entry was not copied, or one below it.
enum Failed {
    Here(Errno),
    Below(Error),
}

impl From<Errno> for Failed {
    fn from(e: Errno) -> Self {
        Self::Here(e)
    }
}

/// Copies the contents of a file; holes stay holes.
fn contents(from: &mut File, to: &mut File, length: u64) -> std::result::Result<(), Errno> {
    let errno = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
    let mut at = 0;
    while at < length {
        let data = match rustix::fs::seek(&*from, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => break, // the rest is a hole
            Err(Errno::INVAL) => at,   // the file system has no holes
            Err(e) => return Err(e),
        };
        let hole = rustix::fs::seek(&*from, rustix::fs::SeekFrom::Hole(data)).unwrap_or(length);
        let end = hole.min(length);
        if end <= data {
            break; // truncated meanwhile
        }
        from.seek(SeekFrom::Start(data)).map_err(errno)?;
        to.seek(SeekFrom::Start(data)).map_err(errno)?;
        let copied = std::io::copy(&mut from.take(end - data), to).map_err(errno)?;
        if copied == 0 {
            break;
        }
        at = data + copied;
    }
    to.flush().and_then(|()| to.set_len(length)).map_err(errno)
}

/// Copies the extended attributes of users. Those of the kernel and of security modules have other
/// meanings on another file system, or would be rights.
fn xattrs(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    let mut names = vec![0; XATTR_BYTES];
    let length = match rustix::fs::flistxattr(from, &mut names) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(()),
        Err(e) => return Err(e),
    };
    let mut value = Vec::new();
    for name in names[..length].split(|byte| *byte == 0) {
        // `user.overlay.` belongs to an overlay that an unprivileged user mounts.
        if !name.starts_with(b"user.") || name.starts_with(b"user.overlay.") {
            continue;
        }
        value.resize(XATTR_BYTES, 0);
        let length = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        match rustix::fs::fsetxattr(to, name, &value[..length], XattrFlags::empty()) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn root_copy_keeps_files_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let (root, to, outside) =
            (dir.path().join("r"), dir.path().join("to"), dir.path().join("o"));
        fs::create_dir_all(root.join("srv/data/sub")).unwrap();
        fs::create_dir_all(root.join("dev")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret"), "host").unwrap();
        let data = root.join("srv/data");
        fs::write(data.join("file"), "text").unwrap();
        fs::hard_link(data.join("file"), data.join("sub/same")).unwrap();
        symlink(&outside, data.join("away")).unwrap();
        symlink("../../../../../../etc/passwd", data.join("up")).unwrap();
        symlink("/srv/data", root.join("link")).unwrap();
        symlink(&outside, root.join("out")).unwrap();
        let sparse = File::create(data.join("sparse")).unwrap();
        sparse.set_len(64 << 20).unwrap();
        let ids = IdMap { base: 1 << 20, wide: false };
        std::os::unix::fs::chown(data.join("file"), Some(ids.base + 100), Some(0)).unwrap();
        fs::set_permissions(data.join("file"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::set_permissions(data.join("sub"), fs::Permissions::from_mode(0o2710)).unwrap();
        std::os::unix::fs::chown(&data, Some(ids.base + 7), Some(ids.base + 8)).unwrap();
        fs::set_permissions(&data, fs::Permissions::from_mode(0o750)).unwrap();
        let open = File::open(&root).unwrap();
        // The target leads through a link inside the root.
        fill(open.as_fd(), "/link", &to, ids).unwrap();
        let meta = |name: &str| fs::symlink_metadata(to.join(name)).unwrap();
        assert_eq!((meta("").uid(), meta("").gid()), (ids.base + 7, ids.base + 8));
        assert_eq!(meta("").mode() & 0o7777, 0o750);
        assert_eq!(fs::read_to_string(to.join("file")).unwrap(), "text");
        assert_eq!(meta("file").ino(), meta("sub/same").ino());
        // The group is the host's root, which the container does not have.
        let nobody = ids.to_host(IdMap::NOBODY).unwrap();
        assert_eq!((meta("file").uid(), meta("file").gid()), (ids.base + 100, nobody));
        assert_eq!(meta("file").mode() & 0o7777, 0o755);
        assert!(meta("away").is_symlink() && meta("up").is_symlink());
        assert_eq!(fs::read_link(to.join("away")).unwrap(), outside);
        assert_eq!((meta("sparse").len(), meta("sparse").blocks()), (64 << 20, 0));
        // A target that leads out of the root is looked up inside, where nothing is.
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        fill(open.as_fd(), "/out", &other, ids).unwrap();
        fill(open.as_fd(), "/none", &other, ids).unwrap();
        fill(open.as_fd(), "/srv/data/file", &other, ids).unwrap();
        assert_eq!(fs::read_dir(&other).unwrap().count(), 0);
    }
}
