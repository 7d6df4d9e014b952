//! Creates and removals in progress, and the recovery from interrupted ones.
//!
//! A partly made or partly removed container has its directory in `LIB/pending`: `new-ID` until one
//! rename publishes it; `dead-ID` from the rename that withdraws it until all its resources are
//! released. The working process holds a lock on the directory. An unlocked directory is therefore
//! an interrupted create or removal, and its name has the container's id. [`Engine::open`] checks
//! `LIB/pending` for every command: one directory, nearly always empty, however many containers
//! there are.
//!
//! A change of an existing container is one rename of its record. A change that needs another step
//! leaves an [`Intent`] there, `do-ID.NUMBER`, for as long as it takes.
//!
//! The resources of an interrupted create are found by its id, in the tables of names, ids and
//! addresses: a search, but in this case only. Releasing is repeated until it is complete, and
//! takes nothing from another container: each table releases an entry only for its owner.
//!
//! The lock on `LIB/pending` is shared by processes that make an entry and have not locked it yet.
//! Recovery takes it exclusively, so that it never treats a new entry as an orphan. Recovery never
//! waits: a locked entry is left to the next command. An entry locked at last may have been
//! published or finished meanwhile, so its name is looked up again.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use dormouse_model::{Config, ContainerId, Name, State};
use serde::{Deserialize, Serialize};

use crate::disk::Lock;
use crate::engine::{Engine, new_id};
use crate::error::{Error, Result};
use crate::sleep::ASLEEP;

/// A create in progress: its directory, locked.
#[derive(Debug)]
pub(crate) struct New {
    pub(crate) dir: PathBuf,
    pub(crate) lock: Lock,
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
    /// The container falls asleep or wakes, and is marked so; if it runs after an interruption it
    /// is awake.
    Sleep,
}

/// An intent, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Doing {
    path: PathBuf,
    lock: Lock,
}

impl Drop for Doing {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // if it stays, the next command has nothing to do
    }
}

impl Engine {
    /// Records what is about to be done, until it is done.
    pub(crate) fn intend(&self, id: &ContainerId, intent: &Intent) -> Result<Doing> {
        // A separate name: a rename holds the container's lock, and a commit takes it later, so
        // neither may wait for the other's intent.
        let path = self.pending("do", id).with_extension(new_id()?.short());
        let _making = Lock::share(&self.places().pending())?;
        let doing = Doing { lock: Lock::take_new(&path)?, path };
        let text = serde_json::to_vec(intent).expect("names are written as text");
        doing.lock.write(&text, &doing.path)?;
        Ok(doing)
    }

    /// Finishes an intent. Returns false while another process works on the container.
    fn finish_intent(&self, id: &ContainerId, path: &Path) -> Result<bool> {
        let lock = Lock::try_take(&self.dir(id))?;
        let config = match self.config(id) {
            Ok(_) if lock.is_none() => return Ok(false),
            Err(Error::NoContainer(_)) => None,
            other => Some(other?),
        };
        // Nothing was done yet if the intent is not completely written.
        match (crate::disk::read_json(path).unwrap_or(None), &config) {
            (Some(Intent::Rename { names }), config) => {
                let keep = config.as_ref().map(|config| &config.name);
                let mut strays = names.iter().filter(|name| keep != Some(*name));
                strays.try_for_each(|name| self.names.release(name, id))?;
            }
            (Some(Intent::Pause), Some(config)) => if_alive(self.finish_freezing(config, false))?,
            (Some(Intent::Freezer), Some(config)) => if_alive(self.finish_freezing(config, true))?,
            (Some(Intent::Limits), Some(config)) => if_alive(self.finish_limiting(config))?,
            (Some(Intent::Sleep), Some(config)) => {
                // An interrupted kill of all processes may have left the container frozen.
                if_alive(self.finish_freezing(config, true))?;
                let look = self.look_locked(config)?;
                if look.is_alive() {
                    self.stay_awake(config, look.init)?;
                }
            }
            _ => {}
        }
        remove_tree(path)?;
        Ok(true)
    }

    /// Runs a closure while a running container is frozen; a paused container stays paused.
    pub fn while_frozen<T>(&self, id: &ContainerId, f: impl FnOnce() -> T) -> Result<T> {
        if !matches!(self.inspect(id)?.state, State::Running | State::Drowsy) {
            return Ok(f());
        }
        let _intent = self.intend(id, &Intent::Pause)?;
        self.pause(id)?;
        let done = f();
        self.unpause(id)?;
        Ok(done)
    }

    fn pending(&self, kind: &str, id: &ContainerId) -> PathBuf {
        self.places().pending().join(format!("{kind}-{id}"))
    }

    /// Makes the directory of a container that is not visible yet.
    pub(crate) fn begin(&self, id: &ContainerId) -> Result<New> {
        let dir = self.pending("new", id);
        let _making = Lock::share(&self.places().pending())?;
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(Error::file("cannot make directory", &dir))?;
        let lock = Lock::take(&dir)?;
        Ok(New { dir, lock })
    }

    /// Returns whether a create of this container is in progress.
    pub(crate) fn is_being_created(&self, id: &ContainerId) -> Result<bool> {
        let new = self.pending("new", id);
        Ok(new.exists() && Lock::try_take(&new)?.is_none() && new.exists())
    }

    /// Withdraws a container; the caller holds its lock. No command finds the container when this
    /// returns, and [`give_back`](Self::give_back) releases the rest.
    pub(crate) fn withdraw(&self, id: &ContainerId) -> Result<PathBuf> {
        let (dir, dead) = (self.dir(id), self.pending("dead", id));
        fs::rename(&dir, &dead).map_err(Error::file("cannot remove", &dir))?;
        Ok(dead)
    }

    /// Releases the resources of a failed create.
    pub(crate) fn abandon(&self, id: &ContainerId, name: &Name, new: &New) -> Result<()> {
        self.unlisten(id, &new.dir)?;
        self.network()?.release(id)?;
        self.names.release(name, id)?;
        self.slots.release_all(id)?;
        remove_tree(&new.dir)
    }

    /// Drops the held sockets of a container that was to be created asleep.
    fn unlisten(&self, id: &ContainerId, dir: &Path) -> Result<()> {
        if !dir.join(ASLEEP).exists() {
            return Ok(());
        }
        self.no_longer_called(id)?;
        Ok(self.network()?.leave(id)?)
    }

    /// Releases all resources of a partly made or removed container, its directory last. `config`
    /// is `None` if the record was not written yet, or is damaged.
    pub(crate) fn give_back(
        &self,
        id: &ContainerId,
        dir: &Path,
        config: Option<&Config>,
        volumes: bool,
    ) -> Result<()> {
        match config {
            Some(config) => {
                if !config.addresses.is_empty() {
                    self.network()?.release(id)?;
                }
                self.names.release(&config.name, id)?;
                self.slots.release(config.ids, id)?;
                if volumes || config.auto_remove {
                    for volume in &config.anonymous_volumes {
                        remove_tree(&self.places().volumes().join(volume.as_str()))?;
                    }
                }
            }
            None => {
                self.unlisten(id, dir)?;
                self.names.release_all(id)?;
                self.slots.release_all(id)?;
                self.network()?.release(id)?;
                self.network()?.sweep(&|other| other != id)?;
            }
        }
        // ORDER: the record is removed last: with it the other resources are found at once.
        for entry in fs::read_dir(dir).map_err(Error::file("cannot list", dir))? {
            let entry = entry.map_err(Error::file("cannot list", dir))?;
            if entry.file_name() != crate::engine::CONFIG {
                remove_tree(&entry.path())?;
            }
        }
        remove_tree(dir)
    }

    /// Finishes interrupted commands. Returns their number.
    pub(crate) fn finish_interrupted(&self) -> Result<usize> {
        let pending = self.places().pending();
        let list = || fs::read_dir(&pending).map_err(Error::file("cannot list", &pending));
        if list()?.next().is_none() {
            return Ok(0);
        }
        // Another process is making an entry or recovering already: leave the entries to the next
        // command.
        let Some(_alone) = Lock::try_take(&pending)? else { return Ok(0) };
        let mut finished = 0;
        for entry in list()? {
            let entry = entry.map_err(Error::file("cannot list", &pending))?;
            let name = entry.file_name();
            let Some((kind, id)) = name.to_str().and_then(|name| name.split_once('-')) else {
                continue;
            };
            let id = id.split_once('.').map_or(id, |(id, _)| id);
            let Ok(id) = id.parse::<ContainerId>() else { continue };
            let Some(_lock) = Lock::try_take(&entry.path())? else { continue };
            // ORDER: its last holder may have published it after it was opened here: then it is no
            // orphan.
            if !entry.path().exists() {
                continue;
            }
            if kind == "do" {
                finished += usize::from(self.finish_intent(&id, &entry.path())?);
                continue;
            }
            finished += 1;
            // An interrupted removal still has its record. Volumes are kept, even if the removal
            // was to remove them.
            let config = match kind {
                "dead" => crate::disk::read_json(&entry.path().join(crate::engine::CONFIG)),
                _ => Ok(None),
            };
            self.give_back(&id, &entry.path(), config.unwrap_or(None).as_ref(), false)?;
        }
        Ok(finished)
    }
}

/// Accepts the error for a container without processes: nothing remains to be finished there.
fn if_alive(finished: Result<()>) -> Result<()> {
    match finished {
        Err(Error::State { .. }) => Ok(()),
        other => other,
    }
}

/// LIMIT: how often the keeper may write into a directory while it is removed.
const REMOVALS_MAX: usize = 100;

/// Removes a file or a tree; a missing one is no error.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    use std::io::ErrorKind;
    let remove = || match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    let mut removed = remove();
    for _ in 0..REMOVALS_MAX {
        // The keeper writes the exit of a process whose start was abandoned.
        if removed.as_ref().err().map(std::io::Error::kind) != Some(ErrorKind::DirectoryNotEmpty) {
            break;
        }
        removed = remove();
    }
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::file("cannot remove", path)(e)),
        _ => Ok(()),
    }
}
