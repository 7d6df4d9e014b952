//! Import: the path of every layer and image into the store.

use std::io::Read;

use dormouse_model::Reference;

use crate::digest::Digest;
use crate::error::Result;
use crate::progress::Progress;
use crate::store::{ImageId, Lock, LockKind, Store};

/// An import in progress. It holds the store's lock shared: objects that it found present are not
/// swept before it is dropped. Several threads may use it at once, each for one layer.
#[derive(Debug)]
pub struct Import<'s> {
    pub(crate) store: &'s Store,
    _lock: Lock,
}

/// The required properties of a layer. `None` is not checked, only computed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expect {
    /// Digest of the stream as it comes, compressed.
    pub blob: Option<Digest>,
    /// Bytes of the stream as it comes; one byte more is refused before it is read.
    pub blob_bytes: Option<u64>,
    /// Digest of the uncompressed tar.
    pub diff_id: Option<Digest>,
}

/// The properties of an imported layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ingested {
    /// Digest of the stream as it came.
    pub blob: Digest,
    /// Its length.
    pub blob_bytes: u64,
    /// Digest of the uncompressed tar.
    pub diff_id: Digest,
    /// Length of the uncompressed tar.
    pub tar_bytes: u64,
    /// Bytes of objects that the store did not have yet.
    pub new_bytes: u64,
}

/// The parts of an image.
#[derive(Debug, Clone, Copy)]
pub struct NewImage<'a> {
    /// The configuration, byte for byte: its digest is the image's id.
    pub config: &'a [u8],
    /// The manifest it came with, byte for byte.
    pub manifest: Option<&'a [u8]>,
    /// The name of the image.
    pub name: Option<&'a Reference>,
}

impl Store {
    /// Begins an import; waits while the store is being swept.
    pub fn begin(&self) -> Result<Import<'_>> {
        Ok(Import { store: self, _lock: self.lock("lock", LockKind::Shared)? })
    }
}

impl Import<'_> {
    /// Returns whether the store has this layer: then its blob need not be fetched.
    pub fn has_layer(&self, diff_id: &Digest) -> bool {
        self.store.layer_path(diff_id).exists()
    }

    /// Imports a layer: a tar, uncompressed or compressed by gzip or zstd, as recognised by its
    /// first bytes.
    ///
    /// The reader is read to its end on this thread; hashing, decompressing and writing happen on
    /// others. An error of the reader is the source of the returned error. A failed layer is not
    /// visible, and its remains are swept by the next prune.
    pub fn layer(
        &self,
        reader: &mut dyn Read,
        expect: Expect,
        progress: &dyn Progress,
    ) -> Result<Ingested> {
        crate::pipeline::run(self.store, reader, expect, progress)
    }

    /// Creates an image from imported layers, and names it. The layers are those in the
    /// configuration (`rootfs.diff_ids`, lowest first).
    ///
    /// An existing image only gets the name.
    pub fn image(&self, image: NewImage<'_>) -> Result<ImageId> {
        crate::build::image(self.store, image)
    }
}
