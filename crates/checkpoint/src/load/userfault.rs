//! The userfaultfds of memory that is filled when it is touched ([`super::lazy`]).
//!
//! Each process creates a userfaultfd once its memory is mapped, and waits. The conductor takes it
//! over, registers the areas, and passes it to the process that fills them ([`Sources`]). From then
//! on no process, the restore included, sees a page of them that is not filled.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::{call, pidfd};
use dormouse_record::{Error, Process, Result};

use super::plan::Plan;
use super::restore::Restore;
use super::{memory, stage};
use crate::inject::program::{Arg, Call, Sequence};

/// Descriptors of the address spaces, in the order of [`super::Lazy::processes`].
pub type Sources = Vec<OwnedFd>;

/// A process whose memory is all mapped creates a userfaultfd and waits until it was taken over.
pub(super) fn create(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) {
    let Some(device) = plan.userfaults.device else { return };
    let own = record.memory.and_then(|memory| plan.userfaults.cell_of(memory));
    let memory = record.memory.and_then(|memory| plan.records.memories.get(memory));
    let what = format!("the memory of process {} that comes when it is touched", record.pid);
    if let Some(cell) = own {
        let args = [device.into(), Arg::Number(call::USERFAULTFD_NEW), call::NEW_FLAGS.into()];
        sequence.call_into(what.clone(), cell, Call::new(libc::SYS_ioctl, args));
    }
    sequence.stage(stage::MAPPED);
    if let Some(cell) = own {
        sequence.call(what.clone(), Call::new(libc::SYS_close, [cell.into()]));
        if !memory.is_some_and(|memory| memory.no_huge_pages) {
            sequence.call(what, memory::disable_huge_pages(false));
        }
    }
}

/// Takes over the descriptors and registers the areas; all processes wait. `by_inner` maps ids
/// inside to tasks.
pub(super) fn take(restore: &Restore, by_inner: &HashMap<u32, u32>) -> Result<Sources> {
    let mut sources = Sources::new();
    let parts = restore.lazy.iter().flat_map(|lazy| &lazy.parts);
    for (part, cell) in parts.zip(&restore.lazy_cells) {
        let pid = by_inner.get(&part.pid).copied();
        let pid = pid.ok_or_else(|| Error::Ended(format!("process {} has exited", part.pid)))?;
        let number = restore.program.value(*cell);
        let number = number.map_err(Error::of("find the memory", pid))?;
        let source = pidfd::open(pid)
            .and_then(|pidfd| pidfd::copy_descriptor(&pidfd, number))
            .map_err(|e| Error::Elsewhere(e.to_string()))?;
        call::userfault_begin(source.as_fd()).map_err(Error::of("watch the memory", pid))?;
        for (start, bytes) in &part.areas {
            let registered = call::userfault_register(source.as_fd(), *start, *bytes);
            registered.map_err(Error::of("watch an area of the memory", pid))?;
        }
        sources.push(source);
    }
    Ok(sources)
}
