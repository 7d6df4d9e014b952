//! The choice of memory that is filled when it is touched (userfaultfd(2)).
//!
//! Large anonymous areas are chosen, in restores with much memory; everything else is read before
//! anything runs. So are pages that threads need at once (stack, thread-local storage) and pages
//! that were touched after an earlier restore. Left out are areas that a fork handles specially,
//! locked areas and stacks that grow. For now, containers of several processes are left out, too:
//! these inherit memory from each other ([`super::inherit`]).
//!
//! The choice needs the records alone, and this module uses no other of the restore.
//! [`super::userfault`] makes the calls.

use std::collections::{HashMap, HashSet};

use dormouse_parcel::Source;
use dormouse_record::{
    Area, Backing, CHUNK_BYTES, PAGE_BYTES, Process, Records, Result, Run, Thing, TmpfsKind,
};

use crate::inject::program::{Builder, Cell};

/// Areas with fewer pages are not worth it.
const AREA_PAGES_MIN: u64 = 64;
/// Nor are restores with less memory and no record of touched pages: a program of that size touches
/// most of it before it answers, and the faults take longer than to read all.
const UNKNOWN_BYTES_MIN: u64 = 12 << 20;
/// Nor are those with less memory beside the pages that are known to be touched.
const KNOWN_BYTES_MIN: u64 = 4 << 20;
/// Flags of areas that are read at once.
const AT_ONCE: [&str; 6] = ["gd", "lo", "dc", "wf", "dp", "sl"];

/// Contents that are filled in later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The index in [`Lazy::processes`].
    pub source: usize,
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// The offset in `pages`, in bytes.
    pub offset: u64,
}

/// The areas that were chosen.
#[derive(Debug, Clone)]
pub struct Lazy {
    pub(super) parts: Vec<Part>,
    /// Whether each chunk of `pages` holds something that is read at once.
    at_once: Vec<bool>,
}

/// The areas of one process.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) pid: u32,
    memory: usize,
    /// Start and length of each area.
    pub(super) areas: Vec<(u64, u64)>,
    later: Vec<Run>,
    at_once: Vec<Run>,
}

impl Part {
    fn pages(&self) -> u64 {
        self.later.iter().map(|run| run.pages).sum()
    }
}

impl Lazy {
    /// Chooses areas of at most `most` processes. `touched` lists parts of memory that are wanted
    /// at once, of `around` bytes each (a power of two): process ids and first addresses. `None` if
    /// all is read at once.
    pub fn choose(
        records: &Records,
        most: usize,
        touched: &[(u32, u64)],
        around: u64,
    ) -> Option<Self> {
        let alive = || records.processes.iter().filter(|p| p.ended.is_none());
        // Pages that several processes share since a fork exist when they are read
        // ([`super::inherit`]).
        if alive().count() != 1 {
            return None;
        }
        let mut parts: Vec<Part> = Vec::new();
        for process in alive() {
            parts.extend(part(records, process, touched, around.max(PAGE_BYTES)));
        }
        parts.sort_by_key(|part| std::cmp::Reverse(part.pages()));
        parts.truncate(most);
        let bytes: u64 = parts.iter().map(|part| part.pages() * PAGE_BYTES).sum();
        let least = if touched.is_empty() { UNKNOWN_BYTES_MIN } else { KNOWN_BYTES_MIN };
        if bytes < least {
            return None;
        }
        let at_once = at_once(records, &parts);
        Some(Self { parts, at_once })
    }

    /// The processes of the chosen memory, by their ids inside.
    pub fn processes(&self) -> Vec<u32> {
        self.parts.iter().map(|part| part.pid).collect()
    }

    /// The contents that are filled in later.
    pub fn pieces(&self) -> Vec<Piece> {
        let of = |(source, part): (usize, &Part)| {
            let piece = move |run: &Run| {
                let end = run.address + run.pages * PAGE_BYTES;
                Piece { source, start: run.address, end, offset: run.first * PAGE_BYTES }
            };
            part.later.iter().map(piece).collect::<Vec<_>>()
        };
        self.parts.iter().enumerate().flat_map(of).collect()
    }

    /// Bytes that [`Lazy::verify`] checks.
    pub fn at_once_bytes(&self) -> u64 {
        self.at_once.iter().filter(|at_once| **at_once).count() as u64 * CHUNK_BYTES
    }

    /// Compares the contents that are read at once with their checksums; the process that fills the
    /// rest checks the rest.
    ///
    /// Errors: as of [`Source::verify`].
    pub fn verify(&self, source: &dyn Source) -> Result<()> {
        source.verify_some(&|chunk| self.at_once.get(chunk).is_none_or(|at_once| *at_once))
    }
}

fn is_eligible(area: &Area) -> bool {
    let pages: u64 = area.runs.iter().map(|run| run.pages).sum();
    area.backing == Backing::Anonymous
        && pages >= AREA_PAGES_MIN
        && !AT_ONCE.iter().any(|flag| area.has(flag))
}

fn part(records: &Records, process: &Process, touched: &[(u32, u64)], around: u64) -> Option<Part> {
    let number = process.memory?;
    let memory = records.memories.get(number)?;
    // The memory in which its threads resume.
    let own = process.threads.iter().flat_map(|thread| {
        let rseq = thread.rseq.as_ref().map_or(0, |rseq| rseq.address);
        [thread.registers.rsp, thread.registers.rip, thread.registers.fs_base, rseq]
    });
    let others = touched.iter().filter(|(pid, _)| *pid == process.pid).map(|(_, start)| *start);
    let wanted: HashSet<u64> = own.chain(others).map(|address| address & !(around - 1)).collect();
    let (mut areas, mut later, mut at_once) = (Vec::new(), Vec::new(), Vec::new());
    for area in &memory.areas {
        if !is_eligible(area) {
            at_once.extend(area.runs.iter().cloned());
            continue;
        }
        areas.push((area.start, area.bytes()));
        for run in &area.runs {
            split(run, &wanted, around, &mut later, &mut at_once);
        }
    }
    (!later.is_empty()).then_some(Part { pid: process.pid, memory: number, areas, later, at_once })
}

/// Divides a run into pages that are filled in later and pages that are wanted at once.
fn split(
    run: &Run,
    wanted: &HashSet<u64>,
    around: u64,
    later: &mut Vec<Run>,
    at_once: &mut Vec<Run>,
) {
    let end = run.address + run.pages * PAGE_BYTES;
    let mut at = run.address;
    let mut last: Option<(bool, Run)> = None;
    let mut put = |is_wanted: bool, run: Run| match is_wanted {
        true => at_once.push(run),
        false => later.push(run),
    };
    while at < end {
        let next = (at & !(around - 1)).saturating_add(around).min(end);
        let is_wanted = wanted.contains(&(at & !(around - 1)));
        let pages = (next - at) / PAGE_BYTES;
        match &mut last {
            Some((was, last)) if *was == is_wanted => last.pages += pages,
            _ => {
                let first = run.first + (at - run.address) / PAGE_BYTES;
                let next = (is_wanted, Run { address: at, pages, first });
                if let Some((was, run)) = last.replace(next) {
                    put(was, run);
                }
            }
        }
        at = next;
    }
    if let Some((was, run)) = last {
        put(was, run);
    }
}

/// Which chunks contain pages that are read at once.
fn at_once(records: &Records, parts: &[Part]) -> Vec<bool> {
    let page_count = (records.pages.bytes / PAGE_BYTES) as usize;
    let range = |run: &Run| run.first as usize..(run.first + run.pages) as usize; // checked
    let mut is_later = vec![false; page_count];
    parts.iter().flat_map(|part| &part.later).for_each(|run| is_later[range(run)].fill(true));
    // One page may belong to several runs.
    let lazy: HashMap<usize, &Part> = parts.iter().map(|part| (part.memory, part)).collect();
    for (number, memory) in records.memories.iter().enumerate() {
        match lazy.get(&number) {
            Some(part) => part.at_once.iter().for_each(|run| is_later[range(run)].fill(false)),
            None => {
                let runs = memory.areas.iter().flat_map(|area| &area.runs);
                runs.for_each(|run| is_later[range(run)].fill(false));
            }
        }
    }
    for object in &records.objects {
        let mut read = |runs: &[Run]| runs.iter().for_each(|run| is_later[range(run)].fill(false));
        match &object.thing {
            Thing::SharedMemory(memory) => read(&memory.runs),
            Thing::SystemVMemory(memory) => read(&memory.runs),
            Thing::AioContext(context) => read(&context.runs),
            Thing::MemoryFile(file) => read(&file.runs),
            Thing::Deleted(file) => read(&file.runs),
            Thing::Tmpfs(tree) => tree.entries.iter().for_each(|entry| {
                if let TmpfsKind::File { runs, .. } = &entry.what {
                    read(runs);
                }
            }),
            _ => {}
        }
    }
    let chunk = (CHUNK_BYTES / PAGE_BYTES) as usize;
    is_later.chunks(chunk).map(|pages| pages.iter().any(|is_later| !is_later)).collect()
}

/// The descriptors for the choice while the sequences are made.
#[derive(Debug, Default)]
pub(super) struct Userfaults {
    /// The device from which userfaultfds are created.
    pub(super) device: Option<Cell>,
    /// By memory: the runs that are read at once.
    at_once: HashMap<usize, Vec<Run>>,
    /// The cells of the descriptor numbers, in the order of the parts.
    cells: Vec<Cell>,
    /// By memory.
    cell_of: HashMap<usize, Cell>,
}

impl Userfaults {
    /// Adds the memory of a choice.
    pub(super) fn add(&mut self, lazy: &Lazy, builder: &mut Builder) {
        for part in &lazy.parts {
            let cell = builder.cell();
            self.cells.push(cell);
            self.cell_of.insert(part.memory, cell);
            self.at_once.insert(part.memory, part.at_once.clone());
        }
    }

    /// The runs of a memory that are read at once, if these are not all.
    pub(super) fn at_once(&self, memory: usize) -> Option<Vec<Run>> {
        self.at_once.get(&memory).cloned()
    }

    /// The cells of the descriptor numbers, in the order of the parts.
    pub(super) fn cells(&self) -> Vec<Cell> {
        self.cells.clone()
    }

    /// The cell of the descriptor number for a memory.
    pub(super) fn cell_of(&self, memory: usize) -> Option<Cell> {
        self.cell_of.get(&memory).copied()
    }
}

#[cfg(test)]
mod tests {
    use dormouse_record::sample::small;

    use super::*;

    const P: u64 = PAGE_BYTES;
    const AROUND: u64 = 16 * P;

    /// A process with a large area between two small ones.
    fn large() -> Records {
        let mut records = small();
        let area = |start: u64, pages: u64, first| Area {
            start: start * P,
            end: (start + pages * 2) * P,
            access: 3,
            backing: Backing::Anonymous,
            flags: Vec::new(),
            runs: vec![Run { address: start * P, pages, first }],
        };
        records.memories[0].areas = vec![area(16, 4, 0), area(64, 4000, 4), area(8192, 4, 4004)];
        records.pages.bytes = 4008 * P;
        records
    }

    #[test]
    fn each_page_is_filled_once_from_its_offset() {
        let records = large();
        let pid = records.processes[0].pid;
        let touched = [(pid, 80 * P), (pid, 96 * P), (pid, 2048 * P), (pid + 1, 160 * P)];
        let lazy = Lazy::choose(&records, 16, &touched, AROUND).unwrap();
        assert_eq!(lazy.processes(), [pid]);
        let mut places: Vec<(u64, u64, bool)> = Vec::new();
        for piece in lazy.pieces() {
            let pages = (piece.end - piece.start) / P;
            places.extend((0..pages).map(|n| (piece.start / P + n, piece.offset / P + n, true)));
        }
        for run in &lazy.parts[0].at_once {
            places.extend((0..run.pages).map(|n| (run.address / P + n, run.first + n, false)));
        }
        places.sort_unstable();
        let later = |page: u64| !(80..112).contains(&page) && !(2048..2064).contains(&page);
        let expected = (16..20).map(|n| (n, n - 16, false));
        let expected = expected.chain((64..4064).map(|n| (n, n - 60, later(n))));
        let expected = expected.chain((8192..8196).map(|n| (n, n - 4188, false)));
        assert_eq!(places, expected.collect::<Vec<_>>());
        // 16 pages are a chunk. Pages that are read at once are in the first two, the third, and
        // the last.
        let chunks: Vec<usize> = (0..251).filter(|n| lazy.at_once[*n]).collect();
        assert_eq!((chunks, lazy.at_once.len()), (vec![0, 1, 2, 3, 124, 125, 250], 251));
    }

    #[test]
    fn a_page_with_several_addresses_is_checked_at_once() {
        let mut records = large();
        records.memories[0].areas[2].runs[0].first = 1000;
        let lazy = Lazy::choose(&records, 16, &[], AROUND).unwrap();
        let chunks: Vec<usize> = (0..251).filter(|n| lazy.at_once[*n]).collect();
        assert_eq!(chunks, [0, 62, 250]);
    }

    #[test]
    fn small_memory_and_special_areas_are_read_at_once() {
        assert!(Lazy::choose(&small(), 16, &[], AROUND).is_none());
        for flag in AT_ONCE {
            let mut records = large();
            records.memories[0].areas[1].flags.push(flag.into());
            assert!(Lazy::choose(&records, 16, &[], AROUND).is_none(), "{flag}");
        }
        let mut records = large();
        records.memories[0].areas[1].runs[0].pages = UNKNOWN_BYTES_MIN / P - 1;
        assert!(Lazy::choose(&records, 16, &[], AROUND).is_none());
        assert!(Lazy::choose(&large(), 0, &[], AROUND).is_none());
        // 4,000 pages, of which 16 times `count` are known to be touched.
        let (records, pid) = (large(), large().processes[0].pid);
        let beside = |count: u64| {
            let touched: Vec<(u32, u64)> = (0..count).map(|n| (pid, (64 + n * 16) * P)).collect();
            Lazy::choose(&records, 16, &touched, AROUND).is_some()
        };
        assert!(beside(186) && !beside(187));
    }
}
