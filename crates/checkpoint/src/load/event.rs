//! eventfd, signalfd, epoll.

use dormouse_record::{Epoll, EpollItem, Event, Process, Result, SignalFd, Table, Thing};

use super::open;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

pub(super) fn event(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    event: &Event,
) -> Result<Cell> {
    let cell = plan.cell();
    let mut flags = event.flags & open::AT_CREATION;
    if event.semaphore {
        flags |= libc::EFD_SEMAPHORE as u32;
    }
    let first = event.count.min(u64::from(u32::MAX));
    let args = [Arg::Number(first), flags.into()];
    sequence.call_into(what, cell, Call::new(libc::SYS_eventfd2, args));
    open::set_later(sequence, what, cell, event.flags);
    if event.count > first {
        // eventfd2(2) takes an initial value of 32 bits; the rest is added by a write.
        let rest = plan.builder.numbers(&[event.count - first]);
        let args = [cell.into(), rest.into(), Arg::Number(8)];
        sequence.call(what, Call::new(libc::SYS_write, args).returns(8));
    }
    Ok(cell)
}

pub(super) fn signal(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    signal: &SignalFd,
) -> Result<Cell> {
    let cell = plan.cell();
    let mask = plan.builder.numbers(&[signal.mask]);
    let flags = signal.flags & open::AT_CREATION;
    let args = [Arg::from(-1), mask.into(), Arg::Number(8), flags.into()];
    sequence.call_into(what, cell, Call::new(libc::SYS_signalfd4, args));
    open::set_later(sequence, what, cell, signal.flags);
    Ok(cell)
}

pub(super) fn epoll(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    epoll: &Epoll,
) -> Result<Cell> {
    let cell = plan.cell();
    // Of the flags epoll_create1(2) takes this one alone.
    let flags = epoll.flags & libc::O_CLOEXEC as u32;
    sequence.call_into(what, cell, Call::new(libc::SYS_epoll_create1, [flags.into()]));
    if epoll.flags & open::SETTABLE as u32 != 0 {
        open::set_flags(sequence, what, cell, epoll.flags);
    }
    Ok(cell)
}

/// Events that an open file of many kinds is ready for at any time. None of their sums is EPOLL_CTL_MOD.
const OFTEN_READY: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP) as u32;

/// Makes the epolls of a table watch their items. An item is identified by file description and
/// number, so both must be in place. A watched signalfd reports the signals of the process that
/// adds it.
pub(super) fn watch(plan: &mut Plan<'_>, sequence: &mut Sequence, table: Table<'_>) -> Result<()> {
    let records = plan.records;
    for (index, object) in records.objects.iter().enumerate() {
        let Thing::Epoll(epoll) = &object.thing else { continue };
        let Some(own) = table.descriptors.iter().find(|d| d.object == index) else { continue };
        let is_whole = epoll.items.iter().all(|item| item.pid == table.task);
        let is_spent = |item: &EpollItem| is_whole && item.is_spent();
        let items = epoll.items.iter().filter(|item| item.pid == table.task);
        let mut items: Vec<&EpollItem> = items.collect();
        // ORDER: spent items first: an event of another item would be taken in place of theirs.
        items.sort_by_key(|item| !is_spent(item));
        for item in items {
            let what = format!(
                "descriptor {} of process {} (watched by {})",
                item.number, table.task, own.number
            );
            let (own, number) = (Arg::from(own.number), Arg::from(item.number));
            let event = plan.builder.data(&event_of(item.events, item.data));
            let change = |op: Arg, event: u64| {
                Call::new(libc::SYS_epoll_ctl, [own, op, number, event.into()])
            };
            if is_spent(item) {
                let is_empty = is_of_empty_pipe(plan, table, item);
                spend(plan, sequence, &what, (item, is_empty), (own, &change, event))?;
            } else {
                sequence.call(what, change(libc::EPOLL_CTL_ADD.into(), event));
            }
        }
    }
    Ok(())
}

/// Adds an item whose EPOLLONESHOT has had its event. EPOLL_CTL_ADD and EPOLL_CTL_MOD also arm an item without
/// events, for EPOLLERR and EPOLLHUP; only an event disarms it (epoll_ctl(2)). So the item is added for more events,
/// and the first of them is taken. An empty pipe becomes ready by a byte, which is taken out again.
///
/// LIMIT: another file that is not ready for any of them leaves its item armed for EPOLLERR and EPOLLHUP.
fn spend(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    (item, is_empty): (&EpollItem, bool),
    (own, change, unready): (Arg, &dyn Fn(Arg, u64) -> Call, u64),
) -> Result<()> {
    let more = plan.builder.data(&event_of(item.events | OFTEN_READY, item.data));
    sequence.call(what, change(libc::EPOLL_CTL_ADD.into(), more));
    let byte = plan.cell();
    let moved = |call, file| Call::new(call, [file, Arg::At(byte), Arg::Number(1)]).returns(1);
    let writer = match is_empty {
        true => {
            let flags = (libc::O_WRONLY | libc::O_NONBLOCK) as u32;
            let path = format!("/proc/self/fd/{}", item.number);
            Some(open::own_path(plan, sequence, what, &path, flags)?)
        }
        false => None,
    };
    if let Some(writer) = writer {
        sequence.call(what, moved(libc::SYS_write, writer.into()));
    }
    // The event is written over the operation. Of those events none is EPOLL_CTL_MOD, and no other operation
    // succeeds: the item is there (EEXIST), or the operation is unknown (EINVAL).
    let operation = plan.builder.cell_of(libc::EPOLL_CTL_MOD as u32);
    let _data = (plan.cell(), plan.cell()); // struct epoll_event is packed: 12 bytes
    let args = [own, Arg::At(operation), Arg::Number(1), Arg::Number(0)];
    sequence.call(what, Call::new(libc::SYS_epoll_wait, args));
    sequence.call(what, change(operation.into(), unready).lenient());
    if let Some(writer) = writer {
        sequence.call(what, moved(libc::SYS_read, item.number.into()));
        sequence.call(what, Call::new(libc::SYS_close, [writer.into()]));
    }
    Ok(())
}

/// Whether an item is of the read end of an empty pipe without a name, of a process that has the container's /proc.
fn is_of_empty_pipe(plan: &Plan<'_>, table: Table<'_>, item: &EpollItem) -> bool {
    let has_task = |process: &&Process| process.threads.iter().any(|one| one.tid == table.task);
    let process = plan.records.processes.iter().find(has_task);
    if process.is_none_or(|process| process.mounts.is_some() || process.root.is_some()) {
        return false;
    }
    let thing = |index: usize| plan.records.objects.get(index).map(|object| &object.thing);
    let found = table.descriptors.iter().find(|one| one.number == item.number);
    let Some(Thing::PipeEnd(end)) = found.and_then(|found| thing(found.object)) else {
        return false;
    };
    !end.writes
        && matches!(thing(end.pipe), Some(Thing::Pipe(pipe)) if pipe.path.is_none() && pipe.content.0.is_empty())
}

/// struct epoll_event, which is packed: 4 bytes of events, 8 of data.
fn event_of(events: u32, data: u64) -> Vec<u8> {
    [&events.to_ne_bytes()[..], &data.to_ne_bytes()].concat()
}
