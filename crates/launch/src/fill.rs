//! The file of a fill job: the input of the processes that fill memory while the container runs,
//! and their shared state, which survives each of them.
//!
//! ```text
//! 0      head      64-bit numbers (`head`), shared by all processes that map it
//! 2048   reason    why the container was ended, as text
//! 4096   job       numbers, ids of processes, lengths of files of pages, then the BLAKE3 of each chunk
//! ...    lists     memory still to fill; the head selects the current list
//! ```
//!
//! The engine writes the file, with a lock (flock(2)) on the open file that is passed to the keeper
//! for [filling](crate::Keeper::fill). The lock is released when all memory is filled; a waiter
//! takes it then. Every reader verifies the contents, although only root writes the file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::word;

/// First number of the job.
const MAGIC: u64 = u64::from_ne_bytes(*b"DMFILL02");
/// Offset of the reason, and its longest size, in bytes.
const REASON_AT: u64 = 2048;
const REASON_BYTES: usize = 1024;
/// Offset of the job.
const JOB_AT: u64 = 4096;
/// Numbers of the job, before the checksums.
const JOB_NUMBERS: usize = 6;
const CHECKSUM_BYTES: u64 = 32;
/// Numbers of one [`Piece`].
const PIECE_NUMBERS: usize = 4;
const PIECE_BYTES: u64 = PIECE_NUMBERS as u64 * 8;
/// LIMIT: pieces of a list that is read.
const PIECES_MAX: u64 = 1 << 22;
/// LIMIT: chunks of pages, of 64 kB each.
const CHUNKS_MAX: u64 = 1 << 24;
/// LIMIT: files of pages.
pub const PARTS_MAX: usize = 8;
/// LIMIT: address spaces that are filled by one.
pub const SOURCES_MAX: usize = 16;

/// Places in the head, in 64-bit numbers.
pub mod head {
    /// Bit 0: the current list. Bit 1: the message was applied to it.
    pub const STATE: usize = 0;
    /// Offset and number of pieces of the one list, then of the other.
    pub const LISTS: usize = 1;
    /// The sender of the message, as in [`super::Piece::source`].
    pub const SENDER: usize = 5;
    /// The message that was read last (ioctl_userfaultfd(2)), four numbers.
    pub const MESSAGE: usize = 6;
    /// Not 0 when all memory is filled.
    pub const DONE: usize = 10;
    /// Not 0 after a fork of a process: only the filling processes have descriptors of its
    /// children.
    pub const FORKED: usize = 11;
    /// Bytes around an address that are filled together; 0 is [`super::AROUND_BYTES`].
    pub const AROUND: usize = 12;
}

/// Memory to be filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The address space: the number of a descriptor that came with the job, or, for a descriptor
    /// that the kernel gave to a filling process, -1 minus its number.
    pub source: i64,
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// Offset of its contents in the pages, in bytes.
    pub offset: u64,
}

/// The part that is the same for all filling processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// End of the last page.
    pub bytes: u64,
    /// Lengths of the files of pages, each of which begins with a chunk.
    pub parts: Vec<u64>,
    /// Bytes of each chunk but the last of a file.
    pub chunk_bytes: u64,
    /// BLAKE3 of each.
    pub checksums: Vec<[u8; 32]>,
    /// Bytes around an address that are filled together, [`is_around`].
    pub around_bytes: u64,
    /// The owners of the address spaces that come with it: ids of processes, inside.
    pub processes: Vec<u32>,
}

/// Returns whether so many bytes may be filled together: whole pages, and a megabyte at most.
pub fn is_around(bytes: u64) -> bool {
    bytes.is_power_of_two() && (4096..=1 << 20).contains(&bytes)
}

impl Job {
    /// Writes a new file, with the first list.
    pub fn write(&self, file: &File, left: &[Piece]) -> io::Result<()> {
        let all = [
            MAGIC,
            self.bytes,
            self.chunk_bytes,
            self.checksums.len() as u64,
            self.processes.len() as u64,
            self.parts.len() as u64,
        ];
        let ids = self.processes.iter().map(|pid| u64::from(*pid));
        let more = ids.chain(self.parts.iter().copied());
        word::write(file, JOB_AT, &all.into_iter().chain(more).collect::<Vec<_>>())?;
        file.write_all_at(self.checksums.as_flattened(), self.checksums_at())?;
        word::write(file, head::AROUND as u64 * 8, &[self.around_bytes])?;
        let at = self.lists_at();
        write_list(file, at, left)?;
        // ORDER: last, so that a truncated file contains no work.
        word::write(file, head::LISTS as u64 * 8, &[at, left.len() as u64])
    }

    /// Reads one.
    pub fn read(file: &File) -> io::Result<Self> {
        let all = word::read(file, JOB_AT, JOB_NUMBERS)?;
        let &[magic, bytes, chunk_bytes, chunks, sources, parts] = all.as_slice() else {
            return Err(word::bad("it is cut"));
        };
        let whole = magic == MAGIC && chunks <= CHUNKS_MAX && sources <= SOURCES_MAX as u64;
        let whole = whole && (1..=PARTS_MAX as u64).contains(&parts);
        let fits = (1..=1 << 30).contains(&chunk_bytes) && bytes.div_ceil(chunk_bytes) == chunks;
        let around_bytes = match number(file, head::AROUND)? {
            0 => AROUND_BYTES,
            around => around,
        };
        if !whole || !fits || !is_around(around_bytes) {
            return Err(word::bad("it is not of this kind"));
        }
        let at = JOB_AT + JOB_NUMBERS as u64 * 8;
        let ids = word::read(file, at, sources as usize)?;
        let parts = word::read(file, at + sources * 8, parts as usize)?;
        let processes = ids.into_iter().map(|id| id as u32).collect();
        let checksums = Vec::new();
        let mut job = Self { bytes, parts, chunk_bytes, checksums, around_bytes, processes };
        if job.places().last().map(|part| part.end) != Some(bytes) {
            return Err(word::bad("its files are of another length"));
        }
        let mut checksums = vec![[0; 32]; chunks as usize];
        file.read_exact_at(checksums.as_flattened_mut(), job.checksums_at())?;
        job.checksums = checksums;
        Ok(job)
    }

    fn checksums_at(&self) -> u64 {
        JOB_AT + (JOB_NUMBERS + self.processes.len() + self.parts.len()) as u64 * 8
    }

    /// Returns the range of each file of pages among all pages, in bytes.
    pub fn places(&self) -> Vec<Range<u64>> {
        let mut at: u64 = 0;
        let place = |bytes: &u64| {
            let start = at;
            let end = start.saturating_add(*bytes);
            at = end.checked_next_multiple_of(self.chunk_bytes).unwrap_or(u64::MAX);
            start..end
        };
        self.parts.iter().map(place).collect()
    }

    /// Returns the offset of the first list.
    pub fn lists_at(&self) -> u64 {
        let checksums = self.checksums.len() as u64 * CHECKSUM_BYTES;
        (self.checksums_at() + checksums).next_multiple_of(4096)
    }

    /// Reads a list; every piece of it is whole pages within the length of all.
    pub fn read_list(&self, file: &File, at: u64, count: u64) -> io::Result<Vec<Piece>> {
        if count > PIECES_MAX {
            return Err(word::bad("a list is too long"));
        }
        let all = word::read(file, at, count as usize * PIECE_NUMBERS)?;
        let mut pieces = Vec::with_capacity(count as usize);
        for fields in all.chunks_exact(PIECE_NUMBERS) {
            let [source, start, end, offset] = [fields[0], fields[1], fields[2], fields[3]];
            let piece = Piece { source: source.cast_signed(), start, end, offset };
            let bytes =
                end.checked_sub(start).ok_or_else(|| word::bad("a piece ends before it begins"))?;
            let is_within = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
            if !is_within || (start | end | offset) % 4096 != 0 {
                return Err(word::bad("a piece is beyond the end"));
            }
            if piece.source >= self.processes.len() as i64 {
                return Err(word::bad("a piece of an unknown process"));
            }
            pieces.push(piece);
        }
        Ok(pieces)
    }
}

/// Returns the name of a file of pages.
pub fn part_name(number: usize) -> String {
    match number {
        0 => "pages".into(),
        number => format!("pages.{number}"),
    }
}

/// Bytes of a list.
pub fn list_bytes(count: usize) -> u64 {
    count as u64 * PIECE_BYTES
}

/// Writes a list.
pub fn write_list(file: &File, at: u64, left: &[Piece]) -> io::Result<()> {
    let fields = |p: &Piece| [p.source.cast_unsigned(), p.start, p.end, p.offset];
    word::write(file, at, left.iter().map(fields).collect::<Vec<_>>().as_flattened())
}

/// Reads one number of the head, by its place.
pub fn number(file: &File, place: usize) -> io::Result<u64> {
    Ok(word::read(file, place as u64 * 8, 1)?[0])
}

/// Records why the container was ended.
pub fn give_reason(file: &File, why: &str) -> io::Result<()> {
    let mut end = why.len().min(REASON_BYTES - 1);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    file.write_all_at(&[&why.as_bytes()[..end], &[0]].concat(), REASON_AT)
}

/// Returns why the container was ended, if it was.
pub fn reason(file: &File) -> io::Result<Option<String>> {
    let mut bytes = [0; REASON_BYTES];
    file.read_exact_at(&mut bytes, REASON_AT)?;
    let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
    Ok((!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned()))
}

/// Bytes around an address that are filled together by default.
pub const AROUND_BYTES: u64 = 64 << 10;
/// LIMIT: places in a record of touched memory: 32 MB of 64 kB each.
pub const TOUCHED_MAX: usize = 512;
/// First number of such a record.
const TOUCHED_MAGIC: u64 = u64::from_ne_bytes(*b"DMTOUCH1");

/// A part of a process's memory that a thread waited for; the process by its id inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Touched {
    /// The process.
    pub pid: u32,
    /// The first address.
    pub start: u64,
}

/// Writes the touched places, the most important first, over the contents of the file.
///
/// A truncated or damaged record counts as empty: it saves time, and correctness does not depend on
/// it.
pub fn write_touched(file: &File, touched: &[Touched]) -> io::Result<()> {
    let touched = &touched[..touched.len().min(TOUCHED_MAX)];
    let places = touched.iter().flat_map(|t| [u64::from(t.pid), t.start]);
    let all = [TOUCHED_MAGIC, touched.len() as u64].into_iter().chain(places);
    let mut bytes: Vec<u8> = all.flat_map(u64::to_ne_bytes).collect();
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    file.set_len(bytes.len() as u64)?;
    file.write_all_at(&bytes, 0)
}

/// Reads such a record; returns nothing if it is invalid.
pub fn read_touched(file: &File) -> Vec<Touched> {
    const HEAD_BYTES: usize = 16;
    const PLACE_BYTES: usize = 16;
    let most = HEAD_BYTES + TOUCHED_MAX * PLACE_BYTES + CHECKSUM_BYTES as usize;
    let mut bytes = Vec::new();
    let length = file.metadata().map_or(0, |meta| meta.len());
    if length <= most as u64 {
        bytes.resize(length as usize, 0);
    }
    let is_read = file.read_exact_at(&mut bytes, 0).is_ok();
    let Some((all, checksum)) = bytes.split_last_chunk::<32>().filter(|_| is_read) else {
        return Vec::new();
    };
    let number = |b: &[u8]| u64::from_ne_bytes(b.try_into().unwrap_or_default()); // 8 bytes
    let all_numbers: Vec<u64> = all.chunks_exact(8).map(number).collect();
    match all_numbers.split_first_chunk::<2>() {
        Some(([TOUCHED_MAGIC, count], places))
            if blake3::hash(all).as_bytes() == checksum && *count * 2 == places.len() as u64 =>
        {
            let place = |p: &[u64]| Touched { pid: p[0] as u32, start: p[1] };
            places.chunks_exact(2).map(place).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> (Job, Vec<Piece>) {
        let piece = |source, start: u64, pages: u64, offset| Piece {
            source,
            start,
            end: start + pages * 4096,
            offset,
        };
        let job = Job {
            bytes: 3 << 20,
            parts: vec![(1 << 20) - 4096, 2 << 20],
            chunk_bytes: 1 << 20,
            checksums: vec![[1; 32], [2; 32], [3; 32]],
            around_bytes: 4096,
            processes: vec![1, 7],
        };
        (job, vec![piece(0, 0x7f00_0000_0000, 256, 0), piece(1, 4096, 512, 1 << 20)])
    }

    #[test]
    fn job_round_trips() {
        let (job, left) = job();
        let file = tempfile::tempfile().unwrap();
        job.write(&file, &left).unwrap();
        assert_eq!(Job::read(&file).unwrap(), job);
        for (written, read) in
            [(0, Some(AROUND_BYTES)), (5000, None), (2048, None), (2 << 20, None)]
        {
            word::write(&file, head::AROUND as u64 * 8, &[written]).unwrap();
            assert_eq!(Job::read(&file).ok().map(|job| job.around_bytes), read);
        }
        let at = number(&file, head::LISTS).unwrap();
        let count = number(&file, head::LISTS + 1).unwrap();
        assert_eq!(job.read_list(&file, at, count).unwrap(), left);
        assert_eq!(reason(&file).unwrap(), None);
        give_reason(&file, "page 7 is damaged").unwrap();
        assert_eq!(reason(&file).unwrap().unwrap(), "page 7 is damaged");
    }

    #[test]
    fn touched_record_round_trips_or_reads_as_empty() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(read_touched(&file), []);
        let touched: Vec<Touched> =
            (0..9).map(|n| Touched { pid: 1, start: n * AROUND_BYTES }).collect();
        write_touched(&file, &touched).unwrap();
        write_touched(&file, &touched[..7]).unwrap();
        assert_eq!(read_touched(&file), &touched[..7]);
        let length = file.metadata().unwrap().len();
        for at in 0..length {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
            assert_eq!(read_touched(&file), [], "byte {at}");
            file.write_all_at(&byte, at).unwrap();
        }
        file.set_len(length - 1).unwrap();
        assert_eq!(read_touched(&file), []);
        let many = vec![touched[0]; TOUCHED_MAX + 1];
        write_touched(&file, &many).unwrap();
        assert_eq!(read_touched(&file).len(), TOUCHED_MAX);
    }

    #[test]
    fn invalid_pieces_are_refused() {
        let (job, left) = job();
        let file = tempfile::tempfile().unwrap();
        for bad in [
            Piece { end: 0, ..left[0] },
            Piece { start: left[0].start + 1, ..left[0] },
            Piece { offset: 3 << 20, ..left[0] },
            Piece { offset: u64::MAX - 4095, ..left[0] },
            Piece { source: 2, ..left[0] },
        ] {
            write_list(&file, job.lists_at(), &[bad]).unwrap();
            assert!(job.read_list(&file, job.lists_at(), 1).is_err(), "{bad:?}");
        }
        assert!(job.read_list(&file, job.lists_at(), u64::MAX / 64).is_err());
    }
}
