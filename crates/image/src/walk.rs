//! Walking a directory of files and writing it as a tar: shared by `import` of a directory,
//! `commit` and `export`.
//!
//! Everything is opened relative to the parent directory by one component without following links.
//! A tree that changes concurrently, even maliciously, therefore cannot lead out of itself.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use crate::archive::{Head, Kind, MAX_XATTRS, Meta, Piece, Writer, keep_xattr};
use crate::error::{At, Fault, Result};

/// Longest directory chain. LIMIT: the kernel's PATH_MAX allows 2048.
const MAX_DEPTH: usize = 1024;

/// An id of the file system as the tar shall have it.
pub(crate) type Ids<'a> = dyn Fn(u32) -> u32 + 'a;

/// Writes files into a tar.
pub(crate) struct Walker<'a, W: Write> {
    pub out: Writer<W>,
    /// Files of several names that were written, by device and inode.
    links: HashMap<(u64, u64), Vec<u8>>,
    ids: &'a Ids<'a>,
    buffer: Vec<u8>,
}

/// An open directory and its path in the tar.
#[derive(Debug)]
pub(crate) struct Here {
    pub dir: OwnedFd,
    pub stat: Stat,
}

impl<'a, W: Write> Walker<'a, W> {
    pub(crate) fn new(out: W, ids: &'a Ids<'a>) -> Self {
        Self { out: Writer::new(out), links: HashMap::new(), ids, buffer: vec![0; 256 << 10] }
    }

    /// Writes a directory and everything in it.
    pub(crate) fn tree(&mut self, here: &Here, path: &[u8], depth: usize) -> Result<()> {
        self.head(here, path)?;
        self.children(here, path, depth)
    }

    /// Writes everything in a directory, sorted by name.
    pub(crate) fn children(&mut self, here: &Here, path: &[u8], depth: usize) -> Result<()> {
        too_deep(path, depth)?;
        for name in names(&here.dir, path)? {
            let below = join(path, &name);
            let Some(stat) = stat_at(&here.dir, &name, &below)? else { continue };
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                let Some(child) = open_at(&here.dir, &name, &below)? else { continue };
                // A mount below is another file system: an empty directory is stored for it.
                if child.stat.st_dev != here.stat.st_dev {
                    self.head(&child, &below)?;
                    continue;
                }
                self.tree(&child, &below, depth + 1)?;
            } else {
                self.leaf(&here.dir, &name, &below, &stat)?;
            }
        }
        Ok(())
    }

    /// Writes a directory itself.
    pub(crate) fn head(&mut self, here: &Here, path: &[u8]) -> Result<()> {
        let proc = format!("/proc/self/fd/{}", here.dir.as_raw_fd());
        let meta = self.meta(&here.stat, proc.as_bytes(), path, false)?;
        let head = Head { path, meta: &meta, kind: Kind::Directory };
        self.out.entry(&head).at("write the tar entry of", OsStr::from_bytes(path))
    }

    /// Writes a file that is not a directory.
    pub(crate) fn leaf(
        &mut self,
        dir: &OwnedFd,
        name: &[u8],
        path: &[u8],
        stat: &Stat,
    ) -> Result<()> {
        let shown = OsStr::from_bytes(path);
        let key = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1
            && let Some(target) = self.links.get(&key)
        {
            let head = Head {
                path,
                meta: &Meta { xattrs: Vec::new(), ..self.plain_meta(stat) },
                kind: Kind::HardLink { target: target.clone() },
            };
            return self.out.entry(&head).at("write the tar entry of", shown);
        }
        let proc = [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name].concat();
        let kind = FileType::from_raw_mode(stat.st_mode);
        let device = || (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let mut file = None;
        let mut size_now = 0;
        let kind = match kind {
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let open: File = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
                    Ok(fd) => fd.into(),
                    Err(Errno::NOENT) => return Ok(()),
                    Err(e) => return Err(e).at("open", shown),
                };
                let now = rustix::fs::fstat(&open).at("stat", shown)?;
                if now.st_ino != stat.st_ino || now.st_mode != stat.st_mode {
                    let what = format!("'{}' changed while it was read", shown.display());
                    return Err(Fault::Busy { what }.into());
                }
                size_now = now.st_size as u64;
                let holes = (now.st_blocks as u64).saturating_mul(512) < size_now;
                let map = if holes { data_map(&open, size_now).at("map", shown)? } else { None };
                file = Some((open, map.clone()));
                Kind::File { size: size_now, content: map }
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new()).at("read", shown)?;
                Kind::Symlink { target: target.into_bytes() }
            }
            FileType::CharacterDevice => {
                let (major, minor) = device();
                Kind::Char { major, minor }
            }
            FileType::BlockDevice => {
                let (major, minor) = device();
                Kind::Block { major, minor }
            }
            FileType::Fifo => Kind::Fifo,
            // A socket is created by the program that binds it, and is useless without it.
            _ => return Ok(()),
        };
        let meta = self.meta(stat, &proc, path, true)?;
        self.out.entry(&Head { path, meta: &meta, kind }).at("write the tar entry of", shown)?;
        if stat.st_nlink > 1 {
            self.links.insert(key, path.to_vec());
        }
        if let Some((file, map)) = file {
            let whole = [Piece { offset: 0, length: size_now }];
            for piece in map.as_deref().unwrap_or(&whole) {
                self.copy(&file, *piece).at("read", shown)?;
            }
            // A file truncated meanwhile is filled up with zeros: its length was written before.
            self.out.zeros().at("write the tar entry of", shown)?;
        }
        Ok(())
    }

    fn copy(&mut self, file: &File, piece: Piece) -> std::io::Result<()> {
        let (mut at, end) = (piece.offset, piece.offset + piece.length);
        while at < end {
            let n = (end - at).min(self.buffer.len() as u64) as usize;
            let n = file.read_at(&mut self.buffer[..n], at)?;
            if n == 0 {
                // Truncated meanwhile; later pieces must still be at their places.
                let mut left = end - at;
                while left > 0 {
                    let n = left.min(4096);
                    self.out.data(&[0; 4096][..n as usize])?;
                    left -= n;
                }
                return Ok(());
            }
            self.out.data(&self.buffer[..n])?;
            at += n as u64;
        }
        Ok(())
    }

    /// Records the removal of a name.
    pub(crate) fn whiteout(&mut self, path: &[u8], name: &[u8]) -> Result<()> {
        let path = join(path, &[b".wh.", name].concat());
        let meta = Meta::default();
        let kind = Kind::File { size: 0, content: None };
        self.out
            .entry(&Head { path: &path, meta: &meta, kind })
            .at("write the tar entry of", OsStr::from_bytes(&path))
    }

    fn plain_meta(&self, stat: &Stat) -> Meta {
        let (uid, gid) = ((self.ids)(stat.st_uid), (self.ids)(stat.st_gid));
        Meta {
            mode: stat.st_mode & 0o7777,
            uid,
            gid,
            mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
            xattrs: Vec::new(),
        }
    }

    fn meta(&self, stat: &Stat, proc: &[u8], path: &[u8], no_follow: bool) -> Result<Meta> {
        let xattrs =
            xattrs(proc, no_follow, self.ids).at("read the xattrs of", OsStr::from_bytes(path))?;
        Ok(Meta { xattrs, ..self.plain_meta(stat) })
    }
}

/// The xattrs that a layer keeps, sorted by name.
pub(crate) fn xattrs(
    path: &[u8],
    no_follow: bool,
    ids: &Ids<'_>,
) -> rustix::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut list = vec![0; MAX_XATTRS];
    let n = match no_follow {
        true => rustix::fs::llistxattr(path, &mut list[..]),
        false => rustix::fs::listxattr(path, &mut list[..]),
    };
    let n = match n {
        Ok(n) => n,
        Err(Errno::OPNOTSUPP) => 0,
        Err(e) => return Err(e),
    };
    let mut found = Vec::new();
    let mut value = vec![0; MAX_XATTRS];
    for name in list[..n].split(|b| *b == 0).filter(|n| !n.is_empty() && keep_xattr(n)) {
        let n = match no_follow {
            true => rustix::fs::lgetxattr(path, name, &mut value[..]),
            false => rustix::fs::getxattr(path, name, &mut value[..]),
        };
        match n {
            Ok(n) if name == b"security.capability" => {
                found.push((name.to_vec(), portable_capability(&value[..n])));
            }
            Ok(n) if name.starts_with(b"system.posix_acl_") => {
                shift_acl(&mut value[..n], ids);
                found.push((name.to_vec(), value[..n].to_vec()));
            }
            Ok(n) => found.push((name.to_vec(), value[..n].to_vec())),
            Err(Errno::NODATA) => {}
            Err(e) => return Err(e),
        }
    }
    found.sort();
    Ok(found)
}

/// File capabilities set by a container contain the root of its user namespace (version 3). In an
/// image they apply to any namespace: version 2 (capabilities(7), "File capability extended
/// attribute versioning").
fn portable_capability(value: &[u8]) -> Vec<u8> {
    const VERSION_2: u8 = 2;
    const VERSION_3: u8 = 3;
    match value {
        [_, _, _, VERSION_3, ..] if value.len() == 24 => {
            let mut value = value[..20].to_vec();
            value[3] = VERSION_2;
            value
        }
        _ => value.to_vec(),
    }
}

/// Shifts the ids of an access control list: a version of four bytes, then entries of a tag, a
/// permission and an id (acl(5); linux/posix_acl_xattr.h).
fn shift_acl(acl: &mut [u8], ids: &Ids<'_>) {
    const USER: u16 = 0x02;
    const GROUP: u16 = 0x08;
    let Some((_, entries)) = acl.split_at_mut_checked(4) else { return };
    for entry in entries.chunks_exact_mut(8) {
        if matches!(u16::from_le_bytes([entry[0], entry[1]]), USER | GROUP) {
            let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
            entry[4..].copy_from_slice(&ids(id).to_le_bytes());
        }
    }
}

/// Returns the data ranges of a file; `None` if it has no hole after all.
fn data_map(file: &File, size: u64) -> rustix::io::Result<Option<Vec<Piece>>> {
    let mut map = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => return Ok(None),
            Err(e) => return Err(e),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        if end <= start {
            break;
        }
        map.push(Piece { offset: start, length: end - start });
        at = end;
    }
    let whole = map.len() == 1 && map[0] == Piece { offset: 0, length: size };
    Ok((!whole).then_some(map))
}

/// Names in a directory, sorted.
pub(crate) fn names(dir: &OwnedFd, path: &[u8]) -> Result<Vec<Vec<u8>>> {
    let shown = OsStr::from_bytes(path);
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir).at("list", shown)? {
        let entry = entry.at("list", shown)?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            if name.starts_with(b".wh.") {
                let what = format!(
                    "'{}' cannot be kept in a layer: its name begins with .wh.",
                    OsStr::from_bytes(&join(path, name)).display()
                );
                return Err(Fault::Invalid { what }.into());
            }
            names.push(name.to_vec());
        }
    }
    names.sort();
    Ok(names)
}

/// Reads the metadata; `None` if the name was removed meanwhile.
pub(crate) fn stat_at(dir: &OwnedFd, name: &[u8], path: &[u8]) -> Result<Option<Stat>> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e).at("stat", OsStr::from_bytes(path)),
    }
}

/// Opens a directory; `None` if it was removed or is not a directory.
pub(crate) fn open_at(dir: &OwnedFd, name: &[u8], path: &[u8]) -> Result<Option<Here>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(dir) => {
            let stat = rustix::fs::fstat(&dir).at("stat", OsStr::from_bytes(path))?;
            Ok(Some(Here { dir, stat }))
        }
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(e) => Err(e).at("open", OsStr::from_bytes(path)),
    }
}

pub(crate) fn too_deep(path: &[u8], depth: usize) -> Result<()> {
    if depth < MAX_DEPTH {
        return Ok(());
    }
    let start = String::from_utf8_lossy(&path[..path.len().min(120)]).into_owned();
    let what = format!("the depth of the directories below '{start}…'");
    Err(Fault::Limit { what, limit: MAX_DEPTH as u64 }.into())
}

pub(crate) fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match path {
        b"" => name.to_vec(),
        _ => [path, b"/", name].concat(),
    }
}
