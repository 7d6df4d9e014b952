//! Making an image of layers.

use std::fs;
use std::path::Path;

use oci_spec::image::ImageConfiguration;

use crate::arrival::NewImage;
use crate::bound::Budget;
use crate::digest::Digest;
use crate::error::{At, Fault, Result};
use crate::store::{ImageId, LayerRef, Metadata, Record, Store, sync_dir, to_json};
use crate::tree::Tree;

/// Most layers of an image. LIMIT: docker makes 127 at most.
const MAX_LAYERS: usize = 512;
/// Largest configuration and manifest. LIMIT: registries take 4 MiB.
const MAX_CONFIG: usize = 8 << 20;

pub(crate) fn image(store: &Store, image: NewImage<'_>) -> Result<ImageId> {
    for (what, bytes) in [("configuration", Some(image.config)), ("manifest", image.manifest)] {
        if bytes.is_some_and(|b| b.len() > MAX_CONFIG) {
            let what = format!("the size of the image's {what}");
            return Err(Fault::Limit { what, limit: MAX_CONFIG as u64 }.into());
        }
    }
    let config: ImageConfiguration = serde_json::from_slice(image.config).map_err(|source| {
        Fault::Json { what: "image configuration", path: "config.json".into(), source }
    })?;
    let diff_ids = config.rootfs().diff_ids();
    if diff_ids.len() > MAX_LAYERS {
        let what = "the number of layers of the image".to_owned();
        return Err(Fault::Limit { what, limit: MAX_LAYERS as u64 }.into());
    }
    let id = Digest::of(image.config).hex();
    let dir = store.image_dir(&id);
    if !dir.join("image.json").exists() {
        let tmp = store.tmp_path();
        fs::create_dir(&tmp).at("make the directory", &tmp)?;
        let made = write(store, &tmp, &image, diff_ids).and_then(|()| publish(&tmp, &dir));
        if made.is_err() {
            // The first error is the one that matters; prune removes what cannot be removed now.
            let _ = fs::remove_dir_all(&tmp);
        }
        made?;
    }
    if let Some(name) = image.name {
        store.name(&id, name)?;
    }
    Ok(id)
}

/// Writes the directory of an image.
fn write(store: &Store, dir: &Path, image: &NewImage<'_>, diff_ids: &[String]) -> Result<()> {
    let mut tree = Tree::new();
    let mut layers = Vec::new();
    // All layers share it: nodes that a later layer replaces stay in the tree.
    let mut budget = Budget::of_image();
    let mut entries = 0;
    for diff_id in diff_ids {
        let diff_id: Digest = diff_id.parse()?;
        if !store.layer_path(&diff_id).exists() {
            let what = format!("the image lists a layer {diff_id} that did not come with it");
            return Err(Fault::NotFound { what }.into());
        }
        let layer = store.layer(&diff_id)?;
        layer.entries.iter().try_for_each(|entry| budget.take(entry))?;
        tree.lay(&layer.entries)?;
        entries += layer.entries.len();
        tree.check_size(entries)?;
        layers.push(LayerRef { diff_id, tar_bytes: layer.tar_bytes });
    }
    tree.add_mount_points();
    let mut metadata_blake3 = None;
    match store.metadata {
        Metadata::Erofs => {
            let bytes = crate::metadata::erofs(&tree)?;
            metadata_blake3 = Some(blake3::hash(&bytes).to_hex().to_string());
            put(&dir.join("meta.erofs"), &bytes)?;
        }
        Metadata::Stub => crate::metadata::stubs(&tree, &dir.join("stub"))?,
    }
    let record = Record {
        version: 1,
        layers,
        size_bytes: tree.size_bytes(),
        metadata: store.metadata,
        metadata_blake3,
        digest: image.manifest.map(Digest::of),
    };
    put(&dir.join("config.json"), image.config)?;
    if let Some(manifest) = image.manifest {
        put(&dir.join("manifest.json"), manifest)?;
    }
    put(&dir.join("image.json"), &to_json(&record)?)
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).at("write", path)
}

/// Syncs the directory and renames it to its place.
fn publish(tmp: &Path, dir: &Path) -> Result<()> {
    let file = fs::File::open(tmp).at("open", tmp)?;
    // One call for a few files, or for the thousands of a stub directory.
    rustix::fs::syncfs(&file).at("bring to the disk", tmp)?;
    match fs::rename(tmp, dir) {
        // Another import of the same image was faster, with the same result.
        Err(_) if dir.join("image.json").exists() => {
            let _ = fs::remove_dir_all(tmp);
            Ok(())
        }
        result => {
            result.at("name the image", dir)?;
            sync_dir(dir.parent().unwrap_or(Path::new("/"))).at("bring to the disk", dir)
        }
    }
}
