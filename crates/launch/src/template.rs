//! The input of a template: a process of the keeper with memory that the clones of one checkpoint
//! share, each of which is cloned from it ([`crate::Keeper::template`]).
//!
//! ```text
//! 0      numbers of 64 bits: magic, flags, count of areas, count of pieces
//! 32     areas: start, end, flags, and whether it is mapped, which the template writes
//! ...    pieces: start, bytes, file of contents, offset in it
//! ```
//!
//! The engine writes the file, and reads the mapped areas from it when the template is ready. Every
//! reader verifies the contents, although only root writes the file.

use std::fs::File;
use std::io;

use crate::word;

const MAGIC: u64 = u64::from_ne_bytes(*b"DMTMPL01");
const HEAD_NUMBERS: usize = 4;
const AREA_NUMBERS: usize = 4;
const PIECE_NUMBERS: usize = 4;
/// Place among the numbers of an area.
const MAPPED: u64 = 3;
const PAGE_BYTES: u64 = 4096;
/// LIMIT: areas of a process (`vm.max_map_count` is 65,530 by default).
const AREAS_MAX: u64 = 1 << 20;
/// LIMIT: pieces.
const PIECES_MAX: u64 = 1 << 24;
/// The end of user memory.
const USER_END: u64 = 0x7fff_ffff_f000;

/// Flag of the whole: it has no transparent huge pages (PR_SET_THP_DISABLE(2const)).
const NO_HUGE_PAGES: u64 = 1;
/// Flags of an area.
const NO_RESERVE: u64 = 1;
const HUGE_PAGES: u64 = 2;
const SMALL_PAGES: u64 = 4;

/// Anonymous memory, to be mapped at its address if nothing is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// MAP_NORESERVE (mmap(2)).
    pub no_reserve: bool,
    /// MADV_HUGEPAGE, or MADV_NOHUGEPAGE (madvise(2)).
    pub huge_pages: Option<bool>,
}

/// Contents of an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Number of the file of contents.
    pub part: u64,
    /// Offset in that file.
    pub offset: u64,
}

/// The contents of the list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Template {
    /// No huge pages, whatever the areas request.
    pub no_huge_pages: bool,
    /// By address.
    pub areas: Vec<Area>,
    /// By address, each within an area.
    pub pieces: Vec<Piece>,
}

/// Reads so many rows of numbers.
fn rows<const N: usize>(file: &File, at: u64, count: usize) -> io::Result<Vec<[u64; N]>> {
    let all = word::read(file, at, count * N)?;
    Ok(all.chunks_exact(N).map(|row| std::array::from_fn(|n| row[n])).collect())
}

const fn area_at(place: u64) -> u64 {
    (HEAD_NUMBERS + place as usize * AREA_NUMBERS) as u64 * 8
}

impl Template {
    /// Writes a new file.
    pub fn write(&self, file: &File) -> io::Result<()> {
        let flags = if self.no_huge_pages { NO_HUGE_PAGES } else { 0 };
        let mut all = vec![MAGIC, flags, self.areas.len() as u64, self.pieces.len() as u64];
        for area in &self.areas {
            let huge_pages = match area.huge_pages {
                None => 0,
                Some(true) => HUGE_PAGES,
                Some(false) => SMALL_PAGES,
            };
            let flags = huge_pages | if area.no_reserve { NO_RESERVE } else { 0 };
            all.extend([area.start, area.end, flags, 0]);
        }
        for piece in &self.pieces {
            all.extend([piece.start, piece.bytes, piece.part, piece.offset]);
        }
        word::write(file, 0, &all)
    }

    /// Reads a list with so many files of contents. The mapping process may be allowed lower
    /// addresses than the clones, so `lowest` is the lowest address that those may map
    /// (`vm.mmap_min_addr`).
    pub fn read(file: &File, parts: usize, lowest: u64) -> io::Result<Self> {
        let head = rows::<HEAD_NUMBERS>(file, 0, 1)?;
        let Some(&[MAGIC, flags, areas, pieces]) = head.first() else {
            return Err(word::bad("it is no list of a template"));
        };
        if areas > AREAS_MAX || pieces > PIECES_MAX {
            return Err(word::bad("it is too long"));
        }
        let area = |[start, end, flags, _]: [u64; AREA_NUMBERS]| Area {
            start,
            end,
            no_reserve: flags & NO_RESERVE != 0,
            huge_pages: match flags & (HUGE_PAGES | SMALL_PAGES) {
                0 => None,
                flags => Some(flags & HUGE_PAGES != 0),
            },
        };
        let piece = |[start, bytes, part, offset]: [u64; PIECE_NUMBERS]| Piece {
            start,
            bytes,
            part,
            offset,
        };
        let listed = rows(file, area_at(0), areas as usize)?;
        let listed: Vec<Area> = listed.into_iter().map(area).collect();
        let filled = rows(file, area_at(areas), pieces as usize)?;
        let filled: Vec<Piece> = filled.into_iter().map(piece).collect();
        let mut end = lowest.max(PAGE_BYTES);
        for area in &listed {
            let is_whole = (area.start | area.end).is_multiple_of(PAGE_BYTES);
            if !is_whole || area.start < end || area.end <= area.start || area.end > USER_END {
                return Err(word::bad("its areas are not areas"));
            }
            end = area.end;
        }
        for piece in &filled {
            let end = piece.start.checked_add(piece.bytes);
            let next = listed.partition_point(|area| area.end <= piece.start);
            let is_within =
                |area: &Area| area.start <= piece.start && end.is_some_and(|end| end <= area.end);
            let has_file = usize::try_from(piece.part).is_ok_and(|part| part < parts);
            if !has_file || !listed.get(next).is_some_and(is_within) {
                return Err(word::bad("its contents are of no area"));
            }
        }
        let no_huge_pages = flags & NO_HUGE_PAGES != 0;
        Ok(Self { no_huge_pages, areas: listed, pieces: filled })
    }
}

/// Records that an area, by its place, is mapped.
pub fn set_mapped(file: &File, place: usize) -> io::Result<()> {
    word::write(file, area_at(place as u64) + MAPPED * 8, &[1])
}

/// Returns which of so many areas are mapped.
pub fn mapped(file: &File, areas: usize) -> io::Result<Vec<bool>> {
    let all = rows::<AREA_NUMBERS>(file, area_at(0), areas)?;
    Ok(all.iter().map(|area| area[MAPPED as usize] != 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        rustix::fs::memfd_create(c"template", flags).unwrap().into()
    }

    fn template() -> Template {
        let area = |start: u64, huge_pages: Option<bool>| Area {
            start,
            end: start + 0x4000,
            no_reserve: huge_pages.is_none(),
            huge_pages,
        };
        let piece = |start, part| Piece { start, bytes: 0x2000, part, offset: start };
        Template {
            no_huge_pages: true,
            areas: vec![area(0x1000, None), area(0x5000, Some(true)), area(0x10000, Some(false))],
            pieces: vec![piece(0x1000, 0), piece(0x3000, 1), piece(0x12000, 0)],
        }
    }

    #[test]
    fn list_round_trips() {
        let file = file();
        template().write(&file).unwrap();
        assert_eq!(Template::read(&file, 2, 0x1000).unwrap(), template());
        assert!(Template::read(&file, 2, 0x1001).is_err(), "below what may be mapped");
        assert_eq!(mapped(&file, 3).unwrap(), [false; 3]);
        set_mapped(&file, 1).unwrap();
        assert_eq!(mapped(&file, 3).unwrap(), [false, true, false]);
    }

    #[test]
    fn invalid_list_is_refused() {
        let file = file();
        let refused = |change: &dyn Fn(&mut Template)| {
            let mut one = template();
            change(&mut one);
            one.write(&file).unwrap();
            assert!(Template::read(&file, 2, 0).is_err());
        };
        refused(&|one| one.areas[0].start = 0);
        refused(&|one| one.areas[0].end += 1);
        refused(&|one| one.areas[0].end = 0x6000);
        refused(&|one| one.areas[2].end = USER_END + PAGE_BYTES);
        refused(&|one| one.areas[2].end = one.areas[2].start);
        refused(&|one| one.pieces[0].part = 2);
        refused(&|one| one.pieces[2].bytes += 1);
        refused(&|one| one.pieces[2].bytes = u64::MAX);
        refused(&|one| one.pieces[2].start = 0x9000);
        file.set_len(40).unwrap();
        assert!(Template::read(&file, 2, 0).is_err());
    }
}
