//! Memory that the clones of one checkpoint share until they write to it.
//!
//! Anonymous areas that a fork simply copies are chosen, in containers of one process. The
//! template, a process of the keeper, maps them at their addresses and reads them once. Each
//! clone's newborn is created from it by clone(2) and has them already, like memory from a parent
//! ([`super::inherit`]).
//!
//! Left out are areas that grow down and areas that are copied at once (locked ones: mlock(2)
//! writes to writable memory). So are areas that a fork wipes, that the kernel may drop, or that
//! KSM may merge. So is memory below the lowest address that any process may map: the template is
//! root of the host, and its clones are not.
//!
//! The choice needs the records alone; this module uses [`super::mapped`].

use dormouse_record::{Area, Backing, PAGE_BYTES, Records, Run};

use super::mapped::{Kind, Mapped};

/// Flags of areas that each clone has separately.
const OWN: [&str; 5] = ["gd", "lo", "wf", "dp", "mg"];

/// An area, to be mapped before any clone is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedArea {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// No swap is reserved for the area (MAP_NORESERVE).
    pub no_reserve: bool,
    /// Whether the area is to have huge pages, or to have none (madvise(2)).
    pub huge_pages: Option<bool>,
}

/// Contents of an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedPiece {
    /// First address.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The index of the file of pages, as [`super::pages_of`] returns them.
    pub part: usize,
    /// The offset in that file, in bytes.
    pub offset: u64,
}

/// The areas that were chosen.
#[derive(Debug, Clone)]
pub struct Shared {
    areas: Vec<Area>,
    pieces: Vec<SharedPiece>,
    no_huge_pages: bool,
}

impl Shared {
    /// Chooses areas. `None` if clones share nothing: there is no such area, or there are several
    /// processes, which inherit memory from each other ([`super::inherit`]). Nothing below `lowest`
    /// is chosen.
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

    /// The areas to be mapped, by address.
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

    /// The contents to be read into them, by address.
    pub fn pieces(&self) -> &[SharedPiece] {
        &self.pieces
    }

    /// Whether the process has no transparent huge pages (PR_SET_THP_DISABLE(2const)).
    pub fn no_huge_pages(&self) -> bool {
        self.no_huge_pages
    }

    /// Leaves out areas that could not be mapped, by their places in [`Shared::areas`]: each clone
    /// has those separately.
    pub fn keep(&mut self, is_mapped: impl Fn(usize) -> bool) {
        let mut place = 0..;
        self.areas.retain(|_| place.next().is_some_and(&is_mapped));
        let areas = &self.areas;
        self.pieces.retain(|piece| {
            let next = areas.partition_point(|area| area.end <= piece.start);
            areas.get(next).is_some_and(|area| area.start <= piece.start)
        });
    }

    /// The memory that a newborn has from the template.
    pub(super) fn mapped(&self) -> Mapped {
        let runs = self.areas.iter().flat_map(|area| &area.runs);
        Mapped::of(&self.areas, runs.cloned().collect::<Vec<Run>>())
    }
}

#[cfg(test)]
mod tests {
    use dormouse_record::sample::small;

    use super::*;

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
    fn only_memory_that_a_fork_copies_is_shared() {
        let shared = Shared::choose(&records(), 16 * P).unwrap();
        let one =
            SharedArea { start: 16 * P, end: 24 * P, no_reserve: true, huge_pages: Some(true) };
        let other =
            SharedArea { start: 256 * P, end: 264 * P, no_reserve: false, huge_pages: Some(false) };
        assert_eq!(shared.areas(), [one, other]);
        let piece = |start, offset| SharedPiece { start, bytes: 4 * P, part: 0, offset };
        assert_eq!(shared.pieces(), [piece(17 * P, 0), piece(257 * P, 24 * P)]);
        let above = Shared::choose(&records(), 16 * P + 1).unwrap();
        assert_eq!(above.areas(), [other], "the first is too low to be mapped");
        assert_eq!(above.pieces(), [piece(257 * P, 24 * P)]);
    }

    #[test]
    fn several_processes_share_nothing_with_other_clones() {
        let mut records = records();
        records.processes.push(records.processes[0].clone());
        assert!(Shared::choose(&records, 0).is_none());
    }

    #[test]
    fn memory_without_a_shared_mapping_is_private() {
        let mut shared = Shared::choose(&records(), 0).unwrap();
        shared.keep(|place| place == 1);
        assert_eq!(shared.areas().len(), 1);
        assert_eq!(shared.pieces().len(), 1);
        let own = area(16, 4, 0, &["nr", "hg"]);
        let mapped = shared.mapped();
        assert!(mapped.parts(&own).is_empty());
        let kept = area(256, 4, 24, &["nh", "dc"]);
        assert_eq!(mapped.parts(&kept), [(256 * P, 264 * P)]);
        assert_eq!(mapped.pages(&mapped.parts(&kept)), kept.runs);
        // An existing range of another kind would have to be unmapped.
        assert!(mapped.parts(&area(256, 4, 24, &["dc"])).is_empty());
    }
}
