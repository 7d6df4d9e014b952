//! Memfds. Order of seals: F_SEAL_WRITE before the file is mapped, because a writable mapping
//! blocks it; F_SEAL_FUTURE_WRITE after, because it leaves existing mappings alone.
//!
//! LIMIT: F_SEAL_FUTURE_WRITE of a file that no process has open for writing and that several processes map shared
//! is lost.

use dormouse_record::{Backing, MemoryFile, Process, Records, Result, Thing};

use super::plan::Plan;
use super::{deleted, memory};
use crate::inject::program::{Arg, Call, Sequence};

const SEAL_SEAL: u32 = libc::F_SEAL_SEAL as u32;
const SEAL_WRITE: u32 = libc::F_SEAL_WRITE as u32;
const SEAL_FUTURE_WRITE: u32 = libc::F_SEAL_FUTURE_WRITE as u32;

/// How often a seal is tried before a failure counts.
const SEAL_AGAIN: u32 = 4;
/// KERNEL(6.3): whether it may be executed is set at creation.
const MFD_EXEC: u32 = 0x10;
/// The file has huge pages; their size is encoded as for mmap(2).
const MFD_HUGETLB: u32 = 4;

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    file: &MemoryFile,
) -> Result<()> {
    let what = format!("{what} '{}'", file.name);
    let cell = plan.cell();
    let name = plan.builder.text(file.name.as_bytes());
    let can_be_sealed = file.seals != SEAL_SEAL;
    let sealing = if can_be_sealed { libc::MFD_ALLOW_SEALING } else { 0 };
    let huge = file
        .huge_page_bytes
        .map_or(0, |bytes| MFD_HUGETLB | bytes.trailing_zeros() << libc::MAP_HUGE_SHIFT);
    let flags = libc::MFD_CLOEXEC | sealing | MFD_EXEC | huge;
    let create = Call::new(libc::SYS_memfd_create, [name.into(), flags.into()]);
    sequence.call_into(what.clone(), cell, create);
    match file.huge_page_bytes {
        None => deleted::fill(plan, sequence, &what, cell, file.bytes, &file.runs),
        Some(bytes) => memory::fill_huge(plan, sequence, &what, file, (cell, bytes)),
    }
    let owner = [cell.into(), file.uid.into(), file.gid.into()];
    sequence.call(what.clone(), Call::new(libc::SYS_fchown, owner));
    let mode = [cell.into(), Arg::from(file.mode & 0o777)];
    sequence.call(what.clone(), Call::new(libc::SYS_fchmod, mode));
    if file.seals & SEAL_WRITE != 0 {
        // The kernel waits until no other reference to a page exists, but for 0.15 s at most
        // (EBUSY).
        for _ in 0..SEAL_AGAIN {
            sequence.call(what.clone(), add(cell, file.seals & !SEAL_SEAL).lenient());
        }
        sequence.call(what.clone(), add(cell, file.seals));
    } else if is_sealed_later(file) && sealer(plan.records, index).is_none() {
        let now = match mappers(plan.records, index).len() {
            _ if file.seals & SEAL_FUTURE_WRITE == 0 => file.seals,
            0 => file.seals,
            1 => 0, // by `seal_mapped`
            _ => file.seals & !(SEAL_FUTURE_WRITE | SEAL_SEAL),
        };
        sequence.call(what.clone(), add(cell, now));
    }
    deleted::open_all(plan, sequence, &what, index, cell)
}

fn add(file: impl Into<Arg>, seals: u32) -> Call {
    Call::new(libc::SYS_fcntl, [file.into(), Arg::from(libc::F_ADD_SEALS), seals.into()])
}

/// Whether a file has seals that are set after it is made.
fn is_sealed_later(file: &MemoryFile) -> bool {
    ![0, SEAL_SEAL].contains(&file.seals) && file.seals & SEAL_WRITE == 0
}

/// Whether an object is the file `index`, open for writing.
fn writes(records: &Records, object: usize, index: usize) -> bool {
    match &records.objects[object].thing {
        Thing::File(open) => {
            let access = open.flags & libc::O_ACCMODE as u32;
            open.deleted == Some(index) && access == libc::O_RDWR as u32
        }
        _ => false,
    }
}

/// The first task with a table that has a file open for writing, and the number of the descriptor.
fn sealer(records: &Records, index: usize) -> Option<(u32, u32)> {
    records.tables().find_map(|table| {
        let mut all = table.descriptors.iter();
        let open = all.find(|one| writes(records, one.object, index))?;
        Some((table.task, open.number))
    })
}

/// The processes with a shared mapping of a file that is open for writing.
fn mappers(records: &Records, index: usize) -> Vec<u32> {
    let maps = |process: &&Process| {
        let areas = process.memory.map_or(&[][..], |n| &records.memories[n].areas);
        areas.iter().any(|area| match area.backing {
            Backing::Shared { object, .. } => writes(records, object, index),
            _ => false,
        })
    };
    records.processes.iter().filter(maps).map(|process| process.pid).collect()
}

/// The memfds with seals that are set after they are made.
fn sealed_later(records: &Records) -> impl Iterator<Item = (usize, &MemoryFile)> {
    let all = records.objects.iter().enumerate();
    all.filter_map(|(index, object)| match &object.thing {
        Thing::MemoryFile(file) if is_sealed_later(file) => Some((index, file)),
        _ => None,
    })
}

/// Sets the seals of files that a task is the first to have open for writing. ORDER: all
/// processes have their mappings.
pub(super) fn seal(plan: &Plan<'_>, sequence: &mut Sequence, task: u32) {
    for (index, file) in sealed_later(plan.records) {
        let sealer = sealer(plan.records, index).filter(|(id, _)| *id == task);
        if let Some((_, number)) = sealer {
            sequence.call(format!("the seals of '{}'", file.name), add(number, file.seals));
        }
    }
}

/// Sets the seals of files that this process alone maps, and that no process has open for writing afterwards.
/// ORDER: the process has its mappings, and the descriptors by which it made them.
pub(super) fn seal_mapped(
    plan: &Plan<'_>,
    sequence: &mut Sequence,
    record: &Process,
) -> Result<()> {
    let records = plan.records;
    for (index, file) in sealed_later(records) {
        let is_open = file.seals & SEAL_FUTURE_WRITE == 0 || sealer(records, index).is_some();
        if is_open || mappers(records, index) != [record.pid] {
            continue;
        }
        let mapped = (0..records.objects.len()).find(|object| writes(records, *object, index));
        if let Some(object) = mapped {
            let what = format!("the seals of '{}'", file.name);
            sequence.call(what, add(plan.object(object)?, file.seals));
        }
    }
    Ok(())
}
