//! What of memory the clones of one checkpoint share until they write to it.
//!
//! Chosen are anonymous areas of a container of one process that a fork would simply copy. A process of
//! the keeper's, the template, maps them where they will be and reads them once; each clone's newborn comes from
//! it by clone(2) and has them already, as it would have what a parent leaves it ([`super::inherit`]).
//!
//! Left out are areas that grow down, whose copies would be made at once (locked ones: mlock(2) writes to
//! what may be written to), that a fork wipes or the kernel may drop, and those that the program has given
//! to the kernel to merge; and what lies below the lowest address that everybody may map: the template is root
//! of the host, and its clones are not.

use super::inherit::{Kind, Sheet};
use crate::format::{Area, Backing, PAGE_BYTES, Records, Run};

/// Flags of areas that each clone has for itself.
const OWN: [&str; 5] = ["gd", "lo", "wf", "dp", "mg"];

/// An area, to be mapped before anybody is cloned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedArea {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// No swap is reserved for it (MAP_NORESERVE).
    pub no_reserve: bool,
    /// It is to have huge pages, or to have none (madvise(2)).
    pub huge_pages: Option<bool>,
}

/// Contents of an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedPiece {
    /// First address.
    pub start: u64,
    /// How many bytes.
    pub bytes: u64,
    /// In which file of pages, as [`super::pages_of`] gives them.
    pub part: usize,
    /// Where in that file, in bytes.
    pub offset: u64,
}

/// The choice.
#[derive(Debug, Clone)]
pub struct Shared {
    areas: Vec<Area>,
    pieces: Vec<SharedPiece>,
    no_huge_pages: bool,
}

impl Shared {
    /// Chooses; `None` where clones share nothing: there is no such area, or there are several processes,
    /// who inherit memory from each other ([`super::inherit`]). Nothing below `lowest` is chosen.
    pub fn choose(records: &Records, lowest: u64) -> Option<Self> {
        let [process] = &records.processes[..] else { return None };
        let memory = records.memories.get(process.memory?)?;
        let is_shared = |area: &&Area| {
            let is_plain = area.backing == Backing::Anonymous && Kind::of(area).is_some();
            let is_free = area.start >= lowest && !area.runs.is_empty();
            is_plain && is_free && !OWN.iter().any(|flag| area.has(flag))
        };
        let areas: Vec<Area> = memory.areas.iter().filter(is_shared).cloned().collect();
        let parts = records.pages.parts();
        let mut pieces = Vec::new();
        for run in areas.iter().flat_map(|area| &area.runs) {
            let (first, end) = (run.first * PAGE_BYTES, (run.first + run.pages) * PAGE_BYTES);
            for (part, range) in parts.iter().enumerate() {
                let (from, to) = (first.max(range.start), end.min(range.end));
                if from < to {
                    let (start, offset) = (run.address + (from - first), from - range.start);
                    pieces.push(SharedPiece { start, bytes: to - from, part, offset });
                }
            }
        }
        let no_huge_pages = memory.no_huge_pages;
        (!areas.is_empty()).then_some(Self { areas, pieces, no_huge_pages })
    }

    /// What is to be mapped, by address.
    pub fn areas(&self) -> Vec<SharedArea> {
        let area = |area: &Area| SharedArea {
            start: area.start,
            end: area.end,
            no_reserve: area.has("nr"),
            huge_pages: match (area.has("hg"), area.has("nh")) {
                (true, _) => Some(true),
                (_, true) => Some(false),
                _ => None,
            },
        };
        self.areas.iter().map(area).collect()
    }

    /// What is to be read into them, by address.
    pub fn pieces(&self) -> &[SharedPiece] {
        &self.pieces
    }

    /// The process has no transparent huge pages (PR_SET_THP_DISABLE(2const)).
    pub fn no_huge_pages(&self) -> bool {
        self.no_huge_pages
    }

    /// Leaves out areas, by their places in [`Shared::areas`], that could not be mapped: each clone has those
    /// for itself.
    pub fn keep(&mut self, is_mapped: impl Fn(usize) -> bool) {
        let mut place = 0..;
        self.areas.retain(|_| place.next().is_some_and(&is_mapped));
        let areas = &self.areas;
        self.pieces.retain(|piece| {
            let next = areas.partition_point(|area| area.end <= piece.start);
            areas.get(next).is_some_and(|area| area.start <= piece.start)
        });
    }

    /// What a newborn has from the template.
    pub(super) fn sheet(&self) -> Sheet {
        let runs = self.areas.iter().flat_map(|area| &area.runs);
        Sheet::of(&self.areas, runs.cloned().collect::<Vec<Run>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::check::tests::small;

    const P: u64 = PAGE_BYTES;

    fn area(start: u64, pages: u64, first: u64, flags: &[&str]) -> Area {
        Area {
            start: start * P,
            end: (start + pages * 2) * P,
            access: 3,
            backing: Backing::Anonymous,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            runs: vec![Run { address: (start + 1) * P, pages, first }],
        }
    }

    fn records() -> Records {
        let mut records = small();
        let mut areas = vec![area(16, 4, 0, &["nr", "hg"])];
        areas.extend(OWN.iter().zip(1..).map(|(flag, n)| area(16 + n * 16, 4, n * 4, &[*flag])));
        areas.push(area(256, 4, 24, &["nh", "dc"]));
        areas.push(Area { runs: Vec::new(), ..area(512, 4, 0, &[]) });
        records.memories[0].areas = areas;
        records.pages.bytes = 28 * P;
        records
    }

    #[test]
    fn what_a_fork_copies_is_shared_and_nothing_else() {
        let shared = Shared::choose(&records(), 16 * P).unwrap();
        let one =
            SharedArea { start: 16 * P, end: 24 * P, no_reserve: true, huge_pages: Some(true) };
        let other =
            SharedArea { start: 256 * P, end: 264 * P, no_reserve: false, huge_pages: Some(false) };
        assert_eq!(shared.areas(), [one, other]);
        let piece = |start, offset| SharedPiece { start, bytes: 4 * P, part: 0, offset };
        assert_eq!(shared.pieces(), [piece(17 * P, 0), piece(257 * P, 24 * P)]);
        let above = Shared::choose(&records(), 16 * P + 1).unwrap();
        assert_eq!(above.areas(), [other], "nobody may map the first");
        assert_eq!(above.pieces(), [piece(257 * P, 24 * P)]);
    }

    #[test]
    fn several_processes_share_nothing_with_other_clones() {
        let mut records = records();
        records.processes.push(records.processes[0].clone());
        assert!(Shared::choose(&records, 0).is_none());
    }

    #[test]
    fn what_could_not_be_mapped_is_each_ones_own() {
        let mut shared = Shared::choose(&records(), 0).unwrap();
        shared.keep(|place| place == 1);
        assert_eq!(shared.areas().len(), 1);
        assert_eq!(shared.pieces().len(), 1);
        let own = area(16, 4, 0, &["nr", "hg"]);
        let sheet = shared.sheet();
        assert!(sheet.parts(&own).is_empty());
        let kept = area(256, 4, 24, &["nh", "dc"]);
        assert_eq!(sheet.parts(&kept), [(256 * P, 264 * P)]);
        assert_eq!(sheet.pages(&sheet.parts(&kept)), kept.runs);
        // What is there of another kind would have to go.
        assert!(sheet.parts(&area(256, 4, 24, &["dc"])).is_empty());
    }
}
