//! From an image to a root filesystem.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use crate::error::Result;
use crate::store::{Image, Store};

/// One read-only layer of a root filesystem.
#[derive(Debug)]
pub struct Layer {
    /// Its root directory.
    pub dir: OwnedFd,
    /// It is only looked into by redirects from the layers above (data-only, KERNEL(6.8)).
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
    /// The read-only layers of an image. Its metadata is mounted at `RUN/images/ID` if it is not
    /// yet; this is safe to call from many processes at once. The calling thread must be in the
    /// host's mount namespace.
    pub fn rootfs(&self, _image: &Image) -> Result<Lower> {
        Err(crate::not_yet("mount an image"))
    }

    /// Unmounts the metadata of one image; containers that run from it keep it alive. Nothing
    /// happens where it is not mounted.
    pub fn unmount(&self, _id: &str) -> Result<()> {
        Err(crate::not_yet("unmount an image"))
    }

    /// Unmounts the metadata of all images, for the end of the last container.
    pub fn unmount_all(&self) -> Result<()> {
        Err(crate::not_yet("unmount images"))
    }

    /// Makes the writable layer of a container: `dir/upper` and `dir/work`, owned by `owner`, the
    /// host id of the container's root. `dir` must be on a file system that can be an overlay's
    /// upper layer and is made where it is missing.
    pub fn create_upper(_dir: &Path, _owner: u32) -> Result<(OwnedFd, OwnedFd)> {
        Err(crate::not_yet("make a writable layer"))
    }

    /// Opens what [`Store::create_upper`] made: the upper and the work directory.
    pub fn open_upper(_dir: &Path) -> Result<(OwnedFd, OwnedFd)> {
        Err(crate::not_yet("open a writable layer"))
    }

    /// Removes a writable layer with everything in it. Nothing happens where there is none.
    pub fn remove_upper(_dir: &Path) -> Result<()> {
        Err(crate::not_yet("remove a writable layer"))
    }
}

/// Makes a root filesystem: an overlay of `lower` and, where there is one, a volume of `(upper,
/// work)` as a detached mount, `nodev`. The lower layers are idmapped with `userns`, the user
/// namespace of the container; upper and work are not, and are owned by the container's ids on the
/// host. Without a volume the root is read-only.
pub fn assemble(
    _lower: &Lower,
    _userns: Option<BorrowedFd<'_>>,
    _volume: Option<(&OwnedFd, &OwnedFd)>,
) -> Result<OwnedFd> {
    Err(crate::not_yet("put a root filesystem together"))
}
