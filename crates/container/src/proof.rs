//! Proof of a checkpoint before the processes end: it is restored as a twin and compared, unless a
//! checkpoint of the same shape was proven before.
//!
//! `LIB/containers/ID/proven.json` has the features of all shapes that were proven
//! ([`dormouse_checkpoint::proof::features`]), by which programs and under which kernel. A checkpoint with a
//! feature that is not among them is proven again.
//!
//! Uses `ground` and `twin`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_checkpoint::proof::{Proof, features};
use dormouse_model::ContainerId;
use dormouse_parcel::Reader;
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::twin::{self, Original, Unmade};

/// Whether a checkpoint is proven before the processes end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Trial {
    /// By a trial restore, unless its shape was proven before.
    #[default]
    Made,
    /// No.
    Skipped,
}

/// `LIB/containers/ID/proven.json`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Proven {
    /// The programs: length and time of modification of this one and of the keeper.
    #[serde(default)]
    programs: String,
    /// `uname -r`.
    #[serde(default)]
    kernel: String,
    /// The features that were proven.
    #[serde(default)]
    features: BTreeSet<String>,
    /// The object because of which the last checkpoint of a new shape had no twin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unproven: Option<String>,
}

fn path(ground: &Ground, id: &ContainerId) -> PathBuf {
    ground.dir(id).join("proven.json")
}

/// Returns the object because of which the last checkpoint of a container was not proven.
pub(crate) fn unproven(ground: &Ground, id: &ContainerId) -> Option<String> {
    disk::read_json::<Proven>(&path(ground, id)).ok().flatten()?.unproven
}

/// The result of [`prove`].
pub(crate) struct Proved {
    /// How long it took.
    pub(crate) took: Duration,
    /// What prevented the trial; `None` if the checkpoint, or one of its shape, was proven.
    pub(crate) unproven: Option<String>,
}

/// Proves a published checkpoint, while the container is stopped.
///
/// Errors: [`Error::Unlike`] names the first difference, [`Error::NotRestored`] the failed step. The caller
/// resumes the container.
pub(crate) fn prove(ground: &Ground, original: Original, checkpoint: &Path) -> Result<Proved> {
    let began = Instant::now();
    let (id, name) = (original.config.id.clone(), original.config.name.clone());
    let id = &id;
    let reader = Reader::open(checkpoint)?;
    let here = Proven {
        programs: programs()?,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        features: features(reader.records())?,
        unproven: None,
    };
    // A damaged record proves nothing.
    let before = disk::read_json::<Proven>(&path(ground, id)).unwrap_or(None).unwrap_or_default();
    let is_of_here = before.programs == here.programs && before.kernel == here.kernel;
    if is_of_here && here.features.is_subset(&before.features) {
        return Ok(Proved { took: began.elapsed(), unproven: None });
    }
    let mut proven = if is_of_here { before } else { Proven { features: BTreeSet::new(), ..here } };
    proven.unproven = match Proof::of(&reader)? {
        Err(object) => Some(object),
        Ok(proof) => {
            let record = |kind: &str, cause: String| {
                ground.record(kind, id.as_str(), name.as_str(), &[("cause", cause)]);
            };
            let compared = compare(ground, original, &Arc::new(proof));
            compared.inspect_err(|e| record("trial_failed", e.with_causes()))?.map(|cause| {
                record("trial_skipped", cause.clone());
                format!("no room for a trial restore ({cause})")
            })
        }
    };
    if proven.unproven.is_none() {
        proven.features.extend(features(reader.records())?);
    }
    // Without the record the next checkpoint is proven again.
    let _ = disk::write_json(&path(ground, id), &proven, Durable::No);
    Ok(Proved { took: began.elapsed(), unproven: proven.unproven })
}

/// Compares a twin; returns why there is none, if the host has no room for one.
fn compare(ground: &Ground, original: Original, proof: &Arc<Proof>) -> Result<Option<String>> {
    let name = original.config.name.to_string();
    let read = match twin::read_back(ground, original, proof) {
        Ok(read) => read,
        Err(Unmade::NoRoom(cause)) => return Ok(Some(cause)),
        Err(Unmade::Failed(source)) => {
            return Err(Error::NotRestored { name, source: Box::new(source) });
        }
    };
    match proof.compare(read)? {
        None => Ok(None),
        Some(unlike) => Err(Error::Unlike { name, what: unlike.to_string() }),
    }
}

/// Identifies the programs that restore a container.
fn programs() -> Result<String> {
    let own = ground::own_program()?;
    let of = |path: &Path| -> Result<String> {
        let meta = fs::metadata(path).map_err(Error::file("cannot inspect", path))?;
        Ok(format!("{}.{}.{}", meta.len(), meta.mtime(), meta.mtime_nsec()))
    };
    Ok(format!("{} {}", of(&own)?, of(&crate::hold::keeper_program(&own))?))
}
