//! Mounts and file systems.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{CWD, Mode, OFlags};

use super::scratch::{Probed, Reason, Scratch, lack, open_dir};
use crate::mount::{FsContext, MountAttr, OverlayLayer};
use crate::{call, mount, namespace, resolve};

/// Host id of id 0 of the probes' user namespace.
const BASE: u32 = 700_000;

pub(super) fn openat2(_: &Scratch) -> Probed {
    let root = open_dir("/".as_ref())?;
    resolve::in_root(root.as_fd(), "../../..", OFlags::PATH, Mode::empty())?;
    Ok(String::new())
}

pub(super) fn new_interface(_: &Scratch) -> Probed {
    let tmpfs = FsContext::open("tmpfs")?.create(MountAttr::NODEV)?;
    mount::set_attr(tmpfs.as_fd(), false, MountAttr::RDONLY, MountAttr::empty())?;
    match rustix::fs::mkdirat(&tmpfs, "a", Mode::RWXU) {
        Err(rustix::io::Errno::ROFS) => Ok(String::new()),
        other => lack(format!("a read-only mount answered {other:?}")),
    }
}

pub(super) fn open_tree_attr(_: &Scratch) -> Probed {
    let flags = call::OpenTreeFlags::CLONE;
    let private = call::Propagation::Private;
    call::open_tree_attr(CWD, c"/", flags, MountAttr::RDONLY, private)?;
    Ok(String::new())
}

/// `lower` with a file `f` of root's, and empty `upper` and `work`.
fn layers(scratch: &Scratch) -> Result<[PathBuf; 3], Reason> {
    let dirs =
        [scratch.directory("lower")?, scratch.directory("upper")?, scratch.directory("work")?];
    fs::write(dirs[0].join("f"), "lower")?;
    Ok(dirs)
}

fn owner(root: &OwnedFd, file: &str) -> Result<u32, Reason> {
    Ok(rustix::fs::statat(root, file, rustix::fs::AtFlags::empty())?.st_uid)
}

/// A copy of the mount at a directory with shifted owners.
fn shifted(dir: &PathBuf) -> Result<OwnedFd, Reason> {
    let map = format!("0 {BASE} 1000\n");
    let user = namespace::new_user(&map, &map)?;
    let copy = mount::clone_tree(CWD, dir, false)?;
    mount::idmap(copy.as_fd(), user.as_fd(), false)?;
    Ok(copy)
}

pub(super) fn idmap(scratch: &Scratch) -> Probed {
    let [lower, ..] = layers(scratch)?;
    let uid = owner(&shifted(&lower)?, "f")?;
    if uid == BASE { Ok(String::new()) } else { lack(format!("owner 0 became {uid}")) }
}

pub(super) fn overlay(scratch: &Scratch) -> Probed {
    let [lower, upper, work] = layers(scratch)?;
    let (lower, up, work) = (open_dir(&lower)?, open_dir(&upper)?, open_dir(&work)?);
    let layer = OverlayLayer { fd: lower.as_fd(), data_only: false };
    let options = [("metacopy", Some("on")), ("redirect_dir", Some("on"))];
    let root = mount::overlay(&[layer], Some((up.as_fd(), work.as_fd())), &options)?;
    rustix::fs::mkdirat(&root, "d", Mode::RWXU)?;
    owner(&root, "f")?;
    if upper.join("d").is_dir() { Ok(String::new()) } else { lack("writing missed the upper") }
}

pub(super) fn overlay_idmapped(scratch: &Scratch) -> Probed {
    let [lower, upper, work] = layers(scratch)?;
    let (lower, up, work) = (shifted(&lower)?, open_dir(&upper)?, open_dir(&work)?);
    let layer = OverlayLayer { fd: lower.as_fd(), data_only: false };
    let root = mount::overlay(&[layer], Some((up.as_fd(), work.as_fd())), &[])?;
    let uid = owner(&root, "f")?;
    // Copied up, it must be the container's own in the upper too.
    rustix::fs::chmodat(&root, "f", Mode::RWXU, rustix::fs::AtFlags::empty())?;
    let stored = fs::metadata(upper.join("f"))?.uid();
    if (uid, stored) == (BASE, BASE) {
        return Ok(String::new());
    }
    lack(format!("owner 0 is shown as {uid} and stored as {stored}"))
}

pub(super) fn data_only(scratch: &Scratch) -> Probed {
    let [meta, data, _] = layers(scratch)?;
    fs::write(data.join("object"), "hello")?;
    let file = meta.join("f");
    fs::File::options().write(true).open(&file)?.set_len(5)?;
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&file, "trusted.overlay.metacopy", b"", flags)?;
    rustix::fs::setxattr(&file, "trusted.overlay.redirect", b"/object", flags)?;
    let (meta, data) = (open_dir(&meta)?, open_dir(&data)?);
    let layers = [
        OverlayLayer { fd: meta.as_fd(), data_only: false },
        OverlayLayer { fd: data.as_fd(), data_only: true },
    ];
    let root = mount::overlay(&layers, None, &[("metacopy", Some("on"))])?;
    let opened = rustix::fs::openat(&root, "f", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let text = std::io::read_to_string(fs::File::from(opened))?;
    if text == "hello" { Ok(String::new()) } else { lack("the file showed other data") }
}

/// By descriptor alone: [`mount::overlay`] would fall back to paths.
fn by_descriptor(lower: &OwnedFd, more: &OwnedFd) -> Probed {
    let context = FsContext::open("overlay")?;
    context.set_fd("lowerdir+", lower.as_fd())?;
    context.set_fd("lowerdir+", more.as_fd())?;
    context.create(MountAttr::empty())?;
    Ok(String::new())
}

pub(super) fn overlay_descriptor(scratch: &Scratch) -> Probed {
    let [lower, more, _] = layers(scratch)?;
    by_descriptor(&open_dir(&lower)?, &open_dir(&more)?)
}

pub(super) fn overlay_detached(scratch: &Scratch) -> Probed {
    let [lower, more, _] = layers(scratch)?;
    by_descriptor(&shifted(&lower)?, &shifted(&more)?)
}

/// An erofs of an empty directory: the superblock at 1024, the root's inode at 2048 and its two
/// entries in the second block (linux/fs/erofs/erofs_fs.h).
fn tiny_erofs() -> Vec<u8> {
    let mut image = vec![0u8; 8192];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(1024, &0xe0f5_e1e2u32.to_le_bytes()); // magic
    put(1024 + 12, &[12]); // blocks of 4096 bytes
    put(1024 + 14, &64u16.to_le_bytes()); // root inode, in units of 32 bytes
    put(1024 + 16, &1u64.to_le_bytes()); // inodes
    put(1024 + 36, &2u32.to_le_bytes()); // blocks
    put(2048 + 4, &0o40755u16.to_le_bytes()); // mode
    put(2048 + 6, &2u16.to_le_bytes()); // links
    put(2048 + 8, &27u32.to_le_bytes()); // size
    put(2048 + 16, &1u32.to_le_bytes()); // its block
    for (n, name_at) in [(0, 24u16), (1, 25)] {
        put(4096 + n * 12, &64u64.to_le_bytes());
        put(4096 + n * 12 + 8, &name_at.to_le_bytes());
        put(4096 + n * 12 + 10, &[2]); // a directory
    }
    put(4096 + 24, b"...");
    image
}

pub(super) fn erofs_file(scratch: &Scratch) -> Probed {
    let file = scratch.directory("erofs")?.join("image");
    fs::write(&file, tiny_erofs())?;
    let context = FsContext::open("erofs")?;
    context.set_string("source", &file.to_string_lossy())?;
    context.set_flag("ro")?;
    let root = context.create(MountAttr::RDONLY)?;
    let mode = rustix::fs::statat(&root, ".", rustix::fs::AtFlags::empty())?.st_mode;
    if mode == 0o40755 { Ok(String::new()) } else { lack(format!("its root has mode {mode:o}")) }
}

pub(super) fn loop_device(scratch: &Scratch) -> Probed {
    use std::os::fd::AsRawFd;
    const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
    const LOOP_SET_FD: libc::c_ulong = 0x4c00;
    const LOOP_CLR_FD: libc::c_ulong = 0x4c01;
    let file = scratch.directory("loop")?.join("image");
    fs::write(&file, tiny_erofs())?;
    let file = fs::File::open(&file)?;
    let control = fs::File::options().read(true).write(true).open("/dev/loop-control")?;
    for _ in 0..10 {
        // SAFETY: no pointer is passed.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let device = fs::File::options().read(true).open(format!("/dev/loop{number}"))?;
        // SAFETY: only descriptors are passed.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_FD, file.as_raw_fd()) } == 0 {
            // SAFETY: as above; the device is ours, as the call before succeeded.
            unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD, 0) };
            return Ok(String::new());
        }
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error.into());
        }
        // Another process took it between the two calls.
    }
    lack("others took every free one")
}

/// A group that is asked before a file of a new tmpfs is opened. Nothing opens one.
pub(super) fn open_events(_: &Scratch) -> Probed {
    let tree = FsContext::open("tmpfs")?.create(MountAttr::NOSUID)?;
    let group = call::fanotify_init()?;
    call::fanotify_open_perm(group.as_fd(), tree.as_fd())?;
    Ok(String::new())
}

pub(super) fn mqueue(_: &Scratch) -> Probed {
    FsContext::open("mqueue")?.create(MountAttr::NOSUID | MountAttr::NOEXEC)?;
    Ok(String::new())
}

pub(super) fn devpts(_: &Scratch) -> Probed {
    let root = FsContext::open("devpts")?.create(MountAttr::NOSUID | MountAttr::NOEXEC)?;
    rustix::fs::statat(&root, "ptmx", rustix::fs::AtFlags::empty())?;
    Ok(String::new())
}
