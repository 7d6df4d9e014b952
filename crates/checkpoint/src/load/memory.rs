//! Memory: the old memory is unmapped, areas are mapped at their addresses, contents are read into
//! them.
//!
//! Private areas are anonymous again: their pages are read from `pages`, and not mapped from it,
//! which programs would notice (madvise(2), mremap(2), growth). Memory shared with other processes
//! since fork(2) exists already ([`super::inherit`]), and stays.

use dormouse_record::check::USER_END;
use dormouse_record::{
    Area, Backing, Memory, MemoryFile, MemoryPolicy, PAGE_BYTES, Process, Records, Result, Run,
    SharedMemory, SystemVMemory, Thing, Thread,
};

use super::mapped::{self, Mapped, READ_WRITE};
use super::plan::Plan;
use super::{aio, open};
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::vdso::Bent;

/// Bytes that one preadv(2) reads at most.
const READ_BYTES_MAX: u64 = 2 << 20;
/// From this size on, pages are populated in one call before they are read into. The kernel is then
/// not interrupted by a fault for every page, and the new pages are still in the processor's cache.
const LARGE_BYTES: u64 = 8 << 10;
/// KERNEL(5.14): populates pages, as a write to each would. Before, no advice.
const MADV_POPULATE_WRITE: i32 = 23;
/// Pieces of one preadv(2) at most.
const PIECES_MAX: usize = 1024;

fn mmap(start: u64, bytes: u64, access: u32, flags: i32, fd: Arg, offset: u64) -> Call {
    let args = [start.into(), bytes.into(), access.into(), Arg::from(flags), fd, offset.into()];
    Call::new(libc::SYS_mmap, args)
}

fn munmap(start: u64, end: u64) -> Call {
    Call::new(libc::SYS_munmap, [Arg::Number(start), Arg::Number(end - start)])
}

/// Maps shared memory in the first process until the processes that share it are created.
pub(super) fn make_shared(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    index: usize,
    memory: &SharedMemory,
) -> Result<()> {
    let at = plan.shared_end;
    plan.shared_end += memory.bytes + PAGE_BYTES;
    plan.shared.insert(index, at);
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    let what = "shared memory";
    if memory.no_exec {
        // As it was made. The kernel copies what the mount permits to each further mapping.
        let zero = open::path(plan, sequence, what, "/dev/zero", libc::O_RDWR as u32)?;
        sequence.call(what, mmap(at, memory.bytes, READ_WRITE, flags, zero.into(), 0));
        sequence.call(what, Call::new(libc::SYS_close, [zero.into()]));
    } else {
        let (none, flags) = (Arg::from(-1), flags | libc::MAP_ANONYMOUS);
        sequence.call(what, mmap(at, memory.bytes, READ_WRITE, flags, none, 0));
    }
    read(plan, sequence, what, memory.runs.iter().map(|r| (at + r.address, r)));
    Ok(())
}

/// Restores the memory of one process, which has inherited this.
pub(super) fn restore(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    record: &Process,
    inherited: &Mapped,
) -> Result<()> {
    let records = plan.records;
    let Some(number) = record.memory else { return Ok(()) };
    let Some(memory) = records.memories.get(number) else { return Ok(()) };
    let pid = record.pid;
    let parts: Vec<Vec<(u64, u64)>> = memory.areas.iter().map(|a| inherited.parts(a)).collect();
    let kept = || parts.iter().flatten().copied();
    let work = (plan.work, plan.work_end);
    for (start, end) in
        mapped::gaps(kept(), 0, work.0).into_iter().chain(mapped::gaps(kept(), work.1, USER_END))
    {
        sequence.call(format!("the old memory of process {pid}"), munmap(start, end));
    }
    for (area, parts) in memory.areas.iter().zip(&parts) {
        let what = format!("memory at {:x} of process {pid}", area.start);
        for (start, end) in mapped::gaps(parts.iter().copied(), area.start, area.end) {
            map(plan, sequence, &what, &part(area, start, end, !parts.is_empty()))?;
        }
        if !parts.is_empty() {
            advise(sequence, &what, area);
        }
    }
    asynchronous(plan, sequence, pid, memory)?;
    // ORDER: before any page is made, which is taken from these nodes.
    for it in &memory.policies {
        let (nodes, bits) = policy_nodes(plan, &it.policy);
        let (start, bytes) = (it.start.into(), (it.end - it.start).into());
        let args = [start, bytes, it.policy.mode.into(), nodes, bits, Arg::Number(0)];
        let what = format!("the memory policy at {:x} of process {pid}", it.start);
        // LIMIT: a host without these nodes has no such policy.
        sequence.call(what, Call::new(libc::SYS_mbind, args).lenient());
    }
    let at_once = plan.userfaults.at_once(number);
    if memory.no_huge_pages || at_once.is_some() {
        // ORDER: before anything is read, if some memory is filled later: a huge page would be
        // filled as a whole, with zeros in that memory. Until the areas are registered, which
        // prevents huge pages.
        sequence.call(format!("the huge pages of process {pid}"), disable_huge_pages(true));
    }
    match at_once {
        // The process has inherited nothing ([`super::lazy`]).
        Some(runs) => {
            let what = format!("the contents of the memory of process {pid}");
            read(plan, sequence, &what, runs.iter().map(|r| (r.address, r)));
        }
        None => {
            contents(plan, sequence, pid, memory, &inherited.pages(&kept().collect::<Vec<_>>()));
        }
    }
    // ORDER: before memory is locked, which a guard does not allow. A fork would have copied
    // guards.
    for (start, end) in memory.guards.iter().copied() {
        const GUARD_INSTALL: i32 = 102;
        let args = [start.into(), (end - start).into(), Arg::from(GUARD_INSTALL)];
        let what = format!("the guards at {start:x} of process {pid}");
        sequence.call(what, Call::new(libc::SYS_madvise, args));
    }
    for (area, parts) in memory.areas.iter().zip(&parts) {
        let is_guarded = |(start, end): &(u64, u64)| *start < area.end && area.start < *end;
        let has_guards = memory.guards.iter().any(is_guarded);
        protect(sequence, pid, area, !parts.is_empty(), has_guards);
    }
    if let Some(vdso) = plan.vdsos.get_mut(number).and_then(Option::take) {
        write_vdso(plan, sequence, pid, &vdso);
    }
    if let Some((start, _)) = memory.vdso {
        const ARCH_MAP_VDSO_64: u64 = 0x2003;
        let args = [Arg::Number(ARCH_MAP_VDSO_64), start.into()];
        sequence.call("the kernel's shared object", Call::new(libc::SYS_arch_prctl, args));
    }
    layout(plan, sequence, memory)
}

/// The nodes of a policy, as set_mempolicy(2) and mbind(2) take them: their address, and the number of bits. The kernel
/// takes the number to be one more than it is.
fn policy_nodes(plan: &mut Plan<'_>, policy: &MemoryPolicy) -> (Arg, Arg) {
    match &policy.nodes[..] {
        [] => (Arg::Number(0), Arg::Number(0)),
        nodes => (plan.builder.numbers(nodes).into(), Arg::Number(nodes.len() as u64 * 64 + 1)),
    }
}

/// Sets the policy of a thread (set_mempolicy(2)). ORDER: it creates no task any more, which would inherit it.
pub(super) fn policy_of_thread(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) {
    let Some(policy) = &thread.memory_policy else { return };
    let (nodes, bits) = policy_nodes(plan, policy);
    let call = Call::new(libc::SYS_set_mempolicy, [policy.mode.into(), nodes, bits]);
    sequence.call(format!("the memory policy of thread {}", thread.tid), call.lenient());
}

/// Makes the contexts of asynchronous I/O of a process, with the contents of their rings.
fn asynchronous(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    pid: u32,
    memory: &Memory,
) -> Result<()> {
    aio::make(plan, sequence, pid, memory)?;
    for (start, context) in aio::of(plan.records, memory) {
        let what = aio::name(start, pid);
        read(plan, sequence, &what, context.runs.iter().map(|run| (start + run.address, run)));
        let ring = memory.areas.iter().filter(|area| area.start == start);
        ring.for_each(|area| advise(sequence, &what, area));
    }
    Ok(())
}

/// Reads the pages of a process that do not exist already, and drops inherited pages that it did
/// not have.
fn contents(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    pid: u32,
    memory: &Memory,
    there: &[Run],
) {
    let what = format!("the contents of the memory of process {pid}");
    let all = memory.areas.iter().flat_map(|area| &area.runs);
    if there.is_empty() {
        return read(plan, sequence, &what, all.map(|run| (run.address, run)));
    }
    let all: Vec<Run> = all.cloned().collect();
    for run in mapped::elsewhere_than(there, &all) {
        let bytes = run.pages * PAGE_BYTES;
        let args = [run.address.into(), bytes.into(), Arg::from(libc::MADV_DONTNEED)];
        let what = format!("memory that process {pid} no longer has");
        sequence.call(what, Call::new(libc::SYS_madvise, args));
    }
    let own = mapped::other_than(&all, there);
    read(plan, sequence, &what, own.iter().map(|run| (run.address, run)));
}

/// Sets whether a process has transparent huge pages (PR_SET_THP_DISABLE(2const)).
pub(super) fn disable_huge_pages(disabled: bool) -> Call {
    let args = [Arg::from(libc::PR_SET_THP_DISABLE), Arg::Number(disabled.into())];
    Call::new(libc::SYS_prctl, args)
}

/// Settings for memory that the process maps later. ORDER: the restore maps no more of it.
pub(super) fn later(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) {
    const EXCEPT_ADVISED: u64 = 2;
    let memory = record.memory.and_then(|number| plan.records.memories.get(number));
    let Some(memory) = memory else { return };
    if memory.huge_pages_by_advice {
        let what = format!("the huge pages of advised memory of process {}", record.pid);
        let args = [libc::PR_SET_THP_DISABLE as u64, 1, EXCEPT_ADVISED, 0, 0].map(Arg::from);
        // KERNEL(6.18): before, all areas may have huge pages, which costs memory alone.
        sequence.call(what, Call::new(libc::SYS_prctl, args).lenient());
    }
    if memory.locks_later != 0 {
        let what = format!("the lock of later memory of process {}", record.pid);
        sequence.call(what, Call::new(libc::SYS_mlockall, [memory.locks_later.into()]));
    }
}

/// Seals the recorded sealed areas (mseal(2), KERNEL(6.10)). No call can change them afterwards.
pub(super) fn seal(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) {
    const MSEAL: i64 = 462;
    let memory = record.memory.and_then(|number| plan.records.memories.get(number));
    for area in memory.into_iter().flat_map(|m| &m.areas).filter(|area| area.has("sl")) {
        let args = [area.start, area.bytes(), 0].map(Arg::from);
        let what = format!("the seal of memory at {:x} of process {}", area.start, record.pid);
        sequence.call(what, Call::new(MSEAL, args));
    }
}

/// Writes the vDSO of another kernel to its place.
fn write_vdso(plan: &mut Plan<'_>, sequence: &mut Sequence, pid: u32, vdso: &Bent) {
    let what = format!("the shared object that process {pid} had before");
    let bytes = vdso.image.len() as u64;
    let protect = |sequence: &mut Sequence, access: u32| {
        let whole = bytes.next_multiple_of(PAGE_BYTES);
        let args = [vdso.address.into(), whole.into(), access.into()];
        sequence.call(what.clone(), Call::new(libc::SYS_mprotect, args));
    };
    protect(sequence, READ_WRITE);
    let from = plan.builder.data(&vdso.image);
    let (from, to) =
        (plan.builder.numbers(&[from, bytes]), plan.builder.numbers(&[vdso.address, bytes]));
    // The process's own memory: no permission check applies.
    let (one, none) = (Arg::Number(1), Arg::Number(0));
    let args = [pid.into(), from.into(), one, to.into(), one, none];
    sequence.call(what.clone(), Call::new(libc::SYS_process_vm_writev, args));
    protect(sequence, (libc::PROT_READ | libc::PROT_EXEC) as u32);
}

/// Removes the contents that a fork would wipe.
pub(super) fn wipe(records: &mut Records) {
    let areas = records.memories.iter_mut().flat_map(|memory| &mut memory.areas);
    areas.filter(|area| area.has("wf")).for_each(|area| area.runs.clear());
}

/// Access of an area while it is filled. One that could be written can be written first.
fn first_access(area: &Area) -> u32 {
    match area.runs.is_empty() && !area.has(Area::ACCOUNTED) {
        true => area.access,
        false => area.access | READ_WRITE,
    }
}

/// A part of an area, with everything that mapping it needs.
fn part(area: &Area, start: u64, end: u64, is_inherited: bool) -> Area {
    let skipped = start - area.start;
    let backing = match area.backing {
        Backing::Anonymous | Backing::Huge { .. } => area.backing.clone(),
        Backing::Private { object, offset } => {
            Backing::Private { object, offset: offset + skipped }
        }
        Backing::Shared { object, offset } => Backing::Shared { object, offset: offset + skipped },
    };
    let access = if is_inherited { READ_WRITE } else { first_access(area) };
    Area { start, end, access, backing, flags: area.flags.clone(), runs: Vec::new() }
}

/// Maps an area, without contents.
pub(super) fn map(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    area: &Area,
) -> Result<()> {
    let mut flags = libc::MAP_FIXED;
    if area.has("gd") {
        flags |= libc::MAP_GROWSDOWN;
    }
    if area.has("nr") {
        flags |= libc::MAP_NORESERVE;
    }
    let access = area.access;
    let (start, bytes) = (area.start, area.bytes());
    let call = match area.backing {
        Backing::Anonymous => {
            let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            mmap(start, bytes, access, flags, Arg::from(-1), 0)
        }
        Backing::Huge { page_bytes } => {
            let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | huge(page_bytes);
            mmap(start, bytes, access, flags, Arg::from(-1), 0)
        }
        Backing::Private { object, offset } => {
            let fd = plan.object(object)?.into();
            mmap(start, bytes, access, flags | libc::MAP_PRIVATE, fd, offset)
        }
        Backing::Shared { object, offset } => match plan.shared.get(&object) {
            Some(at) => {
                // An old size of 0 creates a second mapping of a shared one (mremap(2)).
                let kind = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let args = [
                    (at + offset).into(),
                    Arg::Number(0),
                    bytes.into(),
                    Arg::from(kind),
                    start.into(),
                ];
                Call::new(libc::SYS_mremap, args)
            }
            None => match &plan.records.objects[object].thing {
                Thing::SystemVMemory(memory) => attach(memory, area),
                // Keeps the place until the context is made.
                Thing::AioContext(_) => {
                    let kept = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    let flags = kept | libc::MAP_NORESERVE;
                    mmap(start, bytes, libc::PROT_NONE as u32, flags, Arg::from(-1), 0)
                }
                _ => {
                    let fd = plan.object(object)?.into();
                    mmap(start, bytes, access, flags | libc::MAP_SHARED, fd, offset)
                }
            },
        },
    };
    sequence.call(what, call);
    if area.has("dp") {
        // KERNEL(6.11): droppable memory. Before, it is ordinary memory.
        const MAP_DROPPABLE: i32 = 8;
        let flags = flags | MAP_DROPPABLE | libc::MAP_ANONYMOUS;
        let call = mmap(start, bytes, access, flags, Arg::from(-1), 0);
        sequence.call(what, call.lenient());
    }
    advise(sequence, what, area);
    Ok(())
}

/// The flags of mmap(2) for huge pages.
fn huge(page_bytes: u64) -> i32 {
    libc::MAP_HUGETLB | (page_bytes.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT
}

/// Fills a memfd with huge pages, which has no write(2), through a mapping.
pub(super) fn fill_huge(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    file: &MemoryFile,
    (cell, page_bytes): (Cell, u64),
) {
    let length = Call::new(libc::SYS_ftruncate, [cell.into(), file.bytes.into()]);
    sequence.call(what, length);
    if file.runs.is_empty() {
        return;
    }
    let at = plan.shared_end.next_multiple_of(page_bytes);
    plan.shared_end = at.saturating_add(file.bytes);
    // No more huge pages of the host than it had.
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    sequence.call(what, mmap(at, file.bytes, READ_WRITE, flags, cell.into(), 0));
    read(plan, sequence, what, file.runs.iter().map(|run| (at + run.address, run)));
    sequence.call(what, munmap(at, at + file.bytes));
}

/// Attaches memory of System V, over an existing mapping.
fn attach(memory: &SystemVMemory, area: &Area) -> Call {
    let mut flags = libc::SHM_REMAP;
    if area.access & libc::PROT_WRITE as u32 == 0 && !area.has(Area::MAY_WRITE) {
        flags |= libc::SHM_RDONLY;
    }
    if area.access & libc::PROT_EXEC as u32 != 0 {
        flags |= libc::SHM_EXEC;
    }
    let args = [Arg::from(memory.head.id), area.start.into(), Arg::from(flags)];
    Call::new(libc::SYS_shmat, args).returns(area.start)
}

/// Sets flags of madvise(2) and mlock(2).
fn advise(sequence: &mut Sequence, what: &str, area: &Area) {
    const ADVICE: [(&str, i32); 8] = [
        ("dc", libc::MADV_DONTFORK),
        ("dd", libc::MADV_DONTDUMP),
        ("wf", libc::MADV_WIPEONFORK),
        ("hg", libc::MADV_HUGEPAGE),
        ("nh", libc::MADV_NOHUGEPAGE),
        ("mg", libc::MADV_MERGEABLE),
        ("sr", libc::MADV_SEQUENTIAL),
        ("rr", libc::MADV_RANDOM),
    ];
    for (_, advice) in ADVICE.iter().filter(|(flag, _)| area.has(flag)) {
        let args = [area.start.into(), area.bytes().into(), Arg::from(*advice)];
        sequence.call(what, Call::new(libc::SYS_madvise, args));
    }
}

fn protect(sequence: &mut Sequence, pid: u32, area: &Area, is_inherited: bool, has_guards: bool) {
    let what = format!("the access to memory at {:x} of process {pid}", area.start);
    let is_moved = matches!(area.backing, Backing::Shared { .. });
    let access = if is_inherited { READ_WRITE } else { first_access(area) };
    if access != area.access || is_moved {
        // KERNEL(6.18): an anonymous area that has never had a page is not accounted any more when it can no
        // longer be written (mprotect_fixup in mm/mprotect.c). So it has one for a moment.
        let is_emptied = area.runs.is_empty()
            && area.has(Area::ACCOUNTED)
            && area.access & libc::PROT_WRITE as u32 == 0
            && matches!(area.backing, Backing::Anonymous);
        let first_page = |advice: i32| {
            let args = [area.start.into(), PAGE_BYTES.into(), Arg::from(advice)];
            Call::new(libc::SYS_madvise, args).lenient()
        };
        if is_emptied {
            sequence.call(what.clone(), first_page(MADV_POPULATE_WRITE));
        }
        let args = [area.start.into(), area.bytes().into(), area.access.into()];
        sequence.call(what.clone(), Call::new(libc::SYS_mprotect, args));
        if is_emptied {
            sequence.call(what.clone(), first_page(libc::MADV_DONTNEED));
        }
    }
    if area.has("lo") {
        let on_fault = if area.has("lf") { libc::MLOCK_ONFAULT } else { 0 };
        let args = [area.start.into(), area.bytes().into(), on_fault.into()];
        let call = Call::new(libc::SYS_mlock2, args);
        // The area is locked although not all of it can be made present (ENOMEM): a guard, an area without
        // access, which mlockall(2) locks beside the stacks of threads, or a part beyond the end of a file.
        let of_file = matches!(area.backing, Backing::Private { .. } | Backing::Shared { .. });
        let is_partial = has_guards || area.access == 0 || of_file;
        sequence.call(what, if is_partial { call.lenient() } else { call });
    }
}

/// Reads runs of pages to addresses, with as few calls as possible.
pub(super) fn read<'a>(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    runs: impl Iterator<Item = (u64, &'a Run)>,
) {
    let mut pieces: Vec<u64> = Vec::new();
    let (mut from_file, mut first, mut bytes) = (plan.contents_at(0).0, 0, 0);
    let flush = |plan: &mut Plan<'_>,
                 sequence: &mut Sequence,
                 pieces: &mut Vec<u64>,
                 pages: Cell,
                 first,
                 bytes| {
        if bytes == 0 {
            return;
        }
        let iov = plan.builder.numbers(pieces);
        let count = pieces.len() as u64 / 2;
        let args = [pages.into(), iov.into(), count.into(), Arg::Number(first), Arg::Number(0)];
        sequence.call(what, Call::new(libc::SYS_preadv, args).returns(bytes));
        pieces.clear();
    };
    for (address, run) in runs {
        let (mut at, mut left) = (address, run.pages * PAGE_BYTES);
        let mut from = run.first * PAGE_BYTES;
        while left > 0 {
            let (file, place, room) = plan.contents_at(from);
            let is_next = file == from_file && place == first + bytes;
            if !is_next || pieces.len() == PIECES_MAX * 2 || bytes == READ_BYTES_MAX {
                flush(plan, sequence, &mut pieces, from_file, first, bytes);
                (from_file, first, bytes) = (file, place, 0);
            }
            let now = left.min(READ_BYTES_MAX - bytes).min(room);
            if now >= LARGE_BYTES {
                // Where it is no advice, pages are created by the read.
                let args = [at.into(), now.into(), Arg::from(MADV_POPULATE_WRITE)];
                sequence.call(what, Call::new(libc::SYS_madvise, args).lenient());
            }
            pieces.extend([at, now]);
            bytes += now;
            at += now;
            from += now;
            left -= now;
        }
    }
    flush(plan, sequence, &mut pieces, from_file, first, bytes);
}

/// Sets the layout that the kernel shows: arguments, heap, program.
fn layout(plan: &mut Plan<'_>, sequence: &mut Sequence, memory: &Memory) -> Result<()> {
    let layout = &memory.layout;
    let auxv = plan.builder.data(&memory.auxv.0);
    // struct prctl_mm_map.
    let mut map: Vec<u8> = [
        layout.start_code,
        layout.end_code,
        layout.start_data,
        layout.end_data,
        layout.start_brk,
        layout.brk,
        layout.start_stack,
        layout.arg_start,
        layout.arg_end,
        layout.env_start,
        layout.env_end,
        if memory.auxv.0.is_empty() { 0 } else { auxv },
    ]
    .into_iter()
    .flat_map(u64::to_ne_bytes)
    .collect();
    map.extend((memory.auxv.0.len() as u32).to_ne_bytes());
    map.extend((-1i32).to_ne_bytes());
    let length = map.len() as u64;
    let at = match memory.program {
        Some(_) => plan.builder.writable(&map),
        None => plan.builder.data(&map),
    };
    if let Some(program) = memory.program {
        // The descriptor of the program belongs in the structure; a call writes its number there.
        let cell = plan.object(program)?;
        let args = [cell.into(), Arg::from(libc::F_DUPFD_CLOEXEC), plan.above.into()];
        sequence.call_to("the program", at + length - 4, Call::new(libc::SYS_fcntl, args));
    }
    let (set_mm, whole) = (libc::PR_SET_MM, 14); // PR_SET_MM_MAP
    let args = [Arg::from(set_mm), Arg::Number(whole), at.into(), length.into(), Arg::Number(0)];
    sequence.call("the layout of the memory", Call::new(libc::SYS_prctl, args));
    Ok(())
}
