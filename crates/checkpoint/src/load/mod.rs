//! From records to processes.
//!
//! [`prepare`] turns checked records into one list of system calls per process and thread, laid out
//! in one piece of shared memory. The engine starts a newborn as for any start: cgroups, network,
//! namespaces, root, mounts, limits, filter, all from the container's own configuration. Instead of
//! executing the program, the newborn maps this memory and follows the list. [`Traced::conduct`]
//! traces all of it. The order, with the stages at which every task waits for all others:
//!
//! ```text
//! `stacks`         only if there are network namespaces inside
//! `memory`         only if mount namespaces of processes have a tmpfs
//! first process    objects, each into a cell; shared memory; then every process:
//! `born`           memory for children; sessions; children, by clone3 with the recorded pid
//! `led`            process groups are created
//! `joined`         and joined; helpers and zombies exit
//! `clocks`         only if processes have created time namespaces for their children
//! `mapped`         memory; only if some of it is filled later ([`Lazy`])
//! `whole`          memory, working directory, handlers, threads, descriptors
//! `inside`         only if there are threads in user namespaces inside
//! `done`           epoll items, timers, pending signals, limits, credentials
//! conductor        unmaps the program, sets registers, detaches
//! ```
//!
//! Until the conductor detaches, no instruction of the container has run, and every process is
//! killed if the conductor exits.
//!
//! **Trust.** Records are trusted only as far as [`crate::format::check`] proves them. Contents of
//! memory and of files are not trusted at all: they are bytes that a process of the container
//! reads, as root of its own user namespace and without rights outside. Credentials and limits of a
//! record only narrow the grants of [`Allowed`] ([`credentials`]). An address of a record lies in the
//! memory of its process, where nothing of the restore is. A path of a record leads through no link of
//! procfs ([`file`]). The conductor reads the capabilities of each thread before it resumes any.

mod cgroup;
mod cgroup_namespace;
mod conduct;
mod credentials;
mod deleted;
mod descriptor;
mod event;
mod fanotify;
mod file;
mod filter;
mod inherit;
mod inotify;
mod ipc;
mod lazy;
mod lock;
mod memfd;
mod memory;
mod mount;
mod mqueue;
mod net;
mod netlink;
mod object;
mod outside;
mod pidfd;
mod pipe;
mod process;
mod raw;
mod schedule;
mod share;
mod signal;
mod socket;
mod system_v;
mod tcp;
mod terminal;
mod thread;
mod time;
mod timer;
mod tmpfs;
mod tree;
mod udp;
mod unix;
mod user;
mod uts;

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::OwnedFd;

use dormouse_kernel::Errno;
use dormouse_kernel::cpu::{self, StateComponent};

use crate::clock::{self, Offsets};
use crate::error::{Error, Result};
use crate::format::{
    About, Area, Made, PAGE_BYTES, PageFiles, Reader, Records, StatePart, Terminal, Thing,
};
pub use crate::inject::program::Program;
use crate::inject::program::{Arg, Builder, Call, Cell, Sequence};
use crate::vdso::{self, Bent, Object};
pub use conduct::Traced;
pub use credentials::Allowed;
use lazy::Making;
pub use lazy::{Lazy, Piece, Sources};
pub use outside::outside_sockets;
pub use share::{Shared, SharedArea, SharedPiece};
pub use socket::move_to;
pub use user::last_pid;

/// The resource number of the limit on descriptors.
const NOFILE: u32 = 7;
/// The resource number of the limit of nice(2).
const NICE: u32 = 13;
/// The resource number of the limit on real-time priorities.
const RTPRIO: u32 = 14;
/// Where shared memory is mapped meanwhile, beyond the program.
const SHARED_AT: u64 = crate::inject::program::END;
/// The lowest and the highest address of the work area. Below and above are the newborn's own
/// program and stack.
const WORK_AREA: (u64, u64) = (0x10_0000_0000, 0x5000_0000_0000);

/// A restore, ready to be followed.
#[derive(Debug)]
pub struct Restore {
    records: Records,
    program: Program,
    /// The numbers of what came along, and the ranges between them.
    given: Vec<Cell>,
    gaps: Vec<[Cell; 2]>,
    /// What the configuration gives at most.
    capabilities: u64,
    no_new_privileges: bool,
    /// Bytes of the work area: the program and shared memory.
    work_bytes: u64,
    wants: Vec<Wanted>,
    /// The cell of each object's descriptor number, valid while the first process has all of them.
    cells: Vec<Option<Cell>>,
    /// The contents of memory.
    pages: PageFiles,
    /// Directories that are tmpfs by the configuration.
    memory: Vec<String>,
    /// Cells of each tmpfs in mount namespaces inside, by object.
    memories: HashMap<usize, Cell>,
    /// The container whose packets were dropped meanwhile.
    quiet: Option<String>,
    /// The offsets of its clocks from the host's, if they differ from the newborn's.
    clocks: Option<Offsets>,
    /// The checkpoint comes from another kernel, and has addresses in that kernel's vDSO.
    is_foreign: bool,
    /// Memory that is filled while the processes run, and the cells of its descriptor numbers.
    lazy: Option<Lazy>,
    lazy_cells: Vec<Cell>,
}

/// A descriptor to be passed in, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// The sealed memory of the program ([`Program::sealed`]).
    Program,
    /// A part of the contents of memory, readable, by its number.
    Pages(usize),
    /// A file of the engine, by the name that it had at the checkpoint.
    Outside(String),
    /// The held open file of this object.
    Held(u32),
    /// `/dev/userfaultfd`, for memory that is filled while the processes run.
    Userfaults,
    /// `ns_last_pid`, which sets the next pid ([`last_pid`]).
    LastPid,
}

/// The memory that is not read by the processes themselves before they run.
#[derive(Debug, Clone, Copy, Default)]
pub enum Memory<'m> {
    /// Nothing.
    #[default]
    Own,
    /// The caller of [`Traced::conduct`] fills it.
    Later(&'m Lazy),
    /// The newborn has it from its creation.
    Shared(&'m Shared),
}

impl<'m> Memory<'m> {
    fn lazy(self) -> Option<&'m Lazy> {
        match self {
            Self::Later(lazy) => Some(lazy),
            _ => None,
        }
    }

    fn shared(self) -> Option<&'m Shared> {
        match self {
            Self::Shared(shared) => Some(shared),
            _ => None,
        }
    }
}

/// Turns a checkpoint into a restore.
///
/// Errors: [`Error::Elsewhere`] if this host or this configuration lacks something that the
/// processes need.
pub fn prepare(reader: &Reader, allowed: &Allowed, memory: Memory<'_>) -> Result<Restore> {
    let lazy = memory.lazy();
    let mut records = reader.records().clone();
    if records.has_init() != allowed.has_init {
        let (was, is) = if allowed.has_init { ("without", "with") } else { ("with", "without") };
        let text = format!("it was made of a container {was} --init, and this one is {is}");
        return Err(Error::Elsewhere(text));
    }
    socket::move_to(&mut records, &allowed.addresses);
    if allowed.beside {
        memory::wipe(&mut records);
    }
    records.let_pass(allowed.passed_ns);
    let is_same_boot = clock::is_same_boot(&records.about)?;
    let mut objects = vec![None; records.memories.len()];
    // A wake in the same boot skips checks of properties that cannot have changed.
    if !is_same_boot {
        fits_here(&records.about)?;
        let read = |area: &Area, range| contents(reader.pages(), area, range);
        objects = vdso::bend(&mut records, Object::here().as_ref(), read)?;
    }
    let is_foreign = objects.iter().any(Option::is_some);
    credentials::check(&records, allowed)?;
    filter::check(&records, allowed)?;
    let clocks = clock::here(&records.about, is_same_boot)?;
    if clocks.is_some() && allowed.has_init {
        // The init stays in the time namespace of its host, and so do children of exec.
        let text = "its clocks began with another boot, and an --init has only this one's";
        return Err(Error::Elsewhere(text.into()));
    }
    let wants = wants(&records, allowed, lazy.is_some());
    let work = hole(&records)?;
    let mut plan = Plan::new(&records, allowed, work, &wants);
    plan.lazy = Making::new(&mut plan, lazy);
    plan.born_with = memory.shared();
    plan.moves_clocks = clocks.is_some();
    plan.clocks = clocks.map_or_else(|| Offsets::of("self"), Ok)?;
    plan.objects = objects;
    let sequences = plan.sequences()?;
    let pages = reader.pages().try_clone();
    let pages = pages.map_err(Error::file("cannot duplicate", "pages"))?;
    let cells = std::mem::take(&mut plan.cells);
    let memories = std::mem::take(&mut plan.memories);
    let lazy_cells = plan.lazy.cells();
    let (given, gaps) = (std::mem::take(&mut plan.given), std::mem::take(&mut plan.gaps));
    let work_end = plan.work_end;
    let boot = std::mem::take(&mut plan.boot);
    let program = match plan.builder.finish(plan.program, boot, sequences) {
        Err(Errno::FBIG) => return Err(too_small()),
        made => made.map_err(Error::call("lay out the restore"))?,
    };
    let work_bytes = work_end - work.0;
    Ok(Restore {
        records,
        program,
        given,
        gaps,
        capabilities: allowed.capabilities,
        no_new_privileges: allowed.no_new_privileges,
        work_bytes,
        wants,
        cells,
        pages,
        memory: allowed.memory.clone(),
        memories,
        quiet: None,
        clocks,
        is_foreign,
        lazy: lazy.cloned(),
        lazy_cells,
    })
}

/// Checks that records can be laid out as a restore, under the widest configuration. A container is
/// therefore not killed for a checkpoint that cannot be restored. Nothing is written, and no
/// process is created.
pub(crate) fn rehearse(records: &Records) -> Result<()> {
    let allowed = Allowed {
        has_init: records.has_init(),
        capabilities: u64::MAX,
        own_network: true,
        cgroups: true,
        console: console(records).is_some(),
        ..Allowed::default()
    };
    let wants = wants(records, &allowed, false);
    let mut plan = Plan::new(records, &allowed, hole(records)?, &wants);
    plan.objects = vec![None; records.memories.len()];
    plan.sequences().map(drop)
}

fn console(records: &Records) -> Option<&Terminal> {
    records.objects.iter().find_map(|object| match &object.thing {
        Thing::Terminal(terminal) if terminal.is_console => Some(terminal),
        _ => None,
    })
}

/// The descriptors to be passed in.
fn wants(records: &Records, allowed: &Allowed, is_lazy: bool) -> Vec<Wanted> {
    let pages = (0..records.pages.parts().len()).map(Wanted::Pages);
    let mut wants: Vec<Wanted> = [Wanted::Program].into_iter().chain(pages).collect();
    for object in &records.objects {
        if let Thing::External(external) = &object.thing {
            let wanted = Wanted::Outside(external.name.clone());
            if !wants.contains(&wanted) {
                wants.push(wanted);
            }
        }
    }
    for number in &allowed.held {
        let object = records.objects.get(*number as usize);
        if object.is_some_and(|object| object.is_called_from_outside()) {
            wants.push(Wanted::Held(*number));
        }
    }
    if is_lazy {
        wants.push(Wanted::Userfaults);
    }
    if user::has_late_threads(records) {
        wants.push(Wanted::LastPid);
    }
    wants
}

impl Restore {
    /// The program that the newborn follows.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The descriptors to be passed in.
    pub fn wants(&self) -> &[Wanted] {
        &self.wants
    }

    /// Packets of this container's connections were dropped ([`crate::end_quiet`]): the drop rules
    /// are removed once the connections are complete.
    pub fn end_quiet(&mut self, id: &str) {
        self.quiet = Some(id.to_owned());
    }

    /// The size of the console, in rows and columns; `None` if there is none.
    pub fn console_size(&self) -> Option<(u16, u16)> {
        let console = console(&self.records)?;
        Some((console.size[0], console.size[1]))
    }

    /// Whether the restore creates a time namespace, in which the clocks of another boot continue.
    pub fn moves_clocks(&self) -> bool {
        self.clocks.is_some()
    }

    /// The descriptor number of an object, valid while the first process has all of them.
    fn number(&self, index: usize) -> std::result::Result<i32, Errno> {
        let cell = self.cells.get(index).copied().flatten();
        cell.ok_or(Errno::BADF).and_then(|cell| self.program.value(cell))
    }

    /// The records that it restores.
    pub fn records(&self) -> &Records {
        &self.records
    }
}

/// State that the modules share while the sequences are made.
struct Plan<'r> {
    records: &'r Records,
    allowed: &'r Allowed,
    builder: Builder,
    /// Where the number of the program's memory is.
    program: Cell,
    /// What the newborn does first of all.
    boot: Sequence,
    /// The numbers of everything else that came along.
    given: Vec<Cell>,
    /// The first and the last number of each range between those, which the conductor finds.
    gaps: Vec<[Cell; 2]>,
    /// The work area.
    work: u64,
    work_end: u64,
    /// The contents of memory: the range of bytes in each file.
    pages: Vec<(Range<u64>, Cell)>,
    outside: HashMap<String, Cell>,
    /// Held files, by object.
    held: HashMap<usize, Cell>,
    /// Cells of the objects' descriptor numbers, by object.
    cells: Vec<Option<Cell>>,
    /// The network namespace of the object that is being made; `None` for the container's own.
    stack: Option<usize>,
    /// Open control groups, by path.
    cgroups: HashMap<String, Cell>,
    /// Cells of each tmpfs in mount namespaces inside, by object.
    memories: HashMap<usize, Cell>,
    /// A side of each terminal, by object.
    terminals: HashMap<usize, Cell>,
    /// Where shared memory is mapped meanwhile, by object.
    shared: HashMap<usize, u64>,
    shared_end: u64,
    /// No process uses descriptor numbers from here on, nor the one before.
    above: u32,
    /// Pids of helper processes begin here.
    free_pid: u32,
    /// The container gets a time namespace with other offsets.
    moves_clocks: bool,
    /// The offsets of its clocks from the host's.
    clocks: Offsets,
    /// Time namespaces that processes make, by object.
    times: HashMap<usize, Made>,
    /// The vDSOs of other kernels that are restored, by memory.
    objects: Vec<Option<Bent>>,
    /// Memory that is filled while the processes run.
    lazy: Making,
    /// Memory that the newborn has already.
    born_with: Option<&'r Shared>,
    /// `ns_last_pid`, which sets the next pid.
    last_pid: Option<Cell>,
    /// Threads that are created in user namespaces inside, and the pid of the numberer for them.
    late: Vec<user::Late>,
    numberer: Option<u32>,
    /// Sequences of helper processes, and the number of the first of them.
    stand_ins: Vec<Sequence>,
    stand_ins_from: usize,
}

impl<'r> Plan<'r> {
    fn new(
        records: &'r Records,
        allowed: &'r Allowed,
        (work, work_bytes): (u64, u64),
        wants: &[Wanted],
    ) -> Self {
        let mut builder = Builder::new(work);
        let (mut outside, mut held) = (HashMap::new(), HashMap::new());
        let mut pages = Vec::new();
        let parts = records.pages.parts();
        let mut lazy = Making::default();
        let mut last_pid = None;
        let mut given = Vec::new();
        // ORDER: the newborn fills the first cells, in the order of the descriptors passed in.
        for wanted in wants {
            let cell = builder.cell();
            given.push(cell);
            match wanted {
                Wanted::Program => {}
                Wanted::Pages(part) => pages.push((parts[*part].clone(), cell)),
                Wanted::Userfaults => lazy.device = Some(cell),
                Wanted::LastPid => last_pid = Some(cell),
                Wanted::Outside(name) => {
                    outside.insert(name.clone(), cell);
                }
                Wanted::Held(object) => {
                    held.insert(*object as usize, cell);
                }
            }
        }
        let gaps = given.iter().map(|_| [builder.cell(), builder.cell()]).collect();
        let all = records.processes.iter();
        let above = all.clone().flat_map(|p| &p.descriptors).map(|d| d.number + 1).max();
        let tids = all.flat_map(|p| p.threads.iter().map(|t| t.tid).chain([p.pid]));
        let ids = records.processes.iter().flat_map(|p| [p.session, p.group]);
        let free_pid = tids.chain(ids).max().unwrap_or(1) + 1;
        Self {
            records,
            allowed,
            builder,
            // The first of what is wanted.
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
            stack: None,
            cgroups: HashMap::new(),
            memories: HashMap::new(),
            terminals: HashMap::new(),
            shared: HashMap::new(),
            shared_end: work + SHARED_AT,
            above: above.unwrap_or(0).max(16) + 1,
            free_pid,
            moves_clocks: false,
            clocks: Offsets::default(),
            times: records.times_made().unwrap_or_default(), // as was checked
            objects: Vec::new(),
            lazy,
            born_with: None,
            last_pid,
            late: Vec::new(),
            numberer: None,
            stand_ins: Vec::new(),
            stand_ins_from: 0,
        }
    }

    /// The file of some contents, the offset in it, and how many bytes follow there.
    fn contents_at(&self, at: u64) -> (Cell, u64, u64) {
        let part = self.pages.iter().find(|(part, _)| part.contains(&at));
        // Every page of a run is in a file, as was checked.
        let (part, cell) = part.unwrap_or(&self.pages[0]);
        (*cell, at - part.start, part.end.saturating_sub(at).max(PAGE_BYTES))
    }

    fn cell(&mut self) -> Cell {
        self.builder.cell()
    }

    /// The sequences of all processes and threads.
    fn sequences(&mut self) -> Result<Vec<Sequence>> {
        let all = tree::sequences(self)?;
        if self.shared_end > self.work_end { Err(too_small()) } else { Ok(all) }
    }

    /// The cell of an object's descriptor number.
    fn object(&self, index: usize) -> Result<Cell> {
        let found = self.cells.get(index).copied().flatten();
        found.ok_or_else(|| {
            Error::damaged("section 'object'", format!("number {index} is used before it is made"))
        })
    }

    /// Opens the file of a descriptor again, as another file description. The path needs a number
    /// that is known now, so the descriptor is duplicated to one that no process uses.
    fn reopen(
        &mut self,
        sequence: &mut Sequence,
        what: &str,
        from: Cell,
        flags: u32,
    ) -> Result<Cell> {
        let number = self.above - 1;
        let args = [from.into(), number.into(), Arg::from(libc::O_CLOEXEC)];
        sequence.call(what, Call::new(libc::SYS_dup3, args));
        // The path is a magic link, which always leads to the same file.
        let flags = flags & !(libc::O_NOFOLLOW | libc::O_DIRECTORY) as u32;
        file::open_own(self, sequence, what, &format!("/proc/self/fd/{number}"), flags)
    }

    /// Creates a helper process with that pid, which follows a part, and waits for its exit. The
    /// helper has a copy of everything, but shares the descriptors.
    fn stand_in(&mut self, sequence: &mut Sequence, what: &str, pid: u32, part: Sequence) {
        self.stand_in_within(sequence, what, (pid, None), part);
    }

    /// The same in a control group, if not in that of the caller.
    fn stand_in_within(
        &mut self,
        sequence: &mut Sequence,
        what: &str,
        (pid, cgroup): (u32, Option<Cell>),
        part: Sequence,
    ) {
        self.begin_stand_in(sequence, what, (pid, cgroup), part, libc::CLONE_FILES as u64);
        self.end_stand_in(sequence, what, pid);
    }

    /// Creates a helper process with that pid and these clone flags, which follows a part.
    fn begin_stand_in(
        &mut self,
        sequence: &mut Sequence,
        what: &str,
        (pid, cgroup): (u32, Option<Cell>),
        mut part: Sequence,
        flags: u64,
    ) {
        part.call(what, Call::new(libc::SYS_exit_group, [Arg::Number(0)]));
        let child = self.stand_ins_from + self.stand_ins.len();
        self.stand_ins.push(part);
        let call = tree::clone_with_pid(self, sequence, flags, (pid, cgroup));
        sequence.fork(what, child, call);
    }

    /// Waits for the exit of a helper process.
    fn end_stand_in(&mut self, sequence: &mut Sequence, what: &str, pid: u32) {
        let wait = [pid.into(), Arg::Number(0), Arg::Number(0), Arg::Number(0)];
        sequence.call(what, Call::new(libc::SYS_wait4, wait));
    }

    /// The number of the descriptor that a process keeps open when it closes all others that are
    /// not its own.
    fn kept(&self) -> u32 {
        self.above - 1
    }

    /// A pid that no process has.
    fn fresh_pid(&mut self) -> u32 {
        self.free_pid += 1;
        self.free_pid - 1
    }
}

fn too_small() -> Error {
    Error::Elsewhere("no hole in the memory is large enough for its work".into())
}

/// Checks that this CPU has everything that the processes may use.
fn fits_here(about: &About) -> Result<()> {
    let named = about.cpu.iter().map(String::as_str);
    let mut lacking: Vec<&str> = named.filter(|name| !cpu::features().contains(name)).collect();
    if !lacking.is_empty() {
        // The kernel may know features that this program does not.
        let known = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        lacking.retain(|name| !known.split_ascii_whitespace().any(|word| word == *name));
    }
    if !lacking.is_empty() {
        let text = format!("this CPU lacks {}, which its processes may use", lacking.join(", "));
        return Err(Error::Elsewhere(text));
    }
    let is_here = |part: &&StatePart| {
        let StatePart { number, offset, bytes } = **part;
        cpu::state_components().contains(&StateComponent { number, offset, bytes })
    };
    match about.cpu_state.iter().find(|part| !is_here(part)) {
        None => Ok(()),
        Some(part) => Err(Error::Elsewhere(format!(
            "this CPU does not keep part {} of the extended registers (XSAVE) as the CPU of the \
             checkpoint did",
            part.number
        ))),
    }
}

/// Reads a part of the contents of an area.
fn contents(pages: &PageFiles, area: &Area, range: Range<u64>) -> Result<Vec<u8>> {
    let mut all = vec![0; (range.end - range.start) as usize];
    for run in &area.runs {
        let start = run.address.max(range.start);
        let end = (run.address + run.pages * PAGE_BYTES).min(range.end);
        if start < end {
            let part = &mut all[(start - range.start) as usize..(end - range.start) as usize];
            let at = run.first * PAGE_BYTES + (start - run.address);
            pages.read_exact_at(part, at).map_err(Error::file("cannot read", "pages"))?;
        }
    }
    Ok(all)
}

/// The largest range of addresses that no process uses: start and length.
fn hole(records: &Records) -> Result<(u64, u64)> {
    let mut used: Vec<(u64, u64)> = Vec::new();
    for memory in &records.memories {
        used.extend(memory.areas.iter().map(|a| (a.start, a.end)));
        used.extend(memory.vdso.map(|(start, bytes)| (start, start + bytes)));
    }
    used.sort_unstable();
    let (mut at, mut best) = (WORK_AREA.0, (0, 0));
    for (start, end) in used.into_iter().chain([(WORK_AREA.1, u64::MAX)]) {
        let gap = start.min(WORK_AREA.1).saturating_sub(at);
        if gap > best.1 {
            best = (at, gap);
        }
        at = at.max(end);
    }
    // Leaves a margin on both sides: a stack may grow down into it, or a heap up.
    const MARGIN: u64 = 1 << 30;
    if best.1 < MARGIN * 4 {
        return Err(Error::Elsewhere("its memory has no hole for the restore's work".into()));
    }
    Ok((best.0 + MARGIN, best.1 - 2 * MARGIN))
}

/// The contents of memory as descriptors, one for each part, in the order of [`Wanted::Pages`].
pub fn pages_of(reader: &Reader) -> Result<Vec<OwnedFd>> {
    let copy = |file: &File| file.try_clone().map(OwnedFd::from);
    let all: std::io::Result<_> = reader.pages().files().map(copy).collect();
    all.map_err(Error::file("cannot duplicate", "pages"))
}
