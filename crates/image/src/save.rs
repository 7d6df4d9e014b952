//! Images on their way out: layers as tars again, archives.

use std::io::{self, Write};

use sha2::Digest as _;

use crate::digest::Digest;
use crate::error::{At, Result};
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

/// Hashes and counts what passes.
struct Hashed<'w> {
    out: &'w mut dyn Write,
    hasher: sha2::Sha256,
    bytes: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Store {
    /// Writes the tar of a layer, byte for byte as it came in (its digest is `diff_id`), compressed
    /// as asked. The same layer gives the same bytes every time.
    pub fn layer_blob(
        &self,
        diff_id: &Digest,
        compression: Compression,
        out: &mut dyn Write,
    ) -> Result<Blob> {
        let layer = self.layer(diff_id)?;
        let mut hashed = Hashed { out, hasher: sha2::Sha256::new(), bytes: 0 };
        let step = "write a layer";
        let media_type = match compression {
            Compression::None => {
                layer.write_tar(self, &mut hashed)?;
                "application/vnd.oci.image.layer.v1.tar"
            }
            Compression::Gzip => {
                let mut gzip =
                    flate2::write::GzEncoder::new(&mut hashed, flate2::Compression::new(6));
                layer.write_tar(self, &mut gzip)?;
                gzip.finish().at(step, "stream")?;
                "application/vnd.oci.image.layer.v1.tar+gzip"
            }
            Compression::Zstd => {
                let mut zstd = zstd::Encoder::new(&mut hashed, 3).at(step, "stream")?;
                layer.write_tar(self, &mut zstd)?;
                zstd.finish().at(step, "stream")?;
                "application/vnd.oci.image.layer.v1.tar+zstd"
            }
        };
        hashed.flush().at(step, "stream")?;
        let digest = Digest::from_bytes(hashed.hasher.finalize().into());
        Ok(Blob { digest, bytes: hashed.bytes, media_type })
    }

    /// The configuration of an image, byte for byte.
    pub fn config_bytes(&self, image: &Image) -> Result<Vec<u8>> {
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
