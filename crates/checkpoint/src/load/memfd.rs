//! Memfds. Order of seals: F_SEAL_WRITE before the file is mapped, because a writable mapping
//! blocks it; F_SEAL_FUTURE_WRITE after, because it leaves existing mappings alone.

use dormouse_record::{MemoryFile, Process, Result, Thing};

use super::plan::Plan;
use super::{deleted, memory};
use crate::inject::program::{Arg, Call, Sequence};

const SEAL_SEAL: u32 = libc::F_SEAL_SEAL as u32;
const SEAL_WRITE: u32 = libc::F_SEAL_WRITE as u32;

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
    }
    deleted::open_all(plan, sequence, &what, index, cell)
}

fn add(file: impl Into<Arg>, seals: u32) -> Call {
    Call::new(libc::SYS_fcntl, [file.into(), Arg::from(libc::F_ADD_SEALS), seals.into()])
}

/// Sets the seals of files that a process is the first to have open for writing. ORDER: all
/// processes have their mappings.
pub(super) fn seal(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) {
    let records = plan.records;
    for (index, object) in records.objects.iter().enumerate() {
        let Thing::MemoryFile(file) = &object.thing else { continue };
        if [0, SEAL_SEAL].contains(&file.seals) || file.seals & SEAL_WRITE != 0 {
            continue;
        }
        let writes = |object: usize| match &records.objects[object].thing {
            Thing::File(open) => {
                let access = open.flags & libc::O_ACCMODE as u32;
                open.deleted == Some(index) && access == libc::O_RDWR as u32
            }
            _ => false,
        };
        let mut all = records.processes.iter().flat_map(|p| {
            p.descriptors.iter().filter(|d| writes(d.object)).map(|d| (p.pid, d.number))
        });
        let Some((pid, number)) = all.next() else { continue };
        if pid == record.pid {
            sequence.call(format!("the seals of '{}'", file.name), add(number, file.seals));
        }
    }
}
