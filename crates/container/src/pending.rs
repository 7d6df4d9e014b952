//! What is being made or removed, and what is left of it when that was interrupted.
//!
//! A container that is not whole has its directory in `LIB/pending`: `new-ID` until one rename
//! publishes it, `dead-ID` from the rename that withdraws it until all that it had is given back. The
//! directory is locked by whoever works on it, so one without a holder is an interrupted create or
//! removal, whose number is known. [`Engine::open`] looks there, for every command: it is one
//! directory, empty but for moments, however many containers there are.
//!
//! A change of a container that exists is one rename of its record, but for those that need another
//! step: they leave an [`Intent`] there, `do-ID.NUMBER`, as long as they are at it.
//!
//! What an interrupted create had taken is found by its owner, in the tables of names, ids and
//! addresses; a search, but only then. Giving back is repeated until it is done, and takes nothing
//! from another: each table gives a thing back only to the one that has it.
//!
//! The lock on `LIB/pending` is shared by those who make an entry and have not locked it yet; whoever
//! clears away takes it alone, so that it never takes a new entry for an orphan. It waits for nobody:
//! what it finds locked is left to the next command. And what is locked at last may have been
//! published or finished meanwhile, so its name is looked at again.

use std::fs;
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

/// What is being done to a container that exists, for whoever finishes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Intent {
    /// It has one of these names; the other is taken or given back.
    Rename { names: [Name; 2] },
    /// It is frozen for a moment.
    Pause,
    /// It is frozen, or let go on: what its record says holds.
    Freezer,
    /// Its limits change: what its record says holds.
    Limits,
    /// It falls asleep or wakes, and is marked so: one that runs when that was interrupted is awake.
    Sleep,
}

/// An intent, which is over when this is dropped.
#[derive(Debug)]
pub(crate) struct Doing {
    path: PathBuf,
    lock: Lock,
}

impl Drop for Doing {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // the next command finds nothing to do
    }
}

impl Engine {
    /// Says what is about to be done, until it is done.
    pub(crate) fn intend(&self, id: &ContainerId, intent: &Intent) -> Result<Doing> {
        // A name of its own: who renames holds the container's lock, who commits wants it later, so
        // neither may wait for the other's intent.
        let path = self.pending("do", id).with_extension(new_id()?.short());
        let _making = Lock::share(&self.places().pending())?;
        let doing = Doing { lock: Lock::take_new(&path)?, path };
        let text = serde_json::to_vec(intent).expect("names are written as text");
        doing.lock.write(&text, &doing.path)?;
        Ok(doing)
    }

    /// Whether it is finished: not while somebody else works on the container.
    fn finish_intent(&self, id: &ContainerId, path: &Path) -> Result<bool> {
        let lock = Lock::try_take(&self.dir(id))?;
        let config = match self.config(id) {
            Ok(_) if lock.is_none() => return Ok(false),
            Err(Error::NoContainer(_)) => None,
            other => Some(other?),
        };
        // Nothing is done yet where the intent is not written to its end.
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
                // A killing of all that was interrupted may have left it frozen.
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

    /// Does something while a container is frozen, if it runs; one that is paused stays so.
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

    /// Makes the directory of a container that nobody sees yet.
    pub(crate) fn begin(&self, id: &ContainerId) -> Result<New> {
        let dir = self.pending("new", id);
        let _making = Lock::share(&self.places().pending())?;
        fs::create_dir(&dir).map_err(Error::file("cannot make directory", &dir))?;
        let lock = Lock::take(&dir)?;
        Ok(New { dir, lock })
    }

    /// Whether a create of this container is under way.
    pub(crate) fn is_being_created(&self, id: &ContainerId) -> Result<bool> {
        let new = self.pending("new", id);
        Ok(new.exists() && Lock::try_take(&new)?.is_none() && new.exists())
    }

    /// Withdraws a container; the caller holds its lock. It is gone for everybody when this returns,
    /// and [`give_back`](Self::give_back) takes the rest.
    pub(crate) fn withdraw(&self, id: &ContainerId) -> Result<PathBuf> {
        let (dir, dead) = (self.dir(id), self.pending("dead", id));
        fs::rename(&dir, &dead).map_err(Error::file("cannot remove", &dir))?;
        Ok(dead)
    }

    /// Gives back what a create that failed has taken.
    pub(crate) fn abandon(&self, id: &ContainerId, name: &Name, new: &New) -> Result<()> {
        self.unlisten(id, &new.dir)?;
        self.network()?.release(id)?;
        self.names.release(name, id)?;
        self.slots.release_all(id)?;
        remove_tree(&new.dir)
    }

    /// Takes back what is called in the name of a container that was to come to be asleep.
    fn unlisten(&self, id: &ContainerId, dir: &Path) -> Result<()> {
        if !dir.join(ASLEEP).exists() {
            return Ok(());
        }
        self.no_longer_called(id)?;
        Ok(self.network()?.leave(id)?)
    }

    /// Gives back all that a container which is not whole has taken, its directory last. `config` is
    /// not known where its record was not written yet, or is damaged.
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
        // ORDER: the record goes last: with it the rest is found at once.
        for entry in fs::read_dir(dir).map_err(Error::file("cannot list", dir))? {
            let entry = entry.map_err(Error::file("cannot list", dir))?;
            if entry.file_name() != crate::engine::CONFIG {
                remove_tree(&entry.path())?;
            }
        }
        remove_tree(dir)
    }

    /// Finishes what was interrupted. Returns how many commands that were.
    pub(crate) fn finish_interrupted(&self) -> Result<usize> {
        let pending = self.places().pending();
        let list = || fs::read_dir(&pending).map_err(Error::file("cannot list", &pending));
        if list()?.next().is_none() {
            return Ok(0);
        }
        // Somebody is making an entry, or is here already: what is left is for the next command.
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
            // ORDER: its last holder may have published it after we opened it: then it is somebody's.
            if !entry.path().exists() {
                continue;
            }
            if kind == "do" {
                finished += usize::from(self.finish_intent(&id, &entry.path())?);
                continue;
            }
            finished += 1;
            // A removal that was interrupted has its record; volumes that were to stay may be those
            // that it was asked to remove, and stay.
            let config = match kind {
                "dead" => crate::disk::read_json(&entry.path().join(crate::engine::CONFIG)),
                _ => Ok(None),
            };
            self.give_back(&id, &entry.path(), config.unwrap_or(None).as_ref(), false)?;
        }
        Ok(finished)
    }
}

/// What has no process any more has nothing left to finish.
fn if_alive(finished: Result<()>) -> Result<()> {
    match finished {
        Err(Error::State { .. }) => Ok(()),
        other => other,
    }
}

/// LIMIT: how often the keeper may write into a directory while it is removed.
const REMOVALS_MAX: usize = 100;

/// Removes a file or a tree; one that is gone is fine.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    use std::io::ErrorKind;
    let remove = || match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    let mut removed = remove();
    for _ in 0..REMOVALS_MAX {
        // The keeper writes the end of a process whose start was given up.
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
