//! The download of one layer: from the registry, through its partial file, into the store.
//!
//! The partial file is `partial/DIGITS` in the store's directory, named by the blob's digest and
//! locked (flock(2)) by the pull that fills it. Another pull of the same layer waits for that one
//! and then finds the layer in the store. Bytes are written to the file and then passed on, so it
//! is never behind the store. The file is not synced: after a power cut it may hold zeros, the
//! digest then is wrong, and the layer is fetched once more from the beginning.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::Scope;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use dormouse_kernel::ErrorKind;
use reqwest::Method;
use reqwest::header::{CONTENT_RANGE, RANGE};
use rustix::fs::{FlockOperation, OFlags, flock};
use tokio::sync::{mpsc, oneshot};

use super::client::{Client, Request};
use super::error::Failure;
use super::manifest::Blob;
use crate::arrival::Expect;
use crate::digest::Digest;
use crate::error::ImageError;
use crate::ingest::Import;
use crate::progress::{Progress, Silent};

/// LIMIT: attempts that bring less than `PROGRESS_BYTES` each, in a row.
const FRUITLESS_MAX: u32 = 6;
/// An attempt that brought so much counts as progress.
const PROGRESS_BYTES: u64 = 1 << 20;
/// LIMIT: pieces between the network and the store; each is what one read brought, at most 400 kB.
const QUEUE_PIECES: usize = 16;
/// Bytes read from a partial file at once.
const READ_BYTES: usize = 256 << 10;
/// Partial files of pulls that were not repeated are removed after so long.
const STALE_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);

/// The file of an incomplete blob in the store's directory.
struct Partial {
    file: File,
    path: PathBuf,
    /// Number of bytes of the blob in it.
    at: u64,
}

impl Partial {
    /// Opens and locks the file, waiting while another pull fills it.
    async fn open(dir: &Path, blob: Blob) -> Result<Self, Failure> {
        let path = dir.join(blob.digest.hex());
        let io = |source| Failure::Io { step: "open the partial blob", path: path.clone(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io)?;
        loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(OFlags::NOFOLLOW.bits() as i32)
                .open(&path)
                .map_err(io)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
                Err(e) => return Err(io(e.into())),
            }
            let meta = file.metadata().map_err(io)?;
            if meta.nlink() == 0 {
                // Removed by the pull that had it until now.
                continue;
            }
            let mut partial = Self { file, path: path.clone(), at: meta.len() };
            if partial.at > blob.bytes {
                partial.restart()?;
            }
            return Ok(partial);
        }
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.at = 0;
        self.file.set_len(0).map_err(|source| Failure::Io {
            step: "empty",
            path: self.path.clone(),
            source,
        })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file.write_all_at(bytes, self.at).map_err(|source| Failure::Io {
            step: "write",
            path: self.path.clone(),
            source,
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// ORDER: while the lock is held, so that no other pull's new file is removed.
    fn remove(self) {
        // A file that stays is removed by a later sweep.
        drop(fs::remove_file(&self.path));
    }
}

/// Removes the partial files that no pull has resumed.
pub(super) fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let age = || {
            SystemTime::now()
                .duration_since(entry.metadata()?.modified()?)
                .map_err(io::Error::other)
        };
        if age().is_ok_and(|age| age > STALE_AFTER)
            && let Ok(file) = File::open(entry.path())
            && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Data on the way from the network to the store.
enum Piece {
    Bytes(Bytes),
    /// All bytes have come. Without it an end is a failure.
    End,
}

/// The store's side of the queue.
struct Feed {
    queue: mpsc::Receiver<Piece>,
    piece: Bytes,
    ended: bool,
}

impl Read for Feed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            if self.ended {
                return Ok(0);
            }
            match self.queue.blocking_recv() {
                Some(Piece::Bytes(bytes)) => self.piece = bytes,
                Some(Piece::End) => self.ended = true,
                None => return Err(io::Error::other("the download stopped")),
            }
        }
        let n = buffer.len().min(self.piece.len());
        buffer[..n].copy_from_slice(&self.piece.split_to(n));
        Ok(n)
    }
}

/// Everything that the downloads of one pull share.
#[derive(Clone, Copy)]
pub(super) struct Downloads<'a, 'scope, 'env> {
    pub client: &'a Client,
    pub import: &'env Import<'env>,
    pub progress: &'a dyn Progress,
    pub partial_dir: &'a Path,
    /// The scope of the threads that feed the store.
    pub threads: &'scope Scope<'scope, 'env>,
}

impl Downloads<'_, '_, '_> {
    /// Downloads and imports one layer.
    pub async fn layer(self, blob: Blob, diff_id: Digest) -> Result<(), Failure> {
        let mut partial = Partial::open(self.partial_dir, blob).await?;
        if self.import.has_layer(&diff_id) {
            partial.remove();
            return Ok(());
        }
        let task = self.progress.start(&blob.digest.hex()[..12], Some(blob.bytes));
        let mut again = partial.at > 0;
        let result = loop {
            let total_bytes = blob.bytes;
            match self.try_layer(blob, diff_id, &mut partial, task).await {
                Ok(()) => break Ok(()),
                // The data of an earlier pull may have been damaged.
                Err(Failure::Image(e))
                    if again && matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Invalid) =>
                {
                    again = false;
                    partial.restart()?;
                }
                Err(failure) if failure.is_passing() && partial.at > 0 => {
                    self.progress.finish(task);
                    return Err(Failure::Kept {
                        before: failure.to_string(),
                        kept_bytes: partial.at,
                        total_bytes,
                        source: Box::new(failure),
                    });
                }
                Err(failure) => break Err(failure),
            }
        };
        self.progress.finish(task);
        partial.remove();
        result
    }

    async fn try_layer(
        self,
        blob: Blob,
        diff_id: Digest,
        partial: &mut Partial,
        task: u64,
    ) -> Result<(), Failure> {
        let (out, queue) = mpsc::channel(QUEUE_PIECES);
        let (done, ingested) = oneshot::channel();
        let expect = Expect {
            blob: Some(blob.digest),
            blob_bytes: Some(blob.bytes),
            diff_id: Some(diff_id),
        };
        let import = self.import;
        self.threads.spawn(move || {
            let mut feed = Feed { queue, piece: Bytes::new(), ended: false };
            let result = import.layer(&mut feed, expect, &Silent);
            // The receiver may have been stopped by the failure of another layer.
            drop(done.send(result.map(drop)));
        });
        let down = self.download(blob, partial, &out, task).await;
        drop(out);
        let into: Result<(), ImageError> = ingested.await.map_err(|_| Failure::Stopped)?;
        match (down, into) {
            (Ok(()), Ok(())) => Ok(()),
            // The store stopped reading; its error is the cause.
            (Ok(()) | Err(Failure::Stopped), Err(e)) => Err(e.into()),
            (Err(failure), _) => Err(failure),
        }
    }

    /// Feeds the store from the partial file and then from the registry.
    async fn download(
        self,
        blob: Blob,
        partial: &mut Partial,
        out: &mpsc::Sender<Piece>,
        task: u64,
    ) -> Result<(), Failure> {
        let mut fed = 0;
        while fed < partial.at {
            let mut bytes = vec![0; READ_BYTES.min((partial.at - fed) as usize)];
            partial.file.read_exact_at(&mut bytes, fed).map_err(|source| Failure::Io {
                step: "read",
                path: partial.path.clone(),
                source,
            })?;
            fed += bytes.len() as u64;
            self.progress.advance(task, bytes.len() as u64);
            out.send(Piece::Bytes(bytes.into())).await.map_err(|_| Failure::Stopped)?;
        }
        let mut fruitless = 0;
        let mut ranges = true;
        while partial.at < blob.bytes {
            let before = partial.at;
            let Err(failure) = self.attempt(blob, partial, out, task, &mut ranges).await else {
                continue;
            };
            if partial.at - before >= PROGRESS_BYTES {
                fruitless = 0;
            }
            fruitless += 1;
            if fruitless == FRUITLESS_MAX || !failure.is_passing() {
                return Err(failure);
            }
            self.client.wait(fruitless, failure).await?;
        }
        out.send(Piece::End).await.map_err(|_| Failure::Stopped)
    }

    /// Requests the rest of the blob and reads the response. `ranges` becomes false if the registry
    /// does not support `Range`; then the present bytes are skipped.
    async fn attempt(
        self,
        blob: Blob,
        partial: &mut Partial,
        out: &mpsc::Sender<Piece>,
        task: u64,
        ranges: &mut bool,
    ) -> Result<(), Failure> {
        let Self { client, progress, .. } = self;
        let what = format!("layer {}", blob.digest);
        let url = client.url(&format!("blobs/{}", blob.digest));
        let mut request = Request::new(Method::GET, url, &what);
        if partial.at > 0 && *ranges {
            request = request.header(RANGE, format!("bytes={}-", partial.at));
        }
        let answer = client.send_once(&request).await;
        if let Err(Failure::Status { status: 416, .. }) = answer
            && partial.at > 0
        {
            *ranges = false;
        }
        let mut response = match answer {
            Err(Failure::Status { status: 416, .. }) if !request.headers.is_empty() => {
                return Ok(());
            }
            other => other?,
        };
        let first = match response.status().as_u16() {
            206 => {
                let range = response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
                match range.and_then(first_byte) {
                    Some(first) if first <= partial.at => first,
                    _ if *ranges => {
                        // Another range than requested: request all of it.
                        *ranges = false;
                        return Ok(());
                    }
                    _ => return Err(client.malformed(&what, "a range that was not requested")),
                }
            }
            _ => 0,
        };
        let mut skip = partial.at - first;
        if let Some(n) = response.content_length()
            && n != blob.bytes - first
        {
            let problem =
                format!("it is {} bytes long there, {} in the manifest", first + n, blob.bytes);
            return Err(client.malformed(&what, problem));
        }
        while let Some(mut bytes) = client.chunk(&mut response, &what).await? {
            let known = skip.min(bytes.len() as u64);
            skip -= known;
            // `known` is at most the length of what came.
            drop(bytes.split_to(known as usize));
            if bytes.is_empty() {
                continue;
            }
            // LIMIT: not a byte more than the size in the manifest.
            if bytes.len() as u64 > blob.bytes - partial.at {
                let problem = format!("it goes on after the {} bytes of the manifest", blob.bytes);
                return Err(client.malformed(&what, problem));
            }
            partial.append(&bytes)?;
            progress.advance(task, bytes.len() as u64);
            out.send(Piece::Bytes(bytes)).await.map_err(|_| Failure::Stopped)?;
        }
        match partial.at == blob.bytes {
            true => Ok(()),
            false => Err(Failure::Short {
                registry: client.place.registry.clone(),
                what,
                got: partial.at,
                expected: blob.bytes,
            }),
        }
    }
}

/// The first byte of `bytes FIRST-LAST/TOTAL` (RFC 9110, 14.4).
fn first_byte(range: &str) -> Option<u64> {
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}
