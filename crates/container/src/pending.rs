//! Records of creates, removals and changes in progress.
//!
//! A partly made or partly removed container has its directory in `LIB/pending`: `new-ID` until one
//! rename publishes it; `dead-ID` from the rename that withdraws it until all its resources are
//! released. The working process holds a lock on the directory. An unlocked directory is therefore
//! an interrupted create or removal, and its name has the container's id.
//! [`crate::recover::interrupted`] checks `LIB/pending` and `RUN/pending` for every command: two directories, nearly
//! always empty, however many containers there are.
//!
//! A change of an existing container is one rename of its record. A change that needs another step
//! leaves an [`Intent`], `do-ID.NUMBER`, for as long as it takes. Most of them concern processes, and
//! a boot ends those: such an intent is in `RUN/pending`. A file on the disk would be a tenth of a
//! millisecond of a wake.
//!
//! The resources of an interrupted create are found by its id, in the tables of names, ids and
//! addresses: a search, but in this case only. Releasing is repeated until it is complete, and
//! takes nothing from another container: each table releases an entry only for its owner.
//!
//! The lock on `LIB/pending` is shared by processes that make an entry and have not locked it yet.
//! Recovery takes it exclusively, so that it never treats a new entry as an orphan.
//!
//! Uses `ground`, `gating` and `hold`.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use dormouse_model::{Config, ContainerId, Name};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, ASLEEP, CONFIG, Ground};
use crate::{gating, hold};

/// A create in progress: its directory, locked.
#[derive(Debug)]
pub(crate) struct New {
    pub(crate) dir: PathBuf,
    pub(crate) lock: Lock,
    /// Keeps its account from being removed until it is published.
    #[expect(dead_code, reason = "held, not read")]
    pub(crate) account: Option<Lock>,
}

/// An unfinished change of an existing container, for the process that finishes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Intent {
    /// One of these names is valid; the other is to be taken or released.
    Rename { names: [Name; 2] },
    /// The container is frozen for a moment.
    Pause,
    /// The container is being frozen or thawed; its record holds.
    Freezer,
    /// The limits are being changed; the record holds.
    Limits,
    /// A twin of the container exists for a moment (`crate::twin`).
    Twin,
    /// The container falls asleep or wakes, and is marked so; if it runs after an interruption it
    /// is awake.
    Sleep,
    /// The asleep container is being made warm; after an interruption it is not.
    Warm,
}

impl Intent {
    /// Returns whether it is to be finished after a boot, too.
    fn outlives_boot(&self) -> bool {
        match self {
            Self::Rename { .. } | Self::Twin => true,
            Self::Pause | Self::Freezer | Self::Limits | Self::Sleep | Self::Warm => false,
        }
    }
}

/// An intent, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Doing {
    path: PathBuf,
    lock: Lock,
    stays: bool,
}

impl Drop for Doing {
    fn drop(&mut self) {
        if !self.stays {
            let _ = fs::remove_file(&self.path); // if it stays, the next command has nothing to do
        }
    }
}

impl Doing {
    /// Leaves the intent to the next command.
    pub(crate) fn leave(mut self) {
        self.stays = true;
    }
}

/// Records what is about to be done, until it is done.
pub(crate) fn intend(ground: &Ground, id: &ContainerId, intent: &Intent) -> Result<Doing> {
    // A separate name: a rename holds the container's lock, and a commit takes it later, so
    // neither may wait for the other's intent.
    let name = format!("do-{id}.{}", ground::new_id()?.short());
    let _making = Lock::share(&ground.places.pending())?;
    let (path, lock) = match intent.outlives_boot() {
        true => {
            let path = ground.places.pending().join(name);
            (path.clone(), Lock::take_new(&path)?)
        }
        false => {
            let path = ground.places.changes().join(name);
            let lock = match Lock::take_new(&path) {
                // Made at the first command after a boot; an older program has made it without this directory.
                Err(Error::File { source, .. })
                    if source.kind() == std::io::ErrorKind::NotFound =>
                {
                    disk::make_dir(&ground.places.changes(), 0o700)?;
                    Lock::take_new(&path)?
                }
                other => other?,
            };
            (path, lock)
        }
    };
    let doing = Doing { lock, path, stays: false };
    let text = serde_json::to_vec(intent).expect("names are written as text");
    doing.lock.write(&text, &doing.path)?;
    Ok(doing)
}

/// Returns the files of unfinished sleeps and wakes of a container.
pub(crate) fn sleep_intents(ground: &Ground, id: &ContainerId) -> Vec<PathBuf> {
    let stem = format!("do-{id}");
    let entries = fs::read_dir(ground.places.changes()).into_iter().flatten().flatten();
    let is_of = |path: &PathBuf| path.file_stem().is_some_and(|name| name == stem.as_str());
    let all = entries.map(|entry| entry.path()).filter(is_of);
    all.filter(|path| matches!(disk::read_json(path), Ok(Some(Intent::Sleep)))).collect()
}

/// The directory of a create in progress.
pub(crate) fn new_dir(ground: &Ground, id: &ContainerId) -> PathBuf {
    path(ground, "new", id)
}

/// Makes the directory of a container that is not visible yet.
pub(crate) fn begin(ground: &Ground, id: &ContainerId) -> Result<New> {
    let dir = path(ground, "new", id);
    let _making = Lock::share(&ground.places.pending())?;
    let made = fs::DirBuilder::new().mode(0o700).create(&dir);
    made.map_err(Error::file("cannot make directory", &dir))?;
    let lock = Lock::take(&dir)?;
    Ok(New { dir, lock, account: None })
}

/// Returns whether a create of this container is in progress.
pub(crate) fn is_being_created(ground: &Ground, id: &ContainerId) -> Result<bool> {
    let new = path(ground, "new", id);
    Ok(new.exists() && Lock::try_take(&new)?.is_none() && new.exists())
}

/// Withdraws a container; the caller holds its lock. No command finds the container when this
/// returns, and [`release`] releases the rest.
pub(crate) fn withdraw(ground: &Ground, id: &ContainerId) -> Result<PathBuf> {
    let (dir, dead) = (ground.dir(id), withdrawn_dir(ground, id));
    fs::rename(&dir, &dead).map_err(Error::file("cannot remove", &dir))?;
    Ok(dead)
}

/// The directory of a container from its withdrawal until its removal is complete.
pub(crate) fn withdrawn_dir(ground: &Ground, id: &ContainerId) -> PathBuf {
    path(ground, "dead", id)
}

/// The containers that are withdrawn and not removed yet, with their directories.
pub(crate) fn withdrawn(ground: &Ground) -> Result<Vec<(ContainerId, PathBuf)>> {
    let pending = ground.places.pending();
    let mut all = Vec::new();
    for entry in fs::read_dir(&pending).map_err(Error::file("cannot list", &pending))? {
        let entry = entry.map_err(Error::file("cannot list", &pending))?;
        let name = entry.file_name();
        let id =
            name.to_str().and_then(|name| name.strip_prefix("dead-")?.parse::<ContainerId>().ok());
        all.extend(id.map(|id| (id, entry.path())));
    }
    Ok(all)
}

/// LIMIT: number of unfinished changes beside which the files of a container are removed before its exit status is
/// returned. Starts in a loop otherwise make containers faster than a busy disk removes them.
const REMOVALS_BEHIND_MAX: usize = 32;

/// LIMIT: so much free space is enough on a disk of any size; elsewhere a quarter of the disk.
const FREE_BYTES: u64 = 32 << 30;

/// Whether the files of one more container may be removed after its exit status is returned: few others are being
/// removed, and the next container does not need their place on the disk.
pub(crate) fn may_remove_behind(ground: &Ground) -> bool {
    let pending = ground.places.pending();
    let has_room = rustix::fs::statvfs(&pending).is_ok_and(|disk| {
        // No number of files: a file system without such a limit.
        let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
        let has_bytes = disk.f_bavail > disk.f_blocks / 4 || free_bytes > FREE_BYTES;
        has_bytes && (disk.f_files == 0 || disk.f_favail > disk.f_files / 4)
    });
    let entries = fs::read_dir(pending);
    has_room
        && entries
            .is_ok_and(|entries| entries.take(REMOVALS_BEHIND_MAX).count() < REMOVALS_BEHIND_MAX)
}

/// Releases the resources of a failed create.
pub(crate) fn abandon(ground: &Ground, id: &ContainerId, name: &Name, new: &New) -> Result<()> {
    release_sockets(ground, id, &new.dir)?;
    ground.network()?.release(id)?;
    ground.names.release(name, id)?;
    ground.slots.release_all(id)?;
    disk::remove_tree(&new.dir)
}

/// Drops the held sockets of a container that was to be created asleep.
fn release_sockets(ground: &Ground, id: &ContainerId, dir: &Path) -> Result<()> {
    if !dir.join(ASLEEP).exists() {
        return Ok(());
    }
    hold::release(ground, id)?;
    Ok(ground.network()?.leave(id)?)
}

/// Releases all resources of a partly made or removed container, its directory last. `config`
/// is `None` if the record was not written yet, or is damaged.
pub(crate) fn release(
    ground: &Ground,
    id: &ContainerId,
    dir: &Path,
    config: Option<&Config>,
    volumes: bool,
) -> Result<()> {
    match config {
        Some(config) => {
            // ORDER: its rules end with its name, before another container has its addresses or its number.
            ground.names.release(&config.name, id)?;
            gating::withdraw(ground, config)?;
            if !config.addresses.is_empty() {
                ground.network()?.release(id)?;
            }
            ground.slots.release(config.ids, id)?;
            if volumes || config.spec.auto_remove {
                for volume in &config.spec.anonymous_volumes {
                    disk::remove_tree(&ground.places.volumes().join(volume.as_str()))?;
                }
            }
        }
        None => {
            release_sockets(ground, id, dir)?;
            ground.names.release_all(id)?;
            ground.slots.release_all(id)?;
            ground.network()?.release(id)?;
            ground.network()?.sweep(&|other| other != id)?;
        }
    }
    // ORDER: the record is removed last: with it the other resources are found at once.
    for entry in fs::read_dir(dir).map_err(Error::file("cannot list", dir))? {
        let entry = entry.map_err(Error::file("cannot list", dir))?;
        if entry.file_name() != CONFIG {
            disk::remove_tree(&entry.path())?;
        }
    }
    disk::remove_tree(dir)
}

fn path(ground: &Ground, kind: &str, id: &ContainerId) -> PathBuf {
    ground.places.pending().join(format!("{kind}-{id}"))
}
