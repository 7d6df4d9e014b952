//! A directory of a cgroup file system, held open: files in it are read and written beneath the
//! descriptor, so a directory that was removed and made again is never mistaken for the old one.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Explain, Result};

/// Most bytes read of one file: `memory.stat` of a large machine has about 4 kB, `io.stat` grows
/// with the number of disks, `cgroup.procs` with the processes (8 bytes each).
const LARGEST_FILE_BYTES: usize = 64 << 20;

/// One cgroup in one hierarchy.
#[derive(Debug)]
pub(super) struct Dir {
    fd: OwnedFd,
    /// For messages, and never opened again.
    path: PathBuf,
}

impl Dir {
    /// Opens a directory by its absolute path.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let fd = fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .explain("open", || format!("{path:?}, O_PATH"))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Opens the directory `name` in this one; `None` if it does not exist.
    pub(super) fn child(&self, name: &str) -> Result<Option<Self>> {
        // O_NOFOLLOW costs nothing and a cgroup file system has no links.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Self { fd, path: self.path.join(name) })),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(e).explain("openat", || self.show(name)),
        }
    }

    /// Creates the cgroup `name` in this one and opens it. Fails if it exists.
    pub(super) fn make(&self, name: &str) -> Result<Self> {
        fs::mkdirat(&self.fd, name, Mode::from_raw_mode(0o755))
            .explain("mkdirat", || self.show(name))?;
        match self.child(name) {
            Ok(Some(child)) => Ok(child),
            // Removed again by another process.
            Ok(None) => Err(Errno::NOENT).explain("openat", || self.show(name)),
            Err(e) => {
                let _ = self.remove(name);
                Err(e)
            }
        }
    }

    /// Opens the cgroup `name` in this one, which is made where it is missing.
    pub(super) fn child_or_make(&self, name: &str) -> Result<Self> {
        loop {
            if let Some(child) = self.child(name)? {
                return Ok(child);
            }
            match self.make(name) {
                // Created by another process, which may remove it again before it is opened.
                Err(e) if matches!(e.errno(), libc::EEXIST) => {}
                made => return made,
            }
        }
    }

    /// Removes the cgroup `name` in this one; `false` where there was none.
    pub(super) fn remove(&self, name: &str) -> Result<bool> {
        match fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(e).explain("rmdir", || self.show(name)),
        }
    }

    /// Renames the cgroup `from` to `to`, which must not exist. v1 only: v2 cgroups have one name.
    pub(super) fn rename(&self, from: &str, to: &str) -> Result<()> {
        fs::renameat(&self.fd, from, &self.fd, to)
            .explain("renameat", || format!("{}, {to:?}", self.show(from)))
    }

    /// Names of the cgroups in this one, in no order.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let explain = |r: Result<_, Errno>| r.explain("getdents64", || format!("{:?}", self.path));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::openat(&self.fd, ".", flags, Mode::empty())
            .explain("openat", || format!("{:?}", self.path))?;
        let mut names = Vec::new();
        for entry in explain(fs::Dir::new(fd))? {
            let entry = entry.explain("getdents64", || format!("{:?}", self.path))?;
            if entry.file_type() == fs::FileType::Directory
                && let Ok(name) = entry.file_name().to_str()
                && name != "."
                && name != ".."
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Returns whether a file of this name exists.
    pub(super) fn has(&self, file: &str) -> bool {
        fs::accessat(&self.fd, file, fs::Access::EXISTS, AtFlags::empty()).is_ok()
    }

    /// The whole of a file.
    pub(super) fn read(&self, file: &str) -> Result<String> {
        let fd = self.open_file(file, OFlags::RDONLY)?;
        let mut bytes = Vec::with_capacity(4096);
        loop {
            if bytes.len() == bytes.capacity() {
                bytes.reserve(bytes.len());
            }
            match rustix::io::read(&fd, rustix::buffer::spare_capacity(&mut bytes)) {
                Ok(0) => break,
                Ok(_) if bytes.len() < LARGEST_FILE_BYTES => {}
                Ok(_) => return Err(Errno::FBIG).explain("read", || self.show(file)),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e).explain("read", || self.show(file)),
            }
        }
        String::from_utf8(bytes).map_err(|_| Errno::ILSEQ).explain("read", || self.show(file))
    }

    /// A file that holds one number; `None` for `max`.
    pub(super) fn read_number(&self, file: &str) -> Result<Option<u64>> {
        let text = self.read(file)?;
        match text.trim() {
            "max" => Ok(None),
            number => number
                .parse()
                .map(Some)
                .map_err(|_| Errno::BADMSG)
                .explain("read", || self.show(file)),
        }
    }

    /// Writes a value in one write(2), as these files want it.
    pub(super) fn write(&self, file: &str, value: &str) -> Result<()> {
        let fd = self.open_file(file, OFlags::WRONLY)?;
        loop {
            match rustix::io::write(&fd, value.as_bytes()) {
                Err(Errno::INTR) => {}
                Err(e) => {
                    return Err(e).explain("write", || format!("{}, {value:?}", self.show(file)));
                }
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Opens a file.
    pub(super) fn open_file(&self, file: &str, flags: OFlags) -> Result<OwnedFd> {
        fs::openat(&self.fd, file, flags | OFlags::CLOEXEC, Mode::empty())
            .explain("openat", || self.show(file))
    }

    /// Changes the owner of the directory itself (`.`) or of a file.
    pub(super) fn chown(&self, file: &str, uid: u32, gid: u32) -> Result<()> {
        let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(gid));
        fs::chownat(&self.fd, file, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
            .explain("fchownat", || format!("{}, {}", self.show(file), uid.as_raw()))
    }

    /// The inode number, which on v2 is the cgroup's id (bpf_get_current_cgroup_id(), 64 bit).
    pub(super) fn inode(&self) -> Result<u64> {
        Ok(fs::fstat(&self.fd).explain("fstat", || format!("{:?}", self.path))?.st_ino)
    }

    /// A second descriptor of the directory.
    pub(super) fn copy(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(self.fd.as_fd(), 3)
            .explain("fcntl", || format!("{:?}, F_DUPFD_CLOEXEC", self.path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn show(&self, name: &str) -> String {
        format!("{:?}", self.path.join(name))
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The number after `name ` at the start of a line; 0 if there is no such line.
pub(super) fn field(text: &str, name: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_whole_words_at_the_start_of_a_line() {
        let text = "inactive_file_x 1\ntotal_inactive_file 2\ninactive_file 3\n";
        assert_eq!(field(text, "inactive_file"), 3);
        assert_eq!(field(text, "file"), 0);
    }
}
