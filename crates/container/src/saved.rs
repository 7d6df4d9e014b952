//! Checkpoints of a container, `LIB/containers/ID/checkpoints/N`, numbered from 1. Beside the records each has the
//! record of the first process, as that of an asleep container.
//!
//! Uses `ground` and `state`.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dormouse_model::{Config, ContainerId, NetMode};
use dormouse_parcel::Reader;
use dormouse_record::Records;

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::state::{InitRecord, SLEPT};

/// Selects a checkpoint.
#[derive(Debug, Clone, Default)]
pub enum From {
    /// The container's last.
    #[default]
    Last,
    /// One of the container's, by its number.
    Number(u32),
    /// A directory.
    Directory(PathBuf),
}

/// A checkpoint of a container.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Its number.
    pub number: u32,
    /// Its directory.
    pub path: PathBuf,
    /// Bytes on disk; files shared with other checkpoints of the container are counted for each.
    pub bytes: u64,
    /// When it was made, in milliseconds since the epoch; `None` if it is damaged.
    pub created_unix_ms: Option<i64>,
    /// Number of processes; 0 if it is damaged.
    pub processes: usize,
    /// Description of the damage, if any.
    pub damage: Option<String>,
}

/// Returns the checkpoints of a container, oldest first.
pub(crate) fn all(ground: &Ground, id: &ContainerId) -> Result<Vec<Checkpoint>> {
    let mut all = Vec::new();
    for number in numbers(ground, id)? {
        let path = dir(ground, id).join(number.to_string());
        let files = fs::read_dir(&path).into_iter().flatten().flatten();
        let bytes = files.filter_map(|f| f.metadata().ok()).map(|m| m.blocks() * 512).sum();
        let mut one =
            Checkpoint { number, path, bytes, created_unix_ms: None, processes: 0, damage: None };
        match Reader::open(&one.path) {
            Ok(reader) => {
                one.created_unix_ms = Some(reader.records().about.created_unix_ms);
                one.processes = reader.records().processes.len();
            }
            Err(e) => one.damage = Some(e.to_string()),
        }
        all.push(one);
    }
    Ok(all)
}

/// Returns the directory of a checkpoint.
pub(crate) fn path(ground: &Ground, id: &ContainerId, from: &From) -> Result<PathBuf> {
    find(ground, &ground.config(id)?, from)
}

/// Removes a checkpoint of a container.
pub(crate) fn remove(ground: &Ground, id: &ContainerId, number: u32) -> Result<()> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let path = find(ground, &config, &From::Number(number))?;
    // Renamed first: a partly removed checkpoint has no number.
    let gone = path.with_file_name(format!(".gone-{number}"));
    let _ = fs::remove_dir_all(&gone); // left by a killed removal
    fs::rename(&path, &gone).map_err(Error::file("cannot remove", &path))?;
    fs::remove_dir_all(&gone).map_err(Error::file("cannot remove", gone))
}

/// Directory of the numbered checkpoints of a container.
pub(crate) fn dir(ground: &Ground, id: &ContainerId) -> PathBuf {
    ground.dir(id).join("checkpoints")
}

/// Returns the numbers of the checkpoints of a container, in order.
pub(crate) fn numbers(ground: &Ground, id: &ContainerId) -> Result<Vec<u32>> {
    let dir = dir(ground, id);
    let listing = match fs::read_dir(&dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Error::file("cannot list", &dir))?,
    };
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let mut all: Vec<u32> = listing.flatten().filter_map(number).collect();
    all.sort_unstable();
    Ok(all)
}

/// Returns the directory of a checkpoint.
pub(crate) fn find(ground: &Ground, config: &Config, from: &From) -> Result<PathBuf> {
    let none = |number| Error::NoCheckpoint { name: config.name.to_string(), number };
    let numbers = numbers(ground, &config.id)?;
    let number = match from {
        From::Directory(path) => return Ok(path.clone()),
        From::Last => *numbers.last().ok_or_else(|| none(None))?,
        From::Number(number) if numbers.contains(number) => *number,
        From::Number(number) => return Err(none(Some(*number))),
    };
    Ok(dir(ground, &config.id).join(number.to_string()))
}

/// Writes the record of the first process beside the records of a new checkpoint.
pub(crate) fn write_first(checkpoint: &Path, init: &InitRecord) -> Result<()> {
    let path = checkpoint.join(SLEPT);
    disk::write_json(&path, &disk::with_checksum(init)?, Durable::No)
}

/// Returns the record of the first process at the time of a checkpoint of a container. `None` for a checkpoint in
/// another directory, which an attacker may have written, for one of an older program, and for a damaged
/// record: the user is looked up then as at a start.
pub(crate) fn first(ground: &Ground, id: &ContainerId, checkpoint: &Path) -> Option<InitRecord> {
    let is_own = [dir(ground, id).as_path(), &ground.dir(id)].contains(&checkpoint.parent()?);
    let read = || disk::read_with_checksum::<InitRecord>(&checkpoint.join(SLEPT)).ok().flatten();
    is_own.then(read).flatten()
}

/// Removes an unwanted checkpoint that a save has published.
pub(crate) fn withdraw(checkpoint: &Path) -> Result<()> {
    fs::remove_dir_all(checkpoint).map_err(Error::file("cannot remove", checkpoint))
}

/// Returns the peer of a connection that leaves the container's own network stack.
pub(crate) fn connection_outside(records: &Records, net: &NetMode) -> Option<SocketAddr> {
    match net {
        // In a private stack both ends belong to the container.
        NetMode::None => None,
        _ => records.connections().map(|c| c.peer).next(),
    }
}
