//! Named volumes: directories of their own that outlive containers.
//!
//! A volume is `LIB/volumes/NAME`. One that an operator created has a record beside it with labels and
//! the mark that no container has used it yet. A volume without a record is one of an earlier version, and
//! has been used.
//!
//! The first use of a volume copies the image's files, owner and mode at the mount point into it
//! (`fill`), as podman and docker do. The copy is made beside the volume and renamed to its place.
//! rename(2) replaces an empty directory and no other, so files that were put there first stay.
//!
//! The files of a volume have the host ids of the container that used it first. Its mount in a container
//! with other ids shifts the owners, so that every container sees the same ids.
//!
//! One of [`LOCKS`] locks, chosen by the name, is held while a volume is made, filled or removed. A volume
//! that is in use needs no lock.
//!
//! ```text
//! LIB/volumes/NAME/            its files
//! LIB/volumes/.records/NAME    its labels, its time, the mark and the ids
//! LIB/volumes/.new-NAME/       a copy in progress
//! LIB/volumes/.gone-NAME/      a removal in progress
//! RUN/volume-N.lock            the locks
//! ```
//!
//! Uses `ground`, and its own module.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use dormouse_model::{Config, IdMap, MountKind, Name};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::event::now_unix_ms;
use crate::ground::Ground;

mod fill;

/// LIMIT: volumes whose names share a lock are filled one after the other.
const LOCKS: u32 = 16;

/// A named volume.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Its name.
    pub name: Name,
    /// Its directory.
    pub path: PathBuf,
    /// When it was made, in milliseconds since the epoch.
    pub created_unix_ms: i64,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// No container has used it, so its first use copies the image's files.
    pub is_new: bool,
    /// Names of the containers that mount it.
    pub used_by: Vec<Name>,
}

/// `LIB/volumes/.records/NAME`. Fields are only ever added, each with a default.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Record {
    created_unix_ms: Option<i64>,
    labels: BTreeMap<String, String>,
    is_new: bool,
    /// The ids of its files on the host. Unknown for a volume of an earlier version.
    ids: Option<IdMap>,
}

/// The ids of files that an operator put into a new volume: those of the host.
const HOST_IDS: IdMap = IdMap { base: 0, wide: true };

/// The directory of a volume, whether it exists or not.
pub(crate) fn path(ground: &Ground, name: &Name) -> PathBuf {
    ground.places.volumes().join(name.as_str())
}

fn records(ground: &Ground) -> PathBuf {
    ground.places.volumes().join(".records")
}

fn record(ground: &Ground, name: &Name) -> Result<Option<Record>> {
    disk::read_json(&records(ground).join(name.as_str()))
}

fn lock(ground: &Ground, name: &Name) -> Result<Lock> {
    let sum = name.as_str().bytes().fold(0_u32, |n, b| n.wrapping_mul(31).wrapping_add(b.into()));
    Lock::take_new(&ground.places.run.join(format!("volume-{}.lock", sum % LOCKS)))
}

/// The names of the containers that mount each volume.
fn users(ground: &Ground) -> Result<HashMap<Name, Vec<Name>>> {
    let mut users: HashMap<Name, Vec<Name>> = HashMap::new();
    for id in ground.ids()? {
        let config = match ground.config(&id) {
            Err(Error::NoContainer(_)) => continue, // removed meanwhile
            other => other?,
        };
        for mount in config.spec.mounts {
            if let MountKind::Volume { name, .. } = mount.kind {
                users.entry(name).or_default().push(config.name.clone());
            }
        }
    }
    Ok(users)
}

/// Returns all volumes, sorted by name.
pub(crate) fn all(ground: &Ground) -> Result<Vec<Volume>> {
    let mut users = users(ground)?;
    let dir = ground.places.volumes();
    let mut all = Vec::new();
    for entry in fs::read_dir(&dir).map_err(Error::file("cannot list", &dir))? {
        let entry = entry.map_err(Error::file("cannot list", &dir))?;
        let name = entry.file_name().to_str().and_then(|name| name.parse::<Name>().ok());
        let Some(name) = name else { continue };
        let used_by = users.remove(&name).unwrap_or_default();
        all.extend(look(ground, name, used_by)?);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Returns one volume.
pub(crate) fn find(ground: &Ground, name: &Name) -> Result<Volume> {
    let used_by = users(ground)?.remove(name).unwrap_or_default();
    look(ground, name.clone(), used_by)?.ok_or_else(|| Error::NoVolume(name.to_string()))
}

/// Returns the facts of a volume; `None` if it does not exist.
fn look(ground: &Ground, name: Name, used_by: Vec<Name>) -> Result<Option<Volume>> {
    let path = path(ground, &name);
    let meta = match fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_dir() => meta,
        Ok(_) => return Ok(None),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::file("cannot look at", path)(e)),
    };
    let record = record(ground, &name)?.unwrap_or_default();
    let made = || {
        let since = meta.created().or_else(|_| meta.modified()).ok()?.duration_since(UNIX_EPOCH);
        i64::try_from(since.ok()?.as_millis()).ok()
    };
    Ok(Some(Volume {
        name,
        path,
        created_unix_ms: record.created_unix_ms.or_else(made).unwrap_or(0),
        labels: record.labels,
        is_new: record.is_new,
        used_by,
    }))
}

/// Makes an empty volume.
pub(crate) fn create(
    ground: &Ground,
    name: &Name,
    labels: BTreeMap<String, String>,
) -> Result<Volume> {
    let _lock = lock(ground, name)?;
    let path = path(ground, name);
    if path.exists() {
        return Err(Error::VolumeExists(name.to_string()));
    }
    // ORDER: the record first. Without its volume it is overwritten; a volume without it counts as used.
    disk::make_dir(&records(ground), 0o700)?;
    let created_unix_ms = Some(now_unix_ms());
    let record = Record { created_unix_ms, labels, is_new: true, ids: None };
    disk::write_json(&records(ground).join(name.as_str()), &record, Durable::Yes)?;
    fs::create_dir(&path).map_err(Error::file("cannot make volume", &path))?;
    set_mode(&path)?;
    find(ground, name)
}

/// Removes a volume, which no container may be using.
pub(crate) fn remove(ground: &Ground, name: &Name) -> Result<()> {
    let _lock = lock(ground, name)?;
    let volume = find(ground, name)?;
    if !volume.used_by.is_empty() {
        let used_by = volume.used_by.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        return Err(Error::VolumeInUse { name: name.to_string(), used_by });
    }
    remove_files(ground, name)
}

/// Removes the volumes that no container mounts, and returns their names.
pub(crate) fn remove_unused(ground: &Ground) -> Result<Vec<Name>> {
    let mut removed = Vec::new();
    for volume in all(ground)?.into_iter().filter(|volume| volume.used_by.is_empty()) {
        match remove(ground, &volume.name) {
            Ok(()) => removed.push(volume.name),
            // A container was made since, or another command has removed it.
            Err(Error::VolumeInUse { .. } | Error::NoVolume(_)) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(removed)
}

/// Removes the files of a volume. The caller holds its lock.
fn remove_files(ground: &Ground, name: &Name) -> Result<()> {
    let path = path(ground, name);
    let gone = ground.places.volumes().join(format!(".gone-{name}"));
    disk::remove_tree(&gone)?; // left by a killed removal
    // ORDER: renamed first: a volume is there as a whole or not at all.
    match fs::rename(&path, &gone) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        other => other.map_err(Error::file("cannot remove volume", &path))?,
    }
    disk::remove(&records(ground).join(name.as_str()))?;
    disk::remove_tree(&gone)
}

/// The directories of the named volumes that a container mounts.
pub(crate) fn paths_of(ground: &Ground, config: &Config) -> Vec<PathBuf> {
    let of = |mount: &dormouse_model::Mount| match &mount.kind {
        MountKind::Volume { name, .. } => Some(path(ground, name)),
        _ => None,
    };
    config.spec.mounts.iter().filter_map(of).collect()
}

/// Makes the volumes of a starting container that are missing or new. `root` is its root file system,
/// with the host ids of `ids`, and without the mounts of the container.
pub(crate) fn prepare(ground: &Ground, config: &Config, root: BorrowedFd<'_>) -> Result<()> {
    for mount in &config.spec.mounts {
        if let MountKind::Volume { name, no_copy } = &mount.kind {
            let from = (!no_copy).then_some((root, mount.target.as_str()));
            prepare_one(ground, name, from, config.ids)?;
        }
    }
    Ok(())
}

fn prepare_one(
    ground: &Ground,
    name: &Name,
    from: Option<(BorrowedFd<'_>, &str)>,
    ids: IdMap,
) -> Result<()> {
    let path = path(ground, name);
    let is_new = || Ok::<_, Error>(record(ground, name)?.is_some_and(|record| record.is_new));
    if path.is_dir() && !is_new()? {
        return Ok(());
    }
    let _lock = lock(ground, name)?;
    if path.is_dir() && !is_new()? {
        return Ok(());
    }
    let new = ground.places.volumes().join(format!(".new-{name}"));
    disk::remove_tree(&new)?; // left by a killed start
    fs::create_dir(&new).map_err(Error::file("cannot make volume", &new))?;
    chown(&new, Some(ids.base), Some(ids.base)).map_err(Error::file("cannot own", &new))?;
    set_mode(&new)?;
    let filled = match from {
        Some((root, target)) => fill::fill(root, target, &new, ids),
        None => Ok(()),
    };
    let placed = filled.and_then(|()| match fs::rename(&new, &path) {
        // Files were put into a new volume from the host: they stay.
        Err(e) if e.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
            disk::remove_tree(&new).map(|()| HOST_IDS)
        }
        other => other.map_err(Error::file("cannot make volume", &path)).map(|()| ids),
    });
    let ids = placed.inspect_err(|_| {
        let _ = disk::remove_tree(&new); // the first error is returned
    })?;
    let record = record(ground, name)?.unwrap_or_default();
    let created_unix_ms = record.created_unix_ms.or(Some(now_unix_ms()));
    let record = Record { created_unix_ms, is_new: false, ids: Some(ids), ..record };
    disk::make_dir(&records(ground), 0o700)?;
    // Without the record after a power cut, the volume is one of an earlier version.
    disk::write_json(&records(ground).join(name.as_str()), &record, Durable::No)
}

/// Returns the map from the ids of a volume's files to those of a container, for a user namespace that
/// shifts the owners of a mount; `None` if they are the same or not known.
pub(crate) fn map(ground: &Ground, name: &Name, ids: IdMap) -> Result<Option<String>> {
    let stored = record(ground, name)?.and_then(|record| record.ids);
    let Some(stored) = stored.filter(|stored| *stored != ids) else { return Ok(None) };
    let runs: &[(u32, u32)] = match stored.wide && ids.wide {
        true => &[(0, 65_536)],
        false => &[(0, 32_767), (IdMap::NOBODY, 1)], // the ids that every container has
    };
    let line = |(first, count): &(u32, u32)| {
        Some(format!("{} {} {count}\n", stored.to_host(*first)?, ids.to_host(*first)?))
    };
    Ok(runs.iter().map(line).collect())
}

/// Sets the mode of a new volume, past the umask.
fn set_mode(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .map_err(Error::file("cannot set permissions of", path))
}
