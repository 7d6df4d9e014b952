//! Entry points for the fuzzers (`cargo xtask fuzz`). Each passes untrusted bytes to one reader,
//! and panics if the reader accepts input that it promises to refuse.

use serde_json::{Value, json};

use crate::archive::{
    Entry, Kind, MAX_NAME, MAX_PATH, MAX_XATTRS, Reader, Source, keep_xattr, map_is_sound,
};
use crate::codec::{Decoder, Encoder};
use crate::digest::{Digest, ObjectId};
use crate::error::Result;
use crate::layer::{Content, LayerFile, decode_entry, encode_entry};

/// A tar in memory.
struct Memory<'a>(&'a [u8]);

impl Source for Memory<'_> {
    fn data(&mut self, limit: usize) -> Result<&[u8]> {
        let (data, rest) = self.0.split_at(limit.min(self.0.len()));
        self.0 = rest;
        Ok(data)
    }

    fn raw(&mut self, buffer: &mut [u8]) -> Result<bool> {
        let (taken, rest) = self.0.split_at(buffer.len().min(self.0.len()));
        buffer[..taken.len()].copy_from_slice(taken);
        self.0 = rest;
        Ok(!taken.is_empty())
    }
}

/// The tar of a layer: all entries read are in bounds, have paths below the root, make a tree or
/// are refused, and are read back unchanged from a layer file.
pub fn tar(bytes: &[u8]) {
    let mut reader = Reader::new(Memory(bytes));
    let mut entries = Vec::new();
    while let Ok(Some(entry)) = reader.next() {
        let Entry { path, meta, kind } = entry;
        let kind = match kind {
            Kind::File { size, content } => {
                let mut left = content.length;
                while left > 0 {
                    let limit = usize::try_from(left).unwrap_or(usize::MAX).min(64 << 10);
                    match reader.source.data(limit) {
                        Ok(data) if !data.is_empty() => left -= data.len() as u64,
                        _ => return,
                    }
                }
                assert!(content.map.as_ref().is_none_or(|map| map_is_sound(map, size)));
                let id = ObjectId([0; 32]);
                Kind::File { size, content: Content::Object { id, map: content.map } }
            }
            Kind::Directory => Kind::Directory,
            Kind::HardLink { target } => Kind::HardLink { target },
            Kind::Symlink { target } => Kind::Symlink { target },
            Kind::Char { major, minor } => Kind::Char { major, minor },
            Kind::Block { major, minor } => Kind::Block { major, minor },
            Kind::Fifo => Kind::Fifo,
        };
        let entry = Entry { path, meta, kind };
        check_entry(&entry);
        entries.push(entry);
    }
    let _ = crate::tree::check_layer(&entries); // entries of a tar need not make a tree
    let mut encoder = Encoder::default();
    entries.iter().for_each(|entry| encode_entry(&mut encoder, entry));
    let mut decoder = Decoder(&encoder.0);
    for entry in &entries {
        assert_eq!(decode_entry(&mut decoder).ok().as_ref(), Some(entry));
    }
}

fn check_entry(entry: &Entry<Content>) {
    let below = |path: &[u8]| {
        assert!(path.len() <= MAX_PATH, "too long");
        for name in path.split(|b| *b == b'/').filter(|_| !path.is_empty()) {
            assert!(!matches!(name, b"" | b"." | b".."), "{}", path.escape_ascii());
            assert!(name.len() <= MAX_NAME && !name.contains(&0), "{}", path.escape_ascii());
        }
    };
    below(&entry.path);
    if let Kind::HardLink { target } = &entry.kind {
        below(target);
    }
    if let Kind::Symlink { target } = &entry.kind {
        assert!(target.len() <= MAX_PATH && !target.contains(&0));
    }
    assert!(entry.meta.mode <= 0o7777 && entry.meta.mtime.1 < 1_000_000_000);
    assert!(entry.meta.xattrs.iter().all(|(name, _)| keep_xattr(name)));
    let xattr_bytes: usize = entry.meta.xattrs.iter().map(|(n, v)| n.len() + v.len()).sum();
    assert!(xattr_bytes <= MAX_XATTRS);
}

/// A layer file of the store with a correct checksum.
pub fn layer(bytes: &[u8]) {
    let mut decoder = Decoder(bytes);
    while let Ok(entry) = decode_entry(&mut decoder) {
        let mut encoder = Encoder::default();
        encode_entry(&mut encoder, &entry);
        assert_eq!(decode_entry(&mut Decoder(&encoder.0)).ok(), Some(entry));
    }
    let whole = [bytes, blake3::hash(bytes).as_bytes()].concat();
    let _ = LayerFile::parse(Digest::of(bytes), &whole); // most are refused
}

/// The reply of a registry to a request for a manifest.
pub fn manifest(bytes: &[u8]) {
    crate::registry::fuzz_manifest(bytes);
}

/// The configuration of an image, and a line of `commit --change` applied to it.
pub fn image_config(bytes: &[u8]) {
    let (config, change) = match bytes.iter().position(|b| *b == b'\n') {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &b""[..]),
    };
    if let Ok(config) = serde_json::from_slice::<oci_spec::image::ImageConfiguration>(config) {
        let text = serde_json::to_vec(&config).expect("what was read can be written");
        assert!(serde_json::from_slice::<oci_spec::image::ImageConfiguration>(&text).is_ok());
    }
    let mut process = serde_json::from_slice::<Value>(config).unwrap_or(json!({}));
    if let Ok(change) = std::str::from_utf8(change) {
        let _ = crate::change::apply(&mut process, change); // most are refused
    }
}
