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

use dormouse_record::{Records, Result, Run};

use super::mapped::{Fill, Kind, Mapped, Mapping, diagonal, part_of, run_end};
use super::memory;
use super::plan::Plan;
use crate::inject::program::Sequence;

/// The memory that each process has for its children, by process.
#[derive(Debug, Default)]
pub(super) struct Inheritance {
    fills: Vec<Fill>,
    mapped: Vec<Mapped>,
    /// For a process that inherits nothing.
    nothing: Mapped,
}

impl Inheritance {
    /// Determines the shared pages. `makers` is the creator of each process, the first process
    /// being its own; `records` is the record of each, `None` for a helper.
    pub(super) fn find(all: &Records, makers: &[usize], records: &[Option<usize>]) -> Self {
        let mut fills = fills(all, makers, records);
        let mut mapped: Vec<Option<Mapped>> = vec![None; makers.len()];
        for node in 0..makers.len() {
            // From the nearest ancestor whose memory is known.
            let mut line = vec![node];
            while let Some(last) = line.last()
                && mapped[*last].is_none()
                && makers[*last] != *last
            {
                line.push(makers[*last]);
            }
            for n in line.into_iter().rev() {
                if mapped[n].is_none() {
                    let mut own = mapped[makers[n]].clone().unwrap_or_default();
                    own.add(&mut fills[n]);
                    mapped[n] = Some(own);
                }
            }
        }
        let mapped = mapped.into_iter().flatten().collect();
        Self { fills, mapped, nothing: Mapped::default() }
    }

    /// For a single process, which has inherited this.
    pub(super) fn of_one(mapped: Mapped) -> Self {
        Self { mapped: vec![mapped], ..Self::default() }
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
        for mapping in &fill.mappings {
            let area = mapping.kind.area(mapping.start, mapping.end);
            memory::map(plan, sequence, what, &area)?;
        }
        memory::read(plan, sequence, what, fill.pages.iter().map(|run| (run.address, run)));
        Ok(())
    }

    /// The memory of a process after it has created its children.
    pub(super) fn of(&self, node: usize) -> &Mapped {
        self.mapped.get(node).unwrap_or(&self.nothing)
    }
}

/// The shared pages that each process fills in, with the areas that they are in.
fn fills(all: &Records, makers: &[usize], records: &[Option<usize>]) -> Vec<Fill> {
    let mut fills = vec![Fill::default(); makers.len()];
    let depths: Vec<usize> = (0..makers.len()).map(|node| depth(makers, node)).collect();
    let mut kinds = Vec::new();
    let holdings = holdings(all, records, &mut kinds);
    for (page, holders) in shared(&holdings) {
        let nodes = holders.iter().map(|h| h.node);
        let Some(node) = nodes.reduce(|a, b| ancestor(makers, &depths, a, b)) else { continue };
        // The area of the process that fills the page, if that process has the page.
        let like = holders.iter().find(|h| h.node == node).unwrap_or(&holders[0]);
        let (start, end) = like.area;
        let mapping = Mapping { start, end, kind: kinds[like.kind].clone() };
        let fill = &mut fills[node];
        if fill.mappings.last() != Some(&mapping) && !fill.mappings.contains(&mapping) {
            // LIMIT: if two kinds meet at one address, pages of the second kind are not shared.
            if fill.mappings.iter().any(|other| other.clashes(&mapping)) {
                continue;
            }
            fill.mappings.push(mapping);
        }
        // The same for pages: they come by address, those with most holders first.
        if fill.pages.last().is_none_or(|last| run_end(last) <= page.address) {
            fill.pages.push(page);
        }
    }
    fills
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
    use dormouse_record::{Memory, PAGE_BYTES, Process};

    use super::*;
    use crate::load::mapped::{elsewhere_than, other_than};

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
        assert!(found.fills[1].mappings.is_empty(), "the area is inherited");
        assert!(found.fills[2..].iter().all(|fill| fill.pages.is_empty()));
        let area = &all.memories[3].areas[0];
        let mapped = found.of(3);
        let parts = mapped.parts(area);
        assert_eq!(parts, [(area.start, area.end)]);
        let there = mapped.pages(&parts);
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
        assert_eq!(numbers(&found.mapped[0].pages), [(0, 1, 0)]);
        assert_eq!(numbers(&found.mapped[1].pages), [(0, 1, 7)]);
        let there = found.mapped[1].pages.clone();
        assert_eq!(numbers(&other_than(&all.memories[1].areas[0].runs, &there)), [(0, 1, 0)]);
        assert!(other_than(&all.memories[2].areas[0].runs, &there).is_empty());
    }
}
