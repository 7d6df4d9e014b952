//! The cgroup of images: page cache of the files of images is charged to it, and to no container.
//!
//! The kernel charges a page of a file to the memory cgroup of the process that first has it read or written
//! (Documentation/admin-guide/cgroup-v2.rst, "Memory Ownership"), and keeps that charge while the page is cached. So a
//! process that writes files of images is in this cgroup meanwhile ([`Hierarchy::charge_images`]). The cgroup is
//! beside those of the containers, in the hierarchy of the memory controller alone: one memory cgroup for a host. It is
//! made by the first import, and removed with its parent.
//!
//! **Protection.** On v2 its page cache is reclaimed last, up to an amount (`memory.low`). v1 has no such protection;
//! there the cgroup has a limit while memory is guaranteed to a container ([`super::ParentMemory`]), because it fills
//! the same room.
//!
//! LIMIT: all other files that the process reads or writes meanwhile are charged to this cgroup too, and its own
//! memory.
//! LIMIT: pages that were cached before are charged to another cgroup, and stay so until they are reclaimed.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::dir::{Dir, field};
use super::error::CgroupError;
use super::guarantee::MemoryShare;
use super::limit::{Host as _, V1_UNLIMITED_BYTES, Version};
use super::supply::Held;
use super::{Controllers, Hierarchy, IMAGES};
use crate::error::Result as CallResult;
use crate::proc;

/// Bytes of `/proc/self/cgroup`: a line of a path for each hierarchy.
const LARGEST_TABLE_BYTES: usize = 1 << 20;

/// This process, while it is in the cgroup of images. A drop moves it back; after SIGKILL there is nothing to undo.
#[derive(Debug)]
pub struct ChargingImages {
    /// `cgroup.procs` of the cgroup that it was in.
    back: OwnedFd,
}

impl Drop for ChargingImages {
    fn drop(&mut self) {
        // The earlier cgroup may be gone; this process then stays where it is until it ends.
        let _ = enter(&self.back);
    }
}

/// Moves this process, with all of its threads.
fn enter(procs: &OwnedFd) -> Result<(), Errno> {
    loop {
        match rustix::io::write(procs, b"0") {
            Err(Errno::INTR) => {}
            wrote => return wrote.map(drop),
        }
    }
}

impl Hierarchy {
    /// Moves this process into the cgroup of images, which is made where it is missing, until the result is dropped.
    /// Each move waits for a grace period of RCU, some 10 ms.
    ///
    /// `None` if there is no memory controller, or if the process could not be moved back: its cgroup is not visible
    /// here, as in a cgroup namespace.
    pub fn charge_images(&self) -> Result<Option<ChargingImages>, CgroupError> {
        let Some((mount, parent, version)) = self.memory_parent()? else { return Ok(None) };
        let Some(own) = own_cgroup(version)? else { return Ok(None) };
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let above = mount.join(own.trim_start_matches('/'));
        let Ok(back) = rustix::fs::open(above.join("cgroup.procs"), flags, Mode::empty()) else {
            return Ok(None);
        };
        let images = parent.child_or_make(IMAGES).map_err(CgroupError::Make)?;
        images.write("cgroup.procs", "0").map_err(CgroupError::Make)?;
        Ok(Some(ChargingImages { back }))
    }

    /// Reads the memory that is charged to images; `None` without their cgroup.
    pub fn images_memory(&self) -> Result<Option<Held>, CgroupError> {
        let Some(images) = self.images()? else { return Ok(None) };
        let is_v2 = self.keeps_memory();
        let (used, prefix) =
            if is_v2 { ("memory.current", "") } else { ("memory.usage_in_bytes", "total_") };
        let read = || -> CallResult<Held> {
            let bytes = images.read_number(used)?.unwrap_or(0);
            let stat = images.read("memory.stat")?;
            let [inactive, active] = ["inactive_file", "active_file"]
                .map(|list| field(&stat, &format!("{prefix}{list}")));
            let file_bytes = inactive.saturating_add(active);
            Ok(Held { bytes, inactive_file_bytes: inactive, file_bytes })
        };
        match read() {
            Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(None),
            held => held.map(Some).map_err(CgroupError::Read),
        }
    }

    /// Opens usage and limit of the cgroup of images on v1.
    pub fn images_share(&self) -> Result<Option<MemoryShare>, CgroupError> {
        match self.keeps_memory() {
            true => Ok(None),
            false => self.share_of(IMAGES),
        }
    }

    /// The cgroup of images, if it is there.
    fn images(&self) -> Result<Option<Dir>, CgroupError> {
        let Some((_, parent, _)) = self.memory_parent()? else { return Ok(None) };
        parent.child(IMAGES).map_err(CgroupError::Open)
    }

    /// The parent in the hierarchy of the memory controller, and where that is mounted.
    fn memory_parent(&self) -> Result<Option<(&PathBuf, &Dir, Version)>, CgroupError> {
        Ok(match self.version(Controllers::MEMORY) {
            None => None,
            Some(Version::V1) => {
                let v1 = self.0.v1.iter().find(|v1| v1.controllers.contains(Controllers::MEMORY));
                let parent = self.v1_parent(Controllers::MEMORY)?;
                v1.zip(parent).map(|(v1, parent)| (&v1.mount, parent, Version::V1))
            }
            Some(Version::V2) => self.0.v2.as_ref().map(|v2| (&v2.mount, &v2.parent, Version::V2)),
        })
    }

    /// On v1: sets the limit of images while all containers together have one (`is_limited`), or removes it. With
    /// `lowers` false a lower limit is left out. A limit that cannot be reclaimed to stays as it was.
    pub(super) fn limit_images(
        &self,
        bytes: u64,
        is_limited: bool,
        lowers: bool,
    ) -> Result<(), CgroupError> {
        let Some(share) = self.images_share()? else { return Ok(()) };
        let limit = if is_limited { bytes } else { u64::MAX };
        match share.limit_bytes()? {
            Some(now) if limit > now || lowers && limit < now => share.set(limit).map(drop),
            _ => Ok(()),
        }
    }

    /// On v2: has the kernel reclaim the memory of images last, up to an amount. Returns that amount; 0 without the
    /// cgroup.
    pub(super) fn protect_images(&self, bytes: u64) -> Result<u64, CgroupError> {
        let Some(images) = self.images()? else { return Ok(0) };
        match images.write("memory.low", &bytes.min(V1_UNLIMITED_BYTES).to_string()) {
            Ok(()) => Ok(bytes),
            Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENODEV) => Ok(0),
            Err(source) => Err(CgroupError::Set { limit: "memory of images", source }),
        }
    }
}

/// The path of this process's cgroup in the hierarchy of the memory controller; `None` if that is outside of its cgroup
/// namespace.
fn own_cgroup(version: Version) -> Result<Option<String>, CgroupError> {
    let text =
        proc::read_text("/proc/self/cgroup", LARGEST_TABLE_BYTES).map_err(CgroupError::Read)?;
    Ok(path_in(&text, version).filter(|path| !path.starts_with("/..")).map(str::to_owned))
}

/// Finds a line `number:controllers:path` of cgroups(7). v2's has the number 0 and no controllers.
fn path_in(text: &str, version: Version) -> Option<&str> {
    text.lines().find_map(|line| {
        let (number, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let is_it = match version {
            Version::V1 => controllers.split(',').any(|name| name == "memory"),
            Version::V2 => number == "0" && controllers.is_empty(),
        };
        is_it.then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cgroup_is_that_of_the_memory_hierarchy() {
        let text = "9:name=systemd:/a\n4:cpu,memory:/b:c\n3:cpuset:/d\n0::/e\n";
        assert_eq!(path_in(text, Version::V1), Some("/b:c"));
        assert_eq!(path_in(text, Version::V2), Some("/e"));
        assert_eq!(path_in("4:memory_not:/b\n", Version::V1), None);
    }
}
