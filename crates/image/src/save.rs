//! Images on their way out: layers as tars again, archives.

use std::io::Write;

use crate::digest::Digest;
use crate::error::Result;
use crate::progress::Progress;
use crate::store::{Image, Store};

/// How a layer is compressed on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not.
    None,
    /// gzip, level 6: what every registry and engine reads.
    Gzip,
    /// zstd, level 3: faster and smaller.
    Zstd,
}

/// A layer as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// Digest of what was written.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
    /// Its OCI media type.
    pub media_type: &'static str,
}

/// What kind of archive `save` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveFormat {
    /// An OCI image layout in a tar, with docker's `manifest.json` beside it: both sides load it.
    OciArchive,
}

impl Store {
    /// Writes the tar of a layer, byte for byte as it came in (its digest is `diff_id`), compressed
    /// as asked. The same layer gives the same bytes every time.
    pub fn layer_blob(
        &self,
        _diff_id: &Digest,
        _compression: Compression,
        _out: &mut dyn Write,
    ) -> Result<Blob> {
        Err(crate::not_yet("write a layer"))
    }

    /// The configuration of an image, byte for byte.
    pub fn config_bytes(&self, image: &Image) -> Result<Vec<u8>> {
        use crate::error::At;
        let path = self.image_dir(&image.id).join("config.json");
        std::fs::read(&path).at("read", path)
    }

    /// Writes images as one archive.
    pub fn save(
        &self,
        _images: &[Image],
        _format: SaveFormat,
        _out: &mut dyn Write,
        _progress: &dyn Progress,
    ) -> Result<()> {
        Err(crate::not_yet("save images"))
    }
}
