//! Mounts, by descriptor only.
//!
//! A mount is created detached ([`FsContext`], [`clone_tree`], [`overlay`]), changed while no other
//! process can see it ([`set_attr`], [`idmap`]) and then attached in one step. A detached mount
//! ends with its descriptor, so half-built trees need no cleaning up.
//!
//! **Kernel facts relied on.** A mount must be detached and never have been attached when it is
//! idmapped. An overlay makes private copies of its layers, so the descriptors passed for them may
//! be closed. KERNEL(6.13) takes layers by descriptor, KERNEL(6.15) also from detached mounts;
//! before, [`overlay`] uses paths in a private mount namespace.

use std::cmp;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags, ResolveFlags, major, minor};

use crate::Errno;
use crate::call::{self, CloneFlags, FsCommand};
use crate::error::{CallError, Explain, Result};

pub use crate::call::{MountAttr, OpenTreeFlags, Propagation};

/// The C string of something from outside; EINVAL when it contains a NUL byte.
fn c_string(bytes: &[u8], call: &'static str) -> Result<CString> {
    CString::new(bytes).map_err(|_| {
        CallError::new(call, String::from_utf8_lossy(bytes).into_owned(), libc::EINVAL)
    })
}

/// A file system that is being configured (fsopen(2)). KERNEL(5.2).
#[derive(Debug)]
pub struct FsContext {
    fd: OwnedFd,
    fstype: String,
}

impl FsContext {
    /// A context for the type of file system. ENODEV when the kernel has no such type.
    pub fn open(fstype: &str) -> Result<Self> {
        let name = c_string(fstype.as_bytes(), "fsopen")?;
        let fd = call::fsopen(&name).explain("fsopen", || format!("{fstype:?}"))?;
        Ok(Self { fd, fstype: fstype.to_owned() })
    }

    fn config(&self, command: FsCommand<'_>) -> Result<()> {
        call::fsconfig(self.fd.as_fd(), command).map_err(|errno| {
            let what = match command {
                FsCommand::Flag(key) => format!("{}, {key:?}", self.fstype),
                FsCommand::String(key, value) => format!("{}, {key:?}, {value:?}", self.fstype),
                FsCommand::Fd(key, fd) => {
                    format!("{}, {key:?}, descriptor {}", self.fstype, fd.as_raw_fd())
                }
                FsCommand::Create => format!("{}, create", self.fstype),
            };
            CallError::new("fsconfig", what, errno.raw_os_error()).with_note(self.messages())
        })
    }

    /// Returns the messages of the file system about a failure, such as `overlay: missing
    /// 'lowerdir'`.
    fn messages(&self) -> String {
        let mut found: Vec<String> = Vec::new();
        let mut buffer = [0u8; 1024];
        while let Ok(length) = rustix::io::read(&self.fd, &mut buffer) {
            if length == 0 || found.len() == 8 {
                break;
            }
            let text = String::from_utf8_lossy(&buffer[..length]);
            found.push(text.trim_start_matches(['e', 'w', 'i']).trim().to_owned());
        }
        found.join("; ")
    }

    /// Sets a parameter. EINVAL if the file system does not have it, or the value is longer than
    /// 255 bytes.
    pub fn set_string(&self, key: &str, value: &str) -> Result<()> {
        self.set_bytes(key, value.as_bytes())
    }

    fn set_bytes(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = c_string(key.as_bytes(), "fsconfig")?;
        let value = c_string(value, "fsconfig")?;
        self.config(FsCommand::String(&key, &value))
    }

    /// A parameter that has no value.
    pub fn set_flag(&self, key: &str) -> Result<()> {
        let key = c_string(key.as_bytes(), "fsconfig")?;
        self.config(FsCommand::Flag(&key))
    }

    /// Sets a parameter with a descriptor as its value.
    pub fn set_fd(&self, key: &str, fd: BorrowedFd<'_>) -> Result<()> {
        let key = c_string(key.as_bytes(), "fsconfig")?;
        self.config(FsCommand::Fd(&key, fd))
    }

    /// Makes the file system and mounts it, detached.
    pub fn create(self, attr: MountAttr) -> Result<OwnedFd> {
        self.config(FsCommand::Create)?;
        self.mount(attr)
    }

    /// Mounts a file system that was made, detached.
    fn mount(&self, attr: MountAttr) -> Result<OwnedFd> {
        call::fsmount(self.fd.as_fd(), attr)
            .explain("fsmount", || format!("{}, {attr:?}", self.fstype))
    }
}

/// LIMIT: file systems that [`fill_numbers`] makes for a moment, some 25 us each.
const FILLERS_MAX: u32 = 64;

/// Whether `device` can be made the lowest free number, where `lowest` is it now.
pub fn is_fillable(lowest: u64, device: u64) -> bool {
    let are_without_device = major(lowest) == 0 && major(device) == 0;
    let below = minor(device).checked_sub(minor(lowest));
    are_without_device && below.is_some_and(|below| (1..FILLERS_MAX).contains(&below))
}

/// A file system that uses up a number (st_dev).
#[derive(Debug)]
enum Filler {
    Made(FsContext),
    /// Only a mount shows its number. The end of the mount waits for an RCU grace period.
    Mounted(#[expect(dead_code, reason = "held, not read")] OwnedFd, u64),
}

impl Filler {
    fn new() -> Result<Self> {
        let context = FsContext::open("ramfs")?;
        context.config(FsCommand::Create)?;
        Ok(Self::Made(context))
    }

    fn number(&mut self) -> Result<u64> {
        if let Self::Made(context) = self {
            let mount = context.mount(MountAttr::empty())?;
            let number = rustix::fs::fstat(&mount).explain("fstat", || "ramfs".into())?.st_dev;
            *self = Self::Mounted(mount, number);
        }
        match self {
            Self::Mounted(_, number) => Ok(*number),
            Self::Made(_) => Ok(0),
        }
    }
}

/// Numbers (st_dev) that are in use as long as this exists.
#[derive(Debug)]
pub struct Filled {
    #[expect(dead_code, reason = "held, not read")]
    fillers: Vec<Filler>,
}

/// Uses the free numbers from `lowest` up to `device`, so that the next file system without a device of its own gets
/// the number `device`: the kernel takes the lowest free one (`get_anon_bdev()` in fs/super.c).
///
/// `None` if the number is in use, or too many numbers are free below it ([`is_fillable`]). Others take numbers at the
/// same time.
pub fn fill_numbers(lowest: u64, device: u64) -> Result<Option<Filled>> {
    if !is_fillable(lowest, device) {
        return Ok(None);
    }
    let count = minor(device) - minor(lowest) + 1;
    let fillers: Result<Vec<Filler>> = (0..count).map(|_| Filler::new()).collect();
    let mut fillers = fillers?;
    // Their numbers rise.
    let (mut low, mut high) = (0, fillers.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match fillers[middle].number()?.cmp(&device) {
            cmp::Ordering::Less => low = middle + 1,
            cmp::Ordering::Greater => high = middle,
            cmp::Ordering::Equal => {
                fillers.truncate(middle);
                return Ok(Some(Filled { fillers }));
            }
        }
    }
    Ok(None)
}

/// open_tree(2). KERNEL(5.2). The descriptor is O_PATH and closed on exec.
pub fn open_tree(
    dir: BorrowedFd<'_>,
    path: impl AsRef<Path>,
    flags: OpenTreeFlags,
) -> Result<OwnedFd> {
    let path = path.as_ref();
    let name = c_string(path.as_os_str().as_bytes(), "open_tree")?;
    let flags = if name.is_empty() { flags | OpenTreeFlags::EMPTY_PATH } else { flags };
    call::open_tree(dir, &name, flags)
        .explain("open_tree", || format!("{}, {path:?}, {flags:?}", dir.as_raw_fd()))
}

/// A detached copy of the mount at `path`, rooted there; an empty path means `dir` itself. The copy
/// is private: open_tree alone leaves it in the peer group of a shared mount, as all mounts of a
/// host under systemd are, and what is later mounted on the copy would appear on the host.
///
/// EINVAL when it is in another mount namespace or, KERNEL(6.15) before, itself detached.
pub fn clone_tree(dir: BorrowedFd<'_>, path: impl AsRef<Path>, recursive: bool) -> Result<OwnedFd> {
    let tree = clone_tree_in_group(dir, path, recursive)?;
    set_propagation(tree.as_fd(), false)?;
    Ok(tree)
}

/// [`clone_tree`] of one mount with these attributes on top of its own, in one call less. KERNEL(6.15): in two less.
pub fn clone_with(dir: BorrowedFd<'_>, path: impl AsRef<Path>, set: MountAttr) -> Result<OwnedFd> {
    static IS_MISSING: AtomicBool = AtomicBool::new(false);
    let path = path.as_ref();
    if !IS_MISSING.load(Ordering::Relaxed) {
        let name = c_string(path.as_os_str().as_bytes(), "open_tree_attr")?;
        let mut flags = OpenTreeFlags::CLONE | OpenTreeFlags::NO_AUTOMOUNT;
        flags.set(OpenTreeFlags::EMPTY_PATH, name.is_empty());
        match call::open_tree_attr(dir, &name, flags, set, Propagation::Private) {
            // A filter around this program may not know the call.
            Err(Errno::NOSYS | Errno::PERM) => IS_MISSING.store(true, Ordering::Relaxed),
            tree => {
                let what = || format!("{}, {path:?}, set {set:?}, private", dir.as_raw_fd());
                return tree.explain("open_tree_attr", what);
            }
        }
    }
    let tree = clone_tree_in_group(dir, path, false)?;
    let (none, private) = (MountAttr::empty(), Some(Propagation::Private));
    call::mount_setattr(tree.as_fd(), false, set, none, private, None)
        .explain("mount_setattr", || format!("{}, set {set:?}, private", tree.as_raw_fd()))?;
    Ok(tree)
}

/// [`clone_tree`], but the copy stays in the peer group of its original (mount_namespaces(7)).
pub fn clone_tree_in_group(
    dir: BorrowedFd<'_>,
    path: impl AsRef<Path>,
    recursive: bool,
) -> Result<OwnedFd> {
    let mut flags = OpenTreeFlags::CLONE | OpenTreeFlags::NO_AUTOMOUNT;
    flags.set(OpenTreeFlags::RECURSIVE, recursive);
    open_tree(dir, path, flags)
}

/// A detached, private copy of all mounts of a mount namespace, from its root.
///
/// A mount can only be copied from within its namespace, so a thread enters it for that and ends there.
/// EPERM without CAP_SYS_ADMIN over the namespace, EINVAL when it is of another kind.
pub fn clone_namespace(namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    let copy = || {
        // The root and the working directory of a thread, without which it enters no mount namespace.
        crate::process::unshare(CloneFlags::FS)?;
        call::setns(namespace, CloneFlags::NEWNS)
            .explain("setns", || format!("{}, NEWNS", namespace.as_raw_fd()))?;
        clone_tree(rustix::fs::CWD, "/", true)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("mounts".into()).spawn_scoped(scope, copy);
        match thread.explain("clone", || "a thread".into())?.join() {
            Ok(copied) => copied,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Attaches detached mounts over files of procfs and sysfs in another mount namespace, at paths from its root. A place
/// that is not there, or is of another file system, is left out; no link is followed.
///
/// A thread enters the namespace for that and ends there. EPERM without CAP_SYS_ADMIN over the namespace.
pub fn cover_in(namespace: BorrowedFd<'_>, mounts: &[(OwnedFd, &str)]) -> Result<()> {
    const KERNEL_FILES: [u64; 2] = [0x9fa0, 0x6265_6572];
    let cover = || -> Result<()> {
        crate::process::unshare(CloneFlags::FS)?;
        call::setns(namespace, CloneFlags::NEWNS)
            .explain("setns", || format!("{}, NEWNS", namespace.as_raw_fd()))?;
        for (mount, path) in mounts {
            let how = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let place = rustix::fs::openat2(rustix::fs::CWD, *path, flags, Mode::empty(), how);
            let place = match place {
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                place => place.explain("openat2", || (*path).to_owned())?,
            };
            let of = rustix::fs::fstatfs(&place).explain("fstatfs", || (*path).to_owned())?;
            if KERNEL_FILES.contains(&(of.f_type as u64)) {
                attach(mount.as_fd(), place.as_fd(), "")?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("mounts".into()).spawn_scoped(scope, cover);
        match thread.explain("clone", || "a thread".into())?.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// move_mount(2): puts a detached mount at `path` below `target`; an empty path means `target`
/// itself. The path is followed like any other: [`crate::resolve`] is for those from outside.
pub fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>, path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let name = c_string(path.as_os_str().as_bytes(), "move_mount")?;
    call::move_mount(mount, target, &name).explain("move_mount", || {
        format!("{}, {}, {path:?}", mount.as_raw_fd(), target.as_raw_fd())
    })
}

/// mount_setattr(2): attributes of the mount that the descriptor is the root of. KERNEL(5.12).
pub fn set_attr(
    mount: BorrowedFd<'_>,
    recursive: bool,
    set: MountAttr,
    clear: MountAttr,
) -> Result<()> {
    call::mount_setattr(mount, recursive, set, clear, None, None)
        .explain("mount_setattr", || format!("{}, set {set:?}, clear {clear:?}", mount.as_raw_fd()))
}

/// mount_setattr(2), of this mount and all below it. With `slave` they receive events from the
/// mounts that they are copies of, otherwise none; they send none in either case. KERNEL(5.12).
pub fn set_propagation(mount: BorrowedFd<'_>, slave: bool) -> Result<()> {
    let none = MountAttr::empty();
    let propagation = if slave { Propagation::Slave } else { Propagation::Private };
    call::mount_setattr(mount, true, none, none, Some(propagation), None)
        .explain("mount_setattr", || format!("{}, {propagation:?}", mount.as_raw_fd()))
}

/// mount_setattr(2), of this mount and, if `recursive`, all below it: any kind of propagation
/// (mount_namespaces(7)). KERNEL(5.12).
pub fn spread(mount: BorrowedFd<'_>, propagation: Propagation, recursive: bool) -> Result<()> {
    let none = MountAttr::empty();
    call::mount_setattr(mount, recursive, none, none, Some(propagation), None)
        .explain("mount_setattr", || format!("{}, {propagation:?}", mount.as_raw_fd()))
}

/// mount_setattr(MOUNT_ATTR_IDMAP): owners of files are shifted by the user namespace: what is
/// stored as id N is seen as the id that N is mapped to. KERNEL(5.12), and a file system that can.
///
/// EINVAL when the file system can't, or the mount was attached or mapped before.
pub fn idmap(mount: BorrowedFd<'_>, userns: BorrowedFd<'_>, recursive: bool) -> Result<()> {
    let none = MountAttr::empty();
    call::mount_setattr(mount, recursive, MountAttr::IDMAP, none, None, Some(userns))
        .explain("mount_setattr", || format!("{}, IDMAP", mount.as_raw_fd()))
}

/// umount2(MNT_DETACH | UMOUNT_NOFOLLOW): takes the top mount at `path` out of the tree.
pub fn detach(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let name = c_string(path.as_os_str().as_bytes(), "umount2")?;
    call::umount_detach(&name).explain("umount2", || format!("{path:?}, MNT_DETACH"))
}

/// One lower layer of an [`overlay`]: a directory.
#[derive(Debug, Clone, Copy)]
pub struct OverlayLayer<'a> {
    /// The directory: of an attached mount, or the root of a detached one.
    pub fd: BorrowedFd<'a>,
    /// Its files are only reached by redirects from the layers above. KERNEL(6.5).
    pub data_only: bool,
}

/// A detached overlay of `lower` (topmost first, data-only layers last) and, unless it is to be
/// read-only, a pair of upper and work directory.
///
/// The descriptors may be closed afterwards. Options are overlay's own, such as
/// `("metacopy", Some("on"))`.
///
/// KERNEL(6.15): before, layers are attached in a mount namespace made for that and passed as
/// paths. The fallback **consumes** layers that are detached mounts (they end when this returns),
/// requires upper and work to be entries of one directory, and costs the copy of a mount namespace.
///
/// Errors: EINVAL for unknown options; ESTALE if `index=on` finds an upper that was used with
/// another lower.
pub fn overlay(
    lower: &[OverlayLayer<'_>],
    upper_work: Option<(BorrowedFd<'_>, BorrowedFd<'_>)>,
    options: &[(&str, Option<&str>)],
) -> Result<OwnedFd> {
    match overlay_by_descriptor(lower, upper_work, options) {
        // EBADF: before 6.13 no option takes a descriptor, and O_PATH descriptors do not even reach
        // overlay. EINVAL has several causes that the kernel does not distinguish. If the fallback
        // fails too, its error is returned, because it describes the fault in the request.
        Err(error) if matches!(error.errno(), libc::EINVAL | libc::EBADF) => {
            overlay_by_path(lower, upper_work, options, copy_of)
        }
        other => other,
    }
}

fn overlay_by_descriptor(
    lower: &[OverlayLayer<'_>],
    upper_work: Option<(BorrowedFd<'_>, BorrowedFd<'_>)>,
    options: &[(&str, Option<&str>)],
) -> Result<OwnedFd> {
    let context = FsContext::open("overlay")?;
    for layer in lower {
        context.set_fd(if layer.data_only { "datadir+" } else { "lowerdir+" }, layer.fd)?;
    }
    if let Some((upper, work)) = upper_work {
        context.set_fd("upperdir", upper)?;
        context.set_fd("workdir", work)?;
    }
    set_options(&context, options)?;
    context.create(MountAttr::empty())
}

fn set_options(context: &FsContext, options: &[(&str, Option<&str>)]) -> Result<()> {
    for (key, value) in options {
        match value {
            Some(value) => context.set_string(key, value)?,
            None => context.set_flag(key)?,
        }
    }
    Ok(())
}

/// A layer as the second way wants it: a detached mount that can be attached elsewhere.
enum Movable<'a> {
    Copy(OwnedFd),
    Borrowed(BorrowedFd<'a>),
}

impl Movable<'_> {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Copy(fd) => fd.as_fd(),
            Self::Borrowed(fd) => *fd,
        }
    }
}

/// KERNEL(6.15): the way for kernels before. A thread with a mount namespace of its own attaches
/// every layer in an empty root and names them by short paths; all of that ends with the thread,
/// only the overlay's private copies of the layers stay.
fn overlay_by_path(
    lower: &[OverlayLayer<'_>],
    upper_work: Option<(BorrowedFd<'_>, BorrowedFd<'_>)>,
    options: &[(&str, Option<&str>)],
    copy: impl Fn(BorrowedFd<'_>) -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    // ORDER: copies are made here, because a mount can only be copied from within its namespace.
    // A detached mount can't be copied (before 6.15): it is moved itself.
    let mut layers = Vec::with_capacity(lower.len());
    for layer in lower {
        layers.push(match copy(layer.fd) {
            Ok(copy) => Movable::Copy(copy),
            Err(error) if error.errno() == libc::EINVAL => Movable::Borrowed(layer.fd),
            Err(error) => return Err(error),
        });
    }
    let volume = upper_work.map(|(upper, work)| volume_of(upper, work, copy)).transpose()?;
    std::thread::scope(|scope| {
        let built = std::thread::Builder::new()
            .name("overlay".into())
            .spawn_scoped(scope, || overlay_in_own_namespace(lower, &layers, &volume, options))
            .explain("clone", || "a thread".into())?;
        match built.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// A copy of a layer, as a mount of its own.
fn copy_of(dir: BorrowedFd<'_>) -> Result<OwnedFd> {
    copy_or_mount_again(dir, clone_tree(dir, "", false))
}

fn copy_or_mount_again(dir: BorrowedFd<'_>, copy: Result<OwnedFd>) -> Result<OwnedFd> {
    match &copy {
        Err(e) if e.errno() == libc::EINVAL && !is_mount_root(dir) => {
            mounted_again(dir).map_or(copy, |mount| part_of(mount, dir))
        }
        _ => copy,
    }
}

/// Whether a directory is the root of a mount. KERNEL(5.8).
fn is_mount_root(dir: BorrowedFd<'_>) -> bool {
    let (flags, mask) = (rustix::fs::AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::empty());
    let stat = rustix::fs::statx(dir, "", flags, mask);
    stat.is_ok_and(|it| it.stx_attributes.contains(rustix::fs::StatxAttributes::MOUNT_ROOT))
}

/// KERNEL(6.15): before, no part of a detached mount can be copied. The ext4 of a loop device (the drive of a
/// container) is mounted once more instead: one more mount of the same file system. `None` for every other one.
fn mounted_again(dir: BorrowedFd<'_>) -> Option<OwnedFd> {
    const LOOP_MAJOR: u32 = 7;
    let device = rustix::fs::fstat(dir).ok()?.st_dev;
    if rustix::fs::major(device) != LOOP_MAJOR {
        return None;
    }
    let context = FsContext::open("ext4").ok()?;
    context.set_string("source", &format!("/dev/loop{}", rustix::fs::minor(device))).ok()?;
    context.create(MountAttr::empty()).ok()
}

/// An entry of the root of a mount, given as a directory, as a mount of its own. KERNEL(6.15): before, it can only be
/// copied from a mount that is attached, here in a mount namespace of a thread that ends.
fn part_of(mount: OwnedFd, dir: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(&mount, ".", flags, Mode::empty())
        .explain("openat", || "the root of a layer".into())?;
    let name = name_in(root.as_fd(), dir)?;
    let copy = || {
        let attached = private_root()?;
        attach(mount.as_fd(), attached.as_fd(), "")?;
        clone_tree(mount.as_fd(), std::ffi::OsStr::from_bytes(name.as_bytes()), false)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("layer".into()).spawn_scoped(scope, copy);
        match thread.explain("clone", || "a thread".into())?.join() {
            Ok(copied) => copied,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Gives the calling thread a mount namespace of its own whose root is an empty tmpfs, which is returned.
fn private_root() -> Result<OwnedFd> {
    crate::process::unshare(CloneFlags::NEWNS)?;
    let old_root =
        rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .explain("open", || "/".into())?;
    // ORDER: no later mount below may propagate to the namespace that this one was copied from.
    set_propagation(old_root.as_fd(), false)?;
    let root = FsContext::open("tmpfs")?.create(MountAttr::empty())?;
    attach(root.as_fd(), old_root.as_fd(), "")?;
    Ok(root)
}

/// The name of a directory in its parent, which overlay can parse.
fn name_in(parent: BorrowedFd<'_>, wanted: BorrowedFd<'_>) -> Result<CString> {
    let wanted = rustix::fs::fstat(wanted).explain("fstat", || "a layer".into())?;
    let entries = rustix::fs::Dir::read_from(parent).explain("getdents64", || "a volume".into())?;
    for entry in entries {
        let entry = entry.explain("getdents64", || "a volume".into())?;
        let name = entry.file_name();
        if name == c"." || name == c".." || entry.ino() != wanted.st_ino {
            continue;
        }
        let found = rustix::fs::statat(parent, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
            .explain("fstatat", || format!("{name:?}"))?;
        let same = (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino);
        if same && !name.to_bytes().iter().any(|b| b"\\:,".contains(b)) {
            return Ok(name.to_owned());
        }
    }
    let arguments = "upper or work has no usable name in its directory".to_owned();
    Err(CallError::new("overlay", arguments, libc::EINVAL))
}

/// The common parent of upper and work, copied as one mount, and their names in it: overlay wants
/// both on the same mount.
struct Volume {
    mount: OwnedFd,
    upper: CString,
    work: CString,
}

fn volume_of(
    upper: BorrowedFd<'_>,
    work: BorrowedFd<'_>,
    copy: impl Fn(BorrowedFd<'_>) -> Result<OwnedFd>,
) -> Result<Volume> {
    let open_parent = |fd: BorrowedFd<'_>| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(fd, "..", flags, Mode::empty())
            .explain("openat", || format!("{}, \"..\"", fd.as_raw_fd()))
    };
    let stat =
        |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).explain("fstat", || fd.as_raw_fd().to_string());
    let same =
        |a: &rustix::fs::Stat, b: &rustix::fs::Stat| (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino);
    let parent = open_parent(upper)?;
    if !same(&stat(parent.as_fd())?, &stat(open_parent(work)?.as_fd())?) {
        let arguments = "upper and work are not entries of one directory".to_owned();
        return Err(CallError::new("overlay", arguments, libc::EINVAL));
    }
    let (upper, work) = (name_in(parent.as_fd(), upper)?, name_in(parent.as_fd(), work)?);
    let mount = match copy(parent.as_fd()) {
        // Upper and work are never idmapped, so another mount of their file system is as good.
        Err(e) if e.errno() == libc::EINVAL => mounted_again(parent.as_fd()).ok_or(e)?,
        copy => copy?,
    };
    Ok(Volume { mount, upper, work })
}

fn overlay_in_own_namespace(
    lower: &[OverlayLayer<'_>],
    layers: &[Movable<'_>],
    volume: &Option<Volume>,
    options: &[(&str, Option<&str>)],
) -> Result<OwnedFd> {
    let root = private_root()?;
    let make = |name: &str| {
        rustix::fs::mkdirat(&root, name, Mode::RWXU).explain("mkdirat", || name.to_owned())
    };
    for index in 0..layers.len() {
        make(&index.to_string())?;
    }
    make("v")?;
    rustix::process::fchdir(&root).explain("fchdir", || "the new root".into())?;
    rustix::process::chroot(".").explain("chroot", || ".".into())?;

    // `lowerdir` as one string is understood by every kernel: layers by ":", data-only by "::".
    let mut names = String::new();
    for (index, (layer, movable)) in lower.iter().zip(layers).enumerate() {
        attach(movable.fd(), root.as_fd(), index.to_string())?;
        let separator = match (index, layer.data_only) {
            (0, _) => "",
            (_, true) => "::",
            (_, false) => ":",
        };
        names.push_str(&format!("{separator}{index}"));
    }
    let context = FsContext::open("overlay")?;
    if names.len() <= 255 {
        context.set_string("lowerdir", &names)?;
    } else {
        // KERNEL(6.7): more than some 70 layers only one by one.
        for (index, layer) in lower.iter().enumerate() {
            let key = if layer.data_only { "datadir+" } else { "lowerdir+" };
            context.set_string(key, &index.to_string())?;
        }
    }
    if let Some(volume) = volume {
        attach(volume.mount.as_fd(), root.as_fd(), "v")?;
        let path = |name: &CString| [b"v/", name.as_bytes()].concat();
        context.set_bytes("upperdir", &path(&volume.upper))?;
        context.set_bytes("workdir", &path(&volume.work))?;
    }
    set_options(&context, options)?;
    context.create(MountAttr::empty())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown};

    use rustix::fs::{AtFlags, XattrFlags};

    use super::*;
    use crate::namespace;

    const BASE: u32 = 700_000;
    const OPTIONS: &[(&str, Option<&str>)] = &[("metacopy", Some("on"))];

    /// An image layer with a stub as its only file, the object that the stub redirects to, and a
    /// volume.
    struct Scratch {
        dir: tempfile::TempDir,
        userns: OwnedFd,
    }

    impl Scratch {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["meta", "objects", "volume/upper", "volume/work"] {
                fs::create_dir_all(dir.path().join(name)).unwrap();
            }
            fs::write(dir.path().join("objects/ab"), "content").unwrap();
            let stub = fs::File::create(dir.path().join("meta/file")).unwrap();
            stub.set_len(7).unwrap();
            let set = |name, value: &[u8]| {
                rustix::fs::fsetxattr(&stub, name, value, XattrFlags::empty()).unwrap();
            };
            set("trusted.overlay.metacopy", b"");
            set("trusted.overlay.redirect", b"/ab");
            for name in ["volume/upper", "volume/work"] {
                chown(dir.path().join(name), Some(BASE), Some(BASE)).unwrap();
            }
            let map = format!("0 {BASE} 32768\n");
            Self { userns: namespace::new_user(&map, &map).unwrap(), dir }
        }

        fn open(&self, name: &str) -> OwnedFd {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(self.dir.path().join(name), flags, Mode::empty()).unwrap()
        }

        /// The image layer as a container gets it: a detached mount, idmapped.
        fn idmapped(&self) -> OwnedFd {
            let layer = clone_tree(self.open("meta").as_fd(), "", false).unwrap();
            idmap(layer.as_fd(), self.userns.as_fd(), false).unwrap();
            layer
        }

        /// Checks the properties that every overlay made of this must have.
        fn check(&self, root: &OwnedFd) {
            let stat = rustix::fs::statat(root, "file", AtFlags::empty()).unwrap();
            assert_eq!((stat.st_uid, stat.st_size), (BASE, 7));
            let open = |flags| {
                let fd = rustix::fs::openat(root, "file", flags, Mode::empty()).unwrap();
                fs::File::from(fd)
            };
            assert_eq!(std::io::read_to_string(open(OFlags::RDONLY)).unwrap(), "content");
            std::io::Write::write_all(&mut open(OFlags::WRONLY | OFlags::APPEND), b"+").unwrap();
            let upper = self.dir.path().join("volume/upper/file");
            assert_eq!(fs::read_to_string(&upper).unwrap(), "content+");
            assert_eq!(upper.metadata().unwrap().uid(), BASE);
            assert_eq!(fs::read_to_string(self.dir.path().join("objects/ab")).unwrap(), "content");
        }
    }

    fn layers<'a>(meta: &'a OwnedFd, objects: &'a OwnedFd) -> [OverlayLayer<'a>; 2] {
        [
            OverlayLayer { fd: meta.as_fd(), data_only: false },
            OverlayLayer { fd: objects.as_fd(), data_only: true },
        ]
    }

    fn mount_count() -> usize {
        fs::read_to_string("/proc/thread-self/mountinfo").unwrap().lines().count()
    }

    #[test]
    fn root_overlay_over_an_idmapped_layer() {
        let scratch = Scratch::new();
        let (meta, objects) = (scratch.idmapped(), scratch.open("objects"));
        let (upper, work) = (scratch.open("volume/upper"), scratch.open("volume/work"));
        let pair = Some((upper.as_fd(), work.as_fd()));
        scratch.check(&overlay(&layers(&meta, &objects), pair, OPTIONS).unwrap());
    }

    #[test]
    fn root_overlay_by_descriptor_over_an_idmapped_layer() {
        let uname = rustix::system::uname();
        let mut version = uname.release().to_str().unwrap().split(['.', '-']);
        let mut next = || version.next().and_then(|part| part.parse().ok()).unwrap_or(0u32);
        if (next(), next()) < (6, 15) {
            eprintln!("SKIPPED: Linux before 6.15 makes no overlay of detached layers");
            return;
        }
        let scratch = Scratch::new();
        let (meta, objects) = (scratch.idmapped(), scratch.open("objects"));
        let (upper, work) = (scratch.open("volume/upper"), scratch.open("volume/work"));
        let pair = Some((upper.as_fd(), work.as_fd()));
        let root = overlay_by_descriptor(&layers(&meta, &objects), pair, OPTIONS).unwrap();
        scratch.check(&root);
    }

    #[test]
    fn root_overlay_by_path_over_an_idmapped_layer() {
        let scratch = Scratch::new();
        let (meta, objects) = (scratch.idmapped(), scratch.open("objects"));
        let (upper, work) = (scratch.open("volume/upper"), scratch.open("volume/work"));
        let pair = Some((upper.as_fd(), work.as_fd()));
        let before = mount_count();
        // As kernels before 6.15 answer: what is detached can't be copied.
        let detached = meta.as_fd().as_raw_fd();
        let copy = |fd: BorrowedFd<'_>| match fd.as_raw_fd() == detached {
            true => Err(CallError::new("open_tree", String::new(), libc::EINVAL)),
            false => clone_tree(fd, "", false),
        };
        let root = overlay_by_path(&layers(&meta, &objects), pair, OPTIONS, copy).unwrap();
        assert_eq!(mount_count(), before, "nothing of it shows outside of its namespace");
        scratch.check(&root);
    }

    /// Upper and work on the drive of a container: a detached mount of a loop device. A second overlay has the upper as
    /// one of its layers, as commands look at a running container.
    #[test]
    fn root_overlay_by_path_over_a_drive() {
        let scratch = Scratch::new();
        let image = scratch.dir.path().join("drive");
        let file = fs::File::create_new(&image).unwrap();
        file.set_len(16 << 20).unwrap();
        crate::ext4::make(&file, None).unwrap();
        assert!(crate::loop_device::lock(&file).unwrap());
        let device = crate::loop_device::attach(&file, "test").unwrap();
        let options = crate::ext4::MountOptions { discard: true, volatile: true };
        let drive = crate::ext4::mount(device.path(), options).unwrap();
        drop(device);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let [upper, work] = ["upper", "work"].map(|name| {
            rustix::fs::mkdirat(&drive, name, Mode::RWXU).unwrap();
            rustix::fs::openat(&drive, name, flags, Mode::empty()).unwrap()
        });
        fs::write(scratch.dir.path().join("volume/upper/below"), "below").unwrap();
        let below = scratch.open("volume/upper");
        let is_drive =
            |fd: BorrowedFd<'_>| rustix::fs::major(rustix::fs::fstat(fd).unwrap().st_dev) == 7;
        // As kernels before 6.15 answer.
        let copy = |fd: BorrowedFd<'_>| match is_drive(fd) {
            true => {
                let refused = CallError::new("open_tree", String::new(), libc::EINVAL);
                let is_root = is_mount_root(fd);
                let copied = copy_or_mount_again(fd, Err(refused));
                assert_eq!(copied.is_err(), is_root, "the root is left to the caller");
                copied
            }
            false => clone_tree(fd, "", false),
        };
        let before = mount_count();
        let lower = [OverlayLayer { fd: below.as_fd(), data_only: false }];
        let pair = Some((upper.as_fd(), work.as_fd()));
        let root = overlay_by_path(&lower, pair, OPTIONS, copy).unwrap();
        let create = OFlags::CREATE | OFlags::WRONLY;
        rustix::fs::openat(&root, "new", create, Mode::RUSR).unwrap();
        rustix::fs::statat(&root, "below", AtFlags::empty()).unwrap();
        rustix::fs::statat(&upper, "new", AtFlags::empty()).expect("it is on the drive");

        let upper = OverlayLayer { fd: upper.as_fd(), data_only: false };
        let layers = [upper, lower[0]];
        let look = overlay_by_path(&layers, None, OPTIONS, copy).unwrap();
        for name in ["new", "below"] {
            rustix::fs::statat(&look, name, AtFlags::empty()).unwrap();
        }
        assert_eq!(mount_count(), before, "nothing of it shows outside of its namespace");
    }

    #[test]
    fn root_overlay_by_path_leaves_attached_layers_as_they_are() {
        let scratch = Scratch::new();
        let (meta, objects) = (scratch.open("meta"), scratch.open("objects"));
        let copy = |fd: BorrowedFd<'_>| clone_tree(fd, "", false);
        for _ in 0..2 {
            let lower = layers(&meta, &objects);
            let root = overlay_by_path(&lower, None, OPTIONS, copy).unwrap();
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let error = rustix::fs::openat(&root, "file", flags, Mode::empty()).unwrap_err();
            assert_eq!(error, crate::Errno::ROFS);
        }
    }

    #[test]
    fn root_overlay_of_many_layers_both_ways() {
        let scratch = Scratch::new();
        let mut dirs = Vec::new();
        for index in 0..120 {
            let name = format!("layers/{index}");
            fs::create_dir_all(scratch.dir.path().join(&name)).unwrap();
            fs::write(scratch.dir.path().join(&name).join(index.to_string()), "").unwrap();
            dirs.push(scratch.open(&name));
        }
        let lower: Vec<_> =
            dirs.iter().map(|dir| OverlayLayer { fd: dir.as_fd(), data_only: false }).collect();
        let copy = |fd: BorrowedFd<'_>| clone_tree(fd, "", false);
        for root in [overlay(&lower, None, &[]), overlay_by_path(&lower, None, &[], copy)] {
            let root = root.unwrap();
            for index in [0, 69, 119] {
                rustix::fs::statat(&root, index.to_string(), AtFlags::empty()).unwrap();
            }
        }
    }

    #[test]
    fn root_upper_and_work_in_two_directories_are_refused_by_path() {
        let scratch = Scratch::new();
        let (meta, objects) = (scratch.idmapped(), scratch.open("objects"));
        let (upper, work) = (scratch.open("volume/upper"), scratch.open("meta"));
        let pair = Some((upper.as_fd(), work.as_fd()));
        let copy = |fd: BorrowedFd<'_>| clone_tree(fd, "", false);
        let error = overlay_by_path(&layers(&meta, &objects), pair, OPTIONS, copy).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid);
        assert!(error.to_string().contains("one directory"), "{error}");
    }

    #[test]
    fn root_wrong_option_error_contains_the_kernel_message() {
        let scratch = Scratch::new();
        let meta = scratch.open("meta");
        let lower = [OverlayLayer { fd: meta.as_fd(), data_only: false }];
        let error = overlay(&lower, None, &[("nonsense", Some("on"))]).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid);
        assert!(error.to_string().contains("nknown parameter 'nonsense'"), "{error}");
    }

    #[test]
    fn root_read_only_mount_refuses_writes() {
        let context = FsContext::open("tmpfs").unwrap();
        context.set_string("size", "64k").unwrap();
        let mount = context.create(MountAttr::NODEV).unwrap();
        rustix::fs::mkdirat(&mount, "before", Mode::RWXU).unwrap();
        set_attr(mount.as_fd(), false, MountAttr::RDONLY | MountAttr::NOATIME, MountAttr::NODEV)
            .unwrap();
        let error = rustix::fs::mkdirat(&mount, "after", Mode::RWXU).unwrap_err();
        assert_eq!(error, crate::Errno::ROFS);
        let flags = rustix::fs::fstatvfs(&mount).unwrap().f_flag;
        assert!(!flags.contains(rustix::fs::StatVfsMountFlags::NODEV));
        let uts = fs::File::open("/proc/self/ns/uts").unwrap();
        let error = idmap(mount.as_fd(), uts.as_fd(), false).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid, "not a user namespace: {error}");
    }

    #[test]
    fn root_missing_file_system_is_not_found() {
        assert_eq!(FsContext::open("nofs").unwrap_err().kind(), crate::ErrorKind::NotFound);
        assert!(FsContext::open("no\0fs").is_err());
    }

    #[test]
    fn root_copy_of_another_namespace_has_its_mounts() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};

        let own = || fs::read_link("/proc/thread-self/ns/mnt").unwrap();
        let before = own();
        let script = "mount -t tmpfs none /mnt && touch /mnt/within && echo ready && read -r line";
        let mut other = Command::new("unshare")
            .args(["--mount", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let link = |name: &str| fs::File::open(format!("/proc/{}/ns/{name}", other.id())).unwrap();
        let copy = clone_namespace(link("mnt").as_fd()).unwrap();
        let wrong = clone_namespace(link("uts").as_fd()).unwrap_err();
        drop(other.stdin.take());
        other.wait().unwrap();
        let within = |dir: BorrowedFd<'_>, path: &str| {
            rustix::fs::openat(dir, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).is_ok()
        };
        assert!(within(copy.as_fd(), "mnt/within"), "the copy outlives the namespace");
        assert!(!within(rustix::fs::CWD, "/mnt/within"));
        assert_eq!((own(), wrong.errno()), (before, libc::EINVAL));
    }
}
