//! The list of memory still to fill, by address space and address, updated as mappings change.

use std::collections::BTreeMap;
use std::ops::Range;

use dormouse_launch::fill::Piece;

/// Pieces that do not overlap.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// By source and first address.
    pieces: BTreeMap<(i64, u64), Piece>,
}

impl Left {
    pub(super) fn new(pieces: Vec<Piece>) -> Self {
        let mut left = Self::default();
        pieces.into_iter().for_each(|piece| left.add(piece));
        left
    }

    pub(super) fn pieces(&self) -> Vec<Piece> {
        self.pieces.values().copied().collect()
    }

    /// Returns whether any page of an address space is missing.
    pub(super) fn has(&self, source: i64) -> bool {
        self.pieces.range((source, 0)..=(source, u64::MAX)).next().is_some()
    }

    /// Returns the piece that contains an address.
    pub(super) fn find(&self, source: i64, address: u64) -> Option<Piece> {
        let mut before = self.pieces.range((source, 0)..=(source, address));
        let (_, piece) = before.next_back()?;
        (piece.end > address).then_some(*piece)
    }

    /// Returns the next piece: those of children come last.
    pub(super) fn next(&self) -> Option<Piece> {
        let of_job = self.pieces.range((0, 0)..).next();
        of_job.or_else(|| self.pieces.iter().next()).map(|(_, piece)| *piece)
    }

    /// Removes a range.
    pub(super) fn cut(&mut self, source: i64, range: Range<u64>) {
        self.take(source, range);
    }

    /// Removes all pages of an address space.
    pub(super) fn forget(&mut self, source: i64) {
        self.cut(source, 0..u64::MAX);
    }

    /// Moves a range; the pages at its new place are removed first.
    pub(super) fn moved(&mut self, source: i64, from: u64, to: u64, bytes: u64) {
        let end = |start: u64| start.saturating_add(bytes);
        let taken = self.take(source, from..end(from));
        self.cut(source, to..end(to));
        for piece in taken {
            // Within the range, so nothing overflows that the kernel has not checked.
            let start = (piece.start - from).saturating_add(to);
            let end = start.saturating_add(piece.end - piece.start);
            self.add(Piece { start, end, ..piece });
        }
    }

    /// Copies the list of an address space to its copy, after fork(2).
    pub(super) fn forked(&mut self, source: i64, copy: i64) {
        self.forget(copy);
        let all: Vec<Piece> =
            self.pieces.range((source, 0)..=(source, u64::MAX)).map(|(_, p)| *p).collect();
        all.into_iter().for_each(|piece| self.add(Piece { source: copy, ..piece }));
    }

    fn add(&mut self, piece: Piece) {
        if piece.start < piece.end {
            self.pieces.insert((piece.source, piece.start), piece);
        }
    }

    /// Removes the part that overlaps with a range, and returns it.
    fn take(&mut self, source: i64, range: Range<u64>) -> Vec<Piece> {
        if range.is_empty() {
            return Vec::new();
        }
        let first = self.find(source, range.start).map_or(range.start, |piece| piece.start);
        let hit: Vec<Piece> =
            self.pieces.range((source, first)..(source, range.end)).map(|(_, p)| *p).collect();
        let mut taken = Vec::with_capacity(hit.len());
        for piece in hit {
            self.pieces.remove(&(source, piece.start));
            let start = piece.start.max(range.start);
            let end = piece.end.min(range.end);
            let part = |start: u64, end: u64| Piece {
                start,
                end,
                offset: piece.offset + (start - piece.start),
                ..piece
            };
            self.add(part(piece.start, start));
            self.add(part(end, piece.end));
            taken.push(part(start, end));
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = 4096;

    fn left() -> Left {
        let piece = |source, start, end, offset| Piece {
            source,
            start: start * P,
            end: end * P,
            offset: offset * P,
        };
        Left::new(vec![piece(0, 10, 20, 100), piece(0, 20, 30, 300), piece(1, 10, 20, 500)])
    }

    /// The page of the contents that belongs to a page.
    fn at(left: &Left, source: i64, page: u64) -> Option<u64> {
        let piece = left.find(source, page * P)?;
        Some((piece.offset + page * P - piece.start) / P)
    }

    #[test]
    fn page_is_found_by_its_address() {
        let left = left();
        assert_eq!(
            [at(&left, 0, 9), at(&left, 0, 10), at(&left, 0, 19)],
            [None, Some(100), Some(109)]
        );
        assert_eq!(
            [at(&left, 0, 20), at(&left, 0, 30), at(&left, 1, 10)],
            [Some(300), None, Some(500)]
        );
        assert_eq!(at(&left, 2, 10), None);
    }

    #[test]
    fn cut_removes_the_range_alone() {
        let mut left = left();
        left.cut(0, 15 * P..22 * P);
        for page in 0..40 {
            let was = match page {
                10..15 => Some(90 + page),
                22..30 => Some(280 + page),
                _ => None,
            };
            assert_eq!(at(&left, 0, page), was, "page {page}");
        }
        assert_eq!(at(&left, 1, 15), Some(505));
        left.cut(0, 12 * P..12 * P);
        assert_eq!(at(&left, 0, 12), Some(102));
        left.forget(0);
        assert!(!left.has(0) && left.has(1));
    }

    #[test]
    fn moved_range_is_found_at_its_new_address() {
        let mut left = left();
        left.moved(0, 18 * P, 1000 * P, 4 * P);
        assert_eq!([at(&left, 0, 17), at(&left, 0, 18), at(&left, 0, 21)], [Some(107), None, None]);
        assert_eq!(
            [at(&left, 0, 22), at(&left, 0, 1000), at(&left, 0, 1003)],
            [Some(302), Some(108), Some(301)]
        );
        // Onto a range still to be filled, which is removed.
        left.moved(0, 1000 * P, 10 * P, 4 * P);
        assert_eq!(
            [at(&left, 0, 10), at(&left, 0, 13), at(&left, 0, 14)],
            [Some(108), Some(301), Some(104)]
        );
        assert_eq!(at(&left, 0, 1000), None);
    }

    #[test]
    fn fork_copies_the_list_for_the_child() {
        let mut left = left();
        left.forked(0, -8);
        assert_eq!(at(&left, -8, 25), Some(305));
        left.cut(0, 0..u64::MAX);
        assert_eq!(at(&left, -8, 25), Some(305));
        assert_eq!(left.next().map(|p| p.source), Some(1), "children last");
        left.forget(1);
        assert_eq!(left.next().map(|p| (p.source, p.start)), Some((-8, 10 * P)));
    }
}
