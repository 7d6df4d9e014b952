//! Copying trees between a container and the host, or as a tar stream.
//!
//! A container may run while its files are copied, and may be hostile. A path in it is therefore
//! resolved with RESOLVE_IN_ROOT, and trees are walked by descriptor one name at a time. No
//! symbolic link is followed on the way, and an opened object is checked again before it is used.
//! Replacing a directory by a link in between leads nowhere (CVE-2019-14271 and similar). A file
//! copied out of a container is never set-user-id, set-group-id or a device on the host.
//!
//! Deliberately not copied: sockets, pipes and devices (with a note on stderr), hard links as
//! links, extended attributes, and the contents of procfs, sysfs and the like. Holes stay holes.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use dormouse_kernel::resolve;
use dormouse_model::IdMap;
use rustix::fs::{
    self, AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid,
};
use rustix::io::Errno;

use crate::fail;

mod sparse;

/// Owner of the copies.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owner {
    /// Host ids of a container: its root, or the same ids inside as outside if `keep` is set.
    Container {
        /// Its ids.
        ids: IdMap,
        /// The source's ids are kept.
        keep: bool,
    },
    /// The host: the calling user, or the ids inside the container if `keep` is set.
    Host {
        /// The container's ids.
        ids: IdMap,
        /// The source's ids are kept.
        keep: bool,
    },
}

impl Owner {
    /// Returns the host ids of a copy, given the host ids of the source; `None` for the calling
    /// user.
    fn of(self, uid: u32, gid: u32) -> Option<(u32, u32)> {
        match self {
            Self::Container { ids, keep } => {
                let root = ids.to_host(0).unwrap_or(ids.base);
                let map = |id| if keep { ids.to_host(id).unwrap_or(root) } else { root };
                Some((map(uid), map(gid)))
            }
            Self::Host { ids, keep: true } => {
                let nobody = IdMap::NOBODY;
                let map = |id| ids.to_inside(id).unwrap_or(nobody);
                Some((map(uid), map(gid)))
            }
            Self::Host { keep: false, .. } => None,
        }
    }

    /// Whether the source is in a container.
    fn reads_container(self) -> bool {
        matches!(self, Self::Host { .. })
    }

    /// Returns the permissions of a copy.
    fn mode(self, mode: u32) -> Mode {
        Mode::from_raw_mode(match self {
            Self::Container { .. } => mode & 0o7777,
            Self::Host { .. } => mode & 0o1777,
        })
    }
}

const DIR: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const DIR_NOFOLLOW: OFlags = DIR.union(OFlags::NOFOLLOW);
const PATH: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// One side of a copy.
#[derive(Debug)]
pub(crate) struct Place {
    /// The root below which its path is resolved.
    pub(crate) root: OwnedFd,
    /// The path as given.
    pub(crate) path: PathBuf,
}

impl Place {
    /// Opens the target of the path, links included, without leaving the root.
    fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd> {
        let opened = resolve::in_root(self.root.as_fd(), path, flags, Mode::empty());
        opened.with_context(|| format!("cannot open '{}'", path.display()))
    }

    fn is_dir(&self, path: &Path) -> Option<bool> {
        let fd = resolve::in_root(self.root.as_fd(), path, PATH, Mode::empty()).ok()?;
        fs::fstat(fd).ok().map(|s| kind(&s) == FileType::Directory)
    }

    /// Returns whether the path has the form of a directory.
    fn says_dir(&self) -> bool {
        let bytes = self.path.as_os_str().as_bytes();
        bytes.ends_with(b"/") || bytes.ends_with(b"/.") || bytes == b"."
    }

    /// Returns whether the path means the contents of a directory: it ends in `/.`.
    fn contents_only(&self) -> bool {
        let bytes = self.path.as_os_str().as_bytes();
        bytes.ends_with(b"/.") || bytes == b"."
    }

    /// Returns the parent directory and the own name of the object, with links at the end followed.
    /// A root has no name.
    fn parent(&self) -> Result<(OwnedFd, CString)> {
        let (dir, name) = split(&self.path)?;
        let dir_fd = self.open(&dir, DIR)?;
        let at = fs::statat(&dir_fd, name.as_c_str(), AtFlags::SYMLINK_NOFOLLOW);
        if at.is_ok_and(|s| kind(&s) == FileType::Symlink) {
            // Follows the link as the root resolves it: each round follows one link.
            let mut path = dir.join(std::ffi::OsStr::from_bytes(name.as_bytes()));
            for _ in 0..40 {
                let (dir, name) = split(&path)?;
                let dir_fd = self.open(&dir, DIR)?;
                match fs::readlinkat(&dir_fd, name.as_c_str(), Vec::new()) {
                    Ok(to) => path = dir.join(std::ffi::OsStr::from_bytes(to.as_bytes())),
                    Err(_) => return Ok((dir_fd, name)),
                }
            }
            bail!("cannot open '{}': too many symbolic links", self.path.display());
        }
        Ok((dir_fd, name))
    }
}

/// Directory and last name of a path.
fn split(path: &Path) -> Result<(PathBuf, CString)> {
    match (path.components().next_back(), path.parent()) {
        (Some(Component::Normal(name)), Some(dir)) => {
            let name = CString::new(name.as_bytes()).context("a path with a zero byte")?;
            Ok((dir.to_owned(), name))
        }
        // Neither `/` nor `..` has a name: both are directories, named by `.` in themselves.
        _ => Ok((path.to_owned(), c".".to_owned())),
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Copies `from` to `to` by the rules of cp(1): into a directory that exists, else under the new
/// name.
pub(crate) fn copy(from: &Place, to: &Place, owner: Owner) -> Result<()> {
    let source_is_dir = from
        .is_dir(&from.path)
        .with_context(|| format!("there is no '{}' to copy", from.path.display()))?;
    if !source_is_dir && from.says_dir() {
        bail!("'{}' is not a directory", from.path.display());
    }
    let (from_dir, from_name) = from.parent()?;
    if owner.reads_container() {
        refuse_kernel(from_dir.as_fd(), &from_name, from)?;
    }
    match to.is_dir(&to.path) {
        Some(true) => {
            let into = to.open(&to.path, DIR)?;
            if source_is_dir && (from.contents_only() || from_name.as_c_str() == c".") {
                let source = open_dir(from_dir.as_fd(), &from_name)?;
                return copy_entries(source, into.as_fd(), owner, &from.path);
            }
            // Under the requested name, not that of a link's target.
            let (_, name) = split(&from.path)?;
            copy_entry(from_dir.as_fd(), &from_name, into.as_fd(), &name, owner, &from.path)
        }
        Some(false) if source_is_dir => bail!("'{}' is not a directory", to.path.display()),
        None if !source_is_dir && to.says_dir() => {
            bail!("there is no directory '{}'", to.path.display())
        }
        _ => {
            let (to_dir, to_name) = to.parent()?;
            copy_entry(from_dir.as_fd(), &from_name, to_dir.as_fd(), &to_name, owner, &from.path)
        }
    }
}

fn open_dir(dir: BorrowedFd, name: &CStr) -> Result<OwnedFd> {
    fs::openat(dir, name, DIR_NOFOLLOW, Mode::empty())
        .with_context(|| format!("cannot open directory {name:?}"))
}

/// Copies one object of any kind.
fn copy_entry(
    from: BorrowedFd,
    name: &CStr,
    to: BorrowedFd,
    to_name: &CStr,
    owner: Owner,
    path: &Path,
) -> Result<()> {
    let step = || format!("cannot copy '{}'", path.display());
    let stat = fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW).with_context(step)?;
    match kind(&stat) {
        FileType::Directory => {
            let source = open_dir(from, name)?;
            if resolve::shows_the_kernel(&source) {
                return note_kernel(path);
            }
            let stat = fs::fstat(&source).with_context(step)?;
            match fs::mkdirat(to, to_name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e).with_context(step),
            }
            let target = open_dir(to, to_name)?;
            copy_entries(source, target.as_fd(), owner, path)?;
            finish(&target, &stat, owner).with_context(step)
        }
        FileType::RegularFile => {
            let Some((source, stat)) = open_file(from, name, owner).with_context(step)? else {
                return note_kernel(path);
            };
            let target = File::from(create(to, to_name).with_context(step)?);
            sparse::copy(&source, stat.st_size as u64, &target).with_context(step)?;
            finish(&target, &stat, owner).with_context(step)
        }
        FileType::Symlink => {
            let link = fs::readlinkat(from, name, Vec::new()).with_context(step)?;
            unlink(to, to_name).with_context(step)?;
            fs::symlinkat(link.as_c_str(), to, to_name).with_context(step)?;
            own(to, to_name, stat.st_uid, stat.st_gid, owner).with_context(step)
        }
        _ => {
            let what = "neither file, directory nor link";
            fail::note(&format!("'{}' is {what} and not copied", path.display()));
            Ok(())
        }
    }
}

fn note_kernel(path: &Path) -> Result<()> {
    fail::note(&format!("'{}' is a view of the kernel and not copied", path.display()));
    Ok(())
}

/// Copies the contents of a directory.
fn copy_entries(source: OwnedFd, target: BorrowedFd, owner: Owner, path: &Path) -> Result<()> {
    for name in names(&source)? {
        let path = path.join(std::ffi::OsStr::from_bytes(name.as_bytes()));
        copy_entry(source.as_fd(), &name, target, &name, owner, &path)?;
    }
    Ok(())
}

/// Returns the sorted names in a directory, read before any of them is used.
fn names(dir: impl AsFd) -> Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir).context("cannot list a directory")? {
        let entry = entry.context("cannot list a directory")?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Makes a new file in place of an existing one, never writing through a link.
fn create(dir: BorrowedFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..16 {
        match fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) => unlink(dir, name)?,
            other => return other,
        }
    }
    Err(Errno::EXIST)
}

/// Removes an existing file; a directory stays and is an error.
fn unlink(dir: BorrowedFd, name: &CStr) -> Result<(), Errno> {
    match fs::unlinkat(dir, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

fn own(dir: BorrowedFd, name: &CStr, uid: u32, gid: u32, owner: Owner) -> Result<(), Errno> {
    let Some((uid, gid)) = owner.of(uid, gid) else { return Ok(()) };
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
}

/// Sets owner, permissions and times. ORDER: chown(2) clears set-user-id, so permissions come
/// second.
fn finish(target: impl AsFd, from: &Stat, owner: Owner) -> Result<(), Errno> {
    if let Some((uid, gid)) = owner.of(from.st_uid, from.st_gid) {
        fs::fchown(&target, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    fs::fchmod(&target, owner.mode(from.st_mode))?;
    let time = |sec, nsec: u64| Timespec { tv_sec: sec, tv_nsec: nsec as _ };
    let times = Timestamps {
        last_access: time(from.st_atime, from.st_atime_nsec),
        last_modification: time(from.st_mtime, from.st_mtime_nsec),
    };
    fs::futimens(&target, &times)
}

/// Refuses a place in a container on a file system that shows the kernel, and with it the host. A link
/// in the container may lead into its /proc, which the host's root reads with more rights than the
/// container has.
fn refuse_kernel(dir: BorrowedFd, name: &CStr, place: &Place) -> Result<()> {
    let found = fs::openat(dir, name, PATH | OFlags::NOFOLLOW, Mode::empty())
        .with_context(|| format!("cannot open '{}'", place.path.display()))?;
    if resolve::shows_the_kernel(&found) {
        bail!(
            "cannot copy '{}': the path leads to a file of the host's kernel; read the file \
             inside, with exec",
            place.path.display()
        );
    }
    Ok(())
}

/// Opens a regular file to be read, or returns `None` for one that shows the kernel. The checked file
/// is the opened one, even if its name changes meanwhile.
fn open_file(dir: BorrowedFd, name: &CStr, owner: Owner) -> Result<Option<(File, Stat)>> {
    let found = fs::openat(dir, name, PATH | OFlags::NOFOLLOW, Mode::empty())?;
    let stat = fs::fstat(&found)?;
    anyhow::ensure!(kind(&stat) == FileType::RegularFile, "the file changed while it was copied");
    if owner.reads_container() && resolve::shows_the_kernel(&found) {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(Some((File::from(fs::open(path, flags, Mode::empty())?), stat)))
}

/// Writes an object as a tar, with ids mapped by `owner`.
pub(crate) fn to_tar(from: &Place, owner: Owner, out: &mut dyn Write) -> Result<()> {
    let (dir, name) = from.parent()?;
    refuse_kernel(dir.as_fd(), &name, from)?;
    let mut tar = tar::Builder::new(out);
    let (_, shown) = split(&from.path)?;
    let shown = PathBuf::from(std::ffi::OsStr::from_bytes(shown.as_bytes()));
    if from.contents_only() || name.as_c_str() == c"." {
        let source = open_dir(dir.as_fd(), &name)?;
        for name in names(&source)? {
            let shown = PathBuf::from(std::ffi::OsStr::from_bytes(name.as_bytes()));
            tar_entry(source.as_fd(), &name, &shown, owner, &mut tar)?;
        }
    } else {
        tar_entry(dir.as_fd(), &name, &shown, owner, &mut tar)?;
    }
    tar.finish().context("cannot write the archive")
}

fn tar_entry<W: Write>(
    dir: BorrowedFd,
    name: &CStr,
    shown: &Path,
    owner: Owner,
    tar: &mut tar::Builder<W>,
) -> Result<()> {
    let step = || format!("cannot archive '{}'", shown.display());
    let stat = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).with_context(step)?;
    let mut header = tar::Header::new_gnu();
    let fill = |header: &mut tar::Header, stat: &Stat| {
        let (uid, gid) = owner.of(stat.st_uid, stat.st_gid).unwrap_or((0, 0));
        header.set_uid(uid.into());
        header.set_gid(gid.into());
        header.set_mode(owner.mode(stat.st_mode).as_raw_mode());
        header.set_mtime(stat.st_mtime.max(0) as u64);
        header.set_size(0);
    };
    match kind(&stat) {
        FileType::Directory => {
            let source = open_dir(dir, name)?;
            if owner.reads_container() && resolve::shows_the_kernel(&source) {
                return Ok(());
            }
            fill(&mut header, &stat);
            header.set_entry_type(tar::EntryType::Directory);
            tar.append_data(&mut header, shown, io::empty()).with_context(step)?;
            for name in names(&source)? {
                let shown = shown.join(std::ffi::OsStr::from_bytes(name.as_bytes()));
                tar_entry(source.as_fd(), &name, &shown, owner, tar)?;
            }
            Ok(())
        }
        FileType::RegularFile => {
            let Some((source, stat)) = open_file(dir, name, owner).with_context(step)? else {
                return Ok(());
            };
            fill(&mut header, &stat);
            sparse::append(tar, &mut header, shown, source, stat.st_size as u64).with_context(step)
        }
        FileType::Symlink => {
            let link = fs::readlinkat(dir, name, Vec::new()).with_context(step)?;
            fill(&mut header, &stat);
            header.set_entry_type(tar::EntryType::Symlink);
            let link = Path::new(std::ffi::OsStr::from_bytes(link.as_bytes()));
            tar.append_link(&mut header, shown, link).with_context(step)
        }
        _ => Ok(()),
    }
}

/// Unpacks a tar below a directory, which is the root for every path in it.
pub(crate) fn from_tar(to: &Place, owner: Owner, input: impl Read) -> Result<()> {
    let into = to.open(&to.path, DIR)?;
    let mut tar = tar::Archive::new(input);
    for entry in tar.entries().context("cannot read the archive")? {
        let mut entry = entry.context("cannot read the archive")?;
        let path = entry.path().context("cannot read the archive")?.into_owned();
        let step = || format!("cannot unpack '{}'", path.display());
        if path.components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir)) {
            bail!("cannot unpack '{}': it leads out of the directory", path.display());
        }
        let clean: PathBuf = path.components().filter(|c| *c != Component::CurDir).collect();
        let Some(parent) = clean.parent() else { continue };
        let (_, name) = split(&clean)?;
        let dir = resolve::create_directories(into.as_fd(), parent, Mode::from_raw_mode(0o755))
            .with_context(step)?;
        let dir = fs::openat(&dir, c".", DIR, Mode::empty()).with_context(step)?;
        let header = entry.header();
        let (uid, gid) = (header.uid().unwrap_or(0) as u32, header.gid().unwrap_or(0) as u32);
        let mode = owner.mode(header.mode().unwrap_or(0o644));
        match header.entry_type() {
            tar::EntryType::Directory => {
                match fs::mkdirat(&dir, name.as_c_str(), Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(e).with_context(step),
                }
                let made = open_dir(dir.as_fd(), &name)?;
                own(dir.as_fd(), &name, uid, gid, owner).with_context(step)?;
                fs::fchmod(&made, mode).with_context(step)?;
            }
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                let mut file = File::from(create(dir.as_fd(), &name).with_context(step)?);
                sparse::fill(&mut entry, &mut file).with_context(step)?;
                own(dir.as_fd(), &name, uid, gid, owner).with_context(step)?;
                fs::fchmod(&file, mode).with_context(step)?;
            }
            tar::EntryType::Symlink => {
                let link = entry.link_name().with_context(step)?.unwrap_or_default();
                unlink(dir.as_fd(), &name).with_context(step)?;
                fs::symlinkat(&*link, &dir, name.as_c_str()).with_context(step)?;
                own(dir.as_fd(), &name, uid, gid, owner).with_context(step)?;
            }
            tar::EntryType::Link => {
                let link = entry.link_name().with_context(step)?.unwrap_or_default();
                let source = resolve::in_root(into.as_fd(), &*link, PATH, Mode::empty())
                    .with_context(step)?;
                unlink(dir.as_fd(), &name).with_context(step)?;
                fs::linkat(&source, c"", &dir, name.as_c_str(), AtFlags::EMPTY_PATH)
                    .with_context(step)?;
            }
            _ => fail::note(&format!("'{}' is not unpacked", path.display())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use dormouse_model::IdSlot;

    use super::*;

    fn place(root: &Path, path: &str) -> Place {
        let root = fs::open(root, DIR, Mode::empty()).unwrap();
        Place { root, path: path.into() }
    }

    fn host() -> Owner {
        Owner::Host { ids: IdMap::narrow(IdSlot(5)), keep: false }
    }

    #[test]
    fn copy_follows_rules_of_cp() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |p: &str, t: &str| std::fs::write(a.path().join(p), t).unwrap();
        std::fs::create_dir_all(a.path().join("d/e")).unwrap();
        write("d/f", "text");
        write("d/e/g", "more");
        symlink("f", a.path().join("d/link")).unwrap();
        let to = |path: &str| place(b.path(), path);
        let read = |p: &str| std::fs::read_to_string(b.path().join(p)).unwrap();
        copy(&place(a.path(), "/d"), &to("/new"), host()).unwrap();
        assert_eq!((read("new/f"), read("new/e/g")), ("text".into(), "more".into()));
        assert_eq!(std::fs::read_link(b.path().join("new/link")).unwrap(), Path::new("f"));
        copy(&place(a.path(), "/d"), &to("/new"), host()).unwrap();
        assert_eq!(read("new/d/f"), "text");
        copy(&place(a.path(), "/d/."), &to("/"), host()).unwrap();
        assert_eq!(read("f"), "text");
        copy(&place(a.path(), "/d/link"), &to("/named"), host()).unwrap();
        assert_eq!(read("named"), "text");
        copy(&place(a.path(), "/d/f"), &to("/named"), host()).unwrap();
        for (from, into) in [("/none", "/x"), ("/d/f", "/none/"), ("/d", "/named"), ("/d/f/", "/x")]
        {
            assert!(copy(&place(a.path(), from), &to(into), host()).is_err(), "{from} {into}");
        }
    }

    #[test]
    fn copy_never_follows_links_out_of_root() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "secret").unwrap();
        let secret = outside.path().join("secret");
        symlink(&secret, a.path().join("leak")).unwrap();
        assert!(copy(&place(a.path(), "/leak"), &place(b.path(), "/"), host()).is_err());
        // A target that is a link to the outside is replaced, not written through.
        std::fs::write(a.path().join("f"), "new").unwrap();
        std::fs::create_dir(b.path().join("d")).unwrap();
        symlink(&secret, b.path().join("d/f")).unwrap();
        copy(&place(a.path(), "/f"), &place(b.path(), "/d/"), host()).unwrap();
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
        assert_eq!(std::fs::read_to_string(b.path().join("d/f")).unwrap(), "new");
        // A directory of the target that is a link is not entered either.
        symlink(outside.path(), b.path().join("out")).unwrap();
        std::fs::create_dir(a.path().join("out")).unwrap();
        std::fs::write(a.path().join("out/x"), "x").unwrap();
        assert!(copy(&place(a.path(), "/out"), &place(b.path(), "/"), host()).is_err());
        assert!(!outside.path().join("x").exists());
    }

    #[test]
    fn copy_to_host_drops_set_user_id() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(a.path().join("su"), "x").unwrap();
        let mode = std::fs::Permissions::from_mode(0o6755);
        std::fs::set_permissions(a.path().join("su"), mode).unwrap();
        copy(&place(a.path(), "/su"), &place(b.path(), "/"), host()).unwrap();
        assert_eq!(std::fs::metadata(b.path().join("su")).unwrap().mode() & 0o7777, 0o755);
    }

    #[test]
    fn archive_round_trip_stays_below_root() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(a.path().join("d")).unwrap();
        std::fs::write(a.path().join("d/f"), "text").unwrap();
        symlink("f", a.path().join("d/l")).unwrap();
        let mut tar = Vec::new();
        to_tar(&place(a.path(), "/d"), host(), &mut tar).unwrap();
        from_tar(&place(b.path(), "/"), host(), &tar[..]).unwrap();
        assert_eq!(std::fs::read_to_string(b.path().join("d/l")).unwrap(), "text");
        // Through a link in the archive.
        let outside = tempfile::tempdir().unwrap();
        let mut evil = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        evil.append_link(&mut header, "out", outside.path()).unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        evil.append_data(&mut header, "out/x", &b"x"[..]).unwrap();
        let evil = evil.into_inner().unwrap();
        let _ = from_tar(&place(b.path(), "/"), host(), &evil[..]); // refused or kept inside
        assert!(!outside.path().join("x").exists());
    }

    #[test]
    fn owner_maps_ids_between_host_and_container() {
        let ids = IdMap::narrow(IdSlot(5));
        let base = ids.base;
        let to = |keep| Owner::Container { ids, keep };
        assert_eq!(to(false).of(1000, 1000), Some((base, base)));
        assert_eq!(to(true).of(1000, 33), Some((base + 1000, base + 33)));
        assert_eq!(to(true).of(4_000_000_000, 0), Some((base, base)));
        let from = |keep| Owner::Host { ids, keep };
        assert_eq!(from(false).of(base, base), None);
        assert_eq!(from(true).of(base + 7, 1), Some((7, 65_534)));
    }
}
