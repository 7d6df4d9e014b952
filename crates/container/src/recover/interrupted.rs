//! Completion of interrupted creates, removals and changes ([`crate::pending`]).
//!
//! Recovery never waits: a locked entry is left to the next command. An entry locked at last may have
//! been published or finished meanwhile, so its name is looked up again.
//!
//! Uses `ground`, `state`, `freeze`, `pending`, `gating`, `spare`, `end` and `twin`.

use std::fs;
use std::path::Path;

use dormouse_model::{Config, ContainerId, State};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{CONFIG, Ground};
use crate::pending::{self, Intent};
use crate::{end, freeze, gating, spare, state, twin};

/// Finishes interrupted commands. Returns their number.
pub(crate) fn finish(ground: &Ground) -> Result<usize> {
    // A spare that cannot be released keeps nothing from it.
    let spares = spare::sweep(ground);
    let finished = finish_containers(ground)?;
    Ok(spares? + finished)
}

/// The same but for spares.
pub(crate) fn finish_containers(ground: &Ground) -> Result<usize> {
    let pending = ground.places.pending();
    let list = || -> Result<Vec<fs::DirEntry>> {
        let lasting = fs::read_dir(&pending).map_err(Error::file("cannot list", &pending))?;
        // The directory is made by the first change.
        let others = fs::read_dir(ground.places.changes()).into_iter().flatten();
        let all = lasting.chain(others).collect::<std::io::Result<_>>();
        all.map_err(Error::file("cannot list", &pending))
    };
    let entries = list()?;
    if entries.is_empty() {
        return Ok(0);
    }
    // Another process is making an entry or recovering already: leave the entries to the next
    // command. Those that were there before have been locked by their makers when this lock is free.
    let Some(alone) = Lock::try_take(&pending)? else { return Ok(0) };
    let (mut dead, mut adopted) = (Vec::new(), Vec::new());
    let mut finished = 0;
    // An entry that cannot be finished keeps no other from it.
    let mut failed = None;
    for entry in entries {
        let name = entry.file_name();
        let Some((kind, id)) = name.to_str().and_then(|name| name.split_once('-')) else {
            continue;
        };
        let id = id.split_once('.').map_or(id, |(id, _)| id);
        let Ok(id) = id.parse::<ContainerId>() else { continue };
        let Some(lock) = Lock::try_take(&entry.path())? else { continue };
        // ORDER: its last holder may have published it after it was opened here: then it is no
        // orphan.
        if !entry.path().exists() {
            continue;
        }
        if kind == gating::CHANGE {
            match gating::finish_change(ground, &entry.path()) {
                Ok(is_finished) => finished += usize::from(is_finished),
                Err(e) => failed = failed.or(Some(e)),
            }
            continue;
        }
        if kind == "do" {
            match finish_intent(ground, &id, &entry.path()) {
                Ok(is_finished) => finished += usize::from(is_finished),
                Err(e) => failed = failed.or(Some(e)),
            }
            continue;
        }
        if kind == "dead" {
            drop(lock);
            dead.push((id, entry.path()));
            continue;
        }
        if spare::is_adopted(ground, &id) {
            drop(lock);
            adopted.push((id, entry.path()));
            continue;
        }
        finished += 1;
        let released = pending::release(ground, &id, &entry.path(), None, false);
        failed = failed.or(released.err());
    }
    // A removal may take long, as may the exit of a newborn, and no create, sleep or wake waits for it: its own lock
    // suffices. One at a time is
    // locked, so that other commands and settlers do a part of many.
    drop(alone);
    for (id, dir) in adopted {
        match finish_adoption(ground, &id, &dir) {
            Ok(is_finished) => finished += usize::from(is_finished),
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    for (id, dir) in dead {
        match finish_removal(ground, &id, &dir) {
            Ok(is_finished) => finished += usize::from(is_finished),
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    failed.map_or(Ok(finished), Err)
}

/// Releases a create that had adopted a spare. Returns false if another process is at it, or has finished it.
///
/// ORDER: kernel objects, then addresses and ids: no other container has those while a process may use them.
fn finish_adoption(ground: &Ground, id: &ContainerId, dir: &Path) -> Result<bool> {
    let Some(_lock) = Lock::try_take(dir)? else { return Ok(false) };
    if !dir.exists() {
        return Ok(false);
    }
    spare::release_objects(ground, id)?;
    pending::release(ground, id, dir, None, false).map(|()| true)
}

/// Finishes a removal. Returns false if another process is at it, or has finished it.
fn finish_removal(ground: &Ground, id: &ContainerId, dir: &Path) -> Result<bool> {
    let Some(_lock) = Lock::try_take(dir)? else { return Ok(false) };
    if !dir.exists() {
        return Ok(false);
    }
    // It still has its record. Volumes are kept, even if the removal was to remove them.
    let config: Option<Config> = disk::read_json(&dir.join(CONFIG)).unwrap_or(None);
    end::complete(ground, id, dir, config.as_ref()).map(|()| true)
}

/// Finishes an intent. Returns false while another process works on the container.
fn finish_intent(ground: &Ground, id: &ContainerId, path: &Path) -> Result<bool> {
    let lock = Lock::try_take(&ground.dir(id))?;
    let config = match ground.config(id) {
        Ok(_) if lock.is_none() => return Ok(false),
        Err(Error::NoContainer(_)) => None,
        other => Some(other?),
    };
    // Nothing was done yet if the intent is not completely written.
    match (disk::read_json(path).unwrap_or(None), &config) {
        (Some(Intent::Rename { names }), config) => {
            let keep = config.as_ref().map(|config| &config.name);
            let mut strays = names.iter().filter(|name| keep != Some(*name));
            strays.try_for_each(|name| ground.names.release(name, id))?;
        }
        (Some(Intent::Pause), Some(config)) => if_alive(freeze::finish(ground, config, false))?,
        (Some(Intent::Freezer), Some(config)) => if_alive(freeze::finish(ground, config, true))?,
        (Some(Intent::Limits), Some(config)) => if_alive(freeze::finish_limits(ground, config))?,
        // The tasks of a twin end with the command that traces them.
        (Some(Intent::Twin), _) if twin::remove(ground, id)? => {}
        (Some(Intent::Twin), _) => return Ok(false), // by a later command
        (Some(Intent::Sleep), Some(config)) => {
            // An interrupted kill of all processes may have left the container frozen.
            if_alive(freeze::finish(ground, config, true))?;
            let observed = state::observe_locked(ground, config)?;
            if observed.init.as_ref().is_some_and(|init| init.unready) {
                end::end_unready(ground, config, &observed)?;
            } else if observed.is_alive() {
                end::stay_awake(ground, config, observed.init)?;
            }
        }
        (Some(Intent::Warm), Some(config)) => {
            let observed = state::observe_locked(ground, config)?;
            if observed.state == State::Asleep && observed.init.is_none() {
                end::release_objects(ground, config)?;
            }
        }
        _ => {}
    }
    disk::remove_tree(path)?;
    Ok(true)
}

/// Accepts the error for a container without processes: nothing remains to be finished there.
fn if_alive(finished: Result<()>) -> Result<()> {
    match finished {
        Err(Error::State { .. }) => Ok(()),
        other => other,
    }
}
