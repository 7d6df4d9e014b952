//! An OCI runtime (runtime-spec 1.2), as a library and as the program `dormouse-oci`, with the
//! verbs and flags of runc.
//!
//! **The idea.** A bundle becomes a flat plan (`dormouse_launch`), as for the engine's own
//! containers, and a newborn process follows it (`dormouse_keeper`). There is no daemon and no
//! keeper: the calling process clones the newborn and is its parent. Differences from the engine's
//! containers: the bundle decides everything, there may be no user namespace, the caller chooses
//! the cgroup, hooks run between the steps, and `create` and `start` are two programs.
//!
//! ```text
//! create   mark  directory, record  cgroups  clone ──────────────> newborn waits for its plan
//!          mounts, devices, filter as a plan ────────────────────> follows it
//!          hooks (prestart, createRuntime) <── ready              (hooks createContainer), pivot
//!          record with the pid <────────────── ready               ...
//!          release; unmark ──────────────────────────────────────> listens on ROOT/ID/start
//! start    connects, go ─────────────────────────────────────────> (hooks startContainer)
//!          hooks (poststart) <────────── closed by execve          filter, execve
//! ```
//!
//! **Places.** All below ROOT (`--root`, `/run/dormouse-oci`):
//!
//! ```text
//! ROOT/.creating/ID      held (flock) by the `create` of ID until it is done
//! ROOT/.creating/.*      short-lived entries: removed directories, containers that are frozen
//!                        while they are signalled
//! ROOT/.mounts           the places of the cgroup hierarchies, kept for the next command on a host with v1
//! ROOT/ID/state.json     the record; replaced by rename
//! ROOT/ID/config.json    the bundle's configuration as it was
//! ROOT/ID/start          the socket at which the newborn waits; removed by start
//! ROOT/ID/listener       the page that hands over a seccomp listener's descriptor number
//! ROOT/ID/lock           held by a verb that changes the container
//! ```
//!
//! **Interruption.** The record names the cgroup before it is made, and the mark exists before the
//! record. Every command first looks for marks that no process holds, and removes what they stand
//! for ([`store`]). A newborn exits when its `create` does. A killed `create` therefore leaves
//! nothing that the next command does not remove.
//!
//! **Trust.** The caller and `config.json` are trusted. The root filesystem is not: it may belong
//! to an attacker and may change meanwhile. The container's processes are not trusted either.
//! Sources of mounts are paths of the caller. The newborn reaches everything below the root by
//! openat2, and nothing of the host is in reach after `pivot`. This program is not open for writing
//! through `/proc/PID/exe` ([`sealed`]).
//!
//! **Checkpoints.** [`checkpoint`] saves the processes and keeps no other state. `restore` is a
//! `create` whose newborn follows a restore program instead of waiting for `start` ([`restore`]).
//!
//! **Not here**: intelRdt and netDevices, which are refused; systemd over D-Bus: with
//! `--systemd-cgroup` the directories of a scope are made directly.
#![forbid(unsafe_code)]

pub mod bundle;
mod cgroup;
pub mod checkpoint;
mod comeback;
pub mod command;
mod console;
mod create;
mod descriptor;
mod device;
pub mod error;
mod events;
mod exec;
mod feature;
mod filter;
mod foreground;
#[doc(hidden)]
pub mod fuzz;
mod hook;
mod identity;
mod life;
mod log;
mod mount;
mod namespace;
mod process;
pub mod restore;
mod sealed;
#[allow(missing_docs)] // The specification is their documentation.
pub mod spec;
pub mod store;

use std::sync::{Arc, OnceLock};

use dormouse_kernel::cgroup::Forest;

pub use checkpoint::Checkpoint;
pub use create::{Create, Created};
pub use error::{Error, Result};
pub use exec::Exec;
pub use life::Signal;
pub use restore::Restore;
pub use spec::OCI_VERSION;
pub use store::{Record, Status};

/// A runtime with a root directory for its state.
#[derive(Debug, Clone)]
pub struct Runtime {
    pub(crate) store: store::Store,
    pub(crate) systemd_cgroup: bool,
    /// Searched once: the table of mounts may be long, and `run` uses it three times.
    forest: Arc<OnceLock<Forest>>,
}

impl Runtime {
    /// Opens ROOT, made if missing, and removes the leftovers of interrupted commands.
    pub fn open(root: impl Into<std::path::PathBuf>, systemd_cgroup: bool) -> Result<Self> {
        let store = store::Store::open(root.into())?;
        let runtime = Self { store, systemd_cgroup, forest: Arc::default() };
        runtime.sweep()?;
        Ok(runtime)
    }

    /// Returns the cgroup hierarchies of this host.
    pub(crate) fn forest(&self) -> Result<&Forest> {
        if let Some(forest) = self.forest.get() {
            return Ok(forest);
        }
        let found = Forest::find_kept(Some(&self.store.mounts()))?;
        Ok(self.forest.get_or_init(|| found))
    }
}
