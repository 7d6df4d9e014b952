//! The tiny mount namespace: one empty read-only tmpfs and nothing else.
//!
//! Every container's mount namespace is a copy of this one, so a clone copies one mount instead of
//! the host's thirty or three thousand, and an unmounted container root uncovers an empty
//! directory.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use dormouse_kernel::call::{
    self as kernel, CloneFlags, FsCommand, MountAttr, OpenTreeFlags, Propagation,
};
use rustix::fs::{Mode, OFlags};

use crate::{Failed, Step};

/// The descriptors that the keeper holds of the host.
#[derive(Debug)]
pub struct Outside {
    /// The host's mount namespace.
    pub mounts: OwnedFd,
    /// Its root directory.
    pub root: OwnedFd,
    /// A procfs of the keeper's own pid namespace, mounted nowhere.
    pub proc: OwnedFd,
    /// The keeper's own network namespace.
    pub net: OwnedFd,
    /// The keeper's own pid namespace.
    pub pid: OwnedFd,
}

impl Outside {
    /// Opens the namespaces of this process.
    pub fn here() -> Result<Self, Failed> {
        let mounts = open(c"/proc/self/ns/mnt", OFlags::RDONLY).step("open its mount namespace")?;
        let net = open(c"/proc/self/ns/net", OFlags::RDONLY).step("open its network namespace")?;
        let pid = open(c"/proc/self/ns/pid", OFlags::RDONLY).step("open its pid namespace")?;
        let root = open(c"/", OFlags::PATH | OFlags::DIRECTORY).step("open the host's root")?;
        let proc = new(c"proc", &[], MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC)
            .step("make a procfs")?;
        Ok(Self { mounts, root, proc, net, pid })
    }
}

fn open(path: &std::ffi::CStr, flags: OFlags) -> Result<OwnedFd, rustix::io::Errno> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// Enters a new tiny mount namespace. `place` is any directory: the tmpfs is mounted there until it
/// becomes the root, visible to no other process.
pub fn enter(place: &Path) -> Result<Outside, Failed> {
    let outside = Outside::here()?;

    kernel::unshare(CloneFlags::NEWNS).step("make a mount namespace")?;
    let top = open(c"/", OFlags::PATH | OFlags::DIRECTORY).step("open its root")?;
    let all =
        kernel::open_tree(top.as_fd(), c"", OpenTreeFlags::EMPTY_PATH).step("open its root")?;
    let (none, private) = (MountAttr::empty(), Some(Propagation::Private));
    kernel::mount_setattr(all.as_fd(), true, none, none, private, None)
        .step("make its mounts private")?;

    let attr = MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
    let options = [(c"mode", c"0555"), (c"nr_inodes", c"2"), (c"nr_blocks", c"1")];
    let empty = new(c"tmpfs", &options, attr).step("make an empty filesystem")?;
    // ORDER: opened now, in the new namespace: a mount point must be in the caller's namespace.
    let place = rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .step("open its directory")?;
    kernel::move_mount(empty.as_fd(), place.as_fd(), c"").step("mount an empty filesystem")?;
    rustix::process::fchdir(&empty).step("enter an empty filesystem")?;
    rustix::process::pivot_root(c".", c".").step("make it the root")?;
    kernel::umount_detach(c".").step("let go of the host's mounts")?;
    rustix::process::chdir(c"/").step("enter the empty root")?;
    Ok(outside)
}

/// A new filesystem, mounted nowhere.
pub(crate) fn new(
    name: &std::ffi::CStr,
    options: &[(&std::ffi::CStr, &std::ffi::CStr)],
    attr: MountAttr,
) -> Result<OwnedFd, rustix::io::Errno> {
    let context = kernel::fsopen(name)?;
    kernel::fsconfig(context.as_fd(), FsCommand::String(c"source", name))?;
    for (key, value) in options {
        kernel::fsconfig(context.as_fd(), FsCommand::String(key, value))?;
    }
    kernel::fsconfig(context.as_fd(), FsCommand::Create)?;
    kernel::fsmount(context.as_fd(), attr)
}
