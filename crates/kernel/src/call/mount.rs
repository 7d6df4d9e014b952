//! The mount calls that work on descriptors.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;
use crate::Errno;

bitflags::bitflags! {
    /// Attributes of one mount (mount_setattr(2)), the same bits that fsmount(2) takes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct MountAttr: u64 {
        /// Nothing may be written through this mount.
        const RDONLY = 0x1;
        /// Set-user-id bits and file capabilities mean nothing.
        const NOSUID = 0x2;
        /// Device nodes can't be opened.
        const NODEV = 0x4;
        /// Nothing can be executed.
        const NOEXEC = 0x8;
        /// Access times are not kept.
        const NOATIME = 0x10;
        /// Access times are always kept.
        const STRICTATIME = 0x20;
        /// All bits about access times; only to clear them.
        const ATIME = 0x70;
        /// Access times of directories are not kept.
        const NODIRATIME = 0x80;
        /// Owners are shifted by a user namespace; set by [`crate::mount::idmap`].
        const IDMAP = 0x0010_0000;
        /// Symbolic links are not followed. KERNEL(5.14): EINVAL before.
        const NOSYMFOLLOW = 0x0020_0000;
    }
}

bitflags::bitflags! {
    /// Flags of [`open_tree`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct OpenTreeFlags: u32 {
        /// Make a detached copy of the mount.
        const CLONE = 0x1;
        /// Copy the mounts below it, too.
        const RECURSIVE = 0x8000;
        /// An empty path means the descriptor itself.
        const EMPTY_PATH = 0x1000;
        /// Do not follow a symbolic link at the end.
        const SYMLINK_NOFOLLOW = 0x100;
        /// Do not trigger automounts.
        const NO_AUTOMOUNT = 0x800;
    }
}

/// Propagation of mount and unmount events below a mount (mount_namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// No propagation.
    Private,
    /// Receives events and sends none.
    Slave,
    /// Both ways.
    Shared,
    /// No propagation, and the mount cannot be bind mounted.
    Unbindable,
}

/// The kernel's `struct mount_attr`, first version.
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    userns: u64,
}

impl Attributes {
    fn new(
        set: MountAttr,
        clear: MountAttr,
        propagation: Option<Propagation>,
        userns: Option<BorrowedFd<'_>>,
    ) -> Self {
        // The kernel takes the three kinds of access times as one field, which is cleared as a whole.
        let clear = match (set | clear).intersects(MountAttr::ATIME) {
            true => clear | MountAttr::ATIME,
            false => clear,
        };
        Self {
            set: set.bits(),
            clear: clear.bits(),
            propagation: match propagation {
                None => 0,
                Some(Propagation::Private) => libc::MS_PRIVATE,
                Some(Propagation::Slave) => libc::MS_SLAVE,
                Some(Propagation::Shared) => libc::MS_SHARED,
                Some(Propagation::Unbindable) => libc::MS_UNBINDABLE,
            },
            userns: userns.map_or(0, |fd| fd.as_raw_fd() as u64),
        }
    }
}

/// open_tree_attr(2): [`open_tree`] with attributes of the copy, as [`mount_setattr`] sets them. KERNEL(6.15).
pub fn open_tree_attr(
    dir: BorrowedFd<'_>,
    path: &CStr,
    flags: OpenTreeFlags,
    set: MountAttr,
    propagation: Propagation,
) -> Result<OwnedFd, Errno> {
    /// The number is the same on all machines.
    const SYS_OPEN_TREE_ATTR: libc::c_long = 467;
    let flags = flags.bits() | libc::O_CLOEXEC as u32;
    let attributes = Attributes::new(set, MountAttr::empty(), Some(propagation), None);
    // SAFETY: the path is a C string that outlives the call, the structure has the size that is passed.
    let fd = check(unsafe {
        libc::syscall(
            SYS_OPEN_TREE_ATTR,
            dir.as_raw_fd(),
            path.as_ptr(),
            flags,
            &attributes as *const Attributes,
            size_of::<Attributes>(),
        )
    })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// open_tree(2): a mount as a descriptor, or a detached copy of it. KERNEL(5.2).
pub fn open_tree(dir: BorrowedFd<'_>, path: &CStr, flags: OpenTreeFlags) -> Result<OwnedFd, Errno> {
    let flags = flags.bits() | libc::O_CLOEXEC as u32;
    // SAFETY: the path is a C string that outlives the call.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_open_tree, dir.as_raw_fd(), path.as_ptr(), flags)
    })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// move_mount(2): puts the mount that `mount` is the root of at `path` below `dir`; an empty path
/// means `dir` itself. KERNEL(5.2).
pub fn move_mount(mount: BorrowedFd<'_>, dir: BorrowedFd<'_>, path: &CStr) -> Result<(), Errno> {
    const F_EMPTY_PATH: u32 = 0x4;
    const T_EMPTY_PATH: u32 = 0x40;
    let flags = F_EMPTY_PATH | if path.is_empty() { T_EMPTY_PATH } else { 0 };
    // SAFETY: both paths are C strings that outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            dir.as_raw_fd(),
            path.as_ptr(),
            flags,
        )
    })
    .map(drop)
}

/// fsopen(2): a context in which a file system is configured. KERNEL(5.2).
pub fn fsopen(fstype: &CStr) -> Result<OwnedFd, Errno> {
    const FSOPEN_CLOEXEC: u32 = 1;
    // SAFETY: the name is a C string that outlives the call.
    let fd = check(unsafe { libc::syscall(libc::SYS_fsopen, fstype.as_ptr(), FSOPEN_CLOEXEC) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The commands of [`fsconfig`] (fsconfig(2)).
#[derive(Debug, Clone, Copy)]
pub enum FsCommand<'a> {
    /// A parameter without a value.
    Flag(&'a CStr),
    /// A parameter and its value, at most 255 bytes.
    String(&'a CStr, &'a CStr),
    /// A parameter with a descriptor as its value.
    Fd(&'a CStr, BorrowedFd<'a>),
    /// Make the superblock, or share one that exists.
    Create,
}

/// fsconfig(2): one parameter of a context, or its creation. KERNEL(5.2).
pub fn fsconfig(context: BorrowedFd<'_>, command: FsCommand<'_>) -> Result<(), Errno> {
    let null = std::ptr::null();
    let (code, key, value, aux) = match command {
        FsCommand::Flag(key) => (0, key.as_ptr(), null, 0),
        FsCommand::String(key, value) => (1, key.as_ptr(), value.as_ptr(), 0),
        FsCommand::Fd(key, fd) => (5, key.as_ptr(), null, fd.as_raw_fd()),
        FsCommand::Create => (6, null, null, 0),
    };
    // SAFETY: key and value are null or C strings that outlive the call.
    check(unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), code, key, value, aux) })
        .map(drop)
}

/// fsmount(2): a detached mount of the file system of a created context. KERNEL(5.2).
pub fn fsmount(context: BorrowedFd<'_>, attr: MountAttr) -> Result<OwnedFd, Errno> {
    const FSMOUNT_CLOEXEC: u32 = 1;
    // SAFETY: only integers are passed.
    let fd = check(unsafe {
        libc::syscall(
            libc::SYS_fsmount,
            context.as_raw_fd(),
            FSMOUNT_CLOEXEC,
            attr.bits() as libc::c_uint,
        )
    })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// mount_setattr(2) on the mount that `mount` is the root of. KERNEL(5.12).
///
/// If `set` contains a policy for access times, the old one is cleared, as the kernel requires.
pub fn mount_setattr(
    mount: BorrowedFd<'_>,
    recursive: bool,
    set: MountAttr,
    clear: MountAttr,
    propagation: Option<Propagation>,
    userns: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let attributes = Attributes::new(set, clear, propagation, userns);
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a C string, the structure has the size that is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &attributes as *const Attributes,
            size_of::<Attributes>(),
        )
    })
    .map(drop)
}

/// umount2(2) with MNT_DETACH: removed from the tree now, released when it is no longer in use.
pub fn umount_detach(path: &CStr) -> Result<(), Errno> {
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe {
        libc::syscall(libc::SYS_umount2, path.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW)
    })
    .map(drop)
}

/// The same for what a magic link of procfs leads to.
pub fn umount_detach_what(link: &CStr) -> Result<(), Errno> {
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::syscall(libc::SYS_umount2, link.as_ptr(), libc::MNT_DETACH) }).map(drop)
}
