//! Records of warm sleepers ([`crate::warm`]).
//!
//! Uses `ground` and `spare`.

use std::fs;
use std::time::SystemTime;

use dormouse_launch::Passed;
use dormouse_model::ContainerId;
use serde::{Deserialize, Serialize};

use crate::disk;
use crate::ground::{self, Ground};
use crate::spare::{Seen, Stamp, seen_config};

/// `RUN/warm/ID`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) passed: Passed,
    /// The number of its root (st_dev).
    pub(crate) device: u64,
    pub(crate) stamp: Stamp,
    pub(crate) config: Seen,
}

impl Record {
    /// Reads the record of a container; `None` if it is not warm. An incomplete record is of a killed maker.
    pub(crate) fn read(ground: &Ground, id: &ContainerId) -> Option<Self> {
        disk::read_json(&ground.warm_record(id)).ok().flatten()
    }

    /// Returns whether the newborn was made with the present configuration and surroundings.
    pub(crate) fn is_current(&self, ground: &Ground, id: &ContainerId) -> bool {
        self.config == seen_config(ground, id) && self.stamp == Stamp::now(ground)
    }
}

/// A warm sleeper, as lists show it.
#[derive(Debug, Clone)]
pub struct Warm {
    /// Its container.
    pub id: ContainerId,
    /// Since when it is warm.
    pub since: SystemTime,
    /// Its next wake is to use what it has: neither its configuration nor its surroundings have changed.
    pub is_fit: bool,
}

/// Returns a container's warmth; `None` if it has none.
pub(crate) fn of(ground: &Ground, id: &ContainerId) -> Option<Warm> {
    let since = fs::metadata(ground.warm_record(id)).and_then(|meta| meta.modified()).ok()?;
    let record = Record::read(ground, id);
    let is_fit = record.is_some_and(|it| it.is_current(ground, id) && it.passed.is_alive());
    Some(Warm { id: id.clone(), since, is_fit })
}

/// Returns the containers with a record.
pub(crate) fn ids(ground: &Ground) -> Vec<ContainerId> {
    // The first one makes the directory.
    ground::ids_in(&ground.places.warm()).unwrap_or_default()
}

/// Returns all warm sleepers, the one that has slept longest first.
pub(crate) fn all(ground: &Ground) -> Vec<Warm> {
    let mut all: Vec<Warm> = ids(ground).iter().filter_map(|id| of(ground, id)).collect();
    all.sort_by_key(|warm| warm.since);
    all
}

/// Returns whether a container has a newborn that lives, outdated or not. One whose newborn has exited is to be
/// released.
pub(crate) fn is_held(ground: &Ground, id: &ContainerId) -> bool {
    Record::read(ground, id).is_some_and(|record| record.passed.is_alive())
}
