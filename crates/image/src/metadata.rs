//! The metadata of an image on disk: one EROFS file, or a directory of stubs.
//!
//! Both have the same contents: a file with its data in an object has no data, but the file's size
//! and two xattrs for overlayfs: `trusted.overlay.metacopy` ("the data is elsewhere") and
//! `trusted.overlay.redirect` (`/ab/cdef…`, looked up in the data-only layer). Files of at most 64
//! bytes are stored directly.
//!
//! The EROFS file is written by the `composefs` crate, which saves a file system writer and is
//! readable by composefs' own tools. The crate panics on values that EROFS cannot represent, so
//! none of those may reach it: names, xattrs, device numbers and sizes are bounded where archives
//! are read, and whiteouts with two names are split here.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use composefs::erofs::writer::{ValidatedFileSystem, mkfs_erofs};
use composefs::fsverity::{FsVerityHashValue, Sha256HashValue};
use composefs::generic_tree::{Inode, LeafId};
use composefs::tree::{self, FileSystem, LeafContent, RegularFile, Stat};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags,
};

use crate::archive::Meta;
use crate::error::{At, Fault, Result};
use crate::layer::Content;
use crate::tree::{Node, NodeKind, Tree};

/// The bytes of an EROFS file.
pub(crate) fn erofs(tree: &Tree) -> Result<Box<[u8]>> {
    // Writing and dropping the nested directories recurses as deep as they are (1024 at most).
    let build = || -> Result<Box<[u8]>> {
        let mut fs = FileSystem::new(stat(&tree.nodes[0].meta));
        let mut leaves = vec![None; tree.nodes.len()];
        let root = directory(tree, 0, &mut fs, &mut leaves)?;
        fs.root = root;
        let fs = ValidatedFileSystem::<Sha256HashValue>::new(fs).map_err(|e| {
            let problem = format!("it cannot be written as EROFS: {e:#}");
            Fault::Archive { what: "the tree of the image".to_owned(), problem }
        })?;
        Ok(mkfs_erofs(&fs))
    };
    let thread = std::thread::Builder::new().name("erofs".to_owned()).stack_size(64 << 20);
    std::thread::scope(|scope| {
        let built = thread.spawn_scoped(scope, build).at("start a thread for", "meta.erofs")?;
        built.join().map_err(|_| {
            let problem = "the EROFS writer refuses it".to_owned();
            Fault::Archive { what: "the tree of the image".to_owned(), problem }
        })?
    })
}

fn directory(
    tree: &Tree,
    id: usize,
    fs: &mut FileSystem<Sha256HashValue>,
    leaves: &mut [Option<LeafId>],
) -> Result<tree::Directory<Sha256HashValue>> {
    let mut made = tree::Directory::new(stat(&tree.nodes[id].meta));
    let NodeKind::Directory(from) = &tree.nodes[id].kind else { return Ok(made) };
    for (name, child) in &from.entries {
        let node = &tree.nodes[*child];
        let inode = match &node.kind {
            NodeKind::Directory(_) => {
                Inode::Directory(Box::new(directory(tree, *child, fs, leaves)?))
            }
            _ => match leaves[*child] {
                Some(leaf) => Inode::leaf(leaf),
                None => {
                    let leaf = fs.push_leaf(stat(&node.meta), leaf_content(node)?);
                    // EROFS has no whiteout with two names: each gets a node of its own.
                    if !matches!(node.kind, NodeKind::Char { major: 0, minor: 0 }) {
                        leaves[*child] = Some(leaf);
                    }
                    Inode::leaf(leaf)
                }
            },
        };
        made.insert(OsStr::from_bytes(name), inode);
    }
    Ok(made)
}

fn leaf_content(node: &Node) -> Result<LeafContent<Sha256HashValue>> {
    Ok(match &node.kind {
        NodeKind::File { content: Content::Inline(bytes), .. } => {
            LeafContent::Regular(RegularFile::Inline(bytes.clone().into_boxed_slice()))
        }
        NodeKind::File { content: Content::Object { id, .. }, size } => {
            let id = Sha256HashValue::from_hex(hex::encode(id.0)).map_err(|_| Fault::Invalid {
                what: "an object's name is not 64 hex digits".to_owned(),
            })?;
            LeafContent::Regular(RegularFile::ExternalNoVerity(id, *size))
        }
        NodeKind::Symlink(target) => LeafContent::Symlink(OsStr::from_bytes(target).into()),
        NodeKind::Char { major, minor } => LeafContent::CharacterDevice(device(*major, *minor)),
        NodeKind::Block { major, minor } => LeafContent::BlockDevice(device(*major, *minor)),
        NodeKind::Fifo => LeafContent::Fifo,
        NodeKind::Directory(_) | NodeKind::LinkBelow(_) => {
            let what = "a node of the tree is not a leaf".to_owned();
            return Err(Fault::Invalid { what }.into());
        }
    })
}

/// The kernel's own encoding of a device number in 32 bits, which EROFS uses.
fn device(major: u32, minor: u32) -> u64 {
    u64::from((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

fn stat(meta: &Meta) -> Stat {
    let pair = |(name, value): &(Vec<u8>, Vec<u8>)| {
        (Box::from(OsStr::from_bytes(name)), value.clone().into_boxed_slice())
    };
    Stat {
        st_mode: meta.mode,
        st_uid: meta.uid,
        st_gid: meta.gid,
        st_mtim_sec: meta.mtime.0,
        st_mtim_nsec: meta.mtime.1,
        xattrs: meta.xattrs.iter().map(pair).collect(),
    }
}

/// Writes the tree as a directory of stubs at `path`, which must not exist.
pub(crate) fn stubs(tree: &Tree, path: &Path) -> Result<()> {
    rustix::fs::mkdir(path, Mode::RWXU).at("make the directory", path)?;
    let root = open_directory(CWD, path.as_os_str().as_bytes())?;
    let counts = tree.links();
    let first = vec![None; counts.len()];
    let mut links = Links { root: root.as_fd(), counts, first, path: Vec::new() };
    stub_directory(tree, 0, &root, &mut links)
}

/// The first paths of nodes with several names.
struct Links<'r> {
    root: BorrowedFd<'r>,
    counts: Vec<u32>,
    first: Vec<Option<Vec<u8>>>,
    /// Path of the directory that is being filled.
    path: Vec<u8>,
}

fn open_directory(at: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty()).at("open", OsStr::from_bytes(name))
}

/// Fills a directory.
fn stub_directory(tree: &Tree, id: usize, dir: &OwnedFd, links: &mut Links<'_>) -> Result<()> {
    let NodeKind::Directory(from) = &tree.nodes[id].kind else { return Ok(()) };
    for (name, child) in &from.entries {
        let shown = OsStr::from_bytes(name);
        let node = &tree.nodes[*child];
        if let Some(first) = &links.first[*child] {
            // The path is in a directory of ours, and no part of it is a symlink.
            rustix::fs::linkat(links.root, &first[..], dir, &name[..], AtFlags::empty())
                .at("link", shown)?;
            continue;
        }
        match &node.kind {
            NodeKind::Directory(_) => {
                rustix::fs::mkdirat(dir, &name[..], Mode::RWXU).at("make the directory", shown)?;
                let made = open_directory(dir.as_fd(), name)?;
                let length = links.path.len();
                links.path.extend_from_slice(name);
                links.path.push(b'/');
                stub_directory(tree, *child, &made, links)?;
                links.path.truncate(length);
                continue;
            }
            NodeKind::File { size, content } => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = rustix::fs::openat(dir, &name[..], flags, Mode::RUSR | Mode::WUSR)
                    .at("create", shown)?;
                let mut file = File::from(file);
                match content {
                    Content::Inline(bytes) => file.write_all(bytes).at("write", shown)?,
                    Content::Object { id, .. } => {
                        file.set_len(*size).at("size", shown)?;
                        let set = |name: &str, value: &[u8]| {
                            rustix::fs::fsetxattr(&file, name, value, XattrFlags::empty())
                                .at("set an xattr of", shown)
                        };
                        set("trusted.overlay.metacopy", b"")?;
                        set("trusted.overlay.redirect", format!("/{}", id.path()).as_bytes())?;
                    }
                }
            }
            NodeKind::Symlink(target) => {
                rustix::fs::symlinkat(&target[..], dir, &name[..]).at("link", shown)?;
            }
            NodeKind::Char { .. } | NodeKind::Block { .. } | NodeKind::Fifo => {
                let (kind, rdev) = match node.kind {
                    NodeKind::Char { major, minor } => {
                        (FileType::CharacterDevice, rustix::fs::makedev(major, minor))
                    }
                    NodeKind::Block { major, minor } => {
                        (FileType::BlockDevice, rustix::fs::makedev(major, minor))
                    }
                    _ => (FileType::Fifo, 0),
                };
                rustix::fs::mknodat(dir, &name[..], kind, Mode::RUSR, rdev).at("make", shown)?;
            }
            NodeKind::LinkBelow(_) => {}
        }
        set_meta(dir, name, node)?;
        if links.counts[*child] > 1 {
            let mut path = links.path.clone();
            path.extend_from_slice(name);
            links.first[*child] = Some(path);
        }
    }
    set_meta(dir, b"", &tree.nodes[id])
}

/// Sets owner, mode, xattrs and times of a new file. ORDER: the owner first, because its change
/// clears the setuid bit and file capabilities; the times last.
fn set_meta(dir: &OwnedFd, name: &[u8], node: &Node) -> Result<()> {
    let shown = OsStr::from_bytes(name);
    let meta = &node.meta;
    let here = if name.is_empty() { &b"."[..] } else { name };
    let owner = (Some(Uid::from_raw(meta.uid)), Some(Gid::from_raw(meta.gid)));
    rustix::fs::chownat(dir, here, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)
        .at("change the owner of", shown)?;
    let symlink = matches!(node.kind, NodeKind::Symlink(_));
    if !symlink {
        let mode = Mode::from_raw_mode(meta.mode);
        rustix::fs::chmodat(dir, here, mode, AtFlags::empty()).at("change the mode of", shown)?;
    }
    for (key, value) in &meta.xattrs {
        use std::os::fd::AsRawFd;
        // The name is a single component in a directory of ours that no other process writes to.
        let path = [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), here].concat();
        rustix::fs::lsetxattr(&path[..], &key[..], value, XattrFlags::empty())
            .at("set an xattr of", shown)?;
    }
    let time = Timespec { tv_sec: meta.mtime.0, tv_nsec: meta.mtime.1.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(dir, here, &times, AtFlags::SYMLINK_NOFOLLOW)
        .at("change the time of", shown)
}
