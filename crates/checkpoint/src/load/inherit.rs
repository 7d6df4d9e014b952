//! Memory that processes share since fork(2). A shared page is read once, by the common ancestor of
//! the processes that have it, before the ancestor creates children. The children inherit the page,
//! and the kernel copies it on write, as before.
//!
//! **Which pages.** A page that several processes had was written once, so processes with one
//! number of `pages` at one address had one page. The last common ancestor reads it, in the order
//! in which processes are created now. The ancestor need not have the page or the area itself: it
//! may have written to the page or unmapped it since. A process overwrites or drops inherited pages
//! that are not its own when it gets its memory ([`super::memory`]).
//!
//! **Why so.** Nothing else makes two processes share a page: a file mapping is not anonymous
//! memory, and KSM merges later and by chance.

use super::Plan;
use super::memory;
use crate::error::Result;
use crate::format::{Area, Backing, PAGE_BYTES, Records, Run};
use crate::inject::program::Sequence;

/// The kind of a range of memory: a process can only inherit into the same kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kind {
    /// The file and the offset that address 0 would have; `None` for anonymous memory.
    file: Option<(usize, u64)>,
    /// Flags that take effect when the area is mapped or filled.
    flags: Vec<String>,
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
    fn area(&self, start: u64, end: u64) -> Area {
        let backing = match self.file {
            None => Backing::Anonymous,
            Some((object, base)) => Backing::Private { object, offset: base.wrapping_add(start) },
        };
        let access = memory::READ_WRITE;
        Area { start, end, access, backing, flags: self.flags.clone(), runs: Vec::new() }
    }
}

/// A range that is mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Laid {
    start: u64,
    end: u64,
    kind: Kind,
}

impl Laid {
    /// Whether two ranges overlap and differ in kind.
    fn clashes(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end && self.kind != other.kind
    }
}

/// The memory of a process at the time when it creates children.
#[derive(Debug, Clone, Default)]
pub(super) struct Sheet {
    /// By address.
    laid: Vec<Laid>,
    /// By address.
    pages: Vec<Run>,
}

/// The memory that one process fills in for its descendants.
#[derive(Debug, Clone, Default)]
struct Fill {
    areas: Vec<Laid>,
    pages: Vec<Run>,
}

/// The memory that each process has for its children, by process.
#[derive(Debug, Default)]
pub(super) struct Inheritance {
    fills: Vec<Fill>,
    sheets: Vec<Sheet>,
    /// For a process that inherits nothing.
    blank: Sheet,
}

impl Inheritance {
    /// Determines the shared pages. `makers` is the creator of each process, the first process
    /// being its own; `records` is the record of each, `None` for a helper.
    pub(super) fn find(all: &Records, makers: &[usize], records: &[Option<usize>]) -> Self {
        let mut fills = vec![Fill::default(); makers.len()];
        let depths: Vec<usize> = (0..makers.len()).map(|node| depth(makers, node)).collect();
        let mut kinds = Vec::new();
        let holdings = holdings(all, records, &mut kinds);
        for (page, holders) in shared(&holdings) {
            let nodes = holders.iter().map(|h| h.node);
            let Some(node) = nodes.reduce(|a, b| ancestor(makers, &depths, a, b)) else { continue };
            // The process that fills the page knows the size of the area best.
            let like = holders.iter().find(|h| h.node == node).unwrap_or(&holders[0]);
            let (start, end) = like.area;
            let laid = Laid { start, end, kind: kinds[like.kind].clone() };
            let fill = &mut fills[node];
            if fill.areas.last() != Some(&laid) && !fill.areas.contains(&laid) {
                // LIMIT: if two kinds meet at one address, pages of the second kind are not shared.
                if fill.areas.iter().any(|other| other.clashes(&laid)) {
                    continue;
                }
                fill.areas.push(laid);
            }
            // The same for pages: they come by address, those with most holders first.
            if fill.pages.last().is_none_or(|last| run_end(last) <= page.address) {
                fill.pages.push(page);
            }
        }
        let mut sheets: Vec<Option<Sheet>> = vec![None; makers.len()];
        for node in 0..makers.len() {
            // From the nearest ancestor with a known sheet.
            let mut line = vec![node];
            while let Some(last) = line.last()
                && sheets[*last].is_none()
                && makers[*last] != *last
            {
                line.push(makers[*last]);
            }
            for n in line.into_iter().rev() {
                if sheets[n].is_none() {
                    let mut sheet = sheets[makers[n]].clone().unwrap_or_default();
                    sheet.add(&mut fills[n]);
                    sheets[n] = Some(sheet);
                }
            }
        }
        let sheets = sheets.into_iter().flatten().collect();
        Self { fills, sheets, blank: Sheet::default() }
    }

    /// For a single process, which has inherited this.
    pub(super) fn of_one(sheet: Sheet) -> Self {
        Self { sheets: vec![sheet], ..Self::default() }
    }

    /// Makes a process map and fill in the memory for its children.
    pub(super) fn fill_in(
        &self,
        plan: &mut Plan<'_>,
        sequence: &mut Sequence,
        node: usize,
    ) -> Result<()> {
        let Some(fill) = self.fills.get(node) else { return Ok(()) };
        let what = "memory that parent and children share";
        for laid in &fill.areas {
            memory::map(plan, sequence, what, &laid.kind.area(laid.start, laid.end))?;
        }
        memory::read(plan, sequence, what, fill.pages.iter().map(|run| (run.address, run)));
        Ok(())
    }

    /// The memory of a process after it has created its children.
    pub(super) fn sheet(&self, node: usize) -> &Sheet {
        self.sheets.get(node).unwrap_or(&self.blank)
    }
}

impl Sheet {
    /// The memory that exists before the first process begins: areas that overlap no other, and
    /// their pages, by address.
    pub(super) fn of(areas: &[Area], pages: Vec<Run>) -> Self {
        let laid = |area: &Area| {
            let kind = Kind::of(area)?;
            Some(Laid { start: area.start, end: area.end, kind })
        };
        Self { laid: areas.iter().filter_map(laid).collect(), pages }
    }

    /// Adds a fill, and leaves in it only the parts that do not exist yet.
    fn add(&mut self, fill: &mut Fill) {
        for area in std::mem::take(&mut fill.areas) {
            // A range of another kind at these addresses is removed.
            for old in self.laid.iter().filter(|old| old.clashes(&area)) {
                self.pages = without(&self.pages, old.start, old.end);
            }
            self.laid.retain(|old| !old.clashes(&area));
            for (start, end) in self.missing(area.start, area.end) {
                let laid = Laid { start, end, kind: area.kind.clone() };
                fill.areas.push(laid.clone());
                self.laid.push(laid);
            }
            self.laid.sort_by_key(|laid| laid.start);
        }
        self.pages = elsewhere_than(&self.pages, &fill.pages);
        self.pages.extend(fill.pages.iter().cloned());
        self.pages.sort_by_key(|run| run.address);
    }

    /// The parts of a range where nothing is mapped.
    fn missing(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let there = self.laid.iter().map(|laid| (laid.start, laid.end));
        gaps(there, start, end)
    }

    /// The parts of an area that exist already.
    pub(super) fn parts(&self, area: &Area) -> Vec<(u64, u64)> {
        let Some(kind) = Kind::of(area) else { return Vec::new() };
        let first = self.laid.partition_point(|laid| laid.end <= area.start);
        let near = self.laid[first..].iter().take_while(|laid| laid.start < area.end);
        let same = near.filter(|laid| laid.kind == kind);
        same.map(|laid| (laid.start.max(area.start), laid.end.min(area.end))).collect()
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

fn run_end(run: &Run) -> u64 {
    run.address + run.pages * PAGE_BYTES
}

/// A part of a run, within it.
fn part_of(run: &Run, start: u64, end: u64) -> Run {
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
fn diagonal(run: &Run) -> u64 {
    run.first.wrapping_sub(run.address / PAGE_BYTES)
}

/// Pages that a process has.
#[derive(Debug, Clone, Copy)]
struct Holding<'r> {
    node: usize,
    /// The area that they are in.
    area: (u64, u64),
    /// The number of its kind.
    kind: usize,
    run: &'r Run,
}

fn holdings<'r>(
    all: &'r Records,
    records: &[Option<usize>],
    kinds: &mut Vec<Kind>,
) -> Vec<Holding<'r>> {
    let mut found = Vec::new();
    for (node, record) in records.iter().enumerate() {
        let memory = record.and_then(|r| all.processes[r].memory).map(|m| &all.memories[m]);
        for area in memory.iter().flat_map(|m| &m.areas).filter(|area| !area.runs.is_empty()) {
            let Some(own) = Kind::of(area) else { continue };
            let kind = kinds.iter().position(|kind| *kind == own).unwrap_or_else(|| {
                kinds.push(own);
                kinds.len() - 1
            });
            let area_at = (area.start, area.end);
            found.extend(area.runs.iter().map(|run| Holding { node, area: area_at, kind, run }));
        }
    }
    found
}

/// Pages with more than one holder, and the holders, by address.
fn shared<'r>(holdings: &[Holding<'r>]) -> Vec<(Run, Vec<Holding<'r>>)> {
    let mut sorted = holdings.to_vec();
    sorted.sort_by_key(|h| (h.kind, diagonal(h.run), h.run.address, h.node));
    let is_same =
        |a: &Holding<'_>, b: &Holding<'_>| (a.kind, diagonal(a.run)) == (b.kind, diagonal(b.run));
    let mut found = Vec::new();
    for group in sorted.chunk_by(is_same).filter(|group| group.len() > 1) {
        // Between two edges the holders are the same.
        let mut edges: Vec<u64> =
            group.iter().flat_map(|h| [h.run.address, run_end(h.run)]).collect();
        edges.sort_unstable();
        edges.dedup();
        let mut open: Vec<Holding<'_>> = Vec::new();
        let mut rest = group;
        for edge in edges.windows(2) {
            let (start, end) = (edge[0], edge[1]);
            open.retain(|h| run_end(h.run) > start);
            let begin = rest.partition_point(|h| h.run.address <= start);
            open.extend_from_slice(&rest[..begin]);
            rest = &rest[begin..];
            if let [first, _, ..] = open[..] {
                found.push((part_of(first.run, start, end), open.clone()));
            }
        }
    }
    found.sort_by_key(|(run, holders)| (run.address, std::cmp::Reverse(holders.len()), run.first));
    found
}

/// The number of ancestors.
fn depth(makers: &[usize], node: usize) -> usize {
    let up = |node: &usize| (makers[*node] != *node).then(|| makers[*node]);
    std::iter::successors(Some(node), up).count()
}

/// The last common ancestor of two processes.
fn ancestor(makers: &[usize], depths: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        if depths[a] >= depths[b] {
            a = makers[a];
        } else {
            b = makers[b];
        }
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Memory, Process};

    const AT: u64 = 0x10_0000;

    fn run(page: u64, pages: u64, first: u64) -> Run {
        Run { address: AT + page * PAGE_BYTES, pages, first }
    }

    fn numbers(runs: &[Run]) -> Vec<(u64, u64, u64)> {
        runs.iter().map(|r| ((r.address - AT) / PAGE_BYTES, r.pages, r.first)).collect()
    }

    /// Processes that have these pages in one anonymous area of 16.
    fn records(all: &[&[Run]]) -> Records {
        let mut records = Records::default();
        for (n, runs) in all.iter().enumerate() {
            let mut area = Kind { file: None, flags: Vec::new() }.area(AT, AT + 16 * PAGE_BYTES);
            area.runs = runs.to_vec();
            records.memories.push(Memory { areas: vec![area], ..Memory::default() });
            let pid = n as u32 + 1;
            records.processes.push(Process { pid, memory: Some(n), ..Process::default() });
        }
        records
    }

    #[test]
    fn pages_are_filled_in_the_last_common_ancestor() {
        // The second and third come from the first, the fourth and fifth from the second.
        let makers = [0, 0, 0, 1, 1];
        let own = [Some(0), Some(1), Some(2), Some(3), Some(4)];
        let all = records(&[
            &[run(0, 4, 0), run(9, 1, 90)],
            &[run(0, 3, 0)],
            &[run(1, 3, 1)],
            // Pages that their creator does not have any more, and pages of a single process.
            &[run(0, 1, 0), run(6, 2, 50), run(9, 1, 91)],
            &[run(7, 2, 51)],
        ]);
        let found = Inheritance::find(&all, &makers, &own);
        assert_eq!(numbers(&found.fills[0].pages), [(0, 1, 0), (1, 2, 1), (3, 1, 3)]);
        assert_eq!(numbers(&found.fills[1].pages), [(7, 1, 51)]);
        assert!(found.fills[1].areas.is_empty(), "the area is inherited");
        assert!(found.fills[2..].iter().all(|fill| fill.pages.is_empty()));
        let area = &all.memories[3].areas[0];
        let sheet = found.sheet(3);
        let parts = sheet.parts(area);
        assert_eq!(parts, [(area.start, area.end)]);
        let there = sheet.pages(&parts);
        assert_eq!(numbers(&there), [(0, 1, 0), (1, 2, 1), (3, 1, 3), (7, 1, 51)]);
        let own = other_than(&area.runs, &there);
        assert_eq!(numbers(&own), [(6, 1, 50), (9, 1, 91)]);
        let too_much = elsewhere_than(&there, &area.runs);
        assert_eq!(numbers(&too_much), [(1, 2, 1), (3, 1, 3)]);
    }

    #[test]
    fn only_the_same_kind_of_memory_is_inherited() {
        let mut all = records(&[&[run(0, 2, 0)], &[run(0, 2, 0)]]);
        let both = [Some(0), Some(1)];
        assert_eq!(Inheritance::find(&all, &[0, 0], &both).fills[0].pages.len(), 1);
        all.memories[1].areas[0].flags.push("hg".into());
        assert_eq!(Inheritance::find(&all, &[0, 0], &both).fills[0].pages.len(), 0);
        // Flags that are set after each process has its own memory make no difference.
        all.memories[1].areas[0].flags = vec!["wf".into(), "lo".into()];
        assert_eq!(Inheritance::find(&all, &[0, 0], &both).fills[0].pages.len(), 1);
    }

    #[test]
    fn pages_of_a_descendant_replace_inherited_pages() {
        // The first and its child share one page, the grandchildren another at the same address.
        let all = records(&[&[run(0, 1, 0)], &[run(0, 1, 0)], &[run(0, 1, 7)], &[run(0, 1, 7)]]);
        let own = [Some(0), Some(1), Some(2), Some(3)];
        let found = Inheritance::find(&all, &[0, 0, 1, 1], &own);
        assert_eq!(numbers(&found.sheets[0].pages), [(0, 1, 0)]);
        assert_eq!(numbers(&found.sheets[1].pages), [(0, 1, 7)]);
        let there = found.sheets[1].pages.clone();
        assert_eq!(numbers(&other_than(&all.memories[1].areas[0].runs, &there)), [(0, 1, 0)]);
        assert!(other_than(&all.memories[2].areas[0].runs, &there).is_empty());
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
