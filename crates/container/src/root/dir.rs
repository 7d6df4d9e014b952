//! Directories of a container on a shared tmpfs, with its device nodes, and mounts of directories.
//!
//! Uses `ground` and `shared`.

use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use dormouse_kernel::mount;
use dormouse_kernel::mount::MountAttr;
use dormouse_model::{Config, IdMap};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::shared;

/// Makes the container's directories on a shared tmpfs anew.
pub(crate) fn make(ground: &Ground, config: &Config) -> Result<PathBuf> {
    let dir = shared::dir(ground, &config.id, config.ids)?;
    fs::create_dir(&dir).map_err(Error::file("cannot make directory", &dir))?;
    make_dev(&dir.join("dev"), config.ids)?;
    make_owned_dir(&dir.join("shm"), 0o1777, config.ids)?;
    if config.spec.systemd {
        make_owned_dir(&dir.join("run"), 0o755, config.ids)?;
        make_owned_dir(&dir.join("lock"), 0o1777, config.ids)?;
    }
    Ok(dir)
}

/// Makes the device nodes every program expects, and the links into procfs. The host's root makes
/// the nodes: no process in a user namespace can.
fn make_dev(path: &Path, ids: IdMap) -> Result<()> {
    const NODES: [(&str, u32, u32); 6] = [
        ("null", 1, 3),
        ("zero", 1, 5),
        ("full", 1, 7),
        ("random", 1, 8),
        ("urandom", 1, 9),
        ("tty", 5, 0),
    ];
    const LINKS: [(&str, &str); 6] = [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
        ("core", "/proc/kcore"),
    ];
    make_owned_dir(path, 0o755, ids)?;
    let dev = open_dir(path)?;
    let (uid, gid) = (rustix::fs::Uid::from_raw(ids.base), rustix::fs::Gid::from_raw(ids.base));
    for (name, major, minor) in NODES {
        let (mode, number) = (Mode::from_raw_mode(0o666), rustix::fs::makedev(major, minor));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::mknodat(&dev, name, FileType::CharacterDevice, mode, number)
            .and_then(|()| rustix::fs::chmodat(&dev, name, mode, AtFlags::empty())) // past our umask
            .and_then(|()| rustix::fs::chownat(&dev, name, Some(uid), Some(gid), flags))
            .map_err(|e| Error::file("cannot make device", path.join(name))(e.into()))?;
    }
    for (name, target) in LINKS {
        rustix::fs::symlinkat(target, &dev, name)
            .map_err(|e| Error::file("cannot make link", path.join(name))(e.into()))?;
    }
    for name in ["pts", "shm", "mqueue"] {
        make_owned_dir(&path.join(name), 0o755, ids)?;
    }
    Ok(())
}

/// Makes an empty directory that belongs to the container's root.
pub(crate) fn make_owned_dir(path: &Path, mode: u32, ids: IdMap) -> Result<()> {
    fs::create_dir(path).map_err(Error::file("cannot make directory", path))?;
    chown(path, Some(ids.base), Some(ids.base)).map_err(Error::file("cannot own", path))?;
    set_mode(path, mode)
}

/// Sets the permissions of a new file, which the umask may have reduced.
pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(Error::file("cannot set permissions of", path))
}

fn open_dir(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|e| Error::file("cannot open", path)(e.into()))
}

/// Makes a detached mount of a host directory.
pub(crate) fn clone_dir(path: &Path, attr: MountAttr) -> Result<OwnedFd> {
    clone_of(CWD, path, attr)
}

/// Makes a detached mount of a directory below another.
pub(crate) fn clone_of(dir: BorrowedFd<'_>, path: &Path, attr: MountAttr) -> Result<OwnedFd> {
    mount::clone_with(dir, path, attr)
        .map_err(Error::call("cannot clone a mount for the container"))
}

/// Makes a separate tmpfs with an enforced size.
pub(crate) fn tmpfs(size_bytes: u64, mode: u32, ids: IdMap, attr: MountAttr) -> Result<OwnedFd> {
    let make = || {
        let fs = mount::FsContext::open("tmpfs")?;
        fs.set_string("size", &size_bytes.to_string())?;
        fs.set_string("mode", &format!("{mode:o}"))?;
        fs.set_string("uid", &ids.base.to_string())?;
        fs.set_string("gid", &ids.base.to_string())?;
        fs.create(attr)
    };
    make().map_err(Error::call("cannot make a tmpfs"))
}
