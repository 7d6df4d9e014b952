//! A bpffs of an instance, which keeps the BPF programs and maps that have names in it.
//!
//! Nothing else of them is on a disk. They outlive every process, and end with the mount or the boot.

use std::os::fd::AsFd;
use std::path::Path;

use dormouse_kernel::mount::{self, MountAttr};
use rustix::fs::CWD;

use crate::disk;
use crate::error::{Error, Result};

/// BPF_FS_MAGIC of linux/magic.h.
const BPF_FS: u32 = 0xcafe_4a11;

pub(crate) fn is_mounted(place: &Path) -> bool {
    rustix::fs::statfs(place).is_ok_and(|stat| stat.f_type as u32 == BPF_FS)
}

/// Mounts an empty one. Only root of the host may enter it.
pub(crate) fn mount(place: &Path) -> Result<()> {
    disk::make_dir(place, 0o700)?;
    let make = || {
        let fs = mount::FsContext::open("bpf")?;
        fs.set_string("mode", "0700")?;
        let tree = fs.create(MountAttr::NOSUID | MountAttr::NOEXEC | MountAttr::NODEV)?;
        mount::attach(tree.as_fd(), CWD, place)
    };
    make().map_err(Error::call("cannot mount a bpffs"))
}

/// Unmounts the newest one at this place.
pub(crate) fn unmount(place: &Path) -> Result<()> {
    mount::detach(place).map_err(Error::call("cannot unmount a bpffs"))
}

/// Removes the directory, after the last unmount.
pub(crate) fn remove(place: &Path) -> Result<()> {
    match std::fs::remove_dir(place) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove", place)(e))
        }
        _ => Ok(()),
    }
}
