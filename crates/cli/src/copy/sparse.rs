//! Contents of files, with their holes. A file of a container may be 16 TB long without any data.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::io::Errno;
use tar::{EntryType, GnuExtSparseHeader, Header};

/// LIMIT: pieces of data of one file in an archive. The rest is one piece, with its holes as zeros.
const PIECES_MAX: usize = 65_536;
/// Bytes that are read at once and checked for zeros.
const BLOCK_BYTES: usize = 64 << 10;

/// A range of a file that is not a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: u64,
    end: u64,
}

/// The next piece at or after `from`, and before `size`.
fn next_piece(file: &File, from: u64, size: u64) -> io::Result<Option<Piece>> {
    use rustix::fs::{SeekFrom::Data, SeekFrom::Hole, seek};
    if from >= size {
        return Ok(None);
    }
    let start = match seek(file, Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not report holes: the rest is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(Piece { start: from, end: size })),
        Err(e) => return Err(e.into()),
    };
    if start >= size {
        return Ok(None);
    }
    let end = match seek(file, Hole(start)) {
        Ok(end) => end.min(size),
        Err(_) => size, // truncated meanwhile: the missing bytes are read as zeros
    };
    Ok(Some(Piece { start, end: end.max(start + 1) }))
}

/// Copies the first `size` bytes of a file, because a program inside may append for ever.
pub(super) fn copy(mut from: &File, size: u64, mut to: &File) -> io::Result<()> {
    if size == 0 {
        // Files of some file systems have contents although their size is 0.
        return io::copy(&mut from.take(1 << 30), &mut to).map(drop);
    }
    let mut at = 0;
    while let Some(piece) = next_piece(from, at, size)? {
        from.seek(SeekFrom::Start(piece.start))?;
        to.seek(SeekFrom::Start(piece.start))?;
        io::copy(&mut from.take(piece.end - piece.start), &mut to)?;
        at = piece.end;
    }
    to.set_len(size)
}

/// Writes an input to a file, with holes in the place of zeros.
pub(super) fn fill(from: &mut impl Read, to: &mut File) -> io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut size = 0;
    loop {
        let mut filled = 0;
        while filled < block.len() {
            match from.read(&mut block[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if filled == 0 {
            return to.set_len(size);
        }
        if block[..filled].iter().any(|byte| *byte != 0) {
            to.write_all_at(&block[..filled], size)?;
        }
        size += filled as u64;
    }
}

/// Appends a file to an archive. A file with holes has the old GNU form, which tar(1) of all systems
/// reads.
pub(super) fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    header: &mut Header,
    shown: &Path,
    file: File,
    size: u64,
) -> io::Result<()> {
    let pieces = pieces(&file, size)?;
    let whole = [Piece { start: 0, end: size }];
    if size == 0 || pieces == whole {
        header.set_entry_type(EntryType::Regular);
        header.set_size(size);
        return tar.append_data(header, shown, Contents::new(file, &pieces));
    }
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(pieces.iter().map(|p| p.end - p.start).sum());
    let gnu = header.as_gnu_mut().ok_or_else(|| io::Error::other("not a header of GNU tar"))?;
    gnu.set_real_size(size);
    // An entry without bytes marks the length of a file that ends in a hole.
    let ends_in_hole = pieces.last().is_none_or(|p| p.end < size);
    let end = ends_in_hole.then_some(Piece { start: size, end: size });
    let mut entries = pieces.iter().copied().chain(end).peekable();
    for (slot, entry) in gnu.sparse.iter_mut().zip(entries.by_ref().take(4)) {
        slot.set_offset(entry.start);
        slot.set_length(entry.end - entry.start);
    }
    gnu.set_is_extended(entries.peek().is_some());
    let mut more = Vec::new();
    while entries.peek().is_some() {
        let mut extension = GnuExtSparseHeader::new();
        let slots = extension.sparse.len();
        for (slot, entry) in extension.sparse.iter_mut().zip(entries.by_ref().take(slots)) {
            slot.set_offset(entry.start);
            slot.set_length(entry.end - entry.start);
        }
        extension.set_is_extended(entries.peek().is_some());
        more.extend_from_slice(extension.as_bytes());
    }
    tar.append_data(header, shown, io::Cursor::new(more).chain(Contents::new(file, &pieces)))
}

fn pieces(file: &File, size: u64) -> io::Result<Vec<Piece>> {
    let (mut all, mut at) = (Vec::new(), 0);
    while let Some(piece) = next_piece(file, at, size)? {
        if all.len() == PIECES_MAX {
            all.push(Piece { start: piece.start, end: size });
            break;
        }
        at = piece.end;
        all.push(piece);
    }
    Ok(all)
}

/// The pieces of a file one after the other, in the lengths of the archive's header. The missing part of a
/// file that shrinks meanwhile is read as zeros.
struct Contents {
    file: File,
    pieces: std::vec::IntoIter<Piece>,
    now: Piece,
}

impl Contents {
    fn new(file: File, pieces: &[Piece]) -> Self {
        let pieces = Vec::from(pieces).into_iter();
        Self { file, pieces, now: Piece { start: 0, end: 0 } }
    }
}

impl Read for Contents {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.now.start == self.now.end {
            match self.pieces.next() {
                None => return Ok(0),
                Some(piece) => self.now = piece,
            }
        }
        let left = usize::try_from(self.now.end - self.now.start).unwrap_or(usize::MAX);
        let wanted = left.min(buffer.len());
        let buffer = &mut buffer[..wanted];
        let read = match self.file.read_at(buffer, self.now.start)? {
            0 => {
                buffer.fill(0);
                wanted
            }
            read => read,
        };
        self.now.start += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// A file of 40 MB with data in each 128 kB of its first 4 MB, and a hole behind.
    fn holed() -> File {
        let file = tempfile::tempfile().unwrap();
        for n in 0..32 {
            file.write_all_at(&[n as u8 + 1; 4096], n * (128 << 10)).unwrap();
        }
        file.set_len(40 << 20).unwrap();
        file
    }

    fn bytes(file: &File) -> Vec<u8> {
        let mut all = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut all, 0).unwrap();
        all
    }

    #[test]
    fn copy_keeps_holes_and_contents() {
        let (from, to) = (holed(), tempfile::tempfile().unwrap());
        copy(&from, 40 << 20, &to).unwrap();
        assert!(bytes(&from) == bytes(&to));
        assert!(to.metadata().unwrap().blocks() * 512 <= 1 << 20, "{:?}", to.metadata());
    }

    #[test]
    fn copy_ends_at_the_given_size() {
        let (from, to) = (holed(), tempfile::tempfile().unwrap());
        copy(&from, 5000, &to).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 5000);
        assert!(bytes(&to) == bytes(&from)[..5000]);
    }

    #[test]
    fn archive_keeps_holes_and_contents_both_ways() {
        let (from, size) = (holed(), 40 << 20);
        let mut tar = tar::Builder::new(Vec::new());
        let clone = || from.try_clone().unwrap();
        append(&mut tar, &mut Header::new_gnu(), Path::new("x"), clone(), size).unwrap();
        append(&mut tar, &mut Header::new_gnu(), Path::new("y"), clone(), 4096).unwrap();
        let archive = tar.into_inner().unwrap();
        assert!(archive.len() < 1 << 20, "{}", archive.len());
        let mut tar = tar::Archive::new(&archive[..]);
        let mut entries = tar.entries().unwrap();
        let mut unpack = || {
            let mut to = tempfile::tempfile().unwrap();
            fill(&mut entries.next().unwrap().unwrap(), &mut to).unwrap();
            to
        };
        let to = unpack();
        assert!(bytes(&from) == bytes(&to));
        assert!(to.metadata().unwrap().blocks() * 512 <= 4 << 20, "{:?}", to.metadata());
        assert_eq!(bytes(&unpack()), [1; 4096]);
    }

    #[test]
    fn archive_holds_file_without_data() {
        let from = tempfile::tempfile().unwrap();
        from.set_len(1 << 40).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        append(&mut tar, &mut Header::new_gnu(), Path::new("x"), from, 1 << 40).unwrap();
        let archive = tar.into_inner().unwrap();
        let mut tar = tar::Archive::new(&archive[..]);
        assert_eq!(tar.entries().unwrap().next().unwrap().unwrap().size(), 1 << 40);
    }
}
