//! The plan: the state that the modules share while the sequences of all processes are made.
//!
//! Every module of a kind takes the plan, and adds data, cells and calls to it. This module uses no
//! kind: it needs [`super::allowed`], [`super::lazy`], [`super::restore`] and [`super::share`] for
//! their types.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

#[cfg(doc)]
use dormouse_record::seat;
use dormouse_record::{Error, Inode, Made, PAGE_BYTES, Process, Records, Result, Thread};

use super::allowed::Allowed;
use super::lazy::Userfaults;
use super::restore::{Passed, Wanted};
use super::share::Shared;
use crate::clock::Offsets;
use crate::inject::program::{Arg, Builder, Call, Cell, Sequence};
use crate::vdso::Bent;

/// Where shared memory is mapped meanwhile, beyond the program.
const SHARED_AT: u64 = crate::inject::program::END;

/// The shared state.
pub(super) struct Plan<'r> {
    pub(super) records: &'r Records,
    pub(super) allowed: &'r Allowed,
    pub(super) builder: Builder,
    /// The cell of the number of the program's memory.
    pub(super) program: Cell,
    /// The first calls of the newborn.
    pub(super) boot: Sequence,
    /// The cells of the numbers of all other descriptors that were passed in.
    pub(super) given: Vec<Cell>,
    /// The first and the last number of each range between those, which the conductor finds.
    pub(super) gaps: Vec<[Cell; 2]>,
    /// The work area: its first address, and the address after its last.
    pub(super) work: u64,
    pub(super) work_end: u64,
    /// The contents of memory: the range of bytes in each file.
    pub(super) pages: Vec<(Range<u64>, Cell)>,
    /// Files of the engine, by the name that they had at the checkpoint.
    pub(super) outside: HashMap<String, Cell>,
    /// Held files, by object.
    pub(super) held: HashMap<usize, Cell>,
    /// Cells of the objects' descriptor numbers, by object.
    pub(super) cells: Vec<Option<Cell>>,
    /// The network namespace of the object that is being made; `None` for the container's own.
    pub(super) net: Option<usize>,
    /// The inode of that object, if it is not as root makes one.
    pub(super) inode: Option<Inode>,
    /// Open control groups, by path.
    pub(super) cgroups: HashMap<String, Cell>,
    /// Cells of each tmpfs in mount namespaces inside, by object.
    pub(super) memories: HashMap<usize, Cell>,
    /// Subreapers that adopt a process of the records, by their ids.
    pub(super) adopters: HashSet<u32>,
    /// Pipes, and the cells of the sizes that they were given; 0 where the kernel refused it.
    pub(super) pipes: Vec<(usize, Cell)>,
    /// A side of each terminal, by object.
    pub(super) terminals: HashMap<usize, Cell>,
    /// Where shared memory is mapped meanwhile, by object.
    pub(super) shared: HashMap<usize, u64>,
    pub(super) shared_end: u64,
    /// Numbers of files that are made at their place ([`seat`]), by object.
    pub(super) seats: HashMap<usize, u32>,
    /// No process uses descriptor numbers from here on, nor the one before.
    pub(super) above: u32,
    /// Pids of helper processes begin here.
    free_pid: u32,
    /// The container gets a time namespace with other offsets.
    pub(super) moves_clocks: bool,
    /// The offsets of its clocks from the host's.
    pub(super) clocks: Offsets,
    /// Time namespaces that processes make, by object.
    pub(super) times: HashMap<usize, Made>,
    /// The vDSOs of other kernels that are restored, by memory.
    pub(super) vdsos: Vec<Option<Bent>>,
    /// Memory that is filled while the processes run.
    pub(super) userfaults: Userfaults,
    /// Memory that the newborn has already.
    pub(super) born_with: Option<&'r Shared>,
    /// `ns_last_pid`, which sets the next pid.
    pub(super) last_pid: Option<Cell>,
    /// Processes share descriptors or a working directory, or threads do not.
    pub(super) is_shared: bool,
    /// Threads that are created in user namespaces inside, and the pid of the numberer for them.
    pub(super) late: Vec<LateThread>,
    pub(super) numberer: Option<u32>,
    /// Sequences of helper processes, and the number of the first of them.
    pub(super) helpers: Vec<Sequence>,
    pub(super) helpers_from: usize,
}

/// Whether a process shares what processes do not share usually, or its threads do not share what threads do.
fn has_unusual_sharing(process: &Process) -> bool {
    let is_apart = |thread: &Thread| {
        let has_own = thread.place.is_some() || thread.table.is_some();
        has_own || thread.place_of.or(thread.table_of).is_some()
    };
    process.table_of.or(process.place_of).is_some() || process.threads.iter().any(is_apart)
}

/// A thread that a process creates after it has entered a user namespace.
#[derive(Debug, Clone, Copy)]
pub(super) struct LateThread {
    pub(super) tid: u32,
    /// Set when the next pid is that of the thread.
    pub(super) is_next: Cell,
    /// Set when the thread has its pid.
    pub(super) is_given: Cell,
}

impl<'r> Plan<'r> {
    /// A plan in that work area (first address and bytes), for a newborn with these descriptors.
    pub(super) fn new(
        records: &'r Records,
        allowed: &'r Allowed,
        (work, work_bytes): (u64, u64),
        passed: &[Passed],
    ) -> Self {
        let mut builder = Builder::new(work);
        let (mut outside, mut held) = (HashMap::new(), HashMap::new());
        let mut pages = Vec::new();
        let parts = records.pages.parts();
        let mut userfaults = Userfaults::default();
        let mut last_pid = None;
        let mut given = Vec::new();
        // ORDER: the newborn fills the first cells, in the order of the descriptors passed in.
        for one in passed {
            let cell = builder.cell();
            given.push(cell);
            match one {
                Passed::Program => {}
                Passed::Pages(part) => pages.push((parts[*part].clone(), cell)),
                Passed::LastPid => last_pid = Some(cell),
                Passed::Caller(Wanted::Userfaults) => userfaults.device = Some(cell),
                Passed::Caller(Wanted::Outside(name)) => {
                    outside.insert(name.clone(), cell);
                }
                Passed::Caller(Wanted::Held(object)) => {
                    held.insert(*object as usize, cell);
                }
            }
        }
        let gaps = given.iter().map(|_| [builder.cell(), builder.cell()]).collect();
        let all = records.processes.iter();
        let above = records.tables().flat_map(|table| table.descriptors);
        let above = above.map(|descriptor| descriptor.number + 1).max();
        let tids = all.flat_map(|p| p.threads.iter().map(|t| t.tid).chain([p.pid]));
        let ids = records.processes.iter().flat_map(|p| [p.session, p.group]);
        let free_pid = tids.chain(ids).max().unwrap_or(1) + 1;
        Self {
            records,
            allowed,
            builder,
            // The program is the first of the descriptors.
            program: given[0],
            boot: Sequence::default(),
            given: given.split_off(1),
            gaps,
            work,
            work_end: work + work_bytes,
            pages,
            outside,
            held,
            cells: vec![None; records.objects.len()],
            net: None,
            inode: None,
            cgroups: HashMap::new(),
            memories: HashMap::new(),
            adopters: HashSet::new(),
            pipes: Vec::new(),
            terminals: HashMap::new(),
            shared: HashMap::new(),
            shared_end: work + SHARED_AT,
            seats: records.seats(),
            above: above.unwrap_or(0).max(16) + 1,
            free_pid,
            moves_clocks: false,
            clocks: Offsets::default(),
            times: records.times_made().unwrap_or_default(), // as was checked
            vdsos: Vec::new(),
            userfaults,
            born_with: None,
            last_pid,
            is_shared: records.processes.iter().any(has_unusual_sharing),
            late: Vec::new(),
            numberer: None,
            helpers: Vec::new(),
            helpers_from: 0,
        }
    }

    /// The file of some contents, the offset in it, and how many bytes follow there.
    pub(super) fn contents_at(&self, at: u64) -> (Cell, u64, u64) {
        let part = self.pages.iter().find(|(part, _)| part.contains(&at));
        // Every page of a run is in a file, as was checked.
        let (part, cell) = part.unwrap_or(&self.pages[0]);
        (*cell, at - part.start, part.end.saturating_sub(at).max(PAGE_BYTES))
    }

    /// A new cell.
    pub(super) fn cell(&mut self) -> Cell {
        self.builder.cell()
    }

    /// The cell of an object's descriptor number.
    pub(super) fn object(&self, index: usize) -> Result<Cell> {
        let found = self.cells.get(index).copied().flatten();
        found.ok_or_else(|| {
            Error::damaged("section 'object'", format!("number {index} is used before it is made"))
        })
    }

    /// Moves a descriptor above the numbers that processes use; the low one is closed with all
    /// others at the end.
    pub(super) fn lift(&self, sequence: &mut Sequence, what: &str, cell: Cell) -> Cell {
        let args = [cell.into(), Arg::from(libc::F_DUPFD_CLOEXEC), self.above.into()];
        sequence.call_into(what, cell, Call::new(libc::SYS_fcntl, args));
        cell
    }

    /// Moves the descriptor of an object to its seat, or above the numbers that processes use.
    pub(super) fn lift_object(
        &self,
        sequence: &mut Sequence,
        (what, index): (&str, usize),
        cell: Cell,
    ) -> Cell {
        let Some(seat) = self.seats.get(&index) else { return self.lift(sequence, what, cell) };
        let cloexec = Arg::from(libc::O_CLOEXEC);
        let between = Arg::from(self.above - 1);
        // ORDER: the low number is closed now: there may be no others.
        sequence.call(what, Call::new(libc::SYS_dup3, [cell.into(), between, cloexec]));
        sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
        sequence.call_into(
            what,
            cell,
            Call::new(libc::SYS_dup3, [between, (*seat).into(), cloexec]),
        );
        cell
    }

    /// Closes all descriptors up to a number, but for these.
    pub(super) fn close_others(sequence: &mut Sequence, mut kept: Vec<u32>, last: u32) {
        kept.sort_unstable();
        let mut close = |first: u32, last: u32| {
            if first <= last {
                let args = [first.into(), last.into(), Arg::Number(0)];
                let call = Call::new(libc::SYS_close_range, args);
                sequence.call("descriptors of the work", call);
            }
        };
        let mut first = 0;
        for number in kept {
            if number > first {
                close(first, number - 1);
            }
            first = number + 1;
        }
        close(first, last);
    }

    /// The number of the descriptor that a process keeps open when it closes all others that are
    /// not its own.
    pub(super) fn kept(&self) -> u32 {
        self.above - 1
    }

    /// A pid that no process has.
    pub(super) fn fresh_pid(&mut self) -> u32 {
        self.free_pid += 1;
        self.free_pid - 1
    }
}
