//! A checkpoint and what belongs to it as one stream of bytes, for a pipe or a file.
//!
//! ```text
//! "DORMARCH"  u32 version  u32 compression: 0 none, 1 zstd of all that follows
//! parts, in the order that writer and reader agree upon:
//!             16 bytes name
//!             pieces: u32 length (1 to 1 MiB), so many bytes; a length of 0 ends the part
//!             32 bytes BLAKE3 of name and bytes
//! "end"       a part without bytes, whose hash is that of all hashes before it
//! ```
//!
//! The length of a part need not be known before its bytes, so nothing is written twice on the way
//! out. Input is checked as it arrives: a part that was changed, cut or left out is refused by its
//! name. An archive is as untrusted as a checkpoint ([`crate`]).
//!
//! Parts of a checkpoint ([`pack`], [`unpack`]): `records` and `pages`, equal to the files of that
//! name if there is one file of pages. Several files become one part, with zeros if one ends within
//! a chunk. Other parts are the caller's.

use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use dormouse_record::{CHUNK_BYTES, Error, PAGE_BYTES, Pages, Records, Result, check};

use crate::dir::DirSink;
use crate::read::{Reader, whose};
use crate::section::{decode, encode};
use crate::sink::Sink;

const MAGIC: [u8; 8] = *b"DORMARCH";
/// The version that this code writes, and the only one it reads.
const VERSION: u32 = 1;
/// Compression, by its number in the head.
const PLAIN: u32 = 0;
const ZSTD: u32 = 1;
/// Level of compression: about 300 MB/s of memory contents on one core.
const LEVEL: i32 = 3;
const NAME_BYTES: usize = 16;
/// LIMIT: bytes of a piece.
const PIECE_BYTES_MAX: usize = 1 << 20;
/// Bytes of the pieces that are written here.
const PIECE_BYTES: usize = 256 << 10;
/// LIMIT: bytes of records in an archive. A compressed archive could otherwise expand until all
/// memory is used.
const RECORDS_BYTES_MAX: u64 = 256 << 20;
const END: &str = "end";

/// The name of an archive in messages.
pub(crate) const ARCHIVE: &str = "the archive";

/// An archive that is being written.
pub struct ArchiveWriter<W: Write> {
    out: Out<W>,
    hashes: blake3::Hasher,
}

enum Out<W: Write> {
    Plain(W),
    Zstd(Box<zstd::Encoder<'static, W>>),
}

impl<W: Write> Write for Out<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(out) => out.write(bytes),
            Self::Zstd(out) => out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.flush(),
            Self::Zstd(out) => out.flush(),
        }
    }
}

impl<W: Write> ArchiveWriter<W> {
    /// Starts an archive.
    pub fn begin(mut out: W, compress: bool) -> io::Result<Self> {
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&(if compress { ZSTD } else { PLAIN }).to_le_bytes())?;
        let out = match compress {
            true => Out::Zstd(Box::new(zstd::Encoder::new(out, LEVEL)?)),
            false => Out::Plain(out),
        };
        Ok(Self { out, hashes: blake3::Hasher::new() })
    }

    /// Starts a part, which ends with [`PartWriter::finish`].
    pub fn part(&mut self, name: &str) -> io::Result<PartWriter<'_, W>> {
        let name = padded(name);
        self.out.write_all(&name)?;
        let mut hash = blake3::Hasher::new();
        hash.update(&name);
        Ok(PartWriter { archive: self, hash, piece: Vec::with_capacity(PIECE_BYTES) })
    }

    /// Ends the archive; returns the writer of [`ArchiveWriter::begin`].
    pub fn finish(mut self) -> io::Result<W> {
        let whole = self.hashes.finalize();
        self.out.write_all(&padded(END))?;
        self.out.write_all(&0u32.to_le_bytes())?;
        self.out.write_all(whole.as_bytes())?;
        let mut out = match self.out {
            Out::Plain(out) => out,
            Out::Zstd(encoder) => encoder.finish()?,
        };
        out.flush()?;
        Ok(out)
    }
}

/// A part that is being written.
pub struct PartWriter<'a, W: Write> {
    archive: &'a mut ArchiveWriter<W>,
    hash: blake3::Hasher,
    piece: Vec<u8>,
}

impl<W: Write> PartWriter<'_, W> {
    /// Ends the part. A part that is dropped instead makes an invalid archive.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        let hash = self.hash.finalize();
        self.archive.hashes.update(hash.as_bytes());
        self.archive.out.write_all(&0u32.to_le_bytes())?;
        self.archive.out.write_all(hash.as_bytes())
    }
}

impl<W: Write> Write for PartWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(PIECE_BYTES - self.piece.len());
        self.piece.extend_from_slice(&bytes[..n]);
        if self.piece.len() == PIECE_BYTES {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.piece.is_empty() {
            self.hash.update(&self.piece);
            self.archive.out.write_all(&(self.piece.len() as u32).to_le_bytes())?;
            self.archive.out.write_all(&self.piece)?;
            self.piece.clear();
        }
        Ok(())
    }
}

fn padded(name: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    let length = name.len().min(NAME_BYTES);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    bytes
}

/// An archive that is read, from start to end.
pub struct ArchiveReader<R: Read> {
    input: In<R>,
    hashes: blake3::Hasher,
}

enum In<R: Read> {
    Plain(R),
    Zstd(Box<zstd::Decoder<'static, BufReader<R>>>),
}

impl<R: Read> Read for In<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(input) => input.read(buffer),
            Self::Zstd(input) => input.read(buffer),
        }
    }
}

impl<R: Read> ArchiveReader<R> {
    /// Reads the head of an archive.
    ///
    /// Errors: [`Error::Damaged`] if it is not an archive, [`Error::Elsewhere`] for another
    /// version.
    pub fn open(mut input: R) -> Result<Self> {
        let mut head = [0; 16];
        input.read_exact(&mut head).map_err(|e| broken("head", e))?;
        if head[..8] != MAGIC {
            return Err(Error::damaged("head", "it is not an archive of a checkpoint"));
        }
        let number = |at: usize| {
            let bytes = head[at..at + 4].try_into().unwrap_or([0; 4]); // the slice has four bytes
            u32::from_le_bytes(bytes)
        };
        let version = number(8);
        if version != VERSION {
            let text = format!("an archive of format {version}, this program reads {VERSION}");
            return Err(Error::Elsewhere(text));
        }
        let input = match number(12) {
            PLAIN => In::Plain(input),
            // One frame: bytes after it are not part of the archive, and are found by `end`. The
            // decoder's own limit on the window, 128 MiB, bounds the memory that an archive can
            // make it allocate.
            ZSTD => {
                let decoder = zstd::Decoder::new(input).map_err(|e| broken("head", e))?;
                In::Zstd(Box::new(decoder.single_frame()))
            }
            other => {
                let what = format!("compression {other}, which is unknown to this program");
                return Err(Error::Elsewhere(what));
            }
        };
        Ok(Self { input, hashes: blake3::Hasher::new() })
    }

    /// Starts to read a part, which must be the next. The caller must read it to its end.
    pub fn part<'a>(&'a mut self, name: &'static str) -> Result<PartReader<'a, R>> {
        self.name(name)?;
        let mut hash = blake3::Hasher::new();
        hash.update(&padded(name));
        Ok(PartReader { archive: self, name, hash, left: 0, is_over: false })
    }

    fn name(&mut self, name: &str) -> Result<()> {
        let mut found = [0; NAME_BYTES];
        self.input.read_exact(&mut found).map_err(|e| broken(name, e))?;
        if found == padded(name) {
            return Ok(());
        }
        let found = String::from_utf8_lossy(&found);
        let found = found.trim_end_matches('\0').escape_default().to_string();
        Err(damaged(name, &format!("'{found}' is in its place")))
    }

    /// Checks that the archive ends here, and that no part was left out.
    pub fn end(mut self) -> Result<()> {
        self.name(END)?;
        let mut rest = [0; 36];
        self.input.read_exact(&mut rest).map_err(|e| broken(END, e))?;
        if rest[..4] != [0; 4] || rest[4..] != *self.hashes.finalize().as_bytes() {
            return Err(damaged(END, "its checksum differs"));
        }
        let mut more = [0];
        let failed = |e| broken(END, e);
        let is_over = self.input.read(&mut more).map_err(failed)? == 0
            && match self.input {
                In::Plain(_) => true,
                In::Zstd(decoder) => decoder.finish().read(&mut more).map_err(failed)? == 0,
            };
        match is_over {
            true => Ok(()),
            false => Err(damaged(END, "something follows it")),
        }
    }
}

/// A part that is being read. Its end is reported only if its checksum is correct.
pub struct PartReader<'a, R: Read> {
    archive: &'a mut ArchiveReader<R>,
    name: &'static str,
    hash: blake3::Hasher,
    /// Bytes of the piece that have not been read.
    left: usize,
    is_over: bool,
}

impl<R: Read> PartReader<'_, R> {
    /// Reads the rest of a small part.
    pub fn read_whole(mut self, bytes_max: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let name = self.name;
        let read = (&mut self).take(bytes_max + 1).read_to_end(&mut bytes);
        if read.map_err(|e| broken(name, e))? as u64 > bytes_max {
            return Err(damaged(name, &format!("it has more than {bytes_max} bytes")));
        }
        Ok(bytes)
    }

    /// Reads the length of the next piece, or the checksum at the end.
    fn next_piece(&mut self) -> io::Result<()> {
        let bad = |what: &str| io::Error::other(damaged(self.name, what));
        let mut length = [0; 4];
        self.archive.input.read_exact(&mut length)?;
        self.left = u32::from_le_bytes(length) as usize;
        if self.left > PIECE_BYTES_MAX {
            return Err(bad("a piece is too long"));
        }
        if self.left == 0 {
            let mut hash = [0; 32];
            self.archive.input.read_exact(&mut hash)?;
            if *self.hash.finalize().as_bytes() != hash {
                return Err(bad("its checksum differs"));
            }
            self.archive.hashes.update(&hash);
            self.is_over = true;
        }
        Ok(())
    }
}

impl<R: Read> Read for PartReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.is_over || buffer.is_empty() {
            return Ok(0);
        }
        if self.left == 0 {
            self.next_piece()?;
            // A decoder fails if it is called with an empty buffer.
            if self.is_over {
                return Ok(0);
            }
        }
        let length = buffer.len().min(self.left);
        let n = self.archive.input.read(&mut buffer[..length])?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.hash.update(&buffer[..n]);
        self.left -= n;
        Ok(n)
    }
}

fn damaged(part: &str, what: &str) -> Error {
    Error::damaged(format!("part '{part}' of the archive"), what)
}

/// The error of a failed read: damage of the archive, or the cause of the failure.
fn broken(part: &str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return damaged(part, "it is cut off");
    }
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => Error::file("cannot read", ARCHIVE)(error),
    }
}

/// Adds a checkpoint, and compares its contents with their checksums.
pub fn pack<W: Write>(archive: &mut ArchiveWriter<W>, reader: &Reader) -> Result<()> {
    let failed = |e| Error::file("cannot write", ARCHIVE)(e);
    let mut records = reader.records().clone();
    records.pages = in_one_file(reader)?;
    let mut part = archive.part("records").map_err(failed)?;
    part.write_all(&encode(&records)).map_err(failed)?;
    part.finish().map_err(failed)?;
    let mut part = archive.part("pages").map_err(failed)?;
    let last = records.pages.chunks.0.len().saturating_sub(1);
    let zeros = vec![0; CHUNK_BYTES as usize];
    reader.each_chunk(|n, chunk| {
        let more = if n == last { &[] } else { &zeros[chunk.len()..] };
        part.write_all(chunk).and_then(|()| part.write_all(more)).map_err(failed)
    })?;
    part.finish().map_err(failed)
}

/// Checksums of the pages of several files, after these were joined into one.
fn in_one_file(reader: &Reader) -> Result<Pages> {
    let Pages { bytes, mut chunks, .. } = reader.records().pages.clone();
    let parts = reader.records().pages.parts();
    let cut = parts.split_last().map_or(&[][..], |(_, before)| before);
    for part in cut.iter().filter(|part| !part.end.is_multiple_of(CHUNK_BYTES)) {
        let n = (part.end / CHUNK_BYTES) as usize;
        reader.verify_some(|chunk| chunk == n)?;
        let mut chunk = vec![0; CHUNK_BYTES as usize];
        let at = n as u64 * CHUNK_BYTES;
        let read = reader.pages().read_exact_at(&mut chunk[..(part.end - at) as usize], at);
        read.map_err(Error::file("cannot read", "pages"))?;
        chunks.0[n] = blake3::hash(&chunk).into();
    }
    Ok(Pages { bytes, chunks, parts: Vec::new() })
}

/// Unpacks a checkpoint from an archive. `place` becomes its directory after all parts have been
/// read and checked, and `adapt` has changed the records for this host.
pub fn unpack<R: Read>(
    mut archive: ArchiveReader<R>,
    place: &Path,
    adapt: impl FnOnce(&mut Records) -> Result<()>,
) -> Result<()> {
    let mut records = decode(&archive.part("records")?.read_whole(RECORDS_BYTES_MAX)?)?;
    let mut sink = Box::new(DirSink::begin(place)?);
    let mut part = archive.part("pages")?;
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    let mut left = records.pages.bytes;
    while left > 0 {
        let now = &mut chunk[..left.min(CHUNK_BYTES) as usize];
        part.read_exact(now).map_err(|e| broken("pages", e))?;
        sink.append(now)?;
        left -= now.len() as u64;
    }
    if part.read(&mut chunk).map_err(|e| broken("pages", e))? != 0 {
        return Err(damaged("pages", "it is longer than in its records"));
    }
    archive.end()?;
    let found = sink.pages()?;
    compare(&records, &found)?;
    records.pages = found; // now in one file
    adapt(&mut records)?;
    check::records(&records)?;
    sink.publish(&records)
}

/// Compares contents with the checksums of the records.
fn compare(records: &Records, found: &Pages) -> Result<()> {
    let mut pairs = records.pages.chunks.0.iter().zip(&found.chunks.0);
    let Some(n) = pairs.position(|(expected, found)| expected != found) else { return Ok(()) };
    let first = n as u64 * CHUNK_BYTES / PAGE_BYTES;
    Err(Error::damaged("pages", whose(records, first, first + CHUNK_BYTES / PAGE_BYTES)))
}

#[cfg(test)]
mod tests {
    use dormouse_record::sample::small;

    use super::*;

    /// A checkpoint of a few pages, on disk.
    fn checkpoint(dir: &Path) -> Reader {
        let mut records = small();
        let mut writer = Box::new(DirSink::begin(dir).unwrap());
        writer.append(&vec![7; records.pages.bytes as usize]).unwrap();
        records.pages = writer.pages().unwrap();
        writer.publish(&records).unwrap();
        Reader::open(dir).unwrap()
    }

    fn packed(dir: &Path, compress: bool) -> Vec<u8> {
        let reader = checkpoint(dir);
        let mut archive = ArchiveWriter::begin(Vec::new(), compress).unwrap();
        let mut part = archive.part("about").unwrap();
        part.write_all(&[1; 300_000]).unwrap();
        part.finish().unwrap();
        pack(&mut archive, &reader).unwrap();
        archive.finish().unwrap()
    }

    fn unpacked(bytes: &[u8], place: &Path) -> Result<()> {
        let mut archive = ArchiveReader::open(bytes)?;
        assert_eq!(archive.part("about")?.read_whole(300_000)?, vec![1; 300_000]);
        unpack(archive, place, |records| {
            records.about.name = "another".into();
            Ok(())
        })
    }

    #[test]
    fn a_packed_checkpoint_is_unpacked_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        for compress in [false, true] {
            let (from, to) = (format!("from-{compress}"), format!("to-{compress}"));
            let bytes = packed(&dir.path().join(&from), compress);
            assert_eq!(bytes.len() > 300_000, !compress);
            unpacked(&bytes, &dir.path().join(&to)).unwrap();
            let (one, other) = (Reader::open(&dir.path().join(from)), dir.path().join(to));
            let (one, other) = (one.unwrap(), Reader::open(&other).unwrap());
            other.verify().unwrap();
            assert_eq!(other.records().about.name, "another");
            assert_eq!(one.records().pages, other.records().pages);
        }
    }

    #[test]
    fn a_changed_or_cut_archive_leaves_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("to");
        for compress in [false, true] {
            let good = packed(&dir.path().join(format!("from-{compress}")), compress);
            // Every byte of the archive's own data; some bytes of the contents.
            let step = |at: usize| if at < 100 || at + 2000 > good.len() { 1 } else { 4999 };
            let mut at = 0;
            while at < good.len() {
                let mut bad = good.clone();
                bad[at] ^= 1 << (at % 8);
                let read = ArchiveReader::open(&bad[..]).and_then(|mut archive| {
                    archive.part("about")?.read_whole(300_000)?;
                    unpack(archive, &place, |_| Ok(()))
                });
                // Some bits of a zstd frame have no meaning.
                if compress && read.is_ok() {
                    Reader::open(&place).unwrap().verify().unwrap();
                    std::fs::remove_dir_all(&place).unwrap();
                } else {
                    assert!(read.is_err(), "byte {at}");
                }
                let cut = ArchiveReader::open(&good[..at]).and_then(|mut archive| {
                    archive.part("about")?.read_whole(300_000)?;
                    unpack(archive, &place, |_| Ok(()))
                });
                assert!(cut.is_err(), "cut at {at}");
                assert!(!place.exists());
                at += step(at);
            }
            let more = [&good[..], &[0]].concat();
            assert!(unpacked(&more, &place).unwrap_err().to_string().contains("follows"));
        }
    }

    #[test]
    fn parts_are_read_by_name_in_order() {
        let mut archive = ArchiveWriter::begin(Vec::new(), false).unwrap();
        archive.part("one").unwrap().finish().unwrap();
        let mut part = archive.part("two").unwrap();
        part.write_all(b"123").unwrap();
        part.finish().unwrap();
        let bytes = archive.finish().unwrap();
        let open = || ArchiveReader::open(&bytes[..]).unwrap();
        let said = open().part("two").map(|_| ()).unwrap_err().to_string();
        assert!(said.contains("'two'") && said.contains("'one' is in its place"), "{said}");
        let mut read = open();
        assert_eq!(read.part("one").unwrap().read_whole(0).unwrap(), b"");
        let said = read.part("two").unwrap().read_whole(2).unwrap_err().to_string();
        assert!(said.contains("more than 2 bytes"), "{said}");
        // If a part is left out and everything else is consistent, the last checksum differs.
        let first = 16 + 52;
        let left_out = [&bytes[..16], &bytes[first..]].concat();
        let mut read = ArchiveReader::open(&left_out[..]).unwrap();
        assert_eq!(read.part("two").unwrap().read_whole(9).unwrap(), b"123");
        assert!(read.end().is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(0u8.., 0..400)) {
            for compression in [PLAIN, ZSTD] {
                let mut all = MAGIC.to_vec();
                all.extend(VERSION.to_le_bytes());
                all.extend(compression.to_le_bytes());
                all.extend(padded("records"));
                all.extend(&bytes);
                let dir = tempfile::tempdir().unwrap();
                let read = ArchiveReader::open(&all[..])
                    .and_then(|archive| unpack(archive, &dir.path().join("a"), |_| Ok(())));
                assert!(read.is_err());
            }
        }
    }
}
