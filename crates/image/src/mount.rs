//! Root file systems from images.
//!
//! ```text
//! overlay            detached, nodev; metacopy, redirect_dir, index, xino
//!   upper, work      plain directories, owned by the container's ids on the host
//!   RUN/images/ID    EROFS mounted from meta.erofs, cloned and idmapped for the container
//!   objects/         data-only: reached by redirects alone, so neither idmapped nor ever listed
//! ```
//!
//! **Owners.** The image's files have the ids of their archive; the idmapped clone shows them as
//! the container's. The upper cannot be idmapped: the mounter's own id would have no mapping there,
//! and overlayfs would silently mount read-only. Therefore the container's own files are stored
//! with host ids, and `commit` and `export` shift them back. Objects are root's, 0444; the metadata
//! decides about access to a file before overlayfs opens the object as the mounter.
//!
//! **nodev** on the overlay: an image may contain device nodes, and its mounter is the host's root,
//! so nothing else would keep a container from opening a disk through one (the device cgroup is a
//! second barrier). A container's `/dev` is another mount. **Not nosuid**: setuid programs and file
//! capabilities take effect only inside the container's user namespace.
//!
//! **index=on** keeps hard links of the image together when one of them is written. It ties an
//! upper to its lower, so an upper cannot be mounted over another image (ESTALE).

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dormouse_kernel::CallError;
use dormouse_kernel::mount::{self as calls, FsContext, MountAttr, OverlayLayer};
use dormouse_model::IdMap;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::error::{At, Fault, Result, Step};
use crate::store::{Image, Lock, LockKind, Metadata, Store};

/// statfs(2): the magic number of EROFS.
const EROFS_MAGIC: i64 = 0xE0F5_E1E2;

/// One read-only layer of a root filesystem.
#[derive(Debug)]
pub struct Layer {
    /// Its root directory.
    pub dir: OwnedFd,
    /// Only redirects from the layers above lead into it (data-only, KERNEL(6.5)).
    pub data_only: bool,
}

/// The read-only part of a root filesystem, topmost layer first.
#[derive(Debug)]
pub struct Lower {
    /// The layers; data-only ones are last.
    pub layers: Vec<Layer>,
}

impl Lower {
    /// A directory of the host as it is (`--rootfs`).
    pub fn directory(dir: OwnedFd) -> Self {
        Self { layers: vec![Layer { dir, data_only: false }] }
    }
}

impl Store {
    /// Returns the read-only layers of the image with this id. Its metadata is mounted at
    /// `RUN/images/ID` if necessary; if it is mounted, nothing else is read. Several processes may
    /// call this at once. The calling thread must be in the host's mount namespace.
    pub fn rootfs(&self, id: &str) -> Result<Lower> {
        let objects = open_directory(&self.dir.join("objects"))?;
        let metadata = match open_mounted(&self.run.join(id))? {
            Some(root) => root,
            None => self.metadata_of(&self.find(id)?)?,
        };
        Ok(Lower {
            layers: vec![
                Layer { dir: metadata, data_only: false },
                Layer { dir: objects, data_only: true },
            ],
        })
    }

    /// Returns the root of an image's metadata, after mounting its EROFS now.
    fn metadata_of(&self, image: &Image) -> Result<OwnedFd> {
        if image.metadata == Metadata::Stub {
            return open_directory(&self.image_dir(&image.id).join("stub"));
        }
        let target = self.run.join(&image.id);
        let _lock = Lock::take(&self.run.join("lock"), LockKind::Exclusive)?;
        if let Some(root) = open_mounted(&target)? {
            return Ok(root);
        }
        let stub = self.image_dir(&image.id).join("stub");
        if stub.exists() {
            return open_directory(&stub);
        }
        match fs::create_dir(&target) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(e).at("make the directory", &target);
            }
            _ => {}
        }
        match mount_erofs(&self.image_dir(&image.id).join("meta.erofs")) {
            Ok(mount) => {
                let here = rustix::fs::CWD;
                calls::attach(mount.as_fd(), here, &target).step("attach an image's metadata")?;
                open_directory(&target)
            }
            // KERNEL(6.12): EROFS is mounted from a file. Before, or without EROFS: stubs.
            Err(e) if matches!(e.errno(), libc_errno::ENOTBLK | libc_errno::ENODEV) => {
                drop(fs::remove_dir(&target));
                self.make_stubs(image, &stub)?;
                open_directory(&stub)
            }
            Err(e) => Err(e).step("mount an image's metadata"),
        }
    }

    /// Makes the stub directory of an image that was kept as EROFS.
    fn make_stubs(&self, image: &Image, stub: &Path) -> Result<()> {
        let tmp = self.tmp_path();
        let make = || -> Result<()> {
            let mut tree = crate::tree::Tree::new();
            for layer in &image.layers {
                tree.lay(&self.layer(&layer.diff_id)?.entries)?;
            }
            tree.add_mount_points();
            crate::metadata::stubs(&tree, &tmp)?;
            let file = fs::File::open(&tmp).at("open", &tmp)?;
            rustix::fs::syncfs(&file).at("bring to the disk", &tmp)?;
            fs::rename(&tmp, stub).at("name the stub directory", stub)
        };
        make().inspect_err(|_| drop(fs::remove_dir_all(&tmp)))
    }

    /// Unmounts the metadata of one image; containers that run from it keep it alive. Nothing
    /// happens where it is not mounted.
    pub fn unmount(&self, id: &str) -> Result<()> {
        let _lock = Lock::take(&self.run.join("lock"), LockKind::Exclusive)?;
        self.unmount_locked(id)
    }

    fn unmount_locked(&self, id: &str) -> Result<()> {
        let target = self.run.join(id);
        while open_mounted(&target)?.is_some() {
            calls::detach(&target).step("unmount an image's metadata")?;
        }
        match fs::remove_dir(&target) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(e).at("remove the directory", &target)
            }
            _ => Ok(()),
        }
    }

    /// Unmounts the metadata of all images, for the end of the last container.
    pub fn unmount_all(&self) -> Result<()> {
        let _lock = Lock::take(&self.run.join("lock"), LockKind::Exclusive)?;
        let mut first = Ok(());
        for entry in fs::read_dir(&self.run).at("list", &self.run)? {
            let name = entry.at("list", &self.run)?.file_name();
            if let Some(id) = name.to_str().filter(|n| n.len() == 64) {
                let result = self.unmount_locked(id);
                first = first.and(result);
            }
        }
        first
    }

    /// Makes the writable layer of a container in `dir`, which is made where it is missing:
    /// `upper` and `work`, owned by the container's root. `dir` must be on a file system that can
    /// be an overlay's upper layer. The root directory of `lower` lends its mode and owner to
    /// `upper`, which becomes the root directory of the container.
    pub fn create_upper(dir: &Path, ids: &IdMap, lower: &Lower) -> Result<(OwnedFd, OwnedFd)> {
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700);
        builder.recursive(true).create(dir).at("make the directory", dir)?;
        builder.recursive(false);
        for name in ["upper", "work"] {
            let path = dir.join(name);
            builder.create(&path).at("make the directory", &path)?;
        }
        let (upper, work) = Self::open_upper(dir)?;
        let (mut mode, mut uid, mut gid) = (0o755, 0, 0);
        if let Some(layer) = lower.layers.first() {
            let stat = rustix::fs::fstat(&layer.dir).at("stat", "the root of an image")?;
            (mode, uid, gid) = (stat.st_mode & 0o7777, stat.st_uid, stat.st_gid);
        }
        let own = |fd: &OwnedFd, uid: u32, gid: u32, mode: u32| -> Result<()> {
            // If the container has no such id, its root is the owner.
            let host = |id| Some(ids.to_host(id).unwrap_or(ids.base));
            let (uid, gid) = (host(uid).map(Uid::from_raw), host(gid).map(Gid::from_raw));
            rustix::fs::fchown(fd, uid, gid).at("change the owner of", dir)?;
            rustix::fs::fchmod(fd, Mode::from_raw_mode(mode)).at("change the mode of", dir)
        };
        own(&upper, uid, gid, mode)?;
        own(&work, 0, 0, 0o700)?;
        Ok((upper, work))
    }

    /// Opens what [`Store::create_upper`] made: the upper and the work directory.
    pub fn open_upper(dir: &Path) -> Result<(OwnedFd, OwnedFd)> {
        let open = |name: &str| {
            let path = dir.join(name);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(&path, flags, Mode::empty()).at("open", &path)
        };
        Ok((open("upper")?, open("work")?))
    }

    /// Removes a writable layer with everything in it. A missing one is no error.
    pub fn remove_upper(dir: &Path) -> Result<()> {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => result.at("remove the directory", dir),
        }
    }
}

/// The error numbers needed here, which are the same on every Linux.
mod libc_errno {
    pub(super) const ENOTBLK: i32 = rustix::io::Errno::NOTBLK.raw_os_error();
    pub(super) const EBUSY: i32 = rustix::io::Errno::BUSY.raw_os_error();
    pub(super) const ENODEV: i32 = rustix::io::Errno::NODEV.raw_os_error();
    pub(super) const EINVAL: i32 = rustix::io::Errno::INVAL.raw_os_error();
    pub(super) const EOPNOTSUPP: i32 = rustix::io::Errno::OPNOTSUPP.raw_os_error();
}

fn open_directory(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).at("open", path)
}

/// Opens the root of the EROFS mounted there; `None` if there is none.
fn open_mounted(target: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(target, flags, Mode::empty()) {
        Ok(root) => {
            let stat = rustix::fs::fstatfs(&root).at("read the file system type of", target)?;
            Ok((stat.f_type as i64 == EROFS_MAGIC).then_some(root))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e).at("open", target),
    }
}

fn mount_erofs(file: &Path) -> dormouse_kernel::error::Result<OwnedFd> {
    let context = FsContext::open("erofs")?;
    context.set_string("source", &file.to_string_lossy())?;
    context.create(MountAttr::RDONLY | MountAttr::NODEV)
}

/// The writable layer of a root filesystem.
#[derive(Debug, Clone, Copy)]
pub struct Volume<'a> {
    /// The writable layer.
    pub upper: &'a OwnedFd,
    /// overlayfs' own directory, on the same file system.
    pub work: &'a OwnedFd,
    /// The contents need not survive: the mount is never synced, and unmounting does not wait for
    /// unwritten data of the whole file system below. The upper cannot be used again.
    pub volatile: bool,
}

/// A root that was put together.
#[derive(Debug)]
pub struct Assembled {
    /// The mount, attached nowhere.
    pub root: OwnedFd,
    /// Source mounts that it does not need any more. Closing one waits for an RCU grace period,
    /// some 60 us: to be done when no client waits.
    pub clones: Vec<OwnedFd>,
    /// Numbers of file systems that it does not need any more, with mounts as above.
    pub filled: Option<calls::Filled>,
}

/// LIMIT: wait for a busy volume. When a container has ended its root may stay in use for a moment:
/// a reader of `/proc/PID/cmdline` or the like of an exiting process holds its memory, and the
/// files mapped there. `diff` and `cp` use the root for as long as they run.
const IN_USE_WAIT: Duration = Duration::from_secs(2);

/// The number of a file system.
fn number_of(root: &OwnedFd) -> Result<u64> {
    Ok(rustix::fs::fstat(root).at("look at", "the root")?.st_dev)
}

/// Makes a root file system: an overlay of `lower` and, if given, a writable volume, as a detached
/// mount, `nodev`. The lower layers are idmapped with `userns`, the user namespace of the
/// container; upper and work are not, and are owned by the container's ids on the host. Without a
/// volume the root is read-only.
///
/// A root with a volume gets the number `device` (st_dev), if that is free.
///
/// Fails with ESTALE if the volume was used over another image. Waits up to [`IN_USE_WAIT`] for a
/// volume that is still in use.
pub fn assemble(
    lower: &Lower,
    userns: Option<BorrowedFd<'_>>,
    volume: Option<Volume<'_>>,
    device: Option<u64>,
) -> Result<Assembled> {
    if let ([only], None) = (&lower.layers[..], volume) {
        // One layer alone needs no overlay.
        let mount = calls::clone_tree(only.dir.as_fd(), "", false).step("clone the root")?;
        if let Some(userns) = userns {
            calls::idmap(mount.as_fd(), userns, false).step("map the ids of the root")?;
        }
        let attr = MountAttr::RDONLY | MountAttr::NODEV;
        calls::set_attr(mount.as_fd(), false, attr, MountAttr::empty())
            .step("make the root read-only")?;
        return Ok(Assembled { root: mount, clones: Vec::new(), filled: None });
    }
    // KERNEL(6.15): before, making an overlay uses up the clones; so each attempt has its own.
    let build = |options: &[(&str, Option<&str>)]| -> std::result::Result<Assembled, CallError> {
        let mut clones = Vec::new();
        for layer in &lower.layers {
            clones.push(match (userns, layer.data_only) {
                (Some(userns), false) => {
                    let clone = calls::clone_tree(layer.dir.as_fd(), "", false)?;
                    calls::idmap(clone.as_fd(), userns, false)?;
                    Some(clone)
                }
                _ => None,
            });
        }
        let layers: Vec<OverlayLayer<'_>> = lower
            .layers
            .iter()
            .zip(&clones)
            .map(|(layer, clone)| OverlayLayer {
                fd: clone.as_ref().unwrap_or(&layer.dir).as_fd(),
                data_only: layer.data_only,
            })
            .collect();
        let pair = volume.map(|v| (v.upper.as_fd(), v.work.as_fd()));
        let volatile = volume.is_some_and(|v| v.volatile).then_some(("volatile", None));
        let options: Vec<_> = options.iter().copied().chain(volatile).collect();
        let root = calls::overlay(&layers, pair, &options)?;
        let clones = clones.into_iter().flatten().collect();
        Ok(Assembled { root, clones, filled: None })
    };
    const ON: Option<&str> = Some("on");
    let all = [("metacopy", ON), ("redirect_dir", ON), ("index", ON), ("xino", ON)];
    let few = [("metacopy", ON), ("redirect_dir", ON)];
    let options: &[_] = if volume.is_some() { &all } else { &few };
    let build_unused = || -> Result<Assembled> {
        let until = Instant::now() + IN_USE_WAIT;
        let mut pause = Duration::from_millis(1);
        let first = loop {
            match build(options) {
                Err(e) if e.errno() == libc_errno::EBUSY && volume.is_some() => {
                    if Instant::now() > until {
                        let what = "the writable layer is still in use: a process outside has files of the \
                                    container open, or its working directory there (see lsof(8), fuser(1))";
                        return Err(Fault::Busy { what: what.to_owned() }.into());
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(50));
                }
                result => break result,
            }
        };
        let result = match (first, volume) {
            // A file system below that cannot be found again by handle, or numbers inodes in 64 bits.
            (Err(e), Some(_))
                if matches!(e.errno(), libc_errno::EINVAL | libc_errno::EOPNOTSUPP) =>
            {
                build(&few).map_err(|_| e)
            }
            (result, _) => result,
        };
        result.step("lay the layers over one another")
    };
    let mut assembled = build_unused()?;
    if let Some(device) = device.filter(|_| volume.is_some())
        && let number = number_of(&assembled.root)?
        && calls::is_fillable(number, device)
    {
        // ORDER: an upper directory is part of one overlay at a time.
        drop(assembled);
        // Another number is no reason to fail.
        let filled = calls::fill_numbers(number, device).unwrap_or(None);
        assembled = build_unused()?;
        assembled.filled = filled;
    }
    let root = &assembled.root;
    calls::set_attr(root.as_fd(), false, MountAttr::NODEV, MountAttr::empty())
        .step("forbid device nodes in the root")?;
    if volume.is_some() {
        // LIMIT of overlayfs: if it cannot use the work directory, it mounts read-only and reports
        // that only in the kernel's log.
        let stat = rustix::fs::fstatvfs(root).at("read the mount flags of", "the root")?;
        if stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
            let what = "the writable layer cannot be written: overlayfs mounted it read-only \
                        (its file system is full, read-only, or cannot be an upper layer)";
            return Err(Fault::Busy { what: what.to_owned() }.into());
        }
    }
    Ok(assembled)
}

/// The merged view of a container's files for reading, with nothing mounted anywhere.
///
/// The view is mounted like the container's own root, because only overlayfs knows which hard links
/// belong together (`index=on`). LIMIT: that is refused (EBUSY) while the container's root is
/// mounted. Then the upper is used as one more read-only layer, and a hard link of the image that
/// was written under one name shows the change under that name alone.
pub(crate) fn view(lower: &Lower, upper: Option<BorrowedFd<'_>>) -> Result<OwnedFd> {
    const ON: Option<&str> = Some("on");
    const STEP: &str = "look at the files of a container";
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if let (None, [only]) = (upper, &lower.layers[..]) {
        // A new descriptor for reading: the caller's may be O_PATH.
        return rustix::fs::openat(&only.dir, ".", flags, Mode::empty()).at("open", "the root");
    }
    let own =
        || lower.layers.iter().map(|l| OverlayLayer { fd: l.dir.as_fd(), data_only: l.data_only });
    let all = [("metacopy", ON), ("redirect_dir", ON), ("index", ON), ("xino", ON)];
    let as_container = |upper: BorrowedFd<'_>| -> Option<OwnedFd> {
        let work = rustix::fs::openat(upper, "../work", flags, Mode::empty()).ok()?;
        let layers: Vec<_> = own().collect();
        let mount = calls::overlay(&layers, Some((upper, work.as_fd())), &all).ok()?;
        calls::set_attr(mount.as_fd(), false, MountAttr::RDONLY, MountAttr::empty()).ok()?;
        Some(mount)
    };
    let mount = match upper.and_then(as_container) {
        Some(mount) => mount,
        None => {
            let upper = upper.map(|fd| OverlayLayer { fd, data_only: false });
            let layers: Vec<_> = upper.into_iter().chain(own()).collect();
            let options = [("metacopy", ON), ("redirect_dir", Some("follow"))];
            calls::overlay(&layers, None, &options).step(STEP)?
        }
    };
    // The mount's own descriptor is O_PATH; this one can be listed, and keeps the mount alive.
    rustix::fs::openat(&mount, ".", flags, Mode::empty()).at("open", "the root of a container")
}
