//! An OCI runtime (runtime-spec 1.2), as a library and as the program `dormouse-oci`, with the
//! verbs and flags of runc.
//!
//! **The idea.** A bundle becomes the same thing that the engine's own containers are started with:
//! a flat plan (`dormouse_launch`) that a newborn process follows (`dormouse_keeper`). There is no
//! daemon and no keeper: whoever calls clones the newborn and is its parent. What is different from
//! the engine's containers: the bundle says everything, there may be no user namespace, cgroups lie
//! where the caller wants them, hooks run between the steps, and `create` and `start` are two
//! programs.
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
//! ROOT/.creating/ID      held (flock) by the `create` of ID as long as it is not done
//! ROOT/.creating/.*      what lasts for moments: removed directories, containers that are frozen
//!                        while they are signalled
//! ROOT/ID/state.json     the record; replaced by rename
//! ROOT/ID/config.json    the bundle's configuration as it was
//! ROOT/ID/start          the socket at which the newborn waits; gone once it was started
//! ROOT/ID/listener       the page by which a seccomp listener's descriptor is fetched
//! ROOT/ID/lock           held by a verb that changes the container
//! ```
//!
//! **What can be interrupted.** The record names the cgroup before it is made, and the mark is there
//! before the record: every command first looks for marks that nobody holds and takes away what they
//! stand for ([`store`]). A newborn ends when its `create` does. So a killed `create` leaves nothing
//! that the next command does not remove.
//!
//! **Whom it trusts.** The caller and `config.json`; not the root filesystem, which may be an
//! attacker's and may change meanwhile, and not the container's processes. Sources of mounts are the
//! caller's paths; everything below the root is reached by the newborn, by openat2, with nothing of
//! the host in reach after `pivot`. Our own program is not open for writing through
//! `/proc/PID/exe` ([`sealed`]).
//!
//! **Checkpoints.** [`checkpoint`] saves what the processes are and keeps no other state; `restore` is
//! a `create` whose newborn follows a restore program where it would wait for `start` ([`restore`]).
//!
//! **Not here**: intelRdt, which is refused; systemd over D-Bus: with
//! `--systemd-cgroup` the directories of a scope are made by hand.
#![forbid(unsafe_code)]

pub mod bundle;
mod cgroup;
pub mod checkpoint;
pub mod command;
mod console;
mod create;
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
pub use store::{Record, Status};

/// The version of the specification that this implements.
pub const OCI_VERSION: &str = "1.2.1";

/// A runtime with a root directory for its state.
#[derive(Debug, Clone)]
pub struct Runtime {
    pub(crate) store: store::Store,
    pub(crate) systemd_cgroup: bool,
    /// Looked for once: the table of mounts may be long, and `run` asks three times.
    forest: Arc<OnceLock<Forest>>,
}

impl Runtime {
    /// Opens ROOT, which is made where it is missing, and removes what interrupted commands have
    /// left there.
    pub fn open(root: impl Into<std::path::PathBuf>, systemd_cgroup: bool) -> Result<Self> {
        let store = store::Store::open(root.into())?;
        let runtime = Self { store, systemd_cgroup, forest: Arc::default() };
        runtime.sweep()?;
        Ok(runtime)
    }

    /// The cgroup hierarchies of this host.
    pub(crate) fn forest(&self) -> Result<&Forest> {
        if let Some(forest) = self.forest.get() {
            return Ok(forest);
        }
        let found = Forest::find()?;
        Ok(self.forest.get_or_init(|| found))
    }
}
