//! What comes into the store: a layer and its required properties, an image of layers.

use dormouse_model::Reference;

use crate::digest::Digest;

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
