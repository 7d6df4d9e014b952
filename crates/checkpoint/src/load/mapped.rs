//! Ranges of memory that exist already, and their pages: arithmetic on ranges and runs.
//!
//! A *run* is a range of pages with contents in `pages`. This module uses no other of the restore.

use dormouse_record::{Area, Backing, PAGE_BYTES, Run};

/// Access of memory while it is filled.
pub(super) const READ_WRITE: u32 = (libc::PROT_READ | libc::PROT_WRITE) as u32;

/// The kind of a range of memory: a process can only inherit into the same kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kind {
    /// The file and the offset that address 0 would have; `None` for anonymous memory.
    pub(super) file: Option<(usize, u64)>,
    /// Flags that take effect when the area is mapped or filled.
    pub(super) flags: Vec<String>,
}

/// Flags of areas that decide how they are mapped and filled.
const OF_A_KIND: [&str; 5] = ["gd", "nr", "hg", "nh", "mg"];

impl Kind {
    /// The kind of an area; `None` if its pages are not private.
    pub(super) fn of(area: &Area) -> Option<Self> {
        let file = match area.backing {
            Backing::Anonymous => None,
            Backing::Private { object, offset } => Some((object, offset.wrapping_sub(area.start))),
            // LIMIT: huge pages are not shared.
            Backing::Huge { .. } | Backing::Shared { .. } => return None,
        };
        let flags = area.flags.iter().filter(|f| OF_A_KIND.contains(&f.as_str())).cloned();
        // Memory that the kernel may drop has no contents.
        (!area.has("dp")).then(|| Self { file, flags: flags.collect() })
    }

    /// An area of this kind.
    pub(super) fn area(&self, start: u64, end: u64) -> Area {
        let backing = match self.file {
            None => Backing::Anonymous,
            Some((object, base)) => Backing::Private { object, offset: base.wrapping_add(start) },
        };
        let access = READ_WRITE;
        Area { start, end, access, backing, flags: self.flags.clone(), runs: Vec::new() }
    }
}

/// A range that is mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: Kind,
}

impl Mapping {
    /// Whether two ranges overlap and differ in kind.
    pub(super) fn clashes(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end && self.kind != other.kind
    }
}

/// Memory that exists at some time, such as that of a process when it creates children.
#[derive(Debug, Clone, Default)]
pub(super) struct Mapped {
    /// By address.
    pub(super) mappings: Vec<Mapping>,
    /// By address.
    pub(super) pages: Vec<Run>,
}

/// Memory to be added: the mappings and pages that one process makes for its descendants.
#[derive(Debug, Clone, Default)]
pub(super) struct Fill {
    pub(super) mappings: Vec<Mapping>,
    pub(super) pages: Vec<Run>,
}

impl Mapped {
    /// The memory that exists before the first process begins: areas that overlap no other, and
    /// their pages, by address.
    pub(super) fn of(areas: &[Area], pages: Vec<Run>) -> Self {
        let mapping = |area: &Area| {
            let kind = Kind::of(area)?;
            Some(Mapping { start: area.start, end: area.end, kind })
        };
        Self { mappings: areas.iter().filter_map(mapping).collect(), pages }
    }

    /// Adds a fill, and leaves in it only the parts that do not exist yet.
    pub(super) fn add(&mut self, fill: &mut Fill) {
        for wanted in std::mem::take(&mut fill.mappings) {
            // A range of another kind at these addresses is removed.
            for old in self.mappings.iter().filter(|old| old.clashes(&wanted)) {
                self.pages = without(&self.pages, old.start, old.end);
            }
            self.mappings.retain(|old| !old.clashes(&wanted));
            for (start, end) in self.missing(wanted.start, wanted.end) {
                let mapping = Mapping { start, end, kind: wanted.kind.clone() };
                fill.mappings.push(mapping.clone());
                self.mappings.push(mapping);
            }
            self.mappings.sort_by_key(|mapping| mapping.start);
        }
        self.pages = elsewhere_than(&self.pages, &fill.pages);
        self.pages.extend(fill.pages.iter().cloned());
        self.pages.sort_by_key(|run| run.address);
    }

    /// The parts of a range where nothing is mapped.
    fn missing(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let there = self.mappings.iter().map(|mapping| (mapping.start, mapping.end));
        gaps(there, start, end)
    }

    /// The parts of an area that exist already.
    pub(super) fn parts(&self, area: &Area) -> Vec<(u64, u64)> {
        let Some(kind) = Kind::of(area) else { return Vec::new() };
        let first = self.mappings.partition_point(|mapping| mapping.end <= area.start);
        let near = self.mappings[first..].iter().take_while(|mapping| mapping.start < area.end);
        let same = near.filter(|mapping| mapping.kind == kind);
        same.map(|mapping| (mapping.start.max(area.start), mapping.end.min(area.end))).collect()
    }

    /// The pages that exist in such parts.
    pub(super) fn pages(&self, parts: &[(u64, u64)]) -> Vec<Run> {
        let mut all = Vec::new();
        for (start, end) in parts {
            let first = self.pages.partition_point(|run| run_end(run) <= *start);
            let near = self.pages[first..].iter().take_while(|run| run.address < *end);
            let within = |run: &Run| part_of(run, run.address.max(*start), run_end(run).min(*end));
            all.extend(near.map(within));
        }
        all
    }
}

/// The parts of a range that are in none of the given ranges, which are sorted by address.
pub(super) fn gaps(
    there: impl Iterator<Item = (u64, u64)>,
    start: u64,
    end: u64,
) -> Vec<(u64, u64)> {
    let (mut at, mut found) = (start, Vec::new());
    for (from, to) in there.filter(|(from, to)| *from < end && *to > start) {
        if from > at {
            found.push((at, from));
        }
        at = at.max(to);
    }
    if at < end {
        found.push((at, end));
    }
    found
}

/// The address after a run.
pub(super) fn run_end(run: &Run) -> u64 {
    run.address + run.pages * PAGE_BYTES
}

/// A part of a run, within it.
pub(super) fn part_of(run: &Run, start: u64, end: u64) -> Run {
    let skipped = (start - run.address) / PAGE_BYTES;
    Run { address: start, pages: (end - start) / PAGE_BYTES, first: run.first + skipped }
}

/// The parts of runs outside a range of addresses.
fn without(runs: &[Run], start: u64, end: u64) -> Vec<Run> {
    let parts = |run: &Run| {
        let before = (run.address, start.min(run_end(run)));
        let after = (end.max(run.address), run_end(run));
        [before, after].map(|(from, to)| (from < to).then(|| part_of(run, from, to)))
    };
    runs.iter().flat_map(parts).flatten().collect()
}

/// Pages of `runs` that are not in `there` with the same contents.
pub(super) fn other_than(runs: &[Run], there: &[Run]) -> Vec<Run> {
    let same = |run: &Run, other: &Run| diagonal(run) == diagonal(other);
    beside(runs, there, same)
}

/// Pages of `runs` at addresses where `there` has none.
pub(super) fn elsewhere_than(runs: &[Run], there: &[Run]) -> Vec<Run> {
    beside(runs, there, |_, _| true)
}

/// The parts of runs outside those others that count. Both are sorted by address.
fn beside(runs: &[Run], there: &[Run], counts: impl Fn(&Run, &Run) -> bool) -> Vec<Run> {
    let mut left = Vec::new();
    let mut first = 0;
    for run in runs {
        while there.get(first).is_some_and(|other| run_end(other) <= run.address) {
            first += 1;
        }
        let near = there[first..].iter().take_while(|other| other.address < run_end(run));
        let near = near.filter(|other| counts(run, other));
        let near = near.map(|other| (other.address, run_end(other)));
        let free = gaps(near, run.address, run_end(run));
        left.extend(free.into_iter().map(|(start, end)| part_of(run, start, end)));
    }
    left
}

/// A number that two runs share if they have the same pages at the same addresses.
pub(super) fn diagonal(run: &Run) -> u64 {
    run.first.wrapping_sub(run.address / PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x10_0000;

    fn run(page: u64, pages: u64, first: u64) -> Run {
        Run { address: AT + page * PAGE_BYTES, pages, first }
    }

    fn numbers(runs: &[Run]) -> Vec<(u64, u64, u64)> {
        runs.iter().map(|r| ((r.address - AT) / PAGE_BYTES, r.pages, r.first)).collect()
    }

    #[test]
    fn gaps_and_cuts_of_ranges_are_computed() {
        assert_eq!(gaps([(2, 4), (6, 9)].into_iter(), 0, 8), [(0, 2), (4, 6)]);
        assert_eq!(gaps([(0, 9)].into_iter(), 3, 5), []);
        let whole = [run(0, 8, 10)];
        let cut = without(&whole, AT + 2 * PAGE_BYTES, AT + 3 * PAGE_BYTES);
        assert_eq!(numbers(&cut), [(0, 2, 10), (3, 5, 13)]);
        assert_eq!(without(&whole, AT + 8 * PAGE_BYTES, AT + 9 * PAGE_BYTES), whole);
    }
}
