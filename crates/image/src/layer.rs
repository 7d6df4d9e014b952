//! The layer file: the entries of a layer, and the recipe to reproduce its tar.
//!
//! ```text
//! "DMLAYER1"                         8 bytes
//! tar bytes, bytes of files, number of entries, length of each section:
//!                                    6 little-endian u64
//! section 1, zstd: the entries       as `encode_entry` writes them
//! section 2, zstd: the recipe        pairs of (bytes of section 3, 1 + index of a file, or 0)
//! section 3, zstd: the raw bytes     headers and padding, as they stood in the tar
//! BLAKE3 of all that                 32 bytes
//! ```
//!
//! The recipe corresponds to docker's tar-split: raw bytes, then the data of a file, in turn. The
//! data of a file are the bytes of its object; of a sparse file, its pieces one after another.
//! Therefore the tar is reproduced byte for byte, its digest is the layer's diffID, and no
//! compressed blob need be kept.
//!
//! Entries are in the order of the tar, including two of one path: the recipe needs both objects.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::archive::{Entry, Kind, Meta, Piece, map_is_sound};
use crate::codec::{Decoder, Encoder};
use crate::digest::{Digest, ObjectId};
use crate::error::{At, Fault, ImageError, Result};
use crate::store::Store;

const MAGIC: &[u8; 8] = b"DMLAYER1";
const HEADER: usize = 8 + 6 * 8;
/// LIMIT: compressed bytes of the headers of one layer, which are in memory during an import. A header
/// takes some 50 to 100 of them; extended headers of pax may be random and without an entry.
const RAW_MAX_BYTES: usize = 256 << 20;

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// Here.
    Inline(Vec<u8>),
    /// In an object; a sparse one has data only in the pieces of the map.
    Object { id: ObjectId, map: Option<Vec<Piece>> },
}

/// A layer as it is read.
#[derive(Debug)]
pub(crate) struct LayerFile {
    pub diff_id: Digest,
    pub tar_bytes: u64,
    pub entries: Vec<Entry<Content>>,
    recipe: Vec<u8>,
    raw: Vec<u8>,
}

/// Collects the recipe while a tar is read.
pub(crate) struct Recorder {
    raw: zstd::Encoder<'static, Vec<u8>>,
    raw_since: u64,
    recipe: Encoder,
}

impl Recorder {
    pub(crate) fn new() -> Result<Self> {
        let raw = zstd::Encoder::new(Vec::new(), 1).at("compress", "a layer")?;
        Ok(Self { raw, raw_since: 0, recipe: Encoder::default() })
    }

    /// Bytes that belong to no file.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.raw_since += bytes.len() as u64;
        self.raw.write_all(bytes).at("compress", "a layer")?;
        if self.raw.get_ref().len() > RAW_MAX_BYTES {
            let what = "the compressed size in bytes of the headers of a layer".to_owned();
            return Err(Fault::Limit { what, limit: RAW_MAX_BYTES as u64 }.into());
        }
        Ok(())
    }

    /// The data of a file, by the index of its entry.
    pub(crate) fn file(&mut self, index: usize) {
        self.recipe.number(std::mem::take(&mut self.raw_since));
        self.recipe.number(index as u64 + 1);
    }

    /// The layer file.
    pub(crate) fn finish(mut self, tar_bytes: u64, entries: &[Entry<Content>]) -> Result<Vec<u8>> {
        self.recipe.number(self.raw_since);
        self.recipe.number(0);
        let mut encoder = Encoder::default();
        let mut file_bytes = 0;
        for entry in entries {
            encode_entry(&mut encoder, entry);
            if let Kind::File { size, .. } = entry.kind {
                file_bytes += size;
            }
        }
        let pack = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).at("compress", "a layer");
        let sections = [
            pack(&encoder.0)?,
            pack(&self.recipe.0)?,
            self.raw.finish().at("compress", "a layer")?,
        ];
        let mut file = MAGIC.to_vec();
        let lengths = sections.iter().map(|s| s.len() as u64);
        let head = [tar_bytes, file_bytes, entries.len() as u64];
        head.into_iter().chain(lengths).for_each(|n| file.extend_from_slice(&n.to_le_bytes()));
        sections.iter().for_each(|s| file.extend_from_slice(s));
        let hash = blake3::hash(&file);
        file.extend_from_slice(hash.as_bytes());
        Ok(file)
    }
}

impl Store {
    pub(crate) fn layer_path(&self, diff_id: &Digest) -> PathBuf {
        self.dir.join("layers").join(diff_id.hex())
    }

    /// Reads and checks a layer file.
    pub(crate) fn layer(&self, diff_id: &Digest) -> Result<LayerFile> {
        let path = self.layer_path(diff_id);
        let file = fs::read(&path).at("read", &path)?;
        LayerFile::parse(*diff_id, &file)
    }

    /// Opens the object of a file and checks that it is as long as the file.
    pub(crate) fn open_object(&self, id: &ObjectId, size: u64) -> Result<File> {
        let path = self.dir.join("objects").join(id.path());
        let file = File::open(&path).at("open", &path)?;
        let found = file.metadata().at("stat", &path)?.len();
        if found != size {
            let problem = format!("it has {found} bytes instead of {size}");
            return Err(Fault::Damaged { what: format!("object {id:?}"), problem }.into());
        }
        Ok(file)
    }
}

impl LayerFile {
    pub(crate) fn parse(diff_id: Digest, file: &[u8]) -> Result<Self> {
        let what = || format!("layer {}", diff_id.hex());
        let damaged = |problem: &str| -> ImageError {
            Fault::Damaged { what: what(), problem: problem.to_owned() }.into()
        };
        let body_length = file.len().checked_sub(32).filter(|n| *n >= HEADER);
        let body_length = body_length.ok_or_else(|| damaged("it is cut off"))?;
        let (body, hash) = file.split_at(body_length);
        if blake3::hash(body).as_bytes() != hash {
            return Err(damaged("its checksum is wrong"));
        }
        if &body[..8] != MAGIC {
            return Err(damaged("it is of a version that this program does not read"));
        }
        let mut numbers = [0; 6];
        for (n, bytes) in numbers.iter_mut().zip(body[8..HEADER].chunks_exact(8)) {
            let mut le = [0; 8];
            le.copy_from_slice(bytes);
            *n = u64::from_le_bytes(le);
        }
        let [tar_bytes, _, count, lengths @ ..] = numbers;
        let mut rest = Decoder(&body[HEADER..]);
        let mut section = |n: u64| rest.take(usize::try_from(n).unwrap_or(usize::MAX));
        let unpack =
            |bytes: &[u8]| zstd::decode_all(bytes).map_err(|_| damaged("it does not decompress"));
        let entry_bytes = unpack(section(lengths[0])?)?;
        let recipe = unpack(section(lengths[1])?)?;
        let raw = section(lengths[2])?.to_vec();
        let mut decoder = Decoder(&entry_bytes);
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(decode_entry(&mut decoder)?);
        }
        Ok(Self { diff_id, tar_bytes, entries, recipe, raw })
    }

    /// Writes the tar again, byte for byte.
    pub(crate) fn write_tar(&self, store: &Store, out: &mut dyn Write) -> Result<()> {
        let mut raw = zstd::Decoder::new(&self.raw[..]).at("decompress", "a layer")?;
        let mut recipe = Decoder(&self.recipe);
        let mut buffer = vec![0; 256 << 10];
        let mut send = |bytes: &[u8]| out.write_all(bytes).at("write", "a layer");
        loop {
            let mut left = recipe.number()?;
            let index = recipe.number()?;
            while left > 0 {
                let n = left.min(buffer.len() as u64) as usize;
                raw.read_exact(&mut buffer[..n]).at("decompress", "a layer")?;
                send(&buffer[..n])?;
                left -= n as u64;
            }
            let Some(index) = index.checked_sub(1) else { return Ok(()) };
            match self.entries.get(index as usize).map(|e| &e.kind) {
                Some(Kind::File { content: Content::Inline(bytes), .. }) => send(bytes)?,
                Some(Kind::File { content: Content::Object { id, map }, size }) => {
                    let file = store.open_object(id, *size)?;
                    let whole = [Piece { offset: 0, length: *size }];
                    for piece in map.as_deref().unwrap_or(&whole) {
                        let mut at = piece.offset;
                        let end = piece.offset + piece.length;
                        while at < end {
                            let n = (end - at).min(buffer.len() as u64) as usize;
                            file.read_exact_at(&mut buffer[..n], at)
                                .at("read", store.dir.join("objects").join(id.path()))?;
                            send(&buffer[..n])?;
                            at += n as u64;
                        }
                    }
                }
                _ => {
                    let what = format!("layer {}", self.diff_id.hex());
                    let problem = "its recipe names an entry that is no file".to_owned();
                    return Err(Fault::Damaged { what, problem }.into());
                }
            }
        }
    }
}

pub(crate) fn encode_entry(e: &mut Encoder, entry: &Entry<Content>) {
    let tag = match &entry.kind {
        Kind::Directory => 0,
        Kind::File { content: Content::Inline(_), .. } => 1,
        Kind::File { content: Content::Object { map: None, .. }, .. } => 2,
        Kind::File { content: Content::Object { map: Some(_), .. }, .. } => 3,
        Kind::HardLink { .. } => 4,
        Kind::Symlink { .. } => 5,
        Kind::Char { .. } => 6,
        Kind::Block { .. } => 7,
        Kind::Fifo => 8,
    };
    e.number(tag);
    e.bytes(&entry.path);
    e.number(entry.meta.mode.into());
    e.number(entry.meta.uid.into());
    e.number(entry.meta.gid.into());
    e.signed(entry.meta.mtime.0);
    e.number(entry.meta.mtime.1.into());
    e.number(entry.meta.xattrs.len() as u64);
    for (name, value) in &entry.meta.xattrs {
        e.bytes(name);
        e.bytes(value);
    }
    match &entry.kind {
        Kind::Directory | Kind::Fifo => {}
        Kind::File { content: Content::Inline(bytes), .. } => e.bytes(bytes),
        Kind::File { size, content: Content::Object { id, map } } => {
            e.number(*size);
            e.0.extend_from_slice(&id.0);
            if let Some(map) = map {
                e.number(map.len() as u64);
                for piece in map {
                    e.number(piece.offset);
                    e.number(piece.length);
                }
            }
        }
        Kind::HardLink { target } | Kind::Symlink { target } => e.bytes(target),
        Kind::Char { major, minor } | Kind::Block { major, minor } => {
            e.number((*major).into());
            e.number((*minor).into());
        }
    }
}

pub(crate) fn decode_entry(d: &mut Decoder<'_>) -> Result<Entry<Content>> {
    let bad = |problem: &str| -> ImageError {
        Fault::Damaged { what: "the layer file".into(), problem: problem.to_owned() }.into()
    };
    let tag = d.number()?;
    let path = d.bytes()?.to_vec();
    let mut meta = Meta {
        mode: d.number32()?,
        uid: d.number32()?,
        gid: d.number32()?,
        mtime: (d.signed()?, d.number32()?),
        xattrs: Vec::new(),
    };
    for _ in 0..d.number()? {
        meta.xattrs.push((d.bytes()?.to_vec(), d.bytes()?.to_vec()));
    }
    let kind = match tag {
        0 => Kind::Directory,
        1 => {
            let bytes = d.bytes()?.to_vec();
            Kind::File { size: bytes.len() as u64, content: Content::Inline(bytes) }
        }
        2 | 3 => {
            let size = d.number()?;
            let id = ObjectId(d.array()?);
            let mut map = None;
            if tag == 3 {
                let mut pieces = Vec::new();
                for _ in 0..d.number()? {
                    pieces.push(Piece { offset: d.number()?, length: d.number()? });
                }
                if !map_is_sound(&pieces, size) {
                    return Err(bad("a map of holes is not in order"));
                }
                map = Some(pieces);
            }
            Kind::File { size, content: Content::Object { id, map } }
        }
        4 => Kind::HardLink { target: d.bytes()?.to_vec() },
        5 => Kind::Symlink { target: d.bytes()?.to_vec() },
        6 => Kind::Char { major: d.number32()?, minor: d.number32()? },
        7 => Kind::Block { major: d.number32()?, minor: d.number32()? },
        8 => Kind::Fifo,
        _ => return Err(bad("an entry is of an unknown kind")),
    };
    Ok(Entry { path, meta, kind })
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::ErrorKind;

    use super::*;

    #[test]
    fn headers_of_a_layer_are_bounded() {
        let mut recorder = Recorder::new().unwrap();
        let mut random = blake3::Hasher::new().finalize_xof();
        let mut header = vec![0; 1 << 20];
        let mut taken = 0;
        let error = loop {
            random.fill(&mut header);
            match recorder.raw(&header) {
                Ok(()) => taken += header.len(),
                Err(error) => break error,
            }
            assert!(taken <= 2 * RAW_MAX_BYTES);
        };
        assert_eq!(error.kind(), ErrorKind::Limit);
        assert!(taken > RAW_MAX_BYTES / 2, "{taken}");
    }
}
