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
//! `shared`         only if processes share descriptors or a directory, or threads do not ([`joint`])
//! `whole`          memory, working directory, handlers, threads, descriptors
//! `inside`         only if there are threads in user namespaces inside
//! `done`           epoll items, timers, pending signals, limits, credentials
//! conductor        unmaps the program, sets registers, detaches
//! ```
//!
//! Until the conductor detaches, no instruction of the container has run, and every process is
//! killed if the conductor exits.
//!
//! **Rooms.** A module uses modules of the rooms below its own, and modules that stand below it in
//! its room:
//!
//! ```text
//! this file, follow       prepare, rehearse: from records to a Restore, and to a newborn's plan
//! conduct resume          the engine's half: acts between two stages, and resumes all tasks
//! connection
//! tree                    the program's half: one sequence of calls per process and thread
//! object process thread   all objects in their order; the state of a process, of a thread
//! inherit numberer        what several processes have together: memory, numbers of threads,
//! userfault               memory that is filled later
//! KIND                    one file per kind of object or state; the calls, and the engine's half
//! open helper credentials calls that the kinds share
//! plan                    the state while the sequences are made
//! restore                 the result, which the engine's half reads
//! check share lazy joint  decisions on records alone: allowed or not, shared, filled later, created in which order
//! allowed mapped stage    the grants of the configuration, ranges of memory, names of stages
//! ```
//!
//! **Trust.** Records are trusted only as far as [`dormouse_record::check`] proves them. Contents of
//! memory and of files are not trusted at all: they are bytes that a process of the container
//! reads, as root of its own user namespace and without rights outside. A record only narrows the
//! grants of [`Allowed`]: [`check`] refuses any other before something is created. An address of a
//! record lies in the memory of its process, where nothing of the restore is. A path of a record
//! leads through no link of procfs ([`open`]). The conductor reads the capabilities of each thread
//! before it resumes any ([`resume`]).

mod aio;
mod allowed;
mod cgroup;
mod cgroup_namespace;
mod check;
mod conduct;
mod connection;
mod credentials;
mod deleted;
mod descriptor;
mod event;
mod fanotify;
mod file;
mod filter;
mod follow;
mod helper;
mod inherit;
mod inotify;
mod ipc;
mod joint;
mod lazy;
mod lock;
mod mapped;
mod memfd;
mod memory;
mod mount;
mod mqueue;
mod net;
mod netlink;
mod numberer;
mod object;
mod open;
mod outside;
mod pidfd;
mod pipe;
mod plan;
mod process;
mod raw;
mod restore;
mod resume;
mod schedule;
mod share;
mod signal;
mod socket;
mod stage;
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
mod userfault;
mod uts;

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::OwnedFd;

use dormouse_kernel::Errno;
use dormouse_kernel::cpu::{self, StateComponent};
use dormouse_parcel::{PageFiles, Source};
use dormouse_record::{About, Area, Error, PAGE_BYTES, Records, Result, StatePart, Thing};

use crate::clock::{self, Offsets};
use crate::inject::program::Sequence;
use crate::vdso::{self, Bent, Object};
pub use allowed::Allowed;
pub(crate) use conduct::Complete;
pub use conduct::Traced;
pub use lazy::{Lazy, Piece};
pub use outside::outside_sockets;
use plan::Plan;
use restore::Passed;
pub use restore::{Restore, Wanted};
pub use share::{Shared, SharedArea, SharedPiece};
pub use socket::move_to;
pub use userfault::Sources;

/// The lowest and the highest address of the work area. Below and above are the newborn's own
/// program and stack.
const WORK_AREA: (u64, u64) = (0x10_0000_0000, 0x5000_0000_0000);

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

/// Records that this host and a configuration permit ([`check`]).
#[derive(Debug)]
pub struct Checked {
    allowed: Allowed,
    records: Records,
    /// The shared object of the kernel of each address space, where it is not this kernel's.
    vdsos: Vec<Option<Bent>>,
    clocks: Option<Offsets>,
}

/// Checks that a checkpoint can be restored here. Nothing is made.
///
/// Errors: [`Error::Elsewhere`] if this host or this configuration lacks something that the
/// processes need.
pub fn check(source: &dyn Source, allowed: Allowed) -> Result<Checked> {
    let mut records = source.records().clone();
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
        let read = |area: &Area, range| contents(source.pages(), area, range);
        objects = vdso::bend(&mut records, Object::here().as_ref(), read)?;
    }
    check::check(&records, &allowed)?;
    let clocks = clock::here(&records.about, is_same_boot)?;
    if clocks.is_some() && allowed.has_init {
        // The init stays in the time namespace of its host, and so do children of exec.
        let text = "its clocks began with another boot, and an --init has only this one's";
        return Err(Error::Elsewhere(text.into()));
    }
    Ok(Checked { allowed, records, vdsos: objects, clocks })
}

/// [`check`] and [`lay_out`].
pub fn prepare(source: &dyn Source, allowed: Allowed, memory: Memory<'_>) -> Result<Restore> {
    lay_out(source, check(source, allowed)?, memory)
}

/// Turns a checked checkpoint into a restore.
pub fn lay_out(source: &dyn Source, checked: Checked, memory: Memory<'_>) -> Result<Restore> {
    let Checked { allowed, records, vdsos, clocks } = checked;
    let lazy = memory.lazy();
    let is_foreign = vdsos.iter().any(Option::is_some);
    let passed = passed(&records, &allowed, lazy.is_some());
    let work = hole(&records)?;
    let mut plan = Plan::new(&records, &allowed, work, &passed);
    if let Some(lazy) = lazy {
        plan.userfaults.add(lazy, &mut plan.builder);
    }
    plan.born_with = memory.shared();
    plan.moves_clocks = clocks.is_some();
    plan.clocks = clocks.map_or_else(|| clock::offsets_of("self"), Ok)?;
    plan.vdsos = vdsos;
    let sequences = sequences(&mut plan)?;
    let pages = source.pages().try_clone();
    let pages = pages.map_err(Error::file("cannot duplicate", "pages"))?;
    let cells = std::mem::take(&mut plan.cells);
    let memories = std::mem::take(&mut plan.memories);
    let pipes = std::mem::take(&mut plan.pipes);
    let lazy_cells = plan.userfaults.cells();
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
        passed,
        cells,
        pages,
        memory: allowed.memory.clone(),
        memories,
        pipes,
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
        own_names: true,
        own_ipc: true,
        cgroups: true,
        console: restore::console(records).is_some(),
        ..Allowed::default()
    };
    let passed = passed(records, &allowed, false);
    let mut plan = Plan::new(records, &allowed, hole(records)?, &passed);
    plan.vdsos = vec![None; records.memories.len()];
    sequences(&mut plan).map(drop)
}

/// Checks that processes can be created again with their ids, their sessions, and what they share. Of the records only
/// that is read.
pub(crate) fn can_be_created(records: &Records) -> Result<()> {
    let allowed = Allowed { has_init: records.has_init(), ..Allowed::default() };
    let mut plan = Plan::new(records, &allowed, WORK_AREA, &[Passed::Program]);
    tree::check(&mut plan)
}

/// The sequences of all processes and threads.
fn sequences(plan: &mut Plan<'_>) -> Result<Vec<Sequence>> {
    let all = tree::sequences(plan)?;
    if plan.shared_end > plan.work_end { Err(too_small()) } else { Ok(all) }
}

/// The descriptors that the newborn receives.
fn passed(records: &Records, allowed: &Allowed, is_lazy: bool) -> Vec<Passed> {
    let pages = (0..records.pages.parts().len()).map(Passed::Pages);
    let mut passed: Vec<Passed> = [Passed::Program].into_iter().chain(pages).collect();
    for object in &records.objects {
        if let Thing::External(external) = &object.thing {
            let file = Passed::Caller(Wanted::Outside(external.name.clone()));
            if !passed.contains(&file) {
                passed.push(file);
            }
        }
    }
    for number in &allowed.held {
        let object = records.objects.get(*number as usize);
        if object.is_some_and(|object| object.is_called_from_outside()) {
            passed.push(Passed::Caller(Wanted::Held(*number)));
        }
    }
    if is_lazy {
        passed.push(Passed::Caller(Wanted::Userfaults));
    }
    if numberer::has_late_threads(records) {
        passed.push(Passed::LastPid);
    }
    passed
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

/// The contents of memory as descriptors, one for each part ([`SharedPiece::part`]).
pub fn pages_of(source: &dyn Source) -> Result<Vec<OwnedFd>> {
    let copy = |file: &File| file.try_clone().map(OwnedFd::from);
    let all: std::io::Result<_> = source.pages().files().map(copy).collect();
    all.map_err(Error::file("cannot duplicate", "pages"))
}
