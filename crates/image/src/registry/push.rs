//! Push: from the store to a registry.
//!
//! A layer that the registry has is not sent: the blobs of earlier pulls and pushes are checked
//! first, then mounted from another repository of the same registry. Only then is the layer written
//! out, compressed into a file without a name, and sent by one PUT, which has a known length and
//! can be repeated. If all layers turn out to be the blobs of the manifest that the image was
//! pulled with, that very manifest is pushed, so that its digest stays.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dormouse_model::Reference;
use futures_util::{StreamExt, TryStreamExt};
use reqwest::header::{CONTENT_TYPE, LOCATION};
use reqwest::{Method, Response, StatusCode, Url};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::access::{Access, Place};
use super::client::{ATTEMPTS, Body, Client, Request, SILENCE_MAX};
use super::error::Failure;
use super::known::{self, Known};
use super::manifest::{Descriptor, OCI_CONFIG, OCI_MANIFEST};
use crate::digest::Digest;
use crate::error::{At, Result};
use crate::progress::Progress;
use crate::save::Compression;
use crate::store::{Image, Store};

/// Layers that are compressed and sent at the same time.
const PARALLEL: usize = 2;
/// Interval of progress reports.
const TICK: Duration = Duration::from_millis(100);

/// Options of a push.
#[derive(Debug, Clone, Default)]
pub struct PushOptions {
    /// Access to the registry.
    pub access: Access,
    /// Compression of layers. By default as the registry has them, else gzip, which every client
    /// reads.
    pub compression: Option<Compression>,
}

/// Sends an image to the registry and repository that `to` names, under its tag. Returns the digest
/// of the manifest.
///
/// Errors: `Invalid` (`to` has a digest, which cannot be chosen), `Os(EACCES)` (a login is needed
/// or not enough), `Busy` (too many requests), `Limit` (disk full), `Os(..)` (not reached).
pub fn push(
    store: &Store,
    image: &Image,
    to: &Reference,
    options: &PushOptions,
    progress: &dyn Progress,
) -> Result<Digest> {
    if to.digest.is_some() {
        return Err(crate::error::Fault::Invalid {
            what: format!("cannot push to '{to}': a name to push to has a tag and no digest"),
        }
        .into());
    }
    let import = store.begin()?;
    let digest = std::thread::scope(|threads| {
        super::block_on(async {
            let client = Client::open(&options.access, Place::of(to), "pull,push").await?;
            let known = known::load(store);
            let push = Push { store, client: &client, known: &known, options, progress, threads };
            push.image(image, to).await
        })
    })?;
    // Held until here, so that no layer is swept while it is sent.
    drop(import);
    Ok(digest)
}

/// Everything that the uploads of one push share.
#[derive(Clone, Copy)]
struct Push<'a, 'scope, 'env> {
    store: &'env Store,
    client: &'a Client,
    known: &'a std::collections::BTreeMap<Digest, Vec<Known>>,
    options: &'env PushOptions,
    progress: &'a dyn Progress,
    /// The scope of the threads that compress.
    threads: &'scope std::thread::Scope<'scope, 'env>,
}

/// A manifest of ours.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u32,
    media_type: String,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

impl Push<'_, '_, '_> {
    async fn image(self, image: &Image, to: &Reference) -> Result<Digest, Failure> {
        let client = self.client;
        let mut unique: Vec<Digest> = Vec::new();
        for layer in &image.layers {
            if !unique.contains(&layer.diff_id) {
                unique.push(layer.diff_id);
            }
        }
        let blobs: HashMap<Digest, Descriptor> = futures_util::stream::iter(unique)
            .map(|diff_id| async move { Ok::<_, Failure>((diff_id, self.layer(diff_id).await?)) })
            .buffer_unordered(PARALLEL)
            .try_collect()
            .await?;
        let config = self.store.config_bytes(image)?;
        let config_at = Descriptor {
            media_type: OCI_CONFIG.into(),
            digest: Digest::of(&config).to_string(),
            size: config.len() as u64,
        };
        if !self.has(&config_at.digest).await? {
            self.upload(&config_at.digest, Source::Bytes(&config)).await?;
        }
        let layers: Vec<Descriptor> =
            image.layers.iter().filter_map(|l| blobs.get(&l.diff_id).cloned()).collect();
        let (bytes, media_type) = match self.original(image, &config_at, &layers) {
            Some(original) => original,
            None => {
                let manifest = Manifest {
                    schema_version: 2,
                    media_type: OCI_MANIFEST.into(),
                    config: config_at,
                    layers,
                };
                let bytes = serde_json::to_vec(&manifest)
                    .map_err(|e| client.malformed("our manifest", e.to_string()))?;
                (bytes, OCI_MANIFEST.to_owned())
            }
        };
        let digest = Digest::of(&bytes);
        let tag = to.tag.as_deref().unwrap_or("latest");
        let what = format!("the manifest {}:{tag}", client.place.repository);
        let request = Request::new(Method::PUT, client.url(&format!("manifests/{tag}")), &what)
            .header(CONTENT_TYPE, media_type)
            .body(Body::Bytes(&bytes));
        let response = client.send(&request).await?;
        let stated = response.headers().get("docker-content-digest").and_then(|v| v.to_str().ok());
        if let Some(stated) = stated
            && stated.starts_with("sha256:")
            && stated != digest.to_string()
        {
            return Err(Failure::Digest {
                registry: client.place.registry.clone(),
                what,
                expected: digest.to_string(),
                found: super::error::plain(stated),
            });
        }
        let remembered = blobs.into_iter().filter_map(|(diff_id, at)| {
            Some((diff_id, at.digest.parse().ok()?, at.size, at.media_type))
        });
        // Optional, for later pushes; the push has succeeded in any case.
        drop(known::remember(self.store, &client.place, remembered));
        Ok(digest)
    }

    /// Returns the manifest that the image was pulled with, if its contents equal ours.
    fn original(
        self,
        image: &Image,
        config: &Descriptor,
        layers: &[Descriptor],
    ) -> Option<(Vec<u8>, String)> {
        let path = self.store.image_dir(&image.id).join("manifest.json");
        let bytes = std::fs::read(path).ok()?;
        let original: Manifest = serde_json::from_slice(&bytes).ok()?;
        let same = original.config.digest == config.digest
            && original.layers.len() == layers.len()
            && original.layers.iter().zip(layers).all(|(a, b)| a.digest == b.digest);
        (same && image.digest == Some(Digest::of(&bytes))).then_some((bytes, original.media_type))
    }

    /// Makes the registry have a layer.
    async fn layer(self, diff_id: Digest) -> Result<Descriptor, Failure> {
        for known in self.known.get(&diff_id).into_iter().flatten().rev() {
            let fits = match self.options.compression {
                None => true,
                Some(Compression::None) => known.media_type.ends_with("tar"),
                Some(Compression::Gzip) => known.media_type.ends_with("gzip"),
                Some(Compression::Zstd) => known.media_type.ends_with("zstd"),
            };
            let digest = known.digest.to_string();
            if fits && (self.has(&digest).await? || self.mount(&digest, &known.places).await?) {
                return Ok(Descriptor {
                    media_type: known.media_type.clone(),
                    digest,
                    size: known.bytes,
                });
            }
        }
        let task = self.progress.start(&format!("compress {}", &diff_id.hex()[..12]), None);
        let compressed = self.compress(diff_id).await;
        self.progress.finish(task);
        let (file, blob) = compressed?;
        let digest = blob.digest.to_string();
        if !self.has(&digest).await? {
            let task = self.progress.start(&blob.digest.hex()[..12], Some(blob.bytes));
            let source = Source::File { file: &file, bytes: blob.bytes, task };
            let result = self.upload(&digest, source).await;
            self.progress.finish(task);
            result?;
        }
        Ok(Descriptor { media_type: blob.media_type.into(), digest, size: blob.bytes })
    }

    /// Writes a layer into a file without a name, on a thread of its own.
    async fn compress(self, diff_id: Digest) -> Result<(File, crate::save::Blob), Failure> {
        let (done, result) = oneshot::channel();
        let store = self.store;
        let compression = self.options.compression.unwrap_or(Compression::Gzip);
        let file = nameless(&store.dir.join("tmp"))?;
        self.threads.spawn(move || {
            let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
            let written = store.layer_blob(&diff_id, compression, &mut out).and_then(|blob| {
                out.flush().at("write a layer below", &store.dir)?;
                let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
                Ok((file.at("write a layer below", &store.dir)?, blob))
            });
            // The receiver may have been stopped by the failure of another layer.
            drop(done.send(written));
        });
        Ok(result.await.map_err(|_| Failure::Stopped)??)
    }

    /// Returns whether the repository has a blob.
    async fn has(self, digest: &str) -> Result<bool, Failure> {
        let url = self.client.url(&format!("blobs/{digest}"));
        match self.client.send(&Request::new(Method::HEAD, url, "a blob")).await {
            Ok(_) => Ok(true),
            Err(Failure::NotFound { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Tries to have the registry take a blob from another of its repositories.
    async fn mount(self, digest: &str, places: &[String]) -> Result<bool, Failure> {
        let client = self.client;
        for place in places.iter().rev() {
            let Some(repository) = place
                .strip_prefix(&client.place.registry)
                .and_then(|rest| rest.strip_prefix('/'))
                .filter(|repository| *repository != client.place.repository)
            else {
                continue;
            };
            client.also_pull(repository).await;
            let mut url = client.url("blobs/uploads/");
            url.query_pairs_mut().append_pair("mount", digest).append_pair("from", repository);
            match client.send(&Request::new(Method::POST, url, "the mount of a blob")).await {
                Ok(response) if response.status() == StatusCode::CREATED => return Ok(true),
                // 202 offers an upload instead; it is left alone and expires.
                Ok(_) => {}
                // Mounting is optional: a registry that refuses it gets the bytes.
                Err(Failure::Denied { .. } | Failure::NotFound { .. } | Failure::Status { .. }) => {
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(false)
    }

    /// Sends a blob: POST for a place, PUT of all bytes there.
    async fn upload(self, digest: &str, source: Source<'_>) -> Result<(), Failure> {
        let client = self.client;
        let what = format!("the upload of {digest}");
        let mut attempt = 0;
        loop {
            let begin = Request::new(Method::POST, client.url("blobs/uploads/"), &what);
            let mut url = self.location(&client.send(&begin).await?)?;
            url.query_pairs_mut().append_pair("digest", digest);
            let sent = Arc::new(AtomicU64::new(0));
            let body = match source {
                Source::Bytes(bytes) => Body::Bytes(bytes),
                Source::File { file, bytes, .. } => {
                    Body::File { file, bytes, sent: Arc::clone(&sent) }
                }
            };
            let request = Request::new(Method::PUT, url, &what)
                .header(CONTENT_TYPE, "application/octet-stream")
                .body(body);
            let mut put = std::pin::pin!(client.send_once(&request));
            let (mut reported, mut moved) = (0, Instant::now());
            let result = loop {
                tokio::select! {
                    result = &mut put => break result,
                    () = tokio::time::sleep(TICK) => {}
                }
                let now = sent.load(Ordering::Relaxed);
                if now > reported {
                    source.advance(self.progress, now - reported);
                    (reported, moved) = (now, Instant::now());
                } else if moved.elapsed() > 4 * SILENCE_MAX {
                    break Err(client.silent(&what));
                }
            };
            match result {
                Ok(_) => {
                    source.advance(self.progress, source.bytes() - reported);
                    return Ok(());
                }
                Err(failure) => {
                    attempt += 1;
                    if attempt == ATTEMPTS || !failure.is_passing() {
                        return Err(failure);
                    }
                    client.wait(attempt, failure).await?;
                }
            }
        }
    }

    /// Returns the URL of an upload.
    fn location(self, response: &Response) -> Result<Url, Failure> {
        let location = response.headers().get(LOCATION).and_then(|v| v.to_str().ok());
        let url = location.and_then(|l| response.url().join(l).ok());
        let bad = |problem: &str| self.client.malformed("the answer to an upload", problem);
        let url = url.ok_or_else(|| bad("no usable Location"))?;
        match (response.url().scheme(), url.scheme()) {
            (_, "https") | ("http", "http") => Ok(url),
            _ => Err(bad("its Location is neither https nor what the registry speaks")),
        }
    }
}

/// The data of an upload.
#[derive(Clone, Copy)]
enum Source<'s> {
    Bytes(&'s [u8]),
    File { file: &'s File, bytes: u64, task: u64 },
}

impl Source<'_> {
    fn bytes(self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { bytes, .. } => bytes,
        }
    }

    fn advance(self, progress: &dyn Progress, bytes: u64) {
        if let Self::File { task, .. } = self {
            progress.advance(task, bytes);
        }
    }
}

/// Creates a file without a name, which is removed when it is closed (open(2), O_TMPFILE).
fn nameless(dir: &Path) -> Result<File, Failure> {
    File::options()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(OFlags::TMPFILE.bits() as i32)
        .open(dir)
        .map_err(|source| Failure::Io { step: "make a file in", path: dir.to_owned(), source })
}
