//! Taking images in: the way every layer goes, from wherever it comes.

use std::io::Read;

use dormouse_model::Reference;

use crate::digest::Digest;
use crate::error::Result;
use crate::progress::Progress;
use crate::store::{ImageId, Lock, LockKind, Store};

/// An import that is under way. It holds the store's lock shared: nothing that it found present is
/// swept before it is dropped. It can be used from several threads at once, a layer on each.
#[derive(Debug)]
pub struct Import<'s> {
    pub(crate) store: &'s Store,
    _lock: Lock,
}

/// What a layer must be. What is `None` is not checked, only found out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expect {
    /// Digest of the stream as it comes, compressed.
    pub blob: Option<Digest>,
    /// Bytes of the stream as it comes; one byte more is refused before it is read.
    pub blob_bytes: Option<u64>,
    /// Digest of the uncompressed tar.
    pub diff_id: Option<Digest>,
}

/// What a layer turned out to be.
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

/// What an image is made of.
#[derive(Debug, Clone, Copy)]
pub struct NewImage<'a> {
    /// The configuration, byte for byte: its digest is the image's id.
    pub config: &'a [u8],
    /// The manifest it came with, byte for byte.
    pub manifest: Option<&'a [u8]>,
    /// What it is to be called.
    pub name: Option<&'a Reference>,
}

impl Store {
    /// Begins an import; waits while the store is being swept.
    pub fn begin(&self) -> Result<Import<'_>> {
        Ok(Import { store: self, _lock: self.lock("lock", LockKind::Shared)? })
    }
}

impl Import<'_> {
    /// Whether the store has this layer: then its blob need not be fetched.
    pub fn has_layer(&self, diff_id: &Digest) -> bool {
        self.store.layer_path(diff_id).exists()
    }

    /// Takes a layer in: a tar, as it is or compressed by gzip or zstd, told by its first bytes.
    ///
    /// The reader is read to its end on this thread; hashing, decompressing and writing happen on
    /// others. An error of the reader is the source of the error returned. Nothing of a layer that
    /// failed can be seen, and what was written is swept by the next prune.
    pub fn layer(
        &self,
        reader: &mut dyn Read,
        expect: Expect,
        progress: &dyn Progress,
    ) -> Result<Ingested> {
        crate::pipeline::run(self.store, reader, expect, progress)
    }

    /// Makes an image of layers that were taken in, and names it. The layers are those that the
    /// configuration lists (`rootfs.diff_ids`, lowest first).
    ///
    /// An image that is there already only gets the name.
    pub fn image(&self, image: NewImage<'_>) -> Result<ImageId> {
        crate::build::image(self.store, image)
    }
}
