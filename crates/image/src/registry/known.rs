//! The blobs of repositories that are known to contain layers, from earlier pulls and pushes.
//!
//! `blobs.json` in the store's directory. The file saves work, and correctness does not depend on
//! it. With it a push checks whether the registry has a blob before it compresses the layer again,
//! mounts the blob from another repository of the same registry, and returns a pulled image with
//! its own digest. A wrong entry costs one request with a negative reply; a damaged file counts as
//! an empty one.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use super::access::Place;
use crate::digest::Digest;
use crate::error::Result;
use crate::store::{LockKind, Store, to_json};

/// LIMIT: blobs that are remembered of one layer.
const BLOBS_MAX: usize = 4;
/// LIMIT: repositories that are remembered of one blob.
const PLACES_MAX: usize = 8;

/// A layer as a registry has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    pub digest: Digest,
    pub bytes: u64,
    pub media_type: String,
    /// `REGISTRY/REPOSITORY`, the latest last.
    pub places: Vec<String>,
}

/// The whole file. Fields are only ever added, each with a default.
#[derive(Debug, Default, Serialize, Deserialize)]
struct File {
    /// Format; this page describes 1.
    version: u32,
    layers: BTreeMap<Digest, Vec<Known>>,
}

/// The blobs that a layer is known as, the latest last.
pub(super) fn load(store: &Store) -> BTreeMap<Digest, Vec<Known>> {
    read(store).layers
}

fn read(store: &Store) -> File {
    let bytes = fs::read(store.dir.join("blobs.json")).unwrap_or_default();
    let file: File = serde_json::from_slice(&bytes).unwrap_or_default();
    if file.version > 1 { File::default() } else { file }
}

/// Remembers that `place` has these blobs: layer, its blob, length and media type.
pub(super) fn remember(
    store: &Store,
    place: &Place,
    blobs: impl IntoIterator<Item = (Digest, Digest, u64, String)>,
) -> Result<()> {
    let _lock = store.lock("blobs.lock", LockKind::Exclusive)?;
    let mut file = read(store);
    let before = serde_json::to_string(&file).unwrap_or_default();
    let name = format!("{}/{}", place.registry, place.repository);
    for (diff_id, digest, bytes, media_type) in blobs {
        let of_layer = file.layers.entry(diff_id).or_default();
        let mut known = match of_layer.iter().position(|known| known.digest == digest) {
            Some(at) => of_layer.remove(at),
            None => Known { digest, bytes, media_type, places: Vec::new() },
        };
        known.places.retain(|place| *place != name);
        known.places.push(name.clone());
        known.places.drain(..known.places.len().saturating_sub(PLACES_MAX));
        of_layer.push(known);
        of_layer.drain(..of_layer.len().saturating_sub(BLOBS_MAX));
    }
    if serde_json::to_string(&file).unwrap_or_default() == before {
        return Ok(());
    }
    file.layers.retain(|diff_id, _| store.layer_path(diff_id).exists());
    file.version = 1;
    store.publish_file(&to_json(&file)?, &store.dir.join("blobs.json"))
}
