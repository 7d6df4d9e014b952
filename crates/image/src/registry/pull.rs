//! Pull: from a registry into the store.

use std::collections::HashSet;

use dormouse_model::Reference;
use futures_util::{StreamExt, TryStreamExt};
use reqwest::Method;

use super::access::{Access, Place};
use super::client::{ATTEMPTS, Client, Request};
use super::download::{Downloads, sweep};
use super::error::Failure;
use super::known;
use super::manifest::{Blob, CONFIG_MAX_BYTES, ConfigHead, Manifest, Platform};
use crate::arrival::NewImage;
use crate::digest::Digest;
use crate::error::Result;
use crate::progress::Progress;
use crate::store::{ImageId, Store};

/// Layers that are fetched at the same time.
const PARALLEL: usize = 4;

/// Options of a pull.
#[derive(Debug, Clone, Default)]
pub struct PullOptions {
    /// Access to the registry.
    pub access: Access,
    /// The wanted image of several; by default that of this machine.
    pub platform: Option<Platform>,
}

/// Fetches an image and gives it the requested name.
///
/// Layers in the store are not fetched; an image in the store only gets the name. An image is
/// invisible until all of it is there. The fetched part of a layer is kept for the next pull, for
/// seven days, if the connection broke for good or the program was killed.
///
/// Errors: `NotFound` (no such name there, or not for this platform), `Corrupt` (a wrong digest or
/// size), `Unsupported` (a kind of manifest or layer), `Limit` (too large, or the disk full),
/// `Busy` (too many requests), `Os(EACCES)` (a login is needed), `Os(..)` (not reached).
pub fn pull(
    store: &Store,
    reference: &Reference,
    options: &PullOptions,
    progress: &dyn Progress,
) -> Result<ImageId> {
    let place = Place::of(reference);
    let partial_dir = store.partial_dir();
    sweep(&partial_dir);
    let import = store.begin()?;
    let id = std::thread::scope(|threads| {
        super::block_on(async {
            let client = Client::open(&options.access, place, "pull").await?;
            let downloads = Downloads {
                client: &client,
                import: &import,
                progress,
                partial_dir: &partial_dir,
                threads,
            };
            run(store, downloads, reference, options).await
        })
        // The future of the connections is dropped here, with all its queues, so the threads end.
    });
    drop(import);
    if id.is_err() {
        store.sweep_if_idle();
    }
    Ok(id?)
}

async fn run(
    store: &Store,
    downloads: Downloads<'_, '_, '_>,
    reference: &Reference,
    options: &PullOptions,
) -> Result<ImageId, Failure> {
    let Downloads { client, import, .. } = downloads;
    let wanted = options.platform.as_ref();
    let manifest = client.manifest(reference, wanted).await?;
    if let Ok(image) = store.find(&manifest.config.digest.hex())
        && image.id == manifest.config.digest.hex()
    {
        store.tag(&image, reference)?;
        remember(store, client, &manifest, image.layers.iter().map(|l| l.diff_id).collect());
        return Ok(image.id);
    }
    let config = client.config(manifest.config).await?;
    let head: ConfigHead = serde_json::from_slice(&config)
        .map_err(|e| client.malformed("the configuration", super::error::plain(&e.to_string())))?;
    if head.rootfs.diff_ids.len() != manifest.layers.len() {
        let problem = format!(
            "it lists {} layers, the manifest {}",
            head.rootfs.diff_ids.len(),
            manifest.layers.len()
        );
        return Err(client.malformed("the configuration", problem));
    }
    let host = Platform::host();
    if !head.serves(wanted.unwrap_or(&host)) {
        return Err(Failure::Platform {
            reference: reference.to_string(),
            wanted: wanted.unwrap_or(&host).to_string(),
            offered: super::error::plain(&format!("{}/{}", head.os, head.architecture)),
        });
    }
    let mut seen = HashSet::new();
    let missing: Vec<(Blob, Digest)> = manifest
        .layers
        .iter()
        .map(|(blob, _)| *blob)
        .zip(head.rootfs.diff_ids.iter().copied())
        .filter(|(_, diff_id)| seen.insert(*diff_id) && !import.has_layer(diff_id))
        .collect();
    // The first failure drops the other downloads.
    futures_util::stream::iter(missing)
        .map(|(blob, diff_id)| downloads.layer(blob, diff_id))
        .buffer_unordered(PARALLEL)
        .try_collect::<()>()
        .await?;
    let id = import.image(NewImage {
        config: &config,
        manifest: Some(&manifest.bytes),
        name: Some(reference),
    })?;
    remember(store, client, &manifest, head.rootfs.diff_ids);
    Ok(id)
}

/// Records the blobs of the layers for later pushes. The record is optional: if it cannot be
/// written, the image is complete all the same.
fn remember(store: &Store, client: &Client, manifest: &Manifest, diff_ids: Vec<Digest>) {
    let blobs = diff_ids
        .into_iter()
        .zip(&manifest.layers)
        .map(|(diff_id, (blob, kind))| (diff_id, blob.digest, blob.bytes, kind.clone()));
    drop(known::remember(store, &client.place, blobs));
}

impl Client {
    /// Fetches the configuration and compares its digest.
    async fn config(&self, blob: Blob) -> Result<Vec<u8>, Failure> {
        let what = format!("configuration {}", blob.digest);
        let request = Request::new(Method::GET, self.url(&format!("blobs/{}", blob.digest)), &what);
        let mut failures = 0;
        let bytes = loop {
            let response = self.send(&request).await?;
            match self.read(response, blob.bytes.min(CONFIG_MAX_BYTES), &what).await {
                Ok(bytes) => break bytes,
                Err(failure) if failure.is_passing() && failures < ATTEMPTS => {
                    failures += 1;
                    self.wait(failures, failure).await?;
                }
                Err(failure) => return Err(failure),
            }
        };
        let found = Digest::of(&bytes);
        if found != blob.digest {
            return Err(Failure::Digest {
                registry: self.place.registry.clone(),
                what: "the configuration".into(),
                expected: blob.digest.to_string(),
                found: found.to_string(),
            });
        }
        Ok(bytes)
    }
}
