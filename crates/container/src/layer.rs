//! Layers of a container, stacked as one mount, and its root directory seen from the host.
//!
//! Uses `ground`, `state` and `drive`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dormouse_image::{Assembled, Lower, Volume};
use dormouse_kernel::{namespace, pidfd};
use dormouse_model::{Config, IdMap, RootSource, State};
use rustix::fs::{Mode, OFlags};

use crate::drive::{self, Purpose, Writable};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::state::{self, InitRecord};

/// The root directory of a container, seen from the host.
#[derive(Debug)]
pub struct Root {
    /// The directory. Paths in it are resolved with RESOLVE_IN_ROOT, or they lead out.
    pub fd: OwnedFd,
    /// Whether the files' owners are host ids (a stopped container) or must be mapped to the
    /// container's ids.
    pub ids: IdMap,
}

/// Opens the read-only layers of a root filesystem.
pub(crate) fn lower(ground: &Ground, root: &RootSource) -> Result<Lower> {
    match root {
        RootSource::Image { id, .. } => Ok(ground.images()?.rootfs(id)?),
        RootSource::Directory(path) => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = rustix::fs::open(path, flags, Mode::empty())
                .map_err(|e| Error::file("cannot open", path)(e.into()))?;
            Ok(Lower::directory(dir))
        }
    }
}

/// Assembles the layers of a container as one detached mount, with the number `device` (st_dev) if that is free.
pub(crate) fn assemble(
    ground: &Ground,
    config: &Config,
    userns: BorrowedFd<'_>,
    purpose: Purpose,
    device: Option<u64>,
) -> Result<Assembled> {
    let own = drive::open(ground, config, purpose)?;
    stack(ground, config, &own, userns, device)
}

/// The same for a spare, in its directory: it has no drive.
pub(crate) fn assemble_spare(
    ground: &Ground,
    config: &Config,
    dir: &Path,
    userns: BorrowedFd<'_>,
) -> Result<Assembled> {
    stack(ground, config, &drive::open_in(dir)?, userns, None)
}

fn stack(
    ground: &Ground,
    config: &Config,
    own: &Writable,
    userns: BorrowedFd<'_>,
    device: Option<u64>,
) -> Result<Assembled> {
    let lower = lower(ground, &config.spec.root)?;
    let volume = Volume { upper: &own.upper, work: &own.work, volatile: config.spec.auto_remove };
    Ok(dormouse_image::assemble(&lower, Some(userns), Some(volume), device)?)
}

/// The layers of a stopped container as a mount. The caller holds the container's lock.
fn assemble_stopped(ground: &Ground, config: &Config) -> Result<OwnedFd> {
    let userns = user_namespace(config.ids)?;
    Ok(assemble(ground, config, userns.as_fd(), Purpose::Look, None)?.root)
}

/// Returns the root directory of a container: its processes' root while it runs, or a detached
/// mount of the same layers when it is stopped. The caller holds its lock, and it is not warm.
pub(crate) fn root_locked(ground: &Ground, config: &Config) -> Result<Root> {
    let observed = state::observe(ground, config)?;
    let fd = match observed.init.as_ref().filter(|_| observed.is_alive()) {
        Some(init) => {
            let handle = state::handle(init);
            let ended = || Error::state(config, State::Stopped, "it ended just now; try again");
            root_of(config, init, handle.ok_or_else(ended)?.as_fd())?
        }
        None => assemble_stopped(ground, config)?,
    };
    Ok(Root { fd, ids: config.ids })
}

/// Returns the root directory of a container's first process, given its handle.
pub(crate) fn root_of(
    config: &Config,
    init: &InitRecord,
    handle: BorrowedFd<'_>,
) -> Result<OwnedFd> {
    let path = format!("/proc/{}/root", init.pid);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&path, flags, Mode::empty())
        .map_err(|e| Error::file("cannot open", &path)(e.into()))?;
    // ORDER: the handle was taken first and the process still lives after the open, so
    // the directory is its own and not that of a later process with its pid.
    if !pidfd::is_alive(handle) {
        return Err(Error::state(config, State::Stopped, "it ended just now; try again"));
    }
    Ok(fd)
}

/// Makes a user namespace with a container's ids and no process in it.
pub(crate) fn user_namespace(ids: IdMap) -> Result<OwnedFd> {
    let map = ids.to_proc_text();
    namespace::new_user(&map, &map).map_err(Error::call("cannot make a user namespace"))
}
