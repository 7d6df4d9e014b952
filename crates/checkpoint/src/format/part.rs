//! The files of memory contents, numbered as one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::{CHUNK_BYTES, PAGE_BYTES, Pages};

/// LIMIT: files of one checkpoint. Each is an open descriptor of the restore.
pub const PARTS_MAX: usize = 8;

/// The file name of a part.
pub fn part_name(number: usize) -> String {
    match number {
        0 => "pages".into(),
        number => format!("pages.{number}"),
    }
}

impl Pages {
    /// The byte ranges of the parts, each as long as its file. Each begins with a chunk.
    pub fn parts(&self) -> Vec<Range<u64>> {
        self.places().collect()
    }

    fn places(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at: u64 = 0;
        let place = move |bytes: &u64| {
            let start = at;
            // A part that ends beyond all numbers is refused.
            let end = start.saturating_add(*bytes);
            at = end.checked_next_multiple_of(CHUNK_BYTES).unwrap_or(u64::MAX);
            start..end
        };
        let lengths = match self.parts.is_empty() {
            true => std::slice::from_ref(&self.bytes),
            false => &self.parts,
        };
        lengths.iter().map(place)
    }

    /// Whether the files contain all bytes of a range.
    pub(super) fn has(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        for part in self.places() {
            if part.contains(&at) {
                at = part.end;
            }
        }
        at >= range.end
    }

    /// Whether lengths and checksums are consistent.
    pub(super) fn is_whole(&self) -> bool {
        let end = self.places().last().map(|part| part.end);
        let is_even = |bytes: &u64| *bytes > 0 && bytes.is_multiple_of(PAGE_BYTES);
        self.bytes.is_multiple_of(PAGE_BYTES)
            && self.chunks.0.len() as u64 == self.bytes.div_ceil(CHUNK_BYTES)
            && self.parts.len() <= PARTS_MAX
            && self.parts.iter().all(is_even)
            && end == Some(self.bytes)
    }
}

/// The open files.
#[derive(Debug)]
pub struct PageFiles {
    files: Vec<(Range<u64>, File)>,
}

impl PageFiles {
    pub(super) fn new(files: Vec<(Range<u64>, File)>) -> Self {
        Self { files }
    }

    /// The files, in the order of their parts.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &File> {
        self.files.iter().map(|(_, file)| file)
    }

    /// The length of each file.
    pub fn lengths(&self) -> Vec<u64> {
        self.files.iter().map(|(part, _)| part.end - part.start).collect()
    }

    /// The files, and the byte range of each.
    pub(super) fn parts(&self) -> &[(Range<u64>, File)] {
        &self.files
    }

    /// The number of the part with a byte.
    pub(super) fn number_of(&self, at: u64) -> Option<usize> {
        self.files.iter().position(|(part, _)| part.contains(&at))
    }

    /// Reads bytes; all of the range must be in the files.
    pub(crate) fn read_exact_at(&self, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            let found = self.files.iter().find(|(part, _)| part.contains(&at));
            let (part, file) = found.ok_or(io::ErrorKind::UnexpectedEof)?;
            let most = usize::try_from(part.end - at).unwrap_or(usize::MAX);
            let (now, later) = buffer.split_at_mut(most.min(buffer.len()));
            file.read_exact_at(now, at - part.start)?;
            at += now.len() as u64;
            buffer = later;
        }
        Ok(())
    }

    /// The same files, by duplicated descriptors.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        let copy = |(part, file): &(Range<u64>, File)| Ok((part.clone(), file.try_clone()?));
        Ok(Self { files: self.files.iter().map(copy).collect::<io::Result<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Checksums;
    use super::*;

    fn pages(parts: &[u64]) -> Pages {
        let mut pages = Pages { parts: parts.to_vec(), ..Pages::default() };
        pages.bytes = pages.parts().last().map_or(0, |part| part.end);
        pages.chunks.0 = vec![[0; 32]; pages.bytes.div_ceil(CHUNK_BYTES) as usize];
        pages
    }

    #[test]
    fn parts_begin_with_a_chunk() {
        let three = pages(&[PAGE_BYTES, 2 * CHUNK_BYTES, PAGE_BYTES]);
        let (page, chunk) = (PAGE_BYTES, CHUNK_BYTES);
        assert_eq!(three.parts(), [0..page, chunk..3 * chunk, 3 * chunk..3 * chunk + page]);
        assert!(three.is_whole());
        assert!(three.has(0..page) && three.has(chunk..3 * chunk + page));
        assert!(!three.has(0..2 * page) && !three.has(page..2 * page));
        assert!(!three.has(3 * chunk..3 * chunk + 2 * page));
    }

    #[test]
    fn invalid_parts_are_refused() {
        assert!(!pages(&[0]).is_whole());
        assert!(!pages(&[PAGE_BYTES, 100]).is_whole());
        assert!(!pages(&[PAGE_BYTES; PARTS_MAX + 1]).is_whole());
        assert!(pages(&[PAGE_BYTES; PARTS_MAX]).is_whole());
        let chunks = Checksums(vec![[0; 32]]);
        let huge = Pages { bytes: 8192, chunks, parts: vec![u64::MAX - 4095; 3] };
        assert!(!huge.is_whole());
        let other = Pages { bytes: 2 * PAGE_BYTES, ..pages(&[PAGE_BYTES]) };
        assert!(!other.is_whole());
    }

    #[test]
    fn several_files_are_read_as_one() {
        let file = |bytes: Vec<u8>| {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            file
        };
        let chunk = CHUNK_BYTES;
        let one = file(vec![1; chunk as usize]);
        let files =
            PageFiles::new(vec![(0..chunk, one), (chunk..chunk + 4096, file(vec![2; 4096]))]);
        let mut both = vec![0; 8192];
        files.read_exact_at(&mut both, chunk - 4096).unwrap();
        assert_eq!(both, [vec![1; 4096], vec![2; 4096]].concat());
        assert!(files.read_exact_at(&mut both, chunk).is_err());
        assert_eq!(files.number_of(chunk), Some(1));
        assert_eq!(files.number_of(chunk + 4096), None);
    }
}
