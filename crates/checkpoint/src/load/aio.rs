//! Contexts of asynchronous I/O (io_setup(2)): made by the process that has them, in the order of their places in
//! the table of its address space, and moved to their addresses, which are their ids (mremap(2), KERNEL(3.19)).
//!
//! The kernel keeps the place of the next event itself, and the number of events that are not collected yet. Both
//! are right again after as many requests as there have been events since the last begin of the ring: requests
//! that read nothing, and are finished when io_submit(2) returns. The ring then receives its recorded contents.

use std::collections::HashMap;

use dormouse_kernel::{cpu, proc};
use dormouse_record::{AioContext, Area, Backing, Error, Memory, Records, Result, Thing};

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

/// Requests of one io_submit(2) at most.
const REQUESTS_MAX: u32 = 1024;

/// Bytes of a request (`struct iocb`), and where its descriptor is.
const REQUEST_BYTES: usize = 64;
const DESCRIPTOR_AT: u64 = 20;

/// Bytes of an event (`struct io_event`).
const EVENT_BYTES: usize = 32;

/// The contexts of an address space, each with the address of its ring.
pub(super) fn of<'r>(records: &'r Records, memory: &Memory) -> Vec<(u64, &'r AioContext)> {
    let ring = |area: &Area| match area.backing {
        Backing::Shared { object, .. } => match &records.objects.get(object)?.thing {
            Thing::AioContext(context) => Some((area.start, context)),
            _ => None,
        },
        _ => None,
    };
    memory.areas.iter().filter_map(ring).collect()
}

/// The name of a context in messages.
pub(super) fn name(start: u64, pid: u32) -> String {
    format!("the context of asynchronous I/O at {start:x} of process {pid}")
}

/// Makes the contexts of a process. ORDER: all its memory is mapped, with something else at the places of the
/// rings: the kernel finds a place for each, and none that is needed.
pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    pid: u32,
    memory: &Memory,
) -> Result<()> {
    let contexts = of(plan.records, memory);
    let by_slot: HashMap<u32, (u64, &AioContext)> =
        contexts.iter().map(|(start, context)| (context.slot, (*start, *context))).collect();
    let Some(last) = by_slot.keys().max() else { return Ok(()) };
    let mut unused = Vec::new();
    for slot in 0..=*last {
        // The kernel writes the id there.
        let id = plan.builder.writable_numbers(&[0]);
        let Some((start, context)) = by_slot.get(&slot) else {
            let what = format!("a place of asynchronous I/O of process {pid}");
            sequence.call(what.clone(), set_up(1, id));
            unused.push((what, id));
            continue;
        };
        let what = name(*start, pid);
        sequence.call(what.clone(), set_up(requests(context, &what)?, id));
        let bytes = context.ring_bytes();
        let kind = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let args = [Arg::Wide(id), bytes.into(), bytes.into(), Arg::from(kind), (*start).into()];
        sequence.call(what, Call::new(libc::SYS_mremap, args).returns(*start));
    }
    for (what, id) in unused {
        sequence.call(what, Call::new(libc::SYS_io_destroy, [Arg::Wide(id)]));
    }
    advance(plan, sequence, pid, &contexts);
    Ok(())
}

fn set_up(requests: u32, id: u64) -> Call {
    Call::new(libc::SYS_io_setup, [requests.into(), id.into()])
}

/// The number of requests for which this kernel makes a ring of the same length.
fn requests(context: &AioContext, what: &str) -> Result<u32> {
    let cpus = cpu::possible().map_err(Error::file("cannot read", cpu::POSSIBLE))?;
    context.requests_here(cpus).ok_or_else(|| {
        let least = AioContext::events_for(1, cpus);
        Error::Elsewhere(format!(
            "{what} has {} places for events, and this kernel, for {cpus} possible CPUs, makes no fewer \
             than {least}",
            context.events
        ))
    })
}

/// The error for a context that exceeds the limit of the host.
pub(super) fn exhausted(what: &str) -> Error {
    let read = |name: &str| proc::whole_text(format!("/proc/sys/fs/{name}")).unwrap_or_default();
    let (used, limit) = (read("aio-nr"), read("aio-max-nr"));
    Error::Elsewhere(format!(
        "{what} needs more asynchronous I/O than this host has left (/proc/sys/fs/aio-max-nr: {} of {} \
         requests in use): raise the limit, or stop other users",
        used.trim(),
        limit.trim()
    ))
}

/// Brings the contexts to their recorded places of events.
fn advance(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    pid: u32,
    contexts: &[(u64, &AioContext)],
) {
    let is_used = |context: &AioContext| (context.head, context.tail) != (0, 0);
    if !contexts.iter().any(|(_, context)| is_used(context)) {
        return;
    }
    let what = format!("the requests of asynchronous I/O of process {pid}");
    // Zeros read nothing (IOCB_CMD_PREAD) at the begin of an empty file.
    let request = plan.builder.writable(&[0; REQUEST_BYTES]);
    let requests = plan.builder.numbers(&[request; REQUESTS_MAX as usize]);
    let events = plan.builder.writable(&[0; EVENT_BYTES * REQUESTS_MAX as usize]);
    let file = plan.cell();
    let name = plan.builder.text(b"nothing");
    let made = Call::new(libc::SYS_memfd_create, [name.into(), libc::MFD_CLOEXEC.into()]);
    sequence.call_into(what.clone(), file, made);
    let args = [file.into(), Arg::from(libc::F_DUPFD_CLOEXEC), plan.above.into()];
    let copy = Call::new(libc::SYS_fcntl, args);
    sequence.call_to(what.clone(), request + DESCRIPTOR_AT, copy);
    sequence.call(what, Call::new(libc::SYS_close, [file.into()]));
    for (start, context) in contexts {
        let what = self::name(*start, pid);
        let submit = |sequence: &mut Sequence, mut left: u32, most: u32, collects: bool| {
            while left > 0 {
                let count = left.min(most).min(REQUESTS_MAX);
                let args = [(*start).into(), count.into(), requests.into()];
                let call = Call::new(libc::SYS_io_submit, args).returns(count.into());
                sequence.call(what.clone(), call);
                if collects {
                    let args = [(*start).into(), count.into(), count.into(), events.into()];
                    let call = Call::new(libc::SYS_io_getevents, args).returns(count.into());
                    sequence.call(what.clone(), call);
                }
                left -= count;
            }
        };
        submit(sequence, context.head, context.uncollected_max(), true);
        submit(sequence, context.uncollected(), REQUESTS_MAX, false);
    }
}
