//! Import: the path of every layer and image into the store.

use std::io::Read;

use dormouse_kernel::cgroup::ChargingImages;

use crate::arrival::{Expect, Ingested, NewImage};
use crate::digest::Digest;
use crate::error::Result;
use crate::progress::Progress;
use crate::store::{ImageId, Lock, LockKind, Store};

/// An import in progress. It holds the store's lock shared: objects that it found present are not
/// swept before it is dropped. Several threads may use it at once, each for one layer. Page cache is charged to images
/// meanwhile, also that of the archive that is read.
#[derive(Debug)]
pub struct Import<'s> {
    pub(crate) store: &'s Store,
    _charging: Option<ChargingImages>,
    _lock: Lock,
}

impl Store {
    /// Begins an import; waits while the store is being swept.
    pub fn begin(&self) -> Result<Import<'_>> {
        // ORDER: before the lock: it takes locks of others.
        let charging = self.charging();
        let lock = self.lock("lock", LockKind::Shared)?;
        Ok(Import { store: self, _charging: charging, _lock: lock })
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
