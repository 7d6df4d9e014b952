//! Scratch stores and hand-made archives.
#![allow(dead_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use dormouse_image::{Image, ImageError, Metadata, Silent, Store};
use dormouse_model::{IdMap, IdSlot};
use tempfile::TempDir;

/// A store of its own, in a mount namespace of the calling thread. Mounts go with it.
pub struct Scratch {
    pub dir: TempDir,
    pub store: Store,
}

impl Scratch {
    pub fn new() -> Self {
        Self::with(Metadata::Erofs)
    }

    pub fn with(metadata: Metadata) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let store = Self::open(dir.path(), metadata);
        Self { dir, store }
    }

    pub fn open(dir: &Path, metadata: Metadata) -> Store {
        Store::open_with(&dir.join("lib"), &dir.join("run"), metadata).unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Imports a tar that is in memory.
    pub fn import(&self, tar: &[u8]) -> Result<Image, ImageError> {
        let path = self.path("in.tar");
        std::fs::write(&path, tar).unwrap();
        self.import_path(&path)
    }

    pub fn import_path(&self, path: &Path) -> Result<Image, ImageError> {
        self.store.import(path, None, &Silent).and_then(|id| self.store.find(&id))
    }

    /// Files below a directory of the store.
    pub fn count(&self, name: &str) -> usize {
        files(&self.path("lib").join(name)).len()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let result = self.store.unmount_all();
        if !std::thread::panicking() {
            result.unwrap();
        }
    }
}

/// All files below a directory, which may be missing.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(dir) else { return found };
    for entry in entries {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

/// The whole chain of an error as text.
pub fn chain(error: &ImageError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Runs in a mount namespace of its own, on a thread of its own.
pub fn in_own_mounts<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    use dormouse_kernel::{call::CloneFlags, mount, process};
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            process::unshare(CloneFlags::NEWNS).unwrap();
            let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
            let root = rustix::fs::open("/", flags, rustix::fs::Mode::empty()).unwrap();
            mount::set_propagation(root.as_fd(), false).unwrap();
            body()
        });
        run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Ids of a container that no other program uses.
pub fn ids() -> IdMap {
    IdMap::narrow(IdSlot(60_123))
}

/// A user namespace with these ids.
pub fn userns() -> OwnedFd {
    let map = ids().to_proc_text();
    dormouse_kernel::namespace::new_user(&map, &map).unwrap()
}

/// A tar, entry by entry, with any contents.
#[derive(Default)]
pub struct Tar(pub Vec<u8>);

impl Tar {
    /// Appends an entry with this header.
    pub fn entry(mut self, kind: u8, path: &[u8], link: &[u8], data: &[u8]) -> Self {
        self.0.extend_from_slice(&header(kind, path, link, data.len() as u64));
        self.data(data)
    }

    pub fn data(mut self, data: &[u8]) -> Self {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, path: &str, data: &[u8]) -> Self {
        self.entry(b'0', path.as_bytes(), b"", data)
    }

    pub fn dir(self, path: &str) -> Self {
        self.entry(b'5', path.as_bytes(), b"", b"")
    }

    pub fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(b'2', path.as_bytes(), target.as_bytes(), b"")
    }

    pub fn link(self, path: &str, target: &str) -> Self {
        self.entry(b'1', path.as_bytes(), target.as_bytes(), b"")
    }

    /// Pax records for the next entry.
    pub fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut text = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while format!("{length}").len() + rest != length {
                length += 1;
            }
            text.extend_from_slice(format!("{length} {key}=").as_bytes());
            text.extend_from_slice(value);
            text.push(b'\n');
        }
        self.entry(b'x', b"pax", b"", &text)
    }

    pub fn end(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 1024]);
        self.0
    }
}

/// One header, with a right checksum.
pub fn header(kind: u8, path: &[u8], link: &[u8], size: u64) -> [u8; 512] {
    let mut header = tar::Header::new_ustar();
    let old = header.as_old_mut();
    old.name[..path.len()].copy_from_slice(path);
    old.linkname[..link.len()].copy_from_slice(link);
    old.linkflag = [kind];
    header.set_mode(if kind == b'5' { 0o755 } else { 0o644 });
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_700_000_000);
    header.set_size(size);
    header.set_cksum();
    *header.as_bytes()
}
