//! Contents of memory: pages in files that are numbered as one.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Checksums;

/// Bytes of pages under one checksum, which is checked before any page of the chunk is used.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
/// LIMIT: files of one checkpoint. Each is an open descriptor of the restore.
pub const PARTS_MAX: usize = 8;

/// The lengths and checksums of the files of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Where the last page ends, in bytes.
    pub bytes: u64,
    /// Checksums of all chunks; the last chunk of a file may be shorter.
    pub chunks: Checksums,
    /// Bytes of each file; empty if there is only one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<u64>,
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
    pub(crate) fn has(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        for part in self.places() {
            if part.contains(&at) {
                at = part.end;
            }
        }
        at >= range.end
    }

    /// Whether lengths and checksums are consistent.
    pub(crate) fn is_whole(&self) -> bool {
        let end = self.places().last().map(|part| part.end);
        let is_even = |bytes: &u64| *bytes > 0 && bytes.is_multiple_of(PAGE_BYTES);
        self.bytes.is_multiple_of(PAGE_BYTES)
            && self.chunks.0.len() as u64 == self.bytes.div_ceil(CHUNK_BYTES)
            && self.parts.len() <= PARTS_MAX
            && self.parts.iter().all(is_even)
            && end == Some(self.bytes)
    }
}

#[cfg(test)]
mod tests {
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
}
